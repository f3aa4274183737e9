//! ExpCast-FP8: the E4M3 byte of a softmax weight straight from its score, without an exponential.
//!
//! An E4M3 byte read as an integer is `8 log2(v) + 56 + e`, `e` in [-0.6886, 0] depending on the
//! mantissa alone. With `u = (s - m) log2(e) <= 0` the score in octaves below the row's max and `2^u`
//! scaled by `2^8` (so that the max lands on 256), the byte is (VC-Attention, equation 7)
//!
//! ```text
//! c(u) = clip[0, 120]( rne( 8 (u + 8) + 56 + beta ) )
//! ```
//!
//! where `beta` centres the error. Scores come here in *code units*, eighths of an octave, because Q
//! and K carry the factor `8 log2 e` already ([`units`](super::units)): `t = 8u`.
//!
//! Two encoders write that byte. The `f32` encoder adds and rounds in `f32`: [`code`],
//! [`code_from_units`]. The packed encoder works on pairs of binary16 scores as the Tensor Core leaves
//! them, two additions for two scores: [`packed_bias`], [`packed_code`]; here is its twin, bit for bit.
//! Two more encoders, packed as well, spend instructions on accuracy: [`pinned_code`] keeps the row's max on
//! 120 whatever `beta` is, [`quadratic_code`] bends the score so that the byte is nearly that of
//! exp-then-cast. `docs/expcast.md` has what they cost and give.
//!
//! The `_value` functions give what the byte decodes to and vectorize; attention on the CPU uses them.
//!
//! A row without underflow (every `u >= -14`) has, for `beta` from -0.5 to -0.35, a total variation of
//! at most 3.637% from exact softmax (proposition 3.1 there); with the packed encoder and its binary16
//! scores below 1024 code units in magnitude, 3.8%. Bytes 1 to 7 are E4M3 subnormals and stand for less
//! than they should; below `u = -14.89` (at the paper's `beta`) the byte is 0.
//!
//! A score of NaN becomes byte 0, on the GPU too (`max.f16x2` returns the number): the row's maximum or
//! the caller's check must carry it. A masked key is byte 0 likewise.

use super::exp2::exp2;
use crate::formats::{e4m3, f16};

/// The paper's centring of the error, for the `f32` encoder.
pub const PAPER_BETA: f32 = -0.35;

/// The packed encoder's `beta`, -31/64: a binary16 value, and one for which the row's max gets
/// [`MAX_CODE`] for every binary16 max below 1024 code units. With -0.5 it would fall to 119 in 1.2% of
/// the cases below 64.
pub const PACKED_BETA: f32 = -0.484_375;

/// The byte of the row's maximum, E4M3 for 256.
pub const MAX_CODE: u8 = 120;

/// Scores in code units at or above this, relative to the row's max, get normal E4M3 bytes (`u >= -14`).
/// The weight of a row below it is its underflow mass.
pub const UNDERFLOW_UNITS: f32 = -112.0;

/// Integers above this have a spacing of 1 in `f32`: adding it rounds to nearest even.
const ROUND_TO_INTEGER: f32 = 8_388_608.0;

/// Where whole codes are the spacing of binary16, and the low byte of its bits counts them.
const PACKED_ZERO: f32 = 1024.0;

/// The byte for a score `u <= 0` in octaves below the row's max: `c(u)` with one rounding to `f32`.
///
/// `fma(8, u, 120 + beta)` is a plain addition here: `8 u` is exact, so there is nothing to fuse.
#[inline(always)]
pub fn code(u: f32, beta: f32) -> u8 {
    code_from_units(8.0 * u, beta)
}

/// The byte for a score `t <= 0` in code units below the row's max.
#[inline(always)]
pub fn code_from_units(t: f32, beta: f32) -> u8 {
    rounded_code(t, beta) as u8
}

/// What [`code_from_units`] decodes to, 0 to 256; branch-free.
#[inline(always)]
pub fn value_from_units(t: f32, beta: f32) -> f32 {
    e4m3::decode_magnitude(rounded_code(t, beta))
}

