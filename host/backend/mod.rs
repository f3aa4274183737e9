//! Where a plan runs: the same stages behind one small trait, so that any stage can be compared across backends.

pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;

use crate::error::{Error, Result};
use crate::plan::Plan;
use crate::problem::Problem;
use crate::tensor::Tensor;

/// What a call returns.
#[derive(Clone, Debug)]
pub struct Output {
    /// Attention output, (batch, q heads, q tokens, head_dim), laid out as (batch, heads, tokens, dim).
    pub o: Tensor,
    /// Natural-log log-sum-exp of the scaled scores of every row, [batch, q heads, q tokens]; of the quantized
    /// weights where the recipe sums those. Minus infinity for a row without a valid key.
    pub lse: Option<Vec<f32>>,
    /// What the kernel observed.
    pub observed: Observed,
}

/// What a call noticed about its data.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Observed {
    /// Largest |row maximum| of the centred scores, in code units (8 log2 e times the scaled score).
    pub max_score: f32,
    /// (batch, kv head) pairs whose scores left the range of f16 accumulators and ran with f32 ones.
    pub f32_fallbacks: usize,
    /// Share of the blocks of 16 rows and 128 keys that ran with exact exponentials because a score lay near its
    /// row's maximum ([`ExactScores::Near`](crate::recipe::ExactScores::Near)); 0 under every other recipe.
    pub exact_share: f64,
}

/// The stages of a call. `prepare_*` turn tensors into low-bit operands, `attend` runs the fused loop on them.
pub trait Backend {
    /// Token orders of every (batch, kv head).
    type Order;
    /// What a [`Schedule`](crate::schedule::Schedule) keeps of them from one denoising step to the next.
    type Kept;
    /// Prepared queries.
    type Q;
    /// Prepared keys.
    type K;
    /// Prepared values.
    type V;

    /// `cpu` or `cuda`.
    fn name(&self) -> &'static str;

    /// The device in words.
    fn device(&self) -> String;

    /// Decides the order of the key and value tokens of every (batch, kv head); `warm` holds the orders of an
    /// earlier call on the same heads, whose centroids (or, of restored orders, labels) start the k-means. They stay as
    /// they are.
    ///
    /// # Errors
    /// When the order needs something that the problem lacks (the grid of a cube order).
    fn group(&self, plan: &Plan, problem: &Problem, warm: Option<&Self::Order>) -> Result<Self::Order>;

    /// What has to be kept of `order` so that [`restore`](Self::restore) can bring it back.
    ///
    /// # Errors
    /// Of the device.
    fn keep(&self, order: &Self::Order) -> Result<Self::Kept>;

    /// The kept order for another call on the same heads and lengths; [`refresh`](Self::refresh) starts from it instead.
    ///
    /// # Errors
    /// When `kept` is of other heads or lengths, or of the device.
    fn restore(&self, plan: &Plan, problem: &Problem, kept: &Self::Kept) -> Result<Self::Order>;

    /// Groups, starting from a kept order of the same heads and lengths.
    ///
    /// # Errors
    /// As [`restore`](Self::restore) and [`group`](Self::group).
    fn refresh(&self, plan: &Plan, problem: &Problem, kept: &Self::Kept) -> Result<Self::Order> {
        self.group(plan, problem, Some(&self.restore(plan, problem, kept)?))
    }

    /// Memory that `kept` takes, in bytes.
    fn kept_bytes(kept: &Self::Kept) -> usize;

    /// Rotates, centres and quantizes Q. Q does not depend on the order; a backend may keep its operands with it.
    ///
    /// # Errors
    /// Of the device.
    fn prepare_q(&self, plan: &Plan, problem: &Problem, order: &Self::Order) -> Result<Self::Q>;

    /// Gathers, centres, rotates and quantizes K. The scale per head of E4M3 depends on the one of Q.
    ///
    /// # Errors
    /// Of the device.
    fn prepare_k(&self, plan: &Plan, problem: &Problem, order: &Self::Order, q: &Self::Q) -> Result<Self::K>;

    /// Gathers V, subtracts block means and quantizes the rest.
    ///
    /// # Errors
    /// Of the device.
    fn prepare_v(&self, plan: &Plan, problem: &Problem, order: &Self::Order) -> Result<Self::V>;

    /// The attention loop on prepared operands.
    ///
    /// # Errors
    /// When finite inputs overflow f32 on the way, or of the device.
    fn attend(&self, plan: &Plan, problem: &Problem, q: &Self::Q, k: &Self::K, v: &Self::V)
    -> Result<Output>;

    /// Share of the value energy that the block means hold, averaged over the blocks; absent without demeaning.
    ///
    /// # Errors
    /// Of the device.
    fn mean_share(&self, v: &Self::V) -> Result<Option<f64>>;
}

/// Finite inputs whose products leave f32 must not come back as NaN without a word: `o` is row-major of `shape`
/// [batch, heads, tokens, dim].
fn check_finite_output(o: &[f32], shape: [usize; 4]) -> Result<()> {
    let Some(at) = o.iter().position(|x| !x.is_finite()) else { return Ok(()) };
    let [_, h, n, d] = shape;
    let position = [at / (d * n * h), at / (d * n) % h, at / d % n, at % d];
    Err(Error::NonFinite { tensor: "o", position, value: o[at] })
}
