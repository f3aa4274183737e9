//! The scalar half of the attention loop, on what a warp holds of the scores of 16 query rows and 128 keys.
//!
//! Lane t holds, with g = t / 4 and q = t % 4, rows g (upper) and g + 8 (lower) and of every 8 keys two, 2q and 2q + 1: as
//! packed f16 in code units, register 2j upper and 2j + 1 lower for keys 8j on. The accumulators of `wgmma` and of
//! `mma.sync` lie alike, so the kernels of both share this file.

use super::tiles::KEYS;
use crate::ptx::extrema::max_nan_f32;
use crate::ptx::f16x2::{self, splat};
use crate::ptx::shuffle::{permute, shuffle_xor};
use crate::ptx::special::thread_idx_x;
use crate::ptx::{convert, wgmma};

/// Scores of a thread: two rows by 32 of 128 keys.
pub(super) type Scores = [u32; KEYS / 4];
/// E4M3 probabilities of a thread: the A fragments of four products over 32 keys each.
pub(super) type Codes = [u32; KEYS / 8];
/// Values of two rows: the thread's upper and, 8 further down, its lower.
pub(super) type Rows = [f32; 2];

/// Minus infinity in both halves.
pub(super) const LOWEST: u32 = splat(0xfc00);

/// The sum over the four threads that share a row.
///
/// # Safety
/// The whole warp executes it together.
#[inline(always)]
pub(super) unsafe fn quad_sum(x: f32) -> f32 {
    // SAFETY: the whole warp is here.
    unsafe {
        let x = x + f32::from_bits(shuffle_xor::<1>(x.to_bits()));
        x + f32::from_bits(shuffle_xor::<2>(x.to_bits()))
    }
}

/// The largest over the four threads that share a row. A NaN stays.
///
/// # Safety
/// The whole warp executes it together.
#[inline(always)]
pub(super) unsafe fn quad_max(x: f32) -> f32 {
    // SAFETY: the whole warp is here.
    unsafe {
        let x = max_nan_f32(x, f32::from_bits(shuffle_xor::<1>(x.to_bits())));
        max_nan_f32(x, f32::from_bits(shuffle_xor::<2>(x.to_bits())))
    }
}

/// Row maxima `max` (the upper row in the lower half) and the scores of a tile: the maxima of both. A NaN stays.
///
/// # Safety
/// The whole warp executes it together.
#[inline(always)]
pub(super) unsafe fn raise_max(max: u32, s: &Scores) -> u32 {
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
        f16x2::max_nan(max, m)
    }
}

/// [`raise_max`] of f32 scores, registers 4j + 2r + e of row r.
///
/// # Safety
/// The whole warp executes it together.
#[inline(always)]
pub(super) unsafe fn raise_max_wide(max: Rows, s: &[f32; KEYS / 2]) -> Rows {
    // Two chains a row, by the parity of the key.
    let mut m = [s[0], s[1], s[2], s[3]];
    for (i, s) in s.iter().enumerate().skip(4) {
        m[i % 4] = max_nan_f32(m[i % 4], *s);
    }
    // SAFETY: the whole warp is here.
    let quad_max = |x| unsafe { quad_max(x) };
    [0, 1].map(|row| max_nan_f32(max[row], quad_max(max_nan_f32(m[2 * row], m[2 * row + 1]))))
}

/// Where the s32 sums of INT8 products start: 1.5 * 2^23 as bits. A sum below 2^22 in magnitude that is added to them leaves the
/// bits of the f32 that is larger by as much: no conversion. All such bits order as integers.
pub(super) const SUM_ZERO: u32 = 0x4b40_0000;

/// Where a row's four scores of 16 keys lie in registers 4j + 2r + e, which are four consecutive k of a fragment: two and two
/// behind one another.
#[inline(always)]
pub(super) fn four(pair: usize, row: usize) -> [usize; 2] {
    [8 * pair + 2 * row, 8 * pair + 4 + 2 * row]
}

