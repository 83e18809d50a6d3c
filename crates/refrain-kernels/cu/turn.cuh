// turn.cuh: the rotation of RoPE: the angle of a position, and the rotation of a pair
//
// Every operation has explicit rounding, so that all kernels that rotate give the same bits.
#pragma once
#include "dtype.cuh"

// Computes sine and cosine of position * inv_freq, both times the magnitude. The angle is computed and
// reduced to an eighth of a turn in f64, so it is as accurate at position 100,000 as at 1. The reduced angle
// is small enough for f32 polynomials, with an error of about one unit in the last place; the CUDA library's
// functions would add a range reduction of their own.
inline void turn_of(i32 position, float inv_freq, float magnitude, float& sine, float& cosine) {
    const double per_quarter = 0.63661977236758134308, quarter = 1.57079632679489661923;
    double quarters = (double)position * (double)inv_freq * per_quarter, whole = rint(quarters);
    float x = (float)((quarters - whole) * quarter), x2 = __fmul_rn(x, x);
    // Minimax polynomials for |x| <= pi / 4.
    float s = __fmaf_rn(x2, -1.9515295891e-4f, 8.3321608736e-3f);
    s = __fmaf_rn(x2, s, -1.6666654611e-1f);
    s = __fmaf_rn(__fmul_rn(x2, s), x, x);
    float c = __fmaf_rn(x2, 2.443315711809948e-5f, -1.388731625493765e-3f);
    c = __fmaf_rn(x2, c, 4.166664568298827e-2f);
    c = __fmaf_rn(__fmul_rn(x2, x2), c, __fmaf_rn(x2, -0.5f, 1.0f));
    // At most 2^31 times a frequency: far below 64 bits.
    u32 turned = (u32)(long long)whole;
    float a = (turned & 1) != 0 ? c : s, b = (turned & 1) != 0 ? s : c;
    sine = __fmul_rn((turned & 2) != 0 ? -a : a, magnitude);
    cosine = __fmul_rn((turned + 1 & 2) != 0 ? -b : b, magnitude);
}

inline void turn_pair(float& u, float& v, float sine, float cosine) {
    float turned = __fmaf_rn(u, cosine, -__fmul_rn(v, sine));
    v = __fmaf_rn(u, sine, __fmul_rn(v, cosine));
    u = turned;
}
