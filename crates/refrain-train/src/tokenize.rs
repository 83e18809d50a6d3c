//! Trains a byte-level BPE tokenizer, or loads an existing one.

use std::collections::{BTreeMap, HashSet};
use std::fs::File;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use refrain_formats::FormatError;
use refrain_formats::gguf::Gguf;
use refrain_formats::tokenizer::{SpecialIds, Tokenizer, TokenizerError, VocabSpec};
use serde_json::{Value, json};
use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{
    AddedToken, DecoderWrapper, NormalizerWrapper, PostProcessorWrapper, PreTokenizerWrapper,
    TokenizerBuilder,
};

use crate::data::{DataError, TextReader};
use crate::storage::{RealStorage, write_atomically};

/// Separator between texts. It also starts them, so that a model can generate from an empty prompt.
pub const END_OF_TEXT: &str = "<|endoftext|>";
/// Tokens around conversation turns, so that the model can be trained for chat later.
pub const TURN_TOKENS: [&str; 2] = ["<|im_start|>", "<|im_end|>"];

/// The library counts pairs in 32 bits, and more text does not improve the vocabulary.
const MAX_BYTES: u64 = 512 << 20;

/// Specification of a tokenizer to train.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenizerPlan {
    /// Vocabulary size, including special tokens and the 256 bytes.
    pub vocab_size: usize,
    /// Special tokens; the first one is the end-of-text token.
    pub special_tokens: Vec<String>,
    /// Chat template to store with it.
    pub chat_template: Option<String>,
    /// Maximum bytes of text to train on; larger data is sampled evenly.
    pub max_bytes: u64,
}

impl TokenizerPlan {
    /// A plan with the end-of-text and turn tokens, and without a template.
    pub fn new(vocab_size: usize) -> Self {
        let special_tokens = std::iter::once(END_OF_TEXT).chain(TURN_TOKENS).map(str::to_owned).collect();
        Self { vocab_size, special_tokens, chat_template: None, max_bytes: MAX_BYTES }
    }
}

/// Errors of training or loading a tokenizer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TokenizeError {
    /// In the training texts.
    #[error(transparent)]
    Data(#[from] DataError),
    /// The vocabulary is too small for the required tokens.
    #[error("a vocabulary of {vocab_size} tokens is too small: 256 bytes and {n_special} special tokens need {}", 256 + n_special)]
    TooSmall {
        /// Requested vocabulary size.
        vocab_size: usize,
        /// Requested special tokens.
        n_special: usize,
    },
    /// A plan without an end-of-text token.
    #[error("the tokenizer has no end-of-text token: the list of special tokens is empty")]
    NoEndOfText,
    /// The tokenizer library failed.
    #[error("cannot train the tokenizer: {reason}")]
    Library {
        /// The library's error.
        reason: String,
    },
    /// The trained or loaded tokenizer is invalid.
    #[error("the tokenizer cannot be used")]
    Unusable(#[source] TokenizerError),
    /// A text that does not round-trip.
    #[error("the trained tokenizer does not round-trip a text: {before:?} becomes {after:?}")]
    NotReversible {
        /// The text at the first difference.
        before: String,
        /// The same part after the round trip.
        after: String,
    },
    /// An existing tokenizer cannot be read.
    #[error("cannot read {path}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The file is too large for a tokenizer.
    #[error("{path} has more than {limit} bytes, the maximum for a tokenizer")]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// The maximum size.
        limit: u64,
    },
    /// A GGUF file cannot be read.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// The tokenizer cannot be saved.
    #[error("cannot write {path}")]
    Write {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

impl TokenizeError {
    /// An action for the user.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Data(error) => error.hint(),
            Self::TooSmall { .. } => Some("use 4,096 to 32,768 tokens for a small model".to_owned()),
            Self::NoEndOfText => Some(format!("give {END_OF_TEXT} as the first special token")),
            Self::Write { .. } => Some("check the write permissions and the disk space".to_owned()),
            Self::Read { .. } => Some("give a tokenizer.json, its folder, or a GGUF file".to_owned()),
            Self::TooLarge { .. } => Some("give a tokenizer.json".to_owned()),
            Self::Format(error) => error.hint(),
            Self::Unusable(error) => error.hint(),
            Self::Library { .. } | Self::NotReversible { .. } => None,
        }
    }
}

/// An existing tokenizer and its chat template.
#[derive(Debug)]
pub struct LoadedTokenizer {
    /// The tokenizer.
    pub tokenizer: Tokenizer,
    /// From `chat_template.jinja` next to it, or its own.
    pub chat_template: Option<String>,
}

