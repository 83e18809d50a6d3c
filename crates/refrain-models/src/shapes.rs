//! Well-known shapes with random weights, for benchmarks without a download.

use crate::error::ModelError;
use crate::model::Model;
use crate::weights::TensorSource;
use refrain_formats::FormatError;
use refrain_formats::params::{Activation, Arch, ModelConfig, NormKind, RopeParams, RopeScaling};
use refrain_formats::params::{DeltaNetSizes, Experts, LayerAttention, LayerSizes, PerLayerEmbedding};
use refrain_formats::params::{RecurrentLayers, VHeads};
use refrain_tensor::{Bytes, DType, HostTensor, Shape, quant};
use std::cell::RefCell;
use std::collections::HashMap;

/// Sizes of a well-known model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NamedShape {
    /// Name on the command line.
    pub name: &'static str,
    arch: Arch,
    n_vocab: usize,
    hidden: usize,
    ffn: usize,
    n_layers: usize,
    n_heads: usize,
    n_kv_heads: usize,
    head_dim: usize,
    gemma4: Option<Gemma4Shape>,
    experts: Option<Experts>,
    tied_head: bool,
}

/// Additional sizes of Gemma 4.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Gemma4Shape {
    /// Every `period`-th layer uses full attention.
    period: usize,
    window: usize,
    /// Number and size of the KV heads in full-attention layers.
    global_heads: [usize; 2],
    n_shared_kv: usize,
    /// Feed-forward size of layers that share keys and values.
    shared_ffn: usize,
    keys_as_values: bool,
    /// Elements of the per-layer embedding per layer; 0 without one.
    per_layer: usize,
}

const fn shape(
    name: &'static str,
    arch: Arch,
    [n_vocab, hidden, ffn, n_layers]: [usize; 4],
    heads: [usize; 3],
) -> NamedShape {
    let [n_heads, n_kv_heads, head_dim] = heads;
    NamedShape {
        name,
        arch,
        n_vocab,
        hidden,
        ffn,
        n_layers,
        n_heads,
        n_kv_heads,
        head_dim,
        gemma4: None,
        experts: None,
        tied_head: true,
    }
}

const fn gemma4(name: &'static str, sizes: [usize; 3], heads: [usize; 2], more: Gemma4Shape) -> NamedShape {
    let ([hidden, ffn, n_layers], [n_heads, n_kv_heads]) = (sizes, heads);
    let shape = shape(name, Arch::Gemma4, [262_144, hidden, ffn, n_layers], [n_heads, n_kv_heads, 256]);
    NamedShape { gemma4: Some(more), ..shape }
}

const E2B: Gemma4Shape = Gemma4Shape {
    period: 5,
    window: 512,
    global_heads: [1, 512],
    n_shared_kv: 20,
    shared_ffn: 12_288,
    keys_as_values: false,
    per_layer: 256,
};
const E4B: Gemma4Shape =
    Gemma4Shape { period: 6, global_heads: [2, 512], n_shared_kv: 18, shared_ffn: 10_240, ..E2B };
const DENSE_31B: Gemma4Shape = Gemma4Shape {
    period: 6,
    window: 1024,
    global_heads: [4, 512],
    n_shared_kv: 0,
    shared_ffn: 21_504,
    keys_as_values: true,
    per_layer: 0,
};

const fn qwen3_moe(
    name: &'static str,
    sizes: [usize; 4],
    heads: [usize; 3],
    experts: [usize; 3],
) -> NamedShape {
    shape(name, Arch::Qwen3Moe, sizes, heads).with_experts(experts)
}

/// Experts in every layer; attention with biases, sinks and a window.
const fn gpt_oss(name: &'static str, n_layers: usize, n_experts: usize) -> NamedShape {
    let shape = shape(name, Arch::GptOss, [201_088, 2_880, 2_880, n_layers], [64, 8, 64]);
    shape.with_experts([n_experts, 4, 2_880]).with_untied_head()
}

const MOE_26B: Gemma4Shape = Gemma4Shape { global_heads: [2, 512], shared_ffn: 2_112, ..DENSE_31B };

/// The same for all models up to 9B and for 35B-A3B: heads of 128 elements, two per key head.
const QWEN35_9B: DeltaNetSizes = DeltaNetSizes {
    n_key_heads: 16,
    n_heads: 32,
    key_dim: 128,
    value_dim: 128,
    conv_width: 4,
    v_heads: VHeads::Tiled,
    decay_is_log: false,
};
const QWEN36_35B: NamedShape =
    shape("qwen3.6-35b-a3b", Arch::Qwen35Moe, [248_320, 2_048, 512, 40], [16, 2, 256])
        .with_experts([256, 8, 512])
        .with_shared_expert(512)
        .with_untied_head();

