//! Steps that are queued: the next ones are sent before the results of those in flight are asked for.
//!
//! Unlike the steps of a [`crate::Run`], queued steps do not feed each other through their control blocks: each comes with
//! its own, and only states carry over. A training loop queues step n + 1 while step n runs, and collects a few small
//! outputs of each, in order.

use crate::backend::{Backend, Io, RunError};
use crate::report::Ran;
use std::collections::VecDeque;

/// What came of a queued step.
#[derive(Clone, Debug, PartialEq)]
pub struct Collected {
    /// How it ran.
    pub ran: Ran,
    /// The outputs that were asked for, dense, in the order in which they were named.
    pub outputs: Vec<Vec<u8>>,
}

/// The caller's end of a queue of steps, oldest first.
#[derive(Debug, Default)]
pub struct StepQueue {
    /// Bytes of the outputs of each step that the backend has in flight.
    in_flight: VecDeque<Vec<usize>>,
    /// Steps that ran before `queue` returned.
    ready: VecDeque<Collected>,
}

impl StepQueue {
    /// Without steps.
    pub fn new() -> StepQueue {
        StepQueue::default()
    }

    /// Steps that were queued and not collected.
    pub fn len(&self) -> usize {
        self.in_flight.len() + self.ready.len()
    }

    /// Whether nothing is to be collected.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// For backends: counts a step in flight, with the size of each of its outputs.
    pub fn sent(&mut self, sizes: Vec<usize>) {
        self.in_flight.push_back(sizes);
    }

    /// For backends: whether steps are in flight.
    pub fn has_in_flight(&self) -> bool {
        !self.in_flight.is_empty()
    }

    /// For backends: takes the oldest step in flight off the count and cuts its outputs, which came as one, apart.
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

    /// For backends: a step that is done.
    pub fn done(&mut self, step: Collected) {
        self.ready.push_back(step);
    }

    /// For backends: the oldest step that is done.
    pub fn take_done(&mut self) -> Option<Collected> {
        self.ready.pop_front()
    }

    /// Forgets all steps, and says how many they were.
    pub fn clear(&mut self) -> usize {
        let n = self.len();
        *self = StepQueue::default();
        n
    }
}

/// [`Backend::queue`] for a backend, or a plan, whose steps have to be waited for: the step is run and read here.
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

/// [`Backend::collect`] to [`queue_stepwise`].
pub fn collect_stepwise(queue: &mut StepQueue) -> Result<Collected, RunError> {
    queue.take_done().ok_or_else(nothing_queued)
}

/// The error for collecting from an empty queue.
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
    fn outputs_that_came_as_one_are_cut_apart_in_order() {
        let mut queue = StepQueue::new();
        queue.sent(vec![2, 0, 3]);
        queue.sent(vec![1]);
        assert_eq!((queue.len(), queue.has_in_flight()), (2, true));
        let first = queue.arrived(Ran::REPLAYED, &[1, 2, 3, 4, 5]).unwrap();
        assert_eq!(first.outputs, [vec![1, 2], vec![], vec![3, 4, 5]]);
        assert_eq!(queue.arrived(Ran::REPLAYED, &[9]).unwrap().outputs, [vec![9]]);
        assert_eq!(queue.arrived(Ran::REPLAYED, &[9]), None);
        queue.sent(vec![4]);
        assert_eq!(queue.arrived(Ran::REPLAYED, &[1, 2]), None, "fewer bytes than were asked for");
    }
}
