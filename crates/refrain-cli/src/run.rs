//! `refrain run`: one prompt, one reply.

use crate::cli::{Cli, CliContext};
use crate::fail::{Hinted, Interrupted};
use crate::grammar::{self, GrammarOpts};
use crate::opts::{DeviceOpts, LoopOpts, LoraOpts, SamplingOpts, Think};
use crate::out::{DIM, Stdout, talk, thousands};
use crate::prompt::Sources;
use crate::reply::{self, Show, ShownReply};
use crate::resolve;
use crate::speculate::SpeculateOpts;
use crate::{chat, out, profile, stats};
use clap::CommandFactory;
use clap::error::ErrorKind;
use refrain::{Finish, Generate, Message, Model, Role, Session};
use refrain_hub::HubError;
use std::io::IsTerminal;
use std::path::PathBuf;
use std::time::Instant;

/// Limit for raw text, which has no end of turn.
const RAW_MAX_TOKENS: usize = 256;
/// Longer prompts are not shown before their continuation.
const SHOWN_PROMPT_CHARS: usize = 400;

/// Reply to a prompt, or continue a text
///
/// The prompt is the argument, the file of -f and standard input, joined by line breaks. A model with a chat template
/// replies to it; a model without one, or --raw, continues the text. Only the reply goes to standard output. On a
/// terminal, `run MODEL` without a prompt opens a chat.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Examples:
  refrain run \"Once upon a time\"                        the built-in story model
  refrain run smollm2 \"Why is the sky blue?\" --stats
  refrain run ./model.gguf -f question.txt --temp 0
  git diff | refrain run qwen3 \"Write a commit message for this:\"
  refrain run --raw --temp 0 -n 48 smollm2 \"The capital of France is\"
  refrain run smollm2 \"Three colours, please\" --json | jq -r .text
  refrain run smollm2 \"Who is Ada?\" --json-schema person.json
  refrain run smollm2 \"Is water wet?\" --regex \"(yes|no)\"")]
pub(crate) struct Args {
    /// A path, a short name such as smollm2, or owner/repo[:QUANT]; the built-in story model by default
    #[arg(value_name = "MODEL")]
    first: Option<String>,
    /// The text to reply to
    #[arg(value_name = "PROMPT")]
    second: Option<String>,
    /// The model; the first argument is then the prompt
    #[arg(short, long, value_name = "MODEL")]
    model: Option<String>,
    /// The prompt; the first argument is then the model
    #[arg(short, long, value_name = "TEXT")]
    prompt: Option<String>,
    /// Read the prompt from a file; - is standard input
    #[arg(short, long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Continue the text without the chat template
    #[arg(long)]
    raw: bool,
    /// System prompt: instructions for the whole conversation
    #[arg(long, value_name = "TEXT", conflicts_with = "raw")]
    system: Option<String>,
    /// How to treat the thinking part of a reply
    #[arg(long, value_name = "HOW", default_value = "show", conflicts_with = "raw")]
    think: Think,
    /// Context size in tokens, prompt and reply together [default: the smaller of 4096 and the model's limit]
    #[arg(short, long, value_name = "N")]
    context: Option<usize>,
    /// Print a summary on standard error
    #[arg(long)]
    stats: bool,
    /// Print one JSON object: text, tokens, finish, timings and ledger
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    lora: LoraOpts,
    #[command(flatten)]
    sampling: SamplingOpts,
    #[command(flatten)]
    speculate: SpeculateOpts,
    #[command(flatten)]
    grammar: GrammarOpts,
    #[command(flatten)]
    repeat: LoopOpts,
    #[command(flatten)]
    device: DeviceOpts,
}

