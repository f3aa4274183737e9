//! The program `vca`: arguments in, tables, files and exit codes out. No numerics here.

mod attend;
mod bench;
mod compare;
mod completion;
mod doctor;
mod failure;
mod input;
mod inspect;
mod output;
mod plot;
mod progress;
mod table;

use std::process::ExitCode;

use clap::{Args, Parser, Subcommand, ValueEnum};
use vc_attention::Recipe;
use vc_attention::backend::cpu::Cpu;
use vc_attention::recipe::MODIFIERS;

use failure::{Failure, Result};

const EXAMPLES: &str = "\
Examples:
  vca compare                          all recipes on the bundled input
  vca compare qkv.safetensors --json errors.json --plot errors.png
  vca attend qkv.safetensors -o out.safetensors --recipe vc16-expcast --lse
  vca inspect qkv.safetensors --plot outliers.png
  vca bench --shape wan2.2
  vca doctor

Exit codes: 0 done, 1 failed, 2 bad usage or input.";

/// Low-bit attention for video diffusion transformers: V-Smooth and ExpCast-FP8, beside their peers.
///
/// Inputs are safetensors files with the tensors `q`, `k` and `v` (F32, F16 or BF16; [heads, tokens, dim] or with a
/// batch in front) and, if known, the latent grid of the tokens as metadata `grid`, "[t, h, w]".
#[derive(Parser)]
#[command(version, arg_required_else_help = true, after_help = EXAMPLES, max_term_width = 100)]
struct Vca {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run every recipe on the same input and say how far each is from exact attention.
    Compare(compare::Arguments),
    /// Compute attention with one recipe and write the output.
    Attend(attend::Arguments),
    /// Show the outliers of the values and what block means remove in each token order.
    Inspect(inspect::Arguments),
    /// Time the stages of a call on made-up values of a model's shape.
    Bench(bench::Arguments),
    /// Say what this machine and this build have, and what is missing.
    Doctor(doctor::Arguments),
    /// Write a completion script for a shell.
    Completion(completion::Arguments),
}

/// Options of the commands that compute.
#[derive(Args)]
struct Machine {
    /// Where to compute.
    #[arg(long, value_enum, default_value_t = BackendName::Auto, help_heading = "Machine")]
    backend: BackendName,
    /// Threads of the CPU backend; all cores when absent.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..), help_heading = "Machine")]
    threads: Option<u16>,
    /// Seed of everything random: the start of the k-means, made-up values.
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = "Machine")]
    seed: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum BackendName {
    /// The fastest that is there.
    Auto,
    Cpu,
    Cuda,
}

impl Machine {
    /// Sets the threads up and chooses the backend.
    fn backend(&self) -> Result<Cpu> {
        if let Some(threads) = self.threads {
            rayon::ThreadPoolBuilder::new()
                .num_threads(threads.into())
                .build_global()
                .map_err(|error| Failure::failed(format!("{threads} threads: {error}")))?;
        }
        match self.backend {
            BackendName::Auto | BackendName::Cpu => Ok(Cpu),
            BackendName::Cuda => Err(Failure::failed("backend `cuda`: this build has no CUDA backend")
                .with_hint("--backend cpu runs the same recipes; `vca doctor` shows what this machine has")),
        }
    }

    /// Reads a recipe; [`Machine::seed`] goes into its k-means unless the recipe names a seed itself.
    fn recipe(&self, text: &str) -> Result<Recipe> {
        let mut recipe = Recipe::parse(text)?;
        if !text.contains("+seed=") {
            recipe.grouping.seed = self.seed;
        }
        Ok(recipe)
    }

    fn recipes(&self, texts: &[String]) -> Result<Vec<Recipe>> {
        texts.iter().map(|text| self.recipe(text)).collect()
    }
}

/// Names of all recipes.
fn recipe_names() -> Vec<String> {
    Recipe::all().into_iter().map(|recipe| recipe.name).collect()
}

/// Help on recipes, from the library's own list.
fn recipe_help() -> String {
    let mut text = format!(
        "Recipes, several with commas between them: {}.\n\nModifiers change one, as in `vc8-expcast+order=cube+beta=-0.35`:",
        recipe_names().join(", ")
    );
    for modifier in MODIFIERS {
        text += &format!("\n  {}={}: {}", modifier.name, modifier.values, modifier.about);
    }
    text
}

/// Runs the program.
pub fn main() -> ExitCode {
    let result = match Vca::parse().command {
        Command::Compare(arguments) => compare::run(&arguments),
        Command::Attend(arguments) => attend::run(&arguments),
        Command::Inspect(arguments) => inspect::run(&arguments),
        Command::Bench(arguments) => bench::run(&arguments),
        Command::Doctor(arguments) => doctor::run(&arguments),
        Command::Completion(arguments) => completion::run(&arguments),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    #[test]
    fn the_arguments_are_well_formed() {
        super::Vca::command().debug_assert();
    }
}
