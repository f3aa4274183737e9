//! `vc_attn` on the CPU against candle's own attention (matmul, softmax, matmul in f32) and, bit for bit, against
//! `vc_attention` called without candle.

#[path = "../../tests/common/mod.rs"]
mod common;

use candle_core::{D, DType, Device, Result, Tensor, Var};
use candle_nn::ops::softmax_last_dim;
use common::{Case, Data, Rng, recipe};
use vc_attention::grouping::KeptOrder;
use vc_attention::{Layout, Problem};
use vc_attention_candle::{
    Grouping, Options, Order, Recipe, VcAttention, supports, vc_attn, vc_attn_with_lse,
};

/// Odd lengths, head dimensions with and without padding, GQA and MQA.
const SHAPES: [Case; 9] = [
    Case::new([1, 1, 1], [113, 203], 128),
    Case::new([2, 1, 1], [239, 1], 64),
    Case::new([1, 2, 1], [1, 1], 128),
    Case::new([1, 2, 2], [799, 3], 80),
    Case::new([1, 4, 4], [130, 257], 96),
    Case::new([2, 4, 2], [129, 127], 112),
    Case::new([1, 5, 1], [64, 257], 72),
    Case::new([3, 2, 1], [33, 128], 40),
    Case::new([1, 1, 1], [300, 1024], 128),
];

/// Unit roundoff of the element types: what rounding the output adds to its relative error, at most.
const TYPES: [(DType, f64); 3] = [(DType::F32, 0.0), (DType::F16, 4.9e-4), (DType::BF16, 3.91e-3)];

/// Largest relative error against unquantized attention: the method's bounds of the main crate's tests/attention.rs,
/// half as much again as the largest measured there on like shapes and data. `exact` and candle both round in f32,
/// to 9e-7 there; together they may be this far apart.
const BOUNDS: [(&str, f64); 6] = [
    ("exact", 2e-6),
    ("fp8", 0.10),
    ("sage2", 0.055),
    ("vc8", 0.055),
    ("vc16", 0.053),
    ("vc16-expcast", 0.058),
];

/// q, k and v as (batch, seq, heads, head_dim), contiguous.
fn tensors(data: &Data, dtype: DType) -> Result<[Tensor; 3]> {
    let tensor = |x: &[f32], shape: [usize; 4]| {
        Tensor::from_slice(x, &shape, &Device::Cpu)?.transpose(1, 2)?.contiguous()?.to_dtype(dtype)
    };
    let (q, kv) = (data.case.q_shape(), data.case.kv_shape());
    Ok([tensor(&data.q, q)?, tensor(&data.k, kv)?, tensor(&data.v, kv)?])
}

/// Heads before tokens, every kv head repeated for the query heads that read it.
fn repeated(x: &Tensor, q_heads: usize) -> Result<Tensor> {
    let (batch, tokens, heads, dim) = x.dims4()?;
    let group = q_heads / heads;
    x.transpose(1, 2)?
        .unsqueeze(2)?
        .expand((batch, heads, group, tokens, dim))?
        .reshape((batch, q_heads, tokens, dim))
}

/// candle's attention in f32, and its log-sum-exp (batch, heads, seq_q). Every batch needs a valid key.
fn candles([q, k, v]: &[Tensor; 3], scale: f32, kv_lens: Option<&[usize]>) -> Result<(Tensor, Tensor)> {
    let heads = q.dim(2)?;
    let [q, k, v] = [q, k, v].map(|x| x.to_dtype(DType::F32).and_then(|x| repeated(&x, heads)));
    let (q, k, v) = (q?.contiguous()?, k?, v?);
    let mut scores = (q.matmul(&k.t()?.contiguous()?)? * f64::from(scale))?;
    if let Some(lens) = kv_lens {
        let (batch, tokens) = (scores.dim(0)?, scores.dim(D::Minus1)?);
        let mask = lens
            .iter()
            .flat_map(|&len| (0..tokens).map(move |t| if t < len { 0.0 } else { f32::NEG_INFINITY }));
        let mask = Tensor::from_iter(mask, &Device::Cpu)?.reshape((batch, 1, 1, tokens))?;
        scores = scores.broadcast_add(&mask)?;
    }
    let lse = scores.log_sum_exp(D::Minus1)?;
    let o = softmax_last_dim(&scores)?.matmul(&v.contiguous()?)?;
    Ok((o.transpose(1, 2)?.contiguous()?, lse))
}

