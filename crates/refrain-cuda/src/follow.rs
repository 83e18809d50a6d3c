//! Decode steps that feed themselves: sent by the device thread, taken by whoever asks for tokens.
//!
//! The run belongs to the taker: [`Run`] knows its rows, what was sent and what was taken. The device thread has what it
//! needs to send the next step ([`Followed`]), and the [`Pump`](crate::pump::Pump) is the way between the two.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use refrain_graph::{
    ByteEdit, Committed, CommittedStep, Feedback, OutOfBounds, Ran, RowLimits, Run, StepFlags,
};
use refrain_kernels::{CommitEntry, Edits};

use crate::backend::{CudaBackend, CudaCompiled};
use crate::error::CudaError;
use crate::feed::{FEED_BYTES, FeedLayout, commit_state, messages};
use crate::machine::{Found, Machine, ProgramId};

/// How long a result is waited for before the device thread is asked to look for errors; then twice that, and so on.
const FIRST_LOOK: Duration = Duration::from_micros(250);
/// The longest between two looks.
const LAST_LOOK: Duration = Duration::from_millis(20);
/// How often one look asks the driver. The simulated device gets a few kernels further each time.
const ASKS: usize = 8;

const SEND: &str = "sending steps";
const LOOK: &str = "looking after steps";
const SETTLE: &str = "waiting for steps sent ahead";

/// The run whose steps the device thread sends.
pub(crate) struct Followed {
    id: ProgramId,
    feedback: Feedback,
    /// The control block of the next step as far as the host knows it: a row that has ended seems to go on.
    control: Vec<u8>,
    /// What was asked for and not sent yet, in order.
    owed: VecDeque<Owed>,
}

/// Steps to send, and what changes in front of them.
#[derive(Default)]
struct Owed {
    states: Vec<(usize, ByteEdit)>,
    edits: Vec<Edits>,
    n_steps: usize,
}

impl Followed {
    pub(crate) fn control(&self) -> &[u8] {
        &self.control
    }

    fn apply(&mut self, edits: &Edits) {
        for (to, words) in edits.pieces() {
            let bytes: &[u8] = bytemuck::cast_slice(words);
            // Pieces before the control block are of the header.
            let start = (4 * to).checked_sub(FEED_BYTES as usize);
            let place = start.and_then(|start| self.control.get_mut(start..start + bytes.len()));
            if let Some(place) = place {
                place.copy_from_slice(bytes);
            }
        }
    }

    /// A step was sent.
    fn advance(&mut self) {
        let words = self.control.get_mut(self.feedback.positions.range()).unwrap_or_default();
        for word in words.as_chunks_mut::<4>().0 {
            let position = i32::from_le_bytes(*word);
            *word = if position < 0 { position } else { position.saturating_add(1) }.to_le_bytes();
        }
    }
}

impl Machine {
    /// Brings the first step's inputs to the device.
    fn begin(&mut self, id: ProgramId, header: &[u8], control: Vec<u8>) -> Result<(), CudaError> {
        self.stream.set_limit(self.options.step_limit);
        let Some(program) = self.programs.get(&id) else { return Err(Machine::gone()) };
        program.lowered()?;
        let Some(resident) = &mut self.resident else { return Err(Machine::gone()) };
        let Some(feedback) = program.feedback else { return Err(Machine::gone()) };
        if self.pump.n_pending() > 0 {
            // Left by a run that failed.
            self.stream.synchronize().map_err(CudaError::driver(SETTLE))?;
        }
        self.pump.restart(feedback.n_rows).map_err(CudaError::driver("beginning a run"))?;
        let sent = resident.send_control(&mut self.stream, Some(header), &control);
        sent.map_err(CudaError::driver("sending the control block"))?;
        self.followed = Some(Followed { id, feedback, control, owed: VecDeque::new() });
        Ok(())
    }

    /// Changes rows behind the steps that were sent.
    fn edit(&mut self, edits: &[Edits]) -> Result<(), CudaError> {
        let (Some(followed), Some(resident)) = (&mut self.followed, &mut self.resident) else {
            return Err(Machine::gone());
        };
        let Some(program) = self.programs.get(&followed.id) else { return Err(Machine::gone()) };
        let Some(launch) = &program.lowered()?.edit else { return Err(Machine::gone()) };
        for edits in edits {
            let sent = resident.send_edits(&mut self.stream, launch, edits);
            sent.map_err(CudaError::driver("changing the rows of a run"))?;
            followed.apply(edits);
        }
        Ok(())
    }

    /// Sends the next step, whose inputs are on the device already.
    fn send_next(&mut self) -> Result<Ran, CudaError> {
        let Some(id) = self.followed.as_ref().map(|followed| followed.id) else {
            return Err(Machine::gone());
        };
        if !self.pump.reserve() {
            return Err(CudaError::Mismatch { what: "runs", because: "the ring has no room".into() });
        }
        self.n_decoded += 1;
        let compared = if self.is_comparison_due() { self.send_compared(id)? } else { None };
        let ran = compared.map_or_else(|| self.enqueue(id, &[]), Ok)?;
        if let Some(followed) = &mut self.followed {
            followed.advance();
        }
        Ok(ran)
    }

