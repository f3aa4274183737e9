//! The CUDA backend: the kernels of `kernels-gpu` on an NVIDIA GPU.
//!
//! Two ways in. [`Cuda`] is a [`Backend`] on tensors in host memory, for the program and for comparisons with the
//! CPU. [`DevicePlan`] is what an application embeds: it takes device pointers and a stream of anybody's, and its
//! calls only launch.

mod dispatch;
mod driver;
mod embedded;
mod event;
mod plan;
mod probe;
mod workspace;

use std::sync::Arc;

use cudarc::driver::CudaStream;

pub use self::dispatch::{Family, Kernels, Module, Row, State, TABLE, kernels_for};
pub use self::driver::{Buffer, Device, DevicePtr, Function, Stream, driver_present};
pub use self::embedded::{Image, images};
pub use self::event::{StageTimes, Stopwatch, time_stages};
pub use self::plan::{
    DeviceObserved, DeviceOperands, DevicePlan, Grouping, PROMOTE, Rope, Spec, Strides, Tensors,
};
pub use self::probe::{Listed, driver_version, gpus};
use super::cpu::{Cpu, F16_SCORE_LIMIT};
use super::{Backend, Observed, Output};
use crate::error::{Error, Result};
use crate::grouping::KeptOrder;
use crate::plan::Plan;
use crate::problem::{NonFinite, Problem, Shape};
use crate::recipe::ScoreType;
use crate::tensor::{DType, Elements, Layout, Tensor, TensorView};

/// One GPU as a backend for tensors in host memory. A call whose scores leave the range of f16 accumulators runs on
/// the CPU instead, which `Observed::f32_fallbacks` shows.
#[derive(Clone, Debug)]
pub struct Cuda {
    device: Arc<Device>,
    stream: Arc<CudaStream>,
}

/// The token orders of a call, on the device, with the plan that holds them and the tensors that were uploaded. Once
/// made it does not change: a refresh makes another.
#[derive(Clone, Debug)]
pub struct Session {
    plan: Arc<DevicePlan>,
    buffers: Arc<Buffers>,
    tensors: Tensors,
    /// Valid keys of every batch.
    lens: Arc<[usize]>,
}

#[derive(Debug)]
struct Buffers {
    o: Buffer,
    lse: Buffer,
    /// Kept alive for the pointers in [`Tensors`].
    _inputs: [Buffer; 4],
}

/// Marks operands that lie in the device plan of a [`Session`].
#[derive(Clone, Debug)]
pub struct OnDevice(Session);

impl Cuda {
    /// Opens GPU `ordinal`.
    ///
    /// # Errors
    /// As [`Device::new`].
    pub fn new(ordinal: usize) -> Result<Self> {
        let device = Device::new(ordinal)?;
        let stream = device.context().new_stream().map_err(|e| driver::failed("making a stream", e))?;
        Ok(Self { device, stream })
    }

    /// The GPU with its kernels.
    pub fn gpu(&self) -> &Arc<Device> {
        &self.device
    }

    /// The stream that the backend works on.
    pub fn stream(&self) -> Stream {
        Stream::from(&*self.stream)
    }

    fn session(&self, plan: &Plan, problem: &Problem) -> Result<Session> {
        let shape = plan.shape;
        let input = same_type(problem)?;
        let spec = Spec::contiguous(shape, plan.recipe.clone(), plan.scale, input, plan.dtype);
        let device_plan = DevicePlan::new(&self.device, spec)?;
        let upload = |view: &TensorView| Buffer::from_slice(&self.device, &packed(view));
        let (q, k, v) = (upload(&problem.q)?, upload(&problem.k)?, upload(&problem.v)?);
        let lens: Arc<[usize]> = (0..shape.batch).map(|b| problem.kv_len(b)).collect();
        let device_lens: Vec<u32> = lens.iter().map(|&len| len as u32).collect();
        let device_lens = Buffer::from_slice(&self.device, &device_lens)?;
        let rows = shape.batch * shape.q_heads * shape.q_tokens;
        let width = if plan.dtype == DType::F32 { 4 } else { 2 };
        let o = Buffer::new(&self.device, rows * shape.head_dim * width)?;
        let lse = Buffer::new(&self.device, rows * size_of::<f32>())?;
        let tensors = Tensors {
            q: q.ptr(),
            k: k.ptr(),
            v: v.ptr(),
            o: o.ptr(),
            lse: if plan.options.lse { lse.ptr() } else { 0 },
            kv_lens: device_lens.ptr(),
            rope: Rope::default(),
        };
        let buffers = Arc::new(Buffers { o, lse, _inputs: [q, k, v, device_lens] });
        Ok(Session { plan: Arc::new(device_plan), buffers, tensors, lens })
    }

