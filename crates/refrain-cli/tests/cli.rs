//! The commands as a person or a script uses them.

mod common;

use common::{Cli, golden};
use std::io::Read;
use std::path::Path;
use std::process::Stdio;

const GREEDY: [&str; 5] = ["--raw", "--temp", "0", "-n", "12"];

fn with<'a>(head: &[&'a str], tail: &[&'a str]) -> Vec<&'a str> {
    [head, tail].concat()
}

#[test]
fn run_prints_exactly_the_completion_and_a_newline() {
    let cli = Cli::new();
    let args = with(&["run"], &GREEDY);
    let printed = cli.run(&with(&args, &["stories", "Once upon a time"])).ok();
    let json = cli.run(&with(&args, &["--json", "stories", "Once upon a time"])).json();
    let text = json["text"].as_str().expect("text");
    assert_eq!(printed, format!("{text}\n"));
    assert_eq!(json["tokens"].as_array().map(Vec::len), Some(12));
    assert_eq!(json["finish"], "max_tokens");
    assert_eq!(json["ledger"]["decode"]["steps"], 11);
    assert!(json["timings"]["decode_ms"].as_f64().is_some_and(|ms| ms > 0.0));
}

#[test]
fn one_argument_with_blanks_is_a_prompt_for_the_built_in_model() {
    let cli = Cli::new();
    let named = cli.run(&["run", "stories", "Once upon a time", "--temp", "0", "-n", "5"]).ok();
    for args in [
        &["run", "Once upon a time"][..],
        &["run", "-p", "Once upon a time"],
        &["run", "-m", "stories", "Once upon a time"],
        &["run", "stories", "-p", "Once upon a time"],
        &["run", "-m", "stories", "-p", "Once upon a time"],
    ] {
        assert_eq!(cli.run(&with(args, &["--temp", "0", "-n", "5"])).ok(), named, "{args:?}");
    }
}

#[test]
fn arguments_file_and_standard_input_are_joined() {
    let cli = Cli::new();
    cli.file("prompt.txt", "little\n");
    let whole = cli.run(&with(&["run", "stories", "Once\nlittle\nday"], &GREEDY)).ok();
    let parts = cli.pipe(&with(&["run", "stories", "Once", "-f", "prompt.txt"], &GREEDY), b"day\n").ok();
    assert_eq!(parts, whole);
    let piped = cli.pipe(&with(&["run"], &GREEDY), b"Once\nlittle\nday\n").ok();
    assert_eq!(piped, whole);
}

#[test]
fn greedy_text_is_the_same_on_any_number_of_threads() {
    let cli = Cli::new();
    let text = |threads| cli.run(&with(&["run", "stories", "A cat", "--threads", threads], &GREEDY)).ok();
    let one = text("1");
    assert_eq!(one, text("2"));
    assert_eq!(one, text("4"));
}

#[test]
fn the_same_seed_gives_the_same_text_and_another_seed_another() {
    let cli = Cli::new();
    let args = |seed, threads| ["run", "stories", "A cat", "-n", "24", "--seed", seed, "--threads", threads];
    let first = cli.run(&args("7", "1")).ok();
    assert_eq!(first, cli.run(&args("7", "2")).ok());
    assert_ne!(first, cli.run(&args("8", "1")).ok());
}

#[test]
fn messages_go_to_standard_error_without_colours() {
    let cli = Cli::new();
    let ended = cli.run(&["run", "A cat", "-n", "4", "--stats", "--seed", "5"]);
    for expected in ["context 512", "decode", "prefill", "eager", "seed 5", "resident"] {
        assert!(ended.stderr.contains(expected), "{expected} in {}", ended.stderr);
    }
    assert!(ended.stderr.contains("has no chat template"), "{}", ended.stderr);
    assert!(!ended.stderr.contains('\x1b') && !ended.stdout.contains('\x1b'));
    let quiet = cli.run(&["run", "A cat", "-n", "4", "--quiet"]);
    assert_eq!(quiet.stderr, "");
    let verbose = cli.run(&["run", "A cat", "-n", "4", "-v"]);
    // The message says why there is no CUDA device.
    let because = "auto picked cpu, there is no CUDA device: ";
    let said = verbose.stderr.contains(because) || verbose.stderr.contains("auto picked cuda");
    assert!(said, "{}", verbose.stderr);
}

#[test]
fn a_stop_text_ends_the_completion_before_itself() {
    let cli = Cli::new();
    let whole = cli.run(&with(&["run", "stories", "Once upon a time"], &GREEDY)).ok();
    let stop: String = whole.trim_end().chars().skip(8).take(3).collect();
    let json =
        cli.run(&with(&["run", "stories", "Once upon a time", "--json", "--stop", &stop], &GREEDY)).json();
    assert_eq!(json["finish"], "stop_text");
    assert_eq!(json["text"].as_str(), whole.split_once(&stop).map(|(before, _)| before));
}

#[test]
fn a_closed_pipe_ends_quietly() {
    let cli = Cli::new();
    for args in [&["run", "A cat", "-n", "300"][..], &["plan", "stories"], &["completions", "zsh"]] {
        let mut command = cli.command(args);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it runs");
        child.stdout.take().expect("a pipe").read_exact(&mut [0]).expect("a byte");
        let ended = common::ended(child.wait_with_output().expect("it ends"));
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
        assert!(!ended.stderr.contains("error"), "{}", ended.stderr);
    }
}

#[cfg(unix)]
#[test]
fn ctrl_c_stops_the_reply_and_keeps_its_text() {
    let cli = Cli::new();
    let mut command = cli.command(&["run", "A cat", "-n", "450", "--stats", "--threads", "1"]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it runs");
    let mut stdout = child.stdout.take().expect("a pipe");
    let mut text = vec![0];
    stdout.read_exact(&mut text).expect("a byte");
    let pid = child.id().to_string();
    assert!(std::process::Command::new("kill").args(["-INT", &pid]).status().expect("kill").success());
    stdout.read_to_end(&mut text).expect("the rest");
    let ended = common::ended(child.wait_with_output().expect("it ends"));
    assert_eq!(ended.code, Some(130), "{}", ended.stderr);
    assert!(ended.stderr.contains("ended by Ctrl-C"), "{}", ended.stderr);
    assert!(!ended.stderr.contains("error"), "{}", ended.stderr);
    assert!(text.ends_with(b"\n"));
}

#[cfg(unix)]
#[test]
fn ctrl_c_ends_a_command_without_a_reply() {
    let cli = Cli::new();
    let mut command = cli.command(&["run"]);
    let mut child = command.stdin(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it runs");
    // It has printed that it is waiting, so it is.
    let mut said = vec![0];
    child.stderr.as_mut().expect("a pipe").read_exact(&mut said).expect("a byte");
    let pid = child.id().to_string();
    // Waiting for the child would close its input, and an empty prompt is another error.
    let _stdin = child.stdin.take();
    assert!(std::process::Command::new("kill").args(["-INT", &pid]).status().expect("kill").success());
    assert_eq!(child.wait().expect("it ends").code(), Some(130));
}

#[cfg(unix)]
#[test]
fn the_first_ctrl_c_during_a_hang_says_what_to_do() {
    let cli = Cli::new();
    let args = ["run", "A cat", "-n", "40", "--device", "sim", "--faults", "on 9th replay: hang 4 s"];
    let mut child =
        cli.command(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it runs");
    // The first token has been printed, so the hang follows soon.
    child.stdout.as_mut().expect("a pipe").read_exact(&mut [0]).expect("a byte");
    std::thread::sleep(std::time::Duration::from_millis(600));
    let pid = child.id().to_string();
    assert!(std::process::Command::new("kill").args(["-INT", &pid]).status().expect("kill").success());
    let ended = common::ended(child.wait_with_output().expect("it ends"));
    assert!(ended.stderr.contains("press Ctrl-C again to quit at once"), "{}", ended.stderr);
    assert_eq!(ended.code, Some(130), "{}", ended.stderr);
}

#[test]
fn the_last_of_repeated_flags_wins() {
    let cli = Cli::new();
    let json =
        cli.run(&with(&["run", "A cat", "-n", "3", "--seed", "1", "--seed", "9", "--json"], &["-n", "5"]));
    let json = json.json();
    assert_eq!((&json["n_generated"], &json["seed"]), (&5.into(), &9.into()), "{json}");
    cli.run(&["inspect", "--json", "--json", "stories"]).json();
}

#[test]
fn minus_one_is_a_random_seed_and_no_limit_on_tokens() {
    let cli = Cli::new();
    let seed = || cli.run(&["run", "A cat", "-n", "1", "--seed", "-1", "--json"]).json()["seed"].clone();
    assert_ne!(seed(), seed());
    let json = cli.run(&["run", "A cat", "-n", "-1", "-c", "300", "--json"]).json();
    let finish = json["finish"].as_str().expect("a reason");
    assert!(["context_full", "end_of_turn"].contains(&finish), "{json}");
    assert_eq!(json["context"], 300);
}

#[test]
fn two_levels_of_verbosity_log_on_every_command() {
    let cli = Cli::new();
    cli.file("text.txt", "Once upon a time there was a little cat. ".repeat(10));
    for args in [
        &["run", "A cat", "-n", "1"][..],
        &["inspect", "stories"],
        &["list"],
        &["plan", "stories"],
        &["tokenize", "stories", "A cat"],
        &["perplexity", "stories", "-f", "text.txt", "-c", "16", "--chunks", "1"],
        &["completions", "bash"],
        &["doctor", "--device", "sim"],
        &["bench", "stories", "-p", "1", "-n", "0", "-r", "1", "--device", "sim"],
        &["chat", "--device", "cpu"],
        &["batch", "stories", "none.jsonl", "-o", "out.jsonl"],
        &["pull", "smollm2"],
        &["rm", "smollm2"],
        &["train", "--new", "llama-1m", "--data", "text.txt", "--tokenizer", "train:300", "--dry-run"],
        &["finetune", "stories", "text.txt", "--dry-run"],
        &["merge", "stories", "--lora", "none", "-o", "out.gguf"],
    ] {
        let ended = cli.run(&with(args, &["-vv"]));
        assert!(ended.stderr.contains("DEBUG"), "{args:?}: {}", ended.stderr);
        assert!(!cli.run(args).stderr.contains("DEBUG"), "{args:?}");
    }
}

#[test]
fn chat_answers_line_by_line_and_obeys_commands() {
    let cli = Cli::new();
    let model = cli.tiny_chat_model();
    let model = model.to_str().expect("a path");
    let input = b"Hello\n/system Be brief\nHi \\\nthere\n/save talk.json\n/rest\n/exit\nnever read\n";
    let args = ["chat", model, "-n", "4", "--temp", "0", "--stats"];
    let ended = cli.pipe(&args, input);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert!(ended.stderr.contains("did you mean /reset?"), "{}", ended.stderr);
    assert_eq!(ended.stderr.matches("prefill").count(), 2, "{}", ended.stderr);
    let saved = std::fs::read_to_string(cli.home.path().join("talk.json")).expect("a saved conversation");
    let saved: serde_json::Value = serde_json::from_str(&saved).expect("JSON");
    assert_eq!(saved[0]["role"], "system");
    assert_eq!(saved[1]["content"], "Hi \nthere");
    assert_eq!(saved[2]["role"], "assistant");
    assert!(ended.stdout.ends_with('\n'));
}

#[test]
fn saving_a_chat_overwrites_no_file_and_a_saved_chat_can_be_loaded() {
    let cli = Cli::new();
    let args = ["chat", "--temp", "0", "-n", "12", "--device", "cpu"];
    cli.file("mine.json", "precious");
    let ended = cli.pipe(&args, b"Hello!\n/save mine.json\n/save talk.json\nWhat is your name?\n");
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let read = |name: &str| std::fs::read_to_string(cli.home.path().join(name)).expect("a file");
    assert_eq!(read("mine.json"), "precious");
    assert!(ended.stderr.contains("mine.json exists and was not changed"), "{}", ended.stderr);
    let answer = ended.stdout.lines().last().expect("an answer").to_owned();

    let loaded = cli.pipe(&args, b"/load talk.json\nWhat is your name?\n");
    assert!(loaded.stderr.contains("2 messages loaded from talk.json"), "{}", loaded.stderr);
    assert_eq!(loaded.stdout.trim_end(), answer, "{}", loaded.stderr);
    let broken = cli.pipe(&args, b"/load mine.json\n/load none.json\n/load\n");
    for expected in ["mine.json is not a saved conversation", "cannot read none.json", "needs a file name"] {
        assert!(broken.stderr.contains(expected), "{expected} in {}", broken.stderr);
    }
}

#[test]
fn settings_of_a_chat_change_its_replies() {
    let cli = Cli::new();
    let args = ["chat", "--temp", "0", "--device", "cpu", "--stats"];
    let ended = cli.pipe(&args, b"/set max_tokens 3\nHello!\n/set\n/set heat 9\n/set temp -1\n");
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    for expected in
        ["max_tokens is 3", "at the limit of -n", "repeat_penalty", "no setting heat", "must be 0 or more"]
    {
        assert!(ended.stderr.contains(expected), "{expected} in {}", ended.stderr);
    }
}

#[test]
fn a_chat_with_a_full_context_drops_the_oldest_turns_or_stops_as_configured() {
    let cli = Cli::new();
    let input = (0..6).map(|i| format!("Tell me about the number {i}, please.\n")).collect::<String>();
    let chat = |how| {
        let args = ["chat", "-c", "96", "-n", "20", "--temp", "0", "--device", "cpu", "--on-full", how];
        cli.pipe(&with(&args, &["--system", "You are kind."]), input.as_bytes())
    };
    let shifted = chat("shift");
    assert_eq!(shifted.code, Some(0), "{}", shifted.stderr);
    assert!(
        shifted.stderr.contains("the context of 96 tokens was full: dropped the oldest 2 messages"),
        "{}",
        shifted.stderr
    );
    assert_eq!(shifted.stdout.lines().filter(|line| !line.is_empty()).count(), 6, "{}", shifted.stdout);
    let stopped = chat("stop");
    assert_eq!(stopped.code, Some(1), "{}", stopped.stderr);
    assert!(
        stopped.stderr.contains("the context holds 96")
            && stopped
                .stderr
                .contains("hint: /reset starts anew, and --on-full shift drops the oldest messages"),
        "{}",
        stopped.stderr
    );
}

#[test]
fn chat_without_a_model_answers_with_the_built_in_one_and_says_what_it_is() {
    let cli = Cli::new();
    let ended = cli.pipe(&["chat", "--temp", "0", "--device", "cpu"], b"Hello!\nWhat is your name?\n");
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let answers: Vec<_> = ended.stdout.lines().collect();
    assert!(answers.len() == 2 && answers.iter().all(|a| a.split(' ').count() > 1), "{answers:?}");
    assert!(ended.stderr.contains("often wrong"), "{}", ended.stderr);
    let named =
        cli.pipe(&["chat", "Chat", "--temp", "0", "--device", "cpu"], b"Hello!\nWhat is your name?\n");
    assert_eq!(named.stdout, ended.stdout);
    assert!(!named.stderr.contains("often wrong"), "{}", named.stderr);
    let quiet = cli.pipe(&["chat", "-q", "--temp", "0", "--device", "cpu"], b"Hello!\n");
    assert_eq!(quiet.stderr, "");
}

#[test]
fn chat_evaluates_only_new_tokens() {
    let cli = Cli::new();
    let model = cli.tiny_chat_model();
    let args = ["chat", model.to_str().expect("a path"), "-n", "4", "--temp", "0", "--stats"];
    let ended = cli.pipe(&args, b"Hello\nAgain\n");
    assert!(ended.stderr.contains("more from the cache"), "{}", ended.stderr);
}

#[test]
fn run_uses_the_chat_template_unless_raw_is_set() {
    let cli = Cli::new();
    let model = cli.tiny_chat_model();
    let model = model.to_str().expect("a path");
    let n_prompt = |extra: &[&str]| {
        let json = cli.run(&with(&["run", model, "Hi", "--json", "-n", "2"], extra)).json();
        json["n_prompt"].as_u64().expect("a number")
    };
    assert_eq!(n_prompt(&["--raw"]), 2);
    let plain = n_prompt(&[]);
    assert!(plain > 2);
    assert!(n_prompt(&["--system", "Be brief"]) > plain);
}

#[test]
fn thinking_is_shown_or_hidden() {
    let cli = Cli::new();
    let model = cli.tiny_chat_model();
    // The template opens the thinking part, and the model never closes it.
    let config = serde_json::json!({ "chat_template": "{{ messages[0].content }}<think>" });
    cli.file("tiny/tokenizer_config.json", config.to_string());
    let reply = |how| {
        let args = ["run", model.to_str().expect("a path"), "Hi", "-n", "6", "--temp", "0", "--think", how];
        cli.run(&args).ok()
    };
    assert!(reply("show").len() > 1);
    assert_eq!(reply("hide"), "\n");
}

#[test]
fn perplexity_scores_the_second_half_of_each_window() {
    let cli = Cli::new();
    cli.file(
        "story.txt",
        "Once upon a time there was a little cat who liked to play in the garden. ".repeat(12),
    );
    let json =
        cli.run(&["perplexity", "stories", "-f", "story.txt", "-c", "64", "--chunks", "2", "--json"]).json();
    assert!(json["perplexity"].as_f64().is_some_and(|p| p > 1.0 && p < 4096.0), "{json}");
    assert_eq!(json["n_windows"], 2);
    assert_eq!(json["n_scored"], 2 * 31);
    let text = cli.run(&["perplexity", "stories", "-f", "story.txt", "-c", "64", "--chunks", "2"]).ok();
    assert!(text.starts_with("perplexity "), "{text}");
}

#[test]
fn inspect_shows_the_contents_of_the_files() {
    let cli = Cli::new();
    let json = cli.run(&["inspect", "stories", "--json", "--tensors"]).json();
    assert_eq!(json["architecture"], "llama");
    assert_eq!(json["chat_template"], false);
    assert!(json["parameters"].as_u64().is_some_and(|n| n > 1000));
    assert_eq!(json["tensors"].as_array().map(Vec::len), json["n_tensors"].as_u64().map(|n| n as usize));
    let sum: u64 =
        json["dtypes"].as_object().expect("a map").values().filter_map(|d| d["bytes"].as_u64()).sum();
    assert!(sum <= json["file_bytes"].as_u64().expect("a number"));
    for name in ["gemma3", "qwen2", "qwen3"] {
        let folder = golden(name);
        let text = cli.run(&["inspect", folder.to_str().expect("a path")]).ok();
        assert!(text.contains(name) && text.contains("tokenizer.json"), "{text}");
    }
}

#[test]
fn inspect_says_what_quantised_weights_become() {
    let cli = Cli::new();
    let folder = golden("quantized/awq");
    let text = cli.run(&["inspect", folder.to_str().expect("a path")]).ok();
    let told =
        "7 weights in AWQ int4 in groups of 32, loaded as Q4_1: 16.2 KiB in the files, 17.5 KiB in memory";
    assert!(text.contains(told), "{text}");
    let folder = golden("quantized/fp8-block");
    let json = cli.run(&["inspect", folder.to_str().expect("a path"), "--json"]).json();
    assert_eq!(json["quantized"]["stored_as"], "fp8 in blocks of 32x32");
    assert_eq!(json["quantized"]["memory_bytes"], 114_688);
}

#[test]
fn tokenize_shows_ids_and_pieces() {
    let cli = Cli::new();
    let ids = cli.run(&["tokenize", "stories", "--ids", "Once upon a time"]).ok();
    assert!(ids.trim_end().split(' ').all(|id| id.parse::<u32>().is_ok()), "{ids}");
    let piped = cli.pipe(&["tokenize", "stories", "--ids"], b"Once upon a time").ok();
    assert_eq!(piped, ids);
    let bare = cli.run(&["tokenize", "stories", "--ids", "--no-bos", "Once upon a time"]).ok();
    assert!(ids.ends_with(&bare));
    let table = cli.run(&["tokenize", "stories", "--no-bos", "Once upon a time"]).ok();
    assert_eq!(table.lines().count(), bare.split_whitespace().count());
    assert!(table.contains("\"Once\"") || table.contains("\"On"), "{table}");
}

#[test]
#[cfg_attr(
    not(feature = "shared-data"),
    ignore = "needs ../shared/data: cargo xtask ci turns it on where it exists"
)]
fn files_with_only_a_vocabulary_can_be_inspected_and_used_to_tokenize() {
    let cli = Cli::new();
    for name in ["bert-bge", "falcon", "gpt-2", "llama-spm"] {
        let path = refrain_testkit::require_shared_data(&format!("vocab/ggml-vocab-{name}.gguf"));
        let path = path.to_str().expect("a path");
        let json = cli.run(&["inspect", path, "--json"]).json();
        assert!(json["tokenizer"]["vocab"].as_u64().is_some_and(|n| n > 30_000), "{json}");
        assert_eq!(json["n_tensors"], 0);
        let ids = cli.run(&["tokenize", path, "--ids", "Hello world"]).ok();
        assert!(ids.split_whitespace().count() >= 2, "{ids}");
    }
}

#[test]
fn plan_draws_steps_and_memory() {
    let cli = Cli::new();
    let args =
        ["plan", "stories", "--tokens", "4", "--dot", "p.dot", "--html", "p.html", "--bandwidth", "20"];
    let text = cli.run(&args).ok();
    for expected in ["segment 0", "matmul", "arena", "the largest:", "bound", "20.0 GB/s"] {
        assert!(text.contains(expected), "{expected} in {text}");
    }
    let read = |name: &str| std::fs::read_to_string(cli.home.path().join(name)).expect("a file");
    assert!(read("p.dot").starts_with("digraph"));
    let page = read("p.html");
    assert!(page.contains("<svg") && page.contains("</html>"));
    assert!(!page.contains("http"), "the page needs nothing else");
    assert_eq!(page.matches("<svg").count(), page.matches("</svg>").count());
}

#[test]
fn a_plan_folds_equal_layers_and_its_arena_shows_small_buffers() {
    let cli = Cli::new();
    let text = cli.run(&["plan", "stories", "--dot", "p.dot"]).ok();
    assert!(text.contains("repeat 8 times, up to step"), "{text}");
    assert!(text.contains("blk.0.attention") && !text.contains("blk.3.attention"), "{text}");
    // The logits take most of a one-token arena; the other buffers still have their own lines.
    let rows =
        text.lines().filter(|line| line.ends_with('|')).map(|line| line.split('|').nth(1).expect("a map"));
    let letters: std::collections::BTreeSet<char> =
        rows.clone().flat_map(str::chars).filter(|c| *c != '.').collect();
    assert!(rows.count() >= 8 && letters.len() >= 10, "{text}");
    let dot = std::fs::read_to_string(cli.home.path().join("p.dot")).expect("a file");
    assert!(dot.contains("8 times: steps") && !dot.contains("blk.3."), "{dot}");
}

#[test]
fn plan_shows_launches_kernels_and_memory_of_a_device_and_needs_no_tokenizer() {
    let cli = Cli::new();
    let text = cli.run(&with(&["plan", "stories", "--bandwidth", "4000"], &SIM)).ok();
    for expected in ["product_gated_q8_0", "of workspace", "4000.0 GB/s", "(as above)"] {
        assert!(text.contains(expected), "{expected} in {text}");
    }
    let launches = text.lines().find_map(|l| l.strip_prefix("launches 1 launch, ")).expect("launches");
    let n: usize = launches.strip_suffix(" kernels per step").and_then(|n| n.parse().ok()).expect("a number");
    let counts = text.lines().skip_while(|l| !l.starts_with("launches")).skip(1);
    let counts =
        counts.map_while(|l| l.strip_prefix("         ")?.split_whitespace().next()?.parse::<usize>().ok());
    assert_eq!(counts.sum::<usize>(), n, "{text}");
    let off = cli.run(&with(&["plan", "stories", "--graph", "off"], &SIM)).ok();
    assert!(off.contains(&format!("launches {n} launches, {n} kernels per step")), "{off}");
    let bare = golden("llama");
    let cpu = cli.run(&["plan", bare.to_str().expect("a path")]).ok();
    assert!(cpu.contains("segment 0") && !cpu.contains("launches"), "{cpu}");
}

#[test]
fn attention_that_takes_several_launches_is_reported_with_the_reason() {
    let cli = Cli::new();
    // The same weights as sixteen heads of four elements, for which there is no fused kernel.
    let config = std::fs::read_to_string(golden("llama").join("config.json")).expect("a golden");
    let mut config: serde_json::Value = serde_json::from_str(&config).expect("JSON");
    for (key, value) in [("head_dim", 4), ("num_attention_heads", 16), ("num_key_value_heads", 8)] {
        config[key] = value.into();
    }
    cli.file("small-heads/config.json", config.to_string());
    let weights = std::fs::read(golden("llama").join("model.safetensors")).expect("a golden");
    cli.file("small-heads/model.safetensors", weights);
    let plan = cli.run(&with(&["plan", "./small-heads"], &SIM)).ok();
    let told: Vec<&str> = plan.lines().filter(|line| line.starts_with("unfused ")).collect();
    assert_eq!(told.len(), 2, "{plan}");
    assert!(
        told.iter().all(|line| line.contains("more run as separate steps instead of one launch")),
        "{told:?}"
    );
    assert!(told[0].ends_with("heads have 4 elements, must be a multiple of 8 up to 512"), "{told:?}");
    assert!(told[1].contains("no fused single-row kernel supports F32 weights"), "{told:?}");
    let log = cli.run(&with(&["bench", "./small-heads", "-p", "0", "-n", "2", "-r", "1", "-v"], &SIM)).stderr;
    assert!(log.contains(told[0]), "{log}");
    let plain = cli.run(&with(&["plan", "stories"], &SIM)).ok();
    assert!(!plain.contains("unfused "), "{plain}");
}

#[test]
fn caches_of_every_type_run_and_are_shown_in_plans() {
    let cli = Cli::new();
    let cpu = ["--device", "cpu"];
    for device in [&cpu[..], &SIM] {
        for (kv, told) in [("f16", "in F16"), ("bf16", "in BF16"), ("f32", "in F32")] {
            let args = [device, &["--kv", kv]].concat();
            let text = cli.run(&with(&with(&["run", "Once upon a time"], &GREEDY), &args)).ok();
            assert!(text.split_whitespace().count() > 5, "{args:?}: {text}");
            let plan = cli.run(&with(&["plan", "stories", "-c", "64"], &args)).ok();
            assert!(plan.contains(&format!("of KV cache {told} for each position")), "{args:?}: {plan}");
        }
    }
    cli.run(&["run", "A cat", "-n", "1", "--kv-dtype", "f32", "--device", "cpu"]).ok();
}

#[test]
fn bench_on_a_device_counts_launches_and_kernels_and_its_json_is_data() {
    let cli = Cli::new();
    let args = with(&["bench", "stories", "-p", "8", "-n", "4", "-r", "1"], &SIM);
    let ended = cli.run(&with(&args, &["-v"]));
    assert!(ended.stderr.contains("of workspace"), "{}", ended.stderr);
    assert!(ended.stderr.contains("step of 8 tokens: verified against eager"), "{}", ended.stderr);
    let text = ended.ok();
    assert!(text.contains("1 launch and ") && text.contains(" kernels per token"), "{text}");
    assert!(text.lines().any(|l| l.starts_with("weights  ") && l.ends_with(" GB/s")), "{text}");
    let json = cli.run(&with(&args, &["--json"])).json();
    assert_eq!(json["launches_per_token"], 1);
    assert!(json["kernels_per_token"].as_u64() > Some(10), "{json}");
    assert_eq!((&json["decode_steps"]["replayed"], &json["decode_steps"]["eager"]), (&8.into(), &0.into()));
    assert!(json["memory"]["kv_bytes"].as_u64() > Some(0), "{json}");
    assert!(json["upload_bytes"].as_u64() > Some(1 << 20), "{json}");
    assert!(json["upload_seconds"].as_f64() > Some(0.0), "{json}");
    assert!(json["decode"][0]["ms_per_token"].as_f64() > Some(0.0), "{json}");
    let json = cli.run(&with(&args, &["--json", "--profile=b.html"])).json();
    assert_eq!(json["launches_per_token"], json["kernels_per_token"]);
    assert_eq!(json["decode_steps"]["reasons"]["profiling"], 8);
    assert!(cli.home.path().join("b.html").exists());
    let cpu = ["bench", "stories", "-p", "0", "-n", "4", "-r", "1", "--device", "cpu", "--json"];
    let json = cli.run(&cpu).json();
    assert!(json["launches_per_token"].is_null(), "{json}");
    assert!(json["decode"][0]["read_bandwidth_share"].as_f64() > Some(0.0), "{json}");
}

#[test]
fn bench_load_measures_the_highest_rate_then_a_share_of_it_and_draws_a_page() {
    let cli = Cli::new();
    let load = ["bench", "stories", "--load", "--requests", "12", "--max-seqs", "4", "--device", "cpu"];
    // The limits must not depend on the machine.
    let limits = ["--ttft-limit", "60000", "--token-limit", "60000"];
    let lengths = with(&["--prompt-range", "4-12", "--reply-range", "2-6"], &limits);
    let ended = cli.run(&with(&with(&load, &lengths), &["--rate", "80%", "--html", "load.html"]));
    assert!(ended.stderr.contains("highest rate: "), "{}", ended.stderr);
    assert!(ended.stderr.contains("decode steps: "), "{}", ended.stderr);
    let text = ended.ok();
    assert!(text.contains("goodput ") && text.contains("12 of 12 "), "{text}");
    let page = std::fs::read_to_string(cli.home.path().join("load.html")).expect("a page");
    for part in ["bench stories --load", "Tokens per second", "KV blocks in use", "waiting"] {
        assert!(page.contains(part), "{part} is missing");
    }
    let json = cli.run(&with(&with(&load, &lengths), &["--clients", "3", "--json"])).json();
    assert_eq!((&json["completed"], &json["failed"]), (&12.into(), &serde_json::json!({})));
    assert_eq!(json["clients"], 3);
    assert!(json["ttft_seconds"]["p99"].as_f64() >= json["ttft_seconds"]["p50"].as_f64(), "{json}");
    let too_long = cli.run(&with(&load, &["--reply-range", "4000", "-c", "100"]));
    let message = too_long.stderr;
    assert!(message.contains("the longest request has 4256 tokens, the context 100"), "{message}");
    assert!(message.contains("raise -c to 4256"), "{message}");
}

#[test]
fn bench_load_needs_a_server_that_answers() {
    let cli = Cli::new();
    // The listener is dropped, so nothing answers at its port.
    let port =
        std::net::TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).expect("a port").port();
    let ended = cli.run(&["bench", "--load", "--url", &format!("http://127.0.0.1:{port}")]);
    assert!(ended.stderr.contains("cannot read http://127.0.0.1:"), "{}", ended.stderr);
    assert!(ended.stderr.contains("`refrain serve MODEL` starts one"), "{}", ended.stderr);
    assert_eq!(ended.code, Some(1));
}

#[test]
fn bench_at_several_depths_has_a_decode_line_for_each_and_reports_launches_and_steps_once() {
    let cli = Cli::new();
    let args = with(&["bench", "stories", "-p", "0", "-n", "4", "-r", "1", "--depth", "16,3"], &SIM);
    let text = cli.run(&args).ok();
    let count = |what: &str| text.matches(what).count();
    assert_eq!((count("\ndecode "), count(" GB per token, ")), (2, 2), "{text}");
    assert_eq!((count("  after 16\n"), count("  after 3\n")), (1, 1), "{text}");
    assert_eq!((count("1 launch and "), count(" replayed")), (1, 1), "{text}");
    let json = cli.run(&with(&args, &["--json"])).json();
    let depths: Vec<_> = json["decode"].as_array().expect("a list").iter().map(|d| &d["depth"]).collect();
    assert_eq!(depths, [16, 3]);
    assert_eq!(json["decode_steps"]["replayed"], 16, "two rounds of four at two depths");
    let none = with(&["bench", "stories", "-p", "4", "-n", "0", "-r", "1", "--json"], &SIM);
    assert_eq!(cli.run(&none).json()["decode"], serde_json::json!([]));
}

#[test]
fn an_empty_store_lists_the_built_in_models() {
    let cli = Cli::new();
    let listed = cli.run(&["list"]).ok();
    let names: Vec<_> = listed.lines().filter_map(|line| line.split_whitespace().next()).collect();
    assert_eq!(names, ["stories", "chat"], "{listed}");
    assert!(cli.run(&["list", "--known"]).ok().contains("smollm2:135m"));
    let json = cli.run(&["list", "--json"]).json();
    let builtin = json["builtin"].as_array().expect("a list");
    let names: Vec<_> = builtin.iter().map(|model| model["name"].as_str().expect("a name")).collect();
    assert_eq!(names, ["stories", "chat"]);
    for model in builtin {
        let bytes = model["bytes"].as_u64().expect("a number");
        assert!((1_000_000..=8_000_000).contains(&bytes), "{model}");
    }
    assert_eq!(json["models"].as_array().map(Vec::len), Some(0));
    for name in names {
        cli.run(&["pull", name]).ok();
        cli.run(&["rm", name]).refused();
    }
}

#[test]
fn the_doctor_finds_the_simulated_device_healthy() {
    let cli = Cli::new();
    let json = cli.run(&["doctor", "--device", "sim", "--json"]).json();
    let rows = json["rows"].as_array().expect("rows");
    assert!(rows.len() > 5 && rows.iter().all(|row| row["verdict"] != "bad"), "{json}");
    let kernels = rows.iter().find(|row| row["name"] == "kernels").expect("a row on kernels");
    let measured = kernels["measured"].as_str().expect("text");
    assert!(
        measured.contains("reference functions") && measured.contains("this binary contains"),
        "{measured}"
    );
    assert!(rows.iter().any(|row| row["name"] == "kernel compiler"), "{json}");
}

#[test]
fn every_shell_gets_completions() {
    let cli = Cli::new();
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = cli.run(&["completions", shell]).ok();
        assert!(script.contains("perplexity"), "{shell}");
        assert!(!script.contains("undefined"), "{shell}");
    }
}

