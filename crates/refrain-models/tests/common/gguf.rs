//! Golden folders rewritten as GGUF files, with the names, keys and weight changes of llama.cpp's converter.

use super::folder;
use refrain_formats::ModelFiles;
use refrain_formats::gguf::{Array, Gguf, GgufWriter};
use refrain_tensor::{Bytes, DType, Shape};
use serde_json::Value;

/// A tensor to be written to the file.
#[derive(Clone, Debug)]
pub(crate) struct Tensor {
    pub(crate) name: String,
    pub(crate) dtype: DType,
    pub(crate) dims: Vec<usize>,
    pub(crate) bytes: Vec<u8>,
}

/// A golden as GGUF; `change` may modify the tensors.
pub(crate) fn convert(case: &str, change: impl FnOnce(&mut Vec<Tensor>)) -> ModelFiles {
    let config: Value =
        serde_json::from_slice(&std::fs::read(folder(case).join("config.json")).unwrap()).unwrap();
    // Only the text part of a multimodal model: its towers go to a file of their own.
    let config = config.get("text_config").unwrap_or(&config).clone();
    let arch = case_arch(case);
    let mut writer = GgufWriter::new();
    metadata(&mut writer, arch, &config);
    if arch == "gemma4" {
        gemma4_metadata(&mut writer, &config);
    }
    if arch.starts_with("qwen35") {
        qwen35_metadata(&mut writer, arch, &config);
    }
    if arch == "lfm2" {
        lfm2_metadata(&mut writer, &config);
    }
    if arch == "bert" {
        writer.set("bert.attention.causal", false).unwrap();
        writer.set("bert.pooling_type", 1_u32).unwrap();
    }
    let mut tensors = tensors(case, arch, &config);
    change(&mut tensors);
    for t in tensors {
        writer.tensor(&t.name, t.dtype, Shape::new(&t.dims).unwrap(), Bytes::new(t.bytes)).unwrap();
    }
    ModelFiles::Gguf(Gguf::from_bytes(Bytes::new(writer.to_vec())).unwrap())
}

fn case_arch(case: &str) -> &str {
    match case.split('-').next() {
        // Mistral files use the architecture llama, OLMo 3 files that of its predecessor.
        Some("mistral") => "llama",
        Some("olmo3") => "olmo2",
        Some("gpt") => "gpt-oss",
        Some(arch) => arch,
        None => case,
    }
}

