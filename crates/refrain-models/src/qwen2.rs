//! Qwen 2 and 2.5: Llama's layer, with biases on queries, keys and values.

use crate::error::ModelError;
use crate::llama::Llama;
use crate::step::{Architecture, Step};
use crate::weights::{HfNames, WeightTable};
use refrain_graph::{GraphError, ValueId};

pub(crate) const LAYER_NAMES: HfNames = crate::llama::LAYER_NAMES;

#[derive(Debug)]
pub(crate) struct Qwen2(Llama);

impl Qwen2 {
    pub(crate) fn declare(w: &mut WeightTable<'_>) -> Result<Qwen2, ModelError> {
        // The biases come with `config.qkv_bias`, which is always set for this architecture.
        Llama::declare(w).map(Qwen2)
    }
}

impl Architecture for Qwen2 {
    fn layer(&self, step: &mut Step<'_>, layer: usize, x: ValueId) -> Result<ValueId, GraphError> {
        self.0.layer(step, layer, x)
    }
}
