//! Hyperparameters from `config.json`, in the spellings of `transformers` 4 and 5.

use crate::common::{llama_config, refused, write_safetensors};
use refrain_formats::FormatError;
use refrain_formats::hf::{HfFolder, JsonObject};
use refrain_formats::params::{
    Activation, Arch, DeltaNetSizes, EmbeddingDefaults, GenerationDefaults, LayerAttention, ModelConfig,
    NormKind, PerLayerEmbedding, Pooling, QueryTemperature, RecurrentLayers, RopePairing, RopeScaling,
    VHeads, Yarn,
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
    assert_eq!((c.rope.theta, c.rope.dims, c.rope.style), (5e5, 16, RopePairing::Neox));
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

/// Seven layers: the third and the last have full attention, and the last two share keys and values.
fn gemma4(changes: Value) -> Value {
    let mut config = with(json!({
        "architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", "hidden_act": null,
        "hidden_activation": "gelu_pytorch_tanh", "num_hidden_layers": 7, "head_dim": 16, "global_head_dim": 32,
        "num_key_value_heads": 2, "sliding_window": 8, "tie_word_embeddings": true, "rope_theta": null,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention",
            "sliding_attention", "sliding_attention", "full_attention"],
        "num_kv_shared_layers": 2, "use_double_wide_mlp": true, "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 100, "final_logit_softcapping": 30.0,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0
            },
            "sliding_attention": { "rope_type": "default", "rope_theta": 10000.0 }
        }
    }));
    changes.as_object().unwrap().iter().for_each(|(k, v)| config[k] = v.clone());
    config
}

#[test]
fn gemma4_has_two_head_sizes_shared_keys_and_a_second_embedding() {
    let c = parse(gemma4(json!({}))).unwrap();
    assert_eq!((c.arch, c.attn_scale, c.norm_offset), (Arch::Gemma4, 1.0, 0.0));
    let sizes = |layer: usize| {
        let s = c.layer_sizes(layer);
        (s.n_kv_heads, s.head_dim, s.ffn)
    };
    assert_eq!([0, 2, 5, 6].map(sizes), [(2, 16, 96), (2, 32, 96), (2, 16, 192), (2, 32, 192)]);
    assert_eq!([0, 4, 5, 6].map(|layer| c.kv_layer(layer)), [0, 4, 4, 2]);
    assert_eq!((c.rope_dims(0), c.rope_dims(2)), (16, 32));
    assert_eq!(c.rope_scaling(2), RopeScaling::Proportional { share: 0.25, factor: 1.0 });
    assert_eq!((c.rope_scaling(0), c.rope_theta(0)), (RopeScaling::None, 1e4));
    assert_eq!(c.per_layer, Some(PerLayerEmbedding { n_vocab: 100, dim: 8 }));
    assert!(!c.keys_as_values);
    // The newer format lists the layers that differ.
    let listed = json!({ "2": { "head_dim": 32 }, "6": { "head_dim": 32 } });
    let new = gemma4(json!({ "per_layer_config": listed, "global_head_dim": null }));
    assert_eq!(parse(new).unwrap(), c);
    let dense = json!({
        "num_kv_shared_layers": 0, "attention_k_eq_v": true, "num_global_key_value_heads": 1,
        "hidden_size_per_layer_input": 0, "use_bidirectional_attention": "vision"
    });
    let dense = parse(gemma4(dense)).unwrap();
    assert!(dense.keys_as_values && dense.per_layer.is_none());
    assert_eq!((dense.layer_sizes(2).n_kv_heads, dense.layer_sizes(6).ffn), (1, 96));
}

#[test]
fn the_text_part_of_a_multimodal_model_is_read_and_ignored_inputs_are_named() {
    let whole = json!({
        "architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "eos_token_id": [1, 106],
        "text_config": gemma4(json!({ "architectures": null })), "vision_config": {}, "audio_config": null
    });
    let c = parse(whole.clone()).unwrap();
    assert_eq!(c.left_out, ["images"]);
    assert_eq!(ModelConfig { left_out: Vec::new(), ..c }, parse(gemma4(json!({}))).unwrap());
    let mut broken = whole;
    broken["text_config"]["hidden_size"] = json!("wide");
    let error = parse(broken).unwrap_err().to_string();
    assert!(error.contains("text_config.hidden_size"), "{error}");
}

