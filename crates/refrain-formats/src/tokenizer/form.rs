//! Conversion of tokenizers between `tokenizer.json` and GGUF vocabularies.
//!
//! Byte-level vocabularies convert both ways. The result is compared with the source on a text that all known tokenizers
//! split differently, so that no conversion silently changes how words are split.

use std::borrow::Cow;

use serde_json::{Map, Value as Json, json};

use super::error::TokenizerError;
use super::files::{CONFIG, JSON, parse};
use super::json::TokenizerJson;
use super::pre::{Pre, distinct_pre_tokenizers};
use super::spec::{TokenKind, VocabSpec};
use super::{SpecialIds, Tokenizer};

const GGUF: &str = "a GGUF vocabulary";

/// Text that known tokenizers split differently: contractions, numbers, scripts, spaces and line ends.
const PROBE: &str = " Don't we'LL I'M 1234567 12.5% 0x1F a1b2\n\n  three   blanks\t\ttabs \r\n end \n\n\n!!! ...\
    \n$x+=~<y>^|`z`; a_b-c/d foo(bar) naïve Ärger ÉCOLE straße Ω≈ç√ Привет мир 中文字符 日本語テキスト カタカナ 한국어 \
    नमस्ते สวัสดี שלום e\u{301} 🦀👩‍🚀 \u{a0}\u{3000} ｆｕｌｌ １２３ camelCaseWord HTTPServer iPhone's \u{2019}s x²  \n ";

/// A tokenizer in one of its file formats.
#[derive(Debug, Clone)]
pub enum TokenizerForm {
    /// The contents of `tokenizer.json` and `tokenizer_config.json`.
    Files {
        /// `tokenizer.json`.
        json: Vec<u8>,
        /// `tokenizer_config.json`, if it exists.
        config: Option<Vec<u8>>,
    },
    /// The vocabulary of a GGUF file.
    Vocab(Box<VocabSpec>),
}

/// A tokenizer as the files of a Hugging Face folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenizerFiles<'a> {
    /// The content of `tokenizer.json`.
    pub json: Cow<'a, [u8]>,
    /// The content of `tokenizer_config.json`, if it exists.
    pub config: Option<Cow<'a, [u8]>>,
}

impl TokenizerForm {
    /// Builds the tokenizer.
    pub fn build(&self) -> Result<Tokenizer, TokenizerError> {
        match self {
            Self::Files { json, config } => Tokenizer::from_files(json, config.as_deref()),
            Self::Vocab(spec) => Tokenizer::from_spec(spec),
        }
    }

    /// Sets the chat template, which some models store in a separate file.
    pub fn with_chat_template(self, template: &str) -> Result<Self, TokenizerError> {
        match self {
            Self::Files { json, config } => {
                let mut object: Map<String, Json> = match &config {
                    Some(config) => parse(CONFIG, config)?,
                    None => Map::new(),
                };
                object.insert("chat_template".into(), template.into());
                Ok(Self::Files { json, config: Some(Json::Object(object).to_string().into_bytes()) })
            }
            Self::Vocab(mut spec) => {
                spec.chat_template = Some(template.to_owned());
                Ok(Self::Vocab(spec))
            }
        }
    }

    /// Converts to a GGUF vocabulary.
    pub fn to_spec(&self) -> Result<Cow<'_, VocabSpec>, TokenizerError> {
        match self {
            Self::Vocab(spec) => Ok(Cow::Borrowed(spec)),
            Self::Files { json, config } => spec_of(json, config.as_deref()).map(Cow::Owned),
        }
    }

    /// Converts to `tokenizer.json` and `tokenizer_config.json`.
    pub fn to_files(&self) -> Result<TokenizerFiles<'_>, TokenizerError> {
        match self {
            Self::Files { json, config } => {
                Ok(TokenizerFiles { json: json.as_slice().into(), config: config.as_deref().map(Into::into) })
            }
            Self::Vocab(spec) => {
                let (json, config) = files_of(spec)?;
                Ok(TokenizerFiles {
                    json: json.into_bytes().into(),
                    config: Some(config.into_bytes().into()),
                })
            }
        }
    }
}

