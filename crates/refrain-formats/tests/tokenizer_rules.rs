//! Guarantees of tokenizers, on handmade vocabularies.

mod tokenizer_common;

use proptest::prelude::*;
use refrain_formats::tokenizer::{TokenKind, Tokenizer, VocabSpec};
use tokenizer_common::{byte_level, obvious_sentence_piece, sentence_piece, word_piece};

fn build(spec: &VocabSpec) -> Tokenizer {
    Tokenizer::from_spec(spec).unwrap()
}

#[test]
fn control_texts_become_tokens_only_on_request() {
    let tokenizer = build(&byte_level());
    let (start, end) = (260, 261);
    assert_eq!(tokenizer.encode("<|im_start|>he<|im_end|>", false, true).unwrap(), [start, 256, end]);
    let plain = tokenizer.encode("<|im_start|>he<|im_end|>", false, false).unwrap();
    assert!(plain.iter().all(|&id| tokenizer.kind(id) == Some(TokenKind::Normal)));
    assert_eq!(tokenizer.decode(&plain).unwrap(), "<|im_start|>he<|im_end|>");
}

#[test]
fn user_defined_texts_always_become_tokens() {
    for parse_special in [false, true] {
        assert_eq!(
            build(&byte_level()).encode("<tool>he\t\t", false, parse_special).unwrap(),
            [262, 256, 263]
        );
    }
    let tokenizer = build(&sentence_piece());
    let (spaces, lines) = (tokenizer.token_id("   ").unwrap(), tokenizer.token_id("\n\n").unwrap());
    let ids = tokenizer.encode("a   a\n\n", false, false).unwrap();
    assert_eq!(ids[1], spaces);
    assert_eq!(ids.last(), Some(&lines));
    assert_eq!(tokenizer.piece(spaces), Some(b"   ".as_slice()));
}

#[test]
fn special_tokens_are_added_if_the_model_uses_them() {
    assert_eq!(build(&byte_level()).encode("he", true, false).unwrap(), [260, 256]);
    assert_eq!(
        build(&VocabSpec { add_eos: Some(true), ..byte_level() }).encode("he", true, false).unwrap(),
        [260, 256, 261]
    );
    assert_eq!(
        build(&VocabSpec { add_bos: Some(false), ..byte_level() }).encode("he", true, false).unwrap(),
        [256]
    );
    let bert = build(&word_piece());
    assert_eq!(bert.encode("Hello, worlds!", true, false).unwrap(), [2, 4, 7, 5, 6, 9, 8, 3]);
    assert_eq!(bert.encode("helloworld", false, false).unwrap(), [1]);
    assert_eq!(bert.decode(&[2, 4, 5, 6, 9, 3]).unwrap(), "hello worlds");
}

#[test]
fn a_chat_prompt_gets_exactly_one_bos() {
    let tokenizer = build(&byte_level());
    assert_eq!(tokenizer.encode_chat("<|im_start|>he").unwrap(), [260, 256]);
    assert_eq!(tokenizer.encode_chat("he").unwrap(), [260, 256]);
}

#[test]
fn every_end_of_turn_token_ends_generation() {
    let mut tokenizer = build(&VocabSpec { specials: Default::default(), ..byte_level() });
    assert_eq!(tokenizer.end_of_generation(), [261]);
    tokenizer.add_end_of_generation(&[3, 261, 999_999]);
    assert_eq!(tokenizer.end_of_generation(), [3, 261]);
    assert!(tokenizer.is_end_of_generation(3) && !tokenizer.is_end_of_generation(4));
    assert_eq!(build(&sentence_piece()).end_of_generation(), [2]);
}

#[test]
fn characters_without_a_token_fall_back_to_bytes() {
    let tokenizer = build(&sentence_piece());
    let ids = tokenizer.encode("🦙", false, false).unwrap();
    assert_eq!(ids[1..], [3 + 0xf0, 3 + 0x9f, 3 + 0xa6, 3 + 0x99]);
    let mut stream = tokenizer.stream();
    assert_eq!(stream.push(ids[1]), "");
    assert_eq!(stream.push(ids[2]), "");
    assert!(stream.is_pending());
    assert_eq!(stream.push(ids[3]), "");
    assert_eq!(stream.push(ids[4]), "🦙");
    assert_eq!(stream.finish(), "");
}

#[test]
fn an_incomplete_character_appears_only_at_the_end() {
    let tokenizer = build(&byte_level());
    let mut stream = tokenizer.stream();
    assert_eq!(stream.push(0xe4), "");
    assert_eq!(stream.push(260), ""); // a control token in between has no text
    assert_eq!(stream.push(0xb8), "");
    assert_eq!(stream.finish(), "\u{fffd}");
    assert_eq!(stream.push(0xff), "\u{fffd}");
    assert_eq!(stream.push(1_000_000), "");
    assert_eq!(tokenizer.stream_with_special().push(260), "<|im_start|>");
}

#[test]
fn a_stream_keeps_the_leading_space_that_decode_removes() {
    let tokenizer = build(&sentence_piece());
    let ids = tokenizer.encode("hello the", true, false).unwrap();
    assert_eq!(tokenizer.decode(&ids).unwrap(), "hello the");
    assert_eq!(tokenizer.decode_with_special(&ids).unwrap(), "<s> hello the");
    let mut stream = tokenizer.stream();
    assert_eq!(ids[1..].iter().map(|&id| stream.push(id).to_owned()).collect::<String>(), " hello the");
    let bare = build(&VocabSpec { add_space_prefix: Some(false), ..sentence_piece() });
    assert_eq!(bare.decode(&bare.encode(" hello", false, false).unwrap()).unwrap(), " hello");
}

