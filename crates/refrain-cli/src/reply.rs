//! A reply, streamed to standard output or collected.

use crate::bars::Delayed;
use crate::cli::Context;
use crate::opts::Think;
use crate::out::{DIM, Out};
use refrain::{Generate, Part, PartKind, Prompt, Session, Summary, ThinkFilter, ThinkTags};

/// Shorter prompts are evaluated before a bar could be seen.
const LONG_PROMPT: usize = 32;

/// What came of a prompt.
pub(crate) struct Reply {
    /// All that was generated, tags included.
    pub(crate) text: String,
    /// What is to be shown of it.
    pub(crate) shown: String,
    /// The text's tokens.
    pub(crate) tokens: Vec<u32>,
    /// What it took.
    pub(crate) summary: Summary,
}

/// How a reply is shown.
pub(crate) struct Show<'a> {
    /// Where it streams to; collected only when `None`.
    pub(crate) out: Option<&'a mut Out>,
    /// Splits thinking from the answer; `None` for raw text.
    filter: Option<ThinkFilter>,
    think: Think,
}

impl<'a> Show<'a> {
    /// A reply that is passed on as it is.
    pub(crate) fn raw(out: Option<&'a mut Out>) -> Show<'a> {
        Show { out, filter: None, think: Think::Show }
    }

    /// A reply to a rendered prompt that may begin with a thinking part.
    pub(crate) fn chat(out: Option<&'a mut Out>, think: Think, prompt: &str) -> Show<'a> {
        // What a pipe shows of the thinking is what the model wrote, tags included.
        let is_told_apart = !think.shows() || out.as_ref().is_some_and(|out| out.is_terminal());
        let filter = is_told_apart.then(|| ThinkFilter::for_prompt(ThinkTags::of_prompt(prompt), prompt));
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

/// Generates behind `tokens` and shows it piece by piece. The first Ctrl-C ends the reply.
pub(crate) fn generate(
    session: &mut Session,
    tokens: &[u32],
    options: &Generate,
    mut show: Show<'_>,
    context: &Context,
) -> anyhow::Result<Reply> {
    let listening = context.interrupt.listen();
    let options = Generate { cancel: Some(listening.flag()), ..options.clone() };
    let n_prompt = tokens.len() as u64;
    let mut waiting = (tokens.len() >= LONG_PROMPT).then(|| Delayed::bar(n_prompt, "reading the prompt"));
    let progress = waiting.as_ref().map(Delayed::handle);
    let mut generation = session.generate(Prompt::Tokens(tokens), &options)?.on_prefill(move |done, _| {
        if let Some(bar) = &progress {
            bar.set_position(done as u64);
        }
    });
    let mut reply = Reply {
        text: String::new(),
        shown: String::new(),
        tokens: Vec::new(),
        summary: generation.summary().clone(),
    };
    let mut outcome = Ok(());
    for piece in generation.by_ref() {
        waiting = None;
        outcome = piece.map_err(anyhow::Error::from).and_then(|piece| {
            reply.text.push_str(&piece.text);
            reply.tokens.extend(piece.token);
            show.push(&piece.text, &mut reply.shown)
        });
        if outcome.is_err() {
            break;
        }
    }
    drop(waiting);
    reply.summary = generation.summary().clone();
    let shown = outcome.and_then(|()| show.finish(&mut reply.shown));
    if let (Err(_), Some(out)) = (&shown, &mut show.out) {
        // The message of the error begins on a line of its own.
        let _ = out.end_line();
    }
    shown.map(|()| reply)
}
