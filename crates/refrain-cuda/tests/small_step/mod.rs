//! A small step for tests of the backend itself: embedding, attention of one head over the rows so far, logits, and a
//! choice per token; with a host step and masks on request.
#![allow(dead_code, unreachable_pub, reason = "each test file uses a part of it")]

use std::sync::Arc;

use refrain_graph::{
    Attention, Graph, GraphBuilder, HostBuf, HostCall, HostCallError, HostFn, Op, SAMPLE_PARAMS, Sample,
    SamplingInputs, State, StateId, StepInputs, StepKind, StepShape, TensorType, Weight, WeightId,
};
use refrain_tensor::DType;

pub const D: usize = 16;
pub const N_HISTORY: usize = 8;
pub const KV_BLOCK: usize = 8;
/// Blocks of each sequence.
pub const N_BLOCKS: usize = 8;

/// A host step that copies its input.
struct Same;

impl HostFn for Same {
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, HostCallError> {
        Ok(vec![inputs[0]])
    }

    fn call(&self, inputs: &[HostBuf<'_>], outputs: &mut [&mut [u8]]) -> Result<(), HostCallError> {
        outputs[0].copy_from_slice(inputs[0].bytes);
        Ok(())
    }
}

/// Sizes of a [`SmallStep`].
#[derive(Clone, Copy)]
pub struct SmallStep {
    pub vocab: usize,
    pub n_tokens: usize,
    pub n_seqs: usize,
    /// Whether choices have masks.
    pub is_masked: bool,
    /// Whether a step on the host copies the embedding.
    pub on_host: bool,
}

impl SmallStep {
    pub fn graph(self) -> Graph {
        let SmallStep { vocab, n_tokens, n_seqs, is_masked, on_host } = self;
        let weight = Weight { name: "embedding".into(), ty: TensorType::new(DType::F32, [vocab, D]) };
        let cache = TensorType::new(DType::F32, [n_seqs * N_BLOCKS, 1, KV_BLOCK, D]);
        let states = ["k", "v"].map(|name| State::paged(name, cache));
        let mut b = GraphBuilder::new(vec![weight], states.to_vec());
        let table = b.weight(WeightId::from_idx(0));
        let mut input = |name: &str, dtype, dims: &[usize]| {
            let shape = refrain_tensor::Shape::new(dims).unwrap();
            b.input(name, TensorType::new(dtype, shape)).unwrap()
        };
        let [tokens, positions, seqs] =
            ["tokens", "positions", "seqs"].map(|name| input(name, DType::I32, &[n_tokens]));
        let tables = input("tables", DType::I32, &[n_seqs, N_BLOCKS]);
        let params = input("params", DType::F32, &[n_tokens, SAMPLE_PARAMS]);
        let rng = input("rng", DType::U32, &[n_tokens, 4]);
        let [history, bias_ids] =
            ["history", "bias_ids"].map(|name| input(name, DType::I32, &[n_tokens, N_HISTORY]));
        let bias = input("bias", DType::F32, &[n_tokens, N_HISTORY]);
        let mask = is_masked.then(|| input("mask", DType::U32, &[n_tokens, vocab.div_ceil(32)]));
        let places = [positions, seqs, tables];
        let mut x = b.gather_rows(table, tokens, DType::F32).unwrap();
        if on_host {
            let call = HostCall { name: "same", because: "it runs on the host", function: Arc::new(Same) };
            x = b.host_call(call, &[x]).unwrap()[0];
        }
        let heads = b.reshape(x, &[n_tokens, 1, D]).unwrap();
        let caches = [0, 1].map(|i| {
            let cache = b.state(StateId::from_idx(i));
            b.kv_append(cache, heads, places).unwrap()
        });
        let attention = Attention { scale: 0.25, window: None, softcap: None };
        let y = b.attention(attention, heads, caches, places).unwrap();
        let y = b.reshape(y, &[n_tokens, D]).unwrap();
        let logits = b.linear(y, table, None, "output").unwrap();
        let mut inputs = vec![logits, params, rng, history, bias_ids, bias];
        inputs.extend(mask);
        let sample = Sample { masked: is_masked, ..Sample::default() };
        let chosen = b.node(Op::Sample(sample), &inputs, "sample").unwrap();
        b.output("token", chosen[0]).unwrap();
        b.output("logprob", chosen[1]).unwrap();
        let kind = if n_tokens == n_seqs { StepKind::Decode } else { StepKind::Prompt };
        let id = |value| b.input_id(value);
        let sampling = SamplingInputs {
            params: id(params),
            rng: id(rng),
            history: id(history),
            bias_ids: id(bias_ids),
            bias: id(bias),
            mask: mask.map(id),
            token: 0,
            logprob: 1,
            top: None,
        };
        let declared = StepInputs {
            shape: StepShape { kind, n_tokens, n_seqs, n_choices: n_tokens },
            tokens: id(tokens),
            positions: id(positions),
            seqs: id(seqs),
            tables: Some(id(tables)),
            slots: None,
            adapters: None,
            rows: None,
            sampling: Some(sampling),
            logits: None,
        };
        b.declare_step(declared);
        b.finish()
    }
}