#[test]
fn variants_of_gemma4_that_cannot_be_run_are_refused_by_name() {
    let refusal = |changes: Value| {
        let error = parse(gemma4(changes)).unwrap_err();
        (error.to_string(), error.hint().unwrap_or_default())
    };
    let (text, _) = refusal(json!({ "enable_moe_block": true, "num_experts": 128 }));
    assert!(text.contains("top_k_experts"), "{text}");
    let experts =
        json!({ "enable_moe_block": true, "num_experts": 4, "top_k_experts": 5, "moe_intermediate_size": 8 });
    let (text, _) = refusal(experts);
    assert!(text.contains("5 experts per token, but a layer has 4"), "{text}");
    let (text, _) = refusal(json!({ "use_bidirectional_attention": "all" }));
    assert!(text.contains("attention to later tokens"), "{text}");
    let (text, _) = refusal(json!({ "num_kv_shared_layers": 7 }));
    assert!(text.contains("7 of 7 layers share"), "{text}");
    // The only full-attention layer would be a shared one.
    let (text, _) = refusal(json!({ "num_kv_shared_layers": 5 }));
    assert!(text.contains("layer 2 shares keys and values, but none of the first 2 layers"), "{text}");
    let (text, _) = refusal(json!({ "num_key_value_heads": 3 }));
    assert!(text.contains("3 key-value heads"), "{text}");
}

