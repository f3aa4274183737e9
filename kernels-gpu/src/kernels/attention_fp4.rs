//! Fused NVFP4 attention by warp-level products: `vc4`, the method of section 2 at 4 bits. Two bodies of the same loop read
//! the same tiles:
//!
//! * [`Native`], for sm_120a: `mma.m16n8k64` of E2M1 with an E4M3 scale for 16 elements inside the instruction.
//! * [`Decoded`], for every GPU from sm_89: an element times its scale is exact in f16 (6 bits of significand, 2^-10 to
//!   2688), so a block decodes the tiles into shared memory and multiplies f16 with f32 accumulators. The products are
//!   those of the native form, at the speed of f16: what 4 bits cost can be studied where the instruction is not.
//!
//! A block serves 128 query rows of one head, 8 warps of 16 rows, as in [`attention_mma`](super::attention_mma). What is
//! of its own:
//!
//! * **Scores** are f32 in code units, products of codes times one factor of the head: no range to leave.
//! * **Operand order**: rows of K lie in [`key_row`](tiles::key_row) order, so that a lane's scores of 32 keys are eight
//!   consecutive tokens, which are one register of its A fragment: an [`Octet`](Product::Octet). Tokens keep their order, and
//!   the 16 that share a scale are two lanes' octets.
//! * **Probabilities** have two levels of scales: the row so that its max is 448 * 6, and E4M3(amax / 6) for 16. Scale and
//!   codes are bit for bit those of [`nvfp4`](crate::formats::nvfp4) of the same exponentials.
//! * **Row sums** come from a product of the quantized probabilities with ones; l adds them up.
//! * **Block means** lie in the V^T tile, f16 and unscaled: A <- alpha A + c P R + r mu^T with c the scale of V, r in f32 (it
//!   exceeds f16).
//! * **Not finite**: as in `attention_mma`; a query that is not finite has NaN scales.
//!
//! Parameters and grid: [`call`](super::call), in tiles and sizes of NVFP4 from [`quantize_fp4`](super::quantize_fp4).

#![cfg_attr(target_arch = "nvptx64", allow(dead_code, reason = "a module has one of the two products"))]

use core::marker::PhantomData;

use super::call::{Call, Work, entry};
use super::epilogue::{BLOCK_ROWS, RowEnd, finish};
use super::operand::Operand;
use super::rows::Divisor;
use super::softmax::{self, Rows};
use super::tiles::{
    self, FP4_ROW, FP4_SCALES, HEAD_DIM, K_FP4_BYTES, KEYS, Q_FP4_BYTES, ROWS, V_FP4_BYTES, V_FP4_MEANS,
};
use super::{FP4_DECODED_BYTES, FP4_STAGES_DECODED, FP4_STAGES_NATIVE};
use crate::formats::{e2m1, e4m3};
use crate::ptx::async_copy::{commit_group, copy_16, wait_group};
use crate::ptx::collective::sync_threads;
use crate::ptx::f16x2::{self, splat};
use crate::ptx::ldmatrix::load_x4;
use crate::ptx::memory::{load_shared_v4, store_shared_v4};
use crate::ptx::quotient::correct_quotient;
use crate::ptx::shuffle::shuffle_xor;
use crate::ptx::special::thread_idx_x;
use crate::ptx::{SharedAddr, convert, mma, shared};

/// Threads of a block.
const THREADS: usize = 256;
/// K and V^T tile of a key block.
const SLOT_BYTES: usize = K_FP4_BYTES + V_FP4_BYTES;
/// What the row max is worth as a probability, and its binary logarithm.
const PEAK: f32 = e4m3::MAX * e2m1::MAX;
const PEAK_LOG2: f32 = 11.392_318;

crate::ptx::shared_symbol!(
    /// Start of the dynamic shared memory.
    fn shared_base, "vc_shared", 1024
);

/// 16 rows by two times 64 elements of the left operand, or of a row's two lines what belongs to one lane.
type Halves<T> = [[T; 2]; 2];

/// How NVFP4 operands are multiplied.
trait Product {
    /// K and V tiles in shared memory as they are stored.
    const STAGES: usize;
    /// What products lack.
    const GAIN: f32;
    /// Whether the queries stay in registers; else they are read, from L1, for every key block.
    const KEEPS_QUERIES: bool;
    /// Eight elements of one row of A, in a lane.
    type Octet: Copy;
    /// A fragment of 16 rows by 64 elements, with its scales.
    type A: Copy;
    /// A tile of 128 rows along k in shared memory, as the B operand.
    type B;

