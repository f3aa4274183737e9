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

use super::tiles::{self, HEAD_DIM, KEYS, MEAN_BLOCKS, MEAN_BYTES, ROWS, V_BYTES};
use super::{ONES_BYTES, STAGES_E4M3, STAGES_F16};
use crate::ptx::bulk_copy::global_to_shared;
use crate::ptx::f16x2::{self, splat};
use crate::ptx::mbarrier::{Barrier, fence_init, fence_proxy_async};
use crate::ptx::memory::{max_global_u32, store_shared_v4};
use crate::ptx::shuffle::{any, broadcast, permute, shuffle_xor, warp_max_u32};
use crate::ptx::special::{
    block_idx_x, block_idx_y, block_idx_z, claim_registers, release_registers, sync_threads, thread_idx_x,
};
use crate::ptx::wgmma::{self, Descriptor, pin};
use crate::ptx::{SharedAddr, convert};

/// `out_type`: f32.
pub const OUT_F32: u32 = 0;
/// `out_type`: f16.
pub const OUT_F16: u32 = 1;
/// `out_type`: bf16.
pub const OUT_BF16: u32 = 2;

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

/// Values of two rows: the thread's upper and, 8 further down, its lower.
type Rows = [f32; 2];

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

/// The packed ExpCast encoder: a byte is the score rounded in code units, exponential by its own format.
struct ExpCast;

impl ExpCast {
    /// -0.484375: with it every row max below 1024 code units lands on byte 120.
    const BETA: u16 = 0xb7c0;
    const BETA_F32: f32 = -0.484375;
    /// 2^-24 and 120 of them: a subnormal f16 is a whole number of 2^-24 and its bits are that number, so a product
    /// with the first rounds to whole codes, and saturation cuts off below code 0.
    const UNIT: u16 = 1;
    const TOP: u16 = 120;

    /// What is added to the scores of both rows.
    #[inline(always)]
    fn addend(max: u32) -> u32 {
        f16x2::sub(splat(Self::BETA), max)
    }
}

impl Weights for ExpCast {
    const PACK: u32 = 0x6420;

