//! Importance matrices: for each matrix of a model, the mean squared activation of each of its columns.
//!
//! Files are llama.cpp's GGUF form: for each matrix `NAME.in_sum2`, the sums of squares `[n_matrices, n_columns]`, and
//! `NAME.counts`, the number of rows that were summed `[n_matrices, 1]`; one matrix, or one for each expert. The binary
//! form that its tools wrote before (`.dat`) is read, too.

mod legacy; // llama.cpp's older files

use crate::error::{ImatrixFault, QuantError};
use crate::pass::InputTensor;
use refrain_formats::gguf::{Array, Gguf, GgufWriter, MetadataValue, StrArray};
use refrain_tensor::{Bytes, DType, Shape};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

const SUMS: &str = ".in_sum2";
const COUNTS: &str = ".counts";

/// An importance matrix.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Imatrix {
    path: PathBuf,
    datasets: Vec<String>,
    n_chunks: u32,
    chunk_tokens: u32,
    entries: BTreeMap<String, ImatrixEntry>,
}

/// The activations that one tensor multiplies.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ImatrixEntry {
    /// Sums of squares, `[n_matrices, n_columns]`.
    pub sums: Vec<f32>,
    /// Rows that were summed, `[n_matrices]`.
    pub counts: Vec<f32>,
}

impl ImatrixEntry {
    fn has_valid_values(&self) -> bool {
        self.sums.iter().chain(&self.counts).all(|v| v.is_finite() && *v >= 0.0)
    }

    /// The mean square of each column. Columns of an expert that was never chosen count the same.
    pub fn means(&self) -> Vec<f32> {
        let n_columns = self.sums.len() / self.counts.len().max(1);
        let rows = self.sums.chunks(n_columns.max(1)).zip(&self.counts);
        rows.flat_map(|(sums, &count)| {
            sums.iter().map(move |&sum| if count > 0.0 { sum / count } else { 1.0 })
        })
        .collect()
    }
}

impl Imatrix {
    /// Creates an importance matrix.
    pub fn new(datasets: Vec<String>, n_chunks: u32, chunk_tokens: u32) -> Imatrix {
        Imatrix { datasets, n_chunks, chunk_tokens, ..Imatrix::default() }
    }

    /// Adds or replaces the entry of a tensor.
    pub fn insert(&mut self, tensor: &str, entry: ImatrixEntry) {
        self.entries.insert(tensor.to_owned(), entry);
    }

    /// Reads a file of either form.
    pub fn open(path: &Path) -> Result<Imatrix, QuantError> {
        if let Some(legacy) = legacy::open(path)? {
            return Ok(legacy);
        }
        let gguf = Gguf::open(path)?;
        let metadata = gguf.metadata();
        let blame = |fault| QuantError::Imatrix { path: path.to_owned(), fault };
        let kind: &str = metadata.optional("general.type")?.unwrap_or("model");
        if kind != "imatrix" {
            return Err(blame(ImatrixFault::Kind { found: kind.to_owned() }));
        }
        let datasets: Option<&StrArray> = metadata.optional("imatrix.datasets")?;
        let mut imatrix = Imatrix {
            path: path.to_owned(),
            datasets: datasets.map_or_else(Vec::new, |all| all.iter().map(str::to_owned).collect()),
            n_chunks: metadata.optional("imatrix.chunk_count")?.unwrap_or(0),
            chunk_tokens: metadata.optional("imatrix.chunk_size")?.unwrap_or(0),
            entries: BTreeMap::new(),
        };
        for info in gguf.tensors() {
            let Some(tensor) = info.name().strip_suffix(SUMS) else { continue };
            let counts = format!("{tensor}{COUNTS}");
            if !gguf.has_tensor(&counts) {
                return Err(blame(ImatrixFault::Part { tensor: tensor.to_owned(), part: "counts" }));
            }
            let values = |name: &str| -> Result<Vec<f32>, QuantError> {
                let wrap = |source| QuantError::Tensor { name: name.to_owned(), source };
                gguf.tensor(name)?.to_f32().map_err(wrap)
            };
            let entry = ImatrixEntry { sums: values(info.name())?, counts: values(&counts)? };
            if !entry.has_valid_values() {
                return Err(blame(ImatrixFault::Value { tensor: tensor.to_owned() }));
            }
            if entry.counts.is_empty() || !entry.sums.len().is_multiple_of(entry.counts.len()) {
                let (got, need) = (entry.counts.len(), entry.sums.len());
                return Err(blame(ImatrixFault::Size { tensor: tensor.to_owned(), got, need }));
            }
            imatrix.entries.insert(tensor.to_owned(), entry);
        }
        Ok(imatrix)
    }

