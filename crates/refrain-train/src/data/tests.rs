//! From files to batches, as in a run.

use std::path::PathBuf;
use std::sync::Arc;

use super::encode::{Encoder, LEARN};
use super::fixtures::{EOS, byte_level, encoder, write};
use super::{Batch, Batches, Corpus, CorpusOptions, DataError, DataPosition, Loader, LoaderOptions, Passes};
use crate::config::{OnLong, Order};

const CHATML: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

/// Drops the reasoning of earlier turns, like Qwen 3.
const REWRITES: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n\
{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}\
{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

/// No generation prompt, and the end-of-text token only at the end, like Llama 2.
const BRACKETS: &str = "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]\
{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}";

/// The generation prompt differs from the start of an answer.
const THINKS_FIRST: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}";

/// The conversation starts with its length.
const COUNTS: &str = "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}";

const REFUSES: &str = "{% if messages | length > 2 %}{{ raise_exception('two at most') }}{% endif %}\
{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}";

fn options(context: usize, order: Order) -> CorpusOptions {
    CorpusOptions { context, order, on_long: OnLong::Truncate, n_threads: 2 }
}

fn read(files: &[PathBuf], encoder: &Encoder, options: CorpusOptions) -> Result<Corpus, DataError> {
    Corpus::read(files, encoder, options, &mut |_, _| {})
}

/// The corpus of one file.
fn corpus_of(
    name: &str,
    content: &str,
    encoder: &Encoder,
    options: CorpusOptions,
) -> Result<Corpus, DataError> {
    let folder = tempfile::tempdir().unwrap();
    read(&[write(folder.path(), name, content)], encoder, options)
}

fn loader_options(n_seqs: usize, passes: Passes) -> LoaderOptions {
    LoaderOptions { n_seqs, seed: 5, passes, n_ahead: 2 }
}

fn batches(corpus: &Arc<Corpus>, n_seqs: usize, passes: Passes) -> Batches {
    Batches::new(corpus.clone(), loader_options(n_seqs, passes), None).unwrap()
}

/// The text of each document, with targets in brackets.
fn shown(corpus: &Corpus, encoder: &Encoder) -> Vec<String> {
    let text = |document: std::ops::Range<usize>| {
        let (mut out, mut is_target) = (String::new(), false);
        for token in &corpus.marked()[document] {
            if (token & LEARN != 0) != is_target {
                is_target = !is_target;
                out.push(if is_target { '⟦' } else { '⟧' });
            }
            out.push_str(&encoder.tokenizer().decode_with_special(&[token & !LEARN]).unwrap());
        }
        if is_target {
            out.push('⟧');
        }
        out
    };
    corpus.documents().map(text).collect()
}

fn chat_line(turns: &[(&str, &str)]) -> String {
    let messages: Vec<_> =
        turns.iter().map(|(role, content)| serde_json::json!({ "role": role, "content": content })).collect();
    serde_json::json!({ "messages": messages }).to_string()
}

/// The samples that a conversation becomes under a template.
fn samples_of(template: &str, turns: &[(&str, &str)]) -> (Vec<String>, super::DataReport) {
    let encoder = encoder(Some(template));
    // Adds a plain text, so that something is left if the conversation is refused.
    let content = format!("{}\n{{\"text\":\"x\"}}", chat_line(turns));
    let corpus = corpus_of("a.jsonl", &content, &encoder, options(500, Order::Shuffle)).unwrap();
    let mut found = shown(&corpus, &encoder);
    assert_eq!(found.pop().as_deref(), Some("<s>⟦x<|endoftext|>⟧"));
    (found, corpus.report().clone())
}

const TWO_TURNS: &[(&str, &str)] =
    &[("user", "hello"), ("assistant", "the answer"), ("user", "more"), ("assistant", "\n\nless")];

