//! Hyperparameters from `config.json`, in the spellings of `transformers` 4 and 5.

use crate::common::{llama_config, refused, write_safetensors};
use refrain_formats::FormatError;
use refrain_formats::hf::{HfFolder, JsonObject};
use refrain_formats::params::{
    Activation, Arch, GenerationDefaults, LayerAttention, ModelConfig, RopeScaling, RopeStyle, Yarn,
};
use serde_json::{Value, json};
use std::path::Path;

fn parse(config: Value) -> Result<ModelConfig, FormatError> {
    ModelConfig::from_hf_config(&JsonObject::new(Path::new("config.json"), config)?)
}

/// The tiny llama with keys replaced.
fn with(changes: Value) -> Value {
    let mut config = llama_config();
    for (key, value) in changes.as_object().unwrap() {
        config[key] = value.clone();
    }
    config
}

fn gemma() -> Value {
    with(json!({
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_act": null,
        "hidden_activation": "gelu_pytorch_tanh", "num_hidden_layers": 7, "head_dim": 16,
        "query_pre_attn_scalar": 24, "sliding_window": 8, "tie_word_embeddings": true, "rope_theta": null
    }))
}

#[test]
fn a_llama_is_read() {
    let c = parse(llama_config()).unwrap();
    assert_eq!((c.arch, c.activation), (Arch::Llama, Activation::Silu));
    assert_eq!((c.n_vocab, c.n_layers, c.hidden, c.ffn), (128, 2, 64, 96));
    assert_eq!((c.n_heads, c.n_kv_heads, c.head_dim, c.n_context), (4, 2, 16, 256));
    assert_eq!((c.rope.theta, c.rope.dims, c.rope.style), (5e5, 16, RopeStyle::Neox));
    assert_eq!((c.attn_scale, c.norm_offset, c.embedding_scale), (0.25, 0.0, 1.0));
    assert!(!c.tied_embeddings && !c.qkv_bias && !c.qk_norm);
    assert_eq!((c.bos, c.eos), (Some(1), vec![2]));
}

#[test]
fn llama_3_scaling_reads_the_same_in_both_spellings() {
    let numbers = json!({
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
        "rope_type": "llama3"
    });
    let old = parse(with(json!({ "rope_scaling": numbers }))).unwrap();
    let mut parameters = numbers.clone();
    parameters["rope_theta"] = json!(500000.0);
    let new = parse(with(json!({ "rope_theta": null, "rope_parameters": parameters }))).unwrap();
    let expected = RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        n_original_context: 64,
    };
    assert_eq!((old.rope.scaling, old.rope.theta), (expected, 5e5));
    assert_eq!(old, new);
}

#[test]
fn gemma_reads_the_same_in_both_spellings() {
    let mut old = gemma();
    old["rope_theta"] = json!(1000000.0);
    old["rope_local_base_freq"] = json!(10000.0);
    old["rope_scaling"] = json!({ "factor": 8.0, "rope_type": "linear" });
    old["sliding_window_pattern"] = json!(6);
    let mut new = gemma();
    new["rope_parameters"] = json!({
        "full_attention": { "factor": 8.0, "rope_theta": 1000000.0, "rope_type": "linear" },
        "sliding_attention": { "rope_theta": 10000.0, "rope_type": "default" }
    });
    let mut types = vec!["sliding_attention"; 7];
    types[5] = "full_attention";
    new["layer_types"] = json!(types);
    let (old, new) = (parse(old).unwrap(), parse(new).unwrap());
    assert_eq!(old, new);
    assert_eq!((old.window(4), old.window(5), old.window(6)), (Some(8), None, Some(8)));
    assert_eq!((old.rope_theta(0), old.rope_theta(5)), (1e4, 1e6));
    assert_eq!(old.rope_scaling(0), RopeScaling::None);
    assert_eq!(old.rope_scaling(5), RopeScaling::Linear { factor: 8.0 });
    assert_eq!((old.attn_scale, old.embedding_scale, old.norm_offset), (24f32.sqrt().recip(), 8.0, 1.0));
    assert!(old.qk_norm && old.tied_embeddings);
    assert_eq!(old.activation, Activation::GeluTanh);
}