const LLAMA31_8B_SIZES: [usize; 4] = [128_256, 4_096, 14_336, 32];
/// Its output head is untied; the tied shape is for comparison with measurements recorded without that
/// matrix.
const LLAMA31_8B: NamedShape =
    shape("llama-3.1-8b", Arch::Llama, LLAMA31_8B_SIZES, [32, 8, 128]).with_untied_head();

/// All shapes, from smallest to largest.
pub const SHAPES: [NamedShape; 21] = [
    shape("llama-1m", Arch::Llama, [2_048, 128, 384, 4], [4, 4, 32]),
    shape("llama-10m", Arch::Llama, [8_192, 320, 896, 6], [5, 5, 64]),
    shape("llama-110m", Arch::Llama, [32_768, 768, 2_048, 12], [12, 12, 64]),
    shape("smollm2-135m", Arch::Llama, [49_152, 576, 1_536, 30], [9, 3, 64]),
    shape("gemma3-270m", Arch::Gemma3, [262_144, 640, 2_048, 18], [4, 1, 256]),
    shape("qwen2.5-0.5b", Arch::Qwen2, [151_936, 896, 4_864, 24], [14, 2, 64]),
    shape("qwen3-0.6b", Arch::Qwen3, [151_936, 1_024, 3_072, 28], [16, 8, 128]),
    shape("gemma3-1b", Arch::Gemma3, [262_144, 1_152, 6_912, 26], [4, 1, 256]),
    shape("llama-3.2-1b", Arch::Llama, [128_256, 2_048, 8_192, 16], [32, 8, 64]),
    gemma4("gemma4-e2b", [1_536, 6_144, 35], [8, 1], E2B),
    shape("llama-3.2-3b", Arch::Llama, [128_256, 3_072, 8_192, 28], [24, 8, 128]),
    shape("phi-4-mini", Arch::Phi3, [200_064, 3_072, 8_192, 32], [24, 8, 128]),
    gemma4("gemma4-e4b", [2_560, 10_240, 42], [8, 2], E4B),
    LLAMA31_8B,
    shape("llama-3.1-8b-tied", Arch::Llama, LLAMA31_8B_SIZES, [32, 8, 128]),
    shape("qwen3.5-9b", Arch::Qwen35, [248_320, 4_096, 12_288, 32], [16, 4, 256]),
    gpt_oss("gpt-oss-20b", 24, 32),
    qwen3_moe("qwen3-30b-a3b", [151_936, 2_048, 6_144, 48], [32, 4, 128], [128, 8, 768]),
    gemma4("gemma4-26b-a4b", [2_816, 2_112, 30], [16, 8], MOE_26B).with_experts([128, 8, 704]),
    QWEN36_35B,
    gemma4("gemma4-31b", [5_376, 21_504, 60], [32, 16], DENSE_31B),
];

