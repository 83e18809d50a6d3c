//! Samples to tokens, each with a mark whether it is to be learnt.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use refrain_formats::chat::{ChatError, ChatTemplate, Message, RenderOptions};
use refrain_formats::tokenizer::{Tokenizer, TokenizerError};
use serde_json::{Map, Value};

use super::error::DataError;
use super::sample::{Conversation, is_assistant};
use super::text::encode_document;

/// Marks a token that counts as a target. Vocabularies are far smaller.
pub(super) const LEARN: u32 = 1 << 31;

/// Templates that write a date see this one (2025-01-01), so that a run can be repeated.
const NOW: Duration = Duration::from_secs(1_735_689_600);

/// A tokenizer and the chat template to go with it.
#[derive(Debug, Clone)]
pub struct Encoder {
    tokenizer: Arc<Tokenizer>,
    template: Option<Arc<ChatTemplate>>,
}

/// A conversation as tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Encoded {
    /// One sample that holds all turns of the assistant.
    Whole(Vec<u32>),
    /// One sample for each turn of the assistant: the template writes earlier turns in another way than the last.
    Turns(Vec<Vec<u32>>),
}

/// Why a conversation has no tokens.
#[derive(Debug)]
pub(super) enum EncodeFault {
    Tokenizer(TokenizerError),
    /// The template fails on it.
    Template(ChatError),
    /// The prompt of a turn is not where the turn begins.
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
    /// With the tokenizer's own chat template, where it has one.
    pub fn new(tokenizer: Arc<Tokenizer>) -> Result<Self, DataError> {
        let source = tokenizer.chat_template().map(str::to_owned);
        Self::with_template(tokenizer, source.as_deref())
    }

    /// With another chat template, or with none.
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

    /// Whether conversations can be written.
    pub fn has_template(&self) -> bool {
        self.template.is_some()
    }

    /// What goes in front of a document.
    pub(super) fn bos(&self) -> Option<u32> {
        self.tokenizer.bos().filter(|_| self.tokenizer.add_bos())
    }

    /// What ends a document.
    pub(super) fn eos(&self) -> Option<u32> {
        self.tokenizer.eos()
    }

    /// A document of plain text, all of it to be learnt, and how often it was cut inside a word.
    pub(super) fn text(&self, text: &str) -> Result<(Vec<u32>, u64), TokenizerError> {
        let pieces = encode_document(&self.tokenizer, text)?;
        let n_forced = pieces.iter().filter(|piece| piece.is_forced).count() as u64;
        let ids = pieces.into_iter().flat_map(|piece| piece.ids);
        let learnt = ids.chain(self.eos()).map(|id| id | LEARN);
        Ok((self.bos().into_iter().chain(learnt).collect(), n_forced))
    }

    /// A prompt and its completion as plain text; the completion is to be learnt.
    pub(super) fn pair(&self, prompt: &str, completion: &str) -> Result<Vec<u32>, TokenizerError> {
        let before = self.tokenizer.encode(prompt, false, false)?;
        let all = self.tokenizer.encode(&format!("{prompt}{completion}"), false, false)?;
        let start = common_prefix(&before, &all);
        let marked = all.into_iter().enumerate().map(|(i, id)| if i < start { id } else { id | LEARN });
        let eos = self.eos().map(|id| id | LEARN);
        Ok(self.bos().into_iter().chain(marked).chain(eos).collect())
    }

    /// A conversation; what the assistant says is to be learnt.
    ///
    /// A turn's tokens are those of the conversation up to it, less those of the prompt before it. Where the whole
    /// conversation begins with the tokens of each of its turns, it is one sample. Otherwise the template rewrites
    /// earlier turns (some drop their thinking), and each turn is a sample with what the model sees before it.
    pub(super) fn conversation(&self, conversation: &Conversation) -> Result<Encoded, EncodeFault> {
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

    /// The conversation up to message `idx`, which the assistant says, and where that message lies in it.
    fn turn(&self, conversation: &Conversation, idx: usize) -> Result<Turn, EncodeFault> {
        let (before, with) = (&conversation.messages[..idx], &conversation.messages[..=idx]);
        let ids = self.rendered(with, false, &conversation.extra)?;
        let prompt = self.rendered(before, true, &conversation.extra)?;
        let start = common_prefix(&prompt, &ids);
        if start < prompt.len() {
            // The opening that asks for an answer need not be the one that stands in front of an answer, but whatever
            // was said before must be there.
            let said = if before.is_empty() {
                Vec::new()
            } else {
                self.rendered(before, false, &conversation.extra)?
            };
            if start < said.len() || start == 0 {
                return Err(EncodeFault::Unaligned { turn: idx });
            }
        }
        // Templates put line ends behind the token that ends the turn; the model never writes those.
        let is_end = |&id: &u32| self.tokenizer.is_end_of_generation(id);
        let end = ids[start..].iter().rposition(is_end).map_or(ids.len(), |last| start + last + 1);
        let ended = ids[start..end].last().is_some_and(is_end);
        Ok(Turn { ids, start, end, ended })
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

    /// Marks the turns in the tokens of the last one. The last turn teaches to stop, so it ends with a token that does.
    fn finish<'a>(&self, turns: impl DoubleEndedIterator<Item = &'a Turn> + Clone) -> Vec<u32> {
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

/// A conversation up to a turn of the assistant, which is `start..end`.
struct Turn {
    ids: Vec<u32>,
    start: usize,
    end: usize,
    ended: bool, // with a token that ends generation
}

impl Turn {
    fn until_end(&self) -> &[u32] {
        &self.ids[..self.end]
    }
}

fn common_prefix(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}
