//! The real driver.

mod device;
mod graph;
mod table;

use std::ffi::{CString, c_void};
use std::path::PathBuf;
use std::sync::Arc;

use cudarc::driver::sys;

use crate::api::{
    Api, CaptureMode, CaptureStatus, Code, ConditionHandle, CopyEnd, CtxHandle, Dependency, DeviceInfo,
    DevicePtr, Edge, EventHandle, ExecHandle, FunctionAttribute, FunctionHandle, GraphHandle, HostPtr,
    LaunchConfig, ModuleHandle, NodeHandle, NodeKind, ParamInfo, RawHostFn, RawResult, StreamHandle,
    StreamKind,
};
use crate::error::DriverError;
use table::DriverTable;

/// The CUDA driver of this machine.
pub(crate) struct RealDriver {
    table: DriverTable,
    path: Option<PathBuf>,
}

/// Loads and initialises the driver.
pub(crate) fn load() -> Result<Arc<dyn Api>, DriverError> {
    let (table, path) = table::open()?;
    // SAFETY: `cuInit` takes no pointers and may be called any number of times.
    match unsafe { (table.cuInit)(0) } {
        0 => Ok(Arc::new(RealDriver { table, path })),
        code => Err(DriverError::NoDevice { code: Code(code) }),
    }
}

/// Returns the raw interface of the real driver, for tests that compare it with the simulation.
///
/// # Safety
/// The caller passes only handles that this value returned and that are not destroyed, in the context that they
/// belong to, and launches kernels only with parameters that point to live memory.
pub unsafe fn raw_driver() -> Result<Arc<dyn Api>, DriverError> {
    load()
}

#[inline]
fn check(code: u32) -> RawResult<()> {
    if code == 0 { Ok(()) } else { Err(Code(code)) }
}

/// Calls a function whose first argument receives the result.
macro_rules! out {
    ($driver:expr, $name:ident ( $($arg:expr),* )) => {{
        let mut out = Default::default();
        // SAFETY: `out` outlives the call. The holder of the driver value guarantees that the handles are live (see
        // `raw_driver`); in this crate the owned types do.
        check(unsafe { ($driver.table.$name)(&mut out, $($arg),*) }).map(|()| out)
    }};
}

/// Calls a function that takes only values.
macro_rules! call {
    ($driver:expr, $name:ident ( $($arg:expr),* )) => {
        // SAFETY: the function takes no pointer to host memory. The holder of the driver value guarantees that the
        // handles are live (see `raw_driver`); in this crate the owned types do.
        check(unsafe { ($driver.table.$name)($($arg),*) })
    };
}

use {call, out};

/// Returns the launch attributes of a configuration and their number.
fn attributes(config: &LaunchConfig) -> ([sys::CUlaunchAttribute; 3], usize) {
    use sys::CUlaunchAttributeID as Id;
    let attribute = |id, value| sys::CUlaunchAttribute { id, pad: [0; 4], value };
    let none = sys::CUlaunchAttributeValue { pad: [0; 64] };
    let mut all = [attribute(Id::CU_LAUNCH_ATTRIBUTE_IGNORE, none); 3];
    let mut n = 0;
    let mut push = |id, set: &dyn Fn(&mut sys::CUlaunchAttributeValue)| {
        // Zeroed first, so that bytes beyond a smaller union member are defined.
        let mut value = none;
        set(&mut value);
        all[n] = attribute(id, value);
        n += 1;
    };
    if let Some([x, y, z]) = config.cluster {
        push(Id::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, &|v| {
            v.clusterDim = sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x, y, z };
        });
    }
    if config.cooperative {
        push(Id::CU_LAUNCH_ATTRIBUTE_COOPERATIVE, &|v| v.cooperative = 1);
    }
    if config.programmatic {
        push(Id::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, &|v| {
            v.programmaticStreamSerializationAllowed = 1;
        });
    }
    (all, n)
}

/// Packed parameters in the driver's list form: pointer, size, end.
struct PackedParams {
    size: usize,
    list: [*mut c_void; 5],
}

