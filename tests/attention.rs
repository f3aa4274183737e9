//! The CPU backend against f64 attention and against an independent scalar implementation of the recipes.

mod common;
#[path = "common/scalar.rs"]
mod scalar;

use common::*;
use proptest::prelude::*;
use vc_attention::backend::Backend;
use vc_attention::backend::cpu::{Cpu, F16_SCORE_LIMIT};
use vc_attention::grouping::GroupingConfig;
use vc_attention::{
    DType, Error, Layout, NonFinite, Options, OutputType, Plan, Problem, Recipe, Tensor, TensorView, run,
    run_on_order,
};

const DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::Bf16];

const SHAPES: [Case; 13] = [
    Case::new([1, 1, 1], [113, 203], 128),
    Case::new([2, 1, 1], [239, 1], 64),
    Case::new([1, 2, 1], [1, 1], 128),
    Case::new([1, 2, 2], [799, 3], 80),
    Case::new([1, 1, 1], [1023, 1024], 128),
    Case::new([2, 4, 2], [129, 127], 96),
    Case::new([1, 5, 1], [64, 257], 72),
    Case::new([3, 2, 1], [33, 128], 40),
    Case::new([1, 4, 1], [257, 640], 112),
    Case::new([1, 3, 3], [128, 300], 200),
    Case::new([1, 1, 1], [65, 513], 256),
    Case::new([1, 2, 2], [130, 193], 1),
    Case::new([1, 1, 1], [3, 2100], 64),
];

/// Largest error against f64 attention on the same operands, and against unquantized attention, on heads of some
/// channels; half as much again as the largest measured on [`SHAPES`]. One channel averages nothing: see there.
const BOUNDS: [(&str, f64, f64); 11] = [
    ("exact", 9e-7, 9e-7),
    ("fp8", 0.035, 0.10),
    ("fa3-fp8", 0.035, 0.09),
    ("sage2", 0.035, 0.055),
    ("sage3", 0.14, 0.28),
    ("vc8", 0.035, 0.055),
    ("vc8-expcast", 0.042, 0.060),
    ("vc8-fp8qk", 0.042, 0.080),
    ("vc16", 0.035, 0.053),
    ("vc16-expcast", 0.042, 0.058),
    ("vc4", 0.14, 0.28),
];

#[test]
fn every_recipe_is_within_its_bounds_on_every_shape() {
    for (name, kernel_bound, method_bound) in BOUNDS {
        let recipe = recipe(name);
        for (i, case) in SHAPES.iter().enumerate() {
            let layout = [Layout::Bhsd, Layout::Bshd][i % 2];
            for (j, data) in [case.normal(i as u64), case.outliers(i as u64)].iter().enumerate() {
                let tensors = data.tensors(DTYPES[(i + j) % 3], layout);
                let (_, kernel, method) = errors(&tensors.problem(), &recipe);
                let slack = if case.dim == 1 && name != "exact" { 3.5 } else { 1.0 };
                let what = format!("{name} on {case:?}, data {j}: kernel {kernel:.2e}, method {method:.2e}");
                assert!(kernel <= slack * kernel_bound && method <= slack * method_bound, "{what}");
            }
        }
    }
}

/// The bounds above would let a recipe be as bad as its neighbour; this pins their order where it must hold.
#[test]
fn recipes_rank_as_the_method_says_on_data_with_outliers() {
    let case = Case::new([1, 2, 2], [256, 2048], 128);
    let tensors = case.outliers(1).tensors(DType::Bf16, Layout::Bhsd);
    let error = |name: &str| errors(&tensors.problem(), &recipe(name)).2;
    let [fp8, sage2, vc8, vc8_expcast, fp8qk, vc16, vc16_expcast] =
        ["fp8", "sage2", "vc8", "vc8-expcast", "vc8-fp8qk", "vc16", "vc16-expcast"].map(error);
    let [sage3, vc4] = ["sage3", "vc4"].map(error);
    assert!(vc8 < 0.9 * sage2 && sage2 < 0.6 * fp8, "vc8 {vc8:.4}, sage2 {sage2:.4}, fp8 {fp8:.4}");
    assert!(vc16 < vc8 && vc16_expcast < vc8_expcast && vc8_expcast < fp8qk && vc8 < vc8_expcast);
    assert!(vc4 < sage3, "vc4 {vc4:.4}, sage3 {sage3:.4}");
}

#[test]
fn the_output_in_the_inputs_type_is_the_f32_output_rounded() {
    let data = Case::new([2, 2, 1], [37, 150], 72).normal(1);
    for dtype in DTYPES {
        let tensors = data.tensors(dtype, Layout::Bshd);
        let wide = attend(&tensors.problem(), &recipe("vc16-expcast"));
        let narrow =
            vc_attention::attend(&tensors.problem(), &recipe("vc16-expcast"), Options::default()).unwrap();
        let rounded = Tensor::from_bhsd(o_f32(&wide).to_vec(), data.case.q_shape(), dtype, Layout::Bhsd);
        assert_eq!(narrow.o, rounded);
        assert!(narrow.lse.is_none());
    }
}

/// The larger of both; NaN if one is.
fn larger(a: f64, b: f64) -> f64 {
    if a.is_nan() || a > b { a } else { b }
}

/// Whether the rows agree: all but a few to f32 rounding, and those few (where a rounding to few bits met a value
/// on its boundary) by a step of that format.
fn assert_rows_match(what: &str, got: &[f64], wanted: &[f64], dim: usize, share_of_flips: f64, step: f64) {
    let errors: Vec<f64> =
        got.chunks(dim).zip(wanted.chunks(dim)).map(|(got, wanted)| relative(got, wanted)).collect();
    let flips = errors.iter().filter(|&&e| e.is_nan() || e > 1e-6).count() as f64 / errors.len() as f64;
    let worst = errors.iter().copied().fold(0.0, larger);
    assert!(flips <= share_of_flips && worst <= step, "{what}: {flips:.3} of the rows, at most {worst:.2e}");
}

