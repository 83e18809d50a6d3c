//! Streams: queues of work that runs when somebody waits or at random, and never before its dependencies.

use std::collections::VecDeque;
use std::sync::Arc;

use super::graphs::{Advance, FlatGraph, GraphRun};
use super::memory::Fault;
use super::ops::{OpRun, SimHostCall, SimOp, WorkFault, falsify, falsify_host};
use super::races::{AccessLog, Clock, SimAccess, describe};
use super::state::{EventState, SimState};
use crate::api::{Code, ConditionHandle, CopyEnd, CtxHandle, EventHandle, StreamHandle};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SimStreamKind {
    Legacy,
    Blocking,
    NonBlocking,
}

pub(super) enum SimWork {
    Op(SimOp),
    Event(EventHandle),
    Graph(GraphRun),
}

pub(super) struct QueueItem {
    id: u64,
    /// Items of other streams that must complete first.
    waits: Vec<u64>,
    work: SimWork,
    fault: Option<WorkFault>,
    clock: Clock,
}

pub(super) struct SimStream {
    pub(super) ctx: CtxHandle,
    pub(super) kind: SimStreamKind,
    pub(super) queue: VecDeque<QueueItem>,
    /// Its index in clocks.
    pub(super) idx: usize,
    pub(super) clock: Clock,
    /// Id of the latest item, done or not.
    pub(super) last: u64,
    /// True while one of its host functions is being called, outside the lock.
    pub(super) busy: bool,
    /// True if destroyed with work pending; it is removed once the queue is empty.
    pub(super) destroyed: bool,
    /// Accesses of the current chain of programmatic launches, whose next launch may start before they end.
    chain: Vec<(Arc<str>, SimAccess)>,
}

/// Number of ranges kept per chain; older launches are assumed to have ended.
const MAX_CHAIN: usize = 1024;

/// Outcome of one step of a stream.
pub(super) enum StreamStep {
    Ran,
    Idle,
    /// Waits for another stream.
    Blocked,
    /// Another thread is calling one of its host functions.
    Busy,
    /// The caller must call this function without the lock, and then [`SimState::host_call_done`].
    HostCall(SimHostCall),
}

impl SimState {
    pub(super) fn create_stream(&mut self, ctx: CtxHandle, kind: SimStreamKind) -> StreamHandle {
        let handle = StreamHandle(self.handle());
        let idx = self.free_indices.pop().unwrap_or_else(|| {
            self.n_indices += 1;
            self.n_indices - 1
        });
        let mut clock = self.host_clock.clone();
        clock.set(idx, self.counts.get(idx));
        self.streams.insert(
            handle,
            SimStream {
                ctx,
                kind,
                queue: VecDeque::new(),
                idx,
                clock,
                last: 0,
                busy: false,
                destroyed: false,
                chain: Vec::new(),
            },
        );
        handle
    }

    pub(super) fn remove_stream(&mut self, handle: StreamHandle) {
        if let Some(stream) = self.streams.remove(&handle) {
            stream.queue.iter().for_each(|item| {
                self.pending.remove(&item.id);
            });
            self.free_indices.push(stream.idx);
        }
    }

    /// Queues work after everything that the stream must wait for, and after `after`.
    pub(super) fn enqueue(
        &mut self,
        handle: StreamHandle,
        work: SimWork,
        after: Option<(u64, &Clock)>,
    ) -> u64 {
        let id = self.next_item;
        self.next_item += 1;
        let (ctx, kind, idx) = {
            let s = &self.streams[&handle];
            (s.ctx, s.kind, s.idx)
        };
        let mut clock = self.streams[&handle].clock.clone();
        clock.join(&self.host_clock);
        let mut waits: Vec<u64> = Vec::new();
        if let Some((item, seen)) = after {
            waits.push(item);
            clock.join(seen);
        }
        // The legacy stream waits for every blocking one, and every blocking one for it.
        for other in self.streams.values().filter(|s| s.ctx == ctx) {
            if matches!(
                (kind, other.kind),
                (SimStreamKind::Legacy, SimStreamKind::Blocking)
                    | (SimStreamKind::Blocking, SimStreamKind::Legacy)
            ) {
                waits.push(other.last);
                clock.join(&other.clock);
            }
        }
        waits.retain(|w| self.pending.contains_key(w));
        let count = self.counts.get(idx) + 1;
        self.counts.set(idx, count);
        clock.set(idx, count);
        let fault = self.armed.take();
        if let Some(stream) = self.streams.get_mut(&handle) {
            stream.clock = clock.clone();
            stream.last = id;
            stream.queue.push_back(QueueItem { id, waits, work, fault, clock });
        }
        self.pending.insert(id, handle);
        id
    }

