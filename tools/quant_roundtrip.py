"""Sends blocks of `refrain quantize` through the `gguf` package and writes them with their values, for the tests of
refrain-tensor.

    python3 tools/quant_roundtrip.py REFRAIN [OUT]   (default: crates/refrain-tensor/tests/data/roundtrip.safetensors)

Needs gguf, numpy and safetensors; the versions used are in the file's metadata. A GGUF file of the package holds one F32
tensor for each type; `refrain quantize` encodes it; the package reads the result. The file holds

    values          float32 [2, 512]: normal values, the second row with outliers and an offset
    importance      float32 [512]
    TYPE.blocks     uint8: the blocks of `refrain quantize`
    TYPE.values     float32 [2, 512]: gguf.quants.dequantize of the blocks
    TYPE.weighted   uint8: the blocks with importance
"""

import os
import pathlib
import subprocess
import sys
import tempfile
from importlib.metadata import version

import gguf
import numpy as np
from gguf import quants
from safetensors.numpy import save_file

from imatrix_goldens import write_gguf

TYPES = "Q2_K Q3_K Q4_0 Q4_1 Q4_K Q5_0 Q5_1 Q5_K Q6_K Q8_0 IQ4_NL IQ4_XS MXFP4".split()
# Root mean square of the error over that of normal values: a wrong layout is far above these.
LIMITS = {"Q2_K": 0.4, "Q3_K": 0.2, "Q8_0": 0.02}


def values_to_encode() -> np.ndarray:
    rng = np.random.default_rng(20261119)
    values = rng.standard_normal((2, 512)) * 0.03
    values[1] += 0.01
    values[1, ::57] *= 8
    return values.astype(np.float32)


def name_of(kind: str) -> str:
    return f"blk.0.{kind.lower()}.weight"


def encode(program: str, source: str, out: str, imatrix: str | None) -> dict[str, np.ndarray]:
    command = [program, "quantize", source, "Q8_0", "-o", out, "--quiet"]
    for kind in TYPES:
        command += ["--tensor-type", f"^blk.0.{kind.lower()}.weight$={kind.lower()}"]
    command += ["--imatrix", imatrix] if imatrix else []
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    tensors = {}
    for tensor in gguf.GGUFReader(out).tensors:
        tensors[tensor.name] = (tensor.tensor_type, np.array(tensor.data))
    return tensors


def main() -> None:
    program = sys.argv[1]
    default = pathlib.Path(__file__).parent.parent / "crates/refrain-tensor/tests/data/roundtrip.safetensors"
    out = pathlib.Path(sys.argv[2]) if len(sys.argv) > 2 else default
    values = values_to_encode()
    importance = np.abs(np.random.default_rng(7).standard_normal(512)).astype(np.float32) + np.float32(0.01)
    golden = {"values": values, "importance": importance}
    with tempfile.TemporaryDirectory() as folder:
        at = lambda name: os.path.join(folder, name)
        writer = gguf.GGUFWriter(at("source.gguf"), arch="llama")
        for kind in TYPES:
            writer.add_tensor(name_of(kind), values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        entries = {name_of(kind): (importance.reshape(1, -1), np.array([1.0])) for kind in TYPES}
        write_gguf(at("imatrix.gguf"), entries, ["none"], 1, 512)
        plain = encode(program, at("source.gguf"), at("plain.gguf"), None)
        weighted = encode(program, at("source.gguf"), at("weighted.gguf"), at("imatrix.gguf"))
        for kind in TYPES:
            found, blocks = plain[name_of(kind)]
            assert found.name == kind, (found, kind)
            decoded = quants.dequantize(blocks, found).astype(np.float32)
            assert decoded.shape == values.shape
            error = np.sqrt(np.mean((decoded - values) ** 2) / np.mean(values**2))
            assert error < LIMITS.get(kind, 0.15), (kind, error)
            print(f"{kind:7} relative error {error:.4f}")
            golden[f"{kind}.blocks"] = blocks.view(np.uint8).ravel()
            golden[f"{kind}.values"] = np.ascontiguousarray(decoded)
            golden[f"{kind}.weighted"] = weighted[name_of(kind)][1].view(np.uint8).ravel()
    made_by = f"tools/quant_roundtrip.py with gguf {version('gguf')}, numpy {version('numpy')}"
    save_file(golden, out, metadata={"made_by": made_by})
    print(f"{out}: {out.stat().st_size} bytes, {made_by}")


if __name__ == "__main__":
    main()
