//! How far two clips are apart. Clips are [3, frames, height, width] with values in [-1, 1].

use anyhow::{Result, ensure};
use candle_core::Tensor;
use serde::{Deserialize, Serialize};
use vc_attention::Error;

/// PSNR of equal clips, which is infinite and would spoil every mean.
pub const EQUAL_DB: f64 = 99.0;

/// Distances between two clips, pixels clamped to their range.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Distance {
    /// Peak signal-to-noise ratio over all frames and channels in dB, at most [`EQUAL_DB`].
    pub psnr_db: f64,
    /// Structural similarity (Wang et al., 2004: 11 x 11 Gaussian window, deviation 1.5), averaged over channels, frames
    /// and windows that lie inside.
    pub ssim: f64,
}

/// Compares two clips.
///
/// # Errors
/// When their shapes differ, a frame is smaller than the window, there is none, or a pixel is not finite.
pub fn distance(a: &Tensor, b: &Tensor) -> Result<Distance> {
    let (shape, other) = (a.dims4()?, b.dims4()?);
    ensure!(shape == other, "clips of the same shape, given {shape:?} and {other:?}");
    let (channels, frames, height, width) = shape;
    if height.min(width) < WINDOW || channels * frames == 0 {
        return Err(Error::Tensor {
            tensor: "clip",
            expected: format!("at least one channel and frame, of at least {WINDOW} x {WINDOW} pixels"),
            given: format!("{shape:?}"),
        }
        .into());
    }
    let pixels = |x: &Tensor| -> Result<Vec<f32>> {
        let x = x.flatten_all()?.to_vec1::<f32>()?;
        ensure!(x.iter().all(|x| x.is_finite()), "a clip with a pixel that is not finite");
        Ok(x.into_iter().map(|x| x.clamp(-1.0, 1.0) / 2.0 + 0.5).collect())
    };
    let (a, b) = (pixels(a)?, pixels(b)?);
    let error = a.iter().zip(&b).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>() / a.len() as f64;
    let frames = a.chunks_exact(height * width).zip(b.chunks_exact(height * width));
    let count = frames.len() as f64;
    let ssim = frames.map(|(a, b)| frame_ssim(a, b, width)).sum::<f64>() / count;
    Ok(Distance { psnr_db: (-10.0 * error.log10()).min(EQUAL_DB), ssim })
}

/// Side of the window of [`frame_ssim`].
const WINDOW: usize = 11;

/// SSIM of two planes with values in [0, 1].
fn frame_ssim(a: &[f32], b: &[f32], width: usize) -> f64 {
    let product = |x: &[f32], y: &[f32]| -> Vec<f32> { x.iter().zip(y).map(|(x, y)| x * y).collect() };
    let blur = |x: &[f32]| blurred(x, width);
    let (mean_a, mean_b) = (blur(a), blur(b));
    let (aa, bb, ab) = (blur(&product(a, a)), blur(&product(b, b)), blur(&product(a, b)));
    let (c1, c2) = (0.01f64.powi(2), 0.03f64.powi(2));
    let sum: f64 = (0..aa.len())
        .map(|i| {
            let (ma, mb) = (mean_a[i], mean_b[i]);
            let (va, vb, cab) = (aa[i] - ma * ma, bb[i] - mb * mb, ab[i] - ma * mb);
            (2.0 * ma * mb + c1) * (2.0 * cab + c2) / ((ma * ma + mb * mb + c1) * (va + vb + c2))
        })
        .sum();
    sum / aa.len() as f64
}

/// Gaussian means of all windows inside the plane, rows then columns.
fn blurred(x: &[f32], width: usize) -> Vec<f64> {
    let weight = |i: usize| (-((i as f64 - 5.0).powi(2)) / (2.0 * 1.5f64.powi(2))).exp();
    let total: f64 = (0..WINDOW).map(weight).sum();
    let kernel: Vec<f64> = (0..WINDOW).map(|i| weight(i) / total).collect();
    let inside = width - WINDOW + 1;
    let rows: Vec<f64> = x
        .chunks_exact(width)
        .flat_map(|row| {
            row.windows(WINDOW).map(|w| w.iter().zip(&kernel).map(|(&x, k)| f64::from(x) * k).sum())
        })
        .collect();
    let height = rows.len() / inside;
    (0..(height - WINDOW + 1) * inside)
        .map(|i| kernel.iter().enumerate().map(|(j, k)| rows[i + j * inside] * k).sum())
        .collect()
}
