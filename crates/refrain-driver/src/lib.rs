//! The only crate that speaks to a CUDA driver, real or simulated: it records a step once and replays it as one launch.
//!
//! Invariant: a stream that is being recorded can only be enqueued to. Types refuse what they can see; what they cannot
//! (another handle, another thread) is [`DriverError::CaptureIncompatible`], at once.
//! Invariant: every address in a recording is in a [`Memory`] that the [`Graph`] keeps alive.
//! Invariant: one thread makes the calls of a context; only the watchdog and the health check have threads of their own.
//! Threads that fill pinned memory make no calls.
//! Invariant: no wait is without an end, and no panic crosses the API.
//! Invariant: what safe code can do touches only memory of live [`Memory`]s. What it takes on trust is `unsafe` to call:
//! loading code ([`Module::load`]), vouching for a launch ([`LaunchBuilder::build`]), and the raw interfaces.
//! Invariant: this crate does not know what a tensor is.
//!
//! # The life of a step
//!
//! ```
//! use refrain_driver::{
//!     Baked, Device, DeviceKind, LaunchBuilder, MemoryLayout, Memory, Method, Module, RecordOptions, probe, sim::SimOptions,
//! };
//!
//! # fn main() -> Result<(), refrain_driver::DriverError> {
//! // The simulated device; `DeviceKind::Cuda(0)` is the first card.
//! let device = Device::open(DeviceKind::Sim(SimOptions::default()))?;
//! let ctx = device.context()?; // this thread owns the device now
//! let mut stream = ctx.stream()?;
//!
//! // Plan: every address is fixed here. A `Buf` is a small handle, a `DeviceSlot` a value that kernels read from memory.
//! let mut layout = MemoryLayout::new("example");
//! let (x, y) = (layout.device("x", 4096), layout.device("y", 4096));
//! let memory = Memory::plan(&ctx, &layout)?;
//! let (x, y) = (memory.buf(x), memory.buf(y));
//!
//! // Warm: code is loaded before anything is recorded.
//! // SAFETY: the PTX text of this crate, as it is.
//! let module = unsafe { Module::load(&ctx, "probe", probe::PROBE_PTX) }?;
//! let add = module.function("refrain_probe_add")?;
//! let double = LaunchBuilder::new(&add, 4, 256).step("double").write(y).read(x).read(x).baked(Baked(1024_u32));
//! // SAFETY: it reads and writes 1024 words of each buffer, which is all they have.
//! let double = unsafe { double.build() };
//!
//! // Record: `q` can only enqueue. Nothing runs yet.
//! let options = RecordOptions::named("double");
//! let graph = stream.record(&memory, Method::Stream, &options, |q| q.launch(&double))?;
//!
//! // Replay, with data that changes. Outputs borrow the lease, so no replay overwrites what is being read.
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
//! # What is where
//!
//! | to | use |
//! |---|---|
//! | open a card or the simulation | [`Device`]; [`Context`] is the right to use it, on one thread |
//! | own it from a thread and send that thread work, with deadlines | [`Device::spawn`], [`Worker`] |
//! | lay out memory | [`MemoryLayout`], [`Memory`], [`Buf`], [`DeviceSlot`], [`Lease`] |
//! | describe work | [`Module`], [`Function`], [`LaunchBuilder`], [`Launch`], [`Baked`], [`LibraryCall`] |
//! | enqueue it | [`Queue`], handed out by [`Stream::run`] (at once) and [`Stream::record`] (as a graph) |
//! | move bytes between replays | [`Stream::upload`], [`Stream::bulk`], [`Staging`], [`Stream::set`]; results through a [`Ring`] or [`Readback`] |
//! | replay | [`Graph::replay`], [`Outputs`] |
//! | know whether a driver's stream capture can be used | [`trial`] |
//! | know what went wrong | [`DriverError`] and its [`hint`](DriverError::hint), [`Device::health`], [`doctor`] |
//! | test without a GPU | [`sim`], which also injects faults |
//!
//! # The two ways to record
//!
//! [`Method::Stream`] lets the driver capture a stream: one call after the other. [`Method::Nodes`] builds the graph
//! itself: each call is a node that waits for what its bytes depend on, so independent launches run side by side, and
//! it works on drivers where stream capture fails. The closure is the same for both, and for an eager
//! [`run`](Stream::run): that is how the three are compared.
//!
//! # When something fails
//!
//! A recording that fails, panics or takes too long ends itself and leaves nothing behind; the next one starts clean.
//! What was dropped meanwhile is freed when it has ended. After a failure, [`Stream::health`] says whether the stream
//! and the context are still good. A lost context is final in the process: from then on every call returns
//! [`DriverError::ContextLost`], naming the step and kernel sent last, and nothing is sent to the driver any more.

pub mod api;

mod error; // what can go wrong

mod device; // opening a device; who owns it
mod worker; // the device thread

mod memory; // planned memory and handles into it
mod pinned; // what host and device touch at the same time
mod ring; // pinned ring from the device
mod readback; // pinned slots from the device
mod staging; // pinned slots to the device

mod launch; // one launch, described
mod module; // loaded kernels

mod depend; // who waits for whom
mod nodes; // the sink of explicit nodes
mod queue; // the choke point, and the sink over a stream

mod graph; // what was recorded; replay
mod record; // from a closure to a graph

mod event;
mod stream;
mod bulk; // many bytes to the device

mod health; // is the device still good
mod current_call; // which driver call the device thread is in
mod protocol; // what threads agree on, checked under every interleaving
mod shared; // what all handles of a device share
mod watchdog; // breaks a recording off

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
