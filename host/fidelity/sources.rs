//! Where an error comes from: the method or the kernel, the probabilities or the values.

use super::reference::{Operands, Reference, attention_head};
use crate::backend::Backend;
use crate::backend::cpu::Cpu;
use crate::error::Result;
use crate::plan::{Options, OutputType, Plan};
use crate::problem::Problem;
use crate::recipe::{Recipe, VFormat};
use crate::tensor::Elements;

/// Parts of the output error of a recipe, each as |part| / |o_ref| over the whole output.
///
/// o - o_q = (P - P_q) V + P_q (V - V_q) is the paper's Eq. 2; the same difference is also
/// (P - P_q) V_q + P (V - V_q). The two parts of a decomposition are nearly orthogonal, so their squares nearly
/// add up to the square of the whole. P_q V stands for what the kernel makes of unquantized values: where block
/// means are restored from row sums, P_q weighs the residual only.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ErrorSources {
    /// The whole: against unquantized attention in f64.
    pub method: f64,
    /// The kernel's share: against attention in f64 on the same dequantized operands (rounding of P, of the
    /// scores and of the sums).
    pub kernel: f64,
    /// |(P - P_q) V|, Eq. 2.
    pub probability: f64,
    /// |P_q (V - V_q)|, Eq. 2.
    pub value: f64,
    /// |(P - P_q) V_q|, the other decomposition.
    pub probability_on_quantized: f64,
    /// |P (V - V_q)|, the other decomposition.
    pub value_under_exact: f64,
}

/// Runs `recipe` on the CPU and takes its error apart. `reference` is the f64 attention of the same problem.
///
/// # Errors
/// When the input is bad.
pub fn error_sources(problem: &Problem, recipe: &Recipe, reference: &Reference) -> Result<ErrorSources> {
    let options = Options { output: OutputType::F32, lse: false };
    let plan = Plan::new(problem, recipe, options)?;
    let order = Cpu.group(&plan, problem, None)?;
    let q = Cpu.prepare_q(&plan, problem, &order)?;
    let k = Cpu.prepare_k(&plan, problem, &order, &q)?;
    let v = Cpu.prepare_v(&plan, problem, &order)?;
    let quantized = values(&Cpu.attend(&plan, problem, &q, &k, &v)?.o);

    // The same probabilities on unquantized values.
    let exact_v = Recipe { v: VFormat::F32, ..recipe.clone() };
    let exact_v = Plan::new(problem, &exact_v, options)?;
    let v_exact = Cpu.prepare_v(&exact_v, problem, &order)?;
    let pq_v = values(&Cpu.attend(&exact_v, problem, &q, &k, &v_exact)?.o);

    let shape = plan.shape;
    let (n, d) = (shape.q_tokens, shape.head_dim);
    let mut on_operands = vec![0.0; quantized.len()];
    let mut p_vq = vec![0.0; quantized.len()];
    let mut lse = vec![0.0; n];
    for index in 0..shape.batch * shape.q_heads {
        let at @ [batch, head] = [index / shape.q_heads, index % shape.q_heads];
        let x = Cpu.dequantized(&plan, at, &q, &k, &v);
        let operands = Operands { q: &x.q, k: &x.k, v: &x.v, qk_dim: x.qk_dim, v_dim: d };
        attention_head(operands, 1.0, &mut on_operands[index * n * d..][..n * d], &mut lse);

        // Exact probabilities on the quantized values: the keys follow the values' order.
        let kv_head = shape.kv_head(head);
        let order = &order.0[batch * shape.kv_heads + kv_head].order;
        let mut row = vec![0.0f32; d];
        let mut read = |view: &crate::tensor::TensorView, head, token| {
            view.read_row(batch, head, token, &mut row);
            row.iter().map(|&x| f64::from(x)).collect::<Vec<_>>()
        };
        let exact_q: Vec<f64> = (0..n).flat_map(|token| read(&problem.q, head, token)).collect();
        let exact_k: Vec<f64> =
            order.iter().flat_map(|&token| read(&problem.k, kv_head, token as usize)).collect();
        let operands = Operands { q: &exact_q, k: &exact_k, v: &x.v, qk_dim: d, v_dim: d };
        attention_head(operands, f64::from(plan.scale), &mut p_vq[index * n * d..][..n * d], &mut lse);
    }
    let exact = &reference.o;
    let norm = distance(exact, &vec![0.0; exact.len()]);
    let relative = |a: &[f64], b: &[f64]| if norm == 0.0 { distance(a, b) } else { distance(a, b) / norm };
    Ok(ErrorSources {
        method: relative(exact, &quantized),
        kernel: relative(&on_operands, &quantized),
        probability: relative(exact, &pq_v),
        value: relative(&pq_v, &quantized),
        probability_on_quantized: relative(&p_vq, &quantized),
        value_under_exact: relative(exact, &p_vq),
    })
}

fn values(o: &crate::tensor::Tensor) -> Vec<f64> {
    match o.view().elements() {
        Elements::F32(x) => x.iter().map(|&x| f64::from(x)).collect(),
        Elements::F16(x) => x.iter().map(|x| x.to_f64()).collect(),
        Elements::Bf16(x) => x.iter().map(|x| x.to_f64()).collect(),
    }
}

fn distance(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| (a - b) * (a - b)).sum::<f64>().sqrt()
}