impl NamedShape {
    /// Finds a shape by name.
    pub fn find(name: &str) -> Option<&'static NamedShape> {
        SHAPES.iter().find(|s| s.name.eq_ignore_ascii_case(name))
    }

    /// A custom shape: vocabulary, hidden size, feed-forward size and layers; heads, KV heads and head size.
    pub const fn new(name: &'static str, arch: Arch, sizes: [usize; 4], heads: [usize; 3]) -> NamedShape {
        shape(name, arch, sizes, heads)
    }

    /// The same with experts: their number, the number per token, and their feed-forward size.
    #[must_use]
    pub const fn with_experts(self, [n_experts, n_choices, ffn]: [usize; 3]) -> NamedShape {
        let experts = Experts { n_experts, n_choices, ffn, renormalise: true, shared_ffn: None };
        NamedShape { experts: Some(experts), ..self }
    }

    /// The same with an expert that every token uses, of this feed-forward size.
    #[must_use]
    pub const fn with_shared_expert(self, ffn: usize) -> NamedShape {
        let Some(experts) = self.experts else { return self };
        NamedShape { experts: Some(Experts { shared_ffn: Some(ffn), ..experts }), ..self }
    }

    /// The same with an untied output head.
    #[must_use]
    pub const fn with_untied_head(self) -> NamedShape {
        NamedShape { tied_head: false, ..self }
    }

    /// Its architecture.
    pub fn arch(&self) -> Arch {
        self.arch
    }

    /// Hyperparameters of a model of this shape.
    pub fn config(&self) -> ModelConfig {
        let (arch, gemma4) = (self.arch, self.arch == Arch::Gemma4);
        let layers = self.layers();
        let sizes = self.layer_sizes(&layers);
        let global_dim = self.gemma4.map_or(self.head_dim, |more| more.global_heads[1]);
        let rotated = match arch {
            // Whole pairs: three quarters of a head, and half of a head.
            Arch::Phi3 => self.head_dim * 3 / 8 * 2,
            Arch::Glm4 => self.head_dim / 4 * 2,
            Arch::Qwen35 | Arch::Qwen35Moe => self.head_dim / 4,
            _ => global_dim,
        };
        let window = match arch {
            Arch::Gemma2 | Arch::Cohere2 => Some(4096),
            Arch::GptOss => Some(128),
            Arch::Gemma3 | Arch::Gemma4 => Some(self.gemma4.map_or(512, |more| more.window)),
            _ => None,
        };
        let unrotated = |(idx, layer): (usize, &LayerAttention)| match arch {
            Arch::SmolLm3 => (idx + 1).is_multiple_of(4),
            Arch::Cohere2 => *layer == LayerAttention::Full,
            _ => false,
        };
        let unrotated: Vec<bool> = layers.iter().enumerate().map(unrotated).collect();
        ModelConfig {
            arch,
            name: Some(self.name.into()),
            n_vocab: self.n_vocab,
            n_layers: self.n_layers,
            hidden: self.hidden,
            ffn: self.ffn,
            n_heads: self.n_heads,
            n_kv_heads: self.n_kv_heads,
            head_dim: self.head_dim,
            norm: if arch == Arch::Cohere2 { NormKind::Layer } else { NormKind::Rms },
            norm_eps: 1e-5,
            norm_offset: 0.0,
            activation: if arch.is_gemma() { Activation::GeluTanh } else { Activation::Silu },
            rope: RopeParams {
                theta: 500_000.0,
                local_theta: matches!(arch, Arch::Gemma3 | Arch::Gemma4).then_some(10_000.0),
                scaling: match gemma4 {
                    true => RopeScaling::Proportional { share: 0.25, factor: 1.0 },
                    false => RopeScaling::None,
                },
                has_freq_factors: false,
                dims: rotated,
                local_dims: gemma4.then_some(self.head_dim),
                style: arch.gguf_rope_style(),
            },
            sliding_window: window.filter(|_| layers.contains(&LayerAttention::Sliding)),
            layers,
            n_context: 131_072,
            tied_embeddings: self.tied_head,
            qkv_bias: matches!(arch, Arch::Qwen2 | Arch::Glm4 | Arch::GptOss),
            attn_output_bias: arch == Arch::GptOss,
            ffn_bias: false,
            qk_norm: arch.has_qk_norm(),
            attn_scale: if gemma4 { 1.0 } else { (self.head_dim as f32).powf(-0.5) },
            attn_softcap: (arch == Arch::Gemma2).then_some(50.0),
            final_softcap: matches!(arch, Arch::Gemma2 | Arch::Gemma4).then_some(30.0),
            embedding_scale: if arch.is_gemma() { (self.hidden as f32).sqrt() } else { 1.0 },
            residual_scale: 1.0,
            logit_scale: 1.0,
            unrotated: if unrotated.contains(&true) { unrotated } else { Vec::new() },
            query_temperature: None,
            long_rope: None,
            bos: None,
            eos: Vec::new(),
            sizes,
            n_shared_kv: self.n_shared_kv(),
            keys_as_values: self.gemma4.is_some_and(|more| more.keys_as_values),
            per_layer: self
                .gemma4
                .filter(|more| more.per_layer > 0)
                .map(|more| PerLayerEmbedding { n_vocab: self.n_vocab, dim: more.per_layer }),
            experts: self.experts,
            recurrent: match arch {
                Arch::Qwen35 | Arch::Qwen35Moe => Some(RecurrentLayers::DeltaNet(QWEN35_9B)),
                Arch::Lfm2 => Some(RecurrentLayers::ShortConv { width: 3 }),
                _ => None,
            },
            n_token_types: None,
            left_out: Vec::new(),
        }
    }

    /// Number of parameters without the per-layer embedding, and of that embedding.
    pub fn n_parameters(&self) -> [usize; 2] {
        let config = self.config();
        let size = |name: &str| tensor_dims(&config, name).map_or(0, |dims| dims.iter().product::<usize>());
        let mut n = GLOBAL_NAMES.map(size).iter().sum::<usize>();
        for layer in 0..self.n_layers {
            let has_kv = config.kv_layer(layer) == layer;
            let has_v = !(config.keys_as_values && config.layer(layer) == LayerAttention::Full);
            let fuses = self.arch == Arch::Phi3;
            let has_dense = config.experts.is_none() || self.gemma4.is_some();
            let is_there = |part: &&&str| match part.strip_suffix(".weight").unwrap_or(part) {
                "attn_qkv" => fuses || self.arch.is_qwen35(),
                "attn_q" => !fuses,
                "attn_k" => has_kv && !fuses,
                "attn_k_norm" => has_kv && config.qk_norm,
                "attn_v" => has_kv && has_v && !fuses,
                "ffn_gate" => has_dense && !fuses_gate(self.arch),
                "attn_q_norm" => config.qk_norm,
                "attn_norm" => self.arch != Arch::Olmo2,
                "ffn_norm" => {
                    let others = matches!(self.arch, Arch::Olmo2 | Arch::Cohere2 | Arch::GptOss);
                    !others && !self.arch.is_qwen35()
                }
                "post_attention_norm" if self.arch == Arch::GptOss || self.arch.is_qwen35() => true,
                "post_attention_norm" | "post_ffw_norm" => {
                    self.arch.is_gemma() || matches!(self.arch, Arch::Olmo2 | Arch::Glm4)
                }
                "attn_q.bias" | "attn_k.bias" | "attn_v.bias" => config.qkv_bias,
                "ffn_gate_exps" | "ffn_up_exps" => self.gemma4.is_none(),
                "ffn_gate_up_exps"
                | "ffn_gate_inp.scale"
                | "ffn_down_exps.scale"
                | "pre_ffw_norm_2"
                | "post_ffw_norm_1"
                | "post_ffw_norm_2" => self.gemma4.is_some(),
                "ffn_up" | "ffn_down" => has_dense,
                _ => true,
            };
            let parts = LAYER_PARTS.iter().filter(is_there);
            n += parts.map(|part| size(&format!("blk.{layer}.{part}"))).sum::<usize>();
        }
        [n, size("per_layer_token_embd.weight")]
    }

    /// Attention kind of each layer. Gemma and Command R interleave full-attention layers; in Gemma 4 the
    /// last layer is one too.
    fn layers(&self) -> Vec<LayerAttention> {
        let is_nth = |layer: usize, period| (layer + 1).is_multiple_of(period);
        let is_full = |layer: usize| match (self.arch, self.gemma4) {
            (Arch::Gemma2 | Arch::GptOss, _) => is_nth(layer, 2),
            (Arch::Gemma3, _) => is_nth(layer, 6),
            (Arch::Gemma4, more) => {
                is_nth(layer, more.map_or(6, |more| more.period)) || layer + 1 == self.n_layers
            }
            (Arch::Cohere2 | Arch::Qwen35 | Arch::Qwen35Moe, _) => is_nth(layer, 4),
            (Arch::Lfm2, _) => is_nth(layer, 3),
            _ => true,
        };
        let other = match self.arch {
            Arch::Qwen35 | Arch::Qwen35Moe | Arch::Lfm2 => LayerAttention::Recurrent,
            _ => LayerAttention::Sliding,
        };
        let kind = |layer| if is_full(layer) { LayerAttention::Full } else { other };
        (0..self.n_layers).map(kind).collect()
    }

    /// Bounded so that one layer of each kind keeps its own keys and values.
    fn n_shared_kv(&self) -> usize {
        self.gemma4.map_or(0, |more| more.n_shared_kv.min(self.n_layers.saturating_sub(more.period)))
    }

    fn layer_sizes(&self, layers: &[LayerAttention]) -> Vec<LayerSizes> {
        let Some(more) = self.gemma4 else { return Vec::new() };
        let n_own = self.n_layers - self.n_shared_kv();
        let size = |(layer, kind): (usize, &LayerAttention)| {
            let [n_kv_heads, head_dim] = match kind {
                LayerAttention::Full => more.global_heads,
                LayerAttention::Sliding | LayerAttention::Recurrent => [self.n_kv_heads, self.head_dim],
            };
            LayerSizes { n_kv_heads, head_dim, ffn: if layer < n_own { self.ffn } else { more.shared_ffn } }
        };
        layers.iter().enumerate().map(size).collect()
    }
}

