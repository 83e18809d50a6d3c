//! Opening a device and claiming it for a thread.

use std::marker::PhantomData;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use crate::api::{Api, CaptureStatus, Census, Code, DeviceInfo};
use crate::error::DriverError;
use crate::event::Event;
use crate::health::{self, Health};
use crate::probe::Probe;
use crate::shared::DeviceShared;
use crate::sim::{SimDriver, SimOptions};
use crate::stream::Stream;

/// Which device to open.
#[derive(Clone, Debug)]
pub enum DeviceKind {
    /// The CUDA device with this ordinal.
    Cuda(u32),
    /// A simulated device.
    Sim(SimOptions),
}

/// An open device. Cheap to clone and `Send`; calling the driver takes a [`Context`], which stays on one thread.
#[derive(Clone)]
pub struct Device {
    pub(crate) shared: Arc<DeviceShared>,
}

/// A weak handle that does not keep the device open.
#[derive(Clone, Debug)]
pub struct WeakDevice(std::sync::Weak<DeviceShared>);

impl WeakDevice {
    /// True if this handle refers to `device`.
    #[must_use]
    pub fn refers_to(&self, device: &Device) -> bool {
        std::ptr::eq(self.0.as_ptr(), Arc::as_ptr(&device.shared))
    }
}

impl Device {
    /// Opens a device and checks that its probe kernels load.
    pub fn open(kind: DeviceKind) -> Result<Device, DriverError> {
        match kind {
            DeviceKind::Cuda(ordinal) => Device::with_api(crate::real::load()?, ordinal),
            DeviceKind::Sim(options) => Device::simulated(&SimDriver::new(options)),
        }
    }

    /// Looks a device up without opening it: loads the driver but creates no context.
    pub fn query(kind: DeviceKind) -> Result<DeviceInfo, DriverError> {
        let (api, ordinal) = match kind {
            DeviceKind::Cuda(ordinal) => (crate::real::load()?, ordinal),
            DeviceKind::Sim(options) => (SimDriver::new(options).interface(), 0),
        };
        query_device(&*api, ordinal).map(|(info, _)| info)
    }

    /// Opens a simulated device. The caller keeps its handle, to register kernels, inject faults and read reports.
    pub fn simulated(sim: &SimDriver) -> Result<Device, DriverError> {
        crate::probe::register_twins(sim);
        Device::with_api(sim.interface(), 0)
    }

    fn with_api(api: Arc<dyn Api>, ordinal: u32) -> Result<Device, DriverError> {
        let (info, driver_version) = query_device(&*api, ordinal)?;
        let ctx = api.primary_ctx_retain(ordinal).map_err(driver_error("cuDevicePrimaryCtxRetain"))?;
        let shared = Arc::new(DeviceShared::new(api, ctx, ordinal, info, driver_version));
        let probe = Probe::load(&shared)?;
        // The cell is empty, since nobody else has seen `shared` yet.
        let _ = shared.probe.set(probe);
        Ok(Device { shared })
    }

    /// Makes the calling thread the owner of the device.
    ///
    /// The returned context and everything created from it stay on this thread; when the last of them is dropped,
    /// another thread may claim the device. Until then a second claim fails with [`DriverError::DeviceOwned`], or
    /// with [`DriverError::CaptureIncompatible`] while the owner is recording.
    pub fn context(&self) -> Result<Context, DriverError> {
        self.shared.check_lost()?;
        if !self.shared.claim() {
            self.shared.refuse_while_recording("claiming the device", 0)?;
            return Err(DriverError::DeviceOwned);
        }
        let ctx =
            Context { claim: Rc::new(Claim { shared: Arc::clone(&self.shared), _not_send: PhantomData }) };
        self.shared.call("cuMemGetInfo", |api| api.mem_info())?;
        self.shared.empty_bin();
        Ok(ctx)
    }

    /// True if `other` is the same open device.
    #[must_use]
    pub fn is_same(&self, other: &Device) -> bool {
        Arc::ptr_eq(&self.shared, &other.shared)
    }

    /// Returns a weak handle, which can identify this device without keeping it open.
    #[must_use]
    pub fn downgrade(&self) -> WeakDevice {
        WeakDevice(Arc::downgrade(&self.shared))
    }

