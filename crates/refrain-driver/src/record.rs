//! Recording, the only way to create a [`Graph`].

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::api::{Api, CaptureMode, CaptureStatus, Code, ConditionHandle, GraphHandle, StreamHandle};
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
        self.record_graph(memory, method, options, false, f)
    }

    /// Records the work that `f` enqueues as the body of a loop that runs on the device: one replay runs the body
    /// until its condition is 0, at least once.
    ///
    /// Launches get the condition with [`crate::LaunchBuilder::condition`] and set it with `cudaGraphSetConditional`;
    /// the last value set in a body decides whether it is repeated. A recording in which no launch gets the condition
    /// is refused, because it would never end ([`DriverError::LoopWithoutEnd`]). That the kernel does end the loop is
    /// up to its author: after a number of bodies that it knows, and as soon as the host requests it with
    /// [`crate::Ring::stop_loop`]. Nothing else can end a loop.
    ///
    /// A body follows the previous one completely: nothing of it starts early. The body may contain launches, copies
    /// and fills, and library calls as far as they consist of such.
    pub fn record_loop(
        &mut self,
        memory: &Arc<Memory>,
        method: Method,
        options: &RecordOptions,
        f: impl FnOnce(&mut dyn Queue) -> Result<(), DriverError>,
    ) -> Result<Graph, DriverError> {
        self.record_graph(memory, method, options, true, f)
    }

    fn record_graph(
        &mut self,
        memory: &Arc<Memory>,
        method: Method,
        options: &RecordOptions,
        repeats: bool,
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
        let target = if repeats { Some(RecordedLoop::create(&shared)?) } else { None };
        match method {
            Method::Stream => self.record_stream(&job, target, f),
            Method::Nodes => record_nodes(&job, target, self.handle(), f),
        }
    }

    fn record_stream(
        &mut self,
        job: &RecordJob<'_>,
        target: Option<RecordedLoop>,
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
            recording: Some(Recording::new(job.watch, job.progress, target.as_ref().map(|t| t.condition))),
            params: Vec::new(),
        };
        let outcome = job.enqueue(f, &mut sink);
        let recording = sink.recording.take();
        job.watch.set_stream(None);
        let ended = capture.end();
        if let Err((_, Some(code))) = &ended {
            self.set_broken(*code);
        }
        let (log, failed, has_condition) =
            recording.map_or((Vec::new(), None, false), |r| (r.log, r.failed, r.has_condition));
        // The first failure is the cause; the closure's result and the capture's end only follow from it.
        job.first_error(outcome, failed)?;
        let graph = ended.map_err(|(error, _)| error)?;
        job.check_end(target.as_ref(), has_condition || log.is_empty())?;
        Graph::finish_captured(job, graph, target, keep, log, self.handle())
    }
}

/// A graph that consists of one loop, whose body is still empty. The body runs at least once per replay.
pub(crate) struct RecordedLoop {
    pub(crate) graph: OwnedGraph,
    /// Belongs to the graph.
    pub(crate) body: GraphHandle,
    condition: ConditionHandle,
}

impl RecordedLoop {
    fn create(shared: &Arc<DeviceShared>) -> Result<RecordedLoop, DriverError> {
        let graph = OwnedGraph::create(shared)?;
        let create = |api: &dyn Api| api.graph_condition(graph.handle, 1);
        let condition = shared.call("cuGraphConditionalHandleCreate", create)?;
        let (_, body) =
            shared.call("cuGraphAddNode", |api| api.graph_add_loop(graph.handle, &[], condition))?;
        Ok(RecordedLoop { graph, body, condition })
    }

    /// Makes a captured graph the body. Capturing into the body itself is not an option: a capture that fails then
    /// destroys the body, and the driver crashes when the graph around it is destroyed (580.159.04).
    pub(crate) fn fill(&self, shared: &DeviceShared, captured: &OwnedGraph) -> Result<(), DriverError> {
        let add = |api: &dyn Api| api.graph_add_child(self.body, &[], captured.handle);
        shared.call("cuGraphAddChildGraphNode", add).map(drop)
    }
}

fn record_nodes(
    job: &RecordJob<'_>,
    target: Option<RecordedLoop>,
    stream: StreamHandle,
    f: impl FnOnce(&mut dyn Queue) -> Result<(), DriverError>,
) -> Result<Graph, DriverError> {
    let own = if target.is_some() { None } else { Some(OwnedGraph::create(job.shared)?) };
    let into = target.as_ref().map(|t| t.body).or(own.as_ref().map(|graph| graph.handle));
    let Some(into) = into else { unreachable!("one of the two exists") };
    let mut sink = NodeSink::new(job, into, target.as_ref().map(|t| t.condition));
    let outcome = job.enqueue(f, &mut sink);
    let (failed, nodes) = sink.finish();
    job.first_error(outcome, failed)?;
    job.check_end(target.as_ref(), nodes.has_condition || nodes.log.is_empty())?;
    Graph::finish_nodes(job, own, target, nodes, stream)
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

    /// Refuses a loop that no launch can end.
    fn check_end(&self, target: Option<&RecordedLoop>, has_end: bool) -> Result<(), DriverError> {
        match target.is_some() && !has_end {
            true => Err(DriverError::LoopWithoutEnd { name: self.options.name.clone() }),
            false => Ok(()),
        }
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
