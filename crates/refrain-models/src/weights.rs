//! Finding, checking and naming weights.

use crate::adapter::LinearSite;
use crate::error::ModelError;
use crate::layers::BiasedNorm;
use refrain_formats::params::ModelConfig;
use refrain_formats::{FormatError, ModelFiles};
use refrain_graph::{TensorType, Weight, WeightId};
use refrain_tensor::{Bytes, DType, HostTensor, Shape, quant};

/// Source of a model's tensors.
pub trait TensorSource {
    /// Finds a tensor by its GGUF or Hugging Face name; `None` if there is none.
    fn find(&self, gguf_name: &str, hf_name: &str) -> Result<Option<HostTensor>, FormatError>;

    /// The name under which this source looks up the tensor, for messages.
    fn name<'n>(&self, gguf_name: &'n str, hf_name: &'n str) -> &'n str;
}

impl TensorSource for ModelFiles {
    fn find(&self, gguf_name: &str, hf_name: &str) -> Result<Option<HostTensor>, FormatError> {
        let name = self.name(gguf_name, hf_name);
        if self.has_tensor(name) {
            return self.tensor(name).map(Some);
        }
        // The text part of a multimodal model, in new and old folder layouts.
        let new = name.strip_prefix("model.").map(|rest| format!("model.language_model.{rest}"));
        // An encoder below a head, and old names of its norms.
        let old =
            name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta");
        let below = [format!("bert.{name}"), format!("bert.{old}"), old];
        let inner = new.into_iter().chain([format!("language_model.{name}")]).chain(below);
        let is_there = |name: &String| matches!(self, ModelFiles::Hf(_)) && self.has_tensor(name);
        inner.into_iter().find(is_there).map(|name| self.tensor(&name)).transpose()
    }

    fn name<'n>(&self, gguf_name: &'n str, hf_name: &'n str) -> &'n str {
        match self {
            ModelFiles::Gguf(_) => gguf_name,
            ModelFiles::Hf(_) => hf_name,
        }
    }
}

/// Names of a layer's tensors: in GGUF after `blk.N.`, in Hugging Face folders after `model.layers.N.`.
pub(crate) type HfNames = &'static [(&'static str, &'static str)];

/// Names that most architectures share. An architecture's own table takes precedence.
const USUAL_NAMES: HfNames = &[
    ("attn_norm", "input_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_q_norm", "self_attn.q_norm"),
    ("attn_k_norm", "self_attn.k_norm"),
    ("attn_output", "self_attn.o_proj"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
    ("ffn_gate_inp", "mlp.gate"),
];

/// A linear map.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Linear {
    pub weight: WeightId,       // [n_out, n_in]
    pub bias: Option<WeightId>, // [n_out]
}

/// Collects a model's weights in a fixed order, which is the order of ids in every graph of the model.
pub(crate) struct WeightTable<'a> {
    pub config: &'a ModelConfig,
    source: &'a dyn TensorSource,
    /// Names of this architecture, which take precedence.
    own_names: HfNames,
    pub weights: Vec<Weight>,
    pub tensors: Vec<HostTensor>,
    /// Hugging Face name of each weight.
    pub hf_names: Vec<String>,
    /// Weights computed from hyperparameters: tables, not parameters.
    pub derived: Vec<WeightId>,
    /// Weights from the files that are constants of the graph and not trained.
    pub fixed: Vec<WeightId>,
    /// The linear maps of the layers.
    pub sites: Vec<LinearSite>,
}

impl<'a> WeightTable<'a> {
    pub(crate) fn new(config: &'a ModelConfig, source: &'a dyn TensorSource, own_names: HfNames) -> Self {
        let (weights, tensors) = (Vec::new(), Vec::new());
        let (hf_names, derived, fixed) = (Vec::new(), Vec::new(), Vec::new());
        let sites = Vec::new();
        WeightTable { config, source, own_names, weights, tensors, hf_names, derived, fixed, sites }
    }

    /// A tensor outside the layers.
    pub(crate) fn global(&mut self, gguf: &str, hf: &str, dims: &[usize]) -> Result<WeightId, ModelError> {
        let tensor = self.find(gguf, hf, dims)?.ok_or_else(|| self.missing(gguf, hf))?;
        Ok(self.push(gguf, hf, tensor))
    }

