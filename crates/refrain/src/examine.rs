//! Devices without a model: kernels, free memory, bandwidth.

use crate::error::Error;
use crate::session::Device;
use refrain_cpu::CpuBackend;
use refrain_cuda::{CudaBackend, CudaError, GpuArch, KernelOrigin, KernelUnits, prebuilt_archs};
use std::time::{Duration, Instant};

/// The origin of a device's kernels.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelReport {
    /// Where they came from.
    pub origin: KernelOrigin,
    /// Number of kernel units, and of those that need no compiler.
    pub units: KernelUnits,
    /// Time to open the device and to load the units that need no compiler.
    pub took: Duration,
    /// Architectures for which this binary contains compiled kernels.
    pub prebuilt: Vec<GpuArch>,
}

/// Examines the kernels of a CUDA device, real or simulated, and loads them all if none has to be compiled. `None` for
/// the CPU, whose kernels are part of the program.
pub fn examine_kernels(device: &Device) -> Result<Option<KernelReport>, Error> {
    let Ok((kind, options)) = device.cuda_options() else { return Ok(None) };
    let began = Instant::now();
    let backend = CudaBackend::open(kind, options)?;
    let units = backend.examine_kernels()?;
    let took = began.elapsed();
    let origin = backend.monitor().status().kernels;
    Ok(origin.map(|origin| KernelReport { origin, units, took, prebuilt: prebuilt_archs() }))
}

/// Free bytes of a CUDA device, and whether it shares the host's memory; `None` for the CPU.
pub fn free_memory(device: &Device) -> Result<Option<(u64, bool)>, Error> {
    let Ok((kind, _)) = device.cuda_options() else { return Ok(None) };
    let failed = |source| Error::Cuda(CudaError::Driver { step: "querying free memory".into(), source });
    let device = refrain_driver::Device::open(kind).map_err(failed)?;
    let free = device.context().and_then(|ctx| ctx.mem_info()).map_err(failed)?.0;
    Ok(Some((free, device.info().unified)))
}

/// Measures the read bandwidth of a device's memory in bytes per second. On a CUDA device it allocates 4 GiB, or a
/// quarter of the free memory, and nothing else in this process may use the device meanwhile.
pub fn read_bandwidth(device: &Device) -> Result<f64, Error> {
    match device.cuda_options() {
        Err(threads) => Ok(CpuBackend::new(threads)?.read_bandwidth()),
        Ok((kind, _)) => refrain_driver::doctor::read_bandwidth(kind).map_err(|source| {
            CudaError::Driver { step: "measuring the read bandwidth".into(), source }.into()
        }),
    }
}
