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
    /// Of the result: it is multiplied by the sigmoid of this.
    pub gate: Option<Linear>, // [n_heads * head_dim, hidden]
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

/// A norm of queries, keys or values.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HeadNorm {
    pub weight: WeightId, // [head_dim], or [n_heads * head_dim]
    pub span: NormSpan,
}

/// What one norm is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NormSpan {
    /// Each head by itself.
    Head,
    /// All heads of a row.
    Row,
}

impl Attention {
    /// Attention as the configuration describes it: with biases and norms of heads where it says so.
    pub(crate) fn declare(w: &mut WeightTable<'_>, layer: usize) -> Result<Mixer, ModelError> {
        let maps = Attention::projections(w, layer)?;
        Attention::of(w, layer, maps, NormSpan::Head)
    }

    /// The same with norms over all heads of a row.
    pub(crate) fn with_row_norms(w: &mut WeightTable<'_>, layer: usize) -> Result<Mixer, ModelError> {
        let maps = Attention::projections(w, layer)?;
        Attention::of(w, layer, maps, NormSpan::Row)
    }

    /// The same with queries, keys and values as one tensor in the file.
    pub(crate) fn fused(w: &mut WeightTable<'_>, layer: usize) -> Result<Mixer, ModelError> {
        let [q, kv] = Attention::rows(w.config, layer);
        let parts = [("attn_q", q), ("attn_k", kv), ("attn_v", kv)];
        let maps = w.fused(layer, ["attn_qkv", "self_attn.qkv_proj"], parts, w.config.hidden)?;
        Attention::of(w, layer, maps, NormSpan::Head)
    }

    /// Rows of queries, and of keys and values.
    fn rows(c: &ModelConfig, layer: usize) -> [usize; 2] {
        let LayerSizes { n_kv_heads, head_dim, .. } = c.layer_sizes(layer);
        [c.n_heads * head_dim, n_kv_heads * head_dim]
    }

    fn projections(w: &mut WeightTable<'_>, layer: usize) -> Result<[Linear; 3], ModelError> {
        let c = w.config;
        let [q, kv] = Attention::rows(c, layer);
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
        let [q_rows, kv_rows] = Attention::rows(c, layer);
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
        Ok(Mixer::Attention(Attention { head_dim, q, q_norm, gate: None, kv, o }))
    }

    /// The same with an output gate, which lies behind the query in the rows of each head (Qwen 3.5).
    pub(crate) fn gated(w: &mut WeightTable<'_>, layer: usize) -> Result<Mixer, ModelError> {
        let c = w.config;
        let [_, kv_rows] = Attention::rows(c, layer);
        let head_dim = c.layer_sizes(layer).head_dim;
        let [q, gate] = w.interleaved(layer, ["attn_q", "attn_q_gate"], [c.n_heads, head_dim, c.hidden])?;
        let k = w.linear(layer, "attn_k", [kv_rows, c.hidden], false)?;
        let v = w.linear(layer, "attn_v", [kv_rows, c.hidden], false)?;
        let mut mixer = Attention::of(w, layer, [q, k, v], NormSpan::Head)?;
        if let Mixer::Attention(attention) = &mut mixer {
            attention.gate = Some(gate);
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

    pub(super) fn build(&self, step: &mut Step<'_>, layer: usize, h: ValueId) -> Result<ValueId, GraphError> {
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
        // Before the rotation, which is as good and keeps rotation and attention together.
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
        let h = step.attend(layer, q, own)?;
        let h = match gate {
            Some(gate) => step.times_sigmoid(h, gate)?,
            None => h,
        };
        step.linear(h, self.o, "attn_output")
    }

    /// A linear map into heads `[n_tokens, n_heads, head_dim]`, its rows normed where the norm is about whole rows.
    fn heads(
        &self,
        step: &mut Step<'_>,
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

    /// The norm of each head by itself, where there is one.
    fn normed(
        &self,
        step: &mut Step<'_>,
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
