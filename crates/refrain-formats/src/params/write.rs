//! Writing of hyperparameters to GGUF metadata and `config.json`.

use super::rope::{LongRope, RopeScaling, Yarn};
use super::{
    Arch, LayerAttention, LayerSizes, ModelConfig, NormKind, ParamsFault, RecurrentLayers, every_nth_attends,
    every_nth_full,
};
use crate::FormatError;
use crate::gguf::{Array, Gguf, GgufWriter, MetadataValue};
use crate::hf::JsonObject;
use refrain_tensor::DType;
use serde_json::json;
use std::path::Path;

const CONFIG_JSON: &str = "config.json";

impl ModelConfig {
    /// Writes the keys that [`ModelConfig::from_gguf`] and llama.cpp read. Llama 3's scaling has no key: it is a tensor
    /// of divisors, `rope_freqs.weight`.
    pub fn write_gguf(&self, writer: &mut GgufWriter) -> Result<(), FormatError> {
        let arch = self.arch;
        self.refuse_encoder("GGUF metadata")?;
        writer.set("general.architecture", arch.name())?;
        if let Some(name) = &self.name {
            writer.set("general.name", name.as_str())?;
        }
        let mut set = |key: &str, value: MetadataValue| writer.set(&format!("{arch}.{key}"), value).map(drop);
        let number = |n: usize| MetadataValue::U32(u32::try_from(n).unwrap_or(u32::MAX));
        set("vocab_size", number(self.n_vocab))?;
        set("context_length", number(self.n_context))?;
        set("embedding_length", number(self.hidden))?;
        set("block_count", number(self.n_layers))?;
        set("attention.head_count", number(self.n_heads))?;
        let eps = match self.norm {
            NormKind::Rms => "attention.layer_norm_rms_epsilon",
            NormKind::Layer => "attention.layer_norm_epsilon",
        };
        set(eps, self.norm_eps.into())?;
        set("rope.freq_base", self.rope.theta.into())?;
        if arch != Arch::Gemma4 {
            set("feed_forward_length", number(self.ffn))?;
            match self.arch {
                Arch::Lfm2 => set("attention.head_count_kv", self.lfm2_heads())?,
                _ => set("attention.head_count_kv", number(self.n_kv_heads))?,
            }
            set("attention.key_length", number(self.head_dim))?;
            set("attention.value_length", number(self.head_dim))?;
            set("rope.dimension_count", number(self.rope.dims))?;
        }
        if arch != Arch::Gemma4 && self.attn_scale != (self.head_dim as f32).sqrt().recip() {
            set("attention.scale", self.attn_scale.into())?;
        }
        if let Some(experts) = self.experts {
            set("expert_count", number(experts.n_experts))?;
            set("expert_used_count", number(experts.n_choices))?;
            set("expert_feed_forward_length", number(experts.ffn))?;
            set("expert_weights_norm", experts.renormalise.into())?;
            if let Some(shared) = experts.shared_ffn {
                set("expert_shared_feed_forward_length", number(shared))?;
            }
        }
        if let Some(cap) = self.attn_softcap {
            set("attn_logit_softcapping", cap.into())?;
        }
        if let Some(cap) = self.final_softcap {
            set("final_logit_softcapping", cap.into())?;
        }
        if let Some(window) = self.sliding_window {
            set("attention.sliding_window", number(window))?;
            if arch == Arch::Gemma4 || self.layers != every_nth_full(self.n_layers, arch.usual_period()) {
                let slides = self.layers.iter().map(|layer| *layer == LayerAttention::Sliding).collect();
                set("attention.sliding_window_pattern", MetadataValue::Array(Array::Bool(slides)))?;
            }
        }
        if let Some(local) = self.rope.local_theta {
            set("rope.freq_base_swa", local.into())?;
        }
        if arch == Arch::Granite {
            set("embedding_scale", self.embedding_scale.into())?;
            set("residual_scale", self.residual_scale.into())?;
            set("logit_scale", self.logit_scale.recip().into())?;
        }
        if arch == Arch::Cohere2 {
            set("logit_scale", self.logit_scale.into())?;
        }
        if let Some(temperature) = self.query_temperature {
            set("attention.temperature_scale", temperature.beta.into())?;
        }
        if arch == Arch::Gemma4 {
            self.write_gguf_layers(&mut set)?;
        }
        self.write_gguf_recurrent(&mut set)?;
        match self.rope.scaling {
            RopeScaling::None | RopeScaling::Llama3 { .. } | RopeScaling::Proportional { .. } => {}
            RopeScaling::Long { n_original_context, attention_factor } => {
                set("rope.scaling.type", "longrope".into())?;
                set("rope.scaling.original_context_length", number(n_original_context))?;
                set("rope.scaling.attn_factor", attention_factor.into())?;
            }
            RopeScaling::Linear { factor } => {
                set("rope.scaling.type", "linear".into())?;
                set("rope.scaling.factor", factor.into())?;
            }
            RopeScaling::Yarn(yarn) => {
                set("rope.scaling.type", "yarn".into())?;
                set("rope.scaling.factor", yarn.factor.into())?;
                set("rope.scaling.original_context_length", number(yarn.n_original_context))?;
                set("rope.scaling.yarn_beta_fast", yarn.beta_fast.into())?;
                set("rope.scaling.yarn_beta_slow", yarn.beta_slow.into())?;
                let own = yarn.attention_factor / Yarn::recommended_attention_factor(yarn.factor);
                set("rope.scaling.attn_factor", own.into())?;
            }
        }
        Ok(())
    }

