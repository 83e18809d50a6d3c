// planes.cuh: where rows of 16 bits lie for the products of many rows (batch.cu).
//
// A plane has 128 columns of all rows. Its 16 chunks of eight columns lie in another order: chunk 4 t + j is at 4 j + t,
// with the halves of odd rows exchanged. Lane 4 g + t of a warp reads chunk j of its 32 columns of row g, so that eight lanes
// side by side find theirs in different banks; and a plane is copied to shared memory as it lies.
#pragma once
#include "dtype.cuh"

const u32 PLANE = 128;  // columns
const u32 PLANE_BYTES = 2 * PLANE;

// Chunk j of lane t of a row, in bytes from the start of the plane.
inline u32 chunk_at(u32 row, u32 t, u32 j) { return row * PLANE_BYTES + 16 * ((4 * j + t) ^ (4 * (row & 1))); }

// Where an element lies among rows of `n_cols` columns: row after row, or in planes of `plane_rows` rows. Those that follow
// up to the next multiple of eight lie behind it.
inline u64 narrow_at(u32 row, u32 column, u32 n_cols, u32 plane_rows) {
    if (plane_rows == 0) return (u64)row * n_cols + column;
    u32 chunk = column % PLANE / 8;
    return (u64)(column / PLANE) * plane_rows * PLANE + chunk_at(row, chunk / 4, chunk % 4) / 2 + column % 8;
}
