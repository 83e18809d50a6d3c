//! Builds a folder that runs on a GPU machine without a Rust toolchain.

use crate::shell::{self, root};
use anyhow::{Context, Result};
use serde_json::Value;
use std::fs;
use std::path::PathBuf;

/// Crates whose test binaries go into the bundle: those with the feature `gpu-tests`.
const GPU_TESTED: [&str; 4] = ["refrain-driver", "refrain-kernels", "refrain-cuda", "refrain"];

const SCRIPT: &str = r#"#!/usr/bin/env bash
# Runs the GPU tests, the doctor, the benches, and the built-in model under compute-sanitizer if that is installed, then
# prints a table. Needs only an NVIDIA driver. `./run.sh tests doctor bench sanitizer` selects parts; the default is all.
cd "$(dirname "$0")" || exit 1
parts=" ${*:-tests doctor bench sanitizer} "
failed=0
table=()
wants() { [[ $parts == *" $1 "* ]]; }
row() { table+=("$(printf '%-34s %-7s %4s s  %s' "$1" "$2" "$3" "$4")"); }

if wants tests; then
    for test in tests/*; do
        began=$SECONDS
        if out=$("$test" --test-threads=1 2>&1); then verdict=ok; else verdict=FAILED; failed=1; fi
        counts=$(printf '%s\n' "$out" | grep -E '^test result:' | sed 's/test result: //; s/; finished.*//' | tail -n 1)
        row "$(basename "$test")" "$verdict" $((SECONDS - began)) "$counts"
        [ "$verdict" = ok ] || printf '%s\n' "$out" | tail -n 60
    done
fi
if wants doctor; then
    began=$SECONDS
    if ./refrain doctor --device cuda; then verdict=ok; else verdict=FAILED; failed=1; fi
    row doctor "$verdict" $((SECONDS - began)) "see the table above"
fi
if wants bench; then
    for model in "llama-3.2-1b BF16" "llama-3.2-1b Q8_0" "llama-3.2-1b Q4_K_M" "smollm2-135m Q8_0" \
        "llama-3.1-8b-tied BF16" "llama-3.1-8b-tied Q4_K_M"; do
        read -r shape quant <<<"$model"
        began=$SECONDS
        if out=$(./refrain bench --shape "$shape" --quant "$quant" -p 512 -n 128 -r 3 --device cuda --graph require 2>&1); then
            verdict=ok
        else
            verdict=FAILED
            failed=1
        fi
        printf '%s\n' "$out"
        speeds=$(printf '%s\n' "$out" | awk '/^(prefill|decode) .*tok\/s/ { printf "%s %s tok/s  ", $1, $4 }')
        row "bench $shape $quant" "$verdict" $((SECONDS - began)) "$speeds"
    done
    for shape in "llama-10m --batch 32 --context 256" "llama-110m --batch 16 --context 1024"; do
        began=$SECONDS
        # shellcheck disable=SC2086
        if out=$(./refrain bench --train $shape --dtype bf16 --steps 30 --device cuda --graph require 2>&1); then
            verdict=ok
        else
            verdict=FAILED
            failed=1
        fi
        printf '%s\n' "$out"
        row "train ${shape%% *}" "$verdict" $((SECONDS - began)) "see the table above"
    done
fi
if wants sanitizer; then
    sanitizer=$(command -v compute-sanitizer || ls -d /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | tail -n 1)
    for tool in memcheck initcheck racecheck; do
        began=$SECONDS
        if [ -z "$sanitizer" ]; then
            row "$tool" skipped 0 "compute-sanitizer is not installed"
            continue
        fi
        # API errors are not reported: driver calls that end a search are expected to fail.
        if out=$(timeout 300 "$sanitizer" --tool "$tool" --report-api-errors no --error-exitcode 9 \
            ./refrain run --raw --temp 0 -n 8 --device cuda --graph require "Once upon a time" 2>&1); then
            verdict=ok
        else
            verdict=FAILED
            failed=1
            printf '%s\n' "$out" | tail -n 40
        fi
        row "$tool, the built-in model" "$verdict" $((SECONDS - began)) "$(printf '%s\n' "$out" | grep SUMMARY | tail -n 1)"
    done
fi
printf '\n'
printf '%s\n' "${table[@]}"
exit $failed
"#;

/// Builds the binaries and copies them to `gpu-bundle/`.
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
    println!("{} is ready: copy it to the GPU machine and run run.sh there", folder.display());
    Ok(())
}

pub(crate) fn copy(from: PathBuf, to: PathBuf) -> Result<()> {
    fs::copy(&from, &to).with_context(|| format!("copying {} to {}", from.display(), to.display()))?;
    // Debug information is most of the size and unused there.
    if let Err(error) = shell::run("strip", &[&to.to_string_lossy()]) {
        eprintln!("not stripped: {error}");
    }
    Ok(())
}

/// Returns name and path of each test executable in cargo's messages.
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