#[test]
fn only_assistant_turns_are_targets() {
    let (found, _) = samples_of(CHATML, TWO_TURNS);
    assert_eq!(
        found,
        ["<s><|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n⟦the answer<|im_end|>⟧\n\
          <|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant⟦\n\n\nless<|im_end|>⟧"]
    );
    let (found, _) = samples_of(BRACKETS, TWO_TURNS);
    assert_eq!(
        found,
        ["<s>[INST] hello [/INST]⟦ the answer<|endoftext|>⟧[INST] more [/INST]⟦ \n\nless<|endoftext|>⟧"]
    );
    let (found, _) = samples_of(THINKS_FIRST, &TWO_TURNS[..2]);
    assert_eq!(
        found,
        ["<s><|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n⟦the answer<|im_end|>⟧"]
    );
}

#[test]
fn messages_after_the_last_answer_are_dropped() {
    let (found, _) = samples_of(CHATML, &TWO_TURNS[..3]);
    assert_eq!(
        found,
        ["<s><|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n⟦the answer<|im_end|>⟧"]
    );
}

#[test]
fn a_template_that_rewrites_earlier_turns_gives_one_sample_per_turn() {
    let (found, report) = samples_of(REWRITES, TWO_TURNS);
    assert_eq!(report.n_split_by_turn, 1);
    assert_eq!(
        found,
        [
            "<s><|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n⟦<think>\n\n</think>\n\nthe answer<|im_end|>⟧",
            "<s><|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nthe answer<|im_end|>\n\
             <|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n⟦<think>\n\n</think>\n\n\n\nless<|im_end|>⟧"
        ]
    );
}

#[test]
fn conversations_that_a_template_cannot_render_are_counted_with_a_reason() {
    let (found, report) = samples_of(COUNTS, TWO_TURNS);
    assert_eq!((found, report.n_refused), (vec![], 1));
    let reason = report.first_refused.unwrap();
    assert!(reason.contains("a.jsonl, line 1") && reason.contains("message 2"), "{reason}");
    let (found, report) = samples_of(REFUSES, TWO_TURNS);
    assert_eq!((found, report.n_refused), (vec![], 1));
    assert!(report.to_string().contains("two at most"), "{report}");
    let (found, _) = samples_of(REFUSES, &TWO_TURNS[..2]);
    assert_eq!(found, ["<s>hello<|im_end|>⟦the answer<|im_end|>⟧"]);
}

#[test]
fn pairs_are_rendered_by_the_template_if_there_is_one() {
    let lines = "{\"prompt\":\"hello\",\"completion\":\"the\"}\n\
                 {\"instruction\":\"do\",\"input\":\"it\",\"output\":\"so\"}";
    let found = |template| {
        let encoder = encoder(template);
        let corpus = corpus_of("a.jsonl", lines, &encoder, options(500, Order::Shuffle)).unwrap();
        shown(&corpus, &encoder)
    };
    assert_eq!(
        found(Some(CHATML)),
        [
            "<s><|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n⟦the<|im_end|>⟧",
            "<s><|im_start|>user\ndo\n\nit<|im_end|>\n<|im_start|>assistant\n⟦so<|im_end|>⟧",
        ]
    );
    assert_eq!(
        found(None),
        [
            "<s>hello⟦the<|endoftext|>⟧",
            "<s>### Instruction:\ndo\n\n### Input:\nit\n\n### Response:\n⟦so<|endoftext|>⟧",
        ]
    );
}

#[test]
fn without_an_end_token_in_the_template_the_model_still_learns_to_stop() {
    let (found, _) =
        samples_of("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", TWO_TURNS);
    assert_eq!(
        found,
        ["<s>user: hello\n⟦assistant: the answer\n⟧user: more\n⟦assistant: \n\nless\n<|endoftext|>⟧"]
    );
}

