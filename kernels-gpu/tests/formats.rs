//! The contracts of the number formats, against tables and exact arithmetic.

mod common;

use common::{
    NearestInTable, Noise, f16_fma_exact, f16_of_fixed_point, finite_f16, fixed_point, for_every_magnitude,
    magnitudes, sample_f32,
};
use half::{bf16, f16};
use kernels_gpu::formats::{e2m1, e4m3, f16 as emulated_f16, int8, nvfp4};
use proptest::prelude::*;

/// E4M3: bias 7, 3 mantissa bits, codes 0..=0x7E are numbers.
fn e4m3_values() -> Vec<f64> {
    magnitudes(7, 3, 0x7F)
}

/// E2M1: bias 1, 1 mantissa bit, all 8 codes are numbers.
fn e2m1_values() -> Vec<f64> {
    magnitudes(1, 1, 8)
}

/// Checks both signs of `x` against a table search, which is done once.
#[track_caller]
fn check_e4m3(table: &NearestInTable, x: f32) {
    let code = if x.is_nan() { 0x7F } else { table.code(x.abs()) };
    for x in [x, -x] {
        let sign = u8::from(x.is_sign_negative() && !x.is_nan()) << 7;
        let byte = e4m3::encode(x);
        assert_eq!(byte, code | sign, "encode({x:e})");
        let (round, decoded) = (e4m3::round(x), e4m3::decode(byte));
        assert_eq!(round.to_bits(), decoded.to_bits(), "round({x:e}) = {round:e}, decode = {decoded:e}");
    }
}

/// As [`check_e4m3`].
#[track_caller]
fn check_e2m1(table: &NearestInTable, x: f32) {
    let code = if x.is_nan() { 0x7 } else { table.code(x.abs()) };
    for x in [x, -x] {
        let sign = u8::from(x.is_sign_negative() && !x.is_nan()) << 3;
        let nibble = e2m1::encode(x);
        assert_eq!(nibble, code | sign, "encode({x:e})");
        let (round, decoded) = (e2m1::round(x), e2m1::decode(nibble));
        assert_eq!(round.to_bits(), decoded.to_bits(), "round({x:e}) = {round:e}, decode = {decoded:e}");
    }
}

/// Checks both signs of `x` against the conversions of `half`.
#[track_caller]
fn check_f16(x: f32) {
    for x in [x, -x] {
        let key = f16::from_f32(bf16::from_f32(x).to_f32()).to_f32();
        for (name, ours, theirs) in [
            ("round", emulated_f16::round(x), f16::from_f32(x).to_f32()),
            ("round_key", emulated_f16::round_key(x), key),
        ] {
            let same = if x.is_nan() { ours.is_nan() } else { ours.to_bits() == theirs.to_bits() };
            assert!(same, "{name}({x:e}) = {ours:e}, half says {theirs:e}");
        }
        assert_eq!(key.is_finite(), bf16::from_f32(x).to_f32().abs() <= emulated_f16::KEY_MAX);
    }
}

#[test]
fn e4m3_decodes_every_byte_to_its_definition_and_back() {
    let values = e4m3_values();
    assert_eq!((values[1], values[8], values[0x7E]), (2f64.powi(-9), 2f64.powi(-6), 448.0));
    for byte in 0..=u8::MAX {
        let value = e4m3::decode(byte);
        if byte & 0x7F == 0x7F {
            assert!(value.is_nan());
            continue;
        }
        let magnitude = values[usize::from(byte & 0x7F)];
        assert_eq!(f64::from(value.abs()), magnitude);
        assert_eq!(value.is_sign_negative(), byte >= 0x80, "byte {byte:#x}");
        assert_eq!(e4m3::decode_magnitude(u32::from(byte & 0x7F)), value.abs());
        assert_eq!(e4m3::encode(value), byte);
        assert_eq!(e4m3::round(value).to_bits(), value.to_bits());
    }
}

