//! Mixture of experts: the router, and products with the chosen experts.

use crate::dense::{In, Out, ReferenceError};
use refrain_graph::{ExpertGate, MoeOp, Route, RouteGroups, RouteScore};
use refrain_tensor::DType;

pub(crate) fn run(op: &MoeOp, inputs: &[In<'_>], outputs: &mut [Out<'_>]) -> Result<(), ReferenceError> {
    match op {
        MoeOp::Route(route) => run_route(route, inputs, outputs),
        MoeOp::Gated(gate) => gated(gate, inputs, &mut outputs[0]),
        MoeOp::Summed { biased } => summed(*biased, inputs, &mut outputs[0]),
    }
}

fn run_route(route: &Route, inputs: &[In<'_>], outputs: &mut [Out<'_>]) -> Result<(), ReferenceError> {
    let logits = inputs[0].to_f32()?;
    let mut vectors = inputs[1..=route.n_vectors()].iter().map(In::to_f32);
    let bias = if route.biased { vectors.next().transpose()? } else { None };
    let scales = vectors.next().transpose()?;
    let positions = route.positions(inputs.len()).map(|i| inputs[i].to_i32()).transpose()?;
    let (mut ids, mut weights) = (Vec::new(), Vec::new());
    for (i, row) in logits.chunks_exact(inputs[0].dim(1).max(1)).enumerate() {
        if positions.as_ref().is_some_and(|positions| positions[i] < 0) {
            ids.extend((-1_i32).to_le_bytes().repeat(route.n_choices));
            weights.extend(vec![0.0; route.n_choices]);
            continue;
        }
        let chosen = route_row(route, row, bias.as_deref(), scales.as_deref());
        ids.extend(chosen.iter().flat_map(|(id, _)| (*id as i32).to_le_bytes()));
        weights.extend(chosen.iter().map(|(_, weight)| *weight));
    }
    outputs[0].bytes.copy_from_slice(&ids);
    outputs[1].store(&weights)
}

/// Returns the choices of a row with their weights, best first.
#[must_use]
pub fn route_row(
    route: &Route,
    logits: &[f32],
    bias: Option<&[f32]>,
    scales: Option<&[f32]>,
) -> Vec<(usize, f32)> {
    let logits: Vec<f64> = logits.iter().map(|&v| v.into()).collect();
    let most = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = logits.iter().map(|v| (v - most).exp()).sum();
    let score = |id: usize| match route.score {
        RouteScore::Softmax => (logits[id] - most).exp() / sum,
        RouteScore::Sigmoid => 1.0 / (1.0 + (-logits[id]).exp()),
        // Only for comparison: the weights are computed below.
        RouteScore::SoftmaxOfChosen => logits[id],
    };
    // Scores have the same order as logits. If nothing is added to them, logits are compared, so that
    // rounding creates no ties.
    let sums = route.groups.is_some_and(|groups| groups.n_best > 1);
    let compared: Vec<f64> = match bias {
        Some(bias) => (0..logits.len()).map(|id| score(id) + f64::from(bias[id])).collect(),
        None if sums => (0..logits.len()).map(score).collect(),
        None => logits.clone(),
    };
    let has_nan = |values: &[f64]| values.iter().any(|v| v.is_nan());
    if has_nan(&logits) || has_nan(&compared) || !most.is_finite() {
        return (0..route.n_choices).map(|id| (id, f32::NAN)).collect();
    }
    let mut order: Vec<usize> = (0..logits.len()).collect();
    if let Some(groups) = route.groups {
        let kept = kept_groups(groups, &compared);
        let size = logits.len() / groups.n_groups;
        order.retain(|id| kept.contains(&(id / size)));
    }
    best_first(&mut order, |id| compared[id]);
    order.truncate(route.n_choices);
    let mut weights: Vec<f64> = match route.score {
        RouteScore::Softmax | RouteScore::Sigmoid => order.iter().map(|&id| score(id)).collect(),
        RouteScore::SoftmaxOfChosen => {
            let most = order.iter().map(|&id| logits[id]).fold(f64::NEG_INFINITY, f64::max);
            let raised: Vec<f64> = order.iter().map(|&id| (logits[id] - most).exp()).collect();
            let sum: f64 = raised.iter().sum();
            raised.iter().map(|v| v / sum).collect()
        }
    };
    if route.renormalise {
        let sum = weights.iter().sum::<f64>() + SMALLEST_SUM;
        weights.iter_mut().for_each(|w| *w /= sum);
    }
    let scale = |id: usize| f64::from(route.scale) * scales.map_or(1.0, |scales| f64::from(scales[id]));
    order.iter().zip(weights).map(|(&id, weight)| (id, (weight * scale(id)) as f32)).collect()
}

/// Added to the sum that weights are divided by, as in the models' own code.
const SMALLEST_SUM: f64 = 1e-20;

/// Sorts ids by value, largest first; ties put the lower id first.
fn best_first(ids: &mut [usize], value: impl Fn(usize) -> f64) {
    // Zeros of both signs are equal.
    ids.sort_by(|&a, &b| {
        value(b).partial_cmp(&value(a)).unwrap_or(std::cmp::Ordering::Equal).then(a.cmp(&b))
    });
}

