//! Mixtures of experts: routing, sorting rows by expert, and the epilogue of the matrix products.

use crate::compile::Loc;
use crate::rows;
use crate::simd::{
    self, ActKind, Acts, ExpertBias, ExpertProduct, ExpertRows, Level, experts_parallel, prepare_parallel,
};
use refrain_graph::{ExpertActivation, ExpertGate, Gate, Route, RouteScore, RunError, WeightId};
use std::ops::Range;

/// Matrix products of rows with experts.
#[derive(Clone, Debug)]
pub(crate) struct ExpertCall {
    pub x: Loc,   // [n, k] or [n, n_choices, k]
    pub ids: Loc, // [n, n_choices]
    pub kind: ActKind,
    pub n_choices: usize,
    /// Columns of each expert's matrices.
    pub k: usize,
    pub weights: Vec<WeightId>, // [n_experts, n_rows, k]
    pub biases: Vec<WeightId>,  // [n_experts, n_rows]; none or as many
    pub n_experts: usize,
    /// Rows of each expert's matrices.
    pub n_rows: usize,
    pub out: Range<usize>,
    pub epilogue: ExpertEpilogue,
}

/// Epilogue of the matrix products.
#[derive(Clone, Debug)]
pub(crate) enum ExpertEpilogue {
    /// `out[n, n_choices, f]`
    Gated(ExpertGate),
    /// `out[n, n_rows]`, with the choices' weights `[n, n_choices]`.
    Summed(Loc),
}

impl ExpertCall {
    /// Number of choices of all rows.
    pub(crate) fn n_pairs(&self) -> usize {
        len(&self.ids)
    }

    /// Number of activation rows.
    pub(crate) fn n_acts(&self) -> usize {
        len(&self.x) / self.k.max(1)
    }

    /// Floats of scratch for the matrix products.
    pub(crate) fn floats(&self) -> usize {
        self.n_pairs() * self.n_rows * self.weights.len()
    }
}

fn len(loc: &Loc) -> usize {
    match loc {
        Loc::Arena(range) | Loc::Control(range) => range.len(),
        Loc::Weight(_) => 0,
    }
}

/// Choices sorted by expert. Persists across runs.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sorted {
    /// Activation row of each sorted row.
    acts: Vec<u32>,
    groups: Vec<ExpertRows>,
    /// Sorted row of each choice; [`NO_ROW`] for an empty choice.
    place: Vec<u32>,
    /// First sorted row of each expert; during the sort, the next free one.
    next: Vec<u32>,
}

/// Sorted row of an empty choice.
const NO_ROW: u32 = u32::MAX;

impl Sorted {
    /// Reserves memory, so that sorting does not allocate.
    pub(crate) fn reserve(&mut self, n_pairs: usize, n_experts: usize) {
        let more = |len: usize, to: usize| to.saturating_sub(len);
        self.acts.reserve(more(self.acts.len(), n_pairs));
        self.place.reserve(more(self.place.len(), n_pairs));
        self.next.reserve(more(self.next.len(), n_experts + 1));
        self.groups.reserve(more(self.groups.len(), n_experts.min(n_pairs)));
    }

    /// Sorts the choices by expert, stably. Each activation row has `of_row` choices.
    fn sort(&mut self, label: &str, ids: &[i32], n_experts: usize, of_row: usize) -> Result<(), RunError> {
        self.next.clear();
        self.next.resize(n_experts + 1, 0);
        for &id in ids {
            if let Some(expert) = crate::run::row_of(label, id, n_experts)? {
                self.next[expert + 1] += 1;
            }
        }
        self.groups.clear();
        for expert in 0..n_experts {
            let (start, count) = (self.next[expert], self.next[expert + 1]);
            self.next[expert + 1] += start;
            if count > 0 {
                let rows = start as usize..(start + count) as usize;
                self.groups.push(ExpertRows { expert, rows });
            }
        }
        let n_sorted = self.next[n_experts] as usize;
        self.acts.clear();
        self.acts.resize(n_sorted, 0);
        self.place.clear();
        for (pair, &id) in ids.iter().enumerate() {
            let Ok(expert) = usize::try_from(id) else {
                self.place.push(NO_ROW);
                continue;
            };
            let at = self.next[expert];
            self.next[expert] += 1;
            self.acts[at as usize] = (pair / of_row.max(1)) as u32;
            self.place.push(at);
        }
        Ok(())
    }
}

