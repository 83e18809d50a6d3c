//! `refrain finetune`, `refrain merge` and `--lora`, as a person or a script uses them.

mod common;

use common::{Cli, golden};

const TEXT: &str = "The clock said five, and the five small mice said nothing at all. ";

/// A few steps over the built-in model.
const RUN: [&str; 19] = [
    "finetune",
    "stories",
    "text.txt",
    "--rank",
    "4",
    "--alpha",
    "8",
    "--context",
    "16",
    "--batch",
    "2",
    "--lr",
    "1e-2",
    "--schedule",
    "constant",
    "--device",
    "cpu",
    "--threads",
    "1",
];

fn with<'a>(tail: &[&'a str]) -> Vec<&'a str> {
    [&RUN[..], tail].concat()
}

fn cli() -> Cli {
    let cli = Cli::new();
    cli.file("text.txt", TEXT.repeat(8));
    cli
}

fn perplexity(cli: &Cli, args: &[&str]) -> f64 {
    let usual = ["perplexity", "-f", "text.txt", "-c", "16", "--chunks", "2", "--device", "cpu", "--json"];
    cli.run(&[&usual, args].concat()).json()["perplexity"].as_f64().expect("a number")
}

#[test]
fn an_adapter_is_trained_resumed_used_and_merged() {
    let cli = cli();
    let ended = cli.run(&with(&["--steps", "3", "--out", "tuned"]));
    assert!(ended.stderr.contains("LoRA of rank 4"), "{}", ended.stderr);
    assert!(ended.stderr.contains("try it   refrain run --lora tuned/adapter stories"), "{}", ended.stderr);
    assert_eq!(ended.ok().trim(), "tuned/adapter");

    // More steps, with the checkpoint's configuration.
    let report = cli.run(&["finetune", "--resume=tuned", "--steps", "5", "--json"]).json();
    assert_eq!((report["steps"].as_u64(), report["adapter"].as_str()), (Some(5), Some("tuned/adapter")));
    cli.run(&with(&["--steps", "5", "--out", "whole"])).ok();
    let file = |run: &str| {
        let path = cli.home.path().join(run).join("adapter/adapter_model.safetensors");
        std::fs::read(path).expect("an adapter")
    };
    assert!(file("tuned") == file("whole"), "a resumed run gives another adapter");

    let base = perplexity(&cli, &["stories"]);
    let tuned = perplexity(&cli, &["stories", "--lora", "tuned/adapter"]);
    assert!(tuned < 0.8 * base, "{base} {tuned}");
    assert_eq!(perplexity(&cli, &["stories", "--lora", "tuned/adapter=0"]), base);

    let merge = ["merge", "stories", "--lora", "tuned/adapter", "-o", "merged.gguf", "--type", "f32"];
    let ended = cli.run(&merge);
    assert!(ended.stderr.contains("were decoded, the merged model has F32"), "{}", ended.stderr);
    assert_eq!(ended.ok().trim(), "merged.gguf");
    let merged = perplexity(&cli, &["merged.gguf"]);
    assert!((merged / tuned - 1.0).abs() < 0.03, "{merged} {tuned}");
    assert!(cli.run(&merge).refused().contains("merged.gguf already exists"));

    // Every command that generates text takes an adapter.
    let greedy = ["--temp", "0", "-n", "8", "--device", "cpu"];
    let run =
        |args: &[&str]| cli.run(&[&["run", "--raw", "stories", "The clock"], args, &greedy].concat()).ok();
    assert_ne!(run(&["--lora", "tuned/adapter=4"]), run(&[]));
    cli.file("in.jsonl", "{\"prompt\": \"The clock\"}\n");
    let batch = ["batch", "stories", "in.jsonl", "-o", "out.jsonl", "--lora", "tuned/adapter=4"];
    cli.run(&[&batch[..], &greedy].concat()).ok();
    let answer = std::fs::read_to_string(cli.home.path().join("out.jsonl")).expect("answers");
    let answer: serde_json::Value = serde_json::from_str(answer.trim()).expect("JSON");
    assert_eq!(answer["text"].as_str(), Some(run(&["--lora", "tuned/adapter=4"]).trim_end_matches('\n')));
    let plan = cli.run(&["plan", "stories", "--lora", "tuned/adapter", "--device", "sim", "-c", "64"]).ok();
    assert!(plan.contains("attn_q.lora_a") && plan.contains("an adapter adds to it"), "{plan}");
}

