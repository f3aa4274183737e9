//! `2^x` from additions and multiplications only, so that it is the same everywhere and vectorizes.

/// `1.5 * 2^23`: adding it to a magnitude below `2^22` leaves the nearest integer in the low mantissa.
const ROUND_TO_INTEGER: f32 = 12_582_912.0;

/// Coefficients of `f, f^2, ..` in `2^f - 1` on [-1/2, 1/2]: minimax in relative error (2.6e-9 before
/// rounding to `f32`) with the constant term held at 1, which makes `2^n` exact for integers. Ours, by
/// the Remez exchange.
const COEFFICIENTS: [f32; 6] =
    [0.693_147_24, 0.240_226_52, 0.055_503_104, 0.009_617_693, 0.001_340_664_3, 0.000_155_946_78];

/// `2^x` for `x` up to 127, branch-free; within 1.3 ulp of the exact value, checked on every float in
/// [-126, 0].
///
/// Exact for integers. Below -126, where the result would be subnormal, it is 0 (and so it is for
/// minus infinity); NaN stays NaN. Above 127 the result is not meaningful: softmax weights have
/// `x <= 0`.
#[inline(always)]
pub fn exp2(x: f32) -> f32 {
    let bounded = if x < -126.0 { -126.0 } else { x };
    let shifted = bounded + ROUND_TO_INTEGER;
    let f = bounded - (shifted - ROUND_TO_INTEGER);
    let [c1, c2, c3, c4, c5, c6] = COEFFICIENTS;
    let p = 1.0 + f * (c1 + f * (c2 + f * (c3 + f * (c4 + f * (c5 + f * c6)))));
    // The low bits of `shifted` are the integer part in two's complement; the rest leaves by the shift.
    let power = f32::from_bits((shifted.to_bits() << 23).wrapping_add(127 << 23));
    if x < -126.0 { 0.0 } else { p * power }
}
