//! Times the matmuls of a decode step on a GPU, back to back and with a small kernel in each layer. These
//! tests print; they only assert that the launches run.
#![allow(unreachable_pub, dead_code, reason = "the bed is shared with tests that use more of it")]

mod bed;

use std::time::Instant;

use bed::{Bed, dense};
use refrain_driver::{Buf, Launch, MemoryLayout, Method, RecordOptions};
use refrain_graph::Gate;
use refrain_kernels::{ProductArgs, ProductWeight, RmsNormArgs, packed_bytes};
use refrain_tensor::DType;

const N_REPLAYS: u32 = 10;

/// Llama 3.2 1B: number of layers, and rows and columns of a layer's matmuls.
const N_LAYERS: usize = 16;
const HIDDEN: usize = 2048;
const FFN: usize = 8192;
const KV: usize = 512;
const VOCAB: usize = 128_256;

/// Kernel between the QKV projection and the output projection, in the place of attention.
#[derive(Clone, Copy, Debug)]
enum Between {
    Nothing,
    /// A kernel of this many small blocks.
    Blocks(usize),
}

#[test]
#[cfg_attr(not(feature = "gpu-tests"), ignore = "needs a CUDA device: cargo xtask gpu-bundle")]
fn decode_products_are_timed_alone_and_with_a_small_kernel_in_each_layer() {
    let mut bed = Bed::gpu();
    for (dtype, head) in [(DType::BF16, DType::BF16), (DType::Q8_0, DType::Q8_0), (DType::Q4_K, DType::Q6_K)]
    {
        for between in [Between::Nothing, Between::Blocks(8), Between::Blocks(32), Between::Blocks(132)] {
            let (ms, bytes) = step_ms(&mut bed, dtype, head, between);
            println!("products {dtype} with {between:?}: {ms:.4} ms, {:.0} GB/s", bytes as f64 / ms / 1e6);
        }
    }
}

fn weight_bytes(dtype: DType, n: usize, k: usize) -> u64 {
    let bytes = if dtype.is_quantized() { packed_bytes(dtype, n, k) } else { dtype.bytes_for(n * k) };
    (bytes.unwrap() as u64).next_multiple_of(256)
}

/// Rows and columns of a layer's matmuls: QKV, output, gate and up, down.
const LAYER: [(&[usize], usize); 4] =
    [(&[HIDDEN, KV, KV], HIDDEN), (&[HIDDEN], HIDDEN), (&[FFN, FFN], HIDDEN), (&[HIDDEN], FFN)];

/// Allocates consecutive parts of one region.
struct Weights {
    all: Buf,
    next: u64,
}

impl Weights {
    fn take(&mut self, dtype: DType, n: usize, k: usize) -> Buf {
        let bytes = weight_bytes(dtype, n, k);
        self.next += bytes;
        self.all.slice(self.next - bytes, bytes).unwrap()
    }
}

fn step_ms(bed: &mut Bed, dtype: DType, head: DType, between: Between) -> (f64, u64) {
    let of_layer: u64 = LAYER.iter().flat_map(|(ns, k)| ns.iter().map(|n| weight_bytes(dtype, *n, *k))).sum();
    let bytes = N_LAYERS as u64 * of_layer + weight_bytes(head, VOCAB, HIDDEN);
    let mut layout = MemoryLayout::new("speed");
    let weights = layout.device("weights", bytes);
    // Two of each, used alternately, so that no launch reads what it writes.
    let rows: Vec<_> = (0..8).map(|i| layout.device(format!("row {i}").as_str(), 4 * VOCAB as u64)).collect();
    let memory = bed.plan(&layout);
    let mut lease = memory.lease().unwrap();
    let all = memory.buf(weights);
    bed.stream.run(&mut lease, false, |q| q.fill(all, 0x2c)).unwrap();
    let row: Vec<Buf> = rows.iter().map(|&r| memory.buf(r)).collect();
    row.iter().for_each(|&r| bed.stream.run(&mut lease, false, |q| q.fill(r, 0x3c)).map(drop).unwrap());
    let launches = launches(bed, Weights { all, next: 0 }, &row, [dtype, head], between);
    let options = RecordOptions::named("speed");
    let graph = bed
        .stream
        .record(&memory, Method::Stream, &options, |q| launches.iter().try_for_each(|l| q.launch(l)))
        .unwrap();
    let mut times = Vec::new();
    let mut last = [0; 16];
    for _ in 0..6 {
        let started = Instant::now();
        for _ in 1..N_REPLAYS {
            graph.replay(&mut lease, &mut bed.stream).unwrap();
        }
        let out = graph.replay(&mut lease, &mut bed.stream).unwrap();
        out.read(&mut bed.stream, row[0].slice(0, 16).unwrap(), &mut last).unwrap();
        times.push(started.elapsed().as_secs_f64() * 1e3 / f64::from(N_REPLAYS));
    }
    times.sort_by(f64::total_cmp);
    (times[times.len() / 2], bytes)
}

fn launches(
    bed: &Bed,
    mut weights: Weights,
    row: &[Buf],
    [dtype, head]: [DType; 2],
    between: Between,
) -> Vec<Launch> {
    let mut launches = Vec::new();
    let (mut turn, mut previous_tail) = (0, None);
    let mut product = |ns: &[usize], k: usize, dtype: DType, is_normed: bool, gate: Option<Gate>| {
        turn ^= 1;
        let part = |(i, &n): (usize, &usize)| ProductWeight {
            w: weights.take(dtype, n, k),
            dtype,
            bias: None,
            y: row[if i == 0 { turn } else { 1 + i }],
            n,
        };
        let parts: Vec<ProductWeight> = ns.iter().enumerate().map(part).collect();
        let args = ProductArgs {
            a: row[if is_normed { 4 + turn } else { turn ^ 1 }],
            b: is_normed.then_some(row[turn ^ 1]),
            inner: None,
            norm: is_normed.then_some(row[6]),
            eps: 1e-5,
            sum: is_normed.then_some(row[5 - turn]),
            parts: &parts,
            gate,
            k,
            previous_tail: previous_tail.take(),
            step: "product",
        };
        if gate.is_some() {
            previous_tail = bed.kernels.product_tail_bytes(&args).unwrap();
        }
        bed.kernels.product(&args).unwrap()
    };
    for _ in 0..N_LAYERS {
        for (i, (ns, k)) in LAYER.into_iter().enumerate() {
            let gate = (i == 2).then_some(Gate::Silu);
            launches.push(product(ns, k, dtype, i % 2 == 0, gate));
            if let (0, Between::Blocks(n_rows)) = (i, between) {
                let args = RmsNormArgs {
                    x: dense(row[2], &[n_rows, 64]),
                    w: row[6],
                    y: row[7],
                    n_rows,
                    n_cols: 64,
                    eps: 1e-5,
                    step: "small",
                };
                launches.push(bed.kernels.rms_norm(&args).unwrap());
            }
        }
    }
    launches.push(product(&[VOCAB], HIDDEN, head, true, None));
    launches
}