fn metadata(writer: &mut GgufWriter, arch: &str, config: &Value) {
    let number = |key: &str| config[key].as_u64().unwrap() as u32;
    writer.set("general.architecture", arch).unwrap();
    let mut set = |key: &str, value: refrain_formats::gguf::MetadataValue| {
        writer.set(&format!("{arch}.{key}"), value).unwrap();
    };
    set("block_count", number("num_hidden_layers").into());
    set("context_length", number("max_position_embeddings").into());
    set("embedding_length", number("hidden_size").into());
    set("attention.head_count", number("num_attention_heads").into());
    // Gemma 4 has these per layer.
    let alike = !matches!(arch, "gemma4" | "lfm2" | "bert");
    if config["use_double_wide_mlp"] != true && !matches!(arch, "lfm2" | "qwen35moe") {
        set("feed_forward_length", number("intermediate_size").into());
    }
    if alike {
        set("attention.head_count_kv", number("num_key_value_heads").into());
    }
    let float = |value: &Value| value.as_f64().unwrap() as f32;
    match arch {
        "cohere2" | "bert" => set("attention.layer_norm_epsilon", float(&config["layer_norm_eps"]).into()),
        "lfm2" => set("attention.layer_norm_rms_epsilon", float(&config["norm_eps"]).into()),
        _ => set("attention.layer_norm_rms_epsilon", float(&config["rms_norm_eps"]).into()),
    }
    if let Some(dim) = config["head_dim"].as_u64().filter(|_| alike) {
        set("attention.key_length", (dim as u32).into());
        set("attention.value_length", (dim as u32).into());
    }
    if let Some(window) = config["sliding_window"].as_u64() {
        set("attention.sliding_window", (window as u32).into());
    }
    // Converters write 0 for Phi 3 without a window, and a pattern only for OLMo 3.
    if arch == "phi3" && config["sliding_window"].is_null() {
        set("attention.sliding_window", 0u32.into());
    }
    if arch == "olmo2" && config["sliding_window"].is_u64() {
        let slides = Array::Bool(slides(config).into());
        set("attention.sliding_window_pattern", refrain_formats::gguf::MetadataValue::Array(slides));
    }
    for (key, name) in [
        ("embedding_multiplier", "embedding_scale"),
        ("attention_multiplier", "attention.scale"),
        ("residual_multiplier", "residual_scale"),
        ("logits_scaling", "logit_scale"),
        ("logit_scale", "logit_scale"),
        ("attn_logit_softcapping", "attn_logit_softcapping"),
        ("final_logit_softcapping", "final_logit_softcapping"),
    ] {
        if config[key].is_f64() && arch != "gemma4" {
            set(name, float(&config[key]).into());
        }
    }
    if let Some(scalar) = config["query_pre_attn_scalar"].as_f64() {
        set("attention.scale", (scalar.powf(-0.5) as f32).into());
    }
    let experts = ["num_experts", "num_local_experts"].map(|key| config[key].as_u64());
    if let Some(n) = experts[0].or(experts[1]) {
        set("expert_count", (n as u32).into());
        let per_token = if arch == "gemma4" { "top_k_experts" } else { "num_experts_per_tok" };
        set("expert_used_count", number(per_token).into());
        let ffn = if arch == "gpt-oss" { "intermediate_size" } else { "moe_intermediate_size" };
        set("expert_feed_forward_length", number(ffn).into());
        if let Some(shared) = config["shared_expert_intermediate_size"].as_u64() {
            set("expert_shared_feed_forward_length", (shared as u32).into());
        }
        // The default is true.
        if config["norm_topk_prob"] == false {
            set("expert_weights_norm", false.into());
        }
    }
    if arch == "bert" {
        return;
    }
    let rope = &config["rope_parameters"];
    let rope = rope.get("full_attention").unwrap_or(rope);
    set("rope.freq_base", (rope["rope_theta"].as_f64().unwrap() as f32).into());
    // Llama 3's scaling is stored as a tensor.
    if let kind @ ("linear" | "yarn") = rope["rope_type"].as_str().unwrap() {
        set("rope.scaling.type", kind.into());
        set("rope.scaling.factor", (rope["factor"].as_f64().unwrap() as f32).into());
    }
    if let Some(original) =
        rope["original_max_position_embeddings"].as_u64().filter(|_| rope["rope_type"] != "llama3")
    {
        set("rope.scaling.original_context_length", (original as u32).into());
    }
    if let Some(factor) = rope["attention_factor"].as_f64() {
        set("rope.scaling.yarn_attn_factor", (factor as f32).into());
    }
    if let Some(multiplier) = rope["mscale_all_dim"].as_f64() {
        set("rope.scaling.yarn_log_multiplier", (multiplier as f32).into());
    }
    if let Some(beta) = rope["llama_4_scaling_beta"].as_f64() {
        set("attention.temperature_scale", (beta as f32).into());
    }
    let head_dim = config["head_dim"].as_u64();
    let head_dim =
        head_dim.unwrap_or_else(|| u64::from(number("hidden_size") / number("num_attention_heads")));
    if let Some(share) = rope["partial_rotary_factor"].as_f64().filter(|_| alike) {
        set("rope.dimension_count", ((head_dim as f64 * share) as u32).into());
    }
    if rope["rope_type"] == "longrope" {
        let original = rope["original_max_position_embeddings"].as_f64().unwrap();
        let ratio = f64::from(number("max_position_embeddings")) / original;
        set("rope.scaling.attn_factor", ((1.0 + ratio.ln() / original.ln()).sqrt() as f32).into());
    }
}

/// Whether each layer uses a sliding window.
fn slides(config: &Value) -> Vec<bool> {
    let types = config["layer_types"].as_array().unwrap();
    types.iter().map(|kind| kind == "sliding_attention").collect()
}

