//! What every architecture's step has in common: inputs, embedding, attention over the cache, head.

use crate::error::ModelError;
use crate::model::{Head, KvSpec, SampleHead, StepSpec};
use crate::rope::inverse_frequencies;
use crate::state::{KvGeometry, LayerState, StateTable};
use crate::weights::{Linear, WeightTable};
use refrain_formats::params::{ModelConfig, RopeScaling, RopeStyle};
use refrain_graph as ir;
use refrain_graph::{
    Graph, GraphBuilder, GraphError, Op, SAMPLE_PARAMS, SamplingInputs, StepInputs, TensorType,
};
use refrain_graph::{Unary, ValueId, Weight, WeightId};
use refrain_tensor::DType;
use std::fmt;

/// The layers of one architecture.
pub(crate) trait Architecture: fmt::Debug + Send + Sync {
    /// What a layer keeps between steps.
    fn state(&self, config: &ModelConfig, _layer: usize) -> LayerState {
        LayerState::Kv(KvGeometry { n_kv_heads: config.n_kv_heads, head_dim: config.head_dim })
    }

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
    states: StateTable,
    spec: StepSpec,
    inputs: StepInputs,
    tokens: ValueId,      // [n_tokens]
    paging: [ValueId; 3], // positions[n_tokens], seqs[n_tokens], tables[n_seqs, max_blocks]
}

impl<'m> Step<'m> {
    pub(crate) fn new(
        config: &'m ModelConfig,
        shared: &'m Shared,
        weights: Vec<Weight>,
        states: StateTable,
        spec: &StepSpec,
        kv: &KvSpec,
    ) -> Result<Step<'m>, GraphError> {
        let mut builder = GraphBuilder::new(weights, states.states().to_vec());
        let shape = spec.shape;
        let per_token = TensorType::new(DType::I32, [shape.n_tokens]);
        let tokens = builder.input("tokens", per_token)?;
        let positions = builder.input("positions", per_token)?;
        let seqs = builder.input("seqs", per_token)?;
        let tables = builder.input("tables", TensorType::new(DType::I32, [shape.n_seqs, kv.max_blocks]))?;
        let inputs = StepInputs {
            shape,
            tokens: builder.input_id(tokens),
            positions: builder.input_id(positions),
            seqs: builder.input_id(seqs),
            tables: Some(builder.input_id(tables)),
            adapters: None,
            rows: None,
            sampling: None,
            logits: None,
        };
        let paging = [positions, seqs, tables];
        Ok(Step { config, shared, builder, states, spec: *spec, inputs, tokens, paging })
    }

    pub(crate) fn scope(&mut self, scope: impl Into<String>) {
        self.builder.scope(scope);
    }

    pub(crate) fn finish(mut self) -> Graph {
        self.builder.declare_step(self.inputs);
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
        self.builder.reshape(y, &[self.spec.shape.n_tokens, n_heads, self.config.head_dim])
    }

    /// Rotates heads by their positions.
    pub(crate) fn rope(&mut self, x: ValueId, layer: usize) -> Result<ValueId, GraphError> {
        let style = match self.config.rope.style {
            RopeStyle::Neox => ir::RopeStyle::Neox,
            RopeStyle::Norm => ir::RopeStyle::Interleaved,
        };
        let rope = ir::Rope { style, n_dims: self.config.rope.dims, magnitude: self.shared.magnitude[layer] };
        let inv_freq = self.builder.weight(self.shared.inv_freq[layer]);
        self.builder.rope(rope, x, self.paging[0], inv_freq)
    }

    /// Appends keys and values to a layer's cache and attends over it: `[n_tokens, n_heads * head_dim]`.
    pub(crate) fn attend(&mut self, layer: usize, [q, k, v]: [ValueId; 3]) -> Result<ValueId, GraphError> {
        let c = self.config;
        let Some(kv) = self.states.kv(layer) else { panic!("layer {layer} attends and keeps no keys") };
        let (mut k_cache, mut v_cache) = (self.builder.state(kv.k), self.builder.state(kv.v));
        if kv.is_own {
            k_cache = self.builder.kv_append(k_cache, k, self.paging)?;
            v_cache = self.builder.kv_append(v_cache, v, self.paging)?;
        }
        let attention =
            ir::Attention { scale: c.attn_scale, window: c.window(layer), softcap: c.attn_softcap };
        let y = self.builder.attention(attention, q, [k_cache, v_cache], self.paging)?;
        self.builder.reshape(y, &[self.spec.shape.n_tokens, c.n_heads * c.head_dim])
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
        if self.spec.head == Head::None {
            return Ok(());
        }
        let n_rows = self.spec.shape.n_choices;
        // With as many rows as tokens every row is wanted, in order.
        let x = match n_rows == self.spec.shape.n_tokens {
            true => x,
            false => {
                let rows = self.builder.input("rows", TensorType::new(DType::I32, [n_rows]))?;
                self.inputs.rows = Some(self.builder.input_id(rows));
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
            Head::Logits => {
                self.inputs.logits = Some(self.output("logits", logits)?);
                Ok(())
            }
            Head::Sample(head) => self.sample(logits, head),
        }
    }

    fn sample(&mut self, logits: ValueId, head: SampleHead) -> Result<(), GraphError> {
        let n = self.spec.shape.n_choices;
        let mut input =
            |name: &str, dtype, width: usize| self.builder.input(name, TensorType::new(dtype, [n, width]));
        let params = input("params", DType::F32, SAMPLE_PARAMS)?;
        let rng = input("rng", DType::U32, 4)?;
        let history = input("history", DType::I32, head.n_history)?;
        let bias_ids = input("bias_ids", DType::I32, head.n_bias)?;
        let bias = input("bias", DType::F32, head.n_bias)?;
        let mut inputs = vec![logits, params, rng, history, bias_ids, bias];
        let words = self.config.n_vocab.div_ceil(32);
        let mask = if head.masked { Some(input("mask", DType::U32, words)?) } else { None };
        inputs.extend(mask);
        let op = Op::Sample(ir::Sample { masked: head.masked, n_top: head.n_top });
        let chosen = self.builder.node(op, &inputs, "sample")?;
        let (token, logprob) = (self.output("token", chosen[0])?, self.output("logprob", chosen[1])?);
        let top = match chosen.get(2..4) {
            Some(&[ids, logprobs]) => {
                Some([self.output("top_tokens", ids)?, self.output("top_logprobs", logprobs)?])
            }
            _ => None,
        };
        let id = |value| self.builder.input_id(value);
        self.inputs.sampling = Some(SamplingInputs {
            params: id(params),
            rng: id(rng),
            history: id(history),
            bias_ids: id(bias_ids),
            bias: id(bias),
            mask: mask.map(id),
            min_tokens: None,
            token,
            logprob,
            top,
        });
        Ok(())
    }

    /// Names an output and gives its position.
    fn output(&mut self, name: &str, value: ValueId) -> Result<usize, GraphError> {
        self.builder.output(name, value)?;
        Ok(self.builder.n_outputs() - 1)
    }
}
