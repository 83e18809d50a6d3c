//! Tasks of the repository: `cargo xtask ci` is what CI runs, and what the README tells you to run.

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

  ci            the whole test suite: formatting, lints, docs, crate edges, tests
  edges         check which crate depends on which
  models        fetch the real models that some tests and benches use
  bench-cpu     Refrain beside llama.cpp on the same files
  plot-history  docs/history.tsv as a picture, docs/history.svg
  dist          a release: one binary with compiled kernels inside, licences and checksums, in dist/
  gpu-bundle    one folder with the binary, the GPU tests and a script, for a machine with a GPU
";

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
        ["ci"] => ci::run(),
        ["edges"] => edges::check(),
        ["models"] => {
            models::fetch().map(|missing| missing.iter().for_each(|m| eprintln!("not fetched: {m}")))
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
