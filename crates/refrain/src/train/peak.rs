//! What a device computes at best.

use refrain_tensor::DType;

/// Dense bf16 operations a second of well-known cards, by their makers' data sheets, in 1e12. The first name that the
/// card's contains counts.
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

/// Operations a second that a card computes at best in products of `dtype`; `None` where that is not known.
pub fn peak_flops(card: &str, dtype: DType) -> Option<f64> {
    let known = BF16_PEAKS.iter().find(|(name, _)| card.contains(name));
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