/// Scores of keys from `valid` on become minus infinity: outside the max, and byte 0.
#[inline(always)]
pub(super) fn mask(s: &mut Scores, valid: u32) {
    // Counted from this thread's first key, every comparison is with a constant and none stays in a register.
    let valid = valid as i32 - (thread_idx_x() % 4 * 2) as i32;
    for j in 0..16 {
        let key = 8 * j as i32;
        let keep = if key + 1 < valid { 0x3210 } else { 0x7610 };
        let keep = if key < valid { keep } else { 0x7654 };
        s[2 * j] = permute(s[2 * j], LOWEST, keep);
        s[2 * j + 1] = permute(s[2 * j + 1], LOWEST, keep);
    }
}

/// Packs codes that lie in the places of scores into the A fragments; `select` says where in two registers the four
/// bytes are.
#[inline(always)]
pub(super) fn pack(s: &Scores, select: u32, p: &mut Codes) {
    for (i, p) in p.iter_mut().enumerate() {
        let (pair, row) = (i / 2, i % 2);
        *p = permute(s[4 * pair + row], s[4 * pair + 2 + row], select);
    }
}

/// Runs `body` once, in a loop that only `not_zero` ends.
///
/// ptxas knows no order between arithmetic and the wait for a product that the arithmetic has nothing to do with, and
/// moves it behind the wait, where the Tensor Core idles; out of a loop it does not move it.
#[inline(always)]
pub(super) fn stay(not_zero: u32, mut body: impl FnMut()) {
    loop {
        body();
        // Pinned, or LLVM would conclude from an earlier loop's end that this one ends too.
        if wgmma::pinned(not_zero) != 0 {
            break;
        }
    }
}

/// An encoder of packed scores: E4M3 bytes without an exponential ([`expcast`](crate::numerics::expcast)).
///
/// A subnormal f16 is a whole number of 2^-24 and its bits are that number: a sum in its range rounds to whole codes,
/// saturation cuts off below code 0, and the low byte of the bits is the code.
pub(super) trait Encoder {
    /// Where [`pack`] finds the bytes of [`code`](Self::code)s.
    const BYTES: u32 = 0x6420;
    /// [`addend`](Self::addend) where both maxima are 0.
    const FROM_ZERO: u32;
    /// What is added to the scores of both rows.
    fn addend(max: u32) -> u32;
    /// The codes of two scores, in the low bytes of the halves.
    fn code(s: u32, addend: u32) -> u32;
    /// What the codes take for the row maxima, in code units: the addend was rounded to f16, and its own maximum is what
    /// all codes agree on.
    fn reference(max: u32) -> Rows;
}

/// The packed ExpCast encoder: a byte is the score rounded in code units, exponential by its own format.
pub(super) struct ExpCast;

impl ExpCast {
    /// -0.484375: with it every row max below 1024 code units lands on byte 120.
    const BETA: u16 = 0xb7c0;
    const BETA_F32: f32 = -0.484375;
    /// 2^-24 and 120 of them.
    const UNIT: u16 = 1;
    const TOP: u16 = 120;
}

impl Encoder for ExpCast {
    const FROM_ZERO: u32 = splat(Self::BETA);

    #[inline(always)]
    fn addend(max: u32) -> u32 {
        f16x2::sub(Self::FROM_ZERO, max)
    }

    #[inline(always)]
    fn code(s: u32, addend: u32) -> u32 {
        f16x2::fma_sat(f16x2::add(s, addend), splat(Self::UNIT), splat(Self::TOP))
    }

    #[inline(always)]
    fn reference(max: u32) -> Rows {
        let (upper, lower) = convert::f32_of_f16x2(Self::addend(max));
        [Self::BETA_F32 - upper, Self::BETA_F32 - lower]
    }
}

