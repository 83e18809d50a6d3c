//! `refrain embed`: texts from arguments and files, errors, and models that cannot do it.

mod common;

use common::{Cli, encoder};
use serde_json::{Value, json};

fn vectors(text: &str) -> Vec<Vec<f64>> {
    text.lines().map(|line| serde_json::from_str(line).expect("an array")).collect()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

#[test]
fn texts_become_unit_vectors_with_the_pooling_of_the_files() {
    let cli = Cli::new();
    let model = encoder(&cli);
    let model = model.to_str().expect("UTF-8");
    let ended = cli.run(&["embed", model, "A cat sleeps.", "a CAT sleeps .", "", "--threads", "1"]);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert!(ended.stderr.contains("cls pooling, texts of up to 16 tokens"), "{}", ended.stderr);
    let found = vectors(&ended.stdout);
    assert_eq!((found.len(), found[0].len()), (3, 48));
    assert!(found.iter().all(|v| (dot(v, v) - 1.0).abs() < 1e-5));
    assert!((dot(&found[0], &found[1]) - 1.0).abs() < 1e-5, "the same words");
    assert!(dot(&found[0], &found[2]) < 0.9999, "an empty text is two special tokens");
    let mean =
        cli.run(&["embed", model, "A cat sleeps.", "--pooling", "mean", "--no-normalize", "--json"]).json();
    assert_eq!((&mean["pooling"], &mean["normalized"]), (&json!("mean"), &json!(false)));
    assert_eq!((&mean["dimensions"], &mean["embeddings"][0]["tokens"]), (&json!(48), &json!(6)));
}

#[test]
fn the_simulated_device_replays_graphs_and_agrees() {
    let cli = Cli::new();
    let model = encoder(&cli);
    let model = model.to_str().expect("UTF-8");
    let on = |device: &[&str]| {
        let ended = cli.run(&[&["embed", model, "a cat", "a kitten naps."], device].concat());
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
        (vectors(&ended.stdout), ended.stderr)
    };
    let (want, _) = on(&["--device", "cpu"]);
    let (got, said) = on(&["--device", "sim", "--graph", "require"]);
    assert!(said.contains("1 steps, 1 replayed, 0 eager") || said.contains("1 step, 1 replayed"), "{said}");
    for (got, want) in got.iter().zip(&want) {
        assert!(got.iter().zip(want).all(|(a, b)| (a - b).abs() < 1e-5));
    }
}

#[test]
fn longer_texts_are_cut_and_counted_or_refused() {
    let cli = Cli::new();
    let model = encoder(&cli);
    let model = model.to_str().expect("UTF-8");
    let (long, cut) = ("cat ".repeat(40), "cat ".repeat(14));
    let ended = cli.run(&["embed", model, &long, &cut, "--quiet"]);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert!(ended.stderr.contains("1 text had more than 16 tokens"), "{}", ended.stderr);
    let found = vectors(&ended.stdout);
    assert_eq!(found[0], found[1], "the last special token stays");
    let refused = cli.run(&["embed", model, "a", &long, "--no-cut"]).refused();
    assert!(refused.contains("text 2 of 2 has 42 tokens"), "{refused}");
    let refused = cli.run(&["embed", model, "a", "-c", "65"]).refused();
    assert!(refused.contains("takes 1 to 64"), "{refused}");
}

#[test]
fn a_file_is_answered_line_by_line_and_continued() {
    let cli = Cli::new();
    let model = encoder(&cli);
    let model = model.to_str().expect("UTF-8");
    let input = r#"{"text": "a cat", "id": "first"}
not json
{"custom_id": "x", "method": "POST", "url": "/v1/embeddings", "body": {"input": ["a cat", "a kitten"]}}
{"custom_id": "y", "url": "/v1/embeddings", "body": {"input": [[2, 4, 3], [900]]}}

{"text": "naps"}
"#;
    cli.file("in.jsonl", input);
    let args = ["embed", model, "-f", "in.jsonl", "-o", "out.jsonl"];
    let ended = cli.run(&args);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert!(ended.stderr.contains("4 texts embedded, 2 lines with an error"), "{}", ended.stderr);
    let path = cli.home.path().join("out.jsonl");
    let text = std::fs::read_to_string(&path).expect("answers");
    let answers: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    assert_eq!(answers.len(), 5);
    let alone = vectors(&cli.run(&["embed", model, "a cat"]).ok());
    let near = |value: &Value| {
        let found: Vec<f64> = serde_json::from_value(value.clone()).expect("a vector");
        (dot(&found, &alone[0]) - 1.0).abs() < 1e-5
    };
    assert_eq!((&answers[0]["id"], &answers[0]["tokens"]), (&json!("first"), &json!(4)));
    assert!(near(&answers[0]["embedding"]));
    assert!(answers[1]["error"].as_str().is_some_and(|e| e.starts_with("line 2 is not JSON")));
    let body = &answers[2]["response"]["body"];
    assert_eq!((&body["data"][1]["index"], &body["usage"]["prompt_tokens"]), (&json!(1), &json!(8)));
    assert!(near(&body["data"][0]["embedding"]));
    let message = answers[3]["error"]["message"].as_str().expect("an error");
    assert!(message.contains("token 900 is outside the vocabulary of 128"), "{message}");
    let two = text.match_indices('\n').nth(1).expect("two lines").0 + 1;
    std::fs::write(&path, &text[..two + 5]).expect("a file");
    let ended = cli.run(&args);
    assert!(ended.stderr.contains("continuing after 2 lines"), "{}", ended.stderr);
    assert_eq!(std::fs::read_to_string(&path).expect("answers"), text);
}

#[test]
fn a_model_of_the_other_kind_is_refused_with_a_way_out() {
    let cli = Cli::new();
    let model = encoder(&cli);
    let model = model.to_str().expect("UTF-8");
    for args in [
        &["run", model, "a cat"][..],
        &["chat", model],
        &["plan", model],
        &["bench", model, "-p", "8", "-n", "4"],
    ] {
        let refused = cli.run(args).refused();
        assert!(refused.contains("is an encoder: it turns texts into vectors"), "{args:?}: {refused}");
        assert!(refused.contains("refrain embed"), "{args:?}: {refused}");
    }
    let refused = cli.run(&["embed", "stories", "a cat"]).refused();
    assert!(refused.contains("do not say how it embeds texts"), "{refused}");
    assert!(refused.contains("--pooling last or mean"), "{refused}");
    let found = vectors(&cli.run(&["embed", "stories", "a cat", "--pooling", "last"]).ok());
    assert!((dot(&found[0], &found[0]) - 1.0).abs() < 1e-5);
    cli.run(&["embed", model]).misused();
    cli.run(&["embed", model, "a", "-f", "in.jsonl"]).misused();
}
