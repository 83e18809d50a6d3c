//! Cases of routing and expert products.

use refrain_graph::{ExpertActivation, Route, RouteGroups, RouteScore};
use refrain_kernels::{
    ExpertGateArgs, ExpertLogitsArgs, ExpertSizes, ExpertSumArgs, ExpertWeight, GEMM_DTYPES, GateRouter,
    GroupedArgs, GroupedSizes, LINEAR_DTYPES, PACKED_DTYPES, RouteArgs, expert_scratch_bytes, pack,
};
use refrain_reference::route_row;
use refrain_tensor::DType;
use refrain_testkit::{Rng, Tol, encode};

use super::batch::four_bits;
use crate::bed::{Case, Role, decode, f32s, i32s, normals};

const ROUTE: Route = Route {
    n_choices: 3,
    score: RouteScore::Softmax,
    biased: false,
    scaled: false,
    groups: None,
    renormalise: true,
    scale: 1.0,
};

pub fn routes() -> Vec<Case> {
    let mut cases = Vec::new();
    let groups = |n_groups, n_kept, n_best| Some(RouteGroups { n_groups, n_kept, n_best });
    for score in [RouteScore::Softmax, RouteScore::Sigmoid, RouteScore::SoftmaxOfChosen] {
        for (n, n_experts, n_choices) in [(1, 1, 1), (3, 7, 7), (2, 128, 8), (1, 300, 4), (40, 32, 2)] {
            for renormalise in [false, true] {
                let route = Route { score, n_choices, renormalise, ..ROUTE };
                cases.push(route_case(route, normals(n * n_experts, 3), n_experts));
            }
        }
        let biased = Route { score, biased: true, scaled: true, scale: 2.5, ..ROUTE };
        cases.push(route_case(biased, normals(5 * 24, 4), 24));
        cases.push(route_case(Route { groups: groups(4, 2, 2), ..biased }, normals(5 * 32, 5), 32));
        cases.push(route_case(Route { groups: groups(8, 3, 1), score, ..ROUTE }, normals(4 * 64, 6), 64));
        // Ties and both zeros.
        let ties = |n: usize| (0..n).map(|i| [0.0, 1.0, -0.0, 1.0, 0.5][i * 7 % 5]).collect();
        cases.push(route_case(Route { score, n_choices: 6, ..ROUTE }, ties(3 * 40), 40));
        cases.push(route_case(Route { score, groups: groups(4, 2, 2), ..ROUTE }, vec![0.25; 40], 40));
        for odd in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 3e38, -3e38] {
            let row = |i: usize| if i % 12 == 5 { odd } else { (i % 12) as f32 * 0.25 };
            cases.push(route_case(Route { score, ..ROUTE }, (0..24).map(row).collect(), 12));
        }
        cases.push(route_case(Route { score, ..ROUTE }, vec![f32::NEG_INFINITY; 8], 8));
    }
    cases
}

fn route_case(route: Route, logits: Vec<f32>, n_experts: usize) -> Case {
    let n = logits.len() / n_experts;
    let mut rng = Rng::new(9);
    let bias: Vec<f32> = (0..n_experts).map(|_| 0.2 * rng.normal()).collect();
    let scales: Vec<f32> = (0..n_experts).map(|_| 0.5 + rng.unit()).collect();
    let bias_of = route.biased.then_some(&bias[..]);
    let scales_of = route.scaled.then_some(&scales[..]);
    let (has_padding, positions) = padding(n);
    let (ids, weights) = choices_of(&route, &logits, n_experts, bias_of, scales_of, &positions);
    let name = format!("{route:?} of {n_experts}, {n} rows, first {}", logits[5.min(logits.len() - 1)]);
    let roles = vec![
        Role::Exact(i32s(&ids)),
        Role::Out(weights, Tol::Whole(4e-6)),
        Role::In(f32s(&logits)),
        Role::In(f32s(&bias)),
        Role::In(f32s(&scales)),
        Role::In(i32s(&positions)),
    ];
    Case::new(name, roles, move |kernels, b, out| {
        out.push(kernels.route(&RouteArgs {
            route,
            logits: b[2],
            bias: route.biased.then_some(b[3]),
            scales: route.scaled.then_some(b[4]),
            positions: has_padding.then_some(b[5]),
            ids: b[0],
            weights: b[1],
            n,
            n_experts,
            step: "case",
        })?);
        Ok(())
    })
}

