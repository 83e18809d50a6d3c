// copy.cu: y = x, dense, unchanged or cast to another float type
//
//   x  elements of T, element i at walk.at(i)
//   y  [n], dense
//
// Launch       grid (ceil(n / 256)), block (256), shared 0
// Aliasing     none
// Determinism  copies are exact; casts round to nearest even
// Capture      safe
#include "view.cuh"

#define COPY(name, T)                                                                                      \
    extern "C" __global__ __launch_bounds__(256) void copy_##name(T* y, const T* x, Walk walk, u32 n) {    \
        start();                                                                                           \
        u32 i = blockIdx.x * 256 + threadIdx.x;                                                            \
        if (i >= n) return;                                                                                \
        u32 at, unused;                                                                                    \
        walk.at(i, at, unused);                                                                            \
        y[i] = x[at];                                                                                      \
    }

#define CAST(from, From, to, To)                                                                           \
    extern "C" __global__ __launch_bounds__(256) void cast_##from##_##to(To* y, const From* x, Walk walk, u32 n) { \
        start();                                                                                           \
        u32 i = blockIdx.x * 256 + threadIdx.x;                                                            \
        if (i >= n) return;                                                                                \
        u32 at, unused;                                                                                    \
        walk.at(i, at, unused);                                                                            \
        y[i] = from_f32<To>(to_f32(x[at]));                                                                \
    }

#define CASTS(from, From)            \
    CAST(from, From, f32, float)     \
    CAST(from, From, f16, F16)       \
    CAST(from, From, bf16, BF16)

COPY(b8, u8)
COPY(b16, u16)
COPY(b32, u32)
CASTS(f32, float)
CASTS(f16, F16)
CASTS(bf16, BF16)
