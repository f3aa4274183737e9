//! The rounding step that E4M3, E2M1 and binary16 share.
//!
//! A small float with `M` explicit mantissa bits and smallest normal exponent `EMIN` has the spacing
//! `2^(max(e, EMIN) - M)` around a value of exponent `e`. Adding the power of two that is `2^23` such
//! spacings makes the FPU drop exactly the bits below the spacing, to nearest and ties to even, for
//! normals and subnormals alike: no shift by a variable amount, no branch.

/// Bits of +infinity: the exponent field of an `f32`.
pub(super) const EXPONENT: i32 = 0x7F80_0000;
/// Bits of an `f32` without its sign.
pub(super) const MAGNITUDE: i32 = 0x7FFF_FFFF;

/// A magnitude on the grid of the small float: its value, and its code (exponent and mantissa field).
pub(super) struct Snapped {
    /// The rounded magnitude.
    pub(super) value: f32,
    /// The same as the integer `exponent field << M | mantissa field`.
    pub(super) code: i32,
}

/// Rounds the magnitude `a` (finite, not negative, below `2^(104 + M)`) to nearest, ties to even.
///
/// The caller bounds `a` by the largest value of its format, so that the code cannot overflow.
#[inline(always)]
pub(super) fn snap<const M: i32, const EMIN: i32>(a: f32) -> Snapped {
    let smallest_normal = (127 + EMIN) << 23;
    let exponent = a.to_bits() as i32 & EXPONENT;
    let exponent = if exponent > smallest_normal { exponent } else { smallest_normal };
    let spacing_2_23 = f32::from_bits((exponent + ((23 - M) << 23)) as u32);
    let sum = a + spacing_2_23;
    // The mantissa of `sum` now counts spacings; a binade holds 2^M of them, and a carry into the next
    // binade is the next exponent's code by itself.
    let spacings = sum.to_bits() as i32 - spacing_2_23.to_bits() as i32;
    let code = ((exponent - smallest_normal) >> (23 - M)) + spacings;
    Snapped { value: sum - spacing_2_23, code }
}
