//! Fused low-bit attention for Hopper, section 2 of the method on wgmma.
//!
//! A block serves 128 query rows of one head: one producer warp streams K and V tiles through a ring in shared
//! memory, and two warpgroups of 64 rows each run the loop of [`Consumer`]. Scores leave the Tensor Core as packed
//! f16 in *code units* (eighths of an octave: Q and K carry sqrt(scale * 8 log2 e) each), probabilities are
//! E4M3 bytes whose largest in a row is 256, and the tiles are those of [`tiles`].
//!
//! What runs beside what, for key block j of a warpgroup:
//!
//! ```text
//! Tensor Core   | A += P(j-1) R(j-1), S(j+1) = Q K(j+1)^T |
//! scalar units  | max of S(j), rescale, codes of S(j)      | row sums and promotion of j-1, pack P(j)
//! ```
//!
//! Two score buffers make that one wait a key block. The other warpgroup fills the Tensor Core where this one is busy with
//! the last column.
//!
//! * **Row sums** come from 8 rows of ones behind every V tile (ExpCast), or from the f32 exponentials (exp2).
//! * **Block means** are deferred: the row sums of 16 key blocks are the A fragment of one 16-bit product with
//!   their 16 means.
//! * **Promotion**: FP8 products keep about 14 bits while accumulating, so they accumulate into a partial that is
//!   added to the f32 accumulator every `promote` key blocks.
//! * **Rescaling** by alpha happens only where a warp saw one of its row maxima move, beside the product that
//!   is still under the old ones; that one takes alpha when it is added.
//! * **Not finite**: the row max keeps a NaN, and one of a score or an overflow makes it NaN or infinite; such a
//!   row is NaN in the output. `poisoned` marks (batch, kv head)s whose keys or values were not finite.
//!
//! # Parameters of every entry
//! Device pointers, 16-byte aligned unless said otherwise; heads are numbered batch * heads + head.
//!
//! | name | what |
//! |---|---|
//! | `q`, `k`, `v`, `means` | tiles ([`tiles`]), heads in order; `means` is not read without smoothing |
//! | `v_scale` | f32 `[batch, kv_heads, 128]`: multiplies channel c of the output |
//! | `kv_lens` | u32 `[batch]`, or null: keys that count, at most `kv_tokens` |
//! | `poisoned` | u32 `[batch, kv_heads]`, or null: not 0 makes the head's output NaN |
//! | `out` | element (b, h, t, c) at b * `out_batch` + h * `out_head` + t * `out_token` + c, in elements; 8-byte (f32) or 4-byte aligned pairs |
//! | `lse` | f32 `[batch, q_heads, q_tokens]`, or null: receives the natural log of the sum of exponentials |
//! | `lse_shift` | as `lse`, or null: added to it (what centring K took away) |
//! | `row_max` | u32 `[batch, q_heads]`, or null, zeroed by the caller: the largest magnitude of a row max in code units, as f32 bits (which order as integers; NaN is on top) |
//! | `q_tokens`, `kv_tokens`, `q_heads`, `kv_heads`, `group` | sizes; `group` = `q_heads` / `kv_heads` query heads share a kv head |
//! | `head_dim` | channels of the output, a multiple of 8 up to 128: the rest of a tile is padding |
//! | `promote` | key blocks between promotions, at least 1 |
//! | `out_type` | [`OUT_F32`], [`OUT_F16`] or [`OUT_BF16`] |
//!
//! The grid is ceil(`q_tokens` / 128) x `q_heads` x batch: query blocks of a head first, so that the blocks that
//! run together share K and V in L2.

use core::num::NonZeroU32;

use super::epilogue::{Call, PEAK_E4M3, RowEnd, Work, finish};
pub use super::epilogue::{OUT_BF16, OUT_F16, OUT_F32};
use super::softmax::{self, Encoder, Exp2, ExpCast, Pending, Quadratic, Rows, mask, pack, quad_sum, stay};
use super::tiles::{self, KEYS, MEAN_BLOCKS, MEAN_BYTES, ROWS, V_BYTES};
use super::{ONES_BYTES, STAGES_E4M3, STAGES_F16};
use crate::ptx::bulk_copy::global_to_shared;
use crate::ptx::f16x2::splat;
use crate::ptx::mbarrier::{Barrier, fence_init, fence_proxy_async};
use crate::ptx::memory::store_shared_v4;
use crate::ptx::shuffle::{any, broadcast, permute};
use crate::ptx::special::{claim_registers, release_registers, sync_threads, thread_idx_x};
use crate::ptx::wgmma::{self, Descriptor, pin};
use crate::ptx::{SharedAddr, convert};

