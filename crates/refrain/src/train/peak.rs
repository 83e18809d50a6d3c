//! Peak FLOPS of well-known GPUs.

use refrain_tensor::DType;

/// Dense bf16 TFLOPS of well-known GPUs, from their data sheets. The first name that the GPU's name contains counts.
const BF16_PEAKS: [(&str, f64); 14] = [
    ("B200", 2250.0),
    ("GH200", 989.0),
    ("H200 NVL", 836.0),
    ("H200", 989.0),
    ("H100 NVL", 836.0),
    ("H100 PCIe", 756.0),
    ("H100", 989.0),
    ("A100", 312.0),
    ("A800", 312.0),
    ("L40S", 362.0),
    ("RTX 5090", 209.5),
    ("RTX 4090", 165.2),
    ("RTX 3090", 71.0),
    ("A10", 125.0),
];

/// Peak floating-point operations per second of a GPU in matmuls of `dtype`, if known.
pub fn peak_flops(gpu: &str, dtype: DType) -> Option<f64> {
    let known = BF16_PEAKS.iter().find(|(name, _)| gpu.contains(name));
    known.filter(|_| dtype == DType::BF16).map(|(_, peak)| peak * 1e12)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_name_counts() {
        assert_eq!(peak_flops("NVIDIA H200", DType::BF16), Some(989e12));
        assert_eq!(peak_flops("NVIDIA H200 NVL", DType::BF16), Some(836e12));
        assert_eq!(peak_flops("NVIDIA A100-SXM4-80GB", DType::BF16), Some(312e12));
        assert_eq!(peak_flops("NVIDIA H200", DType::F32), None);
        assert_eq!(peak_flops("the CPU", DType::BF16), None);
    }
}
