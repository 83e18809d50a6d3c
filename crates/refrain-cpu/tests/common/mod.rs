//! Shared code of the kernel tests: random weights of every type, and matrix products in f64 to compare with.
#![allow(dead_code, reason = "each test file uses a part")]

use half::f16;
use refrain_cpu::simd::{
    ActKind, Acts, Level, OutTile, WeightMatrix, act_bytes, act_kind, matmul, quantize_row,
};
use refrain_tensor::DType;
use refrain_tensor::quant::dequantize;

pub(crate) const WEIGHT_TYPES: [DType; 21] = [
    DType::F32,
    DType::F16,
    DType::BF16,
    DType::Q4_0,
    DType::Q4_1,
    DType::Q5_0,
    DType::Q5_1,
    DType::Q8_0,
    DType::IQ4_NL,
    DType::Q2_K,
    DType::Q3_K,
    DType::Q4_K,
    DType::Q5_K,
    DType::Q6_K,
    DType::IQ4_XS,
    DType::MXFP4,
    DType::IQ2_XXS,
    DType::IQ2_XS,
    DType::IQ2_S,
    DType::IQ3_XXS,
    DType::IQ3_S,
];

/// xorshift64*
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn bits(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// Returns a number in -1 .. 1.
    pub(crate) fn float(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    pub(crate) fn floats(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.float()).collect()
    }
}

/// Offsets of the half floats in a block of the type.
fn halves(dtype: DType) -> &'static [usize] {
    match dtype {
        DType::Q4_0 | DType::Q5_0 | DType::Q8_0 | DType::IQ4_NL | DType::IQ4_XS => &[0],
        DType::IQ2_XXS | DType::IQ2_XS | DType::IQ2_S | DType::IQ3_XXS | DType::IQ3_S => &[0],
        DType::Q4_1 | DType::Q5_1 | DType::Q4_K | DType::Q5_K => &[0, 2],
        DType::Q2_K => &[80, 82],
        DType::Q3_K => &[108],
        DType::Q6_K => &[208],
        _ => &[],
    }
}

/// Random weights of `n` elements, with scales from `scale`.
pub(crate) fn weights_with(
    dtype: DType,
    n: usize,
    random: &mut Random,
    mut scale: impl FnMut(&mut Random) -> f32,
) -> Vec<u8> {
    let n_bytes = dtype.bytes_for(n).unwrap();
    match dtype {
        DType::F32 => (0..n).flat_map(|_| scale(random).to_le_bytes()).collect(),
        DType::F16 => (0..n).flat_map(|_| f16::from_f32(scale(random)).to_le_bytes()).collect(),
        DType::BF16 => (0..n).flat_map(|_| half::bf16::from_f32(scale(random)).to_le_bytes()).collect(),
        _ => {
            let mut bytes: Vec<u8> = (0..n_bytes).map(|_| (random.bits() >> 32) as u8).collect();
            for block in bytes.chunks_exact_mut(dtype.block_bytes()) {
                if dtype == DType::MXFP4 {
                    // The exponent of the scale: levels are multiples of half of it.
                    block[0] = (scale(random).abs().to_bits() >> 23) as u8 + 1;
                }
                for &at in halves(dtype) {
                    block[at..at + 2].copy_from_slice(&f16::from_f32(scale(random)).to_le_bytes());
                }
            }
            bytes
        }
    }
}

pub(crate) fn weights(dtype: DType, n: usize, random: &mut Random) -> Vec<u8> {
    weights_with(dtype, n, random, |r| r.float() * 0.03)
}

pub(crate) fn prepare(level: Level, kind: ActKind, x: &[f32], k: usize) -> Vec<u8> {
    let row_bytes = act_bytes(kind, k).unwrap();
    let mut bytes = vec![0xaa; x.len() / k * row_bytes];
    for (src, dst) in x.chunks_exact(k).zip(bytes.chunks_exact_mut(row_bytes)) {
        quantize_row(level, kind, src, dst).unwrap();
    }
    bytes
}

/// Product of all rows, at one level.
pub(crate) fn product(level: Level, w: &WeightMatrix<'_>, x: &[f32], m: usize) -> Vec<f32> {
    let acts = prepare(level, w.act_kind(), x, w.k());
    let acts = Acts::new(w.act_kind(), m, w.k(), &acts).unwrap();
    let mut out = vec![f32::NAN; m * w.n_rows()];
    matmul(level, w, &acts, 0..w.n_rows(), &mut OutTile::new(&mut out, m, w.n_rows()));
    out
}

/// Values that a prepared row represents.
pub(crate) fn prepared_values(kind: ActKind, k: usize, row: &[u8]) -> Vec<f64> {
    let float = |at: usize| f32::from_le_bytes(row[at..at + 4].try_into().unwrap());
    match kind {
        ActKind::F32 => (0..k).map(|i| f64::from(float(4 * i))).collect(),
        ActKind::Bf16 => {
            let bits = |i: usize| u16::from_le_bytes([row[2 * i], row[2 * i + 1]]);
            (0..k).map(|i| half::bf16::from_bits(bits(i)).to_f64()).collect()
        }
        ActKind::Q8 => (0..k).map(|i| f64::from(row[i] as i8) * f64::from(float(k + i / 32 * 4))).collect(),
        ActKind::Q8K => {
            // The scales are followed by 144 bytes of sums per block, then the shifts.
            let shift = |i: usize| row[k + 148 * (k / 256) + 4 * (i / 32)];
            let value = |i: usize| f64::from(i32::from(row[i] as i8) << shift(i));
            (0..k).map(|i| value(i) * f64::from(float(k + i / 256 * 4))).collect()
        }
    }
}

/// Product of the dequantised weights with the prepared activations, in f64.
pub(crate) fn reference(dtype: DType, bytes: &[u8], n_rows: usize, k: usize, x: &[f32]) -> Vec<f64> {
    let kind = act_kind(dtype).unwrap();
    let prepared = prepare(Level::PORTABLE, kind, x, k);
    let row_bytes = dtype.bytes_for(k).unwrap();
    let mut out = Vec::new();
    for row in prepared.chunks_exact(act_bytes(kind, k).unwrap()) {
        let values = prepared_values(kind, k, row);
        for w in bytes.chunks_exact(row_bytes).take(n_rows) {
            let mut decoded = vec![0f32; k];
            dequantize(dtype, w, &mut decoded).unwrap();
            out.push(values.iter().zip(&decoded).map(|(x, &w)| x * f64::from(w)).sum());
        }
    }
    out
}

pub(crate) fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}
