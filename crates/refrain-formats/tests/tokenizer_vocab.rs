//! Compares the vocabularies of ../shared/data/vocab with their published ids.

mod tokenizer_common;

use std::path::{Path, PathBuf};

use refrain_formats::gguf::Gguf;
use refrain_formats::tokenizer::{Tokenizer, VocabSpec};

const SEPARATOR: &str = "\n__ggml_vocab_test__\n";

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/data/vocab")
}

fn load(name: &str) -> Tokenizer {
    let gguf = Gguf::open(folder().join(format!("ggml-vocab-{name}.gguf"))).unwrap();
    Tokenizer::from_gguf(gguf.metadata()).unwrap()
}

fn cases(name: &str) -> Vec<(String, Vec<u32>)> {
    let read = |end: &str| {
        let path = folder().join(format!("ggml-vocab-{name}.gguf.{end}"));
        std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
    };
    let (inputs, outputs) = (read("inp"), read("out"));
    let inputs: Vec<&str> = inputs.strip_suffix(SEPARATOR).unwrap().split(SEPARATOR).collect();
    let outputs: Vec<&str> = outputs.strip_suffix('\n').unwrap().split('\n').collect();
    assert_eq!((inputs.len(), outputs.len()), (46, 46), "{name}");
    let ids = |line: &str| line.split_whitespace().map(|id| id.parse().unwrap()).collect();
    inputs.into_iter().zip(outputs).map(|(text, line)| (text.to_owned(), ids(line))).collect()
}

fn check(name: &str) -> Tokenizer {
    let tokenizer = load(name);
    for (text, ids) in cases(name) {
        assert_eq!(tokenizer.encode(&text, false, false).unwrap(), ids, "{name}: {text:?}");
        assert_eq!(tokenizer.encode(&text, false, true).unwrap(), ids, "{name}: {text:?}");
        let mut stream = tokenizer.stream();
        let mut streamed: String = ids.iter().map(|&id| stream.push(id).to_owned()).collect();
        streamed.push_str(stream.finish());
        if name != "bert-bge" {
            assert_eq!(tokenizer.decode(&ids).unwrap(), text, "{name}");
            assert_eq!(streamed.trim_start(), text.trim_start(), "{name}");
        }
    }
    tokenizer
}

#[test]
#[cfg_attr(
    not(feature = "shared-data"),
    ignore = "needs ../shared/data: cargo xtask ci turns it on where it exists"
)]
fn gpt_2_gives_the_published_ids() {
    let tokenizer = check("gpt-2");
    assert_eq!(tokenizer.vocab_size(), 50257);
    assert!(!tokenizer.add_bos());
    assert!(tokenizer.is_end_of_generation(50256));
}

#[test]
#[cfg_attr(
    not(feature = "shared-data"),
    ignore = "needs ../shared/data: cargo xtask ci turns it on where it exists"
)]
fn falcon_gives_the_published_ids() {
    check("falcon");
}

#[test]
#[cfg_attr(
    not(feature = "shared-data"),
    ignore = "needs ../shared/data: cargo xtask ci turns it on where it exists"
)]
fn llama_sentence_piece_gives_the_published_ids() {
    let tokenizer = check("llama-spm");
    assert_eq!((tokenizer.bos(), tokenizer.eos()), (Some(1), Some(2)));
    assert_eq!(tokenizer.encode("Hello", true, false).unwrap(), [1, 15043]);
    assert_eq!(tokenizer.encode("</s>", false, true).unwrap(), [2]);
    assert!(!tokenizer.encode("a</s>b", false, false).unwrap().contains(&2));
    assert_eq!(tokenizer.encode_chat("<s>Hello").unwrap(), [1, 15043]);
    assert_eq!(tokenizer.encode_chat("Hello").unwrap(), [1, 15043]);
    assert_eq!(tokenizer.special_texts().eos.as_deref(), Some("</s>"));
    assert_eq!(tokenizer.piece(13), Some(b"\n".as_slice()));
}

#[test]
#[cfg_attr(
    not(feature = "shared-data"),
    ignore = "needs ../shared/data: cargo xtask ci turns it on where it exists"
)]
fn bert_gives_the_published_ids() {
    let tokenizer = check("bert-bge");
    assert_eq!(tokenizer.encode("Hello", true, false).unwrap(), [101, 7592, 102]);
    assert_eq!(tokenizer.decode(&[101, 7592, 2088, 102]).unwrap(), "hello world");
}

#[test]
#[cfg_attr(
    not(feature = "shared-data"),
    ignore = "needs ../shared/data: cargo xtask ci turns it on where it exists"
)]
fn a_megabyte_of_text_round_trips() {
    let text = std::fs::read_to_string(folder().join("../tinyshakespeare.txt")).unwrap();
    for name in ["gpt-2", "llama-spm", "falcon"] {
        let tokenizer = load(name);
        let ids = tokenizer.encode(&text, false, false).unwrap();
        assert!(ids.len() < text.len() / 2, "{name}: {} ids", ids.len());
        assert!(tokenizer.decode(&ids).unwrap() == text, "{name}");
    }
}

#[test]
#[cfg_attr(
    not(feature = "shared-data"),
    ignore = "needs ../shared/data: cargo xtask ci turns it on where it exists"
)]
fn sentence_piece_merges_by_score_in_real_text() {
    let gguf = Gguf::open(folder().join("ggml-vocab-llama-spm.gguf")).unwrap();
    let spec = VocabSpec::from_gguf(gguf.metadata()).unwrap();
    let tokenizer = Tokenizer::from_spec(&spec).unwrap();
    let text = std::fs::read_to_string(folder().join("../tinyshakespeare.txt")).unwrap();
    for line in text.lines().filter(|line| !line.is_empty()).step_by(40) {
        let escaped = format!(" {line}").replace(' ', "\u{2581}");
        let expected = tokenizer_common::obvious_sentence_piece(&spec, &escaped);
        assert_eq!(tokenizer.encode(line, false, false).unwrap(), expected, "{line:?}");
    }
}
