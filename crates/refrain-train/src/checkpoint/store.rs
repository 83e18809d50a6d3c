//! The checkpoints of a run.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use super::error::CheckpointError;
use super::save::{self, Fetch};
use super::{FileSpec, RunState, STATE};
use crate::storage::{RealStorage, Storage, is_temporary, sync_folder, temporary_path, write_atomically};

const LATEST: &str = "latest";
const BEST: &str = "best";
const LOCK: &str = ".lock";
const PREFIX: &str = "step-";

/// A run's folder of checkpoints. No other process saves there while this value lives.
pub struct CheckpointStore {
    folder: PathBuf,
    storage: Box<dyn Storage>,
    _lock: File,
}

impl std::fmt::Debug for CheckpointStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CheckpointStore").field("folder", &self.folder).finish_non_exhaustive()
    }
}

/// Input of [`CheckpointStore::save`].
#[derive(Debug, Clone, Copy)]
pub struct SaveRequest<'a> {
    /// State of the run, besides its tensors.
    pub state: &'a RunState,
    /// Files to write.
    pub files: &'a [FileSpec],
    /// Whether its held-out loss is the lowest so far.
    pub is_best: bool,
    /// Number of checkpoints to keep, besides the best one; at least 1.
    pub keep: usize,
}

impl CheckpointStore {
    /// Opens a folder, creating it if necessary, and removes the remains of interrupted saves.
    pub fn open(folder: &Path) -> Result<Self, CheckpointError> {
        Self::open_on(folder, Box::new(RealStorage))
    }

    /// The same on a given storage.
    pub fn open_on(folder: &Path, storage: Box<dyn Storage>) -> Result<Self, CheckpointError> {
        fs::create_dir_all(folder).map_err(CheckpointError::write(folder, 0))?;
        let path = folder.join(LOCK);
        let lock = OpenOptions::new().create(true).truncate(false).write(true).open(&path);
        let lock = lock.map_err(CheckpointError::write(&path, 0))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(CheckpointError::Busy { path: folder.to_owned() }),
            Err(TryLockError::Error(error)) => return Err(CheckpointError::write(&path, 0)(error)),
        }
        for name in names_in(folder)? {
            if is_temporary(&name, PREFIX) {
                remove(&folder.join(name));
            }
        }
        Ok(Self { folder: folder.to_owned(), storage, _lock: lock })
    }

    /// The folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The folder of the newest checkpoint, if there is one.
    pub fn latest(&self) -> Result<Option<PathBuf>, CheckpointError> {
        pointed(&self.folder, LATEST)
    }

    /// The folder of the checkpoint with the lowest held-out loss, if there is one.
    pub fn best(&self) -> Result<Option<PathBuf>, CheckpointError> {
        pointed(&self.folder, BEST)
    }

    /// Saves a checkpoint and returns its folder. The checkpoint appears atomically; on failure, the previous
    /// state is kept.
    pub fn save(&self, request: &SaveRequest<'_>, fetch: &mut Fetch<'_>) -> Result<PathBuf, CheckpointError> {
        let n_bytes = save::check(request.files)?;
        let path = self.free_name(request.state.step)?;
        let temporary = temporary_path(&path);
        let mut write = || {
            fs::create_dir(&temporary).map_err(CheckpointError::write(&temporary, n_bytes))?;
            let storage = &*self.storage;
            save::write_folder(storage, &temporary, request.state, request.files, fetch, n_bytes)?;
            sync_folder(&temporary).map_err(CheckpointError::write(&temporary, n_bytes))?;
            fs::rename(&temporary, &path).map_err(CheckpointError::write(&path, n_bytes))?;
            sync_folder(&self.folder).map_err(CheckpointError::write(&self.folder, n_bytes))
        };
        write().inspect_err(|_| remove(&temporary))?;
        // Without a pointer the new folder is useless; the previous checkpoint is still the latest.
        self.point(LATEST, &path, n_bytes).inspect_err(|_| remove(&path))?;
        if request.is_best {
            self.point(BEST, &path, n_bytes)?;
        }
        self.prune(request.keep);
        Ok(path)
    }

    fn point(&self, pointer: &str, to: &Path, n_bytes: u64) -> Result<(), CheckpointError> {
        let path = self.folder.join(pointer);
        let name = to.file_name().unwrap_or_default().to_string_lossy();
        let written = write_atomically(&*self.storage, &path, format!("{name}\n").as_bytes());
        written.map_err(CheckpointError::write(&path, n_bytes))
    }

    /// An unused folder name for a step, since saving the same step again must not replace the checkpoint.
    fn free_name(&self, step: u64) -> Result<PathBuf, CheckpointError> {
        let taken = names_in(&self.folder)?;
        let name = format!("{PREFIX}{step:08}");
        let names = std::iter::once(name.clone()).chain((1..).map(|n| format!("{name}-{n}")));
        let free = names.into_iter().find(|name| !taken.contains(name)).unwrap_or(name);
        Ok(self.folder.join(free))
    }

    /// Removes the oldest checkpoints. Failures are logged and harmless.
    fn prune(&self, keep: usize) {
        let pointed = [LATEST, BEST].map(|pointer| pointed(&self.folder, pointer).ok().flatten());
        let (Some(latest), best) = (&pointed[0], &pointed[1]) else { return };
        let mut others = checkpoints_in(&self.folder).unwrap_or_default();
        others.retain(|(_, path)| path != latest && Some(path) != best.as_ref());
        let n_kept = keep.saturating_sub(1);
        let n_removed = others.len().saturating_sub(n_kept);
        others.iter().take(n_removed).for_each(|(_, path)| remove(path));
    }
}

