//! The forward pass on candle's CPU storages, by the CPU backend or, offloaded, by a GPU.

use std::sync::Arc;

use candle_core::{CpuStorage, DeviceLocation, Result, Shape};
use vc_attention::backend::Backend;
use vc_attention::backend::cpu::Cpu;
use vc_attention::grouping::KeptOrder;
use vc_attention::tensor::Buffer;
use vc_attention::{Output, OutputType, Plan, Problem, Report, Tensor, run, run_on_order};

use crate::attention::{Host, Observed, Op};
use crate::order::{Grouping, Labels, Made};
use crate::tensors::{Storages, with_problem};

/// Output and, if asked for, LSE.
pub(crate) struct Forward {
    pub o: CpuStorage,
    /// (batch, seq, heads, head_dim).
    pub shape: Shape,
    /// (batch, heads, seq).
    pub lse: Option<CpuStorage>,
    pub observed: Observed,
}

pub(crate) fn forward(op: &Op, storages: Storages<CpuStorage>) -> Result<Forward> {
    let (output, report) = with_problem(storages, op.scale, &op.options, |problem| match &op.host {
        Host::Cpu => attend(&Cpu, op, problem),
        #[cfg(feature = "offload")]
        Host::Gpu(gpu) => attend(gpu, op, problem),
    })?;
    let [batch, heads, tokens, dim] = output.o.shape();
    Ok(Forward {
        o: tokens_first(&output.o),
        shape: Shape::from((batch, tokens, heads, dim)),
        lse: output.lse.map(CpuStorage::F32),
        observed: Observed {
            max_score: output.observed.max_score,
            f32_fallbacks: output.observed.f32_fallbacks,
            out_of_range: false,
            mean_share: report.mean_share,
        },
    })
}

fn attend<B>(backend: &B, op: &Op, problem: &Problem) -> vc_attention::Result<(Output, Report)>
where
    B: Backend<Kept = Vec<KeptOrder>>,
{
    let wanted = vc_attention::Options { output: OutputType::Input, lse: op.lse };
    let plan = Plan::new(problem, &op.options.recipe, wanted)?;
    let keeps = op.order.as_ref().filter(|_| plan.recipe.grouping.order.clusters());
    let Some((order, grouping)) = keeps else {
        let run = run(backend, &plan, problem, None)?;
        return Ok((run.output, run.report));
    };
    let made = Made::new(DeviceLocation::Cpu, problem.k.shape(), &op.options);
    let orders = match order.start(*grouping, &made)? {
        Some(Labels::Cpu(kept)) if *grouping == Grouping::Reuse => backend.restore(&plan, problem, &kept)?,
        Some(Labels::Cpu(kept)) => backend.refresh(&plan, problem, &kept)?,
        // Labels of another place start nothing here; `start` gives none.
        _ => backend.group(&plan, problem, None)?,
    };
    let run = run_on_order(backend, &plan, problem, orders)?;
    // Behind the attention: a call that fails leaves what was kept.
    if *grouping != Grouping::Reuse {
        order.keep(made, Labels::Cpu(Arc::new(backend.keep(&run.order)?)));
    }
    Ok((run.output, run.report))
}

/// (batch, heads, tokens, dim) to the storage of (batch, tokens, heads, dim).
fn tokens_first(o: &Tensor) -> CpuStorage {
    fn swap<T: Copy>(x: &[T], [batch, heads, tokens, dim]: [usize; 4]) -> Vec<T> {
        let mut out = Vec::with_capacity(x.len());
        for row in 0..batch * tokens * heads {
            let (b, token, head) = (row / (tokens * heads), row / heads % tokens, row % heads);
            out.extend_from_slice(&x[((b * heads + head) * tokens + token) * dim..][..dim]);
        }
        out
    }
    match o.buffer() {
        Buffer::F32(x) => CpuStorage::F32(swap(x, o.shape())),
        Buffer::F16(x) => CpuStorage::F16(swap(x, o.shape())),
        Buffer::Bf16(x) => CpuStorage::BF16(swap(x, o.shape())),
    }
}
