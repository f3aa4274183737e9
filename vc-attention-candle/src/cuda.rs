//! The forward pass on candle's CUDA storages: the kernels of `vc_attention` on candle's own memory and stream.
//!
//! Type-checked in CI without a toolkit and without a GPU (`cargo xtask candle`). On an H200 it ran the clips of
//! `docs/results.md`; its tests are those of the CPU half.

use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use std::thread::{self, ThreadId};

use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::cuda_backend::cudarc::driver::sys::CUstreamCaptureStatus;
use candle_core::cuda_backend::cudarc::driver::{
    CudaEvent, CudaSlice, CudaStream, DevicePtr, DevicePtrMut, DeviceRepr,
};
use candle_core::cuda_backend::{CudaDType, DeviceId, WrapErr};
use candle_core::{CudaDevice, CudaStorage, DType, Result, Shape, bail};
use half::{bf16, f16};
use vc_attention::Recipe;
use vc_attention::backend::cpu::F16_SCORE_LIMIT;
use vc_attention::backend::cuda::{self, DevicePlan, PROMOTE, Rope, Spec, Stream, Tensors};
use vc_attention::recipe::ScoreType;

use crate::attention::{Observed, Op};
use crate::error::to_candle;
use crate::order::{Grouping, Labels, Made};
use crate::tensors::{Axes, Storages, dtype};

/// Plans that a handle keeps.
const MAX_PLANS: usize = 4;

/// Output and, if asked for, LSE, still in the making.
pub(crate) struct Forward {
    pub o: CudaStorage,
    /// (batch, seq, heads, head_dim).
    pub shape: Shape,
    /// (batch, heads, seq).
    pub lse: Option<CudaStorage>,
    pub key: Arc<Key>,
}

/// What a plan is found by.
#[derive(Clone, Debug)]
pub(crate) struct Key {
    device: DeviceId,
    spec: Spec,
    kv_lens: Option<Vec<usize>>,
}

impl PartialEq for Key {
    fn eq(&self, other: &Self) -> bool {
        let (a, b) = (&self.spec, &other.spec);
        self.device == other.device
            && (a.shape, a.scale.to_bits(), a.input, a.output)
                == (b.shape, b.scale.to_bits(), b.input, b.output)
            && (a.q, a.k, a.v, a.o, a.promote) == (b.q, b.k, b.v, b.o, b.promote)
            && a.recipe == b.recipe
            && self.kv_lens == other.kv_lens
    }
}

/// The plans of a handle, the one used last at the end.
#[derive(Debug, Default)]
pub(crate) struct Plans(Vec<Entry>);

#[derive(Debug)]
struct Entry {
    key: Arc<Key>,
    plan: DevicePlan,
    /// Valid keys of every batch.
    kv_lens: Option<CudaSlice<u32>>,
    last: Option<Use>,
}

/// The last call on a plan.
#[derive(Debug)]
struct Use {
    thread: ThreadId,
    stream: Arc<CudaStream>,
    done: CudaEvent,
}

/// The plans behind the free functions.
pub(crate) fn shared() -> Arc<Mutex<Plans>> {
    static SHARED: LazyLock<Arc<Mutex<Plans>>> = LazyLock::new(Arc::default);
    SHARED.clone()
}

/// The kernels on candle's device. They stay loaded: assembling them takes the driver seconds.
fn kernels(device: &CudaDevice) -> Result<Arc<cuda::Device>> {
    static LOADED: Mutex<Vec<Arc<cuda::Device>>> = Mutex::new(Vec::new());
    let stream = device.cuda_stream();
    let context = stream.context();
    let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
    // candle's devices on one GPU share its primary context.
    if let Some(kernels) = loaded.iter().find(|k| k.context().cu_ctx() == context.cu_ctx()) {
        return Ok(kernels.clone());
    }
    let kernels = cuda::Device::in_context(context.clone()).map_err(to_candle)?;
    loaded.push(kernels.clone());
    Ok(kernels)
}

pub(crate) fn supports(
    device: &CudaDevice,
    head_dim: usize,
    input: vc_attention::DType,
    recipe: &Recipe,
) -> Result<()> {
    DevicePlan::covers(&*kernels(device)?, recipe, head_dim, input).map_err(to_candle)
}

