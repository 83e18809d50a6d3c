"""Checks that llama.cpp loads files written by `refrain convert` and writes the same greedy text as `refrain run`.

Needs `pip install llama-cpp-python`. Each MODEL is a GGUF file or a Hugging Face folder; it is converted to BF16 first.

    python tools/convert_llama.py REFRAIN MODEL [MODEL ...]
"""

import os
import subprocess
import sys
import tempfile

import llama_cpp

PROMPTS = ["The capital of France is", "Once upon a time", "def fibonacci(n):"]
N_TOKENS = 24


def llama_text(path: str, prompt: str) -> str:
    llama = llama_cpp.Llama(path, n_ctx=256, verbose=False, n_threads=1, n_threads_batch=1)
    reply = llama.create_completion(prompt, max_tokens=N_TOKENS, temperature=0.0, repeat_penalty=1.0)
    llama.close()
    return reply["choices"][0]["text"]


def refrain_text(program: str, path: str, prompt: str) -> str:
    command = [program, "run", path, prompt, "--raw", "--temp", "0", "-n", str(N_TOKENS), "--quiet"]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return text.removesuffix("\n")


def main() -> None:
    program, *models = sys.argv[1:]
    failed = 0
    for model in models:
        with tempfile.TemporaryDirectory() as folder:
            out = os.path.join(folder, "model.gguf")
            subprocess.run([program, "convert", model, "--type", "bf16", "-o", out, "--quiet"], check=True)
            for prompt in PROMPTS:
                theirs, ours = llama_text(out, prompt).rstrip(), refrain_text(program, out, prompt).rstrip()
                # `run` prints the prompt only to terminals.
                ours = ours.removeprefix(prompt)
                same = theirs.strip() == ours.strip()
                failed += not same
                print(f"{'same' if same else 'DIFFERENT'}  {model}  {prompt!r} -> {ours!r}")
                if not same:
                    print(f"    llama.cpp: {theirs!r}")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
