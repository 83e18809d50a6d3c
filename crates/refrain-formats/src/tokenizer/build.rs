//! Builds a tokenizer from a vocabulary.

use std::sync::Arc;

use tokenizers::models::bpe::{BPE, Merges, Vocab};
use tokenizers::models::wordpiece::WordPiece;
use tokenizers::normalizers::{BertNormalizer, Prepend, Replace, Sequence};
use tokenizers::pre_tokenizers::bert::BertPreTokenizer;
use tokenizers::{AddedToken, ModelWrapper, NormalizerWrapper, PreTokenizerWrapper};

use super::Tokenizer;
use super::error::{TokenizerError, excerpt};
use super::pieces::{BLANK, PieceTable, Spelling, byte_of};
use super::pipeline::{PipelineParts, Pipelines, TextModel};
use super::pre::Pre;
use super::scored::{ScoredPieces, plain_blanks};
use super::spec::{SpecialIds, TokenKind, VocabSpec, Vocabulary};

const KNOWN_MODELS: &[&str] = &["gpt2", "llama", "bert", "gemma4"];

/// Texts that end a turn in some family of models.
const END_OF_TURN: &[&str] = &[
    "<|im_end|>",
    "<|eot_id|>",
    "<end_of_turn>",
    "<turn|>",
    "<|end|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|eot|>",
    "<|return|>",
    "<|call|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "<end_of_utterance>",
    "<｜end▁of▁sentence｜>",
];
/// Texts that end generation if they are control tokens. Otherwise they are ordinary text.
const END_IF_CONTROL: &[&str] = &["<|endoftext|>", "<eos>", "[EOS]"];

pub(super) fn tokenizer(spec: &VocabSpec) -> Result<Tokenizer, TokenizerError> {
    let vocabulary = spec.check()?;
    match spec.model.as_str() {
        "gpt2" => byte_level(spec, &vocabulary),
        "llama" => sentence_piece(spec, vocabulary),
        "bert" => word_piece(spec, &vocabulary),
        "gemma4" => merged_pieces(spec, &vocabulary),
        other => Err(unknown_model(other)),
    }
}

/// Checks that a kind of tokenizer is supported.
pub(super) fn check_model(model: &str) -> Result<(), TokenizerError> {
    if KNOWN_MODELS.contains(&model) { Ok(()) } else { Err(unknown_model(model)) }
}

fn unknown_model(model: &str) -> TokenizerError {
    TokenizerError::UnknownModel { found: model.to_owned(), known: KNOWN_MODELS }
}

fn byte_level(spec: &VocabSpec, vocabulary: &Vocabulary<'_>) -> Result<Tokenizer, TokenizerError> {
    if spec.pre.is_none() {
        tracing::warn!(
            "the vocabulary names no pre-tokenizer: using the default one, which may split text differently"
        );
    }
    let pre = Pre::by_name(spec.pre.as_deref())?;
    let merges = listed_merges(spec, vocabulary)?;
    let texts = vocabulary.tokens.iter().zip(0..).filter(|(text, _)| !text.is_empty());
    let vocab: Vocab = texts.map(|(text, id)| (text.to_owned(), id)).collect();
    let mut builder = BPE::builder().vocab_and_merges(vocab, merges).ignore_merges(pre.ignore_merges);
    // Some files name the end-of-text token as unknown token, which must not appear inside a text.
    if let Some(unk) = spec.specials.unk.filter(|&id| vocabulary.kinds[id as usize] == TokenKind::Unknown) {
        builder = builder.unk_token(vocabulary.text(unk).to_owned());
    }
    let bpe = builder.build().map_err(TokenizerError::library("build the vocabulary"))?;
    let mut pieces = PieceTable::new(false);
    for (text, &kind) in vocabulary.tokens.iter().zip(&vocabulary.kinds) {
        pieces.push(text, kind, Spelling::ByteLevel);
    }
    let pipelines = Pipelines::new(PipelineParts {
        model: TextModel::Library(ModelWrapper::BPE(bpe)),
        normalizer: None,
        pre_tokenizer: Some(pre.build()?),
        added: added_tokens(vocabulary, str::to_owned),
        is_byte_level: true,
    })?;
    Ok(assemble(
        spec,
        pipelines,
        pieces,
        spec.specials,
        SpecialDefaults { add_bos: pre.add_bos, add_sep: false },
    ))
}

