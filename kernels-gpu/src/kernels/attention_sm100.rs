//! Fused low-bit attention for Blackwell's datacenter GPUs, section 2 of the method on tcgen05.
//!
//! Nobody here has such a GPU: the logic is emulated (`docs/emulation.md`), the instruction text assembled only.
//!
//! A block serves 256 query rows of one head as two tiles of 128, and its warps have roles (as FlashAttention-4 gives
//! them):
//!
//! | warps | role | what |
//! |---|---|---|
//! | 0-3, 4-7 | [`Softmax`] of tile 0, 1 | one thread a row: S from Tensor Memory, row max, probabilities to Tensor Memory |
//! | 8-11 | [`Correction`] of both | rescales O when a max moved, keeps l and the row sums of the means; the output |
//! | 12 | [`issue`], one thread | all matrix products |
//! | 13 | [`load`], one thread | all bulk copies |
//!
//! What the Tensor Core does in a key block, and what runs beside it:
//!
//! ```text
//! Tensor Core   | r0(j) O0 += P0(j) R(j) | S0(j+1)     | r1(j) O1 += P1(j) R(j) | S1(j+1)      |
//! softmax 0     |  (waits)                             | max, codes of S0(j+1)                 |
//! softmax 1     |  max, codes of S1(j)                 |  (waits)                              |
//! correction    |  l0 += r0(j)                         | O0 *= alpha0 where a max moved, ..    |
//! ```
//!
//! Tensor Memory, 512 columns, all of them: S0, S1, O0, O1 of 128 each. When a row of S is in registers its columns are
//! free until the next S: they then hold P (32 columns, the A operand of the second product), its row sums (16) and the
//! row sums that the means wait for (8).
//!
//! * **Scores** leave the Tensor Core in f16 accumulators in *code units*, as on Hopper, and two are packed into a
//!   register by the load: the encoder and its contract are those of [`expcast`](crate::numerics::expcast)'s packed one
//!   on f16 scores. INT8 scores are f32 code units, and the maximum is subtracted before they are packed.
//! * **Token order**: P is written in the order of [`tiles::token_position`], so V^T tiles are Hopper's.
//! * **Row sums** come from a product of P with ones that runs before P R (ExpCast), or from the f32 exponentials (exp2).
//! * **Block means** are deferred: the row sums of 16 key blocks are the A operand of one 16-bit product with their 16
//!   means, into O.
//! * **No promotion**: O stays in its f32 accumulators.
//! * **Not finite**: as in [`attention_sm90`](super::attention_sm90).
//! * A product waits for another unless the ISA orders them (same accumulators, shape and kind; 9.7.16.6.2): S(j+1)
//!   overwrites P(j) and waits for O += P(j) R(j).
//!
//! Parameters and grid: [`call`](super::call).

use core::marker::PhantomData;

use super::call::{Call, OUT_F16, OUT_F32, Work, entry};
use super::softmax::SUM_ZERO;
use super::tiles::{self, HEAD_DIM, KEYS, MEAN_BLOCKS, MEAN_BYTES, ROWS, V_BYTES};
use super::{SM100_ONES_BYTES, SM100_STAGES_8_BIT, SM100_STAGES_F16};
use crate::ptx::bulk_copy::global_to_shared;
use crate::ptx::collective::{sync_threads, sync_warp};
use crate::ptx::f16x2::{self, splat};
use crate::ptx::mbarrier::{Barrier, fence_init, fence_proxy_async};
use crate::ptx::memory::{max_global_u32, store_shared_v4};
use crate::ptx::shared::{load_u32, store_u32};
use crate::ptx::shuffle::{any, permute, warp_max_u32};
use crate::ptx::special::{claim_registers, release_registers, thread_idx_x};
use crate::ptx::tcgen05::{self, Descriptor, Instruction, TensorAddr, fence_after_sync, fence_before_sync};
use crate::ptx::wgmma::pinned;
use crate::ptx::{SharedAddr, convert};

crate::ptx::shared_symbol!(
    /// Start of the dynamic shared memory, a multiple of 1024.
    fn shared_base, "vc_shared_sm100", 1024
);

/// Query rows of a tile: lanes of Tensor Memory, and threads of a warpgroup.
const TILE: u32 = 128;
/// Tiles of a block.
const TILES: u32 = 2;
/// Bytes of 64 rows by 128 bytes of Q, which lie together in its tiles.
const Q_PIECE: u32 = ROWS as u32 * 128;

/// The product of queries and keys, and its scores.
trait Scores {
    /// Pieces of [`Q_PIECE`] bytes along the channels.
    const Q_PIECES: u32;
    const K_BYTES: usize;
    const STAGES: u32;
    type Row: Row;
    /// Issues S = Q K^T for one tile of queries and one of keys.
    unsafe fn issue(s: TensorAddr, q: SharedAddr, k: SharedAddr);
}

/// FP16 queries and keys.
struct F16;

impl Scores for F16 {
    const Q_PIECES: u32 = 2;
    const K_BYTES: usize = tiles::K_F16_BYTES;
    const STAGES: u32 = SM100_STAGES_F16 as u32;
    type Row = Packed;

    #[inline(always)]
    unsafe fn issue(s: TensorAddr, q: SharedAddr, k: SharedAddr) {
        const SHAPE: Instruction = Instruction::into_f16(KEYS as u32);
        for half in 0..2 {
            let q = Descriptor::swizzled(q.add(half * 2 * Q_PIECE));
            let k = Descriptor::swizzled(k.add(half * (Self::K_BYTES as u32 / 2)));
            for step in 0..4 {
                // SAFETY: the caller's protocol; both tiles lie in shared memory as `tiles` says.
                unsafe { tcgen05::mma_f16(s, q.add(step * 32), k.add(step * 32), SHAPE, half + step > 0) }
            }
        }
    }
}

