//! Hyperparameters from GGUF metadata.

use crate::common::{llama_metadata, read, refused, zeroes};
use refrain_formats::FormatError;
use refrain_formats::gguf::{Array, GgufWriter, MetadataValue};
use refrain_formats::params::{
    Activation, Arch, Experts, GenerationDefaults, LayerAttention, ModelConfig, NormKind, PerLayerEmbedding,
    QueryTemperature, RopePairing, RopeScaling, Yarn,
};
use refrain_tensor::{Bytes, DType, Shape};

fn config(w: &GgufWriter) -> Result<ModelConfig, FormatError> {
    ModelConfig::from_gguf(&read(w.to_vec()).unwrap())
}

/// The tiny llama with keys replaced or added.
fn with(changes: &[(&str, MetadataValue)]) -> GgufWriter {
    let intact = read(llama_metadata().to_vec()).unwrap();
    let mut w = GgufWriter::new();
    for (key, value) in intact.metadata().iter().filter(|(k, _)| !changes.iter().any(|(c, _)| c == k)) {
        w.set(key, value.clone()).unwrap();
    }
    for (key, value) in changes {
        w.set(key, value.clone()).unwrap();
    }
    w
}

fn gemma() -> GgufWriter {
    let mut w = GgufWriter::new();
    let keys: [(&str, MetadataValue); 11] = [
        ("general.architecture", "gemma3".into()),
        ("gemma3.context_length", 32768u32.into()),
        ("gemma3.embedding_length", 640u32.into()),
        ("gemma3.block_count", 18u32.into()),
        ("gemma3.feed_forward_length", 2048u32.into()),
        ("gemma3.attention.head_count", 4u32.into()),
        ("gemma3.attention.head_count_kv", 1u32.into()),
        ("gemma3.attention.layer_norm_rms_epsilon", 1e-6f32.into()),
        ("gemma3.attention.key_length", 256u32.into()),
        ("gemma3.attention.value_length", 256u32.into()),
        ("gemma3.attention.sliding_window", 512u32.into()),
    ];
    for (key, value) in keys {
        w.set(key, value).unwrap();
    }
    w.set("gemma3.vocab_size", 262_144u32).unwrap();
    w
}

/// Four layers in the keys of llama.cpp: keys of full-attention layers have no suffix, and lists have one entry per layer.
fn gemma4(changes: &[(&str, MetadataValue)]) -> GgufWriter {
    let list = |sizes: [u32; 4]| MetadataValue::Array(Array::U32(sizes.into()));
    let keys: [(&str, MetadataValue); 18] = [
        ("context_length", 1024u32.into()),
        ("embedding_length", 64u32.into()),
        ("block_count", 4u32.into()),
        ("feed_forward_length", list([96, 96, 192, 192])),
        ("attention.head_count", 4u32.into()),
        ("attention.head_count_kv", list([2, 1, 2, 1])),
        ("attention.layer_norm_rms_epsilon", 1e-6f32.into()),
        ("attention.key_length", 32u32.into()),
        ("attention.value_length", 32u32.into()),
        ("attention.key_length_swa", 16u32.into()),
        ("attention.value_length_swa", 16u32.into()),
        ("attention.sliding_window", 8u32.into()),
        (
            "attention.sliding_window_pattern",
            MetadataValue::Array(Array::Bool([true, false, true, false].into())),
        ),
        ("attention.shared_kv_layers", 2u32.into()),
        ("embedding_length_per_layer_input", 8u32.into()),
        ("rope.freq_base_swa", 1e4f32.into()),
        ("rope.dimension_count", 32u32.into()),
        ("rope.dimension_count_swa", 16u32.into()),
    ];
    let mut w = GgufWriter::new();
    w.set("general.architecture", "gemma4").unwrap();
    w.set("gemma4.vocab_size", 128u32).unwrap();
    for (key, value) in keys.iter().filter(|(k, _)| !changes.iter().any(|(c, _)| c == k)).chain(changes) {
        w.set(&format!("gemma4.{key}"), value.clone()).unwrap();
    }
    w
}

