//! Benchmarks of training steps.

use crate::bench::{ProcessMemory, Samples};
use crate::error::Error;
use crate::session::Device;
use crate::train::open::{GraphUse, look};
use crate::train::{StepLearner, peak_flops};
use refrain_cuda::{LoadListener, Status};
use refrain_driver::trial::MethodChoice;
use refrain_graph::Ran;
use refrain_models::{LoraSpec, Model as Weights, NamedShape, QuantMix, TrainSpec};
use refrain_tensor::DType;
use refrain_train::TrainError;
use refrain_train::config::TrainConfig;
use refrain_train::flops::step_flops;
use refrain_train::learner::{AdamSettings, BatchRows};
use refrain_train::memory::{MemoryCounts, MemoryEstimate};
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Instant;

/// Options of a training benchmark.
#[derive(Clone, Debug)]
pub struct TrainBench {
    /// The device.
    pub device: Device,
    /// The model's shape.
    pub shape: NamedShape,
    /// Rows in a step.
    pub batch: usize,
    /// Tokens in a row.
    pub context: usize,
    /// Element type of weights and activations: F32 or BF16.
    pub dtype: DType,
    /// Whether bf16 weights have F32 master weights and moments.
    pub masters: bool,
    /// Train an adapter over frozen random weights instead of a fresh model.
    pub lora: Option<LoraBench>,
    /// Recompute activations in the backward pass.
    pub recompute: bool,
    /// Number of measured steps.
    pub n_steps: usize,
    /// Maximum number of steps in flight, up to three; the default when `None`.
    pub ahead: Option<usize>,
    /// Compares every n-th replayed step with its eager run, which takes time; never when `None`.
    pub verify_every: Option<NonZeroU32>,
    /// Result of a trial of stream capture.
    pub graph_choice: Option<MethodChoice>,
    /// Receives the progress of a CUDA device.
    pub on_load: LoadListener,
}

/// Adapter of a training benchmark.
#[derive(Clone, Debug)]
pub struct LoraBench {
    /// The adapter.
    pub spec: LoraSpec,
    /// Storage types of the frozen weights.
    pub base: QuantMix,
}

/// Result of a training benchmark.
#[derive(Clone, Debug)]
pub struct TrainBenchReport {
    /// Name of the shape.
    pub name: String,
    /// Name of the backend.
    pub backend: &'static str,
    /// Name of the device.
    pub device_name: String,
    /// Number of parameters.
    pub n_parameters: usize,
    /// Number of trained parameters.
    pub n_trained: usize,
    /// Tokens in a step.
    pub n_tokens: usize,
    /// Seconds of each step: from the end of the previous step to its own.
    pub seconds: Samples,
    /// Seconds that each step took on the caller's thread: filling the control block and submitting it.
    pub host_seconds: Samples,
    /// Mean seconds that a step took on the device thread: checks, upload, launch; `None` on the CPU.
    pub sending_seconds: Option<f64>,
    /// Maximum number of steps that were in flight.
    pub in_flight: usize,
    /// Seconds to compile, record and verify the step.
    pub ready_seconds: f64,
    /// Floating-point operations per step.
    pub step_flops: f64,
    /// Peak floating-point operations per second of the device, if known.
    pub peak_flops: Option<f64>,
    /// Steps that ran as a graph.
    pub n_replayed: usize,
    /// Host launches per replayed step; `None` if none was replayed.
    pub launches: Option<u32>,
    /// Estimated bytes of states, activations and scratch memory.
    pub estimated_bytes: u64,
    /// Memory of the process, if the system reports it.
    pub resident: Option<ProcessMemory>,
    /// Memory, graphs and timings of a CUDA device; `None` on the CPU.
    pub device: Option<Status>,
    /// Loss of the first and the last step.
    pub losses: [f32; 2],
}

impl TrainBenchReport {
    /// Mean milliseconds per step. A median would mislead: with several steps in flight, results may arrive together.
    pub fn ms(&self) -> f64 {
        1e3 * self.seconds.mean()
    }

    /// Tokens per second.
    pub fn tokens_per_second(&self) -> f64 {
        self.n_tokens as f64 / self.seconds.mean()
    }

    /// Microseconds per step on the host, on both threads together.
    pub fn host_us(&self) -> f64 {
        1e6 * (self.host_seconds.median() + self.sending_seconds.unwrap_or(0.0))
    }

    /// Share of the device's peak, if known.
    pub fn peak_share(&self) -> Option<f64> {
        self.peak_flops.map(|peak| self.step_flops / self.seconds.mean() / peak)
    }
}

/// Warm-up steps, which compile and record; they are not counted.
const N_WARM: usize = 3;

