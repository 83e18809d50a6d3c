//! Provides NVRTC on machines without CUDA: CI compiles every kernel with the library from a Python package.

use crate::shell::{command, root};
use std::path::{Path, PathBuf};

const PACKAGE: &str = "nvidia-cuda-nvrtc==13.0.*";

/// Returns the path of the library, downloaded into `target/` if missing, or the reason why it is not available.
pub(crate) fn library() -> Result<PathBuf, String> {
    let folder = root().join("target/nvrtc");
    if let Some(library) = find(&folder) {
        return Ok(library);
    }
    let target = folder.to_string_lossy().into_owned();
    let args = ["-m", "pip", "install", "--quiet", "--no-deps", "--target", &target, PACKAGE];
    match command("python3", &args).status() {
        Ok(status) if status.success() => {
            find(&folder).ok_or_else(|| format!("{PACKAGE} contains no library"))
        }
        Ok(status) => Err(format!("pip install {PACKAGE}: {status}")),
        Err(error) => Err(format!("python3 cannot be started: {error}")),
    }
}

fn find(folder: &Path) -> Option<PathBuf> {
    let entries = std::fs::read_dir(folder).ok()?.flatten();
    let mut paths: Vec<PathBuf> = entries.map(|e| e.path()).collect();
    paths.sort();
    let is_library = |p: &Path| {
        let name = p.file_name().unwrap_or_default().to_string_lossy().into_owned();
        name.starts_with("libnvrtc.so")
    };
    let here = paths.iter().find(|p| is_library(p)).cloned();
    here.or_else(|| paths.iter().filter(|p| p.is_dir()).find_map(|p| find(p)))
}