#[test]
fn gemma4_has_sizes_for_each_layer() {
    let c = config(&gemma4(&[])).unwrap();
    let sizes = |layer: usize| {
        let s = c.layer_sizes(layer);
        (s.n_kv_heads, s.head_dim, s.ffn)
    };
    assert_eq!([0, 1, 2, 3].map(sizes), [(2, 16, 96), (1, 32, 96), (2, 16, 192), (1, 32, 192)]);
    assert_eq!([0, 1, 2, 3].map(|layer| c.kv_layer(layer)), [0, 1, 0, 1]);
    assert_eq!((c.rope_dims(0), c.rope_dims(1)), (16, 32));
    assert_eq!((c.attn_scale, c.embedding_scale, c.rope.theta), (1.0, 8.0, 1e6));
    assert_eq!(c.per_layer, Some(PerLayerEmbedding { n_vocab: 128, dim: 8 }));
    // Files with these keys have no value matrices in full-attention layers.
    assert!(c.keys_as_values);
}

#[test]
fn lists_of_gemma4_that_do_not_fit_its_layers_are_refused() {
    let refusal = |key, value| config(&gemma4(&[(key, value)])).unwrap_err().to_string();
    let list = |sizes: &[u32]| MetadataValue::Array(Array::U32(sizes.into()));
    let text = refusal("feed_forward_length", list(&[96, 96, 96]));
    assert!(text.contains("has length 3, the model has 4 layers"), "{text}");
    let text = refusal("attention.head_count_kv", list(&[2, 1, 2, 0]));
    assert!(text.contains("key-value heads of a layer is 0"), "{text}");
    let text = refusal("attention.head_count_kv", list(&[2, 1, 1, 1]));
    assert!(text.contains("layer 2 shares keys and values"), "{text}");
    let text = refusal("attention.sliding_window_pattern", MetadataValue::Array(Array::Bool([].into())));
    assert!(text.contains("layer_types has length 0, the model has 4 layers"), "{text}");
    let text = refusal("feed_forward_length", MetadataValue::Array(Array::F32([0.5; 4].into())));
    assert!(text.contains("feed_forward_length"), "{text}");
}

#[test]
fn experts_of_gemma4_are_read_and_checked() {
    let with = |used: u32| {
        config(&gemma4(&[
            ("expert_count", 128u32.into()),
            ("expert_used_count", used.into()),
            ("expert_feed_forward_length", 704u32.into()),
        ]))
    };
    let experts = Experts { n_experts: 128, n_choices: 8, ffn: 704, renormalise: true, shared_ffn: None };
    assert_eq!(with(8).unwrap().experts, Some(experts));
    let text = with(129).unwrap_err().to_string();
    assert!(text.contains("129 experts per token, but a layer has 128"), "{text}");
    let error = config(&gemma4(&[("expert_count", 128u32.into())])).unwrap_err();
    assert!(error.to_string().contains("expert_used_count"), "{error}");
}

/// Qwen 3.5 with experts, four layers of which the last attends.
fn qwen35moe(changes: &[(&str, MetadataValue)]) -> Result<ModelConfig, FormatError> {
    let keys: [(&str, MetadataValue); 18] = [
        ("context_length", 1024u32.into()),
        ("embedding_length", 64u32.into()),
        ("block_count", 4u32.into()),
        ("attention.head_count", 4u32.into()),
        ("attention.head_count_kv", 2u32.into()),
        ("attention.key_length", 32u32.into()),
        ("attention.layer_norm_rms_epsilon", 1e-6f32.into()),
        ("rope.dimension_count", 8u32.into()),
        ("vocab_size", 64u32.into()),
        ("ssm.conv_kernel", 4u32.into()),
        ("ssm.state_size", 16u32.into()),
        ("ssm.group_count", 2u32.into()),
        ("ssm.time_step_rank", 4u32.into()),
        ("ssm.inner_size", 64u32.into()),
        ("expert_count", 8u32.into()),
        ("expert_used_count", 2u32.into()),
        ("expert_feed_forward_length", 20u32.into()),
        ("expert_shared_feed_forward_length", 28u32.into()),
    ];
    let mut w = GgufWriter::new();
    w.set("general.architecture", "qwen35moe").unwrap();
    for (key, value) in keys.iter().filter(|(key, _)| !changes.iter().any(|(other, _)| other == key)) {
        w.set(&format!("qwen35moe.{key}"), value.clone()).unwrap();
    }
    for (key, value) in changes {
        w.set(&format!("qwen35moe.{key}"), value.clone()).unwrap();
    }
    config(&w)
}