fn listed_merges(spec: &VocabSpec, vocabulary: &Vocabulary<'_>) -> Result<Merges, TokenizerError> {
    let merges = spec.merges.as_ref().ok_or(TokenizerError::Missing { what: "tokenizer.ggml.merges" })?;
    let mut parsed = Merges::with_capacity(merges.len());
    let mut merged = String::new();
    for (index, merge) in merges.iter().enumerate() {
        // The first token is never empty, so a leading space belongs to it.
        let blank = merge.char_indices().skip(1).find(|&(_, c)| c == ' ').map(|(idx, _)| idx);
        let Some((left, right)) =
            blank.map(|idx| (&merge[..idx], &merge[idx + 1..])).filter(|(_, r)| !r.is_empty())
        else {
            return Err(TokenizerError::BadMerge { index, found: excerpt(merge) });
        };
        check_merge(index, left, right, &mut merged, |token| vocabulary.id(token).is_some())?;
        parsed.push((left.to_owned(), right.to_owned()));
    }
    Ok(parsed)
}

/// Checks that a merge joins two tokens into a third; `merged` is scratch space.
pub(super) fn check_merge(
    index: usize,
    left: &str,
    right: &str,
    merged: &mut String,
    is_token: impl Fn(&str) -> bool,
) -> Result<(), TokenizerError> {
    merged.clear();
    merged.push_str(left);
    merged.push_str(right);
    match [left, right, merged.as_str()].into_iter().find(|token| !is_token(token)) {
        Some(token) => Err(TokenizerError::MergeUnknownToken { index, token: excerpt(token) }),
        None => Ok(()),
    }
}

fn sentence_piece(spec: &VocabSpec, mut vocabulary: Vocabulary<'_>) -> Result<Tokenizer, TokenizerError> {
    let scores = spec.scores.as_ref().ok_or(TokenizerError::Missing { what: "tokenizer.ggml.scores" })?;
    if let Some(id) = scores.iter().position(|score| score.is_nan()) {
        return Err(TokenizerError::BadScore { id, found: scores[id] });
    }
    if spec.token_types.is_none() {
        for (text, kind) in vocabulary.tokens.iter().zip(&mut vocabulary.kinds) {
            if byte_of(text).is_some() {
                *kind = TokenKind::Byte;
            }
        }
    }
    let specials = with_names(spec.specials, &vocabulary, &["<s>", "<bos>"], &["</s>", "<eos>"], "<unk>");
    let add_space = spec.add_space_prefix.unwrap_or(true);
    let mut pieces = PieceTable::new(add_space);
    for (text, &kind) in vocabulary.tokens.iter().zip(&vocabulary.kinds) {
        pieces.push(text, kind, Spelling::SentencePiece);
    }
    let pipelines = Pipelines::new(PipelineParts {
        normalizer: Some(blanks_shown(add_space)?),
        pre_tokenizer: None,
        added: added_tokens(&vocabulary, plain_blanks),
        model: TextModel::Scored(ScoredPieces::new(vocabulary, scores, specials.unk)),
        is_byte_level: false,
    })?;
    Ok(assemble(spec, pipelines, pieces, specials, SpecialDefaults { add_bos: true, add_sep: false }))
}