#[test]
fn every_command_has_examples_in_its_help() {
    let cli = Cli::new();
    let help = cli.run(&["--help"]).ok();
    assert!(help.contains("Examples:"));
    let commands = help.lines().skip_while(|l| *l != "Commands:").skip(1).take_while(|l| !l.is_empty());
    let commands: Vec<&str> = commands.filter_map(|l| l.split_whitespace().next()).collect();
    assert!(commands.len() >= 11, "{commands:?}");
    for command in commands {
        let help = cli.run(&[command, "--help"]).ok();
        assert!(help.contains("Examples:") && help.contains(&format!("refrain {command}")), "{command}");
    }
}

#[test]
fn help_takes_the_name_of_a_command() {
    let cli = Cli::new();
    assert_eq!(cli.run(&["help"]).ok(), cli.run(&["--help"]).ok());
    assert_eq!(cli.run(&["help", "bench"]).ok(), cli.run(&["bench", "--help"]).ok());
    assert!(cli.run(&["help", "bnech"]).misused().contains("'bench'"));
}

#[test]
fn the_reference_pages_match_the_program() {
    let cli = Cli::new();
    for page in ["cli", "environment"] {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../../docs/reference/{page}.md"));
        let stored = std::fs::read_to_string(&path).unwrap_or_default();
        let printed = cli.run(&["__reference", page]).ok();
        assert!(
            stored == printed,
            "docs/reference/{page}.md is out of date\nhint: cargo run -- __reference {page} > docs/reference/{page}.md"
        );
    }
}