#[test]
fn damaged_metadata_of_experts_is_refused_with_the_numbers() {
    let c = qwen35moe(&[]).unwrap();
    let experts = Experts { n_experts: 8, n_choices: 2, ffn: 20, renormalise: true, shared_ffn: Some(28) };
    assert_eq!((c.experts, c.ffn), (Some(experts), 20));
    let refusal = |key: &str, value: MetadataValue| refused(qwen35moe(&[(key, value)]));
    assert!(refusal("expert_used_count", 9u32.into()).contains("9 experts per token, but a layer has 8"));
    let text = refusal("expert_count", 0u32.into());
    assert!(text.contains("qwen35moe models have experts in every layer, but the number of experts is zero"));
    let text = refusal("expert_count", u32::MAX.into());
    assert!(text.contains("the number of experts is 4294967295, it must be from 1 to 65536"), "{text}");
    let text = refusal("expert_used_count", 0u32.into());
    assert!(text.contains("the number of experts of a token is 0"), "{text}");
    let text = refusal("expert_shared_feed_forward_length", 0u32.into());
    assert!(text.contains("the feed-forward size of the shared expert is 0"), "{text}");
    // Lists for each layer: too short, and of another type.
    let flags = |n: usize| MetadataValue::Array(Array::Bool(vec![true; n].into()));
    let text = refusal("attention.recurrent_layers", flags(3));
    assert!(text.contains("layer_types has length 3, the model has 4 layers"), "{text}");
    let counts = MetadataValue::Array(Array::U32([8, 8, 8].into()));
    let text = refusal("expert_count", counts.clone());
    assert!(text.contains("expert_count"), "{text}");
    assert!(refusal("attention.head_count_kv", counts).contains("head_count_kv"));
}

#[test]
fn a_llama_is_read() {
    let c = config(&llama_metadata()).unwrap();
    assert_eq!(c.arch, Arch::Llama);
    assert_eq!(c.name.as_deref(), Some("Tiny"));
    assert_eq!((c.n_vocab, c.n_layers, c.hidden, c.ffn), (4, 2, 32, 64));
    assert_eq!((c.n_heads, c.n_kv_heads, c.head_dim, c.n_context), (4, 2, 8, 64));
    assert_eq!((c.norm_eps, c.norm_offset, c.embedding_scale), (1e-5, 0.0, 1.0));
    assert_eq!(c.activation, Activation::Silu);
    assert_eq!((c.rope.theta, c.rope.dims, c.rope.style), (1e4, 8, RopePairing::Norm));
    assert_eq!(c.rope.scaling, RopeScaling::None);
    assert_eq!((c.sliding_window, c.window(0)), (None, None));
    assert!(c.tied_embeddings && !c.qkv_bias && !c.qk_norm && !c.rope.has_freq_factors);
    assert_eq!(c.attn_scale, 8f32.sqrt().recip());
    assert_eq!((c.bos, c.eos), (None, vec![1]));
}

#[test]
fn missing_metadata_is_derived_from_tensors() {
    let mut w = llama_metadata();
    for (name, dims) in [
        ("token_embd.weight", [7, 32]),
        ("output.weight", [7, 32]),
        ("rope_freqs.weight", [1, 4]),
        ("blk.0.attn_q.bias", [1, 32]),
    ] {
        w.tensor(name, DType::F32, Shape::from(dims), zeroes(DType::F32, Shape::from(dims))).unwrap();
    }
    let c = config(&w).unwrap();
    assert_eq!(c.n_vocab, 7, "the embedding has the last word");
    assert!(!c.tied_embeddings && c.rope.has_freq_factors && c.qkv_bias);
}

