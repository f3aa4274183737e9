//! INT8 queries and keys: scores are exact integers, whose factors and maximum are applied in f32, before anything is rounded.
//!
//! 64 registers of scores leave no room for a second buffer. For key block j of a warpgroup:
//!
//! ```text
//! Tensor Core   | S(j) = Q K(j)^T | A += P(j-1) R(j-1)                  |
//! scalar units  |     (waits)     | max of S(j), rescale, codes of S(j) | row sums and promotion of j-1, pack P(j)
//! ```
//!
//! The Tensor Core is the other warpgroup's where this one waits or works alone. Scale groups are those of
//! [`scale_groups`](crate::layout::scale_groups): all keys of a thread have one.

use super::super::STAGES_E4M3;
use super::super::call::{Call, Work};
use super::super::epilogue::RowEnd;
use super::super::softmax::{Encoder, Exp2, Rows, SUM_ZERO, four, quad_max, stay};
use super::super::tiles::{self, KEYS, MEAN_BLOCKS, ROWS};
use super::consumer::{Consumer, State};
use super::{Attend, Format, Values};
use crate::ptx::extrema::max_nan_f32;
use crate::ptx::shuffle::{any, permute};
use crate::ptx::special::thread_idx_x;
use crate::ptx::wgmma::{self, Descriptor, pin, pinned};
use crate::ptx::{SharedAddr, convert};

/// INT8 queries and keys.
pub(super) struct Int8;

impl Format for Int8 {
    const Q_BYTES: usize = tiles::Q_E4M3_BYTES;
    const K_BYTES: usize = tiles::K_E4M3_BYTES;
    const STAGES: usize = STAGES_E4M3;
}

/// Scores of a thread, register 4j + 2r + e: row r, key 8j + 2q + e of the block.
type Scores = [i32; KEYS / 2];

/// [`SUM_ZERO`], and as f32.
const ZERO: i32 = SUM_ZERO as i32;
const OFFSET: f32 = f32::from_bits(SUM_ZERO);

/// Issues S = [`ZERO`] + Q K^T for one key tile on scores that are [`ZERO`].
#[inline(always)]
unsafe fn issue(s: &mut Scores, q: SharedAddr, k: SharedAddr) {
    let (q, k) = (Descriptor::swizzled(q), Descriptor::swizzled(k));
    for step in 0..4 {
        // SAFETY: the caller's protocol; both tiles lie in shared memory as `tiles` says.
        unsafe { wgmma::m64n128k32_s32_s8(s, q.add(step * 32), k.add(step * 32), true) }
    }
}

/// A score in code units from its bits: one fused multiply-add.
#[derive(Clone, Copy)]
pub(super) struct Units {
    /// Of the rows with the thread's keys.
    factor: Rows,
    /// What brings a sum to 0.
    zero: Rows,
}

impl Units {
    /// Of integer sums.
    #[inline(always)]
    fn of_sums(factor: Rows) -> Self {
        Self { factor, zero: factor.map(|factor| -OFFSET * factor) }
    }

    /// Of scores that are f32 code units already.
    const PLAIN: Self = Self { factor: [1.0; 2], zero: [0.0; 2] };
}

/// The largest scores of a thread's rows. Sums are ordered as scores are: the quantizers leave no factor below 0.
#[inline(always)]
fn own_max(s: &Scores, units: Units) -> Rows {
    let mut m = [s[0], s[1], s[2], s[3]];
    for i in 4..KEYS / 2 {
        m[i % 4] = m[i % 4].max(s[i]);
    }
    [0, 1].map(|row| {
        let largest = f32::from_bits(m[2 * row].max(m[2 * row + 1]) as u32);
        convert::fma(largest, units.factor[row], units.zero[row])
    })
}

/// Makes scores f32 code units, of keys from `valid` on minus infinity: outside the max, and byte 0. Returns [`own_max`].
#[inline(always)]
fn mask(s: &mut Scores, valid: u32, units: Units) -> Rows {
    let valid = valid as i32 - (thread_idx_x() % 4 * 2) as i32;
    let mut m = [f32::NEG_INFINITY; 2];
    for i in 0..KEYS / 2 {
        let row = i / 2 % 2;
        let mut score = convert::fma(f32::from_bits(s[i] as u32), units.factor[row], units.zero[row]);
        if (i / 4 * 8 + i % 2) as i32 >= valid {
            score = f32::NEG_INFINITY;
        }
        m[row] = max_nan_f32(m[row], score);
        s[i] = score.to_bits() as i32;
    }
    m
}

/// From f32 scores to E4M3 probabilities.
pub(super) trait Weights: Values {
    /// Writes the codes of scores `s` under the row maxima `max` into some of their registers, for [`pack`](Self::pack).
    /// Returns this thread's share of the row sums if they do not come from the product. `not_zero` is for [`stay`].
    fn encode(s: &mut Scores, units: Units, max: Rows, not_zero: u32) -> Option<Rows>;
    /// Gathers the codes.
    fn pack(s: &Scores, p: &mut [u32; 16]);
}

