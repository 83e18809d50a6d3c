//! The interface that every backend implements.

use crate::graph::{Graph, State, Weight};
use crate::group::{Fusion, GroupQuery};
use crate::op::{HostCallError, Op, TensorType};
use crate::plan::{Plan, PlanError};
use crate::queue::{Collected, StepQueue, collect_stepwise, queue_stepwise};
use crate::report::{Ran, Reason};
use crate::run::{CommittedStep, Feedback, LateRows, Run, TopLists};
use crate::state_part::{StateEdit, StatePart};
use refrain_tensor::HostTensor;
use std::borrow::Cow;

/// A node, as passed to [`Backend::supports`].
#[derive(Clone, Copy, Debug)]
pub struct Query<'a> {
    /// Op of the node.
    pub op: &'a Op,
    /// Types of its inputs.
    pub inputs: &'a [TensorType],
    /// Types of its outputs.
    pub outputs: &'a [TensorType],
}

/// Whether a backend has a kernel for a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Support {
    /// There is a kernel.
    Yes,
    /// There is none, for this reason.
    No(String),
}

/// Why a graph could not be compiled for a backend.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum CompileError {
    /// There is no kernel for this op, dtype or shape. There is no fallback.
    #[error("{backend} has no kernel for {op} at {label}: {because}")]
    Unsupported {
        /// Name of the backend.
        backend: &'static str,
        /// Name of the op.
        op: &'static str,
        /// Label of the node.
        label: String,
        /// The backend's reason, with dtypes and shapes.
        because: String,
    },
    /// The graph could not be planned.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The plan needs more memory than allowed.
    #[error("the plan needs an arena of {need_bytes} bytes, the limit is {limit_bytes} bytes")]
    TooLarge {
        /// Bytes needed.
        need_bytes: usize,
        /// Bytes allowed.
        limit_bytes: usize,
    },
    /// The device context was lost during compilation. Nothing can run on it again in this process.
    #[error("{backend} lost its context while preparing the plan, with error {code}")]
    ContextLost {
        /// Name of the backend.
        backend: &'static str,
        /// The driver's code.
        code: u32,
        /// Cause.
        #[source]
        source: std::sync::Arc<dyn std::error::Error + Send + Sync>,
    },
    /// The backend failed during compilation.
    #[error("{backend} could not prepare the plan")]
    Backend {
        /// Name of the backend.
        backend: &'static str,
        /// Cause.
        #[source]
        source: std::sync::Arc<dyn std::error::Error + Send + Sync>,
    },
}

impl CompileError {
    /// Suggested fix, if there is one.
    pub fn hint(&self) -> Option<String> {
        match self {
            CompileError::Unsupported { .. } => {
                Some("use another device, or convert the weights to another type".into())
            }
            CompileError::Plan(error) => Some(error.hint().into()),
            CompileError::TooLarge { .. } => Some("use smaller steps or allow a larger arena".into()),
            CompileError::ContextLost { .. } => Some("restart the program, or use another device".into()),
            CompileError::Backend { .. } => None,
        }
    }
}

