//! The raw driver interface: one method per driver call, no policy.
//!
//! [`Api`] has two implementations: the real driver and the simulated device. Everything above is written once,
//! against this trait, and cannot tell them apart: both return the driver's own codes, and a call made while a
//! stream is being captured behaves as measured in `capture-truth.tsv`.
//!
//! # The contract of the trait
//!
//! Its methods are safe, because the caller takes on the obligation once, when it obtains the value from an
//! `unsafe` function ([`crate::raw_driver`], [`crate::sim::SimDriver::api`]). From then on it passes only handles
//! that this value returned and that are not destroyed, frees only its own allocations, and launches kernels only
//! with parameters that point to live memory. The simulated device checks handles and device memory itself and
//! returns the driver's codes. The few methods that take a host address for the driver to read or write *later* are
//! `unsafe` in addition.
//!
//! Context-dependent calls act on the context that is current on the calling thread ([`Api::ctx_set_current`]).

use std::ffi::c_void;
use std::fmt;
use std::path::PathBuf;

/// Result of a raw call; the error is the driver's code.
pub type RawResult<T> = Result<T, Code>;

/// A `CUresult` other than success.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Code(pub u32);

macro_rules! codes {
    ($($(#[$doc:meta])* $name:ident = $value:literal;)*) => {
        impl Code {
            $($(#[$doc])* pub const $name: Code = Code($value);)*

            /// The driver's name for the code without `CUDA_ERROR_`, or `UNNAMED` if this list does not have it.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self.0 {
                    0 => "SUCCESS",
                    $($value => stringify!($name),)*
                    _ => "UNNAMED",
                }
            }

            /// Looks up a code by name, as [`Code::name`] and `capture-truth.tsv` write it.
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
    /// A parameter is out of range.
    INVALID_VALUE = 1;
    /// The device (or the host, for pinned memory) has too little memory left.
    OUT_OF_MEMORY = 2;
    /// The driver was not initialised.
    NOT_INITIALIZED = 3;
    /// The driver is shutting down.
    DEINITIALIZED = 4;
    /// There is no CUDA device.
    NO_DEVICE = 100;
    /// This machine has no device with that ordinal.
    INVALID_DEVICE = 101;
    /// The device cannot load the module image.
    INVALID_IMAGE = 200;
    /// No context is current on the thread, or it has been destroyed.
    INVALID_CONTEXT = 201;
    /// The image holds no code for this device.
    NO_BINARY_FOR_GPU = 209;
    /// The PTX text does not compile.
    INVALID_PTX = 218;
    /// The driver does not know this PTX version.
    UNSUPPORTED_PTX_VERSION = 222;
    /// The handle does not name a live object.
    INVALID_HANDLE = 400;
    /// The resource is in the wrong state for the call (a second begin-capture, an end-capture without one).
    ILLEGAL_STATE = 401;
    /// The module has no symbol of that name.
    NOT_FOUND = 500;
    /// Not finished yet. The only code that is not an error.
    NOT_READY = 600;
    /// A kernel accessed an address outside its memory. Final for the context.
    ILLEGAL_ADDRESS = 700;
    /// The launch needs too many registers, threads or shared memory.
    LAUNCH_OUT_OF_RESOURCES = 701;
    /// A kernel exceeded the device's time limit.
    LAUNCH_TIMEOUT = 702;
    /// The context was destroyed.
    CONTEXT_IS_DESTROYED = 709;
    /// A device-side assertion failed. Final for the context.
    ASSERT = 710;
    /// Hardware stack error. Final for the context.
    HARDWARE_STACK_ERROR = 714;
    /// Illegal instruction. Final for the context.
    ILLEGAL_INSTRUCTION = 715;
    /// Misaligned access. Final for the context.
    MISALIGNED_ADDRESS = 716;
    /// An address outside the instruction's address space. Final for the context.
    INVALID_ADDRESS_SPACE = 717;
    /// The program counter left the code. Final for the context.
    INVALID_PC = 718;
    /// A kernel failed without a more specific code. Final for the context.
    LAUNCH_FAILED = 719;
    /// A cooperative launch has more blocks than can be resident at once.
    COOPERATIVE_LAUNCH_TOO_LARGE = 720;
    /// The operation is not permitted.
    NOT_PERMITTED = 800;
    /// The device or driver does not support the operation.
    NOT_SUPPORTED = 801;
    /// The call is not permitted during a capture; it invalidates the capture.
    STREAM_CAPTURE_UNSUPPORTED = 900;
    /// An earlier error invalidated the capture.
    STREAM_CAPTURE_INVALIDATED = 901;
    /// The call would merge two captures.
    STREAM_CAPTURE_MERGE = 902;
    /// The capture began on another stream.
    STREAM_CAPTURE_UNMATCHED = 903;
    /// A forked stream was not joined before the capture ended.
    STREAM_CAPTURE_UNJOINED = 904;
    /// A dependency would cross the boundary of the capture.
    STREAM_CAPTURE_ISOLATION = 905;
    /// The call would make the legacy stream depend on a capturing blocking stream.
    STREAM_CAPTURE_IMPLICIT = 906;
    /// The event was last recorded in a capture and cannot be queried or waited for.
    CAPTURED_EVENT = 907;
    /// Another thread began the capture.
    STREAM_CAPTURE_WRONG_THREAD = 908;
    /// The driver timed out.
    TIMEOUT = 909;
    /// Unknown error.
    UNKNOWN = 999;
}

impl Code {
    /// True for faults after which the context, and with it the process, can do no more device work.
    #[must_use]
    pub const fn is_sticky(self) -> bool {
        matches!(self.0, 214 | 700 | 702 | 709 | 710 | 714..=719 | 4)
    }

    /// True for the 900 family: the call conflicts with a stream capture.
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
    /// A graph of nodes and edges, not yet instantiated.
    GraphHandle;
    /// A node of a graph.
    NodeHandle;
    /// An instantiated graph.
    ExecHandle;
    /// The condition of a loop, as a kernel receives it. Never 0.
    ConditionHandle;
    /// A device address. Pinned host memory has one too, equal to its host address.
    DevicePtr;
    /// A host address, kept as a number so that it is `Send`.
    HostPtr;
}

impl StreamHandle {
    /// The legacy default stream, which synchronises with every blocking stream.
    pub const LEGACY: StreamHandle = StreamHandle(1);
}

impl DevicePtr {
    /// Returns the address `bytes` later.
    #[must_use]
    pub const fn add(self, bytes: u64) -> DevicePtr {
        DevicePtr(self.0.wrapping_add(bytes))
    }
}

impl HostPtr {
    /// Returns the address as a pointer. Dereferencing it is the caller's responsibility.
    #[must_use]
    pub const fn as_ptr(self) -> *mut u8 {
        self.0 as *mut u8
    }

    /// Converts a pointer.
    #[must_use]
    pub fn of<T>(p: *const T) -> HostPtr {
        HostPtr(p as u64)
    }

    /// Returns the address as the device sees it; for pinned memory only.
    #[must_use]
    pub const fn device(self) -> DevicePtr {
        DevicePtr(self.0)
    }
}

/// Properties of one device.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct DeviceInfo {
    /// Name.
    pub name: String,
    /// Compute capability, `(9, 0)` for an H200.
    pub compute: (u32, u32),
    /// Number of SMs.
    pub n_sms: u32,
    /// Total device memory in bytes.
    pub total_bytes: u64,
    /// L2 cache in bytes.
    pub l2_bytes: u64,
    /// Maximum shared memory per block in bytes, once the function attribute has been raised.
    pub shared_block_bytes: u32,
    /// Shared memory per SM in bytes.
    pub shared_sm_bytes: u32,
    /// Maximum threads per block.
    pub max_block_threads: u32,
    /// Memory bus width in bits; 0 if the driver does not report it.
    pub bus_bits: u32,
    /// Memory clock in kHz; 0 if the driver does not report it.
    pub memory_khz: u32,
    /// Maximum SM clock in kHz; 0 if the driver does not report it.
    pub clock_khz: u32,
    /// `domain:bus:device.function`.
    pub pci: String,
    /// UUID.
    pub uuid: [u8; 16],
    /// True for an integrated device, which shares the host's memory and has none of its own.
    pub unified: bool,
}

impl DeviceInfo {
    /// Theoretical memory bandwidth in bytes per second, from clock and bus width; `None` if either is unknown.
    #[must_use]
    pub fn peak_bytes_per_second(&self) -> Option<f64> {
        // DDR: two transfers per clock.
        let peak = f64::from(self.memory_khz) * 1e3 * 2.0 * f64::from(self.bus_bits) / 8.0;
        (peak > 0.0).then_some(peak)
    }

    /// Creates a description with everything but the name unknown, for an implementation to fill in.
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
    /// Independent of the legacy stream. The only kind that the safe layer creates.
    NonBlocking,
}

/// Whose unsafe calls the driver refuses during a capture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CaptureMode {
    /// Those of every thread.
    Global,
    /// Those of the capturing thread only.
    ThreadLocal,
    /// Nobody's.
    Relaxed,
}

/// Whether a stream is being captured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CaptureStatus {
    /// Not capturing.
    None,
    /// Capturing.
    Active,
    /// The capture was invalidated and has not been ended yet.
    Invalidated,
}

/// Location of a kernel parameter within the packed parameter bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParamInfo {
    /// Byte offset.
    pub offset: usize,
    /// Byte size.
    pub size: usize,
}