    /// An optional tensor outside the layers.
    pub(crate) fn optional(
        &mut self,
        gguf: &str,
        hf: &str,
        dims: &[usize],
    ) -> Result<Option<WeightId>, ModelError> {
        Ok(self.find(gguf, hf, dims)?.map(|tensor| self.push(gguf, hf, tensor)))
    }

    /// Norm weights outside the layers.
    pub(crate) fn global_norm(&mut self, gguf: &str, hf: &str, n: usize) -> Result<WeightId, ModelError> {
        let tensor = self.find(gguf, hf, &[n])?.ok_or_else(|| self.missing(gguf, hf))?;
        let tensor = self.with_norm_offset(self.source.name(gguf, hf), tensor)?;
        Ok(self.push(gguf, hf, tensor))
    }

    /// Norm weights in a layer.
    pub(crate) fn norm(&mut self, layer: usize, name: &str, n: usize) -> Result<WeightId, ModelError> {
        let (gguf, hf) = self.layer_tensor(layer, name, "weight");
        self.global_norm(&gguf, &hf, n)
    }

    /// A layer norm with a bias outside the layers, by the names of its module.
    pub(crate) fn global_biased_norm(&mut self, [gguf, hf]: [&str; 2]) -> Result<BiasedNorm, ModelError> {
        let n = self.config.hidden;
        let mut part = |part: &str| self.global_norm(&format!("{gguf}.{part}"), &format!("{hf}.{part}"), n);
        Ok(BiasedNorm { weight: part("weight")?, bias: part("bias")? })
    }

    /// A layer norm with a bias in a layer.
    pub(crate) fn biased_norm(&mut self, layer: usize, name: &str) -> Result<BiasedNorm, ModelError> {
        let n = self.config.hidden;
        let mut part = |part: &str| {
            let (gguf, hf) = self.layer_tensor(layer, name, part);
            self.global_norm(&gguf, &hf, n)
        };
        Ok(BiasedNorm { weight: part("weight")?, bias: part("bias")? })
    }

    /// The first row of a table outside the layers, in F32.
    pub(crate) fn first_row(
        &mut self,
        [gguf, hf]: [&str; 2],
        dims: [usize; 2],
    ) -> Result<WeightId, ModelError> {
        let table = self.find(gguf, hf, &dims)?.ok_or_else(|| self.missing(gguf, hf))?;
        let wrap = |source| ModelError::Tensor { name: self.source.name(gguf, hf).into(), source };
        let row = table.to_f32().map_err(wrap)?;
        let row = HostTensor::from_f32(Shape::from([dims[1]]), &row[..dims[1]]).map_err(wrap)?;
        Ok(self.push(gguf, hf, row))
    }

    /// A linear map in a layer.
    pub(crate) fn linear(
        &mut self,
        layer: usize,
        name: &str,
        [n_out, n_in]: [usize; 2],
        has_bias: bool,
    ) -> Result<Linear, ModelError> {
        let (gguf, hf) = self.layer_tensor(layer, name, "weight");
        let weight = self.global(&gguf, &hf, &[n_out, n_in])?;
        let of_module = |name: &str| name.strip_suffix(".weight").unwrap_or(name).to_owned();
        self.sites.push(LinearSite { module: of_module(&hf), gguf: of_module(&gguf), parts: vec![weight] });
        let bias = match has_bias {
            true => {
                let (gguf, hf) = self.layer_tensor(layer, name, "bias");
                let tensor = self.find(&gguf, &hf, &[n_out])?.ok_or_else(|| self.missing(&gguf, &hf))?;
                let tensor = in_f32(self.source.name(&gguf, &hf), tensor)?;
                Some(self.push(&gguf, &hf, tensor))
            }
            false => None,
        };
        Ok(Linear { weight, bias })
    }

    /// A matrix in a layer that adapters do not apply to, such as a router.
    pub(crate) fn matrix(
        &mut self,
        layer: usize,
        name: &str,
        dims: [usize; 2],
    ) -> Result<WeightId, ModelError> {
        let (gguf, hf) = self.layer_tensor(layer, name, "weight");
        self.global(&gguf, &hf, &dims)
    }

