//! Decode steps that feed themselves: sent by the device thread, taken by whoever asks for tokens.

use std::time::{Duration, Instant};

use refrain_graph::{Committed, Feedback, Ran, Run, RunLimits, StepFlags};
use refrain_kernels::{CommitEntry, CommitState};

use crate::backend::{CudaBackend, CudaCompiled};
use crate::error::CudaError;
use crate::feed::header;
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
    /// The control block as the host last knew it: the block table is current.
    pub(crate) control: Vec<u8>,
    /// Position of the first step.
    start: i32,
    n_sent: i32,
}

/// How many tokens a run may commit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Length {
    One,
    Open,
}

impl Machine {
    /// Brings the first step's inputs to the device.
    fn begin(
        &mut self,
        id: ProgramId,
        control: &[u8],
        limits: &RunLimits,
        length: Length,
    ) -> Result<(), CudaError> {
        self.stream.set_limit(self.options.step_limit);
        let Some(program) = self.programs.get(&id) else { return Err(Machine::gone()) };
        program.lowered()?;
        let Some(resident) = &mut self.resident else { return Err(Machine::gone()) };
        let Some(feedback) = program.feedback else { return Err(Machine::gone()) };
        program.check(control)?;
        if self.pump.n_pending() > 0 {
            // Left by a run that failed.
            self.stream.synchronize().map_err(CudaError::driver(SETTLE))?;
        }
        self.pump.restart();
        let word = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let state = CommitState {
            done: 0,
            n_left: if length == Length::One { 1 } else { u32::MAX },
            limit: word(limits.n_positions),
            window: word(limits.window),
            history_next: word(limits.history_next),
            unused: [0; 3],
        };
        let header = header(0, &state, &limits.end);
        let sent = resident.send_control(&mut self.stream, Some(header), control);
        sent.map_err(CudaError::driver("sending the control block"))?;
        let start = control.get(feedback.positions.range()).and_then(|w| w.try_into().ok());
        let start = start.map_or(-1, i32::from_le_bytes);
        self.followed = Some(Followed { id, control: control.to_vec(), start, n_sent: 0 });
        Ok(())
    }

    /// Sends the next step, whose inputs are on the device already.
    fn send_next(&mut self) -> Result<Ran, CudaError> {
        let Some(followed) = &mut self.followed else { return Err(Machine::gone()) };
        let (id, position) = (followed.id, followed.start.saturating_add(followed.n_sent));
        followed.n_sent += 1;
        if !self.pump.reserve() {
            return Err(CudaError::Mismatch { what: "runs", because: "the ring has no room".into() });
        }
        self.n_decoded += 1;
        if self.is_comparison_due()
            && let Some(ran) = self.send_compared(id, position)?
        {
            return Ok(ran);
        }
        self.enqueue(id, &[])
    }

    /// A run of one step.
    pub(crate) fn run_fed(
        &mut self,
        id: ProgramId,
        control: &[u8],
        feedback: &Feedback,
    ) -> Result<(Ran, Found), CudaError> {
        let limits = RunLimits { n_positions: usize::MAX, ..RunLimits::default() };
        self.begin(id, control, &limits, Length::One)?;
        let sent = self.send_next();
        // Over, however it ends: nothing follows this step.
        self.followed = None;
        let ran = sent?;
        let entry = self.pump.take(&mut self.stream, self.options.step_limit);
        let entry = entry.map_err(CudaError::driver("a step"))?;
        if StepFlags(entry.flags).has(StepFlags::PAST_END) {
            // Padding: what came out of it is still where the plan put it.
            return Ok((ran, Vec::new()));
        }
        let (token, logprob) = (entry.token.to_le_bytes(), entry.logprob.to_le_bytes());
        Ok((ran, vec![(feedback.token, token.to_vec()), (feedback.logprob, logprob.to_vec())]))
    }

    /// Makes sure that the next `n` steps stay inside of their blocks, with a new table if there is one.
    fn extend(&mut self, n: usize, table: Option<&[u8]>) -> Result<(), CudaError> {
        let (Some(followed), Some(resident)) = (&mut self.followed, &mut self.resident) else {
            return Err(Machine::gone());
        };
        let Some(program) = self.programs.get(&followed.id) else { return Err(Machine::gone()) };
        let Some(feedback) = program.feedback else { return Err(Machine::gone()) };
        let last = followed.start.saturating_add(followed.n_sent).saturating_add(n as i32 - 1);
        followed.control[feedback.positions.range()].copy_from_slice(&last.to_le_bytes());
        if let Some(table) = table {
            followed.control[feedback.tables.range()].copy_from_slice(table);
        }
        program.check(&followed.control)?;
        if let Some(table) = table {
            let sent = resident.send_field(&mut self.stream, feedback.tables.offset, table);
            sent.map_err(CudaError::driver("sending the block table"))?;
        }
        Ok(())
    }

