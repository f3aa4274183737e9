//! The attention of a row: its recipe on the orders of its schedule, in the tensors' place in the loop.

use std::time::{Duration, Instant};

use anyhow::Result;
use candle_core::{DType, Device, Tensor};
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
    /// The GPU that the model runs on; exact attention by candle's own operations.
    #[cfg(feature = "cuda")]
    Model(Device),
}

impl Compute {
    /// An attention with a recipe.
    pub fn attention(&self, recipe: &Recipe, grid: [usize; 3]) -> VcAttention {
        let options = Options::new(recipe.clone()).with_grid(grid);
        match self {
            Compute::Cpu => VcAttention::new(options),
            Compute::Gpu(gpu) => VcAttention::offloaded(options, gpu.clone()),
            #[cfg(feature = "cuda")]
            Compute::Model(_) => VcAttention::new(options),
        }
    }

    /// Name of the backend.
    pub fn backend(&self) -> &'static str {
        match self {
            Compute::Cpu => Cpu.name(),
            Compute::Gpu(gpu) => gpu.name(),
            #[cfg(feature = "cuda")]
            Compute::Model(_) => "cuda",
        }
    }

    /// In words.
    pub fn device(&self) -> String {
        match self {
            Compute::Cpu => Cpu.device(),
            Compute::Gpu(gpu) => gpu.device(),
            #[cfg(feature = "cuda")]
            Compute::Model(device) => match device.as_cuda_device().map(|d| d.cuda_stream().context().name())
            {
                Ok(Ok(name)) => format!("{name}, by candle"),
                _ => "a GPU, by candle".into(),
            },
        }
    }
}

/// The attention of one clip.
#[derive(Debug)]
pub struct RowAttention {
    row: Row,
    compute: Compute,
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
            compute: compute.clone(),
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
        let home = q.device();
        let placed = |x: &Tensor| match &self.compute {
            #[cfg(feature = "cuda")]
            Compute::Model(_) => Ok(x.clone()),
            Compute::Cpu | Compute::Gpu(_) => x.to_device(&Device::Cpu),
        };
        let input = |x: &Tensor| placed(&if self.row.narrow { x.to_dtype(DType::BF16)? } else { x.clone() });
        let (q, k, v) = (input(q)?, input(k)?, input(v)?);
        let site = Site { layer: layer as u32, branch: self.branch as u32, ..Site::default() };
        let recipe = self.row.recipe_at(self.step, layer);
        let start = Instant::now();
        #[cfg(feature = "cuda")]
        if matches!(self.compute, Compute::Model(_)) && recipe.name == EXACT {
            let o = exact(&q, &k, &v)?;
            home.synchronize()?;
            self.spent += start.elapsed();
            return Ok(o.to_dtype(DType::F32)?);
        }
        let o = self.denoising.forward_as(recipe, self.step, site, &q, &k, &v, scale(&q)?)?;
        self.spent += start.elapsed();
        let observed = self.denoising.attention().observed()?;
        self.shares.extend(observed.and_then(|observed| observed.mean_share));
        Ok(o.to_device(home)?.to_dtype(DType::F32)?)
    }
}

/// The recipe that candle's own operations stand for on a GPU.
pub const EXACT: &str = "exact";

/// softmax(q k^T / sqrt(head_dim)) v in f32 by candle's operations, in the type of `q`; all (batch, tokens, heads, head_dim).
#[cfg(feature = "cuda")]
fn exact(q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
    let heads = |x: &Tensor| x.to_dtype(DType::F32)?.transpose(1, 2)?.contiguous();
    let s = (heads(q)?.matmul(&heads(k)?.t()?.contiguous()?)? * f64::from(scale(q)?))?;
    let o = candle_nn::ops::softmax_last_dim(&s)?.matmul(&heads(v)?)?;
    Ok(o.transpose(1, 2)?.contiguous()?.to_dtype(q.dtype())?)
}

/// 1 / sqrt(head_dim).
///
/// # Errors
/// When `q` is not (batch, tokens, heads, head_dim).
pub fn scale(q: &Tensor) -> Result<f32> {
    Ok(1.0 / (q.dims4()?.3 as f32).sqrt())
}