#[test]
fn only_this_crate_names_flags_in_messages() {
    let page = Cli::new().run(&["__reference", "cli"]).ok();
    let flags: std::collections::BTreeSet<&str> = page
        .lines()
        .filter_map(|line| line.trim_start().trim_start_matches(|c| c != '-').split_once("--"))
        .map(|(_, flag)| flag.split(|c: char| !c.is_ascii_lowercase() && c != '-').next().unwrap_or_default())
        .filter(|flag| flag.len() > 2)
        .collect();
    assert!(["temp", "graph", "raw", "resume"].iter().all(|flag| flags.contains(flag)), "{flags:?}");
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    for library in
        ["refrain", "refrain-engine", "refrain-formats", "refrain-hub", "refrain-models", "refrain-train"]
    {
        for path in sources(&crates.join(library).join("src")) {
            let text = std::fs::read_to_string(&path).expect("a source");
            // Messages come before the tests in a file.
            let text = text.split("#[cfg(test)]").next().unwrap_or_default();
            for (idx, line) in
                text.lines().enumerate().filter(|(_, line)| !line.trim_start().starts_with("//"))
            {
                let mut words = line.split(|c: char| !c.is_ascii_lowercase() && c != '-');
                let named =
                    words.find(|word| word.strip_prefix("--").is_some_and(|flag| flags.contains(flag)));
                assert!(named.is_none(), "{}:{}: {line}", path.display(), idx + 1);
            }
        }
    }
}

