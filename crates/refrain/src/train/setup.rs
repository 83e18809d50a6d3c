//! Preparation of a run before it opens its device: model, tokenizer, data and memory.

use crate::error::Error;
use crate::model::tokenizer_form;
use crate::session::Device;
use crate::train::open::look;
use refrain_cuda::{GraphMode, LoadListener};
use refrain_driver::trial::MethodChoice;
use refrain_formats::ModelFiles;
use refrain_formats::tokenizer::{Tokenizer, TokenizerForm};
use refrain_graph::WeightId;
use refrain_models::Model as Weights;
use refrain_train::checkpoint::CheckpointStore;
use refrain_train::config::{
    ConfigError, EvalSource, GraphChoice, LoraTable, Precision, Resume, TokenizerSource,
};
use refrain_train::data::{Corpus, CorpusOptions, DataReport, Encoder};
use refrain_train::flops::step_flops;
use refrain_train::memory::{MemoryCounts, MemoryEstimate};
use refrain_train::tokenize::{TokenizerPlan, TrainedTokenizer};
use refrain_train::trainer::{TrainData, train_spec};
use refrain_train::{TrainConfig, TrainError};
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Options of a run besides its configuration.
#[derive(Debug, Default)]
pub struct TrainOptions {
    /// The device. The caller resolves the configuration's `device`.
    pub device: Device,
    /// The files of the configuration's `from`, if the caller resolved it; otherwise `from` is a path.
    pub files: Option<ModelFiles>,
    /// Receives the memory plan of a CUDA device and the progress of its kernels.
    pub on_load: LoadListener,
    /// Result of a trial of stream capture.
    pub graph_choice: Option<MethodChoice>,
    /// Compares every n-th replayed micro-step with its eager run, whose result is used; never when `None`.
    pub verify_every: Option<NonZeroU32>,
    /// More names and values for the head of the report, such as the command.
    pub facts: Vec<(String, String)>,
}

/// The graph mode of a configuration; by default every step must be replayed.
pub fn usual_graph(choice: Option<GraphChoice>) -> GraphMode {
    match choice {
        None | Some(GraphChoice::Require) => GraphMode::Require,
        Some(GraphChoice::Auto) => GraphMode::Auto,
        Some(GraphChoice::Off) => GraphMode::Off,
    }
}

/// Phases of the preparation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Preparing {
    /// Opening or creating the model.
    Model,
    /// Training a tokenizer.
    Tokenizer,
    /// Reading data.
    Data {
        /// Bytes read.
        done_bytes: u64,
        /// Total bytes.
        total_bytes: u64,
    },
    /// Planning the memory of a step.
    Memory,
}

/// A prepared run that is not on its device yet.
#[derive(Debug)]
pub struct Training {
    pub(super) config: TrainConfig,
    pub(super) options: TrainOptions,
    pub(super) model: Arc<Weights>,
    pub(super) form: TokenizerForm,
    pub(super) tokenizer: Arc<Tokenizer>,
    pub(super) data: TrainData,
    pub(super) device_name: String,
    estimate: MemoryEstimate,
    free_bytes: Option<u64>,
}

impl Training {
    /// Reads or creates the model, the tokenizer and the data of a run. Writes nothing except a trained tokenizer, which
    /// goes to the run's folder.
    pub fn prepare(
        config: TrainConfig,
        mut options: TrainOptions,
        progress: &mut dyn FnMut(Preparing),
    ) -> Result<Training, Error> {
        config.validate().map_err(TrainError::from)?;
        let resumes = resumes(&config)?;
        progress(Preparing::Model);
        let files = match (&config.from, options.files.take()) {
            (None, _) => None,
            (Some(_), Some(files)) => Some(files),
            (Some(path), None) => Some(ModelFiles::open(path)?),
        };
        let form = find_tokenizer(&config, files.as_ref(), resumes.as_deref(), progress)?;
        let mut tokenizer = form.build()?;
        let model = match &files {
            Some(files) => Weights::load(files)?,
            None => fresh(&config, &tokenizer)?,
        };
        let model = match &config.lora {
            Some(lora) => adapted(&config, lora, model)?,
            None => model,
        };
        tokenizer.add_end_of_generation(&model.config().eos);
        if let Some(files) = &files {
            tokenizer.add_end_of_generation(&files.generation_defaults()?.eos);
        }
        let (n_tokens, n_vocab) = (tokenizer.vocab_size(), model.config().n_vocab);
        if n_tokens > n_vocab {
            return Err(Error::Vocabulary { tokenizer: n_tokens, model: n_vocab });
        }
        let most = model.config().n_context;
        if config.context > most {
            let error = ConfigError::Value {
                key: "context",
                found: config.context.to_string(),
                expected: format!("at most {most}, which the model was made for"),
                hint: "shorten the rows, or start from a model with a longer context",
            };
            return Err(TrainError::from(error).into());
        }
        check_decoding(&config, &options.device, &model)?;
        let (model, tokenizer) = (Arc::new(model), Arc::new(tokenizer));
        let data = read_data(&config, &tokenizer, progress)?;
        progress(Preparing::Memory);
        let counts = MemoryCounts::of(&model, &config).map_err(TrainError::from)?;
        let estimate = MemoryEstimate::new(&config, counts);
        let (device_name, free_bytes) = look(&options.device);
        Ok(Training { config, options, model, form, tokenizer, data, device_name, estimate, free_bytes })
    }

