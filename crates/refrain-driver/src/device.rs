//! Opening a device, and the thread that owns it.

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
    /// A CUDA card, by its number.
    Cuda(u32),
    /// The simulated device.
    Sim(SimOptions),
}

/// An open device. Cheap to clone and free to send: what touches the driver needs a [`Context`], which stays on one
/// thread.
#[derive(Clone)]
pub struct Device {
    pub(crate) shared: Arc<DeviceShared>,
}

/// A device that may be closed meanwhile.
#[derive(Clone, Debug)]
pub struct WeakDevice(std::sync::Weak<DeviceShared>);

impl WeakDevice {
    /// Whether it is this open device.
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

    /// Whether there is such a device, without opening it: the driver is loaded, and no context is made.
    pub fn query(kind: DeviceKind) -> Result<DeviceInfo, DriverError> {
        let (api, ordinal) = match kind {
            DeviceKind::Cuda(ordinal) => (crate::real::load()?, ordinal),
            DeviceKind::Sim(options) => (SimDriver::new(options).interface(), 0),
        };
        find(&*api, ordinal).map(|(info, _)| info)
    }

    /// Opens a simulated device that the caller keeps a handle to, for its kernels, faults and reports.
    pub fn simulated(sim: &SimDriver) -> Result<Device, DriverError> {
        crate::probe::register_twins(sim);
        Device::with_api(sim.interface(), 0)
    }

    fn with_api(api: Arc<dyn Api>, ordinal: u32) -> Result<Device, DriverError> {
        let (info, driver_version) = find(&*api, ordinal)?;
        let ctx = api.primary_ctx_retain(ordinal).map_err(plain("cuDevicePrimaryCtxRetain"))?;
        let shared = Arc::new(DeviceShared::new(api, ctx, ordinal, info, driver_version));
        let probe = Probe::load(&shared)?;
        // The cell is empty: nobody else has seen `shared` yet.
        let _ = shared.probe.set(probe);
        Ok(Device { shared })
    }

    /// Makes the calling thread the owner of the device.
    ///
    /// The returned context and everything made from it stay on this thread; when the last of them is gone, another
    /// thread may claim the device. While one owns it, this is [`DriverError::DeviceOwned`], or
    /// [`DriverError::CaptureIncompatible`] when that thread is recording.
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

    /// Whether the other one is the same open device.
    #[must_use]
    pub fn is_same(&self, other: &Device) -> bool {
        Arc::ptr_eq(&self.shared, &other.shared)
    }

    /// Tells this device from others without keeping it open.
    #[must_use]
    pub fn downgrade(&self) -> WeakDevice {
        WeakDevice(Arc::downgrade(&self.shared))
    }

    /// `cuda` or `sim`.
    #[must_use]
    pub fn backend(&self) -> &'static str {
        self.shared.api.backend()
    }

    /// What the card is.
    #[must_use]
    pub fn info(&self) -> &DeviceInfo {
        &self.shared.info
    }

    /// The device's number.
    #[must_use]
    pub fn ordinal(&self) -> u32 {
        self.shared.ordinal
    }

    /// The newest CUDA version the driver supports: 13000 for 13.0.
    #[must_use]
    pub fn driver_version(&self) -> u32 {
        self.shared.driver_version
    }

    /// The file the driver was loaded from.
    #[must_use]
    pub fn library_path(&self) -> Option<std::path::PathBuf> {
        self.shared.api.library_path()
    }

    /// Whether the stream that is being recorded on this device, if any, is capturing. Callable from any thread, also
    /// from inside a recording. Failures of the probe are errors, not `None`.
    pub fn capture_status(&self) -> Result<CaptureStatus, DriverError> {
        self.shared.capture_status()
    }

    /// The error that ended the context, if it is lost.
    #[must_use]
    pub fn lost(&self) -> Option<DriverError> {
        self.shared.check_lost().err()
    }

    /// Asks the device for a launch, a copy and a wait on a fresh stream, from a thread of its own, so that the answer
    /// comes by `limit` even when the driver does not return. A device that fails this is lost.
    pub fn health(&self, limit: Duration) -> Result<Health, DriverError> {
        health::check(&self.shared, limit)
    }

    /// How many recordings the watchdog broke off.
    #[must_use]
    pub fn n_aborted(&self) -> u64 {
        self.shared.watchdog.fired()
    }

    /// How many driver objects wait to be freed: what was dropped while something records, or on another thread.
    #[must_use]
    pub fn n_deferred(&self) -> usize {
        self.shared.bin_len()
    }

    /// Live driver objects, on the simulated device.
    #[must_use]
    pub fn census(&self) -> Option<Census> {
        self.shared.api.census()
    }

    /// What the simulated device has found since the last call: races, stray accesses.
    #[must_use]
    pub fn take_reports(&self) -> Vec<String> {
        self.shared.api.take_reports()
    }
}

fn plain(call: &'static str) -> impl Fn(Code) -> DriverError {
    move |code| DriverError::Driver { call, code, origin: None }
}

/// What a device is, and the version of its driver.
fn find(api: &dyn Api, ordinal: u32) -> Result<(DeviceInfo, u32), DriverError> {
    let driver_version = api.driver_version().map_err(plain("cuDriverGetVersion"))?;
    let count = match api.device_count() {
        Ok(0) => return Err(DriverError::NoDevice { code: Code::NO_DEVICE }),
        Ok(n) => n,
        Err(code) => return Err(DriverError::NoDevice { code }),
    };
    if ordinal >= count {
        return Err(DriverError::NoSuchDevice { ordinal, count });
    }
    Ok((api.device_info(ordinal).map_err(plain("cuDeviceGetAttribute"))?, driver_version))
}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Device({}:{} {:?})", self.backend(), self.ordinal(), self.info().name)
    }
}

/// The capture status of a device's recorded stream; `None` without a device.
///
/// This is the probe for code that also runs on machines without a GPU: there is nothing to ask there, so nothing is
/// being captured.
pub fn capture_status(device: Option<&Device>) -> Result<CaptureStatus, DriverError> {
    device.map_or(Ok(CaptureStatus::None), Device::capture_status)
}

/// The right to use a device, which one thread has at a time.
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

    /// Refuses `what`, by name, while something records: for work that a recording must not wait for.
    pub fn refuse_while_recording(&self, what: &'static str) -> Result<(), DriverError> {
        self.shared().refuse_while_recording(what, 0)
    }

    /// A new stream, independent of the legacy stream.
    pub fn stream(&self) -> Result<Stream, DriverError> {
        Stream::new(self)
    }

    /// A new event with timing.
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
    fn a_device_is_looked_at_without_a_context() {
        let sim = SimDriver::new(SimOptions::default());
        let (info, _) = find(&*sim.interface(), 0).unwrap();
        assert_eq!(sim.stats().live.contexts, 0);
        let looked = Device::query(DeviceKind::Sim(SimOptions::default())).unwrap();
        assert_eq!(looked.name, info.name);
        let open = Device::simulated(&sim).unwrap();
        assert_eq!((sim.stats().live.contexts, &open.info().name), (1, &info.name));
        assert!(matches!(
            find(&*sim.interface(), 9),
            Err(DriverError::NoSuchDevice { ordinal: 9, count: 1 })
        ));
    }
}
