//! V-Smooth: values to residual tiles and block means, in two passes over V (paper Sec. 3.2 and App. B).
//!
//! `v_stats` walks every block of 128 tokens once: its mean, and per channel the largest residual. Rounding is
//! monotonic, so the largest |x - mean| is that of the largest or of the smallest x: one pass is enough.
//! `v_scale` makes the channel scales, and `smooth_v` gathers the tokens once more, subtracts the mean as it is
//! stored, quantizes, and transposes 16 tokens by 8 channels in the registers of a thread.
//!
//! Tensor and strides are those of [`input`](super::input); heads are numbered batch * heads + head. Blocks,
//! and with them means, are those of the order. *blocks* below is ceil(`kv_tokens` / 128).
//!
//! # `v_stats_bf16`, `v_stats_f16`: ceil(blocks / 8) * batch * `kv_heads` blocks of 128 threads in x
//! | name | type | what |
//! |---|---|---|
//! | `v` | pointer | values |
//! | `order` | u32 `[batch, kv_heads, kv_tokens]`, or null | position -> token, for the tokens that count; null is the sequence |
//! | `kv_lens` | u32 `[batch]`, or null | tokens that count |
//! | `means` | f32 `[batch, kv_heads, blocks, 128]`, or null | receives the block means, the bits of [`block_mean`](crate::numerics::mean::block_mean); null is the plain kernel, whose residual is the value itself |
//! | `amax` | u32 `[batch, kv_heads, 2, 128]`, zeroed by the caller | receives per channel the largest abs residual and the largest abs mean, as f32 bits |
//! | `shares` | f32 `[batch, kv_heads, blocks]`, or null | receives the share of the block's energy that its mean holds; -1 for a block without energy (in f32), which does not count |
//! | `poisoned` | u32 `[batch, kv_heads]`, zeroed by the caller | set to 1 where a value that counts is not finite |
//! | `v_batch`, `v_head`, `v_token` | i64 | strides of `v` |
//! | `kv_tokens`, `kv_heads`, `head_dim` | u32 | sizes |
//!
//! # `v_stats_fp4_bf16`, `v_stats_fp4_f16`: the same
//! for [`quantize_fp4`](super::quantize_fp4): residuals in `amax` are against the mean rounded to f16, which is what is taken from
//! the values there.
//!
//! # `v_scale`: one block of 128 threads per (batch, kv head)
//! | name | type | what |
//! |---|---|---|
//! | `amax` | as above | |
//! | `scale` | f32 `[batch, kv_heads, 128]` | receives max(residual / 448, mean / 60000), 1 where that is 0 |
//!
//! # `smooth_v_bf16`, `smooth_v_f16`: 16 ceil(blocks / 16) * batch * `kv_heads` blocks of 128 threads in x
//! | name | type | what |
//! |---|---|---|
//! | `v`, `order`, `kv_lens` | as above | |
//! | `means` | as above, or null | the block means of `v_stats` |
//! | `scale` | f32 `[batch, kv_heads, 128]` | of `v_scale` |
//! | `tiles` | pointer, 16-byte aligned | receives the V^T tiles of [`tiles`]; tokens that do not count become zeros |
//! | `mean_tiles` | pointer, 16-byte aligned; not touched without `means` | receives the tiles of f16 means divided by the scale, zeros for blocks without a token that counts and for padding |
//! | strides and sizes | as above | |
//!
//! What values that are not finite become is not specified: `poisoned` reports them and the head's output is NaN.

use super::input::{
    Bf16, CHANNELS, CHUNK, CHUNKS, Element, F16, Head, has_nonfinite, store_f32_chunk, token_at,
    unpack_chunk, valid_tokens, walk,
};
use super::rows::{Divisor, e4m3x4};
use super::tiles::{self, KEYS, MEAN_BLOCKS, MEAN_BYTES, V_BYTES};
use crate::formats::{e4m3, f16};
use crate::layout::TOKEN_GROUP;
use crate::layout::fragment::TOKEN_ORDER;
use crate::ptx::collective::{any, shuffle_xor, sync_threads};
use crate::ptx::convert::{self, fma};
use crate::ptx::memory::{load_shared_v4, max_global_u32, store_global_v4, store_shared_v4};
use crate::ptx::shared;
use crate::ptx::special::{block_idx_x, thread_idx_x};