fn values(x: &Tensor) -> Result<Vec<f64>> {
    x.flatten_all()?.to_dtype(DType::F64)?.to_vec1()
}

fn relative(got: &Tensor, wanted: &Tensor) -> Result<f64> {
    assert_eq!(got.dims(), wanted.dims());
    Ok(common::relative(&values(got)?, &values(wanted)?))
}

fn same(a: &Tensor, b: &Tensor) -> Result<bool> {
    let bits = |x: &Tensor| -> Result<Vec<u64>> { Ok(values(x)?.iter().map(|x| x.to_bits()).collect()) };
    Ok(a.dims() == b.dims() && a.dtype() == b.dtype() && bits(a)? == bits(b)?)
}

fn scale(case: &Case) -> f32 {
    1.0 / (case.dim as f32).sqrt()
}

fn options(text: &str) -> Options {
    Options::new(recipe(text))
}

#[test]
fn every_recipe_is_within_its_error_of_candles_attention() -> Result<()> {
    for (name, bound) in BOUNDS {
        for (i, case) in SHAPES.iter().enumerate() {
            for (dtype, roundoff) in TYPES {
                let data = if i % 2 == 0 { case.normal(i as u64) } else { case.outliers(i as u64) };
                let [q, k, v] = tensors(&data, dtype)?;
                let got = vc_attn(&q, &k, &v, scale(case), &options(name))?;
                assert!(got.dtype() == dtype && got.is_contiguous());
                let (wanted, _) = candles(&[q, k, v], scale(case), None)?;
                let error = relative(&got, &wanted)?;
                assert!(error <= bound + roundoff, "{name}, {dtype:?}, {case:?}: {error:.2e}");
            }
        }
    }
    Ok(())
}

#[test]
fn the_bits_are_those_of_vc_attention_without_candle() -> Result<()> {
    let types = [
        (DType::F32, vc_attention::DType::F32),
        (DType::F16, vc_attention::DType::F16),
        (DType::BF16, vc_attention::DType::Bf16),
    ];
    let case = Case::new([2, 4, 2], [41, 150], 48);
    for recipe in Recipe::all() {
        for (seed, (dtype, plain_dtype)) in types.into_iter().enumerate() {
            let data = case.outliers(seed as u64);
            let [q, k, v] = tensors(&data, dtype)?;
            let (got, got_lse) = vc_attn_with_lse(&q, &k, &v, -0.2, &Options::new(recipe.clone()))?;
            let plain = data.tensors(plain_dtype, Layout::Bhsd);
            let problem = Problem { scale: Some(-0.2), ..plain.problem() };
            let wanted = vc_attention::Options { lse: true, ..Default::default() };
            let wanted = vc_attention::attend(&problem, &recipe, wanted).expect("valid");
            let bits = |x: Vec<f64>| x.into_iter().map(f64::to_bits).collect::<Vec<_>>();
            let heads_first = got.transpose(1, 2)?.contiguous()?;
            assert_eq!(bits(values(&heads_first)?), bits(common::o(&wanted)), "{}, {dtype:?}", recipe.name);
            assert_eq!(got_lse.dims(), [2, 4, 41]);
            let lse = common::lse(&wanted).iter().map(|&x| f64::from(x)).collect();
            assert_eq!(bits(values(&got_lse)?), bits(lse), "{}, {dtype:?}", recipe.name);
        }
    }
    Ok(())
}

