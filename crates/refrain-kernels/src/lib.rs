//! CUDA kernels, their compilation and their typed launchers.
//!
//! Invariant: this crate never allocates device memory, launches or waits. A launcher only describes a
//! launch. Its first call loads the kernel's code, unless a recording is active.
//! Invariant: a launcher refuses whatever its kernel's header does not allow; the error names op, dtype and
//! shape. A launch that it returns accesses only the bytes of the buffers it names, so enqueueing it is safe.
//! Invariant: `unsafe` is confined to loading code (`load`), calling libraries (`nvrtc`, `blaslt`) and
//! vouching for launches (`vouch`).
//! Invariant: every kernel has a twin, a reference function that the simulated device runs.
//!
//! # Entry points
//!
//! | to | use |
//! |---|---|
//! | open the kernels for a device | [`Kernels::load`] |
//! | compile the kernels of a plan on all cores | [`Kernels::prepared`] |
//! | open a simulated device with all twins | [`simulated`], [`register_twins`] |
//! | describe an op's launches | the methods of [`Kernels`]: one `Args` structure each |
//! | size an op's scratch | [`attention_scratch_bytes`], [`sample_scratch_bytes`], [`sample_state_bytes`], [`span_grad_scratch_bytes`] |
//! | compile ahead of time | [`prebuild`], [`prebuilt_archs`]; [`compile_all`], [`Kernels::with_archive`] |
//!
//! # Conventions
//!
//! Inference activations are F32; training steps have kernels for F32, F16 and BF16. Inputs are [`BufView`]s,
//! which mirror a plan's operands; each launcher documents the strides it accepts. Outputs are dense.
//! One-dimensional weights are F32. Matrices `[n, k]` are dense, in their file's dtype, and 16-byte aligned.
//! Positions, sequences, block tables and ids are I32 in device memory, and the kernel reads them at run
//! time. A negative position marks a padding row, which writes nothing to a cache. Grid sizes follow from the
//! shapes alone, so one recording serves every state of the control block.

#![deny(unsafe_code)] // allowed only in the four modules named above

mod error; // errors
mod view; // operands and the strides they may have
mod vouch; // the safety argument for launches
mod registry; // every kernel, with its parameters and its twin
mod twin; // helpers shared by the twins
mod card; // GPU properties that launchers depend on
mod tuning; // performance parameters per GPU
mod load; // from sources to functions on a device
mod source; // the .cu files and their compilation units
mod supply; // sources of compiled code
mod prebuilt; // code embedded in the binary
mod cache; // code cached on disk
mod compile; // parallel compilation
mod nvrtc; // the NVRTC library

mod packed; // packed layouts of quantised weights
mod product; // GEMV with norm and gate
mod few; // several rows times packed weights
mod batch; // batched decode: many rows, each weight read once
mod batch_plan; // its division among blocks
mod linear; // y = x . w^T
mod gather; // row gather
mod norm; // RMS norms
mod elementwise; // elementwise functions; gates
mod copy; // copies and casts
mod rope; // rotary embedding
mod kv; // appending to the KV cache
mod rope_kv; // both fused
mod attention; // split attention over the KV cache
mod attend; // fused decode attention
mod rows; // reductions and softmax over rows
mod sample; // sampling a token
mod commit; // committing the sampled token
mod gemm; // y = x . w^T of many rows, on tensor cores
mod matmul; // products of strided values
mod blaslt; // products by cuBLASLt
mod dequant; // dequantisation for GEMMs
mod narrow; // 16-bit rows for GEMMs
mod flash; // prefill attention
mod recurrent; // recurrent layers with per-sequence state
mod span; // attention within documents
mod span_grad; // its gradient
mod digest; // digests of device memory

mod typed; // elements of any dtype
mod map; // elementwise functions of any dtype, with gradients
mod train_rows; // norms, softmax and reductions, with gradients
mod moves; // gathers, padding and rotary embedding of any dtype
mod experts; // mixture of experts
mod grouped; // expert layers of many rows, on tensor cores
mod scatter; // sums of rows by id
mod loss; // cross-entropy
mod adamw; // the optimiser

// launchers: complete

pub use adamw::{AdamTensor, AdamWArgs, Floats, SumSquaresArgs, sum_squares_scratch_bytes};
pub use attend::{
    AttendArgs, AttendNorm, MAX_ATTEND_ROWS, attend_counter_bytes, attend_scratch_bytes, attend_splits,
};
pub use attention::{AttentionArgs, attention_scratch_bytes, attention_splits};
pub use batch::BatchArgs;
pub use batch_plan::{BatchPlan, MAX_BATCH_ROWS, has_batch};
pub use blaslt::{BlasLt, BlasLtFactor, BlasLtProduct, BlasLtShape, BlasLtTimes};
pub use commit::{CommitArgs, CommitEntry, CommitRing, CommitState, Edits};
pub use compile::Compiling;
pub use copy::{CastArgs, CopyArgs};
pub use dequant::DequantArgs;
pub use digest::Digester;
pub use elementwise::{BinaryArgs, GateArgs, UnaryArgs};
pub use error::KernelError;
pub use experts::{
    ExpertGateArgs, ExpertLogitsArgs, ExpertSizes, ExpertSumArgs, ExpertWeight, GateRouter, MAX_CHOICES,
    MAX_EXPERTS, MAX_ROUTE_GROUPS, MAX_ROUTED_ROW, MIN_SORTED_ROWS, RouteArgs, expert_scratch_bytes,
    has_experts, joins_gate,
};
pub use few::{FewArgs, FewPart, FewRowsArgs, MAX_FEW_PARTS, MAX_FEW_ROWS, few_bytes};
pub use gather::GatherRowsArgs;
pub use gemm::{GEMM_DTYPES, GemmArgs, GemmPlan};
pub use grouped::{GroupedArgs, GroupedPlan, GroupedSizes};
pub use kv::KvAppendArgs;
pub use linear::{LINEAR_DTYPES, LinearArgs, LinearPart, MAX_PRODUCTS};
pub use load::{GpuArch, KernelLoadOptions, KernelOrigin, Kernels, register_twins, simulated};
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
pub use tuning::generated_headers;
pub use view::{BufView, unaligned_rows};
