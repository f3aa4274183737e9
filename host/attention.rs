//! One call from problem to output, on any backend.

use std::time::{Duration, Instant};

use crate::backend::cpu::Cpu;
use crate::backend::{Backend, Output};
use crate::error::Result;
use crate::plan::{Options, Plan};
use crate::problem::Problem;
use crate::recipe::Recipe;

/// What a call took and what it did.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Report {
    /// Time to decide the token order.
    pub group: Duration,
    /// Time to quantize Q, K and V.
    pub prepare: Duration,
    /// Time of the attention loop.
    pub attend: Duration,
    /// Share of the value energy that the block means hold; absent without demeaning.
    pub mean_share: Option<f64>,
}

impl Report {
    /// Time of the whole call.
    pub fn total(&self) -> Duration {
        self.group + self.prepare + self.attend
    }
}

/// Attention of `problem` as `recipe` says, on the CPU.
///
/// # Errors
/// When the input is bad: see [`Problem::validate`] and [`Recipe::validate`].
///
/// # Examples
/// ```
/// use vc_attention::{Layout, Options, Problem, Recipe, TensorView, attend};
///
/// let x: Vec<f32> = (0..2 * 300 * 64).map(|i| (i as f32 * 0.37).sin()).collect();
/// let view = |name| TensorView::new(name, x.as_slice(), [1, 2, 300, 64], Layout::Bhsd);
/// let problem = Problem::new(view("q")?, view("k")?, view("v")?);
/// let output = attend(&problem, &Recipe::default_for_cpu(), Options::default())?;
/// assert_eq!(output.o.shape(), [1, 2, 300, 64]);
/// # Ok::<(), vc_attention::Error>(())
/// ```
pub fn attend(problem: &Problem, recipe: &Recipe, options: Options) -> Result<Output> {
    let plan = Plan::new(problem, recipe, options)?;
    run(&Cpu, &plan, problem, None).map(|run| run.output)
}

/// A finished call.
#[derive(Clone, Debug)]
pub struct Run<B: Backend> {
    /// What it returned.
    pub output: Output,
    /// What it took.
    pub report: Report,
    /// The token orders that it used, for a warm start or for reuse.
    pub order: B::Order,
}

/// All stages of a planned call in turn; `warm` starts the grouping from an earlier call's centroids.
///
/// # Errors
/// Those of the stages.
pub fn run<B: Backend>(
    backend: &B,
    plan: &Plan,
    problem: &Problem,
    warm: Option<&B::Order>,
) -> Result<Run<B>> {
    let start = Instant::now();
    let order = backend.group(plan, problem, warm)?;
    let group = start.elapsed();
    let mut run = run_on_order(backend, plan, problem, order)?;
    run.report.group = group;
    Ok(run)
}

/// The stages after grouping, on a token order of an earlier call (the schedule of paper Sec. 3.4).
///
/// # Errors
/// Those of the stages.
pub fn run_on_order<B: Backend>(
    backend: &B,
    plan: &Plan,
    problem: &Problem,
    order: B::Order,
) -> Result<Run<B>> {
    let start = Instant::now();
    let q = backend.prepare_q(plan, problem, &order)?;
    let k = backend.prepare_k(plan, problem, &order, &q)?;
    let v = backend.prepare_v(plan, problem, &order)?;
    let prepare = start.elapsed();
    let start = Instant::now();
    let output = backend.attend(plan, problem, &q, &k, &v)?;
    let attend = start.elapsed();
    let report = Report { group: Duration::ZERO, prepare, attend, mean_share: backend.mean_share(&v)? };
    Ok(Run { output, report, order })
}
