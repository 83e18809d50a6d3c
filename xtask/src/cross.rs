//! Checks that the code for ARM compiles, on a machine with another processor.

use crate::shell;
use anyhow::Result;
use std::path::Path;

const TARGET: &str = "aarch64-unknown-linux-gnu";
/// The C compiler that the crate `cc` runs for that target.
const C_COMPILER: &str = "aarch64-linux-gnu-gcc";
/// Crates that depend on C code: TLS needs `ring`.
const WITH_C: &[&str] = &["refrain-hub", "refrain-server", "refrain-cli"];

/// Result of the search for toolchains: what can be checked, and what is skipped.
#[derive(Debug, PartialEq, Eq)]
struct Scope {
    /// Crates to exclude; `None` if nothing can be checked.
    excluded: Option<&'static [&'static str]>,
    skipped: Option<String>,
}

/// Checks the workspace for ARM with warnings denied. Adds everything it had to exclude to `skipped`.
pub(crate) fn check(skipped: &mut Vec<String>) -> Result<()> {
    let host = shell::output("rustc", &["--print", "host-tuple"])?;
    let library = shell::output("rustc", &["--print", "target-libdir", "--target", TARGET])?;
    let has_std = Path::new(library.trim()).is_dir();
    let has_c = shell::output(C_COMPILER, &["--version"]).is_ok();
    let scope = scope(host.trim(), has_std, has_c);
    skipped.extend(scope.skipped);
    let Some(excluded) = scope.excluded else { return Ok(()) };
    // Lints of dependencies are capped, so this denies only warnings of the workspace.
    let deny = format!("target.{TARGET}.rustflags=[\"-Dwarnings\"]");
    let mut args = vec!["check", "--workspace", "--all-targets", "--profile", "ci", "--target", TARGET];
    args.extend(["--config", &deny]);
    excluded.iter().for_each(|name| args.extend(["--exclude", name]));
    shell::run("cargo", &args)
}

fn scope(host: &str, has_std: bool, has_c: bool) -> Scope {
    let all = Some(&[] as &[&str]);
    match (host == TARGET, has_std, has_c) {
        (true, _, _) => Scope { excluded: None, skipped: None }, // the lint step covers it
        (false, false, _) => Scope {
            excluded: None,
            skipped: Some(format!(
                "the check for {TARGET}: its standard library is not installed (rustup target add {TARGET})"
            )),
        },
        (false, true, false) => Scope {
            excluded: Some(WITH_C),
            skipped: Some(format!(
                "the check of {} for {TARGET}: no C compiler named {C_COMPILER} was found",
                WITH_C.join(" and ")
            )),
        },
        (false, true, true) => Scope { excluded: all, skipped: None },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn excluded_crates_are_reported_with_the_reason() {
        let host = "x86_64-unknown-linux-gnu";
        assert_eq!(scope(host, true, true), Scope { excluded: Some(&[]), skipped: None });
        let no_c = scope(host, true, false);
        assert_eq!(no_c.excluded, Some(WITH_C));
        assert!(no_c.skipped.is_some_and(|s| s.contains("refrain-hub") && s.contains(C_COMPILER)));
        let nothing = scope(host, false, true);
        assert_eq!(nothing.excluded, None);
        assert!(nothing.skipped.is_some_and(|s| s.contains("rustup target add")));
        assert_eq!(scope(TARGET, false, false), Scope { excluded: None, skipped: None });
    }

    #[test]
    fn the_crates_that_need_c_are_those_that_depend_on_ring() {
        let tree = ["tree", "--workspace", "--invert", "ring", "--edges", "normal", "--prefix", "none"];
        let tree = shell::output("cargo", &[&tree[..], &["--format", "{p}"]].concat()).unwrap();
        let mut found: Vec<&str> = tree
            .lines()
            .filter_map(|line| line.split(' ').next())
            .filter(|n| n.starts_with("refrain"))
            .collect();
        found.sort_unstable();
        found.dedup();
        let mut listed = WITH_C.to_vec();
        listed.sort_unstable();
        assert_eq!(found, listed);
    }
}
