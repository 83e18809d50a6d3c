//! The real models that some tests and benches use, pulled by name into the local store.

use crate::shell::command;
use anyhow::{Context, Result};

/// Short names that `refrain pull` knows.
const MODELS: [&str; 2] = ["smollm2", "gemma3:270m-base"];

/// Pulls what is not there; gives the names that could not be had, with the reason on standard error.
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
