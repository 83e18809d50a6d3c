//! State of one model on the device thread: stream, kernels, memory, programs and graphs.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

use refrain_driver::{Buf, Context, Device, DriverError, Launch, Stream};
use refrain_graph::{
    BufferId, ByteEdit, Feedback, Op, OutOfBounds, Place, Plan, Ran, Reason, Segment, SegmentKind,
};
use refrain_graph::{Capture, State, StateKind, Weight};
use refrain_kernels::{BlasLtShape, Compiling, Digester, KernelUnit, sample_state_bytes};
use refrain_tensor::HostTensor;

use crate::cache::{CacheStats, GraphCache, GraphMode, Site};
use crate::compare::Compared;
use crate::error::CudaError;
use crate::feed;
use crate::follow::Followed;
use crate::host;
use crate::lower::Lowering;
use crate::options::CudaOptions;
use crate::owner::Supplies;
use crate::prefill::{self, Areas, PromptProducts};
use crate::profile::{Profile, ProfileRow, SharedTimeline};
use crate::progress::LoadEvent;
use crate::pump::Pump;
use crate::queue::SentSteps;
use crate::resident::{HostModel, Places, ResidentMemory, RetainedModel, StepMemory, fitting_memory};
use crate::rules::{ChoiceRules, NO_LIBRARY};
use crate::states;
use crate::status::{GraphLine, KernelUnits, Status};
use crate::tasks::{Chooser, Tasks};
use crate::traffic::Moved;
use crate::warm::WarmPlan;

/// Granularity of the sizes reserved for control blocks and scratch, so that a slightly larger plan does not
/// replan all memory.
const GRAIN: u64 = 64 << 10;

/// Scratch reserved for the attention of larger steps.
const SCRATCH_RESERVE: u64 = 4 << 20;
/// Sampling rows for which memory is reserved from the start.
const CHOICES_RESERVE: usize = 8;

/// Id of a program; never reused.
pub(crate) type ProgramId = u64;

/// A compiled plan: launches for recordable segments, with host steps between them.
pub(crate) struct CudaProgram {
    pub(crate) plan: Arc<Plan>,
    /// How the step's choice becomes its next input on the device, if it does.
    pub(crate) feedback: Option<Feedback>,
    /// Kernels of the plan, independent of the memory.
    tasks: Tasks,
    /// Launches over the current memory, or the reason why there are none; in that case no step of the
    /// program runs.
    lowered: Result<Lowered, CudaError>,
}

impl CudaProgram {
    fn parts(&self) -> &[ProgramPart] {
        self.lowered.as_ref().map_or(&[], |lowered| &lowered.parts)
    }

    /// Number of parts, each one recordable segment or one host step.
    pub(crate) fn n_parts(&self) -> usize {
        self.parts().len()
    }

    /// Launches of a part of a program without host steps.
    pub(crate) fn device_part(&self, part: usize) -> Option<(&Segment, &WarmPlan)> {
        let is_device = |part: &ProgramPart| matches!(part, ProgramPart::Device { .. });
        match self.parts().get(part).filter(|_| self.parts().iter().all(is_device))? {
            ProgramPart::Device { segment, warm } => Some((segment, warm)),
            ProgramPart::Host { .. } => None,
        }
    }

    /// Launches of a program that consists of one segment.
    pub(crate) fn only_segment(&self) -> Option<(&Segment, &WarmPlan)> {
        self.device_part(0).filter(|_| self.n_parts() == 1)
    }

    /// Launches over the current memory, or the reason why there are none.
    pub(crate) fn lowered(&self) -> Result<&Lowered, CudaError> {
        self.lowered.as_ref().map_err(Clone::clone)
    }

    /// Outputs that kernels write directly to pinned memory.
    pub(crate) fn results(&self) -> Result<&HashMap<BufferId, Buf>, CudaError> {
        Ok(&self.lowered()?.results)
    }

    /// Refuses a control block with an index that is out of range.
    pub(crate) fn check(&self, control: &[u8]) -> Result<(), CudaError> {
        let out = |OutOfBounds { label, what, got, limit }| CudaError::OutOfRange { label, what, got, limit };
        self.plan.bounds().check(control).map_err(out)
    }

    /// The reason why the first host step cannot be recorded, if there is a host step.
    pub(crate) fn host_step(&self) -> Option<Reason> {
        let steps = self.plan.segments().iter().filter(|s| s.kind != SegmentKind::Recordable);
        let step = &self.plan.steps()[steps.flat_map(|s| s.steps.clone()).next()?];
        match step.op.capture() {
            Capture::Unsafe(because) => Some(Reason::NotCapturable { label: step.label.clone(), because }),
            Capture::Safe => None,
        }
    }
}

/// Bytes of outputs, by position in the plan.
pub(crate) type FetchedOutputs = Vec<(usize, Vec<u8>)>;

/// Launches of a plan over one memory.
pub(crate) struct Lowered {
    parts: Vec<ProgramPart>,
    /// Outputs that kernels write directly to pinned memory.
    results: HashMap<BufferId, Buf>,
    /// Launch that edits rows of a run, for a plan that feeds itself.
    pub(crate) edit: Option<Launch>,
}

pub(crate) enum ProgramPart {
    Device { segment: Segment, warm: WarmPlan },
    Host { step: usize },
}

impl ProgramPart {
    /// Notes on work that could not be fused into one launch.
    fn notes(&self) -> Vec<String> {
        match self {
            ProgramPart::Device { warm, .. } => warm.notes().to_vec(),
            ProgramPart::Host { .. } => Vec::new(),
        }
    }
}