/// Positions of rows, and whether they are given to the router: one row in three of several is padding.
fn padding(n: usize) -> (bool, Vec<i32>) {
    let position = |i: usize| if n >= 3 && i % 3 == 1 { -1 } else { i as i32 };
    (n >= 3, (0..n).map(position).collect())
}

/// Ids and weights of all rows; padding has neither.
fn choices_of(
    route: &Route,
    logits: &[f32],
    n_experts: usize,
    bias: Option<&[f32]>,
    scales: Option<&[f32]>,
    positions: &[i32],
) -> (Vec<i32>, Vec<f32>) {
    let (mut ids, mut weights) = (Vec::new(), Vec::new());
    for (row, &position) in logits.chunks_exact(n_experts).zip(positions) {
        let chosen = route_row(route, row, bias, scales);
        ids.extend(chosen.iter().map(|(id, _)| if position < 0 { -1 } else { *id as i32 }));
        weights.extend(chosen.iter().map(|(_, weight)| if position < 0 { 0.0 } else { *weight }));
    }
    (ids, weights)
}

pub fn products() -> Vec<Case> {
    let mut cases = Vec::new();
    for dtype in LINEAR_DTYPES.into_iter().chain(PACKED_DTYPES) {
        let unit = dtype.block_len().max(32);
        let sizes = |n_rows, n_choices, n_experts, n, k| ExpertSizes {
            n_rows,
            n_choices,
            n_experts,
            n,
            k,
            is_fixed: false,
        };
        // One row, several, and enough to be sorted: some experts have no rows, one has more than eight.
        for s in [sizes(1, 3, 5, 24, 2 * unit), sizes(3, 2, 4, 16, unit), sizes(19, 2, 4, 72, unit)] {
            cases.push(gate_case(dtype, s, ExpertActivation::Silu, false, false));
            cases.push(sum_case(dtype, s, false));
        }
    }
    let clamped = ExpertActivation::ClampedSilu { alpha: 1.702, limit: 1.5 };
    for dtype in [DType::F32, DType::BF16, DType::Q8_0, DType::Q4_K] {
        for n_rows in [2, 17] {
            let k = if dtype.is_quantized() { dtype.block_len() } else { 40 };
            let s = ExpertSizes { n_rows, n_choices: 3, n_experts: 7, n: 8, k, is_fixed: false };
            for activation in [ExpertActivation::GeluTanh, clamped] {
                cases.push(gate_case(dtype, s, activation, true, true));
            }
            cases.push(gate_case(dtype, s, ExpertActivation::Silu, false, true));
            cases.push(sum_case(dtype, s, true));
        }
    }
    // Rows that end in the middle of a chunk, and an expert that ends in the middle of a tile.
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for n_rows in [1, 16] {
            let s = ExpertSizes { n_rows, n_choices: 2, n_experts: 3, n: 5, k: 33, is_fixed: false };
            cases.push(gate_case(dtype, s, ExpertActivation::Silu, false, false));
            cases.push(sum_case(dtype, s, false));
        }
    }
    cases
}

/// Choices with empty slots and an id past the last expert. Most are of one expert, and some experts have
/// none.
fn choices(s: &ExpertSizes) -> Vec<i32> {
    let last = s.n_experts as i32 - 1;
    let id = |i: usize| match i {
        i if i % 11 == 7 => -1,
        i if i % 13 == 9 => last + 1,
        i if i % 3 == 0 => last,
        i => (i * 5 % s.n_experts / 2 * 2) as i32,
    };
    (0..s.n_rows * s.n_choices).map(id).collect()
}

