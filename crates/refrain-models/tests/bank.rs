//! Banks of adapters: a sequence gets what it gets from the model with its adapter alone, whatever its
//! neighbours have.

mod common;

use common::bank::{adapters, banked};
use common::{folder, relative_error};
use refrain_cpu::CpuBackend;
use refrain_engine::{
    AdapterId, BackendRunner, Core, DraftSource, Engine, EngineError, EngineOptions, Request, RunnerOptions,
    SamplingParams, Speculation, TokenEvent,
};
use refrain_formats::ModelFiles;
use refrain_graph::{LoraOp, Op, Plan, PlanOptions, fuse};
use refrain_models::{BankAdapter, Head, KvSpec, Model, ModelError, StepSpec};
use refrain_tensor::DType;
use std::collections::BTreeSet;
use std::sync::Arc;

const CONTEXT: usize = 64;

fn open(case: &str) -> Model {
    let file = folder(case).join("model.gguf");
    let files = ModelFiles::open(if file.exists() { file } else { folder(case) }).unwrap();
    Model::load(&files).unwrap()
}

fn runner(model: Model) -> Box<BackendRunner<CpuBackend>> {
    let options = RunnerOptions {
        context: CONTEXT,
        n_positions: 8 * CONTEXT,
        kv_block: 8,
        kv_dtype: DType::F32,
        max_tokens: 16,
        ..RunnerOptions::default()
    };
    Box::new(BackendRunner::new(CpuBackend::shared(2).unwrap(), Arc::new(model), options).unwrap())
}

fn engine(model: Model) -> Engine {
    Engine::new(runner(model), EngineOptions::default()).unwrap()
}

/// Logits of all tokens, in several steps.
fn logits(core: &mut Core, adapter: Option<u32>, tokens: &[u32]) -> Vec<f32> {
    let mut sequence = core.open_with(adapter.map(AdapterId));
    let mut all = Vec::new();
    for piece in tokens.chunks(7) {
        all.extend_from_slice(core.logits(&mut sequence, piece, piece.len()).unwrap());
    }
    all
}

fn tokens() -> Vec<u32> {
    (0..23).map(|i| (i * 11 + 3) % 60).collect()
}

#[test]
fn each_sequence_has_the_logits_of_its_adapter_alone() {
    // Maps stored as one, tables of positions, shared keys and values, recurrent layers, experts, quantised weights.
    let cases = [
        "llama",
        "gemma3",
        "gemma4-e2b",
        "phi3-short",
        "qwen3moe",
        "qwen35",
        "cohere2",
        "granite",
        "llama-q8_0",
    ];
    for case in cases {
        let base = open(case);
        let all = adapters(&base);
        let mut core = Core::new(runner(banked(&base)), CONTEXT);
        let mut plain = Core::new(runner(base.clone()), CONTEXT);
        let without = logits(&mut plain, None, &tokens());
        assert!(logits(&mut core, None, &tokens()) == without, "{case}: a bank changes the base model");
        for (idx, BankAdapter { adapter, scale, .. }) in all.iter().enumerate() {
            let alone = base.with_live_adapter(adapter, *scale).unwrap();
            let want = logits(&mut Core::new(runner(alone), CONTEXT), None, &tokens());
            let got = logits(&mut core, Some(idx as u32), &tokens());
            // Products with quantised weights round activations, so small differences grow.
            let limit = if case == "llama-q8_0" { 2e-2 } else { 2e-5 };
            let off = relative_error(&got, &want);
            assert!(off < limit, "{case}, adapter {idx}: {off:.2e}");
            assert!(relative_error(&got, &without) > 0.05, "{case}, adapter {idx} has no effect");
        }
    }
}

#[test]
fn a_model_without_a_bank_has_no_trace_of_one() {
    let kv = KvSpec { n_blocks: 4, kv_block: 8, max_blocks: 2, n_slots: 0, dtype: DType::F16 };
    let spec = StepSpec::of_one(3, 1, Head::Logits);
    let base = open("llama");
    let plan = |model: &Model| {
        let graph = fuse(&model.graph(&spec, &kv).unwrap()).unwrap();
        Plan::new(&graph, PlanOptions { align: 16, ..PlanOptions::default() }).unwrap()
    };
    let plain = plan(&base);
    let is_lora = |step: &&refrain_graph::Step| matches!(step.op, Op::Lora(_));
    assert!(plain.step_inputs().unwrap().adapters.is_none() && !plain.steps().iter().any(|s| is_lora(&s)));
    assert!(base.adapter_names().is_empty());
    // With a bank, the other steps are the same ones in the same order.
    let with_bank = plan(&banked(&base));
    let names = |plan: &Plan| -> Vec<String> {
        plan.steps().iter().filter(|step| !is_lora(step)).map(|step| step.label.clone()).collect()
    };
    assert_eq!(names(&with_bank), names(&plain));
    assert!(with_bank.step_inputs().unwrap().adapters.is_some());
    // Maps of the same rows share the first product: q, k and v; o; gate and up; down.
    let count = |op: LoraOp| {
        with_bank.steps().iter().filter(|step| matches!(step.op, Op::Lora(of) if of == op)).count()
    };
    assert_eq!((count(LoraOp::Down), count(LoraOp::Up)), (2 * 4, 2 * 7));
    // The host refuses an adapter or a sequence that does not exist.
    let adapters = with_bank.field(with_bank.step_inputs().unwrap().adapters.unwrap());
    let bound = with_bank.bounds().ids.iter().find(|ids| ids.field == adapters).unwrap();
    assert_eq!(bound.limit, 3);
}

