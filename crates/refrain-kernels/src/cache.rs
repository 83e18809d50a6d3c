//! On-disk cache of compiled code, safe for concurrent processes.
//!
//! A file is named by the digest of everything that went into the code, and starts with a digest of its
//! remaining content. It is written under a temporary name and renamed, so a reader sees a complete file or
//! none, and damage is detected. The cache is optional: its failures are warnings.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use sha2::{Digest, Sha256};

const MAGIC: &[u8; 8] = b"refrainK";
const DIGEST_BYTES: usize = 32;

/// A folder of compiled kernels.
#[derive(Debug)]
pub(crate) struct KernelCache {
    folder: PathBuf,
}

impl KernelCache {
    /// A cache in a folder. The first write creates the folder.
    #[must_use]
    pub(crate) fn open(folder: &Path) -> KernelCache {
        KernelCache { folder: folder.to_owned() }
    }

    /// Digest of all parts in hex, used as the name of the result.
    #[must_use]
    pub(crate) fn key(parts: &[&[u8]]) -> String {
        let mut digest = Sha256::new();
        for part in parts {
            // Length first, so that different lists of parts never concatenate to the same bytes.
            digest.update((part.len() as u64).to_le_bytes());
            digest.update(part);
        }
        digest.finalize().iter().map(|b| format!("{b:02x}")).collect()
    }

    /// The code stored under a key, if present and undamaged.
    #[must_use]
    pub(crate) fn get(&self, key: &str) -> Option<Vec<u8>> {
        let path = self.path(key);
        let bytes = match fs::read(&path) {
            Ok(bytes) => bytes,
            Err(e) => {
                if e.kind() != std::io::ErrorKind::NotFound {
                    tracing::warn!("cannot read kernel cache {}: {e}", path.display());
                }
                return None;
            }
        };
        let body = bytes.get(MAGIC.len() + DIGEST_BYTES..).unwrap_or_default();
        let intact = bytes.starts_with(MAGIC)
            && !body.is_empty()
            && Sha256::digest(body)[..] == bytes[MAGIC.len()..MAGIC.len() + DIGEST_BYTES];
        if !intact {
            tracing::warn!(
                "kernel cache {} is damaged ({} bytes), compiling again",
                path.display(),
                bytes.len()
            );
            return None;
        }
        Some(body.to_vec())
    }

    /// Stores code under a key. Returns false, after a warning, if that failed.
    pub(crate) fn put(&self, key: &str, code: &[u8]) -> bool {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let turn = NEXT.fetch_add(1, Ordering::Relaxed);
        let temporary = self.folder.join(format!("{key}.{}.{turn}.tmp", std::process::id()));
        let bytes = [MAGIC.as_slice(), &Sha256::digest(code), code].concat();
        let written = fs::create_dir_all(&self.folder)
            .and_then(|()| fs::write(&temporary, bytes))
            .and_then(|()| fs::rename(&temporary, self.path(key)));
        if let Err(e) = &written {
            // A leftover temporary file is harmless, and the warning below already names the folder.
            let _ = fs::remove_file(&temporary);
            tracing::warn!(
                "cannot write kernel cache {}: {e}; the next start compiles again",
                self.folder.display()
            );
        }
        written.is_ok()
    }

    fn path(&self, key: &str) -> PathBuf {
        self.folder.join(format!("{key}.kernels"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_is_read_back_complete_or_not_at_all() {
        let folder = tempfile::tempdir().unwrap();
        let cache = KernelCache::open(&folder.path().join("new"));
        let key = KernelCache::key(&[b"source", b"options"]);
        assert_eq!(cache.get(&key), None);
        assert!(cache.put(&key, b"machine code"));
        assert_eq!(cache.get(&key).as_deref(), Some(b"machine code".as_slice()));

        let path = cache.path(&key);
        let intact = fs::read(&path).unwrap();
        for cut in [0, 1, MAGIC.len(), intact.len() - 1] {
            fs::write(&path, &intact[..cut]).unwrap();
            assert_eq!(cache.get(&key), None, "{cut} bytes");
        }
        let mut wrong = intact.clone();
        *wrong.last_mut().unwrap() ^= 1;
        fs::write(&path, &wrong).unwrap();
        assert_eq!(cache.get(&key), None);
        assert!(cache.put(&key, b"machine code"), "a damaged file is replaced");
        assert!(cache.get(&key).is_some());
    }

    #[test]
    fn an_unwritable_folder_is_not_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs::write(&file, b"in the way").unwrap();
        let cache = KernelCache::open(&file);
        assert!(!cache.put("key", b"code"));
        assert_eq!(cache.get("key"), None);
    }

    #[test]
    fn concurrent_writers_of_one_key_leave_one_complete_file() {
        let folder = tempfile::tempdir().unwrap();
        let code = vec![7_u8; 100_000];
        std::thread::scope(|s| {
            for _ in 0..4 {
                s.spawn(|| {
                    let cache = KernelCache::open(folder.path());
                    for _ in 0..10 {
                        assert!(cache.put("key", &code));
                        assert_eq!(cache.get("key").as_deref(), Some(code.as_slice()));
                    }
                });
            }
        });
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn keys_depend_on_part_boundaries() {
        assert_ne!(KernelCache::key(&[b"ab", b"c"]), KernelCache::key(&[b"a", b"bc"]));
        assert_eq!(KernelCache::key(&[b"ab"]).len(), 64);
    }
}
