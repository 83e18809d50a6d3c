"""Measures prefill and decode speed of llama.cpp on a GGUF file; prints one line of JSON.

Needs `pip install llama-cpp-python`. `cargo xtask bench-cpu` runs it in alternation with `refrain bench`.

    python tools/bench_llama.py model.gguf PROMPT_TOKENS DECODE_TOKENS THREADS [DEPTH[,DEPTH...]]
"""

import json
import sys
import time

import llama_cpp


def main() -> None:
    path = sys.argv[1]
    n_prompt, n_decode, n_threads = (int(a) for a in sys.argv[2:5])
    depths = [int(d) for d in sys.argv[5].split(",")] if len(sys.argv) > 5 else [1]
    context = max(n_prompt, max(depths) + n_decode) + 8
    llama = llama_cpp.Llama(
        path, n_ctx=context, n_batch=512, n_threads=n_threads, n_threads_batch=n_threads, verbose=False
    )
    vocab = llama.n_vocab()
    tokens = [(1000 + i * 7919) % vocab for i in range(context)]

    def prefill(n: int) -> float:
        llama.reset()
        began = time.perf_counter()
        llama.eval(tokens[:n])
        return time.perf_counter() - began

    def decode(depth: int) -> float:
        prefill(depth)
        began = time.perf_counter()
        for i in range(n_decode):
            llama.eval([tokens[i]])
        return time.perf_counter() - began

    prefill(8)  # warm-up
    result = {"prefill": n_prompt / prefill(n_prompt), "decode": [n_decode / decode(d) for d in depths]}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
