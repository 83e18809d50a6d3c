//! Bad input: a clear error that names the file and the position, with a hint.

mod common;

use common::{Cli, golden, stories};
use std::process::Stdio;

#[test]
fn a_mistyped_model_name_gets_the_nearest() {
    let cli = Cli::new();
    for args in
        [&["run", "smolm2"][..], &["run", "smolm2", "Hello"], &["chat", "smolm2"], &["pull", "smolm2"]]
    {
        let said = cli.run(args).refused();
        assert!(
            said.contains("no model is called `smolm2`") && said.contains("did you mean `smollm2`?"),
            "{said}"
        );
    }
    let said = cli.run(&["run", "storeis", "Hello"]).refused();
    assert!(said.contains("did you mean `stories`?"), "{said}");
    for word in ["Hello", "cat"] {
        assert!(cli.run(&["run", word]).refused().contains("pass it with -p"), "{word}");
    }
    let said = cli.run(&["run", "Hello there", "a prompt"]).refused();
    assert!(said.contains("no model is called `Hello there`"), "{said}");
}

#[test]
fn a_mistyped_flag_or_command_gets_the_nearest() {
    let cli = Cli::new();
    assert!(cli.run(&["run", "--tmep", "0", "A cat"]).misused().contains("'--temp'"));
    assert!(cli.run(&["perplexty", "stories"]).misused().contains("'perplexity'"));
}

#[test]
fn a_known_name_is_not_pulled_offline() {
    let cli = Cli::new();
    let said = cli.run(&["--offline", "run", "smollm2", "Hello"]).refused();
    assert!(said.contains("offline"), "{said}");
    cli.run(&["pull", "Qwen/Qwen3-0.6B-GGUF:Q8_0"]).refused();
    cli.run(&["rm", "smollm2"]).refused();
    cli.run(&["rm", "stories"]).refused();
}

#[test]
fn contradicting_arguments_are_a_usage_error() {
    let cli = Cli::new();
    cli.run(&["run", "-m", "stories", "-p", "A cat", "another"]).misused();
    cli.run(&["run", "-m", "stories", "one", "two"]).misused();
    cli.run(&["run", "-p", "A cat", "one", "two"]).misused();
    cli.run(&["run", "--raw", "--system", "Be brief", "A cat"]).misused();
    cli.run(&["run", "A cat", "--device", "gpu"]).misused();
    cli.run(&["plan", "stories", "--bandwidth", "-3"]).misused();
    cli.run(&[]).misused();
}

#[test]
fn steps_ahead_outside_the_range_are_refused() {
    for n in ["0", "33"] {
        let said = Cli::new().run(&["run", "A cat", "--device", "sim", "--ahead", n]).misused();
        assert!(said.contains("from 1 to 32"), "{said}");
    }
}

#[test]
fn guesses_that_cannot_work_are_refused_with_a_hint() {
    let cli = Cli::new();
    for n in ["0", "16", "100"] {
        let said = cli.run(&["run", "A cat", "--speculate", "ngram", "--draft-tokens", n]).misused();
        assert!(said.contains("from 1 to 15"), "{said}");
    }
    let said = cli.run(&["run", "A cat", "--draft-tokens", "4"]).refused();
    assert!(said.contains("--speculate ngram or --draft"), "{said}");
    let said = cli.run(&["run", "A cat", "--speculate", "ngram", "--draft", "stories"]).refused();
    assert!(said.contains("not from both"), "{said}");
    let verified = ["run", "A cat", "--speculate", "ngram", "--device", "sim", "--verify", "every:2"];
    assert!(cli.run(&verified).refused().contains("remove --verify"));
    let said = cli.run(&["run", "-m", "stories", "-p", "A cat", "--draft", "storeis"]).refused();
    assert!(said.contains("did you mean `stories`?"), "{said}");
    let said = cli.run(&["bench", "stories", "--draft-acceptance", "0.5"]).refused();
    assert!(said.contains("nothing guesses"), "{said}");
    let said = cli.run(&["bench", "stories", "--speculate", "ngram", "--draft-acceptance", "2"]).misused();
    assert!(said.contains("from 0 to 1"), "{said}");
    let ok =
        cli.run(&["run", "A cat", "-n", "12", "--draft", "stories", "--draft-tokens", "3", "--json"]).ok();
    assert!(ok.contains("\"acceptance\""), "{ok}");
}