impl<E: Encoder> Weights for E {
    #[inline(always)]
    fn encode(s: &mut Scores, units: Units, max: Rows, not_zero: u32) -> Option<Rows> {
        let addend = [units.zero[0] - max[0], units.zero[1] - max[1]];
        // In parts, or LLVM would not unroll the longer of the encoders.
        for part in s.as_chunks_mut::<32>().0 {
            stay(not_zero, || {
                for (i, pair) in part.as_chunks_mut::<2>().0.iter_mut().enumerate() {
                    let (factor, addend) = (units.factor[i % 2], addend[i % 2]);
                    let [a, b] = pair.map(|s| convert::fma(f32::from_bits(s as u32), factor, addend));
                    *pair = [Self::code(convert::f16x2(a, b), Self::FROM_ZERO) as i32, ZERO];
                }
                pin(part);
            });
        }
        None
    }

    #[inline(always)]
    fn pack(s: &Scores, p: &mut [u32; 16]) {
        for (i, p) in p.iter_mut().enumerate() {
            let [first, second] = four(i / 2, i % 2);
            *p = permute(s[first] as u32, s[second] as u32, Self::BYTES);
        }
    }
}

impl Weights for Exp2 {
    #[inline(always)]
    fn encode(s: &mut Scores, units: Units, max: Rows, not_zero: u32) -> Option<Rows> {
        let factor = units.factor.map(|factor| factor * 0.125);
        let addend = [0, 1].map(|row| convert::fma(units.zero[row] - max[row], 0.125, 8.0));
        let mut sums = [0.0; 2];
        // In parts: the assembler would take all scores apart first and run out of registers.
        for part in s.as_chunks_mut::<16>().0 {
            stay(not_zero, || {
                for i in 0..4 {
                    let (row, [first, second]) = (i % 2, four(i / 2, i % 2));
                    let e = [first, first + 1, second, second + 1].map(|at| {
                        convert::exp2(convert::fma(f32::from_bits(part[at] as u32), factor[row], addend[row]))
                    });
                    sums[row] += (e[0] + e[1]) + (e[2] + e[3]);
                    part[first] = convert::e4m3x4(e) as i32;
                    for at in [first + 1, second, second + 1] {
                        part[at] = ZERO;
                    }
                }
                pin(part);
            });
        }
        Some(sums)
    }

    #[inline(always)]
    fn pack(s: &Scores, p: &mut [u32; 16]) {
        for (i, p) in p.iter_mut().enumerate() {
            *p = s[four(i / 2, i % 2)[0]] as u32;
        }
    }
}

/// What multiplies the scores of a thread.
struct Factors<'a> {
    call: &'a Call,
    /// The first row of the block, of all heads.
    row: usize,
    /// The key block to come, of all heads.
    block: usize,
}

impl<'a> Factors<'a> {
    #[inline(always)]
    fn new(call: &'a Call, work: &Work) -> Self {
        let [rows, tiles] = [call.q_tokens, call.kv_tokens].map(|n| n.div_ceil(KEYS as u32) as usize);
        Self {
            call,
            row: (work.batch * call.q_heads + work.h) as usize * rows * 2 * ROWS + work.row as usize,
            block: work.kv_head as usize * tiles,
        }
    }

    /// Those of the next key block, if there is one.
    #[inline(always)]
    unsafe fn next(&mut self, any: bool) -> Units {
        // All anew from what is the same in all threads, and out of L1: there are no registers to keep it in.
        let thread = pinned(thread_idx_x()) as usize;
        let row = self.row + thread / 32 * 16 + thread % 32 / 4;
        let mut factor = [0.0; 2];
        if any {
            // SAFETY: factors of all rows of the tiles, scales of all key blocks of the head.
            unsafe {
                let (q, k) =
                    (self.call.q_factor.add(row), *self.call.k_scale.add(self.block * 4 + thread % 4));
                factor = [*q * k, *q.add(8) * k];
            }
        }
        self.block += 1;
        Units::of_sums(factor)
    }
}

impl<W: Weights> Attend<W> for Int8 {
    type Max = Rows;
    const LOWEST: Rows = [f32::NEG_INFINITY; 2];

