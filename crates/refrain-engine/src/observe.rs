//! Observes the activations that each weight matrix multiplies, for importance matrices.
//!
//! The graph of a prompt step gets these activations as outputs. Nothing else changes, so it works for every
//! architecture and backend.

use crate::core::check_tokens;
use crate::error::EngineError;
use crate::perplexity::{MIN_WINDOW, PerplexityOptions};
use crate::step::{StepRequest, Want, fill};
use refrain_graph::{
    Backend, ControlBlock, Graph, GraphBuilder, Io, MoeOp, Op, ValueId, ValueOrigin, WeightId, fuse,
};
use refrain_models::{Head, KvSpec, Model, StepSpec};
use refrain_tensor::DType;
use std::collections::BTreeMap;

/// Tokens in a step: enough for efficient products, few enough that all observed activations fit in memory.
const STEP_TOKENS: usize = 128;
const KV_BLOCK: usize = 32;

/// Sums over the activations that one weight multiplied.
#[derive(Clone, Debug, PartialEq)]
pub struct ObservedWeight {
    /// The weight.
    pub weight: WeightId,
    /// Sum of the squares of each column, `[n_matrices, n_columns]`: one matrix, or one for each expert.
    pub sums: Vec<f64>,
    /// Rows that were summed for each matrix.
    pub counts: Vec<u64>,
}

/// The place of a weight's activations among the outputs of a step.
struct ObservedSite {
    weight: WeightId,
    n_matrices: usize,
    n_columns: usize,
    output: usize,
    /// The output with the experts of each row, and their number per row.
    experts: Option<(usize, usize)>,
    /// Whether each of a row's experts has activations of its own.
    per_choice: bool,
}

/// Evaluates a text window by window and sums the squares of the activations that each weight multiplies. `progress`
/// receives the number of windows and how many are done.
pub fn observe<B: Backend>(
    mut backend: B,
    model: &Model,
    tokens: &[u32],
    options: PerplexityOptions,
    mut progress: impl FnMut(usize, usize),
) -> Result<(Vec<ObservedWeight>, usize), EngineError> {
    let window = options.window;
    let context = model.config().n_context;
    if window < MIN_WINDOW || window > context {
        return Err(EngineError::Window { window, context });
    }
    if tokens.len() < window {
        return Err(EngineError::TextTooShort { n_tokens: tokens.len(), window });
    }
    let n_windows = (tokens.len() / window).min(options.max_windows.unwrap_or(usize::MAX));
    check_tokens(model, &tokens[..n_windows * window])?;
    check_tokens(model, options.bos.as_slice())?;
    let n_blocks = window.div_ceil(KV_BLOCK);
    let n_slots = if model.has_slots() { 2 } else { 0 };
    let kv = KvSpec { n_blocks, kv_block: KV_BLOCK, max_blocks: n_blocks, n_slots, dtype: DType::F32 };
    // With logits of all rows, no layer drops rows.
    let step_tokens = STEP_TOKENS.min(window);
    let spec = StepSpec::of_one(step_tokens, step_tokens, Head::Logits);
    let (graph, sites) = with_sites(model.graph(&spec, &kv)?)?;
    let weights = backend.load(model.weights(), model.tensors().to_vec())?;
    let mut states = backend.allocate(&model.states(&kv))?;
    let mut compiled = backend.compile(&fuse(&graph)?)?;
    let inputs = backend.plan(&compiled).step_inputs().cloned().ok_or(EngineError::NoFeedback)?;
    let mut control = ControlBlock::new(backend.plan(&compiled).control());
    let table: Vec<u32> = (0..n_blocks as u32).collect();
    let mut seen: BTreeMap<usize, ObservedWeight> = BTreeMap::new();
    for (idx, text) in tokens.chunks_exact(window).take(n_windows).enumerate() {
        let mut text = text.to_vec();
        if let Some(bos) = options.bos {
            text[0] = bos;
        }
        for (step, part) in text.chunks(step_tokens).enumerate() {
            let slots = if model.has_slots() { [0, 1] } else { [-1, -1] };
            let want = Want::Logits { n_rows: part.len() };
            let request = StepRequest {
                tokens: part,
                start: step * step_tokens,
                table: &table,
                slots,
                adapter: None,
                want,
            };
            fill(&inputs, &mut control, &[request])?;
            let io = Io { weights: &weights, states: &mut states, control: control.bytes() };
            backend.run(&mut compiled, io)?;
            for site in &sites {
                let experts = site.experts.map(|(output, n)| (output, n, part.len() * n));
                let ids = match experts {
                    Some((output, n, _)) => {
                        let mut ids = vec![0i32; step_tokens * n];
                        backend.read(&compiled, output, bytemuck::cast_slice_mut(&mut ids))?;
                        ids
                    }
                    None => Vec::new(),
                };
                let n_choices = site.experts.map_or(1, |(_, n)| n);
                let per_row = if site.per_choice { n_choices } else { 1 };
                let mut rows = vec![0f32; step_tokens * per_row * site.n_columns];
                backend.read(&compiled, site.output, bytemuck::cast_slice_mut(&mut rows))?;
                let into = seen.entry(site.weight.idx()).or_insert_with(|| ObservedWeight {
                    weight: site.weight,
                    sums: vec![0.0; site.n_matrices * site.n_columns],
                    counts: vec![0; site.n_matrices],
                });
                add_rows(into, site, &rows, &ids, part.len());
            }
        }
        progress(n_windows, idx + 1);
    }
    if let Some(bad) = seen.values().find(|w| !w.sums.iter().all(|sum| sum.is_finite())) {
        let name = model.weights()[bad.weight.idx()].name.clone();
        return Err(EngineError::NonFiniteActivations { name });
    }
    Ok((seen.into_values().collect(), n_windows))
}

