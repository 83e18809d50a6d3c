//! Times the matmuls of a batched decode step on a GPU, each shape by itself, with weights that no cache
//! holds. These tests print; they only assert that the launches run.
#![allow(unreachable_pub, dead_code, reason = "the bed is shared with tests that use more of it")]

mod bed;

use std::time::Instant;

use bed::Bed;
use refrain_driver::{Buf, Launch, MemoryLayout, Method, RecordOptions};
use refrain_graph::Gate;
use refrain_kernels::{BatchArgs, LinearPart, Narrow, packed_bytes};
use refrain_tensor::DType;

/// Larger than the L2 cache of any GPU.
const WEIGHT_BYTES: u64 = 512 << 20;
const N_REPLAYS: u32 = 4;

struct Shape {
    name: &'static str,
    ns: &'static [usize],
    k: usize,
    gated: bool,
}

const SHAPES: [Shape; 9] = [
    Shape { name: "8b qkv", ns: &[4096, 1024, 1024], k: 4096, gated: false },
    Shape { name: "8b output", ns: &[4096], k: 4096, gated: false },
    Shape { name: "8b gate, up", ns: &[14336, 14336], k: 4096, gated: true },
    Shape { name: "8b down", ns: &[4096], k: 14336, gated: false },
    Shape { name: "8b head", ns: &[128_256], k: 4096, gated: false },
    Shape { name: "1b qkv", ns: &[2048, 512, 512], k: 2048, gated: false },
    Shape { name: "1b output", ns: &[2048], k: 2048, gated: false },
    Shape { name: "1b gate, up", ns: &[8192, 8192], k: 2048, gated: true },
    Shape { name: "1b down", ns: &[2048], k: 8192, gated: false },
];

#[test]
#[cfg_attr(not(feature = "gpu-tests"), ignore = "needs a CUDA device: cargo xtask gpu-bundle")]
fn batched_products_are_timed_with_the_chosen_and_other_splits() {
    let mut bed = Bed::gpu();
    for dtype in [DType::BF16, DType::Q4_K, DType::Q6_K, DType::Q8_0] {
        for shape in &SHAPES {
            for m in [8, 16, 32, 64, 128, 256] {
                let plan = bed.kernels.batch_plan(dtype, m, shape.ns, shape.k, shape.gated);
                let Some(chosen) = plan.map(|plan| plan.shape().1) else { continue };
                let mut line = format!("{dtype} {:12} m={m:2}", shape.name);
                let others: &[usize] = if shape.gated || m == 16 { &[] } else { &[1, 2, 4, 8] };
                for splits in [chosen].into_iter().chain(others.iter().copied()) {
                    let (us, gbps) = measure(&mut bed, dtype, shape, m, splits);
                    line += &format!("  {splits:2}: {us:6.1} us {gbps:4.0} GB/s");
                }
                println!("{line}");
            }
        }
    }
}

fn measure(bed: &mut Bed, dtype: DType, shape: &Shape, m: usize, n_splits: usize) -> (f64, f64) {
    let weight_bytes = |n: usize| packed_bytes(dtype, n, shape.k).unwrap_or(2 * n * shape.k) as u64;
    let bytes: u64 = shape.ns.iter().map(|&n| weight_bytes(n).next_multiple_of(256)).sum();
    let copies = (WEIGHT_BYTES / bytes).max(2);
    let n: usize = shape.ns.iter().sum();
    let mut layout = MemoryLayout::new("speed");
    let weights = layout.device("weights", copies * bytes);
    let x = layout.device("x", (2 * 256 * shape.k) as u64);
    let y = layout.device("y", (4 * 256 * n) as u64);
    let scratch = layout.device("scratch", (4 * m * n * 16) as u64);
    let memory = bed.plan(&layout);
    let mut lease = memory.lease().unwrap();
    let [weights, x, y, scratch] = [weights, x, y, scratch].map(|region| memory.buf(region));
    bed.stream.run(&mut lease, false, |q| q.fill(weights, 0x2c)).unwrap();
    bed.stream.run(&mut lease, false, |q| q.fill(x, 0x3c)).unwrap();
    let plan = bed.kernels.batch_plan(dtype, m, shape.ns, shape.k, shape.gated).unwrap();
    let plan = plan.with_splits(n_splits, shape.k);
    let mut launches: Vec<Launch> = Vec::new();
    for copy in 0..copies {
        let (mut at, mut out) = (copy * bytes, 0);
        let mut part = |&n: &usize| {
            let bytes = weight_bytes(n);
            let w = weights.slice(at, bytes).unwrap();
            let y: Buf = y.slice(out, (4 * m * n) as u64).unwrap();
            at += bytes.next_multiple_of(256);
            out += (4 * m * n) as u64;
            LinearPart { w, y, n }
        };
        let parts: Vec<LinearPart> = shape.ns.iter().map(&mut part).collect();
        let to = Narrow { y, dtype: DType::BF16, plane_rows: plan.shape().0, also_wide: false };
        let gate = shape.gated.then_some((Gate::Silu, to));
        let scratch = Some(scratch);
        let args = BatchArgs { x, dtype, parts: &parts, m, k: shape.k, plan, scratch, gate, step: "speed" };
        bed.kernels.batch(&args, &mut launches).unwrap();
    }
    let options = RecordOptions::named("speed");
    let graph = bed
        .stream
        .record(&memory, Method::Stream, &options, |q| launches.iter().try_for_each(|l| q.launch(l)))
        .unwrap();
    let mut times = Vec::new();
    let mut last = [0; 16];
    for _ in 0..4 {
        let started = Instant::now();
        for _ in 1..N_REPLAYS {
            graph.replay(&mut lease, &mut bed.stream).unwrap();
        }
        let out = graph.replay(&mut lease, &mut bed.stream).unwrap();
        out.read(&mut bed.stream, y.slice(0, 16).unwrap(), &mut last).unwrap();
        times.push(started.elapsed().as_secs_f64() * 1e6 / (f64::from(N_REPLAYS) * copies as f64));
    }
    times.sort_by(f64::total_cmp);
    (times[1], bytes as f64 / times[1] / 1e3)
}
