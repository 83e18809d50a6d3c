//! Encodes samples as tokens, with a mark on those that are targets.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use refrain_formats::chat::{ChatError, ChatTemplate, Message, RenderOptions};
use refrain_formats::tokenizer::{Tokenizer, TokenizerError};
use serde_json::{Map, Value};

use super::error::DataError;
use super::sample::{ChatSample, is_assistant};

/// Marks a token as a target. Vocabularies are far smaller.
pub(super) const LEARN: u32 = 1 << 31;

/// The date that templates see (2025-01-01), so that runs are reproducible.
const NOW: Duration = Duration::from_secs(1_735_689_600);

/// A tokenizer and its chat template.
#[derive(Debug, Clone)]
pub struct Encoder {
    tokenizer: Arc<Tokenizer>,
    template: Option<Arc<ChatTemplate>>,
}

/// A tokenized conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Encoded {
    /// One sample with all assistant turns.
    Whole(Vec<u32>),
    /// One sample per assistant turn: the template renders earlier turns differently from the last one.
    Turns(Vec<Vec<u32>>),
}

/// Why a conversation cannot be tokenized.
#[derive(Debug)]
pub(super) enum EncodeFault {
    Tokenizer(TokenizerError),
    /// The template failed.
    Template(ChatError),
    /// The prompt of a turn does not end where the turn starts.
    Unaligned {
        turn: usize,
    },
}

impl From<TokenizerError> for EncodeFault {
    fn from(error: TokenizerError) -> Self {
        Self::Tokenizer(error)
    }
}

impl From<ChatError> for EncodeFault {
    fn from(error: ChatError) -> Self {
        Self::Template(error)
    }
}

impl Encoder {
    /// Uses the tokenizer's own chat template, if it has one.
    pub fn new(tokenizer: Arc<Tokenizer>) -> Result<Self, DataError> {
        let source = tokenizer.chat_template().map(str::to_owned);
        Self::with_template(tokenizer, source.as_deref())
    }

    /// Uses a given chat template, or none.
    pub fn with_template(tokenizer: Arc<Tokenizer>, source: Option<&str>) -> Result<Self, DataError> {
        let (n_tokens, limit) = (tokenizer.vocab_size(), LEARN as usize);
        if n_tokens > limit {
            return Err(DataError::Vocabulary { n_tokens, limit });
        }
        let parse = |source: &str| ChatTemplate::new(source, tokenizer.special_texts()).map(Arc::new);
        let template = source.map(parse).transpose().map_err(DataError::Template)?;
        Ok(Self { tokenizer, template })
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.tokenizer
    }

    /// Whether it has a chat template.
    pub fn has_template(&self) -> bool {
        self.template.is_some()
    }

    /// Token at the start of a document.
    pub(super) fn bos(&self) -> Option<u32> {
        self.tokenizer.bos().filter(|_| self.tokenizer.add_bos())
    }

    /// Token at the end of a document.
    pub(super) fn eos(&self) -> Option<u32> {
        self.tokenizer.eos()
    }

    /// Encodes a plain text, all of it as targets. Also returns how often it was split inside a word.
    pub(super) fn text(&self, text: &str) -> Result<(Vec<u32>, u64), TokenizerError> {
        let mut encoder = self.tokenizer.encode_long(text, false, false).with_threads(1);
        let ids = encoder.at_least(usize::MAX)?;
        let targets = ids.into_iter().chain(self.eos()).map(|id| id | LEARN);
        Ok((self.bos().into_iter().chain(targets).collect(), encoder.n_forced() as u64))
    }

    /// Encodes a prompt and its completion as plain text; only the completion is a target.
    pub(super) fn pair(&self, prompt: &str, completion: &str) -> Result<Vec<u32>, TokenizerError> {
        let before = self.tokenizer.encode(prompt, false, false)?;
        let all = self.tokenizer.encode(&format!("{prompt}{completion}"), false, false)?;
        let start = common_prefix(&before, &all);
        let marked = all.into_iter().enumerate().map(|(i, id)| if i < start { id } else { id | LEARN });
        let eos = self.eos().map(|id| id | LEARN);
        Ok(self.bos().into_iter().chain(marked).chain(eos).collect())
    }

