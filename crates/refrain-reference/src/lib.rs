//! The obvious version of every op.
//!
//! Invariant: nothing here is clever; everything fast is tested against it.