    /// A tensor in a layer, by the suffixes of its two names.
    pub(crate) fn in_layer(
        &mut self,
        layer: usize,
        [gguf, hf]: [&str; 2],
        dims: &[usize],
    ) -> Result<WeightId, ModelError> {
        self.global(&format!("blk.{layer}.{gguf}"), &format!("model.layers.{layer}.{hf}"), dims)
    }

    /// An optional tensor in a layer, by the suffixes of its two names.
    pub(crate) fn optional_in_layer(
        &mut self,
        layer: usize,
        names: [&str; 2],
        dims: &[usize],
    ) -> Result<Option<WeightId>, ModelError> {
        let (gguf, hf) = plain_names(layer, names);
        self.optional(&gguf, &hf, dims)
    }

    /// A tensor in a layer that has one of several shapes in files, as another shape of as many elements.
    pub(crate) fn reshaped(
        &mut self,
        layer: usize,
        names: [&str; 2],
        shapes: &[&[usize]],
        dims: &[usize],
    ) -> Result<WeightId, ModelError> {
        let (gguf, hf) = plain_names(layer, names);
        let found = self.source.find(&gguf, &hf)?.ok_or_else(|| self.missing(&gguf, &hf))?;
        let dims_there = found.shape();
        let known = shapes.iter().find(|shape| dims_there.dims() == **shape);
        let found = self.find(&gguf, &hf, known.unwrap_or(&shapes[0]))?;
        let found = found.ok_or_else(|| self.missing(&gguf, &hf))?;
        let wrap = |source| ModelError::Tensor { name: self.source.name(&gguf, &hf).into(), source };
        let shape = Shape::new(dims).map_err(wrap)?;
        let tensor = HostTensor::new(found.dtype(), shape, found.bytes().clone()).map_err(wrap)?;
        Ok(self.push(&gguf, &hf, tensor))
    }

    /// A vector in a layer, multiplied by a number.
    pub(crate) fn scaled_vector(
        &mut self,
        layer: usize,
        [gguf, hf]: [&str; 2],
        n: usize,
        scale: f32,
    ) -> Result<WeightId, ModelError> {
        let (gguf, hf) = (format!("blk.{layer}.{gguf}"), format!("model.layers.{layer}.{hf}"));
        let tensor = self.find(&gguf, &hf, &[n])?.ok_or_else(|| self.missing(&gguf, &hf))?;
        let wrap = |source| ModelError::Tensor { name: self.source.name(&gguf, &hf).into(), source };
        let values: Vec<f32> = tensor.to_f32().map_err(wrap)?.iter().map(|v| v * scale).collect();
        let tensor = HostTensor::from_f32(tensor.shape(), &values).map_err(wrap)?;
        Ok(self.push(&gguf, &hf, tensor))
    }

    /// The matrices of all experts of a layer as one weight, `[n_experts, n_out, n_in]`. Folders have one
    /// tensor per expert, which are concatenated; `{}` in `hf_name` is the expert's index.
    pub(crate) fn experts(
        &mut self,
        layer: usize,
        name: &str,
        hf_name: &str,
        dims: [usize; 3],
    ) -> Result<WeightId, ModelError> {
        let gguf = format!("blk.{layer}.{name}.weight");
        let hf = |expert: &str| format!("model.layers.{layer}.{}.weight", hf_name.replace("{}", expert));
        let whole = hf("{}");
        if self.source.name(&gguf, &whole) == gguf {
            return self.global(&gguf, &whole, &dims);
        }
        let (dtype, bytes) = match self.joined(&hf, dims, None) {
            // Experts of a quantised folder: some have scales that do not fit in blocks.
            Err(ModelError::ExpertType { got, first, .. }) if got.is_float() != first.is_float() => {
                let float = if got.is_float() { got } else { first };
                self.joined(&hf, dims, Some(float))?
            }
            joined => joined?,
        };
        let wrap = |source| ModelError::Tensor { name: whole.clone(), source };
        let shape = Shape::new(&dims).map_err(wrap)?;
        let tensor = HostTensor::new(dtype, shape, Bytes::new(bytes)).map_err(wrap)?;
        Ok(self.push(&gguf, &whole, tensor))
    }

