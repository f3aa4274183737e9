//! When to group in a denoising loop, and what is kept between its steps (paper Sec. 3.4 and App. A).
//!
//! Grouping value tokens costs more than the rest of the preparation, and values change little from one denoising
//! step to the next. So a [`Schedule`] groups in the first steps only, lets one order serve several of them, starts
//! every refresh from the clusters before, and runs the later steps on the last order. It belongs to one sampler:
//! what it keeps is per [`Site`] (model, layer, guidance branch) and, inside, per batch and kv head.
//!
//! ```
//! use vc_attention::backend::cpu::Cpu;
//! use vc_attention::schedule::{Schedule, ScheduleConfig, Site};
//! use vc_attention::{Layout, Options, Problem, Recipe, TensorView};
//!
//! let mut schedule = Schedule::new(ScheduleConfig::paper(8), Recipe::default_for_cpu())?;
//! for step in 0..8 {
//!     for layer in 0..2 {
//!         let x: Vec<f32> = (0..300 * 32).map(|i| ((i + step) as f32 * 0.37).sin()).collect();
//!         let view = |name| TensorView::new(name, x.as_slice(), [1, 1, 300, 32], Layout::Bhsd);
//!         let problem = Problem::new(view("q")?, view("k")?, view("v")?);
//!         let site = Site { layer, ..Site::default() };
//!         let done = schedule.attend(&Cpu, step, site, &problem, Options::default())?;
//!         assert_eq!(done.output.o.shape(), [1, 1, 300, 32]);
//!     }
//! }
//! assert_eq!((schedule.counts().cold, schedule.counts().reused), (2, 14));
//! # Ok::<(), vc_attention::Error>(())
//! ```

use std::collections::HashMap;
use std::time::Instant;

use crate::attention::{Report, run_on_order};
use crate::backend::{Backend, Output};
use crate::error::{Error, Result};
use crate::plan::{Options, Plan};
use crate::problem::Problem;
use crate::recipe::Recipe;

/// Steps that one order serves inside the window (paper App. A).
pub const REFRESH: usize = 4;

/// Which steps group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Window {
    /// The first ones, as many as given; the paper's operating point is a quarter, [`ScheduleConfig::paper`].
    First(usize),
    /// Every nth, from the first on, each of which groups, whatever `refresh` says (spread out like this, the paper's
    /// ablation is 2.6 dB behind).
    Every(usize),
    /// All.
    All,
}

impl Window {
    fn contains(self, step: usize) -> bool {
        match self {
            Window::First(steps) => step < steps,
            Window::Every(stride) => step.is_multiple_of(stride),
            Window::All => true,
        }
    }
}

/// On which steps the block means of V are subtracted, for recipes that do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Demeaning {
    /// On all: the means are fresh although the order is not, and cost next to nothing (ours).
    #[default]
    Always,
    /// In the window only; later steps run the plain low-bit kernel (the paper's).
    InWindow,
}

/// The choices of a [`Schedule`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScheduleConfig {
    /// Denoising steps of a clip, at least 1.
    pub steps: usize,
    /// Which of them group.
    pub window: Window,
    /// Steps of the clip after which a step of the window groups again, at least 1; without a meaning for
    /// [`Window::Every`].
    pub refresh: usize,
    /// On which steps block means are subtracted.
    pub demeaning: Demeaning,
    /// Whether a refresh starts from the clusters before, or anew.
    pub warm: bool,
    /// Refresh early, inside the window or behind it, once the share of the value energy that the block means hold
    /// falls below this fraction (0 to 1) of what it was when the order was made. Absent by default: see
    /// `docs/results.md`. On a GPU the share is read back after every call, which waits for it.
    pub drift: Option<f64>,
}

impl ScheduleConfig {
    /// Groups in the first ceil(steps / 4) steps, every fourth of them, warm (paper Sec. 3.4); block means on all
    /// steps (ours).
    pub const fn paper(steps: usize) -> Self {
        Self {
            steps,
            window: Window::First(steps.div_ceil(4)),
            refresh: REFRESH,
            demeaning: Demeaning::Always,
            warm: true,
            drift: None,
        }
    }