/// A function attribute; some are settable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FunctionAttribute {
    /// Maximum threads per block of this function.
    MaxThreadsPerBlock,
    /// Static shared memory in bytes.
    StaticSharedBytes,
    /// Local memory per thread in bytes.
    LocalBytes,
    /// Registers per thread.
    Registers,
    /// Compute capability that the code was compiled for, times ten.
    BinaryVersion,
    /// Maximum dynamic shared memory of a launch in bytes (settable).
    MaxDynamicSharedBytes,
    /// Preferred share of the L1 to use as shared memory, in percent (settable).
    PreferredSharedCarveout,
    /// Whether clusters of more than eight blocks are allowed (settable).
    NonPortableClusterSize,
}

/// Configuration of a kernel launch.
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
    /// All blocks are resident at once, so the kernel may synchronise its grid.
    pub cooperative: bool,
    /// Programmatic dependent launch: the kernel may start before its predecessor on the stream has finished. In an
    /// explicit graph this is a property of the edge ([`EdgeKind::Programmatic`]), not of the node.
    pub programmatic: bool,
}

impl LaunchConfig {
    /// Creates a plain launch.
    #[must_use]
    pub const fn new(grid: [u32; 3], block: [u32; 3]) -> LaunchConfig {
        LaunchConfig { grid, block, shared_bytes: 0, cluster: None, cooperative: false, programmatic: false }
    }
}

