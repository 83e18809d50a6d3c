//! What lives on the device thread: stream, kernels, memory, programs and graphs.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use refrain_driver::{Buf, Context, DriverError, Stream};
use refrain_graph::{BufferId, Feedback, Op, Place, Plan, Ran, Reason, Segment, SegmentKind};
use refrain_graph::{State, Weight};
use refrain_kernels::{BlasLtShape, Digester, Kernels, sample_state_bytes};
use refrain_tensor::HostTensor;

use crate::cache::{CacheStats, GraphCache, GraphMode, Site};
use crate::error::CudaError;
use crate::feed;
use crate::follow::Followed;
use crate::host;
use crate::lower::Lowering;
use crate::options::CudaOptions;
use crate::prefill::{self, Areas, Products};
use crate::profile::{Profile, ProfileRow, SharedTimeline};
use crate::pump::Pump;
use crate::resident::{HostModel, Resident, Room};
use crate::roles::Roles;
use crate::states;
use crate::status::{GraphLine, Status};
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
    plan: Arc<Plan>,
    pub(crate) roles: Roles,
    /// How its choice becomes its next input, where that happens on the device.
    pub(crate) feedback: Option<Feedback>,
    /// Which kernels it is, whatever the memory.
    tasks: Tasks,
    parts: Vec<Part>,
    /// Outputs that kernels write straight to pinned memory.
    results: HashMap<BufferId, Buf>,
}

/// Outputs by their position in the plan.
pub(crate) type Found = Vec<(usize, Vec<u8>)>;

type Lowered = (Vec<Part>, HashMap<BufferId, Buf>);

enum Part {
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

/// Everything of one device.
pub(crate) struct Machine {
    // Before the stream and the context: graphs and memory go first.
    cache: GraphCache<(ProgramId, usize)>,
    pub(crate) programs: HashMap<ProgramId, Program>,
    pub(crate) resident: Option<Resident>,
    model: HostModel,
    profile: Profile,
    pub(crate) options: CudaOptions,
    /// Shapes that the library has multiplied.
    warmed: HashSet<BlasLtShape>,
    products: Products,
    digester: Digester,
    kernels: Kernels,
    pub(crate) followed: Option<Followed>,
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
        options: CudaOptions,
        pump: Arc<Pump>,
        timeline: SharedTimeline,
    ) -> Result<Machine, CudaError> {
        let kernels = Kernels::load(ctx, &options.kernels).map_err(|e| CudaError::Kernels(Arc::new(e)))?;
        let digester = kernels.digester().map_err(|e| CudaError::Kernels(Arc::new(e)))?;
        let products = Products::open(ctx, &options.cublaslt);
        let mut stream = ctx.stream().map_err(CudaError::driver("making a stream"))?;
        stream.set_limit(options.step_limit);
        Ok(Machine {
            cache: GraphCache::new(options.graphs),
            programs: HashMap::new(),
            resident: None,
            model: HostModel::default(),
            profile: Profile::new(timeline),
            options,
            warmed: HashSet::new(),
            products,
            digester,
            kernels,
            followed: None,
            pump,
            stream,
            ctx: ctx.clone(),
        })
    }

    /// Takes a model's weights; they go to the device with the first plan, when all sizes are known.
    pub(crate) fn load(&mut self, weights: Vec<Weight>, tensors: Vec<HostTensor>) -> Result<(), CudaError> {
        self.release()?;
        self.programs.clear();
        (self.model.weights, self.model.tensors) = (weights, tensors);
        Ok(())
    }

