//! Initial weights for training from scratch.

use crate::error::ModelError;
use crate::model::Model;
use crate::shapes::{NamedShape, layer_and_part, tensor_dims};
use crate::weights::TensorSource;
use refrain_formats::FormatError;
use refrain_formats::params::ModelConfig;
use refrain_tensor::{HostTensor, Shape};

/// Standard deviation of matrices.
const SPREAD: f32 = 0.02;

/// Tensors of an untrained model: matrices from a normal distribution, norms 1, biases 0. Matrices whose
/// output is added to the residual get a smaller standard deviation, so that the residual's variance does not
/// grow with the number of layers.
struct Fresh<'c> {
    config: &'c ModelConfig,
    seed: u64,
}

impl NamedShape {
    /// Hyperparameters for training a model of this shape from scratch, with sequences of up to `n_context`
    /// tokens.
    pub fn fresh_config(&self, n_context: usize) -> ModelConfig {
        let mut config = ModelConfig { n_context, ..self.config() };
        config.rope.theta = 10_000.0;
        // The layout of Hugging Face folders; a GGUF export reorders queries and keys.
        config.rope.style = self.arch().hf_rope_style();
        config
    }
}

impl Model {
    /// An untrained model. The same seed gives the same weights on every machine.
    pub fn fresh(config: ModelConfig, seed: u64) -> Result<Model, ModelError> {
        let source = Fresh { config: &config, seed };
        Model::from_source(config.clone(), &source)
    }
}

impl TensorSource for Fresh<'_> {
    fn find(&self, gguf_name: &str, _: &str) -> Result<Option<HostTensor>, FormatError> {
        let (_, part) = layer_and_part(gguf_name);
        let Some(dims) = tensor_dims(self.config, gguf_name) else { return Ok(None) };
        let n: usize = dims.iter().product();
        let joins = matches!(part, "attn_output.weight" | "ffn_down.weight");
        let spread = if joins { SPREAD / (2.0 * self.config.n_layers as f32).sqrt() } else { SPREAD };
        let values: Vec<f32> = match (dims.len(), part.contains("norm")) {
            (1, true) => vec![1.0 - self.config.norm_offset; n],
            (1, false) => vec![0.0; n],
            _ => {
                let mut normal = Normal::new(self.seed, gguf_name);
                (0..n).map(|_| spread * normal.next()).collect()
            }
        };
        // The sizes come from the model's own table, so the shape is always valid.
        let shape = Shape::new(&dims).unwrap_or_else(|e| panic!("{gguf_name}: {e}"));
        Ok(Some(HostTensor::from_f32(shape, &values).unwrap_or_else(|e| panic!("{gguf_name}: {e}"))))
    }

    fn name<'n>(&self, gguf_name: &'n str, _: &'n str) -> &'n str {
        gguf_name
    }
}

/// Normally distributed numbers with a separate stream per tensor: a layer's weights do not depend on earlier
/// layers.
pub(crate) struct Normal {
    state: u64,
    spare: Option<f32>,
}

impl Normal {
    pub(crate) fn new(seed: u64, name: &str) -> Normal {
        let salt = name
            .bytes()
            .fold(0xcbf2_9ce4_8422_2325_u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3));
        Normal { state: seed ^ salt, spare: None }
    }

    /// A uniform number in (0, 1] with 53 bits (splitmix64).
    pub(crate) fn uniform(&mut self) -> f64 {
        self.state = self.state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.state ^ (self.state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (((z ^ (z >> 31)) >> 11) + 1) as f64 / (1u64 << 53) as f64
    }

    fn next(&mut self) -> f32 {
        if let Some(spare) = self.spare.take() {
            return spare;
        }
        let (radius, angle) = ((-2.0 * self.uniform().ln()).sqrt(), std::f64::consts::TAU * self.uniform());
        self.spare = Some((radius * angle.sin()) as f32);
        (radius * angle.cos()) as f32
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use refrain_graph::WeightId;

    #[test]
    fn a_fresh_model_has_the_expected_variances_and_depends_only_on_its_seed() {
        let config = NamedShape::find("llama-10m").unwrap().fresh_config(256);
        let model = Model::fresh(config.clone(), 7).unwrap();
        let again = Model::fresh(config.clone(), 7).unwrap();
        let other = Model::fresh(config, 8).unwrap();
        assert_eq!(model.n_parameters() - 32, 10_244_160);
        for (idx, weight) in model.weights().iter().enumerate() {
            let values = model.tensors()[idx].to_f32().unwrap();
            assert_eq!(values, again.tensors()[idx].to_f32().unwrap(), "{}", weight.name);
            if weight.ty.shape.rank() < 2 {
                continue;
            }
            assert_ne!(values, other.tensors()[idx].to_f32().unwrap(), "{}", weight.name);
            let n = values.len() as f64;
            let mean = values.iter().map(|&v| f64::from(v)).sum::<f64>() / n;
            let spread = (values.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / n).sqrt();
            let joins = weight.name.contains("attn_output") || weight.name.contains("ffn_down");
            let want = if joins { 0.02 / 12f64.sqrt() } else { 0.02 };
            assert!(
                mean.abs() < want / 50.0 && (spread / want - 1.0).abs() < 0.02,
                "{}: {mean} {spread}",
                weight.name
            );
        }
        assert_eq!(model.hf_name(WeightId::from_idx(0)), "model.embed_tokens.weight");
    }
}