/// Everything that one model owns on the device.
pub(crate) struct DeviceModel {
    // Dropped before the stream and the context: graphs and memory must go first.
    pub(crate) cache: GraphCache<(ProgramId, usize)>,
    pub(crate) programs: HashMap<ProgramId, CudaProgram>,
    /// Bodies of loops that repeat the step of a program.
    pub(crate) bodies: HashMap<ProgramId, WarmPlan>,
    pub(crate) resident: Option<ResidentMemory>,
    /// Weights and states while no step memory is allocated, because the allocation for a larger plan failed.
    kept: Option<RetainedModel>,
    /// Decode steps launched.
    pub(crate) n_decoded: u64,
    pub(crate) compared: Compared,
    /// Whether programs have been lowered again since their graphs were recorded.
    must_record: bool,
    model: HostModel,
    profile: Profile,
    pub(crate) options: CudaOptions,
    /// Shapes for which the library has been warmed up.
    warmed: HashSet<BlasLtShape>,
    pub(crate) digester: Digester,
    pub(crate) supplies: Rc<Supplies>,
    pub(crate) followed: Option<Followed>,
    pub(crate) queued: SentSteps,
    /// Whether the states still hold the zeros they were cleared to.
    pub(crate) states_are_zero: bool,
    pub(crate) pump: Arc<Pump>,
    pub(crate) stream: Stream,
    ctx: Context,
}

impl Drop for DeviceModel {
    fn drop(&mut self) {
        self.pump.stop_loop();
        // The caller's end of the ring must not keep the memory alive.
        self.pump.uninstall();
    }
}

impl DeviceModel {
    pub(crate) fn new(
        ctx: &Context,
        supplies: Rc<Supplies>,
        options: CudaOptions,
        pump: Arc<Pump>,
        timeline: SharedTimeline,
    ) -> Result<DeviceModel, CudaError> {
        let digester = supplies.kernels.digester().map_err(|e| CudaError::Kernels(Arc::new(e)))?;
        let mut stream = ctx.stream().map_err(CudaError::driver("making a stream"))?;
        stream.set_limit(options.step_limit);
        Ok(DeviceModel {
            cache: GraphCache::new(options.graphs),
            programs: HashMap::new(),
            bodies: HashMap::new(),
            resident: None,
            kept: None,
            n_decoded: 0,
            compared: Compared::default(),
            must_record: false,
            model: HostModel::default(),
            profile: Profile::new(timeline),
            options,
            warmed: HashSet::new(),
            digester,
            supplies,
            followed: None,
            queued: SentSteps::default(),
            states_are_zero: false,
            pump,
            stream,
            ctx: ctx.clone(),
        })
    }

    /// Sets a model's weights. They are uploaded with the first plan, when all sizes are known.
    pub(crate) fn load(&mut self, weights: Vec<Weight>, tensors: Vec<HostTensor>) -> Result<(), CudaError> {
        self.release()?;
        (self.model.weights, self.model.tensors) = (weights, tensors);
        Ok(())
    }

    /// Names weights of the next load that stay in pinned memory.
    pub(crate) fn keep_pinned(&mut self, names: Vec<String>) -> Result<(), CudaError> {
        self.release()?;
        self.model.pinned = names;
        Ok(())
    }

    /// Bytes held on the device.
    pub(crate) fn held_bytes(&self) -> u64 {
        let resident = self.resident.as_ref().map(|resident| resident.accounting().total());
        resident.or(self.kept.as_ref().map(RetainedModel::bytes)).unwrap_or(0)
    }

    /// Free and total bytes of the device.
    pub(crate) fn memory_info(&self) -> Result<(u64, u64), CudaError> {
        self.ctx.mem_info().map_err(CudaError::driver("querying free memory"))
    }

    /// Sets the sizes of a model's states, which start as zeros.
    pub(crate) fn allocate(&mut self, states: Vec<State>) -> Result<(), CudaError> {
        self.release()?;
        self.model.states = states;
        Ok(())
    }

    /// Resizes a model's states and keeps their contents. Programs for the old sizes are dropped.
    pub(crate) fn resize(&mut self, states: Vec<State>) -> Result<(), CudaError> {
        let same = states.len() == self.model.states.len()
            && states.iter().zip(&self.model.states).all(|(to, from)| {
                let row_dims =
                    |ty: &refrain_graph::TensorType| ty.shape.dims().get(1..).map(<[usize]>::to_vec);
                (to.kind, to.ty.dtype, row_dims(&to.ty)) == (from.kind, from.ty.dtype, row_dims(&from.ty))
            });
        if !same {
            let because = "only the first dimension may change".to_owned();
            return Err(CudaError::Mismatch { what: "states", because });
        }
        if self.pump.n_pending() > 0 {
            self.drain()?;
        }
        let step_memory = self.resident.as_ref().map(|resident| resident.step_memory);
        self.free_step_memory(true)?;
        let before = std::mem::replace(&mut self.model.states, states);
        let Some(kept) = self.kept.take() else { return Ok(()) };
        let places = kept.places.with_states(&self.model, self.options.scratch_blocks());
        let resized = match places {
            Ok(places) => kept.resize(&self.ctx, &mut self.stream, places, step_memory.unwrap_or_default()),
            Err(error) => Err((error, Some(kept))),
        };
        match resized {
            Ok(kept) => {
                self.kept = Some(kept);
                self.programs.clear();
                Ok(())
            }
            Err((error, kept)) => {
                // Undo: existing programs continue as before.
                (self.kept, self.model.states) = (kept, before);
                if let (Some(step_memory), Some(kept)) = (step_memory, &self.kept)
                    && let Err(second) = self.plan_memory(kept.places.clone(), [step_memory, step_memory])
                {
                    tracing::warn!("the previous step memory cannot be allocated again: {second}");
                    self.programs.values_mut().for_each(|program| program.lowered = Err(second.clone()));
                }
                Err(error)
            }
        }
    }