fn sources(folder: &Path) -> Vec<std::path::PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        match path.is_dir() {
            true => found.extend(sources(&path)),
            false if path.extension().is_some_and(|end| end == "rs") => found.push(path),
            false => {}
        }
    }
    found
}

const SIM: [&str; 2] = ["--device", "sim"];

#[test]
fn a_reply_that_the_device_repeats_has_the_same_text_in_a_launch_or_two() {
    let cli = Cli::new();
    let run = |place: &str| {
        let args = ["run", "Once upon a time", "-n", "20", "--seed", "3", "--json", "--loop", place];
        cli.run(&[&args[..], &SIM].concat()).json()
    };
    let [host, device] = ["host", "device"].map(run);
    assert_eq!(host["text"], device["text"]);
    let decode = &device["ledger"]["decode"];
    assert_eq!(host["ledger"]["decode"]["replayed"], decode["replayed"]);
    assert!(decode["launches"].as_u64().is_some_and(|n| n <= 2), "{decode}");
    assert!(decode["repeated"].as_u64() >= Some(16) && decode["not_repeated"].is_null(), "{decode}");
}

#[test]
fn the_simulated_device_replays_every_step_and_gives_the_same_text_as_the_cpu() {
    let cli = Cli::new();
    let prompt = ["run", "stories", "Once upon a time"];
    let cpu = cli.run(&with(&with(&prompt, &GREEDY), &["--device", "cpu"])).ok();
    for method in ["stream", "nodes"] {
        let graph = ["--graph", "require", "--graph-method", method, "--json"];
        let json = cli.run(&with(&with(&with(&prompt, &GREEDY), &SIM), &graph)).json();
        assert_eq!(json["text"].as_str().map(str::trim_end), Some(cpu.trim_end()), "{method}");
        let decode = &json["ledger"]["decode"];
        assert_eq!(decode["replayed"], decode["steps"], "{method}: {decode}");
        assert!(decode["replayed"].as_u64() > Some(4), "{method}: {decode}");
    }
}

