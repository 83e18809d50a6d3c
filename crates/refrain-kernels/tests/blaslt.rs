//! Compares cuBLASLt products with this crate's kernels on a GPU: equal numbers, reproducible bits, and
//! timings.
#![allow(unreachable_pub, reason = "the modules are this test's own")]
#![allow(dead_code, reason = "this test uses a part of the bed")]

mod bed;

use std::sync::Arc;

use bed::{Bed, normals};
use refrain_driver::{Buf, MemoryLayout, Method, Queue, RecordOptions};
use refrain_kernels::{
    BlasLt, BlasLtShape, BufView, DequantArgs, GemmArgs, GemmPlan, LinearPart, MatMulArgs, Narrow,
    library_product, packed_bytes,
};
use refrain_tensor::{DType, Layout as Tensor};
use refrain_testkit::encode;

struct Buffers {
    memory: std::sync::Arc<refrain_driver::Memory>,
    bufs: [Buf; 6],
}

/// Allocates x, w, y, scratch, workspace and wide.
fn buffers(bed: &Bed, m: usize, n: usize, k: usize, scratch: u64) -> Buffers {
    let mut layout = MemoryLayout::new("products");
    let sizes = [
        ("x", 2 * (m * k) as u64),
        ("w", 2 * (n * k) as u64),
        ("y", 4 * (m * n) as u64),
        ("scratch", scratch.max(256)),
        ("workspace", BlasLt::WORKSPACE_BYTES),
        ("wide", 4 * (m * k) as u64),
    ];
    let regions = sizes.map(|(name, bytes)| layout.device(name, bytes));
    let memory = bed.plan(&layout);
    let bufs = regions.map(|r| memory.buf(r));
    Buffers { memory, bufs }
}

#[test]
#[cfg_attr(not(feature = "gpu-tests"), ignore = "needs a CUDA device: cargo xtask gpu-bundle")]
fn a_library_product_agrees_with_ours_and_has_the_same_bits_recorded_and_eager() {
    let mut bed = Bed::gpu();
    let blas = BlasLt::open(&bed.ctx, None).unwrap();
    for dtype in [DType::F16, DType::BF16] {
        for (m, n, k) in [(16, 64, 64), (17, 40, 72), (128, 512, 2048), (512, 2048, 2048)] {
            let plan = GemmPlan::new(m, &[n], k, 132);
            let buffers = buffers(&bed, m, n, k, plan.scratch_bytes(m, n));
            let [x, w, y, scratch, workspace, _] = buffers.bufs;
            let mut lease = buffers.memory.lease().unwrap();
            bed.stream.upload(&mut lease, x, &encode(dtype, &normals(m * k, 1))).unwrap();
            bed.stream.upload(&mut lease, w, &encode(dtype, &normals(n * k, 2))).unwrap();
            let mut launches = Vec::new();
            let parts = &[LinearPart { w, y, n }];
            let args = GemmArgs { x, dtype, parts, m, k, plan, scratch: Some(scratch), step: "own" };
            bed.kernels.gemm(&args, &mut launches).unwrap();
            let out =
                bed.stream.run(&mut lease, true, |q| launches.iter().try_for_each(|l| q.launch(l))).unwrap();
            let own: Vec<f32> = out.values(&mut bed.stream, y).unwrap();

            let product =
                blas.product(BlasLtShape::of_rows(dtype, m, n, k), [x, w, y, workspace], "library").unwrap();
            let out = bed.stream.run(&mut lease, false, |q| product.enqueue(q)).unwrap();
            let library: Vec<f32> = out.values(&mut bed.stream, y).unwrap();
            let most = own.iter().fold(0.0_f32, |a, b| a.max(b.abs()));
            let off = own.iter().zip(&library).fold(0.0_f32, |a, (b, c)| a.max((b - c).abs()));
            assert!(off <= 1e-4 * most, "{dtype} {m} x {n} x {k}: off by {off} of {most}");
            for method in [Method::Stream, Method::Nodes] {
                let options = RecordOptions::named("product");
                let graph =
                    bed.stream.record(&buffers.memory, method, &options, |q| product.enqueue(q)).unwrap();
                for _ in 0..3 {
                    let fill = bed.stream.run(&mut lease, false, |q| q.fill(y, 0xff));
                    fill.unwrap();
                    let out = graph.replay(&mut lease, &mut bed.stream).unwrap();
                    let again: Vec<f32> = out.values(&mut bed.stream, y).unwrap();
                    let same = library.iter().zip(&again).all(|(a, b)| a.to_bits() == b.to_bits());
                    assert!(same, "{method} {dtype} {m} x {n} x {k}");
                }
            }
        }
    }
}

