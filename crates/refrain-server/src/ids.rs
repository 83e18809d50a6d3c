//! Identifiers and clocks of replies.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

/// A fresh identifier such as `chatcmpl-9f86d081884c7d659a2feaa0c55ad015`.
pub(crate) fn fresh(prefix: &str) -> String {
    // Keyed hashes of a counter: unique within the process, and not to be guessed from outside.
    static KEYS: LazyLock<(RandomState, RandomState)> = LazyLock::new(Default::default);
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let half = |state: &RandomState| {
        let mut hasher = state.build_hasher();
        hasher.write_u64(count);
        hasher.finish()
    };
    format!("{prefix}{:016x}{:016x}", half(&KEYS.0), half(&KEYS.1))
}

/// Seconds since 1970.
pub(crate) fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
