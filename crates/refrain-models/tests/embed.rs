//! Vectors of the golden encoders and decoders on the CPU, compared with those of `transformers`.

mod common;

use common::gguf::convert;
use common::{folder, relative_error};
use refrain_cpu::CpuBackend;
use refrain_engine::{
    BackendRunner, Embedder, EmbedderOptions, EngineError, RunnerOptions, StepKind, Stopped,
};
use refrain_formats::ModelFiles;
use refrain_formats::gguf::{Gguf, GgufWriter};
use refrain_formats::params::{EmbeddingDefaults, Pooling};
use refrain_graph::GradError;
use refrain_models::{Model, ModelError, TrainPhase, TrainSpec};
use refrain_tensor::{Bytes, DType};
use safetensors::SafeTensors;
use std::sync::Arc;

/// As in tools/embed_goldens.py.
const TOLERANCE: f64 = 1e-5;
const ENCODERS: [&str; 2] = ["bert", "bert-odd"];
const DECODERS: [&str; 2] = ["qwen3", "gemma3"];

struct EmbedGolden {
    texts: Vec<Vec<u32>>,
    bytes: Vec<u8>,
}

impl EmbedGolden {
    fn read(case: &str) -> EmbedGolden {
        let bytes = std::fs::read(folder(case).join("embed.safetensors")).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let ints = |name: &str| -> Vec<i64> {
            let words = file.tensor(name).unwrap().data().as_chunks::<8>().0.to_vec();
            words.into_iter().map(i64::from_le_bytes).collect()
        };
        let mut tokens = ints("tokens").into_iter().map(|token| token as u32);
        let texts = ints("lengths").into_iter().map(|n| tokens.by_ref().take(n as usize).collect()).collect();
        EmbedGolden { texts, bytes }
    }

    /// The vectors of all texts, scaled to length 1 if requested.
    fn vectors(&self, pooling: Pooling, normalizes: bool) -> Vec<Vec<f32>> {
        let file = SafeTensors::deserialize(&self.bytes).unwrap();
        let tensor = file.tensor(pooling.name()).unwrap();
        let values: Vec<f32> =
            tensor.data().as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
        let mut vectors: Vec<Vec<f32>> = values.chunks(tensor.shape()[1]).map(<[f32]>::to_vec).collect();
        if normalizes {
            for vector in &mut vectors {
                let length = vector.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>().sqrt();
                vector.iter_mut().for_each(|v| *v = (f64::from(*v) / length) as f32);
            }
        }
        vectors
    }
}

fn embedder(
    model: Model,
    pooling: Pooling,
    normalizes: bool,
    step_tokens: usize,
    threads: usize,
) -> Embedder {
    let max_tokens = model.config().n_context.min(64);
    let options = EmbedderOptions { pooling, normalizes, max_tokens, step_tokens };
    Embedder::new(CpuBackend::new(threads).unwrap(), Arc::new(model), options).unwrap()
}

fn files(case: &str) -> ModelFiles {
    ModelFiles::open(folder(case)).unwrap()
}

fn assert_near(case: &str, got: &[Vec<f32>], want: &[Vec<f32>]) {
    assert_eq!(got.len(), want.len());
    for (text, (got, want)) in got.iter().zip(want).enumerate() {
        let error = relative_error(got, want);
        assert!(error < TOLERANCE, "{case}, text {text}: {error:.1e}");
    }
}

#[test]
fn encoders_agree_with_transformers_for_every_pooling_and_packing() {
    for case in ENCODERS {
        let golden = EmbedGolden::read(case);
        for pooling in Pooling::ALL {
            for (normalizes, step_tokens) in [(true, 512), (false, 32)] {
                let embedder =
                    embedder(Model::load(&files(case)).unwrap(), pooling, normalizes, step_tokens, 2);
                let got = embedder.embed(golden.texts.clone()).unwrap();
                let case = format!("{case} {pooling} {normalizes} {step_tokens}");
                assert_near(&case, &got, &golden.vectors(pooling, normalizes));
            }
        }
    }
}