/// The quadratic encoder: the score bent by a parabola in every octave, so that the byte is nearly that of an exponential.
pub(super) struct Quadratic;

impl Quadratic {
    /// 724 * 2^-24, a code unit; its negative, its multiples by 8 as a negative number of 2^-24, and 2^-24 over them.
    const UNIT: u16 = 724;
    const MINUS_UNIT: u16 = 0x8000 | 724;
    const MINUS_OCTAVE: u16 = 0xeda8;
    const PER_OCTAVE: u16 = 0x09a8;
    /// Where the row's max sits: -3360 * 2^-24.
    const ZERO: u16 = 0x8a90;
    /// 8, and in 2^-24 -2 and 132.
    const EIGHT: u16 = 0x4800;
    const MINUS_TWO: u16 = 0x8002;
    const BASE: u16 = 132;
    const ZERO_F32: f32 = -3360.0 / 16_777_216.0;
    const PER_UNIT: f32 = 16_777_216.0 / 724.0;
}

impl Encoder for Quadratic {
    const FROM_ZERO: u32 = splat(Self::ZERO);

    #[inline(always)]
    fn addend(max: u32) -> u32 {
        f16x2::fma(max, splat(Self::MINUS_UNIT), Self::FROM_ZERO)
    }

    #[inline(always)]
    fn code(s: u32, addend: u32) -> u32 {
        let x = f16x2::fma(s, splat(Self::UNIT), addend);
        let r = f16x2::fma(x, splat(Self::PER_OCTAVE), splat(Self::MINUS_TWO));
        let e = f16x2::fma(r, splat(Self::MINUS_OCTAVE), x);
        let z = f16x2::fma(r, splat(Self::EIGHT), splat(Self::BASE));
        f16x2::fma_sat(e, e, z)
    }

    #[inline(always)]
    fn reference(max: u32) -> Rows {
        let (upper, lower) = convert::f32_of_f16x2(Self::addend(max));
        [(Self::ZERO_F32 - upper) * Self::PER_UNIT, (Self::ZERO_F32 - lower) * Self::PER_UNIT]
    }
}

/// 256 exp, rounded to E4M3; row sums of the exponentials in f32.
pub(super) struct Exp2;

/// Row sums of the key blocks whose means are not restored yet, under the running maxima.
pub(super) struct Pending {
    /// An A fragment of 16 columns.
    pub(super) sums: [u32; 4],
    /// Row sums in f16 of a key block whose neighbour in `sums` is yet to come; the upper row in the lower half.
    odd_one: u32,
}

impl Pending {
    #[inline(always)]
    pub(super) fn new() -> Self {
        Self { sums: [0; 4], odd_one: 0 }
    }

    /// Multiplies by `alpha`.
    #[inline(always)]
    pub(super) fn rescale(&mut self, alpha: Rows) {
        let both = convert::f16x2(alpha[0], alpha[1]);
        self.odd_one = f16x2::mul(self.odd_one, both);
        for row in 0..2 {
            let pair = permute(both, both, [0x1010, 0x3232][row]);
            self.sums[row] = f16x2::mul(self.sums[row], pair);
            self.sums[2 + row] = f16x2::mul(self.sums[2 + row], pair);
        }
    }

    /// `sums` of key block `block`: those of an even one wait for its neighbour's, and both become two columns of the
    /// A fragment, as [`mean_offset`](super::tiles::mean_offset) orders them.
    #[inline(always)]
    pub(super) fn keep(&mut self, block: u32, even: bool, sums: u32) {
        if even {
            self.odd_one = sums;
            return;
        }
        let mine = thread_idx_x() % 4 == block / 4 % 4;
        for row in 0..2 {
            let pair = permute(self.odd_one, sums, [0x5410, 0x7632][row]);
            for half in 0..2 {
                if mine && block / 2 % 2 == half {
                    self.sums[2 * half as usize + row] = pair;
                }
            }
        }
    }
}