    /// Runs the stream's next unit of work: an operation or one node of a graph.
    pub(super) fn step(&mut self, handle: StreamHandle) -> StreamStep {
        let Some(stream) = self.streams.get_mut(&handle) else { return StreamStep::Idle };
        if stream.busy {
            return StreamStep::Busy;
        }
        let Some(item) = stream.queue.front() else { return StreamStep::Idle };
        if item.waits.iter().any(|w| self.pending.contains_key(w)) {
            return StreamStep::Blocked;
        }
        let Some(mut item) = stream.queue.pop_front() else { return StreamStep::Idle };
        if let Some(WorkFault::Sticky(code)) = item.fault {
            self.lose(code, format!("scripted fault: {code} while {} runs", item.what()));
            return StreamStep::Ran;
        }
        if let SimWork::Op(SimOp::Host(call)) = item.work {
            item.work = SimWork::Op(SimOp::Empty);
            return self.call_host(handle, item, call);
        }
        if let SimWork::Graph(run) = &mut item.work {
            match run.advance(&mut self.rng, &mut self.conditions) {
                Advance::Node(graph, node) => return self.step_graph(handle, item, &graph, node),
                Advance::Done => {}
                Advance::Endless => {
                    // Not measured: such a loop would never end.
                    self.lose(Code::LAUNCH_TIMEOUT, "a loop without nodes never ends".to_owned());
                    return StreamStep::Ran;
                }
            }
        }
        self.complete(handle, item);
        StreamStep::Ran
    }

    fn call_host(&mut self, handle: StreamHandle, item: QueueItem, call: SimHostCall) -> StreamStep {
        if let Some(stream) = self.streams.get_mut(&handle) {
            stream.queue.push_front(item);
            stream.busy = true;
        }
        self.now_ns += 2_000;
        StreamStep::HostCall(call)
    }

    pub(super) fn host_call_done(&mut self, handle: StreamHandle) {
        if let Some(stream) = self.streams.get_mut(&handle) {
            stream.busy = false;
        }
    }

    fn step_graph(
        &mut self,
        handle: StreamHandle,
        mut item: QueueItem,
        graph: &FlatGraph,
        node: usize,
    ) -> StreamStep {
        let SimWork::Graph(run) = &mut item.work else { return StreamStep::Ran };
        let (op, fault) = graph.node(node);
        let whole = Arc::clone(&run.graph);
        if let SimOp::Host(call) = op {
            return self.call_host(handle, item, *call);
        }
        self.now_ns += op.cost_ns();
        match self.run_op(op, fault, &whole.conditions) {
            Some(log) => {
                run.log(node, log);
                if let Some(stream) = self.streams.get_mut(&handle) {
                    stream.queue.push_front(item);
                }
            }
            None => self.report(format!("the fault was in node {node} of a graph of {} nodes", graph.len())),
        }
        StreamStep::Ran
    }

    /// Runs an operation, which may set these conditions; `None` if it lost the context.
    fn run_op(
        &mut self,
        op: &SimOp,
        fault: Option<WorkFault>,
        settable: &[ConditionHandle],
    ) -> Option<AccessLog> {
        if let Some(WorkFault::Sticky(code)) = fault {
            self.lose(code, format!("scripted fault: {code} while {} runs", op.what()));
            return None;
        }
        let modules = &self.modules;
        let OpRun { log, result, conditions } = op.run(&mut self.memory, |m| modules.contains_key(&m));
        let result = result.and_then(|()| self.set_conditions(op, &conditions, settable));
        if let Err(fault) = result {
            self.lose(fault.code, fault.what);
            return None;
        }
        if fault == Some(WorkFault::WrongByte) {
            match op {
                SimOp::Copy { dst: CopyEnd::Host(dst), bytes, .. } => {
                    falsify_host(*dst, *bytes, &mut self.rng)
                }
                _ => falsify(&mut self.memory, &log, &mut self.rng),
            }
        }
        Some(log)
    }

    /// Sets the conditions that a kernel has set, in its order.
    fn set_conditions(
        &mut self,
        op: &SimOp,
        set: &[(ConditionHandle, u32)],
        settable: &[ConditionHandle],
    ) -> Result<(), Fault> {
        for (handle, value) in set {
            let condition = self.conditions.get_mut(handle).filter(|_| settable.contains(handle));
            let Some(condition) = condition else {
                let what = format!("{} sets condition {:#x}, which is not of its graph", op.what(), handle.0);
                return Err(Fault::new(Code::ILLEGAL_ADDRESS, what));
            };
            condition.value = *value;
        }
        Ok(())
    }