    #[inline(always)]
    fn encode(s: &mut [u32; 32], max: u32, not_zero: u32) -> Option<Rows> {
        let addend = Self::addend(max);
        let rows = [permute(addend, addend, 0x1010), permute(addend, addend, 0x3232)];
        stay(not_zero, || {
            for (i, s) in s.iter_mut().enumerate() {
                *s = f16x2::fma_sat(f16x2::add(*s, rows[i % 2]), splat(Self::UNIT), splat(Self::TOP));
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
        // The addend was rounded to f16: its own maximum is what all codes agree on.
        let (upper, lower) = convert::f32_of_f16x2(Self::addend(max));
        [Self::BETA_F32 - upper, Self::BETA_F32 - lower]
    }
}

/// 256 exp, rounded to E4M3; row sums of the exponentials in f32.
struct Exp2;

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

/// The sum over the four threads that share a row.
#[inline(always)]
unsafe fn quad_sum(x: f32) -> f32 {
    // SAFETY: the whole warp is here.
    unsafe {
        let x = x + f32::from_bits(shuffle_xor::<1>(x.to_bits()));
        x + f32::from_bits(shuffle_xor::<2>(x.to_bits()))
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

/// The parameters of an entry, and what a block makes of them.
struct Call {
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
}

/// What one block works on.
struct Work {
    batch: u32,
    /// Query head in its batch.
    h: u32,
    /// batch * kv_heads + kv head.
    kv_head: u32,
    /// First query row.
    row: u32,
    /// Keys that count.
    keys: u32,
    /// Tiles that hold them.
    tiles: u32,
}

impl Call {
    #[inline(always)]
    unsafe fn work(&self) -> Work {
        let (h, batch) = (block_idx_y(), block_idx_z());
        let kv_head = batch * self.kv_heads + h / self.group;
        let mut keys = self.kv_tokens;
        if !self.kv_lens.is_null() {
            // SAFETY: one word a batch by contract.
            keys = keys.min(unsafe { *self.kv_lens.add(batch as usize) });
        }
        let row = block_idx_x() * 2 * ROWS as u32;
        Work { batch, h, kv_head, row, keys, tiles: keys.div_ceil(KEYS as u32) }
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
    /// Row sums of the key blocks whose means are not restored yet: an A fragment of 16 columns.
    pending: [u32; 4],
    /// Row sums in f16 of a key block whose neighbour in `pending` is yet to come; the upper row in the lower half.
    odd_one: u32,
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
            pending: [0; 4],
            odd_one: 0,
        }
    }

    /// Takes the scores of a tile into the row maxima.
    #[inline(always)]
    unsafe fn raise_max(&mut self, s: &[u32; 32]) {
        const CHAINS: usize = 4;
        // Four chains a row: one would be as long as its latency, a tree needs registers that are not there.
        let mut m = [0; CHAINS];
        m.copy_from_slice(&s[..CHAINS]);
        for i in CHAINS..32 {
            m[i % CHAINS] = f16x2::max_nan(m[i % CHAINS], s[i]);
        }
        for i in (2..CHAINS).rev() {
            m[i % 2] = f16x2::max_nan(m[i % 2], m[i]);
        }
        let m = f16x2::max_nan(permute(m[0], m[1], 0x5410), permute(m[0], m[1], 0x7632));
        // SAFETY: the whole warp is here.
        unsafe {
            let m = f16x2::max_nan(m, shuffle_xor::<1>(m));
            let m = f16x2::max_nan(m, shuffle_xor::<2>(m));
            self.max = f16x2::max_nan(self.max, m);
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
            let both = convert::f16x2(factor[0], factor[1]);
            self.odd_one = f16x2::mul(self.odd_one, both);
            for row in 0..2 {
                let pair = permute(both, both, [0x1010, 0x3232][row]);
                self.pending[row] = f16x2::mul(self.pending[row], pair);
                self.pending[2 + row] = f16x2::mul(self.pending[2 + row], pair);
            }
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
            self.keep_pending(of, of_even, convert::f16x2(sums[0], sums[1]));
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

    /// `sums` of key block `block`: those of an even one wait for its neighbour's, and both become two columns of the
    /// A fragment, as [`tiles::mean_offset`] orders them.
    #[inline(always)]
    fn keep_pending(&mut self, block: u32, even: bool, sums: u32) {
        if even {
            self.odd_one = sums;
            return;
        }
        let mine = thread_idx_x() % 4 == block / 4 % 4;
        for row in 0..2 {
            let pair = permute(self.odd_one, sums, [0x5410, 0x7632][row]);
            for half in 0..2 {
                if mine && block / 2 % 2 == half {
                    self.pending[2 * half as usize + row] = pair;
                }
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
        unsafe { wgmma::m64n128k16_f32_f16(&mut self.partial.values, self.pending, means, accumulate) }
    }
}

/// Scores of keys from `valid` on become minus infinity: outside the max, and byte 0.
#[inline(always)]
fn mask(s: &mut [u32; 32], valid: u32) {
    // Counted from this thread's first key, every comparison is with a constant and none stays in a register.
    let valid = valid as i32 - (thread_idx_x() % 4 * 2) as i32;
    for j in 0..16 {
        let key = 8 * j as i32;
        let keep = if key + 1 < valid { 0x3210 } else { 0x7610 };
        let keep = if key < valid { keep } else { 0x7654 };
        s[2 * j] = permute(s[2 * j], splat(0xfc00), keep);
        s[2 * j + 1] = permute(s[2 * j + 1], splat(0xfc00), keep);
    }
}

/// Runs `body` once, in a loop that only `not_zero` ends.
///
/// ptxas knows no order between arithmetic and the wait for a product that the arithmetic has nothing to do with, and
/// moves it behind the wait, where the Tensor Core idles; out of a loop it does not move it.
#[inline(always)]
fn stay(not_zero: u32, mut body: impl FnMut()) {
    loop {
        body();
        // Pinned, or LLVM would conclude from an earlier loop's end that this one ends too.
        if wgmma::pinned(not_zero) != 0 {
            break;
        }
    }
}

/// The attention loop of one warpgroup.
struct Consumer<'a, S, const STAGES: u32> {
    call: &'a Call,
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
                pin(&mut state.pending);
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
            state.raise_max(s);
            // Two parameters that are not 0: what was learned of one at the end of a loop must not end the other's.
            let not_zero = if EVEN { self.call.promote } else { self.call.group.get() };
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
                if self.block > 0 {
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
                self.until = self.call.promote;
            }
            state.absorb::<SMOOTH, EVEN>(self.block, encoded, alpha, promote);
            if EVEN && self.left == 0 {
                return true;
            }

            // A += P(j) R(j) and S(j+2) = Q K(j+2)^T; behind the last block once more that one's scores
            pack::<W>(s, &mut self.p);
            pin(s);
            pin(&mut self.p);
            pin(&mut state.partial.values);
            pin(&mut state.partial.ones);
            pin(&mut state.pending);
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

/// Packs the codes of 64 x 128 scores into the A fragments of four k steps.
#[inline(always)]
fn pack<W: Weights>(s: &[u32; 32], p: &mut [u32; 16]) {
    for (i, p) in p.iter_mut().enumerate() {
        let (pair, row) = (i / 2, i % 2);
        *p = permute(s[4 * pair + row], s[4 * pair + 2 + row], W::PACK);
    }
}

/// O = A / l times the channel scales, LSE, and the observed row max.
#[inline(always)]
unsafe fn finish<W: Weights>(call: &Call, work: &Work, state: &State) {
    let thread = thread_idx_x();
    let first = work.row + thread / 32 * 16 + thread % 32 / 4;
    let (max, shift) = (convert::f32_of_f16x2(state.max), W::shift(state.max));
    let (upper, lower) = (RowEnd { max: max.0, shift: shift[0] }, RowEnd { max: max.1, shift: shift[1] });
    // SAFETY: the sizes of the contract; the whole warp is here.
    unsafe {
        finish_row::<0>(call, work, state, first, upper);
        finish_row::<1>(call, work, state, first + 8, lower);
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
struct RowEnd {
    max: f32,
    shift: f32,
}

/// Writes the channels, a quarter of all, that this thread has of its upper (`ROW` 0) or lower row.
#[inline(always)]
unsafe fn finish_row<const ROW: usize>(call: &Call, work: &Work, state: &State, token: u32, end: RowEnd) {
    if token >= call.q_tokens {
        return;
    }
    let lane = thread_idx_x() as usize % 4;
    let mut inverse = 1.0 / state.sum[ROW];
    let mut lse =
        convert::fma(end.shift, 0.125, convert::log2(state.sum[ROW]) - 8.0) * core::f32::consts::LN_2;
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
            let low = state.out[4 * j + 2 * ROW] * inverse * *scales.add(8 * j);
            (low, state.out[4 * j + 2 * ROW + 1] * inverse * *scales.add(8 * j + 1))
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

/// The kernel: roles by warpgroup.
#[inline(always)]
unsafe fn attention<S: Scores, W: Weights, const STAGES: u32, const SMOOTH: bool>(call: Call) {
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
            finish::<W>(&call, &call.work(), &state);
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
                q_heads, kv_heads, group, head_dim, out_batch, out_head, out_token, promote, out_type,
            };
            // SAFETY: the entry's contract.
            unsafe { attention::<$scores, $weights, { $stages as u32 }, $smooth>(call) }
        }
    }};
}

entry!(attention_sm90_f16_expcast_smooth, F16, ExpCast, STAGES_F16, true);
entry!(attention_sm90_f16_expcast_plain, F16, ExpCast, STAGES_F16, false);
entry!(attention_sm90_f16_exp2_smooth, F16, Exp2, STAGES_F16, true);
entry!(attention_sm90_f16_exp2_plain, F16, Exp2, STAGES_F16, false);
entry!(attention_sm90_e4m3_expcast_smooth, E4m3, ExpCast, STAGES_E4M3, true);
entry!(attention_sm90_e4m3_expcast_plain, E4m3, ExpCast, STAGES_E4M3, false);
entry!(attention_sm90_e4m3_exp2_smooth, E4m3, Exp2, STAGES_E4M3, true);
entry!(attention_sm90_e4m3_exp2_plain, E4m3, Exp2, STAGES_E4M3, false);