    /// The configuration.
    pub fn config(&self) -> &TrainConfig {
        &self.config
    }

    /// The model before the first step.
    pub fn model(&self) -> &Arc<Weights> {
        &self.model
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.tokenizer
    }

    /// Report on the training data.
    pub fn data_report(&self) -> &DataReport {
        self.data.corpus.report()
    }

    /// Report on the held-out data.
    pub fn held_out_report(&self) -> Option<&DataReport> {
        self.data.held_out.as_ref().map(|corpus| corpus.report())
    }

    /// Name of the device.
    pub fn device_name(&self) -> &str {
        &self.device_name
    }

    /// Estimated memory of the run on its device.
    pub fn memory(&self) -> &MemoryEstimate {
        &self.estimate
    }

    /// Free bytes on the device, if known.
    pub fn free_bytes(&self) -> Option<u64> {
        self.free_bytes
    }

    /// Floating-point operations of a step.
    pub fn step_flops(&self) -> f64 {
        step_flops(&self.model, self.config.tokens_per_step(), self.config.context)
    }

    /// Peak floating-point operations per second of the device, if known.
    pub fn peak_flops(&self) -> Option<f64> {
        super::peak_flops(&self.device_name, train_spec(&self.config).dtype)
    }

    /// Refuses a run that does not fit, and suggests settings that would make it smaller.
    pub fn check_memory(&self) -> Result<(), Error> {
        let (needed_bytes, Some(free_bytes)) = (self.estimate.total_bytes(), self.free_bytes) else {
            return Ok(());
        };
        if needed_bytes <= free_bytes {
            return Ok(());
        }
        let advice = self.estimate.advice(free_bytes).into_iter();
        let advice = advice.map(|advice| {
            let enough = if advice.suffices { "" } else { ", which is not enough by itself" };
            let saved = refrain_train::memory::MemorySize(advice.saved_bytes);
            format!("{} saves {saved}{enough}", advice.setting)
        });
        let device = self.device_name.clone();
        Err(Error::TrainMemory { device, needed_bytes, free_bytes, advice: advice.collect() })
    }
}

/// The checkpoint to resume from. A folder with checkpoints is never overwritten.
fn resumes(config: &TrainConfig) -> Result<Option<PathBuf>, Error> {
    let latest = |out: &Path| -> Result<Option<PathBuf>, Error> {
        if !out.is_dir() {
            return Ok(None);
        }
        Ok(CheckpointStore::open(out).map_err(TrainError::from)?.latest().map_err(TrainError::from)?)
    };
    let found = config.out.as_deref().map(latest).transpose()?.flatten();
    match (&config.resume, &config.out, found) {
        (Resume::From(path), ..) => Ok(Some(path.clone())),
        (Resume::Switch(true), _, found) => Ok(found),
        (Resume::Switch(false), Some(out), Some(_)) => Err(Error::Occupied { folder: out.clone() }),
        (Resume::Switch(false), ..) => Ok(None),
    }
}

fn find_tokenizer(
    config: &TrainConfig,
    files: Option<&ModelFiles>,
    resumes: Option<&Path>,
    progress: &mut dyn FnMut(Preparing),
) -> Result<TokenizerForm, Error> {
    let vocab_size = match (&config.tokenizer, files, &config.new) {
        (Some(TokenizerSource::Path(path)), ..) => return tokenizer_at(path),
        (Some(TokenizerSource::Train { train }), ..) => train.vocab_size,
        (None, Some(files), _) => return tokenizer_form(files),
        (None, None, Some(new)) => new.usual_vocab().map_err(TrainError::from)?,
        (None, None, None) => unreachable!("a configuration has one of `from` and `new`"),
    };
    if let Some(checkpoint) = resumes {
        // A resumed run keeps its tokenizer.
        let run =
            if checkpoint.join("tokenizer.json").is_file() { Some(checkpoint) } else { checkpoint.parent() };
        let run = run.filter(|folder| folder.join("tokenizer.json").is_file());
        let gone = || Error::TokenizerGone { folder: checkpoint.parent().unwrap_or(checkpoint).to_owned() };
        return tokenizer_at(run.ok_or_else(gone)?);
    }
    progress(Preparing::Tokenizer);
    let trained =
        TrainedTokenizer::train(&config.data, &TokenizerPlan::new(vocab_size)).map_err(TrainError::from)?;
    if let Some(out) = &config.out {
        trained.save(out).map_err(TrainError::from)?;
    }
    Ok(TokenizerForm::Files {
        json: trained.json.into_bytes(),
        config: Some(trained.config_json.into_bytes()),
    })
}

