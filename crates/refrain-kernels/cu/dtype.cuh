// dtype.cuh: element types, and conversions that round to nearest even
//
// Deliberately self-contained: compiling kernels requires no CUDA toolkit headers.
#pragma once

typedef unsigned char u8;
typedef signed char i8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef int i32;
typedef unsigned long long u64;

// Dynamic shared memory of a launch. Bulk copies into it are up to a fifth slower if it is not 128-byte
// aligned.
#ifdef REFRAIN_ON_HOST
#define DYNAMIC_SHARED(name) alignas(128) static u8 name[227 * 1024]
#else
#define DYNAMIC_SHARED(name) extern __shared__ __align__(128) u8 name[]
#endif

struct F16 { u16 bits; };
struct BF16 { u16 bits; };

#ifndef REFRAIN_ON_HOST  // the tests that run kernels on the host define these
inline float f16_to_f32(u16 bits) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(bits));
    return y;
}

inline u16 f32_to_f16(float x) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}

// Stores with release semantics at system scope: whoever acquires the value, the host included, sees
// everything written before.
inline void store_release_system(u64* p, u64 x) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(x) : "memory");
}

// Loads a word that the host may change at any time; orders nothing.
inline u64 load_system(const u64* p) {
    u64 x;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(x) : "l"(p));
    return x;
}
#endif

inline float to_f32(float x) { return x; }

inline float to_f32(F16 x) { return f16_to_f32(x.bits); }

inline float to_f32(BF16 x) { return __uint_as_float((u32)x.bits << 16); }

template <typename T> inline T from_f32(float x);

template <> inline float from_f32<float>(float x) { return x; }

template <> inline F16 from_f32<F16>(float x) { return F16{f32_to_f16(x)}; }

template <> inline BF16 from_f32<BF16>(float x) {
    u32 bits = __float_as_uint(x);
    // A NaN keeps its sign and stays a NaN; rounding up could carry it to infinity or zero.
    if ((bits & 0x7fffffffu) > 0x7f800000u) return BF16{(u16)(bits >> 16 | 0x40u)};
    return BF16{(u16)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
}

// Loads four bytes at a 4-byte aligned address.
inline u32 load_u32(const u8* p) { return *(const u32*)p; }

// Loads four bytes at an even address, little-endian: one load if it is 4-byte aligned.
inline u32 load_u32_by_2(const u8* p) {
    if ((u64)p % 4 == 0) return load_u32(p);
    const u16* h = (const u16*)p;
    return (u32)h[0] | (u32)h[1] << 16;
}

inline float nan_f32() { return __uint_as_float(0x7fc00000u); }
inline float inf_f32() { return __uint_as_float(0x7f800000u); }