#[test]
fn e4m3_special_cases_of_the_conversion_instruction() {
    for (x, byte) in [
        (f32::NAN, 0x7F),
        (-f32::NAN, 0x7F),
        (f32::INFINITY, 0x7E),
        (f32::NEG_INFINITY, 0xFE),
        (0.0, 0x00),
        (-0.0, 0x80),
        (-1e-30, 0x80),
        (464.0, 0x7E),
        (f32::MAX, 0x7E),
        (1.0 / 1024.0, 0x00),
        (1.5 / 1024.0, 0x01),
        (3.0 / 1024.0, 0x02),
        (17.0, 0x58),
        (19.0, 0x5A),
    ] {
        assert_eq!(e4m3::encode(x), byte, "{x:e}");
    }
    assert!(e4m3::round(f32::NAN).is_nan());
}

#[test]
fn e4m3_equals_a_table_search_on_a_sample_of_all_floats() {
    let table = NearestInTable::new(&e4m3_values());
    sample_f32().for_each(|x| check_e4m3(&table, x));
}

#[test]
#[ignore = "all 2^32 floats: under a minute in release on 2 cores; CI runs it by name"]
fn e4m3_equals_a_table_search_on_every_float() {
    let table = NearestInTable::new(&e4m3_values());
    for_every_magnitude(|x| check_e4m3(&table, x));
}

#[test]
fn e2m1_decodes_every_nibble_to_its_definition_and_back() {
    let values = e2m1_values();
    assert_eq!(values, [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]);
    for nibble in 0..16u8 {
        let value = e2m1::decode(nibble);
        assert_eq!(f64::from(value.abs()), values[usize::from(nibble & 7)]);
        assert_eq!(value.is_sign_negative(), nibble >= 8);
        assert_eq!(e2m1::encode(value), nibble);
        assert_eq!(e2m1::decode(nibble | 0xF0).to_bits(), value.to_bits(), "only four bits count");
    }
}

#[test]
fn e2m1_special_cases_of_the_conversion_instruction() {
    for (x, nibble) in [
        (f32::NAN, 0x7),
        (-f32::NAN, 0x7),
        (f32::INFINITY, 0x7),
        (f32::NEG_INFINITY, 0xF),
        (-0.0, 0x8),
        (0.25, 0x0),
        (0.75, 0x2),
        (1.25, 0x2),
        (1.75, 0x4),
        (2.5, 0x4),
        (3.5, 0x6),
        (5.0, 0x6),
        (-5.1, 0xF),
    ] {
        assert_eq!(e2m1::encode(x), nibble, "{x:e}");
    }
}

#[test]
fn e2m1_equals_a_table_search_on_a_sample_of_all_floats() {
    let table = NearestInTable::new(&e2m1_values());
    sample_f32().for_each(|x| check_e2m1(&table, x));
}

#[test]
#[ignore = "all 2^32 floats: under a minute in release on 2 cores; CI runs it by name"]
fn e2m1_equals_a_table_search_on_every_float() {
    let table = NearestInTable::new(&e2m1_values());
    for_every_magnitude(|x| check_e2m1(&table, x));
}

#[test]
fn f16_rounding_is_that_of_half_on_a_sample_of_all_floats() {
    sample_f32().for_each(check_f16);
    // Halfway between neighbours, and one f32 beside it, for every binary16 value.
    for bits in 0..0x7C00u16 {
        let low = f16::from_bits(bits).to_f64();
        let high = if bits == 0x7BFF { 65536.0 } else { f16::from_bits(bits + 1).to_f64() };
        let middle = ((low + high) / 2.0) as f32;
        for x in [middle.next_down(), middle, middle.next_up()] {
            check_f16(x);
        }
    }
}

#[test]
#[ignore = "all 2^32 floats: under a minute in release on 2 cores; CI runs it by name"]
fn f16_rounding_is_that_of_half_on_every_float() {
    for_every_magnitude(check_f16);
}

#[test]
fn a_binary16_sum_is_the_f32_sum_rounded() {
    let mut noise = Noise::new(1);
    let others: Vec<f32> = finite_f16().filter(|_| noise.uniform() < 0.003).collect();
    assert!(others.len() > 100);
    for a in finite_f16() {
        for &b in &others {
            let sum = emulated_f16::round(a + b);
            assert_eq!(sum, f16_of_fixed_point(fixed_point(a) + fixed_point(b)), "{a} + {b}");
        }
    }
}