/// Compares a product of values by the library with this crate's kernel.
fn product_of_values(bed: &mut Bed, blas: &Arc<BlasLt>, dtype: DType, a: Tensor, b: Tensor) {
    let name = format!("{dtype} {a:?} by {b:?}");
    let shape = library_product(&a, &b, dtype).unwrap_or_else(|e| panic!("{name}: {e}"));
    let n_results = shape.n_batch * shape.m * shape.n;
    let size = dtype.block_bytes();
    let mut layout = MemoryLayout::new("values");
    let sizes = [
        ("a", size * a.end()),
        ("b", size * b.end()),
        ("y", size * n_results),
        ("workspace", BlasLt::WORKSPACE_BYTES as usize),
    ];
    let regions = sizes.map(|(name, bytes)| layout.device(name, bytes as u64));
    let memory = bed.plan(&layout);
    let [left, right, y, workspace] = regions.map(|r| memory.buf(r));
    let mut lease = memory.lease().unwrap();
    for (buf, layout, seed) in [(left, &a, 1), (right, &b, 2)] {
        bed.stream.upload(&mut lease, buf, &encode(dtype, &normals(layout.end(), seed))).unwrap();
    }
    let view = |buf, layout| BufView { buf, dtype, layout };
    let args = MatMulArgs { a: view(left, a), b: view(right, b), y, c: None, step: "own" };
    let own = bed.kernels.matmul(&args).unwrap();
    let out = bed.stream.run(&mut lease, false, |q| q.launch(&own)).unwrap();
    let bytes: Vec<u8> = out.values(&mut bed.stream, y).unwrap();
    let ours = bed::decode(dtype, &bytes);
    let from = |buf: Buf, layout: &Tensor| {
        let start = (size * layout.offset()) as u64;
        buf.slice(start, buf.len() - start).unwrap()
    };
    let product = match blas.product(shape, [from(left, &a), from(right, &b), y, workspace], "library") {
        Ok(product) => product,
        // Plans check first and use the kernel in this case.
        Err(refused) => return println!("{name}: {refused}"),
    };
    bed.stream.run(&mut lease, false, |q| q.fill(y, 0xff)).unwrap();
    let out = bed.stream.run(&mut lease, false, |q| product.enqueue(q)).unwrap();
    let eager: Vec<u8> = out.values(&mut bed.stream, y).unwrap();
    let library = bed::decode(dtype, &eager);
    let most = ours.iter().fold(0.0_f32, |a, b| a.max(b.abs()));
    let off = ours.iter().zip(&library).fold(0.0_f32, |a, (b, c)| a.max((b - c).abs()));
    assert!(off <= if dtype == DType::F32 { 1e-5 } else { 1e-2 } * most, "{name}: off by {off} of {most}");
    for method in [Method::Stream, Method::Nodes] {
        let options = RecordOptions::named("product");
        let graph = bed.stream.record(&memory, method, &options, |q| product.enqueue(q)).unwrap();
        bed.stream.run(&mut lease, false, |q| q.fill(y, 0xff)).unwrap();
        let out = graph.replay(&mut lease, &mut bed.stream).unwrap();
        let again: Vec<u8> = out.values(&mut bed.stream, y).unwrap();
        assert_eq!(again, eager, "{name} by {method}");
    }
}

