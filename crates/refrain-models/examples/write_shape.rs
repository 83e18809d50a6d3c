//! Writes a GGUF file of a well-known shape with random weights, for benchmarking other programs on it.
//!
//! `cargo run --release -p refrain-models --example write_shape -- llama-3.2-1b Q4_K_M out.gguf`

use refrain_formats::gguf::GgufWriter;
use refrain_formats::params::Arch;
use refrain_models::{Model, NamedShape, QuantMix};
use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [shape, quant, path] = args.as_slice() else {
        return Err("usage: write_shape SHAPE QUANT FILE".into());
    };
    let shape = NamedShape::find(shape).ok_or("unknown shape")?;
    let model = Model::random(shape, QuantMix::from_name(quant).ok_or("unknown weight type")?)?;
    let c = model.config();
    if c.arch != Arch::Llama {
        return Err("only llama shapes are supported".into());
    }
    let mut gguf = GgufWriter::new();
    gguf.set("general.architecture", c.arch.name())?;
    gguf.set("general.name", shape.name)?;
    for (key, value) in [
        ("block_count", c.n_layers),
        ("context_length", c.n_context),
        ("embedding_length", c.hidden),
        ("feed_forward_length", c.ffn),
        ("attention.head_count", c.n_heads),
        ("attention.head_count_kv", c.n_kv_heads),
        ("rope.dimension_count", c.rope.dims),
        ("vocab_size", c.n_vocab),
    ] {
        gguf.set(&format!("llama.{key}"), value as u32)?;
    }
    gguf.set("llama.attention.layer_norm_rms_epsilon", c.norm_eps)?;
    gguf.set("llama.rope.freq_base", c.rope.theta)?;
    gguf.set("tokenizer.ggml.model", "no_vocab")?;
    for (weight, tensor) in model.weights().iter().zip(model.tensors()) {
        // Frequencies are computed when a model is opened; they are not stored.
        if !weight.name.starts_with("rope.inv_freq") {
            gguf.tensor(&weight.name, tensor.dtype(), tensor.shape(), tensor.bytes().clone())?;
        }
    }
    gguf.write(path)?;
    Ok(())
}