#[test]
fn int8_rounds_the_quotient_to_even_and_clamps() {
    let s = 0.25;
    for (x, code) in [
        (0.125, 0),
        (0.375, 2),
        (0.625, 2),
        (-0.125, 0),
        (-0.375, -2),
        (31.75, 127),
        (32.0, 127),
        (-40.0, -127),
        (f32::INFINITY, 127),
        (f32::NEG_INFINITY, -127),
        (f32::NAN, 0),
    ] {
        assert_eq!(int8::encode(x, s), code, "{x}");
    }
    assert_eq!(int8::decode(-127, s), -31.75);
}

#[test]
fn int8_group_of_zeros_has_scale_zero_and_decodes_to_zero() {
    let s = int8::scale(0.0);
    assert_eq!(s, 0.0);
    for x in [0.0, -0.0, 1.0, -3.0, f32::NAN, f32::INFINITY] {
        assert_eq!(int8::encode(x, s), 0);
        assert_eq!(int8::round_code(x, s).to_bits(), 0);
        assert_eq!(int8::decode(int8::encode(x, s), s).to_bits(), 0);
    }
    // A maximum so small that its scale underflows is a group of zeros too.
    assert_eq!(int8::scale(1e-44), 0.0);
}

proptest! {
    #[test]
    fn int8_is_the_exact_quotient_rounded(x in -200f32..200.0, amax in 1e-3f32..200.0) {
        let s = int8::scale(amax);
        let code = int8::encode(x, s);
        prop_assert_eq!(code, (x / s).round_ties_even().clamp(-127.0, 127.0) as i8);
        prop_assert_eq!(int8::round_code(x, s).to_bits(), f32::from(code).to_bits());
        if x.abs() <= amax {
            let error = f64::from(int8::decode(code, s) - x).abs();
            prop_assert!(error <= f64::from(s) * 0.50001, "half a step: {} for {}", error, s);
        }
    }

    #[test]
    fn nvfp4_round_is_quantize_then_dequantize(
        block in prop::array::uniform16(-1e3f32..1e3), log_amax in -4f32..12.0,
    ) {
        let ts = nvfp4::tensor_scale(log_amax.exp2());
        let (byte, packed) = nvfp4::quantize_block(&block, ts);
        let back = nvfp4::dequantize_block(byte, &packed, ts);
        let mut rounded = block;
        nvfp4::round_block(&mut rounded, ts);
        prop_assert_eq!(back.map(f32::to_bits), rounded.map(f32::to_bits));
    }

    /// Within one tensor an element is off by at most half the largest E2M1 step (1 in 6 of the
    /// block's maximum), plus what the rounding of the block scale (1 in 16) clips or stretches.
    #[test]
    fn nvfp4_error_is_bounded_by_the_block(
        block in prop::array::uniform16(-1f32..1.0), tensor_amax in 1f32..8.0,
    ) {
        let amax = block.iter().fold(0f32, |a, x| a.max(x.abs()));
        // Blocks below this take subnormal scales, whose relative error is not bounded.
        prop_assume!(amax > tensor_amax * 1e-3);
        let mut rounded = block;
        nvfp4::round_block(&mut rounded, nvfp4::tensor_scale(tensor_amax));
        for (x, y) in block.iter().zip(rounded) {
            prop_assert!((x - y).abs() <= amax * (1.0 / 6.0) * 1.07, "{} became {}", x, y);
        }
    }
}

#[test]
fn nvfp4_scales_put_the_largest_block_on_448_times_6() {
    let amax = 37.5;
    let ts = nvfp4::tensor_scale(amax);
    assert_eq!(ts, 37.5 / 2688.0);
    assert_eq!(e4m3::decode(nvfp4::block_scale(amax, ts)), 448.0);
    let mut block = [0.0; nvfp4::BLOCK];
    (block[3], block[4]) = (amax, -amax / 6.0);
    let (byte, packed) = nvfp4::quantize_block(&block, ts);
    // Element 3 is the high half of byte 1, element 4 the low half of byte 2: 6 and -1.
    assert_eq!((byte, packed), (0x7E, [0, 0x70, 0x0A, 0, 0, 0, 0, 0]));
}

