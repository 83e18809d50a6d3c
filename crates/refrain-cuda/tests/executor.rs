//! The executor on the simulated device: failures, memory, deadlines, profiling, and the cost of a step.

mod rig;

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use refrain_cuda::{
    CudaBackend, CudaCompiled, CudaOptions, CudaStates, CudaWeights, GraphMode, LoadEvent, LoadListener,
};
use refrain_driver::api::Census;
use refrain_driver::sim::{DriverCall, FaultScript, SimDriver, SimOptions};
use refrain_driver::{Device, Method};
use refrain_engine::{
    BackendRunner, Core, EngineError, Lookahead, RunnerOptions, SamplingParams, SamplingRow, StepKind,
};
use refrain_graph::{Backend, ControlBlock, Io, Op, Ran, Reason, RunError, fuse};
use refrain_models::{Head, KvSpec, Model, StepSpec};
use refrain_tensor::{Bytes, DType, HostTensor, Owner};
use rig::{Generation, Rig, generate, model, n_decoded, options, sim};

const N_TOKENS: usize = 70;
const CONTEXT: usize = 192;

fn small(case: &str, options: CudaOptions) -> (SimDriver, Rig) {
    let (sim, device) = sim("");
    (sim, Rig::new(device, case, options, 128, DType::F16))
}

#[test]
fn replayed_equals_eager_after_failed_recordings_and_replays() {
    let rig = |options, script: &str| Rig::new(sim(script).1, "llama", options, CONTEXT, DType::F16);
    let want = generate(&mut rig(options(GraphMode::Off, Method::Stream), ""), N_TOKENS);
    let scripts = [
        "on 1st begin_capture: fail 900; on 2nd end_capture: fail 901; on 1st instantiate: fail 801",
        "on 1st instantiate: out of memory; on 2nd instantiate: out of memory",
        "on 2nd replay: wrong byte; on 40th replay: fail 701; on 41st replay: fail 701; on 90th replay: fail 1",
    ];
    for script in scripts {
        let mut options = options(GraphMode::Auto, Method::Stream);
        options.graphs.nodes_when_capture_fails = false;
        let mut rig = rig(options, script);
        assert_eq!(generate(&mut rig, N_TOKENS), want, "{script}");
        let tally = rig.engine.ledger().tally(StepKind::Decode);
        assert!(
            tally.eager > 0 || rig.engine.ledger().tally(StepKind::Prompt).eager > 0,
            "{script}: {tally}"
        );
        assert!(tally.replayed > n_decoded(N_TOKENS) / 2, "{script}: {tally}");
        let stats = rig.monitor.status().cache;
        assert!(stats.failed + stats.demoted > 0, "{script}: {stats:?}");
        assert!(tally.reasons().all(|(label, ..)| label != "step_failed"), "{tally}");
    }
}

#[test]
fn a_decode_step_is_one_launch_and_allocates_nothing() {
    let (sim, mut rig) = small("llama", options(GraphMode::Require, Method::Stream));
    let mut generation = Generation::begin(&mut rig, 1);
    generation.advance(&mut rig);
    let before = sim.stats();
    for _ in 0..30 {
        generation.advance(&mut rig);
    }
    let after = sim.stats();
    let sent = |call: DriverCall| after.n_calls(call) - before.n_calls(call);
    assert_eq!(sent(DriverCall::ExecLaunch), 30);
    for call in [
        DriverCall::Launch,
        DriverCall::Alloc,
        DriverCall::AllocHost,
        DriverCall::StreamBeginCapture,
        DriverCall::GraphInstantiate,
    ] {
        assert_eq!(sent(call), 0, "{call:?}");
    }
    assert_eq!(before.live, after.live);
}

