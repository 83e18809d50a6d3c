"""Writes blocks of every quantised type and their values according to the `gguf` package, for the tests of refrain-tensor.

    python3 tools/quant_goldens.py [OUT]     (default: crates/refrain-tensor/tests/data/quant.safetensors)

Needs gguf, numpy and safetensors; the versions used are in the file's metadata. For each type TYPE the file holds

    TYPE.blocks       uint8 [n_blocks, block_bytes]
    TYPE.values       float32 [n_blocks, block_len]: gguf.quants.dequantize of the blocks
    encode.values     float32 [n_blocks, 32]
    encode.TYPE       uint8 [n_blocks, block_bytes]: gguf.quants.quantize of encode.values, if the package implements it

All bytes of the blocks are random, except f16 scales, which are random finite values, so every bit of a block occurs in
both states. The first blocks hold the extremes: all bits clear, all bits set, and scales that are largest, negative,
subnormal and zero. Plain types omit NaN, whose payload numpy need not preserve.
"""

import pathlib
import sys
from importlib.metadata import version

import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES
from safetensors.numpy import save_file

SEED = 20240229
# Offsets of the f16 scales in a block.
SCALES = {
    "F32": [],
    "F16": [],
    "BF16": [],
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q8_0": [0],
    "Q2_K": [80, 82],
    "Q3_K": [108],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
    "IQ4_NL": [0],
    "IQ4_XS": [0],
    "MXFP4": [],
    "IQ2_XXS": [0],
    "IQ2_XS": [0],
    "IQ2_S": [0],
    "IQ3_XXS": [0],
    "IQ3_S": [0],
}
ENCODED = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4"]
# The largest exponent of MXFP4 for which every level is finite, and others at the ends of its range.
MXFP4_EXPONENTS = [252, 0, 1, 2, 3, 127, 251]
# 0, -0, smallest and largest subnormal, smallest normal, 1, largest, and their negatives.
EXTREME_SCALES = [0x0000, 0x8000, 0x0001, 0x03FF, 0x0400, 0x3C00, 0x7BFF, 0x8001, 0x83FF, 0xBC00, 0xFBFF]


def finite_f16(rng, n):
    bits = rng.integers(0, 1 << 16, n, dtype=np.uint16)
    # Lower the exponent of infinities and NaN by one.
    return np.where(bits & 0x7C00 == 0x7C00, bits & ~np.uint16(0x0400), bits).astype("<u2")


def blocks_of(name, rng):
    block_len, block_bytes = GGML_QUANT_SIZES[Type[name]]
    if block_len == 1:
        return plain_blocks(name, block_bytes, rng)
    n_blocks = 64 if block_len == 32 else 22
    blocks = rng.integers(0, 256, (n_blocks, block_bytes), dtype=np.uint8)
    n_extreme = len(EXTREME_SCALES)
    blocks[0] = 0x00
    blocks[1] = 0xFF
    for at in SCALES[name]:
        blocks[:, at : at + 2] = finite_f16(rng, n_blocks).view(np.uint8).reshape(n_blocks, 2)
        blocks[1, at : at + 2] = [0xFF, 0x7B]
        order = rng.permutation(n_extreme) if at != SCALES[name][0] else np.arange(n_extreme)
        extremes = np.array(EXTREME_SCALES, dtype="<u2")[order]
        blocks[2 : 2 + n_extreme, at : at + 2] = extremes.view(np.uint8).reshape(n_extreme, 2)
    if name == "MXFP4":
        blocks[:, 0] = np.minimum(blocks[:, 0], MXFP4_EXPONENTS[0])
        blocks[1 : 1 + len(MXFP4_EXPONENTS), 0] = MXFP4_EXPONENTS
    blocks[0] = 0x00
    return blocks


def plain_blocks(name, block_bytes, rng):
    bits = rng.integers(0, 1 << (8 * block_bytes), 1024, dtype=np.uint64).astype(f"<u{block_bytes}")
    infinity = {"F32": 0x7F800000, "F16": 0x7C00, "BF16": 0x7F80}[name]
    sign = 1 << (8 * block_bytes - 1)
    bits[:6] = [0, sign, 1, sign | 1, infinity, sign | infinity]
    bits = bits[(bits & (sign - 1)) <= infinity]
    return bits.view(np.uint8).reshape(-1, block_bytes)


def values_to_encode(rng):
    normal = rng.standard_normal((12, 32)) * np.logspace(-3, 3, 12)[:, None]
    uniform = rng.uniform(-1, 1, (4, 32))
    positive = rng.uniform(0.5, 2, (3, 32))
    outlier = rng.standard_normal((3, 32))
    outlier[:, 7] *= 50
    # Multiples of a power of two cover the ties of every rounding.
    ties = rng.integers(-16, 17, (6, 32)) * 0.25
    tiny = rng.standard_normal((3, 32)) * np.array([[1e-5], [1e-7], [1e-9]])
    flat = np.array([[0.0] * 32, [3.5] * 32, [-3.5] * 32])
    return np.concatenate([normal, uniform, positive, outlier, ties, tiny, flat]).astype(np.float32)


def main():
    default = pathlib.Path(__file__).parent.parent / "crates/refrain-tensor/tests/data/quant.safetensors"
    out = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else default
    rng = np.random.default_rng(SEED)
    tensors = {}
    for name in SCALES:
        blocks = blocks_of(name, rng)
        values = quants.dequantize(blocks, Type[name])
        assert SCALES[name] == [] or np.isfinite(values).all()
        tensors[f"{name}.blocks"] = blocks
        tensors[f"{name}.values"] = np.ascontiguousarray(values.astype(np.float32))
    values = values_to_encode(rng)
    tensors["encode.values"] = values
    for name in ENCODED:
        encoded = quants.quantize(values, Type[name])
        tensors[f"encode.{name}"] = np.ascontiguousarray(encoded).view(np.uint8).reshape(len(values), -1)
    # A single entry, since the order of several entries changes from run to run.
    made_by = f"tools/quant_goldens.py with gguf {version('gguf')}, numpy {version('numpy')}"
    save_file(tensors, out, metadata={"made_by": made_by})
    print(f"{out}: {out.stat().st_size} bytes, {made_by}")


if __name__ == "__main__":
    main()
