//! Any input gives an error or a result, never a panic.

use std::path::Path;
use std::sync::{Arc, LazyLock};

use proptest::prelude::*;
use refrain_train::config::{OnLong, Order};
use refrain_train::data::{Batches, Corpus, CorpusOptions, Encoder, LoaderOptions, Passes};
use refrain_train::tokenize::{TokenizerPlan, TrainedTokenizer};
use refrain_train::{ConfigOverlay, TrainConfig, log, report};

const TEMPLATE: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

static ENCODER: LazyLock<Encoder> = LazyLock::new(|| {
    let folder = tempfile::tempdir().unwrap();
    let file = write(folder.path(), "a.txt", b"some words to join, some words to split");
    let plan = TokenizerPlan { chat_template: Some(TEMPLATE.into()), ..TokenizerPlan::new(280) };
    Encoder::new(Arc::new(TrainedTokenizer::train(&[file], &plan).unwrap().tokenizer)).unwrap()
});

fn write(folder: &Path, name: &str, content: &[u8]) -> std::path::PathBuf {
    let path = folder.join(name);
    std::fs::write(&path, content).unwrap();
    path
}

/// Reads a file in every way, and a few batches of its data.
fn use_file(name: &str, content: &[u8], context: usize) {
    let folder = tempfile::tempdir().unwrap();
    let file = [write(folder.path(), name, content)];
    for (order, on_long) in [(Order::Shuffle, OnLong::Truncate), (Order::File, OnLong::Drop)] {
        let options = CorpusOptions { context, order, on_long, n_threads: 1 };
        let read = || Corpus::read(&file, &ENCODER, options, &mut |_, _| {});
        let Ok(corpus) = read() else { continue };
        let halves = read().unwrap().hold_out(0.5);
        for corpus in halves.into_iter().flat_map(|(a, b)| [a, b]).chain([corpus]) {
            let options = LoaderOptions { n_seqs: 2, seed: 1, passes: Passes::Endless, n_ahead: 1 };
            let Ok(mut batches) = Batches::new(Arc::new(corpus), options, None) else { continue };
            for batch in batches.by_ref().take(5) {
                assert_eq!(batch.tokens.len(), 2 * context);
                assert!(batch.n_targets > 0);
            }
        }
    }
}

/// JSON values that resemble samples.
fn sample() -> impl Strategy<Value = String> {
    let text = prop_oneof![
        Just("\"a b\"".to_owned()),
        Just("\"\"".to_owned()),
        Just("null".to_owned()),
        Just("7".to_owned()),
        Just("[]".to_owned()),
        Just("\"<|endoftext|>\"".to_owned()),
        Just("[{\"text\":\"x\"}]".to_owned()),
    ];
    let role = prop_oneof![Just("user"), Just("assistant"), Just("system"), Just("")];
    let message = (role, text.clone())
        .prop_map(|(role, content)| format!("{{\"role\":\"{role}\",\"content\":{content}}}"));
    let messages = prop::collection::vec(message, 0..5).prop_map(|all| format!("[{}]", all.join(",")));
    let value = prop_oneof![text, messages];
    let key = prop_oneof![
        Just("text"),
        Just("messages"),
        Just("prompt"),
        Just("completion"),
        Just("instruction"),
        Just("input"),
        Just("output"),
        Just("tools"),
    ];
    prop::collection::vec((key, value), 0..4).prop_map(|fields| {
        let fields: Vec<_> = fields.iter().map(|(key, value)| format!("\"{key}\":{value}")).collect();
        format!("{{{}}}", fields.join(","))
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    #[test]
    fn any_text_file(content in prop::collection::vec(any::<u8>(), 0..200), context in 1..20usize) {
        use_file("a.txt", &content, context);
    }

    #[test]
    fn any_unicode_text(content in "\\PC{0,100}(\n|<\\|endoftext\\|>|\r\n| )\\PC{0,50}", context in 1..20usize) {
        use_file("a.txt", content.as_bytes(), context);
    }

    #[test]
    fn any_lines(lines in prop::collection::vec(sample(), 1..4), context in 1..40usize) {
        use_file("a.jsonl", lines.join("\n").as_bytes(), context);
    }

    #[test]
    fn any_bytes_as_lines(content in "[\\[\\]{}\":,a-c0-9 \n]{0,80}") {
        use_file("a.jsonl", content.as_bytes(), 4);
    }

    #[test]
    fn any_configuration(
        key in "(lr|steps|context|batch|betas|clip|eval|new|tokenizer|resume|keep|seed|nonsense)",
        value in "(nan|-inf|0|-1|1e400|18446744073709551615|\"x\"|true|\\[\\]|\\[1,2\\]|\\{\\}|\\{ train = 1 \\}|\\PC{0,6})",
    ) {
        let text = format!("from = \"m\"\ndata = \"d\"\n{key} = {value}");
        if let Ok(overlay) = ConfigOverlay::from_toml(&text) {
            let config = TrainConfig::default().overlay(overlay);
            if config.validate().is_ok() {
                prop_assert!(config.lr.is_finite() && config.lr > 0.0 && config.tokens_per_step() > 0);
            }
        }
    }

    #[test]
    fn any_log(content in "(\\{\"step\":[0-9]{1,20},\"(eval_loss|loss)\":(null|-?[0-9]{1,3}(e[0-9]{1,3})?)(,\"grad_norm\":1,\"lr\":0,\"tok_s\":-1)?\\}\n){0,6}") {
        let folder = tempfile::tempdir().unwrap();
        let path = write(folder.path(), "log", content.as_bytes());
        if let Ok(lines) = log::read(&path) {
            let page = report::page(&report::ReportHeader::default(), &lines);
            prop_assert!(!page.contains("NaN\""));
            log::LogWriter::resume(&path, 5).unwrap();
            prop_assert!(log::read(&path).unwrap().len() <= lines.len());
        }
    }
}
