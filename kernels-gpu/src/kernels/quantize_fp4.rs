//! Queries, keys and values to NVFP4 tiles: E2M1 elements, an E4M3 scale for 16 (of Q and K along the channels, of V along
//! the tokens), an FP32 scale a head. The codes are those of [`nvfp4`], which the CPU backend rounds with.
//!
//! The scale of a head comes from its largest magnitude, so that each of the three is read twice: `fp4_amax_*` finds it in
//! what is quantized (Q and K rotated, K centred, rows that are not finite left out), for V `v_stats_fp4_*` of
//! [`smooth_v`](super::smooth_v) does.
//!
//! Tensors and strides are those of [`input`](super::input); heads are numbered batch * heads + head, and *blocks* is
//! ceil(`kv_tokens` / 128). The grids are in x.
//!
//! # `fp4_amax_q_{bf16, f16}`: 2 ceil(`q_tokens` / 128) * batch * `q_heads` blocks of 256 threads
//! | name | type | what |
//! |---|---|---|
//! | `q` | pointer | queries |
//! | `cos`, `sin` | f32 `[q_tokens, head_dim / 2]`, or null | RoPE |
//! | `amax` | u32 `[batch, q_heads]`, zeroed by the caller | receives the largest magnitude, as f32 bits |
//! | `q_batch`, `q_head`, `q_token` | i64 | strides of `q` |
//! | `q_tokens`, `q_heads`, `head_dim` | u32 | sizes |
//! | `rotation` | u32 | channels of the Hadamard rotation: 0, or a power of two from 16 to 128, at least `head_dim` |
//!
//! # `quantize_q_fp4_from_{bf16, f16}`: as many blocks
//! | name | type | what |
//! |---|---|---|
//! | `q`, `cos`, `sin` | as above | |
//! | `k_mean` | f32 `[batch, kv_heads, 128]`, or null | the token mean of K |
//! | `amax` | as above | of `fp4_amax_q` |
//! | `tiles` | pointer, 16-byte aligned | receives the Q tiles of [`tiles`]; rows from `q_tokens` and channels from `head_dim` on become zeros |
//! | `factor` | f32 `[batch, q_heads]` | receives what turns products of codes into code units, but for the scale of K: the head's scale times `scale` 8 log2 e |
//! | `lse_shift` | f32 `[batch, q_heads, q_tokens]`, or null | receives `scale` q . k_mean, q after RoPE, summed as [`Part::dot`]; needs `k_mean` |
//! | strides | as above | |
//! | `q_tokens`, `q_heads`, `kv_heads`, `head_dim`, `rotation` | u32 | as above |
//! | `scale` | f32 | factor on the scores |
//!
//! A row with a NaN or an infinity gets NaN scales.
//!
//! # `fp4_amax_k_{bf16, f16}`: 2 blocks * batch * `kv_heads` blocks of 256 threads
//! | name | type | what |
//! |---|---|---|
//! | `k` | pointer | keys |
//! | `cos`, `sin` | f32 `[kv_tokens, head_dim / 2]`, or null | RoPE, by token |
//! | `mean` | f32 `[batch, kv_heads, 128]`, or null | subtracted after RoPE: the token mean of [`stats`](super::stats) |
//! | `kv_lens` | u32 `[batch]`, or null | keys that count |
//! | `amax` | u32 `[batch, kv_heads]`, zeroed by the caller | receives the largest magnitude, as f32 bits |
//! | `k_batch`, `k_head`, `k_token` | i64 | strides of `k` |
//! | `kv_tokens`, `kv_heads`, `head_dim`, `rotation` | u32 | as above |
//!
//! # `quantize_k_fp4_from_{bf16, f16}`: as many blocks
//! | name | type | what |
//! |---|---|---|
//! | `k` | as above | |
//! | `order` | u32 `[batch, kv_heads, kv_tokens]`, or null | position -> token, for the keys that count; null is the sequence |
//! | `cos`, `sin`, `mean`, `kv_lens`, `amax` | as above | |
//! | `tiles` | pointer, 16-byte aligned | receives the K tiles of [`tiles`]; keys that do not count become zeros |
//! | `scale` | f32 `[batch, kv_heads]` | receives the head's scale |
//! | strides and sizes | as above | |
//!
//! # `fp4_v_scale`: one block of 128 threads per (batch, kv head)
//! | name | type | what |
//! |---|---|---|
//! | `amax` | u32 `[batch, kv_heads, 2, 128]` | of `v_stats_fp4` |
//! | `tensor` | f32 `[batch, kv_heads]` | receives the head's scale |
//! | `scale` | f32 `[batch, kv_heads, 128]` | receives ones: what the attention kernels multiply the channels of the output with |
//!
//! # `smooth_v_fp4_{bf16, f16}`: blocks * batch * `kv_heads` blocks of 128 threads
//! | name | type | what |
//! |---|---|---|
//! | `v`, `order`, `kv_lens` | as of [`smooth_v`](super::smooth_v) | |
//! | `means` | f32 `[batch, kv_heads, blocks, 128]`, or null | the block means of `v_stats_fp4` |
//! | `tensor` | as above | |
//! | `tiles` | pointer, 16-byte aligned | receives the V^T tiles of [`tiles`], the means (rounded to f16, not scaled; zeros without `means`) with them; tokens that do not count become zeros |
//! | strides and sizes | as of `smooth_v` | |
//!
//! What keys and values that are not finite become is not specified: `k_stats` and `v_stats_fp4` report them, and the head's
//! output is NaN.