/// How a node waits for another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EdgeKind {
    /// The node starts when the other one has finished.
    Full,
    /// Kernel to kernel: the node may start early and waits inside the kernel (programmatic dependent launch).
    Programmatic,
}

/// A dependency of a node about to be added.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Dependency {
    /// The node to wait for.
    pub on: NodeHandle,
    /// Kind of edge.
    pub kind: EdgeKind,
}

/// An edge of a finished graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Edge {
    /// The node to wait for.
    pub from: NodeHandle,
    /// The dependent node.
    pub to: NodeHandle,
    /// Kind of edge.
    pub kind: EdgeKind,
}

/// Kind of a node.
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
    /// Only orders other nodes.
    Empty,
    /// Waits for an event.
    EventWait,
    /// Records an event.
    EventRecord,
    /// Allocates stream-ordered memory.
    MemAlloc,
    /// Frees stream-ordered memory.
    MemFree,
    /// Repeats a graph of its own while a condition holds.
    Loop,
    /// A kind newer than this list.
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

/// Counts of live objects on a simulated device, for leak tests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Census {
    /// Contexts (a retained primary context counts once).
    pub contexts: usize,
    /// Device allocations, stream-ordered and managed ones included.
    pub allocations: usize,
    /// Bytes in them.
    pub bytes: u64,
    /// Pinned host allocations.
    pub host_allocations: usize,
    /// Bytes in them.
    pub host_bytes: u64,
    /// Streams, without the legacy one.
    pub streams: usize,
    /// Events.
    pub events: usize,
    /// Modules.
    pub modules: usize,
    /// Graphs that are not instantiated.
    pub graphs: usize,
    /// Instantiated graphs.
    pub execs: usize,
}