#[test]
fn loops_that_need_the_host_are_refused_with_a_hint() {
    let cli = Cli::new();
    let run = ["run", "A cat", "--device", "sim", "--loop", "device"];
    for (more, hint) in [
        (&["--verify", "every:2"][..], "remove --verify"),
        (&["--profile"], "remove --profile"),
        (&["--graph", "off"], "remove --graph off"),
        (&["--speculate", "ngram"], "remove --speculate"),
        (&["--json-object"], "remove --json-schema"),
        (&["--device", "cpu"], "choose --device cuda"),
    ] {
        let args: Vec<&str> = match more[0] {
            "--device" => ["run", "A cat", "--loop", "device"].iter().chain(more).copied().collect(),
            _ => run.iter().chain(more).copied().collect(),
        };
        let said = cli.run(&args).refused();
        assert!(said.contains("--loop device") && said.contains(hint), "{said}");
    }
    let said = cli.run(&["bench", "stories", "--loop", "device", "--device", "cpu"]).refused();
    assert!(said.contains("the CPU is the host"), "{said}");
    let said = cli.run(&["run", "A cat", "--loop", "card"]).misused();
    assert!(said.contains("host") && said.contains("device"), "{said}");
}

#[test]
fn zero_threads_are_refused() {
    let said = Cli::new().run(&["run", "A cat", "--threads", "0"]).misused();
    assert!(said.contains("at least 1 thread"), "{said}");
    let said = Cli::new().run(&["run", "A cat", "--threads", "100000"]).misused();
    assert!(said.contains("100000 threads"), "{said}");
}

#[test]
fn device_flags_that_cannot_work_are_refused_with_a_hint() {
    let cli = Cli::new();
    let said = cli.run(&["run", "A cat", "--device", "cpu", "--graph", "require"]).refused();
    assert!(said.contains("--graph auto"), "{said}");
    let said = cli.run(&["run", "A cat", "--device", "cpu", "--profile"]).refused();
    assert!(said.contains("--device cuda"), "{said}");
    let said = cli.run(&["run", "A cat", "--device", "cpu", "--faults", "on 1st alloc: fail 2"]).refused();
    assert!(said.contains("--device sim"), "{said}");
    let said = cli.run(&["run", "A cat", "--device", "sim", "--faults", "on noon: rain"]).refused();
    assert!(said.contains("noon"), "{said}");
    // No machine has that many GPUs; many have none, and then the message says what is missing.
    let said = cli.run(&["run", "A cat", "--device", "cuda:4000"]).refused();
    assert!(said.contains("hint: "), "{said}");
    cli.run(&["run", "A cat", "-n", "1", "--graph", "off", "--device", "cpu"]).ok();
}

#[test]
fn a_cache_of_another_type_is_refused_with_the_known_types() {
    for command in [&["run", "A cat"][..], &["chat"], &["bench", "stories"], &["plan", "stories"]] {
        let said = Cli::new().run(&[command, &["--kv", "q8_0"]].concat()).misused();
        assert!(said.contains("--kv") && said.contains("f16, bf16, f32"), "{said}");
    }
}

#[test]
fn an_empty_prompt_is_refused() {
    let cli = Cli::new();
    for args in [&["run", "stories"][..], &["run", ""], &["run", "stories", ""], &["run"]] {
        assert!(cli.run(args).refused().contains("the prompt is empty"), "{args:?}");
    }
    assert!(cli.pipe(&["run"], b"\n").refused().contains("the prompt is empty"));
}

