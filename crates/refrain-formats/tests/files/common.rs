//! Small models for tests.

use refrain_formats::gguf::{Array, Gguf, GgufWriter, MetadataValue, StrArray};
use refrain_formats::{FormatError, ModelFiles};
use refrain_tensor::{Bytes, DType, Shape};
use std::path::Path;

/// Returns zeroes for a tensor.
pub(crate) fn zeroes(dtype: DType, shape: Shape) -> Bytes {
    Bytes::new(vec![0u8; dtype.bytes_for(shape.n_elements()).unwrap()])
}

/// The metadata of a tiny llama.
pub(crate) fn llama_metadata() -> GgufWriter {
    let mut w = GgufWriter::new();
    let keys: [(&str, MetadataValue); 13] = [
        ("general.architecture", "llama".into()),
        ("general.name", "Tiny".into()),
        ("llama.block_count", 2u32.into()),
        ("llama.context_length", 64u32.into()),
        ("llama.embedding_length", 32u32.into()),
        ("llama.feed_forward_length", 64u32.into()),
        ("llama.attention.head_count", 4u32.into()),
        ("llama.attention.head_count_kv", 2u32.into()),
        ("llama.attention.layer_norm_rms_epsilon", 1e-5f32.into()),
        ("llama.rope.freq_base", 1e4f32.into()),
        ("tokenizer.ggml.tokens", ["<s>", "</s>", "a", "ü"].iter().collect::<StrArray>().into()),
        ("tokenizer.ggml.token_type", Array::I32([3, 3, 1, 1].into()).into()),
        ("tokenizer.ggml.eos_token_id", 1u32.into()),
    ];
    for (key, value) in keys {
        w.set(key, value).unwrap();
    }
    w
}

/// A tiny llama with a few tensors and metadata of every kind.
pub(crate) fn small_gguf() -> Vec<u8> {
    let mut w = llama_metadata();
    let nested = [Array::U8([1, 2].into()), Array::String(["x"].iter().collect())];
    w.set("t.nested", Array::Array(nested.into())).unwrap();
    w.set("t.f64", 0.5f64).unwrap();
    w.set("t.bools", Array::Bool([true, false].into())).unwrap();
    for (name, dtype, shape) in [
        ("token_embd.weight", DType::Q8_0, Shape::from([4, 32])),
        ("output_norm.weight", DType::F32, Shape::from([32])),
        ("blk.0.attn_q.weight", DType::Q4_0, Shape::from([32, 32])),
    ] {
        w.tensor(name, dtype, shape, zeroes(dtype, shape)).unwrap();
    }
    w.to_vec()
}

pub(crate) fn read(bytes: Vec<u8>) -> Result<Gguf, FormatError> {
    Gguf::from_named_bytes("m.gguf", Bytes::new(bytes))
}

/// Returns the message of an error and checks that it has a hint.
pub(crate) fn refused<T>(result: Result<T, FormatError>) -> String {
    let error = result.err().expect("should be refused");
    let hint = error.hint().unwrap_or_else(|| panic!("no hint for: {error}"));
    assert!(!hint.is_empty() && !hint.ends_with('.'), "{hint}");
    let message = error.to_string();
    assert!(!message.contains("Fault") && !message.contains("Some("), "internals in: {message}");
    message
}

/// Reads everything in a file.
pub(crate) fn use_all(gguf: &Gguf) {
    for (key, value) in gguf.metadata().iter() {
        assert!(gguf.metadata().get(key).is_some());
        if let MetadataValue::Array(array) = value {
            (0..array.len()).for_each(|i| assert!(array.get(i).is_some()));
        }
    }
    for info in gguf.tensors() {
        let tensor = gguf.tensor(info.name()).unwrap();
        assert_eq!(tensor.bytes().as_slice().len() as u64, info.n_bytes());
    }
    let _ = refrain_formats::params::ModelConfig::from_gguf(gguf);
}

/// Writes a safetensors file of F32 tensors.
pub(crate) fn write_safetensors(path: &Path, tensors: &[(&str, &[usize])]) {
    use safetensors::{Dtype, tensor::TensorView};
    let data = vec![0u8; 4096];
    let view = |&(name, shape): &(&str, &[usize])| {
        let n_bytes = 4 * shape.iter().product::<usize>();
        (name.to_owned(), TensorView::new(Dtype::F32, shape.to_vec(), &data[..n_bytes]).unwrap())
    };
    std::fs::write(path, safetensors::serialize(tensors.iter().map(view), None).unwrap()).unwrap();
}

/// The configuration of a tiny llama in the form of `transformers` 4.
pub(crate) fn llama_config() -> serde_json::Value {
    serde_json::json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "vocab_size": 128,
        "rope_theta": 500000.0, "rope_scaling": null, "tie_word_embeddings": false, "attention_bias": false,
        "bos_token_id": 1, "eos_token_id": 2
    })
}

pub(crate) fn open(path: &Path) -> Result<ModelFiles, FormatError> {
    ModelFiles::open(path)
}
