//! The case table, one file per group of kernel families.

pub mod attend;
pub mod attention;
pub mod batch;
pub mod dense;
pub mod elementwise;
pub mod experts;
pub mod few;
pub mod lora;
pub mod product;
pub mod prompt;
pub mod recurrent;
pub mod sample;
pub mod train;
pub mod training;
