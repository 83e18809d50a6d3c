"""Writes the trained model as GGUF and proves that the file holds what was trained.

    python3 export.py WEIGHTS.safetensors TOKENIZER.json OUT.gguf [--samples N]

The file is read back with gguf_io and its logits, dequantised, are compared with those of the trained weights.
"""

import argparse
import json
import pathlib

import numpy as np
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

import gguf_io as g
from model import Llama, Shape

END = "<|endoftext|>"
LIMIT = 8_000_000
NORMAL, CONTROL = 1, 3
DESCRIPTION = (
    "A small llama that writes short, simple English stories. Trained from scratch on stories written by "
    "SmolLM2-135M-Instruct (Apache-2.0, Hugging Face) from prompts of hand-written word lists; the recipe is in "
    "tools/stories of the Refrain repository."
)
TENSORS = {
    "input_layernorm": ("attn_norm", g.F32),
    "q_proj": ("attn_q", g.Q8_0),
    "k_proj": ("attn_k", g.Q8_0),
    "v_proj": ("attn_v", g.Q8_0),
    "o_proj": ("attn_output", g.Q8_0),
    "post_attention_layernorm": ("ffn_norm", g.F32),
    "gate_proj": ("ffn_gate", g.Q8_0),
    "up_proj": ("ffn_up", g.Q8_0),
    "down_proj": ("ffn_down", g.Q8_0),
}


def permute(w, n_heads):
    """Halves to neighbours: llama GGUFs rotate rows 2i and 2i+1 together, the trained model i and i + head_dim / 2."""
    return w.reshape(n_heads, 2, -1, w.shape[1]).swapaxes(1, 2).reshape(w.shape)


def unpermute(w, n_heads):
    return w.reshape(n_heads, -1, 2, w.shape[1]).swapaxes(1, 2).reshape(w.shape)


def rotated(name, s):
    return {"q_proj": s.n_heads, "k_proj": s.n_kv_heads}.get(name)


def metadata(s, tokenizer, n_parameters):
    vocabulary = json.loads(tokenizer.to_str())["model"]
    tokens = [t for t, _ in sorted(vocabulary["vocab"].items(), key=lambda item: item[1])]
    merges = [m if isinstance(m, str) else " ".join(m) for m in vocabulary["merges"]]
    assert len(tokens) == s.vocab, f"{len(tokens)} tokens for a vocabulary of {s.vocab}"
    end = tokenizer.token_to_id(END)
    kinds = [CONTROL if i == end else NORMAL for i in range(s.vocab)]
    text, u32, f32, flag = g.STRING, g.UINT32, g.FLOAT32, g.BOOL
    return [
        ("general.architecture", text, "llama"),
        ("general.type", text, "model"),
        ("general.name", text, "Refrain Stories"),
        ("general.description", text, DESCRIPTION),
        ("general.size_label", text, f"{n_parameters / 1e6:.1f}M"),
        ("general.license", text, "apache-2.0"),
        ("general.languages", (g.ARRAY, text), ["en"]),
        ("general.quantization_version", u32, 2),
        ("general.file_type", u32, 7),
        ("llama.block_count", u32, s.n_layers),
        ("llama.context_length", u32, s.context),
        ("llama.embedding_length", u32, s.hidden),
        ("llama.feed_forward_length", u32, s.ffn),
        ("llama.attention.head_count", u32, s.n_heads),
        ("llama.attention.head_count_kv", u32, s.n_kv_heads),
        ("llama.attention.key_length", u32, s.head_dim),
        ("llama.attention.value_length", u32, s.head_dim),
        ("llama.attention.layer_norm_rms_epsilon", f32, s.eps),
        ("llama.rope.freq_base", f32, s.rope_base),
        ("llama.rope.dimension_count", u32, s.head_dim),
        ("llama.vocab_size", u32, s.vocab),
        ("tokenizer.ggml.model", text, "gpt2"),
        ("tokenizer.ggml.pre", text, "gpt-2"),
        ("tokenizer.ggml.tokens", (g.ARRAY, text), tokens),
        ("tokenizer.ggml.token_type", (g.ARRAY, g.INT32), kinds),
        ("tokenizer.ggml.merges", (g.ARRAY, text), merges),
        ("tokenizer.ggml.bos_token_id", u32, end),
        ("tokenizer.ggml.eos_token_id", u32, end),
        ("tokenizer.ggml.unknown_token_id", u32, end),
        ("tokenizer.ggml.add_bos_token", flag, True),
        ("tokenizer.ggml.add_eos_token", flag, False),
        ("tokenizer.ggml.add_space_prefix", flag, False),
    ]


