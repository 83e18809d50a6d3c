//! Exports a model as a Hugging Face folder or a GGUF file.
//!
//! Both formats differ from the weights that a step uses. Gemma folders store norm weights minus one. GGUF
//! files of llama interleave the rows of queries and keys so that elements that are rotated together are
//! adjacent; folders store them half a head apart.

use crate::error::ModelError;
use crate::export_hf::HfTensor;
use crate::export_recurrent::RecurrentTensor;
use crate::model::Model;
use crate::rope::inverse_frequencies;
use refrain_formats::gguf::{Gguf, GgufWriter};
use refrain_formats::hf::{NewTensor, write_safetensors, write_whole};
use refrain_formats::params::{Arch, LayerAttention, RopePairing, RopeScaling, VHeads};
use refrain_formats::tokenizer::VocabSpec;
use refrain_graph::WeightId;
use refrain_tensor::{DType, HostTensor, Shape, quant};
use std::path::Path;

/// Output format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    Hf,
    Gguf,
}

/// A tensor of a file: the rows of one or more weights.
#[derive(Clone, Debug)]
pub(crate) struct FileTensor {
    pub(crate) name: String,
    pub(crate) parts: Vec<WeightId>,
}

/// The contents of a GGUF file, except the values of its tensors.
#[derive(Debug)]
pub struct GgufContents {
    /// The metadata.
    pub writer: GgufWriter,
    /// The tensors, in the order of the file.
    pub tensors: Vec<GgufTensor>,
}

/// A tensor of a GGUF file to be written.
#[derive(Debug)]
pub struct GgufTensor {
    /// Name.
    pub name: String,
    /// Sizes, outermost first.
    pub shape: Shape,
    /// The type of the weights; F32 where the format wants it.
    pub dtype: DType,
    source: GgufSource,
}

#[derive(Debug)]
enum GgufSource {
    Weights(FileTensor),
    Recurrent(RecurrentTensor),
    Table(Vec<f32>),
}

/// The divisor of a pair that does not rotate, which should be infinite.
const UNROTATED: f32 = 1e30;

/// Small matrices that llama.cpp reads as F32 only.
fn is_f32_in_gguf(name: &str) -> bool {
    let parts = ["ffn_gate_inp.", "ssm_conv1d.", "shortconv.conv.", "_exps.bias"];
    parts.iter().any(|part| name.contains(part))
}

/// Reordering of the rows of a head matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reorder {
    /// From half a head apart to adjacent.
    Join,
    /// From adjacent to half a head apart.
    Part,
}

impl Model {
    /// Returns the same model with other values for some weights.
    pub fn with_values(
        &self,
        values: impl IntoIterator<Item = (WeightId, HostTensor)>,
    ) -> Result<Model, ModelError> {
        let mut model = self.clone();
        for (id, tensor) in values {
            let weight = &mut model.weights[id.idx()];
            if tensor.shape() != weight.ty.shape {
                let (name, got, want) = (weight.name.clone(), tensor.shape(), weight.ty.shape);
                return Err(ModelError::TensorShape { name, got, want });
            }
            weight.ty.dtype = tensor.dtype();
            model.tensors[id.idx()] = tensor;
        }
        Ok(model)
    }

    /// Writes `config.json` and `model.safetensors` into an existing folder. An adapter is merged into the
    /// weights.
    pub fn write_hf(&self, folder: &Path, dtype: DType) -> Result<(), ModelError> {
        let mut config = self.config().clone();
        if config.rope.has_freq_factors {
            let share = self.proportional_share().ok_or(ModelError::FreqFactors)?;
            config.rope.scaling = RopeScaling::Proportional { share, factor: 1.0 };
            config.rope.has_freq_factors = false;
        }
        let config = config.to_hf_json(dtype)?;
        let files = self.hf_tensors();
        let tensor = |file: &HfTensor| NewTensor { name: file.name.clone(), dtype, shape: file.shape };
        let tensors: Vec<NewTensor> = files.iter().map(tensor).collect();
        let path = folder.join("model.safetensors");
        write_safetensors(&path, &tensors, &[], |idx| {
            let file = &files[idx];
            encode(&file.name, dtype, &self.hf_values(file)?)
        })?;
        // Written last: a folder with a configuration counts as a complete model.
        Ok(write_whole(&folder.join("config.json"), format!("{config:#}\n").as_bytes())?)
    }

