"""SmolLM2 as a batched story generator: weights and tokenizer from its GGUF file, one decode step for all rows.

On a GPU, the step is two Triton kernels and four matrix products per layer and runs as one CUDA graph. Elsewhere, plain
functions replace the kernels; they also serve as the reference for the kernels.
"""

import re

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from gguf_io import Reader

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None


def tokenizer_of(reader):
    tokens = reader.meta["tokenizer.ggml.tokens"]
    merges = [tuple(m.split(" ")) for m in reader.meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = reader.meta["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t, kind in zip(tokens, kinds) if kind == 3])
    return tokenizer


def byte_alphabet():
    """Maps the printable characters of byte-level BPE to bytes."""
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in own]
    return {chr(b): b for b in own} | {chr(256 + i): b for i, b in enumerate(others)}


def story_tokens(tokenizer, n_common):
    """Ids a story may use: plain words and punctuation among the `n_common` first, most frequent merges, and the end."""
    plain = re.compile(r""" ?[A-Za-z]?[a-z]*|'[a-z]+| ?["']|[.,!?]["']?""")
    ids = [i for i in range(n_common) if (text := tokenizer.decode([i])) and text != " " and plain.fullmatch(text)]
    return ids[: len(ids) // 64 * 64 - 1] + [tokenizer.token_to_id("<|im_end|>")]


class SmolLM:
    def __init__(self, reader, device, dtype):
        meta, self.device, self.dtype = reader.meta, device, dtype
        self.n_layers, self.hidden = meta["llama.block_count"], meta["llama.embedding_length"]
        self.n_heads, self.n_kv_heads = meta["llama.attention.head_count"], meta["llama.attention.head_count_kv"]
        self.head_dim = self.hidden // self.n_heads
        self.eps = meta["llama.attention.layer_norm_rms_epsilon"]

        def load(name):
            return torch.from_numpy(reader.tensor(name)).to(device=device, dtype=dtype)

        def unpermute(w, n_heads):
            # llama GGUFs rotate neighbouring rows together; here, as in transformers, rows of the two halves are.
            return w.view(n_heads, self.head_dim // 2, 2, -1).transpose(1, 2).reshape(w.shape)

        self.embedding, self.norm = load("token_embd.weight"), load("output_norm.weight")
        self.layers = []
        for i in range(self.n_layers):
            at = {k: load(f"blk.{i}.{k}.weight") for k in "attn_norm attn_output ffn_norm ffn_down attn_v".split()}
            q = unpermute(load(f"blk.{i}.attn_q.weight"), self.n_heads)
            k = unpermute(load(f"blk.{i}.attn_k.weight"), self.n_kv_heads)
            at["qkv"] = torch.cat([q, k, at.pop("attn_v")]).t().contiguous()
            at["gate_up"] = torch.cat([load(f"blk.{i}.ffn_gate.weight"), load(f"blk.{i}.ffn_up.weight")]).t().contiguous()
            at["attn_output"], at["ffn_down"] = at["attn_output"].t().contiguous(), at["ffn_down"].t().contiguous()
            self.layers.append(at)
        base = meta["llama.rope.freq_base"]
        self.inverse = base ** -(torch.arange(0, self.head_dim, 2, device=device, dtype=torch.float32) / self.head_dim)

    def cache(self, batch, length):
        shape = (self.n_layers, 2, batch, self.n_kv_heads, length, self.head_dim)
        angles = torch.outer(torch.arange(length, device=self.device, dtype=torch.float32), self.inverse)
        self.cos, self.sin = angles.cos(), angles.sin()
        self.kv = torch.zeros(shape, device=self.device, dtype=self.dtype)

    def hidden_of(self, tokens, positions):
        """One step for all rows: token [B] at position [B]; appends keys and values to the cache."""
        attend = attend_kernel if self.device == "cuda" else attend_plain
        silu_mul = silu_mul_kernel if self.device == "cuda" else silu_mul_plain
        x = F.embedding(tokens, self.embedding)
        for layer, kv in zip(self.layers, self.kv):
            qkv = F.rms_norm(x, (self.hidden,), layer["attn_norm"], self.eps) @ layer["qkv"]
            x.addmm_(attend(self, qkv, kv, positions), layer["attn_output"])
            gate_up = F.rms_norm(x, (self.hidden,), layer["ffn_norm"], self.eps) @ layer["gate_up"]
            x.addmm_(silu_mul(gate_up), layer["ffn_down"])
        return F.rms_norm(x, (self.hidden,), self.norm, self.eps)


def silu_mul_plain(gate_up):
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def attend_plain(m, qkv, kv, positions):
    b, length = qkv.shape[0], kv.shape[3]
    q, k, v = qkv.view(b, -1, m.head_dim).split([m.n_heads, m.n_kv_heads, m.n_kv_heads], 1)
    cos, sin = m.cos[positions][:, None], m.sin[positions][:, None]

    def rotate(t):
        one, two = t.float().chunk(2, -1)
        return torch.cat([one * cos - two * sin, two * cos + one * sin], -1).to(t.dtype)

    rows = torch.arange(b, device=qkv.device)
    kv[0][rows, :, positions] = rotate(k)
    kv[1][rows, :, positions] = v
    q = rotate(q).reshape(b, m.n_kv_heads, -1, m.head_dim)
    seen = torch.arange(length, device=qkv.device)[None] <= positions[:, None]
    return F.scaled_dot_product_attention(q, kv[0], kv[1], attn_mask=seen[:, None, None]).reshape(b, -1)


if triton:

    @triton.jit
    def rope_store(qkv, k_cache, v_cache, cos, sin, positions, stride_b, length,
                   N_HEADS: tl.constexpr, N_KV: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr):
        """Rotates q in place, and stores the rotated k and the v of one batch row at its position."""
        b = tl.program_id(0)
        position = tl.load(positions + b)
        half = tl.arange(0, D // 2)
        c = tl.load(cos + position * (D // 2) + half)[None, :]
        s = tl.load(sin + position * (D // 2) + half)[None, :]
        head = tl.arange(0, ROWS)[:, None]
        at = qkv + b.to(tl.int64) * stride_b + head * D + half[None, :]
        live = head < N_HEADS + 2 * N_KV
        one = tl.load(at, mask=live, other=0.0)
        two = tl.load(at + D // 2, mask=live, other=0.0)
        f1 = one.to(tl.float32)
        f2 = two.to(tl.float32)
        r1 = (f1 * c - f2 * s).to(one.dtype)
        r2 = (f2 * c + f1 * s).to(one.dtype)
        is_q = head < N_HEADS
        tl.store(at, r1, mask=is_q)
        tl.store(at + D // 2, r2, mask=is_q)
        is_k = (head >= N_HEADS) & (head < N_HEADS + N_KV)
        is_v = (head >= N_HEADS + N_KV) & live
        row = b.to(tl.int64) * N_KV * length * D + position * D
        k_at = k_cache + row + (head - N_HEADS) * length * D + half[None, :]
        v_at = v_cache + row + (head - N_HEADS - N_KV) * length * D + half[None, :]
        tl.store(k_at, r1, mask=is_k)
        tl.store(k_at + D // 2, r2, mask=is_k)
        tl.store(v_at, one, mask=is_v)
        tl.store(v_at + D // 2, two, mask=is_v)

    @triton.jit
    def attend_rows(qkv, k_cache, v_cache, out, positions, stride_b, length, scale,
                    N_HEADS: tl.constexpr, N_KV: tl.constexpr, D: tl.constexpr, STEP: tl.constexpr):
        """Attention of the query heads that share one kv head, over the positions a batch row has so far."""
        b, h = tl.program_id(0), tl.program_id(1)
        GROUP: tl.constexpr = N_HEADS // N_KV
        n = tl.load(positions + b) + 1
        r, d = tl.arange(0, 16), tl.arange(0, D)
        q_at = (h * GROUP + r[:, None]) * D + d[None, :]
        q = tl.load(qkv + b.to(tl.int64) * stride_b + q_at, mask=r[:, None] < GROUP, other=0.0)
        base = (b.to(tl.int64) * N_KV + h) * length * D
        best = tl.full([16], float("-inf"), tl.float32)
        total = tl.zeros([16], tl.float32)
        acc = tl.zeros([16, D], tl.float32)
        for start in range(0, n, STEP):
            t = start + tl.arange(0, STEP)
            at = base + t[:, None] * D + d[None, :]
            k = tl.load(k_cache + at, mask=t[:, None] < n, other=0.0)
            v = tl.load(v_cache + at, mask=t[:, None] < n, other=0.0)
            scores = tl.dot(q, tl.trans(k)) * scale
            scores = tl.where(t[None, :] < n, scores, float("-inf"))
            new_best = tl.maximum(best, tl.max(scores, 1))
            p = tl.exp(scores - new_best[:, None])
            shrink = tl.exp(best - new_best)
            total = total * shrink + tl.sum(p, 1)
            acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v)
            best = new_best
        result = (acc / total[:, None]).to(q.dtype)
        tl.store(out + b.to(tl.int64) * N_HEADS * D + q_at, result, mask=r[:, None] < GROUP)

    @triton.jit
    def silu_mul_rows(gate_up, out, N: tl.constexpr, BLOCK: tl.constexpr):
        b = tl.program_id(0).to(tl.int64)
        at = tl.arange(0, BLOCK)
        gate = tl.load(gate_up + b * 2 * N + at, mask=at < N, other=0.0).to(tl.float32)
        up = tl.load(gate_up + b * 2 * N + N + at, mask=at < N, other=0.0).to(tl.float32)
        value = gate / (1 + tl.exp(-gate)) * up
        tl.store(out + b * N + at, value.to(out.dtype.element_ty), mask=at < N)


def attend_kernel(m, qkv, kv, positions):
    b, length = qkv.shape[0], kv.shape[3]
    out = torch.empty(b, m.hidden, device=qkv.device, dtype=qkv.dtype)
    sizes = dict(N_HEADS=m.n_heads, N_KV=m.n_kv_heads, D=m.head_dim)
    rope_store[(b,)](qkv, kv[0], kv[1], m.cos, m.sin, positions, qkv.stride(0), length, ROWS=16, num_warps=2, **sizes)
    attend_rows[(b, m.n_kv_heads)](
        qkv, kv[0], kv[1], out, positions, qkv.stride(0), length, m.head_dim**-0.5, STEP=64, num_warps=2, **sizes
    )
    return out


def silu_mul_kernel(gate_up):
    b, n = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(b, n, device=gate_up.device, dtype=gate_up.dtype)
    silu_mul_rows[(b,)](gate_up, out, N=n, BLOCK=triton.next_power_of_2(n), num_warps=4)
    return out


def check_kernels(m):
    """Compares the kernels with the plain functions, on random rows at random positions."""
    torch.manual_seed(0)
    b, length = 8, 160
    m.cache(b, length)
    m.kv[0].normal_()
    positions = torch.randint(0, length, (b,), device=m.device)
    positions[:2] = torch.tensor([0, length - 1])
    qkv = torch.randn(b, m.hidden + 2 * m.n_kv_heads * m.head_dim, device=m.device).to(m.dtype)
    plain_kv, kernel_kv = m.kv[0].clone(), m.kv[0].clone()
    plain = attend_plain(m, qkv.clone(), plain_kv, positions).float()
    kernel = attend_kernel(m, qkv.clone(), kernel_kv, positions).float()
    off = ((plain - kernel).norm() / plain.norm()).item()
    cache_off = (plain_kv.float() - kernel_kv.float()).abs().max().item()
    gate_up = torch.randn(b, 2 * 1536, device=m.device).to(m.dtype)
    silu_off = (silu_mul_plain(gate_up).float() - silu_mul_kernel(gate_up).float()).abs().max().item()
    print(f"kernels against plain functions: attention {off:.1e}, cache {cache_off:.1e}, silu {silu_off:.1e}", flush=True)
    assert off < 1e-2 and cache_off < 0.05 and silu_off < 0.1


def load(path, device, dtype):
    reader = Reader(path)
    return SmolLM(reader, device, dtype), tokenizer_of(reader)
