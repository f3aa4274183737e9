//! The metrics, the f64 reference and the decomposition of errors.

mod common;

use approx::assert_relative_eq;
use common::*;
use vc_attention::fidelity::{compare, error_sources};
use vc_attention::{DType, Layout, NonFinite, Problem, Tensor};

fn tensor(values: &[f32]) -> Tensor {
    Tensor::from_bhsd(values.to_vec(), [1, 1, values.len() / 2, 2], DType::F32, Layout::Bhsd)
}

#[test]
fn metrics_are_those_of_their_definitions() {
    let m = compare(&tensor(&[1.0, 2.0, 3.0, 5.0]).view(), &[1.0, 2.0, 3.0, 4.0]);
    assert_relative_eq!(m.rmse, 1.0 / 30.0);
    assert_relative_eq!(m.rel_l2, (1.0f64 / 30.0).sqrt());
    assert_relative_eq!(m.cosine, 34.0 / (39.0f64 * 30.0).sqrt());
    assert_relative_eq!(m.psnr_db, 20.0 * (4.0f64 / 0.5).log10());
    assert_eq!(m.max_abs, 1.0);
    let opposite = compare(&tensor(&[-1.0, -2.0]).view(), &[1.0, 2.0]);
    assert_relative_eq!(opposite.cosine, -1.0);
    assert_relative_eq!(opposite.rel_l2, 2.0);
}

#[test]
fn metrics_of_equal_zero_and_broken_outputs_are_defined() {
    let equal = compare(&tensor(&[1.0, 2.0]).view(), &[1.0, 2.0]);
    assert_eq!((equal.rel_l2, equal.rmse, equal.max_abs, equal.psnr_db), (0.0, 0.0, 0.0, f64::INFINITY));
    let zeros = compare(&tensor(&[0.0, 0.0]).view(), &[0.0, 0.0]);
    assert_eq!((zeros.rel_l2, zeros.cosine, zeros.psnr_db), (0.0, 1.0, f64::INFINITY));
    let black = compare(&tensor(&[0.0, 0.0]).view(), &[3.0, 4.0]);
    assert_eq!((black.rel_l2, black.cosine), (1.0, 0.0));
    let of_nothing = compare(&tensor(&[3.0, 4.0]).view(), &[0.0, 0.0]);
    assert_eq!((of_nothing.rel_l2, of_nothing.cosine), (f64::INFINITY, 0.0));
    // A NaN anywhere must show in every figure, also when larger numbers follow.
    for at in 0..4 {
        let mut values = [1.0, 2.0, 3.0, 9.0];
        values[at] = f32::NAN;
        let m = compare(&tensor(&values).view(), &[1.0, 2.0, 3.0, 4.0]);
        for figure in [m.rel_l2, m.rmse, m.cosine, m.psnr_db, m.max_abs] {
            assert!(figure.is_nan(), "{m:?}");
        }
    }
}

#[test]
fn metrics_read_outputs_of_any_type_and_layout() {
    let values: Vec<f32> = (0..2 * 3 * 5 * 4).map(|i| i as f32 / 8.0).collect();
    let reference: Vec<f64> = values.iter().map(|&x| f64::from(x)).collect();
    for dtype in [DType::F32, DType::F16, DType::Bf16] {
        for layout in [Layout::Bhsd, Layout::Bshd] {
            let tensor = Tensor::from_bhsd(values.clone(), [2, 3, 5, 4], dtype, layout);
            assert_eq!(compare(&tensor.view(), &reference).max_abs, 0.0, "{dtype:?} {layout:?}");
        }
    }
}

#[test]
fn the_reference_is_attention_by_its_definition() {
    let case = Case::new([2, 4, 2], [7, 45], 12);
    let data = case.outliers(1);
    let tensors = data.f32();
    let lens = [45, 13];
    for scale in [None, Some(-0.4f32), Some(0.0), Some(30.0)] {
        let problem = Problem { kv_lens: Some(&lens), scale, ..tensors.problem() };
        let got = reference(&problem);
        let factor = f64::from(problem.scale());
        let row = |x: &[f32], tokens: usize, head: usize, token: usize| -> Vec<f64> {
            x[(head * tokens + token) * 12..][..12].iter().map(|&x| f64::from(x)).collect()
        };
        for (i, (o, lse)) in got.o.chunks(12).zip(&got.lse).enumerate() {
            let (head, token) = (i / 7, i % 7);
            let (batch, kv_head) = (head / 4, head / 2);
            let q = row(&data.q, 7, head, token);
            let scores: Vec<f64> = (0..lens[batch])
                .map(|j| {
                    let k = row(&data.k, 45, kv_head, j);
                    factor * q.iter().zip(&k).map(|(q, k)| q * k).sum::<f64>()
                })
                .collect();
            let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
            let sum: f64 = weights.iter().sum();
            assert_relative_eq!(*lse, max + sum.ln(), max_relative = 1e-12, epsilon = 1e-12);
            for (c, &o) in o.iter().enumerate() {
                let wanted: f64 =
                    (0..lens[batch]).map(|j| weights[j] / sum * row(&data.v, 45, kv_head, j)[c]).sum();
                assert_relative_eq!(o, wanted, max_relative = 1e-11, epsilon = 1e-12);
            }
        }
    }
}

