//! One repository's folder in the hub's cache.
//!
//! The layout is that of the Hugging Face tools, which share the cache: `blobs` holds contents by checksum,
//! `snapshots/COMMIT` holds links to them by name, and `refs/BRANCH` names a commit. The locks are shared too.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use crate::disk::{self, Checksum, Lock};
use crate::error::HubError;
use crate::name::RepoName;

/// Suffix of an incomplete download.
pub(crate) const INCOMPLETE: &str = ".incomplete";

/// One repository's folder in the hub's cache.
#[derive(Debug, Clone)]
pub(crate) struct RepoCache {
    folder: PathBuf,
    locks: PathBuf,
}

impl RepoCache {
    pub(crate) fn new(hf_cache: &Path, repo: &RepoName) -> Self {
        let name = repo.cache_folder();
        Self { folder: hf_cache.join(&name), locks: hf_cache.join(".locks").join(&name) }
    }

    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    pub(crate) fn blobs(&self) -> PathBuf {
        self.folder.join("blobs")
    }

    pub(crate) fn blob(&self, checksum: &Checksum) -> PathBuf {
        self.blobs().join(checksum.hex())
    }

    pub(crate) fn incomplete(&self, checksum: &Checksum) -> PathBuf {
        self.blobs().join(format!("{}{INCOMPLETE}", checksum.hex()))
    }

    pub(crate) fn lock(&self, checksum: &Checksum) -> PathBuf {
        self.locks.join(format!("{}.lock", checksum.hex()))
    }

    pub(crate) fn snapshot(&self, commit: &str) -> PathBuf {
        self.folder.join("snapshots").join(commit)
    }

    /// Returns the local snapshot of a branch, tag or commit.
    pub(crate) fn current_snapshot(&self, revision: &str) -> Option<PathBuf> {
        let named = fs::read_to_string(self.folder.join("refs").join(revision)).ok();
        let commit = named.as_deref().map_or(revision, str::trim);
        Checksum::parse(commit)?;
        Some(self.snapshot(commit)).filter(|folder| folder.is_dir())
    }

    /// Returns whether a file's content is cached: as a blob or, on systems without links, in the snapshot itself.
    pub(crate) fn has(&self, commit: &str, path: &str, checksum: &Checksum, bytes: u64) -> bool {
        let is_whole =
            |path: PathBuf| fs::metadata(path).is_ok_and(|meta| meta.is_file() && meta.len() == bytes);
        is_whole(self.blob(checksum)) || is_whole(self.snapshot(commit).join(path))
    }

    /// Links a complete blob into the snapshot under its name.
    pub(crate) fn link(&self, commit: &str, path: &str, checksum: &Checksum) -> Result<(), HubError> {
        let link = self.snapshot(commit).join(path);
        let blob = self.blob(checksum);
        let in_place = match fs::read_link(&link) {
            Ok(target) => target.file_name() == blob.file_name() && link.is_file(),
            // On systems without links, the snapshot holds the content.
            Err(_) => link.is_file() && !blob.exists(),
        };
        if in_place {
            return Ok(());
        }
        if let Some(parent) = link.parent() {
            disk::create_dir(parent)?;
        }
        let up = "../".repeat(path.split('/').count() + 1);
        let target = format!("{up}blobs/{}", checksum.hex());
        // Created under a temporary name and renamed, so that a reader always finds the old or the new link.
        let temporary = disk::temporary_name(&link);
        let moved = match symlink(&target, &temporary) {
            Ok(()) => fs::rename(&temporary, &link),
            Err(_) => fs::rename(&blob, &link),
        };
        moved.map_err(|error| {
            let _ = fs::remove_file(&temporary);
            HubError::write(&link)(error)
        })
    }

    /// Records the commit of a branch.
    pub(crate) fn write_ref(&self, revision: &str, commit: &str) -> Result<(), HubError> {
        // A commit needs no ref.
        if revision == commit {
            return Ok(());
        }
        let path = self.folder.join("refs").join(revision);
        if fs::read_to_string(&path).is_ok_and(|now| now == commit) {
            return Ok(());
        }
        if let Some(parent) = path.parent() {
            disk::create_dir(parent)?;
        }
        disk::write_atomically(&path, commit.as_bytes())
    }

    /// Returns incomplete downloads with their sizes.
    pub(crate) fn incomplete_files(&self) -> Vec<(PathBuf, u64)> {
        let Ok(entries) = fs::read_dir(self.blobs()) else {
            return Vec::new();
        };
        let incomplete = entries.flatten().filter(|e| e.file_name().to_string_lossy().ends_with(INCOMPLETE));
        incomplete.filter_map(|entry| Some((entry.path(), entry.metadata().ok()?.len()))).collect()
    }

    /// Returns whether no snapshot holds a file.
    pub(crate) fn is_empty(&self) -> bool {
        disk::files_below(&self.folder.join("snapshots")).is_empty()
    }

    /// Removes the whole repository and returns the number of freed files and bytes.
    pub(crate) fn remove_all(&self) -> Result<(usize, u64), HubError> {
        let _locks = self.lock_everything()?;
        let n_files = disk::files_below(&self.blobs()).len();
        let bytes = disk::bytes_below(&self.folder);
        fs::remove_dir_all(&self.folder).map_err(HubError::write(&self.folder))?;
        Ok((n_files, bytes))
    }

    /// Removes files from every snapshot, and the blobs that are no longer linked.
    pub(crate) fn remove_files(&self, files: &[String]) -> Result<(usize, u64), HubError> {
        let _locks = self.lock_everything()?;
        let snapshots: Vec<_> = fs::read_dir(self.folder.join("snapshots"))
            .map_err(HubError::read(&self.folder))?
            .flatten()
            .map(|entry| entry.path())
            .collect();
        let mut orphans = BTreeSet::new();
        let (mut n_files, mut freed) = (0, 0);
        for file in snapshots.iter().flat_map(|snapshot| files.iter().map(move |file| snapshot.join(file))) {
            if let Ok(target) = fs::read_link(&file) {
                orphans.extend(target.file_name().map(|name| self.blobs().join(name)));
            } else if let Ok(meta) = fs::metadata(&file) {
                freed += meta.len();
            } else {
                continue;
            }
            disk::remove_file(&file)?;
            n_files += 1;
        }
        for snapshot in &snapshots {
            for file in disk::files_below(snapshot) {
                if let Ok(target) = fs::read_link(snapshot.join(file)) {
                    orphans.remove(&self.blobs().join(target.file_name().unwrap_or_default()));
                }
            }
        }
        for blob in orphans {
            freed += fs::metadata(&blob).map_or(0, |meta| meta.len());
            disk::remove_file(&blob)?;
        }
        Ok((n_files, freed))
    }

    /// Takes the locks of all blobs, so that nothing is removed during a pull.
    fn lock_everything(&self) -> Result<Vec<Lock>, HubError> {
        let Ok(entries) = fs::read_dir(&self.locks) else {
            return Ok(Vec::new());
        };
        entries.flatten().map(|entry| Lock::now(&entry.path())).collect()
    }
}

#[cfg(unix)]
fn symlink(target: &str, link: &Path) -> std::io::Result<()> {
    std::os::unix::fs::symlink(target, link)
}

#[cfg(windows)]
fn symlink(target: &str, link: &Path) -> std::io::Result<()> {
    std::os::windows::fs::symlink_file(target.replace('/', "\\"), link)
}

#[cfg(not(any(unix, windows)))]
fn symlink(_target: &str, _link: &Path) -> std::io::Result<()> {
    Err(std::io::ErrorKind::Unsupported.into())
}
