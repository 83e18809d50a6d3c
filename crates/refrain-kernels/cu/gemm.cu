// gemm.cu: y_i = x w_i^T for up to four w, on tensor cores
//
//   y0 .. y3  [m, n]         f32; unused ones null
//   partials  [S, m, sum n]  f32; null if the number of splits S is 1
//   x         [m, k]         T, dense
//   w0 .. w3  [n, k]         T, dense; unused ones null
//   ends                     end of each y's columns, counted over all of them
//
// A block computes ROWS rows and 128 columns. Its stages in shared memory are 64 elements deep, and several
// are in flight. Rows of 128 bytes are stored with their 16-byte chunks swizzled (chunk ^ row % 8), so that
// eight rows of a chunk lie in different banks.
//
// Launch       grid (ceil(m / ROWS), tiles of 128 columns of each y, S), block (128), shared as shared_bytes
//              below. reduce: grid (ceil(m sum n / 1024)), block (256), shared 0
// Requires     x and every w 16-byte aligned; k a multiple of 8; k_split a multiple of 64
// Aliasing     none
// Accumulation f32, in steps of 16 elements
// Determinism  same bits every run for the same tile and S: split s sums elements s k_split .. of each row in
//              order, and splits are added in order
// Capture      safe
#include "mma.cuh"
#include "overlap.cuh"

const u32 THREADS = 128, COLS = 128, DEPTH = 64, ROW_BYTES = 2 * DEPTH;

struct Ends {
    u32 at[4];
};

// A block's columns: the index of w and y, and the position within them.
struct Columns {
    u32 part, begin, n, col;
};

inline Columns find_columns(const Ends& ends) {
    Columns c = {0, 0, ends.at[0], 0};
    u32 tile = blockIdx.y, before = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        u32 begin = i == 0 ? 0 : ends.at[i - 1], n = ends.at[i] - begin, tiles = (n + COLS - 1) / COLS;
        if (tile >= before && tile < before + tiles) c = Columns{(u32)i, begin, n, (tile - before) * COLS};
        before += tiles;
    }
    return c;
}

inline u32 swizzled(u32 row, u32 chunk) { return row * ROW_BYTES + ((chunk ^ row % 8) << 4); }

// Loads one operand's part of a stage: ROWS rows from `first` on, elements `at` .. `at + 64`, of a matrix [n,
// k].
template <int ROWS, typename T>
inline void load_rows(u8* to, const T* from, u32 first, u32 n, u32 k, u32 at, u32 end) {
    u32 chunk = threadIdx.x % 8, row = threadIdx.x / 8, column = at + 8 * chunk;
    const T* source = from + (u64)(first + row) * k + column;
    bool inside = column < end;
#pragma unroll
    for (int i = 0; i < ROWS / 16; i++) {
        bool there = inside && first + row + 16 * i < n;
        copy_async(to + swizzled(row + 16 * i, chunk), there ? source + (u64)(16 * i) * k : from, there);
    }
}

template <typename T, int ROWS, int STAGES>
inline void gemm(float* const* ys, float* partials, const T* x, const T* const* ws, const Ends& ends, u32 m, u32 k,
                 u32 k_split) {
    // 2 x 2 warps, each with half of the rows and 64 columns.
    const int WARP_ROWS = ROWS / 2, MT = WARP_ROWS / 16, NT = 8;
    const u32 STAGE_BYTES = (ROWS + COLS) * ROW_BYTES;
    DYNAMIC_SHARED(pool);
    start();
    Columns c = find_columns(ends);
    const T* w = ws[0];
    float* y = ys[0];
#pragma unroll
    for (int i = 1; i < 4; i++) {
        if (c.part == i) {
            w = ws[i];
            y = ys[i];
        }
    }
    u32 first_row = blockIdx.x * ROWS, begin = blockIdx.z * k_split, end = min(begin + k_split, k);
    u32 n_steps = (end - begin + DEPTH - 1) / DEPTH;
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u32 warp_row = warp % 2 * WARP_ROWS, warp_col = warp / 2 * 64;

    auto load = [&](u32 step) {
        if (step < n_steps) {
            u8* stage = pool + step % STAGES * STAGE_BYTES;
            load_rows<ROWS>(stage, x, first_row, m, k, begin + step * DEPTH, end);
            load_rows<COLS>(stage + ROWS * ROW_BYTES, w, c.col, c.n, k, begin + step * DEPTH, end);
        }
        copies_end_group();
    };
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) load(s);

    float acc[MT][NT][4] = {};