crate::ptx::shared_symbol!(
    /// Start of the dynamic shared memory, a multiple of 1024.
    fn shared_base, "vc_shared", 1024
);

/// The product of queries and keys: 64 x 128 scores in packed f16.
trait Scores {
    const Q_BYTES: usize;
    const K_BYTES: usize;
    const STAGES: usize;
    /// Issues S = Q K^T for one key tile.
    unsafe fn issue(s: &mut [u32; 32], q: SharedAddr, k: SharedAddr);
}

/// FP16 queries and keys.
struct F16;

impl Scores for F16 {
    const Q_BYTES: usize = tiles::Q_F16_BYTES;
    const K_BYTES: usize = tiles::K_F16_BYTES;
    const STAGES: usize = STAGES_F16;

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
struct E4m3;

impl Scores for E4m3 {
    const Q_BYTES: usize = tiles::Q_E4M3_BYTES;
    const K_BYTES: usize = tiles::K_E4M3_BYTES;
    const STAGES: usize = STAGES_E4M3;

    #[inline(always)]
    unsafe fn issue(s: &mut [u32; 32], q: SharedAddr, k: SharedAddr) {
        let (q, k) = (Descriptor::swizzled(q), Descriptor::swizzled(k));
        for step in 0..4 {
            // SAFETY: the caller's protocol; both tiles lie in shared memory as `tiles` says.
            unsafe { wgmma::m64n128k32_f16_e4m3(s, q.add(step * 32), k.add(step * 32), step > 0) }
        }
    }
}

/// From scores to E4M3 probabilities and their product with the values.
trait Weights {
    /// The two 16-bit halves of a score register after [`encode`](Self::encode), as `prmt` picks the four
    /// bytes of two registers.
    const PACK: u32;
    /// Writes the codes of scores `s` under the row maxima `max` (upper row in the lower half) over them.
    /// Returns this thread's share of the row sums if they do not come from the product. `not_zero` is for [`stay`].
    fn encode(s: &mut [u32; 32], max: u32, not_zero: u32) -> Option<Rows>;
    /// Issues partial += P R for one value tile.
    unsafe fn issue(partial: &mut Partial, p: &[u32; 16], v: SharedAddr, accumulate: bool);
    /// What the codes take for the row maxima, in code units.
    fn shift(max: u32) -> Rows;
}

/// The FP8 product since the last promotion, and the columns of ones.
struct Partial {
    values: [f32; 64],
    ones: [f32; 4],
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
    unsafe fn issue(partial: &mut Partial, p: &[u32; 16], v: SharedAddr, accumulate: bool) {
        let v = Descriptor::swizzled(v);
        for step in 0..4 {
            let a = [p[4 * step], p[4 * step + 1], p[4 * step + 2], p[4 * step + 3]];
            let (values, ones) = (&mut partial.values, &mut partial.ones);
            // SAFETY: the caller's protocol; the ones rows lie behind the tile.
            unsafe {
                wgmma::m64n136k32_f32_e4m3(values, ones, a, v.add(step as u32 * 32), accumulate || step > 0)
            }
        }
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
    unsafe fn issue(partial: &mut Partial, p: &[u32; 16], v: SharedAddr, accumulate: bool) {
        let v = Descriptor::swizzled(v);
        for step in 0..4 {
            let a = [p[4 * step], p[4 * step + 1], p[4 * step + 2], p[4 * step + 3]];
            // SAFETY: the caller's protocol.
            unsafe {
                wgmma::m64n128k32_f32_e4m3(
                    &mut partial.values,
                    a,
                    v.add(step as u32 * 32),
                    accumulate || step > 0,
                )
            }
        }
    }

    #[inline(always)]
    fn shift(max: u32) -> Rows {
        let (upper, lower) = convert::f32_of_f16x2(max);
        [upper, lower]
    }
}

/// Shared memory of a block.
struct Shared<S> {
    base: SharedAddr,
    scores: core::marker::PhantomData<S>,
}

impl<S: Scores> Shared<S> {
    const K: u32 = 2 * S::Q_BYTES as u32;
    const V: u32 = Self::K + (S::STAGES * S::K_BYTES) as u32;
    const MEANS: u32 = Self::V + (S::STAGES * (V_BYTES + ONES_BYTES)) as u32;
    const BARRIERS: u32 = Self::MEANS + 2 * MEAN_BYTES as u32;
    const STAGES: u32 = S::STAGES as u32;