fn rounded(dtype: DType, x: &[f32]) -> Vec<f32> {
    let mut out = x.to_vec();
    if PACKED_DTYPES.contains(&dtype) {
        for block in out.chunks_mut(32) {
            let most = block.iter().fold(0.0_f32, |m, v| m.max(v.abs()));
            block.iter_mut().for_each(|v| *v = (*v * (127.0 / most)).round_ties_even() * (most / 127.0));
        }
    }
    out
}

/// Weights of all experts, as bytes and as numbers.
fn experts(dtype: DType, n_experts: usize, rows: usize, k: usize, seed: u64) -> (Vec<u8>, Vec<f32>) {
    let file = encode(dtype, &normals(n_experts * rows * k, seed));
    let values = decode(dtype, &file);
    match PACKED_DTYPES.contains(&dtype) {
        true => (pack(dtype, &file, n_experts * rows, k).unwrap(), values),
        false => (file, values),
    }
}

fn dot(x: &[f32], w: &[f32]) -> f64 {
    x.iter().zip(w).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum()
}

fn tol(dtype: DType) -> Tol {
    // A quant halfway between two values may round either way.
    if dtype.is_quantized() { Tol::Whole(8e-3) } else { Tol::Whole(8e-6) }
}

fn gate_case(dtype: DType, s: ExpertSizes, f: ExpertActivation, joined: bool, biased: bool) -> Case {
    let rows = if joined { 2 * s.n } else { s.n };
    let (x, ids) = (normals(s.n_rows * s.k, 1), choices(&s));
    let n_weights: u64 = if joined { 1 } else { 2 };
    let weights: Vec<_> = (0..n_weights).map(|i| experts(dtype, s.n_experts, rows, s.k, 2 + i)).collect();
    let biases: Vec<_> = (0..n_weights).map(|i| normals(s.n_experts * rows, 8 + i)).collect();
    let mut y = Vec::new();
    for (pair, &id) in ids.iter().enumerate() {
        let Some(expert) = usize::try_from(id).ok().filter(|id| *id < s.n_experts) else {
            y.extend(vec![0.0; s.n]);
            continue;
        };
        let x = rounded(dtype, &x[pair / s.n_choices * s.k..][..s.k]);
        let product = |which: usize, row: usize| {
            let at = expert * rows + row;
            let bias = if biased { f64::from(biases[which][at]) } else { 0.0 };
            dot(&x, &weights[which].1[at * s.k..][..s.k]) + bias
        };
        y.extend((0..s.n).map(|row| {
            let up = if joined { product(0, s.n + row) } else { product(1, row) };
            f.apply(product(0, row), up) as f32
        }));
    }
    let scratch = expert_scratch_bytes(&s, 2).unwrap();
    let name = format!("gate {dtype} {s:?} {f:?} joined={joined} bias={biased}");
    let mut roles = vec![Role::Out(y, tol(dtype)), Role::In(f32s(&x)), Role::In(i32s(&ids))];
    roles.push(Role::Scratch(scratch as usize));
    roles.extend(weights.into_iter().map(|(bytes, _)| Role::In(bytes)));
    roles.extend(biases.iter().map(|bias| Role::In(f32s(bias))));
    Case::new(name, roles, move |kernels, b, out| {
        let weight = |i: usize| ExpertWeight {
            w: b[4 + i],
            dtype,
            rows,
            first: 0,
            bias: biased.then_some(b[4 + n_weights as usize + i]),
        };
        let (gate, up) = match joined {
            true => (weight(0), ExpertWeight { first: s.n, ..weight(0) }),
            false => (weight(0), weight(1)),
        };
        let args = ExpertGateArgs {
            activation: f,
            x: b[1],
            ids: b[2],
            gate,
            up,
            y: b[0],
            sizes: s,
            scratch: (scratch > 0).then_some(b[3]),
            router: None,
            step: "case",
        };
        kernels.expert_gate(&args, out)
    })
}

