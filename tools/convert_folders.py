"""Checks the folders that `refrain convert --to safetensors` writes with `transformers`: each golden model of refrain-models
becomes a GGUF file and a folder again, which `transformers` loads; its logits must be those of the golden file.

Needs torch, transformers, numpy and a built `refrain`.

    python tools/convert_folders.py REFRAIN [CASE ...]
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

import numpy as np
import torch
import transformers
from safetensors.numpy import load_file

GOLDENS = pathlib.Path(__file__).parent.parent / "crates/refrain-models/tests/goldens"
MOST = 1e-4


def tokenizer(n_vocab: int) -> dict:
    """A vocabulary of letters: conversion needs one."""
    letters = ["<unk>", "<s>", "</s>"] + [chr(c) for c in range(33, 127)] + [chr(0x120), chr(0x10A)]
    added = [
        {"id": i, "content": token, "special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        for i, token in enumerate(letters[:3])
    ]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None}
    model |= {"end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "merges": []}
    model["vocab"] = {token: i for i, token in enumerate(letters[:n_vocab])}
    parts = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None}
    return {**parts, "pre_tokenizer": level, "post_processor": None, "decoder": level, "model": model}


def main() -> None:
    program, *cases = sys.argv[1:]
    cases = cases or sorted(folder.name for folder in GOLDENS.iterdir() if (folder / "golden.safetensors").exists())
    failed = 0
    for case in cases:
        with tempfile.TemporaryDirectory() as folder:
            at = lambda name: os.path.join(folder, name)
            os.mkdir(at("model"))
            for name in ["config.json", "model.safetensors"]:
                shutil.copy(GOLDENS / case / name, at("model"))
            config = json.loads((GOLDENS / case / "config.json").read_text())
            n_vocab = config.get("vocab_size") or config["text_config"]["vocab_size"]
            pathlib.Path(at("model/tokenizer.json")).write_text(json.dumps(tokenizer(n_vocab)))
            steps = [["model", "-o", "model.gguf"], ["model.gguf", "--to", "safetensors", "-o", "back"]]
            error = None
            for step in steps:
                command = [program, "convert", *step, "--type", "f32", "--text-only", "--quiet"]
                run = subprocess.run(command, cwd=folder, capture_output=True, text=True)
                if run.returncode != 0:
                    error = run.stderr.strip().splitlines()[0]
                    break
            if error:
                # Not every model has a place in both formats; the reason says what is missing.
                print(f"{case:16} not converted: {error}", flush=True)
                continue
            golden = load_file(GOLDENS / case / "golden.safetensors")
            tokens, want = golden["tokens"].ravel(), golden["logits"].reshape(-1, n_vocab)
            try:
                model, info = transformers.AutoModelForCausalLM.from_pretrained(
                    at("back"), dtype=torch.float32, attn_implementation="eager", experts_implementation="eager",
                    output_loading_info=True,
                )  # fmt: skip
            except Exception as error:
                failed += 1
                print(f"{case:16} NOT LOADED: {error}", flush=True)
                continue
            lost = sorted(info["missing_keys"]) + sorted(info["unexpected_keys"])
            with torch.no_grad():
                got = model.eval()(torch.tensor(tokens[None])).logits[0].numpy()
            error = np.linalg.norm(got - want) / np.linalg.norm(want)
            is_same = error < MOST and not lost
            failed += not is_same
            print(f"{case:16} {'same' if is_same else 'DIFFERENT'}: relative error {error:.1e} {lost or ''}", flush=True)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
