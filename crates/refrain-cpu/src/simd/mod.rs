//! CPU kernels, compiled for several instruction sets and selected at run time by a [`Level`].
//!
//! Every function gives the same bits at every level (NaN payloads aside) and documents its order of summation.

#[cfg(target_endian = "big")]
compile_error!("the kernels read little-endian model files without conversion");

mod acts;
mod attention;
mod buffer;
mod elementwise;
mod encode;
mod gemm;
mod groups;
mod lanes;
mod level;
mod lora;
mod math;
mod matmul;
mod recurrent;
mod span;
mod tile;
mod train;
mod weights;

pub use acts::{ActError, ActKind, act_bytes, act_kind, quantize_row};
pub use attention::{AttendState, KEY_CHUNK, KvBlock, KvRows, Scores, attend_block};
pub use elementwise::{
    add, add_inplace, add_rms_norm, argmax, axpy, bf16_to_f32, dot, exp_inplace, f16_to_f32, f32_to_bf16,
    f32_to_f16, gelu_erf_inplace, gelu_tanh_mul, gelu_tanh_mul_inplace, max, mul, mul_inplace, rms_norm,
    rms_norm_inplace, rope_interleaved, rope_neox, scale_inplace, silu_mul, silu_mul_inplace,
    softmax_inplace, sum,
};
pub use encode::encode_rows;
pub use gemm::{Factor, Rounded, gemm, gemm_scratch};
pub use level::Level;
pub use lora::{LoraFactor, lora_down_row, lora_up_row};
pub use matmul::{
    Acts, ExpertBias, ExpertProduct, ExpertRows, OutTile, ROW_ALIGN, WeightProduct, experts_parallel, matmul,
    matmul_parallel, prepare_parallel,
};
pub use recurrent::{DeltaHead, gated_delta_row, short_conv_row};
pub use train::{AdamStep, adam, cross_entropy, gate_grad, reduce, rms_norm_grad, softmax_grad, sum_squares};
pub use weights::{PackedMatrix, WeightError, WeightMatrix, pack};

pub(crate) use span::{BLOCK, Gathered, NOTHING, SCORES, Side, dots, panels, product, score_grads, soften};
