// elementwise.cu: y = f(x), y = f(a, b), y = f(gate) * up
//
//   x, a, b   f32, element i at walk.at(i)
//   gate, up  [n_rows, n_cols] f32, rows of consecutive elements
//   y         f32, dense
//
// Launch       grid (ceil(n / 256)), block (256), shared 0
// Aliasing     y may be an operand that is dense and of y's shape: one thread reads element i before it
//              writes it
// Determinism  same bits every run; one or a few roundings per element
// Capture      safe
#include "functions.cuh"
#include "view.cuh"

#define UNARY(name, expression)                                                                            \
    extern "C" __global__ __launch_bounds__(256) void unary_##name##_f32(float* y, const float* v, Walk walk, u32 n, \
                                                                         float p0, float p1) {             \
        start();                                                                                           \
        u32 i = blockIdx.x * 256 + threadIdx.x;                                                            \
        if (i >= n) return;                                                                                \
        u32 at, unused;                                                                                    \
        walk.at(i, at, unused);                                                                            \
        float x = v[at];                                                                                   \
        y[i] = expression;                                                                                 \
    }

#define BINARY(name, expression)                                                                           \
    extern "C" __global__ __launch_bounds__(256) void binary_##name##_f32(float* y, const float* u, const float* v, \
                                                                          Walk walk, u32 n) {              \
        start();                                                                                           \
        u32 i = blockIdx.x * 256 + threadIdx.x;                                                            \
        if (i >= n) return;                                                                                \
        u32 a_at, b_at;                                                                                    \
        walk.at(i, a_at, b_at);                                                                            \
        float a = u[a_at], b = v[b_at];                                                                    \
        y[i] = expression;                                                                                 \
    }

#define GATE(name, f)                                                                                      \
    extern "C" __global__ __launch_bounds__(256) void gate_##name##_f32(                                   \
        float* y, const float* gate, const float* up, Rows gate_rows, Rows up_rows, u32 n_rows, u32 n_cols) { \
        start();                                                                                           \
        u32 i = blockIdx.x * 256 + threadIdx.x, row = i / n_cols, col = i % n_cols;                        \
        if (row >= n_rows) return;                                                                         \
        y[i] = f(gate[gate_rows.start(row) + col]) * up[up_rows.start(row) + col];                         \
    }

UNARY(neg, -x)
UNARY(exp, expf(x))
UNARY(log, logf(x))
UNARY(rsqrt, 1.0f / sqrtf(x))
UNARY(tanh, tanhf(x))
UNARY(sigmoid, sigmoid(x))
UNARY(silu, silu(x))
UNARY(gelu_tanh, gelu_tanh(x))
UNARY(gelu_erf, gelu_erf(x))
UNARY(affine, __fmaf_rn(p0, x, p1))
UNARY(softcap, p0 * tanhf(x / p0))

BINARY(add, a + b)
BINARY(sub, a - b)
BINARY(mul, a * b)
BINARY(div, a / b)
BINARY(maximum, fmaxf(a, b))

GATE(silu, silu)
GATE(gelu_tanh, gelu_tanh)
