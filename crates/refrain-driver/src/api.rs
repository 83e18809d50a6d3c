//! The raw driver interface: one method per driver call, no policy.
//!
//! [`Api`] is implemented twice: by the real driver and by the simulated device. Everything above it is written once,
//! against this trait, and cannot tell the two apart: results are the driver's own codes, and a call made while a
//! stream is being captured must behave as `capture-truth.tsv` measured it.
//!
//! # The contract of the trait
//!
//! Its methods are safe to *write*, because the obligation is taken on once, where a value is obtained: by an `unsafe`
//! function ([`crate::raw_driver`], [`crate::sim::SimDriver::api`]). Whoever holds it passes only handles that the same
//! value returned and that were not destroyed since, frees only what it allocated itself, and launches kernels only with
//! parameters that name live memory. The simulated device checks handles and device memory itself and answers with the
//! driver's codes. The few methods that take a host address which the driver reads or writes *later* are `unsafe` besides.
//!
//! Context-dependent calls act on the context that is current on the calling thread ([`Api::ctx_set_current`]).

use std::ffi::c_void;
use std::fmt;
use std::path::PathBuf;

/// What a raw call returns: the driver's code when it is not success.
pub type RawResult<T> = Result<T, Code>;

/// A `CUresult` other than success.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Code(pub u32);

macro_rules! codes {
    ($($(#[$doc:meta])* $name:ident = $value:literal;)*) => {
        impl Code {
            $($(#[$doc])* pub const $name: Code = Code($value);)*

            /// The driver's name for the code, without `CUDA_ERROR_`, or `UNNAMED` for one that is not in this list.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self.0 {
                    0 => "SUCCESS",
                    $($value => stringify!($name),)*
                    _ => "UNNAMED",
                }
            }

            /// The code of a name as [`Code::name`] and `capture-truth.tsv` write it.
            #[must_use]
            pub fn from_name(name: &str) -> Option<Code> {
                match name {
                    $(stringify!($name) => Some(Code::$name),)*
                    _ => None,
                }
            }
        }
    };
}

codes! {
    /// A parameter is out of its range.
    INVALID_VALUE = 1;
    /// The device, or the host for pinned memory, has not enough memory left.
    OUT_OF_MEMORY = 2;
    /// The driver was not initialised.
    NOT_INITIALIZED = 3;
    /// The driver is shutting down.
    DEINITIALIZED = 4;
    /// There is no CUDA device.
    NO_DEVICE = 100;
    /// The device ordinal is not one of this machine.
    INVALID_DEVICE = 101;
    /// The module image is not one the device can load.
    INVALID_IMAGE = 200;
    /// No context is current on the thread, or it is not a live one.
    INVALID_CONTEXT = 201;
    /// The image holds no code for this device.
    NO_BINARY_FOR_GPU = 209;
    /// PTX text does not compile.
    INVALID_PTX = 218;
    /// PTX is of a version the driver does not know.
    UNSUPPORTED_PTX_VERSION = 222;
    /// The handle is not a live one.
    INVALID_HANDLE = 400;
    /// The resource is not in the state the call needs (a second capture begin, an end without one).
    ILLEGAL_STATE = 401;
    /// A name was not found in a module.
    NOT_FOUND = 500;
    /// Not finished yet; the one code that is not an error.
    NOT_READY = 600;
    /// A kernel touched an address that is not its to touch. Final for the context.
    ILLEGAL_ADDRESS = 700;
    /// Too many registers, threads or shared bytes for a launch.
    LAUNCH_OUT_OF_RESOURCES = 701;
    /// A kernel ran longer than the device allows.
    LAUNCH_TIMEOUT = 702;
    /// The context was destroyed.
    CONTEXT_IS_DESTROYED = 709;
    /// A device-side assertion failed. Final for the context.
    ASSERT = 710;
    /// A hardware stack error. Final for the context.
    HARDWARE_STACK_ERROR = 714;
    /// An instruction the device cannot execute. Final for the context.
    ILLEGAL_INSTRUCTION = 715;
    /// An address that is not aligned as its access needs. Final for the context.
    MISALIGNED_ADDRESS = 716;
    /// An address outside the space an instruction works on. Final for the context.
    INVALID_ADDRESS_SPACE = 717;
    /// A program counter outside code. Final for the context.
    INVALID_PC = 718;
    /// A kernel failed in a way with no name of its own. Final for the context.
    LAUNCH_FAILED = 719;
    /// More blocks than can be resident at once in a cooperative launch.
    COOPERATIVE_LAUNCH_TOO_LARGE = 720;
    /// The operation is not permitted.
    NOT_PERMITTED = 800;
    /// The device or driver does not support the operation.
    NOT_SUPPORTED = 801;
    /// The call is not permitted while a stream is being captured; the capture is invalidated.
    STREAM_CAPTURE_UNSUPPORTED = 900;
    /// An earlier error invalidated the capture.
    STREAM_CAPTURE_INVALIDATED = 901;
    /// Two captures would merge.
    STREAM_CAPTURE_MERGE = 902;
    /// The capture does not match the stream's.
    STREAM_CAPTURE_UNMATCHED = 903;
    /// A forked stream was not joined before the capture ended.
    STREAM_CAPTURE_UNJOINED = 904;
    /// A dependency would cross from outside into the capture.
    STREAM_CAPTURE_ISOLATION = 905;
    /// The legacy stream would depend on a capturing blocking stream.
    STREAM_CAPTURE_IMPLICIT = 906;
    /// The event was last recorded in a capture, so it cannot be queried or waited for.
    CAPTURED_EVENT = 907;
    /// The capture was begun by another thread.
    STREAM_CAPTURE_WRONG_THREAD = 908;
    /// The driver gave up waiting.
    TIMEOUT = 909;
    /// The driver does not know what went wrong.
    UNKNOWN = 999;
}

impl Code {
    /// True for faults after which the context, and the process, can do no more device work.
    #[must_use]
    pub const fn is_sticky(self) -> bool {
        matches!(self.0, 214 | 700 | 702 | 709 | 710 | 714..=719 | 4)
    }

    /// True for the 900 family: the call and a stream capture do not go together.
    #[must_use]
    pub const fn is_capture(self) -> bool {
        matches!(self.0, 900..=908)
    }
}

impl fmt::Debug for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}({})", self.name(), self.0)
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            "UNNAMED" => write!(f, "driver error {}", self.0),
            name => write!(f, "CUDA_ERROR_{name} ({})", self.0),
        }
    }
}