    /// Reads part of a state after all launched steps are done.
    pub(crate) fn read_state(&mut self, idx: usize, part: Range<usize>) -> Result<Vec<u8>, CudaError> {
        self.drain_if_ended()?;
        let buf = self.state_part(idx, &part)?;
        let Some(resident) = &self.resident else { return Err(DeviceModel::gone()) };
        let mut bytes = vec![0; part.len()];
        let read = self.stream.download(&resident.lease, buf, &mut bytes);
        read.map_err(CudaError::driver("reading a state"))?;
        Ok(bytes)
    }

    /// Writes part of a state.
    pub(crate) fn write_state(
        &mut self,
        idx: usize,
        part: Range<usize>,
        bytes: &[u8],
    ) -> Result<(), CudaError> {
        self.drain_if_ended()?;
        let buf = self.state_part(idx, &part)?;
        self.states_are_zero = false;
        let Some(resident) = &mut self.resident else { return Err(DeviceModel::gone()) };
        let written = self.stream.upload(&mut resident.lease, buf, bytes);
        written.map_err(CudaError::driver("writing a state"))
    }

    /// Enqueues state edits after the launched steps, or defers them until steps that still have to be
    /// launched; returns whether they were deferred.
    pub(crate) fn edit_states(&mut self, edits: Vec<(usize, ByteEdit)>) -> Result<bool, CudaError> {
        for (idx, edit) in &edits {
            match edit {
                ByteEdit::Copy { from, to } => {
                    self.state_part(*idx, from)?;
                    self.state_part(*idx, to)?;
                }
                ByteEdit::Clear(range) => drop(self.state_part(*idx, range)?),
            }
        }
        match self.defer_state_edits(edits) {
            Some(edits) => self.enqueue_state_edits(&edits).map(|()| false),
            None => Ok(true),
        }
    }

    /// Enqueues state edits without waiting for them.
    pub(crate) fn enqueue_state_edits(&mut self, edits: &[(usize, ByteEdit)]) -> Result<(), CudaError> {
        let failed = |source| CudaError::Driver { step: "editing states".into(), source };
        self.states_are_zero = false;
        let Some(resident) = &mut self.resident else { return Err(DeviceModel::gone()) };
        let part = |idx: usize, range: &Range<usize>| {
            resident.state_live(idx)?.slice(range.start as u64, range.len() as u64)
        };
        let mut placed = Vec::with_capacity(edits.len());
        for (idx, edit) in edits {
            let ends = match edit {
                ByteEdit::Copy { from, to } => {
                    part(*idx, to).and_then(|to| Ok((to, Some(part(*idx, from)?))))
                }
                ByteEdit::Clear(range) => part(*idx, range).map(|to| (to, None)),
            };
            placed.push(ends.map_err(failed)?);
        }
        let enqueued = self.stream.run(&mut resident.lease, false, |q| {
            placed.iter().try_for_each(|(to, from)| match from {
                Some(from) => q.copy(*to, *from),
                None => q.fill(*to, 0),
            })
        });
        enqueued.map(drop).map_err(failed)
    }

    /// Waits for the remaining steps of a run that has ended; refuses while a run is active.
    fn drain_if_ended(&mut self) -> Result<(), CudaError> {
        if self.pump.n_pending() == 0 {
            return Ok(());
        }
        if self.followed.is_some() && !self.pump.is_stopped() {
            let because = "one has steps in flight and must be finished first".to_owned();
            return Err(CudaError::Mismatch { what: "runs", because });
        }
        self.drain().map(drop)
    }

    /// Location of part of a state.
    fn state_part(&self, idx: usize, part: &Range<usize>) -> Result<Buf, CudaError> {
        let mismatch = |because: String| CudaError::Mismatch { what: "states", because };
        let Some(resident) = &self.resident else {
            return Err(mismatch("there are none before a graph is compiled".into()));
        };
        if idx >= self.model.states.len() {
            return Err(mismatch(format!("there are {}, requested number {idx}", self.model.states.len())));
        }
        let placed = resident.state_live(idx).and_then(|s| s.slice(part.start as u64, part.len() as u64));
        placed.map_err(CudaError::driver("finding a state"))
    }

    /// Refuses a graph whose weights or states differ from the loaded model's.
    pub(crate) fn check_model(&self, weights: &[Weight], states: &[State]) -> Result<(), CudaError> {
        let mismatch = |what, because| Err(CudaError::Mismatch { what, because });
        let [ours, theirs] = [self.model.weights.len(), weights.len()];
        let same = self.model.weights.iter().zip(weights).all(|(a, b)| a.ty == b.ty);
        if ours != theirs || !same {
            return mismatch(
                "weights",
                format!("the graph has {theirs}, {ours} are loaded, or their types differ"),
            );
        }
        let [ours, theirs] = [self.model.states.len(), states.len()];
        let same = self.model.states.iter().zip(states).all(|(a, b)| a.ty == b.ty);
        if ours != theirs || !same {
            return mismatch(
                "states",
                format!("the graph has {theirs}, {ours} are allocated, or their types differ"),
            );
        }
        Ok(())
    }