/// Measures training steps of a fresh model on random tokens. `progress` receives a description of each phase.
pub fn bench_steps(bench: &TrainBench, mut progress: impl FnMut(&str)) -> Result<TrainBenchReport, Error> {
    let config = TrainConfig {
        batch: bench.batch,
        context: bench.context,
        dtype: if bench.dtype == DType::BF16 {
            refrain_train::config::Precision::Bf16
        } else {
            refrain_train::config::Precision::F32
        },
        checkpoint_activations: bench.recompute,
        ..TrainConfig::default()
    };
    progress("making the model");
    let model = Arc::new(match &bench.lora {
        None => Weights::fresh(bench.shape.fresh_config(bench.context), 0)?,
        Some(LoraBench { spec, base }) => {
            let model = Weights::random(&bench.shape, *base)?;
            model.with_adapter(&model.fresh_adapter(spec, 0)?)?
        }
    });
    let counts = MemoryCounts::of(&model, &config).map_err(TrainError::from)?;
    let estimated_bytes = MemoryEstimate::new(&config, counts).total_bytes();
    let n_tokens = bench.batch * bench.context;
    let spec = TrainSpec {
        n_tokens,
        n_context: bench.context,
        dtype: bench.dtype,
        masters: bench.masters,
        accumulates: false,
        dropout: 0.0,
        recompute: bench.recompute,
    };
    progress("preparing the step");
    let began = Instant::now();
    let (choice, verify_every) = (bench.graph_choice.as_ref(), bench.verify_every);
    let graphs = GraphUse { choice, verify_every, ahead: bench.ahead };
    let mut learner =
        StepLearner::open((model.clone(), spec, 1), &bench.device, bench.on_load.clone(), graphs)?;
    let ready_seconds = began.elapsed().as_secs_f64();
    let n_vocab = model.config().n_vocab as u64;
    // The tokens repeat, so that there is something to learn.
    let token = |i: usize| ((1000 + (i as u64 % 4096) * 7919) % n_vocab) as i32;
    let tokens: Vec<i32> = (0..n_tokens).map(token).collect();
    let targets: Vec<i32> = (1..=n_tokens).map(token).collect();
    let positions: Vec<i32> = (0..n_tokens).map(|i| (i % bench.context) as i32).collect();
    let span = |i: usize| {
        let first = i / bench.context * bench.context;
        [first as i32, (first + bench.context) as i32]
    };
    let spans: Vec<[i32; 2]> = (0..n_tokens).map(span).collect();
    let rows = BatchRows { tokens: &tokens, targets: &targets, positions: &positions, spans: &spans };
    let adam = AdamSettings { lr: 3e-4, betas: [0.9, 0.95], eps: 1e-8, weight_decay: 0.1, clip: Some(1.0) };
    let queue_stats = |learner: &StepLearner| learner.device_status().map(|status| status.queued);
    let (mut seconds, mut host_seconds) = (Samples(Vec::new()), Samples(Vec::new()));
    let (mut n_replayed, mut launches, mut losses) = (0, None, [f32::NAN; 2]);
    let n_steps = N_WARM + bench.n_steps;
    let (mut n_sent, mut last, mut before) = (0, Instant::now(), None);
    for step in 0..n_steps {
        progress(&format!("step {step} of {n_steps}"));
        // Warm-up steps finish before the first measured one is queued.
        let may_send = if step < N_WARM { N_WARM } else { n_steps };
        if step == N_WARM {
            (last, before) = (Instant::now(), queue_stats(&learner));
        }
        while n_sent < may_send.min(step + learner.depth()) {
            let began = Instant::now();
            learner.queue(&[rows], &adam, [0, 0, n_sent as u32, 0])?;
            if n_sent >= N_WARM {
                host_seconds.0.push(began.elapsed().as_secs_f64());
            }
            n_sent += 1;
        }
        let outcome = learner.collect()?;
        let took = last.elapsed().as_secs_f64();
        last = Instant::now();
        if step == 0 {
            losses[0] = outcome.loss;
        }
        losses[1] = outcome.loss;
        if step < N_WARM {
            continue;
        }
        seconds.0.push(took);
        for ran in &outcome.ran {
            if let Ran::Replayed { n_launches, .. } = ran {
                n_replayed += 1;
                launches = Some(*n_launches);
            }
        }
    }
    let after = queue_stats(&learner);
    let sending_seconds = before.zip(after).and_then(|(before, after)| {
        let n = after.n_steps.saturating_sub(before.n_steps);
        (n > 0).then(|| after.took.saturating_sub(before.took).as_secs_f64() / n as f64)
    });
    let (device_name, _) = look(&bench.device);
    Ok(TrainBenchReport {
        name: bench.shape.name.to_owned(),
        backend: learner.backend(),
        peak_flops: peak_flops(&device_name, bench.dtype),
        device_name,
        n_parameters: model.n_parameters(),
        n_trained: model.n_trained(),
        n_tokens,
        seconds,
        // The CPU runs the step in the call that queues it.
        host_seconds: if learner.depth() > 1 { host_seconds } else { Samples(Vec::new()) },
        sending_seconds,
        in_flight: after.map_or(1, |stats| stats.most_in_flight.max(1)),
        ready_seconds,
        step_flops: step_flops(&model, n_tokens as u64, bench.context),
        n_replayed,
        launches,
        estimated_bytes,
        resident: ProcessMemory::of_this_process(),
        device: learner.device_status(),
        losses,
    })
}
