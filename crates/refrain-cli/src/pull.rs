//! `refrain pull`: fetch a model.

use crate::bars;
use crate::cli::Context;
use crate::interrupt::Listening;
use crate::out::{Out, counted, talk};
use crate::resolve;
use indicatif::ProgressBar;
use refrain_hub::{Bytes, Event, LocalModel, ModelName, Progress};
use std::sync::atomic::Ordering;

/// Fetch a model into the local store
///
/// A pull that was interrupted is continued by the next one. Models of the hub lie in the cache that the Hugging Face
/// tools use; HF_ENDPOINT, HF_TOKEN and HF_HOME are honoured. Checksums are checked.
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

pub(crate) fn run(args: &Args, context: &Context) -> anyhow::Result<()> {
    if resolve::is_builtin(&args.name) {
        talk!("{} is built into the program", args.name);
        return Ok(());
    }
    let name = resolve::parse(&args.name, context)?;
    let model = with_bars(&name, context)?;
    if !context.quiet {
        let licence = model.licence.as_ref().map_or_else(String::new, |l| format!(", licence {l}"));
        talk!("{} is here: {}{licence}", model.name, Bytes(model.bytes));
    }
    Out::new().line(model.path.display())
}

/// Pulls a model and shows how far it is.
pub(crate) fn with_bars(name: &ModelName, context: &Context) -> anyhow::Result<LocalModel> {
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
    fn on(&mut self, event: Event<'_>) {
        match event {
            Event::Plan { name, from, n_files, bytes, licence } => {
                match n_files {
                    0 => self.say(format_args!("{name}: all of it is here already")),
                    _ => self.say(format_args!(
                        "{name}: {}, {} from {from}",
                        counted(n_files, "file"),
                        Bytes(bytes)
                    )),
                }
                match licence {
                    Some(licence) => self.say(format_args!("{name} comes under the licence {licence}")),
                    None => self.say(format_args!("{name}: its source names no licence")),
                }
            }
            Event::Start { file, done, total } => {
                self.end_bar();
                if done > 0 {
                    self.say(format_args!("{file}: continuing at {}", Bytes(done)));
                }
                if !self.is_quiet {
                    self.bar = Some(bars::bytes(total, done, file));
                }
            }
            Event::At { done } => {
                if let Some(bar) = &self.bar {
                    bar.set_position(done);
                }
            }
            Event::Done { file } => {
                self.end_bar();
                self.say(format_args!("{file}: complete, checksum right"));
            }
            Event::Waiting { file } => {
                self.say(format_args!("{file}: another process is pulling it; waiting"))
            }
            Event::Retry { file, attempt, limit, after, because } => {
                self.say(format_args!("{file}: {because}; attempt {attempt} of {limit} in {after:.0?}"));
            }
            Event::Restart { file, because } => self.say(format_args!("{file}: {because}; fetching it anew")),
            Event::Fallback { from, to, because } => {
                self.end_bar();
                self.say(format_args!("the {from} could not help ({because}); trying {to}"));
            }
            // Events of later versions are progress too, but not worth a word yet.
            _ => {}
        }
    }

    fn cancelled(&self) -> bool {
        self.listening.flag().load(Ordering::Relaxed)
    }
}
