//! Recording, the only way to create a [`Graph`].

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::api::{CaptureMode, CaptureStatus, Code, GraphHandle, StreamHandle};
use crate::error::{DriverError, panic_message};
use crate::graph::Graph;
use crate::memory::Memory;
use crate::nodes::NodeSink;
use crate::queue::{Keep, Queue, Recording, StreamSink};
use crate::shared::DeviceShared;
use crate::stream::Stream;
use crate::watchdog::{RecordingProgress, WatchGuard};

/// How a graph is recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Method {
    /// The driver captures the stream; nodes form one chain.
    Stream,
    /// Each call becomes a node, and edges follow from the bytes that it accesses. Except for library calls this
    /// needs no stream capture, so it also works on drivers whose capture is broken.
    Nodes,
}

impl std::fmt::Display for Method {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Method::Stream => "stream capture",
            Method::Nodes => "explicit nodes",
        })
    }
}

/// Options of a recording.
#[derive(Clone, Debug)]
pub struct RecordOptions {
    /// Name of the graph in errors and drawings.
    pub name: String,
    /// Time limit, after which the watchdog aborts the recording.
    pub limit: Duration,
    /// Whether [`crate::LaunchBuilder::pdl`] is honoured.
    pub overlap: bool,
    /// Captures in GLOBAL mode instead of THREAD_LOCAL, so that unsafe calls of other threads break the capture
    /// too. For tests.
    pub global: bool,
}

impl RecordOptions {
    /// The defaults: a limit of ten seconds, overlap on.
    #[must_use]
    pub fn named(name: &str) -> RecordOptions {
        RecordOptions { name: name.to_owned(), limit: Duration::from_secs(10), overlap: true, global: false }
    }
}

impl Stream {
    /// Records the work that `f` enqueues as a graph, without running it.
    ///
    /// The stream is borrowed while `f` runs, so `f` can neither wait for it nor read from it. A call that reaches
    /// the device another way and conflicts with a recording is refused ([`DriverError::CaptureIncompatible`]). If
    /// `f` fails or panics, the recording ends and leaves nothing behind.
    ///
    /// ```compile_fail,E0500
    /// # use refrain_driver::*;
    /// # use std::sync::Arc;
    /// # fn f(stream: &mut Stream, memory: &Arc<Memory>, options: &RecordOptions) -> Result<(), DriverError> {
    /// stream.record(memory, Method::Stream, options, |q| {
    ///     stream.synchronize() // a stream that is being recorded cannot be waited for
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// ```compile_fail,E0500
    /// # use refrain_driver::*;
    /// # use std::sync::Arc;
    /// # fn f(stream: &mut Stream, lease: &Lease, memory: &Arc<Memory>, logits: Buf, options: &RecordOptions)
    /// # -> Result<(), DriverError> {
    /// stream.record(memory, Method::Nodes, options, |q| {
    ///     let mut host = [0; 4];
    ///     stream.download(lease, logits, &mut host) // nor can it be read from
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// ```compile_fail,E0277
    /// # use refrain_driver::*;
    /// # use std::sync::Arc;
    /// # fn f(stream: &mut Stream, memory: &Arc<Memory>, launch: &Launch, options: &RecordOptions)
    /// # -> Result<(), DriverError> {
    /// stream.record(memory, Method::Stream, options, |q| {
    ///     std::thread::scope(|s| s.spawn(move || q.launch(launch)).join().unwrap()) // the recorder must stay on this thread
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn record(
        &mut self,
        memory: &Arc<Memory>,
        method: Method,
        options: &RecordOptions,
        f: impl FnOnce(&mut dyn Queue) -> Result<(), DriverError>,
    ) -> Result<Graph, DriverError> {
        let shared = Arc::clone(self.shared());
        if !Arc::ptr_eq(memory.shared(), &shared) {
            return Err(DriverError::ForeignDevice { what: "the memory" });
        }
        self.check_broken()?;
        let started = Instant::now();
        // Dropped last: other calls are allowed again only once nothing of the recording is left.
        let _flag = shared.begin_recording()?;
        let progress = RecordingProgress::new(&options.name);
        let watch = shared.watchdog.arm(&shared, options.limit, &progress);
        let job = RecordJob { shared: &shared, memory, options, watch: &watch, progress: &progress, started };
        match method {
            Method::Stream => self.record_stream(&job, f),
            Method::Nodes => record_nodes(&job, self.handle(), f),
        }
    }

    fn record_stream(
        &mut self,
        job: &RecordJob<'_>,
        f: impl FnOnce(&mut dyn Queue) -> Result<(), DriverError>,
    ) -> Result<Graph, DriverError> {
        let mut keep = Keep::default();
        let mode = if job.options.global { CaptureMode::Global } else { CaptureMode::ThreadLocal };
        let capture = StreamCapture::begin(job.shared, self.handle(), mode)?;
        job.watch.set_stream(Some(self.handle()));
        let mut sink = StreamSink {
            shared: job.shared,
            memory: job.memory,
            stream: self.handle(),
            keep: &mut keep,
            overlap: job.options.overlap,
            recording: Some(Recording::new(job.watch, job.progress)),
            params: Vec::new(),
        };
        let outcome = job.enqueue(f, &mut sink);
        let recording = sink.recording.take();
        job.watch.set_stream(None);
        let ended = capture.end();
        if let Err((_, Some(code))) = &ended {
            self.set_broken(*code);
        }
        let (log, failed) = recording.map_or((Vec::new(), None), |r| (r.log, r.failed));
        // The first failure is the cause; the closure's result and the capture's end only follow from it.
        job.first_error(outcome, failed)?;
        let graph = ended.map_err(|(error, _)| error)?;
        Graph::finish_captured(job, graph, keep, log, self.handle())
    }
}

