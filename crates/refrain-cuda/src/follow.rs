//! Decode steps that feed themselves: launched by the device thread, collected by the caller that wants
//! tokens.
//!
//! The run belongs to the caller: [`Run`] knows its rows and counts launched and collected steps. The device
//! thread keeps what it needs to launch the next step ([`Followed`]). The [`Pump`](crate::pump::Pump)
//! connects the two.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use refrain_driver::DriverError;
use refrain_graph::{
    ByteEdit, Committed, CommittedStep, Feedback, Field, LateRows, OutOfBounds, Ran, RowLimits, Run,
    StepFlags,
};
use refrain_kernels::{CommitEntry, Edits};

use crate::backend::{CudaBackend, CudaCompiled};
use crate::device_model::{DeviceModel, FetchedOutputs, ProgramId};
use crate::error::CudaError;
use crate::feed::{FEED_BYTES, FeedLayout, MAX_AHEAD, commit_state, messages};
use crate::options::LoopMode;
use crate::pump::StepResults;
use crate::repeat::STEPS_PER_BODY;

/// Time to wait for a result before the device thread checks for errors. It doubles with each check.
const FIRST_CHECK: Duration = Duration::from_micros(250);
/// Maximum time between two checks.
const LAST_CHECK: Duration = Duration::from_millis(20);
/// Time between two looks at the ring while the device repeats the steps.
const LOOP_NAP: Duration = Duration::from_micros(50);
/// Time to wait for a result of a loop before the first check: longer than most steps, so that the device thread sleeps.
const LOOP_CHECK: Duration = Duration::from_millis(1);
/// Driver queries per check. The simulated device executes a few kernels at each query.
const N_QUERIES: usize = 8;

const SEND: &str = "launching steps";
const CHECK: &str = "checking steps";
const DRAIN: &str = "waiting for steps launched ahead";

/// The run whose steps the device thread launches.
pub(crate) struct Followed {
    id: ProgramId,
    feedback: Feedback,
    /// Control block of the next step as the host knows it: rows that have ended appear to continue.
    control: Vec<u8>,
    /// Requested steps and edits that have not been launched, in order.
    requested: VecDeque<RequestedSteps>,
    /// How the body of the step ran that still needs its masks, in a run with masks.
    body: Option<Ran>,
    /// Masks of the next steps, in order.
    late: VecDeque<LateRows>,
    /// Steps launched before the loop that runs now.
    before_loop: Option<u64>,
}

/// Steps to launch, and edits to apply before them.
#[derive(Default)]
struct RequestedSteps {
    states: Vec<(usize, ByteEdit)>,
    edits: Vec<Edits>,
    n_steps: usize,
    /// Whether every row ends with these steps, at the latest.
    ends: bool,
}

impl Followed {
    pub(crate) fn control(&self) -> &[u8] {
        &self.control
    }

    fn apply(&mut self, edits: &Edits) {
        for (to, words) in edits.ranges() {
            let bytes: &[u8] = bytemuck::cast_slice(words);
            // Ranges before the control block belong to the header.
            let start = (4 * to).checked_sub(FEED_BYTES as usize);
            let place = start.and_then(|start| self.control.get_mut(start..start + bytes.len()));
            if let Some(place) = place {
                place.copy_from_slice(bytes);
            }
        }
    }

    /// Accounts for a launched step, which some rows sat out.
    fn advance(&mut self, held: &[usize]) {
        let words = self.control.get_mut(self.feedback.positions.range()).unwrap_or_default();
        for (row, word) in words.as_chunks_mut::<4>().0.iter_mut().enumerate() {
            let position = i32::from_le_bytes(*word);
            let is_over = position < 0 || held.contains(&row);
            *word = if is_over { position } else { position.saturating_add(1) }.to_le_bytes();
        }
    }

    /// Writes masks into the control block; returns the fields to upload.
    fn set_masks(&mut self, masks: &[(usize, Vec<u32>)]) -> Vec<Field> {
        let Some(all) = self.feedback.mask else { return Vec::new() };
        let mut fields: Vec<Field> = Vec::new();
        for (row, bits) in masks {
            let field = all.row(self.feedback.n_rows, *row);
            field.put(&mut self.control, bits);
            fields.push(field);
        }
        fields.sort_unstable_by_key(|field| field.offset);
        let mut joined: Vec<Field> = Vec::new();
        for field in fields {
            match joined.last_mut() {
                Some(last) if last.range().end == field.offset => last.len += field.len,
                _ => joined.push(field),
            }
        }
        if let [first, .., last] = joined[..]
            && joined.len() > MAX_PIECES
        {
            // The rows between them keep their masks, which the host knows too.
            joined = vec![Field { offset: first.offset, len: (last.range().end - first.offset) / 4 }];
        }
        joined
    }
}

