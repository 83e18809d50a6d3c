//! The pass over a model: choose types, encode tensor by tensor, write one file.

use crate::choose::{Choice, Override, Reason, choose};
use crate::encode::{Encode, is_finite};
use crate::error::QuantError;
use crate::imatrix::Imatrix;
use crate::recipe::{ModelFacts, Recipe};
use refrain_formats::FormatError;
use refrain_formats::gguf::{Gguf, GgufWriter, MetadataValue, TensorSink};
use refrain_tensor::{DType, HostTensor, Shape, TensorError};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Produces a tensor by its index.
pub type Fetch<'a> = Box<dyn Fn(usize) -> Result<HostTensor, QuantError> + 'a>;

/// A model to quantise, as the contents of a GGUF file.
pub struct ModelInput<'a> {
    /// Keys and values.
    pub metadata: Vec<(String, MetadataValue)>,
    /// The tensors, in the order of the file.
    pub tensors: Vec<InputTensor>,
    /// Produces one tensor at a time.
    pub fetch: Fetch<'a>,
    /// Files of the model, which must not be overwritten.
    pub files: Vec<PathBuf>,
}

impl std::fmt::Debug for ModelInput<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ModelInput").field("tensors", &self.tensors).finish_non_exhaustive()
    }
}

/// A tensor of a model to quantise.
#[derive(Clone, Debug)]
pub struct InputTensor {
    /// GGUF name.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Sizes, outermost first.
    pub shape: Shape,
}

impl<'a> ModelInput<'a> {
    /// The contents of a GGUF model.
    pub fn of_gguf(gguf: &'a Gguf) -> ModelInput<'a> {
        let metadata = gguf.metadata().iter().filter(|(key, _)| !key.starts_with("split."));
        let tensor = |info: &refrain_formats::TensorInfo| InputTensor {
            name: info.name().to_owned(),
            dtype: info.dtype(),
            shape: info.shape(),
        };
        ModelInput {
            metadata: metadata.map(|(key, value)| (key.to_owned(), value.clone())).collect(),
            tensors: gguf.tensors().iter().map(tensor).collect(),
            fetch: Box::new(|idx| Ok(gguf.tensor(gguf.tensors()[idx].name())?)),
            files: gguf.files().map(|(path, _)| path.to_owned()).collect(),
        }
    }

    fn number(&self, key: &str) -> Option<usize> {
        let arch = self.text("general.architecture")?;
        let value = self.value(&format!("{arch}.{key}"))?;
        match value {
            MetadataValue::U32(n) => usize::try_from(*n).ok(),
            MetadataValue::U64(n) => usize::try_from(*n).ok(),
            MetadataValue::I32(n) => usize::try_from(*n).ok(),
            // Per layer: the sizes of the first stand for all.
            MetadataValue::Array(array) => match array.get(0) {
                Some(MetadataValue::U32(n)) => usize::try_from(n).ok(),
                Some(MetadataValue::I32(n)) => usize::try_from(n).ok(),
                _ => None,
            },
            _ => None,
        }
    }

    fn value(&self, key: &str) -> Option<&MetadataValue> {
        self.metadata.iter().find(|(k, _)| k == key).map(|(_, value)| value)
    }

    fn text(&self, key: &str) -> Option<&str> {
        match self.value(key)? {
            MetadataValue::String(text) => Some(text),
            _ => None,
        }
    }

    fn facts(&self, has_imatrix: bool) -> ModelFacts {
        let n_kv_heads = self.number("attention.head_count_kv").unwrap_or(1).max(1);
        let is_recurrent = |t: &InputTensor| t.name.contains(".ssm_") || t.name.contains(".shortconv.");
        ModelFacts {
            is_llama: self.text("general.architecture") == Some("llama"),
            is_recurrent: self.tensors.iter().any(is_recurrent),
            n_layers: self.number("block_count").unwrap_or(0),
            n_heads_per_kv: self.number("attention.head_count").unwrap_or(1) / n_kv_heads,
            n_experts: self.number("expert_count").unwrap_or(0),
            has_output: self.tensors.iter().any(|t| t.name == "output.weight"),
            has_imatrix,
        }
    }
}

/// How to quantise.
#[derive(Debug)]
pub struct Options<'a> {
    /// The file type.
    pub recipe: Recipe,
    /// Types that the user chose; the last match counts.
    pub overrides: &'a [Override],
    /// Importance of columns.
    pub imatrix: Option<&'a Imatrix>,
    /// Accept a model that is already quantised.
    pub requantize: bool,
    /// Keep tensors with values that are not finite in their type instead of refusing them.
    pub allow_nonfinite: bool,
    /// Threads.
    pub n_threads: usize,
}

