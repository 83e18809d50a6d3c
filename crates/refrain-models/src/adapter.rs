//! LoRA adapters: two low-rank matrices per linear map, whose product is added to the map's output.
//!
//! An [`Adapter`] is independent of a model; its matrices are laid out as in Hugging Face folders.
//! [`Model::with_adapter`] attaches one for training: its matrices become additional weights of the model,
//! every step adds `scale · B(A x)` to the output of the adapted maps, and only the adapter is trained.
//! [`Model::with_live_adapter`] attaches one for generation: the scale is folded into its matrices and costs
//! nothing per step. [`Model::with_adapter_bank`] attaches several, of which each sequence has its own.

use crate::error::ModelError;
use crate::export::{Reorder, encode, reordered};
use crate::init::Normal;
use crate::model::Model;
use crate::weights::rows_of;
use refrain_formats::hf::{AdapterConfig, AdapterFolder, NewTensor, write_safetensors, write_whole};
use refrain_formats::params::RopePairing;
use refrain_graph::{TensorType, Weight, WeightId};
use refrain_tensor::{DType, HostTensor, Shape};
use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

/// Prefix of module names in adapter files.
const PREFIX: &str = "base_model.model.";

/// A linear map of a layer that an adapter can be attached to.
#[derive(Clone, Debug)]
pub(crate) struct LinearSite {
    /// Module name in Hugging Face folders, such as `model.layers.0.self_attn.q_proj`.
    pub module: String,
    /// Name in GGUF files, such as `blk.0.attn_q`.
    pub gguf: String,
    /// Its weights. More than one if the file stores several maps as one tensor; their rows are concatenated.
    pub parts: Vec<WeightId>, // [n_out of the part, n_in]
}

impl LinearSite {
    /// Whether it consists of several maps of the model.
    pub(crate) fn is_fused(&self) -> bool {
        self.parts.len() > 1
    }

    /// Last component of its name, the same in every layer: `q_proj`.
    fn kind(&self) -> &str {
        self.module.rsplit('.').next().unwrap_or(&self.module)
    }

    fn gguf_kind(&self) -> &str {
        self.gguf.rsplit('.').next().unwrap_or(&self.gguf)
    }
}

/// The linear maps that get an adapter.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Targets {
    /// All linear maps of every layer, but not the embedding and not the output head.
    #[default]
    All,
    /// The linear maps of attention.
    Attention,
    /// The linear maps with these names, such as `q_proj` or `attn_q`.
    Modules(Vec<String>),
}

impl Targets {
    /// Parses `all`, `attention`, or comma-separated names.
    pub fn of_word(text: &str) -> Targets {
        match text.trim() {
            "all" => Targets::All,
            "attention" => Targets::Attention,
            list => Targets::Modules(list.split(',').map(|name| name.trim().to_owned()).collect()),
        }
    }
}

impl fmt::Display for Targets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Targets::All => f.write_str("all"),
            Targets::Attention => f.write_str("attention"),
            Targets::Modules(names) => f.write_str(&names.join(",")),
        }
    }
}

/// Specification of a new adapter for training.
#[derive(Clone, Debug, PartialEq)]
pub struct LoraSpec {
    /// Rank of the two factors.
    pub rank: usize,
    /// Numerator of the scale of the adapter's output.
    pub alpha: f64,
    /// Whether the scale is divided by the square root of the rank instead of the rank (rsLoRA).
    pub rslora: bool,
    /// Fraction of the adapter's inputs that dropout zeroes in training steps.
    pub dropout: f64,
    /// The linear maps that get an adapter.
    pub targets: Targets,
}

/// The adapter of one linear map.
#[derive(Clone, Debug)]
pub struct AdapterPart {
    /// Module name in Hugging Face folders, such as `model.layers.0.self_attn.q_proj`.
    pub module: String,
    /// The factor that is applied first, A.
    pub a: HostTensor, // [rank, n_in]
    /// The second factor, B, with rows in the order of Hugging Face folders.
    pub b: HostTensor, // [n_out, rank]
}

/// A LoRA adapter.
#[derive(Clone, Debug)]
pub struct Adapter {
    /// Rank, scale and base model.
    pub config: AdapterConfig,
    /// One pair of matrices per linear map.
    pub parts: Vec<AdapterPart>,
}