/// Tokens spelled as in SentencePiece, with a list of merges. Merges apply to the whole text, which is not split into
/// words first. Characters without a token are encoded byte by byte.
fn merged_pieces(spec: &VocabSpec, vocabulary: &Vocabulary<'_>) -> Result<Tokenizer, TokenizerError> {
    let merges = listed_merges(spec, vocabulary)?;
    let texts = vocabulary.tokens.iter().zip(0..).filter(|(text, _)| !text.is_empty());
    let vocab: Vocab = texts.map(|(text, id)| (text.to_owned(), id)).collect();
    let specials = with_names(spec.specials, vocabulary, &["<bos>"], &["<eos>"], "<unk>");
    let mut builder = BPE::builder().vocab_and_merges(vocab, merges).byte_fallback(true).fuse_unk(true);
    if let Some(unk) = specials.unk {
        builder = builder.unk_token(vocabulary.text(unk).to_owned());
    }
    let bpe = builder.build().map_err(TokenizerError::library("build the vocabulary"))?;
    let add_space = spec.add_space_prefix.unwrap_or(false);
    let mut pieces = PieceTable::new(add_space);
    for (text, &kind) in vocabulary.tokens.iter().zip(&vocabulary.kinds) {
        // Not every file marks its byte tokens.
        let is_byte = kind == TokenKind::Normal && byte_of(text).is_some();
        pieces.push(text, if is_byte { TokenKind::Byte } else { kind }, Spelling::SentencePiece);
    }
    // Tokens of several spaces match after normalisation, when spaces are written as in the vocabulary.
    let written = |token: AddedToken| {
        let has_blanks = token.content.contains(BLANK);
        token.normalized(has_blanks)
    };
    let added = added_tokens(vocabulary, str::to_owned).into_iter().map(written).collect();
    let pipelines = Pipelines::new(PipelineParts {
        normalizer: Some(blanks_shown(add_space)?),
        pre_tokenizer: None,
        added,
        model: TextModel::Library(ModelWrapper::BPE(bpe)),
        is_byte_level: false,
    })?;
    Ok(assemble(spec, pipelines, pieces, specials, SpecialDefaults { add_bos: true, add_sep: false }))
}

/// Returns a normalizer that writes spaces as SentencePiece does, optionally with one before the text.
fn blanks_shown(in_front: bool) -> Result<NormalizerWrapper, TokenizerError> {
    let blanks =
        Replace::new(" ", BLANK.to_string()).map_err(TokenizerError::library("build the normalizer"))?;
    let mut normalizers = vec![NormalizerWrapper::Replace(blanks)];
    if in_front {
        normalizers.insert(0, NormalizerWrapper::Prepend(Prepend::new(BLANK.to_string())));
    }
    Ok(NormalizerWrapper::Sequence(Sequence::new(normalizers)))
}

fn word_piece(spec: &VocabSpec, vocabulary: &Vocabulary<'_>) -> Result<Tokenizer, TokenizerError> {
    let mut specials = with_names(spec.specials, vocabulary, &["[CLS]"], &[], "[UNK]");
    let by_name = |name: &str| vocabulary.id(name);
    specials.bos = spec.specials.cls.or(specials.bos);
    specials.cls = specials.bos;
    specials.sep = specials.sep.or_else(|| by_name("[SEP]"));
    let unk = specials.unk.ok_or(TokenizerError::Missing { what: "the unknown token" })?;
    let mut pieces = PieceTable::new(true);
    let mut vocab = Vocab::default();
    for (id, (text, &kind)) in vocabulary.tokens.iter().zip(&vocabulary.kinds).enumerate() {
        let text = word_piece_text(text, kind);
        pieces.push(&text, kind, Spelling::WordPiece);
        vocab.entry(text).or_insert(id as u32);
    }
    let model = WordPiece::builder()
        .vocab(vocab)
        .unk_token(word_piece_text(vocabulary.text(unk), vocabulary.kinds[unk as usize]))
        .build()
        .map_err(TokenizerError::library("build the vocabulary"))?;
    let lowercase = spec.lowercase.unwrap_or(true);
    let normalizer = BertNormalizer::new(true, true, spec.strip_accents.or(Some(lowercase)), lowercase);
    let pipelines = Pipelines::new(PipelineParts {
        model: TextModel::Library(ModelWrapper::WordPiece(model)),
        normalizer: Some(NormalizerWrapper::BertNormalizer(normalizer)),
        pre_tokenizer: Some(PreTokenizerWrapper::BertPreTokenizer(BertPreTokenizer)),
        added: added_tokens(vocabulary, str::to_owned),
        is_byte_level: false,
    })?;
    Ok(assemble(spec, pipelines, pieces, specials, SpecialDefaults { add_bos: true, add_sep: true }))
}

