//! The contracts of ExpCast-FP8: which byte is written, how far it is from the exact weight, and where
//! the two encoders differ.

mod common;

use common::{Noise, f16_fma_exact, f16_of_fixed_point, finite_f16, fixed_point};
use half::f16;
use kernels_gpu::formats::e4m3;
use kernels_gpu::numerics::expcast::{
    MAX_CODE, PACKED_BETA, PAPER_BETA, UNDERFLOW_UNITS, code, code_from_units, exp_then_cast, packed_bias,
    packed_code, packed_value, pinned_code, pinned_value, quadratic_bias, quadratic_code,
    quadratic_reference, quadratic_value, value_from_units,
};
use proptest::prelude::*;

/// Largest total variation of a row under the quadratic encoder without underflow, maxima below 1024 code units.
const QUADRATIC_BOUND: f64 = 0.0306;

/// Total variation under the pinned encoder: beta, and between what the bound lies.
const PINNED_BOUNDS: [(f32, f64, f64); 3] =
    [(-0.5625, 0.0374, 0.0376), (-0.75, 0.0376, 0.0379), (-1.0, 0.0384, 0.0387)];

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

/// The bound on a row's total variation over every binary16 score within 111 code units of a max (one short of
/// [`UNDERFLOW_UNITS`], which the rounding of an addend may move), the worst over every 67th max below `largest`.
fn worst_bound(largest: f32, value: impl Fn(f32, f32) -> f32) -> f64 {
    let all: Vec<f32> = finite_f16().collect();
    let mut worst = 0f64;
    for &m in all.iter().filter(|m| m.abs() < largest).step_by(67) {
        let (mut low, mut high) = (f64::INFINITY, 0f64);
        for &s in all.iter().filter(|&&s| s <= m && s - m >= UNDERFLOW_UNITS + 1.0) {
            let ratio = f64::from(value(s, m)) / (f64::from(s - m) / 8.0 + 8.0).exp2();
            (low, high) = (low.min(ratio), high.max(ratio));
        }
        worst = worst.max(variation_bound(low, high));
    }
    worst
}

/// The five instructions of the quadratic encoder in exact arithmetic.
fn quadratic_oracle(s: f32, m: f32) -> u8 {
    let unit = 2f32.powi(-24);
    let n = f16_fma_exact(-724.0 * unit, m, -3360.0 * unit);
    let x = f16_fma_exact(s, 724.0 * unit, n);
    let r = f16_fma_exact(x, 1448.0 * 2f32.powi(-23), -2.0 * unit);
    let e = f16_fma_exact(r, -5792.0, x);
    let z = f16_fma_exact(r, 8.0, 132.0 * unit);
    // Bits of a subnormal are its multiple of 2^-24.
    f16::from_f32(f16_fma_exact(e, e, z).clamp(0.0, 1.0)).to_bits() as u8
}

#[test]
fn quadratic_encoder_equals_exact_arithmetic_for_every_max() {
    let mut noise = Noise::new(7);
    for m in finite_f16().filter(|m| m.abs() < 1024.0) {
        let n = quadratic_bias(m, 0.0);
        for s in scores_below(m, &mut noise, 24, 140.0).chain([m]) {
            let byte = quadratic_code(s, n);
            assert_eq!(byte, quadratic_oracle(s, m), "s = {s}, m = {m}");
            assert_eq!(quadratic_value(s, n).to_bits(), e4m3::decode(byte).to_bits());
        }
    }
}

#[test]
fn quadratic_encoder_puts_small_row_maxima_on_120() {
    for m in finite_f16().filter(|m| m.abs() < 256.0) {
        assert_eq!(quadratic_code(m, quadratic_bias(m, 0.0)), MAX_CODE, "m = {m}");
    }
    // Beyond, the addend's rounding is a good part of a code; the whole row moves with it, and the reference says so.
    for m in finite_f16().filter(|m| m.abs() < 1024.0) {
        let n = quadratic_bias(m, 0.0);
        let (byte, reference) = (quadratic_code(m, n), quadratic_reference(n, 0.0));
        assert!((MAX_CODE - 1..=MAX_CODE).contains(&byte), "m = {m}: {byte}");
        assert!((reference - m).abs() <= 0.36, "m = {m}: {reference}");
        let ratio = f64::from(quadratic_value(m, n)) / (f64::from(m - reference) / 8.0 + 8.0).exp2();
        assert!((0.94..1.07).contains(&ratio), "m = {m}: {ratio}");
    }
}