    /// A run of one step.
    pub(crate) fn run_fed(
        &mut self,
        id: ProgramId,
        control: &[u8],
        feedback: &Feedback,
    ) -> Result<(Ran, Found), CudaError> {
        let Some(program) = self.programs.get(&id) else { return Err(Machine::gone()) };
        program.lowered()?;
        program.check(control)?;
        let limits = RowLimits { n_positions: usize::MAX, n_choices: 1, ..RowLimits::default() };
        let rows = vec![(commit_state(Some(&limits)), &[][..]); feedback.n_rows];
        let header = FeedLayout { n_rows: feedback.n_rows }.header(0, &rows);
        self.begin(id, &header, control.to_vec())?;
        let sent = self.send_next();
        // Over, however it ends: nothing follows this step.
        self.followed = None;
        let ran = sent?;
        let entries = self.pump.take(&mut self.stream, self.options.step_limit);
        let entries = entries.map_err(CudaError::driver("a step"))?;
        if entries.iter().all(|entry| StepFlags(entry.flags).has(StepFlags::PAST_END)) {
            // Padding: what came out of it is still where the plan put it.
            return Ok((ran, Vec::new()));
        }
        let tokens = entries.iter().flat_map(|entry| entry.token.to_le_bytes()).collect();
        let logprobs = entries.iter().flat_map(|entry| entry.logprob.to_le_bytes()).collect();
        Ok((ran, vec![(feedback.token, tokens), (feedback.logprob, logprobs)]))
    }

    /// Sends `n` more steps behind those that are owed, with changes in front of them.
    fn send_steps(&mut self, n_steps: usize, edits: Vec<Edits>) {
        if let Some(followed) = &mut self.followed {
            followed.owed.push_back(Owed { edits, n_steps, ..Owed::default() });
        }
        self.send_owed();
    }

    /// Has edits of states wait behind the steps that are owed; gives them back where none is.
    pub(crate) fn owe_state_edits(
        &mut self,
        states: Vec<(usize, ByteEdit)>,
    ) -> Option<Vec<(usize, ByteEdit)>> {
        match &mut self.followed {
            Some(followed) if !followed.owed.is_empty() => {
                followed.owed.push_back(Owed { states, ..Owed::default() });
                None
            }
            _ => Some(states),
        }
    }

    /// Sends what is owed, or a part of it: while a graph has to be made or a step is to be compared, only when all those
    /// before were taken, since both write to the ring. Whoever takes the last of them asks for the rest. Changes keep
    /// their place among the steps.
    fn send_owed(&mut self) {
        while let Some(followed) = &mut self.followed {
            let id = followed.id;
            let Some(owed) = followed.owed.front_mut() else { return };
            if owed.n_steps == 0 && owed.states.is_empty() {
                followed.owed.pop_front();
                continue;
            }
            if self.pump.is_stopped() {
                return;
            }
            let (states, edits) = (std::mem::take(&mut owed.states), std::mem::take(&mut owed.edits));
            let edited = if states.is_empty() { Ok(()) } else { self.enqueue_state_edits(&states) };
            if let Err(error) = edited.and_then(|()| self.edit(&edits)) {
                return self.pump.fail(error, true);
            }
            if self.followed.as_ref().and_then(|f| f.owed.front()).is_some_and(|owed| owed.n_steps == 0) {
                continue;
            }
            let uses_ring = self.wants_graph(id) || self.is_next_compared();
            if uses_ring && self.pump.n_pending() > 0 {
                return;
            }
            match self.send_next() {
                Ok(ran) => self.pump.sent(ran),
                Err(error) => return self.pump.fail(error, true),
            }
            if let Some(owed) = self.followed.as_mut().and_then(|followed| followed.owed.front_mut()) {
                owed.n_steps -= 1;
            }
        }
    }

    /// Looks for errors of the steps under way.
    fn look(&mut self) {
        let n_sent = self.pump.n_sent();
        for _ in 0..ASKS {
            match self.stream.is_done() {
                Ok(true) => return self.pump.done(n_sent),
                Ok(false) => {}
                Err(source) => {
                    return self.pump.fail(CudaError::Driver { step: STEP.into(), source }, false);
                }
            }
        }
    }

    /// Waits for every step that was sent. Steps that are owed are not sent; edits of states behind them are made.
    pub(crate) fn settle(&mut self) -> Result<(), CudaError> {
        let owed = self.followed.take().map(|followed| followed.owed).unwrap_or_default();
        let mut owed = owed.iter().filter(|owed| !owed.states.is_empty());
        let edited = owed.try_for_each(|owed| self.enqueue_state_edits(&owed.states));
        self.stream.synchronize().map_err(CudaError::driver(SETTLE))?;
        self.pump.forget();
        edited
    }
}

