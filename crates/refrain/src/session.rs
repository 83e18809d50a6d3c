//! A model on a device, with a conversation in its cache.

use crate::error::Error;
use crate::generate::{Generate, Generation, Prompt};
use crate::model::Model;
use refrain_cpu::CpuBackend;
use refrain_cpu::pool::default_threads;
use refrain_cuda::{CublasLt, CudaBackend, CudaOptions, GraphMode, LoadListener, Monitor, Status, Timeline};
use refrain_driver::sim::{FaultScript, SimOptions};
use refrain_driver::trial::Choice;
use refrain_driver::{DeviceKind, Method};
use refrain_engine::{BackendRunner, Engine, Ledger, Perplexity, PerplexityOptions, RunnerOptions};
use refrain_graph::Plan;
use refrain_tensor::DType;
use std::borrow::Cow;
use std::path::PathBuf;
use std::sync::Arc;

/// Where a session runs.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Device {
    /// The CPU, with that many threads, or as many as suit the machine.
    Cpu {
        /// Threads.
        threads: Option<usize>,
    },
    /// A CUDA card.
    Cuda {
        /// Its number.
        ordinal: u32,
        /// Whether steps run as graphs.
        graph: GraphMode,
        /// How graphs are recorded.
        method: Method,
        /// Times every launch; steps then run eagerly.
        profile: bool,
        /// Folder of compiled kernels; without one they are compiled at each start.
        kernel_cache: Option<PathBuf>,
        /// The compiler library; without a path the usual places are searched.
        nvrtc: Option<PathBuf>,
    },
    /// The simulated CUDA device: slow, and the same machinery.
    Sim {
        /// Names the run.
        seed: u64,
        /// What goes wrong.
        faults: FaultScript,
        /// Whether steps run as graphs.
        graph: GraphMode,
        /// How graphs are recorded.
        method: Method,
        /// Times every launch; steps then run eagerly.
        profile: bool,
    },
}

impl Device {
    /// What a CUDA device, real or simulated, is opened with; for the CPU its threads.
    pub(crate) fn cuda(&self) -> Result<(DeviceKind, CudaOptions), usize> {
        match self {
            Device::Cpu { threads } => Err(threads.unwrap_or_else(default_threads)),
            Device::Cuda { ordinal, graph, method, profile, kernel_cache, nvrtc } => {
                let mut cuda = CudaOptions { profile: *profile, ..CudaOptions::new(*graph, *method) };
                cuda.kernels.cache.clone_from(kernel_cache);
                cuda.kernels.nvrtc.clone_from(nvrtc);
                Ok((DeviceKind::Cuda(*ordinal), cuda))
            }
            Device::Sim { seed, faults, graph, method, profile } => {
                let sim = SimOptions { seed: *seed, faults: faults.clone(), ..SimOptions::default() };
                let cuda = CudaOptions { profile: *profile, ..CudaOptions::new(*graph, *method) };
                Ok((DeviceKind::Sim(sim), cuda))
            }
        }
    }
}

/// How a session is laid out.
#[derive(Clone, Debug)]
pub struct SessionOptions {
    /// Where it runs.
    pub device: Device,
    /// Tokens it can hold; the smaller of the model's and 4,096 when `None`.
    pub context: Option<usize>,
    /// Element type of the KV cache: F16, BF16 or F32.
    pub kv_dtype: DType,
    /// Decode steps that a CUDA device may have under way at once; the usual number when `None`, 1 for none ahead.
    pub ahead: Option<usize>,
    /// Hears how much memory a CUDA device needs, before any is allocated, and how far the weights are.
    pub on_load: LoadListener,
    /// What a trial of stream capture says about the device's method. Where captures are harmful it goes before the
    /// device's own, and no stream is captured for the calls of libraries either.
    pub graph_choice: Option<Choice>,
}

impl Default for SessionOptions {
    fn default() -> SessionOptions {
        SessionOptions {
            device: Device::Cpu { threads: None },
            context: None,
            kv_dtype: DType::F16,
            ahead: None,
            on_load: LoadListener::default(),
            graph_choice: None,
        }
    }
}

const USUAL_CONTEXT: usize = 4096;

/// One sequence on one device.
pub struct Session {
    pub(crate) model: Model,
    pub(crate) engine: Engine,
    pub(crate) sequence: refrain_engine::Session,
    monitor: Option<Monitor>,
    graph_choice: Option<Choice>,
}

impl Session {
    /// Brings a model to a device.
    pub fn new(model: &Model, options: &SessionOptions) -> Result<Session, Error> {
        let (engine, monitor) = monitored_engine(model.weights(), model.name(), options)?;
        // What was repacked or is on the card is not read from the file again; what still is, as float weights are on
        // the CPU, comes back with the pages that are touched.
        model.files().release();
        let sequence = engine.open();
        let graph_choice = options.graph_choice.clone();
        Ok(Session { model: model.clone(), engine, sequence, monitor, graph_choice })
    }

