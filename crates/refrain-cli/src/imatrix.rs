//! `refrain imatrix`: which columns of each weight matter.

use crate::bars::Delayed;
use crate::cli::CliContext;
use crate::fail::Hinted;
use crate::out::{Stdout, counted, short_time, talk, thousands};
use crate::{prompt, resolve};
use refrain::{ImportanceOptions, importance};
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Instant;

/// Measure which columns of each weight matter for a text
///
/// Evaluates the text on the CPU in windows of -c tokens and writes the mean squared activation of each column, for
/// `refrain quantize --imatrix`. The file has the GGUF form that llama.cpp's tools read and write. A hundred windows of
/// text like that of later use are enough.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Examples:
  refrain imatrix model-bf16.gguf -f calibration.txt -o imatrix.gguf
  refrain imatrix smollm2 -f wiki.txt --chunks 50 -o imatrix.gguf")]
pub(crate) struct Args {
    /// A path, a short name such as smollm2, or owner/repo[:QUANT]
    #[arg(value_name = "MODEL")]
    model: String,
    /// The text; - is standard input
    #[arg(short, long, value_name = "FILE")]
    file: PathBuf,
    /// The file to write
    #[arg(short, long, value_name = "OUT")]
    output: PathBuf,
    /// Tokens in a window [default: the smaller of 512 and the model's limit]
    #[arg(short, long, value_name = "N")]
    context: Option<usize>,
    /// Maximum number of windows
    #[arg(long, value_name = "N")]
    chunks: Option<NonZeroUsize>,
    /// Threads [default: all cores]
    #[arg(long, value_name = "N")]
    threads: Option<NonZeroUsize>,
}

const USUAL_WINDOW: usize = 512;

pub(crate) fn run(args: &Args, context: &CliContext) -> anyhow::Result<()> {
    resolve::check(&args.model, context)?;
    let text = prompt::read_file(&args.file)?;
    if text.trim().is_empty() {
        let message = format!("{} contains no text", args.file.display());
        return Err(Hinted::new(message, "give a text of at least a few hundred words").into());
    }
    let model = resolve::find(Some(&args.model), context)?.open()?;
    let cores = || std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
    let options = ImportanceOptions {
        dataset: args.file.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned()),
        window: args.context.unwrap_or(model.config().n_context.min(USUAL_WINDOW)),
        max_windows: args.chunks.map(NonZeroUsize::get),
        n_threads: args.threads.map_or_else(cores, NonZeroUsize::get),
    };
    let began = Instant::now();
    let bar = Delayed::bar(1, "observing");
    let imatrix = importance(&model, &text, &options, |n_windows, done| {
        bar.set_len(n_windows as u64);
        bar.set(done as u64);
    });
    drop(bar);
    let imatrix = imatrix?;
    imatrix.write(&args.output).map_err(refrain::Error::from)?;
    if !context.quiet {
        let (n, took) = (thousands(imatrix.n_chunks() as usize), short_time(began.elapsed().as_secs_f64()));
        talk!(
            "{} from {n} windows of {} tokens, {took}",
            counted(imatrix.n_entries(), "tensor"),
            options.window
        );
    }
    Stdout::new().line(args.output.display())
}