    /// The matrices of a folder's experts one after the other, as they are or as `float`.
    fn joined(
        &self,
        hf: &dyn Fn(&str) -> String,
        [n_experts, n_out, n_in]: [usize; 3],
        float: Option<DType>,
    ) -> Result<(DType, Vec<u8>), ModelError> {
        let mut bytes = Vec::new();
        let mut dtype = float;
        for expert in 0..n_experts {
            let one = hf(&expert.to_string());
            let mut tensor =
                self.find(&one, &one, &[n_out, n_in])?.ok_or_else(|| self.missing(&one, &one))?;
            if let Some(float) = float {
                tensor = in_float(&one, &tensor, float)?;
            }
            let first = *dtype.get_or_insert(tensor.dtype());
            if tensor.dtype() != first {
                return Err(ModelError::ExpertType { name: one, got: tensor.dtype(), first });
            }
            bytes.extend_from_slice(tensor.bytes().as_slice());
            // The source pages of what was copied need not stay in memory.
            tensor.bytes().release();
        }
        Ok((dtype.unwrap_or(DType::F32), bytes))
    }

    /// One projection of all experts of a layer, `[n_experts, n_out, n_in]` (gpt-oss).
    pub(crate) fn part_of_experts(
        &mut self,
        layer: usize,
        n_experts: usize,
        part: &ExpertPart,
    ) -> Result<WeightId, ModelError> {
        let [n_out, n_in] = part.rows;
        let gguf = format!("blk.{layer}.{}.weight", part.name);
        let hf = format!("model.layers.{layer}.mlp.experts.{}", part.hf_name);
        if self.source.name(&gguf, &hf) == gguf {
            return self.global(&gguf, &hf, &[n_experts, n_out, n_in]);
        }
        let n_parts = part.of[1];
        let [blocks, scales] = ["blocks", "scales"].map(|kind| format!("{hf}_{kind}"));
        let tensor = match self.source.find(&blocks, &blocks)? {
            Some(found) => {
                let exponents = self.source.find(&scales, &scales)?;
                let exponents = exponents.ok_or_else(|| self.missing(&scales, &scales))?;
                let n_blocks = n_in.div_ceil(32);
                let found = bytes_of(&blocks, &found, &[n_experts, n_parts * n_out, n_blocks, 16])?;
                let exponents = bytes_of(&scales, &exponents, &[n_experts, n_parts * n_out, n_blocks])?;
                part.of_blocks(&blocks, n_experts, found.as_slice(), exponents.as_slice())?
            }
            None => {
                let dims = [n_experts, n_in, n_parts * n_out];
                let found = self.find(&hf, &hf, &dims)?.ok_or_else(|| self.missing(&hf, &hf))?;
                part.of_columns(&hf, n_experts, &found)?
            }
        };
        Ok(self.push(&gguf, &hf, tensor))
    }

    /// The biases of such a projection, `[n_experts, n_out]` in F32.
    pub(crate) fn bias_of_experts(
        &mut self,
        layer: usize,
        n_experts: usize,
        part: &ExpertPart,
    ) -> Result<WeightId, ModelError> {
        let [n_out, _] = part.rows;
        let gguf = format!("blk.{layer}.{}.bias", part.name);
        let hf = format!("model.layers.{layer}.mlp.experts.{}_bias", part.hf_name);
        let is_gguf = self.source.name(&gguf, &hf) == gguf;
        let [first, n_parts] = if is_gguf { [0, 1] } else { part.of };
        let found = self.find(&gguf, &hf, &[n_experts, n_parts * n_out])?;
        let found = found.ok_or_else(|| self.missing(&gguf, &hf))?;
        let wrap = |source| ModelError::Tensor { name: self.source.name(&gguf, &hf).into(), source };
        let values: Vec<f32> =
            found.to_f32().map_err(wrap)?.into_iter().skip(first).step_by(n_parts).collect();
        let tensor = HostTensor::from_f32(Shape::from([n_experts, n_out]), &values).map_err(wrap)?;
        Ok(self.push(&gguf, &hf, tensor))
    }

    /// Biases of all experts, `[n_experts, n_out]` in F32, by the suffixes of their two names.
    pub(crate) fn expert_vectors(
        &mut self,
        layer: usize,
        names: [&str; 2],
        dims: [usize; 2],
    ) -> Result<WeightId, ModelError> {
        let (gguf, hf) = plain_names(layer, names);
        let found = self.find(&gguf, &hf, &dims)?.ok_or_else(|| self.missing(&gguf, &hf))?;
        let tensor = in_f32(self.source.name(&gguf, &hf), found)?;
        Ok(self.push(&gguf, &hf, tensor))
    }