fn record_nodes(
    job: &RecordJob<'_>,
    stream: StreamHandle,
    f: impl FnOnce(&mut dyn Queue) -> Result<(), DriverError>,
) -> Result<Graph, DriverError> {
    let graph = OwnedGraph::create(job.shared)?;
    let mut sink = NodeSink::new(job, &graph);
    let outcome = job.enqueue(f, &mut sink);
    let (failed, nodes) = sink.finish();
    job.first_error(outcome, failed)?;
    Graph::finish_nodes(job, graph, nodes, stream)
}

/// Context of one recording.
pub(crate) struct RecordJob<'a> {
    pub(crate) shared: &'a Arc<DeviceShared>,
    pub(crate) memory: &'a Arc<Memory>,
    pub(crate) options: &'a RecordOptions,
    pub(crate) watch: &'a WatchGuard,
    pub(crate) progress: &'a RecordingProgress,
    pub(crate) started: Instant,
}

impl RecordJob<'_> {
    /// Runs the closure. A panic becomes an error and is cleaned up like any other.
    fn enqueue(
        &self,
        f: impl FnOnce(&mut dyn Queue) -> Result<(), DriverError>,
        sink: &mut dyn Queue,
    ) -> Result<(), DriverError> {
        // Unwind safety: after a panic the sink is only dropped; its log is not used.
        catch_unwind(AssertUnwindSafe(|| f(sink))).unwrap_or_else(|payload| {
            let what = format!("recording {:?}", self.options.name);
            Err(DriverError::Panicked { what, message: panic_message(&*payload) })
        })
    }

    fn first_error(
        &self,
        outcome: Result<(), DriverError>,
        failed: Option<DriverError>,
    ) -> Result<(), DriverError> {
        self.shared.check_lost()?;
        if matches!(outcome, Err(DriverError::Panicked { .. })) {
            return outcome;
        }
        if self.watch.expired() {
            return Err(self.watch.deadline_error());
        }
        if let Some(first) = failed {
            return Err(first);
        }
        outcome
    }
}

/// A stream capture in progress; dropping it ends and discards it.
pub(crate) struct StreamCapture<'a> {
    shared: &'a Arc<DeviceShared>,
    stream: StreamHandle,
    active: bool,
}

impl<'a> StreamCapture<'a> {
    pub(crate) fn begin(
        shared: &'a Arc<DeviceShared>,
        stream: StreamHandle,
        mode: CaptureMode,
    ) -> Result<StreamCapture<'a>, DriverError> {
        shared.call("cuStreamBeginCapture", |api| api.stream_begin_capture(stream, mode))?;
        Ok(StreamCapture { shared, stream, active: true })
    }

    /// Ends the capture. The code in the error is set if the stream is stuck in capture mode.
    pub(crate) fn end(mut self) -> Result<OwnedGraph, (DriverError, Option<Code>)> {
        self.active = false;
        self.end_now()
    }

    fn end_now(&self) -> Result<OwnedGraph, (DriverError, Option<Code>)> {
        let shared = self.shared;
        let end = || {
            let _call = shared.current_call.enter("cuStreamEndCapture");
            shared.raw(|api| api.stream_end_capture(self.stream))
        };
        let code = match end() {
            Ok(Ok(handle)) => return Ok(OwnedGraph { shared: Arc::clone(shared), handle }),
            Ok(Err(code)) => code,
            Err(lost) => return Err((lost, None)),
        };
        let error = shared.fail("cuStreamEndCapture", code);
        if error.is_final() {
            return Err((error, None));
        }
        // An error normally ends the capture too. If it did not, try once more, then give the stream up.
        let has_ended = |status| matches!(status, Ok(CaptureStatus::None));
        if has_ended(shared.probe_status(self.stream)) {
            return Err((error, None));
        }
        if let Ok(Ok(handle)) = end() {
            drop(OwnedGraph { shared: Arc::clone(shared), handle });
        }
        let stuck = !has_ended(shared.probe_status(self.stream));
        Err((error, stuck.then_some(code)))
    }
}

impl Drop for StreamCapture<'_> {
    fn drop(&mut self) {
        if self.active
            && let Err((error, _)) = self.end_now()
        {
            tracing::debug!("discarded a capture: {error}");
        }
    }
}

/// A graph that is not instantiated yet; destroyed on drop.
pub(crate) struct OwnedGraph {
    shared: Arc<DeviceShared>,
    pub(crate) handle: GraphHandle,
}

impl OwnedGraph {
    pub(crate) fn create(shared: &Arc<DeviceShared>) -> Result<OwnedGraph, DriverError> {
        let handle = shared.call("cuGraphCreate", |api| api.graph_create())?;
        Ok(OwnedGraph { shared: Arc::clone(shared), handle })
    }
}

impl Drop for OwnedGraph {
    fn drop(&mut self) {
        if let Err(error) = self.shared.call("cuGraphDestroy", |api| api.graph_destroy(self.handle))
            && !error.is_final()
        {
            tracing::warn!("{error}");
        }
    }
}
