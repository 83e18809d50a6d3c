"""Writes stories with SmolLM2-135M-Instruct until the time is up.

    python3 generate.py SMOLLM2.gguf OUT.npy [--seconds 230] [--batch 4096] [--length 288]

Every row of the batch writes its own story. A row that ends takes the next prompt at once, all on the device, so that
the step never changes and one CUDA graph serves the whole run. corpus.py splits the log of tokens into stories.
"""

import argparse
import multiprocessing
import time

import numpy as np
import torch

import prompts
import smollm
from gguf_io import Reader

WIDTH = 96  # maximum tokens of a prompt


# Words and punctuation that every story needs: exempt from the penalty on used words.
FREE = """. , ! ? " ' 's The He She They It But And So""".split() + ['."', ',"', '!"', '?"', ' "'] + [
    " " + w
    for w in """the a an and to of in on at it he she they his her their was were is had i you we my your me him them with
    for that so but as up out not be The He She They It I But And So One When said""".split()
]


class Writer:
    def __init__(self, model, tokenizer, a):
        self.m, self.length, device = model, a.length, model.device
        batch = a.batch
        self.temperature, self.log_min_p, self.penalty = a.temperature, float(np.log(a.min_p)), a.penalty
        allowed = smollm.story_tokens(tokenizer, a.common)
        self.allowed = torch.tensor(allowed, device=device)
        # Number of uses of each word in a row's story; exempt words are not counted.
        self.uses = torch.zeros(batch, len(allowed), dtype=torch.int8, device=device)
        free = {i for text in FREE for i in tokenizer.encode(text, add_special_tokens=False).ids[:1]}
        self.counted = torch.tensor([i not in free and i != allowed[-1] for i in allowed], device=device).to(torch.int8)
        self.head = model.embedding[self.allowed].t().contiguous()
        self.end = tokenizer.token_to_id("<|im_end|>")
        shared = tokenizer.encode(prompts.SHARED, add_special_tokens=False).ids
        table, lengths = a.table
        self.prompts, self.prompt_len = torch.from_numpy(table).to(device), torch.from_numpy(lengths).to(device)
        self.n_shared = len(shared)
        print(f"{self.n_shared} shared prompt tokens, {lengths.mean():.1f} own ones, "
              f"{len(self.allowed)} story tokens", flush=True)

        torch.manual_seed(a.seed)
        model.cache(batch, a.length)
        self.positions = torch.zeros(batch, dtype=torch.int64, device=device)
        for i, token in enumerate(shared):
            self.positions.fill_(i)
            model.hidden_of(torch.full_like(self.positions, token), self.positions)
        # The story so far, as indices into `allowed`, for the repetition penalty; -1 for prompt tokens.
        self.history = torch.full((batch, a.length), -1, device=device)
        self.nudge_after = a.nudge_after
        self.repeat_3, self.repeat_4 = a.repeat_3, a.repeat_4
        self.row_prompt = torch.arange(batch, device=device)
        self.tokens = self.prompts[:batch, 0].long()
        self.positions.fill_(self.n_shared)
        self.n_taken = torch.full((1,), batch, device=device)
        # A story's first entry has a flag, so that the log itself shows where stories start.
        self.log = torch.zeros(a.steps, batch, dtype=torch.int32, device=device)
        self.at = torch.zeros(1, dtype=torch.int64, device=device)

    def repeats(self):
        """Index [B, n] and penalty [B, n] of the words that would repeat three or four words of the story."""
        h = self.history
        at = self.positions[:, None]
        one, two, three = (h.gather(1, at - i) for i in range(3))
        same_2 = (h[:, 2:-1] == one) & (h[:, 1:-2] == two) & (one >= 0) & (two >= 0)
        same_3 = same_2 & (h[:, :-3] == three) & (three >= 0)
        following = h[:, 3:]
        penalty = (same_2 * self.repeat_3 + same_3 * self.repeat_4) * (following >= 0)
        return following.clamp(min=0), penalty

    def sample(self, logits):
        logits = logits.float().sub_(self.uses.clamp(max=6), alpha=self.penalty)
        index, penalty = self.repeats()
        logits.scatter_add_(1, index, -penalty.to(logits.dtype))
        # Make the end of long stories more likely wherever it is plausible.
        n_written = self.positions - self.n_shared - self.prompt_len[self.row_prompt]
        logits[:, -1] += (n_written - self.nudge_after).clamp(min=0) * 0.04
        keep = logits >= logits.amax(-1, keepdim=True) + self.temperature * self.log_min_p
        noise = torch.empty_like(logits).exponential_().log_()
        return torch.where(keep, logits / self.temperature - noise, -torch.inf).argmax(-1)

    def step(self):
        first = self.positions == self.n_shared
        self.log.index_copy_(0, self.at, (self.tokens + first * (1 << 20)).int()[None])
        self.at += 1
        choice = self.sample(self.m.hidden_of(self.tokens, self.positions) @ self.head)
        sampled = self.allowed[choice]
        own = self.positions + 1 - self.n_shared
        given = own < self.prompt_len[self.row_prompt]
        wanted = self.prompts[self.row_prompt, own.clamp(max=self.prompts.shape[1] - 1)].long()
        following = torch.where(given, wanted, sampled)
        done = (~given & (sampled == self.end)) | (self.positions + 2 >= self.length)
        used = self.counted[choice] * ~given
        self.uses.scatter_add_(1, choice[:, None], used[:, None]).mul_(~done[:, None])
        self.history.scatter_(1, (self.positions + 1)[:, None], torch.where(given, -1, choice)[:, None])
        self.history.masked_fill_(done[:, None], -1)
        fresh = (self.n_taken + done.cumsum(0) - 1) % self.prompts.shape[0]
        self.n_taken += done.sum()
        self.row_prompt.copy_(torch.where(done, fresh, self.row_prompt))
        self.tokens.copy_(torch.where(done, self.prompts[fresh, 0].long(), following))
        self.positions.copy_(torch.where(done, self.n_shared, self.positions + 1))


