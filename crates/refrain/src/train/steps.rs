//! The step API on any device, for custom training loops.

use crate::error::Error;
use crate::session::Device;
use crate::train::open::{GraphUse, WithBackend, with_backend};
use refrain_cuda::{LoadListener, Monitor, Status};
use refrain_graph::{Backend, Plan};
use refrain_models::{Model as Weights, TrainSpec};
use refrain_train::learner::{AdamSettings, BatchRows, LearnError, Learner, StepOutcome};
use std::sync::Arc;

pub use refrain_train::flops::step_flops as train_flops;

/// Trains a model on a device, one step at a time.
pub struct StepLearner {
    learner: Box<dyn AnyLearner>,
    monitor: Option<Monitor>,
}

impl std::fmt::Debug for StepLearner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StepLearner").field("backend", &self.learner.backend()).finish_non_exhaustive()
    }
}

impl StepLearner {
    /// Loads a model onto a device. A step has `n_batches` batches of `spec.n_tokens` rows.
    pub fn new(
        model: Arc<Weights>,
        device: &Device,
        spec: TrainSpec,
        n_batches: usize,
    ) -> Result<StepLearner, Error> {
        StepLearner::with_listener(model, device, spec, n_batches, LoadListener::default())
    }

    /// As [`StepLearner::new`], with a listener for the progress of a CUDA device.
    pub fn with_listener(
        model: Arc<Weights>,
        device: &Device,
        spec: TrainSpec,
        n_batches: usize,
        on_load: LoadListener,
    ) -> Result<StepLearner, Error> {
        StepLearner::open((model, spec, n_batches), device, on_load, GraphUse::default())
    }

    /// As [`StepLearner::with_listener`], with graph options.
    pub(super) fn open(
        (model, spec, n_batches): (Arc<Weights>, TrainSpec, usize),
        device: &Device,
        on_load: LoadListener,
        graphs: GraphUse<'_>,
    ) -> Result<StepLearner, Error> {
        with_backend(device, on_load, graphs, OpenLearner { model, spec, n_batches })
    }

    /// Name of the backend.
    pub fn backend(&self) -> &'static str {
        self.learner.backend()
    }

    /// Maximum number of steps in flight; 1 on the CPU.
    pub fn depth(&self) -> usize {
        self.learner.depth()
    }

    /// Queues a step after those in flight without waiting for it, if the device can; up to [`StepLearner::depth`] may be in
    /// flight. [`StepLearner::collect`] returns its outcome.
    pub fn queue(
        &mut self,
        batches: &[BatchRows<'_>],
        adam: &AdamSettings,
        random: [u32; 4],
    ) -> Result<(), Error> {
        Ok(self.learner.queue(batches, adam, random)?)
    }

    /// Waits for the oldest step in flight. After an error no step is in flight.
    pub fn collect(&mut self) -> Result<StepOutcome, Error> {
        Ok(self.learner.collect()?)
    }

    /// Runs one step: gradients of all batches, clipping, update. `random` seeds dropout. No step may be in flight.
    pub fn step(
        &mut self,
        batches: &[BatchRows<'_>],
        adam: &AdamSettings,
        random: [u32; 4],
    ) -> Result<StepOutcome, Error> {
        Ok(self.learner.step(batches, adam, random)?)
    }

    /// The summed loss of rows without training on them, and the number of rows with a target.
    pub fn evaluate(&mut self, rows: &BatchRows<'_>) -> Result<(f64, usize), Error> {
        Ok(self.learner.evaluate(rows)?)
    }

    /// The current model, with weights in F32.
    pub fn trained(&self) -> Result<Weights, Error> {
        Ok(self.learner.trained()?)
    }

    /// The plan of a whole step.
    pub fn plan(&self) -> &Plan {
        self.learner.plan()
    }

    /// Memory, graphs and timings of a CUDA device, real or simulated; `None` on the CPU.
    pub fn device_status(&self) -> Option<Status> {
        self.monitor.as_ref().map(Monitor::status)
    }
}

struct OpenLearner {
    model: Arc<Weights>,
    spec: TrainSpec,
    n_batches: usize,
}

impl WithBackend for OpenLearner {
    type Output = StepLearner;

    fn call<B: Backend + 'static>(self, backend: B, monitor: Option<Monitor>) -> Result<StepLearner, Error> {
        let learner = Learner::new(backend, self.model, self.spec, self.n_batches)?;
        Ok(StepLearner { learner: Box::new(learner), monitor })
    }
}

/// A learner on any backend.
trait AnyLearner {
    fn backend(&self) -> &'static str;
    fn depth(&self) -> usize;
    fn queue(
        &mut self,
        batches: &[BatchRows<'_>],
        adam: &AdamSettings,
        random: [u32; 4],
    ) -> Result<(), LearnError>;
    fn collect(&mut self) -> Result<StepOutcome, LearnError>;
    fn step(
        &mut self,
        batches: &[BatchRows<'_>],
        adam: &AdamSettings,
        random: [u32; 4],
    ) -> Result<StepOutcome, LearnError>;
    fn evaluate(&mut self, rows: &BatchRows<'_>) -> Result<(f64, usize), LearnError>;
    fn trained(&self) -> Result<Weights, LearnError>;
    fn plan(&self) -> &Plan;
}

impl<B: Backend> AnyLearner for Learner<B> {
    fn backend(&self) -> &'static str {
        Learner::backend(self).name()
    }

    fn depth(&self) -> usize {
        Learner::depth(self)
    }

    fn queue(
        &mut self,
        batches: &[BatchRows<'_>],
        adam: &AdamSettings,
        random: [u32; 4],
    ) -> Result<(), LearnError> {
        Learner::queue(self, batches, adam, random)
    }

    fn collect(&mut self) -> Result<StepOutcome, LearnError> {
        Learner::collect(self)
    }

    fn step(
        &mut self,
        batches: &[BatchRows<'_>],
        adam: &AdamSettings,
        random: [u32; 4],
    ) -> Result<StepOutcome, LearnError> {
        Learner::step(self, batches, adam, random)
    }

    fn evaluate(&mut self, rows: &BatchRows<'_>) -> Result<(f64, usize), LearnError> {
        Learner::evaluate(self, rows)
    }

    fn trained(&self) -> Result<Weights, LearnError> {
        Learner::trained(self)
    }

    fn plan(&self) -> &Plan {
        Learner::plan(self)
    }
}
