//! Conversations with a model, and what happens when one fills its context.

use crate::error::Error;
use crate::generate::{Generate, Generation, Prompt, Summary, TextDelta};
use crate::model::Model;
use crate::session::Session;
use refrain_formats::chat::{Message, RenderOptions};
use std::cell::Cell;
use std::fmt;
use std::rc::Rc;

/// The speaker of a [`Message`]: `Message::new(Role::User, "Hello")`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// Instructions for the whole conversation.
    System,
    /// The person.
    User,
    /// The model.
    Assistant,
    /// The result of a tool call.
    Tool,
}

impl Role {
    /// The name that chat templates know.
    pub const fn name(self) -> &'static str {
        match self {
            Role::System => "system",
            Role::User => "user",
            Role::Assistant => "assistant",
            Role::Tool => "tool",
        }
    }

    /// The role of a message; `None` for one that only its template knows.
    pub fn of(message: &Message) -> Option<Role> {
        [Role::System, Role::User, Role::Assistant, Role::Tool]
            .into_iter()
            .find(|role| role.name() == message.role)
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl From<Role> for String {
    fn from(role: Role) -> String {
        role.name().to_owned()
    }
}

/// The policy for a conversation that no longer fits its context.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnFull {
    /// Drops the oldest turns, keeps the system prompt, evaluates the remaining turns again, and continues.
    #[default]
    Shift,
    /// Ends the reply with [`Finish::ContextFull`](crate::Finish::ContextFull) and refuses further messages.
    Stop,
}

/// Options of a [`Chat`].
#[derive(Clone, Debug, Default)]
pub struct ChatOptions {
    /// How the chat template is rendered.
    pub render: RenderOptions,
    /// What happens when the context is full.
    pub on_full: OnFull,
}

/// A conversation that keeps its history.
///
/// ```no_run
/// # fn main() -> Result<(), refrain::Error> {
/// use refrain::{Builtin, Chat, ChatOptions, Generate, Session, SessionOptions};
///
/// let session = Session::new(&Builtin::Chat.open()?, &SessionOptions::default())?;
/// let mut chat = Chat::new(session, ChatOptions::default())?;
/// for question in ["Hello!", "What is your name?"] {
///     for delta in chat.send(question, &Generate::default())? {
///         print!("{}", delta?.text);
///     }
///     println!();
/// }
/// # Ok(())
/// # }
/// ```
pub struct Chat {
    session: Session,
    options: ChatOptions,
    messages: Vec<Message>,
    /// The first message after the system prompt that is still part of the prompt.
    first: usize,
}

impl Chat {
    /// Starts a conversation. The model needs a chat template.
    pub fn new(session: Session, options: ChatOptions) -> Result<Chat, Error> {
        match session.model().chat_template() {
            Some(_) => Ok(Chat { session, options, messages: Vec::new(), first: 0 }),
            None => Err(Error::NoChatTemplate { model: session.model().name().into() }),
        }
    }

    /// The session that the conversation runs in.
    pub fn session(&self) -> &Session {
        &self.session
    }

    /// The session, for its ledger. Text that it generates by itself evicts the conversation from its cache.
    pub fn session_mut(&mut self) -> &mut Session {
        &mut self.session
    }

    /// All messages so far, including those that no longer fit the context.
    pub fn messages(&self) -> &[Message] {
        &self.messages
    }

    /// Number of messages that no longer fit the context and that the model does not see.
    pub fn n_dropped(&self) -> usize {
        self.first.saturating_sub(n_system(&self.messages))
    }

    /// Forgets the conversation and starts another one.
    pub fn restart(&mut self, system: Option<&str>) {
        self.load(system.map(|text| Message::new(Role::System, text)).into_iter().collect());
    }

    /// Replaces the history. The next message evaluates it.
    pub fn load(&mut self, messages: Vec<Message>) {
        self.session.reset();
        (self.messages, self.first) = (messages, 0);
    }

    /// Sends a message and returns the reply, which joins the history once it has ended or is dropped. A message that
    /// cannot be answered leaves the history as it was.
    pub fn send(&mut self, text: impl Into<String>, options: &Generate) -> Result<ChatReply<'_>, Error> {
        self.messages.push(Message::new(Role::User, text));
        let Chat { session, options: chat, messages, first } = self;
        match start(session, chat, messages, *first, options) {
            Ok((generation, prompt, kept)) => Ok(ChatReply {
                generation,
                messages,
                first,
                kept,
                prompt,
                text: String::new(),
                failed: false,
            }),
            Err(error) => {
                messages.pop();
                Err(error)
            }
        }
    }
}

