//! A backend by its device.

use crate::error::Error;
use crate::session::Device;
use refrain_cpu::CpuBackend;
use refrain_cuda::{CublasLt, CudaBackend, CudaOptions, LoadListener, Monitor};
use refrain_driver::Method;
use refrain_driver::trial::Choice;
use refrain_graph::Backend;
use std::num::NonZeroU32;

/// What is done with a backend, whichever it is.
pub(super) trait WithBackend {
    type Output;

    fn call<B: Backend + 'static>(self, backend: B, monitor: Option<Monitor>) -> Result<Self::Output, Error>;
}

/// How a device's graphs are recorded and watched, beyond what the device itself says.
#[derive(Clone, Copy, Default)]
pub(super) struct GraphUse<'a> {
    /// What a trial of stream capture says.
    pub(super) choice: Option<&'a Choice>,
    /// Compares every so many replayed steps with their eager run.
    pub(super) verify_every: Option<NonZeroU32>,
    /// Steps that may be in flight, at most three; the usual number unless given.
    pub(super) ahead: Option<usize>,
}

/// Opens the device.
pub(super) fn with_backend<W: WithBackend>(
    device: &Device,
    on_load: LoadListener,
    graphs: GraphUse<'_>,
    with: W,
) -> Result<W::Output, Error> {
    let (kind, cuda) = match device.cuda() {
        // Frozen weights are decoded where they are used: copies packed for products would only take room.
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
    if graphs.choice.is_some_and(Choice::avoids_capture) {
        // A library's calls become nodes by a capture, so they are left out too.
        (cuda.graphs.method, cuda.cublaslt) = (Method::Nodes, CublasLt::Never);
    }
    let backend = CudaBackend::open(kind, cuda)?;
    let monitor = backend.monitor();
    with.call(backend, Some(monitor))
}

/// What a device is called, and the bytes that are free on it, where that is known before it is opened.
pub(super) fn look(device: &Device) -> (String, Option<u64>) {
    match device.cuda() {
        Err(_) => ("the CPU".into(), free_on_host()),
        Ok((kind, _)) => match refrain_driver::Device::look(kind) {
            Ok(info) => (info.name, Some(info.total_bytes)),
            // Opening it says what is wrong.
            Err(_) => ("the device".into(), None),
        },
    }
}

/// Memory that the system can give without swapping, where it tells.
fn free_on_host() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? * 1024)
}
