//! Rotary embedding by the tables of a call. The kernels turn q and k in f32, so their operands are, bit for bit, the CPU's
//! of f32 tensors that were turned before; and the output is as good as that of a call on tensors turned and stored in 16
//! bits, which is what a model without tables brings.

use vc_attention::backend::cuda::Grouping;
use vc_attention::recipe::QkFormat;
use vc_attention::{DType, Layout, NonFinite, Problem};

use crate::call::{OnGpu, Twin, Wanted, between};
use crate::common::{Case, Data, attend, o, recipe, reference, relative};
use crate::device::{Gpu, both};
use crate::inputs::{Gaps, Inputs};
use crate::{attention, fp4, rotary, stages};

/// A recipe for every format of Q and K.
const FORMATS: [&str; 4] = ["vc16-expcast", "vc8-fp8qk", "vc8", "vc4"];

/// Cosines and sines of q, those of k, `[tokens, head_dim / 2]` each; empty where a tensor is not turned.
type Tables = [Vec<f32>; 4];

fn tables(case: &Case) -> Tables {
    rotary::tables(case.q_tokens, case.kv_tokens, case.dim)
}

/// Values whose keys have a mean and loud channels, turned or not. The first query of every kv head has the largest element,
/// larger than any pair: position 0 leaves it as it is, so that the balance of E4M3, which looks at what is not turned, is
/// that of turned queries too.
fn values(case: &Case, seed: u64) -> Data {
    let mut data = case.outliers(seed);
    // Turned keys lose little of their variance to their mean.
    data.k.iter_mut().for_each(|x| *x *= 0.4);
    let group = case.q_heads / case.kv_heads * case.q_tokens * case.dim;
    data.q.iter_mut().step_by(group).for_each(|x| *x = 16.0);
    data
}

/// Inputs turned before the call, in f32.
fn turned_before(inputs: &Inputs, case: Case, [q_cos, q_sin, k_cos, k_sin]: &Tables) -> Data {
    Data {
        case,
        q: rotary::turned(&inputs.q.view(), q_cos, q_sin),
        k: rotary::turned(&inputs.k.view(), k_cos, k_sin),
        v: rotary::turned(&inputs.v.view(), &[], &[]),
    }
}

fn contiguous(data: &Data, dtype: DType) -> Inputs {
    Inputs::new(data, dtype, Layout::Bhsd, Gaps::None)
}

/// The output of a call with tables and that of a call on tensors turned and rounded before it. Rounding to 16 bits leaves
/// the recipe's error as it is and moves the output by about as much: on the CPU the errors differ by up to 7%, and the outputs
/// by up to .8 of the error (INT8 from bf16). A tensor that is not turned is an error of .3 and more, recipes are below .1.
fn check_outputs(case: &str, by_tables: &[f64], stored: &[f64], exact: &[f64]) {
    let [error, of_stored] = [by_tables, stored].map(|o| relative(o, exact));
    let between = relative(by_tables, stored);
    assert!(
        (error - of_stored).abs() <= 0.2 * of_stored && between <= 1.5 * of_stored,
        "{case}: error {error:.4} with tables, {of_stored:.4} turned before, {between:.4} between them"
    );
}

/// A call with tables against the CPU on tensors turned in f32, and against the GPU's own on tensors turned and rounded.
fn check(gpu: &Gpu, text: &str, inputs: &Inputs, case: Case, tables: &Tables, lens: Option<&[usize]>) {
    let recipe = recipe(text);
    let problem = Problem { kv_lens: lens, ..inputs.problem() };
    let call = OnGpu::new(gpu, &problem, &recipe, Wanted::default()).with_rope(tables);
    let result = call.run(Grouping::Cold);
    let (operands, name) = (call.operands(), format!("{text}, {:?}, {case:?}", problem.q.dtype()));
    let orders = call.orders(&operands);
    let grouped = orders.0.iter().all(|head| !head.order.is_sorted());
    assert_eq!(grouped, !text.ends_with("order=sequence"), "{name}: the order of the keys");

    let turned = turned_before(inputs, case, tables);
    let wide = contiguous(&turned, DType::F32);
    let wide = Problem { kv_lens: lens, ..wide.problem() };
    let exact = reference(&wide).o;
    let twin_problem = Problem { nonfinite: NonFinite::Propagate, ..wide };
    let twin = Twin::new(&twin_problem, &recipe, &orders);
    match recipe.qk {
        QkFormat::Nvfp4 => fp4::compare(&name, &twin, &operands),
        _ => stages::compare(&name, &twin, &operands, stages::format(&recipe)),
    }
    attention::check(&between(&result, &twin), 0.0, 100.0, &name);

    let stored = contiguous(&turned, problem.q.dtype());
    let stored = Problem { kv_lens: lens, ..stored.problem() };
    let stored = OnGpu::new(gpu, &stored, &recipe, Wanted::default()).run(Grouping::Cold);
    let [by_tables, stored] =
        [&result, &stored].map(|r| r.o.iter().map(|&x| f64::from(x)).collect::<Vec<_>>());
    check_outputs(&name, &by_tables, &stored, &exact);
}

