"""Measures how well story models predict held-out stories, in PyTorch from their GGUF files.

    python3 compare.py HELDOUT.txt MODEL.gguf... [--stories 4000]

Each story is scored by itself, from its first token to its end token. Vocabularies differ, so compare nats per word and
per byte.
"""

import argparse
import pathlib

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from gguf_io import Reader


class Llama:
    def __init__(self, path, device):
        reader = Reader(path)
        meta = {key.removeprefix("llama."): value for key, value in reader.meta.items()}
        self.n_layers, self.n_heads = meta["block_count"], meta["attention.head_count"]
        self.n_kv_heads, self.eps = meta["attention.head_count_kv"], meta["attention.layer_norm_rms_epsilon"]
        self.head_dim, self.theta = meta["rope.dimension_count"], meta["rope.freq_base"]
        self.w = {name: torch.from_numpy(reader.tensor(name)).to(device) for name in reader.tensors}
        self.w.setdefault("output.weight", self.w["token_embd.weight"])
        tokens = meta["tokenizer.ggml.tokens"]
        merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
        self.tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
        self.tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self.tokenizer.decoder = decoders.ByteLevel()
        self.begin, self.end = meta["tokenizer.ggml.bos_token_id"], meta["tokenizer.ggml.eos_token_id"]

    def norm(self, x, name):
        return F.rms_norm(x, x.shape[-1:], self.w[f"{name}.weight"], self.eps)

    def product(self, x, name):
        return F.linear(x, self.w[f"{name}.weight"])

    def heads(self, x, n_heads):
        return x.unflatten(-1, (n_heads, self.head_dim)).transpose(1, 2)

    def rotate(self, x):
        """Rope as in llama GGUFs, which rotate rows 2i and 2i + 1 together."""
        positions = torch.arange(x.shape[2], device=x.device, dtype=torch.float32)
        rates = self.theta ** -(torch.arange(0, self.head_dim, 2, device=x.device) / self.head_dim)
        angles = torch.outer(positions, rates)
        even, odd = x[..., 0::2], x[..., 1::2]
        rotated = [even * angles.cos() - odd * angles.sin(), odd * angles.cos() + even * angles.sin()]
        return torch.stack(rotated, -1).flatten(-2)

    def logits(self, ids):
        x = self.w["token_embd.weight"][ids]
        for i in range(self.n_layers):
            at = f"blk.{i}"
            y = self.norm(x, f"{at}.attn_norm")
            q = self.rotate(self.heads(self.product(y, f"{at}.attn_q"), self.n_heads))
            k = self.rotate(self.heads(self.product(y, f"{at}.attn_k"), self.n_kv_heads))
            v = self.heads(self.product(y, f"{at}.attn_v"), self.n_kv_heads)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            x = x + self.product(y.transpose(1, 2).flatten(2), f"{at}.attn_output")
            y = self.norm(x, f"{at}.ffn_norm")
            gated = F.silu(self.product(y, f"{at}.ffn_gate")) * self.product(y, f"{at}.ffn_up")
            x = x + self.product(gated, f"{at}.ffn_down")
        return self.product(self.norm(x, "output_norm"), "output")


@torch.inference_mode()
def score(model, stories, device, batch=64):
    """Total nats and tokens of all stories."""
    encoded = model.tokenizer.encode_batch_fast(stories, add_special_tokens=False)
    rows = sorted(([model.begin, *e.ids, model.end] for e in encoded), key=len)
    nats, n_tokens = 0.0, sum(len(row) - 1 for row in rows)
    for at in range(0, len(rows), batch):
        part = rows[at : at + batch]
        longest = max(map(len, part))
        ids = torch.tensor([row + [-100] * (longest - len(row)) for row in part], device=device)
        logits = model.logits(ids[:, :-1].clamp(min=0))
        nats += F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum").item()
    return nats, n_tokens


def main():
    args = argparse.ArgumentParser()
    args.add_argument("heldout", type=pathlib.Path)
    args.add_argument("models", nargs="+")
    args.add_argument("--stories", type=int, default=4000)
    a = args.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    stories = [story.strip() for story in a.heldout.read_text().split("<|endoftext|>")][: a.stories]
    n_words, n_bytes = sum(len(s.split()) for s in stories), sum(map(len, stories))
    print(f"{len(stories)} stories, {n_words:,} words")
    for path in a.models:
        nats, n_tokens = score(Llama(path, device), stories, device)
        print(f"{nats / n_words:.4f} nats per word, {nats / n_bytes:.4f} per byte, {nats / n_tokens:.4f} per token of "
              f"{n_tokens:,}: {path}", flush=True)


if __name__ == "__main__":
    main()
