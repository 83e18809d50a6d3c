//! Builds a tokenizer from the files of a Hugging Face folder.

use std::collections::HashMap;
use std::sync::Arc;

use serde::de::DeserializeOwned;
use serde_json::Value as Json;
use tokenizers::models::bpe::{BPE, Merges};
use tokenizers::models::wordpiece::WordPiece;
use tokenizers::{ModelWrapper, NormalizerWrapper, PreTokenizerWrapper};

use super::Tokenizer;
use super::build::{check_merge, end_ids};
use super::error::{TokenizerError, excerpt};
use super::json::{Config, ModelJson, TokenText, TokenizerJson};
use super::pieces::{PieceTable, Spelling, byte_of};
use super::pipeline::{PipelineParts, Pipelines, TextModel};
use super::spec::{MAX_TOKEN_BYTES, MAX_TOKENS, SpecialIds, TokenKind};

pub(super) const JSON: &str = "tokenizer.json";
pub(super) const CONFIG: &str = "tokenizer_config.json";

pub(super) fn tokenizer(
    tokenizer_json: &[u8],
    config_json: Option<&[u8]>,
) -> Result<Tokenizer, TokenizerError> {
    let mut file: TokenizerJson = parse(JSON, tokenizer_json)?;
    let config: Config = config_json.map(|bytes| parse(CONFIG, bytes)).transpose()?.unwrap_or_default();
    // Once they are in the vocabulary, added tokens get the ids of the file.
    for added in file.added_tokens.iter().filter(|added| !added.token.content.is_empty()) {
        file.model.vocab.0.entry(added.token.content.clone()).or_insert(added.id);
    }
    let spelled = spelled(&file)?;
    let pieces = pieces(&file, &spelled)?;
    let around = around(&file.post_processor, pieces.len())?;
    let ids = &file.model.vocab.0;
    let id = |text: &Option<TokenText>| text.as_ref().and_then(|text| ids.get(text.get()).copied());
    let specials = SpecialIds {
        bos: id(&config.bos_token),
        eos: id(&config.eos_token),
        unk: id(&config.unk_token),
        pad: id(&config.pad_token),
        sep: id(&config.sep_token),
        cls: id(&config.cls_token),
        mask: id(&config.mask_token),
        ..Default::default()
    };
    let pipelines = Pipelines::new(PipelineParts {
        normalizer: normalizer(file.normalizer)?,
        pre_tokenizer: pre_tokenizer(file.pre_tokenizer)?,
        added: file.added_tokens.into_iter().map(|added| added.token).collect(),
        is_byte_level: spelled.spelling == Spelling::ByteLevel,
        model: TextModel::Library(model(file.model)?),
    })?;
    Ok(Tokenizer {
        end_ids: end_ids(&pipelines, &pieces, &specials),
        prefix: with_flag(around.prefix, config.add_bos_token, specials.bos),
        suffix: with_flag(around.suffix, config.add_eos_token, specials.eos),
        chat_template: config.chat_template.and_then(|template| template.into_source()),
        pieces: Arc::new(pieces),
        pipelines,
        specials,
    })
}

pub(super) fn parse<T: DeserializeOwned>(file: &'static str, bytes: &[u8]) -> Result<T, TokenizerError> {
    serde_json::from_slice(bytes).map_err(|e| TokenizerError::BadFile { file, reason: e.to_string() })
}

fn part<T: DeserializeOwned>(json: Json) -> Result<Option<T>, TokenizerError> {
    serde_json::from_value(json).map_err(|e| TokenizerError::BadFile { file: JSON, reason: e.to_string() })
}

fn unsupported<T>(part: &'static str, found: &str) -> Result<T, TokenizerError> {
    Err(TokenizerError::Unsupported { part, found: found.to_owned() })
}

/// Limit on the steps of a normalizer or pre-tokenizer. Files in use have at most ten.
const MAX_STEPS: usize = 32;
/// Limit on the growth of a text in a normalizer or pre-tokenizer. A space written as in SentencePiece grows threefold.
const MAX_GROWTH: usize = 64;
/// Limit on the bytes that a normalizer prepends to a text.
const MAX_PREPENDED_BYTES: usize = 256;

