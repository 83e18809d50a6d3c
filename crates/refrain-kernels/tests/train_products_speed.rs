//! Times the matmuls and the attention of a training step on a GPU. These tests print; they only assert that
//! results exist and are reproducible.
#![allow(unreachable_pub, dead_code, reason = "the bed is shared with tests that use more of it")]

mod bed;

use std::sync::Arc;

use bed::{Bed, i32s, normals, shape};
use refrain_driver::{Buf, DriverError, Launch, Memory, MemoryLayout, Method, Queue, RecordOptions};
use refrain_graph::SpanAttention;
use refrain_kernels::{
    BlasLt, BufView, MatMulArgs, SpanArgs, SpanGradArgs, library_product, span_grad_scratch_bytes,
};
use refrain_tensor::{DType, Layout};
use refrain_testkit::encode;

/// Launches per recording.
const TURNS: usize = 20;

/// Device buffers filled with normal numbers.
struct Buffers {
    memory: Arc<Memory>,
    bufs: Vec<Buf>,
}

fn buffers(bed: &mut Bed, sizes: &[(&str, u64)]) -> Buffers {
    let mut layout = MemoryLayout::new("train");
    let regions: Vec<_> = sizes.iter().map(|&(name, bytes)| layout.device(name, bytes)).collect();
    let memory = bed.plan(&layout);
    let bufs: Vec<Buf> = regions.into_iter().map(|r| memory.buf(r)).collect();
    Buffers { memory, bufs }
}

fn fill(bed: &mut Bed, buffers: &Buffers, buf: Buf, dtype: DType, seed: u64) {
    let mut lease = buffers.memory.lease().unwrap();
    let some = encode(dtype, &normals(1 << 16, seed));
    let mut bytes = some.repeat(buf.len() as usize / some.len() + 1);
    bytes.truncate(buf.len() as usize);
    bed.stream.upload(&mut lease, buf, &bytes).unwrap();
}

/// Milliseconds per operation that a closure enqueues, recorded many times in one graph: the minimum of
/// several replays.
fn time(bed: &mut Bed, buffers: &Buffers, f: impl Fn(&mut dyn Queue) -> Result<(), DriverError>) -> f64 {
    let mut lease = buffers.memory.lease().unwrap();
    bed.stream.run(&mut lease, false, |q| f(q)).unwrap();
    let options = RecordOptions::named("timing");
    let graph = bed
        .stream
        .record(&buffers.memory, Method::Stream, &options, |q| (0..TURNS).try_for_each(|_| f(q)))
        .unwrap();
    let mut fastest = f64::INFINITY;
    for _ in 0..5 {
        let (start, end) = (bed.ctx.event().unwrap(), bed.ctx.event().unwrap());
        bed.stream.record_event(&start).unwrap();
        graph.replay(&mut lease, &mut bed.stream).unwrap();
        bed.stream.record_event(&end).unwrap();
        bed.stream.synchronize().unwrap();
        fastest = fastest.min(f64::from(end.ms_since(&start).unwrap()) / TURNS as f64);
    }
    fastest
}

/// The contents of a buffer after some launches.
fn result(
    bed: &mut Bed,
    buffers: &Buffers,
    buf: Buf,
    f: impl Fn(&mut dyn Queue) -> Result<(), DriverError>,
) -> Vec<u8> {
    let mut lease = buffers.memory.lease().unwrap();
    bed.stream.run(&mut lease, false, |q| q.fill(buf, 0xff)).unwrap();
    let out = bed.stream.run(&mut lease, false, |q| f(q)).unwrap();
    out.values(&mut bed.stream, buf).unwrap()
}

