//! The capture state machine as measured on a real GPU: which calls a capture records, which break it, and with
//! which code.
//!
//! Three kinds of calls matter during a capture. Work on a capturing stream becomes a node. Calls that the driver
//! considers unsafe (allocating, freeing, unloading, instantiating, waiting for anything outside) break captures
//! depending on mode and thread. Waiting for something that includes a capture breaks it in every mode. In
//! addition, work on the legacy stream breaks captures of blocking streams. The tables of the conformance test are
//! the specification; behaviour that they do not measure is marked in the code.

use std::collections::BTreeMap;
use std::thread::ThreadId;

use super::graphs::{GraphDef, GraphSlot, NodeWork, SimNode};
use super::ops::SimOp;
use super::state::{EventState, SimState};
use super::streams::{SimStreamKind, SimWork};
use crate::api::{
    CaptureMode, CaptureStatus, Code, CtxHandle, Dependency, EdgeKind, EventHandle, GraphHandle, NodeHandle,
    NodeKind, RawResult, StreamHandle,
};

pub(super) struct SimCapture {
    pub(super) ctx: CtxHandle,
    pub(super) mode: CaptureMode,
    pub(super) owner: ThreadId,
    origin: StreamHandle,
    broken: bool,
    def: GraphDef,
    /// For each participating stream, the dependencies of its next node.
    frontiers: BTreeMap<StreamHandle, Vec<Dependency>>,
}

impl SimCapture {
    pub(super) fn invalidate(&mut self) {
        self.broken = true;
    }

    pub(super) fn includes(&self, stream: StreamHandle) -> bool {
        self.frontiers.contains_key(&stream)
    }

    fn status(&self) -> CaptureStatus {
        if self.broken { CaptureStatus::Invalidated } else { CaptureStatus::Active }
    }

    /// True if the origin waits for the work of every forked stream.
    fn is_joined(&self) -> bool {
        let origin = self.frontiers.get(&self.origin).map_or(&[][..], Vec::as_slice);
        let joined = self.def.ancestors(origin);
        let tips = self.frontiers.iter().filter(|(s, _)| **s != self.origin).flat_map(|(_, tips)| tips);
        tips.into_iter().all(|tip| self.def.position(tip.on).is_some_and(|i| joined[i]))
    }
}

impl SimState {
    fn capture_id(&self, stream: StreamHandle) -> Option<u64> {
        self.captures.iter().find(|(_, c)| c.includes(stream)).map(|(&id, _)| id)
    }

    /// Capture status of a stream, with the id while active. Querying the legacy stream while a blocking one is
    /// being captured is an error; per the driver's documentation it breaks nothing.
    pub(super) fn capture_status(&self, stream: StreamHandle) -> RawResult<(CaptureStatus, Option<u64>)> {
        let (ctx, kind) = (self.streams[&stream].ctx, self.streams[&stream].kind);
        if kind == SimStreamKind::Legacy && self.captures.values().any(|c| self.captures_blocking(c, ctx)) {
            return Err(Code::STREAM_CAPTURE_IMPLICIT);
        }
        Ok(match self.capture_id(stream) {
            None => (CaptureStatus::None, None),
            Some(id) => {
                let status = self.captures[&id].status();
                (status, (status == CaptureStatus::Active).then_some(id))
            }
        })
    }

    fn captures_blocking(&self, capture: &SimCapture, ctx: CtxHandle) -> bool {
        let kind = |s: &StreamHandle| self.streams.get(s).map(|s| s.kind);
        capture.ctx == ctx && capture.frontiers.keys().any(|s| kind(s) == Some(SimStreamKind::Blocking))
    }

    fn break_captures(&mut self, which: impl Fn(&SimCapture) -> bool) -> bool {
        let hit = self.captures.values_mut().filter(|c| which(c));
        hit.map(SimCapture::invalidate).count() > 0
    }

    /// Invalidates every active capture, for scripted faults.
    pub(super) fn break_all_captures(&mut self) {
        self.break_captures(|_| true);
    }

    /// Checks work on the legacy stream. It would wait for every blocking stream, which is impossible for a
    /// capturing one.
    pub(super) fn check_legacy(&mut self, ctx: CtxHandle) -> RawResult<()> {
        let hit: Vec<u64> =
            self.captures.iter().filter(|(_, c)| self.captures_blocking(c, ctx)).map(|(&id, _)| id).collect();
        for id in &hit {
            self.captures.get_mut(id).into_iter().for_each(SimCapture::invalidate);
        }
        if hit.is_empty() { Ok(()) } else { Err(Code::STREAM_CAPTURE_IMPLICIT) }
    }

