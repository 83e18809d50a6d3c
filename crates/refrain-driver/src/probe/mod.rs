//! Probe kernels for the health check, `doctor` and the tests.
//!
//! They are PTX text, so that any driver can compile them without a kernel library. Each has a twin for the
//! simulated device.

mod twins;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::api::{DevicePtr, FunctionHandle, HostPtr, LaunchConfig, ModuleHandle, StreamKind};
use crate::error::DriverError;
use crate::protocol::sync::lock;
use crate::shared::{DeviceShared, Garbage};

pub(crate) use twins::register_twins;

/// The probe kernels for any GPU: `refrain_probe_{nothing, fill, add, read, publish, spin, poke}`.
pub const PROBE_PTX: &[u8] = include_bytes!("kernels.ptx");

/// The probe kernel for programmatic dependent launch (compute capability 9.0 and up): `refrain_probe_add_pdl`.
pub const PROBE_OVERLAP_PTX: &[u8] = include_bytes!("overlap.ptx");

/// The probe kernel for loops on the device: `refrain_probe_repeat`.
pub const PROBE_LOOP_PTX: &[u8] = include_bytes!("loop.ptx");

/// Number of words that the health check writes, copies and reads back.
const WORDS: u32 = 64;
const HALF_BYTES: u64 = WORDS as u64 * 4;

/// Resources of the health check. Allocated when the device is opened, since the check must work even when nothing
/// can be allocated any more.
pub(crate) struct Probe {
    module: ModuleHandle,
    fill: FunctionHandle,
    device: DevicePtr,
    host: HostPtr,
    count: Mutex<u32>,
}

impl Probe {
    pub(crate) fn load(shared: &DeviceShared) -> Result<Probe, DriverError> {
        let module = shared
            .raw(|api| api.module_load(PROBE_PTX))?
            .map_err(|code| DriverError::ModuleLoad { module: "probe".to_owned(), code })?;
        let undo = |garbage: Vec<Garbage>, error| {
            garbage.into_iter().for_each(|g| shared.discard(g));
            error
        };
        let fill = shared
            .call("cuModuleGetFunction", |api| api.module_function(module, "refrain_probe_fill"))
            .map_err(|e| undo(vec![Garbage::Module(module)], e))?;
        let device = shared
            .call("cuMemAlloc", |api| api.alloc(2 * HALF_BYTES))
            .map_err(|e| undo(vec![Garbage::Module(module)], e))?;
        let host = shared
            .call("cuMemAllocHost", |api| api.alloc_host(HALF_BYTES))
            .map_err(|e| undo(vec![Garbage::Module(module), Garbage::Device(device)], e))?;
        Ok(Probe { module, fill, device, host, count: Mutex::new(0) })
    }

    pub(crate) fn into_garbage(self) -> [Garbage; 3] {
        [Garbage::Module(self.module), Garbage::Device(self.device), Garbage::Host(self.host)]
    }

    /// Makes a launch, a copy and a wait on a fresh stream. Returns `Ok(false)` if they ran but the bytes are
    /// wrong.
    pub(crate) fn run(&self, shared: &Arc<DeviceShared>, limit: Duration) -> Result<bool, DriverError> {
        let mut count = lock(&self.count);
        *count = count.wrapping_add(1);
        let value = 0x5EED_0000 ^ *count;
        let stream = shared.call("cuStreamCreate", |api| api.stream_create(StreamKind::NonBlocking))?;
        let result = self.run_on(shared, stream, value, limit);
        // Destroying a stream does not wait for its work, which accesses only this probe's memory.
        let destroyed = shared.call("cuStreamDestroy", |api| api.stream_destroy(stream));
        let same = result?;
        destroyed.map(|()| same)
    }

    fn run_on(
        &self,
        shared: &DeviceShared,
        stream: crate::api::StreamHandle,
        value: u32,
        limit: Duration,
    ) -> Result<bool, DriverError> {
        let mut params = [0_u8; 16];
        params[..8].copy_from_slice(&self.device.0.to_le_bytes());
        params[8..12].copy_from_slice(&value.to_le_bytes());
        params[12..].copy_from_slice(&WORDS.to_le_bytes());
        let config = LaunchConfig::new([1, 1, 1], [WORDS, 1, 1]);
        shared.call("cuLaunchKernelEx", |api| api.launch(self.fill, &config, stream, &params))?;
        let second = self.device.add(HALF_BYTES);
        shared.call("cuMemcpyDtoDAsync", |api| {
            api.memcpy_dtod_async(second, self.device, HALF_BYTES, stream)
        })?;
        // SAFETY: `host` has `HALF_BYTES` bytes and lives until `DeviceShared` is dropped. The `count` lock lets
        // only one probe run at a time, and nobody else accesses it.
        shared.call("cuMemcpyDtoHAsync", |api| unsafe {
            api.memcpy_dtoh_async(self.host, second, HALF_BYTES, stream)
        })?;
        shared.poll("cuStreamQuery", limit, |api| api.stream_query(stream))?;
        let mut bytes = [0; HALF_BYTES as usize];
        // SAFETY: `host` has that many bytes, in whole words, and only these probes access them.
        unsafe { crate::pinned::read(self.host, &mut bytes) };
        Ok(bytes.chunks_exact(4).all(|w| w == value.to_le_bytes()))
    }
}
