//! What a backend must do.

use crate::graph::{Graph, State, Weight};
use crate::group::{Fusion, GroupQuery};
use crate::op::{HostCallError, Op, TensorType};
use crate::plan::{Plan, PlanError};
use crate::queue::{Collected, StepQueue, collect_stepwise, queue_stepwise};
use crate::report::{Ran, Reason};
use crate::run::{CommittedStep, Run};
use crate::state_part::{StateEdit, StatePart};
use refrain_tensor::HostTensor;
use std::borrow::Cow;

/// A node as a backend is asked about it.
#[derive(Clone, Copy, Debug)]
pub struct Query<'a> {
    /// The op.
    pub op: &'a Op,
    /// Types of its inputs.
    pub inputs: &'a [TensorType],
    /// Types of its outputs.
    pub outputs: &'a [TensorType],
}

/// Whether a backend has a kernel for a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Support {
    /// It has.
    Yes,
    /// It has none, and why.
    No(String),
}

/// Why a graph does not compile for a backend.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum CompileError {
    /// No kernel for an op, dtype or shape. There is no fallback.
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
    /// The graph has no plan.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The plan needs more memory than allowed.
    #[error("the plan needs an arena of {need_bytes} bytes, {limit_bytes} are allowed")]
    TooLarge {
        /// Bytes needed.
        need_bytes: usize,
        /// Bytes allowed.
        limit_bytes: usize,
    },
    /// The device's context was lost while it prepared the plan: nothing runs on it in this process any more.
    #[error("{backend} lost its context while it prepared the plan, with error {code}")]
    ContextLost {
        /// Name of the backend.
        backend: &'static str,
        /// The driver's code.
        code: u32,
        /// What failed.
        #[source]
        source: std::sync::Arc<dyn std::error::Error + Send + Sync>,
    },
    /// The backend failed while it prepared the plan.
    #[error("{backend} could not prepare the plan")]
    Backend {
        /// Name of the backend.
        backend: &'static str,
        /// What failed.
        #[source]
        source: std::sync::Arc<dyn std::error::Error + Send + Sync>,
    },
}

impl CompileError {
    /// What to do about it.
    pub fn hint(&self) -> Option<String> {
        match self {
            CompileError::Unsupported { .. } => {
                Some("run it on another device, or convert the weights to another type".into())
            }
            CompileError::Plan(error) => Some(error.hint().into()),
            CompileError::TooLarge { .. } => Some("use smaller steps, or allow a larger arena".into()),
            CompileError::ContextLost { .. } => {
                Some("start the program again, or run on another device".into())
            }
            CompileError::Backend { .. } => None,
        }
    }
}