    /// Eight elements as they are stored, and the byte of their scale.
    fn stored(word: u32, byte: u8) -> Self::Octet;
    /// Eight elements that are yet to be rounded, and what one stands for.
    fn rounded(elements: &[f32; 8], unit: f32) -> Self::Octet;
    /// The fragment of octets by half of k and row, and the bytes of their scales, which two lanes share.
    ///
    /// # Safety
    /// The whole warp executes it together.
    unsafe fn fragment(octets: &Halves<Self::Octet>, bytes: &Halves<u32>) -> Self::A;
    /// Where K, V^T and the means lie, once a slot's copies are there for the whole block.
    ///
    /// # Safety
    /// The whole block executes it together.
    unsafe fn arrived(slot: SharedAddr) -> Landed<Self>;
    /// D += A B for columns 8j on.
    ///
    /// # Safety
    /// The whole warp executes it together; the tile has landed.
    unsafe fn multiply(d: &mut [f32; 4], a: &[Self::A; 2], b: &Self::B, j: usize);
    /// A 1.
    ///
    /// # Safety
    /// The whole warp executes it together.
    unsafe fn sums(a: &[Self::A; 2]) -> Rows;
}

/// The tiles of a key block in shared memory.
struct Landed<P: Product + ?Sized> {
    k: P::B,
    v: P::B,
    means: SharedAddr,
}

/// Scales inside the instruction.
struct Native;

/// An A fragment and, of one row, its four scales.
#[derive(Clone, Copy)]
struct Scaled {
    elements: [u32; 4],
    scales: u32,
}

/// A tile as a lane addresses it for `ldmatrix`, and the scales that it brings into products.
struct ScaledTile {
    row: SharedAddr,
    /// Those of row 8 (4i + q) + g for the lane 4g + q.
    scales: [[u32; 2]; 4],
}

impl ScaledTile {
    #[inline(always)]
    unsafe fn new(tile: SharedAddr) -> Self {
        let lane = thread_idx_x() as usize % 32;
        let row = tile.add(tiles::swizzle_64(lane % 8, lane / 8 * 16) as u32);
        let first = (HEAD_DIM * FP4_ROW + (lane % 4 * 8 + lane / 4) * FP4_SCALES) as u32;
        let mut scales = [[0; 2]; 4];
        for (i, scales) in scales.iter_mut().enumerate() {
            // SAFETY: the scales of a row of the tile, which has landed.
            *scales = unsafe { shared::load_v2(tile.add(first + (i * 32 * FP4_SCALES) as u32)) };
        }
        Self { row, scales }
    }
}

impl Native {
    #[inline(always)]
    unsafe fn step(d: &mut [f32; 4], a: Scaled, b: [u32; 2], scales: u32, lane: usize) {
        // SAFETY: the whole warp is here.
        unsafe {
            match lane {
                0 => mma::m16n8k64_f32_nvfp4::<0, 0>(d, a.elements, a.scales, b, scales),
                1 => mma::m16n8k64_f32_nvfp4::<0, 1>(d, a.elements, a.scales, b, scales),
                2 => mma::m16n8k64_f32_nvfp4::<0, 2>(d, a.elements, a.scales, b, scales),
                _ => mma::m16n8k64_f32_nvfp4::<0, 3>(d, a.elements, a.scales, b, scales),
            }
        }
    }
}

impl Product for Native {
    const STAGES: usize = FP4_STAGES_NATIVE;
    const GAIN: f32 = 1.0;
    const KEEPS_QUERIES: bool = true;
    type Octet = u32;
    type A = Scaled;
    type B = ScaledTile;

    #[inline(always)]
    fn stored(word: u32, _: u8) -> u32 {
        word
    }

    #[inline(always)]
    fn rounded(elements: &[f32; 8], _: f32) -> u32 {
        convert::e2m1x8(*elements)
    }

    #[inline(always)]
    unsafe fn fragment(octets: &Halves<u32>, bytes: &Halves<u32>) -> Scaled {
        // The even lanes of a row's four bring the upper row's scales, the odd ones the lower's: lanes 0 and 1 those of
        // 16 elements in every 32, lanes 2 and 3 those of the others.
        let q = thread_idx_x() % 4;
        let row = (q % 2) as usize;
        let pick = |half: usize| if row == 0 { bytes[half][0] } else { bytes[half][1] };
        let own = (pick(0) | pick(1) << 16) << (q / 2 * 8);
        // SAFETY: the whole warp is here.
        let scales = own | unsafe { shuffle_xor::<2>(own) };
        Scaled { elements: [octets[0][0], octets[0][1], octets[1][0], octets[1][1]], scales }
    }

