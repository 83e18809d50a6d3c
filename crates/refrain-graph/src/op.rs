//! All ops, and whether each can be recorded.

use crate::lora::LoraOp;
use crate::moe::MoeOp;
use crate::recurrent::Recurrent;
use crate::train_op::TrainOp;
use refrain_tensor::{DType, Shape};
use std::fmt;
use std::sync::Arc;

/// Type of a value: element type and shape.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct TensorType {
    /// Element type.
    pub dtype: DType,
    /// Logical shape.
    pub shape: Shape,
}

impl TensorType {
    /// Returns the type with this dtype and shape.
    pub fn new(dtype: DType, shape: impl Into<Shape>) -> TensorType {
        TensorType { dtype, shape: shape.into() }
    }
}

impl fmt::Debug for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.dtype, self.shape)
    }
}

impl fmt::Display for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// Whether a recording may contain an op.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Capture {
    /// Only enqueues work on the device.
    Safe,
    /// Needs the host between its inputs and its outputs, for this reason.
    Unsafe(&'static str),
}

/// Operation of a node. The comments give the shapes of the inputs in order, then `->` the outputs.
#[derive(Clone, Debug)]
pub enum Op {
    /// Another layout over the same bytes. Free at run time on every backend and for every dtype.
    View(View),
    /// `x` -> a dense copy of `x`.
    Copy,
    /// `x` -> `x` in another dtype. Floats round to nearest even; floats to I32 truncate and saturate. A
    /// quantised `x` is dequantised.
    Cast(DType),
    /// `x` -> `f(x)`, element by element.
    Unary(Unary),
    /// `a`, `b` -> `f(a, b)`, element by element, with broadcasting.
    Binary(Binary),
    /// `x` -> `x` with one dimension reduced to size 1.
    Reduce {
        /// Kind of reduction.
        kind: Reduce,
        /// Reduced dimension.
        axis: usize,
    },
    /// `a`, `b` of one dtype, floats or I32 -> I32: 1 where the comparison holds, else 0. Broadcasts.
    Compare(Compare),
    /// `mask` I32, `a`, `b` -> `a` where the mask is not 0, else `b`; all three broadcast.
    Select,
    /// `x[n, m]`, `ids[n]` I32 -> `[n, 1]`: the element of each row that `ids` selects. A negative id gives
    /// 0.
    Pick,
    /// `ids[n]` I32, `x[n, 1]` -> `[n, width]`: each element in the column that `ids` selects, zeros
    /// elsewhere. The gradient of `Pick`.
    PlaceColumns {
        /// Columns of the result.
        width: usize,
    },
    /// `x` -> `x` zero-padded along one dimension. The gradient of a slice.
    Pad {
        /// Padded dimension.
        axis: usize,
        /// Zeros in front.
        before: usize,
        /// Zeros at the end.
        after: usize,
    },
    /// `x[.., n]` -> `[.., n]`: softmax over the last dimension.
    Softmax,
    /// `a[.., m, k]`, `b[.., k, n]` -> `[.., m, n]` in F32 or the dtype of `a`. A weight `[n, k]` is passed
    /// as its transposed view.
    MatMul,
    /// `table[v, d]`, `ids[n]` I32 -> `[n, d]` in the given dtype. A negative id gives a row of zeros.
    GatherRows(DType),
    /// `ids[n]` I32, `x[n, d]` -> `[n_rows, d]`: sums the rows of `x` with the same id, in order, in F32,
    /// rounded once. Rows without an id are zero; rows with a negative id are ignored.
    ScatterAddRows {
        /// Rows of the result.
        n_rows: usize,
    },
    /// `x[.., d]`, `w[d]` -> `x * rsqrt(mean(x^2) + eps) * w`.
    RmsNorm {
        /// Added to the mean square.
        eps: f32,
    },
    /// `a[.., d]`, `b[.., d]`, `w[d]` -> `a + b`, and the RMS norm of that sum.
    AddRmsNorm {
        /// Added to the mean square.
        eps: f32,
    },
    /// `gate`, `up` -> `f(gate) * up`.
    Gate(Gate),
    /// `x[n, n_heads, head_dim]`, `positions[n]` I32, `inv_freq[n_dims / 2]` F32 -> `x` rotated. Rows with a
    /// negative position are padding and pass through unchanged.
    Rope(Rope),
    /// `cache[n_blocks, n_kv_heads, kv_block, head_dim]` (state), `x[n, n_kv_heads, head_dim]`, `positions[n]`,
    /// `seqs[n]`, `tables[n_seqs, max_blocks]` (all I32) -> `cache`. Rows with a negative position write nothing.
    KvAppend,
    /// Like `KvAppend` into an 8-bit cache: `cache[n_blocks, n_kv_heads, kv_block, head_dim]` U8 (state),
    /// `scales[n_blocks, n_kv_heads, kv_block]` F32 (state), `x`, `positions`, `seqs`, `tables` -> `cache`, `scales`.
    /// A row of one head is stored as signed bytes times its scale (`refrain_tensor::row_to_bytes`).
    KvAppendBytes,
    /// `q[n, n_heads, head_dim]`, `k_cache`, `v_cache` (states), `positions[n]`, `seqs[n]`,
    /// `tables[n_seqs, max_blocks]` -> `[n, n_heads, head_dim]`. Row `i` attends to positions
    /// `0..=positions[i]` of its sequence (fewer with a window). Rows with a negative position give zeros. If the
    /// caches are 8-bit, their scales follow as two more inputs.
    ///
    /// One more input `sinks[n_heads]` F32, the last one, is one more score of each head's softmax, after scale and soft
    /// cap, with a value of zero.
    Attention(Attention),
    /// `q[n, n_heads, head_dim]`, `k[n, n_kv_heads, head_dim]`, `v` like `k`, `spans[n, 2]` I32 -> `y` like
    /// `q`, and the log-sum-exp of the scores `[n, n_heads]` F32. Attention among the rows of a step: row `i`
    /// belongs to the document of rows `spans[i][0]..spans[i][1]` and attends to nothing outside it. All rows
    /// of a document have the same span. An empty span marks padding, which gives zeros and a log-sum-exp of
    /// minus infinity.
    SpanAttention(SpanAttention),
    /// `logits[n, vocab]` F32, `params[n, SAMPLE_PARAMS]` F32, `rng[n, 4]` U32 (seed low, seed high,
    /// position, unused), `history[n, w]` I32, `bias_ids[n, b]` I32, `bias[n, b]` F32 -> `token[n]` I32,
    /// `logprob[n]` F32. Negative ids in `history` and `bias_ids` are unused entries. [`SampleParam`] gives
    /// the layout of a row of `params`. [`Sample`] can add an input and outputs. A row with a NaN or +inf
    /// among its logits has no probabilities: its `logprob` is NaN.
    Sample(Sample),
    /// `state[..]` F32 (state), `x[..]` of the same shape, any float type -> `state + x`.
    Accumulate,
    /// Router of a mixture of experts, and the matrix products of the chosen experts.
    Moe(MoeOp),
    /// A product with the low-rank adapter of each row's sequence.
    Lora(LoraOp),
    /// An op of a recurrent layer; its state is in slots.
    Recurrent(Recurrent),
    /// An op that only training steps contain.
    Train(TrainOp),
    /// A host function: a lookup in a table too large for the device, or user code.
    HostCall(HostCall),
}

