//! An open request: what it asks for, and what was delivered of it.

use crate::protocol::{MAX_PROMPT_TOKENS, ToWorker, WireEvent, WireId};
use crate::tokens::{
    EmbedRequest, Refusal, ReplySender, TokenRequest, TokenUpdate, Update as _, VectorUpdate,
};
use std::borrow::Cow;

pub(super) struct OpenRequest {
    pub(super) work: Work,
    pub(super) worker_idx: Option<usize>,
    /// Failures of its workers since its last delivery.
    pub(super) n_deaths: u32,
}

/// What a request asks for. It is always what is left to do: the next worker continues from there.
pub(super) enum Work {
    Tokens(TokenWork),
    Vectors(VectorWork),
}

pub(super) struct TokenWork {
    progress: TokenProgress,
    sender: ReplySender,
}

struct TokenProgress {
    /// Delivered tokens are appended to its prompt.
    request: TokenRequest,
    n_delivered: usize,
    /// Prompt tokens that were reported as done by the current worker.
    n_prompt_done: usize,
}

pub(super) struct VectorWork {
    /// Texts with vectors are removed.
    request: EmbedRequest,
    /// Vectors that the current worker delivered: their texts are still in the request.
    n_delivered: usize,
    /// Elements of each vector, once one is known.
    n_elements: Option<usize>,
    sender: ReplySender<VectorUpdate>,
}

/// What came of some events.
#[derive(Debug, Default)]
pub(super) struct Taken {
    pub(super) has_delivered: bool,
    pub(super) is_over: bool,
    /// The rule that the worker broke.
    pub(super) broken: Option<&'static str>,
}

impl Work {
    pub(super) fn tokens(request: TokenRequest, sender: ReplySender) -> Work {
        let progress = TokenProgress { request, n_delivered: 0, n_prompt_done: 0 };
        Work::Tokens(TokenWork { progress, sender })
    }

    pub(super) fn vectors(request: EmbedRequest, sender: ReplySender<VectorUpdate>) -> Work {
        Work::Vectors(VectorWork { request, n_delivered: 0, n_elements: None, sender })
    }

    /// The message that starts it on a worker.
    pub(super) fn message(&mut self, id: WireId) -> ToWorker<'_> {
        match self {
            Work::Tokens(TokenWork { progress, .. }) => {
                let (n_delivered, request) = (progress.n_delivered, Cow::Borrowed(&progress.request));
                ToWorker::Submit { id, n_delivered, request }
            }
            Work::Vectors(work) => {
                work.request.inputs.drain(..std::mem::take(&mut work.n_delivered));
                ToWorker::Embed { id, request: Cow::Borrowed(&work.request) }
            }
        }
    }

    /// A worker begins with it.
    pub(super) fn starts(&mut self) {
        if let Work::Tokens(work) = self {
            work.progress.n_prompt_done = 0;
        }
    }

    pub(super) fn refuse(&self, refusal: Refusal) {
        match self {
            Work::Tokens(work) => work.sender.send([Err(refusal)]),
            Work::Vectors(work) => work.sender.send([Err(refusal)]),
        }
    }

    /// Delivers events, up to the end or to the first one that breaks a rule.
    pub(super) fn take(&mut self, events: impl Iterator<Item = WireEvent>) -> Taken {
        match self {
            Work::Tokens(work) => work.take(events),
            Work::Vectors(work) => work.take(events),
        }
    }
}

impl TokenWork {
    fn take(&mut self, mut events: impl Iterator<Item = WireEvent>) -> Taken {
        let TokenWork { progress, sender } = self;
        let mut taken = Taken::default();
        // Every token passes here: nothing is collected on the way.
        sender.send(std::iter::from_fn(|| {
            while !taken.is_over && taken.broken.is_none() {
                match progress.accept(events.next()?) {
                    Ok(Some(update)) => {
                        taken.has_delivered |= matches!(update, Ok(TokenUpdate::Token { .. }));
                        taken.is_over = update.as_ref().map_or(true, |update| update.is_last());
                        return Some(update);
                    }
                    Ok(None) => {}
                    Err(how) => taken.broken = Some(how),
                }
            }
            None
        }));
        taken
    }
}

impl TokenProgress {
    /// Checks an event and notes what it delivers. `None` is nothing to pass on; an error names the broken rule.
    fn accept(&mut self, event: WireEvent) -> Result<Option<Result<TokenUpdate, Refusal>>, &'static str> {
        let update = match event {
            WireEvent::Refused(refusal) => return Ok(Some(Err(refusal))),
            WireEvent::Update(update) => update,
            WireEvent::Vector(_) => return Err("it sent a vector to a request for tokens"),
        };
        match &update {
            TokenUpdate::Prompt { n_done, .. } => {
                // Progress of an evaluation that a failure repeats is passed on once more; otherwise it only grows.
                if *n_done <= self.n_prompt_done || *n_done > self.request.prompt.len() {
                    return Ok(None);
                }
                self.n_prompt_done = *n_done;
            }
            TokenUpdate::Token { token, top, .. } => {
                if self.request.max_tokens.is_some_and(|max| self.n_delivered >= max) {
                    return Err("it sent more tokens than a request asked for");
                }
                if self.request.prompt.len() >= MAX_PROMPT_TOKENS {
                    return Err("it sent more tokens than any context has");
                }
                if top.len() > self.request.n_top_logprobs {
                    return Err("it sent more alternatives than a request asked for");
                }
                self.request.prompt.push(*token);
                self.n_delivered += 1;
            }
            TokenUpdate::End(_) => {}
        }
        Ok(Some(Ok(update)))
    }
}

impl VectorWork {
    fn take(&mut self, events: impl Iterator<Item = WireEvent>) -> Taken {
        let (mut taken, mut updates) = (Taken::default(), Vec::new());
        for event in events {
            match event {
                WireEvent::Refused(refusal) => {
                    taken.is_over = true;
                    updates.push(Err(refusal));
                }
                WireEvent::Vector(update) => match self.accept(&update) {
                    Ok(()) => {
                        taken.has_delivered = true;
                        taken.is_over = update.is_last();
                        updates.push(Ok(update));
                    }
                    Err(how) => taken.broken = Some(how),
                },
                WireEvent::Update(_) => taken.broken = Some("it sent tokens to a request for embeddings"),
            }
            if taken.is_over || taken.broken.is_some() {
                break;
            }
        }
        self.sender.send(updates);
        taken
    }

    fn accept(&mut self, update: &VectorUpdate) -> Result<(), &'static str> {
        let n_elements = update.vector.len();
        if n_elements == 0 || self.n_elements.is_some_and(|n| n != n_elements) {
            return Err("it sent vectors of different lengths, or an empty one");
        }
        if !update.vector.iter().all(|v| v.is_finite()) {
            return Err("it sent a vector that is not finite");
        }
        if update.is_last != (self.n_delivered + 1 == self.request.inputs.len()) {
            return Err("it sent more or fewer vectors than a request has texts");
        }
        self.n_elements = Some(n_elements);
        self.n_delivered += 1;
        Ok(())
    }
}