/// Maximum number of separate uploads of masks: each needs a pinned slot of its own.
const MAX_PIECES: usize = 2;

impl DeviceModel {
    /// Uploads the first step's inputs.
    fn begin(&mut self, id: ProgramId, header: &[u8], control: Vec<u8>) -> Result<(), CudaError> {
        self.stream.set_limit(self.options.step_limit);
        let Some(program) = self.programs.get(&id) else { return Err(DeviceModel::gone()) };
        program.lowered()?;
        let Some(resident) = &mut self.resident else { return Err(DeviceModel::gone()) };
        let Some(feedback) = program.feedback else { return Err(DeviceModel::gone()) };
        if self.pump.n_pending() > 0 {
            // A failed run left these.
            self.pump.stop_loop();
            self.stream.synchronize().map_err(CudaError::driver(DRAIN))?;
        }
        self.pump.restart(&feedback).map_err(CudaError::driver("beginning a run"))?;
        let sent = resident.send_control(&mut self.stream, Some(header), &control);
        sent.map_err(CudaError::driver("uploading the control block"))?;
        let (requested, late) = (VecDeque::new(), VecDeque::new());
        self.followed =
            Some(Followed { id, feedback, control, requested, body: None, late, before_loop: None });
        Ok(())
    }

    /// Edits rows, after the launched steps.
    fn edit(&mut self, edits: &[Edits]) -> Result<(), CudaError> {
        let (Some(followed), Some(resident)) = (&mut self.followed, &mut self.resident) else {
            return Err(DeviceModel::gone());
        };
        let Some(program) = self.programs.get(&followed.id) else { return Err(DeviceModel::gone()) };
        let Some(launch) = &program.lowered()?.edit else { return Err(DeviceModel::gone()) };
        for edits in edits {
            let sent = resident.send_edits(&mut self.stream, launch, edits);
            sent.map_err(CudaError::driver("editing the rows of a run"))?;
            followed.apply(edits);
        }
        Ok(())
    }

    /// Launches the next step, whose inputs are already on the device. In a run with masks, launches only its body.
    fn send_next(&mut self) -> Result<Ran, CudaError> {
        self.n_decoded += 1;
        match self.followed.as_ref().is_some_and(|followed| followed.feedback.mask.is_some()) {
            true => self.send_part(BODY),
            false => self.send_last_part(BODY, &[]),
        }
    }

    /// Uploads the masks of the step whose body was launched, and launches its choice.
    fn send_choice(&mut self, body: Ran, late: &LateRows) -> Result<Ran, CudaError> {
        self.upload_masks(late).map_err(CudaError::driver("uploading masks"))?;
        Ok(body.then(self.send_last_part(CHOICE, &late.held)?))
    }

    /// Launches the part of a step that commits it.
    fn send_last_part(&mut self, part: usize, held: &[usize]) -> Result<Ran, CudaError> {
        if !self.pump.reserve() {
            return Err(CudaError::Mismatch { what: "runs", because: "the ring is full".into() });
        }
        let ran = self.send_part(part)?;
        if let Some(followed) = &mut self.followed {
            followed.advance(held);
        }
        Ok(ran)
    }

    fn send_part(&mut self, part: usize) -> Result<Ran, CudaError> {
        let Some(id) = self.followed.as_ref().map(|followed| followed.id) else {
            return Err(DeviceModel::gone());
        };
        let compared = if self.is_comparison_due() { self.send_compared(id, part)? } else { None };
        compared.map_or_else(|| self.enqueue_parts(id, &[], part..part + 1), Ok)
    }

