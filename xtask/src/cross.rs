//! Another processor: what is written for ARM compiles, on a machine that is none.

use crate::shell;
use anyhow::Result;
use std::path::Path;

const TARGET: &str = "aarch64-unknown-linux-gnu";
/// What the crate `cc` calls for that target.
const C_COMPILER: &str = "aarch64-linux-gnu-gcc";
/// Crates that depend on C: TLS brings `ring`.
const WITH_C: &[&str] = &["refrain-hub", "refrain-cli"];

/// What can be checked, and what cannot with the reason.
#[derive(Debug, PartialEq, Eq)]
struct Scope {
    /// Crates left out; `None` when nothing can be checked.
    left_out: Option<&'static [&'static str]>,
    skipped: Option<String>,
}

/// Checks the workspace for ARM with warnings denied. Adds what it had to leave out to `skipped`.
pub(crate) fn check(skipped: &mut Vec<String>) -> Result<()> {
    let host = shell::output("rustc", &["--print", "host-tuple"])?;
    let library = shell::output("rustc", &["--print", "target-libdir", "--target", TARGET])?;
    let has_std = Path::new(library.trim()).is_dir();
    let has_c = shell::output(C_COMPILER, &["--version"]).is_ok();
    let scope = scope(host.trim(), has_std, has_c);
    skipped.extend(scope.skipped);
    let Some(left_out) = scope.left_out else { return Ok(()) };
    // Lints of dependencies are capped, so this denies the warnings of the workspace only.
    let deny = format!("target.{TARGET}.rustflags=[\"-Dwarnings\"]");
    let mut args = vec!["check", "--workspace", "--all-targets", "--profile", "ci", "--target", TARGET];
    args.extend(["--config", &deny]);
    left_out.iter().for_each(|name| args.extend(["--exclude", name]));
    shell::run("cargo", &args)
}

fn scope(host: &str, has_std: bool, has_c: bool) -> Scope {
    let all = Some(&[] as &[&str]);
    match (host == TARGET, has_std, has_c) {
        (true, _, _) => Scope { left_out: None, skipped: None }, // the lints have done it
        (false, false, _) => Scope {
            left_out: None,
            skipped: Some(format!(
                "the check for {TARGET}: its standard library is not installed (rustup target add {TARGET})"
            )),
        },
        (false, true, false) => Scope {
            left_out: Some(WITH_C),
            skipped: Some(format!(
                "the check of {} for {TARGET}: there is no C compiler called {C_COMPILER}",
                WITH_C.join(" and ")
            )),
        },
        (false, true, true) => Scope { left_out: all, skipped: None },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_out_is_told_with_the_reason() {
        let host = "x86_64-unknown-linux-gnu";
        assert_eq!(scope(host, true, true), Scope { left_out: Some(&[]), skipped: None });
        let no_c = scope(host, true, false);
        assert_eq!(no_c.left_out, Some(WITH_C));
        assert!(no_c.skipped.is_some_and(|s| s.contains("refrain-hub") && s.contains(C_COMPILER)));
        let nothing = scope(host, false, true);
        assert_eq!(nothing.left_out, None);
        assert!(nothing.skipped.is_some_and(|s| s.contains("rustup target add")));
        assert_eq!(scope(TARGET, false, false), Scope { left_out: None, skipped: None });
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