    /// Linear maps stored as one tensor: each gets a view of its rows, and the name it would have on its own.
    pub(crate) fn fused<const N: usize>(
        &mut self,
        layer: usize,
        [gguf, hf]: [&str; 2],
        parts: [(&str, usize); N],
        n_in: usize,
    ) -> Result<[Linear; N], ModelError> {
        let (gguf, module) = (format!("blk.{layer}.{gguf}"), format!("model.layers.{layer}.{hf}"));
        let names = [format!("{gguf}.weight"), format!("{module}.weight")];
        let n_out = parts.iter().map(|(_, rows)| rows).sum();
        let whole = self.find(&names[0], &names[1], &[n_out, n_in])?;
        let whole = whole.ok_or_else(|| self.missing(&names[0], &names[1]))?;
        let mut first = 0;
        let mut maps = [Linear { weight: WeightId::from_idx(0), bias: None }; N];
        for (map, (part, rows)) in maps.iter_mut().zip(parts) {
            let tensor = rows_of(self.source.name(&names[0], &names[1]), &whole, first..first + rows)?;
            let (gguf, hf) = self.layer_tensor(layer, part, "weight");
            map.weight = self.push(&gguf, &hf, tensor);
            first += rows;
        }
        self.sites.push(LinearSite { module, gguf, parts: maps.iter().map(|map| map.weight).collect() });
        Ok(maps)
    }

    /// Factor on a layer's output; 1 if the file has none. It is baked into the graph, and a weight only so
    /// that it is exported again.
    pub(crate) fn layer_scalar(&mut self, layer: usize) -> Result<f32, ModelError> {
        let gguf = format!("blk.{layer}.layer_output_scale.weight");
        let hf = format!("model.layers.{layer}.layer_scalar");
        let Some(tensor) = self.find(&gguf, &hf, &[1])? else { return Ok(1.0) };
        let tensor = in_f32(self.source.name(&gguf, &hf), tensor)?;
        let wrap = |source| ModelError::Tensor { name: self.source.name(&gguf, &hf).into(), source };
        let scalar = tensor.to_f32().map_err(wrap)?[0];
        let id = self.push(&gguf, &hf, tensor);
        self.fixed.push(id);
        Ok(scalar)
    }

    /// Splits a linear map whose rows alternate between two parts, `head_dim` rows of each per head: the
    /// first part keeps its name, the second gets another.
    pub(crate) fn interleaved(
        &mut self,
        layer: usize,
        [name, second]: [&str; 2],
        [n_heads, head_dim, n_in]: [usize; 3],
    ) -> Result<[Linear; 2], ModelError> {
        let (gguf, hf) = self.layer_tensor(layer, name, "weight");
        let found = self.find(&gguf, &hf, &[2 * n_heads * head_dim, n_in])?;
        let tensor = found.ok_or_else(|| self.missing(&gguf, &hf))?;
        let wrap = |source| ModelError::Tensor { name: self.source.name(&gguf, &hf).into(), source };
        let part_bytes = tensor.bytes().as_slice().len() / (2 * n_heads).max(1);
        let part = |first: usize| {
            let parts = tensor.bytes().as_slice().chunks_exact(part_bytes.max(1));
            let bytes: Vec<u8> = parts.skip(first).step_by(2).flatten().copied().collect();
            HostTensor::new(tensor.dtype(), Shape::from([n_heads * head_dim, n_in]), Bytes::new(bytes))
        };
        let (rows, others) = (part(0).map_err(wrap)?, part(1).map_err(wrap)?);
        let weight = self.push(&gguf, &hf, rows);
        let (gguf, hf) = self.layer_tensor(layer, second, "weight");
        let gate = self.push(&gguf, &hf, others);
        Ok([weight, gate].map(|weight| Linear { weight, bias: None }))
    }