impl Op {
    /// Returns whether a recording may contain this op, and if not, why.
    pub fn capture(&self) -> Capture {
        match self {
            Op::View(_)
            | Op::Copy
            | Op::Cast(_)
            | Op::Unary(_)
            | Op::Binary(_)
            | Op::Reduce { .. }
            | Op::Compare(_)
            | Op::Select
            | Op::Pick
            | Op::PlaceColumns { .. }
            | Op::Pad { .. }
            | Op::Softmax
            | Op::MatMul
            | Op::GatherRows(_)
            | Op::ScatterAddRows { .. }
            | Op::RmsNorm { .. }
            | Op::AddRmsNorm { .. }
            | Op::Gate(_)
            | Op::Rope(_)
            | Op::KvAppend
            | Op::KvAppendBytes
            | Op::Attention(_)
            | Op::SpanAttention(_)
            | Op::Sample(_)
            | Op::Accumulate
            | Op::Moe(_)
            | Op::Lora(_)
            | Op::Recurrent(_)
            | Op::Train(_) => Capture::Safe,
            Op::HostCall(call) => Capture::Unsafe(call.because),
        }
    }

    /// Name of the op, for messages and tables.
    pub fn name(&self) -> &'static str {
        match self {
            Op::View(View::Reshape(_)) => "reshape",
            Op::View(View::Permute(_)) => "permute",
            Op::View(View::Slice { .. }) => "slice",
            Op::View(View::Broadcast(_)) => "broadcast",
            Op::Copy => "copy",
            Op::Cast(_) => "cast",
            Op::Unary(u) => u.name(),
            Op::Binary(b) => b.name(),
            Op::Reduce { kind: Reduce::Sum, .. } => "sum",
            Op::Reduce { kind: Reduce::Mean, .. } => "mean",
            Op::Reduce { kind: Reduce::Max, .. } => "max",
            Op::Compare(Compare::Equal) => "equal",
            Op::Compare(Compare::Less) => "less",
            Op::Select => "select",
            Op::Pick => "pick",
            Op::PlaceColumns { .. } => "place_columns",
            Op::Pad { .. } => "pad",
            Op::Softmax => "softmax",
            Op::MatMul => "matmul",
            Op::GatherRows(_) => "gather_rows",
            Op::ScatterAddRows { .. } => "scatter_add_rows",
            Op::RmsNorm { .. } => "rms_norm",
            Op::AddRmsNorm { .. } => "add_rms_norm",
            Op::Gate(Gate::Silu) => "silu_gate",
            Op::Gate(Gate::GeluTanh) => "gelu_gate",
            Op::Rope(_) => "rope",
            Op::KvAppend => "kv_append",
            Op::KvAppendBytes => "kv_append_bytes",
            Op::Attention(_) => "attention",
            Op::SpanAttention(_) => "span_attention",
            Op::Sample(_) => "sample",
            Op::Accumulate => "accumulate",
            Op::Moe(op) => op.name(),
            Op::Lora(op) => op.name(),
            Op::Recurrent(op) => op.name(),
            Op::Train(op) => op.name(),
            Op::HostCall(call) => call.name,
        }
    }

    /// Pairs (output, input) where the output is a new version of the input's state, in the same bytes.
    pub fn state_updates(&self) -> Vec<(usize, usize)> {
        match self {
            Op::KvAppend | Op::Accumulate => vec![(0, 0)],
            Op::KvAppendBytes => vec![(0, 0), (1, 1)],
            Op::Recurrent(_) => vec![(1, 0)],
            Op::Train(TrainOp::AdamW(adam)) => adam.state_updates(),
            Op::Train(_)
            | Op::Compare(_)
            | Op::Select
            | Op::Pick
            | Op::PlaceColumns { .. }
            | Op::Pad { .. }
            | Op::ScatterAddRows { .. }
            | Op::Moe(_)
            | Op::Lora(_)
            | Op::SpanAttention(_) => Vec::new(),
            Op::View(_)
            | Op::Copy
            | Op::Cast(_)
            | Op::Unary(_)
            | Op::Binary(_)
            | Op::Reduce { .. }
            | Op::Softmax
            | Op::MatMul
            | Op::GatherRows(_)
            | Op::RmsNorm { .. }
            | Op::AddRmsNorm { .. }
            | Op::Gate(_)
            | Op::Rope(_)
            | Op::Attention(_)
            | Op::Sample(_)
            | Op::HostCall(_) => Vec::new(),
        }
    }

    /// An input that the host may still be computing while everything before this op runs. A plan is cut before an op
    /// that has one, so that the steps before it can be launched without it.
    pub fn late_input(&self) -> Option<usize> {
        match self {
            Op::Sample(sample) => sample.masked.then_some(Sample::MASK),
            Op::View(_)
            | Op::Copy
            | Op::Cast(_)
            | Op::Unary(_)
            | Op::Binary(_)
            | Op::Compare(_)
            | Op::Select
            | Op::Pick
            | Op::PlaceColumns { .. }
            | Op::Pad { .. }
            | Op::ScatterAddRows { .. }
            | Op::Reduce { .. }
            | Op::Softmax
            | Op::MatMul
            | Op::Moe(_)
            | Op::Lora(_)
            | Op::GatherRows(_)
            | Op::RmsNorm { .. }
            | Op::AddRmsNorm { .. }
            | Op::Gate(_)
            | Op::Rope(_)
            | Op::KvAppend
            | Op::KvAppendBytes
            | Op::Attention(_)
            | Op::SpanAttention(_)
            | Op::Accumulate
            | Op::Recurrent(_)
            | Op::Train(_)
            | Op::HostCall(_) => None,
        }
    }

    /// Inputs that kernels use as indices, and the range each must stay in.
    pub fn indexing(&self) -> Vec<Indexing> {
        match self {
            Op::GatherRows(_) => vec![Indexing::Rows { ids: 1, table: 0, axis: 0, strict: true }],
            Op::KvAppend => vec![Indexing::Paged { cache: 0, positions: 2, reach: 1 }],
            Op::KvAppendBytes => vec![Indexing::Paged { cache: 0, positions: 3, reach: 1 }],
            Op::Attention(attention) => {
                let reach = attention.window.unwrap_or(usize::MAX).max(1);
                vec![Indexing::Paged { cache: 1, positions: 3, reach }]
            }
            Op::Recurrent(op) => vec![Indexing::Slots { state: 0, positions: op.positions() }],
            Op::Sample(_) => {
                let tokens = |ids| Indexing::Rows { ids, table: 0, axis: 1, strict: false };
                vec![tokens(3), tokens(4)]
            }
            Op::Pick | Op::Train(TrainOp::CrossEntropy) => {
                vec![Indexing::Rows { ids: 1, table: 0, axis: 1, strict: true }]
            }
            Op::PlaceColumns { width } => vec![Indexing::Below { ids: 0, limit: *width }],
            Op::ScatterAddRows { n_rows } => vec![Indexing::Below { ids: 0, limit: *n_rows }],
            Op::Moe(op) => op.indexing(),
            Op::Lora(op) => op.indexing(),
            Op::SpanAttention(_) => vec![Indexing::Spans { spans: 3 }],
            Op::Train(TrainOp::SpanAttentionGrad(_)) => vec![Indexing::Spans { spans: 4 }],
            Op::Train(
                TrainOp::UnaryGrad(_)
                | TrainOp::GateGrad(_)
                | TrainOp::SoftmaxGrad
                | TrainOp::RmsNormGrad { .. }
                | TrainOp::AddProduct
                | TrainOp::RopeGrad(_)
                | TrainOp::Dropout(_)
                | TrainOp::SumSquares
                | TrainOp::AdamW(_),
            )
            | Op::Compare(_)
            | Op::Select
            | Op::Pad { .. }
            | Op::View(_)
            | Op::Copy
            | Op::Cast(_)
            | Op::Unary(_)
            | Op::Binary(_)
            | Op::Reduce { .. }
            | Op::Softmax
            | Op::MatMul
            | Op::RmsNorm { .. }
            | Op::AddRmsNorm { .. }
            | Op::Gate(_)
            | Op::Rope(_)
            | Op::Accumulate
            | Op::HostCall(_) => Vec::new(),
        }
    }

    /// Pairs (output, input) where the output may reuse the input's bytes if nothing else reads them. Kernels
    /// of these ops finish reading a row of that input before they write the row; `AddRmsNorm` writes the sum
    /// first.
    pub(crate) fn may_overwrite(&self) -> &'static [(usize, usize)] {
        match self {
            Op::Unary(_) | Op::Rope(_) | Op::RmsNorm { .. } | Op::Softmax => &[(0, 0)],
            Op::Binary(_) | Op::Gate(_) => &[(0, 0), (0, 1)],
            Op::AddRmsNorm { .. } => &[(0, 0), (1, 1)],
            Op::Train(TrainOp::UnaryGrad(_) | TrainOp::SoftmaxGrad) => &[(0, 0), (0, 1)],
            Op::Train(TrainOp::GateGrad(_)) => &[(0, 1), (1, 2)],
            Op::Train(TrainOp::CrossEntropy) => &[(1, 0)],
            Op::Train(TrainOp::AddProduct) => &[(0, 0)],
            Op::Train(TrainOp::RopeGrad(_) | TrainOp::Dropout(_)) => &[(0, 0)],
            Op::Lora(LoraOp::Up) => &[(0, 0)],
            Op::Train(
                TrainOp::SpanAttentionGrad(_)
                | TrainOp::RmsNormGrad { .. }
                | TrainOp::SumSquares
                | TrainOp::AdamW(_),
            )
            | Op::Compare(_)
            | Op::Select
            | Op::Pick
            | Op::PlaceColumns { .. }
            | Op::Pad { .. }
            | Op::ScatterAddRows { .. }
            | Op::Moe(_)
            | Op::Lora(LoraOp::Down)
            | Op::SpanAttention(_)
            | Op::View(_)
            | Op::Copy
            | Op::Cast(_)
            | Op::Reduce { .. }
            | Op::MatMul
            | Op::GatherRows(_)
            | Op::KvAppend
            | Op::KvAppendBytes
            | Op::Attention(_)
            | Op::Sample(_)
            | Op::Accumulate
            | Op::Recurrent(_)
            | Op::HostCall(_) => &[],
        }
    }
}