#[test]
fn a_plan_loads_the_kernels_that_it_needs_and_a_step_loads_none() {
    let (sim, device) = sim("");
    let n_modules = || sim.stats().n_calls(DriverCall::ModuleLoad);
    let mut rig = Rig::new(device, "llama", options(GraphMode::Auto, Method::Stream), 128, DType::F16);
    let backend_alone = n_modules();
    rig.engine.plan(1).unwrap();
    let after_plan = n_modules();
    // Gather, products, attention, sampling: a few units of about a hundred.
    assert!((3..20).contains(&(after_plan - backend_alone)), "{backend_alone}, {after_plan}");
    rig.engine.plan(1).unwrap();
    assert_eq!(n_modules(), after_plan, "they stay loaded");
    let mut generation = Generation::begin(&mut rig, 1);
    generation.advance(&mut rig);
    let after_prompt = n_modules();
    for _ in 0..10 {
        generation.advance(&mut rig);
    }
    assert_eq!(n_modules(), after_prompt);
}

#[test]
fn a_fault_during_a_generation_is_final_and_names_its_step() {
    let (sim, mut rig) = small("llama", options(GraphMode::Auto, Method::Stream));
    let mut generation = Generation::begin(&mut rig, 0);
    generation.advance(&mut rig);
    sim.inject(FaultScript::parse("on 10th replay: illegal address").unwrap());
    let mut n_more = 0;
    let error = loop {
        match rig.engine.decode(&mut generation.session, generation.last.token, &mut generation.row) {
            Ok(chosen) => generation.last = chosen,
            Err(error) => break error,
        }
        n_more += 1;
    };
    assert_eq!(n_more, 9);
    let chain = |error: &dyn std::error::Error| {
        let mut text = error.to_string();
        let mut at = error.source();
        while let Some(source) = at {
            text = format!("{text}: {source}");
            at = source.source();
        }
        text
    };
    let text = chain(&error);
    assert!(text.contains("700") && text.contains("step of 1 token") && text.contains("commit"), "{text}");
    let again =
        rig.engine.decode(&mut generation.session, generation.last.token, &mut generation.row).unwrap_err();
    assert!(chain(&again).contains("700"));
    assert_eq!(rig.engine.ledger().tally(StepKind::Decode).failed, 2);
}

/// An invalid token is the device's fault, not the caller's; if the device is lost, that is the error.
#[test]
fn a_wrong_byte_from_a_kernel_is_never_blamed_on_the_callers_tokens() {
    let mut blamed = std::collections::BTreeMap::<&str, usize>::new();
    for nth in 1..=60 {
        let (sim, mut rig) = small("llama", options(GraphMode::Off, Method::Stream));
        let mut generation = Generation::begin(&mut rig, 1);
        sim.inject(FaultScript::parse(&format!("on {nth}th launch: wrong byte")).unwrap());
        for _ in 0..6 {
            match rig.engine.decode(&mut generation.session, generation.last.token, &mut generation.row) {
                Ok(chosen) => generation.last = chosen,
                Err(error) => {
                    let what = match &error {
                        EngineError::Run(RunError::ContextLost { .. }) => "lost",
                        // The wrong byte hit the sequence number of a ring entry.
                        EngineError::Run(RunError::Backend { .. }) => "device",
                        EngineError::BadChoice { .. } => "token",
                        EngineError::NonFinite { .. } => "logits",
                        other => panic!("launch {nth}: {other:?}"),
                    };
                    *blamed.entry(what).or_default() += 1;
                    break;
                }
            }
        }
    }
    assert!(blamed.values().sum::<usize>() > 0, "no fault had an effect");
}

#[test]
fn a_driver_call_that_hangs_is_reported_by_the_deadline() {
    let mut options = options(GraphMode::Auto, Method::Stream);
    options.step_limit = Duration::from_millis(300);
    let (sim, mut rig) = small("llama", options);
    let mut generation = Generation::begin(&mut rig, 0);
    generation.advance(&mut rig);
    sim.inject(FaultScript::parse("on 2nd replay: hang").unwrap());
    generation.advance(&mut rig);
    let began = Instant::now();
    rig.engine.decode(&mut generation.session, generation.last.token, &mut generation.row).unwrap_err();
    assert!(began.elapsed() < Duration::from_secs(5));
    sim.release_hung();
}