    /// Writes a GGUF file: matrices as `dtype`, vectors as F32. An adapter is merged into the weights.
    pub fn write_gguf(&self, path: &Path, dtype: DType, vocab: &VocabSpec) -> Result<(), ModelError> {
        let GgufContents { mut writer, tensors } = self.gguf_contents(vocab)?;
        let dtype_of = |tensor: &GgufTensor| if tensor.shape.rank() < 2 { DType::F32 } else { dtype };
        for tensor in &tensors {
            writer.declare(&tensor.name, dtype_of(tensor), tensor.shape)?;
        }
        writer.write_streamed(path, |idx, sink| {
            let tensor = &tensors[idx];
            Ok::<(), ModelError>(sink.write(&encode(
                &tensor.name,
                dtype_of(tensor),
                &self.gguf_values(tensor)?,
            )?)?)
        })?;
        Ok(self.config().check_gguf(&Gguf::open(path)?)?)
    }

    /// The metadata and tensors of a GGUF file of the model. An adapter is merged into the weights.
    pub fn gguf_contents(&self, vocab: &VocabSpec) -> Result<GgufContents, ModelError> {
        let mut writer = GgufWriter::new();
        self.config().write_gguf(&mut writer)?;
        vocab.write_gguf(&mut writer, self.config().n_vocab)?;
        let table = |(name, values): (&str, Vec<f32>)| GgufTensor {
            name: name.to_owned(),
            shape: Shape::from([values.len()]),
            dtype: DType::F32,
            source: GgufSource::Table(values),
        };
        let mut tensors: Vec<GgufTensor> = self.frequency_divisors().into_iter().map(table).collect();
        for file in self.file_tensors(Form::Gguf) {
            if let Some(recurrent) = self.recurrent_tensors(file.parts[0]) {
                tensors.extend(recurrent.into_iter().map(|tensor| self.recurrent_gguf(tensor)));
                continue;
            }
            let shape = self.shape_of(&file);
            let dtype = self.weights()[file.parts[0].idx()].ty.dtype;
            let dtype = if shape.rank() < 2 || is_f32_in_gguf(&file.name) { DType::F32 } else { dtype };
            let name = file.name.clone();
            tensors.push(GgufTensor { name, shape, dtype, source: GgufSource::Weights(file) });
        }
        Ok(GgufContents { writer, tensors })
    }

    fn recurrent_gguf(&self, tensor: RecurrentTensor) -> GgufTensor {
        let (name, shape) = (tensor.name.clone(), tensor.shape);
        let dtype = self.weights()[tensor.ids[0].idx()].ty.dtype;
        let dtype = if shape.rank() < 2 || is_f32_in_gguf(&name) { DType::F32 } else { dtype };
        GgufTensor { name, shape, dtype, source: GgufSource::Recurrent(tensor) }
    }

    /// Names of the GGUF tensors that hold a weight: several if the model stacks them, one if several weights share it.
    pub fn gguf_names(&self, id: WeightId) -> Vec<String> {
        let name = &self.weights()[id.idx()].name;
        if let Some(site) = self.sites().iter().find(|site| site.is_fused() && site.parts.contains(&id)) {
            return vec![format!("{}.weight", site.gguf)];
        }
        match self.recurrent_tensors(id) {
            Some(tensors) => tensors.into_iter().map(|tensor| tensor.name).collect(),
            None => vec![name.clone()],
        }
    }