/// Adds the squares of the first `n_rows` rows.
fn add_rows(into: &mut ObservedWeight, site: &ObservedSite, rows: &[f32], ids: &[i32], n_rows: usize) {
    let n = site.n_columns;
    let mut add = |matrix: usize, row: &[f32]| {
        into.counts[matrix] += 1;
        for (sum, &v) in into.sums[matrix * n..][..n].iter_mut().zip(row) {
            *sum += f64::from(v) * f64::from(v);
        }
    };
    let Some((_, n_choices)) = site.experts else {
        rows.chunks_exact(n).take(n_rows).for_each(|row| add(0, row));
        return;
    };
    for (choice, &expert) in ids.iter().enumerate().take(n_rows * n_choices) {
        let at = if site.per_choice { choice } else { choice / n_choices };
        match usize::try_from(expert) {
            Ok(expert) if expert < site.n_matrices => add(expert, &rows[at * n..][..n]),
            // An empty choice.
            _ => {}
        }
    }
}

/// Adds the activations of every weight matrix to the outputs of a step.
fn with_sites(graph: Graph) -> Result<(Graph, Vec<ObservedSite>), EngineError> {
    let mut found = Vec::new();
    for node in graph.nodes() {
        let weight_at = |input: usize| node.inputs.get(input).and_then(|&value| weight_of(&graph, value));
        match &node.op {
            Op::MatMul => found.extend(weight_at(1).map(|weight| (weight, node.inputs[0], None, false))),
            Op::Moe(MoeOp::Gated(gate)) => {
                let n_weights = if gate.joined { 1 } else { 2 };
                let weights = (2..2 + n_weights).filter_map(weight_at);
                found.extend(weights.map(|weight| (weight, node.inputs[0], Some(node.inputs[1]), false)));
            }
            Op::Moe(MoeOp::Summed { .. }) => {
                let weight = weight_at(3);
                found.extend(weight.map(|weight| (weight, node.inputs[0], Some(node.inputs[1]), true)));
            }
            Op::Moe(MoeOp::Route(_))
            // Weights of adapters are never quantised.
            | Op::Lora(_)
            | Op::View(_)
            | Op::Copy
            | Op::Cast(_)
            | Op::Unary(_)
            | Op::Binary(_)
            | Op::Reduce { .. }
            | Op::Compare(_)
            | Op::Select
            | Op::Pick
            | Op::PlaceColumns { .. }
            | Op::Pad { .. }
            | Op::Softmax
            | Op::GatherRows(_)
            | Op::ScatterAddRows { .. }
            | Op::RmsNorm { .. }
            | Op::AddRmsNorm { .. }
            | Op::Gate(_)
            | Op::Rope(_)
            | Op::KvAppend
            | Op::KvAppendBytes
            | Op::Attention(_)
            | Op::SpanAttention(_)
            | Op::Sample(_)
            | Op::Accumulate
            | Op::Recurrent(_)
            | Op::Train(_)
            | Op::HostCall(_) => {}
        }
    }
    let mut builder = GraphBuilder::resume(graph);
    let mut outputs: BTreeMap<usize, usize> = BTreeMap::new();
    let mut output = |builder: &mut GraphBuilder, value: ValueId| -> Result<usize, EngineError> {
        if let Some(&output) = outputs.get(&value.idx()) {
            return Ok(output);
        }
        let output = builder.n_outputs();
        builder.output(&format!("observed.{output}"), value)?;
        outputs.insert(value.idx(), output);
        Ok(output)
    };
    let mut sites = Vec::new();
    for (weight, rows, ids, per_choice) in found {
        let shape = builder.graph().weights()[weight.idx()].ty.shape;
        let n_matrices = if shape.rank() > 2 { shape.dims()[0] } else { 1 };
        let experts = match ids {
            Some(ids) => Some((output(&mut builder, ids)?, builder.ty(ids).shape.dim_back(0))),
            None => None,
        };
        let n_columns = shape.dim_back(0);
        let output = output(&mut builder, rows)?;
        sites.push(ObservedSite { weight, n_matrices, n_columns, output, experts, per_choice });
    }
    Ok((builder.finish(), sites))
}

/// The weight that a value is, or is a view of.
fn weight_of(graph: &Graph, value: ValueId) -> Option<WeightId> {
    let mut value = value;
    loop {
        match graph.value(value).origin {
            ValueOrigin::Weight(weight) => return Some(weight),
            ValueOrigin::Node { node, .. } if matches!(graph.node(node).op, Op::View(_)) => {
                value = graph.node(node).inputs[0];
            }
            ValueOrigin::Node { .. } | ValueOrigin::Input(_) | ValueOrigin::State(_) => return None,
        }
    }
}