macro_rules! handles {
    ($($(#[$doc:meta])* $name:ident;)*) => {
        $($(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(pub u64);

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({:#x})"), self.0)
            }
        })*
    };
}

handles! {
    /// A context.
    CtxHandle;
    /// A stream.
    StreamHandle;
    /// An event.
    EventHandle;
    /// A loaded module.
    ModuleHandle;
    /// A kernel of a loaded module.
    FunctionHandle;
    /// A graph: nodes and edges, not executable yet.
    GraphHandle;
    /// A node of a graph.
    NodeHandle;
    /// An instantiated graph.
    ExecHandle;
    /// An address in device memory (or of pinned host memory, which the device sees at its host address).
    DevicePtr;
    /// An address in host memory, kept as a number so that handles stay `Send`.
    HostPtr;
}

impl StreamHandle {
    /// The legacy default stream, which every blocking stream waits for and is waited for by.
    pub const LEGACY: StreamHandle = StreamHandle(1);
}

impl DevicePtr {
    /// The address `bytes` further on.
    #[must_use]
    pub const fn add(self, bytes: u64) -> DevicePtr {
        DevicePtr(self.0.wrapping_add(bytes))
    }
}

impl HostPtr {
    /// As a pointer. Using it is up to the caller.
    #[must_use]
    pub const fn as_ptr(self) -> *mut u8 {
        self.0 as *mut u8
    }

    /// The address of a pointer.
    #[must_use]
    pub fn of<T>(p: *const T) -> HostPtr {
        HostPtr(p as u64)
    }

    /// The same address as the device sees it: pinned memory only.
    #[must_use]
    pub const fn device(self) -> DevicePtr {
        DevicePtr(self.0)
    }
}

/// What one card is.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct DeviceInfo {
    /// The card's name.
    pub name: String,
    /// Compute capability, `(9, 0)` for an H200.
    pub compute: (u32, u32),
    /// Number of multiprocessors.
    pub n_sms: u32,
    /// Total device memory in bytes.
    pub total_bytes: u64,
    /// L2 cache in bytes.
    pub l2_bytes: u64,
    /// Most shared memory a block can ask for, in bytes (after raising the function attribute).
    pub shared_block_bytes: u32,
    /// Shared memory of one multiprocessor in bytes.
    pub shared_sm_bytes: u32,
    /// Most threads in a block.
    pub max_block_threads: u32,
    /// Width of the memory bus in bits; 0 when the driver does not say.
    pub bus_bits: u32,
    /// Memory clock in kHz; 0 when the driver does not say.
    pub memory_khz: u32,
    /// Highest clock of the multiprocessors in kHz; 0 when the driver does not say.
    pub clock_khz: u32,
    /// `domain:bus:device.function`.
    pub pci: String,
    /// The card's unique id.
    pub uuid: [u8; 16],
    /// Whether the device uses the host's memory and has none of its own.
    pub unified: bool,
}

impl DeviceInfo {
    /// Bytes per second that its memory could deliver by clock and width; `None` where they are unknown.
    #[must_use]
    pub fn peak_bytes_per_second(&self) -> Option<f64> {
        // Two transfers per clock.
        let peak = f64::from(self.memory_khz) * 1e3 * 2.0 * f64::from(self.bus_bits) / 8.0;
        (peak > 0.0).then_some(peak)
    }

    /// A description with everything unknown, to be filled in by an implementation.
    #[must_use]
    pub fn named(name: &str) -> DeviceInfo {
        DeviceInfo {
            name: name.to_owned(),
            compute: (0, 0),
            n_sms: 0,
            total_bytes: 0,
            l2_bytes: 0,
            shared_block_bytes: 48 * 1024,
            shared_sm_bytes: 0,
            max_block_threads: 1024,
            bus_bits: 0,
            memory_khz: 0,
            clock_khz: 0,
            pci: String::new(),
            uuid: [0; 16],
            unified: false,
        }
    }
}

/// How a stream relates to the legacy stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamKind {
    /// Synchronises with the legacy stream.
    Blocking,
    /// Independent of the legacy stream. The only kind the safe layer makes.
    NonBlocking,
}

/// Which unsafe calls the driver refuses while a stream is being captured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CaptureMode {
    /// Those of any thread.
    Global,
    /// Those of the capturing thread.
    ThreadLocal,
    /// None.
    Relaxed,
}