#[test]
fn gemma_has_a_window_in_five_of_six_layers() {
    let c = config(&gemma()).unwrap();
    assert_eq!((c.arch, c.activation), (Arch::Gemma3, Activation::GeluTanh));
    let full: Vec<_> = (0..18).filter(|&l| c.layer(l) == LayerAttention::Full).collect();
    assert_eq!(full, [5, 11, 17]);
    assert_eq!((c.window(0), c.window(5)), (Some(512), None));
    assert_eq!((c.rope_theta(0), c.rope_theta(5)), (1e4, 1e6));
    assert_eq!((c.embedding_scale, c.attn_scale), (640f32.sqrt(), 1.0 / 16.0));
    assert!(c.qk_norm && c.tied_embeddings);
    assert_eq!((c.rope.style, c.norm_offset), (RopePairing::Neox, 0.0));
}

#[test]
fn linear_scaling_of_gemma_skips_sliding_window_layers() {
    let mut w = gemma();
    w.set("gemma3.rope.scaling.type", "linear").unwrap().set("gemma3.rope.scaling.factor", 8f32).unwrap();
    let c = config(&w).unwrap();
    assert_eq!(c.rope_scaling(0), RopeScaling::None);
    assert_eq!(c.rope_scaling(5), RopeScaling::Linear { factor: 8.0 });
}

#[test]
fn windows_follow_the_pattern_of_the_file() {
    let window = ("llama.attention.sliding_window", MetadataValue::U32(16));
    let c = config(&with(std::slice::from_ref(&window))).unwrap();
    assert_eq!((c.window(0), c.window(1)), (Some(16), Some(16)));
    let pattern = ("llama.attention.sliding_window_pattern", Array::Bool([false, true].into()).into());
    let c = config(&with(&[window.clone(), pattern])).unwrap();
    assert_eq!((c.window(0), c.window(1)), (None, Some(16)));
    let short = ("llama.attention.sliding_window_pattern", Array::Bool([true].into()).into());
    assert_eq!(
        refused(config(&with(&[window, short]))),
        "m.gguf: layer_types has length 1, the model has 2 layers"
    );
}

#[test]
fn yarn_and_other_scalings_are_read_or_refused() {
    let scaled = |kind: &str| {
        config(&with(&[
            ("llama.rope.scaling.type", kind.into()),
            ("llama.rope.scaling.factor", 4f32.into()),
            ("llama.rope.scaling.original_context_length", 32u32.into()),
        ]))
    };
    let yarn = Yarn {
        factor: 4.0,
        n_original_context: 32,
        beta_fast: 32.0,
        beta_slow: 1.0,
        attention_factor: 0.1 * 4f32.ln() + 1.0,
        truncate: true,
    };
    assert_eq!(scaled("yarn").unwrap().rope.scaling, RopeScaling::Yarn(yarn));
    assert_eq!(scaled("linear").unwrap().rope.scaling, RopeScaling::Linear { factor: 4.0 });
    assert_eq!(scaled("none").unwrap().rope.scaling, RopeScaling::None);
    assert_eq!(
        refused(scaled("dynamic")),
        "m.gguf: rope scaling \"dynamic\" is not supported, linear, llama3, yarn, longrope and proportional are"
    );
    assert_eq!(
        refused(scaled("longrope")),
        "m.gguf: longrope needs a list of short factors and a list of long ones"
    );
}

