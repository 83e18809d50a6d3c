#!/usr/bin/env python3
"""Writes crates/refrain-formats/tests/data/every_type.gguf with the `gguf` package from PyPI.

The file holds one metadata value of every type, nested arrays, and one tensor of every supported type; the test
`gguf_read.rs` checks its contents. Needs: pip install gguf (made with 0.19.0).
"""

import sys
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType as T, GGUFValueType as V, GGUFWriter

OUT = Path(__file__).resolve().parent.parent / "crates/refrain-formats/tests/data/every_type.gguf"
QUANTIZED = [T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1, T.Q8_0, T.Q2_K, T.Q3_K, T.Q4_K, T.Q5_K, T.Q6_K, T.IQ4_NL, T.IQ4_XS]
QUANTIZED += [T.MXFP4, T.IQ2_XXS, T.IQ2_XS, T.IQ2_S, T.IQ3_XXS, T.IQ3_S]


def pattern(n: int) -> np.ndarray:
    """Bytes that differ from their neighbours: 7 i + 1 mod 251."""
    return ((np.arange(n) * 7 + 1) % 251).astype(np.uint8)


def main(out: Path) -> None:
    w = GGUFWriter(str(out), "llama")
    w.add_key_value("t.u8", 200, V.UINT8)
    w.add_key_value("t.i8", -100, V.INT8)
    w.add_key_value("t.u16", 60000, V.UINT16)
    w.add_key_value("t.i16", -30000, V.INT16)
    w.add_key_value("t.u32", 4_000_000_000, V.UINT32)
    w.add_key_value("t.i32", -2_000_000_000, V.INT32)
    w.add_key_value("t.f32", 0.5, V.FLOAT32)
    w.add_key_value("t.bool", True, V.BOOL)
    w.add_key_value("t.string", "grüß dich, 世界", V.STRING)
    w.add_key_value("t.u64", 18_000_000_000_000_000_000, V.UINT64)
    w.add_key_value("t.i64", -9_000_000_000_000_000_000, V.INT64)
    w.add_key_value("t.f64", 0.1, V.FLOAT64)
    w.add_array("a.i32", [1, -2, 3])
    w.add_array("a.f32", [0.25, -0.5])
    w.add_array("a.bool", [True, False, True])
    w.add_array("a.string", ["", "a", "ü", "two words"])
    w.add_array("a.nested", [[1, 2], [3], [4, 5, 6]])
    w.add_tensor("x.f32", np.arange(6, dtype=np.float32).reshape(2, 3))
    w.add_tensor("x.f16", np.arange(6, dtype=np.float16).reshape(3, 2))
    w.add_tensor("x.i32", np.arange(-2, 2, dtype=np.int32))
    w.add_tensor("x.i64", np.arange(-2, 2, dtype=np.int64))
    w.add_tensor("x.rank4", np.arange(24, dtype=np.float32).reshape(2, 3, 2, 2))
    w.add_tensor("x.BF16", pattern(8).reshape(2, 4), raw_dtype=T.BF16)
    for kind in QUANTIZED:
        _, block_bytes = GGML_QUANT_SIZES[kind]
        w.add_tensor(f"x.{kind.name}", pattern(2 * block_bytes).reshape(2, block_bytes), raw_dtype=kind)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else OUT)
