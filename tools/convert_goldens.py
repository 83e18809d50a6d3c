"""Checks `refrain convert` for every architecture against llama.cpp: the golden models of refrain-models become GGUF files,
llama.cpp loads them, and its logits and greedy tokens must be those of `transformers` in the golden files.

Needs llama-cpp-python, numpy and a built `refrain`. The models are random, so logits are compared rather than text.

    python tools/convert_goldens.py REFRAIN [CASE ...]

With `--back`, each GGUF file is first converted to a folder and to GGUF again.
"""

import ctypes
import json
import os
import pathlib
import shutil
import struct
import subprocess
import sys
import tempfile

import llama_cpp
import numpy as np

GOLDENS = pathlib.Path(__file__).parent.parent / "crates/refrain-models/tests/goldens"
# llama.cpp keeps some states as F16.
MOST = 2e-2

# llama.cpp rounds the corrected dimensions of YaRN, which these do not: they are converted without YaRN, and the greedy text
# of `refrain run` from the folder is compared.
WITHOUT_YARN = ["gpt-oss", "gpt-oss-mxfp4"]
# Settings of golden models that llama.cpp does not read from GGUF: it computes something else.
IGNORED = {
    "mistral-window": "a window of the llama architecture",
    "phi3-short": "a window of the phi3 architecture",
    "qwen3moe-plain": "routing weights that do not sum to one",
}


def tokenizer(n_vocab: int) -> dict:
    special = ["<unk>", "<s>", "</s>"]
    letters = [chr(c) for c in range(33, 127)] + [chr(0x120), chr(0x10A)]
    vocab = {token: i for i, token in enumerate((special + letters)[:n_vocab])}
    added = [
        {"id": i, "content": token, "special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        for i, token in enumerate(special)
    ]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
        "fuse_unk": False, "byte_fallback": False, "vocab": vocab, "merges": [],
    }  # fmt: skip
    parts = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None}
    return {**parts, "pre_tokenizer": level, "post_processor": None, "decoder": level, "model": model}


def read_safetensors(path: pathlib.Path) -> dict[str, np.ndarray]:
    data = path.read_bytes()
    (n,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + n])
    header.pop("__metadata__", None)
    dtypes = {"F32": np.float32, "I64": np.int64}
    tensors = {}
    for name, info in header.items():
        first, last = info["data_offsets"]
        tensors[name] = np.frombuffer(data[8 + n + first : 8 + n + last], dtypes[info["dtype"]]).reshape(info["shape"])
    return tensors


def write_safetensors(path: str, tensors: dict[str, np.ndarray]) -> None:
    header, blobs, at = {}, [], 0
    for name, values in tensors.items():
        blob = np.ascontiguousarray(values, dtype=np.float32).tobytes()
        header[name] = {"dtype": "F32", "shape": list(values.shape), "data_offsets": [at, at + len(blob)]}
        blobs.append(blob)
        at += len(blob)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    pathlib.Path(path).write_bytes(struct.pack("<Q", len(text)) + text + b"".join(blobs))


def usual_scale(folder: str, config: dict) -> None:
    """Gemma's `query_pre_attn_scalar` becomes the head size, which llama.cpp assumes, and the queries make up for it."""
    factor = (config["head_dim"] / config["query_pre_attn_scalar"]) ** 0.5
    config["query_pre_attn_scalar"] = config["head_dim"]
    path = os.path.join(folder, "model.safetensors")
    tensors = read_safetensors(pathlib.Path(path))
    has_norms = any("q_norm" in name for name in tensors)
    for name, values in tensors.items():
        if has_norms and "q_norm" in name:
            tensors[name] = (1 + values) * factor - 1
        elif not has_norms and "q_proj" in name:
            tensors[name] = values * factor
    write_safetensors(path, tensors)


def same_text(program: str, folder: str, file: str) -> list[str]:
    """Greedy text of `refrain run` from the folder and of llama.cpp from the file."""
    from convert_llama import refrain_text

    llama = llama_cpp.Llama(file, n_ctx=256, verbose=False, n_threads=1, n_threads_batch=1, type_k=0, type_v=0, flash_attn=False)
    prompt = "Once upon a time"
    reply = llama.create_completion(prompt, max_tokens=24, temperature=0.0, repeat_penalty=1.0)["choices"][0]["text"]
    llama.close()
    return [refrain_text(program, folder, prompt).removeprefix(prompt), reply]