#[test]
#[cfg_attr(not(feature = "gpu-tests"), ignore = "needs a CUDA device: cargo xtask gpu-bundle")]
fn a_library_product_of_values_agrees_with_ours_in_every_layout() {
    let mut bed = Bed::gpu();
    let blas = BlasLt::open(&bed.ctx, None).unwrap();
    let dense = bed::contiguous;
    let turned = |dims: &[usize]| dense(dims).transpose().unwrap();
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for (m, k, n) in [(64, 64, 128), (72, 136, 136), (67, 70, 131), (5, 33, 7)] {
            product_of_values(&mut bed, &blas, dtype, dense(&[m, k]), dense(&[k, n]));
            product_of_values(&mut bed, &blas, dtype, dense(&[m, k]), turned(&[n, k]));
            product_of_values(&mut bed, &blas, dtype, turned(&[k, m]), dense(&[k, n]));
            product_of_values(&mut bed, &blas, dtype, turned(&[k, m]), turned(&[n, k]));
        }
        for start in [8, 3] {
            let part = dense(&[40, 96]).slice(1, start, 72).unwrap();
            product_of_values(&mut bed, &blas, dtype, part, dense(&[72, 130]));
        }
        product_of_values(&mut bed, &blas, dtype, dense(&[3, 16, 24]), dense(&[3, 24, 40]));
        product_of_values(&mut bed, &blas, dtype, dense(&[3, 5, 7]), dense(&[3, 7, 9]));
        product_of_values(&mut bed, &blas, dtype, dense(&[16, 24]), dense(&[3, 24, 40]));
        product_of_values(&mut bed, &blas, dtype, dense(&[3, 16, 24]), dense(&[24, 40]));
    }
}

#[test]
#[cfg_attr(not(feature = "gpu-tests"), ignore = "needs a CUDA device: cargo xtask gpu-bundle")]
fn a_measured_product_has_the_same_bits_with_every_handle_of_the_process() {
    let mut bed = Bed::gpu();
    let (m, k, n) = (1024, 320, 896);
    let dtype = DType::BF16;
    let mut layout = MemoryLayout::new("measured");
    let sizes = [2 * m * k, 2 * k * n, 2 * m * n, BlasLt::WORKSPACE_BYTES as usize];
    let regions = sizes.map(|bytes| layout.device("values", bytes as u64));
    let memory = bed.plan(&layout);
    let bufs @ [a, b, y, _] = regions.map(|r| memory.buf(r));
    let mut lease = memory.lease().unwrap();
    for (buf, len, seed) in [(a, m * k, 1), (b, k * n, 2)] {
        bed.stream.upload(&mut lease, buf, &encode(dtype, &normals(len, seed))).unwrap();
    }
    let shape = library_product(&bed::contiguous(&[m, k]), &bed::contiguous(&[k, n]), dtype).unwrap();
    let mut bits: Vec<Vec<u8>> = Vec::new();
    for turn in 0..2 {
        let blas = BlasLt::open(&bed.ctx, None).unwrap();
        let product = blas.product(shape, bufs, "measured").unwrap();
        let times = product.measure(&mut bed.stream, &memory, &mut lease).unwrap();
        println!("{times:?}");
        assert_eq!(times.is_some(), turn == 0, "it is measured only once: {times:?}");
        if let Some(times) = times {
            assert!(times.chosen < times.ms.len() && times.ms.iter().all(|ms| *ms < 100.0), "{times:?}");
        }
        bed.stream.run(&mut lease, false, |q| q.fill(y, 0xff)).unwrap();
        let out = bed.stream.run(&mut lease, false, |q| product.enqueue(q)).unwrap();
        bits.push(out.values(&mut bed.stream, y).unwrap());
        let graph = bed
            .stream
            .record(&memory, Method::Stream, &RecordOptions::named("measured"), |q| product.enqueue(q))
            .unwrap();
        bed.stream.run(&mut lease, false, |q| q.fill(y, 0xff)).unwrap();
        let out = graph.replay(&mut lease, &mut bed.stream).unwrap();
        bits.push(out.values(&mut bed.stream, y).unwrap());
    }
    assert!(bits.iter().all(|some| *some == bits[0]));
}

const TURNS: usize = 20;

/// Microseconds per operation that a closure enqueues, recorded many times in one graph.
fn time(
    bed: &mut Bed,
    buffers: &Buffers,
    f: impl Fn(&mut dyn Queue) -> Result<(), refrain_driver::DriverError>,
) -> f64 {
    let mut lease = buffers.memory.lease().unwrap();
    bed.stream.run(&mut lease, false, |q| f(q)).unwrap();
    let options = RecordOptions::named("timing");
    let graph = bed
        .stream
        .record(&buffers.memory, Method::Stream, &options, |q| (0..TURNS).try_for_each(|_| f(q)))
        .unwrap();
    graph.replay(&mut lease, &mut bed.stream).unwrap();
    let (start, end) = (bed.ctx.event().unwrap(), bed.ctx.event().unwrap());
    bed.stream.record_event(&start).unwrap();
    graph.replay(&mut lease, &mut bed.stream).unwrap();
    bed.stream.record_event(&end).unwrap();
    bed.stream.synchronize().unwrap();
    f64::from(end.ms_since(&start).unwrap()) * 1000.0 / TURNS as f64
}

