//! What a device offers, without a model on it.

use crate::error::Error;
use crate::session::Device;
use refrain_cpu::CpuBackend;
use refrain_cuda::{Arch, CudaBackend, CudaError, KernelOrigin, KernelUnits, prebuilt_archs};
use std::time::{Duration, Instant};

/// Where a device's kernels come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelReport {
    /// Where they came from.
    pub origin: KernelOrigin,
    /// How many there are, and how many of them need no compiler.
    pub units: KernelUnits,
    /// How long opening the device and loading those that need no compiler took.
    pub took: Duration,
    /// Architectures that this binary holds compiled kernels for.
    pub prebuilt: Vec<Arch>,
}

/// Looks at the kernels of a CUDA device, real or simulated, and loads them all if none has to be compiled; `None` for the
/// CPU, whose kernels are part of the program.
pub fn examine_kernels(device: &Device) -> Result<Option<KernelReport>, Error> {
    let Ok((kind, options)) = device.cuda() else { return Ok(None) };
    let began = Instant::now();
    let backend = CudaBackend::open(kind, options)?;
    let units = backend.examine_kernels()?;
    let took = began.elapsed();
    let origin = backend.monitor().status().kernels;
    Ok(origin.map(|origin| KernelReport { origin, units, took, prebuilt: prebuilt_archs() }))
}

/// Free bytes of a CUDA device, and whether they are the host's; `None` for the CPU.
pub fn free_memory(device: &Device) -> Result<Option<(u64, bool)>, Error> {
    let Ok((kind, _)) = device.cuda() else { return Ok(None) };
    let failed = |source| Error::Cuda(CudaError::Driver { step: "asking for free memory".into(), source });
    let device = refrain_driver::Device::open(kind).map_err(failed)?;
    let free = device.context().and_then(|ctx| ctx.mem_info()).map_err(failed)?.0;
    Ok(Some((free, device.info().unified)))
}

/// Bytes per second that a device reads from its memory at best, measured. Of a CUDA device it takes 4 GiB of memory for
/// that, or a quarter of what is free, and nothing else may be using it from this process.
pub fn read_bandwidth(device: &Device) -> Result<f64, Error> {
    match device.cuda() {
        Err(threads) => Ok(CpuBackend::new(threads)?.read_bandwidth()),
        Ok((kind, _)) => refrain_driver::doctor::read_bandwidth(kind).map_err(|source| {
            CudaError::Driver { step: "measuring the read bandwidth".into(), source }.into()
        }),
    }
}