/// Index inputs of an op and the input they index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Indexing {
    /// Indices along one dimension; negative ones are unused.
    Rows {
        /// Input that holds the indices.
        ids: usize,
        /// Input they index.
        table: usize,
        /// Dimension they index.
        axis: usize,
        /// Whether an out-of-range id is an error. If not, the op ignores it.
        strict: bool,
    },
    /// Rows of a paged cache, addressed by three inputs: positions, sequences and block tables.
    Paged {
        /// Cache input.
        cache: usize,
        /// Positions input; sequences and tables follow it.
        positions: usize,
        /// How many positions a row attends to, counting back from and including its own.
        reach: usize,
    },
    /// Slots of a recurrent state, addressed by three inputs: positions, sequences and the two slots of each
    /// sequence.
    Slots {
        /// State input.
        state: usize,
        /// Positions input; sequences and slots follow it.
        positions: usize,
    },
    /// Indices below a fixed number; negative ones are unused.
    Below {
        /// Input that holds the indices.
        ids: usize,
        /// Exclusive upper bound of the indices.
        limit: usize,
    },
    /// Documents of rows: pairs of first row and end.
    Spans {
        /// Input that holds the spans.
        spans: usize,
    },
}

/// Optional inputs and outputs of [`Op::Sample`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sample {
    /// Whether the last input is `mask[n, vocab.div_ceil(32)]` U32: tokens whose bit is 0 are never chosen.
    pub masked: bool,
    /// Number of most probable tokens to return as well: `ids[n, n_top]` I32 and `logprobs[n, n_top]` F32,
    /// best first. 0 for none.
    pub n_top: usize,
}

