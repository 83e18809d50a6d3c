//! Times expert layers and recurrent layers on a GPU, with weights that no cache holds. These tests print;
//! they only assert that the launches run.
#![allow(unreachable_pub, dead_code, reason = "the bed is shared with tests that use more of it")]

mod bed;

use std::sync::Arc;
use std::time::Instant;

use bed::{Bed, dense, f32s, i32s, normals};
use refrain_driver::{Buf, Launch, Lease, Memory, MemoryLayout, Method, RecordOptions};
use refrain_graph::{ExpertActivation, GatedDelta, KeyHeads, Route, RouteScore};
use refrain_kernels::{
    ExpertGateArgs, ExpertLogitsArgs, ExpertSizes, ExpertSumArgs, ExpertWeight, GateRouter, GatedDeltaArgs,
    GroupedArgs, GroupedSizes, PACKED_DTYPES, RouteArgs, SlotArgs, expert_scratch_bytes, packed_bytes,
};
use refrain_tensor::DType;
use refrain_testkit::Rng;

const N_REPLAYS: u32 = 4;
/// Layers in turn: together larger than the L2 cache of any GPU.
const COPIES: u64 = 3;

struct Layer {
    name: &'static str,
    dtypes: [DType; 2],
    n_experts: usize,
    n_choices: usize,
    k: usize,
    inner: usize,
}

const LAYERS: [Layer; 4] = [
    Layer {
        name: "qwen3-30b-a3b Q4_K",
        dtypes: [DType::Q4_K; 2],
        n_experts: 128,
        n_choices: 8,
        k: 2048,
        inner: 768,
    },
    Layer {
        name: "qwen3-30b-a3b Q4_K/Q6_K",
        dtypes: [DType::Q4_K, DType::Q6_K],
        n_experts: 128,
        n_choices: 8,
        k: 2048,
        inner: 768,
    },
    Layer {
        name: "gemma4-26b-a4b Q4_K/Q5_0",
        dtypes: [DType::Q4_K, DType::Q5_0],
        n_experts: 128,
        n_choices: 8,
        k: 2816,
        inner: 704,
    },
    Layer {
        name: "qwen3-30b-a3b BF16",
        dtypes: [DType::BF16; 2],
        n_experts: 128,
        n_choices: 8,
        k: 2048,
        inner: 768,
    },
];

const ROUTE: Route = Route {
    n_choices: 8,
    score: RouteScore::Softmax,
    biased: false,
    scaled: false,
    groups: None,
    renormalise: true,
    scale: 1.0,
};

impl Layer {
    fn sizes(&self, n_rows: usize) -> GroupedSizes {
        let Layer { n_experts, n_choices, k, inner, .. } = *self;
        GroupedSizes { n_rows, n_choices, n_experts, k, inner, n: k }
    }

    fn bytes(&self) -> [u64; 3] {
        let of = |dtype: DType, n: usize, k: usize| {
            let bytes = match PACKED_DTYPES.contains(&dtype) {
                true => packed_bytes(dtype, self.n_experts * n, k),
                false => dtype.bytes_for(self.n_experts * n * k),
            };
            (bytes.unwrap() as u64).next_multiple_of(256)
        };
        let [first, second] = self.dtypes;
        [of(first, self.inner, self.k), of(first, self.inner, self.k), of(second, self.k, self.inner)]
    }
}

/// Buffers of a layer's launches.
struct Place {
    memory: Arc<Memory>,
    weights: Buf,
    x: Buf,
    ids: Buf,
    factors: Buf,
    logits: Buf,
    inner: Buf,
    y: Buf,
    scratch: Buf,
}

