//! `vca compare`: every recipe on one input, against exact attention in f64.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use serde::Serialize;
use vc_attention::backend::Backend;
use vc_attention::backend::cpu::Cpu;
use vc_attention::fidelity::{self, ErrorSources, Metrics, error_sources, reference};
use vc_attention::grouping::TokenOrder;
use vc_attention::recipe::baselines;
use vc_attention::tensor::Buffer;
use vc_attention::{Error, Layout, Options, OutputType, Plan, Problem, Recipe, Shape, Tensor};

use super::failure::{Result, note, print};
use super::input::{Input, InputOptions, title};
use super::machine::{Finished, Machine, Processor, is_limit_of_gpu};
use super::progress::Progress;
use super::table::{best, cosine, decibel, figure, milliseconds, percent, ratio, table, time};
use super::{output, plot};

const EXAMPLES: &str = "\
Examples:
  vca compare
  vca compare qkv.safetensors --json errors.json --plot errors.png
  vca compare qkv.safetensors --recipe sage2,vc8-expcast,vc8-expcast+beta=-0.35
  vca compare qkv.safetensors --grid 21,45,80 --recipe vc8,vc8+order=cube,vc8+order=sequence";

#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub struct Arguments {
    /// The input; a bundled layer of a tiny video DiT when absent.
    input: Option<PathBuf>,
    /// Recipes, with commas between them; all when absent. `--help` lists them and their modifiers.
    #[arg(long, value_name = "R,...", value_delimiter = ',', long_help = super::recipe_help())]
    recipe: Vec<String>,
    /// Write the figures as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Draw the errors as a PNG.
    #[arg(long, value_name = "FILE.png")]
    plot: Option<PathBuf>,
    /// Also take every error apart (Eq. 2 of the paper); costs two to three times the time.
    #[arg(long)]
    sources: bool,
    #[command(flatten)]
    options: InputOptions,
    #[command(flatten)]
    machine: Machine,
}

/// The JSON file.
#[derive(Serialize)]
struct Report {
    input: String,
    shape: ReportShape,
    backend: &'static str,
    device: String,
    recipes: Vec<Row>,
}

#[derive(Serialize)]
struct ReportShape {
    batch: usize,
    heads: usize,
    q_tokens: usize,
    kv_tokens: usize,
    head_dim: usize,
}

/// A recipe's figures, of the f32 output unless said otherwise.
#[derive(Serialize)]
pub struct Row {
    pub name: String,
    pub bits_qk: u32,
    pub bits_pv: u32,
    pub rel_l2: f64,
    rmse: f64,
    /// Of the output rounded to the input's type.
    rel_l2_out: f64,
    cosine: f64,
    pub psnr_db: f64,
    max_abs: f64,
    mean_share: Option<f64>,
    /// Of the whole call: preparation and attention.
    time_ms: f64,
    /// Grouping included.
    prepare_ms: f64,
    attend_ms: f64,
    /// Over the whole call of the recipe `exact`.
    speedup: f64,
    /// Ran on the CPU, whatever the backend of the rest.
    #[serde(skip)]
    on_cpu: bool,
    /// Where the error comes from, where that was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    sources: Option<Sources>,
}

/// Parts of the error, each relative to |o_ref|.
#[derive(Serialize)]
struct Sources {
    /// |(P - P_q) V|
    probability: f64,
    /// |P_q (V - V_q)|
    value: f64,
    /// |(P - P_q) V_q|
    probability_on_quantized: f64,
    /// |P (V - V_q)|
    value_under_exact: f64,
    /// Against f64 on the same dequantized operands.
    kernel: f64,
}

impl From<ErrorSources> for Sources {
    fn from(s: ErrorSources) -> Self {
        Sources {
            probability: s.probability,
            value: s.value,
            probability_on_quantized: s.probability_on_quantized,
            value_under_exact: s.value_under_exact,
            kernel: s.kernel,
        }
    }
}

impl Row {
    /// Whether the recipe is a peer's and not one of ours.
    pub fn is_baseline(&self) -> bool {
        baselines::all().iter().any(|recipe| recipe.name == self.base_name())
    }

    pub fn is_exact(&self) -> bool {
        self.base_name() == "exact"
    }

    fn base_name(&self) -> &str {
        self.name.split('+').next().unwrap_or_default()
    }
}

