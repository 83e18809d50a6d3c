"""The built-in model: a small llama in PyTorch, with the tensor names of transformers' LlamaForCausalLM."""

from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class Shape:
    # Every row length is a multiple of 256, so that the file can be requantised to any GGUF type.
    vocab: int = 4096
    hidden: int = 256
    ffn: int = 768
    n_layers: int = 8
    n_heads: int = 4
    n_kv_heads: int = 2
    head_dim: int = 64
    context: int = 512
    rope_base: float = 10_000.0
    eps: float = 1e-5


def rotate(x, cos, sin):
    one, two = x.chunk(2, -1)
    return torch.cat([one * cos - two * sin, two * cos + one * sin], -1)


class Layer(nn.Module):
    def __init__(self, s):
        super().__init__()
        self.s = s
        self.input_layernorm = nn.Parameter(torch.ones(s.hidden))
        self.post_attention_layernorm = nn.Parameter(torch.ones(s.hidden))

        def matrix(n_out, n_in, std=0.02):
            return nn.Parameter(torch.randn(n_out, n_in) * std)

        out_std = 0.02 / (2 * s.n_layers) ** 0.5
        self.q_proj = matrix(s.n_heads * s.head_dim, s.hidden)
        self.k_proj = matrix(s.n_kv_heads * s.head_dim, s.hidden)
        self.v_proj = matrix(s.n_kv_heads * s.head_dim, s.hidden)
        self.o_proj = matrix(s.hidden, s.n_heads * s.head_dim, out_std)
        self.gate_proj, self.up_proj = matrix(s.ffn, s.hidden), matrix(s.ffn, s.hidden)
        self.down_proj = matrix(s.hidden, s.ffn, out_std)

    def forward(self, x, cos, sin):
        s, (b, t, _) = self.s, x.shape

        def product(y, w):
            return F.linear(y, w.to(y.dtype))

        def norm(y, w):
            return F.rms_norm(y.float(), (s.hidden,), w, s.eps).to(y.dtype)

        y = norm(x, self.input_layernorm)
        q = rotate(product(y, self.q_proj).view(b, t, s.n_heads, s.head_dim).transpose(1, 2), cos, sin)
        k = rotate(product(y, self.k_proj).view(b, t, s.n_kv_heads, s.head_dim).transpose(1, 2), cos, sin)
        v = product(y, self.v_proj).view(b, t, s.n_kv_heads, s.head_dim).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + product(y.transpose(1, 2).reshape(b, t, -1), self.o_proj)
        y = norm(x, self.post_attention_layernorm)
        return x + product(F.silu(product(y, self.gate_proj)) * product(y, self.up_proj), self.down_proj)


class Llama(nn.Module):
    def __init__(self, s, dtype):
        super().__init__()
        self.s, self.dtype = s, dtype
        self.embed_tokens = nn.Parameter(torch.randn(s.vocab, s.hidden) * 0.02)
        self.layers = nn.ModuleList(Layer(s) for _ in range(s.n_layers))
        self.norm = nn.Parameter(torch.ones(s.hidden))
        inverse = s.rope_base ** -(torch.arange(0, s.head_dim, 2).float() / s.head_dim)
        angles = torch.outer(torch.arange(s.context).float(), inverse)
        self.register_buffer("cos", angles.cos().to(dtype), persistent=False)
        self.register_buffer("sin", angles.sin().to(dtype), persistent=False)

    def forward(self, tokens):
        x = F.embedding(tokens, self.embed_tokens).to(self.dtype)
        t = tokens.shape[1]
        for layer in self.layers:
            x = layer(x, self.cos[:t], self.sin[:t])
        x = F.rms_norm(x.float(), (self.s.hidden,), self.norm, self.s.eps).to(self.dtype)
        return F.linear(x, self.embed_tokens.to(self.dtype))

    def loss(self, tokens, targets):
        return F.cross_entropy(self(tokens).float().flatten(0, 1), targets.flatten())
