//! What every architecture's step has in common: inputs, embedding, attention over the cache, head.

use crate::error::ModelError;
use crate::model::{Head, KvSpec, StepSpec};
use crate::rope::inverse_frequencies;
use crate::weights::{Linear, WeightTable};
use refrain_formats::params::{ModelConfig, RopeScaling, RopeStyle};
use refrain_graph as ir;
use refrain_graph::{Graph, GraphBuilder, GraphError, Op, SAMPLE_PARAMS, State, StateId, TensorType, Unary};
use refrain_graph::{ValueId, Weight, WeightId};
use refrain_tensor::DType;
use std::fmt;

/// The layers of one architecture.
pub(crate) trait Architecture: fmt::Debug + Send + Sync {
    /// One layer: `x[n_tokens, hidden]` -> the same.
    fn layer(&self, step: &mut Step<'_>, layer: usize, x: ValueId) -> Result<ValueId, GraphError>;
}

/// Weights outside the layers.
#[derive(Clone, Debug)]
pub(crate) struct Shared {
    embedding: WeightId,     // [vocab, hidden]
    output_norm: WeightId,   // [hidden]
    output: WeightId,        // [vocab, hidden]; the embedding when they are tied
    inv_freq: Vec<WeightId>, // for each layer: [rope.dims / 2]
    magnitude: Vec<f32>,     // for each layer: factor on sine and cosine
}

impl Shared {
    pub(crate) fn declare(w: &mut WeightTable<'_>) -> Result<Shared, ModelError> {
        let c = w.config;
        let table = [c.n_vocab, c.hidden];
        let embedding = w.global("token_embd.weight", "model.embed_tokens.weight", &table)?;
        let output_norm = w.global_norm("output_norm.weight", "model.norm.weight", c.hidden)?;
        let output = match c.tied_embeddings {
            true => embedding,
            false => w.optional("output.weight", "lm_head.weight", &table)?.unwrap_or(embedding),
        };
        let (inv_freq, magnitude) = Shared::declare_rope(w)?;
        Ok(Shared { embedding, output_norm, output, inv_freq, magnitude })
    }

    /// Layers of one kind share one table.
    fn declare_rope(w: &mut WeightTable<'_>) -> Result<(Vec<WeightId>, Vec<f32>), ModelError> {
        let c = w.config;
        let factors = match c.rope.has_freq_factors {
            true => w.table("rope_freqs.weight", c.rope.dims / 2)?,
            false => None,
        };
        let mut tables: Vec<(f32, RopeScaling, WeightId)> = Vec::new();
        let mut inv_freq = Vec::with_capacity(c.n_layers);
        let mut magnitude = Vec::with_capacity(c.n_layers);
        for layer in 0..c.n_layers {
            let (theta, scaling) = (c.rope_theta(layer), c.rope_scaling(layer));
            let known = tables.iter().find(|(t, s, _)| (*t, *s) == (theta, scaling)).map(|(_, _, id)| *id);
            let id = match known {
                Some(id) => id,
                None => {
                    let values = inverse_frequencies(theta, c.rope.dims, scaling, factors.as_deref());
                    let id = w.derived(&format!("rope.inv_freq.{}", tables.len()), &values)?;
                    tables.push((theta, scaling, id));
                    id
                }
            };
            inv_freq.push(id);
            magnitude.push(match scaling {
                RopeScaling::Yarn(yarn) => yarn.attention_factor,
                RopeScaling::None | RopeScaling::Linear { .. } | RopeScaling::Llama3 { .. } => 1.0,
            });
        }
        Ok((inv_freq, magnitude))
    }
}

/// A step that is being built.
pub(crate) struct Step<'m> {
    pub config: &'m ModelConfig,
    shared: &'m Shared,
    builder: GraphBuilder,
    spec: StepSpec,
    tokens: ValueId,      // [n_tokens]
    where_: [ValueId; 3], // positions[n_tokens], seqs[n_tokens], tables[n_seqs, max_blocks]
}

