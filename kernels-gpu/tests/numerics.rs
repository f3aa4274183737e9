//! The contracts of exp2, the Hadamard rotation, RoPE, means and code units.

mod common;

use approx::{assert_abs_diff_eq, assert_relative_eq};
use common::{Noise, for_every_magnitude, sample_f32};
use kernels_gpu::numerics::exp2::exp2;
use kernels_gpu::numerics::{hadamard, mean, rope, units};

/// The distance of `y` from the exact `2^x` in units of the last place of the exact value.
fn exp2_error(x: f32) -> f64 {
    let exact = f64::from(x).exp2();
    let ulp = 2f64.powi(exact.log2().floor() as i32 - 23);
    (f64::from(exp2(x)) - exact).abs() / ulp
}

/// The error that the documentation of `exp2` states.
const EXP2_ULP: f64 = 1.3;

#[test]
fn exp2_is_within_its_stated_error() {
    let mut worst = (0.0, 0.0);
    let grid = (0..=126 << 14).map(|i| -(i as f32) / 16384.0);
    let sampled = sample_f32().map(|x| -x.abs()).filter(|&x| x >= -126.0);
    for x in grid.chain(sampled) {
        let error = exp2_error(x);
        if error > worst.0 {
            worst = (error, x);
        }
    }
    assert!(worst.0 <= EXP2_ULP, "{worst:?}");
    assert!(worst.0 > 0.5, "a polynomial in f32 is not correctly rounded: is this test alive? {worst:?}");
}

#[test]
#[ignore = "every float in [-126, 0]: under a minute in release on 2 cores; CI runs it by name"]
fn exp2_is_within_its_stated_error_on_its_whole_domain() {
    for_every_magnitude(|x| {
        if x <= 126.0 {
            let error = exp2_error(-x);
            assert!(error <= EXP2_ULP, "{error} ulp at -{x:e}");
        }
    });
}

#[test]
fn exp2_is_exact_on_integers_and_flushes_below() {
    for n in -126..=127 {
        assert_eq!(exp2(n as f32), 2f32.powi(n));
    }
    assert_eq!(exp2(-0.0), 1.0);
    for x in [(-126f32).next_down(), -127.0, -150.0, -1e30, f32::NEG_INFINITY] {
        assert_eq!(exp2(x).to_bits(), 0, "{x}");
    }
    assert!(exp2(f32::NAN).is_nan());
}

fn row(seed: u64, len: usize) -> Vec<f32> {
    let mut noise = Noise::new(seed);
    (0..len).map(|_| noise.normal()).collect()
}

fn energy(x: &[f32]) -> f64 {
    x.iter().map(|&x| f64::from(x).powi(2)).sum()
}

const HADAMARD_LENGTHS: [usize; 8] = [2, 4, 8, 16, 32, 64, 128, 256];

#[test]
fn hadamard_equals_its_matrix() {
    for n in HADAMARD_LENGTHS {
        let x = row(n as u64, n);
        let mut fast = x.clone();
        hadamard::rotate(&mut fast);
        for (i, &y) in fast.iter().enumerate() {
            let sign = |j: usize| if (i & j).count_ones().is_multiple_of(2) { 1.0 } else { -1.0 };
            let exact: f64 = (0..n).map(|j| sign(j) * f64::from(x[j])).sum::<f64>() / (n as f64).sqrt();
            assert_abs_diff_eq!(f64::from(y), exact, epsilon = 2e-6);
        }
    }
}

#[test]
fn hadamard_is_orthonormal_and_its_own_inverse() {
    for n in HADAMARD_LENGTHS {
        // The images of the unit vectors: the columns of the matrix.
        let columns: Vec<Vec<f32>> = (0..n)
            .map(|j| {
                let mut unit = vec![0.0; n];
                unit[j] = 1.0;
                hadamard::rotate(&mut unit);
                unit
            })
            .collect();
        for (i, a) in columns.iter().enumerate() {
            for (j, b) in columns.iter().enumerate() {
                let dot: f64 = a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum();
                let expected = if i == j { 1.0 } else { 0.0 };
                assert_abs_diff_eq!(dot, expected, epsilon = 2e-7);
            }
        }
        let x = row(7, n);
        let mut twice = x.clone();
        hadamard::rotate(&mut twice);
        assert_relative_eq!(energy(&twice), energy(&x), max_relative = 1e-6);
        hadamard::rotate(&mut twice);
        for (a, b) in x.iter().zip(&twice) {
            assert_abs_diff_eq!(a, b, epsilon = 2e-6);
        }
    }
}