crate::ptx::shared_symbol!(
    /// Of v_stats: the largest residual and the largest mean of every channel.
    fn stats_shared, "vc_v_stats", 16, 1024
);
crate::ptx::shared_symbol!(
    /// Of smooth_v: four words a channel.
    fn smooth_shared, "vc_smooth_v", 16, 2048
);

/// Blocks of 128 tokens of a thread block of `v_stats`, 16 lanes each.
const BLOCKS: u32 = 8;

/// The values of all heads in their order.
pub(super) struct Values {
    pub(super) v: *const u8,
    pub(super) order: *const u32,
    pub(super) kv_lens: *const u32,
    pub(super) strides: [i64; 3],
    pub(super) kv_tokens: u32,
    pub(super) kv_heads: u32,
    pub(super) head_dim: u32,
}

impl Values {
    #[inline(always)]
    pub(super) fn blocks(&self) -> u32 {
        self.kv_tokens.div_ceil(KEYS as u32)
    }

    /// The rows of a head (batch * kv_heads + head), its order, and its tokens that count.
    #[inline(always)]
    pub(super) unsafe fn head(&self, index: u32) -> (Head, *const u32, u32) {
        let (batch, kv_head) = (index / self.kv_heads, index % self.kv_heads);
        let order = match self.order.is_null() {
            true => self.order,
            false => self.order.wrapping_add(index as usize * self.kv_tokens as usize),
        };
        // SAFETY: the entry's contract.
        let valid = unsafe { valid_tokens(self.kv_lens, batch, self.kv_tokens) };
        (Head::new(self.v, self.strides, batch, kv_head, self.head_dim), order, valid)
    }
}

/// What a thread holds of a block of 128 tokens: 8 channels of 16 tokens.
pub(super) struct Gathered {
    /// The channels: those of this chunk.
    pub(super) chunk: u32,
    /// The tokens: those of the block from this one on, in their order.
    pub(super) first: u32,
    pub(super) raw: [[u32; 4]; TOKEN_GROUP],
}

impl Gathered {
    /// Of the first `count` tokens of a block; those behind read as zeros. A warp takes 8 chunks of 4 groups of 16 tokens:
    /// loads of 128 bytes, and of the tiles stores of several groups in a row.
    ///
    /// # Safety
    /// The rows of `head` and the entries of `order` for tokens that count can be read.
    #[inline(always)]
    pub(super) unsafe fn load(head: &Head, order: *const u32, block: u32, count: u32) -> Self {
        let (warp, lane) = (thread_idx_x() / 32, thread_idx_x() % 32);
        let chunk = lane % 8 + warp % 2 * 8;
        let group = lane / 8 + warp / 2 * 4;
        let first = group * TOKEN_GROUP as u32;
        let mut raw = [[0; 4]; TOKEN_GROUP];
        let mut tokens = [0; TOKEN_GROUP];
        // SAFETY: tokens that count are read.
        unsafe {
            for (i, token) in tokens.iter_mut().enumerate() {
                *token = token_at(order, block * KEYS as u32 + first + i as u32, first + (i as u32) < count);
            }
            for i in 0..TOKEN_GROUP {
                raw[i] = head.load(tokens[i], chunk, first + (i as u32) < count);
            }
        }
        Self { chunk, first, raw }
    }
}

/// A block mean that is not scaled, as it is stored: f16 bits, and what they stand for.
#[inline(always)]
pub(super) fn stored_mean(mean: f32) -> (u16, f32) {
    let half = convert::f16x2(mean.min(f16::MAX).max(-f16::MAX), 0.0);
    (half as u16, convert::f32_of_f16x2(half).0)
}

