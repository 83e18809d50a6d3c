"""Reference losses and gradients of the network in crates/refrain/examples/crossasset, from PyTorch.

    python3 tools/crossasset_goldens.py [FILE]      (default: crates/refrain/tests/crossasset.safetensors)

Needs torch and safetensors; the file's metadata has the version. Runs on the CPU in seconds. The file holds

    data f32 [samples, sources * features], ids, targets int64 [batch] (-1: padding)
    value.NAME: the parameters before the first step
    grad.NAME: their gradients in the first step
    f32.losses, f32.norms [10], bf16.losses [10]: AdamW with clipping, with a decreasing learning rate
    last.NAME: the parameters after the tenth step, in F32

In bf16, the optimiser updates f32 master weights and the network uses bf16 copies of them.
"""

import json
import sys

import torch
from safetensors.torch import save_file

SIZES = dict(batch=7, n_sources=12, n_features=21, width=16, n_heads=2, ffn=24, n_layers=2, n_classes=3)
SAMPLES, STEPS = 10, 10
BETAS, EPS, DECAY, CLIP = (0.9, 0.95), 1e-8, 0.1, 1.0
NORM_EPS, SHARPNESS = 1e-6, 8.0


def rate(step):
    return 1e-2 * (1.0 - 0.05 * step)


def parameters(generator):
    s, w = SIZES, SIZES["width"]
    normal = lambda *dims: torch.randn(*dims, generator=generator) * dims[-1] ** -0.5
    near_one = lambda n: 1.0 + 0.1 * torch.randn(n, generator=generator)
    values = {"in": normal(w, s["n_features"]), "source": normal(s["n_sources"], w)}
    for layer in range(s["n_layers"]):
        values[f"{layer}.attn_norm"] = near_one(w)
        for name in "qkvo":
            values[f"{layer}.{name}"] = normal(w, w)
        values[f"{layer}.ffn_norm"] = near_one(w)
        values[f"{layer}.up"] = normal(s["ffn"], w)
        values[f"{layer}.down"] = normal(w, s["ffn"])
    values |= {"norm": near_one(w), "head": normal(s["n_classes"], w)}
    values["head_bias"] = 0.1 * torch.randn(s["n_classes"], generator=generator)
    return values


def rms_norm(x, w):
    y = x.float()
    return (y * torch.rsqrt((y * y).mean(-1, keepdim=True) + NORM_EPS) * w.float()).to(x.dtype)


def unit(x):
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + NORM_EPS)


def logits(p, x):
    """x [batch, sources, features]"""
    b, n, _ = x.shape
    heads = SIZES["n_heads"]
    x = x @ p["in"].T + p["source"]
    for layer in range(SIZES["n_layers"]):
        w = lambda name: p[f"{layer}.{name}"]
        y = rms_norm(x, w("attn_norm"))
        q, k, v = ((y @ w(name).T).view(b, n, heads, -1).transpose(1, 2) for name in "qkv")
        weights = torch.softmax(SHARPNESS * (unit(q) @ unit(k).transpose(-1, -2)).float(), -1).to(x.dtype)
        x = x + (weights @ v).transpose(1, 2).reshape(b, n, -1) @ w("o").T
        y = rms_norm(x, w("ffn_norm"))
        x = x + torch.nn.functional.gelu(y @ w("up").T, approximate="tanh") @ w("down").T
    return rms_norm(x.mean(1), p["norm"]) @ p["head"].T + p["head_bias"]


def train(values, x, targets, dtype, out):
    masters = {name: value.clone().requires_grad_() for name, value in values.items()}
    matrices = [p for p in masters.values() if p.dim() > 1]
    vectors = [p for p in masters.values() if p.dim() < 2]
    groups = [dict(params=matrices, weight_decay=DECAY), dict(params=vectors, weight_decay=0.0)]
    adam = torch.optim.AdamW(groups, lr=rate(0), betas=BETAS, eps=EPS)
    losses, norms = [], []
    for step in range(STEPS):
        copies = {name: p.detach().to(dtype).requires_grad_() for name, p in masters.items()}
        found = logits(copies, x.to(dtype)).float()
        loss = torch.nn.functional.cross_entropy(found, targets)
        loss.backward()
        for name, p in masters.items():
            p.grad = copies[name].grad.float()
        if step == 0 and dtype == torch.float32:
            out |= {f"grad.{name}": p.grad.clone() for name, p in masters.items()}
        norms.append(torch.nn.utils.clip_grad_norm_(masters.values(), CLIP).item())
        for group in adam.param_groups:
            group["lr"] = rate(step)
        adam.step()
        losses.append(loss.item())
    key = "f32" if dtype == torch.float32 else "bf16"
    out[f"{key}.losses"] = torch.tensor(losses)
    if dtype == torch.float32:
        out["f32.norms"] = torch.tensor(norms)
        out |= {f"last.{name}": p.detach().clone() for name, p in masters.items()}
    print(key, [round(loss, 4) for loss in losses])


def main():
    generator = torch.Generator().manual_seed(11)
    values = parameters(generator)
    data = torch.randn(SAMPLES, SIZES["n_sources"] * SIZES["n_features"], generator=generator)
    ids = torch.tensor([3, 0, 7, 9, 1, 4, -1])
    targets = torch.tensor([0, 2, 1, 1, 0, 2, -1])
    out = dict(data=data, ids=ids, targets=targets) | {f"value.{name}": value for name, value in values.items()}
    x = data[ids[:-1]].view(-1, SIZES["n_sources"], SIZES["n_features"])
    for dtype in (torch.float32, torch.bfloat16):
        train(values, x, targets[:-1], dtype, out)
    made_with = dict(torch=torch.__version__, sizes=json.dumps(SIZES))
    path = sys.argv[1] if len(sys.argv) > 1 else "crates/refrain/tests/crossasset.safetensors"
    save_file({name: value.contiguous() for name, value in out.items()}, path, metadata=made_with)


main()
