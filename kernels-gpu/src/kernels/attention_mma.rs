//! Fused low-bit attention by warp-level products (`mma.sync`): for every GPU with FP8 Tensor Cores and no kernel of its
//! own. Section 2 of the method is the loop of [`attend`].
//!
//! A block serves 128 query rows of one head: 8 warps of 16 rows, which share a ring of K and V tiles in shared memory.
//! Everything of a row is in the registers of the four lanes that own it: its queries, its scores of 128 keys, its
//! probabilities and its output. The tiles are those of [`tiles`], as the quantizers write them for the Hopper kernel
//! too: their 128-byte swizzle keeps `ldmatrix` free of bank conflicts, and the token order of V^T makes the scores of a lane
//! its A fragment (`layout::fragment`), since the accumulators of `mma` lie as those of `wgmma` do.
//!
//! * **Scores** are packed f16 in code units from f16 accumulators (FP16 and E4M3 queries and keys), rounded after every
//!   product over 16 or 32 channels; or exact INT8 sums times a factor of the row and one of the key's group, in f32.
//! * **Copies**: every thread brings its share of a tile by `cp.async`. One barrier a key block says that the tiles of this
//!   one are there and those of the last are read.
//! * **Promotion**: FP8 products keep about 14 bits while accumulating, so those of a key block accumulate from zero and
//!   join the f32 output in one FMA that applies alpha too: A <- alpha A + P R. A longer interval would save nothing.
//! * **Row sums** come from a product with ones (ExpCast), or from the f32 exponentials (exp2).
//! * **Block means** are deferred: the row sums of 16 key blocks are the A fragment of one 16-bit product with their 16
//!   means, whose B fragments lie in global memory as lanes read them.
//! * **Not finite**: the row max keeps a NaN, and one of a score or an overflow makes it NaN or infinite; such a
//!   row is NaN in the output. `poisoned` marks (batch, kv head)s whose keys or values were not finite.
//!
//! Parameters and grid: [`call`](super::call).

use core::marker::PhantomData;

use super::call::{Call, Work, entry};
use super::epilogue::{BLOCK_ROWS, PEAK_E4M3, RowEnd, finish};
use super::operand::Operand;
use super::softmax::{
    self, Codes, Encoder, Exp2, ExpCast, LOWEST, Pending, Quadratic, Rows, SUM_ZERO, quad_sum,
};
use super::tiles::{self, KEYS, MEAN_BLOCKS, MEAN_BYTES, ROWS, V_BYTES, swizzle_128};
use super::{MMA_STAGES_8_BIT, MMA_STAGES_F16};
use crate::ptx::async_copy::{commit_group, copy_16, wait_group};
use crate::ptx::collective::sync_threads;
use crate::ptx::shuffle::permute;
use crate::ptx::special::thread_idx_x;
use crate::ptx::{convert, mma};

/// Threads of a block.
const THREADS: u32 = 256;

crate::ptx::shared_symbol!(
    /// Start of the dynamic shared memory.
    fn shared_base, "vc_shared", 1024
);

/// The queries of a warp: A fragments of up to 8 k steps of 32 bytes.
type Fragments = [[u32; 4]; 8];

/// Reads the A fragments of a warp's rows for `steps` k steps; `tile_bytes` is the size of a Q tile.
#[inline(always)]
unsafe fn load_queries(call: &Call, work: &Work, steps: usize, tile_bytes: usize) -> Fragments {
    let (warp, lane) = (thread_idx_x() as usize / 32, thread_idx_x() as usize % 32);
    let tiles_a_head = call.q_tokens.div_ceil(2 * ROWS as u32) as usize * 2;
    let tile =
        (work.batch * call.q_heads + work.h) as usize * tiles_a_head + work.row as usize / ROWS + warp / 4;
    let mut q = [[0; 4]; 8];
    for step in 0..steps {
        for i in 0..4 {
            let row = warp % 4 * 16 + lane / 4 + i % 2 * 8;
            let byte = step * 32 + i / 2 * 16 + lane % 4 * 4;
            let at = byte / 128 * (ROWS * 128) + swizzle_128(row, byte % 128);
            // SAFETY: inside the tile, which is there for padding rows too.
            q[step][i] = unsafe { *call.q.add(tile * tile_bytes + at).cast::<u32>() };
        }
    }
    q
}

