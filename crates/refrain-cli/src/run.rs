//! `refrain run`: one prompt, one reply.

use crate::cli::{Cli, Context};
use crate::fail::{Hinted, Interrupted};
use crate::opts::{DeviceOpts, LoraOpts, SamplingOpts, Think};
use crate::out::{DIM, Out, talk, thousands};
use crate::prompt::Sources;
use crate::reply::{self, Reply, Show};
use crate::resolve;
use crate::{chat, out, profile, stats};
use clap::CommandFactory;
use clap::error::ErrorKind;
use refrain::{Finish, Generate, Message, Model, Session};
use refrain_hub::HubError;
use std::io::IsTerminal;
use std::path::PathBuf;
use std::time::Instant;

/// A raw text has no end of turn.
const RAW_MAX_TOKENS: usize = 256;
/// Longer prompts are not repeated in front of their continuation.
const SHOWN_PROMPT_CHARS: usize = 400;

/// Reply to a prompt, or continue a text
///
/// The prompt comes from the argument, from -f and from standard input; all that is there is joined. A model with a
/// chat template replies; one without, or with --raw, continues the text. Only the reply goes to standard output.
/// `run MODEL` alone opens a chat on a terminal.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Examples:
  refrain run \"Once upon a time\"                        the built-in story model
  refrain run smollm2 \"Why is the sky blue?\" --stats
  refrain run ./model.gguf -f question.txt --temp 0
  git diff | refrain run qwen3 \"Write a commit message for this:\"
  refrain run --raw --temp 0 -n 48 smollm2 \"The capital of France is\"
  refrain run smollm2 \"Three colours, please\" --json | jq -r .text")]
pub(crate) struct Args {
    /// A path, a short name such as smollm2, or owner/repo[:QUANT]; the built-in story model unless given
    #[arg(value_name = "MODEL")]
    first: Option<String>,
    /// What to reply to
    #[arg(value_name = "PROMPT")]
    second: Option<String>,
    /// The model, where the first argument should be the prompt
    #[arg(short, long, value_name = "MODEL")]
    model: Option<String>,
    /// The prompt, where the first argument should be the model
    #[arg(short, long, value_name = "TEXT")]
    prompt: Option<String>,
    /// Read the prompt from a file; - is standard input
    #[arg(short, long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Continue the text as it is, without the chat template
    #[arg(long)]
    raw: bool,
    /// What the model is told before the conversation
    #[arg(long, value_name = "TEXT", conflicts_with = "raw")]
    system: Option<String>,
    /// What to do with the part in which a model thinks
    #[arg(long, value_name = "HOW", default_value = "show", conflicts_with = "raw")]
    think: Think,
    /// Tokens to hold, prompt and reply together [default: the smaller of the model's and 4096]
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
    device: DeviceOpts,
}

