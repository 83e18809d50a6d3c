//! Runs of a tiny model on the simulated device.

#![allow(dead_code, reason = "each test file uses a part of it")]

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use refrain_cuda::{CacheOptions, CudaBackend, CudaOptions, GraphMode, Monitor};
use refrain_driver::sim::{SimDriver, SimOptions};
use refrain_driver::{Device, Method};
use refrain_graph::StateId;
use refrain_models::Model;
use refrain_train::config::{NewModel, Paths, Precision, Resume};
use refrain_train::data::{Corpus, CorpusOptions, Encoder};
use refrain_train::learner::{BatchRows, Learner};
use refrain_train::log::{self, LogLine, StepRecord};
use refrain_train::tokenize::{TokenizerPlan, TrainedTokenizer};
use refrain_train::trainer::{TrainData, TrainSummary, Trainer};
use refrain_train::{TrainConfig, TrainError};

pub(crate) const CONTEXT: usize = 8;

/// A folder with a text, its tokenizer and its tokens.
pub(crate) struct Bench {
    folder: tempfile::TempDir,
    tokenizer: Arc<refrain_formats::tokenizer::Tokenizer>,
}

fn text() -> String {
    let (animals, places) = (["cat", "dog", "fox", "hen", "cow"], ["mat", "hill", "barn", "road"]);
    let sentence = |i: usize| {
        format!("the {} sat on the {}; the {} saw it.\n", animals[i % 5], places[i % 4], animals[i * 3 % 5])
    };
    (0..40).map(sentence).collect()
}

/// How a run uses its device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct How {
    pub(crate) mode: GraphMode,
    pub(crate) method: Method,
    pub(crate) ahead: usize,
    pub(crate) verify_every: Option<u32>,
    /// How long a driver call may take; the usual time unless given.
    pub(crate) call_limit: Option<Duration>,
}

/// Eager, each step waited for.
pub(crate) const ONE_BY_ONE: How =
    How { mode: GraphMode::Off, method: Method::Stream, ahead: 1, verify_every: None, call_limit: None };
/// As graphs, three in flight.
pub(crate) const AHEAD: How =
    How { mode: GraphMode::Require, method: Method::Stream, ahead: 3, verify_every: None, call_limit: None };

/// A run and the device it is on.
pub(crate) struct Run {
    pub(crate) sim: SimDriver,
    pub(crate) device: Device,
    pub(crate) monitor: Monitor,
    pub(crate) trainer: Trainer<CudaBackend>,
}

pub(crate) fn backend(sim: &SimDriver, how: How) -> (Device, CudaBackend) {
    refrain_kernels::register_twins(sim);
    let device = Device::simulated(sim).unwrap();
    let backend = backend_on(&device, how);
    (device, backend)
}

pub(crate) fn backend_on(device: &Device, how: How) -> CudaBackend {
    let graphs = CacheOptions { mode: how.mode, method: how.method, ..CacheOptions::default() };
    let usual = CudaOptions::default();
    let options = CudaOptions {
        graphs,
        call_limit: how.call_limit.unwrap_or(usual.call_limit),
        ahead: how.ahead,
        verify_every: how.verify_every.and_then(std::num::NonZeroU32::new),
        ..usual
    };
    CudaBackend::on(device, options).unwrap()
}