/// Tensors outside the layers, except the per-layer embedding.
const GLOBAL_NAMES: [&str; 6] = [
    "token_embd.weight",
    "output.weight",
    "output_norm.weight",
    "token_embd_norm.weight",
    "per_layer_model_proj.weight",
    "per_layer_proj_norm.weight",
];

/// Layer tensors of all architectures.
const LAYER_PARTS: [&str; 51] = [
    "ffn_gate_inp_shexp.weight",
    "ffn_gate_shexp.weight",
    "ffn_up_shexp.weight",
    "ffn_down_shexp.weight",
    "ffn_gate_up_exps.weight",
    "ffn_gate_inp.scale",
    "ffn_down_exps.scale",
    "pre_ffw_norm_2.weight",
    "post_ffw_norm_1.weight",
    "post_ffw_norm_2.weight",
    "ffn_gate_inp.weight",
    "ffn_gate_exps.weight",
    "ffn_up_exps.weight",
    "ffn_down_exps.weight",
    "attn_norm.weight",
    "attn_qkv.weight",
    "attn_q.weight",
    "attn_k.weight",
    "attn_v.weight",
    "attn_q.bias",
    "attn_k.bias",
    "attn_v.bias",
    "attn_output.bias",
    "attn_sinks.weight",
    "ffn_gate_inp.bias",
    "ffn_gate_exps.bias",
    "ffn_up_exps.bias",
    "ffn_down_exps.bias",
    "attn_q_norm.weight",
    "attn_k_norm.weight",
    "attn_output.weight",
    "post_attention_norm.weight",
    "ffn_norm.weight",
    "ffn_gate.weight",
    "ffn_up.weight",
    "ffn_down.weight",
    "post_ffw_norm.weight",
    "inp_gate.weight",
    "proj.weight",
    "post_norm.weight",
    "attn_gate.weight",
    "ssm_alpha.weight",
    "ssm_beta.weight",
    "ssm_conv1d.weight",
    "ssm_a",
    "ssm_dt.bias",
    "ssm_norm.weight",
    "ssm_out.weight",
    "shortconv.in_proj.weight",
    "shortconv.conv.weight",
    "shortconv.out_proj.weight",
];

