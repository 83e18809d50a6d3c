//! What threads of the host, and the device, agree on: state machines without a driver, a clock or a log.
//!
//! Invariant: a file here takes its atomics and locks from [`sync`] alone. `tests/loom_protocols.rs` compiles the same
//! files over loom's versions of those and runs them through every interleaving.

pub(crate) mod sync;

pub(crate) mod entries; // whose turn an entry of the ring is
pub(crate) mod gate; // who owns the device, whether it records, what waits to be freed
pub(crate) mod busy; // what the device thread is busy with
pub(crate) mod watch; // breaking a recording off without touching one that has ended