    /// Sends `n` steps, or fewer: while a graph has to be made or a step is to be compared, only when all those before
    /// were taken, since both write to the ring. Whoever takes the last of them asks for the rest.
    fn send_steps(&mut self, n: usize, table: Option<&[u8]>) {
        if self.pump.is_stopped() {
            return;
        }
        if let Err(error) = self.extend(n, table) {
            return self.pump.fail(error, true);
        }
        for _ in 0..n {
            let id = self.followed.as_ref().map(|f| f.id);
            let uses_ring = id.is_some_and(|id| self.wants_graph(id)) || self.is_next_compared();
            if self.pump.is_stopped() || (uses_ring && self.pump.n_pending() > 0) {
                break;
            }
            match self.send_next() {
                Ok(ran) => self.pump.sent(ran),
                Err(error) => return self.pump.fail(error, true),
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

    /// Waits for every step that was sent.
    pub(crate) fn settle(&mut self) -> Result<(), CudaError> {
        self.followed = None;
        self.stream.synchronize().map_err(CudaError::driver(SETTLE))?;
        self.pump.restart();
        Ok(())
    }
}

const STEP: &str = "a step sent ahead";

/// A run as the thread that takes its results sees it.
#[derive(Debug)]
pub(crate) struct Taking {
    id: ProgramId,
    n_asked: u64,
    n_taken: u64,
}

impl CudaBackend {
    /// Has `n` more steps of a run sent, without waiting for that.
    pub(crate) fn send_ahead(
        &mut self,
        compiled: &CudaCompiled,
        run: &mut Run,
        n: usize,
    ) -> Result<(), CudaError> {
        if run.n_sent() == 0 {
            self.finish_ahead()?;
            self.pump.reset();
            let (id, control, limits) = (compiled.id, run.control().to_vec(), run.limits().clone());
            run.changed_table();
            run.sent(n);
            self.taking = Some(Taking { id, n_asked: n as u64, n_taken: 0 });
            return self.post(SEND, move |machine| {
                match machine.begin(id, &control, &limits, Length::Open) {
                    Ok(()) => machine.send_steps(n, None),
                    Err(error) => machine.pump.fail(error, true),
                }
            });
        }
        let Some(taking) = self.taking.as_mut().filter(|t| t.id == compiled.id) else {
            return Err(CudaError::Mismatch { what: "runs", because: "another one has begun since".into() });
        };
        taking.n_asked += n as u64;
        run.sent(n);
        let table = run.changed_table().map(<[u8]>::to_vec);
        let posted = self.post(SEND, move |machine| machine.send_steps(n, table.as_deref()));
        // Results of steps sent before may be there: they are taken first.
        if let Err(error) = posted {
            self.pump.fail(error, true);
        }
        Ok(())
    }

    /// Waits for the oldest step that was not taken, looking at the ring itself.
    pub(crate) fn take_ahead(&mut self) -> Result<Committed, CudaError> {
        let ended = |because: &str| CudaError::Mismatch { what: "runs", because: because.to_owned() };
        let began = Instant::now();
        let (mut next_look, mut interval) = (FIRST_LOOK, FIRST_LOOK);
        loop {
            let Some(taking) = &mut self.taking else { return Err(ended("none has begun")) };
            let (n_asked, n_taken) = (taking.n_asked, taking.n_taken);
            // In this order: what is idle has counted all that it sent, and a failure comes behind results.
            let idle = self.pump.is_idle();
            let under_way = self.pump.n_sent() > n_taken;
            let is_over = self.pump.is_over(under_way);
            if let Some((entry, ran)) = self.pump.next(n_taken)? {
                taking.n_taken += 1;
                return committed(entry, ran).ok_or_else(|| ended("it had ended before this step"));
            }
            if is_over && let Some(error) = self.pump.take_failure() {
                return Err(error);
            }
            if idle && !under_way {
                let owed = (n_asked - n_taken) as usize;
                if owed == 0 {
                    return Err(ended("no step of it is under way"));
                }
                self.post(SEND, move |machine| machine.send_steps(owed, None))?;
            }
            let waited = began.elapsed();
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

    /// Waits until nothing of a run is under way; how many steps nobody took.
    pub(crate) fn finish_ahead(&mut self) -> Result<usize, CudaError> {
        let Some(taking) = self.taking.take() else { return Ok(0) };
        // A step that failed may have left a place in the ring that nothing will come to.
        let quiet = self.pump.is_idle() && self.pump.n_pending() == 0 && self.pump.n_sent() == taking.n_taken;
        if !quiet {
            self.pump.stop();
            self.call(SETTLE, self.options.step_limit, Machine::settle)?;
        }
        match self.pump.take_failure() {
            Some(error) => Err(error),
            None => Ok((self.pump.n_sent() - taking.n_taken) as usize),
        }
    }
}

/// `None` for a step behind the end of its run.
fn committed(entry: CommitEntry, ran: Ran) -> Option<Committed> {
    let (token, logprob, flags) = (entry.token as u32, entry.logprob, StepFlags(entry.flags));
    // The entry has the position of the next token.
    let position = usize::try_from(entry.position).map_or(0, |next| next.saturating_sub(1));
    (!flags.has(StepFlags::PAST_END)).then_some(Committed { token, logprob, position, flags, ran })
}

/// A token of a small model takes less than a sleep.
fn relax(waited: Duration) {
    match waited.as_micros() {
        0..100 => std::hint::spin_loop(),
        100..20_000 => std::thread::yield_now(),
        _ => std::thread::sleep(Duration::from_micros(100)),
    }
}