/// Queries and keys, and the scores that their product leaves in a thread.
trait Scores {
    /// Bytes of a K tile.
    const K_BYTES: usize;
    /// K and V tiles in shared memory.
    const STAGES: usize;
    /// The queries of a warp with their scales.
    type Queries;
    /// Scores of two rows by 128 keys, in code units.
    type Tile;
    /// Running maxima of two rows.
    type Max: Copy;
    /// Below all scores.
    const LOWEST: Self::Max;

    unsafe fn queries(call: &Call, work: &Work) -> Self::Queries;
    /// S = Q K^T for the tile of a key block.
    unsafe fn product(q: &Self::Queries, k: Operand, block: u32) -> Self::Tile;
    /// Takes the keys from `valid` on out.
    fn mask(s: &mut Self::Tile, valid: u32);
    /// max(m, rowmax S).
    unsafe fn raise_max(max: Self::Max, s: &Self::Tile) -> Self::Max;
    /// The codes of exp(S - m), and this thread's share of the row sums unless they are sums of decoded codes.
    fn encode<W: Weights>(s: &Self::Tile, max: Self::Max) -> (Codes, Option<Rows>);
    /// The maxima, and what codes take for them.
    fn ends<W: Weights>(max: Self::Max) -> [RowEnd; 2];
}

/// Queries and keys whose products are packed f16 in code units.
trait Packed {
    const Q_BYTES: usize;
    const K_BYTES: usize;
    const STAGES: usize;
    /// D += A B over 32 bytes of a row.
    unsafe fn step(d: &mut [u32; 2], a: [u32; 4], b: [u32; 2]);
}

/// FP16 queries and keys.
struct F16;

impl Packed for F16 {
    const Q_BYTES: usize = tiles::Q_F16_BYTES;
    const K_BYTES: usize = tiles::K_F16_BYTES;
    const STAGES: usize = MMA_STAGES_F16;

    #[inline(always)]
    unsafe fn step(d: &mut [u32; 2], a: [u32; 4], b: [u32; 2]) {
        // SAFETY: the whole warp is here.
        unsafe { mma::m16n8k16_f16_f16(d, a, b) }
    }
}

/// E4M3 queries and keys.
struct E4m3;

impl Packed for E4m3 {
    const Q_BYTES: usize = tiles::Q_E4M3_BYTES;
    const K_BYTES: usize = tiles::K_E4M3_BYTES;
    const STAGES: usize = MMA_STAGES_8_BIT;

    #[inline(always)]
    unsafe fn step(d: &mut [u32; 2], a: [u32; 4], b: [u32; 2]) {
        // SAFETY: the whole warp is here.
        unsafe { mma::m16n8k32_f16_e4m3(d, a, b) }
    }
}

impl<P: Packed> Scores for P {
    const K_BYTES: usize = P::K_BYTES;
    const STAGES: usize = P::STAGES;
    type Queries = Fragments;
    type Tile = softmax::Scores;
    type Max = u32;
    const LOWEST: u32 = LOWEST;

    #[inline(always)]
    unsafe fn queries(call: &Call, work: &Work) -> Fragments {
        // SAFETY: the entry's contract.
        unsafe { load_queries(call, work, P::Q_BYTES / (ROWS * 32), P::Q_BYTES) }
    }

