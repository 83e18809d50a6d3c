//! `refrain train`, as a person or a script uses it.

mod common;

use common::Cli;
use std::process::Stdio;

/// A text that a tiny model starts to learn in a few steps.
fn story() -> String {
    let (who, what) = (["cat", "dog", "hen"], ["sat", "ran", "ate", "slept"]);
    (0..40)
        .map(|i| {
            format!(
                "the {} {} and the {} {}.\n",
                who[i % 3],
                what[i % 4],
                who[(i + 1) % 3],
                what[(i * 3) % 4]
            )
        })
        .collect()
}

const TINY: &str = "{ arch = \"llama\", n_layers = 1, hidden = 32, ffn = 64, n_heads = 2 }";

/// A run of a tiny model over `story.txt`.
const RUN: [&str; 16] = [
    "train",
    "--new",
    TINY,
    "--data",
    "story.txt",
    "--tokenizer",
    "train:280",
    "--context",
    "16",
    "--batch",
    "2",
    "--lr",
    "1e-2",
    "--device",
    "cpu",
    "--threads",
];

fn with<'a>(tail: &[&'a str]) -> Vec<&'a str> {
    // A flag of the test replaces the default one.
    let mut args = [&RUN[..], &["1"]].concat();
    for flag in tail.iter().filter(|word| word.starts_with("--")) {
        if let Some(at) = args.iter().position(|word| word == flag) {
            args.drain(at..at + 2);
        }
    }
    [&args, tail].concat()
}

fn cli() -> Cli {
    let cli = Cli::new();
    cli.file("story.txt", story());
    cli
}