def logits_of(path: str, tokens: list[int]) -> np.ndarray:
    llama = llama_cpp.Llama(
        path, n_ctx=256, n_batch=256, logits_all=True, verbose=False, n_threads=1, n_threads_batch=1,
        type_k=0, type_v=0, flash_attn=False,
    )  # fmt: skip
    llama.eval(tokens)
    logits = np.array(llama.scores[: len(tokens)], dtype=np.float32)
    llama.close()
    return logits


def evaluate(path: str, tokens_path: str, out: str) -> None:
    """In a process of its own: llama.cpp ends the process if it does not expect a model."""
    keep = llama_cpp.llama_log_callback(lambda level, text, data: os.write(2, text))
    llama_cpp.llama_log_set(keep, ctypes.c_void_p(0))
    np.save(out, logits_of(path, np.load(tokens_path).tolist()))


def reason_of(log: str) -> str:
    words = ["GGML_ASSERT", "error loading model:", "unknown", "error"]
    lines = log.splitlines()
    return next((line.split("/src/")[-1].strip() for word in words for line in lines if word in line), "no reason")


def main() -> None:
    if sys.argv[1] == "--evaluate":
        return evaluate(*sys.argv[2:])
    args = [arg for arg in sys.argv[1:] if arg != "--back"]
    back, program = "--back" in sys.argv, args[0]
    cases = args[1:] or sorted(folder.name for folder in GOLDENS.iterdir() if (folder / "golden.safetensors").exists())
    failed = 0
    for case in cases:
        with tempfile.TemporaryDirectory() as folder:
            at = lambda name: os.path.join(folder, name)
            os.mkdir(at("model"))
            for name in ["config.json", "model.safetensors"]:
                shutil.copy(GOLDENS / case / name, at("model"))
            config = json.loads((GOLDENS / case / "config.json").read_text())
            n_vocab = config.get("vocab_size") or config["text_config"]["vocab_size"]
            if config.get("query_pre_attn_scalar", config.get("head_dim")) != config.get("head_dim"):
                usual_scale(at("model"), config)
                pathlib.Path(at("model/config.json")).write_text(json.dumps(config))
            pathlib.Path(at("model/tokenizer.json")).write_text(json.dumps(tokenizer(n_vocab)))
            if case in WITHOUT_YARN:
                config["rope_parameters"] = {"rope_type": "default", "rope_theta": config["rope_parameters"]["rope_theta"]}
                pathlib.Path(at("model/config.json")).write_text(json.dumps(config))
            convert = lambda source, *more: subprocess.run(
                [program, "convert", source, "--type", "f32", "--text-only", "--quiet", *more], capture_output=True, text=True
            )
            steps = [(at("model"), "-o", at("model.gguf"))]
            if back:
                steps += [(at("model.gguf"), "--to", "safetensors", "-o", at("back"))]
                steps += [(at("back"), "-o", at("model.gguf"))]
            done = [convert(*step) for step in steps]
            refused = next((step for step in done if step.returncode != 0), None)
            if refused:
                failed += 1
                print(f"{case:16} NOT CONVERTED: {refused.stderr.strip().splitlines()[0]}")
                continue
            if case in WITHOUT_YARN:
                ours, theirs = (text.strip() for text in same_text(program, at("model"), at("model.gguf")))
                failed += ours != theirs
                print(f"{case:16} {'same' if ours == theirs else 'DIFFERENT'} greedy text: {ours!r}, llama.cpp {theirs!r}", flush=True)
                continue
            golden = read_safetensors(GOLDENS / case / "golden.safetensors")
            tokens, want = golden["tokens"].ravel().tolist(), golden["logits"].reshape(-1, n_vocab)
            np.save(at("tokens.npy"), np.array(tokens))
            command = [sys.executable, __file__, "--evaluate", at("model.gguf"), at("tokens.npy"), at("logits.npy")]
            run = subprocess.run(command, capture_output=True, text=True, errors="replace", env={**os.environ, "GGML_NO_BACKTRACE": "1"})
            if run.returncode != 0:
                print(f"{case:16} not loaded by llama.cpp: {reason_of(run.stderr)}", flush=True)
                continue
            got = np.load(at("logits.npy"))[:, :n_vocab]
            error = np.linalg.norm(got - want) / np.linalg.norm(want)
            same = (got.argmax(axis=1) == want.argmax(axis=1)).mean()
            verdict = "same" if error < MOST else "DIFFERENT"
            if verdict != "same" and case in IGNORED:
                verdict = f"ignored by llama.cpp: {IGNORED[case]}"
            failed += verdict == "DIFFERENT"
            print(f"{case:16} {verdict}: relative error {error:.1e}, same most probable token {same:.3f}", flush=True)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