impl Sample {
    /// Index of the mask among the inputs.
    pub const MASK: usize = 6;
}

/// Change of layout.
#[derive(Clone, Debug, PartialEq)]
pub enum View {
    /// Same elements, another shape.
    Reshape(Shape),
    /// Reordered dimensions.
    Permute(Vec<usize>),
    /// A range of one dimension.
    Slice {
        /// Sliced dimension.
        axis: usize,
        /// First entry.
        start: usize,
        /// Number of entries.
        len: usize,
    },
    /// Repeats dimensions of size 1.
    Broadcast(Shape),
}

/// Elementwise functions of one argument.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Unary {
    /// `-x`
    Neg,
    /// `e^x`
    Exp,
    /// `ln x`
    Log,
    /// `1 / sqrt(x)`
    Rsqrt,
    /// `tanh x`
    Tanh,
    /// `1 / (1 + e^-x)`
    Sigmoid,
    /// `x * sigmoid(x)`
    Silu,
    /// The tanh approximation of GELU.
    GeluTanh,
    /// GELU, `x / 2 * (1 + erf(x / sqrt(2)))`.
    GeluErf,
    /// `mul * x + add`
    Affine {
        /// Factor.
        mul: f32,
        /// Summand.
        add: f32,
    },
    /// `cap * tanh(x / cap)`
    SoftCap(f32),
}