/// E4M3 queries and keys.
struct E4m3;

impl Scores for E4m3 {
    const Q_PIECES: u32 = 1;
    const K_BYTES: usize = tiles::K_E4M3_BYTES;
    const STAGES: u32 = SM100_STAGES_8_BIT as u32;
    type Row = Packed;

    #[inline(always)]
    unsafe fn issue(s: TensorAddr, q: SharedAddr, k: SharedAddr) {
        const SHAPE: Instruction = Instruction::into_f16(KEYS as u32);
        let (q, k) = (Descriptor::swizzled(q), Descriptor::swizzled(k));
        for step in 0..4 {
            // SAFETY: the caller's protocol; both tiles lie in shared memory as `tiles` says.
            unsafe { tcgen05::mma_f8(s, q.add(step * 32), k.add(step * 32), SHAPE, step > 0) }
        }
    }
}

/// INT8 queries and keys with a scale for every row of Q and four for a tile of K.
#[cfg(any(attention = "sm100", feature = "emulation"))]
struct I8;

#[cfg(any(attention = "sm100", feature = "emulation"))]
impl Scores for I8 {
    const Q_PIECES: u32 = 1;
    const K_BYTES: usize = tiles::K_E4M3_BYTES;
    const STAGES: u32 = SM100_STAGES_8_BIT as u32;
    type Row = Wide;

    #[inline(always)]
    unsafe fn issue(s: TensorAddr, q: SharedAddr, k: SharedAddr) {
        const SHAPE: Instruction = Instruction::s8_into_s32(KEYS as u32);
        let (q, k) = (Descriptor::swizzled(q), Descriptor::swizzled(k));
        for step in 0..4 {
            // SAFETY: the caller's protocol; both tiles lie in shared memory as `tiles` says.
            unsafe { tcgen05::mma_i8(s, q.add(step * 32), k.add(step * 32), SHAPE, step > 0) }
        }
    }
}

/// The scores of one query and 128 keys in registers, in code units.
trait Row {
    /// What multiplies them: a row's own factor, and one for every 2 of 8 keys.
    type Factors;
    /// Reads the factors of key tile `block` for query row `row`.
    unsafe fn factors(call: &Call, work: &Work, row: u32, block: u32) -> Self::Factors;
    /// Reads this thread's row of S.
    unsafe fn load(s: TensorAddr, factors: &Self::Factors) -> Self;
    /// Scores of keys from `valid` on become minus infinity: outside the max, and byte 0.
    fn mask(&mut self, valid: u32);
    /// The largest; NaN if one is.
    fn max(&self) -> f32;
    /// What [`codes`](Self::codes) adds under a row max.
    fn addend(max: f32) -> u32;
    /// What the codes take for the row max.
    fn reference(max: f32) -> f32;
    /// The ExpCast codes of keys 2i and 2i + 1, in the low bytes of the halves.
    fn codes(&self, i: usize, addend: u32, max: f32) -> u32;
    /// The scores of keys 2i and 2i + 1.
    fn pair(&self, i: usize) -> (f32, f32);
}

/// -0.484375: with it every row max below 1024 code units lands on byte 120.
const BETA_F32: f32 = -0.484375;
/// 2^-24 and 120 of them: a subnormal f16 is a whole number of 2^-24 and its bits are that number, so a product
/// with the first rounds to whole codes, and saturation cuts off below code 0.
const UNIT: u16 = 1;
const TOP: u16 = 120;

/// f16 scores, two in a register.
struct Packed([u32; KEYS / 2]);

impl Row for Packed {
    type Factors = ();

    #[inline(always)]
    unsafe fn factors(_: &Call, _: &Work, _: u32, _: u32) {}

    #[inline(always)]
    unsafe fn load(s: TensorAddr, (): &()) -> Self {
        let mut row = Self([0; KEYS / 2]);
        // SAFETY: the whole warp is here; S is complete.
        unsafe {
            tcgen05::load_x64_packed(&mut row.0, s);
            tcgen05::wait_load(&mut row.0);
        }
        row
    }

    #[inline(always)]
    fn mask(&mut self, valid: u32) {
        for (i, s) in self.0.iter_mut().enumerate() {
            let key = 2 * i as u32;
            let keep = if key + 1 < valid { 0x3210 } else { 0x7610 };
            let keep = if key < valid { keep } else { 0x7654 };
            *s = permute(*s, splat(0xfc00), keep);
        }
    }

    #[inline(always)]
    fn max(&self) -> f32 {
        // Four chains: one would be as long as its latency.
        const CHAINS: usize = 4;
        let mut m = [0; CHAINS];
        m.copy_from_slice(&self.0[..CHAINS]);
        for i in CHAINS..KEYS / 2 {
            m[i % CHAINS] = f16x2::max_nan(m[i % CHAINS], self.0[i]);
        }
        let m = f16x2::max_nan(f16x2::max_nan(m[0], m[1]), f16x2::max_nan(m[2], m[3]));
        convert::f32_of_f16x2(f16x2::max_nan(m, permute(m, m, 0x1032))).0
    }

    #[inline(always)]
    fn addend(max: f32) -> u32 {
        // The sum is exact in f32 and rounds once, to f16.
        convert::f16x2(BETA_F32 - max, BETA_F32 - max)
    }

    #[inline(always)]
    fn reference(max: f32) -> f32 {
        // The addend was rounded to f16: its own maximum is what all codes agree on.
        BETA_F32 - convert::f32_of_f16x2(Self::addend(max)).0
    }

    #[inline(always)]
    fn codes(&self, i: usize, addend: u32, _: f32) -> u32 {
        f16x2::fma_sat(f16x2::add(self.0[i], addend), splat(UNIT), splat(TOP))
    }

