"""Times training steps of a small llama in eager PyTorch, to compare with `cargo bench -p refrain-cpu --bench train`.

    python3 tools/bench_train_torch.py [--device cpu] [--dtype f32|bf16] [--steps 3] [--threads N] [--rows 8192]

Vocabulary 8192, hidden size 320, 6 layers, 5 heads of 64, feed-forward size 896, sequences of 256 tokens: RMSNorm, rotary
positions, SwiGLU, causal attention, a tied head, clipping and AdamW. Prints wall time and CPU
time of each step in ms. With one thread, CPU time is the better measure on a busy machine.
"""

import argparse
import time

import torch
import torch.nn.functional as F
from torch import nn

VOCAB, HIDDEN, LAYERS, HEADS, FFN, CONTEXT = 8192, 320, 6, 5, 896, 256


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)])
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.gate_up = nn.Linear(HIDDEN, 2 * FFN, bias=False)
        self.down = nn.Linear(FFN, HIDDEN, bias=False)

    def forward(self, x, cos, sin):
        batch, context, _ = x.shape
        heads = self.qkv(self.norms[0](x)).view(batch, context, 3, HEADS, HIDDEN // HEADS)
        q, k, v = heads.unbind(2)

        def turn(t):
            a, b = t.chunk(2, -1)
            return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

        q, k, v = (t.transpose(1, 2) for t in (turn(q), turn(k), v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, context, HIDDEN))
        gate, up = self.gate_up(self.norms[1](x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(HIDDEN)
        dim = HIDDEN // HEADS
        angles = torch.outer(torch.arange(CONTEXT).float(), 10000 ** (-torch.arange(0, dim, 2).float() / dim))
        self.register_buffer("cos", angles.cos()[None, :, None])
        self.register_buffer("sin", angles.sin()[None, :, None])

    def forward(self, tokens, targets):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = F.linear(self.norm(x), self.embedding.weight)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=["f32", "bf16"], default="f32")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rows", type=int, default=8192)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    dtype = torch.float32 if args.dtype == "f32" else torch.bfloat16
    model = Llama().to(args.device, dtype)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1)
    shape = (args.rows // CONTEXT, CONTEXT)
    tokens, targets = (torch.randint(0, VOCAB, shape, device=args.device) for _ in range(2))
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {args.dtype}, {args.rows} rows")
    for step in range(args.steps):
        start, ran = time.perf_counter(), time.process_time()
        loss = model(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        # Reading the loss synchronizes with the device.
        value = loss.item()
        took, ran = time.perf_counter() - start, time.process_time() - ran
        print(f"step {step}: {took * 1e3:.1f} ms ({ran * 1e3:.0f} of CPU), loss {value:.4f}", flush=True)


if __name__ == "__main__":
    main()