fn kept_groups(groups: RouteGroups, compared: &[f64]) -> Vec<usize> {
    let worth = |group: &[f64]| {
        let mut ids: Vec<usize> = (0..group.len()).collect();
        best_first(&mut ids, |id| group[id]);
        ids[..groups.n_best].iter().map(|&id| group[id]).sum::<f64>()
    };
    let worths: Vec<f64> = compared.chunks_exact(compared.len() / groups.n_groups).map(worth).collect();
    let mut order: Vec<usize> = (0..groups.n_groups).collect();
    best_first(&mut order, |group| worths[group]);
    order.truncate(groups.n_kept);
    order
}

/// Returns the expert that an id names; `None` for a negative one.
fn expert(id: i32, n_experts: usize) -> Result<Option<usize>, ReferenceError> {
    match usize::try_from(id) {
        Err(_) => Ok(None),
        Ok(id) if id < n_experts => Ok(Some(id)),
        Ok(_) => Err(ReferenceError::OutOfRange { index: "expert", got: id.into(), limit: n_experts }),
    }
}

/// Decodes the matrix of an expert: `[rows, k]`.
fn matrix(w: &In<'_>, expert: usize) -> Result<Vec<f32>, ReferenceError> {
    let one = In { layout: w.layout.slice(0, expert, 1)?, ..*w };
    // If the expert's bytes are contiguous, only those are decoded.
    if one.layout.is_contiguous() {
        let (start, n) = (one.layout.offset(), one.layout.shape().n_elements());
        if let (Some(from), Some(len)) = (w.dtype.bytes_for(start), w.dtype.bytes_for(n)) {
            let layout = refrain_tensor::Layout::contiguous(one.layout.shape());
            return Ok(In { layout, bytes: &w.bytes[from..from + len], ..*w }.to_f32()?);
        }
    }
    Ok(one.to_f32()?)
}

fn products(w: &[f32], x: &[f32]) -> Vec<f64> {
    let dot = |row: &[f32]| row.iter().zip(x).map(|(&w, &x)| f64::from(w) * f64::from(x)).sum();
    match x.len() {
        0 => Vec::new(),
        k => w.chunks_exact(k).map(dot).collect(),
    }
}

fn biased(mut y: Vec<f64>, bias: Option<&In<'_>>, expert: usize) -> Result<Vec<f64>, ReferenceError> {
    if let Some(bias) = bias {
        let row = In { layout: bias.layout.slice(0, expert, 1)?, ..*bias }.to_f32()?;
        y.iter_mut().zip(row).for_each(|(y, b)| *y += f64::from(b));
    }
    Ok(y)
}

fn gated(gate: &ExpertGate, inputs: &[In<'_>], out: &mut Out<'_>) -> Result<(), ReferenceError> {
    let (x, ids) = (inputs[0].to_f32()?, inputs[1].to_i32()?);
    let (d, k) = (inputs[0].dim(1), inputs[1].dim(1));
    let weights = &inputs[2..2 + gate.n_weights()];
    let biases = &inputs[2 + gate.n_weights()..];
    let f = out.ty.shape.dims()[2];
    let mut y = Vec::with_capacity(ids.len() * f);
    for (at, &id) in ids.iter().enumerate() {
        let Some(expert) = expert(id, weights[0].dim(0))? else {
            y.extend(std::iter::repeat_n(0.0, f));
            continue;
        };
        let row = &x[at / k * d..][..d];
        let product = |i: usize| biased(products(&matrix(&weights[i], expert)?, row), biases.get(i), expert);
        let (gates, ups) = match gate.joined {
            true => {
                let mut both = product(0)?;
                let ups = both.split_off(f);
                (both, ups)
            }
            false => (product(0)?, product(1)?),
        };
        y.extend(gates.iter().zip(ups).map(|(&g, u)| gate.activation.apply(g, u) as f32));
    }
    out.store(&y)
}

fn summed(is_biased: bool, inputs: &[In<'_>], out: &mut Out<'_>) -> Result<(), ReferenceError> {
    let (h, ids, weights) = (inputs[0].to_f32()?, inputs[1].to_i32()?, inputs[2].to_f32()?);
    debug_assert_eq!(inputs[2].dtype, DType::F32);
    let (k, f, d) = (inputs[0].dim(1), inputs[0].dim(2), inputs[3].dim(1));
    let mut y = Vec::with_capacity(inputs[0].dim(0) * d);
    for (row, ids) in ids.chunks_exact(k.max(1)).enumerate() {
        let mut sum = vec![0.0_f64; d];
        for (choice, &id) in ids.iter().enumerate() {
            let Some(expert) = expert(id, inputs[3].dim(0))? else { continue };
            let at = row * k + choice;
            let product = products(&matrix(&inputs[3], expert)?, &h[at * f..][..f]);
            let product = biased(product, inputs.get(4).filter(|_| is_biased), expert)?;
            sum.iter_mut().zip(product).for_each(|(sum, y)| *sum += f64::from(weights[at]) * y);
        }
        y.extend(sum.iter().map(|&v| v as f32));
    }
    out.store(&y)
}
