//! The graph of an embedding step: several texts in, one vector per text out.
//!
//! The layers are those that generate text; attention runs among the rows of a step, within each text. Pooling
//! and normalisation are part of the graph, so only vectors leave the device.

use crate::model::Model;
use crate::step::{RowContext, StepBuilder};
use refrain_formats::params::Pooling;
use refrain_graph::{
    Binary, Graph, GraphBuilder, GraphError, InputId, Op, Reduce, TensorType, Unary, ValueId, WeightId,
};
use refrain_tensor::DType;

/// Vectors that are shorter than this are not scaled to length 1 but by its reciprocal, as in PyTorch's
/// `normalize`; so a zero vector stays zero.
const MIN_LENGTH: f32 = 1e-12;

/// Size of an embedding step, and what it computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct EmbedSpec {
    /// Rows: tokens of all texts, including padding.
    pub n_tokens: usize,
    /// Maximum number of texts.
    pub n_texts: usize,
    /// Tokens of the longest text: some models use other rotary frequencies for long texts.
    pub n_context: usize,
    /// How the vector of a text follows from those of its tokens.
    pub pooling: Pooling,
    /// Whether vectors are scaled to length 1.
    pub normalizes: bool,
}

/// Inputs and output of an embedding step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EmbedInputs {
    /// Token of each row; -1 for padding.
    pub tokens: InputId, // [n_tokens] I32
    /// Position of each row in its text; -1 for padding.
    pub positions: InputId, // [n_tokens] I32
    /// First row and end of each row's text; equal for padding.
    pub spans: InputId, // [n_tokens, 2] I32
    /// How rows become vectors.
    pub pool: PoolInputs,
    /// Index of the output with the vectors; those of missing texts are zero.
    pub vectors: usize, // [n_texts, hidden] F32
}

/// Inputs of pooling.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PoolInputs {
    /// Mean over the rows of each text.
    Mean {
        /// Text of each row; -1 for padding.
        texts: InputId, // [n_tokens] I32
        /// One over the number of rows of each text.
        shares: InputId, // [n_texts, 1] F32
    },
    /// One row per text.
    Row {
        /// The row of each text; -1 for none.
        rows: InputId, // [n_texts] I32
        /// Whether it is the first row of the text or the last.
        first: bool,
    },
}

/// An embedding step.
#[derive(Clone, Debug)]
pub struct EmbedGraph {
    /// Its graph.
    pub graph: Graph,
    /// Its inputs and output.
    pub inputs: EmbedInputs,
}

impl Model {
    /// Why texts cannot be embedded with this model, if so.
    pub fn cannot_embed(&self) -> Option<&'static str> {
        self.has_slots().then_some("its recurrent layers need a state per text")
    }

    /// Builds the graph of an embedding step.
    ///
    /// # Panics
    ///
    /// Panics if [`Model::cannot_embed`] gives a reason.
    pub fn embed_graph(&self, spec: &EmbedSpec) -> Result<EmbedGraph, GraphError> {
        let act = DType::F32;
        let mut builder = GraphBuilder::new(self.weights().to_vec(), Vec::new());
        let per_token = TensorType::new(DType::I32, [spec.n_tokens]);
        let tokens = builder.input("tokens", per_token)?;
        let positions = builder.input("positions", per_token)?;
        let spans = builder.input("spans", TensorType::new(DType::I32, [spec.n_tokens, 2]))?;
        let weights = (0..self.weights().len()).map(|i| builder.weight(WeightId::from_idx(i))).collect();
        let rows = RowContext::Documents { spans, dropout: None, n_context: spec.n_context };
        let context = [tokens, positions];
        let (config, shared) = (self.config(), self.shared());
        let mut step = StepBuilder::of_documents(config, shared, builder, weights, act, context, rows);
        step.attached = self.attached();
        let mut x = self.begin(&mut step)?;
        for layer in 0..config.n_layers {
            step.scope(format!("blk.{layer}"));
            x = self.layer(&mut step, layer, x)?;
        }
        step.scope("");
        let x = step.final_norm(x)?;
        let mut builder = step.builder;
        let (pooled, pool) = pooled(&mut builder, x, spec)?;
        let vectors = if spec.normalizes { normalized(&mut builder, pooled)? } else { pooled };
        builder.output("vectors", vectors)?;
        let id = |value: ValueId| builder.input_id(value);
        let inputs = EmbedInputs {
            tokens: id(tokens),
            positions: id(positions),
            spans: id(spans),
            pool,
            vectors: builder.n_outputs() - 1,
        };
        Ok(EmbedGraph { graph: builder.finish(), inputs })
    }
}

fn pooled(
    b: &mut GraphBuilder,
    x: ValueId, // [n_tokens, hidden]
    spec: &EmbedSpec,
) -> Result<(ValueId, PoolInputs), GraphError> {
    let n_rows = spec.n_texts;
    match spec.pooling {
        Pooling::Mean => {
            let texts = b.input("texts", TensorType::new(DType::I32, [spec.n_tokens]))?;
            let shares = b.input("shares", TensorType::new(DType::F32, [n_rows, 1]))?;
            let sums = b.node(Op::ScatterAddRows { n_rows }, &[texts, x], "pool")?[0];
            let mean = b.binary(Binary::Mul, sums, shares)?;
            Ok((mean, PoolInputs::Mean { texts: b.input_id(texts), shares: b.input_id(shares) }))
        }
        Pooling::Cls | Pooling::Last => {
            let rows = b.input("rows", TensorType::new(DType::I32, [n_rows]))?;
            let vectors = b.gather_rows(x, rows, DType::F32)?;
            let first = spec.pooling == Pooling::Cls;
            Ok((vectors, PoolInputs::Row { rows: b.input_id(rows), first }))
        }
    }
}

/// `x / max(|x|, MIN_LENGTH)` for each row.
fn normalized(b: &mut GraphBuilder, x: ValueId) -> Result<ValueId, GraphError> {
    let squares = b.binary(Binary::Mul, x, x)?;
    let sums = b.node(Op::Reduce { kind: Reduce::Sum, axis: 1 }, &[squares], "squared_length")?[0];
    let sums = b.unary(Unary::Affine { mul: 1.0, add: MIN_LENGTH * MIN_LENGTH }, sums)?;
    let scales = b.unary(Unary::Rsqrt, sums)?;
    b.binary(Binary::Mul, x, scales)
}