fn text() -> impl Strategy<Value = String> {
    let words = prop::sample::select(vec![
        "the",
        " the",
        "hello",
        "<|im_end|>",
        "<tool>",
        "</s>",
        "<0x0A>",
        "\t\t",
        "  ",
        "   ",
        "\n",
        "\n\n",
        "\r\n",
        "é",
        "🦙",
        "中文",
        "123",
        "'ll",
        "\u{0}",
        "\u{200d}",
        "a",
    ]);
    prop::collection::vec(
        prop_oneof![words.prop_map(str::to_owned), any::<char>().prop_map(String::from)],
        0..24,
    )
    .prop_map(|parts| parts.concat())
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn byte_level_text_comes_back(text in text(), pre in prop::sample::select(refrain_formats::tokenizer::known_pre_tokenizers())) {
        let tokenizer = build(&VocabSpec { pre: Some(pre.to_owned()), ..byte_level() });
        let ids = tokenizer.encode(&text, true, false).unwrap();
        prop_assert_eq!(tokenizer.decode(&ids).unwrap(), text);
    }

    #[test]
    fn sentence_piece_text_comes_back(text in text()) {
        // Without user-defined tokens, because a space is prepended to every stretch between them.
        let text = text.replace('▁', "").replace("<tool>", "").replace("\n\n", "\n").replace("\n\n", "\n");
        let mut spec = sentence_piece();
        spec.add_space_prefix = Some(false);
        let tokenizer = build(&spec);
        let ids = tokenizer.encode(&text, true, false).unwrap();
        prop_assert_eq!(tokenizer.decode(&ids).unwrap(), text);
    }

    #[test]
    fn user_text_never_gives_a_control_token(text in text()) {
        for spec in [byte_level(), sentence_piece()] {
            let tokenizer = build(&spec);
            let ids = tokenizer.encode(&text, false, false).unwrap();
            prop_assert!(ids.iter().all(|&id| tokenizer.kind(id) != Some(TokenKind::Control)));
        }
    }

    #[test]
    fn a_stream_of_any_ids_is_the_text_of_their_bytes(ids in prop::collection::vec(0u32..264, 0..40)) {
        for spec in [byte_level(), sentence_piece()] {
            let tokenizer = build(&spec);
            let shown = |id: &&u32| tokenizer.kind(**id) != Some(TokenKind::Control);
            let bytes: Vec<u8> = ids.iter().filter(shown).flat_map(|&id| tokenizer.piece(id).unwrap()).copied().collect();
            let mut stream = tokenizer.stream();
            let mut text: String = ids.iter().map(|&id| stream.push(id).to_owned()).collect();
            text.push_str(stream.finish());
            prop_assert_eq!(text, String::from_utf8_lossy(&bytes));
        }
    }

    #[test]
    fn sentence_piece_joins_the_best_neighbours(text in "[aehlnot▁]{0,24}") {
        let spec = VocabSpec { add_space_prefix: Some(false), ..sentence_piece() };
        let ids = build(&spec).encode(&text, false, false).unwrap();
        prop_assert_eq!(ids, obvious_sentence_piece(&spec, &text));
    }
}

/// Encodes recorded texts by the rules `own`, and returns how many of them the rules `other` encode differently.
fn n_different(data: &str, own: &str, other: &str) -> usize {
    let data: serde_json::Value = serde_json::from_str(data).unwrap();
    let list = |key: &str| -> Vec<String> {
        data[key].as_array().unwrap().iter().map(|text| text.as_str().unwrap().to_owned()).collect()
    };
    let tokenizer = |pre: &str| {
        let spec = VocabSpec {
            model: "gpt2".to_owned(),
            pre: Some(pre.to_owned()),
            tokens: list("tokens").into_iter().collect(),
            merges: Some(list("merges").iter().map(String::as_str).collect()),
            ..Default::default()
        };
        Tokenizer::from_spec(&spec).unwrap()
    };
    let (own, others) = (tokenizer(own), tokenizer(other));
    let mut n_different = 0;
    for case in data["cases"].as_array().unwrap() {
        let text = case["text"].as_str().unwrap();
        let want: Vec<u32> =
            case["ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect();
        assert_eq!(own.encode(text, false, false).unwrap(), want, "{text:?}");
        n_different += usize::from(others.encode(text, false, false).unwrap() != want);
    }
    n_different
}

/// The words and ids of `transformers`, over a small vocabulary (`tools/qwen35_tokens.py`).
#[test]
fn text_is_cut_as_qwen_3_5_does_with_marks_inside_of_words() {
    let data = include_str!("data/qwen35_tokens.json");
    assert!(n_different(data, "qwen35", "qwen2") > 0, "Qwen 2 cuts all of it alike");
}

/// The words and ids of `tiktoken` with the pattern of gpt-oss, over a small vocabulary (`tools/o200k_tokens.py`).
#[test]
fn text_is_cut_as_o200k_does_with_case_inside_of_words() {
    let data = include_str!("data/o200k_tokens.json");
    assert!(n_different(data, "gpt-4o", "tekken") > 0, "Tekken cuts all of it alike");
    assert!(n_different(data, "gpt-4o", "llama-bpe") > 0, "Llama 3 cuts all of it alike");
}
