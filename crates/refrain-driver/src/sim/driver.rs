//! The driver interface. Each method checks its handles, consults the capture state machine and delegates.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::capture::SimCapture;
use super::functions::{MAX_BLOCK_THREADS, N_SMS, SHARED_SM_BYTES, blocks_per_sm};
use super::graphs::{FlatGraph, GraphDef, GraphRun, GraphSlot, NodeWork};
use super::memory::AllocationOwner;
use super::modules::entries;
use super::ops::{SimHostCall, SimOp};
use super::state::{EventState, SimEvent, SimExec, SimModule, SimState};
use super::streams::{SimStreamKind, SimWork};
use super::{DriverCall, SimApi, SimDriver};
use crate::api::{
    Api, CaptureMode, CaptureStatus, Census, Code, ConditionHandle, CopyEnd, CtxHandle, Dependency,
    DeviceInfo, DevicePtr, Edge, EventHandle, ExecHandle, FunctionAttribute, FunctionHandle, GraphHandle,
    HostPtr, LaunchConfig, ModuleHandle, NodeHandle, NodeKind, ParamInfo, RawHostFn, RawResult, StreamHandle,
    StreamKind,
};

impl SimState {
    /// Checks the range of a copy or fill at the time of the call.
    fn check_range(&mut self, what: &str, ptr: DevicePtr, bytes: u64) -> RawResult<()> {
        if bytes == 0 {
            return Ok(());
        }
        self.memory.check_named(ptr.0, bytes).map_err(|why| {
            self.report(format!("{what}: {why}"));
            Code::INVALID_VALUE
        })
    }

    /// Resolves an end of a copy. A pinned host end becomes a device address, so it is checked whenever the copy
    /// runs.
    fn copy_end(&mut self, end: CopyEnd, bytes: u64, pinned_only: bool) -> RawResult<CopyEnd> {
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

    /// The queue item that records an event, and the clock that the host has seen after waiting for it.
    fn event_item(&self, event: EventHandle) -> Option<(u64, super::races::Clock)> {
        match &self.events[&event].state {
            EventState::Recorded { item, clock, .. } => Some((*item, clock.clone())),
            EventState::Never | EventState::Captured { .. } => None,
        }
    }

    fn event(&self, event: EventHandle) -> RawResult<()> {
        self.ctx()?;
        if self.events.contains_key(&event) { Ok(()) } else { Err(Code::INVALID_HANDLE) }
    }
}

impl SimDriver {
    fn submit(
        &self,
        mut state: std::sync::MutexGuard<'_, SimState>,
        stream: StreamHandle,
        op: SimOp,
    ) -> RawResult<()> {
        state.submit(stream, op)?;
        self.queued(state)
    }

    /// Runs a synchronous copy: queues it on the legacy stream and waits for it.
    fn copy_now(&self, mut state: std::sync::MutexGuard<'_, SimState>, op: SimOp) -> RawResult<()> {
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

    fn driver_version(&self) -> RawResult<u32> {
        self.enter(DriverCall::DriverVersion).map(|_| 13000)
    }

    fn device_count(&self) -> RawResult<u32> {
        self.enter(DriverCall::DeviceCount).map(|s| s.n_devices)
    }

    fn device_info(&self, ordinal: u32) -> RawResult<DeviceInfo> {
        let state = self.enter(DriverCall::DeviceInfo)?;
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
            // The system reserves one kilobyte per block.
            shared_sm_bytes: SHARED_SM_BYTES.min(state.shared_block_bytes.saturating_add(1024)),
            pci: format!("0000:{ordinal:02x}:00.0"),
            uuid,
            unified: state.unified,
            ..DeviceInfo::named("Refrain simulated device")
        })
    }

    fn primary_ctx_retain(&self, ordinal: u32) -> RawResult<CtxHandle> {
        let mut state = self.enter(DriverCall::PrimaryCtxRetain)?;
        let found = state.contexts.iter_mut().find(|(_, c)| c.ordinal == ordinal && c.primary.is_some());
        if let Some((&ctx, context)) = found {
            context.primary = context.primary.map(|n| n + 1);
            state.current.insert(std::thread::current().id(), ctx);
            return Ok(ctx);
        }
        state.create_context(ordinal, Some(1))
    }

