// narrow.cu: 16-bit rows for tensor cores: y = T(x), and T of a norm, of the norm of a sum, and of a gated
// product
//
//   x, a, b, gate, up  [n_rows, n_cols]  f32, rows of consecutive elements at rows.start(r)
//   w                  [n_cols]          f32
//   sum, wide          [n_rows, n_cols]  f32, dense; wide is y before rounding, or null
//   y                  [n_rows, n_cols]  T, dense, or in planes of plane_rows rows (planes.cuh)
//
// Launch       norms: grid (n_rows), block (256), shared 0; others: grid (ceil(n_cols / 1024), n_rows), block
//              (256), shared 0
// Requires     n_cols a multiple of 4; rows of inputs, y and sum 16-byte aligned
// Aliasing     sum may be a; wide may be x, b, gate or up: a thread reads an element before it writes it, and
//              no other thread touches it
// Accumulation f32; rounds to nearest even
// Determinism  same bits every run: additions are in a fixed order
// Capture      safe
#include "functions.cuh"
#include "mma.cuh"
#include "planes.cuh"
#include "reduce.cuh"
#include "view.cuh"

inline float4 load4(const float* p) { return *(const float4*)p; }

inline float4 times(float4 v, float s, float4 w) {
    float4 y;
    y.x = v.x * s * w.x;
    y.y = v.y * s * w.y;
    y.z = v.z * s * w.z;
    y.w = v.w * s * w.w;
    return y;
}

inline float squares(float4 v, float sum) {
    sum = __fmaf_rn(v.x, v.x, sum);
    sum = __fmaf_rn(v.y, v.y, sum);
    sum = __fmaf_rn(v.z, v.z, sum);
    return __fmaf_rn(v.w, v.w, sum);
}

template <typename T> inline void store(T* y, float* wide, u32 row, u32 column, u32 n_cols, u32 plane_rows, float4 v) {
    narrow_store((u16*)y, row, column, n_cols, plane_rows, pack(v.x, v.y, T()), pack(v.z, v.w, T()));
    if (wide != nullptr) *(float4*)(wide + (u64)row * n_cols + column) = v;
}

inline float norm_scale(float sum, u32 n_cols, float eps) {
    sum = block_reduce(sum, Add(), 0.0f);
    return 1.0f / sqrtf(sum / (float)n_cols + eps);
}

template <typename T> inline void narrow_rows(T* y, const float* x, const Rows& rows, u32 n_cols, u32 plane_rows) {
    start();
    u32 i = (blockIdx.x * 256 + threadIdx.x) * 4;
    if (i < n_cols) {
        float4 v = load4(x + rows.start(blockIdx.y) + i);
        store(y, (float*)nullptr, blockIdx.y, i, n_cols, plane_rows, v);
    }
}

template <typename T>
inline void narrow_norm(T* y, float* wide, const float* x, const float* w, const Rows& rows, u32 n_cols, u32 plane_rows,
                        float eps) {
    start();
    const float* in = x + rows.start(blockIdx.x);
    float sum = 0.0f;
    for (u32 i = threadIdx.x * 4; i < n_cols; i += 1024) sum = squares(load4(in + i), sum);
    float scale = norm_scale(sum, n_cols, eps);
    for (u32 i = threadIdx.x * 4; i < n_cols; i += 1024) {
        store(y, wide, blockIdx.x, i, n_cols, plane_rows, times(load4(in + i), scale, load4(w + i)));
    }
}

template <typename T>
inline void narrow_add_norm(float* sum_out, T* y, float* wide, const float* a, const float* b, const float* w,
                            const Rows& a_rows, const Rows& b_rows, u32 n_cols, u32 plane_rows, float eps) {
    start();
    const float* left = a + a_rows.start(blockIdx.x);
    const float* right = b + b_rows.start(blockIdx.x);
    u64 row = (u64)blockIdx.x * n_cols;
    float sum = 0.0f;
    for (u32 i = threadIdx.x * 4; i < n_cols; i += 1024) {
        float4 v = load4(left + i), u = load4(right + i);
        v.x += u.x;
        v.y += u.y;
        v.z += u.z;
        v.w += u.w;
        *(float4*)(sum_out + row + i) = v;
        sum = squares(v, sum);
    }
    float scale = norm_scale(sum, n_cols, eps);
    // A thread reads only its own writes here.
    for (u32 i = threadIdx.x * 4; i < n_cols; i += 1024) {
        float4 v = times(load4(sum_out + row + i), scale, load4(w + i));
        store(y, wide, blockIdx.x, i, n_cols, plane_rows, v);
    }
}

template <typename T, float (*F)(float)>
inline void narrow_gate(T* y, float* wide, const float* gate, const float* up, const Rows& gate_rows,
                        const Rows& up_rows, u32 n_cols, u32 plane_rows) {
    start();
    u32 i = (blockIdx.x * 256 + threadIdx.x) * 4;
    if (i >= n_cols) return;
    float4 g = load4(gate + gate_rows.start(blockIdx.y) + i), u = load4(up + up_rows.start(blockIdx.y) + i), v;
    v.x = F(g.x) * u.x;
    v.y = F(g.y) * u.y;
    v.z = F(g.z) * u.z;
    v.w = F(g.w) * u.w;
    store(y, wide, blockIdx.y, i, n_cols, plane_rows, v);
}

#define NARROW(name, T)                                                                                          \
    extern "C" __global__ __launch_bounds__(256) void narrow_rows_##name(T* y, const float* x, Rows rows,        \
                                                                         u32 n_cols, u32 plane_rows) {           \
        narrow_rows(y, x, rows, n_cols, plane_rows);                                                             \
    }                                                                                                            \
    extern "C" __global__ __launch_bounds__(256) void narrow_rms_norm_##name(                                   \
        T* y, float* wide, const float* x, const float* w, Rows rows, u32 n_cols, u32 plane_rows, float eps) {   \
        narrow_norm(y, wide, x, w, rows, n_cols, plane_rows, eps);                                               \
    }                                                                                                            \
    extern "C" __global__ __launch_bounds__(256) void narrow_add_rms_norm_##name(                               \
        float* sum, T* y, float* wide, const float* a, const float* b, const float* w, Rows a_rows, Rows b_rows, \
        u32 n_cols, u32 plane_rows, float eps) {                                                                 \
        narrow_add_norm(sum, y, wide, a, b, w, a_rows, b_rows, n_cols, plane_rows, eps);                         \
    }                                                                                                            \
    extern "C" __global__ __launch_bounds__(256) void narrow_gate_silu_##name(                                  \
        T* y, float* wide, const float* gate, const float* up, Rows gate_rows, Rows up_rows, u32 n_cols,         \
        u32 plane_rows) {                                                                                        \
        narrow_gate<T, silu>(y, wide, gate, up, gate_rows, up_rows, n_cols, plane_rows);                         \
    }                                                                                                            \
    extern "C" __global__ __launch_bounds__(256) void narrow_gate_gelu_tanh_##name(                             \
        T* y, float* wide, const float* gate, const float* up, Rows gate_rows, Rows up_rows, u32 n_cols,         \
        u32 plane_rows) {                                                                                        \
        narrow_gate<T, gelu_tanh>(y, wide, gate, up, gate_rows, up_rows, n_cols, plane_rows);                    \
    }

NARROW(f16, F16)
NARROW(bf16, BF16)
