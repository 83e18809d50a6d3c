//! Training through the library: the exported model is the trained one.

use refrain::train::{
    AdamSettings, BatchRows, ConfigOverlay, ModelShape, NewModel, StepLearner, TrainConfig, TrainEvent,
    TrainOptions, TrainSpec, TrainedModel, Training,
};
use refrain::{Builtin, DType, Device, Error, Model, ModelFiles};
use std::path::Path;
use std::sync::Arc;

const CONTEXT: usize = 16;
const N_VOCAB: usize = 320;

const SPEC: TrainSpec = TrainSpec {
    n_tokens: 2 * CONTEXT,
    n_context: CONTEXT,
    dtype: DType::F32,
    masters: true,
    accumulates: false,
    dropout: 0.0,
    recompute: false,
};

fn shape(arch: &str) -> NewModel {
    let text = format!(
        "new = {{ arch = {arch:?}, n_layers = 2, hidden = 32, ffn = 48, n_heads = 4, n_kv_heads = 2 }}"
    );
    ConfigOverlay::from_toml(&text).unwrap().new.unwrap()
}

fn one_thread() -> Device {
    Device::Cpu { threads: Some(1) }
}

fn text_file(folder: &Path) -> std::path::PathBuf {
    let path = folder.join("text.txt");
    let line = |i: usize| format!("{} green bottles hang on the wall, and {} fall.\n", 90 - i, i % 7);
    std::fs::write(&path, (0..60).map(line).collect::<String>()).unwrap();
    path
}

/// Sums of losses over every fourth target of two rows, with four offsets: numbers that depend on the logits of all
/// positions.
fn losses(learner: &mut StepLearner) -> Vec<f64> {
    let n = 2 * CONTEXT;
    let tokens: Vec<i32> = (0..n).map(|i| (5 + i * 37 % 300) as i32).collect();
    let positions: Vec<i32> = (0..n).map(|i| (i % CONTEXT) as i32).collect();
    let spans: Vec<[i32; 2]> =
        (0..n).map(|i| (i / CONTEXT * CONTEXT) as i32).map(|f| [f, f + CONTEXT as i32]).collect();
    let mut losses = Vec::new();
    for part in 0..4 {
        for salt in 0..4 {
            let target = |i: usize| if i % 4 == part { (11 + i * 53 + salt * 71) as i32 % 300 } else { -1 };
            let targets: Vec<i32> = (0..n).map(target).collect();
            let rows = BatchRows { tokens: &tokens, targets: &targets, positions: &positions, spans: &spans };
            losses.push(learner.evaluate(&rows).unwrap().0);
        }
    }
    losses
}

fn learner(model: TrainedModel) -> StepLearner {
    StepLearner::new(Arc::new(model), &one_thread(), SPEC, 1).unwrap()
}

#[test]
fn a_trained_model_is_the_same_in_both_export_formats() {
    let folder = tempfile::tempdir().unwrap();
    let trained = refrain::train::TrainedTokenizer::train(
        &[text_file(folder.path())],
        &refrain::train::TokenizerPlan::new(280),
    );
    let vocab = trained.unwrap().spec;
    for arch in ["llama", "qwen2", "qwen3", "gemma3"] {
        let model = TrainedModel::fresh(shape(arch).model_config(N_VOCAB, CONTEXT).unwrap(), 3).unwrap();
        let mut steps = learner(model);
        let before = losses(&mut steps);
        let tokens: Vec<i32> = (0..2 * CONTEXT as i32).collect();
        let targets: Vec<i32> = (1..=2 * CONTEXT as i32).collect();
        let positions: Vec<i32> = (0..2 * CONTEXT).map(|i| (i % CONTEXT) as i32).collect();
        let spans: Vec<[i32; 2]> = (0..2 * CONTEXT)
            .map(|i| (i / CONTEXT * CONTEXT) as i32)
            .map(|f| [f, f + CONTEXT as i32])
            .collect();
        let rows = BatchRows { tokens: &tokens, targets: &targets, positions: &positions, spans: &spans };
        let adam = AdamSettings { lr: 2e-2, betas: [0.9, 0.95], eps: 1e-8, weight_decay: 0.1, clip: None };
        for step in 0..4 {
            steps.step(&[rows], &adam, [0, 0, step, 0]).unwrap();
        }
        let want = losses(&mut steps);
        assert!(before.iter().zip(&want).any(|(a, b)| (a - b).abs() > 0.5), "{arch} has not learnt anything");
        let model = steps.trained().unwrap();
        for (dtype, tolerance) in [(DType::F32, 1e-5), (DType::BF16, 2e-2)] {
            let hf = folder.path().join(format!("{arch}-{}", dtype.name()));
            std::fs::create_dir(&hf).unwrap();
            model.write_hf(&hf, dtype).unwrap();
            let gguf = hf.with_extension("gguf");
            model.write_gguf(&gguf, dtype, &vocab).unwrap();
            for path in [hf, gguf] {
                let got =
                    losses(&mut learner(TrainedModel::load(&ModelFiles::open(&path).unwrap()).unwrap()));
                for (got, want) in got.iter().zip(&want) {
                    let off = (got - want).abs() / want.abs();
                    assert!(off < tolerance, "{}: {got} is not {want}", path.display());
                }
            }
        }
    }
}

