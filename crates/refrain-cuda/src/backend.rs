//! The device behind the [`Backend`] trait.

use std::borrow::Cow;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use refrain_driver::{Device, DeviceKind, Worker};
use refrain_graph::{
    Backend, ByteEdit, Collected, CommittedStep, CompileError, Fusion, Graph, GroupQuery, Io, LateRows, Plan,
    PlanOptions, Query, Ran, Reason, Run, RunError, SlotLayout, State, StateEdit, StateId, StatePart,
    StepQueue, Support, Weight, collect_stepwise, finish_stepwise, queue_stepwise, send_stepwise,
    supply_stepwise, take_stepwise,
};
use refrain_kernels::packed_bytes;
use refrain_tensor::{DType, HostTensor};

use crate::device_model::{DeviceModel, ProgramId};
use crate::error::CudaError;
use crate::feed;
use crate::options::{CudaOptions, LoopMode};
use crate::owner::{self, DeviceOwner, DeviceRef, ModelId};
use crate::profile::{SharedTimeline, Timeline};
use crate::pump::Pump;
use crate::queue::{COLLECT, ControlPool, MAX_QUEUED};
use crate::resident::{matrix, packs};
use crate::rules::ChoiceRules;
use crate::status::{KernelUnits, Status};
use crate::{group, lower};

/// Runs graphs of one model on one CUDA device, or on the simulated one.
///
/// The device belongs to one thread, which the backends of all models on it share together with its context
/// and its loaded kernels. Every call is sent to that thread and has a deadline. A backend serves one model:
/// loading weights or allocating states again replaces the previous ones, and plans compiled for those are
/// refused. Dropping the backend frees the model's memory.
pub struct CudaBackend {
    pub(crate) worker: Worker<DeviceOwner>,
    model: ModelId,
    pub(crate) options: CudaOptions,
    ids: AtomicU64,
    /// Ids of the weights and states that calls must pass.
    current: Mutex<Current>,
    /// Programs whose [`CudaCompiled`] was dropped.
    retired: Arc<Mutex<Vec<ProgramId>>>,
    status: Arc<Mutex<Status>>,
    timeline: SharedTimeline,
    /// Outputs of the last step that were fetched along with a requested one.
    fetched: Vec<(ProgramId, usize, Vec<u8>)>,
    pub(crate) pump: Arc<Pump>,
    /// The run that has started and not finished.
    pub(crate) running: Option<u64>,
    /// Whether state edits may still be waiting for steps of that run.
    pub(crate) has_deferred_edits: bool,
    /// Whether the body of a step of that run may be in flight without its choice.
    pub(crate) may_have_body: bool,
    pub(crate) control_pool: ControlPool,
}

#[derive(Clone, Copy, Debug, Default)]
struct Current {
    weights: u64,
    states: u64,
}

/// A model's weights on a [`CudaBackend`].
#[derive(Debug)]
pub struct CudaWeights {
    id: u64,
    /// Layouts on the device, each with its bytes.
    layouts: Vec<(String, usize)>,
}

/// A model's states on a [`CudaBackend`].
#[derive(Debug)]
pub struct CudaStates {
    id: u64,
    layouts: Vec<SlotLayout>,
}

/// A graph compiled for a [`CudaBackend`]. Dropping it frees its recordings.
pub struct CudaCompiled {
    pub(crate) id: ProgramId,
    plan: Arc<Plan>,
    /// Rows whose choices become their next inputs on the device.
    n_fed_rows: usize,
    /// Whether its steps wait for masks.
    has_masks: bool,
    /// Why the device does not repeat the step; `None` if it does, or if nobody requested it.
    not_repeated: Option<Reason>,
    retired: Arc<Mutex<Vec<ProgramId>>>,
}

impl CudaCompiled {
    pub(crate) fn plan(&self) -> &Plan {
        &self.plan
    }
}

impl Drop for CudaCompiled {
    fn drop(&mut self) {
        lock(&self.retired).push(self.id);
    }
}

