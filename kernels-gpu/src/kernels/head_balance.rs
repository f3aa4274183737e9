//! The power of two that brings the queries of a group into the range of E4M3; K carries its inverse.

/// Query rows of a head that the balance looks at: the first.
pub const ROWS: u32 = 128;

/// The balance for a largest |q| of `amax`, in code units.
///
/// 2^(4 - floor(log2 amax)), which brings the largest near 16: E4M3, whose normal range starts at 2^-6, then
/// serves heads of any magnitude. Between 2^-60 and 2^60; 1 where `amax` is zero, subnormal or not finite.
#[inline]
pub fn of_amax(amax: f32) -> f32 {
    if !amax.is_normal() {
        return 1.0;
    }
    let floor_log2 = (amax.to_bits() >> 23 & 0xff) as i32 - 127;
    f32::from_bits(((4 - floor_log2).clamp(-60, 60) + 127) as u32 * (1 << 23))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_lands_between_16_and_32() {
        for amax in [1.0, 1.999, 2.0, 16.0, 31.9, 3.7e-9, 6.1e12] {
            let x = amax * of_amax(amax);
            assert!((16.0..32.0).contains(&x), "{amax} lands on {x}");
        }
    }

    #[test]
    fn extremes_are_clamped_and_the_rest_is_left_alone() {
        assert_eq!(of_amax(1e30), 2f32.powi(-60));
        assert_eq!(of_amax(1e-30), 2f32.powi(60));
        for amax in [0.0, f32::MIN_POSITIVE / 2.0, f32::INFINITY, f32::NAN] {
            assert_eq!(of_amax(amax), 1.0);
        }
    }
}