    #[inline(always)]
    fn pair(&self, i: usize) -> (f32, f32) {
        convert::f32_of_f16x2(self.0[i])
    }
}

/// f32 scores of an exact s32 product.
#[cfg(any(attention = "sm100", feature = "emulation"))]
struct Wide([[f32; 32]; KEYS / 32]);

#[cfg(any(attention = "sm100", feature = "emulation"))]
impl Row for Wide {
    type Factors = [f32; 4];

    #[inline(always)]
    unsafe fn factors(call: &Call, work: &Work, row: u32, block: u32) -> [f32; 4] {
        let rows = call.q_tokens.div_ceil(TILE) * TILE;
        let tiles = call.kv_tokens.div_ceil(KEYS as u32) as usize;
        let head = (work.batch * call.q_heads + work.h) as usize;
        // SAFETY: the sizes of the contract; rows behind the last tile take the last one's.
        unsafe {
            let q = *call.q_factor.add(head * rows as usize + row.min(rows - 1) as usize);
            let k = call.k_scale.add((work.kv_head as usize * tiles + block as usize) * 4);
            [q * *k, q * *k.add(1), q * *k.add(2), q * *k.add(3)]
        }
    }

    #[inline(always)]
    unsafe fn load(s: TensorAddr, factors: &[f32; 4]) -> Self {
        let mut row = Self([[0.0; 32]; KEYS / 32]);
        for (c, part) in row.0.iter_mut().enumerate() {
            let mut bits = [0; 32];
            // SAFETY: the whole warp is here; S is complete.
            unsafe {
                tcgen05::load_x32(&mut bits, s.add(32 * c as u32));
                tcgen05::wait_load(&mut bits);
            }
            for (i, x) in part.iter_mut().enumerate() {
                let sum = f32::from_bits(bits[i].wrapping_add(SUM_ZERO)) - f32::from_bits(SUM_ZERO);
                *x = sum * factors[i % 8 / 2];
            }
        }
        row
    }

    #[inline(always)]
    fn mask(&mut self, valid: u32) {
        for (key, s) in self.0.as_flattened_mut().iter_mut().enumerate() {
            *s = if (key as u32) < valid { *s } else { f32::NEG_INFINITY };
        }
    }

    #[inline(always)]
    fn max(&self) -> f32 {
        const CHAINS: usize = 4;
        let s = self.0.as_flattened();
        let mut m = [s[0], s[1], s[2], s[3]];
        for i in CHAINS..KEYS {
            m[i % CHAINS] = convert::max_nan(m[i % CHAINS], s[i]);
        }
        convert::max_nan(convert::max_nan(m[0], m[1]), convert::max_nan(m[2], m[3]))
    }

    #[inline(always)]
    fn addend(_: f32) -> u32 {
        // `BETA_F32` in f16.
        splat(0xb7c0)
    }

    #[inline(always)]
    fn reference(max: f32) -> f32 {
        max
    }

    #[inline(always)]
    fn codes(&self, i: usize, addend: u32, max: f32) -> u32 {
        let (low, high) = self.pair(i);
        let below = convert::f16x2(low - max, high - max);
        f16x2::fma_sat(f16x2::add(below, addend), splat(UNIT), splat(TOP))
    }

    #[inline(always)]
    fn pair(&self, i: usize) -> (f32, f32) {
        let s = self.0.as_flattened();
        (s[2 * i], s[2 * i + 1])
    }
}

/// The E4M3 probabilities of one query and 128 keys, in the order of V^T: the A operand of four k steps.
type Codes = [u32; KEYS / 4];

/// From scores to probabilities.
trait Weights {
    /// Whether row sums are a product with ones.
    const SUMS_BY_PRODUCT: bool;
    /// The codes under a row max, and their row sum if it is not a product.
    fn encode<R: Row>(s: &R, max: f32) -> (Codes, f32);
    /// What the codes take for the row max, in code units.
    fn reference<R: Row>(max: f32) -> f32;
}

/// The first of the two pairs of keys whose codes word `w` holds; the second is 4 pairs on ([`tiles::token_position`]).
#[inline(always)]
const fn first_pair(w: usize) -> usize {
    w / 4 * 8 + w % 4
}

/// The packed ExpCast encoder: a byte is the score rounded in code units, exponential by its own format.
struct ExpCast;

impl Weights for ExpCast {
    const SUMS_BY_PRODUCT: bool = true;

    #[inline(always)]
    fn encode<R: Row>(s: &R, max: f32) -> (Codes, f32) {
        let addend = R::addend(max);
        let mut codes = [0; KEYS / 4];
        for (w, word) in codes.iter_mut().enumerate() {
            let pair = first_pair(w);
            *word = permute(s.codes(pair, addend, max), s.codes(pair + 4, addend, max), 0x6420);
        }
        (codes, 0.0)
    }

    #[inline(always)]
    fn reference<R: Row>(max: f32) -> f32 {
        R::reference(max)
    }
}

/// 256 exp, rounded to E4M3; row sums of the exponentials in f32.
struct Exp2;

impl Weights for Exp2 {
    const SUMS_BY_PRODUCT: bool = false;

    #[inline(always)]
    fn encode<R: Row>(s: &R, max: f32) -> (Codes, f32) {
        let offset = convert::fma(max, -0.125, 8.0);
        let (mut codes, mut sums) = ([0; KEYS / 4], [0.0; 4]);
        for (w, word) in codes.iter_mut().enumerate() {
            let ((a, b), (c, d)) = (s.pair(first_pair(w)), s.pair(first_pair(w) + 4));
            let e = [a, b, c, d].map(|s| convert::exp2(convert::fma(s, 0.125, offset)));
            sums[w % 4] += (e[0] + e[1]) + (e[2] + e[3]);
            *word = convert::e4m3x4(e);
        }
        (codes, (sums[0] + sums[1]) + (sums[2] + sums[3]))
    }

