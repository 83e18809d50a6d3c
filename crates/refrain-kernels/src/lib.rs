//! CUDA kernels, their compilation and their typed launchers.
//!
//! Invariant: nothing here allocates device memory, launches or waits; a launcher only describes a launch. The first time
//! it loads the kernel's code, unless something records.
//! Invariant: a launcher refuses, with op, dtype and shape, what its kernel's header does not allow. What it returns
//! touches only the bytes of the buffers it names, so enqueueing it is safe.
//! Invariant: `unsafe` is where code is loaded (`load`), where libraries are called (`nvrtc`, `blaslt`) and where launches
//! are vouched for (`vouch`).
//! Invariant: every kernel has a twin, and the simulated device runs it.
//!
//! # What is where
//!
//! | to | use |
//! |---|---|
//! | open the kernels for a device | [`Kernels::load`] |
//! | compile what a plan needs, on all cores | [`Kernels::prepared`] |
//! | open a simulated device that knows the twins | [`simulated`], [`register_twins`] |
//! | describe an op's launches | the methods of [`Kernels`]: one `Args` structure each |
//! | know how much scratch an op needs | [`attention_scratch_bytes`], [`sample_scratch_bytes`], [`sample_state_bytes`], [`span_grad_scratch_bytes`] |
//! | compile ahead of time | [`prebuild`], [`prebuilt_archs`]; [`compile_all`], [`Kernels::with_archive`] |
//!
//! # Conventions
//!
//! Activations of a model that is only run are F32; a training step has kernels for F32, F16 and BF16. Inputs are
//! [`BufView`]s, mirrors of a plan's operands, and may be strided as far as the launcher
//! says; outputs are dense. One-dimensional weights are F32; matrices `[n, k]` are in their file's dtype, dense, and
//! start at a multiple of 16 bytes. Positions, sequences, block tables and ids are I32 in device memory and are read by
//! the kernel at each run; a negative position marks a row of padding, which writes nothing to a cache.
//! Grid sizes follow from the shapes alone, so that one recording serves every state of the control block.

#![deny(unsafe_code)] // but for the four modules named above

mod error; // what a launcher or the compiler refuses
mod view; // operands, and how far they may be strided
mod vouch; // launches that safe code may enqueue
mod registry; // every kernel, with its parameters and its twin
mod twin; // what twins share
mod card; // what launchers know of the card
mod tuning; // numbers that fit kernels to it
mod load; // from sources to functions on a device
mod source; // the .cu files, and the units they are compiled in
mod supply; // where the code of units comes from
mod prebuilt; // code in the binary
mod cache; // code on disk
mod compile; // units to code, on all cores
mod nvrtc; // the compiler library

mod packed; // quantised weights as the card reads them
mod product; // one row times weights, with norm and gate
mod few; // a few rows times packed weights
mod batch; // the rows of many sequences times packed weights
mod linear; // y = x . w^T
mod gather; // rows of a table
mod norm; // RMS norms
mod elementwise; // functions of elements; gates
mod copy; // copies and casts
mod rope; // rotary embedding
mod kv; // writing the KV cache
mod rope_kv; // both at once
mod attention; // reading it
mod attend; // all of it for tokens decoded one at a time
mod rows; // reductions and softmax over rows
mod sample; // choosing a token
mod commit; // making it the next step's input
mod gemm; // y = x . w^T of many rows, on tensor cores
mod matmul; // products of values in any strides
mod blaslt; // the same by cuBLASLt
mod dequant; // quantised weights for them
mod narrow; // rows for them
mod flash; // attention of many rows
mod recurrent; // layers with a state in slots
mod span; // attention among rows
mod span_grad; // its gradient
mod digest; // comparing memory where it lies

mod typed; // elements of any type
mod map; // functions of them, and their gradients
mod train_rows; // norms, softmax, reductions, and their gradients
mod moves; // rows and elements by ids; zeros around them; rotary embedding
mod experts; // routing, and products with experts
mod scatter; // rows that share an id, summed
mod loss; // cross-entropy
mod adamw; // the optimiser

