//! FP16 and E4M3 queries and keys: scores are packed f16 in code units, and the loop has two buffers of them.
//!
//! What runs beside what, for key block j of a warpgroup:
//!
//! ```text
//! Tensor Core   | A += P(j-1) R(j-1), S(j+1) = Q K(j+1)^T |
//! scalar units  | max of S(j), rescale, codes of S(j)      | row sums and promotion of j-1, pack P(j)
//! ```
//!
//! That makes one wait a key block. The other warpgroup fills the Tensor Core where this one is busy with the last column.

use super::super::call::Work;
use super::super::epilogue::RowEnd;
use super::super::softmax::{self, Encoder, Exp2, LOWEST, Rows, mask, pack, stay};
use super::super::tiles::{self, KEYS, MEAN_BLOCKS};
use super::super::{STAGES_E4M3, STAGES_F16};
use super::consumer::{Consumer, State};
use super::{Attend, Format, Values};
use crate::ptx::shuffle::{any, permute};
use crate::ptx::wgmma::{self, Descriptor, pin};
use crate::ptx::{SharedAddr, convert};

/// The product of queries and keys: 64 x 128 scores in packed f16.
pub(super) trait Scores: Format {
    /// Issues S = Q K^T for one key tile.
    unsafe fn issue(s: &mut [u32; 32], q: SharedAddr, k: SharedAddr);
}

/// FP16 queries and keys.
pub(super) struct F16;

impl Format for F16 {
    const Q_BYTES: usize = tiles::Q_F16_BYTES;
    const K_BYTES: usize = tiles::K_F16_BYTES;
    const STAGES: usize = STAGES_F16;
}

impl Scores for F16 {
    #[inline(always)]
    unsafe fn issue(s: &mut [u32; 32], q: SharedAddr, k: SharedAddr) {
        for half in 0..2 {
            let q = Descriptor::swizzled(q.add(half * (Self::Q_BYTES as u32 / 2)));
            let k = Descriptor::swizzled(k.add(half * (Self::K_BYTES as u32 / 2)));
            for step in 0..4 {
                // SAFETY: the caller's protocol; both tiles lie in shared memory as `tiles` says.
                unsafe { wgmma::m64n128k16_f16_f16(s, q.add(step * 32), k.add(step * 32), half + step > 0) }
            }
        }
    }
}

/// E4M3 queries and keys.
pub(super) struct E4m3;

impl Format for E4m3 {
    const Q_BYTES: usize = tiles::Q_E4M3_BYTES;
    const K_BYTES: usize = tiles::K_E4M3_BYTES;
    const STAGES: usize = STAGES_E4M3;
}

impl Scores for E4m3 {
    #[inline(always)]
    unsafe fn issue(s: &mut [u32; 32], q: SharedAddr, k: SharedAddr) {
        let (q, k) = (Descriptor::swizzled(q), Descriptor::swizzled(k));
        for step in 0..4 {
            // SAFETY: the caller's protocol; both tiles lie in shared memory as `tiles` says.
            unsafe { wgmma::m64n128k32_f16_e4m3(s, q.add(step * 32), k.add(step * 32), step > 0) }
        }
    }
}

/// From packed scores to E4M3 probabilities.
pub(super) trait Weights: Values {
    /// The two 16-bit halves of a score register after [`encode`](Self::encode), as `prmt` picks the four
    /// bytes of two registers.
    const PACK: u32;
    /// Writes the codes of scores `s` under the row maxima `max` (upper row in the lower half) over them.
    /// Returns this thread's share of the row sums if they do not come from the product. `not_zero` is for [`stay`].
    fn encode(s: &mut [u32; 32], max: u32, not_zero: u32) -> Option<Rows>;
    /// What the codes take for the row maxima, in code units.
    fn shift(max: u32) -> Rows;
}

impl<E: Encoder> Weights for E {
    const PACK: u32 = Self::BYTES;