#[test]
fn long_conversations_are_truncated_or_dropped_and_counted() {
    let lines = [
        chat_line(&[("user", "a"), ("assistant", "b")]),
        chat_line(&[("user", "a"), ("assistant", &"x".repeat(100))]),
        chat_line(&[("user", &"x".repeat(100)), ("assistant", "b")]),
    ];
    let encoder = encoder(Some(CHATML));
    let of = |on_long| {
        let options = CorpusOptions { on_long, ..options(40, Order::Shuffle) };
        corpus_of("a.jsonl", &lines.join("\n"), &encoder, options).unwrap()
    };
    let report = of(OnLong::Truncate).report().clone();
    assert_eq!((report.n_documents, report.n_truncated, report.n_too_long), (2, 1, 0));
    assert_eq!(report.n_without_target, 1, "an answer past the context");
    let report = of(OnLong::Drop).report().clone();
    assert_eq!((report.n_documents, report.n_truncated, report.n_too_long), (1, 0, 2));
    assert!(report.to_string().contains("2 dropped: longer than the context"), "{report}");
    let options = CorpusOptions { on_long: OnLong::Drop, ..options(2, Order::Shuffle) };
    let error = corpus_of("a.jsonl", &lines[0], &encoder, options).unwrap_err();
    assert!(matches!(error, DataError::NothingLeft { .. }), "{error}");
    assert!(error.to_string().contains("1 dropped: longer than the context"), "{error}");
}

#[test]
fn bad_lines_are_errors_with_line_numbers() {
    let encoder = encoder(Some(CHATML));
    let good = chat_line(TWO_TURNS);
    let cases = [
        ("{\"text\": \"", "a.jsonl, line 3: EOF"),
        ("[]", "a.jsonl, line 3: expected an object, found a list"),
        ("{\"texts\":1}", "a.jsonl, line 3: unknown kind of sample with `texts`"),
        (
            "{\"messages\":[{\"role\":\"user\",\"content\":\"x\"}]}",
            "a.jsonl, line 3: the conversation has no assistant message, 1 in total",
        ),
    ];
    for (bad, message) in cases {
        let content = format!("{good}\n\n{bad}\n{good}\n");
        let error = corpus_of("a.jsonl", &content, &encoder, options(64, Order::Shuffle)).unwrap_err();
        assert!(error.to_string().contains(message), "{error}");
        assert!(error.hint().is_some());
    }
    let error = corpus_of("a.jsonl", &good, &super::fixtures::encoder(None), options(64, Order::Shuffle));
    assert!(matches!(error, Err(DataError::NoTemplate { line: 1, .. })));
    assert!(matches!(
        Encoder::with_template(byte_level("gpt-2", None, false), Some("{% if")),
        Err(DataError::Template(_))
    ));
}

#[test]
fn bad_text_files_are_errors() {
    let encoder = encoder(None);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.txt");
    for (content, expected) in
        [(&b""[..], "is empty"), (b"\n \n", "is empty"), (b"ab\0c", "byte 0x00 at offset 2")]
    {
        std::fs::write(&path, content).unwrap();
        let error = read(std::slice::from_ref(&path), &encoder, options(8, Order::Shuffle)).unwrap_err();
        assert!(error.to_string().contains(expected), "{error}");
    }
    let error = read(&[folder.path().to_owned()], &encoder, options(8, Order::File)).unwrap_err();
    assert!(matches!(error, DataError::NotAFile { .. }));
}

#[test]
fn file_order_is_tokens_i_t_to_i_t_plus_t_with_targets_shifted_by_one() {
    let encoder = encoder(None);
    let text = "hello the and then\n\n".repeat(20);
    let corpus = Arc::new(corpus_of("a.txt", &text, &encoder, options(7, Order::File)).unwrap());
    let ids: Vec<i32> =
        encoder.tokenizer().encode(&text, false, false).unwrap().iter().map(|&id| id as i32).collect();
    assert_eq!(corpus.tokens().map(|id| id as i32).collect::<Vec<_>>(), ids, "no tokens are added");
    let n_samples = (ids.len() - 1) / 7;
    let mut batches = batches(&corpus, 3, Passes::Endless);
    for step in 0..2 * n_samples {
        let batch = batches.next().unwrap();
        for seq in 0..3 {
            let sample = (step * 3 + seq) % n_samples;
            let rows = seq * 7..seq * 7 + 7;
            assert_eq!(batch.tokens[rows.clone()], ids[sample * 7..sample * 7 + 7]);
            assert_eq!(batch.targets[rows.clone()], ids[sample * 7 + 1..sample * 7 + 8]);
            assert_eq!(batch.positions[rows.clone()], [0, 1, 2, 3, 4, 5, 6]);
            assert!(
                batch.spans[rows.clone()].iter().all(|span| *span == [rows.start as i32, rows.end as i32])
            );
        }
        assert_eq!(batch.n_targets, 21);
    }
    let short = corpus_of("a.txt", "ab", &encoder, options(7, Order::File)).unwrap();
    let error = Batches::new(Arc::new(short), loader_options(1, Passes::Endless), None).unwrap_err();
    assert!(matches!(error, DataError::TooShort { n_tokens: 2, context: 7 }));
}