    pub(crate) fn drop_program(&mut self, id: ProgramId) {
        if let Some(program) = self.programs.remove(&id) {
            (0..program.parts().len()).for_each(|part| self.cache.forget(&(id, part)));
            self.forget_loop(id);
        }
    }

    /// Ensures that weights, states and step memory for a plan are on the device. Uploading weights may take
    /// long.
    pub(crate) fn place(&mut self, plan: &Plan) -> Result<Tasks, CudaError> {
        // Verification writes to the ring, so nothing may be in flight.
        self.drain_if_ended()?;
        let tasks = self.choose(plan);
        self.ensure(plan, &tasks)?;
        Ok(tasks)
    }

    /// Lowers a plan, then records and verifies its graphs, so that no step has to.
    pub(crate) fn compile(&mut self, id: ProgramId, plan: Arc<Plan>) -> Result<(), CudaError> {
        let tasks = self.place(&plan)?;
        if std::mem::take(&mut self.must_record) {
            // Graphs over the old memory are gone. Record them again, so that no later step pays for it.
            let ids: Vec<ProgramId> = self.programs.keys().copied().collect();
            ids.into_iter().try_for_each(|id| self.prepare(id))?;
        }
        let feedback = feed::feedback(&plan);
        let Some(resident) = &self.resident else { unreachable!("placed above") };
        let lowered = self.lower(resident, &plan, feedback.as_ref(), &tasks)?;
        self.warm_up(&lowered.parts)?;
        let program = CudaProgram { plan, feedback, tasks, lowered: Ok(lowered) };
        if let Some(reason) = program.host_step().filter(|_| self.refuses_host_steps()) {
            let step = format!("step of {}", tokens(&program.plan));
            return Err(CudaError::Required { step, reason });
        }
        self.programs.insert(id, program);
        if let Err(error) = self.prepare(id) {
            self.drop_program(id);
            return Err(error);
        }
        Ok(())
    }

    fn refuses_host_steps(&self) -> bool {
        self.options.graphs.mode == GraphMode::Require && !self.options.graphs.allow_host_steps
    }

    /// Chooses the kernels of a plan's groups.
    fn choose(&self, plan: &Plan) -> Tasks {
        let device = self.ctx.device();
        let chooser = Chooser {
            kernels: &self.supplies.kernels,
            blas: self.supplies.products.blas.as_deref(),
            weights: &self.model.weights,
            rules: self.rules(&device),
        };
        chooser.choose(plan)
    }