#[test]
fn nvfp4_block_that_would_lose_its_scale_keeps_the_smallest() {
    let ts = nvfp4::tensor_scale(1.0);
    let smallest = 2f32.powi(-9) / 448.0;
    assert_eq!(e4m3::encode(smallest / 6.0 / ts), 1);
    let lost = smallest / 16.0;
    assert_eq!(e4m3::encode(lost / 6.0 / ts), 0);
    assert_eq!(nvfp4::block_scale(lost, ts), 1);
    // Under the smallest scale these are .375 units, and E2M1 has .5.
    let mut block = [lost; nvfp4::BLOCK];
    nvfp4::round_block(&mut block, ts);
    assert!(block.iter().all(|&x| x > 0.0), "{block:?}");
}

#[test]
fn nvfp4_degenerate_blocks_decode_to_zero() {
    let tiny = f32::from_bits(1);
    for (block, ts) in [
        ([0.0; 16], nvfp4::tensor_scale(0.0)),
        ([-0.0; 16], 1.0),
        ([tiny; 16], nvfp4::tensor_scale(tiny)),
        ([1.0; 16], 0.0),
        ([tiny; 16], f32::MIN_POSITIVE / 2.0),
    ] {
        let (byte, packed) = nvfp4::quantize_block(&block, ts);
        let mut rounded = block;
        nvfp4::round_block(&mut rounded, ts);
        for x in nvfp4::dequantize_block(byte, &packed, ts).into_iter().chain(rounded) {
            assert_eq!(x, 0.0, "{block:?} under {ts:e}");
        }
    }
}

#[test]
fn nvfp4_input_that_is_not_finite_does_not_vanish() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut block = [1.0; nvfp4::BLOCK];
        block[7] = bad;
        let ts = nvfp4::tensor_scale(6.0);
        let (byte, packed) = nvfp4::quantize_block(&block, ts);
        assert_eq!(byte, e4m3::NAN);
        nvfp4::round_block(&mut block, ts);
        for x in nvfp4::dequantize_block(byte, &packed, ts).into_iter().chain(block) {
            assert!(x.is_nan());
        }
    }
    assert_eq!(nvfp4::block_scale(1.0, f32::INFINITY), e4m3::NAN);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200_000))]

    #[test]
    fn f16_fma_rounds_once(a in any::<u16>(), b in any::<u16>(), c in any::<u16>()) {
        // Infinities and NaN have all exponent bits set: take one away.
        let finite = |bits: u16| if bits & 0x7c00 == 0x7c00 { bits ^ 0x4000 } else { bits };
        let [a, b, c] = [a, b, c].map(|bits| f16::from_bits(finite(bits)).to_f32());
        prop_assert_eq!(emulated_f16::fma(a, b, c), f16_fma_exact(a, b, c), "{} * {} + {}", a, b, c);
    }

    /// A product a hair off half a step of the addend, which an f32 in between rounds to the half.
    #[test]
    fn f16_fma_rounds_once_near_ties(j in 1i16..12, c in 1024i16..2048, down in any::<bool>()) {
        // (2^10 + j) (2^10 - j) = 2^20 - j^2.
        let (a, b) = (f32::from(1024 + j), f32::from(1024 - j) * 2f32.powi(-21));
        let (a, c) = (if down { -a } else { a }, f32::from(c));
        for (a, c) in [(a, c), (-a, -c)] {
            prop_assert_eq!(emulated_f16::fma(a, b, c), f16_fma_exact(a, b, c), "{} * {} + {}", a, b, c);
        }
    }
}

#[test]
fn f16_fma_knows_infinities_and_nan() {
    let (inf, nan) = (f32::INFINITY, f32::NAN);
    assert_eq!(emulated_f16::fma(-inf, 2.0, 1.0), -inf);
    assert_eq!(emulated_f16::fma(60000.0, 2.0, 0.0), inf);
    for (a, b, c) in [(inf, 1.0, -inf), (inf, 0.0, 1.0), (nan, 1.0, 1.0), (1.0, 1.0, nan)] {
        assert!(emulated_f16::fma(a, b, c).is_nan(), "{a} * {b} + {c}");
    }
}
