//! The choke point: everything that is enqueued goes through [`Queue`].

use std::any::Any;
use std::sync::Arc;

use crate::api::{ConditionHandle, NodeKind, StreamHandle};
use crate::error::{DriverError, WorkOrigin};
use crate::launch::Launch;
use crate::memory::{Buf, BufAddress, Memory};
use crate::shared::DeviceShared;
use crate::watchdog::{RecordingProgress, WatchGuard};

/// Accepts work in order. A queue can only enqueue; it cannot allocate, wait or read back. Any code written against
/// a `Queue` can therefore be recorded.
///
/// The trait is sealed and has three sinks: a live stream, a stream under capture, and the recorder of explicit
/// nodes.
///
/// ```compile_fail,E0277
/// # use refrain_driver::{Queue, Launch, DriverError};
/// fn on_another_thread(q: &mut dyn Queue, l: &Launch) {
///     std::thread::scope(|s| { s.spawn(|| q.launch(l)); }); // a recorder must stay on its thread
/// }
/// ```
pub trait Queue: sealed::Sealed {
    /// Launches a kernel.
    fn launch(&mut self, launch: &Launch) -> Result<(), DriverError>;
    /// Copies `src` to `dst`, which must be equally long.
    fn copy(&mut self, dst: Buf, src: Buf) -> Result<(), DriverError>;
    /// Fills `dst` with one byte value.
    fn fill(&mut self, dst: Buf, byte: u8) -> Result<(), DriverError>;
    /// Makes a library call, which needs a stream.
    fn library(&mut self, call: &LibraryCall<'_>) -> Result<(), DriverError>;
}

pub(crate) mod sealed {
    pub trait Sealed {}
}

/// A call into a library (cuBLASLt) that enqueues work on a stream itself.
///
/// It must only enqueue, and access only the buffers declared here. Only verification (comparing a replay with an
/// eager run) checks this.
pub struct LibraryCall<'a> {
    /// The step, for errors and drawings.
    pub step: Arc<str>,
    /// The library's routine.
    pub name: Arc<str>,
    /// Buffers that it reads.
    pub reads: Vec<Buf>,
    /// Buffers that it writes, including its workspace.
    pub writes: Vec<Buf>,
    /// An object that must outlive every replay, such as the library's handle.
    pub keep: Option<Arc<dyn Any + Send + Sync>>,
    /// Makes the call.
    pub run: &'a dyn Fn(&mut LibraryStream<'_>) -> Result<(), DriverError>,
}

impl std::fmt::Debug for LibraryCall<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "LibraryCall {:?} of step {:?}", &*self.name, &*self.step)
    }
}

/// The stream and the addresses that a library call works with. Both are plain numbers: using them takes the
/// library's own `unsafe` interface, and with it the duty to keep alive whatever the work points to
/// ([`LibraryCall::keep`]).
///
/// ```compile_fail,E0599
/// # use refrain_driver::{DriverError, Launch, LibraryStream};
/// fn launch(stream: &mut LibraryStream<'_>, launch: &Launch) -> Result<(), DriverError> {
///     stream.launch(launch) // nothing would keep the kernel's module alive for later replays
/// }
/// ```
pub struct LibraryStream<'a> {
    pub(crate) memory: &'a Memory,
    pub(crate) stream: StreamHandle,
}

impl LibraryStream<'_> {
    /// The driver's stream handle. The call may only enqueue on it.
    #[must_use]
    pub fn raw(&self) -> u64 {
        self.stream.0
    }

    /// The address of a buffer.
    pub fn address(&self, buf: Buf) -> Result<u64, DriverError> {
        Ok(self.memory.resolve(buf)?.address())
    }
}

/// Objects kept alive until the work that uses them is done. Each object is stored once.
#[derive(Default)]
pub(crate) struct Keep(Vec<Arc<dyn Any + Send + Sync>>);

impl Keep {
    pub(crate) fn add<T: Any + Send + Sync>(&mut self, object: &Arc<T>) {
        let address = Arc::as_ptr(object).cast::<()>();
        if !self.0.iter().rev().any(|k| Arc::as_ptr(k).cast::<()>() == address) {
            let object: Arc<T> = Arc::clone(object);
            self.0.push(object);
        }
    }

    pub(crate) fn add_dyn(&mut self, object: &Arc<dyn Any + Send + Sync>) {
        let address = Arc::as_ptr(object).cast::<()>();
        if !self.0.iter().any(|k| Arc::as_ptr(k).cast::<()>() == address) {
            self.0.push(Arc::clone(object));
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }

    pub(crate) fn leak(&mut self) {
        std::mem::take(&mut self.0).into_iter().for_each(std::mem::forget);
    }
}

/// State of a recording, common to the sinks that record.
pub(crate) struct Recording<'a> {
    pub(crate) watch: &'a WatchGuard,
    pub(crate) progress: &'a RecordingProgress,
    /// Enqueued work, in order.
    pub(crate) log: Vec<(NodeKind, WorkOrigin)>,
    /// The first error. It is the one to report, since later ones follow from it.
    pub(crate) failed: Option<DriverError>,
    /// The condition of the loop whose body is recorded.
    pub(crate) condition: Option<ConditionHandle>,
    /// Whether a launch got it, so that the loop can end.
    pub(crate) has_condition: bool,
}