    /// KV heads of each layer: none for convolutions.
    fn lfm2_heads(&self) -> MetadataValue {
        let heads = (0..self.n_layers).map(|layer| match self.layer(layer) {
            LayerAttention::Recurrent => 0,
            LayerAttention::Full | LayerAttention::Sliding => {
                u32::try_from(self.n_kv_heads).unwrap_or(u32::MAX)
            }
        });
        MetadataValue::Array(Array::U32(heads.collect()))
    }

    /// Writes the sizes of recurrent layers.
    fn write_gguf_recurrent(
        &self,
        set: &mut impl FnMut(&str, MetadataValue) -> Result<(), FormatError>,
    ) -> Result<(), FormatError> {
        let number = |n: usize| MetadataValue::U32(u32::try_from(n).unwrap_or(u32::MAX));
        let sizes = match self.recurrent {
            None => return Ok(()),
            Some(RecurrentLayers::ShortConv { width }) => return set("shortconv.l_cache", number(width)),
            Some(RecurrentLayers::DeltaNet(sizes)) => sizes,
        };
        let first_full = self.layers.iter().position(|layer| *layer == LayerAttention::Full);
        let interval = first_full.map_or(self.n_layers + 1, |layer| layer + 1);
        if self.layers != every_nth_attends(self.n_layers, interval) {
            let fault =
                ParamsFault::NoPlace { format: "GGUF metadata", arch: self.arch, what: "order of layers" };
            return Err(FormatError::params(Path::new("GGUF metadata"), fault));
        }
        set("full_attention_interval", number(interval))?;
        set("ssm.conv_kernel", number(sizes.conv_width))?;
        set("ssm.state_size", number(sizes.key_dim))?;
        set("ssm.group_count", number(sizes.n_key_heads))?;
        set("ssm.time_step_rank", number(sizes.n_heads))?;
        set("ssm.inner_size", number(sizes.n_heads * sizes.value_dim))?;
        let [time, height, width] = self.rope_sections();
        let sections = [time, height, width, 0].into();
        set("rope.dimension_sections", MetadataValue::Array(Array::U32(sections)))
    }

