//! Complete runs of a tiny model on the CPU.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use refrain_cpu::CpuBackend;
use refrain_graph::StateId;
use refrain_models::Model;
use refrain_train::checkpoint::{Checkpoint, CheckpointError, CheckpointStore};
use refrain_train::config::{EvalSource, ModelShape, NewModel, Order, Paths, Resume, ScheduleKind};
use refrain_train::data::{Corpus, CorpusOptions, Encoder};
use refrain_train::learner::{AdamSettings, BatchRows, Learner};
use refrain_train::log::{self, LogLine, StepRecord};
use refrain_train::schedule::LrSchedule;
use refrain_train::tokenize::{TokenizerPlan, TrainedTokenizer};
use refrain_train::trainer::{TrainData, TrainEvent, TrainSummary, Trainer, train_spec};
use refrain_train::{TrainConfig, TrainError};

const CONTEXT: usize = 16;

/// A text that a small model learns to predict in a few steps.
fn text() -> String {
    let animals = ["cat", "dog", "fox", "hen", "cow"];
    let places = ["mat", "hill", "barn", "road"];
    let sentence = |i: usize| {
        format!(
            "the {} sat on the {} and saw the {}.\n",
            animals[i % 5],
            places[i % 4],
            animals[(i * 3 + 1) % 5]
        )
    };
    (0..60).map(sentence).collect()
}

/// A folder with a text, its tokenizer and its tokens.
struct Bench {
    folder: tempfile::TempDir,
    tokenizer: Arc<refrain_formats::tokenizer::Tokenizer>,
}

