//! Texts that follow a grammar, token by token.

use refrain_grammar::{Grammar, GrammarError, GrammarSource, Matcher, Vocabulary};
use serde_json::Value;

/// Bytes, some words, and an end token.
fn words() -> Vec<Vec<u8>> {
    let bytes = (0..=254).map(|byte| vec![byte]);
    let more = ["{\"", "\":", "\",", "true", "name", " \"", "}}", "\n  ", "0.", "abc", "é", "\":\""];
    bytes.chain([b"\xff<end>".to_vec()]).chain(more.map(|word| word.as_bytes().to_vec())).collect()
}

const END: u32 = 255;

fn compile(source: GrammarSource) -> Grammar {
    Vocabulary::of_words(&words()).unwrap().compile(&source).unwrap()
}

fn allowed(matcher: &mut Matcher) -> Vec<u32> {
    let mut mask = [u32::MAX; 16];
    matcher.mask(&[END], &mut mask).unwrap();
    (0..512).filter(|id| mask[*id as usize / 32] >> (id % 32) & 1 == 1).collect()
}

/// Random tokens until the text ends or has `max` tokens. Returns the text and whether it ended.
fn random_text(grammar: &Grammar, max: usize, rng: &mut fastrand::Rng) -> (Vec<u8>, bool) {
    let (mut matcher, words, mut text) = (grammar.matcher(), words(), Vec::new());
    for _ in 0..max {
        if matcher.is_complete() {
            return (text, true);
        }
        let next = allowed(&mut matcher);
        assert!(next.iter().all(|id| (*id as usize) < words.len()), "past the vocabulary");
        let token = *rng.choice(&next).expect("a text can go on or end");
        if token == END {
            assert!(matcher.may_end().unwrap());
            return (text, true);
        }
        matcher.accept(token).unwrap();
        text.extend(&words[token as usize]);
    }
    (text, matcher.is_complete())
}

#[test]
fn random_texts_satisfy_their_schema() {
    let schema = r##"{
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "tags": {"type": "array", "items": {"enum": ["a", "b", null, 3]}, "maxItems": 3},
            "ok": {"type": "boolean"},
            "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}
        },
        "required": ["name", "ok"],
        "additionalProperties": false
    }"##;
    let grammar = compile(GrammarSource::JsonSchema(schema.into()));
    let mut rng = fastrand::Rng::with_seed(1);
    let mut n_ended = 0;
    for _ in 0..40 {
        let (text, ended) = random_text(&grammar, 300, &mut rng);
        let text = String::from_utf8(text).expect("UTF-8");
        let value = serde_json::from_str::<Value>(&text);
        if !ended {
            continue;
        }
        n_ended += 1;
        let value = value.unwrap_or_else(|error| panic!("{error}: {text}"));
        assert!(value["name"].is_string() && value["ok"].is_boolean(), "{text}");
        assert!(
            value["tags"].is_null() || value["tags"].as_array().is_some_and(|tags| tags.len() <= 3),
            "{text}"
        );
        let known = ["name", "tags", "ok", "next"];
        assert!(value.as_object().unwrap().keys().all(|key| known.contains(&key.as_str())), "{text}");
    }
    assert!(n_ended > 10, "{n_ended}");
}

#[test]
fn a_text_may_end_only_where_its_grammar_allows_it() {
    let grammar = compile(GrammarSource::Regex("[0-9]{2}(-[0-9]{2})?".into()));
    let mut matcher = grammar.matcher();
    for (byte, may_end) in [(b'1', false), (b'2', true), (b'-', false), (b'3', false), (b'4', true)] {
        assert!(!matcher.is_complete());
        matcher.accept(u32::from(byte)).unwrap();
        assert_eq!(matcher.may_end().unwrap(), may_end, "{}", byte as char);
        assert_eq!(allowed(&mut matcher).contains(&END), may_end);
    }
    assert!(matcher.is_complete());
    assert_eq!(allowed(&mut matcher), [END]);
    let mut mask = [u32::MAX; 16];
    matcher.mask(&[], &mut mask).unwrap();
    assert_eq!(mask, [0; 16], "nothing may follow, and no token ends the text");
}