impl PackedParams {
    fn new(params: &[u8]) -> PackedParams {
        PackedParams { size: params.len(), list: [std::ptr::null_mut(); 5] }
    }

    /// Returns the list, which is valid while `self` and `params` do not move. Null for a kernel without
    /// parameters.
    fn list(&mut self, params: &[u8]) -> *mut *mut c_void {
        if params.is_empty() {
            return std::ptr::null_mut();
        }
        let tag = |n: u32| n as usize as *mut c_void;
        self.list = [
            tag(sys::CU_LAUNCH_PARAM_BUFFER_POINTER_AS_INT),
            params.as_ptr().cast_mut().cast(),
            tag(sys::CU_LAUNCH_PARAM_BUFFER_SIZE_AS_INT),
            (&raw mut self.size).cast(),
            tag(sys::CU_LAUNCH_PARAM_END_AS_INT),
        ];
        self.list.as_mut_ptr()
    }
}

fn status(value: u32) -> RawResult<CaptureStatus> {
    match value {
        0 => Ok(CaptureStatus::None),
        1 => Ok(CaptureStatus::Active),
        2 => Ok(CaptureStatus::Invalidated),
        _ => Err(Code::UNKNOWN),
    }
}

fn attribute_id(attribute: FunctionAttribute) -> i32 {
    use sys::CUfunction_attribute as Id;
    let id = match attribute {
        FunctionAttribute::MaxThreadsPerBlock => Id::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK,
        FunctionAttribute::StaticSharedBytes => Id::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES,
        FunctionAttribute::LocalBytes => Id::CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES,
        FunctionAttribute::Registers => Id::CU_FUNC_ATTRIBUTE_NUM_REGS,
        FunctionAttribute::BinaryVersion => Id::CU_FUNC_ATTRIBUTE_BINARY_VERSION,
        FunctionAttribute::MaxDynamicSharedBytes => Id::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
        FunctionAttribute::PreferredSharedCarveout => Id::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT,
        FunctionAttribute::NonPortableClusterSize => Id::CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED,
    };
    id as i32
}