    #[inline(always)]
    unsafe fn product(q: &Fragments, k: Operand, _: u32) -> softmax::Scores {
        let mut s = [0; 32];
        for (j, d) in s.as_chunks_mut().0.iter_mut().enumerate() {
            for pair in 0..P::K_BYTES / (KEYS * 64) {
                // SAFETY: the whole warp is here; the tile has landed.
                unsafe {
                    let [b, next] = k.fragments(j, pair);
                    P::step(d, q[2 * pair], b);
                    P::step(d, q[2 * pair + 1], next);
                }
            }
        }
        s
    }

    #[inline(always)]
    fn mask(s: &mut softmax::Scores, valid: u32) {
        softmax::mask(s, valid);
    }

    #[inline(always)]
    unsafe fn raise_max(max: u32, s: &softmax::Scores) -> u32 {
        // SAFETY: the whole warp is here.
        unsafe { softmax::raise_max(max, s) }
    }

    #[inline(always)]
    fn encode<W: Weights>(s: &softmax::Scores, max: u32) -> (Codes, Option<Rows>) {
        W::of_packed(s, max)
    }

    #[inline(always)]
    fn ends<W: Weights>(max: u32) -> [RowEnd; 2] {
        let ((upper, lower), shift) = (convert::f32_of_f16x2(max), W::shift(max));
        [RowEnd { max: upper, shift: shift[0] }, RowEnd { max: lower, shift: shift[1] }]
    }
}

/// INT8 queries and keys, with the scale groups of [`scale_groups`](crate::layout::scale_groups).
struct Int8;

/// INT8 queries of a warp.
struct ScaledQueries {
    fragments: Fragments,
    /// Factors of the thread's rows.
    factor: Rows,
    /// Scale of the thread's keys (all of one group) in the first key block.
    k_scale: *const f32,
}

impl Scores for Int8 {
    const K_BYTES: usize = tiles::K_E4M3_BYTES;
    const STAGES: usize = MMA_STAGES_8_BIT;
    type Queries = ScaledQueries;
    /// Register 4j + 2r + e: row r, key 8j + 2q + e.
    type Tile = [f32; 64];
    type Max = Rows;
    const LOWEST: Rows = [f32::NEG_INFINITY; 2];

    #[inline(always)]
    unsafe fn queries(call: &Call, work: &Work) -> ScaledQueries {
        let (warp, lane) = (thread_idx_x() as usize / 32, thread_idx_x() as usize % 32);
        let rows = call.q_tokens.div_ceil(2 * ROWS as u32) as usize * 2 * ROWS;
        let row = work.row as usize + warp * 16 + lane / 4;
        let tiles_a_head = call.kv_tokens.div_ceil(KEYS as u32) as usize;
        // SAFETY: factors of all rows of the tiles, scales of all key blocks of the head.
        unsafe {
            let factor = call.q_factor.add((work.batch * call.q_heads + work.h) as usize * rows + row);
            ScaledQueries {
                fragments: load_queries(call, work, 4, tiles::Q_E4M3_BYTES),
                factor: [*factor, *factor.add(8)],
                k_scale: call.k_scale.add(work.kv_head as usize * tiles_a_head * 4 + lane % 4),
            }
        }
    }

    #[inline(always)]
    unsafe fn product(q: &ScaledQueries, k: Operand, block: u32) -> [f32; 64] {
        let mut s = [0.0; 64];
        // SAFETY: the whole warp is here; the tile has landed, and the block has scales.
        unsafe {
            let k_scale = *q.k_scale.add(block as usize * 4);
            let factor = [q.factor[0] * k_scale, q.factor[1] * k_scale];
            for (j, s) in s.as_chunks_mut::<4>().0.iter_mut().enumerate() {
                let mut d = [SUM_ZERO; 4];
                for pair in 0..2 {
                    let [b, next] = k.fragments(j, pair);
                    mma::m16n8k32_s32_s8(&mut d, q.fragments[2 * pair], b);
                    mma::m16n8k32_s32_s8(&mut d, q.fragments[2 * pair + 1], next);
                }
                for (i, s) in s.iter_mut().enumerate() {
                    *s = (f32::from_bits(d[i]) - f32::from_bits(SUM_ZERO)) * factor[i / 2];
                }
            }
        }
        s
    }

