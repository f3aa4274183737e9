//! Symmetric INT8: `x` becomes `rne(x / s)` in -127..=127 with `s = amax / 127` for its group.
//!
//! The division is a true IEEE division, not a product with a reciprocal, on CPU and GPU alike: the two
//! differ by one code now and then, and one of them had to be chosen. A group of zeros has `s = 0` and
//! decodes to 0. Neither NaN nor infinities have a code: a tensor that holds one must be found before
//! (the contract "not finite"); here NaN becomes 0.

/// Largest code; -128 is not used.
pub const MAX: f32 = 127.0;

/// `1.5 * 2^23`: adding and subtracting it rounds a magnitude below `2^22` to an integer, ties to even.
const ROUND_TO_INTEGER: f32 = 12_582_912.0;

/// The scale of a group whose largest magnitude is `amax`: `amax / 127`, 0 for a group of zeros.
#[inline(always)]
pub fn scale(amax: f32) -> f32 {
    amax / MAX
}

/// The code of `x` under `scale` (not negative): `rne(x / scale)` clamped to ±127, 0 if `scale` is 0.
#[inline(always)]
pub fn encode(x: f32, scale: f32) -> i8 {
    round_code(x, scale) as i8
}

/// [`encode`] as an `f32` (never -0), branch-free: the code for emulation on the CPU.
#[inline(always)]
pub fn round_code(x: f32, scale: f32) -> f32 {
    let quotient = x / scale;
    let bounded = if quotient < MAX { quotient } else { MAX };
    let bounded = if bounded > -MAX { bounded } else { -MAX };
    let code = (bounded + ROUND_TO_INTEGER) - ROUND_TO_INTEGER;
    // `x / 0` is infinite or NaN and a NaN ended at 127: both are 0 instead.
    let code = if quotient.is_nan() { 0.0 } else { code };
    if scale > 0.0 { code } else { 0.0 }
}

/// The value of a code: `code * scale`.
#[inline(always)]
pub fn decode(code: i8, scale: f32) -> f32 {
    f32::from(code) * scale
}
