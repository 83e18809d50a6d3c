//! Grammars that must be refused, quickly and with the reason.

use refrain_grammar::{Grammar, GrammarError, GrammarSource, MAX_SOURCE_BYTES, Vocabulary};
use std::time::{Duration, Instant};

fn bytes() -> Vocabulary {
    let words: Vec<Vec<u8>> = (0..=254).map(|byte| vec![byte]).chain([b"\xff<end>".to_vec()]).collect();
    Vocabulary::of_words(&words).unwrap()
}

fn refused(source: GrammarSource) -> GrammarError {
    let began = Instant::now();
    let error = bytes().compile(&source).map(|_: Grammar| ()).unwrap_err();
    assert!(began.elapsed() < Duration::from_secs(10), "{:?} for {error}", began.elapsed());
    assert!(error.hint().is_some(), "{error}");
    error
}

fn schema(text: &str) -> String {
    refused(GrammarSource::JsonSchema(text.into())).to_string()
}

#[test]
fn empty_and_huge_texts_are_refused() {
    for text in ["", "  \n"] {
        for source in [GrammarSource::JsonSchema, GrammarSource::Lark, GrammarSource::Regex] {
            assert!(matches!(refused(source(text.into())), GrammarError::Empty { .. }));
        }
    }
    let huge = "a".repeat(10 << 20);
    for source in [GrammarSource::JsonSchema, GrammarSource::Lark, GrammarSource::Regex] {
        let error = refused(source(huge.clone()));
        assert!(
            matches!(error, GrammarError::TooLarge { n_bytes, max_bytes: MAX_SOURCE_BYTES, .. } if n_bytes == 10 << 20),
            "{error}"
        );
    }
}