    /// Writes a file.
    pub fn write(&self, path: &Path) -> Result<(), QuantError> {
        let mut writer = GgufWriter::new();
        writer.set("general.type", "imatrix")?;
        let datasets: StrArray = self.datasets.iter().map(String::as_str).collect();
        writer.set("imatrix.datasets", MetadataValue::Array(Array::String(datasets)))?;
        writer.set("imatrix.chunk_count", self.n_chunks)?;
        writer.set("imatrix.chunk_size", self.chunk_tokens)?;
        for (tensor, entry) in &self.entries {
            let n = entry.counts.len().max(1);
            let mut put = |suffix: &str, values: &[f32]| {
                let shape = Shape::from([n, values.len() / n]);
                let bytes = Bytes::new(bytemuck::cast_slice::<f32, u8>(values).to_vec());
                writer.tensor(&format!("{tensor}{suffix}"), DType::F32, shape, bytes).map(drop)
            };
            put(SUMS, &entry.sums)?;
            put(COUNTS, &entry.counts)?;
        }
        Ok(writer.write(path)?)
    }

    /// The file it was read from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Names of the texts.
    pub fn datasets(&self) -> &[String] {
        &self.datasets
    }

    /// Windows of text that were evaluated.
    pub fn n_chunks(&self) -> u32 {
        self.n_chunks
    }

    /// Tensors with an entry.
    pub fn n_entries(&self) -> usize {
        self.entries.len()
    }

    /// Tensor names and their entries, sorted by name.
    pub fn entries(&self) -> impl Iterator<Item = (&str, &ImatrixEntry)> {
        self.entries.iter().map(|(name, entry)| (name.as_str(), entry))
    }

    /// The entry of a tensor.
    pub fn find(&self, tensor: &str) -> Option<&ImatrixEntry> {
        self.entries.get(tensor)
    }

    /// Checks that it is of this model.
    pub(crate) fn check(&self, tensors: &[InputTensor]) -> Result<(), QuantError> {
        let blame = |fault| QuantError::Imatrix { path: self.path.clone(), fault };
        let mut n_found = 0;
        for tensor in tensors {
            let Some(entry) = self.find(&tensor.name) else { continue };
            n_found += 1;
            let n_columns = tensor.shape.dim_back(0);
            let n_matrices = if tensor.shape.rank() > 2 { tensor.shape.dims()[0] } else { 1 };
            let got = entry.sums.len();
            if got != n_columns * n_matrices && got != n_columns {
                let need = n_columns * n_matrices;
                return Err(blame(ImatrixFault::Size { tensor: tensor.name.clone(), got, need }));
            }
        }
        if n_found == 0 {
            return Err(blame(ImatrixFault::OtherModel { n: self.entries.len() }));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn imatrix() -> Imatrix {
        let mut imatrix = Imatrix::new(vec!["text.txt".into()], 3, 512);
        imatrix.insert("a.weight", ImatrixEntry { sums: vec![1.0, 2.0, 4.0, 6.0], counts: vec![2.0, 0.0] });
        imatrix.insert("b.weight", ImatrixEntry { sums: vec![5.0], counts: vec![5.0] });
        imatrix
    }

    #[test]
    fn a_file_reads_back_the_same() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("imatrix.gguf");
        imatrix().write(&path).unwrap();
        let read = Imatrix::open(&path).unwrap();
        assert_eq!(read, Imatrix { path, ..imatrix() });
        assert_eq!(read.find("a.weight").unwrap().means(), [0.5, 1.0, 1.0, 1.0]);
    }

    /// Made with the `gguf` package by tools/imatrix_goldens.py.
    const GGUF: &[u8] = include_bytes!("../tests/data/imatrix.gguf");
    const BINARY: &[u8] = include_bytes!("../tests/data/imatrix.dat");

    fn read(bytes: &[u8]) -> Result<Imatrix, QuantError> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("imatrix");
        std::fs::write(&path, bytes).unwrap();
        Imatrix::open(&path)
    }

