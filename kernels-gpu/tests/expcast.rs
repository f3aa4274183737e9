//! The contracts of ExpCast-FP8: which byte is written, how far it is from the exact weight, and where
//! the two encoders differ.

mod common;

use common::{Noise, f16_of_fixed_point, finite_f16, fixed_point};
use half::f16;
use kernels_gpu::formats::e4m3;
use kernels_gpu::numerics::expcast::{
    MAX_CODE, PACKED_BETA, PAPER_BETA, UNDERFLOW_UNITS, code, code_from_units, exp_then_cast, packed_bias,
    packed_code, packed_value, value_from_units,
};
use proptest::prelude::*;

/// `c(u)` from its definition: the sum in one rounding to f32, then the standard library's rounding.
fn code_oracle(t: f32, beta: f32) -> u8 {
    let sum = (f64::from(t) + f64::from(120.0 + beta)) as f32;
    sum.round_ties_even().clamp(0.0, 120.0) as u8
}

/// The byte of the conventional path, its exponential in f64.
fn exp_then_cast_f64(u: f64) -> u8 {
    e4m3::encode(((u + 8.0).exp2()) as f32)
}

/// One octave of scores `u`, evenly spaced.
fn octave() -> impl Iterator<Item = f64> {
    const STEPS: u32 = 1 << 20;
    (0..STEPS).map(|i| -2.0 - (f64::from(i) + 0.5) / f64::from(STEPS))
}

/// The smallest, largest and mean ratio of decoded to exact weight over an octave.
fn ratios(beta: f32) -> (f64, f64, f64) {
    let (mut low, mut high, mut sum, mut count) = (f64::INFINITY, 0f64, 0.0, 0.0);
    for u in octave() {
        let decoded = f64::from(e4m3::decode(code(u as f32, beta)));
        let ratio = decoded / (u + 8.0).exp2();
        (low, high) = (low.min(ratio), high.max(ratio));
        (sum, count) = (sum + ratio, count + 1.0);
    }
    (low, high, sum / count)
}

/// The bound on a row's total variation if every weight is off by a factor in `[low, high]`.
fn variation_bound(low: f64, high: f64) -> f64 {
    (high.sqrt() - low.sqrt()) / (high.sqrt() + low.sqrt())
}

/// The total variation between exact softmax and ExpCast of a row of scores in octaves below its max.
fn variation(row: &[f32], beta: f32) -> f64 {
    let exact: Vec<f64> = row.iter().map(|&u| f64::from(u).exp2()).collect();
    let cast: Vec<f64> = row.iter().map(|&u| f64::from(value_from_units(8.0 * u, beta))).collect();
    let (exact_sum, cast_sum) = (exact.iter().sum::<f64>(), cast.iter().sum::<f64>());
    exact.iter().zip(&cast).map(|(e, c)| (e / exact_sum - c / cast_sum).abs()).sum::<f64>() / 2.0
}

#[test]
fn worked_example_of_the_paper() {
    assert_eq!(code(-1.6, PAPER_BETA), 107);
    assert_eq!(exp_then_cast(-1.6), 107);
    assert_eq!(e4m3::decode(107), 88.0);
}

#[test]
fn the_row_maximum_decodes_to_256() {
    assert_eq!(code(0.0, PAPER_BETA), MAX_CODE);
    assert_eq!(value_from_units(0.0, PAPER_BETA), 256.0);
    assert_eq!(e4m3::decode(MAX_CODE), 256.0);
}

