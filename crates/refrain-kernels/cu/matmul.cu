// matmul.cu: y = a b + c for matrices with any strides, batched over the outer dimensions
//
//   y  [n_batch, m, n]  T, dense
//   c  as y, or null
//   a  [m, k]           T, element (i, j) of batch z at batch.a(z) + i a_row + j a_col
//   b  [k, n]           T, element (i, j) of batch z at batch.b(z) + i b_row + j b_col
//
// Shared memory holds an operand in its own layout: in lines of consecutive elements, along k (DEEP) or
// across it, each padded by 16 bytes, so that eight lines of a chunk lie in different banks. Operands stored
// across k are transposed when they are loaded to registers.
//
// Launch       16 bits: grid (ceil(m / 64), ceil(n / 128), n_batch), block (128), shared as shared_bytes
//              below. f32: grid (ceil(m / 64), ceil(n / 64), n_batch), block (256), shared 0
// Requires     with VECTOR_A (VECTOR_B): runs of consecutive elements of a (b) start 16-byte aligned
// Aliasing     y may be c: one thread reads an element before it writes it
// Accumulation f32, in steps of 16 elements (f32: one)
// Determinism  same bits every run: steps are added in order
// Capture      safe
#include "mma.cuh"
#include "view.cuh"

struct Sizes {
    u32 m, n, k, a_row, a_col, b_row, b_col;
    u32 flags;
};
const u32 VECTOR_A = 1, VECTOR_B = 2;

const u32 THREADS = 128, TILE_ROWS = 64, TILE_COLS = 128, DEPTH = 64, STAGES = 3;

// Stride of the lines of an operand's tile, in bytes.
template <int ROWS, bool DEEP> struct Lines {
    static const u32 STRIDE = 2 * (DEEP ? DEPTH : ROWS) + 16;
};

// Loads one operand's part of a stage: rows first .. first + ROWS, elements at .. at + 64 along k; zeros past
// n_rows and end.
template <int ROWS, bool DEEP, typename T>
inline void load_tile(u8* to, const T* from, u32 first, u32 n_rows, u32 row_stride, u32 at, u32 end, u32 k_stride,
                      bool vector) {
    const u32 CHUNKS = (DEEP ? DEPTH : ROWS) / 8, N = ROWS * DEPTH / 8 / THREADS;
    u8* place;
    // Returns the address of chunk i and sets n, its number of elements in range.
    auto find = [&](u32 i, u32& n) {
        u32 line = i / CHUNKS, chunk = i % CHUNKS;
        u32 row = first + (DEEP ? line : 8 * chunk), k = at + (DEEP ? 8 * chunk : line);
        n = row < n_rows && k < end ? min(8u, DEEP ? end - k : n_rows - row) : 0;
        place = to + line * Lines<ROWS, DEEP>::STRIDE + 16 * chunk;
        return from + (n > 0 ? (u64)row * row_stride + (u64)k * k_stride : 0);
    };
    u32 n;
    if (vector) {
#pragma unroll
        for (int j = 0; j < N; j++) {
            const T* source = find(threadIdx.x + THREADS * j, n);
            copy_async_bytes(place, source, 2 * n);
        }
    } else {
        u64 step = DEEP ? k_stride : row_stride;
#pragma unroll 1
        for (int j = 0; j < N; j++) {
            const T* source = find(threadIdx.x + THREADS * j, n);
            u32 words[4];
#pragma unroll
            for (int w = 0; w < 4; w++) {
                u32 low = 2 * w < n ? source[2 * w * step].bits : 0;
                u32 high = 2 * w + 1 < n ? source[(2 * w + 1) * step].bits : 0;
                words[w] = low | high << 16;
            }
            *(uint4*)place = make_uint4(words[0], words[1], words[2], words[3]);
        }
    }
}

