//! Queued steps: each comes with its own control block and is sent before the results of those in flight are asked for.
//!
//! ```text
//! caller        copies the control block and posts it      ...      collects the oldest step
//! device thread checks it, uploads it from a pinned slot, launches, copies outputs to a pinned slot, records an event
//! stream        upload 1 | graph 1 | outputs 1 | upload 2 | graph 2 | outputs 2 | ...
//! ```
//!
//! A step that cannot be sent ends the queue: nothing queued behind it is sent, since it would find states that lack that
//! step. Whoever collects gets the results of the steps before it, then its error.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use refrain_driver::{Buf, DriverError, Returns};
use refrain_graph::{BufferId, Collected, Plan, Ran, RunError, StepQueue, nothing_queued};

use crate::backend::{CudaBackend, CudaCompiled};
use crate::error::CudaError;
use crate::machine::{Machine, ProgramId};

/// The most steps in flight. With two, the next one is there when a step ends; the third covers a late host. Control blocks
/// travel through one pinned slot more than that.
pub(crate) const MAX_QUEUED: usize = 3;
/// The most bytes of outputs that a step may ask for.
const OUTPUT_BYTES: usize = 4096;

const STEP: &str = "a queued step";
pub(crate) const COLLECT: &str = "collecting a queued step";

/// What queued steps have cost the device thread.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueStats {
    /// Steps that were sent.
    pub n_steps: u64,
    /// The most that were in flight at once.
    pub most_in_flight: usize,
    /// How long sending them took.
    pub took: Duration,
}

/// Steps that were sent and not collected, on the device thread.
#[derive(Default)]
pub(crate) struct SentSteps {
    returns: Option<Returns>,
    /// How each was sent; an error is the last.
    steps: VecDeque<Result<Ran, CudaError>>,
    pub(crate) stats: QueueStats,
}

impl SentSteps {
    fn has_failed(&self) -> bool {
        matches!(self.steps.back(), Some(Err(_)))
    }
}

/// Part of an output buffer.
#[derive(Clone, Copy, Debug)]
struct OutputPart {
    buffer: BufferId,
    start: u64,
    bytes: u64,
}

impl Machine {
    /// Sends a step behind those in flight, unless one of these could not be sent.
    fn send_queued(&mut self, id: ProgramId, control: &[u8], outputs: &[OutputPart]) {
        if self.queued.has_failed() {
            return;
        }
        let began = Instant::now();
        let sent = self.try_send_queued(id, control, outputs);
        self.queued.steps.push_back(sent);
        let stats = &mut self.queued.stats;
        stats.n_steps += 1;
        stats.took += began.elapsed();
        stats.most_in_flight = stats.most_in_flight.max(self.queued.steps.len());
    }

    fn try_send_queued(
        &mut self,
        id: ProgramId,
        control: &[u8],
        outputs: &[OutputPart],
    ) -> Result<Ran, CudaError> {
        self.stream.set_limit(self.options.step_limit);
        self.cache.set_in_flight(self.options.step_limit);
        let ran = self.send_behind(id, control);
        self.cache.set_in_flight(Duration::ZERO);
        let ran = ran?;
        let failed = |source| CudaError::Driver { step: STEP.into(), source };
        let bufs = self.output_bufs(id, outputs)?;
        if self.queued.returns.is_none() {
            let ctx = self.stream.context().clone();
            self.queued.returns = Some(Returns::new(&ctx, MAX_QUEUED, OUTPUT_BYTES).map_err(failed)?);
        }
        let (Some(returns), Some(resident)) = (&mut self.queued.returns, &mut self.resident) else {
            return Err(Machine::gone());
        };
        self.stream.send_back(&mut resident.lease, returns, &bufs).map_err(failed)?;
        Ok(ran)
    }

    /// Sends inputs and step; one that is due to be compared runs both ways.
    fn send_behind(&mut self, id: ProgramId, control: &[u8]) -> Result<Ran, CudaError> {
        let nth = self.queued.stats.n_steps + 1;
        let is_due = self.options.verify_every.is_some_and(|n| nth.is_multiple_of(n.get().into()));
        if is_due && !self.options.profile {
            self.send_inputs(id, control)?;
            if let Some(ran) = self.send_queued_compared(id)? {
                return Ok(ran);
            }
            return self.enqueue(id, control);
        }
        self.send(id, control)
    }

    fn output_bufs(&self, id: ProgramId, outputs: &[OutputPart]) -> Result<Vec<Buf>, CudaError> {
        let (Some(program), Some(resident)) = (self.programs.get(&id), &self.resident) else {
            return Err(Machine::gone());
        };
        let pinned = program.results()?;
        let place = |part: &OutputPart| -> Result<Buf, DriverError> {
            let whole = match pinned.get(&part.buffer) {
                Some(buf) => *buf,
                None => resident.buffer(&program.plan, part.buffer)?,
            };
            whole.slice(part.start, part.bytes)
        };
        outputs.iter().map(place).collect::<Result<_, _>>().map_err(CudaError::driver(STEP))
    }