fn place(bed: &mut Bed, layer: &Layer, n_rows: usize) -> Place {
    let pairs = n_rows * layer.n_choices;
    let mut layout = MemoryLayout::new("experts");
    let regions = [
        ("weights", COPIES * layer.bytes().iter().sum::<u64>()),
        ("x", (4 * n_rows * layer.k) as u64),
        ("ids", 4 * pairs as u64),
        ("factors", 4 * pairs as u64),
        ("logits", (4 * n_rows * layer.n_experts) as u64),
        ("inner", (4 * pairs * layer.inner) as u64),
        ("y", (4 * n_rows * layer.k) as u64),
        ("scratch", 512 << 20),
    ]
    .map(|(name, bytes)| layout.device(name, bytes));
    let memory = bed.plan(&layout);
    let [weights, x, ids, factors, logits, inner, y, scratch] = regions.map(|region| memory.buf(region));
    let mut lease = memory.lease().unwrap();
    bed.stream.run(&mut lease, false, |q| q.fill(weights, 0x2c)).unwrap();
    bed.stream.upload(&mut lease, x, &f32s(&normals(n_rows * layer.k, 1))).unwrap();
    bed.stream.upload(&mut lease, factors, &f32s(&normals(pairs, 2))).unwrap();
    bed.stream.upload(&mut lease, logits, &f32s(&normals(n_rows * layer.n_experts, 4))).unwrap();
    // Different experts for each row, uniformly.
    let mut rng = Rng::new(3);
    let mut chosen = Vec::new();
    for _ in 0..n_rows {
        let mut left: Vec<i32> = (0..layer.n_experts as i32).collect();
        for _ in 0..layer.n_choices {
            let at = ((rng.unit() * left.len() as f32) as usize).min(left.len() - 1);
            chosen.push(left.swap_remove(at));
        }
    }
    bed.stream.upload(&mut lease, ids, &i32s(&chosen)).unwrap();
    drop(lease);
    Place { memory, weights, x, ids, factors, logits, inner, y, scratch }
}

fn weights(layer: &Layer, all: Buf, copy: u64) -> [ExpertWeight; 3] {
    let [first, second] = layer.dtypes;
    let bytes = layer.bytes();
    let mut at = copy * bytes.iter().sum::<u64>();
    let mut next = |bytes: u64, dtype, rows| {
        let w = all.slice(at, bytes).unwrap();
        at += bytes;
        ExpertWeight { w, dtype, rows, first: 0, bias: None }
    };
    [next(bytes[0], first, layer.inner), next(bytes[1], first, layer.inner), next(bytes[2], second, layer.k)]
}

/// Median microseconds of one of the groups of launches, run in turn.
fn time(bed: &mut Bed, memory: &Arc<Memory>, groups: &[Vec<Launch>], read: Buf) -> f64 {
    let options = RecordOptions::named("speed");
    let launches: Vec<&Launch> = groups.iter().flatten().collect();
    let graph = bed
        .stream
        .record(memory, Method::Stream, &options, |q| launches.iter().try_for_each(|l| q.launch(l)))
        .unwrap();
    let mut lease: Lease = memory.lease().unwrap();
    let (mut times, mut last) = (Vec::new(), [0; 16]);
    for _ in 0..5 {
        let started = Instant::now();
        for _ in 1..N_REPLAYS {
            graph.replay(&mut lease, &mut bed.stream).unwrap();
        }
        let out = graph.replay(&mut lease, &mut bed.stream).unwrap();
        out.read(&mut bed.stream, read.slice(0, 16).unwrap(), &mut last).unwrap();
        times.push(started.elapsed().as_secs_f64() * 1e6 / (f64::from(N_REPLAYS) * groups.len() as f64));
    }
    times.sort_by(f64::total_cmp);
    times[2]
}

#[test]
#[cfg_attr(not(feature = "gpu-tests"), ignore = "needs a CUDA device: cargo xtask gpu-bundle")]
fn expert_layers_are_timed_on_tensor_cores_and_without() {
    let mut bed = Bed::gpu();
    for layer in &LAYERS {
        for n_rows in [1, 4, 8, 16, 32, 64, 128, 256, 512] {
            let at = place(&mut bed, layer, n_rows);
            let s = layer.sizes(n_rows);
            let without: Vec<Vec<Launch>> =
                (0..COPIES).map(|copy| plain(&bed, layer, &at, s, copy, false)).collect();
            let mut line = format!("{:26} {n_rows:3} rows", layer.name);
            line += &format!("  without {:7.1} us", time(&mut bed, &at.memory, &without, at.y));
            if n_rows <= 8 {
                for (i, what) in ["gate", "sum"].iter().enumerate() {
                    let one: Vec<Vec<Launch>> = without.iter().map(|l| vec![l[i].clone()]).collect();
                    line += &format!("  {what} {:6.1}", time(&mut bed, &at.memory, &one, at.y));
                }
                let routed: Vec<Vec<Launch>> = (0..COPIES)
                    .map(|copy| vec![plain(&bed, layer, &at, s, copy, true).swap_remove(0)])
                    .collect();
                line += &format!("  gate with router {:6.1}", time(&mut bed, &at.memory, &routed, at.y));
                println!("{line}");
                continue;
            }
            let plan = bed.kernels.grouped_plan(s, layer.dtypes[0], layer.dtypes[1]).unwrap();
            for m in [plan.tile_rows(), 8, 16, 32, 64] {
                let groups: Vec<Vec<Launch>> =
                    (0..COPIES).map(|copy| grouped(&bed, layer, &at, (s, m), copy)).collect();
                line += &format!("  m{m}: {:6.1} us", time(&mut bed, &at.memory, &groups, at.y));
                if m != plan.tile_rows() || line.contains("tiles") {
                    continue;
                }
                let names = ["tiles", "planes", "gate", "down", "sum"];
                for (i, what) in names.iter().enumerate() {
                    let one: Vec<Vec<Launch>> = groups.iter().map(|l| vec![l[i].clone()]).collect();
                    line += &format!(" {what} {:.1}", time(&mut bed, &at.memory, &one, at.y));
                }
            }
            println!("{line}");
        }
    }
}