/// A size of one layer: from its own entry, or the model's.
fn layer_size(config: &Value, layer: usize, key: &str) -> u32 {
    let own = &config["per_layer_config"][layer.to_string()][key];
    own.as_u64().or(config[key].as_u64()).unwrap() as u32
}

/// Per-layer sizes: those of full-attention layers have the plain names.
fn gemma4_metadata(writer: &mut GgufWriter, config: &Value) {
    use refrain_formats::gguf::MetadataValue as Meta;
    let mut set = |key: &str, value: Meta| {
        writer.set(&format!("gemma4.{key}"), value).unwrap();
    };
    let slides = slides(config);
    let n_layers = slides.len();
    let n_shared = config["num_kv_shared_layers"].as_u64().unwrap() as usize;
    set("attention.shared_kv_layers", (n_shared as u32).into());
    let per_layer = config["hidden_size_per_layer_input"].as_u64().unwrap() as u32;
    set("embedding_length_per_layer_input", per_layer.into());
    for (end, is_sliding) in [("", false), ("_swa", true)] {
        let layer = slides.iter().position(|slides| *slides == is_sliding).unwrap();
        let head_dim = layer_size(config, layer, "head_dim");
        for key in ["attention.key_length", "attention.value_length", "rope.dimension_count"] {
            set(&format!("{key}{end}"), head_dim.into());
        }
    }
    let kv_heads = (0..n_layers).map(|layer| layer_size(config, layer, "num_key_value_heads")).collect();
    set("attention.head_count_kv", Meta::Array(Array::U32(kv_heads)));
    if config["use_double_wide_mlp"] == true {
        let ffn = config["intermediate_size"].as_u64().unwrap() as u32;
        let wide = |layer| if layer < n_layers - n_shared { ffn } else { 2 * ffn };
        set("feed_forward_length", Meta::Array(Array::U32((0..n_layers).map(wide).collect())));
    }
    set("attention.sliding_window_pattern", Meta::Array(Array::Bool(slides.into())));
    let local = &config["rope_parameters"]["sliding_attention"]["rope_theta"];
    set("rope.freq_base_swa", (local.as_f64().unwrap() as f32).into());
    set("final_logit_softcapping", (config["final_logit_softcapping"].as_f64().unwrap() as f32).into());
}

/// KV heads per layer, 0 for convolutions; the effective feed-forward size.
fn lfm2_metadata(writer: &mut GgufWriter, config: &Value) {
    use refrain_formats::gguf::{Array, MetadataValue as Meta};
    let number = |key: &str| config[key].as_u64().unwrap() as u32;
    let kinds = config["layer_types"].as_array().unwrap();
    let heads = kinds.iter().map(|kind| if kind == "conv" { 0 } else { number("num_key_value_heads") });
    writer.set("lfm2.attention.head_count_kv", Meta::Array(Array::U32(heads.collect()))).unwrap();
    writer.set("lfm2.shortconv.l_cache", number("conv_L_cache")).unwrap();
    let ffn = (1.1 * f64::from(2 * number("intermediate_size") / 3)) as u32;
    writer.set("lfm2.feed_forward_length", ffn.next_multiple_of(number("block_multiple_of"))).unwrap();
}

/// Sizes of recurrent layers. Vision dimensions do not matter for text.
fn qwen35_metadata(writer: &mut GgufWriter, arch: &str, config: &Value) {
    let number = |key: &str| config[key].as_u64().unwrap() as u32;
    let interval =
        1 + config["layer_types"].as_array().unwrap().iter().position(|t| t == "full_attention").unwrap();
    for (key, value) in [
        ("ssm.conv_kernel", number("linear_conv_kernel_dim")),
        ("ssm.state_size", number("linear_key_head_dim")),
        ("ssm.group_count", number("linear_num_key_heads")),
        ("ssm.time_step_rank", number("linear_num_value_heads")),
        ("ssm.inner_size", number("linear_num_value_heads") * number("linear_value_head_dim")),
        ("full_attention_interval", interval as u32),
    ] {
        writer.set(&format!("{arch}.{key}"), value).unwrap();
    }
}