    #[inline(always)]
    fn new() -> Self {
        Self { base: shared_base(), scores: core::marker::PhantomData }
    }
    #[inline(always)]
    fn q(&self, warpgroup: u32) -> SharedAddr {
        self.base.add(warpgroup * S::Q_BYTES as u32)
    }
    #[inline(always)]
    fn k(&self, stage: u32) -> SharedAddr {
        self.base.add(Self::K + stage * S::K_BYTES as u32)
    }
    #[inline(always)]
    fn v(&self, stage: u32) -> SharedAddr {
        self.base.add(Self::V + stage * (V_BYTES + ONES_BYTES) as u32)
    }
    #[inline(always)]
    fn means(&self, slot: u32) -> SharedAddr {
        self.base.add(Self::MEANS + slot * MEAN_BYTES as u32)
    }
    #[inline(always)]
    fn barrier(&self, index: u32) -> Barrier {
        Barrier::at(self.base.add(Self::BARRIERS + index * Barrier::BYTES))
    }
    #[inline(always)]
    fn q_full(&self) -> Barrier {
        self.barrier(0)
    }
    #[inline(always)]
    fn k_full(&self, stage: u32) -> Barrier {
        self.barrier(1 + stage)
    }
    #[inline(always)]
    fn v_full(&self, stage: u32) -> Barrier {
        self.barrier(1 + Self::STAGES + stage)
    }
    #[inline(always)]
    fn means_full(&self, slot: u32) -> Barrier {
        self.barrier(1 + 2 * Self::STAGES + slot)
    }
    #[inline(always)]
    fn k_free(&self, stage: u32) -> Barrier {
        self.barrier(3 + 2 * Self::STAGES + stage)
    }
    #[inline(always)]
    fn v_free(&self, stage: u32) -> Barrier {
        self.barrier(3 + 3 * Self::STAGES + stage)
    }
    #[inline(always)]
    fn means_free(&self, slot: u32) -> Barrier {
        self.barrier(3 + 4 * Self::STAGES + slot)
    }

