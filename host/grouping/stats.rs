//! How much of the value tokens' energy the block means remove under an order (paper Eq. 5, Fig. 4).

use half::f16;

use super::BLOCK;

/// Precision in which a block mean is stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum MeanBits {
    /// binary16, what the kernels keep.
    #[default]
    Sixteen,
    /// binary64, for the identity itself.
    SixtyFour,
}

/// Shares of the energy (squared Frobenius norm) that the means of blocks of 128 tokens remove.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Shares {
    /// B |mu|^2 / |V_j|^2, averaged over the blocks (a block of zeros counts as 0): the paper's figure.
    pub per_block: f64,
    /// The sum of B |mu|^2 over the energy of all tokens (0 without any).
    pub total: f64,
}

/// Shares for `v`, row-major [tokens, head_dim], in the order `order` (position -> token), in f64.
///
/// # Panics
/// When `order` names a token that `v` does not have, or `head_dim` is 0.
pub fn shares(v: &[f32], head_dim: usize, order: &[u32], mean: MeanBits) -> Shares {
    let (mut per_block, mut removed, mut energy) = (0.0, 0.0, 0.0);
    for block in order.chunks(BLOCK) {
        let (mut sum, mut e) = (vec![0.0f64; head_dim], 0.0f64);
        for &token in block {
            for (sum, &x) in sum.iter_mut().zip(&v[token as usize * head_dim..][..head_dim]) {
                *sum += f64::from(x);
                e += f64::from(x) * f64::from(x);
            }
        }
        let m = block.len() as f64;
        let r = m * sum.iter().map(|s| round(s / m, mean).powi(2)).sum::<f64>();
        per_block += if e > 0.0 { r / e } else { 0.0 };
        removed += r;
        energy += e;
    }
    let blocks = order.len().div_ceil(BLOCK).max(1) as f64;
    Shares { per_block: per_block / blocks, total: if energy > 0.0 { removed / energy } else { 0.0 } }
}

fn round(x: f64, bits: MeanBits) -> f64 {
    match bits {
        MeanBits::Sixteen => f16::from_f64(x).to_f64(),
        MeanBits::SixtyFour => x,
    }
}