/// The same for the LSE, in nats: f32 holds some tens of them to 1e-5.
fn assert_lse_matches(what: &str, got: &[f32], wanted: &[f64], share_of_flips: f64, step: f64) {
    let errors: Vec<f64> =
        got.iter().zip(wanted).map(|(&got, wanted)| (f64::from(got) - wanted).abs()).collect();
    let flips = errors.iter().filter(|&&e| e.is_nan() || e > 1e-5).count() as f64 / errors.len() as f64;
    let worst = errors.iter().copied().fold(0.0, larger);
    assert!(
        flips <= share_of_flips && worst <= step,
        "{what}: LSE of {flips:.3} of the rows, at most {worst:.2e}"
    );
}

#[test]
fn an_independent_scalar_implementation_gives_the_same_output() {
    use scalar::*;
    for (name, scalar) in [
        ("vc16-expcast", VC16_EXPCAST),
        ("vc8", VC8),
        ("vc8-expcast", VC8_EXPCAST),
        ("vc8-fp8qk", VC8_FP8QK),
        ("sage2", SAGE2),
        ("vc4", VC4),
    ] {
        for (seed, [q_tokens, kv_tokens], dim, scale) in [
            (1, [65, 100], 64, 0.11),
            (2, [17, 128], 40, -0.3),
            (3, [33, 1], 16, 0.2),
            (4, [5, 77], 128, 0.09),
        ] {
            let case = Case::new([1, 1, 1], [q_tokens, kv_tokens], dim);
            let data = case.outliers(seed);
            let tensors = data.f32();
            // The twin keeps the tokens as they come, and the scales of INT8 depend on who shares them.
            let recipe = Recipe { grouping: GroupingConfig::sequence(), ..recipe(name) };
            let output = attend(&Problem { scale: Some(scale), ..tensors.problem() }, &recipe);
            let (wanted, wanted_lse) = scalar::attention(&scalar, [&data.q, &data.k, &data.v], dim, scale);
            let what = format!("{name} on {case:?}");
            assert_eq!(output.observed.f32_fallbacks, 0, "{what}: the twin has no f32 scores");
            assert_rows_match(&what, &o(&output), &wanted, dim, 0.05, 0.05);
            assert_lse_matches(&what, lse(&output), &wanted_lse, 0.05, 0.02);
        }
    }
}

/// Inputs on a coarse grid make every product and sum exact, so that no rounding can fall on either side: the
/// twin then has to agree in every row.
#[test]
fn on_a_coarse_grid_the_scalar_implementation_agrees_in_every_row() {
    let case = Case::new([1, 1, 1], [100, 128], 64);
    let mut rng = Rng(9);
    let mut grid = |n: usize| -> Vec<f32> { (0..n).map(|_| (rng.below(65) as f32 - 32.0) / 16.0).collect() };
    let data = Data { case, q: grid(100 * 64), k: grid(128 * 64), v: grid(128 * 64) };
    // sqrt(scale * 8 log2 e) is exactly 1/2.
    let scale = 0.25 / (8.0 * std::f32::consts::LOG2_E);
    assert_eq!((f64::from(scale * (8.0 * std::f32::consts::LOG2_E)).sqrt()) as f32, 0.5);
    let tensors = data.f32();
    let problem = Problem { scale: Some(scale), ..tensors.problem() };
    let output = attend(&problem, &recipe("vc16-expcast"));
    let (wanted, wanted_lse) =
        scalar::attention(&scalar::VC16_EXPCAST, [&data.q, &data.k, &data.v], 64, scale);
    assert_rows_match("vc16-expcast", &o(&output), &wanted, 64, 0.0, 1e-6);
    assert_lse_matches("vc16-expcast", lse(&output), &wanted_lse, 0.0, 1e-5);
}

#[test]
fn the_order_of_the_keys_does_not_change_exact_attention() {
    let case = Case::new([1, 2, 2], [70, 512], 64);
    let data = case.outliers(3);
    let tensors = data.f32();
    let whole = reference(&tensors.problem());
    let shuffled = data.gathered(&Rng(5).permutation(512)).f32();
    let permuted = reference(&shuffled.problem());
    assert!(relative(&permuted.o, &whole.o) < 1e-12 && relative(&permuted.lse, &whole.lse) < 1e-12);

    let problem = Problem { grid: Some([8, 8, 8]), ..tensors.problem() };
    for order in ["sequence", "cube", "kmeans", "rounded", "balanced"] {
        let recipe = recipe(&format!("exact+order={order}"));
        let plan = Plan::new(&problem, &recipe, F32_LSE).unwrap();
        let run = run(&Cpu, &plan, &problem, None).unwrap();
        let moved = run.order.0.iter().any(|g| g.order.iter().enumerate().any(|(i, &t)| i != t as usize));
        assert_eq!(moved, order != "sequence", "{order}");
        assert!(relative(&o(&run.output), &whole.o) < 9e-7, "{order}");
        // V-Smooth in f32 changes nothing either.
        let demeaned = Recipe { demean: true, ..recipe };
        assert!(relative(&o(&attend(&problem, &demeaned)), &whole.o) < 2e-6, "{order}, demeaned");
    }
}