impl Unary {
    /// Name of the function.
    pub fn name(self) -> &'static str {
        match self {
            Unary::Neg => "neg",
            Unary::Exp => "exp",
            Unary::Log => "log",
            Unary::Rsqrt => "rsqrt",
            Unary::Tanh => "tanh",
            Unary::Sigmoid => "sigmoid",
            Unary::Silu => "silu",
            Unary::GeluTanh => "gelu_tanh",
            Unary::GeluErf => "gelu_erf",
            Unary::Affine { .. } => "affine",
            Unary::SoftCap(_) => "softcap",
        }
    }
}

/// Elementwise functions of two arguments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // The names are the documentation.
pub enum Binary {
    Add,
    Sub,
    Mul,
    Div,
    Max,
}

impl Binary {
    /// Name of the function.
    pub fn name(self) -> &'static str {
        match self {
            Binary::Add => "add",
            Binary::Sub => "sub",
            Binary::Mul => "mul",
            Binary::Div => "div",
            Binary::Max => "maximum",
        }
    }
}

/// Elementwise comparisons.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // The names are the documentation.
pub enum Compare {
    Equal,
    Less,
}

/// Reductions of one dimension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // The names are the documentation.
pub enum Reduce {
    Sum,
    Mean,
    Max,
}

/// Activation of a gated feed-forward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gate {
    /// SwiGLU.
    Silu,
    /// GeGLU, with the tanh approximation.
    GeluTanh,
}

