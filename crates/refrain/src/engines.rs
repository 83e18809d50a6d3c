//! Sharing: sessions share engines, and engines share weights.
//!
//! Sessions of one model on the same device, with the same type of KV cache, share one engine: its weights, its thread
//! and its cache, in which each has its own blocks. Sessions that differ in one of these have separate engines; on the
//! CPU these still share the packed weights and, with the same number of threads, the threads.
//!
//! A model holds weak references to its engines, and sessions keep them alive: the last session drops its engine, and
//! the last engine drops the packed weights.

use crate::error::Error;
use crate::placement::{ExpertNeeds, ExpertPlacement, TableNeeds, TablePlacement, host_free_bytes};
use crate::session::{Device, SessionOptions};
use refrain_cpu::{CpuBackend, CpuWeights};
use refrain_cuda::{CublasLt, CudaBackend, CudaOptions, LoopMode, Monitor};
use refrain_driver::Method;
use refrain_driver::trial::MethodChoice;
use refrain_engine::{
    AdapterId, BackendRunner, Engine, EngineError, EngineOptions, Runner, RunnerOptions, Sequence, WeakEngine,
};
use refrain_graph::State;
use refrain_models::{KvSpec, Model};
use refrain_tensor::DType;
use std::fmt;
use std::num::NonZeroU32;
use std::sync::{Arc, Mutex, PoisonError, Weak};

const USUAL_CONTEXT: usize = 4096;

/// An engine, with a monitor of its CUDA device.
#[derive(Clone)]
pub(crate) struct MonitoredEngine {
    pub(crate) engine: Engine,
    pub(crate) monitor: Option<Monitor>,
    /// Placement of the per-layer embedding table, on a CUDA device.
    pub(crate) table: Option<TablePlacement>,
    /// Placement of the experts, on a CUDA device.
    pub(crate) experts: Option<ExpertPlacement>,
}

/// The engines of one model.
#[derive(Default)]
pub(crate) struct Engines {
    known: Mutex<Known>,
}

#[derive(Default)]
struct Known {
    engines: Vec<(EngineKey, WeakEngine, Option<Monitor>, Places)>,
    packed: Weak<CpuWeights>,
}

/// Placements of the per-layer embedding table and of experts.
type Places = (Option<TablePlacement>, Option<ExpertPlacement>);

/// The properties that sessions of one engine share.
#[derive(Clone, Debug, PartialEq, Eq)]
struct EngineKey {
    device: Device,
    kv_dtype: DType,
    ahead: Option<usize>,
    loops: LoopMode,
    verify_every: Option<NonZeroU32>,
    avoids_capture: bool,
    reproducible: bool,
    table: TablePlacement,
    /// Address of the weights of the draft model, which the engine keeps alive.
    draft: Option<usize>,
    experts: ExpertPlacement,
}

impl fmt::Debug for Engines {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engines").finish_non_exhaustive()
    }
}

