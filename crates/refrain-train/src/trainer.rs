//! A training run: batches, steps, held-out losses, checkpoints and the log.
//!
//! A run is a function of its configuration, its data and its weights. A run that was stopped and resumed
//! takes the same steps, bit for bit, as one that was not.
//!
//! Steps are launched ahead if the device supports it: up to [`Learner::depth`] are in flight, but none past
//! a step after which the states are read (a held-out loss, a checkpoint, a sample, the end). Outcomes are
//! collected in order. A step with non-finite gradients changes nothing on the device, so later steps run as
//! if it had not happened. A step that ends the run does so under its own number; the steps in flight after
//! it are neither logged nor saved.

use crate::checkpoint::{
    BestLoss, Checkpoint, CheckpointStore, FileSpec, FrozenBase, RandomState, RunProgress, RunState,
    SaveRequest, TensorSpec,
};
use crate::config::{Clip, Masters, Precision, Resume, TrainConfig};
use crate::data::{Batch, Corpus, DataPosition, Loader, LoaderOptions, Passes};
use crate::error::TrainError;
use crate::learner::{AdamSettings, BatchRows, Learner, StepOutcome};
use crate::log::{EvalRecord, LogLine, LogWriter, StepRecord};
use crate::report::{self, ReportHeader};
use crate::schedule::LrSchedule;
use crate::storage::{RealStorage, write_atomically};
use refrain_graph::{Backend, Ran, StateId};
use refrain_models::{Model, TrainSpec};
use refrain_tensor::DType;
use std::borrow::Cow;
use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

/// Maximum number of consecutive steps with non-finite gradients.
const MAX_SKIPPED: u64 = 20;
/// Batches prepared ahead of the running step.
const N_AHEAD: usize = 4;

const WEIGHTS: &str = "weights.safetensors";
const OPTIMISER: &str = "optimizer.safetensors";

/// An event of a run.
#[derive(Debug)]
#[non_exhaustive]
pub enum TrainEvent<'a> {
    /// The run resumes from a checkpoint.
    Resumed {
        /// Folder of the checkpoint.
        path: &'a Path,
        /// Completed steps.
        step: u64,
    },
    /// A step has completed.
    Step {
        /// Its log record.
        record: StepRecord,
        /// Its result, and how it ran.
        outcome: &'a StepOutcome,
    },
    /// The held-out loss was measured.
    Evaluated {
        /// Its log record.
        record: EvalRecord,
        /// Whether it is the lowest so far.
        is_best: bool,
    },
    /// A sample was generated with the current weights.
    Sampled {
        /// Completed steps.
        step: u64,
        /// The prompt and its completion.
        text: &'a str,
    },
    /// A checkpoint was saved.
    Saved {
        /// Folder of the checkpoint.
        path: &'a Path,
    },
}

/// Result of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct TrainSummary {
    /// Completed steps.
    pub step: u64,
    /// Whether it was stopped before its last step.
    pub interrupted: bool,
    /// Progress of the run.
    pub progress: RunProgress,
    /// Steps that were not applied because their gradients were not finite.
    pub n_skipped: u64,
    /// Micro-steps that were replayed.
    pub n_replayed: u64,
    /// Micro-steps that ran eagerly.
    pub n_eager: u64,
    /// The last checkpoint, if any was saved.
    pub checkpoint: Option<PathBuf>,
    /// The checkpoint with the lowest held-out loss, if any was saved.
    pub best_checkpoint: Option<PathBuf>,
}

/// Data of a run.
#[derive(Clone, Debug)]
pub struct TrainData {
    /// Training data.
    pub corpus: Arc<Corpus>,
    /// Held-out data.
    pub held_out: Option<Arc<Corpus>>,
}

/// Step specification of a configuration.
pub fn train_spec(config: &TrainConfig) -> TrainSpec {
    TrainSpec {
        n_tokens: config.batch * config.context,
        n_context: config.context,
        dtype: match config.dtype {
            Precision::F32 => DType::F32,
            Precision::Bf16 => DType::BF16,
        },
        masters: config.masters == Masters::F32,
        accumulates: config.accumulate > 1,
        dropout: config.dropout as f32,
        recompute: config.checkpoint_activations,
    }
}