#[test]
fn a_driver_call_that_hangs_during_compilation_is_reported_before_the_compile_limit() {
    for hang in ["end_capture", "instantiate", "replay"] {
        let mut options = options(GraphMode::Auto, Method::Stream);
        options.call_limit = Duration::from_millis(200);
        let (sim, mut rig) = small("llama", options);
        sim.inject(FaultScript::parse(&format!("on 1st {hang}: hang")).unwrap());
        let began = Instant::now();
        let error = rig.engine.plan(1).unwrap_err();
        assert!(began.elapsed() < Duration::from_secs(10), "{hang}: {:?}", began.elapsed());
        let mut text = error.to_string();
        let mut at = std::error::Error::source(&error);
        while let Some(source) = at {
            text = format!("{text}: {source}");
            at = source.source();
        }
        assert!(text.contains("compiling a plan, in cu"), "{hang}: {text}");
        assert_eq!(sim.unused_faults(), [""; 0]);
        sim.release_hung();
    }
}

#[test]
fn a_plan_that_needs_more_memory_keeps_the_cache_and_is_recorded_again() {
    let want = {
        let (_, mut rig) = small("qwen2", options(GraphMode::Off, Method::Stream));
        grown(&mut rig)
    };
    let mut tight = options(GraphMode::Require, Method::Stream);
    tight.arena_reserve_bytes = 0;
    let (sim, mut rig) = small("qwen2", tight);
    assert_eq!(grown(&mut rig), want);
    // A step of one token, the same over new memory, and one of eight.
    assert_eq!(rig.monitor.status().cache.recorded, 3);
    let live = sim.stats().live;
    assert!(live.execs == 2, "{live:?}");
}

fn grown(rig: &mut Rig) -> Vec<u32> {
    let mut session = rig.engine.open();
    let mut out: Vec<u32> = Vec::new();
    for piece in [&[3][..], &[5, 6, 7, 8, 9, 10], &[11], &[1, 2, 3, 4, 5, 6, 7]] {
        let logits = rig.engine.logits(&mut session, piece, 1).unwrap();
        out.extend(logits.iter().map(|l| l.to_bits()));
    }
    out
}

#[test]
fn memory_that_does_not_fit_is_refused_with_its_sizes_before_any_allocation() {
    let sim = SimDriver::new(SimOptions { memory_bytes: 400 << 10, ..SimOptions::default() });
    refrain_kernels::register_twins(&sim);
    let device = Device::simulated(&sim).unwrap();
    let backend = CudaBackend::on(&device, options(GraphMode::Auto, Method::Stream)).unwrap();
    let before = sim.stats().live;
    let runner = RunnerOptions {
        context: 128,
        kv_block: 16,
        kv_dtype: DType::F16,
        max_tokens: 64,
        ..RunnerOptions::default()
    };
    let mut engine = Core::new(Box::new(BackendRunner::new(backend, model("llama"), runner).unwrap()), 128);
    let mut session = engine.open();
    let error = engine.logits(&mut session, &[1], 1).unwrap_err();
    let text = format!("{:?}", error);
    assert!(
        text.contains("DoesNotFit") && text.contains("weight_bytes") && text.contains("total_bytes: 409600"),
        "{text}"
    );
    assert_eq!(sim.stats().live.bytes, before.bytes);
}

#[test]
fn out_of_memory_at_any_allocation_is_an_error_that_leaks_nothing() {
    for nth in 1..=8 {
        let sim = SimDriver::new(SimOptions::default());
        refrain_kernels::register_twins(&sim);
        {
            let device = Device::simulated(&sim).unwrap();
            let backend = CudaBackend::on(&device, options(GraphMode::Require, Method::Stream)).unwrap();
            sim.inject(FaultScript::parse(&format!("on {nth}th allocation: out of memory")).unwrap());
            let runner = RunnerOptions {
                context: 64,
                kv_block: 16,
                kv_dtype: DType::F16,
                max_tokens: 64,
                ..RunnerOptions::default()
            };
            let mut engine =
                Core::new(Box::new(BackendRunner::new(backend, model("llama"), runner).unwrap()), 64);
            let mut session = engine.open();
            if engine.logits(&mut session, &[1], 1).is_err() {
                engine.logits(&mut session, &[1], 1).unwrap();
            }
        }
        assert_eq!(sim.stats().live, Census::default(), "allocation {nth}");
    }
}

