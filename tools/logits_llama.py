"""Compares the logits of llama.cpp with those of `transformers` for a golden model, from a GGUF file that Refrain wrote.

    cargo run --profile ci -p refrain-models --example golden_gguf -- llama /tmp/llama.gguf
    python3 tools/logits_llama.py /tmp/llama.gguf crates/refrain-models/tests/goldens/llama

Needs llama-cpp-python (any build for the CPU), numpy and safetensors or nothing else: the golden file is read by hand. Prints
the relative error of all logits (norm of the difference over the norm of the golden ones). The file's weights are F32, but
llama.cpp keeps its cache in F16 unless told otherwise, so this asks for F32.
"""

import ctypes
import json
import pathlib
import struct
import sys

import llama_cpp
import numpy as np


def read_golden(folder):
    data = (pathlib.Path(folder) / "golden.safetensors").read_bytes()
    n_header = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + n_header])

    def tensor(name, dtype):
        start, end = header[name]["data_offsets"]
        return np.frombuffer(data[8 + n_header + start : 8 + n_header + end], dtype).reshape(header[name]["shape"])

    return tensor("tokens", np.int64), tensor("logits", np.float32)


def logits_of(path, tokens, n_vocab):
    llama_cpp.llama_backend_init()
    params = llama_cpp.llama_model_default_params()
    params.n_gpu_layers = 0
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
    if not model:
        raise SystemExit(f"llama.cpp {llama_cpp.__version__} cannot load {path}")
    options = llama_cpp.llama_context_default_params()
    options.n_ctx, options.n_batch, options.n_ubatch, options.n_threads = 256, 256, 256, 2
    options.type_k = options.type_v = 0  # F32
    options.flash_attn_type = 0
    context = llama_cpp.llama_init_from_model(model, options)
    batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for i, token in enumerate(tokens):
        batch.token[i], batch.pos[i], batch.n_seq_id[i] = int(token), i, 1
        batch.seq_id[i][0], batch.logits[i] = 0, 1
    assert llama_cpp.llama_decode(context, batch) == 0
    rows = [np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, i), (n_vocab,)) for i in range(len(tokens))]
    return np.stack(rows).copy()


def main():
    # llama.cpp's log is long.
    quiet = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)
    llama_cpp.llama_log_set(quiet, ctypes.c_void_p(0))
    path, folder = sys.argv[1:3]
    tokens, want = read_golden(folder)
    got = logits_of(path, tokens, want.shape[1])
    difference = got.astype(np.float64) - want
    print(
        f"{pathlib.Path(folder).name}: llama-cpp-python {llama_cpp.__version__}, {len(tokens)} tokens, "
        f"relative error {np.linalg.norm(difference) / np.linalg.norm(want):.1e}"
    )


if __name__ == "__main__":
    main()