    /// Writes per-layer sizes. Keys of full-attention layers have no suffix.
    fn write_gguf_layers(
        &self,
        set: &mut impl FnMut(&str, MetadataValue) -> Result<(), FormatError>,
    ) -> Result<(), FormatError> {
        let number = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let list = |size: fn(LayerSizes) -> usize| {
            let sizes = (0..self.n_layers).map(|layer| number(size(self.layer_sizes(layer))));
            MetadataValue::Array(Array::U32(sizes.collect()))
        };
        set("attention.head_count_kv", list(|s| s.n_kv_heads))?;
        set("feed_forward_length", list(|s| s.ffn))?;
        for (kind, end) in [(LayerAttention::Full, ""), (LayerAttention::Sliding, "_swa")] {
            if let Some(layer) = self.layers.iter().position(|layer| *layer == kind) {
                let head_dim = number(self.layer_sizes(layer).head_dim);
                set(&format!("attention.key_length{end}"), head_dim.into())?;
                set(&format!("attention.value_length{end}"), head_dim.into())?;
                set(&format!("rope.dimension_count{end}"), number(self.rope_dims(layer)).into())?;
            }
        }
        set("attention.shared_kv_layers", number(self.n_shared_kv).into())?;
        let dim = self.per_layer.map_or(0, |per_layer| per_layer.dim);
        set("embedding_length_per_layer_input", number(dim).into())
    }

    /// Writes the keys of `config.json` that only Gemma 4 has.
    fn gemma4_json(&self, set: &mut impl FnMut(&str, serde_json::Value)) {
        let n_own = self.n_layers - self.n_shared_kv;
        let doubles = (n_own..self.n_layers).any(|layer| self.layer_sizes(layer).ffn != self.ffn);
        let own = |(idx, size): (usize, &LayerSizes)| {
            let entry = json!({ "head_dim": size.head_dim, "num_key_value_heads": size.n_kv_heads });
            (idx.to_string(), entry)
        };
        let own: serde_json::Map<_, _> = self.sizes.iter().enumerate().map(own).collect();
        set("per_layer_config", own.into());
        // Versions of `transformers` that do not know that key read these two.
        if let Some(full) = self.layers.iter().position(|layer| *layer == LayerAttention::Full) {
            set("global_head_dim", self.layer_sizes(full).head_dim.into());
            set("num_global_key_value_heads", self.layer_sizes(full).n_kv_heads.into());
        }
        set("num_kv_shared_layers", self.n_shared_kv.into());
        set("use_double_wide_mlp", doubles.into());
        set("attention_k_eq_v", self.keys_as_values.into());
        set("hidden_size_per_layer_input", self.per_layer.map_or(0, |p| p.dim).into());
        set("vocab_size_per_layer_input", self.per_layer.map_or(self.n_vocab, |p| p.n_vocab).into());
        set("enable_moe_block", self.experts.is_some().into());
        let mut full = scaling(&self.rope.scaling).unwrap_or_else(|| json!({ "rope_type": "default" }));
        full["rope_theta"] = short(self.rope.theta).into();
        let local = short(self.rope.local_theta.unwrap_or(self.rope.theta));
        set(
            "rope_parameters",
            json!({
                "full_attention": full,
                "sliding_attention": { "rope_type": "default", "rope_theta": local },
            }),
        );
    }

    /// Returns the scaling of rotary frequencies.
    fn scaling_json(&self) -> Option<serde_json::Value> {
        let mut scaling = scaling(&self.rope.scaling)?;
        if let (RopeScaling::Long { n_original_context, attention_factor }, Some(factors)) =
            (self.rope.scaling, &self.long_rope)
        {
            let numbers = |list: &[f32]| list.iter().map(|&factor| short(factor)).collect::<Vec<_>>();
            scaling["short_factor"] = numbers(&factors.short).into();
            scaling["long_factor"] = numbers(&factors.long).into();
            // transformers 4 accepts only these keys for Phi 3, unless the factor is unusual.
            let ratio = self.n_context as f32 / n_original_context as f32;
            let usual = LongRope::recommended_attention_factor(ratio, n_original_context);
            if (usual - attention_factor).abs() > 1e-5 * usual {
                scaling["attention_factor"] = short(attention_factor).into();
            }
        }
        if self.arch == Arch::Mistral3 {
            scaling["rope_theta"] = short(self.rope.theta).into();
            scaling["llama_4_scaling_beta"] = self.query_temperature.map_or(0.0, |t| short(t.beta)).into();
        }
        Some(scaling)
    }