/// A decode step of the small llama without an engine.
struct Direct {
    backend: CudaBackend,
    weights: CudaWeights,
    states: CudaStates,
    compiled: CudaCompiled,
    control: ControlBlock,
}

impl Direct {
    fn new(options: CudaOptions) -> Direct {
        Direct::with(options, SimOptions::default(), model("llama").tensors().to_vec())
    }

    fn with(options: CudaOptions, sim: SimOptions, tensors: Vec<HostTensor>) -> Direct {
        let device = refrain_kernels::simulated(sim).unwrap();
        let (backend, model) = (CudaBackend::on(&device, options).unwrap(), model("llama"));
        let kv = KvSpec { n_blocks: 4, kv_block: 16, max_blocks: 4, n_slots: 0, dtype: DType::F16 };
        let spec = StepSpec::of_one(1, 1, Head::Logits);
        let weights = backend.load(model.weights(), tensors).unwrap();
        let states = backend.allocate(&model.states(&kv)).unwrap();
        let compiled = backend.compile(&fuse(&model.graph(&spec, &kv).unwrap()).unwrap()).unwrap();
        let control = ControlBlock::new(backend.plan(&compiled).control());
        Direct { backend, weights, states, compiled, control }
    }

    fn set(&mut self, name: &str, values: &[i32]) {
        let id = self.control.layout().find(name).unwrap();
        self.control.set_i32(id, values).unwrap();
    }

    fn run(&mut self) -> Result<Ran, RunError> {
        let io = Io { weights: &self.weights, states: &mut self.states, control: self.control.bytes() };
        self.backend.run(&mut self.compiled, io)
    }
}

#[test]
fn profiling_times_every_launch_and_reports_why_steps_are_eager() {
    let mut direct = Direct::new(CudaOptions { profile: true, ..options(GraphMode::Auto, Method::Stream) });
    for _ in 0..2 {
        assert_eq!(direct.run().unwrap(), Ran::Eager(Reason::Profiling));
    }
    let rows = direct.backend.monitor().status().profile;
    assert!(rows.iter().all(|r| r.n % 2 == 0 && r.bytes > 0), "{rows:?}");
    assert!(rows.iter().any(|r| r.kernel.starts_with("linear_") && r.step.contains("ffn_down")), "{rows:?}");
    let timeline = direct.backend.monitor().timeline();
    let (steps, spans) = (&timeline.steps, &timeline.spans);
    assert_eq!((steps.len(), steps[0].n_tokens, timeline.n_steps_left_out), (2, 1, 0));
    assert_eq!(spans.len(), 2 * steps[1].first_span, "both steps have the same launches");
    assert_eq!(spans.iter().map(|s| s.bytes).sum::<u64>(), rows.iter().map(|r| r.bytes).sum::<u64>());
    assert!(spans.windows(2).all(|w| w[0].start_ms + w[0].ms <= w[1].start_ms + 1e-6), "{spans:?}");
    let mut strict =
        Direct::new(CudaOptions { profile: true, ..options(GraphMode::Require, Method::Stream) });
    assert!(format!("{:?}", strict.run()).contains("Profiling"));
}