    #[inline(always)]
    unsafe fn arrived(slot: SharedAddr) -> Landed<Self> {
        let v = slot.add(K_FP4_BYTES as u32);
        // SAFETY: the tiles have landed.
        unsafe {
            Landed { k: ScaledTile::new(slot), v: ScaledTile::new(v), means: v.add(V_FP4_MEANS as u32) }
        }
    }

    #[inline(always)]
    unsafe fn multiply(d: &mut [f32; 4], a: &[Scaled; 2], b: &ScaledTile, j: usize) {
        // SAFETY: the whole warp is here; the tile has landed.
        unsafe {
            let [b0, b1, b2, b3] = load_x4(b.row.add((j * 8 * FP4_ROW) as u32));
            let scales = b.scales[j / 4];
            Self::step(d, a[0], [b0, b1], scales[0], j % 4);
            Self::step(d, a[1], [b2, b3], scales[1], j % 4);
        }
    }

    #[inline(always)]
    unsafe fn sums(a: &[Scaled; 2]) -> Rows {
        /// 1.0 in E2M1 and in E4M3.
        const ONES: ([u32; 2], u32) = ([0x2222_2222; 2], 0x3838_3838);
        let mut d = [0.0; 4];
        for a in a {
            // SAFETY: the whole warp is here.
            unsafe { Self::step(&mut d, *a, ONES.0, ONES.1, 0) }
        }
        [d[0], d[2]]
    }
}

/// Elements times their scales in f16.
struct Decoded;

impl Decoded {
    /// Where V^T and the means lie behind K, in f16; the slot is behind them ([`FP4_DECODED_BYTES`]).
    const V: u32 = tiles::K_F16_BYTES as u32;
    const MEANS: u32 = 2 * tiles::K_F16_BYTES as u32;

    /// Elements `i` and `i + 4` of eight, times 2^-14: the bits of E2M1 where f16 has exponent and mantissa.
    #[inline(always)]
    fn pair(word: u32, i: usize) -> u32 {
        let both = word >> (4 * i);
        (both & 0x0007_0007) << 9 | (both & 0x0008_0008) << 12
    }

    /// A scale times 2^7, in both halves.
    #[inline(always)]
    fn scale(byte: u32) -> u32 {
        /// 2^15: the bits of E4M3 where f16 has exponent and mantissa are worth 2^-8 of it.
        const UP: u32 = splat(0x7800);
        f16x2::mul(byte << 7 | byte << 23, UP)
    }

    /// Decodes 32 elements of a row, 64 bytes of f16 times 2^-7: 16-byte chunk i has the elements i and i + 4 of every
    /// eight, so that a lane's of a k step are those of one octet.
    #[inline(always)]
    unsafe fn decode(from: SharedAddr, to: SharedAddr, row: usize, part: usize) {
        let scales = (HEAD_DIM * FP4_ROW + row * FP4_SCALES + part / 2 * 4) as u32;
        // SAFETY: a row of a tile that has landed, and its place in f16, which nobody reads.
        unsafe {
            let words = load_shared_v4(from.add(tiles::swizzle_64(row, part * 16) as u32));
            let bytes = shared::load_u32(from.add(scales)) >> (part % 2 * 16);
            let scales = [Self::scale(bytes & 0xff), Self::scale(bytes >> 8 & 0xff)];
            for i in 0..4 {
                let mut chunk = [0; 4];
                for (octet, chunk) in chunk.iter_mut().enumerate() {
                    *chunk = f16x2::mul(Self::pair(words[octet], i), scales[octet / 2]);
                }
                let at = part / 2 * (KEYS * 128) + tiles::swizzle_128(row, part % 2 * 64 + i * 16);
                store_shared_v4(to.add(at as u32), chunk);
            }
        }
    }

    /// D += A B for two chunks of every lane: 16 elements.
    #[inline(always)]
    unsafe fn step(d: &mut [f32; 4], a: [u32; 4], b: [u32; 2]) {
        // SAFETY: the whole warp is here.
        unsafe { mma::m16n8k16_f32_f16(d, a, b) }
    }
}