#[test]
fn views_give_the_bits_of_contiguous_tensors() -> Result<()> {
    let case = Case::new([2, 4, 2], [41, 140], 48);
    let [q, k, v] = tensors(&case.outliers(4), DType::F16)?;
    for name in ["exact", "vc16-expcast", "sage2"] {
        let run = |q: &Tensor, k: &Tensor, v: &Tensor| vc_attn(q, k, v, 0.15, &options(name));
        let wanted = run(&q, &k, &v)?;
        let each = |view: &dyn Fn(&Tensor) -> Result<Tensor>| -> Result<bool> {
            let (q, k, v) = (view(&q)?, view(&k)?, view(&v)?);
            assert!(!q.is_contiguous() || q.layout().start_offset() > 0, "a view of the test is none");
            same(&run(&q, &k, &v)?, &wanted)
        };
        let junk = |x: &Tensor| x.ones_like()?.affine(0.0, 1e4);
        assert!(each(&|x| x.transpose(1, 2)?.contiguous()?.transpose(1, 2))?, "{name}: heads before tokens");
        assert!(each(&|x| x.t()?.contiguous()?.t())?, "{name}: channels apart");
        assert!(
            each(&|x| Tensor::cat(&[&junk(x)?, x, &junk(x)?], 1)?.narrow(1, x.dim(1)?, x.dim(1)?))?,
            "{name}: part of the tokens"
        );
        assert!(
            each(&|x| Tensor::cat(&[&junk(x)?, x], 0)?.narrow(0, x.dim(0)?, x.dim(0)?))?,
            "{name}: part of the batch"
        );
        assert!(
            each(&|x| Tensor::cat(&[&junk(x)?, x, &junk(x)?], 3)?.narrow(3, x.dim(3)?, x.dim(3)?))?,
            "{name}: part of a packed projection"
        );
        let one = (k.narrow(2, 1, 1)?, v.narrow(2, 1, 1)?);
        let twice = (Tensor::cat(&[&one.0, &one.0], 2)?, Tensor::cat(&[&one.1, &one.1], 2)?);
        let shared = (one.0.expand(k.dims())?, one.1.expand(v.dims())?);
        assert!(same(&run(&q, &shared.0, &shared.1)?, &run(&q, &twice.0, &twice.1)?)?, "{name}: broadcast");
    }
    Ok(())
}

#[test]
fn keys_beyond_their_length_take_part_in_nothing() -> Result<()> {
    let case = Case::new([3, 4, 2], [70, 200], 64);
    let [q, k, v] = tensors(&case.outliers(5), DType::F32)?;
    let lens = [200, 130, 1];
    for (name, bound) in BOUNDS {
        let given = options(name).with_kv_lens(lens.to_vec());
        let got = vc_attn(&q, &k, &v, scale(&case), &given)?;
        let (wanted, _) = candles(&[q.clone(), k.clone(), v.clone()], scale(&case), Some(&lens))?;
        assert!(relative(&got, &wanted)? <= bound, "{name}");
        // NaN in the padding must not show.
        let past = |x: &Tensor| -> Result<Tensor> {
            let rows = lens.iter().enumerate().map(|(b, &len)| {
                let valid = x.narrow(0, b, 1)?.narrow(1, 0, len)?;
                let nan = x.narrow(0, b, 1)?.narrow(1, 0, 200 - len)?.affine(f64::NAN, 0.0)?;
                Tensor::cat(&[valid, nan], 1)
            });
            Tensor::cat(&rows.collect::<Result<Vec<_>>>()?, 0)
        };
        let (k, v) = (past(&k)?, past(&v)?);
        assert!(values(&k)?.iter().any(|x| x.is_nan()));
        assert!(same(&vc_attn(&q, &k, &v, scale(&case), &given)?, &got)?, "{name}, NaN in the padding");
    }
    let none = options("vc16-expcast").with_kv_lens(vec![0, 200, 0]);
    let (o, lse) = vc_attn_with_lse(&q, &k, &v, scale(&case), &none)?;
    assert!(values(&o.get(0)?)?.iter().all(|&x| x == 0.0));
    assert!(values(&lse.get(2)?)?.iter().all(|&x| x == f64::NEG_INFINITY));
    assert!(values(&lse.get(1)?)?.iter().all(|x| x.is_finite()));
    Ok(())
}

