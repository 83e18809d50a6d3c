//! `refrain convert`, `quantize`, `imatrix`, `compare` and `show`, as a person or a script uses them.

mod common;

use common::Cli;
use std::path::Path;
use std::process::Command;

/// The built-in story model with float weights, and a text.
fn with_floats() -> Cli {
    let cli = Cli::new();
    cli.run(&["convert", "stories", "--type", "f32", "-o", "f32.gguf"]).ok();
    cli.file("text.txt", STORY.repeat(12));
    cli
}

const STORY: &str = "Once upon a time there was a little girl named Lily. She loved to play outside in the park. One day \
    she saw a big dog. The dog was very happy and wanted to play with her. They ran and ran until the sun went down.\n";

fn names(cli: &Cli) -> Vec<String> {
    let entries = cli.home.path().read_dir().unwrap();
    let mut names: Vec<String> =
        entries.map(|e| e.unwrap().file_name().into_string().unwrap()).filter(|n| n != "refrain").collect();
    names.sort();
    names
}

fn compare(cli: &Cli, model: &str) -> serde_json::Value {
    let args = ["compare", "f32.gguf", model, "-f", "text.txt", "-c", "64", "--chunks", "6", "--json"];
    cli.run(&args).json()["models"][0].clone()
}

#[test]
fn smaller_types_are_further_from_the_original() {
    let cli = with_floats();
    let mut last = 0.0;
    for (recipe, most) in [("F32", 0.0), ("Q8_0", 0.01), ("Q6_K", 0.05), ("q4_k", 0.5)] {
        cli.run(&["quantize", "f32.gguf", recipe, "-o", "out.gguf", "--quiet"]).ok();
        let compared = compare(&cli, "out.gguf");
        let kl = compared["mean_kl"].as_f64().unwrap();
        assert!(kl <= most && kl >= last, "{recipe}: {kl}, after {last}");
        assert!(compared["worst_kl"].as_f64().unwrap() >= compared["p99_kl"].as_f64().unwrap());
        last = kl;
    }
}

#[test]
fn a_file_is_the_same_for_any_number_of_threads() {
    let cli = with_floats();
    let bytes = |threads: &str| {
        let args = ["quantize", "f32.gguf", "Q4_K_M", "-o", "out.gguf", "--threads", threads];
        cli.run(&args).ok();
        std::fs::read(cli.home.path().join("out.gguf")).unwrap()
    };
    let one = bytes("1");
    assert!(bytes("3") == one && bytes("16") == one);
}

#[test]
fn overrides_choose_the_type_of_tensors_by_name() {
    let cli = with_floats();
    let args = ["quantize", "f32.gguf", "Q4_0", "-o", "out.gguf", "--json"];
    let run = |more: &[&str]| cli.run(&[&args[..], more].concat());
    let tensors =
        run(&["--tensor-type", "ffn_(up|gate)=q8_0", "--tensor-type", r"blk\.0\.ffn_up=f16"]).json();
    let dtype = |name: &str| {
        let all = tensors["tensors"].as_array().unwrap();
        all.iter().find(|t| t["name"] == name).unwrap()["to"].as_str().unwrap().to_owned()
    };
    assert_eq!(dtype("blk.0.ffn_up.weight"), "F16");
    assert_eq!(dtype("blk.1.ffn_up.weight"), "Q8_0");
    assert_eq!(dtype("blk.1.attn_q.weight"), "Q4_0");
    assert!(
        run(&["--tensor-type", "nothing=q8_0"]).refused().contains("no tensor's name matches \"nothing\"")
    );
    assert!(run(&["--tensor-type", "ffn_up"]).refused().contains("not of the form PATTERN=TYPE"));
    assert!(run(&["--tensor-type", "ffn_up=q9"]).refused().contains("\"q9\" is not a type"));
    assert!(run(&["--tensor-type", "ffn_(up=q8_0"]).refused().contains("not a regular expression"));
}