/// A tensor of a recurrent layer as the converter writes it: value heads in tiles, the decay in its final
/// form, filters without their middle dimension.
fn qwen35_tensor(name: &str, config: &Value, dims: &mut Vec<usize>, values: &mut [f32]) {
    let number = |key: &str| config[key].as_u64().unwrap() as usize;
    let (n_keys, n_values) = (number("linear_num_key_heads"), number("linear_num_value_heads"));
    let (key_dim, value_dim) = (number("linear_key_head_dim"), number("linear_value_head_dim"));
    let keys = 2 * n_keys * key_dim;
    if name.ends_with("norm.weight") && !name.ends_with("ssm_norm.weight") {
        values.iter_mut().for_each(|v| *v += 1.0);
    }
    if name.ends_with("ssm_conv1d.weight") {
        *dims = vec![dims[0], dims[2]];
    }
    if name.ends_with("ssm_a") {
        values.iter_mut().for_each(|v| *v = -v.exp());
    }
    let width = values.len() / dims[0];
    let part = name.split('.').nth(2).unwrap_or_default();
    // First row of the heads, rows per head, elements per row.
    let (first, rows) = match part {
        "attn_qkv" | "ssm_conv1d" => (keys, value_dim),
        "attn_gate" => (0, value_dim),
        "ssm_alpha" | "ssm_beta" | "ssm_a" | "ssm_dt" => (0, 1),
        "ssm_out" => {
            for row in values.chunks_exact_mut(width) {
                tile(row, n_keys, n_values, value_dim);
            }
            return;
        }
        _ => return,
    };
    tile(&mut values[first * width..], n_keys, n_values, rows * width);
}

/// Reorders heads grouped by key head into tiles: the first of every key head, then the second of every key
/// head.
fn tile(values: &mut [f32], n_keys: usize, n_values: usize, head_len: usize) {
    let grouped = values.to_vec();
    let each = n_values / n_keys;
    for (to, head) in values.chunks_exact_mut(head_len).enumerate().take(n_values) {
        let from = to % n_keys * each + to / n_keys;
        head.copy_from_slice(&grouped[from * head_len..][..head_len]);
    }
}

/// Divisors of full-attention layers: pairs that do not rotate get one that stops them.
fn gemma4_divisors(config: &Value) -> Vec<f32> {
    let layer = slides(config).iter().position(|slides| !slides).unwrap();
    let n_pairs = layer_size(config, layer, "head_dim") as usize / 2;
    let share = config["rope_parameters"]["full_attention"]["partial_rotary_factor"].as_f64().unwrap();
    let n_turning = (n_pairs as f64 * share) as usize;
    (0..n_pairs).map(|pair| if pair < n_turning { 1.0 } else { 1e30 }).collect()
}

