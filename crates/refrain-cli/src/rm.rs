//! `refrain rm`: remove a pulled model.

use crate::cli::CliContext;
use crate::fail::Hinted;
use crate::out::{Stdout, counted};
use crate::resolve;
use refrain_hub::ByteSize;

/// Remove pulled models from the local store
///
/// Removes only pulled models, never files of your own.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Examples:
  refrain rm smollm2
  refrain rm Qwen/Qwen3-0.6B-GGUF:Q8_0        one quantisation
  refrain rm Qwen/Qwen3-0.6B-GGUF             all of the repository")]
pub(crate) struct Args {
    /// Names as listed by `refrain list`
    #[arg(value_name = "NAME", required = true)]
    names: Vec<String>,
}

pub(crate) fn run(args: &Args, context: &CliContext) -> anyhow::Result<()> {
    let mut out = Stdout::new();
    for name in &args.names {
        if resolve::is_builtin(name) {
            let message = format!("{name} is built in and cannot be removed");
            return Err(Hinted::new(message, "it takes no space in the store").into());
        }
        let name = resolve::parse(name, context)?;
        let removed = context.store.remove(&name)?;
        let (files, bytes) = (counted(removed.n_files, "file"), ByteSize(removed.bytes));
        out.line(format_args!("{name}: {files} removed, {bytes} freed"))?;
    }
    Ok(())
}
