//! What chat templates may do, and what becomes of bad ones.

use proptest::prelude::*;
use refrain_formats::chat::{
    ChatError, ChatTemplate, Message, Part, PartKind, RenderOptions, SpecialTexts, ThinkFilter, ThinkTags,
};
use serde_json::json;

fn render_with(source: &str, options: &RenderOptions) -> Result<String, ChatError> {
    let specials = SpecialTexts { bos: Some("<s>".into()), ..Default::default() };
    ChatTemplate::new(source, specials)?.render(&[Message::new("user", "Hi <b>'x'</b>")], options)
}

fn render(source: &str) -> Result<String, ChatError> {
    render_with(source, &RenderOptions::default())
}

#[test]
fn special_tokens_are_texts_and_absent_ones_are_undefined() {
    let source = "{{ bos_token }}|{{ eos_token }}|{{ eos_token is defined }}";
    assert_eq!(render(source).unwrap(), "<s>||False");
}

#[test]
fn content_is_never_escaped_nor_read_as_a_template() {
    assert_eq!(render("{{ messages[0].content }}").unwrap(), "Hi <b>'x'</b>");
    let template = ChatTemplate::new("{{ messages[0].content }}", SpecialTexts::default()).unwrap();
    let messages = [Message::new("user", "{{ bos_token }}{% if %}")];
    assert_eq!(template.render(&messages, &RenderOptions::default()).unwrap(), "{{ bos_token }}{% if %}");
}

#[test]
fn tojson_writes_what_json_dumps_writes() {
    let extra = json!({"x": {"b": [1, 2.5, null, true], "a": "é <&> \"q\" \\ \n\u{1}", "e": {}, "l": []}});
    let options = RenderOptions { extra: extra.as_object().unwrap().clone(), ..Default::default() };
    let plain = r#"{"b": [1, 2.5, null, true], "a": "é <&> \"q\" \\ \n\u0001", "e": {}, "l": []}"#;
    assert_eq!(render_with("{{ x | tojson }}", &options).unwrap(), plain);
    let compact = r#"{"a":"\u00e9 <&> \"q\" \\ \n\u0001","b":[1,2.5,null,true],"e":{},"l":[]}"#;
    let source = "{{ x | tojson(sort_keys=true, ensure_ascii=True, separators=(',', ':')) }}";
    assert_eq!(render_with(source, &options).unwrap(), compact);
    let indented = "{\n  \"b\": [\n    1,\n    2.5,\n    null,\n    true\n  ],\n  \"a\"";
    assert!(render_with("{{ x | tojson(indent=2) }}", &options).unwrap().starts_with(indented));
}

#[test]
fn loop_controls_namespaces_and_python_methods_work() {
    let source = "{% set ns = namespace(n=0) %}{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}\
                  {% if i > 4 %}{% break %}{% endif %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}\
                  {{ ' a,b '.strip().split(',')[-1].upper() }}{{ messages[0].get('none') is none }}";
    assert_eq!(render(source).unwrap(), "8BTrue");
}

#[test]
fn blocks_are_trimmed_as_transformers_trims_them() {
    assert_eq!(render("  {% if true %}\n  x\n  {% endif %}\ny\n").unwrap(), "  x\ny");
}

#[test]
fn thinking_is_passed_only_when_decided() {
    let source = "{{ enable_thinking if enable_thinking is defined else 'open' }}";
    assert_eq!(render(source).unwrap(), "open");
    for (thinking, text) in [(true, "True"), (false, "False")] {
        let options = RenderOptions { thinking: Some(thinking), ..Default::default() };
        assert_eq!(render_with(source, &options).unwrap(), text);
    }
}

#[test]
fn a_template_that_does_not_parse_names_its_line() {
    let error = render("one\ntwo\n{% if x %}\nthree").unwrap_err();
    assert!(matches!(error, ChatError::Syntax { line: 3 | 4, .. }), "{error:?}");
    assert!(error.to_string().starts_with("chat template does not parse, line "), "{error}");
    assert!(error.hint().is_some());
}

#[test]
fn a_template_that_fails_names_line_and_reason() {
    let error = render("\n\n{{ messages | nonsense }}").unwrap_err();
    assert_eq!(
        error.to_string(),
        "chat template fails at line 3: unknown filter: filter nonsense is unknown"
    );
    assert!(matches!(render("{{ nothing.at.all }}"), Err(ChatError::Render { line: 1, .. })));
}

#[test]
fn a_refusal_is_the_template_authors_own_words() {
    let error = render("\n{% macro m() %}{{ raise_exception('no system role') }}{% endmacro %}{{ m() }}")
        .unwrap_err();
    assert_eq!(error, ChatError::Refused { line: 2, reason: "no system role".into() });
}