#[test]
fn memory_on_a_device_is_reported_with_verbose_and_in_the_summary() {
    let cli = Cli::new();
    let prompt = with(&with(&["run", "stories", "A cat"], &GREEDY), &SIM);
    let told = |extra: &[&str], row: &str| {
        let ended = cli.run(&with(&prompt, extra));
        let line = ended.stderr.lines().find(|l| l.starts_with(row)).map(str::to_owned);
        line.unwrap_or_else(|| panic!("{row}: {}", ended.stderr))
    };
    for line in [told(&["-v"], "memory "), told(&["--stats"], "device ")] {
        for word in ["of weights", "of KV", "of arena", "of workspace", "free", "in all"] {
            assert!(line.contains(word), "{word} in {line}");
        }
    }
}

#[test]
fn a_failed_recording_is_reported_or_ends_the_command() {
    let cli = Cli::new();
    let prompt = with(&["run", "stories", "Once upon a time"], &GREEDY);
    let whole = cli.run(&with(&prompt, &["--device", "cpu"])).ok();
    let broken = with(&SIM, &["--faults", "on every begin_capture: fail 900; on every instantiate: fail 2"]);
    let json = cli.run(&with(&with(&prompt, &broken), &["--json"])).json();
    assert_eq!(json["text"].as_str().map(str::trim_end), Some(whole.trim_end()));
    assert_eq!(json["ledger"]["decode"]["replayed"], 0);
    assert!(json["ledger"]["decode"]["reasons"].as_object().is_some_and(|r| !r.is_empty()), "{json}");
    let ended = cli.run(&with(&with(&prompt, &broken), &["--stats"]));
    for step in ["step of 1 token:", "step of 8 tokens:"] {
        let said = ended.stderr.lines().filter(|l| l.contains("WARN") && l.contains(step));
        // One line for the first failure and for each later one, after 4 and 8 eager steps.
        let told: Vec<&str> = said.collect();
        assert!(!told.is_empty() && told.iter().all(|l| l.contains("eager for")), "{}", ended.stderr);
    }
    assert!(!ended.stderr.contains("0 steps until"), "{}", ended.stderr);
    let said = cli.run(&with(&with(&prompt, &broken), &["--graph", "require"])).refused();
    assert!(said.contains("900") || said.contains("error 2"), "{said}");
}

