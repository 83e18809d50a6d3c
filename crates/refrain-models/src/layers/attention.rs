//! Attention: projections, norms of heads, rotation, scores, and the way back.

use super::Mixer;
use crate::error::ModelError;
use crate::state::{KvGeometry, LayerState};
use crate::step::Step;
use crate::weights::{Linear, WeightTable};
use refrain_formats::params::{LayerSizes, ModelConfig};
use refrain_graph::{GraphError, ValueId, WeightId};

/// Attention of grouped heads. Window, scale and soft cap are those of the configuration.
#[derive(Debug)]
pub(crate) struct Attention {
    pub head_dim: usize,
    pub q: Linear, // [n_heads * head_dim, hidden]
    pub q_norm: Option<HeadNorm>,
    /// A layer without keys of its own attends to those of [`ModelConfig::kv_layer`].
    pub kv: Option<KeysValues>,
    pub o: Linear, // [hidden, n_heads * head_dim]
}

/// Keys and values of a layer that has its own.
#[derive(Debug)]
pub(crate) struct KeysValues {
    pub k: Linear, // [n_kv_heads * head_dim, hidden]
    /// The same; without it values are the keys before norm and rotation.
    pub v: Option<Linear>,
    pub k_norm: Option<HeadNorm>,
    pub v_norm: Option<HeadNorm>,
}

/// A norm of each head, `[head_dim]`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HeadNorm(pub WeightId);

impl Attention {
    /// Attention as the configuration describes it: with biases and norms of heads where it says so.
    pub(crate) fn declare(w: &mut WeightTable<'_>, layer: usize) -> Result<Mixer, ModelError> {
        let c = w.config;
        let LayerSizes { n_kv_heads, head_dim, .. } = c.layer_sizes(layer);
        let (q_rows, kv_rows) = (c.n_heads * head_dim, n_kv_heads * head_dim);
        let q = w.linear(layer, "attn_q", [q_rows, c.hidden], c.qkv_bias)?;
        let k = w.linear(layer, "attn_k", [kv_rows, c.hidden], c.qkv_bias)?;
        let v = w.linear(layer, "attn_v", [kv_rows, c.hidden], c.qkv_bias)?;
        let norm = |w: &mut WeightTable<'_>, name: &str| match c.qk_norm {
            true => w.norm(layer, name, head_dim).map(|weight| Some(HeadNorm(weight))),
            false => Ok(None),
        };
        let (q_norm, k_norm) = (norm(w, "attn_q_norm")?, norm(w, "attn_k_norm")?);
        let o = w.linear(layer, "attn_output", [c.hidden, q_rows], c.attn_output_bias)?;
        let kv = Some(KeysValues { k, v: Some(v), k_norm, v_norm: None });
        Ok(Mixer::Attention(Attention { head_dim, q, q_norm, kv, o }))
    }

    pub(super) fn state(&self, config: &ModelConfig, layer: usize) -> LayerState {
        match &self.kv {
            Some(_) => {
                let LayerSizes { n_kv_heads, head_dim, .. } = config.layer_sizes(layer);
                LayerState::Kv(KvGeometry { n_kv_heads, head_dim })
            }
            None => LayerState::SharedKv { layer: config.kv_layer(layer) },
        }
    }

    pub(super) fn build(&self, step: &mut Step<'_>, layer: usize, h: ValueId) -> Result<ValueId, GraphError> {
        let q = step.heads(h, self.q, self.head_dim, "attn_q")?;
        let own = match &self.kv {
            Some(kv) => {
                let k = step.heads(h, kv.k, self.head_dim, "attn_k")?;
                let v = match kv.v {
                    Some(v) => step.heads(h, v, self.head_dim, "attn_v")?,
                    None => k,
                };
                Some((kv, k, v))
            }
            None => None,
        };
        let q = self.normed(step, q, self.q_norm, "attn_q_norm")?;
        let own = match own {
            Some((kv, k, v)) => {
                let k = self.normed(step, k, kv.k_norm, "attn_k_norm")?;
                Some([k, self.normed(step, v, kv.v_norm, "attn_v_norm")?])
            }
            None => None,
        };
        let q = step.rope(q, layer)?;
        let own = match own {
            Some([k, v]) => Some([step.rope(k, layer)?, v]),
            None => None,
        };
        let h = step.attend(layer, q, own)?;
        step.linear(h, self.o, "attn_output")
    }

    fn normed(
        &self,
        step: &mut Step<'_>,
        x: ValueId, // [n_tokens, n_heads, head_dim]
        norm: Option<HeadNorm>,
        label: &str,
    ) -> Result<ValueId, GraphError> {
        match norm {
            Some(HeadNorm(weight)) => step.norm(x, weight, label),
            None => Ok(x),
        }
    }
}