    #[inline(always)]
    fn reference<R: Row>(max: f32) -> f32 {
        max
    }
}

/// Tensor Memory of a block.
#[derive(Clone, Copy)]
struct Tensor(TensorAddr);

impl Tensor {
    const COLUMNS: u32 = 512;

    /// As [`Shared::anew`].
    #[inline(always)]
    fn anew(self) -> Self {
        Self(TensorAddr(pinned(self.0.0)))
    }

    /// Scores of a tile.
    #[inline(always)]
    fn s(self, tile: u32) -> TensorAddr {
        self.0.add(tile * KEYS as u32)
    }
    /// Probabilities: over the first scores.
    #[inline(always)]
    fn p(self, tile: u32) -> TensorAddr {
        self.s(tile)
    }
    /// Row sums by the product with ones, in each of 16 columns.
    #[inline(always)]
    fn sums(self, tile: u32) -> TensorAddr {
        self.s(tile).add(32)
    }
    /// Row sums of the key blocks whose means are to be restored: 16 in f16.
    #[inline(always)]
    fn pending(self, tile: u32) -> TensorAddr {
        self.s(tile).add(48)
    }
    /// Output.
    #[inline(always)]
    fn o(self, tile: u32) -> TensorAddr {
        self.0.add(TILES * KEYS as u32 + tile * HEAD_DIM as u32)
    }
}

/// Shared memory of a block.
struct Shared<S> {
    base: SharedAddr,
    scores: PhantomData<S>,
}

impl<S: Scores> Shared<S> {
    const Q_BYTES: u32 = 2 * S::Q_PIECES * Q_PIECE;
    const K: u32 = TILES * Self::Q_BYTES;
    const V: u32 = Self::K + S::STAGES * S::K_BYTES as u32;
    const MEANS: u32 = Self::V + S::STAGES * V_BYTES as u32;
    const ONES: u32 = Self::MEANS + 2 * MEAN_BYTES as u32;
    const REFERENCES: u32 = Self::ONES + SM100_ONES_BYTES as u32;
    const ROW_SUMS: u32 = Self::REFERENCES + TILES * TILE * 4;
    const BARRIERS: u32 = Self::ROW_SUMS + TILES * TILE * 4;
    /// Barriers for which one arrival is enough: copies and commits.
    const SINGLE: u32 = 1 + 4 * S::STAGES + 5 + 2 * TILES;

    #[inline(always)]
    fn new() -> Self {
        Self { base: shared_base(), scores: PhantomData }
    }
    /// The same, of which the compiler no longer knows that it is: in a loop it computes the addresses anew, where it
    /// would keep dozens of them in registers around it.
    #[inline(always)]
    fn anew(&self) -> Self {
        Self { base: SharedAddr(pinned(self.base.0)), scores: PhantomData }
    }
    #[inline(always)]
    fn q(&self, tile: u32) -> SharedAddr {
        self.base.add(tile * Self::Q_BYTES)
    }
    #[inline(always)]
    fn k(&self, stage: u32) -> SharedAddr {
        self.base.add(Self::K + stage * S::K_BYTES as u32)
    }
    #[inline(always)]
    fn v(&self, stage: u32) -> SharedAddr {
        self.base.add(Self::V + stage * V_BYTES as u32)
    }
    #[inline(always)]
    fn means(&self, slot: u32) -> SharedAddr {
        self.base.add(Self::MEANS + slot * MEAN_BYTES as u32)
    }
    /// 16 rows of 32 ones.
    #[inline(always)]
    fn ones(&self) -> SharedAddr {
        self.base.add(Self::ONES)
    }
    /// What a row's codes took for its max.
    #[inline(always)]
    fn reference(&self, tile: u32, row: u32) -> SharedAddr {
        self.base.add(Self::REFERENCES + (tile * TILE + row) * 4)
    }
    /// A row sum that is not a product.
    #[inline(always)]
    fn row_sum(&self, tile: u32, row: u32) -> SharedAddr {
        self.base.add(Self::ROW_SUMS + (tile * TILE + row) * 4)
    }
    #[inline(always)]
    fn barrier(&self, index: u32) -> Barrier {
        Barrier::at(self.base.add(Self::BARRIERS + index * Barrier::BYTES))
    }

