// linear.cu: y_i = x w_i^T for up to four w
//
//   y0 .. y3  [m, n]   f32; unused ones null
//   x         [m, k]   f32, rows of consecutive elements at x_rows.start(i)
//   w0 .. w3  [n, k]   plain or quantised, dense, in file layout; unused ones null
//   ends               end of each y's columns, counted over all of them
//
// Launch       grid (ceil(ends[3] / (4 C)), ceil(m / M)), block (128), shared 0: one warp for C columns and M
//              rows
// Requires     every w 16-byte aligned; k a multiple of the block length; for quantised w, rows of x 16-byte
//              aligned. The kernel loads the first parts of w before it waits for x: w must be a weight, or
//              the launch must not overlap the previous one
// Aliasing     none
// Accumulation f32
// Determinism  same bits every run, for every m and next to any other columns. Lane l adds parts l, l + 32,
//              .. of eight elements, then the warp's sums are reduced as a tree: the order depends only on k
// Capture      safe
#include "overlap.cuh"
#include "plain.cuh"
#include "reduce.cuh"
#include "view.cuh"

const u32 WARPS = 4;

struct Ends {
    u32 at[4];
};

// A column of one y, and its row of w.
struct Column {
    const u8* w;
    float* y;
    u32 n;  // columns of that y; 0: past the end
};

// Rows of x that a warp multiplies with its columns.
template <int M> struct Inputs {
    const float* row[M];
    u64 bits;  // OR of all addresses

    inline Inputs(const float* x, const Rows& rows, u32 first, u32 m) {
        bits = 0;
#pragma unroll
        for (int i = 0; i < M; i++) {
            // Rows past the end repeat the last one; their results are not stored.
            row[i] = x + rows.start(min(first + i, m - 1));
            bits |= (u64)row[i];
        }
    }
};

