"""Measures perplexity of a GGUF file with llama.cpp, in the same way as `refrain perplexity`.

Needs `pip install llama-cpp-python numpy`. Scores the second half of each window of CONTEXT
tokens, which starts with BOS if the model uses one.

    python tools/perplexity_llama.py model.gguf text.txt [context] [windows]
"""

import sys

import llama_cpp
import numpy as np


def main() -> None:
    path, text_path = sys.argv[1:3]
    context = int(sys.argv[3]) if len(sys.argv) > 3 else 512
    n_windows = int(sys.argv[4]) if len(sys.argv) > 4 else 8
    llama = llama_cpp.Llama(path, n_ctx=context, n_batch=context, logits_all=True, verbose=False, n_threads=2)
    with open(text_path, "rb") as file:
        tokens = llama.tokenize(file.read(), add_bos=True, special=False)
    add_bos = llama_cpp.llama_vocab_get_add_bos(llama_cpp.llama_model_get_vocab(llama.model))
    total, n_scored = 0.0, 0
    for window in range(min(n_windows, len(tokens) // context)):
        part = list(tokens[window * context : (window + 1) * context])
        if add_bos:
            part[0] = llama.token_bos()
        llama.reset()
        llama.eval(part)
        logits = np.asarray(llama.scores[: context - 1], dtype=np.float64)[context // 2 :]
        following = np.asarray(part[context // 2 + 1 :])
        peak = logits.max(axis=1, keepdims=True)
        log_sum = np.log(np.exp(logits - peak).sum(axis=1)) + peak[:, 0]
        total += float((log_sum - logits[np.arange(len(following)), following]).sum())
        n_scored += len(following)
    print(f"{np.exp(total / n_scored):.4f} over {n_scored} tokens")


if __name__ == "__main__":
    main()
