//! State of the simulated device, behind one lock.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::thread::ThreadId;

use super::calls::DriverCall;
use super::capture::SimCapture;
use super::faults::FaultScript;
use super::functions::SimFunction;
use super::graphs::{Conditions, FlatGraph, GraphSlot};
use super::kernels::Twin;
use super::memory::SimMemory;
use super::modules::ImageEntry;
use super::ops::WorkFault;
use super::races::{Clock, History};
use super::rng::SimRng;
use super::streams::{SimStream, SimStreamKind};
use super::{SimOptions, SimSchedule};
use crate::api::{
    CaptureMode, Census, Code, CtxHandle, EventHandle, ExecHandle, FunctionHandle, GraphHandle, ModuleHandle,
    NodeHandle, RawResult, StreamHandle,
};

pub(super) struct SimContext {
    pub(super) ordinal: u32,
    /// Retain count of a primary context.
    pub(super) primary: Option<u32>,
    pub(super) legacy: StreamHandle,
}

/// State of an event.
#[derive(Clone)]
pub(super) enum EventState {
    Never,
    /// Recorded on a stream by this queue item.
    Recorded {
        item: u64,
        clock: Clock,
        done_at_ns: Option<u64>,
    },
    /// Recorded on a capturing stream.
    Captured {
        capture: u64,
        frontier: Vec<crate::api::Dependency>,
    },
}

pub(super) struct SimEvent {
    pub(super) ctx: CtxHandle,
    pub(super) timing: bool,
    pub(super) state: EventState,
}

pub(super) struct SimModule {
    pub(super) ctx: CtxHandle,
    pub(super) entries: Vec<ImageEntry>,
    pub(super) functions: Vec<FunctionHandle>,
}

pub(super) struct SimExec {
    pub(super) ctx: CtxHandle,
    pub(super) graph: Arc<FlatGraph>,
    /// Queue item of its latest launch; launches of one executable never overlap.
    pub(super) last: Option<(u64, Clock)>,
    /// The graph it was made from, if that has a loop: it has at most one executable at a time.
    pub(super) of_loop: Option<GraphHandle>,
}

pub(super) struct SimState {
    pub(super) rng: SimRng,
    pub(super) strict: bool,
    pub(super) schedule: SimSchedule,
    pub(super) n_devices: u32,
    pub(super) shared_block_bytes: u32,
    pub(super) unified: bool,
    next_handle: u64,
    /// Code of the sticky fault, which every call returns from then on.
    pub(super) lost: Option<Code>,
    pub(super) contexts: BTreeMap<CtxHandle, SimContext>,
    pub(super) current: HashMap<ThreadId, CtxHandle>,
    pub(super) memory: SimMemory,
    pub(super) streams: BTreeMap<StreamHandle, SimStream>,
    pub(super) free_indices: Vec<usize>,
    pub(super) n_indices: usize,
    pub(super) counts: Clock,
    pub(super) pending: HashMap<u64, StreamHandle>,
    pub(super) next_item: u64,
    pub(super) events: BTreeMap<EventHandle, SimEvent>,
    pub(super) modules: BTreeMap<ModuleHandle, SimModule>,
    pub(super) functions: BTreeMap<FunctionHandle, SimFunction>,
    pub(super) twins: HashMap<String, Arc<Twin>>,
    pub(super) captures: BTreeMap<u64, SimCapture>,
    pub(super) graphs: BTreeMap<GraphHandle, GraphSlot>,
    pub(super) children: BTreeMap<NodeHandle, GraphHandle>,
    pub(super) conditions: Conditions,
    pub(super) execs: BTreeMap<ExecHandle, SimExec>,
    pub(super) host_clock: Clock,
    pub(super) history: History,
    pub(super) reports: Vec<String>,
    pub(super) faults: FaultScript,
    /// Scripted fault for the work that the current call submits.
    pub(super) armed: Option<WorkFault>,
    pub(super) n_calls: Vec<u64>,
    pub(super) upload_bytes: u64,
    pub(super) n_hung: usize,
    pub(super) n_releases: u64,
    pub(super) now_ns: u64,
}

/// Maximum number of reports kept, so that a looping test does not fill memory.
const MAX_REPORTS: usize = 1000;

