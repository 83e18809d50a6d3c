//! A single device operation, as queued on a stream or held by a graph node.

use std::ffi::c_void;
use std::sync::Arc;

use super::kernels::{SimKernel, Twin};
use super::memory::{Fault, SimMemory, read_host, write_host};
use super::races::AccessLog;
use super::rng::SimRng;
use crate::api::{Code, ConditionHandle, CopyEnd, HostPtr, LaunchConfig, ModuleHandle, NodeKind, RawHostFn};

/// Scripted fault of an operation, applied when it runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WorkFault {
    Sticky(Code),
    WrongByte,
}

/// A host function to call.
#[derive(Clone, Copy)]
pub(super) struct SimHostCall {
    pub(super) f: RawHostFn,
    pub(super) user: *mut c_void,
}

// SAFETY: the caller of `launch_host_func` or `graph_add_host`, both `unsafe`, guaranteed that the function may be
// called from any thread.
unsafe impl Send for SimHostCall {}
// SAFETY: as above; the value itself is plain data.
unsafe impl Sync for SimHostCall {}

#[derive(Clone)]
pub(super) struct KernelOp {
    pub(super) twin: Arc<Twin>,
    pub(super) module: ModuleHandle,
    pub(super) config: LaunchConfig,
    pub(super) params: Arc<[u8]>,
}

#[derive(Clone)]
pub(super) enum SimOp {
    Empty,
    Kernel(KernelOp),
    Copy {
        dst: CopyEnd,
        src: CopyEnd,
        bytes: u64,
    },
    /// A copy whose source was read when it was enqueued: from pageable memory, outside a capture.
    Upload {
        dst: u64,
        data: Arc<[u8]>,
    },
    Memset {
        dst: u64,
        byte: u8,
        bytes: u64,
    },
    Host(SimHostCall),
    Alloc(u64),
    Free(u64),
}

impl SimOp {
    pub(super) fn kind(&self) -> NodeKind {
        match self {
            SimOp::Empty => NodeKind::Empty,
            SimOp::Kernel(_) => NodeKind::Kernel,
            SimOp::Copy { .. } | SimOp::Upload { .. } => NodeKind::Memcpy,
            SimOp::Memset { .. } => NodeKind::Memset,
            SimOp::Host(_) => NodeKind::Host,
            SimOp::Alloc(_) => NodeKind::MemAlloc,
            SimOp::Free(_) => NodeKind::MemFree,
        }
    }

    /// Description for reports.
    pub(super) fn what(&self) -> String {
        match self {
            SimOp::Empty => "an empty node".into(),
            SimOp::Kernel(k) => format!("kernel {}", k.twin.name),
            SimOp::Copy { bytes, .. } => format!("a copy of {bytes} bytes"),
            SimOp::Upload { data, .. } => format!("a copy of {} bytes", data.len()),
            SimOp::Memset { bytes, .. } => format!("a fill of {bytes} bytes"),
            SimOp::Host(_) => "a host function".into(),
            SimOp::Alloc(_) => "an allocation".into(),
            SimOp::Free(_) => "a free".into(),
        }
    }

    /// Simulated duration.
    pub(super) fn cost_ns(&self) -> u64 {
        match self {
            SimOp::Empty => 0,
            SimOp::Kernel(_) | SimOp::Host(_) | SimOp::Alloc(_) | SimOp::Free(_) => 2_000,
            SimOp::Copy { bytes, .. } | SimOp::Memset { bytes, .. } => 1_000 + bytes / 50,
            SimOp::Upload { data, .. } => 1_000 + data.len() as u64 / 50,
        }
    }