fn request(prompt: Vec<u32>, adapter: Option<u32>, n: usize) -> Request {
    let mut request = Request::once(prompt);
    (request.sampling, request.max_tokens) = (SamplingParams::greedy(), n);
    request.adapter = adapter.map(AdapterId);
    request
}

/// Tokens with the bits of their log-probabilities.
fn text(engine: &Engine, request: Request) -> Vec<(u32, u32)> {
    let event = |event| match event {
        TokenEvent::Token { token, logprob, .. } => Some((token, logprob.to_bits())),
        TokenEvent::Prompt { .. } | TokenEvent::End(_) => None,
    };
    engine.submit(request).unwrap().filter_map(|e| event(e.unwrap())).collect()
}

#[test]
fn the_prefix_cache_never_crosses_adapters() {
    let engine = engine(banked(&open("llama")));
    let cached = || engine.load().unwrap().prompts.n_cached;
    let prompt: Vec<u32> = (0..33).map(|i| (7 * i + 1) % 60).collect();
    let ids = [None, Some(0), Some(1), Some(2)];
    let first: Vec<_> = ids.iter().map(|id| text(&engine, request(prompt.clone(), *id, 8))).collect();
    assert_eq!(cached(), 0, "a prefix was shared between adapters");
    for (id, first) in ids.iter().zip(&first) {
        assert_eq!(&text(&engine, request(prompt.clone(), *id, 8)), first);
    }
    assert_eq!(cached(), 4 * 32, "each adapter finds its own prefix");
    let distinct: BTreeSet<_> = first.iter().collect();
    assert_eq!(distinct.len(), 4, "adapters change the text");
}

#[test]
fn sequences_and_their_forks_keep_their_adapter() {
    let engine = engine(banked(&open("llama")));
    let prompt: Vec<u32> = (0..19).map(|i| (5 * i + 2) % 60).collect();
    let want: Vec<_> =
        [None, Some(1)].iter().map(|id| text(&engine, request(prompt.clone(), *id, 6))).collect();
    let sequence = engine.open_with(CONTEXT, Some(AdapterId(1))).unwrap();
    let of = |sequence: &refrain_engine::Sequence, adapter| {
        let mut request = request(prompt.clone(), adapter, 6);
        request.sequence = Some(sequence.clone());
        request
    };
    assert_eq!(text(&engine, of(&sequence, None)), want[1]);
    let fork = engine.fork(&sequence, CONTEXT).unwrap();
    assert_eq!(fork.adapter(), Some(AdapterId(1)));
    assert!(fork.n_cached(&prompt).unwrap() >= 16);
    assert_eq!(text(&engine, of(&fork, Some(1))), want[1]);
    assert_eq!(text(&engine, of(&engine.open(CONTEXT).unwrap(), None)), want[0]);
    // KV of one adapter is useless with another one.
    let error = engine.submit(of(&sequence, Some(0))).err().unwrap();
    assert_eq!(error.to_string(), "adapter all was requested for a sequence with adapter attention");
    assert!(error.hint().unwrap().contains("open another sequence"), "{error}");
    let error = engine.submit(of(&engine.open(CONTEXT).unwrap(), Some(0))).err().unwrap();
    assert_eq!(error.to_string(), "adapter all was requested for a sequence with none");
}

