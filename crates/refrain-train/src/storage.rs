//! Atomic file writes.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// The file system under checkpoints and logs. Tests substitute a full one.
pub trait Storage: Send + Sync {
    /// Creates a file that does not exist yet.
    fn create(&self, path: &Path) -> io::Result<Box<dyn StorageFile>>;
}

/// A file being written.
pub trait StorageFile: Write {
    /// Flushes everything written so far to the disk itself.
    fn sync(&mut self) -> io::Result<()>;
}

impl StorageFile for File {
    fn sync(&mut self) -> io::Result<()> {
        self.sync_all()
    }
}

/// The machine's file system.
#[derive(Debug, Clone, Copy, Default)]
pub struct RealStorage;

impl Storage for RealStorage {
    fn create(&self, path: &Path) -> io::Result<Box<dyn StorageFile>> {
        Ok(Box::new(File::create_new(path)?))
    }
}

const TEMPORARY: &str = ".tmp";

/// A temporary name next to `path` that no other thread or process uses.
pub(crate) fn temporary_path(path: &Path) -> PathBuf {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    path.with_file_name(format!(".{name}.{}-{count}{TEMPORARY}", std::process::id()))
}

/// Whether [`temporary_path`] made a name with this prefix.
pub(crate) fn is_temporary(name: &str, prefix: &str) -> bool {
    name.strip_prefix('.').is_some_and(|rest| rest.starts_with(prefix)) && name.ends_with(TEMPORARY)
}

/// Writes a small file so that readers see the old or the new content, never part of it.
pub(crate) fn write_atomically(storage: &dyn Storage, path: &Path, content: &[u8]) -> io::Result<()> {
    let temporary = temporary_path(path);
    let write = || {
        let mut file = storage.create(&temporary)?;
        file.write_all(content)?;
        file.sync()?;
        fs::rename(&temporary, path)?;
        sync_folder(parent(path))
    };
    write().inspect_err(|_| {
        let _ = fs::remove_file(&temporary);
    })
}

/// The folder of a file; the current one for a bare name.
pub(crate) fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

/// Flushes the entries of a folder to the disk: a rename is durable only after that.
pub(crate) fn sync_folder(folder: &Path) -> io::Result<()> {
    #[cfg(unix)]
    File::open(folder)?.sync_all()?;
    #[cfg(not(unix))]
    let _ = folder;
    Ok(())
}

/// Whether a write failed for lack of space, on a disk or in a quota.
pub(crate) fn is_disk_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use std::sync::Arc;

    /// A disk with space for a number of bytes.
    #[derive(Debug, Clone)]
    pub(crate) struct SmallDisk(pub(crate) Arc<AtomicU64>);

    impl SmallDisk {
        pub(crate) fn with_capacity(n_bytes: u64) -> Self {
            Self(Arc::new(AtomicU64::new(n_bytes)))
        }
    }

    struct SmallDiskFile(File, Arc<AtomicU64>);

    impl Write for SmallDiskFile {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let free = self.1.load(Ordering::Relaxed);
            if free == 0 && !bytes.is_empty() {
                return Err(io::ErrorKind::StorageFull.into());
            }
            let n = self.0.write(&bytes[..bytes.len().min(free as usize)])?;
            self.1.fetch_sub(n as u64, Ordering::Relaxed);
            Ok(n)
        }
        fn flush(&mut self) -> io::Result<()> {
            self.0.flush()
        }
    }

    impl StorageFile for SmallDiskFile {
        fn sync(&mut self) -> io::Result<()> {
            self.0.sync_all()
        }
    }

    impl Storage for SmallDisk {
        fn create(&self, path: &Path) -> io::Result<Box<dyn StorageFile>> {
            Ok(Box::new(SmallDiskFile(File::create_new(path)?, self.0.clone())))
        }
    }

    #[test]
    fn a_failed_write_leaves_only_the_old_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("latest");
        write_atomically(&RealStorage, &path, b"old").unwrap();
        let error = write_atomically(&SmallDisk::with_capacity(2), &path, b"newer").unwrap_err();
        assert!(is_disk_full(&error));
        assert_eq!(fs::read(&path).unwrap(), b"old");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        write_atomically(&RealStorage, &path, b"newer").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"newer");
    }
}