/// Refuses steps that could make a text arbitrarily long or make the library panic.
fn check_steps(part: &'static str, json: &Json) -> Result<(), TokenizerError> {
    let mut steps = Vec::new();
    collect_steps(json, &mut steps);
    if steps.len() > MAX_STEPS {
        return unsupported(part, &format!("{} steps, at most {MAX_STEPS} are allowed", steps.len()));
    }
    let (mut growth, mut n_prepended) = (1usize, 0);
    for step in steps {
        let of_text = |json: &Json| json.as_str().map_or(0, str::len);
        growth = growth.saturating_mul(match step["type"].as_str() {
            Some("Replace") => {
                let (text, regex) = (&step["pattern"]["String"], &step["pattern"]["Regex"]);
                if of_text(text) + of_text(regex) == 0 {
                    return unsupported(part, "Replace with an empty pattern");
                }
                if let Some(regex) = regex.as_str().filter(|regex| !matches_text(regex)) {
                    let found = format!("Replace with a pattern that may match no text, {regex:?}");
                    return unsupported(part, &found);
                }
                // A match of a regular expression is one byte or more.
                of_text(&step["content"]).div_ceil(of_text(text).max(1)).max(1)
            }
            // A byte becomes a character of up to two bytes.
            Some("ByteLevel") => 2,
            // Chinese characters get a space on either side.
            Some("BertNormalizer") => 3,
            _ => 1,
        });
        if step["type"] == "Prepend" {
            n_prepended += of_text(&step["prepend"]);
        }
    }
    if growth > MAX_GROWTH {
        return unsupported(part, &format!("growth of a text by {growth}, at most {MAX_GROWTH} is allowed"));
    }
    if n_prepended > MAX_PREPENDED_BYTES {
        let found = format!("{n_prepended} bytes before a text, at most {MAX_PREPENDED_BYTES} are allowed");
        return unsupported(part, &found);
    }
    Ok(())
}

/// Whether every match of a regular expression is one character or more. The library loses track of positions after an
/// empty match. Patterns with look-around or back-references, which no model in use has here, count as if they could
/// match nothing.
fn matches_text(regex: &str) -> bool {
    let parsed = regex_syntax::parse(regex);
    parsed.is_ok_and(|pattern| pattern.properties().minimum_len().is_some_and(|len| len > 0))
}

/// The steps of sequences inside sequences, in order.
fn collect_steps<'a>(json: &'a Json, steps: &mut Vec<&'a Json>) {
    let lists = ["normalizers", "pretokenizers"].map(|list| json[list].as_array());
    match lists.into_iter().flatten().next() {
        Some(list) => list.iter().for_each(|step| collect_steps(step, steps)),
        None => steps.push(json),
    }
}

fn normalizer(json: Json) -> Result<Option<NormalizerWrapper>, TokenizerError> {
    check_steps("normalizer", &json)?;
    // The library panics on damaged tables, and no supported model has one.
    if mentions(&json, "Precompiled") {
        return unsupported("normalizer", "Precompiled");
    }
    part(json)
}

fn pre_tokenizer(json: Json) -> Result<Option<PreTokenizerWrapper>, TokenizerError> {
    check_steps("pre-tokenizer", &json)?;
    // The library panics when its length is 0, and no supported model has one.
    if mentions(&json, "FixedLength") {
        return unsupported("pre-tokenizer", "FixedLength");
    }
    part(json)
}

/// Returns whether a string value occurs anywhere inside.
fn mentions(json: &Json, text: &str) -> bool {
    match json {
        Json::String(found) => found == text,
        Json::Array(items) => items.iter().any(|item| mentions(item, text)),
        Json::Object(fields) => fields.values().any(|field| mentions(field, text)),
        Json::Null | Json::Bool(_) | Json::Number(_) => false,
    }
}

