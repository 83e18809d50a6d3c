// planes.cuh: layout of 16-bit activation rows for batch.cu
//
// A plane has 128 columns of `plane_rows` rows. It is divided into 16 chunks of eight columns; a chunk has 16
// bytes of each row, row after row. What a tensor core instruction reads is therefore contiguous, and a plane
// is copied to shared memory unchanged.
//
// Multiplication s = 0 .. 7 of a plane takes chunks 2 s and 2 s + 1. The order of columns follows the packed
// weights: lane t = 0 .. 3 of four decodes the weights of columns 32 t .. 32 t + 31, four at a time. Column
// 32 t + 4 s + e is therefore element 2 t + e of chunk 2 s for e = 0, 1, and element 2 t + e - 2 of chunk 2 s
// + 1 for e = 2, 3.
//
// Rows past `plane_rows` are in further planes, after those of all columns.
#pragma once
#include "dtype.cuh"

const u32 PLANE = 128;  // columns
const u32 PLANE_CHUNKS = PLANE / 8;
const u32 PLANE_BYTES = 2 * PLANE;  // per row

// Returns the index of an element in rows of n_cols columns: dense (plane_rows 0), or in planes. plane_rows
// is a power of two.
inline u64 narrow_at(u32 row, u32 column, u32 n_cols, u32 plane_rows) {
    if (plane_rows == 0) return (u64)row * n_cols + column;
    u32 tile = row / plane_rows, c = column % PLANE, t = c / 32, s = c % 32 / 4, e = c % 4;
    u32 chunk = 2 * s + e / 2, plane = tile * (n_cols / PLANE) + column / PLANE;
    return ((u64)plane * PLANE_CHUNKS + chunk) * (8 * plane_rows) + 8 * (row - tile * plane_rows) + 2 * t + e % 2;
}

// Stores four elements, starting at a column that is a multiple of four; `low` has the first two.
inline void narrow_store(u16* y, u32 row, u32 column, u32 n_cols, u32 plane_rows, u32 low, u32 high) {
    u16* to = y + narrow_at(row, column, n_cols, plane_rows);
    if (plane_rows == 0) {
        *(uint2*)to = make_uint2(low, high);
    } else {
        *(u32*)to = low;
        *(u32*)(to + 8 * plane_rows) = high;
    }
}
