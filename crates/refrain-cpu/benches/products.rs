//! Speed of the products beside the machine's read bandwidth: `cargo bench -p refrain-cpu --bench products`.
//!
//! Prints, for each weight type, GB/s of weights for one activation row (decode) and GFLOP/s for 128 (prefill), with
//! one thread and with all. Arguments: names of types to measure (all if none), `level=NAME` to force a level.

use std::hint::black_box;
use std::time::{Duration, Instant};

use refrain_cpu::pool::{Pool, default_threads, static_range};
use refrain_cpu::simd::{Acts, Level, Product, WeightMatrix, act_bytes, act_kind, matmul_parallel, pack, quantize_row};
use refrain_tensor::DType;

/// Larger than any cache, so that weights come from memory as they do between two tokens.
const WEIGHT_BYTES: usize = 192 << 20;
const K: usize = 2048;
const PREFILL: usize = 128;

fn main() {
    let args: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with("--")).collect();
    let forced = args.iter().find_map(|a| a.strip_prefix("level="));
    let level = match forced {
        None => Level::detect(),
        Some(name) => Level::by_name(name).expect("a level of this processor"),
    };
    let named: Vec<DType> = args.iter().filter_map(|a| DType::from_name(a)).collect();
    let dtypes = DType::ALL.into_iter().filter(|&d| act_kind(d).is_some() && (named.is_empty() || named.contains(&d)));
    let mut pools = vec![Pool::new(1).expect("a pool")];
    if default_threads() > 1 {
        pools.push(Pool::new(default_threads()).expect("a pool"));
    }
    println!("level {level}");
    for pool in &pools {
        println!("read bandwidth, {} threads: {:.1} GB/s", pool.n_threads(), read_bandwidth(pool));
    }
    println!("{:7} {:18} {:>8} {:>8} {:>12}", "type", "layout", "threads", "GB/s", "GFLOP/s");
    for dtype in dtypes {
        measure(level, dtype, &pools);
    }
}

fn measure(level: Level, dtype: DType, pools: &[Pool]) {
    let row_bytes = dtype.bytes_for(K).expect("whole blocks");
    let n_rows = WEIGHT_BYTES / row_bytes / 64 * 64;
    let bytes = random_bytes(n_rows * row_bytes);
    let file = WeightMatrix::new(dtype, &bytes, n_rows, K, row_bytes).expect("a matrix");
    let begin = Instant::now();
    let packed = pack(&pools[pools.len() - 1], level, &file).expect("a packed matrix");
    let pack_gb_s = bytes.len() as f64 / begin.elapsed().as_secs_f64() / 1e9;
    for w in [file, packed.matrix()] {
        for pool in pools {
            let gb_s = {
                let time = time_product(pool, level, &w, 1);
                bytes.len() as f64 / time.as_secs_f64() / 1e9
            };
            // A part of the rows is enough for a long computation.
            let n_part = 4096.min(n_rows);
            let part = part_of(&w, &bytes, n_part, row_bytes, pool, level);
            let part = part.as_ref().map_or_else(
                || WeightMatrix::new(dtype, &bytes[..n_part * row_bytes], n_part, K, row_bytes).expect("a matrix"),
                |p| p.matrix(),
            );
            let time = time_product(pool, level, &part, PREFILL);
            let gflop_s = 2.0 * (n_part * K * PREFILL) as f64 / time.as_secs_f64() / 1e9;
            println!(
                "{:7} {:18} {:>8} {:>8.1} {:>12.1}",
                dtype.name(),
                w.layout_name(),
                pool.n_threads(),
                gb_s,
                gflop_s
            );
        }
    }
    println!("{:7} packed at {pack_gb_s:.1} GB/s", dtype.name());
}

fn part_of(
    w: &WeightMatrix<'_>,
    bytes: &[u8],
    n_rows: usize,
    row_bytes: usize,
    pool: &Pool,
    level: Level,
) -> Option<refrain_cpu::simd::Packed> {
    if !w.is_packed() {
        return None;
    }
    pack(pool, level, &WeightMatrix::new(w.dtype(), &bytes[..n_rows * row_bytes], n_rows, K, row_bytes).ok()?)
}

/// The median time of a product of `m` rows.
fn time_product(pool: &Pool, level: Level, w: &WeightMatrix<'_>, m: usize) -> Duration {
    let kind = w.act_kind();
    let row_bytes = act_bytes(kind, K).expect("whole blocks");
    let mut prepared = vec![0; m * row_bytes];
    let x: Vec<f32> = (0..K).map(|i| (i as f32 * 0.37).sin()).collect();
    for row in prepared.chunks_exact_mut(row_bytes) {
        quantize_row(level, kind, &x, row).expect("a prepared row");
    }
    let acts = Acts::new(kind, m, K, &prepared).expect("activations");
    let mut out = vec![0f32; m * w.n_rows()];
    let _step = pool.step();
    let mut times: Vec<Duration> = (0..9)
        .map(|_| {
            let begin = Instant::now();
            matmul_parallel(pool, level, &acts, &mut [Product { w: *w, out: &mut out }]);
            begin.elapsed()
        })
        .collect();
    black_box(&out);
    times.sort();
    times[times.len() / 2]
}

/// GB/s of a plain sum over memory, the best of several.
fn read_bandwidth(pool: &Pool) -> f64 {
    let data = vec![1u64; WEIGHT_BYTES / 8];
    let best = (0..7)
        .map(|_| {
            let begin = Instant::now();
            pool.run(|thread_idx, n_threads| {
                let part = &data[static_range(data.len(), 512, thread_idx, n_threads)];
                let mut sums = [0u64; 32];
                for chunk in part.chunks_exact(32) {
                    for (sum, x) in sums.iter_mut().zip(chunk) {
                        *sum = sum.wrapping_add(*x);
                    }
                }
                black_box(sums);
            });
            begin.elapsed()
        })
        .min()
        .expect("seven runs");
    (WEIGHT_BYTES as f64) / best.as_secs_f64() / 1e9
}

/// Bytes that are valid blocks of any type, though their scales may be large: half floats that are not infinite.
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