#[test]
fn an_encoder_in_llama_cpps_layout_agrees_too() {
    let golden = EmbedGolden::read("bert");
    let files = convert("bert", |_| {});
    let defaults = files.embedding_defaults().unwrap();
    assert_eq!(defaults, EmbeddingDefaults { pooling: Some(Pooling::Mean), max_tokens: None });
    let embedder = embedder(Model::load(&files).unwrap(), Pooling::Mean, true, 512, 2);
    let got = embedder.embed(golden.texts.clone()).unwrap();
    assert_near("bert gguf", &got, &golden.vectors(Pooling::Mean, true));
}

#[test]
fn decoders_embed_with_causal_attention() {
    for case in DECODERS {
        let golden = EmbedGolden::read(case);
        for pooling in [Pooling::Last, Pooling::Mean] {
            let embedder = embedder(Model::load(&files(case)).unwrap(), pooling, false, 512, 2);
            let got = embedder.embed(golden.texts.clone()).unwrap();
            assert_near(&format!("{case} {pooling}"), &got, &golden.vectors(pooling, false));
        }
    }
}

#[test]
fn threads_and_repetition_do_not_change_a_bit() {
    let golden = EmbedGolden::read("bert");
    let vectors = |threads| {
        let embedder = embedder(Model::load(&files("bert")).unwrap(), Pooling::Mean, true, 512, threads);
        let first = embedder.embed(golden.texts.clone()).unwrap();
        assert_eq!(embedder.embed(golden.texts.clone()).unwrap(), first);
        first
    };
    assert_eq!(vectors(1), vectors(3));
}

#[test]
fn many_threads_share_an_embedder() {
    let golden = EmbedGolden::read("bert");
    let embedder = embedder(Model::load(&files("bert")).unwrap(), Pooling::Mean, true, 512, 1);
    let want = golden.vectors(Pooling::Mean, true);
    std::thread::scope(|scope| {
        for start in 0..8 {
            let (embedder, golden, want) = (embedder.clone(), &golden, &want);
            scope.spawn(move || {
                for i in 0..6 {
                    let text = (start + i) % golden.texts.len();
                    let got = embedder.embed(vec![golden.texts[text].clone()]).unwrap();
                    assert_near("shared", &got, &want[text..=text]);
                }
            });
        }
    });
    let tally = embedder.ledger().tally(StepKind::Embed).clone();
    assert!(tally.eager > 0 && tally.failed == 0, "{tally}");
}

#[test]
fn texts_that_cannot_be_embedded_are_refused_with_the_numbers() {
    let embedder = embedder(Model::load(&files("bert")).unwrap(), Pooling::Mean, true, 512, 1);
    assert_eq!(embedder.embed(Vec::new()).unwrap(), Vec::<Vec<f32>>::new());
    assert!(matches!(embedder.embed(vec![vec![1], vec![]]), Err(EngineError::EmptyPrompt)));
    let long = embedder.embed(vec![vec![5; 65]]);
    assert!(matches!(long, Err(EngineError::PromptTooLong { n_tokens: 65, context: 64 })), "{long:?}");
    let unknown = embedder.embed(vec![vec![128]]);
    assert!(matches!(unknown, Err(EngineError::UnknownToken { token: 128, vocab: 128 })), "{unknown:?}");
}

