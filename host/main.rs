//! The program `vca`: low-bit attention on files. `vca --help` says what it does.

mod cli;
mod data;

use std::process::ExitCode;

fn main() -> ExitCode {
    cli::main()
}
