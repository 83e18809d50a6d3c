//! Bytes of every token, in the form that the parser walks.

use crate::error::GrammarError;
use llguidance::ParserFactory;
use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::{INVALID_TOKEN, InferenceCapabilities, TokEnv, TokRxInfo, TokTrie, TokenizerEnv};
use refrain_formats::tokenizer::{TokenKind, Tokenizer};
use std::fmt;
use std::sync::Arc;

/// Maximum number of lexer states of one text, of up to 2 KiB each. Realistic grammars need a few thousand.
const MAX_LEXER_STATES: usize = 30_000;

/// The tokens of a model, prepared for grammars. Build it once per model: it takes a few tenths of a second and a few tens
/// of megabytes for a vocabulary of 128,000 tokens.
pub struct Vocabulary {
    pub(crate) factory: ParserFactory,
    pub(crate) n_tokens: usize,
    /// Names of control tokens.
    pub(crate) controls: Vec<(u32, String)>,
}

impl fmt::Debug for Vocabulary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Vocabulary").field("n_tokens", &self.n_tokens).finish_non_exhaustive()
    }
}

impl Vocabulary {
    /// The vocabulary of a tokenizer. Control tokens can be named in Lark grammars, such as `<|im_end|>`; text never
    /// matches them.
    pub fn of(tokenizer: &Arc<Tokenizer>) -> Result<Vocabulary, GrammarError> {
        let ids = 0..u32::try_from(tokenizer.vocab_size()).unwrap_or(u32::MAX);
        let words: Vec<Vec<u8>> = ids.map(|id| word(tokenizer, id)).collect();
        let end = tokenizer.end_of_generation();
        let eos = tokenizer.eos();
        Vocabulary::new(&words, eos.or(end.first().copied()), Some(tokenizer.clone()))
    }

    /// A vocabulary of words. Control tokens begin with the byte 0xff.
    pub fn of_words(words: &[Vec<u8>]) -> Result<Vocabulary, GrammarError> {
        Vocabulary::new(words, None, None)
    }

    fn new(
        words: &[Vec<u8>],
        eos: Option<u32>,
        tokenizer: Option<Arc<Tokenizer>>,
    ) -> Result<Vocabulary, GrammarError> {
        let refused = |reason: String| GrammarError::Vocabulary { reason };
        let n_tokens = u32::try_from(words.len()).map_err(|error| refused(error.to_string()))?;
        if n_tokens == 0 {
            return Err(refused("it has no tokens".into()));
        }
        let info = TokRxInfo::new(n_tokens, eos.filter(|&id| id < n_tokens).unwrap_or(INVALID_TOKEN));
        let env: TokEnv = Arc::new(TokenTexts { trie: TokTrie::from(&info, words), tokenizer });
        let slices = SlicedBiasComputer::general_slices();
        let caps = InferenceCapabilities { ff_tokens: true, ..InferenceCapabilities::default() };
        let mut factory =
            ParserFactory::new(&env, caps, &slices).map_err(|error| refused(error.to_string()))?;
        factory.quiet();
        let limits = factory.limits_mut();
        limits.verbose_errors = false;
        limits.max_lexer_states = MAX_LEXER_STATES;
        let name = |word: &Vec<u8>| {
            let name = word.strip_prefix(&[TokTrie::SPECIAL_TOKEN_MARKER])?;
            String::from_utf8(name.to_vec()).ok().filter(|name| !name.is_empty())
        };
        let controls = (0..).zip(words).filter_map(|(id, word)| Some((id, name(word)?))).collect();
        Ok(Vocabulary { factory, n_tokens: words.len(), controls })
    }

    /// Number of tokens.
    pub fn n_tokens(&self) -> usize {
        self.n_tokens
    }

    /// Number of words of a mask: one bit per token.
    pub fn mask_words(&self) -> usize {
        self.n_tokens.div_ceil(32)
    }
}

/// Bytes of a token; empty if no text may contain it.
fn word(tokenizer: &Tokenizer, id: u32) -> Vec<u8> {
    let bytes = tokenizer.piece(id).unwrap_or_default();
    match tokenizer.kind(id) {
        Some(TokenKind::Control) => [&[TokTrie::SPECIAL_TOKEN_MARKER], bytes].concat(),
        // The marker's byte is not part of any UTF-8 text.
        Some(TokenKind::Normal | TokenKind::UserDefined | TokenKind::Byte)
            if bytes.first() != Some(&TokTrie::SPECIAL_TOKEN_MARKER) =>
        {
            bytes.to_vec()
        }
        _ => Vec::new(),
    }
}

struct TokenTexts {
    trie: TokTrie,
    tokenizer: Option<Arc<Tokenizer>>,
}

impl TokenTexts {
    /// Encodes a text that continues another one. Tokenizers that put a space in front of a text do so here too; a line
    /// break in front, which is cut off again, keeps it away from the text.
    fn encode(&self, text: &str) -> Vec<u32> {
        const GUARD: &str = "\n";
        let Some(tokenizer) = &self.tokenizer else { return self.trie.greedy_tokenize(text.as_bytes()) };
        let encode = |text: &str| tokenizer.encode(text, false, false).unwrap_or_default();
        let ids = encode(text);
        if self.trie.decode_raw(&ids) == text.as_bytes() {
            return ids;
        }
        let guarded = encode(&[GUARD, text].concat());
        let continues = |n: &usize| self.trie.decode_raw(&guarded[*n..]) == text.as_bytes();
        match (1..guarded.len().min(4)).find(continues) {
            Some(n) => guarded[n..].to_vec(),
            None => self.trie.greedy_tokenize(text.as_bytes()),
        }
    }
}

impl TokenizerEnv for TokenTexts {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<u32> {
        self.trie.tokenize_with_greedy_fallback(bytes, |text| self.encode(text))
    }
}