    fn validate(&self) -> Result<()> {
        let option = |option, expected: &str, given: String| {
            Err(Error::Option { option, expected: expected.into(), given })
        };
        if self.steps == 0 {
            return option("steps", "at least 1", "0".into());
        }
        if self.refresh == 0 {
            return option("refresh", "at least 1", "0".into());
        }
        if matches!(self.window, Window::First(0) | Window::Every(0)) {
            return option("window", "at least 1", "0".into());
        }
        match self.drift {
            Some(drift) if !(0.0..=1.0).contains(&drift) => {
                option("drift", "a fraction from 0 to 1", drift.to_string())
            }
            _ => Ok(()),
        }
    }

    /// Age of an order, in steps of the clip, from which on a step of the window groups.
    fn age(&self) -> usize {
        match self.window {
            Window::Every(_) => 1,
            Window::First(_) | Window::All => self.refresh,
        }
    }
}

/// Where in a pipeline a call is made: state of one site never serves another.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Site {
    /// Model, where a pipeline switches between several (Wan2.2's two experts).
    pub model: u32,
    /// Attention layer.
    pub layer: u32,
    /// Guidance branch, where conditional and unconditional are calls of their own.
    pub branch: u32,
}

/// Where the token order of a call comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// Grouped from a cold start: the first call of a site, or the first at new lengths or heads.
    Cold,
    /// Grouped from the clusters before.
    Warm,
    /// As [`Source::Warm`] (or cold, without warm starts), ahead of time: the order had drifted.
    Early,
    /// The order of an earlier step.
    Reused,
    /// The recipe's order does not come from clusters (`sequence`, `cube`).
    Fixed,
}

/// What a call does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decision {
    /// Where the order comes from.
    pub source: Source,
    /// Whether block means are subtracted by a recipe that does; without, it is the plain low-bit kernel on that
    /// order.
    pub demean: bool,
}

/// A finished call.
#[derive(Clone, Debug)]
pub struct Scheduled {
    /// What it returned.
    pub output: Output,
    /// What it took; `group` covers grouping, or bringing the kept order back.
    pub report: Report,
    /// What was done.
    pub decision: Decision,
}

/// How many calls did what, since the schedule was made or [`Schedule::reset`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Calls that grouped from a cold start.
    pub cold: usize,
    /// Calls that grouped from the clusters before.
    pub warm: usize,
    /// Calls that grouped ahead of time.
    pub early: usize,
    /// Calls on an order of an earlier step.
    pub reused: usize,
    /// Calls whose order does not come from clusters.
    pub fixed: usize,
    /// Calls that subtracted no block means.
    pub plain: usize,
}

/// The keys of a call as far as a token order is concerned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Heads {
    /// Key and value heads.
    pub kv_heads: usize,
    /// Channels of a head.
    pub head_dim: usize,
    /// Valid tokens of every batch.
    pub lens: Vec<usize>,
}

impl Heads {
    /// Those of a problem.
    ///
    /// # Errors
    /// When there is not one length a batch, or one is beyond the keys.
    pub fn of(problem: &Problem) -> Result<Self> {
        problem.check_lens()?;
        let [batch, kv_heads, _, head_dim] = problem.k.shape();
        Ok(Self { kv_heads, head_dim, lens: (0..batch).map(|b| problem.kv_len(b)).collect() })
    }
}

/// Decides call by call and remembers what was kept where, whatever that is: the part of a [`Schedule`] for those who
/// run attention themselves. [`begin`](Self::begin), act on it, [`record`](Self::record).
#[derive(Clone, Debug)]
pub struct Sites<K> {
    config: ScheduleConfig,
    states: HashMap<Site, State<K>>,
    counts: Counts,
}

/// A call that was decided on.
#[derive(Clone, Debug)]
pub struct Call<'a, K> {
    /// What it does.
    pub decision: Decision,
    /// What it runs: its recipe, with block means where they are subtracted.
    pub recipe: Recipe,
    /// What its order comes from.
    pub start: Start<'a, K>,
}

