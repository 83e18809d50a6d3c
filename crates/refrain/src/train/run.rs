//! A training run on its device, from the first step to the exported files.

use crate::error::Error;
use crate::train::export::{Exported, Exporter};
use crate::train::open::{GraphUse, WithBackend, with_backend};
use crate::train::sample::Sampler;
use crate::train::setup::Training;
use refrain_cuda::{Monitor, Status};
use refrain_graph::Backend;
use refrain_report::thousands;
use refrain_train::TrainError;
use refrain_train::trainer::{TrainEvent, TrainSummary, Trainer};
use std::path::PathBuf;

/// Result of a run.
#[derive(Debug)]
pub struct Finished {
    /// How it ended.
    pub summary: TrainSummary,
    /// The page with its curves, if the run has a folder.
    pub report: Option<PathBuf>,
    /// The exported model; empty if the run was interrupted.
    pub exports: Vec<Exported>,
    /// Errors of exports that failed.
    pub not_exported: Vec<Error>,
    /// Memory, graphs and timings of a CUDA device, real or simulated; `None` on the CPU.
    pub device: Option<Status>,
}

impl Training {
    /// Trains to the last step, or until `stop` returns true between two steps. A stopped run saves a checkpoint.
    pub fn run(
        self,
        stop: &dyn Fn() -> bool,
        observe: &mut dyn FnMut(&TrainEvent<'_>),
    ) -> Result<Finished, Error> {
        self.check_memory()?;
        let (device, on_load) = (self.options.device.clone(), self.options.on_load.clone());
        let choice = self.options.graph_choice.clone();
        let (choice, verify_every) = (choice.as_ref(), self.options.verify_every);
        let graphs = GraphUse { choice, verify_every, ahead: None };
        with_backend(&device, on_load, graphs, TrainingRun { training: self, stop, observe })
    }
}

struct TrainingRun<'r> {
    training: Training,
    stop: &'r dyn Fn() -> bool,
    observe: &'r mut dyn FnMut(&TrainEvent<'_>),
}

impl WithBackend for TrainingRun<'_> {
    type Output = Finished;

    fn call<B: Backend + 'static>(self, backend: B, monitor: Option<Monitor>) -> Result<Finished, Error> {
        let TrainingRun { training, stop, observe } = self;
        let name = backend.name();
        let Training { config, model, form, tokenizer, data, device_name, options, .. } = training;
        let mut trainer = Trainer::new(backend, model.clone(), config, data)?;
        if let Some(path) = trainer.resumed() {
            observe(&TrainEvent::Resumed { path, step: trainer.n_done() });
        }
        let sampler = Sampler::new(trainer.config(), &tokenizer);
        let mut interrupted = false;
        let ran = loop {
            if trainer.is_done() {
                break Ok(());
            }
            if stop() {
                interrupted = true;
                break trainer.save(false, observe).map_err(Error::from);
            }
            if let Err(error) = trainer.advance(observe) {
                break Err(error.into());
            }
            if sampler.is_due(trainer.n_done(), trainer.is_done()) {
                let text = sampler.text(trainer.learner())?;
                observe(&TrainEvent::Sampled { step: trainer.n_done(), text: &text });
            }
        };
        // A failed run gets its report too: the curves show where it went wrong.
        let facts = facts(&trainer, &device_name, name).into_iter().chain(options.facts).collect();
        let report = trainer.write_report(&title(&trainer), facts);
        ran?;
        let exporter = Exporter { form: &form, tokenizer: &tokenizer };
        let (exports, not_exported) = match interrupted {
            true => (Vec::new(), Vec::new()),
            false => exporter.export(&trainer)?,
        };
        Ok(Finished {
            summary: trainer.summary(interrupted),
            report: report?,
            exports,
            not_exported,
            device: monitor.map(|monitor| monitor.status()),
        })
    }
}

fn title<B: Backend>(trainer: &Trainer<B>) -> String {
    let config = trainer.config();
    let out =
        config.out.as_ref().and_then(|out| out.file_name()).map(|name| name.to_string_lossy().into_owned());
    out.unwrap_or_else(|| "A run".into())
}

/// The facts above the curves of the report.
fn facts<B: Backend>(trainer: &Trainer<B>, device: &str, backend: &str) -> Vec<(String, String)> {
    let (config, model) = (trainer.config(), trainer.learner().model());
    let start = match (&config.from, model.config().name.as_deref()) {
        (Some(from), _) => format!("from {from}"),
        (None, Some(shape)) => format!("new, {shape}"),
        (None, None) => "new".into(),
    };
    let summary = trainer.summary(false);
    let trained = match &config.lora {
        Some(lora) => {
            format!(", {} of them trained (LoRA, rank {})", thousands(model.n_trained()), lora.spec().rank)
        }
        None => String::new(),
    };
    let model =
        format!("{}, {} parameters{trained}, {start}", model.config().arch, thousands(model.n_parameters()));
    let ran = format!(
        "{} replayed, {} eager, {} not applied",
        thousands(summary.n_replayed),
        thousands(summary.n_eager),
        thousands(summary.n_skipped)
    );
    [("model", model), ("device", format!("{device} ({backend})")), ("micro-steps", ran)]
        .map(|(name, value)| (name.to_owned(), value))
        .to_vec()
}

impl From<refrain_train::learner::LearnError> for Error {
    fn from(error: refrain_train::learner::LearnError) -> Error {
        TrainError::from(error).into()
    }
}