impl<'m> Step<'m> {
    pub(crate) fn new(
        config: &'m ModelConfig,
        shared: &'m Shared,
        weights: Vec<Weight>,
        states: Vec<State>,
        spec: &StepSpec,
        kv: &KvSpec,
    ) -> Result<Step<'m>, GraphError> {
        let mut builder = GraphBuilder::new(weights, states);
        let per_token = TensorType::new(DType::I32, [spec.n_tokens]);
        let tokens = builder.input("tokens", per_token)?;
        let positions = builder.input("positions", per_token)?;
        let seqs = builder.input("seqs", per_token)?;
        let tables = builder.input("tables", TensorType::new(DType::I32, [kv.n_seqs, kv.max_blocks]))?;
        Ok(Step { config, shared, builder, spec: *spec, tokens, where_: [positions, seqs, tables] })
    }

    pub(crate) fn scope(&mut self, scope: impl Into<String>) {
        self.builder.scope(scope);
    }

    pub(crate) fn finish(self) -> Graph {
        self.builder.finish()
    }

    /// Rows of the embedding: `[n_tokens, hidden]`.
    pub(crate) fn embed(&mut self) -> Result<ValueId, GraphError> {
        let table = self.builder.weight(self.shared.embedding);
        let x = self.builder.gather_rows(table, self.tokens, self.spec.act)?;
        match self.config.embedding_scale {
            1.0 => Ok(x),
            scale => self.builder.unary(Unary::Affine { mul: scale, add: 0.0 }, x),
        }
    }

    pub(crate) fn norm(&mut self, x: ValueId, w: WeightId, label: &str) -> Result<ValueId, GraphError> {
        let w = self.builder.weight(w);
        self.builder.rms_norm(x, w, self.config.norm_eps, label)
    }

    pub(crate) fn add(&mut self, a: ValueId, b: ValueId) -> Result<ValueId, GraphError> {
        self.builder.add(a, b)
    }

    pub(crate) fn linear(&mut self, x: ValueId, l: Linear, label: &str) -> Result<ValueId, GraphError> {
        let weight = self.builder.weight(l.weight);
        let bias = l.bias.map(|b| self.builder.weight(b));
        self.builder.linear(x, weight, bias, label)
    }

    /// A linear map into heads: `[n_tokens, n_heads, head_dim]`.
    pub(crate) fn heads(&mut self, x: ValueId, l: Linear, label: &str) -> Result<ValueId, GraphError> {
        let y = self.linear(x, l, label)?;
        let n_heads = self.builder.ty(y).shape.dim_back(0) / self.config.head_dim;
        self.builder.reshape(y, &[self.spec.n_tokens, n_heads, self.config.head_dim])
    }

    /// Rotates heads by their positions.
    pub(crate) fn rope(&mut self, x: ValueId, layer: usize) -> Result<ValueId, GraphError> {
        let style = match self.config.rope.style {
            RopeStyle::Neox => ir::RopeStyle::Neox,
            RopeStyle::Norm => ir::RopeStyle::Interleaved,
        };
        let rope = ir::Rope { style, n_dims: self.config.rope.dims, magnitude: self.shared.magnitude[layer] };
        let inv_freq = self.builder.weight(self.shared.inv_freq[layer]);
        self.builder.rope(rope, x, self.where_[0], inv_freq)
    }

    /// Appends keys and values to a layer's cache and attends over it: `[n_tokens, n_heads * head_dim]`.
    pub(crate) fn attend(&mut self, layer: usize, [q, k, v]: [ValueId; 3]) -> Result<ValueId, GraphError> {
        let c = self.config;
        let [k_id, v_id] = [StateId::from_idx(2 * layer), StateId::from_idx(2 * layer + 1)];
        let (k_cache, v_cache) = (self.builder.state(k_id), self.builder.state(v_id));
        let k_cache = self.builder.kv_append(k_cache, k, self.where_)?;
        let v_cache = self.builder.kv_append(v_cache, v, self.where_)?;
        let attention =
            ir::Attention { scale: c.attn_scale, window: c.window(layer), softcap: c.attn_softcap };
        let y = self.builder.attention(attention, q, [k_cache, v_cache], self.where_)?;
        self.builder.reshape(y, &[self.spec.n_tokens, c.n_heads * c.head_dim])
    }

    /// `down(f(gate(x)) * up(x))`
    pub(crate) fn gated_ffn(
        &mut self,
        x: ValueId,
        function: Unary,
        [gate, up, down]: [Linear; 3],
    ) -> Result<ValueId, GraphError> {
        let up = self.linear(x, up, "ffn_up")?;
        let gate = self.linear(x, gate, "ffn_gate")?;
        let gate = self.builder.unary(function, gate)?;
        let h = self.builder.binary(ir::Binary::Mul, gate, up)?;
        self.linear(h, down, "ffn_down")
    }

    /// The final norm, the logits of the rows that are asked for, and the choice among them.
    pub(crate) fn head(&mut self, x: ValueId) -> Result<(), GraphError> {
        let n_rows = self.spec.head.n_rows();
        if n_rows == 0 {
            return Ok(());
        }
        // With as many rows as tokens every row is wanted, in order.
        let x = match n_rows == self.spec.n_tokens {
            true => x,
            false => {
                let rows = self.builder.input("rows", TensorType::new(DType::I32, [n_rows]))?;
                self.builder.gather_rows(x, rows, self.spec.act)?
            }
        };
        let x = self.norm(x, self.shared.output_norm, "output_norm")?;
        let output = Linear { weight: self.shared.output, bias: None };
        let mut logits = self.linear(x, output, "output")?;
        if self.spec.act != DType::F32 {
            logits = self.builder.cast(logits, DType::F32)?;
        }
        if let Some(cap) = self.config.final_softcap {
            logits = self.builder.unary(Unary::SoftCap(cap), logits)?;
        }
        match self.spec.head {
            Head::None => Ok(()),
            Head::Logits { .. } => self.builder.output("logits", logits),
            Head::Sample { history, n_bias } => self.sample(logits, history, n_bias),
        }
    }

    fn sample(&mut self, logits: ValueId, history: usize, n_bias: usize) -> Result<(), GraphError> {
        let params = self.builder.input("params", TensorType::new(DType::F32, [1, SAMPLE_PARAMS]))?;
        let rng = self.builder.input("rng", TensorType::new(DType::U32, [1, 4]))?;
        let history = self.builder.input("history", TensorType::new(DType::I32, [1, history]))?;
        let bias_ids = self.builder.input("bias_ids", TensorType::new(DType::I32, [1, n_bias]))?;
        let bias = self.builder.input("bias", TensorType::new(DType::F32, [1, n_bias]))?;
        let inputs = [logits, params, rng, history, bias_ids, bias];
        let chosen = self.builder.node(Op::Sample, &inputs, "sample")?;
        self.builder.output("token", chosen[0])?;
        self.builder.output("logprob", chosen[1])
    }
}
