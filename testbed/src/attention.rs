//! The attention of a row: its recipe on the orders of its schedule, in the tensors' place in the loop.

use std::time::Duration;

use anyhow::Result;
use candle_core::{DType, Tensor};
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
        let (_, tokens, heads, dim) = q.dims4()?;
        let shape = [1, heads, tokens, dim];
        let flat = |x: &Tensor| -> Result<Vec<bf16>> {
            Ok(x.to_dtype(DType::BF16)?.flatten_all()?.to_vec1::<bf16>()?)
        };
        let wide = |x: &Tensor| -> Result<Vec<f32>> { Ok(x.flatten_all()?.to_vec1::<f32>()?) };
        let (mut n, mut w) = (Vec::new(), Vec::new());
        for x in [q, k, v] {
            if self.row.narrow { n.push(flat(x)?) } else { w.push(wide(x)?) }
        }
        let view = |i: usize, name| {
            let elements = if self.row.narrow { Elements::Bf16(&n[i]) } else { Elements::F32(&w[i]) };
            TensorView::new(name, elements, shape, Layout::Bshd)
        };
        let mut problem = Problem::new(view(0, "q")?, view(1, "k")?, view(2, "v")?);
        problem.grid = Some(self.grid);
        let site = Site { layer: layer as u32, branch: self.branch as u32, ..Site::default() };
        let recipe = self.row.recipe_at(self.step, layer);
        let done =
            self.schedule.attend_as(recipe, &Cpu, self.step, site, &problem, Options::default())?;
        self.spent += done.report.total();
        self.shares.extend(done.report.mean_share);
        let o: Vec<f32> = match done.output.o.view().elements() {
            Elements::F32(x) => x.to_vec(),
            Elements::Bf16(x) => x.iter().map(|x| x.to_f32()).collect(),
            Elements::F16(_) => unreachable!(),
        };
        Ok(Tensor::from_vec(o, (1, heads, tokens, dim), q.device())?.transpose(1, 2)?)
    }
}