/// Strides of a view that is spread over a larger buffer, NaN between its elements.
fn spread(x: &[f32], [b, h, n, d]: [usize; 4], channel_stride: usize) -> (Vec<f32>, [usize; 4]) {
    let row = d * channel_stride + 3;
    let strides = [n * row * h + 5, row, h * row, channel_stride];
    let at = |i: [usize; 4]| i.iter().zip(strides).map(|(i, s)| i * s).sum::<usize>();
    let mut buffer = vec![f32::NAN; at([b - 1, h - 1, n - 1, d - 1]) + 1];
    for (i, &x) in x.iter().enumerate() {
        buffer[at([i / (h * n * d), i / (n * d) % h, i / d % n, i % d])] = x;
    }
    (buffer, strides)
}

fn assert_same(what: &str, a: &vc_attention::Output, b: &vc_attention::Output) {
    assert!(same_bits(o_f32(a), o_f32(b)) && same_bits(lse(a), lse(b)), "{what}");
}

#[test]
fn views_give_the_bits_of_contiguous_tensors() {
    let case = Case::new([2, 4, 2], [41, 140], 48);
    let data = case.outliers(4);
    let one_head = Case { kv_heads: 1, ..case }.outliers(5);
    for recipe in Recipe::all() {
        let name = &recipe.name;
        let contiguous = data.f32();
        let wanted = attend(&contiguous.problem(), &recipe);
        let bshd = data.tensors(DType::F32, Layout::Bshd);
        assert_same(&format!("{name}, bshd"), &attend(&bshd.problem(), &recipe), &wanted);

        for stride in [1, 2] {
            let [q, k, v] =
                [(&data.q, case.q_shape()), (&data.k, case.kv_shape()), (&data.v, case.kv_shape())]
                    .map(|(x, shape)| (spread(x, shape, stride), shape));
            let problem = Problem::new(
                TensorView::strided("q", q.0.0.as_slice(), q.1, q.0.1).unwrap(),
                TensorView::strided("k", k.0.0.as_slice(), k.1, k.0.1).unwrap(),
                TensorView::strided("v", v.0.0.as_slice(), v.1, v.0.1).unwrap(),
            );
            assert_same(&format!("{name}, stride {stride}"), &attend(&problem, &recipe), &wanted);
        }

        // One kv head, read as two through a stride of 0.
        let [n, d] = [case.kv_tokens, case.dim];
        let view = |x| TensorView::strided("kv", x, case.kv_shape(), [n * d, 0, d, 1]).unwrap();
        let problem =
            Problem::new(contiguous.q.view(), view(one_head.k.as_slice()), view(one_head.v.as_slice()));
        let twice = |x: &[f32]| -> Vec<f32> { x.chunks(n * d).flat_map(|x| [x, x].concat()).collect() };
        let repeated = Data { case, q: data.q.clone(), k: twice(&one_head.k), v: twice(&one_head.v) }.f32();
        assert_same(
            &format!("{name}, broadcast"),
            &attend(&problem, &recipe),
            &attend(&repeated.problem(), &recipe),
        );
    }
}

/// Query heads that share a kv head get what they would get with copies of it. (`vc8-fp8qk` balances Q over the
/// group, which may move E4M3's subnormals.)
#[test]
fn grouped_queries_equal_repeated_keys() {
    for heads in [[2, 4, 2], [1, 3, 1], [1, 5, 5]] {
        let case = Case::new(heads, [20, 135], 32);
        let data = case.outliers(6);
        let group = case.q_heads / case.kv_heads;
        let size = case.kv_tokens * case.dim;
        let repeat = |x: &[f32]| -> Vec<f32> {
            x.chunks(size).flat_map(|x| std::iter::repeat_n(x, group).flatten().copied()).collect()
        };
        let repeated = Data {
            case: Case { kv_heads: case.q_heads, ..case },
            q: data.q.clone(),
            k: repeat(&data.k),
            v: repeat(&data.v),
        };
        let (grouped, repeated) = (data.f32(), repeated.f32());
        for recipe in Recipe::all().iter().filter(|r| r.name != "vc8-fp8qk") {
            let (a, b) = (attend(&grouped.problem(), recipe), attend(&repeated.problem(), recipe));
            assert_same(&format!("{} {heads:?}", recipe.name), &a, &b);
        }
    }
}

#[test]
fn keys_beyond_the_valid_length_take_part_in_nothing() {
    let case = Case::new([3, 2, 1], [19, 300], 48);
    let clean = case.outliers(7);
    let lens = [0, 5, 297];
    let mut dirty = clean.clone();
    let size = case.kv_tokens * case.dim;
    for (batch, len) in lens.into_iter().enumerate() {
        for x in [&mut dirty.k, &mut dirty.v] {
            for (i, x) in x[batch * size..][len * case.dim..size].iter_mut().enumerate() {
                *x = [f32::NAN, f32::INFINITY, 1e30][i % 3];
            }
        }
    }
    let tensors = dirty.f32();
    for nonfinite in [NonFinite::Reject, NonFinite::Propagate] {
        let problem = Problem { kv_lens: Some(&lens), nonfinite, ..tensors.problem() };
        for recipe in Recipe::all() {
            let output = attend(&problem, &recipe);
            let rows = case.q_heads * case.q_tokens;
            let of = |batch: usize| {
                (
                    &o_f32(&output)[batch * rows * case.dim..][..rows * case.dim],
                    &lse(&output)[batch * rows..][..rows],
                )
            };
            assert!(of(0).0.iter().all(|&o| o == 0.0), "{}", recipe.name);
            assert!(of(0).1.iter().all(|&l| l == f32::NEG_INFINITY), "{}", recipe.name);
            for batch in [1, 2] {
                let cut = |x: &[f32]| x[batch * size..][..lens[batch] * case.dim].to_vec();
                let q = clean.q[batch * rows * case.dim..][..rows * case.dim].to_vec();
                let case = Case { batch: 1, kv_tokens: lens[batch], ..case };
                let truncated = Data { case, q, k: cut(&clean.k), v: cut(&clean.v) }.f32();
                let wanted = attend(&truncated.problem(), &recipe);
                let (o, l) = of(batch);
                let same = same_bits(o, o_f32(&wanted)) && same_bits(l, lse(&wanted));
                assert!(same, "{} batch {batch}", recipe.name);
            }
        }
    }
    let problem = Problem { kv_lens: Some(&lens), ..tensors.problem() };
    let whole = reference(&problem);
    assert!(relative(&o(&attend(&problem, &recipe("exact"))), &whole.o) < 9e-7);
}

