//! The case table, one file per group of families.

pub mod attention;
pub mod dense;
pub mod elementwise;
pub mod prompt;
pub mod sample;
