//! Memory-mapped files: the only module of this crate with `unsafe`.

use crate::FormatError;
use memmap2::Mmap;
use refrain_tensor::{Bytes, Owner};
use std::fs::File;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// A mapped file. Cloning shares the mapping.
#[derive(Clone, Debug)]
pub(crate) struct Mapped(Option<Arc<Mapping>>); // `None` for an empty file, which cannot be mapped everywhere

impl Mapped {
    /// Maps a regular file for reading.
    pub(crate) fn open(path: &Path) -> Result<Mapped, FormatError> {
        let meta = std::fs::metadata(path).map_err(|e| FormatError::io("open", path, e))?;
        // Checked before the file is opened, because opening a pipe blocks until its other end is opened.
        require_file(path, &meta)?;
        let file = File::open(path).map_err(|e| FormatError::io("open", path, e))?;
        let meta = file.metadata().map_err(|e| FormatError::io("read", path, e))?;
        if meta.len() == 0 {
            return Ok(Mapped(None));
        }
        let map = map(&file).map_err(|e| FormatError::io("map", path, e))?;
        Ok(Mapped(Some(Arc::new(Mapping { map, file }))))
    }

    /// The bytes of the file.
    pub(crate) fn bytes(&self) -> Bytes {
        match &self.0 {
            Some(map) => Bytes::shared(map.clone()),
            None => Bytes::new(Vec::new()),
        }
    }

    /// Asks the system to prefetch the whole file. This is advice: a refusal only costs speed.
    pub(crate) fn prefetch(&self) {
        #[cfg(unix)]
        if let Some(map) = &self.0
            && let Err(error) = map.map.advise(memmap2::Advice::WillNeed)
        {
            tracing::debug!(%error, "the system refused to prefetch a file");
        }
    }
}

impl Mapped {
    /// Lets the system drop the file's resident pages. Later reads load them again.
    pub(crate) fn release(&self) {
        if let Some(map) = &self.0 {
            map.release(0..map.map.len());
        }
    }
}

/// A file's mapping, shared by its tensors.
#[derive(Debug)]
struct Mapping {
    map: Mmap,
    file: File,
}

impl AsRef<[u8]> for Mapping {
    fn as_ref(&self) -> &[u8] {
        &self.map
    }
}

impl Owner for Mapping {
    fn release(&self, range: Range<usize>) {
        #[cfg(unix)]
        if let Err(error) = dont_need(&self.map, range) {
            tracing::debug!(%error, "the system refused to drop the pages of a file");
        }
        #[cfg(not(unix))]
        let _ = range;
    }

    fn can_evict(&self) -> bool {
        cfg!(unix)
    }

    fn evict(&self, range: Range<usize>) {
        // Unmap the pages first: the page cache keeps mapped pages.
        self.release(range.clone());
        if let Err(error) = drop_cached(&self.file, range) {
            tracing::debug!(%error, "the system refused to drop a file from its cache");
        }
    }
}

/// Drops whole pages of a file from the page cache. Pages that other processes have mapped stay.
#[cfg(target_os = "linux")]
#[allow(unsafe_code)]
fn drop_cached(file: &File, range: Range<usize>) -> std::io::Result<()> {
    use std::os::fd::AsRawFd;
    let too_large = |_| std::io::Error::from(std::io::ErrorKind::InvalidInput);
    let start = libc::off_t::try_from(range.start).map_err(too_large)?;
    let len = libc::off_t::try_from(range.len()).map_err(too_large)?;
    // SAFETY: the call neither reads nor writes memory of this process; `file` keeps the descriptor open.
    match unsafe { libc::posix_fadvise(file.as_raw_fd(), start, len, libc::POSIX_FADV_DONTNEED) } {
        0 => Ok(()),
        code => Err(std::io::Error::from_raw_os_error(code)),
    }
}

#[cfg(not(target_os = "linux"))]
fn drop_cached(_file: &File, _range: Range<usize>) -> std::io::Result<()> {
    Ok(())
}

#[cfg(unix)]
#[allow(unsafe_code)]
fn dont_need(map: &Mmap, range: Range<usize>) -> std::io::Result<()> {
    let range = range.start.min(map.len())..range.end.min(map.len());
    // SAFETY: the advice can change the content only of private or written pages. `map` below maps files shared and
    // read-only, so a dropped page is loaded again with the same bytes, and slices into it stay valid.
    unsafe { map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, range.start, range.len()) }
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
    // SAFETY: a mapping is sound while nobody writes to or truncates the file. The mapping is read-only, so nothing in
    // this process writes through it. The user must ensure that other processes leave a model file alone while it is
    // in use, as for every program that maps weights. To limit the damage of a violation, no reader relies on a byte
    // keeping its value: text is copied before it is checked, and tensor data have no invalid bit patterns. Reading a
    // truncated file ends the process with SIGBUS; it cannot corrupt memory.
    unsafe { Mmap::map(file) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn released_and_evicted_pages_keep_their_content() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("weights");
        let content: Vec<u8> = (0..100_000u32).map(|i| ((i * 31) >> 3) as u8).collect();
        std::fs::write(&path, &content).unwrap();
        let mapped = Mapped::open(&path).unwrap();
        let part = mapped.bytes().slice(5_001..70_003).unwrap();
        assert_eq!(part.as_slice(), &content[5_001..70_003]);
        part.release();
        assert_eq!(part.as_slice(), &content[5_001..70_003]);
        part.slice(0..0).unwrap().release();
        assert!(part.can_evict());
        part.evict();
        assert_eq!(part.as_slice(), &content[5_001..70_003]);
        mapped.release();
        assert_eq!(mapped.bytes().as_slice(), content);
    }
}