/// Whether a stream is being captured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CaptureStatus {
    /// It is not.
    None,
    /// It is.
    Active,
    /// It was, something broke the capture, and the capture was not ended yet.
    Invalidated,
}

/// Where one kernel parameter lies in the packed parameter bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParamInfo {
    /// Byte offset.
    pub offset: usize,
    /// Byte size.
    pub size: usize,
}

/// A function attribute that can be read, and for some of them set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FunctionAttribute {
    /// Most threads in a block of this function.
    MaxThreadsPerBlock,
    /// Static shared memory in bytes.
    StaticSharedBytes,
    /// Local memory per thread in bytes.
    LocalBytes,
    /// Registers per thread.
    Registers,
    /// Compute capability the code was compiled for, times ten.
    BinaryVersion,
    /// Most dynamic shared memory a launch may ask for, in bytes (settable).
    MaxDynamicSharedBytes,
    /// Share of the L1 that prefers to be shared memory, in percent (settable).
    PreferredSharedCarveout,
    /// Whether clusters of more than eight blocks are allowed (settable).
    NonPortableClusterSize,
}

/// How a kernel is launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LaunchConfig {
    /// Blocks in x, y, z.
    pub grid: [u32; 3],
    /// Threads per block in x, y, z.
    pub block: [u32; 3],
    /// Dynamic shared memory per block in bytes.
    pub shared_bytes: u32,
    /// Blocks per cluster in x, y, z.
    pub cluster: Option<[u32; 3]>,
    /// All blocks are resident at once and may synchronise grid-wide.
    pub cooperative: bool,
    /// Programmatic dependent launch: may start before its predecessor on the stream has finished. In an explicit
    /// graph the edge says this ([`EdgeKind::Programmatic`]), not the node.
    pub programmatic: bool,
}