#[test]
fn adapters_that_do_not_exist_are_refused_with_the_names_of_those_that_do() {
    let with_bank = engine(banked(&open("llama")));
    let error = with_bank.submit(request(vec![1, 2], Some(3), 4)).err().unwrap();
    assert!(matches!(error, EngineError::UnknownAdapter { id: 3, .. }));
    assert_eq!(error.to_string(), "adapter id 3 was requested, the ids of the model's 3 adapters begin at 0");
    assert_eq!(error.hint().unwrap(), "its adapters are all, attention, some");
    assert!(with_bank.open_with(8, Some(AdapterId(7))).is_err());
    let error = AdapterId::find(with_bank.model(), "poems").unwrap_err();
    assert_eq!(error.to_string(), "the model has no adapter \"poems\"");
    assert_eq!(error.hint().unwrap(), "its adapters are all, attention, some");
    assert_eq!(AdapterId::find(with_bank.model(), "some").unwrap(), AdapterId(2));
    let plain = engine(open("llama"));
    let error = plain.submit(request(vec![1, 2], Some(0), 4)).err().unwrap();
    assert!(error.hint().unwrap().contains("loaded without named"), "{error}");
}

#[test]
fn checked_guesses_give_the_text_of_the_adapter() {
    let engine = engine(banked(&open("llama")));
    let prompt: Vec<u32> = [4, 9, 13, 4, 9, 13, 4, 9].to_vec();
    let want = text(&engine, request(prompt.clone(), Some(0), 24));
    let mut guessed = request(prompt, Some(0), 24);
    guessed.speculation = Some(Speculation::from(DraftSource::Ngram));
    assert_eq!(text(&engine, guessed), want);
}

#[test]
fn factors_keep_the_type_of_their_files_where_it_is_exact() {
    let base = open("llama");
    let mut bank = adapters(&base);
    let in_bf16 = |tensor: &refrain_tensor::HostTensor| {
        let mut bytes = vec![0; tensor.shape().n_elements() * 2];
        refrain_tensor::quant::quantize(DType::BF16, &tensor.to_f32().unwrap(), &mut bytes).unwrap();
        refrain_tensor::HostTensor::new(DType::BF16, tensor.shape(), refrain_tensor::Bytes::new(bytes))
            .unwrap()
    };
    for part in bank.iter_mut().flat_map(|adapter| &mut adapter.adapter.parts) {
        (part.a, part.b) = (in_bf16(&part.a), in_bf16(&part.b));
    }
    let types = |bank: &[BankAdapter]| -> [BTreeSet<&str>; 2] {
        let model = base.with_adapter_bank(bank).unwrap();
        let own = &model.weights()[base.weights().len()..];
        assert_eq!(
            model.bank_bytes(),
            model.weight_bytes() - base.weight_bytes(),
            "weights include the bank"
        );
        ["bank_a", "bank_b"]
            .map(|half| own.iter().filter(|w| w.name.contains(half)).map(|w| w.ty.dtype.name()).collect())
    };
    let set = |names: &[&'static str]| names.iter().copied().collect::<BTreeSet<_>>();
    let (narrow, wide, both) = (set(&["BF16"]), set(&["F32"]), set(&["BF16", "F32"]));
    assert_eq!(types(&bank), [narrow.clone(), narrow.clone()], "scales that are powers of two");
    // Maps that only other adapters have stay as they are.
    bank[1].scale = 0.7;
    assert_eq!(types(&bank), [narrow.clone(), both.clone()], "0.7 times a BF16 number is not one");
    bank[0].scale = 0.7;
    bank[2].scale = 0.7;
    assert_eq!(types(&bank), [narrow.clone(), wide.clone()]);
    for part in &mut bank[0].adapter.parts {
        part.a = refrain_tensor::HostTensor::from_f32(part.a.shape(), &part.a.to_f32().unwrap()).unwrap();
    }
    assert_eq!(types(&bank), [wide.clone(), wide.clone()], "files of different types");
}

#[test]
fn banks_that_cannot_be_attached_are_refused() {
    let base = open("llama");
    let mut bank = adapters(&base);
    let model = base.with_adapter_bank(&bank).unwrap();
    assert!(matches!(model.with_adapter_bank(&bank), Err(ModelError::AdapterTwice)));
    assert!(matches!(model.with_adapter(&bank[0].adapter), Err(ModelError::AdapterTwice)));
    // The weights of a bank are neither trained nor exported.
    assert_eq!(model.n_trained(), base.n_trained());
    bank[2].name = "all".into();
    let error = base.with_adapter_bank(&bank).unwrap_err();
    assert_eq!((error.to_string().as_str(), error.hint().is_some()), ("two adapters are named all", true));
    bank[2].name = "some".into();
    bank[2].adapter.parts[0].module = "model.layers.7.mlp.up_proj".into();
    let error = base.with_adapter_bank(&bank).unwrap_err();
    assert!(error.to_string().starts_with("adapter some cannot be used: "), "{error}");
    assert!(
        matches!(&error, ModelError::InBank { source, .. } if matches!(**source, ModelError::AdapterModule { .. }))
    );
    let error = open("bert").with_adapter_bank(&[]).unwrap_err();
    assert!(error.to_string().contains("embeds texts") && error.hint().is_some(), "{error}");
}
