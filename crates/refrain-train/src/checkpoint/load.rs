//! Reads and verifies checkpoints.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use refrain_tensor::DType;
use safetensors::Dtype;
use safetensors::tensor::Metadata;
use serde_json::Value;
use sha2::{Digest as _, Sha256};

use super::error::CheckpointError;
use super::store::resolve;
use super::{FileRecord, FrozenBase, NO_SEAL, RunState, STATE, StateFile, TensorSpec, VERSION, hex};

/// Above the size of any `state.json`.
const MAX_STATE_BYTES: u64 = 16 << 20;
/// Size of a read during verification.
const COPY_BYTES: usize = 1 << 20;
/// Maximum number of differences in a message.
const MAX_NAMED: usize = 5;

/// A verified checkpoint.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    state: RunState,
    files: BTreeMap<String, BTreeMap<String, TensorPlace>>,
}

/// A tensor and the location of its bytes in the file.
#[derive(Debug, Clone, PartialEq, Eq)]
struct TensorPlace {
    spec: TensorSpec,
    offset: u64,
    n_bytes: u64,
}

impl Checkpoint {
    /// Opens a checkpoint folder, or the latest checkpoint in a run's folder. Every byte is read and
    /// verified.
    pub fn open(path: &Path) -> Result<Self, CheckpointError> {
        let path = resolve(path)?;
        let state = read_state(&path.join(STATE))?;
        let mut files = BTreeMap::new();
        for record in &state.files {
            files.insert(record.name.clone(), check_file(&path, record)?);
        }
        Ok(Self { path, state: state.state, files })
    }

    /// Reads a checkpoint's state and finds its folder, without reading its tensors.
    pub fn peek(path: &Path) -> Result<(PathBuf, RunState), CheckpointError> {
        let path = resolve(path)?;
        let state = read_state(&path.join(STATE))?.state;
        Ok((path, state))
    }

    /// The checkpoint's folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// State of the run.
    pub fn state(&self) -> &RunState {
        &self.state
    }

    /// Names of its files.
    pub fn files(&self) -> impl Iterator<Item = &str> {
        self.files.keys().map(String::as_str)
    }

    /// The tensors of a file, by name.
    pub fn tensors(&self, file: &str) -> impl Iterator<Item = &TensorSpec> {
        self.files.get(file).into_iter().flat_map(|tensors| tensors.values().map(|place| &place.spec))
    }

    /// Checks that it was trained on these frozen weights, if it names any.
    pub fn expect_base(&self, given: Option<&FrozenBase>) -> Result<(), CheckpointError> {
        match (&self.state.base, given) {
            (Some(saved), Some(given)) if !saved.is(given) => Err(CheckpointError::OtherBase {
                path: self.path.clone(),
                saved: saved.clone(),
                given: given.clone(),
            }),
            // If only one side has an adapter, the tensors differ and are reported.
            _ => Ok(()),
        }
    }

    /// Checks that a file contains exactly these tensors.
    pub fn expect(&self, file: &str, expected: &[TensorSpec]) -> Result<(), CheckpointError> {
        let path = self.path.join(file);
        let Some(found) = self.files.get(file) else { return Err(CheckpointError::MissingFile { path }) };
        let mut differences = Vec::new();
        for tensor in expected {
            match found.get(&tensor.name) {
                None => differences.push(format!("{} is missing", tensor.name)),
                Some(place) if place.spec != *tensor => {
                    differences.push(format!("{} is {}, the model has {tensor}", tensor.name, place.spec));
                }
                Some(_) => {}
            }
        }
        let names: std::collections::HashSet<&str> =
            expected.iter().map(|tensor| tensor.name.as_str()).collect();
        let surplus = found.keys().filter(|name| !names.contains(name.as_str()));
        differences.extend(surplus.map(|name| format!("{name} is not in the model")));
        if differences.is_empty() {
            return Ok(());
        }
        let more = differences.len().saturating_sub(MAX_NAMED);
        differences.truncate(MAX_NAMED);
        if more > 0 {
            differences.push(format!("and {more} more"));
        }
        Err(CheckpointError::Differs { path, differences })
    }

    /// The bytes of a tensor.
    pub fn read(&self, file: &str, tensor: &str) -> Result<Vec<u8>, CheckpointError> {
        let path = self.path.join(file);
        let Some(place) = self.files.get(file).and_then(|tensors| tensors.get(tensor)) else {
            let differences = vec![format!("{tensor} is missing")];
            return Err(CheckpointError::Differs { path, differences });
        };
        let read = || {
            let mut opened = File::open(&path)?;
            opened.seek(SeekFrom::Start(place.offset))?;
            let mut bytes = vec![0; place.n_bytes as usize];
            opened.read_exact(&mut bytes)?;
            Ok(bytes)
        };
        read().map_err(CheckpointError::read(&path))
    }
}

