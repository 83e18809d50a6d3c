//! `refrain perplexity`: measuring how well a model predicts a text.

use crate::bars::Delayed;
use crate::cli::CliContext;
use crate::fail::Hinted;
use crate::opts::{DeviceOpts, LoraOpts};
use crate::out::{Stdout, counted, short_rate, short_time, talk, thousands};
use crate::{profile, prompt, resolve};
use serde_json::json;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Instant;

const USUAL_WINDOW: usize = 512;

/// Measure how well a model predicts a text
///
/// The text is split into windows of -c tokens, each with BOS if the model uses it. The first half of a window is context,
/// the second half is scored. Lower is better.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Examples:
  refrain perplexity smollm2 -f wiki.txt
  refrain perplexity ./model.gguf -f wiki.txt -c 1024 --chunks 20
  refrain perplexity stories -f - --json < story.txt | jq .perplexity")]
pub(crate) struct Args {
    /// A path, a short name such as smollm2, or owner/repo[:QUANT]
    #[arg(value_name = "MODEL")]
    model: String,
    /// The text; - is standard input
    #[arg(short, long, value_name = "FILE")]
    file: PathBuf,
    /// Tokens in a window [default: the smaller of 512 and the model's limit]
    #[arg(short, long, value_name = "N")]
    context: Option<usize>,
    /// Maximum number of windows to score
    #[arg(long, value_name = "N")]
    chunks: Option<NonZeroUsize>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    lora: LoraOpts,
    #[command(flatten)]
    device: DeviceOpts,
}

pub(crate) fn run(args: &Args, context: &CliContext) -> anyhow::Result<()> {
    // Refuse bad options before reading a long text.
    args.device.session(args.context, context)?;
    resolve::check(&args.model, context)?;
    let text = prompt::read_file(&args.file)?;
    if text.trim().is_empty() {
        let message = format!("{} contains no text to score", args.file.display());
        return Err(Hinted::new(message, "give a text of at least a few hundred words").into());
    }
    let model = args.lora.apply(resolve::find(Some(&args.model), context)?.open()?)?;
    let window = args.context.unwrap_or(model.config().n_context.min(USUAL_WINDOW));
    let mut session = args.device.start(&model, Some(window), context)?;
    if !context.quiet {
        talk!("{} on {}, windows of {} tokens", model.name(), session.backend(), thousands(window));
    }
    if context.verbose {
        args.device.explain(&session);
    }
    let began = Instant::now();
    // The number of windows is known after the first.
    let bar = Delayed::bar(args.chunks.map_or(1, |n| n.get() as u64), "scoring");
    let scored =
        session.perplexity(&text, window, args.chunks.map(NonZeroUsize::get), |n_windows, so_far| {
            bar.set_len(n_windows as u64);
            bar.set(so_far.n_windows as u64);
            bar.say(format!("perplexity {:.4}", so_far.perplexity));
        });
    drop(bar);
    let scored = scored?;
    profile::finish(&session, &args.device)?;
    let seconds = began.elapsed().as_secs_f64();
    let rate = (scored.n_windows * window) as f64 / seconds.max(f64::MIN_POSITIVE);
    let mut out = Stdout::new();
    if args.json {
        return out.json(&json!({
            "model": model.name(),
            "perplexity": scored.perplexity,
            "n_windows": scored.n_windows,
            "n_scored": scored.n_scored,
            "window": window,
            "seconds": seconds,
            "tokens_per_second": rate,
        }));
    }
    out.line(format_args!("perplexity {:.4}", scored.perplexity))?;
    if !context.quiet {
        let (windows, tokens) = (counted(scored.n_windows, "window"), counted(scored.n_scored, "token"));
        let took = short_time(seconds);
        talk!("{windows}, {tokens} scored, {} tok/s, {took}", short_rate(rate));
    }
    Ok(())
}