// Multiplies eight elements of each column with those of each row.
template <typename Q, int M, int C>
inline void add_products(const typename Q::Raw* raw, const Inputs<M>& x, u32 at, u32 part, float (*acc)[M]) {
    u32 start = at / (Q::LEN / 8) * Q::LEN;
    float v[C][8];
#pragma unroll
    for (int c = 0; c < C; c++) Q::decode(raw[c], part, v[c]);
#pragma unroll
    for (int i = 0; i < M; i++) {
        float4 a = *(const float4*)(x.row[i] + start + Q::first(part));
        float4 b = *(const float4*)(x.row[i] + start + Q::second(part));
        float u[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
        for (int c = 0; c < C; c++) {
#pragma unroll
            for (int e = 0; e < 8; e++) acc[c][i] = __fmaf_rn(v[c][e], u[e], acc[c][i]);
        }
    }
}

// Sums over whole parts, with DEPTH parts of each column in flight.
template <typename Q, int M, int C, int DEPTH>
inline void whole_sums(const Column* columns, const Inputs<M>& x, u32 k, float (*acc)[M]) {
    const u32 parts = Q::LEN / 8;
    u32 lane = threadIdx.x % 32, n = k / 8;
    // 32 is a multiple of the number of parts in a block, so a lane always has the same part.
    u32 part = lane % parts;
    typename Q::Raw raw[DEPTH][C];
    auto load = [&](int d, u32 at) {
#pragma unroll
        for (int c = 0; c < C; c++) {
            if (at < n) raw[d][c] = Q::load(columns[c].w + (u64)(at / parts) * Q::BYTES, part);
        }
    };
    auto add = [&](int d, u32 at) {
        typename Q::Raw now[C];
#pragma unroll
        for (int c = 0; c < C; c++) now[c] = raw[d][c];
        load(d, at + 32 * DEPTH);
        add_products<Q, M, C>(now, x, at, part, acc);
    };
#pragma unroll
    for (int d = 0; d < DEPTH; d++) load(d, lane + 32 * d);
    wait_for_previous();
    // One loop body for full and partial iterations: a kernel that runs for microseconds must not wait for
    // instruction fetches.
#pragma unroll 1
    for (u32 base = lane; base < n; base += 32 * DEPTH) {
#pragma unroll
        for (int d = 0; d < DEPTH; d++) {
            if (base + 32 * d < n) add(d, base + 32 * d);
        }
    }
}

// The same sums in the same order, element by element, for rows that are unaligned or end within a part.
template <typename T, int M, int C>
inline void ragged_sums(const Column* columns, const Inputs<M>& x, u32 k, float (*acc)[M]) {
    wait_for_previous();
    for (u32 at = threadIdx.x % 32 * 8; at < k; at += 256) {
        for (u32 e = at; e < min(at + 8, k); e++) {
#pragma unroll
            for (int c = 0; c < C; c++) {
                float v = to_f32(((const T*)columns[c].w)[e]);
#pragma unroll
                for (int i = 0; i < M; i++) acc[c][i] = __fmaf_rn(v, x.row[i][e], acc[c][i]);
            }
        }
    }
}

template <typename Q, int M, int C, int DEPTH>
inline void linear_sums(float* const* y, const float* x, const u8* const* w, const Rows& x_rows, const Ends& ends, u32 m,
                   u32 k) {
    let_next_start();
    u64 row_bytes = (u64)k * Q::BYTES / Q::LEN;
    Column columns[C];
#pragma unroll
    for (int c = 0; c < C; c++) {
        u32 col = (blockIdx.x * WARPS + threadIdx.x / 32) * C + c, begin = 0, end = ends.at[0];
        columns[c] = Column{w[0], y[0], ends.at[0]};
#pragma unroll
        for (int i = 1; i < 4; i++) {
            if (col >= ends.at[i - 1] && col < ends.at[i]) {
                begin = ends.at[i - 1];
                end = ends.at[i];
                columns[c] = Column{w[i], y[i], end - begin};
            }
        }
        // Columns past the end repeat the first one; their results are not stored.
        bool there = col < end;
        columns[c].w += (there ? col - begin : 0) * row_bytes;
        columns[c].y += there ? col - begin : 0;
        if (!there) columns[c].n = 0;
    }
    u32 row = blockIdx.y * M;
    Inputs<M> inputs(x, x_rows, row, m);
    float acc[C][M] = {};
    if (!Ragged<Q>::ALLOWED || k % 8 == 0 && inputs.bits % 16 == 0) {
        whole_sums<Q, M, C, DEPTH>(columns, inputs, k, acc);
    } else {
        ragged_sums<typename Ragged<Q>::Element, M, C>(columns, inputs, k, acc);
    }
#pragma unroll
    for (int c = 0; c < C; c++) {
#pragma unroll
        for (int i = 0; i < M; i++) {
            float sum = warp_reduce(acc[c][i], Add());
            bool stored = threadIdx.x % 32 == 0 && columns[c].n != 0 && row + i < m;
            if (stored) columns[c].y[(u64)(row + i) * columns[c].n] = sum;
        }
    }
}

#define LINEAR(name, Q, variant, M, C, DEPTH)                                                                    \
    extern "C" __global__ __launch_bounds__(128, M == 1 ? 6 : 4) void linear_##variant##_##name(                 \
        float* y0, float* y1, float* y2, float* y3, const float* x, const u8* __restrict__ w0,                   \
        const u8* __restrict__ w1, const u8* __restrict__ w2, const u8* __restrict__ w3, Rows x_rows, Ends ends, \
        u32 m, u32 k) {                                                                                          \
        float* const y[4] = {y0, y1, y2, y3};                                                                    \
        const u8* const w[4] = {w0, w1, w2, w3};                                                                 \
        linear_sums<Q, M, C, DEPTH>(y, x, w, x_rows, ends, m, k);                                                     \
    }
// The number of parts in flight is limited by registers and code size.
#define QUANT(name, Q)             \
    LINEAR(name, Q, m1, 1, 1, 4)   \
    LINEAR(name, Q, m1c2, 1, 2, 2) \
    LINEAR(name, Q, m8, 8, 1, 2)
#define PLAIN(name, T)                    \
    LINEAR(name, Plain<T>, m1, 1, 1, 8)   \
    LINEAR(name, Plain<T>, m1c2, 1, 2, 4) \
    LINEAR(name, Plain<T>, m8, 8, 1, 2)

// unit f32
QUANT(f32, Plain<float>)
// unit f16
PLAIN(f16, F16)
// unit bf16
PLAIN(bf16, BF16)
// unit q2_k
QUANT(q2_k, Q2_K)
// unit iq2_xxs
QUANT(iq2_xxs, IQ2_XXS)
// unit iq2_xs
QUANT(iq2_xs, IQ2_XS)
// unit iq2_s
QUANT(iq2_s, IQ2_S)
// unit iq3_xxs
QUANT(iq3_xxs, IQ3_XXS)
// unit iq3_s
QUANT(iq3_s, IQ3_S)