impl Api for RealDriver {
    fn backend(&self) -> &'static str {
        "cuda"
    }

    fn library_path(&self) -> Option<PathBuf> {
        self.path.clone()
    }

    fn driver_version(&self) -> RawResult<u32> {
        out!(self, cuDriverGetVersion()).map(|v: i32| v as u32)
    }

    fn device_count(&self) -> RawResult<u32> {
        out!(self, cuDeviceGetCount()).map(|n: i32| n as u32)
    }

    fn device_info(&self, ordinal: u32) -> RawResult<DeviceInfo> {
        self.info(ordinal)
    }

    fn primary_ctx_retain(&self, ordinal: u32) -> RawResult<CtxHandle> {
        let device = self.device(ordinal)?;
        let ctx: u64 = out!(self, cuDevicePrimaryCtxRetain(device))?;
        if let Err(code) = call!(self, cuCtxSetCurrent(ctx)) {
            let _ = call!(self, cuDevicePrimaryCtxRelease_v2(device));
            return Err(code);
        }
        Ok(CtxHandle(ctx))
    }

    fn primary_ctx_release(&self, ordinal: u32) -> RawResult<()> {
        call!(self, cuDevicePrimaryCtxRelease_v2(self.device(ordinal)?))
    }

    fn ctx_create(&self, ordinal: u32) -> RawResult<CtxHandle> {
        out!(self, cuCtxCreate_v2(0, self.device(ordinal)?)).map(CtxHandle)
    }

    fn ctx_destroy(&self, ctx: CtxHandle) -> RawResult<()> {
        call!(self, cuCtxDestroy_v2(ctx.0))
    }

    fn ctx_set_current(&self, ctx: Option<CtxHandle>) -> RawResult<()> {
        call!(self, cuCtxSetCurrent(ctx.map_or(0, |c| c.0)))
    }

    fn ctx_synchronize(&self) -> RawResult<()> {
        call!(self, cuCtxSynchronize())
    }

    fn mem_info(&self) -> RawResult<(u64, u64)> {
        let mut total = 0;
        let free: usize = out!(self, cuMemGetInfo_v2(&mut total))?;
        Ok((free as u64, total as u64))
    }

    fn alloc(&self, bytes: u64) -> RawResult<DevicePtr> {
        out!(self, cuMemAlloc_v2(bytes as usize)).map(DevicePtr)
    }

    fn free(&self, ptr: DevicePtr) -> RawResult<()> {
        call!(self, cuMemFree_v2(ptr.0))
    }

    fn alloc_host(&self, bytes: u64) -> RawResult<HostPtr> {
        out!(self, cuMemAllocHost_v2(bytes as usize)).map(HostPtr)
    }

    fn free_host(&self, ptr: HostPtr) -> RawResult<()> {
        call!(self, cuMemFreeHost(ptr.0))
    }

    fn alloc_managed(&self, bytes: u64) -> RawResult<DevicePtr> {
        let global = sys::CUmemAttach_flags::CU_MEM_ATTACH_GLOBAL as u32;
        out!(self, cuMemAllocManaged(bytes as usize, global)).map(DevicePtr)
    }

    fn alloc_async(&self, bytes: u64, stream: StreamHandle) -> RawResult<DevicePtr> {
        out!(self, cuMemAllocAsync(bytes as usize, stream.0)).map(DevicePtr)
    }

    fn free_async(&self, ptr: DevicePtr, stream: StreamHandle) -> RawResult<()> {
        call!(self, cuMemFreeAsync(ptr.0, stream.0))
    }

    fn memcpy_htod(&self, dst: DevicePtr, src: &[u8]) -> RawResult<()> {
        // SAFETY: `src` is readable for its length, and a synchronous copy is done reading when it returns.
        check(unsafe { (self.table.cuMemcpyHtoD_v2)(dst.0, src.as_ptr(), src.len()) })
    }

    fn memcpy_dtoh(&self, dst: &mut [u8], src: DevicePtr) -> RawResult<()> {
        // SAFETY: `dst` is writable for its length, and a synchronous copy is done writing when it returns.
        check(unsafe { (self.table.cuMemcpyDtoH_v2)(dst.as_mut_ptr(), src.0, dst.len()) })
    }

    unsafe fn memcpy_htod_async(
        &self,
        dst: DevicePtr,
        src: HostPtr,
        bytes: u64,
        stream: StreamHandle,
    ) -> RawResult<()> {
        // SAFETY: the caller keeps `src` readable until the copy has run.
        check(unsafe { (self.table.cuMemcpyHtoDAsync_v2)(dst.0, src.as_ptr(), bytes as usize, stream.0) })
    }

    unsafe fn memcpy_dtoh_async(
        &self,
        dst: HostPtr,
        src: DevicePtr,
        bytes: u64,
        stream: StreamHandle,
    ) -> RawResult<()> {
        // SAFETY: the caller keeps `dst` writable and unused until the copy has run.
        check(unsafe { (self.table.cuMemcpyDtoHAsync_v2)(dst.as_ptr(), src.0, bytes as usize, stream.0) })
    }

    fn memcpy_dtod_async(
        &self,
        dst: DevicePtr,
        src: DevicePtr,
        bytes: u64,
        stream: StreamHandle,
    ) -> RawResult<()> {
        call!(self, cuMemcpyDtoDAsync_v2(dst.0, src.0, bytes as usize, stream.0))
    }

    fn memset_async(&self, dst: DevicePtr, byte: u8, bytes: u64, stream: StreamHandle) -> RawResult<()> {
        call!(self, cuMemsetD8Async(dst.0, byte, bytes as usize, stream.0))
    }

    fn stream_create(&self, kind: StreamKind) -> RawResult<StreamHandle> {
        let flags = match kind {
            StreamKind::Blocking => sys::CUstream_flags::CU_STREAM_DEFAULT,
            StreamKind::NonBlocking => sys::CUstream_flags::CU_STREAM_NON_BLOCKING,
        };
        out!(self, cuStreamCreate(flags as u32)).map(StreamHandle)
    }

    fn stream_destroy(&self, stream: StreamHandle) -> RawResult<()> {
        call!(self, cuStreamDestroy_v2(stream.0))
    }

    fn stream_synchronize(&self, stream: StreamHandle) -> RawResult<()> {
        call!(self, cuStreamSynchronize(stream.0))
    }

    fn stream_query(&self, stream: StreamHandle) -> RawResult<()> {
        call!(self, cuStreamQuery(stream.0))
    }

    fn stream_wait_event(&self, stream: StreamHandle, event: EventHandle) -> RawResult<()> {
        call!(self, cuStreamWaitEvent(stream.0, event.0, 0))
    }

    fn stream_begin_capture(&self, stream: StreamHandle, mode: CaptureMode) -> RawResult<()> {
        use sys::CUstreamCaptureMode as Mode;
        let mode = match mode {
            CaptureMode::Global => Mode::CU_STREAM_CAPTURE_MODE_GLOBAL,
            CaptureMode::ThreadLocal => Mode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
            CaptureMode::Relaxed => Mode::CU_STREAM_CAPTURE_MODE_RELAXED,
        };
        call!(self, cuStreamBeginCapture_v2(stream.0, mode as u32))
    }

    fn stream_end_capture(&self, stream: StreamHandle) -> RawResult<GraphHandle> {
        let mut graph = 0;
        // SAFETY: `graph` outlives the call; the stream is live (see `raw_driver`).
        check(unsafe { (self.table.cuStreamEndCapture)(stream.0, &mut graph) })?;
        Ok(GraphHandle(graph))
    }

    fn stream_is_capturing(&self, stream: StreamHandle) -> RawResult<CaptureStatus> {
        let mut value = 0;
        // SAFETY: `value` outlives the call; the stream is live (see `raw_driver`).
        check(unsafe { (self.table.cuStreamIsCapturing)(stream.0, &mut value) })?;
        status(value)
    }

    fn stream_capture_info(&self, stream: StreamHandle) -> RawResult<(CaptureStatus, Option<u64>)> {
        let (mut value, mut id) = (0, 0);
        let null = std::ptr::null_mut();
        // SAFETY: both results outlive the call, and the driver accepts null for the others.
        check(unsafe {
            (self.table.cuStreamGetCaptureInfo_v2)(
                stream.0,
                &mut value,
                &mut id,
                null,
                null.cast(),
                null.cast(),
            )
        })?;
        let status = status(value)?;
        Ok((status, (status == CaptureStatus::Active).then_some(id)))
    }

    unsafe fn launch_host_func(
        &self,
        stream: StreamHandle,
        f: RawHostFn,
        user: *mut c_void,
    ) -> RawResult<()> {
        // SAFETY: the caller guarantees that `f(user)` is callable until it has run.
        check(unsafe { (self.table.cuLaunchHostFunc)(stream.0, f, user) })
    }

    fn event_create(&self, timing: bool) -> RawResult<EventHandle> {
        let flags = if timing {
            sys::CUevent_flags::CU_EVENT_DEFAULT
        } else {
            sys::CUevent_flags::CU_EVENT_DISABLE_TIMING
        };
        out!(self, cuEventCreate(flags as u32)).map(EventHandle)
    }

    fn event_destroy(&self, event: EventHandle) -> RawResult<()> {
        call!(self, cuEventDestroy_v2(event.0))
    }

    fn event_record(&self, event: EventHandle, stream: StreamHandle) -> RawResult<()> {
        call!(self, cuEventRecord(event.0, stream.0))
    }

    fn event_query(&self, event: EventHandle) -> RawResult<()> {
        call!(self, cuEventQuery(event.0))
    }

    fn event_synchronize(&self, event: EventHandle) -> RawResult<()> {
        call!(self, cuEventSynchronize(event.0))
    }

    fn event_elapsed(&self, start: EventHandle, end: EventHandle) -> RawResult<f32> {
        out!(self, cuEventElapsedTime(start.0, end.0))
    }

    fn module_load(&self, image: &[u8]) -> RawResult<ModuleHandle> {
        // PTX must be zero-terminated; binary images carry their own length, so a trailing zero does no harm.
        let mut terminated = Vec::with_capacity(image.len() + 1);
        terminated.extend_from_slice(image);
        terminated.push(0);
        out!(self, cuModuleLoadData(terminated.as_ptr())).map(ModuleHandle)
    }

    fn module_unload(&self, module: ModuleHandle) -> RawResult<()> {
        call!(self, cuModuleUnload(module.0))
    }

    fn module_function(&self, module: ModuleHandle, name: &str) -> RawResult<FunctionHandle> {
        let name = CString::new(name).map_err(|_| Code::NOT_FOUND)?;
        let function: u64 = out!(self, cuModuleGetFunction(module.0, name.as_ptr()))?;
        // Lazy loading would otherwise postpone this to the first launch, which may be inside a capture.
        call!(self, cuFuncLoad(function))?;
        Ok(FunctionHandle(function))
    }

    fn function_params(&self, function: FunctionHandle) -> RawResult<Vec<ParamInfo>> {
        let mut params = Vec::new();
        loop {
            let (mut offset, mut size) = (0, 0);
            // SAFETY: both results outlive the call; the function is live (see `raw_driver`).
            let code =
                unsafe { (self.table.cuFuncGetParamInfo)(function.0, params.len(), &mut offset, &mut size) };
            match check(code) {
                Ok(()) => params.push(ParamInfo { offset, size }),
                // The index is past the last parameter.
                Err(Code::INVALID_VALUE) => return Ok(params),
                Err(code) => return Err(code),
            }
        }
    }

    fn function_attribute(&self, function: FunctionHandle, attribute: FunctionAttribute) -> RawResult<i32> {
        out!(self, cuFuncGetAttribute(attribute_id(attribute), function.0))
    }

    fn function_set_attribute(
        &self,
        function: FunctionHandle,
        attribute: FunctionAttribute,
        value: i32,
    ) -> RawResult<()> {
        call!(self, cuFuncSetAttribute(function.0, attribute_id(attribute), value))
    }

    fn occupancy(&self, function: FunctionHandle, block_threads: u32, shared_bytes: u32) -> RawResult<u32> {
        let threads = i32::try_from(block_threads).map_err(|_| Code::INVALID_VALUE)?;
        let blocks: i32 = out!(
            self,
            cuOccupancyMaxActiveBlocksPerMultiprocessor(function.0, threads, shared_bytes as usize)
        )?;
        Ok(blocks as u32)
    }

    fn launch(
        &self,
        function: FunctionHandle,
        config: &LaunchConfig,
        stream: StreamHandle,
        params: &[u8],
    ) -> RawResult<()> {
        let (mut attrs, n_attrs) = attributes(config);
        let launch = sys::CUlaunchConfig {
            gridDimX: config.grid[0],
            gridDimY: config.grid[1],
            gridDimZ: config.grid[2],
            blockDimX: config.block[0],
            blockDimY: config.block[1],
            blockDimZ: config.block[2],
            sharedMemBytes: config.shared_bytes,
            hStream: stream.0 as sys::CUstream,
            attrs: attrs.as_mut_ptr(),
            numAttrs: n_attrs as u32,
        };
        let mut packed = PackedParams::new(params);
        let list = packed.list(params);
        // SAFETY: `launch`, `attrs`, `packed` and `params` outlive the call, which copies them. The caller
        // guarantees that the parameters fit this function and point to live memory (`Launch::pack` in this crate).
        check(unsafe { (self.table.cuLaunchKernelEx)(&launch, function.0, std::ptr::null_mut(), list) })
    }

    fn graph_create(&self) -> RawResult<GraphHandle> {
        out!(self, cuGraphCreate(0)).map(GraphHandle)
    }

    fn graph_destroy(&self, graph: GraphHandle) -> RawResult<()> {
        call!(self, cuGraphDestroy(graph.0))
    }

    fn graph_add_kernel(
        &self,
        graph: GraphHandle,
        deps: &[Dependency],
        function: FunctionHandle,
        config: &LaunchConfig,
        params: &[u8],
    ) -> RawResult<NodeHandle> {
        self.add_kernel(graph, deps, function, config, params)
    }

    unsafe fn graph_add_memcpy(
        &self,
        graph: GraphHandle,
        deps: &[Dependency],
        dst: CopyEnd,
        src: CopyEnd,
        bytes: u64,
    ) -> RawResult<NodeHandle> {
        self.add_memcpy(graph, deps, dst, src, bytes)
    }

    fn graph_add_memset(
        &self,
        graph: GraphHandle,
        deps: &[Dependency],
        dst: DevicePtr,
        byte: u8,
        bytes: u64,
    ) -> RawResult<NodeHandle> {
        self.add_memset(graph, deps, dst, byte, bytes)
    }

    fn graph_add_child(
        &self,
        graph: GraphHandle,
        deps: &[Dependency],
        child: GraphHandle,
    ) -> RawResult<NodeHandle> {
        self.add_node(graph, deps, |node, on| {
            // SAFETY: `node` and `on` outlive the call; both graphs are live (see `raw_driver`).
            unsafe { (self.table.cuGraphAddChildGraphNode)(node, graph.0, on.as_ptr(), on.len(), child.0) }
        })
    }

    fn graph_add_empty(&self, graph: GraphHandle, deps: &[Dependency]) -> RawResult<NodeHandle> {
        self.add_node(graph, deps, |node, on| {
            // SAFETY: `node` and `on` outlive the call; the graph is live (see `raw_driver`).
            unsafe { (self.table.cuGraphAddEmptyNode)(node, graph.0, on.as_ptr(), on.len()) }
        })
    }

    unsafe fn graph_add_host(
        &self,
        graph: GraphHandle,
        deps: &[Dependency],
        f: RawHostFn,
        user: *mut c_void,
    ) -> RawResult<NodeHandle> {
        let params = sys::CUDA_HOST_NODE_PARAMS { fn_: Some(f), userData: user };
        self.add_node(graph, deps, |node, on| {
            // SAFETY: all pointers outlive the call; the caller guarantees that `f(user)` is callable at every
            // execution.
            unsafe { (self.table.cuGraphAddHostNode)(node, graph.0, on.as_ptr(), on.len(), &params) }
        })
    }

    fn graph_condition(&self, graph: GraphHandle, initial: u32) -> RawResult<ConditionHandle> {
        self.condition(graph, initial)
    }

    fn graph_add_loop(
        &self,
        graph: GraphHandle,
        deps: &[Dependency],
        condition: ConditionHandle,
    ) -> RawResult<(NodeHandle, GraphHandle)> {
        self.add_loop(graph, deps, condition)
    }

    fn graph_nodes(&self, graph: GraphHandle) -> RawResult<Vec<(NodeHandle, NodeKind)>> {
        self.nodes(graph)
    }

    fn graph_edges(&self, graph: GraphHandle) -> RawResult<Vec<Edge>> {
        self.edges(graph)
    }

    fn graph_child(&self, node: NodeHandle) -> RawResult<GraphHandle> {
        let mut graph = 0;
        // SAFETY: `graph` outlives the call; the node is live (see `raw_driver`).
        check(unsafe { (self.table.cuGraphChildGraphNodeGetGraph)(node.0, &mut graph) })?;
        Ok(GraphHandle(graph))
    }

    fn graph_instantiate(&self, graph: GraphHandle) -> RawResult<ExecHandle> {
        out!(self, cuGraphInstantiateWithFlags(graph.0, 0)).map(ExecHandle)
    }

    fn exec_destroy(&self, exec: ExecHandle) -> RawResult<()> {
        call!(self, cuGraphExecDestroy(exec.0))
    }

    fn exec_upload(&self, exec: ExecHandle, stream: StreamHandle) -> RawResult<()> {
        call!(self, cuGraphUpload(exec.0, stream.0))
    }

    fn exec_launch(&self, exec: ExecHandle, stream: StreamHandle) -> RawResult<()> {
        call!(self, cuGraphLaunch(exec.0, stream.0))
    }
}