/// A host function for the driver to call on a thread of its own. It must not call the driver and must not panic.
pub type RawHostFn = extern "C" fn(*mut c_void);

/// A CUDA driver, real or simulated. Each method is the driver call of the same name; the module documentation
/// states the contract.
pub trait Api: Send + Sync {
    /// `cuda` or `sim`.
    fn backend(&self) -> &'static str;
    /// The library file that the driver was loaded from, if known.
    fn library_path(&self) -> Option<PathBuf> {
        None
    }
    /// Counts live objects on the simulated device; `None` for a real driver.
    fn census(&self) -> Option<Census> {
        None
    }
    /// Takes the reports that the simulated device has written since the last call: unordered launches that touch
    /// the same bytes, use after free, overwritten guard zones. Always empty for a real driver.
    fn take_reports(&self) -> Vec<String> {
        Vec::new()
    }
    /// Units of device work done so far. The simulated device works inside its calls, so this shows that a long
    /// call makes progress. Always 0 for a real driver, whose device works on its own.
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
    /// `cuCtxSynchronize`: waits for all work of the current context and invalidates every capture in it.
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
    /// `src..src + bytes` stays readable and unmodified until the copy has run (in a capture: until the last
    /// replay).
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
    /// `dst..dst + bytes` stays writable, and nobody else uses it, until the copy has run (in a capture: until the
    /// last replay).
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
    /// `cuStreamQuery`: `Err(NOT_READY)` while work is pending.
    fn stream_query(&self, stream: StreamHandle) -> RawResult<()>;
    /// `cuStreamWaitEvent`.
    fn stream_wait_event(&self, stream: StreamHandle, event: EventHandle) -> RawResult<()>;
    /// `cuStreamBeginCapture`.
    fn stream_begin_capture(&self, stream: StreamHandle, mode: CaptureMode) -> RawResult<()>;
    /// `cuStreamEndCapture`. After an error there is no graph, and the stream is no longer capturing.
    fn stream_end_capture(&self, stream: StreamHandle) -> RawResult<GraphHandle>;
    /// `cuStreamIsCapturing`.
    fn stream_is_capturing(&self, stream: StreamHandle) -> RawResult<CaptureStatus>;
    /// `cuStreamGetCaptureInfo`: the status, and the capture's id while it is active.
    fn stream_capture_info(&self, stream: StreamHandle) -> RawResult<(CaptureStatus, Option<u64>)>;
    /// `cuLaunchHostFunc`.
    ///
    /// # Safety
    /// `f(user)` may be called from any thread, once per execution, until the last execution has ended.
    unsafe fn launch_host_func(&self, stream: StreamHandle, f: RawHostFn, user: *mut c_void)
    -> RawResult<()>;

    /// `cuEventCreate`, with or without timing.
    fn event_create(&self, timing: bool) -> RawResult<EventHandle>;
    /// `cuEventDestroy`.
    fn event_destroy(&self, event: EventHandle) -> RawResult<()>;
    /// `cuEventRecord`.
    fn event_record(&self, event: EventHandle, stream: StreamHandle) -> RawResult<()>;
    /// `cuEventQuery`: `Err(NOT_READY)` while the work before the event is pending. An event that was never
    /// recorded is done.
    fn event_query(&self, event: EventHandle) -> RawResult<()>;
    /// `cuEventSynchronize`.
    fn event_synchronize(&self, event: EventHandle) -> RawResult<()>;
    /// `cuEventElapsedTime` in milliseconds.
    fn event_elapsed(&self, start: EventHandle, end: EventHandle) -> RawResult<f32>;