    // Copies have landed.
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
        self.barrier(1 + S::STAGES + stage)
    }
    #[inline(always)]
    fn means_full(&self, slot: u32) -> Barrier {
        self.barrier(1 + 2 * S::STAGES + slot)
    }

    // Products are complete.
    #[inline(always)]
    fn k_free(&self, stage: u32) -> Barrier {
        self.barrier(3 + 2 * S::STAGES + stage)
    }
    #[inline(always)]
    fn v_free(&self, stage: u32) -> Barrier {
        self.barrier(3 + 3 * S::STAGES + stage)
    }
    #[inline(always)]
    fn means_free(&self, slot: u32) -> Barrier {
        self.barrier(3 + 4 * S::STAGES + slot)
    }
    #[inline(always)]
    fn means_added(&self) -> Barrier {
        self.barrier(5 + 4 * S::STAGES)
    }
    #[inline(always)]
    fn s_full(&self, tile: u32) -> Barrier {
        self.barrier(6 + 4 * S::STAGES + tile)
    }
    #[inline(always)]
    fn o_full(&self, tile: u32) -> Barrier {
        self.barrier(6 + 4 * S::STAGES + TILES + tile)
    }

    // The 128 threads of a warpgroup are done.
    /// The row sums of a key block are there: by a product, or by the softmax.
    #[inline(always)]
    fn sums_full(&self, tile: u32) -> Barrier {
        self.barrier(Self::SINGLE + tile)
    }
    /// S is in registers, and its references in shared memory.
    #[inline(always)]
    fn s_read(&self, tile: u32) -> Barrier {
        self.barrier(Self::SINGLE + TILES + tile)
    }
    #[inline(always)]
    fn p_full(&self, tile: u32) -> Barrier {
        self.barrier(Self::SINGLE + 2 * TILES + tile)
    }
    /// O is under the references of this key block.
    #[inline(always)]
    fn o_ready(&self, tile: u32) -> Barrier {
        self.barrier(Self::SINGLE + 3 * TILES + tile)
    }
    /// References and row sums of a key block were read.
    #[inline(always)]
    fn sums_read(&self, tile: u32) -> Barrier {
        self.barrier(Self::SINGLE + 4 * TILES + tile)
    }
    const ALL_BARRIERS: u32 = Self::SINGLE + 5 * TILES;

    /// Where the address of the Tensor Memory goes.
    #[inline(always)]
    fn tensor(&self) -> SharedAddr {
        self.base.add(Self::BARRIERS + Self::ALL_BARRIERS * Barrier::BYTES)
    }

    /// Barriers, ones and Tensor Memory, once a block.
    #[inline(always)]
    unsafe fn prepare<W: Weights>(&self, thread: u32) -> Tensor {
        // SAFETY: the block's own memory before anybody uses it; every thread is here.
        unsafe {
            if thread == 0 {
                for i in 0..Self::ALL_BARRIERS {
                    let by_commit = i < Self::SINGLE || W::SUMS_BY_PRODUCT && i < Self::SINGLE + TILES;
                    self.barrier(i).init(if by_commit { 1 } else { TILE });
                }
                fence_init();
            }
            if thread < SM100_ONES_BYTES as u32 / 16 {
                store_shared_v4(self.ones().add(thread * 16), [0x3838_3838; 4]); // E4M3 ones
            }
            if thread / 32 == ISSUE_WARP {
                tcgen05::allocate::<{ Tensor::COLUMNS }>(self.tensor());
                tcgen05::relinquish();
            }
            fence_proxy_async();
            sync_threads();
            Tensor(TensorAddr(load_u32(self.tensor())))
        }
    }
}

/// Slot and parity of use `n` of a ring of `STAGES` slots.
#[inline(always)]
fn ring(n: u32, stages: u32) -> (u32, u32) {
    (n % stages, n / stages % 2)
}

/// One thread streams the operands of a block: Q once, then K, V and every 16th tile the means.
#[inline(always)]
unsafe fn load<S: Scores, const SMOOTH: bool>(call: &Call, work: &Work, shared: &Shared<S>) {
    let q_tiles = call.q_tokens.div_ceil(TILE);
    let tiles_a_head = call.kv_tokens.div_ceil(KEYS as u32) as usize;
    let (q_head, kv_head) = ((work.batch * call.q_heads + work.h) as usize, work.kv_head as usize);
    let q_bytes = Shared::<S>::Q_BYTES;
    // SAFETY: offsets inside the tiles of this head; every slot is filled after its products have read it.
    unsafe {
        shared.q_full().arrive_expect(TILES * q_bytes);
        for tile in 0..TILES {
            // A last tile without a neighbor is loaded twice: its second output is not written.
            let index = (work.row / TILE + tile).min(q_tiles - 1) as usize;
            let q = call.q.add((q_head * q_tiles as usize + index) * q_bytes as usize);
            // 64 rows and a piece of channels lie together in global memory, all 128 rows of it in shared memory.
            for rows in 0..2 {
                for piece in 0..S::Q_PIECES {
                    let from = q.add(((rows * S::Q_PIECES + piece) * Q_PIECE) as usize);
                    let to = shared.q(tile).add((piece * 2 + rows) * Q_PIECE);
                    global_to_shared(to, from, Q_PIECE, shared.q_full());
                }
            }
        }
        let mut k = call.k.add(kv_head * tiles_a_head * S::K_BYTES);
        let mut v = call.v.add(kv_head * tiles_a_head * V_BYTES);
        let mut means = call.means.wrapping_add(kv_head * tiles_a_head.div_ceil(MEAN_BLOCKS) * MEAN_BYTES);
        for block in 0..work.tiles {
            let (stage, parity) = ring(block, S::STAGES);
            // The phase before the first counts as complete: fresh slots are free.
            shared.k_free(stage).wait(parity ^ 1);
            shared.k_full(stage).arrive_expect(S::K_BYTES as u32);
            global_to_shared(shared.k(stage), k, S::K_BYTES as u32, shared.k_full(stage));
            k = k.add(S::K_BYTES);
            shared.v_free(stage).wait(parity ^ 1);
            shared.v_full(stage).arrive_expect(V_BYTES as u32);
            global_to_shared(shared.v(stage), v, V_BYTES as u32, shared.v_full(stage));
            v = v.add(V_BYTES);
            if SMOOTH && block % MEAN_BLOCKS as u32 == 0 {
                let (slot, parity) = ring(block / MEAN_BLOCKS as u32, 2);
                shared.means_free(slot).wait(parity ^ 1);
                shared.means_full(slot).arrive_expect(MEAN_BYTES as u32);
                global_to_shared(shared.means(slot), means, MEAN_BYTES as u32, shared.means_full(slot));
                means = means.wrapping_add(MEAN_BYTES);
            }
        }
    }
}