/// Pairing of elements in a rotary embedding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopeStyle {
    /// Element `i` with `i + n_dims / 2`.
    Neox,
    /// Element `2 i` with `2 i + 1`, as llama files in GGUF store them.
    Interleaved,
}

/// Rotary position embedding over the first `n_dims` elements of each head.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rope {
    /// Pairing of the rotated elements.
    pub style: RopeStyle,
    /// Number of rotated elements in a head.
    pub n_dims: usize,
    /// Factor on sine and cosine (1 except with YaRN).
    pub magnitude: f32,
}

/// Causal attention over a paged KV cache, with grouped-query heads.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Attention {
    /// Factor on the scores.
    pub scale: f32,
    /// Number of positions a row attends to, including its own; `None` for all.
    pub window: Option<usize>,
    /// `cap * tanh(score / cap)` before the softmax.
    pub softcap: Option<f32>,
}

/// Optional inputs of an attention over a paged cache, by their number in the list of inputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionInputs {
    /// Scales of 8-bit keys and values.
    pub scales: Option<[usize; 2]>,
    /// Sinks of the heads.
    pub sinks: Option<usize>,
}

impl AttentionInputs {
    /// The optional inputs of an attention with this many inputs.
    pub fn of(n_inputs: usize) -> AttentionInputs {
        AttentionInputs {
            scales: (n_inputs >= 8).then_some([6, 7]),
            sinks: (n_inputs % 2 == 1).then(|| n_inputs - 1),
        }
    }
}

/// Attention among the rows of a step, within each document.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SpanAttention {
    /// Factor on the scores.
    pub scale: f32,
    /// Whether a row attends only to itself and earlier rows.
    pub causal: bool,
    /// Number of rows a causal row attends to, including itself; `None` for all.
    pub window: Option<usize>,
    /// `cap * tanh(score / cap)` before the softmax.
    pub softcap: Option<f32>,
}

impl SpanAttention {
    /// Returns the rows of the document `first..end` that row `i` attends to.
    pub fn seen(&self, i: usize, [first, end]: [usize; 2]) -> std::ops::Range<usize> {
        match (self.causal, self.window) {
            (false, _) => first..end,
            (true, None) => first..i + 1,
            (true, Some(window)) => first.max((i + 1).saturating_sub(window))..i + 1,
        }
    }
}

/// Number of sampling parameters per row.
pub const SAMPLE_PARAMS: usize = 8;

/// Index of each parameter in a row of sampling parameters. Each has a value that turns it off.
///
/// Parameters apply in this order: bias, penalties over `history`, then top-k, top-p and min-p on the
/// probabilities at temperature 1, then the temperature.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum SampleParam {
    /// 0: greedy.
    Temperature = 0,
    /// 0: off. An integer stored as a float.
    TopK = 1,
    /// 1: off.
    TopP = 2,
    /// 0: off.
    MinP = 3,
    /// 1: off. Divides the positive and multiplies the negative logits of tokens in `history`.
    RepeatPenalty = 4,
    /// 0: off. Subtracted once per occurrence of the token in `history`.
    FrequencyPenalty = 5,
    /// 0: off. Subtracted once if the token occurs in `history`.
    PresencePenalty = 6,
}

/// A function that runs on the host in the middle of a plan.
pub trait HostFn: Send + Sync {
    /// Returns the output types for these input types.
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, HostCallError>;
    /// Computes `outputs` from `inputs`; all are contiguous.
    fn call(&self, inputs: &[HostBuf<'_>], outputs: &mut [&mut [u8]]) -> Result<(), HostCallError>;
}

/// One contiguous input of a host function.
#[derive(Clone, Copy, Debug)]
pub struct HostBuf<'a> {
    /// Type of the value.
    pub ty: TensorType,
    /// Its bytes.
    pub bytes: &'a [u8],
}

/// Error of a host function, in its author's words.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct HostCallError(pub String);

/// A named host function, and why it cannot be recorded.
#[derive(Clone)]
pub struct HostCall {
    /// Shown in plans, timings and errors.
    pub name: &'static str,
    /// Why the op needs the host.
    pub because: &'static str,
    /// The function.
    pub function: Arc<dyn HostFn>,
}

impl fmt::Debug for HostCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostCall({})", self.name)
    }
}