    #[inline(always)]
    fn encode(s: &mut [u32; 32], max: u32, not_zero: u32) -> Option<Rows> {
        let addend = Self::addend(max);
        let rows = [permute(addend, addend, 0x1010), permute(addend, addend, 0x3232)];
        stay(not_zero, || {
            for (i, s) in s.iter_mut().enumerate() {
                *s = Self::code(*s, rows[i % 2]);
            }
            pin(s);
        });
        None
    }

    #[inline(always)]
    fn shift(max: u32) -> Rows {
        Self::reference(max)
    }
}

impl Weights for Exp2 {
    const PACK: u32 = 0x3210;

    #[inline(always)]
    fn encode(s: &mut [u32; 32], max: u32, not_zero: u32) -> Option<Rows> {
        let (upper, lower) = convert::f32_of_f16x2(max);
        let offset = [convert::fma(upper, -0.125, 8.0), convert::fma(lower, -0.125, 8.0)];
        let mut sums = [0.0; 2];
        // In quarters: the assembler would take all scores apart first and run out of registers.
        let (quarters, _) = s.as_chunks_mut::<8>();
        for quarter in quarters {
            stay(not_zero, || {
                for i in [0, 1, 4, 5] {
                    let (a, b) = convert::f32_of_f16x2(quarter[i]);
                    let (c, d) = convert::f32_of_f16x2(quarter[i + 2]);
                    let e = [a, b, c, d].map(|s| convert::exp2(convert::fma(s, 0.125, offset[i % 2])));
                    sums[i % 2] += (e[0] + e[1]) + (e[2] + e[3]);
                    quarter[i] = convert::e4m3x4(e);
                    // Of no use, but what a loop leaves as it was is computed in front of it.
                    quarter[i + 2] = e[3].to_bits();
                }
                pin(quarter);
            });
        }
        Some(sums)
    }

    #[inline(always)]
    fn shift(max: u32) -> Rows {
        let (upper, lower) = convert::f32_of_f16x2(max);
        [upper, lower]
    }
}