impl Bench {
    fn new() -> Bench {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("text.txt");
        std::fs::write(&file, text()).unwrap();
        let trained = TrainedTokenizer::train(&[file], &TokenizerPlan::new(280)).unwrap();
        Bench { folder, tokenizer: Arc::new(trained.tokenizer) }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn config(&self, out: &str) -> TrainConfig {
        TrainConfig {
            new: Some(NewModel::Shape(shape(32))),
            data: Paths(vec![self.path("text.txt")]),
            context: CONTEXT,
            batch: 2,
            steps: 6,
            lr: 1e-2,
            warmup: 2,
            min_lr: 1e-4,
            device: "cpu".into(),
            out: Some(self.path(out)),
            ..TrainConfig::default()
        }
    }

    fn model(&self, config: &TrainConfig) -> Arc<Model> {
        let new = config.new.as_ref().unwrap();
        let model = new.model_config(self.tokenizer.vocab_size(), config.context).unwrap();
        Arc::new(Model::fresh(model, config.seed).unwrap())
    }

    fn data(&self, config: &TrainConfig, held_out: Option<f64>) -> TrainData {
        let encoder = Encoder::new(self.tokenizer.clone()).unwrap();
        let options = CorpusOptions {
            context: config.context,
            order: config.order,
            on_long: config.on_long,
            n_threads: 1,
        };
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

    fn trainer(&self, config: &TrainConfig) -> Result<Trainer<CpuBackend>, TrainError> {
        self.trainer_with(config, None)
    }

    fn trainer_with(
        &self,
        config: &TrainConfig,
        held_out: Option<f64>,
    ) -> Result<Trainer<CpuBackend>, TrainError> {
        let backend = CpuBackend::new(1).unwrap();
        Trainer::new(backend, self.model(config), config.clone(), self.data(config, held_out))
    }

    fn learner(&self, config: &TrainConfig) -> Learner<CpuBackend> {
        let backend = CpuBackend::new(1).unwrap();
        Learner::new(backend, self.model(config), train_spec(config), config.accumulate).unwrap()
    }
}

fn shape(hidden: usize) -> ModelShape {
    let text = format!(
        "arch = \"llama\"\nn_layers = 2\nhidden = {hidden}\nffn = 48\nn_heads = 4\nn_kv_heads = 2\nhead_dim = 8"
    );
    toml::from_str(&text).unwrap()
}

fn run(trainer: &mut Trainer<CpuBackend>) -> TrainSummary {
    trainer.run(&|| false, &mut |_| {}).unwrap()
}

/// All states of a run, bit for bit.
fn states(learner: &Learner<CpuBackend>) -> Vec<(String, Vec<u8>)> {
    let table = learner.table();
    let state = |i: usize| (table.states[i].name.clone(), learner.state(StateId::from_idx(i)).unwrap());
    (0..table.states.len()).map(state).collect()
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

/// Steps and held-out losses of a log, without their durations.
fn lines(path: &Path) -> Vec<LogLine> {
    let timeless = |line| match line {
        LogLine::Step(record) => LogLine::Step(StepRecord { tok_s: 0.0, ..record }),
        LogLine::Eval(record) => LogLine::Eval(record),
    };
    log::read(path).unwrap().into_iter().map(timeless).collect()
}

fn steps(path: &Path) -> Vec<StepRecord> {
    let step = |line| match line {
        LogLine::Step(record) => Some(record),
        LogLine::Eval(_) => None,
    };
    lines(path).into_iter().filter_map(step).collect()
}

/// Rows of one document per sequence, for the step API.
struct OwnRows {
    tokens: Vec<i32>,
    targets: Vec<i32>,
    positions: Vec<i32>,
    spans: Vec<[i32; 2]>,
}

impl OwnRows {
    fn new(n_seqs: usize) -> OwnRows {
        let n = n_seqs * CONTEXT;
        let token = |i: usize| (3 + i * 7 % 200) as i32;
        let span = |i: usize| {
            let first = i / CONTEXT * CONTEXT;
            [first as i32, (first + CONTEXT) as i32]
        };
        OwnRows {
            tokens: (0..n).map(token).collect(),
            targets: (1..=n).map(token).collect(),
            positions: (0..n).map(|i| (i % CONTEXT) as i32).collect(),
            spans: (0..n).map(span).collect(),
        }
    }

    fn rows(&self) -> BatchRows<'_> {
        let OwnRows { tokens, targets, positions, spans } = self;
        BatchRows { tokens, targets, positions, spans }
    }
}

const PLAIN: AdamSettings =
    AdamSettings { lr: 1e-3, betas: [0.9, 0.95], eps: 1e-8, weight_decay: 0.0, clip: None };

#[test]
fn the_loss_falls() {
    let bench = Bench::new();
    let config = TrainConfig { steps: 30, batch: 4, ..bench.config("run") };
    let mut trainer = bench.trainer(&config).unwrap();
    let summary = run(&mut trainer);
    assert_eq!((summary.step, summary.interrupted, summary.n_skipped), (30, false, 0));
    assert_eq!(summary.n_eager, 30, "the CPU replays nothing");
    let log = steps(&bench.path("run/log.jsonl"));
    let (first, last) = (log[0].loss, log[29].loss);
    // An untrained model gives all tokens the same probability.
    assert!((first - 320f64.ln()).abs() < 0.2, "{first}");
    assert!(last < first - 2.0, "from {first} to {last}");
    assert!(log.iter().all(|line| line.grad_norm > 0.0));
}

#[test]
fn a_resumed_run_equals_an_uninterrupted_one() {
    let bench = Bench::new();
    let config = |out: &str| TrainConfig {
        accumulate: 2,
        dropout: 0.1,
        checkpoint_activations: true,
        seed: u64::MAX - 3,
        eval_every: Some(3),
        eval: Some(EvalSource::Share(0.1)),
        ..bench.config(out)
    };
    let mut whole = bench.trainer_with(&config("whole"), Some(0.1)).unwrap();
    run(&mut whole);

    let n_done = std::cell::Cell::new(0);
    let mut first = bench.trainer_with(&config("parts"), Some(0.1)).unwrap();
    let mut count = |event: &TrainEvent<'_>| {
        if matches!(event, TrainEvent::Step { .. }) {
            n_done.set(n_done.get() + 1);
        }
    };
    let summary = first.run(&|| n_done.get() == 4, &mut count).unwrap();
    assert_eq!((summary.step, summary.interrupted), (4, true));
    drop(first);
    // Log lines of a step that was not saved do not appear twice after resuming.
    let log = bench.path("parts/log.jsonl");
    let mut text = std::fs::read_to_string(&log).unwrap();
    text.push_str("{\"step\":4,\"loss\":9.0,\"grad_norm\":1.0,\"lr\":1.0,\"tok_s\":1.0}\n");
    std::fs::write(&log, text).unwrap();

    let resumed = TrainConfig { resume: Resume::Switch(true), ..config("parts") };
    let mut second = bench.trainer_with(&resumed, Some(0.1)).unwrap();
    assert_eq!(second.n_done(), 4);
    let mut at = None;
    let mut hear = |event: &TrainEvent<'_>| {
        if let TrainEvent::Resumed { step, .. } = event {
            at = Some(*step);
        }
    };
    second.run(&|| false, &mut hear).unwrap();
    assert_eq!(at, Some(4));
    assert_eq!(states(whole.learner()), states(second.learner()));
    assert_eq!(lines(&bench.path("whole/log.jsonl")), lines(&log));
}