#[test]
fn text_that_is_not_utf_8_is_reported_with_its_position() {
    let cli = Cli::new();
    let said = cli.pipe(&["run", "stories"], b"A cat \xc3\x28").refused();
    assert!(said.contains("standard input is not UTF-8: byte 6"), "{said}");
    cli.file("latin.txt", b"caf\xe9 au lait");
    for args in [&["run", "stories", "-f", "latin.txt"][..], &["perplexity", "stories", "-f", "latin.txt"]] {
        let said = cli.run(args).refused();
        assert!(said.contains("latin.txt is not UTF-8: byte 3 is 0xe9"), "{said}");
    }
    cli.pipe(&["tokenize", "stories"], b"\xff").refused();
}

#[test]
fn a_prompt_longer_than_the_context_is_refused_with_both_numbers() {
    let cli = Cli::new();
    let said = cli.run(&["run", "stories", &"cat ".repeat(50), "-c", "16"]).refused();
    assert!(said.contains("the context holds 16") && said.contains("with -c"), "{said}");
    // Beyond the model's limit -c does not help.
    let said = cli.run(&["run", "stories", &"cat ".repeat(700)]).refused();
    assert!(said.contains("the model takes at most 512 tokens") && !said.contains("-c"), "{said}");
    let said = cli.run(&["run", "A cat", "-c", "1000000"]).refused();
    assert!(said.contains("1000000") && said.contains("-c"), "{said}");
    cli.run(&["run", "A cat", "-c", "0"]).refused();
    let said = cli.run(&["bench", "stories", "-p", "600", "-n", "1"]).refused();
    assert!(said.contains("512 are available") && !said.contains("-c"), "{said}");
    let said = cli.run(&["bench", "stories", "-p", "300", "-n", "1", "-c", "64"]).refused();
    assert!(said.contains("raise -c to 300"), "{said}");
}

#[test]
fn sampling_parameters_out_of_range_are_refused() {
    let cli = Cli::new();
    for (flag, value) in [
        ("--temp", "-1"),
        ("--temp", "NaN"),
        ("--top-p", "1.5"),
        ("--min-p", "2"),
        ("--repeat-penalty", "0"),
        ("--presence-penalty", "inf"),
        ("--seed", "-2"),
        ("-n", "-2"),
    ] {
        // Refused before the model, which does not exist, is looked up.
        for command in [&["run", "./none.gguf", "A cat"][..], &["chat", "./none.gguf"]] {
            let said = cli.run(&[command, &[flag, value]].concat()).misused();
            assert!(said.contains("must be") && !said.contains("none.gguf"), "{flag}: {said}");
        }
    }
    let said = cli.run(&["run", "A cat", "--top-k", "-1"]).misused();
    assert!(said.contains("0 keeps all"), "{said}");
}

#[test]
fn a_prompt_far_too_long_is_refused_by_its_length() {
    let cli = Cli::new();
    let began = std::time::Instant::now();
    let said = cli.pipe(&["run"], "word ".repeat(10_000_000).as_bytes()).refused();
    assert!(said.contains("standard input has more than 32.0 MiB"), "{said}");
    let said = cli.pipe(&["run"], "word ".repeat(400_000).as_bytes()).refused();
    assert!(said.contains("2000000 bytes") && said.contains("512 tokens holds at most"), "{said}");
    assert!(began.elapsed().as_secs() < 20, "{:?}", began.elapsed());
}

#[test]
fn escape_sequences_in_metadata_do_not_reach_a_terminal() {
    let cli = Cli::new();
    let mut bytes = stories();
    // As long as the name that it replaces, so the lengths in the file stay valid.
    let name = b"stories";
    let key = b"general.name";
    let key_idx = bytes.windows(key.len()).position(|w| w == key).expect("the key");
    let value_idx = key_idx + key.len() + 12;
    let len = usize::from(bytes[key_idx + key.len() + 4]);
    assert!(len >= 6 && bytes[value_idx..value_idx + len].is_ascii(), "{name:?} has {len} bytes");
    bytes[value_idx..value_idx + 6].copy_from_slice(b"\x1b[31m\n");
    cli.file("evil.gguf", &bytes);
    for args in [
        &["inspect", "./evil.gguf"][..],
        &["plan", "./evil.gguf", "--device", "cpu"],
        &["run", "./evil.gguf", "A cat", "-n", "1", "--device", "cpu"],
        &["bench", "./evil.gguf", "-p", "1", "-n", "1", "-r", "1", "--device", "cpu"],
    ] {
        let ended = cli.run(args);
        assert_eq!(ended.code, Some(0), "{args:?}: {}", ended.stderr);
        let printed = ended.stdout + &ended.stderr;
        assert!(!printed.contains('\x1b') && !printed.contains("[31m\n"), "{args:?}: {printed:?}");
    }
    // An error that quotes the file.
    let mut bytes = stories();
    let key = b"general.architecture";
    let key_idx = bytes.windows(key.len()).position(|w| w == key).expect("the key");
    bytes[key_idx + key.len() + 12..][..5].copy_from_slice(b"\x1b[31m");
    cli.file("evil.gguf", &bytes);
    let said = cli.run(&["run", "./evil.gguf", "A cat"]).refused();
    assert!(!said.contains('\x1b'), "{said:?}");
    assert!(!cli.run(&["inspect", "./evil.gguf"]).ok().contains('\x1b'));
}

