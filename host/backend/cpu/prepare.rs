//! Tensors to low-bit operands, one head at a time.
//!
//! An operand holds *codes*: the values that the low-bit format can represent, as f32 (every one of them is
//! exact in f32, and so is every product that the matrix unit forms of two), with the scales beside them.

use std::ops::Range;

use kernels_gpu::formats::{e4m3, f16, int8, nvfp4};
use kernels_gpu::kernels::head_balance;
use kernels_gpu::layout::{self, scale_groups};
use kernels_gpu::numerics::{hadamard, mean, units};

use super::simd::vectorized;
use crate::plan::Plan;
use crate::problem::Problem;
use crate::recipe::{QkFormat, ScoreType, VFormat};

/// Keys or values of a block: one step of the attention loop and one mean of V-Smooth (paper's B_v).
pub const BLOCK: usize = layout::KEY_TILE;

/// Quantized queries of one head.
pub struct QHead {
    /// Codes, [q_tokens, qk_dim].
    pub codes: Vec<f32>,
    /// Factor of every row that turns products of codes into code units; empty where the codes carry it, which
    /// f16 scores need.
    pub factor: Vec<f32>,
    /// Mean of every 128 rows, [blocks, qk_dim], where the recipe subtracts it.
    pub block_means: Vec<f32>,
    /// Rows that hold a NaN or an infinity (quantized as zeros; their output is NaN).
    pub nonfinite: Vec<bool>,
}

/// Quantized keys of one head, in the order of the grouping.
pub struct KHead {
    /// Codes, [kv_len, qk_dim].
    pub codes: Vec<f32>,
    /// Factor of every key; empty where it is one, which f16 scores need.
    pub factor: Vec<f32>,
    /// Centred and rotated keys before quantization, [kv_len, qk_dim], where Q's block means need them.
    pub unquantized: Vec<f32>,
    /// Token mean that was subtracted, [head_dim], unrotated; empty where none was.
    pub mean: Vec<f32>,
    /// Whether a valid key holds a NaN or an infinity.
    pub nonfinite: bool,
}

/// Quantized values of one head, in the order of the grouping.
pub struct VHead {
    /// Codes of V or of its residual, [kv_len rounded up to 16, v_dim].
    pub codes: Vec<f32>,
    /// Factor of every channel, [v_dim].
    pub scale: Vec<f32>,
    /// 16-bit block means divided by the channel's factor, [blocks, v_dim]; empty without demeaning.
    pub means: Vec<f32>,
    /// Share of a block's energy that its mean holds, per block with energy.
    pub shares: Vec<f64>,
    /// Whether a valid value holds a NaN or an infinity.
    pub nonfinite: bool,
}

/// Power of two on the queries of a group in E4M3, K carries its inverse; see [`head_balance`]. It looks at the
/// first rows of every query head, as they come, so that a GPU need not read Q twice.
pub fn balance(plan: &Plan, problem: &Problem, batch: usize, heads: Range<usize>) -> f32 {
    if plan.recipe.qk != QkFormat::E4m3PerHead {
        return 1.0;
    }
    let rows = plan.shape.q_tokens.min(head_balance::ROWS as usize);
    let mut row = vec![0.0f32; plan.shape.head_dim];
    let mut amax = 0.0f32;
    for head in heads {
        for token in 0..rows {
            problem.q.read_row(batch, head, token, &mut row);
            if all_finite(&row) {
                amax = row.iter().fold(amax, |a, x| a.max(x.abs()));
            }
        }
    }
    head_balance::of_amax(amax * units::code_unit_factor(plan.scale))
}

/// Q before quantization: rows that are not finite zeroed, zero-padded, rotated.
pub fn load_q(plan: &Plan, problem: &Problem, batch: usize, head: usize) -> (Vec<f32>, Vec<bool>) {
    let mut x = vec![0.0; plan.shape.q_tokens * plan.qk_dim];
    let mut nonfinite = vec![false; plan.shape.q_tokens];
    for ((token, row), bad) in x.chunks_exact_mut(plan.qk_dim).enumerate().zip(&mut nonfinite) {
        let row = &mut row[..plan.shape.head_dim];
        problem.q.read_row(batch, head, token, row);
        *bad = !all_finite(row);
        if *bad {
            row.fill(0.0);
        }
    }
    if plan.recipe.rotate_qk {
        rotate_rows(&mut x, plan.qk_dim);
    }
    (x, nonfinite)
}

