//! Compares the speed of Refrain and llama.cpp on the same files, in alternation, as ratios.

use crate::shell;
use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::path::Path;

const USAGE: &str = "\
Usage: cargo xtask bench-cpu [--python PYTHON] [--rounds N] [--threads N] [--depth N[,N...]] MODEL.gguf...

PYTHON is an interpreter with llama-cpp-python. `cargo run --release -p refrain-models --example write_shape` writes
files of well-known shapes with random weights.";

struct Options {
    python: String,
    rounds: usize,
    threads: String,
    /// Context lengths at which decoding starts.
    depths: Vec<String>,
    models: Vec<String>,
}

/// Tokens per second of one program on one model.
struct Speed {
    prefill: f64,
    /// One rate per depth.
    decode: Vec<f64>,
}

/// Measures each model and prints the table.
pub(crate) fn cpu(args: &[String]) -> Result<()> {
    let options = parse(args)?;
    shell::run("cargo", &["build", "--release", "--quiet", "--package", "refrain-cli"])?;
    println!(
        "tokens per second, {} threads, medians of {} alternating rounds",
        options.threads, options.rounds
    );
    println!("{:<28} {:<18} {:>9} {:>9} {:>6}", "model", "", "refrain", "llama.cpp", "x");
    for model in &options.models {
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for _ in 0..options.rounds {
            ours.push(refrain(model, &options)?);
            theirs.push(llama_cpp(model, &options)?);
        }
        let (a, b) = (median(&ours), median(&theirs));
        let name = Path::new(model).file_stem().map_or_else(|| model.clone(), |s| s.to_string_lossy().into());
        let line = |test: &str, a: f64, b: f64| {
            println!("{name:<28} {test:<18} {a:>9.1} {b:>9.1} {:>6.2}", a / b);
        };
        line("prefill 128", a.prefill, b.prefill);
        for (depth, (a, b)) in options.depths.iter().zip(a.decode.iter().zip(&b.decode)) {
            line(&format!("decode 32 at {depth}"), *a, *b);
        }
    }
    Ok(())
}

fn parse(args: &[String]) -> Result<Options> {
    let mut options = Options {
        python: "python3".into(),
        rounds: 3,
        threads: "2".into(),
        depths: vec!["1".into()],
        models: Vec::new(),
    };
    let mut args = args.iter();
    while let Some(arg) = args.next() {
        let mut value = || args.next().cloned().with_context(|| format!("{arg} needs a value\n\n{USAGE}"));
        match arg.as_str() {
            "--python" => options.python = value()?,
            "--rounds" => options.rounds = value()?.parse()?,
            "--threads" => options.threads = value()?,
            "--depth" => options.depths = value()?.split(',').map(str::to_owned).collect(),
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
    let tail = ["--threads", &options.threads, "--depth", &options.depths.join(",")];
    let out = shell::output(&binary.to_string_lossy(), &[&["bench", model], &args[..], &tail].concat())?;
    let json: Value = serde_json::from_str(&out)?;
    let median = |value: &Value| value["median"].as_f64().with_context(|| format!("no median in {out}"));
    let decode = json["decode"].as_array().with_context(|| format!("no decode in {out}"))?;
    let decode = decode.iter().map(|d| median(&d["tokens_per_second"])).collect::<Result<_>>()?;
    Ok(Speed { prefill: median(&json["prefill_tokens_per_second"])?, decode })
}

fn llama_cpp(model: &str, options: &Options) -> Result<Speed> {
    let depths = options.depths.join(",");
    let args = ["tools/bench_llama.py", model, "128", "32", &options.threads, &depths];
    let out = shell::output(&options.python, &args)?;
    let json: Value = serde_json::from_str(out.lines().last().unwrap_or_default())?;
    let number = |value: &Value| value.as_f64().with_context(|| format!("no number in {out}"));
    let decode = json["decode"].as_array().with_context(|| format!("no decode in {out}"))?;
    Ok(Speed {
        prefill: number(&json["prefill"])?,
        decode: decode.iter().map(number).collect::<Result<_>>()?,
    })
}

fn median(speeds: &[Speed]) -> Speed {
    let middle = |of: &dyn Fn(&Speed) -> f64| {
        let mut values: Vec<f64> = speeds.iter().map(of).collect();
        values.sort_by(f64::total_cmp);
        values[values.len() / 2]
    };
    let n_depths = speeds.iter().map(|s| s.decode.len()).min().unwrap_or(0);
    let decode = (0..n_depths).map(|i| middle(&|s| s.decode[i])).collect();
    Speed { prefill: middle(&|s| s.prefill), decode }
}