fn sum_case(dtype: DType, s: ExpertSizes, biased: bool) -> Case {
    let (x, ids) = (normals(s.n_rows * s.n_choices * s.k, 1), choices(&s));
    let (bytes, values) = experts(dtype, s.n_experts, s.n, s.k, 2);
    let (bias, factors) = (normals(s.n_experts * s.n, 3), normals(ids.len(), 4));
    let mut y = vec![0.0_f64; s.n_rows * s.n];
    for (pair, &id) in ids.iter().enumerate() {
        let Some(expert) = usize::try_from(id).ok().filter(|id| *id < s.n_experts) else { continue };
        let x = rounded(dtype, &x[pair * s.k..][..s.k]);
        for row in 0..s.n {
            let at = expert * s.n + row;
            let bias = if biased { f64::from(bias[at]) } else { 0.0 };
            let part = dot(&x, &values[at * s.k..][..s.k]) + bias;
            y[pair / s.n_choices * s.n + row] += f64::from(factors[pair]) * part;
        }
    }
    let scratch = expert_scratch_bytes(&s, 1).unwrap();
    let roles = vec![
        Role::Out(y.iter().map(|v| *v as f32).collect(), tol(dtype)),
        Role::In(f32s(&x)),
        Role::In(i32s(&ids)),
        Role::In(f32s(&factors)),
        Role::In(bytes),
        Role::In(f32s(&bias)),
        Role::Scratch(scratch as usize),
    ];
    Case::new(format!("sum {dtype} {s:?} bias={biased}"), roles, move |kernels, b, out| {
        let down = ExpertWeight { w: b[4], dtype, rows: s.n, first: 0, bias: biased.then_some(b[5]) };
        let args = ExpertSumArgs {
            x: b[1],
            ids: b[2],
            weights: b[3],
            down,
            y: b[0],
            sizes: s,
            scratch: (scratch > 0).then_some(b[6]),
            step: "case",
        };
        kernels.expert_sum(&args, out)
    })
}

/// Whole expert layers of many rows, on tensor cores.
pub fn layers() -> Vec<Case> {
    let mut cases = Vec::new();
    let sizes = |n_rows, n_choices, n_experts, [k, inner, n]: [usize; 3]| GroupedSizes {
        n_rows,
        n_choices,
        n_experts,
        k,
        inner,
        n,
    };
    let silu = ExpertActivation::Silu;
    let layer = |dtypes, s, tile| Layer { dtypes, s, tile, f: silu, joined: false, biased: false };
    for dtype in GEMM_DTYPES.into_iter().chain(PACKED_DTYPES) {
        let unit = dtype.block_len().max(32);
        // Some experts have no rows, one has several tiles; columns end inside a plane, rows inside a block.
        let inner = if unit == 256 { 256 } else { 96 };
        cases.push(layer([dtype; 2], sizes(17, 2, 6, [unit, inner, 72]), 8));
    }
    let clamped = ExpertActivation::ClampedSilu { alpha: 1.702, limit: 1.5 };
    for (dtypes, s, tile) in [
        ([DType::Q4_K, DType::Q6_K], sizes(40, 2, 3, [512, 256, 136]), 32),
        ([DType::Q4_K, DType::Q8_0], sizes(70, 2, 2, [256, 160, 8]), 64),
        ([DType::BF16, DType::F16], sizes(34, 3, 3, [72, 200, 264]), 16),
        ([DType::BF16, DType::BF16], sizes(68, 2, 1, [136, 72, 16]), 64),
        ([DType::Q5_0, DType::Q4_0], sizes(16, 4, 40, [64, 32, 8]), 8),
    ] {
        let biased = s.n_rows != 70;
        cases.push(Layer { dtypes, s, tile, f: clamped, joined: true, biased });
        cases.push(Layer { dtypes, s, tile, f: ExpertActivation::GeluTanh, joined: false, biased: !biased });
    }
    cases.into_iter().map(layer_case).collect()
}

