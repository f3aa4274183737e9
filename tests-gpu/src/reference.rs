//! Attention in f64 on the quantized operands: exact softmax, and the kernel's own arithmetic emulated.

use half::f16;
use kernels_gpu::formats::e4m3;
use kernels_gpu::kernels::tiles::{HEAD_DIM, KEYS};
use rayon::prelude::*;

use crate::operands::{Operands, Problem, Variant};

/// Output `[q_heads][q][128]`, natural LSE and row max in code units of one way to compute.
#[derive(Clone, Default)]
#[allow(missing_docs)]
pub struct Outcome {
    pub out: Vec<f64>,
    pub lse: Vec<f64>,
    pub max: Vec<f64>,
}

/// ExpCast's addend before the max, exactly representable in f16.
const BETA: f64 = -0.484375;

/// One row's running sums.
struct Row {
    out: [f64; HEAD_DIM],
    sum: f64,
}

/// (exact softmax, emulated kernel).
pub fn attention(problem: &Problem, o: &Operands, variant: Variant) -> (Outcome, Outcome) {
    let s = problem.shape;
    let blocks = s.kv.div_ceil(KEYS);
    let rows: Vec<_> = (0..s.batch * s.q_heads * s.q)
        .into_par_iter()
        .map(|row| {
            let head = row / s.q;
            let kv_head = head / s.q_heads * s.kv_heads + head % s.q_heads / (s.q_heads / s.kv_heads);
            let len = problem.lens[head / s.q_heads];
            let q = &o.q[row * HEAD_DIM..][..HEAD_DIM];
            let scores: Vec<f64> = (0..len)
                .map(|t| {
                    let k = &o.k[(kv_head * s.kv + t) * HEAD_DIM..][..HEAD_DIM];
                    q.iter().zip(k).map(|(a, b)| a * b).sum()
                })
                .collect();
            let residual = |t: usize, c: usize| o.residual[(kv_head * s.kv + t) * HEAD_DIM + c];
            let mean = |j: usize, c: usize| o.means[(kv_head * blocks + j) * HEAD_DIM + c];

            let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let mut exact = Row { out: [0.0; HEAD_DIM], sum: 0.0 };
            for (t, s) in scores.iter().enumerate() {
                let w = ((s - top) / 8.0).exp2();
                exact.sum += w;
                for c in 0..HEAD_DIM {
                    exact.out[c] += w * (residual(t, c) + mean(t / KEYS, c));
                }
            }

            // The kernel: tile by tile under the running max of f16 scores, everything relative to 2^(shift / 8).
            let mut max = f64::NEG_INFINITY;
            let mut emulated = Row { out: [0.0; HEAD_DIM], sum: 0.0 };
            let mut shift = 0.0;
            for (j, tile) in scores.chunks(KEYS).enumerate() {
                let tile: Vec<f64> = tile.iter().map(|s| f16::from_f64(*s).to_f64()).collect();
                max = tile.iter().copied().fold(max, f64::max);
                // ExpCast rounds what it adds to the scores to f16; the max that the row agrees on follows from it.
                let (addend, new) = if variant.expcast {
                    let addend = f16::from_f64(BETA - max).to_f64();
                    (addend, BETA - addend)
                } else {
                    (8.0 - max / 8.0, max)
                };
                let alpha = if j == 0 { 0.0 } else { ((shift - new) / 8.0f64).exp2() };
                shift = new;
                emulated.sum *= alpha;
                emulated.out.iter_mut().for_each(|x| *x *= alpha);
                let (mut total, mut weights) = (0.0, Vec::with_capacity(KEYS));
                for s in &tile {
                    let (weight, mass) = if variant.expcast {
                        let code = (f16::from_f64(s + addend).to_f64() + 120.0).round_ties_even().max(0.0);
                        let weight = e4m3::decode(code as u8) as f64;
                        (weight, weight)
                    } else {
                        let p = (s / 8.0 + addend).exp2();
                        (e4m3::round(p as f32) as f64, p)
                    };
                    weights.push(weight);
                    total += mass;
                }
                emulated.sum += total;
                for c in 0..HEAD_DIM {
                    let product: f64 =
                        weights.iter().enumerate().map(|(t, w)| w * residual(j * KEYS + t, c)).sum();
                    emulated.out[c] += product + total * mean(j, c);
                }
            }
            let finish = |row: Row, lse: f64| {
                let scale = |c: usize| o.scale[kv_head * HEAD_DIM + c] as f64;
                let out =
                    std::array::from_fn(|c| if len == 0 { 0.0 } else { row.out[c] / row.sum * scale(c) });
                (out, lse)
            };
            let ln = |shift: f64, sum: f64| {
                if len == 0 { f64::NEG_INFINITY } else { (shift / 8.0 + sum.log2()) * std::f64::consts::LN_2 }
            };
            let lse = (ln(top, exact.sum), ln(shift - 64.0, emulated.sum));
            (finish(exact, lse.0), finish(emulated, lse.1), top, max)
        })
        .collect();
    let mut result = (Outcome::default(), Outcome::default());
    for (exact, emulated, top, max) in rows {
        let _: [f64; HEAD_DIM] = exact.0;
        result.0.out.extend(exact.0);
        result.0.lse.push(exact.1);
        result.0.max.push(top);
        result.1.out.extend(emulated.0);
        result.1.lse.push(emulated.1);
        result.1.max.push(max);
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::operands::Shape;
    use crate::report::rel_l2;

    /// The emulation is attention: off by what E4M3 probabilities cost and by no more.
    #[test]
    fn emulated_kernels_are_near_exact_softmax() {
        let shape = Shape { batch: 2, q_heads: 2, kv_heads: 1, q: 33, kv: 300 };
        let problem = Problem::random(shape, Some(vec![300, 190]), 1.0, 5);
        for (expcast, smooth, bound) in
            [(true, true, 0.03), (true, false, 0.03), (false, true, 0.01), (false, false, 0.015)]
        {
            let variant = Variant { e4m3_scores: false, expcast, smooth };
            let (exact, emulated) = attention(&problem, &problem.pack(variant), variant);
            let error = rel_l2(&emulated.out, &exact.out);
            assert!(error > 1e-4 && error < bound, "{variant:?}: {error}");
            let lse = exact.lse.iter().zip(&emulated.lse).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            assert!(lse < 0.03, "{variant:?}: LSE {lse}");
        }
    }
}
