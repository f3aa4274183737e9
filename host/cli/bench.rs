//! `vca bench`: times of the stages of a call on made-up values of a model's shape.

use std::time::{Duration, Instant};

use clap::Args;
use vc_attention::backend::Backend;
use vc_attention::recipe::baselines;
use vc_attention::synth::{Head, Synth};
use vc_attention::{Layout, Options, Plan, Problem, Recipe, Shape, TensorView};

use super::Machine;
use super::failure::{Result, note, print};
use super::input::{numbers, title};
use super::progress::Progress;
use super::table::{figure, table, thousands, time};

/// Operations of one call beyond which a CPU needs minutes for a table, and the shape is cut down.
const CPU_BUDGET: f64 = 5e10;

/// What a shape is cut down to: one head of as many tokens at most.
const CPU_TOKENS: usize = 8192;

/// Estimated time of the whole table from which a warning is due.
const LONG: Duration = Duration::from_secs(120);

/// Models by name: heads, latent grid (or a grid of as many tokens), head_dim; batch 1.
const MODELS: [(&str, usize, [usize; 3], usize); 4] = [
    ("wan2.2", 40, [21, 45, 80], 128),
    ("longcat", 32, [22, 34, 50], 128),
    ("hunyuan", 16, [4, 25, 1117], 128),
    ("h3", 56, [21, 50, 70], 128),
];

const EXAMPLES: &str = "\
Examples:
  vca bench
  vca bench --shape 1,2,4096,64 --recipe exact,vc8,vc8+order=balanced
  vca bench --shape wan2.2 --tokens 16384
  vca bench --shape longcat --full";

#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub struct Arguments {
    /// wan2.2, longcat, hunyuan, h3, or batch, heads, tokens and head_dim as B,H,N,D.
    #[arg(long, value_name = "S", default_value = "wan2.2", value_parser = call)]
    shape: Call,
    /// Tokens instead of the shape's, with one head of a model.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    tokens: Option<u32>,
    /// Run a model's whole shape, however long it takes.
    #[arg(long, conflicts_with = "tokens")]
    full: bool,
    /// Recipes, with commas between them. `--help` lists them and their modifiers.
    #[arg(
        long,
        value_name = "R,...",
        value_delimiter = ',',
        default_value = "exact,sage2,vc8-expcast,vc8-fp8qk,vc16-expcast",
        long_help = super::recipe_help()
    )]
    recipe: Vec<String>,
    /// Calls per recipe; the median counts.
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..))]
    runs: u16,
    #[command(flatten)]
    machine: Machine,
}

/// What is timed.
#[derive(Clone, Debug)]
struct Call {
    name: String,
    batch: usize,
    heads: usize,
    grid: [usize; 3],
    head_dim: usize,
}

impl Call {
    fn tokens(&self) -> usize {
        self.grid.iter().product()
    }

    fn shape(&self) -> Shape {
        Shape {
            batch: self.batch,
            q_heads: self.heads,
            kv_heads: self.heads,
            q_tokens: self.tokens(),
            kv_tokens: self.tokens(),
            head_dim: self.head_dim,
        }
    }

    /// One head of `tokens` tokens.
    fn cut(&self, tokens: usize) -> Self {
        Self { name: format!("{} cut down", self.name), batch: 1, heads: 1, grid: grid(tokens), ..*self }
    }
}

fn call(text: &str) -> Result<Call, String> {
    if let Some(&(name, heads, grid, head_dim)) = MODELS.iter().find(|(name, ..)| *name == text) {
        return Ok(Call { name: name.into(), batch: 1, heads, grid, head_dim });
    }
    match numbers(text) {
        Some(sizes) if sizes.contains(&0) => Err("expected sizes of at least 1".into()),
        Some([batch, heads, tokens, head_dim]) => {
            Ok(Call { name: "made up".into(), batch, heads, grid: grid(tokens), head_dim })
        }
        None => {
            let names = MODELS.map(|(name, ..)| name).join(", ");
            Err(format!("expected {names}, or four whole numbers B,H,N,D"))
        }
    }
}

/// A grid of exactly `tokens` places, as close to 4 frames as it divides.
fn grid(tokens: usize) -> [usize; 3] {
    let t = [4, 3, 2, 1].into_iter().find(|t| tokens.is_multiple_of(*t)).unwrap_or(1);
    let frame = tokens / t;
    let h = (1..=frame.isqrt()).rev().find(|h| frame.is_multiple_of(*h)).unwrap_or(1);
    [t, h, frame / h]
}

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

    fn kernel(&self) -> Duration {
        self.stages[4]
    }
}