    /// Writes factors, norms and unrotated layers for the classes that have keys for them.
    fn scales_json(&self, set: &mut impl FnMut(&str, serde_json::Value)) {
        match self.arch {
            Arch::Granite => {
                set("embedding_multiplier", short(self.embedding_scale).into());
                set("attention_multiplier", short(self.attn_scale).into());
                set("residual_multiplier", short(self.residual_scale).into());
                set("logits_scaling", short(self.logit_scale.recip()).into());
            }
            Arch::Cohere2 => {
                set("logit_scale", short(self.logit_scale).into());
                set("layer_norm_eps", short(self.norm_eps).into());
            }
            Arch::SmolLm3 => {
                let rotated = (0..self.n_layers).map(|layer| u32::from(self.rotates(layer)));
                set("no_rope_layers", rotated.collect());
                set("use_sliding_window", self.sliding_window.is_some().into());
            }
            Arch::Phi3 => {
                if let RopeScaling::Long { n_original_context, .. } = self.rope.scaling {
                    set("original_max_position_embeddings", n_original_context.into());
                }
            }
            _ => {}
        }
    }

    /// Writes the experts. Families use different keys, and versions of `transformers` too.
    fn experts_json(&self, set: &mut impl FnMut(&str, serde_json::Value)) {
        let Some(experts) = self.experts else { return };
        let (n_experts, n_choices) = (experts.n_experts.into(), experts.n_choices.into());
        match self.arch {
            Arch::Gemma4 => {
                set("num_experts", n_experts);
                set("top_k_experts", n_choices);
                set("moe_intermediate_size", experts.ffn.into());
            }
            Arch::GptOss => {
                set("num_local_experts", n_experts);
                set("num_experts_per_tok", n_choices);
                set("swiglu_limit", 7.0.into());
            }
            _ => {
                set("num_experts", experts.n_experts.into());
                set("num_local_experts", n_experts);
                set("num_experts_per_tok", n_choices);
                set("moe_intermediate_size", experts.ffn.into());
                set("norm_topk_prob", experts.renormalise.into());
                set("decoder_sparse_step", 1.into());
                set("mlp_only_layers", json!([]));
            }
        }
    }

    /// Writes the sizes of recurrent layers.
    fn recurrent_json(&self, set: &mut impl FnMut(&str, serde_json::Value)) {
        match self.recurrent {
            None => {}
            Some(RecurrentLayers::ShortConv { width }) => {
                set("conv_L_cache", width.into());
                set("conv_bias", false.into());
                set("norm_eps", short(self.norm_eps).into());
                set("tie_embedding", self.tied_embeddings.into());
                // The size is that of the gated layer.
                set("block_auto_adjust_ff_dim", false.into());
            }
            Some(RecurrentLayers::DeltaNet(sizes)) => {
                set("linear_num_key_heads", sizes.n_key_heads.into());
                set("linear_num_value_heads", sizes.n_heads.into());
                set("linear_key_head_dim", sizes.key_dim.into());
                set("linear_value_head_dim", sizes.value_dim.into());
                set("linear_conv_kernel_dim", sizes.conv_width.into());
                set(
                    "rope_parameters",
                    json!({
                        "rope_type": "default",
                        "rope_theta": short(self.rope.theta),
                        "partial_rotary_factor": self.rope.dims as f64 / self.head_dim as f64,
                        "mrope_section": self.rope_sections(),
                    }),
                );
            }
        }
    }

    /// Pairs that rotate by time, height and width; for text all positions are equal.
    fn rope_sections(&self) -> [u32; 3] {
        let n_pairs = self.rope.dims / 2;
        [2, 1, 0].map(|more| u32::try_from((n_pairs + more) / 3).unwrap_or(0))
    }

    /// Checks that the written metadata reads back the same.
    pub fn check_gguf(&self, gguf: &Gguf) -> Result<(), FormatError> {
        let mut wanted = self.clone();
        if matches!(wanted.rope.scaling, RopeScaling::Llama3 { .. } | RopeScaling::Proportional { .. }) {
            (wanted.rope.scaling, wanted.rope.has_freq_factors) = (RopeScaling::None, true);
        }
        let found = ModelConfig::from_gguf(gguf)?;
        wanted.rope.style = found.rope.style;
        wanted.compare(&found, "GGUF metadata", gguf.metadata().file())
    }

