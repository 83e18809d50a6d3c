//! Runs the whole test suite, fastest failures first.

use crate::shell;
use crate::shell::root;
use crate::{cross, edges, models, nvrtc};
use anyhow::Result;
use std::time::{Duration, Instant};

/// Runs all steps; the first failure ends the suite.
fn suite(steps: &mut Vec<(String, Duration)>, skipped: &mut Vec<String>) -> Result<()> {
    let mut step = |name: &str, f: &mut dyn FnMut() -> Result<()>| -> Result<()> {
        println!("== {name}");
        let began = Instant::now();
        f()?;
        steps.push((name.into(), began.elapsed()));
        Ok(())
    };
    step("formatting", &mut || shell::run("cargo", &["fmt", "--all", "--check"]))?;
    step("crate edges", &mut edges::check)?;
    let clippy = ["clippy", "--workspace", "--all-targets", "--profile", "ci", "--", "-D", "warnings"];
    step("lints", &mut || shell::run("cargo", &clippy))?;
    step("check for ARM", &mut || cross::check(skipped))?;

    let mut features = Vec::new();
    if root().join("../shared/data").is_dir() {
        features.push("shared-data");
    } else {
        skipped.push("tests of the feature shared-data: ../shared/data does not exist".into());
    }
    step("real models", &mut || {
        match models::fetch()?.as_slice() {
            [] => features.push("real-models"),
            missing => skipped
                .push(format!("tests of the feature real-models: {} not downloaded", missing.join(", "))),
        }
        Ok(())
    })?;
    let mut nvrtc = None;
    step("NVRTC", &mut || {
        match nvrtc::library() {
            Ok(library) => nvrtc = Some(library),
            Err(because) => skipped.push(format!("tests of the feature nvrtc-tests: {because}")),
        }
        Ok(())
    })?;
    if nvrtc.is_some() {
        features.push("nvrtc-tests");
    }
    if shell::output("c++", &["--version"]).is_ok() {
        features.push("host-tests");
    } else {
        skipped.push("tests of the feature host-tests: no C++ compiler named c++ was found".into());
    }
    skipped.push("tests of the feature gpu-tests: they need a GPU machine: cargo xtask gpu-bundle".into());

    let flags = test_features(&features)?;
    let mut test = vec!["test", "--workspace", "--profile", "ci"];
    if !flags.is_empty() {
        test.extend(["--features", &flags]);
    }
    step("tests", &mut || {
        let mut command = shell::command("cargo", &test);
        if let Some(library) = &nvrtc {
            command.env("REFRAIN_NVRTC", library);
        }
        let status = command.status()?;
        anyhow::ensure!(status.success(), "cargo {}: {status}", test.join(" "));
        Ok(())
    })?;
    step("docs", &mut || docs())?;
    step("doctor on the simulated device", &mut || {
        let refrain = ["run", "--quiet", "--profile", "ci", "--package", "refrain-cli", "--"];
        shell::run("cargo", &[&refrain[..], &["doctor", "--device", "sim"]].concat())
    })
}

/// Runs the suite and prints the time of each step and the skipped tests.
pub(crate) fn run() -> Result<()> {
    let (mut steps, mut skipped) = (Vec::new(), Vec::new());
    let result = suite(&mut steps, &mut skipped);
    println!();
    for (name, took) in &steps {
        println!("{name:<32} {:>6.1} s", took.as_secs_f64());
    }
    for reason in &skipped {
        println!("skipped: {reason}");
    }
    result
}

/// Returns `crate/feature` for every workspace crate that has one of these features.
fn test_features(on: &[&str]) -> Result<String> {
    let metadata = shell::output("cargo", &["metadata", "--no-deps", "--format-version", "1"])?;
    let metadata: serde_json::Value = serde_json::from_str(&metadata)?;
    let packages = metadata["packages"].as_array().cloned().unwrap_or_default();
    let mut flags = Vec::new();
    for package in &packages {
        let name = package["name"].as_str().unwrap_or_default();
        let has = |feature: &str| package["features"].get(feature).is_some();
        flags.extend(on.iter().filter(|f| has(f)).map(|f| format!("{name}/{f}")));
    }
    Ok(flags.join(","))
}

fn docs() -> Result<()> {
    let mut command = crate::shell::command("cargo", &["doc", "--workspace", "--no-deps", "--profile", "ci"]);
    let status = command.env("RUSTDOCFLAGS", "-D warnings").status()?;
    anyhow::ensure!(status.success(), "cargo doc: {status}");
    Ok(())
}