#[test]
fn a_profile_counts_only_the_bytes_that_a_step_reads_of_cache_and_table() {
    let mut direct = Direct::new(CudaOptions { profile: true, ..options(GraphMode::Auto, Method::Stream) });
    direct.set("tables", &[2, 0, 1, 3]);
    let mut attention_bytes = |position: i32| {
        direct.set("positions", &[position]);
        direct.run().unwrap();
        let (rows, timeline) =
            (direct.backend.monitor().status().profile, direct.backend.monitor().timeline());
        let last = &timeline.spans[timeline.steps.last().unwrap().first_span..];
        let of = |kernel: &str| {
            let spans = last.iter().filter(|s| rows[s.row].kernel.starts_with(kernel));
            spans.map(|s| s.bytes).collect::<Vec<u64>>()
        };
        (of("attend")[0], of("gather_rows")[0])
    };
    let (at_9, at_19) = (attention_bytes(9), attention_bytes(19));
    let plan = direct.backend.plan(&direct.compiled);
    let n_layers = plan.steps().iter().filter(|s| matches!(s.op, Op::Attention(_))).count();
    let cache = (plan.traffic().kv_bytes(1) / n_layers) as u64;
    assert_eq!(at_19.0 - at_9.0, 10 * cache, "ten more positions of keys and values");
    assert_eq!(at_9.1, at_19.1, "a lookup costs the same at every row");
    assert!(at_9.1 < 4096, "one row of the table, not all of it: {}", at_9.1);
}

#[test]
fn products_of_the_same_rows_and_rope_to_attention_are_one_launch_each() {
    let mut direct = Direct::new(CudaOptions { profile: true, ..options(GraphMode::Auto, Method::Stream) });
    direct.run().unwrap();
    let rows = direct.backend.monitor().status().profile;
    let holds = |kernel: &str, labels: &[&str]| {
        rows.iter().any(|r| r.kernel.starts_with(kernel) && labels.iter().all(|l| r.step.contains(l)))
    };
    assert!(holds("linear_", &["attn_q", "attn_k", "attn_v"]), "{rows:?}");
    assert!(holds("linear_", &["ffn_up", "ffn_gate"]), "{rows:?}");
    assert!(holds("attend_", &["rope", "kv_append", "attention"]), "{rows:?}");
    assert!(!holds("rope_", &[]) && !holds("kv_append_", &[]) && !holds("attention_", &[]), "{rows:?}");
}

/// Attention kernels read the caches before they wait, so writes of earlier steps must be complete by then.
#[test]
fn a_step_starts_with_the_kernel_that_waits_for_all_earlier_steps() {
    let mut direct = Direct::new(CudaOptions { profile: true, ..options(GraphMode::Auto, Method::Stream) });
    direct.run().unwrap();
    let (rows, timeline) = (direct.backend.monitor().status().profile, direct.backend.monitor().timeline());
    let kernels: Vec<&str> = timeline.spans.iter().map(|span| &*rows[span.row].kernel).collect();
    assert!(kernels[0].starts_with("gather_rows"), "{kernels:?}");
    assert!(kernels.iter().any(|kernel| kernel.starts_with("attend_")), "{kernels:?}");
}

#[test]
fn a_control_block_with_invalid_indices_is_refused_before_upload() {
    let mut direct = Direct::new(options(GraphMode::Require, Method::Stream));
    direct.set("tables", &[2, 0, -1, -1]);
    direct.set("tokens", &[3]);
    direct.set("positions", &[20]);
    assert_eq!(direct.run().unwrap(), Ran::REPLAYED);
    let cases: [(&str, &[i32], &[i32], &str); 5] = [
        ("tokens", &[1 << 20], &[3], "row is 1048576"),
        ("positions", &[64], &[20], "the position is 64, must be below 64"),
        ("positions", &[33], &[20], "the KV block is -1, must be below 4"),
        ("seqs", &[1], &[0], "the sequence is 1, must be below 1"),
        // One past the pool: these are scratch blocks, which no sequence may use.
        ("tables", &[4, 0, 0, 0], &[2, 0, -1, -1], "the KV block is 4, must be below 4"),
    ];
    for (name, bad, good, text) in cases {
        direct.set(name, bad);
        let error = direct.run().unwrap_err().to_string();
        assert!(error.contains(text), "{error}");
        direct.set(name, good);
        assert_eq!(direct.run().unwrap(), Ran::REPLAYED);
    }
}