fn tensors(case: &str, arch: &str, config: &Value) -> Vec<Tensor> {
    let files = ModelFiles::open(folder(case)).unwrap();
    let n_heads = |key: &str| config[key].as_u64().unwrap() as usize;
    let mut tensors = Vec::new();
    // Experts in order of their index.
    let mut infos: Vec<_> = files.tensors().iter().collect();
    infos.sort_by_key(|info| expert_name(info.name()));
    for info in infos {
        if info.name().starts_with("model.visual.") {
            continue;
        }
        let tensor = files.tensor(info.name()).unwrap();
        if arch == "gpt-oss" && info.name().contains(".experts.") {
            if !info.name().ends_with("_scales") {
                gpt_oss_experts(&files, info.name(), &mut tensors);
            }
            continue;
        }
        let mut dims = tensor.shape().dims().to_vec();
        let mut values = tensor.to_f32().unwrap();
        // All experts are in one tensor, in order.
        if let Some((name, expert)) = expert_name(info.name()) {
            match tensors.iter_mut().find(|t: &&mut Tensor| t.name == name) {
                Some(all) => {
                    assert_eq!(all.dims[0], expert, "{name}");
                    all.dims[0] += 1;
                    all.bytes.extend(float("", Vec::new(), &values).bytes);
                }
                None => tensors.push(float(&name, [&[1], &dims[..]].concat(), &values)),
            }
            continue;
        }
        let name = gguf_name(info.name(), arch);
        if matches!(arch, "gemma2" | "gemma3") && name.ends_with("norm.weight") {
            values.iter_mut().for_each(|v| *v += 1.0);
        }
        if arch.starts_with("qwen35") {
            qwen35_tensor(&name, config, &mut dims, &mut values);
        }
        if name.ends_with("shortconv.conv.weight") {
            dims = vec![dims[0], dims[2]];
        }
        let is_joined = matches!(arch, "llama" | "mistral3" | "smollm3" | "granite");
        if is_joined && name.ends_with("attn_q.weight") {
            values = neighbours(&values, n_heads("num_attention_heads"), dims[0], dims[1]);
        }
        if is_joined && name.ends_with("attn_k.weight") {
            values = neighbours(&values, n_heads("num_key_value_heads"), dims[0], dims[1]);
        }
        tensors.push(float(&name, dims, &values));
    }
    if arch == "gemma4" {
        let divisors = gemma4_divisors(config);
        tensors.push(float("rope_freqs.weight", vec![divisors.len()], &divisors));
    }
    if config["rope_parameters"]["rope_type"] == "longrope" {
        for kind in ["long", "short"] {
            let factors = config["rope_parameters"][format!("{kind}_factor")].as_array().unwrap();
            let factors: Vec<f32> = factors.iter().map(|f| f.as_f64().unwrap() as f32).collect();
            tensors.push(float(&format!("rope_factors_{kind}.weight"), vec![factors.len()], &factors));
        }
    }
    if config["rope_parameters"]["rope_type"] == "llama3" {
        let factors = llama3_factors(&config["rope_parameters"], n_heads("head_dim"));
        tensors.push(float("rope_freqs.weight", vec![factors.len()], &factors));
    }
    tensors
}

/// A tensor of experts as the converter writes it: gate and up apart, matrices by rows, MXFP4 in GGUF's blocks.
fn gpt_oss_experts(files: &ModelFiles, name: &str, tensors: &mut Vec<Tensor>) {
    let tensor = files.tensor(name).unwrap();
    let dims = tensor.shape().dims().to_vec();
    let (layer, rest) = name.strip_prefix("model.layers.").unwrap().split_once('.').unwrap();
    let parts: &[&str] =
        if rest.contains("gate_up") { &["ffn_gate_exps", "ffn_up_exps"] } else { &["ffn_down_exps"] };
    for (idx, part) in parts.iter().enumerate() {
        let (n, at) = (parts.len(), |kind: &str| format!("blk.{layer}.{part}.{kind}"));
        if rest.ends_with("_bias") {
            let values: Vec<f32> = tensor.to_f32().unwrap().into_iter().skip(idx).step_by(n).collect();
            tensors.push(float(&at("bias"), vec![dims[0], dims[1] / n], &values));
        } else if let Some(joint) = name.strip_suffix("_blocks") {
            let scales = files.tensor(&format!("{joint}_scales")).unwrap();
            let (blocks, scales) = (tensor.bytes().as_slice(), scales.bytes().as_slice());
            let mut bytes = Vec::new();
            for row in (0..dims[0] * dims[1]).skip(idx).step_by(n) {
                for block in row * dims[2]..(row + 1) * dims[2] {
                    let q: Vec<u8> =
                        blocks[16 * block..][..16].iter().flat_map(|b| [b & 15, b >> 4]).collect();
                    bytes.push(scales[block]);
                    bytes.extend((0..16).map(|j| q[j] | q[16 + j] << 4));
                }
            }
            let dims = vec![dims[0], dims[1] / n, 32 * dims[2]];
            tensors.push(Tensor { name: at("weight"), dtype: DType::MXFP4, dims, bytes });
        } else {
            let values = tensor.to_f32().unwrap();
            let (n_in, n_out) = (dims[1], dims[2] / n);
            let mut by_rows = Vec::new();
            for (expert, row) in (0..dims[0]).flat_map(|e| (0..n_out).map(move |row| (e, row))) {
                let column = |col: usize| values[(expert * n_in + col) * dims[2] + n * row + idx];
                by_rows.extend((0..n_in).map(column));
            }
            tensors.push(float(&at("weight"), vec![dims[0], n_out, n_in], &by_rows));
        }
    }
}