use super::input::{Bf16, CHANNELS, CHUNK, Element, F16, Head, has_nonfinite, largest};
use super::quantize_k::Keys;
use super::rows::{Divisor, LANES, Part};
use super::smooth_v::{Gathered, Values, stored_mean};
use super::tiles::{
    self, FP4_ROW, FP4_SCALES, HEAD_DIM, K_FP4_BYTES, KEYS, Q_FP4_BYTES, ROWS, V_FP4_BYTES, V_FP4_MEANS,
};
use crate::formats::{e2m1, e4m3, nvfp4};
use crate::layout::TOKEN_GROUP;
use crate::numerics::units;
use crate::ptx::collective::{shuffle_xor, sync_threads, warp_max_u32};
use crate::ptx::memory::max_global_u32;
use crate::ptx::shared;
use crate::ptx::special::{block_idx_x, thread_idx_x};
use crate::ptx::stream::store_v2;

crate::ptx::shared_symbol!(
    /// Of smooth_v_fp4: the mean of every channel as it is stored.
    fn means_shared, "vc_smooth_v_fp4", 16, 512
);

/// Elements that share a scale, to be quantized.
struct Block {
    /// The scale's byte.
    byte: u8,
    /// What an element of 1 stands for.
    unit: f32,
    divisor: Divisor,
}

impl Block {
    /// Of values up to `amax` in a tensor of scale `tensor`.
    #[inline(always)]
    fn new(amax: f32, tensor: f32) -> Self {
        let byte = nvfp4::block_scale(amax, tensor);
        let unit = e4m3::decode(byte) * tensor;
        Self { byte, unit, divisor: Divisor::new(unit) }
    }

    /// Eight elements, the first in the lowest nibble.
    #[inline(always)]
    fn word(&self, x: &[f32; 8]) -> u32 {
        let mut word = 0;
        for (i, &x) in x.iter().enumerate() {
            // As `nvfp4` has it: 0 where the scale is 0, so that no 0 / 0 arises.
            let x = if self.unit == 0.0 { 0.0 } else { self.divisor.divide(x) };
            word |= (e2m1::encode(x) as u32) << (4 * i);
        }
        word
    }
}

/// The largest magnitude, as bits.
#[inline(always)]
fn amax_bits(x: &[f32]) -> u32 {
    // Floats that are not negative order as their bits do.
    x.iter().fold(0, |amax, x| amax.max(x.to_bits() & 0x7fff_ffff))
}

/// Writes elements and scales of a row of a tile of `rows`; NaN scales if it is `broken`.
#[inline(always)]
unsafe fn store_row(part: &Part, tensor: f32, tile: *mut u8, rows: usize, row: usize, broken: bool) {
    for (i, x) in part.x.as_chunks().0.iter().enumerate() {
        let (chunk, own) = (part.chunk(i) as usize, amax_bits(x));
        // SAFETY: the whole warp is here; the row lies in the tile. Two lanes hold the 16 channels of a scale.
        unsafe {
            let amax = own.max(shuffle_xor::<1>(own));
            let block = Block::new(f32::from_bits(amax), tensor);
            *tile.add(tiles::swizzle_64(row, chunk * 4)).cast::<u32>() = block.word(x);
            if part.lane % 2 == 0 {
                let at = rows * FP4_ROW + row * FP4_SCALES + chunk / 2;
                *tile.add(at) = if broken { e4m3::NAN } else { block.byte };
            }
        }
    }
}

/// Raises a head's largest magnitude by those of a warp.
#[inline(always)]
unsafe fn raise_amax(part: &Part, amax: *mut u32) {
    // SAFETY: the whole warp is here; the word is the caller's.
    unsafe {
        let largest = warp_max_u32(amax_bits(&part.x));
        if thread_idx_x() % 32 == 0 {
            max_global_u32(amax, largest);
        }
    }
}

