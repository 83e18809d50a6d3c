//! The input of an encoder: embeddings of tokens, positions and token types.

use super::BiasedNorm;
use crate::error::ModelError;
use crate::step::StepBuilder;
use crate::weights::WeightTable;
use refrain_graph::{GraphError, ValueId, WeightId};

/// What an encoder adds to the embeddings of tokens, and the norm of the sum.
#[derive(Debug)]
pub(crate) struct TextInputs {
    pub positions: WeightId, // [n_context, hidden]
    /// Embedding of the first token type: all texts are first segments.
    pub token_type: WeightId, // [hidden]
    pub norm: BiasedNorm,
}

impl TextInputs {
    pub(crate) fn declare(w: &mut WeightTable<'_>) -> Result<TextInputs, ModelError> {
        let c = w.config;
        let (n_types, hidden) = (c.n_token_types.unwrap_or(1), c.hidden);
        let table = ["position_embd.weight", "embeddings.position_embeddings.weight"];
        let positions = w.global(table[0], table[1], &[c.n_context, hidden])?;
        let types = ["token_types.weight", "embeddings.token_type_embeddings.weight"];
        let token_type = w.first_row(types, [n_types, hidden])?;
        let norm = w.global_biased_norm(["token_embd_norm", "embeddings.LayerNorm"])?;
        Ok(TextInputs { positions, token_type, norm })
    }

    /// Maps the embeddings of tokens `x[n_tokens, hidden]` to the input of the first layer.
    pub(crate) fn build(&self, step: &mut StepBuilder<'_>, x: ValueId) -> Result<ValueId, GraphError> {
        let positions = step.position_rows(self.positions)?;
        let token_type = step.weight(self.token_type);
        let x = step.add(x, token_type)?;
        let x = step.add(x, positions)?;
        step.biased_norm(x, self.norm, "token_embd_norm")
    }
}