#[test]
fn a_missing_file_is_reported_with_the_nearest_name() {
    let cli = Cli::new();
    let said = cli.run(&["run", "./nothing.gguf", "A cat"]).refused();
    assert!(said.contains("./nothing.gguf"), "{said}");
    cli.file("model.gguf", stories());
    let said = cli.run(&["run", "./modle.gguf", "A cat"]).refused();
    assert!(said.contains("did you mean ./model.gguf?"), "{said}");
    assert!(cli.run(&["run", "stories", "-f", "none.txt"]).refused().contains("none.txt"));
    assert!(cli.run(&["perplexity", "stories", "-f", "none.txt"]).refused().contains("none.txt"));
}

#[cfg(unix)]
#[test]
fn a_loop_of_links_is_reported_as_such() {
    let cli = Cli::new();
    for (link, target) in [("one.gguf", "two.gguf"), ("two.gguf", "one.gguf")] {
        std::os::unix::fs::symlink(target, cli.home.path().join(link)).expect("a link");
    }
    for command in [&["inspect", "./one.gguf"][..], &["run", "./one.gguf", "A cat"]] {
        let said = cli.run(command).refused();
        assert!(said.contains("symbolic link") && !said.contains("did you mean"), "{said}");
    }
}

#[test]
fn paths_are_not_pulled() {
    let cli = Cli::new();
    for path in ["../../etc/passwd", "/etc/passwd", "./model.gguf", ".."] {
        let said = cli.run(&["pull", path]).refused();
        assert!(said.contains("is a path: only names can be pulled"), "{path}: {said}");
    }
    for name in ["..//passwd", "owner/..", "owner/repo@../../x", "a/b:../c"] {
        cli.run(&["pull", name]).refused();
    }
}

#[test]
fn a_truncated_file_is_refused_at_any_length() {
    let cli = Cli::new();
    let whole = stories();
    for len in [0, 3, 4, 8, 23, 100, 1000, 40_000, whole.len() / 2, whole.len() - 1] {
        cli.file("cut.gguf", &whole[..len]);
        for args in [&["run", "./cut.gguf", "A cat"][..], &["inspect", "./cut.gguf"]] {
            let said = cli.run(args).refused();
            assert!(said.contains("cut.gguf"), "{len}: {said}");
        }
    }
}

#[test]
fn an_unknown_architecture_is_refused_with_the_known_ones() {
    let cli = Cli::new();
    let mut bytes = stories();
    let key = b"general.architecture";
    let at = bytes.windows(key.len()).position(|w| w == key).expect("the key");
    // After the key: four bytes of type, eight of length, then the value.
    let value = at + key.len() + 12;
    assert_eq!(&bytes[value..value + 5], b"llama");
    bytes[value..value + 5].copy_from_slice(b"zebra");
    cli.file("zebra.gguf", bytes);
    let said = cli.run(&["run", "./zebra.gguf", "A cat"]).refused();
    assert!(said.contains("zebra") && said.contains("qwen3") && said.contains("gemma3"), "{said}");
    assert!(cli.run(&["inspect", "./zebra.gguf"]).ok().contains("not runnable"));
}

