// matmul.cu: y = a b for operands in any layout, in batches
//
//   a  [.., m, k]  f32; element 0 of the row of y's element i at walk.at(i).a, then every a_step
//   b  [.., k, n]  f32; element 0 of the column of y's element i at walk.at(i).b, then every b_step
//   y  [.., m, n]  f32, dense
//
// Launch    grid (ceil(n_out / 256)), block (256), shared 0: one thread per element of y
// Aliasing  none
// Sums in f32, in the order of k: same bits every run. Capture: safe. The general case, not the fast one: products with
// weights are linear.cu's.
#include "view.cuh"

extern "C" __global__ __launch_bounds__(256) void matmul_f32(float* y, const float* a, const float* b, Walk walk,
                                                             u32 n_out, u32 k, u32 a_step, u32 b_step) {
    start();
    u32 i = blockIdx.x * 256 + threadIdx.x;
    if (i >= n_out) return;
    u32 a_at, b_at;
    walk.at(i, a_at, b_at);
    float sum = 0.0f;
    for (u32 j = 0; j < k; j++) sum = __fmaf_rn(a[a_at + j * a_step], b[b_at + j * b_step], sum);
    y[i] = sum;
}
