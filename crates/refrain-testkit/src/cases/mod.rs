//! The case table: every op with odd sizes, every dtype it supports, views as inputs, and values that break
//! careless kernels.

mod attention;
mod elements;
mod lora;
mod matrix;
mod moe;
mod recurrent;
mod rows;
mod sample;
mod train;

pub(crate) use elements::half_plus_one;

use crate::case::Case;
use refrain_tensor::DType;

const FLOATS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// Returns all cases. Names are unique and stable, so that a backend can refer to a case by name.
pub fn cases() -> Vec<Case> {
    let families = [
        elements::moves(),
        elements::functions(),
        rows::cases(),
        rows::accumulate(),
        matrix::cases(),
        attention::rope(),
        attention::kv_append(),
        attention::kv_append_bytes(),
        attention::attention(),
        recurrent::short_conv(),
        recurrent::gated_delta(),
        sample::cases(),
        moe::route(),
        moe::experts(),
        lora::cases(),
        train::cases(),
    ];
    families.into_iter().flatten().collect()
}

fn quantised() -> impl Iterator<Item = DType> {
    DType::ALL.into_iter().filter(|d| d.is_quantized())
}
