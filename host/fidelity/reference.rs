//! Attention in f64, from the definition: the yardstick of every error figure.

use rayon::prelude::*;

use crate::backend::cpu::{Matrix, Write, multiply};
use crate::problem::{Problem, Shape};

/// Query rows that share one pass over the keys.
const ROWS: usize = 64;

/// Output and log-sum-exp in f64.
#[derive(Clone, Debug, PartialEq)]
pub struct Reference {
    /// Attention output, row-major in (batch, q heads, q tokens, head_dim).
    pub o: Vec<f64>,
    /// Natural-log log-sum-exp of the scaled scores, [batch, q heads, q tokens].
    pub lse: Vec<f64>,
}

/// Unquantized attention of a valid problem in f64, O(tokens) memory a thread. A row without a valid key gives
/// o = 0 and lse = -inf.
pub fn attention(problem: &Problem, shape: &Shape) -> Reference {
    let (d, n) = (shape.head_dim, shape.q_tokens);
    let mut o = vec![0.0; shape.batch * shape.q_heads * n * d];
    let mut lse = vec![0.0; shape.batch * shape.q_heads * n];
    let scale = f64::from(problem.scale());
    for (index, (o, lse)) in o.chunks_exact_mut(n * d).zip(lse.chunks_exact_mut(n)).enumerate() {
        let (batch, head) = (index / shape.q_heads, index % shape.q_heads);
        let read = |view: &crate::tensor::TensorView, head, tokens| {
            view.read_head(batch, head, tokens).into_iter().map(f64::from).collect::<Vec<_>>()
        };
        let keys = problem.kv_len(batch);
        let kv_head = shape.kv_head(head);
        let operands = Operands {
            q: &read(&problem.q, head, n),
            k: &read(&problem.k, kv_head, keys),
            v: &read(&problem.v, kv_head, keys),
            qk_dim: d,
            v_dim: d,
        };
        attention_head(operands, scale, o, lse);
    }
    Reference { o, lse }
}

/// Operands of one head, row-major: q [tokens, qk_dim], k [keys, qk_dim], v [keys, v_dim].
#[derive(Clone, Copy, Debug)]
pub struct Operands<'a> {
    /// Queries.
    pub q: &'a [f64],
    /// Keys.
    pub k: &'a [f64],
    /// Values.
    pub v: &'a [f64],
    /// Channels of q and k.
    pub qk_dim: usize,
    /// Channels of v.
    pub v_dim: usize,
}

/// softmax(scale q k^T) v of one head into `o`, [tokens, v_dim], and `lse`, one a token.
pub fn attention_head(x: Operands, scale: f64, o: &mut [f64], lse: &mut [f64]) {
    let keys = x.v.len() / x.v_dim;
    let tiles = o.par_chunks_mut(ROWS * x.v_dim).zip(lse.par_chunks_mut(ROWS)).enumerate();
    tiles.for_each_init(
        || vec![0.0f64; ROWS * keys],
        |p, (tile, (o, lse))| {
            if keys == 0 {
                o.fill(0.0);
                lse.fill(f64::NEG_INFINITY);
                return;
            }
            let rows = lse.len();
            let q = Matrix::rows(&x.q[tile * ROWS * x.qk_dim..], x.qk_dim);
            multiply([rows, keys, x.qk_dim], p, keys, Write::Set, q, Matrix::rows(x.k, x.qk_dim).t());
            let mut sums = [0.0; ROWS];
            for ((p, lse), sum) in p.chunks_exact_mut(keys).zip(&mut *lse).zip(&mut sums) {
                p.iter_mut().for_each(|s| *s *= scale);
                let m = p.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                p.iter_mut().for_each(|s| *s = (*s - m).exp());
                *sum = p.iter().sum();
                *lse = m + sum.ln();
            }
            let v = Matrix::rows(x.v, x.v_dim);
            multiply([rows, x.v_dim, keys], o, x.v_dim, Write::Set, Matrix::rows(p, keys), v);
            for (o, sum) in o.chunks_exact_mut(x.v_dim).zip(&sums) {
                o.iter_mut().for_each(|o| *o /= sum);
            }
        },
    );
}