/// A handle to a backend's [`Status`] that works from any thread, after the backend itself has moved.
#[derive(Clone)]
pub struct Monitor {
    status: Arc<Mutex<Status>>,
    timeline: SharedTimeline,
}

impl Monitor {
    /// The status as of the last plan compiled or step run.
    #[must_use]
    pub fn status(&self) -> Status {
        lock(&self.status).clone()
    }

    /// Start times and durations of profiled launches; empty unless [`CudaOptions::profile`] is on.
    #[must_use]
    pub fn timeline(&self) -> Timeline {
        lock(&self.timeline).clone()
    }
}

impl CudaBackend {
    /// Refuses states that a later allocation has replaced.
    fn check_states(&self, states: &CudaStates) -> Result<(), RunError> {
        if states.id == lock(&self.current).states {
            return Ok(());
        }
        let because = "newer ones have been allocated".to_owned();
        Err(RunError::Mismatch { what: "states", because })
    }

    /// Layout of the slots of a state.
    fn layout_of(&self, states: &CudaStates, state: StateId) -> Result<SlotLayout, RunError> {
        self.check_states(states)?;
        states.layouts.get(state.idx()).copied().ok_or_else(|| {
            let because = format!("there are {}, requested number {}", states.layouts.len(), state.idx());
            RunError::Mismatch { what: "states", because }
        })
    }

    /// Opens a device and finds its kernels, or joins the backends of this process that have it open.
    pub fn open(kind: DeviceKind, options: CudaOptions) -> Result<CudaBackend, CudaError> {
        CudaBackend::attach(DeviceRef::Kind(kind), options)
    }

    /// Uses a device that is already open. A simulated one must have the kernels' twins registered.
    pub fn on(device: &Device, options: CudaOptions) -> Result<CudaBackend, CudaError> {
        CudaBackend::attach(DeviceRef::Device(device), options)
    }

    fn attach(opened: DeviceRef<'_>, options: CudaOptions) -> Result<CudaBackend, CudaError> {
        let mut worker = owner::attach(opened, options.load_limit)?;
        worker.set_call_limit(options.call_limit);
        let (pump, timeline) = (Arc::<Pump>::default(), SharedTimeline::default());
        let (sent, to_pump, to_timeline) = (options.clone(), Arc::clone(&pump), Arc::clone(&timeline));
        let admit = move |owner: &mut DeviceOwner| Ok(owner.admit(sent, to_pump, to_timeline));
        let model = owner::answered("starting", worker.call("starting", options.load_limit, admit))?;
        Ok(CudaBackend {
            worker,
            model,
            options,
            ids: AtomicU64::new(1),
            current: Mutex::default(),
            retired: Arc::default(),
            status: Arc::default(),
            timeline,
            fetched: Vec::new(),
            pump,
            running: None,
            has_deferred_edits: false,
            may_have_body: false,
            control_pool: ControlPool::default(),
        })
    }

    /// Returns a handle to the backend's status that works from any thread.
    #[must_use]
    pub fn monitor(&self) -> Monitor {
        Monitor { status: Arc::clone(&self.status), timeline: Arc::clone(&self.timeline) }
    }

    /// The device.
    #[must_use]
    pub fn device(&self) -> &Device {
        self.worker.device()
    }

    /// Counts the kernel units and those that need no compiler. If none needs one, all are loaded, so that an
    /// error shows what the driver refuses.
    pub fn examine_kernels(&self) -> Result<KernelUnits, CudaError> {
        self.call("examining kernels", self.options.load_limit, |device_model| device_model.examine_kernels())
    }

    /// Names weights of the next load that stay in pinned host memory, where kernels read them over the bus:
    /// tables of which a step needs few rows, or experts that do not fit on the device. Vectors are never pinned.
    pub fn keep_pinned(&self, names: Vec<String>) -> Result<(), CudaError> {
        self.call("naming pinned weights", self.options.load_limit, |device_model| {
            device_model.keep_pinned(names)
        })
    }