#[test]
fn four_batches_of_two_equal_one_of_eight() {
    let bench = Bench::new();
    let config = |out: &str, batch, accumulate| TrainConfig {
        order: Order::File,
        batch,
        accumulate,
        steps: 3,
        ..bench.config(out)
    };
    let mut many = bench.trainer(&config("many", 2, 4)).unwrap();
    let mut one = bench.trainer(&config("one", 8, 1)).unwrap();
    run(&mut many);
    run(&mut one);
    let (a, b) = (steps(&bench.path("many/log.jsonl")), steps(&bench.path("one/log.jsonl")));
    for (a, b) in a.iter().zip(&b) {
        assert!((a.loss - b.loss).abs() < 1e-5 * b.loss, "{a:?} {b:?}");
        assert!((a.grad_norm - b.grad_norm).abs() < 1e-4 * b.grad_norm, "{a:?} {b:?}");
    }
    for (p, q) in many.learner().table().params.iter().zip(&one.learner().table().params) {
        let a = many.learner().weight(p).unwrap().to_f32().unwrap();
        let b = one.learner().weight(q).unwrap().to_f32().unwrap();
        let most = b.iter().fold(0f32, |most, v| most.max(v.abs()));
        let off = a.iter().zip(&b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        // Adam divides by the root of the second moment: where a gradient is nearly 0, its last bits
        // dominate.
        assert!(off < 1e-2 * most, "off by {off} of {most}");
    }
}

#[test]
fn a_nan_weight_ends_the_run_and_the_last_checkpoint_stays() {
    let bench = Bench::new();
    let config = TrainConfig { save_every: Some(2), ..bench.config("run") };
    let mut trainer = bench.trainer(&config).unwrap();
    for _ in 0..3 {
        trainer.advance(&mut |_| {}).unwrap();
    }
    let table = trainer.learner().table();
    let id =
        table.params.iter().map(|p| p.value).find(|id| table.states[id.idx()].name == "blk.1.ffn_up.weight");
    let id = id.unwrap();
    let mut bytes = trainer.learner().state(id).unwrap();
    bytes[8..12].copy_from_slice(&f32::NAN.to_le_bytes());
    trainer.learner_mut().set_state(id, &bytes).unwrap();
    let error = trainer.run(&|| false, &mut |_| {}).unwrap_err();
    let TrainError::NotFinite { step, tensor, checkpoint } = &error else { panic!("{error}") };
    assert_eq!((*step, tensor.as_str()), (3, "blk.1.ffn_up.weight"));
    let path = checkpoint.clone().unwrap();
    assert!(path.ends_with("step-00000002"), "{path:?}");
    assert!(error.hint().unwrap().contains("step-00000002"));
    assert_eq!(Checkpoint::open(&path).unwrap().state().step, 2);
    let log = steps(&bench.path("run/log.jsonl"));
    assert!(log.len() == 4 && log[3].loss.is_nan(), "{log:?}");
}

#[test]
fn a_checkpoint_of_another_shape_is_refused() {
    let bench = Bench::new();
    let config = TrainConfig { steps: 2, ..bench.config("run") };
    run(&mut bench.trainer(&config).unwrap());
    let wider = TrainConfig {
        new: Some(NewModel::Shape(shape(40))),
        resume: Resume::Switch(true),
        ..bench.config("run")
    };
    let error = bench.trainer(&wider).err().unwrap();
    assert!(matches!(error, TrainError::Checkpoint(CheckpointError::Differs { .. })), "{error:?}");
    assert!(error.to_string().contains("token_embd.weight"), "{error}");
}

#[test]
fn the_best_checkpoint_is_kept_in_addition_to_the_newest_ones() {
    let bench = Bench::new();
    let config = TrainConfig {
        steps: 12,
        keep: 1,
        save_every: Some(2),
        eval_every: Some(2),
        eval: Some(EvalSource::Share(0.2)),
        lr: 3e-2,
        schedule: ScheduleKind::Constant,
        ..bench.config("run")
    };
    let mut trainer = bench.trainer_with(&config, Some(0.2)).unwrap();
    let mut losses = Vec::new();
    let mut hear = |event: &TrainEvent<'_>| {
        if let TrainEvent::Evaluated { record, is_best } = event {
            losses.push((record.step + 1, record.eval_loss, *is_best));
        }
    };
    trainer.run(&|| false, &mut hear).unwrap();
    let lowest = losses.iter().min_by(|a, b| a.1.total_cmp(&b.1)).unwrap();
    let best = trainer.summary(false).progress.best.unwrap();
    assert_eq!((best.step, best.loss), (lowest.0, lowest.1));
    assert!(lowest.2);
    drop(trainer);
    let store = CheckpointStore::open(&bench.path("run")).unwrap();
    let at = |path: Option<PathBuf>| Checkpoint::open(&path.unwrap()).unwrap().state().step;
    assert_eq!((at(store.latest().unwrap()), at(store.best().unwrap())), (12, best.step));
}

