//! What a model has on the device thread: stream, kernels, memory, programs and graphs.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

use refrain_driver::{Buf, Context, DriverError, Launch, Stream};
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
use crate::prefill::{self, Areas};
use crate::profile::{Profile, ProfileRow, SharedTimeline};
use crate::progress::LoadEvent;
use crate::pump::Pump;
use crate::queue::SentSteps;
use crate::resident::{HostModel, Kept, Places, Resident, Room, fitting_room};
use crate::states;
use crate::status::{GraphLine, KernelUnits, Status};
use crate::tasks::{Chooser, Tasks};
use crate::traffic::Moved;
use crate::warm::WarmPlan;

/// Rounds what is set aside for control blocks and scratch up, so that a slightly larger plan does not mean planning
/// all memory anew.
const GRAIN: u64 = 64 << 10;

/// Scratch set aside for the attention of larger steps.
const SCRATCH_RESERVE: u64 = 4 << 20;
/// Rows of choices for which there is room from the start.
const CHOICES_RESERVE: usize = 8;

/// Names a program; never used twice.
pub(crate) type ProgramId = u64;

/// A plan made ready: launches for what can be recorded, host steps between.
pub(crate) struct Program {
    pub(crate) plan: Arc<Plan>,
    /// How its choice becomes its next input, where that happens on the device.
    pub(crate) feedback: Option<Feedback>,
    /// Which kernels it is, whatever the memory.
    tasks: Tasks,
    /// Launches over the memory as it is, or why there are none: then no step of it runs.
    lowered: Result<Lowered, CudaError>,
}

impl Program {
    fn parts(&self) -> &[Part] {
        self.lowered.as_ref().map_or(&[], |lowered| &lowered.parts)
    }

    /// The launches of a program that is one segment.
    pub(crate) fn only_segment(&self) -> Option<(&Segment, &WarmPlan)> {
        match self.parts() {
            [Part::Device { segment, warm }] => Some((segment, warm)),
            _ => None,
        }
    }

    /// Its launches, or why there are none.
    pub(crate) fn lowered(&self) -> Result<&Lowered, CudaError> {
        self.lowered.as_ref().map_err(Clone::clone)
    }

    /// Outputs that kernels write straight to pinned memory.
    pub(crate) fn results(&self) -> Result<&HashMap<BufferId, Buf>, CudaError> {
        Ok(&self.lowered()?.results)
    }

    /// Refuses a control block that points outside what it indexes.
    pub(crate) fn check(&self, control: &[u8]) -> Result<(), CudaError> {
        let out = |OutOfBounds { label, what, got, limit }| CudaError::OutOfRange { label, what, got, limit };
        self.plan.bounds().check(control).map_err(out)
    }

    /// The first host step with its reason, if there is one.
    fn host_step(&self) -> Option<Reason> {
        let steps = self.plan.segments().iter().filter(|s| s.kind != SegmentKind::Recordable);
        let step = &self.plan.steps()[steps.flat_map(|s| s.steps.clone()).next()?];
        match step.op.capture() {
            Capture::Unsafe(because) => Some(Reason::NotCapturable { label: step.label.clone(), because }),
            Capture::Safe => None,
        }
    }
}

/// Outputs by their position in the plan.
pub(crate) type Found = Vec<(usize, Vec<u8>)>;

/// A plan's launches over one memory.
pub(crate) struct Lowered {
    parts: Vec<Part>,
    /// Outputs that kernels write straight to pinned memory.
    results: HashMap<BufferId, Buf>,
    /// Changes rows of a run, where the plan feeds itself.
    pub(crate) edit: Option<Launch>,
}

pub(crate) enum Part {
    Device { segment: Segment, warm: WarmPlan },
    Host { step: usize },
}

impl Part {
    /// What could not be done as one launch.
    fn told(&self) -> Vec<String> {
        match self {
            Part::Device { warm, .. } => warm.told().to_vec(),
            Part::Host { .. } => Vec::new(),
        }
    }
}