#[test]
fn the_scale_may_be_zero_or_negative() -> Result<()> {
    let case = Case::new([1, 2, 1], [65, 129], 80);
    let tensors = tensors(&case.normal(6), DType::F32)?;
    let [q, k, v] = &tensors;
    for (name, bound) in BOUNDS {
        for scale in [-0.3, -0.1, 0.0, 0.2] {
            let got = vc_attn(q, k, v, scale, &options(name))?;
            let (wanted, _) = candles(&tensors, scale, None)?;
            let error = relative(&got, &wanted)?;
            assert!(error <= bound, "{name}, {scale}: {error:.2e}");
        }
    }
    Ok(())
}

#[test]
fn the_lse_is_candles_and_merges_two_halves_of_the_keys() -> Result<()> {
    let case = Case::new([2, 4, 2], [50, 301], 64);
    let tensors = tensors(&case.outliers(7), DType::F32)?;
    let [q, k, v] = &tensors;
    let (wanted, wanted_lse) = candles(&tensors, scale(&case), None)?;
    let run = |first: usize, tokens: usize, name: &str| {
        let (k, v) = (k.narrow(1, first, tokens)?, v.narrow(1, first, tokens)?);
        vc_attn_with_lse(q, &k, &v, scale(&case), &options(name))
    };
    // ExpCast's sums are up to 3.7% off (its bound on a row), E4M3 of exact exponentials sums those themselves.
    for (name, bound, lse_bound) in
        [("exact", 2e-6, 1e-5), ("vc16", 0.053, 0.01), ("vc16-expcast", 0.058, 0.05)]
    {
        let (o, lse) = run(0, 301, name)?;
        let distance = values(&(&lse - &wanted_lse)?)?.into_iter().fold(0.0, |a: f64, b| a.max(b.abs()));
        assert!(relative(&o, &wanted)? <= bound && distance <= lse_bound, "{name}: LSE {distance:.2e}");
        let (a, b) = (run(0, 150, name)?, run(150, 151, name)?);
        let whole = Tensor::stack(&[&a.1, &b.1], 0)?.log_sum_exp(0)?;
        let weight = |lse: &Tensor| (lse - &whole)?.exp()?.transpose(1, 2)?.unsqueeze(3);
        let merged = (a.0.broadcast_mul(&weight(&a.1)?)? + b.0.broadcast_mul(&weight(&b.1)?)?)?;
        assert!(relative(&merged, &wanted)? <= bound, "{name}, merged");
    }
    Ok(())
}