impl SimState {
    pub(super) fn new(options: SimOptions) -> SimState {
        SimState {
            rng: SimRng::new(options.seed),
            strict: options.strict,
            schedule: options.schedule,
            n_devices: options.n_devices,
            shared_block_bytes: options.shared_block_bytes,
            unified: options.unified,
            // Above the values of the legacy stream, and clearly not a pointer.
            next_handle: 0x100,
            lost: None,
            contexts: BTreeMap::new(),
            current: HashMap::new(),
            memory: SimMemory::new(options.memory_bytes, options.host_bytes),
            streams: BTreeMap::new(),
            free_indices: Vec::new(),
            n_indices: 0,
            counts: Clock::default(),
            pending: HashMap::new(),
            next_item: 1,
            events: BTreeMap::new(),
            modules: BTreeMap::new(),
            functions: BTreeMap::new(),
            twins: HashMap::new(),
            captures: BTreeMap::new(),
            graphs: BTreeMap::new(),
            children: BTreeMap::new(),
            conditions: Conditions::new(),
            execs: BTreeMap::new(),
            host_clock: Clock::default(),
            history: History::default(),
            reports: Vec::new(),
            faults: options.faults,
            armed: None,
            n_calls: vec![0; DriverCall::ALL.len()],
            upload_bytes: 0,
            n_hung: 0,
            n_releases: 0,
            now_ns: 0,
        }
    }

    pub(super) fn handle(&mut self) -> u64 {
        self.next_handle += 0x10;
        self.next_handle
    }

    pub(super) fn report(&mut self, text: String) {
        tracing::debug!(report = %text, "simulated device");
        if self.reports.len() < MAX_REPORTS {
            self.reports.push(text);
        }
    }

    /// Loses the context for good, as a sticky fault does.
    pub(super) fn lose(&mut self, code: Code, why: String) {
        self.report(why);
        self.lost.get_or_insert(code);
    }

    pub(super) fn check_lost(&self) -> RawResult<()> {
        self.lost.map_or(Ok(()), Err)
    }

    /// The context that is current on the calling thread.
    pub(super) fn ctx(&self) -> RawResult<CtxHandle> {
        self.current
            .get(&std::thread::current().id())
            .copied()
            .filter(|ctx| self.contexts.contains_key(ctx))
            .ok_or(Code::INVALID_CONTEXT)
    }

    /// Resolves a stream handle; the legacy handle means the legacy stream of the current context.
    pub(super) fn stream(&self, handle: StreamHandle) -> RawResult<StreamHandle> {
        let ctx = self.ctx()?;
        if handle == StreamHandle::LEGACY || handle.0 == 0 {
            return Ok(self.contexts[&ctx].legacy);
        }
        match self.streams.get(&handle) {
            Some(s) if !s.destroyed && s.kind != SimStreamKind::Legacy => Ok(handle),
            _ => Err(Code::INVALID_HANDLE),
        }
    }

    pub(super) fn create_context(&mut self, ordinal: u32, primary: Option<u32>) -> RawResult<CtxHandle> {
        if ordinal >= self.n_devices {
            return Err(Code::INVALID_DEVICE);
        }
        let ctx = CtxHandle(self.handle());
        let legacy = self.create_stream(ctx, SimStreamKind::Legacy);
        self.contexts.insert(ctx, SimContext { ordinal, primary, legacy });
        self.current.insert(std::thread::current().id(), ctx);
        Ok(ctx)
    }

    /// Drops a context and everything in it.
    pub(super) fn drop_context(&mut self, ctx: CtxHandle) {
        self.contexts.remove(&ctx);
        self.current.retain(|_, c| *c != ctx);
        self.captures.retain(|_, c| c.ctx != ctx);
        let streams: Vec<StreamHandle> =
            self.streams.iter().filter(|(_, s)| s.ctx == ctx).map(|(&h, _)| h).collect();
        for handle in streams {
            self.remove_stream(handle);
        }
        self.events.retain(|_, e| e.ctx != ctx);
        self.modules.retain(|_, m| m.ctx != ctx);
        self.functions.retain(|_, f| f.ctx != ctx);
        self.execs.retain(|_, e| e.ctx != ctx);
        self.memory.drop_context(ctx);
    }

    pub(super) fn census(&self) -> Census {
        let (allocations, bytes) = self.memory.device_census();
        let (host_allocations, host_bytes) = self.memory.host_census();
        Census {
            contexts: self.contexts.len(),
            allocations,
            bytes,
            host_allocations,
            host_bytes,
            streams: self
                .streams
                .values()
                .filter(|s| s.kind != SimStreamKind::Legacy && !s.destroyed)
                .count(),
            events: self.events.len(),
            modules: self.modules.len(),
            graphs: self.graphs.values().filter(|g| g.parent.is_none()).count(),
            execs: self.execs.len(),
        }
    }

    /// Checks a call that the driver considers unsafe during a capture; breaks the captures that forbid it to this
    /// thread.
    pub(super) fn check_unsafe_call(&mut self) -> RawResult<()> {
        let me = std::thread::current().id();
        let mut broken = false;
        for capture in self.captures.values_mut() {
            let forbids = match capture.mode {
                CaptureMode::Global => true,
                CaptureMode::ThreadLocal => capture.owner == me,
                CaptureMode::Relaxed => false,
            };
            if forbids {
                capture.invalidate();
                broken = true;
            }
        }
        if broken { Err(Code::STREAM_CAPTURE_UNSUPPORTED) } else { Ok(()) }
    }
}