impl LaunchConfig {
    /// A plain launch.
    #[must_use]
    pub const fn new(grid: [u32; 3], block: [u32; 3]) -> LaunchConfig {
        LaunchConfig { grid, block, shared_bytes: 0, cluster: None, cooperative: false, programmatic: false }
    }
}

/// How one node waits for another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EdgeKind {
    /// Starts when the other has finished.
    Full,
    /// Kernel to kernel: may start early and waits inside the kernel (programmatic dependent launch).
    Programmatic,
}

/// A dependency of a node that is being added.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Dependency {
    /// The node waited for.
    pub on: NodeHandle,
    /// How.
    pub kind: EdgeKind,
}

/// An edge of a finished graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Edge {
    /// The node waited for.
    pub from: NodeHandle,
    /// The node that waits.
    pub to: NodeHandle,
    /// How.
    pub kind: EdgeKind,
}

/// What a node does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum NodeKind {
    /// Launches a kernel.
    Kernel,
    /// Copies memory.
    Memcpy,
    /// Fills memory.
    Memset,
    /// Calls a host function.
    Host,
    /// Runs another graph.
    Child,
    /// Does nothing but order.
    Empty,
    /// Waits for an event.
    EventWait,
    /// Records an event.
    EventRecord,
    /// Allocates stream-ordered memory.
    MemAlloc,
    /// Frees stream-ordered memory.
    MemFree,
    /// Anything newer than this list.
    Other,
}

/// One end of a copy node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CopyEnd {
    /// Device memory.
    Device(DevicePtr),
    /// Pinned host memory that outlives every execution of the graph.
    Host(HostPtr),
}

/// Live objects of a simulated device: what a leak test compares before and after.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Census {
    /// Contexts (a retained primary context counts once).
    pub contexts: usize,
    /// Device allocations, stream-ordered and managed ones included.
    pub allocations: usize,
    /// Their bytes.
    pub bytes: u64,
    /// Pinned host allocations.
    pub host_allocations: usize,
    /// Their bytes.
    pub host_bytes: u64,
    /// Streams, without the legacy one.
    pub streams: usize,
    /// Events.
    pub events: usize,
    /// Modules.
    pub modules: usize,
    /// Graphs that can be edited.
    pub graphs: usize,
    /// Instantiated graphs.
    pub execs: usize,
}

/// A function the driver calls on a thread of its own. It must not call the driver and must not panic.
pub type RawHostFn = extern "C" fn(*mut c_void);

/// A CUDA driver, real or simulated. Each method is one driver call of the same name; see the module docs for the
/// contract.
pub trait Api: Send + Sync {
    /// `cuda` or `sim`.
    fn backend(&self) -> &'static str;
    /// The library file the driver was loaded from, where that is known.
    fn library_path(&self) -> Option<PathBuf> {
        None
    }
    /// Live objects, on the simulated device; the real driver cannot say.
    fn census(&self) -> Option<Census> {
        None
    }
    /// Free-form reports of the simulated device since the last call: unordered launches that touch the same bytes,
    /// use after free, guard zones overwritten. Empty on a real one.
    fn take_reports(&self) -> Vec<String> {
        Vec::new()
    }
    /// A number that changes while device work is being done inside a call, as on the simulated device. 0 on a real one,
    /// whose calls do not work.
    fn n_done(&self) -> u64 {
        0
    }

    /// `cuDriverGetVersion`: 13000 for CUDA 13.0.
    fn driver_version(&self) -> RawResult<u32>;
    /// `cuDeviceGetCount`.
    fn device_count(&self) -> RawResult<u32>;
    /// Name, attributes and identity of a device.
    fn device_info(&self, ordinal: u32) -> RawResult<DeviceInfo>;