#[test]
fn an_order_is_kept_from_step_to_step() -> Result<()> {
    let case = Case::new([1, 4, 2], [30, 1000], 64);
    let [q, k, v] = tensors(&case.outliers(8), DType::BF16)?;
    let [_, _, other_v] = tensors(&case.outliers(9), DType::BF16)?;
    let attention = VcAttention::new(options("vc16-expcast"));
    let order = Order::new();
    let run = |v: &Tensor, grouping| attention.forward_on(&q, &k, v, 0.125, &order, grouping);
    let plain = |v: &Tensor| attention.forward(&q, &k, v, 0.125);

    let refused = run(&v, Grouping::Reuse).unwrap_err().to_string();
    assert!(refused.contains("kept before it is reused, given none"), "{refused}");
    // A warm start from nothing is a cold one.
    assert!(same(&run(&v, Grouping::Warm)?, &plain(&v)?)?);
    assert!(order.is_kept() && order.bytes() == 2 * (1000 + size_of::<KeptOrder>()));
    // The same values on their own order, then other values on it: not what they would be on theirs.
    assert!(same(&run(&v, Grouping::Reuse)?, &plain(&v)?)?);
    assert!(!same(&run(&other_v, Grouping::Reuse)?, &plain(&other_v)?)?);
    // A warm start ends elsewhere than a cold one, and is what is kept then.
    let warm = run(&other_v, Grouping::Warm)?;
    assert!(!same(&warm, &plain(&other_v)?)?);
    assert!(same(&run(&other_v, Grouping::Reuse)?, &warm)?);
    assert!(same(&run(&other_v, Grouping::Cold)?, &plain(&other_v)?)?);
    let (wanted, _) = candles(&[q.clone(), k.clone(), other_v.clone()], 0.125, None)?;
    assert!(relative(&warm, &wanted)? <= 0.058 + 3.91e-3);

    let short = |x: &Tensor| x.narrow(1, 0, 900);
    let misfit = attention.forward_on(&q, &short(&k)?, &short(&v)?, 0.125, &order, Grouping::Reuse);
    let misfit = misfit.unwrap_err().to_string();
    assert!(misfit.contains("another shape"), "{misfit}");
    let lens = VcAttention::new(options("vc16-expcast").with_kv_lens(vec![900]));
    assert!(lens.forward_on(&q, &k, &v, 0.125, &order, Grouping::Reuse).is_err());
    // A warm start on another shape is a cold one.
    let warm = attention.forward_on(&q, &short(&k)?, &short(&v)?, 0.125, &order, Grouping::Warm)?;
    assert!(same(&warm, &attention.forward(&q, &short(&k)?, &short(&v)?, 0.125)?)?);
    assert_eq!(order.bytes(), 2 * (900 + size_of::<KeptOrder>()));
    order.clear();
    assert!(!order.is_kept() && order.bytes() == 0 && run(&v, Grouping::Reuse).is_err());

    // Orders that come from no clusters have nothing to keep, and reusing them is no error.
    let sequence = VcAttention::new(options("vc16-expcast+order=sequence"));
    let reused = sequence.forward_on(&q, &k, &v, 0.125, &order, Grouping::Reuse)?;
    assert!(same(&reused, &sequence.forward(&q, &k, &v, 0.125)?)? && !order.is_kept());
    Ok(())
}

#[test]
fn the_grid_gives_the_cube_order() -> Result<()> {
    let case = Case::new([1, 2, 2], [20, 512], 64);
    let data = case.outliers(10);
    let [q, k, v] = tensors(&data, DType::F32)?;
    let cube = options("vc16-expcast+order=cube");
    let missing = vc_attn(&q, &k, &v, 0.125, &cube).unwrap_err().to_string();
    assert!(missing.starts_with("vc_attn: option `grid`"), "{missing}");
    let got = vc_attn(&q, &k, &v, 0.125, &cube.clone().with_grid([8, 8, 8]))?;
    let plain = data.f32();
    let problem = Problem { scale: Some(0.125), grid: Some([8, 8, 8]), ..plain.problem() };
    let wanted = vc_attention::attend(&problem, &cube.recipe, Default::default()).expect("valid");
    assert_eq!(values(&got.transpose(1, 2)?.contiguous()?)?, common::o(&wanted));
    assert!(!same(&got, &vc_attn(&q, &k, &v, 0.125, &options("vc16-expcast+order=sequence"))?)?);
    Ok(())
}

#[test]
fn what_is_not_finite_shows_where_it_belongs() -> Result<()> {
    let case = Case::new([1, 4, 2], [20, 50], 64);
    let mut data = case.normal(11);
    let wanted = {
        let [q, k, v] = tensors(&data, DType::F32)?;
        vc_attn(&q, &k, &v, 0.125, &Options::default())?
    };
    // Query head 1, token 7.
    data.q[(20 + 7) * 64 + 3] = f32::NAN;
    let [q, k, v] = tensors(&data, DType::F32)?;
    let got = vc_attn(&q, &k, &v, 0.125, &Options::default())?;
    for token in 0..20 {
        for head in 0..4 {
            let row = |x: &Tensor| values(&x.get(0)?.get(token)?.get(head)?);
            if (token, head) == (7, 1) {
                assert!(row(&got)?.iter().all(|x| x.is_nan()));
            } else {
                assert_eq!(row(&got)?, row(&wanted)?, "token {token}, head {head}");
            }
        }
    }
    // A key of kv head 1: query heads 2 and 3.
    data.q[(20 + 7) * 64 + 3] = 0.5;
    data.k[(50 + 9) * 64] = f32::INFINITY;
    let [q, k, v] = tensors(&data, DType::F32)?;
    let got = vc_attn(&q, &k, &v, 0.125, &Options::default())?;
    assert!(values(&got.narrow(2, 0, 2)?)?.iter().all(|x| x.is_finite()));
    assert!(values(&got.narrow(2, 2, 2)?)?.iter().all(|x| x.is_nan()));
    Ok(())
}