#[test]
fn verification_compares_results_rather_than_poison() {
    let direct = Direct::new(options(GraphMode::Require, Method::Stream));
    let status = direct.backend.monitor().status();
    let graph = &status.graphs[0];
    assert!(graph.verified_bytes > 10_000, "{graph:?}");
    // Parts of the attention's scratch belong to splits that a short sequence does not have.
    assert!(graph.unwritten_bytes * 10 < graph.verified_bytes, "{graph:?}");
}

/// Opens a device, loads a model, evaluates a prompt and generates a few tokens.
fn life(sim: &SimDriver, model: &Arc<Model>) -> Result<Vec<(u32, u32)>, Box<dyn std::error::Error>> {
    let device = Device::simulated(sim)?;
    let mut quick = options(GraphMode::Auto, Method::Stream);
    quick.graphs.health_limit = Duration::from_millis(500);
    let backend = CudaBackend::on(&device, quick)?;
    let runner = RunnerOptions {
        context: 64,
        kv_block: 16,
        kv_dtype: DType::F16,
        max_tokens: 8,
        ..RunnerOptions::default()
    };
    let mut engine = Core::new(Box::new(BackendRunner::new(backend, model.clone(), runner)?), 64);
    let (mut session, mut row) = (engine.open(), SamplingRow::new(&SamplingParams::greedy()));
    let mut chosen = engine.prompt(&mut session, &[1, 17, 5], &mut row, |_| true)?;
    let mut said = vec![(chosen.token, chosen.logprob.to_bits())];
    for n_tokens in (1..=6).rev() {
        let ahead = Lookahead { n_tokens, end: &[] };
        chosen = engine.decode_ahead(&mut session, chosen.token, &mut row, &ahead)?;
        said.push((chosen.token, chosen.logprob.to_bits()));
    }
    Ok(said)
}

fn fresh() -> SimDriver {
    let sim = SimDriver::new(SimOptions { seed: 9, ..SimOptions::default() });
    refrain_kernels::register_twins(&sim);
    sim
}

/// Calls whose errors teardown cannot report; what they leak is the driver's.
fn is_teardown(call: DriverCall) -> bool {
    matches!(
        call,
        DriverCall::Free
            | DriverCall::FreeHost
            | DriverCall::ModuleUnload
            | DriverCall::ExecDestroy
            | DriverCall::EventDestroy
            | DriverCall::StreamDestroy
            | DriverCall::GraphDestroy
            | DriverCall::PrimaryCtxRelease
            | DriverCall::CtxSetCurrent
    )
}

#[test]
fn a_failed_call_gives_the_same_output_or_an_error_and_the_next_session_works() {
    let model = model("llama");
    let calm = fresh();
    let want = life(&calm, &model).unwrap();
    assert_eq!(calm.stats().live, Census::default(), "a life without faults leaves nothing");
    let (mut n_text, mut n_error) = (0, 0);
    for (call, count) in calm.stats().calls {
        for nth in [1, count / 2, count].into_iter().filter(|n| *n > 0) {
            for code in [1, 900] {
                let sim = fresh();
                sim.inject(FaultScript::parse(&format!("on {nth}th {}: fail {code}", call.name())).unwrap());
                let began = Instant::now();
                let result = life(&sim, &model);
                let what = format!("{call:?} number {nth} of {count} fails with {code}: {result:?}");
                assert!(began.elapsed() < Duration::from_secs(10), "{what}");
                match &result {
                    Ok(said) => assert_eq!(*said, want, "{what}"),
                    Err(_) => n_error += 1,
                }
                n_text += usize::from(result.is_ok());
                let lost = matches!(&result, Err(e) if format!("{e:?}").contains("ContextLost"));
                if !is_teardown(call) && !lost {
                    assert_eq!(sim.stats().live, Census::default(), "{what}");
                }
                let next = life(&sim, &model);
                assert!(next.is_ok_and(|said| said == want), "{what}");
            }
        }
    }
    assert!(n_text > 50 && n_error > 50, "{n_text} lives gave the text, {n_error} an error");
}

