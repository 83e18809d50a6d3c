//! Attention: projections, head norms, rotary embedding, scores, and the output projection.

use super::Mixer;
use crate::error::ModelError;
use crate::state::{KvGeometry, LayerState};
use crate::step::StepBuilder;
use crate::weights::{Linear, WeightTable};
use refrain_formats::params::{LayerSizes, ModelConfig};
use refrain_graph::{GraphError, ValueId, WeightId};

/// Grouped-query attention. Window, scale and soft cap come from the configuration.
#[derive(Debug)]
pub(crate) struct AttentionLayer {
    pub head_dim: usize,
    pub q: Linear, // [n_heads * head_dim, hidden]
    pub q_norm: Option<HeadNorm>,
    /// Output gate: the attention output is multiplied by its sigmoid.
    pub gate: Option<Linear>, // [n_heads * head_dim, hidden]
    /// `None` for a layer that attends to the keys and values of [`ModelConfig::kv_layer`].
    pub kv: Option<KeysValues>,
    pub o: Linear, // [hidden, n_heads * head_dim]
    /// A score of each head that takes part in its softmax but has no value (gpt-oss).
    pub sinks: Option<WeightId>, // [n_heads]
}

/// Key and value projections of a layer with its own KV cache.
#[derive(Debug)]
pub(crate) struct KeysValues {
    pub k: Linear, // [n_kv_heads * head_dim, hidden]
    /// Same shape. Without it, values are the keys before norm and rotation.
    pub v: Option<Linear>,
    pub k_norm: Option<HeadNorm>,
    pub v_norm: Option<HeadNorm>,
}

/// Norm of queries, keys or values.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HeadNorm {
    pub weight: WeightId, // [head_dim], or [n_heads * head_dim]
    pub span: NormSpan,
}

/// Elements that one norm covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NormSpan {
    /// Each head separately.
    Head,
    /// All heads of a row together.
    Row,
}

impl AttentionLayer {
    /// Attention as configured, with biases and per-head norms if the configuration has them.
    pub(crate) fn declare(w: &mut WeightTable<'_>, layer: usize) -> Result<Mixer, ModelError> {
        let maps = AttentionLayer::projections(w, layer)?;
        AttentionLayer::of(w, layer, maps, NormSpan::Head)
    }

    /// The same with norms over all heads of a row.
    pub(crate) fn with_row_norms(w: &mut WeightTable<'_>, layer: usize) -> Result<Mixer, ModelError> {
        let maps = AttentionLayer::projections(w, layer)?;
        AttentionLayer::of(w, layer, maps, NormSpan::Row)
    }

    /// The same with queries, keys and values stored as one tensor.
    pub(crate) fn fused(w: &mut WeightTable<'_>, layer: usize) -> Result<Mixer, ModelError> {
        let [q, kv] = AttentionLayer::rows(w.config, layer);
        let parts = [("attn_q", q), ("attn_k", kv), ("attn_v", kv)];
        let maps = w.fused(layer, ["attn_qkv", "self_attn.qkv_proj"], parts, w.config.hidden)?;
        AttentionLayer::of(w, layer, maps, NormSpan::Head)
    }

    /// Number of output rows of queries, and of keys and values.
    fn rows(c: &ModelConfig, layer: usize) -> [usize; 2] {
        let LayerSizes { n_kv_heads, head_dim, .. } = c.layer_sizes(layer);
        [c.n_heads * head_dim, n_kv_heads * head_dim]
    }

    fn projections(w: &mut WeightTable<'_>, layer: usize) -> Result<[Linear; 3], ModelError> {
        let c = w.config;
        let [q, kv] = AttentionLayer::rows(c, layer);
        Ok([
            w.linear(layer, "attn_q", [q, c.hidden], c.qkv_bias)?,
            w.linear(layer, "attn_k", [kv, c.hidden], c.qkv_bias)?,
            w.linear(layer, "attn_v", [kv, c.hidden], c.qkv_bias)?,
        ])
    }