/// Why a plan did not run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RunError {
    /// A host function failed.
    #[error("{label}: {source}")]
    Host {
        /// Label of the step.
        label: String,
        /// Its author's words.
        source: HostCallError,
    },
    /// A step input has values that point outside what they index.
    #[error("{label}: {what} is {got}, must be below {limit}")]
    OutOfRange {
        /// Label of the step.
        label: String,
        /// Which number.
        what: &'static str,
        /// Its value.
        got: i64,
        /// Its bound.
        limit: usize,
    },
    /// The weights, states or control block are not those of the plan.
    #[error("{what} of the plan do not match: {because}")]
    Mismatch {
        /// Which argument.
        what: &'static str,
        /// How they differ.
        because: String,
    },
    /// The backend cannot change the size of its states.
    #[error("{backend} cannot change the size of states that are in use")]
    CannotResize {
        /// Name of the backend.
        backend: &'static str,
    },
    /// The backend lets nobody read or write its states.
    #[error("{backend} lets nobody read or write its states")]
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
        /// What failed.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The device's context is lost: nothing runs on it in this process any more.
    #[error("{backend} lost its context at {label} with error {code}")]
    ContextLost {
        /// Name of the backend.
        backend: &'static str,
        /// Label of the step.
        label: String,
        /// The driver's code.
        code: u32,
        /// What failed.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

impl RunError {
    /// What to do about it.
    pub fn hint(&self) -> Option<String> {
        match self {
            RunError::OutOfRange { .. } => {
                Some("use the tokens and blocks that belong to the model and its cache".into())
            }
            RunError::Mismatch { what, .. } => Some(format!("give the {what} that the plan was made for")),
            RunError::ContextLost { .. } => Some("start the program again, or run on another device".into()),
            RunError::CannotResize { .. } => Some("allocate states of the size that is needed".into()),
            RunError::NoAccess { .. } => Some("use the CPU or CUDA backend".into()),
            RunError::Host { .. } | RunError::Backend { .. } => None,
        }
    }

    /// What the ledger says about a step that ended in this error.
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

/// What a run reads and changes besides the plan's own arena.
pub struct Io<'a, B: Backend + ?Sized> {
    /// The model's weights.
    pub weights: &'a B::Weights,
    /// The model's states.
    pub states: &'a mut B::States,
    /// The step's inputs, laid out as [`Plan::control`] says.
    pub control: &'a [u8],
}

/// Runs graphs on one kind of device.
pub trait Backend {
    /// Weights where the device wants them.
    type Weights;
    /// States where the device wants them.
    type States;
    /// A graph made ready to run.
    type Compiled;

    /// Name for messages.
    fn name(&self) -> &'static str;

    /// Sizes of step that it likes to run, in tokens, from the smallest: other steps are padded to the next one, so
    /// that few plans serve all. Empty when any size is as good.
    fn buckets(&self) -> &[usize] {
        &[]
    }

    /// Numbers of sequences that it likes to decode one token of each at once, from the smallest; others are padded to
    /// the next one. Empty when any number is as good.
    fn row_buckets(&self) -> &[usize] {
        &[]
    }

    /// Whether there is a kernel for a node.
    fn supports(&self, query: &Query<'_>) -> Support;

    /// Whether there are kernels that run a group of nodes as one unit. [`Plan::fused`] asks, from the largest group to
    /// smaller ones; single nodes need no answer.
    fn fuses(&self, _: &GroupQuery<'_>) -> Fusion {
        Fusion::Smaller
    }

    /// Whether products of values and gradients of norms can be added to what is there: [`crate::join_sums`] is of use
    /// then.
    fn adds(&self) -> bool {
        false
    }

    /// Brings weights to the device; `tensors` are in the order of `weights`.
    fn load(&self, weights: &[Weight], tensors: Vec<HostTensor>) -> Result<Self::Weights, RunError>;

    /// Makes states, filled with zeros.
    fn allocate(&self, states: &[State]) -> Result<Self::States, RunError>;

    /// Changes the first dimension of states that [`Backend::allocate`] made, and keeps what they hold; what is added is
    /// zero. Between steps only: no step may be in flight. Graphs compiled for the old sizes are of no use afterwards.
    ///
    /// A backend whose states cannot move says so with [`RunError::CannotResize`], which leaves them as they were.
    fn resize(&self, _states: &mut Self::States, _to: &[State]) -> Result<(), RunError> {
        Err(RunError::CannotResize { backend: self.name() })
    }

    /// Copies what a state, or a part of it, holds to the host, behind all steps that were queued. Not while a run is
    /// under way.
    fn read_state(
        &self,
        _: &Self::States,
        _: impl Into<StatePart>,
        _into: &mut [u8],
    ) -> Result<(), RunError> {
        Err(RunError::NoAccess { backend: self.name() })
    }

    /// Puts values into a state or a part of it, behind all steps that were queued. Not while a run is under way, and after
    /// a graph that uses the state was compiled.
    fn write_state(
        &self,
        _: &mut Self::States,
        _: impl Into<StatePart>,
        _from: &[u8],
    ) -> Result<(), RunError> {
        Err(RunError::NoAccess { backend: self.name() })
    }

    /// Copies and clears slots of states on the device, in that order, between the steps that were sent or queued before
    /// and those that come after, without waiting for any of them; also while a run is under way. After a graph that uses
    /// the states was compiled.
    ///
    /// An edit that is refused leaves all states as they were.
    fn edit_states(&mut self, _: &mut Self::States, _: &[StateEdit]) -> Result<(), RunError> {
        Err(RunError::NoAccess { backend: self.name() })
    }

    /// Makes a graph ready to run; an op without a kernel is an error here.
    fn compile(&self, graph: &Graph) -> Result<Self::Compiled, CompileError>;

    /// The plan behind a compiled graph.
    fn plan<'c>(&self, compiled: &'c Self::Compiled) -> &'c Plan;

    /// Runs one step.
    fn run(&mut self, compiled: &mut Self::Compiled, io: Io<'_, Self>) -> Result<Ran, RunError>;

    /// Copies an output of the last run to the host, dense whatever its layout on the device.
    fn read(&mut self, compiled: &Self::Compiled, output: usize, into: &mut [u8]) -> Result<(), RunError>;

    /// How many queued steps may be in flight at once; 1 where each is done before [`Backend::queue`] returns.
    fn queue_depth(&self) -> usize {
        1
    }

    /// Queues a step behind those queued before, without waiting for any of them where the backend can. Its control block
    /// is copied, so the caller may change it at once. `outputs` names the outputs to bring back: few and small ones.
    ///
    /// At most [`Backend::queue_depth`] steps may be queued and not collected. Steps of several graphs may be queued, and
    /// steps that are [`run`](Backend::run) meanwhile, and states that are read or written, come behind those queued.
    ///
    /// An error here leaves the queue as it was. An error may also show when the step is collected.
    fn queue(
        &mut self,
        compiled: &mut Self::Compiled,
        io: Io<'_, Self>,
        outputs: &[usize],
        queue: &mut StepQueue,
    ) -> Result<(), RunError> {
        queue_stepwise(self, compiled, io, outputs, queue)
    }

    /// Waits for the oldest queued step. After an error the queue is empty: the step that it belongs to and those queued
    /// behind it did not run, or the device no longer runs anything.
    fn collect(&mut self, queue: &mut StepQueue) -> Result<Collected, RunError> {
        collect_stepwise(queue)
    }

    /// Waits until no queued step is in flight and forgets their results; how many there were.
    fn abandon(&mut self, queue: &mut StepQueue) -> Result<usize, RunError> {
        Ok(queue.clear())
    }

    /// How many steps of a run may be under way at once; 1 where the host has a part in every step.
    fn ahead(&self, _: &Self::Compiled) -> usize {
        1
    }

    /// Sends `n` more steps of a run, in order and without waiting for them where the backend can; what has changed in
    /// the run's rows takes effect before them. Block tables must cover their positions. Between the first step of a run
    /// and [`Backend::finish`] nothing else is compiled or run.
    ///
    /// An error may also show when a later step is taken.
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

    /// Waits for the oldest step of a run that was not taken yet. After an error the run is over: what was taken is
    /// good, and what was not must be run again.
    fn take(&mut self, _: &mut Self::Compiled, run: &mut Run) -> Result<CommittedStep, RunError> {
        take_stepwise(run)
    }

    /// Ends a run: waits until no step of it is under way, and says how many nobody took. Those have left nothing but
    /// KV behind what was taken. The run is over after an error too, which then is that of a step nobody took.
    fn finish(&mut self, _: &mut Self::Compiled, run: &mut Run) -> Result<usize, RunError> {
        Ok(finish_stepwise(run))
    }

    /// The kernels of a compiled graph, each with the (first) step of the plan that it runs. A backend that has nothing
    /// to tell gives none.
    fn kernels(&self, _: &Self::Compiled) -> Vec<(usize, Cow<'static, str>)> {
        Vec::new()
    }

    /// How weights lie on the device, with the bytes of each layout.
    fn layouts(&self, _: &Self::Weights) -> Vec<(String, usize)> {
        Vec::new()
    }

    /// Refuses a graph that has an op without a kernel.
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

/// [`Backend::send`] for a backend, or a plan, whose steps cannot feed themselves: each one is run and read, and its
/// choices put in place here.
pub fn send_stepwise<B: Backend + ?Sized>(
    backend: &mut B,
    compiled: &mut B::Compiled,
    weights: &B::Weights,
    states: &mut B::States,
    run: &mut Run,
    n: usize,
) -> Result<(), RunError> {
    // The control block is what the next step reads.
    run.take_edits();
    let n_rows = run.feedback().n_rows;
    let (mut tokens, mut logprobs) = (vec![0u32; n_rows], vec![0f32; n_rows]);
    for _ in 0..n {
        if run.has_ended() {
            break;
        }
        let ran = backend.run(compiled, Io { weights, states: &mut *states, control: run.control() })?;
        let (at, of) = (run.feedback().token, run.feedback().logprob);
        backend.read(compiled, at, bytemuck::cast_slice_mut(&mut tokens))?;
        backend.read(compiled, of, bytemuck::cast_slice_mut(&mut logprobs))?;
        run.sent(1);
        run.commit(&tokens, &logprobs, ran);
    }
    Ok(())
}

/// [`Backend::take`] to [`send_stepwise`].
pub fn take_stepwise(run: &mut Run) -> Result<CommittedStep, RunError> {
    let because = || "no step of the run is under way".to_owned();
    run.take().ok_or_else(|| RunError::Mismatch { what: "runs", because: because() })
}

/// [`Backend::finish`] to [`send_stepwise`].
pub fn finish_stepwise(run: &mut Run) -> usize {
    run.forget()
}