impl<S: Scores, const STAGES: u32> Consumer<'_, S, STAGES> {
    /// All key blocks; there is at least one key.
    #[inline(always)]
    pub(super) unsafe fn run<W: Weights, const SMOOTH: bool>(&mut self, state: &mut State<u32>) {
        let (mut a, mut b) = ([0; 32], [0; 32]);
        // SAFETY: the warpgroup runs this together; registers in flight are pinned until their wait, tiles are read
        // between their full and free barriers.
        unsafe {
            self.shared.q_full().wait(0);
            self.shared.k_full(self.k.stage()).wait(self.k.parity());
            pin(&mut a);
            wgmma::fence();
            S::issue(&mut a, self.q, self.shared.k(self.k.stage()));
            wgmma::commit();
            wgmma::wait::<0>();
            pin(&mut a);
            let first = self.k;
            if self.left > KEYS as u32 {
                self.k.advance();
                self.shared.k_full(self.k.stage()).wait(self.k.parity());
                if self.leader {
                    self.shared.k_free(first.stage()).arrive();
                }
            }
            pin(&mut b);
            wgmma::fence();
            S::issue(&mut b, self.q, self.shared.k(self.k.stage()));
            wgmma::commit();
            while !self.step::<W, SMOOTH, true>(&mut a, &mut b, state) {
                self.step::<W, SMOOTH, false>(&mut b, &mut a, state);
            }
            if SMOOTH {
                self.restore_last_means(state);
            }
        }
    }

    /// From the scores S(j) in `s` to the product with their probabilities. Meanwhile A += P(j-1) R(j-1) and
    /// `other` = S(j+1) are in flight, and then A += P(j) R(j) and `s` = S(j+2). True behind the last block.
    #[inline(always)]
    unsafe fn step<W: Weights, const SMOOTH: bool, const EVEN: bool>(
        &mut self,
        s: &mut [u32; 32],
        other: &mut [u32; 32],
        state: &mut State<u32>,
    ) -> bool {
        let shared = self.shared;
        // SAFETY: as in `run`.
        unsafe {
            // m' = max(m, rowmax S(j)), codes of S(j) in place, A <- alpha A where a max moved
            if self.left < KEYS as u32 {
                mask(s, self.left);
            }
            let before = state.max;
            state.max = softmax::raise_max(state.max, s);
            // Two parameters that are not 0: what was learned of one at the end of a loop must not end the other's.
            let not_zero = if EVEN { self.call.promote } else { self.call.group.get() };
            let encoded = W::encode(s, state.max, not_zero);
            let alpha = if any(before != state.max) {
                Some(state.rescale(W::shift(before), W::shift(state.max)))
            } else {
                None
            };

            let means_read = !EVEN && self.block % MEAN_BLOCKS as u32 == 1 && self.block > 1;
            let last_k = self.k;
            let more = self.left > 2 * KEYS as u32;
            if more {
                self.k.advance();
                shared.k_full(self.k.stage()).wait(self.k.parity());
            }
            let last_v = self.v;
            if self.left > 0 {
                self.v.advance();
                shared.v_full(self.v.stage()).wait(self.v.parity());
            }

            // l += r(j-1), promotion, means
            wgmma::wait::<0>();
            pin(other);
            self.pin_product(state);
            if self.leader {
                if more {
                    shared.k_free(last_k.stage()).arrive();
                }
                // The step on masked scores behind an odd number of blocks reads the last tile once more.
                if self.block > 0 && (EVEN || self.left > 0) {
                    shared.v_free(last_v.stage()).arrive();
                }
                if SMOOTH && means_read {
                    shared.means_free(self.means.stage()).arrive();
                }
            }
            if SMOOTH && means_read {
                self.means.advance();
            }
            let promote = self.promotes(self.left == 0);
            state.absorb::<SMOOTH>(self.block, EVEN, encoded, alpha, promote);
            if EVEN && self.left == 0 {
                return true;
            }

            // A += P(j) R(j) and S(j+2) = Q K(j+2)^T; behind the last block once more that one's scores
            pack(s, W::PACK, &mut self.p);
            pin(s);
            self.pin_product(state);
            pin(&mut state.pending.sums);
            wgmma::fence();
            W::issue(&mut state.partial, &self.p, shared.v(self.v.stage()), !state.fresh);
            wgmma::commit();
            S::issue(s, self.q, shared.k(self.k.stage()));
            wgmma::commit();
            if EVEN && SMOOTH && self.block % MEAN_BLOCKS as u32 == 0 && self.block > 0 {
                // Last, in the full precision of a 16-bit product, and promoted before the next FP8 product.
                shared.means_full(self.means.stage()).wait(self.means.parity());
                wgmma::fence();
                state.issue_means(shared.means(self.means.stage()), true);
                wgmma::commit();
                self.until = 1;
            }
            self.block += 1;
            self.left = self.left.saturating_sub(KEYS as u32);
        }
        false
    }
}

impl<S: Scores, W: Weights> Attend<W> for S {
    type Max = u32;
    const LOWEST: u32 = LOWEST;

    #[inline(always)]
    unsafe fn run<const STAGES: u32, const SMOOTH: bool>(
        consumer: &mut Consumer<S, STAGES>,
        _: &Work,
        state: &mut State<u32>,
    ) {
        // SAFETY: as the caller has it.
        unsafe { consumer.run::<W, SMOOTH>(state) }
    }

    #[inline(always)]
    fn ends(max: u32) -> [RowEnd; 2] {
        let ((upper, lower), shift) = (convert::f32_of_f16x2(max), W::shift(max));
        [RowEnd { max: upper, shift: shift[0] }, RowEnd { max: lower, shift: shift[1] }]
    }
}