impl LoadedTokenizer {
    /// Opens a `tokenizer.json`, its folder, or a GGUF file.
    pub fn open(path: &Path) -> Result<Self, TokenizeError> {
        let is_gguf = path.extension().is_some_and(|ending| ending.eq_ignore_ascii_case("gguf"));
        if is_gguf {
            let gguf = Gguf::open(path)?;
            let tokenizer = Tokenizer::from_gguf(gguf.metadata()).map_err(TokenizeError::Unusable)?;
            let chat_template = tokenizer.chat_template().map(str::to_owned);
            return Ok(Self { tokenizer, chat_template });
        }
        let path = if path.is_dir() { path.join(TOKENIZER) } else { path.to_owned() };
        let neighbour = |name: &str| Some(path.with_file_name(name)).filter(|path| path.is_file());
        let config = neighbour(CONFIG).map(|path| read(&path)).transpose()?;
        let tokenizer = Tokenizer::from_files(&read(&path)?, config.as_deref());
        let tokenizer = tokenizer.map_err(TokenizeError::Unusable)?;
        let template = neighbour(TEMPLATE).map(|path| read(&path)).transpose()?;
        let template = template.map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
        let chat_template = template.or_else(|| tokenizer.chat_template().map(str::to_owned));
        Ok(Self { tokenizer, chat_template })
    }
}

const TOKENIZER: &str = "tokenizer.json";
const CONFIG: &str = "tokenizer_config.json";
const TEMPLATE: &str = "chat_template.jinja";

fn read(path: &Path) -> Result<Vec<u8>, TokenizeError> {
    /// The largest tokenizers in use have about 30 MB.
    const MAX_BYTES: u64 = 256 << 20;
    let mut bytes = Vec::new();
    let file = File::open(path).and_then(|file| file.take(MAX_BYTES + 1).read_to_end(&mut bytes));
    file.map_err(|source| TokenizeError::Read { path: path.to_owned(), source })?;
    if bytes.len() as u64 > MAX_BYTES {
        return Err(TokenizeError::TooLarge { path: path.to_owned(), limit: MAX_BYTES });
    }
    Ok(bytes)
}

/// A trained tokenizer, in all formats that consumers need.
#[derive(Debug)]
pub struct TrainedTokenizer {
    /// The tokenizer.
    pub tokenizer: Tokenizer,
    /// Its vocabulary for GGUF files.
    pub spec: VocabSpec,
    /// Content of `tokenizer.json`.
    pub json: String,
    /// Content of `tokenizer_config.json`.
    pub config_json: String,
    /// Bytes of text it was trained on.
    pub n_bytes: u64,
}

type Library = tokenizers::TokenizerImpl<
    BPE,
    NormalizerWrapper,
    PreTokenizerWrapper,
    PostProcessorWrapper,
    DecoderWrapper,
>;

impl TrainedTokenizer {
    /// Trains on text and JSONL files. The vocabulary is smaller than requested if there is too little text.
    pub fn train(files: &[PathBuf], plan: &TokenizerPlan) -> Result<Self, TokenizeError> {
        let n_special = plan.special_tokens.len();
        let end_of_text = plan.special_tokens.first().ok_or(TokenizeError::NoEndOfText)?;
        if plan.vocab_size < 256 + n_special {
            return Err(TokenizeError::TooSmall { vocab_size: plan.vocab_size, n_special });
        }
        let library_error = |error: tokenizers::Error| TokenizeError::Library { reason: error.to_string() };
        let mut library: Library = TokenizerBuilder::new()
            .with_model(BPE::default())
            .with_normalizer(None::<NormalizerWrapper>)
            .with_pre_tokenizer(Some(PreTokenizerWrapper::ByteLevel(ByteLevel::new(false, true, true))))
            .with_post_processor(None::<PostProcessorWrapper>)
            .with_decoder(Some(DecoderWrapper::ByteLevel(ByteLevel::default())))
            .build()
            .map_err(library_error)?;
        let special = plan.special_tokens.iter().map(|text| AddedToken::from(text.clone(), true));
        let mut trainer = BpeTrainer::builder()
            .vocab_size(plan.vocab_size)
            .show_progress(false)
            .special_tokens(special.collect())
            .initial_alphabet(ByteLevel::alphabet().into_iter().collect::<HashSet<char>>())
            .build();
        let mut texts = TextReader::new(files, plan.max_bytes, plan.special_tokens.clone())?;
        let (mut failed, mut n_bytes, mut probe) = (None, 0, String::new());
        let source = std::iter::from_fn(|| {
            let text = texts.next()?.map_err(|error| failed = Some(error)).ok()?;
            n_bytes += text.len() as u64;
            if probe.is_empty() {
                probe = text.chars().take(4096).collect();
            }
            Some(text)
        });
        library.train(&mut trainer, source).map_err(library_error)?;
        if let Some(error) = failed {
            return Err(error.into());
        }
        let json = library.to_string(false).map_err(library_error)?;
        let config_json = config_json(end_of_text, plan.chat_template.as_deref());
        let unusable = TokenizeError::Unusable;
        let tokenizer =
            Tokenizer::from_files(json.as_bytes(), Some(config_json.as_bytes())).map_err(unusable)?;
        let spec = spec(&json, plan, &tokenizer)?;
        let trained = Self { tokenizer, spec, json, config_json, n_bytes };
        for text in [PROBE, &probe] {
            trained.check(text)?;
        }
        Ok(trained)
    }