struct Layer {
    /// Of gate and up, and of down.
    dtypes: [DType; 2],
    s: GroupedSizes,
    /// Rows of a tile.
    tile: usize,
    f: ExpertActivation,
    joined: bool,
    biased: bool,
}

fn to_bf16(x: &[f32]) -> Vec<f32> {
    decode(DType::BF16, &encode(DType::BF16, x))
}

/// Weights of all experts as bytes, and as the numbers that the tensor cores multiply.
fn narrow_experts(dtype: DType, n_experts: usize, rows: usize, k: usize, seed: u64) -> (Vec<u8>, Vec<f32>) {
    let file = encode(dtype, &normals(n_experts * rows * k, seed));
    let values = match dtype {
        DType::Q4_0 | DType::Q4_1 | DType::Q4_K => four_bits(dtype, &file),
        _ => to_bf16(&decode(dtype, &file)),
    };
    match PACKED_DTYPES.contains(&dtype) {
        true => (pack(dtype, &file, n_experts * rows, k).unwrap(), values),
        false => (file, values),
    }
}

fn layer_case(layer: Layer) -> Case {
    let Layer { dtypes, s, tile, f, joined, biased } = layer;
    let of = ExpertSizes {
        n_rows: s.n_rows,
        n_choices: s.n_choices,
        n_experts: s.n_experts,
        n: s.n,
        k: s.k,
        is_fixed: false,
    };
    let rows = if joined { 2 * s.inner } else { s.inner };
    let (x, ids) = (normals(s.n_rows * s.k, 1), choices(&of));
    let factors = normals(ids.len(), 2);
    let n_first: usize = if joined { 1 } else { 2 };
    let mut weights: Vec<_> =
        (0..n_first).map(|i| narrow_experts(dtypes[0], s.n_experts, rows, s.k, 3 + i as u64)).collect();
    weights.push(narrow_experts(dtypes[1], s.n_experts, s.n, s.inner, 6));
    let mut biases: Vec<_> = (0..n_first).map(|i| normals(s.n_experts * rows, 7 + i as u64)).collect();
    biases.push(normals(s.n_experts * s.n, 9));
    let rounded = to_bf16(&x);
    let mut y = vec![0.0_f64; s.n_rows * s.n];
    for (pair, &id) in ids.iter().enumerate() {
        let Some(expert) = usize::try_from(id).ok().filter(|id| *id < s.n_experts) else { continue };
        let product = |x: &[f32], which: usize, at: usize| {
            let bias = if biased { f64::from(biases[which][at]) } else { 0.0 };
            dot(x, &weights[which].1[at * x.len()..][..x.len()]) + bias
        };
        let x = &rounded[pair / s.n_choices * s.k..][..s.k];
        let inner = |row: usize| {
            let gate = product(x, 0, expert * rows + row);
            let up = match joined {
                true => product(x, 0, expert * rows + s.inner + row),
                false => product(x, 1, expert * rows + row),
            };
            f.apply(gate, up) as f32
        };
        let inner = to_bf16(&(0..s.inner).map(inner).collect::<Vec<f32>>());
        for row in 0..s.n {
            let part = product(&inner, n_first, expert * s.n + row);
            y[pair / s.n_choices * s.n + row] += f64::from(factors[pair]) * part;
        }
    }
    let name = format!("layer {dtypes:?} {s:?} tiles of {tile} {f:?} joined={joined} bias={biased}");
    // Enough for tiles of any size.
    let scratch = 4 * 64 * (ids.len() + 64 * s.n_experts).max(1) * 16;
    let mut roles = vec![
        // Sums near the midpoint of two 16-bit numbers may round either way.
        Role::Out(y.iter().map(|v| *v as f32).collect(), Tol::Whole(1e-2)),
        Role::In(f32s(&x)),
        Role::In(i32s(&ids)),
        Role::In(f32s(&factors)),
        Role::Scratch(scratch),
    ];
    roles.extend(weights.into_iter().map(|(bytes, _)| Role::In(bytes)));
    roles.extend(biases.iter().map(|bias| Role::In(f32s(bias))));
    Case::new(name, roles, move |kernels, b, out| {
        let weight = |i: usize, dtype, rows| ExpertWeight {
            w: b[5 + i],
            dtype,
            rows,
            first: 0,
            bias: biased.then_some(b[6 + n_first + i]),
        };
        let gate = weight(0, dtypes[0], rows);
        let up = match joined {
            true => ExpertWeight { first: s.inner, ..gate },
            false => weight(1, dtypes[0], rows),
        };
        let plan = kernels.grouped_plan(s, dtypes[0], dtypes[1]).unwrap().with_tile_rows(tile);
        let bytes = plan.scratch_bytes().unwrap();
        let args = GroupedArgs {
            plan,
            activation: f,
            x: b[1],
            ids: b[2],
            weights: b[3],
            gate,
            up,
            down: weight(n_first, dtypes[1], s.n),
            y: b[0],
            scratch: b[4].slice(0, bytes)?,
            step: "case",
        };
        kernels.grouped(&args, out)
    })
}