pub fn run(arguments: &Arguments) -> Result<()> {
    let recipes = arguments.machine.recipes(&arguments.recipe)?;
    let backend = arguments.machine.backend()?;
    let asked = &arguments.shape;
    let call = match arguments.tokens {
        Some(tokens) => asked.cut(tokens as usize),
        None if !arguments.full && asked.shape().flops() > CPU_BUDGET => {
            asked.cut(asked.tokens().min(CPU_TOKENS))
        }
        None => asked.clone(),
    };
    let calls = (recipes.len() * usize::from(arguments.runs)) as f64;
    let estimate = |speed: f64, call: &Call, calls: f64| seconds(calls * call.shape().flops() / speed);

    // A small call of the first recipe tells how long the rest will take.
    let small = call.cut(call.tokens().min(1024));
    let speed = speed(&backend, &small, &recipes[0], arguments.machine.seed)?;
    if call.shape() != asked.shape() {
        note(&format!(
            "{} takes about {} a call on this CPU; timing one head of {} tokens instead (--full runs it all)",
            title(&asked.name, &asked.shape()),
            time(estimate(speed, asked, 1.0)),
            thousands(call.tokens()),
        ));
    }
    let total = estimate(speed, &call, calls);
    if total > LONG {
        note(&format!("this will take about {}", time(total)));
    }

    let values = values(&call, arguments.machine.seed);
    let problem = problem(&call, &values)?;
    let progress = Progress::new(calls as usize);
    let mut rows = Vec::new();
    for recipe in &recipes {
        progress.at(&recipe.name);
        let plan = Plan::new(&problem, recipe, Options::default())?;
        let mut runs = Vec::new();
        for _ in 0..arguments.runs {
            runs.push(measure(&backend, &plan, &problem)?);
            progress.step();
        }
        runs.sort_by_key(Times::whole);
        rows.push((recipe, runs[runs.len() / 2]));
    }
    drop(progress);
    print(&format!(
        "{}\n{} ({}), median of {} calls, values made up with seed {}\n\n{}",
        title(&call.name, &call.shape()),
        backend.name(),
        backend.device(),
        arguments.runs,
        arguments.machine.seed,
        text(&rows, call.shape().flops())
    ))
}

fn seconds(s: f64) -> Duration {
    Duration::try_from_secs_f64(s).unwrap_or(Duration::MAX)
}

/// Made-up q, k, v of all heads, each [batch * heads, tokens, head_dim].
fn values(call: &Call, seed: u64) -> Head {
    let synth = Synth { grid: call.grid, head_dim: call.head_dim, ..Synth::small(seed) };
    synth.heads(call.batch * call.heads)
}

fn problem<'a>(call: &Call, values: &'a Head) -> Result<Problem<'a>> {
    let shape = [call.batch, call.heads, call.tokens(), call.head_dim];
    let view = |name, x: &'a Vec<f32>| TensorView::new(name, x.as_slice(), shape, Layout::Bhsd);
    let (q, k, v) = (view("q", &values.q)?, view("k", &values.k)?, view("v", &values.v)?);
    Ok(Problem { grid: Some(call.grid), ..Problem::new(q, k, v) })
}

/// Operations per second of a whole call.
fn speed<B: Backend>(backend: &B, call: &Call, recipe: &Recipe, seed: u64) -> Result<f64> {
    let values = values(call, seed);
    let problem = problem(call, &values)?;
    let plan = Plan::new(&problem, recipe, Options::default())?;
    measure(backend, &plan, &problem)?; // the first call pays for starting threads
    let times = measure(backend, &plan, &problem)?;
    Ok(call.shape().flops() / times.whole().as_secs_f64())
}

fn measure<B: Backend>(backend: &B, plan: &Plan, problem: &Problem) -> Result<Times> {
    let mut stages = [Duration::ZERO; 5];
    let mut last = Instant::now();
    let mut lap = |stage: usize| {
        let now = Instant::now();
        stages[stage] = now - last;
        last = now;
    };
    let order = backend.group(plan, problem, None)?;
    lap(0);
    let q = backend.prepare_q(plan, problem, &order)?;
    lap(1);
    let k = backend.prepare_k(plan, problem, &order, &q)?;
    lap(2);
    let v = backend.prepare_v(plan, problem, &order)?;
    lap(3);
    std::hint::black_box(backend.attend(plan, problem, &q, &k, &v)?);
    lap(4);
    Ok(Times { stages })
}

fn text(rows: &[(&Recipe, Times)], flops: f64) -> String {
    let teraflops = |time: Duration| format!("{:.4}", flops / time.as_secs_f64() / 1e12);
    let exact =
        rows.iter().find(|(recipe, _)| **recipe == baselines::exact()).map(|(_, times)| times.whole());
    let mut table = table(&[
        "recipe",
        "group",
        "Q",
        "K",
        "V",
        "attend",
        "whole call",
        "TFLOP/s attend",
        "whole",
        "vs exact",
    ]);
    for (recipe, times) in rows {
        let mut row = vec![(&recipe.name).into()];
        row.extend(times.stages.map(|stage| figure(time(stage))));
        row.extend([
            figure(time(times.whole())),
            figure(teraflops(times.kernel())),
            figure(teraflops(times.whole())),
            figure(exact.map_or_else(
                || "-".into(),
                |exact| format!("{:.2}x", exact.as_secs_f64() / times.whole().as_secs_f64()),
            )),
        ]);
        table.add_row(row);
    }
    format!("{table}\nTimes are of an emulation on the CPU: they say nothing about speed on a GPU.\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_and_sizes_are_read() {
        for (text, tokens) in [("wan2.2", 75_600), ("longcat", 37_400), ("hunyuan", 111_700), ("h3", 73_500)]
        {
            assert_eq!(call(text).unwrap().tokens(), tokens);
        }
        let own = call("2,3,1000,64").unwrap();
        assert_eq!((own.batch, own.heads, own.tokens(), own.head_dim), (2, 3, 1000, 64));
        for wrong in ["wan", "1,2,3", "1,2,0,4", "1,2,3,-4", "1,2,3,4,5", ""] {
            assert!(call(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_grid_has_exactly_the_tokens() {
        for tokens in [1, 2, 7, 128, 1000, 8192, 9973] {
            assert_eq!(grid(tokens).iter().product::<usize>(), tokens);
        }
    }
}
