//! Queued steps: the next steps are launched before earlier results are read.
//!
//! Unlike the steps of a [`crate::Run`], queued steps do not feed each other through the control block: each
//! has its own, and only states carry over. A training loop queues step n + 1 while step n runs, and collects a
//! few small outputs of each, in order.

use crate::backend::{Backend, Io, RunError};
use crate::report::Ran;
use std::collections::VecDeque;

/// Result of a queued step.
#[derive(Clone, Debug, PartialEq)]
pub struct Collected {
    /// How it ran.
    pub ran: Ran,
    /// Requested outputs, contiguous, in the requested order.
    pub outputs: Vec<Vec<u8>>,
}

/// The caller's side of a queue of steps, oldest first.
#[derive(Debug, Default)]
pub struct StepQueue {
    /// Output sizes of each step in flight.
    in_flight: VecDeque<Vec<usize>>,
    /// Steps that finished before `queue` returned.
    ready: VecDeque<Collected>,
}

impl StepQueue {
    /// Returns an empty queue.
    pub fn new() -> StepQueue {
        StepQueue::default()
    }

    /// Number of steps that were queued and not yet collected.
    pub fn len(&self) -> usize {
        self.in_flight.len() + self.ready.len()
    }

    /// Whether there is nothing to collect.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// For backends: adds a step in flight, with the sizes of its outputs.
    pub fn sent(&mut self, sizes: Vec<usize>) {
        self.in_flight.push_back(sizes);
    }

    /// For backends: whether any step is in flight.
    pub fn has_in_flight(&self) -> bool {
        !self.in_flight.is_empty()
    }

    /// For backends: removes the oldest step in flight and splits `bytes` into its outputs.
    pub fn arrived(&mut self, ran: Ran, bytes: &[u8]) -> Option<Collected> {
        let sizes = self.in_flight.pop_front()?;
        let mut rest = bytes;
        let mut outputs = Vec::with_capacity(sizes.len());
        for size in sizes {
            let (output, after) = rest.split_at_checked(size)?;
            outputs.push(output.to_vec());
            rest = after;
        }
        Some(Collected { ran, outputs })
    }

    /// For backends: adds a finished step.
    pub fn done(&mut self, step: Collected) {
        self.ready.push_back(step);
    }

    /// For backends: removes the oldest finished step.
    pub fn take_done(&mut self) -> Option<Collected> {
        self.ready.pop_front()
    }

    /// Discards all steps and returns how many there were.
    pub fn clear(&mut self) -> usize {
        let n = self.len();
        *self = StepQueue::default();
        n
    }
}

/// [`Backend::queue`] for backends or plans that must wait for each step: runs the step and reads its outputs
/// immediately.
pub fn queue_stepwise<B: Backend + ?Sized>(
    backend: &mut B,
    compiled: &mut B::Compiled,
    io: Io<'_, B>,
    outputs: &[usize],
    queue: &mut StepQueue,
) -> Result<(), RunError> {
    let mut sizes = Vec::with_capacity(outputs.len());
    for &output in outputs {
        let plan = backend.plan(compiled);
        let ty = plan.outputs().get(output).map(crate::plan::Operand::ty).ok_or_else(|| no_output(output))?;
        sizes.push(ty.dtype.bytes_for(ty.shape.n_elements()).unwrap_or(0));
    }
    let ran = backend.run(compiled, io)?;
    let mut found = Vec::with_capacity(outputs.len());
    for (&output, size) in outputs.iter().zip(sizes) {
        let mut bytes = vec![0; size];
        backend.read(compiled, output, &mut bytes)?;
        found.push(bytes);
    }
    queue.done(Collected { ran, outputs: found });
    Ok(())
}

/// [`Backend::collect`] for [`queue_stepwise`].
pub fn collect_stepwise(queue: &mut StepQueue) -> Result<Collected, RunError> {
    queue.take_done().ok_or_else(nothing_queued)
}

/// Error for collecting from an empty queue.
pub fn nothing_queued() -> RunError {
    RunError::Mismatch { what: "queues", because: "no step is queued".into() }
}

fn no_output(output: usize) -> RunError {
    RunError::Mismatch { what: "outputs", because: format!("the plan has no output {output}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outputs_are_split_in_order() {
        let mut queue = StepQueue::new();
        queue.sent(vec![2, 0, 3]);
        queue.sent(vec![1]);
        assert_eq!((queue.len(), queue.has_in_flight()), (2, true));
        let first = queue.arrived(Ran::REPLAYED, &[1, 2, 3, 4, 5]).unwrap();
        assert_eq!(first.outputs, [vec![1, 2], vec![], vec![3, 4, 5]]);
        assert_eq!(queue.arrived(Ran::REPLAYED, &[9]).unwrap().outputs, [vec![9]]);
        assert_eq!(queue.arrived(Ran::REPLAYED, &[9]), None);
        queue.sent(vec![4]);
        assert_eq!(queue.arrived(Ran::REPLAYED, &[1, 2]), None, "fewer bytes than requested");
    }
}
