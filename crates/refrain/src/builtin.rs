//! The models inside the library.

use crate::error::Error;
use crate::model::Model;
use refrain_formats::ModelFiles;
use refrain_formats::gguf::Gguf;
use refrain_tensor::Bytes;

/// A model inside the library. Both are small and make many mistakes; `tools/stories` of the repository is how they
/// were made.
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

    /// The name it is known by.
    pub const fn name(self) -> &'static str {
        match self {
            Builtin::Stories => "stories",
            Builtin::Chat => "chat",
        }
    }

    /// The one of that name, in upper or lower case.
    pub fn named(name: &str) -> Option<Builtin> {
        Builtin::ALL.into_iter().find(|builtin| builtin.name().eq_ignore_ascii_case(name))
    }

    /// Its files.
    pub fn files(self) -> Result<ModelFiles, Error> {
        let (origin, bytes): (_, &'static [u8]) = match self {
            Builtin::Stories => ("the built-in story model", include_bytes!("../assets/stories.gguf")),
            Builtin::Chat => ("the built-in chat model", include_bytes!("../assets/chat.gguf")),
        };
        Ok(ModelFiles::Gguf(Gguf::from_named_bytes(origin, Bytes::new(bytes))?))
    }

    /// Opens and checks it.
    pub fn open(self) -> Result<Model, Error> {
        Model::from_files(self.files()?)
    }
}
