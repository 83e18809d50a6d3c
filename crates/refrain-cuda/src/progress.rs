//! What is heard while a model is brought to a device.

use std::sync::Arc;

use crate::resident::Accounting;

/// One thing to know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LoadEvent {
    /// Everything has its place; nothing was allocated yet. What does not fit is refused after it.
    Planned(Accounting),
    /// Weights were handed to the device.
    Sent {
        /// Bytes so far.
        done_bytes: u64,
        /// Bytes in all.
        total_bytes: u64,
    },
    /// Kernels that a plan needs are being compiled: neither the binary nor the cache has them.
    Compiling {
        /// Units that are compiled.
        n_done: usize,
        /// Units to compile for the plan.
        n_total: usize,
    },
}

/// Somebody who hears it, on the device's thread: whoever takes long keeps the weights waiting.
#[derive(Clone)]
pub struct LoadListener(Arc<dyn Fn(LoadEvent) + Send + Sync>);

impl LoadListener {
    /// Calls `f` for each event.
    pub fn new(f: impl Fn(LoadEvent) + Send + Sync + 'static) -> LoadListener {
        LoadListener(Arc::new(f))
    }

    pub(crate) fn hear(&self, event: LoadEvent) {
        (self.0)(event);
    }
}

impl Default for LoadListener {
    fn default() -> LoadListener {
        LoadListener::new(|_| {})
    }
}

impl std::fmt::Debug for LoadListener {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("LoadListener")
    }
}