    /// Free and total bytes of the device.
    pub fn memory_info(&self) -> Result<(u64, u64), CudaError> {
        self.call("querying free memory", self.options.load_limit, |device_model| device_model.memory_info())
    }

    fn id(&self) -> u64 {
        self.ids.fetch_add(1, Ordering::Relaxed)
    }

    /// Runs `f` on the device thread without waiting for it. Results arrive through the pump.
    pub(crate) fn post(
        &self,
        what: &'static str,
        f: impl FnOnce(&mut DeviceModel) + Send + 'static,
    ) -> Result<(), CudaError> {
        let (status, job, model) = (Arc::clone(&self.status), self.pump.job(), self.model);
        let posted = self.worker.post(what, self.options.step_limit, move |owner| {
            // Dropped last, when all effects of this job are visible.
            let _job = job;
            if let Some(device_model) = owner.device_model(model) {
                f(device_model);
                show(&status, owner, model, true);
            }
        });
        posted.map_err(CudaError::driver(what))
    }

    pub(crate) fn call<R: Send + 'static>(
        &self,
        what: &'static str,
        limit: Duration,
        f: impl FnOnce(&mut DeviceModel) -> Result<R, CudaError> + Send + 'static,
    ) -> Result<R, CudaError> {
        let retired = std::mem::take(&mut *lock(&self.retired));
        let (status, model) = (Arc::clone(&self.status), self.model);
        let answer = self.worker.call(what, limit, move |owner| {
            let Some(device_model) = owner.device_model(model) else { return Ok(Err(DeviceModel::gone())) };
            retired.into_iter().for_each(|id| device_model.drop_program(id));
            let result = f(device_model);
            show(&status, owner, model, [STEP, READ, COLLECT].contains(&what));
            Ok(result.map_err(|error| owner.explain(error, model)))
        });
        owner::answered(what, answer)
    }

    /// Refuses arguments of another model.
    fn check_io(
        &self,
        compiled: &CudaCompiled,
        weights: &CudaWeights,
        states: &CudaStates,
        control: &[u8],
    ) -> Result<(), RunError> {
        let mismatch = |what, because: &str| Err(RunError::Mismatch { what, because: because.to_owned() });
        let current = *lock(&self.current);
        if weights.id != current.weights {
            return mismatch("weights", "newer ones have been loaded");
        }
        if states.id != current.states {
            return mismatch("states", "newer ones have been allocated");
        }
        let need = compiled.plan.control().bytes();
        if control.len() != need {
            return mismatch("inputs", &format!("{need} bytes are needed, got {}", control.len()));
        }
        Ok(())
    }

    pub(crate) fn run_error(&self, label: &str) -> impl FnOnce(CudaError) -> RunError {
        let (backend, label) = (self.name(), label.to_owned());
        move |error| {
            if error.is_final() {
                let (code, label) = (error.code().unwrap_or(0), error.sent_last().unwrap_or(label));
                return RunError::ContextLost { backend, label, code, source: Box::new(error) };
            }
            match error {
                CudaError::OutOfRange { label, what, got, limit } => {
                    RunError::OutOfRange { label, what, got, limit }
                }
                CudaError::Host { label, because } => {
                    RunError::Host { label, source: refrain_graph::HostCallError(because) }
                }
                CudaError::Mismatch { what, because } => RunError::Mismatch { what, because },
                error @ (CudaError::Required { .. }
                | CudaError::Driver { .. }
                | CudaError::DoesNotFit(_)
                | CudaError::ArenaTooLarge { .. }
                | CudaError::NoKernel { .. }
                | CudaError::Kernels(_)
                | CudaError::TooFewCases { .. }) => {
                    RunError::Backend { backend, label, source: Box::new(error) }
                }
            }
        }
    }
}