/// Where the first pass writes.
struct Stats {
    means: *mut f32,
    amax: *mut u32,
    shares: *mut f32,
    poisoned: *mut u32,
}

impl Stats {
    #[inline(always)]
    unsafe fn run<E: Element, const STORED: bool>(&self, values: &Values) {
        let blocks = values.blocks();
        let per_head = blocks.div_ceil(BLOCKS);
        let index = block_idx_x() / per_head;
        let block = block_idx_x() % per_head * BLOCKS + thread_idx_x() / CHUNKS;
        let chunk = thread_idx_x() % CHUNKS;
        let demean = !self.means.is_null();
        // SAFETY: tokens that count are read, results of this head's blocks written; the block stays together.
        unsafe {
            let (head, order, valid) = values.head(index);
            let count = valid.saturating_sub(block * KEYS as u32).min(KEYS as u32);
            let mut sums = [0.0f32; CHUNK as usize];
            let mut energy = 0.0f32;
            let (mut low, mut high) = ([E::INFINITY; 4], [E::MINUS_INFINITY; 4]);
            walk(&head, chunk, order, block * KEYS as u32, count, |_, x| {
                for i in 0..4 {
                    low[i] = E::min(low[i], x[i]);
                    high[i] = E::max(high[i], x[i]);
                }
                for (sum, &x) in sums.iter_mut().zip(&unpack_chunk::<E>(x)) {
                    *sum += x;
                    energy = fma(x, x, energy);
                }
            });
            if count == 0 {
                (low, high) = ([0; 4], [0; 4]);
            }
            let broken = (0..4).any(|i| has_nonfinite::<E>(low[i]) || has_nonfinite::<E>(high[i]));
            if any(broken) && thread_idx_x() % 32 == 0 {
                max_global_u32(self.poisoned.add(index as usize), 1);
            }

            let mut means = sums;
            means.iter_mut().for_each(|mean| *mean /= count.max(1) as f32);
            if demean && block < blocks {
                let at = (index as usize * blocks as usize + block as usize) * CHANNELS as usize;
                store_f32_chunk(self.means.add(at + (chunk * CHUNK) as usize), &means);
            }
            if !demean {
                means = [0.0; CHUNK as usize];
            }
            self.share(&means, energy, count, index as usize * blocks as usize, block, blocks);
            if STORED {
                means.iter_mut().for_each(|mean| *mean = stored_mean(*mean).1);
            }

            let (low, high) = (unpack_chunk::<E>(low), unpack_chunk::<E>(high));
            let at = |which: u32| stats_shared().add((which * CHANNELS + thread_idx_x()) * 4);
            shared::store_u32(at(0), 0);
            shared::store_u32(at(1), 0);
            sync_threads();
            for i in 0..CHUNK as usize {
                let residual = (high[i] - means[i]).abs().max((low[i] - means[i]).abs());
                // Spread over the banks: value i of chunk c lies at 16 i + c.
                let word = stats_shared().add((i as u32 * CHUNKS + chunk) * 4);
                shared::max_u32(word, residual.to_bits());
                shared::max_u32(word.add(CHANNELS * 4), means[i].abs().to_bits());
            }
            sync_threads();
            let channel = thread_idx_x() % CHUNKS * CHUNK + thread_idx_x() / CHUNKS;
            let to = self.amax.add(index as usize * 2 * CHANNELS as usize + channel as usize);
            max_global_u32(to, shared::load_u32(at(0)));
            max_global_u32(to.add(CHANNELS as usize), shared::load_u32(at(1)));
        }
    }

