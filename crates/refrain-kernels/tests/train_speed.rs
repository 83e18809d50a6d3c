//! Times the launches of a training step on a GPU, at the sizes of a 110-million-parameter model with 16,384
//! tokens. These tests print; they only assert that the launches run.
#![allow(unreachable_pub, dead_code, reason = "the bed is shared with tests that use more of it")]

mod bed;

use std::time::Instant;

use bed::{Bed, i32s, shape};
use refrain_driver::{Buf, Launch, MemoryLayout, Method, RecordOptions};
use refrain_graph::{Binary, Dropout, Gate, Reduce, Rope, RopeStyle};
use refrain_kernels::{
    AdamTensor, AdamWArgs, BufView, CrossEntropyArgs, Floats, KernelError, Kernels, MapArgs, MapOp,
    NormWeights, RmsNormGradArgs, ScatterAddRowsArgs, SumSquaresArgs, TypedAddRmsNormArgs, TypedGatherArgs,
    TypedReduceArgs, TypedRmsNormArgs, TypedRopeArgs, reduce_scratch_bytes, rms_norm_grad_scratch_bytes,
    scatter_scratch_bytes, sum_squares_scratch_bytes,
};
use refrain_tensor::DType;

const N: usize = 16_384;
const D: usize = 768;
const HIDDEN: usize = 2048;
const VOCAB: usize = 32_768;
const N_REPLAYS: u32 = 5;

/// A measured launch: buffer sizes in bytes, contents where they matter, and the bytes it must move.
struct Measured<'a> {
    name: &'a str,
    sizes: &'a [usize],
    ints: Option<(usize, &'a [i32])>,
    bytes: usize,
    /// Copies of the buffers, enough to keep the L2 cache cold.
    n_sets: usize,
}

fn measure(
    bed: &mut Bed,
    of: &Measured<'_>,
    build: impl Fn(&Kernels, &[Buf], &mut Vec<Launch>) -> Result<(), KernelError>,
) {
    let mut layout = MemoryLayout::new("speed");
    let regions: Vec<Vec<_>> = (0..of.n_sets)
        .map(|set| {
            let region = |(i, &bytes): (usize, &usize)| layout.device(&format!("{set} {i}"), bytes as u64);
            of.sizes.iter().enumerate().map(region).collect()
        })
        .collect();
    let memory = bed.plan(&layout);
    let mut lease = memory.lease().unwrap();
    let mut launches = Vec::new();
    let sets: Vec<Vec<Buf>> =
        regions.iter().map(|set| set.iter().map(|&region| memory.buf(region)).collect()).collect();
    for bufs in &sets {
        bed.stream.run(&mut lease, false, |q| bufs.iter().try_for_each(|buf| q.fill(*buf, 0))).unwrap();
        if let Some((at, ints)) = of.ints {
            bed.stream.upload(&mut lease, bufs[at], &i32s(ints)).unwrap();
        }
        build(&bed.kernels, bufs, &mut launches).unwrap();
    }
    let options = RecordOptions::named("speed");
    let graph = bed
        .stream
        .record(&memory, Method::Stream, &options, |q| launches.iter().try_for_each(|l| q.launch(l)))
        .unwrap();
    let small = sets[0][0].slice(0, 4).unwrap();
    let mut times: Vec<f64> = Vec::new();
    for _ in 0..6 {
        let started = Instant::now();
        for _ in 1..N_REPLAYS {
            graph.replay(&mut lease, &mut bed.stream).unwrap();
        }
        let out = graph.replay(&mut lease, &mut bed.stream).unwrap();
        out.read(&mut bed.stream, small, &mut [0; 4]).unwrap();
        times.push(started.elapsed().as_secs_f64() * 1e6 / f64::from(N_REPLAYS) / of.n_sets as f64);
    }
    times.sort_by(f64::total_cmp);
    let us = times[0];
    println!("{:<28} {us:8.1} µs, {:7.1} GB/s", of.name, of.bytes as f64 / us / 1e3);
}

const T: DType = DType::BF16;

fn of<'a>(name: &'a str, sizes: &'a [usize], bytes: usize) -> Measured<'a> {
    Measured { name, sizes, ints: None, bytes, n_sets: 16 }
}

fn rows(buf: Buf, n_cols: usize) -> BufView {
    BufView::dense(buf, T, shape(&[N, n_cols]))
}

