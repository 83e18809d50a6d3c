//! How fast a device trains.

use crate::bench::{Resident, Samples};
use crate::error::Error;
use crate::session::Device;
use crate::train::open::{GraphUse, look};
use crate::train::{StepLearner, peak_flops};
use refrain_cuda::{LoadListener, Status};
use refrain_driver::trial::Choice;
use refrain_graph::Ran;
use refrain_models::{LoraSpec, Model as Weights, NamedShape, QuantMix, TrainSpec};
use refrain_tensor::DType;
use refrain_train::TrainError;
use refrain_train::config::TrainConfig;
use refrain_train::flops::step_flops;
use refrain_train::learner::{AdamSettings, Rows};
use refrain_train::memory::{MemoryCounts, MemoryEstimate};
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Instant;

/// What to measure.
#[derive(Clone, Debug)]
pub struct TrainBench {
    /// Where.
    pub device: Device,
    /// The model's shape.
    pub shape: NamedShape,
    /// Rows of a step.
    pub batch: usize,
    /// Tokens of a row.
    pub context: usize,
    /// Element type of weights and activations: F32 or BF16.
    pub dtype: DType,
    /// Whether bf16 weights have masters and moments in F32.
    pub masters: bool,
    /// Train an adapter over frozen random weights instead of a fresh model.
    pub lora: Option<LoraBench>,
    /// Compute layers again in the backward pass.
    pub recompute: bool,
    /// Steps that are measured.
    pub n_steps: usize,
    /// Steps that may be in flight, at most three; the usual number unless given.
    pub ahead: Option<usize>,
    /// Compares every so many replayed steps with their eager run, which takes time; `None`: none of them.
    pub verify_every: Option<NonZeroU32>,
    /// What a trial of stream capture says about the device's method.
    pub graph_choice: Option<Choice>,
    /// Hears what a CUDA device is doing.
    pub on_load: LoadListener,
}

/// An adapter to measure.
#[derive(Clone, Debug)]
pub struct LoraBench {
    /// The adapter.
    pub spec: LoraSpec,
    /// How the frozen weights are stored.
    pub base: QuantMix,
}

/// What came out.
#[derive(Clone, Debug)]
pub struct TrainBenchReport {
    /// Name of the shape.
    pub name: String,
    /// Name of the backend.
    pub backend: &'static str,
    /// Name of the device.
    pub device_name: String,
    /// Parameters.
    pub n_parameters: usize,
    /// Those of them that are trained.
    pub n_trained: usize,
    /// Tokens of a step.
    pub n_tokens: usize,
    /// Seconds of each step: from the end of the one before to its own.
    pub seconds: Samples,
    /// Seconds that each step took the caller's thread: filling the control block and handing it over.
    pub host_seconds: Samples,
    /// Mean seconds that a step took the device thread: checks, upload, launch; `None` on the CPU.
    pub sending_seconds: Option<f64>,
    /// The most steps that were in flight at once.
    pub in_flight: usize,
    /// Seconds from the model to a compiled, recorded and verified step.
    pub ready_seconds: f64,
    /// Operations of a step.
    pub step_flops: f64,
    /// Operations a second that the device computes at best, where that is known.
    pub peak_flops: Option<f64>,
    /// Steps that ran as a graph.
    pub n_replayed: usize,
    /// Launches by the host for a replayed step; `None` where none was replayed.
    pub launches: Option<u32>,
    /// Bytes that the step's states, activations and scratch take, as estimated.
    pub estimated_bytes: u64,
    /// Memory of the process, where the system tells it.
    pub resident: Option<Resident>,
    /// Memory, graphs and timings of a CUDA device; `None` on the CPU.
    pub device: Option<Status>,
    /// Loss of the first and the last step.
    pub losses: [f32; 2],
}

impl TrainBenchReport {
    /// Milliseconds of a step: the mean, since several are in flight and results may come together.
    pub fn ms(&self) -> f64 {
        1e3 * self.seconds.mean()
    }

    /// Tokens a second.
    pub fn tokens_per_second(&self) -> f64 {
        self.n_tokens as f64 / self.seconds.mean()
    }

    /// Microseconds that a step takes of the host, on both threads together.
    pub fn host_us(&self) -> f64 {
        1e6 * (self.host_seconds.median() + self.sending_seconds.unwrap_or(0.0))
    }

    /// The share of the peak, where that is known.
    pub fn peak_share(&self) -> Option<f64> {
        self.peak_flops.map(|peak| self.step_flops / self.seconds.mean() / peak)
    }
}

/// Steps that warm caches, compile and record; they are not counted.
const N_WARM: usize = 3;

/// Measures training steps of a fresh model over random tokens. `progress` hears what is going on.
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
    // Any tokens do; these repeat, so that there is something to learn.
    let token = |i: usize| ((1000 + (i as u64 % 4096) * 7919) % n_vocab) as i32;
    let tokens: Vec<i32> = (0..n_tokens).map(token).collect();
    let targets: Vec<i32> = (1..=n_tokens).map(token).collect();
    let positions: Vec<i32> = (0..n_tokens).map(|i| (i % bench.context) as i32).collect();
    let span = |i: usize| {
        let first = i / bench.context * bench.context;
        [first as i32, (first + bench.context) as i32]
    };
    let spans: Vec<[i32; 2]> = (0..n_tokens).map(span).collect();
    let rows = Rows { tokens: &tokens, targets: &targets, positions: &positions, spans: &spans };
    let adam = AdamSettings { lr: 3e-4, betas: [0.9, 0.95], eps: 1e-8, weight_decay: 0.1, clip: Some(1.0) };
    let queue_stats = |learner: &StepLearner| learner.device_status().map(|status| status.queued);
    let (mut seconds, mut host_seconds) = (Samples(Vec::new()), Samples(Vec::new()));
    let (mut n_replayed, mut launches, mut losses) = (0, None, [f32::NAN; 2]);
    let n_steps = N_WARM + bench.n_steps;
    let (mut n_sent, mut last, mut before) = (0, Instant::now(), None);
    for step in 0..n_steps {
        progress(&format!("step {step} of {n_steps}"));
        // Warm steps are finished before the first measured one is sent.
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
        // The CPU runs a step while it is queued.
        host_seconds: if learner.depth() > 1 { host_seconds } else { Samples(Vec::new()) },
        sending_seconds,
        in_flight: after.map_or(1, |stats| stats.most_in_flight.max(1)),
        ready_seconds,
        step_flops: step_flops(&model, n_tokens as u64, bench.context),
        n_replayed,
        launches,
        estimated_bytes,
        resident: Resident::of_this_process(),
        device: learner.device_status(),
        losses,
    })
}