pub fn run(arguments: &Arguments) -> Result<()> {
    output::check(arguments.input.as_deref(), &[arguments.json.as_ref(), arguments.plot.as_ref()])?;
    let recipes = if arguments.recipe.is_empty() {
        arguments.machine.recipes(&super::recipe_names())?
    } else {
        arguments.machine.recipes(&arguments.recipe)?
    };
    let mut processor = arguments.machine.processor()?;
    let input = Input::open(arguments.input.as_deref(), &arguments.options)?;
    let problem = input.problem()?;
    let shape = problem.validate()?;
    let rows = compare(&mut processor, &problem, &shape, &recipes, arguments.sources)?;

    let title = title(&input.name(), &shape);
    let report = Report {
        input: input.name(),
        shape: ReportShape {
            batch: shape.batch,
            heads: shape.q_heads,
            q_tokens: shape.q_tokens,
            kv_tokens: shape.kv_tokens,
            head_dim: shape.head_dim,
        },
        backend: processor.name(),
        device: processor.device(),
        recipes: rows,
    };
    let json = arguments.json.as_ref().map_or(Ok(()), |path| output::write_json(path, &report));
    let plot = arguments.plot.as_ref().map_or(Ok(()), |path| plot::compare(path, &title, &report.recipes));
    // A file that could not be written must not keep the figures from being seen.
    let text = text(&report.recipes, processor.is_gpu());
    print(&format!("{title}\n{} ({})\n\n{text}", report.backend, report.device))?;
    if report.recipes.iter().any(|row| row.rel_l2.is_nan()) {
        note("the input is not finite throughout, so there are no figures over the whole output");
    }
    json.and(plot)
}

/// Runs all recipes. When a GPU does not take these tensors, the processor becomes the CPU.
fn compare(
    processor: &mut Processor,
    problem: &Problem,
    shape: &Shape,
    recipes: &[Recipe],
    sources: bool,
) -> Result<Vec<Row>> {
    let options = Options { output: OutputType::F32, lse: false };
    // All recipes are checked before any of the long work.
    let plans: Vec<Plan> = recipes
        .iter()
        .map(|recipe| Plan::new(problem, recipe, options))
        .collect::<Result<_, vc_attention::Error>>()?;
    for plan in plans.iter().filter(|plan| plan.recipe.grouping.order == TokenOrder::Cube) {
        Cpu.group(plan, problem, None)?; // cheap, and fails without a grid
    }
    let progress = Progress::new(recipes.len() + 2);
    progress.at("reference in f64");
    let reference = reference::attention(problem, shape);
    progress.step();
    progress.at("exact");
    let exact = run_on(processor, &Plan::new(problem, &baselines::exact(), options)?, problem)?;
    progress.step();

    let mut rows = Vec::new();
    for plan in plans {
        progress.at(&plan.recipe.name);
        let fresh;
        let run = if plan.recipe == baselines::exact() {
            &exact
        } else {
            fresh = run_on(processor, &plan, problem)?;
            &fresh
        };
        let Metrics { rel_l2, rmse, cosine, psnr_db, max_abs } =
            fidelity::compare(&run.output.o.view(), &reference.o);
        let report = run.report;
        let sources = sources.then(|| error_sources(problem, &plan.recipe, &reference)).transpose()?;
        rows.push(Row {
            bits_qk: plan.recipe.bits_qk(),
            bits_pv: plan.recipe.bits_pv(),
            name: plan.recipe.name,
            rel_l2,
            rmse,
            rel_l2_out: fidelity::compare(&rounded(&run.output.o, problem).view(), &reference.o).rel_l2,
            cosine,
            psnr_db,
            max_abs,
            mean_share: report.mean_share,
            time_ms: milliseconds(report.total()),
            prepare_ms: milliseconds(report.group + report.prepare),
            attend_ms: milliseconds(report.attend),
            speedup: exact.report.total().as_secs_f64() / report.total().as_secs_f64(),
            on_cpu: run.on_cpu,
            sources: sources.map(Into::into),
        });
        progress.step();
    }
    Ok(rows)
}

