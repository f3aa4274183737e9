//! How far an attention output is from the reference, and where the distance comes from.

pub mod reference;
mod sources;

pub use sources::{ErrorSources, error_sources};

use crate::tensor::TensorView;

/// Distances between an output and the f64 reference.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Metrics {
    /// |o - o_ref| / |o_ref| over the whole output.
    pub rel_l2: f64,
    /// |o - o_ref|^2 / |o_ref|^2, the paper's rMSE.
    pub rmse: f64,
    /// Cosine of the angle between the two outputs as vectors; 1 when both are zero, 0 when one is.
    pub cosine: f64,
    /// 20 log10(max |o_ref| / sqrt(mean (o - o_ref)^2)) in dB; infinite for equal outputs.
    pub psnr_db: f64,
    /// Largest |o - o_ref|.
    pub max_abs: f64,
}

/// Compares an output, (batch, heads, tokens, dim), with reference values in the same row-major order.
///
/// An all-zero reference has no relative error: `rel_l2` and `rmse` are then 0 for an equal output and infinite
/// for any other.
///
/// # Panics
/// When the numbers of elements differ.
pub fn compare(o: &TensorView, reference: &[f64]) -> Metrics {
    let [b, h, n, d] = o.shape();
    assert_eq!(b * h * n * d, reference.len(), "output and reference differ in size");
    let mut row = vec![0.0; d];
    let (mut error, mut energy, mut energy_o, mut dot) = (0.0, 0.0, 0.0, 0.0);
    let (mut max_abs, mut peak) = (0.0f64, 0.0f64);
    for (i, reference) in reference.chunks_exact(d).enumerate() {
        o.read_row(i / (h * n), i / n % h, i % n, &mut row);
        for (&o, &r) in row.iter().zip(reference) {
            let o = f64::from(o);
            error += (o - r) * (o - r);
            energy += r * r;
            energy_o += o * o;
            dot += o * r;
            let distance = (o - r).abs();
            // A NaN must win over every number.
            max_abs = if distance > max_abs || distance.is_nan() { distance } else { max_abs };
            peak = peak.max(r.abs());
        }
    }
    let rmse = if error == 0.0 { 0.0 } else { error / energy };
    let mean = error / reference.len() as f64;
    Metrics {
        rel_l2: rmse.sqrt(),
        rmse,
        cosine: match (energy == 0.0, energy_o == 0.0) {
            (true, true) => 1.0,
            (false, false) => dot / (energy.sqrt() * energy_o.sqrt()),
            _ => 0.0,
        },
        psnr_db: if error == 0.0 { f64::INFINITY } else { 20.0 * (peak / mean.sqrt()).log10() },
        max_abs,
    }
}
