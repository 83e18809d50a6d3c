//! Hugging Face folders: `config.json`, safetensors with or without an index, and the files around them.

mod adapter; // folders of LoRA adapters
mod fault; // errors
mod json; // JSON files
mod quantized; // quantised weights
mod safetensors; // weights
mod write; // writing

pub use adapter::{AdapterConfig, AdapterFolder};
pub use fault::HfFault;
pub use json::{FromJson, JsonObject};
pub use quantized::QuantizedWeights;
pub use write::{NewTensor, write_safetensors, write_whole};

use crate::FormatError;
use crate::mmap::Mapped;
use crate::table::{FileIdx, TensorInfo, TensorTable};
use quantized::{Packed, Scheme};
use refrain_tensor::{Bytes, HostTensor};
use safetensors::Stored;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// An open folder: parsed configuration and mapped weights.
#[derive(Debug)]
pub struct HfFolder {
    path: PathBuf,
    config: JsonObject,
    generation_config: Option<JsonObject>,
    weights: Weights,
    quantized: Option<QuantizedWeights>,
}

#[derive(Debug, Default)]
struct Weights {
    files: Vec<Shard>,
    tensors: TensorTable,
    /// Quantised weights, sorted by name. They are in `tensors` as they are loaded.
    packed: Vec<Packed>,
    unsupported: Vec<(String, String)>, // name and dtype
}

#[derive(Debug)]
struct Shard {
    path: PathBuf,
    bytes: Bytes,
    mapped: Mapped,
}

impl HfFolder {
    /// Opens a folder with `config.json` and weights in safetensors.
    pub fn open(path: impl AsRef<Path>) -> Result<HfFolder, FormatError> {
        let path = path.as_ref();
        let config_path = path.join("config.json");
        if !config_path.exists() {
            return Err(FormatError::hf(path, HfFault::NoConfig));
        }
        let config = JsonObject::read(&config_path)?;
        let generation_path = path.join("generation_config.json");
        let generation_config =
            generation_path.exists().then(|| JsonObject::read(&generation_path)).transpose()?;
        // A scheme that is not supported is an error of the configuration, which `inspect` shows with the rest.
        let scheme = Scheme::read(&config).ok().flatten();
        let weights = Weights::open(path, scheme.as_ref())?;
        let quantized = scheme.map(|scheme| QuantizedWeights::of(&scheme, &weights.packed));
        let quantized = quantized.filter(|quantized| quantized.n_weights > 0);
        Ok(HfFolder { path: path.to_owned(), config, generation_config, weights, quantized })
    }

    /// How the weights are quantised; `None` if they are not.
    pub fn quantized(&self) -> Option<&QuantizedWeights> {
        self.quantized.as_ref()
    }