#[test]
fn inspect_builds_no_tokenizer() {
    let cli = Cli::new();
    let mut bytes = stories();
    // `"` becomes a second `!`, so no tokenizer can be built.
    let token = b"\x01\0\0\0\0\0\0\0\"";
    let at = bytes.windows(token.len()).position(|w| w == token).expect("the token");
    bytes[at + 8] = b'!';
    cli.file("twice.gguf", bytes);
    let said = cli.run(&["tokenize", "./twice.gguf", "A cat"]).refused();
    assert!(said.contains("tokenizer"), "{said}");
    let text = cli.run(&["inspect", "./twice.gguf"]).ok();
    assert!(text.contains(" tokens\n"), "{text}");
}

#[test]
fn folders_without_a_whole_model_are_refused() {
    let cli = Cli::new();
    cli.file("empty/readme.txt", "nothing here");
    let said = cli.run(&["run", "./empty", "A cat"]).refused();
    assert!(said.contains("holds no model") && said.contains("readme.txt"), "{said}");
    let bare = golden("llama");
    let said = cli.run(&["run", bare.to_str().expect("a path"), "A cat"]).refused();
    assert!(said.contains("tokenizer.json"), "{said}");
    cli.file("unweighted/config.json", std::fs::read(bare.join("config.json")).expect("a golden"));
    let said = cli.run(&["run", "./unweighted", "A cat"]).refused();
    assert!(said.contains("no weights") && said.contains("*.safetensors"), "{said}");
    cli.file("text.gguf", "this is no model");
    cli.run(&["run", "./text.gguf", "A cat"]).refused();
}