    /// Filters of a short convolution: one row per lag, so that neighbouring channels are adjacent.
    pub(crate) fn filters(
        &mut self,
        layer: usize,
        names: [&str; 2],
        [n_channels, width]: [usize; 2],
    ) -> Result<WeightId, ModelError> {
        let by_channel = self.values(layer, names, &[&[n_channels, width], &[n_channels, 1, width]])?;
        let lag = |lag| by_channel.iter().skip(lag).step_by(width).copied();
        let by_lag: Vec<f32> = (0..width).flat_map(lag).collect();
        self.fixed_vector(layer, names, &by_lag)
    }

    /// Two small linear maps of the same rows stacked into one: one matrix product instead of two. If the
    /// file stores them in different types, both become F32.
    pub(crate) fn stacked(
        &mut self,
        layer: usize,
        names: [&str; 2],
        [n_out, n_in]: [usize; 2],
    ) -> Result<Linear, ModelError> {
        let names = names.map(|name| self.layer_tensor(layer, name, "weight"));
        let find = |(gguf, hf): &(String, String)| {
            self.find(gguf, hf, &[n_out, n_in])?.ok_or_else(|| self.missing(gguf, hf))
        };
        let (first, second) = (find(&names[0])?, find(&names[1])?);
        let (gguf, hf) = &names[0];
        let wrap = |source| ModelError::Tensor { name: self.source.name(gguf, hf).into(), source };
        let shape = Shape::from([2 * n_out, n_in]);
        let stacked = match first.dtype() == second.dtype() {
            true => {
                let bytes = [first.bytes().as_slice(), second.bytes().as_slice()].concat();
                HostTensor::new(first.dtype(), shape, Bytes::new(bytes))
            }
            false => {
                let values = [first.to_f32().map_err(wrap)?, second.to_f32().map_err(wrap)?].concat();
                HostTensor::from_f32(shape, &values)
            }
        };
        let weight = self.push(gguf, hf, stacked.map_err(wrap)?);
        Ok(Linear { weight, bias: None })
    }

    /// Values of a tensor in a layer that may have one of several shapes. `names` are the suffixes of its
    /// GGUF and Hugging Face names.
    pub(crate) fn values(
        &self,
        layer: usize,
        names: [&str; 2],
        shapes: &[&[usize]],
    ) -> Result<Vec<f32>, ModelError> {
        let (gguf, hf) = plain_names(layer, names);
        let tensor = self.source.find(&gguf, &hf)?.ok_or_else(|| self.missing(&gguf, &hf))?;
        let name = || self.source.name(&gguf, &hf).to_string();
        let wrap = |source| ModelError::Tensor { name: name(), source };
        if !shapes.iter().any(|dims| tensor.shape().dims() == *dims) {
            let want = Shape::new(shapes[0]).map_err(wrap)?;
            return Err(ModelError::TensorShape { name: name(), got: tensor.shape(), want });
        }
        if !(tensor.dtype().is_float() || tensor.dtype().is_quantized()) {
            return Err(ModelError::TensorType { name: name(), dtype: tensor.dtype() });
        }
        tensor.to_f32().map_err(wrap)
    }

    /// A vector of a layer that is a constant of the graph, computed from the values under these names.
    pub(crate) fn fixed_vector(
        &mut self,
        layer: usize,
        names: [&str; 2],
        values: &[f32],
    ) -> Result<WeightId, ModelError> {
        let (gguf, hf) = plain_names(layer, names);
        let tensor = HostTensor::from_f32(Shape::from([values.len()]), values)
            .map_err(|source| ModelError::Tensor { name: self.source.name(&gguf, &hf).into(), source })?;
        let id = self.push(&gguf, &hf, tensor);
        self.fixed.push(id);
        Ok(id)
    }

    /// A computed tensor.
    pub(crate) fn derived(&mut self, name: &str, values: &[f32]) -> Result<WeightId, ModelError> {
        let tensor = HostTensor::from_f32(Shape::from([values.len()]), values)
            .map_err(|source| ModelError::Tensor { name: name.into(), source })?;
        let id = self.push(name, name, tensor);
        self.derived.push(id);
        Ok(id)
    }

    /// Values of a small table that not every file has.
    pub(crate) fn table(&self, gguf: &str, n: usize) -> Result<Option<Vec<f32>>, ModelError> {
        let Some(tensor) = self.find(gguf, gguf, &[n])? else { return Ok(None) };
        let values = tensor.to_f32().map_err(|source| ModelError::Tensor { name: gguf.into(), source })?;
        Ok(Some(values))
    }

