"""Compares `refrain quantize` with llama.cpp's quantiser on one model.

Needs `pip install llama-cpp-python numpy` and a built `refrain`. Both quantisers make each type from the same F32 file;
llama.cpp evaluates all files, so that only the quantisers differ. KL divergence from the F32 model is measured over the
second half of each window of 512 tokens. Times are CPU time of all threads, which a busy machine disturbs least.

    python tools/quantize_llama.py REFRAIN F32.gguf TEXT [--types Q4_0,Q4_K_M] [--windows 8] [--imatrix FILE]
        [--json OUT.json]
"""

import argparse
import ctypes
import json
import os
import resource
import subprocess
import tempfile
import time

import llama_cpp
import numpy as np

CONTEXT = 512
TYPES = "Q2_K,Q3_K_S,Q3_K_M,Q3_K_L,Q4_0,Q4_1,IQ4_NL,IQ4_XS,MXFP4,Q4_K_S,Q4_K_M,Q5_0,Q5_1,Q5_K_S,Q5_K_M,Q6_K,Q8_0"


def windows_of(llama, text: str, n_windows: int) -> list[list[int]]:
    with open(text, "rb") as file:
        tokens = llama.tokenize(file.read(), add_bos=True, special=False)
    add_bos = llama_cpp.llama_vocab_get_add_bos(llama_cpp.llama_model_get_vocab(llama.model))
    parts = [tokens[i * CONTEXT : (i + 1) * CONTEXT] for i in range(min(n_windows, len(tokens) // CONTEXT))]
    return [[llama.token_bos(), *part[1:]] if add_bos else part for part in parts]


def log_probabilities(path: str, text: str, n_windows: int) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities of all tokens, and the tokens that follow."""
    llama = llama_cpp.Llama(path, n_ctx=CONTEXT, n_batch=CONTEXT, logits_all=True, verbose=False, n_threads=1, n_threads_batch=1)
    rows, following = [], []
    for part in windows_of(llama, text, n_windows):
        llama.reset()
        llama.eval(part)
        logits = np.asarray(llama.scores[: CONTEXT - 1], dtype=np.float32)[CONTEXT // 2 :]
        peak = logits.max(axis=1, keepdims=True)
        total = np.exp(logits - peak).sum(axis=1, keepdims=True, dtype=np.float64)
        rows.append((logits - (peak + np.log(total))).astype(np.float32))
        following.append(np.asarray(part[CONTEXT // 2 + 1 :]))
    llama.close()
    return np.concatenate(rows), np.concatenate(following)


def divergence(base: np.ndarray, other: np.ndarray) -> np.ndarray:
    parts = zip(np.array_split(base, 64), np.array_split(other, 64))
    return np.concatenate([(np.exp(p) * (p - q)).sum(axis=1, dtype=np.float64) for p, q in parts])


def quantize_llama(source: str, out: str, name: str, imatrix: str | None, n_threads: int) -> float:
    params = llama_cpp.llama_model_quantize_default_params()
    full = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M", "MXFP4": "MXFP4_MOE"}.get(name, name)
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{full}")
    if name == "MXFP4":
        # llama.cpp's file type is for experts; this makes all matrices MXFP4 but the output, as ours does.
        params.pure = True
        params.output_tensor_type = params.token_embedding_type = output_type(source)
    params.nthread = n_threads
    held = llama_imatrix(imatrix) if imatrix else None
    if held:
        params.imatrix = held[0]
    began = time.process_time()
    status = llama_cpp.llama_model_quantize(source.encode(), out.encode(), ctypes.byref(params))
    if status != 0:
        raise SystemExit(f"llama.cpp cannot make {name}: status {status}")
    return time.process_time() - began


def output_type(source: str) -> int:
    """The type of the output matrix in mixes with few bits: Q6_K, or Q8_0 if its rows are not a multiple of 256."""
    import gguf

    row = next(int(t.shape[0]) for t in gguf.GGUFReader(source).tensors if t.name == "token_embd.weight")
    return int(gguf.GGMLQuantizationType.Q8_0 if row % 256 else gguf.GGMLQuantizationType.Q6_K)


def llama_imatrix(path: str):
    """The entries of a GGUF importance matrix, as llama.cpp's library takes them, and what they point to."""
    import gguf

    reader = gguf.GGUFReader(path)
    tensors = {tensor.name: np.array(tensor.data, dtype=np.float32) for tensor in reader.tensors}
    names = sorted(name.removesuffix(".in_sum2") for name in tensors if name.endswith(".in_sum2"))
    entries, kept = (llama_cpp.llama_model_imatrix_data * (len(names) + 1))(), []
    for i, name in enumerate(names):
        sums, counts = tensors[name + ".in_sum2"], tensors[name + ".counts"]
        counts = counts.reshape(-1, 1)
        means = np.where(counts > 0, sums.reshape(len(counts), -1) / np.maximum(counts, 1), 1.0)
        means = np.ascontiguousarray(means.reshape(-1), dtype=np.float32)
        kept.append(means)
        entries[i].name = name.encode()
        entries[i].data = means.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        entries[i].size = means.size
    return entries, kept


def quantize_refrain(program: str, source: str, out: str, name: str, imatrix: str | None, n_threads: int) -> float:
    command = [program, "quantize", source, name, "-o", out, "--quiet", "--threads", str(n_threads)]
    command += ["--imatrix", imatrix] if imatrix else []
    began = children_seconds()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return children_seconds() - began


def children_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("refrain")
    parser.add_argument("model")
    parser.add_argument("text")
    parser.add_argument("--types", default=TYPES)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--imatrix")
    parser.add_argument("--only-refrain", action="store_true")
    parser.add_argument("--json")
    args = parser.parse_args()
    quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(quiet, ctypes.c_void_p(0))
    base, following = log_probabilities(args.model, args.text, args.windows)
    print(f"{len(base)} tokens, perplexity of F32 {np.exp(-base[np.arange(len(base)), following].mean()):.4f}")
    print(f"{'type':8} {'KL llama':>9} {'KL ours':>9} {'ratio':>7}  {'+-':>5}  {'MB':>13}  {'CPU seconds':>13}")
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for name in args.types.split(","):
            row = {"type": name}
            values = {}
            for who in ["llama", "refrain"]:
                if who == "llama" and args.only_refrain:
                    continue
                out = os.path.join(folder, f"{who}-{name}.gguf")
                make = quantize_llama if who == "llama" else lambda *rest: quantize_refrain(args.refrain, *rest)
                row[f"{who}_seconds"] = make(args.model, out, name, args.imatrix, args.threads)
                row[f"{who}_mb"] = os.path.getsize(out) / 1e6
                values[who] = divergence(base, log_probabilities(out, args.text, args.windows)[0])
                row[f"{who}_kl"] = float(values[who].mean())
                os.remove(out)
            ours = row["refrain_kl"]
            theirs = row.setdefault("llama_kl", float("nan"))
            if "llama" in values:
                # The standard error of the ratio, from paired differences.
                difference = values["refrain"] - values["llama"]
                row["ratio_error"] = float(difference.std() / np.sqrt(len(difference)) / theirs)
            row["ratio"] = ours / theirs if theirs > 0 else float("nan")
            results.append(row)
            sizes = f"{row.get('llama_mb', 0):6.1f} {row['refrain_mb']:6.1f}"
            seconds = f"{row.get('llama_seconds', 0):6.2f} {row['refrain_seconds']:6.2f}"
            error = row.get("ratio_error", 0)
            print(f"{name:8} {theirs:9.5f} {ours:9.5f} {row['ratio']:7.3f}  {error:5.3f}  {sizes}  {seconds}", flush=True)
            if args.json:
                # After each type: a run takes long.
                with open(args.json, "w", encoding="utf-8") as file:
                    json.dump(results, file, indent=1)
                    file.write("\n")


if __name__ == "__main__":
    main()
