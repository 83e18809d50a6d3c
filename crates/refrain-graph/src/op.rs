//! Every op there is, and for each whether it can be recorded.

use crate::moe::MoeOp;
use crate::recurrent::Recurrent;
use crate::train_op::TrainOp;
use refrain_tensor::{DType, Shape};
use std::fmt;
use std::sync::Arc;

/// The type of a value: what its elements are and how many lie in each dimension.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct TensorType {
    /// Element type.
    pub dtype: DType,
    /// Logical shape.
    pub shape: Shape,
}

impl TensorType {
    /// A type written in code.
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

/// Whether an op may run inside a recording.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Capture {
    /// It only enqueues work on the device.
    Safe,
    /// It needs the host between its inputs and its outputs.
    Unsafe(&'static str),
}

/// What a node computes. Shapes in the comments are of the inputs in order, then `->` the outputs.
#[derive(Clone, Debug)]
pub enum Op {
    /// Another layout over the same bytes; costs nothing at run time on any backend, for any dtype.
    View(View),
    /// `x` -> a dense copy of `x`.
    Copy,
    /// `x` -> `x` in another dtype: floats are rounded to nearest even, floats to I32 towards zero, and saturate there. A
    /// quantised `x` is decoded.
    Cast(DType),
    /// `x` -> `f(x)`, element by element.
    Unary(Unary),
    /// `a`, `b` -> `f(a, b)`, element by element, with broadcasting.
    Binary(Binary),
    /// `x` -> `x` with one dimension reduced to size 1.
    Reduce {
        /// How.
        kind: Reduce,
        /// Which dimension.
        axis: usize,
    },
    /// `a`, `b` of one dtype, floats or I32 -> I32: 1 where the comparison holds, else 0, with broadcasting.
    Compare(Compare),
    /// `mask` I32, `a`, `b` -> `a` where the mask is not 0, else `b`; all three broadcast.
    Select,
    /// `x[n, m]`, `ids[n]` I32 -> `[n, 1]`: one element of each row. A negative id gives 0.
    Pick,
    /// `ids[n]` I32, `x[n, 1]` -> `[n, width]`: each element in its column, zeros around it. The reverse of `Pick`.
    PlaceColumns {
        /// Columns of the result.
        width: usize,
    },
    /// `x` -> `x` with zeros before and after it along one dimension. The reverse of a slice.
    Pad {
        /// Which dimension.
        axis: usize,
        /// Zeros before.
        before: usize,
        /// Zeros after.
        after: usize,
    },
    /// `x[.., n]` -> `[.., n]`: softmax over the last dimension.
    Softmax,
    /// `a[.., m, k]`, `b[.., k, n]` -> `[.., m, n]` in F32 or the dtype of `a`. A weight `[n, k]` enters as its
    /// transposed view.
    MatMul,
    /// `table[v, d]`, `ids[n]` I32 -> `[n, d]` in the given dtype. A negative id gives a row of zeros.
    GatherRows(DType),
    /// `ids[n]` I32, `x[n, d]` -> `[n_rows, d]`: rows of `x` that share an id are summed in their order, in F32, and
    /// rounded once. Rows without an id are zero; a negative id counts for none.
    ScatterAddRows {
        /// Rows of the result.
        n_rows: usize,
    },
    /// `x[.., d]`, `w[d]` -> `x * rsqrt(mean(x^2) + eps) * w`.
    RmsNorm {
        /// Added to the mean square.
        eps: f32,
    },
    /// `a[.., d]`, `b[.., d]`, `w[d]` -> `a + b`, and its RMS norm.
    AddRmsNorm {
        /// Added to the mean square.
        eps: f32,
    },
    /// `gate`, `up` -> `f(gate) * up`.
    Gate(Gate),
    /// `x[n, n_heads, head_dim]`, `positions[n]` I32, `inv_freq[n_dims / 2]` F32 -> `x` rotated. Rows with a negative
    /// position are padding and come out as they went in.
    Rope(Rope),
    /// `cache[n_blocks, n_kv_heads, kv_block, head_dim]` (state), `x[n, n_kv_heads, head_dim]`, `positions[n]`,
    /// `seqs[n]`, `tables[n_seqs, max_blocks]` (all I32) -> `cache`. Rows with a negative position write nothing.
    KvAppend,
    /// `q[n, n_heads, head_dim]`, `k_cache`, `v_cache` (states), `positions[n]`, `seqs[n]`, `tables[n_seqs, max_blocks]`
    /// -> `[n, n_heads, head_dim]`. Row `i` sees positions `0..=positions[i]` of its sequence (fewer with a window);
    /// rows with a negative position give zeros.
    Attention(Attention),
    /// `q[n, n_heads, head_dim]`, `k[n, n_kv_heads, head_dim]`, `v` like `k`, `spans[n, 2]` I32 -> `y` like `q`, and the
    /// log-sum-exp of the scores `[n, n_heads]` F32. Attention among the rows of a step: row `i` belongs to the document
    /// of rows `spans[i][0]..spans[i][1]` and sees nothing outside it. All rows of a document have the same span; an
    /// empty one marks padding, which gives zeros and a log-sum-exp of minus infinity.
    SpanAttention(SpanAttention),
    /// `logits[n, vocab]` F32, `params[n, SAMPLE_PARAMS]` F32, `rng[n, 4]` U32 (seed low, seed high, position, unused),
    /// `history[n, w]` I32, `bias_ids[n, b]` I32, `bias[n, b]` F32 -> `token[n]` I32, `logprob[n]` F32. Negative ids in
    /// `history` and `bias_ids` are empty places. [`SampleParam`] says what lies where in a row of `params`. [`Sample`] adds
    /// an input and outputs. A row with a NaN or +inf among its logits has no probabilities: its `logprob` is NaN.
    Sample(Sample),
    /// `state[..]` F32 (state), `x[..]`, floats of the same shape -> `state + x`.
    Accumulate,
    /// A router, and products with the experts that it chose.
    Moe(MoeOp),
    /// What a recurrent layer computes; its state is in slots.
    Recurrent(Recurrent),
    /// What only a training step computes.
    Train(TrainOp),
    /// A function on the host: a table too large for the device, or a caller's own code.
    HostCall(HostCall),
}

impl Op {
    /// Whether this op may run inside a recording, and if not, why.
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
            | Op::Attention(_)
            | Op::SpanAttention(_)
            | Op::Sample(_)
            | Op::Accumulate
            | Op::Moe(_)
            | Op::Recurrent(_)
            | Op::Train(_) => Capture::Safe,
            Op::HostCall(call) => Capture::Unsafe(call.because),
        }
    }

    /// The op's name, for messages and tables.
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
            Op::Attention(_) => "attention",
            Op::SpanAttention(_) => "span_attention",
            Op::Sample(_) => "sample",
            Op::Accumulate => "accumulate",
            Op::Moe(op) => op.name(),
            Op::Recurrent(op) => op.name(),
            Op::Train(op) => op.name(),
            Op::HostCall(call) => call.name,
        }
    }

    /// Pairs (output, input) where the output continues the state of the input: same bytes, new version.
    pub fn state_updates(&self) -> Vec<(usize, usize)> {
        match self {
            Op::KvAppend | Op::Accumulate => vec![(0, 0)],
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

    /// Inputs whose numbers a kernel follows to memory, and what they may point at.
    pub fn indexing(&self) -> Vec<Indexing> {
        match self {
            Op::GatherRows(_) => vec![Indexing::Rows { ids: 1, table: 0, axis: 0, strict: true }],
            Op::KvAppend => vec![Indexing::Paged { cache: 0, positions: 2, reach: 1 }],
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

    /// Pairs (output, input) where the output may take the input's bytes when nobody else needs them. Kernels of these
    /// ops read a row of that input to its end before they write the row; for `AddRmsNorm` the sum is written first.
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
            | Op::SpanAttention(_)
            | Op::View(_)
            | Op::Copy
            | Op::Cast(_)
            | Op::Reduce { .. }
            | Op::MatMul
            | Op::GatherRows(_)
            | Op::KvAppend
            | Op::Attention(_)
            | Op::Sample(_)
            | Op::Accumulate
            | Op::Recurrent(_)
            | Op::HostCall(_) => &[],
        }
    }
}

/// Numbers in an op's inputs that point into another of its inputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Indexing {
    /// Ids of entries of one dimension; negative ones are empty.
    Rows {
        /// Which input holds the ids.
        ids: usize,
        /// Which input they point into.
        table: usize,
        /// Along which of its dimensions.
        axis: usize,
        /// Whether an id outside is an error; otherwise the op ignores it.
        strict: bool,
    },
    /// Rows of a paged cache, found by three inputs: positions, sequences and block tables.
    Paged {
        /// Which input is the cache.
        cache: usize,
        /// Which holds the positions; sequences and tables follow it.
        positions: usize,
        /// How many positions back from its own a row looks; its own counts.
        reach: usize,
    },
    /// Slots of a recurrent state, found by three inputs: positions, sequences and the two slots of each sequence.
    Slots {
        /// Which input is the state.
        state: usize,
        /// Which holds the positions; sequences and slots follow it.
        positions: usize,
    },
    /// Ids below a fixed number; negative ones are empty.
    Below {
        /// Which input holds the ids.
        ids: usize,
        /// What every id is below.
        limit: usize,
    },
    /// The documents that rows belong to: pairs of first row and end.
    Spans {
        /// Which input holds them.
        spans: usize,
    },
}

