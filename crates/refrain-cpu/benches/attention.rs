//! Speed of attention over a KV cache and of the row kernels: `cargo bench -p refrain-cpu --bench attention`.

use std::hint::black_box;
use std::time::{Duration, Instant};

use half::f16;
use refrain_cpu::simd::{self, AttendState, KvBlock, KvRows, Level, Scores, attend_block};

fn main() {
    let level = Level::detect();
    println!("level {level}");
    for (head_dim, n_keys) in [(64, 512), (64, 2048), (128, 2048)] {
        for n_q in [1, 3, 4, 32] {
            attention(level, head_dim, n_keys, n_q);
        }
    }
    let n = 8192;
    let (a, b) = (vec![0.7f32; n], vec![0.3f32; n]);
    let mut out = vec![0f32; n];
    let report = |name: &str, time: Duration| println!("{name:24} {:.2} elements/ns", n as f64 / nanos(time));
    report("rms_norm", low(|| simd::rms_norm(level, &a, &b, 1e-5, &mut out)));
    report("silu_mul", low(|| simd::silu_mul(level, &a, &b, &mut out)));
    report("gelu_tanh_mul", low(|| simd::gelu_tanh_mul(level, &a, &b, &mut out)));
    let mut halves = vec![f16::ZERO; n];
    report("f32_to_f16", low(|| simd::f32_to_f16(level, &a, &mut halves)));
    for kind in [simd::ActKind::Q8, simd::ActKind::Q8K] {
        let mut row = vec![0; simd::act_bytes(kind, n).expect("whole blocks")];
        let time = low(|| simd::quantize_row(level, kind, &a, &mut row).expect("a row"));
        report(&format!("quantize_row {kind:?}"), time);
    }
}

fn attention(level: Level, head_dim: usize, n_keys: usize, n_q: usize) {
    let keys = vec![f16::from_f32(0.1); n_keys * head_dim];
    let values = vec![f16::from_f32(0.2); n_keys * head_dim];
    let q = vec![0.3f32; n_q * head_dim];
    let kv = KvBlock { keys: KvRows::F16(&keys), values: KvRows::F16(&values), stride: head_dim, n_keys };
    let visible = vec![0..n_keys; n_q];
    let (mut max, mut sum, mut acc) = (vec![0.0; n_q], vec![0.0; n_q], vec![0.0; n_q * head_dim]);
    let time = low(|| {
        let mut state = AttendState { max: &mut max, sum: &mut sum, acc: &mut acc };
        state.reset();
        attend_block(level, Scores { scale: 0.1, softcap: None }, &q, head_dim, &kv, &visible, &mut state);
        state.finish(level);
    });
    black_box(&acc);
    let flops = (4 * n_q * n_keys * head_dim) as f64;
    println!(
        "attention head_dim {head_dim} keys {n_keys} queries {n_q:2}: {:6.1} GB/s of cache, {:6.1} GFLOP/s",
        (4 * n_keys * head_dim) as f64 / nanos(time),
        flops / nanos(time),
    );
}

fn nanos(time: Duration) -> f64 {
    time.as_secs_f64() * 1e9
}

/// Returns a low percentile of the time of `f`: interference from other programs only adds time.
fn low(mut f: impl FnMut()) -> Duration {
    let mut times: Vec<Duration> = (0..200)
        .map(|_| {
            let begin = Instant::now();
            f();
            begin.elapsed()
        })
        .collect();
    times.sort();
    times[times.len() / 10]
}
