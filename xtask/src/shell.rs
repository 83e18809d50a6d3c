//! Runs cargo and other programs in the workspace root.

use anyhow::{Context, Result, bail};
use std::path::PathBuf;
use std::process::Command;

/// Returns the workspace root.
pub(crate) fn root() -> PathBuf {
    let manifest = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    manifest.parent().map_or(manifest.clone(), Into::into)
}

/// Returns a command that will run in the root.
pub(crate) fn command(program: &str, args: &[&str]) -> Command {
    let mut command = Command::new(program);
    command.args(args).current_dir(root());
    command
}

/// Runs a program; an error if it fails.
pub(crate) fn run(program: &str, args: &[&str]) -> Result<()> {
    let line = format!("{program} {}", args.join(" "));
    let status = command(program, args).status().with_context(|| format!("{line}: cannot be started"))?;
    if !status.success() {
        bail!("{line}: {status}");
    }
    Ok(())
}

/// Runs a program and returns its standard output.
pub(crate) fn output(program: &str, args: &[&str]) -> Result<String> {
    let line = format!("{program} {}", args.join(" "));
    let output = command(program, args).output().with_context(|| format!("{line}: cannot be started"))?;
    if !output.status.success() {
        bail!("{line}: {}\n{}", output.status, String::from_utf8_lossy(&output.stderr));
    }
    Ok(String::from_utf8(output.stdout)?)
}