    #[inline(always)]
    fn mask(s: &mut [f32; 64], valid: u32) {
        let valid = valid as i32 - (thread_idx_x() % 4 * 2) as i32;
        for (i, s) in s.iter_mut().enumerate() {
            let key = (i / 4 * 8 + i % 2) as i32;
            *s = if key < valid { *s } else { f32::NEG_INFINITY };
        }
    }

    #[inline(always)]
    unsafe fn raise_max(max: Rows, s: &[f32; 64]) -> Rows {
        // SAFETY: the whole warp is here.
        unsafe { softmax::raise_max_wide(max, s) }
    }

    #[inline(always)]
    fn encode<W: Weights>(s: &[f32; 64], max: Rows) -> (Codes, Option<Rows>) {
        W::of_wide(s, max)
    }

    #[inline(always)]
    fn ends<W: Weights>(max: Rows) -> [RowEnd; 2] {
        // The max is subtracted in f32, before anything is rounded.
        max.map(|max| RowEnd { max, shift: max })
    }
}

/// From scores to E4M3 probabilities.
trait Weights {
    /// The codes of packed f16 scores under the row maxima `max` (upper row in the lower half), and this thread's share of
    /// the row sums unless they are sums of decoded codes.
    fn of_packed(s: &softmax::Scores, max: u32) -> (Codes, Option<Rows>);
    /// The same of f32 scores.
    fn of_wide(s: &[f32; 64], max: Rows) -> (Codes, Option<Rows>);
    /// What the codes of packed scores take for the row maxima, in code units.
    fn shift(max: u32) -> Rows;
}

/// The scores of [`softmax::four`].
#[inline(always)]
fn wide_four(s: &[f32; 64], pair: usize, row: usize) -> [f32; 4] {
    let [first, second] = softmax::four(pair, row);
    [s[first], s[first + 1], s[second], s[second + 1]]
}

impl<E: Encoder> Weights for E {
    #[inline(always)]
    fn of_packed(s: &softmax::Scores, max: u32) -> (Codes, Option<Rows>) {
        let addend = Self::addend(max);
        let rows = [permute(addend, addend, 0x1010), permute(addend, addend, 0x3232)];
        let mut codes = [0; 32];
        for (i, code) in codes.iter_mut().enumerate() {
            *code = Self::code(s[i], rows[i % 2]);
        }
        let mut p = [0; 16];
        softmax::pack(&codes, Self::BYTES, &mut p);
        (p, None)
    }

    #[inline(always)]
    fn of_wide(s: &[f32; 64], max: Rows) -> (Codes, Option<Rows>) {
        let mut p = [0; 16];
        for (i, p) in p.iter_mut().enumerate() {
            let (pair, row) = (i / 2, i % 2);
            let [a, b, c, d] = wide_four(s, pair, row).map(|s| s - max[row]);
            let codes = [convert::f16x2(a, b), convert::f16x2(c, d)].map(|s| Self::code(s, Self::FROM_ZERO));
            *p = permute(codes[0], codes[1], Self::BYTES);
        }
        (p, None)
    }

    #[inline(always)]
    fn shift(max: u32) -> Rows {
        Self::reference(max)
    }
}

/// E4M3 of four exponents in octaves, and their sum added to `sum`.
#[inline(always)]
fn exponentials(octaves: [f32; 4], sum: &mut f32) -> u32 {
    let e = octaves.map(convert::exp2);
    *sum += (e[0] + e[1]) + (e[2] + e[3]);
    convert::e4m3x4(e)
}

