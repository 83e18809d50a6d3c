//! Features of chat templates, and errors of bad ones.

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
fn thinking_is_passed_only_if_set() {
    let source = "{{ enable_thinking if enable_thinking is defined else 'open' }}";
    assert_eq!(render(source).unwrap(), "open");
    for (thinking, text) in [(true, "True"), (false, "False")] {
        let options = RenderOptions { thinking: Some(thinking), ..Default::default() };
        assert_eq!(render_with(source, &options).unwrap(), text);
    }
}

#[test]
fn a_syntax_error_names_its_line() {
    let error = render("one\ntwo\n{% if x %}\nthree").unwrap_err();
    assert!(matches!(error, ChatError::Syntax { line: 3 | 4, .. }), "{error:?}");
    assert!(error.to_string().starts_with("chat template does not parse, line "), "{error}");
    assert!(error.hint().is_some());
}

#[test]
fn a_failure_names_line_and_reason() {
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
fn deep_nesting_does_not_overflow_the_stack() {
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

/// Renders on a thread, so that a hang fails this test alone.
fn render_in_time(source: &str) -> Result<String, ChatError> {
    let (sender, receiver) = std::sync::mpsc::channel();
    let owned = source.to_owned();
    std::thread::spawn(move || sender.send(render(&owned)));
    let limit = std::time::Duration::from_secs(60);
    receiver.recv_timeout(limit).unwrap_or_else(|_| panic!("no result after {limit:?}: {source}"))
}

/// A loop that applies `step` to `ns.x`, which starts as `start`.
fn growing(start: &str, step: &str) -> String {
    format!(
        "{{% set ns = namespace(x={start}) %}}{{% for i in range(99999) %}}\
         {{% set ns.x = {step} %}}{{% endfor %}}{{{{ ns.x | length }}}}"
    )
}

#[test]
fn values_that_grow_run_out_of_memory() {
    for (start, step) in [
        ("'x'", "ns.x ~ ns.x"),
        ("'x'", "ns.x + ns.x"),
        ("'x'", "ns.x * 1000"),
        ("'x'", "ns.x | replace('x', 'xx')"),
        ("'x'", "ns.x.replace('', ns.x)"),
        ("'x'", "[ns.x, ns.x] | join(ns.x)"),
        ("'x'", "ns.x.join([ns.x, ns.x, ns.x])"),
        ("'x\n'", "ns.x | indent(ns.x) ~ ns.x"),
        ("'x'", "'%s%s' % (ns.x, ns.x)"),
        ("'x'", "'{}{}'.format(ns.x, ns.x)"),
        ("'x'", "'%s%s' | format(ns.x, ns.x)"),
        ("'<'", "ns.x | escape | escape ~ ns.x"),
        ("[1]", "ns.x + ns.x"),
        ("[1]", "ns.x * 1000"),
        ("[1]", "(ns.x | list) + ns.x"),
        ("(1,)", "ns.x + ns.x"),
        ("'x'", "(ns.x | list | string) ~ ns.x"),
        ("'x'", "ns.x | tojson | tojson ~ ns.x"),
        ("'x'", "(ns.x ~ ns.x)[:]"),
    ] {
        let error = render_in_time(&growing(start, step)).unwrap_err();
        assert!(matches!(error, ChatError::OutOfMemory { .. }), "{step}: {error}");
        assert!(error.to_string().starts_with("chat template needs more than "), "{error}");
    }
}

#[test]
fn output_and_captures_count_as_memory() {
    let text = "x".repeat(30_000);
    let endless = format!("{{% for i in range(99999) %}}{text}{{% endfor %}}");
    for source in [
        endless.clone(),
        format!("{{% set x %}}{endless}{{% endset %}}"),
        format!("{{% filter upper %}}{endless}{{% endfilter %}}"),
        format!("{{% macro m() %}}{endless}{{% endmacro %}}{{{{ m() }}}}"),
        "{% set x = 'x' %}".to_owned() + &"{% set x %}{{ x }}{{ x }}{% endset %}".repeat(60),
        "{% set x = 'x' %}".to_owned() + &"{% set x = x ~ x %}".repeat(60),
        "{{ ".to_owned() + &"('x' * 9999999) ~ ".repeat(60) + "'' }}",
    ] {
        let error = render_in_time(&source).unwrap_err();
        assert!(matches!(error, ChatError::OutOfMemory { .. }), "{error}");
    }
}

#[test]
fn work_on_long_values_counts_as_steps() {
    for (value, step) in [
        ("[''] * 1000000", "x | join"),
        ("[''] * 1000000", "x | first"),
        ("'x' * 9999999", "x | tojson"),
        ("'x' * 9999999", "[x] | string"),
        ("'0' * 9999999", "x | int"),
        ("'0' * 9999999", "x | float"),
        ("'0' * 9999999", "'%d' % x"),
        ("'0' * 9999999", "[1] | map(attribute=x) | list"),
        ("'x' * 9999999", "x == x ~ ''"),
        ("'x' * 9999999", "x.find('y')"),
        ("'x' * 9999999", "x[5000000]"),
        ("'x' * 9999999", "x | length"),
        ("'x' * 9999999", "'y' in x"),
        ("'x' * 9999999", "x is upper"),
    ] {
        let source = format!(
            "{{% set x = {value} %}}{{% for i in range(99999) %}}{{% for j in range(99) %}}\
             {{% set y = {step} %}}{{% endfor %}}{{% endfor %}}"
        );
        let error = render_in_time(&source).unwrap_err();
        assert!(matches!(error, ChatError::Runaway { .. }), "{step}: {error}");
    }
}

#[test]
fn memory_that_is_released_can_be_used_again() {
    let source = "{% for i in range(2000) %}{% set x = 'x' * 1000000 %}{% endfor %}ok";
    assert!(matches!(render_in_time(source), Err(ChatError::Runaway { .. })));
    let source = "{% for i in range(500) %}{% set x = 'x' * 1000000 %}{% endfor %}ok";
    assert_eq!(render_in_time(source).unwrap(), "ok");
}

#[test]
fn a_long_conversation_has_a_larger_budget() {
    let template = ChatTemplate::new(
        "{% for m in messages %}{% set c = m.content | trim %}<{{ m.role }}>{{ c }}</>{% endfor %}",
        SpecialTexts::default(),
    )
    .unwrap();
    let messages = vec![Message::new("user", "x".repeat(1 << 20)); 100];
    let text = template.render(&messages, &RenderOptions::default()).unwrap();
    assert_eq!(text.len(), 100 * ((1 << 20) + 9));
}

#[test]
fn values_inside_each_other_neither_overflow_nor_hang() {
    let nest = |step: &str, end: &str| {
        format!(
            "{{% set ns = namespace(x=[1]) %}}{{% for i in range(99999) %}}\
             {{% set ns.x = {step} %}}{{% endfor %}}{end}"
        )
    };
    for source in [
        nest("[ns.x]", "{{ ns.x }}"),
        nest("{'x': ns.x}", "{{ ns.x | tojson }}"),
        nest("[ns.x, ns.x]", "{{ ns.x }}"),
        nest("(ns.x, loop)", "{{ ns.x }}"),
    ] {
        let error = render_in_time(&source).unwrap_err();
        assert!(matches!(error, ChatError::TooDeep { .. }), "{error}");
    }
    // Thirty levels of shared lists are small in memory and a billion items when written out.
    let shared =
        "{% set ns = namespace(x=[1]) %}{% for i in range(30) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}";
    for end in ["{{ ns.x }}", "{{ ns.x | tojson }}", "{{ ns.x ~ '' }}", "{{ [ns.x] == [ns.x] }}"] {
        assert!(render_in_time(&format!("{shared}{end}")).is_err(), "{end}");
    }
}

#[test]
fn a_namespace_that_contains_itself_does_not_recurse() {
    let own = "{% set ns = namespace() %}{% set ns.ns = ns %}{% set ns.list = [ns] %}";
    for end in [
        "{{ ns }}",
        "{{ ns.list }}",
        "{{ ns ~ ns }}",
        "{{ ns.ns == ns }}",
        "{{ ns.list == ns.list }}",
        "{{ ns.list | join(',') }}",
        "{{ [ns] | sort }}",
    ] {
        render_in_time(&format!("{own}{end}")).unwrap();
    }
    assert!(matches!(render_in_time(&format!("{own}{{{{ ns | tojson }}}}")), Err(ChatError::Render { .. })));
}

#[test]
fn recursion_without_end_is_too_deep() {
    for source in [
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% macro a() %}{{ b() }}{% endmacro %}{% macro b() %}{{ a() }}{% endmacro %}{{ a() }}",
        "{% set ns = namespace() %}{% macro m() %}{{ ns.m() }}{% endmacro %}{% set ns.m = m %}{{ m() }}",
        "{% macro m() %}{{ caller() }}{% call m() %}x{% endcall %}{% endmacro %}{% call m() %}y{% endcall %}",
        "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    ] {
        let error = render_in_time(source).unwrap_err();
        assert!(
            matches!(error, ChatError::TooDeep { .. } | ChatError::OutOfMemory { .. }),
            "{source}: {error}"
        );
    }
}

#[test]
fn an_unusable_template_fails_only_when_it_is_rendered() {
    let long = " ".repeat(1 << 20);
    for source in ["{% if %}", long.as_str()] {
        let error = ChatTemplate::new(source, SpecialTexts::default()).unwrap_err();
        let template = ChatTemplate::deferred(source, SpecialTexts::default());
        let rendered = template.render(&[Message::new("user", "Hi")], &RenderOptions::default());
        assert_eq!(rendered, Err(error));
    }
    let template = ChatTemplate::deferred("{{ messages[0].content }}", SpecialTexts::default());
    assert_eq!(template.render(&[Message::new("user", "Hi")], &RenderOptions::default()).unwrap(), "Hi");
}

#[test]
fn hints_name_no_flags() {
    for source in ["{% if %}", "{{ nothing.at.all }}", "{{ raise_exception('no') }}"] {
        assert!(!render(source).unwrap_err().hint().unwrap().contains("--"));
    }
}

#[test]
fn expressions_follow_jinja() {
    for (source, text) in [
        (
            "{{ 7 // 2 }} {{ -7 // 2 }} {{ -7 % 3 }} {{ 2 ** 10 }} {{ 7 / 2 }} {{ 1 + 1.5 }}",
            "3 -4 2 1024 3.5 2.5",
        ),
        ("{{ 1 < 2 < 3 }} {{ 1 < 2 > 3 }} {{ 'a' in 'cat' }} {{ 4 not in [1, 2] }}", "True False True True"),
        (
            "{{ [1, 2, 3][-1] }} {{ [1, 2, 3, 4][1:3] }} {{ [1, 2, 3][::-1] }} {{ 'abc'[::-1] }}",
            "3 [2, 3] [3, 2, 1] cba",
        ),
        ("{{ 'héllo'[1:3] }} {{ 'abc'[5:] }}|{{ 'abc'[-2:] }} {{ (1, 2) + (3,) }}", "él |bc (1, 2, 3)"),
        ("{{ none or 'x' }} {{ '' and 'y' }}|{{ not 0 }} {{ true ~ none ~ 1.0 }}", "x |True TrueNone1.0"),
        ("{{ 'a' if false }}|{{ 'a' if false else 'b' if true else 'c' }}", "|b"),
        (
            "{% set a, b = [1, 2] %}{{ a }}{{ b }}{% for k, v in {'x': 1}.items() %}{{ k }}={{ v }}{% endfor %}",
            "12x=1",
        ),
        (
            "{% for x in [3, 1, 2] if x > 1 %}{{ loop.index }}/{{ loop.length }}:{{ x }} {% endfor %}",
            "1/2:3 2/2:2 ",
        ),
        ("{% for x in [] %}a{% else %}empty{% endfor %}", "empty"),
        (
            "{% for x in [1, 2, 3] %}{{ loop.previtem }}<{{ x }}>{{ loop.nextitem }}{{ loop.cycle('a', 'b') }} {% endfor %}",
            "<1>2a 1<2>3b 2<3>a ",
        ),
        (
            "{% set x = 1 %}{% for i in [1] %}{% set x = 2 %}{% endfor %}{{ x }}{% if true %}{% set x = 3 %}{% endif %}{{ x }}",
            "13",
        ),
        (
            "{% macro m(a, b='B', c=a) %}{{ a }}{{ b }}{{ c }}{% endmacro %}{{ m(1) }} {{ m(1, c=2) }} {{ m(*[1, 2], **{'c': 3}) }}",
            "1B1 1B2 123",
        ),
        (
            "{% set y = 5 %}{% macro m() %}{{ y }}{% endmacro %}{% for i in [1] %}{% set y = 6 %}{{ m() }}{% endfor %}",
            "5",
        ),
        ("{% macro m() %}<{{ caller('x') }}>{% endmacro %}{% call(v) m() %}[{{ v }}]{% endcall %}", "<[x]>"),
        ("{% for n in [[1, [2]]] recursive %}{% for m in n %}{{ m }};{% endfor %}{% endfor %}", "1;[2];"),
        ("{% with a = 1, b = 2 %}{{ a + b }}{% endwith %}{{ a is defined }}", "3False"),
        ("{% filter upper %}a{{ 'b' }}{% endfilter %}{% set t | trim %} x {% endset %}[{{ t }}]", "AB[x]"),
        (
            "{{ [1, 2, 3] | map('string') | join('-') }} {{ messages | map(attribute='role') | list }}",
            "1-2-3 ['user']",
        ),
        ("{{ [1, 2, 3, 4] | select('even') | list }} {{ [0, 1] | reject | list }}", "[2, 4] [0]"),
        (
            "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ messages | rejectattr('role', 'in', ['user']) | list }}",
            "1[]",
        ),
        (
            "{{ {'b': 1, 'a': 2} | dictsort }} {{ ['b', 'A', 'c'] | sort }} {{ [3, 1, 2] | sort(reverse=true) }}",
            "[('a', 2), ('b', 1)] ['A', 'b', 'c'] [3, 2, 1]",
        ),
        (
            "{{ [1, 2, 2, 1] | unique | list }} {{ [1, 5, 3] | max }} {{ [1, 5, 3] | min }} {{ [1, 2] | sum }}",
            "[1, 2] 5 1 3",
        ),
        (
            "{{ [1, 2, 3, 4, 5] | batch(2) | list }} {{ [1, 2, 3] | slice(2) | list }}",
            "[[1, 2], [3, 4], [5]] [[1, 2], [3]]",
        ),
        (
            "{% for k, v in [{'t': 1}, {'t': 2}, {'t': 1}] | groupby('t') %}{{ k }}:{{ v | length }} {% endfor %}",
            "1:2 2:1 ",
        ),
        (
            "{{ 'a b  c'.split() }} {{ 'a,b,c'.split(',', 1) }} {{ 'a,b,c'.rsplit(',', 1) }}",
            "['a', 'b', 'c'] ['a', 'b,c'] ['a,b', 'c']",
        ),
        (
            "{{ 'xxaxx'.strip('x') }} {{ ' a '.lstrip() }}|{{ 'hello world' | title }} {{ 'hELLO' | capitalize }}",
            "a a |Hello World Hello",
        ),
        (
            "{{ 'aXbX'.replace('X', '-', 1) }} {{ 'abc'.find('c') }} {{ 'abc'.find('z') }} {{ 'abab'.count('ab') }}",
            "a-bX 2 -1 2",
        ),
        (
            "{{ '%s is %d, %.2f%%' | format('x', 3, 1.5) }} {{ '{} {1} {n:>3}|{m:03d}'.format('a', 'b', n='c', m=7) }}",
            "x is 3, 1.50% a b   c|007",
        ),
        ("{{ 'a\nb\n\nc' | indent(2) }}", "a\n  b\n\n  c"),
        (
            "{{ '3' | int + 1 }} {{ 'x' | int(9) }} {{ '1.5' | float }} {{ 2.567 | round(2) }} {{ -3 | abs }}",
            "4 9 1.5 2.57 3",
        ),
        ("{{ x | default('d') }} {{ '' | default('d', true) }} {{ none | default('d') }}", "d d None"),
        (
            "{{ 'a' is string }} {{ {} is mapping }} {{ [] is sequence }} {{ 1 is number }} {{ true is boolean }} {{ x is undefined }} {{ none is none }} {{ 'ab' is startingwith('a') }}",
            "True True True True True True True True",
        ),
        (
            "{{ dict(a=1, b=2) }} {{ namespace(a=1).a }} {{ range(1, 6, 2) | list }} {{ range(3, 0, -1) | list }}",
            "{'a': 1, 'b': 2} 1 [1, 3, 5] [3, 2, 1]",
        ),
        (
            "{{ 'x<y' | escape }} {{ 'a-b' | upper | lower }} {{ ['a', 'b'] | first }}{{ ['a', 'b'] | last }} {{ 'abc' | reverse }}",
            "x&lt;y a-b ab cba",
        ),
    ] {
        assert_eq!(render(source).unwrap_or_else(|e| panic!("{source}: {e}")), text, "{source}");
    }
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
fn thinking_is_separated_from_the_answer() {
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
fn gemma_4_thinks_in_a_channel_that_its_template_may_close() {
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
    fn parts_do_not_depend_on_how_a_reply_is_cut(
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