    fn primary_ctx_release(&self, ordinal: u32) -> RawResult<()> {
        let mut state = self.enter(DriverCall::PrimaryCtxRelease)?;
        let found = state.contexts.iter_mut().find(|(_, c)| c.ordinal == ordinal && c.primary.is_some());
        let (&ctx, context) = found.ok_or(Code::INVALID_CONTEXT)?;
        context.primary = context.primary.map(|n| n - 1);
        if context.primary == Some(0) {
            state.drop_context(ctx);
        }
        Ok(())
    }

    fn ctx_create(&self, ordinal: u32) -> RawResult<CtxHandle> {
        self.enter(DriverCall::CtxCreate)?.create_context(ordinal, None)
    }

    fn ctx_destroy(&self, ctx: CtxHandle) -> RawResult<()> {
        let mut state = self.enter(DriverCall::CtxDestroy)?;
        match state.contexts.get(&ctx) {
            Some(context) if context.primary.is_none() => {}
            _ => return Err(Code::INVALID_CONTEXT),
        }
        state.drop_context(ctx);
        Ok(())
    }

    fn ctx_set_current(&self, ctx: Option<CtxHandle>) -> RawResult<()> {
        let mut state = self.enter(DriverCall::CtxSetCurrent)?;
        let me = std::thread::current().id();
        match ctx {
            Some(ctx) if !state.contexts.contains_key(&ctx) => return Err(Code::INVALID_CONTEXT),
            Some(ctx) => state.current.insert(me, ctx),
            None => state.current.remove(&me),
        };
        Ok(())
    }

    fn ctx_synchronize(&self) -> RawResult<()> {
        let mut state = self.enter(DriverCall::CtxSynchronize)?;
        let ctx = state.ctx()?;
        state.check_ctx_wait(ctx)?;
        self.drain(state).map(drop)
    }

    fn mem_info(&self) -> RawResult<(u64, u64)> {
        let state = self.enter(DriverCall::MemInfo)?;
        state.ctx().map(|_| state.memory.info())
    }

    fn alloc(&self, bytes: u64) -> RawResult<DevicePtr> {
        let mut state = self.enter(DriverCall::Alloc)?;
        let ctx = state.ctx()?;
        state.check_unsafe_call()?;
        state.memory.alloc(ctx, bytes).map(DevicePtr)
    }

    fn free(&self, ptr: DevicePtr) -> RawResult<()> {
        let mut state = self.enter(DriverCall::Free)?;
        state.ctx()?;
        state.check_unsafe_call()?;
        // The driver waits for the device before it frees memory.
        let mut state = self.drain(state)?;
        state.memory.free(ptr.0).inspect_err(|_| {
            state.report(format!("free of {:#x}, which is not the start of a live allocation", ptr.0));
        })
    }

    fn alloc_host(&self, bytes: u64) -> RawResult<HostPtr> {
        let mut state = self.enter(DriverCall::AllocHost)?;
        let ctx = state.ctx()?;
        state.check_unsafe_call()?;
        state.memory.alloc_host(ctx, bytes).map(HostPtr)
    }

    fn free_host(&self, ptr: HostPtr) -> RawResult<()> {
        let mut state = self.enter(DriverCall::FreeHost)?;
        state.ctx()?;
        state.check_unsafe_call()?;
        let mut state = self.drain(state)?;
        let report = state.memory.free_host(ptr.0)?;
        report.into_iter().for_each(|text| state.report(text));
        Ok(())
    }

    fn alloc_managed(&self, bytes: u64) -> RawResult<DevicePtr> {
        let mut state = self.enter(DriverCall::AllocManaged)?;
        let ctx = state.ctx()?;
        state.check_unsafe_call()?;
        state.memory.alloc(ctx, bytes).map(DevicePtr)
    }

    fn alloc_async(&self, bytes: u64, stream: StreamHandle) -> RawResult<DevicePtr> {
        let mut state = self.enter(DriverCall::AllocAsync)?;
        let stream = state.stream(stream)?;
        let ctx = state.streams[&stream].ctx;
        let owner = if state.capturing(stream)?.is_some() {
            AllocationOwner::Graph
        } else {
            state.check_unsafe_call()?;
            AllocationOwner::Stream
        };
        let start = state.memory.reserve(ctx, bytes, owner)?;
        self.submit(state, stream, SimOp::Alloc(start))?;
        Ok(DevicePtr(start))
    }