/// Routers within other launches: the logits with the norm before them, the choice with the gate after it.
pub fn routers() -> Vec<Case> {
    let mut cases = Vec::new();
    for (n_experts, k, adds) in [(1, 4, false), (7, 132, true), (128, 512, true), (130, 1000, false)] {
        cases.push(logits_case(n_experts, k, adds));
    }
    for score in [RouteScore::Softmax, RouteScore::Sigmoid, RouteScore::SoftmaxOfChosen] {
        for (n, n_experts, n_choices) in [(1, 1, 1), (3, 7, 7), (2, 130, 8), (1, 70, 40)] {
            for renormalise in [false, true] {
                let route = Route { score, n_choices, renormalise, ..ROUTE };
                cases.push(routed_case(route, normals(n * n_experts, 3), n_experts, DType::BF16));
            }
        }
        let scaled = Route { score, scaled: true, scale: 2.5, ..ROUTE };
        cases.push(routed_case(scaled, normals(5 * 24, 4), 24, DType::Q4_K));
        // Ties, both zeros, and rows without a valid choice.
        let ties = |n: usize| (0..n).map(|i| [0.0, 1.0, -0.0, 1.0, 0.5][i * 7 % 5]).collect();
        cases.push(routed_case(Route { score, n_choices: 6, ..ROUTE }, ties(3 * 40), 40, DType::F32));
        for odd in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 3e38, -3e38] {
            let row = |i: usize| if i % 12 == 5 { odd } else { (i % 12) as f32 * 0.25 };
            cases.push(routed_case(Route { score, ..ROUTE }, (0..24).map(row).collect(), 12, DType::F32));
        }
        cases.push(routed_case(Route { score, ..ROUTE }, vec![f32::NEG_INFINITY; 8], 8, DType::F32));
    }
    cases
}