pub(crate) fn run(mut args: Args, context: &CliContext) -> anyhow::Result<()> {
    args.device.session(args.context, context)?;
    args.speculate.check(args.device.verify.is_some())?;
    let source = args.grammar.source()?;
    args.repeat.check(&args.device, args.speculate.is_on(), source.is_some())?;
    args.think = args.grammar.think(args.think)?;
    let (name, text) = args.model_and_prompt()?;
    if let Some(name) = &name {
        // A mistyped name is refused before waiting for standard input.
        resolve::check(name, context).map_err(|error| args.or_a_prompt(error))?;
    }
    let sources = Sources { text: text.as_deref(), file: args.file.as_deref(), quiet: context.quiet };
    let Some(prompt) = sources.read()? else {
        return args.without_prompt(name, context);
    };
    let began = Instant::now();
    let found = resolve::find(name.as_deref(), context)?;
    let model = args.lora.apply(found.open()?)?;
    let guesses = args.speculate.options(context)?;
    let grammar = grammar::compile(&model, source.as_ref())?;
    let mut session =
        args.device.start_guessing(&model, args.context, &guesses, args.repeat.mode(), context)?;
    let load = began.elapsed();
    say_context(&session, &args.device, context);
    let sampling = args.sampling.params(&model);
    let seed = sampling.seed;
    let mut out = Stdout::new();
    model.check_length(prompt.len(), session.context())?;
    let request = args.request(&model, &prompt, context)?;
    let mut options = args.sampling.generate(sampling, request.usual_max_tokens);
    options.grammar = grammar;
    let streams = (!args.json).then_some(&mut out);
    let reply = args.reply(&mut session, &request, &options, streams, context)?;
    // The partial reply of a device that was lost is worth keeping.
    if args.json && (reply.error.is_none() || !reply.tokens.is_empty()) {
        out.json(&stats::to_json(&session, &reply, &found.name, load, seed))?;
    }
    let reply = reply.into_result()?;
    if !args.json {
        out.line("")?;
    }
    if reply.summary.finish == Some(Finish::ContextFull) && !context.quiet {
        let raise = if session.context() < model.config().n_context { " (-c raises it)" } else { "" };
        talk!("the context of {} tokens is full, the reply ends here{raise}", thousands(session.context()));
    }
    if options.grammar.is_some() && !context.quiet {
        grammar::say_cut(reply.summary.finish);
    }
    profile::finish(&session, &args.device)?;
    if args.stats {
        stats::print(&session, &reply, load, seed);
    }
    match reply.summary.finish {
        Some(Finish::Cancelled) => Err(Interrupted.into()),
        _ => Ok(()),
    }
}

/// A tokenized prompt.
struct RunRequest {
    tokens: Vec<u32>,
    /// The rendered chat; `None` for raw text.
    rendered: Option<String>,
    usual_max_tokens: Option<usize>,
}

impl Args {
    /// Decides which argument is the model and which is the prompt.
    fn model_and_prompt(&self) -> anyhow::Result<(Option<String>, Option<String>)> {
        let mut given = [&self.first, &self.second].into_iter().flatten().cloned();
        let (model, prompt) = (self.model.clone(), self.prompt.clone());
        let (first, second) = (given.next(), given.next());
        let names = match (model, prompt, first, second) {
            (Some(_), Some(_), Some(_), _) => {
                return Err(conflict("--model and --prompt already give both"));
            }
            (Some(_), None, Some(_), Some(_)) => {
                return Err(conflict("with --model, the only argument is the prompt"));
            }
            (None, Some(_), Some(_), Some(_)) => {
                return Err(conflict("with --prompt, the only argument is the model"));
            }
            (Some(model), prompt, text, None) => (Some(model), prompt.or(text)),
            (None, Some(prompt), model, None) => (model, Some(prompt)),
            (None, None, Some(model), Some(text)) => (Some(model), Some(text)),
            (None, None, Some(one), None) if one.is_empty() => (None, Some(one)),
            (None, None, Some(one), None) if resolve::is_model(&one) => (Some(one), None),
            (None, None, Some(one), None) if resolve::has_white_space(&one) => (None, Some(one)),
            (None, None, Some(one), None) => (Some(one), None),
            (model, prompt, None, _) => (model, prompt),
        };
        Ok(names)
    }

    /// A single word that is not a model may have been meant as a prompt.
    fn or_a_prompt(&self, error: HubError) -> anyhow::Error {
        let is_single = self.model.is_none() && self.prompt.is_none() && self.second.is_none();
        match error {
            HubError::UnknownName { name, nearest: None } if is_single => {
                let hint = "if it is the prompt, pass it with -p; a model is a path, owner/repo, or a name from \
                            `refrain list --known`";
                Hinted::new(format!("no model is called `{name}`"), hint).into()
            }
            other => other.into(),
        }
    }