#[test]
fn file_order_joins_files_and_writes_separators_as_their_token() {
    let encoder = encoder(None);
    let folder = tempfile::tempdir().unwrap();
    let files = [
        write(folder.path(), "a.txt", &format!("one\n{EOS}\n{EOS}two{EOS}")),
        write(folder.path(), "b.txt", "three"),
    ];
    let corpus = read(&files, &encoder, options(4, Order::File)).unwrap();
    let ids: Vec<u32> = corpus.tokens().collect();
    let text = encoder.tokenizer().decode_with_special(&ids).unwrap();
    assert_eq!(text, format!("one\n{EOS}\n{EOS}two{EOS}three"));
    assert_eq!(ids.iter().filter(|&&id| Some(id) == encoder.tokenizer().eos()).count(), 3);
}

#[test]
fn separators_split_a_text_into_documents() {
    let encoder = encoder(None);
    let text = format!("{EOS}\none\n{EOS}\n\r\n{EOS}two\n\nlines\n{EOS}\n");
    let corpus = corpus_of("a.txt", &text, &encoder, options(64, Order::Shuffle)).unwrap();
    assert_eq!(shown(&corpus, &encoder), ["<s>⟦one<|endoftext|>⟧", "<s>⟦two\n\nlines<|endoftext|>⟧"]);
    let corpus = corpus_of("a.txt", "\none\n", &encoder, options(64, Order::Shuffle)).unwrap();
    assert_eq!(
        shown(&corpus, &encoder),
        ["<s>⟦\none\n<|endoftext|>⟧"],
        "a text without separators is unchanged"
    );
}

/// Many documents of different lengths, each with distinct tokens.
fn documents(n: usize) -> String {
    (0..n).map(|i| format!("{{\"text\":\"{}\"}}\n", format!("{i} ").repeat(1 + i * 7 % 13))).collect()
}

/// The documents of a batch: tokens and targets of each span, checked against the invariants of [`Batch`].
fn spans_of(batch: &Batch, context: usize) -> Vec<(Vec<i32>, Vec<i32>)> {
    let n_rows = batch.tokens.len();
    assert!(n_rows.is_multiple_of(context));
    let (mut found, mut at) = (Vec::new(), 0);
    while at < n_rows {
        let [first, end] = batch.spans[at].map(|row| row as usize);
        if batch.tokens[at] < 0 {
            assert_eq!([first, end], [at, at]);
            assert_eq!((batch.targets[at], batch.positions[at]), (-1, -1));
            at += 1;
            continue;
        }
        assert_eq!(first, at);
        assert!(end > first && (end - 1) / context == first / context, "a span stays in its row");
        for row in first..end {
            assert_eq!(batch.spans[row], [first as i32, end as i32]);
            assert_eq!(batch.positions[row], (row - first) as i32);
            assert!(
                row + 1 == end || batch.targets[row] == batch.tokens[row + 1] || batch.targets[row] == -1
            );
        }
        found.push((batch.tokens[first..end].to_vec(), batch.targets[first..end].to_vec()));
        at = end;
    }
    assert_eq!(batch.n_targets, batch.targets.iter().filter(|&&target| target >= 0).count());
    assert_eq!(batch.n_tokens(), batch.tokens.iter().filter(|&&token| token >= 0).count());
    found
}