#[test]
fn a_token_that_spells_text_ends_the_text_only_where_it_may_end() {
    let grammar = compile(GrammarSource::Regex("a+b".into()));
    let (a, b) = (u32::from(b'a'), u32::from(b'b'));
    let mut matcher = grammar.matcher();
    let mut mask = [0; 16];
    matcher.accept(a).unwrap();
    matcher.mask(&[a], &mut mask).unwrap();
    assert_eq!((mask[3] >> (a % 32) & 1, mask[3] >> (b % 32) & 1), (0, 1));
    matcher.accept(b).unwrap();
    matcher.mask(&[a], &mut mask).unwrap();
    assert_eq!((mask[3] >> (a % 32) & 1, mask[3] >> (b % 32) & 1), (1, 0));
}

#[test]
fn forced_tokens_are_those_that_the_mask_allows() {
    let schema = r#"{"type": "object", "properties": {"name": {"const": "true name"}}, "required": ["name"], "additionalProperties": false}"#;
    let grammar = compile(GrammarSource::JsonSchema(schema.into()));
    let mut matcher = grammar.matcher();
    let (words, mut text, mut n_forced) = (words(), Vec::new(), 0);
    while !matcher.is_complete() {
        let mut next = matcher.forced().unwrap();
        n_forced += next.len();
        if next.is_empty() {
            next = allowed(&mut matcher).into_iter().filter(|id| *id != END).take(1).collect();
        }
        for token in next {
            matcher.accept(token).unwrap();
            text.extend(&words[token as usize]);
        }
    }
    let value: Value = serde_json::from_slice(&text).unwrap();
    assert_eq!(value["name"], "true name");
    assert!(n_forced > 2, "{n_forced}");
}

#[test]
fn a_token_that_is_not_allowed_is_an_error_and_changes_nothing() {
    let grammar = compile(GrammarSource::Lark("start: \"abc\" | \"abd\"".into()));
    let mut matcher = grammar.matcher();
    matcher.accept(u32::from(b'a')).unwrap();
    let error = matcher.accept(u32::from(b'x')).unwrap_err();
    assert_eq!(error, GrammarError::NotAllowed { token: u32::from(b'x'), n_tokens: 1 });
    assert!(matches!(
        matcher.accept(100_000),
        Err(GrammarError::NotAllowed { .. } | GrammarError::Matching { .. })
    ));
    let mut matcher = grammar.matcher();
    for byte in *b"abd" {
        matcher.accept(u32::from(byte)).unwrap();
    }
    assert!(matcher.is_complete());
}

#[test]
fn any_json_object_is_an_object() {
    let grammar = compile(GrammarSource::JsonObject);
    let mut rng = fastrand::Rng::with_seed(3);
    for _ in 0..20 {
        let (text, ended) = random_text(&grammar, 200, &mut rng);
        if ended {
            match serde_json::from_slice::<Value>(&text) {
                Ok(value) => assert!(value.is_object()),
                // JSON itself does not limit numbers.
                Err(error) => assert!(error.to_string().starts_with("number out of range"), "{error}"),
            }
        }
    }
}

#[test]
fn a_union_of_references_with_a_constant_property_is_supported() {
    let schema = r##"{
        "$defs": {
            "cat": {"type": "object", "properties": {"kind": {"const": "cat"}, "lives": {"type": "integer"}}, "required": ["kind", "lives"]},
            "dog": {"type": "object", "properties": {"kind": {"const": "dog"}}, "required": ["kind"]}
        },
        "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}]
    }"##;
    let grammar = compile(GrammarSource::JsonSchema(schema.into()));
    let mut matcher = grammar.matcher();
    for byte in *br#"{"kind":"cat","lives":9}"# {
        matcher.accept(u32::from(byte)).unwrap();
    }
    assert!(matcher.may_end().unwrap());
}