fn read_state(path: &Path) -> Result<StateFile, CheckpointError> {
    let damaged = |reason: String| CheckpointError::State { path: path.to_owned(), reason };
    let mut text = String::new();
    let file = File::open(path).map_err(CheckpointError::read(path))?;
    let read = file.take(MAX_STATE_BYTES).read_to_string(&mut text);
    read.map_err(|error| match error.kind() {
        io::ErrorKind::InvalidData => damaged("it is not text".to_owned()),
        _ => CheckpointError::read(path)(error),
    })?;
    let value: Value = serde_json::from_str(&text).map_err(|error| damaged(error.to_string()))?;
    // Checked first: the seal and the content depend on the version.
    match value["version"].as_u64() {
        Some(version) if version == u64::from(VERSION) => {}
        Some(found) => {
            return Err(CheckpointError::Version { path: path.to_owned(), found, known: VERSION });
        }
        None => return Err(damaged("it has no version".to_owned())),
    }
    let seal = value["seal"].as_str().unwrap_or_default();
    let unsealed = if seal.len() == NO_SEAL.len() { text.replacen(seal, NO_SEAL, 1) } else { text };
    let found = hex(Sha256::digest(&unsealed));
    if found != seal {
        return Err(damaged(format!("its seal is {seal:?}, its content has {found}")));
    }
    serde_json::from_value(value).map_err(|error| damaged(error.to_string()))
}

fn check_file(folder: &Path, record: &FileRecord) -> Result<BTreeMap<String, TensorPlace>, CheckpointError> {
    let path = folder.join(&record.name);
    let is_plain = Path::new(&record.name).file_name().is_some_and(|name| name == record.name.as_str());
    if !is_plain {
        return Err(CheckpointError::BadName { name: record.name.clone() });
    }
    let meta = match fs::metadata(&path) {
        Ok(meta) => meta,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Err(CheckpointError::MissingFile { path });
        }
        Err(error) => return Err(CheckpointError::read(&path)(error)),
    };
    if meta.len() != record.n_bytes {
        return Err(CheckpointError::Size { path, found: meta.len(), expected: record.n_bytes });
    }
    let found = checksum(&path).map_err(CheckpointError::read(&path))?;
    if found != record.sha256 {
        return Err(CheckpointError::Checksum { path, found, expected: record.sha256.clone() });
    }
    places(&path, record.n_bytes)
}

fn checksum(path: &Path) -> io::Result<String> {
    let (mut file, mut hasher) = (File::open(path)?, Sha256::new());
    let mut buffer = vec![0; COPY_BYTES];
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(hex(hasher.finalize())),
            n => hasher.update(&buffer[..n]),
        }
    }
}

/// Locations of the tensors in a safetensors file.
fn places(path: &Path, file_bytes: u64) -> Result<BTreeMap<String, TensorPlace>, CheckpointError> {
    let damaged = |reason: &str| CheckpointError::State { path: path.to_owned(), reason: reason.to_owned() };
    let mut file = File::open(path).map_err(CheckpointError::read(path))?;
    let mut length = [0; LENGTH_BYTES];
    file.read_exact(&mut length).map_err(CheckpointError::read(path))?;
    let (header_bytes, start) = (u64::from_le_bytes(length), LENGTH_BYTES as u64);
    if header_bytes > file_bytes.saturating_sub(start) {
        return Err(damaged("its header does not match the file"));
    }
    let mut header = Vec::new();
    file.take(header_bytes).read_to_end(&mut header).map_err(CheckpointError::read(path))?;
    let metadata: Metadata = serde_json::from_slice(&header).map_err(|error| damaged(&error.to_string()))?;
    let data_start = start + header_bytes;
    if metadata.data_len() as u64 != file_bytes - data_start {
        return Err(damaged("its header does not match the file size"));
    }
    let mut places = BTreeMap::new();
    for (name, info) in metadata.tensors() {
        let dtype = dtype_of(info.dtype).ok_or_else(|| damaged("it has a tensor of an unsupported type"))?;
        let (from, to) = info.data_offsets;
        let spec = TensorSpec { name: name.clone(), dtype, shape: info.shape.clone() };
        let place = TensorPlace { spec, offset: data_start + from as u64, n_bytes: (to - from) as u64 };
        places.insert(name, place);
    }
    Ok(places)
}

const LENGTH_BYTES: usize = 8;

fn dtype_of(dtype: Dtype) -> Option<DType> {
    Some(match dtype {
        Dtype::F32 => DType::F32,
        Dtype::F16 => DType::F16,
        Dtype::BF16 => DType::BF16,
        Dtype::I32 => DType::I32,
        Dtype::U32 => DType::U32,
        Dtype::I64 => DType::I64,
        Dtype::U8 => DType::U8,
        _ => return None,
    })
}
