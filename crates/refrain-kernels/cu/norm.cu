// norm.cu: RMS norm, y = x * rsqrt(mean(x^2) + eps) * w, of a row or of a sum of two
//
//   x, a, b  [n_rows, n_cols]  f32, rows of consecutive elements at rows.start(r)
//   w        [n_cols]          f32
//   y, sum   [n_rows, n_cols]  f32, dense
//
// Launch       grid (n_rows), block (multiple of 32, at most 512), shared 0
// Requires     any n_cols
// Aliasing     y may be x; sum may be a and y may be b: a thread reads an element before it writes it, and no
//              other thread touches it
// Accumulation f32
// Determinism  same bits every run: additions are in a fixed order
// Capture      safe
#include "reduce.cuh"
#include "view.cuh"

inline float norm_scale(float sum, u32 n_cols, float eps) {
    sum = block_reduce(sum, Add(), 0.0f);
    return 1.0f / sqrtf(sum / (float)n_cols + eps);
}

extern "C" __global__ __launch_bounds__(512) void rms_norm_f32(float* y, const float* x, const float* w, Rows rows,
                                                              u32 n_cols, float eps) {
    start();
    const float* in = x + rows.start(blockIdx.x);
    float* out = y + (u64)blockIdx.x * n_cols;
    float sum = 0.0f;
    for (u32 i = threadIdx.x; i < n_cols; i += blockDim.x) sum = __fmaf_rn(in[i], in[i], sum);
    float scale = norm_scale(sum, n_cols, eps);
    for (u32 i = threadIdx.x; i < n_cols; i += blockDim.x) out[i] = in[i] * scale * w[i];
}

extern "C" __global__ __launch_bounds__(512) void rms_norm_add_f32(float* sum_out, float* y, const float* a,
                                                                  const float* b, const float* w, Rows a_rows,
                                                                  Rows b_rows, u32 n_cols, float eps) {
    start();
    const float* left = a + a_rows.start(blockIdx.x);
    const float* right = b + b_rows.start(blockIdx.x);
    float* out_sum = sum_out + (u64)blockIdx.x * n_cols;
    float* out = y + (u64)blockIdx.x * n_cols;
    float sum = 0.0f;
    for (u32 i = threadIdx.x; i < n_cols; i += blockDim.x) {
        float v = left[i] + right[i];
        out_sum[i] = v;
        sum = __fmaf_rn(v, v, sum);
    }
    float scale = norm_scale(sum, n_cols, eps);
    // A thread reads only its own writes here.
    for (u32 i = threadIdx.x; i < n_cols; i += blockDim.x) out[i] = out_sum[i] * scale * w[i];
}
