//! The attention of a row: its recipe on the orders of its schedule, in the tensors' place in the loop.

use std::time::Duration;

use anyhow::Result;
use candle_core::{DType, Device, Tensor};
use half::bf16;
use vc_attention::backend::Backend;
use vc_attention::backend::cpu::Cpu;
use vc_attention::schedule::{Counts, Schedule, Site};
use vc_attention::{Elements, Layout, Options, Problem, TensorView};

use crate::model::Attend;
use crate::row::Row;
use crate::sampler::{Branch, Stepped};

/// The attention of one clip.
#[derive(Debug)]
pub struct RowAttention {
    row: Row,
    schedule: Schedule<Cpu>,
    grid: [usize; 3],
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
    pub fn new(row: &Row, steps: usize, grid: [usize; 3]) -> Result<Self> {
        Ok(Self {
            schedule: Schedule::new(row.schedule(steps), row.recipe.clone())?,
            row: row.clone(),
            grid,
            step: 0,
            branch: Branch::Conditional,
            spent: Duration::ZERO,
            shares: Vec::new(),
        })
    }

    /// Where it runs.
    pub fn device(&self) -> String {
        Cpu.device()
    }

    /// What the schedule did.
    pub fn counts(&self) -> Counts {
        self.schedule.counts()
    }

    /// Memory of the kept orders in bytes.
    pub fn kept_bytes(&self) -> usize {
        self.schedule.bytes()
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
        let inputs = Inputs::new(q, k, v, self.row.narrow)?;
        let problem = inputs.problem(self.grid)?;
        let site = Site { layer: layer as u32, branch: self.branch as u32, ..Site::default() };
        let recipe = self.row.recipe_at(self.step, layer);
        let done = self.schedule.attend_as(recipe, &Cpu, self.step, site, &problem, Options::default())?;
        self.spent += done.report.total();
        self.shares.extend(done.report.mean_share);
        to_tensor(&done.output.o, q.device())
    }
}

/// q, k and v of a call, (1, tokens, heads, head_dim), in host memory.
#[derive(Debug)]
pub struct Inputs {
    shape: [usize; 4],
    tensors: [Buffer; 3],
}

#[derive(Debug)]
enum Buffer {
    F32(Vec<f32>),
    Bf16(Vec<bf16>),
}

impl Inputs {
    /// Copies the tensors, rounded to bf16 where `narrow`.
    ///
    /// # Errors
    /// When they are not of rank 4 and f32.
    pub fn new(q: &Tensor, k: &Tensor, v: &Tensor, narrow: bool) -> Result<Self> {
        let (batch, tokens, heads, dim) = q.dims4()?;
        let copy = |x: &Tensor| -> Result<Buffer> {
            Ok(if narrow {
                Buffer::Bf16(x.to_dtype(DType::BF16)?.flatten_all()?.to_vec1()?)
            } else {
                Buffer::F32(x.flatten_all()?.to_vec1()?)
            })
        };
        Ok(Self { shape: [batch, heads, tokens, dim], tensors: [copy(q)?, copy(k)?, copy(v)?] })
    }

    /// The call on them.
    ///
    /// # Errors
    /// When their shapes differ.
    pub fn problem(&self, grid: [usize; 3]) -> Result<Problem<'_>> {
        let view = |name, i: usize| {
            let elements = match &self.tensors[i] {
                Buffer::F32(x) => Elements::F32(x),
                Buffer::Bf16(x) => Elements::Bf16(x),
            };
            TensorView::new(name, elements, self.shape, Layout::Bshd)
        };
        let problem = Problem::new(view("q", 0)?, view("k", 1)?, view("v", 2)?);
        Ok(Problem { grid: Some(grid), ..problem })
    }
}

/// An output's values in f32, row-major in (batch, heads, tokens, dim).
pub fn values(o: &vc_attention::Tensor) -> Vec<f32> {
    let [batch, heads, tokens, _] = o.shape();
    let view = o.view();
    (0..batch * heads).flat_map(|i| view.read_head(i / heads, i % heads, tokens)).collect()
}

/// An output as candle has it, (1, tokens, heads, head_dim) in f32.
///
/// # Errors
/// Of the device.
pub fn to_tensor(o: &vc_attention::Tensor, device: &Device) -> Result<Tensor> {
    Ok(Tensor::from_vec(values(o), &o.shape()[..], device)?.transpose(1, 2)?)
}
