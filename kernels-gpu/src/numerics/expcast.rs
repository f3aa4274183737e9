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

/// The conventional path, for comparison: the byte of `e4m3(256 * 2^u)`.
#[inline(always)]
pub fn exp_then_cast(u: f32) -> u8 {
    e4m3::encode(256.0 * exp2(u))
}
