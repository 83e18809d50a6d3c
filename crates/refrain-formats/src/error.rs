//! Errors of model files. Each names the file and the location in it, and most have a hint.

use crate::gguf::{GgufFault, GgufLocation};
use crate::hf::HfFault;
use crate::params::ParamsFault;
use std::io;
use std::path::{Path, PathBuf};

/// An error while reading or writing model files.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FormatError {
    /// The operating system reported an error.
    #[error("cannot {verb} {}", path.display())]
    Io {
        /// Attempted operation: "open", "read", "map", "write", "list".
        verb: &'static str,
        /// File or folder.
        path: PathBuf,
        /// Error of the operating system.
        #[source]
        source: io::Error,
    },
    /// A folder, a pipe or a device where a file is needed.
    #[error("{} is not a regular file", path.display())]
    NotAFile {
        /// The path.
        path: PathBuf,
    },
    /// An empty file.
    #[error("{} is empty (0 bytes)", path.display())]
    Empty {
        /// The file.
        path: PathBuf,
    },
    /// A GGUF file that cannot be used.
    #[error("{}", gguf_message(file, place, fault))]
    Gguf {
        /// The file, or the name given to bytes in memory.
        file: PathBuf,
        /// Location in the file.
        place: GgufLocation,
        /// The fault.
        fault: Box<GgufFault>,
    },
    /// A file of a Hugging Face folder that cannot be used.
    #[error("{}: {fault}", file.display())]
    Hf {
        /// The file or folder.
        file: PathBuf,
        /// The fault.
        fault: Box<HfFault>,
    },
    /// Hyperparameters that are impossible or not supported.
    #[error("{}: {fault}", file.display())]
    Params {
        /// The file they were read from.
        file: PathBuf,
        /// The fault.
        fault: Box<ParamsFault>,
    },
    /// Neither a GGUF file nor a folder with a model.
    #[error("{} is not a model file: it starts with {}", path.display(), first_bytes(magic))]
    NotAModel {
        /// The file.
        path: PathBuf,
        /// Its first bytes, at most four.
        magic: Vec<u8>,
    },
    /// A folder without a model.
    #[error(
        "{} holds no model: looked for config.json with model.safetensors, and for *.gguf; found {}",
        path.display(), listing(found)
    )]
    NoModelInFolder {
        /// The folder.
        path: PathBuf,
        /// Names of its files.
        found: Vec<String>,
    },
    /// A folder with more than one model.
    #[error("{} holds {} models: {}", path.display(), models.len(), listing(models))]
    SeveralModels {
        /// The folder.
        path: PathBuf,
        /// Their file names.
        models: Vec<String>,
    },
}

impl FormatError {
    /// Wraps an error of the operating system on `path`.
    pub(crate) fn io(verb: &'static str, path: &Path, source: io::Error) -> FormatError {
        FormatError::Io { verb, path: path.to_owned(), source }
    }

    /// Wraps a fault in a GGUF file.
    pub(crate) fn gguf(file: &Path, place: GgufLocation, fault: GgufFault) -> FormatError {
        FormatError::Gguf { file: file.to_owned(), place, fault: Box::new(fault) }
    }

    /// Wraps a fault in a Hugging Face folder.
    pub(crate) fn hf(file: &Path, fault: HfFault) -> FormatError {
        FormatError::Hf { file: file.to_owned(), fault: Box::new(fault) }
    }

    /// Wraps a fault in hyperparameters.
    pub(crate) fn params(file: &Path, fault: ParamsFault) -> FormatError {
        FormatError::Params { file: file.to_owned(), fault: Box::new(fault) }
    }

    /// An action that may help.
    pub fn hint(&self) -> Option<String> {
        match self {
            FormatError::Io { verb, path, source } => match source.kind() {
                io::ErrorKind::NotFound if *verb == "create" => {
                    Some("create the folder first, or choose another path".into())
                }
                io::ErrorKind::PermissionDenied if *verb == "create" => {
                    Some("choose a folder that you may write to".into())
                }
                io::ErrorKind::NotFound => {
                    Some("check the path; a model that is not on this machine must be pulled first".into())
                }
                io::ErrorKind::PermissionDenied => {
                    Some(format!("give yourself read permission: chmod u+r {}", path.display()))
                }
                io::ErrorKind::StorageFull => Some("free some disk space and try again".into()),
                _ => None,
            },
            FormatError::NotAFile { .. } => {
                Some("use a file on disk: models are mapped into memory and cannot be read from pipes".into())
            }
            FormatError::Empty { .. } => {
                Some("the download or copy is incomplete; fetch the file again".into())
            }
            FormatError::Gguf { fault, .. } => fault.hint(),
            FormatError::Hf { fault, .. } => fault.hint(),
            FormatError::Params { fault, .. } => fault.hint(),
            FormatError::NotAModel { magic, .. } => Some(not_a_model_hint(magic).into()),
            FormatError::NoModelInFolder { .. } => {
                Some("use a .gguf file, or a folder with config.json and *.safetensors".into())
            }
            FormatError::SeveralModels { path, models } => {
                let first = models.first().map(String::as_str).unwrap_or_default();
                Some(format!("use one of them, for example {}", path.join(first).display()))
            }
        }
    }
}

fn gguf_message(file: &Path, place: &GgufLocation, fault: &GgufFault) -> String {
    let file = file.display();
    match (place, fault) {
        (GgufLocation::File, _) => format!("{file}: {fault}"),
        (_, GgufFault::Missing | GgufFault::Duplicate) => format!("{file}: {place} {fault}"),
        _ => format!("{file}: {place}: {fault}"),
    }
}

/// Joins names for a message and cuts off long lists.
pub(crate) fn listing(names: &[String]) -> String {
    const SHOWN: usize = 8;
    match names.len() {
        0 => "nothing".into(),
        n if n > SHOWN => format!("{} and {} more", names[..SHOWN].join(", "), n - SHOWN),
        _ => names.join(", "),
    }
}

/// Quotes text from a file for a message: escaped, on one line, at most 80 characters.
pub(crate) fn quoted(text: &str) -> String {
    const SHOWN: usize = 80;
    match text.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{:?}...", &text[..end]),
        None => format!("{text:?}"),
    }
}

pub(crate) fn first_bytes(magic: &[u8]) -> String {
    if magic.is_ascii() { quoted(&String::from_utf8_lossy(magic)) } else { format!("bytes {magic:02x?}") }
}

fn not_a_model_hint(magic: &[u8]) -> &'static str {
    match magic {
        [b'P', b'K', 3, 4] => "this is a zip archive; unpack it first",
        [0x1f, 0x8b, ..] => "this is a gzip archive; unpack it first",
        [b'v', b'e', b'r', b's'] => {
            "this looks like a Git LFS pointer; fetch the file itself with: git lfs pull"
        }
        [b'g', b'g', b'm', b'l']
        | [b'g', b'g', b'j', b't']
        | [b't', b'j', b'g', b'g']
        | [b'l', b'm', b'g', b'g'] => {
            "this is a GGML file, the predecessor of GGUF; convert the original model again"
        }
        [b'<', ..] => "this looks like a web page; download the file itself",
        _ => "use a .gguf file, or a folder with config.json and *.safetensors",
    }
}
