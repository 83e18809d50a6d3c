//! One folder that runs on a GPU machine without a Rust toolchain.

use crate::shell::{self, root};
use anyhow::{Context, Result};
use serde_json::Value;
use std::fs;
use std::path::PathBuf;

/// Test binaries to take along: crates whose tests have the feature `gpu-tests`.
const GPU_TESTED: [&str; 3] = ["refrain-driver", "refrain-kernels", "refrain-cuda"];

const SCRIPT: &str = r#"#!/usr/bin/env bash
# Runs the GPU tests and the doctor, and prints one table. Needs an NVIDIA driver, nothing else.
cd "$(dirname "$0")" || exit 1
failed=0
declare -a table
for test in tests/*; do
    name=$(basename "$test")
    if out=$("$test" --test-threads=1 2>&1); then verdict=ok; else verdict=FAILED; failed=1; fi
    counts=$(printf '%s\n' "$out" | grep -E '^test result:' | sed 's/test result: //; s/; finished.*//' | tail -n 1)
    table+=("$(printf '%-28s %-7s %s' "$name" "$verdict" "$counts")")
    [ "$verdict" = ok ] || printf '%s\n' "$out" | tail -n 60
done
./refrain doctor --device cuda || failed=1
printf '\n'
printf '%s\n' "${table[@]}"
exit $failed
"#;

/// Builds the binaries and lays them out in `gpu-bundle/`.
pub(crate) fn make() -> Result<()> {
    let folder = root().join("gpu-bundle");
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(folder.join("tests"))?;
    shell::run("cargo", &["build", "--profile", "ci", "--package", "refrain-cli"])?;
    copy(root().join("target/ci/refrain"), folder.join("refrain"))?;
    for package in GPU_TESTED {
        let args = ["test", "--no-run", "--profile", "ci", "--package", package, "--features", "gpu-tests"];
        let json = shell::output("cargo", &[&args[..], &["--message-format", "json"]].concat())?;
        for (name, path) in test_binaries(&json) {
            copy(path, folder.join("tests").join(format!("{package}-{name}")))?;
        }
    }
    let script = folder.join("run.sh");
    fs::write(&script, SCRIPT)?;
    make_executable(&script)?;
    println!("{} is ready: run run.sh in it on the GPU machine", folder.display());
    Ok(())
}

pub(crate) fn copy(from: PathBuf, to: PathBuf) -> Result<()> {
    fs::copy(&from, &to).with_context(|| format!("copying {} to {}", from.display(), to.display()))?;
    // Debug tables are most of the size and of no use there.
    if let Err(error) = shell::run("strip", &[&to.to_string_lossy()]) {
        eprintln!("not stripped: {error}");
    }
    Ok(())
}

/// Name and path of each test executable in cargo's messages.
fn test_binaries(messages: &str) -> Vec<(String, PathBuf)> {
    let messages = messages.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    messages
        .filter(|m| m["reason"] == "compiler-artifact" && m["profile"]["test"] == true)
        .filter_map(|m| Some((m["target"]["name"].as_str()?.to_string(), m["executable"].as_str()?.into())))
        .collect()
}

#[cfg(unix)]
fn make_executable(path: &PathBuf) -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    Ok(fs::set_permissions(path, fs::Permissions::from_mode(0o755))?)
}

#[cfg(not(unix))]
fn make_executable(_: &PathBuf) -> Result<()> {
    Ok(())
}