    /// Without a prompt, a named model on a terminal opens a chat.
    fn without_prompt(self, name: Option<String>, context: &CliContext) -> anyhow::Result<()> {
        let is_plain = !self.raw && !self.json && std::io::stdout().is_terminal();
        match name {
            Some(name) if is_plain => {
                let args = chat::Args {
                    model: Some(name),
                    system: self.system,
                    think: self.think,
                    context: self.context,
                    on_full: chat::OnFullArg::Shift,
                    stats: self.stats,
                    lora: self.lora,
                    sampling: self.sampling,
                    speculate: self.speculate,
                    grammar: self.grammar,
                    repeat: self.repeat,
                    device: self.device,
                };
                chat::run(&args, context)
            }
            _ => Err(Hinted::new("there is no prompt", "give one: refrain run \"Once upon a time\"").into()),
        }
    }

    fn request(&self, model: &Model, text: &str, context: &CliContext) -> anyhow::Result<RunRequest> {
        let is_raw = self.raw || model.chat_template().is_none();
        if !self.raw && is_raw {
            if !context.quiet {
                talk!("{} has no chat template: it continues the text", model.name());
            }
            if self.system.is_some() {
                let hint = "put the system prompt before the prompt, or use an instruction-tuned model";
                return Err(
                    Hinted::new(format!("{} has no chat template for --system", model.name()), hint).into()
                );
            }
        }
        if is_raw {
            let tokens = model.text_tokens(text)?;
            return Ok(RunRequest { tokens, rendered: None, usual_max_tokens: Some(RAW_MAX_TOKENS) });
        }
        let system = self.system.as_ref().map(|text| Message::new(Role::System, text));
        let messages: Vec<Message> = system.into_iter().chain([Message::new(Role::User, text)]).collect();
        let (rendered, tokens) = chat::render(model, &messages, self.think)?;
        Ok(RunRequest { tokens, rendered: Some(rendered), usual_max_tokens: None })
    }

    fn reply(
        &self,
        session: &mut Session,
        request: &RunRequest,
        options: &Generate,
        out: Option<&mut Stdout>,
        context: &CliContext,
    ) -> anyhow::Result<ShownReply> {
        let show = match &request.rendered {
            Some(rendered) => Show::chat(out, self.think, rendered),
            None => {
                if !self.raw && !context.quiet && out.as_ref().is_some_and(|out| out.is_terminal()) {
                    say_prompt(session.model(), &request.tokens);
                }
                Show::raw(out)
            }
        };
        reply::generate(session, &request.tokens, options, show, context)
    }
}

/// Shows the prompt on a terminal, dimmed, so that its continuation reads as one text.
fn say_prompt(model: &Model, tokens: &[u32]) {
    let text = model.tokenizer().decode(tokens).unwrap_or_default();
    if text.chars().count() <= SHOWN_PROMPT_CHARS {
        out::whisper(&text);
    }
}

/// Prints the device and the context size.
pub(crate) fn say_context(session: &Session, device: &DeviceOpts, context: &CliContext) {
    if context.quiet {
        return;
    }
    if context.verbose {
        device.explain(session);
    }
    let (holds, most) = (session.context(), session.model().config().n_context);
    let of = if holds < most { format!(" of {} (-c raises it)", thousands(most)) } else { String::new() };
    let (name, backend) = (session.model().name(), session.backend());
    talk!("{DIM}{name} on {backend}, context {}{of}{DIM:#}", thousands(holds));
}

fn conflict(because: &str) -> anyhow::Error {
    let message = format!("there is one argument too many: {because}");
    let mut command = Cli::command();
    // Building it puts the whole command into the usage line.
    command.build();
    let run = command.find_subcommand_mut("run");
    match run {
        Some(run) => run.error(ErrorKind::ArgumentConflict, message).into(),
        None => command.error(ErrorKind::ArgumentConflict, message).into(),
    }
}