#[test]
fn the_reference_does_not_hide_what_is_not_finite() {
    let mut data = Case::new([1, 1, 1], [3, 200], 8).normal(2);
    data.q[8] = f32::NAN;
    let tensors = data.f32();
    let problem = Problem { nonfinite: NonFinite::Propagate, ..tensors.problem() };
    let got = reference(&problem);
    for (row, o) in got.o.chunks(8).enumerate() {
        assert_eq!(o.iter().all(|o| o.is_nan()), row == 1);
        assert_eq!(got.lse[row].is_nan(), row == 1);
    }
    data.q[8] = 0.0;
    data.k[150 * 8] = f32::NAN;
    let tensors = data.f32();
    let problem = Problem { nonfinite: NonFinite::Propagate, ..tensors.problem() };
    assert!(reference(&problem).o.iter().all(|o| o.is_nan()));
    let none = [0];
    let empty = reference(&Problem { kv_lens: Some(&none), ..problem });
    assert!(empty.o.iter().all(|&o| o == 0.0) && empty.lse.iter().all(|&l| l == f64::NEG_INFINITY));
}

/// The paper's Eq. 2 and its mirror: two nearly orthogonal parts whose squares add up to that of the whole.
#[test]
fn the_parts_of_an_error_add_up() {
    let tensors = Case::new([1, 2, 1], [200, 900], 64).outliers(3).f32();
    let problem = tensors.problem();
    let reference = reference(&problem);
    for name in ["fp8", "sage2", "sage3", "vc8", "vc8-expcast", "vc16-expcast", "vc4"] {
        let s = error_sources(&problem, &recipe(name), &reference).unwrap();
        for (p, v) in [(s.probability, s.value), (s.probability_on_quantized, s.value_under_exact)] {
            let ratio = (p * p + v * v) / (s.method * s.method);
            assert!((0.85..1.15).contains(&ratio), "{name}: {ratio:.3} in {s:?}");
            // Any two parts obey the triangle inequality.
            assert!(p + v >= s.method && (p - v).abs() <= s.method, "{name}: {s:?}");
        }
        assert!(s.kernel > 0.0 && s.kernel < 1.1 * s.method, "{name}: {s:?}");
        let outcome = attend(&problem, &recipe(name));
        assert_relative_eq!(s.method, relative(&o(&outcome), &reference.o), max_relative = 1e-12);
    }
    let exact = error_sources(&problem, &recipe("exact"), &reference).unwrap();
    assert!(exact.method < 9e-7 && exact.value == 0.0, "{exact:?}");
}

/// Smoothing V lowers the value part, and the probability part with it, since rounded probabilities then weigh
/// residuals; rotating Q and K does nothing for the value part; an exact V has none.
#[test]
fn each_remedy_lowers_its_own_part() {
    let tensors = Case::new([1, 1, 1], [200, 2048], 128).outliers(4).f32();
    let problem = tensors.problem();
    let reference = reference(&problem);
    let sources = |text: &str| error_sources(&problem, &recipe(text), &reference).unwrap();
    let (plain, smooth) = (sources("vc16+demean=off+order=sequence"), sources("vc16"));
    assert!(smooth.value < 0.9 * plain.value, "{smooth:?} {plain:?}");
    assert!(smooth.probability < 0.9 * plain.probability, "{smooth:?} {plain:?}");
    let (raw, rotated) = (sources("fp8+center=on"), sources("fp8+center=on+rotate=on"));
    assert!((rotated.value / raw.value - 1.0).abs() < 0.05, "{rotated:?} {raw:?}");
    let exact_v = sources("vc16+v=f32");
    assert!(exact_v.value < 1e-6 && exact_v.probability > 1e-3, "{exact_v:?}");
}

/// A (batch, kv head) that is not finite has NaN for an error, not a number and not a panic.
#[test]
fn the_decomposition_of_a_broken_head_is_nan() {
    for tensor in ["q", "k", "v"] {
        let mut data = Case::new([1, 2, 2], [9, 140], 16).normal(5);
        let x = match tensor {
            "q" => &mut data.q,
            "k" => &mut data.k,
            _ => &mut data.v,
        };
        x[20] = f32::NAN;
        let tensors = data.f32();
        let problem = Problem { nonfinite: NonFinite::Propagate, ..tensors.problem() };
        let sources = error_sources(&problem, &recipe("vc8"), &reference(&problem)).unwrap();
        assert!(sources.method.is_nan() && sources.kernel.is_nan(), "{tensor}: {sources:?}");
    }
}