/// A training run.
pub struct Trainer<B: Backend> {
    learner: Learner<B>,
    config: TrainConfig,
    schedule: LrSchedule,
    loader: Loader,
    held_out: Option<Arc<Corpus>>,
    store: Option<CheckpointStore>,
    log: Option<LogWriter>,
    resumed: Option<PathBuf>,
    base: Option<FrozenBase>,
    last_saved: Option<(u64, PathBuf)>,
    step: u64,
    progress: RunProgress,
    n_skipped: u64,
    n_skipped_in_row: u64,
    n_replayed: u64,
    n_eager: u64,
    /// Steps in flight, oldest first.
    in_flight: VecDeque<InFlightStep>,
    /// Why no more steps can be launched; reported once the steps in flight have completed.
    launch_error: Option<TrainError>,
    /// When the last step completed, or the first step in flight was launched.
    since: Instant,
    /// The step that failed the run.
    failed: Option<u64>,
}

/// A step in flight: its log data, and its rows for error messages.
struct InFlightStep {
    lr: f64,
    batches: Vec<Batch>,
}

impl<B: Backend> Trainer<B> {
    /// Prepares a run on a backend, from the model's weights or from the configured checkpoint.
    pub fn new(
        backend: B,
        model: Arc<Model>,
        config: TrainConfig,
        data: TrainData,
    ) -> Result<Trainer<B>, TrainError> {
        config.validate()?;
        let learner = Learner::new(backend, model.clone(), train_spec(&config), config.accumulate)?;
        let store = match &config.out {
            Some(out) => Some(CheckpointStore::open(out)?),
            None => None,
        };
        let from = match (&config.resume, &store) {
            (Resume::From(path), _) => Some(path.clone()),
            (Resume::Switch(true), Some(store)) => store.latest()?,
            (Resume::Switch(_), _) => None,
        };
        let checkpoint = from.as_deref().map(Checkpoint::open).transpose()?;
        // Reads the whole model, so it is only computed if it will be saved or compared.
        let is_kept = store.is_some() || checkpoint.is_some();
        let name = config.from.as_deref().or(model.config().name.as_deref()).unwrap_or("the model");
        let base = is_kept.then(|| FrozenBase::of(&model, name)).flatten();
        if let Some(checkpoint) = &checkpoint {
            checkpoint.expect_base(base.as_ref())?;
        }
        let state = checkpoint.as_ref().map(Checkpoint::state);
        let options = LoaderOptions {
            n_seqs: config.batch,
            seed: config.seed,
            passes: Passes::Endless,
            n_ahead: N_AHEAD,
        };
        let loader = Loader::new(data.corpus, options, state.map(|s| &s.position))?;
        let (step, progress) = state.map_or((0, RunProgress::default()), |s| (s.step, s.progress));
        let log_path = config.log.clone().or_else(|| config.out.as_ref().map(|out| out.join("log.jsonl")));
        let log = match &log_path {
            Some(path) if step > 0 => Some(LogWriter::resume(path, step)?),
            Some(path) => Some(LogWriter::create(path)?),
            None => None,
        };
        let mut trainer = Trainer {
            learner,
            schedule: LrSchedule::of(&config),
            config,
            loader,
            held_out: data.held_out,
            store,
            log,
            resumed: from,
            base,
            last_saved: None,
            step,
            progress,
            n_skipped: 0,
            n_skipped_in_row: 0,
            n_replayed: 0,
            n_eager: 0,
            in_flight: VecDeque::new(),
            launch_error: None,
            since: Instant::now(),
            failed: None,
        };
        if let Some(checkpoint) = &checkpoint {
            trainer.restore(checkpoint)?;
        }
        Ok(trainer)
    }

    /// The learner. Its states are those after [`Trainer::n_done`] steps once the run is
    /// [drained](Trainer::drain).
    pub fn learner(&self) -> &Learner<B> {
        &self.learner
    }

    /// Mutable access to the learner, for a caller that reads or changes its states; see [`Trainer::drain`].
    pub fn learner_mut(&mut self) -> &mut Learner<B> {
        &mut self.learner
    }

    /// The checkpoint that the run resumed from, if any.
    pub fn resumed(&self) -> Option<&Path> {
        self.resumed.as_deref()
    }

    /// The frozen base of the adapter, if the run trains one and saves it.
    pub fn base(&self) -> Option<&FrozenBase> {
        self.base.as_ref()
    }

    /// Number of completed steps.
    pub fn n_done(&self) -> u64 {
        self.step
    }

    /// The configuration.
    pub fn config(&self) -> &TrainConfig {
        &self.config
    }