/// Input and output columns of a Llama layer's matmuls and of the head.
fn products(width: usize, ffn: usize, vocab: usize) -> [(&'static str, usize, usize); 4] {
    [("q k v o", width, width), ("gate up", width, ffn), ("down", ffn, width), ("head", width, vocab)]
}

#[test]
#[cfg_attr(not(feature = "gpu-tests"), ignore = "needs a CUDA device: cargo xtask gpu-bundle")]
fn training_products_are_timed() {
    let mut bed = Bed::gpu();
    let blas = BlasLt::open(&bed.ctx, None).unwrap();
    println!("{blas:?}");
    for (rows, width, ffn, vocab) in [(16_384, 768, 2048, 32_000), (8192, 320, 896, 4096)] {
        for (name, ins, outs) in products(width, ffn, vocab) {
            for (layout, m, k, n) in
                [("NT", rows, ins, outs), ("NN", rows, outs, ins), ("TN", outs, rows, ins)]
            {
                product_times(&mut bed, &blas, name, layout, [m, k, n]);
            }
        }
    }
}

/// Layout of a factor, stored directly or transposed.
fn factor(turned: bool, rows: usize, cols: usize) -> Layout {
    let stored = if turned { [cols, rows] } else { [rows, cols] };
    let layout = Layout::contiguous(shape(&stored));
    if turned { layout.transpose().unwrap() } else { layout }
}

fn product_times(bed: &mut Bed, blas: &Arc<BlasLt>, name: &str, layout: &str, [m, k, n]: [usize; 3]) {
    let dtype = DType::BF16;
    let bytes = |a: usize, b: usize| 2 * (a * b) as u64;
    let sizes =
        [("a", bytes(m, k)), ("b", bytes(k, n)), ("y", bytes(m, n)), ("workspace", BlasLt::WORKSPACE_BYTES)];
    let buffers = buffers(bed, &sizes);
    let [a, b, y, workspace] = buffers.bufs[..] else { unreachable!() };
    fill(bed, &buffers, a, dtype, 1);
    fill(bed, &buffers, b, dtype, 2);
    let (a_layout, b_layout) = (factor(layout.starts_with('T'), m, k), factor(layout.ends_with('T'), k, n));
    let view = |buf, layout| BufView { buf, dtype, layout };
    let args = MatMulArgs { a: view(a, a_layout), b: view(b, b_layout), y, c: None, step: "own" };
    let own = bed.kernels.matmul(&args).unwrap();
    let shape = library_product(&a_layout, &b_layout, dtype).unwrap();
    let library = blas.product(shape, [a, b, y, workspace], "library").unwrap();
    let times = {
        let mut lease = buffers.memory.lease().unwrap();
        library.measure(&mut bed.stream, &buffers.memory, &mut lease).unwrap().unwrap()
    };
    let flops = 2.0 * m as f64 * k as f64 * n as f64;
    let tflops = |ms: f64| flops / ms / 1e9;
    let (by_library, by_own) =
        (time(bed, &buffers, |q| library.enqueue(q)), time(bed, &buffers, |q| q.launch(&own)));
    println!(
        "{layout} {name:<8} {m:>6} x {k:>6} x {n:>6}: cuBLASLt {by_library:.4} ms ({:.0} TFLOPS; algorithm {} of {:.4?}), own {by_own:.4} ms ({:.0})",
        tflops(by_library),
        times.chosen,
        times.ms,
        tflops(by_own)
    );
    let first = result(bed, &buffers, y, |q| library.enqueue(q));
    assert_eq!(
        first,
        result(bed, &buffers, y, |q| library.enqueue(q)),
        "{layout} {m} x {k} x {n} by the library"
    );
    let ours = result(bed, &buffers, y, |q| q.launch(&own));
    assert_eq!(ours, result(bed, &buffers, y, |q| q.launch(&own)), "{layout} {m} x {k} x {n}");
    let (library, own) = (bed::decode(dtype, &first), bed::decode(dtype, &ours));
    let most = own.iter().fold(0.0_f32, |a, b| a.max(b.abs()));
    let off = own.iter().zip(&library).fold(0.0_f32, |a, (b, c)| a.max((b - c).abs()));
    assert!(off <= 1e-2 * most, "{layout} {m} x {k} x {n}: off by {off} of {most}");
}

#[test]
#[cfg_attr(not(feature = "gpu-tests"), ignore = "needs a CUDA device: cargo xtask gpu-bundle")]
fn training_attention_is_timed() {
    let mut bed = Bed::gpu();
    let base = Shape { dtype: DType::BF16, documents: 16, len: 1024, heads: [12, 12], head_dim: 64 };
    let shapes = [
        base,
        Shape { documents: 32, len: 256, heads: [5, 5], ..base },
        Shape { heads: [12, 4], ..base },
        Shape { documents: 4, len: 4096, ..base },
        Shape { documents: 4, len: 2048, heads: [32, 8], head_dim: 128, ..base },
        Shape { dtype: DType::F32, documents: 32, len: 256, heads: [5, 5], ..base },
    ];
    shapes.into_iter().for_each(|shape| attention_times(&mut bed, shape));
}

/// The computation of the test above, where timing is impossible.
#[test]
fn attention_has_the_same_bits_every_time_on_the_simulated_device() {
    let shape = Shape { dtype: DType::BF16, documents: 2, len: 7, heads: [4, 2], head_dim: 16 };
    attention_times(&mut Bed::sim(), shape);
}

#[derive(Clone, Copy, Debug)]
struct Shape {
    dtype: DType,
    documents: usize,
    len: usize,
    heads: [usize; 2],
    head_dim: usize,
}

fn attention_times(bed: &mut Bed, s: Shape) {
    let (n, [n_heads, n_kv_heads], d, dtype) = (s.documents * s.len, s.heads, s.head_dim, s.dtype);
    let bytes = |heads: usize| (n * heads * d * dtype.block_bytes()) as u64;
    let (of_q, of_k) = (bytes(n_heads), bytes(n_kv_heads));
    let words = 4 * (n * n_heads) as u64;
    let sizes = [
        ("dy", of_q),
        ("q", of_q),
        ("k", of_k),
        ("v", of_k),
        ("spans", 8 * n as u64),
        ("y", of_q),
        ("lse", words),
        ("dq", of_q),
        ("dk", of_k),
        ("dv", of_k),
        ("scratch", span_grad_scratch_bytes(n, n_heads)),
    ];
    let buffers = buffers(bed, &sizes);
    let [dy, q, k, v, spans, y, lse, dq, dk, dv, scratch] = buffers.bufs[..] else { unreachable!() };
    for (seed, buf) in [dy, q, k, v].into_iter().enumerate() {
        fill(bed, &buffers, buf, dtype, seed as u64);
    }
    {
        let mut lease = buffers.memory.lease().unwrap();
        let span = |i: usize| [(i / s.len * s.len) as i32, ((i / s.len + 1) * s.len) as i32];
        let all: Vec<i32> = (0..n).flat_map(span).collect();
        bed.stream.upload(&mut lease, spans, &i32s(&all)).unwrap();
    }
    let view = |buf, heads| BufView::dense(buf, dtype, shape(&[n, heads, d]));
    let attention = SpanAttention { scale: (d as f32).powf(-0.5), causal: true, window: None, softcap: None };
    let (of_queries, of_keys, of_values) = (view(q, n_heads), view(k, n_kv_heads), view(v, n_kv_heads));
    let forward = bed
        .kernels
        .span_attention(&SpanArgs {
            attention,
            q: of_queries,
            k: of_keys,
            v: of_values,
            spans,
            y,
            lse,
            step: "forward",
        })
        .unwrap();
    let mut backward: Vec<Launch> = Vec::new();
    let args = SpanGradArgs {
        attention,
        dy: view(dy, n_heads),
        q: of_queries,
        k: of_keys,
        v: of_values,
        spans,
        y: view(y, n_heads),
        lse,
        dq,
        dk,
        dv,
        scratch,
        step: "backward",
    };
    bed.kernels.span_attention_grad(&args, &mut backward).unwrap();
    // The causal half of the square takes two matmuls, and five for the gradient, which executes seven.
    let flops = 4.0 * (s.documents * n_heads * d) as f64 * (s.len as f64).powi(2) / 2.0;
    let tflops = |times: f64, ms: f64| times * flops / ms / 1e9;
    let ms = time(bed, &buffers, |q| q.launch(&forward));
    let mut line = format!("{s:?}: forward {ms:.4} ms ({:.0} TFLOPS)", tflops(1.0, ms));
    let parts: Vec<f64> = backward.iter().map(|launch| time(bed, &buffers, |q| q.launch(launch))).collect();
    let ms = time(bed, &buffers, |q| backward.iter().try_for_each(|launch| q.launch(launch)));
    line += &format!(
        ", backward {ms:.4} ms ({:.0} TFLOPS): sums {:.4}, keys {:.4} ({:.0} done), queries {:.4} ({:.0} done)",
        tflops(2.5, ms),
        parts[0],
        parts[1],
        tflops(2.0, parts[1]),
        parts[2],
        tflops(1.5, parts[2])
    );
    println!("{line}");
    for buf in [dq, dk, dv] {
        let run = |q: &mut dyn Queue| backward.iter().try_for_each(|launch| q.launch(launch));
        let first = result(bed, &buffers, buf, run);
        assert!(bed::decode(dtype, &first).iter().all(|v| v.is_finite()), "{s:?}");
        assert_eq!(first, result(bed, &buffers, buf, run), "{s:?}");
    }
}