#[test]
#[cfg_attr(not(feature = "gpu-tests"), ignore = "needs a CUDA device: cargo xtask gpu-bundle")]
fn prefill_products_are_timed() {
    let mut bed = Bed::gpu();
    let blas = BlasLt::open(&bed.ctx, None).unwrap();
    println!("{blas:?}");
    let dtype = DType::BF16;
    let shapes = [
        (512, 2048, 2048),
        (512, 512, 2048),
        (512, 3072, 2048),
        (512, 8192, 2048),
        (512, 2048, 8192),
        (512, 4096, 4096),
        (512, 14336, 4096),
        (512, 4096, 14336),
        (128, 4096, 4096),
        (128, 14336, 4096),
        (32, 2048, 2048),
        (32, 14336, 4096),
    ];
    for (m, n, k) in shapes {
        let flops = 2.0 * (m * n * k) as f64;
        let mut line = format!("{m:>4} x {n:>6} x {k:>6}:");
        let chosen = GemmPlan::new(m, &[n], k, 132);
        let most = GemmPlan::fixed(false, 8, k).scratch_bytes(m, n).max(chosen.scratch_bytes(m, n));
        let buffers = buffers(&bed, m, n, k, most);
        let [x, w, y, scratch, workspace, wide] = buffers.bufs;
        {
            let mut lease = buffers.memory.lease().unwrap();
            let some = encode(dtype, &normals(1 << 16, 1));
            for buf in [x, w] {
                let mut bytes = some.repeat(buf.len() as usize / some.len() + 1);
                bytes.truncate(buf.len() as usize);
                bed.stream.upload(&mut lease, buf, &bytes).unwrap();
            }
        }
        let product =
            blas.product(BlasLtShape::of_rows(dtype, m, n, k), [x, w, y, workspace], "library").unwrap();
        let us = time(&mut bed, &buffers, |q| product.enqueue(q));
        line += &format!(" cuBLASLt {us:.1} us ({:.0} TFLOP/s);", flops / us / 1e6);
        let fixed = |tall, splits| {
            (format!("m{} s{splits}", if tall { 128 } else { 64 }), GemmPlan::fixed(tall, splits, k))
        };
        let plans = [
            (format!("chosen {:?}", chosen.shape()), chosen),
            fixed(true, 1),
            fixed(true, 2),
            fixed(true, 4),
            fixed(false, 1),
            fixed(false, 2),
            fixed(false, 4),
            fixed(false, 8),
        ];
        for (name, plan) in plans {
            let mut launches = Vec::new();
            let parts = &[LinearPart { w, y, n }];
            let args = GemmArgs { x, dtype, parts, m, k, plan, scratch: Some(scratch), step: "own" };
            bed.kernels.gemm(&args, &mut launches).unwrap();
            let us = time(&mut bed, &buffers, |q| launches.iter().try_for_each(|l| q.launch(l)));
            line += &format!(" {name} {us:.1} ({:.0});", flops / us / 1e6);
        }
        let to = Narrow { y: x, dtype, plane_rows: 0, also_wide: false };
        let cast = bed.kernels.narrow_rows(&bed::dense(wide, &[m, k]), m, k, &to, "cast").unwrap();
        let us = time(&mut bed, &buffers, |q| q.launch(&cast));
        line += &format!(" cast {us:.1} us");
        for quantised in [DType::Q4_K, DType::Q6_K, DType::Q8_0] {
            // Only the number of bytes matters, not their values.
            if m == 512 && n * k >= 1 << 24 {
                let from = w.slice(0, packed_bytes(quantised, n / 4, k).unwrap() as u64).unwrap();
                let to = w.slice((n * k) as u64, (n * k / 2) as u64).unwrap();
                let args = DequantArgs { w: from, dtype: quantised, y: to, n: n / 4, k, step: "decode" };
                let launch = bed.kernels.dequant(&args).unwrap();
                let us = time(&mut bed, &buffers, |q| q.launch(&launch));
                line += &format!(" {quantised} {us:.1} us for {} M", (n * k / 4) >> 20);
            }
        }
        println!("{line}");
    }
}
