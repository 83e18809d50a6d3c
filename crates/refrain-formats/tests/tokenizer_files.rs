//! Tokenizers of Hugging Face folders.

mod tokenizer_common;

use proptest::prelude::*;
use refrain_formats::tokenizer::{Tokenizer, TokenizerError, TokenizerSummary, VocabSpec};
use serde_json::{Value, json};
use tokenizer_common::{byte_level, sentence_piece, word_piece};

/// The vocabulary of a spec as a `tokenizer.json`.
fn to_json(spec: &VocabSpec, model: Value, pipeline: Value) -> Value {
    let types = spec.token_types.as_ref().unwrap();
    let added: Vec<Value> = (spec.tokens.iter().enumerate())
        .filter(|&(id, _)| [3, 4].contains(&types[id]))
        .map(|(id, text)| {
            json!({"id": id, "content": text.replace('▁', " "), "special": types[id] == 3, "normalized": false,
                   "single_word": false, "lstrip": false, "rstrip": false})
        })
        .collect();
    let vocab: serde_json::Map<String, Value> = spec
        .tokens
        .iter()
        .enumerate()
        .map(|(id, text)| (if types[id] == 4 { text.replace('▁', " ") } else { text.to_owned() }, json!(id)))
        .collect();
    let mut file = json!({"version": "1.0", "truncation": {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0},
        "padding": null, "added_tokens": added, "model": model, "post_processor": null,
        "normalizer": null, "pre_tokenizer": null, "decoder": null});
    file["model"]["vocab"] = Value::Object(vocab);
    for (key, value) in pipeline.as_object().unwrap() {
        file[key] = value.clone();
    }
    file
}