    /// Checks a wait for, or a query of, a stream.
    pub(super) fn check_stream_wait(&mut self, stream: StreamHandle) -> RawResult<()> {
        if let Some(capture) = self.capture_id(stream).and_then(|id| self.captures.get_mut(&id)) {
            capture.invalidate();
            return Err(Code::STREAM_CAPTURE_UNSUPPORTED);
        }
        // The legacy stream represents all blocking ones.
        if self.streams[&stream].kind == SimStreamKind::Legacy {
            self.check_legacy(self.streams[&stream].ctx)?;
        }
        self.check_unsafe_call()
    }

    /// Checks a wait for the whole context, which breaks captures of any thread and mode.
    pub(super) fn check_ctx_wait(&mut self, ctx: CtxHandle) -> RawResult<()> {
        if self.break_captures(|c| c.ctx == ctx) { Err(Code::STREAM_CAPTURE_UNSUPPORTED) } else { Ok(()) }
    }

    /// Checks a wait for, or a query of, an event.
    pub(super) fn check_event_wait(&mut self, event: EventHandle) -> RawResult<()> {
        if let EventState::Captured { capture, .. } = self.events[&event].state {
            if let Some(c) = self.captures.get_mut(&capture) {
                c.invalidate();
            }
            return Err(Code::CAPTURED_EVENT);
        }
        self.check_unsafe_call()
    }

    pub(super) fn begin_capture(&mut self, stream: StreamHandle, mode: CaptureMode) -> RawResult<()> {
        let (ctx, kind) = (self.streams[&stream].ctx, self.streams[&stream].kind);
        if kind == SimStreamKind::Legacy {
            return Err(Code::STREAM_CAPTURE_UNSUPPORTED);
        }
        if self.capture_id(stream).is_some() {
            return Err(Code::ILLEGAL_STATE);
        }
        let id = self.handle();
        self.captures.insert(
            id,
            SimCapture {
                ctx,
                mode,
                owner: std::thread::current().id(),
                origin: stream,
                broken: false,
                def: GraphDef::default(),
                frontiers: BTreeMap::from([(stream, Vec::new())]),
            },
        );
        Ok(())
    }

    /// Ends the capture. Whatever the result, the stream is no longer capturing afterwards, unless the capture
    /// began on another stream.
    pub(super) fn end_capture(&mut self, stream: StreamHandle) -> RawResult<GraphHandle> {
        let id = self.capture_id(stream).ok_or(Code::ILLEGAL_STATE)?;
        if self.captures[&id].origin != stream {
            self.break_captures(|c| c.includes(stream));
            return Err(Code::STREAM_CAPTURE_UNMATCHED);
        }
        let Some(capture) = self.captures.remove(&id) else { return Err(Code::ILLEGAL_STATE) };
        if capture.broken {
            return Err(Code::STREAM_CAPTURE_INVALIDATED);
        }
        if capture.mode != CaptureMode::Relaxed && capture.owner != std::thread::current().id() {
            return Err(Code::STREAM_CAPTURE_WRONG_THREAD);
        }
        if !capture.is_joined() {
            return Err(Code::STREAM_CAPTURE_UNJOINED);
        }
        let handle = GraphHandle(self.handle());
        self.graphs.insert(handle, GraphSlot::root(capture.def));
        Ok(handle)
    }

    /// Drops a stream's capture without creating a graph, for an end-capture that a script makes fail.
    pub(super) fn abandon_capture(&mut self, stream: StreamHandle) {
        if let Some(id) = self.capture_id(stream) {
            self.captures.remove(&id);
        }
    }

    /// The capture that records the stream's work, if any.
    pub(super) fn capturing(&self, stream: StreamHandle) -> RawResult<Option<u64>> {
        match self.capture_id(stream) {
            Some(id) if self.captures[&id].broken => Err(Code::STREAM_CAPTURE_INVALIDATED),
            id => Ok(id),
        }
    }