    fn of(
        w: &mut WeightTable<'_>,
        layer: usize,
        [q, k, v]: [Linear; 3],
        span: NormSpan,
    ) -> Result<Mixer, ModelError> {
        let c = w.config;
        let head_dim = c.layer_sizes(layer).head_dim;
        let [q_rows, kv_rows] = AttentionLayer::rows(c, layer);
        let norm = |w: &mut WeightTable<'_>, name: &str, rows: usize| match (c.qk_norm, span) {
            (false, _) => Ok(None),
            (true, NormSpan::Head) => w.norm(layer, name, head_dim).map(Some),
            (true, NormSpan::Row) => w.norm(layer, name, rows).map(Some),
        };
        let as_norm = |weight: Option<WeightId>| weight.map(|weight| HeadNorm { weight, span });
        let q_norm = as_norm(norm(w, "attn_q_norm", q_rows)?);
        let k_norm = as_norm(norm(w, "attn_k_norm", kv_rows)?);
        let o = w.linear(layer, "attn_output", [c.hidden, q_rows], c.attn_output_bias)?;
        let kv = Some(KeysValues { k, v: Some(v), k_norm, v_norm: None });
        Ok(Mixer::Attention(AttentionLayer { head_dim, q, q_norm, gate: None, kv, o, sinks: None }))
    }

    /// The same with an output gate, stored after the query in the rows of each head (Qwen 3.5).
    pub(crate) fn gated(w: &mut WeightTable<'_>, layer: usize) -> Result<Mixer, ModelError> {
        let c = w.config;
        let [_, kv_rows] = AttentionLayer::rows(c, layer);
        let head_dim = c.layer_sizes(layer).head_dim;
        let [q, gate] = w.interleaved(layer, ["attn_q", "attn_q_gate"], [c.n_heads, head_dim, c.hidden])?;
        let k = w.linear(layer, "attn_k", [kv_rows, c.hidden], false)?;
        let v = w.linear(layer, "attn_v", [kv_rows, c.hidden], false)?;
        let mut mixer = AttentionLayer::of(w, layer, [q, k, v], NormSpan::Head)?;
        if let Mixer::Attention(attention) = &mut mixer {
            attention.gate = Some(gate);
        }
        Ok(mixer)
    }

    /// The same with a sink for each head.
    pub(crate) fn with_sinks(w: &mut WeightTable<'_>, layer: usize) -> Result<Mixer, ModelError> {
        let mut mixer = AttentionLayer::declare(w, layer)?;
        if let Mixer::Attention(attention) = &mut mixer {
            let names = ["attn_sinks.weight", "self_attn.sinks"];
            attention.sinks = Some(w.scaled_vector(layer, names, w.config.n_heads, 1.0)?);
        }
        Ok(mixer)
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

    pub(super) fn build(
        &self,
        step: &mut StepBuilder<'_>,
        layer: usize,
        h: ValueId,
    ) -> Result<ValueId, GraphError> {
        let q = self.heads(step, h, self.q, self.q_norm, "attn_q")?;
        let own = match &self.kv {
            Some(kv) => {
                let k = self.heads(step, h, kv.k, kv.k_norm, "attn_k")?;
                let v = match kv.v {
                    Some(v) => self.heads(step, h, v, kv.v_norm, "attn_v")?,
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
        // Scaling before the rotation is equivalent, and keeps rotation and attention adjacent for fusion.
        let q = step.tempered(q)?;
        let q = step.rope(q, layer)?;
        let own = match own {
            Some([k, v]) => Some([step.rope(k, layer)?, v]),
            None => None,
        };
        let gate = match self.gate {
            Some(gate) => Some(step.linear(h, gate, "attn_gate")?),
            None => None,
        };
        let h = step.attend(layer, q, own, self.sinks)?;
        let h = match gate {
            Some(gate) => step.times_sigmoid(h, gate)?,
            None => h,
        };
        step.linear(h, self.o, "attn_output")
    }

    /// Applies a linear map and splits its output into heads `[n_tokens, n_heads, head_dim]`, after the norm
    /// if it covers whole rows.
    fn heads(
        &self,
        step: &mut StepBuilder<'_>,
        h: ValueId,
        map: Linear,
        norm: Option<HeadNorm>,
        label: &str,
    ) -> Result<ValueId, GraphError> {
        let y = step.linear(h, map, label)?;
        let y = match norm {
            Some(HeadNorm { weight, span: NormSpan::Row }) => {
                step.norm(y, weight, &format!("{label}_norm"))?
            }
            Some(HeadNorm { span: NormSpan::Head, .. }) | None => y,
        };
        step.as_heads(y, self.head_dim)
    }

    /// Applies the per-head norm, if there is one.
    fn normed(
        &self,
        step: &mut StepBuilder<'_>,
        x: ValueId, // [n_tokens, n_heads, head_dim]
        norm: Option<HeadNorm>,
        label: &str,
    ) -> Result<ValueId, GraphError> {
        match norm {
            Some(HeadNorm { weight, span: NormSpan::Head }) => step.norm(x, weight, label),
            Some(HeadNorm { span: NormSpan::Row, .. }) | None => Ok(x),
        }
    }
}
