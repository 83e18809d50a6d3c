//! Damaged vocabularies give clear errors and never panic.

mod tokenizer_common;

use proptest::prelude::*;
use refrain_formats::gguf::StrArray;
use refrain_formats::tokenizer::{Tokenizer, VocabSpec};
use tokenizer_common::{byte_level, sentence_piece, word_piece};

fn message(spec: &VocabSpec) -> String {
    match Tokenizer::from_spec(spec) {
        Ok(_) => panic!("a damaged vocabulary was taken"),
        Err(error) => error.to_string(),
    }
}

fn with_token(spec: VocabSpec, id: usize, text: &str) -> VocabSpec {
    let tokens = spec.tokens.iter().enumerate().map(|(i, token)| if i == id { text } else { token });
    VocabSpec { tokens: tokens.collect(), ..spec }
}

#[test]
fn errors_name_the_fault_and_both_numbers() {
    let mut types = byte_level().token_types.unwrap();
    types[7] = 9;
    let mut scores = sentence_piece().scores.unwrap();
    scores[5] = f32::NAN;
    let cases = [
        (
            VocabSpec { model: "t5".into(), ..byte_level() },
            r#"tokenizer model "t5" is not supported (known: gpt2, llama, bert, gemma4)"#,
        ),
        (VocabSpec { tokens: StrArray::default(), ..byte_level() }, "no tokenizer: any token is missing"),
        (VocabSpec { merges: None, ..byte_level() }, "no tokenizer: tokenizer.ggml.merges is missing"),
        (VocabSpec { scores: None, ..sentence_piece() }, "no tokenizer: tokenizer.ggml.scores is missing"),
        (VocabSpec { scores: Some(vec![0.0; 3]), ..byte_level() }, "vocabulary has 264 tokens but 3 scores"),
        (
            VocabSpec { token_types: Some(vec![1; 265]), ..byte_level() },
            "vocabulary has 264 tokens but 265 token types",
        ),
        (
            VocabSpec { token_types: Some(types), ..byte_level() },
            "token 7 has unknown type 9 (known: 1 to 6)",
        ),
        (VocabSpec { scores: Some(scores), ..sentence_piece() }, "token 5 has the score NaN"),
        (with_token(byte_level(), 256, "a"), r#"token "a" has two ids, 97 and 256"#),
        (
            with_token(byte_level(), 263, &"x".repeat(100_000_000)),
            "token 263 is 100000000 bytes long, the limit is 4096",
        ),
        (
            VocabSpec { merges: Some(["h e", "q zz"].into_iter().collect()), ..byte_level() },
            r#"merge 1 names "zz", which is not in the vocabulary"#,
        ),
        (
            VocabSpec { merges: Some(["h e", "he he"].into_iter().collect()), ..byte_level() },
            r#"merge 1 names "hehe", which is not in the vocabulary"#,
        ),
        (
            VocabSpec { merges: Some(["he"].into_iter().collect()), ..byte_level() },
            r#"merge 0 is not two tokens with a blank between them: "he""#,
        ),
    ];
    for (spec, expected) in cases {
        assert_eq!(message(&spec), expected);
        assert!(Tokenizer::from_spec(&spec).unwrap_err().hint().is_some());
    }
    let mut spec = byte_level();
    spec.specials.eos = Some(264);
    assert_eq!(message(&spec), "eos token has id 264, the vocabulary has 264");
}

#[test]
fn an_unknown_pre_tokenizer_is_listed_with_the_known_ones() {
    let text = message(&VocabSpec { pre: Some("martian".into()), ..byte_level() });
    assert!(text.starts_with(r#"pre-tokenizer "martian" is not supported (known: "#), "{text}");
    for name in [
        "default",
        "gpt-2",
        "llama-bpe",
        "qwen2",
        "smollm",
        "falcon",
        "deepseek-llm",
        "deepseek-coder",
        "starcoder",
        "refact",
    ] {
        assert!(text.contains(name), "{name}");
    }
}

#[test]
fn bytes_without_a_token_become_unknown_or_are_dropped() {
    let mut spec = with_token(byte_level(), usize::from(b'q'), "qq");
    let tokenizer = Tokenizer::from_spec(&spec).unwrap();
    assert_eq!(tokenizer.encode("aqb", false, false).unwrap(), [97, 98]);
    spec.token_types.as_mut().unwrap()[258] = 2;
    spec.specials.unk = Some(258);
    spec.merges = Some(["h e"].into_iter().collect());
    assert_eq!(Tokenizer::from_spec(&spec).unwrap().encode("aqb", false, false).unwrap(), [97, 258, 98]);
}

#[test]
fn unknown_characters_and_byte_tokens_keep_their_order() {
    // Without 0xE2, its first byte, the euro sign is unknown. Both bytes of the umlaut have tokens.
    let mut spec = with_token(sentence_piece(), 3 + 0xE2, "<gone>");
    spec.add_space_prefix = Some(false);
    let tokenizer = Tokenizer::from_spec(&spec).unwrap();
    let ids = tokenizer.encode("a€€üb", false, false).unwrap();
    let id = |text| tokenizer.token_id(text).unwrap();
    assert_eq!(ids, [id("a"), id("<unk>"), id("<0xC3>"), id("<0xBC>"), id("b")]);
}

#[test]
fn ids_outside_the_vocabulary_are_errors() {
    let error = Tokenizer::from_spec(&byte_level()).unwrap().decode(&[97, 264]).unwrap_err();
    assert_eq!(error.to_string(), "token id 264 is outside the vocabulary of 264");
}

/// Damage to a vocabulary.
#[derive(Debug, Clone)]
enum Damage {
    Token(prop::sample::Index, String),
    Type(prop::sample::Index, i32),
    Score(prop::sample::Index, f32),
    Merge(String),
    Special(u32),
    Pre(String),
    Cut(prop::sample::Index),
}

fn damage() -> impl Strategy<Value = Damage> {
    let index = any::<prop::sample::Index>;
    let text = || {
        prop_oneof![
            ".{0,6}",
            Just("▁".to_owned()),
            Just("<0xFF>".to_owned()),
            Just("h e".to_owned()),
            Just(String::new())
        ]
    };
    prop_oneof![
        (index(), text()).prop_map(|(i, t)| Damage::Token(i, t)),
        (index(), -1i32..8).prop_map(|(i, t)| Damage::Type(i, t)),
        (index(), any::<f32>()).prop_map(|(i, s)| Damage::Score(i, s)),
        text().prop_map(Damage::Merge),
        (0u32..400).prop_map(Damage::Special),
        text().prop_map(Damage::Pre),
        index().prop_map(Damage::Cut),
    ]
}

fn apply(mut spec: VocabSpec, damage: Damage) -> VocabSpec {
    let n_tokens = spec.tokens.len();
    match damage {
        Damage::Token(i, text) if n_tokens > 0 => return with_token(spec, i.index(n_tokens), &text),
        Damage::Token(..) => {}
        Damage::Type(i, kind) => {
            if let Some(types) = spec.token_types.as_mut().filter(|t| !t.is_empty()) {
                let i = i.index(types.len());
                types[i] = kind;
            }
        }
        Damage::Score(i, score) => {
            if let Some(scores) = spec.scores.as_mut().filter(|s| !s.is_empty()) {
                let i = i.index(scores.len());
                scores[i] = score;
            }
        }
        Damage::Merge(text) => {
            let merges = spec.merges.unwrap_or_default();
            spec.merges = Some(merges.iter().chain([text.as_str()]).collect());
        }
        Damage::Special(id) => {
            spec.specials.unk = Some(id);
            spec.specials.eot = Some(id / 2);
        }
        Damage::Pre(name) => spec.pre = Some(name),
        Damage::Cut(i) => {
            let n = i.index(n_tokens + 1);
            spec.tokens = spec.tokens.iter().take(n).collect();
            spec.token_types = spec.token_types.map(|t| t.into_iter().take(n).collect());
            spec.scores = spec.scores.map(|s| s.into_iter().take(n).collect());
        }
    }
    spec
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn damaged_vocabularies_never_panic(
        which in 0usize..3,
        all in prop::collection::vec(damage(), 1..5),
        text in "(.|the|hello|<tool>|[ \n]){0,12}",
    ) {
        let spec = [byte_level, sentence_piece, word_piece][which]();
        let spec = all.into_iter().fold(spec, apply);
        match Tokenizer::from_spec(&spec) {
            Ok(tokenizer) => {
                for parse_special in [false, true] {
                    if let Ok(ids) = tokenizer.encode(&text, true, parse_special) {
                        prop_assert!(ids.iter().all(|&id| (id as usize) < tokenizer.vocab_size()));
                        tokenizer.decode(&ids).unwrap();
                    }
                }
            }
            Err(error) => prop_assert!(!error.to_string().is_empty()),
        }
    }
}
