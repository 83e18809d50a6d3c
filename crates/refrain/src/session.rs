//! Sessions: a model on a device with one KV cache.

use crate::engines::MonitoredEngine;
use crate::error::Error;
use crate::generate::{Generate, Generation, Prompt};
use crate::model::Model;
use crate::placement::{ExpertPlacement, TablePlacement};
use crate::speculation::SpeculationOptions;
use refrain_cpu::pool::default_threads;
use refrain_cuda::{CudaOptions, GraphMode, LoadListener, LoopMode, Monitor, Status, Timeline};
use refrain_driver::sim::{FaultScript, SimOptions};
use refrain_driver::trial::MethodChoice;
use refrain_driver::{DeviceKind, Method};
use refrain_engine::{Comparison, Engine, Ledger, Perplexity, PerplexityOptions, Sequence};
use refrain_formats::tokenizer::Tokenizer;
use refrain_graph::Plan;
use refrain_tensor::DType;
use std::borrow::Cow;
use std::num::NonZeroU32;
use std::path::PathBuf;

/// The device that a session runs on.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Device {
    /// The CPU.
    Cpu {
        /// Number of threads; a number that suits the machine when `None`.
        threads: Option<usize>,
    },
    /// A CUDA GPU.
    Cuda {
        /// Its index.
        ordinal: u32,
        /// Whether steps run as graphs.
        graph: GraphMode,
        /// How graphs are recorded.
        method: Method,
        /// Times every launch; steps then run eagerly.
        profile: bool,
        /// Cache folder for compiled kernels; without one, kernels that are not prebuilt are compiled at each start.
        kernel_cache: Option<PathBuf>,
        /// Path of the NVRTC library; the standard locations are searched when `None`.
        nvrtc: Option<PathBuf>,
    },
    /// The simulated CUDA device: slow, but it takes the same code path as a GPU.
    Sim {
        /// Seed of the simulation.
        seed: u64,
        /// Faults to inject.
        faults: FaultScript,
        /// Whether steps run as graphs.
        graph: GraphMode,
        /// How graphs are recorded.
        method: Method,
        /// Times every launch; steps then run eagerly.
        profile: bool,
    },
}

impl Default for Device {
    fn default() -> Device {
        Device::Cpu { threads: None }
    }
}

impl Device {
    /// GPU 0 if there is a usable one, and the CPU otherwise. The GPU is only looked up here; opening a session on it may
    /// still fail, for example because the model does not fit.
    pub fn auto() -> Device {
        match refrain_driver::Device::query(DeviceKind::Cuda(0)) {
            Ok(_) => Device::cuda(0),
            Err(_) => Device::default(),
        }
    }

    /// A GPU by its index, with graphs where they can be recorded.
    pub fn cuda(ordinal: u32) -> Device {
        let (graph, method) = (GraphMode::Auto, Method::Stream);
        Device::Cuda { ordinal, graph, method, profile: false, kernel_cache: None, nvrtc: None }
    }

