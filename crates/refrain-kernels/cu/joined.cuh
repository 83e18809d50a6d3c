// joined.cuh: the activation that joins an expert's gate and up products
#pragma once
#include "dtype.cuh"

struct Activation {
    u32 kind;     // 0: SiLU, 1: GELU (tanh), 2: clamped SiLU
    float alpha;  // of clamped SiLU
    float limit;
};

inline float joined(float gate, float up, const Activation& of) {
    if (of.kind == 2) {
        float g = gate > of.limit ? of.limit : gate;
        float u = up > of.limit ? of.limit : up < -of.limit ? -of.limit : up;
        return __fdividef(g, 1.0f + __expf(-of.alpha * g)) * (u + 1.0f);
    }
    // SiLU is x / (1 + e^-x). GELU is 0.5 x (1 + tanh u) = x / (1 + e^-2u).
    float u = of.kind == 0 ? gate : 1.5957691216057308f * __fmaf_rn(0.044715f * gate * gate, gate, gate);
    return __fdividef(gate, 1.0f + __expf(-u)) * up;
}
