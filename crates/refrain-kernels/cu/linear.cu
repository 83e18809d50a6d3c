// linear.cu: y = x w^T
//
//   y  [m, n]   f32
//   x  [m, k]   f32, rows of consecutive elements at x_rows.start(i)
//   w  [n, k]   plain or quantised, dense, as in the file
//
// Launch    grid (ceil(n / 4), ceil(m / M)), block (128), shared 0: one warp per column of y, M rows of x at once
// Requires  w at a multiple of 16 bytes; k whole blocks; quantised w: rows of x at multiples of 16 bytes
// Aliasing  none
// Sums in f32. Lane l takes parts l, l + 32, .. of eight elements, then the warp's sums are added as a tree: the order
// depends on k alone, so a row has the same bits every run and for every m. Capture: safe.
#include "quant.cuh"
#include "reduce.cuh"
#include "view.cuh"

// Eight elements of a plain row: at once, or one by one as far as there are any.
template <typename T, bool WHOLE> inline void load_plain(const T* p, u32 n_left, float* out) {
    if (WHOLE) {
        if (sizeof(T) == 4) {
            float4 a = *(const float4*)p, b = *((const float4*)p + 1);
            out[0] = a.x, out[1] = a.y, out[2] = a.z, out[3] = a.w;
            out[4] = b.x, out[5] = b.y, out[6] = b.z, out[7] = b.w;
        } else {
            uint4 v = *(const uint4*)p;
            u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int i = 0; i < 8; i++) {
                T x;
                *(u16*)&x = (u16)(words[i / 2] >> (16 * (i % 2)));
                out[i] = to_f32(x);
            }
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < 8; i++) out[i] = i < n_left ? to_f32(p[i]) : 0.0f;
}

template <int M> inline void store_sums(float* y, const float* acc, u32 row, u32 m, u32 n, u32 col) {
#pragma unroll
    for (int i = 0; i < M; i++) {
        float sum = warp_reduce(acc[i], Add());
        if (threadIdx.x % 32 == 0 && row + i < m) y[(u64)(row + i) * n + col] = sum;
    }
}

// The sums of a lane. With or without WHOLE the elements are added in the same order.
template <typename T, int M, bool WHOLE>
inline void plain_sums(const T* w_row, const float* const* x_row, u32 k, float* acc) {
#pragma unroll(M == 1 ? 4 : 1)
    for (u32 at = threadIdx.x % 32 * 8; at < k; at += 256) {
        float v[8];
        load_plain<T, WHOLE>(w_row + at, k - at, v);
#pragma unroll
        for (int i = 0; i < M; i++) {
            float u[8];
            load_plain<float, WHOLE>(x_row[i] + at, k - at, u);
#pragma unroll
            for (int e = 0; e < 8; e++) acc[i] = __fmaf_rn(v[e], u[e], acc[i]);
        }
    }
}

template <typename T, int M>
inline void linear_plain(float* y, const float* x, const T* __restrict__ w, const Rows& x_rows, u32 m, u32 n, u32 k) {
    u32 col = blockIdx.x * 4 + threadIdx.x / 32, row = blockIdx.y * M;
    if (col >= n) return;
    const T* w_row = w + (u64)col * k;
    const float* x_row[M];
    u64 bits = 0;
#pragma unroll
    for (int i = 0; i < M; i++) {
        // Rows past the end are computed like the last one and not stored.
        x_row[i] = x + x_rows.start(min(row + i, m - 1));
        bits |= (u64)x_row[i];
    }
    float acc[M] = {};
    if (k % 8 == 0 && bits % 16 == 0) {
        plain_sums<T, M, true>(w_row, x_row, k, acc);
    } else {
        plain_sums<T, M, false>(w_row, x_row, k, acc);
    }
    store_sums<M>(y, acc, row, m, n, col);
}

template <typename Q, int M>
inline void linear_quant(float* y, const float* x, const u8* __restrict__ w, const Rows& x_rows, u32 m, u32 n, u32 k) {
    const u32 parts = Q::LEN / 8;
    u32 col = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32, row = blockIdx.y * M;
    if (col >= n) return;
    const u8* w_row = w + (u64)col * (k / Q::LEN) * Q::BYTES;
    const float* x_row[M];
#pragma unroll
    for (int i = 0; i < M; i++) x_row[i] = x + x_rows.start(min(row + i, m - 1));
    float acc[M] = {};
#pragma unroll(M == 1 ? 4 : 1)
    for (u32 at = lane; at < k / 8; at += 32) {
        u32 block = at / parts, part = at % parts;
        float v[8];
        Q::decode(w_row + (u64)block * Q::BYTES, part, v);
        u32 first = block * Q::LEN + Q::first(part), second = block * Q::LEN + Q::second(part);
#pragma unroll
        for (int i = 0; i < M; i++) {
            float4 a = *(const float4*)(x_row[i] + first), b = *(const float4*)(x_row[i] + second);
            acc[i] = __fmaf_rn(v[0], a.x, acc[i]);
            acc[i] = __fmaf_rn(v[1], a.y, acc[i]);
            acc[i] = __fmaf_rn(v[2], a.z, acc[i]);
            acc[i] = __fmaf_rn(v[3], a.w, acc[i]);
            acc[i] = __fmaf_rn(v[4], b.x, acc[i]);
            acc[i] = __fmaf_rn(v[5], b.y, acc[i]);
            acc[i] = __fmaf_rn(v[6], b.z, acc[i]);
            acc[i] = __fmaf_rn(v[7], b.w, acc[i]);
        }
    }
    store_sums<M>(y, acc, row, m, n, col);
}

#define LINEAR(name, body, element, M)                                                                            \
    extern "C" __global__ __launch_bounds__(128) void linear_m##M##_##name(                                       \
        float* y, const float* x, const element* w, Rows x_rows, u32 m, u32 n, u32 k) {                           \
        body(y, x, w, x_rows, m, n, k);                                                                           \
    }
#define PLAIN(name, T)                             \
    LINEAR(name, (linear_plain<T, 1>), T, 1)       \
    LINEAR(name, (linear_plain<T, 8>), T, 8)
#define QUANT(name, Q)                             \
    LINEAR(name, (linear_quant<Q, 1>), u8, 1)      \
    LINEAR(name, (linear_quant<Q, 8>), u8, 8)

PLAIN(f32, float)
PLAIN(f16, F16)
PLAIN(bf16, BF16)
QUANT(q4_0, Q4_0)
QUANT(q4_1, Q4_1)
QUANT(q5_0, Q5_0)
QUANT(q5_1, Q5_1)
QUANT(q8_0, Q8_0)
QUANT(q2_k, Q2_K)
QUANT(q3_k, Q3_K)
QUANT(q4_k, Q4_K)
QUANT(q5_k, Q5_K)
QUANT(q6_k, Q6_K)
QUANT(iq4_nl, IQ4_NL)
QUANT(iq4_xs, IQ4_XS)