/// One thread issues all products of a block: S = Q K^T, r = P 1, O += P R and O += r mu^T.
#[inline(always)]
unsafe fn issue<S: Scores, W: Weights, const SMOOTH: bool>(work: &Work, shared: &Shared<S>, tensor: Tensor) {
    const VALUES: Instruction = Instruction::into_f32(HEAD_DIM as u32);
    const SUMS: Instruction = Instruction::into_f32(16);
    let mut added = 0;
    // SAFETY: operands are read between their full and free barriers; every product is ordered after what used its
    // accumulators and its operands in Tensor Memory.
    unsafe {
        // O += (row sums of 16 key blocks) (their means)
        let restore_means = |shared: &Shared<S>, tensor: Tensor, tile: u32, group: u32| {
            let (slot, parity) = ring(group, 2);
            shared.means_full(slot).wait(parity);
            let means = Descriptor::plain(shared.means(slot), 128, 256);
            tcgen05::mma_f16_tensor(tensor.o(tile), tensor.pending(tile), means, VALUES, true);
            if tile == TILES - 1 {
                tcgen05::commit(shared.means_free(slot));
            }
        };

        shared.q_full().wait(0);
        shared.k_full(0).wait(0);
        for tile in 0..TILES {
            S::issue(tensor.s(tile), shared.q(tile), shared.k(0));
            tcgen05::commit(shared.s_full(tile));
        }
        tcgen05::commit(shared.k_free(0));
        for block in 0..work.tiles {
            let (shared, tensor) = (&shared.anew(), tensor.anew());
            let (stage, parity) = ring(block, S::STAGES);
            let (next, next_parity) = ring(block + 1, S::STAGES);
            let more = block + 1 < work.tiles;
            for tile in 0..TILES {
                shared.p_full(tile).wait(block % 2);
                fence_after_sync();
                if W::SUMS_BY_PRODUCT {
                    // First: they are read while the values are on their way.
                    let ones = Descriptor::plain(shared.ones(), 128, 256);
                    for step in 0..4 {
                        let p = tensor.p(tile).add(8 * step);
                        tcgen05::mma_f8_tensor(tensor.sums(tile), p, ones, SUMS, step > 0);
                    }
                    tcgen05::commit(shared.sums_full(tile));
                }
                shared.o_ready(tile).wait(block % 2);
                fence_after_sync();
                if SMOOTH && block > 0 && block % MEAN_BLOCKS as u32 == 0 {
                    // Another kind on the same accumulators: nothing but a wait orders the two.
                    restore_means(shared, tensor, tile, block / MEAN_BLOCKS as u32 - 1);
                    tcgen05::commit(shared.means_added());
                    shared.means_added().wait(added % 2);
                    fence_after_sync();
                    added += 1;
                }
                shared.v_full(stage).wait(parity);
                let v = Descriptor::swizzled(shared.v(stage));
                for step in 0..4 {
                    let p = tensor.p(tile).add(8 * step);
                    tcgen05::mma_f8_tensor(tensor.o(tile), p, v.add(32 * step), VALUES, block + step > 0);
                }
                tcgen05::commit(shared.o_full(tile));
                if tile == TILES - 1 {
                    tcgen05::commit(shared.v_free(stage));
                }
                if more {
                    // The next scores lie over P and its row sums.
                    shared.k_full(next).wait(next_parity);
                    shared.sums_read(tile).wait(block % 2);
                    shared.o_full(tile).wait(block % 2);
                    fence_after_sync();
                    S::issue(tensor.s(tile), shared.q(tile), shared.k(next));
                    tcgen05::commit(shared.s_full(tile));
                    if tile == TILES - 1 {
                        tcgen05::commit(shared.k_free(next));
                    }
                }
            }
        }
        if SMOOTH {
            // The means since then.
            for tile in 0..TILES {
                shared.o_ready(tile).wait(work.tiles % 2);
                fence_after_sync();
                restore_means(shared, tensor, tile, (work.tiles - 1) / MEAN_BLOCKS as u32);
                tcgen05::commit(shared.o_full(tile));
            }
        }
    }
}

/// The softmax of one tile; every thread has a row.
struct Softmax<'a, S> {
    call: &'a Call,
    work: &'a Work,
    shared: &'a Shared<S>,
    tensor: Tensor,
    tile: u32,
}

impl<S: Scores> Softmax<'_, S> {
    #[inline(always)]
    unsafe fn run<W: Weights>(&self) {
        let Self { call, work, shared, tensor, tile } = *self;
        let row = thread_idx_x() % TILE;
        let token = work.row + tile * TILE + row;
        let lanes = row / 32 * 32;
        let mut max = f32::NEG_INFINITY;
        let mut left = work.keys;
        // SAFETY: the warpgroup runs this together; S is read after its commit, written over by P after it was read,
        // and P lies there until the products with it are complete.
        unsafe {
            for block in 0..work.tiles {
                let (shared, tensor) = (&shared.anew(), tensor.anew());
                let factors = S::Row::factors(call, work, token, block);
                shared.s_full(tile).wait(block % 2);
                fence_after_sync();
                let mut s = S::Row::load(tensor.s(tile).down(lanes), &factors);
                if left < KEYS as u32 {
                    s.mask(left);
                }
                // m' = max(m, rowmax S(j))
                max = convert::max_nan(max, s.max());
                if block > 0 {
                    shared.sums_read(tile).wait((block - 1) % 2);
                }
                store_u32(shared.reference(tile, row), W::reference::<S::Row>(max).to_bits());
                fence_before_sync();
                shared.s_read(tile).arrive();
                // P(j)
                let (codes, sum) = W::encode(&s, max);
                if !W::SUMS_BY_PRODUCT {
                    store_u32(shared.row_sum(tile, row), sum.to_bits());
                    shared.sums_full(tile).arrive();
                }
                tcgen05::store_x32(tensor.p(tile).down(lanes), &codes);
                tcgen05::wait_store();
                fence_before_sync();
                shared.p_full(tile).arrive();
                left = left.saturating_sub(KEYS as u32);
            }
            if !call.row_max.is_null() {
                let size = if token < call.q_tokens { max.to_bits() & 0x7fff_ffff } else { 0 };
                let largest = warp_max_u32(size);
                if row % 32 == 0 {
                    max_global_u32(call.row_max.add((work.batch * call.q_heads + work.h) as usize), largest);
                }
            }
        }
    }
}

