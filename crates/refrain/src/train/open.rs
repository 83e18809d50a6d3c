//! Opening a backend for a device.

use crate::error::Error;
use crate::session::Device;
use refrain_cpu::CpuBackend;
use refrain_cuda::{CublasLt, CudaBackend, CudaOptions, LoadListener, Monitor};
use refrain_driver::Method;
use refrain_driver::trial::MethodChoice;
use refrain_graph::Backend;
use std::num::NonZeroU32;

/// Work that is generic over the backend.
pub(super) trait WithBackend {
    type Output;

    fn call<B: Backend + 'static>(self, backend: B, monitor: Option<Monitor>) -> Result<Self::Output, Error>;
}

/// Graph options in addition to those of the device.
#[derive(Clone, Copy, Default)]
pub(super) struct GraphUse<'a> {
    /// Result of a trial of stream capture.
    pub(super) choice: Option<&'a MethodChoice>,
    /// Compares every n-th replayed step with its eager run.
    pub(super) verify_every: Option<NonZeroU32>,
    /// Maximum number of steps in flight, up to three; the default when `None`.
    pub(super) ahead: Option<usize>,
}

/// Opens the device.
pub(super) fn with_backend<W: WithBackend>(
    device: &Device,
    on_load: LoadListener,
    graphs: GraphUse<'_>,
    with: W,
) -> Result<W::Output, Error> {
    let (kind, cuda) = match device.cuda_options() {
        // Frozen weights are decoded where they are used: copies packed for matmuls would only take memory.
        Err(threads) => return with.call(CpuBackend::new(threads)?.with_repacking(false), None),
        Ok(cuda) => cuda,
    };
    let ahead = graphs.ahead.unwrap_or(cuda.ahead);
    let mut cuda = CudaOptions {
        model: "a training run".into(),
        on_load,
        verify_every: graphs.verify_every,
        ahead,
        ..cuda
    };
    if graphs.choice.is_some_and(MethodChoice::avoids_capture) {
        // Library calls become nodes through a capture, so they are not used either.
        (cuda.graphs.method, cuda.cublaslt) = (Method::Nodes, CublasLt::Never);
    }
    let backend = CudaBackend::open(kind, cuda)?;
    let monitor = backend.monitor();
    with.call(backend, Some(monitor))
}

/// Name and free bytes of a device, if known before it is opened.
pub(super) fn look(device: &Device) -> (String, Option<u64>) {
    match device.cuda_options() {
        Err(_) => ("the CPU".into(), free_on_host()),
        Ok((kind, _)) => match refrain_driver::Device::query(kind) {
            Ok(info) => (info.name, Some(info.total_bytes)),
            // Opening it reports the error.
            Err(_) => ("the device".into(), None),
        },
    }
}

/// Host memory that is available without swapping, if the system reports it.
fn free_on_host() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? * 1024)
}
