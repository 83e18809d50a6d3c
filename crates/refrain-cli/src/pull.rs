//! `refrain pull`: download a model.

use crate::bars;
use crate::cli::CliContext;
use crate::interrupt::Listening;
use crate::out::{Stdout, counted, talk};
use crate::resolve;
use indicatif::ProgressBar;
use refrain_hub::{ByteSize, LocalModel, ModelName, Progress, ProgressEvent};
use std::sync::atomic::Ordering;

/// Download a model into the local store
///
/// An interrupted download is resumed by the next one. Models from the hub are stored in the cache of the Hugging Face
/// tools; HF_ENDPOINT, HF_TOKEN and HF_HOME are respected. Checksums are verified.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Examples:
  refrain pull smollm2
  refrain pull gemma3:270m-base
  refrain pull Qwen/Qwen3-0.6B-GGUF:Q8_0
  refrain pull Qwen/Qwen3-0.6B                the safetensors folder
  HF_TOKEN=... refrain pull google/gemma-3-1b-it")]
pub(crate) struct Args {
    /// A short name, owner/repo, or owner/repo:QUANT
    #[arg(value_name = "NAME")]
    name: String,
}

pub(crate) fn run(args: &Args, context: &CliContext) -> anyhow::Result<()> {
    if resolve::is_builtin(&args.name) {
        talk!("{} is built in: there is nothing to pull", args.name);
        return Ok(());
    }
    let name = resolve::parse(&args.name, context)?;
    let model = with_bars(&name, context)?;
    if !context.quiet {
        let licence = model.licence.as_ref().map_or_else(String::new, |l| format!(", licence {l}"));
        talk!("{} is in the local store: {}{licence}", model.name, ByteSize(model.bytes));
    }
    Stdout::new().line(model.path.display())
}

/// Pulls a model and shows the progress.
pub(crate) fn with_bars(name: &ModelName, context: &CliContext) -> anyhow::Result<LocalModel> {
    let mut watcher = Watcher { bar: None, is_quiet: context.quiet, listening: context.interrupt.listen() };
    let pulled = context.store.pull(name, &mut watcher);
    watcher.end_bar();
    Ok(pulled?)
}

struct Watcher<'a> {
    bar: Option<ProgressBar>,
    is_quiet: bool,
    listening: Listening<'a>,
}

impl Watcher<'_> {
    fn say(&self, line: std::fmt::Arguments<'_>) {
        if self.is_quiet {
            return;
        }
        match &self.bar {
            Some(bar) => bar.suspend(|| talk!("{line}")),
            None => talk!("{line}"),
        }
    }

    fn end_bar(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }
}

impl Progress for Watcher<'_> {
    fn on(&mut self, event: ProgressEvent<'_>) {
        match event {
            ProgressEvent::Plan { name, from, n_files, bytes, licence } => {
                match n_files {
                    0 => self.say(format_args!("{name}: already complete")),
                    _ => self.say(format_args!(
                        "{name}: {}, {} from {from}",
                        counted(n_files, "file"),
                        ByteSize(bytes)
                    )),
                }
                match licence {
                    Some(licence) => self.say(format_args!("{name}: licence {licence}")),
                    None => self.say(format_args!("{name}: the source names no licence")),
                }
            }
            ProgressEvent::Start { file, done, total } => {
                self.end_bar();
                if done > 0 {
                    self.say(format_args!("{file}: resuming at {}", ByteSize(done)));
                }
                if !self.is_quiet {
                    self.bar = Some(bars::bytes(total, done, file));
                }
            }
            ProgressEvent::At { done } => {
                if let Some(bar) = &self.bar {
                    bar.set_position(done);
                }
            }
            ProgressEvent::Done { file } => {
                self.end_bar();
                self.say(format_args!("{file}: complete, checksum verified"));
            }
            ProgressEvent::Waiting { file } => {
                self.say(format_args!("{file}: waiting for another process that is pulling it"))
            }
            ProgressEvent::Retry { file, attempt, limit, after, because } => {
                self.say(format_args!("{file}: {because}; attempt {attempt} of {limit} in {after:.0?}"));
            }
            ProgressEvent::Restart { file, because } => {
                self.say(format_args!("{file}: {because}; downloading it again"))
            }
            ProgressEvent::Fallback { from, to, because } => {
                self.end_bar();
                self.say(format_args!("the {from} failed ({because}); trying {to}"));
            }
            // Events of later versions need no message.
            _ => {}
        }
    }

    fn cancelled(&self) -> bool {
        self.listening.flag().load(Ordering::Relaxed)
    }
}