/// Quantizes what [`load_q`] returned; `balance` is its group's [`balance`].
pub fn quantize_q(plan: &Plan, (mut x, nonfinite): (Vec<f32>, Vec<bool>), balance: f32) -> QHead {
    let dim = plan.qk_dim;
    let mut block_means = Vec::new();
    if plan.recipe.center_q {
        for block in x.chunks_mut(BLOCK * dim) {
            let mut m = vec![0.0; dim];
            mean::block_mean(block, dim, block.len() / dim, &mut m);
            vectorized(|| block.chunks_exact_mut(dim).for_each(|row| subtract(row, &m)));
            block_means.extend(m);
        }
    }
    let units = plan.scale * units::PER_NAT;
    let side = (units::code_unit_factor(plan.scale) * balance).copysign(plan.scale);
    let factor = match plan.recipe.qk {
        QkFormat::F32 => {
            vectorized(|| x.iter_mut().for_each(|x| *x *= units));
            Vec::new()
        }
        QkFormat::F16 => round_in_code_units(&mut x, dim, side, f16::MAX, f16::round),
        _ if plan.recipe.scores == ScoreType::F16 => {
            round_in_code_units(&mut x, dim, side, e4m3::MAX, e4m3::round)
        }
        format => {
            let mut factor = quantize_rows(&mut x, dim, format, scale_groups::q_group);
            factor.iter_mut().for_each(|f| *f *= units);
            factor
        }
    };
    QHead { codes: x, factor, block_means, nonfinite }
}

/// Quantizes the keys of one head. `order` maps a position to its token and covers the valid tokens.
pub fn k_head(
    plan: &Plan,
    problem: &Problem,
    [batch, head]: [usize; 2],
    order: &[u32],
    balance: f32,
) -> KHead {
    let (d, dim) = (plan.shape.head_dim, plan.qk_dim);
    let tokens = problem.k.read_head(batch, head, order.len());
    let nonfinite = !all_finite(&tokens);
    let mut k =
        KHead { codes: Vec::new(), factor: Vec::new(), unquantized: Vec::new(), mean: Vec::new(), nonfinite };
    if nonfinite || order.is_empty() {
        return k;
    }
    if plan.recipe.center_k {
        k.mean = vec![0.0; d];
        mean::token_mean(&tokens, d, order.len(), &mut k.mean);
    }
    let mut x = vec![0.0; order.len() * dim];
    for (row, &token) in x.chunks_exact_mut(dim).zip(order) {
        row[..d].copy_from_slice(&tokens[token as usize * d..][..d]);
    }
    if plan.recipe.center_k {
        vectorized(|| x.chunks_exact_mut(dim).for_each(|row| subtract(&mut row[..d], &k.mean)));
    }
    if plan.recipe.rotate_qk {
        rotate_rows(&mut x, dim);
    }
    if plan.recipe.center_q {
        k.unquantized = x.clone();
    }
    let side = units::code_unit_factor(plan.scale) / balance;
    k.factor = match plan.recipe.qk {
        QkFormat::F32 => Vec::new(),
        QkFormat::F16 => round_in_code_units(&mut x, dim, side, f16::KEY_MAX, f16::round_key),
        _ if plan.recipe.scores == ScoreType::F16 => {
            round_in_code_units(&mut x, dim, side, e4m3::MAX, e4m3::round)
        }
        format => quantize_rows(&mut x, dim, format, scale_groups::k_group),
    };
    k.codes = x;
    k
}