/// `clip[0, 120](rne(t + (120 + beta)))`.
#[inline(always)]
fn rounded_code(t: f32, beta: f32) -> u32 {
    // The bounds are integers, so clipping before rounding is the same. NaN fails the first comparison.
    let x = t + (f32::from(MAX_CODE) + beta);
    let x = if x > 0.0 { x } else { 0.0 };
    let x = if x < f32::from(MAX_CODE) { x } else { f32::from(MAX_CODE) };
    (x + ROUND_TO_INTEGER).to_bits() - ROUND_TO_INTEGER.to_bits()
}

/// The addend of a row for the packed encoder: `rne16(beta - m)`, `m` the row's max in code units.
///
/// Both arguments are binary16 values; the kernel forms this with one `sub.f16x2` when the max moves.
#[inline(always)]
pub fn packed_bias(m: f32, beta: f32) -> f32 {
    f16::round(beta - m)
}

/// The packed encoder's byte for the binary16 score `s <= m`, `n` from [`packed_bias`].
///
/// `x = rne16(s + n)`, `y = max(rne16(x + 1144), 1024)`, and the byte is the low byte of the bits of
/// `y`: 1144 = 1024 + 120, and from 1024 to 2048 the spacing of binary16 is 1, so the second addition
/// rounds to whole codes.
#[inline(always)]
pub fn packed_code(s: f32, n: f32) -> u8 {
    let y = f16::round(packed_sum(s, n));
    let y = if y > PACKED_ZERO { y } else { PACKED_ZERO };
    // 1024 is 0x6400: the low byte of the bits is the distance to it.
    (y - PACKED_ZERO) as u8
}

/// What [`packed_code`] decodes to, 0 to 256; branch-free.
#[inline(always)]
pub fn packed_value(s: f32, n: f32) -> f32 {
    // Within the clamp, whole numbers are what binary16 rounds to; below it, both end at 1024.
    let y = packed_sum(s, n);
    let y = if y > PACKED_ZERO { y } else { PACKED_ZERO };
    let code = (y + ROUND_TO_INTEGER).to_bits() - (PACKED_ZERO + ROUND_TO_INTEGER).to_bits();
    e4m3::decode_magnitude(code)
}

/// `rne16(s + n) + 1144`, the last sum not rounded yet.
#[inline(always)]
fn packed_sum(s: f32, n: f32) -> f32 {
    f16::round(s + n) + (PACKED_ZERO + f32::from(MAX_CODE))
}

/// The pinned encoder's byte for the binary16 score `s <= m` under the row's max `m`, `beta` a binary16 value in
/// [-1, 1].
///
/// `beta` comes in over the first code below the max: with `x = rne16(s - m)`, which is 0 for the max and exact,
/// `y = rne16(x + beta sat(-x))`, and the byte is `clip[0, 120](rne(y + 120))`. Four instructions for two scores:
/// `add`, `fma.sat`, `fma`, and the `fma.sat` that rounds and clips.
#[inline(always)]
pub fn pinned_code(s: f32, m: f32, beta: f32) -> u8 {
    pinned_rounded(s, m, beta) as u8
}

/// What [`pinned_code`] decodes to, 0 to 256; branch-free.
#[inline(always)]
pub fn pinned_value(s: f32, m: f32, beta: f32) -> f32 {
    e4m3::decode_magnitude(pinned_rounded(s, m, beta))
}

#[inline(always)]
fn pinned_rounded(s: f32, m: f32, beta: f32) -> u32 {
    let x = f16::round(s - m);
    let part = if x < 0.0 { -x } else { 0.0 };
    let part = if part < 1.0 { part } else { 1.0 };
    rounded_code(f16::fma(part, beta, x), 0.0)
}

/// `2^-24`, the spacing of subnormal binary16 values: a product in it is a rounded integer.
const SUBNORMAL: f32 = 1.0 / 16_777_216.0;

