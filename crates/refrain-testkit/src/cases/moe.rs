//! Cases of routing and expert products.

use super::{FLOATS, quantised};
use crate::case::{Arg, Case};
use crate::compare::Tol;
use crate::fill::Fill;
use refrain_graph::{ExpertActivation, ExpertGate, MoeOp, Op, Route, RouteGroups, RouteScore};
use refrain_tensor::DType;

const SOFTMAX: Route = Route {
    n_choices: 2,
    score: RouteScore::Softmax,
    biased: false,
    scaled: false,
    groups: None,
    renormalise: true,
    scale: 1.0,
};

pub(super) fn route() -> Vec<Case> {
    let mut cases = Vec::new();
    let mut add = |name: &str, route: Route, [n, n_experts]: [usize; 2], fill: Fill| {
        let mut args = vec![Arg::float(DType::F32, [n, n_experts]).fill(fill)];
        let vectors = usize::from(route.biased) + usize::from(route.scaled);
        args.extend((0..vectors).map(|_| Arg::weight(DType::F32, [n_experts]).fill(Fill::Uniform(0.5, 1.5))));
        cases.push(Case::one_node(name, Op::Moe(MoeOp::Route(route)), Tol::Whole(2e-6), args));
    };
    for [n, n_experts, n_choices] in [[1, 1, 1], [3, 7, 7], [5, 40, 3], [2, 128, 8], [1, 300, 8]] {
        for score in [RouteScore::Softmax, RouteScore::Sigmoid, RouteScore::SoftmaxOfChosen] {
            for renormalise in [false, true] {
                let route = Route { n_choices, score, renormalise, ..SOFTMAX };
                let again = if renormalise { ", renormalised" } else { "" };
                let name = format!("{score:?}, {n_choices} of {n_experts}, {n} rows{again}");
                add(&name, route, [n, n_experts], Fill::Normal);
            }
        }
    }
    let scaled = Route { scaled: true, n_choices: 4, scale: 2.5, ..SOFTMAX };
    add("experts with scales", scaled, [3, 16], Fill::Normal);
    let groups = Some(RouteGroups { n_groups: 4, n_kept: 2, n_best: 2 });
    let sigmoid = Route { score: RouteScore::Sigmoid, biased: true, n_choices: 4, groups, ..SOFTMAX };
    add("sigmoid with a bias in groups", Route { scale: 2.5, ..sigmoid }, [5, 32], Fill::Normal);
    add("sigmoid with a bias", Route { groups: None, ..sigmoid }, [5, 32], Fill::Normal);
    let best = RouteGroups { n_groups: 8, n_kept: 3, n_best: 1 };
    let of_best = Route { groups: Some(best), n_choices: 6, renormalise: false, scale: 16.0, ..SOFTMAX };
    add("softmax in groups by their best", of_best, [4, 64], Fill::Normal);
    add(
        "all groups stay",
        Route { groups: Some(RouteGroups { n_kept: 8, ..best }), ..of_best },
        [4, 64],
        Fill::Normal,
    );
    // Runs of equal numbers, and both zeros.
    let ties = |n: usize| Fill::Floats((0..n).map(|i| [0.0, 1.0, -0.0, 1.0, 0.5][i * 7 % 5]).collect());
    for score in [RouteScore::Softmax, RouteScore::Sigmoid, RouteScore::SoftmaxOfChosen] {
        let route = Route { score, n_choices: 5, ..SOFTMAX };
        add(&format!("{score:?}, ties go to the lower id"), route, [3, 40], ties(120));
        add(&format!("{score:?}, all equal"), route, [2, 40], Fill::Zero);
    }
    let in_groups = Route { groups, n_choices: 5, ..SOFTMAX };
    add("ties among groups", in_groups, [2, 40], Fill::Zero);
    let odd = |first: f32| {
        let value = |i: usize| if i % 12 == 5 { first } else { (i % 12) as f32 * 0.25 };
        Fill::Floats((0..24).map(value).collect())
    };
    for (name, first) in [
        ("a NaN", f32::NAN),
        ("an infinity", f32::INFINITY),
        ("minus infinity", f32::NEG_INFINITY),
        ("a huge number", 3e38),
        ("a hugely negative number", -3e38),
    ] {
        for score in [RouteScore::Softmax, RouteScore::Sigmoid, RouteScore::SoftmaxOfChosen] {
            let route = Route { score, n_choices: 3, ..SOFTMAX };
            add(&format!("{score:?}, extreme: {name}"), route, [2, 12], odd(first));
        }
    }
    let nothing = Fill::Floats(vec![f32::NEG_INFINITY; 8]);
    add("extreme: all minus infinity", SOFTMAX, [1, 8], nothing);
    for route in [SOFTMAX, Route { scaled: true, biased: true, ..SOFTMAX }] {
        let mut args = vec![Arg::float(DType::F32, [5, 24])];
        args.extend(
            (0..route.n_vectors()).map(|_| Arg::weight(DType::F32, [24]).fill(Fill::Uniform(0.5, 1.5))),
        );
        args.push(Arg::ints([5], vec![7, -1, 0, -1, 3]));
        let name = format!("padding among rows, {} vectors", route.n_vectors());
        cases.push(Case::one_node(name, Op::Moe(MoeOp::Route(route)), Tol::Whole(2e-6), args));
    }
    cases
}

