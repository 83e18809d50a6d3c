"""Plots loss curves of `refrain train` and PyTorch from the same weights over the same batches, as an SVG.

    python3 tools/loss_curves.py REFRAIN TEXT FOLDER [SVG]      (default: docs/loss-curves.svg)

REFRAIN is the binary, TEXT the training text, FOLDER an output folder for two runs. Needs torch, transformers, tokenizers and
safetensors. Takes a few minutes on two CPU cores. Both train a llama of 0.4 million weights in F32: AdamW,
clipping, warm-up and cosine decay, samples in file order. The last twentieth of the text is held out, and both measure
their loss on all of it after the same steps.
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
HELD_OUT, EVAL_EVERY = 0.05, 25
LR, WARMUP, BETAS, EPS, DECAY, CLIP = 2e-3, 20, (0.9, 0.95), 1e-8, 0.1, 1.0


def split(text, folder):
    """Splits the text at the end of a line into files for training and evaluation."""
    whole = pathlib.Path(text).read_text()
    at = whole.index("\n", int((1 - HELD_OUT) * len(whole))) + 1
    folder.mkdir(parents=True, exist_ok=True)
    paths = folder / "train.txt", folder / "heldout.txt"
    for path, part in zip(paths, [whole[:at], whole[at:]]):
        path.write_text(part)
    return paths


def refrain(binary, text, held_out, folder):
    """Writes initial weights, with one step too small to change them, and trains from them."""
    shared = ["--data", text, "--context", CONTEXT, "--batch", BATCH, "--order", "file", "--device", "cpu"]
    run = lambda *args: subprocess.run([binary, "train", *map(str, [*args, *shared])], check=True)
    first, second = folder / "initial", folder / "run"
    run("--new", NEW, "--tokenizer", "train:512", "--steps", 1, "--lr", 1e-30, "--export", "hf", "--out", first)
    adam = ["--lr", LR, "--warmup", WARMUP, "--weight-decay", DECAY, "--eps", EPS, "--clip", CLIP]
    held = ["--eval", held_out, "--eval-every", EVAL_EVERY]
    run("--from", first / "model", "--steps", STEPS, *adam, *held, "--export", "none", "--out", second)
    lines = [json.loads(line) for line in (second / "log.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    evals = {line["step"]: line["eval_loss"] for line in lines if "eval_loss" in line}
    return first / "model", [line["loss"] for line in steps], [line["grad_norm"] for line in steps], evals


def rate(step):
    if step < WARMUP:
        return LR * (step + 1) / (WARMUP + 1)
    return LR * 0.5 * (1.0 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP)))


@torch.inference_mode()
def held_out_loss(network, tokens):
    """Mean loss over all complete rows."""
    n_rows = (len(tokens) - 1) // CONTEXT
    x, y = tokens[: n_rows * CONTEXT].view(n_rows, CONTEXT), tokens[1 : n_rows * CONTEXT + 1].view(n_rows, CONTEXT)
    total = 0.0
    for i in range(0, n_rows, BATCH):
        logits = network(input_ids=x[i : i + BATCH], use_cache=False).logits
        total += torch.nn.functional.cross_entropy(logits.flatten(0, 1), y[i : i + BATCH].flatten(), reduction="sum").item()
    return total / y.numel()


def pytorch(model, text, held_out):
    tokenizer = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    encode = lambda path: torch.tensor(tokenizer.encode(path.read_text(), add_special_tokens=False).ids)
    tokens, held_out = encode(text), encode(held_out)
    network = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).train()
    matrices = [p for p in network.parameters() if p.dim() >= 2]
    vectors = [p for p in network.parameters() if p.dim() < 2]
    groups = [dict(params=matrices, weight_decay=DECAY), dict(params=vectors, weight_decay=0.0)]
    adam = torch.optim.AdamW(groups, betas=BETAS, eps=EPS)
    n_samples = (len(tokens) - 1) // CONTEXT
    losses, norms, evals = [], [], {}
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
        if (step + 1) % EVAL_EVERY == 0:
            evals[step] = held_out_loss(network, held_out)
    return losses, norms, evals


def largest_difference(ours, theirs):
    return max(abs(a - b) / b for a, b in zip(ours, theirs, strict=True))


def svg(ours, theirs, our_evals, their_evals):
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
    for evals, colour, radius in [(their_evals, "#e08214", 5), (our_evals, "#1f5fa8", 2.5)]:
        for step, loss in evals.items():
            out.append(f'<circle cx="{x(step):.1f}" cy="{y(loss):.1f}" r="{radius}" fill="{colour}"/>')
    for at, colour, text in [(left + 8, "#1f5fa8", "Refrain"), (left + 76, "#e08214", "PyTorch")]:
        out.append(f'<text x="{at}" y="20" fill="{colour}" font-weight="bold">{text}</text>')
    apart, evals_apart = largest_difference(ours, theirs), largest_difference(our_evals.values(), their_evals.values())
    note = f"lines: training loss, differs by at most {100 * apart:.2g} %; dots: held-out loss, at most {100 * evals_apart:.2g} %"
    out.append(f'<text x="{width - 16}" y="20" text-anchor="end" fill="#555555">{note}</text>')
    return "\n".join(out + ["</svg>"]) + "\n"


def main():
    binary, text, folder = sys.argv[1:4]
    to = pathlib.Path(sys.argv[4] if len(sys.argv) > 4 else "docs/loss-curves.svg")
    torch.set_num_threads(1)
    train_text, held_out = split(text, pathlib.Path(folder))
    model, ours, norms, evals = refrain(binary, train_text, held_out, pathlib.Path(folder))
    theirs, their_norms, their_evals = pytorch(model, train_text, held_out)
    assert evals.keys() == their_evals.keys()
    to.write_text(svg(ours, theirs, evals, their_evals))
    for step, loss in evals.items():
        print(f"held-out loss after step {step + 1}: {loss:.4f} and {their_evals[step]:.4f}")
    print(f"loss of the last step {ours[-1]:.4f} and {theirs[-1]:.4f}")
    apart = [largest_difference(ours, theirs), largest_difference(norms, their_norms), largest_difference(evals.values(), their_evals.values())]
    print("largest relative difference: losses {:.2e}, norms {:.2e}, held-out losses {:.2e}".format(*apart))


main()