    fn layer_tensor(&self, layer: usize, name: &str, part: &str) -> (String, String) {
        let known = self.own_names.iter().chain(USUAL_NAMES).find(|(gguf, _)| *gguf == name);
        let hf = known.map_or(name, |(_, hf)| hf);
        let layers = if self.config.arch.is_encoder() { "encoder.layer" } else { "model.layers" };
        (format!("blk.{layer}.{name}.{part}"), format!("{layers}.{layer}.{hf}.{part}"))
    }

    fn find(&self, gguf: &str, hf: &str, dims: &[usize]) -> Result<Option<HostTensor>, ModelError> {
        let Some(tensor) = self.source.find(gguf, hf)? else { return Ok(None) };
        let name = || self.source.name(gguf, hf).to_string();
        let want = Shape::new(dims).map_err(|source| ModelError::Tensor { name: name(), source })?;
        if tensor.shape() != want {
            return Err(ModelError::TensorShape { name: name(), got: tensor.shape(), want });
        }
        if !(tensor.dtype().is_float() || tensor.dtype().is_quantized()) {
            return Err(ModelError::TensorType { name: name(), dtype: tensor.dtype() });
        }
        Ok(Some(tensor))
    }

    fn missing(&self, gguf: &str, hf: &str) -> ModelError {
        let (arch, n_layers) = (self.config.arch.name(), self.config.n_layers);
        ModelError::MissingTensor { name: self.source.name(gguf, hf).into(), arch, n_layers }
    }

    fn with_norm_offset(&self, name: &str, tensor: HostTensor) -> Result<HostTensor, ModelError> {
        if self.config.norm_offset == 0.0 && tensor.dtype() == DType::F32 {
            return Ok(tensor);
        }
        let wrap = |source| ModelError::Tensor { name: name.into(), source };
        let values: Vec<f32> =
            tensor.to_f32().map_err(wrap)?.into_iter().map(|w| w + self.config.norm_offset).collect();
        HostTensor::from_f32(tensor.shape(), &values).map_err(wrap)
    }

    fn push(&mut self, name: &str, hf: &str, tensor: HostTensor) -> WeightId {
        self.hf_names.push(hf.into());
        let ty = TensorType { dtype: tensor.dtype(), shape: tensor.shape() };
        self.weights.push(Weight { name: name.into(), ty });
        self.tensors.push(tensor);
        WeightId::from_idx(self.weights.len() - 1)
    }
}

/// A projection of experts that a folder stores together with others, in alternating rows.
pub(crate) struct ExpertPart {
    /// Name in GGUF files.
    pub name: &'static str,
    /// Name of the joint tensor in folders, after `mlp.experts.`.
    pub hf_name: &'static str,
    /// Its index among the alternating rows, and their number.
    pub of: [usize; 2],
    /// Rows and columns of an expert.
    pub rows: [usize; 2],
}

impl ExpertPart {
    /// From MXFP4 `blocks[n_experts, n_parts * n_out, n_in / 32, 16]` and `scales[.., n_in / 32]`. Byte `j` of a block has
    /// elements `2 j` and `2 j + 1`; in GGUF's layout it has `j` and `16 + j`.
    fn of_blocks(
        &self,
        name: &str,
        n_experts: usize,
        blocks: &[u8],
        scales: &[u8],
    ) -> Result<HostTensor, ModelError> {
        let ([first, n_parts], [n_out, n_in]) = (self.of, self.rows);
        let wrap = |source| ModelError::Tensor { name: name.into(), source };
        let dims = Shape::new(&[n_experts, n_out, n_in]).map_err(wrap)?;
        let n_blocks = n_in.div_ceil(32);
        let mut bytes = Vec::with_capacity(n_experts * n_out * n_blocks * 17);
        let rows = blocks.chunks_exact((16 * n_blocks).max(1)).zip(scales.chunks_exact(n_blocks.max(1)));
        for (blocks, scales) in rows.skip(first).step_by(n_parts) {
            for (block, scale) in blocks.as_chunks::<16>().0.iter().zip(scales) {
                let nibble = |element: usize| block[element / 2] >> (4 * (element % 2)) & 15;
                bytes.push(*scale);
                bytes.extend((0..16).map(|j| nibble(j) | nibble(16 + j) << 4));
            }
        }
        HostTensor::new(DType::MXFP4, dims, Bytes::new(bytes)).map_err(wrap)
    }