    fn upload_masks(&mut self, late: &LateRows) -> Result<(), DriverError> {
        let (Some(followed), Some(resident)) = (&mut self.followed, &mut self.resident) else {
            return Ok(());
        };
        for field in followed.set_masks(&late.masks) {
            let to = resident.control.slice(field.offset as u64, 4 * field.len as u64)?;
            let bytes = followed.control.get(field.range()).unwrap_or_default();
            self.stream.stage(&mut resident.lease, &mut resident.staging, to, bytes)?;
        }
        let lowered = self.programs.get(&followed.id).and_then(|program| program.lowered().ok());
        if let (Some(launch), false) =
            (lowered.and_then(|lowered| lowered.edit.as_ref()), late.held.is_empty())
        {
            let layout = FeedLayout { n_rows: followed.feedback.n_rows };
            let mut edits = Edits::default();
            late.held.iter().for_each(|row| edits.push(layout.hold_word(*row) as u32, &[1]));
            resident.send_edits(&mut self.stream, launch, &edits)?;
        }
        Ok(())
    }

    /// Runs a single step as a run of its own.
    pub(crate) fn run_fed(
        &mut self,
        id: ProgramId,
        control: &[u8],
        feedback: &Feedback,
    ) -> Result<(Ran, FetchedOutputs), CudaError> {
        let Some(program) = self.programs.get(&id) else { return Err(DeviceModel::gone()) };
        program.lowered()?;
        program.check(control)?;
        let limits = RowLimits { n_positions: usize::MAX, n_choices: 1, ..RowLimits::default() };
        let rows = vec![(commit_state(Some(&limits)), &[][..]); feedback.n_rows];
        let header = FeedLayout { n_rows: feedback.n_rows }.header(0, &rows);
        self.begin(id, &header, control.to_vec())?;
        let sent = self.send_next().and_then(|ran| match feedback.mask {
            // Its masks are in the control block.
            Some(_) => self.send_choice(ran, &LateRows::default()),
            None => Ok(ran),
        });
        // The run is over even on an error: no step follows.
        self.followed = None;
        let ran = sent?;
        let results = self.pump.take(&mut self.stream, self.options.step_limit);
        let StepResults { entries, top } = results.map_err(CudaError::driver("a step"))?;
        if entries.iter().all(|entry| StepFlags(entry.flags).has(StepFlags::PAST_END)) {
            // Padding only: the results are still in the plan's output buffers.
            return Ok((ran, Vec::new()));
        }
        let tokens = entries.iter().flat_map(|entry| entry.token.to_le_bytes()).collect();
        let logprobs = entries.iter().flat_map(|entry| entry.logprob.to_le_bytes()).collect();
        let mut outputs = vec![(feedback.token, tokens), (feedback.logprob, logprobs)];
        if let Some(lists) = feedback.top {
            outputs.push((lists.ids, top.iter().flat_map(|(id, _)| id.to_le_bytes()).collect()));
            outputs
                .push((lists.logprobs, top.iter().flat_map(|(_, logprob)| logprob.to_le_bytes()).collect()));
        }
        Ok((ran, outputs))
    }

    /// Launches `n_steps` more steps after the requested ones, with edits before them.
    fn send_steps(&mut self, n_steps: usize, ends: bool, edits: Vec<Edits>) {
        if let Some(followed) = &mut self.followed {
            let states = Vec::new();
            followed.requested.push_back(RequestedSteps { states, edits, n_steps, ends });
        }
        self.send_requested();
    }

    /// Takes the masks of the oldest step without them, and launches what waits for them.
    fn supply(&mut self, late: LateRows) {
        if let Some(followed) = &mut self.followed {
            followed.late.push_back(late);
        }
        self.send_requested();
    }

    /// Launches the choice of the step whose body was launched, if its masks are there. Returns whether the next step
    /// may be launched.
    fn send_supplied(&mut self) -> bool {
        let Some(followed) = &mut self.followed else { return false };
        let Some(body) = followed.body.clone() else { return true };
        if self.pump.is_stopped() {
            return false;
        }
        let Some(late) = followed.late.pop_front() else { return false };
        followed.body = None;
        match self.send_choice(body, &late) {
            Ok(ran) => self.pump.sent(ran),
            Err(error) => self.pump.fail(error, true),
        }
        true
    }

    /// Defers state edits until the requested steps are launched; returns them if there are none.
    pub(crate) fn defer_state_edits(
        &mut self,
        states: Vec<(usize, ByteEdit)>,
    ) -> Option<Vec<(usize, ByteEdit)>> {
        match &mut self.followed {
            Some(followed) if !followed.requested.is_empty() => {
                followed.requested.push_back(RequestedSteps { states, ..RequestedSteps::default() });
                None
            }
            _ => Some(states),
        }
    }