#[test]
fn a_device_lost_during_a_text_keeps_the_partial_text_and_has_its_own_exit_code() {
    let cli = Cli::new();
    let prompt = with(&["run", "stories", "Once upon a time"], &GREEDY);
    let whole = cli.run(&with(&prompt, &["--device", "cpu"])).ok();
    let ended = cli.run(&with(&with(&prompt, &SIM), &["--faults", "on 16th replay: sticky 700"]));
    assert_eq!(ended.code, Some(3), "{}", ended.stderr);
    let written = ended.stdout.trim_end();
    assert!(!written.is_empty() && whole.starts_with(written), "{written:?} of {whole:?}");
    assert!(ended.stderr.contains("700") && ended.stderr.contains("hint: "), "{}", ended.stderr);
    let ended = cli.run(&with(&with(&prompt, &SIM), &["--faults", "on 16th replay: sticky 700", "--json"]));
    assert_eq!(ended.code, Some(3), "{}", ended.stderr);
    let json: serde_json::Value = serde_json::from_str(&ended.stdout).expect("one JSON object");
    assert_eq!((&json["finish"], json["text"].as_str()), (&"error".into(), Some(written)), "{json}");
    assert!(json["error"].as_str().is_some_and(|error| error.contains("700")), "{json}");
    // A wrong byte leads to an invalid token, and then the device is lost: the loss is reported, not the token.
    let wrong = ["--graph", "off", "--seed", "1", "-n", "40", "--faults", "on 1222nd launch: wrong byte"];
    let ended = cli.run(&with(&["run", "stories", "Once upon a time", "--device", "sim"], &wrong));
    assert!(ended.stderr.contains("context is lost"), "the fault must hit another launch: {}", ended.stderr);
    assert_eq!(ended.code, Some(3), "{}", ended.stderr);
    assert!(!ended.stderr.contains("tokenizer"), "{}", ended.stderr);
    // The same during the verification of the first graph, before any text.
    let ended = cli.run(&with(&with(&prompt, &SIM), &["--faults", "on 2nd replay: sticky 700"]));
    assert_eq!((ended.code, ended.stdout.as_str()), (Some(3), ""), "{}", ended.stderr);
}