fn spec_of(json: &[u8], config: Option<&[u8]>) -> Result<VocabSpec, TokenizerError> {
    let no = |because: &str| TokenizerError::NoForm { form: GGUF, because: because.to_owned() };
    let tokenizer = Tokenizer::from_files(json, config)?;
    let file: TokenizerJson = parse(JSON, json)?;
    let is_byte_level =
        file.model.byte_fallback != Some(true) && file.decoder.to_string().contains("ByteLevel");
    let Some(merges) = file.model.merges.as_ref().filter(|_| is_byte_level) else {
        return Err(no("it is not a byte-level BPE; SentencePiece vocabularies need their scores, which \
                       tokenizer.json does not have"));
    };
    let merges: Option<Vec<String>> =
        merges.iter().map(|merge| merge.split().map(|(left, right)| format!("{left} {right}"))).collect();
    let merges = merges.ok_or_else(|| no("its merges are not pairs"))?;
    let n_tokens = tokenizer.vocab_size();
    let mut tokens = vec![String::new(); n_tokens];
    let added = file.added_tokens.iter().map(|added| (&added.token.content, added.id));
    for (text, id) in file.model.vocab.0.iter().map(|(text, id)| (text, *id)).chain(added) {
        if let Some(slot) = tokens.get_mut(id as usize) {
            slot.clone_from(text);
        }
    }
    for (id, text) in tokens.iter_mut().enumerate().filter(|(_, text)| text.is_empty()) {
        *text = format!("[PAD{id}]");
    }
    let kinds = (0..n_tokens as u32).map(|id| tokenizer.kind(id).unwrap_or(TokenKind::Unused).number());
    let mut spec = VocabSpec {
        model: "gpt2".to_owned(),
        token_types: Some(kinds.collect()),
        tokens: tokens.iter().collect(),
        merges: Some(merges.iter().collect()),
        specials: *tokenizer.specials(),
        add_bos: Some(tokenizer.add_bos()),
        chat_template: tokenizer.chat_template().map(str::to_owned),
        ..VocabSpec::default()
    };
    let ignores_merges = file.model.ignore_merges.unwrap_or(false);
    let expected = tokenizer.encode(PROBE, true, true)?;
    for name in distinct_pre_tokenizers() {
        if Pre::by_name(Some(name))?.ignore_merges != ignores_merges {
            continue;
        }
        spec.pre = Some(name.to_owned());
        let candidate = Tokenizer::from_spec(&spec)?;
        if candidate.encode(PROBE, true, true)? == expected {
            return Ok(spec);
        }
    }
    Err(no("no known pre-tokenizer splits words the same way"))
}

