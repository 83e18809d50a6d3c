//! Schemas with texts that follow them and texts that do not.

use refrain_grammar::{Grammar, GrammarSource, Vocabulary};

/// A schema, texts that follow it, and texts that do not.
type Case = (&'static str, &'static [&'static str], &'static [&'static str]);

const CASES: &[Case] = &[
    ("{}", &["1", "\"a\"", "[]", "{\"a\": null}"], &["", "[1,]", "tru", "{a: 1}"]),
    (r#"{"type": "integer"}"#, &["0", "-12", "500"], &["01", "1.5", "\"1\"", "1e3", "+1"]),
    (
        r#"{"type": "number", "minimum": -1.5, "exclusiveMaximum": 3}"#,
        &["-1.5", "2.99", "0"],
        &["3", "-1.6", "30"],
    ),
    (r#"{"type": "integer", "multipleOf": 5}"#, &["0", "15"], &["7", "51"]),
    (r#"{"type": ["string", "null"]}"#, &["null", "\"\""], &["0", "[]"]),
    (r#"{"type": "string", "minLength": 2, "maxLength": 3}"#, &["\"ab\"", "\"äöü\""], &["\"a\"", "\"abcd\""]),
    (r#"{"type": "string", "pattern": "^a+b$"}"#, &["\"aab\""], &["\"ba\"", "\"aabc\""]),
    (r#"{"type": "string", "format": "date"}"#, &["\"2024-02-29\""], &["\"2024-13-01\"", "\"today\""]),
    (r#"{"enum": [1, "two", null, [3]]}"#, &["1", "\"two\"", "null", "[3]"], &["2", "\"one\"", "[4]"]),
    (r#"{"const": {"a": [true]}}"#, &["{\"a\":[true]}", "{\n  \"a\": [true]\n}"], &["{}", "{\"a\":[false]}"]),
    (
        r#"{"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2}"#,
        &["[true]", "[true, false]"],
        &["[]", "[1]", "[true,true,true]"],
    ),
    (
        r#"{"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "items": false}"#,
        &["[]", "[1]", "[1,\"a\"]"],
        &["[\"a\"]", "[1,\"a\",2]"],
    ),
    (
        r#"{"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["b"], "additionalProperties": false}"#,
        &["{\"b\":\"\"}", "{\"a\":1,\"b\":\"x\"}"],
        &["{}", "{\"a\":1}", "{\"b\":\"\",\"c\":1}", "{\"b\":1}"],
    ),
    (
        r#"{"type": "object", "additionalProperties": {"type": "integer"}}"#,
        &["{}", "{\"x\":1}"],
        &["{\"x\":\"1\"}"],
    ),
    (
        r#"{"type": "object", "patternProperties": {"^n": {"type": "integer"}}, "additionalProperties": false}"#,
        &["{\"n1\":1}"],
        &["{\"m\":1}", "{\"n1\":\"\"}"],
    ),
    (
        r#"{"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 1}]}"#,
        &["7", "\"x\""],
        &["\"xy\"", "true"],
    ),
    (r#"{"oneOf": [{"type": "integer"}, {"type": "string"}]}"#, &["7", "\"x\""], &["true"]),
    (r#"{"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]}"#, &["3", "5"], &["2", "6"]),
    (
        r##"{"$defs": {"tree": {"type": "object", "properties": {"left": {"$ref": "#/$defs/tree"}}, "additionalProperties": false}}, "$ref": "#/$defs/tree"}"##,
        &["{}", "{\"left\":{\"left\":{}}}"],
        &["{\"right\":{}}", "{\"left\":1}"],
    ),
    (r#"{"type": "string"}"#, &[r#""a\n\"\\\u0007""#], &["\"a\nb\"", "\"a"]),
];

fn accepts(grammar: &Grammar, text: &str) -> bool {
    let mut matcher = grammar.matcher();
    text.bytes().all(|byte| matcher.accept(u32::from(byte)).is_ok()) && matcher.may_end().unwrap()
}

#[test]
fn texts_are_accepted_exactly_if_they_follow_the_schema() {
    let words: Vec<Vec<u8>> = (0..=254).map(|byte| vec![byte]).collect();
    let vocabulary = Vocabulary::of_words(&words).unwrap();
    for (schema, right, wrong) in CASES {
        let grammar = vocabulary.compile(&GrammarSource::JsonSchema((*schema).into())).unwrap();
        for text in *right {
            assert!(accepts(&grammar, text), "{schema} refuses {text}");
        }
        for text in *wrong {
            assert!(!accepts(&grammar, text), "{schema} accepts {text}");
        }
    }
}

#[test]
fn a_json_text_may_stand_between_control_tokens() {
    let names = ["<tool_call>", "</tool_call>"].map(|name| [b"\xff", name.as_bytes()].concat());
    let words: Vec<Vec<u8>> = (0..=254).map(|byte| vec![byte]).chain(names).collect();
    let vocabulary = Vocabulary::of_words(&words).unwrap();
    let schema = r#"{"type": "object", "properties": {"name": {"const": "f"}}, "required": ["name"], "additionalProperties": false}"#;
    let (before, after) = ("<tool_call>\n".to_owned(), "\n</tool_call>".to_owned());
    let source = GrammarSource::JsonBetween { before, schema: schema.into(), after };
    let mut matcher = vocabulary.compile(&source).unwrap().matcher();
    let spelled = u32::from(b'<');
    assert!(matcher.accept(spelled).is_err(), "the name of a control token is no text");
    matcher.accept(255).unwrap();
    for byte in *b"\n{\"name\":\"f\"}\n" {
        assert!(!matcher.may_end().unwrap());
        matcher.accept(u32::from(byte)).unwrap();
    }
    matcher.accept(256).unwrap();
    assert!(matcher.is_complete());
    let broken = GrammarSource::JsonBetween {
        before: String::new(),
        schema: r#"{"items": {"not": {}}}"#.into(),
        after: String::new(),
    };
    assert!(vocabulary.compile(&broken).unwrap_err().to_string().contains("at #/items"));
}