#[test]
fn impossible_hyperparameters_are_refused() {
    let set = |key: &str, value: MetadataValue| refused(config(&with(&[(key, value)])));
    assert_eq!(
        set("general.architecture", "mamba".into()),
        "m.gguf: unknown architecture \"mamba\", known are \
         llama, qwen2, qwen3, qwen3moe, gemma3, gemma4, gemma2, phi3, mistral3, smollm3, olmo2, granite, glm4, cohere2, qwen35, qwen35moe, lfm2, gpt-oss, bert"
    );
    assert_eq!(
        set("llama.block_count", 0u32.into()),
        "m.gguf: the number of layers is 0, it must be from 1 to 4096"
    );
    assert!(set("llama.block_count", u32::MAX.into()).contains("is 4294967295, it must be from 1 to 4096"));
    assert!(set("llama.block_count", "two".into()).contains("expected an integer"));
    assert!(set("llama.attention.head_count", 0u32.into()).contains("not a multiple of 0 heads"));
    assert!(
        set("llama.attention.head_count", 5u32.into())
            .contains("hidden size 32 is not a multiple of 5 heads")
    );
    assert!(
        set("llama.attention.head_count_kv", 3u32.into()).contains("4 heads cannot share 3 key-value heads")
    );
    assert!(set("llama.attention.head_count_kv", 0u32.into()).contains("key-value heads is 0"));
    assert!(set("llama.embedding_length", (1u32 << 31).into()).contains("the hidden size is 2147483648"));
    assert!(set("llama.context_length", 0u32.into()).contains("the context length is 0"));
    assert!(set("llama.rope.freq_base", f32::NAN.into()).contains("the rope base is NaN"));
    assert!(set("llama.attention.layer_norm_rms_epsilon", (-1f32).into()).contains("the norm epsilon is -1"));
    assert!(set("llama.rope.dimension_count", 7u32.into()).contains("over 7 elements of heads of 8"));
    assert!(set("llama.rope.dimension_count", 64u32.into()).contains("over 64 elements of heads of 8"));
    assert!(
        set("llama.attention.value_length", 4u32.into())
            .contains("head sizes of keys (8) and values (4) differ")
    );
    assert!(set("llama.expert_count", 8u32.into()).contains("a mixture of experts is not supported"));
}

/// The tiny llama as another architecture, with additional keys.
fn as_arch(arch: &str, changes: &[(&str, MetadataValue)]) -> GgufWriter {
    let intact = read(llama_metadata().to_vec()).unwrap();
    let mut w = GgufWriter::new();
    w.set("general.architecture", arch).unwrap();
    for (key, value) in intact.metadata().iter().filter(|(key, _)| *key != "general.architecture") {
        match key.strip_prefix("llama.") {
            Some(rest) if changes.iter().any(|(changed, _)| *changed == rest) => {}
            Some(rest) => w.set(&format!("{arch}.{rest}"), value.clone()).map(drop).unwrap(),
            None => w.set(key, value.clone()).map(drop).unwrap(),
        }
    }
    for (key, value) in changes {
        w.set(&format!("{arch}.{key}"), value.clone()).unwrap();
    }
    w
}