/// Whether files store gate and up projections as one tensor.
fn fuses_gate(arch: Arch) -> bool {
    matches!(arch, Arch::Phi3 | Arch::Glm4)
}

/// Storage types of a random model's matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QuantMix {
    /// A single type.
    All(DType),
    /// Q4_K, with Q6_K for the embedding and for half of the value and down projections, as in Q4_K_M files.
    Q4KM,
}

impl QuantMix {
    /// Finds a mix by the name used in file names: `Q4_K_M`, or a dtype.
    pub fn from_name(name: &str) -> Option<QuantMix> {
        match name.to_ascii_uppercase().as_str() {
            "Q4_K_M" => Some(QuantMix::Q4KM),
            other => DType::from_name(other).filter(|d| d.is_float() || d.is_quantized()).map(QuantMix::All),
        }
    }

    fn dtype(self, name: &str, layer: Option<usize>, n_layers: usize, row: usize) -> DType {
        let wanted = match self {
            // llama.cpp never quantises this matrix.
            QuantMix::All(dtype) if name == "per_layer_model_proj.weight" && dtype.is_quantized() => {
                DType::BF16
            }
            QuantMix::Q4KM if name == "per_layer_model_proj.weight" => DType::BF16,
            // Nor routers.
            QuantMix::All(dtype) if name == "ffn_gate_inp.weight" && dtype.is_quantized() => DType::F32,
            QuantMix::Q4KM if name == "ffn_gate_inp.weight" => DType::F32,
            // gpt-oss has only its experts in this type.
            QuantMix::All(DType::MXFP4) if !name.ends_with("_exps.weight") => DType::BF16,
            QuantMix::All(dtype) => dtype,
            QuantMix::Q4KM => {
                // llama.cpp uses more bits in the first and last eighth of the layers, and in every third
                // layer between.
                let more = layer.is_some_and(|l| {
                    l < n_layers / 8 || l >= 7 * n_layers / 8 || (l - n_layers / 8) % 3 == 2
                });
                if name.contains("attn_qkv") && row.is_multiple_of(DType::Q5_K.block_len()) {
                    return DType::Q5_K;
                }
                let sensitive = name.contains("attn_v") || name.contains("ffn_down");
                if layer.is_none() || (more && sensitive) { DType::Q6_K } else { DType::Q4_K }
            }
        };
        // Rows that are not a multiple of the block size get the next type with smaller blocks, as converters
        // do.
        match wanted {
            d if row.is_multiple_of(d.block_len()) => d,
            DType::Q6_K if row.is_multiple_of(32) => DType::Q8_0,
            _ if row.is_multiple_of(32) => DType::Q5_0,
            _ => DType::F16,
        }
    }
}

/// Source of random tensors of any shape.
struct RandomSource {
    config: ModelConfig,
    mix: QuantMix,
    // One pattern of encoded blocks per type, repeated to the required size.
    patterns: RefCell<HashMap<DType, Vec<u8>>>,
}

impl Model {
    /// A model of a well-known shape with random weights.
    pub fn random(shape: &NamedShape, mix: QuantMix) -> Result<Model, ModelError> {
        let config = shape.config();
        let source = RandomSource { config: config.clone(), mix, patterns: RefCell::default() };
        Model::from_source(config, &source)
    }
}

/// Splits a GGUF tensor name into its layer and the remaining name.
pub(crate) fn layer_and_part(gguf_name: &str) -> (Option<usize>, &str) {
    match gguf_name.strip_prefix("blk.").and_then(|rest| rest.split_once('.')) {
        Some((layer, part)) => (layer.parse().ok(), part),
        None => (None, gguf_name),
    }
}

