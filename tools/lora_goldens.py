"""Writes reference losses, gradients and logits of LoRA, computed with PyTorch and peft, for the tests of refrain-models.

    python3 tools/lora_goldens.py [GOLDENS [CASE ..]]  (default: crates/refrain-models/tests/goldens)
    python3 tools/lora_goldens.py --check ADAPTER BASE MERGED
                                                       compares an adapter that Refrain trained on the folder BASE, as
                                                       read by peft, with the output of `refrain merge`

Needs torch, transformers, peft, gguf and safetensors; the versions used are in each file's metadata. Runs on the CPU in
a minute. Batch, optimiser and schedule are those of tools/train_goldens.py. Files for each base:

    lora/adapter_config.json, lora/adapter_model.safetensors      as saved by peft; B is not zero, so that A has a gradient
    lora/train.safetensors    tokens, targets, positions, documents int64 [n]
                              f32.losses [10], bf16.losses [10], f32.norms [10]
                              f32.grad.NAME: the gradient of each A and B in the first step, bf16.grad.NAME for quantised bases
                              f32.logits [10, vocab]: of the first document, with the adapter
                              base.logits [10, vocab]: without it

Values named f32 are computed in f64, so that only the rounding of the tested code shows. Bases are the goldens of
tools/goldens.py, and quantised models made here: random blocks in a GGUF file, decoded for PyTorch by the `gguf` package.
"""

import pathlib
import shutil
import sys
import tempfile

import gguf
import numpy as np
import peft
import torch
import transformers
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file, save_file
from train_goldens import CLIP, STEPS, batch, loss_of, optimiser, rate

BASES = ["llama", "qwen3", "gemma3", "phi3-short"]
MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# Several projections stored as one tensor, with one adapter.
FUSED_MODULES = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
RANK, ALPHA = 4, 6


def blocks(kind, n_out, n_in, generator):
    """Random blocks with a typical spread, and their decoded values."""
    block_len, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    n = n_out * n_in // block_len
    raw = generator.integers(0, 256, (n, block_bytes), dtype=np.uint8)
    scale = lambda at, value: raw.__setitem__((slice(None), slice(at, at + 2)), np.full(n, value, np.float16).view(np.uint8).reshape(n, 2))
    if kind == Type.Q8_0:
        scale(0, 0.1 / 74)
    elif kind == Type.Q4_K:
        scale(0, 2e-4)
        scale(2, 2e-4 * 7.5)
    elif kind == Type.Q6_K:
        scale(208, 2e-5)
    raw = raw.reshape(n_out, -1)
    return raw, torch.from_numpy(gguf.quants.dequantize(raw, kind).astype(np.float32))


def parted(values, n_heads):
    """Reorders rows of a llama GGUF file as in Hugging Face folders."""
    n_rows = values.shape[0]
    return values.reshape(n_heads, n_rows // n_heads // 2, 2, -1).transpose(1, 2).reshape(values.shape)


def quantised(folder, name, hidden, usual, finer):
    """A llama with quantised weights: the GGUF file, and the same weights for PyTorch."""
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=hidden, intermediate_size=hidden, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=hidden // 4, max_position_embeddings=256, rms_norm_eps=1e-3,
        tie_word_embeddings=False, bos_token_id=1, eos_token_id=2,
    )
    config._attn_implementation = "eager"
    folder.mkdir(exist_ok=True)
    writer = gguf.GGUFWriter(str(folder / "model.gguf"), "llama")
    writer.add_name(name)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(config.vocab_size)
    random = np.random.default_rng(11)
    weights = {}

    def matrix(gguf_name, hf_name, kind, n_out, n_in, n_heads=None):
        raw, values = blocks(kind, n_out, n_in, random)
        writer.add_tensor(gguf_name, raw, raw_dtype=kind)
        weights[hf_name] = parted(values, n_heads) if n_heads else values

    def norm(gguf_name, hf_name):
        values = random.uniform(0.5, 1.5, hidden).astype(np.float32)
        writer.add_tensor(gguf_name, values)
        weights[hf_name] = torch.from_numpy(values)

    matrix("token_embd.weight", "model.embed_tokens.weight", usual, config.vocab_size, hidden)
    matrix("output.weight", "lm_head.weight", finer, config.vocab_size, hidden)
    norm("output_norm.weight", "model.norm.weight")
    kv = hidden // 2
    shapes = {"attn_k": (kv, hidden), "attn_v": (kv, hidden)}
    for layer in range(config.num_hidden_layers):
        norm(f"blk.{layer}.attn_norm.weight", f"model.layers.{layer}.input_layernorm.weight")
        norm(f"blk.{layer}.ffn_norm.weight", f"model.layers.{layer}.post_attention_layernorm.weight")
        for hf, short in NAMES.items():
            kind = finer if short in ("attn_v", "ffn_down") else usual
            n_heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(short)
            n_out, n_in = shapes.get(short, (hidden, hidden))
            matrix(f"blk.{layer}.{short}.weight", f"model.layers.{layer}.{hf}.weight", kind, n_out, n_in, n_heads)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return config, weights