    /// Writes `tokenizer.json` and `tokenizer_config.json`.
    pub fn save(&self, folder: &Path) -> Result<(), TokenizeError> {
        let failed = |path: &Path| {
            let path = path.to_owned();
            |source| TokenizeError::Write { path, source }
        };
        std::fs::create_dir_all(folder).map_err(failed(folder))?;
        for (name, content) in [(TOKENIZER, &self.json), (CONFIG, &self.config_json)] {
            let path = folder.join(name);
            write_atomically(&RealStorage, &path, content.as_bytes()).map_err(failed(&path))?;
        }
        Ok(())
    }

    /// Checks that a text round-trips.
    fn check(&self, text: &str) -> Result<(), TokenizeError> {
        let ids = self.tokenizer.encode(text, false, false).map_err(TokenizeError::Unusable)?;
        let after = self.tokenizer.decode(&ids).map_err(TokenizeError::Unusable)?;
        if after == text {
            return Ok(());
        }
        let same = text.chars().zip(after.chars()).take_while(|(a, b)| a == b).count();
        let part = |text: &str| text.chars().skip(same.saturating_sub(8)).take(24).collect();
        Err(TokenizeError::NotReversible { before: part(text), after: part(&after) })
    }
}

/// A text that reveals tokenizers that do not preserve every byte.
const PROBE: &str =
    " a  b\tc\r\n\n d   \u{0}\u{1}\u{7f} ÄÖ é e\u{301} 中文 🦀👩‍🚀 \u{feff}\u{200b}\u{10ffff} 12345 don't!!";

fn config_json(end_of_text: &str, chat_template: Option<&str>) -> String {
    let mut config = json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": end_of_text,
        "eos_token": end_of_text,
        "add_bos_token": true,
        "clean_up_tokenization_spaces": false,
    });
    if let Some(template) = chat_template {
        config["chat_template"] = template.into();
    }
    config.to_string()
}

/// The vocabulary for GGUF files, from `tokenizer.json`.
fn spec(json: &str, plan: &TokenizerPlan, tokenizer: &Tokenizer) -> Result<VocabSpec, TokenizeError> {
    let bad = |what: &str| TokenizeError::Library { reason: format!("its file {what}") };
    let file: Value = serde_json::from_str(json).map_err(|error| bad(&error.to_string()))?;
    let vocab = file["model"]["vocab"].as_object().ok_or_else(|| bad("has no vocabulary"))?;
    let by_id: BTreeMap<u64, &str> =
        vocab.iter().filter_map(|(text, id)| Some((id.as_u64()?, text.as_str()))).collect();
    if by_id.len() != vocab.len() || by_id.keys().zip(0..).any(|(&id, at)| id != at) {
        return Err(bad("has gaps in its ids"));
    }
    let merges = file["model"]["merges"].as_array().ok_or_else(|| bad("has no merges"))?;
    let line = |merge: &Value| match merge {
        Value::Array(pair) => Some(format!("{} {}", pair.first()?.as_str()?, pair.get(1)?.as_str()?)),
        other => other.as_str().map(str::to_owned),
    };
    let merges: Option<Vec<String>> = merges.iter().map(line).collect();
    const NORMAL: i32 = 1;
    const CONTROL: i32 = 3;
    let is_special = |text: &str| plan.special_tokens.iter().any(|special| special == text);
    let kind = |text: &&str| if is_special(text) { CONTROL } else { NORMAL };
    let (bos, eos) = (tokenizer.bos(), tokenizer.eos());
    let spec = VocabSpec {
        model: "gpt2".to_owned(),
        pre: Some("gpt-2".to_owned()),
        token_types: Some(by_id.values().map(kind).collect()),
        tokens: by_id.values().collect(),
        merges: Some(merges.ok_or_else(|| bad("has merges that are not pairs"))?.iter().collect()),
        specials: SpecialIds { bos, eos, ..SpecialIds::default() },
        add_bos: Some(true),
        chat_template: plan.chat_template.clone(),
        ..VocabSpec::default()
    };
    Tokenizer::from_spec(&spec).map_err(TokenizeError::Unusable)?;
    Ok(spec)
}