    fn free_async(&self, ptr: DevicePtr, stream: StreamHandle) -> RawResult<()> {
        let mut state = self.enter(DriverCall::FreeAsync)?;
        let stream = state.stream(stream)?;
        let capturing = state.capturing(stream)?.is_some();
        if !capturing {
            state.check_unsafe_call()?;
        }
        match state.memory.owner(ptr.0) {
            Some((AllocationOwner::Graph, _)) if capturing => {}
            Some((AllocationOwner::Graph, live)) if !live => return Err(Code::INVALID_VALUE),
            Some(_) if !capturing => state.memory.mark_freeing(ptr.0)?,
            _ => return Err(Code::INVALID_VALUE),
        }
        self.submit(state, stream, SimOp::Free(ptr.0))
    }

    fn memcpy_htod(&self, dst: DevicePtr, src: &[u8]) -> RawResult<()> {
        let mut state = self.enter(DriverCall::MemcpyHtod)?;
        state.upload_bytes += src.len() as u64;
        state.ctx()?;
        state.check_range("a copy to the device", dst, src.len() as u64)?;
        self.copy_now(state, SimOp::Upload { dst: dst.0, data: src.into() })
    }

    fn memcpy_dtoh(&self, dst: &mut [u8], src: DevicePtr) -> RawResult<()> {
        let mut state = self.enter(DriverCall::MemcpyDtoh)?;
        state.ctx()?;
        let bytes = dst.len() as u64;
        state.check_range("a copy to the host", src, bytes)?;
        // Waits below while `dst` is borrowed. If the context is lost first, nothing queued ever runs again.
        let dst = CopyEnd::Host(HostPtr::of(dst.as_mut_ptr()));
        self.copy_now(state, SimOp::Copy { dst, src: CopyEnd::Device(src), bytes })
    }

    unsafe fn memcpy_htod_async(
        &self,
        dst: DevicePtr,
        src: HostPtr,
        bytes: u64,
        stream: StreamHandle,
    ) -> RawResult<()> {
        let mut state = self.enter(DriverCall::MemcpyHtodAsync)?;
        state.upload_bytes += bytes;
        let stream = state.stream(stream)?;
        let captured = state.capturing(stream)?.is_some();
        let to = state.copy_end(CopyEnd::Device(dst), bytes, false)?;
        let op = match state.copy_end(CopyEnd::Host(src), bytes, false)? {
            // Outside a capture, pageable memory is read before the call returns.
            CopyEnd::Host(src) if !captured => {
                let mut data = vec![0; usize::try_from(bytes).map_err(|_| Code::INVALID_VALUE)?];
                super::memory::read_host(src.0, &mut data);
                SimOp::Upload { dst: dst.0, data: data.into() }
            }
            src => SimOp::Copy { dst: to, src, bytes },
        };
        self.submit(state, stream, op)
    }

    unsafe fn memcpy_dtoh_async(
        &self,
        dst: HostPtr,
        src: DevicePtr,
        bytes: u64,
        stream: StreamHandle,
    ) -> RawResult<()> {
        let mut state = self.enter(DriverCall::MemcpyDtohAsync)?;
        let stream = state.stream(stream)?;
        let src = state.copy_end(CopyEnd::Device(src), bytes, false)?;
        let dst = state.copy_end(CopyEnd::Host(dst), bytes, false)?;
        let item = state.submit(stream, SimOp::Copy { dst, src, bytes })?;
        match (item, dst) {
            // Outside a capture, a copy to pageable memory is done when the call returns.
            (Some(item), CopyEnd::Host(_)) => {
                let clock = state.streams[&stream].clock.clone();
                self.wait_for(state, item, &clock).map(drop)
            }
            _ => self.queued(state),
        }
    }