    /// `cuModuleLoadData` of a cubin, a fatbin or PTX text (without terminating zero). The simulated device reads
    /// the `.entry` names of PTX text, the section names of a cubin, or a text whose first line is `sim` and whose
    /// other lines are kernel names.
    fn module_load(&self, image: &[u8]) -> RawResult<ModuleHandle>;
    /// `cuModuleUnload`.
    fn module_unload(&self, module: ModuleHandle) -> RawResult<()>;
    /// `cuModuleGetFunction`: `NOT_FOUND` if the module has no such kernel, or, on the simulated device, if no twin
    /// is registered for it.
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
    /// `cuLaunchKernelEx` with the parameters packed at the offsets of [`Api::function_params`].
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
    /// `cuGraphAddKernelNode`; copies the parameter bytes.
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
    /// A host end is at least `bytes` of pinned memory that outlives every execution of the graph.
    unsafe fn graph_add_memcpy(
        &self,
        graph: GraphHandle,
        deps: &[Dependency],
        dst: CopyEnd,
        src: CopyEnd,
        bytes: u64,
    ) -> RawResult<NodeHandle>;
    /// `cuGraphAddMemsetNode`, byte-wise.
    fn graph_add_memset(
        &self,
        graph: GraphHandle,
        deps: &[Dependency],
        dst: DevicePtr,
        byte: u8,
        bytes: u64,
    ) -> RawResult<NodeHandle>;
    /// `cuGraphAddChildGraphNode`; clones the child, which can then be destroyed.
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
    /// `cuGraphConditionalHandleCreate`: a condition for one loop of this graph. It gets the value `initial` at each
    /// launch of the graph; afterwards, kernels of the graph set it (`cudaGraphSetConditional`).
    fn graph_condition(&self, graph: GraphHandle, initial: u32) -> RawResult<ConditionHandle>;
    /// `cuGraphAddNode` with a conditional node of type WHILE: repeats its body while the condition is not 0. Returns
    /// the node and the body, which belongs to the node, is filled like any graph, and must not be destroyed.
    fn graph_add_loop(
        &self,
        graph: GraphHandle,
        deps: &[Dependency],
        condition: ConditionHandle,
    ) -> RawResult<(NodeHandle, GraphHandle)>;
    /// `cuGraphGetNodes` with the kind of each node, in an order of the driver's choosing.
    fn graph_nodes(&self, graph: GraphHandle) -> RawResult<Vec<(NodeHandle, NodeKind)>>;
    /// `cuGraphGetEdges`.
    fn graph_edges(&self, graph: GraphHandle) -> RawResult<Vec<Edge>>;
    /// `cuGraphChildGraphNodeGetGraph`: a borrow from the parent that must not be destroyed.
    fn graph_child(&self, node: NodeHandle) -> RawResult<GraphHandle>;
    /// `cuGraphInstantiate`; the graph can then be destroyed.
    fn graph_instantiate(&self, graph: GraphHandle) -> RawResult<ExecHandle>;
    /// `cuGraphExecDestroy`.
    fn exec_destroy(&self, exec: ExecHandle) -> RawResult<()>;
    /// `cuGraphUpload`: moves the graph to the device before the first launch.
    fn exec_upload(&self, exec: ExecHandle, stream: StreamHandle) -> RawResult<()>;
    /// `cuGraphLaunch`.
    fn exec_launch(&self, exec: ExecHandle, stream: StreamHandle) -> RawResult<()>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_convert_to_the_names_of_the_truth_table_and_back() {
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
    fn only_faults_that_lose_a_context_are_sticky() {
        assert!(Code::ILLEGAL_ADDRESS.is_sticky() && Code::LAUNCH_FAILED.is_sticky());
        assert!(!Code::STREAM_CAPTURE_INVALIDATED.is_sticky() && !Code::OUT_OF_MEMORY.is_sticky());
    }
}
// api: complete