#[test]
fn a_quantised_model_is_quantised_again_only_on_request() {
    let cli = with_floats();
    cli.run(&["quantize", "f32.gguf", "Q8_0", "-o", "q8.gguf"]).ok();
    let refused = cli.run(&["quantize", "q8.gguf", "Q4_0", "-o", "out.gguf"]).refused();
    assert!(refused.contains("already quantised") && refused.contains("--requantize"), "{refused}");
    assert_eq!(names(&cli), ["f32.gguf", "q8.gguf", "text.txt"]);
    cli.run(&["quantize", "q8.gguf", "Q4_0", "-o", "out.gguf", "--requantize"]).ok();
    let refused = cli.run(&["quantize", "q8.gguf", "Q8_0", "-o", "q8.gguf", "--requantize"]).refused();
    assert!(refused.contains("is a file of the model itself"), "{refused}");
}

#[test]
fn wrong_types_name_the_nearest() {
    let cli = Cli::new();
    let refused = cli.run(&["quantize", "stories", "Q4_K_N", "-o", "out.gguf"]).refused();
    assert!(
        refused.contains("\"Q4_K_N\" is not a type") && refused.contains("did you mean Q4_K_"),
        "{refused}"
    );
    // Types that are only read.
    assert!(cli.run(&["quantize", "stories", "IQ3_S", "-o", "out.gguf"]).refused().contains("is not a type"));
}

#[test]
fn weights_that_are_not_finite_are_refused_or_kept() {
    let cli = with_floats();
    let tensors = cli.run(&["inspect", "f32.gguf", "--tensors", "--json"]).json();
    let tensors = tensors["tensors"].as_array().unwrap().clone();
    let tensor = tensors.iter().find(|t| t["name"] == "blk.1.ffn_up.weight").unwrap();
    let mut bytes = std::fs::read(cli.home.path().join("f32.gguf")).unwrap();
    let at = tensor["offset"].as_u64().unwrap() as usize + 4 * 1000;
    bytes[at..at + 4].copy_from_slice(&f32::NAN.to_le_bytes());
    cli.file("nan.gguf", bytes);
    let args = ["quantize", "nan.gguf", "Q4_0", "-o", "out.gguf"];
    let refused = cli.run(&args).refused();
    assert!(refused.contains("\"blk.1.ffn_up.weight\": element 1000 is NaN"), "{refused}");
    assert!(refused.contains("--allow-nonfinite"), "{refused}");
    assert_eq!(names(&cli), ["f32.gguf", "nan.gguf", "text.txt"]);
    let report = cli.run(&[&args[..], &["--allow-nonfinite", "--json"]].concat()).json();
    let of = |name: &str| {
        report["tensors"].as_array().unwrap().iter().find(|t| t["name"] == name).unwrap().clone()
    };
    assert_eq!(of("blk.1.ffn_up.weight")["to"], "F32");
    assert_eq!(of("blk.0.ffn_up.weight")["to"], "Q4_0");
}

#[test]
fn rows_that_blocks_do_not_divide_get_smaller_blocks_and_are_reported() {
    let cli = Cli::new();
    cli.tiny_chat_model();
    let ended = cli.run(&["quantize", "tiny", "Q4_K_M", "-o", "out.gguf"]);
    assert!(ended.stderr.contains("are not a multiple of Q4_K's 256"), "{}", ended.stderr);
    ended.ok();
}

#[test]
fn a_destination_that_cannot_be_written_leaves_nothing() {
    let cli = with_floats();
    let before = names(&cli);
    assert!(
        cli.run(&["quantize", "f32.gguf", "Q8_0", "-o", "none/out.gguf"]).refused().contains("none/out.gguf")
    );
    assert!(cli.run(&["quantize", "f32.gguf", "Q8_0", "-o", "."]).refused().contains("is a folder"));
    if Path::new("/proc/self").exists() {
        cli.run(&["quantize", "f32.gguf", "Q8_0", "-o", "/proc/out.gguf"]).refused();
    }
    let ended = on_a_full_disk(&cli, 600, "quantize f32.gguf Q8_0 -o out.gguf");
    assert!(ended.code == Some(1) && ended.stderr.contains("cannot write out.gguf"), "{}", ended.stderr);
    assert_eq!(names(&cli), before);
}