#[test]
fn a_broken_chat_template_or_configuration_is_refused() {
    let cli = Cli::new();
    let model = cli.tiny_chat_model();
    cli.file("tiny/tokenizer_config.json", r#"{ "chat_template": "{% for %}" }"#);
    let model = model.to_str().expect("a path");
    let raw = || assert_eq!(cli.run(&["run", model, "--raw", "Hi", "-n", "2"]).code, Some(0));
    let said = cli.run(&["run", model, "Hi"]).refused();
    assert!(said.contains("template") && said.contains("line 1") && said.contains("--raw"), "{said}");
    raw();
    for hostile in [
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% set n = namespace(s='abcdefgh') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    ] {
        let config = serde_json::json!({ "chat_template": hostile });
        cli.file("tiny/tokenizer_config.json", config.to_string());
        let said = cli.run(&["run", model, "Hi"]).refused();
        assert!(said.contains("error: chat template ") && said.contains("--raw"), "{said}");
        raw();
    }
    cli.file("tiny/tokenizer_config.json", r#"{ "chat_template": 5 }"#);
    let said = cli.run(&["run", model, "Hi"]).refused();
    assert!(said.contains("chat_template is neither a text nor a list of named texts"), "{said}");
    raw();
    cli.file("tiny/chat_template.jinja", b"{{ '\xff' }}");
    let said = cli.run(&["run", model, "Hi"]).refused();
    assert!(said.contains("chat_template.jinja is not UTF-8"), "{said}");
    raw();
    cli.file("tiny/config.json", "{ not json");
    let said = cli.run(&["run", model, "Hi"]).refused();
    assert!(said.contains("config.json"), "{said}");
}

#[test]
fn a_text_too_short_to_be_scored_is_refused() {
    let cli = Cli::new();
    cli.file("short.txt", "A cat");
    let said = cli.run(&["perplexity", "stories", "-f", "short.txt"]).refused();
    assert!(said.contains("one window needs"), "{said}");
    cli.file("empty.txt", " \n");
    let said = cli.run(&["perplexity", "stories", "-f", "empty.txt"]).refused();
    assert!(said.contains("empty.txt contains no text"), "{said}");
}

#[test]
fn chat_refuses_a_model_without_a_chat_template() {
    let said = Cli::new().run(&["chat", "stories"]).refused();
    assert!(said.contains("no chat template") && said.contains("refrain run"), "{said}");
}

#[cfg(target_os = "linux")]
#[test]
fn output_that_cannot_be_written_is_an_error() {
    let cli = Cli::new();
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").expect("/dev/full");
    let output =
        cli.command(&["run", "A cat", "-n", "4"]).stdout(Stdio::from(full)).output().expect("it runs");
    let ended = common::ended(output);
    assert_eq!(ended.code, Some(1));
    assert!(ended.stderr.contains("cannot write to standard output"), "{}", ended.stderr);
}

#[cfg(unix)]
#[test]
fn a_file_without_read_permission_is_refused() {
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::process::CommandExt;

    const NOBODY: u32 = 65_534;
    let cli = Cli::new();
    let open = |path: &std::path::Path, mode| {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).expect("permissions");
    };
    let path = cli.file("secret.gguf", stories());
    open(&path, 0o000);
    open(cli.home.path(), 0o755);
    let mut command = cli.command(&["run", "./secret.gguf", "A cat"]);
    if std::fs::File::open(&path).is_ok() {
        // The superuser can read everything, so another user runs a copy of the program. A separate process makes the
        // copy: a child that another test forks meanwhile would keep the file open for writing.
        let program = cli.home.path().join("refrain-copy");
        let copied =
            std::process::Command::new("cp").arg(env!("CARGO_BIN_EXE_refrain")).arg(&program).status();
        assert!(copied.expect("cp").success());
        open(&program, 0o755);
        command = std::process::Command::new(program);
        command.args(["run", "./secret.gguf", "A cat"]).current_dir(cli.home.path()).stdin(Stdio::null());
        command.env("HOME", cli.home.path()).uid(NOBODY).gid(NOBODY);
    }
    let said = common::ended(command.output().expect("it runs")).refused();
    assert!(said.contains("secret.gguf") && said.contains("ermission"), "{said}");
}

#[test]
fn a_placement_without_effect_is_reported() {
    let cli = Cli::new();
    let ended = cli.run(&["run", "stories", "Once", "-n", "2", "--device", "cpu", "--ple", "pinned"]);
    assert!(ended.stderr.contains("--ple is for CUDA devices"), "{}", ended.stderr);
    let ended = cli.run(&["run", "stories", "Once", "-n", "2", "--device", "sim", "--ple", "host"]);
    assert!(ended.stderr.contains("has no per-layer embeddings"), "{}", ended.stderr);
    let ended = cli.run(&["run", "stories", "Once", "-n", "2", "--device", "cpu"]);
    assert!(!ended.stderr.contains("--ple"), "{}", ended.stderr);
}

#[test]
fn a_grammar_that_cannot_be_used_is_refused_with_its_place() {
    let cli = Cli::new();
    let run = |flags: &[&str]| cli.run(&[&["run", "stories", "A cat"], flags].concat());
    let said = run(&["--json-schema", r#"{"properties": {"a": {"not": {}}}, "required": ["a"]}"#]).refused();
    assert!(said.contains("cannot be used at #/properties/a") && said.contains("hint:"), "{said}");
    let impossible = r#"{"type": "integer", "minimum": 5, "maximum": 3}"#;
    assert!(
        run(&["--json-schema", impossible]).refused().contains("no JSON value satisfies the schema at #")
    );
    assert!(run(&["--json-schema", "missing.json"]).refused().contains("cannot read missing.json"));
    assert!(run(&["--grammar", "missing.lark"]).refused().contains("cannot read missing.lark"));
    cli.file("empty.lark", "");
    assert!(run(&["--grammar", "empty.lark"]).refused().contains("the grammar is empty"));
    std::fs::write(cli.home.path().join("latin.lark"), b"start: \"\xe9\"").unwrap();
    assert!(run(&["--grammar", "latin.lark"]).refused().contains("latin.lark is not UTF-8 text"));
    cli.file("huge.json", format!("{{\"description\": \"{}\"}}", "a".repeat(10 << 20)));
    assert!(run(&["--json-schema", "huge.json"]).refused().contains("at most 1048576 are allowed"));
    assert!(run(&["--regex", "("]).refused().contains("the regular expression cannot be used"));
    run(&["--regex", "a", "--json-object"]).misused();
}
