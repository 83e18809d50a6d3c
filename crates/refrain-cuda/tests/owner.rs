//! Several models on one device in one process: one context, one thread, kernels loaded once.

mod rig;

use refrain_cuda::{CudaBackend, CudaOptions, GraphMode};
use refrain_driver::sim::{DriverCall, SimDriver, SimOptions};
use refrain_driver::{Device, DeviceKind, Method};
use refrain_engine::{
    BackendRunner, Chosen, Core, EngineError, Lookahead, RunnerOptions, SamplingParams, SamplingRow,
    SequenceState,
};
use refrain_tensor::DType;
use rig::{Rig, gpu, gpu_turn, model, options, sim};

const N_TOKENS: usize = 24;
const CONTEXT: usize = 128;

/// A model on a device, in the middle of a generation.
struct Speaker {
    rig: Rig,
    sequence: SequenceState,
    row: SamplingRow,
    last: Chosen,
    /// Tokens, each with the bits of its log-probability.
    said: Vec<(u32, u32)>,
}

impl Speaker {
    fn open(device: &Device, case: &str, name: &str) -> Rig {
        let options =
            CudaOptions { model: name.into(), ahead: 4, ..options(GraphMode::Require, Method::Stream) };
        Rig::new(device.clone(), case, options, CONTEXT, DType::F32)
    }

    fn begin(mut rig: Rig) -> Speaker {
        let sampling = SamplingParams { temperature: 0.9, seed: 3, ..SamplingParams::greedy() };
        let (mut sequence, mut row) = (rig.engine.open(), SamplingRow::new(&sampling));
        let last = rig.engine.prompt(&mut sequence, &[1, 17, 5, 90, 3], &mut row, |_| true).unwrap();
        Speaker { rig, sequence, row, last, said: vec![(last.token, last.logprob.to_bits())] }
    }

    /// The next token, with steps for the following ones in flight.
    fn step(&mut self) -> Result<(), EngineError> {
        let ahead = Lookahead { n_tokens: N_TOKENS - self.said.len() + 1, end: &[] };
        let Speaker { rig, sequence, row, last, .. } = self;
        self.last = rig.engine.decode_ahead(sequence, last.token, row, &ahead)?;
        self.said.push((self.last.token, self.last.logprob.to_bits()));
        Ok(())
    }

    fn advance(&mut self) {
        while self.said.len() < N_TOKENS {
            self.step().unwrap();
        }
        // No step ran eagerly: the mode allows none.
        assert!(self.rig.monitor.status().cache.replayed > 0);
    }
}

fn alone(case: &str) -> Vec<(u32, u32)> {
    let mut speaker = Speaker::begin(Speaker::open(&sim("").1, case, case));
    speaker.advance();
    speaker.said
}

#[test]
fn a_second_model_creates_no_context_and_loads_no_kernels() {
    let (sim, device) = sim("");
    let mut first = Speaker::begin(Speaker::open(&device, "llama", "one"));
    first.advance();
    let before = sim.stats();
    let mut second = Speaker::begin(Speaker::open(&device, "llama", "two"));
    second.advance();
    let after = sim.stats();
    for call in [DriverCall::PrimaryCtxRetain, DriverCall::CtxCreate, DriverCall::ModuleLoad] {
        assert_eq!(after.n_calls(call), before.n_calls(call), "{call:?}");
    }
    assert!(before.n_calls(DriverCall::PrimaryCtxRetain) == 1 && before.n_calls(DriverCall::ModuleLoad) > 0);
    assert_eq!((after.live.contexts, after.live.modules), (1, before.live.modules));
    assert_eq!(first.said, second.said);
    // Each reports the other.
    let others = second.rig.monitor.status().others;
    let memory = first.rig.monitor.status().memory;
    assert_eq!(others.iter().map(|o| (&*o.model, o.bytes)).collect::<Vec<_>>(), [("one", memory.total())]);
    drop((first, second));
    assert_eq!(device.take_reports(), Vec::<String>::new());
}