/// Why a plan failed to run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RunError {
    /// A host function failed.
    #[error("{label}: {source}")]
    Host {
        /// Label of the step.
        label: String,
        /// Error from its author.
        source: HostCallError,
    },
    /// An index in a step input is out of range.
    #[error("{label}: {what} is {got}, must be below {limit}")]
    OutOfRange {
        /// Label of the step.
        label: String,
        /// Name of the index.
        what: &'static str,
        /// Its value.
        got: i64,
        /// Exclusive upper bound.
        limit: usize,
    },
    /// The weights, states or control block do not belong to the plan.
    #[error("{what} of the plan do not match: {because}")]
    Mismatch {
        /// Argument that does not match.
        what: &'static str,
        /// Difference.
        because: String,
    },
    /// The backend cannot resize its states.
    #[error("{backend} cannot resize its states")]
    CannotResize {
        /// Name of the backend.
        backend: &'static str,
    },
    /// The backend does not allow access to its states.
    #[error("{backend} does not allow reading or writing its states")]
    NoAccess {
        /// Name of the backend.
        backend: &'static str,
    },
    /// The backend failed.
    #[error("{backend} failed at {label}")]
    Backend {
        /// Name of the backend.
        backend: &'static str,
        /// Label of the step.
        label: String,
        /// Cause.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The device context was lost. Nothing can run on it again in this process.
    #[error("{backend} lost its context at {label} with error {code}")]
    ContextLost {
        /// Name of the backend.
        backend: &'static str,
        /// Label of the step.
        label: String,
        /// The driver's code.
        code: u32,
        /// Cause.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

impl RunError {
    /// Suggested fix, if there is one.
    pub fn hint(&self) -> Option<String> {
        match self {
            RunError::OutOfRange { .. } => {
                Some("use token ids of the model's vocabulary and blocks of its cache".into())
            }
            RunError::Mismatch { what, .. } => {
                Some(format!("pass the {what} that the plan was compiled for"))
            }
            RunError::ContextLost { .. } => Some("restart the program, or use another device".into()),
            RunError::CannotResize { .. } => Some("allocate states of the required size".into()),
            RunError::NoAccess { .. } => Some("use the CPU or CUDA backend".into()),
            RunError::Host { .. } | RunError::Backend { .. } => None,
        }
    }

    /// Reason that the ledger records for a step that ended in this error.
    pub fn reason(&self) -> Reason {
        match self {
            RunError::ContextLost { code, label, .. } => {
                Reason::ContextLost { code: *code, step: label.clone() }
            }
            RunError::Host { .. }
            | RunError::OutOfRange { .. }
            | RunError::Mismatch { .. }
            | RunError::CannotResize { .. }
            | RunError::NoAccess { .. }
            | RunError::Backend { .. } => Reason::step_failed(self),
        }
    }
}

/// Everything a run reads and writes outside the plan's arena.
pub struct Io<'a, B: Backend + ?Sized> {
    /// The model's weights.
    pub weights: &'a B::Weights,
    /// The model's states.
    pub states: &'a mut B::States,
    /// Step inputs, in the layout of [`Plan::control`].
    pub control: &'a [u8],
}

/// Runs graphs on one kind of device.
pub trait Backend {
    /// Weights in the device's layout.
    type Weights;
    /// States in the device's layout.
    type States;
    /// A compiled graph.
    type Compiled;

    /// Name of the backend, for messages.
    fn name(&self) -> &'static str;

    /// Preferred step sizes in tokens, ascending. Other steps are padded to the next size, so that few plans
    /// are needed. Empty if the backend has no preference.
    fn buckets(&self) -> &[usize] {
        &[]
    }

    /// Preferred decode batch sizes (one token per sequence), ascending. Other batches are padded to the next
    /// size. Empty if the backend has no preference.
    fn row_buckets(&self) -> &[usize] {
        &[]
    }

    /// Returns whether there is a kernel for a node.
    fn supports(&self, query: &Query<'_>) -> Support;

    /// Returns whether there are kernels that run a group of nodes as one unit. [`Plan::fused`] queries from
    /// the largest group down; single nodes are always accepted.
    fn fuses(&self, _: &GroupQuery<'_>) -> Fusion {
        Fusion::Smaller
    }

    /// Whether matrix products of values and gradients of norms can accumulate into their output. If so,
    /// [`crate::join_sums`] is worth running.
    fn adds(&self) -> bool {
        false
    }

    /// Loads weights to the device; `tensors` are in the order of `weights`.
    fn load(&self, weights: &[Weight], tensors: Vec<HostTensor>) -> Result<Self::Weights, RunError>;

    /// Allocates states filled with zeros.
    fn allocate(&self, states: &[State]) -> Result<Self::States, RunError>;

    /// Resizes the first dimension of states made by [`Backend::allocate`]. Contents are kept and new entries
    /// are zero. No step may be in flight. Graphs compiled for the old sizes become useless.
    ///
    /// A backend whose states cannot move returns [`RunError::CannotResize`] and leaves them unchanged.
    fn resize(&self, _states: &mut Self::States, _to: &[State]) -> Result<(), RunError> {
        Err(RunError::CannotResize { backend: self.name() })
    }

    /// Copies a state, or part of one, to the host after all queued steps. Not allowed while a run is in
    /// flight.
    fn read_state(
        &self,
        _: &Self::States,
        _: impl Into<StatePart>,
        _into: &mut [u8],
    ) -> Result<(), RunError> {
        Err(RunError::NoAccess { backend: self.name() })
    }

    /// Writes to a state, or part of one, after all queued steps. Requires that a graph using the state has
    /// been compiled, and that no run is in flight.
    fn write_state(
        &self,
        _: &mut Self::States,
        _: impl Into<StatePart>,
        _from: &[u8],
    ) -> Result<(), RunError> {
        Err(RunError::NoAccess { backend: self.name() })
    }

    /// Copies and clears slots of states on the device, in the given order: after all steps launched or
    /// queued so far, before all later ones, and without waiting for any. Allowed while a run is in flight.
    /// Requires that a graph using the states has been compiled.
    ///
    /// If an edit is refused, all states stay unchanged.
    fn edit_states(&mut self, _: &mut Self::States, _: &[StateEdit]) -> Result<(), RunError> {
        Err(RunError::NoAccess { backend: self.name() })
    }

    /// Compiles a graph; an op without a kernel is an error here.
    fn compile(&self, graph: &Graph) -> Result<Self::Compiled, CompileError>;

    /// Plan of a compiled graph.
    fn plan<'c>(&self, compiled: &'c Self::Compiled) -> &'c Plan;

    /// Runs one step.
    fn run(&mut self, compiled: &mut Self::Compiled, io: Io<'_, Self>) -> Result<Ran, RunError>;

    /// Copies an output of the last run to the host, contiguous whatever its layout on the device.
    fn read(&mut self, compiled: &Self::Compiled, output: usize, into: &mut [u8]) -> Result<(), RunError>;

    /// Maximum number of queued steps in flight; 1 if each finishes before [`Backend::queue`] returns.
    fn queue_depth(&self) -> usize {
        1
    }

    /// Queues a step after those already queued, without waiting for them if the backend can. The control
    /// block is copied, so the caller may change it immediately. `outputs` names the outputs to return: few
    /// and small ones.
    ///
    /// At most [`Backend::queue_depth`] steps may be queued and not collected. Steps of several graphs may be
    /// queued. A call to [`run`](Backend::run) and reads or writes of states take effect after the steps
    /// already queued.
    ///
    /// An error leaves the queue unchanged. An error may also surface when the step is collected.
    fn queue(
        &mut self,
        compiled: &mut Self::Compiled,
        io: Io<'_, Self>,
        outputs: &[usize],
        queue: &mut StepQueue,
    ) -> Result<(), RunError> {
        queue_stepwise(self, compiled, io, outputs, queue)
    }

    /// Waits for the oldest queued step. After an error the queue is empty: the failed step and those queued
    /// after it did not run, or the device can no longer run anything.
    fn collect(&mut self, queue: &mut StepQueue) -> Result<Collected, RunError> {
        collect_stepwise(queue)
    }

    /// Drains the queue, discards the results and returns how many there were.
    fn abandon(&mut self, queue: &mut StepQueue) -> Result<usize, RunError> {
        Ok(queue.clear())
    }

    /// Maximum number of steps of a run in flight; 1 if the host takes part in every step, and `usize::MAX` if the device
    /// repeats the step by itself: then all steps of a reply are requested at once.
    fn ahead(&self, _: &Self::Compiled) -> usize {
        1
    }

    /// Takes the reason why a run's steps are launched one by one, if the device was to repeat them. It may become known
    /// when the run begins, or when a step of it is launched.
    fn take_not_repeated(&mut self, _: &Self::Compiled) -> Option<Reason> {
        None
    }

    /// Launches the next `n` steps of a run, in order and without waiting for them if the backend can.
    /// Changes to the run's rows take effect first. Block tables must cover the positions of these steps.
    /// Between the first step of a run and [`Backend::finish`], nothing else may be compiled or run.
    ///
    /// An error may also surface when a later step is collected.
    fn send(
        &mut self,
        compiled: &mut Self::Compiled,
        weights: &Self::Weights,
        states: &mut Self::States,
        run: &mut Run,
        n: usize,
    ) -> Result<(), RunError> {
        send_stepwise(self, compiled, weights, states, run, n)
    }

    /// Gives the oldest step of a run that lacks them its masks, and launches the rest of it. Only for runs with masks:
    /// each of their steps waits for this.
    fn supply(
        &mut self,
        compiled: &mut Self::Compiled,
        weights: &Self::Weights,
        states: &mut Self::States,
        run: &mut Run,
        late: LateRows,
    ) -> Result<(), RunError> {
        supply_stepwise(self, compiled, weights, states, run, &late)
    }

    /// Collects the oldest step of a run, waiting for it if needed. An error ends the run: results collected
    /// so far are valid, the others must be computed again.
    fn take(&mut self, _: &mut Self::Compiled, run: &mut Run) -> Result<CommittedStep, RunError> {
        take_stepwise(run)
    }

    /// Ends a run: drains it and returns how many steps were never collected. Those steps changed nothing but
    /// KV past the last collected position. An error also ends the run; it may come from a step that was
    /// never collected.
    fn finish(&mut self, _: &mut Self::Compiled, run: &mut Run) -> Result<usize, RunError> {
        Ok(finish_stepwise(run))
    }

    /// Kernels of a compiled graph, each with the (first) step of the plan that it runs. Empty if the backend
    /// does not report them.
    fn kernels(&self, _: &Self::Compiled) -> Vec<(usize, Cow<'static, str>)> {
        Vec::new()
    }

    /// Layouts of weights on the device, with the bytes in each.
    fn layouts(&self, _: &Self::Weights) -> Vec<(String, usize)> {
        Vec::new()
    }

    /// Refuses a graph that contains an op without a kernel.
    fn check(&self, graph: &Graph) -> Result<(), CompileError> {
        for node in graph.nodes() {
            let (inputs, outputs) = (graph.input_types(node), graph.output_types(node));
            if let Support::No(because) =
                self.supports(&Query { op: &node.op, inputs: &inputs, outputs: &outputs })
            {
                let (op, label) = (node.op.name(), node.label.clone());
                return Err(CompileError::Unsupported { backend: self.name(), op, label, because });
            }
        }
        Ok(())
    }
}

/// [`Backend::send`] for backends or plans whose steps cannot feed themselves: runs each step, reads its
/// output and writes the choices to the next step's inputs on the host.
pub fn send_stepwise<B: Backend + ?Sized>(
    backend: &mut B,
    compiled: &mut B::Compiled,
    weights: &B::Weights,
    states: &mut B::States,
    run: &mut Run,
    n: usize,
) -> Result<(), RunError> {
    // Edits are already in the control block, which the next step reads.
    run.take_edits();
    if run.is_late() {
        // Without masks there is nothing to choose from yet.
        run.sent(n);
        return Ok(());
    }
    for _ in 0..n {
        if run.has_ended() {
            break;
        }
        run_and_commit(backend, compiled, weights, states, run)?;
        run.sent(1);
    }
    Ok(())
}

/// [`Backend::supply`] for [`send_stepwise`]: runs the step.
pub fn supply_stepwise<B: Backend + ?Sized>(
    backend: &mut B,
    compiled: &mut B::Compiled,
    weights: &B::Weights,
    states: &mut B::States,
    run: &mut Run,
    late: &LateRows,
) -> Result<(), RunError> {
    if !run.may_supply() {
        let because = "no step of the run needs masks".to_owned();
        return Err(RunError::Mismatch { what: "runs", because });
    }
    run.supply(late);
    run_and_commit(backend, compiled, weights, states, run)
}

fn run_and_commit<B: Backend + ?Sized>(
    backend: &mut B,
    compiled: &mut B::Compiled,
    weights: &B::Weights,
    states: &mut B::States,
    run: &mut Run,
) -> Result<(), RunError> {
    let Feedback { n_rows, token, logprob, top, .. } = *run.feedback();
    let (mut tokens, mut logprobs) = (vec![0u32; n_rows], vec![0f32; n_rows]);
    let ran = backend.run(compiled, Io { weights, states, control: run.control() })?;
    backend.read(compiled, token, bytemuck::cast_slice_mut(&mut tokens))?;
    backend.read(compiled, logprob, bytemuck::cast_slice_mut(&mut logprobs))?;
    let mut lists = Vec::new();
    if let Some(TopLists { ids, logprobs, n }) = top {
        let (mut top_ids, mut top_logprobs) = (vec![0u32; n_rows * n], vec![0f32; n_rows * n]);
        backend.read(compiled, ids, bytemuck::cast_slice_mut(&mut top_ids))?;
        backend.read(compiled, logprobs, bytemuck::cast_slice_mut(&mut top_logprobs))?;
        lists.extend(top_ids.into_iter().zip(top_logprobs));
    }
    run.commit(&tokens, &logprobs, lists, ran);
    Ok(())
}

/// [`Backend::take`] for [`send_stepwise`].
pub fn take_stepwise(run: &mut Run) -> Result<CommittedStep, RunError> {
    let because = || "no step of the run is in flight".to_owned();
    run.take().ok_or_else(|| RunError::Mismatch { what: "runs", because: because() })
}

/// [`Backend::finish`] for [`send_stepwise`].
pub fn finish_stepwise(run: &mut Run) -> usize {
    run.forget()
}