def build(config, weights):
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected and all(name == "lm_head.weight" for name in missing), (missing, unexpected)
    model.tie_weights()
    return model


def plain(name):
    return name.replace(".default", "")


def adapted(model, folder):
    """The model with an adapter whose A and B are random, saved by peft."""
    torch.manual_seed(3)
    modules = FUSED_MODULES if model.config.model_type == "phi3" else MODULES
    settings = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=modules, task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, settings)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.1)
    with tempfile.TemporaryDirectory() as out:
        model.peft_config["default"].base_model_name_or_path = "a golden model"
        model.save_pretrained(out)
        for file in ("adapter_config.json", "adapter_model.safetensors"):
            shutil.copy(pathlib.Path(out) / file, folder / file)
    return model


def logits(model, tokens):
    with torch.no_grad():
        return model(input_ids=tokens[None], use_cache=False).logits[0].float()


def train(model, dtype, out, keep_gradients):
    data = batch(model.config.vocab_size)
    model.train()
    trained = {name: p for name, p in model.named_parameters() if "lora_" in name}
    assert all(p.requires_grad == (name in trained) for name, p in model.named_parameters())
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    masters = {name: p.detach().clone().to(wide).requires_grad_() for name, p in trained.items()}
    model = model.to(dtype)
    trained = {name: p for name, p in model.named_parameters() if "lora_" in name}
    adam = optimiser(list(masters.values()))
    key = "bf16" if dtype == torch.bfloat16 else "f32"
    losses, norms = [], []
    for step in range(STEPS):
        for name, p in trained.items():
            p.data.copy_(masters[name].data.to(dtype))
            p.grad = None
        loss = loss_of(model, *data, dtype)
        loss.backward()
        for name, p in trained.items():
            masters[name].grad = p.grad.to(masters[name].dtype)
            if step == 0 and keep_gradients:
                out[f"{key}.grad.{plain(name)}"] = p.grad.float().clone()
        norms.append(torch.nn.utils.clip_grad_norm_(masters.values(), CLIP).item())
        for group in adam.param_groups:
            group["lr"] = rate(step)
        adam.step()
        losses.append(loss.item())
    out[f"{key}.losses"] = torch.tensor(losses)
    if key == "f32":
        out["f32.norms"] = torch.tensor(norms)
    return data


def write(folder, config, weights, is_quantised):
    (folder / "lora").mkdir(exist_ok=True)
    out = {}
    for dtype in (torch.float64, torch.bfloat16):
        model = build(config, weights)
        first = batch(config.vocab_size)[0][:10]
        base = logits(model.eval(), first)
        model = adapted(model, folder / "lora")
        if dtype == torch.float64:
            out |= {"base.logits": base, "f32.logits": logits(model.eval(), first)}
        tokens, targets, positions, documents = train(model, dtype, out, dtype == torch.float64 or is_quantised)
    out |= dict(tokens=tokens, targets=targets, positions=positions, documents=documents)
    made_with = {m.__name__: m.__version__ for m in (torch, transformers, peft)}
    save_file({k: v.contiguous() for k, v in out.items()}, folder / "lora" / "train.safetensors", metadata=made_with)
    print(folder.name, [round(x, 4) for x in out["f32.losses"].tolist()], out["f32.norms"][0].item())
    print("  bf16", [round(x, 4) for x in out["bf16.losses"].tolist()])


def check(adapter, base, merged):
    load = lambda folder: transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = torch.arange(3, 35)
    plain, want = logits(load(base), tokens), logits(load(merged), tokens)
    found = logits(peft.PeftModel.from_pretrained(load(base), adapter).eval(), tokens)
    largest = want.abs().max()
    off, moved = ((found - want).abs().max() / largest).item(), ((plain - want).abs().max() / largest).item()
    print(f"difference {off:.1e}; the adapter changes the logits by {moved:.1e}")
    assert off < 1e-4 < moved


def main():
    if sys.argv[1:2] == ["--check"]:
        return check(*sys.argv[2:5])
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "crates/refrain-models/tests/goldens")
    only = sys.argv[2:]
    for case in BASES:
        if only and case not in only:
            continue
        config = transformers.AutoConfig.from_pretrained(root / case)
        config._attn_implementation = "eager"
        write(root / case, config, load_file(root / case / "model.safetensors"), False)
    if only:
        return
    for name, hidden, usual, finer in (("q8_0", 64, Type.Q8_0, Type.Q8_0), ("q4_k_m", 256, Type.Q4_K, Type.Q6_K)):
        folder = root / f"llama-{name}"
        config, weights = quantised(folder, f"llama-{name}", hidden, usual, finer)
        write(folder, config, weights, True)


main()