/// What the order of a call comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start<'a, K> {
    /// Nothing.
    Cold,
    /// The clusters of a kept order.
    Warm(&'a K),
    /// A kept order as it is.
    Reuse(&'a K),
}

/// What is kept of a site.
#[derive(Clone, Debug)]
struct State<K> {
    kept: K,
    of: Heads,
    /// Step of the last grouping.
    grouped: usize,
    /// Step of the last call: an earlier one is of another clip.
    last: usize,
    /// Share of the block means' energy then.
    share: Option<f64>,
    /// Whether the share has fallen since.
    drifted: bool,
}

impl<K> Sites<K> {
    /// Nothing kept yet.
    ///
    /// # Errors
    /// When a choice is outside its range.
    pub fn new(config: ScheduleConfig) -> Result<Self> {
        config.validate()?;
        Ok(Self { config, states: HashMap::new(), counts: Counts::default() })
    }

    /// The choices.
    pub fn config(&self) -> &ScheduleConfig {
        &self.config
    }

    /// What has been done so far.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Forgets everything: to be called between two clips. A site that is called at an earlier step than before takes that
    /// for the next clip by itself, and groups anew; what it cannot tell is a clip that begins at the step at which the
    /// last one ended (clips of one step) or behind it. The counts go on there.
    pub fn reset(&mut self) {
        self.states.clear();
        self.counts = Counts::default();
    }

    /// What is kept of a site.
    pub fn kept(&self, site: Site) -> Option<&K> {
        self.states.get(&site).map(|state| &state.kept)
    }

    /// Memory of everything that is kept, in bytes; `kept` says what one site's takes.
    pub fn bytes(&self, kept: impl Fn(&K) -> usize) -> usize {
        let entry = size_of::<Site>() + size_of::<State<K>>();
        self.states.values().map(|s| entry + size_of_val(&*s.of.lens) + kept(&s.kept)).sum()
    }

    /// Decides what a call with `recipe` at this step and site does, where `own` is the recipe of the loop and `fits` says
    /// whether a kept order is one for the call. Nothing is changed.
    ///
    /// # Errors
    /// When the step is not one of the schedule's, or `recipe` orders tokens in another way than `own`.
    pub fn begin(
        &self,
        step: usize,
        site: Site,
        heads: &Heads,
        own: &Recipe,
        recipe: &Recipe,
        fits: impl FnOnce(&K) -> bool,
    ) -> Result<Call<'_, K>> {
        if recipe.grouping != own.grouping {
            return Err(Error::Recipe {
                recipe: recipe.name.clone(),
                reason: format!("its token order is not that of the schedule's recipe, `{}`", own.name),
            });
        }
        if step >= self.config.steps {
            return Err(Error::Option {
                option: "step",
                expected: format!("a step below the schedule's {}", self.config.steps),
                given: step.to_string(),
            });
        }
        let inside = self.config.window.contains(step);
        let state = self.states.get(&site).filter(|s| s.of == *heads && step >= s.last && fits(&s.kept));
        let warm = self.config.warm;
        let (source, start) = match state {
            _ if !recipe.grouping.order.clusters() => (Source::Fixed, Start::Cold),
            None => (Source::Cold, Start::Cold),
            Some(state) if inside && step - state.grouped >= self.config.age() => {
                if warm {
                    (Source::Warm, Start::Warm(&state.kept))
                } else {
                    (Source::Cold, Start::Cold)
                }
            }
            Some(state) if state.drifted => {
                (Source::Early, if warm { Start::Warm(&state.kept) } else { Start::Cold })
            }
            Some(state) => (Source::Reused, Start::Reuse(&state.kept)),
        };
        let demean = recipe.demean && (inside || self.config.demeaning == Demeaning::Always);
        let recipe = Recipe { demean, ..recipe.clone() };
        Ok(Call { decision: Decision { source, demean }, recipe, start })
    }

    /// Takes down a call that was carried out: what to keep if it grouped, and the share of the value energy that its
    /// block means held, for the drift detector.
    pub fn record(
        &mut self,
        step: usize,
        site: Site,
        heads: Heads,
        decision: Decision,
        kept: Option<K>,
        share: Option<f64>,
    ) {
        if let Some(kept) = kept {
            let state = State { kept, of: heads, grouped: step, last: step, share, drifted: false };
            self.states.insert(site, state);
        } else if let Some(state) = self.states.get_mut(&site) {
            state.last = step;
            if let (Some(drift), Some(then), Some(now)) = (self.config.drift, state.share, share) {
                state.drifted = now < drift * then;
            }
        }
        *match decision.source {
            Source::Cold => &mut self.counts.cold,
            Source::Warm => &mut self.counts.warm,
            Source::Early => &mut self.counts.early,
            Source::Reused => &mut self.counts.reused,
            Source::Fixed => &mut self.counts.fixed,
        } += 1;
        self.counts.plain += usize::from(!decision.demean);
    }
}