impl Engines {
    /// Opens a sequence on a matching engine, whose cache grows if necessary, or on a new one.
    ///
    /// A caller that arrives while an engine is being made waits for it instead of making another one.
    pub(crate) fn open(
        &self,
        weights: &Arc<Model>,
        name: &str,
        options: &SessionOptions,
    ) -> Result<(MonitoredEngine, Sequence), Error> {
        let context = check(weights, name, options)?;
        let adapter = options.adapter.as_ref().map(|name| AdapterId::find(weights, name)).transpose()?;
        let device = match options.device.cuda_options() {
            // The default number of threads and the same number given explicitly are the same key.
            Err(threads) => Device::Cpu { threads: Some(threads) },
            Ok(_) => options.device.clone(),
        };
        let SessionOptions { kv_dtype, ahead, loops, verify_every, .. } = *options;
        // The CPU always is.
        let reproducible = options.reproducible && !matches!(device, Device::Cpu { .. });
        let avoids_capture = options.graph_choice.as_ref().is_some_and(MethodChoice::avoids_capture);
        let (table, experts) = (options.table, options.experts);
        let draft = options.speculation.draft().map(|draft| Arc::as_ptr(&draft.weights).addr());
        let key = EngineKey {
            device,
            kv_dtype,
            ahead,
            loops,
            verify_every,
            avoids_capture,
            reproducible,
            table,
            draft,
            experts,
        };
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        known.engines.retain(|(_, engine, ..)| engine.upgrade().is_some());
        for (_, engine, monitor, (table, experts)) in known.engines.iter().filter(|(other, ..)| *other == key)
        {
            let Some(engine) = engine.upgrade() else { continue };
            match engine.open_with(context, adapter) {
                Ok(sequence) => {
                    let (monitor, table, experts) = (monitor.clone(), *table, *experts);
                    return Ok((MonitoredEngine { engine, monitor, table, experts }, sequence));
                }
                // Its cache cannot grow, or it has stopped: only its existing sessions keep it.
                Err(EngineError::CannotGrow { .. } | EngineError::Stopped(_)) => {}
                Err(error) => return Err(error.into()),
            }
        }
        let made = make_engine(weights, name, &EngineCapacity::of_one(context), options, &mut known.packed)?;
        let sequence = made.engine.open_with(context, adapter)?;
        known.engines.push((key, made.engine.downgrade(), made.monitor.clone(), (made.table, made.experts)));
        Ok((made, sequence))
    }
}

/// The capacity of an engine.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EngineCapacity {
    /// Positions of one sequence.
    pub(crate) context: usize,
    /// Positions of all sequences together.
    pub(crate) n_positions: usize,
    /// Maximum number of sequences in one step.
    pub(crate) max_seqs: usize,
    /// Sequences with recurrent states, in a model that has them.
    pub(crate) n_recurrent: usize,
    /// Maximum number of running and waiting requests.
    pub(crate) max_requests: usize,
}

impl EngineCapacity {
    /// Capacity for one sequence; the cache grows with further ones.
    pub(crate) fn of_one(context: usize) -> EngineCapacity {
        let (runner, engine) = (RunnerOptions::default(), EngineOptions::default());
        let (max_seqs, max_requests) = (runner.max_seqs, engine.max_requests);
        EngineCapacity { context, n_positions: context, max_seqs, n_recurrent: 1, max_requests }
    }
}

/// Makes an engine that is not shared.
pub(crate) fn lone_engine(
    weights: &Arc<Model>,
    name: &str,
    options: &SessionOptions,
    room: impl FnOnce(usize) -> EngineCapacity,
) -> Result<(MonitoredEngine, EngineCapacity), Error> {
    let room = room(check(weights, name, options)?);
    Ok((make_engine(weights, name, &room, options, &mut Weak::new())?, room))
}

/// Bytes of the weights, the KV cache and the recurrent states of an engine that [`lone_engine`] makes, and of its draft
/// model.
pub(crate) fn needed_bytes(
    weights: &Model,
    name: &str,
    options: &SessionOptions,
    room: impl FnOnce(usize) -> EngineCapacity,
) -> Result<u64, Error> {
    let room = room(check(weights, name, options)?);
    let of = |model: &Model, room: &EngineCapacity| {
        cache_bytes(model, options, room).saturating_add(model.weight_bytes() as u64)
    };
    let draft = options.speculation.draft();
    let of_draft = draft.map_or(0, |draft| of(&draft.weights, &draft_capacity(&draft.weights, &room)));
    Ok(of(weights, &room).saturating_add(of_draft))
}

fn cache_bytes(weights: &Model, options: &SessionOptions, room: &EngineCapacity) -> u64 {
    let EngineCapacity { context, n_positions, n_recurrent, .. } = *room;
    let kv_block = RunnerOptions::default().kv_block;
    let max_blocks = context.div_ceil(kv_block);
    let n_blocks = n_positions.div_ceil(kv_block).max(max_blocks);
    // A pair of slots per sequence, and one for an opened sequence.
    let n_slots = if weights.has_slots() { n_recurrent.saturating_mul(2) + 1 } else { 0 };
    let kv = KvSpec { n_blocks, kv_block, max_blocks, n_slots, dtype: options.kv_dtype };
    let of_state = |state: &State| state.ty.dtype.bytes_for(state.ty.shape.n_elements());
    weights.states(&kv).iter().filter_map(of_state).map(|bytes| bytes as u64).sum()
}

