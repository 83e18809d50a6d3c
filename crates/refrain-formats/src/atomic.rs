//! Files that appear under their name only when they are complete.

use crate::FormatError;
use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// A file being written. Until [`AtomicFile::commit`], nothing exists under its name, or the old file does.
///
/// On Linux the file has no name at all until then, so that even a killed process leaves nothing behind. Where the file
/// system cannot do that, it is named `NAME.part`, and the next attempt overwrites it.
#[derive(Debug)]
pub struct AtomicFile {
    file: File,
    path: PathBuf,
    part: Option<PathBuf>, // the name until the commit, if it has one
}

impl AtomicFile {
    /// Starts a file for `path`, in the same folder.
    pub fn create(path: &Path) -> Result<AtomicFile, FormatError> {
        let failed = |error| FormatError::io("create", path, error);
        if path.is_dir() {
            return Err(failed(io::ErrorKind::IsADirectory.into()));
        }
        match unnamed::create(folder_of(path)) {
            Ok(Some(file)) => return Ok(AtomicFile { file, path: path.to_owned(), part: None }),
            Ok(None) => {}
            Err(error) => return Err(failed(error)),
        }
        let part = part_of(path);
        let file = File::create(&part).map_err(|error| FormatError::io("create", &part, error))?;
        Ok(AtomicFile { file, path: path.to_owned(), part: Some(part) })
    }

    /// Waits until the content is on the disk, then gives the file its name. An existing file is replaced.
    pub fn commit(mut self) -> Result<(), FormatError> {
        let moved = self.try_commit();
        moved.map_err(|error| FormatError::io("write", &self.path, error))
    }

    fn try_commit(&mut self) -> io::Result<()> {
        self.file.sync_all()?;
        let part = match self.part.clone() {
            Some(part) => part,
            None => {
                let part = part_of(&self.path);
                // Left by a process that was killed between the next two steps.
                match std::fs::remove_file(&part) {
                    Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                    _ => {}
                }
                unnamed::link(&self.file, &part)?;
                self.part.insert(part).clone()
            }
        };
        std::fs::rename(&part, &self.path)?;
        self.part = None;
        // The new name survives a power failure only once the folder is on the disk. Not every file system can sync one.
        if let Err(error) = File::open(folder_of(&self.path)).and_then(|folder| folder.sync_all()) {
            tracing::debug!(%error, path = %self.path.display(), "could not sync the folder of a new file");
        }
        Ok(())
    }
}

impl Write for AtomicFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

impl Drop for AtomicFile {
    fn drop(&mut self) {
        if let Some(part) = &self.part
            && let Err(error) = std::fs::remove_file(part)
        {
            tracing::debug!(%error, path = %part.display(), "could not remove a half-written file");
        }
    }
}

fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

fn part_of(path: &Path) -> PathBuf {
    let mut part = path.as_os_str().to_owned();
    part.push(".part");
    part.into()
}

#[cfg(target_os = "linux")]
mod unnamed {
    use rustix::fs::{AtFlags, CWD, linkat};
    use std::fs::{File, OpenOptions};
    use std::io;
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::OpenOptionsExt;
    use std::path::Path;

    /// Opens a file without a name; `None` if the file system has no such files or `/proc` cannot name it later.
    pub(super) fn create(folder: &Path) -> io::Result<Option<File>> {
        if !Path::new("/proc/self/fd").is_dir() {
            return Ok(None);
        }
        let opened = OpenOptions::new().read(true).write(true).custom_flags(libc::O_TMPFILE).open(folder);
        match opened {
            Ok(file) => Ok(Some(file)),
            // Kernels and file systems without it answer in one of these ways.
            Err(error)
                if matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EISDIR | libc::EINVAL)) =>
            {
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    pub(super) fn link(file: &File, path: &Path) -> io::Result<()> {
        let name = format!("/proc/self/fd/{}", file.as_raw_fd());
        Ok(linkat(CWD, name, CWD, path, AtFlags::SYMLINK_FOLLOW)?)
    }
}

#[cfg(not(target_os = "linux"))]
mod unnamed {
    use std::fs::File;
    use std::io;
    use std::path::Path;

    pub(super) fn create(_folder: &Path) -> io::Result<Option<File>> {
        Ok(None)
    }

    pub(super) fn link(_file: &File, _path: &Path) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let mut names: Vec<String> =
            folder.read_dir().unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn a_file_appears_when_it_is_committed_and_replaces_the_old_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("out.bin");
        std::fs::write(&path, "old").unwrap();
        let mut file = AtomicFile::create(&path).unwrap();
        file.write_all(b"new").unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"old");
        file.commit().unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"new");
        assert_eq!(names(folder.path()), ["out.bin"]);
    }

    #[test]
    fn an_abandoned_file_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let mut file = AtomicFile::create(&folder.path().join("out.bin")).unwrap();
        file.write_all(b"half").unwrap();
        drop(file);
        assert!(names(folder.path()).is_empty());
    }

    #[test]
    fn a_folder_that_does_not_exist_is_an_error_with_the_path() {
        let error = AtomicFile::create(Path::new("/nowhere/at/all.gguf")).unwrap_err();
        assert_eq!(error.to_string(), "cannot create /nowhere/at/all.gguf");
    }
}
