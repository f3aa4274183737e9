//! Times of the emulation, by the clock of the CPU.

use std::time::{Duration, Instant};

use half::bf16;
use vc_attention::backend::Backend;
use vc_attention::backend::cpu::Cpu;
use vc_attention::{Layout, Options, Plan, Problem, Recipe, TensorView};

use super::super::failure::{Result, note};
use super::super::input::title;
use super::super::progress::Progress;
use super::super::table::{thousands, time};
use super::Arguments;
use super::call::Call;
use super::report::{Stage, Timed, stage};
use super::values::{Source, Which};

/// Operations of one call beyond which a CPU needs minutes for a table, and the shape is cut down.
const BUDGET: f64 = 5e10;

/// What a shape is cut down to: one head of as many tokens at most.
const TOKENS: usize = 8192;

/// Estimated time of the whole table from which a warning is due.
const LONG: Duration = Duration::from_secs(120);

/// Calls whose median counts, unless told otherwise.
const RUNS: u16 = 3;

/// Times of one call.
#[derive(Clone, Copy)]
struct Times {
    /// Grouping; Q; K; V; attention.
    stages: [Duration; 5],
}

impl Times {
    fn whole(&self) -> Duration {
        self.stages.iter().sum()
    }
}

/// Q, K and V, each (batch, heads, tokens, dim).
struct Values([Vec<bf16>; 3]);

impl Values {
    fn new(source: &Source, call: &Call) -> Self {
        Self([Which::Q, Which::K, Which::V].map(|which| source.tensor(call, which)))
    }

    fn problem(&self, call: &Call) -> Result<Problem<'_>> {
        let shape = [call.batch, call.heads, call.tokens(), call.head_dim];
        let view = |name, x| TensorView::new(name, x, shape, Layout::Bhsd);
        let [q, k, v] = self.0.each_ref().map(Vec::as_slice);
        Ok(Problem { grid: Some(call.grid), ..Problem::new(view("q", q)?, view("k", k)?, view("v", v)?) })
    }
}

/// Times every recipe at every length.
pub fn run(arguments: &Arguments, source: &Source, recipes: &[Recipe]) -> Result<Vec<Timed>> {
    let asked = &arguments.shape;
    let calls = if !arguments.lengths.is_empty() {
        arguments.lengths.iter().map(|&tokens| asked.cut(tokens as usize)).collect()
    } else if !arguments.full && asked.shape().flops() > BUDGET {
        vec![asked.cut(asked.tokens().min(TOKENS))]
    } else {
        vec![asked.clone()]
    };
    let runs = arguments.runs.unwrap_or(RUNS);
    let flops = |calls: &[Call]| calls.iter().map(|call| call.shape().flops()).sum::<f64>();
    let rounds = (recipes.len() * usize::from(runs)) as f64;

    // A small call of the first recipe tells how long the rest will take.
    let shortest = calls.iter().map(Call::tokens).min().unwrap_or(1);
    let speed = speed(source, &asked.cut(shortest.min(1024)), &recipes[0])?;
    if calls[0].shape() != asked.shape() {
        note(&format!(
            "{} takes about {} a call on this CPU; timing one head of {} tokens instead (--full runs it all)",
            title(&asked.name, &asked.shape()),
            time(seconds(asked.shape().flops() / speed)),
            calls.iter().map(|call| thousands(call.tokens())).collect::<Vec<_>>().join(", "),
        ));
    }
    let total = seconds(rounds * flops(&calls) / speed);
    if total > LONG {
        note(&format!("this will take about {}", time(total)));
    }

    let progress = Progress::new(calls.len() * rounds as usize);
    let mut timed = Vec::new();
    for call in &calls {
        let values = Values::new(source, call);
        let problem = values.problem(call)?;
        for recipe in recipes {
            progress.at(&recipe.name);
            let plan = Plan::new(&problem, recipe, Options::default())?;
            let mut times = Vec::new();
            for _ in 0..runs {
                times.push(measure(&plan, &problem)?);
                progress.step();
            }
            timed.push(summary(call, recipe, &times));
        }
    }
    Ok(timed)
}

fn seconds(s: f64) -> Duration {
    Duration::try_from_secs_f64(s).unwrap_or(Duration::MAX)
}

fn summary(call: &Call, recipe: &Recipe, times: &[Times]) -> Timed {
    let stage = |name, index: usize| Stage::new(name, times.iter().map(|times| times.stages[index]));
    let flops = call.shape().flops();
    let mut timed = Timed::new(call, &recipe.name, times.len());
    timed.stages = vec![
        stage(stage::COLD, 0),
        stage(stage::Q, 1),
        stage(stage::K, 2),
        stage(stage::V, 3),
        stage(stage::ATTENTION, 4).with_flops(flops),
        Stage::new(stage::WHOLE_COLD, times.iter().map(Times::whole)).with_flops(flops),
    ];
    timed
}

/// Operations per second of a whole call.
fn speed(source: &Source, call: &Call, recipe: &Recipe) -> Result<f64> {
    let values = Values::new(source, call);
    let problem = values.problem(call)?;
    let plan = Plan::new(&problem, recipe, Options::default())?;
    measure(&plan, &problem)?; // the first call pays for starting threads
    Ok(call.shape().flops() / measure(&plan, &problem)?.whole().as_secs_f64())
}

fn measure(plan: &Plan, problem: &Problem) -> Result<Times> {
    let mut stages = [Duration::ZERO; 5];
    let mut last = Instant::now();
    let mut lap = |stage: usize| {
        let now = Instant::now();
        stages[stage] = now - last;
        last = now;
    };
    let order = Cpu.group(plan, problem, None)?;
    lap(0);
    let q = Cpu.prepare_q(plan, problem, &order)?;
    lap(1);
    let k = Cpu.prepare_k(plan, problem, &order, &q)?;
    lap(2);
    let v = Cpu.prepare_v(plan, problem, &order)?;
    lap(3);
    std::hint::black_box(Cpu.attend(plan, problem, &q, &k, &v)?);
    lap(4);
    Ok(Times { stages })
}