impl Weights for Exp2 {
    #[inline(always)]
    fn of_packed(s: &softmax::Scores, max: u32) -> (Codes, Option<Rows>) {
        let max = Self::shift(max);
        let offset = [convert::fma(max[0], -0.125, 8.0), convert::fma(max[1], -0.125, 8.0)];
        let (mut p, mut sums) = ([0; 16], [0.0; 2]);
        for (i, p) in p.iter_mut().enumerate() {
            let (pair, row) = (i / 2, i % 2);
            let (a, b) = convert::f32_of_f16x2(s[4 * pair + row]);
            let (c, d) = convert::f32_of_f16x2(s[4 * pair + 2 + row]);
            *p = exponentials([a, b, c, d].map(|s| convert::fma(s, 0.125, offset[row])), &mut sums[row]);
        }
        (p, Some(sums))
    }

    #[inline(always)]
    fn of_wide(s: &[f32; 64], max: Rows) -> (Codes, Option<Rows>) {
        let (mut p, mut sums) = ([0; 16], [0.0; 2]);
        for (i, p) in p.iter_mut().enumerate() {
            let (pair, row) = (i / 2, i % 2);
            let octaves = wide_four(s, pair, row).map(|s| convert::fma(s - max[row], 0.125, 8.0));
            *p = exponentials(octaves, &mut sums[row]);
        }
        (p, Some(sums))
    }

    #[inline(always)]
    fn shift(max: u32) -> Rows {
        let (upper, lower) = convert::f32_of_f16x2(max);
        [upper, lower]
    }
}

/// The ring of K and V tiles in shared memory, and what is still to be fetched.
struct Ring<S> {
    /// This thread's first 16 bytes of the next tiles.
    k: *const u8,
    v: *const u8,
    /// Tiles still to be fetched.
    left: u32,
    /// Slot of the next tiles to be used.
    slot: u32,
    scores: PhantomData<S>,
}

impl<S: Scores> Ring<S> {
    const SLOT_BYTES: u32 = (S::K_BYTES + V_BYTES) as u32;
    const STAGES: u32 = S::STAGES as u32;

    /// Fetches the first tiles, all but one slot full.
    #[inline(always)]
    unsafe fn start(call: &Call, work: &Work) -> Self {
        let first = work.kv_head as usize * call.kv_tokens.div_ceil(KEYS as u32) as usize;
        let mine = thread_idx_x() as usize * 16;
        // SAFETY: the tiles of this head.
        unsafe {
            let (k, v) = (call.k.add(first * S::K_BYTES + mine), call.v.add(first * V_BYTES + mine));
            let mut ring = Self { k, v, left: work.tiles, slot: 0, scores: PhantomData };
            for slot in 0..Self::STAGES - 1 {
                ring.fetch(slot);
            }
            ring
        }
    }

    /// Starts copying the next tiles, if there are any, as one group.
    #[inline(always)]
    unsafe fn fetch(&mut self, slot: u32) {
        const PIECE: usize = THREADS as usize * 16;
        if self.left > 0 {
            self.left -= 1;
            let to = shared_base().add(slot * Self::SLOT_BYTES + thread_idx_x() * 16);
            // SAFETY: inside the tiles of this head and a slot that nobody reads any more.
            unsafe {
                for at in (0..S::K_BYTES).step_by(PIECE) {
                    copy_16(to.add(at as u32), self.k.add(at));
                }
                for at in (0..V_BYTES).step_by(PIECE) {
                    copy_16(to.add((S::K_BYTES + at) as u32), self.v.add(at));
                }
                self.k = self.k.add(S::K_BYTES);
                self.v = self.v.add(V_BYTES);
            }
        }
        commit_group();
    }

    /// Waits for the next K and V tile, and fetches into the slot of the last ones.
    #[inline(always)]
    unsafe fn next(&mut self) -> (Operand, Operand) {
        match Self::STAGES {
            2 => wait_group::<0>(),
            _ => wait_group::<1>(),
        }
        let slot = self.slot;
        self.slot = if slot + 1 == Self::STAGES { 0 } else { slot + 1 };
        // SAFETY: every thread of the block is here; after the barrier the tiles are there for all, and all are done with
        // the last ones.
        unsafe {
            sync_threads();
            self.fetch(if slot == 0 { Self::STAGES - 1 } else { slot - 1 });
        }
        let k = shared_base().add(slot * Self::SLOT_BYTES);
        (Operand::new(k), Operand::new(k.add(S::K_BYTES as u32)))
    }
}