impl Product for Decoded {
    const STAGES: usize = FP4_STAGES_DECODED;
    const GAIN: f32 = 128.0;
    /// 32 registers in f16, which there are not beside scores and output.
    const KEEPS_QUERIES: bool = false;
    type Octet = [u32; 4];
    /// Four k steps of 16.
    type A = [[u32; 4]; 4];
    type B = Operand;

    #[inline(always)]
    fn stored(word: u32, byte: u8) -> [u32; 4] {
        /// 2^14.
        const UP: u32 = splat(0x7400);
        let scale = e4m3::decode(byte);
        let scale = convert::f16x2(scale, scale);
        [0, 1, 2, 3].map(|i| f16x2::mul(f16x2::mul(Self::pair(word, i), UP), scale))
    }

    #[inline(always)]
    fn rounded(elements: &[f32; 8], unit: f32) -> [u32; 4] {
        let value = |i: usize| e2m1::round_magnitude(elements[i]) * unit;
        [0, 1, 2, 3].map(|i| convert::f16x2(value(i), value(i + 4)))
    }

    #[inline(always)]
    unsafe fn fragment(octets: &Halves<[u32; 4]>, _: &Halves<u32>) -> [[u32; 4]; 4] {
        let mut a = [[0; 4]; 4];
        for (step, a) in a.iter_mut().enumerate() {
            for (i, a) in a.iter_mut().enumerate() {
                *a = octets[step / 2][i % 2][step % 2 * 2 + i / 2];
            }
        }
        a
    }

    #[inline(always)]
    unsafe fn arrived(slot: SharedAddr) -> Landed<Self> {
        let k = SharedAddr(slot.0 - FP4_DECODED_BYTES as u32);
        let (v, means) = (k.add(Self::V), k.add(Self::MEANS));
        let (thread, v_slot) = (thread_idx_x() as usize, slot.add(K_FP4_BYTES as u32));
        // SAFETY: the tiles have landed and nobody reads the last ones in f16; the block meets behind the decoding.
        unsafe {
            for i in 0..2 {
                let (row, part) = (thread % KEYS, thread / KEYS + 2 * i);
                Self::decode(slot, k, row, part);
                Self::decode(v_slot, v, row, part);
            }
            if thread < HEAD_DIM * 2 / 16 {
                let at = (thread * 16) as u32;
                store_shared_v4(means.add(at), load_shared_v4(v_slot.add(V_FP4_MEANS as u32 + at)));
            }
            sync_threads();
        }
        Landed { k: Operand::new(k), v: Operand::new(v), means }
    }

    #[inline(always)]
    unsafe fn multiply(d: &mut [f32; 4], a: &[[[u32; 4]; 4]; 2], b: &Operand, j: usize) {
        for part in 0..4 {
            let steps = &a[part / 2];
            // SAFETY: the whole warp is here; the tile is decoded.
            unsafe {
                let [b, next] = b.fragments(j, part);
                Self::step(d, steps[part % 2 * 2], b);
                Self::step(d, steps[part % 2 * 2 + 1], next);
            }
        }
    }

    #[inline(always)]
    unsafe fn sums(a: &[[[u32; 4]; 4]; 2]) -> Rows {
        const ONES: [u32; 2] = [splat(0x3c00); 2];
        let mut d = [0.0; 4];
        for i in 0..8 {
            // SAFETY: the whole warp is here.
            unsafe { Self::step(&mut d, a[i / 4][i % 4], ONES) }
        }
        [d[0], d[2]]
    }
}

/// The ring of K and V tiles in shared memory, and what is still to be fetched.
struct Ring<P> {
    /// This thread's first 16 bytes of the next tiles.
    k: *const u8,
    v: *const u8,
    /// Tiles still to be fetched.
    left: u32,
    /// Slot of the next tiles to be used.
    slot: usize,
    product: PhantomData<P>,
}

/// Copies this thread's pieces of a tile.
#[inline(always)]
unsafe fn copy_tile<const BYTES: usize>(to: SharedAddr, from: *const u8) {
    const ROUND: usize = THREADS * 16;
    for at in (0..BYTES).step_by(ROUND) {
        if at + ROUND <= BYTES || at + (thread_idx_x() as usize * 16) < BYTES {
            // SAFETY: inside the tile and its slot.
            unsafe { copy_16(to.add(at as u32), from.add(at)) }
        }
    }
}

