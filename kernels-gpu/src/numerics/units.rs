//! Code units: scores in eighths of an octave, the step of an E4M3 code.
//!
//! A score `scale * q.k` in nats is `scale * q.k * 8 log2 e` code units. The factor is split between Q
//! and K, `sqrt(|scale| * 8 log2 e)` on each and the sign of the scale on Q, so that the matrix unit
//! itself returns code units and ExpCast needs no multiplication.

use core::f32::consts::LOG2_E;

/// Code units per nat: `8 log2 e`, 11.54; one code unit is 0.0866 nat.
pub const PER_NAT: f32 = 8.0 * LOG2_E;

/// Nats per code unit: `ln 2 / 8`.
pub const NATS: f32 = core::f32::consts::LN_2 / 8.0;

/// What Q and K are each multiplied by: `sqrt(|scale| * 8 log2 e)`, correctly rounded after the product.
#[inline]
pub fn code_unit_factor(scale: f32) -> f32 {
    sqrt(scale.abs() * PER_NAT)
}

/// The square root, correctly rounded, in `core` alone (its own is not stable): for parameters, not for
/// inner loops. NaN below 0.
#[inline]
pub fn sqrt(x: f32) -> f32 {
    if x.is_nan() || x < 0.0 {
        return f32::NAN;
    }
    if x == 0.0 || x == f32::INFINITY {
        return x;
    }
    let field = (x.to_bits() >> 23) as i32;
    let fraction = u64::from(x.to_bits() & 0x7F_FFFF);
    // x = significand * 2^exponent
    let (significand, exponent) =
        if field == 0 { (fraction, -149) } else { (fraction | 1 << 23, field - 150) };
    // Up to at least 2^52, by a shift that leaves an even exponent: the root then has 26 bits or more.
    let shift = significand.leading_zeros() as i32 - 10;
    let shift = shift - (exponent - shift).rem_euclid(2);
    let square = significand << shift;
    let root = square.isqrt();
    // A last bit for "and a remainder" lets the conversion to f32 round correctly.
    let sticky = u64::from(root * root != square);
    let half_exponent = (exponent - shift) / 2;
    (root << 1 | sticky) as f32 * f32::from_bits(((half_exponent - 1 + 127) as u32) << 23)
}