    /// Encodes a conversation; only assistant turns are targets.
    ///
    /// The tokens of a turn are those of the conversation up to it, minus those of the prompt before it. If
    /// the whole conversation starts with the tokens of each of its turns, it is one sample. Otherwise the
    /// template rewrites earlier turns (some drop the reasoning), and each turn becomes a sample with the
    /// context that the model sees before it.
    pub(super) fn conversation(&self, conversation: &ChatSample) -> Result<Encoded, EncodeFault> {
        let mut turns = Vec::new();
        for (idx, message) in conversation.messages.iter().enumerate() {
            if is_assistant(message) {
                turns.push(self.turn(conversation, idx)?);
            }
        }
        let Some((last, earlier)) = turns.split_last() else { return Ok(Encoded::Turns(Vec::new())) };
        if !earlier.iter().all(|turn| last.ids.starts_with(turn.until_end())) {
            return Ok(Encoded::Turns(turns.into_iter().map(|turn| self.finish([turn].iter())).collect()));
        }
        Ok(Encoded::Whole(self.finish(turns.iter())))
    }

    /// Renders the conversation up to the assistant message `idx`, and locates that message in it.
    fn turn(&self, conversation: &ChatSample, idx: usize) -> Result<AssistantTurn, EncodeFault> {
        let (before, with) = (&conversation.messages[..idx], &conversation.messages[..=idx]);
        let ids = self.rendered(with, false, &conversation.extra)?;
        let prompt = self.rendered(before, true, &conversation.extra)?;
        let start = common_prefix(&prompt, &ids);
        if start < prompt.len() {
            // The generation prompt may differ from the actual start of an answer, but everything before it
            // must be present.
            let said = if before.is_empty() {
                Vec::new()
            } else {
                self.rendered(before, false, &conversation.extra)?
            };
            if start < said.len() || start == 0 {
                return Err(EncodeFault::Unaligned { turn: idx });
            }
        }
        // Templates add newlines after the token that ends a turn; the model never generates those.
        let is_end = |&id: &u32| self.tokenizer.is_end_of_generation(id);
        let end = ids[start..].iter().rposition(is_end).map_or(ids.len(), |last| start + last + 1);
        let ended = ids[start..end].last().is_some_and(is_end);
        Ok(AssistantTurn { ids, start, end, ended })
    }

    fn rendered(
        &self,
        messages: &[Message],
        add_generation_prompt: bool,
        extra: &Map<String, Value>,
    ) -> Result<Vec<u32>, EncodeFault> {
        let Some(template) = &self.template else { return Ok(Vec::new()) };
        let options = RenderOptions {
            add_generation_prompt,
            now: Some(SystemTime::UNIX_EPOCH + NOW),
            extra: extra.clone(),
            ..Default::default()
        };
        Ok(self.tokenizer.encode_chat(&template.render(messages, &options)?)?)
    }

    /// Marks the turns in the tokens of the last one. The last turn ends with an end token, so that the model
    /// learns to stop.
    fn finish<'a>(&self, turns: impl DoubleEndedIterator<Item = &'a AssistantTurn> + Clone) -> Vec<u32> {
        let Some(last) = turns.clone().next_back() else { return Vec::new() };
        let mut tokens = last.ids[..last.end].to_vec();
        for turn in turns {
            tokens[turn.start..turn.end].iter_mut().for_each(|token| *token |= LEARN);
        }
        if !last.ended {
            tokens.extend(self.eos().map(|id| id | LEARN));
        }
        tokens
    }
}

/// A conversation up to an assistant turn, which is `start..end`.
struct AssistantTurn {
    ids: Vec<u32>,
    start: usize,
    end: usize,
    ended: bool, // with an end-of-generation token
}

impl AssistantTurn {
    fn until_end(&self) -> &[u32] {
        &self.ids[..self.end]
    }
}

fn common_prefix(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}