fn log(cli: &Cli, run: &str) -> Vec<serde_json::Value> {
    let text = std::fs::read_to_string(cli.home.path().join(run).join("log.jsonl")).expect("a log");
    text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

#[test]
fn a_run_exports_a_model_that_run_reads_in_both_formats() {
    let cli = cli();
    let ended = cli.run(&with(&[
        "--steps",
        "12",
        "--sample-every",
        "6",
        "--sample-prompt",
        "the cat",
        "--eval",
        "0.1",
    ]));
    for expected in [
        "data     ",
        "model    new",
        "memory   about ",
        "steps    12 of 32 tokens",
        "loss ",
        "tok/s",
        "eager",
    ] {
        assert!(ended.stderr.contains(expected), "{expected} in {}", ended.stderr);
    }
    assert!(ended.stderr.contains("step 6  the cat"), "{}", ended.stderr);
    assert!(ended.stderr.contains("held-out loss"), "{}", ended.stderr);
    assert!(ended.stderr.contains("try it   refrain run run/model.gguf \"the cat\""), "{}", ended.stderr);
    assert_eq!(ended.ok(), "run/model.gguf\nrun/model\n");
    let steps = log(&cli, "run");
    assert_eq!(steps.iter().filter(|line| line.get("loss").is_some()).count(), 12);
    assert!(steps[0]["loss"].as_f64() > steps[11]["loss"].as_f64(), "{steps:?}");
    let page = std::fs::read_to_string(cli.home.path().join("run/report.html")).expect("a report");
    assert!(page.contains("learning rate") && page.contains("llama"), "{page}");
    let greedy = ["--raw", "--temp", "0", "-n", "8", "--kv", "f32", "the cat"];
    let text = |model| cli.run(&[&["run", model], &greedy[..]].concat()).ok();
    assert_eq!(text("run/model.gguf"), text("run/model"));
    // A folder that has a run is not overwritten.
    let said = cli.run(&with(&["--steps", "1"])).refused();
    assert!(
        said.contains("run already has checkpoints of another run") && said.contains("--resume"),
        "{said}"
    );
}

#[test]
fn the_example_of_the_help_runs() {
    let cli = Cli::new();
    let help = cli.run(&["train", "--help"]).ok();
    let example = help.lines().skip_while(|line| *line != "Examples:").skip(1);
    let example: Vec<&str> = example.take_while(|line| !line.is_empty()).collect();
    let example = example.join("\n").replace("\\\n", " ");
    let mut ran = 0;
    for line in example.lines() {
        let line = line.split("            a ").next().unwrap_or(line);
        let (line, into) = line.split_once(" > ").map_or((line, None), |(line, into)| (line, Some(into)));
        let mut words = Vec::new();
        for (i, part) in line.split('"').enumerate() {
            if i % 2 == 1 {
                words.push(part);
            } else {
                words.extend(part.split_whitespace());
            }
        }
        assert_eq!(words.remove(0), "refrain", "{line}");
        // The same run, with fewer steps and tokens.
        for (flag, few) in [("-n", "60"), ("--steps", "2"), ("--warmup", "1"), ("--sample-every", "2")] {
            if let Some(at) = words.iter().position(|word| *word == flag) {
                words[at + 1] = few;
            }
        }
        let printed = cli.run(&words).ok();
        if let Some(into) = into {
            cli.file(into.trim(), &printed);
        }
        ran += 1;
    }
    assert_eq!(ran, 3, "{example}");
    assert!(cli.home.path().join("story/model.gguf").exists());
}

#[test]
fn every_key_of_the_configuration_is_a_flag() {
    let cli = Cli::new();
    let has_flag = |command: &str, flag: &str| {
        let help = cli.run(&[command, "--help"]).ok();
        let is_there = help.split_whitespace().any(|word| word.split(['[', '=']).next() == Some(flag));
        assert!(is_there, "{flag} in {help}");
    };
    for key in refrain::train::KEYS.iter().filter(|key| key.name != "lora") {
        has_flag("train", &format!("--{}", key.name.replace('_', "-")));
    }
    // The keys of the table `lora` belong to another command.
    for key in refrain::train::LoraTable::KEYS {
        has_flag(
            "finetune",
            &if *key == "dropout" { "--lora-dropout".to_owned() } else { format!("--{key}") },
        );
    }
}

#[test]
fn a_file_and_flags_make_one_configuration() {
    let cli = cli();
    cli.file(
        "run.toml",
        format!("new = {TINY}\ndata = 'story.txt'\ntokenizer = {{ train = {{ vocab_size = 280 }} }}\ncontext = 16\nbatch = 2\nsteps = 50\nlr = 1e-2\nout = 'from-file'\nexport = 'none'\n"),
    );
    let json = cli.run(&["train", "run.toml", "--steps", "2", "--device", "cpu", "--json"]).json();
    assert_eq!((&json["steps"], &json["gguf"]), (&2.into(), &serde_json::Value::Null), "{json}");
    assert_eq!(json["checkpoint"], "from-file/step-00000002");
    assert!(!cli.home.path().join("from-file/model.gguf").exists());
    cli.file("bad.toml", "new = 'llama-1m'\ndata = 'story.txt'\nstep = 5\n");
    let said = cli.run(&["train", "bad.toml"]).refused();
    assert!(said.contains("line 3: unknown key `step`") && said.contains("did you mean `steps`?"), "{said}");
}

#[test]
fn a_dry_run_reports_the_memory_needed_and_writes_nothing() {
    let cli = cli();
    let table = cli.run(&with(&["--dry-run", "--save-every", "1"])).ok();
    for part in ["weights", "moments", "gradients", "activations", "needed", "free"] {
        assert!(table.contains(part), "{part} in {table}");
    }
    assert!(!cli.home.path().join("run").exists());
    // More memory than any machine has.
    let said = cli.run(&with(&["--dry-run", "--batch", "40000000"]));
    assert_eq!(said.code, Some(1), "{}", said.stderr);
    assert!(
        said.stderr.contains("training needs about") && said.stderr.contains("hint: batch = "),
        "{}",
        said.stderr
    );
}

#[cfg(unix)]
#[test]
fn ctrl_c_finishes_the_step_and_saves_and_resume_continues() {
    let cli = cli();
    let mut command = cli.command(&with(&["--steps", "100000", "--out", "long", "--schedule", "constant"]));
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it runs");
    let log_path = cli.home.path().join("long/log.jsonl");
    let begun = std::time::Instant::now();
    while std::fs::read_to_string(&log_path).unwrap_or_default().lines().count() < 2 {
        assert!(begun.elapsed().as_secs() < 120, "no step was taken");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    let pid = child.id().to_string();
    assert!(std::process::Command::new("kill").args(["-INT", &pid]).status().expect("kill").success());
    let _ = child.wait();
    let ended = common::ended(child.wait_with_output().expect("it ends"));
    assert_eq!(ended.code, Some(130), "{}", ended.stderr);
    assert!(ended.stderr.contains("resume   refrain train --resume=long"), "{}", ended.stderr);
    let n_done = log(&cli, "long").len();
    assert!(ended.stderr.contains(&format!("saved long/step-{n_done:08}")), "{}", ended.stderr);
    let more = (n_done + 2).to_string();
    let json = cli.run(&["train", "--resume=long", "--steps", &more, "--json"]).json();
    assert_eq!(json["steps"].as_u64(), Some(n_done as u64 + 2), "{json}");
    assert_eq!(log(&cli, "long").len(), n_done + 2);
}

#[test]
fn bad_input_is_reported_with_its_location() {
    let cli = cli();
    cli.file("empty.txt", "");
    cli.file("binary.txt", [0xff, 0xfe, 0, 1]);
    cli.file("broken.jsonl", "{\"text\": \"a\"}\n{\"text\": oops}\n");
    let template = "{\"messages\": [{\"role\": \"user\", \"content\": \"hi\"}]}\n";
    cli.file("mute.jsonl", template);
    for (data, expected) in [
        ("empty.txt", "empty.txt"),
        ("binary.txt", "UTF-8"),
        ("broken.jsonl", "line 2"),
        ("mute.jsonl", "line 1"),
        ("missing.txt", "missing.txt"),
    ] {
        let said = cli
            .run(&["train", "--new", TINY, "--data", data, "--tokenizer", "train:280", "--device", "cpu"])
            .refused();
        assert!(said.contains(expected), "{data}: {said}");
    }
    for (flags, expected) in [
        (["--lr", "0"], "lr is 0, it must be a finite number above 0"),
        (["--lr", "NaN"], "lr is NaN"),
        (["--lr", "-1"], "lr is -1"),
        (["--steps", "0"], "steps is 0"),
        (["--batch", "0"], "batch is 0"),
        (["--warmup", "2000"], "warmup is 2000"),
        (["--dropout", "1"], "dropout is 1"),
        (["--resume=nowhere", "--keep=1"], "nowhere"),
        (["--graph", "require"], "--graph require is impossible"),
    ] {
        let said = cli.run(&with(&flags)).refused();
        assert!(said.contains(expected), "{flags:?}: {said}");
    }
    let said = cli.run(&["train", "--new", "lama-1m", "--data", "story.txt"]).refused();
    assert!(
        said.contains("there is no shape named `lama-1m`") && said.contains("did you mean `llama-1m`?"),
        "{said}"
    );
    assert!(cli.run(&["train"]).refused().contains("the model (`from` or `new`) is missing"));
    assert!(cli.run(&with(&["--schedule", "cosin"])).misused().contains("did you mean `cosine`?"));
    assert!(cli.run(&["train", "--new", "{ arch = 1 }", "--data", "story.txt"]).misused().contains("--new"));
    assert!(!cli.home.path().join("run/latest").exists());
}

#[test]
fn a_checkpoint_that_was_damaged_is_refused() {
    let cli = cli();
    cli.run(&with(&["--steps", "2", "--out", "a", "--export", "none"])).ok();
    let weights = cli.home.path().join("a/step-00000002/weights.safetensors");
    let mut bytes = std::fs::read(&weights).expect("weights");
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    std::fs::write(&weights, &bytes).expect("a file");
    let said = cli.run(&["train", "--resume=a", "--steps", "3"]).refused();
    assert!(said.contains("weights.safetensors"), "{said}");
    std::fs::write(&weights, &bytes[..last]).expect("a file");
    let said = cli.run(&["train", "--resume=a", "--steps", "3"]).refused();
    assert!(said.contains("weights.safetensors"), "{said}");
}

#[test]
fn training_speed_is_measured_and_its_json_is_data() {
    let cli = Cli::new();
    let args =
        ["bench", "--train", "llama-1m", "--batch", "1", "--context", "8", "--steps", "2", "--device", "cpu"];
    let text = cli.run(&args).ok();
    for expected in
        ["llama-1m: ", "1 x 8 tokens in f32", "step  ", "compute  ", "launches none replayed", "memory "]
    {
        assert!(text.contains(expected), "{expected} in {text}");
    }
    let json = cli.run(&[&args[..], &["--json"]].concat()).json();
    assert!(json["ms_per_step"]["median"].as_f64() > Some(0.0), "{json}");
    assert_eq!((&json["steps"], &json["launches_per_step"]), (&2.into(), &serde_json::Value::Null));
    assert!(json["tokens_per_second"].as_f64() > Some(0.0) && json["peak_share"].is_null(), "{json}");
    assert!(json["last_loss"].as_f64() < json["first_loss"].as_f64(), "{json}");
    assert!(cli.run(&["bench", "--train", "lama"]).refused().contains("shapes are llama-1m"));
}

#[test]
fn replays_are_compared_with_eager_steps_during_a_run() {
    let cli = cli();
    let run = |out, graph, more: &[&'static str]| {
        let tail = ["--device", "sim", "--steps", "4", "--out", out, "--graph", graph, "--export", "none"];
        cli.run(&with(&[&tail[..], &["--verify", "every:2", "--json"], more].concat()))
    };
    let json = run("good", "require", &[]).json();
    let counts = |json: &serde_json::Value| {
        ["replayed", "eager", "compared", "differed"].map(|key| json[key].as_u64().unwrap_or(u64::MAX))
    };
    assert_eq!(counts(&json), [4, 0, 2, 0], "{json}");
    // Verification before the first step replays three times: the fifth replay is the second step.
    let wrong = ["--faults", "on 5th replay: wrong byte"];
    let json = run("auto", "auto", &wrong).json();
    let [replayed, eager, compared, differed] = counts(&json);
    assert_eq!((replayed + eager, compared, differed), (4, 1, 1), "{json}");
    let lines =
        |run| log(&cli, run).into_iter().map(|line| (line["loss"].to_string(), line["step"].to_string()));
    assert!(lines("good").eq(lines("auto")), "the eager result is used");
    let refused = run("require", "require", &wrong).refused();
    assert!(refused.contains("differ"), "{refused}");
    let on_cpu = cli.run(&with(&["--verify", "every:2", "--out", "cpu"])).refused();
    assert!(on_cpu.contains("--verify compares replays with eager runs"), "{on_cpu}");
}

#[test]
fn training_speed_on_a_device_is_reported_with_its_host_time() {
    let cli = Cli::new();
    let args = ["bench", "--train", "llama-1m", "--batch", "1", "--context", "4", "--steps", "2"];
    let json = cli.run(&[&args[..], &["--device", "sim", "--graph", "require", "--json"]].concat()).json();
    assert_eq!((&json["replayed_steps"], &json["launches_per_step"]), (&2.into(), &1.into()), "{json}");
    assert!(json["host_us_per_step"].as_f64() > json["sending_us_per_step"].as_f64(), "{json}");
    assert!(
        json["steps_in_flight"].as_u64() > Some(1) && json["ready_seconds"].as_f64() > Some(0.0),
        "{json}"
    );
    let alone = ["--device", "sim", "--ahead", "1", "--verify", "every:2", "--json"];
    let json = cli.run(&[&args[..], &alone].concat()).json();
    // Three unmeasured steps count as well.
    assert_eq!((&json["steps_in_flight"], &json["compared_steps"]), (&1.into(), &2.into()), "{json}");
}
