//! Training-free low-bit attention ([`vc_attention`]) as an operation of candle 0.11, in the layout of candle's
//! `flash_attn`: (batch, seq, heads, head_dim).
//!
//! ```
//! use candle_core::{Device, Tensor};
//! use vc_attention_candle::{Options, vc_attn};
//!
//! let x = || Tensor::randn(0f32, 1.0, (1, 300, 4, 64), &Device::Cpu);
//! let o = vc_attn(&x()?, &x()?, &x()?, 1.0 / 8.0, &Options::default())?;
//! assert_eq!(o.dims(), [1, 300, 4, 64]);
//! # Ok::<(), candle_core::Error>(())
//! ```
//!
//! - [`vc_attn`] and [`vc_attn_with_lse`] are single calls; [`Options`] choose the [`Recipe`] and hold valid lengths
//!   and the latent grid.
//! - [`VcAttention`] is a handle for a model: it owns its GPU workspace and tells whether scores stayed in range.
//! - [`Denoising`] is the attention of a denoising loop: it decides on which steps V-Smooth groups tokens, and keeps their
//!   order in between.
//! - [`supports`] says beforehand whether a device can run a recipe.
//!
//! # Devices
//!
//! On the **CPU** every recipe runs, on f32, f16 and bf16, any strides, head dimensions up to 256. It is the reference
//! of the GPU kernels' numerics, not a fast attention.
//!
//! On a **GPU** (feature `cuda`) the kernels that `vc_attention` embeds run on candle's own device, memory and stream;
//! nothing is copied and, after the first call on a shape, nothing waits. See [`supports`] for what they take; anything
//! else is an error that says what to do. candle's `cuda` feature needs NVIDIA's toolkit to build; a program with it
//! links the CUDA libraries. CI type-checks and lints this half; it ran the clips of `docs/results.md` on an H200.
//!
//! There is no backward pass: asking for gradients gives candle's `BackwardNotSupported`.
//!
//! # Swapping the attention of a model
//!
//! `examples/swap_attention.rs`, complete:
//!
//! ```
#![doc = include_str!("../examples/swap_attention.rs")]
//! ```

#![deny(missing_docs)]

mod attention;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
mod denoising;
mod error;
mod options;
mod order;
mod support;
mod tensors;

pub use attention::{Observed, VcAttention, free_workspaces, vc_attn, vc_attn_with_lse};
pub use denoising::Denoising;
pub use options::Options;
pub use order::{Grouping, Order};
pub use support::supports;
pub use vc_attention::schedule::{Counts, Decision, Demeaning, ScheduleConfig, Site, Source, Window};
pub use vc_attention::{self, Recipe};
