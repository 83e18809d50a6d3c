//! Speed of the encoders: `cargo bench -p refrain-cpu --bench encode`.
//!
//! Prints nanoseconds per element for each quantised type, without and with importance, on one thread. Argument:
//! `level=NAME` to force a level.

use std::hint::black_box;
use std::time::Instant;

use refrain_cpu::simd::{Level, encode_rows};
use refrain_tensor::DType;
use refrain_tensor::quant::can_encode;

const ROW: usize = 2048;
const N_ROWS: usize = 128;

fn main() {
    let forced = std::env::args().find_map(|a| a.strip_prefix("level=").map(str::to_owned));
    let level = match forced {
        None => Level::detect(),
        Some(name) => Level::by_name(&name).expect("a level of this processor"),
    };
    println!("level {level}");
    println!("{:>8} {:>10} {:>10}", "ns", "", "importance");
    let mut state = 1u64;
    let mut uniform = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 33) as f64 + 0.5) / (1u64 << 31) as f64
    };
    let mut normal = || ((-2.0 * uniform().ln()).sqrt() * (std::f64::consts::TAU * uniform()).cos()) as f32;
    let values: Vec<f32> = (0..N_ROWS * ROW).map(|_| normal() * 0.02).collect();
    let importance: Vec<f32> = (0..ROW).map(|_| 0.01 + normal().abs()).collect();
    for dtype in DType::ALL.into_iter().filter(|&dtype| dtype.is_quantized() && can_encode(dtype)) {
        let [plain, weighted] = [None, Some(&importance[..])].map(|i| measure(level, dtype, &values, i));
        println!("{dtype:>8} {plain:>10.2} {weighted:>10.2}");
    }
}

fn measure(level: Level, dtype: DType, values: &[f32], importance: Option<&[f32]>) -> f64 {
    let mut out = vec![0; dtype.bytes_for(values.len()).expect("whole blocks")];
    let mut best = f64::INFINITY;
    for _ in 0..7 {
        let start = Instant::now();
        encode_rows(level, dtype, values, ROW, importance, &mut out).expect("values that can be encoded");
        best = best.min(start.elapsed().as_secs_f64());
        black_box(&out);
    }
    best / values.len() as f64 * 1e9
}