#[test]
fn hadamard_adds_in_the_documented_order() {
    for n in HADAMARD_LENGTHS {
        let mut expected = row(11, n);
        let mut fast = expected.clone();
        let mut stride = 1;
        while stride < n {
            for i in (0..n).filter(|i| i & stride == 0) {
                let (a, b) = (expected[i], expected[i + stride]);
                (expected[i], expected[i + stride]) = (a + b, a - b);
            }
            stride *= 2;
        }
        let norm = (1.0 / (n as f64).sqrt()) as f32;
        assert_eq!(hadamard::norm(n), norm);
        hadamard::rotate(&mut fast);
        for (a, b) in expected.iter().zip(&fast) {
            assert_eq!((a * norm).to_bits(), b.to_bits(), "n = {n}");
        }
    }
}

#[test]
fn hadamard_says_which_lengths_it_takes() {
    let supported: Vec<usize> = (0..1000).filter(|&n| hadamard::is_supported(n)).collect();
    assert_eq!(supported, HADAMARD_LENGTHS);
}

#[test]
#[should_panic(expected = "power of two")]
fn hadamard_refuses_other_lengths() {
    hadamard::rotate(&mut [0.0; 80]);
}

/// Tables for one position: pair `i` turns by `position / 10000^(2i / dim)`.
fn rope_tables(position: f64, dim: usize) -> (Vec<f32>, Vec<f32>) {
    let angle = |i: usize| position / 10_000f64.powf(2.0 * i as f64 / dim as f64);
    (
        (0..dim / 2).map(|i| angle(i).cos() as f32).collect(),
        (0..dim / 2).map(|i| angle(i).sin() as f32).collect(),
    )
}

fn turned(x: &[f32], position: f64) -> Vec<f32> {
    let (cos, sin) = rope_tables(position, x.len());
    let mut x = x.to_vec();
    rope::apply(&mut x, &cos, &sin);
    x
}

#[test]
fn rope_turns_interleaved_pairs() {
    // A quarter turn of pair 0, none of pair 1.
    let mut x = [1.0, 2.0, 3.0, 4.0];
    rope::apply(&mut x, &[0.0, 1.0], &[1.0, 0.0]);
    assert_eq!(x, [-2.0, 1.0, 3.0, 4.0]);
}

#[test]
fn rope_keeps_norms_and_turns_back() {
    let x = row(5, 128);
    for position in [0.0, 1.0, 77.0, 75_599.0] {
        let y = turned(&x, position);
        assert_relative_eq!(energy(&y), energy(&x), max_relative = 1e-6);
        for (a, b) in x.iter().zip(turned(&y, -position)) {
            assert_abs_diff_eq!(*a, b, epsilon = 1e-6);
        }
    }
}

#[test]
fn rope_scores_depend_on_relative_position() {
    let (q, k) = (row(1, 128), row(2, 128));
    let score = |m: f64, n: f64| -> f64 {
        turned(&q, m).iter().zip(turned(&k, n)).map(|(&a, b)| f64::from(a) * f64::from(b)).sum()
    };
    let (here, there) = (score(10.0, 3.0), score(1010.0, 1003.0));
    assert_abs_diff_eq!(here, there, epsilon = 1e-4);
    assert!((here - score(10.0, 4.0)).abs() > 1e-2, "another distance is another score");
}

#[test]
#[should_panic(expected = "one cosine and one sine")]
fn rope_refuses_tables_of_another_length() {
    rope::apply(&mut [0.0; 8], &[1.0; 4], &[0.0; 3]);
}