/// Iterates over the steps of a part, which is a single step or a sequence.
fn steps<'a>(json: &'a Json, list: &str) -> impl Iterator<Item = &'a Json> {
    let (one, many) = match json[list].as_array() {
        Some(many) => (None, many.as_slice()),
        None => (Some(json), &[] as &[Json]),
    };
    one.into_iter().chain(many)
}

fn model(model: ModelJson) -> Result<ModelWrapper, TokenizerError> {
    let vocab = model.vocab.0;
    if model.merges.is_none() {
        let mut builder = WordPiece::builder();
        if let Some(prefix) = model.continuing_subword_prefix {
            builder = builder.continuing_subword_prefix(prefix);
        }
        if let Some(limit) = model.max_input_chars_per_word {
            builder = builder.max_input_chars_per_word(limit.min(MAX_TOKEN_BYTES));
        }
        let unk = model.unk_token.unwrap_or_else(|| "[UNK]".to_owned());
        if !vocab.contains_key(&unk) {
            return Err(TokenizerError::Missing { what: "the unknown token" });
        }
        let model = builder
            .vocab(vocab.into_iter().collect::<tokenizers::models::bpe::Vocab>())
            .unk_token(unk)
            .build();
        return model.map(ModelWrapper::WordPiece).map_err(TokenizerError::library("build the vocabulary"));
    }
    let affixes = [&model.continuing_subword_prefix, &model.end_of_word_suffix];
    if affixes.into_iter().flatten().any(|affix| !affix.is_empty()) {
        return unsupported("model", "BPE with a prefix or suffix on subwords");
    }
    let mut merges = Merges::new();
    let mut merged = String::new();
    for (index, merge) in model.merges.iter().flatten().enumerate() {
        let Some((left, right)) = merge.split() else {
            return Err(TokenizerError::BadMerge { index, found: "no blank".to_owned() });
        };
        check_merge(index, left, right, &mut merged, |token| vocab.contains_key(token))?;
        merges.push((left.to_owned(), right.to_owned()));
    }
    let unk = model.unk_token.filter(|unk| vocab.contains_key(unk));
    let mut builder = BPE::builder()
        .vocab_and_merges(vocab.into_iter().collect::<tokenizers::models::bpe::Vocab>(), merges)
        .fuse_unk(model.fuse_unk.unwrap_or(false))
        .byte_fallback(model.byte_fallback.unwrap_or(false))
        .ignore_merges(model.ignore_merges.unwrap_or(false));
    if let Some(unk) = unk {
        builder = builder.unk_token(unk);
    }
    builder.build().map(ModelWrapper::BPE).map_err(TokenizerError::library("build the vocabulary"))
}

/// How tokens spell text, and whether encoding prepends a space.
struct Spelled {
    spelling: Spelling,
    space_in_front: bool,
}

fn spelled(file: &TokenizerJson) -> Result<Spelled, TokenizerError> {
    let is_word_piece = match (file.model.kind.as_deref(), &file.model.merges) {
        (Some("BPE") | None, Some(_)) => false,
        (Some("BPE"), None) => return Err(TokenizerError::Missing { what: "merges" }),
        (Some("WordPiece"), None) | (None, None) => true,
        (Some(other), _) => return unsupported("model", &excerpt(other)),
    };
    let step = |name: &str| steps(&file.decoder, "decoders").find(|step| step["type"] == name);
    let spelled = |spelling, space_in_front| Ok(Spelled { spelling, space_in_front });
    if is_word_piece {
        return spelled(Spelling::WordPiece, true);
    }
    if step("ByteLevel").is_some() {
        return spelled(Spelling::ByteLevel, false);
    }
    if let Some(metaspace) = step("Metaspace") {
        return spelled(Spelling::SentencePiece, metaspace["prepend_scheme"] != "never");
    }
    if step("Replace").is_some() || file.model.byte_fallback == Some(true) {
        return spelled(Spelling::SentencePiece, step("Strip").is_some_and(|strip| strip["start"] != 0));
    }
    unsupported("decoder", &excerpt(&file.decoder.to_string()))
}

