//! The parts of a step that all architectures share: inputs, embedding, attention over the cache, output
//! head.

use crate::adapter::Attached;
use crate::bank::Bank;
use crate::error::ModelError;
use crate::host_rows::host_rows;
use crate::layers::{BiasedNorm, Decoder};
use crate::model::{Head, KvSpec, SampleHead, StepSpec};
use crate::rope::inverse_frequencies;
use crate::state::StateTable;
use crate::weights::{Linear, WeightTable};
use refrain_formats::params::{Arch, LayerAttention, ModelConfig, NormKind, QueryTemperature};
use refrain_formats::params::{RopePairing, RopeScaling};
use refrain_graph as ir;
use refrain_graph::{
    Graph, GraphBuilder, GraphError, Op, PagedCaches, SAMPLE_PARAMS, SamplingInputs, StateId, StepInputs,
    TensorType,
};
use refrain_graph::{Unary, ValueId, Weight, WeightId};
use refrain_tensor::DType;

/// Weights outside the layers.
#[derive(Clone, Debug)]
pub(crate) struct GlobalWeights {
    embedding: WeightId, // [vocab, hidden]
    /// Final norm and output projection; encoders have neither.
    head: Option<HeadWeights>,
    rotations: Vec<Frequencies>, // for each layer; empty in encoders
}

/// Weights after the layers.
#[derive(Clone, Copy, Debug)]
struct HeadWeights {
    norm: WeightId,   // [hidden]
    output: WeightId, // [vocab, hidden]; the embedding when they are tied
}

/// Rotary frequencies of a layer.
#[derive(Clone, Copy, Debug)]
struct Frequencies {
    inv_freq: WeightId, // [rope.dims / 2]
    /// For sequences longer than this number of tokens, other frequencies.
    long: Option<(usize, WeightId)>,
    /// Factor on sine and cosine.
    magnitude: f32,
}

impl GlobalWeights {
    pub(crate) fn declare(w: &mut WeightTable<'_>) -> Result<GlobalWeights, ModelError> {
        let c = w.config;
        let table = [c.n_vocab, c.hidden];
        if c.arch.is_encoder() {
            let hf = "embeddings.word_embeddings.weight";
            let embedding = w.global("token_embd.weight", hf, &table)?;
            return Ok(GlobalWeights { embedding, head: None, rotations: Vec::new() });
        }
        let embedding = w.global("token_embd.weight", "model.embed_tokens.weight", &table)?;
        let [gguf, hf] = match c.arch {
            Arch::Lfm2 => ["token_embd_norm.weight", "model.embedding_norm.weight"],
            _ => ["output_norm.weight", "model.norm.weight"],
        };
        let norm = w.global_norm(gguf, hf, c.hidden)?;
        let output = match c.tied_embeddings {
            true => embedding,
            false => w.optional("output.weight", "lm_head.weight", &table)?.unwrap_or(embedding),
        };
        let rotations = GlobalWeights::declare_rope(w)?;
        Ok(GlobalWeights { embedding, head: Some(HeadWeights { norm, output }), rotations })
    }

    /// Frequencies of a layer for sequences within the original context.
    pub(crate) fn frequencies(&self, layer: usize) -> WeightId {
        self.rotations[layer].inv_freq
    }

