//! The calls: [`vc_attn`], and [`VcAttention`] for whoever makes many of them.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, CustomOp3, Layout, Result, Shape, Storage, Tensor, bail};

use crate::cpu;
#[cfg(feature = "cuda")]
use crate::cuda::{self, Plans};
use crate::options::Options;
use crate::order::{Grouping, Order};
use crate::tensors::check;

/// Low-bit attention `softmax(scale q k^T) v` without a mask, in the layout of candle's `flash_attn`.
///
/// - `q`: (batch, seq_q, heads, head_dim), f32, f16 or bf16;
/// - `k`, `v`: (batch, seq_kv, kv_heads, head_dim), of the same type, where kv_heads divides heads (GQA, MQA);
/// - `scale`: factor on the scores, usually 1 / sqrt(head_dim), of any sign.
///
/// The output has the shape and the type of `q` and is contiguous. Strides and offsets of the inputs are honored, none
/// is copied. A NaN or an infinity in a query makes that row NaN, one in a valid key or value all rows of the heads
/// that read it. There is no backward pass: asking for gradients gives candle's `BackwardNotSupported`.
///
/// On a GPU this neither copies nor waits, except that the first call on a device loads the kernels and the first on
/// a shape allocates a workspace, which stays for the next: see [`VcAttention`], which also tells whether the
/// scores stayed in range, and [`free_workspaces`].
///
/// # Errors
/// When shapes, types or devices do not fit each other, or the device cannot run the recipe (see
/// [`supports`](crate::supports)); the message says what to do. Nothing falls back silently.
pub fn vc_attn(q: &Tensor, k: &Tensor, v: &Tensor, scale: f32, options: &Options) -> Result<Tensor> {
    VcAttention::shared(options.clone()).forward(q, k, v, scale)
}

/// [`vc_attn`] and the log-sum-exp of the scaled scores of every row, natural logarithm, f32 (batch, heads, seq_q);
/// minus infinity for a row without a valid key. With it the results on two halves of the keys can be merged.
///
/// # Errors
/// As [`vc_attn`].
pub fn vc_attn_with_lse(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    scale: f32,
    options: &Options,
) -> Result<(Tensor, Tensor)> {
    VcAttention::shared(options.clone()).forward_with_lse(q, k, v, scale)
}

/// Frees the GPU memory that [`vc_attn`] and [`vc_attn_with_lse`] keep for their next calls, once the calls that use
/// it are done. Does nothing without the feature `cuda`.
pub fn free_workspaces() {
    #[cfg(feature = "cuda")]
    cuda::shared().lock().unwrap_or_else(PoisonError::into_inner).clear();
}

/// An attention with its [`Options`] and, on a GPU, its workspace. Clones share both.
///
/// A GPU call works in memory of its own beside q, k, v and o: quantized operands, labels, sums; about the size of
/// q, k and v together in 16 bit, with heads padded to 128 channels. One handle for a whole model is right: it plans every combination of device, type,
/// shapes, strides and scale once and keeps the last four, so layers of one shape take turns on one workspace. Calls
/// through one handle run one after the other, from whichever threads and streams they come; calls that ought to
/// overlap need a handle each.
///
/// Every call goes to the stream of q's candle device, and once planned it only launches. So it may be captured into
/// a CUDA graph after one call outside; handle and shape must then outlive the graph.
///
/// In a denoising loop the token order of V-Smooth need not be made on every step: see [`Denoising`](crate::Denoising), and
/// [`VcAttention::forward_on`] for loops that decide themselves.
#[derive(Clone, Debug)]
pub struct VcAttention {
    options: Arc<Options>,
    host: Host,
    last: Arc<Mutex<Last>>,
    #[cfg(feature = "cuda")]
    plans: Arc<Mutex<Plans>>,
}

/// Who computes on tensors in host memory.
#[derive(Clone, Debug, Default)]
pub(crate) enum Host {
    #[default]
    Cpu,
    #[cfg(feature = "offload")]
    Gpu(vc_attention::backend::cuda::Cuda),
}