impl Bench {
    pub(crate) fn new() -> Bench {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("text.txt");
        std::fs::write(&file, text()).unwrap();
        let trained = TrainedTokenizer::train(&[file], &TokenizerPlan::new(264)).unwrap();
        Bench { folder, tokenizer: Arc::new(trained.tokenizer) }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn config(&self, out: &str) -> TrainConfig {
        let shape = "arch = \"llama\"\nn_layers = 1\nhidden = 16\nffn = 24\nn_heads = 2\nhead_dim = 8\n\
                     tied_embeddings = false";
        TrainConfig {
            new: Some(NewModel::Shape(toml::from_str(shape).unwrap())),
            data: Paths(vec![self.path("text.txt")]),
            context: CONTEXT,
            batch: 2,
            steps: 12,
            lr: 3e-3,
            warmup: 2,
            dtype: Precision::Bf16,
            out: Some(self.path(out)),
            ..TrainConfig::default()
        }
    }

    pub(crate) fn model(&self, config: &TrainConfig) -> Arc<Model> {
        let new = config.new.as_ref().unwrap();
        let model = new.model_config(self.tokenizer.vocab_size(), config.context).unwrap();
        Arc::new(Model::fresh(model, config.seed).unwrap())
    }

    fn data(&self, config: &TrainConfig, held_out: Option<f64>) -> TrainData {
        let encoder = Encoder::new(self.tokenizer.clone()).unwrap();
        let (order, on_long) = (config.order, config.on_long);
        let options = CorpusOptions { context: config.context, order, on_long, n_threads: 1 };
        let corpus = Corpus::read(&config.data, &encoder, options, &mut |_, _| {}).unwrap();
        let (corpus, held_out) = match held_out {
            Some(share) => {
                let (corpus, held_out) = corpus.hold_out(share).unwrap();
                (corpus, Some(Arc::new(held_out)))
            }
            None => (corpus, None),
        };
        TrainData { corpus: Arc::new(corpus), held_out }
    }

    /// A run that has not begun, on a device of its own.
    pub(crate) fn start(&self, config: &TrainConfig, how: How, held_out: Option<f64>) -> Run {
        let sim = SimDriver::new(SimOptions { seed: 5, ..SimOptions::default() });
        let (device, backend) = backend(&sim, how);
        let monitor = backend.monitor();
        let data = self.data(config, held_out);
        let trainer = Trainer::new(backend, self.model(config), config.clone(), data);
        let trainer = trainer.unwrap_or_else(|e| panic!("{e}: {e:?}"));
        Run { sim, device, monitor, trainer }
    }

    /// The same run from the latest checkpoint in its folder.
    pub(crate) fn resume(&self, config: &TrainConfig, how: How, held_out: Option<f64>) -> Run {
        self.start(&TrainConfig { resume: Resume::Switch(true), ..config.clone() }, how, held_out)
    }

    /// The lines of a run's log without the time they took.
    pub(crate) fn log(&self, out: &str) -> Vec<LogLine> {
        let timeless = |line| match line {
            LogLine::Step(record) => LogLine::Step(StepRecord { tok_s: 0.0, ..record }),
            LogLine::Eval(record) => LogLine::Eval(record),
        };
        log::read(&self.path(out).join("log.jsonl")).unwrap().into_iter().map(timeless).collect()
    }
}

impl Run {
    pub(crate) fn finish(&mut self) -> TrainSummary {
        self.try_finish().unwrap_or_else(|e| panic!("{e}: {e:?}"))
    }

    pub(crate) fn try_finish(&mut self) -> Result<TrainSummary, TrainError> {
        self.trainer.run(&|| false, &mut |_| {})
    }

    pub(crate) fn states(&self) -> Vec<(String, Vec<u8>)> {
        states(self.trainer.learner())
    }

    /// Ends the device; it must have nothing to complain about.
    pub(crate) fn end(self) {
        drop(self.trainer);
        assert_eq!(self.device.take_reports(), Vec::<String>::new());
    }
}

pub(crate) fn states(learner: &Learner<CudaBackend>) -> Vec<(String, Vec<u8>)> {
    let table = learner.table();
    let hold = |i: usize| learner.state(StateId::from_idx(i)).unwrap_or_else(|e| panic!("{e}: {e:?}"));
    table.states.iter().enumerate().map(|(i, state)| (state.name.clone(), hold(i))).collect()
}

/// Panics with the name of the first state that differs.
pub(crate) fn assert_same(got: &[(String, Vec<u8>)], want: &[(String, Vec<u8>)], what: &str) {
    assert_eq!(got.len(), want.len());
    for ((name, got), (_, want)) in got.iter().zip(want) {
        assert!(got == want, "{what}: {name} differs");
    }
}

/// Rows of one document a sequence.
pub(crate) struct OwnRows {
    tokens: Vec<i32>,
    targets: Vec<i32>,
    positions: Vec<i32>,
    spans: Vec<[i32; 2]>,
}

impl OwnRows {
    /// Rows that begin with a token of the caller's.
    pub(crate) fn new(n_seqs: usize, salt: usize, first: i32) -> OwnRows {
        let n = n_seqs * CONTEXT;
        let token = |i: usize| (20 + (i * 7 + salt * 13) % 200) as i32;
        let mut tokens: Vec<i32> = (0..n).map(token).collect();
        tokens[0] = first;
        OwnRows {
            tokens,
            targets: (1..=n).map(token).collect(),
            positions: (0..n).map(|i| (i % CONTEXT) as i32).collect(),
            spans: (0..n)
                .map(|i| i / CONTEXT * CONTEXT)
                .map(|first| [first as i32, (first + CONTEXT) as i32])
                .collect(),
        }
    }

    pub(crate) fn rows(&self) -> BatchRows<'_> {
        let OwnRows { tokens, targets, positions, spans } = self;
        BatchRows { tokens, targets, positions, spans }
    }
}

pub(crate) fn ends_with(path: Option<&Path>, name: &str) -> bool {
    path.is_some_and(|path| path.ends_with(name))
}
