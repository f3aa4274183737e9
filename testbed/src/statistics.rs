//! What many clips say together: means over prompts with bootstrap intervals, and differences between rows prompt by
//! prompt, which spread much less than the rows themselves.

use std::collections::BTreeMap;

use rand::rngs::ChaCha8Rng;
use rand::{RngExt, SeedableRng};

use crate::record::{Entry, Setting};

/// Resamples of an interval.
const RESAMPLES: usize = 10_000;
/// Seed of the resampling.
const SEED: u64 = 0;
/// Fewest prompts that an interval is given for: resamples of fewer are a handful of values, whose percentiles are
/// mostly the extremes.
pub const FEWEST: usize = 5;

/// A mean over prompts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mean {
    /// The mean; NaN of no value.
    pub mean: f64,
    /// Ends of its 95% interval (percentile bootstrap, 10,000 resamples of the prompts, seed 0), from [`FEWEST`]
    /// prompts on.
    pub interval: Option<[f64; 2]>,
}

impl Mean {
    /// The mean of some values.
    pub fn of(values: &[f64]) -> Self {
        let mean = |sum: f64| sum / values.len() as f64;
        let whole = mean(values.iter().sum());
        if values.len() < FEWEST {
            return Self { mean: whole, interval: None };
        }
        let mut random = ChaCha8Rng::seed_from_u64(SEED);
        let mut resample =
            |_| mean((0..values.len()).map(|_| values[random.random_range(0..values.len())]).sum());
        let mut means: Vec<f64> = (0..RESAMPLES).map(&mut resample).collect();
        means.sort_by(f64::total_cmp);
        let quantile = |q: f64| means[((RESAMPLES - 1) as f64 * q).round() as usize];
        Self { mean: whole, interval: Some([quantile(0.025), quantile(0.975)]) }
    }
}

/// A row over its prompts.
#[derive(Clone, Debug)]
pub struct Summary {
    /// What was measured.
    pub setting: Setting,
    /// Entries by prompt.
    pub by_prompt: BTreeMap<usize, Entry>,
}

impl Summary {
    /// Groups entries by setting, in the order in which they first come; of two entries for one prompt the last
    /// counts.
    pub fn all(entries: &[Entry]) -> Vec<Summary> {
        let mut all: Vec<Summary> = Vec::new();
        for entry in entries {
            let summary = match all.iter_mut().find(|s| s.setting == entry.setting) {
                Some(summary) => summary,
                None => {
                    all.push(Summary { setting: entry.setting.clone(), by_prompt: BTreeMap::new() });
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
