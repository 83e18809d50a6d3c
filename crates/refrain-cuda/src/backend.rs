//! The device behind the [`Backend`] trait.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use refrain_driver::{Device, DeviceKind, DriverError, Worker};
use refrain_graph::{
    Backend, CompileError, Graph, Io, Plan, PlanOptions, Query, Ran, RunError, State, Support, Weight,
};
use refrain_tensor::{DType, HostTensor};

use crate::error::CudaError;
use crate::lower;
use crate::machine::{Machine, ProgramId};
use crate::options::CudaOptions;
use crate::status::Status;

/// Runs graphs of one model on one CUDA device, or on the simulated one.
///
/// The device belongs to a thread of its own; every call is sent there and has a deadline. A backend serves one model:
/// loading weights or allocating states again replaces those before, and what was compiled for them is refused.
pub struct CudaBackend {
    worker: Worker<Holder>,
    options: CudaOptions,
    ids: AtomicU64,
    /// Weights and states that calls must come with.
    current: Mutex<Current>,
    /// Programs whose owner is gone.
    retired: Arc<Mutex<Vec<ProgramId>>>,
    status: Arc<Mutex<Status>>,
    /// Outputs of the last step that were fetched along with another.
    fetched: Vec<(ProgramId, usize, Vec<u8>)>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Current {
    weights: u64,
    states: u64,
}

/// The machine, or why there is none.
struct Holder(Result<Machine, CudaError>);

/// A model's weights on a [`CudaBackend`].
#[derive(Debug)]
pub struct CudaWeights {
    id: u64,
    /// How they lie on the device, with the bytes of each layout.
    layouts: Vec<(String, usize)>,
}

/// A model's states on a [`CudaBackend`].
#[derive(Debug)]
pub struct CudaStates(u64);

/// A graph made ready for a [`CudaBackend`]. Dropping it frees its recordings.
pub struct CudaCompiled {
    id: ProgramId,
    plan: Arc<Plan>,
    retired: Arc<Mutex<Vec<ProgramId>>>,
}

impl Drop for CudaCompiled {
    fn drop(&mut self) {
        lock(&self.retired).push(self.id);
    }
}

/// A view of a backend's [`Status`] that stays valid when the backend has gone elsewhere.
#[derive(Clone)]
pub struct Monitor(Arc<Mutex<Status>>);

impl Monitor {
    /// The status as of the last plan compiled or step run.
    #[must_use]
    pub fn status(&self) -> Status {
        lock(&self.0).clone()
    }
}

impl CudaBackend {
    /// Opens a device and loads the kernels.
    pub fn open(kind: DeviceKind, options: CudaOptions) -> Result<CudaBackend, CudaError> {
        let device = match kind {
            DeviceKind::Sim(sim) => refrain_kernels::simulated(sim),
            DeviceKind::Cuda(_) => Device::open(kind),
        };
        CudaBackend::on(&device.map_err(CudaError::driver("opening the device"))?, options)
    }

    /// On a device that is open. A simulated one must know the kernels' twins.
    pub fn on(device: &Device, options: CudaOptions) -> Result<CudaBackend, CudaError> {
        let sent = options.clone();
        let mut worker = device
            .spawn(options.load_limit, move |ctx| Ok(Holder(Machine::new(ctx, sent))))
            .map_err(CudaError::driver("starting the device thread"))?;
        worker.set_call_limit(options.call_limit);
        let backend = CudaBackend {
            worker,
            options,
            ids: AtomicU64::new(1),
            current: Mutex::default(),
            retired: Arc::default(),
            status: Arc::default(),
            fetched: Vec::new(),
        };
        backend.call("starting", backend.options.load_limit, |_| Ok(()))?;
        Ok(backend)
    }

    /// What it holds and has done, from anywhere.
    #[must_use]
    pub fn monitor(&self) -> Monitor {
        Monitor(Arc::clone(&self.status))
    }

    /// The device.
    #[must_use]
    pub fn device(&self) -> &Device {
        self.worker.device()
    }

    fn id(&self) -> u64 {
        self.ids.fetch_add(1, Ordering::Relaxed)
    }