/// The last call of a handle.
#[derive(Debug, Default)]
pub(crate) enum Last {
    #[default]
    None,
    Done(Observed),
    #[cfg(feature = "cuda")]
    Launched(Arc<cuda::Key>),
}

/// What a call noticed about its data.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Observed {
    /// Largest |row maximum| of the centered scores, in code units (8 log2 e times the scaled score); NaN where
    /// scores were.
    pub max_score: f32,
    /// (batch, kv head) pairs that ran with f32 scores because those in f16 left their range; only the CPU does that.
    pub f32_fallbacks: usize,
    /// Whether scores or operands left the range of f16 and nothing made up for it: the output is not to be used.
    pub out_of_range: bool,
    /// Share of the value energy that the block means hold, averaged over the blocks; absent without demeaning.
    pub mean_share: Option<f64>,
}

impl VcAttention {
    /// An attention with a workspace of its own.
    pub fn new(options: Options) -> Self {
        Self {
            options: Arc::new(options),
            host: Host::Cpu,
            last: Arc::default(),
            #[cfg(feature = "cuda")]
            plans: Arc::default(),
        }
    }

    /// An attention that computes on a GPU while the tensors stay in host memory: every call copies there and back.
    ///
    /// For programs that build candle without its CUDA half, which needs a toolkit: this needs a driver at run time only.
    /// f16 and bf16; heads whose scores leave the range of f16 run on the CPU, which [`Observed::f32_fallbacks`] counts.
    #[cfg(feature = "offload")]
    pub fn offloaded(options: Options, gpu: vc_attention::backend::cuda::Cuda) -> Self {
        Self { host: Host::Gpu(gpu), ..Self::new(options) }
    }

    /// The same handle under other options: workspace and [`VcAttention::observed`] are shared.
    #[must_use]
    pub fn with_options(&self, options: Options) -> Self {
        Self { options: Arc::new(options), ..self.clone() }
    }

    /// One on the workspace of [`vc_attn`].
    fn shared(options: Options) -> Self {
        Self {
            #[cfg(feature = "cuda")]
            plans: cuda::shared(),
            ..Self::new(options)
        }
    }

    /// What it was made with.
    pub fn options(&self) -> &Options {
        &self.options
    }

    /// [`vc_attn`] on this handle.
    ///
    /// # Errors
    /// As [`vc_attn`].
    pub fn forward(&self, q: &Tensor, k: &Tensor, v: &Tensor, scale: f32) -> Result<Tensor> {
        self.run([q, k, v], scale, None, false).map(|(o, _)| o)
    }

    /// [`vc_attn_with_lse`] on this handle.
    ///
    /// # Errors
    /// As [`vc_attn`].
    pub fn forward_with_lse(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        scale: f32,
    ) -> Result<(Tensor, Tensor)> {
        match self.run([q, k, v], scale, None, true)? {
            (o, Some(lse)) => Ok((o, lse)),
            (_, None) => bail!("vc_attn: the forward pass left no log-sum-exp"),
        }
    }

    /// [`vc_attn`] on this handle, on a token order that `order` keeps from step to step.
    ///
    /// # Errors
    /// As [`vc_attn`]; also when an order is reused that was never kept, or was kept for other shapes or lengths.
    pub fn forward_on(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        scale: f32,
        order: &Order,
        grouping: Grouping,
    ) -> Result<Tensor> {
        self.run([q, k, v], scale, Some((order.clone(), grouping)), false).map(|(o, _)| o)
    }

    /// What the last call on this handle noticed; none before the first. On a GPU it waits for that call.
    ///
    /// # Errors
    /// Of the device, those of the call's own launches among them; when the workspace of the call was given up since.
    pub fn observed(&self) -> Result<Option<Observed>> {
        match &*self.last() {
            Last::None => Ok(None),
            Last::Done(observed) => Ok(Some(*observed)),
            #[cfg(feature = "cuda")]
            Last::Launched(key) => {
                self.plans.lock().unwrap_or_else(PoisonError::into_inner).observed(key).map(Some)
            }
        }
    }