template <typename T, bool DEEP_A, bool DEEP_B>
inline void matmul(T* y, const T* a, const T* b, const Walk& batch, const Sizes& s, const T* c) {
    // 2 x 2 warps, each with 32 rows and 64 columns.
    const int MT = 2, NT = 8;
    const u32 A_STRIDE = Lines<TILE_ROWS, DEEP_A>::STRIDE, B_STRIDE = Lines<TILE_COLS, DEEP_B>::STRIDE;
    const u32 A_BYTES = TILE_ROWS * 144, STAGE_BYTES = A_BYTES + TILE_COLS * 144;
    DYNAMIC_SHARED(pool);
    start();
    u32 a_at, b_at;
    batch.at(blockIdx.z, a_at, b_at);
    a += a_at;
    b += b_at;
    y += (u64)blockIdx.z * s.m * s.n;
    if (c != nullptr) c += (u64)blockIdx.z * s.m * s.n;
    u32 first_row = blockIdx.x * TILE_ROWS, first_col = blockIdx.y * TILE_COLS;
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u32 warp_row = warp % 2 * 32, warp_col = warp / 2 * 64;
    u32 n_steps = (s.k + DEPTH - 1) / DEPTH;
    bool vector_a = (s.flags & VECTOR_A) != 0, vector_b = (s.flags & VECTOR_B) != 0;

    auto load = [&](u32 step) {
        if (step < n_steps) {
            u8* stage = pool + step % STAGES * STAGE_BYTES;
            load_tile<TILE_ROWS, DEEP_A>(stage, a, first_row, s.m, s.a_row, step * DEPTH, s.k, s.a_col, vector_a);
            load_tile<TILE_COLS, DEEP_B>(stage + A_BYTES, b, first_col, s.n, s.b_col, step * DEPTH, s.k, s.b_row, vector_b);
        }
        copies_end_group();
    };
#pragma unroll 1
    for (int stage = 0; stage < STAGES - 1; stage++) load(stage);

    float acc[MT][NT][4] = {};
#pragma unroll 1
    for (u32 step = 0; step < n_steps; step++) {
        copies_wait<STAGES - 2>();
        __syncthreads();
        // Into the stage that every warp left before the barrier.
        load(step + STAGES - 1);
        SharedPtr rows = shared_ptr(pool) + step % STAGES * STAGE_BYTES, cols = rows + A_BYTES;
#pragma unroll
        for (int part = 0; part < DEPTH / 16; part++) {
            u32 left[MT][4], right[NT / 2][4];
#pragma unroll
            for (int i = 0; i < MT; i++) {
                u32 row = warp_row + 16 * i;
                if (DEEP_A) {
                    load_matrices(left[i], rows + (row + lane % 16) * A_STRIDE + 32 * part + lane / 16 * 16);
                } else {
                    u32 line = 16 * part + lane / 16 * 8 + lane % 8;
                    load_matrices_transposed(left[i], rows + line * A_STRIDE + 2 * row + lane / 8 % 2 * 16);
                }
            }
#pragma unroll
            for (int j = 0; j < NT / 2; j++) {
                u32 col = warp_col + 16 * j;
                if (DEEP_B) {
                    u32 line = col + lane / 16 * 8 + lane % 8;
                    load_matrices(right[j], cols + line * B_STRIDE + 32 * part + lane / 8 % 2 * 16);
                } else {
                    u32 line = 16 * part + lane / 8 % 2 * 8 + lane % 8;
                    load_matrices_transposed(right[j], cols + line * B_STRIDE + 2 * col + lane / 16 * 16);
                }
            }
#pragma unroll
            for (int i = 0; i < MT; i++) {
#pragma unroll
                for (int j = 0; j < NT; j++) multiply(acc[i][j], left[i], &right[j / 2][j % 2 * 2], T());
            }
        }
    }
    copies_wait<0>();

    bool pairs = s.n % 2 == 0 && (u64)y % 4 == 0;
#pragma unroll
    for (int i = 0; i < MT; i++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u32 row = first_row + warp_row + 16 * i + lane / 4 + 8 * half;
            if (row < s.m) {
                T* out = y + (u64)row * s.n;
                const T* more = c == nullptr ? nullptr : c + (u64)row * s.n;
#pragma unroll
                for (int j = 0; j < NT; j++) {
                    u32 col = first_col + warp_col + 8 * j + lane % 4 * 2;
                    float* v = acc[i][j] + 2 * half;
                    if (more != nullptr) {
                        if (col < s.n) v[0] += to_f32(more[col]);
                        if (col + 1 < s.n) v[1] += to_f32(more[col + 1]);
                    }
                    if (pairs && col < s.n) {
                        *(u32*)(out + col) = pack(v[0], v[1], T());
                    } else {
                        if (col < s.n) out[col] = from_f32<T>(v[0]);
                        if (col + 1 < s.n) out[col + 1] = from_f32<T>(v[1]);
                    }
                }
            }
        }
    }
}

