//! Plans of a model's steps on a device.

use crate::engines::{EngineCapacity, MonitoredEngine, lone_engine, table_needs};
use crate::error::Error;
use crate::model::{adapted, one_line};
use crate::placement::{ExpertNeeds, ExpertPlacement, TableNeeds, TablePlacement};
use crate::session::SessionOptions;
use refrain_cuda::{Monitor, Status};
use refrain_engine::{Engine, RunnerOptions};
use refrain_formats::ModelFiles;
use refrain_graph::Plan;
use std::borrow::Cow;
use std::path::Path;
use std::sync::Arc;

/// A model on a device, without a tokenizer: its steps can be planned and compiled, but it cannot generate text.
pub struct Planner {
    name: String,
    engine: Engine,
    context: usize,
    monitor: Option<Monitor>,
    table: Option<(TableNeeds, TablePlacement)>,
    experts: Option<(ExpertNeeds, ExpertPlacement)>,
}

impl Planner {
    /// Loads a model onto a device.
    pub fn new(files: &ModelFiles, options: &SessionOptions) -> Result<Planner, Error> {
        Planner::of(files, refrain_models::Model::load(files)?, options)
    }

    /// As [`Planner::new`], with a LoRA adapter.
    pub fn with_lora(
        files: &ModelFiles,
        folder: &Path,
        scale: f64,
        options: &SessionOptions,
    ) -> Result<Planner, Error> {
        let weights = refrain_models::Model::load(files)?;
        Planner::of(files, adapted(&weights, folder, scale)?, options)
    }

    fn of(
        files: &ModelFiles,
        weights: refrain_models::Model,
        options: &SessionOptions,
    ) -> Result<Planner, Error> {
        let name = weights.config().name.clone().unwrap_or_else(|| files.path().display().to_string());
        let name = one_line(&name);
        let weights = Arc::new(weights);
        let (
            MonitoredEngine { engine, monitor, table, experts },
            EngineCapacity { context, n_positions, .. },
        ) = lone_engine(&weights, &name, options, EngineCapacity::of_one)?;
        let runner =
            RunnerOptions { context, n_positions, kv_dtype: options.kv_dtype, ..RunnerOptions::default() };
        let table = table_needs(&weights, &runner).zip(table);
        let experts = ExpertNeeds::of(&weights).zip(experts);
        Ok(Planner { name, engine, context, monitor, table, experts })
    }

    /// Size and placement of the experts; `None` if the model has none or runs on the CPU.
    pub fn experts(&self) -> Option<(ExpertNeeds, ExpertPlacement)> {
        self.experts
    }

    /// Size and placement of the per-layer embedding table; `None` if the model has none or runs on the CPU.
    pub fn table(&self) -> Option<(TableNeeds, TablePlacement)> {
        self.table
    }

    /// The model's name from its metadata, or the path of its file.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Name of the backend.
    pub fn backend(&self) -> &'static str {
        self.engine.backend()
    }

    /// Maximum number of tokens in a sequence.
    pub fn context(&self) -> usize {
        self.context
    }

    /// Plans a step over `n_tokens` tokens.
    pub fn plan(&self, n_tokens: usize) -> Result<Plan, Error> {
        Ok(self.engine.plan(n_tokens)?)
    }

    /// The kernels of that plan, each with the index of the (first) plan step that it runs.
    pub fn kernels(&self, n_tokens: usize) -> Result<Vec<(usize, Cow<'static, str>)>, Error> {
        Ok(self.engine.kernels(n_tokens)?)
    }

    /// Memory and graphs of a CUDA device, real or simulated; `None` on the CPU.
    pub fn device_status(&self) -> Option<Status> {
        self.monitor.as_ref().map(Monitor::status)
    }
}