    /// Checks that the last call on this handle stayed in the range of its formats. A GPU call does not wait, so it
    /// cannot know; one check per layer in the first step of a new model is enough, as it is a property of the
    /// weights and prompts rather than of the step. On a GPU it waits for the call.
    ///
    /// # Errors
    /// When scores or operands left the range of f16; as [`VcAttention::observed`].
    pub fn check(&self) -> Result<()> {
        match self.observed()? {
            Some(Observed { out_of_range: true, max_score, .. }) => bail!(
                "vc_attn: scores or operands left the range of f16 (largest row maximum {max_score} of {} code \
                 units): run this layer with candle's own attention, or on the CPU",
                vc_attention::backend::cpu::F16_SCORE_LIMIT
            ),
            _ => Ok(()),
        }
    }

    /// Frees the GPU memory that the handle keeps, once the calls that use it are done. Does nothing without the
    /// feature `cuda`.
    pub fn free_workspace(&self) {
        #[cfg(feature = "cuda")]
        self.plans.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    fn run(
        &self,
        [q, k, v]: [&Tensor; 3],
        scale: f32,
        order: Option<(Order, Grouping)>,
        lse: bool,
    ) -> Result<(Tensor, Option<Tensor>)> {
        check([q, k, v])?;
        let found = Arc::new(Mutex::new(None));
        let op = Op {
            options: self.options.clone(),
            host: self.host.clone(),
            scale,
            order,
            lse,
            found: found.clone(),
            last: self.last.clone(),
            #[cfg(feature = "cuda")]
            plans: self.plans.clone(),
        };
        let o = q.apply_op3(k, v, op)?;
        let lse = found.lock().unwrap_or_else(PoisonError::into_inner).take().map(|storage| {
            let (batch, tokens, heads) = (o.dims()[0], o.dims()[1], o.dims()[2]);
            Tensor::from_storage(storage, (batch, heads, tokens), BackpropOp::none(), false)
        });
        Ok((o, lse))
    }

    fn last(&self) -> MutexGuard<'_, Last> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One call as candle runs it.
pub(crate) struct Op {
    pub options: Arc<Options>,
    pub host: Host,
    pub scale: f32,
    pub order: Option<(Order, Grouping)>,
    /// Whether the LSE is wanted.
    pub lse: bool,
    /// Where it goes, since an operation of candle returns one tensor.
    found: Arc<Mutex<Option<Storage>>>,
    last: Arc<Mutex<Last>>,
    #[cfg(feature = "cuda")]
    pub plans: Arc<Mutex<Plans>>,
}

impl Op {
    fn finish(&self, lse: Option<Storage>, last: Last) {
        *self.found.lock().unwrap_or_else(PoisonError::into_inner) = lse;
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = last;
    }
}

impl CustomOp3 for Op {
    fn name(&self) -> &'static str {
        "vc-attn"
    }

    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        q_layout: &Layout,
        k: &CpuStorage,
        k_layout: &Layout,
        v: &CpuStorage,
        v_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let done = cpu::forward(self, [(q, q_layout), (k, k_layout), (v, v_layout)])?;
        self.finish(done.lse.map(Storage::Cpu), Last::Done(done.observed));
        Ok((done.o, done.shape))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        q: &candle_core::CudaStorage,
        q_layout: &Layout,
        k: &candle_core::CudaStorage,
        k_layout: &Layout,
        v: &candle_core::CudaStorage,
        v_layout: &Layout,
    ) -> Result<(candle_core::CudaStorage, Shape)> {
        let done = cuda::forward(self, [(q, q_layout), (k, k_layout), (v, v_layout)])?;
        self.finish(done.lse.map(Storage::Cuda), Last::Launched(done.key));
        Ok((done.o, done.shape))
    }
}