    /// Takes the measures of a model's states, which begin as zeros.
    pub(crate) fn allocate(&mut self, states: Vec<State>) -> Result<(), CudaError> {
        self.release()?;
        self.programs.clear();
        self.model.states = states;
        Ok(())
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
            (0..program.parts.len()).for_each(|part| self.cache.forget(&(id, part)));
        }
    }

    /// Lowers a plan, records its graphs and verifies them, so that no step has to.
    pub(crate) fn compile(&mut self, id: ProgramId, plan: Arc<Plan>) -> Result<(), CudaError> {
        if self.pump.n_pending() > 0 {
            // Verification writes to the ring.
            if self.followed.is_some() && !self.pump.is_stopped() {
                let because = "steps of one are under way; it must be finished first".to_owned();
                return Err(CudaError::Mismatch { what: "runs", because });
            }
            self.settle()?;
        }
        let (roles, feedback) = (Roles::of(&plan), feed::feedback(&plan));
        let tasks = self.choose(&plan);
        let is_new = self.ensure(&plan, &roles, &tasks)?;
        if is_new {
            // Graphs over the old memory are gone; none of them should cost a token later.
            let ids: Vec<ProgramId> = self.programs.keys().copied().collect();
            ids.into_iter().try_for_each(|id| self.prepare(id))?;
        }
        let Some(resident) = &self.resident else { unreachable!("ensured above") };
        let (parts, results) = self.lower(resident, &plan, &roles, feedback.as_ref(), &tasks)?;
        self.warm_up(&parts)?;
        self.programs.insert(id, Program { plan, roles, feedback, tasks, parts, results });
        if let Err(error) = self.prepare(id) {
            self.drop_program(id);
            return Err(error);
        }
        Ok(())
    }

    /// Which kernels a plan's groups are.
    fn choose(&self, plan: &Plan) -> Tasks {
        let device = self.ctx.device();
        let info = device.info();
        let chooser = Chooser {
            kernels: &self.kernels,
            blas: self.products.blas.as_deref(),
            weights: &self.model.weights,
            n_sms: info.n_sms,
            shared_block_bytes: info.shared_block_bytes as usize,
        };
        chooser.choose(plan)
    }

    fn lower(
        &self,
        resident: &Resident,
        plan: &Plan,
        roles: &Roles,
        feedback: Option<&Feedback>,
        tasks: &Tasks,
    ) -> Result<Lowered, CudaError> {
        let n_sms = self.ctx.device().info().n_sms;
        // The choice of a step that feeds itself is read on the device, and reaches the host through the ring.
        let results = match feedback {
            Some(_) => HashMap::new(),
            None => resident.results(plan).map_err(CudaError::driver("placing results"))?,
        };
        let lowering = Lowering {
            kernels: &self.kernels,
            plan,
            resident,
            results: &results,
            n_sms,
            overlaps: !self.options.profile,
            blas: self.products.blas.as_ref(),
            areas: tasks.areas.place(resident.scratch).map_err(CudaError::driver("placing workspaces"))?,
        };
        let one = plan.segments().iter().filter(|s| s.kind == SegmentKind::Recordable).count() <= 1;
        let mut parts = Vec::with_capacity(plan.segments().len());
        for (idx, segment) in plan.segments().iter().enumerate() {
            if segment.kind != SegmentKind::Recordable {
                segment.steps.clone().for_each(|step| parts.push(Part::Host { step }));
                continue;
            }
            let n = roles.n_tokens();
            let s = if n == 1 { "" } else { "s" };
            let name = if one {
                format!("step of {n} token{s}")
            } else {
                format!("step of {n} token{s}, segment {idx}")
            };
            let mut warm = WarmPlan::new(&name, &resident.space);
            lowering.push(&tasks.segments[idx], &mut warm)?;
            if let Some(feedback) = feedback {
                feed::push_commit(&self.kernels, plan, resident, feedback, &mut warm)?;
            }
            if !warm.work().is_empty() {
                parts.push(Part::Device { segment: segment.clone(), warm });
            }
        }
        Ok((parts, results))
    }

    fn warm_up(&mut self, parts: &[Part]) -> Result<(), CudaError> {
        let Some(resident) = self.resident.as_mut().filter(|_| self.products.blas.is_some()) else {
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
        let live =
            live_outputs(self.programs.values(), resident).map_err(CudaError::driver("finding results"))?;
        for (idx, part) in program.parts.iter().enumerate() {
            let Part::Device { segment, warm } = part else { continue };
            let feedback = program.feedback.as_ref();
            let check = || {
                let (plan, roles) = (&program.plan, &program.roles);
                let check = states::check(plan, segment, roles, feedback, resident, &self.digester)?;
                Ok(check.transient(resident.arena(), live.clone()))
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

    /// Makes sure that there is memory for a plan; plans all of it anew when there is too little. True when it did.
    fn ensure(&mut self, plan: &Plan, roles: &Roles, tasks: &Tasks) -> Result<bool, CudaError> {
        let needed = Room {
            arena: plan.arena_bytes() as u64,
            scratch: tasks.areas.bytes().next_multiple_of(GRAIN),
            control: (plan.control().bytes() as u64).next_multiple_of(GRAIN).max(GRAIN),
            choices: tasks.choice_bytes,
        };
        if let Some(limit) = self.options.arena_limit_bytes.filter(|limit| needed.arena > *limit) {
            return Err(CudaError::ArenaTooLarge { need_bytes: needed.arena, limit_bytes: limit });
        }
        let host_only = host_only(plan);
        let missing = |r: &Resident| device_weights(plan).any(|w| r.is_host_only(w));
        match &self.resident {
            Some(resident) if resident.room.holds(&needed) && !missing(resident) => return Ok(false),
            Some(_) | None => {}
        }
        let wanted = self.wanted(needed, plan, roles);
        let saved = match &self.resident {
            None => Vec::new(),
            Some(resident) => {
                tracing::warn!(
                    "a step needs more room ({needed:?}, there is {:?}): planning memory anew, graphs are recorded again",
                    resident.room
                );
                resident.save_states(&mut self.stream).map_err(CudaError::driver("saving the KV cache"))?
            }
        };
        let kept = self.resident.as_ref().map_or(needed, |r| r.room.max(&needed));
        self.release()?;
        let rooms = [kept, wanted.max(&kept)];
        let blocks = self.options.scratch_blocks;
        let (ctx, stream, model) = (&self.ctx, &mut self.stream, &self.model);
        let loading = (&self.kernels, &self.options.on_load);
        let mut resident = Resident::plan(ctx, stream, model, &host_only, blocks, rooms, loading)?;
        let restored = resident.restore_states(&mut self.stream, &saved);
        restored.map_err(CudaError::driver("restoring the KV cache"))?;
        // Everything lowered before points at the memory that is gone.
        let mut programs = std::mem::take(&mut self.programs);
        let mut failed = None;
        for program in programs.values_mut() {
            let (plan, feedback) = (&program.plan, program.feedback.as_ref());
            match self.lower(&resident, plan, &program.roles, feedback, &program.tasks) {
                Ok((parts, results)) => (program.parts, program.results) = (parts, results),
                Err(error) => failed = Some(error),
            }
        }
        if let Some(ring) = resident.ring_end() {
            self.pump.install(ring);
        }
        self.resident = Some(resident);
        self.programs = programs;
        failed.map_or(Ok(true), Err)
    }

    /// Room for the largest bucket, guessed from a plan of fewer tokens.
    fn wanted(&self, needed: Room, plan: &Plan, roles: &Roles) -> Room {
        let largest = self.options.buckets.iter().copied().max().unwrap_or(1);
        let times = largest.div_ceil(roles.n_tokens()).max(1) as u64;
        let reserve =
            self.options.arena_reserve_bytes.min(self.options.arena_limit_bytes.unwrap_or(u64::MAX));
        let arena = needed.arena.saturating_mul(times).min(reserve).max(needed.arena);
        // Of the kernels' scratch only attention's grows with the tokens, and its splits become fewer.
        let scratch = needed.scratch.saturating_add(reserve.min(SCRATCH_RESERVE));
        // Sending the weights again would cost more than the workspace of prompts, which no small step shows.
        let n_sms = self.ctx.device().info().n_sms;
        let prompts = Areas::of_prompts(plan, largest, n_sms, self.products.blas.is_some()).bytes();
        let scratch = scratch.max(prompts.next_multiple_of(GRAIN));
        // A step that chooses nothing may come before those that do.
        let choices = needed.choices.max(sample_state_bytes(CHOICES_RESERVE));
        Room { arena, scratch, control: needed.control.max(4 * GRAIN), choices }
    }

    /// Frees graphs and memory.
    fn release(&mut self) -> Result<(), CudaError> {
        self.cache.clear();
        if self.resident.is_none() {
            return Ok(());
        }
        // Parts hold on to the memory they were lowered for.
        self.programs.values_mut().for_each(|program| program.parts.clear());
        self.followed = None;
        self.pump.uninstall();
        self.resident = None;
        // The stream keeps what its work uses until it has been waited for.
        self.stream.synchronize().map_err(CudaError::driver("waiting for the last step"))
    }

    /// The error for a program whose memory or weights are gone.
    pub(crate) fn gone() -> CudaError {
        let because = "this one was compiled for other weights".into();
        CudaError::Mismatch { what: "plans", because }
    }

    /// Whether the next step of a program will record a graph.
    pub(crate) fn wants_graph(&self, id: ProgramId) -> bool {
        let parts = self.programs.get(&id).map_or(0, |program| program.parts.len());
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
            program.plan.outputs().iter().position(|output| program.results.contains_key(&output.buffer))
        });
        Ok((ran, first.map_or_else(|| Ok(Vec::new()), |output| self.read(id, output))?))
    }

    /// Sends one step with its inputs.
    fn send(&mut self, id: ProgramId, control: &[u8]) -> Result<Ran, CudaError> {
        let (Some(program), Some(resident)) = (self.programs.get(&id), &mut self.resident) else {
            return Err(Machine::gone());
        };
        program.roles.check(control)?;
        if !control.is_empty() {
            let staged = resident.send_control(&mut self.stream, None, control);
            staged.map_err(CudaError::driver("sending the control block"))?;
        }
        self.enqueue(id, control)
    }

    /// Enqueues one step: replayed if every segment that can be recorded was. Host steps read `control`.
    pub(crate) fn enqueue(&mut self, id: ProgramId, control: &[u8]) -> Result<Ran, CudaError> {
        let (Some(program), Some(resident)) = (self.programs.get(&id), &mut self.resident) else {
            return Err(Machine::gone());
        };
        let moved = match self.options.profile {
            true => {
                let launches = |part: &Part| match part {
                    Part::Device { warm, .. } => warm.work().len(),
                    Part::Host { .. } => 0,
                };
                let n_launches = program.parts.iter().map(launches).sum();
                self.profile.begin_step(program.roles.n_tokens(), n_launches);
                Moved::of(&program.plan, resident, control).map_err(CudaError::driver("counting bytes"))?
            }
            false => Moved::default(),
        };
        let mut not_replayed = None;
        for (idx, part) in program.parts.iter().enumerate() {
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
                            let (plan, roles) = (&program.plan, &program.roles);
                            Some(states::check(plan, segment, roles, feedback, resident, &self.digester)?)
                        }
                        false => None,
                    };
                    let check = || check.ok_or_else(Machine::gone);
                    let mut site = Site { stream: &mut self.stream, lease: &mut resident.lease };
                    match self.cache.step(&key, &mut site, warm, check)? {
                        Ran::Replayed => None,
                        Ran::Eager(reason) => Some(reason),
                    }
                }
                Part::Host { step } => {
                    let step = &program.plan.steps()[*step];
                    host::run(step, &program.plan, resident, &self.model, &mut self.stream, control)?;
                    None
                }
            };
            not_replayed = not_replayed.or(reason);
        }
        Ok(not_replayed.map_or(Ran::Replayed, Ran::Eager))
    }

    /// An output, and with it every one that lies in pinned memory: a step's few numbers cost one wait.
    pub(crate) fn read(&mut self, id: ProgramId, output: usize) -> Result<Found, CudaError> {
        let mismatch = |because: String| CudaError::Mismatch { what: "outputs", because };
        let (Some(program), Some(resident)) = (self.programs.get(&id), &self.resident) else {
            return Err(mismatch("the plan was compiled for other weights".into()));
        };
        let outputs = program.plan.outputs();
        if output >= outputs.len() {
            return Err(mismatch(format!("the plan has no output {output}")));
        }
        let mut found = Vec::new();
        for (idx, operand) in outputs.iter().enumerate() {
            let pinned = program.results.get(&operand.buffer).copied();
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
        for part in &program.parts {
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

    pub(crate) fn profile(&self) -> &[ProfileRow] {
        self.profile.rows()
    }

    pub(crate) fn stats(&self) -> CacheStats {
        self.cache.stats()
    }

    pub(crate) fn status(&self) -> Status {
        let mut graphs = Vec::new();
        for (id, program) in &self.programs {
            for idx in 0..program.parts.len() {
                if let Some(graph) = self.cache.graph(&(*id, idx)) {
                    graphs.push(GraphLine::new(graph, program.roles.n_tokens(), program.feedback.is_some()));
                }
            }
        }
        graphs.sort_by_key(|g| g.n_tokens);
        let parts = self.programs.values().flat_map(|program| &program.parts);
        let mut apart: Vec<String> = parts.flat_map(Part::told).collect();
        apart.sort_unstable();
        apart.dedup();
        let memory = self.resident.as_ref().map(Resident::accounting).unwrap_or_default();
        let profile = self.profile.rows().to_vec();
        Status {
            memory,
            upload: self.resident.as_ref().map(Resident::uploaded).unwrap_or_default(),
            graphs,
            cache: self.cache.stats(),
            kernels: Some(self.kernels.origin()),
            prompt_products: Some(self.products.choice.clone()),
            apart,
            profile,
            peak_bytes_per_second: self.ctx.device().info().peak_bytes_per_second(),
        }
    }
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