#pragma unroll 1
    for (u32 step = 0; step < n_steps; step++) {
        copies_wait<STAGES - 2>();
        __syncthreads();
        // Into the stage that every warp left before the barrier.
        load(step + STAGES - 1);
        const u8* rows = pool + step % STAGES * STAGE_BYTES;
        const u8* cols = rows + ROWS * ROW_BYTES;
#pragma unroll
        for (int part = 0; part < DEPTH / 16; part++) {
            u32 a[MT][4], b[NT / 2][4];
#pragma unroll
            for (int i = 0; i < MT; i++) {
                load_matrices(a[i], rows + swizzled(warp_row + 16 * i + lane % 16, 2 * part + lane / 16));
            }
#pragma unroll
            for (int j = 0; j < NT / 2; j++) {
                u32 row = warp_col + 16 * j + lane / 16 * 8 + lane % 8;
                load_matrices(b[j], cols + swizzled(row, 2 * part + lane / 8 % 2));
            }
#pragma unroll
            for (int i = 0; i < MT; i++) {
#pragma unroll
                for (int j = 0; j < NT; j++) multiply(acc[i][j], a[i], &b[j / 2][j % 2 * 2], T());
            }
        }
    }
    copies_wait<0>();

    u64 stride = c.n;
    if (partials != nullptr) {
        stride = ends.at[3];
        y = partials + (u64)blockIdx.z * m * stride + c.begin;
    }
    bool pairs = stride % 2 == 0 && (u64)(y + c.col) % 8 == 0;
#pragma unroll
    for (int i = 0; i < MT; i++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u32 row = first_row + warp_row + 16 * i + lane / 4 + 8 * half;
            if (row < m) {
                float* out = y + row * stride;
#pragma unroll
                for (int j = 0; j < NT; j++) {
                    u32 col = c.col + warp_col + 8 * j + lane % 4 * 2;
                    const float* v = acc[i][j] + 2 * half;
                    if (pairs && col + 1 < c.n) {
                        *(float2*)(out + col) = make_float2(v[0], v[1]);
                    } else {
                        if (col < c.n) out[col] = v[0];
                        if (col + 1 < c.n) out[col + 1] = v[1];
                    }
                }
            }
        }
    }
}

// shared_bytes: STAGES (ROWS + 128) 128; src/gemm.rs has the same numbers.
#define GEMM(rows, name, T, STAGES)                                                                               \
    extern "C" __global__ __launch_bounds__(128, 2) void gemm_m##rows##_##name(                                  \
        float* y0, float* y1, float* y2, float* y3, float* partials, const T* __restrict__ x,                    \
        const T* __restrict__ w0, const T* __restrict__ w1, const T* __restrict__ w2, const T* __restrict__ w3,  \
        Ends ends, u32 m, u32 k, u32 k_split) {                                                                  \
        float* const y[4] = {y0, y1, y2, y3};                                                                    \
        const T* const w[4] = {w0, w1, w2, w3};                                                                  \
        gemm<T, rows, STAGES>(y, partials, x, w, ends, m, k, k_split);                                           \
    }

// unit reduce
extern "C" __global__ __launch_bounds__(256) void gemm_reduce_f32(float* y0, float* y1, float* y2, float* y3,
                                                                 const float* partials, Ends ends, u32 m, u32 n_splits) {
    start();
    float* const y[4] = {y0, y1, y2, y3};
    u64 n = ends.at[3], all = n * m, first = ((u64)blockIdx.x * 256 + threadIdx.x) * 4;
#pragma unroll
    for (int e = 0; e < 4; e++) {
        u64 at = first + e;
        if (at < all) {
            float sum = 0.0f;
            for (u32 s = 0; s < n_splits; s++) sum += partials[s * all + at];
            u32 row = (u32)(at / n), col = (u32)(at % n);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                u32 begin = i == 0 ? 0 : ends.at[i - 1], end = ends.at[i];
                if (col >= begin && col < end) y[i][(u64)row * (end - begin) + (col - begin)] = sum;
            }
        }
    }
}

// unit f16
GEMM(64, f16, F16, 4)
GEMM(128, f16, F16, 3)
// unit bf16
GEMM(64, bf16, BF16, 4)
GEMM(128, bf16, BF16, 3)
