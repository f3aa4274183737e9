//! Low-bit attention of `vc-attention` on the contexts, streams and buffers of `cust` 0.3.2.
//!
//! A [`DevicePlan`] takes device pointers and a stream handle of the driver, whoever made them. This crate is the
//! bridge for programs that live on `cust`: [`device`] loads the kernels into a `cust` context, and [`run`] checks
//! the sizes of `cust` slices against the plan and launches on a `cust` stream. Nothing is copied, nothing waits.
//!
//! ```no_run
//! use cust::prelude::*;
//! use vc_attention::backend::cuda::{DevicePlan, Grouping, Spec};
//! use vc_attention_cust::{Call, Output, device, run};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # fn spec() -> Spec { unimplemented!() }
//! cust::init(CudaFlags::empty())?;
//! let context = Context::new(Device::get_device(0)?)?;
//! let stream = Stream::new(StreamFlags::NON_BLOCKING, None)?;
//! let plan = DevicePlan::new(&device(&context)?, spec())?;
//! # let (q, k, v) = (DeviceBuffer::<u16>::zeroed(1)?, DeviceBuffer::<u16>::zeroed(1)?, DeviceBuffer::<u16>::zeroed(1)?);
//! # let mut o = DeviceBuffer::<u16>::zeroed(1)?;
//! let call = Call { q: &q, k: &k, v: &v, o: Output::Bits16(&mut o), lse: None, kv_lens: None };
//! // SAFETY: the buffers live until the stream has been waited for.
//! unsafe { run(&plan, &stream, call, Grouping::Cold)? };
//! stream.synchronize()?;
//! # Ok(())
//! # }
//! ```
//!
//! `cust` links libcuda: a program with it does not start on a machine without a driver, unlike one that only uses
//! `vc-attention`.

use std::sync::Arc;

use cust::context::{Context, CurrentContext};
use cust::memory::{DeviceCopy, DeviceSlice};
use cust::stream::Stream;
use vc_attention::backend::cuda::{self, DevicePlan, DevicePtr, Grouping, Rope, Strides, Tensors};
use vc_attention::{DType, Error, Result};

/// Loads the kernels into a `cust` context, which becomes the calling thread's.
///
/// # Errors
/// When the GPU is none that the kernels are for or its driver is too old; see [`cuda::Device::new`].
pub fn device(context: &Context) -> Result<Arc<cuda::Device>> {
    let failed = |e| Error::Device { reason: format!("entering the context of cust: {e}") };
    CurrentContext::set_current(context).map_err(failed)?;
    let ordinal = CurrentContext::get_device().map_err(failed)?.as_raw();
    let ordinal = usize::try_from(ordinal)
        .map_err(|_| Error::Device { reason: format!("cust calls its device {ordinal}") })?;
    // Both crates retain the device's primary context, of which there is one.
    let device = cuda::Device::new(ordinal)?;
    if device.context().cu_ctx().cast::<()>() != context.as_raw().cast::<()>() {
        return Err(Error::Device {
            reason: format!("the context of cust is not the primary context of GPU {ordinal}"),
        });
    }
    Ok(device)
}

/// Where the output goes; the plan's [`Spec`](cuda::Spec) says which it must be.
pub enum Output<'a> {
    /// f32.
    F32(&'a mut DeviceSlice<f32>),
    /// The bits of binary16 or bfloat16.
    Bits16(&'a mut DeviceSlice<u16>),
}

/// The tensors of a call; shapes, strides and element types are those of the plan's [`Spec`](cuda::Spec).
pub struct Call<'a> {
    /// Bits of the queries, 16-byte aligned.
    pub q: &'a DeviceSlice<u16>,
    /// Bits of the keys, 16-byte aligned.
    pub k: &'a DeviceSlice<u16>,
    /// Bits of the values, 16-byte aligned.
    pub v: &'a DeviceSlice<u16>,
    /// Receives the output, 16-byte aligned.
    pub o: Output<'a>,
    /// `[batch, q_heads, q_tokens]`: receives the natural-log log-sum-exp.
    pub lse: Option<&'a mut DeviceSlice<f32>>,
    /// `[batch]`: valid keys of every batch; all of them when absent.
    pub kv_lens: Option<&'a DeviceSlice<u32>>,
}

