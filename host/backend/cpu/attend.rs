//! The attention loop on one tile of queries: online softmax over blocks of keys (paper Eqs. 1 and 6).
//!
//! Scores are in code units (8 log2 e times the scaled score) throughout: exp(s - m) is 2^((s - m) / 8), and
//! ExpCast reads them as they are.

use kernels_gpu::formats::{e4m3, f16, nvfp4};
use kernels_gpu::numerics::{exp2::exp2, expcast, units};

use super::gemm::{Matrix, Write, gemm};
use super::prepare::{BLOCK, KHead, QHead, VHead};
use super::simd::vectorized;
use crate::plan::Plan;
use crate::recipe::{Encoder, Probabilities, RowSums, ScoreType};

/// Query rows of a tile: as many as share a block mean of Q.
pub const TILE: usize = BLOCK;

/// Buffers of one thread.
pub struct Workspace {
    /// Scores, then probabilities, [TILE, BLOCK].
    p: Vec<f32>,
    /// One k step of the scores, [TILE, BLOCK].
    step: Vec<f32>,
    /// Numerator, [TILE, v_dim].
    numerator: Vec<f32>,
}

impl Workspace {
    /// Buffers for a plan.
    pub fn new(plan: &Plan) -> Self {
        Self {
            p: vec![0.0; TILE * BLOCK],
            step: vec![0.0; TILE * BLOCK],
            numerator: vec![0.0; TILE * plan.v_dim],
        }
    }
}

/// State of the online softmax of a tile.
struct Rows {
    /// Running maximum m, in code units.
    max: [f32; TILE],
    /// Normalizer l, in units of the probabilities' peak.
    sum: [f32; TILE],
    /// exp(m - m') of the last block.
    alpha: [f32; TILE],
    /// Row sums r of the last block, in the same units as l.
    block_sum: [f32; TILE],
}

/// Result of a tile.
pub struct TileStats {
    /// LSE of every row without the K mean's term, natural log.
    pub lse: [f32; TILE],
    /// Largest |row maximum|, in code units.
    pub max_score: f32,
}

/// Attention of the query rows `first..first + rows` of a head over all its keys; writes [rows, v_dim] to `out`.
#[allow(clippy::too_many_arguments, reason = "the operands of one tile")]
pub fn attend_tile(
    plan: &Plan,
    scores: ScoreType,
    q: &QHead,
    k: &KHead,
    v: &VHead,
    first: usize,
    out: &mut [f32],
    ws: &mut Workspace,
) -> TileStats {
    let dim = plan.v_dim;
    let rows = out.len() / dim;
    let keys = k.codes.len() / plan.qk_dim;
    let numerator = &mut ws.numerator[..rows * dim];
    numerator.fill(0.0);
    let mut state =
        Rows { max: [f32::NEG_INFINITY; TILE], sum: [0.0; TILE], alpha: [0.0; TILE], block_sum: [0.0; TILE] };
    for start in (0..keys).step_by(BLOCK) {
        let valid = BLOCK.min(keys - start);
        score_block(plan, scores, q, k, [first, rows], [start, valid], &mut ws.p, &mut ws.step);
        softmax_block(plan, scores, rows, valid, &mut ws.p, &mut state);
        if start > 0 {
            rescale(numerator, dim, &state.alpha);
        }
        gemm(
            [rows, dim, valid],
            numerator,
            dim,
            Write::Add,
            Matrix::rows(&ws.p, BLOCK),
            Matrix::rows(&v.codes[start * dim..], dim),
        );
        if plan.recipe.demean {
            restore_mean(numerator, &state.block_sum[..rows], &v.means[start / BLOCK * dim..][..dim], plan);
        }
    }
    let peak = peak(&plan.recipe.p);
    let mut stats = TileStats { lse: [f32::NEG_INFINITY; TILE], max_score: 0.0 };
    for (i, (row, a)) in out.chunks_exact_mut(dim).zip(numerator.chunks_exact(dim)).enumerate() {
        if keys == 0 {
            row.fill(0.0);
            continue;
        }
        let l = state.sum[i];
        row.iter_mut().zip(a.iter().zip(&v.scale)).for_each(|(o, (a, s))| *o = a / l * s);
        stats.lse[i] = state.max[i] * units::NATS + (l / peak).ln();
        // A NaN must win over every number here.
        let m = state.max[i].abs();
        stats.max_score = if m <= stats.max_score { stats.max_score } else { m };
    }
    stats
}