    /// The values of a tensor of [`Model::gguf_contents`].
    pub fn gguf_values(&self, tensor: &GgufTensor) -> Result<Vec<f32>, ModelError> {
        match &tensor.source {
            GgufSource::Table(values) => Ok(values.clone()),
            GgufSource::Weights(file) => self.values_of(file, Form::Gguf),
            GgufSource::Recurrent(recurrent) => self.recurrent_values(recurrent, VHeads::Tiled),
        }
    }

    /// The tensors in the model's files, in the order of its weights.
    pub(crate) fn file_tensors(&self, form: Form) -> Vec<FileTensor> {
        let is_file = |idx: &usize| !self.is_derived(*idx) && !self.is_of_adapter(*idx);
        let mut files = Vec::new();
        for id in (0..self.weights().len()).filter(is_file).map(WeightId::from_idx) {
            let name = |gguf: &str, hf: &str| if form == Form::Hf { hf.to_owned() } else { gguf.to_owned() };
            match self.sites().iter().find(|site| site.is_fused() && site.parts.contains(&id)) {
                None => {
                    let name = name(&self.weights()[id.idx()].name, self.hf_name(id));
                    files.push(FileTensor { name, parts: vec![id] });
                }
                // The site's other parts are written together with the first.
                Some(site) if site.parts.first() == Some(&id) => {
                    let name = format!("{}.weight", name(&site.gguf, &site.module));
                    files.push(FileTensor { name, parts: site.parts.clone() });
                }
                Some(_) => {}
            }
        }
        files
    }

    /// Shape of the concatenated parts.
    pub(crate) fn shape_of(&self, file: &FileTensor) -> Shape {
        let shape = |id: &WeightId| self.weights()[id.idx()].ty.shape;
        match file.parts.as_slice() {
            [one] => shape(one),
            parts => {
                let n_rows = parts.iter().map(|id| shape(id).dims()[0]).sum::<usize>();
                Shape::from([n_rows, shape(&parts[0]).dims()[1]])
            }
        }
    }

    pub(crate) fn values_of(&self, file: &FileTensor, form: Form) -> Result<Vec<f32>, ModelError> {
        let parts = file.parts.iter().map(|&id| self.values_for(id, form)).collect::<Result<Vec<_>, _>>()?;
        Ok(parts.concat())
    }

    /// The values that a file stores for a weight.
    fn values_for(&self, id: WeightId, form: Form) -> Result<Vec<f32>, ModelError> {
        let (weight, config) = (&self.weights()[id.idx()], self.config());
        let wrap = |source| ModelError::Tensor { name: weight.name.clone(), source };
        let mut values = self.tensors()[id.idx()].to_f32().map_err(wrap)?;
        self.merge_into(id, &mut values)?;
        let part =
            weight.name.strip_prefix("blk.").and_then(|rest| rest.split_once('.')).map(|(_, part)| part);
        // Gemma 4's router reads a norm that is scaled by one over the square root of the hidden size.
        if part == Some("ffn_gate_inp.scale") {
            values.iter_mut().for_each(|v| *v *= (config.hidden as f32).sqrt());
        }
        let is_norm = weight.name.contains("norm");
        // The norm inside a recurrent layer is an exception.
        let less_one = matches!(config.arch, Arch::Gemma2 | Arch::Gemma3 | Arch::Qwen35)
            && part != Some("ssm_norm.weight");
        if form == Form::Hf && less_one && is_norm {
            values.iter_mut().for_each(|v| *v -= 1.0);
        }
        let is_rotated = matches!(part, Some(p) if (p.starts_with("attn_q.") || p.starts_with("attn_k.")));
        let reorder = match (form, config.rope.style) {
            (Form::Gguf, RopePairing::Neox) => Some(Reorder::Join),
            (Form::Hf, RopePairing::Norm) => Some(Reorder::Part),
            _ => None,
        };
        match reorder.filter(|_| is_rotated && config.arch.is_joined_in_gguf()) {
            Some(reorder) => {
                Ok(reordered(&values, reorder, weight.ty.shape, config.head_dim, config.rope.dims))
            }
            None => Ok(values),
        }
    }

