//! `vc-testbed`: clips with low-bit attention and with exact attention from the same noise, and what the
//! difference is.

mod cli;

fn main() -> std::process::ExitCode {
    cli::run()
}