    fn memcpy_dtod_async(
        &self,
        dst: DevicePtr,
        src: DevicePtr,
        bytes: u64,
        stream: StreamHandle,
    ) -> RawResult<()> {
        let mut state = self.enter(DriverCall::MemcpyDtodAsync)?;
        let stream = state.stream(stream)?;
        let dst = state.copy_end(CopyEnd::Device(dst), bytes, false)?;
        let src = state.copy_end(CopyEnd::Device(src), bytes, false)?;
        self.submit(state, stream, SimOp::Copy { dst, src, bytes })
    }

    fn memset_async(&self, dst: DevicePtr, byte: u8, bytes: u64, stream: StreamHandle) -> RawResult<()> {
        let mut state = self.enter(DriverCall::MemsetAsync)?;
        let stream = state.stream(stream)?;
        state.check_range("a fill", dst, bytes)?;
        self.submit(state, stream, SimOp::Memset { dst: dst.0, byte, bytes })
    }

    fn stream_create(&self, kind: StreamKind) -> RawResult<StreamHandle> {
        let mut state = self.enter(DriverCall::StreamCreate)?;
        let ctx = state.ctx()?;
        let kind = match kind {
            StreamKind::Blocking => SimStreamKind::Blocking,
            StreamKind::NonBlocking => SimStreamKind::NonBlocking,
        };
        Ok(state.create_stream(ctx, kind))
    }

    fn stream_destroy(&self, stream: StreamHandle) -> RawResult<()> {
        let mut state = self.enter(DriverCall::StreamDestroy)?;
        let stream = state.stream(stream)?;
        if state.streams[&stream].kind == SimStreamKind::Legacy {
            return Err(Code::INVALID_HANDLE);
        }
        // Destroying a capturing stream breaks the capture; the measured table does not cover this.
        let capture = state.captures.values_mut().find(|c| c.includes(stream));
        capture.into_iter().for_each(SimCapture::invalidate);
        let idle = state.streams[&stream].queue.is_empty() && !state.streams[&stream].busy;
        if idle {
            state.remove_stream(stream);
        } else if let Some(s) = state.streams.get_mut(&stream) {
            s.destroyed = true;
        }
        Ok(())
    }

    fn stream_synchronize(&self, stream: StreamHandle) -> RawResult<()> {
        let mut state = self.enter(DriverCall::StreamSynchronize)?;
        let stream = state.stream(stream)?;
        state.check_stream_wait(stream)?;
        let (last, clock) = (state.streams[&stream].last, state.streams[&stream].clock.clone());
        self.wait_for(state, last, &clock).map(drop)
    }

    fn stream_query(&self, stream: StreamHandle) -> RawResult<()> {
        let mut state = self.enter(DriverCall::StreamQuery)?;
        let stream = state.stream(stream)?;
        state.check_stream_wait(stream)?;
        let (last, clock) = (state.streams[&stream].last, state.streams[&stream].clock.clone());
        self.poll(state, last, &clock).map(drop)
    }

    fn stream_wait_event(&self, stream: StreamHandle, event: EventHandle) -> RawResult<()> {
        let mut state = self.enter(DriverCall::StreamWaitEvent)?;
        let stream = state.stream(stream)?;
        state.event(event)?;
        state.wait_event(stream, event)?;
        self.queued(state)
    }

    fn stream_begin_capture(&self, stream: StreamHandle, mode: CaptureMode) -> RawResult<()> {
        let mut state = self.enter(DriverCall::StreamBeginCapture)?;
        let stream = state.stream(stream)?;
        state.begin_capture(stream, mode)
    }

    fn stream_end_capture(&self, stream: StreamHandle) -> RawResult<GraphHandle> {
        let mut state = self.enter_or(DriverCall::StreamEndCapture, |s| s.abandon_capture(stream))?;
        let stream = state.stream(stream)?;
        state.end_capture(stream)
    }

    fn stream_is_capturing(&self, stream: StreamHandle) -> RawResult<CaptureStatus> {
        let state = self.enter(DriverCall::StreamIsCapturing)?;
        let stream = state.stream(stream)?;
        state.capture_status(stream).map(|(status, _)| status)
    }

    fn stream_capture_info(&self, stream: StreamHandle) -> RawResult<(CaptureStatus, Option<u64>)> {
        let state = self.enter(DriverCall::StreamCaptureInfo)?;
        let stream = state.stream(stream)?;
        state.capture_status(stream)
    }