/// Inputs and outputs of an expert call.
pub(crate) struct ExpertRun<'a> {
    pub label: &'a str,
    pub x: &'a [f32],
    pub ids: &'a [i32],
    /// Weights of the choices; empty if the epilogue does not use them.
    pub factors: &'a [f32],
    pub weights: [Option<simd::WeightMatrix<'a>>; 2],
    pub biases: [Option<ExpertBias<'a>>; 2],
    pub acts: &'a mut [u8],
    pub products: &'a mut [f32],
    pub sorted: &'a mut Sorted,
}

impl ExpertRun<'_> {
    /// Runs the matrix products of a call and its epilogue.
    pub(crate) fn run(
        self,
        pool: &crate::pool::Pool,
        level: Level,
        call: &ExpertCall,
        out: &mut [f32],
    ) -> Result<(), ExpertFault> {
        let of_row = call.n_pairs() / call.n_acts().max(1);
        self.sorted.sort(self.label, self.ids, call.n_experts, of_row).map_err(ExpertFault::Ids)?;
        let sorted = &*self.sorted;
        let acts: Acts<'_> =
            prepare_parallel(pool, level, call.kind, self.x, call.k, self.acts).map_err(ExpertFault::Acts)?;
        let n = call.n_rows;
        let each = sorted.acts.len() * n;
        let (first, rest) = self.products.split_at_mut(each);
        let second = match call.weights.len() {
            1 => &mut rest[..0],
            _ => &mut rest[..each],
        };
        let product = |i: usize, out| {
            let w = self.weights[i].ok_or(ExpertFault::NotAMatrix)?;
            Ok(ExpertProduct { w, n, bias: self.biases[i], out })
        };
        match call.weights.len() {
            1 => {
                experts_parallel(pool, level, &acts, &sorted.acts, &sorted.groups, &mut [product(0, first)?])
            }
            _ => {
                let mut products = [product(0, &mut *first)?, product(1, &mut *second)?];
                experts_parallel(pool, level, &acts, &sorted.acts, &sorted.groups, &mut products);
            }
        }
        let (first, second) = self.products.split_at(each);
        let row = |at: u32| at as usize * n..(at as usize + 1) * n;
        match &call.epilogue {
            ExpertEpilogue::Gated(gate) => {
                let f = if gate.joined { n / 2 } else { n };
                each_row(pool, out, f, |pair, out| match sorted.place[pair] {
                    NO_ROW => out.fill(0.0),
                    at => {
                        let range = row(at);
                        let (g, u) = match gate.joined {
                            true => first[range].split_at(f),
                            false => (&first[range.clone()], &second[range]),
                        };
                        activate(level, gate.activation, g, u, out);
                    }
                });
            }
            ExpertEpilogue::Summed(_) => each_row(pool, out, n, |token, out| {
                out.fill(0.0);
                for pair in token * call.n_choices..(token + 1) * call.n_choices {
                    let at = sorted.place[pair];
                    if at != NO_ROW {
                        let factor = self.factors[pair];
                        out.iter_mut().zip(&first[row(at)]).for_each(|(sum, y)| *sum += factor * y);
                    }
                }
            }),
        }
        Ok(())
    }
}

/// Why an expert call failed.
pub(crate) enum ExpertFault {
    /// An id is not that of an expert.
    Ids(RunError),
    Acts(simd::ActError),
    NotAMatrix,
}

// Below this many elements, waking threads costs more than it saves.
const PARALLEL_ELEMENTS: usize = 16 * 1024;

fn each_row(pool: &crate::pool::Pool, out: &mut [f32], width: usize, f: impl Fn(usize, &mut [f32]) + Sync) {
    if width == 0 {
        return;
    }
    if out.len() < PARALLEL_ELEMENTS {
        out.chunks_exact_mut(width).enumerate().for_each(|(i, out)| f(i, out));
    } else {
        pool.chunks_mut(out, width, f);
    }
}

fn activate(level: Level, f: ExpertActivation, gate: &[f32], up: &[f32], out: &mut [f32]) {
    match f {
        ExpertActivation::Silu => rows::gate(level, Gate::Silu, Some(gate), Some(up), out),
        ExpertActivation::GeluTanh => rows::gate(level, Gate::GeluTanh, Some(gate), Some(up), out),
        ExpertActivation::ClampedSilu { alpha, limit } => {
            for ((out, &g), &u) in out.iter_mut().zip(gate).zip(up) {
                let g = if g > limit { limit } else { g };
                let u = if u > limit {
                    limit
                } else if u < -limit {
                    -limit
                } else {
                    u
                };
                *out = g / (1.0 + (-alpha * g).exp()) * (u + 1.0);
            }
        }
    }
}

/// Routing of a step's rows.
#[derive(Clone, Debug)]
pub(crate) struct RouteCall {
    pub route: Route,
    pub logits: Loc, // [n, n_experts]
    pub n_experts: usize,
    pub bias: Option<WeightId>,          // [n_experts]
    pub scales: Option<WeightId>,        // [n_experts]
    pub positions: Option<Range<usize>>, // control: [n]
    pub ids: Range<usize>,               // [n, n_choices]
    pub weights: Range<usize>,           // [n, n_choices]
}

/// Scratch floats per expert for routing one row: scores and comparison values.
pub(crate) const ROUTE_FLOATS: usize = 2;

