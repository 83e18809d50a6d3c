//! Speed of matrix products of values: `cargo bench -p refrain-cpu --bench gemm`.
//!
//! Prints GFLOP/s for the matrix products of a training step of a small model, forward and backward, with one
//! thread and with all, next to the peak of a loop of `fma`. Argument: `level=NAME` to force a level.

use std::hint::black_box;
use std::sync::LazyLock;
use std::time::Instant;

use refrain_cpu::pool::{Pool, default_threads};
use refrain_cpu::simd::{Factor, Level, Rounded, gemm, gemm_scratch};
use refrain_tensor::DType;

fn main() {
    let forced = std::env::args().find_map(|a| a.strip_prefix("level=").map(str::to_owned));
    let level = match forced {
        None => Level::detect(),
        Some(name) => Level::by_name(&name).expect("a level of this processor"),
    };
    println!("level {level}");
    println!("{:>22} {:>4} {:>5} {:>8} {:>9}", "m x k x n", "", "dtype", "threads", "GFLOP/s");
    for n_threads in [1, default_threads()] {
        let pool = Pool::new(n_threads).expect("a pool");
        let _step = pool.step();
        // Rows by a weight, gradients of the rows, gradients of the weight.
        for (layout, m, k, n) in [
            ("NT", 8192, 320, 896),
            ("NT", 8192, 896, 320),
            ("NN", 8192, 896, 320),
            ("TN", 896, 8192, 320),
            ("NT", 2048, 320, 8192),
            ("NN", 2048, 8192, 320),
        ] {
            for dtype in [DType::F32, DType::BF16] {
                let speed = measure(&pool, level, layout, [m, k, n], dtype);
                let sizes = format!("{m} x {k} x {n}");
                println!("{sizes:>22} {layout:>4} {dtype:>5} {n_threads:>8} {speed:>9.1}");
            }
        }
    }
}

fn measure(pool: &Pool, level: Level, layout: &str, [m, k, n]: [usize; 3], dtype: DType) -> f64 {
    let size = dtype.block_bytes();
    let values = |len: usize| -> Vec<u32> { vec![0x3f80_3f80; (len * size).div_ceil(4)] };
    let (a, b) = (values(m * k), values(k * n));
    let mut out = values(m * n);
    let mut scratch = vec![0f32; gemm_scratch(k, n, pool.n_threads())];
    let factor = |bytes, len, is_turned: bool| {
        let (stride, k_stride) = if is_turned { (1, len) } else { (k, 1) };
        Factor { dtype, bytes, offset: 0, len, stride, k, k_stride }
    };
    let left = factor(bytes(&a), m, layout.starts_with('T'));
    let right = factor(bytes(&b), n, layout.ends_with('N'));
    let mut best = f64::INFINITY;
    for _ in 0..5 {
        let start = now(pool);
        let out = Rounded { dtype, bytes: &mut bytemuck::cast_slice_mut(&mut out)[..m * n * size] };
        gemm(pool, level, &left, &right, out, &mut scratch);
        best = best.min(now(pool) - start);
    }
    black_box(&out);
    2.0 * (m * k * n) as f64 / best / 1e9
}

/// Returns seconds: CPU time for one thread, so that other programs do not count, otherwise wall time.
fn now(pool: &Pool) -> f64 {
    static START: LazyLock<Instant> = LazyLock::new(Instant::now);
    let ran = || std::fs::read_to_string("/proc/thread-self/schedstat").ok()?.split(' ').next()?.parse().ok();
    let ran: Option<f64> = if pool.n_threads() == 1 { ran() } else { None };
    ran.map_or_else(|| START.elapsed().as_secs_f64(), |ns| ns / 1e9)
}

fn bytes(words: &[u32]) -> &[u8] {
    bytemuck::cast_slice(words)
}
