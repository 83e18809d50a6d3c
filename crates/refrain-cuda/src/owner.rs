//! The one owner of a device in a process: its context, its thread, its loaded kernels, and the models on it.
//!
//! ```text
//! CudaBackend (a model) ──┐                               ┌── Machine: weights, states, programs, graphs, stream
//! CudaBackend (a model) ──┼──► device thread: DeviceOwner ┤   Machine
//! CudaBackend (a model) ──┘                               └── kernels and libraries, loaded once
//! ```
//!
//! Who opens a device that somebody in this process has open gets a handle to the same thread: no second context is made
//! and no kernel is loaded twice. The owner goes with its last model. What models send is done in the order in which it
//! comes; each has a stream of its own, so the device may run steps of several at once.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use refrain_driver::{Context, Device, DeviceKind, DriverError, WeakDevice, WeakWorker, Worker};
use refrain_kernels::{Kernels, LoadOptions};

use crate::error::{CudaError, HeldBytes};
use crate::machine::Machine;
use crate::options::{CublasLt, CudaOptions};
use crate::prefill::Products;
use crate::profile::SharedTimeline;
use crate::pump::Pump;

/// Names a model on a device thread; never used twice there.
pub(crate) type ModelId = u64;

/// What the device thread holds.
pub(crate) struct DeviceOwner {
    // Before what they use.
    machines: BTreeMap<ModelId, Machine>,
    n_models: ModelId,
    supplies: Vec<Rc<Supplies>>,
    ctx: Context,
}

/// Kernels and libraries that models share which want them from the same places.
pub(crate) struct Supplies {
    wanted: (LoadOptions, CublasLt),
    pub(crate) kernels: Kernels,
    pub(crate) products: Products,
}

/// Device threads of this process that have a handle.
static OWNERS: Mutex<Vec<KnownOwner>> = Mutex::new(Vec::new());

struct KnownOwner {
    /// How it was opened, where it may be opened that way again.
    kind: Option<DeviceKind>,
    device: WeakDevice,
    worker: WeakWorker<DeviceOwner>,
}

/// Whether two ways to open a device lead to the same one. A simulated device with faults belongs to who asked for them.
fn is_same_kind(a: &DeviceKind, b: &DeviceKind) -> bool {
    match (a, b) {
        (DeviceKind::Cuda(a), DeviceKind::Cuda(b)) => a == b,
        (DeviceKind::Sim(a), DeviceKind::Sim(b)) => a == b && a.faults.is_empty(),
        (DeviceKind::Cuda(_), DeviceKind::Sim(_)) | (DeviceKind::Sim(_), DeviceKind::Cuda(_)) => false,
    }
}

/// Who opens a device.
pub(crate) enum DeviceRef<'a> {
    /// By what it is.
    Kind(DeviceKind),
    /// It is open already.
    Device(&'a Device),
}

/// A handle to the thread that owns a device, which is started if there is none.
pub(crate) fn attach(opened: DeviceRef<'_>, limit: Duration) -> Result<Worker<DeviceOwner>, CudaError> {
    // Held to the end: who opens the same device meanwhile finds this one.
    let mut owners = OWNERS.lock().unwrap_or_else(PoisonError::into_inner);
    owners.retain(|known| known.worker.is_alive());
    // Only the one that is asked for gets a further handle: whoever drops the last one waits for the end of the thread.
    let is_it = |known: &&KnownOwner| match &opened {
        DeviceRef::Kind(kind) => known.kind.as_ref().is_some_and(|known| is_same_kind(known, kind)),
        DeviceRef::Device(device) => known.device.is(device),
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
        DeviceOwner { machines: BTreeMap::new(), n_models: 0, supplies: Vec::new(), ctx: ctx.clone() }
    }

    /// Takes in a model, which has nothing yet.
    pub(crate) fn admit(
        &mut self,
        options: CudaOptions,
        pump: Arc<Pump>,
        timeline: SharedTimeline,
    ) -> Result<ModelId, CudaError> {
        let supplies = self.supplies(&options)?;
        let machine = Machine::new(&self.ctx, supplies, options, pump, timeline)?;
        self.n_models += 1;
        self.machines.insert(self.n_models, machine);
        Ok(self.n_models)
    }

    /// Lets a model go, with all that it holds.
    pub(crate) fn release(&mut self, id: ModelId) {
        self.machines.remove(&id);
    }

    pub(crate) fn machine(&mut self, id: ModelId) -> Option<&mut Machine> {
        self.machines.get_mut(&id)
    }

    /// What other models hold on the device.
    pub(crate) fn others(&self, id: ModelId) -> Vec<HeldBytes> {
        let others = self.machines.iter().filter(|(other, _)| **other != id);
        let held = |machine: &Machine| HeldBytes {
            model: machine.options.model.clone(),
            bytes: machine.held_bytes(),
        };
        others.map(|(_, machine)| held(machine)).filter(|held| held.bytes > 0).collect()
    }

    /// Adds to an error about memory what other models hold.
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
        let products = Products::open(&self.ctx, &options.cublaslt);
        let supplies = Rc::new(Supplies { wanted, kernels, products });
        self.supplies.push(Rc::clone(&supplies));
        Ok(supplies)
    }
}

/// The error of a call to a thread that did not answer, or whose answer is an error.
pub(crate) fn answered<R>(
    what: &'static str,
    answer: Result<Result<R, CudaError>, DriverError>,
) -> Result<R, CudaError> {
    answer.unwrap_or_else(|source| Err(CudaError::Driver { step: what.to_owned(), source }))
}