#[test]
fn quadratic_codes_rise_with_the_score() {
    let mut scores: Vec<f32> = finite_f16().collect();
    scores.sort_by(f32::total_cmp);
    for m in [-500.0, -100.0, -3.75, 0.0, 0.1, 7.5, 63.0, 400.0, 900.0].map(|m| f16::from_f32(m).to_f32()) {
        let n = quadratic_bias(m, 0.0);
        let codes: Vec<u8> = scores.iter().take_while(|&&s| s <= m).map(|&s| quadratic_code(s, n)).collect();
        assert!(codes.is_sorted(), "m = {m}");
        assert_eq!(codes[0], 0);
    }
}

/// The parabola is the chord's better: exp-then-cast has 2.943%, ExpCast 3.637%.
#[test]
fn quadratic_rows_stay_near_the_bound_of_exp_then_cast() {
    let bound = |largest| worst_bound(largest, |s, m| quadratic_value(s, quadratic_bias(m, 0.0)));
    let (small, large) = (bound(64.0), bound(1024.0));
    assert!((0.0294..QUADRATIC_BOUND).contains(&small), "{small}");
    assert!((0.0294..QUADRATIC_BOUND).contains(&large), "{large}");
}

#[test]
fn quadratic_codes_are_mostly_those_of_exp_then_cast() {
    let (n, mut same, mut total, mut ratio) = (quadratic_bias(0.0, 0.0), 0u32, 0u32, 0.0);
    for u in octave().map(|u| f16::from_f64(8.0 * u).to_f32() / 8.0) {
        let (ours, theirs) = (quadratic_code(8.0 * u, n), exp_then_cast_f64(f64::from(u)));
        assert!(ours.abs_diff(theirs) <= 1, "u = {u}: {ours} and {theirs}");
        (same, total) = (same + u32::from(ours == theirs), total + 1);
        ratio += f64::from(e4m3::decode(ours)) / f64::from(u + 8.0).exp2();
    }
    let (share, mean) = (f64::from(same) / f64::from(total), ratio / f64::from(total));
    assert!((share - 0.929).abs() < 0.01, "{share}");
    assert!((mean - 1.0).abs() < 1e-3, "the mean weight is right: {mean}");
}

#[test]
fn pinned_encoder_keeps_every_row_maximum_on_120() {
    for m in finite_f16() {
        for beta in [-1.0, -0.5625, -0.5, 0.0, 0.4375] {
            assert_eq!(pinned_code(m, m, beta), MAX_CODE, "m = {m}, beta {beta}");
        }
    }
}

#[test]
fn pinned_encoder_is_its_definition_and_beta_is_whole_below_the_first_code() {
    let mut noise = Noise::new(8);
    for m in finite_f16().filter(|m| m.abs() < 1024.0) {
        for beta in [-1.0, -0.5625, PACKED_BETA, 0.25] {
            for s in scores_below(m, &mut noise, 12, 140.0) {
                let x = f16_of_fixed_point(fixed_point(s) - fixed_point(m));
                let y = f16_fma_exact((-x).clamp(0.0, 1.0), beta, x);
                let byte = (120.0 + f64::from(y)).round_ties_even().clamp(0.0, 120.0) as u8;
                assert_eq!(pinned_code(s, m, beta), byte, "s = {s}, m = {m}, beta {beta}");
                assert_eq!(pinned_value(s, m, beta).to_bits(), e4m3::decode(byte).to_bits());
                let plain = code_from_units(x, beta);
                assert!(x > -1.0 || plain.abs_diff(byte) <= 1, "s = {s}, m = {m}: {plain} and {byte}");
            }
        }
    }
}

