//! Every failure of this crate, with fields to match on.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::api::Code;

/// Any failure of this crate.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DriverError {
    /// This machine has no driver library.
    #[error("no CUDA driver: {library} was not found")]
    LibraryMissing {
        /// The file searched for.
        library: &'static str,
    },
    /// The driver is too old: it lacks a function that this crate calls.
    #[error("the CUDA driver lacks {symbol}, which needs CUDA {since}")]
    SymbolMissing {
        /// The missing function.
        symbol: &'static str,
        /// The CUDA version that introduced it.
        since: &'static str,
    },
    /// The driver is present but finds no GPU.
    #[error("the CUDA driver is loaded, but it reports no device ({code})")]
    NoDevice {
        /// The driver's code.
        code: Code,
    },
    /// There is no device with this ordinal.
    #[error("there is no device {ordinal}: the driver reports {}, numbered from 0", Count(*.count as u64, "device"))]
    NoSuchDevice {
        /// The requested ordinal.
        ordinal: u32,
        /// Number of devices.
        count: u32,
    },
    /// A driver call failed; the context survives.
    #[error("{call} failed: {code}{}", OriginSuffix(.origin))]
    Driver {
        /// The call.
        call: &'static str,
        /// The driver's code.
        code: Code,
        /// The last work sent before the call.
        origin: Option<WorkOrigin>,
    },
    /// The device (or the host, for pinned memory) has too little free memory.
    #[error("{what} needs {}, {free_bytes} of {total_bytes} are free on the device", Count(*.need_bytes, "byte"))]
    OutOfMemory {
        /// Purpose of the memory.
        what: String,
        /// Requested bytes.
        need_bytes: u64,
        /// Bytes free at the time.
        free_bytes: u64,
        /// Total memory of the device in bytes.
        total_bytes: u64,
    },
    /// The call would break the recording in progress and was not made.
    #[error("{what}{} was refused: this device is being recorded on", ByteSuffix(*.bytes))]
    CaptureIncompatible {
        /// The refused call.
        what: &'static str,
        /// Bytes that it concerned; 0 if not applicable.
        bytes: u64,
    },
    /// A recording exceeded its time limit and was aborted.
    #[error("recording {name:?} was aborted after {limit:?} with {} enqueued{}", Count(*.n_enqueued as u64, "call"), OriginSuffix(.last))]
    RecordingDeadline {
        /// The recording.
        name: String,
        /// Its time limit.
        limit: Duration,
        /// Calls that it had enqueued.
        n_enqueued: usize,
        /// The last call that it enqueued.
        last: Option<WorkOrigin>,
    },
    /// The caller's code panicked inside this crate. Nothing is left half done.
    #[error("{what} panicked: {message}")]
    Panicked {
        /// What was running.
        what: String,
        /// The panic's message.
        message: String,
    },
    /// The recording allocated stream-ordered memory. Such a graph would own memory outside the plan.
    #[error("recording {name:?} contains {}; all memory must be planned before recording", Count(*.n_nodes as u64, "memory node"))]
    MemoryNodes {
        /// The recording.
        name: String,
        /// Number of allocation and free nodes.
        n_nodes: usize,
    },
    /// The recording enqueued nothing.
    #[error("recording {name:?} enqueued nothing")]
    EmptyRecording {
        /// The recording.
        name: String,
    },
    /// No launch of the loop's body gets its condition, so the loop would never end.
    #[error("recording {name:?} is a loop, but none of its launches takes the condition: it would never end")]
    LoopWithoutEnd {
        /// The recording.
        name: String,
    },
    /// The driver captured a different number of nodes than the recording enqueued.
    #[error("recording {name:?} enqueued {}, but the driver captured {}", Count(*.n_enqueued as u64, "call"), Count(*.n_captured as u64, "node"))]
    CapturedNodeCount {
        /// The recording.
        name: String,
        /// Calls enqueued.
        n_enqueued: usize,
        /// Nodes in the driver's graph.
        n_captured: usize,
    },
    /// A handle belongs to a different memory than the one in use.
    #[error("{what} belongs to memory {given}, not to memory {expected} ({name:?})")]
    ForeignMemory {
        /// The rejected argument.
        what: &'static str,
        /// Id of its memory.
        given: u32,
        /// Id of the memory in use.
        expected: u32,
        /// Name of the memory in use.
        name: String,
    },
    /// An argument belongs to a different device.
    #[error("{what} belongs to another device")]
    ForeignDevice {
        /// The rejected argument.
        what: &'static str,
    },
    /// A range exceeds its container.
    #[error("bytes {offset}..{} are outside {what}, which has {}", .offset.saturating_add(*.len), Count(*.bytes, "byte"))]
    OutOfRange {
        /// The container: a buffer, a region, a slot.
        what: String,
        /// Start of the range.
        offset: u64,
        /// Length of the range.
        len: u64,
        /// Size of the container.
        bytes: u64,
    },
    /// Two lengths that must be equal differ.
    #[error("{what}: {} expected, {given} given", Count(*.expected, "byte"))]
    SizeMismatch {
        /// The operation.
        what: String,
        /// The required length.
        expected: u64,
        /// The actual length.
        given: u64,
    },
    /// The memory's only lease is in use.
    #[error("the lease of memory {name:?} is already taken")]
    LeaseTaken {
        /// The memory.
        name: String,
    },
    /// The memory is still in use by another stream.
    #[error("memory {name:?} is still in use by another stream; wait for that stream first")]
    LeaseBusy {
        /// The memory.
        name: String,
    },
    /// A result was overwritten before the host read it: more steps were launched than the ring has entries.
    #[error("ring entry {expected} was overwritten by entry {found}")]
    RingOverrun {
        /// The expected entry.
        expected: u64,
        /// The entry found.
        found: u64,
    },
    /// A launch has a different number of arguments than the kernel has parameters.
    #[error("kernel {kernel:?} takes {}, got {given}{}", Count(*.expected as u64, "parameter"), StepSuffix(.step))]
    ParamCount {
        /// The kernel.
        kernel: String,
        /// The step.
        step: String,
        /// Parameters of the compiled kernel.
        expected: usize,
        /// Arguments of the launch.
        given: usize,
    },
    /// An argument has a different size than the kernel's parameter.
    #[error("parameter {index} of kernel {kernel:?} has {}, got {given}{}", Count(*.expected as u64, "byte"), StepSuffix(.step))]
    ParamSize {
        /// The kernel.
        kernel: String,
        /// The step.
        step: String,
        /// Index of the parameter, from 0.
        index: usize,
        /// Its size in the compiled kernel.
        expected: usize,
        /// The argument's size.
        given: usize,
    },
    /// A launch exceeds a limit of the kernel or the device.
    #[error("kernel {kernel:?} cannot be launched with {what} {given}; the limit is {limit}{}", StepSuffix(.step))]
    LaunchShape {
        /// The kernel.
        kernel: String,
        /// The step.
        step: String,
        /// The quantity.
        what: &'static str,
        /// The requested value.
        given: u64,
        /// The limit.
        limit: u64,
    },
    /// A module cannot be loaded.
    #[error("module {module:?} cannot be loaded: {code}")]
    ModuleLoad {
        /// The module.
        module: String,
        /// The driver's code.
        code: Code,
    },
    /// A module has no kernel of this name.
    #[error("module {module:?} has no kernel {kernel:?}")]
    KernelMissing {
        /// The module.
        module: String,
        /// The kernel.
        kernel: String,
    },
    /// Device work did not finish in time. It may still finish.
    #[error("{what} was still pending after {waited:?}{}", OriginSuffix(.origin))]
    Timeout {
        /// The operation waited for.
        what: &'static str,
        /// Time waited.
        waited: Duration,
        /// The last work sent.
        origin: Option<WorkOrigin>,
    },
    /// The device thread did not reply in time: it is stuck in a driver call, or its work takes too long.
    #[error("the device thread did not reply to {what:?} within {waited:?}; it is busy with {busy:?}{}", OriginSuffix(.origin))]
    NoAnswer {
        /// The request.
        what: &'static str,
        /// Time waited; zero if the thread was already known to be stuck.
        waited: Duration,
        /// The request that it is working on.
        busy: String,
        /// The last work sent to the driver.
        origin: Option<WorkOrigin>,
    },
    /// The device thread has ended.
    #[error("the device thread has ended and did not run {what:?}")]
    WorkerGone {
        /// The request.
        what: &'static str,
    },
    /// Another thread owns this device.
    #[error("another thread owns the device; send it work instead")]
    DeviceOwned,
    /// A stream is stuck in an unrecoverable state; its context is healthy.
    #[error("the stream is lost ({code}); its context is healthy")]
    StreamLost {
        /// The driver's code for the stream.
        code: Code,
    },
    /// The context is lost. This is final in the process: nothing is sent to the driver any more.
    #[error("{0}")]
    ContextLost(Arc<Lost>),
    /// An error of the caller's enqueueing code, passed through.
    #[error("enqueueing failed: {0}")]
    Caller(#[source] Arc<dyn std::error::Error + Send + Sync>),
}