    unsafe fn launch_host_func(
        &self,
        stream: StreamHandle,
        f: RawHostFn,
        user: *mut c_void,
    ) -> RawResult<()> {
        let state = self.enter(DriverCall::LaunchHostFunc)?;
        let stream = state.stream(stream)?;
        self.submit(state, stream, SimOp::Host(SimHostCall { f, user }))
    }

    fn event_create(&self, timing: bool) -> RawResult<EventHandle> {
        let mut state = self.enter(DriverCall::EventCreate)?;
        let ctx = state.ctx()?;
        let handle = EventHandle(state.handle());
        state.events.insert(handle, SimEvent { ctx, timing, state: EventState::Never });
        Ok(handle)
    }

    fn event_destroy(&self, event: EventHandle) -> RawResult<()> {
        let mut state = self.enter(DriverCall::EventDestroy)?;
        state.event(event)?;
        state.events.remove(&event);
        Ok(())
    }

    fn event_record(&self, event: EventHandle, stream: StreamHandle) -> RawResult<()> {
        let mut state = self.enter(DriverCall::EventRecord)?;
        let stream = state.stream(stream)?;
        state.event(event)?;
        state.record_event(event, stream)?;
        self.queued(state)
    }

    fn event_query(&self, event: EventHandle) -> RawResult<()> {
        let mut state = self.enter(DriverCall::EventQuery)?;
        state.event(event)?;
        state.check_event_wait(event)?;
        match state.event_item(event) {
            Some((item, clock)) => self.poll(state, item, &clock).map(drop),
            None => Ok(()),
        }
    }

    fn event_synchronize(&self, event: EventHandle) -> RawResult<()> {
        let mut state = self.enter(DriverCall::EventSynchronize)?;
        state.event(event)?;
        state.check_event_wait(event)?;
        match state.event_item(event) {
            Some((item, clock)) => self.wait_for(state, item, &clock).map(drop),
            None => Ok(()),
        }
    }

