//! What can go wrong, in fields that a caller can match on.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::api::Code;

/// Any failure of this crate.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DriverError {
    /// The driver library is not on this machine.
    #[error("no CUDA driver: {library} was not found")]
    LibraryMissing {
        /// The file that was looked for.
        library: &'static str,
    },
    /// The driver is too old: it lacks a function this crate calls.
    #[error("the CUDA driver lacks {symbol}, which came with CUDA {since}")]
    SymbolMissing {
        /// The missing function.
        symbol: &'static str,
        /// The CUDA version that brought it.
        since: &'static str,
    },
    /// The driver is there, and it sees no card.
    #[error("the CUDA driver is loaded, but it reports no device ({code})")]
    NoDevice {
        /// What the driver answered.
        code: Code,
    },
    /// A card with this number does not exist.
    #[error("there is no device {ordinal}: the driver counts {count}, from 0")]
    NoSuchDevice {
        /// The number asked for.
        ordinal: u32,
        /// How many there are.
        count: u32,
    },
    /// A driver call failed; the context lives on.
    #[error("{call} failed: {code}{}", OriginSuffix(.origin))]
    Driver {
        /// The call.
        call: &'static str,
        /// What the driver answered.
        code: Code,
        /// The last work that was sent before the call.
        origin: Option<WorkOrigin>,
    },
    /// The device, or the host for pinned memory, has not enough memory.
    #[error("{what} needs {need_bytes} bytes, {free_bytes} of {total_bytes} are free on the device")]
    OutOfMemory {
        /// What the memory was for.
        what: String,
        /// ByteSuffix asked for.
        need_bytes: u64,
        /// ByteSuffix free when it failed.
        free_bytes: u64,
        /// ByteSuffix of the whole device.
        total_bytes: u64,
    },
    /// The call would break a recording that is under way, so it was not made.
    #[error("{what}{} was refused: a recording is under way on this device", ByteSuffix(*.bytes))]
    CaptureIncompatible {
        /// The refused call.
        what: &'static str,
        /// ByteSuffix it was about; 0 where that means nothing.
        bytes: u64,
    },
    /// A recording took too long and was broken off.
    #[error("recording {name:?} was broken off after {limit:?}, with {n_enqueued} calls enqueued{}", OriginSuffix(.last))]
    RecordingDeadline {
        /// The recording.
        name: String,
        /// Its time limit.
        limit: Duration,
        /// How much it had enqueued.
        n_enqueued: usize,
        /// The last thing it enqueued.
        last: Option<WorkOrigin>,
    },
    /// Code that this crate was asked to run panicked. Nothing is left half done.
    #[error("{what} panicked: {message}")]
    Panicked {
        /// What was running.
        what: String,
        /// The panic's message.
        message: String,
    },
    /// Something allocated stream-ordered memory in a recording; such a graph would own memory that nobody planned.
    #[error("recording {name:?} holds {n_nodes} memory nodes; memory is planned before recording")]
    MemoryNodes {
        /// The recording.
        name: String,
        /// Allocation and free nodes in it.
        n_nodes: usize,
    },
    /// The recording enqueued nothing.
    #[error("recording {name:?} enqueued nothing")]
    EmptyRecording {
        /// The recording.
        name: String,
    },
    /// The driver captured another number of nodes than this recording enqueued.
    #[error("recording {name:?} enqueued {n_enqueued} calls, but the driver captured {n_captured} nodes")]
    CapturedNodeCount {
        /// The recording.
        name: String,
        /// What was enqueued here.
        n_enqueued: usize,
        /// What the driver's graph holds.
        n_captured: usize,
    },
    /// A handle belongs to another memory than the one in use.
    #[error("{what} is of memory {given}, not of memory {expected} ({name:?})")]
    ForeignMemory {
        /// What was handed over.
        what: &'static str,
        /// Its memory.
        given: u32,
        /// The memory in use.
        expected: u32,
        /// Its name.
        name: String,
    },
    /// Two things of different devices were brought together.
    #[error("{what} belongs to another device")]
    ForeignDevice {
        /// What was handed over.
        what: &'static str,
    },
    /// A range reaches over the end of what it is in.
    #[error("bytes {offset}..{} are outside {what}, which has {bytes} bytes", .offset.saturating_add(*.len))]
    OutOfRange {
        /// The buffer, region or type.
        what: String,
        /// Start of the range.
        offset: u64,
        /// Its length.
        len: u64,
        /// What is there.
        bytes: u64,
    },
    /// Two lengths that must agree do not.
    #[error("{what}: {expected} bytes expected, {given} given")]
    SizeMismatch {
        /// What was compared.
        what: String,
        /// As it must be.
        expected: u64,
        /// As it is.
        given: u64,
    },
    /// The memory's one lease is in use.
    #[error("the lease of memory {name:?} is taken already")]
    LeaseTaken {
        /// The memory.
        name: String,
    },
    /// The memory is still in use by another stream.
    #[error("memory {name:?} is in use by another stream that was not waited for")]
    LeaseBusy {
        /// The memory.
        name: String,
    },
    /// A result was overwritten before it was taken: more steps were sent than the ring has entries.
    #[error("ring entry {expected} was overwritten by entry {found}")]
    RingOverrun {
        /// The entry that should be there.
        expected: u64,
        /// The entry that is.
        found: u64,
    },
    /// A launch has another number of arguments than the kernel has parameters.
    #[error("kernel {kernel:?} takes {expected} parameters, {given} were given{}", StepSuffix(.step))]
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
    /// An argument has another size than the kernel's parameter.
    #[error("parameter {index} of kernel {kernel:?} has {expected} bytes, {given} were given{}", StepSuffix(.step))]
    ParamSize {
        /// The kernel.
        kernel: String,
        /// The step.
        step: String,
        /// The parameter, from 0.
        index: usize,
        /// Its size in the compiled kernel.
        expected: usize,
        /// The argument's size.
        given: usize,
    },
    /// A launch asks for more than the kernel or the card allows.
    #[error("kernel {kernel:?} cannot be launched with {what} {given}; the limit is {limit}{}", StepSuffix(.step))]
    LaunchShape {
        /// The kernel.
        kernel: String,
        /// The step.
        step: String,
        /// The quantity.
        what: &'static str,
        /// As asked for.
        given: u64,
        /// As allowed.
        limit: u64,
    },
    /// A module does not load.
    #[error("module {module:?} does not load: {code}")]
    ModuleLoad {
        /// The module.
        module: String,
        /// What the driver answered.
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
    /// Work on the device did not finish in time. It may still finish.
    #[error("{what} was not done after {waited:?}{}", OriginSuffix(.origin))]
    Timeout {
        /// What was waited for.
        what: &'static str,
        /// How long.
        waited: Duration,
        /// The last work that was sent.
        origin: Option<WorkOrigin>,
    },
    /// The device thread did not answer in time: a driver call that does not return, or work that is too long.
    #[error("the device thread gave no answer to {what:?} in {waited:?}; it is busy with {busy:?}{}", OriginSuffix(.origin))]
    NoAnswer {
        /// The request.
        what: &'static str,
        /// How long was waited; zero when the thread was known to be stuck already.
        waited: Duration,
        /// The request it is working on.
        busy: String,
        /// The last work that was sent to the driver.
        origin: Option<WorkOrigin>,
    },
    /// The device thread has ended.
    #[error("the device thread has ended; {what:?} was not done")]
    WorkerGone {
        /// The request.
        what: &'static str,
    },
    /// Another thread owns the device.
    #[error("another thread owns the device; send it work instead")]
    DeviceOwned,
    /// A stream is in a state it cannot be brought back from; its context is healthy.
    #[error("the stream is lost ({code}); its context is healthy")]
    StreamLost {
        /// What the driver says about the stream.
        code: Code,
    },
    /// The context is lost. Final in this process: nothing is sent to the driver any more.
    #[error("{0}")]
    ContextLost(Arc<Lost>),
    /// An error of the code that was enqueueing, passed through.
    #[error("enqueueing failed: {0}")]
    Caller(#[source] Arc<dyn std::error::Error + Send + Sync>),
}

/// How a context was lost.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lost {
    /// What the driver answered; `None` when it did not answer at all.
    pub code: Option<Code>,
    /// The call that showed it.
    pub call: &'static str,
    /// The step and kernel that were sent last.
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

/// Which piece of work something was: a launch in a step, or a replay of a graph.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkOrigin {
    /// The step, or the graph's name for a replay.
    pub step: Arc<str>,
    /// The kernel or call; for a replay, the graph's last kernel.
    pub kernel: Arc<str>,
    /// Which replay of the graph, from 1.
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

struct ByteSuffix(u64);

impl fmt::Display for ByteSuffix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 == 0 { Ok(()) } else { write!(f, " ({} bytes)", self.0) }
    }
}

