//! The attention of a denoising loop.

use candle_core::{Result, Tensor};
use vc_attention::Recipe;
use vc_attention::schedule::{Counts, Decision, Heads, ScheduleConfig, Site, Sites, Start};

use crate::attention::VcAttention;
use crate::error::to_candle;
use crate::order::{Grouping, Made, Order};
use crate::tensors::check;

/// A [`VcAttention`] with the schedule of a denoising loop (paper Sec. 3.4): it groups value tokens on early steps, lets
/// one order serve several steps, and starts refreshes from the clusters before.
///
/// One belongs to one sampler; what it keeps is per [`Site`]: model, layer and guidance branch. A clone goes on from
/// there by itself, on the same workspace.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use vc_attention_candle::{Denoising, Options, ScheduleConfig, Site, VcAttention};
///
/// let attention = VcAttention::new(Options::default());
/// let mut denoising = Denoising::new(attention, ScheduleConfig::paper(8))?;
/// for step in 0..8 {
///     for layer in 0..2 {
///         let x = || Tensor::randn(0f32, 1.0, (1, 256, 2, 64), &Device::Cpu);
///         let site = Site { layer, ..Site::default() };
///         let o = denoising.forward(step, site, &x()?, &x()?, &x()?, 0.125)?;
///         assert_eq!(o.dims(), [1, 256, 2, 64]);
///     }
/// }
/// assert_eq!((denoising.counts().cold, denoising.counts().reused), (2, 14));
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Denoising {
    attention: VcAttention,
    sites: Sites<Order>,
    last: Option<Decision>,
}

impl Denoising {
    /// A loop that has seen nothing yet.
    ///
    /// # Errors
    /// When a choice of `config` is outside its range.
    pub fn new(attention: VcAttention, config: ScheduleConfig) -> Result<Self> {
        Ok(Self { attention, sites: Sites::new(config).map_err(to_candle)?, last: None })
    }

    /// The attention that runs its calls.
    pub fn attention(&self) -> &VcAttention {
        &self.attention
    }

    /// The schedule's choices.
    pub fn config(&self) -> &ScheduleConfig {
        self.sites.config()
    }

    /// What has been done so far.
    pub fn counts(&self) -> Counts {
        self.sites.counts()
    }

    /// What the last call did; none before the first.
    pub fn last(&self) -> Option<Decision> {
        self.last
    }

    /// Memory of the kept orders in bytes, in host memory or on the GPU.
    pub fn bytes(&self) -> usize {
        self.sites.bytes(Order::bytes)
    }

    /// Forgets everything, as between two clips. A site that is called at an earlier step than before groups anew without
    /// it; a clip that begins at the step where the last one ended, or behind it, is not noticed.
    pub fn reset(&mut self) {
        self.sites.reset();
        self.last = None;
    }

    /// [`vc_attn`](crate::vc_attn) at step `step` (from 0) and `site`, on the order that the schedule decides.
    ///
    /// The tensors of a site may change their lengths, padding, heads or device, which groups anew. With a drift detector, and only then,
    /// a call on a GPU waits for its own end.
    ///
    /// # Errors
    /// As [`vc_attn`](crate::vc_attn), and when the step is not one of the schedule's.
    pub fn forward(
        &mut self,
        step: usize,
        site: Site,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        scale: f32,
    ) -> Result<Tensor> {
        self.forward_as(&self.attention.options().recipe.clone(), step, site, q, k, v, scale)
    }

    /// As [`Denoising::forward`], with a recipe of this call's own on the loop's orders: recipes mixed by step or by
    /// layer share them.
    ///
    /// # Errors
    /// As [`Denoising::forward`], and when `recipe` orders tokens in another way than the attention's.
    #[allow(clippy::too_many_arguments, reason = "where in the loop, and the call")]
    pub fn forward_as(
        &mut self,
        recipe: &Recipe,
        step: usize,
        site: Site,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        scale: f32,
    ) -> Result<Tensor> {
        check([q, k, v])?;
        let options = self.attention.options();
        let (batch, tokens, kv_heads, head_dim) = k.dims4()?;
        let lens = options.kv_lens.clone().unwrap_or_else(|| vec![tokens; batch]);
        let heads = Heads { kv_heads, head_dim, lens };
        let made = Made::new(k.device().location(), [batch, kv_heads, tokens, head_dim], options);
        let fits = |order: &Order| order.fits(&made);
        let call = self.sites.begin(step, site, &heads, &options.recipe, recipe, fits).map_err(to_candle)?;
        let decision = call.decision;
        // An order of its own, so that one that is kept, here or in a clone, changes only once the call has succeeded.
        let (order, grouping) = match call.start {
            Start::Reuse(order) => (order.clone(), Grouping::Reuse),
            Start::Warm(order) => (order.fork(), Grouping::Warm),
            Start::Cold => (Order::new(), Grouping::Cold),
        };
        let attention =
            self.attention.with_options(crate::Options { recipe: call.recipe, ..options.clone() });
        let o = attention.forward_on(q, k, v, scale, &order, grouping)?;
        let share = match self.config().drift {
            Some(_) => attention.observed()?.and_then(|observed| observed.mean_share),
            None => None,
        };
        let kept = decision.source.groups().then_some(order);
        self.sites.record(step, site, heads, decision, kept, share);
        self.last = Some(decision);
        Ok(o)
    }
}