    #[test]
    fn both_forms_of_llama_cpp_are_read() {
        let (gguf, binary) = (read(GGUF).unwrap(), read(BINARY).unwrap());
        for (imatrix, datasets) in
            [(&gguf, vec!["a.txt".to_owned(), "b.txt".into()]), (&binary, vec!["a.txt".into()])]
        {
            assert_eq!((imatrix.n_chunks(), imatrix.datasets()), (7, &*datasets));
            let names: Vec<&str> = imatrix.entries().map(|(name, _)| name).collect();
            assert_eq!(names, ["blk.0.attn_q.weight", "blk.0.ffn_up_exps.weight"]);
            // Means of columns 0, 1, 2 ... are 0.5, 1, 1.5 ... in both.
            let want: Vec<f32> = (1..=64).map(|i| 0.5 * i as f32).collect();
            assert_eq!(imatrix.find("blk.0.attn_q.weight").unwrap().means(), want);
            let want: Vec<f32> = (1..=96).map(|i| 0.25 * i as f32).collect();
            assert_eq!(imatrix.find("blk.0.ffn_up_exps.weight").unwrap().means(), want);
        }
        assert_eq!(gguf.chunk_tokens, 512);
    }

    #[test]
    fn damaged_binary_files_are_refused_with_the_place() {
        let message = |bytes: &[u8]| read(bytes).unwrap_err().to_string();
        for n in [0, 3, 4, 9, 40, BINARY.len() - 1] {
            assert!(message(&BINARY[..n]).contains("the end of the file at byte"), "{n}");
        }
        assert!(message(&[0; 64]).contains("an impossible number of entries at byte 4"));
        assert!(message(&[0xff; 64]).contains("an impossible number of entries"));
        let with = |at: usize, value: i32| {
            let mut bytes = BINARY.to_vec();
            bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
            message(&bytes)
        };
        // The length of the first name, then its number of calls, its number of values, and a value.
        let name = "blk.0.attn_q.weight".len();
        assert!(with(4, -1).contains("an impossible length of a name"));
        assert!(with(4, 0).contains("an empty name"));
        assert!(with(8 + name, -1).contains("an impossible number of calls"));
        assert!(with(12 + name, i32::MAX).contains("an impossible number of values"));
        assert!(with(12 + name, 1 << 20).contains("the end of the file"));
        assert!(with(16 + name, f32::NAN.to_bits() as i32).contains("negative or not finite"));
    }

    #[test]
    fn sizes_of_another_model_are_refused() {
        let tensor =
            |name: &str, n| InputTensor { name: name.into(), dtype: DType::F32, shape: Shape::from([4, n]) };
        let error = imatrix().check(&[tensor("b.weight", 7)]).unwrap_err();
        assert!(error.to_string().contains("1 values for \"b.weight\", the model needs 7"), "{error}");
        let error = imatrix().check(&[tensor("c.weight", 7)]).unwrap_err();
        assert!(error.to_string().contains("none of its 2 tensors"), "{error}");
    }
}