#[test]
fn schemas_that_are_not_schemas_are_refused() {
    assert!(schema("{").starts_with("the JSON schema is not valid JSON: EOF"));
    assert!(schema("[1]").contains("at #: a schema must be an object or a boolean"));
    assert!(schema(r#"{"properties": {"a": 3}}"#).contains("at #/properties/a: a schema must be"));
    assert!(schema(&format!("{}1{}", "[".repeat(100_000), "]".repeat(100_000))).contains("recursion limit"));
}

#[test]
fn unsupported_parts_of_a_schema_are_named() {
    let text = r#"{"properties": {"a/b": {}, "list": {"items": {"type": "integer", "not": {"const": 3}}}}, "required": ["list"]}"#;
    assert_eq!(
        schema(text),
        r#"the JSON schema cannot be used at #/properties/list/items: Unimplemented keys: ["not"]"#
    );
    let text = r#"{"properties": {"a": {"type": "array", "uniqueItems": true}}}"#;
    assert!(schema(text).contains("at #/properties/a: "), "{}", schema(text));
    let text = r##"{"$defs": {"a": {"oneOf": [{"type": "string"}, {"maxLength": 3}]}}, "properties": {"a": {"$ref": "#/$defs/a"}}}"##;
    assert!(schema(text).contains("at #/properties/a: oneOf"), "{}", schema(text));
    assert!(schema(r#"{"items": {"x-guidance": {"lenient": true}}}"#).contains("at #/items/x-guidance"));
    assert!(schema(r#"{"items": {"type": "strng"}}"#).contains("at #/items: "));
    assert!(schema(r#"{"anyOf": [{"type": "string", "pattern": "(?=a)b"}]}"#).contains("at #"));
}

#[test]
fn schemas_that_nothing_satisfies_are_refused_with_the_place() {
    let unsatisfiable = |text: &str| match refused(GrammarSource::JsonSchema(text.into())) {
        GrammarError::Unsatisfiable { location, .. } => location,
        other => panic!("{other}"),
    };
    assert_eq!(unsatisfiable("false"), "#");
    let text = r#"{"type": "object", "properties": {"optional": false, "age": {"type": "integer", "minimum": 5, "maximum": 3}}, "required": ["age"]}"#;
    assert_eq!(unsatisfiable(text), "#/properties/age");
    assert_eq!(unsatisfiable(r#"{"allOf": [{"type": "string"}, {"type": "integer"}]}"#), "#");
    let text = r##"{"$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "required": ["next"]}}, "$ref": "#/$defs/node"}"##;
    assert_eq!(unsatisfiable(text), "#/$defs/node/properties/next");
    assert_eq!(unsatisfiable(r##"{"$ref": "#"}"##), "#");
    let text =
        r##"{"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}"##;
    assert!(unsatisfiable(text).starts_with("#/$defs/"));
}

#[test]
fn references_must_be_local_and_lead_somewhere() {
    assert!(
        schema(r##"{"items": {"$ref": "#/$defs/missing"}}"##).contains("#/items/$ref: there is nothing at")
    );
    assert!(schema(r#"{"$ref": "https://example.com/schema.json"}"#).contains("outside the schema"));
    assert!(schema(r#"{"$ref": 3}"#).contains("it must be a string"));
}

#[test]
fn long_chains_of_references_are_compiled_or_refused() {
    let n = 9_000;
    let defs: Vec<String> =
        (0..n).map(|i| format!(r##""d{i}": {{"$ref": "#/$defs/d{}"}}"##, i + 1)).collect();
    let text =
        format!(r##"{{"$defs": {{{}, "d{n}": {{"type": "null"}}}}, "$ref": "#/$defs/d0"}}"##, defs.join(","));
    let began = Instant::now();
    let result = bytes().compile(&GrammarSource::JsonSchema(text));
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
    if let Err(error) = result {
        assert!(error.hint().is_some());
    }
    // 30,000 schemas in less than a megabyte.
    let text = format!(r#"{{"anyOf": [{}]}}"#, vec!["{}"; 30_000].join(","));
    assert!(matches!(refused(GrammarSource::JsonSchema(text)), GrammarError::TooManySchemas { .. }));
}

#[test]
fn expressions_that_explode_are_refused() {
    let deep = format!("{}a{}", "(".repeat(10_000), ")".repeat(10_000));
    assert!(matches!(refused(GrammarSource::Regex(deep.clone())), GrammarError::TooDeep { .. }));
    let rule = format!("start: {}", deep.replace('a', "\"a\""));
    assert!(matches!(refused(GrammarSource::Lark(rule)), GrammarError::TooDeep { .. }));
    assert!(matches!(refused(GrammarSource::Regex("(".into())), GrammarError::Invalid { .. }));
    assert!(matches!(refused(GrammarSource::Lark("start: missing".into())), GrammarError::Invalid { .. }));
    assert!(matches!(refused(GrammarSource::Lark("\0\0\0".into())), GrammarError::Invalid { .. }));
}

/// The parser keeps repetitions as numbers, so some of these compile; a text that follows them must stay within its limits.
#[test]
fn expressions_that_explode_cost_bounded_time() {
    let vocabulary = bytes();
    for text in [
        "(a{1000}){1000}",
        "((a{100}){100}){100}",
        "(a|b)*a(a|b){2000}c",
        "(a?){3000}a{3000}",
        "(a*)*b",
        "((a|b)*c(a|b)*){40}",
    ] {
        let began = Instant::now();
        let grammar = match vocabulary.compile(&GrammarSource::Regex(text.into())) {
            Ok(grammar) => grammar,
            Err(error) => {
                assert!(matches!(error, GrammarError::TooComplex { .. }), "{text}: {error}");
                continue;
            }
        };
        let (mut matcher, mut mask) = (grammar.matcher(), [0; 8]);
        let mut rng = fastrand::Rng::with_seed(1);
        for _ in 0..2_000 {
            let step = Instant::now();
            if let Err(error) = matcher.mask(&[255], &mut mask) {
                assert!(matches!(error, GrammarError::Matching { .. }), "{text}: {error}");
                assert!(error.hint().is_some());
                break;
            }
            let allowed: Vec<u32> =
                (0..255).filter(|id| mask[*id as usize / 32] >> (id % 32) & 1 == 1).collect();
            let Some(token) = rng.choice(allowed) else { break };
            if matcher.accept(token).is_err() {
                break;
            }
            assert!(step.elapsed() < Duration::from_secs(2), "{text}: {:?}", step.elapsed());
        }
        assert!(began.elapsed() < Duration::from_secs(10), "{text}: {:?}", began.elapsed());
    }
}

#[test]
fn grammars_that_match_nothing_are_refused() {
    for text in ["[a&&b]", "a[^\\s\\S]"] {
        let error = refused(GrammarSource::Regex(text.into()));
        assert!(
            matches!(error, GrammarError::MatchesNothing { .. } | GrammarError::Invalid { .. }),
            "{text}: {error}"
        );
    }
    let error = refused(GrammarSource::Lark("start: \"a\" start".into()));
    assert!(matches!(error, GrammarError::MatchesNothing { .. }), "{error}");
}

#[test]
fn damaged_schemas_and_grammars_never_panic() {
    let vocabulary = bytes();
    let mut rng = fastrand::Rng::with_seed(7);
    let seeds = [
        r##"{"$defs": {"a": {"type": ["string", "null"], "maxLength": 8}}, "type": "object", "properties": {"x": {"$ref": "#/$defs/a"}, "y": {"enum": [1, "b", null]}}, "required": ["x"], "additionalProperties": false}"##,
        "start: (word \" \")* word\nword: /[a-z]+/ | \"(\" start \")\"\n%ignore /\\s/",
        r"(\d{1,3}\.){3}[a-f]+|(x|y[^z])*\p{Lu}",
    ];
    for _ in 0..600 {
        let kind = rng.usize(..3);
        let mut text = seeds[kind].as_bytes().to_vec();
        for _ in 0..rng.usize(1..4) {
            let (at, end) = (rng.usize(..text.len()), rng.usize(..text.len()));
            match rng.u8(..3) {
                0 => text[at] = *rng.choice(b"{}[]()\"\\:,|*+?0a$#/").unwrap(),
                1 => drop(text.drain(at.min(end)..at.max(end).min(at.min(end) + 9))),
                _ => text.insert(at, *rng.choice(b"{}[]()\"\\:,|*+?0a$#/").unwrap()),
            }
            if text.is_empty() {
                break;
            }
        }
        let text = String::from_utf8_lossy(&text).into_owned();
        let source = [GrammarSource::JsonSchema, GrammarSource::Lark, GrammarSource::Regex][kind](text);
        // An error or a grammar, never a panic.
        let _ = vocabulary.compile(&source);
    }
}