#[test]
fn a_killed_command_leaves_no_half_file() {
    let cli = with_floats();
    cli.run(&["quantize", "f32.gguf", "Q8_0", "-o", "whole.gguf"]).ok();
    let whole = std::fs::read(cli.home.path().join("whole.gguf")).unwrap();
    for wait in [5, 20, 40, 80] {
        let mut child = cli.command(&["quantize", "f32.gguf", "Q8_0", "-o", "out.gguf"]).spawn().unwrap();
        std::thread::sleep(std::time::Duration::from_millis(wait));
        child.kill().unwrap();
        child.wait().unwrap();
        let out = cli.home.path().join("out.gguf");
        if out.exists() {
            assert!(std::fs::read(&out).unwrap() == whole, "half a file after {wait} ms");
            std::fs::remove_file(&out).unwrap();
        }
        assert_eq!(names(&cli), ["f32.gguf", "text.txt", "whole.gguf"], "after {wait} ms");
    }
}

#[test]
fn a_folder_converts_to_a_file_and_back_with_the_same_text() {
    let cli = Cli::new();
    cli.tiny_chat_model();
    cli.run(&["convert", "tiny", "-o", "tiny.gguf", "--type", "f32"]).ok();
    cli.run(&["convert", "tiny.gguf", "--to", "safetensors", "--type", "f32", "-o", "back"]).ok();
    // Rows without a token have no text in a folder, and a placeholder's name in a file.
    let run = |model: &str| {
        let text = cli.run(&["run", model, "abc", "--raw", "--temp", "0", "-n", "8"]).ok();
        let parts = text.split("[PAD").enumerate();
        let parts = parts.map(|(i, part)| if i == 0 { part } else { part.split_once(']').unwrap().1 });
        parts.collect::<String>()
    };
    let want = run("tiny");
    assert_eq!(run("tiny.gguf"), want);
    assert_eq!(run("back"), want);
    let template = cli.run(&["show", "tiny", "--template"]).ok();
    assert!(template.contains("<|im_start|>assistant"), "{template}");
    assert_eq!(cli.run(&["show", "tiny.gguf", "--template"]).ok(), template);
    assert_eq!(cli.run(&["show", "back", "--template"]).ok(), template);
    let refused = cli.run(&["convert", "tiny", "--to", "safetensors", "-o", "back"]).refused();
    assert!(refused.contains("back already exists"), "{refused}");
}

/// Runs a command that cannot write more than `blocks` of 512 bytes: the limit of a shell stands for a disk that fills up.
fn on_a_full_disk(cli: &Cli, blocks: usize, command: &str) -> common::Ended {
    let script = format!("trap '' XFSZ; ulimit -f {blocks}; exec \"$0\" {command}");
    let mut limited = Command::new("sh");
    let limited = limited.args(["-c", &script, env!("CARGO_BIN_EXE_refrain")]).current_dir(cli.home.path());
    common::ended(limited.env("REFRAIN_OFFLINE", "1").output().unwrap())
}