/// Below the first code the bound is that of the plain encoder at the same beta, and the max, exact by
/// construction, lies inside it as long as what beta adds elsewhere does not leave the max outside.
#[test]
fn pinned_rows_keep_the_bound_of_expcast_while_beta_is_small() {
    for (beta, low, high) in PINNED_BOUNDS {
        let bound = worst_bound(64.0, |s, m| pinned_value(s, m, beta));
        assert!((low..high).contains(&bound), "beta {beta}: {bound}");
    }
}

#[test]
fn the_packed_encoders_write_zero_for_masked_and_missing_scores() {
    for m in [-900.0, 0.0, 3.5, 900.0] {
        let n = quadratic_bias(m, 0.0);
        for s in [f32::NEG_INFINITY, f32::NAN, -65504.0] {
            assert_eq!((quadratic_code(s, n), pinned_code(s, m, -0.5)), (0, 0), "s = {s}, m = {m}");
            assert_eq!(quadratic_value(s, n).to_bits(), 0);
            assert_eq!(pinned_value(s, m, -0.5).to_bits(), 0);
        }
    }
}

/// The instructions themselves, as a kernel would issue them, on the host.
#[cfg(feature = "emulation")]
#[test]
fn the_instructions_write_the_bytes_of_the_twins() {
    use kernels_gpu::ptx::f16x2::{add, fma, fma_sat, splat};
    let half = |x: f32| splat(f16::from_f32(x).to_bits());
    let (unit, mut noise) = (2f32.powi(-24), Noise::new(9));
    for m in finite_f16().filter(|m| m.abs() < 1024.0).step_by(3) {
        let scores: Vec<f32> =
            scores_below(m, &mut noise, 15, 140.0).chain([m, f32::NEG_INFINITY, -65504.0]).collect();
        for pair in scores.windows(2) {
            let [a, b] = [pair[0], pair[1]];
            let s = u32::from(f16::from_f32(a).to_bits()) | u32::from(f16::from_f32(b).to_bits()) << 16;
            let bytes = |y: u32| (y as u8, (y >> 16) as u8);

            let n = fma(half(-724.0 * unit), half(m), half(-3360.0 * unit));
            let x = fma(s, half(724.0 * unit), n);
            let r = fma(x, half(1448.0 * 2f32.powi(-23)), half(-2.0 * unit));
            let e = fma(r, half(-5792.0), x);
            let y = fma_sat(e, e, fma(r, half(8.0), half(132.0 * unit)));
            let n = quadratic_bias(m, 0.0);
            assert_eq!(bytes(y), (quadratic_code(a, n), quadratic_code(b, n)), "{a} and {b} under {m}");

            let x = add(s, half(-m));
            let y = fma(fma_sat(x, half(-1.0), half(0.0)), half(-0.5625), x);
            let y = fma_sat(y, half(unit), half(120.0 * unit));
            assert_eq!(
                bytes(y),
                (pinned_code(a, m, -0.5625), pinned_code(b, m, -0.5625)),
                "{a} and {b} under {m}"
            );
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn no_quadratic_row_without_underflow_exceeds_its_bound(
        row in prop::collection::vec(-14f32..=0.0, 1..200), spread in 0f32..=1.0, m in -60f32..=60.0,
    ) {
        let m = f16::from_f32(m).to_f32();
        let n = quadratic_bias(m, 0.0);
        let scores = row.iter().map(|u| f16::from_f32(8.0 * u * spread + m).to_f32()).chain([m]);
        let scores: Vec<f32> = scores.filter(|s| (UNDERFLOW_UNITS..=0.0).contains(&(s - m))).collect();
        let exact: Vec<f64> = scores.iter().map(|s| (f64::from(s - m) / 8.0).exp2()).collect();
        let cast: Vec<f64> = scores.iter().map(|&s| f64::from(quadratic_value(s, n))).collect();
        let (exact_sum, cast_sum) = (exact.iter().sum::<f64>(), cast.iter().sum::<f64>());
        let tv = exact.iter().zip(&cast).map(|(e, c)| (e / exact_sum - c / cast_sum).abs()).sum::<f64>() / 2.0;
        prop_assert!(tv <= QUADRATIC_BOUND, "{}", tv);
    }
}