/// An adapter attached to a model: the weight ids of its matrices.
#[derive(Clone, Debug)]
pub(crate) struct Attached {
    config: AdapterConfig,
    /// Whether the scale is folded into B.
    is_live: bool,
    /// Number of the model's weights before those of the adapter.
    n_base: usize,
    pairs: Vec<Pair>,
}

/// The adapter weights of one linear map in a model.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pair {
    /// Weight of the adapted map.
    pub base: WeightId, // [n_out, n_in]
    pub a: WeightId, // [rank, n_in]
    pub b: WeightId, // [n_out, rank], rows in the model's order
    pub scale: f32,
}

/// A part of an adapter that fits a linear map.
pub(crate) struct FittedPart<'m> {
    pub site: &'m LinearSite,
    /// Number of outputs and inputs of the map.
    pub dims: [usize; 2],
    pub rank: usize,
}

impl Attached {
    /// The adapter of a linear map.
    pub(crate) fn pair(&self, base: WeightId) -> Option<&Pair> {
        self.pairs.iter().find(|pair| pair.base == base)
    }

    /// Fraction of inputs dropped in training steps.
    pub(crate) fn dropout(&self) -> f32 {
        self.config.dropout as f32
    }

    /// Whether a weight of the model belongs to the adapter.
    pub(crate) fn owns(&self, weight: usize) -> bool {
        weight >= self.n_base
    }
}

impl Adapter {
    /// Reads an adapter folder written by `peft` or by this crate.
    pub fn read(folder: &AdapterFolder) -> Result<Adapter, ModelError> {
        let config = folder.config().clone();
        let mut halves: BTreeMap<String, [Option<HostTensor>; 2]> = BTreeMap::new();
        let mut order = Vec::new();
        for name in folder.names() {
            let unknown = || ModelError::AdapterTensor { name: name.into() };
            let (module, half) = half_of(name).ok_or_else(unknown)?;
            if !halves.contains_key(module) {
                order.push(module.to_owned());
            }
            let halves = halves.entry(module.to_owned()).or_default();
            halves[half] = Some(folder.tensor(name)?);
        }
        let mut parts = Vec::with_capacity(order.len());
        for module in order {
            let [a, b] = halves.remove(&module).unwrap_or_default();
            let missing = |half: &str| ModelError::AdapterHalf { module: module.clone(), half: half.into() };
            let (a, b) = (a.ok_or_else(|| missing("lora_A"))?, b.ok_or_else(|| missing("lora_B"))?);
            parts.push(AdapterPart { module, a, b });
        }
        if parts.is_empty() {
            return Err(ModelError::AdapterEmpty);
        }
        Ok(Adapter { config, parts })
    }

    /// Writes `adapter_config.json` and `adapter_model.safetensors` into an existing folder. The key-value
    /// pairs in `notes` are stored in the metadata of the safetensors file.
    pub fn write(&self, folder: &Path, dtype: DType, notes: &[(&str, &str)]) -> Result<(), ModelError> {
        let halves: Vec<(String, &HostTensor)> = self
            .parts
            .iter()
            .flat_map(|part| {
                [("lora_A", &part.a), ("lora_B", &part.b)]
                    .map(|(half, tensor)| (format!("{PREFIX}{}.{half}.weight", part.module), tensor))
            })
            .collect();
        let tensors: Vec<NewTensor> = halves
            .iter()
            .map(|(name, tensor)| NewTensor { name: name.clone(), dtype, shape: tensor.shape() })
            .collect();
        write_safetensors(&folder.join(AdapterFolder::WEIGHTS), &tensors, notes, |idx| {
            let (name, tensor) = &halves[idx];
            encode(name, dtype, &numbers(name, tensor)?)
        })?;
        // Written last: a folder with a configuration counts as a complete adapter.
        Ok(write_whole(&folder.join(AdapterFolder::CONFIG), self.config.to_json().as_bytes())?)
    }
}

/// Module that an adapter tensor belongs to, and whether it is A (0) or B (1).
fn half_of(name: &str) -> Option<(&str, usize)> {
    let name = name.strip_prefix(PREFIX).unwrap_or(name);
    let name = name.strip_suffix(".weight")?;
    // `peft` appends the adapter's name to tensor names in memory.
    let name = name.strip_suffix(".default").unwrap_or(name);
    let halves = [(".lora_A", 0), (".lora_B", 1)];
    halves.iter().find_map(|(suffix, half)| Some((name.strip_suffix(suffix)?, *half)))
}

