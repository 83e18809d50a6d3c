//! Replies, streamed to standard output or collected.

use crate::bars::Delayed;
use crate::cli::CliContext;
use crate::opts::Think;
use crate::out::{DIM, Stdout};
use refrain::{
    ChatReply, Generate, Generation, Part, PartKind, Prompt, Session, Summary, TextDelta, ThinkFilter,
    ThinkTags,
};

/// Shorter prompts are evaluated before a progress bar could be seen.
const LONG_PROMPT: usize = 32;

/// A reply, complete or cut short by an error.
pub(crate) struct ShownReply {
    /// The whole generated text, including tags.
    pub(crate) text: String,
    /// The part that is shown.
    pub(crate) shown: String,
    /// Its tokens.
    pub(crate) tokens: Vec<u32>,
    /// Measurements.
    pub(crate) summary: Summary,
    /// The error that ended it.
    pub(crate) error: Option<anyhow::Error>,
}

impl ShownReply {
    /// The reply, or the error that cut it short.
    pub(crate) fn into_result(mut self) -> anyhow::Result<ShownReply> {
        match self.error.take() {
            Some(error) => Err(error),
            None => Ok(self),
        }
    }
}

/// How a reply is shown.
pub(crate) struct Show<'a> {
    /// Where it streams to; collected only when `None`.
    pub(crate) out: Option<&'a mut Stdout>,
    /// Separates thinking from the answer; `None` for raw text.
    filter: Option<ThinkFilter>,
    think: Think,
}

impl<'a> Show<'a> {
    /// Passes the reply on unchanged.
    pub(crate) fn raw(out: Option<&'a mut Stdout>) -> Show<'a> {
        Show { out, filter: None, think: Think::Show }
    }

    /// Shows a reply to a rendered prompt that may start with a thinking part.
    pub(crate) fn chat(out: Option<&'a mut Stdout>, think: Think, prompt: &str) -> Show<'a> {
        // On a pipe, shown thinking is what the model wrote, including its tags.
        let is_split = !think.shows() || out.as_ref().is_some_and(|out| out.is_terminal());
        let filter = is_split.then(|| ThinkFilter::for_prompt(ThinkTags::of_prompt(prompt), prompt));
        Show { out, filter, think }
    }

    fn push(&mut self, text: &str, shown: &mut String) -> anyhow::Result<()> {
        let parts = match &mut self.filter {
            None if text.is_empty() => Vec::new(),
            None => vec![Part { kind: PartKind::Answer, text: text.to_owned() }],
            Some(filter) => filter.push(text),
        };
        parts.iter().try_for_each(|part| self.part(part, shown))
    }

    fn finish(&mut self, shown: &mut String) -> anyhow::Result<()> {
        match self.filter.take().and_then(ThinkFilter::finish) {
            Some(part) => self.part(&part, shown),
            None => Ok(()),
        }
    }

    fn part(&mut self, part: &Part, shown: &mut String) -> anyhow::Result<()> {
        let is_thinking = part.kind == PartKind::Thinking;
        if is_thinking && !self.think.shows() {
            return Ok(());
        }
        shown.push_str(&part.text);
        match &mut self.out {
            Some(out) if is_thinking => out.styled(DIM, &part.text),
            Some(out) => out.text(&part.text),
            None => Ok(()),
        }
    }
}

/// A source of generated text.
pub(crate) trait Generates<'g>: Iterator<Item = Result<TextDelta, refrain::Error>> + Sized {
    fn summary(&self) -> &Summary;
    fn on_prefill(self, report: impl FnMut(usize, usize) + 'g) -> Self;
}

impl<'g> Generates<'g> for Generation<'g> {
    fn summary(&self) -> &Summary {
        Generation::summary(self)
    }

    fn on_prefill(self, report: impl FnMut(usize, usize) + 'g) -> Self {
        Generation::on_prefill(self, report)
    }
}

impl<'g> Generates<'g> for ChatReply<'g> {
    fn summary(&self) -> &Summary {
        ChatReply::summary(self)
    }

    fn on_prefill(self, report: impl FnMut(usize, usize) + 'g) -> Self {
        ChatReply::on_prefill(self, report)
    }
}

/// Generates text after `tokens` and shows it as it arrives. The first Ctrl-C ends the reply.
pub(crate) fn generate(
    session: &mut Session,
    tokens: &[u32],
    options: &Generate,
    show: Show<'_>,
    context: &CliContext,
) -> anyhow::Result<ShownReply> {
    let listening = context.interrupt.listen();
    let options = Generate { cancel: Some(listening.flag()), ..options.clone() };
    Ok(collect(session.generate(Prompt::Tokens(tokens), &options)?, show))
}

/// Shows a reply as it arrives, and collects it.
pub(crate) fn collect<'g>(generation: impl Generates<'g>, mut show: Show<'_>) -> ShownReply {
    let n_prompt = generation.summary().n_prompt;
    let mut waiting = (n_prompt >= LONG_PROMPT).then(|| Delayed::bar(n_prompt as u64, "reading the prompt"));
    let progress = waiting.as_ref().map(Delayed::handle);
    let mut generation = generation.on_prefill(move |done, _| {
        if let Some(bar) = &progress {
            bar.set_position(done as u64);
        }
    });
    let mut reply = ShownReply {
        text: String::new(),
        shown: String::new(),
        tokens: Vec::new(),
        summary: generation.summary().clone(),
        error: None,
    };
    let mut outcome = Ok(());
    for delta in generation.by_ref() {
        waiting = None;
        outcome = delta.map_err(anyhow::Error::from).and_then(|delta| {
            reply.text.push_str(&delta.text);
            reply.tokens.extend(delta.token);
            show.push(&delta.text, &mut reply.shown)
        });
        if outcome.is_err() {
            break;
        }
    }
    drop(waiting);
    reply.summary = generation.summary().clone();
    let shown = outcome.and_then(|()| show.finish(&mut reply.shown));
    if let (Err(_), Some(out)) = (&shown, &mut show.out) {
        // The error message starts on its own line.
        let _ = out.end_line();
    }
    reply.error = shown.err();
    reply
}