#[test]
fn memory_is_reported_before_allocation_and_weights_during_upload() {
    let (sim, device) = sim("");
    let events: Arc<Mutex<Vec<(LoadEvent, u64)>>> = Arc::default();
    let (heard, probe) = (Arc::clone(&events), sim.clone());
    let on_load =
        LoadListener::new(move |event| heard.lock().unwrap().push((event, probe.stats().live.bytes)));
    let options = CudaOptions { on_load, ..options(GraphMode::Require, Method::Stream) };
    let before = {
        let backend = CudaBackend::on(&device, options).unwrap();
        let before = sim.stats();
        let runner = RunnerOptions {
            context: 64,
            kv_block: 16,
            kv_dtype: DType::F16,
            max_tokens: 64,
            ..RunnerOptions::default()
        };
        let mut engine =
            Core::new(Box::new(BackendRunner::new(backend, model("llama"), runner).unwrap()), 64);
        engine.plan(1).unwrap();
        before
    };
    let events = events.lock().unwrap();
    let (LoadEvent::Planned(memory), live_bytes) = events[0] else { panic!("{events:?}") };
    assert_eq!(live_bytes, before.live.bytes, "nothing is allocated yet");
    assert!(memory.weight_bytes > 0 && memory.kv_bytes > 0 && memory.total() < memory.free_bytes);
    assert!(memory.free_bytes <= memory.device_bytes);
    let sent: Vec<(u64, u64)> = events[1..]
        .iter()
        .map(|(event, _)| match event {
            LoadEvent::Uploaded { done_bytes, total_bytes } => (*done_bytes, *total_bytes),
            other => panic!("{other:?}"),
        })
        .collect();
    assert!(sent.windows(2).all(|w| w[0].0 <= w[1].0), "{sent:?}");
    let (done, total) = sent[sent.len() - 1];
    assert!(done == total && total <= memory.weight_bytes, "{sent:?}");
}

/// Bytes that record when their memory is evicted.
struct Watched {
    bytes: Vec<u8>,
    n_evicted: Arc<AtomicUsize>,
    from_file: bool,
}

impl AsRef<[u8]> for Watched {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Owner for Watched {
    fn can_evict(&self) -> bool {
        self.from_file
    }

    fn evict(&self, range: Range<usize>) {
        self.n_evicted.fetch_add(range.len(), Ordering::Relaxed);
    }
}

#[test]
fn weights_on_a_unified_memory_device_are_stored_once() {
    let model = model("llama");
    let weight_bytes: usize = model.tensors().iter().map(|t| t.bytes().as_slice().len()).sum();
    let life = |unified, from_file| {
        let n_evicted = Arc::new(AtomicUsize::new(0));
        let watch = |t: &HostTensor| {
            let bytes = t.bytes().as_slice().to_vec();
            let owner = Watched { bytes, n_evicted: Arc::clone(&n_evicted), from_file };
            HostTensor::new(t.dtype(), t.shape(), Bytes::shared(Arc::new(owner))).unwrap()
        };
        let tensors = model.tensors().iter().map(watch).collect();
        let sim = SimOptions { unified, ..SimOptions::default() };
        let direct = Direct::with(options(GraphMode::Require, Method::Stream), sim, tensors);
        (n_evicted.load(Ordering::Relaxed), direct.backend.monitor().status().memory)
    };
    let (n_evicted, memory) = life(true, true);
    assert_eq!((n_evicted, memory.unified, memory.host_weight_bytes), (weight_bytes, true, 0));
    // Without a file, the host keeps them and reports it.
    let (_, memory) = life(true, false);
    assert_eq!((memory.unified, memory.host_weight_bytes), (true, weight_bytes as u64));
    // A GPU with its own memory leaves the host's copies alone.
    let (n_evicted, memory) = life(false, true);
    assert_eq!((n_evicted, memory.unified, memory.host_weight_bytes), (0, false, 0));
}