/// Updates the status. A step seldom changes the set of graphs, so it refreshes only counters unless graphs
/// changed.
fn show(status: &Mutex<Status>, owner: &mut DeviceOwner, model: ModelId, is_step: bool) {
    let mut shown = lock(status);
    if !owner.is_held(model, &shown.others) {
        shown.others = owner.others(model);
    }
    let Some(device_model) = owner.device_model(model) else { return };
    let now = device_model.stats();
    let same = [now.recorded, now.demoted] == [shown.cache.recorded, shown.cache.demoted];
    if same && is_step {
        (shown.cache, shown.compared, shown.queued) = (now, device_model.compared, device_model.queued.stats);
        if !device_model.profile().is_empty() {
            shown.profile = device_model.profile().to_vec();
        }
    } else {
        *shown = Status { others: std::mem::take(&mut shown.others), ..device_model.status() };
    }
}

const STEP: &str = "a step";
const READ: &str = "reading results";
const EDIT: &str = "editing states";

impl Backend for CudaBackend {
    type Weights = CudaWeights;
    type States = CudaStates;
    type Compiled = CudaCompiled;

    fn name(&self) -> &'static str {
        self.worker.device().backend()
    }

    fn buckets(&self) -> &[usize] {
        &self.options.buckets
    }

    fn row_buckets(&self) -> &[usize] {
        &self.options.row_buckets
    }

    fn supports(&self, query: &Query<'_>) -> Support {
        lower::supports(query)
    }

    fn adds(&self) -> bool {
        true
    }

    fn fuses(&self, query: &GroupQuery<'_>) -> Fusion {
        group::fuses(
            query,
            ChoiceRules { card: self.worker.device().info(), reproducible: self.options.reproducible },
        )
    }

    fn load(&self, weights: &[Weight], tensors: Vec<HostTensor>) -> Result<CudaWeights, RunError> {
        let mismatch = |because| RunError::Mismatch { what: "weights", because };
        if weights.len() != tensors.len() {
            return Err(mismatch(format!("{} are declared, got {}", weights.len(), tensors.len())));
        }
        for (weight, tensor) in weights.iter().zip(&tensors) {
            if weight.ty.dtype != tensor.dtype() || weight.ty.shape != tensor.shape() {
                let given = format!("{}{}", tensor.dtype(), tensor.shape());
                return Err(mismatch(format!("{} is {given}, must be {}", weight.name, weight.ty)));
            }
        }
        let layouts = layouts(weights);
        let (id, weights) = (self.id(), weights.to_vec());
        let loaded = self.call("loading weights", self.options.load_limit, move |m| m.load(weights, tensors));
        loaded.map_err(self.run_error("loading weights"))?;
        lock(&self.current).weights = id;
        Ok(CudaWeights { id, layouts })
    }

    fn allocate(&self, states: &[State]) -> Result<CudaStates, RunError> {
        let layouts = states.iter().map(SlotLayout::of).collect();
        let (id, states) = (self.id(), states.to_vec());
        let made = self.call("allocating states", self.options.load_limit, move |m| m.allocate(states));
        made.map_err(self.run_error("allocating states"))?;
        lock(&self.current).states = id;
        Ok(CudaStates { id, layouts })
    }

    fn resize(&self, states: &mut CudaStates, to: &[State]) -> Result<(), RunError> {
        self.check_states(states)?;
        let (layouts, to) = (to.iter().map(SlotLayout::of).collect(), to.to_vec());
        let resized = self.call("resizing states", self.options.load_limit, move |m| m.resize(to));
        resized.map_err(self.run_error("resizing states"))?;
        states.layouts = layouts;
        Ok(())
    }

    fn read_state(
        &self,
        states: &CudaStates,
        part: impl Into<StatePart>,
        into: &mut [u8],
    ) -> Result<(), RunError> {
        let part = part.into();
        let range = self.layout_of(states, part.state)?.range_for(&part, into.len())?;
        let limit = self.options.load_limit;
        let read = self.call("reading a state", limit, move |m| m.read_state(part.state.idx(), range));
        into.copy_from_slice(&read.map_err(self.run_error("reading a state"))?);
        Ok(())
    }

    fn write_state(
        &self,
        states: &mut CudaStates,
        part: impl Into<StatePart>,
        from: &[u8],
    ) -> Result<(), RunError> {
        let part = part.into();
        let range = self.layout_of(states, part.state)?.range_for(&part, from.len())?;
        let (limit, bytes) = (self.options.load_limit, from.to_vec());
        let written =
            self.call("writing a state", limit, move |m| m.write_state(part.state.idx(), range, &bytes));
        written.map_err(self.run_error("writing a state"))
    }

    fn edit_states(&mut self, states: &mut CudaStates, edits: &[StateEdit]) -> Result<(), RunError> {
        let in_bytes = |edit: &StateEdit| {
            Ok((edit.state().idx(), edit.in_bytes(self.layout_of(states, edit.state())?)?))
        };
        let edits: Vec<(usize, ByteEdit)> = edits.iter().map(in_bytes).collect::<Result<_, RunError>>()?;
        let edited = self.call(EDIT, self.options.step_limit, move |m| m.edit_states(edits));
        self.has_deferred_edits |= edited.map_err(self.run_error(EDIT))?;
        Ok(())
    }

    fn compile(&self, graph: &Graph) -> Result<CudaCompiled, CompileError> {
        self.check(graph)?;
        let plan = Arc::new(Plan::fused(graph, PlanOptions::default(), &|query| self.fuses(query))?);
        let (id, sent) = (self.id(), Arc::clone(&plan));
        let (weights, states) = (graph.weights().to_vec(), graph.states().to_vec());
        let placed = Arc::clone(&plan);
        // Weights are uploaded with the first plan, when all sizes are known. Disk speed decides how long
        // that takes, hence the load limit.
        let placed = self.call("uploading weights", self.options.load_limit, move |m| {
            m.check_model(&weights, &states)?;
            m.place(&placed).map(drop)
        });
        let compiled = placed.and_then(|()| {
            self.call("compiling a plan", self.options.compile_limit, move |m| {
                m.compile(id, sent)?;
                let prepared = m.prepare_loop(id);
                if prepared.is_err() {
                    m.drop_program(id);
                }
                prepared
            })
        });
        let backend = self.name();
        let not_repeated = compiled.map_err(|error| match error {
            error @ (CudaError::Required { .. } | CudaError::Driver { .. }) if error.is_final() => {
                let code = error.code().unwrap_or(0);
                CompileError::ContextLost { backend, code, source: Arc::new(error) }
            }
            CudaError::NoKernel { op, label, because } => {
                CompileError::Unsupported { backend, op, label, because }
            }
            CudaError::ArenaTooLarge { need_bytes, limit_bytes } => {
                CompileError::TooLarge { need_bytes: need_bytes as usize, limit_bytes: limit_bytes as usize }
            }
            error @ (CudaError::Required { .. }
            | CudaError::Driver { .. }
            | CudaError::DoesNotFit(_)
            | CudaError::Mismatch { .. }
            | CudaError::Host { .. }
            | CudaError::OutOfRange { .. }
            | CudaError::Kernels(_)
            | CudaError::TooFewCases { .. }) => CompileError::Backend { backend, source: Arc::new(error) },
        })?;
        let feedback = feed::feedback(&plan);
        let n_fed_rows = feedback.map_or(0, |feedback| feedback.n_rows);
        let has_masks = feedback.is_some_and(|feedback| feedback.mask.is_some());
        let not_repeated = not_repeated.filter(|_| self.options.loops == LoopMode::Device);
        Ok(CudaCompiled { id, plan, n_fed_rows, has_masks, not_repeated, retired: Arc::clone(&self.retired) })
    }

    fn plan<'c>(&self, compiled: &'c CudaCompiled) -> &'c Plan {
        &compiled.plan
    }

    fn run(&mut self, compiled: &mut CudaCompiled, io: Io<'_, CudaBackend>) -> Result<Ran, RunError> {
        self.fetched.clear();
        self.check_io(compiled, io.weights, io.states, io.control)?;
        self.finish_ahead(0).map_err(self.run_error("a step launched ahead"))?;
        let (id, control) = (compiled.id, io.control.to_vec());
        let ran = self.call(STEP, self.options.step_limit, move |m| m.run(id, &control));
        let (ran, found) = ran.map_err(self.run_error("a step"))?;
        self.fetched.extend(found.into_iter().map(|(idx, bytes)| (id, idx, bytes)));
        Ok(ran)
    }

    fn read(&mut self, compiled: &CudaCompiled, output: usize, into: &mut [u8]) -> Result<(), RunError> {
        let id = compiled.id;
        let find = |fetched: &[(ProgramId, usize, Vec<u8>)]| {
            fetched.iter().position(|(of, idx, _)| *of == id && *idx == output)
        };
        if find(&self.fetched).is_none() {
            let found = self.call(READ, self.options.step_limit, move |m| m.read(id, output));
            let found = found.map_err(self.run_error("reading results"))?;
            self.fetched.extend(found.into_iter().map(|(idx, bytes)| (id, idx, bytes)));
        }
        let Some(at) = find(&self.fetched) else {
            let because = format!("the plan has no output {output}");
            return Err(RunError::Mismatch { what: "outputs", because });
        };
        let bytes = &self.fetched[at].2;
        if bytes.len() != into.len() {
            let because = format!("output {output} has {} bytes, {} were requested", bytes.len(), into.len());
            return Err(RunError::Mismatch { what: "outputs", because });
        }
        into.copy_from_slice(bytes);
        Ok(())
    }

    fn queue_depth(&self) -> usize {
        if self.options.profile { 1 } else { self.options.ahead.clamp(1, MAX_QUEUED) }
    }

    fn queue(
        &mut self,
        compiled: &mut CudaCompiled,
        io: Io<'_, CudaBackend>,
        outputs: &[usize],
        queue: &mut StepQueue,
    ) -> Result<(), RunError> {
        // A step that feeds itself returns its results through the ring.
        let feeds_itself = compiled.n_fed_rows > 0;
        if feeds_itself && !queue.has_in_flight() {
            return queue_stepwise(self, compiled, io, outputs, queue);
        }
        if feeds_itself || (!queue.is_empty() && !queue.has_in_flight()) {
            let because = "steps that feed themselves cannot share a queue with other steps".to_owned();
            return Err(RunError::Mismatch { what: "queues", because });
        }
        self.fetched.clear();
        self.check_io(compiled, io.weights, io.states, io.control)?;
        self.queue_ahead(compiled, io.control, outputs, queue).map_err(self.run_error("a queued step"))
    }

    fn collect(&mut self, queue: &mut StepQueue) -> Result<Collected, RunError> {
        match queue.has_in_flight() {
            true => self.collect_ahead(queue),
            false => collect_stepwise(queue),
        }
    }

    fn abandon(&mut self, queue: &mut StepQueue) -> Result<usize, RunError> {
        self.abandon_ahead(queue).map_err(self.run_error("a queued step"))
    }

    fn ahead(&self, compiled: &CudaCompiled) -> usize {
        if self.options.loops == LoopMode::Device && compiled.not_repeated.is_none() {
            return usize::MAX;
        }
        let most = match compiled.n_fed_rows {
            _ if self.options.profile => 1,
            0 => 1,
            _ if compiled.has_masks => feed::MAX_AHEAD_WITH_MASKS,
            1 => feed::MAX_AHEAD,
            _ => feed::MAX_AHEAD_OF_ROWS,
        };
        self.options.ahead.clamp(1, most)
    }

    fn take_not_repeated(&mut self, compiled: &CudaCompiled) -> Option<Reason> {
        self.pump.take_not_repeated().or_else(|| compiled.not_repeated.clone())
    }

    fn send(
        &mut self,
        compiled: &mut CudaCompiled,
        weights: &CudaWeights,
        states: &mut CudaStates,
        run: &mut Run,
        n: usize,
    ) -> Result<(), RunError> {
        if compiled.n_fed_rows == 0 {
            return send_stepwise(self, compiled, weights, states, run, n);
        }
        self.fetched.clear();
        self.check_io(compiled, weights, states, run.control())?;
        self.send_ahead(compiled, run, n).map_err(self.run_error("a step launched ahead"))
    }

    fn supply(
        &mut self,
        compiled: &mut CudaCompiled,
        weights: &CudaWeights,
        states: &mut CudaStates,
        run: &mut Run,
        late: LateRows,
    ) -> Result<(), RunError> {
        match compiled.n_fed_rows {
            0 => supply_stepwise(self, compiled, weights, states, run, &late),
            _ => self.supply_ahead(run, late).map_err(self.run_error("a step launched ahead")),
        }
    }

    fn take(&mut self, compiled: &mut CudaCompiled, run: &mut Run) -> Result<CommittedStep, RunError> {
        match compiled.n_fed_rows {
            0 => take_stepwise(run),
            _ => self.take_ahead(run).map_err(self.run_error("a step launched ahead")),
        }
    }

    fn finish(&mut self, compiled: &mut CudaCompiled, run: &mut Run) -> Result<usize, RunError> {
        match compiled.n_fed_rows {
            0 => Ok(finish_stepwise(run)),
            // A later run has started, which ended this one.
            _ if self.running != Some(run.id()) => Ok(0),
            _ => self.finish_ahead(run.n_taken()).map_err(self.run_error("a step launched ahead")),
        }
    }

    fn kernels(&self, compiled: &CudaCompiled) -> Vec<(usize, Cow<'static, str>)> {
        let id = compiled.id;
        let named = self.call(READ, self.options.step_limit, move |m| Ok(m.kernels(id)));
        // If the device has stopped responding, the next step reports it.
        named.unwrap_or_default().into_iter().map(|(step, kernel)| (step, kernel.into())).collect()
    }

    fn layouts(&self, weights: &CudaWeights) -> Vec<(String, usize)> {
        weights.layouts.clone()
    }
}

