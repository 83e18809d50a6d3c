//! `refrain chat`: a conversation.

mod input;

use crate::cli::Context;
use crate::fail::Hinted;
use crate::opts::{DeviceOpts, LoraOpts, SamplingOpts, Think};
use crate::out::{BOLD, DIM, Out, counted, talk};
use crate::reply::{self, Show};
use crate::run::say_context;
use crate::{fail, profile, resolve, stats};
use input::{Command, Input, Line};
use refrain::{Builtin, Finish, Message, Model, RenderOptions, SamplingParams, Session};
use std::path::Path;
use std::time::{Duration, Instant};

/// Chat with a model
///
/// Lines are edited as in a shell, with a history. A line that ends in a backslash goes on in the next; three double
/// quotes begin and end a text of several lines. Ctrl-C stops the reply, Ctrl-D ends the chat.
///
/// What the model has read stays in its cache: each turn costs only what is new.
///
/// Without a model, the built-in one chats: it is small, uses simple words and is often wrong.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
In the chat:
  /reset          forget the conversation
  /system TEXT    begin anew with this system text
  /save FILE      write the conversation as JSON
  /help           list these
  /exit           leave

Examples:
  refrain chat                        the built-in model
  refrain chat smollm2
  refrain chat qwen3 --think hide
  refrain chat ./model.gguf --system \"You answer in one sentence.\" --temp 0.3
  printf 'Hello!\\nWhat did I say?\\n' | refrain chat smollm2")]
pub(crate) struct Args {
    /// A path, a short name such as smollm2, or owner/repo[:QUANT]; the built-in chat model unless given
    #[arg(value_name = "MODEL")]
    pub(crate) model: Option<String>,
    /// What the model is told before the conversation
    #[arg(long, value_name = "TEXT")]
    pub(crate) system: Option<String>,
    /// What to do with the part in which a model thinks
    #[arg(long, value_name = "HOW", default_value = "show")]
    pub(crate) think: Think,
    /// Tokens to hold, the whole conversation together [default: the smaller of the model's and 4096]
    #[arg(short, long, value_name = "N")]
    pub(crate) context: Option<usize>,
    /// Print a summary on standard error after each reply
    #[arg(long)]
    pub(crate) stats: bool,
    #[command(flatten)]
    pub(crate) lora: LoraOpts,
    #[command(flatten)]
    pub(crate) sampling: SamplingOpts,
    #[command(flatten)]
    pub(crate) device: DeviceOpts,
}

pub(crate) fn run(args: &Args, context: &Context) -> anyhow::Result<()> {
    args.device.session(args.context, context)?;
    args.sampling.check()?;
    let began = Instant::now();
    let found = resolve::find_or(args.model.as_deref(), Builtin::Chat, context)?;
    let model = args.lora.apply(found.open()?)?;
    if model.chat_template().is_none() {
        return Err(refrain::Error::NoChatTemplate { model: model.name().into() }.into());
    }
    let session = args.device.start(&model, args.context, context)?;
    let load = began.elapsed();
    say_context(&session, &args.device, context);
    if args.model.is_none() && !context.quiet {
        talk!(
            "{DIM}this built-in model is small and simple, and often wrong; refrain chat smollm2 pulls a better one{DIM:#}"
        );
    }
    let sampling = args.sampling.params(&model);
    let mut chat =
        Chat { args, context, session, model, sampling, load, messages: Vec::new(), out: Out::new() };
    chat.begin(args.system.as_deref());
    let mut input = Input::open(&context.store.env().refrain_home)?;
    if input.is_terminal() && !context.quiet {
        talk!("{DIM}/help lists what can be done besides talking{DIM:#}");
    }
    let ended = chat.converse(&mut input);
    // What ended the chat is graver than a page that cannot be written.
    ended.and(profile::finish(&chat.session, &args.device))
}