/// Odd lengths, grouped queries, padded heads, strides, both orders. Of keys that do not count the angles are NaN.
#[test]
fn rope_in_every_format() {
    let cases = [
        (Case::new([2, 4, 2], [129, 1023], 128), Layout::Bhsd, Gaps::None, "k=7", None),
        (Case::new([1, 8, 2], [75, 301], 64), Layout::Bshd, Gaps::Some, "order=sequence", None),
        (Case::new([1, 3, 3], [257, 515], 96), Layout::Bhsd, Gaps::Some, "k=5", None),
        (Case::new([2, 2, 1], [70, 300], 72), Layout::Bshd, Gaps::None, "k=3", Some(&[251, 129][..])),
    ];
    both(|gpu| {
        for (i, (case, layout, gaps, order, lens)) in cases.into_iter().enumerate() {
            let mut tables = tables(&case);
            if let Some(most) = lens.and_then(|lens| lens.iter().max()) {
                tables[2..].iter_mut().for_each(|table| table[most * case.dim / 2..].fill(f32::NAN));
            }
            for (text, dtype) in
                FORMATS.into_iter().flat_map(|text| [(text, DType::Bf16), (text, DType::F16)])
            {
                let inputs = Inputs::new(&values(&case, 110 + i as u64), dtype, layout, gaps);
                check(gpu, &format!("{text}+{order}"), &inputs, case, &tables, lens);
            }
        }
    });
}

/// A small call in every format.
pub fn small(gpu: &Gpu) {
    let case = Case::new([1, 2, 1], [67, 131], 72);
    for (i, text) in FORMATS.into_iter().enumerate() {
        let inputs = contiguous(&values(&case, 140), [DType::Bf16, DType::F16][i % 2]);
        check(gpu, &format!("{text}+k=3"), &inputs, case, &tables(&case), None);
    }
}

/// A cache may hold keys that are turned already.
#[test]
fn rope_of_queries_or_keys_alone() {
    both(|gpu| {
        let case = Case::new([1, 4, 2], [131, 517], 128);
        let inputs = contiguous(&values(&case, 120), DType::Bf16);
        for text in FORMATS {
            for absent in [0..2, 2..4] {
                let mut tables = tables(&case);
                tables[absent].fill(Vec::new());
                check(gpu, &format!("{text}+k=4"), &inputs, case, &tables, None);
            }
        }
    });
}

/// The measure itself, without a GPU: the CPU's own result passes; no angle or another does not.
#[test]
fn outputs_notice_a_wrong_angle() {
    let case = Case::new([1, 4, 2], [301, 301], 64);
    let right = tables(&case);
    let [q_cos, q_sin, k_cos, k_sin] = right.clone();
    let none = Vec::new();
    // Every key by the angle of the next.
    let next = |table: &[f32]| [&table[case.dim / 2..], &table[..case.dim / 2]].concat();
    let wrong: [(&str, Tables); 5] = [
        ("queries are not turned", [none.clone(), none.clone(), k_cos.clone(), k_sin.clone()]),
        ("keys are not turned", [q_cos.clone(), q_sin.clone(), none.clone(), none]),
        ("cosines are sines", [q_cos.clone(), q_sin.clone(), k_sin.clone(), k_cos.clone()]),
        ("tables of q are those of k", [k_cos.clone(), k_sin.clone(), q_cos.clone(), q_sin.clone()]),
        ("a row further on", [q_cos, q_sin, next(&k_cos), next(&k_sin)]),
    ];
    for (text, dtype) in FORMATS.into_iter().flat_map(|text| [(text, DType::Bf16), (text, DType::F16)]) {
        let recipe = recipe(text);
        let inputs = contiguous(&values(&case, 130), dtype);
        let output = |data: &Data, dtype| o(&attend(&contiguous(data, dtype).problem(), &recipe));
        let turned = turned_before(&inputs, case, &right);
        let exact = reference(&contiguous(&turned, DType::F32).problem()).o;
        let stored = output(&turned, dtype);
        let passes = |data: &Data| {
            let by_tables = output(data, DType::F32);
            std::panic::catch_unwind(|| check_outputs(text, &by_tables, &stored, &exact)).is_ok()
        };
        assert!(passes(&turned), "{text}, {dtype:?}: the CPU's own result is refused");
        for (what, tables) in &wrong {
            assert!(!passes(&turned_before(&inputs, case, tables)), "{text}, {dtype:?}: {what}, unnoticed");
        }
    }
}
