//! FP8 E4M3 (finite only): 1 sign, 4 exponent and 3 mantissa bits, bias 7, no infinities.
//!
//! Bytes `0x00..=0x07` are zero and the subnormals `k * 2^-9`, `0x7E` is 448, `0x7F` is NaN. The
//! conversion is that of `cvt.rn.satfinite.e4m3x2.f32` (PTX ISA, data movement and conversion
//! instructions): to nearest, ties to even, saturating, NaN to `0x7F`.

use super::minifloat::{EXPONENT, MAGNITUDE, snap};

/// Largest finite value.
pub const MAX: f32 = 448.0;
/// Smallest positive value, a subnormal: `2^-9`.
pub const MIN_SUBNORMAL: f32 = 1.0 / 512.0;
/// Smallest positive normal value, byte `0x08`: `2^-6`.
pub const MIN_NORMAL: f32 = 1.0 / 64.0;
/// The byte that every NaN becomes.
pub const NAN: u8 = 0x7F;

/// The byte of `x`: round to nearest even, saturate to ±448 (infinities too), keep -0, NaN to `0x7F`.
#[inline(always)]
pub fn encode(x: f32) -> u8 {
    let bits = x.to_bits() as i32;
    let code = snap::<3, -6>(saturated(bits)).code | (bits >> 24) & 0x80;
    (if bits & MAGNITUDE > EXPONENT { NAN as i32 } else { code }) as u8
}

/// The value of a byte; `0x7F` and `0xFF` are NaN.
#[inline(always)]
pub fn decode(byte: u8) -> f32 {
    let magnitude = u32::from(byte & 0x7F);
    let value = if magnitude == u32::from(NAN) { f32::NAN } else { decode_magnitude(magnitude) };
    f32::from_bits(value.to_bits() | u32::from(byte & 0x80) << 24)
}

/// The value of a code `0..=0x7E` without sign, branch-free; what codes of ExpCast stand for.
#[inline(always)]
pub fn decode_magnitude(code: u32) -> f32 {
    // A code below 8 is a subnormal k * 2^-9: read it as 2^-6 * (1 + k / 8) and take the 2^-6 off.
    let subnormal = if code < 8 { u32::MAX } else { 0 };
    let normal = (code << 20) + (120 << 23) + (subnormal & (1 << 23));
    f32::from_bits(normal) - f32::from_bits(subnormal & MIN_NORMAL.to_bits())
}

/// `decode(encode(x))`, branch-free: the E4M3 value nearest to `x`. NaN stays NaN.
#[inline(always)]
pub fn round(x: f32) -> f32 {
    let bits = x.to_bits() as i32;
    let value = snap::<3, -6>(saturated(bits)).value;
    let value = f32::from_bits(value.to_bits() | (bits & !MAGNITUDE) as u32);
    if bits & MAGNITUDE > EXPONENT { f32::NAN } else { value }
}

/// The magnitude of the float with these bits, at most 448 (NaN too: the callers select it away).
#[inline(always)]
fn saturated(bits: i32) -> f32 {
    let magnitude = f32::from_bits((bits & MAGNITUDE) as u32);
    if magnitude < MAX { magnitude } else { MAX }
}
