//! Models with NaN or infinite logits: generation fails with an error that names the position.

use refrain_cpu::CpuBackend;
use refrain_engine::{
    BackendRunner, Core, Engine, EngineError, EngineOptions, PerplexityOptions, RunnerOptions,
    SamplingParams, SamplingRow,
};
use refrain_formats::{FormatError, ModelFiles};
use refrain_models::{Model, TensorSource};
use refrain_tensor::{Bytes, DType, HostTensor};
use std::path::Path;
use std::sync::Arc;

const CONTEXT: usize = 64;

/// The files of the small llama, with one tensor changed.
struct Spoiled {
    files: ModelFiles,
    name: &'static str,
    change: fn(usize, f32) -> f32,
}

impl TensorSource for Spoiled {
    fn find(&self, gguf_name: &str, hf_name: &str) -> Result<Option<HostTensor>, FormatError> {
        let Some(tensor) = self.files.find(gguf_name, hf_name)? else { return Ok(None) };
        if gguf_name != self.name {
            return Ok(Some(tensor));
        }
        let values = tensor.to_f32().unwrap().into_iter().enumerate();
        let bytes: Vec<u8> = values.flat_map(|(i, v)| (self.change)(i, v).to_le_bytes()).collect();
        Ok(Some(HostTensor::new(DType::F32, tensor.shape(), Bytes::new(bytes)).unwrap()))
    }

    fn name<'n>(&self, gguf_name: &'n str, hf_name: &'n str) -> &'n str {
        self.files.name(gguf_name, hf_name)
    }
}

fn runner(name: &'static str, change: fn(usize, f32) -> f32, kv_dtype: DType) -> BackendRunner<CpuBackend> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/llama");
    let files = ModelFiles::open(folder).unwrap();
    let config = files.config().unwrap();
    let model = Arc::new(Model::from_source(config, &Spoiled { files, name, change }).unwrap());
    let options = RunnerOptions {
        context: CONTEXT,
        kv_block: 16,
        kv_dtype,
        max_tokens: 64,
        ..RunnerOptions::default()
    };
    BackendRunner::new(CpuBackend::new(1).unwrap(), model, options).unwrap()
}

/// Evaluates a prompt of three tokens, then token 7.
fn chosen(name: &'static str, change: fn(usize, f32) -> f32, kv_dtype: DType) -> Result<(), EngineError> {
    let mut core = Core::new(Box::new(runner(name, change, kv_dtype)), CONTEXT);
    let (mut sequence, mut row) = (core.open(), SamplingRow::new(&SamplingParams::greedy()));
    core.prompt(&mut sequence, &[1, 2, 3], &mut row, |_| true)?;
    core.decode(&mut sequence, 7, &mut row).map(drop)
}

fn position(error: &EngineError) -> usize {
    match error {
        EngineError::NonFinite { position, .. } => *position,
        other => panic!("{other}"),
    }
}

#[test]
fn a_single_nan_weight_is_an_error_at_the_first_token_it_affects() {
    chosen("output_norm.weight", |_, w| w, DType::F16).unwrap();
    let all = chosen("output_norm.weight", |i, w| if i == 3 { f32::NAN } else { w }, DType::F16);
    assert_eq!(position(&all.unwrap_err()), 2);
    let infinite = chosen("output_norm.weight", |i, w| if i == 3 { f32::INFINITY } else { w }, DType::F16);
    assert_eq!(position(&infinite.unwrap_err()), 2);
    // A single logit.
    let one = chosen("output.weight", |i, w| if i == 5 { f32::NAN } else { w }, DType::F16);
    assert_eq!(position(&one.unwrap_err()), 2);
}

#[test]
fn a_token_during_decoding_is_reported_by_its_position() {
    // The embedding row of token 7: at most 64 elements wide in every golden.
    let change: fn(usize, f32) -> f32 = |i, w| if i / 32 == 14 || i / 64 == 7 { f32::NAN } else { w };
    let error = chosen("token_embd.weight", change, DType::F16).unwrap_err();
    assert_eq!(position(&error), 3);
    assert_eq!(error.to_string(), "the logits after position 3 are not finite");
}

#[test]
fn values_that_overflow_an_f16_cache_are_an_error_with_a_hint() {
    let huge: fn(usize, f32) -> f32 = |_, w| 3e6 * w;
    let error = chosen("blk.0.attn_v.weight", huge, DType::F16).unwrap_err();
    assert_eq!(position(&error), 2);
    let hint = error.hint().unwrap();
    assert!(hint.contains("BF16"), "{hint}");
    chosen("blk.0.attn_v.weight", huge, DType::BF16).unwrap();
    chosen("blk.0.attn_v.weight", huge, DType::F32).unwrap();
}

#[test]
fn perplexity_fails_at_a_nan_probability() {
    let score = |change: fn(usize, f32) -> f32| {
        let runner = runner("output_norm.weight", change, DType::F16);
        let engine = Engine::new(Box::new(runner), EngineOptions::default()).unwrap();
        let sequence = engine.open(CONTEXT).unwrap();
        let tokens: Vec<u32> = (0..48).map(|i| i % 40).collect();
        let options = PerplexityOptions { window: 16, max_windows: None, bos: None };
        refrain_engine::perplexity(&engine, &sequence, &tokens, options, |_, _| {})
    };
    assert!(score(|_, w| w).unwrap().perplexity.is_finite());
    let error = score(|i, w| if i == 0 { f32::NAN } else { w }).unwrap_err();
    assert_eq!(position(&error), 8, "the first scored token");
}