/// What a choice takes and tells besides the usual.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sample {
    /// Takes `mask[n, vocab.div_ceil(32)]` U32 as its last input: tokens whose bit is 0 are never chosen.
    pub masked: bool,
    /// Tells the most probable tokens as well: `ids[n, n_top]` I32 and `logprobs[n, n_top]` F32, best first.
    pub n_top: usize,
}

/// A change of layout.
#[derive(Clone, Debug, PartialEq)]
pub enum View {
    /// The same elements under another shape.
    Reshape(Shape),
    /// The dimensions in another order.
    Permute(Vec<usize>),
    /// Some entries of one dimension.
    Slice {
        /// Dimension sliced.
        axis: usize,
        /// First entry.
        start: usize,
        /// Entries.
        len: usize,
    },
    /// Dimensions of size 1 repeated.
    Broadcast(Shape),
}

/// Functions of one element.
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
    /// The function's name.
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
            Unary::Affine { .. } => "affine",
            Unary::SoftCap(_) => "softcap",
        }
    }
}

/// Functions of two elements.
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
    /// The function's name.
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

/// Comparisons of two elements.
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

/// The activation of a gated feed-forward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gate {
    /// SwiGLU.
    Silu,
    /// GeGLU, with the tanh approximation.
    GeluTanh,
}

