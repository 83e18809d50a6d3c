"""Writes reference logits of every architecture, computed with `transformers`, for the tests of refrain-models.

    python3 tools/goldens.py [OUT [CASE ..]]        (default: crates/refrain-models/tests/goldens, all cases)

Needs torch, transformers and safetensors; the versions used are in each golden's metadata. Runs on the CPU in a few
seconds. Each case is a folder:

    config.json           as written by transformers 5 (rope_parameters, layer_types)
    config-v4.json        the same model as written by transformers 4 (rope_theta, rope_scaling, rope_local_base_freq),
                          the form of most published folders
    model.safetensors     f32 weights under their Hugging Face names
    golden.safetensors    tokens int64 [n], logits f32 [n, vocab]

Weights are chosen so that mistakes show: matrices large enough for sharp attention, norm weights away from 1 and biases
away from 0. For each case, the script also checks that the tested feature matters (`shows`): changing the feature must
move the logits by far more than the tolerance of the tests. It refuses to write a case whose f32 logits differ from the
f64 ones by more than a tenth of that tolerance, since passing such a case would be luck.
"""

import copy
import json
import pathlib
import sys

import torch
import transformers
from safetensors.torch import load_file, save_file

TOLERANCE = 1e-4
COMMON = dict(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    initializer_range=0.2,
    # Large enough that ignoring the key causes an error above the tolerance.
    rms_norm_eps=1e-3,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=None,
)


def rope(theta, **more):
    return dict(rope_parameters=dict(rope_type="default", rope_theta=theta) | more)


LLAMA3 = dict(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    # Short, so that a sequence of 40 tokens covers all three bands: kept, blended and divided wavelengths.
    original_max_position_embeddings=64,
)
YARN = dict(
    rope_type="yarn",
    factor=4.0,
    # Short for the same reason.
    original_max_position_embeddings=64,
)
GEMMA = dict(
    COMMON,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=7,
    num_key_value_heads=1,
    head_dim=16,
    query_pre_attn_scalar=24,
    sliding_window=8,
    layer_types=["sliding_attention"] * 5 + ["full_attention", "sliding_attention"],
    tie_word_embeddings=True,
)


def gemma_rope(**full):
    return dict(
        rope_parameters=dict(
            full_attention=dict(rope_type="default", rope_theta=1_000_000.0) | full,
            sliding_attention=dict(rope_type="default", rope_theta=10_000.0),
        )
    )


def gemma4_rope(share=0.25, local=10_000.0):
    return dict(
        rope_parameters=dict(
            full_attention=dict(rope_type="proportional", partial_rotary_factor=share, rope_theta=1_000_000.0),
            sliding_attention=dict(rope_type="default", rope_theta=local),
        )
    )


def gemma4(kinds, **more):
    """Settings from a string with one letter per layer: s for sliding, f for full."""
    names = dict(s="sliding_attention", f="full_attention")
    settings = dict(
        COMMON,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=len(kinds),
        layer_types=[names[kind] for kind in kinds],
        num_key_value_heads=1,
        head_dim=16,
        global_head_dim=32,
        sliding_window=8,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=COMMON["vocab_size"],
        final_logit_softcapping=4.0,
        tie_word_embeddings=True,
    )
    return settings | gemma4_rope() | more


QWEN3MOE = COMMON | rope(1_000_000.0) | dict(
    head_dim=32,
    use_sliding_window=False,
    num_experts=12,
    num_experts_per_tok=3,
    moe_intermediate_size=40,
    norm_topk_prob=True,
)
def longrope(original, share, **more):
    """Long and short factors for heads of 16 elements, of which only a part is rotated."""
    n_pairs = int(16 * share) // 2
    return dict(
        original_max_position_embeddings=original,
        rope_parameters=dict(
            rope_type="longrope",
            rope_theta=10_000.0,
            partial_rotary_factor=share,
            short_factor=[1.0 + 0.25 * pair for pair in range(n_pairs)],
            long_factor=[1.5 + 0.75 * pair for pair in range(n_pairs)],
            original_max_position_embeddings=original,
        )
        | more,
    )