    /// Checks that the form of its weights is supported.
    pub(crate) fn check_quantization(&self) -> Result<(), FormatError> {
        Scheme::read(&self.config).map(|_| ())
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// `config.json`.
    pub fn config(&self) -> &JsonObject {
        &self.config
    }

    /// `generation_config.json`, if it exists.
    pub fn generation_config(&self) -> Option<&JsonObject> {
        self.generation_config.as_ref()
    }

    /// Returns the path of a file in the folder, if it exists.
    pub fn file(&self, name: &str) -> Option<PathBuf> {
        Some(self.path.join(name)).filter(|p| p.is_file())
    }

    /// Path of `tokenizer.json`, if it exists.
    pub fn tokenizer(&self) -> Option<PathBuf> {
        self.file("tokenizer.json")
    }

    /// Path of `tokenizer_config.json`, if it exists.
    pub fn tokenizer_config(&self) -> Option<PathBuf> {
        self.file("tokenizer_config.json")
    }

    /// Path of `chat_template.jinja`, if it exists.
    pub fn chat_template(&self) -> Option<PathBuf> {
        self.file("chat_template.jinja")
    }

    /// All weight files with their sizes in bytes.
    pub fn files(&self) -> impl ExactSizeIterator<Item = (&Path, u64)> {
        self.weights.files.iter().map(|f| (&*f.path, f.bytes.as_slice().len() as u64))
    }

    /// All tensors, in file order. Quantised weights are listed as they are loaded, without their parts.
    pub fn tensors(&self) -> &[TensorInfo] {
        self.weights.tensors.all()
    }

    /// Returns the file that holds a tensor.
    pub fn file_of(&self, info: &TensorInfo) -> &Path {
        &self.weights.files[info.file_idx as usize].path
    }

    /// Returns the table entry of a tensor.
    pub fn tensor_info(&self, name: &str) -> Option<&TensorInfo> {
        self.weights.tensors.find(name)
    }

    /// Returns whether a tensor of this name exists.
    pub fn has_tensor(&self, name: &str) -> bool {
        self.tensor_info(name).is_some()
    }

    /// Returns a tensor as a view of its file; a copy if the file does not align its elements, or if it is quantised
    /// in a form that is rewritten or decoded.
    pub fn tensor(&self, name: &str) -> Result<HostTensor, FormatError> {
        match self.weights.packed.binary_search_by(|packed| packed.info.name().cmp(name)) {
            Ok(found) => self.weights.put_together(&self.weights.packed[found]),
            Err(_) => self.weights.tensor(&self.path, name),
        }
    }

    /// Asks the system to prefetch the weights.
    pub fn prefetch(&self) {
        self.weights.files.iter().for_each(|f| f.mapped.prefetch());
    }

    /// Lets the system drop the resident pages of the weight files. Later reads load them again.
    pub fn release(&self) {
        self.weights.files.iter().for_each(|f| f.mapped.release());
    }
}

impl Weights {
    /// Returns a tensor as a view of its file.
    fn tensor(&self, folder: &Path, name: &str) -> Result<HostTensor, FormatError> {
        let missing = || {
            let unsupported = self.unsupported.iter().find(|(n, _)| n == name);
            let fault = match unsupported {
                Some((name, found)) => HfFault::Dtype { name: name.clone(), found: found.clone() },
                None => HfFault::MissingTensor { name: name.into() },
            };
            FormatError::hf(folder, fault)
        };
        let info = self.tensors.find(name).ok_or_else(missing)?;
        let shard = &self.files[info.file_idx as usize];
        let file_bytes = shard.bytes.as_slice().len() as u64;
        info.view(&shard.bytes).ok_or_else(|| {
            let fault =
                HfFault::DataLength { expected_bytes: info.offset + info.n_bytes, found_bytes: file_bytes };
            FormatError::hf(&shard.path, fault)
        })
    }

    /// Puts a quantised weight together from its parts.
    fn put_together(&self, packed: &Packed) -> Result<HostTensor, FormatError> {
        let path = &self.files[packed.info.file_idx as usize].path;
        let bytes = |part: &Stored| {
            let shard = &self.files[part.file_idx as usize];
            let (expected_bytes, found_bytes) =
                (part.offset + part.n_bytes, shard.bytes.as_slice().len() as u64);
            part.view(&shard.bytes).ok_or(HfFault::DataLength { expected_bytes, found_bytes })
        };
        packed.load(bytes).map_err(|fault| FormatError::hf(path, fault))
    }

    /// Opens a single file, or the index and its shards.
    fn open(folder: &Path, scheme: Option<&Scheme>) -> Result<Weights, FormatError> {
        let single = folder.join("model.safetensors");
        let index = folder.join("model.safetensors.index.json");
        if single.exists() {
            return Weights::read(vec![single], scheme);
        }
        if index.exists() {
            return Weights::open_index(folder, &index, scheme);
        }
        let names = crate::source::names_in(folder)?;
        let mut found = names.iter().filter(|n| n.ends_with(".safetensors"));
        match (found.next(), found.count()) {
            (Some(only), 0) => Weights::read(vec![folder.join(only)], scheme),
            (Some(_), others) => Err(FormatError::hf(folder, HfFault::NoIndex { n_files: others + 1 })),
            (None, _) => {
                let other = names.into_iter().find(|n| n.ends_with(".bin") || n.ends_with(".pth"));
                let fault = other.map_or(HfFault::NoWeights, |found| HfFault::OtherWeights { found });
                Err(FormatError::hf(folder, fault))
            }
        }
    }