/// Mean and largest difference.
fn differences(a: &[f32], b: &[f64]) -> (f64, f64) {
    let d: Vec<f64> = a.iter().zip(b).map(|(&a, b)| f64::from(a) - b).collect();
    (d.iter().sum::<f64>() / d.len() as f64, d.iter().fold(0.0, |a, d| larger(a, d.abs())))
}

#[test]
fn the_lse_is_that_of_all_scores_also_when_k_has_a_huge_mean() {
    let case = Case::new([1, 2, 1], [130, 700], 64);
    let mut data = case.normal(8);
    let mean: Vec<f32> = Rng(1).normals(64).iter().map(|x| 30.0 * x).collect();
    data.k.chunks_exact_mut(64).for_each(|x| x.iter_mut().zip(&mean).for_each(|(x, m)| *x += m));
    let tensors = data.f32();
    let reference = reference(&tensors.problem());
    let spread = reference.lse.iter().fold(0.0f64, |a, l| a.max(l.abs()));
    assert!(spread > 50.0, "the mean must matter: {spread}");
    for (name, bound) in [
        ("exact", 2e-5),
        ("sage2", 0.02),
        ("vc8", 0.02),
        ("vc16", 0.005),
        ("vc16-expcast", 0.02),
        ("vc8-expcast", 0.025),
        ("vc8-fp8qk", 0.06),
        ("sage3", 0.25),
        ("vc4", 0.25),
    ] {
        let output = attend(&tensors.problem(), &recipe(name));
        let (_, largest) = differences(lse(&output), &reference.lse);
        assert!(largest < bound, "{name}: {largest:.4}");
    }
}

/// ExpCast's weights are those of the decoded bytes, whose sum is off by a known share on average.
#[test]
fn the_lse_of_expcast_has_its_stated_bias() {
    let tensors = Case::new([1, 2, 2], [256, 1024], 128).normal(9).f32();
    let reference = reference(&tensors.problem());
    let bias = |text: &str| differences(lse(&attend(&tensors.problem(), &recipe(text))), &reference.lse).0;
    let paper = bias("vc16-expcast+encoder=f32+beta=-0.35");
    assert!((paper - 0.009).abs() < 0.001, "beta -0.35: {paper:+.4}");
    let lowest = bias("vc16-expcast+encoder=f32+beta=-0.5");
    assert!((lowest + 0.004).abs() < 0.001, "beta -0.5: {lowest:+.4}");
    let ours = bias("vc16-expcast");
    assert!((ours + 0.0026).abs() < 0.001, "packed, beta -31/64: {ours:+.4}");
    let exact = bias("vc16");
    assert!(exact.abs() < 1e-4, "exact exponentials: {exact:+.5}");
}

#[test]
fn two_halves_of_the_keys_merge_into_the_whole() {
    let case = Case::new([1, 2, 1], [60, 500], 64);
    let data = case.outliers(10);
    let halves =
        [data.gathered(&Vec::from_iter(0..201)).f32(), data.gathered(&Vec::from_iter(201..500)).f32()];
    let tensors = data.f32();
    for (name, bound) in [("exact", 1e-6), ("vc16", 0.016), ("vc16-expcast", 0.016)] {
        let recipe = recipe(name);
        let whole = attend(&tensors.problem(), &recipe);
        let parts = halves.each_ref().map(|half| attend(&half.problem(), &recipe));
        let merged: Vec<f64> = (0..60 * 2)
            .flat_map(|row| {
                let [a, b] = parts.each_ref().map(|part| f64::from(lse(part)[row]));
                let (wa, wb) = (1.0 / (1.0 + (b - a).exp()), 1.0 / (1.0 + (a - b).exp()));
                let total = a.max(b) + (-(a - b).abs()).exp().ln_1p();
                let stated = if name == "exact" { 2e-5 } else { 0.02 };
                assert!((total - f64::from(lse(&whole)[row])).abs() < stated, "{name}: LSE of row {row}");
                let [a, b] = parts.each_ref().map(|part| &o_f32(part)[row * 64..][..64]);
                a.iter().zip(b).map(|(&a, &b)| wa * f64::from(a) + wb * f64::from(b)).collect::<Vec<_>>()
            })
            .collect();
        let error = relative(&merged, &o(&whole));
        assert!(error < bound, "{name}: {error:.2e}");
    }
}