/// Quantizes the values of one head. `order` maps a position to its token and covers the valid tokens.
pub fn v_head(plan: &Plan, problem: &Problem, [batch, head]: [usize; 2], order: &[u32]) -> VHead {
    let (d, dim) = (plan.shape.head_dim, plan.v_dim);
    let tokens = problem.v.read_head(batch, head, order.len());
    let nonfinite = !all_finite(&tokens);
    let mut v =
        VHead { codes: Vec::new(), scale: vec![1.0; dim], means: Vec::new(), shares: Vec::new(), nonfinite };
    if nonfinite || order.is_empty() {
        return v;
    }
    // NVFP4 takes 16 tokens at a time: the tail is padded with zeros, which take part in no mean.
    let mut x = vec![0.0; order.len().next_multiple_of(nvfp4::BLOCK) * dim];
    for (row, &token) in x.chunks_exact_mut(dim).zip(order) {
        row[..d].copy_from_slice(&tokens[token as usize * d..][..d]);
    }
    drop(tokens);
    let valid = order.len() * dim;
    if plan.recipe.rotate_v {
        rotate_rows(&mut x[..valid], dim);
    }
    let mut amax = vec![0.0f32; dim];
    let mut amax_mean = vec![0.0f32; dim];
    if plan.recipe.demean {
        v.means = vec![0.0; order.len().div_ceil(BLOCK) * dim];
        for (block, m) in x[..valid].chunks(BLOCK * dim).zip(v.means.chunks_exact_mut(dim)) {
            let rows = block.len() / dim;
            mean::block_mean(block, dim, rows, m);
            let energy = |x: &[f32]| x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>();
            let total = energy(block);
            if total > 0.0 {
                v.shares.push(rows as f64 * energy(m) / total);
            }
            vectorized(|| {
                for row in block.chunks_exact(dim) {
                    amax.iter_mut()
                        .zip(row.iter().zip(&*m))
                        .for_each(|(a, (x, m))| *a = a.max((x - m).abs()));
                }
                amax_mean.iter_mut().zip(&*m).for_each(|(a, m)| *a = a.max(m.abs()));
            });
        }
    } else {
        vectorized(|| {
            for row in x[..valid].chunks_exact(dim) {
                amax.iter_mut().zip(row).for_each(|(a, x)| *a = a.max(x.abs()));
            }
        });
    }
    v.scale = match plan.recipe.v {
        VFormat::F32 | VFormat::Nvfp4 => vec![1.0; dim],
        VFormat::E4m3PerChannel => amax.iter().zip(&amax_mean).map(|(&a, &m)| v_scale(a, m)).collect(),
        VFormat::E4m3PerHead => vec![v_scale(self::amax(&amax), self::amax(&amax_mean)); dim],
    };
    // The residual is taken against the mean as it is stored, so that restoring it is exact.
    if plan.recipe.demean {
        for (block, m) in x[..valid].chunks_mut(BLOCK * dim).zip(v.means.chunks_exact_mut(dim)) {
            if plan.recipe.v != VFormat::F32 {
                m.iter_mut()
                    .zip(&v.scale)
                    .for_each(|(m, s)| *m = f16::round((*m / s).clamp(-65504.0, 65504.0)));
            }
            let stored: Vec<f32> = m.iter().zip(&v.scale).map(|(m, s)| m * s).collect();
            vectorized(|| block.chunks_exact_mut(dim).for_each(|row| subtract(row, &stored)));
        }
    }
    match plan.recipe.v {
        VFormat::F32 => {}
        VFormat::E4m3PerChannel | VFormat::E4m3PerHead => vectorized(|| {
            for row in x.chunks_exact_mut(dim) {
                row.iter_mut().zip(&v.scale).for_each(|(x, s)| *x = e4m3::round(*x / s));
            }
        }),
        // The means are stored unscaled here and may be far from what was subtracted in the search for maxima.
        VFormat::Nvfp4 => {
            let tensor_scale = nvfp4::tensor_scale(self::amax(&x));
            nvfp4_along_tokens(&mut x, dim, tensor_scale);
        }
    }
    v.codes = x;
    v
}

/// Factor of a V channel: the residual within E4M3's range and the mean within f16's.
fn v_scale(amax_residual: f32, amax_mean: f32) -> f32 {
    let s = (amax_residual / e4m3::MAX).max(amax_mean / 60000.0);
    if s > 0.0 { s } else { 1.0 }
}

/// For codes that carry the scale, so that products of Q and K are code units: `round` of `x * side`, which keeps magnitudes up to `limit` finite. A head that leaves this range is brought back by a power
/// of two, which then is every row's factor; no factors otherwise.
fn round_in_code_units(
    x: &mut [f32],
    dim: usize,
    side: f32,
    limit: f32,
    round: impl Fn(f32) -> f32,
) -> Vec<f32> {
    let amax = f64::from(amax(x)) * f64::from(side.abs());
    let excess = (amax / f64::from(limit)).log2().ceil().max(0.0).exp2();
    let side = (f64::from(side) / excess) as f32;
    vectorized(|| x.iter_mut().for_each(|x| *x = round(*x * side)));
    if excess > 1.0 { vec![excess as f32; x.len() / dim] } else { Vec::new() }
}