#[test]
fn block_mean_adds_row_after_row_and_ignores_the_tail() {
    for (dim, valid) in [(128, 128), (128, 1), (128, 77), (72, 65), (3, 127)] {
        let mut rows = row(dim as u64, dim * 128);
        rows[valid * dim..].fill(f32::NAN);
        let mut out = vec![f32::NAN; dim];
        mean::block_mean(&rows, dim, valid, &mut out);
        for (c, &mean) in out.iter().enumerate() {
            let sum = (0..valid).fold(0f32, |sum, r| sum + rows[r * dim + c]);
            assert_eq!(mean.to_bits(), (sum / valid as f32).to_bits());
        }
    }
}

#[test]
fn token_mean_adds_blocks_of_128_one_after_the_other() {
    for (dim, valid) in [(128, 1000), (64, 128), (200, 129), (80, 2049), (1, 5)] {
        let mut rows = row(dim as u64, dim * (valid + 9));
        rows[valid * dim..].fill(f32::INFINITY);
        let mut out = vec![f32::NAN; dim];
        mean::token_mean(&rows, dim, valid, &mut out);
        for (c, &mean) in out.iter().enumerate() {
            let mut total = 0f32;
            for first in (0..valid).step_by(128) {
                let last = valid.min(first + 128);
                total += (first..last).fold(0f32, |sum, r| sum + rows[r * dim + c]);
            }
            assert_eq!(mean.to_bits(), (total / valid as f32).to_bits(), "channel {c} of {dim}");
        }
    }
}

#[test]
fn a_mean_of_nothing_is_zero() {
    let mut out = [f32::NAN; 4];
    mean::block_mean(&[], 4, 0, &mut out);
    assert_eq!(out, [0.0; 4]);
    out.fill(f32::NAN);
    mean::token_mean(&[f32::NAN; 8], 4, 0, &mut out);
    assert_eq!(out, [0.0; 4]);
    mean::block_mean(&[], 0, 0, &mut []);
}

#[test]
fn the_mean_takes_exactly_its_own_energy_from_a_block() {
    // |R|^2 = |V|^2 - B |mu|^2 (the paper's equation 5).
    let (dim, valid) = (16, 100);
    let rows: Vec<f32> = row(9, dim * valid).iter().enumerate().map(|(i, x)| x + (i % dim) as f32).collect();
    let mut mu = vec![0.0; dim];
    mean::block_mean(&rows, dim, valid, &mut mu);
    let residual: Vec<f32> = rows.iter().enumerate().map(|(i, x)| x - mu[i % dim]).collect();
    let expected = energy(&rows) - valid as f64 * energy(&mu);
    assert_relative_eq!(energy(&residual), expected, max_relative = 1e-5);
}

fn check_sqrt(x: f32) {
    let (ours, theirs) = (units::sqrt(x), x.sqrt());
    assert!(ours.to_bits() == theirs.to_bits() || ours.is_nan() && theirs.is_nan(), "{x:e}: {ours:e}");
}

#[test]
fn sqrt_is_correctly_rounded_on_a_sample_of_all_floats() {
    sample_f32().for_each(check_sqrt);
    (0..1 << 12).map(f32::from_bits).for_each(check_sqrt);
}

#[test]
#[ignore = "every positive float: under a minute in release on 2 cores; CI runs it by name"]
fn sqrt_is_correctly_rounded_on_every_positive_float() {
    for_every_magnitude(check_sqrt);
}

#[test]
fn code_unit_factors_turn_dot_products_into_code_units() {
    for scale in [1.0 / 128f32.sqrt(), 0.05, 3.0, -0.1] {
        let factor = f64::from(units::code_unit_factor(scale));
        let expected = f64::from(scale.abs()) * 8.0 * std::f64::consts::LOG2_E;
        assert_relative_eq!(factor * factor, expected, max_relative = 1e-6);
    }
    assert_eq!(units::code_unit_factor(0.0), 0.0);
    assert_relative_eq!(units::PER_NAT * units::NATS, 1.0, max_relative = 1e-6);
}