/// Launches the whole call on a stream: groups, quantizes, attends. Neither allocates nor waits.
///
/// # Safety
/// The slices stay valid, and nobody else writes them, until the stream is through; plan and stream belong to the
/// same context.
///
/// # Errors
/// When a slice is too short for the plan's shape and strides or the output is of another type, when an order is
/// reused that was never made, or when the driver refuses a launch.
pub unsafe fn run(plan: &DevicePlan, stream: &Stream, call: Call<'_>, grouping: Grouping) -> Result<()> {
    let spec = plan.spec();
    let s = &spec.shape;
    let (q_shape, kv_shape) = ([s.batch, s.q_heads, s.q_tokens], [s.batch, s.kv_heads, s.kv_tokens]);
    let strided = |tensor, len, shape, strides| check(tensor, len, reach(shape, strides, s.head_dim));
    let (o, o_len) = match (call.o, spec.output) {
        (Output::F32(o), DType::F32) => (ptr(o), o.len()),
        (Output::Bits16(o), DType::F16 | DType::Bf16) => (ptr(o), o.len()),
        (given, planned) => {
            let given = if matches!(given, Output::F32(_)) { "f32" } else { "16 bits" };
            let expected = format!("the planned type {planned:?}");
            return Err(Error::Tensor { tensor: "o", expected, given: given.into() });
        }
    };
    strided("q", call.q.len(), q_shape, spec.q)?;
    strided("k", call.k.len(), kv_shape, spec.k)?;
    strided("v", call.v.len(), kv_shape, spec.v)?;
    strided("o", o_len, q_shape, spec.o)?;
    let rows = q_shape.iter().product::<usize>() as i128;
    call.lse.as_ref().map_or(Ok(()), |lse| check("lse", lse.len(), [0, rows - 1]))?;
    call.kv_lens.map_or(Ok(()), |lens| check("kv_lens", lens.len(), [0, s.batch as i128 - 1]))?;
    let tensors = Tensors {
        q: ptr(call.q),
        k: ptr(call.k),
        v: ptr(call.v),
        o,
        lse: call.lse.map_or(0, |lse| ptr(lse)),
        kv_lens: call.kv_lens.map_or(0, ptr),
        rope: Rope::default(),
    };
    // SAFETY: every slice reaches what the plan says, checked above; the caller keeps them.
    unsafe { plan.run(self::stream(stream), &tensors, grouping) }
}

/// The handle of a `cust` stream, for the methods of a [`DevicePlan`].
pub fn stream(stream: &Stream) -> cuda::Stream {
    cuda::Stream(stream.as_inner().cast())
}

/// The address of a `cust` slice.
pub fn ptr<T: DeviceCopy>(slice: &DeviceSlice<T>) -> DevicePtr {
    slice.as_device_ptr().as_raw()
}

/// First and last element that a shape `[batch, heads, tokens]` with strides and head_dim channels reaches.
fn reach(shape: [usize; 3], strides: Strides, head_dim: usize) -> [i128; 2] {
    let steps = shape.iter().zip(strides).map(|(&n, stride)| (n as i128 - 1) * i128::from(stride));
    let ends = steps.fold([0, 0], |[low, high], step| [low + step.min(0), high + step.max(0)]);
    [ends[0], ends[1] + head_dim as i128 - 1]
}

fn check(tensor: &'static str, len: usize, [first, last]: [i128; 2]) -> Result<()> {
    if first >= 0 && last < len as i128 {
        return Ok(());
    }
    Err(Error::Tensor {
        tensor,
        expected: format!("elements {first} to {last}, which the plan reaches"),
        given: format!("a slice of {len}"),
    })
}
