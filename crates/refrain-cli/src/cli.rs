//! The command line: commands, global flags, logging.

use crate::interrupt::Interrupt;
use crate::serve::LogFormat;
use crate::{
    batch, bench, chat, compare, completions, convert, doctor, embed, finetune, imatrix, inspect, list,
    merge, perplexity, plan, pull, quantize, reference, rm, run, serve, show, tokenize, train, trial, worker,
};
use clap::{Args, Parser, Subcommand};
use refrain_hub::{Env, Store};
use tracing_subscriber::filter::Targets;
use tracing_subscriber::prelude::*;

/// Runs language models on this machine, from one binary.
///
/// Give it a GGUF file, a Hugging Face folder or the name of a model. Without a model it uses a small built-in one: one
/// continues simple stories, another one chats.
#[derive(Parser, Debug)]
#[command(
    name = "refrain",
    version,
    disable_help_subcommand = true,
    subcommand_required = true,
    arg_required_else_help = true,
    args_override_self = true,
    after_help = "\
Examples:
  refrain run \"Once upon a time\"                 a story by the built-in model
  refrain run smollm2 \"Why is the sky blue?\"     pulls the model the first time
  refrain chat                                   a chat with the built-in model
  refrain chat ./model.gguf                      a chat with a model of your own
  refrain serve smollm2                          OpenAI's API and a web page
  refrain train --new llama-1m --data story.txt  a model of your own, from scratch
  refrain COMMAND --help                         more about a command, with examples"
)]
pub(crate) struct Cli {
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    global: Global,
}

/// Global flags.
#[derive(Args, Debug)]
struct Global {
    /// Print more on standard error; twice for the log
    #[arg(short, long, global = true, action = clap::ArgAction::Count, help_heading = "Everywhere")]
    verbose: u8,
    /// Print only errors on standard error
    #[arg(short, long, global = true, conflicts_with = "verbose", help_heading = "Everywhere")]
    quiet: bool,
    /// Use only local models; never access the network
    #[arg(long, global = true, help_heading = "Everywhere")]
    offline: bool,
}

#[derive(Subcommand, Debug)]
enum Command {
    Run(run::Args),
    Chat(chat::Args),
    Serve(Box<serve::Args>),
    Batch(batch::Args),
    Embed(embed::Args),
    Perplexity(perplexity::Args),
    Inspect(inspect::Args),
    Tokenize(tokenize::Args),
    Plan(plan::Args),
    Pull(pull::Args),
    List(list::Args),
    Rm(rm::Args),
    Train(Box<train::Args>),
    Finetune(Box<finetune::Args>),
    Merge(merge::Args),
    Convert(convert::Args),
    Quantize(quantize::Args),
    Imatrix(imatrix::Args),
    Compare(compare::Args),
    Show(show::Args),
    Bench(bench::Args),
    Doctor(doctor::Args),
    Completions(completions::Args),
    /// Show the help of a command
    #[command(hide = true)]
    Help(HelpArgs),
    #[command(name = "__reference", hide = true)]
    Reference(reference::Args),
    #[command(name = trial::COMMAND, hide = true)]
    TryCapture(trial::Args),
    #[command(name = worker::COMMAND, hide = true)]
    Worker(Box<worker::Args>),
}

/// `refrain help`, as an alternative to `--help`.
#[derive(Args, Debug)]
struct HelpArgs {
    /// The command
    command: Option<String>,
}

impl HelpArgs {
    fn print(&self) -> anyhow::Result<()> {
        let args =
            ["refrain".to_owned()].into_iter().chain(self.command.clone()).chain(["--help".to_owned()]);
        // The command's own help, or the error about one that does not exist.
        match crate::usage::parse(args.map(Into::into)) {
            Err(help) => Err(help.into()),
            Ok(_) => Ok(()),
        }
    }
}

/// The environment of a command.
pub(crate) struct CliContext {
    /// The local model store.
    pub(crate) store: Store,
    /// Print more.
    pub(crate) verbose: bool,
    /// Print only errors.
    pub(crate) quiet: bool,
    /// Ctrl-C.
    pub(crate) interrupt: Interrupt,
}

