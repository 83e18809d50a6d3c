//! Training files to batches.
//!
//! Files are read in pieces, tokenized on several threads and held as four bytes a token ([`Corpus`]). A [`Loader`]
//! packs documents into rows and prepares batches ahead. What comes next is a function of the corpus, the seed and a
//! small [`DataPosition`].

mod error; // what can be wrong
mod read; // files in pieces and lines
mod sample; // a line of JSONL
mod encode; // samples to marked tokens
mod reader; // texts for a tokenizer
mod text; // large texts to tokens
mod corpus; // all tokens
mod order; // a new order each epoch
mod pack; // documents to rows
mod batch; // rows to arrays
mod loader; // batches ahead
#[cfg(test)]
mod fixtures;
#[cfg(test)]
mod tests;

pub use batch::Batch;
pub use corpus::{Corpus, CorpusOptions, DataReport};
pub use encode::Encoder;
pub use error::DataError;
pub use loader::{Batches, DataPosition, Loader, LoaderOptions, Passes, Prepared};
pub use order::Permutation;
pub use reader::TextReader;
