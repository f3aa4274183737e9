//! What every attention kernel is called with, and what a block makes of it.
//!
//! # Parameters of every attention entry
//! One list for all families; an entry does not read what its operands do not need. Device pointers, 16-byte aligned unless said
//! otherwise; heads are numbered batch * heads + head.
//!
//! | name | what |
//! |---|---|
//! | `q`, `k`, `v` | tiles ([`tiles`](super::tiles)), heads in order |
//! | `means` | tiles of block means, not read without smoothing; of NVFP4, whose means lie in the tiles of V, f32 `[batch, kv_heads]`: the scale of a head's values |
//! | `q_factor` | f32 `[batch, q_heads, 128 ceil(q_tokens / 128)]`: multiplies the scores of a row; of INT8 (NVFP4: `[batch, q_heads]`) |
//! | `k_scale` | f32 `[batch, kv_heads, ceil(kv_tokens / 128), 4]`: multiplies those of keys k with this (k mod 8) / 2; of INT8 (NVFP4: `[batch, kv_heads]`) |
//! | `v_scale` | f32 `[batch, kv_heads, 128]`: multiplies channel c of the output |
//! | `kv_lens` | u32 `[batch]`, or null: keys that count, at most `kv_tokens` |
//! | `poisoned` | u32 `[batch, kv_heads]`, or null: not 0 makes the head's output NaN |
//! | `out` | element (b, h, t, c) at b * `out_batch` + h * `out_head` + t * `out_token` + c, in elements; 8-byte (f32) or 4-byte aligned pairs |
//! | `lse` | f32 `[batch, q_heads, q_tokens]`, or null: receives the natural log of the sum of exponentials |
//! | `lse_shift` | as `lse`, or null: added to it (what centring K took away) |
//! | `row_max` | u32 `[batch, q_heads]`, or null, zeroed by the caller: the largest magnitude of a row max in code units, as f32 bits (which order as integers; NaN is on top) |
//! | `q_tokens`, `kv_tokens`, `q_heads`, `kv_heads`, `group` | sizes; `group` = `q_heads` / `kv_heads` query heads share a kv head |
//! | `head_dim` | channels of the output, a multiple of 8 up to 128: the rest of a tile is padding |
//! | `promote` | key blocks between promotions of the FP8 sums to f32, at least 1; read by [`attention_sm90`](super::attention_sm90): the others promote every one |
//! | `out_type` | [`OUT_F32`], [`OUT_F16`] or [`OUT_BF16`] |
//!
//! The grid is ceil(`q_tokens` / rows of a block) x `q_heads` x batch: query blocks of a head first, so that the blocks that run
//! together share K and V in L2.

use core::num::NonZeroU32;

use super::tiles::KEYS;
use crate::ptx::special::{block_idx_x, block_idx_y, block_idx_z};

/// `out_type`: f32.
pub const OUT_F32: u32 = 0;
/// `out_type`: f16.
pub const OUT_F16: u32 = 1;
/// `out_type`: bf16.
pub const OUT_BF16: u32 = 2;

/// The parameters, by the names of the table.
#[cfg_attr(target_arch = "nvptx64", allow(dead_code, reason = "a module reads what its operands need"))]
pub(super) struct Call {
    pub(super) q: *const u8,
    pub(super) k: *const u8,
    pub(super) v: *const u8,
    pub(super) means: *const u8,
    pub(super) q_factor: *const f32,
    pub(super) k_scale: *const f32,
    pub(super) v_scale: *const f32,
    pub(super) kv_lens: *const u32,
    pub(super) poisoned: *const u32,
    pub(super) out: *mut u8,
    pub(super) lse: *mut f32,
    pub(super) lse_shift: *const f32,
    pub(super) row_max: *mut u32,
    pub(super) q_tokens: u32,
    pub(super) kv_tokens: u32,
    pub(super) q_heads: u32,
    pub(super) kv_heads: u32,
    pub(super) group: NonZeroU32,
    pub(super) head_dim: u32,
    pub(super) out_batch: i64,
    pub(super) out_head: i64,
    pub(super) out_token: i64,
    pub(super) promote: u32,
    pub(super) out_type: u32,
}

/// What one block works on.
pub(super) struct Work {
    pub(super) batch: u32,
    /// Query head in its batch.
    pub(super) h: u32,
    /// batch * kv_heads + kv head.
    pub(super) kv_head: u32,
    /// First query row.
    pub(super) row: u32,
    /// Keys that count.
    pub(super) keys: u32,
    /// Key blocks (tiles) that hold them.
    pub(super) tiles: u32,
}

impl Call {
    /// The work of this block, of `rows` query rows.
    ///
    /// # Safety
    /// The contract of the entry.
    #[inline(always)]
    pub(super) unsafe fn work(&self, rows: u32) -> Work {
        let (h, batch) = (block_idx_y(), block_idx_z());
        let kv_head = batch * self.kv_heads + h / self.group;
        let mut keys = self.kv_tokens;
        if !self.kv_lens.is_null() {
            // SAFETY: one word a batch by contract.
            keys = keys.min(unsafe { *self.kv_lens.add(batch as usize) });
        }
        Work { batch, h, kv_head, row: block_idx_x() * rows, keys, tiles: keys.div_ceil(KEYS as u32) }
    }
}

/// Defines an attention entry, which hands its parameters as a [`Call`] to `$run`.
macro_rules! entry {
    ($(#[$attribute:meta])* $name:ident, $run:expr) => { kernel! {
        $(#[$attribute])*
        #[doc = concat!("`", stringify!($run), "`.")]
        ///
        /// # Safety
        /// Parameters as the table in `call` says, launched with the bounds of its [`Entry`](crate::kernels::Entry).
        pub unsafe fn $name(
            q: *const u8,
            k: *const u8,
            v: *const u8,
            means: *const u8,
            q_factor: *const f32,
            k_scale: *const f32,
            v_scale: *const f32,
            kv_lens: *const u32,
            poisoned: *const u32,
            out: *mut u8,
            lse: *mut f32,
            lse_shift: *const f32,
            row_max: *mut u32,
            q_tokens: u32,
            kv_tokens: u32,
            q_heads: u32,
            kv_heads: u32,
            group: core::num::NonZeroU32,
            head_dim: u32,
            out_batch: i64,
            out_head: i64,
            out_token: i64,
            promote: u32,
            out_type: u32,
        ) {
            let call = $crate::kernels::call::Call {
                q, k, v, means, q_factor, k_scale, v_scale, kv_lens, poisoned, out, lse, lse_shift, row_max, q_tokens,
                kv_tokens, q_heads, kv_heads, group, head_dim, out_batch, out_head, out_token, promote, out_type,
            };
            // SAFETY: the entry's contract; the whole block is here.
            unsafe { $run(call) }
        }
    }};
}
pub(super) use entry;
