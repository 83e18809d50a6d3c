//! Matrix products of values against sums in f64, and the same bits at every level and with any number of
//! threads.

use half::{bf16, f16};
use refrain_cpu::pool::Pool;
use refrain_cpu::simd::{Factor, Level, Rounded, gemm, gemm_scratch};
use refrain_tensor::{DType, quant};

/// Pseudorandom numbers between -1 and 1.
fn values(n: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state as i32 as f32 / 2_147_483_648.0
    };
    (0..n).map(|_| next()).collect()
}

fn rounded(dtype: DType, values: &[f32]) -> Vec<u8> {
    match dtype {
        DType::F16 => values.iter().flat_map(|&v| f16::from_f32(v).to_le_bytes()).collect(),
        DType::BF16 => values.iter().flat_map(|&v| bf16::from_f32(v).to_le_bytes()).collect(),
        _ => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
    }
}

fn widened(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    let mut values = vec![0.0; bytes.len() / dtype.block_bytes()];
    quant::dequantize(dtype, bytes, &mut values).unwrap();
    values
}

/// A factor of `len` by `k` inside a larger matrix, transposed or not.
fn factor(dtype: DType, bytes: &[u8], len: usize, k: usize, is_turned: bool) -> Factor<'_> {
    let (stride, k_stride) = if is_turned { (1, len + 3) } else { (k + 5, 1) };
    Factor { dtype, bytes, offset: 7, len, stride, k, k_stride }
}

fn room(len: usize, k: usize) -> usize {
    7 + (len + 5) * (k + 5)
}

#[test]
fn products_agree_with_sums_in_f64_at_every_level_and_with_any_number_of_threads() {
    let shapes =
        [(1, 1, 1), (16, 8, 16), (17, 321, 33), (3, 1000, 300), (200, 70, 530), (40, 0, 9), (0, 4, 4)];
    for (m, k, n) in shapes {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let a = rounded(dtype, &values(room(m, k), 1));
            let b = rounded(dtype, &values(room(n, k), 2));
            for turned in [[false, false], [false, true], [true, false], [true, true]] {
                let (left, right) = (factor(dtype, &a, m, k, turned[0]), factor(dtype, &b, n, k, turned[1]));
                let mut all: Vec<Vec<u8>> = Vec::new();
                for (level, n_threads) in Level::available()
                    .into_iter()
                    .map(|l| (l, 2))
                    .chain([(Level::detect(), 1), (Level::detect(), 5)])
                {
                    let pool = Pool::new(n_threads).unwrap();
                    let mut scratch = vec![f32::NAN; gemm_scratch(k, n, n_threads)];
                    let mut words = vec![0u32; m * n];
                    let bytes = &mut bytemuck::cast_slice_mut(&mut words)[..m * n * dtype.block_bytes()];
                    bytes.fill(0xff);
                    gemm(&pool, level, &left, &right, Rounded { dtype, bytes }, &mut scratch);
                    all.push(bytes.to_vec());
                }
                let what = format!("{dtype} {m} x {k} x {n}, turned {turned:?}");
                assert!(all.windows(2).all(|pair| pair[0] == pair[1]), "{what}: bits differ");
                let (x, y, got) = (widened(dtype, &a), widened(dtype, &b), widened(dtype, &all[0]));
                let at = |f: &Factor<'_>, i: usize, l: usize| f.offset + i * f.stride + l * f.k_stride;
                let last_bit = match dtype {
                    DType::F16 => 1e-3,
                    DType::BF16 => 8e-3,
                    _ => 1e-6,
                };
                for i in 0..m {
                    for j in 0..n {
                        let products =
                            (0..k).map(|l| f64::from(x[at(&left, i, l)]) * f64::from(y[at(&right, j, l)]));
                        let want: f64 = products.sum();
                        let off = (f64::from(got[i * n + j]) - want).abs();
                        assert!(
                            off <= last_bit * (want.abs() + (k as f64).sqrt()),
                            "{what}: {off} at {i}, {j}"
                        );
                    }
                }
            }
        }
    }
}