#[test]
#[cfg_attr(not(feature = "gpu-tests"), ignore = "needs a CUDA device: cargo xtask gpu-bundle")]
fn elements_rows_and_moves() {
    let mut bed = Bed::gpu();
    let (x, h) = (2 * N * D, 2 * N * HIDDEN);
    let map = |op: MapOp, inputs: &[BufView], outputs: &[Buf], n_cols: usize| {
        let (inputs, outputs) = (inputs.to_vec(), outputs.to_vec());
        move |kernels: &Kernels| {
            let dims = shape(&[N, n_cols]);
            kernels.map(&MapArgs {
                op,
                inputs: &inputs,
                outputs: &outputs,
                dtype: T,
                shape: dims,
                step: "speed",
            })
        }
    };
    measure(&mut bed, &of("add", &[x, x, x], 3 * x), |k, b, out| {
        out.push(map(MapOp::Binary(Binary::Add), &[rows(b[1], D), rows(b[2], D)], &b[..1], D)(k)?);
        Ok(())
    });
    measure(&mut bed, &of("gate", &[h, h, h], 3 * h), |k, b, out| {
        let inputs = [rows(b[1], HIDDEN), rows(b[2], HIDDEN)];
        out.push(map(MapOp::Gate(Gate::Silu), &inputs, &b[..1], HIDDEN)(k)?);
        Ok(())
    });
    measure(&mut bed, &of("gate gradient", &[h, h, h, h, h], 5 * h), |k, b, out| {
        let inputs = [rows(b[2], HIDDEN), rows(b[3], HIDDEN), rows(b[4], HIDDEN)];
        out.push(map(MapOp::GateGrad(Gate::Silu), &inputs, &b[..2], HIDDEN)(k)?);
        Ok(())
    });
    measure(&mut bed, &of("dropout", &[x, x, 16], 2 * x), |k, b, out| {
        let op = MapOp::Dropout { dropout: Dropout { p: 0.1, site: 1 }, rng: b[2] };
        out.push(map(op, &[rows(b[1], D)], &b[..1], D)(k)?);
        Ok(())
    });
    let weights = |buf| NormWeights { buf, dtype: T };
    measure(&mut bed, &of("rms norm", &[x, x, 2 * D], 2 * x), |k, b, out| {
        out.push(k.typed_rms_norm(&TypedRmsNormArgs {
            x: rows(b[1], D),
            w: weights(b[2]),
            y: b[0],
            n_rows: N,
            n_cols: D,
            eps: 1e-5,
            step: "speed",
        })?);
        Ok(())
    });
    measure(&mut bed, &of("add and rms norm", &[x, x, x, x, 2 * D], 4 * x), |k, b, out| {
        out.push(k.typed_add_rms_norm(&TypedAddRmsNormArgs {
            a: rows(b[2], D),
            b: rows(b[3], D),
            w: weights(b[4]),
            sum: b[0],
            y: b[1],
            n_rows: N,
            n_cols: D,
            eps: 1e-5,
            step: "speed",
        })?);
        Ok(())
    });
    let scratch = rms_norm_grad_scratch_bytes(N, D) as usize;
    measure(&mut bed, &of("rms norm gradient", &[x, 2 * D, x, x, 2 * D, scratch], 3 * x), |k, b, out| {
        let args = RmsNormGradArgs {
            dy: rows(b[2], D),
            x: rows(b[3], D),
            w: weights(b[4]),
            dx: b[0],
            more: None,
            dw: b[1],
            dw_dtype: T,
            scratch: b[5],
            n_rows: N,
            n_cols: D,
            eps: 1e-5,
            step: "speed",
        };
        k.rms_norm_grad(&args, out)
    });
    let scratch = reduce_scratch_bytes(&[N, D], 0) as usize;
    measure(&mut bed, &of("column sums", &[2 * D, x, scratch], x), |k, b, out| {
        let args = TypedReduceArgs {
            kind: Reduce::Sum,
            x: rows(b[1], D),
            axis: 0,
            y: b[0],
            scratch: b[2],
            step: "speed",
        };
        k.typed_reduce(&args, out)
    });
    let positions: Vec<i32> = (0..N as i32).map(|i| i % 1024).collect();
    let rope = Measured {
        name: "rope",
        sizes: &[x, x, 4 * N, 128],
        ints: Some((2, &positions)),
        bytes: 2 * x,
        n_sets: 16,
    };
    measure(&mut bed, &rope, |k, b, out| {
        out.push(k.typed_rope(&TypedRopeArgs {
            rope: Rope { style: RopeStyle::Neox, n_dims: 64, magnitude: 1.0 },
            is_inverse: false,
            x: BufView::dense(b[1], T, shape(&[N, D / 64, 64])),
            positions: b[2],
            inv_freq: b[3],
            y: b[0],
            n: N,
            n_heads: D / 64,
            head_dim: 64,
            step: "speed",
        })?);
        Ok(())
    });
    // Few ids have many rows, as in natural text.
    let ids: Vec<i32> = (1..=N).map(|i| (VOCAB as f64 / (1.0 + (i * 7919 % N) as f64)) as i32).collect();
    let table = 2 * VOCAB * D;
    let gather = Measured {
        name: "gather",
        sizes: &[x, table, 4 * N],
        ints: Some((2, &ids)),
        bytes: 2 * x,
        n_sets: 4,
    };
    measure(&mut bed, &gather, |k, b, out| {
        out.push(k.typed_gather(&TypedGatherArgs {
            table: b[1],
            table_dtype: T,
            ids: b[2],
            y: b[0],
            dtype: T,
            n_rows: VOCAB,
            d: D,
            n_ids: N,
            step: "speed",
        })?);
        Ok(())
    });
    let scratch = scatter_scratch_bytes(N) as usize;
    let scatter = Measured {
        name: "scatter add",
        sizes: &[table, 4 * N, x, scratch],
        ints: Some((1, &ids)),
        bytes: x + table,
        n_sets: 4,
    };
    measure(&mut bed, &scatter, |k, b, out| {
        let args = ScatterAddRowsArgs {
            ids: b[1],
            x: rows(b[2], D),
            y: b[0],
            scratch: b[3],
            n_rows: VOCAB,
            step: "speed",
        };
        k.scatter_add_rows(&args, out)
    });
}

