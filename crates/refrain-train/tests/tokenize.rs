//! Training a tokenizer, and its outputs.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use refrain_formats::tokenizer::{Tokenizer, VocabSpec};
use refrain_train::config::{OnLong, Order};
use refrain_train::data::{Corpus, CorpusOptions, DataError, Encoder};
use refrain_train::tokenize::{END_OF_TEXT, LoadedTokenizer, TokenizeError, TokenizerPlan, TrainedTokenizer};

fn write(folder: &Path, name: &str, content: &str) -> PathBuf {
    let path = folder.join(name);
    std::fs::write(&path, content).unwrap();
    path
}

fn story() -> String {
    let line =
        "Once upon a time there was a little cat. The cat said: \"I like the sun!\"\nÄpfel 中文 🦀\n\n";
    format!("{}{END_OF_TEXT}\n", line.repeat(5)).repeat(20)
}

fn trained(vocab_size: usize) -> TrainedTokenizer {
    let folder = tempfile::tempdir().unwrap();
    let file = write(folder.path(), "a.txt", &story());
    TrainedTokenizer::train(&[file], &TokenizerPlan::new(vocab_size)).unwrap()
}

#[test]
fn a_trained_tokenizer_merges_words_and_round_trips_every_text() {
    let trained = trained(400);
    let tokenizer = &trained.tokenizer;
    assert!(tokenizer.vocab_size() <= 400 && tokenizer.vocab_size() > 300, "{}", tokenizer.vocab_size());
    let ids = tokenizer.encode("the little cat", false, false).unwrap();
    assert!(ids.len() <= 6, "{ids:?}");
    for text in ["", " a  b\t\r\n\n", "not in the texts: 日本 é\u{301} \u{0} 👩‍🚀", "<|endoftext|> as text"]
    {
        let ids = tokenizer.encode(text, false, false).unwrap();
        assert_eq!(tokenizer.decode(&ids).unwrap(), text);
    }
    assert_eq!(tokenizer.token_id(END_OF_TEXT), Some(0));
    assert_eq!((tokenizer.bos(), tokenizer.eos(), tokenizer.add_bos()), (Some(0), Some(0), true));
    assert!(tokenizer.is_end_of_generation(0));
    let no_marker = |id: &u32| tokenizer.piece(*id).is_none_or(|piece| !piece.ends_with(b"endoftext"));
    assert!((3..tokenizer.vocab_size() as u32).all(|id| no_marker(&id)), "the separator is not text");
}

#[test]
fn the_same_texts_give_the_same_tokenizer() {
    assert_eq!(trained(350).json, trained(350).json);
}

#[test]
fn saved_files_and_the_gguf_vocabulary_give_the_same_ids() {
    let trained = trained(400);
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("new/folder");
    trained.save(&out).unwrap();
    let saved = LoadedTokenizer::open(&out.join("tokenizer.json")).unwrap().tokenizer;
    let from_spec = Tokenizer::from_spec(&trained.spec).unwrap();
    let text = format!("{}\nother words 123  \n\n\n x{END_OF_TEXT}", story());
    let expected = trained.tokenizer.encode(&text, true, true).unwrap();
    assert_eq!(expected[0], 0);
    for other in [saved, from_spec] {
        assert_eq!(other.encode(&text, true, true).unwrap(), expected);
        assert_eq!(other.vocab_size(), trained.tokenizer.vocab_size());
        assert_eq!((other.bos(), other.eos()), (Some(0), Some(0)));
    }
    let VocabSpec { model, pre, .. } = &trained.spec;
    assert_eq!((model.as_str(), pre.as_deref()), ("gpt2", Some("gpt-2")));
}