/// Computes the choices of one row as [`Route`] defines them; `ids` are stored as bits. `scratch` holds
/// [`ROUTE_FLOATS`] per expert.
pub(crate) fn route_row(
    route: &Route,
    logits: &[f32],
    [bias, scales]: [Option<&[f32]>; 2],
    scratch: &mut [f32],
    ids: &mut [f32],
    weights: &mut [f32],
) {
    let n = logits.len();
    let (scores, compared) = scratch[..2 * n].split_at_mut(n);
    let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    match route.score {
        RouteScore::Softmax => {
            let mut sum = 0.0;
            for (score, logit) in scores.iter_mut().zip(logits) {
                *score = (logit - most).exp();
                sum += *score;
            }
            scores.iter_mut().for_each(|score| *score /= sum);
        }
        RouteScore::Sigmoid => {
            scores.iter_mut().zip(logits).for_each(|(score, logit)| *score = 1.0 / (1.0 + (-logit).exp()));
        }
        RouteScore::SoftmaxOfChosen => scores.copy_from_slice(logits),
    }
    let compares_sums = route.groups.is_some_and(|groups| groups.n_best > 1);
    match bias {
        Some(bias) => compared.iter_mut().zip(&*scores).zip(bias).for_each(|((c, s), b)| *c = s + b),
        None if compares_sums => compared.copy_from_slice(scores),
        None => compared.copy_from_slice(logits),
    }
    let put = |slot: &mut f32, id: usize| *slot = f32::from_bits(id as u32);
    let has_nan = logits.iter().chain(&*compared).any(|v| v.is_nan());
    if has_nan || !most.is_finite() {
        ids.iter_mut().enumerate().for_each(|(id, slot)| put(slot, id));
        weights.fill(f32::NAN);
        return;
    }
    if let Some(groups) = route.groups {
        drop_groups(groups.n_groups, groups.n_kept, groups.n_best, compared);
    }
    // Chosen and dropped experts are NaN, which never wins a comparison.
    for (slot, weight) in ids.iter_mut().zip(weights.iter_mut()) {
        let best = largest(compared).unwrap_or(0);
        compared[best] = f32::NAN;
        put(slot, best);
        *weight = scores[best];
    }
    if route.score == RouteScore::SoftmaxOfChosen {
        let most = weights.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        weights.iter_mut().for_each(|w| *w = (*w - most).exp());
        let total: f32 = weights.iter().sum();
        weights.iter_mut().for_each(|w| *w /= total);
    }
    if route.renormalise {
        let sum = weights.iter().sum::<f32>() + 1e-20;
        weights.iter_mut().for_each(|w| *w /= sum);
    }
    for (slot, weight) in ids.iter().zip(weights) {
        *weight *= route.scale * scales.map_or(1.0, |scales| scales[slot.to_bits() as usize]);
    }
}

/// Index of the first maximum, ignoring NaN.
fn largest(values: &[f32]) -> Option<usize> {
    let mut best: Option<usize> = None;
    for (i, v) in values.iter().enumerate().filter(|(_, v)| !v.is_nan()) {
        if best.is_none_or(|best| *v > values[best]) {
            best = Some(i);
        }
    }
    best
}

/// Sets all but the best groups to NaN.
fn drop_groups(n_groups: usize, n_kept: usize, n_best: usize, compared: &mut [f32]) {
    let size = compared.len() / n_groups;
    let worth = |group: &[f32]| {
        let mut sum = 0.0;
        // Sums the best values without sorting, in descending order; equal values in index order.
        let mut last: Option<(f32, usize)> = None;
        for _ in 0..n_best {
            let mut best: Option<(f32, usize)> = None;
            for (i, &v) in group.iter().enumerate() {
                let is_left = last.is_none_or(|(value, at)| v < value || v == value && i > at);
                if is_left && best.is_none_or(|(value, _)| v > value) {
                    best = Some((v, i));
                }
            }
            sum += best.map_or(0.0, |(value, _)| value);
            last = best.or(last);
        }
        sum
    };
    let rank = |of: usize, compared: &[f32]| {
        let group = |g: usize| &compared[g * size..(g + 1) * size];
        let own = worth(group(of));
        let beats = |g: &usize| {
            let other = worth(group(*g));
            other > own || other == own && *g < of
        };
        (0..n_groups).filter(|g| *g != of).filter(beats).count()
    };
    let mut keep = [true; MAX_GROUPS];
    for (g, keep) in keep.iter_mut().enumerate().take(n_groups) {
        *keep = rank(g, compared) < n_kept;
    }
    for (g, group) in compared.chunks_exact_mut(size).enumerate() {
        if !keep[g] {
            group.fill(f32::NAN);
        }
    }
}

/// Maximum number of groups, which are kept on the stack.
pub(crate) const MAX_GROUPS: usize = 64;