impl<P: Product> Ring<P> {
    /// Where the slots begin.
    #[inline(always)]
    fn slot(index: usize) -> SharedAddr {
        let first = if P::STAGES == 1 { FP4_DECODED_BYTES as u32 } else { 0 };
        shared_base().add(first + (index * SLOT_BYTES) as u32)
    }

    /// Fetches the first tiles: of more than one slot all but one full.
    #[inline(always)]
    unsafe fn start(call: &Call, work: &Work) -> Self {
        let first = work.kv_head as usize * call.kv_tokens.div_ceil(KEYS as u32) as usize;
        let mine = thread_idx_x() as usize * 16;
        // SAFETY: the tiles of this head.
        unsafe {
            let (k, v) = (call.k.add(first * K_FP4_BYTES + mine), call.v.add(first * V_FP4_BYTES + mine));
            let mut ring = Self { k, v, left: work.tiles, slot: 0, product: PhantomData };
            for slot in 0..(P::STAGES - 1).max(1) {
                ring.fetch(slot);
            }
            ring
        }
    }

    /// Starts copying the next tiles, if there are any, as one group.
    #[inline(always)]
    unsafe fn fetch(&mut self, slot: usize) {
        if self.left > 0 {
            self.left -= 1;
            let to = Self::slot(slot).add(thread_idx_x() * 16);
            // SAFETY: inside the tiles of this head and a slot that nobody reads any more.
            unsafe {
                copy_tile::<K_FP4_BYTES>(to, self.k);
                copy_tile::<V_FP4_BYTES>(to.add(K_FP4_BYTES as u32), self.v);
                self.k = self.k.add(K_FP4_BYTES);
                self.v = self.v.add(V_FP4_BYTES);
            }
        }
        commit_group();
    }

    /// Waits for the next K and V tile, and fetches into the slot of the last ones.
    #[inline(always)]
    unsafe fn next(&mut self) -> Landed<P> {
        match P::STAGES {
            1 => wait_group::<0>(),
            _ => wait_group::<{ FP4_STAGES_NATIVE as u32 - 2 }>(),
        }
        let slot = self.slot;
        self.slot = if slot + 1 == P::STAGES { 0 } else { slot + 1 };
        // SAFETY: every thread of the block is here; after the barrier the tiles are there for all, and all are done with
        // the last ones. A single slot is free again once it is decoded.
        unsafe {
            sync_threads();
            let landed = P::arrived(Self::slot(slot));
            self.fetch(if slot == 0 { P::STAGES - 1 } else { slot - 1 });
            landed
        }
    }
}

/// Eight channels of a query, `half` of what a lane has of a k step, and the byte of their scale.
#[inline(always)]
unsafe fn stored<P: Product>(tile: *const u8, row: usize, step: usize, half: usize) -> (P::Octet, u32) {
    let lane = thread_idx_x() as usize % 4;
    // SAFETY: inside the tile.
    unsafe {
        let byte = *tile.add(ROWS * FP4_ROW + row * FP4_SCALES + 4 * step + 2 * half + lane / 2);
        let word = *tile.add(tiles::swizzle_64(row, step * 32 + half * 16 + lane * 4)).cast::<u32>();
        (P::stored(word, byte), u32::from(byte))
    }
}

/// The A fragment of rows `row` and 8 below of a tile, for channels 64 `step` on.
#[inline(always)]
unsafe fn load_step<P: Product>(tile: *const u8, row: usize, step: usize) -> P::A {
    // SAFETY: inside the tile; the whole warp is here.
    unsafe {
        let ((a, a_byte), (b, b_byte)) =
            (stored::<P>(tile, row, step, 0), stored::<P>(tile, row + 8, step, 0));
        let ((c, c_byte), (d, d_byte)) =
            (stored::<P>(tile, row, step, 1), stored::<P>(tile, row + 8, step, 1));
        P::fragment(&[[a, b], [c, d]], &[[a_byte, b_byte], [c_byte, d_byte]])
    }
}

/// The A fragments of a warp's queries.
#[inline(always)]
unsafe fn load_queries<P: Product>(call: &Call, work: &Work) -> [P::A; 2] {
    let (warp, lane) = (thread_idx_x() as usize / 32, thread_idx_x() as usize % 32);
    let tiles_a_head = call.q_tokens.div_ceil(2 * ROWS as u32) as usize * 2;
    let tile =
        (work.batch * call.q_heads + work.h) as usize * tiles_a_head + work.row as usize / ROWS + warp / 4;
    let row = warp % 4 * 16 + lane / 4;
    // SAFETY: a tile is there for padding rows too; the whole warp is here.
    unsafe {
        let tile = call.q.add(tile * Q_FP4_BYTES);
        [load_step::<P>(tile, row, 0), load_step::<P>(tile, row, 1)]
    }
}

