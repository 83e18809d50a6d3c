//! A model's steps on a device, to be looked at.

use crate::engines::{MonitoredEngine, Room, lone_engine, table_needs};
use crate::error::Error;
use crate::model::adapted;
use crate::placement::{TableNeeds, TablePlacement};
use crate::session::SessionOptions;
use refrain_cuda::{Monitor, Status};
use refrain_engine::{Engine, RunnerOptions};
use refrain_formats::ModelFiles;
use refrain_graph::Plan;
use std::borrow::Cow;
use std::path::Path;
use std::sync::Arc;

/// A model on a device without a tokenizer: its steps can be planned and compiled, not talked to.
pub struct Planner {
    name: String,
    engine: Engine,
    context: usize,
    monitor: Option<Monitor>,
    table: Option<(TableNeeds, TablePlacement)>,
}

impl Planner {
    /// Brings a model to a device.
    pub fn new(files: &ModelFiles, options: &SessionOptions) -> Result<Planner, Error> {
        Planner::of(files, refrain_models::Model::load(files)?, options)
    }

    /// The same with a LoRA adapter beside the model's weights.
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
        let weights = Arc::new(weights);
        let (MonitoredEngine { engine, monitor, table }, Room { context, n_positions, .. }) =
            lone_engine(&weights, &name, options, Room::of_one)?;
        let runner =
            RunnerOptions { context, n_positions, kv_dtype: options.kv_dtype, ..RunnerOptions::default() };
        let table = table_needs(&weights, &runner).zip(table);
        Ok(Planner { name, engine, context, monitor, table })
    }

    /// What the table of per-layer embeddings needs and where it lies; `None` where the model has none or it runs on the
    /// CPU.
    pub fn table(&self) -> Option<(TableNeeds, TablePlacement)> {
        self.table
    }

    /// The name the files give the model, or the file's.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Name of the backend.
    pub fn backend(&self) -> &'static str {
        self.engine.backend()
    }

    /// Tokens a sequence can have.
    pub fn context(&self) -> usize {
        self.context
    }

    /// The plan of a step over `n_tokens` tokens.
    pub fn plan(&self, n_tokens: usize) -> Result<Plan, Error> {
        Ok(self.engine.plan(n_tokens)?)
    }

    /// The kernels of that plan, each with the (first) step it runs.
    pub fn kernels(&self, n_tokens: usize) -> Result<Vec<(usize, Cow<'static, str>)>, Error> {
        Ok(self.engine.kernels(n_tokens)?)
    }

    /// Memory and graphs of a CUDA device, real or simulated; `None` on the CPU.
    pub fn device_status(&self) -> Option<Status> {
        self.monitor.as_ref().map(Monitor::status)
    }
}
