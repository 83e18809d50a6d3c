//! Files, free space and locks.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use sha1::Sha1;
use sha2::{Digest as _, Sha256};

use crate::error::{HubError, is_disk_full};
use crate::progress::{Progress, ProgressEvent};

/// The disk that downloads are written to. Tests substitute a full one.
pub trait Disk: Send + Sync {
    /// Returns the free bytes below `path`, which need not exist; `None` if unknown.
    fn free_bytes(&self, path: &Path) -> Option<u64>;

    /// Opens a file for appending, creating it if necessary.
    fn append(&self, path: &Path) -> io::Result<Box<dyn DiskFile>>;
}

/// A file being written.
pub trait DiskFile: Write {
    /// Flushes everything written so far to the device.
    fn sync(&mut self) -> io::Result<()>;
}

impl DiskFile for File {
    fn sync(&mut self) -> io::Result<()> {
        self.sync_all()
    }
}

/// The machine's own file system.
#[derive(Debug, Clone, Copy, Default)]
pub struct RealDisk;

impl Disk for RealDisk {
    fn free_bytes(&self, path: &Path) -> Option<u64> {
        path.ancestors().find(|folder| folder.exists()).and_then(free_bytes_at)
    }

    fn append(&self, path: &Path) -> io::Result<Box<dyn DiskFile>> {
        Ok(Box::new(OpenOptions::new().create(true).append(true).open(path)?))
    }
}

#[cfg(unix)]
fn free_bytes_at(folder: &Path) -> Option<u64> {
    let stat = rustix::fs::statvfs(folder).ok()?;
    stat.f_bavail.checked_mul(stat.f_frsize)
}

#[cfg(not(unix))]
fn free_bytes_at(_folder: &Path) -> Option<u64> {
    None
}

/// Fails before the first byte is written if a download cannot fit.
pub(crate) fn require_space(disk: &dyn Disk, path: &Path, need: u64) -> Result<(), HubError> {
    // For folders, links and lock files.
    const MARGIN_BYTES: u64 = 1 << 20;
    match disk.free_bytes(path) {
        Some(free) if need > 0 && free < need.saturating_add(MARGIN_BYTES) => Err(HubError::NoSpace {
            need: need.saturating_add(MARGIN_BYTES),
            free: Some(free),
            path: path.to_owned(),
        }),
        _ => Ok(()),
    }
}

/// Converts the error of a write: a full disk, or anything else.
pub(crate) fn write_error(disk: &dyn Disk, path: &Path, need: u64, source: io::Error) -> HubError {
    if is_disk_full(&source) {
        HubError::NoSpace { need, free: disk.free_bytes(path), path: path.to_owned() }
    } else {
        HubError::Write { path: path.to_owned(), source }
    }
}

/// Expected checksum of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Checksum {
    /// SHA-256 of the content, for large files.
    Sha256(String),
    /// Git's object name, for small files.
    GitBlob(String),
}

impl Checksum {
    /// Parses a checksum, whose kind follows from its length. Only lower-case hexadecimal is accepted.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let hex = text.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b));
        match text.len() {
            64 if hex => Some(Self::Sha256(text.to_owned())),
            40 if hex => Some(Self::GitBlob(text.to_owned())),
            _ => None,
        }
    }

    /// Returns the hexadecimal digits, which name blobs in the hub's cache.
    pub(crate) fn hex(&self) -> &str {
        match self {
            Self::Sha256(hex) | Self::GitBlob(hex) => hex,
        }
    }

    pub(crate) fn algorithm(&self) -> &'static str {
        match self {
            Self::Sha256(_) => "sha256",
            Self::GitBlob(_) => "git sha1",
        }
    }

    /// Returns a hasher for a file of `bytes` bytes.
    pub(crate) fn hasher(&self, bytes: u64) -> Hasher {
        match self {
            Self::Sha256(_) => Hasher::Sha256(Sha256::new()),
            Self::GitBlob(_) => {
                let mut sha1 = Sha1::new();
                sha1.update(format!("blob {bytes}\0"));
                Hasher::Sha1(sha1)
            }
        }
    }
}

/// A checksum being computed.
pub(crate) enum Hasher {
    Sha256(Sha256),
    Sha1(Sha1),
}

impl Hasher {
    pub(crate) fn update(&mut self, bytes: &[u8]) {
        match self {
            Self::Sha256(hasher) => hasher.update(bytes),
            Self::Sha1(hasher) => hasher.update(bytes),
        }
    }

    /// Hashes an existing file and returns its length.
    pub(crate) fn update_from(&mut self, path: &Path) -> io::Result<u64> {
        let mut file = File::open(path)?;
        let mut buffer = vec![0; COPY_BYTES];
        let mut n_bytes = 0;
        loop {
            let n = file.read(&mut buffer)?;
            if n == 0 {
                return Ok(n_bytes);
            }
            self.update(&buffer[..n]);
            n_bytes += n as u64;
        }
    }

    pub(crate) fn hex(self) -> String {
        let digits = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        match self {
            Self::Sha256(hasher) => digits(&hasher.finalize()),
            Self::Sha1(hasher) => digits(&hasher.finalize()),
        }
    }
}

/// Buffer size for copying.
pub(crate) const COPY_BYTES: usize = 256 * 1024;

/// Writes a small file atomically: readers see the old or the new content.
pub(crate) fn write_atomically(path: &Path, content: &[u8]) -> Result<(), HubError> {
    let temporary = temporary_name(path);
    let write = || {
        let mut file = File::create(&temporary)?;
        file.write_all(content)?;
        file.sync_all()?;
        fs::rename(&temporary, path)
    };
    write().map_err(|error| {
        let _ = fs::remove_file(&temporary);
        HubError::Write { path: path.to_owned(), source: error }
    })
}