fn config(folder: &Path, more: &str) -> TrainConfig {
    let (text, out) = (text_file(folder), folder.join("run"));
    let toml = format!(
        "data = {text:?}\nout = {out:?}\ncontext = {CONTEXT}\nbatch = 2\nsteps = 3\nlr = 1e-3\n{more}"
    );
    TrainConfig::default().overlay(ConfigOverlay::from_toml(&toml).unwrap())
}

fn options() -> TrainOptions {
    TrainOptions { device: one_thread(), ..TrainOptions::default() }
}

#[test]
fn a_run_from_a_model_keeps_its_tokenizer_and_exports_both_formats() {
    let folder = tempfile::tempdir().unwrap();
    // A model to start from, made by a separate run.
    let fresh = "new = { arch = 'gemma3', n_layers = 1, hidden = 32, ffn = 48, n_heads = 2 }\n\
                 tokenizer = { train = { vocab_size = 290 } }\nsample_every = 3\nsample_prompt = 'ten'";
    let training = Training::prepare(config(folder.path(), fresh), options(), &mut |_| {}).unwrap();
    assert!(training.memory().total_bytes() > 0 && training.step_flops() > 0.0);
    let mut sampled = None;
    let finished = training
        .run(&|| false, &mut |event| {
            if let TrainEvent::Sampled { step, text } = event {
                sampled = Some((*step, (*text).to_owned()));
            }
        })
        .unwrap();
    assert!(finished.not_exported.is_empty(), "{:?}", finished.not_exported);
    assert!(matches!(&sampled, Some((3, text)) if text.starts_with("ten")), "{sampled:?}");
    let first = Model::open(folder.path().join("run/model.gguf")).unwrap();
    for form in ["model.gguf", "model"] {
        let from = folder.path().join("run").join(form);
        let next = tempfile::tempdir().unwrap();
        let more = format!("from = {:?}\n", from.display().to_string());
        let training = Training::prepare(config(next.path(), &more), options(), &mut |_| {}).unwrap();
        let finished = training.run(&|| false, &mut |_| {}).unwrap();
        assert_eq!(finished.exports.len(), 2, "{:?}", finished.not_exported);
        for export in &finished.exports {
            let again = Model::open(&export.path).unwrap();
            let text = "seven green bottles, 1234!";
            assert_eq!(again.text_tokens(text).unwrap(), first.text_tokens(text).unwrap(), "{export:?}");
            let ends = |model: &Model| model.tokenizer().end_of_generation().to_vec();
            assert_eq!(ends(&again), ends(&first));
        }
    }
}

#[test]
fn a_run_that_does_not_fit_is_refused_before_it_starts() {
    let folder = tempfile::tempdir().unwrap();
    let new = "new = { arch = 'llama', n_layers = 1, hidden = 32, ffn = 48, n_heads = 2 }";
    let config = TrainConfig { batch: 50_000_000, ..config(folder.path(), new) };
    let training = Training::prepare(config, options(), &mut |_| {}).unwrap();
    let error = training.run(&|| false, &mut |_| {}).unwrap_err();
    let Error::TrainMemory { needed_bytes, free_bytes, .. } = &error else { panic!("{error}") };
    assert!(needed_bytes > free_bytes);
    assert!(error.hint().unwrap().contains("batch = "), "{error:?}");
}

#[test]
fn a_context_or_a_vocabulary_beyond_the_models_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let small = ModelShape { n_vocab: Some(64), ..small_shape() };
    let base = config(folder.path(), "from = 'nothing'\nexport = 'none'\n");
    let new = TrainConfig { from: None, new: Some(NewModel::Shape(small)), ..base.clone() };
    let error = Training::prepare(new, options(), &mut |_| {}).unwrap_err();
    assert!(
        matches!(error, Error::Vocabulary { model: 64, .. }) || error.to_string().contains("vocab"),
        "{error}"
    );
    let files = Some(Builtin::Stories.files().unwrap());
    let long = TrainConfig { context: 1 << 16, ..base.clone() };
    let error = Training::prepare(long, TrainOptions { files, ..options() }, &mut |_| {}).unwrap_err();
    assert!(error.to_string().contains("context is 65536, it must be at most 512"), "{error}");
    let error = Training::prepare(base, options(), &mut |_| {}).unwrap_err();
    assert!(error.to_string().contains("nothing"), "{error}");
}

fn small_shape() -> ModelShape {
    let NewModel::Shape(shape) = shape("llama") else { panic!("a table") };
    shape
}