/// S of one tile and one block, in code units, into `s` [TILE, BLOCK].
#[allow(clippy::too_many_arguments, reason = "the operands of one tile")]
fn score_block(
    plan: &Plan,
    scores: ScoreType,
    q: &QHead,
    k: &KHead,
    [first, rows]: [usize; 2],
    [start, valid]: [usize; 2],
    s: &mut [f32],
    step: &mut [f32],
) {
    let dim = plan.qk_dim;
    let (a, b) = (&q.codes[first * dim..], &k.codes[start * dim..]);
    let Some(channels) = plan.rounding_step(scores) else {
        gemm([rows, valid, dim], s, BLOCK, Write::Set, Matrix::rows(a, dim), Matrix::rows(b, dim).t());
        return apply_factors(plan, q, k, [first, rows], [start, valid], s);
    };
    // f16 accumulators: the Tensor Core rounds to f16 after every instruction along the channels.
    for c in (0..dim).step_by(channels) {
        let into = if c == 0 { &mut *s } else { &mut *step };
        gemm(
            [rows, valid, channels],
            into,
            BLOCK,
            Write::Set,
            Matrix::rows(&a[c..], dim),
            Matrix::rows(&b[c..], dim).t(),
        );
        let step = &*step;
        vectorized(|| {
            if c == 0 {
                s[..rows * BLOCK].iter_mut().for_each(|s| *s = f16::round(*s));
            } else {
                s[..rows * BLOCK].iter_mut().zip(step).for_each(|(s, t)| *s = f16::round(*s + t));
            }
        });
    }
}

/// Scales of Q and K, and the products of Q's block mean with the unquantized keys.
fn apply_factors(
    plan: &Plan,
    q: &QHead,
    k: &KHead,
    [first, rows]: [usize; 2],
    [start, valid]: [usize; 2],
    s: &mut [f32],
) {
    let dim = plan.qk_dim;
    if q.factor.is_empty() {
        return;
    }
    let keys = &k.factor[start..][..valid];
    vectorized(|| {
        for (s, &f) in s.chunks_exact_mut(BLOCK).zip(&q.factor[first..][..rows]) {
            s.iter_mut().zip(keys).for_each(|(s, k)| *s *= f * k);
        }
    });
    if plan.recipe.center_q {
        let units = plan.scale * units::PER_NAT;
        let mean = &q.block_means[first / TILE * dim..][..dim];
        let mut offset = [0.0f32; BLOCK];
        for (offset, k) in offset.iter_mut().zip(k.unquantized[start * dim..].chunks_exact(dim).take(valid)) {
            *offset = units * mean.iter().zip(k).map(|(q, k)| q * k).sum::<f32>();
        }
        vectorized(|| {
            for s in s.chunks_exact_mut(BLOCK).take(rows) {
                s.iter_mut().zip(&offset).for_each(|(s, o)| *s += o);
            }
        });
    }
}

/// Value of the row maximum in the format of the probabilities.
fn peak(p: &Probabilities) -> f32 {
    match *p {
        Probabilities::F32 => 1.0,
        Probabilities::E4m3 { peak } => peak,
        Probabilities::ExpCast { .. } => e4m3::decode(expcast::MAX_CODE),
        Probabilities::Nvfp4 => e4m3::MAX * 6.0,
    }
}

