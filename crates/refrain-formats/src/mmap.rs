//! Files mapped into memory: the one place of this crate with `unsafe`.

use crate::FormatError;
use memmap2::Mmap;
use refrain_tensor::Bytes;
use std::fs::File;
use std::path::Path;
use std::sync::Arc;

/// A mapped file. Cloning shares the mapping.
#[derive(Clone, Debug)]
pub(crate) struct Mapped(Option<Arc<Mmap>>); // `None` for an empty file, which cannot be mapped everywhere

impl Mapped {
    /// Maps a regular file for reading.
    pub(crate) fn open(path: &Path) -> Result<Mapped, FormatError> {
        let meta = std::fs::metadata(path).map_err(|e| FormatError::io("open", path, e))?;
        // Asked before the file is opened: opening a pipe waits for its other end.
        require_file(path, &meta)?;
        let file = File::open(path).map_err(|e| FormatError::io("open", path, e))?;
        let meta = file.metadata().map_err(|e| FormatError::io("read", path, e))?;
        if meta.len() == 0 {
            return Ok(Mapped(None));
        }
        Ok(Mapped(Some(Arc::new(map(&file).map_err(|e| FormatError::io("map", path, e))?))))
    }

    /// The bytes of the file.
    pub(crate) fn bytes(&self) -> Bytes {
        match &self.0 {
            Some(map) => Bytes::shared(map.clone()),
            None => Bytes::new(Vec::new()),
        }
    }

    /// Asks the system to read the whole file ahead. Advice only: a refusal changes nothing but speed.
    pub(crate) fn prefetch(&self) {
        #[cfg(unix)]
        if let Some(map) = &self.0
            && let Err(error) = map.advise(memmap2::Advice::WillNeed)
        {
            tracing::debug!(%error, "the system does not read ahead");
        }
    }
}

impl Mapped {
    /// Tells the system that the file's pages will hardly be read any more, so that they need not stay resident. They
    /// are read again from the file when they are.
    pub(crate) fn release(&self) {
        #[cfg(unix)]
        if let Some(map) = &self.0
            && let Err(error) = dont_need(map)
        {
            tracing::debug!(%error, "the system keeps the pages of a file");
        }
    }
}

#[cfg(unix)]
#[allow(unsafe_code)]
fn dont_need(map: &Mmap) -> std::io::Result<()> {
    // SAFETY: the advice may change what memory holds only where it is private or was written to. `map` below maps
    // files shared and for reading only, so a dropped page comes back from the file with the bytes it had, and
    // slices into it stay valid.
    unsafe { map.unchecked_advise(memmap2::UncheckedAdvice::DontNeed) }
}

/// Refuses folders, pipes and devices.
pub(crate) fn require_file(path: &Path, meta: &std::fs::Metadata) -> Result<(), FormatError> {
    if meta.is_file() {
        return Ok(());
    }
    Err(FormatError::NotAFile { path: path.to_owned() })
}

#[allow(unsafe_code)]
fn map(file: &File) -> std::io::Result<Mmap> {
    // SAFETY: a mapping is sound while nobody writes to or shortens the file underneath. The mapping is read-only,
    // so nothing in this process writes through it; that other processes leave a model file alone while it is in
    // use is asked of the user, as every program that maps weights must. To keep the damage of a breach small, no
    // reader relies on a byte keeping its value: text is copied out before it is checked, and tensor data have no
    // invalid bit patterns. A file that is shortened ends the process with SIGBUS; it cannot corrupt memory.
    unsafe { Mmap::map(file) }
}