    /// Launches the requested steps, or some of them. A graph that has to be recorded and a step that is to
    /// be compared both write to the ring, so they wait until all earlier steps are collected; the caller
    /// that collects the last one requests the remaining steps. Edits keep their position among the steps.
    fn send_requested(&mut self) {
        if !self.account_for_loop() {
            return;
        }
        while self.send_supplied() {
            let Some(followed) = &mut self.followed else { return };
            let id = followed.id;
            let Some(requested) = followed.requested.front_mut() else { return };
            if requested.n_steps == 0 && requested.states.is_empty() {
                followed.requested.pop_front();
                continue;
            }
            if self.pump.is_stopped() {
                return;
            }
            let (states, edits) =
                (std::mem::take(&mut requested.states), std::mem::take(&mut requested.edits));
            let edited = if states.is_empty() { Ok(()) } else { self.enqueue_state_edits(&states) };
            if let Err(error) = edited.and_then(|()| self.edit(&edits)) {
                return self.pump.fail(error, true);
            }
            if self
                .followed
                .as_ref()
                .and_then(|f| f.requested.front())
                .is_some_and(|requested| requested.n_steps == 0)
            {
                continue;
            }
            if self.options.loops == LoopMode::Device {
                match self.send_repeated(id) {
                    Ok(true) => return,
                    Ok(false) => {}
                    Err(error) => return self.pump.fail(error, true),
                }
                // The caller may have requested the whole reply.
                if self.pump.n_pending() >= MAX_AHEAD as u64 {
                    return;
                }
            }
            let uses_ring = self.wants_graph(id) || self.is_next_compared();
            if uses_ring && self.pump.n_pending() > 0 {
                return;
            }
            let sent = self.send_next();
            let Some(followed) = &mut self.followed else { return };
            match sent {
                Ok(ran) if followed.feedback.mask.is_some() => followed.body = Some(ran),
                Ok(ran) => self.pump.sent(ran),
                Err(error) => return self.pump.fail(error, true),
            }
            if let Some(requested) = followed.requested.front_mut() {
                requested.n_steps -= 1;
            }
        }
    }

    /// Launches a loop over the first requested steps, if they can be repeated on the device and nothing else is in
    /// flight.
    fn send_repeated(&mut self, id: ProgramId) -> Result<bool, CudaError> {
        let front = self.followed.as_ref().and_then(|followed| followed.requested.front());
        let Some(RequestedSteps { n_steps, ends, .. }) = front else { return Ok(false) };
        let body = STEPS_PER_BODY as usize;
        // A body runs whole: only a row that ends stops within it.
        let n = if *ends { *n_steps } else { n_steps / body * body };
        if n < body || self.pump.n_pending() > 0 {
            return Ok(false);
        }
        let before = self.pump.n_sent();
        let sent = self.send_loop(id, n)?;
        if let Some(followed) = self.followed.as_mut().filter(|_| sent) {
            followed.before_loop = Some(before);
        }
        Ok(sent)
    }

    /// Accounts for a loop that the caller has closed; false if one still runs.
    fn account_for_loop(&mut self) -> bool {
        if self.pump.is_looping() {
            return false;
        }
        let Some(followed) = &mut self.followed else { return true };
        let Some(before) = followed.before_loop.take() else { return true };
        let n_ran = self.pump.n_sent().saturating_sub(before);
        (0..n_ran).for_each(|_| followed.advance(&[]));
        self.n_decoded += n_ran;
        if let Some(requested) = followed.requested.front_mut() {
            requested.n_steps = requested.n_steps.saturating_sub(n_ran as usize);
        }
        true
    }

    /// Checks the steps in flight for errors.
    fn check_in_flight(&mut self) {
        // While a loop is open, the requested steps count as sent, but it may have ended before them.
        let is_looping = self.pump.is_looping();
        let n_sent = self.pump.n_sent();
        for _ in 0..N_QUERIES {
            match self.stream.is_done() {
                Ok(true) if is_looping => return,
                Ok(true) => return self.pump.done(n_sent),
                Ok(false) => {}
                Err(source) => {
                    return self.pump.fail(CudaError::Driver { step: STEP.into(), source }, false);
                }
            }
        }
    }