#[test]
fn every_epoch_has_every_document_once_in_a_new_order() {
    let encoder = encoder(None);
    let context = 64;
    let corpus =
        Arc::new(corpus_of("a.jsonl", &documents(300), &encoder, options(context, Order::Shuffle)).unwrap());
    let mut expected: Vec<Vec<u32>> = corpus.documents().map(|d| corpus.marked()[d].to_vec()).collect();
    expected.sort();
    let mut batches = batches(&corpus, 1, Passes::Endless);
    let mut orders = Vec::new();
    for epoch in 0..3 {
        let mut seen = Vec::new();
        let mut n_rows = 0;
        while seen.len() < expected.len() {
            let batch = batches.next().unwrap();
            assert_eq!(batches.position().epoch, epoch);
            n_rows += 1;
            for (tokens, targets) in spans_of(&batch, context) {
                let mut document: Vec<u32> = tokens[..1].iter().map(|&token| token as u32).collect();
                document.extend(targets.iter().map(|&target| target as u32 | LEARN));
                assert!(document.len() <= context + 1);
                seen.push(document);
            }
        }
        let n_tokens: usize = expected.iter().map(|document| document.len() - 1).sum();
        assert!(n_rows * context < n_tokens * 21 / 20, "{n_rows} rows for {n_tokens} tokens");
        orders.push(seen.clone());
        seen.sort();
        assert_eq!(seen, expected);
    }
    assert!(orders[0] != orders[1] && orders[1] != orders[2]);
}

#[test]
fn a_long_text_is_split_into_rows_that_hold_every_target_once() {
    let encoder = encoder(None);
    let text = "hello the and then ".repeat(50);
    let corpus = Arc::new(corpus_of("a.txt", &text, &encoder, options(16, Order::Shuffle)).unwrap());
    let mut targets = Vec::new();
    for batch in batches(&corpus, 3, Passes::Once) {
        for (_, found) in spans_of(&batch, 16) {
            targets.extend(found);
        }
    }
    let expected: Vec<i32> = corpus.tokens().skip(1).map(|id| id as i32).collect();
    assert_eq!(targets, expected, "held-out data is read in file order");
}

#[test]
fn a_resumed_run_sees_the_same_batches() {
    let encoder = encoder(None);
    for order in [Order::Shuffle, Order::File] {
        let corpus = Arc::new(corpus_of("a.jsonl", &documents(100), &encoder, options(48, order)).unwrap());
        let mut whole = batches(&corpus, 4, Passes::Endless);
        let (mut positions, mut expected) = (Vec::new(), Vec::new());
        for _ in 0..40 {
            positions.push(whole.position());
            expected.push(whole.next().unwrap());
        }
        assert!(positions.last().unwrap().epoch >= 2);
        for (i, position) in positions.iter().enumerate() {
            let json = serde_json::to_string(position).unwrap();
            assert!(json.len() < 200, "{json}");
            let position: DataPosition = serde_json::from_str(&json).unwrap();
            let options = loader_options(4, Passes::Endless);
            let resumed = Batches::new(corpus.clone(), options, Some(&position)).unwrap();
            assert!(resumed.take(3).eq(expected[i..].iter().take(3).cloned()) || i + 3 > expected.len());
        }
    }
}

#[test]
fn a_position_of_other_data_or_out_of_range_is_refused() {
    let encoder = encoder(None);
    let of = |n, context| {
        Arc::new(corpus_of("a.jsonl", &documents(n), &encoder, options(context, Order::Shuffle)).unwrap())
    };
    let (corpus, options) = (of(50, 32), loader_options(2, Passes::Endless));
    let position = Batches::new(corpus.clone(), options, None).unwrap().position();
    let others = [
        (of(51, 32), options),
        (of(50, 33), options),
        (corpus.clone(), LoaderOptions { seed: 6, ..options }),
    ];
    for (other, options) in others {
        let error = Batches::new(other, options, Some(&position)).unwrap_err();
        assert!(matches!(error, DataError::OtherData { .. }), "{error}");
    }
    for outside in
        [DataPosition { window: 999, ..position.clone() }, DataPosition { row: 99, ..position.clone() }]
    {
        let error = Batches::new(corpus.clone(), options, Some(&outside)).unwrap_err();
        assert!(matches!(error, DataError::Position { .. }), "{error}");
    }
    // A different batch size continues at the same row.
    Batches::new(corpus, LoaderOptions { n_seqs: 7, ..options }, Some(&position)).unwrap();
}

