//! `vca bench`: times of the stages of a call of a model's shape.

#![cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "floors and the schedule are for GPUs"))]

mod call;
mod cpu;
mod floor;
#[cfg(feature = "cuda")]
mod gpu;
mod report;
mod values;

use std::path::PathBuf;

use clap::Args;

use super::failure::{Failure, Result, print};
use super::machine::{Machine, Processor};
use super::output;
use call::Call;
use report::Report;
use values::{Data, Source};

/// Recipes that are timed on the CPU, unless told otherwise.
const CPU_RECIPES: &str = "exact,sage2,vc8-expcast,vc8-fp8qk,vc16-expcast";

/// Recipes that are timed on a GPU, unless told otherwise.
const GPU_RECIPES: &str = "vc16-expcast,vc8-fp8qk,vc16";

const EXAMPLES: &str = "\
Examples:
  vca bench
  vca bench --shape wan2.2 --recipe vc16-expcast,vc16-expcast+demean=off --json wan.json
  vca bench --lengths 4096,16384,65536,131072
  vca bench --data qkv.safetensors
  vca bench --backend cpu --shape 1,2,4096,64 --recipe exact,vc8,vc8+order=balanced";

/// Times the stages of a call.
#[derive(Args)]
#[command(after_help = EXAMPLES, after_long_help = format!("{}\n\n{EXAMPLES}", floor::HELP))]
pub struct Arguments {
    /// wan2.2, longcat, hunyuan, h3, or batch, heads, tokens and head_dim as B,H,N,D.
    #[arg(long, value_name = "S", default_value = "wan2.2", value_parser = call::parse)]
    shape: Call,
    /// Numbers of tokens instead of the shape's; on the CPU with one head.
    #[arg(long, value_name = "N,...", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..))]
    lengths: Vec<u32>,
    /// On the CPU: run a model's whole shape, however long it takes, and not one head of a part of it.
    #[arg(long, conflicts_with = "lengths")]
    full: bool,
    /// Recipes, with commas between them; a selection when absent. `--help` lists them and their modifiers.
    #[arg(long, value_name = "R,...", value_delimiter = ',', long_help = recipe_help())]
    recipe: Vec<String>,
    /// `normal` for N(0,1), or a file whose tokens are tiled up, every head and copy a little different.
    #[arg(long, value_name = "D", default_value = "normal", value_parser = clap::value_parser!(Data))]
    data: Data,
    /// Calls whose median counts; 3 on the CPU and as many as fit in 3 seconds on a GPU when absent.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    runs: Option<u16>,
    /// On a GPU: key blocks of 128 between promotions of the FP8 sums to f32.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    promote: Option<u32>,
    /// Write the figures as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    #[command(flatten)]
    machine: Machine,
}

fn recipe_help() -> String {
    format!("{}\n\nWhen absent: {GPU_RECIPES} on a GPU, {CPU_RECIPES} on the CPU.", super::recipe_help())
}

pub fn run(arguments: &Arguments) -> Result<()> {
    output::check(arguments.data.file(), &[arguments.json.as_ref()])?;
    let asked = arguments.machine.recipes(&arguments.recipe)?;
    let processor = arguments.machine.processor()?;
    if arguments.promote.is_some() && !processor.is_gpu() {
        return Err(Failure::usage("--promote is for the GPU kernels, and this runs on the CPU"));
    }
    let default = if processor.is_gpu() { GPU_RECIPES } else { CPU_RECIPES };
    let recipes = if asked.is_empty() {
        arguments.machine.recipes(&default.split(',').map(Into::into).collect::<Vec<_>>())?
    } else {
        asked
    };
    let source = Source::open(&arguments.data, arguments.machine.seed)?;
    source.check(&arguments.shape)?;
    let (calls, ceilings) = match &processor {
        Processor::Cpu => (cpu::run(arguments, &source, &recipes)?, None),
        #[cfg(feature = "cuda")]
        Processor::Gpu(gpu) => (gpu::run(gpu, arguments, &source, &recipes)?, Some(floor::H200)),
    };
    let report =
        Report { backend: processor.name(), device: processor.device(), data: source.name, ceilings, calls };
    let json = arguments.json.as_ref().map_or(Ok(()), |path| output::write_json(path, &report));
    // A file that could not be written must not keep the figures from being seen.
    print(&report::text(&report))?;
    json
}