fn files_of(spec: &VocabSpec) -> Result<(String, String), TokenizerError> {
    let no = |because: &str| TokenizerError::NoForm { form: JSON, because: because.to_owned() };
    if spec.model != "gpt2" {
        return Err(no(
            "it is not a byte-level BPE; a SentencePiece vocabulary has scores instead of merges",
        ));
    }
    let tokenizer = Tokenizer::from_spec(spec)?;
    let pre = Pre::by_name(spec.pre.as_deref())?;
    let text = |id: Option<u32>| id.and_then(|id| spec.tokens.get(id as usize));
    let mut vocab = Map::new();
    let mut added = Vec::new();
    for (id, text) in spec.tokens.iter().enumerate().filter(|(_, text)| !text.is_empty()) {
        vocab.insert(text.to_owned(), id.into());
        let kind = tokenizer.kind(id as u32);
        let special = matches!(kind, Some(TokenKind::Control | TokenKind::Unknown));
        if special || kind == Some(TokenKind::UserDefined) {
            added.push(json!({
                "id": id, "content": text, "special": special, "single_word": false,
                "lstrip": false, "rstrip": false, "normalized": false,
            }));
        }
    }
    let merges: Vec<Json> = spec
        .merges
        .iter()
        .flat_map(|merges| merges.iter())
        .filter_map(|merge| merge.split_once(' ').map(|(left, right)| json!([left, right])))
        .collect();
    let bytes =
        json!({ "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true });
    let file = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": null,
        "pre_tokenizer": pre.to_json(), "post_processor": null, "decoder": bytes,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
            "ignore_merges": pre.ignore_merges, "vocab": vocab, "merges": merges,
        },
    });
    let SpecialIds { bos, eos, unk, pad, .. } = spec.specials;
    let mut config = json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": tokenizer.add_bos(),
        "clean_up_tokenization_spaces": false,
    });
    for (key, id) in [("bos_token", bos), ("eos_token", eos), ("unk_token", unk), ("pad_token", pad)] {
        if let Some(text) = text(id) {
            config[key] = text.into();
        }
    }
    if let Some(template) = &spec.chat_template {
        config["chat_template"] = template.as_str().into();
    }
    let (file, config) = (file.to_string(), config.to_string());
    let again = Tokenizer::from_files(file.as_bytes(), Some(config.as_bytes()))?;
    if again.encode(PROBE, true, true)? != tokenizer.encode(PROBE, true, true)? {
        return Err(no("it would split words differently"));
    }
    Ok((file, config))
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokenizers::pre_tokenizers::byte_level::ByteLevel;

    /// All bytes, and merges across most boundaries where some tokenizer splits.
    fn spec(pre: &str) -> VocabSpec {
        let mut tokens: Vec<String> = ByteLevel::alphabet().into_iter().map(String::from).collect();
        tokens.sort_unstable();
        let merges = [
            "1 2", "12 3", "123 4", "Ġ 1", "Ġ t", "Ġ Ġ", "ĠĠ Ġ", "' L", "'L L", "' t", "n 't", "! !", "!! !",
            "Ċ Ċ", "ĊĊ Ċ", "ĉ ĉ", "a 1", "e S", "P S", ". .", "Ġ !", "Ċ Ġ", "_ b", "a _",
        ];
        for merge in merges {
            tokens.push(merge.replace(' ', ""));
        }
        let n_text = tokens.len();
        tokens.extend(["<s>", "</s>", "<tool>"].map(str::to_owned));
        let mut types = vec![1; n_text];
        types.extend([3, 3, 4]);
        VocabSpec {
            model: "gpt2".into(),
            pre: Some(pre.into()),
            tokens: tokens.iter().collect(),
            token_types: Some(types),
            merges: Some(merges.iter().collect()),
            specials: SpecialIds {
                bos: Some(n_text as u32),
                eos: Some(n_text as u32 + 1),
                ..SpecialIds::default()
            },
            add_bos: Some(true),
            chat_template: Some("{{ messages }}".into()),
            ..VocabSpec::default()
        }
    }

    #[test]
    fn a_vocabulary_converts_to_files_and_back() {
        let text = "Don't say 1234, <tool> or </s>!!!\n\n  a_b";
        for pre in distinct_pre_tokenizers() {
            let first = TokenizerForm::Vocab(Box::new(spec(pre)));
            let TokenizerFiles { json, config } = first.to_files().unwrap();
            let files = TokenizerForm::Files { json: json.into_owned(), config: config.map(Cow::into_owned) };
            let spec_again = files.to_spec().unwrap().into_owned();
            assert_eq!(spec_again.chat_template, spec(pre).chat_template);
            assert_eq!(spec_again.tokens, spec(pre).tokens, "{pre}");
            let last = TokenizerForm::Vocab(Box::new(spec_again));
            let [a, b, c] = [&first, &files, &last].map(|form| {
                let tokenizer = form.build().unwrap();
                [tokenizer.encode(text, true, true).unwrap(), tokenizer.encode(PROBE, true, false).unwrap()]
            });
            assert!(a == b && b == c, "{pre}");
        }
    }

    #[test]
    fn the_pre_tokenizer_is_found_by_its_behaviour() {
        for pre in ["gpt-2", "llama-bpe", "qwen2"] {
            let (json, config) = files_of(&spec(pre)).unwrap();
            let found = spec_of(json.as_bytes(), Some(config.as_bytes())).unwrap();
            assert_eq!(found.pre.as_deref(), Some(pre));
        }
    }

    #[test]
    fn tokenizers_without_another_form_are_refused() {
        let scored = VocabSpec { model: "llama".into(), ..spec("gpt-2") };
        let error = files_of(&scored).unwrap_err();
        assert!(error.to_string().contains("tokenizer.json") && error.hint().is_some(), "{error}");
        let (json, config) = files_of(&spec("gpt-2")).unwrap();
        let cut = json.replace("ByteLevel", "Metaspace");
        assert!(spec_of(cut.as_bytes(), Some(config.as_bytes())).is_err());
    }
}
