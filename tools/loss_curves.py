"""Loss curves of `refrain train` and of PyTorch from the same weights over the same batches, as an SVG.

    python3 tools/loss_curves.py REFRAIN TEXT FOLDER [SVG]      (default: docs/loss-curves.svg)

REFRAIN is the binary, TEXT the training text, FOLDER a place for two runs. Needs torch, transformers, tokenizers and
safetensors. On two cores of a CPU it takes a few minutes. Both train a llama of 0.4 million weights in F32: AdamW,
clipping, warm-up and cosine decay, samples in the order of the file.
"""

import json
import math
import pathlib
import subprocess
import sys

import tokenizers
import torch
import transformers

NEW = '{ arch = "llama", n_layers = 3, hidden = 96, ffn = 256, n_heads = 4, tied_embeddings = false }'
CONTEXT, BATCH, STEPS = 64, 8, 300
LR, WARMUP, BETAS, EPS, DECAY, CLIP = 2e-3, 20, (0.9, 0.95), 1e-8, 0.1, 1.0


def refrain(binary, text, folder):
    """The initial weights, by a step that is too small to change any, and the run from them."""
    shared = ["--data", text, "--context", CONTEXT, "--batch", BATCH, "--order", "file", "--device", "cpu"]
    run = lambda *args: subprocess.run([binary, "train", *map(str, [*args, *shared])], check=True)
    first, second = folder / "initial", folder / "run"
    run("--new", NEW, "--tokenizer", "train:512", "--steps", 1, "--lr", 1e-30, "--export", "hf", "--out", first)
    adam = ["--lr", LR, "--warmup", WARMUP, "--weight-decay", DECAY, "--eps", EPS, "--clip", CLIP]
    run("--from", first / "model", "--steps", STEPS, *adam, "--export", "none", "--out", second)
    lines = [json.loads(line) for line in (second / "log.jsonl").read_text().splitlines()]
    return first / "model", [line["loss"] for line in lines], [line["grad_norm"] for line in lines]


def rate(step):
    if step < WARMUP:
        return LR * (step + 1) / (WARMUP + 1)
    return LR * 0.5 * (1.0 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP)))


def pytorch(model, text):
    tokenizer = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    tokens = torch.tensor(tokenizer.encode(pathlib.Path(text).read_text(), add_special_tokens=False).ids)
    network = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).train()
    matrices = [p for p in network.parameters() if p.dim() >= 2]
    vectors = [p for p in network.parameters() if p.dim() < 2]
    groups = [dict(params=matrices, weight_decay=DECAY), dict(params=vectors, weight_decay=0.0)]
    adam = torch.optim.AdamW(groups, betas=BETAS, eps=EPS)
    n_samples = (len(tokens) - 1) // CONTEXT
    losses, norms = [], []
    for step in range(STEPS):
        rows = [(step * BATCH + i) % n_samples * CONTEXT for i in range(BATCH)]
        x = torch.stack([tokens[row : row + CONTEXT] for row in rows])
        y = torch.stack([tokens[row + 1 : row + CONTEXT + 1] for row in rows])
        logits = network(input_ids=x, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
        adam.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(network.parameters(), CLIP).item())
        for group in adam.param_groups:
            group["lr"] = rate(step)
        adam.step()
        losses.append(loss.item())
    return losses, norms


def svg(ours, theirs):
    width, height, left, top, bottom = 760, 320, 52, 30, 34
    low, high = math.floor(2 * min(ours + theirs)) / 2, math.ceil(2 * max(ours + theirs)) / 2
    x = lambda step: left + step * (width - left - 16) / (STEPS - 1)
    y = lambda loss: top + (high - loss) * (height - top - bottom) / (high - low)
    line = lambda losses: " ".join(f"{x(i):.1f},{y(loss):.1f}" for i, loss in enumerate(losses))
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for i in range(int(2 * (high - low)) + 1):
        at = low + i / 2
        out.append(f'<path d="M{left} {y(at):.1f}H{width - 16}" stroke="#e3e3e3"/>')
        out.append(f'<text x="{left - 8}" y="{y(at) + 4:.1f}" text-anchor="end" fill="#555555">{at:.1f}</text>')
    for step in range(0, STEPS + 1, 50):
        place = x(min(step, STEPS - 1))
        out.append(f'<text x="{place:.1f}" y="{height - 12}" text-anchor="middle" fill="#555555">{step}</text>')
    out.append(f'<polyline points="{line(theirs)}" fill="none" stroke="#e08214" stroke-width="4" opacity="0.55"/>')
    out.append(f'<polyline points="{line(ours)}" fill="none" stroke="#1f5fa8" stroke-width="1.4"/>')
    apart = max(abs(a - b) / b for a, b in zip(ours, theirs))
    for at, colour, text in [(left + 8, "#1f5fa8", "Refrain"), (left + 76, "#e08214", "PyTorch")]:
        out.append(f'<text x="{at}" y="20" fill="{colour}" font-weight="bold">{text}</text>')
    note = f"loss of {STEPS} steps; never more than {100 * apart:.2g} % apart"
    out.append(f'<text x="{width - 16}" y="20" text-anchor="end" fill="#555555">{note}</text>')
    return "\n".join(out + ["</svg>"]) + "\n", apart


def main():
    binary, text, folder = sys.argv[1:4]
    to = pathlib.Path(sys.argv[4] if len(sys.argv) > 4 else "docs/loss-curves.svg")
    torch.set_num_threads(1)
    model, ours, norms = refrain(binary, text, pathlib.Path(folder))
    theirs, their_norms = pytorch(model, text)
    picture, apart = svg(ours, theirs)
    to.write_text(picture)
    norms_apart = max(abs(a - b) / b for a, b in zip(norms, their_norms))
    print(f"losses of the last step {ours[-1]:.4f} and {theirs[-1]:.4f}")
    print(f"at most {apart:.2e} apart, norms {norms_apart:.2e}")


main()