pub(crate) fn run(args: Args, context: &Context) -> anyhow::Result<()> {
    args.device.session(args.context, context)?;
    args.sampling.check()?;
    let (name, text) = args.who_and_what()?;
    if let Some(name) = &name {
        // A mistyped name is told before standard input is waited for.
        resolve::check(name, context).map_err(|error| args.or_a_prompt(error))?;
    }
    let sources = Sources { text: text.as_deref(), file: args.file.as_deref(), quiet: context.quiet };
    let Some(prompt) = sources.read()? else {
        return args.without_prompt(name, context);
    };
    let began = Instant::now();
    let found = resolve::find(name.as_deref(), context)?;
    let model = args.lora.apply(found.open()?)?;
    let mut session = args.device.start(&model, args.context, context)?;
    let load = began.elapsed();
    say_context(&session, &args.device, context);
    let sampling = args.sampling.params(&model);
    let seed = sampling.seed;
    let mut out = Out::new();
    let request = args.request(&model, &prompt, context)?;
    let options = args.sampling.generate(sampling, request.usual_max_tokens);
    let streams = (!args.json).then_some(&mut out);
    let reply = args.reply(&mut session, &request, &options, streams, context)?;
    if args.json {
        out.json(&stats::to_json(&session, &reply, &found.name, load, seed))?;
    } else {
        out.line("")?;
    }
    if reply.summary.finish == Some(Finish::ContextFull) && !context.quiet {
        talk!(
            "the context of {} tokens is full, the reply ends here (-c raises it)",
            thousands(session.context())
        );
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

/// A prompt, ready for the model.
struct Request {
    tokens: Vec<u32>,
    /// The rendered chat; `None` for raw text.
    rendered: Option<String>,
    usual_max_tokens: Option<usize>,
}

impl Args {
    /// Tells the model's name and the prompt apart.
    fn who_and_what(&self) -> anyhow::Result<(Option<String>, Option<String>)> {
        let mut given = [&self.first, &self.second].into_iter().flatten().cloned();
        let (model, prompt) = (self.model.clone(), self.prompt.clone());
        let (first, second) = (given.next(), given.next());
        let told = match (model, prompt, first, second) {
            (Some(_), Some(_), Some(_), _) => {
                return Err(conflict("--model and --prompt leave no room for it"));
            }
            (Some(_), None, Some(_), Some(_)) => {
                return Err(conflict("with --model, one argument is left: the prompt"));
            }
            (None, Some(_), Some(_), Some(_)) => {
                return Err(conflict("with --prompt, one argument is left: the model"));
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
        Ok(told)
    }

    /// A lone word that is no model may have been meant as a prompt.
    fn or_a_prompt(&self, error: HubError) -> anyhow::Error {
        let is_lone = self.model.is_none() && self.prompt.is_none() && self.second.is_none();
        match error {
            HubError::UnknownName { name, nearest: None } if is_lone => {
                let hint = "if it is the prompt, pass it with -p; a model is a path, owner/repo, or a name of \
                            `refrain list --known`";
                Hinted::new(format!("no model is called `{name}`"), hint).into()
            }
            other => other.into(),
        }
    }

    /// On a terminal and without a prompt, a model that was named is chatted with.
    fn without_prompt(self, name: Option<String>, context: &Context) -> anyhow::Result<()> {
        let is_plain = !self.raw && !self.json && std::io::stdout().is_terminal();
        match name {
            Some(name) if is_plain => {
                let args = chat::Args {
                    model: Some(name),
                    system: self.system,
                    think: self.think,
                    context: self.context,
                    stats: self.stats,
                    lora: self.lora,
                    sampling: self.sampling,
                    device: self.device,
                };
                chat::run(&args, context)
            }
            _ => Err(Hinted::new("there is no prompt", "give one: refrain run \"Once upon a time\"").into()),
        }
    }

    fn request(&self, model: &Model, text: &str, context: &Context) -> anyhow::Result<Request> {
        let is_raw = self.raw || model.chat_template().is_none();
        if !self.raw && is_raw {
            if !context.quiet {
                talk!("{} has no chat template: it continues the text as it is", model.name());
            }
            if self.system.is_some() {
                let hint = "put the system text in front of the prompt, or use an instruction-tuned model";
                return Err(Hinted::new(format!("{} has no place for --system", model.name()), hint).into());
            }
        }
        if is_raw {
            let tokens = model.text_tokens(text)?;
            return Ok(Request { tokens, rendered: None, usual_max_tokens: Some(RAW_MAX_TOKENS) });
        }
        let system = self.system.as_ref().map(|text| Message::new("system", text));
        let messages: Vec<Message> = system.into_iter().chain([Message::new("user", text)]).collect();
        let (rendered, tokens) = chat::render(model, &messages, self.think)?;
        Ok(Request { tokens, rendered: Some(rendered), usual_max_tokens: None })
    }

    fn reply(
        &self,
        session: &mut Session,
        request: &Request,
        options: &Generate,
        out: Option<&mut Out>,
        context: &Context,
    ) -> anyhow::Result<Reply> {
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

/// A text reads better with its beginning: on a terminal it stands in front of the continuation, dimmed.
fn say_prompt(model: &Model, tokens: &[u32]) {
    let text = model.tokenizer().decode(tokens).unwrap_or_default();
    if text.chars().count() <= SHOWN_PROMPT_CHARS {
        out::whisper(&text);
    }
}

/// Says where the model runs and how much it can hold.
pub(crate) fn say_context(session: &Session, device: &DeviceOpts, context: &Context) {
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
    // Built, so that the usage line names the whole command.
    command.build();
    let run = command.find_subcommand_mut("run");
    match run {
        Some(run) => run.error(ErrorKind::ArgumentConflict, message).into(),
        None => command.error(ErrorKind::ArgumentConflict, message).into(),
    }
}