/// Scores of two rows by 128 keys, in code units; register 4j + 2r + e: row r, column 8j + 2q + e of the product, which
/// is key 32 (j / 4) + 8q + 2 (j % 4) + e.
type Scores = [f32; 64];

/// S = Q K^T times `factor`.
#[inline(always)]
unsafe fn scores<P: Product>(q: &[P::A; 2], k: &P::B, factor: f32) -> Scores {
    let mut s = [0.0; 64];
    for (j, s) in s.as_chunks_mut::<4>().0.iter_mut().enumerate() {
        // SAFETY: the whole warp is here; the tile has landed.
        unsafe { P::multiply(s, q, k, j) }
        s.iter_mut().for_each(|s| *s *= factor);
    }
    s
}

/// Takes the keys from `valid` on out.
#[inline(always)]
fn mask(s: &mut Scores, valid: u32) {
    // Counted from this thread's first key, every comparison is with a constant.
    let valid = valid as i32 - (thread_idx_x() % 4 * 8) as i32;
    for (i, s) in s.iter_mut().enumerate() {
        let key = (i / 16 * 32 + i / 4 % 4 * 2 + i % 2) as i32;
        *s = if key < valid { *s } else { f32::NEG_INFINITY };
    }
}

/// Eight probabilities of a row, quantized with those of the neighboring lane: elements before they are rounded, the byte
/// of their scale, and what it stands for.
#[inline(always)]
unsafe fn quantize(p: &[f32; 8]) -> ([f32; 8], u32, f32) {
    const SIXTH: Divisor = Divisor { scaled: e2m1::MAX, reciprocal: 1.0 / e2m1::MAX, up: 1.0 };
    let own = p.iter().fold(0.0f32, |amax, p| amax.max(*p));
    // SAFETY: the whole warp is here.
    let amax = own.max(f32::from_bits(unsafe { shuffle_xor::<1>(own.to_bits()) }));
    let rounded = u32::from(convert::e4m3x2(SIXTH.divide_scaled(amax), 0.0)) & 0xff;
    // As in `nvfp4::block_scale`: the smallest scale rather than none.
    let byte = if amax > 0.0 { rounded.max(1) } else { 0 };
    let unit = e4m3::decode_magnitude(byte);
    let reciprocal = if byte > 0 { 1.0 / unit } else { 0.0 };
    let mut elements = [0.0; 8];
    for (element, &p) in elements.iter_mut().zip(p) {
        // Corrected once the quotient may be a neighbor of the nearest float, but not on the other side of a boundary: those
        // are exact multiples of the unit.
        *element = correct_quotient(p * reciprocal, p, unit, reciprocal);
    }
    (elements, byte, unit)
}

/// Half of a lane's probabilities of 64 keys in a row, quantized, and the byte of their scale. A function, because a
/// closure that is used more than once is not inlined, and passes arrays through local memory.
#[inline(always)]
unsafe fn octet<P: Product>(s: &Scores, max: Rows, half: usize, row: usize) -> (P::Octet, u32) {
    let mut p = [0.0; 8];
    for (i, p) in p.iter_mut().enumerate() {
        // In the order of operations of the CPU backend.
        *p = convert::exp2((s[half * 16 + 2 * row + i / 2 * 4 + i % 2] - max[row]) * 0.125) * PEAK;
    }
    // SAFETY: the whole warp is here.
    let (elements, byte, unit) = unsafe { quantize(&p) };
    (P::rounded(&elements, unit), byte)
}

/// P = exp(S - m) of keys 64 `step` on, as an A fragment.
#[inline(always)]
unsafe fn probabilities<P: Product>(s: &Scores, max: Rows, step: usize) -> P::A {
    let half = 2 * step;
    // SAFETY: the whole warp is here.
    unsafe {
        let ((a, a_byte), (b, b_byte)) = (octet::<P>(s, max, half, 0), octet::<P>(s, max, half, 1));
        let ((c, c_byte), (d, d_byte)) = (octet::<P>(s, max, half + 1, 0), octet::<P>(s, max, half + 1, 1));
        P::fragment(&[[a, b], [c, d]], &[[a_byte, b_byte], [c_byte, d_byte]])
    }
}

