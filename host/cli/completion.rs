//! `vca completion`: a script that completes commands and options in a shell.

use clap::{Args, CommandFactory};
use clap_complete::Shell;

use super::failure::{Result, print};

const EXAMPLES: &str = "\
Examples:
  vca completion bash > ~/.local/share/bash-completion/completions/vca
  vca completion zsh > ~/.zfunc/_vca
  vca completion fish > ~/.config/fish/completions/vca.fish";

#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub struct Arguments {
    /// The shell.
    shell: Shell,
}

pub fn run(arguments: &Arguments) -> Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(arguments.shell, &mut super::Vca::command(), "vca", &mut script);
    print(&String::from_utf8_lossy(&script))
}