    /// `cuDevicePrimaryCtxRetain`, made current on the calling thread.
    fn primary_ctx_retain(&self, ordinal: u32) -> RawResult<CtxHandle>;
    /// `cuDevicePrimaryCtxRelease`.
    fn primary_ctx_release(&self, ordinal: u32) -> RawResult<()>;
    /// `cuCtxCreate`, made current on the calling thread.
    fn ctx_create(&self, ordinal: u32) -> RawResult<CtxHandle>;
    /// `cuCtxDestroy`.
    fn ctx_destroy(&self, ctx: CtxHandle) -> RawResult<()>;
    /// `cuCtxSetCurrent` for the calling thread; `None` detaches it.
    fn ctx_set_current(&self, ctx: Option<CtxHandle>) -> RawResult<()>;
    /// `cuCtxSynchronize`: waits for everything of the current context, and kills every capture in it.
    fn ctx_synchronize(&self) -> RawResult<()>;

    /// `cuMemGetInfo`: free and total bytes.
    fn mem_info(&self) -> RawResult<(u64, u64)>;
    /// `cuMemAlloc`. At least 256-byte aligned; `bytes` of 0 is `INVALID_VALUE`.
    fn alloc(&self, bytes: u64) -> RawResult<DevicePtr>;
    /// `cuMemFree`.
    fn free(&self, ptr: DevicePtr) -> RawResult<()>;
    /// `cuMemAllocHost`: pinned, and visible to the device at [`HostPtr::device`].
    fn alloc_host(&self, bytes: u64) -> RawResult<HostPtr>;
    /// `cuMemFreeHost`.
    fn free_host(&self, ptr: HostPtr) -> RawResult<()>;
    /// `cuMemAllocManaged` (global attachment); freed with [`Api::free`].
    fn alloc_managed(&self, bytes: u64) -> RawResult<DevicePtr>;
    /// `cuMemAllocAsync` from the default pool. On a capturing stream it becomes a memory node.
    fn alloc_async(&self, bytes: u64, stream: StreamHandle) -> RawResult<DevicePtr>;
    /// `cuMemFreeAsync`.
    fn free_async(&self, ptr: DevicePtr, stream: StreamHandle) -> RawResult<()>;

    /// `cuMemcpyHtoD`: synchronous, on the legacy stream.
    fn memcpy_htod(&self, dst: DevicePtr, src: &[u8]) -> RawResult<()>;
    /// `cuMemcpyDtoH`: synchronous, on the legacy stream.
    fn memcpy_dtoh(&self, dst: &mut [u8], src: DevicePtr) -> RawResult<()>;
    /// `cuMemcpyHtoDAsync`.
    ///
    /// # Safety
    /// `src..src + bytes` stays readable and unwritten until the copy has run (in a capture: until the last replay).
    unsafe fn memcpy_htod_async(
        &self,
        dst: DevicePtr,
        src: HostPtr,
        bytes: u64,
        stream: StreamHandle,
    ) -> RawResult<()>;
    /// `cuMemcpyDtoHAsync`.
    ///
    /// # Safety
    /// `dst..dst + bytes` stays writable and otherwise unused until the copy has run (in a capture: until the last
    /// replay).
    unsafe fn memcpy_dtoh_async(
        &self,
        dst: HostPtr,
        src: DevicePtr,
        bytes: u64,
        stream: StreamHandle,
    ) -> RawResult<()>;
    /// `cuMemcpyDtoDAsync`.
    fn memcpy_dtod_async(
        &self,
        dst: DevicePtr,
        src: DevicePtr,
        bytes: u64,
        stream: StreamHandle,
    ) -> RawResult<()>;
    /// `cuMemsetD8Async`.
    fn memset_async(&self, dst: DevicePtr, byte: u8, bytes: u64, stream: StreamHandle) -> RawResult<()>;