/// A draft model serves the same sequences, as far as its own context reaches.
fn draft_capacity(draft: &Model, room: &EngineCapacity) -> EngineCapacity {
    EngineCapacity { context: room.context.min(draft.config().n_context), ..*room }
}

/// Checks the options and returns the context.
fn check(weights: &Model, name: &str, options: &SessionOptions) -> Result<usize, Error> {
    if weights.config().arch.is_encoder() {
        return Err(Error::Encoder { model: name.into() });
    }
    options.speculation.check(weights, name, options.verify_every)?;
    let most = weights.config().n_context;
    let context = options.context.unwrap_or(most.min(USUAL_CONTEXT));
    if context == 0 || context > most {
        return Err(Error::Context { got: context, most, model: name.into() });
    }
    if !options.kv_dtype.is_float() && options.kv_dtype != DType::U8 {
        return Err(Error::KvDtype { got: options.kv_dtype });
    }
    Ok(context)
}

/// A model on a device.
struct LoadedRunner {
    runner: Box<dyn Runner>,
    monitor: Option<Monitor>,
    table: Option<TablePlacement>,
    experts: Option<ExpertPlacement>,
}

fn make_engine(
    weights: &Arc<Model>,
    name: &str,
    room: &EngineCapacity,
    options: &SessionOptions,
    packed: &mut Weak<CpuWeights>,
) -> Result<MonitoredEngine, Error> {
    let engine_options = EngineOptions { max_requests: room.max_requests };
    let LoadedRunner { runner, monitor, table, experts } = load_runner(weights, name, room, options, packed)?;
    let draft = match options.speculation.draft() {
        Some(draft) => {
            let room = draft_capacity(&draft.weights, room);
            let loaded = load_runner(&draft.weights, &draft.name, &room, options, &mut Weak::new())?;
            Some(loaded.runner)
        }
        None => None,
    };
    let engine = match draft {
        Some(draft) => Engine::with_draft(runner, draft, engine_options)?,
        None => Engine::new(runner, engine_options)?,
    };
    Ok(MonitoredEngine { engine, monitor, table, experts })
}