#[test]
fn two_models_that_take_turns_give_the_same_output_as_alone() {
    let (sim, device) = sim("");
    let rigs = ["llama", "gemma3"].map(|case| Speaker::open(&device, case, case));
    let mut speakers = rigs.map(Speaker::begin);
    for _ in 1..N_TOKENS {
        // Steps of the other model are in flight all the time.
        speakers.iter_mut().for_each(|speaker| speaker.step().unwrap());
    }
    for (speaker, case) in speakers.iter().zip(["llama", "gemma3"]) {
        assert_eq!(speaker.said, alone(case), "{case}");
        let status = speaker.rig.monitor.status();
        assert!(status.cache.replayed as usize >= N_TOKENS - 1 && status.cache.demoted == 0);
    }
    assert_eq!(sim.stats().live.contexts, 1);
    assert_eq!(device.take_reports(), Vec::<String>::new());
}

#[test]
fn models_on_their_own_threads_give_the_same_output_as_alone() {
    let (_, device) = sim("");
    let said = std::thread::scope(|scope| {
        let running = ["llama", "qwen3", "gemma3"].map(|case| {
            let device = &device;
            scope.spawn(move || {
                let mut speaker = Speaker::begin(Speaker::open(device, case, case));
                speaker.advance();
                speaker.said
            })
        });
        running.map(|thread| thread.join().unwrap())
    });
    assert_eq!(said, ["llama", "qwen3", "gemma3"].map(alone));
    assert_eq!(device.take_reports(), Vec::<String>::new());
}

#[test]
#[cfg_attr(not(feature = "gpu-tests"), ignore = "needs a CUDA device: cargo xtask gpu-bundle")]
fn models_that_share_a_gpu_give_the_same_output_as_alone() {
    const CASES: [&str; 3] = ["llama", "qwen3", "gemma3"];
    let _turn = gpu_turn();
    let device = gpu();
    let want = CASES.map(|case| {
        let mut speaker = Speaker::begin(Speaker::open(&device, case, case));
        speaker.advance();
        speaker.said
    });
    // In turns, with steps of the others in flight.
    let mut speakers = CASES.map(|case| Speaker::begin(Speaker::open(&device, case, case)));
    for _ in 1..N_TOKENS {
        speakers.iter_mut().for_each(|speaker| speaker.step().unwrap());
    }
    assert_eq!(speakers.each_ref().map(|speaker| speaker.said.clone()), want);
    // A model that is dropped with steps in flight leaves the others alone.
    let [goes, mut stays, _] = speakers;
    drop(goes);
    // A prompt runs a step, after which the status is current.
    let mut row = SamplingRow::new(&SamplingParams::greedy());
    let mut sequence = stays.rig.engine.open();
    stays.rig.engine.prompt(&mut sequence, &[1, 17, 5], &mut row, |_| true).unwrap();
    let others = stays.rig.monitor.status().others;
    assert!(!others.iter().any(|other| other.model == "llama"), "{others:?}");
    // Each on a thread of its own, at the same time.
    let said = std::thread::scope(|scope| {
        let running = CASES.map(|case| {
            let device = &device;
            scope.spawn(move || {
                let mut speaker = Speaker::begin(Speaker::open(device, case, case));
                speaker.advance();
                speaker.said
            })
        });
        running.map(|thread| thread.join().unwrap())
    });
    assert_eq!(said, want);
    assert_eq!(device.take_reports(), Vec::<String>::new());
}

#[test]
fn a_lost_device_is_reported_by_every_model_on_it() {
    let (sim, device) = sim("");
    let mut speakers = ["llama", "qwen3"].map(|case| Speaker::begin(Speaker::open(&device, case, case)));
    speakers.iter_mut().for_each(|speaker| speaker.step().unwrap());
    sim.inject(refrain_driver::sim::FaultScript::parse("on 1st replay: illegal address").unwrap());
    for speaker in &mut speakers {
        let error = loop {
            match speaker.step() {
                Ok(()) => assert!(speaker.said.len() < N_TOKENS, "nothing was lost"),
                Err(error) => break error,
            }
        };
        let reason = format!("{:?}", error.reason());
        assert!(reason.contains("ContextLost"), "{reason}");
    }
}