/// The circumstances of a lost context.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lost {
    /// The driver's code; `None` if the call did not return.
    pub code: Option<Code>,
    /// The call that reported the loss.
    pub call: &'static str,
    /// The last step and kernel sent.
    pub origin: Option<WorkOrigin>,
}

impl fmt::Display for Lost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.code {
            Some(code) => write!(f, "the device context is lost: {} returned {code}", self.call)?,
            None => write!(f, "the device context is lost: {} did not return", self.call)?,
        }
        write!(f, "{}", OriginSuffix(&self.origin))
    }
}

/// Identifies a piece of work: a launch in a step, or a replay of a graph.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkOrigin {
    /// The step, or the graph's name for a replay.
    pub step: Arc<str>,
    /// The kernel or call; for a replay, the graph's last kernel.
    pub kernel: Arc<str>,
    /// Number of the replay, from 1.
    pub replay: Option<u64>,
}

impl fmt::Display for WorkOrigin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.replay {
            Some(n) => {
                write!(f, "replay {n} of graph {:?} (ends in kernel {:?})", &*self.step, &*self.kernel)
            }
            None if self.step.is_empty() => write!(f, "kernel {:?}", &*self.kernel),
            None => write!(f, "kernel {:?} of step {:?}", &*self.kernel, &*self.step),
        }
    }
}