/// Queries, and what becomes of them before they are quantized.
struct Queries {
    q: *const u8,
    cos: *const f32,
    sin: *const f32,
    strides: [i64; 3],
    q_tokens: u32,
    q_heads: u32,
    head_dim: u32,
    rotation: u32,
}

/// What a thread has of a row of Q or K.
struct Row {
    part: Part,
    /// Whether a value is not finite; the part is zeros then.
    broken: bool,
    /// q . k_mean.
    shift: f32,
}

impl Queries {
    /// Tiles of a head.
    #[inline(always)]
    fn tiles(&self) -> u32 {
        2 * self.q_tokens.div_ceil(2 * ROWS as u32)
    }

    /// The thread's row of a tile; `k_mean` of its kv head, or null.
    #[inline(always)]
    unsafe fn row<E: Element>(&self, index: u32, token: u32, k_mean: *const f32) -> Row {
        let live = token < self.q_tokens;
        let head = Head::new(self.q, self.strides, index / self.q_heads, index % self.q_heads, self.head_dim);
        let lane = thread_idx_x() % LANES;
        // SAFETY: rows below q_tokens are read; warps stay together.
        unsafe {
            let raw = Part::load(&head, token, lane, live);
            let mut broken = has_nonfinite::<E>(raw.iter().fold(0, largest::<E>)) as u32;
            broken |= shuffle_xor::<1>(broken);
            broken |= shuffle_xor::<2>(broken);
            let mut part = Part::unpack::<E>(&raw, lane);
            if live {
                part.turn(self.cos, self.sin, token, &head);
            }
            let shift = if k_mean.is_null() { 0.0 } else { part.dot(k_mean) };
            if broken != 0 {
                part.x = [0.0; 32];
            }
            part.rotate(self.rotation);
            Row { part, broken: broken != 0, shift }
        }
    }

    #[inline(always)]
    unsafe fn amax<E: Element>(&self, amax: *mut u32) {
        let (index, tile) = (block_idx_x() / self.tiles(), block_idx_x() % self.tiles());
        let token = tile * ROWS as u32 + thread_idx_x() / LANES;
        // SAFETY: the entry's contract.
        unsafe { raise_amax(&self.row::<E>(index, token, core::ptr::null()).part, amax.add(index as usize)) }
    }

    #[inline(always)]
    unsafe fn quantize<E: Element>(&self, k_mean: *const f32, kv_heads: u32, scale: f32, to: &QueryOut) {
        let (index, tile) = (block_idx_x() / self.tiles(), block_idx_x() % self.tiles());
        let row = thread_idx_x() / LANES;
        let token = tile * ROWS as u32 + row;
        let (batch, q_head) = (index / self.q_heads, index % self.q_heads);
        let kv_head = (batch * kv_heads + q_head / (self.q_heads / kv_heads)) as usize;
        // SAFETY: the entry's contract; rows of the block's own tile, a factor a head, a shift a row.
        unsafe {
            let mean = if to.lse_shift.is_null() { core::ptr::null() } else { k_mean.add(kv_head * 128) };
            let found = self.row::<E>(index, token, mean);
            let tensor = nvfp4::tensor_scale(f32::from_bits(*to.amax.add(index as usize)));
            let tile_at = to.tiles.add(block_idx_x() as usize * Q_FP4_BYTES);
            store_row(&found.part, tensor, tile_at, ROWS, row as usize, found.broken);
            if tile == 0 && thread_idx_x() == 0 {
                *to.factor.add(index as usize) = tensor * (scale * units::PER_NAT);
            }
            if !to.lse_shift.is_null() && token < self.q_tokens && found.part.lane == 0 {
                let at = index as usize * self.q_tokens as usize + token as usize;
                *to.lse_shift.add(at) = scale * found.shift;
            }
        }
    }
}

/// What quantizing queries reads of their first pass, and where it writes.
struct QueryOut {
    amax: *const u32,
    tiles: *mut u8,
    factor: *mut f32,
    lse_shift: *mut f32,
}

impl Keys {
    /// The head of the block, and the position of the thread's key.
    #[inline(always)]
    fn place(&self) -> (u32, u32) {
        let halves = 2 * self.kv_tokens.div_ceil(KEYS as u32);
        let (index, half) = (block_idx_x() / halves, block_idx_x() % halves);
        (index, half * (KEYS as u32 / 2) + thread_idx_x() / LANES)
    }