#[test]
fn the_end_of_the_data_is_held_out() {
    let encoder = encoder(None);
    let whole =
        |name: &str, content: &str| corpus_of(name, content, &encoder, options(16, Order::Shuffle)).unwrap();
    let tokens: Vec<u32> = whole("a.txt", &"hello the ".repeat(100)).tokens().collect();
    let (train, held) = whole("a.txt", &"hello the ".repeat(100)).hold_out(0.1).unwrap();
    assert_eq!(held.report().n_tokens, tokens.len() as u64 / 10);
    assert_eq!(train.tokens().chain(held.tokens()).collect::<Vec<_>>(), tokens, "a single text is split");
    let (train, held) = whole("a.jsonl", &documents(100)).hold_out(0.1).unwrap();
    assert_eq!(train.report().n_documents + held.report().n_documents, 100, "documents stay whole");
    let all = whole("a.jsonl", &documents(100));
    let share = held.report().n_tokens as f64 / all.report().n_tokens as f64;
    assert!((0.05..0.15).contains(&share), "{share}");
    assert_eq!(train.tokens().chain(held.tokens()).collect::<Vec<_>>(), all.tokens().collect::<Vec<_>>());
    let encoder = super::fixtures::encoder(Some(CHATML));
    let one = corpus_of("a.jsonl", &chat_line(TWO_TURNS), &encoder, options(64, Order::Shuffle)).unwrap();
    assert!(matches!(one.hold_out(0.1), Err(DataError::HeldOut { .. })), "a conversation is not split");
}

#[test]
fn the_loader_returns_batches_with_their_positions_and_ends_with_its_data() {
    let encoder = encoder(None);
    let corpus =
        Arc::new(corpus_of("a.jsonl", &documents(60), &encoder, options(32, Order::Shuffle)).unwrap());
    let options = loader_options(4, Passes::Endless);
    let mut loader = Loader::new(corpus.clone(), options, None).unwrap();
    let mut plain = Batches::new(corpus.clone(), options, None).unwrap();
    for _ in 0..20 {
        assert_eq!(loader.next().unwrap().unwrap(), plain.next().unwrap());
        assert_eq!(*loader.position(), plain.position(), "not the position of a batch prepared ahead");
    }
    drop(loader);
    let once = loader_options(4, Passes::Once);
    let mut loader = Loader::new(corpus.clone(), once, None).unwrap();
    let found: Vec<Batch> = loader.by_ref().map(Result::unwrap).collect();
    assert_eq!(found, Batches::new(corpus, once, None).unwrap().collect::<Vec<_>>());
    assert!(found.last().unwrap().tokens.contains(&-1), "the last batch is padded");
    assert!(loader.next().is_none() && loader.next().is_none());
}

#[test]
fn errors_and_panics_of_the_thread_are_reported_by_the_loader() {
    let position = || DataPosition { epoch: 0, window: 0, row: 0, fingerprint: String::new() };
    let failing = (0..4).map(move |i| match i {
        0 => Ok((Batch::default(), position())),
        _ => Err(DataError::Thread { what: "tested".into() }),
    });
    let mut loader = Loader::start(failing, position(), 1).unwrap();
    assert!(loader.next().unwrap().is_ok());
    assert!(matches!(loader.next(), Some(Err(DataError::Thread { what })) if what == "tested"));
    assert!(loader.next().is_none());
    let mut loader = Loader::start(std::iter::from_fn(|| panic!("tested")), position(), 1).unwrap();
    assert!(matches!(loader.next(), Some(Err(DataError::Thread { what })) if what == "panicked"));
    assert!(loader.next().is_none());
}

