//! Compiles every kernel for the architectures of a release, into one file for a build to embed.
//!
//! ```text
//! cargo run -p refrain-kernels --example prebuild -- OUTPUT NVRTC [8.0 9.0 ...]
//! ```

use std::path::Path;
use std::process::ExitCode;

use refrain_kernels::{GpuArch, Nvrtc, prebuild};

/// Data-centre and desktop GPUs from Ampere on. Architectures that NVRTC does not support are skipped.
const USUAL: [&str; 6] = ["8.0", "8.6", "8.9", "9.0", "10.0", "12.0"];

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match run(&args) {
        Ok(said) => {
            println!("{said}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &[String]) -> Result<String, Box<dyn std::error::Error>> {
    let [output, nvrtc, archs @ ..] = args else {
        return Err("usage: prebuild OUTPUT NVRTC [ARCH ...]".into());
    };
    let nvrtc = Nvrtc::open(Some(Path::new(nvrtc)))?;
    let usual = USUAL.map(str::to_owned);
    let asked = if archs.is_empty() { usual.as_slice() } else { archs };
    let mut chosen = Vec::new();
    for text in asked {
        let arch = parse(text).ok_or_else(|| format!("{text:?} is not an architecture such as 9.0"))?;
        match nvrtc.knows(arch) {
            true => chosen.push(arch),
            false if archs.is_empty() => {
                eprintln!("skipped: NVRTC {:?} does not support {arch}", nvrtc.version())
            }
            false => return Err(format!("NVRTC {:?} does not support {arch}", nvrtc.version()).into()),
        }
    }
    let archive = prebuild(&nvrtc, &chosen)?;
    std::fs::write(output, &archive)?;
    let names: Vec<String> = chosen.iter().map(ToString::to_string).collect();
    Ok(format!("{output}: {} bytes for {}", archive.len(), names.join(", ")))
}

fn parse(text: &str) -> Option<GpuArch> {
    let (major, minor) = text.split_once('.')?;
    Some(GpuArch { major: major.parse().ok()?, minor: minor.parse().ok()? })
}