    #[inline(always)]
    unsafe fn amax<E: Element>(&self, amax: *mut u32) {
        let (index, position) = self.place();
        // SAFETY: the entry's contract.
        unsafe { raise_amax(&self.row::<E>(index, position), amax.add(index as usize)) }
    }

    #[inline(always)]
    unsafe fn quantize<E: Element>(&self, amax: *const u32, to: *mut u8, scale: *mut f32) {
        let (index, position) = self.place();
        // SAFETY: the entry's contract; rows of the head's own tile, a scale a head.
        unsafe {
            let part = self.row::<E>(index, position);
            let tensor = nvfp4::tensor_scale(f32::from_bits(*amax.add(index as usize)));
            let tile = to.add(block_idx_x() as usize / 2 * K_FP4_BYTES);
            store_row(&part, tensor, tile, KEYS, tiles::key_row(position as usize % KEYS), false);
            if position == 0 && thread_idx_x() == 0 {
                *scale.add(index as usize) = tensor;
            }
        }
    }
}

/// Values to tiles.
#[inline(always)]
unsafe fn smooth<E: Element>(values: &Values, means: *const f32, tensor: *const f32, to: *mut u8) {
    let blocks = values.blocks();
    let (index, block) = (block_idx_x() / blocks, block_idx_x() % blocks);
    // SAFETY: tokens that count are read, a tile of this block's own written; the block stays together.
    unsafe {
        let (head, order, valid) = values.head(index);
        let count = valid.saturating_sub(block * KEYS as u32).min(KEYS as u32);
        let Gathered { chunk, first, raw } = Gathered::load(&head, order, block, count);
        let group = first / TOKEN_GROUP as u32;

        let tile = to.add(block_idx_x() as usize * V_FP4_BYTES);
        let channel = thread_idx_x();
        let (mut bits, mut stored) = (0, 0.0);
        if !means.is_null() && count > 0 {
            (bits, stored) = stored_mean(*means.add((block_idx_x() * CHANNELS + channel) as usize));
        }
        *tile.add(V_FP4_MEANS + channel as usize * 2).cast::<u16>() = bits;
        shared::store_u32(means_shared().add(channel * 4), stored.to_bits());
        sync_threads();

        let tensor = *tensor.add(index as usize);
        for i in 0..CHUNK as usize {
            let channel = (chunk * CHUNK) as usize + i;
            let mean = f32::from_bits(shared::load_u32(means_shared().add(channel as u32 * 4)));
            let mut x = [0.0; TOKEN_GROUP];
            for (token, x) in x.iter_mut().enumerate() {
                let residual = E::unpack(raw[token][i / 2])[i % 2] - mean;
                *x = if first + (token as u32) < count { residual } else { 0.0 };
            }
            let quantized = Block::new(f32::from_bits(amax_bits(&x)), tensor);
            let words = [quantized.word(&x.as_chunks().0[0]), quantized.word(&x.as_chunks().0[1])];
            store_v2(tile.add(tiles::swizzle_64(channel, group as usize * 8)), words);
            *tile.add(HEAD_DIM * FP4_ROW + channel * FP4_SCALES + group as usize) = quantized.byte;
        }
    }
}

