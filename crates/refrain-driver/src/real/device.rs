//! Properties of a device.

use std::ffi::{CStr, c_char};

use cudarc::driver::sys::CUdevice_attribute as Attribute;

use super::{RealDriver, check, out};
use crate::api::{Code, DeviceInfo, RawResult};

impl RealDriver {
    /// Returns the driver's handle of a device.
    pub(super) fn device(&self, ordinal: u32) -> RawResult<i32> {
        let ordinal = i32::try_from(ordinal).map_err(|_| Code::INVALID_DEVICE)?;
        out!(self, cuDeviceGet(ordinal))
    }

    pub(super) fn info(&self, ordinal: u32) -> RawResult<DeviceInfo> {
        let device = self.device(ordinal)?;
        let attribute = |a: Attribute| -> RawResult<u32> {
            let value: i32 = out!(self, cuDeviceGetAttribute(a as i32, device))?;
            Ok(u32::try_from(value).unwrap_or(0))
        };
        // Newer drivers have dropped some attributes. A missing one counts as unknown, not as an error.
        let optional = |a| attribute(a).unwrap_or(0);
        let mut info = DeviceInfo::named(&self.text(|buf, len| {
            // SAFETY: `buf` has `len` bytes, and the driver writes at most that many, including the terminating
            // zero.
            check(unsafe { (self.table.cuDeviceGetName)(buf, len, device) })
        })?);
        info.compute = (
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        );
        info.n_sms = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        info.total_bytes = out!(self, cuDeviceTotalMem_v2(device)).map(|n: usize| n as u64)?;
        info.l2_bytes = u64::from(optional(Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE));
        info.shared_block_bytes =
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
        info.shared_sm_bytes = optional(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR);
        info.max_block_threads = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK)?;
        info.bus_bits = optional(Attribute::CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH);
        info.memory_khz = optional(Attribute::CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE);
        info.clock_khz = optional(Attribute::CU_DEVICE_ATTRIBUTE_CLOCK_RATE);
        info.pci = self
            .text(|buf, len| {
                // SAFETY: as for the name.
                check(unsafe { (self.table.cuDeviceGetPCIBusId)(buf, len, device) })
            })
            .unwrap_or_default();
        info.uuid = out!(self, cuDeviceGetUuid_v2(device)).unwrap_or_default();
        // Not the pageable-access attribute: GPUs with memory of their own can read the host's pages too.
        info.unified = optional(Attribute::CU_DEVICE_ATTRIBUTE_INTEGRATED) != 0;
        Ok(info)
    }

    /// Reads a string that the driver writes into a buffer.
    fn text(&self, fill: impl FnOnce(*mut c_char, i32) -> RawResult<()>) -> RawResult<String> {
        let mut buf = [0_u8; 256];
        fill(buf.as_mut_ptr().cast(), buf.len() as i32 - 1)?;
        Ok(CStr::from_bytes_until_nul(&buf).unwrap_or_default().to_string_lossy().into_owned())
    }
}
