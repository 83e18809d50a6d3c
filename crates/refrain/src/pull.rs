//! Models by name: from the local store, or downloaded first.

use crate::error::Error;
use crate::model::Model;
use refrain_hub::{Env, ModelName, Progress, Store};

impl Model {
    /// Opens a model by name: a path, a short name such as `smollm2`, or `owner/repo[:QUANT]`. A model that is not in the
    /// local store is downloaded first. `refrain_hub::Silent` is a `Progress` that shows nothing.
    pub fn pull(name: &str, progress: &mut dyn Progress) -> Result<Model, Error> {
        let store = Store::open(Env::read());
        let name = ModelName::parse(name)?;
        let found = match store.find(&name)? {
            Some(model) => model,
            None => store.pull(&name, progress)?,
        };
        Model::open(found.path)
    }
}
