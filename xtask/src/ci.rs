//! Runs the whole test suite, fastest failures first.

use crate::shell;
use crate::shell::root;
use crate::{cross, edges, models, nvrtc};
use anyhow::Result;
use std::path::Path;
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

    // Everything is built once: the program that downloads the models is the one under test.
    features.push("real-models");
    step("build", &mut || test(&features, &["--no-run"], nvrtc.as_deref()))?;
    let refrain = Path::new(&target_folder()?).join("ci/refrain").to_string_lossy().into_owned();
    step("real models", &mut || {
        let missing = models::fetch(&|arguments| shell::command(&refrain, arguments))?;
        if !missing.is_empty() {
            features.retain(|feature| *feature != "real-models");
            let missing = missing.join(", ");
            skipped.push(format!("tests of the feature real-models: {missing} not downloaded"));
        }
        Ok(())
    })?;
    step("tests", &mut || test(&features, &[], nvrtc.as_deref()))?;
    step("docs", &mut || docs())?;
    step("doctor on the simulated device", &mut || shell::run(&refrain, &["doctor", "--device", "sim"]))
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

/// Runs `cargo test` for the workspace with these features of its crates.
fn test(features: &[&str], arguments: &[&str], nvrtc: Option<&Path>) -> Result<()> {
    let flags = test_features(features)?;
    let mut line = vec!["test", "--workspace", "--profile", "ci"];
    if !flags.is_empty() {
        line.extend(["--features", &flags]);
    }
    line.extend(arguments);
    let mut command = shell::command("cargo", &line);
    if let Some(library) = nvrtc {
        command.env("REFRAIN_NVRTC", library);
    }
    let status = command.status()?;
    anyhow::ensure!(status.success(), "cargo {}: {status}", line.join(" "));
    Ok(())
}

/// Folder that cargo builds in.
fn target_folder() -> Result<String> {
    let metadata = shell::output("cargo", &["metadata", "--no-deps", "--format-version", "1"])?;
    let metadata: serde_json::Value = serde_json::from_str(&metadata)?;
    Ok(metadata["target_directory"].as_str().unwrap_or("target").to_owned())
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