#[test]
fn the_learning_rate_is_not_baked_into_the_step() {
    let bench = Bench::new();
    let config = TrainConfig { steps: 8, ..bench.config("run") };
    let mut trainer = bench.trainer(&config).unwrap();
    run(&mut trainer);
    let schedule = LrSchedule::of(&config);
    for line in steps(&bench.path("run/log.jsonl")) {
        assert_eq!(line.lr, schedule.at(line.step), "step {}", line.step);
    }
    // Equal gradients from equal states: the change is proportional to the learning rate of that step.
    let mut learner = bench.learner(&config);
    let rows = OwnRows::new(2);
    let saved = states(&learner);
    let moved = |learner: &mut Learner<CpuBackend>, lr| {
        for (i, (_, bytes)) in saved.iter().enumerate() {
            learner.set_state(StateId::from_idx(i), bytes).unwrap();
        }
        learner.step(&[rows.rows()], &AdamSettings { lr, ..PLAIN }, [0; 4]).unwrap();
        let value = learner.table().params[0].value;
        let after = learner.state(value).unwrap();
        let pairs = floats(&after).into_iter().zip(floats(&saved[value.idx()].1));
        pairs.map(|(after, before)| f64::from(after - before)).collect::<Vec<f64>>()
    };
    let (still, slow, fast) =
        (moved(&mut learner, 0.0), moved(&mut learner, 1e-2), moved(&mut learner, 4e-2));
    assert!(still.iter().all(|d| *d == 0.0));
    let sum = |moves: &[f64]| moves.iter().map(|d| d.abs()).sum::<f64>();
    assert!((sum(&fast) / sum(&slow) - 4.0).abs() < 1e-3, "{} {}", sum(&fast), sum(&slow));
}

#[test]
fn the_step_count_is_not_baked_into_the_step() {
    let bench = Bench::new();
    let config = bench.config("run");
    let mut learner = bench.learner(&config);
    let rows = OwnRows::new(2);
    let saved = states(&learner);
    let count = learner.table().count;
    let value = learner.table().params[0].value;
    let mut moved = |n_steps: i32| {
        for (i, (_, bytes)) in saved.iter().enumerate() {
            learner.set_state(StateId::from_idx(i), bytes).unwrap();
        }
        learner.set_state(count, &n_steps.to_le_bytes()).unwrap();
        learner.step(&[rows.rows()], &PLAIN, [0; 4]).unwrap();
        assert_eq!(learner.state(count).unwrap(), (n_steps + 1).to_le_bytes());
        let after = floats(&learner.state(value).unwrap());
        let moves = after.iter().zip(floats(&saved[value.idx()].1)).map(|(a, b)| (a - b).abs());
        f64::from(moves.fold(0.0, f32::max))
    };
    // The first moments of a gradient g are 0.1 g and 0.05 g²; their bias correction depends on the step
    // count.
    let corrected = |t: i32| 0.1 / (1.0 - 0.9f64.powi(t)) / (0.05 / (1.0 - 0.95f64.powi(t))).sqrt();
    for n_steps in [0, 1, 9, 99] {
        let (got, want) = (moved(n_steps), 1e-3 * corrected(n_steps + 1));
        assert!((got / want - 1.0).abs() < 1e-2, "after {n_steps} steps: {got}, not {want}");
    }
}

#[test]
fn the_random_state_of_dropout_is_not_baked_into_the_step() {
    let bench = Bench::new();
    let config = TrainConfig { dropout: 0.3, ..bench.config("run") };
    let mut learner = bench.learner(&config);
    let rows = OwnRows::new(2);
    // A learning rate of 0 leaves the weights unchanged: only the random state differs between the steps.
    let still = AdamSettings { lr: 0.0, ..PLAIN };
    let mut loss = |random| learner.step(&[rows.rows()], &still, random).unwrap().loss;
    let (first, second) = (loss([7, 0, 0, 0]), loss([7, 0, 1, 0]));
    assert_ne!(first, second, "another step drops different elements");
    assert_ne!(first, loss([8, 0, 0, 0]), "another seed drops different elements");
    assert_eq!(first, loss([7, 0, 0, 0]), "the same numbers drop the same elements");
    // Evaluation has no dropout.
    let (held_out, n) = learner.evaluate(&rows.rows()).unwrap();
    assert_eq!((held_out, n), learner.evaluate(&rows.rows()).unwrap());
}