/// Runs a call on the processor, or on the CPU when the GPU's kernels do not cover the recipe. When they do not
/// take the tensors, the processor becomes the CPU for good.
fn run_on(processor: &mut Processor, plan: &Plan, problem: &Problem) -> Result<Finished> {
    match processor.run(plan, problem) {
        Err(error) if processor.is_gpu() && is_limit_of_gpu(&error) => {
            if matches!(error, Error::Tensor { .. }) {
                note(&format!("{error}; computing on the CPU"));
                *processor = Processor::Cpu;
            }
            Ok(Processor::Cpu.run(plan, problem)?)
        }
        result => Ok(result?),
    }
}

/// An output as a caller who keeps the input's type gets it.
fn rounded(o: &Tensor, problem: &Problem) -> Tensor {
    match o.buffer() {
        Buffer::F32(values) => Tensor::from_bhsd(values.clone(), o.shape(), problem.q.dtype(), Layout::Bhsd),
        _ => o.clone(),
    }
}

/// On a GPU the rows that the CPU computed are marked.
fn text(rows: &[Row], gpu: bool) -> String {
    let mut table = table(&["recipe", "QK/PV", "rel L2", "cosine", "PSNR", "mean share", "time", "vs exact"]);
    let lowest = lowest(rows.iter().filter(|row| !row.is_exact()));
    for row in rows {
        let error = figure(ratio(row.rel_l2));
        table.add_row(vec![
            if gpu && row.on_cpu { format!("{} *", row.name) } else { row.name.clone() }.into(),
            figure(format!("{}/{}", row.bits_qk, row.bits_pv)),
            if lowest.is_some_and(|lowest| std::ptr::eq(lowest, row)) { best(error) } else { error },
            figure(cosine(row.cosine)),
            figure(decibel(row.psnr_db)),
            figure(percent(row.mean_share)),
            figure(time(Duration::from_secs_f64(row.time_ms / 1e3))),
            figure(format!("{:.2}x", row.speedup)),
        ]);
    }
    let mut text = format!("{table}\n");
    if rows.iter().any(|row| row.sources.is_some()) {
        text += &format!("\n{}\n\n", sources_text(rows));
    }
    for bits in [8, 4] {
        text.extend(verdict(rows, bits));
    }
    text += match (gpu, rows.iter().any(|row| row.on_cpu)) {
        (false, _) => "Times are of an emulation on the CPU: they say nothing about speed on a GPU.\n",
        (true, true) => {
            "* Not covered by the GPU kernels (the recipe, or scores beyond f16): an emulation on the CPU, whose time \
             says nothing about speed on a GPU.\n"
        }
        (true, false) => "",
    };
    if gpu {
        text += "Times on the GPU are those of its stages on tensors that are there; `vs exact` is over exact attention \
                 in f32 on this machine's CPU.\n";
    }
    text
}

/// The two ways to part an error into probabilities and values, and what is the kernel's own.
fn sources_text(rows: &[Row]) -> comfy_table::Table {
    let mut table =
        table(&["error from", "(P - Pq) V", "Pq (V - Vq)", "(P - Pq) Vq", "P (V - Vq)", "kernel"]);
    for row in rows {
        let Some(s) = &row.sources else { continue };
        let parts = [s.probability, s.value, s.probability_on_quantized, s.value_under_exact, s.kernel];
        table.add_row([vec![(&row.name).into()], parts.map(|x| figure(ratio(x))).to_vec()].concat());
    }
    table
}

/// The row with the smallest error.
pub fn lowest<'a>(rows: impl Iterator<Item = &'a Row>) -> Option<&'a Row> {
    rows.filter(|row| row.rel_l2.is_finite()).min_by(|a, b| a.rel_l2.total_cmp(&b.rel_l2))
}

/// Our best recipe against the best peer at the same bits of P and V.
fn verdict(rows: &[Row], bits: u32) -> Option<String> {
    let best = |baseline: bool| {
        lowest(rows.iter().filter(|row| row.bits_pv == bits && row.is_baseline() == baseline))
    };
    let (ours, peer) = (best(false)?, best(true)?);
    let factor = peer.rel_l2 / ours.rel_l2;
    let beside = match factor {
        x if x >= 1.005 => format!("{x:.2}x below"),
        x if x <= 0.995 => format!("{:.2}x above", 1.0 / x),
        _ => "level with".into(),
    };
    Some(format!(
        "P and V in {bits} bits: lowest error {} of ours with {}, {beside} the best peer, {} with {}.\n",
        ratio(ours.rel_l2),
        ours.name,
        ratio(peer.rel_l2),
        peer.name
    ))
}
