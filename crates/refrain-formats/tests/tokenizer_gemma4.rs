//! The tokenizer that GGUF files call gemma4, compared with the same vocabulary as `tokenizer.json`.

mod tokenizer_common;

use proptest::prelude::*;
use refrain_formats::tokenizer::{Tokenizer, TokenizerError, VocabSpec};
use serde_json::{Map, Value, json};
use tokenizer_common::merged_pieces;

/// The vocabulary in the form of Gemma's folders: merges over the whole text, bytes for unknown characters.
fn as_json(spec: &VocabSpec) -> Vec<u8> {
    let types = spec.token_types.clone().unwrap();
    let vocab: Map<String, Value> =
        spec.tokens.iter().enumerate().map(|(id, text)| (text.to_owned(), id.into())).collect();
    let merges: Vec<Vec<&str>> =
        spec.merges.as_ref().unwrap().iter().map(|merge| merge.split(' ').collect()).collect();
    let is_added = |kind: i32| matches!(kind, 2..=4);
    let added: Vec<Value> = spec
        .tokens
        .iter()
        .zip(&types)
        .enumerate()
        .filter(|(_, (_, kind))| is_added(**kind))
        .map(|(id, (text, kind))| {
            // Matched in the raw text.
            json!({
                "id": id, "content": text.replace('\u{2581}', " "), "single_word": false, "lstrip": false,
                "rstrip": false, "normalized": false, "special": *kind != 4
            })
        })
        .filter(|added| !added["content"].as_str().unwrap().contains(' '))
        .collect();
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added,
        "normalizer": { "type": "Replace", "pattern": { "String": " " }, "content": "\u{2581}" },
        "pre_tokenizer": null, "post_processor": null,
        "decoder": { "type": "Sequence", "decoders": [
            { "type": "Replace", "pattern": { "String": "\u{2581}" }, "content": " " },
            { "type": "ByteFallback" }, { "type": "Fuse" }
        ] },
        "model": {
            "type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true, "ignore_merges": false,
            "vocab": vocab, "merges": merges
        }
    })
    .to_string()
    .into_bytes()
}

/// A vocabulary without tokens of spaces, which folders store in normalised form.
fn without_blanks() -> VocabSpec {
    let mut spec = merged_pieces();
    let n = spec.tokens.len() - 1;
    spec.tokens = spec.tokens.iter().take(n).collect();
    spec.token_types.as_mut().unwrap().truncate(n);
    spec.scores.as_mut().unwrap().truncate(n);
    spec
}

#[test]
fn merges_cross_words_and_unknown_characters_become_bytes() {
    let tokenizer = Tokenizer::from_spec(&merged_pieces()).unwrap();
    let pieces = |text: &str| -> Vec<String> {
        let ids = tokenizer.encode(text, false, true).unwrap();
        ids.iter().map(|id| merged_pieces().tokens.get(*id as usize).unwrap().to_owned()).collect()
    };
    // A merge crosses a space: there are no words.
    assert_eq!(pieces("hello a"), ["hello", "\u{2581}a"]);
    assert_eq!(pieces("so the"), ["s", "o", "\u{2581}the"]);
    assert_eq!(pieces("o b"), ["o\u{2581}", "b"]);
    assert_eq!(pieces("a\n\n\nb"), ["a", "\n\n", "\n", "b"]);
    assert_eq!(pieces("<|turn>a"), ["<|turn>", "a"]);
    // U+00FC has no token.
    assert_eq!(pieces("\u{fc}"), ["<0xC3>", "<0xBC>"]);
    assert_eq!(pieces("a  b"), ["a", "\u{2581}\u{2581}", "b"]);
    assert_eq!(tokenizer.encode("a", true, false).unwrap()[0], 2, "the first token of a text");
    let ids = tokenizer.encode("hello the\n\u{fc} é  a", false, false).unwrap();
    assert_eq!(tokenizer.decode(&ids).unwrap(), "hello the\n\u{fc} é  a");
}

#[test]
fn the_end_of_a_turn_ends_a_reply_and_channels_are_visible() {
    let tokenizer = Tokenizer::from_spec(&merged_pieces()).unwrap();
    let id = |text: &str| tokenizer.encode(text, false, true).unwrap()[0];
    assert!(tokenizer.end_of_generation().contains(&id("<turn|>")));
    assert_eq!(tokenizer.decode(&[id("<|channel>"), id("<turn|>")]).unwrap(), "<|channel>");
    // These tokens are special in folders but still visible.
    let json = String::from_utf8(as_json(&without_blanks())).unwrap();
    let special = json.replace("\"special\":false", "\"special\":true");
    let from_files = Tokenizer::from_files(special.as_bytes(), None).unwrap();
    assert_eq!(from_files.decode(&[id("<|channel>"), id("<turn|>")]).unwrap(), "<|channel>");
    assert_ne!(from_files.encode("<|channel>", false, false).unwrap(), [id("<|channel>")]);
}

#[test]
fn a_vocabulary_without_merges_is_refused() {
    let spec = VocabSpec { merges: None, ..merged_pieces() };
    let error = Tokenizer::from_spec(&spec).unwrap_err();
    assert!(matches!(error, TokenizerError::Missing { what: "tokenizer.ggml.merges" }), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_file_and_a_folder_of_one_vocabulary_give_the_same_tokens(
        text in "([a-z]|the|hello| |\n|é|\u{fc}|\u{1F600}|<\\|turn>|<turn\\|>|<\\|channel>){0,24}",
        special in any::<bool>(),
    ) {
        let spec = without_blanks();
        let gguf = Tokenizer::from_spec(&spec).unwrap();
        let folder = Tokenizer::from_files(&as_json(&spec), None).unwrap();
        let ids = gguf.encode(&text, false, special).unwrap();
        prop_assert_eq!(&ids, &folder.encode(&text, false, special).unwrap());
        prop_assert_eq!(gguf.decode(&ids).unwrap(), folder.decode(&ids).unwrap());
    }
}