#[test]
fn a_conversion_that_fails_or_is_killed_leaves_nothing_under_its_name() {
    let cli = with_floats();
    let before = names(&cli);
    let file = ["convert", "f32.gguf", "--type", "f16", "-o", "out.gguf"];
    let folder = ["convert", "f32.gguf", "--to", "safetensors", "--type", "f16", "-o", "out"];
    for args in [&file[..], &folder[..]] {
        let ended = on_a_full_disk(&cli, 600, &args.join(" "));
        assert_eq!(ended.code, Some(1), "{}", ended.stderr);
        assert!(ended.stderr.contains("cannot write"), "{}", ended.stderr);
        assert_eq!(names(&cli), before, "{args:?}");
        for wait in [5, 20, 60] {
            let mut child = cli.command(args).spawn().unwrap();
            std::thread::sleep(std::time::Duration::from_millis(wait));
            child.kill().unwrap();
            child.wait().unwrap();
            let out = cli.home.path().join(args[args.len() - 1]);
            // What is there is complete.
            if out.exists() {
                cli.run(&["inspect", args[args.len() - 1]]).ok();
                let removed = if out.is_dir() { std::fs::remove_dir_all } else { std::fs::remove_file };
                removed(&out).unwrap();
            }
            let mut left = names(&cli);
            left.retain(|name| name != "out.part");
            assert_eq!(left, before, "{args:?} after {wait} ms");
        }
    }
    // The rest of a killed conversion is in nobody's way, and gone afterwards.
    std::fs::create_dir_all(cli.home.path().join("out.part")).unwrap();
    cli.file("out.part/model.safetensors", "half");
    cli.run(&folder).ok();
    assert_eq!(names(&cli), ["f32.gguf", "out", "text.txt"]);
    // Other people's files are not touched.
    cli.file("other.part/notes.txt", "mine");
    let other = ["convert", "f32.gguf", "--to", "safetensors", "-o", "other"];
    assert!(cli.run(&other).refused().contains("other.part already exists"));
    assert!(cli.home.path().join("other.part/notes.txt").exists());
    if Path::new("/proc/self").exists() {
        cli.run(&["convert", "f32.gguf", "-o", "/proc/out.gguf"]).refused();
        cli.run(&["convert", "f32.gguf", "--to", "safetensors", "-o", "/proc/out"]).refused();
    }
}

#[test]
fn the_guide_of_five_commands_runs_as_it_is_written() {
    let guide = include_str!("../../../docs/quantize.md");
    let block = guide.split("```sh\n").nth(1).and_then(|rest| rest.split("```").next()).expect("commands");
    let commands: Vec<Vec<&str>> = block
        .lines()
        .map(|line| line.split('#').next().unwrap_or_default().split_whitespace().collect())
        .collect();
    assert_eq!(commands.len(), 5);
    let cli = Cli::new();
    std::fs::rename(cli.tiny_chat_model(), cli.home.path().join("folder")).unwrap();
    cli.file("calibration.txt", STORY.repeat(4));
    cli.file("wiki.txt", STORY.repeat(4));
    let outputs: Vec<String> = commands
        .iter()
        .map(|command| {
            assert_eq!(command[0], "refrain");
            let ended = cli.run(&command[1..]);
            assert_eq!(ended.code, Some(0), "{command:?}: {}", ended.stderr);
            ended.stdout + &ended.stderr
        })
        .collect();
    assert!(outputs[2].contains("importance") || outputs[2].contains("bits per weight"), "{}", outputs[2]);
    assert!(outputs[3].contains("KL mean"), "{}", outputs[3]);
    assert!(outputs[4].contains("needs"), "{}", outputs[4]);
    let written = names(&cli);
    for file in ["model.gguf", "imatrix.gguf", "q4.gguf"] {
        assert!(written.iter().any(|name| name == file), "{written:?}");
    }
}

/// Adds a tensor that no model has.
fn add_tensor(path: &Path, name: &str) {
    let bytes = std::fs::read(path).unwrap();
    let n = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let mut header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + n]).unwrap();
    let end = bytes.len() - 8 - n;
    header[name] = serde_json::json!({ "dtype": "F32", "shape": [1], "data_offsets": [end, end + 4] });
    let mut header = header.to_string();
    header.extend(std::iter::repeat_n(' ', header.len().next_multiple_of(8) - header.len()));
    let length = (header.len() as u64).to_le_bytes();
    std::fs::write(path, [&length[..], header.as_bytes(), &bytes[8 + n..], &[0; 4]].concat()).unwrap();
}

#[test]
fn tensors_that_would_be_lost_are_named_and_refused() {
    let cli = Cli::new();
    let weights = cli.tiny_chat_model().join("model.safetensors");
    add_tensor(&weights, "model.layers.0.extra.weight");
    let refused = cli.run(&["convert", "tiny", "-o", "tiny.gguf"]).refused();
    assert!(refused.contains("would lose 1 tensor: model.layers.0.extra.weight"), "{refused}");
    cli.tiny_chat_model();
    add_tensor(&weights, "model.vision_tower.patch.weight");
    assert!(cli.run(&["convert", "tiny", "-o", "tiny.gguf"]).refused().contains("vision_tower"));
    cli.run(&["convert", "tiny", "-o", "tiny.gguf", "--text-only"]).ok();
}