    /// Runs the operation; host functions are run by the scheduler instead.
    pub(super) fn run(&self, memory: &mut SimMemory, module_is_live: impl Fn(ModuleHandle) -> bool) -> OpRun {
        let mut log = AccessLog::default();
        let result = match self {
            SimOp::Empty | SimOp::Host(_) => Ok(()),
            SimOp::Copy { bytes: 0, .. } | SimOp::Memset { bytes: 0, .. } => Ok(()),
            SimOp::Upload { data, .. } if data.is_empty() => Ok(()),
            SimOp::Kernel(k) if !module_is_live(k.module) => Err(Fault::new(
                Code::ILLEGAL_ADDRESS,
                format!("kernel {} runs after its module was unloaded", k.twin.name),
            )),
            SimOp::Kernel(k) => return run_kernel(k, memory),
            SimOp::Copy { dst, src, bytes } => run_copy(*dst, *src, *bytes, memory, &mut log),
            SimOp::Upload { dst, data } => {
                log.touch(*dst, data.len() as u64, true);
                memory.write(*dst, data)
            }
            SimOp::Memset { dst, byte, bytes } => {
                log.touch(*dst, *bytes, true);
                memory.locate(*dst, *bytes).and_then(|_| memory.write(*dst, &vec![*byte; *bytes as usize]))
            }
            SimOp::Alloc(start) => memory
                .bring_to_life(*start)
                .map_err(|code| Fault::new(code, "stream-ordered allocation failed when it ran")),
            SimOp::Free(start) => memory.free(*start).map_err(|_| {
                Fault::new(Code::ILLEGAL_ADDRESS, format!("free of {start:#x}, which is not allocated"))
            }),
        };
        let result = result.map_err(|fault| match self {
            SimOp::Kernel(_) => fault,
            _ => Fault::new(fault.code, format!("{}: {}", self.what(), fault.what)),
        });
        OpRun { log, result, conditions: Vec::new() }
    }
}

/// What an operation did.
pub(super) struct OpRun {
    pub(super) log: AccessLog,
    pub(super) result: Result<(), Fault>,
    /// Conditions of loops that it set, in order.
    pub(super) conditions: Vec<(ConditionHandle, u32)>,
}

fn run_kernel(k: &KernelOp, memory: &mut SimMemory) -> OpRun {
    let mut kernel = SimKernel::new(&k.twin, &k.config, &k.params, memory);
    // A panic in a twin is reported as a kernel crash, so that no panic crosses the driver interface.
    let run = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| (k.twin.body)(&mut kernel)));
    let (log, fault, conditions) = kernel.finish();
    let result = match (fault, run) {
        (Some(fault), _) | (None, Ok(Err(fault))) => Err(fault),
        (None, Ok(Ok(()))) => Ok(()),
        (None, Err(panic)) => {
            let text = panic
                .downcast_ref::<String>()
                .map(String::as_str)
                .or_else(|| panic.downcast_ref::<&str>().copied())
                .unwrap_or("no message");
            Err(Fault::new(
                Code::LAUNCH_FAILED,
                format!("the twin of kernel {} panicked: {text}", k.twin.name),
            ))
        }
    };
    OpRun { log, result, conditions }
}

fn run_copy(
    dst: CopyEnd,
    src: CopyEnd,
    bytes: u64,
    memory: &mut SimMemory,
    log: &mut AccessLog,
) -> Result<(), Fault> {
    let n = usize::try_from(bytes)
        .map_err(|_| Fault::new(Code::ILLEGAL_ADDRESS, "a copy larger than the address space"))?;
    // Check both ends before allocating a buffer of that size.
    if let CopyEnd::Device(p) = src {
        memory.locate(p.0, bytes)?;
        log.touch(p.0, bytes, false);
    }
    if let CopyEnd::Device(p) = dst {
        memory.locate(p.0, bytes)?;
        log.touch(p.0, bytes, true);
    }
    let mut buffer = vec![0u8; n];
    match src {
        CopyEnd::Device(p) => memory.read(p.0, &mut buffer)?,
        CopyEnd::Host(p) => read_host(p.0, &mut buffer),
    }
    match dst {
        CopyEnd::Device(p) => memory.write(p.0, &buffer)?,
        CopyEnd::Host(p) => write_host(p.0, &buffer),
    }
    Ok(())
}

/// Flips a bit in one of the written bytes in `log`.
pub(super) fn falsify(memory: &mut SimMemory, log: &AccessLog, rng: &mut SimRng) {
    let written: Vec<_> = log.as_slice().iter().filter(|a| a.write).collect();
    if written.is_empty() {
        return;
    }
    let range = written[rng.below(written.len())];
    let addr = range.start + rng.below((range.end - range.start) as usize) as u64;
    let mut byte = [0u8];
    if memory.read(addr, &mut byte).is_ok() {
        byte[0] ^= 1 << rng.below(8);
        // Cannot fail: the address was readable just now, under the same lock.
        let _ = memory.write(addr, &byte);
    }
}

/// Flips a bit of what a copy just wrote to pageable host memory.
pub(super) fn falsify_host(dst: HostPtr, bytes: u64, rng: &mut SimRng) {
    if bytes == 0 {
        return;
    }
    let addr = dst.0 + rng.below(bytes as usize) as u64;
    let mut byte = [0u8];
    read_host(addr, &mut byte);
    byte[0] ^= 1 << rng.below(8);
    write_host(addr, &byte);
}
