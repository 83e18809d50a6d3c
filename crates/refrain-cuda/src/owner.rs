//! The single owner of a device in a process: its context, its thread, its loaded kernels, and the models on
//! it.
//!
//! ```text
//! CudaBackend (a model) ──┐                               ┌── DeviceModel: weights, states, programs, graphs, stream
//! CudaBackend (a model) ──┼──► device thread: DeviceOwner ┤   DeviceModel
//! CudaBackend (a model) ──┘                               └── kernels and libraries, loaded once
//! ```
//!
//! Opening a device that is already open in this process returns a handle to the same thread, so there is one
//! context and no kernel is loaded twice. The owner ends with its last model. Calls of all models run in
//! order of arrival. Each model has its own stream, so the device may run steps of several models at once.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use refrain_driver::{Context, Device, DeviceKind, DriverError, WeakDevice, WeakWorker, Worker};
use refrain_kernels::{KernelLoadOptions, Kernels};

use crate::device_model::DeviceModel;
use crate::error::{CudaError, HeldBytes};
use crate::options::{CublasLt, CudaOptions};
use crate::prefill::ProductLibrary;
use crate::profile::SharedTimeline;
use crate::pump::Pump;

/// Id of a model on a device thread; never reused there.
pub(crate) type ModelId = u64;

/// State of the device thread.
pub(crate) struct DeviceOwner {
    // Dropped before what they use.
    models: BTreeMap<ModelId, DeviceModel>,
    n_models: ModelId,
    supplies: Vec<Rc<Supplies>>,
    ctx: Context,
}

/// Kernels and libraries, shared by models with the same load options.
pub(crate) struct Supplies {
    wanted: (KernelLoadOptions, CublasLt),
    pub(crate) kernels: Kernels,
    pub(crate) products: ProductLibrary,
}

/// Device threads of this process that still have a handle.
static OWNERS: Mutex<Vec<KnownOwner>> = Mutex::new(Vec::new());

struct KnownOwner {
    /// How the device was opened, if it may be shared with others who open it the same way.
    kind: Option<DeviceKind>,
    device: WeakDevice,
    worker: WeakWorker<DeviceOwner>,
}

/// Whether two kinds name the same device. A simulated device with faults is private to whoever requested the
/// faults.
fn is_same_kind(a: &DeviceKind, b: &DeviceKind) -> bool {
    match (a, b) {
        (DeviceKind::Cuda(a), DeviceKind::Cuda(b)) => a == b,
        (DeviceKind::Sim(a), DeviceKind::Sim(b)) => a == b && a.faults.is_empty(),
        (DeviceKind::Cuda(_), DeviceKind::Sim(_)) | (DeviceKind::Sim(_), DeviceKind::Cuda(_)) => false,
    }
}

/// How the caller names a device.
pub(crate) enum DeviceRef<'a> {
    /// By kind.
    Kind(DeviceKind),
    /// An already open device.
    Device(&'a Device),
}

/// A handle to the thread that owns a device; the thread is started if there is none.
pub(crate) fn attach(opened: DeviceRef<'_>, limit: Duration) -> Result<Worker<DeviceOwner>, CudaError> {
    // Held to the end, so that concurrent calls find this device.
    let mut owners = OWNERS.lock().unwrap_or_else(PoisonError::into_inner);
    owners.retain(|known| known.worker.is_alive());
    // Upgrade only the matching handle: whoever drops the last handle of a thread waits for its end.
    let is_it = |known: &&KnownOwner| match &opened {
        DeviceRef::Kind(kind) => known.kind.as_ref().is_some_and(|known| is_same_kind(known, kind)),
        DeviceRef::Device(device) => known.device.refers_to(device),
    };
    if let Some(worker) = owners.iter().filter(is_it).find_map(|known| known.worker.upgrade()) {
        return Ok(worker);
    }
    let (device, kind) = match opened {
        DeviceRef::Device(device) => (device.clone(), None),
        DeviceRef::Kind(kind) => {
            let device = match kind.clone() {
                DeviceKind::Sim(sim) => refrain_kernels::simulated(sim),
                cuda @ DeviceKind::Cuda(_) => Device::open(cuda),
            };
            (device.map_err(CudaError::driver("opening the device"))?, Some(kind))
        }
    };
    let worker = device.spawn(limit, |ctx| Ok(DeviceOwner::new(ctx)));
    let worker = worker.map_err(CudaError::driver("starting the device thread"))?;
    owners.push(KnownOwner { kind, device: device.downgrade(), worker: worker.downgrade() });
    Ok(worker)
}