/// Expert choices per row: some experts have none, one has many, and some choices are empty.
fn choices(n: usize, k: usize, n_experts: usize) -> Vec<i32> {
    let id = |i: usize| match i {
        i if i % 11 == 7 => -1,
        i if i % 3 == 0 => n_experts as i32 - 1,
        i => (i * 5 % n_experts.max(2) / 2 * 2 % n_experts) as i32,
    };
    (0..n * k).map(id).collect()
}

const SILU: ExpertGate = ExpertGate { activation: ExpertActivation::Silu, joined: false, biased: false };

/// n, k, n_experts, f and d of `[n, d]` by `[n_experts, f, d]`.
type MoeSizes = [usize; 5];

fn gated_case(
    name: &str,
    gate: ExpertGate,
    dtype: DType,
    weight: DType,
    sizes: MoeSizes,
    ids: Vec<i32>,
) -> Case {
    let [n, k, n_experts, f, d] = sizes;
    let rows = if gate.joined { 2 * f } else { f };
    let mut args = vec![Arg::float(dtype, [n, d]), Arg::ints([n, k], ids)];
    args.extend((0..gate.n_weights()).map(|_| Arg::weight(weight, [n_experts, rows, d])));
    if gate.biased {
        args.extend((0..gate.n_weights()).map(|_| Arg::weight(DType::F32, [n_experts, rows])));
    }
    let tol = Tol::Whole(8e-6).rounded_to(dtype);
    Case::one_node(format!("{name}, {n}x{k} of {n_experts}, {f}x{d}"), Op::Moe(MoeOp::Gated(gate)), tol, args)
}

fn summed_case(
    name: &str,
    biased: bool,
    dtype: DType,
    weight: DType,
    sizes: MoeSizes,
    ids: Vec<i32>,
) -> Case {
    let [n, k, n_experts, f, d] = sizes;
    let mut args = vec![
        Arg::float(dtype, [n, k, f]),
        Arg::ints([n, k], ids),
        Arg::float(DType::F32, [n, k]).fill(Fill::Uniform(0.0, 1.0)),
        Arg::weight(weight, [n_experts, d, f]),
    ];
    if biased {
        args.push(Arg::weight(DType::F32, [n_experts, d]));
    }
    let tol = Tol::Whole(8e-6).rounded_to(dtype);
    let name = format!("{name}, {n}x{k} of {n_experts}, {d}x{f}");
    Case::one_node(name, Op::Moe(MoeOp::Summed { biased }), tol, args)
}

pub(super) fn experts() -> Vec<Case> {
    let mut cases = Vec::new();
    let mut both = |name: &str, dtype, weight, gate: ExpertGate, [n, k, e, f, d]: MoeSizes, ids: Vec<i32>| {
        cases.push(gated_case(name, gate, dtype, weight, [n, k, e, f, d], ids.clone()));
        cases.push(summed_case(name, gate.biased, dtype, weight, [n, k, e, d, f], ids));
    };
    for weight in FLOATS {
        for [n, k, e, f, d] in [[1, 2, 4, 5, 33], [7, 3, 8, 17, 40], [33, 2, 3, 8, 64], [1, 1, 1, 1, 1]] {
            let name = format!("F32 by {weight}");
            both(&name, DType::F32, weight, SILU, [n, k, e, f, d], choices(n, k, e));
        }
        let biased = ExpertGate { biased: true, ..SILU };
        both(
            &format!("{weight} with biases"),
            DType::F32,
            weight,
            biased,
            [5, 2, 4, 16, 24],
            choices(5, 2, 4),
        );
    }
    for dtype in [DType::F16, DType::BF16] {
        both(&format!("rows of {dtype}"), dtype, dtype, SILU, [3, 2, 4, 16, 24], choices(3, 2, 4));
    }
    for weight in quantised() {
        let len = weight.block_len();
        let name = format!("F32 by {weight}");
        both(&name, DType::F32, weight, SILU, [1, 3, 5, 24, 2 * len], choices(1, 3, 5));
        both(&name, DType::F32, weight, SILU, [9, 2, 4, 16, len], choices(9, 2, 4));
    }
    let clamped = ExpertActivation::ClampedSilu { alpha: 1.702, limit: 1.5 };
    for activation in [ExpertActivation::Silu, ExpertActivation::GeluTanh, clamped] {
        for joined in [false, true] {
            for biased in [false, true] {
                let gate = ExpertGate { activation, joined, biased };
                let name = format!(
                    "{activation:?}{}{}",
                    if joined { ", joined" } else { "" },
                    if biased { ", biased" } else { "" }
                );
                cases.push(gated_case(
                    &name,
                    gate,
                    DType::F32,
                    DType::BF16,
                    [4, 2, 4, 16, 64],
                    choices(4, 2, 4),
                ));
                cases.push(gated_case(
                    &format!("Q8_0 {name}"),
                    gate,
                    DType::F32,
                    DType::Q8_0,
                    [4, 2, 4, 16, 64],
                    choices(4, 2, 4),
                ));
            }
        }
    }
    // All rows to one expert, and no rows to any.
    for weight in [DType::BF16, DType::Q4_0] {
        for (name, id) in [("all to one expert", 2), ("nobody to any expert", -1)] {
            let name = format!("{weight}, {name}");
            cases.push(gated_case(&name, SILU, DType::F32, weight, [20, 1, 4, 16, 64], vec![id; 20]));
            cases.push(summed_case(&name, false, DType::F32, weight, [20, 1, 4, 64, 16], vec![id; 20]));
        }
    }
    cases
}