/// The prompt of a conversation, as text and as tokens.
pub(crate) fn render(
    model: &Model,
    messages: &[Message],
    think: Think,
) -> anyhow::Result<(String, Vec<u32>)> {
    let options =
        RenderOptions { add_generation_prompt: true, thinking: think.asked(), ..RenderOptions::default() };
    let rendered = model.render(messages, &options)?;
    let tokens = model.tokenizer().encode_chat(&rendered).map_err(refrain::Error::from)?;
    Ok((rendered, tokens))
}

struct Chat<'a> {
    args: &'a Args,
    context: &'a Context,
    session: Session,
    model: Model,
    sampling: SamplingParams,
    load: Duration,
    messages: Vec<Message>,
    out: Out,
}

impl Chat<'_> {
    fn converse(&mut self, input: &mut Input) -> anyhow::Result<()> {
        loop {
            match input.next()? {
                Line::Nothing => {}
                Line::End | Line::Command(Command::Exit) => return Ok(()),
                Line::Command(command) => {
                    // A command that failed is no reason to lose the conversation.
                    if let Err(error) = self.obey(command) {
                        fail::print(&error);
                    }
                }
                Line::Text(text) => self.answer(text, input.is_terminal())?,
            }
        }
    }

    fn begin(&mut self, system: Option<&str>) {
        self.session.reset();
        self.messages = system.map(|text| Message::new("system", text)).into_iter().collect();
    }

    fn obey(&mut self, command: Command) -> anyhow::Result<()> {
        match command {
            Command::Reset => {
                let system = self.messages.first().filter(|m| m.role == "system").map(|m| m.content.clone());
                self.begin(system.as_deref());
                talk!("the conversation is forgotten");
            }
            Command::System(text) => {
                self.begin((!text.is_empty()).then_some(text.as_str()));
                talk!("a new conversation begins");
            }
            Command::Save(path) => self.save(Path::new(&path))?,
            Command::Help => talk!("{}", input::HELP),
            Command::Unknown { name, nearest } => {
                let meant = nearest.map_or_else(String::new, |n| format!(" (did you mean {n}?)"));
                talk!("there is no {name}{meant}; /help lists what there is");
            }
            Command::Exit => {}
        }
        Ok(())
    }

    fn save(&self, path: &Path) -> anyhow::Result<()> {
        let text = serde_json::to_string_pretty(&self.messages)? + "\n";
        std::fs::write(path, text).map_err(|error| Hinted::io("write", path, error))?;
        talk!("{} written to {}", counted(self.messages.len(), "message"), path.display());
        Ok(())
    }

    /// One turn. An error of the model ends a chat that nobody watches; a person may go on.
    fn answer(&mut self, text: String, is_watched: bool) -> anyhow::Result<()> {
        self.messages.push(Message::new("user", text));
        let outcome = self.turn();
        if outcome.is_err() {
            self.messages.pop();
        }
        match outcome {
            Err(error) if is_watched && error.is::<refrain::Error>() => {
                fail::print(&error);
                Ok(())
            }
            other => other,
        }
    }

    fn turn(&mut self) -> anyhow::Result<()> {
        self.session.reset_ledger();
        let (rendered, tokens) = render(&self.model, &self.messages, self.args.think)?;
        // Each turn draws other numbers, and the same conversation the same ones: positions go on.
        let options = self.args.sampling.generate(self.sampling.clone(), None);
        let show = Show::chat(Some(&mut self.out), self.args.think, &rendered);
        let reply = reply::generate(&mut self.session, &tokens, &options, show, self.context)?;
        self.out.line("")?;
        match reply.summary.finish {
            Some(Finish::ContextFull) => {
                let holds = self.session.context();
                talk!(
                    "{BOLD}the context of {holds} tokens is full{BOLD:#}: /reset begins anew, -c raises it"
                );
            }
            Some(Finish::Cancelled) => talk!("{DIM}stopped; Ctrl-D or /exit leaves{DIM:#}"),
            _ => {}
        }
        if self.args.stats {
            stats::print(&self.session, &reply, self.load, self.sampling.seed);
        }
        self.messages.push(Message::new("assistant", reply.text));
        Ok(())
    }
}
