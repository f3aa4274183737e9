//! Keys to operand tiles: gather, RoPE, centring, rotation, scale, FP16 (of 8 significant bits) or E4M3 or INT8.
//!
//! # Parameters of every entry `quantize_k_{f16, e4m3, i8}_from_{bf16, f16}`
//! Tensor and strides are those of [`input`](super::input); heads are numbered batch * heads + head.
//!
//! | name | type | what |
//! |---|---|---|
//! | `k` | pointer | keys |
//! | `order` | u32 `[batch, kv_heads, kv_tokens]`, or null | position -> token, for the keys that count; null is the sequence |
//! | `cos`, `sin` | f32 `[kv_tokens, head_dim / 2]`, or null | RoPE, by token |
//! | `mean` | f32 `[batch, kv_heads, 128]`, or null | subtracted after RoPE: the token mean of [`stats`](super::stats) |
//! | `balance` | f32 `[batch, kv_heads]`, or null | divides `side` |
//! | `kv_lens` | u32 `[batch]`, or null | keys that count |
//! | `tiles` | pointer, 16-byte aligned | receives the K tiles of [`tiles`] (INT8 lies like E4M3); keys that do not count become zeros |
//! | `scales` | f32 `[batch, kv_heads, ceil(kv_tokens / 128), 4]`; INT8 only, else not touched | receives the scale of every group of [`scale_groups`] |
//! | `saturated` | u32 `[batch, kv_heads]`, or null, zeroed by the caller | set to 1 where a value is outside the format |
//! | `k_batch`, `k_head`, `k_token` | i64 | strides of `k` |
//! | `kv_tokens`, `kv_heads`, `head_dim` | u32 | sizes |
//! | `rotation` | u32 | channels of the Hadamard rotation: 0, or a power of two from 16 to 128, at least `head_dim` |
//! | `side` | f32 | FP16, E4M3: [`code_unit_factor`](crate::numerics::units::code_unit_factor) of the scale |
//!
//! What keys that are not finite become is not specified: `k_stats` reports them and the head's output is NaN.
//!
//! FP16 and E4M3: 2 ceil(`kv_tokens` / 128) * batch * `kv_heads` blocks of [`THREADS`] in x, one a half tile.
//! INT8: ceil(`kv_tokens` / 128) * batch * `kv_heads` blocks of [`THREADS_INT8`], one a tile, whose keys share
//! their scales.

use super::input::{Bf16, CHUNK, Element, F16, Head, token_at, valid_tokens};
use super::rows::{Code, Divisor, E4m3, HalfKey, Int8, LANES, Part};
use super::tiles::{self, KEYS};
use crate::formats::int8;
use crate::layout::scale_groups;
use crate::ptx::collective::{any, sync_threads};
use crate::ptx::memory::max_global_u32;
use crate::ptx::shared;
use crate::ptx::special::{block_idx_x, thread_idx_x};

/// Threads of a block for FP16 and E4M3: four a key, half a tile.
pub const THREADS: u32 = KEYS as u32 / 2 * LANES;
/// Threads of a block for INT8: four a key, a whole tile.
pub const THREADS_INT8: u32 = KEYS as u32 * LANES;

const GROUPS: u32 = scale_groups::K_GROUPS as u32;

crate::ptx::shared_symbol!(
    /// 4 words: the largest magnitude of every scale group of a tile.
    fn group_amax, "vc_quantize_k_amax", 16, 16
);

/// Keys, and what becomes of them before they are quantized.
pub(super) struct Keys {
    pub(super) k: *const u8,
    pub(super) order: *const u32,
    pub(super) cos: *const f32,
    pub(super) sin: *const f32,
    pub(super) mean: *const f32,
    pub(super) kv_lens: *const u32,
    pub(super) strides: [i64; 3],
    pub(super) kv_tokens: u32,
    pub(super) kv_heads: u32,
    pub(super) head_dim: u32,
    pub(super) rotation: u32,
}

impl Keys {
    /// The thread's part of the key at `position` of a head (batch * kv_heads + head): turned, centred and rotated; zeros
    /// for a key that does not count.
    ///
    /// # Safety
    /// The contract of the entry; the whole warp executes it together.
    #[inline(always)]
    pub(super) unsafe fn row<E: Element>(&self, index: u32, position: u32) -> Part {
        let (batch, kv_head) = (index / self.kv_heads, index % self.kv_heads);
        let lane = thread_idx_x() % LANES;
        let head = Head::new(self.k, self.strides, batch, kv_head, self.head_dim);
        // SAFETY: keys that count are read; warps stay together.
        unsafe {
            let live = position < valid_tokens(self.kv_lens, batch, self.kv_tokens);
            let order = match self.order.is_null() {
                true => self.order,
                false => self.order.add(index as usize * self.kv_tokens as usize),
            };
            let token = token_at(order, position, live);
            let mut part = Part::unpack::<E>(&Part::load(&head, token, lane, live), lane);
            if live {
                part.turn(self.cos, self.sin, token, &head);
                if !self.mean.is_null() {
                    part.subtract(self.mean.add(index as usize * 128));
                }
            }
            part.rotate(self.rotation);
            part
        }
    }
}