fn numbers(name: &str, tensor: &HostTensor) -> Result<Vec<f32>, ModelError> {
    tensor.to_f32().map_err(|source| ModelError::Tensor { name: name.to_owned(), source })
}

fn floats(name: &str, shape: Shape, values: &[f32]) -> Result<HostTensor, ModelError> {
    HostTensor::from_f32(shape, values).map_err(|source| ModelError::Tensor { name: name.to_owned(), source })
}

impl Model {
    /// A new adapter with no effect: A is uniform within one over the square root of its number of inputs, as
    /// in `peft`, and B is zero. The same seed gives the same values on every machine.
    pub fn fresh_adapter(&self, spec: &LoraSpec, seed: u64) -> Result<Adapter, ModelError> {
        let sites = self.targeted(&spec.targets)?;
        let mut parts = Vec::with_capacity(sites.len());
        for site in &sites {
            let [n_out, n_in] = self.site_dims(site);
            let largest = n_out.min(n_in);
            if spec.rank == 0 || spec.rank > largest {
                let (rank, module) = (spec.rank, site.module.clone());
                return Err(ModelError::AdapterRank { rank, module, largest });
            }
            let bound = 1.0 / (n_in as f64).sqrt();
            let mut random = Normal::new(seed, &format!("{}.lora_a", site.gguf));
            let a: Vec<f32> = (0..spec.rank * n_in)
                .map(|_| (random.uniform() * 2.0 - 1.0) * bound)
                .map(|v| v as f32)
                .collect();
            parts.push(AdapterPart {
                module: site.module.clone(),
                a: floats(&site.module, Shape::from([spec.rank, n_in]), &a)?,
                b: floats(&site.module, Shape::from([n_out, spec.rank]), &vec![0.0; n_out * spec.rank])?,
            });
        }
        let mut targets: Vec<String> = Vec::new();
        for site in &sites {
            if !targets.iter().any(|known| known == site.kind()) {
                targets.push(site.kind().to_owned());
            }
        }
        let LoraSpec { rank, alpha, rslora, dropout, .. } = *spec;
        let base = self.config().name.clone();
        let config = AdapterConfig { rank, ranks_vary: false, alpha, rslora, dropout, targets, base };
        Ok(Adapter { config, parts })
    }

    fn targeted(&self, targets: &Targets) -> Result<Vec<&LinearSite>, ModelError> {
        let matches = |name: &str, site: &LinearSite| name == site.kind() || name == site.gguf_kind();
        if let Targets::Modules(names) = targets {
            for name in names {
                if !self.sites().iter().any(|site| matches(name, site)) {
                    return Err(ModelError::AdapterTarget { name: name.clone(), known: self.site_kinds() });
                }
            }
        }
        let is_wanted = |site: &&LinearSite| match targets {
            Targets::All => true,
            Targets::Attention => site.gguf_kind().starts_with("attn"),
            Targets::Modules(names) => names.iter().any(|name| matches(name, site)),
        };
        Ok(self.sites().iter().filter(is_wanted).collect())
    }

    /// Distinct names of linear maps across all layers.
    fn site_kinds(&self) -> Vec<String> {
        let mut kinds: Vec<String> = Vec::new();
        for site in self.sites() {
            if !kinds.iter().any(|known| known == site.kind()) {
                kinds.push(site.kind().to_owned());
            }
        }
        kinds
    }

    /// Returns the model with an adapter attached for training or inspection; the model's own weights are
    /// unchanged.
    pub fn with_adapter(&self, adapter: &Adapter) -> Result<Model, ModelError> {
        self.with_parts(adapter, None)
    }

    /// Returns the model with an adapter attached for generation. `scale` multiplies the adapter's output; 1
    /// is its trained strength.
    pub fn with_live_adapter(&self, adapter: &Adapter, scale: f64) -> Result<Model, ModelError> {
        self.with_parts(adapter, Some(scale))
    }