/// Converts from GGUF, which marks the start of words, to WordPiece, which marks their continuation. Names in brackets
/// are unchanged.
fn word_piece_text(text: &str, kind: TokenKind) -> String {
    let is_name =
        kind != TokenKind::Normal || (text.starts_with('[') && text.ends_with(']') && text.len() > 2);
    match text.strip_prefix(BLANK) {
        _ if is_name => text.to_owned(),
        Some(start) => start.to_owned(),
        None => format!("##{text}"),
    }
}

/// Returns the tokens that are matched anywhere in the raw text, before normalisation and merging.
fn added_tokens(vocabulary: &Vocabulary<'_>, text_of: impl Fn(&str) -> String) -> Vec<AddedToken> {
    let tokens = vocabulary.tokens.iter().zip(&vocabulary.kinds);
    let added = tokens.filter_map(|(text, kind)| match kind {
        TokenKind::Control | TokenKind::Unknown => Some(AddedToken::from(text, true).normalized(false)),
        TokenKind::UserDefined => Some(AddedToken::from(text_of(text), false).normalized(false)),
        TokenKind::Normal | TokenKind::Unused | TokenKind::Byte => None,
    });
    added.filter(|token| !token.content.is_empty()).collect()
}

/// Fills in missing ids of special tokens by their usual names.
///
/// User-defined tokens are skipped: in some vocabularies `<s>` is an HTML tag.
fn with_names(
    mut specials: SpecialIds,
    vocabulary: &Vocabulary<'_>,
    bos: &[&str],
    eos: &[&str],
    unk: &str,
) -> SpecialIds {
    let is_special = |id: &u32| vocabulary.kinds[*id as usize] != TokenKind::UserDefined;
    let find = |names: &[&str]| names.iter().find_map(|name| vocabulary.id(name).filter(is_special));
    specials.bos = specials.bos.or_else(|| find(bos));
    specials.eos = specials.eos.or_else(|| find(eos));
    specials.unk = specials.unk.or_else(|| find(&[unk]));
    specials
}

struct SpecialDefaults {
    add_bos: bool,
    add_sep: bool,
}

fn assemble(
    spec: &VocabSpec,
    pipelines: Pipelines,
    pieces: PieceTable,
    specials: SpecialIds,
    defaults: SpecialDefaults,
) -> Tokenizer {
    let add_bos = spec.add_bos.unwrap_or(defaults.add_bos);
    let add_eos = spec.add_eos.unwrap_or(false);
    let add_sep = spec.add_sep.unwrap_or(defaults.add_sep);
    let suffix = [specials.sep.filter(|_| add_sep), specials.eos.filter(|_| add_eos)];
    Tokenizer {
        end_ids: end_ids(&pipelines, &pieces, &specials),
        prefix: specials.bos.filter(|_| add_bos).into_iter().collect(),
        suffix: suffix.into_iter().flatten().collect(),
        chat_template: spec.chat_template.clone(),
        pieces: Arc::new(pieces),
        pipelines,
        specials,
    }
}

/// Returns the sorted ids that end generation.
pub(super) fn end_ids(pipelines: &Pipelines, pieces: &PieceTable, specials: &SpecialIds) -> Vec<u32> {
    // In the harmony format, `<|end|>` ends a message, and the next one of the same turn may follow.
    let is_harmony = ["<|return|>", "<|call|>"].iter().all(|name| pipelines.token_id(name).is_some());
    let ends = |name: &&&str| !(is_harmony && **name == "<|end|>");
    let named = END_OF_TURN.iter().filter(ends).filter_map(|name| pipelines.token_id(name));
    let is_control = |id: &u32| pieces.kind(*id) == Some(TokenKind::Control);
    let control = END_IF_CONTROL.iter().filter_map(|name| pipelines.token_id(name)).filter(is_control);
    let roles = [specials.eos, specials.eot, specials.eom].into_iter().flatten();
    let mut ids: Vec<u32> = named.chain(control).chain(roles).collect();
    ids.sort_unstable();
    ids.dedup();
    ids
}