    fn call<R: Send + 'static>(
        &self,
        what: &'static str,
        limit: Duration,
        f: impl FnOnce(&mut Machine) -> Result<R, CudaError> + Send + 'static,
    ) -> Result<R, CudaError> {
        let retired = std::mem::take(&mut *lock(&self.retired));
        let status = Arc::clone(&self.status);
        let answer = self.worker.call(what, limit, move |holder| {
            let machine = match &mut holder.0 {
                Ok(machine) => machine,
                Err(error) => return Ok(Err(error.clone())),
            };
            retired.into_iter().for_each(|id| machine.drop_program(id));
            let result = f(machine);
            let mut shown = lock(&status);
            let now = machine.stats();
            // A step seldom changes what graphs there are.
            let same = [now.recorded, now.demoted] == [shown.cache.recorded, shown.cache.demoted];
            if same && (what == STEP || what == READ) {
                shown.cache = now;
                if !machine.profile().is_empty() {
                    shown.profile = machine.profile().to_vec();
                }
            } else {
                *shown = machine.status();
            }
            drop(shown);
            Ok(result)
        });
        answer.unwrap_or_else(|source: DriverError| Err(CudaError::Driver { step: what.to_owned(), source }))
    }

    fn run_error(&self, label: &str) -> impl FnOnce(CudaError) -> RunError {
        let (backend, label) = (self.name(), label.to_owned());
        move |error| {
            if error.is_final() {
                let (code, label) = (error.code().unwrap_or(0), error.sent_last().unwrap_or(label));
                return RunError::ContextLost { backend, label, code, source: Box::new(error) };
            }
            match error {
                CudaError::OutOfRange { label, what, got, limit } => {
                    RunError::OutOfRange { label, what, got, limit }
                }
                CudaError::Host { label, because } => {
                    RunError::Host { label, source: refrain_graph::HostCallError(because) }
                }
                CudaError::Mismatch { what, because } => RunError::Mismatch { what, because },
                error @ (CudaError::Required { .. }
                | CudaError::Driver { .. }
                | CudaError::DoesNotFit { .. }
                | CudaError::ArenaTooLarge { .. }
                | CudaError::NoKernel { .. }
                | CudaError::Kernels(_)
                | CudaError::TooFewCases { .. }) => {
                    RunError::Backend { backend, label, source: Box::new(error) }
                }
            }
        }
    }
}

const STEP: &str = "a step";
const READ: &str = "reading results";

impl Backend for CudaBackend {
    type Weights = CudaWeights;
    type States = CudaStates;
    type Compiled = CudaCompiled;