    fn rules<'d>(&self, device: &'d Device) -> ChoiceRules<'d> {
        ChoiceRules { card: device.info(), reproducible: self.options.reproducible }
    }

    /// Lowers a plan and loads all its kernels, so that no step ever waits for a compilation.
    fn lower(
        &self,
        resident: &ResidentMemory,
        plan: &Plan,
        feedback: Option<&Feedback>,
        tasks: &Tasks,
    ) -> Result<Lowered, CudaError> {
        self.with_kernels(|| self.describe(resident, plan, feedback, tasks))
    }

    /// Runs `describe`, which describes launches, with all kernels it requests loaded.
    pub(crate) fn with_kernels<T>(
        &self,
        describe: impl FnMut() -> Result<T, CudaError>,
    ) -> Result<T, CudaError> {
        let mut on_compiling = |Compiling { n_done, n_total }| {
            self.options.on_load.report(LoadEvent::Compiling { n_done, n_total });
        };
        self.supplies
            .kernels
            .prepared(&mut on_compiling, describe)
            .map_err(|e| CudaError::Kernels(Arc::new(e)))?
    }

    fn describe(
        &self,
        resident: &ResidentMemory,
        plan: &Plan,
        feedback: Option<&Feedback>,
        tasks: &Tasks,
    ) -> Result<Lowered, CudaError> {
        let device = self.ctx.device();
        // A self-feeding step's choice is read on the device and reaches the host through the ring. Steps
        // that train are queued, so the next one would overwrite results at a fixed pinned address.
        let results = match feedback {
            Some(_) => HashMap::new(),
            None if learns(plan, resident) => HashMap::new(),
            None => resident.results(plan).map_err(CudaError::driver("placing results"))?,
        };
        let lowering = Lowering {
            kernels: &self.supplies.kernels,
            plan,
            resident,
            results: &results,
            rules: self.rules(&device),
            overlaps: !self.options.profile,
            blas: self.supplies.products.blas.as_ref(),
            areas: tasks.areas.place(resident.scratch).map_err(CudaError::driver("placing workspaces"))?,
        };
        let is_recordable = |s: &&Segment| s.kind == SegmentKind::Recordable;
        let one = plan.segments().iter().filter(is_recordable).count() <= 1;
        let mut parts = Vec::with_capacity(plan.segments().len());
        for (idx, segment) in plan.segments().iter().enumerate() {
            if segment.kind != SegmentKind::Recordable {
                segment.steps.clone().for_each(|step| parts.push(ProgramPart::Host { step }));
                continue;
            }
            let is_last = idx + 1 == plan.segments().len();
            let name = match (one, feedback) {
                (true, _) => format!("step of {}", tokens(plan)),
                (false, None) => format!("step of {}, segment {idx}", tokens(plan)),
                (false, Some(_)) if is_last => format!("step of {}, its choice", tokens(plan)),
                (false, Some(_)) => format!("step of {}, its body", tokens(plan)),
            };
            let mut warm = WarmPlan::new(&name, &resident.space);
            lowering.push(&tasks.segments[idx], &mut warm)?;
            if let Some(feedback) = feedback.filter(|_| is_last) {
                feed::push_commit(&self.supplies.kernels, plan, resident, feedback, None, &mut warm)?;
            }
            if !warm.work().is_empty() {
                parts.push(ProgramPart::Device { segment: segment.clone(), warm });
            }
        }
        let edit = feedback.map(|_| feed::edit_launch(&self.supplies.kernels, resident)).transpose()?;
        Ok(Lowered { parts, results, edit })
    }

    fn warm_up(&mut self, parts: &[ProgramPart]) -> Result<(), CudaError> {
        let Some(resident) = self.resident.as_mut().filter(|_| self.supplies.products.blas.is_some()) else {
            return Ok(());
        };
        parts.iter().try_for_each(|part| match part {
            ProgramPart::Device { warm, .. } => {
                prefill::warm_up(warm, &mut self.stream, &mut resident.lease, &mut self.warmed)
            }
            ProgramPart::Host { .. } => Ok(()),
        })
    }

    fn prepare(&mut self, id: ProgramId) -> Result<(), CudaError> {
        if self.options.profile {
            return Ok(());
        }
        let (Some(program), Some(resident)) = (self.programs.get(&id), &mut self.resident) else {
            return Ok(());
        };
        // No step is in flight, so the arena holds nothing but outputs that may still be read.
        let live = live_outputs(self.programs.values().filter(|program| program.lowered.is_ok()), resident)
            .map_err(CudaError::driver("finding results"))?;
        for (idx, part) in program.parts().iter().enumerate() {
            let ProgramPart::Device { segment, warm } = part else { continue };
            let feedback = program.feedback.as_ref();
            let check = || {
                let check = states::check(&program.plan, segment, feedback, resident, &self.digester, None)?;
                let check = check.transient(resident.arena(), live.clone());
                Ok(if self.states_are_zero { check.zeroed(resident.states()) } else { check })
            };
            // Built before the lease is borrowed; skipped when graphs are off.
            let check = if self.options.graphs.mode == GraphMode::Off { None } else { Some(check()?) };
            let mut site = Site { stream: &mut self.stream, lease: &mut resident.lease };
            let Some(check) = check else { continue };
            // A failure here is reported by the steps, which then run eagerly.
            self.cache.prepare(&(id, idx), &mut site, warm, || Ok(check))?;
        }
        Ok(())
    }

    /// Ensures that there is memory for a plan. If there is too little, step memory is reallocated while
    /// weights and states stay in place. A plan that cannot fit is refused before anything is released.
    fn ensure(&mut self, plan: &Plan, tasks: &Tasks) -> Result<(), CudaError> {
        let needed = StepMemory {
            arena: plan.arena_bytes() as u64,
            scratch: tasks.areas.bytes().next_multiple_of(GRAIN),
            control: (plan.control().bytes() as u64).next_multiple_of(GRAIN).max(GRAIN),
            choices: tasks.choice_bytes,
        };
        if let Some(limit) = self.options.arena_limit_bytes.filter(|limit| needed.arena > *limit) {
            return Err(CudaError::ArenaTooLarge { need_bytes: needed.arena, limit_bytes: limit });
        }
        let missing = |places: &Places| device_weights(plan).any(|w| places.is_host_only(w));
        if let Some(resident) = &self.resident
            && resident.step_memory.holds(&needed)
            && !missing(resident.places())
        {
            return Ok(());
        }
        let before = self.resident.as_ref().map(|r| r.step_memory);
        let kept = before.map_or(needed, |step_memory| step_memory.max(&needed));
        let candidates = [kept, self.wanted(needed, plan).max(&kept)];
        let placed =
            self.resident.as_ref().map(ResidentMemory::places).or(self.kept.as_ref().map(|k| &k.places));
        // A weight that stayed on the host is read on the device by this plan: place all weights again.
        let (places, keeps_weights) = match placed {
            Some(places) if !missing(places) => (places.clone(), true),
            Some(_) => (Places::new(&self.model, &[], self.options.scratch_blocks())?, false),
            None => (Places::new(&self.model, &host_only(plan), self.options.scratch_blocks())?, false),
        };
        if let Some(resident) = &self.resident {
            let (free, total) = self.ctx.mem_info().map_err(CudaError::driver("querying free memory"))?;
            let taken_over = places.kept_bytes(keeps_weights);
            let released = if keeps_weights { 0 } else { resident.places().kept_bytes(true) - taken_over };
            let free = free.saturating_add(resident.transient_bytes()).saturating_add(released);
            fitting_memory(&self.ctx, &places, candidates, (taken_over, free, total))?;
            tracing::warn!(
                "a step needs {needed}, where {} are allocated: memory is allocated and graphs are recorded again",
                resident.step_memory
            );
        }
        self.free_step_memory(keeps_weights)?;
        let planned = self.plan_memory(places.clone(), candidates);
        if planned.is_err()
            && let Some(step_memory) = before
        {
            // The driver had less than it reported: existing programs continue as before.
            if let Err(error) = self.plan_memory(places, [step_memory, step_memory]) {
                tracing::warn!("the previous step memory cannot be allocated again: {error}");
                self.programs.values_mut().for_each(|program| program.lowered = Err(error.clone()));
            }
        }
        planned
    }

    /// Allocates step memory around the retained weights and states, and lowers every program again.
    fn plan_memory(&mut self, places: Places, candidates: [StepMemory; 2]) -> Result<(), CudaError> {
        self.with_kernels(|| {
            let dtypes = self.model.weights.iter().map(|weight| weight.ty.dtype);
            self.supplies.kernels.request_pack(dtypes).map_err(|e| CudaError::Kernels(Arc::new(e)))
        })?;
        let (ctx, stream, model) = (&self.ctx, &mut self.stream, &self.model);
        let loading = (&self.supplies.kernels, &self.options.on_load);
        let kept = self.kept.take();
        let has_states = kept.is_some();
        let mut resident = match ResidentMemory::plan(ctx, stream, model, places, candidates, loading, kept) {
            Ok(resident) => resident,
            Err((error, kept)) => {
                self.kept = kept;
                return Err(error);
            }
        };
        // Everything lowered before points at memory that is gone. A program that can no longer be lowered
        // reports that when it is run; the others continue.
        let mut programs = std::mem::take(&mut self.programs);
        for program in programs.values_mut() {
            let (plan, feedback) = (&program.plan, program.feedback.as_ref());
            program.lowered = self.lower(&resident, plan, feedback, &program.tasks);
        }
        if let Some(ring) = resident.ring_end() {
            self.pump.install(ring);
        }
        self.resident = Some(resident);
        self.programs = programs;
        self.must_record = true;
        self.states_are_zero |= !has_states;
        Ok(())
    }

    /// Step memory for the largest bucket, estimated from a plan of fewer tokens.
    fn wanted(&self, needed: StepMemory, plan: &Plan) -> StepMemory {
        let largest = self.options.buckets.iter().copied().max().unwrap_or(1);
        let times = largest.div_ceil(plan.bounds().n_tokens()).max(1) as u64;
        let reserve =
            self.options.arena_reserve_bytes.min(self.options.arena_limit_bytes.unwrap_or(u64::MAX));
        let arena = needed.arena.saturating_mul(times).min(reserve).max(needed.arena);
        // Of the kernels' scratch, only attention's grows with the tokens, and its number of splits falls.
        let scratch = needed.scratch.saturating_add(reserve.min(SCRATCH_RESERVE));
        // Uploading the weights again would cost more than the workspace of prompts, which a small step does
        // not show.
        let (device, blas) = (self.ctx.device(), self.supplies.products.blas.is_some());
        let prompts = Areas::of_prompts(plan, largest, self.rules(&device), blas).bytes();
        let scratch = scratch.max(prompts.next_multiple_of(GRAIN));
        // A step without sampling may come before those that sample.
        let choices = needed.choices.max(sample_state_bytes(CHOICES_RESERVE));
        StepMemory { arena, scratch, control: needed.control.max(4 * GRAIN), choices }
    }

    /// Frees graphs, programs and memory.
    fn release(&mut self) -> Result<(), CudaError> {
        self.cache.clear();
        self.bodies.clear();
        self.programs.clear();
        self.followed = None;
        self.pump.stop_loop();
        self.pump.uninstall();
        (self.resident, self.kept) = (None, None);
        self.states_are_zero = false;
        // The stream keeps what its work uses alive until it is synchronized.
        self.stream.synchronize().map_err(CudaError::driver("waiting for the last step"))
    }

    /// Frees graphs and step memory. States are kept, and weights too if they are still valid.
    fn free_step_memory(&mut self, weights: bool) -> Result<(), CudaError> {
        self.cache.clear();
        self.bodies.clear();
        // Launches keep the memory they were lowered for alive.
        self.programs.values_mut().for_each(|program| program.lowered = Err(DeviceModel::gone()));
        self.followed = None;
        self.pump.stop_loop();
        self.pump.uninstall();
        self.stream.synchronize().map_err(CudaError::driver("waiting for the last step"))?;
        if let Some(resident) = self.resident.take() {
            self.kept =
                Some(resident.keep(weights).map_err(CudaError::driver("keeping weights and states"))?);
        }
        Ok(())
    }

    /// Error for a program whose memory or weights are gone.
    pub(crate) fn gone() -> CudaError {
        let because = "this one was compiled for other weights".into();
        CudaError::Mismatch { what: "plans", because }
    }

    /// Whether the next step of a program will record a graph.
    pub(crate) fn wants_graph(&self, id: ProgramId) -> bool {
        let parts = self.programs.get(&id).map_or(0, |program| program.parts().len());
        !self.options.profile && (0..parts).any(|part| self.cache.wants_check(&(id, part)))
    }

    /// Runs one step. Small results are returned once it is done, so that a token costs the caller a single
    /// visit to this thread. Other results are read with [`DeviceModel::read`], and a step without results is
    /// not waited for.
    pub(crate) fn run(&mut self, id: ProgramId, control: &[u8]) -> Result<(Ran, FetchedOutputs), CudaError> {
        // A stream that replaced a failed one still has the default limit.
        self.stream.set_limit(self.options.step_limit);
        if let Some(feedback) = self.programs.get(&id).and_then(|program| program.feedback) {
            return self.run_fed(id, control, &feedback);
        }
        let ran = self.send(id, control)?;
        let first = self.programs.get(&id).and_then(|program| {
            let results = &program.lowered.as_ref().ok()?.results;
            program.plan.outputs().iter().position(|output| results.contains_key(&output.buffer))
        });
        Ok((ran, first.map_or_else(|| Ok(Vec::new()), |output| self.read(id, output))?))
    }

    /// Launches one step with its inputs.
    pub(crate) fn send(&mut self, id: ProgramId, control: &[u8]) -> Result<Ran, CudaError> {
        self.send_inputs(id, control)?;
        self.enqueue(id, control)
    }

    /// Checks a step's inputs and uploads them.
    pub(crate) fn send_inputs(&mut self, id: ProgramId, control: &[u8]) -> Result<(), CudaError> {
        let Some(program) = self.programs.get(&id) else { return Err(DeviceModel::gone()) };
        program.lowered()?;
        let Some(resident) = &mut self.resident else { return Err(DeviceModel::gone()) };
        program.check(control)?;
        if !control.is_empty() {
            let staged = resident.send_control(&mut self.stream, None, control);
            staged.map_err(CudaError::driver("uploading the control block"))?;
        }
        Ok(())
    }

    /// Enqueues one step; it counts as replayed if every recordable segment was. Host steps read `control`. A
    /// program without launches for the current memory is an error, not an empty step.
    pub(crate) fn enqueue(&mut self, id: ProgramId, control: &[u8]) -> Result<Ran, CudaError> {
        let n_parts = self.programs.get(&id).map_or(0, CudaProgram::n_parts);
        self.enqueue_parts(id, control, 0..n_parts)
    }

    /// Enqueues some parts of a step, like [`DeviceModel::enqueue`].
    pub(crate) fn enqueue_parts(
        &mut self,
        id: ProgramId,
        control: &[u8],
        range: Range<usize>,
    ) -> Result<Ran, CudaError> {
        self.states_are_zero = false;
        let Some(program) = self.programs.get(&id) else { return Err(DeviceModel::gone()) };
        program.lowered()?;
        let Some(resident) = &mut self.resident else { return Err(DeviceModel::gone()) };
        let parts = &program.lowered()?.parts;
        let moved = match self.options.profile {
            true => {
                let launches = |part: &ProgramPart| match part {
                    ProgramPart::Device { warm, .. } => warm.work().len(),
                    ProgramPart::Host { .. } => 0,
                };
                if range.start == 0 {
                    let n_launches = parts.iter().map(launches).sum();
                    self.profile.begin_step(program.plan.bounds().n_tokens(), n_launches);
                }
                Moved::of(&program.plan, resident, control).map_err(CudaError::driver("counting bytes"))?
            }
            false => Moved::default(),
        };
        let mut not_replayed = None;
        let (mut n_launches, mut n_host_steps) = (0, 0);
        for (idx, part) in parts.iter().enumerate().take(range.end).skip(range.start) {
            let reason = match part {
                ProgramPart::Device { warm, .. } if self.options.profile => {
                    if self.options.graphs.mode == GraphMode::Require {
                        return Err(CudaError::Required {
                            step: warm.name().into(),
                            reason: Reason::Profiling,
                        });
                    }
                    let ran = self.profile.run(&mut self.stream, &mut resident.lease, warm, &moved);
                    ran.map_err(CudaError::driver(warm.name()))?;
                    Some(Reason::Profiling)
                }
                ProgramPart::Device { segment, warm } => {
                    let key = (id, idx);
                    // Verification inputs are needed only when a graph has to be recorded.
                    let check = match self.cache.wants_check(&key) {
                        true => {
                            let feedback = program.feedback.as_ref();
                            let plan = &program.plan;
                            Some(states::check(plan, segment, feedback, resident, &self.digester, None)?)
                        }
                        false => None,
                    };
                    let check = || check.ok_or_else(DeviceModel::gone);
                    let mut site = Site { stream: &mut self.stream, lease: &mut resident.lease };
                    n_launches += 1;
                    match self.cache.step(&key, &mut site, warm, check)? {
                        Ran::Replayed { .. } => None,
                        Ran::Eager(reason) => Some(reason),
                    }
                }
                ProgramPart::Host { step } => {
                    let step = &program.plan.steps()[*step];
                    host::run(step, &program.plan, resident, &self.model, &mut self.stream, control)?;
                    n_host_steps += 1;
                    None
                }
            };
            not_replayed = not_replayed.or(reason);
        }
        Ok(not_replayed.map_or(Ran::Replayed { n_launches, n_host_steps }, Ran::Eager))
    }

    /// Reads an output, and with it every output in pinned memory: a step's few small results cost one wait.
    pub(crate) fn read(&mut self, id: ProgramId, output: usize) -> Result<FetchedOutputs, CudaError> {
        let mismatch = |because: String| CudaError::Mismatch { what: "outputs", because };
        let (Some(program), Some(resident)) = (self.programs.get(&id), &self.resident) else {
            return Err(mismatch("the plan was compiled for other weights".into()));
        };
        let (outputs, results) = (program.plan.outputs(), &program.lowered()?.results);
        if output >= outputs.len() {
            return Err(mismatch(format!("the plan has no output {output}")));
        }
        let mut found = Vec::new();
        for (idx, operand) in outputs.iter().enumerate() {
            let pinned = results.get(&operand.buffer).copied();
            if idx != output && pinned.is_none() {
                continue;
            }
            let place = pinned.map_or_else(|| resident.buffer(&program.plan, operand.buffer), Ok);
            let whole = place.map_err(CudaError::driver("reading results"))?;
            found.push((idx, host::output_bytes(&program.plan, resident, &mut self.stream, operand, whole)?));
        }
        Ok(found)
    }

    /// Everything that a program enqueues, each with the first plan step it belongs to.
    pub(crate) fn kernels(&self, id: ProgramId) -> Vec<(usize, String)> {
        let Some(program) = self.programs.get(&id) else { return Vec::new() };
        let steps = program.plan.steps();
        let mut out = Vec::new();
        for part in program.parts() {
            let ProgramPart::Device { segment, warm } = part else { continue };
            for work in warm.work() {
                let (label, kernel) = work.step_and_kernel();
                // A fused launch carries the labels of all its steps, joined.
                let first = label.split(" + ").next().unwrap_or_default();
                let step = segment.steps.clone().find(|&s| steps[s].label == first);
                out.push((step.unwrap_or(segment.steps.start), kernel));
            }
        }
        out
    }

    /// Counts the kernel units and those that need no compiler. If none needs one, all are loaded.
    pub(crate) fn examine_kernels(&self) -> Result<KernelUnits, CudaError> {
        let units = KernelUnits { n_ready: self.supplies.kernels.n_ready(), n_all: KernelUnit::all().len() };
        if units.n_ready == units.n_all {
            let loaded = self.supplies.kernels.load_all(&mut |_| {});
            loaded.map_err(|e| CudaError::Kernels(Arc::new(e)))?;
        }
        Ok(units)
    }

    pub(crate) fn profile(&self) -> &[ProfileRow] {
        self.profile.rows()
    }

    pub(crate) fn stats(&self) -> CacheStats {
        self.cache.stats()
    }

    pub(crate) fn status(&self) -> Status {
        let mut graphs = Vec::new();
        for (id, program) in &self.programs {
            for idx in 0..program.parts().len() {
                if let Some(graph) = self.cache.graph(&(*id, idx)) {
                    let n_tokens = program.plan.bounds().n_tokens();
                    graphs.push(GraphLine::new(graph, n_tokens, program.feedback.is_some()));
                }
            }
        }
        graphs.sort_by_key(|g| g.n_tokens);
        let parts = self.programs.values().flat_map(CudaProgram::parts);
        let mut unfused: Vec<String> = parts.flat_map(ProgramPart::notes).collect();
        unfused.sort_unstable();
        unfused.dedup();
        let memory = self.resident.as_ref().map(ResidentMemory::accounting).unwrap_or_default();
        let profile = self.profile.rows().to_vec();
        Status {
            memory,
            others: Vec::new(),
            upload: self.resident.as_ref().map(ResidentMemory::uploaded).unwrap_or_default(),
            graphs,
            cache: self.cache.stats(),
            compared: self.compared,
            queued: self.queued.stats,
            kernels: Some(self.supplies.kernels.origin()),
            prompt_products: Some(match self.options.reproducible {
                true => PromptProducts::Own { because: NO_LIBRARY.to_owned() },
                false => self.supplies.products.choice.clone(),
            }),
            reproducible: self.options.reproducible,
            unfused,
            profile,
            peak_bytes_per_second: self.ctx.device().info().peak_bytes_per_second(),
        }
    }
}