impl DeviceOwner {
    fn new(ctx: &Context) -> DeviceOwner {
        DeviceOwner { models: BTreeMap::new(), n_models: 0, supplies: Vec::new(), ctx: ctx.clone() }
    }

    /// Adds a model, without weights or states.
    pub(crate) fn admit(
        &mut self,
        options: CudaOptions,
        pump: Arc<Pump>,
        timeline: SharedTimeline,
    ) -> Result<ModelId, CudaError> {
        let supplies = self.supplies(&options)?;
        let device_model = DeviceModel::new(&self.ctx, supplies, options, pump, timeline)?;
        self.n_models += 1;
        self.models.insert(self.n_models, device_model);
        Ok(self.n_models)
    }

    /// Removes a model and frees what it holds.
    pub(crate) fn release(&mut self, id: ModelId) {
        self.models.remove(&id);
    }

    pub(crate) fn device_model(&mut self, id: ModelId) -> Option<&mut DeviceModel> {
        self.models.get_mut(&id)
    }

    /// Whether `shown` is what other models hold, without an allocation.
    pub(crate) fn is_held(&self, id: ModelId, shown: &[HeldBytes]) -> bool {
        let others = self.models.iter().filter(|(other, _)| **other != id);
        let held = others.map(|(_, m)| (m.options.model.as_str(), m.held_bytes())).filter(|held| held.1 > 0);
        held.eq(shown.iter().map(|held| (held.model.as_str(), held.bytes)))
    }

    /// Memory that other models hold on the device.
    pub(crate) fn others(&self, id: ModelId) -> Vec<HeldBytes> {
        let others = self.models.iter().filter(|(other, _)| **other != id);
        let held = |device_model: &DeviceModel| HeldBytes {
            model: device_model.options.model.clone(),
            bytes: device_model.held_bytes(),
        };
        others.map(|(_, device_model)| held(device_model)).filter(|held| held.bytes > 0).collect()
    }

    /// Adds what other models hold to an out-of-memory error.
    pub(crate) fn explain(&self, mut error: CudaError, id: ModelId) -> CudaError {
        if let CudaError::DoesNotFit(refusal) = &mut error {
            refusal.others = self.others(id);
        }
        error
    }

    fn supplies(&mut self, options: &CudaOptions) -> Result<Rc<Supplies>, CudaError> {
        let wanted = (options.kernels.clone(), options.cublaslt.clone());
        if let Some(known) = self.supplies.iter().find(|supplies| supplies.wanted == wanted) {
            return Ok(Rc::clone(known));
        }
        let kernels =
            Kernels::load(&self.ctx, &options.kernels).map_err(|e| CudaError::Kernels(Arc::new(e)))?;
        let products = ProductLibrary::open(&self.ctx, &options.cublaslt);
        let supplies = Rc::new(Supplies { wanted, kernels, products });
        self.supplies.push(Rc::clone(&supplies));
        Ok(supplies)
    }
}

/// Flattens the result of a call: the thread may not have answered, or may have answered with an error.
pub(crate) fn answered<R>(
    what: &'static str,
    answer: Result<Result<R, CudaError>, DriverError>,
) -> Result<R, CudaError> {
    answer.unwrap_or_else(|source| Err(CudaError::Driver { step: what.to_owned(), source }))
}