    /// Submits work to a stream: as a node if the stream is capturing, else to its queue.
    pub(super) fn submit(&mut self, stream: StreamHandle, op: SimOp) -> RawResult<Option<u64>> {
        if let Some(id) = self.capturing(stream)? {
            let fault = self.armed.take();
            self.add_captured(id, stream, NodeWork::Op(op, fault));
            return Ok(None);
        }
        if self.streams[&stream].kind == SimStreamKind::Legacy {
            self.check_legacy(self.streams[&stream].ctx)?;
        }
        Ok(Some(self.enqueue(stream, SimWork::Op(op), None)))
    }

    pub(super) fn add_captured(&mut self, id: u64, stream: StreamHandle, work: NodeWork) {
        let handle = NodeHandle(self.handle());
        let Some(capture) = self.captures.get_mut(&id) else { return };
        let frontier = capture.frontiers.entry(stream).or_default();
        let mut deps = std::mem::replace(frontier, vec![Dependency { on: handle, kind: EdgeKind::Full }]);
        // A programmatic launch directly after a single kernel becomes a programmatic edge; after anything else it
        // waits.
        if let NodeWork::Op(SimOp::Kernel(k), _) = &work
            && k.config.programmatic
            && let [dep] = deps.as_mut_slice()
            && capture.def.position(dep.on).is_some_and(|i| capture.def.nodes[i].kind() == NodeKind::Kernel)
        {
            dep.kind = EdgeKind::Programmatic;
        }
        capture.def.nodes.push(SimNode { handle, work, deps });
    }

    /// `cuEventRecord`.
    pub(super) fn record_event(&mut self, event: EventHandle, stream: StreamHandle) -> RawResult<()> {
        let state = match self.capturing(stream)? {
            Some(id) => {
                let frontier = self.captures[&id].frontiers[&stream].clone();
                EventState::Captured { capture: id, frontier }
            }
            None => {
                if self.streams[&stream].kind == SimStreamKind::Legacy {
                    self.check_legacy(self.streams[&stream].ctx)?;
                }
                let item = self.enqueue(stream, SimWork::Event(event), None);
                EventState::Recorded { item, clock: self.streams[&stream].clock.clone(), done_at_ns: None }
            }
        };
        if let Some(e) = self.events.get_mut(&event) {
            e.state = state;
        }
        Ok(())
    }

    /// `cuStreamWaitEvent`: orders two streams, forks or joins a capture, or violates its isolation.
    pub(super) fn wait_event(&mut self, stream: StreamHandle, event: EventHandle) -> RawResult<()> {
        let capture = self.capturing(stream)?;
        match (capture, self.events[&event].state.clone()) {
            (Some(id), EventState::Captured { capture, frontier }) if capture == id => {
                self.join_frontier(id, stream, frontier);
                Ok(())
            }
            (Some(id), EventState::Captured { capture, .. }) if self.captures.contains_key(&capture) => {
                for id in [id, capture] {
                    self.captures.get_mut(&id).into_iter().for_each(SimCapture::invalidate);
                }
                Err(Code::STREAM_CAPTURE_MERGE)
            }
            (_, EventState::Never) => Ok(()),
            (Some(id), _) => {
                self.captures.get_mut(&id).into_iter().for_each(SimCapture::invalidate);
                Err(Code::STREAM_CAPTURE_ISOLATION)
            }
            (None, EventState::Recorded { item, clock, .. }) => {
                if self.streams[&stream].kind == SimStreamKind::Legacy {
                    self.check_legacy(self.streams[&stream].ctx)?;
                }
                self.enqueue(stream, SimWork::Op(SimOp::Empty), Some((item, &clock)));
                Ok(())
            }
            (None, EventState::Captured { capture, frontier }) => match self.captures.get_mut(&capture) {
                Some(c) if c.broken => Err(Code::STREAM_CAPTURE_INVALIDATED),
                Some(c) if self.streams[&stream].kind == SimStreamKind::Legacy => {
                    c.invalidate();
                    Err(Code::STREAM_CAPTURE_IMPLICIT)
                }
                Some(_) => {
                    self.join_frontier(capture, stream, frontier);
                    Ok(())
                }
                None => Err(Code::CAPTURED_EVENT),
            },
        }
    }

    fn join_frontier(&mut self, id: u64, stream: StreamHandle, tips: Vec<Dependency>) {
        if let Some(capture) = self.captures.get_mut(&id) {
            let frontier = capture.frontiers.entry(stream).or_default();
            for dep in tips {
                if !frontier.contains(&dep) {
                    frontier.push(dep);
                }
            }
        }
    }
}