/// Reads the tokenizer of a `tokenizer.json`, of its folder, or of a model.
fn tokenizer_at(path: &Path) -> Result<TokenizerForm, Error> {
    let file = match path.is_dir() {
        true => path.join("tokenizer.json"),
        false => path.to_owned(),
    };
    let is_json = file.extension().is_some_and(|extension| extension == "json");
    if !is_json || (path.is_dir() && !file.is_file()) {
        return tokenizer_form(&ModelFiles::open(path)?);
    }
    let read = |path: &Path| {
        std::fs::read(path).map_err(|source| refrain_formats::FormatError::Io {
            verb: "read",
            path: path.to_owned(),
            source,
        })
    };
    let config = file.with_file_name("tokenizer_config.json");
    let config = if config.is_file() { Some(read(&config)?) } else { None };
    Ok(TokenizerForm::Files { json: read(&file)?, config })
}

fn fresh(config: &TrainConfig, tokenizer: &Tokenizer) -> Result<Weights, Error> {
    let Some(new) = &config.new else { unreachable!("a configuration has one of `from` and `new`") };
    let mut made = new.model_config(tokenizer.vocab_size(), config.context).map_err(TrainError::from)?;
    made.bos = tokenizer.bos();
    made.eos = tokenizer.eos().into_iter().collect();
    Ok(Weights::fresh(made, config.seed)?)
}

/// Adds a fresh adapter, which does not change the output yet.
fn adapted(config: &TrainConfig, lora: &LoraTable, model: Weights) -> Result<Weights, Error> {
    let mut adapter = model.fresh_adapter(&lora.spec(), config.seed)?;
    adapter.config.base.clone_from(&config.from);
    Ok(model.with_adapter(&adapter)?)
}

/// Refuses quantised frozen weights in f32 training on CUDA, which decodes them only to bf16.
fn check_decoding(config: &TrainConfig, device: &Device, model: &Weights) -> Result<(), Error> {
    let is_frozen = |idx: usize| !model.is_trained(WeightId::from_idx(idx));
    let quantised =
        model.weights().iter().enumerate().find(|(idx, w)| is_frozen(*idx) && w.ty.dtype.is_quantized());
    match quantised {
        Some((_, weight)) if device.cuda_options().is_ok() && config.dtype == Precision::F32 => {
            let error = ConfigError::Value {
                key: "dtype",
                found: "f32".to_owned(),
                expected: format!(
                    "bf16: {} is {}, which a GPU decodes to bf16",
                    weight.name, weight.ty.dtype
                ),
                hint: "set dtype = \"bf16\", train on the CPU, or start from weights that are not quantised",
            };
            Err(TrainError::from(error).into())
        }
        _ => Ok(()),
    }
}

fn read_data(
    config: &TrainConfig,
    tokenizer: &Arc<Tokenizer>,
    progress: &mut dyn FnMut(Preparing),
) -> Result<TrainData, Error> {
    let encoder = Encoder::new(tokenizer.clone()).map_err(TrainError::from)?;
    let options = CorpusOptions {
        context: config.context,
        order: config.order,
        on_long: config.on_long,
        n_threads: refrain_cpu::pool::default_threads(),
    };
    let mut told = |done_bytes, total_bytes| progress(Preparing::Data { done_bytes, total_bytes });
    let mut read =
        |files: &[PathBuf]| Corpus::read(files, &encoder, options, &mut told).map_err(TrainError::from);
    let corpus = read(&config.data)?;
    let (corpus, held_out) = match &config.eval {
        None => (corpus, None),
        Some(EvalSource::Share(share)) => {
            let (corpus, held_out) = corpus.hold_out(*share).map_err(TrainError::from)?;
            (corpus, Some(Arc::new(held_out)))
        }
        Some(EvalSource::File(file)) => (corpus, Some(Arc::new(read(std::slice::from_ref(file))?))),
    };
    Ok(TrainData { corpus: Arc::new(corpus), held_out })
}
