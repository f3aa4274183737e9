//! How the rows of an attention kernel end whose warps have 16 of them each.

use super::call::{Call, OUT_F16, OUT_F32, Work};
use super::softmax::Rows;
use super::tiles::HEAD_DIM;
use crate::ptx::convert;
use crate::ptx::memory::max_global_u32;
use crate::ptx::shuffle::warp_max_u32;
use crate::ptx::special::thread_idx_x;

/// Query rows of a block of such kernels: 16 for each of 8 warps.
pub(super) const BLOCK_ROWS: u32 = 128;
/// `peak` of [`finish`] where probabilities are E4M3: the row max is 256.
pub(super) const PEAK_E4M3: f32 = 8.0;

/// O = A / l times the channel scales, LSE, and the observed row max.
///
/// `peak` is the binary logarithm of what the row max is worth in `sum`.
///
/// `out` and `sum` are A and l of the rows of a thread, 16 rows a warp: register 4j + 2r + e of A is channel 8j + 2q + e
/// of its upper (r = 0) or lower row.
///
/// # Safety
/// The contract of the entry; the whole warp executes it together.
#[inline(always)]
pub(super) unsafe fn finish(
    call: &Call,
    work: &Work,
    peak: f32,
    out: &[f32; 64],
    sum: &Rows,
    ends: impl FnOnce() -> [RowEnd; 2],
) {
    let thread = thread_idx_x();
    let first = work.row + thread / 32 * 16 + thread % 32 / 4;
    let [upper, lower] = ends();
    // SAFETY: the sizes of the contract; the whole warp is here.
    unsafe {
        finish_row::<0>(call, work, peak, out, sum, first, upper);
        finish_row::<1>(call, work, peak, out, sum, first + 8, lower);
        if !call.row_max.is_null() && work.keys > 0 {
            let upper = if first < call.q_tokens { upper.max.to_bits() & 0x7fff_ffff } else { 0 };
            let lower = if first + 8 < call.q_tokens { lower.max.to_bits() & 0x7fff_ffff } else { 0 };
            let largest = warp_max_u32(upper.max(lower));
            if thread % 32 == 0 {
                max_global_u32(call.row_max.add((work.batch * call.q_heads + work.h) as usize), largest);
            }
        }
    }
}

/// A row's max and what its codes took for it, in code units.
#[derive(Clone, Copy)]
pub(super) struct RowEnd {
    pub(super) max: f32,
    pub(super) shift: f32,
}

/// Writes the channels, a quarter of all, that this thread has of its upper (`ROW` 0) or lower row.
#[inline(always)]
unsafe fn finish_row<const ROW: usize>(
    call: &Call,
    work: &Work,
    peak: f32,
    out: &[f32; 64],
    sum: &Rows,
    token: u32,
    end: RowEnd,
) {
    if token >= call.q_tokens {
        return;
    }
    let lane = thread_idx_x() as usize % 4;
    let mut inverse = 1.0 / sum[ROW];
    let mut lse = convert::fma(end.shift, 0.125, convert::log2(sum[ROW]) - peak) * core::f32::consts::LN_2;
    // SAFETY: a row below q_tokens and the sizes of the contract.
    unsafe {
        if work.keys == 0 {
            (inverse, lse) = (0.0, f32::NEG_INFINITY);
        } else if !end.max.is_finite()
            || !call.poisoned.is_null() && *call.poisoned.add(work.kv_head as usize) != 0
        {
            (inverse, lse) = (f32::NAN, f32::NAN);
        }
        let at = work.batch as i64 * call.out_batch
            + work.h as i64 * call.out_head
            + token as i64 * call.out_token;
        let scales = call.v_scale.add(work.kv_head as usize * HEAD_DIM + 2 * lane);
        let pair = |j: usize| {
            let low = out[4 * j + 2 * ROW] * inverse * *scales.add(8 * j);
            (low, out[4 * j + 2 * ROW + 1] * inverse * *scales.add(8 * j + 1))
        };
        let at = (at + 2 * lane as i64) as isize;
        let channels = call.head_dim as usize;
        match call.out_type {
            OUT_F32 => {
                let to = call.out.cast::<f32>().offset(at);
                for j in 0..16 {
                    if 8 * j < channels {
                        (*to.add(8 * j), *to.add(8 * j + 1)) = pair(j);
                    }
                }
            }
            OUT_F16 => {
                let to = call.out.cast::<u16>().offset(at);
                for j in 0..16 {
                    if 8 * j < channels {
                        let (low, high) = pair(j);
                        *to.add(8 * j).cast::<u32>() = convert::f16x2(low, high);
                    }
                }
            }
            _ => {
                let to = call.out.cast::<u16>().offset(at);
                for j in 0..16 {
                    if 8 * j < channels {
                        let (low, high) = pair(j);
                        *to.add(8 * j).cast::<u32>() = convert::bf16x2(low, high);
                    }
                }
            }
        }
        if !call.lse.is_null() && lane == 0 {
            let head = (work.batch * call.q_heads + work.h) as usize;
            let at = head * call.q_tokens as usize + token as usize;
            if !call.lse_shift.is_null() {
                lse += *call.lse_shift.add(at);
            }
            *call.lse.add(at) = lse;
        }
    }
}
