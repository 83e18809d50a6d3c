//! Small models with recorded logits, embedded in the test binary so that it also runs without the
//! repository.

use std::sync::Arc;

use refrain_formats::{FormatError, ModelFiles};
use refrain_models::{Model, Pooling, TensorSource};
use refrain_tensor::{Bytes, DType, HostTensor};
use safetensors::SafeTensors;

macro_rules! goldens {
    ($($name:literal),* $(,)?) => {
        pub const CASES: &[&str] = &[$($name),*];

        fn files(case: &str) -> [(&'static str, &'static [u8]); 3] {
            match case {
                $($name => [
                    ("config.json", include_bytes!(
                        concat!("../../../refrain-models/tests/goldens/", $name, "/config.json"))),
                    ("model.safetensors", include_bytes!(
                        concat!("../../../refrain-models/tests/goldens/", $name, "/model.safetensors"))),
                    ("golden.safetensors", include_bytes!(
                        concat!("../../../refrain-models/tests/goldens/", $name, "/golden.safetensors"))),
                ],)*
                other => panic!("there is no golden model {other}"),
            }
        }
    };
}

goldens!(
    "llama",
    "llama-rope3",
    "llama-tied",
    "mistral-window",
    "qwen2",
    "qwen3",
    "qwen3-yarn",
    "gemma3",
    "gemma3-linear",
    "gemma4-e2b",
    "gemma4-e4b",
    "gemma4-dense",
    "gemma4-heads",
    "gemma4-experts",
    "qwen3moe",
    "qwen3moe-plain",
    "phi3",
    "phi3-short",
    "mistral3",
    "gemma2",
    "smollm3",
    "olmo2",
    "olmo3",
    "granite",
    "qwen3vl",
    "glm4",
    "cohere2",
    "qwen35",
    "qwen35-odd",
    "qwen35moe",
    "qwen35moe-joined",
    "lfm2",
    "gpt-oss"
);

macro_rules! embed_goldens {
    ($($name:literal),* $(,)?) => {
        /// Models with recorded vectors of texts.
        pub const EMBED_CASES: &[&str] = &[$($name),*];

        fn embed_files(case: &str) -> [&'static [u8]; 3] {
            match case {
                $($name => [
                    include_bytes!(concat!("../../../refrain-models/tests/goldens/", $name, "/config.json")),
                    include_bytes!(concat!("../../../refrain-models/tests/goldens/", $name, "/model.safetensors")),
                    include_bytes!(concat!("../../../refrain-models/tests/goldens/", $name, "/embed.safetensors")),
                ],)*
                other => panic!("there are no golden vectors of {other}"),
            }
        }
    };
}

embed_goldens!("bert", "bert-odd", "qwen3");

/// Texts as tokens, and their vectors scaled to length 1.
pub fn embed_golden(case: &str, pooling: Pooling) -> (Vec<Vec<u32>>, Vec<Vec<f32>>) {
    let file = SafeTensors::deserialize(embed_files(case)[2]).unwrap();
    let ints = |name: &str| -> Vec<i64> {
        let words = file.tensor(name).unwrap().data().as_chunks::<8>().0.to_vec();
        words.into_iter().map(i64::from_le_bytes).collect()
    };
    let mut tokens = ints("tokens").into_iter().map(|token| token as u32);
    let texts = ints("lengths").into_iter().map(|n| tokens.by_ref().take(n as usize).collect()).collect();
    let vectors = file.tensor(pooling.name()).unwrap();
    let values: Vec<f32> = vectors.data().as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
    let unit = |vector: &[f32]| {
        let length = vector.iter().map(|v| v * v).sum::<f32>().sqrt();
        vector.iter().map(|v| v / length).collect()
    };
    (texts, values.chunks(vectors.shape()[1]).map(unit).collect())
}

pub fn model(case: &str) -> Arc<Model> {
    Arc::new(Model::load(&model_files(case)).unwrap())
}

/// A model whose embedding of one token is NaN.
pub fn poisoned_model(case: &str, token: usize) -> Arc<Model> {
    let files = model_files(case);
    let config = files.config().unwrap();
    Arc::new(Model::from_source(config, &Poisoned { files, token }).unwrap())
}

struct Poisoned {
    files: ModelFiles,
    token: usize,
}

impl TensorSource for Poisoned {
    fn find(&self, gguf_name: &str, hf_name: &str) -> Result<Option<HostTensor>, FormatError> {
        let found = self.files.find(gguf_name, hf_name)?;
        let Some(tensor) = found.filter(|_| gguf_name == "token_embd.weight") else {
            return self.files.find(gguf_name, hf_name);
        };
        let width = tensor.shape().dims()[1];
        let mut values = tensor.to_f32().unwrap();
        values[self.token * width..][..width].fill(f32::NAN);
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        Ok(Some(HostTensor::new(DType::F32, tensor.shape(), Bytes::new(bytes)).unwrap()))
    }

    fn name<'n>(&self, gguf_name: &'n str, hf_name: &'n str) -> &'n str {
        self.files.name(gguf_name, hf_name)
    }
}

pub fn model_files(case: &str) -> ModelFiles {
    // The files are mapped, so the paths are not needed afterwards.
    let folder = tempfile::tempdir().unwrap();
    let names = ["config.json", "model.safetensors"];
    let contents = match CASES.contains(&case) {
        true => files(case).map(|(_, bytes)| bytes),
        false => embed_files(case),
    };
    for (name, bytes) in names.iter().zip(contents) {
        std::fs::write(folder.path().join(name), bytes).unwrap();
    }
    ModelFiles::open(folder.path()).unwrap()
}

/// Tokens, and the logits after each.
pub fn golden(case: &str) -> (Vec<u32>, Vec<f32>) {
    let file = SafeTensors::deserialize(files(case)[2].1).unwrap();
    let (tokens, logits) = (file.tensor("tokens").unwrap(), file.tensor("logits").unwrap());
    let tokens = tokens.data().chunks_exact(8).map(|b| i64::from_le_bytes(b.try_into().unwrap()) as u32);
    let logits = logits.data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap()));
    (tokens.collect(), logits.collect())
}

pub fn relative_error(got: &[f32], want: &[f32]) -> f64 {
    assert_eq!(got.len(), want.len());
    let norm = |v: &mut dyn Iterator<Item = f64>| v.map(|x| x * x).sum::<f64>().sqrt();
    let difference = norm(&mut got.iter().zip(want).map(|(a, b)| f64::from(*a) - f64::from(*b)));
    difference / norm(&mut want.iter().map(|b| f64::from(*b)))
}