    fn with_parts(&self, adapter: &Adapter, live: Option<f64>) -> Result<Model, ModelError> {
        if self.attached().is_some() || self.bank().is_some() {
            return Err(ModelError::AdapterTwice);
        }
        let mut model = self.clone();
        let mut pairs = Vec::with_capacity(adapter.parts.len());
        for part in &adapter.parts {
            let FittedPart { site, rank, .. } = self.fit(adapter, part)?;
            let mut add = |half: &str, tensor: &HostTensor| {
                let name = format!("{}.lora_{half}", site.gguf);
                let ty = TensorType { dtype: tensor.dtype(), shape: tensor.shape() };
                let hf = format!("{PREFIX}{}.lora_{}.weight", site.module, half.to_uppercase());
                model.push(Weight { name, ty }, hf, tensor.clone())
            };
            let a = add("a", &part.a);
            let scale = adapter.config.scale(rank) as f32;
            let b = self.second_factor(site, &part.b, live.map(|live| scale * live as f32))?;
            let scale = if live.is_some() { 1.0 } else { scale };
            if !site.is_fused() {
                let b = add("b", &b);
                pairs.push(Pair { base: site.parts[0], a, b, scale });
                continue;
            }
            // All parts share A; each part has its own rows of B.
            let mut first = 0;
            for (idx, &base) in site.parts.iter().enumerate() {
                let n_rows = self.weights()[base.idx()].ty.shape.dims()[0];
                let rows = rows_of(&part.module, &b, first..first + n_rows)?;
                let b = add(&format!("b.{idx}"), &rows);
                pairs.push(Pair { base, a, b, scale });
                first += n_rows;
            }
        }
        let (config, is_live, n_base) = (adapter.config.clone(), live.is_some(), self.weights().len());
        model.attach(Attached { config, is_live, n_base, pairs });
        Ok(model)
    }