    /// Layers with equal parameters share one table.
    fn declare_rope(w: &mut WeightTable<'_>) -> Result<Vec<Frequencies>, ModelError> {
        let c = w.config;
        let of_file = match c.rope.has_freq_factors {
            true => w.table("rope_freqs.weight", c.rope.dims / 2)?,
            false => None,
        };
        let mut tables: Vec<(RopeTableKey, WeightId)> = Vec::new();
        let mut table = |w: &mut WeightTable<'_>, table: RopeTableKey, factors: Option<&[f32]>| {
            let known = tables.iter().find(|(known, _)| *known == table).map(|(_, id)| *id);
            match known {
                Some(id) => Ok(id),
                None => {
                    let (theta, dims, scaling, _) = table;
                    let values = match theta {
                        0.0 => vec![0.0; dims / 2],
                        theta => inverse_frequencies(theta, dims, scaling, factors),
                    };
                    let id = w.derived(&format!("rope.inv_freq.{}", tables.len()), &values)?;
                    tables.push((table, id));
                    Ok::<_, ModelError>(id)
                }
            }
        };
        let mut rotations = Vec::with_capacity(c.n_layers);
        for layer in 0..c.n_layers {
            if !c.rotates(layer) {
                // With frequencies of 0, heads stay bit-for-bit unchanged, and the layer runs the same ops as
                // the others.
                let dims = c.rope_dims(layer);
                let key = (0.0, dims, RopeScaling::None, Divisors::None);
                let inv_freq = table(w, key, None)?;
                rotations.push(Frequencies { inv_freq, long: None, magnitude: 1.0 });
                continue;
            }
            let scaling = c.rope_scaling(layer);
            // A table of divisors only applies to layers whose frequencies are scaled.
            let is_local = c.rope.local_theta.is_some() && c.layer(layer) == LayerAttention::Sliding;
            let (theta, dims) = (c.rope_theta(layer), c.rope_dims(layer));
            let (factors, long) = match (scaling, &c.long_rope) {
                (RopeScaling::Long { n_original_context, .. }, Some(factors)) => {
                    let long = table(w, (theta, dims, scaling, Divisors::Long), Some(&factors.long))?;
                    (Some(&factors.short), Some((n_original_context, long)))
                }
                _ => (of_file.as_ref().filter(|_| !is_local), None),
            };
            let divisors = if factors.is_some() { Divisors::Usual } else { Divisors::None };
            let key = (theta, dims, scaling, divisors);
            let inv_freq = table(w, key, factors.map(Vec::as_slice))?;
            rotations.push(Frequencies { inv_freq, long, magnitude: scaling.magnitude() });
        }
        Ok(rotations)
    }
}

/// Key of a layer's frequency table: base (0 for no rotation), rotated elements, scaling and divisors.
type RopeTableKey = (f32, usize, RopeScaling, Divisors);

/// Per-frequency divisors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Divisors {
    None,
    Usual,
    Long,
}

/// Builder of a step's graph.
pub(crate) struct StepBuilder<'m> {
    pub config: &'m ModelConfig,
    shared: &'m GlobalWeights,
    /// The adapter attached to the model.
    pub(crate) attached: Option<&'m Attached>,
    pub(crate) builder: GraphBuilder,
    /// Value of each weight: the weight itself, or the state that holds it during training.
    weights: Vec<ValueId>,
    n_tokens: usize,
    /// Maximum number of tokens per sequence.
    n_context: usize,
    act: DType,
    tokens: ValueId,    // [n_tokens]
    positions: ValueId, // [n_tokens]
    rows: RowContext<'m>,
    temperatures: Option<ValueId>, // [n_tokens, 1, 1]
    layer_inputs: Option<ValueId>, // [n_layers, n_tokens, d]
    /// What each layer so far attends to.
    attended: Vec<PagedCaches>,
    /// Whether rows of tables that may stay on the host are gathered there.
    pub(crate) tables_on_host: bool,
    /// The linear maps so far, each with the rows that it multiplies.
    pub(crate) maps: Vec<(ValueId, WeightId)>,
    /// First products of adapters: their rows, their index in the bank, and the product.
    pub(crate) downs: Vec<(ValueId, usize, ValueId)>,
}

/// How the rows of a step relate to each other, and their outputs.
pub(crate) enum RowContext<'m> {
    /// Rows of sequences that continue from step to step.
    Paged(Box<PagedRows<'m>>),
    /// Whole documents, for training, or texts to embed.
    Documents {
        spans: ValueId, // [n_tokens, 2]
        /// Dropout, if any.
        dropout: Option<Dropping>,
        /// Tokens of the longest document.
        n_context: usize,
    },
}