def ministral_rope(beta=0.5, **more):
    return rope(
        1_000_000.0,
        rope_type="yarn",
        factor=4.0,
        # Short, so that queries over 40 tokens use three temperatures.
        original_max_position_embeddings=16,
        beta_fast=32.0,
        beta_slow=1.0,
        mscale=1.0,
        mscale_all_dim=1.0,
        llama_4_scaling_beta=beta,
        **more,
    )


def olmo3_rope(**full):
    return dict(
        rope_parameters=dict(
            full_attention=dict(rope_type="default", rope_theta=500_000.0) | full,
            sliding_attention=dict(rope_type="default", rope_theta=500_000.0),
        )
    )


def vision(**text):
    """Settings of a model with an image tower, which the text model does not need."""
    return dict(
        text_config=text,
        vision_config=dict(
            depth=1,
            hidden_size=16,
            intermediate_size=16,
            num_heads=2,
            out_hidden_size=text["hidden_size"],
            patch_size=2,
            num_position_embeddings=16,
            deepstack_visual_indexes=[0],
        ),
        tie_word_embeddings=text["tie_word_embeddings"],
    )


QWEN3_VL = dict(
    COMMON | rope(5_000_000.0, mrope_section=[6, 5, 5], mrope_interleaved=True),
    head_dim=32,
    tie_word_embeddings=True,
)
OLMO3_YARN = dict(YARN, attention_factor=1.25)


def qwen35(kinds, **more):
    """Settings from a string with one letter per layer: l for linear, f for full."""
    names = dict(l="linear_attention", f="full_attention")
    settings = dict(
        COMMON,
        num_hidden_layers=len(kinds),
        layer_types=[names[kind] for kind in kinds],
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=6,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        linear_conv_kernel_dim=4,
        tie_word_embeddings=False,
    )
    return settings | rope(10_000.0, partial_rotary_factor=0.25, mrope_section=[2, 1, 1]) | more


GEMMA4_SHOWS = {
    "no window": dict(sliding_window=256),
    "window off by one": dict(sliding_window=9),
    "share of rotated pairs": gemma4_rope(share=0.5),
    "rope base of sliding layers": gemma4_rope(local=1_000_000.0),
    "final soft cap": dict(final_logit_softcapping=None),
}

# name: (config class, settings, number of tokens, {name of a change: changed settings})
GPT_OSS_ROPE = YARN | dict(factor=4.0, truncate=False)
GPT_OSS = (
    COMMON
    | rope(10_000.0, **GPT_OSS_ROPE)
    | dict(
        hidden_size=32,
        intermediate_size=33,
        num_hidden_layers=3,
        head_dim=16,
        sliding_window=8,
        num_local_experts=5,
        num_experts_per_tok=3,
        tie_word_embeddings=False,
    )
)
GPT_OSS_SHOWS = {
    "choices": dict(num_experts_per_tok=2),
    "window off by one": dict(sliding_window=9),
    "limit of the gate": dict(swiglu_limit=100.0),
    "rounded bounds of the rope scaling": rope(10_000.0, **GPT_OSS_ROPE | dict(truncate=True)),
}

QWEN35_EXPERTS = dict(
    hidden_size=48, num_experts=9, num_experts_per_tok=2, moe_intermediate_size=20, shared_expert_intermediate_size=28
)
QWEN35_EXPERTS_SHOWS = {"choices": dict(num_experts_per_tok=3)}