type Started<'c> = (Generation<'c>, String, Rc<Cell<usize>>);

fn start<'c>(
    session: &'c mut Session,
    chat: &ChatOptions,
    messages: &[Message],
    first: usize,
    options: &Generate,
) -> Result<Started<'c>, Error> {
    let (model, context) = (session.model().clone(), session.context());
    let newest = messages.last().map_or(0, |message| message.content.len());
    model.check_length(newest, context)?;
    let window = Window { model: &model, messages, render: &chat.render, context };
    let mut fitted = window.from(first)?;
    if chat.on_full == OnFull::Shift && fitted.tokens.len() >= context {
        fitted = window.shift(&fitted, 0)?.unwrap_or(fitted);
    }
    let kept = Rc::new(Cell::new(fitted.first));
    let mut generation = session.generate(Prompt::Tokens(&fitted.tokens), options)?;
    if chat.on_full == OnFull::Shift {
        let (messages, render, kept) = (messages.to_vec(), chat.render.clone(), kept.clone());
        generation.on_full(Box::new(move |model, generated| {
            let window = Window { model, messages: &messages, render: &render, context };
            let now = window.from(kept.get())?;
            let Some(fitted) = window.shift(&now, generated.len())? else { return Ok(None) };
            kept.set(fitted.first);
            Ok(Some([&fitted.tokens, generated].concat()))
        }));
    }
    Ok((generation, fitted.text, kept))
}

/// The part of a conversation that its prompt holds.
struct Window<'w> {
    model: &'w Model,
    messages: &'w [Message],
    render: &'w RenderOptions,
    context: usize,
}

/// The prompt of a conversation without the turns before `first`.
struct Fitted {
    first: usize,
    text: String,
    tokens: Vec<u32>,
}

impl Window<'_> {
    fn from(&self, first: usize) -> Result<Fitted, Error> {
        let n_system = n_system(self.messages);
        let first = first.max(n_system);
        let kept: Vec<Message> =
            self.messages[..n_system].iter().chain(&self.messages[first..]).cloned().collect();
        let text = self.model.render(&kept, self.render)?;
        let tokens = self.model.tokenizer().encode_chat(&text)?;
        Ok(Fitted { first, text, tokens })
    }

    /// Drops turns until half of the context is free, so that the next tokens need no further shift, or until only the
    /// newest is left. `None` where that does not make space.
    fn shift(&self, now: &Fitted, n_generated: usize) -> Result<Option<Fitted>, Error> {
        let mut shifted = None;
        for next in now.first + 1..self.messages.len() {
            // Templates want a user's turn first.
            if Role::of(&self.messages[next]) != Some(Role::User) {
                continue;
            }
            let fitted = self.from(next)?;
            let n_tokens = fitted.tokens.len() + n_generated;
            if n_tokens < self.context {
                shifted = Some(fitted);
            }
            if n_tokens <= self.context / 2 {
                break;
            }
        }
        Ok(shifted)
    }
}

fn n_system(messages: &[Message]) -> usize {
    usize::from(messages.first().and_then(Role::of) == Some(Role::System))
}

/// The reply to a message: an iterator over its text. Dropping it ends the reply.
pub struct ChatReply<'c> {
    generation: Generation<'c>,
    messages: &'c mut Vec<Message>,
    first: &'c mut usize,
    kept: Rc<Cell<usize>>,
    prompt: String,
    text: String,
    failed: bool,
}

impl<'c> ChatReply<'c> {
    /// The rendered prompt.
    pub fn prompt(&self) -> &str {
        &self.prompt
    }

    /// Measurements so far.
    pub fn summary(&self) -> &Summary {
        self.generation.summary()
    }

    /// Reports prefill progress: tokens evaluated, and tokens in all.
    pub fn on_prefill(mut self, f: impl FnMut(usize, usize) + 'c) -> ChatReply<'c> {
        self.generation.set_on_prefill(f);
        self
    }
}

impl Iterator for ChatReply<'_> {
    type Item = Result<TextDelta, Error>;

    fn next(&mut self) -> Option<Result<TextDelta, Error>> {
        let next = self.generation.next();
        match &next {
            Some(Ok(delta)) => self.text += &delta.text,
            Some(Err(_)) => self.failed = true,
            None => {}
        }
        next
    }
}

impl Drop for ChatReply<'_> {
    fn drop(&mut self) {
        let is_answered = self.summary().finish.is_some() || !self.text.is_empty();
        if self.failed || !is_answered {
            self.messages.pop();
            return;
        }
        *self.first = self.kept.get();
        self.messages.push(Message::new(Role::Assistant, std::mem::take(&mut self.text)));
    }
}
