// eight.cuh: loads and stores of eight consecutive elements
//
// Where rows are aligned, eight elements are one 16-byte load, or two for 32-bit elements. Elsewhere, and at
// the end of a row, they are loaded one by one; elements past the end are zero.
#pragma once
#include "dtype.cuh"

// Type codes as passed by launchers (src/typed.rs).
const u32 TYPE_F32 = 0, TYPE_F16 = 1, TYPE_BF16 = 2, TYPE_I32 = 3;

inline bool is_short(u32 type) { return type == TYPE_F16 || type == TYPE_BF16; }

inline u32 bits_of(float x) { return __float_as_uint(x); }
inline u32 bits_of(F16 x) { return x.bits; }
inline u32 bits_of(BF16 x) { return x.bits; }
inline u32 bits_of(u32 x) { return x; }

// Packs two 16-bit elements into a word, the first in the lower half.
template <typename T> inline u32 word_of(float low, float high) {
    return bits_of(from_f32<T>(low)) | bits_of(from_f32<T>(high)) << 16;
}

#ifndef REFRAIN_ON_HOST
template <> inline u32 word_of<BF16>(float low, float high) {
    u32 word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}

template <> inline u32 word_of<F16>(float low, float high) {
    u32 word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}
#endif

inline float of_bits(float, u32 bits) { return __uint_as_float(bits); }
inline float of_bits(F16, u32 bits) { return to_f32(F16{(u16)bits}); }
inline float of_bits(BF16, u32 bits) { return to_f32(BF16{(u16)bits}); }

// The bits of eight elements: four words for 16-bit types, eight for 32-bit types.
template <typename T> struct Eight {
    u32 w[2 * sizeof(T)];

    inline u32 bits(int i) const { return sizeof(T) == 2 ? w[i / 2] >> (16 * (i % 2)) & 0xffffu : w[i]; }
    inline float operator[](int i) const { return of_bits(T(), bits(i)); }
};

// Loads the first n of eight elements, all if n is larger. `wide`: p is 16-byte aligned.
template <typename T> inline Eight<T> load8(const T* p, u32 n, bool wide) {
    Eight<T> e;
    if (wide && n >= 8) {
#pragma unroll
        for (u32 i = 0; i < sizeof(T) / 2; i++) {
            uint4 v = ((const uint4*)p)[i];
            e.w[4 * i] = v.x;
            e.w[4 * i + 1] = v.y;
            e.w[4 * i + 2] = v.z;
            e.w[4 * i + 3] = v.w;
        }
        return e;
    }
#pragma unroll
    for (u32 i = 0; i < 2 * sizeof(T); i++) e.w[i] = 0;
#pragma unroll
    for (u32 i = 0; i < 8; i++) {
        if (i < n) e.w[i * sizeof(T) / 4] |= bits_of(p[i]) << (sizeof(T) == 2 ? 16 * (i % 2) : 0);
    }
    return e;
}

template <typename T> inline void store8(T* p, const float* v, u32 n, bool wide) {
    if (wide && n >= 8) {
#pragma unroll
        for (u32 i = 0; i < sizeof(T) / 2; i++) {
            u32 w[4];
#pragma unroll
            for (u32 j = 0; j < 4; j++) {
                u32 at = 4 * i + j;
                w[j] = sizeof(T) == 2 ? word_of<T>(v[2 * at % 8], v[(2 * at + 1) % 8]) : bits_of(from_f32<T>(v[at]));
            }
            ((uint4*)p)[i] = make_uint4(w[0], w[1], w[2], w[3]);
        }
        return;
    }
#pragma unroll
    for (u32 i = 0; i < 8; i++) {
        if (i < n) p[i] = from_f32<T>(v[i]);
    }
}

// Rounds eight floats to T.
template <typename T> inline Eight<T> eight_of(const float* v) {
    Eight<T> e;
#pragma unroll
    for (u32 i = 0; i < 2 * sizeof(T); i++) {
        e.w[i] = sizeof(T) == 2 ? word_of<T>(v[2 * i % 8], v[(2 * i + 1) % 8]) : bits_of(from_f32<T>(v[i % 8]));
    }
    return e;
}