#[test]
fn mistral_has_a_window_in_all_layers_unless_it_is_null() {
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
fn qwen_has_biases_or_norms_and_a_window_only_if_configured() {
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
fn the_model_type_is_used_if_no_class_is_named() {
    let c = parse(with(json!({ "architectures": null, "model_type": "qwen2" }))).unwrap();
    assert_eq!(c.arch, Arch::Qwen2);
}

#[test]
fn unsupported_configurations_are_refused() {
    let set = |changes: Value| refused(parse(with(changes)));
    assert_eq!(
        set(json!({ "architectures": ["MambaForCausalLM"] })),
        "config.json: unknown architecture \"MambaForCausalLM\", known are \
         llama, qwen2, qwen3, qwen3moe, gemma3, gemma4, gemma2, phi3, mistral3, smollm3, olmo2, granite, glm4, cohere2, qwen35, qwen35moe, lfm2, gpt-oss, bert"
    );
    assert!(
        set(json!({ "architectures": ["LlamaForSequenceClassification"] })).contains("unknown architecture")
    );
    assert!(set(json!({ "architectures": [], "model_type": null })).contains("names a known model"));
    assert_eq!(set(json!({ "hidden_size": null })), "config.json: key \"hidden_size\" is missing");
    assert_eq!(
        set(json!({ "hidden_size": "64" })),
        "config.json: key \"hidden_size\": expected a whole number, 0 or more, found a string"
    );
    assert!(set(json!({ "hidden_size": -64 })).ends_with("found -64"));
    assert!(set(json!({ "num_hidden_layers": 1e12 })).contains("the number of layers is 1000000000000"));
    assert!(set(json!({ "num_key_value_heads": 3 })).contains("4 heads cannot share 3 key-value heads"));
    assert!(set(json!({ "num_attention_heads": 0 })).contains("is not a multiple of 0 heads"));
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
    assert!(set(json!({ "layer_types": ["full_attention"] })).contains("length 1, the model has 2 layers"));
    assert!(
        set(json!({ "layer_types": ["full_attention", "x"] })).contains("layer type \"x\" is not supported")
    );
    let slides = json!({ "layer_types": ["full_attention", "sliding_attention"] });
    assert!(set(slides).contains("some layers use a sliding window, but its size is missing"));
    let mut both_ways = gemma();
    both_ways["use_bidirectional_attention"] = json!(true);
    assert!(refused(parse(both_ways)).contains("attention to later tokens is not supported"));
}

/// The tiny llama as another class.
fn class(class: &str, changes: Value) -> Value {
    let mut config = with(json!({ "architectures": [class], "model_type": null }));
    changes.as_object().unwrap().iter().for_each(|(k, v)| config[k] = v.clone());
    config
}

#[test]
fn phi_3_has_factors_for_short_and_long_texts() {
    let of = |rope: Value| {
        class(
            "Phi3ForCausalLM",
            json!({
                "rope_scaling": rope, "original_max_position_embeddings": 64, "partial_rotary_factor": 0.5,
                "sliding_window": null
            }),
        )
    };
    let factors = json!({ "short_factor": [1, 1, 1, 2.5], "long_factor": [1.5, 2, 3, 4] });
    for name in ["longrope", "su", "yarn"] {
        let mut rope = factors.clone();
        rope["type"] = json!(name);
        let c = parse(of(rope)).unwrap();
        assert_eq!((c.arch, c.rope.dims, c.sliding_window), (Arch::Phi3, 8, None));
        let RopeScaling::Long { n_original_context, attention_factor } = c.rope.scaling else {
            panic!("{name}: {:?}", c.rope.scaling)
        };
        // sqrt(1 + ln(256 / 64) / ln(64)).
        assert_eq!(n_original_context, 64);
        assert!((attention_factor - (4f32 / 3.0).sqrt()).abs() < 1e-6, "{attention_factor}");
        assert_eq!(c.long_rope.unwrap().short, [1.0, 1.0, 1.0, 2.5]);
    }
    let refusal = |key: &str, value: Value| {
        let mut rope = factors.clone();
        (rope["type"], rope[key]) = (json!("longrope"), value);
        refused(parse(of(rope)))
    };
    assert!(refusal("long_factor", json!([1.0, 2.0])).contains("2 long factors"));
    assert!(
        refusal("short_factor", json!([1.0, 2.0, 3.0, 0.0])).contains("a divisor of rotary frequencies is 0")
    );
    assert!(refusal("short_factor", json!("1")).contains("expected an array of numbers, found a string"));
    assert!(refusal("long_factor", Value::Null).contains("longrope needs a list of short factors"));
}

#[test]
fn families_have_their_own_defaults_windows_and_factors() {
    let gemma2 = json!({
        "hidden_act": null, "hidden_activation": "gelu_pytorch_tanh", "num_hidden_layers": 4, "head_dim": 16,
        "query_pre_attn_scalar": 24, "sliding_window": 8
    });
    let c = parse(class("Gemma2ForCausalLM", gemma2)).unwrap();
    assert_eq!((c.attn_softcap, c.final_softcap, c.norm_offset), (Some(50.0), Some(30.0), 1.0));
    assert_eq!([0, 1, 2, 3].map(|layer| c.window(layer)), [Some(8), None, Some(8), None]);
    assert!(!c.qk_norm);

    let c = parse(class("SmolLM3ForCausalLM", json!({ "num_hidden_layers": 5 }))).unwrap();
    assert_eq!(c.unrotated, [false, false, false, true, false]);
    let c = parse(class("SmolLM3ForCausalLM", json!({ "no_rope_layers": [0, 1, 1] }))).unwrap();
    assert_eq!([0, 1].map(|layer| c.rotates(layer)), [false, true]);
    let short = refused(parse(class("SmolLM3ForCausalLM", json!({ "no_rope_layers": [1] }))));
    assert!(short.contains("the list of rotated layers has length 1, the model has 2 layers"), "{short}");

    let olmo = json!({ "num_hidden_layers": 4, "rope_scaling": { "type": "yarn", "factor": 8.0 } });
    let c = parse(class("Olmo3ForCausalLM", olmo)).unwrap();
    assert_eq!((c.arch, c.window(2), c.window(3)), (Arch::Olmo2, Some(4096), None));
    assert_eq!(c.rope_scaling(2), RopeScaling::None);
    assert!(matches!(c.rope_scaling(3), RopeScaling::Yarn(_)));

    let scales = json!({
        "embedding_multiplier": 12.0, "attention_multiplier": 0.0156, "residual_multiplier": 0.22,
        "logits_scaling": 8.0
    });
    let c = parse(class("GraniteForCausalLM", scales)).unwrap();
    let scales = (c.embedding_scale, c.attn_scale, c.residual_scale, c.logit_scale);
    assert_eq!(scales, (12.0, 0.0156, 0.22, 0.125));
    let zero = refused(parse(class("GraniteForCausalLM", json!({ "residual_multiplier": 0 }))));
    assert!(zero.contains("the residual scale is 0"), "{zero}");

    let c = parse(class("Glm4ForCausalLM", json!({ "head_dim": 16, "attention_bias": null }))).unwrap();
    assert_eq!(
        (c.rope.dims, c.rope.style, c.qkv_bias, c.attn_output_bias),
        (8, RopePairing::Norm, true, false)
    );

    let command = json!({ "num_hidden_layers": 4, "layer_norm_eps": 1e-4, "sliding_window_pattern": 2 });
    let c = parse(class("Cohere2ForCausalLM", command)).unwrap();
    assert_eq!((c.norm, c.norm_eps, c.logit_scale), (NormKind::Layer, 1e-4, 0.0625));
    assert_eq!(c.unrotated, [false, true, false, true]);
}

#[test]
fn the_text_part_of_gemma_3_may_leave_out_sizes() {
    // As in gemma-3-4b-it.
    let text = json!({
        "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
        "rope_scaling": { "factor": 8.0, "rope_type": "linear" }, "sliding_window": 1024
    });
    let whole = json!({
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text,
        "eos_token_id": [1, 106], "vision_config": {}
    });
    let c = parse(whole).unwrap();
    assert_eq!((c.n_vocab, c.n_heads, c.n_kv_heads, c.head_dim), (262_208, 8, 4, 256));
    assert_eq!((c.n_context, c.tied_embeddings, c.window(0), c.window(5)), (131_072, true, Some(1024), None));
    assert_eq!((c.eos, c.left_out), (vec![1, 106], vec!["images"]));
}

#[test]
fn ministral_3_has_queries_that_grow_with_their_position() {
    let rope = json!({
        "rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 64,
        "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1
    });
    let text = class("Ministral3ForCausalLM", json!({ "rope_theta": null, "rope_parameters": rope }));
    let c = parse(text.clone()).unwrap();
    assert_eq!(c.query_temperature, Some(QueryTemperature { beta: 0.1, n_original_context: 64 }));
    assert_eq!((c.arch, c.rope.scaling.magnitude()), (Arch::Mistral3, 1.0));
    // As the text part of a multimodal model. Keys missing in the inner object are in the outer one.
    let mut inner = text;
    (inner["architectures"], inner["model_type"]) = (Value::Null, json!("ministral3"));
    inner["tie_word_embeddings"] = Value::Null;
    let whole = json!({
        "architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "text_config": inner,
        "vision_config": {}, "tie_word_embeddings": true
    });
    let c = parse(whole).unwrap();
    assert_eq!((c.left_out, c.tied_embeddings, c.arch), (vec!["images"], true, Arch::Mistral3));
    let mut endless = rope.clone();
    endless["original_max_position_embeddings"] = json!(0);
    let endless = json!({ "rope_theta": null, "rope_parameters": endless });
    let refusal = refused(parse(class("Ministral3ForCausalLM", endless)));
    assert!(refusal.contains("the original context length is 0"), "{refusal}");
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

fn qwen35(changes: Value) -> Value {
    let mut config = with(json!({
        "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "num_hidden_layers": 5, "head_dim": 32,
        "rope_theta": null, "rope_parameters": { "rope_type": "default", "rope_theta": 1e7, "mrope_section": [2, 1, 1] },
        "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 16, "linear_value_head_dim": 8
    }));
    for (key, value) in changes.as_object().unwrap() {
        config[key] = value.clone();
    }
    config
}

#[test]
fn recurrent_layers_of_qwen35_come_from_a_list_or_an_interval() {
    use LayerAttention::{Full, Recurrent};
    let c = parse(qwen35(json!({}))).unwrap();
    assert_eq!(c.layers, [Recurrent, Recurrent, Recurrent, Full, Recurrent]);
    assert_eq!((c.arch, c.rope.dims, c.rope.theta, c.norm_offset), (Arch::Qwen35, 8, 1e7, 1.0));
    let sizes = DeltaNetSizes {
        n_key_heads: 2,
        n_heads: 6,
        key_dim: 16,
        value_dim: 8,
        conv_width: 4,
        v_heads: VHeads::Grouped,
        decay_is_log: true,
    };
    assert_eq!(c.recurrent, Some(RecurrentLayers::DeltaNet(sizes)));
    assert_eq!(sizes.conv_dim(), 2 * 2 * 16 + 6 * 8);
    assert_eq!(parse(qwen35(json!({ "full_attention_interval": 4 }))).unwrap(), c);
    let listed = json!({ "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention",
        "linear_attention"], "partial_rotary_factor": 0.5 });
    let listed = parse(qwen35(listed)).unwrap();
    assert_eq!((&listed.layers[..2], listed.rope.dims), (&[Full, Recurrent][..], 16));
    let whole = json!({ "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5",
        "text_config": qwen35(json!({ "architectures": null })), "vision_config": {} });
    let whole = parse(whole).unwrap();
    assert_eq!((whole.left_out.clone(), whole.layers), (vec!["images"], c.layers));
}

#[test]
fn impossible_sizes_of_recurrent_layers_are_refused_with_numbers() {
    let refusal = |changes: Value| parse(qwen35(changes)).unwrap_err().to_string();
    let text = refusal(json!({ "linear_num_value_heads": 5 }));
    assert!(text.contains("5 heads of recurrent layers cannot share 2 key heads"), "{text}");
    let text = refusal(json!({ "linear_conv_kernel_dim": 1 }));
    assert!(text.contains("the width of the short convolution is 1, it must be from 2 to 8"), "{text}");
    let text = refusal(json!({ "linear_key_head_dim": 4096 }));
    assert!(text.contains("the key size of recurrent layers is 4096, it must be from 1 to 256"), "{text}");
    let text = refusal(json!({ "linear_num_key_heads": 0 }));
    assert!(text.contains("the number of key heads of recurrent layers is 0"), "{text}");
    let text = refusal(json!({ "layer_types": ["full_attention", "conv"] }));
    assert!(text.contains("\"conv\""), "{text}");
    let text = refusal(json!({ "layer_types": ["full_attention", "linear_attention"] }));
    assert!(text.contains("length 2, the model has 5 layers"), "{text}");
    let text = refusal(json!({ "attention_bias": true }));
    assert!(text.contains("attention with biases and an output gate is not supported"), "{text}");
}

#[test]
fn the_feed_forward_size_of_lfm2_is_two_thirds_of_the_size_in_the_file() {
    let lfm2 = |changes: Value| {
        let mut config = with(json!({
            "architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "num_hidden_layers": 3,
            "intermediate_size": 3000, "norm_eps": 1e-4, "tie_word_embeddings": null, "layer_types": ["conv", "full_attention", "conv"]
        }));
        for (key, value) in changes.as_object().unwrap() {
            config[key] = value.clone();
        }
        parse(config)
    };
    let c = lfm2(json!({})).unwrap();
    assert_eq!((c.ffn, c.norm_eps, c.tied_embeddings), (2048, 1e-4, true));
    assert_eq!(c.recurrent, Some(RecurrentLayers::ShortConv { width: 3 }));
    assert_eq!(c.layers, [LayerAttention::Recurrent, LayerAttention::Full, LayerAttention::Recurrent]);
    assert_eq!(lfm2(json!({ "block_auto_adjust_ff_dim": false })).unwrap().ffn, 3000);
    let old = json!({ "layer_types": null, "full_attn_idxs": [1], "block_ff_dim": 3000, "intermediate_size": null,
        "tie_embedding": false });
    let old = lfm2(old).unwrap();
    assert_eq!((old.ffn, old.layers, old.tied_embeddings), (c.ffn, c.layers, false));
    let error = lfm2(json!({ "conv_bias": true })).unwrap_err().to_string();
    assert!(error.contains("a short convolution with biases is not supported"), "{error}");
}

fn bert(changes: Value) -> Result<ModelConfig, FormatError> {
    let mut config = json!({
        "architectures": ["BertModel"], "model_type": "bert", "vocab_size": 128, "hidden_size": 48,
        "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 3,
        "max_position_embeddings": 64, "type_vocab_size": 2, "hidden_act": "gelu",
    });
    for (key, value) in changes.as_object().unwrap() {
        config[key] = value.clone();
    }
    parse(config)
}

#[test]
fn an_encoder_is_read_and_its_variants_are_refused() {
    let c = bert(json!({})).unwrap();
    assert_eq!((c.arch, c.norm, c.activation), (Arch::Bert, NormKind::Layer, Activation::GeluErf));
    assert_eq!((c.norm_eps, c.n_token_types, c.n_context), (1e-12, Some(2), 64));
    assert!(c.qkv_bias && c.attn_output_bias && c.ffn_bias && c.arch.is_encoder());
    let below_a_head =
        bert(json!({ "architectures": ["BertForMaskedLM"], "hidden_act": "gelu_new" })).unwrap();
    assert_eq!((below_a_head.arch, below_a_head.activation), (Arch::Bert, Activation::GeluTanh));
    assert_eq!(bert(json!({ "architectures": null })).unwrap().arch, Arch::Bert);
    for (changes, message) in [
        (json!({ "position_embedding_type": "relative_key" }), "an encoder with relative positions"),
        (json!({ "is_decoder": true }), "BERT as a decoder"),
        (json!({ "hidden_act": "relu" }), "activation \"relu\" is not supported for bert, gelu is"),
        (json!({ "type_vocab_size": 0 }), "the number of token types is 0"),
        (json!({ "architectures": ["BertForSequenceClassification"] }), "unknown architecture"),
    ] {
        let refused = refused(bert(changes));
        assert!(refused.contains(message), "{refused}");
    }
    let written = c.to_hf_json(refrain_tensor::DType::F32).unwrap_err();
    assert!(written.to_string().contains("embeddings of positions and token types"), "{written}");
}

#[test]
fn embedding_settings_come_from_the_files_of_sentence_transformers() {
    let at = tempfile::tempdir().unwrap();
    write_safetensors(&at.path().join("model.safetensors"), &[("a", &[4])]);
    let write = |name: &str, value: Value| {
        std::fs::create_dir_all(at.path().join("1_Pooling")).unwrap();
        std::fs::write(at.path().join(name), value.to_string()).unwrap();
    };
    write("config.json", llama_config());
    let read = || EmbeddingDefaults::from_hf(&HfFolder::open(at.path()).unwrap());
    assert_eq!(read().unwrap(), EmbeddingDefaults::default());
    let module = |kind: &str| json!({ "type": format!("sentence_transformers.models.{kind}") });
    write("modules.json", json!([module("Transformer"), module("Pooling"), module("Normalize")]));
    write(
        "1_Pooling/config.json",
        json!({ "pooling_mode_cls_token": false, "pooling_mode_mean_tokens": true }),
    );
    write("sentence_bert_config.json", json!({ "max_seq_length": 256 }));
    let mean = EmbeddingDefaults { pooling: Some(Pooling::Mean), max_tokens: Some(256) };
    assert_eq!(read().unwrap(), mean);
    for (pooling, want) in [
        (json!({ "pooling_mode_cls_token": true }), Some(Pooling::Cls)),
        (json!({ "pooling_mode_lasttoken": true, "include_prompt": true }), Some(Pooling::Last)),
        (json!({ "pooling_mode": "lasttoken" }), Some(Pooling::Last)),
        (json!({ "pooling_mode_max_tokens": true }), None),
        (json!({ "pooling_mode_max_tokens": true, "pooling_mode_mean_tokens": true }), None),
        (json!({}), None),
    ] {
        write("1_Pooling/config.json", pooling.clone());
        match want {
            Some(_) => assert_eq!(read().unwrap().pooling, want, "{pooling}"),
            None => assert!(refused(read()).contains("pooling other than by mean"), "{pooling}"),
        }
    }
    write("modules.json", json!([module("Transformer"), module("Pooling"), module("Dense")]));
    assert!(refused(read()).contains("modules besides transformer, pooling and normalisation"));
    write("modules.json", json!({}));
    assert!(read().is_err());
}
