//! `refrain chat`: a conversation.

mod input;
mod settings;

use crate::cli::CliContext;
use crate::fail::Hinted;
use crate::grammar::{self, GrammarOpts};
use crate::opts::{DeviceOpts, LoopOpts, LoraOpts, SamplingOpts, Think};
use crate::out::{BOLD, DIM, Stdout, counted, talk};
use crate::reply::{self, Show};
use crate::run::say_context;
use crate::speculate::SpeculateOpts;
use crate::{fail, profile, resolve, stats};
use clap::ValueEnum;
use input::{ChatCommand, ChatInput, ChatLine};
use refrain::{Builtin, Chat, ChatOptions, Finish, Grammar, Message, Model, OnFull, RenderOptions, Role};
use settings::Settings;
use std::path::Path;
use std::time::{Duration, Instant};

/// Chat with a model
///
/// Lines are edited as in a shell, with a history and tab completion. A line that ends in a backslash continues on the
/// next one; three double quotes start and end a text of several lines. Ctrl-C stops the reply, Ctrl-D ends the chat.
///
/// The conversation stays in the KV cache, so each turn evaluates only new tokens. When the context is full, the oldest
/// turns are dropped and the rest is evaluated again.
///
/// Without a model, the built-in one chats: it is small, uses simple words and is often wrong.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
In the chat:
  /reset             forget the conversation
  /system TEXT       start a new conversation with this system prompt
  /set NAME VALUE    change a setting, such as temp or max_tokens; /set alone lists them
  /save FILE         write the conversation as JSON
  /load FILE         continue a saved conversation
  /help              list these commands
  /exit              leave

Examples:
  refrain chat                        the built-in model
  refrain chat smollm2
  refrain chat qwen3 --think hide
  refrain chat ./model.gguf --system \"You answer in one sentence.\" --temp 0.3
  printf 'Hello!\\nWhat did I say?\\n' | refrain chat smollm2")]
pub(crate) struct Args {
    /// A path, a short name such as smollm2, or owner/repo[:QUANT]; the built-in chat model by default
    #[arg(value_name = "MODEL")]
    pub(crate) model: Option<String>,
    /// System prompt: instructions for the whole conversation
    #[arg(long, value_name = "TEXT")]
    pub(crate) system: Option<String>,
    /// How to treat the thinking part of a reply
    #[arg(long, value_name = "HOW", default_value = "show")]
    pub(crate) think: Think,
    /// Context size in tokens, for the whole conversation [default: the smaller of 4096 and the model's limit]
    #[arg(short, long, value_name = "N")]
    pub(crate) context: Option<usize>,
    /// What to do when the context is full
    #[arg(long, value_name = "HOW", default_value = "shift")]
    pub(crate) on_full: OnFullArg,
    /// Print a summary on standard error after each reply
    #[arg(long)]
    pub(crate) stats: bool,
    #[command(flatten)]
    pub(crate) lora: LoraOpts,
    #[command(flatten)]
    pub(crate) sampling: SamplingOpts,
    #[command(flatten)]
    pub(crate) speculate: SpeculateOpts,
    #[command(flatten)]
    pub(crate) grammar: GrammarOpts,
    #[command(flatten)]
    pub(crate) repeat: LoopOpts,
    #[command(flatten)]
    pub(crate) device: DeviceOpts,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum OnFullArg {
    /// Drop the oldest turns, keep the system prompt, and evaluate the rest again
    Shift,
    /// End the reply and refuse further messages
    Stop,
}

pub(crate) fn run(args: &Args, context: &CliContext) -> anyhow::Result<()> {
    args.device.session(args.context, context)?;
    args.speculate.check(args.device.verify.is_some())?;
    let (source, think) = (args.grammar.source()?, args.grammar.think(args.think)?);
    args.repeat.check(&args.device, args.speculate.is_on(), source.is_some())?;
    let began = Instant::now();
    let found = resolve::find_or(args.model.as_deref(), Builtin::Chat, context)?;
    let model = args.lora.apply(found.open()?)?;
    if model.chat_template().is_none() {
        let name = model.name().into();
        return Err(match model.config().arch.is_encoder() {
            true => refrain::Error::Encoder { model: name }.into(),
            false => refrain::Error::NoChatTemplate { model: name }.into(),
        });
    }
    let guesses = args.speculate.options(context)?;
    let grammar = grammar::compile(&model, source.as_ref())?;
    let session = args.device.start_guessing(&model, args.context, &guesses, args.repeat.mode(), context)?;
    let load = began.elapsed();
    say_context(&session, &args.device, context);
    if args.model.is_none() && !context.quiet {
        talk!(
            "{DIM}the built-in model is small and often wrong; `refrain chat smollm2` pulls a better one{DIM:#}"
        );
    }
    let on_full = match args.on_full {
        OnFullArg::Shift => OnFull::Shift,
        OnFullArg::Stop => OnFull::Stop,
    };
    let chat = Chat::new(session, ChatOptions { render: render_options(think), on_full })?;
    let settings = Settings::new(args.sampling.params(&model), args.sampling.max_tokens());
    let mut conversation = Conversation { args, context, chat, settings, grammar, load, out: Stdout::new() };
    conversation.chat.restart(args.system.as_deref());
    let mut input = ChatInput::open(&context.store.env().refrain_home)?;
    if input.is_terminal() && !context.quiet {
        talk!("{DIM}/help lists the commands{DIM:#}");
    }
    let ended = conversation.run(&mut input);
    // The error that ended the chat matters more than a profile that cannot be written.
    ended.and(profile::finish(conversation.chat.session(), &args.device))
}

fn render_options(think: Think) -> RenderOptions {
    RenderOptions { thinking: think.requested(), ..RenderOptions::default() }
}

/// Renders the prompt of a conversation, as text and as tokens.
pub(crate) fn render(
    model: &Model,
    messages: &[Message],
    think: Think,
) -> anyhow::Result<(String, Vec<u32>)> {
    let rendered = model.render(messages, &render_options(think))?;
    let tokens = model.tokenizer().encode_chat(&rendered).map_err(refrain::Error::from)?;
    Ok((rendered, tokens))
}

struct Conversation<'a> {
    args: &'a Args,
    context: &'a CliContext,
    chat: Chat,
    settings: Settings,
    grammar: Option<Grammar>,
    load: Duration,
    out: Stdout,
}