macro_rules! entries {
    ($element:ty; $amax_q:ident $quantize_q:ident $amax_k:ident $quantize_k:ident $smooth_v:ident) => {
        kernel! {
        #[doc = concat!("The largest magnitude of every head of [`", stringify!($element), "`] queries.")]
        ///
        /// # Safety
        /// Parameters and launch as the module says.
        pub unsafe fn $amax_q(
            q: *const u8,
            cos: *const f32,
            sin: *const f32,
            amax: *mut u32,
            q_batch: i64,
            q_head: i64,
            q_token: i64,
            q_tokens: u32,
            q_heads: u32,
            head_dim: u32,
            rotation: u32,
        ) {
            let strides = [q_batch, q_head, q_token];
            let queries = Queries { q, cos, sin, strides, q_tokens, q_heads, head_dim, rotation };
            // SAFETY: the entry's contract.
            unsafe { queries.amax::<$element>(amax) }
        }
        }

        kernel! {
        #[doc = concat!("[`", stringify!($element), "`] queries to NVFP4 tiles.")]
        ///
        /// # Safety
        /// Parameters and launch as the module says.
        pub unsafe fn $quantize_q(
            q: *const u8,
            cos: *const f32,
            sin: *const f32,
            k_mean: *const f32,
            amax: *const u32,
            tiles: *mut u8,
            factor: *mut f32,
            lse_shift: *mut f32,
            q_batch: i64,
            q_head: i64,
            q_token: i64,
            q_tokens: u32,
            q_heads: u32,
            kv_heads: u32,
            head_dim: u32,
            rotation: u32,
            scale: f32,
        ) {
            let strides = [q_batch, q_head, q_token];
            let queries = Queries { q, cos, sin, strides, q_tokens, q_heads, head_dim, rotation };
            let to = QueryOut { amax, tiles, factor, lse_shift };
            // SAFETY: the entry's contract.
            unsafe { queries.quantize::<$element>(k_mean, kv_heads, scale, &to) }
        }
        }

        kernel! {
        #[doc = concat!("The largest magnitude of every head of [`", stringify!($element), "`] keys.")]
        ///
        /// # Safety
        /// Parameters and launch as the module says.
        pub unsafe fn $amax_k(
            k: *const u8,
            cos: *const f32,
            sin: *const f32,
            mean: *const f32,
            kv_lens: *const u32,
            amax: *mut u32,
            k_batch: i64,
            k_head: i64,
            k_token: i64,
            kv_tokens: u32,
            kv_heads: u32,
            head_dim: u32,
            rotation: u32,
        ) {
            let (strides, order) = ([k_batch, k_head, k_token], core::ptr::null());
            let keys = Keys { k, order, cos, sin, mean, kv_lens, strides, kv_tokens, kv_heads, head_dim, rotation };
            // SAFETY: the entry's contract; the largest magnitude does not ask for an order.
            unsafe { keys.amax::<$element>(amax) }
        }
        }

        kernel! {
        #[doc = concat!("[`", stringify!($element), "`] keys to NVFP4 tiles.")]
        ///
        /// # Safety
        /// Parameters and launch as the module says.
        pub unsafe fn $quantize_k(
            k: *const u8,
            order: *const u32,
            cos: *const f32,
            sin: *const f32,
            mean: *const f32,
            kv_lens: *const u32,
            amax: *const u32,
            tiles: *mut u8,
            scale: *mut f32,
            k_batch: i64,
            k_head: i64,
            k_token: i64,
            kv_tokens: u32,
            kv_heads: u32,
            head_dim: u32,
            rotation: u32,
        ) {
            let strides = [k_batch, k_head, k_token];
            let keys = Keys { k, order, cos, sin, mean, kv_lens, strides, kv_tokens, kv_heads, head_dim, rotation };
            // SAFETY: the entry's contract.
            unsafe { keys.quantize::<$element>(amax, tiles, scale) }
        }
        }

        kernel! {
        #[doc = concat!("Residuals of [`", stringify!($element), "`] values, and their block means, to NVFP4 tiles.")]
        ///
        /// # Safety
        /// Parameters and launch as the module says.
        pub unsafe fn $smooth_v(
            v: *const u8,
            order: *const u32,
            kv_lens: *const u32,
            means: *const f32,
            tensor: *const f32,
            tiles: *mut u8,
            v_batch: i64,
            v_head: i64,
            v_token: i64,
            kv_tokens: u32,
            kv_heads: u32,
            head_dim: u32,
        ) {
            let strides = [v_batch, v_head, v_token];
            let values = Values { v, order, kv_lens, strides, kv_tokens, kv_heads, head_dim };
            // SAFETY: the entry's contract.
            unsafe { smooth::<$element>(&values, means, tensor, tiles) }
        }
        }
    };
}

entries!(Bf16; fp4_amax_q_bf16 quantize_q_fp4_from_bf16 fp4_amax_k_bf16 quantize_k_fp4_from_bf16 smooth_v_fp4_bf16);
entries!(F16; fp4_amax_q_f16 quantize_q_fp4_from_f16 fp4_amax_k_f16 quantize_k_fp4_from_f16 smooth_v_fp4_f16);

kernel! {
/// The scale of every head's values from the maxima of `v_stats_fp4`.
///
/// # Safety
/// Parameters and launch as the module says.
pub unsafe fn fp4_v_scale(amax: *const u32, tensor: *mut f32, scale: *mut f32) {
    let (index, thread) = (block_idx_x() as usize, thread_idx_x() as usize);
    // SAFETY: the maxima of the head's residuals, its scale and those of its channels; every warp is whole.
    unsafe {
        let mut largest = 0;
        for i in 0..4 {
            largest = largest.max(*amax.add(index * 2 * CHANNELS as usize + i * 32 + thread % 32));
        }
        let largest = warp_max_u32(largest);
        *scale.add(index * CHANNELS as usize + thread) = 1.0;
        if thread == 0 {
            *tensor.add(index) = nvfp4::tensor_scale(f32::from_bits(largest));
        }
    }
}
}
