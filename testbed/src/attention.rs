//! The attention of a row: its recipe on the orders of its schedule, in the tensors' place in the loop.

use std::time::{Duration, Instant};

use anyhow::Result;
use candle_core::{DType, Tensor};
use vc_attention::backend::Backend;
use vc_attention::backend::cpu::Cpu;
use vc_attention::backend::cuda::Cuda;
use vc_attention_candle::{Counts, Denoising, Options, Recipe, Site, VcAttention};

use crate::model::Attend;
use crate::row::Row;
use crate::sampler::{Branch, Stepped};

/// What computes the attention.
#[derive(Clone, Debug)]
pub enum Compute {
    /// The CPU backend.
    Cpu,
    /// A GPU, for the recipes that its kernels cover; the rest of the model stays on the CPU.
    Gpu(Cuda),
}

impl Compute {
    /// An attention with a recipe.
    pub fn attention(&self, recipe: &Recipe, grid: [usize; 3]) -> VcAttention {
        let options = Options::new(recipe.clone()).with_grid(grid);
        match self {
            Compute::Cpu => VcAttention::new(options),
            Compute::Gpu(gpu) => VcAttention::offloaded(options, gpu.clone()),
        }
    }

    /// Name of the backend.
    pub fn backend(&self) -> &'static str {
        match self {
            Compute::Cpu => Cpu.name(),
            Compute::Gpu(gpu) => gpu.name(),
        }
    }

    /// In words.
    pub fn device(&self) -> String {
        match self {
            Compute::Cpu => Cpu.device(),
            Compute::Gpu(gpu) => gpu.device(),
        }
    }
}

/// The attention of one clip.
#[derive(Debug)]
pub struct RowAttention {
    row: Row,
    denoising: Denoising,
    step: usize,
    branch: Branch,
    spent: Duration,
    shares: Vec<f64>,
}

impl RowAttention {
    /// For one clip of `steps` steps on a latent grid [t, h, w].
    ///
    /// # Errors
    /// When the row's schedule does not fit.
    pub fn new(row: &Row, steps: usize, grid: [usize; 3], compute: &Compute) -> Result<Self> {
        Ok(Self {
            denoising: Denoising::new(compute.attention(&row.recipe, grid), row.schedule(steps))?,
            row: row.clone(),
            step: 0,
            branch: Branch::Conditional,
            spent: Duration::ZERO,
            shares: Vec::new(),
        })
    }

    /// What the schedule did.
    pub fn counts(&self) -> Counts {
        self.denoising.counts()
    }

    /// Memory of the kept orders in bytes.
    pub fn kept_bytes(&self) -> usize {
        self.denoising.bytes()
    }

    /// Time inside the attention calls.
    pub fn spent(&self) -> Duration {
        self.spent
    }

    /// Share of the value energy that the block means held, averaged over the calls that subtracted them.
    pub fn mean_share(&self) -> Option<f64> {
        (!self.shares.is_empty()).then(|| self.shares.iter().sum::<f64>() / self.shares.len() as f64)
    }
}

impl Stepped for RowAttention {
    fn enter(&mut self, step: usize, branch: Branch) {
        (self.step, self.branch) = (step, branch);
    }
}

impl Attend for RowAttention {
    fn attend(&mut self, layer: usize, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        let (q, k, v) = if self.row.narrow {
            (q.to_dtype(DType::BF16)?, k.to_dtype(DType::BF16)?, v.to_dtype(DType::BF16)?)
        } else {
            (q.clone(), k.clone(), v.clone())
        };
        let site = Site { layer: layer as u32, branch: self.branch as u32, ..Site::default() };
        let recipe = self.row.recipe_at(self.step, layer);
        let start = Instant::now();
        let o = self.denoising.forward_as(recipe, self.step, site, &q, &k, &v, scale(&q)?)?;
        self.spent += start.elapsed();
        let observed = self.denoising.attention().observed()?;
        self.shares.extend(observed.and_then(|observed| observed.mean_share));
        Ok(o.to_dtype(DType::F32)?)
    }
}

/// 1 / sqrt(head_dim).
///
/// # Errors
/// When `q` is not (batch, tokens, heads, head_dim).
pub fn scale(q: &Tensor) -> Result<f32> {
    Ok(1.0 / (q.dims4()?.3 as f32).sqrt())
}
