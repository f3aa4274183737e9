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
    /// What the scores came to.
    pub range: Range,
}

/// How far scores went, in code units; NaN once a score was not finite.
#[derive(Clone, Copy, Debug, Default)]
pub struct Range {
    /// Largest |row maximum|.
    pub row_max: f32,
    /// Largest |partial sum| of f16 accumulators; 0 with f32 ones.
    pub partial: f32,
}

impl Range {
    /// The larger of both; the order of merging does not matter.
    pub fn merge(self, other: Range) -> Range {
        let larger = |a, b| if grew(a, b) { b } else { a };
        Range { row_max: larger(self.row_max, other.row_max), partial: larger(self.partial, other.partial) }
    }
}

/// Whether a maximum `a` has to become `x`: NaN wins over every number.
#[inline(always)]
fn grew(a: f32, x: f32) -> bool {
    x > a || x.is_nan()
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
    let mut range = Range::default();
    for start in (0..keys).step_by(BLOCK) {
        let valid = BLOCK.min(keys - start);
        let partial = score_block(plan, scores, q, k, [first, rows], [start, valid], &mut ws.p, &mut ws.step);
        range = range.merge(Range { row_max: 0.0, partial });
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
    let mut lse = [f32::NEG_INFINITY; TILE];
    for (i, (row, a)) in out.chunks_exact_mut(dim).zip(numerator.chunks_exact(dim)).enumerate() {
        if keys == 0 {
            row.fill(0.0);
            continue;
        }
        let l = state.sum[i];
        row.iter_mut().zip(a.iter().zip(&v.scale)).for_each(|(o, (a, s))| *o = a / l * s);
        lse[i] = state.max[i] * units::NATS + (l / peak).ln();
        range = range.merge(Range { row_max: state.max[i].abs(), partial: 0.0 });
    }
    TileStats { lse, range }
}

/// S of one tile and one block, in code units, into `s` [TILE, BLOCK]. Returns the largest |partial sum| of f16
/// accumulators, 0 for f32 ones.
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
) -> f32 {
    let dim = plan.qk_dim;
    let (a, b) = (&q.codes[first * dim..], &k.codes[start * dim..]);
    let Some(channels) = plan.rounding_step(scores) else {
        gemm([rows, valid, dim], s, BLOCK, Write::Set, Matrix::rows(a, dim), Matrix::rows(b, dim).t());
        apply_factors(plan, q, k, [first, rows], [start, valid], s);
        return 0.0;
    };
    // f16 accumulators: the Tensor Core rounds to f16 after every instruction along the channels.
    let mut largest = [0.0f32; LANES];
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
        let rows = s.chunks_exact_mut(BLOCK).zip(step.chunks_exact(BLOCK)).take(rows);
        vectorized(|| {
            for (s, t) in rows {
                let (s, t) = (&mut s[..valid], &t[..valid]);
                if c == 0 {
                    accumulate_f16(s, t, &mut largest, |s, _| s);
                } else {
                    accumulate_f16(s, t, &mut largest, |s, t| s + t);
                }
            }
        });
    }
    halve(largest, |a, b| a.max(b))
}

