//! The program `vca`: arguments in, tables, files and exit codes out. No numerics here.

mod attend;
mod bench;
mod compare;
mod completion;
mod doctor;
mod failure;
mod input;
mod inspect;
mod machine;
mod output;
mod plot;
mod progress;
mod table;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use vc_attention::Recipe;
use vc_attention::recipe::MODIFIERS;

use machine::Machine;

const EXAMPLES: &str = "\
Examples:
  vca compare                          all recipes on the bundled input
  vca compare qkv.safetensors --json errors.json --plot errors.png
  vca attend qkv.safetensors -o out.safetensors --recipe vc16-expcast --lse
  vca inspect qkv.safetensors --plot outliers.png
  vca bench --shape wan2.2             stages, floors and the 40-step average, on a GPU at full size
  vca doctor

--backend auto takes a GPU that the kernels run on when there is one, else the CPU.
The environment variable VCA_BACKEND sets another default.

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
    /// Time the stages of a call of a model's shape, beside what the hardware would need at least.
    Bench(bench::Arguments),
    /// Say what this machine and this build have, and what is missing.
    Doctor(doctor::Arguments),
    /// Write a completion script for a shell.
    Completion(completion::Arguments),
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
