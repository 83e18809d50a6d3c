//! What a device offers, without a model on it.

use crate::error::Error;
use crate::session::Device;
use refrain_cpu::CpuBackend;
use refrain_cuda::{Arch, CudaBackend, CudaError, Origin, prebuilt_archs};
use std::time::{Duration, Instant};

/// Where a device's kernels come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelReport {
    /// Where they came from.
    pub origin: Origin,
    /// How long opening the device and loading them took.
    pub took: Duration,
    /// Architectures that this binary holds compiled kernels for.
    pub prebuilt: Vec<Arch>,
}

/// Loads the kernels of a CUDA device, real or simulated; `None` for the CPU, whose kernels are part of the program.
pub fn examine_kernels(device: &Device) -> Result<Option<KernelReport>, Error> {
    let Ok((kind, options)) = device.cuda() else { return Ok(None) };
    let began = Instant::now();
    let status = CudaBackend::open(kind, options)?.monitor().status();
    let took = began.elapsed();
    Ok(status.kernels.map(|origin| KernelReport { origin, took, prebuilt: prebuilt_archs() }))
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