/// Returns a unique temporary name next to `path`.
pub(crate) fn temporary_name(path: &Path) -> PathBuf {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}-{}.tmp", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed)));
    path.with_file_name(name)
}

pub(crate) fn create_dir(path: &Path) -> Result<(), HubError> {
    fs::create_dir_all(path).map_err(HubError::write(path))
}

/// Removes a file, if it exists.
pub(crate) fn remove_file(path: &Path) -> Result<(), HubError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(HubError::write(path)(error)),
        _ => Ok(()),
    }
}

/// An exclusive lock between processes, held until it is dropped. The system releases it if the process dies.
#[derive(Debug)]
pub(crate) struct Lock {
    _file: File,
}

impl Lock {
    /// Waits for the lock and reports the wait once.
    pub(crate) fn wait(path: &Path, what: &str, progress: &mut dyn Progress) -> Result<Self, HubError> {
        const POLL: Duration = Duration::from_millis(50);
        let file = open_lock(path)?;
        let mut reported = false;
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(Self { _file: file }),
                Err(TryLockError::Error(error)) => return Err(HubError::write(path)(error)),
                Err(TryLockError::WouldBlock) if progress.cancelled() => return Err(HubError::Cancelled),
                Err(TryLockError::WouldBlock) => {
                    if !reported {
                        progress.on(ProgressEvent::Waiting { file: what });
                        reported = true;
                    }
                    std::thread::sleep(POLL);
                }
            }
        }
    }

    /// Takes the lock, or fails if another process holds it.
    pub(crate) fn now(path: &Path) -> Result<Self, HubError> {
        let file = open_lock(path)?;
        match file.try_lock() {
            Ok(()) => Ok(Self { _file: file }),
            Err(TryLockError::WouldBlock) => Err(HubError::Busy { path: path.to_owned() }),
            Err(TryLockError::Error(error)) => Err(HubError::write(path)(error)),
        }
    }
}

fn open_lock(path: &Path) -> Result<File, HubError> {
    if let Some(folder) = path.parent() {
        create_dir(folder)?;
    }
    OpenOptions::new().create(true).truncate(false).write(true).open(path).map_err(HubError::write(path))
}

/// Returns all files below `folder`, sorted, as `/`-separated relative names. Links count if their target exists.
pub(crate) fn files_below(folder: &Path) -> Vec<String> {
    const MAX_DEPTH: usize = 6;
    fn walk(folder: &Path, prefix: &str, depth: usize, found: &mut Vec<String>) {
        let Ok(entries) = fs::read_dir(folder) else { return };
        for entry in entries.flatten() {
            let Ok(name) = entry.file_name().into_string() else {
                continue;
            };
            let name = if prefix.is_empty() { name } else { format!("{prefix}/{name}") };
            let is_folder = entry.file_type().is_ok_and(|kind| kind.is_dir());
            if is_folder && depth < MAX_DEPTH {
                walk(&entry.path(), &name, depth + 1, found);
            } else if entry.path().is_file() {
                found.push(name);
            }
        }
    }
    let mut found = Vec::new();
    walk(folder, "", 0, &mut found);
    found.sort();
    found
}

/// Returns the total size of all files below a folder, without following links.
pub(crate) fn bytes_below(folder: &Path) -> u64 {
    let Ok(entries) = fs::read_dir(folder) else {
        return 0;
    };
    let size = |entry: fs::DirEntry| match entry.metadata() {
        Ok(meta) if meta.is_dir() => bytes_below(&entry.path()),
        Ok(meta) if meta.is_file() => meta.len(),
        _ => 0,
    };
    entries.flatten().map(size).sum()
}

/// A temporary folder, removed on drop.
pub(crate) struct ScratchDir(pub(crate) PathBuf);

impl ScratchDir {
    /// Creates an empty folder at `path`, removing leftovers of an interrupted run.
    pub(crate) fn create(path: PathBuf) -> Result<Self, HubError> {
        match fs::remove_dir_all(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(HubError::write(&path)(error));
            }
            _ => {}
        }
        create_dir(&path)?;
        Ok(Self(path))
    }
}

impl Drop for ScratchDir {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.0) {
            tracing::warn!(path = %self.0.display(), %error, "could not remove a temporary folder");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Silent;

    #[test]
    fn checksums_are_those_of_git_and_sha256sum() {
        let of = |checksum: &Checksum, content: &[u8]| {
            let mut hasher = checksum.hasher(content.len() as u64);
            hasher.update(content);
            hasher.hex()
        };
        // `printf 'hello\n' | git hash-object --stdin` and `printf abc | sha256sum`.
        let git = Checksum::parse("ce013625030ba8dba906f756967f9e9ca394464a").unwrap();
        assert_eq!(of(&git, b"hello\n"), git.hex());
        let sha =
            Checksum::parse("ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad").unwrap();
        assert_eq!(of(&sha, b"abc"), sha.hex());
        for bad in ["", "../../x", "CE013625030BA8DBA906F756967F9E9CA394464A", "ce01"] {
            assert_eq!(Checksum::parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn free_space_is_known_for_missing_folders() {
        let folder = tempfile::tempdir().unwrap();
        let free = RealDisk.free_bytes(&folder.path().join("not/yet/here"));
        assert!(cfg!(not(unix)) || free.is_some_and(|free| free > 0));
    }

    #[test]
    fn a_lock_is_busy_until_it_is_dropped() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a/b.lock");
        let held = Lock::wait(&path, "b", &mut Silent).unwrap();
        assert!(matches!(Lock::now(&path), Err(HubError::Busy { .. })));
        drop(held);
        Lock::now(&path).unwrap();
    }
}
