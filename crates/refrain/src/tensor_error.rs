//! How far the tensors of two models are apart.

use crate::error::Error;
use crate::model::Model;
use refrain_models::ModelError;
use refrain_tensor::DType;

/// The difference of a tensor between two models.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorDifference {
    /// GGUF name.
    pub name: String,
    /// Its type in both.
    pub dtypes: [DType; 2],
    /// Root mean square of the difference, relative to that of the first model's values.
    pub relative: f64,
    /// Elements.
    pub n_elements: usize,
}

/// Compares the tensors that two models have under the same name and in the same shape. Matrices of queries and keys
/// whose rows are ordered differently, as in a folder and a GGUF file of Llama, are left out.
pub fn tensor_differences(first: &Model, second: &Model) -> Result<Vec<TensorDifference>, Error> {
    let (first, second) = (first.weights(), second.weights());
    let is_reordered = first.config().rope.style != second.config().rope.style;
    let mut found = Vec::new();
    for (weight, tensor) in first.weights().iter().zip(first.tensors()) {
        let is_rotated = weight.name.contains("attn_q.") || weight.name.contains("attn_k.");
        let at = second.weights().iter().position(|other| other.name == weight.name);
        let Some(other) = at.map(|at| &second.tensors()[at]) else { continue };
        if tensor.shape() != other.shape() || is_reordered && is_rotated {
            continue;
        }
        let wrap = |source| ModelError::Tensor { name: weight.name.clone(), source };
        let (a, b) = (tensor.to_f32().map_err(wrap)?, other.to_f32().map_err(wrap)?);
        let square = |v: f64| v * v;
        let size: f64 = a.iter().map(|&v| square(v.into())).sum();
        let error: f64 = a.iter().zip(&b).map(|(&a, &b)| square(f64::from(a) - f64::from(b))).sum();
        let relative = if error == 0.0 { 0.0 } else { (error / size).sqrt() };
        let (name, dtypes) = (weight.name.clone(), [tensor.dtype(), other.dtype()]);
        found.push(TensorDifference { name, dtypes, relative, n_elements: a.len() });
        for tensor in [tensor, other] {
            tensor.bytes().release();
        }
    }
    Ok(found)
}
