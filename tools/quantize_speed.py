"""Compares the user CPU time of `refrain quantize` with that of llama.cpp's quantiser, in interleaved runs.

Needs `pip install llama-cpp-python`. Both make each type from the same file with the same number of threads, one after the
other, several times; the medians are compared. User time of all threads is what a busy machine disturbs least. llama.cpp
runs in this process, whose start does not count; the start of `refrain` does.

    python tools/quantize_speed.py REFRAIN F32.gguf [--types Q4_0,Q4_K_M] [--runs 5] [--threads 2] [--imatrix FILE]
"""

import argparse
import ctypes
import os
import resource
import statistics
import subprocess
import tempfile

import llama_cpp

from quantize_llama import TYPES, llama_imatrix, output_type


def seconds(who: int) -> tuple[float, float]:
    usage = resource.getrusage(who)
    return usage.ru_utime, usage.ru_stime


def difference(who: int, run) -> tuple[float, float]:
    before = seconds(who)
    run()
    return tuple(after - begun for after, begun in zip(seconds(who), before))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("refrain")
    parser.add_argument("model")
    parser.add_argument("--types", default=TYPES)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--imatrix")
    args = parser.parse_args()
    quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(quiet, ctypes.c_void_p(0))
    print(f"{'':8} {'user seconds':>15} {'':>6} {'system seconds':>15}")
    print(f"{'type':8} {'llama':>7} {'ours':>7} {'ratio':>6} {'llama':>7} {'ours':>7}")
    worst = 0.0
    for name in args.types.split(","):
        params = llama_cpp.llama_model_quantize_default_params()
        params.nthread = args.threads
        params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{'MXFP4_MOE' if name == 'MXFP4' else name}")
        if name == "MXFP4":
            params.pure = True
            params.output_tensor_type = params.token_embedding_type = output_type(args.model)
        held = llama_imatrix(args.imatrix) if args.imatrix else None
        if held:
            params.imatrix = held[0]
        theirs, ours = [], []
        with tempfile.TemporaryDirectory() as folder:
            out = os.path.join(folder, "out.gguf")
            command = [args.refrain, "quantize", args.model, name, "-o", out, "--quiet", "--threads", str(args.threads)]
            command += ["--imatrix", args.imatrix] if args.imatrix else []

            def run_llama() -> None:
                status = llama_cpp.llama_model_quantize(args.model.encode(), out.encode(), ctypes.byref(params))
                if status != 0:
                    raise SystemExit(f"llama.cpp cannot make {name}: status {status}")

            def run_refrain() -> None:
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

            for _ in range(args.runs):
                theirs.append(difference(resource.RUSAGE_SELF, run_llama))
                ours.append(difference(resource.RUSAGE_CHILDREN, run_refrain))
        (user_theirs, system_theirs), (user_ours, system_ours) = (
            [statistics.median(values) for values in zip(*runs)] for runs in (theirs, ours)
        )
        ratio = user_ours / max(user_theirs, 1e-9)
        worst = max(worst, ratio)
        print(
            f"{name:8} {user_theirs:7.3f} {user_ours:7.3f} {ratio:6.2f} {system_theirs:7.3f} {system_ours:7.3f}", flush=True
        )
    print(f"worst ratio {worst:.2f}")


if __name__ == "__main__":
    main()
