//! The built-in models.

use crate::error::Error;
use crate::model::Model;
use refrain_formats::ModelFiles;
use refrain_formats::gguf::Gguf;
use refrain_tensor::Bytes;

/// A model that is part of the library. Both are small and make many mistakes. `tools/stories` in the repository trained
/// them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Builtin {
    /// Continues simple stories. It has no chat template.
    Stories,
    /// The story model, trained further to answer in a chat.
    Chat,
}

impl Builtin {
    /// All of them.
    pub const ALL: [Builtin; 2] = [Builtin::Stories, Builtin::Chat];

    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Builtin::Stories => "stories",
            Builtin::Chat => "chat",
        }
    }

    /// Finds a built-in model by name, in any case.
    pub fn named(name: &str) -> Option<Builtin> {
        Builtin::ALL.into_iter().find(|builtin| builtin.name().eq_ignore_ascii_case(name))
    }

    /// Opens its files.
    pub fn files(self) -> Result<ModelFiles, Error> {
        let (origin, bytes): (_, &'static [u8]) = match self {
            Builtin::Stories => ("the built-in story model", include_bytes!("../assets/stories.gguf")),
            Builtin::Chat => ("the built-in chat model", include_bytes!("../assets/chat.gguf")),
        };
        Ok(ModelFiles::Gguf(Gguf::from_named_bytes(origin, Bytes::new(bytes))?))
    }

    /// Opens and checks the model.
    pub fn open(self) -> Result<Model, Error> {
        Model::from_files(self.files()?)
    }
}