    /// From floats `[n_experts, n_in, n_parts * n_out]`.
    fn of_columns(
        &self,
        name: &str,
        n_experts: usize,
        tensor: &HostTensor,
    ) -> Result<HostTensor, ModelError> {
        let ([first, n_parts], [n_out, n_in]) = (self.of, self.rows);
        let wrap = |source| ModelError::Tensor { name: name.into(), source };
        let dtype = tensor.dtype();
        if dtype.is_quantized() {
            return Err(ModelError::TensorType { name: name.into(), dtype });
        }
        let (size, from) = (dtype.block_bytes(), tensor.bytes().as_slice());
        let mut bytes = Vec::with_capacity(n_experts * n_out * n_in * size);
        for expert in from.chunks_exact((n_in * n_parts * n_out * size).max(1)) {
            for row in 0..n_out {
                for column in 0..n_in {
                    let at = (column * n_parts * n_out + n_parts * row + first) * size;
                    bytes.extend_from_slice(&expert[at..at + size]);
                }
            }
        }
        let dims = Shape::new(&[n_experts, n_out, n_in]).map_err(wrap)?;
        HostTensor::new(dtype, dims, Bytes::new(bytes)).map_err(wrap)
    }
}

/// The bytes of a tensor of bytes with these dimensions.
fn bytes_of(name: &str, tensor: &HostTensor, dims: &[usize]) -> Result<Bytes, ModelError> {
    let want = Shape::new(dims).map_err(|source| ModelError::Tensor { name: name.into(), source })?;
    if tensor.shape() != want {
        return Err(ModelError::TensorShape { name: name.into(), got: tensor.shape(), want });
    }
    if tensor.dtype() != DType::U8 {
        return Err(ModelError::TensorType { name: name.into(), dtype: tensor.dtype() });
    }
    Ok(tensor.bytes().clone())
}

/// Rows of a matrix as a view of the same bytes.
pub(crate) fn rows_of(
    name: &str,
    tensor: &HostTensor,
    rows: std::ops::Range<usize>,
) -> Result<HostTensor, ModelError> {
    let wrap = |source| ModelError::Tensor { name: name.into(), source };
    let n_cols = tensor.shape().dim_back(0);
    let row_bytes = tensor.dtype().bytes_for(n_cols);
    let bytes = row_bytes.and_then(|n| tensor.bytes().slice(rows.start * n..rows.end * n));
    let bytes =
        bytes.ok_or_else(|| ModelError::FusedRows { name: name.into(), dtype: tensor.dtype(), n_cols })?;
    HostTensor::new(tensor.dtype(), Shape::from([rows.len(), n_cols]), bytes).map_err(wrap)
}

/// Names of a tensor in a layer, by the suffixes of its GGUF and Hugging Face names.
fn plain_names(layer: usize, [gguf, hf]: [&str; 2]) -> (String, String) {
    (format!("blk.{layer}.{gguf}"), format!("model.layers.{layer}.{hf}"))
}

/// A tensor in a float type.
fn in_float(name: &str, tensor: &HostTensor, dtype: DType) -> Result<HostTensor, ModelError> {
    let wrap = |source| ModelError::Tensor { name: name.into(), source };
    let values = tensor.to_f32().map_err(wrap)?;
    let mut bytes = vec![0; values.len() * dtype.block_bytes()];
    quant::quantize(dtype, &values, &mut bytes).map_err(wrap)?;
    HostTensor::new(dtype, tensor.shape(), Bytes::new(bytes)).map_err(wrap)
}

/// A vector in F32, for adding to activations.
fn in_f32(name: &str, tensor: HostTensor) -> Result<HostTensor, ModelError> {
    if tensor.dtype() == DType::F32 {
        return Ok(tensor);
    }
    let wrap = |source| ModelError::Tensor { name: name.into(), source };
    HostTensor::from_f32(tensor.shape(), &tensor.to_f32().map_err(wrap)?).map_err(wrap)
}
