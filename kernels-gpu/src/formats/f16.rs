//! IEEE binary16 emulated in `f32`: what FP16 operands and f16 score accumulators round to.
//!
//! Storage uses [`half::f16`]; this module is the same rounding without leaving `f32`, in a form that
//! vectorizes. A sum, difference or product of two binary16 values taken in `f32` and then rounded here
//! is what a binary16 unit returns: 24 bits of significand are at least 2 * 11 + 2, so rounding twice
//! is innocuous (Figueroa, "When is double rounding innocuous?", 1995).

use super::minifloat::{EXPONENT, MAGNITUDE, snap};

/// Largest finite value.
pub const MAX: f32 = 65504.0;
/// Largest magnitude of a key: of the values with BF16's 8 significant bits the last below [`MAX`].
pub const KEY_MAX: f32 = 65280.0;

/// `x` to the nearest binary16 value, ties to even, as `f32`; branch-free.
///
/// Subnormals (multiples of `2^-24`) are kept, a magnitude of 65520 or more becomes infinite, -0 and
/// NaN stay.
#[inline(always)]
pub fn round(x: f32) -> f32 {
    let bits = x.to_bits() as i32;
    let magnitude_bits = bits & MAGNITUDE;
    let magnitude = f32::from_bits(magnitude_bits as u32);
    let bounded = if magnitude < 65536.0 { magnitude } else { 65536.0 };
    let value = snap::<10, -14>(bounded).value;
    // Overflow: infinity, unless `x` was NaN, whose bits are above those of infinity and stay.
    let beyond = if magnitude_bits > EXPONENT { magnitude_bits } else { EXPONENT };
    let value = if value < 65536.0 { value.to_bits() as i32 } else { beyond };
    f32::from_bits((value | bits & !MAGNITUDE) as u32)
}

/// `x` as a key in FP16: to the nearest BF16 value, ties to even, and that to FP16, which is exact unless it is subnormal there.
///
/// The low bits of a key are noise next to E4M3 probabilities, and the Tensor Core's power, which bounds the speed, goes with the
/// bits of its operands that flip (`docs/performance.md`, 12).
#[inline(always)]
pub fn round_key(x: f32) -> f32 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) & 0xffff_0000;
    round(if x.is_nan() { x } else { f32::from_bits(rounded) })
}

/// `a * b + c` of binary16 values with one rounding, as `fma.rn.f16`; branch-free.
///
/// The product is exact in `f32`, the sum may not be: it is rounded to odd, which the rounding to binary16
/// does not see (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", 2008).
#[inline(always)]
pub fn fma(a: f32, b: f32, c: f32) -> f32 {
    let product = a * b;
    let sum = product + c;
    let added = sum - product;
    let error = (product - (sum - added)) + (c - added);
    // Away from zero when the exact sum is. Infinities and NaN have an error of NaN and stay.
    let toward = if (error > 0.0) == (sum > 0.0) { 1 } else { u32::MAX };
    let bits = sum.to_bits();
    let inexact = error.abs() > 0.0 && bits & 1 == 0;
    round(f32::from_bits(if inexact { bits.wrapping_add(toward) } else { bits }))
}
