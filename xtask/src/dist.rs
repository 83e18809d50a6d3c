//! Builds a release folder: one binary with compiled kernels inside, its licences and checksums.

use crate::shell::{self, root};
use crate::{bundle, nvrtc};
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::fs;
use std::path::{Path, PathBuf};

/// Files that ship next to the binary.
const SHIPPED_FILES: [&str; 5] = ["README.md", "LICENSE", "LICENSE-APACHE", "LICENSE-MIT", "CHANGELOG.md"];

/// Compiles the kernels, builds the binary with them, checks that it uses them, and fills `dist/`.
pub(crate) fn make() -> Result<()> {
    let library = nvrtc::library().map_err(anyhow::Error::msg).context("a release needs NVRTC")?;
    let kernels = root().join("target/prebuilt/kernels.bin");
    fs::create_dir_all(root().join("target/prebuilt"))?;
    let (output, library) = (kernels.to_string_lossy(), library.to_string_lossy());
    let prebuild = ["run", "--profile", "ci", "--package", "refrain-kernels", "--example", "prebuild", "--"];
    shell::run("cargo", &[&prebuild[..], &[&output, &library]].concat())?;
    let build = ["build", "--profile", "dist", "--package", "refrain-cli"];
    let status = shell::command("cargo", &build).env("REFRAIN_PREBUILT_KERNELS", &kernels).status()?;
    ensure!(status.success(), "cargo {}: {status}", build.join(" "));
    let built = root().join("target/dist/refrain");
    let held = held(&built)?;

    let folder = root().join("dist");
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder)?;
    bundle::copy(built, folder.join("refrain"))?;
    for name in SHIPPED_FILES {
        fs::copy(root().join(name), folder.join(name)).with_context(|| format!("copying {name}"))?;
    }
    fs::write(folder.join("SHA256SUMS"), checksums(&folder)?)?;
    let bytes = fs::metadata(folder.join("refrain"))?.len();
    let mib = bytes as f64 / (1 << 20) as f64;
    println!("{} is ready: refrain has {mib:.1} MiB and contains {held}", folder.display());
    Ok(())
}

/// Returns the kernels that a binary reports to contain; an error if it contains none or does not use them.
fn held(binary: &Path) -> Result<String> {
    let report = shell::output(&binary.to_string_lossy(), &["doctor", "--device", "sim", "--json"])?;
    let report: Value = serde_json::from_str(&report)?;
    let rows = report["rows"].as_array().cloned().unwrap_or_default();
    let row = rows
        .iter()
        .find(|row| row["name"] == "kernels")
        .context("the doctor reports no row named kernels")?;
    let measured = row["measured"].as_str().unwrap_or_default();
    let held = measured.split_once("holds ").map_or("", |(_, held)| held);
    ensure!(held.contains("sm_"), "the binary was built without its kernels: {measured:?}");
    Ok(held.to_owned())
}

/// Checksums in the format of `sha256sum`.
fn checksums(folder: &Path) -> Result<String> {
    let mut files: Vec<PathBuf> = fs::read_dir(folder)?.map(|e| Ok(e?.path())).collect::<Result<_>>()?;
    files.sort();
    let mut sums = String::new();
    for file in files {
        let digest = Sha256::digest(fs::read(&file)?);
        let hex: String = digest.iter().map(|b| format!("{b:02x}")).collect();
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        sums += &format!("{hex}  {name}\n");
    }
    Ok(sums)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_equal_those_of_sha256sum() {
        let folder = std::env::temp_dir().join(format!("refrain-dist-test-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("b"), "abc").unwrap();
        fs::write(folder.join("a"), "").unwrap();
        let sums = checksums(&folder).unwrap();
        fs::remove_dir_all(&folder).unwrap();
        assert_eq!(
            sums,
            "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855  a\n\
             ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad  b\n"
        );
    }

    #[test]
    fn every_shipped_file_exists() {
        assert!(SHIPPED_FILES.iter().all(|name| root().join(name).is_file()));
    }
}