#[test]
fn scale_zero_weighs_all_keys_alike() {
    let case = Case::new([1, 2, 2], [5, 333], 40);
    let data = case.outliers(11);
    let tensors = data.f32();
    let means: Vec<f64> = data
        .v
        .chunks(333 * 40)
        .flat_map(|v| {
            let mean: Vec<f64> =
                (0..40).map(|c| v.chunks(40).map(|x| f64::from(x[c])).sum::<f64>() / 333.0).collect();
            mean.repeat(5)
        })
        .collect();
    for recipe in Recipe::all() {
        for scale in [0.0, -0.0] {
            let output = attend(&Problem { scale: Some(scale), ..tensors.problem() }, &recipe);
            // Uniform weights are exact in every format: what is left is the rounding of V, averaged out.
            let bound = match recipe.bits_pv() {
                32 => 1e-6,
                8 => 0.02,
                _ => 0.08,
            };
            let error = relative(&o(&output), &means);
            assert!(error < bound, "{}: {error:.2e}", recipe.name);
            let ln = (333f64).ln();
            assert!(lse(&output).iter().all(|&l| (f64::from(l) - ln).abs() < 1e-6), "{}", recipe.name);
        }
    }
}

#[test]
fn a_negative_scale_negates_the_queries() {
    let data = Case::new([1, 2, 1], [140, 150], 48).outliers(12);
    let negated = Data { q: data.q.iter().map(|x| -x).collect(), ..data.clone() };
    let (tensors, negated) = (data.f32(), negated.f32());
    for recipe in Recipe::all() {
        let a = attend(&Problem { scale: Some(-0.17), ..tensors.problem() }, &recipe);
        let b = attend(&Problem { scale: Some(0.17), ..negated.problem() }, &recipe);
        assert_same(&recipe.name, &a, &b);
    }
}

#[test]
fn a_value_that_is_not_finite_reaches_its_rows_and_no_others() {
    let case = Case::new([2, 4, 2], [130, 140], 32);
    let clean = case.outliers(13);
    let row = |head: usize, token: usize, tokens: usize| (head * tokens + token) * case.dim;
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for recipe in Recipe::all() {
            let name = &recipe.name;
            // Batch 1, query head 2, token 129: the head 6 in batch-major order.
            let (mut dirty, mut zeroed) = (clean.clone(), clean.clone());
            let at = row(6, 129, 130);
            dirty.q[at + 7] = bad;
            zeroed.q[at..at + case.dim].fill(0.0);
            let (dirty_q, zeroed) = (dirty.f32(), zeroed.f32());
            let problem = Problem { nonfinite: NonFinite::Propagate, ..dirty_q.problem() };
            let (got_out, wanted_out) = (attend(&problem, &recipe), attend(&zeroed.problem(), &recipe));
            let rows = o_f32(&got_out).chunks(case.dim).zip(o_f32(&wanted_out).chunks(case.dim));
            for (i, (got, wanted)) in rows.enumerate() {
                let nan = got.iter().all(|x| x.is_nan());
                assert!(if i == at / case.dim { nan } else { same_bits(got, wanted) }, "{name}: row {i}");
                let (got, wanted) = (lse(&got_out)[i], lse(&wanted_out)[i]);
                assert!(if nan { got.is_nan() } else { got == wanted }, "{name}: LSE of row {i}");
            }

            // Batch 0, kv head 1: query heads 2 and 3.
            for tensor in ["k", "v"] {
                let mut dirty = clean.clone();
                let at = row(1, 3, 140) + 5;
                if tensor == "k" {
                    dirty.k[at] = bad
                } else {
                    dirty.v[at] = bad
                }
                let dirty = dirty.f32();
                let tensors = clean.f32();
                let problem = Problem { nonfinite: NonFinite::Propagate, ..dirty.problem() };
                let (got, wanted) = (attend(&problem, &recipe), attend(&tensors.problem(), &recipe));
                let size = case.q_tokens * case.dim;
                for (head, (got, wanted)) in
                    o_f32(&got).chunks(size).zip(o_f32(&wanted).chunks(size)).enumerate()
                {
                    let ok = if matches!(head, 2 | 3) {
                        got.iter().all(|x| x.is_nan())
                    } else {
                        same_bits(got, wanted)
                    };
                    assert!(ok, "{name}: {tensor} with {bad}, head {head}");
                }
                for (head, lse) in lse(&got).chunks(case.q_tokens).enumerate() {
                    assert_eq!(lse.iter().all(|x| x.is_nan()), matches!(head, 2 | 3), "{name}: LSE {head}");
                }
            }
        }
    }
}

#[test]
fn a_value_that_is_not_finite_is_refused_by_name_and_position() {
    let case = Case::new([2, 2, 1], [6, 7], 8);
    let clean = case.normal(14);
    for (tensor, at, position) in [
        ("q", ((3 * 6) + 5) * 8 + 2, [1, 1, 5, 2]),
        ("k", (7 + 6) * 8 + 7, [1, 0, 6, 7]),
        ("v", 8, [0, 0, 1, 0]),
    ] {
        let mut dirty = clean.clone();
        match tensor {
            "q" => dirty.q[at] = f32::NAN,
            "k" => dirty.k[at] = f32::INFINITY,
            _ => dirty.v[at] = f32::NEG_INFINITY,
        }
        let dirty = dirty.f32();
        match vc_attention::attend(&dirty.problem(), &recipe("vc8"), F32_LSE) {
            Err(Error::NonFinite { tensor: t, position: p, .. }) => assert_eq!((t, p), (tensor, position)),
            other => panic!("{tensor}: {other:?}"),
        }
    }
}