/// Shape of a tensor by its GGUF name; `None` if such a model does not have it.
pub(crate) fn tensor_dims(c: &ModelConfig, gguf_name: &str) -> Option<Vec<usize>> {
    let (layer, part) = layer_and_part(gguf_name);
    let LayerSizes { n_kv_heads, head_dim, ffn } = c.layer_sizes(layer.unwrap_or(0));
    let (q, kv) = (c.n_heads * head_dim, n_kv_heads * head_dim);
    let per_layer = c.per_layer.map(|p| (p.n_vocab, p.dim));
    if let (Some(recurrent), Some(layer)) = (&c.recurrent, layer)
        && let Some(dims) = mixer_dims(c, recurrent, c.layer(layer), part)
    {
        return dims;
    }
    Some(match (part, per_layer) {
        ("token_embd.weight", _) => vec![c.n_vocab, c.hidden],
        ("token_embd_norm.weight", _) if c.arch == Arch::Lfm2 => vec![c.hidden],
        ("output_norm.weight", _) if c.arch == Arch::Lfm2 => return None,
        ("output.weight", _) if !c.tied_embeddings => vec![c.n_vocab, c.hidden],
        ("attn_q.weight", _) => vec![q, c.hidden],
        ("attn_k.weight" | "attn_v.weight", _) => vec![kv, c.hidden],
        ("attn_output.weight", _) => vec![c.hidden, q],
        ("ffn_gate_inp.weight", _) => vec![c.experts?.n_experts, c.hidden],
        ("ffn_gate_exps.weight" | "ffn_up_exps.weight", _) => {
            let Experts { n_experts, ffn, .. } = c.experts?;
            vec![n_experts, ffn, c.hidden]
        }
        ("ffn_gate_inp_shexp.weight", _) => c.experts?.shared_ffn.map(|_| vec![c.hidden])?,
        ("ffn_gate_shexp.weight" | "ffn_up_shexp.weight", _) => vec![c.experts?.shared_ffn?, c.hidden],
        ("ffn_down_shexp.weight", _) => vec![c.hidden, c.experts?.shared_ffn?],
        // A layout of folders, which random models do not have.
        ("ffn_gate_up_exps.weight", _) if c.arch != Arch::Gemma4 => return None,
        ("ffn_gate_up_exps.weight", _) => {
            let Experts { n_experts, ffn, .. } = c.experts?;
            vec![n_experts, 2 * ffn, c.hidden]
        }
        (
            "ffn_gate_inp.scale"
            | "pre_ffw_norm_2.weight"
            | "post_ffw_norm_1.weight"
            | "post_ffw_norm_2.weight",
            _,
        ) => c.experts.map(|_| vec![c.hidden])?,
        ("ffn_down_exps.scale", _) => vec![c.experts?.n_experts],
        ("ffn_down_exps.weight", _) => vec![c.experts?.n_experts, c.hidden, c.experts?.ffn],
        ("attn_qkv.weight", _) => vec![q + 2 * kv, c.hidden],
        ("ffn_up.weight", _) if fuses_gate(c.arch) => vec![2 * ffn, c.hidden],
        ("ffn_gate.weight" | "ffn_up.weight", _) => vec![ffn, c.hidden],
        ("ffn_down.weight", _) => vec![c.hidden, ffn],
        ("attn_output.bias", _) if c.attn_output_bias => vec![c.hidden],
        ("attn_sinks.weight", _) if c.arch == Arch::GptOss => vec![c.n_heads],
        ("ffn_gate_inp.bias", _) if c.arch == Arch::GptOss => vec![c.experts?.n_experts],
        ("ffn_gate_exps.bias" | "ffn_up_exps.bias", _) if c.arch == Arch::GptOss => {
            vec![c.experts?.n_experts, c.experts?.ffn]
        }
        ("ffn_down_exps.bias", _) if c.arch == Arch::GptOss => vec![c.experts?.n_experts, c.hidden],
        ("attn_q.bias", _) => vec![q],
        ("attn_k.bias" | "attn_v.bias", _) => vec![kv],
        ("attn_q_norm.weight", _) if c.arch == Arch::Olmo2 => vec![q],
        ("attn_k_norm.weight", _) if c.arch == Arch::Olmo2 => vec![kv],
        ("attn_q_norm.weight" | "attn_k_norm.weight", _) => vec![head_dim],
        ("per_layer_token_embd.weight", Some((n_vocab, dim))) => vec![n_vocab, c.n_layers * dim],
        ("per_layer_model_proj.weight", Some((_, dim))) => vec![c.n_layers * dim, c.hidden],
        ("per_layer_proj_norm.weight", Some((_, dim))) => vec![dim],
        ("inp_gate.weight", Some((_, dim))) => vec![dim, c.hidden],
        ("proj.weight", Some((_, dim))) => vec![c.hidden, dim],
        ("post_norm.weight", Some(_)) => vec![c.hidden],
        (
            "output_norm.weight"
            | "attn_norm.weight"
            | "ffn_norm.weight"
            | "post_attention_norm.weight"
            | "post_ffw_norm.weight",
            _,
        ) => vec![c.hidden],
        _ => return None,
    })
}