/// Progress of a pass.
#[derive(Clone, Copy, Debug)]
pub struct Progress<'a> {
    /// Elements that are written.
    pub done: u64,
    /// Elements in all.
    pub total: u64,
    /// The current tensor.
    pub tensor: &'a str,
}

/// What became of a model.
#[derive(Clone, Debug)]
pub struct QuantReport {
    /// Its tensors, in the order of the file.
    pub tensors: Vec<QuantTensor>,
    /// Bytes of all tensors before and after.
    pub bytes: [u64; 2],
    /// How long it took.
    pub took: Duration,
}

/// What became of a tensor.
#[derive(Clone, Debug)]
pub struct QuantTensor {
    /// Name.
    pub name: String,
    /// Sizes, outermost first.
    pub shape: Shape,
    /// Its type before.
    pub from: DType,
    /// Its type after, and why it is not the base type of the recipe.
    pub choice: Choice,
    /// Bytes after.
    pub n_bytes: u64,
    /// Whether an importance matrix was used.
    pub is_weighted: bool,
}

/// Quantises a model into a file. An existing file is replaced when everything is on the disk.
pub fn quantize_file(
    input: &ModelInput<'_>,
    options: &Options<'_>,
    out: &Path,
    mut progress: impl FnMut(Progress<'_>),
) -> Result<QuantReport, QuantError> {
    let began = Instant::now();
    let same = |file: &PathBuf| matches!((file.canonicalize(), out.canonicalize()), (Ok(a), Ok(b)) if a == b);
    if input.files.iter().any(same) {
        return Err(QuantError::Overwrite { path: out.to_owned() });
    }
    let tensors = plan(input, options)?;
    let mut writer = GgufWriter::new();
    write_metadata(input, options, &mut writer)?;
    for tensor in &tensors {
        writer.declare(&tensor.name, tensor.choice.dtype, tensor.shape)?;
    }
    let total = tensors.iter().map(|t| t.shape.n_elements() as u64).sum();
    let mut done = 0;
    writer.write_streamed(out, |idx, sink| {
        let tensor = &tensors[idx];
        let source = (input.fetch)(idx)?;
        encode_tensor(tensor, &source, options, sink, |n_bytes| {
            let n =
                n_bytes / tensor.choice.dtype.block_bytes() as u64 * tensor.choice.dtype.block_len() as u64;
            done += n;
            progress(Progress { done, total, tensor: &tensor.name });
        })?;
        // Pages of the source need not stay in memory.
        source.bytes().release();
        Ok::<(), QuantError>(())
    })?;
    let before =
        input.tensors.iter().map(|t| t.dtype.bytes_for(t.shape.n_elements()).unwrap_or(0) as u64).sum();
    let after = tensors.iter().map(|t| t.n_bytes).sum();
    Ok(QuantReport { tensors, bytes: [before, after], took: began.elapsed() })
}

/// Decides everything before the first byte is written.
fn plan(input: &ModelInput<'_>, options: &Options<'_>) -> Result<Vec<QuantTensor>, QuantError> {
    let facts = input.facts(options.imatrix.is_some());
    let mut choices = choose(options.recipe, options.overrides, &input.tensors, &facts)?;
    let is_again = |(t, c): &(&InputTensor, &Choice)| t.dtype.is_quantized() && t.dtype != c.dtype;
    let mut again = input.tensors.iter().zip(&choices).filter(is_again);
    if let (Some((first, _)), false) = (again.next(), options.requantize) {
        let n = again.count() + 1;
        return Err(QuantError::Requantize { n, first: first.name.clone(), dtype: first.dtype });
    }
    if options.allow_nonfinite {
        for (idx, (tensor, choice)) in input.tensors.iter().zip(&mut choices).enumerate() {
            if tensor.dtype == choice.dtype {
                continue;
            }
            let source = (input.fetch)(idx)?;
            let wrap = |source| QuantError::Tensor { name: tensor.name.clone(), source };
            if !is_finite(&source, options.n_threads).map_err(wrap)? {
                *choice = Choice { dtype: source.dtype(), reason: Some(Reason::NonFinite) };
            }
            source.bytes().release();
        }
    }
    if let Some(imatrix) = options.imatrix {
        imatrix.check(&input.tensors)?;
    }
    let planned = |(tensor, choice): (&InputTensor, Choice)| {
        let (name, shape) = (tensor.name.clone(), tensor.shape);
        let n_bytes = choice.dtype.bytes_for(shape.n_elements()).unwrap_or(0) as u64;
        let is_encoded = choice.dtype.is_quantized() && choice.dtype != tensor.dtype;
        let is_weighted = is_encoded && options.imatrix.is_some_and(|m| m.find(&name).is_some());
        QuantTensor { name, shape, from: tensor.dtype, choice, n_bytes, is_weighted }
    };
    Ok(input.tensors.iter().zip(choices).map(planned).collect())
}

fn write_metadata(
    input: &ModelInput<'_>,
    options: &Options<'_>,
    writer: &mut GgufWriter,
) -> Result<(), FormatError> {
    /// The version of llama.cpp's block layouts.
    const QUANTIZATION_VERSION: u32 = 2;
    let ours = |key: &str| {
        matches!(key, "general.file_type" | "general.quantization_version")
            || options.imatrix.is_some() && key.starts_with("quantize.imatrix.")
    };
    for (key, value) in input.metadata.iter().filter(|(key, _)| !ours(key)) {
        writer.set(key, value.clone())?;
    }
    writer.set("general.file_type", options.recipe.file_type())?;
    if options.recipe.base().is_quantized() {
        writer.set("general.quantization_version", QUANTIZATION_VERSION)?;
    }
    if let Some(imatrix) = options.imatrix {
        writer.set("quantize.imatrix.file", imatrix.path().display().to_string().as_str())?;
        if let Some(dataset) = imatrix.datasets().first() {
            writer.set("quantize.imatrix.dataset", dataset.as_str())?;
        }
        writer.set("quantize.imatrix.entries_count", imatrix.n_entries() as u32)?;
        writer.set("quantize.imatrix.chunks_count", imatrix.n_chunks())?;
    }
    Ok(())
}

fn encode_tensor(
    tensor: &QuantTensor,
    source: &HostTensor,
    options: &Options<'_>,
    sink: &mut TensorSink<'_>,
    mut written: impl FnMut(u64),
) -> Result<(), QuantError> {
    let dtype = tensor.choice.dtype;
    if source.dtype() == dtype && source.layout().is_contiguous() {
        // Copied as they are, values that are not finite included.
        const PIECE: usize = 16 << 20;
        for piece in source.bytes().as_slice().chunks(PIECE / dtype.block_bytes() * dtype.block_bytes()) {
            sink.write(piece)?;
            written(piece.len() as u64);
        }
        return Ok(());
    }
    let importance =
        options.imatrix.and_then(|imatrix| imatrix.find(&tensor.name)).map(|entry| entry.means());
    let encode =
        Encode { tensor: source, dtype, importance: importance.as_deref(), n_threads: options.n_threads };
    let named = |error| match error {
        Either::Tensor(source) => QuantError::Tensor { name: tensor.name.clone(), source },
        Either::Format(error) => error.into(),
    };
    encode
        .run(|bytes| {
            sink.write(bytes).map_err(Either::Format)?;
            written(bytes.len() as u64);
            Ok(())
        })
        .map_err(named)
}

/// An error of encoding or of writing.
enum Either {
    Tensor(TensorError),
    Format(FormatError),
}

impl From<TensorError> for Either {
    fn from(error: TensorError) -> Either {
        Either::Tensor(error)
    }
}