#[test]
fn heads_with_huge_scores_run_with_f32_scores_and_stay_accurate() {
    for (nats, f16_recipe_bound) in [(50.0f32, 0.03), (100.0, 0.03), (500.0, 0.08)] {
        let case = Case::new([1, 3, 1], [64, 512], 128);
        let mut data = case.normal(15);
        // The largest of 512 scores of deviation g^2 is about 3 g^2.
        let gain = (nats / 2.8).sqrt();
        data.q.iter_mut().chain(&mut data.k).for_each(|x| *x *= gain);
        let tensors = data.f32();
        for name in ["vc16", "vc16-expcast", "vc8-fp8qk"] {
            let (output, kernel, method) = errors(&tensors.problem(), &recipe(name));
            let observed = output.observed;
            assert_eq!(observed.f32_fallbacks, 1, "{name} at {nats} nats: {observed:?}");
            assert!(observed.max_score > F16_SCORE_LIMIT && observed.max_score.is_finite());
            assert!(kernel < 0.03, "{name} at {nats} nats: kernel {kernel:.2e}");
            if name != "vc8-fp8qk" {
                assert!(method < f16_recipe_bound, "{name} at {nats} nats: method {method:.2e}");
            }
        }
        // Recipes with f32 scores have nothing to fall back from.
        assert_eq!(attend(&tensors.problem(), &recipe("vc8")).observed.f32_fallbacks, 0);
    }
    let calm = Case::new([1, 3, 1], [64, 512], 128).normal(15).f32();
    assert_eq!(attend(&calm.problem(), &recipe("vc16-expcast")).observed.f32_fallbacks, 0);
}

/// The scores are small, but half of the channels add up to thousands of code units that the other half cancels:
/// in binary16 sums the rest would be lost. (Offsets much larger than these would lose it to the rounding of K.)
#[test]
fn partial_sums_beyond_f16_count_as_huge_scores() {
    let case = Case::new([1, 1, 1], [32, 256], 128);
    for size in [8.0f32, 40.0] {
        let mut data = case.normal(16);
        for x in data.q.chunks_exact_mut(128) {
            x.iter_mut().for_each(|x| *x = size + 4.0 / size * *x);
        }
        for (i, x) in data.k.chunks_exact_mut(128).enumerate() {
            let sign = if i % 2 == 0 { size } else { -size };
            for (c, x) in x.iter_mut().enumerate() {
                *x = if c < 64 { sign } else { -sign } + 4.0 / size * *x;
            }
        }
        let tensors = data.f32();
        let (output, kernel, _) = errors(&tensors.problem(), &recipe("vc16"));
        let observed = output.observed;
        assert!(observed.f32_fallbacks == 1 && observed.max_score < F16_SCORE_LIMIT, "{size}: {observed:?}");
        assert!(kernel < 0.03, "offset {size}: {kernel:.2e}");
    }
}

/// Operands beyond binary16 or E4M3 are brought back by a power of two.
#[test]
fn operands_beyond_the_range_of_their_format_still_give_the_right_scores() {
    let mut data = Case::new([1, 2, 1], [40, 200], 64).normal(17);
    data.q.iter_mut().for_each(|x| *x *= 1e-6);
    data.k.iter_mut().for_each(|x| *x *= 1e6);
    let tensors = data.f32();
    for (name, kernel_bound, _) in BOUNDS {
        let (_, kernel, method) = errors(&tensors.problem(), &recipe(name));
        // binary16 queries of 1e-6 are subnormal: 4 bits are left of them.
        let method_bound = if name.starts_with("vc16") { 0.1 } else { 0.3 };
        assert!(kernel < kernel_bound && method < method_bound, "{name}: {kernel:.2e}, {method:.2e}");
    }
}

#[test]
fn degenerate_inputs_give_the_obvious_output() {
    for recipe in Recipe::all() {
        let name = &recipe.name;
        let v_bound = match recipe.bits_pv() {
            32 => 1e-6,
            8 if recipe.v == vc_attention::recipe::VFormat::E4m3PerHead => 0.04,
            8 => 1e-3,
            _ if recipe.demean => 1e-3,
            _ => 0.07,
        };
        // One token, or tokens that are all equal, have one possible output: the value.
        for tokens in [1, 130, 300] {
            let one = Case::new([1, 1, 1], [3, 1], 48).outliers(18);
            let case = Case::new([1, 1, 1], [3, tokens], 48);
            let data = Data { case, q: one.q, k: one.k.repeat(tokens), v: one.v.repeat(tokens) };
            let tensors = data.f32();
            let wanted: Vec<f64> = data.v[..48].repeat(3).into_iter().map(f64::from).collect();
            let error = relative(&o(&attend(&tensors.problem(), &recipe)), &wanted);
            assert!(error < v_bound, "{name}: {tokens} equal tokens, {error:.2e}");
        }
        let case = Case::new([1, 2, 1], [5, 140], 24);
        let zeros = Data { case, q: vec![0.0; 5 * 2 * 24], k: vec![0.0; 140 * 24], v: vec![0.0; 140 * 24] };
        let output = attend(&zeros.f32().problem(), &recipe);
        assert!(o_f32(&output).iter().all(|&o| o == 0.0), "{name}: zeros");
        assert!(lse(&output).iter().all(|l| (l - 140f32.ln()).abs() < 1e-6), "{name}: zeros");

        // Tiny inputs: the scores vanish, the values keep their relative precision.
        let mut tiny = Case::new([1, 1, 1], [9, 200], 32).normal(19);
        tiny.q.iter_mut().chain(&mut tiny.k).chain(&mut tiny.v).for_each(|x| *x *= 1e-30);
        let (_, kernel, method) = errors(&tiny.f32().problem(), &recipe);
        let bound = if recipe.bits_pv() == 4 { 0.3 } else { 0.05 };
        assert!(kernel < 1e-5 && method < bound, "{name}: tiny {kernel:.2e} {method:.2e}");
    }
}