impl Cli {
    pub(crate) fn run(self) -> anyhow::Result<()> {
        let mut env = Env::read();
        env.offline |= self.global.offline;
        let usual_log = match (&self.command, self.global.verbose) {
            (_, 2..) => "debug",
            _ if self.global.quiet => "error",
            // The doctor provokes failures on purpose and reports them itself.
            (Command::Doctor(_), _) => "off",
            // Replaced workers are for whoever reads a server's log, single requests for who evaluates it.
            (Command::Serve(args), _) if args.log_format() == LogFormat::Json => "info",
            (Command::Serve(_), _) => "info,refrain_server::requests=warn",
            _ => "warn",
        };
        let format = match &self.command {
            Command::Serve(args) => args.log_format(),
            Command::Worker(args) => args.log_format(),
            _ => LogFormat::Text,
        };
        log_to_stderr(env.log.as_deref().unwrap_or(usual_log), self.global.verbose > 1, format);
        tracing::debug!(
            version = env!("CARGO_PKG_VERSION"),
            home = %env.refrain_home.display(),
            offline = env.offline,
            "running {:?}",
            std::env::args().skip(1).collect::<Vec<_>>(),
        );
        if self.global.quiet {
            crate::bars::silence();
        }
        let context = CliContext {
            store: Store::open(env),
            verbose: self.global.verbose > 0,
            quiet: self.global.quiet,
            interrupt: Interrupt::install(),
        };
        match self.command {
            Command::Run(args) => run::run(args, &context),
            Command::Chat(args) => chat::run(&args, &context),
            Command::Serve(args) => serve::run(&args, &context),
            Command::Batch(args) => batch::run(&args, &context),
            Command::Embed(args) => embed::run(&args, &context),
            Command::Perplexity(args) => perplexity::run(&args, &context),
            Command::Inspect(args) => inspect::run(&args, &context),
            Command::Tokenize(args) => tokenize::run(&args, &context),
            Command::Plan(args) => plan::run(&args, &context),
            Command::Pull(args) => pull::run(&args, &context),
            Command::List(args) => list::run(&args, &context),
            Command::Rm(args) => rm::run(&args, &context),
            Command::Train(args) => train::run(*args, &context),
            Command::Finetune(args) => finetune::run(&args, &context),
            Command::Merge(args) => merge::run(&args, &context),
            Command::Convert(args) => convert::run(&args, &context),
            Command::Imatrix(args) => imatrix::run(&args, &context),
            Command::Compare(args) => compare::run(&args, &context),
            Command::Show(args) => show::run(&args, &context),
            Command::Quantize(args) => quantize::run(&args, &context),
            Command::Bench(args) => bench::run(&args, &context),
            Command::Doctor(args) => doctor::run(&args, &context),
            Command::Completions(args) => completions::run(&args),
            Command::Help(args) => args.print(),
            Command::Reference(args) => reference::run(&args),
            Command::TryCapture(args) => trial::run(&args),
            Command::Worker(args) => worker::run(&args, &context),
        }
    }
}

/// Starts the log. Module names appear only in the verbose log.
fn log_to_stderr(filter: &str, with_modules: bool, format: LogFormat) {
    let lines = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
    let lines = match format {
        LogFormat::Text => {
            lines.with_ansi(crate::out::stderr_has_colour()).without_time().with_target(with_modules).boxed()
        }
        LogFormat::Json => {
            lines.json().flatten_event(true).with_current_span(false).with_span_list(false).boxed()
        }
    };
    // A filter of the layer lets other crates skip disabled levels. A subscriber that is already set belongs to a test.
    let _ = tracing_subscriber::registry().with(lines.with_filter(log_filter(filter))).try_init();
}

/// Parses a log filter and ignores invalid parts, because a typo in an environment variable must not end a command. If
/// no part is valid, only errors are logged.
fn log_filter(text: &str) -> Targets {
    let parts = text.split(',').map(str::trim);
    let readable: Vec<&str> = parts.filter(|part| part.parse::<Targets>().is_ok()).collect();
    let readable = if readable.is_empty() { "error".to_owned() } else { readable.join(",") };
    readable.parse().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use tracing_subscriber::filter::LevelFilter;

    #[test]
    fn a_log_filter_keeps_its_valid_parts() {
        assert_eq!(log_filter("debug").default_level(), Some(LevelFilter::DEBUG));
        let mixed = log_filter("refrain_hub=trace, refrain_cuda=loud ,warn");
        assert_eq!(mixed.default_level(), Some(LevelFilter::WARN));
        assert!(mixed.would_enable("refrain_hub::http", &tracing::Level::TRACE));
        assert!(!mixed.would_enable("refrain_cuda", &tracing::Level::INFO));
        assert_eq!(log_filter("a=b=c").default_level(), Some(LevelFilter::ERROR));
    }
}
