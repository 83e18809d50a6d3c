//! The driver interface: each method checks its handles, asks the capture state machine, and hands on.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::capture::Capture;
use super::functions::{MAX_BLOCK_THREADS, N_SMS, SHARED_SM_BYTES, blocks_per_sm};
use super::graphs::{FlatGraph, GraphDef, GraphRun, GraphSlot, NodeWork};
use super::memory::Owner;
use super::modules::entries;
use super::ops::{HostCall, Op};
use super::state::{Event, EventState, Exec, Module, State};
use super::streams::{Kind, Work};
use super::{Call, SimApi, SimDriver};
use crate::api::{
    Api, CaptureMode, CaptureStatus, Census, Code, CopyEnd, CtxHandle, Dependency, DeviceInfo, DevicePtr,
    Edge, EventHandle, ExecHandle, FunctionAttribute, FunctionHandle, GraphHandle, HostFn, HostPtr,
    LaunchConfig, ModuleHandle, NodeHandle, NodeKind, ParamInfo, Raw, StreamHandle, StreamKind,
};

impl State {
    /// Checks a range that a copy or a fill names, when the call is made.
    fn check_range(&mut self, what: &str, ptr: DevicePtr, bytes: u64) -> Raw<()> {
        if bytes == 0 {
            return Ok(());
        }
        self.memory.check_named(ptr.0, bytes).map_err(|why| {
            self.report(format!("{what}: {why}"));
            Code::INVALID_VALUE
        })
    }

    /// A host end that is pinned is checked like device memory whenever the copy runs.
    fn copy_end(&mut self, end: CopyEnd, bytes: u64, pinned_only: bool) -> Raw<CopyEnd> {
        match end {
            CopyEnd::Device(ptr) => self.check_range("a copy", ptr, bytes).map(|()| end),
            CopyEnd::Host(p) if self.memory.is_pinned(p.0, bytes) => Ok(CopyEnd::Device(p.device())),
            CopyEnd::Host(_) if pinned_only => {
                self.report("a copy node names host memory that is not pinned".into());
                Err(Code::INVALID_VALUE)
            }
            CopyEnd::Host(_) => Ok(end),
        }
    }

    /// Something to wait for: the item that records an event and what the host then has seen.
    fn event_item(&self, event: EventHandle) -> Option<(u64, super::races::Clock)> {
        match &self.events[&event].state {
            EventState::Recorded { item, clock, .. } => Some((*item, clock.clone())),
            EventState::Never | EventState::Captured { .. } => None,
        }
    }

    fn event(&self, event: EventHandle) -> Raw<()> {
        self.ctx()?;
        if self.events.contains_key(&event) { Ok(()) } else { Err(Code::INVALID_HANDLE) }
    }
}

impl SimDriver {
    fn submit(&self, mut state: std::sync::MutexGuard<'_, State>, stream: StreamHandle, op: Op) -> Raw<()> {
        state.submit(stream, op)?;
        self.queued(state)
    }

    /// A synchronous copy: queued on the legacy stream, and waited for.
    fn copy_now(&self, mut state: std::sync::MutexGuard<'_, State>, op: Op) -> Raw<()> {
        let legacy = state.stream(StreamHandle::LEGACY)?;
        if let Some(item) = state.submit(legacy, op)? {
            let clock = state.streams[&legacy].clock.clone();
            drop(self.wait_for(state, item, &clock)?);
        }
        Ok(())
    }
}