def encoded_prompts(task):
    """Token table and lengths of `n` prompts; runs in worker processes."""
    n, seed = task
    encoded = [TOKENIZER.encode(text, add_special_tokens=False).ids for text in prompts.suffixes(n, seed)]
    table = np.zeros((n, WIDTH), np.int32)
    for row, ids in zip(table, encoded):
        row[: len(ids)] = ids
    return table, np.array([len(ids) for ids in encoded])


def all_prompts(path, n, seed):
    global TOKENIZER
    TOKENIZER = smollm.tokenizer_of(Reader(path))
    n_parts = 64
    tasks = [(-(-n // n_parts), 1000 * seed + i) for i in range(n_parts)]
    with multiprocessing.get_context("fork").Pool() as pool:
        parts = pool.map(encoded_prompts, tasks, chunksize=1)
    return np.concatenate([t for t, _ in parts]), np.concatenate([n for _, n in parts])


def captured(step):
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def main():
    args = argparse.ArgumentParser()
    args.add_argument("model")
    args.add_argument("out")
    args.add_argument("--seconds", type=float, default=230)
    args.add_argument("--batch", type=int, default=4096)
    args.add_argument("--length", type=int, default=288)
    args.add_argument("--prompts", type=int, default=640_000)
    args.add_argument("--steps", type=int, default=100_000, help="steps that the log holds")
    args.add_argument("--temperature", type=float, default=0.7)
    args.add_argument("--min-p", type=float, default=0.05)
    args.add_argument("--penalty", type=float, default=0.4, help="subtracted from a word's logit per earlier use")
    args.add_argument("--repeat-3", type=float, default=1.5, help="subtracted if a word repeats the last three words")
    args.add_argument("--repeat-4", type=float, default=4.0, help="additionally subtracted if it repeats four")
    args.add_argument("--nudge-after", type=int, default=90, help="tokens after which the end is made more likely")
    args.add_argument("--common", type=int, default=24_000)
    args.add_argument("--seed", type=int, default=1)
    a = args.parse_args()
    began = time.perf_counter()
    # Before the GPU is used: a CUDA context does not survive a fork.
    a.table = all_prompts(a.model, a.prompts, a.seed)
    print(f"prompts after {time.perf_counter() - began:.1f} s", flush=True)
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    with torch.inference_mode():
        model, tokenizer = smollm.load(a.model, device, dtype)
        if device == "cuda":
            smollm.check_kernels(model)
        writer = Writer(model, tokenizer, a)
        step = captured(writer.step) if device == "cuda" else writer.step
        print(f"ready after {time.perf_counter() - began:.1f} s", flush=True)
        n, started = 0, time.perf_counter()
        while time.perf_counter() - began < a.seconds and n + 200 < a.steps:
            for _ in range(50):
                step()
            n += 50
            if device == "cuda":
                torch.cuda.synchronize()
            if n % 2000 == 0 or n == 100:
                ms = (time.perf_counter() - started) / n * 1e3
                print(f"{n} steps, {ms:.2f} ms each, {a.batch / ms * 1e3:,.0f} tokens/s, "
                      f"{int(writer.n_taken) - a.batch} stories ended", flush=True)
        log = writer.log[: int(writer.at)].t().contiguous().cpu().numpy()
    np.save(a.out, log)
    print(f"{log.size / 1e6:.1f} M tokens logged, {time.perf_counter() - began:.1f} s in all", flush=True)


if __name__ == "__main__":
    main()