/// The running state of a thread's two rows.
struct State<M> {
    /// m.
    max: M,
    /// l under m.
    sum: Rows,
    /// A under m; register 4j + 2r + e: row r, channel 8j + 2q + e.
    out: [f32; 64],
    pending: Pending,
}

impl<M> State<M> {
    /// A <- alpha A + P R for one value tile.
    #[inline(always)]
    unsafe fn add_values(&mut self, p: &Codes, v: Operand, alpha: Rows, not_zero: u32) {
        let p = p.as_chunks::<4>().0;
        // In quarters: the assembler would load fragments far ahead, and on sm_90 run out of registers.
        for (part, out) in self.out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
            softmax::stay(not_zero, || {
                for (j, out) in out.as_chunks_mut::<4>().0.iter_mut().enumerate() {
                    let mut product = [0.0; 4];
                    for pair in 0..2 {
                        // SAFETY: the whole warp is here; the tile has landed.
                        unsafe {
                            let [b, next] = v.fragments(4 * part + j, pair);
                            mma::m16n8k32_f32_e4m3(&mut product, p[2 * pair], b);
                            mma::m16n8k32_f32_e4m3(&mut product, p[2 * pair + 1], next);
                        }
                    }
                    for (i, out) in out.iter_mut().enumerate() {
                        *out = convert::fma(*out, alpha[i / 2], product[i]);
                    }
                }
            });
        }
    }

    /// A <- A + r mu^T for the pending row sums and a tile of means in global memory.
    #[inline(always)]
    unsafe fn restore_means(&mut self, means: *const u8) {
        let mine = thread_idx_x() as usize % 32 * 4;
        for (j, out) in self.out.as_chunks_mut().0.iter_mut().enumerate() {
            // SAFETY: inside the tile, as `tiles::mean_offset` lays it out; the whole warp is here.
            unsafe {
                let half = |half: usize| *means.add(j * 256 + half * 128 + mine).cast::<u32>();
                mma::m16n8k16_f32_f16(out, self.pending.sums, [half(0), half(1)]);
            }
        }
        self.pending = Pending::new();
    }
}

/// P 1, of decoded codes.
#[inline(always)]
unsafe fn decoded_sums(p: &Codes) -> Rows {
    const ONES: [u32; 2] = [0x3838_3838; 2];
    let mut sums = [0.0; 4];
    for p in p.as_chunks::<4>().0 {
        // SAFETY: the whole warp is here.
        unsafe { mma::m16n8k32_f32_e4m3(&mut sums, *p, ONES) }
    }
    [sums[0], sums[2]]
}