struct OriginSuffix<'a>(&'a Option<WorkOrigin>);

impl fmt::Display for OriginSuffix<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.as_ref().map_or(Ok(()), |o| write!(f, "; sent last: {o}"))
    }
}

/// A number with its noun in the right number: "1 byte", "2 bytes".
struct Count(u64, &'static str);

impl fmt::Display for Count {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}{}", self.0, self.1, if self.0 == 1 { "" } else { "s" })
    }
}

struct ByteSuffix(u64);

impl fmt::Display for ByteSuffix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 == 0 { Ok(()) } else { write!(f, " ({})", Count(self.0, "byte")) }
    }
}

struct StepSuffix<'a>(&'a String);

impl fmt::Display for StepSuffix<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() { Ok(()) } else { write!(f, " (step {:?})", self.0) }
    }
}

impl DriverError {
    /// Wraps an error of the caller, so that it can pass through [`crate::Stream::record`].
    pub fn caller(error: impl std::error::Error + Send + Sync + 'static) -> DriverError {
        DriverError::Caller(Arc::new(error))
    }

    /// Suggests an action, if there is one.
    #[must_use]
    pub fn hint(&self) -> Option<&'static str> {
        Some(match self {
            DriverError::LibraryMissing { .. } => {
                "install the NVIDIA driver and check it with `nvidia-smi`, or use the CPU or the simulated device"
            }
            DriverError::SymbolMissing { .. } => "update the NVIDIA driver; `nvidia-smi` shows its version",
            DriverError::NoDevice { .. } => {
                "check `nvidia-smi` and CUDA_VISIBLE_DEVICES; a container must be started with GPU access"
            }
            DriverError::NoSuchDevice { .. } => "`nvidia-smi -L` lists the devices",
            DriverError::OutOfMemory { .. } => {
                "plan less memory (a shorter context, a smaller batch or a smaller model), or stop other programs that use the GPU"
            }
            DriverError::CaptureIncompatible { .. } => {
                "make the call before the recording begins or after it has ended; the recording itself continues"
            }
            DriverError::RecordingDeadline { .. } => {
                "nothing was replayed; check what the last call named here is waiting for"
            }
            DriverError::MemoryNodes { .. } | DriverError::CapturedNodeCount { .. } => {
                "give the library call an explicit workspace in planned memory"
            }
            DriverError::LoopWithoutEnd { .. } => {
                "add a launch built with `LaunchBuilder::condition`, which sets the condition to 0"
            }
            DriverError::ModuleLoad { code, .. } if matches!(code.0, 209 | 218 | 222) => {
                "the kernels were built for another GPU or a newer driver: rebuild them for this one"
            }
            DriverError::Timeout { .. } | DriverError::NoAnswer { .. } => {
                "if this persists, end the process: nothing inside it can unblock a driver call"
            }
            DriverError::DeviceOwned => "send the work to the worker that owns the device",
            DriverError::ContextLost(_) => {
                "start a new process, because a lost context cannot be recovered in this one; compute-sanitizer finds an invalid access"
            }
            _ => return None,
        })
    }

    /// The driver's code, if there is one.
    #[must_use]
    pub fn code(&self) -> Option<Code> {
        match self {
            DriverError::Driver { code, .. }
            | DriverError::ModuleLoad { code, .. }
            | DriverError::NoDevice { code }
            | DriverError::StreamLost { code } => Some(*code),
            DriverError::ContextLost(lost) => lost.code,
            _ => None,
        }
    }

    /// True when no later call on the device can succeed in this process.
    #[must_use]
    pub fn is_final(&self) -> bool {
        matches!(self, DriverError::ContextLost(_))
    }
}

/// Extracts the message of a caught panic.
pub(crate) fn panic_message(payload: &(dyn std::any::Any + Send)) -> String {
    payload
        .downcast_ref::<&str>()
        .map(|s| (*s).to_owned())
        .or_else(|| payload.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "no message".to_owned())
}