/// What the correction keeps of a row.
#[derive(Clone, Copy)]
struct State {
    /// What the codes of the last key block took for the row max.
    reference: f32,
    /// l under it.
    sum: f32,
    /// Row sums of the key blocks whose means are not restored yet, in f16: an A operand of 16 columns.
    pending: [u32; MEAN_BLOCKS / 2],
}

impl State {
    /// The row sum of key block `block`, in the column that [`tiles::mean_offset`] gives it.
    #[inline(always)]
    fn keep(&mut self, block: u32, sum: f32) {
        let block = block % MEAN_BLOCKS as u32;
        let (register, odd) = (block / 4 + block / 2 % 2 * 4, block % 2 == 1);
        let pair = convert::f16x2(sum, 0.0);
        for (i, pending) in self.pending.iter_mut().enumerate() {
            if i as u32 == register {
                *pending = if odd { permute(*pending, pair, 0x5410) } else { pair };
            }
        }
    }
}

/// Keeps O of both tiles under the row maxima of the moment, and l; in the end writes the output.
struct Correction<'a, S> {
    call: &'a Call,
    work: &'a Work,
    shared: &'a Shared<S>,
    tensor: Tensor,
    /// The row of a tile that this thread has.
    row: u32,
}

impl<S: Scores> Correction<'_, S> {
    #[inline(always)]
    unsafe fn run<W: Weights, const SMOOTH: bool>(&self) {
        let Self { work, shared, tensor, row, .. } = *self;
        let lanes = row / 32 * 32;
        let new = State { reference: f32::NEG_INFINITY, sum: 0.0, pending: [0; MEAN_BLOCKS / 2] };
        let mut states = [new; TILES as usize];
        // SAFETY: the warpgroup runs this together; O is touched between the commit of a product and the arrival that
        // lets the next one start, row sums between theirs.
        unsafe {
            for block in 0..work.tiles {
                let (shared, tensor) = (&shared.anew(), tensor.anew());
                for tile in 0..TILES {
                    let state = &mut states[tile as usize];
                    // A <- alpha A where a max moved
                    shared.s_read(tile).wait(block % 2);
                    fence_after_sync();
                    let reference = f32::from_bits(load_u32(shared.reference(tile, row)));
                    if block > 0 {
                        shared.o_full(tile).wait((block - 1) % 2);
                        fence_after_sync();
                        if any(reference != state.reference) {
                            let alpha = convert::exp2((state.reference - reference) * 0.125);
                            rescale(tensor.o(tile).down(lanes), alpha);
                            state.sum *= alpha;
                            let alpha = convert::f16x2(alpha, alpha);
                            state.pending = state.pending.map(|pair| f16x2::mul(pair, alpha));
                        }
                        if SMOOTH && block % MEAN_BLOCKS as u32 == 0 {
                            tcgen05::store_x8(tensor.pending(tile).down(lanes), &state.pending);
                            tcgen05::wait_store();
                        }
                    }
                    state.reference = reference;
                    fence_before_sync();
                    shared.o_ready(tile).arrive();
                    // l <- l + r(j)
                    shared.sums_full(tile).wait(block % 2);
                    let sum = if W::SUMS_BY_PRODUCT {
                        let mut sum = [0];
                        fence_after_sync();
                        tcgen05::load_x1(&mut sum, tensor.sums(tile).down(lanes));
                        tcgen05::wait_load(&mut sum);
                        sum[0]
                    } else {
                        load_u32(shared.row_sum(tile, row))
                    };
                    fence_before_sync();
                    shared.sums_read(tile).arrive();
                    state.sum += f32::from_bits(sum);
                    if SMOOTH {
                        state.keep(block, f32::from_bits(sum));
                    }
                }
            }
            if work.tiles > 0 {
                for tile in 0..TILES {
                    shared.o_full(tile).wait((work.tiles - 1) % 2);
                    fence_after_sync();
                    if SMOOTH {
                        tcgen05::store_x8(tensor.pending(tile).down(lanes), &states[tile as usize].pending);
                        tcgen05::wait_store();
                        fence_before_sync();
                        shared.o_ready(tile).arrive();
                        shared.o_full(tile).wait(work.tiles % 2);
                        fence_after_sync();
                    }
                }
            }
            // Of the last block of a head there may be one tile only.
            let tiles = (self.call.q_tokens - work.row).div_ceil(TILE).min(TILES);
            let mut tile = 0;
            while tile < tiles {
                let State { reference, sum, .. } = if tile == 0 { states[0] } else { states[1] };
                self.finish(tile, reference, sum);
                tile += 1;
            }
        }
    }

    /// O = A / l times the channel scales, and LSE.
    #[inline(always)]
    unsafe fn finish(&self, tile: u32, reference: f32, sum: f32) {
        let Self { call, work, tensor, row, .. } = *self;
        let token = work.row + tile * TILE + row;
        let mut inverse = 1.0 / sum;
        let mut lse = convert::fma(reference, 0.125, convert::log2(sum) - 8.0) * core::f32::consts::LN_2;
        // SAFETY: rows below q_tokens and the sizes of the contract; the whole warp reads O together.
        unsafe {
            if work.keys == 0 {
                (inverse, lse) = (0.0, f32::NEG_INFINITY);
            } else if !reference.is_finite()
                || !call.poisoned.is_null() && *call.poisoned.add(work.kv_head as usize) != 0
            {
                (inverse, lse) = (f32::NAN, f32::NAN);
            }
            let scales = call.v_scale.add(work.kv_head as usize * HEAD_DIM);
            let mut first = 0;
            while first < call.head_dim {
                let mut o = [0; 32];
                if work.keys > 0 {
                    tcgen05::load_x32(&mut o, tensor.o(tile).down(row / 32 * 32).add(first));
                    tcgen05::wait_load(&mut o);
                }
                if token < call.q_tokens {
                    self.write(token, first, &o, inverse, scales);
                }
                first += 32;
            }
            if token < call.q_tokens && !call.lse.is_null() {
                let head = (work.batch * call.q_heads + work.h) as usize;
                let at = head * call.q_tokens as usize + token as usize;
                if !call.lse_shift.is_null() {
                    lse += *call.lse_shift.add(at);
                }
                *call.lse.add(at) = lse;
            }
        }
    }

    /// Writes the 32 channels from `first` on of a row, as far as there are so many.
    #[inline(always)]
    unsafe fn write(&self, token: u32, first: u32, o: &[u32; 32], inverse: f32, scales: *const f32) {
        let Self { call, work, .. } = *self;
        let at = work.batch as i64 * call.out_batch
            + work.h as i64 * call.out_head
            + token as i64 * call.out_token
            + first as i64;
        // SAFETY: a row below q_tokens, channels below head_dim.
        unsafe {
            let scales = scales.add(first as usize);
            let pair = |c: usize| {
                let low = f32::from_bits(o[c]) * inverse * *scales.add(c);
                (low, f32::from_bits(o[c + 1]) * inverse * *scales.add(c + 1))
            };
            for c in (0..32).step_by(2) {
                if first + c as u32 / 8 * 8 >= call.head_dim {
                    continue;
                }
                let (low, high) = pair(c);
                let at = at as isize + c as isize;
                match call.out_type {
                    OUT_F32 => {
                        let to = call.out.cast::<f32>().offset(at);
                        (*to, *to.add(1)) = (low, high);
                    }
                    OUT_F16 => *call.out.cast::<u16>().offset(at).cast::<u32>() = convert::f16x2(low, high),
                    _ => *call.out.cast::<u16>().offset(at).cast::<u32>() = convert::bf16x2(low, high),
                }
            }
        }
    }
}