#[test]
fn every_code_boundary_is_the_definitions() {
    for beta in [PAPER_BETA, PACKED_BETA, -0.5] {
        let mut met = [false; 121];
        for k in 0..120u8 {
            // Steps below the spacing of the sum, so that every way it can round is met.
            let boundary = f64::from(k) + 0.5 - f64::from(120.0 + beta);
            let near = |step: i32| (boundary + f64::from(step) * 2f64.powi(-20)) as f32;
            for t in (-100..=100).map(near) {
                let (units, octaves) = (code_from_units(t, beta), code(t / 8.0, beta));
                assert_eq!(units, code_oracle(t, beta), "t = {t} around code {k}");
                assert_eq!(octaves, units, "an exact factor of 8 changes nothing");
                assert_eq!(octaves, 8f32.mul_add(t / 8.0, 120.0 + beta).round_ties_even().min(120.0) as u8);
                met[usize::from(units)] = true;
            }
            let (below, above) = (code_from_units(near(-100), beta), code_from_units(near(100), beta));
            assert_eq!((below, above), (k, k + 1), "the boundary is where it should be");
        }
        assert!(met.iter().all(|&m| m));
    }
}

#[test]
fn f32_encoder_equals_its_definition_and_value_its_decoding() {
    let mut t = -140.0f32;
    while t < 8.0 {
        for beta in [PAPER_BETA, PACKED_BETA, -0.5] {
            let byte = code_from_units(t, beta);
            assert_eq!(byte, code_oracle(t, beta), "t = {t}");
            assert_eq!(value_from_units(t, beta).to_bits(), e4m3::decode(byte).to_bits());
        }
        t += 1.0 / 4096.0;
    }
}

#[test]
fn scores_off_the_scale_clip() {
    for t in [-1e9, f32::NEG_INFINITY, -f32::MAX, f32::NAN] {
        assert_eq!(code_from_units(t, PAPER_BETA), 0);
        assert_eq!(value_from_units(t, PAPER_BETA).to_bits(), 0);
    }
    for t in [1.0, 1e9, f32::INFINITY] {
        assert_eq!(code_from_units(t, PAPER_BETA), MAX_CODE);
    }
}

#[test]
fn agreement_with_exp_then_cast_over_an_octave() {
    for (beta, expected) in [(PAPER_BETA, 0.7961), (-0.5, 0.833)] {
        let (mut same, mut total) = (0u32, 0u32);
        for u in octave() {
            let (ours, theirs) = (code(u as f32, beta), exp_then_cast_f64(u));
            assert!(ours.abs_diff(theirs) <= 1, "u = {u}: {ours} and {theirs}");
            (same, total) = (same + u32::from(ours == theirs), total + 1);
        }
        let share = f64::from(same) / f64::from(total);
        assert!((share - expected).abs() < 1e-3, "beta {beta}: {share}");
    }
}

#[test]
fn exp_then_cast_rounds_the_exact_exponential() {
    // Our exp2 may fall on the other side of a halfway point only where it is within its error of one.
    let differing = octave().filter(|&u| exp_then_cast(u as f32) != exp_then_cast_f64(f64::from(u as f32)));
    assert!(differing.count() <= 2);
    assert_eq!(exp_then_cast(0.0), MAX_CODE);
    assert_eq!(exp_then_cast(-17.9), 1, "kept where ExpCast writes 0");
    assert_eq!(exp_then_cast(-18.1), 0);
}

#[test]
fn decoded_weights_stay_near_the_exact_ones() {
    let (low, high, mean) = ratios(PAPER_BETA);
    assert!((low - 0.9290).abs() < 1e-4 && (high - 1.0745).abs() < 1e-4, "[{low}, {high}]");
    assert!((variation_bound(low, high) - 0.03637).abs() < 1e-5);
    // The bias that the LSE inherits.
    assert!((mean - 1.009).abs() < 1e-3, "{mean}");
    // A smaller beta shifts the weights and leaves the bound, which knows ratios only.
    for beta in [PACKED_BETA, -0.5] {
        let (low, high, _) = ratios(beta);
        assert!((variation_bound(low, high) - 0.03637).abs() < 5e-5, "beta {beta}: [{low}, {high}]");
    }
    assert!((ratios(-0.5).2 - 0.996).abs() < 1e-3);
}