#[test]
fn a_handle_tells_what_its_last_call_saw() -> Result<()> {
    let case = Case::new([1, 2, 2], [64, 128], 64);
    let [q, k, v] = tensors(&case.normal(12), DType::F32)?;
    let attention = VcAttention::new(Options::default());
    assert!(attention.observed()?.is_none());
    attention.check()?;
    attention.forward(&q, &k, &v, 0.125)?;
    let seen = attention.clone().observed()?.expect("a call was made");
    assert!(seen.max_score > 1.0 && seen.max_score < 512.0 && seen.f32_fallbacks == 0, "{seen:?}");
    assert!(seen.mean_share.is_some_and(|share| share > 0.0 && share < 1.0), "{seen:?}");
    // Scores of hundreds of nats leave f16: the CPU runs those heads in f32.
    let (tall, steep) = ((&q * 20.0)?, (&k * 20.0)?);
    let o = attention.forward(&tall, &steep, &v, 0.125)?;
    let seen = attention.observed()?.expect("a call was made");
    assert!(seen.f32_fallbacks == 2 && !seen.out_of_range, "{seen:?}");
    attention.check()?;
    let (wanted, _) = candles(&[tall, steep, v.clone()], 0.125, None)?;
    assert!(relative(&o, &wanted)? <= 0.1);
    attention.free_workspace();
    vc_attention_candle::free_workspaces();
    Ok(())
}

#[test]
fn bad_input_says_what_is_wrong() -> Result<()> {
    let zeros = |shape: &[usize], dtype| Tensor::zeros(shape, dtype, &Device::Cpu);
    let q = zeros(&[2, 10, 4, 32], DType::F32)?;
    let k = zeros(&[2, 20, 2, 32], DType::F32)?;
    let given = Options::default();
    let message = |q: &Tensor, k: &Tensor, v: &Tensor, scale: f32, options: &Options| {
        vc_attn(q, k, v, scale, options).unwrap_err().to_string()
    };
    let cases: [(&str, String); 18] = [
        (
            "q must have the shape (batch, seq, heads, head_dim), not [10, 4, 32]",
            message(&q.get(0)?, &k, &k, 1.0, &given),
        ),
        ("v must have the shape", message(&q, &k, &k.unsqueeze(0)?, 1.0, &given)),
        (
            "k must have the element type of q, F32, not F16",
            message(&q, &k.to_dtype(DType::F16)?, &k, 1.0, &given),
        ),
        (
            "v must have the element type of q, F32, not BF16",
            message(&q, &k, &k.to_dtype(DType::BF16)?, 1.0, &given),
        ),
        (
            "q, k and v must be f32, f16 or bf16, not U32",
            message(&zeros(&[2, 10, 4, 32], DType::U32)?, &k, &k, 1.0, &given),
        ),
        (
            "tensor `k`: expected batch 2 and head_dim 32 as in q, given shape [2, 2, 20, 16]",
            message(&q, &k.narrow(3, 0, 16)?, &k, 1.0, &given),
        ),
        (
            "tensor `k`: expected batch 2 and head_dim 32 as in q",
            message(&q, &k.narrow(0, 0, 1)?, &k, 1.0, &given),
        ),
        (
            "tensor `k`: expected a number of heads that divides q's 3, given 2 heads (axes: batch, heads, tokens, \
             head_dim)",
            message(&q.narrow(2, 0, 3)?, &k, &k, 1.0, &given),
        ),
        (
            "tensor `v`: expected the shape of k [2, 2, 20, 32]",
            message(&q, &k, &k.narrow(1, 0, 19)?, 1.0, &given),
        ),
        ("tensor `k`: expected no empty axis", message(&q, &k.narrow(1, 0, 0)?, &k, 1.0, &given)),
        (
            "tensor `q`: expected head_dim of at most 256",
            message(&zeros(&[1, 1, 1, 257], DType::F32)?, &k, &k, 1.0, &given),
        ),
        ("option `scale`: expected a finite number, given NaN", message(&q, &k, &k, f32::NAN, &given)),
        (
            "tensor `kv_lens`: expected one length for each of 2 batches, given 1",
            message(&q, &k, &k, 1.0, &given.clone().with_kv_lens(vec![3])),
        ),
        (
            "tensor `kv_lens`: expected lengths of at most 20, given length 21",
            message(&q, &k, &k, 1.0, &given.clone().with_kv_lens(vec![3, 21])),
        ),
        (
            "option `grid`: expected a grid [t, h, w] whose product is the 20 key tokens",
            message(&q, &k, &k, 1.0, &given.clone().with_grid([2, 3, 4])),
        ),
        (
            "recipe `both`",
            message(&q, &k, &k, 1.0, &{
                // Centring Q needs f32 scores.
                Options::new(Recipe { name: "both".into(), center_q: true, ..Recipe::default_for_cpu() })
            }),
        ),
        (
            "the number of clusters `k` is 1 to 1024, given 5000",
            message(&q, &k, &k, 1.0, &{
                let mut recipe = Recipe::default_for_cpu();
                recipe.grouping.clusters = Some(5000);
                Options::new(recipe)
            }),
        ),
        (
            "tensor `q`: expected no empty axis",
            message(&zeros(&[2, 10, 0, 32], DType::F32)?, &k, &k, 1.0, &given),
        ),
    ];
    for (wanted, message) in cases {
        assert!(message.starts_with("vc_attn: ") && message.contains(wanted), "{wanted}\n{message}");
    }
    Ok(())
}