fn float(name: &str, dims: Vec<usize>, values: &[f32]) -> Tensor {
    let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    Tensor { name: name.into(), dtype: DType::F32, dims, bytes }
}

/// The rows of each head in the order 0, h/2, 1, h/2 + 1, ...: elements that are rotated together become
/// adjacent.
fn neighbours(values: &[f32], n_heads: usize, n_rows: usize, n_cols: usize) -> Vec<f32> {
    let head = n_rows / n_heads;
    let from = |row: usize| row / head * head + (row % head) % 2 * (head / 2) + (row % head) / 2;
    (0..n_rows).flat_map(|row| values[from(row) * n_cols..][..n_cols].iter().copied()).collect()
}

fn llama3_factors(rope: &Value, head_dim: usize) -> Vec<f32> {
    let get = |key: &str| rope[key].as_f64().unwrap();
    let (factor, low, high) = (get("factor"), get("low_freq_factor"), get("high_freq_factor"));
    let original = get("original_max_position_embeddings");
    let factor_of = |i: usize| {
        let wave = std::f64::consts::TAU * get("rope_theta").powf(2.0 * i as f64 / head_dim as f64);
        if wave < original / high {
            1.0
        } else if wave > original / low {
            factor
        } else {
            let smooth = (original / wave - low) / (high - low);
            1.0 / ((1.0 - smooth) / factor + smooth)
        }
    };
    (0..head_dim / 2).map(|i| factor_of(i) as f32).collect()
}

/// The tensor that holds an expert's matrix, and the expert's index.
fn expert_name(hf: &str) -> Option<(String, usize)> {
    let (layer, rest) = hf.strip_prefix("model.layers.")?.split_once(".mlp.experts.")?;
    let (expert, part) = rest.split_once('.')?;
    let name = match part {
        "gate_proj.weight" => "ffn_gate_exps",
        "up_proj.weight" => "ffn_up_exps",
        "down_proj.weight" => "ffn_down_exps",
        _ => return None,
    };
    Some((format!("blk.{layer}.{name}.weight"), expert.parse().ok()?))
}

