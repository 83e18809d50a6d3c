//! Queued steps: each has its own control block and is launched before the results of those in flight are
//! requested.
//!
//! ```text
//! caller        copies the control block and posts it      ...      collects the oldest step
//! device thread checks it, uploads it from a pinned slot, launches, copies outputs to a pinned slot, records an event
//! stream        upload 1 | graph 1 | outputs 1 | upload 2 | graph 2 | outputs 2 | ...
//! ```
//!
//! A step that cannot be launched ends the queue: later steps are not launched, since they would find states
//! without that step's changes. The caller collects the results of earlier steps first, then the error.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use refrain_driver::{Buf, DriverError, Readback};
use refrain_graph::{BufferId, Collected, Plan, Ran, RunError, StepQueue, nothing_queued};

use crate::backend::{CudaBackend, CudaCompiled};
use crate::device_model::{DeviceModel, ProgramId};
use crate::error::CudaError;

/// Maximum number of steps in flight. With two, the next step is ready when one ends; the third covers a late
/// host. Control blocks use one pinned slot more than that.
pub(crate) const MAX_QUEUED: usize = 3;
/// Maximum bytes of outputs that a step may request.
const OUTPUT_BYTES: usize = 4096;

const STEP: &str = "a queued step";
pub(crate) const COLLECT: &str = "collecting a queued step";

/// Cost of queued steps on the device thread.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueStats {
    /// Steps launched.
    pub n_steps: u64,
    /// Maximum number of steps in flight at once.
    pub most_in_flight: usize,
    /// Total time to launch them.
    pub took: Duration,
}

/// Launched, uncollected steps on the device thread.
#[derive(Default)]
pub(crate) struct SentSteps {
    returns: Option<Readback>,
    /// Outcome of each launch; only the last one can be an error.
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

impl DeviceModel {
    /// Launches a step after those in flight, unless one of them could not be launched.
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
        let ran = self.send_after(id, control);
        self.cache.set_in_flight(Duration::ZERO);
        let ran = ran?;
        let failed = |source| CudaError::Driver { step: STEP.into(), source };
        let bufs = self.output_bufs(id, outputs)?;
        if self.queued.returns.is_none() {
            let ctx = self.stream.context().clone();
            self.queued.returns = Some(Readback::new(&ctx, MAX_QUEUED, OUTPUT_BYTES).map_err(failed)?);
        }
        let (Some(returns), Some(resident)) = (&mut self.queued.returns, &mut self.resident) else {
            return Err(DeviceModel::gone());
        };
        self.stream.start_readback(&mut resident.lease, returns, &bufs).map_err(failed)?;
        Ok(ran)
    }

    /// Uploads inputs and launches the step; runs it both ways if it is due for comparison.
    fn send_after(&mut self, id: ProgramId, control: &[u8]) -> Result<Ran, CudaError> {
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
            return Err(DeviceModel::gone());
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
            // The step's own error takes precedence over those of later steps.
            let _ = self.abandon_queued();
        }
        taken
    }

    /// Waits for all queued steps and discards them.
    pub(crate) fn abandon_queued(&mut self) -> Result<(), CudaError> {
        self.queued.steps.clear();
        // Uncollected slots are dropped too; the stream keeps them alive until its work is done.
        self.queued.returns = None;
        self.stream.synchronize().map_err(CudaError::driver("waiting for queued steps"))
    }
}

/// Buffers for control blocks on the way to the device thread, reused when they return.
#[derive(Clone, Default)]
pub(crate) struct ControlPool(Arc<Mutex<Vec<Vec<u8>>>>);

impl ControlPool {
    fn filled(&self, bytes: &[u8]) -> Vec<u8> {
        let mut block = self.0.lock().unwrap_or_else(PoisonError::into_inner).pop().unwrap_or_default();
        block.clear();
        block.extend_from_slice(bytes);
        block
    }

    fn release(&self, block: Vec<u8>) {
        let mut blocks = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if blocks.len() <= MAX_QUEUED {
            blocks.push(block);
        }
    }
}

impl CudaBackend {
    /// Has a step launched after those in flight, without waiting for that.
    pub(crate) fn queue_ahead(
        &mut self,
        compiled: &CudaCompiled,
        control: &[u8],
        outputs: &[usize],
        queue: &mut StepQueue,
    ) -> Result<(), CudaError> {
        let refuse = |because: String| Err(CudaError::Mismatch { what: "queues", because });
        if queue.len() >= MAX_QUEUED {
            return refuse(format!("{} steps are in flight, at most {MAX_QUEUED} can be", queue.len()));
        }
        let parts: Vec<OutputPart> =
            outputs.iter().map(|output| output_part(compiled.plan(), *output)).collect::<Result<_, _>>()?;
        let total: u64 = parts.iter().map(|part| part.bytes).sum();
        if total > OUTPUT_BYTES as u64 {
            return refuse(format!("outputs of {total} bytes are requested, at most {OUTPUT_BYTES} can be"));
        }
        // A run may not be finished. The number of steps it collected is unknown here, and nobody needs the
        // number of discarded ones.
        self.finish_ahead(0)?;
        let sizes = parts.iter().map(|part| part.bytes as usize).collect();
        let (id, pool) = (compiled.id, self.control_pool.clone());
        let control = pool.filled(control);
        self.post("launching a queued step", move |m| {
            m.send_queued(id, &control, &parts);
            pool.release(control);
        })?;
        queue.sent(sizes);
        Ok(())
    }

    /// Waits for the oldest queued step.
    pub(crate) fn collect_ahead(&mut self, queue: &mut StepQueue) -> Result<Collected, RunError> {
        if !queue.has_in_flight() {
            return Err(nothing_queued());
        }
        // The device thread has its own deadline and more context; this one covers a thread that does not
        // respond.
        let limit = self.options.step_limit.saturating_add(self.options.call_limit);
        let taken = self.call(COLLECT, limit, DeviceModel::collect_queued);
        match taken {
            Ok((ran, bytes)) => queue.arrived(ran, &bytes).ok_or_else(nothing_queued),
            Err(error) => {
                queue.clear();
                Err(self.run_error(STEP)(error))
            }
        }
    }

    /// Waits for all queued steps and discards them; returns their number.
    pub(crate) fn abandon_ahead(&mut self, queue: &mut StepQueue) -> Result<usize, CudaError> {
        let was_in_flight = queue.has_in_flight();
        let n = queue.clear();
        if was_in_flight {
            self.call("waiting for queued steps", self.options.step_limit, DeviceModel::abandon_queued)?;
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
        return Err(refuse(format!("output {output} is a strided view, which a queued step cannot return")));
    }
    let bytes = |n: usize| dtype.bytes_for(n).ok_or_else(|| refuse(format!("output {output} is too large")));
    let (start, bytes) = (bytes(layout.offset())? as u64, bytes(layout.shape().n_elements())? as u64);
    Ok(OutputPart { buffer: operand.buffer, start, bytes })
}
