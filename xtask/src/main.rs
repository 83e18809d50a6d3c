//! Tasks of the repository. `cargo xtask ci` is the test command of CI and of the README.
#![forbid(unsafe_code)]

mod bench;
mod bundle;
mod ci;
mod cross;
mod dist;
mod edges;
mod history;
mod models;
mod nvrtc;
mod shell;

use anyhow::{Result, bail};

const HELP: &str = "\
Usage: cargo xtask TASK

  ci            run the whole test suite: formatting, lints, docs, crate edges, tests
  edges         check the dependencies between crates
  models        download the real models that some tests and benches use
  bench-cpu     compare Refrain with llama.cpp on the same files
  plot-history  plot docs/history.tsv as docs/history.svg
  dist          build a release in dist/: one binary with compiled kernels, licences and checksums
  gpu-bundle    build a folder for a GPU machine: the binary, the GPU tests and a script
";

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
        ["ci"] => ci::run(),
        ["edges"] => edges::check(),
        ["models"] => {
            let missing = models::fetch(&models::by_cargo)?;
            missing.iter().for_each(|name| eprintln!("not downloaded: {name}"));
            Ok(())
        }
        ["dist"] => dist::make(),
        ["gpu-bundle"] => bundle::make(),
        ["plot-history"] => history::plot(),
        ["bench-cpu", ..] => bench::cpu(&args[1..]),
        [] | ["help" | "--help" | "-h"] => {
            print!("{HELP}");
            Ok(())
        }
        other => bail!("unknown task {:?}\n\n{HELP}", other.join(" ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    /// Collects every `cargo xtask WORD` in sources and pages under a folder, with its file.
    fn named_tasks(folder: &Path, found: &mut Vec<(String, String)>) {
        for entry in std::fs::read_dir(folder).unwrap().map(Result::unwrap) {
            let path = entry.path();
            let name = entry.file_name().to_string_lossy().into_owned();
            if entry.file_type().unwrap().is_dir() && name != "target" && !name.starts_with('.') {
                named_tasks(&path, found);
            }
            if name.ends_with(".rs") || name.ends_with(".md") {
                let text = std::fs::read_to_string(&path).unwrap();
                // Split, so that this file does not match.
                for rest in text.split(concat!("cargo ", "xtask ")).skip(1) {
                    let is_word = |c: &char| c.is_ascii_lowercase() || *c == '-';
                    found.push((rest.chars().take_while(is_word).collect(), path.display().to_string()));
                }
            }
        }
    }

    /// Collects the Rust sources under a folder that match `wanted`, relative to the root.
    fn sources(folder: &Path, wanted: &dyn Fn(&str) -> bool, found: &mut Vec<String>) {
        for entry in std::fs::read_dir(folder).unwrap().map(Result::unwrap) {
            let path = entry.path();
            if path.is_dir() {
                sources(&path, wanted, found);
            } else if path.extension().is_some_and(|e| e == "rs")
                && wanted(&std::fs::read_to_string(&path).unwrap())
            {
                found.push(path.strip_prefix(shell::root()).unwrap().display().to_string());
            }
        }
    }

    /// `CONTRIBUTING.md` describes this list.
    #[test]
    fn unsafe_code_is_forbidden_except_where_contributing_allows_it() {
        let mut allowed = Vec::new();
        for entry in std::fs::read_dir(shell::root().join("crates")).unwrap().map(Result::unwrap) {
            let src = entry.path().join("src");
            let top = ["lib.rs", "main.rs"].map(|f| src.join(f)).into_iter().find(|p| p.exists()).unwrap();
            let text = std::fs::read_to_string(&top).unwrap();
            let name = entry.file_name().to_string_lossy().into_owned();
            if name != "refrain-driver" {
                assert!(
                    ["forbid", "deny"].iter().any(|a| text.contains(&format!("#![{a}(unsafe_code)]"))),
                    "{name}"
                );
            }
            sources(&src, &|text| text.contains("allow(unsafe_code)"), &mut allowed);
        }
        allowed.sort();
        let expected = [
            "refrain-cpu/src/lib.rs", // pool and simd
            "refrain-formats/src/mmap.rs",
            "refrain-kernels/src/blaslt.rs",
            "refrain-kernels/src/load.rs",
            "refrain-kernels/src/nvrtc.rs",
            "refrain-kernels/src/vouch.rs",
            "refrain-testkit/src/lib.rs", // alloc
        ];
        assert_eq!(allowed, expected.map(|file| format!("crates/{file}")));
    }

    #[test]
    fn every_task_named_in_sources_and_pages_exists() {
        let mut found = Vec::new();
        named_tasks(&shell::root(), &mut found);
        assert!(found.len() > 20, "{found:?}");
        let exists = |task: &str| HELP.lines().any(|l| l.split_whitespace().next() == Some(task));
        found.retain(|(task, _)| !task.is_empty() && !exists(task));
        assert!(found.is_empty(), "{found:?}");
    }
}