CASES = {
    "llama": (
        transformers.LlamaConfig,
        COMMON | rope(10_000.0),
        32,
        {"rope base": rope(500_000.0), "norm epsilon": dict(rms_norm_eps=1e-5)},
    ),
    "llama-rope3": (
        transformers.LlamaConfig,
        COMMON | rope(500_000.0, **LLAMA3),
        40,
        {"rope scaling": rope(500_000.0)},
    ),
    "llama-tied": (
        transformers.LlamaConfig,
        COMMON | rope(10_000.0) | dict(tie_word_embeddings=True, num_key_value_heads=4),
        24,
        {},
    ),
    "mistral-window": (
        transformers.MistralConfig,
        COMMON | rope(10_000.0) | dict(sliding_window=8),
        40,
        {"no window": dict(sliding_window=None), "window off by one": dict(sliding_window=9)},
    ),
    "qwen2": (
        transformers.Qwen2Config,
        COMMON | rope(1_000_000.0) | dict(use_sliding_window=False, tie_word_embeddings=False),
        32,
        {},
    ),
    "qwen3": (
        transformers.Qwen3Config,
        COMMON | rope(1_000_000.0) | dict(head_dim=32, use_sliding_window=False, tie_word_embeddings=True),
        32,
        {},
    ),
    "gemma3": (
        transformers.Gemma3TextConfig,
        GEMMA | gemma_rope(),
        40,
        {
            "no window": dict(sliding_window=256),
            "window off by one": dict(sliding_window=9),
            "query scale": dict(query_pre_attn_scalar=16),
            "global layer elsewhere": dict(layer_types=["full_attention"] + ["sliding_attention"] * 6),
        },
    ),
    "gemma3-linear": (
        transformers.Gemma3TextConfig,
        GEMMA | gemma_rope(rope_type="linear", factor=8.0),
        40,
        {"rope scaling": gemma_rope()},
    ),
    "qwen3-yarn": (
        transformers.Qwen3Config,
        COMMON | rope(1_000_000.0, **YARN) | dict(head_dim=32, use_sliding_window=False, tie_word_embeddings=True),
        40,
        {
            "rope scaling": rope(1_000_000.0),
            "attention factor": rope(1_000_000.0, **YARN, attention_factor=1.0),
            "beta": rope(1_000_000.0, **YARN, beta_fast=16.0, beta_slow=2.0),
        },
    ),
    # Like E2B: both kinds of layers share keys and values, and have wider feed-forward layers.
    "gemma4-e2b": (
        transformers.Gemma4TextConfig,
        gemma4("ssfsfsfsf", num_kv_shared_layers=4, use_double_wide_mlp=True),
        40,
        GEMMA4_SHOWS,
    ),
    # Like E4B: more heads, no wider feed-forward layers, and only the last layer shares.
    "gemma4-e4b": (
        transformers.Gemma4TextConfig,
        gemma4("sfsssf", num_key_value_heads=2, num_kv_shared_layers=1),
        40,
        GEMMA4_SHOWS,
    ),
    # Like 31B: no second embedding, no sharing; full-attention layers have fewer heads and use keys as values.
    "gemma4-dense": (
        transformers.Gemma4TextConfig,
        gemma4(
            "sssff",
            num_key_value_heads=2,
            num_global_key_value_heads=1,
            attention_k_eq_v=True,
            hidden_size_per_layer_input=0,
        ),
        40,
        GEMMA4_SHOWS,
    ),
    # Heads of the published sizes.
    "gemma4-heads": (
        transformers.Gemma4TextConfig,
        gemma4(
            "sfsf",
            num_attention_heads=2,
            head_dim=256,
            global_head_dim=512,
            num_kv_shared_layers=2,
            sliding_window=16,
            vocab_size=96,
            vocab_size_per_layer_input=96,
        ),
        36,
        {"no window": dict(sliding_window=256)},
    ),
    # Like 26B-A4B: experts in addition to the dense part, no second embedding, keys as values in full-attention layers.
    "gemma4-experts": (
        transformers.Gemma4TextConfig,
        gemma4(
            "sssf",
            num_key_value_heads=2,
            num_global_key_value_heads=1,
            attention_k_eq_v=True,
            hidden_size_per_layer_input=0,
            enable_moe_block=True,
            num_experts=9,
            top_k_experts=2,
            moe_intermediate_size=24,
        ),
        40,
        GEMMA4_SHOWS | {"choices": dict(top_k_experts=3)},
    ),
    # Few experts, so that some rows share one and some experts have none.
    "qwen3moe": (
        transformers.Qwen3MoeConfig,
        QWEN3MOE,
        32,
        {
            "choices": dict(num_experts_per_tok=2),
            "weights that sum to one": dict(norm_topk_prob=False),
        },
    ),
    "qwen3moe-plain": (
        transformers.Qwen3MoeConfig,
        QWEN3MOE | dict(num_experts=5, num_experts_per_tok=1, moe_intermediate_size=33, norm_topk_prob=False),
        24,
        {"weights that sum to one": dict(norm_topk_prob=True)},
    ),
    # Sequences longer than the original context: long factors. Three of four elements are rotated.
    "phi3": (
        transformers.Phi3Config,
        COMMON | longrope(32, 0.75),
        40,
        {
            "short factors": longrope(64, 0.75),
            "attention factor": longrope(32, 0.75, attention_factor=1.0),
            "rope base": longrope(32, 0.75, rope_theta=500_000.0),
        },
    ),
    "phi3-short": (
        transformers.Phi3Config,
        COMMON | longrope(128, 1.0) | dict(sliding_window=8, tie_word_embeddings=True),
        40,
        {"long factors": longrope(32, 1.0), "no window": dict(sliding_window=None)},
    ),
    "mistral3": (
        transformers.Ministral3Config,
        COMMON | ministral_rope() | dict(head_dim=32),
        40,
        {
            "query temperature": ministral_rope(beta=0.0),
            "attention factor": ministral_rope(attention_factor=1.2),
        },
    ),
    "gemma2": (
        transformers.Gemma2Config,
        GEMMA
        | rope(10_000.0)
        | dict(
            num_hidden_layers=4,
            layer_types=["sliding_attention", "full_attention"] * 2,
            attn_logit_softcapping=2.0,
            final_logit_softcapping=4.0,
        ),
        40,
        {
            "window off by one": dict(sliding_window=9),
            "attention soft cap": dict(attn_logit_softcapping=None),
            "final soft cap": dict(final_logit_softcapping=None),
            "query scale": dict(query_pre_attn_scalar=16),
            "other layers slide": dict(layer_types=["full_attention", "sliding_attention"] * 2),
        },
    ),
    "smollm3": (
        transformers.SmolLM3Config,
        COMMON | rope(2_000_000.0) | dict(num_hidden_layers=5, tie_word_embeddings=True),
        32,
        {"a layer without rotation": dict(no_rope_layers=[1] * 5)},
    ),
    "olmo2": (transformers.Olmo2Config, COMMON | rope(10_000.0), 32, {"rope base": rope(500_000.0)}),
    "olmo3": (
        transformers.Olmo3Config,
        COMMON | olmo3_rope(**OLMO3_YARN) | dict(num_hidden_layers=5, sliding_window=8),
        40,
        {
            "rope scaling": olmo3_rope(),
            "attention factor": olmo3_rope(**YARN),
            "window off by one": dict(sliding_window=9),
        },
    ),
    "granite": (
        transformers.GraniteConfig,
        COMMON
        | rope(10_000.0)
        | dict(
            embedding_multiplier=3.0,
            attention_multiplier=0.125,
            residual_multiplier=0.5,
            logits_scaling=2.0,
            attention_bias=False,
            tie_word_embeddings=True,
        ),
        32,
        {
            "embedding scale": dict(embedding_multiplier=1.0),
            "attention scale": dict(attention_multiplier=0.25),
            "residual scale": dict(residual_multiplier=1.0),
            "logit scale": dict(logits_scaling=1.0),
        },
    ),
    "qwen3vl": (transformers.Qwen3VLConfig, vision(**QWEN3_VL), 32, {}),
    "glm4": (
        transformers.Glm4Config,
        COMMON | rope(10_000.0, partial_rotary_factor=0.5) | dict(head_dim=16),
        32,
        {"share of rotated elements": rope(10_000.0, partial_rotary_factor=1.0)},
    ),
    "cohere2": (
        transformers.Cohere2Config,
        COMMON
        | rope(10_000.0)
        | dict(num_hidden_layers=5, sliding_window=8, logit_scale=0.5, layer_norm_eps=1e-3, tie_word_embeddings=True),
        40,
        {"logit scale": dict(logit_scale=1.0), "norm epsilon": dict(layer_norm_eps=1e-5)},
    ),
    # Three value heads per key head; every other layer has attention.
    "qwen35": (
        transformers.Qwen3_5TextConfig,
        qwen35("lflf", hidden_size=48, intermediate_size=64),
        40,
        {
            "rope base": rope(500_000.0, partial_rotary_factor=0.25, mrope_section=[2, 1, 1]),
            "share of rotated elements": rope(10_000.0, partial_rotary_factor=0.5, mrope_section=[4, 2, 2]),
        },
    ),
    # One value head per key head, odd sizes, a shorter filter; three of four layers are recurrent.
    "qwen35-odd": (
        transformers.Qwen3_5TextConfig,
        qwen35(
            "lllf",
            hidden_size=48,
            linear_num_key_heads=3,
            linear_num_value_heads=3,
            linear_key_head_dim=20,
            linear_value_head_dim=12,
            linear_conv_kernel_dim=3,
            tie_word_embeddings=True,
        ),
        40,
        {},
    ),
    # Two convolution layers per attention layer.
    "lfm2": (
        transformers.Lfm2Config,
        COMMON
        | rope(1_000_000.0)
        | dict(
            num_hidden_layers=5,
            layer_types=["conv", "conv", "full_attention", "conv", "full_attention"],
            hidden_size=48,
            norm_eps=1e-3,
            intermediate_size=96,
            block_multiple_of=20,
            block_ffn_dim_multiplier=1.1,
            tie_word_embeddings=True,
        ),
        40,
        {"feed-forward epsilon": dict(norm_eps=1e-5)},
    ),
    # Few experts, so that some rows share one and some experts have none; rows longer than the window.
    "gpt-oss": (transformers.GptOssConfig, GPT_OSS, 40, GPT_OSS_SHOWS),
    # Experts in the form of the published folders: blocks and scales, gate and up in alternating rows.
    "gpt-oss-mxfp4": (transformers.GptOssConfig, GPT_OSS | dict(num_hidden_layers=2, intermediate_size=64), 40, GPT_OSS_SHOWS),
    # Every layer has routed experts and one that all tokens use, of another size.
    "qwen35moe": (transformers.Qwen3_5MoeTextConfig, qwen35("lflf", **QWEN35_EXPERTS), 40, QWEN35_EXPERTS_SHOWS),
    # All experts of a layer in one tensor, gate and up joined, as in the published folders.
    "qwen35moe-joined": (
        transformers.Qwen3_5MoeTextConfig,
        qwen35("lf", **QWEN35_EXPERTS | dict(num_experts=4, num_experts_per_tok=4, linear_num_value_heads=2)),
        40,
        {},
    ),
}
# Replacing any parameter of these kinds by its mean must show in the logits.
NOTICED = ("norm", "bias", "sinks", "layer_scalar", "A_log", "conv1d", "conv.conv", "router.scale", "per_expert_scale", "shared_expert_gate")