def export(path, s, state, tokenizer):
    tensors = [("token_embd.weight", g.Q8_0, state["embed_tokens"])]
    for i in range(s.n_layers):
        for ours, (theirs, kind) in TENSORS.items():
            w = state[f"layers.{i}.{ours}"]
            if n_heads := rotated(ours, s):
                w = permute(w, n_heads)
            tensors.append((f"blk.{i}.{theirs}.weight", kind, w))
    tensors.append(("output_norm.weight", g.F32, state["norm"]))
    g.write(path, metadata(s, tokenizer, sum(w.size for *_, w in tensors)), tensors)


def read_back(path, s):
    reader = g.Reader(path)
    state = {"embed_tokens": reader.tensor("token_embd.weight"), "norm": reader.tensor("output_norm.weight")}
    for i in range(s.n_layers):
        for ours, (theirs, _) in TENSORS.items():
            w = reader.tensor(f"blk.{i}.{theirs}.weight")
            if n_heads := rotated(ours, s):
                w = unpermute(w, n_heads)
            state[f"layers.{i}.{ours}"] = w
    return state


def built(s, state):
    model = Llama(s, torch.float32)
    model.load_state_dict({k: torch.from_numpy(np.ascontiguousarray(v)) for k, v in state.items()})
    return model.eval()


@torch.no_grad()
def sample(model, tokenizer, prompt, n, seed, temperature=0.8, top_k=40, top_p=0.95, min_p=0.05):
    """Refrain's default sampling."""
    generator = torch.Generator().manual_seed(seed)
    end = tokenizer.token_to_id(END)
    ids = [end, *tokenizer.encode(prompt, add_special_tokens=False).ids]
    for _ in range(n):
        logits = model(torch.tensor([ids[-model.s.context :]]))[0, -1]
        values, order = logits.topk(top_k)
        p = (values / temperature).softmax(-1)
        p[(p.cumsum(-1) - p > top_p) | (p < min_p * p[0])] = 0
        token = int(order[torch.multinomial(p, 1, generator=generator)])
        if token == end:
            break
        ids.append(token)
    return tokenizer.decode(ids[1:])


def main():
    args = argparse.ArgumentParser()
    args.add_argument("weights")
    args.add_argument("tokenizer")
    args.add_argument("out", type=pathlib.Path)
    args.add_argument("--samples", type=int, default=4)
    a = args.parse_args()
    s, tokenizer = Shape(), Tokenizer.from_file(a.tokenizer)
    state = {k: v.numpy() for k, v in load_file(a.weights).items()}
    export(a.out, s, state, tokenizer)
    size = a.out.stat().st_size
    assert size <= LIMIT, f"{size} bytes, at most {LIMIT} are wanted"
    trained, quantised = built(s, state), built(s, read_back(a.out, s))
    text = "Once upon a time, there was a little girl named Lily. She loved to play in the garden with her dog."
    ids = torch.tensor([[tokenizer.token_to_id(END), *tokenizer.encode(text, add_special_tokens=False).ids]])
    with torch.no_grad():
        want, got = trained(ids), quantised(ids)
    off = ((want - got).norm() / want.norm()).item()
    print(f"{size} bytes; logits of the file against the trained ones: {off:.1e} relative")
    assert off < 0.02
    prompts = ["Once upon a time", "One day, Tom found a red kite.", "The little fox", "Once upon a time, there was a king"]
    for i in range(a.samples):
        print(f"--- {i}\n{sample(quantised, tokenizer, prompts[i % len(prompts)], 250, i)}", flush=True)


if __name__ == "__main__":
    main()
