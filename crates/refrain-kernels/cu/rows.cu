// rows.cu: sum, mean, maximum and softmax of rows
//
//   x  [n_rows, n_cols]  f32, rows of consecutive elements at rows.start(r)
//   y  [n_rows] or, for softmax, [n_rows, n_cols]  f32, dense
//
// Launch       grid (n_rows), block (256), shared 0
// Aliasing     softmax: y may be x if that is dense. Others: none
// Accumulation f32
// Determinism  same bits every run: additions are in a fixed order
// Capture      safe
#include "reduce.cuh"
#include "view.cuh"

template <typename F> inline float row_reduce(const float* x, u32 n_cols, F f, float neutral) {
    // There may be only one row, so many loads are issued before the first is used.
    const u32 AT_ONCE = 16;
    float result = neutral;
    for (u32 first = threadIdx.x; first < n_cols; first += AT_ONCE * blockDim.x) {
        float v[AT_ONCE];
#pragma unroll
        for (u32 j = 0; j < AT_ONCE; j++) v[j] = first + j * blockDim.x < n_cols ? x[first + j * blockDim.x] : neutral;
#pragma unroll
        for (u32 j = 0; j < AT_ONCE; j++) result = f(result, v[j]);
    }
    return block_reduce(result, f, neutral);
}

#define REDUCE(name, expression)                                                                           \
    extern "C" __global__ __launch_bounds__(256) void reduce_##name##_f32(float* y, const float* v, Rows rows, \
                                                                          u32 n_cols) {                    \
        start();                                                                                           \
        const float* x = v + rows.start(blockIdx.x);                                                       \
        float result = expression;                                                                         \
        if (threadIdx.x == 0) y[blockIdx.x] = result;                                                      \
    }

REDUCE(sum, row_reduce(x, n_cols, Add(), 0.0f))
REDUCE(mean, row_reduce(x, n_cols, Add(), 0.0f) / (float)n_cols)
REDUCE(max, row_reduce(x, n_cols, Max(), -inf_f32()))

extern "C" __global__ __launch_bounds__(256) void softmax_f32(float* y, const float* v, Rows rows, u32 n_cols) {
    start();
    const float* x = v + rows.start(blockIdx.x);
    float* out = y + (u64)blockIdx.x * n_cols;
    float max = row_reduce(x, n_cols, Max(), -inf_f32());
    float sum = 0.0f;
    for (u32 i = threadIdx.x; i < n_cols; i += blockDim.x) sum += expf(x[i] - max);
    float scale = 1.0f / block_reduce(sum, Add(), 0.0f);
    for (u32 i = threadIdx.x; i < n_cols; i += blockDim.x) out[i] = expf(x[i] - max) * scale;
}