#[test]
fn a_vector_that_is_not_finite_fails_only_its_own_caller() {
    let model = Model::load(&files("bert")).unwrap();
    let table = refrain_graph::WeightId::from_idx(0);
    assert_eq!(model.weights()[0].name, "token_embd.weight");
    let tensor = &model.tensors()[0];
    let mut values = tensor.to_f32().unwrap();
    values[7 * 48..8 * 48].fill(f32::NAN);
    let poisoned = refrain_tensor::HostTensor::from_f32(tensor.shape(), &values).unwrap();
    let embedder = embedder(model.with_values([(table, poisoned)]).unwrap(), Pooling::Mean, true, 512, 1);
    std::thread::scope(|scope| {
        for i in 0..16_u32 {
            let embedder = embedder.clone();
            scope.spawn(move || {
                let got = embedder.embed(vec![vec![3, 4], vec![if i % 2 == 0 { 7 } else { 8 }, 5, 6]]);
                match i % 2 {
                    0 => assert!(matches!(got, Err(EngineError::NonFiniteVectors { n_texts: 2 })), "{got:?}"),
                    _ => assert_eq!(got.unwrap().len(), 2),
                }
            });
        }
    });
}

#[test]
fn encoders_refuse_to_generate_and_to_learn_and_recurrent_models_to_embed() {
    let model = Arc::new(Model::load(&files("bert")).unwrap());
    let backend = CpuBackend::new(1).unwrap();
    let refused = BackendRunner::new(backend, model.clone(), RunnerOptions::default()).map(|_| ());
    let Err(error) = refused else { panic!("an encoder generates text") };
    assert!(matches!(error, EngineError::Encoder { arch: "bert" }), "{error}");
    assert!(error.hint().is_some());
    let spec = TrainSpec {
        n_tokens: 8,
        n_context: 8,
        dtype: DType::F32,
        masters: false,
        accumulates: false,
        dropout: 0.0,
        recompute: false,
    };
    let learns = model.train_graph(&spec, TrainPhase::Update);
    assert!(matches!(learns, Err(GradError::NotDifferentiable { .. })), "{learns:?}");
    let options =
        EmbedderOptions { pooling: Pooling::Last, normalizes: true, max_tokens: 64, step_tokens: 64 };
    let recurrent = Arc::new(Model::load(&files("lfm2")).unwrap());
    let Err(error) = Embedder::new(CpuBackend::new(1).unwrap(), recurrent, options) else {
        panic!("a recurrent model embeds texts")
    };
    assert!(matches!(error, EngineError::CannotEmbed { arch: "lfm2", .. }), "{error}");
    let options = EmbedderOptions { max_tokens: 65, ..options };
    let Err(error) = Embedder::new(CpuBackend::new(1).unwrap(), model, options) else {
        panic!("texts longer than the table of positions")
    };
    assert!(matches!(error, EngineError::Context { got: 65, max: 64 }), "{error}");
    assert_eq!(Stopped::Closed.to_string(), "it was shut down");
}

#[test]
fn damaged_encoders_are_refused() {
    let without = |name: &'static str| {
        let files = convert("bert", |tensors| tensors.retain(|t| t.name != name));
        Model::load(&files).map(drop)
    };
    for name in ["position_embd.weight", "token_types.weight", "blk.1.layer_output_norm.bias"] {
        let error = without(name).unwrap_err();
        assert!(matches!(&error, ModelError::MissingTensor { name: got, .. } if got == name), "{error}");
    }
    let files = convert("bert", |tensors| {
        let table = tensors.iter_mut().find(|t| t.name == "position_embd.weight").unwrap();
        table.dims[0] -= 1;
        let bytes = table.dims.iter().product::<usize>() * 4;
        table.bytes.truncate(bytes);
    });
    let error = Model::load(&files).unwrap_err();
    assert!(matches!(error, ModelError::TensorShape { .. }), "{error}");
    let mut writer = GgufWriter::new();
    writer.set("general.architecture", "bert").unwrap();
    writer.set("bert.pooling_type", 4_u32).unwrap();
    let ranks = Gguf::from_bytes(Bytes::new(writer.to_vec())).unwrap();
    let error = ModelFiles::Gguf(ranks).embedding_defaults().unwrap_err();
    assert!(error.to_string().contains("ranks pairs of texts"), "{error}");
}