/// Largest magnitude.
fn amax(x: &[f32]) -> f32 {
    vectorized(|| {
        let (chunks, tail) = x.as_chunks::<16>();
        let mut lanes = [0.0f32; 16];
        for chunk in chunks {
            lanes.iter_mut().zip(chunk).for_each(|(a, x)| *a = a.max(x.abs()));
        }
        lanes.iter().chain(tail).fold(0.0f32, |a, x| a.max(x.abs()))
    })
}

/// Quantizes rows for f32 score accumulators and returns every row's scale. `int8_group` numbers the groups of
/// rows that share an INT8 scale.
fn quantize_rows(x: &mut [f32], dim: usize, format: QkFormat, int8_group: fn(usize) -> usize) -> Vec<f32> {
    let rows = x.len() / dim;
    let group: &dyn Fn(usize) -> usize = match format {
        QkFormat::Int8 => &int8_group,
        QkFormat::E4m3PerBlock => &|row| row / BLOCK,
        QkFormat::E4m3PerHead | QkFormat::Nvfp4 | QkFormat::F16 | QkFormat::F32 => &|_| 0,
    };
    let groups = (0..rows).map(group).max().map_or(0, |g| g + 1);
    let mut largest = vec![0.0f32; groups];
    for (row, x) in x.chunks_exact(dim).enumerate() {
        let a = &mut largest[group(row)];
        *a = a.max(amax(x));
    }
    let scale: Vec<f32> = largest
        .iter()
        .map(|&amax| match format {
            QkFormat::Int8 => int8::scale(amax),
            QkFormat::E4m3PerBlock | QkFormat::E4m3PerHead => amax / e4m3::MAX,
            QkFormat::Nvfp4 => nvfp4::tensor_scale(amax),
            QkFormat::F16 | QkFormat::F32 => 1.0,
        })
        .collect();
    vectorized(|| {
        for (row, x) in x.chunks_exact_mut(dim).enumerate() {
            let s = scale[group(row)];
            match format {
                _ if s == 0.0 => x.fill(0.0),
                QkFormat::Int8 => x.iter_mut().for_each(|x| *x = int8::round_code(*x, s)),
                QkFormat::E4m3PerBlock | QkFormat::E4m3PerHead => {
                    x.iter_mut().for_each(|x| *x = e4m3::round(*x / s));
                }
                QkFormat::Nvfp4 => {
                    x.as_chunks_mut().0.iter_mut().for_each(|block| nvfp4::round_block(block, s));
                }
                // Never by rows.
                QkFormat::F16 | QkFormat::F32 => {}
            }
        }
    });
    // The codes of NVFP4 carry all their scales.
    (0..rows).map(|row| if format == QkFormat::Nvfp4 { 1.0 } else { scale[group(row)] }).collect()
}

/// NVFP4 with blocks of 16 tokens in one channel.
fn nvfp4_along_tokens(x: &mut [f32], dim: usize, tensor_scale: f32) {
    for rows in x.chunks_exact_mut(nvfp4::BLOCK * dim) {
        for channel in 0..dim {
            let mut block: [f32; nvfp4::BLOCK] = std::array::from_fn(|i| rows[i * dim + channel]);
            nvfp4::round_block(&mut block, tensor_scale);
            block.iter().enumerate().for_each(|(i, &x)| rows[i * dim + channel] = x);
        }
    }
}

/// Orthonormal Hadamard rotation of every row; `dim` is a power of two.
pub fn rotate_rows(x: &mut [f32], dim: usize) {
    vectorized(|| x.chunks_exact_mut(dim).for_each(hadamard::rotate));
}

#[inline(always)]
fn subtract(row: &mut [f32], m: &[f32]) {
    row.iter_mut().zip(m).for_each(|(x, m)| *x -= m);
}

/// Whether no value is a NaN or an infinity.
pub fn all_finite(x: &[f32]) -> bool {
    vectorized(|| x.iter().fold(true, |all, x| all & x.is_finite()))
}