    /// Finds the map that a part of an adapter belongs to, and checks the part's sizes and types.
    pub(crate) fn fit(&self, adapter: &Adapter, part: &AdapterPart) -> Result<FittedPart<'_>, ModelError> {
        let site = self.site(&part.module).ok_or_else(|| ModelError::AdapterModule {
            module: part.module.clone(),
            arch: self.config().arch.name(),
            n_layers: self.config().n_layers,
            known: self.site_kinds(),
        })?;
        let [n_out, n_in] = self.site_dims(site);
        let config = &adapter.config;
        let rank = match (config.ranks_vary, part.a.shape().dims()) {
            (true, &[rank, _]) => rank,
            _ => config.rank,
        };
        if rank == 0 {
            let (module, largest) = (part.module.clone(), n_out.min(n_in));
            return Err(ModelError::AdapterRank { rank, module, largest });
        }
        for (half, tensor, want) in [("a", &part.a, [rank, n_in]), ("b", &part.b, [n_out, rank])] {
            if tensor.shape().dims() != want {
                let (module, base_model) = (format!("{}.lora_{half}", part.module), config.base.clone());
                let (got, want) = (tensor.shape(), Shape::from(want));
                return Err(ModelError::AdapterShape { module, got, want, base_model });
            }
            if !tensor.dtype().is_float() {
                let name = format!("{}.lora_{half}", site.gguf);
                return Err(ModelError::TensorType { name, dtype: tensor.dtype() });
            }
        }
        Ok(FittedPart { site, dims: [n_out, n_in], rank })
    }

    /// B as a step uses it: with rows in the model's order, multiplied by a factor.
    pub(crate) fn second_factor(
        &self,
        site: &LinearSite,
        b: &HostTensor,
        factor: Option<f32>,
    ) -> Result<HostTensor, ModelError> {
        let b = match self.row_order(site, Reorder::Join) {
            Some(reorder) => self.in_order(&site.module, b, reorder)?,
            None => b.clone(),
        };
        let Some(factor) = factor.filter(|&factor| factor != 1.0) else { return Ok(b) };
        let values: Vec<f32> = numbers(&site.module, &b)?.iter().map(|v| v * factor).collect();
        floats(&site.module, b.shape(), &values)
    }

    /// Names and values of the frozen base weights; `None` without an adapter.
    pub fn below_adapter(&self) -> Option<impl Iterator<Item = (&str, &HostTensor)>> {
        let n_base = self.attached()?.n_base;
        let weights = self.weights()[..n_base].iter().map(|weight| weight.name.as_str());
        Some(weights.zip(&self.tensors()[..n_base]))
    }

    /// The adapter attached by [`Model::with_adapter`], with its current values.
    pub fn adapter(&self) -> Result<Option<Adapter>, ModelError> {
        let Some(attached) = self.attached().filter(|attached| !attached.is_live) else { return Ok(None) };
        let mut parts = Vec::with_capacity(attached.pairs.len());
        for pair in &attached.pairs {
            // Every part of a site has the same A, so the first part stands for the site.
            let Some(site) = self.sites().iter().find(|site| site.parts.first() == Some(&pair.base)) else {
                continue;
            };
            let (a, b) = (self.tensors()[pair.a.idx()].clone(), &self.rows_of_parts(attached, site)?);
            let b = match self.row_order(site, Reorder::Part) {
                Some(reorder) => self.in_order(&site.module, b, reorder)?,
                None => b.clone(),
            };
            parts.push(AdapterPart { module: site.module.clone(), a, b });
        }
        Ok(Some(Adapter { config: attached.config.clone(), parts }))
    }

    /// B of a site: the concatenated rows of all its parts.
    fn rows_of_parts(&self, attached: &Attached, site: &LinearSite) -> Result<HostTensor, ModelError> {
        let factors = site.parts.iter().filter_map(|&part| attached.pair(part));
        let factors: Vec<&HostTensor> = factors.map(|pair| &self.tensors()[pair.b.idx()]).collect();
        if let [one] = factors[..] {
            return Ok(one.clone());
        }
        let rank = factors.first().map_or(0, |b| b.shape().dim_back(0));
        let values = factors.iter().map(|b| numbers(&site.module, b)).collect::<Result<Vec<_>, _>>()?;
        let values = values.concat();
        floats(&site.module, Shape::from([values.len() / rank.max(1), rank]), &values)
    }

    /// Number of outputs and inputs of a site.
    fn site_dims(&self, site: &LinearSite) -> [usize; 2] {
        let shapes = site.parts.iter().map(|part| self.weights()[part.idx()].ty.shape);
        shapes.fold([0, 0], |[n_out, _], shape| [n_out + shape.dims()[0], shape.dims()[1]])
    }

    /// Adds the adapter's contribution to the values of a weight.
    pub(crate) fn merge_into(&self, weight: WeightId, values: &mut [f32]) -> Result<(), ModelError> {
        let Some(pair) = self.attached().and_then(|attached| attached.pair(weight)) else { return Ok(()) };
        let values_of = |id: WeightId| numbers(&self.weights()[id.idx()].name, &self.tensors()[id.idx()]);
        let (a, b) = (values_of(pair.a)?, values_of(pair.b)?);
        let rank = self.weights()[pair.a.idx()].ty.shape.dims()[0];
        let n_in = a.len() / rank.max(1);
        let mut sum = vec![0.0f32; n_in];
        for (row, b) in values.chunks_exact_mut(n_in.max(1)).zip(b.chunks_exact(rank.max(1))) {
            sum.fill(0.0);
            for (&b, a) in b.iter().zip(a.chunks_exact(n_in.max(1))) {
                sum.iter_mut().zip(a).for_each(|(sum, a)| *sum += b * a);
            }
            row.iter_mut().zip(&sum).for_each(|(value, sum)| *value += pair.scale * sum);
        }
        Ok(())
    }

    /// Finds the linear map with this module name. Some models prefix `layers.` differently, so names are
    /// compared from there.
    fn site(&self, module: &str) -> Option<&LinearSite> {
        let from_layers = |name: &str| name.find("layers.").map(|at| name[at..].to_owned());
        let wanted = from_layers(module)?;
        self.sites().iter().find(|site| from_layers(&site.module).as_deref() == Some(&wanted))
    }

    /// The reordering of a map's output rows between Hugging Face folders and this model, if any.
    fn row_order(&self, site: &LinearSite, reorder: Reorder) -> Option<Reorder> {
        let config = self.config();
        let is_rotated = matches!(site.gguf_kind(), "attn_q" | "attn_k");
        let is_joined = config.arch.is_joined_in_gguf() && config.rope.style == RopePairing::Norm;
        (is_rotated && is_joined).then_some(reorder)
    }

    fn in_order(&self, name: &str, b: &HostTensor, reorder: Reorder) -> Result<HostTensor, ModelError> {
        let config = self.config();
        let values = numbers(name, b)?;
        let values = reordered(&values, reorder, b.shape(), config.head_dim, config.rope.dims);
        floats(name, b.shape(), &values)
    }
}