impl Conversation<'_> {
    fn run(&mut self, input: &mut ChatInput) -> anyhow::Result<()> {
        loop {
            match input.next()? {
                ChatLine::Nothing => {}
                ChatLine::End | ChatLine::Command(ChatCommand::Exit) => return Ok(()),
                ChatLine::Command(command) => {
                    // A command that fails does not end the conversation.
                    if let Err(error) = self.obey(command, input) {
                        fail::print(&error);
                    }
                }
                ChatLine::Text(text) => self.answer(text, input.is_terminal())?,
            }
        }
    }

    fn obey(&mut self, command: ChatCommand, input: &mut ChatInput) -> anyhow::Result<()> {
        match command {
            ChatCommand::Reset => {
                let first = self.chat.messages().first();
                let system = first.filter(|m| Role::of(m) == Some(Role::System)).map(|m| m.content.clone());
                self.chat.restart(system.as_deref());
                talk!("the conversation is forgotten");
            }
            ChatCommand::System(text) => {
                self.chat.restart((!text.is_empty()).then_some(text.as_str()));
                talk!("a new conversation starts");
            }
            ChatCommand::Set(change) => match self.settings.set(&change, self.chat.session().model())? {
                Some(changed) => talk!("{changed}"),
                None => talk!("{}", self.settings),
            },
            ChatCommand::Save(path) => self.save(Path::new(&path), input)?,
            ChatCommand::Load(path) => self.load(Path::new(&path))?,
            ChatCommand::Help => talk!("{}", input::HELP),
            ChatCommand::NeedsFile(command) => {
                return Err(Hinted::new(
                    format!("{command} needs a file name"),
                    format!("{command} talk.json"),
                )
                .into());
            }
            ChatCommand::Unknown { name, nearest } => {
                let nearest = nearest.map_or_else(String::new, |n| format!(" (did you mean {n}?)"));
                talk!("there is no command {name}{nearest}; /help lists them");
            }
            ChatCommand::Exit => {}
        }
        Ok(())
    }

    fn save(&self, path: &Path, input: &mut ChatInput) -> anyhow::Result<()> {
        if path.exists() && !input.confirm(&format!("{} exists. Overwrite it?", path.display()))? {
            if input.is_terminal() {
                talk!("{} was not changed", path.display());
                return Ok(());
            }
            let hint = "save under another name, or remove the file first";
            return Err(Hinted::new(format!("{} exists and was not changed", path.display()), hint).into());
        }
        let messages = self.chat.messages();
        let text = serde_json::to_string_pretty(messages)? + "\n";
        std::fs::write(path, text).map_err(|error| Hinted::io("write", path, error))?;
        talk!("{} written to {}", counted(messages.len(), "message"), path.display());
        Ok(())
    }

    fn load(&mut self, path: &Path) -> anyhow::Result<()> {
        let text = std::fs::read_to_string(path).map_err(|error| Hinted::io("read", path, error))?;
        let messages: Vec<Message> = serde_json::from_str(&text).map_err(|error| {
            let message = format!("{} is not a saved conversation: {error}", path.display());
            Hinted::new(
                message,
                "load a file that /save wrote: a JSON list of messages with role and content",
            )
        })?;
        let n = messages.len();
        self.chat.load(messages);
        talk!("{} loaded from {}", counted(n, "message"), path.display());
        Ok(())
    }

    /// One turn. An error of the model ends a chat on a pipe; on a terminal the person may go on, unless the device is lost.
    fn answer(&mut self, text: String, is_terminal: bool) -> anyhow::Result<()> {
        match self.turn(text) {
            Err(error)
                if is_terminal
                    && (error.is::<refrain::Error>() || error.is::<Hinted>())
                    && !fail::is_of_a_lost_device(&error) =>
            {
                fail::print(&error);
                Ok(())
            }
            other => other,
        }
    }

    fn turn(&mut self, text: String) -> anyhow::Result<()> {
        self.chat.session_mut().reset_ledger();
        let n_dropped = self.chat.n_dropped();
        let listening = self.context.interrupt.listen();
        // Each turn draws other random numbers, and the same conversation the same ones, because positions increase.
        let mut options = self.args.sampling.generate(self.settings.sampling.clone(), None);
        options.grammar.clone_from(&self.grammar);
        (options.max_tokens, options.cancel) = (self.settings.max_tokens, Some(listening.flag()));
        let has_turns = self.chat.messages().iter().any(|m| Role::of(m) != Some(Role::System));
        let raise = raise_hint(self.chat.session());
        let reply = self.chat.send(text, &options).map_err(|error| match error {
            refrain::Error::PromptTooLong { .. } if has_turns && self.args.on_full == OnFullArg::Stop => {
                let hint = format!(
                    "/reset starts anew, and --on-full shift drops the oldest messages instead{raise}"
                );
                anyhow::Error::new(Hinted::new(error.to_string(), hint))
            }
            error => error.into(),
        })?;
        let show = Show::chat(Some(&mut self.out), self.args.think, reply.prompt());
        let reply = reply::collect(reply, show);
        drop(listening);
        let n_dropped = self.chat.n_dropped().saturating_sub(n_dropped);
        let reply = reply.into_result()?;
        self.out.line("")?;
        if n_dropped > 0 && !self.context.quiet {
            let (n, holds) = (counted(n_dropped, "message"), self.chat.session().context());
            let raise = raise_hint(self.chat.session());
            talk!("{DIM}the context of {holds} tokens was full: dropped the oldest {n}{raise}{DIM:#}");
        }
        match reply.summary.finish {
            Some(Finish::ContextFull) => {
                let (holds, raise) = (self.chat.session().context(), raise_hint(self.chat.session()));
                talk!("{BOLD}the context of {holds} tokens is full{BOLD:#}: /reset starts anew{raise}");
            }
            Some(Finish::Cancelled) => talk!("{DIM}stopped; Ctrl-D or /exit leaves{DIM:#}"),
            _ => {}
        }
        if self.grammar.is_some() {
            grammar::say_cut(reply.summary.finish);
        }
        if self.args.stats {
            stats::print(self.chat.session(), &reply, self.load, self.settings.sampling.seed);
        }
        Ok(())
    }
}

/// The flag for a larger context, where the model takes one.
fn raise_hint(session: &refrain::Session) -> &'static str {
    if session.context() < session.model().config().n_context { ", -c raises it" } else { "" }
}