    /// Returns the content of `config.json` for `transformers` 4 and 5. A hyperparameter without a key is an error.
    pub fn to_hf_json(&self, dtype: DType) -> Result<serde_json::Value, FormatError> {
        self.refuse_encoder(CONFIG_JSON)?;
        let (gemma, gemma4) = (self.arch.is_gemma(), self.arch == Arch::Gemma4);
        // The classes of Llama and OLMo 2 do not support a window.
        let slides = self.sliding_window.is_some();
        let (class, model_type) = match self.arch {
            Arch::Llama if slides => ("MistralForCausalLM", "mistral"),
            Arch::Llama => ("LlamaForCausalLM", "llama"),
            Arch::Qwen2 => ("Qwen2ForCausalLM", "qwen2"),
            Arch::Qwen3 => ("Qwen3ForCausalLM", "qwen3"),
            Arch::Qwen3Moe => ("Qwen3MoeForCausalLM", "qwen3_moe"),
            Arch::Gemma2 => ("Gemma2ForCausalLM", "gemma2"),
            Arch::Gemma3 => ("Gemma3ForCausalLM", "gemma3_text"),
            Arch::Gemma4 => ("Gemma4ForCausalLM", "gemma4_text"),
            Arch::Phi3 => ("Phi3ForCausalLM", "phi3"),
            Arch::Mistral3 => ("Ministral3ForCausalLM", "ministral3"),
            Arch::SmolLm3 => ("SmolLM3ForCausalLM", "smollm3"),
            Arch::Olmo2 if slides => ("Olmo3ForCausalLM", "olmo3"),
            Arch::Olmo2 => ("Olmo2ForCausalLM", "olmo2"),
            Arch::Granite => ("GraniteForCausalLM", "granite"),
            Arch::Glm4 => ("Glm4ForCausalLM", "glm4"),
            Arch::Cohere2 => ("Cohere2ForCausalLM", "cohere2"),
            Arch::Qwen35 => ("Qwen3_5ForCausalLM", "qwen3_5_text"),
            Arch::Qwen35Moe => ("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text"),
            Arch::Lfm2 => ("Lfm2ForCausalLM", "lfm2"),
            Arch::GptOss => ("GptOssForCausalLM", "gpt_oss"),
            Arch::Bert => ("BertModel", "bert"),
        };
        let dtype = dtype_word(dtype);
        let mut config = json!({
            "architectures": [class],
            "model_type": model_type,
            "vocab_size": self.n_vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.ffn,
            "num_hidden_layers": self.n_layers,
            "num_attention_heads": self.n_heads,
            "num_key_value_heads": self.n_kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.n_context,
            "rms_norm_eps": short(self.norm_eps),
            "rope_theta": short(self.rope.theta),
            "tie_word_embeddings": self.tied_embeddings,
            "initializer_range": 0.02,
            "use_cache": true,
            "attention_dropout": 0.0,
            // One key for each of the two versions.
            "dtype": dtype,
            "torch_dtype": dtype,
        });
        let mut set = |key: &str, value: serde_json::Value| config[key] = value;
        set(
            if gemma { "hidden_activation" } else { "hidden_act" },
            if gemma { "gelu_pytorch_tanh" } else { "silu" }.into(),
        );
        if self.rope.dims != self.head_dim && !gemma4 {
            set("partial_rotary_factor", (self.rope.dims as f64 / self.head_dim as f64).into());
        }
        let has_mlp_bias = matches!(self.arch, Arch::Llama | Arch::SmolLm3 | Arch::Granite);
        if has_mlp_bias && class != "MistralForCausalLM" {
            set("mlp_bias", self.ffn_bias.into());
        }
        let has_no_bias = matches!(self.arch, Arch::Phi3 | Arch::Mistral3 | Arch::Qwen2);
        if !has_no_bias && class != "MistralForCausalLM" {
            set("attention_bias", self.qkv_bias.into());
        }
        if matches!(self.arch, Arch::Qwen2 | Arch::Qwen3 | Arch::Qwen3Moe) {
            set("use_sliding_window", self.sliding_window.is_some().into());
            let full = self.layers.iter().take_while(|layer| **layer == LayerAttention::Full).count();
            set("max_window_layers", full.into());
        }
        if let Some(window) = self.sliding_window {
            set("sliding_window", window.into());
        }
        let has_types = matches!(
            self.arch,
            Arch::Qwen2
                | Arch::Qwen3
                | Arch::Cohere2
                | Arch::SmolLm3
                | Arch::Qwen35
                | Arch::Lfm2
                | Arch::GptOss
        );
        if gemma || has_types || model_type == "olmo3" {
            let word = |layer: &LayerAttention| match layer {
                LayerAttention::Full => "full_attention",
                LayerAttention::Sliding => "sliding_attention",
                LayerAttention::Recurrent if self.arch == Arch::Lfm2 => "conv",
                LayerAttention::Recurrent => "linear_attention",
            };
            set("layer_types", self.layers.iter().map(word).collect());
        }
        if gemma4 {
            set("final_logit_softcapping", self.final_softcap.map(short).into());
            self.gemma4_json(&mut set);
        } else if gemma {
            set("query_pre_attn_scalar", query_scalar(self.attn_scale, self.head_dim));
            set("attn_logit_softcapping", self.attn_softcap.map(short).into());
            set("final_logit_softcapping", self.final_softcap.map(short).into());
            if self.arch == Arch::Gemma3 {
                set("rope_local_base_freq", self.rope.local_theta.map(short).into());
            }
        }
        if let Some(scaling) = self.scaling_json().filter(|_| !gemma4) {
            let is_new = matches!(self.arch, Arch::Mistral3);
            set(if is_new { "rope_parameters" } else { "rope_scaling" }, scaling);
        }
        self.scales_json(&mut set);
        self.experts_json(&mut set);
        self.recurrent_json(&mut set);
        if let Some(bos) = self.bos {
            set("bos_token_id", bos.into());
        }
        match self.eos.as_slice() {
            [] => {}
            [one] => set("eos_token_id", (*one).into()),
            several => set("eos_token_id", several.into()),
        }
        let path = Path::new(CONFIG_JSON);
        let mut wanted = self.clone();
        // Rotated pairs may have another order in that format.
        wanted.rope.style = self.arch.hf_rope_style();
        let found = ModelConfig::from_hf_config(&JsonObject::new(path, config.clone())?)?;
        wanted.compare(&found, CONFIG_JSON, path)?;
        Ok(config)
    }