    /// Writes the share of a block: tokens * |mean|^2 / energy, summed over the 16 lanes of the block.
    #[inline(always)]
    unsafe fn share(&self, means: &[f32; 8], energy: f32, count: u32, first: usize, block: u32, blocks: u32) {
        if self.shares.is_null() {
            return;
        }
        let mut removed = means.iter().fold(0.0, |sum, &mean| fma(mean, mean, sum));
        let mut energy = energy;
        // SAFETY: the whole warp is here; one share a block.
        unsafe {
            macro_rules! add_from {
                ($mask:literal) => {
                    removed += f32::from_bits(shuffle_xor::<$mask>(removed.to_bits()));
                    energy += f32::from_bits(shuffle_xor::<$mask>(energy.to_bits()));
                };
            }
            add_from!(1);
            add_from!(2);
            add_from!(4);
            add_from!(8);
            if block < blocks && thread_idx_x() % CHUNKS == 0 {
                let share = if energy > 0.0 { count as f32 * removed / energy } else { -1.0 };
                *self.shares.add(first + block as usize) = share;
            }
        }
    }
}

macro_rules! stats_entry {
    ($name:ident, $element:ty, $stored:literal) => {
        kernel! {
        #[doc = concat!("Block means and largest residuals of [`", stringify!($element), "`] values.")]
        ///
        /// # Safety
        /// Parameters and launch as the module says.
        pub unsafe fn $name(
            v: *const u8,
            order: *const u32,
            kv_lens: *const u32,
            means: *mut f32,
            amax: *mut u32,
            shares: *mut f32,
            poisoned: *mut u32,
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
            unsafe { Stats { means, amax, shares, poisoned }.run::<$element, $stored>(&values) }
        }
        }
    };
}

stats_entry!(v_stats_bf16, Bf16, false);
stats_entry!(v_stats_f16, F16, false);
#[cfg(any(attention = "sm90", attention = "mma", attention = "sm120", feature = "emulation"))]
stats_entry!(v_stats_fp4_bf16, Bf16, true);
#[cfg(any(attention = "sm90", attention = "mma", attention = "sm120", feature = "emulation"))]
stats_entry!(v_stats_fp4_f16, F16, true);

kernel! {
/// The channel scales from the maxima of `v_stats`.
///
/// # Safety
/// Parameters and launch as the module says.
pub unsafe fn v_scale(amax: *const u32, scale: *mut f32) {
    let (index, channel) = (block_idx_x() as usize, thread_idx_x() as usize);
    // SAFETY: the maxima and the scale of the channel.
    unsafe {
        let amax = amax.add(index * 2 * CHANNELS as usize + channel);
        let (residual, mean) = (f32::from_bits(*amax), f32::from_bits(*amax.add(CHANNELS as usize)));
        let s = (residual / e4m3::MAX).max(mean / 60000.0);
        *scale.add(index * CHANNELS as usize + channel) = if s > 0.0 { s } else { 1.0 };
    }
}
}

/// Where the second pass reads and writes.
struct Smooth {
    means: *const f32,
    scale: *const f32,
    tiles: *mut u8,
    mean_tiles: *mut u8,
}

impl Smooth {
    #[inline(always)]
    unsafe fn run<E: Element>(&self, values: &Values) {
        let blocks = values.blocks();
        let per_head = blocks.next_multiple_of(MEAN_BLOCKS as u32);
        let (index, block) = (block_idx_x() / per_head, block_idx_x() % per_head);
        // SAFETY: tokens that count are read, tiles of this head written; the block stays together.
        unsafe {
            let (head, order, valid) = values.head(index);
            let count = valid.saturating_sub(block * KEYS as u32).min(KEYS as u32);
            let Gathered { chunk, first, raw } = Gathered::load(&head, order, block, count);

            self.channel(index, block, blocks, count > 0);
            if block >= blocks {
                return;
            }
            sync_threads();

            let masks = byte_masks(count.saturating_sub(first));
            let to = self.tiles.add((index as usize * blocks as usize + block as usize) * V_BYTES);
            for i in 0..CHUNK as usize {
                let word = load_shared_v4(smooth_shared().add((i as u32 * CHUNKS + chunk) * 16));
                let [mean, scaled, reciprocal, up] = word.map(f32::from_bits);
                let divisor = Divisor { scaled, reciprocal, up };
                let mut bytes = match divisor.is_tiny() {
                    false => codes::<E>(&raw, i, mean, |x| divisor.divide_scaled(x)),
                    true => codes::<E>(&raw, i, mean, |x| divisor.divide(x)),
                };
                for j in 0..4 {
                    bytes[j] &= masks[j];
                }
                let channel = chunk as usize * CHUNK as usize + i;
                store_global_v4(to.add(tiles::swizzle_128(channel, first as usize)), bytes);
            }
        }
    }