#[test]
fn gradients_are_refused_not_lost() -> Result<()> {
    let data = Case::new([1, 1, 1], [8, 8], 32).normal(13);
    let [q, k, v] = tensors(&data, DType::F32)?;
    let q = Var::from_tensor(&q)?;
    let loss = vc_attn(q.as_tensor(), &k, &v, 0.2, &Options::default())?.sum_all()?;
    let message = loss.backward().unwrap_err().to_string();
    assert!(message.contains("vc-attn"), "{message}");
    Ok(())
}

#[test]
fn a_model_can_ask_before_it_calls() {
    let cpu = Device::Cpu;
    for recipe in Recipe::all() {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            supports(&cpu, dtype, 128, &recipe).unwrap();
        }
    }
    let recipe = Recipe::default_for_cpu();
    let reason = |dtype, dim, recipe: &Recipe| supports(&cpu, dtype, dim, recipe).unwrap_err().to_string();
    assert!(reason(DType::U8, 64, &recipe).contains("not U8"));
    assert!(reason(DType::F32, 257, &recipe).contains("head_dim of at most 256"));
    assert!(reason(DType::F32, 0, &recipe).contains("no empty axis"));
    let broken = Recipe { center_q: true, ..recipe };
    assert!(reason(DType::F32, 64, &broken).contains("recipe `vc16-expcast`"));
}

#[test]
fn threads_may_share_a_handle() -> Result<()> {
    let attention = VcAttention::new(Options::default());
    let inputs = (0..4).map(|seed| {
        let case = Case::new([1, 2, 2], [40 + 10 * Rng(seed).below(3), 200], 64);
        tensors(&case.outliers(seed), DType::F32)
    });
    let inputs = inputs.collect::<Result<Vec<_>>>()?;
    let alone =
        inputs.iter().map(|[q, k, v]| attention.forward(q, k, v, 0.125)).collect::<Result<Vec<_>>>()?;
    let together: Vec<_> = std::thread::scope(|scope| {
        let run = |[q, k, v]: &[Tensor; 3]| attention.forward(q, k, v, 0.125);
        let threads: Vec<_> = inputs.iter().map(|x| scope.spawn(move || run(x))).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    });
    for (alone, together) in alone.iter().zip(together) {
        assert!(same(alone, &together?)?);
    }
    Ok(())
}