fn gguf_name(hf: &str, arch: &str) -> String {
    let hf = &hf.replace("model.language_model.", "model.");
    match hf.as_str() {
        "model.embed_tokens.weight" => return "token_embd.weight".into(),
        "model.norm.weight" => return "output_norm.weight".into(),
        "model.embedding_norm.weight" => return "token_embd_norm.weight".into(),
        "lm_head.weight" => return "output.weight".into(),
        "model.embed_tokens_per_layer.weight" => return "per_layer_token_embd.weight".into(),
        "model.per_layer_model_projection.weight" => return "per_layer_model_proj.weight".into(),
        "model.per_layer_projection_norm.weight" => return "per_layer_proj_norm.weight".into(),
        "embeddings.word_embeddings.weight" => return "token_embd.weight".into(),
        "embeddings.position_embeddings.weight" => return "position_embd.weight".into(),
        "embeddings.token_type_embeddings.weight" => return "token_types.weight".into(),
        _ => {}
    }
    if let Some(part) = hf.strip_prefix("embeddings.LayerNorm.") {
        return format!("token_embd_norm.{part}");
    }
    let layers = if arch == "bert" { "encoder.layer." } else { "model.layers." };
    let rest = hf.strip_prefix(layers).unwrap_or_else(|| panic!("{hf}"));
    let (layer, rest) = rest.split_once('.').unwrap();
    match rest {
        "router.scale" => return format!("blk.{layer}.ffn_gate_inp.scale"),
        "router.per_expert_scale" => return format!("blk.{layer}.ffn_down_exps.scale"),
        "experts.gate_up_proj" | "mlp.experts.gate_up_proj" => {
            return format!("blk.{layer}.ffn_gate_up_exps.weight");
        }
        "experts.down_proj" | "mlp.experts.down_proj" => return format!("blk.{layer}.ffn_down_exps.weight"),
        "self_attn.sinks" => return format!("blk.{layer}.attn_sinks.weight"),
        "mlp.router.bias" => return format!("blk.{layer}.ffn_gate_inp.bias"),
        "mlp.router.weight" => return format!("blk.{layer}.ffn_gate_inp.weight"),
        _ => {}
    }
    let (part, kind) = rest.rsplit_once('.').unwrap_or((rest, "weight"));
    let name = match part {
        "attention.self.query" => "attn_q",
        "attention.self.key" => "attn_k",
        "attention.self.value" => "attn_v",
        "attention.output.dense" => "attn_output",
        "attention.output.LayerNorm" => "attn_output_norm",
        "intermediate.dense" => "ffn_up",
        "output.dense" => "ffn_down",
        "output.LayerNorm" => "layer_output_norm",
        "input_layernorm" => "attn_norm",
        "self_attn.q_proj" => "attn_q",
        "self_attn.k_proj" => "attn_k",
        "self_attn.v_proj" => "attn_v",
        "self_attn.o_proj" => "attn_output",
        "self_attn.q_norm" => "attn_q_norm",
        "self_attn.k_norm" => "attn_k_norm",
        "layer_scalar" => "layer_output_scale",
        "per_layer_input_gate" => "inp_gate",
        "per_layer_projection" => "proj",
        "post_per_layer_input_norm" => "post_norm",
        "self_attn.qkv_proj" => "attn_qkv",
        "mlp.gate_up_proj" => "ffn_up",
        "mlp.shared_expert_gate" => "ffn_gate_inp_shexp",
        "mlp.shared_expert.gate_proj" => "ffn_gate_shexp",
        "mlp.shared_expert.up_proj" => "ffn_up_shexp",
        "mlp.shared_expert.down_proj" => "ffn_down_shexp",
        "post_self_attn_layernorm" => "post_attention_norm",
        "post_mlp_layernorm" => "post_ffw_norm",
        "post_attention_layernorm"
            if arch.starts_with("gemma") || matches!(arch, "olmo2" | "qwen35" | "qwen35moe" | "gpt-oss") =>
        {
            "post_attention_norm"
        }
        "linear_attn" if kind == "A_log" => return format!("blk.{layer}.ssm_a"),
        "linear_attn" if kind == "dt_bias" => return format!("blk.{layer}.ssm_dt.bias"),
        "operator_norm" => "attn_norm",
        "ffn_norm" => "ffn_norm",
        "self_attn.out_proj" => "attn_output",
        "self_attn.q_layernorm" => "attn_q_norm",
        "self_attn.k_layernorm" => "attn_k_norm",
        "conv.in_proj" => "shortconv.in_proj",
        "conv.conv" => "shortconv.conv",
        "conv.out_proj" => "shortconv.out_proj",
        "feed_forward.w1" => "ffn_gate",
        "feed_forward.w3" => "ffn_up",
        "feed_forward.w2" => "ffn_down",
        "linear_attn.in_proj_qkv" => "attn_qkv",
        "linear_attn.in_proj_z" => "attn_gate",
        "linear_attn.in_proj_a" => "ssm_alpha",
        "linear_attn.in_proj_b" => "ssm_beta",
        "linear_attn.conv1d" => "ssm_conv1d",
        "linear_attn.norm" => "ssm_norm",
        "linear_attn.out_proj" => "ssm_out",
        "post_attention_layernorm" | "pre_feedforward_layernorm" => "ffn_norm",
        "post_feedforward_layernorm" => "post_ffw_norm",
        "router.proj" => "ffn_gate_inp",
        "pre_feedforward_layernorm_2" => "pre_ffw_norm_2",
        "post_feedforward_layernorm_1" => "post_ffw_norm_1",
        "post_feedforward_layernorm_2" => "post_ffw_norm_2",
        "mlp.gate_proj" => "ffn_gate",
        "mlp.up_proj" => "ffn_up",
        "mlp.down_proj" => "ffn_down",
        "mlp.gate" => "ffn_gate_inp",
        other => panic!("{other} has no GGUF name"),
    };
    format!("blk.{layer}.{name}.{kind}")
}