#[test]
fn underflow_begins_where_the_contract_says() {
    // u = -14 is the last byte of a normal number; below it bytes 1 to 7 stand for too little.
    assert!(code(UNDERFLOW_UNITS / 8.0, PAPER_BETA) >= 8);
    let mut least = f64::INFINITY;
    for i in 0..890 {
        let u = -14.0 - f64::from(i) / 1000.0;
        let ratio = f64::from(e4m3::decode(code(u as f32, PAPER_BETA))) / (u + 8.0).exp2();
        least = least.min(ratio);
    }
    assert!((least - 0.22).abs() < 0.01, "{least}");
    assert_eq!(code(-14.893, PAPER_BETA), 1);
    assert_eq!(code(-14.895, PAPER_BETA), 0);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn no_row_without_underflow_exceeds_the_bound(
        row in prop::collection::vec(-14f32..=0.0, 1..200), spread in 0f32..=1.0, beta in -0.5f32..=-0.35,
    ) {
        let mut row: Vec<f32> = row.iter().map(|u| u * spread).collect();
        row.push(0.0);
        let tv = variation(&row, beta);
        prop_assert!(tv <= 0.0364, "{}", tv);
    }
}

#[test]
fn the_bound_is_tight() {
    // Many entries at the score that gains most and as much mass at the one that loses most.
    let ratio = |u: f32| f64::from(value_from_units(8.0 * u, PAPER_BETA)) / f64::from(u + 8.0).exp2();
    let by = |a: &f32, b: &f32| ratio(*a).total_cmp(&ratio(*b));
    let scores: Vec<f32> = octave().step_by(16).map(|u| u as f32).collect();
    let gains = scores.iter().copied().max_by(by).unwrap();
    let loses = scores.iter().copied().min_by(by).unwrap();
    let worst = (1..400)
        .map(|n| {
            let mut row = vec![gains; n];
            row.resize(400, loses);
            variation(&row, PAPER_BETA)
        })
        .fold(0.0, f64::max);
    assert!((0.0363..0.0364).contains(&worst), "{worst}");
}

/// The packed encoder in exact integer arithmetic: each binary16 addition rounded once, and the byte
/// read off the bits.
fn packed_oracle(s: f32, m: f32, beta: f32) -> u8 {
    let n = f16_of_fixed_point(fixed_point(beta) - fixed_point(m));
    let x = f16_of_fixed_point(fixed_point(s) + fixed_point(n));
    let y = f16_of_fixed_point(fixed_point(x) + fixed_point(1144.0));
    f16::from_f32(y.max(1024.0)).to_bits() as u8
}

/// Scores `s <= m` in binary16, from the max down past the underflow, for one row.
fn scores_below(m: f32, noise: &mut Noise, count: usize, range: f64) -> impl Iterator<Item = f32> {
    (0..count)
        .map(move |_| f16::from_f64(f64::from(m) - noise.uniform() * range).to_f32())
        .filter(move |&s| s <= m && s.is_finite())
}

#[test]
fn packed_encoder_equals_exact_arithmetic_for_every_max() {
    let mut noise = Noise::new(2);
    for m in finite_f16() {
        for beta in [PACKED_BETA, -0.5] {
            // The subtraction overflows at the very end of the range, far beyond the contract's.
            let n = packed_bias(m, beta);
            assert_eq!(n, f16_of_fixed_point(fixed_point(beta) - fixed_point(m)));
            for s in scores_below(m, &mut noise, 24, 140.0).chain([m]) {
                let byte = packed_code(s, n);
                assert_eq!(byte, packed_oracle(s, m, beta), "s = {s}, m = {m}");
                assert!(byte <= MAX_CODE, "s = {s}, m = {m} wrote {byte}");
                assert_eq!(packed_value(s, n).to_bits(), e4m3::decode(byte).to_bits());
            }
        }
    }
}

