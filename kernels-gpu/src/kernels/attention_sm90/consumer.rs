//! What a warpgroup of 64 query rows keeps from key block to key block, whatever its scores are.

use super::super::call::Call;
use super::super::softmax::{Pending, Rows, quad_sum};
use super::Format;
use super::memory::{Ring, Shared};
use crate::ptx::special::thread_idx_x;
use crate::ptx::wgmma::{self, Descriptor, pin};
use crate::ptx::{SharedAddr, convert};

/// The FP8 product since the last promotion, and the columns of ones.
pub(super) struct Partial {
    pub(super) values: [f32; 64],
    pub(super) ones: [f32; 4],
    /// What `ones` held before the product in flight.
    seen: Rows,
}

impl Partial {
    /// Row sums by the columns of ones in the product that has just completed.
    #[inline(always)]
    fn row_sums(&mut self) -> Rows {
        let sums = [self.ones[0] - self.seen[0], self.ones[2] - self.seen[1]];
        self.seen = [self.ones[0], self.ones[2]];
        sums
    }
}

/// The running state of a thread's two rows.
pub(super) struct State<M> {
    /// Row maxima in code units.
    pub(super) max: M,
    /// Row sums under `max`.
    pub(super) sum: Rows,
    /// Output under `max`, all promoted parts.
    pub(super) out: [f32; 64],
    /// FP8 products since the last promotion.
    pub(super) partial: Partial,
    /// Whether `partial` holds none yet.
    pub(super) fresh: bool,
    /// Row sums of the key blocks whose means are not restored yet.
    pub(super) pending: Pending,
}

impl<M> State<M> {
    /// Nothing yet; `lowest` is below all scores.
    #[inline(always)]
    pub(super) fn new(lowest: M) -> Self {
        Self {
            max: lowest,
            sum: [0.0; 2],
            out: [0.0; 64],
            partial: Partial { values: [0.0; 64], ones: [0.0; 4], seen: [0.0; 2] },
            fresh: true,
            pending: Pending::new(),
        }
    }

    /// Takes in the product of the key block before `block`, which is under the maxima before `alpha`: at its time
    /// the promotion. And row sums: of that key block from the product, or of `block` from what encoding it
    /// returned. `even` is the parity of `block`.
    #[inline(always)]
    pub(super) unsafe fn absorb<const SMOOTH: bool>(
        &mut self,
        block: u32,
        even: bool,
        encoded: Option<Rows>,
        alpha: Option<Rows>,
        promote: bool,
    ) {
        let factor = alpha.unwrap_or([1.0; 2]);
        if SMOOTH && alpha.is_some() {
            self.pending.rescale(factor);
        }
        let (sums, of, of_even) = match encoded {
            // SAFETY: the whole warp is here.
            Some(own) => (unsafe { [quad_sum(own[0]), quad_sum(own[1])] }, block, even),
            None => {
                let sums = self.partial.row_sums();
                ([sums[0] * factor[0], sums[1] * factor[1]], block.wrapping_sub(1), !even)
            }
        };
        self.sum[0] += sums[0];
        self.sum[1] += sums[1];
        if SMOOTH {
            self.pending.keep(of, of_even, convert::f16x2(sums[0], sums[1]));
        }
        self.fresh = promote;
        if promote {
            for (i, p) in self.partial.values.iter().enumerate() {
                self.out[i] = convert::fma(*p, factor[i / 2 % 2], self.out[i]);
            }
            self.partial.seen = [0.0; 2];
        } else if alpha.is_some() {
            for (i, p) in self.partial.values.iter_mut().enumerate() {
                *p *= factor[i / 2 % 2];
            }
            for row in 0..2 {
                self.partial.ones[2 * row] *= factor[row];
                self.partial.seen[row] *= factor[row];
            }
        }
    }

    /// Brings what is not in flight from the row maxima that codes took before to those of now, and says by which factors.
    #[inline(always)]
    pub(super) fn rescale(&mut self, before: Rows, now: Rows) -> Rows {
        let alpha = [0, 1].map(|row| convert::exp2((before[row] - now[row]) * 0.125));
        for (i, o) in self.out.iter_mut().enumerate() {
            *o *= alpha[i / 2 % 2];
        }
        for row in 0..2 {
            self.sum[row] *= alpha[row];
        }
        alpha
    }

    /// Issues partial += pending row sums x block means.
    #[inline(always)]
    pub(super) unsafe fn issue_means(&mut self, means: SharedAddr, accumulate: bool) {
        let means = Descriptor::plain(means, 128, 256);
        // SAFETY: the caller's protocol; the tile has landed.
        unsafe { wgmma::m64n128k16_f32_f16(&mut self.partial.values, self.pending.sums, means, accumulate) }
    }
}

/// The attention loop of one warpgroup.
pub(super) struct Consumer<'a, S, const STAGES: u32> {
    pub(super) call: &'a Call,
    pub(super) shared: &'a Shared<S>,
    pub(super) q: SharedAddr,
    pub(super) leader: bool,
    /// K tile and V tile of the latest product.
    pub(super) k: Ring<STAGES>,
    pub(super) v: Ring<STAGES>,
    pub(super) means: Ring<2>,
    /// The key block whose scores are next, and the keys from there on.
    pub(super) block: u32,
    pub(super) left: u32,
    /// Key blocks until the next promotion.
    pub(super) until: u32,
    /// Probabilities of the product in flight.
    pub(super) p: [u32; 16],
}

impl<'a, S: Format, const STAGES: u32> Consumer<'a, S, STAGES> {
    /// In front of the first key block, with `keys` keys to come.
    #[inline(always)]
    pub(super) fn new(call: &'a Call, shared: &'a Shared<S>, warpgroup: u32, keys: u32) -> Self {
        Self {
            call,
            shared,
            q: shared.q(warpgroup),
            leader: thread_idx_x() % 32 == 0,
            k: Ring::start(),
            v: Ring::before(),
            means: Ring::start(),
            block: 0,
            left: keys,
            until: 1,
            p: [0; 16],
        }
    }

    /// Whether the product that is absorbed now is promoted: after every `promote` of them, and the last.
    #[inline(always)]
    pub(super) fn promotes(&mut self, last: bool) -> bool {
        self.until -= 1;
        let now = self.until == 0 || last;
        if now {
            self.until = self.call.promote;
        }
        now
    }

    /// Holds the registers of the product with the values in place: before a fence, and behind the wait.
    #[inline(always)]
    pub(super) fn pin_product<M>(&mut self, state: &mut State<M>) {
        pin(&mut self.p);
        pin(&mut state.partial.values);
        pin(&mut state.partial.ones);
    }

    /// The means of the key blocks since they were restored last; nothing is in flight.
    ///
    /// # Safety
    /// The warpgroup runs it together.
    #[inline(always)]
    pub(super) unsafe fn restore_last_means<M>(&self, state: &mut State<M>) {
        // SAFETY: registers are pinned until their wait; the tile is read after its barrier.
        unsafe {
            self.shared.means_full(self.means.stage()).wait(self.means.parity());
            pin(&mut state.partial.values);
            pin(&mut state.pending.sums);
            wgmma::fence();
            state.issue_means(self.shared.means(self.means.stage()), false);
            wgmma::commit();
            wgmma::wait::<0>();
            pin(&mut state.partial.values);
        }
        for (o, p) in state.out.iter_mut().zip(&state.partial.values) {
            *o += *p;
        }
    }
}
