//! From training files to batches.
//!
//! Files are read in chunks, tokenized on several threads and stored at four bytes per token ([`Corpus`]). A
//! [`Loader`] packs documents into rows and prepares batches ahead. The sequence of batches depends only on
//! the corpus, the seed and a small [`DataPosition`].

mod error; // errors
mod read; // reading files in chunks and lines
mod sample; // samples in JSONL
mod encode; // samples to tokens with target marks
mod reader; // texts for training a tokenizer
mod corpus; // all tokens
mod order; // shuffling
mod pack; // packing documents into rows
mod batch; // rows as arrays
mod loader; // preparing batches ahead
#[cfg(test)]
mod fixtures;
#[cfg(test)]
mod tests;

pub use batch::Batch;
pub use corpus::{Corpus, CorpusOptions, DataReport};
pub use encode::Encoder;
pub use error::DataError;
pub use loader::{Batches, DataPosition, Loader, LoaderOptions, Passes, PreparedBatch};
pub use order::Permutation;
pub use reader::TextReader;
