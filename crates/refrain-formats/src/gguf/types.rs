//! GGUF's numbers of tensor types.

use refrain_tensor::DType;

/// Maximum number of dimensions of a tensor.
pub(crate) const MAX_DIMS: u32 = 4;

/// Maximum nesting of metadata arrays. Real files nest two deep; the limit bounds recursion on damaged ones.
pub(crate) const MAX_ARRAY_DEPTH: usize = 8;

/// Returns the dtype of a tensor type number, if it is supported.
pub fn dtype_of(number: u32) -> Option<DType> {
    SUPPORTED.iter().find(|(n, _)| *n == number).map(|(_, d)| *d)
}

/// Returns the tensor type number of a dtype, if GGUF has one.
pub fn number_of(dtype: DType) -> Option<u32> {
    SUPPORTED.iter().find(|(_, d)| *d == dtype).map(|(n, _)| *n)
}

const SUPPORTED: [(u32, DType); 23] = [
    (0, DType::F32),
    (1, DType::F16),
    (30, DType::BF16),
    (2, DType::Q4_0),
    (3, DType::Q4_1),
    (6, DType::Q5_0),
    (7, DType::Q5_1),
    (8, DType::Q8_0),
    (10, DType::Q2_K),
    (11, DType::Q3_K),
    (12, DType::Q4_K),
    (13, DType::Q5_K),
    (14, DType::Q6_K),
    (20, DType::IQ4_NL),
    (23, DType::IQ4_XS),
    (39, DType::MXFP4),
    (16, DType::IQ2_XXS),
    (17, DType::IQ2_XS),
    (22, DType::IQ2_S),
    (18, DType::IQ3_XXS),
    (21, DType::IQ3_S),
    (26, DType::I32),
    (27, DType::I64),
];

/// Returns the name of a current or former type that is not supported.
fn unsupported_name(number: u32) -> Option<&'static str> {
    Some(match number {
        4 => "Q4_2, removed from the format",
        5 => "Q4_3, removed from the format",
        9 => "Q8_1",
        15 => "Q8_K",
        19 => "IQ1_S",
        24 => "I8",
        25 => "I16",
        28 => "F64",
        29 => "IQ1_M",
        31 => "Q4_0_4_4, removed from the format",
        32 => "Q4_0_4_8, removed from the format",
        33 => "Q4_0_8_8, removed from the format",
        34 => "TQ1_0",
        35 => "TQ2_0",
        36 => "IQ4_NL_4_4, removed from the format",
        37 => "IQ4_NL_4_8, removed from the format",
        38 => "IQ4_NL_8_8, removed from the format",
        40 => "NVFP4",
        41 => "Q1_0",
        _ => return None,
    })
}

pub(crate) fn describe(number: u32) -> String {
    match unsupported_name(number) {
        Some(name) => format!("{number} ({name}) is not supported"),
        None => format!("{number} is unknown"),
    }
}

pub(crate) fn supported() -> String {
    SUPPORTED.map(|(_, d)| d.name()).join(", ")
}