/// `1 token`, `8 tokens`
fn tokens(plan: &Plan) -> String {
    match plan.bounds().n_tokens() {
        1 => "1 token".to_owned(),
        n => format!("{n} tokens"),
    }
}

/// Whether a plan writes states other than caches, as training steps do.
fn learns(plan: &Plan, resident: &ResidentMemory) -> bool {
    let mut written = plan.steps().iter().flat_map(|step| &step.outputs);
    written.any(|operand| match plan.buffer(operand.buffer).place {
        Place::State(id) => resident.state(id.idx()).kind == StateKind::Whole,
        Place::Arena { .. } | Place::Control { .. } | Place::Weight(_) => false,
    })
}

/// Outputs in the arena.
fn live_outputs<'a>(
    programs: impl Iterator<Item = &'a CudaProgram>,
    resident: &ResidentMemory,
) -> Result<Vec<Buf>, DriverError> {
    let mut live = Vec::new();
    for program in programs {
        let in_arena = |id: BufferId| matches!(program.plan.buffer(id).place, Place::Arena { .. });
        for output in program.plan.outputs().iter().filter(|o| in_arena(o.buffer)) {
            live.push(resident.buffer(&program.plan, output.buffer)?);
        }
    }
    Ok(live)
}

/// Weights that device steps of a plan read.
fn device_weights(plan: &Plan) -> impl Iterator<Item = usize> + '_ {
    let steps = plan.steps().iter().filter(|step| !matches!(step.op, Op::HostCall(_)));
    steps.flat_map(|step| &step.inputs).filter_map(|operand| match plan.buffer(operand.buffer).place {
        Place::Weight(id) => Some(id.idx()),
        Place::Arena { .. } | Place::Control { .. } | Place::State(_) => None,
    })
}

/// Weights that only host steps of a plan read.
fn host_only(plan: &Plan) -> Vec<usize> {
    let on_device: Vec<usize> = device_weights(plan).collect();
    let steps = plan.steps().iter().filter(|step| matches!(step.op, Op::HostCall(_)));
    let read =
        steps.flat_map(|step| &step.inputs).filter_map(|operand| match plan.buffer(operand.buffer).place {
            Place::Weight(id) => Some(id.idx()),
            Place::Arena { .. } | Place::Control { .. } | Place::State(_) => None,
        });
    read.filter(|w| !on_device.contains(w)).collect()
}