fn plain(bed: &Bed, layer: &Layer, at: &Place, s: GroupedSizes, copy: u64, routes: bool) -> Vec<Launch> {
    let [gate, up, down] = weights(layer, at.weights, copy);
    let GroupedSizes { n_rows, n_choices, n_experts, k, inner, n } = s;
    let sizes = ExpertSizes { n_rows, n_choices, n_experts, n: inner, k, is_fixed: false };
    let scratch = |sizes: &ExpertSizes, n_products| {
        let bytes = expert_scratch_bytes(sizes, n_products).unwrap();
        (bytes > 0).then(|| at.scratch.slice(0, bytes).unwrap())
    };
    let mut launches = Vec::new();
    let activation = ExpertActivation::Silu;
    let route = Route { n_choices, ..ROUTE };
    let (logits, positions) = (at.logits, None);
    let router = routes.then_some(GateRouter { route, logits, scales: None, positions, weights: at.factors });
    let (x, ids, y) = (at.x, at.ids, at.inner);
    let args = ExpertGateArgs {
        activation,
        x,
        ids,
        gate,
        up,
        y,
        sizes,
        scratch: scratch(&sizes, 2),
        router,
        step: "speed",
    };
    bed.kernels.expert_gate(&args, &mut launches).unwrap();
    let sizes = ExpertSizes { n, k: inner, ..sizes };
    let (x, y, weights) = (at.inner, at.y, at.factors);
    let args = ExpertSumArgs { x, ids, weights, down, y, sizes, scratch: scratch(&sizes, 1), step: "speed" };
    bed.kernels.expert_sum(&args, &mut launches).unwrap();
    launches
}

fn grouped(bed: &Bed, layer: &Layer, at: &Place, (s, m): (GroupedSizes, usize), copy: u64) -> Vec<Launch> {
    let [gate, up, down] = weights(layer, at.weights, copy);
    let plan = bed.kernels.grouped_plan(s, layer.dtypes[0], layer.dtypes[1]).unwrap().with_tile_rows(m);
    let scratch = at.scratch.slice(0, plan.scratch_bytes().unwrap()).unwrap();
    let mut launches = Vec::new();
    let activation = ExpertActivation::Silu;
    let (x, ids, weights, y) = (at.x, at.ids, at.factors, at.y);
    let args = GroupedArgs { plan, activation, x, ids, weights, gate, up, down, y, scratch, step: "speed" };
    bed.kernels.grouped(&args, &mut launches).unwrap();
    launches
}

#[test]
#[cfg_attr(not(feature = "gpu-tests"), ignore = "needs a CUDA device: cargo xtask gpu-bundle")]
fn routers_are_timed() {
    let mut bed = Bed::gpu();
    for (n_experts, n) in [(128, 1), (256, 1), (128, 512)] {
        let route = Route { n_choices: 8, ..ROUTE };
        let mut layout = MemoryLayout::new("routers");
        let regions = [n * n_experts, n * 8, n * 8].map(|n| layout.device("words", 4 * n.max(64) as u64));
        let memory = bed.plan(&layout);
        let [logits, ids, weights] = regions.map(|region| memory.buf(region));
        let mut lease = memory.lease().unwrap();
        bed.stream.upload(&mut lease, logits, &f32s(&normals(n * n_experts, 1))).unwrap();
        drop(lease);
        let (bias, scales, positions) = (None, None, None);
        let args =
            RouteArgs { route, logits, bias, scales, positions, ids, weights, n, n_experts, step: "speed" };
        let groups: Vec<Vec<Launch>> = (0..32).map(|_| vec![bed.kernels.route(&args).unwrap()]).collect();
        println!("route {n_experts} experts, {n} rows: {:.1} us", time(&mut bed, &memory, &groups, weights));
    }
}