    fn event_elapsed(&self, start: EventHandle, end: EventHandle) -> RawResult<f32> {
        let state = self.enter(DriverCall::EventElapsed)?;
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

    fn module_load(&self, image: &[u8]) -> RawResult<ModuleHandle> {
        let mut state = self.enter(DriverCall::ModuleLoad)?;
        let ctx = state.ctx()?;
        let entries = entries(image)?;
        let handle = ModuleHandle(state.handle());
        state.modules.insert(handle, SimModule { ctx, entries, functions: Vec::new() });
        Ok(handle)
    }

    fn module_unload(&self, module: ModuleHandle) -> RawResult<()> {
        let mut state = self.enter(DriverCall::ModuleUnload)?;
        state.ctx()?;
        state.check_unsafe_call()?;
        let mut state = self.drain(state)?;
        let gone = state.modules.remove(&module).ok_or(Code::INVALID_HANDLE)?;
        for function in gone.functions {
            state.functions.remove(&function);
        }
        Ok(())
    }

    fn module_function(&self, module: ModuleHandle, name: &str) -> RawResult<FunctionHandle> {
        let mut state = self.enter(DriverCall::ModuleFunction)?;
        state.ctx()?;
        state.find_function(module, name)
    }

    fn function_params(&self, function: FunctionHandle) -> RawResult<Vec<ParamInfo>> {
        let state = self.enter(DriverCall::FunctionParams)?;
        state.function(function).map(|f| f.twin.params.clone())
    }

    fn function_attribute(&self, function: FunctionHandle, attribute: FunctionAttribute) -> RawResult<i32> {
        let state = self.enter(DriverCall::FunctionAttribute)?;
        state.function(function).map(|f| f.attribute(attribute))
    }

    fn function_set_attribute(
        &self,
        function: FunctionHandle,
        attribute: FunctionAttribute,
        value: i32,
    ) -> RawResult<()> {
        let mut state = self.enter(DriverCall::FunctionSetAttribute)?;
        let shared_block_bytes = state.shared_block_bytes;
        let f = state.functions.get_mut(&function).ok_or(Code::INVALID_HANDLE)?;
        f.set_attribute(attribute, value, shared_block_bytes)
    }

    fn occupancy(&self, function: FunctionHandle, block_threads: u32, shared_bytes: u32) -> RawResult<u32> {
        let state = self.enter(DriverCall::Occupancy)?;
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
    ) -> RawResult<()> {
        let state = self.enter(DriverCall::Launch)?;
        let stream = state.stream(stream)?;
        let (ctx, op) = state.kernel_op(function, config, params)?;
        if ctx != state.streams[&stream].ctx {
            return Err(Code::INVALID_HANDLE);
        }
        self.submit(state, stream, SimOp::Kernel(op))
    }

    fn graph_create(&self) -> RawResult<GraphHandle> {
        let mut state = self.enter(DriverCall::GraphCreate)?;
        let handle = GraphHandle(state.handle());
        state.graphs.insert(handle, GraphSlot::root(GraphDef::default()));
        Ok(handle)
    }

    fn graph_destroy(&self, graph: GraphHandle) -> RawResult<()> {
        let mut state = self.enter(DriverCall::GraphDestroy)?;
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
    ) -> RawResult<NodeHandle> {
        let mut state = self.enter(DriverCall::GraphAddKernel)?;
        let (_, op) = state.kernel_op(function, config, params)?;
        state.add_node(graph, deps, NodeWork::Op(SimOp::Kernel(op), None))
    }

    unsafe fn graph_add_memcpy(
        &self,
        graph: GraphHandle,
        deps: &[Dependency],
        dst: CopyEnd,
        src: CopyEnd,
        bytes: u64,
    ) -> RawResult<NodeHandle> {
        let mut state = self.enter(DriverCall::GraphAddMemcpy)?;
        state.ctx()?;
        let dst = state.copy_end(dst, bytes, true)?;
        let src = state.copy_end(src, bytes, true)?;
        state.add_node(graph, deps, NodeWork::Op(SimOp::Copy { dst, src, bytes }, None))
    }

    fn graph_add_memset(
        &self,
        graph: GraphHandle,
        deps: &[Dependency],
        dst: DevicePtr,
        byte: u8,
        bytes: u64,
    ) -> RawResult<NodeHandle> {
        let mut state = self.enter(DriverCall::GraphAddMemset)?;
        state.ctx()?;
        state.check_range("a fill node", dst, bytes)?;
        state.add_node(graph, deps, NodeWork::Op(SimOp::Memset { dst: dst.0, byte, bytes }, None))
    }

    fn graph_add_child(
        &self,
        graph: GraphHandle,
        deps: &[Dependency],
        child: GraphHandle,
    ) -> RawResult<NodeHandle> {
        let mut state = self.enter(DriverCall::GraphAddChild)?;
        let child = state.graph(child)?.def.clone();
        if child.has_loop() {
            return Err(Code::NOT_SUPPORTED);
        }
        let child = Arc::new(child.renamed(&mut || state.handle()));
        state.add_node(graph, deps, NodeWork::Child(child))
    }

    fn graph_add_empty(&self, graph: GraphHandle, deps: &[Dependency]) -> RawResult<NodeHandle> {
        self.enter(DriverCall::GraphAddEmpty)?.add_node(graph, deps, NodeWork::Op(SimOp::Empty, None))
    }

    unsafe fn graph_add_host(
        &self,
        graph: GraphHandle,
        deps: &[Dependency],
        f: RawHostFn,
        user: *mut c_void,
    ) -> RawResult<NodeHandle> {
        let work = NodeWork::Op(SimOp::Host(SimHostCall { f, user }), None);
        self.enter(DriverCall::GraphAddHost)?.add_node(graph, deps, work)
    }

    fn graph_condition(&self, graph: GraphHandle, initial: u32) -> RawResult<ConditionHandle> {
        self.enter(DriverCall::GraphCondition)?.create_condition(graph, initial)
    }

    fn graph_add_loop(
        &self,
        graph: GraphHandle,
        deps: &[Dependency],
        condition: ConditionHandle,
    ) -> RawResult<(NodeHandle, GraphHandle)> {
        self.enter(DriverCall::GraphAddLoop)?.add_loop(graph, deps, condition)
    }

    fn graph_nodes(&self, graph: GraphHandle) -> RawResult<Vec<(NodeHandle, NodeKind)>> {
        let mut state = self.enter(DriverCall::GraphNodes)?;
        let mut nodes: Vec<_> = state.graph(graph)?.def.nodes.iter().map(|n| (n.handle, n.kind())).collect();
        // The driver guarantees no order, so tests must not rely on one.
        state.rng.shuffle(&mut nodes);
        Ok(nodes)
    }

    fn graph_edges(&self, graph: GraphHandle) -> RawResult<Vec<Edge>> {
        let state = self.enter(DriverCall::GraphEdges)?;
        let nodes = &state.graph(graph)?.def.nodes;
        let edges =
            nodes.iter().flat_map(|n| n.deps.iter().map(|d| Edge { from: d.on, to: n.handle, kind: d.kind }));
        Ok(edges.collect())
    }

    fn graph_child(&self, node: NodeHandle) -> RawResult<GraphHandle> {
        let mut state = self.enter(DriverCall::GraphChild)?;
        state.child_graph(node)
    }

    fn graph_instantiate(&self, graph: GraphHandle) -> RawResult<ExecHandle> {
        let mut state = self.enter(DriverCall::GraphInstantiate)?;
        let ctx = state.ctx()?;
        state.graph(graph)?;
        state.check_unsafe_call()?;
        state.check_loops(graph)?;
        let body = |handle| state.graph(handle).ok().map(|slot| Arc::clone(&slot.def));
        let def = &state.graph(graph)?.def;
        let (has_loop, flat) = (def.has_loop(), Arc::new(FlatGraph::new(def, &body)));
        let handle = ExecHandle(state.handle());
        let of_loop = has_loop.then_some(graph);
        state.execs.insert(handle, SimExec { ctx, graph: flat, last: None, of_loop });
        Ok(handle)
    }

    fn exec_destroy(&self, exec: ExecHandle) -> RawResult<()> {
        let mut state = self.enter(DriverCall::ExecDestroy)?;
        if !state.execs.contains_key(&exec) {
            return Err(Code::INVALID_HANDLE);
        }
        state.check_unsafe_call()?;
        state.execs.remove(&exec);
        Ok(())
    }

    fn exec_upload(&self, exec: ExecHandle, stream: StreamHandle) -> RawResult<()> {
        let mut state = self.enter(DriverCall::ExecUpload)?;
        let stream = state.stream(stream)?;
        if !state.execs.contains_key(&exec) {
            return Err(Code::INVALID_HANDLE);
        }
        if state.capturing(stream)?.is_some() {
            return state.check_stream_wait(stream);
        }
        self.submit(state, stream, SimOp::Empty)
    }

    fn exec_launch(&self, exec: ExecHandle, stream: StreamHandle) -> RawResult<()> {
        let mut state = self.enter(DriverCall::ExecLaunch)?;
        let stream = state.stream(stream)?;
        let found = state.execs.get(&exec).ok_or(Code::INVALID_HANDLE)?;
        let (graph, last, ctx) = (found.graph.clone(), found.last.clone(), found.ctx);
        if ctx != state.streams[&stream].ctx {
            return Err(Code::INVALID_HANDLE);
        }
        // The driver cannot capture a graph launch; that takes a child node.
        if state.capturing(stream)?.is_some() {
            return state.check_stream_wait(stream);
        }
        if state.streams[&stream].kind == SimStreamKind::Legacy {
            state.check_legacy(ctx)?;
        }
        // The graph cannot allocate memory that an earlier launch allocated and nobody has freed.
        if graph.allocs.iter().any(|&start| state.memory.owner(start).is_some_and(|(_, live)| live)) {
            return Err(Code::INVALID_VALUE);
        }
        let need: u64 = graph.allocs.iter().map(|&start| state.memory.reserved_bytes(start)).sum();
        if need > state.memory.info().0 {
            return Err(Code::OUT_OF_MEMORY);
        }
        let after = last.as_ref().map(|(item, clock)| (*item, clock));
        let item = state.enqueue(stream, SimWork::Graph(GraphRun::new(graph)), after);
        let clock = state.streams[&stream].clock.clone();
        if let Some(e) = state.execs.get_mut(&exec) {
            e.last = Some((item, clock));
        }
        self.queued(state)
    }
}