def build(config_class, settings):
    config = config_class(**settings)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    return auto_class(config).from_config(config, dtype=torch.float32).eval()


def auto_class(config):
    if hasattr(config, "vision_config"):
        return transformers.AutoModelForImageTextToText
    return transformers.AutoModelForCausalLM


# The indices and exponents of the experts' matrices of the case that is being written.
MXFP4 = {}
LEVELS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def mxfp4_values(blocks, scales):
    return (LEVELS[blocks] * 2.0 ** (scales[..., None] - 127)).flatten(2)


def write_mxfp4(folder):
    """Replaces the experts' matrices by blocks of two elements a byte, and scales, as in the published folders."""
    tensors = load_file(folder / "model.safetensors")
    for name, (blocks, scales) in MXFP4.items():
        del tensors[name]
        tensors[f"{name}_blocks"] = (blocks[..., 0::2] | blocks[..., 1::2] << 4).contiguous()
        tensors[f"{name}_scales"] = scales.contiguous()
    save_file(tensors, folder / "model.safetensors", metadata=dict(format="pt"))
    not_converted = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = dict(modules_to_not_convert=not_converted, quant_method="mxfp4")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def joined_experts(tensors, model):
    """The tensors of a file with the experts as the model has them."""
    apart = [name for name in tensors if ".mlp.experts." in name]
    joined = {name: p.detach().clone() for name, p in model.named_parameters() if ".mlp.experts." in name}
    assert apart and not any(name in joined for name in apart)
    return {name: tensor for name, tensor in tensors.items() if name not in apart} | joined


