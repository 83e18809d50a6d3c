//! `refrain completions`: completion scripts for shells.

use crate::cli::Cli;
use crate::out::Stdout;
use clap::CommandFactory;
use clap_complete::Shell;

/// Print the completion script for a shell
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Examples:
  refrain completions bash > ~/.local/share/bash-completion/completions/refrain
  refrain completions zsh > ~/.zfunc/_refrain
  refrain completions fish > ~/.config/fish/completions/refrain.fish")]
pub(crate) struct Args {
    /// The shell
    #[arg(value_name = "SHELL")]
    shell: Shell,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "refrain", &mut script);
    Stdout::new().text(&String::from_utf8_lossy(&script))
}