pub(crate) fn forward(op: &Op, storages: Storages<CudaStorage>) -> Result<Forward> {
    match storages[0].0.dtype() {
        DType::F16 => typed::<f16>(op, storages),
        DType::BF16 => typed::<bf16>(op, storages),
        other => {
            bail!("vc_attn: q, k and v must be f16 or bf16 on the GPU, not {other:?}: convert them first")
        }
    }
}

fn typed<T: CudaDType + DeviceRepr>(op: &Op, [q, k, v]: Storages<CudaStorage>) -> Result<Forward> {
    let device = q.0.device();
    let axes = [Axes::of("q", q.1)?, Axes::of("k", k.1)?, Axes::of("v", v.1)?];
    let shape = vc_attention::Shape::new(axes[0].shape, axes[1].shape, axes[2].shape).map_err(to_candle)?;
    shape.check(op.options.kv_lens.as_deref(), Some(op.scale), op.options.grid).map_err(to_candle)?;
    let (rows, dim) = (shape.batch * shape.q_heads * shape.q_tokens, shape.head_dim);
    let element = dtype(q.0.dtype())?;
    let spec = Spec {
        shape,
        recipe: op.options.recipe.clone(),
        scale: op.scale,
        input: element,
        output: element,
        q: axes[0].device_strides("q")?,
        k: axes[1].device_strides("k")?,
        v: axes[2].device_strides("v")?,
        o: [shape.q_tokens * shape.q_heads * dim, dim, shape.q_heads * dim].map(|stride| stride as i64),
        promote: PROMOTE,
    };
    let stream = device.cuda_stream();
    let key = Arc::new(Key { device: device.id(), spec, kv_lens: op.options.kv_lens.clone() });
    let mut plans = op.plans.lock().unwrap_or_else(PoisonError::into_inner);
    let entry = plans.entry(device, &key)?;
    // SAFETY: the kernels write every element of the output and of the LSE.
    let (mut o, mut lse) = unsafe {
        (device.alloc::<T>(rows * dim)?, if op.lse { Some(device.alloc::<f32>(rows)?) } else { None })
    };
    entry.take_turn(&stream)?;
    let launched = {
        let (q_ptr, _q) = q.0.as_cuda_slice::<T>()?.device_ptr(&stream);
        let (k_ptr, _k) = k.0.as_cuda_slice::<T>()?.device_ptr(&stream);
        let (v_ptr, _v) = v.0.as_cuda_slice::<T>()?.device_ptr(&stream);
        let (o_ptr, _o) = o.device_ptr_mut(&stream);
        let lse = lse.as_mut().map(|lse| lse.device_ptr_mut(&stream));
        let kv_lens = entry.kv_lens.as_ref().map(|lens| lens.device_ptr(&stream));
        let at = |ptr: u64, axes: &Axes| ptr + (axes.offset * size_of::<T>()) as u64;
        let tensors = Tensors {
            q: at(q_ptr, &axes[0]),
            k: at(k_ptr, &axes[1]),
            v: at(v_ptr, &axes[2]),
            o: o_ptr,
            lse: lse.as_ref().map_or(0, |(ptr, _)| *ptr),
            kv_lens: kv_lens.as_ref().map_or(0, |(ptr, _)| *ptr),
            rope: Rope::default(),
        };
        // SAFETY: candle's layouts stay inside their storages, so the pointers reach what the spec says; cudarc keeps
        // freed memory until the stream is through.
        unsafe { launch(op, device, &entry.plan, &stream, &tensors, &shape) }
    };
    // Also after a failure: part of the call may have been launched.
    entry.end_turn(&stream)?;
    launched?;
    Ok(Forward {
        o: CudaStorage::wrap_cuda_slice(o, device.clone()),
        shape: Shape::from((shape.batch, shape.q_tokens, shape.q_heads, dim)),
        lse: lse.map(|lse| CudaStorage::wrap_cuda_slice(lse, device.clone())),
        key,
    })
}