    /// Groups on a session of its own, from the order that its plan holds, or cold where it holds none.
    fn grouped(&self, session: Session) -> Result<Session> {
        // SAFETY: the session's tensors have the sizes of its plan and live as long as it does.
        unsafe { session.plan.group(self.stream(), &session.tensors, Grouping::Warm) }?;
        self.stream().synchronize()?;
        Ok(session)
    }
}

/// The element type of q, k and v, which the kernels want to be one.
fn same_type(problem: &Problem) -> Result<DType> {
    let q = problem.q.dtype();
    for (tensor, view) in [("k", &problem.k), ("v", &problem.v)] {
        if view.dtype() != q {
            return Err(Error::Tensor {
                tensor,
                expected: format!("the element type of q, {q:?}, on the GPU"),
                given: format!("{:?}", view.dtype()),
            });
        }
    }
    Ok(q)
}

/// The bytes of a tensor, contiguous in (batch, heads, tokens, dim).
fn packed(view: &TensorView) -> Vec<u8> {
    fn gather<T: bytemuck::Pod>(x: &[T], shape: [usize; 4], strides: [usize; 4]) -> Vec<u8> {
        let [b, h, n, d] = shape;
        let mut out = Vec::with_capacity(b * h * n * d * size_of::<T>());
        for i in 0..b * h * n {
            let start = i / (h * n) * strides[0] + i / n % h * strides[1] + i % n * strides[2];
            if strides[3] == 1 {
                out.extend_from_slice(bytemuck::cast_slice(&x[start..start + d]));
            } else {
                (0..d).for_each(|c| out.extend_from_slice(bytemuck::bytes_of(&x[start + c * strides[3]])));
            }
        }
        out
    }
    match view.elements() {
        Elements::F32(x) => gather(x, view.shape(), view.strides()),
        Elements::F16(x) => gather(x, view.shape(), view.strides()),
        Elements::Bf16(x) => gather(x, view.shape(), view.strides()),
    }
}

impl Backend for Cuda {
    type Order = Session;
    type Kept = Vec<KeptOrder>;
    type Q = OnDevice;
    type K = OnDevice;
    type V = OnDevice;

