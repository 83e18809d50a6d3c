//! Round trips of vocabularies through GGUF files.

mod tokenizer_common;

use refrain_formats::gguf::{Array, Gguf, GgufWriter, MetadataValue};
use refrain_formats::tokenizer::{Tokenizer, TokenizerError, TokenizerSummary, VocabSpec};
use refrain_tensor::Bytes;
use tokenizer_common::{byte_level, sentence_piece};

fn write(spec: &VocabSpec) -> GgufWriter {
    let mut writer = GgufWriter::new();
    let mut set = |key: &str, value: Option<MetadataValue>| {
        if let Some(value) = value {
            writer.set(&format!("tokenizer.{key}"), value).unwrap();
        }
    };
    set("ggml.model", Some(spec.model.as_str().into()));
    set("ggml.pre", spec.pre.as_deref().map(Into::into));
    set("ggml.tokens", Some(spec.tokens.clone().into()));
    set("ggml.scores", spec.scores.clone().map(|v| Array::F32(v.into()).into()));
    set("ggml.token_type", spec.token_types.clone().map(|v| Array::I32(v.into()).into()));
    set("ggml.merges", spec.merges.clone().map(Into::into));
    set("ggml.bos_token_id", spec.specials.bos.map(Into::into));
    set("ggml.eos_token_id", spec.specials.eos.map(Into::into));
    set("ggml.unknown_token_id", spec.specials.unk.map(Into::into));
    set("ggml.add_bos_token", spec.add_bos.map(Into::into));
    set("ggml.add_space_prefix", spec.add_space_prefix.map(Into::into));
    set("chat_template", spec.chat_template.as_deref().map(Into::into));
    writer
}

fn read(writer: &GgufWriter) -> Gguf {
    Gguf::from_named_bytes("some.gguf", Bytes::new(writer.to_vec())).unwrap()
}

#[test]
fn a_vocabulary_is_read_as_it_was_written() {
    let template = Some("{{ bos_token }}".to_owned());
    for spec in [VocabSpec { chat_template: template, ..byte_level() }, sentence_piece()] {
        let gguf = read(&write(&spec));
        assert_eq!(VocabSpec::from_gguf(gguf.metadata()).unwrap(), spec);
        let tokenizer = Tokenizer::from_gguf(gguf.metadata()).unwrap();
        let ids = Tokenizer::from_spec(&spec).unwrap().encode("hello the <tool>", true, true).unwrap();
        assert_eq!(tokenizer.encode("hello the <tool>", true, true).unwrap(), ids);
        assert_eq!(tokenizer.chat_template(), spec.chat_template.as_deref());
    }
}

#[test]
fn a_summary_matches_the_tokenizer_and_ignores_broken_texts() {
    let template = Some("{{ bos_token }}".to_owned());
    for spec in [VocabSpec { chat_template: template, ..byte_level() }, sentence_piece()] {
        let gguf = read(&write(&spec));
        let summary = TokenizerSummary::from_gguf(gguf.metadata()).unwrap();
        let tokenizer = Tokenizer::from_gguf(gguf.metadata()).unwrap();
        assert_eq!(summary.n_tokens, tokenizer.vocab_size());
        assert_eq!(summary.has_chat_template, tokenizer.chat_template().is_some());
        assert!(summary.kind.starts_with(&spec.model), "{}", summary.kind);
    }
    let twice = VocabSpec { tokens: ["a", "a"].into_iter().collect(), ..sentence_piece() };
    let twice =
        VocabSpec { scores: Some(vec![0.0; 2]), token_types: None, specials: <_>::default(), ..twice };
    let gguf = read(&write(&twice));
    assert_eq!(TokenizerSummary::from_gguf(gguf.metadata()).unwrap().n_tokens, 2);
    assert!(Tokenizer::from_gguf(gguf.metadata()).is_err());
    let unknown = VocabSpec { pre: Some("nobody-knows".to_owned()), ..byte_level() };
    let error = TokenizerSummary::from_gguf(read(&write(&unknown)).metadata()).unwrap_err();
    assert!(error.to_string().contains("nobody-knows"), "{error}");
}

#[test]
fn missing_and_mistyped_keys_are_named() {
    let error = Tokenizer::from_gguf(read(&GgufWriter::new()).metadata()).unwrap_err();
    assert_eq!(error.to_string(), "no tokenizer: tokenizer.ggml.model is missing");
    let mut writer = GgufWriter::new();
    writer.set("tokenizer.ggml.model", "gpt2").unwrap();
    let error = Tokenizer::from_gguf(read(&writer).metadata()).unwrap_err();
    assert_eq!(error.to_string(), "no tokenizer: tokenizer.ggml.tokens is missing");
    assert!(error.hint().is_some());
    writer.set("tokenizer.ggml.tokens", 7u32).unwrap();
    let error = Tokenizer::from_gguf(read(&writer).metadata()).unwrap_err();
    assert!(matches!(error, TokenizerError::Metadata(_)));
    let text = error.to_string();
    assert!(text.contains("some.gguf") && text.contains("tokenizer.ggml.tokens"), "{text}");
}

#[test]
fn tokenizers_and_streams_can_move_between_threads() {
    fn is_shared<T: Send + Sync>(_: &T) {}
    let tokenizer = Tokenizer::from_spec(&byte_level()).unwrap();
    is_shared(&tokenizer);
    is_shared(&tokenizer.stream());
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| assert_eq!(tokenizer.encode("the", false, false).unwrap(), [116, 256]));
        }
    });
}