pub(crate) struct PagedRows<'m> {
    states: StateTable,
    spec: StepSpec,
    inputs: StepInputs,
    paging: [ValueId; 3], // positions[n_tokens], seqs[n_tokens], tables[n_seqs, max_blocks]
    slots: Option<ValueId>, // [n_seqs, 2]
    /// The adapters of sequences, if the model has a bank of them.
    adapters: Option<(&'m Bank, ValueId)>, // [n_seqs]
    n_context: usize,
}

/// Dropout of a training step.
pub(crate) struct Dropping {
    /// Probability of dropping an element of a layer's branches.
    pub p: f32,
    pub rng: ValueId, // [4]
    pub n_sites: u32,
}

impl<'m> StepBuilder<'m> {
    pub(crate) fn new(
        config: &'m ModelConfig,
        shared: &'m GlobalWeights,
        weights: Vec<Weight>,
        states: StateTable,
        spec: &StepSpec,
        kv: &KvSpec,
        bank: Option<&'m Bank>,
    ) -> Result<StepBuilder<'m>, GraphError> {
        let mut builder = GraphBuilder::new(weights, states.states().to_vec());
        let shape = spec.shape;
        let per_token = TensorType::new(DType::I32, [shape.n_tokens]);
        let tokens = builder.input("tokens", per_token)?;
        let positions = builder.input("positions", per_token)?;
        let seqs = builder.input("seqs", per_token)?;
        let tables = builder.input("tables", TensorType::new(DType::I32, [shape.n_seqs, kv.max_blocks]))?;
        let slots = match states.has_slots() {
            true => Some(builder.input("slots", TensorType::new(DType::I32, [shape.n_seqs, 2]))?),
            false => None,
        };
        let adapters = match bank {
            Some(bank) => {
                let per_seq = TensorType::new(DType::I32, [shape.n_seqs]);
                Some((bank, builder.input("adapters", per_seq)?))
            }
            None => None,
        };
        let inputs = StepInputs {
            shape,
            tokens: builder.input_id(tokens),
            positions: builder.input_id(positions),
            seqs: builder.input_id(seqs),
            tables: Some(builder.input_id(tables)),
            slots: slots.map(|slots| builder.input_id(slots)),
            adapters: adapters.map(|(_, adapters)| builder.input_id(adapters)),
            rows: None,
            sampling: None,
            logits: None,
        };
        let (paging, n_context) = ([positions, seqs, tables], kv.max_blocks * kv.kv_block);
        let weights =
            (0..builder.graph().weights().len()).map(|i| builder.weight(WeightId::from_idx(i))).collect();
        let paged = PagedRows { states, spec: *spec, inputs, paging, slots, adapters, n_context };
        let rows = RowContext::Paged(Box::new(paged));
        let (n_tokens, act) = (shape.n_tokens, spec.act);
        let context = ([tokens, positions], n_tokens, act);
        Ok(StepBuilder::over(config, shared, builder, weights, context, rows))
    }

    /// A step over whole documents, with given values for the weights.
    pub(crate) fn of_documents(
        config: &'m ModelConfig,
        shared: &'m GlobalWeights,
        builder: GraphBuilder,
        weights: Vec<ValueId>,
        act: DType,
        [tokens, positions]: [ValueId; 2],
        rows: RowContext<'m>,
    ) -> StepBuilder<'m> {
        let n_tokens = builder.ty(tokens).shape.n_elements();
        StepBuilder::over(config, shared, builder, weights, ([tokens, positions], n_tokens, act), rows)
    }

    fn over(
        config: &'m ModelConfig,
        shared: &'m GlobalWeights,
        builder: GraphBuilder,
        weights: Vec<ValueId>,
        ([tokens, positions], n_tokens, act): ([ValueId; 2], usize, DType),
        rows: RowContext<'m>,
    ) -> StepBuilder<'m> {
        let (layer_inputs, attended) = (None, Vec::with_capacity(config.n_layers));
        let n_context = match &rows {
            RowContext::Paged(paged) => paged.n_context,
            RowContext::Documents { n_context, .. } => *n_context,
        };
        StepBuilder {
            config,
            shared,
            n_context,
            temperatures: None,
            attached: None,
            builder,
            weights,
            n_tokens,
            act,
            tokens,
            positions,
            rows,
            layer_inputs,
            attended,
            tables_on_host: false,
            maps: Vec::new(),
            downs: Vec::new(),
        }
    }

    fn paged(&mut self) -> &mut PagedRows<'m> {
        match &mut self.rows {
            RowContext::Paged(paged) => paged,
            RowContext::Documents { .. } => {
                panic!("a step over whole documents has no cache and chooses nothing")
            }
        }
    }

    /// Positions of the rows of a value, if it has one per token of the step.
    pub(crate) fn positions_of(&self, value: ValueId) -> Option<ValueId> {
        (self.builder.ty(value).shape.dims()[0] == self.n_tokens).then_some(self.positions)
    }

    /// The recurrent states of a layer, and the inputs that locate the slots of its rows.
    ///
    /// # Panics
    ///
    /// Panics if the layer has none, or the step is over whole documents.
    pub(crate) fn slots(&mut self, layer: usize) -> (Vec<StateId>, [ValueId; 3]) {
        let PagedRows { states, paging: [positions, seqs, _], slots, .. } = self.paged();
        let Some(slots) = *slots else { panic!("layer {layer} has no recurrent state") };
        (states.slots(layer).to_vec(), [*positions, *seqs, slots])
    }

    pub(crate) fn weight(&self, id: WeightId) -> ValueId {
        self.weights[id.idx()]
    }

    pub(crate) fn scope(&mut self, scope: impl Into<String>) {
        self.builder.scope(scope);
    }

    pub(crate) fn finish(mut self) -> Graph {
        if let RowContext::Paged(paged) = self.rows {
            self.builder.declare_step(paged.inputs);
        }
        self.builder.finish()
    }

    /// Builds the input of the first layer, `[n_tokens, hidden]`, and the per-layer inputs.
    pub(crate) fn begin(&mut self, decoder: &Decoder) -> Result<ValueId, GraphError> {
        let x = self.embed()?;
        self.layer_inputs = match &decoder.layer_inputs {
            Some(inputs) => Some(inputs.build(self, x)?),
            None => None,
        };
        self.temperatures = self.temperatures()?;
        match &decoder.text_inputs {
            Some(inputs) => inputs.build(self, x),
            None => Ok(x),
        }
    }

    /// Factors on the queries of each row, `[n_tokens, 1, 1]`; `None` if all of them are 1.
    fn temperatures(&mut self) -> Result<Option<ValueId>, GraphError> {
        let Some(QueryTemperature { beta, n_original_context }) = self.config.query_temperature else {
            return Ok(None);
        };
        if self.n_context <= n_original_context {
            return Ok(None);
        }
        let b = &mut self.builder;
        // Number of whole multiples of the original context. Half a position prevents multiples from being
        // rounded down.
        let share = 1.0 / n_original_context as f32;
        let positions = b.cast(self.positions, DType::F32)?;
        let turns = b.unary(Unary::Affine { mul: share, add: 0.5 * share }, positions)?;
        let turns = b.cast(turns, DType::I32)?;
        let turns = b.cast(turns, DType::F32)?;
        let turns = b.unary(Unary::Affine { mul: 1.0, add: 1.0 }, turns)?;
        let log = b.unary(Unary::Log, turns)?;
        let mut factors = b.unary(Unary::Affine { mul: beta, add: 1.0 }, log)?;
        if self.act != DType::F32 {
            factors = b.cast(factors, self.act)?;
        }
        b.reshape(factors, &[self.n_tokens, 1, 1]).map(Some)
    }

    /// Multiplies queries `[n_tokens, n_heads, head_dim]` by the factor of their position, if the model has
    /// one.
    pub(crate) fn tempered(&mut self, q: ValueId) -> Result<ValueId, GraphError> {
        match self.temperatures {
            Some(factors) => self.builder.binary(ir::Binary::Mul, q, factors),
            None => Ok(q),
        }
    }

    /// A layer's slice of the per-layer inputs: `[n_tokens, d]`.
    pub(crate) fn own_input(&mut self, layer: usize) -> Result<ValueId, GraphError> {
        let Some(inputs) = self.layer_inputs else { panic!("layer {layer} has no per-layer input") };
        let width = self.builder.ty(inputs).shape.dim_back(0);
        let slice = self.builder.slice(inputs, 0, layer, 1)?;
        self.builder.reshape(slice, &[self.n_tokens, width])
    }

    /// The tokens' rows of a table that may stay on the host: `[n_tokens, width]`.
    pub(crate) fn token_rows(&mut self, table: WeightId) -> Result<ValueId, GraphError> {
        let table = self.weight(table);
        if !self.tables_on_host {
            return self.builder.gather_rows(table, self.tokens, self.act);
        }
        let rows = self.builder.host_call(host_rows(), &[table, self.tokens])?[0];
        if self.builder.ty(rows).dtype == self.act { Ok(rows) } else { self.builder.cast(rows, self.act) }
    }

    /// The rows' positions in a table of learned positions: `[n_tokens, width]`.
    pub(crate) fn position_rows(&mut self, table: WeightId) -> Result<ValueId, GraphError> {
        let table = self.weight(table);
        self.builder.gather_rows(table, self.positions, self.act)
    }

    /// Reshapes rows `[n_tokens, n * d]` to `[n_tokens, n, d]`.
    pub(crate) fn apart(&mut self, x: ValueId, n: usize, d: usize) -> Result<ValueId, GraphError> {
        self.builder.reshape(x, &[self.n_tokens, n, d])
    }

    /// Columns of the rows as heads: `[n_tokens, n, d]`, starting at column `start`.
    pub(crate) fn columns(
        &mut self,
        x: ValueId,
        start: usize,
        [n, d]: [usize; 2],
    ) -> Result<ValueId, GraphError> {
        let part = self.builder.slice(x, 1, start, n * d)?;
        self.apart(part, n, d)
    }

    /// Reshapes heads to rows: `[n_tokens, n * d]`.
    pub(crate) fn flat(&mut self, x: ValueId) -> Result<ValueId, GraphError> {
        let width = self.builder.ty(x).shape.n_elements() / self.n_tokens.max(1);
        self.builder.reshape(x, &[self.n_tokens, width])
    }

    /// `x * sigmoid(gate)`
    pub(crate) fn times_sigmoid(&mut self, x: ValueId, gate: ValueId) -> Result<ValueId, GraphError> {
        let gate = self.builder.unary(Unary::Sigmoid, gate)?;
        self.builder.binary(ir::Binary::Mul, gate, x)
    }

    pub(crate) fn scaled(&mut self, x: ValueId, mul: f32) -> Result<ValueId, GraphError> {
        match mul {
            1.0 => Ok(x),
            mul => self.builder.unary(Unary::Affine { mul, add: 0.0 }, x),
        }
    }

    /// Embeds the tokens: `[n_tokens, hidden]`.
    fn embed(&mut self) -> Result<ValueId, GraphError> {
        let table = self.weight(self.shared.embedding);
        // Rows of a quantised table are always decoded to F32.
        let is_quantized = self.builder.ty(table).dtype.is_quantized();
        let dtype = if is_quantized { DType::F32 } else { self.act };
        let mut x = self.builder.gather_rows(table, self.tokens, dtype)?;
        if dtype != self.act {
            x = self.builder.cast(x, self.act)?;
        }
        self.scaled(x, self.config.embedding_scale / self.config.residual_scale)
    }

    pub(crate) fn norm(&mut self, x: ValueId, w: WeightId, label: &str) -> Result<ValueId, GraphError> {
        self.norm_with(x, w, self.config.norm_eps, label)
    }

    /// Norm with a given epsilon.
    pub(crate) fn norm_with(
        &mut self,
        x: ValueId,
        w: WeightId,
        eps: f32,
        label: &str,
    ) -> Result<ValueId, GraphError> {
        let w = self.weight(w);
        let x = match self.config.norm {
            NormKind::Rms => x,
            NormKind::Layer => {
                let axis = self.builder.ty(x).shape.rank() - 1;
                let op = Op::Reduce { kind: ir::Reduce::Mean, axis };
                let mean = self.builder.node(op, &[x], &format!("{label}.mean"))?[0];
                self.builder.binary(ir::Binary::Sub, x, mean)?
            }
        };
        self.builder.rms_norm(x, w, eps, label)
    }

    /// Norm of a branch's output, in layers that have one.
    pub(crate) fn branch_norm(
        &mut self,
        x: ValueId,
        w: Option<WeightId>,
        label: &str,
    ) -> Result<ValueId, GraphError> {
        match w {
            Some(w) => self.norm(x, w, label),
            None => Ok(x),
        }
    }

    /// Norm of the residual, in layers that have one. The residual is kept divided by the factor on branches,
    /// so that branches are added unscaled; dividing epsilon by the square of the factor gives the same norm.
    pub(crate) fn residual_norm(
        &mut self,
        x: ValueId,
        w: Option<WeightId>,
        label: &str,
    ) -> Result<ValueId, GraphError> {
        let Some(w) = w else { return Ok(x) };
        let scale = self.config.residual_scale;
        self.norm_with(x, w, self.config.norm_eps / (scale * scale), label)
    }

    /// Layer norm with a bias.
    pub(crate) fn biased_norm(
        &mut self,
        x: ValueId,
        norm: BiasedNorm,
        label: &str,
    ) -> Result<ValueId, GraphError> {
        let y = self.norm(x, norm.weight, label)?;
        let bias = self.weight(norm.bias);
        self.builder.add(y, bias)
    }

    /// Norm of the residual after a branch has joined it, in layers that have one.
    pub(crate) fn sum_norm(
        &mut self,
        x: ValueId,
        norm: Option<BiasedNorm>,
        label: &str,
    ) -> Result<ValueId, GraphError> {
        match norm {
            Some(norm) => self.biased_norm(x, norm, label),
            None => Ok(x),
        }
    }

    /// Final norm of the rows, in models that have one.
    pub(crate) fn final_norm(&mut self, x: ValueId) -> Result<ValueId, GraphError> {
        self.residual_norm(x, self.shared.head.map(|head| head.norm), "output_norm")
    }

    pub(crate) fn add(&mut self, a: ValueId, b: ValueId) -> Result<ValueId, GraphError> {
        self.builder.add(a, b)
    }

    pub(crate) fn linear(&mut self, x: ValueId, l: Linear, label: &str) -> Result<ValueId, GraphError> {
        let weight = self.factor(l.weight, label)?;
        let bias = l.bias.map(|bias| self.factor(bias, label)).transpose()?;
        let y = self.builder.linear(x, weight, bias, label)?;
        self.maps.push((x, l.weight));
        let y = self.with_adapters(x, y, l.weight, label)?;
        let Some(&pair) = self.attached.and_then(|attached| attached.pair(l.weight)) else { return Ok(y) };
        let (a, b) = (self.weight(pair.a), self.weight(pair.b));
        let x = self.adapter_input(x)?;
        let mut h = self.builder.linear(x, a, None, &format!("{label}.lora_a"))?;
        if pair.scale != 1.0 {
            h = self.builder.unary(Unary::Affine { mul: pair.scale, add: 0.0 }, h)?;
        }
        let more = self.builder.linear(h, b, None, &format!("{label}.lora_b"))?;
        self.builder.add(y, more)
    }

    /// The bank of adapters, and the sequences of rows with the adapters of sequences; `None` without a bank.
    pub(crate) fn adapters(&self) -> Option<(&'m Bank, [ValueId; 2])> {
        match &self.rows {
            RowContext::Paged(paged) => {
                paged.adapters.map(|(bank, adapters)| (bank, [paged.paging[1], adapters]))
            }
            RowContext::Documents { .. } => None,
        }
    }

    /// A weight in the type that the step multiplies with. A training step multiplies in the type of its
    /// activations: a frozen weight of another type is decoded where it is used, again in the backward pass,
    /// and never kept.
    fn factor(&mut self, id: WeightId, label: &str) -> Result<ValueId, GraphError> {
        let weight = self.weight(id);
        let learns = matches!(self.rows, RowContext::Documents { .. });
        match learns && self.builder.ty(weight).dtype != self.act {
            true => Ok(self.builder.node(Op::Cast(self.act), &[weight], &format!("{label}.decode"))?[0]),
            false => Ok(weight),
        }
    }

    /// Input of an adapter, with dropout in training steps if the adapter has any.
    fn adapter_input(&mut self, x: ValueId) -> Result<ValueId, GraphError> {
        let p = self.attached.map_or(0.0, Attached::dropout);
        self.dropped(x, p)
    }

    /// Reshapes rows `[n_tokens, n_heads * head_dim]` to `[n_tokens, n_heads, head_dim]`.
    pub(crate) fn as_heads(&mut self, x: ValueId, head_dim: usize) -> Result<ValueId, GraphError> {
        let n_heads = self.builder.ty(x).shape.dim_back(0) / head_dim;
        self.apart(x, n_heads, head_dim)
    }

    /// Applies the rotary embedding to heads.
    pub(crate) fn rope(&mut self, x: ValueId, layer: usize) -> Result<ValueId, GraphError> {
        let style = match self.config.rope.style {
            RopePairing::Neox => ir::RopeStyle::Neox,
            RopePairing::Norm => ir::RopeStyle::Interleaved,
        };
        let Some(&Frequencies { inv_freq, long, magnitude }) = self.shared.rotations.get(layer) else {
            return Ok(x);
        };
        let rope = ir::Rope { style, n_dims: self.config.rope_dims(layer), magnitude };
        // Chosen by the maximum context, as in llama.cpp: cached keys cannot be rotated again when a sequence
        // outgrows the original context.
        let inv_freq = match long {
            Some((n_original_context, long)) if self.n_context > n_original_context => long,
            _ => inv_freq,
        };
        let inv_freq = self.weight(inv_freq);
        self.builder.rope(rope, x, self.positions, inv_freq)
    }

    /// Attends to the rows visible to each row: `[n_tokens, n_heads * head_dim]`. If the layer has keys and
    /// values, they are first appended to its cache. A layer without them attends to those of
    /// [`ModelConfig::kv_layer`].
    pub(crate) fn attend(
        &mut self,
        layer: usize,
        q: ValueId,
        own: Option<[ValueId; 2]>,
        sinks: Option<WeightId>,
    ) -> Result<ValueId, GraphError> {
        let c = self.config;
        let (scale, window, softcap) = (c.attn_scale, c.window(layer), c.attn_softcap);
        let attended = match (&self.rows, own) {
            (RowContext::Paged(paged), Some([k, v])) => {
                let PagedRows { states, paging, .. } = &**paged;
                let Some(kv) = states.kv(layer).filter(|kv| kv.is_own) else {
                    panic!("layer {layer} has keys but no cache of its own")
                };
                let caches = [self.builder.state(kv.k), self.builder.state(kv.v)];
                match kv.scales {
                    None => {
                        let k_cache = self.builder.kv_append(caches[0], k, *paging)?;
                        PagedCaches {
                            rows: [k_cache, self.builder.kv_append(caches[1], v, *paging)?],
                            scales: None,
                        }
                    }
                    Some(scales) => {
                        let scales = [self.builder.state(scales.k), self.builder.state(scales.v)];
                        let k = self.builder.kv_append_bytes([caches[0], scales[0]], k, *paging)?;
                        let v = self.builder.kv_append_bytes([caches[1], scales[1]], v, *paging)?;
                        PagedCaches { rows: [k[0], v[0]], scales: Some([k[1], v[1]]) }
                    }
                }
            }
            (RowContext::Documents { .. }, Some(own)) => PagedCaches { rows: own, scales: None },
            (_, None) => self.attended[c.kv_layer(layer)],
        };
        self.attended.push(attended);
        let y = match &self.rows {
            RowContext::Paged(paged) => {
                let attention = ir::Attention { scale, window, softcap };
                let sinks = sinks.map(|sinks| self.weight(sinks));
                self.builder.attention_over(attention, q, attended, paged.paging, sinks)?
            }
            RowContext::Documents { spans, .. } => {
                let causal = !c.arch.is_encoder();
                let attention = ir::SpanAttention { scale, causal, window, softcap };
                let [k, v] = attended.rows;
                self.builder.node(Op::SpanAttention(attention), &[q, k, v, *spans], "attention")?[0]
            }
        };
        self.builder.reshape(y, &[self.n_tokens, c.n_heads * c.layer_sizes(layer).head_dim])
    }

    /// Adds a layer's branch to the residual, with dropout in training steps if there is any.
    pub(crate) fn join(&mut self, residual: ValueId, branch: ValueId) -> Result<ValueId, GraphError> {
        let p = match &self.rows {
            RowContext::Documents { dropout: Some(dropping), .. } => dropping.p,
            RowContext::Documents { .. } | RowContext::Paged(_) => 0.0,
        };
        let branch = self.dropped(branch, p)?;
        self.add(residual, branch)
    }

    fn dropped(&mut self, x: ValueId, p: f32) -> Result<ValueId, GraphError> {
        let RowContext::Documents { dropout: Some(dropping), .. } = &mut self.rows else { return Ok(x) };
        if p == 0.0 {
            return Ok(x);
        }
        let dropout = ir::Dropout { p, site: dropping.n_sites };
        dropping.n_sites += 1;
        let rng = dropping.rng;
        Ok(self.builder.node(Op::Train(ir::TrainOp::Dropout(dropout)), &[x, rng], "dropout")?[0])
    }

    /// Builds the final norm, the logits of the requested rows, and the choice among them.
    pub(crate) fn head(&mut self, x: ValueId) -> Result<(), GraphError> {
        let StepSpec { shape, head, act } = self.paged().spec;
        if head == Head::None {
            return Ok(());
        }
        let n_rows = shape.n_choices;
        // If there are as many choices as tokens, every row is requested, in order.
        let x = match n_rows == shape.n_tokens {
            true => x,
            false => {
                let rows = self.builder.input("rows", TensorType::new(DType::I32, [n_rows]))?;
                self.paged().inputs.rows = Some(self.builder.input_id(rows));
                self.builder.gather_rows(x, rows, act)?
            }
        };
        let logits = self.logits(x)?;
        match head {
            Head::None => Ok(()),
            Head::Logits => {
                self.paged().inputs.logits = Some(self.output("logits", logits)?);
                Ok(())
            }
            Head::Sample(head) => self.sample(logits, head),
        }
    }

    /// The final norm and the logits of the rows: F32 for sampling, the type of activations in training
    /// steps.
    pub(crate) fn logits(&mut self, x: ValueId) -> Result<ValueId, GraphError> {
        let Some(head) = self.shared.head else { panic!("an encoder has no logits") };
        let x = self.final_norm(x)?;
        let output = Linear { weight: head.output, bias: None };
        let mut logits = self.linear(x, output, "output")?;
        if self.act != DType::F32 && matches!(self.rows, RowContext::Paged(_)) {
            logits = self.builder.cast(logits, DType::F32)?;
        }
        let logits = self.scaled(logits, self.config.logit_scale)?;
        match self.config.final_softcap {
            Some(cap) => self.builder.unary(Unary::SoftCap(cap), logits),
            None => Ok(logits),
        }
    }

    fn sample(&mut self, logits: ValueId, head: SampleHead) -> Result<(), GraphError> {
        let n = self.paged().spec.shape.n_choices;
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
        let inputs = SamplingInputs {
            params: id(params),
            rng: id(rng),
            history: id(history),
            bias_ids: id(bias_ids),
            bias: id(bias),
            mask: mask.map(id),
            token,
            logprob,
            top,
        };
        self.paged().inputs.sampling = Some(inputs);
        Ok(())
    }

    /// Declares an output and returns its index.
    fn output(&mut self, name: &str, value: ValueId) -> Result<usize, GraphError> {
        self.builder.output(name, value)?;
        Ok(self.builder.n_outputs() - 1)
    }
}