#[test]
fn a_profile_runs_one_kernel_at_a_time_and_says_so() {
    let cli = Cli::new();
    let prompt = with(&["run", "stories", "Once upon a time"], &GREEDY);
    let ended = cli.run(&with(&with(&prompt, &SIM), &["--profile", "--stats"]));
    assert!(ended.stderr.contains("product_gated_q8_0"), "{}", ended.stderr);
    assert!(ended.stderr.contains("profiling times each op"), "{}", ended.stderr);
    assert!(ended.stderr.contains("written: refrain-profile.html"), "{}", ended.stderr);
    let page = std::fs::read_to_string(cli.home.path().join("refrain-profile.html")).expect("a page");
    let command = "refrain run stories 'Once upon a time' --raw";
    assert!(page.contains(command) && page.contains("the simulated device, 20") && page.contains(" UTC"));
    assert!(page.contains("product_gated_q8_0") && page.ends_with("</html>\n"));
    assert!(!page.contains("http") && !page.contains("src="), "the page needs nothing else");
    let data = page.split_once("id=\"data\">").and_then(|(_, rest)| rest.split_once("</script>"));
    let data: serde_json::Value = serde_json::from_str(data.expect("data").0).expect("JSON");
    // One step for the prompt and eleven decoded tokens.
    assert_eq!(data["steps"].as_array().map(Vec::len), Some(12));
    assert!(data["spans"].as_array().is_some_and(|s| s.len() > 12 * 20));
    let json = cli.run(&with(&with(&prompt, &SIM), &["--profile=other.html", "--json"])).json();
    assert_eq!(json["ledger"]["decode"]["reasons"]["profiling"], 11);
    assert!(cli.home.path().join("other.html").exists());
    let said = cli.run(&with(&with(&prompt, &SIM), &["--profile=no/such/folder.html"]));
    assert!(said.code == Some(1) && said.stderr.contains("hint: check the path"), "{}", said.stderr);
}