/// The attention loop of a warp, over all key blocks.
#[inline(always)]
unsafe fn attend<S: Scores, W: Weights, const SMOOTH: bool>(call: &Call, work: &Work) -> State<S::Max> {
    let mut state = State { max: S::LOWEST, sum: [0.0; 2], out: [0.0; 64], pending: Pending::new() };
    if work.tiles == 0 {
        return state;
    }
    // SAFETY: all warps of the block run this together; tiles are read between their barrier and the next.
    unsafe {
        let mut ring = Ring::<S>::start(call, work);
        let mean_tiles = call.kv_tokens.div_ceil((KEYS * MEAN_BLOCKS) as u32) as usize;
        let mut means = call.means.wrapping_add(work.kv_head as usize * mean_tiles * MEAN_BYTES);
        let q = S::queries(call, work);
        let mut left = work.keys;
        for block in 0..work.tiles {
            let (k, v) = ring.next();

            // S = Q K^T
            let mut s = S::product(&q, k, block);
            if left < KEYS as u32 {
                S::mask(&mut s, left);
            }
            left = left.saturating_sub(KEYS as u32);

            // m' = max(m, rowmax S), alpha = exp(m - m'), P = exp(S - m'), r = P 1
            let before = S::ends::<W>(state.max);
            state.max = S::raise_max(state.max, &s);
            let now = S::ends::<W>(state.max);
            let alpha = [0, 1].map(|row| convert::exp2((before[row].shift - now[row].shift) * 0.125));
            let (p, own) = S::encode::<W>(&s, state.max);
            let r = match own {
                Some(own) => [quad_sum(own[0]), quad_sum(own[1])],
                None => decoded_sums(&p),
            };

            // l <- alpha l + r, A <- alpha A + P R
            for row in 0..2 {
                state.sum[row] = convert::fma(state.sum[row], alpha[row], r[row]);
            }
            state.add_values(&p, v, alpha, call.group.get());

            // A <- A + r mu^T, 16 key blocks at a time
            if SMOOTH {
                state.pending.rescale(alpha);
                state.pending.keep(block, block % 2 == 0, convert::f16x2(r[0], r[1]));
                let last = block + 1 == work.tiles;
                if last && block % 2 == 0 {
                    state.pending.keep(block + 1, false, 0);
                }
                if last || block % MEAN_BLOCKS as u32 == MEAN_BLOCKS as u32 - 1 {
                    state.restore_means(means);
                    means = means.wrapping_add(MEAN_BYTES);
                }
            }
        }
    }
    state
}

/// The kernel.
#[inline(always)]
unsafe fn attention<S: Scores, W: Weights, const SMOOTH: bool>(call: Call) {
    // SAFETY: the entry's contract; the whole block is here.
    unsafe {
        let state = attend::<S, W, SMOOTH>(&call, &call.work(BLOCK_ROWS));
        // The work anew, so that nothing of it occupies registers during the loop.
        finish(&call, &call.work(BLOCK_ROWS), PEAK_E4M3, &state.out, &state.sum, || S::ends::<W>(state.max));
    }
}

entry!(attention_mma_f16_expcast_smooth, attention::<F16, ExpCast, true>);
entry!(attention_mma_f16_expcast_plain, attention::<F16, ExpCast, false>);
entry!(attention_mma_f16_quadratic_smooth, attention::<F16, Quadratic, true>);
entry!(attention_mma_f16_quadratic_plain, attention::<F16, Quadratic, false>);
entry!(attention_mma_f16_exp2_smooth, attention::<F16, Exp2, true>);
entry!(attention_mma_f16_exp2_plain, attention::<F16, Exp2, false>);
entry!(attention_mma_e4m3_expcast_smooth, attention::<E4m3, ExpCast, true>);
entry!(attention_mma_e4m3_expcast_plain, attention::<E4m3, ExpCast, false>);
entry!(attention_mma_e4m3_quadratic_smooth, attention::<E4m3, Quadratic, true>);
entry!(attention_mma_e4m3_quadratic_plain, attention::<E4m3, Quadratic, false>);
entry!(attention_mma_e4m3_exp2_smooth, attention::<E4m3, Exp2, true>);
entry!(attention_mma_e4m3_exp2_plain, attention::<E4m3, Exp2, false>);
entry!(attention_mma_i8_expcast_smooth, attention::<Int8, ExpCast, true>);
entry!(attention_mma_i8_expcast_plain, attention::<Int8, ExpCast, false>);
entry!(attention_mma_i8_quadratic_smooth, attention::<Int8, Quadratic, true>);
entry!(attention_mma_i8_quadratic_plain, attention::<Int8, Quadratic, false>);
entry!(attention_mma_i8_exp2_smooth, attention::<Int8, Exp2, true>);
entry!(attention_mma_i8_exp2_plain, attention::<Int8, Exp2, false>);
