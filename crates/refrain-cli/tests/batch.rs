//! `refrain batch`: order, errors, and continuing an earlier run.

mod common;

use common::Cli;
use serde_json::{Value, json};

const OPTIONS: [&str; 6] = ["--raw", "--temp", "0", "-n", "8", "--threads"];

fn batch<'a>(tail: &[&'a str]) -> Vec<&'a str> {
    [&["batch", "stories", "in.jsonl", "-o", "out.jsonl"], &OPTIONS[..], &["1"], tail].concat()
}

fn lines(cli: &Cli) -> Vec<Value> {
    let text = std::fs::read_to_string(cli.home.path().join("out.jsonl")).expect("answers");
    text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

#[test]
fn answers_come_in_order_and_equal_those_of_run_despite_a_bad_line() {
    let cli = Cli::new();
    let input = r#"{"prompt": "Once upon a time"}
{"prompt": "A cat", "max_tokens": 3, "id": "short"}

not json
{"prompt": "A cat", "temperature": -1}
{"prompt": "A dog", "stop": "."}
{"custom_id": "q", "method": "POST", "url": "/v1/completions", "body": {"model": "m", "prompt": "A bird", "max_tokens": 4}}
{"custom_id": "long", "url": "/v1/completions", "body": {"prompt": "A bird", "max_tokens": 100000}}
{"prompt": "The end"}
"#;
    cli.file("in.jsonl", input);
    let ended = cli.run(&batch(&["--seqs", "4"]));
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert!(ended.stdout.is_empty());
    assert!(ended.stderr.contains("8 lines answered, 3 lines with an error"), "{}", ended.stderr);
    let answers = lines(&cli);
    assert_eq!(answers.len(), 8);
    for (idx, prompt) in [(0, "Once upon a time"), (7, "The end")] {
        let alone = cli.run(&["run", "stories", prompt, "--raw", "--temp", "0", "-n", "8", "--json"]).json();
        assert_eq!(answers[idx]["text"], alone["text"], "{prompt}");
        assert_eq!(
            (&answers[idx]["finish"], &answers[idx]["completion_tokens"]),
            (&alone["finish"], &json!(8))
        );
    }
    assert_eq!((&answers[1]["id"], &answers[1]["completion_tokens"]), (&json!("short"), &json!(3)));
    assert!(
        answers[2]["error"].as_str().is_some_and(|e| e.starts_with("line 4 is not JSON")),
        "{}",
        answers[2]
    );
    assert_eq!(answers[3]["error"], "temperature is -1, must be 0 or more");
    assert!(answers[4]["text"].as_str().is_some_and(|text| !text.contains('.')));
    let body = &answers[5]["response"]["body"];
    assert_eq!((&answers[5]["custom_id"], &answers[5]["error"]), (&json!("q"), &Value::Null));
    assert_eq!(
        (&body["usage"]["completion_tokens"], &body["choices"][0]["finish_reason"]),
        (&json!(4), &json!("length"))
    );
    let message = answers[6]["error"]["message"].as_str().expect("an error");
    assert!(message.contains("100000 more were requested"), "{message}");
}

#[test]
fn a_lost_device_ends_the_batch_and_no_line_gets_its_error_as_an_answer() {
    let cli = Cli::new();
    cli.file("in.jsonl", "{\"prompt\": \"A cat\"}\n{\"prompt\": \"A dog\"}\n");
    for faults in ["on 9th replay: illegal address", "on 2nd launch: illegal address"] {
        let ended = cli.run(&batch(&["--device", "sim", "--faults", faults]));
        assert_eq!(ended.code, Some(3), "{faults}: {}", ended.stderr);
        assert!(lines(&cli).iter().all(|answer| answer["error"].is_null()), "{faults}: {:?}", lines(&cli));
    }
    let ended = cli.run(&batch(&[]));
    assert_eq!((ended.code, lines(&cli).len()), (Some(0), 2), "{}", ended.stderr);
}

#[test]
fn a_second_run_continues_after_the_existing_lines() {
    let cli = Cli::new();
    let input: String = (0..12).map(|i| format!("{{\"prompt\": \"Number {i}\", \"id\": {i}}}\n")).collect();
    cli.file("in.jsonl", input);
    assert_eq!(cli.run(&batch(&[])).code, Some(0));
    let whole = lines(&cli);
    // Five lines, and one that was cut off.
    let path = cli.home.path().join("out.jsonl");
    let text = std::fs::read_to_string(&path).expect("answers");
    let five = text.match_indices('\n').nth(4).expect("five lines").0 + 1;
    std::fs::write(&path, &text[..five + 9]).expect("a file");
    let ended = cli.run(&batch(&[]));
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert!(ended.stderr.contains("continuing after 5 lines"), "{}", ended.stderr);
    assert!(ended.stderr.contains("7 lines answered"), "{}", ended.stderr);
    assert_eq!(lines(&cli), whole);
    // Every line is answered: the model is not even opened.
    assert_eq!(cli.run(&batch(&[])).code, Some(0));
    assert_eq!(lines(&cli), whole);
    // Answers to another input.
    cli.file("in.jsonl", "{\"prompt\": \"A cat\", \"id\": 7}\n");
    let refused = cli.run(&batch(&[]));
    assert_eq!(refused.code, Some(1));
    assert!(refused.stderr.contains("line 1 of out.jsonl does not answer line 1"), "{}", refused.stderr);
    assert_eq!(lines(&cli), whole, "nothing has changed");
    assert_eq!(cli.run(&batch(&["--overwrite"])).code, Some(0));
    assert_eq!(lines(&cli).len(), 1);
}

#[test]
fn the_simulated_device_answers_as_the_cpu_does() {
    let cli = Cli::new();
    // Likely continuations of stories, so that rounding changes no choice: the CPU rounds activations, the simulated
    // device does not.
    let prompts = ["Once upon a time", "One day, the little", "Tom and Anna"];
    let input = prompts.map(|prompt| json!({ "prompt": prompt, "max_tokens": 3 }).to_string() + "\n");
    cli.file("in.jsonl", input.concat());
    assert_eq!(cli.run(&batch(&["--seqs", "2", "-c", "32"])).code, Some(0));
    let cpu = lines(&cli);
    let ended = cli.run(&batch(&["--seqs", "2", "-c", "32", "--overwrite", "--device", "sim"]));
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert_eq!(lines(&cli), cpu);
}

#[test]
fn unusable_files_are_refused_with_a_hint() {
    let cli = Cli::new();
    let refused = |args: &[&str], text: &str| {
        let ended = cli.run(args);
        assert_eq!(ended.code, Some(1), "{}", ended.stderr);
        assert!(ended.stderr.contains(text) && ended.stderr.contains("hint:"), "{}", ended.stderr);
    };
    refused(&batch(&[]), "cannot read in.jsonl");
    cli.file("in.jsonl", "\n\n");
    refused(&batch(&[]), "in.jsonl has no lines");
    cli.file("in.jsonl", "{\"prompt\": \"A cat\"}\n");
    refused(&["batch", "stories", "in.jsonl", "-o", "in.jsonl"], "the answers would overwrite the prompts");
    refused(&["batch", "stories", "in.jsonl", "-o", "no/such/folder.jsonl"], "cannot write");
}

#[test]
fn lines_have_formats_of_their_own_or_that_of_the_flags() {
    let cli = Cli::new();
    let schema =
        r#"{"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [1, true, "three"]}}}"#;
    let wrong = r#"{"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}"#;
    cli.file(
        "in.jsonl",
        format!(
            "{{\"prompt\": \"A cat\", \"response_format\": {schema}}}\n{{\"prompt\": \"A dog\"}}\n{{\"prompt\": \"A bird\", \"response_format\": {wrong}}}\n"
        ),
    );
    let ended = cli.run(&batch(&["--regex", "(yes|no)"]));
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let answers = lines(&cli);
    let value: Value = serde_json::from_str(answers[0]["text"].as_str().expect("a text")).expect("JSON");
    assert!([json!(1), json!(true), json!("three")].contains(&value), "{value}");
    assert!([json!("yes"), json!("no")].contains(&answers[1]["text"]), "{}", answers[1]);
    assert!(
        answers[2]["error"].as_str().is_some_and(|error| error.contains("cannot be used at #")),
        "{}",
        answers[2]
    );
    let refused = cli.run(&["batch", "stories", "in.jsonl", "-o", "other.jsonl", "--regex", "("]);
    assert!(refused.refused().contains("the regular expression cannot be used"));
}