    /// Waits for all launched steps. Requested steps are not launched, but state edits among them are
    /// applied. Returns whether the body of a step was launched for nothing.
    pub(crate) fn drain(&mut self) -> Result<bool, CudaError> {
        let followed = self.followed.take();
        let has_body = followed.as_ref().is_some_and(|followed| followed.body.is_some());
        let requested = followed.map(|followed| followed.requested).unwrap_or_default();
        let mut requested = requested.iter().filter(|requested| !requested.states.is_empty());
        self.pump.stop_loop();
        let edited = requested.try_for_each(|requested| self.enqueue_state_edits(&requested.states));
        self.stream.synchronize().map_err(CudaError::driver(DRAIN))?;
        self.pump.close_loop(u64::MAX);
        self.pump.discard();
        edited.map(|()| has_body)
    }
}

const STEP: &str = "a step launched ahead";

/// Parts of a step with masks: up to the logits, and the choice. Another step has one part.
const BODY: usize = 0;
const CHOICE: usize = 1;

impl CudaBackend {
    /// Has `n` more steps of a run launched, without waiting for that.
    pub(crate) fn send_ahead(
        &mut self,
        compiled: &CudaCompiled,
        run: &mut Run,
        n: usize,
    ) -> Result<(), CudaError> {
        let out = |OutOfBounds { label, what, got, limit }| CudaError::OutOfRange { label, what, got, limit };
        let is_first = run.n_sent() == 0;
        if !is_first && self.running != Some(run.id()) {
            return Err(CudaError::Mismatch { what: "runs", because: "a later one has started".into() });
        }
        let checked = run.check(compiled.plan().bounds(), n).map_err(out);
        if is_first {
            self.finish_ahead(0)?;
            self.pump.reset();
            self.running = Some(run.id());
            self.may_have_body = run.is_late();
        }
        run.sent(n);
        let ends = run.is_requested_whole();
        if let Err(error) = checked {
            // Results of earlier steps may be available: they are collected first.
            self.pump.fail(error, true);
            return Ok(());
        }
        let edits = run.take_edits();
        if is_first {
            let (id, control) = (compiled.id, run.control().to_vec());
            let n_rows = run.feedback().n_rows;
            let row = |row: usize| {
                let limits = run.limits(row);
                (commit_state(limits), limits.map_or(&[][..], |limits| &limits.end))
            };
            let rows: Vec<_> = (0..n_rows).map(row).collect();
            let header = FeedLayout { n_rows }.header(0, &rows);
            return self.post(SEND, move |m| match m.begin(id, &header, control) {
                Ok(()) => m.send_steps(n, ends, Vec::new()),
                Err(error) => m.pump.fail(error, true),
            });
        }
        let edits = if edits.is_empty() { Vec::new() } else { messages(run, &edits) };
        let posted = self.post(SEND, move |m| m.send_steps(n, ends, edits));
        if let Err(error) = posted {
            self.pump.fail(error, true);
        }
        Ok(())
    }

    /// Gives the oldest step without masks its masks and has the rest of it launched, without waiting for that.
    pub(crate) fn supply_ahead(&mut self, run: &mut Run, late: LateRows) -> Result<(), CudaError> {
        if self.running != Some(run.id()) || !run.may_supply() {
            let because = "no step of it waits for masks".to_owned();
            return Err(CudaError::Mismatch { what: "runs", because });
        }
        run.supply(&late);
        self.post(SEND, move |m| m.supply(late))
    }

