//! `refrain rm`: remove a pulled model.

use crate::cli::Context;
use crate::fail::Hinted;
use crate::out::{Out, counted};
use crate::resolve;
use refrain_hub::Bytes;

/// Remove pulled models from the local store
///
/// Only what was pulled is removed; files of your own are not touched.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Examples:
  refrain rm smollm2
  refrain rm Qwen/Qwen3-0.6B-GGUF:Q8_0        one quantisation
  refrain rm Qwen/Qwen3-0.6B-GGUF             all of the repository")]
pub(crate) struct Args {
    /// Names as `refrain list` shows them
    #[arg(value_name = "NAME", required = true)]
    names: Vec<String>,
}

pub(crate) fn run(args: &Args, context: &Context) -> anyhow::Result<()> {
    let mut out = Out::new();
    for name in &args.names {
        if resolve::is_builtin(name) {
            let message = format!("{name} is built into the program");
            return Err(Hinted::new(message, "it takes no room in the store").into());
        }
        let name = resolve::parse(name, context)?;
        let removed = context.store.remove(&name)?;
        let (files, bytes) = (counted(removed.n_files, "file"), Bytes(removed.bytes));
        out.line(format_args!("{name}: {files} removed, {bytes} freed"))?;
    }
    Ok(())
}