/// Multiplies this thread's row of O.
#[inline(always)]
unsafe fn rescale(o: TensorAddr, alpha: f32) {
    for first in (0..HEAD_DIM as u32).step_by(32) {
        let mut part = [0; 32];
        // SAFETY: the whole warp is here; O is complete, and nobody else's.
        unsafe {
            tcgen05::load_x32(&mut part, o.add(first));
            tcgen05::wait_load(&mut part);
            let part = part.map(|x| (f32::from_bits(x) * alpha).to_bits());
            tcgen05::store_x32(o.add(first), &part);
        }
    }
    // SAFETY: as above.
    unsafe { tcgen05::wait_store() }
}

/// The warp that allocates Tensor Memory, and whose first thread issues products.
const ISSUE_WARP: u32 = 12;
/// The warp whose first thread loads.
const LOAD_WARP: u32 = 13;

/// The kernel: roles by warp.
#[inline(always)]
unsafe fn attention<S: Scores, W: Weights, const SMOOTH: bool>(call: Call) {
    let shared = Shared::<S>::new();
    let thread = thread_idx_x();
    // SAFETY: all threads of the block are here; after that each warp has its role until they meet again.
    unsafe {
        let tensor = shared.prepare::<W>(thread);
        match thread / TILE {
            tile if tile < TILES => {
                claim_registers::<168>();
                let work = call.work(TILES * TILE);
                if work.tiles > 0 {
                    Softmax { call: &call, work: &work, shared: &shared, tensor, tile }.run::<W>();
                }
            }
            TILES => {
                release_registers::<104>();
                let work = call.work(TILES * TILE);
                let row = thread % TILE;
                Correction { call: &call, work: &work, shared: &shared, tensor, row }.run::<W, SMOOTH>();
            }
            _ => {
                release_registers::<72>();
                let work = call.work(TILES * TILE);
                if work.tiles > 0 && thread == ISSUE_WARP * 32 {
                    issue::<S, W, SMOOTH>(&work, &shared, tensor);
                }
                if work.tiles > 0 && thread == LOAD_WARP * 32 {
                    load::<S, SMOOTH>(&call, &work, &shared);
                }
            }
        }
        sync_warp();
        sync_threads();
        if thread / 32 == ISSUE_WARP {
            tcgen05::deallocate::<{ Tensor::COLUMNS }>(tensor.0);
        }
    }
}

entry!(attention_sm100_f16_expcast_smooth, attention::<F16, ExpCast, true>);
entry!(attention_sm100_f16_expcast_plain, attention::<F16, ExpCast, false>);
entry!(attention_sm100_f16_exp2_smooth, attention::<F16, Exp2, true>);
entry!(attention_sm100_f16_exp2_plain, attention::<F16, Exp2, false>);
entry!(attention_sm100_e4m3_expcast_smooth, attention::<E4m3, ExpCast, true>);
entry!(attention_sm100_e4m3_expcast_plain, attention::<E4m3, ExpCast, false>);
entry!(attention_sm100_e4m3_exp2_smooth, attention::<E4m3, Exp2, true>);
entry!(attention_sm100_e4m3_exp2_plain, attention::<E4m3, Exp2, false>);

// The matrix unit of sm_103a has no INT8.
#[cfg(any(attention = "sm100", feature = "emulation"))]
mod int8 {
    use super::*;

    entry!(attention_sm100_i8_expcast_smooth, attention::<I8, ExpCast, true>);
    entry!(attention_sm100_i8_expcast_plain, attention::<I8, ExpCast, false>);
    entry!(attention_sm100_i8_exp2_smooth, attention::<I8, Exp2, true>);
    entry!(attention_sm100_i8_exp2_plain, attention::<I8, Exp2, false>);
}
#[cfg(any(attention = "sm100", feature = "emulation"))]
pub use int8::*;
