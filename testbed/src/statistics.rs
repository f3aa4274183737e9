//! What many clips say together: means over prompts with bootstrap intervals, and differences between rows prompt by
//! prompt, which spread much less than the rows themselves.

use std::collections::BTreeMap;

use rand::rngs::ChaCha8Rng;
use rand::{RngExt, SeedableRng};

use crate::record::Entry;

/// Resamples of an interval.
const RESAMPLES: usize = 10_000;
/// Seed of the resampling.
const SEED: u64 = 0;

/// A mean over prompts with its 95% interval (percentile bootstrap, 10,000 resamples of the prompts, seed 0).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mean {
    /// The mean.
    pub mean: f64,
    /// Lower end of the interval.
    pub low: f64,
    /// Upper end of the interval.
    pub high: f64,
}

impl Mean {
    /// Of at least one value.
    pub fn of(values: &[f64]) -> Self {
        let mean = |sum: f64| sum / values.len() as f64;
        let mut random = ChaCha8Rng::seed_from_u64(SEED);
        let mut resample =
            |_| mean((0..values.len()).map(|_| values[random.random_range(0..values.len())]).sum());
        let mut means: Vec<f64> = (0..RESAMPLES).map(&mut resample).collect();
        means.sort_by(f64::total_cmp);
        let quantile = |q: f64| means[((RESAMPLES - 1) as f64 * q).round() as usize];
        Self { mean: mean(values.iter().sum()), low: quantile(0.025), high: quantile(0.975) }
    }
}

/// A row over its prompts.
#[derive(Clone, Debug)]
pub struct Summary {
    /// The row.
    pub row: String,
    /// Denoising steps.
    pub steps: usize,
    /// Weight of the guidance.
    pub guidance: f32,
    /// Entries by prompt.
    pub by_prompt: BTreeMap<usize, Entry>,
}

impl Summary {
    /// Groups entries by row, steps and guidance, in the order in which they first come; of two entries for one
    /// prompt the last counts.
    pub fn all(entries: &[Entry]) -> Vec<Summary> {
        let mut all: Vec<Summary> = Vec::new();
        for entry in entries {
            let of = |s: &&mut Summary| {
                (s.row.as_str(), s.steps, s.guidance) == (entry.row.as_str(), entry.steps, entry.guidance)
            };
            let summary = match all.iter_mut().find(of) {
                Some(summary) => summary,
                None => {
                    all.push(Summary {
                        row: entry.row.clone(),
                        steps: entry.steps,
                        guidance: entry.guidance,
                        by_prompt: BTreeMap::new(),
                    });
                    all.last_mut().expect("just pushed")
                }
            };
            summary.by_prompt.insert(entry.prompt, entry.clone());
        }
        all
    }

    fn values(&self, value: impl Fn(&Entry) -> f64) -> Vec<f64> {
        self.by_prompt.values().map(value).collect()
    }

    /// PSNR over the prompts.
    pub fn psnr(&self) -> Mean {
        Mean::of(&self.values(|e| e.distance.psnr_db))
    }

    /// Lowest PSNR of a prompt.
    pub fn lowest_psnr(&self) -> f64 {
        self.values(|e| e.distance.psnr_db).into_iter().fold(f64::INFINITY, f64::min)
    }

    /// SSIM over the prompts.
    pub fn ssim(&self) -> Mean {
        Mean::of(&self.values(|e| e.distance.ssim))
    }

    /// Share of the value energy in the block means, where they were subtracted.
    pub fn mean_share(&self) -> Option<f64> {
        let shares: Vec<f64> = self.by_prompt.values().filter_map(|e| e.mean_share).collect();
        (!shares.is_empty()).then(|| shares.iter().sum::<f64>() / shares.len() as f64)
    }

    /// PSNR minus `other`'s, over the prompts that both have; absent where there is none.
    pub fn psnr_over(&self, other: &Summary) -> Option<(Mean, usize)> {
        let differences: Vec<f64> = self
            .by_prompt
            .iter()
            .filter_map(|(p, e)| Some(e.distance.psnr_db - other.by_prompt.get(p)?.distance.psnr_db))
            .collect();
        (!differences.is_empty()).then(|| (Mean::of(&differences), differences.len()))
    }
}
