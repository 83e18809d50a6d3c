//! Opens a model by path, in any supported format.

use crate::gguf::{Gguf, SplitName};
use crate::hf::HfFolder;
use crate::params::{EmbeddingDefaults, GenerationDefaults, ModelConfig};
use crate::table::TensorInfo;
use crate::{FormatError, gguf};
use refrain_tensor::HostTensor;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// An open model in one of the formats.
#[derive(Debug)]
pub enum ModelFiles {
    /// A GGUF file, or all parts of a split one.
    Gguf(Gguf),
    /// A Hugging Face folder.
    Hf(Box<HfFolder>),
}

impl ModelFiles {
    /// Opens a GGUF file, a Hugging Face folder, or a folder that holds one GGUF model.
    ///
    /// A file of a Hugging Face folder, such as `config.json` or `model.safetensors`, opens its folder.
    pub fn open(path: impl AsRef<Path>) -> Result<ModelFiles, FormatError> {
        let path = path.as_ref();
        let meta = std::fs::metadata(path).map_err(|e| FormatError::io("open", path, e))?;
        if meta.is_dir() {
            return open_folder(path);
        }
        crate::mmap::require_file(path, &meta)?;
        open_file(path)
    }

    /// Path of the model: the first GGUF file or the folder.
    pub fn path(&self) -> &Path {
        match self {
            ModelFiles::Gguf(gguf) => gguf.path(),
            ModelFiles::Hf(folder) => folder.path(),
        }
    }

    /// Reads the model's hyperparameters.
    pub fn config(&self) -> Result<ModelConfig, FormatError> {
        match self {
            ModelFiles::Gguf(gguf) => ModelConfig::from_gguf(gguf),
            ModelFiles::Hf(folder) => ModelConfig::from_hf(folder),
        }
    }

    /// Reads the sampling settings that the authors recommend.
    pub fn generation_defaults(&self) -> Result<GenerationDefaults, FormatError> {
        match self {
            ModelFiles::Gguf(gguf) => GenerationDefaults::from_gguf(gguf.metadata()),
            ModelFiles::Hf(folder) => GenerationDefaults::from_hf(folder),
        }
    }

    /// Reads the embedding settings that the authors recommend.
    pub fn embedding_defaults(&self) -> Result<EmbeddingDefaults, FormatError> {
        match self {
            ModelFiles::Gguf(gguf) => EmbeddingDefaults::from_gguf(gguf.metadata()),
            ModelFiles::Hf(folder) => EmbeddingDefaults::from_hf(folder),
        }
    }

    /// All weight files with their sizes in bytes.
    pub fn files(&self) -> Vec<(&Path, u64)> {
        match self {
            ModelFiles::Gguf(gguf) => gguf.files().collect(),
            ModelFiles::Hf(folder) => folder.files().collect(),
        }
    }

    /// All tensors, in the order of the files.
    pub fn tensors(&self) -> &[TensorInfo] {
        match self {
            ModelFiles::Gguf(gguf) => gguf.tensors(),
            ModelFiles::Hf(folder) => folder.tensors(),
        }
    }

    /// Returns the table entry of a tensor.
    pub fn tensor_info(&self, name: &str) -> Option<&TensorInfo> {
        match self {
            ModelFiles::Gguf(gguf) => gguf.tensor_info(name),
            ModelFiles::Hf(folder) => folder.tensor_info(name),
        }
    }

    /// Returns whether a tensor of this name exists.
    pub fn has_tensor(&self, name: &str) -> bool {
        self.tensor_info(name).is_some()
    }

    /// Returns a tensor as a view of its file.
    pub fn tensor(&self, name: &str) -> Result<HostTensor, FormatError> {
        match self {
            ModelFiles::Gguf(gguf) => gguf.tensor(name),
            ModelFiles::Hf(folder) => folder.tensor(name),
        }
    }

    /// Lets the system drop the resident pages of the weight files once the weights have been copied. Later reads
    /// load them again.
    pub fn release(&self) {
        match self {
            ModelFiles::Gguf(gguf) => gguf.release(),
            ModelFiles::Hf(folder) => folder.release(),
        }
    }

    /// Asks the system to prefetch the weights.
    pub fn prefetch(&self) {
        match self {
            ModelFiles::Gguf(gguf) => gguf.prefetch(),
            ModelFiles::Hf(folder) => folder.prefetch(),
        }
    }
}

fn open_file(path: &Path) -> Result<ModelFiles, FormatError> {
    let mut magic = Vec::new();
    let file = File::open(path).map_err(|e| FormatError::io("open", path, e))?;
    file.take(4).read_to_end(&mut magic).map_err(|e| FormatError::io("read", path, e))?;
    if magic.is_empty() {
        return Err(FormatError::Empty { path: path.to_owned() });
    }
    // The GGUF reader has the best message for a file cut off inside the magic number.
    if gguf::MAGIC.starts_with(&magic) {
        return Gguf::open(path).map(ModelFiles::Gguf);
    }
    let folder = path.parent().filter(|f| f.join("config.json").is_file());
    let of_folder = path.extension().is_some_and(|e| e == "safetensors" || e == "json");
    match folder {
        Some(folder) if of_folder => HfFolder::open(folder).map(|hf| ModelFiles::Hf(Box::new(hf))),
        _ => Err(FormatError::NotAModel { path: path.to_owned(), magic }),
    }
}

fn open_folder(path: &Path) -> Result<ModelFiles, FormatError> {
    let names = names_in(path)?;
    let has_weights =
        names.iter().any(|n| n.ends_with(".safetensors") || n.ends_with(".safetensors.index.json"));
    let models = gguf_models(path, &names);
    // A folder with both is a Hugging Face folder that also holds a converted copy.
    match models.as_slice() {
        [] => {}
        _ if has_weights && names.iter().any(|n| n == "config.json") => {}
        [only] => return Gguf::open(path.join(only)).map(ModelFiles::Gguf),
        _ => return Err(FormatError::SeveralModels { path: path.to_owned(), models }),
    }
    if names.iter().any(|n| n == "config.json") || has_weights {
        return HfFolder::open(path).map(|hf| ModelFiles::Hf(Box::new(hf)));
    }
    Err(FormatError::NoModelInFolder { path: path.to_owned(), found: names })
}

/// Returns one name per GGUF model. A split model is listed once, under its first existing part.
fn gguf_models(folder: &Path, names: &[String]) -> Vec<String> {
    let mut models = BTreeMap::new();
    for name in names.iter().filter(|n| n.ends_with(".gguf")) {
        let first = SplitName::parse(&folder.join(name)).map(|split| split.path(1));
        models.entry(first.unwrap_or_else(|| folder.join(name))).or_insert_with(|| name.clone());
    }
    models.into_values().collect()
}

/// Returns the sorted UTF-8 names in a folder.
pub(crate) fn names_in(folder: &Path) -> Result<Vec<String>, FormatError> {
    let fail = |e| FormatError::io("list", folder, e);
    let mut names = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(fail)? {
        if let Ok(name) = entry.map_err(fail)?.file_name().into_string() {
            names.push(name);
        }
    }
    names.sort_unstable();
    Ok(names)
}