#[test]
fn settings_without_a_key_follow_from_the_architecture() {
    let smollm = config(&as_arch("smollm3", &[("block_count", 5u32.into())])).unwrap();
    assert_eq!(smollm.unrotated, [false, false, false, true, false]);
    assert_eq!((smollm.arch, smollm.rope.style), (Arch::SmolLm3, RopePairing::Norm));

    let window = ("attention.sliding_window", 8u32.into());
    let eps = ("attention.layer_norm_epsilon", 1e-5f32.into());
    let keys = [("block_count", 4u32.into()), window.clone(), eps, ("logit_scale", 0.25f32.into())];
    let command = config(&as_arch("cohere2", &keys)).unwrap();
    assert_eq!(command.unrotated, [false, false, false, true]);
    assert_eq!((command.norm, command.logit_scale, command.norm_eps), (NormKind::Layer, 0.25, 1e-5));

    let scales = [("embedding_scale", 12f32.into()), ("residual_scale", 0.5f32.into())];
    let granite =
        [&scales[..], &[("logit_scale", 8f32.into()), ("attention.scale", 0.25f32.into())]].concat();
    let granite = config(&as_arch("granite", &granite)).unwrap();
    let scales = (granite.embedding_scale, granite.residual_scale, granite.logit_scale, granite.attn_scale);
    assert_eq!(scales, (12.0, 0.5, 0.125, 0.25));

    let yarn = [("rope.scaling.type", "yarn".into()), ("rope.scaling.factor", 16f32.into())];
    let more = [
        ("rope.scaling.original_context_length", 32u32.into()),
        ("rope.scaling.yarn_log_multiplier", 1f32.into()),
        ("attention.temperature_scale", 0.1f32.into()),
    ];
    let ministral = config(&as_arch("mistral3", &[&yarn[..], &more].concat())).unwrap();
    assert_eq!(ministral.query_temperature, Some(QueryTemperature { beta: 0.1, n_original_context: 32 }));
    let RopeScaling::Yarn(yarn) = ministral.rope.scaling else { panic!("{:?}", ministral.rope.scaling) };
    assert_eq!(yarn.attention_factor, 1.0);

    let olmo = config(&as_arch("olmo2", &[window, ("block_count", 4u32.into())])).unwrap();
    let slides = olmo.layers.iter().filter(|layer| **layer == LayerAttention::Sliding).count();
    assert_eq!((slides, olmo.rope.local_theta), (3, Some(olmo.rope.theta)));

    let qwen = config(&as_arch("qwen3vl", &[])).unwrap();
    assert_eq!((qwen.arch, qwen.left_out), (Arch::Qwen3, vec!["images"]));
}

#[test]
fn longrope_factors_are_tensors_of_checked_length() {
    let phi = |n_long: usize, n_short: usize| {
        let mut w = as_arch(
            "phi3",
            &[
                ("rope.scaling.original_context_length", 16u32.into()),
                ("rope.scaling.attn_factor", 1.25f32.into()),
                ("attention.sliding_window", 0u32.into()),
            ],
        );
        for (kind, n) in [("long", n_long), ("short", n_short)] {
            let bytes: Vec<u8> =
                [1f32, 2.0, 3.0, 4.0, 5.0][..n].iter().flat_map(|v| v.to_le_bytes()).collect();
            let name = format!("rope_factors_{kind}.weight");
            w.tensor(&name, DType::F32, Shape::from([n]), Bytes::new(bytes)).unwrap();
        }
        w
    };
    let c = config(&phi(4, 4)).unwrap();
    assert_eq!(c.rope.scaling, RopeScaling::Long { n_original_context: 16, attention_factor: 1.25 });
    let factors = c.long_rope.unwrap();
    assert_eq!((factors.short.len(), factors.long), (4, vec![1.0, 2.0, 3.0, 4.0]));
    assert_eq!(c.sliding_window, None);
    assert_eq!(
        refused(config(&phi(5, 4))),
        "m.gguf: 5 long factors for a rotary embedding of 8 elements, which needs 4"
    );
    assert!(refused(config(&phi(4, 3))).contains("3 short factors"));
}

#[test]
fn a_missing_key_is_named() {
    let mut w = GgufWriter::new();
    assert_eq!(refused(config(&w)), "m.gguf: key \"general.architecture\" is missing");
    w.set("general.architecture", "qwen3").unwrap();
    assert_eq!(refused(config(&w)), "m.gguf: key \"qwen3.block_count\" is missing");
}

#[test]
fn recommended_sampling_is_read_and_invalid_values_are_ignored() {
    let w = with(&[
        ("general.sampling.temp", 0.6f32.into()),
        ("general.sampling.top_k", 20i32.into()),
        ("general.sampling.top_p", 7f32.into()),
        ("tokenizer.ggml.eot_token_id", 2u32.into()),
    ]);
    let defaults = GenerationDefaults::from_gguf(read(w.to_vec()).unwrap().metadata()).unwrap();
    let expected =
        GenerationDefaults { temperature: Some(0.6), top_k: Some(20), eos: vec![1, 2], ..Default::default() };
    assert_eq!(defaults, expected);
}
