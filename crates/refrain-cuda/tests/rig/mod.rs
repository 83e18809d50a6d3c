//! Whole models on a device, for the tests of models and of the executor.
#![allow(dead_code, unreachable_pub, reason = "each test file uses a part of it")]

pub mod goldens;

use std::sync::{Mutex, MutexGuard, PoisonError};

use refrain_cuda::{CacheOptions, CudaBackend, CudaOptions, GraphMode, Monitor};
use refrain_driver::sim::{FaultScript, SimDriver, SimOptions};
use refrain_driver::{Device, DeviceKind, Method};
use refrain_engine::{
    BackendRunner, Chosen, Core, RunnerOptions, SamplingParams, SamplingRow, SequenceState,
};
use refrain_tensor::DType;

pub use goldens::model;

pub struct Rig {
    pub engine: Core,
    pub monitor: Monitor,
    pub device: Device,
}

pub fn options(mode: GraphMode, method: Method) -> CudaOptions {
    let graphs = CacheOptions { mode, method, first_backoff: 2, ..CacheOptions::default() };
    let mut options = CudaOptions { graphs, buckets: vec![1, 8], ..CudaOptions::default() };
    // Compiled once for all tests on a machine.
    options.kernels.cache = Some(std::env::temp_dir().join("refrain-test-kernels"));
    options
}

/// A simulated device with the twins of all kernels.
pub fn sim(script: &str) -> (SimDriver, Device) {
    let faults = FaultScript::parse(script).unwrap();
    let sim = SimDriver::new(SimOptions { seed: 5, faults, ..SimOptions::default() });
    refrain_kernels::register_twins(&sim);
    let device = Device::simulated(&sim).unwrap();
    (sim, device)
}

pub fn gpu() -> Device {
    Device::open(DeviceKind::Cuda(0)).unwrap()
}

/// Lock for tests of the real GPU: they share its primary context.
pub fn gpu_turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Rig {
    pub fn new(device: Device, case: &str, options: CudaOptions, context: usize, kv_dtype: DType) -> Rig {
        let backend = CudaBackend::on(&device, options).unwrap();
        let monitor = backend.monitor();
        let runner = RunnerOptions {
            context,
            kv_block: 16,
            kv_dtype,
            max_tokens: 64,
            n_recurrent: 4,
            ..RunnerOptions::default()
        };
        let runner = BackendRunner::new(backend, model(case), runner).unwrap();
        Rig { engine: Core::new(Box::new(runner), context), monitor, device }
    }
}

pub const PROMPTS: [&[u32]; 3] = [&[1, 17, 5, 90, 3], &[9], &[4, 8, 15, 16, 23, 42, 7, 11, 30, 2, 5]];

fn sampling(idx: usize) -> SamplingRow {
    let greedy = SamplingParams::greedy();
    SamplingRow::new(&match idx {
        0 => greedy,
        1 => SamplingParams { temperature: 0.9, top_k: 20, top_p: 0.95, seed: 7, ..greedy },
        _ => SamplingParams { temperature: 1.1, repeat_penalty: 1.2, seed: 8, ..greedy },
    })
}

/// One request, generated token by token.
pub struct Generation {
    pub session: SequenceState,
    pub row: SamplingRow,
    pub last: Chosen,
    /// Tokens, each with the bits of its log-probability.
    pub said: Vec<(u32, u32)>,
}

impl Generation {
    pub fn begin(rig: &mut Rig, idx: usize) -> Generation {
        let (mut session, mut row) = (rig.engine.open(), sampling(idx));
        let last = rig.engine.prompt(&mut session, PROMPTS[idx], &mut row, |_| true).unwrap();
        Generation { session, row, last, said: vec![(last.token, last.logprob.to_bits())] }
    }

    pub fn advance(&mut self, rig: &mut Rig) {
        self.last = rig.engine.decode(&mut self.session, self.last.token, &mut self.row).unwrap();
        self.said.push((self.last.token, self.last.logprob.to_bits()));
    }
}

/// Alternates two requests of `n_tokens` token by token, then runs a third of twice the length alone, in the
/// blocks that those release.
pub fn generate(rig: &mut Rig, n_tokens: usize) -> Vec<Vec<(u32, u32)>> {
    let mut generations = [Generation::begin(rig, 0), Generation::begin(rig, 1)];
    for _ in 1..n_tokens {
        generations.iter_mut().for_each(|t| t.advance(rig));
    }
    let mut said: Vec<_> = generations.into_iter().map(|generation| generation.said).collect();
    let mut third = Generation::begin(rig, 2);
    for _ in 1..2 * n_tokens {
        third.advance(rig);
    }
    said.push(third.said);
    assert_eq!(rig.device.take_reports(), Vec::<String>::new());
    said
}

/// Number of tokens that [`generate`] decodes; the first of each request comes from its prompt.
pub fn n_decoded(n_tokens: usize) -> u64 {
    (4 * n_tokens - 3) as u64
}