impl Source {
    /// Whether the call groups.
    pub fn groups(self) -> bool {
        matches!(self, Source::Cold | Source::Warm | Source::Early)
    }
}

/// The grouping of one sampler on a [`Backend`]: decides, runs, and keeps orders; see the [module](self).
#[derive(Debug)]
pub struct Schedule<B: Backend> {
    recipe: Recipe,
    sites: Sites<B::Kept>,
}

impl<B: Backend> Schedule<B> {
    /// A schedule that has seen nothing yet.
    ///
    /// # Errors
    /// When a choice is outside its range, or the recipe cannot be.
    pub fn new(config: ScheduleConfig, recipe: Recipe) -> Result<Self> {
        recipe.validate()?;
        Ok(Self { sites: Sites::new(config)?, recipe })
    }

    /// Its choices.
    pub fn config(&self) -> &ScheduleConfig {
        self.sites.config()
    }

    /// The recipe of its calls.
    pub fn recipe(&self) -> &Recipe {
        &self.recipe
    }

    /// What has been done so far.
    pub fn counts(&self) -> Counts {
        self.sites.counts()
    }

    /// Memory that the kept orders take, in bytes.
    pub fn bytes(&self) -> usize {
        self.sites.bytes(B::kept_bytes)
    }

    /// Forgets everything, as between two clips; see [`Sites::reset`] for what is noticed without.
    pub fn reset(&mut self) {
        self.sites.reset();
    }

    /// Attention of `problem` at step `step` (from 0) and `site`, on the order that the schedule decides.
    ///
    /// The tensors of a site may change their number of tokens or heads, which groups anew.
    ///
    /// # Errors
    /// As [`Sites::begin`], and those of [`crate::run`]; a call that fails leaves the kept orders as they were.
    pub fn attend(
        &mut self,
        backend: &B,
        step: usize,
        site: Site,
        problem: &Problem,
        options: Options,
    ) -> Result<Scheduled> {
        self.attend_as(&self.recipe.clone(), backend, step, site, problem, options)
    }

    /// As [`Schedule::attend`], with a recipe of this call's own on the schedule's orders: recipes mixed by step or
    /// by layer share them.
    ///
    /// # Errors
    /// As [`Schedule::attend`], and when `recipe` orders tokens in another way than the schedule's.
    pub fn attend_as(
        &mut self,
        recipe: &Recipe,
        backend: &B,
        step: usize,
        site: Site,
        problem: &Problem,
        options: Options,
    ) -> Result<Scheduled> {
        let heads = Heads::of(problem)?;
        let call = self.sites.begin(step, site, &heads, &self.recipe, recipe, |_| true)?;
        let decision = call.decision;
        let plan = Plan::new(problem, &call.recipe, options)?;
        let start = Instant::now();
        let order = match call.start {
            Start::Reuse(kept) => backend.restore(&plan, problem, kept)?,
            Start::Warm(kept) => backend.refresh(&plan, problem, kept)?,
            Start::Cold => backend.group(&plan, problem, None)?,
        };
        let kept = decision.source.groups().then(|| backend.keep(&order)).transpose()?;
        let group = start.elapsed();
        let run = run_on_order(backend, &plan, problem, order)?;
        self.sites.record(step, site, heads, decision, kept, run.report.mean_share);
        Ok(Scheduled { output: run.output, report: Report { group, ..run.report }, decision })
    }
}