/// Shape of a mixer tensor in a model with recurrent layers: `Some(None)` if this layer does not have it,
/// `None` for tensors that are not specific to such models.
fn mixer_dims(
    c: &ModelConfig,
    recurrent: &RecurrentLayers,
    kind: LayerAttention,
    part: &str,
) -> Option<Option<Vec<usize>>> {
    let is_recurrent = kind == LayerAttention::Recurrent;
    match part {
        "attn_q.weight" | "attn_k.weight" | "attn_v.weight" | "attn_output.weight" if is_recurrent => {
            return Some(None);
        }
        "attn_q_norm.weight" | "attn_k_norm.weight" if is_recurrent => return Some(None),
        _ => {}
    }
    let own = |dims: Vec<usize>| Some(is_recurrent.then_some(dims));
    let net = match recurrent {
        RecurrentLayers::DeltaNet(net) => net,
        RecurrentLayers::ShortConv { width } => {
            return match part {
                "shortconv.in_proj.weight" => own(vec![3 * c.hidden, c.hidden]),
                "shortconv.conv.weight" => own(vec![c.hidden, *width]),
                "shortconv.out_proj.weight" => own(vec![c.hidden, c.hidden]),
                _ => None,
            };
        }
    };
    let values = net.n_heads * net.value_dim;
    match part {
        "attn_qkv.weight" => own(vec![net.conv_dim(), c.hidden]),
        "attn_gate.weight" => own(vec![values, c.hidden]),
        "ssm_alpha.weight" | "ssm_beta.weight" => own(vec![net.n_heads, c.hidden]),
        "ssm_conv1d.weight" => own(vec![net.conv_dim(), net.conv_width]),
        "ssm_a" | "ssm_dt.bias" => own(vec![net.n_heads]),
        "ssm_norm.weight" => own(vec![net.value_dim]),
        "ssm_out.weight" => own(vec![c.hidden, values]),
        // Query and output gate of each head.
        "attn_q.weight" => Some(Some(vec![2 * c.n_heads * c.head_dim, c.hidden])),
        _ => None,
    }
}

impl RandomSource {
    fn bytes(&self, dtype: DType, n: usize) -> Result<Vec<u8>, refrain_tensor::TensorError> {
        const PATTERN: usize = 1 << 16;
        let mut patterns = self.patterns.borrow_mut();
        if let std::collections::hash_map::Entry::Vacant(entry) = patterns.entry(dtype) {
            let values: Vec<f32> = (0..PATTERN as u32).map(|i| 0.02 * normal(i)).collect();
            let mut encoded = vec![0; dtype.bytes_for(PATTERN).unwrap_or(0)];
            quant::quantize(dtype, &values, &mut encoded)?;
            entry.insert(encoded);
        }
        let (need, pattern) = (dtype.bytes_for(n).unwrap_or(0), &patterns[&dtype]);
        let mut bytes = Vec::with_capacity(need);
        while bytes.len() < need {
            bytes.extend_from_slice(&pattern[..pattern.len().min(need - bytes.len())]);
        }
        Ok(bytes)
    }
}

impl TensorSource for RandomSource {
    fn find(&self, gguf_name: &str, _: &str) -> Result<Option<HostTensor>, FormatError> {
        let (layer, part) = layer_and_part(gguf_name);
        let Some(dims) = tensor_dims(&self.config, gguf_name) else { return Ok(None) };
        let n: usize = dims.iter().product();
        let made = if dims.len() > 1 && part.ends_with(".bias") {
            // Biases of experts are never quantised.
            HostTensor::from_f32(
                Shape::new(&dims).unwrap_or_else(|e| panic!("{gguf_name}: {e}")),
                &vec![0.0; n],
            )
        } else if dims.len() == 1 {
            let one = match part {
                // Makes the state decay.
                "ssm_a" => -1.0,
                _ if part.contains("norm") || part.contains("scale") => 1.0,
                _ => 0.0,
            };
            HostTensor::from_f32(Shape::from([n]), &vec![one; n])
        } else {
            let dtype = self.mix.dtype(part, layer, self.config.n_layers, dims[dims.len() - 1]);
            let bytes = self.bytes(dtype, n);
            bytes.and_then(|bytes| HostTensor::new(dtype, Shape::new(&dims)?, Bytes::new(bytes)))
        };
        // The sizes come from the table above and the types from the mix, so both always fit.
        Ok(Some(made.unwrap_or_else(|e| panic!("{gguf_name}: {e}"))))
    }

    fn name<'n>(&self, gguf_name: &'n str, _: &'n str) -> &'n str {
        gguf_name
    }
}

