//! A planned call on a GPU: everything that it needs, so that the call itself neither allocates nor synchronizes.

use std::num::NonZeroU32;
use std::sync::Arc;

use kernels_gpu::kernels::{self, attention_sm90_contract as contract, tiles};
use kernels_gpu::numerics::units;

use super::driver::{Arguments, Device, DevicePtr, Stream};
use super::workspace::{Layout, Section, Workspace};
use crate::error::{Error, Result};
use crate::grouping::TokenOrder;
use crate::plan::Plan;
use crate::problem::Shape;
use crate::recipe::{Probabilities, QkFormat, Recipe, RowSums, ScoreType, VFormat};
use crate::tensor::DType;

/// Strides in elements along (batch, head, token); the channels lie next to each other.
pub type Strides = [i64; 3];

/// Tensors of a call as device pointers; 0 stands for an absent one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tensors {
    /// Queries, 16-byte aligned.
    pub q: DevicePtr,
    /// Keys, 16-byte aligned.
    pub k: DevicePtr,
    /// Values, 16-byte aligned.
    pub v: DevicePtr,
    /// Output, 16-byte aligned.
    pub o: DevicePtr,
    /// f32 [batch, q_heads, q_tokens], or 0: receives the log-sum-exp.
    pub lse: DevicePtr,
    /// u32 [batch], or 0: valid keys of every batch.
    pub kv_lens: DevicePtr,
    /// Rotary tables of the queries and of the keys, or 0.
    pub rope: Rope,
}

/// Rotary embedding, applied on the way into the operands: f32 [tokens, head_dim / 2] tables of the angles'
/// cosines and sines for interleaved pairs of channels; 0 where the tensors are rotated already.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rope {
    /// Cosines by query token.
    pub q_cos: DevicePtr,
    /// Sines by query token.
    pub q_sin: DevicePtr,
    /// Cosines by key token.
    pub k_cos: DevicePtr,
    /// Sines by key token.
    pub k_sin: DevicePtr,
}

/// What a device plan is made for.
#[derive(Clone, Debug)]
pub struct Spec {
    /// Sizes.
    pub shape: Shape,
    /// What is quantized how.
    pub recipe: Recipe,
    /// Factor on the scores.
    pub scale: f32,
    /// Element type of q, k and v: binary16 or bfloat16.
    pub input: DType,
    /// Element type of o.
    pub output: DType,
    /// Strides of q.
    pub q: Strides,
    /// Strides of k.
    pub k: Strides,
    /// Strides of v.
    pub v: Strides,
    /// Strides of o.
    pub o: Strides,
    /// Latent grid of the keys, for the cube order.
    pub grid: Option<[usize; 3]>,
    /// Key blocks between promotions of the FP8 sums to f32.
    pub promote: u32,
}

/// How the token order of a call comes about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Grouping {
    /// Grouped afresh.
    Cold,
    /// Grouped from the centroids that the plan holds.
    Warm,
    /// The order that the plan holds.
    Reuse,
}