#[test]
fn packed_encoder_puts_every_row_maximum_in_range_on_120() {
    let in_range: Vec<f32> = finite_f16().filter(|m| m.abs() < 1024.0).collect();
    assert_eq!(in_range.len(), 2 * 0x6400, "all of them");
    for m in in_range {
        assert_eq!(packed_code(m, packed_bias(m, PACKED_BETA)), MAX_CODE, "m = {m}");
    }
}

#[test]
fn beta_of_minus_one_half_loses_row_maxima() {
    let small: Vec<f32> = finite_f16().filter(|m| m.abs() < 64.0).collect();
    let lost = small.iter().filter(|&&m| packed_code(m, packed_bias(m, -0.5)) == MAX_CODE - 1).count();
    let share = lost as f64 / small.len() as f64;
    assert!((share - 0.012).abs() < 5e-4, "{share}");
}

/// A row has one bias, so whatever binary16 leaves of beta scales all its weights alike; only the
/// rounding of `s + n` (to 1/16 code at most) widens the bound on the total variation a little.
#[test]
fn packed_rows_stay_near_the_bound_for_every_size_of_the_maximum() {
    let all: Vec<f32> = finite_f16().collect();
    let mut worst = 0f64;
    for &m in all.iter().filter(|m| m.abs() < 1024.0).step_by(67) {
        let n = packed_bias(m, PACKED_BETA);
        let (mut low, mut high) = (f64::INFINITY, 0f64);
        for &s in all.iter().filter(|&&s| s <= m && s - m >= UNDERFLOW_UNITS) {
            let ratio = f64::from(packed_value(s, n)) / (f64::from(s - m) / 8.0 + 8.0).exp2();
            (low, high) = (low.min(ratio), high.max(ratio));
        }
        worst = worst.max(variation_bound(low, high));
    }
    assert!((0.0370..0.0380).contains(&worst), "{worst}");
}

#[test]
fn packed_encoder_writes_zero_for_masked_and_missing_scores() {
    for m in [-900.0, 0.0, 3.5, 900.0] {
        let n = packed_bias(m, PACKED_BETA);
        for s in [f32::NEG_INFINITY, f32::NAN, -65504.0] {
            assert_eq!(packed_code(s, n), 0);
            assert_eq!(packed_value(s, n).to_bits(), 0);
        }
    }
}

#[test]
fn encoders_never_differ_by_more_than_one_code() {
    let mut noise = Noise::new(4);
    for m in finite_f16().filter(|m| m.abs() < 1024.0) {
        let n = packed_bias(m, PACKED_BETA);
        for s in scores_below(m, &mut noise, 50, 128.0) {
            let (packed, full) = (packed_code(s, n), code_from_units(s - m, PACKED_BETA));
            assert!(packed.abs_diff(full) <= 1, "s = {s}, m = {m}: {packed} and {full}");
        }
    }
}

/// For maxima spread evenly and scores within four octaves, where a row's weight lies: the bias loses
/// its fraction as the max grows, and the packed encoder's beta is what binary16 leaves of it.
#[test]
fn encoders_differ_more_often_for_large_maxima() {
    let mut noise = Noise::new(3);
    for (from, to, share) in
        [(0., 64., 0.0113), (64., 256., 0.050), (256., 512., 0.123), (512., 1024., 0.248)]
    {
        let (mut differ, mut total) = (0u32, 0u32);
        for i in 0..20_000 {
            let m = from + (to - from) * f64::from(i) / 20_000.0;
            let m = f16::from_f64(if i % 2 == 0 { m } else { -m }).to_f32();
            let n = packed_bias(m, PACKED_BETA);
            for s in scores_below(m, &mut noise, 50, 32.0) {
                differ += u32::from(packed_code(s, n) != code_from_units(s - m, PACKED_BETA));
                total += 1;
            }
        }
        let measured = f64::from(differ) / f64::from(total);
        assert!((measured - share).abs() < 0.05 * share, "|m| in [{from}, {to}): {measured}");
    }
}