    /// What one thread prepares for one channel: its scale, and its mean as it is stored.
    #[inline(always)]
    unsafe fn channel(&self, index: u32, block: u32, blocks: u32, used: bool) {
        let channel = thread_idx_x();
        // SAFETY: scale and mean of the channel, its place in the tile of means, its words in shared memory.
        unsafe {
            let s = *self.scale.add((index * CHANNELS + channel) as usize);
            let mut stored = 0.0;
            if !self.means.is_null() {
                let mut half = 0;
                if used {
                    let at = (index as usize * blocks as usize + block as usize) * CHANNELS as usize;
                    let (bits, value) = stored_mean(*self.means.add(at + channel as usize) / s);
                    (half, stored) = (bits, value * s);
                }
                let tiles_per_head = blocks as usize / MEAN_BLOCKS + (blocks as usize % MEAN_BLOCKS).min(1);
                let tile = index as usize * tiles_per_head + block as usize / MEAN_BLOCKS;
                let at =
                    tile * MEAN_BYTES + tiles::mean_offset(block as usize % MEAN_BLOCKS, channel as usize);
                *self.mean_tiles.add(at).cast::<u16>() = half;
            }
            let Divisor { scaled, reciprocal, up } = Divisor::new(s);
            let word = channel % CHUNK * CHUNKS + channel / CHUNK;
            let words = [stored, scaled, reciprocal, up].map(f32::to_bits);
            store_shared_v4(smooth_shared().add(word * 16), words);
        }
    }
}

/// The codes of channel `i` of a thread's chunk for its 16 tokens, in the order of V^T.
#[inline(always)]
fn codes<E: Element>(
    raw: &[[u32; 4]; TOKEN_GROUP],
    i: usize,
    mean: f32,
    divide: impl Fn(f32) -> f32,
) -> [u32; 4] {
    let code = |position: usize| divide(E::unpack(raw[TOKEN_ORDER[position]][i / 2])[i % 2] - mean);
    let mut bytes = [0; 4];
    for j in 0..4 {
        bytes[j] = e4m3x4([code(4 * j), code(4 * j + 1), code(4 * j + 2), code(4 * j + 3)]);
    }
    bytes
}

/// Which of 16 positions of V^T hold one of the first `count` tokens of their group, as masks of 4 bytes each.
#[inline(always)]
fn byte_masks(count: u32) -> [u32; 4] {
    let mut masks = [0; 4];
    for (position, &token) in TOKEN_ORDER.iter().enumerate() {
        if (token as u32) < count {
            masks[position / 4] |= 0xff << (position % 4 * 8);
        }
    }
    masks
}

macro_rules! smooth_entry {
    ($name:ident, $element:ty) => {
        kernel! {
        #[doc = concat!("Residual tiles and mean tiles of [`", stringify!($element), "`] values.")]
        ///
        /// # Safety
        /// Parameters and launch as the module says.
        pub unsafe fn $name(
            v: *const u8,
            order: *const u32,
            kv_lens: *const u32,
            means: *const f32,
            scale: *const f32,
            tiles: *mut u8,
            mean_tiles: *mut u8,
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
            unsafe { Smooth { means, scale, tiles, mean_tiles }.run::<$element>(&values) }
        }
        }
    };
}

smooth_entry!(smooth_v_bf16, Bf16);
smooth_entry!(smooth_v_f16, F16);