    /// `cuda` or `sim`.
    #[must_use]
    pub fn backend(&self) -> &'static str {
        self.shared.api.backend()
    }

    /// Properties of the device.
    #[must_use]
    pub fn info(&self) -> &DeviceInfo {
        &self.shared.info
    }

    /// The device's ordinal.
    #[must_use]
    pub fn ordinal(&self) -> u32 {
        self.shared.ordinal
    }

    /// The newest CUDA version that the driver supports: 13000 for 13.0.
    #[must_use]
    pub fn driver_version(&self) -> u32 {
        self.shared.driver_version
    }

    /// The file that the driver was loaded from.
    #[must_use]
    pub fn library_path(&self) -> Option<std::path::PathBuf> {
        self.shared.api.library_path()
    }

    /// Capture status of the stream that is being recorded on this device, if any. Can be called from any thread,
    /// and during a recording. A failed query is an error, not [`CaptureStatus::None`].
    pub fn capture_status(&self) -> Result<CaptureStatus, DriverError> {
        self.shared.capture_status()
    }

    /// The error that lost the context, if it is lost.
    #[must_use]
    pub fn lost(&self) -> Option<DriverError> {
        self.shared.check_lost().err()
    }

    /// Checks that a launch, a copy and a wait work on a fresh stream. Runs on a thread of its own, so that the
    /// answer arrives in bounded time even if the driver hangs. A device that fails the check is marked lost.
    pub fn health(&self, limit: Duration) -> Result<Health, DriverError> {
        health::check(&self.shared, limit)
    }

    /// Number of recordings that the watchdog has aborted.
    #[must_use]
    pub fn n_aborted(&self) -> u64 {
        self.shared.watchdog.fired()
    }

    /// Number of driver objects waiting to be freed: those dropped during a recording or on another thread.
    #[must_use]
    pub fn n_deferred(&self) -> usize {
        self.shared.bin_len()
    }

    /// Counts of live driver objects, on the simulated device.
    #[must_use]
    pub fn census(&self) -> Option<Census> {
        self.shared.api.census()
    }

    /// Takes the reports of the simulated device since the last call: races and out-of-bounds accesses.
    #[must_use]
    pub fn take_reports(&self) -> Vec<String> {
        self.shared.api.take_reports()
    }
}

fn driver_error(call: &'static str) -> impl Fn(Code) -> DriverError {
    move |code| DriverError::Driver { call, code, origin: None }
}

/// Looks up a device's properties and the driver version.
fn query_device(api: &dyn Api, ordinal: u32) -> Result<(DeviceInfo, u32), DriverError> {
    let driver_version = api.driver_version().map_err(driver_error("cuDriverGetVersion"))?;
    let count = match api.device_count() {
        Ok(0) => return Err(DriverError::NoDevice { code: Code::NO_DEVICE }),
        Ok(n) => n,
        Err(code) => return Err(DriverError::NoDevice { code }),
    };
    if ordinal >= count {
        return Err(DriverError::NoSuchDevice { ordinal, count });
    }
    Ok((api.device_info(ordinal).map_err(driver_error("cuDeviceGetAttribute"))?, driver_version))
}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Device({}:{} {:?})", self.backend(), self.ordinal(), self.info().name)
    }
}

/// Capture status of the stream that is being recorded on a device; [`CaptureStatus::None`] without a device.
///
/// For code that also runs on machines without a GPU, where nothing can be capturing.
pub fn capture_status(device: Option<&Device>) -> Result<CaptureStatus, DriverError> {
    device.map_or(Ok(CaptureStatus::None), Device::capture_status)
}

/// The right to use a device. One thread holds it at a time.
///
/// ```compile_fail,E0277
/// # use refrain_driver::{Device, DeviceKind, sim::SimOptions};
/// let device = Device::open(DeviceKind::Sim(SimOptions::default())).unwrap();
/// let ctx = device.context().unwrap();
/// std::thread::spawn(move || drop(ctx)); // a context stays on the thread that claimed the device
/// ```
#[derive(Clone)]
pub struct Context {
    claim: Rc<Claim>,
}

struct Claim {
    shared: Arc<DeviceShared>,
    _not_send: PhantomData<*const ()>,
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.shared.unclaim();
    }
}

impl Context {
    pub(crate) fn shared(&self) -> &Arc<DeviceShared> {
        &self.claim.shared
    }

    /// The device.
    #[must_use]
    pub fn device(&self) -> Device {
        Device { shared: Arc::clone(self.shared()) }
    }

    /// Free and total bytes of device memory.
    pub fn mem_info(&self) -> Result<(u64, u64), DriverError> {
        self.shared().call("cuMemGetInfo", |api| api.mem_info())
    }

    /// Returns an error that names `what` if the device is recording. For work that must not hold up a recording.
    pub fn refuse_while_recording(&self, what: &'static str) -> Result<(), DriverError> {
        self.shared().refuse_while_recording(what, 0)
    }

    /// Creates a stream, independent of the legacy stream.
    pub fn stream(&self) -> Result<Stream, DriverError> {
        Stream::new(self)
    }

    /// Creates an event with timing.
    pub fn event(&self) -> Result<Event, DriverError> {
        Event::new(self.shared(), true)
    }
}

impl std::fmt::Debug for Context {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Context of {:?}", self.device())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_queried_without_creating_a_context() {
        let sim = SimDriver::new(SimOptions::default());
        let (info, _) = query_device(&*sim.interface(), 0).unwrap();
        assert_eq!(sim.stats().live.contexts, 0);
        let queried = Device::query(DeviceKind::Sim(SimOptions::default())).unwrap();
        assert_eq!(queried.name, info.name);
        let open = Device::simulated(&sim).unwrap();
        assert_eq!((sim.stats().live.contexts, &open.info().name), (1, &info.name));
        assert!(matches!(
            query_device(&*sim.interface(), 9),
            Err(DriverError::NoSuchDevice { ordinal: 9, count: 1 })
        ));
    }
}