#[test]
#[cfg_attr(not(feature = "gpu-tests"), ignore = "needs a CUDA device: cargo xtask gpu-bundle")]
fn logits_of_routers_are_timed() {
    let mut bed = Bed::gpu();
    for (n_experts, k) in [(128, 2048), (256, 2048), (128, 2816)] {
        let mut layout = MemoryLayout::new("logits");
        let sizes = [k, k, k, k, k, n_experts, 64 * n_experts * k];
        let regions = sizes.map(|words| layout.device("words", 4 * words as u64));
        let memory = bed.plan(&layout);
        let [a, b, norm, sum, x, logits, weights] = regions.map(|region| memory.buf(region));
        let mut lease = memory.lease().unwrap();
        bed.stream.run(&mut lease, false, |q| q.fill(weights, 0x3c)).unwrap();
        for (buf, seed) in [(a, 1), (b, 2), (norm, 3)] {
            bed.stream.upload(&mut lease, buf, &f32s(&normals(k, seed))).unwrap();
        }
        drop(lease);
        let launch = |i: usize| {
            let bytes = (4 * n_experts * k) as u64;
            let w = weights.slice(i as u64 * bytes, bytes).unwrap();
            let (b, sum, eps) = (Some(b), Some(sum), 1e-6);
            let args = ExpertLogitsArgs { a, b, norm, w, sum, x, logits, n_experts, k, eps, step: "speed" };
            vec![bed.kernels.expert_logits(&args).unwrap()]
        };
        let groups: Vec<Vec<Launch>> = (0..64).map(launch).collect();
        println!("logits of {n_experts} experts, k={k}: {:.1} us", time(&mut bed, &memory, &groups, logits));
    }
}

#[test]
#[cfg_attr(not(feature = "gpu-tests"), ignore = "needs a CUDA device: cargo xtask gpu-bundle")]
fn the_delta_rule_is_timed() {
    let mut bed = Bed::gpu();
    let (n_key_heads, n_heads, dim) = (16, 32, 128);
    for n in [1, 8, 32, 128, 512] {
        let mut layout = MemoryLayout::new("delta");
        let slot = n_heads * dim * dim;
        let regions = [
            2 * slot,
            n,
            n,
            2,
            n * n_key_heads * dim,
            n * n_heads * dim,
            n * n_heads,
            n_heads,
            n * n_heads * dim,
        ]
        .map(|words| layout.device("words", 4 * words.max(64) as u64));
        let memory = bed.plan(&layout);
        let [state, positions, seqs, slots, keys, values, gates, vector, y] =
            regions.map(|region| memory.buf(region));
        let mut lease = memory.lease().unwrap();
        let mut put = |to: Buf, bytes: &[u8]| {
            bed.stream.upload(&mut lease, to.slice(0, bytes.len() as u64).unwrap(), bytes).unwrap();
        };
        put(state, &f32s(&normals(2 * slot, 1)));
        put(positions, &i32s(&(4..4 + n as i32).collect::<Vec<_>>()));
        put(seqs, &i32s(&vec![0; n]));
        put(slots, &i32s(&[0, 1]));
        put(keys, &f32s(&normals(n * n_key_heads * dim, 2)));
        put(values, &f32s(&normals(n * n_heads * dim, 3)));
        put(gates, &f32s(&normals(n * n_heads, 4)));
        put(vector, &f32s(&vec![-0.5; n_heads]));
        drop(lease);
        let key_view = dense(keys, &[n, n_key_heads, dim]);
        let gate_view = dense(gates, &[n, n_heads]);
        let args = GatedDeltaArgs {
            slots: SlotArgs { state, positions, seqs, slots, n_tokens: n, n_seqs: 1, n_slots: 2 },
            q: key_view,
            k: key_view,
            v: dense(values, &[n, n_heads, dim]),
            a: gate_view,
            b: gate_view,
            decay: vector,
            dt_bias: vector,
            y,
            n_key_heads,
            n_heads,
            k_dim: dim,
            v_dim: dim,
            delta: GatedDelta { scale: 0.088, eps: 1e-6, key_heads: KeyHeads::Tiled },
            step: "speed",
        };
        let groups: Vec<Vec<Launch>> =
            (0..8).map(|_| vec![bed.kernels.gated_delta(&args).unwrap()]).collect();
        let us = time(&mut bed, &memory, &groups, y);
        println!("gated delta, {n} rows: {us:.1} us, {:.3} us per row", us / n as f64);
    }
}