fn logits_case(n_experts: usize, k: usize, adds: bool) -> Case {
    let [a, b, norm] = [1, 2, 3].map(|seed| normals(k, seed));
    let (w, eps) = (normals(n_experts * k, 4), 1e-5_f32);
    let sum: Vec<f32> = a.iter().zip(&b).map(|(a, b)| if adds { a + b } else { *a }).collect();
    let squares = dot(&sum, &sum) / k as f64;
    let scale = 1.0 / (squares + f64::from(eps)).sqrt();
    let x: Vec<f32> =
        sum.iter().zip(&norm).map(|(v, w)| (f64::from(*v) * scale * f64::from(*w)) as f32).collect();
    let logits = w.chunks_exact(k).map(|w| dot(&x, w) as f32).collect();
    let summed = if adds { Role::Out(sum, Tol::Whole(1e-7)) } else { Role::Scratch(16) };
    let roles = vec![
        Role::Out(logits, Tol::Whole(4e-6)),
        Role::Out(x, Tol::Whole(4e-6)),
        summed,
        Role::In(f32s(&a)),
        Role::In(f32s(&b)),
        Role::In(f32s(&norm)),
        Role::In(f32s(&w)),
    ];
    Case::new(format!("logits of {n_experts} experts, k={k}, adds={adds}"), roles, move |kernels, b, out| {
        out.push(kernels.expert_logits(&ExpertLogitsArgs {
            a: b[3],
            b: adds.then_some(b[4]),
            norm: b[5],
            w: b[6],
            sum: adds.then_some(b[2]),
            x: b[1],
            logits: b[0],
            n_experts,
            k,
            eps,
            step: "case",
        })?);
        Ok(())
    })
}

/// A gate that makes the choices itself.
fn routed_case(route: Route, logits: Vec<f32>, n_experts: usize, dtype: DType) -> Case {
    let n_rows = logits.len() / n_experts;
    let k = dtype.block_len().max(32);
    let s = ExpertSizes { n_rows, n_choices: route.n_choices, n_experts, n: 24, k, is_fixed: false };
    let mut rng = Rng::new(9);
    let scales: Vec<f32> = (0..n_experts).map(|_| 0.5 + rng.unit()).collect();
    let (has_padding, positions) = padding(n_rows);
    let scales_of = route.scaled.then_some(&scales[..]);
    let (ids, factors) = choices_of(&route, &logits, n_experts, None, scales_of, &positions);
    let x = normals(n_rows * k, 1);
    let weights = [2, 3].map(|seed| experts(dtype, n_experts, s.n, k, seed));
    let mut y = Vec::new();
    for (pair, &id) in ids.iter().enumerate() {
        if id < 0 {
            y.extend(vec![0.0; s.n]);
            continue;
        }
        let x = rounded(dtype, &x[pair / s.n_choices * k..][..k]);
        let product =
            |which: usize, row: usize| dot(&x, &weights[which].1[(id as usize * s.n + row) * k..][..k]);
        y.extend((0..s.n).map(|row| ExpertActivation::Silu.apply(product(0, row), product(1, row)) as f32));
    }
    let name =
        format!("gate {dtype} with {route:?} of {n_experts}, first {}", logits[5.min(logits.len() - 1)]);
    let [gate, up] = weights;
    let roles = vec![
        Role::Out(y, tol(dtype)),
        Role::Exact(i32s(&ids)),
        Role::Out(factors, Tol::Whole(4e-6)),
        Role::In(f32s(&x)),
        Role::In(f32s(&logits)),
        Role::In(f32s(&scales)),
        Role::In(gate.0),
        Role::In(up.0),
        Role::In(i32s(&positions)),
    ];
    Case::new(name, roles, move |kernels, b, out| {
        let weight = |w| ExpertWeight { w, dtype, rows: s.n, first: 0, bias: None };
        let scales = route.scaled.then_some(b[5]);
        let args = ExpertGateArgs {
            activation: ExpertActivation::Silu,
            x: b[3],
            ids: b[1],
            gate: weight(b[6]),
            up: weight(b[7]),
            y: b[0],
            sizes: s,
            scratch: None,
            router: Some(GateRouter {
                route,
                logits: b[4],
                scales,
                positions: has_padding.then_some(b[8]),
                weights: b[2],
            }),
            step: "case",
        };
        kernels.expert_gate(&args, out)
    })
}