    fn name(&self) -> &'static str {
        self.worker.device().backend()
    }

    fn buckets(&self) -> &[usize] {
        &self.options.buckets
    }

    fn supports(&self, query: &Query<'_>) -> Support {
        lower::supports(query)
    }

    fn load(&self, weights: &[Weight], tensors: Vec<HostTensor>) -> Result<CudaWeights, RunError> {
        let mismatch = |because| RunError::Mismatch { what: "weights", because };
        if weights.len() != tensors.len() {
            return Err(mismatch(format!("{} are declared, {} were given", weights.len(), tensors.len())));
        }
        for (weight, tensor) in weights.iter().zip(&tensors) {
            if weight.ty.dtype != tensor.dtype() || weight.ty.shape != tensor.shape() {
                let given = format!("{}{}", tensor.dtype(), tensor.shape());
                return Err(mismatch(format!("{} is {given}, must be {}", weight.name, weight.ty)));
            }
        }
        let layouts = layouts(weights);
        let (id, weights) = (self.id(), weights.to_vec());
        let loaded = self.call("loading weights", self.options.load_limit, move |m| m.load(weights, tensors));
        loaded.map_err(self.run_error("loading weights"))?;
        lock(&self.current).weights = id;
        Ok(CudaWeights { id, layouts })
    }

    fn allocate(&self, states: &[State]) -> Result<CudaStates, RunError> {
        let (id, states) = (self.id(), states.to_vec());
        let made = self.call("allocating states", self.options.load_limit, move |m| m.allocate(states));
        made.map_err(self.run_error("allocating states"))?;
        lock(&self.current).states = id;
        Ok(CudaStates(id))
    }

    fn compile(&self, graph: &Graph) -> Result<CudaCompiled, CompileError> {
        self.check(graph)?;
        let plan = Arc::new(Plan::new(graph, PlanOptions::default())?);
        let (id, sent) = (self.id(), Arc::clone(&plan));
        let (weights, states) = (graph.weights().to_vec(), graph.states().to_vec());
        let compiled = self.call("compiling a plan", self.options.compile_limit, move |m| {
            m.check_model(&weights, &states)?;
            m.compile(id, sent)
        });
        let backend = self.name();
        compiled.map_err(|error| match error {
            CudaError::NoKernel { op, label, because } => {
                CompileError::Unsupported { backend, op, label, because }
            }
            CudaError::ArenaTooLarge { need_bytes, limit_bytes } => {
                CompileError::TooLarge { need_bytes: need_bytes as usize, limit_bytes: limit_bytes as usize }
            }
            error @ (CudaError::Required { .. }
            | CudaError::Driver { .. }
            | CudaError::DoesNotFit { .. }
            | CudaError::Mismatch { .. }
            | CudaError::Host { .. }
            | CudaError::OutOfRange { .. }
            | CudaError::Kernels(_)
            | CudaError::TooFewCases { .. }) => CompileError::Backend { backend, source: Arc::new(error) },
        })?;
        Ok(CudaCompiled { id, plan, retired: Arc::clone(&self.retired) })
    }

    fn plan<'c>(&self, compiled: &'c CudaCompiled) -> &'c Plan {
        &compiled.plan
    }

    fn run(&mut self, compiled: &mut CudaCompiled, io: Io<'_, CudaBackend>) -> Result<Ran, RunError> {
        self.fetched.clear();
        let mismatch = |what, because: &str| Err(RunError::Mismatch { what, because: because.to_owned() });
        let current = *lock(&self.current);
        if io.weights.id != current.weights {
            return mismatch("weights", "others were loaded since");
        }
        if io.states.0 != current.states {
            return mismatch("states", "others were allocated since");
        }
        let need = compiled.plan.control().bytes();
        if io.control.len() != need {
            return mismatch("inputs", &format!("{need} bytes are needed, got {}", io.control.len()));
        }
        let (id, control) = (compiled.id, io.control.to_vec());
        let ran = self.call(STEP, self.options.step_limit, move |m| m.run(id, &control));
        let (ran, found) = ran.map_err(self.run_error("a step"))?;
        self.fetched.extend(found.into_iter().map(|(idx, bytes)| (id, idx, bytes)));
        Ok(ran)
    }

    fn read(&mut self, compiled: &CudaCompiled, output: usize, into: &mut [u8]) -> Result<(), RunError> {
        let id = compiled.id;
        let find = |fetched: &[(ProgramId, usize, Vec<u8>)]| {
            fetched.iter().position(|(of, idx, _)| *of == id && *idx == output)
        };
        if find(&self.fetched).is_none() {
            let found = self.call(READ, self.options.step_limit, move |m| m.read(id, output));
            let found = found.map_err(self.run_error("reading results"))?;
            self.fetched.extend(found.into_iter().map(|(idx, bytes)| (id, idx, bytes)));
        }
        let Some(at) = find(&self.fetched) else {
            let because = format!("the plan has no output {output}");
            return Err(RunError::Mismatch { what: "outputs", because });
        };
        let bytes = &self.fetched[at].2;
        if bytes.len() != into.len() {
            let because = format!("output {output} has {} bytes, {} were asked for", bytes.len(), into.len());
            return Err(RunError::Mismatch { what: "outputs", because });
        }
        into.copy_from_slice(bytes);
        Ok(())
    }

    fn layouts(&self, weights: &CudaWeights) -> Vec<(String, usize)> {
        weights.layouts.clone()
    }
}

/// Matrices as in the file, vectors as F32.
fn layouts(weights: &[Weight]) -> Vec<(String, usize)> {
    let mut layouts: Vec<(String, usize)> = Vec::new();
    for weight in weights {
        let is_vector = weight.ty.shape.rank() < 2;
        let dtype = if is_vector { DType::F32 } else { weight.ty.dtype };
        let name = if is_vector { "vectors as F32".to_owned() } else { format!("{dtype} as in the file") };
        let bytes = dtype.bytes_for(weight.ty.shape.n_elements()).unwrap_or(0);
        match layouts.iter_mut().find(|(known, _)| *known == name) {
            Some((_, sum)) => *sum += bytes,
            None => layouts.push((name, bytes)),
        }
    }
    layouts
}

impl std::fmt::Debug for CudaBackend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "CudaBackend on {:?}", self.worker.device())
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