#[test]
fn mistral_slides_in_all_layers_unless_the_window_is_null() {
    let mistral = |window: Value| {
        let names = json!({ "architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window });
        parse(with(names)).unwrap()
    };
    let c = mistral(json!(4096));
    assert_eq!((c.arch, c.sliding_window), (Arch::Llama, Some(4096)));
    assert_eq!(c.layers, [LayerAttention::Sliding; 2]);
    assert_eq!(mistral(Value::Null).layers, [LayerAttention::Full; 2]);
    let unsaid = parse(with(json!({ "architectures": ["MistralForCausalLM"] }))).unwrap();
    assert_eq!(unsaid.sliding_window, Some(4096));
}

#[test]
fn qwen_has_biases_or_norms_and_slides_only_where_told() {
    let qwen2 = |more: Value| {
        let mut config = with(json!({ "architectures": ["Qwen2ForCausalLM"], "sliding_window": 32 }));
        more.as_object().unwrap().iter().for_each(|(k, v)| config[k] = v.clone());
        parse(config).unwrap()
    };
    let c = qwen2(json!({ "use_sliding_window": false }));
    assert!(c.qkv_bias && !c.attn_output_bias && !c.qk_norm && c.sliding_window.is_none());
    let c = qwen2(json!({ "use_sliding_window": true, "max_window_layers": 1 }));
    assert_eq!((c.window(0), c.window(1)), (None, Some(32)));
    let c = parse(with(json!({ "architectures": ["Qwen3ForCausalLM"] }))).unwrap();
    assert!(c.qk_norm && !c.qkv_bias);
    assert_eq!((c.head_dim, c.rope.dims), (128, 128));
}

#[test]
fn yarn_is_read_with_the_recommended_attention_factor() {
    let rope = json!({ "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64 });
    let RopeScaling::Yarn(yarn) = parse(with(json!({ "rope_scaling": rope }))).unwrap().rope.scaling else {
        panic!("not yarn")
    };
    let expected = Yarn {
        factor: 4.0,
        n_original_context: 64,
        beta_fast: 32.0,
        beta_slow: 1.0,
        attention_factor: 0.1 * 4f32.ln() + 1.0,
        truncate: true,
    };
    assert_eq!(yarn, expected);
}

#[test]
fn the_model_type_will_do_where_no_class_is_named() {
    let c = parse(with(json!({ "architectures": null, "model_type": "qwen2" }))).unwrap();
    assert_eq!(c.arch, Arch::Qwen2);
}

#[test]
fn configurations_that_cannot_be_run_are_refused() {
    let set = |changes: Value| refused(parse(with(changes)));
    assert_eq!(
        set(json!({ "architectures": ["MambaForCausalLM"] })),
        "config.json: unknown architecture \"MambaForCausalLM\", known are llama, qwen2, qwen3, gemma3"
    );
    assert!(
        set(json!({ "architectures": ["LlamaForSequenceClassification"] })).contains("unknown architecture")
    );
    assert!(set(json!({ "architectures": [], "model_type": null })).contains("says what model this is"));
    assert_eq!(set(json!({ "hidden_size": null })), "config.json: key \"hidden_size\" is missing");
    assert_eq!(
        set(json!({ "hidden_size": "64" })),
        "config.json: key \"hidden_size\": expected a whole number, 0 or more, found a string"
    );
    assert!(set(json!({ "hidden_size": -64 })).ends_with("found -64"));
    assert!(set(json!({ "num_hidden_layers": 1e12 })).contains("the number of layers is 1000000000000"));
    assert!(set(json!({ "num_key_value_heads": 3 })).contains("4 heads cannot share 3 key-value heads"));
    assert!(set(json!({ "num_attention_heads": 0 })).contains("cannot be divided among 0 heads"));
    assert!(set(json!({ "vocab_size": 0 })).contains("the vocabulary size is 0"));
    assert!(set(json!({ "head_dim": 15 })).contains("over 15 elements of heads of 15"));
    assert!(
        set(json!({ "hidden_act": "relu" }))
            .contains("activation \"relu\" is not supported for llama, silu is")
    );
    assert!(
        set(json!({ "rope_scaling": { "type": "dynamic", "factor": 2.0 } }))
            .contains("rope scaling \"dynamic\"")
    );
    assert!(
        set(json!({ "rope_scaling": { "type": "linear" } }))
            .contains("key \"rope_scaling.factor\" is missing")
    );
    assert!(set(json!({ "rope_scaling": 3 })).contains("key \"rope_scaling\": expected an object, found 3"));
    assert!(set(json!({ "layer_types": ["full_attention"] })).contains("1 entries for 2 layers"));
    assert!(
        set(json!({ "layer_types": ["full_attention", "x"] })).contains("layer type \"x\" is not supported")
    );
    let slides = json!({ "layer_types": ["full_attention", "sliding_attention"] });
    assert!(set(slides).contains("some layers slide, but no window size is given"));
    let mut both_ways = gemma();
    both_ways["use_bidirectional_attention"] = json!(true);
    assert!(refused(parse(both_ways)).contains("attention to later tokens is not supported"));
}

#[test]
fn generation_defaults_come_from_their_own_file() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("config.json"), llama_config().to_string()).unwrap();
    write_safetensors(&folder.path().join("model.safetensors"), &[("a", &[1])]);
    let open = || HfFolder::open(folder.path()).unwrap();
    assert_eq!(GenerationDefaults::from_hf(&open()).unwrap().eos, [2]);
    let generation = json!({
        "do_sample": true, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [5, 2],
        "repetition_penalty": -3.0
    });
    std::fs::write(folder.path().join("generation_config.json"), generation.to_string()).unwrap();
    let expected = GenerationDefaults {
        do_sample: Some(true),
        temperature: Some(0.6),
        top_k: Some(20),
        top_p: Some(0.95),
        eos: vec![5, 2],
        ..Default::default()
    };
    assert_eq!(GenerationDefaults::from_hf(&open()).unwrap(), expected);
    assert_eq!(ModelConfig::from_hf(&open()).unwrap().eos, [2, 5]);
}