    fn name(&self) -> &'static str {
        "cuda"
    }

    fn device(&self) -> String {
        let (major, minor) = self.device.capability();
        format!("{}, compute capability {major}.{minor}", self.device.name())
    }

    fn group(&self, plan: &Plan, problem: &Problem, warm: Option<&Session>) -> Result<Session> {
        let session = self.session(plan, problem)?;
        // A plan of its own, so that the order that it starts from stays. One of other heads or lengths is no start.
        if let Some(warm) = warm.filter(|w| w.lens == session.lens && session.plan.groups_like(&w.plan)) {
            // SAFETY: the caller holds the old session while this waits, and its order was waited for; the tensors as
            // in `grouped`.
            unsafe { session.plan.take_over(self.stream(), &session.tensors, &warm.plan) }?;
        }
        self.grouped(session)
    }

    fn refresh(&self, plan: &Plan, problem: &Problem, kept: &Vec<KeptOrder>) -> Result<Session> {
        self.grouped(self.restore(plan, problem, kept)?)
    }

    fn keep(&self, order: &Session) -> Result<Vec<KeptOrder>> {
        let (plan, shape) = (&order.plan, order.plan.spec().shape);
        let clusters = plan.clusters();
        if clusters == 0 {
            return Ok(vec![KeptOrder::default(); shape.batch * shape.kv_heads]);
        }
        let labels = plan.labels(self.stream())?;
        let keep = |(index, labels): (usize, &[u16])| {
            KeptOrder::new(&labels[..order.lens[index / shape.kv_heads]], clusters)
        };
        labels.chunks_exact(shape.kv_tokens).enumerate().map(keep).collect()
    }

    fn restore(&self, plan: &Plan, problem: &Problem, kept: &Vec<KeptOrder>) -> Result<Session> {
        let session = self.session(plan, problem)?;
        let Shape { batch, kv_heads, kv_tokens, .. } = plan.shape;
        if session.plan.clusters() == 0 {
            return Ok(session);
        }
        let fits = kept.len() == batch * kv_heads
            && kept.iter().enumerate().all(|(index, kept)| {
                kept.tokens() == problem.kv_len(index / kv_heads)
                    && kept.clusters() <= session.plan.clusters()
            });
        if !fits {
            return Err(Error::Tensor {
                tensor: "order",
                expected: format!("a kept order for each of {} (batch, kv head)", batch * kv_heads),
                given: format!("{} orders, of other lengths or numbers of clusters", kept.len()),
            });
        }
        let mut labels = vec![0u16; batch * kv_heads * kv_tokens];
        for (labels, kept) in labels.chunks_exact_mut(kv_tokens).zip(kept) {
            labels[..kept.tokens()].copy_from_slice(&kept.labels());
        }
        let labels = Buffer::from_slice(&self.device, &labels)?;
        // SAFETY: the labels are those of this shape's plan, below its clusters; they live until the stream is through.
        unsafe { session.plan.load_labels(self.stream(), &session.tensors, labels.ptr()) }?;
        self.stream().synchronize()?;
        Ok(session)
    }

    fn kept_bytes(kept: &Vec<KeptOrder>) -> usize {
        KeptOrder::bytes_of(kept)
    }

    fn prepare_q(&self, _: &Plan, _: &Problem, order: &Session) -> Result<OnDevice> {
        // SAFETY: as in `grouped`.
        unsafe { order.plan.prepare_q(self.stream(), &order.tensors) }?;
        self.stream().synchronize()?;
        Ok(OnDevice(order.clone()))
    }

    fn prepare_k(&self, _: &Plan, _: &Problem, order: &Session, _: &OnDevice) -> Result<OnDevice> {
        // SAFETY: as in `grouped`.
        unsafe { order.plan.prepare_k(self.stream(), &order.tensors) }?;
        self.stream().synchronize()?;
        Ok(OnDevice(order.clone()))
    }

    fn prepare_v(&self, _: &Plan, _: &Problem, order: &Session) -> Result<OnDevice> {
        // SAFETY: as in `grouped`.
        unsafe { order.plan.prepare_v(self.stream(), &order.tensors) }?;
        self.stream().synchronize()?;
        Ok(OnDevice(order.clone()))
    }

    fn attend(
        &self,
        plan: &Plan,
        problem: &Problem,
        q: &OnDevice,
        _: &OnDevice,
        _: &OnDevice,
    ) -> Result<Output> {
        let Session { plan: device_plan, buffers, tensors, .. } = &q.0;
        // SAFETY: as in `grouped`.
        unsafe { device_plan.attend(self.stream(), tensors) }?;
        let observed = device_plan.observed(self.stream())?;
        // f16 scores do not serve such heads, and no kernel of such formats has f32 ones: the CPU's numerics do.
        let narrow = plan.recipe.scores == ScoreType::F16;
        let beyond = observed.max_score.is_nan() || observed.max_score >= F16_SCORE_LIMIT;
        if narrow && (observed.saturated || beyond) {
            let order = Cpu.restore(plan, problem, &self.keep(&q.0)?)?;
            return crate::run_on_order(&Cpu, plan, problem, order).map(|run| run.output);
        }
        let s = plan.shape;
        let shape = [s.batch, s.q_heads, s.q_tokens, s.head_dim];
        let count = shape.iter().product();
        let o = match plan.dtype {
            DType::F32 => buffers.o.to_vec::<f32>(count)?,
            DType::F16 => buffers.o.to_vec::<half::f16>(count)?.iter().map(|x| x.to_f32()).collect(),
            DType::Bf16 => buffers.o.to_vec::<half::bf16>(count)?.iter().map(|x| x.to_f32()).collect(),
        };
        if problem.nonfinite == NonFinite::Reject {
            super::check_finite_output(&o, shape)?;
        }
        let lse = if plan.options.lse {
            Some(buffers.lse.to_vec::<f32>(s.batch * s.q_heads * s.q_tokens)?)
        } else {
            None
        };
        Ok(Output {
            o: Tensor::from_bhsd(o, shape, plan.dtype, Layout::Bhsd),
            lse,
            observed: Observed { max_score: observed.max_score, f32_fallbacks: 0, exact_share: 0.0 },
        })
    }

    fn mean_share(&self, v: &OnDevice) -> Result<Option<f64>> {
        Ok(v.0.plan.observed(self.stream())?.mean_share)
    }
}