    /// `cuStreamCreate`.
    fn stream_create(&self, kind: StreamKind) -> RawResult<StreamHandle>;
    /// `cuStreamDestroy`.
    fn stream_destroy(&self, stream: StreamHandle) -> RawResult<()>;
    /// `cuStreamSynchronize`.
    fn stream_synchronize(&self, stream: StreamHandle) -> RawResult<()>;
    /// `cuStreamQuery`: `Err(NOT_READY)` while work is left.
    fn stream_query(&self, stream: StreamHandle) -> RawResult<()>;
    /// `cuStreamWaitEvent`.
    fn stream_wait_event(&self, stream: StreamHandle, event: EventHandle) -> RawResult<()>;
    /// `cuStreamBeginCapture`.
    fn stream_begin_capture(&self, stream: StreamHandle, mode: CaptureMode) -> RawResult<()>;
    /// `cuStreamEndCapture`. On an error no graph exists and the stream is no longer being captured.
    fn stream_end_capture(&self, stream: StreamHandle) -> RawResult<GraphHandle>;
    /// `cuStreamIsCapturing`.
    fn stream_is_capturing(&self, stream: StreamHandle) -> RawResult<CaptureStatus>;
    /// `cuStreamGetCaptureInfo`: the status, and the id of the capture while it is active.
    fn stream_capture_info(&self, stream: StreamHandle) -> RawResult<(CaptureStatus, Option<u64>)>;
    /// `cuLaunchHostFunc`.
    ///
    /// # Safety
    /// `f(user)` may be called from any thread, once per execution, until the last one has run.
    unsafe fn launch_host_func(&self, stream: StreamHandle, f: RawHostFn, user: *mut c_void)
    -> RawResult<()>;

    /// `cuEventCreate`; without timing when `timing` is false.
    fn event_create(&self, timing: bool) -> RawResult<EventHandle>;
    /// `cuEventDestroy`.
    fn event_destroy(&self, event: EventHandle) -> RawResult<()>;
    /// `cuEventRecord`.
    fn event_record(&self, event: EventHandle, stream: StreamHandle) -> RawResult<()>;
    /// `cuEventQuery`: `Err(NOT_READY)` while the work before it is not done. One never recorded is done.
    fn event_query(&self, event: EventHandle) -> RawResult<()>;
    /// `cuEventSynchronize`.
    fn event_synchronize(&self, event: EventHandle) -> RawResult<()>;
    /// `cuEventElapsedTime` in milliseconds.
    fn event_elapsed(&self, start: EventHandle, end: EventHandle) -> RawResult<f32>;

    /// `cuModuleLoadData` of a cubin, fatbin or PTX text (without a closing zero). The simulated device reads the
    /// `.entry` names of PTX text, or a text whose first line is `sim` and whose further lines are kernel names.
    fn module_load(&self, image: &[u8]) -> RawResult<ModuleHandle>;
    /// `cuModuleUnload`.
    fn module_unload(&self, module: ModuleHandle) -> RawResult<()>;
    /// `cuModuleGetFunction`: `NOT_FOUND` for a name the module has not (on the simulated device also one that has
    /// no registered twin).
    fn module_function(&self, module: ModuleHandle, name: &str) -> RawResult<FunctionHandle>;
    /// `cuFuncGetParamInfo` for every parameter, in order.
    fn function_params(&self, function: FunctionHandle) -> RawResult<Vec<ParamInfo>>;
    /// `cuFuncGetAttribute`.
    fn function_attribute(&self, function: FunctionHandle, attribute: FunctionAttribute) -> RawResult<i32>;
    /// `cuFuncSetAttribute`.
    fn function_set_attribute(
        &self,
        function: FunctionHandle,
        attribute: FunctionAttribute,
        value: i32,
    ) -> RawResult<()>;
    /// `cuOccupancyMaxActiveBlocksPerMultiprocessor`.
    fn occupancy(&self, function: FunctionHandle, block_threads: u32, shared_bytes: u32) -> RawResult<u32>;
    /// `cuLaunchKernelEx` with the parameters packed as [`Api::function_params`] says.
    fn launch(
        &self,
        function: FunctionHandle,
        config: &LaunchConfig,
        stream: StreamHandle,
        params: &[u8],
    ) -> RawResult<()>;