    /// Refuses encoders: they cannot be trained, so they are never written.
    fn refuse_encoder(&self, format: &'static str) -> Result<(), FormatError> {
        match self.arch.is_encoder() {
            true => Err(self.no_place(format, "embeddings of positions and token types")),
            false => Ok(()),
        }
    }

    fn no_place(&self, format: &'static str, what: &'static str) -> FormatError {
        let fault = ParamsFault::NoPlace { format, arch: self.arch, what };
        FormatError::params(Path::new(format), fault)
    }

    /// Fails if a hyperparameter was lost in writing.
    fn compare(&self, found: &ModelConfig, format: &'static str, file: &Path) -> Result<(), FormatError> {
        let near = |a: f32, b: f32| (a - b).abs() <= 1e-6 * a.abs().max(b.abs());
        let sizes = |c: &ModelConfig| {
            [c.n_vocab, c.n_layers, c.hidden, c.ffn, c.n_heads, c.n_kv_heads, c.head_dim, c.n_context]
        };
        // Files differ in the order of heads and the form of decays; tensors are written to match.
        let recurrent = |c: &ModelConfig| {
            c.recurrent.map(|layers| match layers {
                RecurrentLayers::ShortConv { width } => [width, 0, 0, 0, 0],
                RecurrentLayers::DeltaNet(sizes) => {
                    [sizes.n_key_heads, sizes.n_heads, sizes.key_dim, sizes.value_dim, sizes.conv_width]
                }
            })
        };
        let biases = |c: &ModelConfig| [c.qkv_bias, c.attn_output_bias, c.ffn_bias, c.qk_norm];
        let what = if self.arch != found.arch || sizes(self) != sizes(found) {
            "sizes"
        } else if self.tied_embeddings != found.tied_embeddings || biases(self) != biases(found) {
            "biases and matrices"
        } else if (&self.layers, self.sliding_window) != (&found.layers, found.sliding_window) {
            "attention windows"
        } else if !self.rope.is_near(&found.rope)
            || (&self.unrotated, &self.long_rope) != (&found.unrotated, &found.long_rope)
            || self.query_temperature != found.query_temperature
        {
            "rotary embedding"
        } else if !near(self.attn_scale, found.attn_scale) || !near(self.norm_eps, found.norm_eps) {
            "attention scale or norm epsilon"
        } else if (self.attn_softcap, self.final_softcap) != (found.attn_softcap, found.final_softcap)
            || self.activation != found.activation
            || !near(self.embedding_scale, found.embedding_scale)
            || !near(self.residual_scale, found.residual_scale)
            || !near(self.logit_scale, found.logit_scale)
            || self.norm != found.norm
        {
            "soft caps, activation, kind of norm or factors"
        } else if (&self.sizes, self.n_shared_kv) != (&found.sizes, found.n_shared_kv)
            || (self.keys_as_values, self.per_layer) != (found.keys_as_values, found.per_layer)
            || self.experts != found.experts
            || recurrent(self) != recurrent(found)
        {
            "sizes of layers, shared keys and values, per-layer embedding, experts or recurrent layers"
        } else {
            return Ok(());
        };
        Err(FormatError::params(file, ParamsFault::NoPlace { format, arch: self.arch, what }))
    }
}

