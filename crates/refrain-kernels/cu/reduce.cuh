// reduce.cuh: reductions over warps and blocks, always in the same order
#pragma once
#include "dtype.cuh"

struct Add {
    template <typename T> inline T operator()(T a, T b) const { return a + b; }
};

struct Max {
    inline float operator()(float a, float b) const { return fmaxf(a, b); }
};

template <typename T, typename F> inline T warp_reduce(T x, F f) {
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) x = f(x, __shfl_xor_sync(0xffffffffu, x, step));
    return x;
}

// Every thread of the block calls this and gets the result. blockDim.x is a multiple of 32, at most 1024.
template <typename T, typename F> inline T block_reduce(T x, F f, T neutral) {
    __shared__ T partial[32];
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, n_warps = blockDim.x / 32;
    x = warp_reduce(x, f);
    __syncthreads();
    if (lane == 0) partial[warp] = x;
    __syncthreads();
    x = lane < n_warps ? partial[lane] : neutral;
    return warp_reduce(x, f);
}