    /// Runs to the last step, or until `stop` returns true between two steps; then saves a checkpoint.
    pub fn run(
        &mut self,
        stop: &dyn Fn() -> bool,
        observe: &mut dyn FnMut(&TrainEvent<'_>),
    ) -> Result<TrainSummary, TrainError> {
        if let Some(path) = &self.resumed {
            observe(&TrainEvent::Resumed { path, step: self.step });
        }
        let mut interrupted = false;
        while !self.is_done() {
            if stop() {
                interrupted = true;
                self.save(false, observe)?;
                break;
            }
            self.advance(observe)?;
        }
        Ok(self.summary(interrupted))
    }

    /// Completes one step, with the held-out loss and the checkpoint due after it; does nothing if all steps
    /// are done. When it returns, the next steps are in flight, up to the next one after which something is
    /// due.
    pub fn advance(&mut self, observe: &mut dyn FnMut(&TrainEvent<'_>)) -> Result<(), TrainError> {
        if self.is_done() {
            return Ok(());
        }
        self.check_not_failed()?;
        let sent = self.launch_ahead();
        self.note_failure(sent)?;
        self.finish_step(observe)
    }

    /// Completes the steps in flight, with everything due after them.
    pub fn drain(&mut self, observe: &mut dyn FnMut(&TrainEvent<'_>)) -> Result<(), TrainError> {
        while !self.in_flight.is_empty() {
            self.finish_step(observe)?;
        }
        Ok(())
    }

    /// After a failed step, the states are not those of the last successful step.
    fn note_failure(&mut self, result: Result<(), TrainError>) -> Result<(), TrainError> {
        result.inspect_err(|_| self.failed = Some(self.step))
    }

    fn check_not_failed(&self) -> Result<(), TrainError> {
        match self.failed {
            Some(step) => Err(TrainError::Ended { step, checkpoint: self.saved_path() }),
            None => Ok(()),
        }
    }

    /// The next step count at which the states are read: nothing is launched past it.
    fn next_stop(&self) -> u64 {
        let held_out = self.config.eval_every.filter(|_| self.held_out.is_some());
        let every = [held_out, self.config.save_every, self.config.sample_every];
        let next = |n: u64| (self.step / n + 1).saturating_mul(n);
        every.into_iter().flatten().filter(|n| *n > 0).map(next).fold(self.config.steps, u64::min)
    }

    /// Launches steps up to the maximum in flight.
    fn launch_ahead(&mut self) -> Result<(), TrainError> {
        let stop = self.next_stop();
        while self.launch_error.is_none() && self.in_flight.len() < self.learner.depth() {
            let step = self.step + self.in_flight.len() as u64;
            if step >= stop {
                break;
            }
            if self.in_flight.is_empty() {
                self.since = Instant::now();
            }
            let sent = self.batches(step).and_then(|batches| self.launch_step(step, batches));
            if let Err(error) = sent {
                if self.learner.n_queued() < self.in_flight.len() {
                    // The device failed, and the earlier steps with it.
                    self.in_flight.clear();
                }
                self.launch_error = Some(error);
            }
        }
        match self.launch_error.take_if(|_| self.in_flight.is_empty()) {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }

    /// Waits for the oldest step in flight and does everything due after it.
    fn finish_step(&mut self, observe: &mut dyn FnMut(&TrainEvent<'_>)) -> Result<(), TrainError> {
        let taken = self.collect_step(observe);
        self.note_failure(taken)?;
        let is_last = self.is_done();
        let due = |every: Option<u64>| every.is_some_and(|n| n > 0 && self.step.is_multiple_of(n)) || is_last;
        let (evaluates, saves) =
            (self.held_out.is_some() && due(self.config.eval_every), due(self.config.save_every));
        let is_best = evaluates && self.evaluate_held_out(observe)?;
        // A new best checkpoint is always saved.
        if saves || is_best {
            self.save(is_best, observe)?;
        }
        Ok(())
    }

    /// Whether all steps are done.
    pub fn is_done(&self) -> bool {
        self.step >= self.config.steps
    }

    /// Summary of the run so far.
    pub fn summary(&self, interrupted: bool) -> TrainSummary {
        TrainSummary {
            step: self.step,
            interrupted,
            progress: self.progress,
            n_skipped: self.n_skipped,
            n_replayed: self.n_replayed,
            n_eager: self.n_eager,
            checkpoint: self.saved_path(),
            // A pointer that cannot be read is reported when the run is resumed from it.
            best_checkpoint: self.store.as_ref().and_then(|store| store.best().ok().flatten()),
        }
    }

    fn batches(&mut self, step: u64) -> Result<Vec<Batch>, TrainError> {
        let next = |_| self.loader.next().ok_or(TrainError::NoData { step })?.map_err(TrainError::from);
        (0..self.config.accumulate).map(next).collect()
    }

    fn launch_step(&mut self, step: u64, batches: Vec<Batch>) -> Result<(), TrainError> {
        let rows: Vec<BatchRows<'_>> = batches.iter().map(rows_of).collect();
        let lr = self.schedule.at(step);
        let adam = AdamSettings {
            lr,
            betas: self.config.betas,
            eps: self.config.eps,
            weight_decay: self.config.weight_decay,
            clip: match self.config.clip {
                Clip::Norm(norm) => Some(norm),
                Clip::None => None,
            },
        };
        let seed = self.config.seed;
        let random = [seed as u32, (seed >> 32) as u32, step as u32, 0];
        self.learner.queue(&rows, &adam, random)?;
        self.in_flight.push_back(InFlightStep { lr, batches });
        Ok(())
    }

    fn collect_step(&mut self, observe: &mut dyn FnMut(&TrainEvent<'_>)) -> Result<(), TrainError> {
        let Some(InFlightStep { lr, batches }) = self.in_flight.pop_front() else { return Ok(()) };
        let outcome = match self.learner.collect() {
            Ok(outcome) => outcome,
            Err(error) => {
                self.in_flight.clear();
                return Err(error.into());
            }
        };
        let seconds = self.since.elapsed().as_secs_f64();
        self.since = Instant::now();
        let n_tokens = self.config.tokens_per_step();
        let record = StepRecord {
            step: self.step,
            loss: outcome.loss.into(),
            grad_norm: outcome.grad_norm.into(),
            lr,
            tok_s: n_tokens as f64 / seconds.max(1e-9),
        };
        self.write_log(&LogLine::Step(record))?;
        if !outcome.loss.is_finite() {
            self.discard_in_flight()?;
            let rows: Vec<BatchRows<'_>> = batches.iter().map(rows_of).collect();
            let tensor = self.learner.first_not_finite(&rows)?;
            return Err(TrainError::NotFinite { step: self.step, tensor, checkpoint: self.saved_path() });
        }
        if let Err(error) = self.count(&outcome) {
            self.discard_in_flight()?;
            return Err(error);
        }
        self.progress.loss = Some(record.loss);
        self.progress.n_tokens += n_tokens;
        self.progress.seconds += seconds;
        self.step += 1;
        observe(&TrainEvent::Step { record, outcome: &outcome });
        Ok(())
    }

    /// Waits for the steps in flight and discards them: the run is over.
    fn discard_in_flight(&mut self) -> Result<(), TrainError> {
        self.in_flight.clear();
        self.learner.abandon()?;
        Ok(())
    }

    fn count(&mut self, outcome: &StepOutcome) -> Result<(), TrainError> {
        for ran in &outcome.ran {
            match ran {
                Ran::Replayed { .. } => self.n_replayed += 1,
                Ran::Eager(_) => self.n_eager += 1,
            }
        }
        if outcome.is_applied() {
            self.n_skipped_in_row = 0;
            return Ok(());
        }
        self.n_skipped += 1;
        self.n_skipped_in_row += 1;
        if self.n_skipped_in_row >= MAX_SKIPPED {
            let (step, n) = (self.step, self.n_skipped_in_row);
            return Err(TrainError::NeverFinite { step, n, checkpoint: self.saved_path() });
        }
        Ok(())
    }

    fn saved_path(&self) -> Option<PathBuf> {
        self.last_saved.as_ref().map(|(_, path)| path.clone()).or_else(|| self.resumed.clone())
    }

    fn write_log(&mut self, line: &LogLine) -> Result<(), TrainError> {
        match &mut self.log {
            Some(log) => Ok(log.write(line)?),
            None => Ok(()),
        }
    }

    /// Mean loss of the held-out data, after the launched steps.
    pub fn held_out_loss(&mut self) -> Result<Option<f64>, TrainError> {
        let Some(corpus) = self.held_out.clone() else { return Ok(None) };
        let options =
            LoaderOptions { n_seqs: self.config.batch, seed: 0, passes: Passes::Once, n_ahead: N_AHEAD };
        let (mut sum, mut n) = (0.0, 0);
        for batch in Loader::new(corpus, options, None)? {
            let (loss, n_targets) = self.learner.evaluate(&rows_of(&batch?))?;
            sum += loss;
            n += n_targets;
        }
        Ok(Some(sum / n.max(1) as f64))
    }

    fn evaluate_held_out(&mut self, observe: &mut dyn FnMut(&TrainEvent<'_>)) -> Result<bool, TrainError> {
        let Some(eval_loss) = self.held_out_loss()? else { return Ok(false) };
        let record = EvalRecord { step: self.step.saturating_sub(1), eval_loss };
        self.write_log(&LogLine::Eval(record))?;
        let is_best = self.progress.best.is_none_or(|best| eval_loss < best.loss);
        if is_best {
            self.progress.best = Some(BestLoss { step: self.step, loss: eval_loss });
        }
        observe(&TrainEvent::Evaluated { record, is_best });
        Ok(is_best)
    }

    /// Saves a checkpoint if the run has a folder. Steps in flight are completed first.
    pub fn save(
        &mut self,
        is_best: bool,
        observe: &mut dyn FnMut(&TrainEvent<'_>),
    ) -> Result<(), TrainError> {
        self.check_not_failed()?;
        self.drain(observe)?;
        let already = self.last_saved.as_ref().is_some_and(|(step, _)| *step == self.step) && !is_best;
        let Some(store) = self.store.as_ref().filter(|_| !already) else { return Ok(()) };
        let state = RunState {
            step: self.step,
            position: DataPosition::clone(self.loader.position()),
            random: RandomState { seed: self.config.seed, counter: self.step },
            config: self.config.clone(),
            progress: self.progress,
            base: self.base.clone(),
        };
        let (files, ids) = self.files();
        let request = SaveRequest { state: &state, files: &files, is_best, keep: self.config.keep };
        let learner = &self.learner;
        let mut fetch = |file: &FileSpec, tensor: &TensorSpec| {
            let id = find_state(&files, &ids, &file.name, &tensor.name)
                .ok_or_else(|| std::io::Error::other(format!("there is no state named {}", tensor.name)))?;
            learner.state(id).map(Cow::Owned).map_err(std::io::Error::other)
        };
        let path = store.save(&request, &mut fetch)?;
        observe(&TrainEvent::Saved { path: &path });
        self.last_saved = Some((self.step, path));
        Ok(())
    }

    /// Files of a checkpoint, and the state of each tensor.
    fn files(&self) -> (Vec<FileSpec>, Vec<Vec<StateId>>) {
        let table = self.learner.table();
        let spec = |id: &StateId| {
            let state = &table.states[id.idx()];
            TensorSpec {
                name: state.name.clone(),
                dtype: state.ty.dtype,
                shape: state.ty.shape.dims().to_vec(),
            }
        };
        let weights: Vec<StateId> = table.params.iter().map(|p| p.value).collect();
        let optimiser: Vec<StateId> = std::iter::once(table.count)
            .chain(table.params.iter().flat_map(|p| p.master.into_iter().chain([p.m, p.v])))
            .collect();
        let file = |name: &str, ids: &[StateId]| FileSpec {
            name: name.into(),
            tensors: ids.iter().map(spec).collect(),
        };
        (vec![file(WEIGHTS, &weights), file(OPTIMISER, &optimiser)], vec![weights, optimiser])
    }

    fn restore(&mut self, checkpoint: &Checkpoint) -> Result<(), TrainError> {
        let (files, ids) = self.files();
        for (file, ids) in files.iter().zip(&ids) {
            checkpoint.expect(&file.name, &file.tensors)?;
            for (tensor, id) in file.tensors.iter().zip(ids) {
                let bytes = checkpoint.read(&file.name, &tensor.name)?;
                self.learner.set_state(*id, &bytes)?;
            }
        }
        Ok(())
    }

    /// Writes the report page next to the log, with `facts` above the curves.
    pub fn write_report(
        &self,
        title: &str,
        facts: Vec<(String, String)>,
    ) -> Result<Option<PathBuf>, TrainError> {
        let Some(out) = &self.config.out else { return Ok(None) };
        let log = self.config.log.clone().unwrap_or_else(|| out.join("log.jsonl"));
        let lines = crate::log::read(&log)?;
        let config = toml::to_string_pretty(&self.config).unwrap_or_default();
        let page = report::page(&ReportHeader { title: title.into(), facts, config }, &lines);
        let path = out.join("report.html");
        write_atomically(&RealStorage, &path, page.as_bytes())
            .map_err(|source| TrainError::Report { path: path.clone(), source })?;
        Ok(Some(path))
    }
}

fn find_state(files: &[FileSpec], ids: &[Vec<StateId>], file: &str, tensor: &str) -> Option<StateId> {
    let at = files.iter().position(|f| f.name == file)?;
    let idx = files[at].tensors.iter().position(|t| t.name == tensor)?;
    Some(ids[at][idx])
}

fn rows_of(batch: &Batch) -> BatchRows<'_> {
    BatchRows {
        tokens: &batch.tokens,
        targets: &batch.targets,
        positions: &batch.positions,
        spans: &batch.spans,
    }
}