impl Api for SimApi {
    fn backend(&self) -> &'static str {
        "sim"
    }

    fn census(&self) -> Option<Census> {
        Some(self.lock().census())
    }

    fn take_reports(&self) -> Vec<String> {
        std::mem::take(&mut self.lock().reports)
    }

    fn n_done(&self) -> u64 {
        self.shared.n_steps.load(Ordering::Relaxed)
    }

    fn driver_version(&self) -> Raw<u32> {
        self.enter(Call::DriverVersion).map(|_| 13000)
    }

    fn device_count(&self) -> Raw<u32> {
        self.enter(Call::DeviceCount).map(|s| s.n_devices)
    }

    fn device_info(&self, ordinal: u32) -> Raw<DeviceInfo> {
        let state = self.enter(Call::DeviceInfo)?;
        if ordinal >= state.n_devices {
            return Err(Code::INVALID_DEVICE);
        }
        let mut uuid = *b"refrain-sim-dev-";
        uuid[15] = ordinal as u8;
        Ok(DeviceInfo {
            compute: (9, 0),
            n_sms: N_SMS,
            total_bytes: state.memory.info().1,
            l2_bytes: 50 << 20,
            shared_block_bytes: state.shared_block_bytes,
            // One block leaves a kilobyte to the system.
            shared_sm_bytes: SHARED_SM_BYTES.min(state.shared_block_bytes.saturating_add(1024)),
            pci: format!("0000:{ordinal:02x}:00.0"),
            uuid,
            unified: state.unified,
            ..DeviceInfo::named("Refrain simulated device")
        })
    }

    fn primary_ctx_retain(&self, ordinal: u32) -> Raw<CtxHandle> {
        let mut state = self.enter(Call::PrimaryCtxRetain)?;
        let found = state.contexts.iter_mut().find(|(_, c)| c.ordinal == ordinal && c.primary.is_some());
        if let Some((&ctx, context)) = found {
            context.primary = context.primary.map(|n| n + 1);
            state.current.insert(std::thread::current().id(), ctx);
            return Ok(ctx);
        }
        state.create_context(ordinal, Some(1))
    }

    fn primary_ctx_release(&self, ordinal: u32) -> Raw<()> {
        let mut state = self.enter(Call::PrimaryCtxRelease)?;
        let found = state.contexts.iter_mut().find(|(_, c)| c.ordinal == ordinal && c.primary.is_some());
        let (&ctx, context) = found.ok_or(Code::INVALID_CONTEXT)?;
        context.primary = context.primary.map(|n| n - 1);
        if context.primary == Some(0) {
            state.drop_context(ctx);
        }
        Ok(())
    }

    fn ctx_create(&self, ordinal: u32) -> Raw<CtxHandle> {
        self.enter(Call::CtxCreate)?.create_context(ordinal, None)
    }

    fn ctx_destroy(&self, ctx: CtxHandle) -> Raw<()> {
        let mut state = self.enter(Call::CtxDestroy)?;
        match state.contexts.get(&ctx) {
            Some(context) if context.primary.is_none() => {}
            _ => return Err(Code::INVALID_CONTEXT),
        }
        state.drop_context(ctx);
        Ok(())
    }

    fn ctx_set_current(&self, ctx: Option<CtxHandle>) -> Raw<()> {
        let mut state = self.enter(Call::CtxSetCurrent)?;
        let me = std::thread::current().id();
        match ctx {
            Some(ctx) if !state.contexts.contains_key(&ctx) => return Err(Code::INVALID_CONTEXT),
            Some(ctx) => state.current.insert(me, ctx),
            None => state.current.remove(&me),
        };
        Ok(())
    }

    fn ctx_synchronize(&self) -> Raw<()> {
        let mut state = self.enter(Call::CtxSynchronize)?;
        let ctx = state.ctx()?;
        state.check_ctx_wait(ctx)?;
        self.drain(state).map(drop)
    }

    fn mem_info(&self) -> Raw<(u64, u64)> {
        let state = self.enter(Call::MemInfo)?;
        state.ctx().map(|_| state.memory.info())
    }

    fn alloc(&self, bytes: u64) -> Raw<DevicePtr> {
        let mut state = self.enter(Call::Alloc)?;
        let ctx = state.ctx()?;
        state.check_unsafe_call()?;
        state.memory.alloc(ctx, bytes).map(DevicePtr)
    }

    fn free(&self, ptr: DevicePtr) -> Raw<()> {
        let mut state = self.enter(Call::Free)?;
        state.ctx()?;
        state.check_unsafe_call()?;
        // The driver waits for the device before it takes memory away.
        let mut state = self.drain(state)?;
        state.memory.free(ptr.0).inspect_err(|_| {
            state.report(format!("free of {:#x}, which is not the start of a live allocation", ptr.0));
        })
    }

    fn alloc_host(&self, bytes: u64) -> Raw<HostPtr> {
        let mut state = self.enter(Call::AllocHost)?;
        let ctx = state.ctx()?;
        state.check_unsafe_call()?;
        state.memory.alloc_host(ctx, bytes).map(HostPtr)
    }

    fn free_host(&self, ptr: HostPtr) -> Raw<()> {
        let mut state = self.enter(Call::FreeHost)?;
        state.ctx()?;
        state.check_unsafe_call()?;
        let mut state = self.drain(state)?;
        let report = state.memory.free_host(ptr.0)?;
        report.into_iter().for_each(|text| state.report(text));
        Ok(())
    }

    fn alloc_managed(&self, bytes: u64) -> Raw<DevicePtr> {
        let mut state = self.enter(Call::AllocManaged)?;
        let ctx = state.ctx()?;
        state.check_unsafe_call()?;
        state.memory.alloc(ctx, bytes).map(DevicePtr)
    }

    fn alloc_async(&self, bytes: u64, stream: StreamHandle) -> Raw<DevicePtr> {
        let mut state = self.enter(Call::AllocAsync)?;
        let stream = state.stream(stream)?;
        let ctx = state.streams[&stream].ctx;
        let owner = if state.capturing(stream)?.is_some() {
            Owner::Graph
        } else {
            state.check_unsafe_call()?;
            Owner::Stream
        };
        let start = state.memory.reserve(ctx, bytes, owner)?;
        self.submit(state, stream, Op::Alloc(start))?;
        Ok(DevicePtr(start))
    }

    fn free_async(&self, ptr: DevicePtr, stream: StreamHandle) -> Raw<()> {
        let mut state = self.enter(Call::FreeAsync)?;
        let stream = state.stream(stream)?;
        let capturing = state.capturing(stream)?.is_some();
        if !capturing {
            state.check_unsafe_call()?;
        }
        match state.memory.owner(ptr.0) {
            Some((Owner::Graph, _)) if capturing => {}
            Some((Owner::Graph, live)) if !live => return Err(Code::INVALID_VALUE),
            Some(_) if !capturing => state.memory.mark_freeing(ptr.0)?,
            _ => return Err(Code::INVALID_VALUE),
        }
        self.submit(state, stream, Op::Free(ptr.0))
    }

    fn memcpy_htod(&self, dst: DevicePtr, src: &[u8]) -> Raw<()> {
        let mut state = self.enter(Call::MemcpyHtod)?;
        state.upload_bytes += src.len() as u64;
        state.ctx()?;
        state.check_range("a copy to the device", dst, src.len() as u64)?;
        self.copy_now(state, Op::Upload { dst: dst.0, data: src.into() })
    }

    fn memcpy_dtoh(&self, dst: &mut [u8], src: DevicePtr) -> Raw<()> {
        let mut state = self.enter(Call::MemcpyDtoh)?;
        state.ctx()?;
        let bytes = dst.len() as u64;
        state.check_range("a copy to the host", src, bytes)?;
        // Waited for below while `dst` is borrowed; when the context is lost first, nothing queued ever runs again.
        let dst = CopyEnd::Host(HostPtr::of(dst.as_mut_ptr()));
        self.copy_now(state, Op::Copy { dst, src: CopyEnd::Device(src), bytes })
    }

    unsafe fn memcpy_htod_async(
        &self,
        dst: DevicePtr,
        src: HostPtr,
        bytes: u64,
        stream: StreamHandle,
    ) -> Raw<()> {
        let mut state = self.enter(Call::MemcpyHtodAsync)?;
        state.upload_bytes += bytes;
        let stream = state.stream(stream)?;
        let captured = state.capturing(stream)?.is_some();
        let to = state.copy_end(CopyEnd::Device(dst), bytes, false)?;
        let op = match state.copy_end(CopyEnd::Host(src), bytes, false)? {
            // Pageable memory is read before the call returns, except in a capture.
            CopyEnd::Host(src) if !captured => {
                let mut data = vec![0; usize::try_from(bytes).map_err(|_| Code::INVALID_VALUE)?];
                super::memory::read_host(src.0, &mut data);
                Op::Upload { dst: dst.0, data: data.into() }
            }
            src => Op::Copy { dst: to, src, bytes },
        };
        self.submit(state, stream, op)
    }

    unsafe fn memcpy_dtoh_async(
        &self,
        dst: HostPtr,
        src: DevicePtr,
        bytes: u64,
        stream: StreamHandle,
    ) -> Raw<()> {
        let mut state = self.enter(Call::MemcpyDtohAsync)?;
        let stream = state.stream(stream)?;
        let src = state.copy_end(CopyEnd::Device(src), bytes, false)?;
        let dst = state.copy_end(CopyEnd::Host(dst), bytes, false)?;
        let item = state.submit(stream, Op::Copy { dst, src, bytes })?;
        match (item, dst) {
            // To pageable memory the call returns when the copy is done, except in a capture.
            (Some(item), CopyEnd::Host(_)) => {
                let clock = state.streams[&stream].clock.clone();
                self.wait_for(state, item, &clock).map(drop)
            }
            _ => self.queued(state),
        }
    }

    fn memcpy_dtod_async(&self, dst: DevicePtr, src: DevicePtr, bytes: u64, stream: StreamHandle) -> Raw<()> {
        let mut state = self.enter(Call::MemcpyDtodAsync)?;
        let stream = state.stream(stream)?;
        let dst = state.copy_end(CopyEnd::Device(dst), bytes, false)?;
        let src = state.copy_end(CopyEnd::Device(src), bytes, false)?;
        self.submit(state, stream, Op::Copy { dst, src, bytes })
    }

    fn memset_async(&self, dst: DevicePtr, byte: u8, bytes: u64, stream: StreamHandle) -> Raw<()> {
        let mut state = self.enter(Call::MemsetAsync)?;
        let stream = state.stream(stream)?;
        state.check_range("a fill", dst, bytes)?;
        self.submit(state, stream, Op::Memset { dst: dst.0, byte, bytes })
    }

    fn stream_create(&self, kind: StreamKind) -> Raw<StreamHandle> {
        let mut state = self.enter(Call::StreamCreate)?;
        let ctx = state.ctx()?;
        let kind = match kind {
            StreamKind::Blocking => Kind::Blocking,
            StreamKind::NonBlocking => Kind::NonBlocking,
        };
        Ok(state.create_stream(ctx, kind))
    }

    fn stream_destroy(&self, stream: StreamHandle) -> Raw<()> {
        let mut state = self.enter(Call::StreamDestroy)?;
        let stream = state.stream(stream)?;
        if state.streams[&stream].kind == Kind::Legacy {
            return Err(Code::INVALID_HANDLE);
        }
        // A stream in a capture takes the capture with it; not in the measured table.
        let capture = state.captures.values_mut().find(|c| c.takes_part(stream));
        capture.into_iter().for_each(Capture::invalidate);
        let idle = state.streams[&stream].queue.is_empty() && !state.streams[&stream].busy;
        if idle {
            state.remove_stream(stream);
        } else if let Some(s) = state.streams.get_mut(&stream) {
            s.destroyed = true;
        }
        Ok(())
    }

    fn stream_synchronize(&self, stream: StreamHandle) -> Raw<()> {
        let mut state = self.enter(Call::StreamSynchronize)?;
        let stream = state.stream(stream)?;
        state.check_stream_wait(stream)?;
        let (last, clock) = (state.streams[&stream].last, state.streams[&stream].clock.clone());
        self.wait_for(state, last, &clock).map(drop)
    }

    fn stream_query(&self, stream: StreamHandle) -> Raw<()> {
        let mut state = self.enter(Call::StreamQuery)?;
        let stream = state.stream(stream)?;
        state.check_stream_wait(stream)?;
        let (last, clock) = (state.streams[&stream].last, state.streams[&stream].clock.clone());
        self.poll(state, last, &clock).map(drop)
    }

    fn stream_wait_event(&self, stream: StreamHandle, event: EventHandle) -> Raw<()> {
        let mut state = self.enter(Call::StreamWaitEvent)?;
        let stream = state.stream(stream)?;
        state.event(event)?;
        state.wait_event(stream, event)?;
        self.queued(state)
    }

    fn stream_begin_capture(&self, stream: StreamHandle, mode: CaptureMode) -> Raw<()> {
        let mut state = self.enter(Call::StreamBeginCapture)?;
        let stream = state.stream(stream)?;
        state.begin_capture(stream, mode)
    }

    fn stream_end_capture(&self, stream: StreamHandle) -> Raw<GraphHandle> {
        let mut state = self.enter_or(Call::StreamEndCapture, |s| s.abandon_capture(stream))?;
        let stream = state.stream(stream)?;
        state.end_capture(stream)
    }

    fn stream_is_capturing(&self, stream: StreamHandle) -> Raw<CaptureStatus> {
        let state = self.enter(Call::StreamIsCapturing)?;
        let stream = state.stream(stream)?;
        state.capture_status(stream).map(|(status, _)| status)
    }

    fn stream_capture_info(&self, stream: StreamHandle) -> Raw<(CaptureStatus, Option<u64>)> {
        let state = self.enter(Call::StreamCaptureInfo)?;
        let stream = state.stream(stream)?;
        state.capture_status(stream)
    }

    unsafe fn launch_host_func(&self, stream: StreamHandle, f: HostFn, user: *mut c_void) -> Raw<()> {
        let state = self.enter(Call::LaunchHostFunc)?;
        let stream = state.stream(stream)?;
        self.submit(state, stream, Op::Host(HostCall { f, user }))
    }

    fn event_create(&self, timing: bool) -> Raw<EventHandle> {
        let mut state = self.enter(Call::EventCreate)?;
        let ctx = state.ctx()?;
        let handle = EventHandle(state.handle());
        state.events.insert(handle, Event { ctx, timing, state: EventState::Never });
        Ok(handle)
    }

    fn event_destroy(&self, event: EventHandle) -> Raw<()> {
        let mut state = self.enter(Call::EventDestroy)?;
        state.event(event)?;
        state.events.remove(&event);
        Ok(())
    }

    fn event_record(&self, event: EventHandle, stream: StreamHandle) -> Raw<()> {
        let mut state = self.enter(Call::EventRecord)?;
        let stream = state.stream(stream)?;
        state.event(event)?;
        state.record_event(event, stream)?;
        self.queued(state)
    }

    fn event_query(&self, event: EventHandle) -> Raw<()> {
        let mut state = self.enter(Call::EventQuery)?;
        state.event(event)?;
        state.check_event_wait(event)?;
        match state.event_item(event) {
            Some((item, clock)) => self.poll(state, item, &clock).map(drop),
            None => Ok(()),
        }
    }

    fn event_synchronize(&self, event: EventHandle) -> Raw<()> {
        let mut state = self.enter(Call::EventSynchronize)?;
        state.event(event)?;
        state.check_event_wait(event)?;
        match state.event_item(event) {
            Some((item, clock)) => self.wait_for(state, item, &clock).map(drop),
            None => Ok(()),
        }
    }

    fn event_elapsed(&self, start: EventHandle, end: EventHandle) -> Raw<f32> {
        let state = self.enter(Call::EventElapsed)?;
        let mut times = [0u64; 2];
        for (time, event) in times.iter_mut().zip([start, end]) {
            state.event(event)?;
            let e = &state.events[&event];
            *time = match &e.state {
                EventState::Recorded { done_at_ns, .. } if e.timing => done_at_ns.ok_or(Code::NOT_READY)?,
                EventState::Captured { .. } => return Err(Code::CAPTURED_EVENT),
                _ => return Err(Code::INVALID_HANDLE),
            };
        }
        Ok((times[1] as f64 - times[0] as f64) as f32 / 1e6)
    }

    fn module_load(&self, image: &[u8]) -> Raw<ModuleHandle> {
        let mut state = self.enter(Call::ModuleLoad)?;
        let ctx = state.ctx()?;
        let entries = entries(image)?;
        let handle = ModuleHandle(state.handle());
        state.modules.insert(handle, Module { ctx, entries, functions: Vec::new() });
        Ok(handle)
    }

    fn module_unload(&self, module: ModuleHandle) -> Raw<()> {
        let mut state = self.enter(Call::ModuleUnload)?;
        state.ctx()?;
        state.check_unsafe_call()?;
        let mut state = self.drain(state)?;
        let gone = state.modules.remove(&module).ok_or(Code::INVALID_HANDLE)?;
        for function in gone.functions {
            state.functions.remove(&function);
        }
        Ok(())
    }

    fn module_function(&self, module: ModuleHandle, name: &str) -> Raw<FunctionHandle> {
        let mut state = self.enter(Call::ModuleFunction)?;
        state.ctx()?;
        state.find_function(module, name)
    }

    fn function_params(&self, function: FunctionHandle) -> Raw<Vec<ParamInfo>> {
        let state = self.enter(Call::FunctionParams)?;
        state.function(function).map(|f| f.twin.params.clone())
    }

    fn function_attribute(&self, function: FunctionHandle, attribute: FunctionAttribute) -> Raw<i32> {
        let state = self.enter(Call::FunctionAttribute)?;
        state.function(function).map(|f| f.attribute(attribute))
    }

    fn function_set_attribute(
        &self,
        function: FunctionHandle,
        attribute: FunctionAttribute,
        value: i32,
    ) -> Raw<()> {
        let mut state = self.enter(Call::FunctionSetAttribute)?;
        let shared_block_bytes = state.shared_block_bytes;
        let f = state.functions.get_mut(&function).ok_or(Code::INVALID_HANDLE)?;
        f.set_attribute(attribute, value, shared_block_bytes)
    }

    fn occupancy(&self, function: FunctionHandle, block_threads: u32, shared_bytes: u32) -> Raw<u32> {
        let state = self.enter(Call::Occupancy)?;
        let f = state.function(function)?;
        if !(1..=MAX_BLOCK_THREADS).contains(&block_threads) {
            return Err(Code::INVALID_VALUE);
        }
        Ok(blocks_per_sm(block_threads, shared_bytes.saturating_add(f.twin.static_shared_bytes)))
    }

    fn launch(
        &self,
        function: FunctionHandle,
        config: &LaunchConfig,
        stream: StreamHandle,
        params: &[u8],
    ) -> Raw<()> {
        let state = self.enter(Call::Launch)?;
        let stream = state.stream(stream)?;
        let (ctx, op) = state.kernel_op(function, config, params)?;
        if ctx != state.streams[&stream].ctx {
            return Err(Code::INVALID_HANDLE);
        }
        self.submit(state, stream, Op::Kernel(op))
    }

    fn graph_create(&self) -> Raw<GraphHandle> {
        let mut state = self.enter(Call::GraphCreate)?;
        let handle = GraphHandle(state.handle());
        state.graphs.insert(handle, GraphSlot { def: Arc::new(GraphDef::default()), parent: None });
        Ok(handle)
    }

    fn graph_destroy(&self, graph: GraphHandle) -> Raw<()> {
        let mut state = self.enter(Call::GraphDestroy)?;
        if state.graph(graph)?.parent.is_some() {
            return Err(Code::INVALID_VALUE);
        }
        state.destroy_graph(graph);
        Ok(())
    }

    fn graph_add_kernel(
        &self,
        graph: GraphHandle,
        deps: &[Dependency],
        function: FunctionHandle,
        config: &LaunchConfig,
        params: &[u8],
    ) -> Raw<NodeHandle> {
        let mut state = self.enter(Call::GraphAddKernel)?;
        let (_, op) = state.kernel_op(function, config, params)?;
        state.add_node(graph, deps, NodeWork::Op(Op::Kernel(op), None))
    }

    unsafe fn graph_add_memcpy(
        &self,
        graph: GraphHandle,
        deps: &[Dependency],
        dst: CopyEnd,
        src: CopyEnd,
        bytes: u64,
    ) -> Raw<NodeHandle> {
        let mut state = self.enter(Call::GraphAddMemcpy)?;
        state.ctx()?;
        let dst = state.copy_end(dst, bytes, true)?;
        let src = state.copy_end(src, bytes, true)?;
        state.add_node(graph, deps, NodeWork::Op(Op::Copy { dst, src, bytes }, None))
    }

    fn graph_add_memset(
        &self,
        graph: GraphHandle,
        deps: &[Dependency],
        dst: DevicePtr,
        byte: u8,
        bytes: u64,
    ) -> Raw<NodeHandle> {
        let mut state = self.enter(Call::GraphAddMemset)?;
        state.ctx()?;
        state.check_range("a fill node", dst, bytes)?;
        state.add_node(graph, deps, NodeWork::Op(Op::Memset { dst: dst.0, byte, bytes }, None))
    }

    fn graph_add_child(
        &self,
        graph: GraphHandle,
        deps: &[Dependency],
        child: GraphHandle,
    ) -> Raw<NodeHandle> {
        let mut state = self.enter(Call::GraphAddChild)?;
        let child = state.graph(child)?.def.clone();
        let child = Arc::new(child.renamed(&mut || state.handle()));
        state.add_node(graph, deps, NodeWork::Child(child))
    }

    fn graph_add_empty(&self, graph: GraphHandle, deps: &[Dependency]) -> Raw<NodeHandle> {
        self.enter(Call::GraphAddEmpty)?.add_node(graph, deps, NodeWork::Op(Op::Empty, None))
    }

    unsafe fn graph_add_host(
        &self,
        graph: GraphHandle,
        deps: &[Dependency],
        f: HostFn,
        user: *mut c_void,
    ) -> Raw<NodeHandle> {
        let work = NodeWork::Op(Op::Host(HostCall { f, user }), None);
        self.enter(Call::GraphAddHost)?.add_node(graph, deps, work)
    }

    fn graph_nodes(&self, graph: GraphHandle) -> Raw<Vec<(NodeHandle, NodeKind)>> {
        let mut state = self.enter(Call::GraphNodes)?;
        let mut nodes: Vec<_> = state.graph(graph)?.def.nodes.iter().map(|n| (n.handle, n.kind())).collect();
        // The driver promises no order, so nobody may count on one.
        state.rng.shuffle(&mut nodes);
        Ok(nodes)
    }

    fn graph_edges(&self, graph: GraphHandle) -> Raw<Vec<Edge>> {
        let state = self.enter(Call::GraphEdges)?;
        let nodes = &state.graph(graph)?.def.nodes;
        let edges =
            nodes.iter().flat_map(|n| n.deps.iter().map(|d| Edge { from: d.on, to: n.handle, kind: d.kind }));
        Ok(edges.collect())
    }

    fn graph_child(&self, node: NodeHandle) -> Raw<GraphHandle> {
        let mut state = self.enter(Call::GraphChild)?;
        state.child_graph(node)
    }

    fn graph_instantiate(&self, graph: GraphHandle) -> Raw<ExecHandle> {
        let mut state = self.enter(Call::GraphInstantiate)?;
        let ctx = state.ctx()?;
        state.graph(graph)?;
        state.check_unsafe_call()?;
        let flat = Arc::new(FlatGraph::new(&state.graph(graph)?.def));
        let handle = ExecHandle(state.handle());
        state.execs.insert(handle, Exec { ctx, graph: flat, last: None });
        Ok(handle)
    }

    fn exec_destroy(&self, exec: ExecHandle) -> Raw<()> {
        let mut state = self.enter(Call::ExecDestroy)?;
        if !state.execs.contains_key(&exec) {
            return Err(Code::INVALID_HANDLE);
        }
        state.check_unsafe_call()?;
        state.execs.remove(&exec);
        Ok(())
    }

    fn exec_upload(&self, exec: ExecHandle, stream: StreamHandle) -> Raw<()> {
        let mut state = self.enter(Call::ExecUpload)?;
        let stream = state.stream(stream)?;
        if !state.execs.contains_key(&exec) {
            return Err(Code::INVALID_HANDLE);
        }
        if state.capturing(stream)?.is_some() {
            return state.check_stream_wait(stream);
        }
        self.submit(state, stream, Op::Empty)
    }

    fn exec_launch(&self, exec: ExecHandle, stream: StreamHandle) -> Raw<()> {
        let mut state = self.enter(Call::ExecLaunch)?;
        let stream = state.stream(stream)?;
        let found = state.execs.get(&exec).ok_or(Code::INVALID_HANDLE)?;
        let (graph, last, ctx) = (found.graph.clone(), found.last.clone(), found.ctx);
        if ctx != state.streams[&stream].ctx {
            return Err(Code::INVALID_HANDLE);
        }
        // The driver takes no graph launch into a capture; a child node is what does that.
        if state.capturing(stream)?.is_some() {
            return state.check_stream_wait(stream);
        }
        if state.streams[&stream].kind == Kind::Legacy {
            state.check_legacy(ctx)?;
        }
        // Memory that an earlier launch allocated and nobody freed: the graph cannot allocate it again.
        if graph.allocs.iter().any(|&start| state.memory.owner(start).is_some_and(|(_, live)| live)) {
            return Err(Code::INVALID_VALUE);
        }
        let need: u64 = graph.allocs.iter().map(|&start| state.memory.reserved_bytes(start)).sum();
        if need > state.memory.info().0 {
            return Err(Code::OUT_OF_MEMORY);
        }
        let after = last.as_ref().map(|(item, clock)| (*item, clock));
        let item = state.enqueue(stream, Work::Graph(GraphRun::new(graph)), after);
        let clock = state.streams[&stream].clock.clone();
        if let Some(e) = state.execs.get_mut(&exec) {
            e.last = Some((item, clock));
        }
        self.queued(state)
    }
}
