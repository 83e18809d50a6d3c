//! Downloads the real models that some tests and benches use into the local store.

use crate::shell::command;
use anyhow::{Context, Result};

/// Names of `refrain pull`'s catalogue.
const MODELS: [&str; 2] = ["smollm2", "gemma3:270m-base"];

/// Pulls the missing models. Returns the names of those that could not be pulled; the reasons are on standard error.
pub(crate) fn fetch() -> Result<Vec<&'static str>> {
    let mut missing = Vec::new();
    for name in MODELS {
        let args = ["run", "--quiet", "--profile", "ci", "--package", "refrain-cli", "--", "pull", name];
        let status = command("cargo", &args).status().context("cargo cannot be started")?;
        if !status.success() {
            missing.push(name);
        }
    }
    Ok(missing)
}