    #[inline(always)]
    unsafe fn run<const STAGES: u32, const SMOOTH: bool>(
        consumer: &mut Consumer<Int8, STAGES>,
        work: &Work,
        state: &mut State<Rows>,
    ) {
        let shared = consumer.shared;
        let mut s = [ZERO; KEYS / 2];
        // SAFETY: the warpgroup runs this together; registers in flight are pinned until their wait, tiles are read
        // between their full and free barriers.
        unsafe {
            let mut factors = Factors::new(consumer.call, work);
            shared.q_full().wait(0);
            shared.k_full(consumer.k.stage()).wait(consumer.k.parity());
            pin(&mut s);
            wgmma::fence();
            issue(&mut s, consumer.q, shared.k(consumer.k.stage()));
            wgmma::commit();
            let units = factors.next(true);
            wgmma::wait::<0>();
            pin(&mut s);
            let (encoded, _) = consumer.encode::<W>(&mut s, units, state);
            state.absorb::<SMOOTH>(0, true, encoded, None, true);
            W::pack(&s, &mut consumer.p);
            while consumer.left > 0 {
                consumer.step::<W, SMOOTH>(&mut s, &mut factors, state);
            }
            if SMOOTH {
                if consumer.block % 2 == 1 {
                    // The last row sums wait for those of a neighbour.
                    state.pending.keep(consumer.block, false, 0);
                }
                consumer.restore_last_means(state);
            }
        }
    }

    #[inline(always)]
    fn ends(max: Rows) -> [RowEnd; 2] {
        max.map(|max| RowEnd { max, shift: max })
    }
}

impl<const STAGES: u32> Consumer<'_, Int8, STAGES> {
    /// m' = max(m, rowmax S(j)), codes of S(j) in place, A <- alpha A where a max moved. Returns what
    /// [`Weights::encode`] does, and alpha.
    #[inline(always)]
    unsafe fn encode<W: Weights>(
        &self,
        s: &mut Scores,
        mut units: Units,
        state: &mut State<Rows>,
    ) -> (Option<Rows>, Option<Rows>) {
        if self.leader && self.left > KEYS as u32 {
            // SAFETY: S(j) is complete.
            unsafe { self.shared.k_free(self.k.stage()).arrive() }
        }
        let before = state.max;
        // SAFETY: the whole warp is here.
        unsafe {
            let own = if self.left < KEYS as u32 {
                let own = mask(s, self.left, units);
                units = Units::PLAIN;
                own
            } else {
                own_max(s, units)
            };
            state.max = [0, 1].map(|row| max_nan_f32(before[row], quad_max(own[row])));
            let moved = before.map(f32::to_bits) != state.max.map(f32::to_bits);
            let alpha = if any(moved) { Some(state.rescale(before, state.max)) } else { None };
            (W::encode(s, units, state.max, self.call.promote), alpha)
        }
    }

    /// From the probabilities of key block j to those of j + 1.
    #[inline(always)]
    unsafe fn step<W: Weights, const SMOOTH: bool>(
        &mut self,
        s: &mut Scores,
        factors: &mut Factors<'_>,
        state: &mut State<Rows>,
    ) {
        let shared = self.shared;
        // SAFETY: as in `run`.
        unsafe {
            // S(j+1) = Q K(j+1)^T, A += P(j) R(j); behind the last block once more that one's scores, of which all are masked
            if self.left > KEYS as u32 {
                self.k.advance();
                shared.k_full(self.k.stage()).wait(self.k.parity());
            }
            self.v.advance();
            shared.v_full(self.v.stage()).wait(self.v.parity());
            *s = [ZERO; KEYS / 2];
            pin(s);
            self.pin_product(state);
            pin(&mut state.pending.sums);
            wgmma::fence();
            issue(s, self.q, shared.k(self.k.stage()));
            wgmma::commit();
            W::issue(&mut state.partial, &self.p, shared.v(self.v.stage()), !state.fresh);
            wgmma::commit();
            let means_read = SMOOTH && self.block % MEAN_BLOCKS as u32 == 0 && self.block > 0;
            if means_read {
                // Last, in the full precision of a 16-bit product, and promoted before the next FP8 product.
                shared.means_full(self.means.stage()).wait(self.means.parity());
                wgmma::fence();
                state.issue_means(shared.means(self.means.stage()), true);
                self.until = 1;
                wgmma::commit();
            }
            self.block += 1;
            self.left = self.left.saturating_sub(KEYS as u32);

            let units = factors.next(self.left > 0);
            wgmma::wait::<1>();
            pin(s);
            let (encoded, alpha) = self.encode::<W>(s, units, state);

            // l += r(j), promotion, means
            wgmma::wait::<0>();
            pin(s);
            self.pin_product(state);
            if self.leader {
                shared.v_free(self.v.stage()).arrive();
                if means_read {
                    shared.means_free(self.means.stage()).arrive();
                }
            }
            if means_read {
                self.means.advance();
            }
            state.absorb::<SMOOTH>(
                self.block,
                self.block % 2 == 0,
                encoded,
                alpha,
                self.promotes(self.left == 0),
            );
            W::pack(s, &mut self.p);
        }
    }
}
