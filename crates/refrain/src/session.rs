//! A model on a device, with a conversation in its cache.

use crate::engines::MonitoredEngine;
use crate::error::Error;
use crate::generate::{Generate, Generation, Prompt};
use crate::model::Model;
use crate::placement::TablePlacement;
use refrain_cpu::pool::default_threads;
use refrain_cuda::{CudaOptions, GraphMode, LoadListener, Monitor, Status, Timeline};
use refrain_driver::sim::{FaultScript, SimOptions};
use refrain_driver::trial::Choice;
use refrain_driver::{DeviceKind, Method};
use refrain_engine::{Engine, Ledger, Perplexity, PerplexityOptions, Sequence};
use refrain_graph::Plan;
use refrain_tensor::DType;
use std::borrow::Cow;
use std::num::NonZeroU32;
use std::path::PathBuf;

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

impl Default for Device {
    fn default() -> Device {
        Device::Cpu { threads: None }
    }
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
    /// Compares every so many decode steps with their eager run while a text goes on, on a CUDA device. Each of them
    /// waits for the device twice: on an H200 about 1 ms with the built-in model, whose step takes a tenth of that.
    pub verify_every: Option<NonZeroU32>,
    /// Hears how much memory a CUDA device needs, before any is allocated, and how far the weights are.
    pub on_load: LoadListener,
    /// Where the table of per-layer embeddings lies, in a model that has one. On the CPU it is where the file is mapped,
    /// whatever this says; [`TablePlacement::Host`] makes its rows a step of their own there too.
    pub table: TablePlacement,
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
            verify_every: None,
            on_load: LoadListener::default(),
            table: TablePlacement::Auto,
            graph_choice: None,
        }
    }
}

/// One conversation on one device.
///
/// Sessions of one [`Model`] on the same device share its weights there, and its threads: a further session adds the KV
/// cache of its context. They may be used from different threads; those that generate at the same time share steps.
pub struct Session {
    pub(crate) model: Model,
    pub(crate) engine: Engine,
    pub(crate) sequence: Sequence,
    monitor: Option<Monitor>,
    table: Option<TablePlacement>,
    graph_choice: Option<Choice>,
}

impl Session {
    /// Brings a model to a device, if no other session of it is there already.
    ///
    /// The KV cache grows for a further session, and steps are then compiled again. Where a device has no room for the old
    /// and the new cache at once, the session is refused.
    pub fn new(model: &Model, options: &SessionOptions) -> Result<Session, Error> {
        let (made, sequence) = model.engines().open(model.weights(), model.name(), options)?;
        // What was repacked or is on the card is not read from the file again; what still is, as float weights are on
        // the CPU, comes back with the pages that are touched.
        model.files().release();
        let MonitoredEngine { engine, monitor, table } = made;
        let graph_choice = options.graph_choice.clone();
        Ok(Session { model: model.clone(), engine, sequence, monitor, table, graph_choice })
    }

    /// Where the table of per-layer embeddings lies; `None` where the model has none or it runs on the CPU.
    pub fn table_placement(&self) -> Option<TablePlacement> {
        self.table
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
        self.sequence.context()
    }

    /// Name of the backend.
    pub fn backend(&self) -> &'static str {
        self.engine.backend()
    }

    /// How every step of this session ran.
    pub fn ledger(&self) -> Ledger {
        self.sequence.ledger()
    }

    /// Forgets the steps so far.
    pub fn reset_ledger(&mut self) {
        self.sequence.reset_ledger();
    }

    /// The plan of a step over `n_tokens` tokens.
    pub fn plan(&self, n_tokens: usize) -> Result<Plan, Error> {
        Ok(self.engine.plan(n_tokens)?)
    }

    /// The kernels of that plan, each with the (first) step it runs.
    pub fn kernels(&self, n_tokens: usize) -> Result<Vec<(usize, Cow<'static, str>)>, Error> {
        Ok(self.engine.kernels(n_tokens)?)
    }

    /// Generates text behind a prompt. What the cache already holds of the prompt is not evaluated again.
    pub fn generate(&mut self, prompt: Prompt<'_>, options: &Generate) -> Result<Generation<'_>, Error> {
        Generation::new(self, prompt, options)
    }

    /// Forgets the conversation.
    pub fn reset(&mut self) {
        // A generation ends its request before it gives the session back, so the sequence is never busy here.
        let cleared = self.sequence.clear();
        debug_assert!(cleared.is_ok(), "{cleared:?}");
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
        let options = PerplexityOptions { window, max_windows, bos };
        Ok(refrain_engine::perplexity(&self.engine, &self.sequence, &tokens, options, progress)?)
    }
}
