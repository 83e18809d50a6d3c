//! How fast a device trains.

use crate::bench::{Resident, Samples};
use crate::error::Error;
use crate::session::Device;
use crate::train::open::look;
use crate::train::{StepLearner, peak_flops};
use refrain_cuda::{LoadListener, Status};
use refrain_graph::Ran;
use refrain_models::{LoraSpec, Model as Weights, NamedShape, QuantMix, TrainSpec};
use refrain_tensor::DType;
use refrain_train::TrainError;
use refrain_train::config::TrainConfig;
use refrain_train::flops::step_flops;
use refrain_train::learner::{AdamSettings, Rows};
use refrain_train::memory::{MemoryCounts, MemoryEstimate};
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
    /// Seconds of each step.
    pub seconds: Samples,
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
    /// Milliseconds of a step: the median.
    pub fn ms(&self) -> f64 {
        1e3 * self.seconds.median()
    }

    /// Tokens a second.
    pub fn tokens_per_second(&self) -> f64 {
        self.n_tokens as f64 / self.seconds.median()
    }

    /// The share of the peak, where that is known.
    pub fn peak_share(&self) -> Option<f64> {
        self.peak_flops.map(|peak| self.step_flops / self.seconds.median() / peak)
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
        dtype: bench.dtype,
        masters: bench.masters,
        accumulates: false,
        dropout: 0.0,
        recompute: bench.recompute,
    };
    progress("preparing the step");
    let mut learner =
        StepLearner::with_listener(model.clone(), &bench.device, spec, 1, bench.on_load.clone())?;
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
    let (mut seconds, mut losses) = (Samples(Vec::new()), [f32::NAN; 2]);
    let (mut n_replayed, mut launches) = (0, None);
    for step in 0..N_WARM + bench.n_steps {
        progress(&format!("step {step} of {}", N_WARM + bench.n_steps));
        let began = Instant::now();
        let outcome = learner.step(&[rows], &adam, [0, 0, step as u32, 0])?;
        let took = began.elapsed().as_secs_f64();
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
        step_flops: step_flops(&model, n_tokens as u64, bench.context),
        n_replayed,
        launches,
        estimated_bytes,
        resident: Resident::of_this_process(),
        device: learner.device_status(),
        losses,
    })
}
