// functions.cuh: scalar functions and their derivatives, in f32
#pragma once
#include "dtype.cuh"

inline float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// x sigmoid(s). The exponential never overflows, so for very negative s the result is tiny but not yet zero.
inline float times_sigmoid(float x, float s) {
    float e = expf(-fabsf(s));
    return s < 0.0f ? x * e / (1.0f + e) : x / (1.0f + e);
}

inline float silu(float x) { return times_sigmoid(x, x); }

// 0.5 x (1 + tanh(u)) = x sigmoid(2 u), which avoids cancellation.
inline float gelu_tanh(float x) {
    return times_sigmoid(x, 2.0f * (0.7978845608028654f * (x + 0.044715f * x * x * x)));
}

// x times the standard normal distribution function. The complement avoids cancellation for negative x.
inline float gelu_erf(float x) { return 0.5f * x * erfcf(-0.70710678118654752f * x); }

// sigmoid(x) sigmoid(-x), which avoids cancellation.
inline float sigmoid_slope(float x) {
    float e = expf(-fabsf(x)), sum = 1.0f + e;
    return e / (sum * sum);
}

// 1 - tanh(x)^2
inline float tanh_slope(float x) { return 4.0f * sigmoid_slope(2.0f * x); }

inline float silu_slope(float x) { return times_sigmoid(1.0f, x) + x * sigmoid_slope(x); }

inline float gelu_tanh_slope(float x) {
    const float c = 0.7978845608028654f;
    float u2 = 2.0f * (c * (x + 0.044715f * x * x * x)), slope = 2.0f * c * (1.0f + 3.0f * 0.044715f * x * x);
    return times_sigmoid(1.0f, u2) + x * sigmoid_slope(u2) * slope;
}

inline float gelu_erf_slope(float x) {
    const float density = 0.3989422804014327f;  // 1 / sqrt(2 pi)
    return 0.5f * erfcf(-0.70710678118654752f * x) + x * density * expf(-0.5f * x * x);
}

#ifndef REFRAIN_ON_HOST  // the tests that run kernels on the host define it
// 2^x to two units in the last place.
inline float quick_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
#endif

// Faster versions for 16-bit results: exponential and quotient are accurate to about 1e-6.
struct Sigmoid {
    float value, slope;
};

inline Sigmoid quick_sigmoid(float x) {
    float e = __expf(-fabsf(x)), r = __fdividef(1.0f, 1.0f + e), slope = e * r;
    return Sigmoid{x < 0.0f ? slope : r, slope * r};
}

// A gate's value and derivative.
struct Gated {
    float value, slope;
};

inline Gated quick_silu(float x) {
    Sigmoid s = quick_sigmoid(x);
    return Gated{x * s.value, s.value + x * s.slope};
}

inline Gated quick_gelu_tanh(float x) {
    const float c = 2.0f * 0.7978845608028654f;
    Sigmoid s = quick_sigmoid(c * (x + 0.044715f * x * x * x));
    return Gated{x * s.value, s.value + x * s.slope * (c * (1.0f + 3.0f * 0.044715f * x * x))};
}