#[test]
fn an_importance_matrix_is_made_used_and_refused_for_another_model() {
    let cli = with_floats();
    let make = ["imatrix", "f32.gguf", "-f", "text.txt", "-c", "64", "--chunks", "6", "-o", "imatrix.gguf"];
    cli.run(&make).ok();
    let args = ["quantize", "f32.gguf", "Q3_K_S", "-o", "out.gguf", "--json"];
    let quantize = |more: &[&str]| {
        let report = cli.run(&[&args[..], more].concat()).json();
        let n = report["tensors"].as_array().unwrap().iter().filter(|t| t["importance"] == true).count();
        (n, std::fs::read(cli.home.path().join("out.gguf")).unwrap())
    };
    let (without, plain) = quantize(&[]);
    let (with, weighted) = quantize(&["--imatrix", "imatrix.gguf"]);
    // Seven matrices in each of eight layers, and the embedding, which is the output matrix too.
    assert_eq!((without, with), (0, 57));
    assert!(plain != weighted);
    assert!(compare(&cli, "out.gguf")["mean_kl"].as_f64().unwrap() < 0.1);
    let refused =
        cli.run(&["quantize", "f32.gguf", "Q4_0", "-o", "o.gguf", "--imatrix", "f32.gguf"]).refused();
    assert!(refused.contains("not an importance matrix"), "{refused}");
    cli.tiny_chat_model();
    let refused =
        cli.run(&["quantize", "tiny", "Q4_0", "-o", "o.gguf", "--imatrix", "imatrix.gguf"]).refused();
    assert!(refused.contains("imatrix.gguf") && refused.contains("refrain imatrix"), "{refused}");
}

#[test]
fn a_model_equals_itself_and_a_page_draws_sizes() {
    let cli = with_floats();
    let compared = compare(&cli, "f32.gguf");
    assert_eq!(compared["mean_kl"], 0.0);
    assert_eq!(compared["same_top"], 1.0);
    assert!(compared["tensors"].as_array().unwrap().iter().all(|t| t["relative_error"] == 0.0));
    for recipe in ["Q8_0", "Q4_0"] {
        cli.run(&["quantize", "f32.gguf", recipe, "-o", &format!("{recipe}.gguf")]).ok();
    }
    let args =
        ["compare", "f32.gguf", "Q8_0.gguf", "Q4_0.gguf", "-f", "text.txt", "-c", "64", "--chunks", "2"];
    let table = cli.run(&[&args[..], &["--html", "page.html"]].concat()).ok();
    assert!(table.contains("KL mean") && table.contains("largest relative errors of Q4_0.gguf"), "{table}");
    let page = std::fs::read_to_string(cli.home.path().join("page.html")).unwrap();
    assert!(page.contains("KL divergence from the reference") && page.contains("</html>"));
    // Files of 4 and 8 MB are at different places, with their names.
    for name in ["Q8_0", "Q4_0"] {
        assert_eq!(page.matches(&format!(">{name}</text>")).count(), 2, "{name}");
    }
    assert!(page.contains(">KiB</text>"));
    cli.tiny_chat_model();
    let refused = cli.run(&["compare", "f32.gguf", "tiny", "-f", "text.txt", "-c", "32"]).refused();
    assert!(refused.contains("compare files of the same model"), "{refused}");
}

#[test]
fn show_lists_what_a_user_wants_to_know() {
    let cli = Cli::new();
    let text = cli.run(&["show", "stories"]).ok();
    for part in ["architecture", "tokenizer", "needs", "KV cache", "metadata", "general.architecture = llama"]
    {
        assert!(text.contains(part), "no {part} in {text}");
    }
    let json = cli.run(&["show", "stories", "--json"]).json();
    assert!(json["needs"]["weight_bytes"].as_u64().is_some_and(|n| n > 1 << 20));
    assert!(cli.run(&["show", "stories", "--template"]).refused().contains("has no chat template"));
}