    /// Barriers and rows of ones, once a block.
    #[inline(always)]
    unsafe fn prepare(&self, thread: u32) {
        // SAFETY: the block's own memory before anybody uses it; every thread is here.
        unsafe {
            if thread == 0 {
                // A producer fills; the 8 consumer warps free.
                for i in 0..3 + 2 * Self::STAGES {
                    self.barrier(i).init(1);
                }
                for i in 3 + 2 * Self::STAGES..5 + 4 * Self::STAGES {
                    self.barrier(i).init(8);
                }
                fence_init();
            }
            const PIECES: u32 = ONES_BYTES as u32 / 16;
            if thread < PIECES * Self::STAGES {
                let at = self.v(thread / PIECES).add(V_BYTES as u32 + thread % PIECES * 16);
                store_shared_v4(at, [0x3838_3838; 4]); // E4M3 ones
            }
            fence_proxy_async();
            sync_threads();
        }
    }
}

/// A place in a ring of `STAGES`, counted over two rounds: the second round waits for the other parity of the barriers.
///
/// One word that is the same in all lanes: the assembler keeps it in a uniform register.
#[derive(Clone, Copy)]
struct Ring<const STAGES: u32>(u32);

impl<const STAGES: u32> Ring<STAGES> {
    #[inline(always)]
    fn start() -> Self {
        Self(0)
    }
    /// The place before the first.
    #[inline(always)]
    fn before() -> Self {
        Self(2 * STAGES - 1)
    }
    #[inline(always)]
    fn stage(self) -> u32 {
        if self.0 < STAGES { self.0 } else { self.0 - STAGES }
    }
    #[inline(always)]
    fn parity(self) -> u32 {
        (self.0 >= STAGES) as u32
    }
    #[inline(always)]
    fn advance(&mut self) {
        self.0 = if self.0 == 2 * STAGES - 1 { 0 } else { self.0 + 1 };
    }
}

/// One lane streams the operands of a block: Q once, then K, V and every 16th tile the means.
#[inline(always)]
unsafe fn produce<S: Scores, const STAGES: u32, const SMOOTH: bool>(
    call: &Call,
    work: &Work,
    shared: &Shared<S>,
) {
    let tiles_a_head = call.kv_tokens.div_ceil(KEYS as u32) as usize;
    let kv_head = work.kv_head as usize;
    let q_tile = (work.batch * call.q_heads + work.h) as usize
        * (call.q_tokens.div_ceil(2 * ROWS as u32) as usize * 2)
        + work.row as usize / ROWS;
    // SAFETY: offsets inside the tiles of this head; every slot is filled after its consumers freed it.
    unsafe {
        let q = call.q.add(q_tile * S::Q_BYTES);
        let mut k = call.k.add(kv_head * tiles_a_head * S::K_BYTES);
        let mut v = call.v.add(kv_head * tiles_a_head * V_BYTES);
        let mut means = call.means.wrapping_add(kv_head * tiles_a_head.div_ceil(MEAN_BLOCKS) * MEAN_BYTES);

        shared.q_full().arrive_expect(2 * S::Q_BYTES as u32);
        global_to_shared(shared.q(0), q, 2 * S::Q_BYTES as u32, shared.q_full());
        let (mut k_ring, mut v_ring) = (Ring::<STAGES>::start(), Ring::<STAGES>::start());
        let mut slot = Ring::<2>::start();
        // The consumers are two scores ahead of the values.
        for tile in 0..work.tiles + 2 {
            if tile < work.tiles {
                // The phase before the first counts as complete: fresh slots are free.
                shared.k_free(k_ring.stage()).wait(k_ring.parity() ^ 1);
                shared.k_full(k_ring.stage()).arrive_expect(S::K_BYTES as u32);
                global_to_shared(
                    shared.k(k_ring.stage()),
                    k,
                    S::K_BYTES as u32,
                    shared.k_full(k_ring.stage()),
                );
                k = k.add(S::K_BYTES);
                k_ring.advance();
            }
            if tile >= 2 {
                shared.v_free(v_ring.stage()).wait(v_ring.parity() ^ 1);
                shared.v_full(v_ring.stage()).arrive_expect(V_BYTES as u32);
                global_to_shared(shared.v(v_ring.stage()), v, V_BYTES as u32, shared.v_full(v_ring.stage()));
                v = v.add(V_BYTES);
                v_ring.advance();
            }
            if SMOOTH && tile >= 2 && (tile - 2) % MEAN_BLOCKS as u32 == 0 {
                shared.means_free(slot.stage()).wait(slot.parity() ^ 1);
                shared.means_full(slot.stage()).arrive_expect(MEAN_BYTES as u32);
                global_to_shared(
                    shared.means(slot.stage()),
                    means,
                    MEAN_BYTES as u32,
                    shared.means_full(slot.stage()),
                );
                means = means.wrapping_add(MEAN_BYTES);
                slot.advance();
            }
        }
    }
}

/// The running state of a thread's two rows.
struct State {
    /// Row maxima in f16 code units, the upper row in the lower half.
    max: u32,
    /// Row sums under `max`.
    sum: Rows,
    /// Output under `max`, all promoted parts.
    out: [f32; 64],
    /// FP8 products since the last promotion.
    partial: Partial,
    /// Whether `partial` holds none yet.
    fresh: bool,
    /// Row sums of the key blocks whose means are not restored yet.
    pending: Pending,
}

impl State {
    #[inline(always)]
    fn new() -> Self {
        Self {
            max: splat(0xfc00),
            sum: [0.0; 2],
            out: [0.0; 64],
            partial: Partial { values: [0.0; 64], ones: [0.0; 4], seen: [0.0; 2] },
            fresh: true,
            pending: Pending::new(),
        }
    }

