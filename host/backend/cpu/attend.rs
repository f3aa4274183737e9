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
use crate::recipe::{Encoder, ExactScores, Probabilities, RowSums, ScoreType, WARP_ROWS};

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

/// How far scores went, in code units; NaN once a score was not finite. And how many took the exact exponential.
#[derive(Clone, Copy, Debug, Default)]
pub struct Range {
    /// Largest |row maximum|.
    pub row_max: f32,
    /// Largest |partial sum| of f16 accumulators; 0 with f32 ones.
    pub partial: f32,
    /// Blocks of [`WARP_ROWS`] rows and [`BLOCK`] keys, and those of them that ran exact by [`ExactScores::Near`].
    pub blocks: u64,
    /// See `blocks`.
    pub exact: u64,
}

impl Range {
    /// The larger of both; the order of merging does not matter.
    pub fn merge(self, other: Range) -> Range {
        let larger = |a, b| if grew(a, b) { b } else { a };
        Range {
            row_max: larger(self.row_max, other.row_max),
            partial: larger(self.partial, other.partial),
            blocks: self.blocks + other.blocks,
            exact: self.exact + other.exact,
        }
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
        let exact = softmax_block(plan, scores, rows, valid, &mut ws.p, &mut state);
        range = range.merge(Range {
            partial,
            blocks: rows.div_ceil(WARP_ROWS) as u64,
            exact,
            ..Range::default()
        });
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
        range = range.merge(Range { row_max: state.max[i].abs(), ..Range::default() });
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

/// Scores of one block to probabilities, in place; updates maxima, rescale factors and sums. Returns how many groups
/// of [`WARP_ROWS`] rows ran exact because a score lay near its row's maximum.
///
/// A score that is not finite (products that left f32) makes the row's maximum, and with it everything of the
/// row, NaN: no format of probabilities may swallow it.
fn softmax_block(
    plan: &Plan,
    scores: ScoreType,
    rows: usize,
    valid: usize,
    s: &mut [f32],
    state: &mut Rows,
) -> u64 {
    let peak = peak(&plan.recipe.p);
    let decoded = plan.recipe.row_sums == RowSums::Decoded;
    let within = match plan.recipe.p {
        Probabilities::ExpCast { exact: ExactScores::Near { octaves }, .. } => 8.0 * f32::from(octaves),
        _ => f32::NEG_INFINITY,
    };
    let mut exact_groups = 0;
    vectorized(|| {
        let groups = s[..rows * BLOCK].chunks_mut(WARP_ROWS * BLOCK);
        for (first, group) in groups.enumerate().map(|(g, group)| (g * WARP_ROWS, group)) {
            let mut near = false;
            for (row, i) in group.chunks_exact(BLOCK).zip(first..) {
                let (old, here) = (state.max[i], row_max(&row[..valid], f32::NEG_INFINITY));
                let m = if grew(old, here) { here } else { old };
                state.max[i] = m;
                state.alpha[i] = exp2((old - m) * 0.125);
                near |= here >= m - within;
            }
            near &= within > 0.0;
            exact_groups += u64::from(near);
            for (row, i) in group.chunks_exact_mut(BLOCK).zip(first..) {
                let row = &mut row[..valid];
                let m = state.max[i];
                let exp = |s: f32| exp2((s - m) * 0.125) * peak;
                let r = match plan.recipe.p {
                    Probabilities::F32 => map_sum(row, |s| pair(exp(s))),
                    Probabilities::E4m3 { .. } => e4m3_row(row, decoded, exp),
                    Probabilities::ExpCast { beta, encoder, exact } => {
                        let cast = Cast { exact, near, decoded };
                        expcast_block(row, m, scores, beta, encoder, cast)
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
        }
    });
    exact_groups
}

/// What becomes of a row under ExpCast.
#[derive(Clone, Copy)]
struct Cast {
    exact: ExactScores,
    /// Whether the row's group is near its maxima.
    near: bool,
    decoded: bool,
}

/// ExpCast of one row of a block under its running maximum `m`.
///
/// f16 scores are packed as they are; f32 scores after the maximum was subtracted, so that their size does not
/// matter.
#[inline(always)]
fn expcast_block(row: &mut [f32], m: f32, scores: ScoreType, beta: f32, encoder: Encoder, cast: Cast) -> f32 {
    match (encoder, scores) {
        (Encoder::F32, _) => cast.row(row, m, |s| expcast::value_from_units(s - m, beta)),
        (Encoder::Packed, ScoreType::F16) => {
            let n = expcast::packed_bias(m, beta);
            cast.row(row, beta - n, |s| expcast::packed_value(s, n))
        }
        (Encoder::Packed, ScoreType::F32) => {
            cast.row(row, m, |s| expcast::packed_value(f16::round(s - m), beta))
        }
        (Encoder::Pinned, ScoreType::F16) => {
            let beta = f16::round(beta);
            cast.row(row, m, |s| expcast::pinned_value(s, m, beta))
        }
        (Encoder::Pinned, ScoreType::F32) => {
            let beta = f16::round(beta);
            cast.row(row, m, |s| expcast::pinned_value(f16::round(s - m), 0.0, beta))
        }
        (Encoder::Quadratic, ScoreType::F16) => {
            let n = expcast::quadratic_bias(m, beta);
            cast.row(row, expcast::quadratic_reference(n, beta), |s| expcast::quadratic_value(s, n))
        }
        (Encoder::Quadratic, ScoreType::F32) => {
            let n = expcast::quadratic_bias(0.0, beta);
            cast.row(row, m, |s| expcast::quadratic_value(f16::round(s - m), n))
        }
    }
}

impl Cast {
    /// A row by `value`, or by the exponential where it is exact; `reference` is what the codes take for the
    /// maximum, and the exponentials with them. Returns the row sum.
    #[inline(always)]
    fn row(self, row: &mut [f32], reference: f32, value: impl Fn(f32) -> f32) -> f32 {
        let exp =
            |s: f32| exp2((s - reference) * 0.125) * e4m3::decode_magnitude(u32::from(expcast::MAX_CODE));
        let cast_row = |row: &mut [f32]| {
            if self.decoded { map_sum(row, |s| pair(value(s))) } else { map_sum(row, |s| (value(s), exp(s))) }
        };
        let period = match self.exact {
            ExactScores::Near { .. } if self.near => return e4m3_row(row, self.decoded, exp),
            ExactScores::None | ExactScores::Near { .. } => return cast_row(row),
            ExactScores::Half => 2,
            ExactScores::Quarter => 4,
        };
        // A register of scores holds keys of one group of eight.
        let registers = row.chunks_mut(8).enumerate();
        registers
            .map(
                |(i, keys)| {
                    if i % period == period - 1 { e4m3_row(keys, self.decoded, exp) } else { cast_row(keys) }
                },
            )
            .sum()
    }
}

/// Exponentials of a row rounded to E4M3, with the sum of what was rounded to or from.
#[inline(always)]
fn e4m3_row(row: &mut [f32], decoded: bool, exp: impl Fn(f32) -> f32) -> f32 {
    if decoded {
        map_sum(row, |s| pair(e4m3::round(exp(s))))
    } else {
        map_sum(row, |s| {
            let e = exp(s);
            (e4m3::round(e), e)
        })
    }
}

/// A value that is both written and added up.
#[inline(always)]
fn pair(x: f32) -> (f32, f32) {
    (x, x)
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
