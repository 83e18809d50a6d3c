//! Times launches on a GPU. These tests print; they only assert that the launches run.
#![allow(unreachable_pub, dead_code, reason = "the bed is shared with tests that use more of it")]

mod bed;

use std::time::Instant;

use bed::{Bed, dense, i32s};
use refrain_driver::{MemoryLayout, Method, RecordOptions};
use refrain_graph::{Attention, Rope, RopeStyle};
use refrain_kernels::{AttendArgs, attend_counter_bytes, attend_scratch_bytes, attend_splits};
use refrain_tensor::DType;

/// Dependent launches per recording, over enough caches to keep the L2 cache cold.
const N_LAUNCHES: usize = 64;
const N_LAYERS: usize = 16;
const N_REPLAYS: u32 = 5;

#[test]
#[cfg_attr(not(feature = "gpu-tests"), ignore = "needs a CUDA device: cargo xtask gpu-bundle")]
fn attend_from_short_to_long_contexts() {
    let mut bed = Bed::gpu();
    for (model, head_dim) in [("llama-3.2-1b", 64), ("llama-3.1-8b", 128)] {
        for dtype in [DType::F16, DType::BF16] {
            for context in [16, 128, 1024, 8192, 32_768] {
                let us = attend_us(&mut bed, dtype, head_dim, context);
                let bytes = (context * 8 * head_dim * 2 * 2) as f64;
                println!(
                    "attend {model} {dtype} at {context:>6}: {us:7.2} µs, {:7.1} GB/s",
                    bytes / us / 1e3
                );
            }
        }
    }
}

/// One row, 32 query heads over 8 KV heads, and a cache of 32,768 positions.
fn attend_us(bed: &mut Bed, dtype: DType, head_dim: usize, context: usize) -> f64 {
    let (n_heads, n_kv_heads, kv_block, max_blocks) = (32, 8, 32, 1024);
    let n_splits = attend_splits(1, n_kv_heads, kv_block * max_blocks, bed.ctx.device().info().n_sms);
    let cache_bytes = 2 * max_blocks * n_kv_heads * kv_block * head_dim;
    let mut layout = MemoryLayout::new("speed");
    let mut region = |name: &str, bytes: usize| layout.device(name, bytes as u64);
    let names = ["q", "k", "v", "y", "position", "seq", "table", "inv_freq"];
    let sizes = [n_heads, n_kv_heads, n_kv_heads, n_heads].map(|n| 4 * n * head_dim);
    let sizes = [sizes[0], sizes[1], sizes[2], sizes[3], 4, 4, 4 * max_blocks, 2 * head_dim];
    let regions: Vec<_> = names.iter().zip(sizes).map(|(name, bytes)| region(name, bytes)).collect();
    let scratch = region("scratch", attend_scratch_bytes(1, n_heads, head_dim, n_splits) as usize);
    let counters = region("counters", attend_counter_bytes(1, n_heads, n_splits) as usize);
    let caches: Vec<_> = (0..2 * N_LAYERS).map(|i| region(&format!("cache {i}"), cache_bytes)).collect();
    let memory = bed.plan(&layout);
    let b: Vec<_> = regions.iter().map(|&r| memory.buf(r)).collect();
    let mut lease = memory.lease().unwrap();
    // The contents of the other buffers do not matter.
    bed.stream.upload(&mut lease, b[4], &i32s(&[context as i32 - 1])).unwrap();
    bed.stream.upload(&mut lease, b[5], &i32s(&[0])).unwrap();
    let table: Vec<i32> = (0..max_blocks as i32).map(|i| i * 37 % max_blocks as i32).collect();
    bed.stream.upload(&mut lease, b[6], &i32s(&table)).unwrap();
    let zeros = vec![0; attend_counter_bytes(1, n_heads, n_splits) as usize];
    bed.stream.upload(&mut lease, memory.buf(counters), &zeros).unwrap();
    let launch = |layer: usize| {
        bed.kernels.attend(&AttendArgs {
            rope: Rope { style: RopeStyle::Neox, n_dims: head_dim, magnitude: 1.0 },
            attention: Attention { scale: 0.125, window: None, softcap: None },
            q: dense(b[0], &[1, n_heads, head_dim]),
            kv: Some([1, 2].map(|i| dense(b[i], &[1, n_kv_heads, head_dim]))),
            norm: None,
            sinks: None,
            y: b[3],
            narrow: None,
            k_cache: memory.buf(caches[2 * layer]),
            v_cache: memory.buf(caches[2 * layer + 1]),
            cache_dtype: dtype,
            positions: b[4],
            seqs: b[5],
            tables: b[6],
            inv_freq: b[7],
            scratch: Some(memory.buf(scratch)),
            counters: Some(memory.buf(counters)),
            n: 1,
            n_heads,
            n_blocks: max_blocks,
            n_kv_heads,
            kv_block,
            head_dim,
            n_seqs: 1,
            max_blocks,
            n_splits,
            fills: false,
            early: false,
            step: "attend",
        })
    };
    let launches: Vec<_> = (0..N_LAUNCHES).map(|i| launch(i % N_LAYERS).unwrap()).collect();
    let options = RecordOptions::named("speed");
    let graph = bed
        .stream
        .record(&memory, Method::Stream, &options, |q| launches.iter().try_for_each(|l| q.launch(l)))
        .unwrap();
    let mut y = vec![0; b[3].len() as usize];
    let mut times: Vec<f64> = Vec::new();
    for _ in 0..6 {
        let started = Instant::now();
        for _ in 1..N_REPLAYS {
            graph.replay(&mut lease, &mut bed.stream).unwrap();
        }
        let out = graph.replay(&mut lease, &mut bed.stream).unwrap();
        out.read(&mut bed.stream, b[3], &mut y).unwrap();
        times.push(started.elapsed().as_secs_f64() * 1e6 / f64::from(N_REPLAYS) / N_LAUNCHES as f64);
    }
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}