/// Layouts of weights on the device with their bytes: matrices packed or as in the file, vectors as F32.
fn layouts(weights: &[Weight]) -> Vec<(String, usize)> {
    let mut layouts: Vec<(String, usize)> = Vec::new();
    for weight in weights {
        let is_vector = weight.ty.shape.rank() < 2;
        let dtype = if is_vector { DType::F32 } else { weight.ty.dtype };
        let (name, bytes) = match packs(weight) {
            true => {
                let [n, k] = matrix(&weight.ty.shape);
                (format!("{dtype} in tiles of 8 rows"), packed_bytes(dtype, n, k))
            }
            false if is_vector => {
                ("vectors as F32".to_owned(), dtype.bytes_for(weight.ty.shape.n_elements()))
            }
            false => (format!("{dtype} as in the file"), dtype.bytes_for(weight.ty.shape.n_elements())),
        };
        let bytes = bytes.unwrap_or(0);
        match layouts.iter_mut().find(|(known, _)| *known == name) {
            Some((_, sum)) => *sum += bytes,
            None => layouts.push((name, bytes)),
        }
    }
    layouts
}

impl Drop for CudaBackend {
    fn drop(&mut self) {
        let model = self.model;
        // A device thread that accepts no more work has lost its device, or frees everything as it ends.
        let _ =
            self.worker.post("freeing a model", self.options.load_limit, move |owner| owner.release(model));
    }
}

impl std::fmt::Debug for CudaBackend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "CudaBackend on {:?}", self.worker.device())
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