    /// Memory, graphs and timings of a CUDA device, real or simulated; `None` on the CPU.
    pub fn device_status(&self) -> Option<Status> {
        self.monitor.as_ref().map(Monitor::status)
    }

    /// How graphs are recorded and why, where a trial was asked.
    pub fn graph_choice(&self) -> Option<&Choice> {
        self.graph_choice.as_ref()
    }

    /// When each profiled launch ran; `None` on the CPU.
    pub fn timeline(&self) -> Option<Timeline> {
        self.monitor.as_ref().map(Monitor::timeline)
    }

    /// The model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// Tokens the session can hold.
    pub fn context(&self) -> usize {
        self.engine.context()
    }

    /// Name of the backend.
    pub fn backend(&self) -> &'static str {
        self.engine.backend()
    }

    /// How every step ran.
    pub fn ledger(&self) -> &Ledger {
        self.engine.ledger()
    }

    /// Forgets the steps so far.
    pub fn reset_ledger(&mut self) {
        self.engine.reset_ledger();
    }

    /// The plan of a step over `n_tokens` tokens.
    pub fn plan(&mut self, n_tokens: usize) -> Result<&Plan, Error> {
        Ok(self.engine.plan(n_tokens)?)
    }

    /// The kernels of that plan, each with the (first) step it runs.
    pub fn kernels(&mut self, n_tokens: usize) -> Result<Vec<(usize, Cow<'static, str>)>, Error> {
        Ok(self.engine.kernels(n_tokens)?)
    }

    /// Generates text behind a prompt. What the cache already holds of the prompt is not evaluated again.
    pub fn generate(&mut self, prompt: Prompt<'_>, options: &Generate) -> Result<Generation<'_>, Error> {
        Generation::new(self, prompt, options)
    }

    /// Forgets the conversation.
    pub fn reset(&mut self) {
        self.sequence = self.engine.open();
    }

    /// How well the model predicts a text, in windows of `window` tokens of which the second half is scored.
    pub fn perplexity(
        &mut self,
        text: &str,
        window: usize,
        max_windows: Option<usize>,
        progress: impl FnMut(usize, Perplexity),
    ) -> Result<Perplexity, Error> {
        let tokenizer = self.model.tokenizer();
        let tokens = tokenizer.encode(text, true, false)?;
        let bos = tokenizer.bos().filter(|_| tokenizer.add_bos());
        self.reset();
        let options = PerplexityOptions { window, max_windows, bos };
        Ok(refrain_engine::perplexity(&mut self.engine, &tokens, options, progress)?)
    }
}

/// A model's weights on a device, and for a CUDA device a view of what it does.
pub(crate) fn monitored_engine(
    weights: &Arc<refrain_models::Model>,
    name: &str,
    options: &SessionOptions,
) -> Result<(Engine, Option<Monitor>), Error> {
    let most = weights.config().n_context;
    let context = options.context.unwrap_or(most.min(USUAL_CONTEXT));
    if context == 0 || context > most {
        return Err(Error::Context { got: context, most, model: name.into() });
    }
    if !options.kv_dtype.is_float() {
        return Err(Error::KvDtype { got: options.kv_dtype });
    }
    let runner = RunnerOptions { context, kv_dtype: options.kv_dtype, ..RunnerOptions::default() };
    let (kind, cuda) = match options.device.cuda() {
        Ok(cuda) => cuda,
        Err(threads) => {
            let backend = CpuBackend::new(threads)?;
            let runner = Box::new(BackendRunner::new(backend, weights.clone(), runner)?);
            return Ok((Engine::new(runner, context), None));
        }
    };
    let ahead = options.ahead.unwrap_or(cuda.ahead);
    let mut cuda = CudaOptions { ahead, on_load: options.on_load.clone(), ..cuda };
    if options.graph_choice.as_ref().is_some_and(Choice::avoids_capture) {
        // A library's calls become nodes by a capture, so they are left out too.
        (cuda.graphs.method, cuda.cublaslt) = (Method::Nodes, CublasLt::Never);
    }
    // A prompt goes in pieces as large as the largest graph.
    let runner = RunnerOptions { max_tokens: cuda.buckets.iter().copied().max().unwrap_or(1), ..runner };
    let backend = CudaBackend::open(kind, cuda)?;
    let monitor = backend.monitor();
    let runner = Box::new(BackendRunner::new(backend, weights.clone(), runner)?);
    let mut engine = Engine::new(runner, context);
    // The graph of a decode step is recorded and verified here, so that no token waits for it.
    engine.plan(1)?;
    Ok((engine, Some(monitor)))
}