/// A code unit in the quadratic encoder, the binary16 value nearest to `2^-14.5`: its square times 32 is 0.9998
/// of `2^-24`, so that a square in these units adds up with whole codes.
pub const QUADRATIC_UNIT: f32 = 724.0 * SUBNORMAL;

/// Eight of these are an octave, as a multiple of `2^-24`; and its reciprocal in binary16.
const QUADRATIC_OCTAVE: f32 = 8.0 * 724.0;
const QUADRATIC_PER_OCTAVE: f32 = 1448.0 / 8_388_608.0;

/// Where the row's max sits in the quadratic encoder, -4.64 [`QUADRATIC_UNIT`]s: there it gets [`MAX_CODE`], and the
/// mean ratio of decoded to exact weights is 1. A shift of a whole row changes nothing else.
const QUADRATIC_ZERO: f32 = -3360.0 * SUBNORMAL;

/// The addend of a row for the quadratic encoder, `m` the row's max in code units, `beta` an offset in codes.
///
/// One `fma.f16x2` when the max moves; all binary16.
#[inline(always)]
pub fn quadratic_bias(m: f32, beta: f32) -> f32 {
    f16::fma(-QUADRATIC_UNIT, m, quadratic_zero(beta))
}

/// What the codes under the addend `n` take for the row's max, in code units: `m` up to the rounding of `n`.
#[inline(always)]
pub fn quadratic_reference(n: f32, beta: f32) -> f32 {
    (quadratic_zero(beta) - n) * (1.0 / QUADRATIC_UNIT)
}

#[inline(always)]
fn quadratic_zero(beta: f32) -> f32 {
    f16::round(QUADRATIC_ZERO + beta * QUADRATIC_UNIT)
}

/// The quadratic encoder's byte for the binary16 score `s <= m`, `n` from [`quadratic_bias`].
///
/// `c(u)` takes `f` for `2^f - 1` within an octave; this one takes the parabola through the same ends,
/// `f - f (1 - f) / 4`. Every step is one `fma.f16x2`, five for two scores:
///
/// ```text
/// x = s a + n            a = QUADRATIC_UNIT
/// r = x / (8 a) - 2      in multiples of 2^-24: the octave, an integer k, less 2
/// e = x - 8 a r          the place in it, d + 16 codes, d in [-4, 4]
/// z = 8 r + 132          in multiples of 2^-24, exact
/// y = sat(e e + z)       in multiples of 2^-24: 8 k + (d + 16)^2 / 32 + 116 rounded, the byte
/// ```
#[inline(always)]
pub fn quadratic_code(s: f32, n: f32) -> u8 {
    quadratic_rounded(s, n) as u8
}

/// What [`quadratic_code`] decodes to, 0 to 256; branch-free.
#[inline(always)]
pub fn quadratic_value(s: f32, n: f32) -> f32 {
    e4m3::decode_magnitude(quadratic_rounded(s, n))
}

#[inline(always)]
fn quadratic_rounded(s: f32, n: f32) -> u32 {
    let x = f16::fma(s, QUADRATIC_UNIT, n);
    let r = f16::fma(x, QUADRATIC_PER_OCTAVE, -2.0 * SUBNORMAL);
    let e = f16::fma(r, -QUADRATIC_OCTAVE, x);
    let z = f16::fma(r, 8.0, 132.0 * SUBNORMAL);
    let y = f16::fma(e, e, z);
    let y = if y > 0.0 { y } else { 0.0 };
    let y = if y < 1.0 { y } else { 1.0 };
    // Below the spacing's end, 2^-13, these are whole numbers.
    (y * (1.0 / SUBNORMAL) + ROUND_TO_INTEGER).to_bits() - ROUND_TO_INTEGER.to_bits()
}

/// The conventional path, for comparison: the byte of `e4m3(256 * 2^u)`.
#[inline(always)]
pub fn exp_then_cast(u: f32) -> u8 {
    e4m3::encode(256.0 * exp2(u))
}