#[test]
fn a_chat_template_is_saved_with_the_tokenizer() {
    let folder = tempfile::tempdir().unwrap();
    let file = write(folder.path(), "a.jsonl", "{\"prompt\":\"say hi\",\"completion\":\"hi hi hi\"}\n");
    let template = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}";
    let plan = TokenizerPlan { chat_template: Some(template.into()), ..TokenizerPlan::new(300) };
    let trained = TrainedTokenizer::train(std::slice::from_ref(&file), &plan).unwrap();
    assert_eq!(trained.tokenizer.chat_template(), Some(template));
    assert_eq!(trained.spec.chat_template.as_deref(), Some(template));
    let encoder = Encoder::new(Arc::new(trained.tokenizer)).unwrap();
    let options = CorpusOptions { context: 64, order: Order::Shuffle, on_long: OnLong::Drop, n_threads: 1 };
    let corpus = Corpus::read(&[file], &encoder, options, &mut |_, _| {}).unwrap();
    let ids: Vec<u32> = corpus.tokens().collect();
    let text = encoder.tokenizer().decode_with_special(&ids).unwrap();
    assert_eq!(text, "<|endoftext|><|im_start|>say hi<|im_end|><|im_start|>hi hi hi<|im_end|>");
}

#[test]
fn an_existing_tokenizer_is_opened_with_its_template() {
    let folder = tempfile::tempdir().unwrap();
    let missing = LoadedTokenizer::open(folder.path()).unwrap_err();
    assert!(
        matches!(&missing, TokenizeError::Read { path, .. } if path.ends_with("tokenizer.json")),
        "{missing}"
    );
    trained(300).save(folder.path()).unwrap();
    let found = LoadedTokenizer::open(folder.path()).unwrap();
    assert_eq!((found.tokenizer.eos(), found.chat_template), (Some(0), None));
    write(folder.path(), "chat_template.jinja", "{{ messages }}");
    let found = LoadedTokenizer::open(&folder.path().join("tokenizer.json")).unwrap();
    assert_eq!(found.chat_template.as_deref(), Some("{{ messages }}"));
    let broken = write(folder.path(), "broken.json", "{}");
    assert!(matches!(LoadedTokenizer::open(&broken), Err(TokenizeError::Unusable(_))));
    let broken = write(folder.path(), "broken.gguf", "GGUF");
    assert!(matches!(LoadedTokenizer::open(&broken), Err(TokenizeError::Format(_))));
}

#[test]
fn large_texts_are_sampled() {
    let folder = tempfile::tempdir().unwrap();
    let lines: String = (0..4000).map(|i| format!("{{\"text\":\"line {i} of many\"}}\n")).collect();
    let file = write(folder.path(), "a.jsonl", &lines);
    let plan = TokenizerPlan { max_bytes: lines.len() as u64 / 4, ..TokenizerPlan::new(300) };
    let trained = TrainedTokenizer::train(&[file], &plan).unwrap();
    let all: u64 = (0..4000).map(|i: u32| format!("line {i} of many").len() as u64).sum();
    assert!((all / 5..all / 3).contains(&trained.n_bytes), "{} of {all}", trained.n_bytes);
}

#[test]
fn bad_plans_and_bad_texts_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let file = write(folder.path(), "a.txt", "abc");
    let train = |file: &PathBuf, plan: &TokenizerPlan| {
        TrainedTokenizer::train(std::slice::from_ref(file), plan).unwrap_err()
    };
    let error = train(&file, &TokenizerPlan::new(258));
    assert!(error.to_string().contains("a vocabulary of 258 tokens is too small"), "{error}");
    assert!(error.to_string().ends_with("need 259"), "{error}");
    let plan = TokenizerPlan { special_tokens: vec![], ..TokenizerPlan::new(300) };
    assert!(matches!(train(&file, &plan), TokenizeError::NoEndOfText));
    let plan = TokenizerPlan::new(300);
    let empty = write(folder.path(), "empty.txt", " \n");
    assert!(matches!(train(&empty, &plan), TokenizeError::Data(DataError::Empty { .. })));
    let broken = write(folder.path(), "broken.jsonl", "{\"text\":\"x\"}\n{\"text\":");
    let error = train(&broken, &plan);
    assert!(matches!(&error, TokenizeError::Data(DataError::BadLine { line: 2, .. })), "{error}");
    let missing = folder.path().join("missing.txt");
    assert!(matches!(train(&missing, &plan), TokenizeError::Data(DataError::Read { .. })));
    let binary = folder.path().join("binary.txt");
    std::fs::write(&binary, b"a\xff").unwrap();
    assert!(matches!(train(&binary, &plan), TokenizeError::Data(DataError::Binary { .. })));
}