    /// The options that open a CUDA device, real or simulated; for the CPU, its number of threads.
    pub(crate) fn cuda_options(&self) -> Result<(DeviceKind, CudaOptions), usize> {
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

/// Options of a session.
#[derive(Clone, Debug)]
pub struct SessionOptions {
    /// The device it runs on.
    pub device: Device,
    /// Maximum number of tokens; the smaller of 4,096 and the model's limit when `None`.
    pub context: Option<usize>,
    /// Element type of the KV cache: F16, BF16, F32, or U8 for signed bytes with a scale per head and position.
    pub kv_dtype: DType,
    /// Maximum number of decode steps in flight on a CUDA device; its default when `None`, and 1 launches none ahead.
    pub ahead: Option<usize>,
    /// Who repeats the steps of a reply on a CUDA device: the host, or a graph on the device.
    pub loops: LoopMode,
    /// Compares every n-th decode step with its eager run, on a CUDA device. Each comparison waits for the device twice:
    /// about 1 ms on an H200 with the built-in model, whose step takes a tenth of that.
    pub verify_every: Option<NonZeroU32>,
    /// Whether the bits of a reply depend on its own tokens alone: not on other requests, on the number of rows in a step,
    /// or on how a prompt is divided into steps. Always so on the CPU; on a CUDA device it costs speed.
    pub reproducible: bool,
    /// Receives the memory plan of a CUDA device, before anything is allocated, and the progress of the upload.
    pub on_load: LoadListener,
    /// Placement of the per-layer embedding table, in a model that has one. On the CPU the table always stays in the
    /// mapped file; [`TablePlacement::Host`] makes its lookup a host step there too.
    pub table: TablePlacement,
    /// Placement of the experts of a mixture. Without effect on the CPU and on a device that shares the host's memory.
    pub experts: ExpertPlacement,
    /// Result of a trial of stream capture. If captures are harmful on this driver, it overrides the device's method, and
    /// streams are not captured for library calls either.
    pub graph_choice: Option<MethodChoice>,
    /// Guessed tokens to check; none by default.
    pub speculation: SpeculationOptions,
    /// The adapter to apply, one of [`Model::with_loras`].
    pub adapter: Option<String>,
}

impl Default for SessionOptions {
    fn default() -> SessionOptions {
        SessionOptions {
            device: Device::Cpu { threads: None },
            context: None,
            kv_dtype: DType::F16,
            ahead: None,
            loops: LoopMode::default(),
            verify_every: None,
            reproducible: false,
            on_load: LoadListener::default(),
            table: TablePlacement::Auto,
            experts: ExpertPlacement::Device,
            graph_choice: None,
            speculation: SpeculationOptions::default(),
            adapter: None,
        }
    }
}

/// One sequence of tokens on one device. [`Chat`](crate::Chat) adds the history of a conversation.
///
/// Sessions of one [`Model`] on the same device share its weights and its threads: each further session adds only the
/// KV cache of its context. They may be used from different threads; sessions that generate at the same time share
/// steps.
pub struct Session {
    pub(crate) model: Model,
    pub(crate) engine: Engine,
    pub(crate) sequence: Sequence,
    monitor: Option<Monitor>,
    table: Option<TablePlacement>,
    experts: Option<ExpertPlacement>,
    graph_choice: Option<MethodChoice>,
    pub(crate) speculation: SpeculationOptions,
    pub(crate) loops: LoopMode,
}

impl Session {
    /// Loads a model onto a device, unless another session has already loaded it.
    ///
    /// A further session grows the KV cache, and steps are then compiled again. If the device cannot hold the old and the
    /// new cache at once, the session is refused.
    pub fn new(model: &Model, options: &SessionOptions) -> Result<Session, Error> {
        options.speculation.check_tokens(model)?;
        let (made, sequence) = model.engines().open(model.weights(), model.name(), options)?;
        // Weights that were repacked or uploaded are not read from the file again. Others, such as float weights on the
        // CPU, are paged in again when they are read.
        model.files().release();
        let MonitoredEngine { engine, monitor, table, experts } = made;
        let (graph_choice, speculation) = (options.graph_choice.clone(), options.speculation.clone());
        let model = model.clone();
        let loops = options.loops;
        Ok(Session { model, engine, sequence, monitor, table, experts, graph_choice, speculation, loops })
    }

    /// Placement of the per-layer embedding table; `None` if the model has none or runs on the CPU.
    pub fn table_placement(&self) -> Option<TablePlacement> {
        self.table
    }

    /// Placement of the experts; `None` if the model has none or runs on the CPU.
    pub fn expert_placement(&self) -> Option<ExpertPlacement> {
        self.experts
    }

    /// Memory, graphs and timings of a CUDA device, real or simulated; `None` on the CPU.
    pub fn device_status(&self) -> Option<Status> {
        self.monitor.as_ref().map(Monitor::status)
    }

    /// How graphs are recorded and why, if a trial was made.
    pub fn graph_choice(&self) -> Option<&MethodChoice> {
        self.graph_choice.as_ref()
    }

    /// The timeline of profiled launches; `None` on the CPU.
    pub fn timeline(&self) -> Option<Timeline> {
        self.monitor.as_ref().map(Monitor::timeline)
    }

    /// The model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// Maximum number of tokens.
    pub fn context(&self) -> usize {
        self.sequence.context()
    }

    /// Name of the backend.
    pub fn backend(&self) -> &'static str {
        self.engine.backend()
    }

    /// The ledger of this session's steps: how many were replayed, and why others were not.
    pub fn ledger(&self) -> Ledger {
        self.sequence.ledger()
    }

    /// Clears the ledger.
    pub fn reset_ledger(&mut self) {
        self.sequence.reset_ledger();
    }

    /// Plans a step over `n_tokens` tokens.
    pub fn plan(&self, n_tokens: usize) -> Result<Plan, Error> {
        Ok(self.engine.plan(n_tokens)?)
    }

    /// The kernels of that plan, each with the index of the (first) plan step that it runs.
    pub fn kernels(&self, n_tokens: usize) -> Result<Vec<(usize, Cow<'static, str>)>, Error> {
        Ok(self.engine.kernels(n_tokens)?)
    }

    /// Generates text after a prompt. The part of the prompt that the cache already holds is not evaluated again.
    ///
    /// A prompt or options that cannot work are refused here, before anything is evaluated.
    pub fn generate(&mut self, prompt: Prompt<'_>, options: &Generate) -> Result<Generation<'_>, Error> {
        Generation::new(self, prompt, options)
    }

    /// Clears the cache.
    pub fn reset(&mut self) {
        // A generation ends its request before it releases the session, so the sequence is never busy here.
        let cleared = self.sequence.clear();
        debug_assert!(cleared.is_ok(), "{cleared:?}");
    }

    /// Measures how well the model predicts a text, in windows of `window` tokens whose second half is scored.
    pub fn perplexity(
        &mut self,
        text: &str,
        window: usize,
        max_windows: Option<usize>,
        progress: impl FnMut(usize, Perplexity),
    ) -> Result<Perplexity, Error> {
        let tokenizer = self.model.tokenizer();
        let tokens = window_tokens(tokenizer, text, window, max_windows)?;
        let bos = tokenizer.bos().filter(|_| tokenizer.add_bos());
        let options = PerplexityOptions { window, max_windows, bos };
        Ok(refrain_engine::perplexity(&self.engine, &self.sequence, &tokens, options, progress)?)
    }

    /// Compares another model with this one on a text, in windows of `window` tokens whose second half is scored. Both
    /// must split the text into the same tokens.
    pub fn compare(
        &mut self,
        other: &mut Session,
        text: &str,
        window: usize,
        max_windows: Option<usize>,
        progress: impl FnMut(usize, &Comparison),
    ) -> Result<Comparison, Error> {
        let tokenizer = self.model.tokenizer();
        let tokens = window_tokens(tokenizer, text, window, max_windows)?;
        let others = window_tokens(other.model.tokenizer(), text, window, max_windows)?;
        if let Some(at) = tokens.iter().zip(&others).position(|(a, b)| a != b) {
            return Err(Error::Tokenizers { at });
        }
        if tokens.len() != others.len() {
            return Err(Error::Tokenizers { at: tokens.len().min(others.len()) });
        }
        let bos = tokenizer.bos().filter(|_| tokenizer.add_bos());
        let options = PerplexityOptions { window, max_windows, bos };
        let both = [(&self.engine, &self.sequence), (&other.engine, &other.sequence)];
        Ok(refrain_engine::compare(both, &tokens, options, progress)?)
    }
}

/// Tokens of a text's windows: only as much of the text is tokenized as `max_windows` need.
pub(crate) fn window_tokens(
    tokenizer: &Tokenizer,
    text: &str,
    window: usize,
    max_windows: Option<usize>,
) -> Result<Vec<u32>, Error> {
    let n_tokens = max_windows.map_or(usize::MAX, |n| n.saturating_mul(window));
    let mut tokens = tokenizer.encode_long(text, true, false).at_least(n_tokens)?;
    tokens.truncate(n_tokens);
    Ok(tokens)
}