// Stores elements unchanged.
template <typename T> inline void store8(T* p, const Eight<T>& e, u32 n, bool wide) {
    if (wide && n >= 8) {
#pragma unroll
        for (u32 i = 0; i < sizeof(T) / 2; i++) {
            ((uint4*)p)[i] = make_uint4(e.w[4 * i], e.w[4 * i + 1], e.w[4 * i + 2], e.w[4 * i + 3]);
        }
        return;
    }
#pragma unroll
    for (u32 i = 0; i < 8; i++) {
        if (i >= n) continue;
        if (sizeof(T) == 2) ((u16*)p)[i] = (u16)e.bits(i);
        else ((u32*)p)[i] = e.bits(i);
    }
}

// Loads eight elements of a type known at run time.
inline Eight<u32> load_any(const u8* p, u32 type, u64 at, u32 n, bool wide) {
    if (!is_short(type)) return load8((const u32*)p + at, n, wide);
    Eight<BF16> e = load8((const BF16*)p + at, n, wide);
    Eight<u32> any = {{e.w[0], e.w[1], e.w[2], e.w[3], 0, 0, 0, 0}};
    return any;
}

inline u32 load_bits(const u8* p, u32 type, u64 at) {
    return is_short(type) ? (u32)((const u16*)p)[at] : ((const u32*)p)[at];
}

inline float value_of(u32 bits, u32 type) {
    switch (type) {
        case TYPE_F16: return to_f32(F16{(u16)bits});
        case TYPE_BF16: return to_f32(BF16{(u16)bits});
        case TYPE_I32: return (float)(i32)bits;
        default: return __uint_as_float(bits);
    }
}

inline void values_of(const Eight<u32>& any, u32 type, float* v) {
    if (is_short(type)) {
#pragma unroll
        for (u32 i = 0; i < 8; i++) v[i] = value_of(any.w[i / 2] >> (16 * (i % 2)), type);
    } else {
#pragma unroll
        for (u32 i = 0; i < 8; i++) v[i] = value_of(any.w[i], type);
    }
}

// Loads eight elements of any type as floats.
inline void load_values(const u8* p, u32 type, u64 at, u32 n, bool wide, float* v) {
    values_of(load_any(p, type, at, n, wide), type, v);
}

// Stores eight floats as elements of a float type.
inline void store_any(u8* p, u32 type, u64 at, const float* v, u32 n, bool wide) {
    if (type == TYPE_BF16) store8((BF16*)p + at, v, n, wide);
    else if (type == TYPE_F16) store8((F16*)p + at, v, n, wide);
    else store8((float*)p + at, v, n, wide);
}

// Stores eight words.
inline void store_words(u8* p, u64 at, const u32* v, u32 n, bool wide) {
    u32* to = (u32*)p + at;
    if (wide && n >= 8) {
        ((uint4*)to)[0] = make_uint4(v[0], v[1], v[2], v[3]);
        ((uint4*)to)[1] = make_uint4(v[4], v[5], v[6], v[7]);
        return;
    }
#pragma unroll
    for (u32 i = 0; i < 8; i++) {
        if (i < n) to[i] = v[i];
    }
}

// Stores eight elements of any type unchanged.
inline void store_bits8(u8* p, u32 type, u64 at, const Eight<u32>& e, u32 n, bool wide) {
    if (!is_short(type)) return store_words(p, at, e.w, n, wide);
    u16* to = (u16*)p + at;
    if (wide && n >= 8) {
        *(uint4*)to = make_uint4(e.w[0], e.w[1], e.w[2], e.w[3]);
        return;
    }
#pragma unroll
    for (u32 i = 0; i < 8; i++) {
        if (i < n) to[i] = (u16)(e.w[i / 2] >> (16 * (i % 2)));
    }
}