    /// Takes in the product of the key block before `block`, which is under the maxima before `alpha`: at its time
    /// the promotion. And row sums: of that key block from the product, or of `block` from what encoding it
    /// returned. `EVEN` is the parity of `block`.
    #[inline(always)]
    unsafe fn absorb<const SMOOTH: bool, const EVEN: bool>(
        &mut self,
        block: u32,
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
            Some(own) => (unsafe { [quad_sum(own[0]), quad_sum(own[1])] }, block, EVEN),
            None => {
                let sums = self.partial.row_sums();
                ([sums[0] * factor[0], sums[1] * factor[1]], block.wrapping_sub(1), !EVEN)
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

    /// Brings what is not in flight from the maxima `before` to those of now, and says by which factors.
    #[inline(always)]
    fn rescale<W: Weights>(&mut self, before: u32) -> Rows {
        let (old, new) = (W::shift(before), W::shift(self.max));
        let alpha = [convert::exp2((old[0] - new[0]) * 0.125), convert::exp2((old[1] - new[1]) * 0.125)];
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
    unsafe fn issue_means(&mut self, means: SharedAddr, accumulate: bool) {
        let means = Descriptor::plain(means, 128, 256);
        // SAFETY: the caller's protocol; the tile has landed.
        unsafe { wgmma::m64n128k16_f32_f16(&mut self.partial.values, self.pending.sums, means, accumulate) }
    }
}

/// The attention loop of one warpgroup.
struct Consumer<'a, S, const STAGES: u32> {
    call: &'a Call,
    /// Key blocks between promotions.
    promote: u32,
    shared: &'a Shared<S>,
    q: SharedAddr,
    leader: bool,
    /// K tile of the latest product, V tile of the next.
    k: Ring<STAGES>,
    v: Ring<STAGES>,
    means: Ring<2>,
    /// The key block whose scores are next, and the keys from there on.
    block: u32,
    left: u32,
    /// Key blocks until the next promotion.
    until: u32,
    /// Probabilities of the product in flight.
    p: [u32; 16],
}

impl<S: Scores, const STAGES: u32> Consumer<'_, S, STAGES> {
    /// All key blocks; there is at least one key.
    #[inline(always)]
    unsafe fn run<W: Weights, const SMOOTH: bool>(&mut self, state: &mut State) {
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
                // The means since then.
                self.shared.means_full(self.means.stage()).wait(self.means.parity());
                pin(&mut state.partial.values);
                pin(&mut state.pending.sums);
                wgmma::fence();
                state.issue_means(self.shared.means(self.means.stage()), false);
                wgmma::commit();
                wgmma::wait::<0>();
                pin(&mut state.partial.values);
                for (o, p) in state.out.iter_mut().zip(&state.partial.values) {
                    *o += *p;
                }
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
        state: &mut State,
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
            let not_zero = if EVEN { self.promote } else { self.call.group.get() };
            let encoded = W::encode(s, state.max, not_zero);
            let alpha = if any(before != state.max) { Some(state.rescale::<W>(before)) } else { None };

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
            pin(&mut self.p);
            pin(&mut state.partial.values);
            pin(&mut state.partial.ones);
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
            self.until -= 1;
            let promote = self.until == 0 || self.left == 0;
            if promote {
                self.until = self.promote;
            }
            state.absorb::<SMOOTH, EVEN>(self.block, encoded, alpha, promote);
            if EVEN && self.left == 0 {
                return true;
            }

            // A += P(j) R(j) and S(j+2) = Q K(j+2)^T; behind the last block once more that one's scores
            pack(s, W::PACK, &mut self.p);
            pin(s);
            pin(&mut self.p);
            pin(&mut state.partial.values);
            pin(&mut state.partial.ones);
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

/// The kernel: roles by warpgroup.
#[inline(always)]
unsafe fn attention<S: Scores, W: Weights, const STAGES: u32, const SMOOTH: bool>(call: Call, promote: u32) {
    let shared = Shared::<S>::new();
    let warpgroup = thread_idx_x() / 128;
    // SAFETY: all threads of the block are here; after that each warpgroup has its role.
    unsafe {
        shared.prepare(thread_idx_x());
        if warpgroup == 2 {
            release_registers::<24>();
            if thread_idx_x() == 256 {
                let work = call.work();
                // Nobody would wait for a copy without keys, and a block must not end before its copies.
                if work.tiles > 0 {
                    produce::<S, STAGES, SMOOTH>(&call, &work, &shared);
                }
            }
        } else {
            claim_registers::<240>();
            let work = call.work();
            let mut state = State::new();
            if work.tiles > 0 {
                let mut consumer = Consumer {
                    call: &call,
                    promote,
                    shared: &shared,
                    q: shared.q(broadcast(warpgroup)),
                    leader: thread_idx_x() % 32 == 0,
                    k: Ring::<STAGES>::start(),
                    v: Ring::before(),
                    means: Ring::start(),
                    block: 0,
                    left: work.keys,
                    until: 1,
                    p: [0; 16],
                };
                consumer.run::<W, SMOOTH>(&mut state);
            }
            // Anew, so that nothing of it occupies registers during the loop.
            finish(&call, &call.work(), PEAK_E4M3, &state.out, &state.sum, || {
                let (max, shift) = (convert::f32_of_f16x2(state.max), W::shift(state.max));
                [RowEnd { max: max.0, shift: shift[0] }, RowEnd { max: max.1, shift: shift[1] }]
            });
        }
    }
}

macro_rules! entry {
    ($name:ident, $scores:ty, $weights:ty, $stages:expr, $smooth:literal) => { kernel! {
        #[doc = concat!("[`attention`] with [`", stringify!($scores), "`] scores and [`", stringify!($weights), "`] probabilities.")]
        ///
        /// # Safety
        /// Parameters as the module says, launched with the bounds of its [`Entry`](super::Entry).
        pub unsafe fn $name(
            q: *const u8,
            k: *const u8,
            v: *const u8,
            means: *const u8,
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
            group: NonZeroU32,
            head_dim: u32,
            out_batch: i64,
            out_head: i64,
            out_token: i64,
            promote: u32,
            out_type: u32,
        ) {
            let call = Call {
                q, k, v, means, v_scale, kv_lens, poisoned, out, lse, lse_shift, row_max, q_tokens, kv_tokens,
                q_heads, kv_heads, group, head_dim, out_batch, out_head, out_token, out_type,
            };
            // SAFETY: the entry's contract.
            unsafe { attention::<$scores, $weights, { $stages as u32 }, $smooth>(call, promote) }
        }
    }};
}

entry!(attention_sm90_f16_expcast_smooth, F16, ExpCast, STAGES_F16, true);
entry!(attention_sm90_f16_expcast_plain, F16, ExpCast, STAGES_F16, false);
entry!(attention_sm90_f16_quadratic_smooth, F16, Quadratic, STAGES_F16, true);
entry!(attention_sm90_f16_quadratic_plain, F16, Quadratic, STAGES_F16, false);
entry!(attention_sm90_f16_exp2_smooth, F16, Exp2, STAGES_F16, true);
entry!(attention_sm90_f16_exp2_plain, F16, Exp2, STAGES_F16, false);
entry!(attention_sm90_e4m3_expcast_smooth, E4m3, ExpCast, STAGES_E4M3, true);
entry!(attention_sm90_e4m3_expcast_plain, E4m3, ExpCast, STAGES_E4M3, false);
entry!(attention_sm90_e4m3_quadratic_smooth, E4m3, Quadratic, STAGES_E4M3, true);
entry!(attention_sm90_e4m3_quadratic_plain, E4m3, Quadratic, STAGES_E4M3, false);
entry!(attention_sm90_e4m3_exp2_smooth, E4m3, Exp2, STAGES_E4M3, true);
entry!(attention_sm90_e4m3_exp2_plain, E4m3, Exp2, STAGES_E4M3, false);