/// The parameters of an entry.
struct Call {
    keys: Keys,
    balance: *const f32,
    tiles: *mut u8,
    scales: *mut f32,
    saturated: *mut u32,
    side: f32,
}

impl Call {
    #[inline(always)]
    unsafe fn run<E: Element, C: Code>(&self) {
        let keys = if C::INT8 { KEYS as u32 } else { KEYS as u32 / 2 };
        let tiles_per_head = self.keys.kv_tokens.div_ceil(KEYS as u32);
        let blocks = tiles_per_head * (KEYS as u32 / keys);
        let (index, block) = (block_idx_x() / blocks, block_idx_x() % blocks);
        let position = block * keys + thread_idx_x() / LANES;
        let (tile, key) = (position / KEYS as u32, position as usize % KEYS);
        // SAFETY: the entry's contract; warps and the block stay together.
        unsafe {
            let mut part = self.keys.row::<E>(index, position);
            if C::INT8 {
                self.codes(&mut part, key, index as usize * tiles_per_head as usize + tile as usize);
            } else {
                self.code_units::<C>(&mut part, index as usize);
            }

            let tile_bytes = KEYS * 128 * C::BYTES;
            let to = self.tiles.add((index as usize * tiles_per_head as usize + tile as usize) * tile_bytes);
            for (i, x) in part.x.as_chunks().0.iter().enumerate() {
                let channel = (part.chunk(i) * CHUNK) as usize;
                let at = match C::BYTES {
                    2 => tiles::k_tile_offset_f16(key, channel),
                    _ => tiles::k_tile_offset_e4m3(key, channel),
                };
                C::store(to.add(at), x);
            }
        }
    }

    /// x * side.
    #[inline(always)]
    unsafe fn code_units<C: Code>(&self, part: &mut Part, index: usize) {
        let mut side = self.side;
        // SAFETY: one balance and one flag a head; the whole warp is here.
        unsafe {
            if !self.balance.is_null() {
                side /= *self.balance.add(index);
            }
            part.x.iter_mut().for_each(|x| *x *= side);
            if any(part.amax() > C::LIMIT) && !self.saturated.is_null() && thread_idx_x() % 32 == 0 {
                max_global_u32(self.saturated.add(index), 1);
            }
        }
    }

    /// INT8 codes, and the scales of the tile.
    #[inline(always)]
    unsafe fn codes(&self, part: &mut Part, key: usize, tile: usize) {
        let group = scale_groups::k_group(key) as u32;
        let thread = thread_idx_x();
        // SAFETY: words of the block's own; the block meets between them; four scales a tile.
        unsafe {
            if thread < GROUPS {
                shared::store_u32(group_amax().add(thread * 4), 0);
            }
            sync_threads();
            let amax = part.row_amax();
            if part.lane == 0 {
                // Floats that are not negative order as their bits do.
                shared::max_u32(group_amax().add(group * 4), amax.to_bits());
            }
            sync_threads();
            let scale =
                |group: u32| int8::scale(f32::from_bits(shared::load_u32(group_amax().add(group * 4))));
            let s = scale(group);
            let divisor = Divisor::new(s);
            part.x.iter_mut().for_each(|x| *x = if s > 0.0 { divisor.int8_code(*x) } else { 0.0 });
            if thread < GROUPS {
                *self.scales.add(tile * GROUPS as usize + thread as usize) = scale(thread);
            }
        }
    }
}

macro_rules! entry {
    ($name:ident, $element:ty, $code:ty) => {
        kernel! {
        #[doc = concat!("[`", stringify!($element), "`] keys to [`", stringify!($code), "`] tiles.")]
        ///
        /// # Safety
        /// Parameters and launch as the module says.
        pub unsafe fn $name(
            k: *const u8,
            order: *const u32,
            cos: *const f32,
            sin: *const f32,
            mean: *const f32,
            balance: *const f32,
            kv_lens: *const u32,
            tiles: *mut u8,
            scales: *mut f32,
            saturated: *mut u32,
            k_batch: i64,
            k_head: i64,
            k_token: i64,
            kv_tokens: u32,
            kv_heads: u32,
            head_dim: u32,
            rotation: u32,
            side: f32,
        ) {
            let strides = [k_batch, k_head, k_token];
            let keys = Keys { k, order, cos, sin, mean, kv_lens, strides, kv_tokens, kv_heads, head_dim, rotation };
            let call = Call { keys, balance, tiles, scales, saturated, side };
            // SAFETY: the entry's contract.
            unsafe { call.run::<$element, $code>() }
        }
        }
    };
}

entry!(quantize_k_f16_from_bf16, Bf16, HalfKey);
entry!(quantize_k_f16_from_f16, F16, HalfKey);
entry!(quantize_k_e4m3_from_bf16, Bf16, E4m3);
entry!(quantize_k_e4m3_from_f16, F16, E4m3);
entry!(quantize_k_i8_from_bf16, Bf16, Int8);
entry!(quantize_k_i8_from_f16, F16, Int8);
