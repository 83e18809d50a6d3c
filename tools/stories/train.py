"""Trains the built-in model on the corpus.

    python3 train.py CORPUS_DIR OUT.safetensors [--seconds 58 | --steps N] [--batch 128]

Windows of 512 tokens begin where a story begins, so that the model always sees a story from its first token. The speed
of the first steps decides how many steps fit into the time, unless --steps names their number; the learning rate
follows a cosine over them.
"""

import argparse
import json
import math
import pathlib
import time

import numpy as np
import torch
from safetensors.torch import save_file

from model import Llama, Shape

VALIDATION = 1_000_000  # tokens held out, from the end of the corpus


class Windows:
    def __init__(self, tokens, end, context, device):
        self.tokens = torch.from_numpy(tokens.astype(np.int16)).to(device)
        starts = np.flatnonzero(tokens == end)
        self.starts = torch.from_numpy(starts[starts + context + 1 < len(tokens)]).to(device)
        self.reach = torch.arange(context + 1, device=device)
        self.order, self.at = None, 0

    def next(self, batch):
        """A batch of windows in an order that visits every story once an epoch."""
        if self.order is None or self.at + batch > len(self.order):
            self.order = torch.randperm(len(self.starts), device=self.starts.device)
            self.at = 0
        chosen = self.starts[self.order[self.at : self.at + batch]]
        self.at += batch
        window = self.tokens[chosen[:, None] + self.reach].long()
        return window[:, :-1], window[:, 1:]


def rate(step, n_steps, peak, warmup):
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, n_steps - warmup)
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1, done))))


@torch.no_grad()
def validate(loss, windows, batch, n):
    return sum(loss(*windows.next(batch)).item() for _ in range(n)) / n


def main():
    args = argparse.ArgumentParser()
    args.add_argument("corpus", type=pathlib.Path)
    args.add_argument("out")
    args.add_argument("--seconds", type=float, default=58)
    args.add_argument("--steps", type=int)
    args.add_argument("--batch", type=int, default=128)
    args.add_argument("--rate", type=float, default=3e-3)
    args.add_argument("--decay", type=float, default=0.3)
    args.add_argument("--validation", type=int, default=VALIDATION)
    a = args.parse_args()
    began = time.perf_counter()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    cuda = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if cuda else ("cpu", torch.float32)
    s = Shape()
    tokens = np.load(a.corpus / "tokens.npy")
    end = int(tokens[0])
    train = Windows(tokens[: -a.validation], end, s.context, device)
    held_out = Windows(tokens[-a.validation :], end, s.context, device)
    model = Llama(s, dtype).to(device)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    norms = [p for p in model.parameters() if p.dim() == 1]
    groups = [dict(params=matrices, weight_decay=a.decay), dict(params=norms, weight_decay=0.0)]
    optimiser = torch.optim.AdamW(groups, lr=a.rate, betas=(0.9, 0.95), fused=cuda)
    loss_of = torch.compile(model.loss) if cuda else model.loss
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.3f} M parameters, {len(train.starts)} stories", flush=True)

    n_steps, step, measured = a.steps, 0, None
    while n_steps is None or step < n_steps:
        for group in optimiser.param_groups:
            group["lr"] = rate(step, n_steps or 1_000_000, a.rate, warmup=200)
        loss = loss_of(*train.next(a.batch))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        step += 1
        if step in (20, 120) or step % 500 == 0 or (not cuda and step % 5 == 0):
            now = loss.item()
            elapsed = time.perf_counter() - began
            if step == 20:
                measured = elapsed
                print(f"compiled and warm after {elapsed:.1f} s", flush=True)
            if step == 120 and not a.steps:
                per_step = (elapsed - measured) / 100
                n_steps = 120 + max(0, int((a.seconds - elapsed - 2) / per_step))
                print(f"{per_step * 1e3:.2f} ms a step, {a.batch * s.context / per_step / 1e6:.2f} M tokens/s, "
                      f"{n_steps} steps, {n_steps * a.batch / len(train.starts):.1f} windows per story", flush=True)
            print(f"step {step} loss {now:.4f} {elapsed:.1f} s", flush=True)
    final = dict(
        steps=n_steps,
        tokens_seen=n_steps * a.batch * s.context,
        train_loss=validate(loss_of, train, a.batch, 8),
        validation_loss=validate(loss_of, held_out, a.batch, 8),
        seconds=time.perf_counter() - began,
    )
    print(json.dumps(final), flush=True)
    weights = {k: v.float().cpu().contiguous() for k, v in model.state_dict().items()}
    save_file(weights, a.out, metadata=dict(final=json.dumps(final)))


if __name__ == "__main__":
    main()