/// The folder of a checkpoint: the given one, or the latest one in it.
pub(super) fn resolve(path: &Path) -> Result<PathBuf, CheckpointError> {
    if path.join(STATE).is_file() {
        return Ok(path.to_owned());
    }
    pointed(path, LATEST)?.ok_or_else(|| CheckpointError::NotFound { path: path.to_owned() })
}

/// The checkpoint that a pointer file names.
fn pointed(folder: &Path, pointer: &str) -> Result<Option<PathBuf>, CheckpointError> {
    const MAX_BYTES: u64 = 256;
    let path = folder.join(pointer);
    let mut name = String::new();
    match File::open(&path).and_then(|file| file.take(MAX_BYTES).read_to_string(&mut name)) {
        Ok(_) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(CheckpointError::read(&path)(error)),
    }
    let name = name.trim();
    let target = folder.join(name);
    if !name.starts_with(PREFIX) || name.contains(['/', '\\']) || !target.join(STATE).is_file() {
        let available = checkpoints_in(folder)?.into_iter().map(|(_, path)| path.display().to_string());
        let available = available.collect();
        return Err(CheckpointError::Pointer { path, name: name.to_owned(), available });
    }
    Ok(Some(target))
}

/// A checkpoint with its step and the number of earlier saves of that step.
type Numbered = ((u64, u64), PathBuf);

/// All checkpoints, oldest first.
fn checkpoints_in(folder: &Path) -> Result<Vec<Numbered>, CheckpointError> {
    let number = |name: &str| -> Option<(u64, u64)> {
        let (step, again) = match name.strip_prefix(PREFIX)?.split_once('-') {
            Some((step, again)) => (step, again.parse().ok()?),
            None => (name.strip_prefix(PREFIX)?, 0),
        };
        Some((step.parse().ok()?, again))
    };
    let names = names_in(folder)?.into_iter();
    let mut found: Vec<_> = names.filter_map(|name| Some((number(&name)?, folder.join(name)))).collect();
    found.retain(|(_, path)| path.join(STATE).is_file());
    found.sort();
    Ok(found)
}

fn names_in(folder: &Path) -> Result<Vec<String>, CheckpointError> {
    let entries = fs::read_dir(folder).map_err(CheckpointError::read(folder))?;
    Ok(entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect())
}

/// Removes a folder that no pointer names.
fn remove(path: &Path) {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            tracing::warn!(path = %path.display(), %error, "cannot remove an old checkpoint");
        }
        _ => {}
    }
}
