//! `vca attend`: attention with one recipe, from file to file.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use vc_attention::io::{self, Output};
use vc_attention::tensor::Buffer;
use vc_attention::{DType, Options, OutputType, Plan, Problem, Recipe, Tensor};

use super::failure::{Failure, Result, note, print};
use super::input::{Input, InputOptions, title};
use super::machine::{Finished, Processor, is_limit_of_gpu};
use super::progress::Progress;
use super::table::{percent, time};
use super::{Machine, output};

const EXAMPLES: &str = "\
Examples:
  vca attend qkv.safetensors -o out.safetensors
  vca attend qkv.safetensors -o out.safetensors --recipe vc8+k=32 --lse --out-dtype f32
  vca attend flash.safetensors -o out.safetensors --layout bshd";

/// Writes `o`, in the type, rank and axes of the input, and the input's metadata.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub struct Arguments {
    /// The input.
    input: PathBuf,
    /// The file to write.
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    /// The recipe. `--help` lists all and their modifiers.
    #[arg(long, value_name = "R", default_value_t = Recipe::default_for_cpu().name, long_help = super::recipe_help())]
    recipe: String,
    /// Write the log-sum-exp of every row as `lse`, F32, [heads, tokens] or with the batch in front.
    #[arg(long)]
    lse: bool,
    /// Element type of `o`.
    #[arg(long, value_enum, default_value_t = OutDType::Input)]
    out_dtype: OutDType,
    #[command(flatten)]
    options: InputOptions,
    #[command(flatten)]
    machine: Machine,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum OutDType {
    /// That of q.
    Input,
    F32,
}

/// Runs a call on the processor, or on the CPU when the GPU's kernels do not take it and nobody insists.
fn run_on(processor: &Processor, plan: &Plan, problem: &Problem, insists: bool) -> Result<Finished> {
    match processor.run(plan, problem) {
        Err(error) if processor.is_gpu() && is_limit_of_gpu(&error) => {
            if insists {
                return Err(Failure::usage(error.to_string()).with_hint("--backend cpu takes it"));
            }
            note(&format!("{error}; computing on the CPU"));
            Ok(Processor::Cpu.run(plan, problem)?)
        }
        result => Ok(result?),
    }
}

pub fn run(arguments: &Arguments) -> Result<()> {
    output::check(Some(&arguments.input), &[Some(&arguments.output)])?;
    let recipe = arguments.machine.recipe(&arguments.recipe)?;
    let processor = arguments.machine.processor()?;
    let input = Input::open(Some(&arguments.input), &arguments.options)?;
    let problem = input.problem()?;
    let options = Options { output: OutputType::F32, lse: arguments.lse };
    let plan = Plan::new(&problem, &recipe, options)?;

    let progress = Progress::new(1);
    progress.at(&recipe.name);
    let run = run_on(&processor, &plan, &problem, arguments.machine.insists_on_gpu())?;
    drop(progress);

    let dtype = match arguments.out_dtype {
        OutDType::Input => problem.q.dtype(),
        OutDType::F32 => DType::F32,
    };
    let shape = run.output.o.shape();
    let Buffer::F32(values) = run.output.o.buffer() else {
        return Err(Failure::failed("the backend did not return the f32 output that was asked for"));
    };
    let o = Tensor::from_bhsd(values.clone(), shape, dtype, arguments.options.layout.into());
    let rank = input.file.rank()?;
    let mut tensors = vec![Output::tensor("o", &o, rank)?];
    if let Some(lse) = &run.output.lse {
        tensors.push(Output::lse("lse", lse, [shape[0], shape[1], shape[2]], rank)?);
    }
    io::write(&arguments.output, &tensors, input.file.metadata()).map_err(Failure::write)?;

    if run.output.observed.f32_fallbacks > 0 {
        note(&format!(
            "{} of {} heads have scores beyond f16 accumulators and ran with f32 ones",
            run.output.observed.f32_fallbacks,
            plan.shape.batch * plan.shape.kv_heads
        ));
    }
    let device = if run.on_cpu { Processor::Cpu.device() } else { processor.device() };
    let report = run.report;
    let share =
        report.mean_share.map_or(String::new(), |s| format!("; block means hold {}", percent(Some(s))));
    print(&format!(
        "{}\n{} on {device}: {} (prepare {}, attend {}){share}\n",
        title(&input.name(), &plan.shape),
        recipe.name,
        time(report.total()),
        time(report.group + report.prepare),
        time(report.attend),
    ))
}
