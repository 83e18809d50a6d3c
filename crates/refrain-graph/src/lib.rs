//! The graph IR: ops, shape rules, passes, memory plan, segments and the [`Backend`] trait.
//!
//! A model builds a [`Graph`]: SSA values, nodes with one or more outputs, and state (KV cache, counters) that is
//! threaded through the nodes that change it, so that no edge is hidden. [`fuse`] joins nodes into one, [`Plan::fused`]
//! forms groups that a backend runs as one unit, orders them, cuts the order into segments and fixes the address of
//! every buffer. A backend turns the plan into something that runs, group by group.
//!
//! Invariant: no device, no input or output, no `unsafe`.
//! Invariant: every `match` on [`Op`] is exhaustive, so that a new op fails to compile in each place that must decide.
#![forbid(unsafe_code)]
#![deny(clippy::wildcard_enum_match_arm)]

mod op; // what a node computes
mod recurrent; // what recurrent layers compute
mod train_op; // what only training computes
mod moe; // what mixtures of experts compute
mod infer; // which types come out
mod inputs; // what a step's inputs mean
mod graph; // values, nodes, state
mod grad; // the backward pass
mod fuse; // nodes that run better as one
mod facts; // who reads what
mod group; // which nodes are one unit
mod schedule; // in which order, cut where
mod arena; // in which memory
mod plan; // the three together
mod bounds; // what a step's inputs may point at
mod crossing; // what host steps cost
mod control; // what changes from step to step
mod run; // steps that feed themselves
mod queue; // steps sent before the results of others are known
mod state_part; // states slot by slot
mod backend; // who runs it
mod report; // how a step ran, and why
mod dot; // as a picture

pub use arena::{Arena, Span};
pub use backend::{
    Backend, CompileError, Io, Query, RunError, Support, finish_stepwise, send_stepwise, take_stepwise,
};
pub use bounds::{Bounds, IdBound, OutOfBounds, PagedBound, SlotBound, SpanBound};
pub use control::{ControlBlock, ControlError, ControlLayout, Slot};
pub use crossing::Crossing;
pub use facts::Seen;
pub use fuse::{fuse, join_sums};
pub use grad::{GradError, Recompute};
pub use graph::{
    Graph, GraphBuilder, GraphError, Input, InputId, Node, NodeId, Output, State, StateId, StateKind, Value,
    ValueId, ValueOrigin, Weight, WeightId,
};
pub use group::{
    Attend, AttendStored, Fusion, Group, GroupKind, GroupQuery, Producer, ProductPart, Products, Refusal,
    RopeAppend,
};
pub use infer::InferError;
pub use inputs::{Field, Filler, SamplingInputs, StepInputs, StepKind, StepShape};
pub use moe::{ExpertActivation, ExpertGate, MoeOp, Route, RouteGroups, RouteScore};
pub use op::{
    Attention, Binary, Capture, Compare, Gate, HostBuf, HostCall, HostCallError, HostFn, Indexing, Op,
    Reduce, Rope, RopeStyle, SAMPLE_PARAMS, Sample, SampleParam, SpanAttention, TensorType, Unary, View,
};
pub use plan::{Buffer, BufferId, KvTraffic, Operand, Place, Plan, PlanError, PlanOptions, Step, Traffic};
pub use queue::{Collected, StepQueue, collect_stepwise, nothing_queued, queue_stepwise};
pub use recurrent::{GatedDelta, KeyHeads, Recurrent, ShortConv};
pub use report::{Ran, Reason};
pub use run::{Committed, CommittedStep, Feedback, LapsingBias, RowLimits, Run, RunEdits, StepFlags};
pub use schedule::{Segment, SegmentKind};
pub use state_part::{ByteEdit, SlotLayout, StateEdit, StatePart};
pub use train_op::{ADAM_PARAMS, AdamParam, AdamSlots, AdamW, Dropout, TrainOp};
