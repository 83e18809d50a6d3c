//! The type of each tensor of a model: the recipe's, unless an override, the shape or the tensor's role says otherwise.

use crate::error::QuantError;
use crate::pass::InputTensor;
use crate::recipe::{ModelFacts, Recipe, TensorFacts};
use refrain_tensor::{DType, quant};
use regex::Regex;
use std::collections::BTreeMap;
use std::fmt;

/// A tensor type that the user chose: `PATTERN=TYPE`.
#[derive(Clone, Debug)]
pub struct Override {
    pattern: Regex,
    dtype: DType,
}

impl Override {
    /// Parses `PATTERN=TYPE`. The pattern is a regular expression that may match anywhere in a name.
    pub fn parse(text: &str) -> Result<Override, QuantError> {
        let (pattern, dtype) =
            text.rsplit_once('=').ok_or_else(|| QuantError::OverrideForm { text: text.to_owned() })?;
        let dtype = DType::from_name(dtype.trim())
            .filter(|dtype| quant::can_encode(*dtype))
            .ok_or_else(|| QuantError::UnknownType { name: dtype.trim().to_owned() })?;
        let fail = |source| QuantError::Pattern { pattern: pattern.to_owned(), source: Box::new(source) };
        Ok(Override { pattern: Regex::new(pattern).map_err(fail)?, dtype })
    }

    /// The pattern.
    pub fn pattern(&self) -> &str {
        self.pattern.as_str()
    }
}

/// Why a tensor does not have the base type of its recipe.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Reason {
    /// The recipe's rule for this tensor.
    Rule,
    /// The user chose it.
    Override,
    /// Vectors, routers and other small tensors are never quantised.
    NotQuantised,
    /// Rows are not a multiple of the block size of the wanted type.
    Rows {
        /// Elements per row.
        row_len: usize,
        /// The type that the recipe or the user wanted.
        wanted: DType,
    },
    /// It holds values that are not finite, and they were allowed.
    NonFinite,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Reason::Rule => f.write_str("rule of the file type"),
            Reason::Override => f.write_str("chosen by --tensor-type"),
            Reason::NotQuantised => f.write_str("never quantised"),
            Reason::Rows { row_len, wanted } => {
                write!(f, "rows of {row_len} are not a multiple of {wanted}'s {}", wanted.block_len())
            }
            Reason::NonFinite => f.write_str("holds values that are not finite"),
        }
    }
}

/// The chosen type of a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    /// The type.
    pub dtype: DType,
    /// Why it is not the base type.
    pub reason: Option<Reason>,
}

/// Chooses the type of every tensor.
pub(crate) fn choose(
    recipe: Recipe,
    overrides: &[Override],
    tensors: &[InputTensor],
    model: &ModelFacts,
) -> Result<Vec<Choice>, QuantError> {
    if let Some(unused) = overrides.iter().find(|o| !tensors.iter().any(|t| o.pattern.is_match(&t.name))) {
        return Err(QuantError::PatternUnused { pattern: unused.pattern().to_owned() });
    }
    let ranks = ranks(tensors);
    let choice = |(tensor, rank): (&InputTensor, _)| choose_one(recipe, overrides, tensor, rank, model);
    Ok(tensors.iter().zip(ranks).map(choice).collect())
}

fn choose_one(
    recipe: Recipe,
    overrides: &[Override],
    tensor: &InputTensor,
    rank: (usize, usize),
    model: &ModelFacts,
) -> Choice {
    let row_len = tensor.shape.dim_back(0);
    let chosen = overrides.iter().rev().find(|o| o.pattern.is_match(&tensor.name));
    let (wanted, reason) = match chosen {
        Some(chosen) => (chosen.dtype, Some(Reason::Override)),
        None if !is_quantised(tensor) => {
            return Choice { dtype: tensor.dtype, reason: Some(Reason::NotQuantised) };
        }
        None => {
            let part = layer_and_part(&tensor.name).1;
            let facts = TensorFacts { name: &tensor.name, part, row_len, rank };
            let dtype = recipe.dtype(&facts, model);
            (dtype, (dtype != recipe.base()).then_some(Reason::Rule))
        }
    };
    let fits = |dtype: DType| row_len.is_multiple_of(dtype.block_len());
    if fits(wanted) {
        return Choice { dtype: wanted, reason };
    }
    let with_small_blocks = match wanted {
        DType::Q2_K | DType::Q3_K | DType::IQ4_XS => DType::IQ4_NL,
        DType::Q4_K => DType::Q5_0,
        DType::Q5_K => DType::Q5_1,
        _ => DType::Q8_0,
    };
    let wide = if tensor.dtype.is_float() { tensor.dtype } else { DType::F16 };
    let dtype = if fits(with_small_blocks) { with_small_blocks } else { wide };
    Choice { dtype, reason: Some(Reason::Rows { row_len, wanted }) }
}

/// Whether a tensor is quantised at all. The names are those that llama.cpp leaves alone.
fn is_quantised(tensor: &InputTensor) -> bool {
    const NEVER: [&str; 14] = [
        "_norm.weight",
        "ffn_gate_inp",
        "altup",
        "laurel",
        "per_layer_model_proj",
        "position_embd",
        "token_types",
        "ssm_conv1d",
        "shortconv.conv",
        "time_mix_",
        "attn_rel_b",
        "ssm_a",
        "ssm_dt",
        "rope_f",
    ];
    let is_matrix = tensor.shape.rank() >= 2 && tensor.shape.dims().iter().filter(|&&d| d > 1).count() >= 2;
    // `ssm_alpha` starts like `ssm_a`, and is as small.
    is_matrix
        && tensor.name.ends_with("weight")
        && (tensor.dtype.is_float() || tensor.dtype.is_quantized())
        && !NEVER.iter().any(|never| tensor.name.contains(never))
}

/// Splits a tensor name into its layer and the remaining name.
pub(crate) fn layer_and_part(name: &str) -> (Option<usize>, &str) {
    match name.strip_prefix("blk.").and_then(|rest| rest.split_once('.')) {
        Some((layer, part)) => (layer.parse().ok(), part),
        None => (None, name),
    }
}

/// The place of each tensor among those of its kind, by layer, and their number.
fn ranks(tensors: &[InputTensor]) -> Vec<(usize, usize)> {
    let mut kinds: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for tensor in tensors {
        if let (Some(layer), part) = layer_and_part(&tensor.name) {
            kinds.entry(part).or_default().push(layer);
        }
    }
    kinds.values_mut().for_each(|layers| layers.sort_unstable());
    let rank = |tensor: &InputTensor| match layer_and_part(&tensor.name) {
        (Some(layer), part) => kinds
            .get(part)
            .map_or((0, 0), |layers| (layers.partition_point(|&other| other < layer), layers.len())),
        (None, _) => (0, 0),
    };
    tensors.iter().map(rank).collect()
}