/// A run on the simulated device, with `--graph require`: every step is replayed or it fails.
fn required(cli: &Cli, faults: &str) -> (serde_json::Value, String) {
    let args = ["run", "Once upon a time", "-n", "4", "--device", "sim", "--graph", "require", "--json"];
    let ended = cli.run(&with(&args, &["--faults", faults, "--trial-limit", "1000"]));
    let said = ended.stderr.clone();
    (ended.json(), said)
}

const POISON: &str = "on every end_capture: sticky 901";

#[test]
fn a_driver_whose_captures_are_usable_records_by_stream_capture_and_is_tried_once() {
    let cli = Cli::new();
    let (json, said) = required(&cli, "");
    assert_eq!(json["graph_method"]["method"], "stream capture", "{json}");
    assert_eq!(json["graph_method"]["remembered"], false);
    assert!(!said.contains("are recorded by"), "{said}");
    let (json, _) = required(&cli, "");
    assert_eq!(json["graph_method"]["remembered"], true, "{json}");
}

#[test]
fn a_driver_whose_captures_lose_the_context_records_by_nodes_and_says_why() {
    let cli = Cli::new();
    for remembered in [false, true] {
        let (json, said) = required(&cli, POISON);
        assert_eq!(json["graph_method"]["method"], "explicit nodes", "{json}");
        assert_eq!(json["graph_method"]["remembered"], remembered);
        assert!(json["graph_method"]["because"].as_str().is_some_and(|b| b.contains("901")), "{json}");
        assert!(said.contains("graphs are recorded by explicit nodes") && said.contains("901"), "{said}");
        assert_eq!(json["ledger"]["decode"]["eager"], 0, "{json}");
    }
    let said =
        cli.run(&["run", "Once upon", "-n", "4", "--device", "sim", "--stats", "--faults", POISON]).stderr;
    assert!(said.contains("method   explicit nodes: an earlier trial"), "{said}");
    // An explicit method is used without a trial.
    let args =
        ["run", "Once upon", "-n", "4", "--device", "sim", "--faults", POISON, "--graph-method", "stream"];
    assert_eq!(cli.run(&args).code, Some(3));
}

#[test]
fn a_trial_that_hangs_is_ended_and_its_driver_records_by_nodes() {
    let cli = Cli::new();
    let (json, _) = required(&cli, "on every end_capture: hang");
    assert_eq!(json["graph_method"]["method"], "explicit nodes", "{json}");
    assert!(json["graph_method"]["because"].as_str().is_some_and(|b| b.contains("within 1s")), "{json}");
    let (json, _) = required(&cli, "on every end_capture: hang");
    assert_eq!(json["graph_method"]["remembered"], true);
}

#[test]
fn a_stored_trial_that_cannot_be_read_is_repeated() {
    let cli = Cli::new();
    required(&cli, POISON);
    let folder = cli.home.path().join("refrain/drivers");
    let files: Vec<_> =
        std::fs::read_dir(folder).expect("a folder").map(|e| e.expect("a file").path()).collect();
    let [file] = files.as_slice() else { panic!("{files:?}") };
    std::fs::write(file, b"\xff\xff").expect("a file");
    let (json, _) = required(&cli, POISON);
    assert_eq!(json["graph_method"]["method"], "explicit nodes");
    assert_eq!(json["graph_method"]["remembered"], false, "{json}");
    let (json, _) = required(&cli, POISON);
    assert_eq!(json["graph_method"]["remembered"], true, "{json}");
}

#[test]
fn the_doctor_reports_where_per_layer_embeddings_would_be_placed() {
    let rows = Cli::new().run(&["doctor", "--device", "sim", "--json"]).json();
    let row = rows["rows"].as_array().unwrap().iter().find(|row| row["name"] == "tables").unwrap();
    // The simulated card has 4 GiB: too little even for the weights other than the table.
    let measured = row["measured"].as_str().unwrap();
    assert!(measured.contains("gemma4-e2b does not fit even without its table"), "{measured}");
    assert!(row["advice"].as_str().unwrap().contains("--ple"), "{row}");
}

#[test]
fn a_plan_shows_every_place_of_per_layer_embeddings() {
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/../refrain-models/tests/goldens/gemma4-e2b");
    let plan = Cli::new().run(&["plan", model, "--device", "sim", "--ple", "host"]).ok();
    assert!(
        plan.contains("segment 0: steps 0 to 0, runs on the host: its table stays on the host"),
        "{plan}"
    );
    assert!(plan.contains("can be recorded and replayed as one launch"), "{plan}");
    assert!(plan.contains("device 1 segment, no transfers"), "{plan}");
    assert!(plan.contains("* host   2 segments, 288 B over the bus before the graph"), "{plan}");
}

#[test]
fn the_doctor_reports_how_graphs_are_recorded() {
    let rows = Cli::new().run(&["doctor", "--device", "sim", "--json"]).json();
    let rows = rows["rows"].as_array().expect("rows");
    let row = rows.iter().find(|row| row["name"] == "graph method").expect("a row");
    assert_eq!((&row["verdict"], &row["measured"]), (&"good".into(), &"stream capture".into()), "{row}");
}

#[test]
fn a_reply_follows_its_grammar_and_says_if_it_was_cut() {
    let cli = Cli::new();
    let schema = r#"{"type": "object", "properties": {"n": {"type": "integer", "minimum": 10, "maximum": 99}}, "required": ["n"], "additionalProperties": false}"#;
    let flags = ["--json-schema", schema, "--temp", "3", "--seed", "4"];
    let reply = cli.run(&[&["run", "stories", "A cat", "--json"], &flags[..]].concat()).json();
    let value: serde_json::Value = serde_json::from_str(reply["text"].as_str().unwrap()).unwrap();
    assert!(value["n"].as_u64().is_some_and(|n| (10..100).contains(&n)), "{reply}");
    assert_eq!(reply["finish"], "complete");
    let cut = cli.run(&[&["run", "stories", "A cat", "-n", "2"], &flags[..]].concat());
    assert_eq!(cut.code, Some(0));
    assert!(cut.stderr.contains("cut before it was complete"), "{}", cut.stderr);
    cli.file("sum.lark", "start: NUMBER (\"+\" NUMBER){2}\nNUMBER: /[1-9]/\n");
    let sum = cli.run(&["run", "stories", "A cat", "--grammar", "sum.lark", "--temp", "0"]);
    assert_eq!((sum.code, sum.stdout.trim().len()), (Some(0), 5), "{}", sum.stdout);
}