    /// Waits for the oldest uncollected step, polling the ring directly.
    pub(crate) fn take_ahead(&mut self, run: &mut Run) -> Result<CommittedStep, CudaError> {
        let ended = |because: &str| CudaError::Mismatch { what: "runs", because: because.to_owned() };
        if self.running != Some(run.id()) {
            return Err(ended("none has started"));
        }
        if run.awaits_masks() {
            return Err(ended("its oldest step waits for masks"));
        }
        let mut began = Instant::now();
        let (mut next_check, mut interval) = (FIRST_CHECK, FIRST_CHECK);
        let (n_requested, n_taken) = (run.n_sent(), run.n_taken());
        loop {
            // Order matters: an idle device thread has counted all steps it launched, and a failure comes
            // after results.
            let idle = self.pump.is_idle();
            let in_flight = self.pump.n_sent() > n_taken;
            let has_ended = self.pump.has_ended(in_flight);
            if let Some((StepResults { entries, top }, ran)) = self.pump.next(n_taken)? {
                run.taken();
                self.top_up(run)?;
                let rows = entries.into_iter().map(committed).collect();
                return Ok(CommittedStep { rows, top, ran });
            }
            if self.pump.close_loop(n_taken) {
                continue;
            }
            if has_ended && let Some(error) = self.pump.take_failure() {
                return Err(error);
            }
            if idle && !in_flight {
                if n_requested == n_taken {
                    return Err(ended("no step of it is in flight"));
                }
                self.post(SEND, DeviceModel::send_requested)?;
            }
            let waited = began.elapsed();
            if waited >= self.options.step_limit && !idle && self.worker.is_serving_another() {
                // A step's time starts at its launch, which may wait for other models.
                (began, next_check, interval) = (Instant::now(), FIRST_CHECK, FIRST_CHECK);
                continue;
            }
            if waited >= self.options.step_limit || self.pump.has_lost(n_taken) {
                let source = self.worker.overdue("a step", waited);
                return Err(CudaError::Driver { step: STEP.into(), source });
            }
            let is_looping = self.pump.is_looping();
            if waited >= next_check && idle && (!is_looping || waited >= LOOP_CHECK) {
                self.post(CHECK, DeviceModel::check_in_flight)?;
                interval = (2 * interval).min(LAST_CHECK);
                next_check = waited + interval;
            }
            match is_looping {
                // The device goes on without the host, as long as the ring has space.
                true => std::thread::sleep(LOOP_NAP),
                false => relax(waited),
            }
        }
    }

    /// Has more of the requested steps launched if few are in flight. Only if the caller may have requested more than may
    /// be in flight, because the device was to repeat them.
    fn top_up(&self, run: &Run) -> Result<(), CudaError> {
        let n_sent = self.pump.n_sent();
        let is_short = n_sent < run.n_sent() && n_sent <= run.n_taken() + MAX_AHEAD as u64 / 2;
        let may_send =
            self.options.loops == LoopMode::Device && !self.pump.is_looping() && self.pump.is_idle();
        match is_short && may_send {
            true => self.post(SEND, DeviceModel::send_requested),
            false => Ok(()),
        }
    }

    /// Waits until no step of the current run is in flight; returns the number of uncollected steps if
    /// `n_taken` were collected.
    pub(crate) fn finish_ahead(&mut self, n_taken: u64) -> Result<usize, CudaError> {
        if self.running.take().is_none() {
            return Ok(0);
        }
        self.pump.close_loop(n_taken);
        // A failed step may have left a ring entry that is never written.
        let is_quiet = self.pump.is_idle() && self.pump.n_pending() == 0 && self.pump.n_sent() == n_taken;
        // A loop that ended early has left requested steps, which nothing may wait for.
        let is_quiet = is_quiet && !self.pump.has_looped();
        let mut has_body = false;
        let (may_have_body, has_edits) =
            (std::mem::take(&mut self.may_have_body), std::mem::take(&mut self.has_deferred_edits));
        if !is_quiet || has_edits || may_have_body {
            self.pump.stop();
            self.pump.stop_loop();
            has_body = self.call(DRAIN, self.options.step_limit, DeviceModel::drain)?;
        }
        match self.pump.take_failure() {
            Some(error) => Err(error),
            None => Ok(self.pump.n_sent().saturating_sub(n_taken) as usize + usize::from(has_body)),
        }
    }
}

/// `None` for a row that had already ended.
fn committed(entry: CommitEntry) -> Option<Committed> {
    let (token, logprob, flags) = (entry.token as u32, entry.logprob, StepFlags(entry.flags));
    // The entry holds the position of the next token.
    let position = usize::try_from(entry.position).map_or(0, |next| next.saturating_sub(1));
    (!flags.has(StepFlags::PAST_END)).then_some(Committed { token, logprob, position, flags })
}

/// Waits with increasing patience: a token of a small model takes less time than a sleep.
fn relax(waited: Duration) {
    match waited.as_micros() {
        0..100 => std::hint::spin_loop(),
        100..20_000 => std::thread::yield_now(),
        _ => std::thread::sleep(Duration::from_micros(100)),
    }
}