/// Everything of one model on the device.
pub(crate) struct Machine {
    // Before the stream and the context: graphs and memory go first.
    pub(crate) cache: GraphCache<(ProgramId, usize)>,
    pub(crate) programs: HashMap<ProgramId, Program>,
    pub(crate) resident: Option<Resident>,
    /// Weights and states while there is no room for steps: a plan that was too large has taken theirs.
    kept: Option<Kept>,
    /// Decode steps that were sent.
    pub(crate) n_decoded: u64,
    pub(crate) compared: Compared,
    /// Whether programs were lowered anew since their graphs were recorded.
    must_record: bool,
    model: HostModel,
    profile: Profile,
    pub(crate) options: CudaOptions,
    /// Shapes that the library has multiplied.
    warmed: HashSet<BlasLtShape>,
    pub(crate) digester: Digester,
    supplies: Rc<Supplies>,
    pub(crate) followed: Option<Followed>,
    pub(crate) queued: SentSteps,
    /// Whether nothing was written to the states since they were cleared.
    pub(crate) states_are_zero: bool,
    pub(crate) pump: Arc<Pump>,
    pub(crate) stream: Stream,
    ctx: Context,
}

impl Drop for Machine {
    fn drop(&mut self) {
        // The other thread's end of the ring must not keep the memory.
        self.pump.uninstall();
    }
}

