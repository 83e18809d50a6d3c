"""Writes the grids of the IQ2 and IQ3 types, from the `gguf` package, for refrain-tensor.

    python3 tools/quant_grids.py [OUT]     (default: crates/refrain-tensor/src/quant/grids.bin)

Needs gguf and numpy. A point of a grid is one little-endian u16 that holds an index into the type's levels for each
coordinate, the first in the lowest bits: 8 coordinates of 2 bits for IQ2 types, 4 of 3 bits for IQ3 types. The grids
follow each other in the order of GRIDS.
"""

import pathlib
import sys

import numpy as np
from gguf import quants

# Type, points, coordinates, bits of a coordinate.
GRIDS = [
    (quants.IQ2_XXS, 256, 8, 2),
    (quants.IQ2_XS, 512, 8, 2),
    (quants.IQ2_S, 1024, 8, 2),
    (quants.IQ3_XXS, 256, 4, 3),
    (quants.IQ3_S, 512, 4, 3),
]


def packed(kind, n_points, n_coordinates, bits):
    kind.init_grid()
    grid = np.asarray(kind.grid).reshape(n_points, n_coordinates).astype(np.int64)
    levels = list(kind.grid_map)
    indices = np.vectorize(levels.index)(grid)
    return (indices << (bits * np.arange(n_coordinates))).sum(axis=1).astype("<u2").tobytes()


def main():
    default = pathlib.Path(__file__).parent.parent / "crates/refrain-tensor/src/quant/grids.bin"
    out = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else default
    out.write_bytes(b"".join(packed(*grid) for grid in GRIDS))
    print(f"{out}: {out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
