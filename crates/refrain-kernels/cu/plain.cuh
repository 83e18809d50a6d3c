// plain.cuh: weights in file layout, plain or quantised, decoded eight elements at a time (see quant.cuh)
#pragma once
#include "quant.cuh"

// Plain elements with the interface of a quantised type: blocks of eight.
template <typename T> struct Plain {
    static const int LEN = 8, BYTES = 8 * sizeof(T);
    inline static int first(int) { return 0; }
    inline static int second(int) { return 4; }
    struct Raw { uint4 v[sizeof(T) / 2]; };
    inline static Raw load(const u8* b, int) {
        Raw raw;
#pragma unroll
        for (int i = 0; i < sizeof(T) / 2; i++) raw.v[i] = ((const uint4*)b)[i];
        return raw;
    }
    inline static void decode(const Raw& raw, int, float* out) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const uint4& v = raw.v[i * sizeof(T) / 16];
            int at = i * sizeof(T) % 16;
            u32 word = at < 8 ? (at < 4 ? v.x : v.y) : (at < 12 ? v.z : v.w);
            out[i] = element(word, at % 4 != 0, T());
        }
    }
    inline static float element(u32 word, bool, float) { return __uint_as_float(word); }
    template <typename H> inline static float element(u32 word, bool high, H) {
        H x;
        x.bits = (u16)(high ? word >> 16 : word);
        return to_f32(x);
    }
};

// Types whose rows may end within a part; such rows are read element by element.
template <typename Q> struct Ragged {
    static const bool ALLOWED = false;
    typedef u8 Element;
};
template <typename T> struct Ragged<Plain<T>> {
    static const bool ALLOWED = true;
    typedef T Element;
};
