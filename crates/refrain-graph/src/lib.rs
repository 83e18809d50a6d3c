//! The graph IR: ops, shape rules, passes, memory plan, segments and the `Backend` trait.
//!
//! Invariant: no device, no input or output, no `unsafe`.
