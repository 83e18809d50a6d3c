//! The graph IR: ops, shape rules, passes, memory plan, segments and the [`Backend`] trait.
//!
//! A model builds a [`Graph`]: SSA values, nodes with one or more outputs, and state (KV cache, counters).
//! State is threaded through the nodes that change it, so every dependency is an edge. [`fuse`] merges nodes.
//! [`Plan::fused`] forms groups that a backend runs as one unit, orders them, cuts the order into segments
//! and fixes the address of every buffer. A backend turns the plan into something it can run, group by group.
//!
//! Invariant: no device, no I/O, no `unsafe`.
//! Invariant: every `match` on [`Op`] is exhaustive, so a new op fails to compile wherever it must be
//! handled.
#![forbid(unsafe_code)]
#![deny(clippy::wildcard_enum_match_arm)]

mod op; // ops and their capturability
mod recurrent; // ops of recurrent layers
mod train_op; // ops of training steps
mod moe; // ops of mixtures of experts
mod lora; // ops of low-rank adapters
mod infer; // shape and dtype inference
mod inputs; // meaning of step inputs
mod graph; // values, nodes, states
mod grad; // the backward pass
mod fuse; // fusing nodes
mod facts; // views resolved, readers
mod group; // nodes that run as one unit
mod schedule; // order and segments
mod arena; // buffer placement
mod plan; // order, segments and memory together
mod bounds; // limits of index inputs
mod crossing; // copies across the bus in host steps
mod control; // inputs that change every step
mod run; // steps that feed themselves
mod queue; // steps queued before earlier results are known
mod state_part; // parts and slots of states
mod backend; // the trait that runs plans
mod report; // how a step ran, and why
mod repeat; // equal layers
mod dot; // Graphviz output

pub use arena::{Arena, Span};
pub use backend::{
    Backend, CompileError, Io, Query, RunError, Support, finish_stepwise, send_stepwise, supply_stepwise,
    take_stepwise,
};
pub use bounds::{Bounds, IdBound, OutOfBounds, PagedBound, SlotBound, SpanBound};
pub use control::{ControlBlock, ControlError, ControlLayout, Slot};
pub use crossing::Crossing;
pub use facts::Seen;
pub use fuse::{fuse, join_sums};
pub use grad::{GradError, Recompute};
pub use graph::{
    Graph, GraphBuilder, GraphError, Input, InputId, Node, NodeId, Output, PagedCaches, State, StateId,
    StateKind, Value, ValueId, ValueOrigin, Weight, WeightId,
};
pub use group::{
    Attend, AttendStored, ExpertChain, Fusion, Group, GroupKind, GroupQuery, Producer, ProductPart, Products,
    Refusal, RopeAppend,
};
pub use infer::InferError;
pub use inputs::{Field, Filler, SamplingInputs, StepInputs, StepKind, StepShape};
pub use lora::LoraOp;
pub use moe::{ExpertActivation, ExpertGate, MoeOp, Route, RouteGroups, RouteScore};
pub use op::{
    Attention, AttentionInputs, Binary, Capture, Compare, Gate, HostBuf, HostCall, HostCallError, HostFn,
    Indexing, Op, Reduce, Rope, RopeStyle, SAMPLE_PARAMS, Sample, SampleParam, SpanAttention, TensorType,
    Unary, View,
};
pub use plan::{Buffer, BufferId, KvTraffic, Operand, Place, Plan, PlanError, PlanOptions, Step, Traffic};
pub use queue::{Collected, StepQueue, collect_stepwise, nothing_queued, queue_stepwise};
pub use recurrent::{GatedDelta, KeyHeads, Recurrent, ShortConv};
pub use repeat::Repeat;
pub use report::{Ran, Reason};
pub use run::{
    Committed, CommittedStep, Feedback, LapsingBias, LateRows, RowLimits, Run, RunEdits, StepFlags, TopLists,
};
pub use schedule::{Segment, SegmentKind};
pub use state_part::{ByteEdit, SlotLayout, StateEdit, StatePart};
pub use train_op::{ADAM_PARAMS, AdamParam, AdamSlots, AdamW, Dropout, TrainOp};
