//! One file per architecture, as graph builders, and the maps from weight names.
//!
//! Invariant: no file here names a backend.