/// Which pairs of elements a rotary embedding turns.
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
    /// Which pairs turn.
    pub style: RopeStyle,
    /// How many elements of a head turn.
    pub n_dims: usize,
    /// Factor on sine and cosine (1 except under YaRN).
    pub magnitude: f32,
}

/// Causal attention over a paged KV cache, with grouped query heads.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Attention {
    /// Factor on the scores.
    pub scale: f32,
    /// How many positions a row sees, itself included; all of them when `None`.
    pub window: Option<usize>,
    /// `cap * tanh(score / cap)` before the softmax.
    pub softcap: Option<f32>,
}

/// Attention among the rows of a step, each inside its document.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SpanAttention {
    /// Factor on the scores.
    pub scale: f32,
    /// Whether a row sees only itself and rows before it.
    pub causal: bool,
    /// How many rows a causal row sees, itself included; all of them when `None`.
    pub window: Option<usize>,
    /// `cap * tanh(score / cap)` before the softmax.
    pub softcap: Option<f32>,
}

impl SpanAttention {
    /// The rows that row `i` of a document sees.
    pub fn seen(&self, i: usize, [first, end]: [usize; 2]) -> std::ops::Range<usize> {
        match (self.causal, self.window) {
            (false, _) => first..end,
            (true, None) => first..i + 1,
            (true, Some(window)) => first.max((i + 1).saturating_sub(window))..i + 1,
        }
    }
}

/// How many numbers a row of sampling parameters has.
pub const SAMPLE_PARAMS: usize = 8;

/// What lies where in a row of sampling parameters. Each has a value that switches it off.
///
/// The order of application is: bias, penalties over `history`, then top-k, top-p and min-p on the probabilities at
/// temperature 1, then the temperature.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum SampleParam {
    /// 0: greedy.
    Temperature = 0,
    /// 0: off. A whole number held as a float.
    TopK = 1,
    /// 1: off.
    TopP = 2,
    /// 0: off.
    MinP = 3,
    /// 1: off. Divides positive and multiplies negative logits of tokens in `history`.
    RepeatPenalty = 4,
    /// 0: off. Subtracted once for each time a token stands in `history`.
    FrequencyPenalty = 5,
    /// 0: off. Subtracted once if a token stands in `history`.
    PresencePenalty = 6,
}

/// A function that runs on the host in the middle of a plan.
pub trait HostFn: Send + Sync {
    /// The types that come out for those that go in.
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, HostCallError>;
    /// Fills `outputs` from `inputs`; all are dense.
    fn call(&self, inputs: &[HostBuf<'_>], outputs: &mut [&mut [u8]]) -> Result<(), HostCallError>;
}

/// One dense input of a host function.
#[derive(Clone, Copy, Debug)]
pub struct HostBuf<'a> {
    /// Type of the value.
    pub ty: TensorType,
    /// Its bytes.
    pub bytes: &'a [u8],
}

/// Why a host function failed, in its author's words.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct HostCallError(pub String);

/// A named host function, with the reason why it cannot be recorded.
#[derive(Clone)]
pub struct HostCall {
    /// Shown in plans, timings and errors.
    pub name: &'static str,
    /// Why the host is needed.
    pub because: &'static str,
    /// What runs.
    pub function: Arc<dyn HostFn>,
}

impl fmt::Debug for HostCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostCall({})", self.name)
    }
}