#[test]
fn the_largest_f16_values_come_back_finite() {
    let mut rng = Rng(20);
    let case = Case::new([1, 2, 2], [30, 150], 64);
    let mut extreme = |n: usize| -> Vec<f32> {
        (0..n).map(|_| if rng.below(2) == 0 { 65504.0 } else { -65504.0 }).collect()
    };
    let (q, k) = (extreme(2 * 30 * 64), extreme(2 * 150 * 64));
    for v in [vec![65504.0; 2 * 150 * 64], extreme(2 * 150 * 64)] {
        let tensors = Data { case, q: q.clone(), k: k.clone(), v }.tensors(DType::F16, Layout::Bhsd);
        for recipe in Recipe::all() {
            let output = vc_attention::attend(&tensors.problem(), &recipe, Options::default()).unwrap();
            assert!(values(&output.o.view()).iter().all(|o| o.abs() <= 65504.0), "{}", recipe.name);
        }
    }
}

#[test]
fn an_output_that_its_type_cannot_hold_is_an_error() {
    let data = Case::new([1, 1, 1], [2, 10], 16).normal(21);
    let (narrow, mut wide) = (data.tensors(DType::F16, Layout::Bhsd), data.clone());
    wide.v.fill(1e6);
    let wide = wide.f32();
    let problem = Problem { v: wide.v.view(), ..narrow.problem() };
    match vc_attention::attend(&problem, &recipe("exact"), Options::default()) {
        Err(Error::NonFinite { tensor: "o", position: [0, 0, 0, 0], value: f32::INFINITY }) => {}
        other => panic!("{other:?}"),
    }
    assert!(relative(&o(&attend(&problem, &recipe("exact"))), &[1e6; 32]) < 1e-6, "f32 holds it");
}

#[test]
fn finite_inputs_that_overflow_f32_are_an_error_and_not_a_silent_nan() {
    let mut data = Case::new([1, 2, 1], [3, 140], 32).normal(22);
    data.q.iter_mut().chain(&mut data.k).for_each(|x| *x *= 1e30);
    let tensors = data.f32();
    for recipe in Recipe::all() {
        match vc_attention::attend(&tensors.problem(), &recipe, F32_LSE) {
            Err(Error::NonFinite { tensor: "o", .. }) => {}
            other => panic!("{}: {other:?}", recipe.name),
        }
        let problem = Problem { nonfinite: NonFinite::Propagate, ..tensors.problem() };
        assert!(attend(&problem, &recipe).o.view().elements().len() == 2 * 3 * 32);
    }
    // One key among good ones whose partial sums overflow and whose score does not: weight 0 or byte 0 must not
    // hide it, whichever infinity it ends in.
    for sign in [1.0, -1.0] {
        let mut data = Case::new([1, 1, 1], [3, 140], 32).normal(23);
        data.q.fill(1e20);
        for (i, x) in data.k[77 * 32..][..32].iter_mut().enumerate() {
            *x = if i < 16 { 3e38 } else { -3e38 } * sign;
        }
        for name in ["vc8-expcast+rotate=off+qk=f32+center=off", "exact"] {
            let tensors = data.f32();
            let result = vc_attention::attend(&tensors.problem(), &recipe(name), F32_LSE);
            assert!(matches!(result, Err(Error::NonFinite { tensor: "o", .. })), "{name}: {result:?}");
        }
    }
}

#[test]
fn the_number_of_threads_does_not_change_a_bit() {
    let tensors = Case::new([2, 4, 2], [150, 600], 64).outliers(24).f32();
    let problem = Problem { grid: Some([4, 10, 15]), ..tensors.problem() };
    let mut recipes = Recipe::all();
    recipes.extend(["vc8+order=rounded", "vc8+order=balanced", "vc8+order=cube"].map(recipe));
    for recipe in recipes {
        let [one, two, five] = [1, 2, 5].map(|threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| attend(&problem, &recipe))
        });
        assert_same(&recipe.name, &one, &two);
        assert_same(&recipe.name, &one, &five);
        assert_eq!(one.observed, five.observed);
    }
}

/// Stages on the wrong problem, order or operands are refused, whatever the caller mixed up.
#[test]
fn stages_refuse_what_they_were_not_planned_for() {
    let data = Case::new([1, 2, 2], [20, 40], 16).normal(25);
    let other = Case::new([1, 2, 2], [20, 41], 16).normal(25);
    let (tensors, other) = (data.f32(), other.f32());
    let (problem, other) = (tensors.problem(), other.problem());
    let (vc8, vc16) = (recipe("vc8"), recipe("vc16"));
    let plan = Plan::new(&problem, &vc8, F32_LSE).unwrap();
    let misfit = |result: Result<(), Error>, tensor: &str| match result {
        Err(Error::Tensor { tensor: t, .. }) => assert_eq!(t, tensor),
        other => panic!("expected an error about {tensor}: {other:?}"),
    };
    misfit(Cpu.group(&plan, &other, None).map(drop), "k");
    misfit(run(&Cpu, &plan, &other, None).map(drop), "k");
    let too_long = [41];
    misfit(run(&Cpu, &plan, &Problem { kv_lens: Some(&too_long), ..problem }, None).map(drop), "kv_lens");

    let good = Cpu.group(&plan, &problem, None).unwrap();
    misfit(Cpu.prepare_q(&plan, &other, &good).map(drop), "k");
    let mut short = good.clone();
    short.0.pop();
    misfit(run_on_order(&Cpu, &plan, &problem, short.clone()).map(drop), "order");
    misfit(Cpu.group(&plan, &problem, Some(&short)).map(drop), "order");
    let mut twice = good.clone();
    twice.0[1].order[0] = twice.0[1].order[1];
    misfit(run_on_order(&Cpu, &plan, &problem, twice).map(drop), "order");
    let mut outside = good.clone();
    outside.0[0].order[3] = u32::MAX;
    misfit(run_on_order(&Cpu, &plan, &problem, outside).map(drop), "order");

    let other_plan = Plan::new(&problem, &vc16, F32_LSE).unwrap();
    let q = Cpu.prepare_q(&plan, &problem, &good).unwrap();
    let k = Cpu.prepare_k(&plan, &problem, &good, &q).unwrap();
    let v = Cpu.prepare_v(&plan, &problem, &good).unwrap();
    misfit(Cpu.attend(&other_plan, &problem, &q, &k, &v).map(drop), "q");
    misfit(Cpu.prepare_k(&other_plan, &problem, &good, &q).map(drop), "q");
    let lens = [30];
    let shorter = Problem { kv_lens: Some(&lens), ..problem };
    let short_order = Cpu.group(&plan, &shorter, None).unwrap();
    let v30 = Cpu.prepare_v(&plan, &shorter, &short_order).unwrap();
    misfit(Cpu.attend(&plan, &problem, &q, &k, &v30).map(drop), "v");
    assert!(Cpu.attend(&plan, &problem, &q, &k, &v).is_ok());
}