    /// `cuGraphCreate`.
    fn graph_create(&self) -> RawResult<GraphHandle>;
    /// `cuGraphDestroy`.
    fn graph_destroy(&self, graph: GraphHandle) -> RawResult<()>;
    /// `cuGraphAddKernelNode`; the parameter bytes are copied.
    fn graph_add_kernel(
        &self,
        graph: GraphHandle,
        deps: &[Dependency],
        function: FunctionHandle,
        config: &LaunchConfig,
        params: &[u8],
    ) -> RawResult<NodeHandle>;
    /// `cuGraphAddMemcpyNode`, one-dimensional.
    ///
    /// # Safety
    /// A host end is pinned memory of at least `bytes` that outlives every execution of the graph.
    unsafe fn graph_add_memcpy(
        &self,
        graph: GraphHandle,
        deps: &[Dependency],
        dst: CopyEnd,
        src: CopyEnd,
        bytes: u64,
    ) -> RawResult<NodeHandle>;
    /// `cuGraphAddMemsetNode`, bytes.
    fn graph_add_memset(
        &self,
        graph: GraphHandle,
        deps: &[Dependency],
        dst: DevicePtr,
        byte: u8,
        bytes: u64,
    ) -> RawResult<NodeHandle>;
    /// `cuGraphAddChildGraphNode`; the child is cloned and can be destroyed afterwards.
    fn graph_add_child(
        &self,
        graph: GraphHandle,
        deps: &[Dependency],
        child: GraphHandle,
    ) -> RawResult<NodeHandle>;
    /// `cuGraphAddEmptyNode`.
    fn graph_add_empty(&self, graph: GraphHandle, deps: &[Dependency]) -> RawResult<NodeHandle>;
    /// `cuGraphAddHostNode`.
    ///
    /// # Safety
    /// As for [`Api::launch_host_func`], for every execution of the graph.
    unsafe fn graph_add_host(
        &self,
        graph: GraphHandle,
        deps: &[Dependency],
        f: RawHostFn,
        user: *mut c_void,
    ) -> RawResult<NodeHandle>;
    /// `cuGraphGetNodes` with each node's type, in an order that the driver chooses.
    fn graph_nodes(&self, graph: GraphHandle) -> RawResult<Vec<(NodeHandle, NodeKind)>>;
    /// `cuGraphGetEdges`.
    fn graph_edges(&self, graph: GraphHandle) -> RawResult<Vec<Edge>>;
    /// `cuGraphChildGraphNodeGetGraph`: borrowed from the parent, not to be destroyed.
    fn graph_child(&self, node: NodeHandle) -> RawResult<GraphHandle>;
    /// `cuGraphInstantiate`. The graph can be destroyed afterwards.
    fn graph_instantiate(&self, graph: GraphHandle) -> RawResult<ExecHandle>;
    /// `cuGraphExecDestroy`.
    fn exec_destroy(&self, exec: ExecHandle) -> RawResult<()>;
    /// `cuGraphUpload`: moves what the graph needs to the device ahead of the first launch.
    fn exec_upload(&self, exec: ExecHandle, stream: StreamHandle) -> RawResult<()>;
    /// `cuGraphLaunch`.
    fn exec_launch(&self, exec: ExecHandle, stream: StreamHandle) -> RawResult<()>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_code_has_the_name_the_truth_table_uses_and_back() {
        for name in
            ["STREAM_CAPTURE_UNSUPPORTED", "CAPTURED_EVENT", "ILLEGAL_STATE", "STREAM_CAPTURE_WRONG_THREAD"]
        {
            assert_eq!(Code::from_name(name).map(Code::name), Some(name));
        }
        assert_eq!(
            Code::STREAM_CAPTURE_INVALIDATED.to_string(),
            "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED (901)"
        );
        assert_eq!(Code(12345).to_string(), "driver error 12345");
    }

    #[test]
    fn only_faults_that_end_a_context_are_sticky() {
        assert!(Code::ILLEGAL_ADDRESS.is_sticky() && Code::LAUNCH_FAILED.is_sticky());
        assert!(!Code::STREAM_CAPTURE_INVALIDATED.is_sticky() && !Code::OUT_OF_MEMORY.is_sticky());
    }
}
// api: complete