fn byte_level_json() -> Value {
    let spec = byte_level();
    let merges: Vec<&str> = spec.merges.as_ref().unwrap().iter().collect();
    to_json(
        &spec,
        json!({"type": "BPE", "merges": merges}),
        json!({
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
            "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
            "post_processor": {"type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
                "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [260], "tokens": ["<|im_start|>"]}}},
        }),
    )
}

fn sentence_piece_json() -> Value {
    let merges = [["a", "n"], ["a", "a"], ["h", "e"], ["▁", "t"], ["▁t", "he"], ["▁", "▁"]];
    to_json(
        &sentence_piece(),
        json!({"type": "BPE", "merges": merges, "byte_fallback": true, "fuse_unk": true, "unk_token": "<unk>"}),
        json!({
            "normalizer": {"type": "Sequence", "normalizers": [
                {"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},
            "decoder": {"type": "Sequence", "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"},
                {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        }),
    )
}

fn load(file: &Value, config: Value) -> Result<Tokenizer, TokenizerError> {
    Tokenizer::from_files(file.to_string().as_bytes(), Some(config.to_string().as_bytes()))
}

const TEXT: &str = "the the<tool> hell é 🦙\t\t<|im_end|> aaan  x\n";

#[test]
fn a_byte_level_folder_gives_the_ids_of_the_same_vocabulary_in_gguf() {
    let config = json!({"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>", "lstrip": false}, "chat_template": "x"});
    let folder = load(&byte_level_json(), config).unwrap();
    let gguf = Tokenizer::from_spec(&byte_level()).unwrap();
    for (add_special, parse_special) in [(false, false), (true, false), (false, true), (true, true)] {
        let ids = folder.encode(TEXT, add_special, parse_special).unwrap();
        assert_eq!(ids, gguf.encode(TEXT, add_special, parse_special).unwrap());
        assert_eq!(folder.decode(&ids).unwrap(), gguf.decode(&ids).unwrap());
    }
    assert_eq!(folder.vocab_size(), gguf.vocab_size());
    assert_eq!((folder.bos(), folder.eos(), folder.add_bos()), (Some(260), Some(261), true));
    assert_eq!(folder.end_of_generation(), gguf.end_of_generation());
    assert_eq!(folder.chat_template(), Some("x"));
}

#[test]
fn a_sentence_piece_folder_decodes_bytes_and_spaces() {
    let tokenizer = load(&sentence_piece_json(), json!({"bos_token": "<s>", "add_bos_token": true})).unwrap();
    let text = "the the hell é 🦙 aaan  x\n";
    let ids = tokenizer.encode(text, true, false).unwrap();
    assert_eq!(ids[0], 1);
    assert_eq!(tokenizer.decode(&ids).unwrap(), text);
    assert!(!tokenizer.encode("</s>", false, false).unwrap().contains(&2));
    assert_eq!(tokenizer.encode("</s>", false, true).unwrap(), [2]);
}

#[test]
fn a_word_piece_folder_works() {
    let file = json!({"version": "1.0", "added_tokens": [], "normalizer": {"type": "BertNormalizer", "clean_text": true,
        "handle_chinese_chars": true, "strip_accents": null, "lowercase": true}, "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {"type": "BertProcessing", "sep": ["[SEP]", 3], "cls": ["[CLS]", 2]},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": true},
        "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100,
            "vocab": {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "hello": 4, "wor": 5, "##ld": 6, ",": 7, "!": 8, "##s": 9}}});
    let folder = load(&file, json!({})).unwrap();
    let gguf = Tokenizer::from_spec(&word_piece()).unwrap();
    let text = "Hello, worlds!";
    assert_eq!(folder.encode(text, true, false).unwrap(), gguf.encode(text, true, false).unwrap());
}

#[test]
fn the_configuration_decides_about_bos() {
    let config = |add: bool| json!({"bos_token": "<|im_start|>", "add_bos_token": add});
    assert!(load(&byte_level_json(), config(true)).unwrap().add_bos());
    assert!(!load(&byte_level_json(), config(false)).unwrap().add_bos());
}

#[test]
fn a_summary_counts_the_tokens_of_the_tokenizer() {
    for file in [byte_level_json(), sentence_piece_json()] {
        let bytes = file.to_string();
        let config = json!({ "chat_template": "{{ x }}" }).to_string();
        let summary = TokenizerSummary::from_files(bytes.as_bytes(), Some(config.as_bytes())).unwrap();
        let tokenizer = Tokenizer::from_files(bytes.as_bytes(), Some(config.as_bytes())).unwrap();
        assert_eq!((summary.n_tokens, summary.has_chat_template), (tokenizer.vocab_size(), true));
        assert!(!TokenizerSummary::from_files(bytes.as_bytes(), None).unwrap().has_chat_template);
    }
    let error = TokenizerSummary::from_files(b"{}", None).unwrap_err();
    assert!(error.to_string().contains("tokenizer.json"), "{error}");
}

#[test]
fn the_default_one_of_several_templates_is_used() {
    let config = json!({"chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]});
    assert_eq!(load(&byte_level_json(), config).unwrap().chat_template(), Some("d"));
}

#[test]
fn damaged_files_are_errors_that_name_the_file() {
    let fails =
        |json: &[u8], config: Option<&[u8]>| Tokenizer::from_files(json, config).unwrap_err().to_string();
    assert!(fails(b"", None).starts_with("tokenizer.json cannot be read: "));
    assert!(fails(b"{\"model\": 3}", None).starts_with("tokenizer.json cannot be read: "));
    let good = byte_level_json().to_string();
    assert!(fails(good.as_bytes(), Some(b"{")).starts_with("tokenizer_config.json cannot be read: "));
    let mut long_merge = byte_level_json();
    long_merge["model"]["merges"] = json!([["<|im_start|>", "<|im_start|>"]]);
    let text = fails(long_merge.to_string().as_bytes(), None);
    assert_eq!(text, r#"merge 0 names "<|im_start|><|im_start|>", which is not in the vocabulary"#);
    let mut big_id = byte_level_json();
    big_id["model"]["vocab"]["zz"] = json!(4_000_000_000u32);
    assert_eq!(
        fails(big_id.to_string().as_bytes(), None),
        "vocabulary needs 4000000001 ids, the limit is 4194304"
    );
    let mut unigram = byte_level_json();
    unigram["model"] = json!({"type": "Unigram", "unk_id": 0, "vocab": [["a", 0.0]], "byte_fallback": false});
    assert_eq!(
        fails(unigram.to_string().as_bytes(), None),
        "tokenizer.json has a model that is not supported: Unigram"
    );
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn damaged_bytes_never_panic(
        which in any::<bool>(),
        hits in prop::collection::vec((any::<prop::sample::Index>(), prop_oneof![any::<u8>(), Just(b'"'), Just(b'9'), Just(b','), Just(b'}')]), 1..4),
        text in "(.|the|hello|<tool>|[ \n]){0,12}",
    ) {
        let mut bytes = if which { byte_level_json() } else { sentence_piece_json() }.to_string().into_bytes();
        for (at, byte) in hits {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        if let Ok(tokenizer) = Tokenizer::from_files(&bytes, None)
            && let Ok(ids) = tokenizer.encode(&text, true, true)
        {
            let _ = tokenizer.decode(&ids);
        }
    }
}

fn with_steps(part: &str, list: &str, steps: Vec<Value>) -> Result<Tokenizer, TokenizerError> {
    let kind = json!({"type": "Sequence", list: steps});
    let mut file = sentence_piece_json();
    file[part] = kind;
    Tokenizer::from_files(file.to_string().as_bytes(), None)
}

fn replace(pattern: Value, content: &str) -> Value {
    json!({"type": "Replace", "pattern": pattern, "content": content})
}

#[test]
fn an_empty_replace_pattern_is_refused() {
    for pattern in [json!({"String": ""}), json!({"Regex": ""})] {
        let error = with_steps("normalizer", "normalizers", vec![replace(pattern, "x")]).unwrap_err();
        assert_eq!(
            error.to_string(),
            "tokenizer.json has a normalizer that is not supported: Replace with an empty pattern"
        );
    }
}

#[test]
fn a_replace_pattern_that_may_match_no_text_is_refused() {
    for pattern in ["a*", "^", "$", "\\b", "b|", "(?=x)", "|", "(?<!\\n)^"] {
        for (mut file, content) in [(byte_level_json(), "x"), (sentence_piece_json(), "▁▁")] {
            file["normalizer"] = replace(json!({"Regex": pattern}), content);
            let error = Tokenizer::from_files(file.to_string().as_bytes(), None).unwrap_err().to_string();
            assert!(error.contains("Replace with a pattern that may match no text"), "{pattern}: {error}");
        }
    }
}

#[test]
fn texts_are_encoded_after_any_other_replacement() {
    for pattern in [" {2,}", "a+", "[^a-z]", "^x", "x$", "(the|b)"] {
        for mut file in [byte_level_json(), sentence_piece_json()] {
            file["normalizer"] = replace(json!({"Regex": pattern}), "y");
            let tokenizer = Tokenizer::from_files(file.to_string().as_bytes(), None).expect(pattern);
            for text in ["", "a", "b", "the é hello\n  x", "▁ 中"] {
                let _ = tokenizer.encode(text, true, true);
            }
        }
    }
}

#[test]
fn steps_that_multiply_a_text_are_refused() {
    let big = "y".repeat(1000);
    let chain = |n: usize| {
        (0..n)
            .map(|i| replace(json!({"String": if i % 2 == 0 { "x" } else { "y" }}), &big))
            .collect::<Vec<_>>()
    };
    let message = |part, list, steps| with_steps(part, list, steps).unwrap_err().to_string();
    let text = message("normalizer", "normalizers", chain(2));
    assert!(text.ends_with("growth of a text by 1000000, at most 64 is allowed"), "{text}");
    let nested = vec![json!({"type": "Sequence", "normalizers": chain(2)})];
    assert_eq!(message("normalizer", "normalizers", nested), text);
    let text = message("normalizer", "normalizers", vec![json!({"type": "NFC"}); 1000]);
    assert!(text.ends_with("1000 steps, at most 32 are allowed"), "{text}");
    let bytes =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
    let text = message("pre_tokenizer", "pretokenizers", vec![bytes; 20]);
    assert!(text.ends_with("growth of a text by 1048576, at most 64 is allowed"), "{text}");
    let text = message("normalizer", "normalizers", vec![json!({"type": "Prepend", "prepend": big})]);
    assert!(text.ends_with("1000 bytes before a text, at most 256 are allowed"), "{text}");
}