    fn open_index(folder: &Path, path: &Path, scheme: Option<&Scheme>) -> Result<Weights, FormatError> {
        #[derive(serde::Deserialize)]
        struct Index {
            weight_map: BTreeMap<String, String>,
        }
        const MOST: u64 = 64 << 20;
        let index: Index = json::read_json(path, MOST)?;
        let blame = |fault| FormatError::hf(path, fault);
        let mut shards = BTreeSet::new();
        for (name, shard) in &index.weight_map {
            if !shards.insert(shard) {
                continue;
            }
            let (shard, name) = (shard.clone(), name.clone());
            if Path::new(&shard).components().count() != 1 || Path::new(&shard).file_name().is_none() {
                return Err(blame(HfFault::ShardName { shard, name }));
            }
            if !folder.join(&shard).exists() {
                return Err(blame(HfFault::MissingShard { shard, name }));
            }
        }
        let paths: Vec<PathBuf> = shards.iter().map(|s| folder.join(s)).collect();
        let (files, stored) = Weights::parse(paths)?;
        for (name, shard) in &index.weight_map {
            let is_there = |at: usize| files[stored[at].file_idx as usize].path == folder.join(shard);
            if !stored.binary_search_by(|part| (*part.name).cmp(name)).is_ok_and(is_there) {
                return Err(blame(HfFault::NotInShard { shard: shard.clone(), name: name.clone() }));
            }
        }
        Weights::of(files, stored, scheme)
    }

    fn read(paths: Vec<PathBuf>, scheme: Option<&Scheme>) -> Result<Weights, FormatError> {
        let (files, stored) = Weights::parse(paths)?;
        Weights::of(files, stored, scheme)
    }

    /// Maps the files and returns what their headers list, sorted by name.
    fn parse(paths: Vec<PathBuf>) -> Result<(Vec<Shard>, Vec<Stored>), FormatError> {
        let (mut files, mut stored) = (Vec::new(), Vec::new());
        for path in paths {
            let mapped = Mapped::open(&path)?;
            let bytes = mapped.bytes();
            if bytes.as_slice().is_empty() {
                return Err(FormatError::Empty { path });
            }
            let parsed = safetensors::parse(bytes.as_slice(), files.len() as FileIdx);
            stored.extend(parsed.map_err(|fault| FormatError::hf(&path, fault))?);
            files.push(Shard { path, bytes, mapped });
        }
        stored.sort_by(|a, b| a.name.cmp(&b.name).then(a.file_idx.cmp(&b.file_idx)));
        if let Some([first, second]) = stored.windows(2).find(|pair| pair[0].name == pair[1].name) {
            let [first, path] = [first, second].map(|part| &files[part.file_idx as usize].path);
            let (name, other) = (second.name.to_string(), first.display().to_string());
            return Err(FormatError::hf(path, HfFault::Duplicate { name, other }));
        }
        Ok((files, stored))
    }

    /// Sorts tensors into plain ones and quantised ones.
    fn of(files: Vec<Shard>, stored: Vec<Stored>, scheme: Option<&Scheme>) -> Result<Weights, FormatError> {
        let blame = |part: &Stored, fault| FormatError::hf(&files[part.file_idx as usize].path, fault);
        let mut packed = Vec::new();
        let (mut tensors, mut unsupported) = (Vec::new(), Vec::new());
        for part in &stored {
            if let Some(scheme) = scheme {
                if let Some(found) = quantized::assemble(scheme, part, &stored).map_err(|f| blame(part, f))? {
                    tensors.push(found.info.clone());
                    packed.push(found);
                    continue;
                }
                if quantized::is_part(&part.name) {
                    continue;
                }
            }
            match part.info().map_err(|fault| blame(part, fault))? {
                Some(info) => tensors.push(info),
                None => unsupported.push((part.name.to_string(), format!("{:?}", part.dtype))),
            }
        }
        packed.sort_by(|a, b| a.info.name().cmp(b.info.name()));
        tensors.sort_by_key(|info| (info.file_idx, info.offset));
        let tensors = TensorTable::new(tensors).map_err(|twice| {
            let [first, second] = twice.map(|t| (t.name, &files[t.file_idx as usize].path));
            let fault = HfFault::Duplicate { name: second.0.into(), other: first.1.display().to_string() };
            FormatError::hf(second.1, fault)
        })?;
        Ok(Weights { files, tensors, packed, unsupported })
    }
}

/// Checks one safetensors file in memory, for tools and tests.
pub fn check_safetensors(bytes: &[u8]) -> Result<Vec<TensorInfo>, HfFault> {
    let infos = safetensors::parse(bytes, 0)?.into_iter().map(|stored| stored.info());
    infos.filter_map(Result::transpose).collect()
}