// launchers: complete

pub use adamw::{AdamTensor, AdamWArgs, Floats, SumSquaresArgs, sum_squares_scratch_bytes};
pub use attend::{
    AttendArgs, AttendNorm, MAX_ATTEND_ROWS, attend_counter_bytes, attend_scratch_bytes, attend_splits,
};
pub use attention::{AttentionArgs, attention_scratch_bytes, attention_splits};
pub use batch::{BatchArgs, BatchPlan, MAX_BATCH_ROWS, has_batch};
pub use blaslt::{BlasLt, BlasLtFactor, BlasLtProduct, BlasLtShape, BlasLtTimes};
pub use commit::{CommitArgs, CommitEntry, CommitRing, CommitState, Edits};
pub use compile::Compiling;
pub use copy::{CastArgs, CopyArgs};
pub use dequant::DequantArgs;
pub use digest::Digester;
pub use elementwise::{BinaryArgs, GateArgs, UnaryArgs};
pub use error::KernelError;
pub use experts::{
    ExpertGateArgs, ExpertSizes, ExpertSumArgs, ExpertWeight, MAX_CHOICES, MAX_EXPERTS, MAX_ROUTE_GROUPS,
    MIN_SORTED_ROWS, RouteArgs, expert_scratch_bytes, has_experts,
};
pub use few::{FewArgs, FewPart, FewRowsArgs, MAX_FEW_PARTS, MAX_FEW_ROWS, few_bytes};
pub use gather::GatherRowsArgs;
pub use gemm::{GEMM_DTYPES, GemmArgs, GemmPlan};
pub use kv::KvAppendArgs;
pub use linear::{LINEAR_DTYPES, LinearArgs, LinearPart, MAX_PRODUCTS};
pub use load::{GpuArch, KernelOrigin, Kernels, LoadOptions, register_twins, simulated};
pub use loss::CrossEntropyArgs;
pub use map::{MapArgs, MapOp};
pub use matmul::{MATMUL_DTYPES, MatMulArgs, library_product};
pub use moves::{PadArgs, PickArgs, PlaceColumnsArgs, TypedGatherArgs, TypedRopeArgs};
pub use narrow::Narrow;
pub use norm::{AddRmsNormArgs, RmsNormArgs};
pub use nvrtc::{Image, Nvrtc, compile_all};
pub use packed::{PACKED_DTYPES, PackArgs, pack, packed_bytes};
pub use prebuilt::{prebuild, prebuilt_archs};
pub use product::{MAX_PARTS, ProductArgs, ProductWeight, has_product, product_too_long, products_join};
pub use recurrent::{GatedDeltaArgs, MAX_CONV_WIDTH, MAX_DELTA_KEY, ShortConvArgs, SlotArgs};
pub use registry::{KernelInfo, kernels};
pub use rope::RopeArgs;
pub use rope_kv::RopeKvArgs;
pub use rows::{ReduceArgs, SoftmaxArgs};
pub use sample::{SampleArgs, SampleTop, sample_scratch_bytes, sample_state_bytes};
pub use scatter::{ScatterAddRowsArgs, scatter_scratch_bytes};
pub use source::{KernelFamily, KernelUnit};
pub use span::{MAX_SPAN_HEAD_DIM, SpanArgs};
pub use span_grad::{SpanGradArgs, span_grad_scratch_bytes};
pub use train_rows::{
    NormWeights, RmsNormGradArgs, SoftmaxGradArgs, TypedAddRmsNormArgs, TypedReduceArgs, TypedRmsNormArgs,
    TypedSoftmaxArgs, reduce_scratch_bytes, rms_norm_grad_scratch_bytes,
};
pub use tuning::tuning_header;
pub use view::{BufView, unaligned_rows};