#[test]
fn templates_that_never_end_are_stopped() {
    let loops = "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}x{% endfor %}{% endfor %}{% endfor %}";
    assert!(matches!(render(loops), Err(ChatError::Runaway { .. })));
    assert!(render("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}").is_err());
    assert!(matches!(render(&" ".repeat(2 << 20)), Err(ChatError::TooLong { .. })));
}

#[test]
fn nesting_without_end_does_not_overflow_the_stack() {
    for (before, link, after) in [
        ("{{ ", "(", ""),
        ("{{ ", "-", "1 }}"),
        ("{{ ", "not ", "1 }}"),
        ("{{ 1", "+1", " }}"),
        ("{{ a", ".b", " }}"),
        ("{{ 1", " if 1 else 1", " }}"),
        ("", "{% if x %}", ""),
        ("{% if x %}", "{% elif y %}", "{% endif %}"),
    ] {
        let _ = render(&format!("{before}{}{after}", link.repeat(65_000 / link.len())));
    }
    let source =
        "{% set ns = namespace(x=[1]) %}{% for i in range(2000) %}{% set ns.x = ns.x[:] %}{% endfor %}";
    assert_eq!(render(source).unwrap(), "");
}

#[test]
fn templates_cannot_reach_other_files() {
    assert!(render("{% include 'Cargo.toml' %}").is_err());
}

fn texts(parts: &[Part], kind: PartKind) -> String {
    parts.iter().filter(|p| p.kind == kind).map(|p| p.text.as_str()).collect()
}

fn filter(mut filter: ThinkFilter, pieces: &[&str]) -> (String, String) {
    let mut parts: Vec<Part> = pieces.iter().flat_map(|piece| filter.push(piece)).collect();
    parts.extend(filter.finish());
    assert!(parts.iter().all(|part| !part.text.is_empty()));
    (texts(&parts, PartKind::Thinking), texts(&parts, PartKind::Answer))
}

#[test]
fn thinking_is_told_from_the_answer() {
    let both = |t: &str, a: &str| (t.to_owned(), a.to_owned());
    let run = |text: &str| filter(ThinkFilter::default(), &[text]);
    assert_eq!(run("<think>\nhm\nhm\n</think>\n\nYes"), both("hm\nhm", "Yes"));
    assert_eq!(run("\n <think>hm"), both("hm", ""));
    assert_eq!(run("Use <think>x</think>"), both("", "Use <think>x</think>"));
    assert_eq!(run("<thin"), both("", "<thin"));
    assert_eq!(run("<think>a</thi"), both("a</thi", ""));
    assert_eq!(run(""), both("", ""));
    let opened = ThinkFilter::for_prompt(ThinkTags::default(), "<assistant><think>\n");
    assert!(opened.is_thinking());
    assert_eq!(filter(opened, &["hm</think>Yes"]), both("hm", "Yes"));
}

#[test]
fn gemma_4_thinks_in_a_channel_that_its_template_closes_where_it_shall_not() {
    let both = |t: &str, a: &str| (t.to_owned(), a.to_owned());
    let run = |prompt: &str, reply: &str| {
        filter(ThinkFilter::for_prompt(ThinkTags::of_prompt(prompt), prompt), &[reply])
    };
    let turn = "<bos><|turn>user\nhi<turn|>\n<|turn>model\n";
    assert_eq!(run(turn, "<|channel>thought\nhm\n<channel|>Yes"), both("hm", "Yes"));
    assert_eq!(run(turn, "Yes"), both("", "Yes"));
    assert_eq!(run(&format!("{turn}<|channel>thought\n<channel|>"), "Yes"), both("", "Yes"));
    assert_eq!(run("<|im_start|>user", "<think>hm</think>Yes"), both("hm", "Yes"));
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn however_a_reply_is_cut_the_parts_are_the_same(
        pieces in prop::collection::vec(
            prop_oneof![Just("<think>"), Just("</think>"), Just("\n"), Just("<"), Just("</"), Just("é"), Just("ab"), Just(" ")],
            0..12,
        ),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..6),
    ) {
        let text = pieces.concat();
        let whole = filter(ThinkFilter::default(), &[&text]);
        let mut at: Vec<usize> = cuts.iter().map(|cut| cut.index(text.len() + 1)).filter(|&i| text.is_char_boundary(i)).collect();
        at.extend([0, text.len()]);
        at.sort_unstable();
        let cut: Vec<&str> = at.windows(2).map(|w| &text[w[0]..w[1]]).collect();
        prop_assert_eq!(filter(ThinkFilter::default(), &cut), whole);
    }

    #[test]
    fn broken_templates_are_errors_and_never_panics(source in "(\\{\\{|\\{%|%\\}|\\}\\}|\\{#| (if|for|set|endif|endfor|macro|in|is|generation)|[a-z|.()'+\\n-]){0,24}") {
        let _ = render(&source);
    }
}