/// Numbers with mean 0 and variance 1, approximately normal: sums of four uniform numbers from a small hash.
fn normal(i: u32) -> f32 {
    let uniform = |salt: u32| {
        let mut x = i.wrapping_mul(0x9E37_79B9) ^ salt.wrapping_mul(0x85EB_CA6B);
        x ^= x >> 16;
        x = x.wrapping_mul(0x7FEB_352D);
        x ^= x >> 15;
        x = x.wrapping_mul(0x846C_A68B);
        x ^= x >> 16;
        x as f32 / u32::MAX as f32 - 0.5
    };
    (uniform(1) + uniform(2) + uniform(3) + uniform(4)) * 3f32.sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Head, KvSpec, StepSpec};

    #[test]
    fn every_shape_builds_a_graph() {
        // A few layers of each architecture, at full width.
        for mut shape in SHAPES {
            shape.n_vocab = 512;
            shape.n_layers = 2;
            shape.ffn = 256;
            let model = Model::random(&shape, QuantMix::Q4KM).unwrap();
            let kv = KvSpec { n_blocks: 2, kv_block: 32, max_blocks: 2, n_slots: 2, dtype: DType::F16 };
            let spec = StepSpec::of_one(1, 1, Head::Logits);
            model.graph(&spec, &kv).unwrap();
        }
    }

    #[test]
    fn a_shape_has_as_many_parameters_as_its_model() {
        let named = [
            "gemma4-e2b",
            "gemma4-31b",
            "gemma3-1b",
            "llama-1m",
            "llama-3.1-8b",
            "qwen2.5-0.5b",
            "phi-4-mini",
            "qwen3-30b-a3b",
            "gemma4-26b-a4b",
            "gpt-oss-20b",
            "qwen3.6-35b-a3b",
        ];
        let named = named.map(|name| *NamedShape::find(name).unwrap());
        // Gemma 4 and models with experts only have shapes with their additional sizes, and encoders have none.
        let others = Arch::ALL.into_iter().filter(|arch| {
            !matches!(arch, Arch::Gemma4 | Arch::Qwen3Moe | Arch::Qwen35Moe | Arch::GptOss)
                && !arch.is_encoder()
        });
        let others = others.map(|arch| NamedShape::new(arch.name(), arch, [64, 64, 128, 8], [4, 2, 16]));
        for mut shape in named.into_iter().chain(others) {
            let name = shape.name;
            (shape.n_vocab, shape.hidden, shape.ffn) = (64, 64, 128);
            shape.n_layers = shape.n_layers.min(12);
            let model = Model::random(&shape, QuantMix::All(DType::F16)).unwrap();
            let of_files = model.weights().iter().enumerate().filter(|(idx, _)| !model.is_derived(*idx));
            let want: usize = of_files.map(|(_, w)| w.ty.shape.n_elements()).sum();
            assert_eq!(shape.n_parameters().iter().sum::<usize>(), want, "{name}");
        }
        // The published count, with an untied head.
        let of = |name| NamedShape::find(name).unwrap().n_parameters();
        assert_eq!(of("llama-3.1-8b"), [8_030_261_248, 0]);
        assert_eq!(of("llama-3.1-8b-tied"), [8_030_261_248 - 128_256 * 4_096, 0]);
        let [total, _] = of("qwen3.6-35b-a3b");
        assert!((34.5e9..35.0e9).contains(&(total as f64)), "{total}");
        let [others, table] = NamedShape::find("gemma4-e2b").unwrap().n_parameters();
        assert_eq!(table, 262_144 * 35 * 256);
        assert!((2.2e9..2.4e9).contains(&(others as f64)), "{others}");
    }

    #[test]
    fn the_q4_k_m_mix_has_the_size_of_such_a_file() {
        let mut shape = *NamedShape::find("llama-3.2-1b").unwrap();
        shape.n_vocab = 1024;
        shape.n_layers = 8;
        let model = Model::random(&shape, QuantMix::Q4KM).unwrap();
        let bits = model.weight_bytes() as f64 * 8.0 / model.n_parameters() as f64;
        assert!((4.5..5.2).contains(&bits), "{bits} bits per weight");
    }

    #[test]
    fn rows_that_are_not_whole_blocks_get_a_type_with_smaller_ones() {
        let mix = QuantMix::All(DType::Q4_K);
        assert_eq!(mix.dtype("ffn_up.weight", Some(0), 30, 576), DType::Q5_0);
        assert_eq!(mix.dtype("ffn_down.weight", Some(0), 30, 1536), DType::Q4_K);
    }

    #[test]
    fn random_numbers_have_mean_zero_and_variance_one() {
        let values: Vec<f64> = (0..100_000).map(|i| f64::from(normal(i))).collect();
        let mean = values.iter().sum::<f64>() / 1e5;
        let variance = values.iter().map(|v| v * v).sum::<f64>() / 1e5;
        assert!(mean.abs() < 0.02 && (variance - 1.0).abs() < 0.03, "{mean} {variance}");
    }
}