/// Launches the call on the token order that the caller wants.
///
/// # Safety
/// As for [`DevicePlan::run`].
unsafe fn launch(
    op: &Op,
    device: &CudaDevice,
    plan: &DevicePlan,
    stream: &CudaStream,
    tensors: &Tensors,
    shape: &vc_attention::Shape,
) -> Result<()> {
    let handle = Stream::from(stream);
    let Some((order, grouping)) = op.order.as_ref().filter(|_| plan.labels_bytes() > 0) else {
        // SAFETY: by the caller.
        return unsafe { plan.run(handle, tensors, cuda::Grouping::Cold) }.map_err(to_candle);
    };
    let keys = [shape.batch, shape.kv_heads, shape.kv_tokens, shape.head_dim];
    let made = Made::new(device.location(), keys, &op.options);
    let start = order.start(*grouping, &made).map_err(to_candle)?;
    let on_device = match (grouping, &start) {
        (Grouping::Reuse, _) => cuda::Grouping::Reuse,
        (_, Some(_)) => cuda::Grouping::Warm,
        (_, None) => cuda::Grouping::Cold,
    };
    if let Some(Labels::Cuda(labels)) = &start {
        let (from, _read) = labels.device_ptr(stream);
        // SAFETY: `Made` says that a plan of this shape, recipe and these lengths saved them.
        unsafe { plan.load_labels(handle, tensors, from) }.map_err(to_candle)?;
    }
    // SAFETY: by the caller.
    unsafe { plan.run(handle, tensors, on_device) }.map_err(to_candle)?;
    if *grouping == Grouping::Reuse {
        return Ok(());
    }
    // SAFETY: saving writes every byte.
    let mut labels = unsafe { device.alloc::<u8>(plan.labels_bytes()) }?;
    {
        let (to, _written) = labels.device_ptr_mut(stream);
        // SAFETY: the slice has as many bytes as are saved.
        unsafe { plan.save_labels(handle, to) }.map_err(to_candle)?;
    }
    order.keep(made, Labels::Cuda(Arc::new(labels)));
    Ok(())
}

impl Plans {
    /// The plan of a call, made if there is none.
    fn entry(&mut self, device: &CudaDevice, key: &Arc<Key>) -> Result<&mut Entry> {
        let entry = match self.0.iter().position(|entry| entry.key == *key) {
            Some(at) => self.0.remove(at),
            None => {
                let kernels = kernels(device)?;
                DevicePlan::check(&kernels, &key.spec).map_err(to_candle)?;
                // A place, and its memory, before the new plan takes as much again.
                if self.0.len() == MAX_PLANS {
                    self.0.remove(0);
                }
                let plan = DevicePlan::new(&kernels, key.spec.clone()).map_err(to_candle)?;
                let lens: Option<Vec<u32>> =
                    key.kv_lens.as_ref().map(|lens| lens.iter().map(|&len| len as u32).collect());
                let kv_lens = lens.map(|lens| device.clone_htod(&lens)).transpose()?;
                Entry { key: key.clone(), plan, kv_lens, last: None }
            }
        };
        self.0.push(entry);
        Ok(self.0.last_mut().expect("just pushed"))
    }

    pub(crate) fn observed(&self, key: &Key) -> Result<Observed> {
        let entry = self.0.iter().find(|entry| *entry.key == *key);
        let Some((entry, last)) = entry.and_then(|entry| Some((entry, entry.last.as_ref()?))) else {
            bail!("vc_attn: the workspace of the last call was given up, ask right after the call")
        };
        last.done.synchronize().w()?;
        let seen = entry.plan.observed(Stream::from(&*last.stream)).map_err(to_candle)?;
        // Scores in f32 have the range; in f16 a NaN is out of it too.
        let wide = key.spec.recipe.scores == ScoreType::F32;
        let in_range = !seen.saturated && (wide || seen.max_score < F16_SCORE_LIMIT);
        Ok(Observed {
            max_score: seen.max_score,
            f32_fallbacks: 0,
            out_of_range: !in_range,
            mean_share: seen.mean_share,
        })
    }

    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }
}

impl Entry {
    /// Lets the stream wait for a call on another one that still works in the plan's memory. candle's default stream
    /// is one per thread behind a single handle, so threads count as streams.
    fn take_turn(&self, stream: &Arc<CudaStream>) -> Result<()> {
        match &self.last {
            Some(last) if last.thread != thread::current().id() || last.stream != *stream => {
                stream.wait(&last.done).w()
            }
            _ => Ok(()),
        }
    }

    /// Marks where the call ends on its stream. An event of a capture means nothing outside of it, so none is made.
    fn end_turn(&mut self, stream: &Arc<CudaStream>) -> Result<()> {
        if stream.capture_status().w()? == CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE {
            let done = stream.record_event(None).w()?;
            self.last = Some(Use { thread: thread::current().id(), stream: stream.clone(), done });
        }
        Ok(())
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        if let Some(last) = &self.last {
            // The workspace is freed next. An error on the way out of a broken context has nobody to go to.
            let _ = last.done.synchronize();
        }
    }
}
