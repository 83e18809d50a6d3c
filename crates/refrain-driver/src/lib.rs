//! Capture-safe access to a CUDA driver, real or simulated: record a step once, replay it as one launch.
//!
//! A CUDA graph runs hundreds of kernels for the host-side cost of a single launch. Recording one is easy to get
//! wrong. While a stream is being captured, ordinary calls become forbidden: an allocation, a synchronisation, a
//! readback, even a kernel that is loaded on first use invalidates the capture, and the error often surfaces in a
//! later, innocent call. A capture that succeeds is not safe either. The graph holds raw addresses and argument
//! values: free a buffer and the replay touches memory that belongs to someone else; pass a position by value and
//! every replay sees the old one.
//!
//! In this crate such a mistake does not compile. Where types cannot see it, it is an error at the call that makes
//! it:
//!
//! | mistake | what prevents it |
//! |---|---|
//! | waiting, reading back or uploading while recording | [`Stream::record`] borrows the stream and hands out a [`Queue`], which can only enqueue |
//! | the same through another handle or from another thread | the call is refused at once with [`DriverError::CaptureIncompatible`]; the recording continues |
//! | enqueueing from a second thread | a [`Queue`] is not `Send` |
//! | replaying after the memory or the kernels are gone | a [`Graph`] owns its [`Memory`] and its [`Module`]s |
//! | allocating inside the graph | [`Memory::plan`] fixes every address up front; a graph with memory nodes is refused |
//! | baking in a value that should change | a scalar argument must be [`Baked`]; what changes lives in a [`DeviceSlot`] |
//! | reading outputs after the next replay has overwritten them | [`Outputs`] borrow the [`Lease`] that every replay needs |
//! | loading code during a capture | [`Module::function`] loads the kernel completely |
//! | leaving a stream in capture mode after an error or a panic | a recording ends and discards itself |
//! | recording forever | a watchdog aborts the recording after [`RecordOptions::limit`] |
//!
//! # Invariants
//!
//! - Invariant: a stream that is being recorded can only be enqueued to.
//! - Invariant: every address in a recording lies in a [`Memory`] that the [`Graph`] keeps alive.
//! - Invariant: one thread makes the driver calls of a context. Only the watchdog and the health check make calls
//!   from threads of their own; threads that fill pinned memory make none.
//! - Invariant: every wait has a deadline, and no panic crosses the API.
//! - Invariant: safe code touches only the memory of live [`Memory`]s. What this crate must take on trust is
//!   `unsafe` to call: loading code ([`Module::load`]), vouching for a launch ([`LaunchBuilder::build`]), and the
//!   raw interfaces.
//! - Invariant: this crate does not know what a tensor is.
//!
//! # The life of a step
//!
//! ```
//! use refrain_driver::{
//!     Baked, Device, DeviceKind, LaunchBuilder, Memory, MemoryLayout, Method, Module, RecordOptions, probe,
//!     sim::SimOptions,
//! };
//!
//! # fn main() -> Result<(), refrain_driver::DriverError> {
//! // The simulated device; `DeviceKind::Cuda(0)` is the first GPU.
//! let device = Device::open(DeviceKind::Sim(SimOptions::default()))?;
//! let ctx = device.context()?; // claims the device for this thread
//! let mut stream = ctx.stream()?;
//!
//! // Plan: every address is fixed here. A `Buf` is a small handle into the memory and holds no borrow.
//! let mut layout = MemoryLayout::new("example");
//! let (x, y) = (layout.device("x", 4096), layout.device("y", 4096));
//! let memory = Memory::plan(&ctx, &layout)?;
//! let (x, y) = (memory.buf(x), memory.buf(y));
//!
//! // Warm up: load code before recording.
//! // SAFETY: this crate's own PTX text, unchanged.
//! let module = unsafe { Module::load(&ctx, "probe", probe::PROBE_PTX) }?;
//! let add = module.function("refrain_probe_add")?;
//! let double = LaunchBuilder::new(&add, 4, 256).step("double").write(y).read(x).read(x).baked(Baked(1024_u32));
//! // SAFETY: the kernel reads and writes 1024 words of each buffer, and each buffer holds 1024 words.
//! let double = unsafe { double.build() };
//!
//! // Record: `q` can only enqueue, and nothing runs yet.
//! let options = RecordOptions::named("double");
//! let graph = stream.record(&memory, Method::Stream, &options, |q| q.launch(&double))?;
//!
//! // Replay with changing data. `out` borrows the lease, so no replay can overwrite it while it is being read.
//! let mut lease = memory.lease()?;
//! for value in [1_u32, 20, 300] {
//!     stream.upload(&mut lease, x, &value.to_le_bytes().repeat(1024))?;
//!     let out = graph.replay(&mut lease, &mut stream)?;
//!     assert!(out.values::<u32>(&mut stream, y)?.iter().all(|&v| v == 2 * value));
//! }
//! # Ok(())
//! # }
//! ```
//!
//! # Where to find what
//!
//! | to | use |
//! |---|---|
//! | open a GPU or the simulation | [`Device`]; a [`Context`] is the right to use it, held by one thread |
//! | run a device thread and send it work with deadlines | [`Device::spawn`], [`Worker`] |
//! | lay out memory | [`MemoryLayout`], [`Memory`], [`Buf`], [`DeviceSlot`], [`Lease`] |
//! | describe a launch | [`Module`], [`Function`], [`LaunchBuilder`], [`Launch`], [`Baked`], [`LibraryCall`] |
//! | enqueue it | [`Queue`], handed out by [`Stream::run`] (executes now) and [`Stream::record`] (builds a graph) |
//! | write inputs between replays | [`Stream::upload`], [`Stream::bulk`], [`Staging`], [`Stream::set`] |
//! | get results back | [`Outputs`], or without a wait a [`Ring`] or [`Readback`] |
//! | replay | [`Graph::replay`] |
//! | repeat a recording on the device | [`Stream::record_loop`], [`LaunchBuilder::condition`], [`Ring::begin_loop`] |
//! | decide whether a driver's stream capture can be trusted | [`trial`] |
//! | diagnose a failure | [`DriverError`] and its [`hint`](DriverError::hint), [`Device::health`], [`doctor`] |
//! | test without a GPU | [`sim`], which also injects faults |
//!
//! # Two ways to record
//!
//! [`Method::Stream`] lets the driver capture a stream; the nodes of the graph form one chain. [`Method::Nodes`]
//! builds the graph explicitly: every call becomes a node, and its edges follow from the bytes it reads and writes.
//! Independent launches can then overlap, and recording works on drivers whose stream capture is broken. Both
//! methods take the same closure as an eager [`Stream::run`], so the three can be compared bit for bit.
//!
//! # After a failure
//!
//! A recording that fails, panics or exceeds its time limit cleans up after itself, and the next one starts from a
//! clean state. Objects dropped during a recording are freed once it has ended. [`Stream::health`] tells whether
//! the stream and its context survived. A lost context is final in its process: from then on every call returns
//! [`DriverError::ContextLost`], which names the last step and kernel sent, and nothing reaches the driver any
//! more.