#[test]
#[cfg_attr(not(feature = "gpu-tests"), ignore = "needs a CUDA device: cargo xtask gpu-bundle")]
fn loss_and_optimiser() {
    let mut bed = Bed::gpu();
    let logits = 2 * N * VOCAB;
    let targets: Vec<i32> = (0..N as i32).map(|i| i % VOCAB as i32).collect();
    let loss = Measured {
        name: "cross entropy",
        sizes: &[4 * N, logits, 4 * N, 4],
        ints: Some((2, &targets)),
        bytes: 2 * logits,
        n_sets: 1,
    };
    measure(&mut bed, &loss, |k, b, out| {
        out.push(k.cross_entropy(&CrossEntropyArgs {
            logits: BufView::dense(b[1], T, shape(&[N, VOCAB])),
            targets: b[2],
            scale: b[3],
            loss: b[0],
            dx: b[1],
            step: "speed",
        })?);
        Ok(())
    });
    // 12 layers, the embedding and the last norm.
    let layer = [D * D, D * D, D * D, D * D, D * HIDDEN, D * HIDDEN, D * HIDDEN, D, D];
    let mut ns: Vec<usize> = layer.repeat(12);
    ns.extend([VOCAB * D, D]);
    let n: usize = ns.iter().sum();
    let scratch = sum_squares_scratch_bytes(ns.iter().copied()) as usize;
    let mut sizes = vec![4, scratch];
    sizes.extend(ns.iter().map(|n| 2 * n));
    let squares = Measured { name: "sum of squares", sizes: &sizes, ints: None, bytes: 2 * n, n_sets: 1 };
    measure(&mut bed, &squares, |k, b, out| {
        let tensors: Vec<_> =
            ns.iter().enumerate().map(|(i, &n)| (Floats { buf: b[2 + i], dtype: T }, n)).collect();
        k.sum_squares(&SumSquaresArgs { tensors: &tensors, sum: b[0], scratch: b[1], step: "speed" }, out)
    });
    for (name, masters, bytes) in [("adamw, f32 masters", true, 28), ("adamw, all bf16", false, 14)] {
        let moment = if masters { DType::F32 } else { T };
        let mut sizes = vec![4, 40, 4];
        for n in &ns {
            sizes.extend([2 * n, 2 * n, if masters { 4 * n } else { 4 }]);
            sizes.extend([n * moment.block_bytes(); 2]);
        }
        let of = Measured { name, sizes: &sizes, ints: None, bytes: bytes * n, n_sets: 1 };
        measure(&mut bed, &of, |k, b, out| {
            let tensor = |(i, &n): (usize, &usize)| {
                let at = |j: usize, dtype| Floats { buf: b[3 + 5 * i + j], dtype };
                let master = masters.then(|| at(2, DType::F32).buf);
                let (m, v) = (at(3, moment), at(4, moment));
                AdamTensor { n, grad: at(0, T), weight: at(1, T), master, m, v, decays: true }
            };
            let tensors: Vec<AdamTensor> = ns.iter().enumerate().map(tensor).collect();
            let args = AdamWArgs {
                count: b[0],
                params: b[1],
                sum_squares: b[2],
                tensors: &tensors,
                clears: false,
                step: "speed",
            };
            k.adamw(&args, out)
        });
    }
}