impl<'a> Recording<'a> {
    pub(crate) fn new(
        watch: &'a WatchGuard,
        progress: &'a RecordingProgress,
        condition: Option<ConditionHandle>,
    ) -> Recording<'a> {
        Recording { watch, progress, log: Vec::new(), failed: None, condition, has_condition: false }
    }

    /// Runs one enqueue, unless the recording has failed or passed its deadline. Logs the work before it starts.
    pub(crate) fn step(
        &mut self,
        kind: NodeKind,
        origin: WorkOrigin,
        f: impl FnOnce() -> Result<(), DriverError>,
    ) -> Result<(), DriverError> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        if self.watch.expired() {
            return Err(self.watch.deadline_error());
        }
        self.progress.note(origin.clone());
        match f() {
            Ok(()) => {
                self.log.push((kind, origin));
                Ok(())
            }
            Err(error) => {
                self.failed = Some(error.clone());
                Err(error)
            }
        }
    }
}

/// The sink over a stream, which is live, or under capture if it has a `Recording`.
pub(crate) struct StreamSink<'a> {
    pub(crate) shared: &'a Arc<DeviceShared>,
    pub(crate) memory: &'a Arc<Memory>,
    pub(crate) stream: StreamHandle,
    pub(crate) keep: &'a mut Keep,
    pub(crate) overlap: bool,
    pub(crate) recording: Option<Recording<'a>>,
    pub(crate) params: Vec<u8>,
}

impl StreamSink<'_> {
    fn step(
        &mut self,
        kind: NodeKind,
        origin: WorkOrigin,
        f: impl FnOnce() -> Result<(), DriverError>,
    ) -> Result<(), DriverError> {
        match &mut self.recording {
            Some(recording) => recording.step(kind, origin, f),
            None => {
                self.shared.set_last(origin);
                f()
            }
        }
    }
}

impl sealed::Sealed for StreamSink<'_> {}

impl Queue for StreamSink<'_> {
    fn launch(&mut self, launch: &Launch) -> Result<(), DriverError> {
        let mut params = std::mem::take(&mut self.params);
        let (shared, memory, stream) = (self.shared, self.memory, self.stream);
        let config = launch.config(self.overlap);
        let condition = self.recording.as_ref().and_then(|recording| recording.condition);
        let result = self.step(NodeKind::Kernel, launch.origin(), || {
            launch.pack(shared, memory, condition, &mut params)?;
            let function = launch.function().handle();
            shared.call("cuLaunchKernelEx", |api| api.launch(function, &config, stream, &params))
        });
        self.params = params;
        self.keep.add(launch.function().module());
        if let Some(recording) = &mut self.recording {
            recording.has_condition |= launch.takes_condition();
        }
        result
    }

    fn copy(&mut self, dst: Buf, src: Buf) -> Result<(), DriverError> {
        let (to, from, bytes) = copy_ends(self.memory, dst, src)?;
        if bytes == 0 {
            return Ok(());
        }
        let (shared, stream) = (self.shared, self.stream);
        self.step(NodeKind::Memcpy, call_origin("copy"), || {
            shared.call("cuMemcpyAsync", |api| match (to, from) {
                (BufAddress::Device(to), BufAddress::Device(from)) => {
                    api.memcpy_dtod_async(to, from, bytes, stream)
                }
                // SAFETY: `from` is pinned and inside `self.memory`, which the stream (live) or the graph
                // (recorded) keeps alive until the last use; the host writes pinned regions only atomically,
                // through `pinned`.
                (BufAddress::Device(to), BufAddress::Host(from)) => unsafe {
                    api.memcpy_htod_async(to, from, bytes, stream)
                },
                // SAFETY: as above, for `to`; the host reads pinned regions only atomically, through `pinned`.
                (BufAddress::Host(to), BufAddress::Device(from)) => unsafe {
                    api.memcpy_dtoh_async(to, from, bytes, stream)
                },
                // Pinned memory has a device address too.
                (BufAddress::Host(to), BufAddress::Host(from)) => {
                    api.memcpy_dtod_async(to.device(), from.device(), bytes, stream)
                }
            })
        })
    }

    fn fill(&mut self, dst: Buf, byte: u8) -> Result<(), DriverError> {
        let address = self.memory.resolve(dst)?;
        if dst.is_empty() {
            return Ok(());
        }
        let (shared, stream) = (self.shared, self.stream);
        let to = crate::api::DevicePtr(address.address());
        self.step(NodeKind::Memset, call_origin("fill"), || {
            shared.call("cuMemsetD8Async", |api| api.memset_async(to, byte, dst.len(), stream))
        })
    }

    fn library(&mut self, call: &LibraryCall<'_>) -> Result<(), DriverError> {
        for buf in call.reads.iter().chain(&call.writes) {
            self.memory.resolve(*buf)?;
        }
        let (memory, stream) = (self.memory, self.stream);
        if let Some(keep) = &call.keep {
            self.keep.add_dyn(keep);
        }
        self.step(NodeKind::Child, library_origin(call), || (call.run)(&mut LibraryStream { memory, stream }))
    }
}

/// Resolves both ends of a copy and checks their lengths.
pub(crate) fn copy_ends(
    memory: &Memory,
    dst: Buf,
    src: Buf,
) -> Result<(BufAddress, BufAddress, u64), DriverError> {
    let (to, from) = (memory.resolve(dst)?, memory.resolve(src)?);
    if dst.len() != src.len() {
        let what = "a copy".to_owned();
        return Err(DriverError::SizeMismatch { what, expected: dst.len(), given: src.len() });
    }
    Ok((to, from, dst.len()))
}

pub(crate) fn call_origin(what: &str) -> WorkOrigin {
    WorkOrigin { step: Arc::from(""), kernel: Arc::from(what), replay: None }
}

pub(crate) fn library_origin(call: &LibraryCall<'_>) -> WorkOrigin {
    WorkOrigin { step: Arc::clone(&call.step), kernel: Arc::clone(&call.name), replay: None }
}