pub mod api;

mod error; // every failure, with fields to match on

mod device; // opening a device; who owns it
mod worker; // the device thread

mod memory; // planned memory and handles into it
mod pinned; // words that host and device share
mod ring; // kernels to host, without a wait
mod readback; // pinned slots from the device
mod staging; // pinned slots to the device

mod launch; // description of one launch
mod module; // loaded kernels

mod depend; // dependencies from byte ranges
mod nodes; // the sink that builds explicit nodes
mod queue; // the `Queue` trait, and the sink over a stream

mod graph; // recorded graphs and their replay
mod record; // from a closure to a graph

mod event;
mod stream;
mod bulk; // large uploads

mod health; // whether the device still works
mod current_call; // the driver call the device thread is in
mod protocol; // cross-thread state machines, model-checked with loom
mod shared; // state that all handles of a device share
mod watchdog; // aborts a recording that takes too long

pub mod doctor;
pub mod probe;
pub mod sim;
pub mod trial;

mod real; // the real driver

pub use api::{CaptureStatus, Code, DeviceInfo, EdgeKind, FunctionAttribute, NodeKind};
pub use bulk::{Bulk, BulkOptions};
pub use device::{Context, Device, DeviceKind, WeakDevice, capture_status};
pub use error::{DriverError, Lost, WorkOrigin};
pub use event::Event;
pub use graph::{Graph, GraphInfo, Outputs};
pub use health::Health;
pub use launch::{Access, Baked, Dim, Launch, LaunchBuilder};
pub use memory::{Buf, DeviceSlot, Lease, Memory, MemoryLayout, Region};
pub use module::{Function, Module};
pub use queue::{LibraryCall, LibraryStream, Queue};
pub use readback::Readback;
pub use real::raw_driver;
pub use record::{Method, RecordOptions};
pub use ring::{RING_HEADER_BYTES, Ring};
pub use staging::Staging;
pub use stream::Stream;
pub use worker::{WeakWorker, Worker};
