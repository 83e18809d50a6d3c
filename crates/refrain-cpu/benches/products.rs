//! Speed of matrix products compared with the machine's read bandwidth:
//! `cargo bench -p refrain-cpu --bench products`.
//!
//! Prints, for each weight type, GB/s of weights for one activation row (decode), from memory and from the
//! cache (the limit of the instructions alone), and GFLOP/s for 128 rows (prefill), with one thread and with
//! all. Arguments: names of types to measure (default: all), `level=NAME` to force a level.

use std::hint::black_box;
use std::time::{Duration, Instant};

use refrain_cpu::pool::{Pool, default_threads, static_range};
use refrain_cpu::simd::{
    Acts, Level, WeightMatrix, WeightProduct, act_bytes, act_kind, matmul_parallel, pack, quantize_row,
};
use refrain_tensor::DType;

/// Larger than any cache, so that weights come from memory as they do between two tokens.
const WEIGHT_BYTES: usize = SLICE_BYTES * N_SLICES;
/// Measured one by one: short enough that some runs are undisturbed on a busy machine.
const SLICE_BYTES: usize = 4 << 20;
const N_SLICES: usize = 40;
const K: usize = 2048;
const PREFILL: usize = 128;
const PREFILL_ROWS: usize = 256;

fn main() {
    let args: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with("--")).collect();
    let forced = args.iter().find_map(|a| a.strip_prefix("level="));
    let level = match forced {
        None => Level::detect(),
        Some(name) => Level::by_name(name).expect("a level of this processor"),
    };
    let named: Vec<DType> = args.iter().filter_map(|a| DType::from_name(a)).collect();
    let dtypes =
        DType::ALL.into_iter().filter(|&d| act_kind(d).is_some() && (named.is_empty() || named.contains(&d)));
    let mut pools = vec![Pool::new(1).expect("a pool")];
    if default_threads() > 1 {
        pools.push(Pool::new(default_threads()).expect("a pool"));
    }
    println!("level {level}");
    for pool in &pools {
        println!("read bandwidth, {} threads: {:.1} GB/s", pool.n_threads(), read_bandwidth(pool));
    }
    println!("{:7} {:18} {:>8} {:>8} {:>8} {:>12}", "type", "layout", "threads", "GB/s", "cached", "GFLOP/s");
    for dtype in dtypes {
        measure(level, dtype, &pools);
    }
}

fn measure(level: Level, dtype: DType, pools: &[Pool]) {
    let row_bytes = dtype.bytes_for(K).expect("whole blocks");
    let n_rows = SLICE_BYTES / row_bytes / 64 * 64;
    let slice_bytes = n_rows * row_bytes;
    let bytes = random_bytes(slice_bytes * N_SLICES);
    let slices: Vec<WeightMatrix<'_>> = bytes
        .chunks_exact(slice_bytes)
        .map(|slice| WeightMatrix::new(dtype, slice, n_rows, K, row_bytes).expect("a matrix"))
        .collect();
    let mut packed = Vec::new();
    let pool = &pools[pools.len() - 1];
    let pack_time =
        low(slices.iter().map(|slice| time(|| packed.extend(pack(pool, level, slice)))).collect());
    let packed: Vec<WeightMatrix<'_>> = packed.iter().map(|p| p.matrix()).collect();
    let few = &bytes[..PREFILL_ROWS * row_bytes];
    let few = WeightMatrix::new(dtype, few, PREFILL_ROWS, K, row_bytes).expect("a matrix");
    let few_packed = pack(pool, level, &few);
    let as_packed = few_packed.as_ref().map(|few| (&packed, few.matrix()));
    for (slices, few) in [Some((&slices, few)), as_packed].into_iter().flatten() {
        for pool in pools {
            let decode = time_products(pool, level, slices, 1, 5);
            let cached = time_products(pool, level, &[few], 1, 500);
            let prefill = time_products(pool, level, &[few], PREFILL, 200);
            println!(
                "{:7} {:18} {:>8} {:>8.1} {:>8.1} {:>12.1}",
                dtype.name(),
                slices[0].layout_name(),
                pool.n_threads(),
                slice_bytes as f64 / decode.as_secs_f64() / 1e9,
                (PREFILL_ROWS * row_bytes) as f64 / cached.as_secs_f64() / 1e9,
                2.0 * (PREFILL_ROWS * K * PREFILL) as f64 / prefill.as_secs_f64() / 1e9,
            );
        }
    }
    if few_packed.is_some() {
        println!(
            "{:7} packed at {:.1} GB/s",
            dtype.name(),
            slice_bytes as f64 / pack_time.as_secs_f64() / 1e9
        );
    }
}

fn time(f: impl FnOnce()) -> Duration {
    let begin = Instant::now();
    f();
    begin.elapsed()
}

/// Returns a low percentile: interference from other programs only adds time.
fn low(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times[times.len() / 10]
}

/// Measures a product of `m` rows with one of the matrices.
fn time_products(
    pool: &Pool,
    level: Level,
    slices: &[WeightMatrix<'_>],
    m: usize,
    n_rounds: usize,
) -> Duration {
    let kind = slices[0].act_kind();
    let row_bytes = act_bytes(kind, K).expect("whole blocks");
    // Aligned to a cache line, as in the backend.
    let mut lines = vec![0u8; m * row_bytes + 64];
    let begin = lines.as_ptr().align_offset(64);
    let prepared = &mut lines[begin..][..m * row_bytes];
    let x: Vec<f32> = (0..K).map(|i| (i as f32 * 0.37).sin()).collect();
    for row in prepared.chunks_exact_mut(row_bytes) {
        quantize_row(level, kind, &x, row).expect("a prepared row");
    }
    let acts = Acts::new(kind, m, K, prepared).expect("activations");
    let mut out = vec![0f32; m * slices[0].n_rows()];
    let _step = pool.step();
    let mut times = Vec::new();
    for _ in 0..n_rounds {
        for &w in slices {
            times.push(time(|| {
                matmul_parallel(pool, level, &acts, &mut [WeightProduct { w, out: &mut out }])
            }));
        }
    }
    black_box(&out);
    low(times)
}

/// GB/s of a plain sum over memory.
fn read_bandwidth(pool: &Pool) -> f64 {
    let data = vec![1u64; WEIGHT_BYTES / 8];
    let mut times = Vec::new();
    for slice in data.chunks_exact(SLICE_BYTES / 8).cycle().take(5 * N_SLICES) {
        times.push(time(|| {
            pool.run(|thread_idx, n_threads| {
                let part = &slice[static_range(slice.len(), 512, thread_idx, n_threads)];
                let mut sums = [0u64; 32];
                for chunk in part.chunks_exact(32) {
                    for (sum, x) in sums.iter_mut().zip(chunk) {
                        *sum = sum.wrapping_add(*x);
                    }
                }
                black_box(sums);
            });
        }));
    }
    SLICE_BYTES as f64 / low(times).as_secs_f64() / 1e9
}

/// Random bytes that are valid blocks of any type, though their scales may be large: no half float is infinite.
fn random_bytes(n: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut bytes = vec![0u8; n];
    for chunk in bytes.chunks_mut(8) {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let word = (state >> 7) & 0x3b3b_3b3b_3b3b_3b3b;
        chunk.copy_from_slice(&word.to_le_bytes()[..chunk.len()]);
    }
    bytes
}