/// `s <- f16(add(s, t))`; raises the largest magnitudes seen.
#[inline(always)]
fn accumulate_f16(s: &mut [f32], t: &[f32], largest: &mut [f32; LANES], add: impl Fn(f32, f32) -> f32) {
    let step = |((s, &t), largest): ((&mut f32, &f32), &mut f32)| {
        *s = f16::round(add(*s, t));
        *largest = if s.abs() > *largest { s.abs() } else { *largest };
    };
    let (chunks, tail) = s.as_chunks_mut::<LANES>();
    let (steps, tail_step) = t.as_chunks::<LANES>();
    for (s, t) in chunks.iter_mut().zip(steps) {
        s.iter_mut().zip(t).zip(&mut *largest).for_each(step);
    }
    tail.iter_mut().zip(tail_step).zip(largest).for_each(step);
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
    if !(q.factor.is_empty() && k.factor.is_empty()) {
        let (mut of_rows, mut of_keys) = ([1.0f32; TILE], [1.0f32; BLOCK]);
        if !q.factor.is_empty() {
            of_rows[..rows].copy_from_slice(&q.factor[first..][..rows]);
        }
        if !k.factor.is_empty() {
            of_keys[..valid].copy_from_slice(&k.factor[start..][..valid]);
        }
        vectorized(|| {
            for (s, f) in s.chunks_exact_mut(BLOCK).zip(&of_rows).take(rows) {
                s.iter_mut().zip(&of_keys).for_each(|(s, k)| *s *= f * k);
            }
        });
    }
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
///
/// A score that is not finite (products that left f32) makes the row's maximum, and with it everything of the
/// row, NaN: no format of probabilities may swallow it.
fn softmax_block(plan: &Plan, scores: ScoreType, rows: usize, valid: usize, s: &mut [f32], state: &mut Rows) {
    let peak = peak(&plan.recipe.p);
    let decoded = plan.recipe.row_sums == RowSums::Decoded;
    vectorized(|| {
        for (i, row) in s.chunks_exact_mut(BLOCK).take(rows).enumerate() {
            let row = &mut row[..valid];
            let old = state.max[i];
            let m = row_max(row, old);
            state.max[i] = m;
            state.alpha[i] = exp2((old - m) * 0.125);
            let exp = |s: f32| exp2((s - m) * 0.125) * peak;
            let r = match plan.recipe.p {
                Probabilities::F32 => map_sum(row, |s| pair(exp(s))),
                Probabilities::E4m3 { .. } if decoded => map_sum(row, |s| pair(e4m3::round(exp(s)))),
                Probabilities::E4m3 { .. } => map_sum(row, |s| {
                    let e = exp(s);
                    (e4m3::round(e), e)
                }),
                Probabilities::ExpCast { beta, encoder } => {
                    // f16 scores are packed as they are; f32 scores after the maximum was subtracted, so that
                    // their size does not matter.
                    let n = expcast::packed_bias(m, beta);
                    match (encoder, scores) {
                        (Encoder::F32, _) => {
                            expcast_row(row, decoded, exp, |s| expcast::value_from_units(s - m, beta))
                        }
                        (Encoder::Packed, ScoreType::F16) => {
                            expcast_row(row, decoded, exp, |s| expcast::packed_value(s, n))
                        }
                        (Encoder::Packed, ScoreType::F32) => {
                            expcast_row(row, decoded, exp, |s| expcast::packed_value(f16::round(s - m), beta))
                        }
                    }
                }
                Probabilities::Nvfp4 => {
                    let exact = map_sum(row, |s| pair(exp(s)));
                    nvfp4_row(row);
                    if decoded { map_sum(row, pair) } else { exact }
                }
            };
            state.block_sum[i] = r;
            state.sum[i] = state.sum[i] * state.alpha[i] + r;
        }
    });
}

/// A value that is both written and added up.
#[inline(always)]
fn pair(x: f32) -> (f32, f32) {
    (x, x)
}

/// ExpCast of a row, with the sum of the decoded bytes or of the exponentials.
#[inline(always)]
fn expcast_row(row: &mut [f32], decoded: bool, exp: impl Fn(f32) -> f32, value: impl Fn(f32) -> f32) -> f32 {
    if decoded { map_sum(row, |s| pair(value(s))) } else { map_sum(row, |s| (value(s), exp(s))) }
}

/// NVFP4 with an E4M3 scale per 16 keys; the row's own scale is in its peak already.
#[inline(always)]
fn nvfp4_row(row: &mut [f32]) {
    let (blocks, tail) = row.as_chunks_mut::<{ nvfp4::BLOCK }>();
    blocks.iter_mut().for_each(|block| nvfp4::round_block(block, 1.0));
    if !tail.is_empty() {
        let mut block = [0.0; nvfp4::BLOCK];
        block[..tail.len()].copy_from_slice(tail);
        nvfp4::round_block(&mut block, 1.0);
        tail.copy_from_slice(&block[..tail.len()]);
    }
}

/// Independent accumulators of a reduction, which the vectorizer needs for f32: two registers of AVX-512.
const LANES: usize = 32;

/// The largest score of a row and before it; NaN if any score is not finite.
#[inline(always)]
fn row_max(row: &[f32], old: f32) -> f32 {
    let (chunks, tail) = row.as_chunks::<LANES>();
    let mut acc = [f32::NEG_INFINITY; LANES];
    // A product with zero is NaN for infinities and NaN, and stays it.
    let mut poison = [0.0f32; LANES];
    let mut rest = [f32::NEG_INFINITY; LANES];
    rest[..tail.len()].copy_from_slice(tail);
    for chunk in chunks {
        for ((a, p), &x) in acc.iter_mut().zip(&mut poison).zip(chunk) {
            *a = if x > *a { x } else { *a };
            *p += x * 0.0;
        }
    }
    acc.iter_mut().zip(&rest).for_each(|(a, &x)| *a = if x > *a { x } else { *a });
    poison.iter_mut().zip(tail).for_each(|(p, x)| *p += x * 0.0);
    let m = halve(acc, |a, b| if b > a { b } else { a });
    (if m > old { m } else { old }) + halve(poison, |a, b| a + b)
}

/// Replaces every entry of a row by the first of `f`'s values and returns the sum of the second.
#[inline(always)]
fn map_sum(row: &mut [f32], f: impl Fn(f32) -> (f32, f32)) -> f32 {
    let (chunks, tail) = row.as_chunks_mut::<LANES>();
    let mut acc = [0.0f32; LANES];
    for chunk in chunks {
        for (a, x) in acc.iter_mut().zip(chunk) {
            let (value, term) = f(*x);
            *x = value;
            *a += term;
        }
    }
    for (a, x) in acc.iter_mut().zip(tail) {
        let (value, term) = f(*x);
        *x = value;
        *a += term;
    }
    halve(acc, |a, b| a + b)
}

/// Reduces lanes pairwise.
#[inline(always)]
fn halve(mut acc: [f32; LANES], f: impl Fn(f32, f32) -> f32) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        let (low, high) = acc.split_at_mut(width);
        low.iter_mut().zip(high).for_each(|(a, b)| *a = f(*a, *b));
        width /= 2;
    }
    acc[0]
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