#[test]
fn a_status_shows_what_other_models_hold_at_the_last_step() {
    let (_, device) = sim("");
    let mut stays = Speaker::begin(Speaker::open(&device, "llama", "stays"));
    let mut others_after_a_step = || {
        stays.step().unwrap();
        stays.rig.engine.drain();
        let others = stays.rig.monitor.status().others;
        others.into_iter().map(|held| held.model).collect::<Vec<_>>()
    };
    assert!(others_after_a_step().is_empty());
    let goes = Speaker::begin(Speaker::open(&device, "gemma3", "goes"));
    assert_eq!(others_after_a_step(), ["goes"]);
    drop(goes);
    assert!(others_after_a_step().is_empty());
}

#[test]
fn a_dropped_model_frees_its_memory_while_the_other_runs_ahead() {
    let want = alone("llama");
    let (sim, device) = sim("");
    let mut stays = Speaker::begin(Speaker::open(&device, "llama", "stays"));
    stays.step().unwrap();
    let before = sim.stats().live;
    let mut goes = Speaker::begin(Speaker::open(&device, "gemma3", "goes"));
    goes.step().unwrap();
    // Both have steps in flight when one is dropped.
    assert!(sim.stats().live.bytes > before.bytes && sim.stats().live.execs > before.execs);
    drop(goes);
    stays.advance();
    assert_eq!(stays.said, want);
    stays.rig.engine.drain();
    let after = sim.stats().live;
    assert_eq!((after.bytes, after.execs, after.streams), (before.bytes, before.execs, before.streams));
    assert_eq!(device.take_reports(), Vec::<String>::new());
    drop(stays);
    drop(device);
    assert_eq!(sim.stats().live, Default::default());
}

#[test]
fn a_refusal_for_memory_names_what_the_other_models_hold() {
    let sim = SimDriver::new(SimOptions { memory_bytes: 3 << 20, ..SimOptions::default() });
    refrain_kernels::register_twins(&sim);
    let device = Device::simulated(&sim).unwrap();
    let small = |name: &str| CudaOptions {
        model: name.into(),
        arena_reserve_bytes: 0,
        ..options(GraphMode::Require, Method::Stream)
    };
    let mut held = Speaker::begin(Rig::new(device.clone(), "llama", small("the first"), CONTEXT, DType::F32));
    let memory = held.rig.monitor.status().memory.total();
    let backend = CudaBackend::on(&device, small("the second")).unwrap();
    // A context for which there is not enough memory.
    let runner =
        RunnerOptions { context: 4096, kv_block: 16, kv_dtype: DType::F32, ..RunnerOptions::default() };
    let mut second = Core::new(Box::new(BackendRunner::new(backend, model("llama"), runner).unwrap()), 128);
    let mut sequence = second.open();
    let error = second.logits(&mut sequence, &[1], 1).unwrap_err();
    let mut text = error.to_string();
    let mut source = std::error::Error::source(&error);
    while let Some(error) = source {
        text = format!("{text}: {error}");
        source = error.source();
    }
    let holds = format!("are free on sim:0; the first holds {:.1} KiB", memory as f64 / 1024.0);
    assert!(text.contains(&holds), "{text}, not {holds}");
    held.advance();
}

#[test]
fn simulated_devices_with_equal_options_are_shared_unless_they_have_faults() {
    let open =
        |options: SimOptions| CudaBackend::open(DeviceKind::Sim(options), CudaOptions::default()).unwrap();
    let plain = SimOptions { seed: 0xA11CE, ..SimOptions::default() };
    let (a, b) = (open(plain.clone()), open(plain.clone()));
    assert!(a.device().is_same(b.device()));
    assert!(!open(SimOptions { seed: 1, ..plain.clone() }).device().is_same(a.device()));
    let faults = refrain_driver::sim::FaultScript::parse("on 900th launch: wrong byte").unwrap();
    let faulty = SimOptions { faults, ..plain.clone() };
    assert!(!open(faulty.clone()).device().is_same(open(faulty).device()));
    let before = a.device().clone();
    drop((a, b));
    // The owner ended with its last model.
    assert!(!open(plain).device().is_same(&before));
}
