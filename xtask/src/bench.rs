//! Refrain and llama.cpp on the same files in one run, turn by turn, as ratios.

use crate::shell;
use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::path::Path;

const USAGE: &str = "\
Usage: cargo xtask bench-cpu [--python PYTHON] [--rounds N] [--threads N] [--depth N] MODEL.gguf...

PYTHON needs llama-cpp-python. `cargo run --release -p refrain-models --example write_shape` writes files of
well-known shapes with random weights.";

struct Options {
    python: String,
    rounds: usize,
    threads: String,
    depth: String,
    models: Vec<String>,
}

/// Speeds of one program on one model.
#[derive(Clone, Copy)]
struct Speed {
    prefill: f64,
    decode: f64,
}

/// Measures each model and prints the table.
pub(crate) fn cpu(args: &[String]) -> Result<()> {
    let options = parse(args)?;
    shell::run("cargo", &["build", "--release", "--quiet", "--package", "refrain-cli"])?;
    println!("tokens per second, {} threads, medians of {} rounds in turn", options.threads, options.rounds);
    println!("{:<28} {:>26} {:>26}", "", "prefill 128", "decode 32");
    println!(
        "{:<28} {:>9} {:>9} {:>6} {:>9} {:>9} {:>6}",
        "model", "refrain", "llama.cpp", "x", "refrain", "llama.cpp", "x"
    );
    for model in &options.models {
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for _ in 0..options.rounds {
            ours.push(refrain(model, &options)?);
            theirs.push(llama_cpp(model, &options)?);
        }
        let (a, b) = (median(&ours), median(&theirs));
        let name = Path::new(model).file_stem().map_or_else(|| model.clone(), |s| s.to_string_lossy().into());
        let columns = |a: f64, b: f64| format!("{a:>9.1} {b:>9.1} {:>6.2}", a / b);
        println!("{name:<28} {} {}", columns(a.prefill, b.prefill), columns(a.decode, b.decode));
    }
    Ok(())
}

fn parse(args: &[String]) -> Result<Options> {
    let mut options = Options {
        python: "python3".into(),
        rounds: 3,
        threads: "2".into(),
        depth: "1".into(),
        models: Vec::new(),
    };
    let mut args = args.iter();
    while let Some(arg) = args.next() {
        let mut value = || args.next().cloned().with_context(|| format!("{arg} needs a value\n\n{USAGE}"));
        match arg.as_str() {
            "--python" => options.python = value()?,
            "--rounds" => options.rounds = value()?.parse()?,
            "--threads" => options.threads = value()?,
            "--depth" => options.depth = value()?,
            flag if flag.starts_with('-') => bail!("unknown flag {flag}\n\n{USAGE}"),
            model => options.models.push(model.into()),
        }
    }
    if options.models.is_empty() || options.rounds == 0 {
        bail!("{USAGE}");
    }
    Ok(options)
}

fn refrain(model: &str, options: &Options) -> Result<Speed> {
    let binary = shell::root().join("target/release/refrain");
    let args = ["-p", "128", "-n", "32", "-r", "1", "--json", "--device", "cpu"];
    let tail = ["--threads", &options.threads, "--depth", &options.depth];
    let out = shell::output(&binary.to_string_lossy(), &[&["bench", model], &args[..], &tail].concat())?;
    let json: Value = serde_json::from_str(&out)?;
    let speed = |key: &str| json[key]["median"].as_f64().with_context(|| format!("no {key} in {out}"));
    Ok(Speed { prefill: speed("prefill_tokens_per_second")?, decode: speed("decode_tokens_per_second")? })
}

fn llama_cpp(model: &str, options: &Options) -> Result<Speed> {
    let args = ["tools/bench_llama.py", model, "128", "32", &options.threads, &options.depth];
    let out = shell::output(&options.python, &args)?;
    let json: Value = serde_json::from_str(out.lines().last().unwrap_or_default())?;
    let speed = |key: &str| json[key].as_f64().with_context(|| format!("no {key} in {out}"));
    Ok(Speed { prefill: speed("prefill")?, decode: speed("decode")? })
}

fn median(speeds: &[Speed]) -> Speed {
    let middle = |of: fn(&Speed) -> f64| {
        let mut values: Vec<f64> = speeds.iter().map(of).collect();
        values.sort_by(f64::total_cmp);
        values[values.len() / 2]
    };
    Speed { prefill: middle(|s| s.prefill), decode: middle(|s| s.decode) }
}