// shared_bytes: 3 (64 + 128) 144; src/matmul.rs has the same numbers. The first word of the name is the
// layout of a, the second that of b: deep along k, or flat across it.
#define MATMUL(a_layout, DEEP_A, b_layout, DEEP_B, name, T)                                                      \
    extern "C" __global__ __launch_bounds__(128, 2) void matmul_##a_layout##_##b_layout##_##name(                \
        T* y, const T* a, const T* b, Walk batch, Sizes s, const T* c) {           \
        matmul<T, DEEP_A, DEEP_B>(y, a, b, batch, s, c);                                                     \
    }

// unit f32
const u32 SIDE = 64, SLICE = 16;

// Loads a slice of an operand: rows first .. first + 64, elements at .. at + 16 along k. Threads follow the
// shorter stride.
inline void load_slice(float (*to)[SIDE + 4], const float* from, u32 first, u32 n_rows, u32 row_stride, u32 at, u32 end,
                       u32 k_stride) {
#pragma unroll
    for (int j = 0; j < SIDE * SLICE / 256; j++) {
        u32 i = threadIdx.x + 256 * j;
        bool deep = k_stride <= row_stride;
        u32 r = deep ? i / SLICE : i % SIDE, d = deep ? i % SLICE : i / SIDE;
        bool there = first + r < n_rows && at + d < end;
        to[d][r] = there ? from[(u64)(first + r) * row_stride + (u64)(at + d) * k_stride] : 0.0f;
    }
}

extern "C" __global__ __launch_bounds__(256) void matmul_f32(float* y, const float* a,
                                                             const float* b, Walk batch, Sizes s,
                                                             const float* more) {
    __shared__ __align__(16) float left[2][SLICE][SIDE + 4], right[2][SLICE][SIDE + 4];
    start();
    u32 a_at, b_at;
    batch.at(blockIdx.z, a_at, b_at);
    a += a_at;
    b += b_at;
    y += (u64)blockIdx.z * s.m * s.n;
    if (more != nullptr) more += (u64)blockIdx.z * s.m * s.n;
    u32 first_row = blockIdx.x * SIDE, first_col = blockIdx.y * SIDE;
    // Four rows and four columns per thread.
    u32 row = threadIdx.x / 16 * 4, col = threadIdx.x % 16 * 4;
    auto load = [&](u32 at, u32 buffer) {
        load_slice(left[buffer], a, first_row, s.m, s.a_row, at, s.k, s.a_col);
        load_slice(right[buffer], b, first_col, s.n, s.b_col, at, s.k, s.b_row);
    };
    float acc[4][4] = {};
    load(0, 0);
#pragma unroll 1
    for (u32 at = 0, buffer = 0; at < s.k; at += SLICE, buffer ^= 1) {
        __syncthreads();
        if (at + SLICE < s.k) load(at + SLICE, buffer ^ 1);
#pragma unroll
        for (int d = 0; d < SLICE; d++) {
            float4 x = *(const float4*)&left[buffer][d][row], w = *(const float4*)&right[buffer][d][col];
            float xs[4] = {x.x, x.y, x.z, x.w}, ws[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
            for (int i = 0; i < 4; i++) {
#pragma unroll
                for (int j = 0; j < 4; j++) acc[i][j] = __fmaf_rn(xs[i], ws[j], acc[i][j]);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            u32 r = first_row + row + i, c = first_col + col + j;
            u64 at = (u64)r * s.n + c;
            if (r < s.m && c < s.n) y[at] = acc[i][j] + (more == nullptr ? 0.0f : more[at]);
        }
    }
}
// unit deep_deep_f16
MATMUL(deep, true, deep, true, f16, F16)
// unit deep_flat_f16
MATMUL(deep, true, flat, false, f16, F16)
// unit flat_deep_f16
MATMUL(flat, false, deep, true, f16, F16)
// unit flat_flat_f16
MATMUL(flat, false, flat, false, f16, F16)
// unit deep_deep_bf16
MATMUL(deep, true, deep, true, bf16, BF16)
// unit deep_flat_bf16
MATMUL(deep, true, flat, false, bf16, BF16)
// unit flat_deep_bf16
MATMUL(flat, false, deep, true, bf16, BF16)
// unit flat_flat_bf16
MATMUL(flat, false, flat, false, bf16, BF16)