/// The running state of a thread's two rows.
struct State {
    /// m.
    max: Rows,
    /// l under m.
    sum: Rows,
    /// A under m; register 4j + 2r + e: row r, channel 8j + 2q + e.
    out: [f32; 64],
}

impl State {
    /// A <- alpha A + c P R + r mu^T for one value tile.
    #[inline(always)]
    unsafe fn add_values<P: Product, const SMOOTH: bool>(
        &mut self,
        p: &[P::A; 2],
        landed: &Landed<P>,
        c: f32,
        alpha: Rows,
        r: Rows,
        not_zero: u32,
    ) {
        let means = landed.means.add(thread_idx_x() % 4 * 4);
        for (part, out) in self.out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            // In loops that ptxas does not move scores and products out of: it would run out of registers.
            softmax::stay(not_zero, || {
                for (i, out) in out.as_chunks_mut::<4>().0.iter_mut().enumerate() {
                    let j = 8 * part + i;
                    let mut product = [0.0; 4];
                    // SAFETY: the whole warp is here; the tile and its means have landed.
                    let mean = unsafe {
                        P::multiply(&mut product, p, &landed.v, j);
                        if SMOOTH { shared::load_u32(means.add(j as u32 * 16)) } else { 0 }
                    };
                    let (low, high) = convert::f32_of_f16x2(mean);
                    for (i, out) in out.iter_mut().enumerate() {
                        *out = convert::fma(product[i], c, *out * alpha[i / 2]);
                        if SMOOTH {
                            *out = convert::fma(r[i / 2], if i % 2 == 0 { low } else { high }, *out);
                        }
                    }
                }
            });
        }
    }
}

/// The attention loop of a warp, over all key blocks.
#[inline(always)]
unsafe fn attend<P: Product, const SMOOTH: bool>(call: &Call, work: &Work) -> State {
    let mut state = State { max: [f32::NEG_INFINITY; 2], sum: [0.0; 2], out: [0.0; 64] };
    if work.tiles == 0 {
        return state;
    }
    // SAFETY: all warps of the block run this together; tiles are read between their barrier and the next.
    unsafe {
        let mut ring = Ring::<P>::start(call, work);
        let kept = load_queries::<P>(call, work);
        let factor = *call.q_factor.add((work.batch * call.q_heads + work.h) as usize)
            * *call.k_scale.add(work.kv_head as usize)
            * P::GAIN;
        let c = *call.means.cast::<f32>().add(work.kv_head as usize) * P::GAIN;
        let mut left = work.keys;
        for _ in 0..work.tiles {
            let landed = ring.next();

            // S = Q K^T
            let q = if P::KEEPS_QUERIES { kept } else { load_queries::<P>(call, work) };
            let mut s = scores::<P>(&q, &landed.k, factor);
            if left < KEYS as u32 {
                mask(&mut s, left);
            }
            left = left.saturating_sub(KEYS as u32);

            // m' = max(m, rowmax S), alpha = exp(m - m'), P = exp(S - m'), r = P 1
            let before = state.max;
            state.max = softmax::raise_max_wide(before, &s);
            let alpha = [0, 1].map(|row| convert::exp2((before[row] - state.max[row]) * 0.125));
            let p = [probabilities::<P>(&s, state.max, 0), probabilities::<P>(&s, state.max, 1)];
            let r = P::sums(&p);

            // l <- alpha l + r, A <- alpha A + c P R + r mu^T
            for row in 0..2 {
                state.sum[row] = convert::fma(state.sum[row], alpha[row], r[row]);
            }
            state.add_values::<P, SMOOTH>(&p, &landed, c, alpha, r, call.group.get());
        }
    }
    state
}

/// The kernel.
#[inline(always)]
unsafe fn attention<P: Product, const SMOOTH: bool>(call: Call) {
    // SAFETY: the entry's contract; the whole block is here.
    unsafe {
        let state = attend::<P, SMOOTH>(&call, &call.work(BLOCK_ROWS));
        // The work anew, so that nothing of it occupies registers during the loop.
        finish(&call, &call.work(BLOCK_ROWS), PEAK_LOG2, &state.out, &state.sum, || {
            state.max.map(|max| RowEnd { max, shift: max })
        });
    }
}

