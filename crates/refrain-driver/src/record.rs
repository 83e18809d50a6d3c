//! Recording: the one way to a [`Graph`].

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

/// How a graph comes about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Method {
    /// The driver captures what is enqueued on the stream: one after the other.
    Stream,
    /// Each call becomes a node, and nodes wait for each other where their bytes say so. It needs no stream capture
    /// (but for library calls), so it also works on drivers where capture fails.
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

/// How a recording is made.
#[derive(Clone, Debug)]
pub struct RecordOptions {
    /// Names the graph in errors and drawings.
    pub name: String,
    /// The watchdog breaks the recording off after this long.
    pub limit: Duration,
    /// Whether [`crate::LaunchBuilder::pdl`] is honoured.
    pub overlap: bool,
    /// Captures in GLOBAL mode instead of THREAD_LOCAL: unsafe calls of other threads then break the capture too. For
    /// tests.
    pub global: bool,
}

impl RecordOptions {
    /// The usual ones: ten seconds, overlap on.
    #[must_use]
    pub fn named(name: &str) -> RecordOptions {
        RecordOptions { name: name.to_owned(), limit: Duration::from_secs(10), overlap: true, global: false }
    }
}

impl Stream {
    /// Records what `f` enqueues, without running it, and makes it a graph.
    ///
    /// While `f` runs, the stream is borrowed, so it can be neither waited for nor read from; whatever reaches the
    /// device by another way and does not go with a recording is refused
    /// ([`DriverError::CaptureIncompatible`]). The recording ends itself when `f` fails or panics, and then nothing is
    /// left of it.
    ///
    /// ```compile_fail,E0500
    /// # use refrain_driver::*;
    /// # use std::sync::Arc;
    /// # fn f(stream: &mut Stream, memory: &Arc<Memory>, options: &RecordOptions) -> Result<(), DriverError> {
    /// stream.record(memory, Method::Stream, options, |q| {
    ///     stream.synchronize() // a stream cannot be waited for while it is being recorded
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
    ///     stream.download(lease, logits, &mut host) // nor read from
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
    ///     std::thread::scope(|s| s.spawn(move || q.launch(launch)).join().unwrap()) // the recorder stays here
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
        // Dropped last: the device is free for other calls again only when nothing of the recording is left.
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
        // The first failure is the cause; what the closure returned and how the capture ended are its victims.
        job.settle(outcome, failed)?;
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
    let (failed, parts) = sink.into_parts();
    job.settle(outcome, failed)?;
    Graph::finish_nodes(job, graph, parts, stream)
}

/// What one recording is about.
pub(crate) struct RecordJob<'a> {
    pub(crate) shared: &'a Arc<DeviceShared>,
    pub(crate) memory: &'a Arc<Memory>,
    pub(crate) options: &'a RecordOptions,
    pub(crate) watch: &'a WatchGuard,
    pub(crate) progress: &'a RecordingProgress,
    pub(crate) started: Instant,
}

impl RecordJob<'_> {
    /// Runs the closure; a panic becomes an error, after which everything is taken down as for any error.
    fn enqueue(
        &self,
        f: impl FnOnce(&mut dyn Queue) -> Result<(), DriverError>,
        sink: &mut dyn Queue,
    ) -> Result<(), DriverError> {
        // Unwind safety: on a panic the sink is only asked for its log and dropped.
        catch_unwind(AssertUnwindSafe(|| f(sink))).unwrap_or_else(|payload| {
            let what = format!("recording {:?}", self.options.name);
            Err(DriverError::Panicked { what, message: panic_message(&*payload) })
        })
    }

    fn settle(
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

/// A stream capture under way; dropping it ends and discards it.
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

    /// Ends the capture. The second part of an error is set when the stream could not be brought out of it.
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
        // An error ends the capture too. Should it not have: once more, else the stream is given up.
        let left = |status| matches!(status, Ok(CaptureStatus::None));
        if left(shared.probe_status(self.stream)) {
            return Err((error, None));
        }
        if let Ok(Ok(handle)) = end() {
            drop(OwnedGraph { shared: Arc::clone(shared), handle });
        }
        let stuck = !left(shared.probe_status(self.stream));
        Err((error, stuck.then_some(code)))
    }
}

impl Drop for StreamCapture<'_> {
    fn drop(&mut self) {
        if self.active
            && let Err((error, _)) = self.end_now()
        {
            tracing::debug!("a capture was discarded: {error}");
        }
    }
}

/// A graph that can be edited, destroyed when it goes.
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