#[test]
fn a_file_configures_adapters_and_flags_override_it() {
    let cli = cli();
    let keys = "from = 'stories'\ndata = 'text.txt'\nsteps = 1\ncontext = 16\nbatch = 1\ndevice = 'cpu'\n";
    cli.file("run.toml", format!("{keys}[lora]\nrank = 2\ntargets = ['q_proj', 'v_proj']\n"));
    cli.run(&["finetune", "run.toml", "--rank", "3", "--out", "a"]).ok();
    let config = |run: &str| {
        let path = cli.home.path().join(run).join("adapter/adapter_config.json");
        serde_json::from_slice::<serde_json::Value>(&std::fs::read(path).expect("an adapter")).expect("JSON")
    };
    assert_eq!(config("a")["r"], 3);
    assert_eq!(config("a")["target_modules"], serde_json::json!(["q_proj", "v_proj"]));
    // `train` takes the same file; `finetune` does not need the table.
    cli.run(&["train", "run.toml", "--out", "b"]).ok();
    assert_eq!(config("b")["r"], 2);
    cli.file("plain.toml", keys);
    cli.run(&["finetune", "plain.toml", "--out", "c"]).ok();
    assert_eq!((&config("c")["r"], &config("c")["lora_alpha"]), (&16.into(), &32.0.into()));
    // `--full` trains the whole model, even if the file has a table.
    let full = ["finetune", "run.toml", "--full", "--export", "gguf", "--out", "d"];
    assert_eq!(cli.run(&full).ok().trim(), "d/model.gguf");
}

#[test]
fn unusable_adapters_and_flags_are_refused_with_a_hint() {
    let cli = cli();
    let golden = golden("llama").join("lora");
    let golden = golden.to_str().expect("a path");
    let run = |lora: &str| cli.run(&["run", "--raw", "stories", "A", "-n", "1", "--lora", lora]).refused();
    assert!(run("nowhere").contains("cannot list nowhere"));
    assert!(run(".").contains("no adapter_config.json"));
    // An adapter of another model.
    let said = run(golden);
    assert!(said.contains("the model and the adapter's rank require"), "{said}");
    assert!(said.contains("use the adapter with the model it was trained on"), "{said}");
    let misused = |args: &[&str]| cli.run(args).misused();
    assert!(misused(&["run", "stories", "A", "--lora", "a=b"]).contains("not a finite number"));
    assert!(misused(&["finetune"]).contains("MODEL|CONFIG.toml"));
    assert!(misused(&["finetune", "stories", "text.txt", "--full", "--rank", "3"]).contains("--full"));
    assert!(misused(&["bench", "--train", "llama-1m", "--base-type", "q8_0"]).contains("--lora"));
    let refused = |args: &[&str]| cli.run(args).refused();
    assert!(refused(&["finetune", "stories", "--device", "cpu"]).contains("the training data"));
    assert!(
        refused(&with(&["--targets", "q_prj"])).contains("no linear layer of the model is named \"q_prj\"")
    );
    assert!(refused(&["finetune", "stories", "text.txt", "--alpha", "0"]).contains("lora.alpha is 0"));
    let sim = ["finetune", "stories", "text.txt", "--device", "sim", "--dtype", "f32"];
    assert!(refused(&sim).contains("which a GPU decodes to bf16"));
}

#[test]
fn a_dry_run_counts_frozen_weights_and_trained_ones() {
    let cli = cli();
    let needs = cli.run(&with(&["--dry-run"])).ok();
    assert!(needs.contains("frozen weights") && needs.contains("master weights"), "{needs}");
    assert!(!cli.home.path().join("run").exists());
}

#[test]
fn steps_over_quantised_weights_are_measured() {
    let cli = cli();
    let bench = ["bench", "--train", "llama-1m", "--lora", "--base-type", "q8_0", "--rank", "4"];
    let sizes =
        ["--dtype", "bf16", "--batch", "1", "--context", "8", "--steps", "2", "--device", "cpu", "--json"];
    let report = cli.run(&[&bench[..], &sizes].concat()).json();
    assert_eq!((&report["lora_rank"], &report["base_type"]), (&4.into(), &"q8_0".into()));
    let (trained, all) = (report["trained_parameters"].as_u64(), report["parameters"].as_u64());
    // Four layers: four factors of 128 by 4 for each of q, k, v and o, and 3 (128 + 384) 4 for the others.
    assert_eq!(trained, Some(4 * (4 * 2 * 128 * 4 + 3 * 4 * (128 + 384))));
    assert!(all > trained && report["first_loss"].as_f64() > Some(1.0), "{report}");
}

#[test]
fn conversations_longer_than_a_row_are_counted_before_the_first_step() {
    let cli = Cli::new();
    let talk = |answer: &str| {
        let messages = serde_json::json!([
            { "role": "user", "content": "Hello!" },
            { "role": "assistant", "content": answer },
        ]);
        serde_json::json!({ "messages": messages }).to_string() + "\n"
    };
    cli.file("talks.jsonl", talk("Hi!") + &talk(&"I like cats. ".repeat(40)));
    for (what, counted) in
        [("truncate", "1 truncated at the context"), ("drop", "1 dropped: longer than the context")]
    {
        let args = ["finetune", "chat", "talks.jsonl", "--context", "48", "--on-long", what, "--dry-run"];
        let ended = cli.run(&[&args[..], &["--device", "cpu"]].concat());
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
        assert!(ended.stderr.contains(counted), "{what}: {}", ended.stderr);
    }
}
