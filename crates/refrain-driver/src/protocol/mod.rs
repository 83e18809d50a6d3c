//! Protocols between host threads, and between host and device, as state machines without a driver, a clock or a
//! log.
//!
//! Invariant: files here take their atomics and locks only from [`sync`]. `tests/loom_protocols.rs` compiles the
//! same files against loom's versions and runs them through every interleaving.

pub(crate) mod sync;

pub(crate) mod entries; // who may access an entry of the ring
pub(crate) mod gate; // ownership of the device, recording state, deferred frees
pub(crate) mod busy; // the device thread's current request
pub(crate) mod watch; // aborting a recording without touching one that has ended