/// Converts a float by its shortest decimal, so that 1e-5 is written as 1e-5.
fn short(value: f32) -> f64 {
    value.to_string().parse().unwrap_or_else(|_| value.into())
}

fn query_scalar(scale: f32, head_dim: usize) -> serde_json::Value {
    let scalar = f64::from(scale).powi(-2);
    let is_head = scale == (head_dim as f32).sqrt().recip();
    // `transformers` accepts whole numbers only.
    let is_whole = (scalar - scalar.round()).abs() < 1e-6 * scalar;
    match (is_head, is_whole) {
        (true, _) => head_dim.into(),
        (false, true) => (scalar.round() as u64).into(),
        (false, false) => scalar.into(),
    }
}

fn dtype_word(dtype: DType) -> &'static str {
    match dtype {
        DType::BF16 => "bfloat16",
        DType::F16 => "float16",
        _ => "float32",
    }
}

fn scaling(scaling: &RopeScaling) -> Option<serde_json::Value> {
    match *scaling {
        RopeScaling::None => None,
        RopeScaling::Long { .. } => Some(json!({ "rope_type": "longrope", "type": "longrope" })),
        RopeScaling::Linear { factor } => Some(json!({ "rope_type": "linear", "factor": short(factor) })),
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, n_original_context } => {
            Some(json!({
                "rope_type": "llama3",
                "factor": short(factor),
                "low_freq_factor": short(low_freq_factor),
                "high_freq_factor": short(high_freq_factor),
                "original_max_position_embeddings": n_original_context,
            }))
        }
        RopeScaling::Proportional { share, factor } => Some(json!({
            "rope_type": "proportional",
            "partial_rotary_factor": short(share),
            "factor": short(factor),
        })),
        RopeScaling::Yarn(yarn) => Some(json!({
            "rope_type": "yarn",
            "factor": short(yarn.factor),
            "original_max_position_embeddings": yarn.n_original_context,
            "beta_fast": short(yarn.beta_fast),
            "beta_slow": short(yarn.beta_slow),
            "attention_factor": short(yarn.attention_factor),
            "truncate": yarn.truncate,
        })),
    }
}