/// Scores of one block to probabilities, in place; updates maxima, rescale factors and sums.
fn softmax_block(plan: &Plan, scores: ScoreType, rows: usize, valid: usize, s: &mut [f32], state: &mut Rows) {
    let (format, row_sums) = (plan.recipe.p, plan.recipe.row_sums);
    let peak = peak(&format);
    vectorized(|| {
        for (i, row) in s.chunks_exact_mut(BLOCK).take(rows).enumerate() {
            let (row, padding) = row.split_at_mut(valid);
            padding.fill(0.0);
            let old = state.max[i];
            let m = lanes(row, old, f32::max);
            state.max[i] = m;
            state.alpha[i] = exp2((old - m) * 0.125);
            let exact = |s: f32| exp2((s - m) * 0.125) * peak;
            // The exact sum is needed before the scores are overwritten.
            let exact_sum = match row_sums {
                RowSums::Exact => Some(lanes_map(row, exact)),
                RowSums::Decoded => None,
            };
            match format {
                Probabilities::F32 => row.iter_mut().for_each(|s| *s = exact(*s)),
                Probabilities::E4m3 { .. } => row.iter_mut().for_each(|s| *s = e4m3::round(exact(*s))),
                Probabilities::ExpCast { beta, encoder: Encoder::F32 } => {
                    row.iter_mut().for_each(|s| *s = expcast::value_from_units(*s - m, beta));
                }
                Probabilities::ExpCast { beta, encoder: Encoder::Packed } if scores == ScoreType::F16 => {
                    let n = expcast::packed_bias(m, beta);
                    row.iter_mut().for_each(|s| *s = expcast::packed_value(*s, n));
                }
                // f32 scores are packed after the maximum was subtracted, so their size does not matter.
                Probabilities::ExpCast { beta, encoder: Encoder::Packed } => {
                    row.iter_mut().for_each(|s| *s = expcast::packed_value(f16::round(*s - m), beta));
                }
                Probabilities::Nvfp4 => {
                    row.iter_mut().for_each(|s| *s = exact(*s));
                    let (blocks, tail) = row.as_chunks_mut::<{ nvfp4::BLOCK }>();
                    blocks.iter_mut().for_each(|block| nvfp4::round_block(block, 1.0));
                    if !tail.is_empty() {
                        let mut block = [0.0; nvfp4::BLOCK];
                        block[..tail.len()].copy_from_slice(tail);
                        nvfp4::round_block(&mut block, 1.0);
                        tail.copy_from_slice(&block[..tail.len()]);
                    }
                }
            }
            let r = exact_sum.unwrap_or_else(|| lanes_map(row, |p| p));
            state.block_sum[i] = r;
            state.sum[i] = state.sum[i] * state.alpha[i] + r;
        }
    });
}

/// Reduction with eight independent accumulators, which the vectorizer needs for f32.
#[inline(always)]
fn lanes(x: &[f32], init: f32, f: impl Fn(f32, f32) -> f32) -> f32 {
    let (chunks, tail) = x.as_chunks::<8>();
    let mut acc = [init; 8];
    for chunk in chunks {
        acc.iter_mut().zip(chunk).for_each(|(a, &x)| *a = f(*a, x));
    }
    tail.iter().chain(&acc).fold(init, |a, &x| f(a, x))
}

/// Sum of `f` over a row with eight independent accumulators.
#[inline(always)]
fn lanes_map(x: &[f32], f: impl Fn(f32) -> f32) -> f32 {
    let (chunks, tail) = x.as_chunks::<8>();
    let mut acc = [0.0f32; 8];
    for chunk in chunks {
        acc.iter_mut().zip(chunk).for_each(|(a, &x)| *a += f(x));
    }
    tail.iter().map(|&x| f(x)).chain(acc).sum()
}

fn rescale(numerator: &mut [f32], dim: usize, alpha: &[f32; TILE]) {
    vectorized(|| {
        for (row, &alpha) in numerator.chunks_exact_mut(dim).zip(alpha) {
            if alpha != 1.0 {
                row.iter_mut().for_each(|a| *a *= alpha);
            }
        }
    });
}

/// A <- A + r mu^T (paper Eq. 6). At 8 bit the row sums go through an f16 operand, as on the Tensor Core; at
/// 4 bit they exceed its range and stay f32.
fn restore_mean(numerator: &mut [f32], row_sums: &[f32], mean: &[f32], plan: &Plan) {
    let narrow = plan.recipe.bits_pv() == 8;
    vectorized(|| {
        for (row, &r) in numerator.chunks_exact_mut(mean.len()).zip(row_sums) {
            let r = if narrow { f16::round(r) } else { r };
            row.iter_mut().zip(mean).for_each(|(a, m)| *a += r * m);
        }
    });
}
