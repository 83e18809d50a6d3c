//! Progress events while a model is loaded.

use std::sync::Arc;

use crate::resident::Accounting;

/// A progress event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LoadEvent {
    /// Memory is planned and not yet allocated. If it does not fit, a refusal follows.
    Planned(Accounting),
    /// Weights have been handed to the device.
    Uploaded {
        /// Bytes uploaded so far.
        done_bytes: u64,
        /// Bytes to upload.
        total_bytes: u64,
    },
    /// Kernels of a plan are being compiled: neither the binary nor the cache has them.
    Compiling {
        /// Units compiled so far.
        n_done: usize,
        /// Units to compile for the plan.
        n_total: usize,
    },
}

/// A callback for progress events. It runs on the device thread, so a slow one delays the upload.
#[derive(Clone)]
pub struct LoadListener(Arc<dyn Fn(LoadEvent) + Send + Sync>);

impl LoadListener {
    /// Calls `f` for each event.
    pub fn new(f: impl Fn(LoadEvent) + Send + Sync + 'static) -> LoadListener {
        LoadListener(Arc::new(f))
    }

    pub(crate) fn report(&self, event: LoadEvent) {
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
