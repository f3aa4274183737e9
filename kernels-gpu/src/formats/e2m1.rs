//! FP4 E2M1: 1 sign, 2 exponent and 1 mantissa bits, bias 1; the values ±{0, .5, 1, 1.5, 2, 3, 4, 6}.
//!
//! The conversion is that of `cvt.rn.satfinite.e2m1x2.f32` (PTX ISA, data movement and conversion
//! instructions): to nearest, ties to the even code, saturating to ±6. The format has no NaN: the
//! instruction makes NaN, whatever its sign, the largest positive value.

use super::minifloat::{EXPONENT, MAGNITUDE, snap};

/// Largest value.
pub const MAX: f32 = 6.0;

/// The four bits of `x` in the low half of a byte (the high half is 0); keeps -0; NaN becomes 6.
#[inline(always)]
pub fn encode(x: f32) -> u8 {
    let bits = x.to_bits() as i32;
    (snap::<1, 0>(saturated(bits)).code | sign(bits) >> 28 & 0x8) as u8
}

/// The value of the low four bits of `nibble`.
#[inline(always)]
pub fn decode(nibble: u8) -> f32 {
    let code = u32::from(nibble & 0x7);
    // Code 1 is the one subnormal, 0.5: read as 1.5, less 1; code 0 likewise as 1, less 1.
    let subnormal = if code < 2 { u32::MAX } else { 0 };
    let normal = (code << 22) + (126 << 23) + (subnormal & (1 << 23));
    let value = f32::from_bits(normal) - f32::from_bits(subnormal & 1f32.to_bits());
    f32::from_bits(value.to_bits() | u32::from(nibble & 0x8) << 28)
}

/// `decode(encode(x))`, branch-free: the E2M1 value nearest to `x`; NaN becomes 6.
#[inline(always)]
pub fn round(x: f32) -> f32 {
    let bits = x.to_bits() as i32;
    f32::from_bits(snap::<1, 0>(saturated(bits)).value.to_bits() | sign(bits) as u32)
}

/// [`round`] of a magnitude: fewer operations where there is no sign.
#[inline(always)]
pub fn round_magnitude(x: f32) -> f32 {
    snap::<1, 0>(if x < MAX { x } else { MAX }).value
}

/// The magnitude of the float with these bits, at most 6, and 6 for NaN.
#[inline(always)]
fn saturated(bits: i32) -> f32 {
    let magnitude = f32::from_bits((bits & MAGNITUDE) as u32);
    if magnitude < MAX { magnitude } else { MAX }
}

/// The sign bit of the float with these bits, cleared for NaN.
#[inline(always)]
fn sign(bits: i32) -> i32 {
    if bits & MAGNITUDE > EXPONENT { 0 } else { bits & !MAGNITUDE }
}