fn load_runner(
    weights: &Arc<Model>,
    name: &str,
    room: &EngineCapacity,
    options: &SessionOptions,
    packed: &mut Weak<CpuWeights>,
) -> Result<LoadedRunner, Error> {
    let EngineCapacity { context, n_positions, max_seqs, n_recurrent, .. } = *room;
    let kv_dtype = options.kv_dtype;
    let runner =
        RunnerOptions { context, n_positions, kv_dtype, max_seqs, n_recurrent, ..RunnerOptions::default() };
    let (kind, cuda) = match options.device.cuda_options() {
        Ok(cuda) => cuda,
        Err(threads) => {
            if options.loops == LoopMode::Device {
                return Err(Error::LoopOnCpu);
            }
            let backend = CpuBackend::shared(threads)?;
            let weights = match options.table {
                TablePlacement::Host => &Arc::new(weights.with_table_on_host()),
                TablePlacement::Auto | TablePlacement::Device | TablePlacement::Pinned => weights,
            };
            let runner = match packed.upgrade() {
                Some(packed) => BackendRunner::with_weights(backend, weights.clone(), packed, runner)?,
                None => BackendRunner::new(backend, weights.clone(), runner)?,
            };
            *packed = Arc::downgrade(runner.weights());
            return Ok(LoadedRunner { runner: Box::new(runner), monitor: None, table: None, experts: None });
        }
    };
    let mut cuda = with_session(cuda, name, options);
    // A prompt is evaluated in chunks of at most the largest graph's size.
    let runner = RunnerOptions { max_tokens: cuda.buckets.iter().copied().max().unwrap_or(1), ..runner };
    let needs = table_needs(weights, &runner);
    // The table's lookup may be one host step; the steps after it must still be replayed.
    cuda.graphs.allow_host_steps =
        needs.is_some() && matches!(options.table, TablePlacement::Auto | TablePlacement::Host);
    let backend = CudaBackend::open(kind, cuda)?;
    let table = match (needs, options.table) {
        (None, _) => None,
        (Some(needs), TablePlacement::Auto) => {
            let (free, _) = backend.memory_info()?;
            Some(needs.choose(free, host_free_bytes(), backend.device().info().unified))
        }
        (Some(_), place) => Some(place),
    };
    let unified = backend.device().info().unified;
    let expert_needs = ExpertNeeds::of(weights);
    let experts = expert_needs.map(|_| if unified { ExpertPlacement::Device } else { options.experts });
    let mut model = Arc::clone(weights);
    let mut pinned = Vec::new();
    match table {
        Some(TablePlacement::Pinned) => pinned.extend(weights.token_table()),
        Some(TablePlacement::Host) => model = Arc::new(weights.with_table_on_host()),
        Some(TablePlacement::Auto | TablePlacement::Device) | None => {}
    }
    if let (Some(needs), Some(ExpertPlacement::Host)) = (expert_needs, experts) {
        // Pinning more than the host has free makes the system swap or kill.
        if let Some(free_bytes) = host_free_bytes().filter(|free| needs.expert_bytes > *free) {
            return Err(Error::ExpertsOnHost { expert_bytes: needs.expert_bytes, free_bytes });
        }
        pinned.extend(weights.expert_matrices());
    }
    if !pinned.is_empty() {
        backend.keep_pinned(pinned.iter().map(|id| weights.weights()[id.idx()].name.clone()).collect())?;
    }
    let monitor = backend.monitor();
    let made = (|| {
        let mut runner = Box::new(BackendRunner::new(backend, model, runner)?);
        // Records and verifies the graph of a decode step here, so that no token waits for it.
        runner.plan(1)?;
        Ok(runner)
    })();
    let runner = made.map_err(|error: EngineError| match (needs, table) {
        (Some(needs), Some(TablePlacement::Device)) => Error::with_table(error, needs.table_bytes),
        _ => match (expert_needs, experts) {
            (Some(needs), Some(ExpertPlacement::Device)) if !unified => {
                Error::with_experts(error, needs.expert_bytes)
            }
            _ => error.into(),
        },
    })?;
    Ok(LoadedRunner { runner, monitor: Some(monitor), table, experts })
}

/// Options of a CUDA device for a model, as a session requests them.
pub(crate) fn with_session(cuda: CudaOptions, name: &str, options: &SessionOptions) -> CudaOptions {
    let ahead = options.ahead.unwrap_or(cuda.ahead);
    let (on_load, verify_every) = (options.on_load.clone(), options.verify_every);
    let mut cuda = CudaOptions {
        model: name.to_owned(),
        ahead,
        on_load,
        loops: options.loops,
        verify_every,
        reproducible: options.reproducible,
        ..cuda
    };
    if options.graph_choice.as_ref().is_some_and(MethodChoice::avoids_capture) {
        // Library calls become nodes through a capture, so they are not used either.
        (cuda.graphs.method, cuda.cublaslt) = (Method::Nodes, CublasLt::Never);
    }
    cuda
}

/// The sizes that decide the placement of a model's table.
pub(crate) fn table_needs(weights: &Model, runner: &RunnerOptions) -> Option<TableNeeds> {
    let RunnerOptions { context, n_positions, kv_block, kv_dtype, .. } = *runner;
    let max_blocks = context.div_ceil(kv_block.max(1));
    let n_blocks = n_positions.div_ceil(kv_block.max(1)).max(max_blocks);
    TableNeeds::of(weights, &KvSpec { n_blocks, kv_block, max_blocks, n_slots: 0, dtype: kv_dtype })
}