/// The denoising schedule: an order is made once, reused on the next step's tensors, and its centroids start the
/// next refresh; an order without clusters or a head without tokens starts cold.
#[test]
fn orders_serve_later_calls() {
    let case = Case::new([2, 2, 2], [40, 700], 32);
    let (first, later) = (case.outliers(26).f32(), case.outliers(27).f32());
    let recipe = recipe("vc16-expcast");
    let plan = Plan::new(&first.problem(), &recipe, F32_LSE).unwrap();
    let made = run(&Cpu, &plan, &first.problem(), None).unwrap();
    let reused = run_on_order(&Cpu, &plan, &later.problem(), made.order.clone()).unwrap();
    let warm = run(&Cpu, &plan, &later.problem(), Some(&made.order)).unwrap();
    let exact = reference(&later.problem());
    for run in [&reused, &warm] {
        assert!(relative(&o(&run.output), &exact.o) < 0.05);
    }
    assert_eq!(reused.report.group, std::time::Duration::ZERO);
    assert!(warm.report.mean_share > reused.report.mean_share, "fresh means on fresh groups hold more");
    let sequence = common::recipe("vc16-expcast+order=sequence");
    let sequence = Plan::new(&first.problem(), &sequence, F32_LSE).unwrap();
    let no_clusters = Cpu.group(&sequence, &first.problem(), None).unwrap();
    let lens = [0, 700];
    let empty_head = Problem { kv_lens: Some(&lens), ..first.problem() };
    let no_tokens = Cpu.group(&plan, &empty_head, None).unwrap();
    for cold in [no_clusters, no_tokens] {
        assert!(Cpu.group(&plan, &later.problem(), Some(&cold)).is_ok());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() })]

    /// Any small valid problem under any recipe and order: no panic, finite, near the reference.
    #[test]
    fn any_small_problem_gives_a_finite_output_near_the_reference(
        (batch, kv_heads, group) in (1usize..3, 1usize..3, 1usize..4),
        (q_tokens, kv_tokens, dim) in (1usize..150, 1usize..300, 1usize..=96),
        (name, order) in (0..BOUNDS.len(), 0usize..4),
        (rotate_v, lse, output_f32) in any::<(bool, bool, bool)>(),
        (dtype, bshd, scale) in (0usize..3, any::<bool>(), prop::option::of(-0.25f32..0.25)),
        lens in prop::collection::vec(0.0f64..=1.0, 2),
        seed in any::<u64>(),
    ) {
        let case = Case::new([batch, group * kv_heads, kv_heads], [q_tokens, kv_tokens], dim);
        let layout = if bshd { Layout::Bshd } else { Layout::Bhsd };
        let tensors = case.normal(seed).tensors(DTYPES[dtype], layout);
        let lens: Vec<usize> = lens[..batch].iter().map(|x| (x * kv_tokens as f64) as usize).collect();
        let problem = Problem { scale, kv_lens: Some(&lens), ..tensors.problem() };
        let order = ["sequence", "kmeans", "rounded", "balanced"][order];
        let rotate_v = if rotate_v { "on" } else { "off" };
        let recipe = recipe(&format!("{}+order={order}+rotate-v={rotate_v}", BOUNDS[name].0));
        let output = if output_f32 { OutputType::F32 } else { OutputType::Input };
        let result = vc_attention::attend(&problem, &recipe, Options { output, lse }).unwrap();
        let got = values(&result.o.view());
        prop_assert!(got.iter().all(|x| x.is_finite()));
        prop_assert_eq!(result.lse.is_some(), lse);
        let wanted = reference(&problem);
        // Against the values, N(0, 1), as well as the output: a lone output near 0 has no bounded relative error.
        let distance = got.iter().zip(&wanted.o).map(|(a, b)| (a - b).powi(2)).sum::<f64>().sqrt();
        let norm = wanted.o.iter().map(|b| b * b).sum::<f64>().sqrt() + (got.len() as f64).sqrt();
        let error = distance / norm;
        let four_bits = recipe.bits_qk() == 4;
        prop_assert!(error < if four_bits { 0.4 } else { 0.2 }, "{} has {error:.3}", recipe.name);
        if name == 0 {
            let rounding = if output_f32 || dtype == 0 { 2e-6 } else { 4e-3 };
            prop_assert!(error < rounding, "{} has {error:.1e}", recipe.name);
        }
        for (got, wanted) in result.lse.iter().flatten().zip(&wanted.lse) {
            let same = f64::from(*got) == *wanted;
            prop_assert!(same || (f64::from(*got) - wanted).abs() < if four_bits { 1.5 } else { 0.5 }, "{}: LSE {got} for {wanted}", recipe.name);
        }
    }
}