def randomise(model, case, seed):
    # Architectures whose norms multiply by one plus the stored weight.
    less_one, gemma4 = case.startswith(("gemma2", "gemma3")), case.startswith("gemma4")
    qwen35 = case.startswith("qwen35")
    generator = torch.Generator().manual_seed(seed)

    def normal(shape, std):
        return torch.randn(shape, generator=generator) * std

    with torch.no_grad():
        for name, p in sorted(model.named_parameters()):
            if gemma4 and ("q_norm" in name or "k_norm" in name):
                # Scores are not scaled: keep them in the range where the softmax is sharp but not one-hot.
                p.copy_((normal(p.shape, 0.3) + 1.0) * p.numel() ** -0.25)
            elif qwen35 and name.endswith("A_log"):
                # States that decay slowly, and some that decay at once.
                p.copy_(normal(p.shape, 1.5) - 2.0)
            elif name.endswith(("conv1d.weight", "conv.conv.weight")):
                p.copy_(normal(p.shape, 0.5))
            elif qwen35 and "norm" in name and "linear_attn" not in name:
                # Norms multiply by one plus the stored weight, except in recurrent layers.
                p.copy_(normal(p.shape, 0.3))
            elif "norm" in name:
                p.copy_(normal(p.shape, 0.3) + (0.0 if less_one else 1.0))
            elif name.endswith(("router.scale", "per_expert_scale", "shared_expert_gate")):
                p.copy_(normal(p.shape, 0.3) + 1.0)
            elif name.endswith("bias"):
                p.copy_(normal(p.shape, 0.5))
            elif name.endswith("sinks"):
                # Among the largest scores.
                p.copy_(normal(p.shape, 1.0) + 1.0)
            elif case == "gpt-oss" and name.endswith("gate_up_proj"):
                # Some products beyond the limits.
                p.copy_(normal(p.shape, 0.6))
            elif case == "gpt-oss-mxfp4" and "experts" in name:
                # Levels of MXFP4 in blocks along the input, which is the middle dimension.
                n_experts, n_in, n_out = p.shape
                blocks = torch.randint(0, 16, (n_experts, n_out, n_in // 32, 32), generator=generator)
                scales = torch.randint(122, 126, (n_experts, n_out, n_in // 32), generator=generator)
                p.copy_(mxfp4_values(blocks, scales).transpose(1, 2))
                MXFP4[name] = (blocks.to(torch.uint8), scales.to(torch.uint8))
            else:
                p.copy_(normal(p.shape, 0.2))
        for name, b in sorted(model.named_buffers()):
            if name.endswith("layer_scalar"):
                b.copy_(normal(b.shape, 0.2) + 1.0)


@torch.no_grad()
def logits_of(model, tokens):
    return model(tokens[None], use_cache=False).logits[0]


def difference(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def v4_config(case, config):
    """The same configuration with the keys of transformers 4 or, for newer models, of their first published folders."""
    old = copy.deepcopy(config)
    if old["model_type"] == "gemma4_text":
        settings = CASES[case][1]
        del old["per_layer_config"]
        old["global_head_dim"] = settings["global_head_dim"]
        old["num_global_key_value_heads"] = settings.get("num_global_key_value_heads")
        return old
    if old["model_type"] == "ministral3":
        # Known only to transformers 5.
        old["rope_parameters"]["type"] = old["rope_parameters"].pop("rope_type")
        return old
    if old["model_type"] in ("qwen3_5_text", "qwen3_5_moe_text"):
        old["full_attention_interval"] = old.pop("layer_types").index("full_attention") + 1
        return old
    if old["model_type"] == "lfm2":
        types = old.pop("layer_types")
        old["full_attn_idxs"] = [i for i, kind in enumerate(types) if kind == "full_attention"]
        old["block_ff_dim"] = old.pop("intermediate_size")
        old["tie_embedding"] = old.pop("tie_word_embeddings")
        old["rope_theta"] = old.pop("rope_parameters")["rope_theta"]
        return old
    old["transformers_version"] = "4.52.0"
    old["torch_dtype"] = old.pop("dtype", "float32")
    if "text_config" in old:
        old["text_config"] = v4_keys(old["text_config"])
        return old
    return v4_keys(old)


def v4_keys(old):
    parameters = old.pop("rope_parameters")
    layer_types = old.pop("layer_types", None)
    old.pop("_sliding_window_pattern", None)
    if "full_attention" in parameters:
        old["rope_local_base_freq"] = parameters["sliding_attention"]["rope_theta"]
        parameters = parameters["full_attention"]
        old["sliding_window_pattern"] = layer_types.index("full_attention") + 1
    old["rope_theta"] = parameters.pop("rope_theta")
    if "partial_rotary_factor" in parameters:
        old["partial_rotary_factor"] = parameters.pop("partial_rotary_factor")
    is_plain = parameters["rope_type"] == "default" and "mrope_section" not in parameters
    old["rope_scaling"] = None if is_plain else parameters
    if old["model_type"] == "phi3":
        del parameters["original_max_position_embeddings"]
    if old["model_type"] == "olmo3":
        del old["rope_local_base_freq"], old["sliding_window_pattern"]
    if old["model_type"] == "cohere2":
        old["sliding_window_pattern"] = layer_types.index("full_attention") + 1
    return old


def noticed(model, tokens, logits):
    """Smallest change of the logits when one of the small parameters is replaced by its mean, and that parameter's name."""
    least = (float("inf"), "")
    for name, p in [*model.named_parameters(), *model.named_buffers()]:
        if not any(kind in name for kind in NOTICED) or "visual" in name:
            continue
        # The final norm cancels the last one.
        if name == f"model.layers.{model.config.get_text_config().num_hidden_layers - 1}.layer_scalar":
            continue
        kept = p.detach().clone()
        with torch.no_grad():
            p.fill_(1.0 if name.endswith("layer_scalar") else kept.mean())
            moved = difference(logits_of(model, tokens), logits)
            p.copy_(kept)
        least = min(least, (moved, name))
    return least


def write_case(out, name, seed):
    config_class, settings, n_tokens, shows = CASES[name]
    model = build(config_class, settings)
    randomise(model, name, seed)
    text = settings.get("text_config", settings)
    tokens = torch.randint(3, text["vocab_size"], (n_tokens,), generator=torch.Generator().manual_seed(seed + 1))
    tokens[0] = text["bos_token_id"]
    logits = logits_of(model, tokens)
    rounding = difference(logits_of(copy.deepcopy(model).double(), tokens), logits)
    assert rounding < TOLERANCE / 10, f"{name}: f32 and f64 differ by {rounding:.1e}"

    least, parameter = noticed(model, tokens, logits)
    assert least > 10 * TOLERANCE, f"{name}: {parameter} changes the logits by only {least:.1e}"
    for what, change in shows.items():
        other = build(config_class, settings | change)
        other.load_state_dict(model.state_dict())
        moved = difference(logits_of(other, tokens), logits)
        assert moved > 10 * TOLERANCE, f"{name}: {what} changes the logits by only {moved:.1e}"

    folder = out / name
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    if name == "gpt-oss-mxfp4":
        write_mxfp4(folder)
    if name == "qwen35moe-joined":
        save_file(joined_experts(load_file(folder / "model.safetensors"), model), folder / "model.safetensors")
    (folder / "generation_config.json").unlink(missing_ok=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config-v4.json").write_text(json.dumps(v4_config(name, config), indent=2) + "\n")
    save_file(
        {"tokens": tokens.contiguous(), "logits": logits.contiguous()},
        folder / "golden.safetensors",
        metadata=dict(
            torch=torch.__version__,
            transformers=transformers.__version__,
            seed=str(seed),
            f32_against_f64=f"{rounding:.1e}",
        ),
    )
    for file in folder.iterdir():
        file.chmod(0o644)
    # `transformers` dequantises MXFP4 only with a library for GPUs.
    for file in ("config.json", "config-v4.json") if name != "gpt-oss-mxfp4" else ():
        check_reload(folder, file, tokens, logits)
    n_bytes = sum(f.stat().st_size for f in folder.iterdir())
    print(
        f"{name:15} {n_tokens} tokens, {n_bytes / 1e3:4.0f} kB, logits {logits.std():.2f} std, "
        f"f32 against f64 {rounding:.1e}, least change noticed {least:.1e} ({parameter})"
    )


def check_reload(folder, file, tokens, logits):
    settings = json.loads((folder / file).read_text())
    config = CASES[folder.name][0].from_dict(settings)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    model = auto_class(config).from_pretrained(folder, config=config, dtype=torch.float32).eval()
    moved = difference(logits_of(model, tokens), logits)
    assert moved < 1e-6, f"{folder.name}: reloaded with {file} the logits differ by {moved:.1e}"


def main():
    torch.set_num_threads(1)
    here = pathlib.Path(__file__).resolve().parent.parent
    out = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else here / "crates/refrain-models/tests/goldens"
    for seed, name in enumerate(CASES):
        if len(sys.argv) > 2 and name not in sys.argv[2:]:
            continue
        write_case(out, name, 100 * seed)


if __name__ == "__main__":
    main()