    /// Completes an item: runs its operation, checks for races and unblocks dependent items.
    fn complete(&mut self, handle: StreamHandle, item: QueueItem) {
        let what = item.what();
        let QueueItem { id, work, fault, clock, .. } = item;
        let mut races = Vec::new();
        let log = match work {
            SimWork::Event(event) => {
                let now = self.now_ns;
                if let Some(EventState::Recorded { item, done_at_ns, .. }) =
                    self.events.get_mut(&event).map(|e| &mut e.state)
                    && *item == id
                {
                    *done_at_ns = Some(now);
                }
                AccessLog::default()
            }
            SimWork::Op(op) => {
                self.now_ns += op.cost_ns();
                let Some(log) = self.run_op(&op, fault, &[]) else { return };
                races.extend(self.check_chain(handle, &op, &log));
                log
            }
            SimWork::Graph(run) => {
                let (log, found) = run.finish();
                races = found;
                if fault == Some(WorkFault::WrongByte) {
                    falsify(&mut self.memory, &log, &mut self.rng);
                }
                log
            }
        };
        if let Some(idx) = self.streams.get(&handle).map(|s| s.idx) {
            races.extend(self.history.add(idx, &clock, &log, &what));
        }
        self.pending.remove(&id);
        for race in races {
            if self.strict {
                self.lose(Code::LAUNCH_FAILED, race);
            } else {
                self.report(race);
            }
        }
        if self.streams.get(&handle).is_some_and(|s| s.destroyed && s.queue.is_empty()) {
            self.remove_stream(handle);
        }
    }

    /// Checks a programmatic launch against the earlier launches of its chain, which may still be running.
    fn check_chain(&mut self, handle: StreamHandle, op: &SimOp, log: &AccessLog) -> Option<String> {
        let stream = self.streams.get_mut(&handle)?;
        let SimOp::Kernel(kernel) = op else {
            stream.chain.clear();
            return None;
        };
        let mut race = None;
        if kernel.config.programmatic {
            let early = log.as_slice().iter().filter(|a| a.early);
            for a in early {
                if let Some((what, past)) = stream.chain.iter().find(|(_, past)| past.conflicts(a)) {
                    race = Some(describe(what, past, &op.what(), a, "a launch and the one before it"));
                }
            }
        }
        if !kernel.config.programmatic || (kernel.twin.waits && kernel.twin.starts_next_late) {
            stream.chain.clear();
        }
        let what: Arc<str> = op.what().into();
        stream.chain.extend(log.as_slice().iter().map(|&a| (what.clone(), a)));
        let excess = stream.chain.len().saturating_sub(MAX_CHAIN);
        stream.chain.drain(..excess);
        race
    }

    /// Returns a stream whose next step brings `item` closer to completion.
    pub(super) fn toward(&self, item: u64) -> Option<StreamHandle> {
        let mut handle = *self.pending.get(&item)?;
        loop {
            let stream = self.streams.get(&handle)?;
            let head = stream.queue.front();
            match head.and_then(|i| i.waits.iter().find_map(|w| self.pending.get(w))) {
                Some(&next) => handle = next,
                None => return Some(handle),
            }
        }
    }

    /// Returns a random stream that can run now.
    pub(super) fn any_runnable(&mut self) -> Option<StreamHandle> {
        let ready: Vec<StreamHandle> = self
            .streams
            .iter()
            .filter(|(_, s)| !s.busy)
            .filter(|(_, s)| {
                s.queue.front().is_some_and(|i| i.waits.iter().all(|w| !self.pending.contains_key(w)))
            })
            .map(|(&h, _)| h)
            .collect();
        (!ready.is_empty()).then(|| ready[self.rng.below(ready.len())])
    }

    /// Records that the host has seen everything up to `clock`.
    pub(super) fn host_saw(&mut self, clock: &Clock) {
        self.host_clock.join(clock);
        if self.pending.is_empty() {
            self.history.forget_before(&self.host_clock);
        }
    }
}

impl QueueItem {
    fn what(&self) -> String {
        match &self.work {
            SimWork::Op(op) => op.what(),
            SimWork::Event(_) => "an event".into(),
            SimWork::Graph(run) => format!("a graph of {} nodes", run.graph.len()),
        }
    }
}