#[cfg(any(attention = "sm120", not(target_arch = "nvptx64")))]
entry!(attention_fp4_native_smooth, attention::<Native, true>);
#[cfg(any(attention = "sm120", not(target_arch = "nvptx64")))]
entry!(attention_fp4_native_plain, attention::<Native, false>);
#[cfg(any(not(attention = "sm120"), not(target_arch = "nvptx64")))]
entry!(attention_fp4_decoded_smooth, attention::<Decoded, true>);
#[cfg(any(not(attention = "sm120"), not(target_arch = "nvptx64")))]
entry!(attention_fp4_decoded_plain, attention::<Decoded, false>);

#[cfg(all(test, feature = "emulation"))]
mod tests {
    extern crate std;
    use std::vec::Vec;

    use super::*;
    use crate::emulation::{Launch, Memory};
    use crate::formats::nvfp4;

    /// Blocks of 16 probabilities: of any size, with values on the boundaries of their codes, none, and too small for a scale.
    fn blocks() -> Vec<[f32; 16]> {
        let mut state = 1u32;
        let mut random = move || {
            state = state.wrapping_mul(747_796_405).wrapping_add(2_891_336_453);
            (state >> 8) as f32 / 16_777_216.0
        };
        let mut blocks = Vec::from([[0.0; 16], [1e-30; 16], [PEAK; 16]]);
        for exponent in -30..12 {
            for _ in 0..40 {
                blocks.push(core::array::from_fn(|_| (random() * 2f32.powi(exponent)).min(PEAK)));
            }
        }
        for byte in 1..=0x7e {
            let unit = e4m3::decode(byte);
            // The largest gives the scale, the others are ties and their neighbors.
            let ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0].map(|tie: f32| tie * unit);
            let near =
                ties.map(|tie| [tie, f32::from_bits(tie.to_bits() + 1), f32::from_bits(tie.to_bits() - 1)]);
            let mut values = near.into_iter().flatten();
            for _ in 0..2 {
                let mut block: [f32; 16] = core::array::from_fn(|_| values.next().unwrap_or(0.0));
                block[15] = 6.0 * unit;
                blocks.push(block);
            }
        }
        blocks
    }

    /// Scale and codes of probabilities are those of `nvfp4`, whose operations are other ones.
    #[test]
    fn probabilities_have_the_bits_of_nvfp4() {
        let blocks = blocks();
        Launch::new(32, 0)
            .run(&Memory::new(), || {
                for group in blocks.chunks(16) {
                    // Two neighboring lanes have a block.
                    let lane = thread_idx_x() as usize;
                    let block = group.get(lane / 2).copied().unwrap_or([0.0; 16]);
                    let own: [f32; 8] = core::array::from_fn(|i| block[lane % 2 * 8 + i]);
                    // SAFETY: the whole warp is here.
                    let (elements, byte, unit) = unsafe { quantize(&own) };
                    let (want_byte, packed) = nvfp4::quantize_block(&block, 1.0);
                    assert_eq!(byte, u32::from(want_byte), "{block:?}");
                    assert_eq!(unit, e4m3::decode(want_byte));
                    let half: [u8; 4] = core::array::from_fn(|i| packed[lane % 2 * 4 + i]);
                    assert_eq!(Native::rounded(&elements, unit), u32::from_le_bytes(half), "{block:?}");
                    // In f16 they are what they stand for, as operands that were stored.
                    assert_eq!(
                        Decoded::rounded(&elements, unit),
                        Decoded::stored(u32::from_le_bytes(half), want_byte),
                        "{block:?}"
                    );
                }
            })
            .expect("no fault");
    }

    /// Every element under every scale is exact in f16, with the factor that products make up for.
    #[test]
    fn decoding_is_exact() {
        for byte in 0..=0x7e {
            let scale = Decoded::scale(u32::from(byte));
            for nibble in 0..16 {
                let word = u32::from(nibble) * 0x1_0001;
                let decoded = f16x2::mul(Decoded::pair(word, 0), scale);
                let want = e2m1::decode(nibble) * e4m3::decode(byte);
                let (low, high) = convert::f32_of_f16x2(decoded);
                assert_eq!([low * Decoded::GAIN, high * Decoded::GAIN], [want; 2], "{nibble:x} {byte:x}");
            }
        }
        assert!(convert::f32_of_f16x2(Decoded::stored(0x2222_2222, e4m3::NAN)[0]).0.is_nan());
    }
}
