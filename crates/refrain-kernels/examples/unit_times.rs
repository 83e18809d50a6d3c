//! Measures the compile time of every kernel unit, sequentially on one thread.
//!
//! ```text
//! cargo run --release -p refrain-kernels --example unit_times -- NVRTC [9.0]
//! ```

use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

use refrain_kernels::{GpuArch, KernelFamily, KernelUnit, Nvrtc};

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match run(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &[String]) -> Result<(), Box<dyn std::error::Error>> {
    let [nvrtc, rest @ ..] = args else { return Err("usage: unit_times NVRTC [ARCH]".into()) };
    let (major, minor) = rest
        .first()
        .map_or("9.0", String::as_str)
        .split_once('.')
        .ok_or("the architecture must look like 9.0")?;
    let arch = GpuArch { major: major.parse()?, minor: minor.parse()? };
    let nvrtc = Nvrtc::open(Some(Path::new(nvrtc)))?;
    let mut all = 0.0;
    println!("{:<16} {:>5} {:>8} {:>8}  longest unit", "file", "units", "sum, s", "longest");
    for family in KernelFamily::ALL {
        let mut times = Vec::new();
        for &unit in KernelUnit::all().iter().filter(|unit| unit.family() == family) {
            let began = Instant::now();
            nvrtc.compile(unit, arch)?;
            times.push((began.elapsed().as_secs_f64(), unit));
        }
        let sum: f64 = times.iter().map(|(seconds, _)| seconds).sum();
        let longest = times.iter().max_by(|a, b| a.0.total_cmp(&b.0)).ok_or("a file has no units")?;
        println!("{:<16} {:>5} {sum:>8.2} {:>8.2}  {}", family.name(), times.len(), longest.0, longest.1);
        all += sum;
    }
    println!("{:<16} {:>5} {all:>8.2}", "all", KernelUnit::all().len());
    Ok(())
}