/// Control tokens of Gemma 4 that stay visible in a reply: they delimit thinking and tool calls. They are not parsed in
/// users' text.
const VISIBLE: [&str; 7] = [
    "<|channel>",
    "<channel|>",
    "<|tool_call>",
    "<tool_call|>",
    "<|tool_response>",
    "<tool_response|>",
    "<|\"|>",
];

fn pieces(file: &TokenizerJson, spelled: &Spelled) -> Result<PieceTable, TokenizerError> {
    let vocab = &file.model.vocab.0;
    let n_tokens = vocab.values().max().map_or(0, |&id| id as usize + 1);
    if n_tokens == 0 {
        return Err(TokenizerError::Missing { what: "any token" });
    }
    if n_tokens > MAX_TOKENS {
        return Err(TokenizerError::TooManyTokens { n_tokens, limit: MAX_TOKENS });
    }
    let added: HashMap<&str, bool> =
        file.added_tokens.iter().map(|added| (added.token.content.as_str(), added.token.special)).collect();
    let has_bytes = file.model.byte_fallback == Some(true);
    let mut texts: Vec<(&str, TokenKind)> = vec![("", TokenKind::Unused); n_tokens];
    for (text, &id) in vocab {
        if text.len() > MAX_TOKEN_BYTES {
            return Err(TokenizerError::TokenTooLong {
                id: id as usize,
                len: text.len(),
                limit: MAX_TOKEN_BYTES,
            });
        }
        let kind = match added.get(text.as_str()) {
            Some(true) if VISIBLE.contains(&text.as_str()) => TokenKind::UserDefined,
            Some(true) => TokenKind::Control,
            Some(false) => TokenKind::UserDefined,
            None if has_bytes && byte_of(text).is_some() => TokenKind::Byte,
            None => TokenKind::Normal,
        };
        let slot = &mut texts[id as usize];
        if !slot.0.is_empty() {
            let (first, second) = (excerpt(slot.0.min(text)), excerpt(slot.0.max(text)));
            return Err(TokenizerError::DuplicateId { id, first, second });
        }
        *slot = (text, kind);
    }
    let mut pieces = PieceTable::new(spelled.space_in_front);
    for (text, kind) in texts {
        pieces.push(text, kind, spelled.spelling);
    }
    Ok(pieces)
}

/// Ids before and after a text.
#[derive(Default)]
struct Around {
    prefix: Vec<u32>,
    suffix: Vec<u32>,
}

/// Returns the ids that the post-processor puts around a text.
fn around(post_processor: &Json, n_tokens: usize) -> Result<Around, TokenizerError> {
    let as_id = |json: &Json| json.as_u64().and_then(|id| u32::try_from(id).ok());
    let mut around = Around::default();
    for step in steps(post_processor, "processors") {
        match step["type"].as_str() {
            Some("TemplateProcessing") => {
                let mut ids = &mut around.prefix;
                for piece in step["single"].as_array().into_iter().flatten() {
                    if let Some(name) = piece["SpecialToken"]["id"].as_str() {
                        let special = step["special_tokens"][name]["ids"].as_array();
                        ids.extend(special.into_iter().flatten().filter_map(as_id));
                    } else {
                        ids = &mut around.suffix;
                    }
                }
            }
            Some("BertProcessing" | "RobertaProcessing") => {
                around.prefix.extend(as_id(&step["cls"][1]));
                around.suffix.extend(as_id(&step["sep"][1]));
            }
            _ => {}
        }
    }
    match around.prefix.iter().chain(&around.suffix).find(|&&id| id as usize >= n_tokens) {
        Some(&id) => Err(TokenizerError::SpecialOutside { what: "post-processor", id, n_tokens }),
        None => Ok(around),
    }
}

/// Applies the configuration's flag for BOS or EOS, which overrides the post-processor.
fn with_flag(around: Vec<u32>, flag: Option<bool>, id: Option<u32>) -> Vec<u32> {
    match (flag, id) {
        (Some(true), Some(id)) if !around.contains(&id) => vec![id],
        (Some(false), Some(id)) => around.into_iter().filter(|&other| other != id).collect(),
        _ => around,
    }
}