    /// Waits for the oldest queued step.
    fn collect_queued(&mut self) -> Result<(Ran, Vec<u8>), CudaError> {
        let none = || CudaError::Mismatch { what: "queues", because: "no step is queued".into() };
        let ran = self.queued.steps.pop_front().ok_or_else(none)?;
        let taken = ran.and_then(|ran| {
            let returns = self.queued.returns.as_mut().ok_or_else(none)?;
            let bytes = returns.take(self.options.step_limit).map_err(CudaError::driver(STEP))?;
            Ok((ran, bytes))
        });
        if taken.is_err() {
            // An error of the step stands before one of those behind it.
            let _ = self.abandon_queued();
        }
        taken
    }

    /// Waits for all queued steps and forgets them.
    pub(crate) fn abandon_queued(&mut self) -> Result<(), CudaError> {
        self.queued.steps.clear();
        // Slots that were not taken are given up with the rest; the stream keeps them until its work is done.
        self.queued.returns = None;
        self.stream.synchronize().map_err(CudaError::driver("waiting for queued steps"))
    }
}

/// Control blocks on their way to the device thread, used again when they are back.
#[derive(Clone, Default)]
pub(crate) struct ControlPool(Arc<Mutex<Vec<Vec<u8>>>>);

impl ControlPool {
    fn filled(&self, bytes: &[u8]) -> Vec<u8> {
        let mut block = self.0.lock().unwrap_or_else(PoisonError::into_inner).pop().unwrap_or_default();
        block.clear();
        block.extend_from_slice(bytes);
        block
    }

    fn give_back(&self, block: Vec<u8>) {
        let mut blocks = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if blocks.len() <= MAX_QUEUED {
            blocks.push(block);
        }
    }
}

impl CudaBackend {
    /// Has a step sent behind those in flight, without waiting for that.
    pub(crate) fn queue_ahead(
        &mut self,
        compiled: &CudaCompiled,
        control: &[u8],
        outputs: &[usize],
        queue: &mut StepQueue,
    ) -> Result<(), CudaError> {
        let refuse = |because: String| Err(CudaError::Mismatch { what: "queues", because });
        if queue.len() >= MAX_QUEUED {
            return refuse(format!("{} steps are in flight, the most there may be", queue.len()));
        }
        let parts: Vec<OutputPart> =
            outputs.iter().map(|output| output_part(compiled.plan(), *output)).collect::<Result<_, _>>()?;
        let total: u64 = parts.iter().map(|part| part.bytes).sum();
        if total > OUTPUT_BYTES as u64 {
            return refuse(format!("outputs of {total} bytes are asked for, {OUTPUT_BYTES} can be"));
        }
        // Who began a run has not finished it: what it took is not known here, and nobody asks how many it did not.
        self.finish_ahead(0)?;
        let sizes = parts.iter().map(|part| part.bytes as usize).collect();
        let (id, pool) = (compiled.id, self.control_pool.clone());
        let control = pool.filled(control);
        self.post("sending a queued step", move |machine| {
            machine.send_queued(id, &control, &parts);
            pool.give_back(control);
        })?;
        queue.sent(sizes);
        Ok(())
    }

    /// Waits for the oldest queued step.
    pub(crate) fn collect_ahead(&mut self, queue: &mut StepQueue) -> Result<Collected, RunError> {
        if !queue.has_in_flight() {
            return Err(nothing_queued());
        }
        // The device thread has a deadline of its own and knows more; this one is for a thread that gives no answer.
        let limit = self.options.step_limit.saturating_add(self.options.call_limit);
        let taken = self.call(COLLECT, limit, Machine::collect_queued);
        match taken {
            Ok((ran, bytes)) => queue.arrived(ran, &bytes).ok_or_else(nothing_queued),
            Err(error) => {
                queue.clear();
                Err(self.run_error(STEP)(error))
            }
        }
    }

    /// Waits for all queued steps and forgets them; how many there were.
    pub(crate) fn abandon_ahead(&mut self, queue: &mut StepQueue) -> Result<usize, CudaError> {
        let was_in_flight = queue.has_in_flight();
        let n = queue.clear();
        if was_in_flight {
            self.call("waiting for queued steps", self.options.step_limit, Machine::abandon_queued)?;
        }
        Ok(n)
    }
}

fn output_part(plan: &Plan, output: usize) -> Result<OutputPart, CudaError> {
    let refuse = |because: String| CudaError::Mismatch { what: "outputs", because };
    let operand =
        plan.outputs().get(output).ok_or_else(|| refuse(format!("the plan has no output {output}")))?;
    let (layout, dtype) = (&operand.layout, operand.dtype);
    if !layout.is_contiguous() {
        return Err(refuse(format!(
            "output {output} is a strided view, which a queued step cannot bring back"
        )));
    }
    let bytes = |n: usize| dtype.bytes_for(n).ok_or_else(|| refuse(format!("output {output} is too large")));
    let (start, bytes) = (bytes(layout.offset())? as u64, bytes(layout.shape().n_elements())? as u64);
    Ok(OutputPart { buffer: operand.buffer, start, bytes })
}
