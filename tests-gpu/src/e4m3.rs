//! E4M3 for packing operands and for the emulation.

/// The byte of `x`: nearest, ties to even, saturating at 448, NaN as 0x7f.
pub fn encode(x: f64) -> u8 {
    if x.is_nan() {
        return 0x7f;
    }
    let sign = if x.is_sign_negative() { 0x80 } else { 0 };
    let a = x.abs().min(448.0);
    let exponent = if a < 2f64.powi(-6) { -6 } else { (a.to_bits() >> 52) as i32 - 1023 };
    // The code counts steps of an eighth of an octave, so a mantissa that rounds up carries into the exponent.
    let steps = (a * 2f64.powi(3 - exponent)).round_ties_even() as i32;
    sign | ((exponent + 6) * 8 + steps).min(0x7e) as u8
}

/// The value of a byte.
pub fn decode(byte: u8) -> f64 {
    let (exponent, mantissa) = ((byte >> 3 & 15) as i32, (byte & 7) as f64);
    let a = match (exponent, byte & 7) {
        (15, 7) => f64::NAN,
        (0, _) => mantissa * 2f64.powi(-9),
        _ => (8.0 + mantissa) * 2f64.powi(exponent - 10),
    };
    if byte & 0x80 == 0 { a } else { -a }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_comes_back_and_midpoints_go_to_even() {
        for byte in (0..=255u8).filter(|b| b & 0x7f != 0x7f) {
            assert_eq!(encode(decode(byte)), byte);
        }
        for byte in 0..0x7eu8 {
            let middle = (decode(byte) + decode(byte + 1)) / 2.0;
            assert_eq!(encode(middle), byte + (byte & 1), "between {byte} and the next");
        }
        assert_eq!((encode(1e9), encode(f64::NAN)), (0x7e, 0x7f));
    }
}