#[test]
#[cfg_attr(
    not(feature = "shared-data"),
    ignore = "needs ../shared/data: cargo xtask ci turns it on where it exists"
)]
fn real_templates_mark_assistant_turns() {
    let folder = refrain_testkit::require_shared_data("templates");
    let mut n_templates = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let source = std::fs::read_to_string(&path).unwrap();
        let encoder = encoder(Some(&source));
        let content = chat_line(TWO_TURNS);
        let corpus = corpus_of("a.jsonl", &content, &encoder, options(2000, Order::Shuffle));
        let corpus = corpus.unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let shown = shown(&corpus, &encoder);
        let parts: Vec<&str> = shown.iter().flat_map(|text| text.split('⟦').skip(1)).collect();
        let parts: Vec<&str> = parts.iter().map(|part| part.split('⟧').next().unwrap()).collect();
        assert_eq!(parts.len(), 2, "{}: {shown:#?}", path.display());
        assert!(
            parts[0].contains("the answer") && !parts[0].contains("more"),
            "{}: {shown:#?}",
            path.display()
        );
        assert!(parts[1].contains("less") && !parts[1].contains("more"), "{}: {shown:#?}", path.display());
        n_templates += 1;
    }
    assert_eq!(n_templates, 8);
}

#[test]
fn long_text_lines_are_split_and_overlong_conversations_refused() {
    let encoder = encoder(Some(CHATML));
    let text = "hello the and then ".repeat(40_000);
    let line = serde_json::json!({ "text": text }).to_string();
    let corpus = corpus_of("a.jsonl", &line, &encoder, options(64, Order::Shuffle)).unwrap();
    let expected = encoder.tokenizer().encode(&text, false, false).unwrap();
    assert_eq!(corpus.tokens().len(), expected.len() + 2);
    assert!(corpus.tokens().skip(1).zip(&expected).all(|(a, b)| a == *b));
    let long = chat_line(&[("user", &"x".repeat(9 << 20)), ("assistant", "y")]);
    let error = corpus_of("a.jsonl", &long, &encoder, options(64, Order::Shuffle)).unwrap_err();
    assert!(matches!(error, DataError::LongLine { line: 1, .. }), "{error}");
}

#[test]
fn a_position_with_huge_numbers_does_not_panic() {
    let encoder = encoder(None);
    for order in [Order::Shuffle, Order::File] {
        let corpus = Arc::new(corpus_of("a.jsonl", &documents(20), &encoder, options(8, order)).unwrap());
        let at = batches(&corpus, 1, Passes::Endless).position();
        for (epoch, window, row) in [(u64::MAX, 0, 0), (u64::MAX, 1, 1), (0, u64::MAX, 0), (0, 0, u64::MAX)] {
            let position = DataPosition { epoch, window, row, ..at.clone() };
            let options = loader_options(3, Passes::Endless);
            if let Ok(batches) = Batches::new(corpus.clone(), options, Some(&position)) {
                assert_eq!(batches.take(200).count(), 200);
            }
        }
    }
}

#[test]
#[cfg_attr(
    not(feature = "shared-data"),
    ignore = "needs ../shared/data: cargo xtask ci turns it on where it exists"
)]
fn chunked_tokenization_of_a_real_text_matches_the_whole_in_real_vocabularies() {
    let whole = std::fs::read_to_string(refrain_testkit::require_shared_data("tinyshakespeare.txt")).unwrap();
    let text = &whole[..600 << 10]; // two splits
    let folder = tempfile::tempdir().unwrap();
    let path = write(folder.path(), "a.txt", text);
    for name in ["gpt-2", "llama-spm"] {
        let vocab = refrain_testkit::require_shared_data(&format!("vocab/ggml-vocab-{name}.gguf"));
        let tokenizer = crate::tokenize::LoadedTokenizer::open(&vocab).unwrap().tokenizer;
        let encoder = Encoder::new(Arc::new(tokenizer)).unwrap();
        let corpus = read(std::slice::from_ref(&path), &encoder, options(256, Order::File)).unwrap();
        assert_eq!(corpus.report().n_forced_cuts, 0, "{name}");
        let whole = encoder.tokenizer().encode(text, false, false).unwrap();
        assert!(corpus.tokens().eq(whole), "{name}");
    }
}