    /// Tables of frequency divisors that no GGUF key can express.
    fn frequency_divisors(&self) -> Vec<(&'static str, Vec<f32>)> {
        let long = self.config().long_rope.as_ref();
        let long = long.map(|factors| {
            let (short, long) = (factors.short.clone(), factors.long.clone());
            [("rope_factors_short.weight", short), ("rope_factors_long.weight", long)]
        });
        let usual = self.usual_divisors().map(|divisors| ("rope_freqs.weight", divisors));
        long.into_iter().flatten().chain(usual).collect()
    }

    /// The rotated share of a head, if a file's table of divisors says only which pairs rotate. GGUF files of Gemma 4 have
    /// such a table.
    fn proportional_share(&self) -> Option<f32> {
        let divisors = self.usual_divisors().filter(|_| self.config().arch == Arch::Gemma4)?;
        let n_rotated = divisors.iter().take_while(|&&divisor| (divisor - 1.0).abs() < 1e-6).count();
        // Computed from frequencies, and so not exact.
        let is_share = divisors[n_rotated..].iter().all(|&divisor| divisor >= 0.5 * UNROTATED);
        is_share.then(|| n_rotated as f32 / divisors.len() as f32)
    }

    /// The divisor table of full-attention layers.
    fn usual_divisors(&self) -> Option<Vec<f32>> {
        let config = self.config();
        let rope = config.rope;
        let scaled_in_tensor =
            matches!(rope.scaling, RopeScaling::Llama3 { .. } | RopeScaling::Proportional { .. });
        let layer = match rope.local_theta {
            Some(_) => config.layers.iter().position(|layer| *layer == LayerAttention::Full)?,
            None => 0,
        };
        let id = self.shared().frequencies(layer);
        if !rope.has_freq_factors && !scaled_in_tensor {
            return None;
        }
        let scaled = self.tensors()[id.idx()].to_f32().ok()?;
        let plain = inverse_frequencies(rope.theta, rope.dims, RopeScaling::None, None);
        let divisor = |(plain, scaled): (f32, f32)| if scaled == 0.0 { UNROTATED } else { plain / scaled };
        Some(plain.into_iter().zip(scaled).map(divisor).collect())
    }
}

pub(crate) fn encode(name: &str, dtype: DType, values: &[f32]) -> Result<Vec<u8>, ModelError> {
    let mut bytes = vec![0; dtype.bytes_for(values.len()).unwrap_or(0)];
    let wrap = |source| ModelError::Tensor { name: name.to_owned(), source };
    quant::quantize(dtype, values, &mut bytes).map_err(wrap)?;
    Ok(bytes)
}

/// Reorders the rows of each head; rows past the rotated `dims` stay in place.
pub(crate) fn reordered(
    values: &[f32],
    reorder: Reorder,
    shape: Shape,
    head_dim: usize,
    dims: usize,
) -> Vec<f32> {
    let n_rows = shape.dims().first().copied().unwrap_or(1).max(1);
    let n_cols = values.len() / n_rows;
    let from = |row: usize| {
        let (head, i) = (row / head_dim * head_dim, row % head_dim);
        head + match reorder {
            _ if i >= dims => i,
            Reorder::Join => i % 2 * (dims / 2) + i / 2,
            Reorder::Part => i % (dims / 2) * 2 + i / (dims / 2),
        }
    };
    (0..n_rows).flat_map(|row| values[from(row) * n_cols..][..n_cols].iter().copied()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reordering_rows_round_trips() {
        let shape = Shape::from([12, 1]);
        let values: Vec<f32> = (0..12).map(|v| v as f32).collect();
        // Two heads of six rows, four of which are rotated.
        let joined = reordered(&values, Reorder::Join, shape, 6, 4);
        assert_eq!(joined, [0., 2., 1., 3., 4., 5., 6., 8., 7., 9., 10., 11.]);
        assert_eq!(reordered(&joined, Reorder::Part, shape, 6, 4), values);
    }
}