const STEP: &str = "a step sent ahead";

impl CudaBackend {
    /// Has `n` more steps of a run sent, without waiting for that.
    pub(crate) fn send_ahead(
        &mut self,
        compiled: &CudaCompiled,
        run: &mut Run,
        n: usize,
    ) -> Result<(), CudaError> {
        let out = |OutOfBounds { label, what, got, limit }| CudaError::OutOfRange { label, what, got, limit };
        let is_first = run.n_sent() == 0;
        if !is_first && self.running != Some(run.id()) {
            return Err(CudaError::Mismatch { what: "runs", because: "another one has begun since".into() });
        }
        let checked = run.check(compiled.plan().bounds(), n).map_err(out);
        if is_first {
            self.finish_ahead(0)?;
            self.pump.reset();
            self.running = Some(run.id());
        }
        run.sent(n);
        if let Err(error) = checked {
            // Results of steps sent before may be there: they are taken first.
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
            return self.post(SEND, move |machine| match machine.begin(id, &header, control) {
                Ok(()) => machine.send_steps(n, Vec::new()),
                Err(error) => machine.pump.fail(error, true),
            });
        }
        let edits = if edits.is_empty() { Vec::new() } else { messages(run, &edits) };
        let posted = self.post(SEND, move |machine| machine.send_steps(n, edits));
        if let Err(error) = posted {
            self.pump.fail(error, true);
        }
        Ok(())
    }

    /// Waits for the oldest step that was not taken, looking at the ring itself.
    pub(crate) fn take_ahead(&mut self, run: &mut Run) -> Result<CommittedStep, CudaError> {
        let ended = |because: &str| CudaError::Mismatch { what: "runs", because: because.to_owned() };
        if self.running != Some(run.id()) {
            return Err(ended("none has begun"));
        }
        let mut began = Instant::now();
        let (mut next_look, mut interval) = (FIRST_LOOK, FIRST_LOOK);
        let (n_asked, n_taken) = (run.n_sent(), run.n_taken());
        loop {
            // In this order: what is idle has counted all that it sent, and a failure comes behind results.
            let idle = self.pump.is_idle();
            let under_way = self.pump.n_sent() > n_taken;
            let is_over = self.pump.is_over(under_way);
            if let Some((entries, ran)) = self.pump.next(n_taken)? {
                run.taken();
                let rows = entries.into_iter().map(committed).collect();
                return Ok(CommittedStep { rows, ran });
            }
            if is_over && let Some(error) = self.pump.take_failure() {
                return Err(error);
            }
            if idle && !under_way {
                if n_asked == n_taken {
                    return Err(ended("no step of it is under way"));
                }
                self.post(SEND, Machine::send_owed)?;
            }
            let waited = began.elapsed();
            if waited >= self.options.step_limit && !idle && self.worker.is_serving_another() {
                // The time of a step begins when it is sent, which waits for other models.
                (began, next_look, interval) = (Instant::now(), FIRST_LOOK, FIRST_LOOK);
                continue;
            }
            if waited >= self.options.step_limit || self.pump.has_lost(n_taken) {
                let source = self.worker.overdue("a step", waited);
                return Err(CudaError::Driver { step: STEP.into(), source });
            }
            if waited >= next_look && idle {
                self.post(LOOK, Machine::look)?;
                interval = (2 * interval).min(LAST_LOOK);
                next_look = waited + interval;
            }
            relax(waited);
        }
    }

    /// Waits until nothing of the run that has begun is under way; how many steps nobody took, if `n_taken` were.
    pub(crate) fn finish_ahead(&mut self, n_taken: u64) -> Result<usize, CudaError> {
        if self.running.take().is_none() {
            return Ok(0);
        }
        // A step that failed may have left a place in the ring that nothing will come to.
        let quiet = self.pump.is_idle() && self.pump.n_pending() == 0 && self.pump.n_sent() == n_taken;
        if !quiet || std::mem::take(&mut self.owes_edits) {
            self.pump.stop();
            self.call(SETTLE, self.options.step_limit, Machine::settle)?;
        }
        match self.pump.take_failure() {
            Some(error) => Err(error),
            None => Ok(self.pump.n_sent().saturating_sub(n_taken) as usize),
        }
    }
}

/// `None` for a row that had ended before.
fn committed(entry: CommitEntry) -> Option<Committed> {
    let (token, logprob, flags) = (entry.token as u32, entry.logprob, StepFlags(entry.flags));
    // The entry has the position of the next token.
    let position = usize::try_from(entry.position).map_or(0, |next| next.saturating_sub(1));
    (!flags.has(StepFlags::PAST_END)).then_some(Committed { token, logprob, position, flags })
}

/// A token of a small model takes less than a sleep.
fn relax(waited: Duration) {
    match waited.as_micros() {
        0..100 => std::hint::spin_loop(),
        100..20_000 => std::thread::yield_now(),
        _ => std::thread::sleep(Duration::from_micros(100)),
    }
}