impl Machine {
    pub(crate) fn new(
        ctx: &Context,
        supplies: Rc<Supplies>,
        options: CudaOptions,
        pump: Arc<Pump>,
        timeline: SharedTimeline,
    ) -> Result<Machine, CudaError> {
        let digester = supplies.kernels.digester().map_err(|e| CudaError::Kernels(Arc::new(e)))?;
        let mut stream = ctx.stream().map_err(CudaError::driver("making a stream"))?;
        stream.set_limit(options.step_limit);
        Ok(Machine {
            cache: GraphCache::new(options.graphs),
            programs: HashMap::new(),
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

    /// Takes a model's weights; they go to the device with the first plan, when all sizes are known.
    pub(crate) fn load(&mut self, weights: Vec<Weight>, tensors: Vec<HostTensor>) -> Result<(), CudaError> {
        self.release()?;
        (self.model.weights, self.model.tensors) = (weights, tensors);
        Ok(())
    }

    /// Names weights that stay in pinned memory; those of the next load.
    pub(crate) fn keep_pinned(&mut self, names: Vec<String>) -> Result<(), CudaError> {
        self.release()?;
        self.model.pinned = names;
        Ok(())
    }

    /// Bytes that it holds on the device.
    pub(crate) fn held_bytes(&self) -> u64 {
        let resident = self.resident.as_ref().map(|resident| resident.accounting().total());
        resident.or(self.kept.as_ref().map(Kept::bytes)).unwrap_or(0)
    }

    /// Free bytes of the device and all of them.
    pub(crate) fn memory_info(&self) -> Result<(u64, u64), CudaError> {
        self.ctx.mem_info().map_err(CudaError::driver("asking for free memory"))
    }

    /// Takes the measures of a model's states, which begin as zeros.
    pub(crate) fn allocate(&mut self, states: Vec<State>) -> Result<(), CudaError> {
        self.release()?;
        self.model.states = states;
        Ok(())
    }

    /// Gives a model's states other sizes; what they hold stays. Programs for the old sizes are gone.
    pub(crate) fn resize(&mut self, states: Vec<State>) -> Result<(), CudaError> {
        let same = states.len() == self.model.states.len()
            && states.iter().zip(&self.model.states).all(|(to, from)| {
                let rest = |ty: &refrain_graph::TensorType| ty.shape.dims().get(1..).map(<[usize]>::to_vec);
                (to.kind, to.ty.dtype, rest(&to.ty)) == (from.kind, from.ty.dtype, rest(&from.ty))
            });
        if !same {
            let because = "other than the first dimension differs from what was allocated".to_owned();
            return Err(CudaError::Mismatch { what: "states", because });
        }
        if self.pump.n_pending() > 0 {
            self.settle()?;
        }
        let room = self.resident.as_ref().map(|resident| resident.room);
        self.set_aside(true)?;
        let before = std::mem::replace(&mut self.model.states, states);
        let Some(kept) = self.kept.take() else { return Ok(()) };
        let places = kept.places.with_states(&self.model, self.options.scratch_blocks());
        let resized = match places {
            Ok(places) => kept.resize(&self.ctx, &mut self.stream, places, room.unwrap_or_default()),
            Err(error) => Err((error, Some(kept))),
        };
        match resized {
            Ok(kept) => {
                self.kept = Some(kept);
                self.programs.clear();
                Ok(())
            }
            Err((error, kept)) => {
                // As if nobody had asked: the programs there are go on.
                (self.kept, self.model.states) = (kept, before);
                if let (Some(room), Some(kept)) = (room, &self.kept)
                    && let Err(second) = self.plan_memory(kept.places.clone(), [room, room])
                {
                    tracing::warn!("the room that steps had before cannot be had again: {second}");
                    self.programs.values_mut().for_each(|program| program.lowered = Err(second.clone()));
                }
                Err(error)
            }
        }
    }

    /// What a part of a state holds, once every step that was sent is done.
    pub(crate) fn read_state(&mut self, idx: usize, part: Range<usize>) -> Result<Vec<u8>, CudaError> {
        self.settle_if_over()?;
        let buf = self.placed_state(idx, &part)?;
        let Some(resident) = &self.resident else { return Err(Machine::gone()) };
        let mut bytes = vec![0; part.len()];
        let read = self.stream.download(&resident.lease, buf, &mut bytes);
        read.map_err(CudaError::driver("reading a state"))?;
        Ok(bytes)
    }

    /// Puts values into a part of a state.
    pub(crate) fn write_state(
        &mut self,
        idx: usize,
        part: Range<usize>,
        bytes: &[u8],
    ) -> Result<(), CudaError> {
        self.settle_if_over()?;
        let buf = self.placed_state(idx, &part)?;
        self.states_are_zero = false;
        let Some(resident) = &mut self.resident else { return Err(Machine::gone()) };
        let written = self.stream.upload(&mut resident.lease, buf, bytes);
        written.map_err(CudaError::driver("writing a state"))
    }

    /// Enqueues edits of states behind the steps that were sent, or has them wait behind those that are owed: whether they
    /// wait.
    pub(crate) fn edit_states(&mut self, edits: Vec<(usize, ByteEdit)>) -> Result<bool, CudaError> {
        for (idx, edit) in &edits {
            match edit {
                ByteEdit::Copy { from, to } => {
                    self.placed_state(*idx, from)?;
                    self.placed_state(*idx, to)?;
                }
                ByteEdit::Clear(range) => drop(self.placed_state(*idx, range)?),
            }
        }
        match self.owe_state_edits(edits) {
            Some(edits) => self.enqueue_state_edits(&edits).map(|()| false),
            None => Ok(true),
        }
    }

    /// Enqueues edits of states, without waiting for them.
    pub(crate) fn enqueue_state_edits(&mut self, edits: &[(usize, ByteEdit)]) -> Result<(), CudaError> {
        let failed = |source| CudaError::Driver { step: "editing states".into(), source };
        self.states_are_zero = false;
        let Some(resident) = &mut self.resident else { return Err(Machine::gone()) };
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

    /// Waits for what a run has left; refuses while one goes on.
    fn settle_if_over(&mut self) -> Result<(), CudaError> {
        if self.pump.n_pending() == 0 {
            return Ok(());
        }
        if self.followed.is_some() && !self.pump.is_stopped() {
            let because = "steps of one are in flight; it must be finished first".to_owned();
            return Err(CudaError::Mismatch { what: "runs", because });
        }
        self.settle()
    }

    /// Where a part of a state lies, if it is there.
    fn placed_state(&self, idx: usize, part: &Range<usize>) -> Result<Buf, CudaError> {
        let mismatch = |because: String| CudaError::Mismatch { what: "states", because };
        let Some(resident) = &self.resident else {
            return Err(mismatch("there are none before a graph is compiled".into()));
        };
        if idx >= self.model.states.len() {
            return Err(mismatch(format!("there are {}, asked for number {idx}", self.model.states.len())));
        }
        let placed = resident.state_live(idx).and_then(|s| s.slice(part.start as u64, part.len() as u64));
        placed.map_err(CudaError::driver("finding a state"))
    }

    /// Refuses a graph of other weights or states than those here.
    pub(crate) fn check_model(&self, weights: &[Weight], states: &[State]) -> Result<(), CudaError> {
        let mismatch = |what, because| Err(CudaError::Mismatch { what, because });
        let [ours, theirs] = [self.model.weights.len(), weights.len()];
        let same = self.model.weights.iter().zip(weights).all(|(a, b)| a.ty == b.ty);
        if ours != theirs || !same {
            return mismatch(
                "weights",
                format!("the graph has {theirs}, {ours} are loaded, or of other types"),
            );
        }
        let [ours, theirs] = [self.model.states.len(), states.len()];
        let same = self.model.states.iter().zip(states).all(|(a, b)| a.ty == b.ty);
        if ours != theirs || !same {
            return mismatch(
                "states",
                format!("the graph has {theirs}, {ours} are allocated, or of other types"),
            );
        }
        Ok(())
    }

    pub(crate) fn drop_program(&mut self, id: ProgramId) {
        if let Some(program) = self.programs.remove(&id) {
            (0..program.parts().len()).for_each(|part| self.cache.forget(&(id, part)));
        }
    }

    /// Makes sure that weights, states and room for a plan are on the device. Sending weights may take long.
    pub(crate) fn place(&mut self, plan: &Plan) -> Result<Tasks, CudaError> {
        // Verification writes to the ring.
        self.settle_if_over()?;
        let tasks = self.choose(plan);
        self.ensure(plan, &tasks)?;
        Ok(tasks)
    }

    /// Lowers a plan, records its graphs and verifies them, so that no step has to.
    pub(crate) fn compile(&mut self, id: ProgramId, plan: Arc<Plan>) -> Result<(), CudaError> {
        let tasks = self.place(&plan)?;
        if std::mem::take(&mut self.must_record) {
            // Graphs over the old memory are gone; none of them should cost a token later.
            let ids: Vec<ProgramId> = self.programs.keys().copied().collect();
            ids.into_iter().try_for_each(|id| self.prepare(id))?;
        }
        let feedback = feed::feedback(&plan);
        let Some(resident) = &self.resident else { unreachable!("placed above") };
        let lowered = self.lower(resident, &plan, feedback.as_ref(), &tasks)?;
        self.warm_up(&lowered.parts)?;
        let program = Program { plan, feedback, tasks, lowered: Ok(lowered) };
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

    /// Which kernels a plan's groups are.
    fn choose(&self, plan: &Plan) -> Tasks {
        let device = self.ctx.device();
        let info = device.info();
        let chooser = Chooser {
            kernels: &self.supplies.kernels,
            blas: self.supplies.products.blas.as_deref(),
            weights: &self.model.weights,
            n_sms: info.n_sms,
            card: info,
        };
        chooser.choose(plan)
    }

    /// The launches of a plan, with all their kernels loaded: never is one compiled while a step waits for it.
    fn lower(
        &self,
        resident: &Resident,
        plan: &Plan,
        feedback: Option<&Feedback>,
        tasks: &Tasks,
    ) -> Result<Lowered, CudaError> {
        self.with_kernels(|| self.describe(resident, plan, feedback, tasks))
    }

    /// Runs something that describes launches, with all kernels that it asks for.
    fn with_kernels<T>(&self, describe: impl FnMut() -> Result<T, CudaError>) -> Result<T, CudaError> {
        let mut hear = |Compiling { n_done, n_total }| {
            self.options.on_load.hear(LoadEvent::Compiling { n_done, n_total });
        };
        self.supplies.kernels.prepared(&mut hear, describe).map_err(|e| CudaError::Kernels(Arc::new(e)))?
    }

    fn describe(
        &self,
        resident: &Resident,
        plan: &Plan,
        feedback: Option<&Feedback>,
        tasks: &Tasks,
    ) -> Result<Lowered, CudaError> {
        let n_sms = self.ctx.device().info().n_sms;
        // The choice of a step that feeds itself is read on the device, and reaches the host through the ring. Steps that
        // learn are queued: the next one would write over results in one pinned place.
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
            n_sms,
            overlaps: !self.options.profile,
            blas: self.supplies.products.blas.as_ref(),
            areas: tasks.areas.place(resident.scratch).map_err(CudaError::driver("placing workspaces"))?,
        };
        let one = plan.segments().iter().filter(|s| s.kind == SegmentKind::Recordable).count() <= 1;
        let mut parts = Vec::with_capacity(plan.segments().len());
        for (idx, segment) in plan.segments().iter().enumerate() {
            if segment.kind != SegmentKind::Recordable {
                segment.steps.clone().for_each(|step| parts.push(Part::Host { step }));
                continue;
            }
            let name = match one {
                true => format!("step of {}", tokens(plan)),
                false => format!("step of {}, segment {idx}", tokens(plan)),
            };
            let mut warm = WarmPlan::new(&name, &resident.space);
            lowering.push(&tasks.segments[idx], &mut warm)?;
            if let Some(feedback) = feedback {
                feed::push_commit(&self.supplies.kernels, plan, resident, feedback, &mut warm)?;
            }
            if !warm.work().is_empty() {
                parts.push(Part::Device { segment: segment.clone(), warm });
            }
        }
        let edit = feedback.map(|_| feed::edit_launch(&self.supplies.kernels, resident)).transpose()?;
        Ok(Lowered { parts, results, edit })
    }

    fn warm_up(&mut self, parts: &[Part]) -> Result<(), CudaError> {
        let Some(resident) = self.resident.as_mut().filter(|_| self.supplies.products.blas.is_some()) else {
            return Ok(());
        };
        parts.iter().try_for_each(|part| match part {
            Part::Device { warm, .. } => {
                prefill::warm_up(warm, &mut self.stream, &mut resident.lease, &mut self.warmed)
            }
            Part::Host { .. } => Ok(()),
        })
    }

    fn prepare(&mut self, id: ProgramId) -> Result<(), CudaError> {
        if self.options.profile {
            return Ok(());
        }
        let (Some(program), Some(resident)) = (self.programs.get(&id), &mut self.resident) else {
            return Ok(());
        };
        // No step is under way: of the arena only what steps left to be read means anything.
        let live = live_outputs(self.programs.values().filter(|program| program.lowered.is_ok()), resident)
            .map_err(CudaError::driver("finding results"))?;
        for (idx, part) in program.parts().iter().enumerate() {
            let Part::Device { segment, warm } = part else { continue };
            let feedback = program.feedback.as_ref();
            let check = || {
                let check = states::check(&program.plan, segment, feedback, resident, &self.digester)?;
                let check = check.transient(resident.arena(), live.clone());
                Ok(if self.states_are_zero { check.zeroed(resident.states()) } else { check })
            };
            // Made before the lease is borrowed; skipped when graphs are off.
            let check = if self.options.graphs.mode == GraphMode::Off { None } else { Some(check()?) };
            let mut site = Site { stream: &mut self.stream, lease: &mut resident.lease };
            let Some(check) = check else { continue };
            // A failure here is told by the steps, which run eagerly then.
            self.cache.prepare(&(id, idx), &mut site, warm, || Ok(check))?;
        }
        Ok(())
    }

    /// Makes sure that there is memory for a plan. When there is too little, steps get new room; weights and states stay
    /// where they are. A plan that cannot fit is refused before anything is given up.
    fn ensure(&mut self, plan: &Plan, tasks: &Tasks) -> Result<(), CudaError> {
        let needed = Room {
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
            && resident.room.holds(&needed)
            && !missing(resident.places())
        {
            return Ok(());
        }
        let before = self.resident.as_ref().map(|r| r.room);
        let kept = before.map_or(needed, |room| room.max(&needed));
        let rooms = [kept, self.wanted(needed, plan).max(&kept)];
        let placed = self.resident.as_ref().map(Resident::places).or(self.kept.as_ref().map(|k| &k.places));
        // A weight that was left on the host and is read on the device now: all of them are placed anew.
        let (places, keeps_weights) = match placed {
            Some(places) if !missing(places) => (places.clone(), true),
            Some(_) => (Places::new(&self.model, &[], self.options.scratch_blocks())?, false),
            None => (Places::new(&self.model, &host_only(plan), self.options.scratch_blocks())?, false),
        };
        if let Some(resident) = &self.resident {
            let (free, total) = self.ctx.mem_info().map_err(CudaError::driver("asking for free memory"))?;
            let taken_over = places.kept_bytes(keeps_weights);
            let given_back = if keeps_weights { 0 } else { resident.places().kept_bytes(true) - taken_over };
            let free = free.saturating_add(resident.transient_bytes()).saturating_add(given_back);
            fitting_room(&self.ctx, &places, rooms, (taken_over, free, total))?;
            tracing::warn!(
                "a step needs more room ({needed:?}, there is {:?}): graphs are recorded again",
                resident.room
            );
        }
        self.set_aside(keeps_weights)?;
        let planned = self.plan_memory(places.clone(), rooms);
        if planned.is_err()
            && let Some(room) = before
        {
            // The driver had less than it said: the programs there are go on as they were.
            if let Err(error) = self.plan_memory(places, [room, room]) {
                tracing::warn!("the room that steps had before cannot be had again: {error}");
                self.programs.values_mut().for_each(|program| program.lowered = Err(error.clone()));
            }
        }
        planned
    }

    /// Allocates room for steps around what is kept, and lowers every program anew.
    fn plan_memory(&mut self, places: Places, rooms: [Room; 2]) -> Result<(), CudaError> {
        self.with_kernels(|| {
            let dtypes = self.model.weights.iter().map(|weight| weight.ty.dtype);
            self.supplies.kernels.ask_for_pack(dtypes).map_err(|e| CudaError::Kernels(Arc::new(e)))
        })?;
        let (ctx, stream, model) = (&self.ctx, &mut self.stream, &self.model);
        let loading = (&self.supplies.kernels, &self.options.on_load);
        let kept = self.kept.take();
        let has_states = kept.is_some();
        let mut resident = match Resident::plan(ctx, stream, model, places, rooms, loading, kept) {
            Ok(resident) => resident,
            Err((error, kept)) => {
                self.kept = kept;
                return Err(error);
            }
        };
        // Everything lowered before points at memory that is gone. One that cannot be lowered any more says so when it
        // is asked to run; the others go on.
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

    /// Room for the largest bucket, guessed from a plan of fewer tokens.
    fn wanted(&self, needed: Room, plan: &Plan) -> Room {
        let largest = self.options.buckets.iter().copied().max().unwrap_or(1);
        let times = largest.div_ceil(plan.bounds().n_tokens()).max(1) as u64;
        let reserve =
            self.options.arena_reserve_bytes.min(self.options.arena_limit_bytes.unwrap_or(u64::MAX));
        let arena = needed.arena.saturating_mul(times).min(reserve).max(needed.arena);
        // Of the kernels' scratch only attention's grows with the tokens, and its splits become fewer.
        let scratch = needed.scratch.saturating_add(reserve.min(SCRATCH_RESERVE));
        // Sending the weights again would cost more than the workspace of prompts, which no small step shows.
        let n_sms = self.ctx.device().info().n_sms;
        let prompts = Areas::of_prompts(plan, largest, n_sms, self.supplies.products.blas.is_some()).bytes();
        let scratch = scratch.max(prompts.next_multiple_of(GRAIN));
        // A step that chooses nothing may come before those that do.
        let choices = needed.choices.max(sample_state_bytes(CHOICES_RESERVE));
        Room { arena, scratch, control: needed.control.max(4 * GRAIN), choices }
    }

    /// Frees graphs, programs and memory.
    fn release(&mut self) -> Result<(), CudaError> {
        self.cache.clear();
        self.programs.clear();
        self.followed = None;
        self.pump.uninstall();
        (self.resident, self.kept) = (None, None);
        self.states_are_zero = false;
        // The stream keeps what its work uses until it has been waited for.
        self.stream.synchronize().map_err(CudaError::driver("waiting for the last step"))
    }

    /// Frees graphs and the room for steps; weights, if they are still good, and states are kept.
    fn set_aside(&mut self, weights: bool) -> Result<(), CudaError> {
        self.cache.clear();
        // Launches hold on to the memory they were lowered for.
        self.programs.values_mut().for_each(|program| program.lowered = Err(Machine::gone()));
        self.followed = None;
        self.pump.uninstall();
        self.stream.synchronize().map_err(CudaError::driver("waiting for the last step"))?;
        if let Some(resident) = self.resident.take() {
            self.kept =
                Some(resident.keep(weights).map_err(CudaError::driver("keeping weights and states"))?);
        }
        Ok(())
    }

    /// The error for a program whose memory or weights are gone.
    pub(crate) fn gone() -> CudaError {
        let because = "this one was compiled for other weights".into();
        CudaError::Mismatch { what: "plans", because }
    }

    /// Whether the next step of a program will record a graph.
    pub(crate) fn wants_graph(&self, id: ProgramId) -> bool {
        let parts = self.programs.get(&id).map_or(0, |program| program.parts().len());
        !self.options.profile && (0..parts).any(|part| self.cache.wants_check(&(id, part)))
    }

    /// Runs one step. Small results come back with it, once it is done, so that a token costs its caller one visit to
    /// this thread; others are read with [`Machine::read`], and nothing waits for a step that has none.
    pub(crate) fn run(&mut self, id: ProgramId, control: &[u8]) -> Result<(Ran, Found), CudaError> {
        // A stream that took another's place has the usual limit.
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

    /// Sends one step with its inputs.
    pub(crate) fn send(&mut self, id: ProgramId, control: &[u8]) -> Result<Ran, CudaError> {
        self.send_inputs(id, control)?;
        self.enqueue(id, control)
    }

    /// Sends a step's inputs, checked.
    pub(crate) fn send_inputs(&mut self, id: ProgramId, control: &[u8]) -> Result<(), CudaError> {
        let Some(program) = self.programs.get(&id) else { return Err(Machine::gone()) };
        program.lowered()?;
        let Some(resident) = &mut self.resident else { return Err(Machine::gone()) };
        program.check(control)?;
        if !control.is_empty() {
            let staged = resident.send_control(&mut self.stream, None, control);
            staged.map_err(CudaError::driver("sending the control block"))?;
        }
        Ok(())
    }

    /// Enqueues one step: replayed if every segment that can be recorded was. Host steps read `control`. A program that
    /// has no launches for the memory as it is is an error, not an empty step.
    pub(crate) fn enqueue(&mut self, id: ProgramId, control: &[u8]) -> Result<Ran, CudaError> {
        self.states_are_zero = false;
        let Some(program) = self.programs.get(&id) else { return Err(Machine::gone()) };
        program.lowered()?;
        let Some(resident) = &mut self.resident else { return Err(Machine::gone()) };
        let parts = &program.lowered()?.parts;
        let moved = match self.options.profile {
            true => {
                let launches = |part: &Part| match part {
                    Part::Device { warm, .. } => warm.work().len(),
                    Part::Host { .. } => 0,
                };
                let n_launches = parts.iter().map(launches).sum();
                self.profile.begin_step(program.plan.bounds().n_tokens(), n_launches);
                Moved::of(&program.plan, resident, control).map_err(CudaError::driver("counting bytes"))?
            }
            false => Moved::default(),
        };
        let mut not_replayed = None;
        let (mut n_launches, mut n_host_steps) = (0, 0);
        for (idx, part) in parts.iter().enumerate() {
            let reason = match part {
                Part::Device { warm, .. } if self.options.profile => {
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
                Part::Device { segment, warm } => {
                    let key = (id, idx);
                    // Only a graph that has to be made needs states to be verified with.
                    let check = match self.cache.wants_check(&key) {
                        true => {
                            let feedback = program.feedback.as_ref();
                            let plan = &program.plan;
                            Some(states::check(plan, segment, feedback, resident, &self.digester)?)
                        }
                        false => None,
                    };
                    let check = || check.ok_or_else(Machine::gone);
                    let mut site = Site { stream: &mut self.stream, lease: &mut resident.lease };
                    n_launches += 1;
                    match self.cache.step(&key, &mut site, warm, check)? {
                        Ran::Replayed { .. } => None,
                        Ran::Eager(reason) => Some(reason),
                    }
                }
                Part::Host { step } => {
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

    /// An output, and with it every one that lies in pinned memory: a step's few numbers cost one wait.
    pub(crate) fn read(&mut self, id: ProgramId, output: usize) -> Result<Found, CudaError> {
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

    /// Everything that a program enqueues, with the first step of the plan that it is for.
    pub(crate) fn kernels(&self, id: ProgramId) -> Vec<(usize, String)> {
        let Some(program) = self.programs.get(&id) else { return Vec::new() };
        let steps = program.plan.steps();
        let mut out = Vec::new();
        for part in program.parts() {
            let Part::Device { segment, warm } = part else { continue };
            for work in warm.work() {
                let (label, kernel) = work.step_and_kernel();
                // A launch for several steps carries all their labels, joined.
                let first = label.split(" + ").next().unwrap_or_default();
                let step = segment.steps.clone().find(|&s| steps[s].label == first);
                out.push((step.unwrap_or(segment.steps.start), kernel));
            }
        }
        out
    }

    /// How many units of kernels there are and how many need no compiler. If that is all of them, they are loaded.
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
        let parts = self.programs.values().flat_map(Program::parts);
        let mut apart: Vec<String> = parts.flat_map(Part::told).collect();
        apart.sort_unstable();
        apart.dedup();
        let memory = self.resident.as_ref().map(Resident::accounting).unwrap_or_default();
        let profile = self.profile.rows().to_vec();
        Status {
            memory,
            others: Vec::new(),
            upload: self.resident.as_ref().map(Resident::uploaded).unwrap_or_default(),
            graphs,
            cache: self.cache.stats(),
            compared: self.compared,
            queued: self.queued.stats,
            kernels: Some(self.supplies.kernels.origin()),
            prompt_products: Some(self.supplies.products.choice.clone()),
            apart,
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

/// Whether a step of a plan changes states that hold more than rows of a cache.
fn learns(plan: &Plan, resident: &Resident) -> bool {
    let mut written = plan.steps().iter().flat_map(|step| &step.outputs);
    written.any(|operand| match plan.buffer(operand.buffer).place {
        Place::State(id) => resident.state(id.idx()).kind == StateKind::Whole,
        Place::Arena { .. } | Place::Control { .. } | Place::Weight(_) => false,
    })
}

/// Outputs that lie in the arena.
fn live_outputs<'a>(
    programs: impl Iterator<Item = &'a Program>,
    resident: &Resident,
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

/// Weights that host steps of a plan read and device steps do not.
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