struct StepSuffix<'a>(&'a String);

impl fmt::Display for StepSuffix<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() { Ok(()) } else { write!(f, " (step {:?})", self.0) }
    }
}

impl DriverError {
    /// Wraps an error of the caller's own, so that it can pass through [`crate::Stream::record`].
    pub fn caller(error: impl std::error::Error + Send + Sync + 'static) -> DriverError {
        DriverError::Caller(Arc::new(error))
    }

    /// What to do about it, where there is something to do.
    #[must_use]
    pub fn hint(&self) -> Option<&'static str> {
        Some(match self {
            DriverError::LibraryMissing { .. } => {
                "install the NVIDIA driver and check with `nvidia-smi`; without a GPU use the CPU or the simulated device"
            }
            DriverError::SymbolMissing { .. } => "update the NVIDIA driver; `nvidia-smi` shows its version",
            DriverError::NoDevice { .. } => {
                "check `nvidia-smi` and CUDA_VISIBLE_DEVICES; in a container, start it with GPU access"
            }
            DriverError::NoSuchDevice { .. } => "`nvidia-smi -L` lists the devices",
            DriverError::OutOfMemory { .. } => {
                "plan less memory (a shorter context, a smaller batch, a smaller model), or stop what else uses the card"
            }
            DriverError::CaptureIncompatible { .. } => {
                "do it before the recording begins or after it has ended; the recording itself goes on"
            }
            DriverError::RecordingDeadline { .. } => {
                "nothing was replayed; look at what the last call named here waits for"
            }
            DriverError::MemoryNodes { .. } | DriverError::CapturedNodeCount { .. } => {
                "give the library call an explicit workspace from the planned memory"
            }
            DriverError::ModuleLoad { code, .. } if matches!(code.0, 209 | 218 | 222) => {
                "the kernels were built for another card or a newer driver: rebuild them for this one"
            }
            DriverError::Timeout { .. } | DriverError::NoAnswer { .. } => {
                "if it stays so, end the process: nothing inside it can unblock a driver call"
            }
            DriverError::DeviceOwned => "use the worker that owns the device",
            DriverError::ContextLost(_) => {
                "start a new process: a lost context cannot be repaired in this one; compute-sanitizer finds the access"
            }
            _ => return None,
        })
    }

    /// The driver's code, where there is one.
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

/// The message of a caught panic.
pub(crate) fn panic_message(payload: &(dyn std::any::Any + Send)) -> String {
    payload
        .downcast_ref::<&str>()
        .map(|s| (*s).to_owned())
        .or_else(|| payload.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "no message".to_owned())
}
