// packed.cuh: the packed layout of quantised weights, and its decoding (src/packed.rs produces the same
// bytes)
//
// Eight rows form a tile. A tile is cut along its columns into units of COLS columns: 128 for types with
// blocks of 32, 256 for those with blocks of 256; a last unit of 32-element blocks is padded with zeros. A
// unit holds all bytes of its columns contiguously, so that one bulk copy loads it. The units of a tile are
// consecutive, followed by the next tile's; a last tile is padded with rows of zeros.
//
// In a unit, lane 4 r + s has the sub-blocks s, s + 4, .. of 32 elements of row r. A plane holds one part of
// a sub-block for each of the 32 lanes. The planes of a unit, in order:
//
//   Q8_0  quants 0 .. 15 of each lane (16 bytes), quants 16 .. 31, then d (2 bytes)
//   Q4_0  nibbles (16 bytes: byte j is element j in the low half, element 16 + j in the high half), then d
//   Q4_1  nibbles, then d and m (4 bytes)
//   Q5_0  nibbles, fifth bits (4 bytes: bit e is element e), then d
//   Q5_1  nibbles, fifth bits, then d and m
//   Q4_K  nibbles of sub-block s, of s + 4; scale and minimum of both as bytes (4 bytes); then d and dmin per row
//   Q5_K  nibbles twice, fifth bits of both (8 bytes), scales and minima, then d and dmin per row
//   Q3_K  low two bits of sub-block s (8 bytes, in the order of Q6_K's upper bits), of s + 4; third bits of both (8
//         bytes: bit e is element e), four signed scales (4 bytes), then d per row
//   IQ4_NL, MXFP4
//         nibbles, then the scale (2 bytes: f16, or BF16 for MXFP4, which has the exponents that it needs)
//   IQ4_XS  nibbles twice, two signed scales (2 bytes), then d per row
//   Q6_K  nibbles twice, upper bits of both (8 bytes each: bits 2 w of byte i are element 4 w + i, then 16
//         more), four scales (4 bytes), then d per row
//
// Decoding follows the codecs of refrain-tensor, so values agree bit for bit with the file's.
#pragma once
#include "dtype.cuh"

const u32 TILE_ROWS = 8;
const u32 TILE_SUBS = 4;  // sub-blocks side by side in a plane

// 32 elements as bytes, four to a word, with their scales and minimum: element e is scale[e / 16] q[e] - min.
// Quants are signed or unsigned bytes, by Q::SIGNED.
struct Sub {
    u32 q[8];
    float scale[2];
    float min;
};

#ifndef REFRAIN_ON_HOST
// Adds four byte products to sum; the bytes of x are signed.
inline i32 dot_bytes(u32 q, u32 x, i32 sum, bool is_signed) {
    if (is_signed) {
        asm("dp4a.s32.s32 %0, %1, %2, %0;" : "+r"(sum) : "r"(q), "r"(x));
    } else {
        asm("dp4a.u32.s32 %0, %1, %2, %0;" : "+r"(sum) : "r"(q), "r"(x));
    }
    return sum;
}
#endif

// 32 activations as signed bytes; the largest magnitude maps to 127, ties round to even. Four adjacent lanes
// hold eight each; all lanes of a warp call this together.
struct ByteBlock {
    u32 low, high;  // this lane's eight
    float2 scale;   // the scale of a byte, and the sum of all 32 times that

    inline explicit ByteBlock(const float (&v)[8]) {
        // Magnitudes compare like their bits; NaN is the largest.
        u32 most = 0;
#pragma unroll
        for (int i = 0; i < 8; i++) most = max(most, __float_as_uint(v[i]) & 0x7fffffffu);
        most = max(most, __shfl_xor_sync(0xffffffffu, most, 1));
        most = max(most, __shfl_xor_sync(0xffffffffu, most, 2));
        float largest = __uint_as_float(most);
        bool none = largest < 1e-35f;
        // Magnitudes too large to scale, infinities and NaN give NaN results.
        float d = none ? 0.0f : largest < 8e37f ? largest * (1.0f / 127.0f) : nan_f32();
        float inverse = none ? 0.0f : __fdividef(127.0f, largest);
        // Adding 1.5 * 2^23 rounds to an integer, ties to even; its low byte is in the low bits.
        u32 bits[8];
#pragma unroll
        for (int i = 0; i < 8; i++) bits[i] = __float_as_uint(__fmaf_rn(v[i], inverse, 12582912.0f));
        low = __byte_perm(__byte_perm(bits[0], bits[1], 0x0040), __byte_perm(bits[2], bits[3], 0x0040), 0x5410);
        high = __byte_perm(__byte_perm(bits[4], bits[5], 0x0040), __byte_perm(bits[6], bits[7], 0x0040), 0x5410);
        i32 sum = dot_bytes(0x01010101u, low, dot_bytes(0x01010101u, high, 0, false), false);
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        scale = make_float2(d, d * (float)sum);
    }
};

inline uint4 plane16(const u8* unit, u32 at, u32 lane) { return *(const uint4*)(unit + at + 16 * lane); }
inline uint2 plane8(const u8* unit, u32 at, u32 lane) { return *(const uint2*)(unit + at + 8 * lane); }
inline u32 plane4(const u8* unit, u32 at, u32 lane) { return *(const u32*)(unit + at + 4 * lane); }
inline u32 plane2(const u8* unit, u32 at, u32 lane) { return *(const u16*)(unit + at + 2 * lane); }

inline float low_f16(u32 word) { return f16_to_f32((u16)word); }
inline float high_f16(u32 word) { return f16_to_f32((u16)(word >> 16)); }

// Expands nibbles to bytes: elements 0 .. 15 unchanged, the others times 16, which their scale compensates.
inline void nibbles(const uint4& v, u32* q) {
    const u32 w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        q[i] = w[i] & 0x0f0f0f0fu;
        q[4 + i] = w[i] & 0xf0f0f0f0u;
    }
}

// Spreads bits 4 i .. 4 i + 3 of a word to bit 0 of four bytes.
inline u32 spread_bits(u32 bits, int i) {
    u32 b = bits >> (4 * i) & 0xfu;
    return (b * 0x00204081u) & 0x01010101u;
}

// Adds the fifth bit of five-bit types; all elements are then multiplied by 8.
inline void add_fifth_bits(u32* q, u32 bits) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        q[i] = q[i] << 3 | spread_bits(bits, i) << 7;
        q[4 + i] = q[4 + i] >> 1 | spread_bits(bits, 4 + i) << 7;
    }
}

// Types with blocks of 32; the fifth bits, d and m follow the nibbles.
template <int BITS, bool HAS_MIN> struct Packed32 {
    static const int COLS = 128, SUBS = 1;
    static const bool SIGNED = false;
    static const int HIGH = BITS == 5 ? 128 : 0;
    static const int BYTES = 512 + HIGH + (HAS_MIN ? 128 : 64);
    // Zero point of the quants, for types without a minimum.
    static const int CENTRE = HAS_MIN ? 0 : BITS == 5 ? 16 : 8;
    inline static Sub load(const u8* unit, u32, u32 lane) {
        Sub sub;
        nibbles(plane16(unit, 0, lane), sub.q);
        if (BITS == 5) add_fifth_bits(sub.q, plane4(unit, 512, lane));
        float d;
        if (HAS_MIN) {
            u32 dm = plane4(unit, 512 + HIGH, lane);
            d = low_f16(dm);
            sub.min = -high_f16(dm);
        } else {
            d = f16_to_f32((u16)plane2(unit, 512 + HIGH, lane));
            // q - 8 or q - 16: both products are exact.
            sub.min = d * (BITS == 5 ? 16.0f : 8.0f);
        }
        sub.scale[0] = BITS == 5 ? d * 0.125f : d;
        sub.scale[1] = BITS == 5 ? d * 0.125f : d * 0.0625f;
        return sub;
    }
};

typedef Packed32<4, false> PackedQ4_0;
typedef Packed32<4, true> PackedQ4_1;
typedef Packed32<5, false> PackedQ5_0;
typedef Packed32<5, true> PackedQ5_1;

struct PackedQ8_0 {
    static const int COLS = 128, SUBS = 1, BYTES = 1088, CENTRE = 0, HIGH = 0;
    static const bool SIGNED = true;
    inline static Sub load(const u8* unit, u32, u32 lane) {
        uint4 a = plane16(unit, 0, lane), b = plane16(unit, 512, lane);
        float d = f16_to_f32((u16)plane2(unit, 1024, lane));
        return Sub{{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}, {d, d}, 0.0f};
    }
};

template <int BITS> struct PackedK {
    static const int COLS = 256, SUBS = 2;
    static const bool SIGNED = false;
    static const int HIGH = BITS == 5 ? 256 : 0;
    static const int BYTES = 1024 + HIGH + 128 + 32, CENTRE = 0;
    inline static Sub load(const u8* unit, u32 c, u32 lane) {
        Sub sub;
        nibbles(plane16(unit, 512 * c, lane), sub.q);
        if (BITS == 5) add_fifth_bits(sub.q, *(const u32*)(unit + 1024 + 8 * lane + 4 * c));
        u32 scales = plane4(unit, 1024 + HIGH, lane) >> (16 * c);
        u32 d = plane4(unit, 1024 + HIGH + 128, lane / TILE_SUBS);
        float scale = __fmul_rn(low_f16(d), (float)(scales & 0xffu));
        sub.scale[0] = BITS == 5 ? scale * 0.125f : scale;
        sub.scale[1] = BITS == 5 ? scale * 0.125f : scale * 0.0625f;
        sub.min = __fmul_rn(high_f16(d), (float)(scales >> 8 & 0xffu));
        return sub;
    }
};

typedef PackedK<4> PackedQ4_K;
typedef PackedK<5> PackedQ5_K;

struct PackedQ6_K {
    static const int COLS = 256, SUBS = 2, BYTES = 1680, CENTRE = 0, HIGH = 0;
    static const bool SIGNED = true;
    inline static Sub load(const u8* unit, u32 c, u32 lane) {
        uint4 low = plane16(unit, 512 * c, lane);
        uint2 high = plane8(unit, 1024 + 256 * c, lane);
        u32 scales = plane4(unit, 1536, lane) >> (16 * c);
        float d = f16_to_f32((u16)plane2(unit, 1664, lane / TILE_SUBS)) * 0.25f;
        const u32 w[4] = {low.x, low.y, low.z, low.w};
        Sub sub;
        // Four times (q - 32): the six bits are shifted to the top of the byte and the sign bit is flipped.
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 a = w[i] << 2 & 0x3c3c3c3cu, b = w[i] >> 2 & 0x3c3c3c3cu;
            sub.q[i] = (a | (high.x >> (2 * i) & 0x03030303u) << 6) ^ 0x80808080u;
            sub.q[4 + i] = (b | (high.y >> (2 * i) & 0x03030303u) << 6) ^ 0x80808080u;
        }
        sub.scale[0] = __fmul_rn(d, (float)(i8)(scales & 0xffu));
        sub.scale[1] = __fmul_rn(d, (float)(i8)(scales >> 8 & 0xffu));
        sub.min = 0.0f;
        return sub;
    }
};

struct PackedQ3_K {
    static const int COLS = 256, SUBS = 2, BYTES = 912, CENTRE = 0, HIGH = 0;
    static const bool SIGNED = true;
    inline static Sub load(const u8* unit, u32 c, u32 lane) {
        uint2 low = plane8(unit, 256 * c, lane);
        u32 third = *(const u32*)(unit + 512 + 8 * lane + 4 * c);
        u32 scales = plane4(unit, 768, lane) >> (16 * c);
        float d = f16_to_f32((u16)plane2(unit, 896, lane / TILE_SUBS)) * 0.03125f;
        Sub sub;
        // 32 times (q - 4): the three bits are shifted to the top of the byte and the sign bit is flipped.
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 a = (low.x >> (2 * i) & 0x03030303u) << 5, b = (low.y >> (2 * i) & 0x03030303u) << 5;
            sub.q[i] = (a | spread_bits(third, i) << 7) ^ 0x80808080u;
            sub.q[4 + i] = (b | spread_bits(third, 4 + i) << 7) ^ 0x80808080u;
        }
        sub.scale[0] = __fmul_rn(d, (float)(i8)(scales & 0xffu));
        sub.scale[1] = __fmul_rn(d, (float)(i8)(scales >> 8 & 0xffu));
        sub.min = 0.0f;
        return sub;
    }
};

// Sixteen signed levels, four to a word.
struct Iq4Levels {
    static const u32 A = 0xbfad9881u, B = 0xf6eaddcfu, C = 0x26190d01u, D = 0x71594535u;
};
struct Mxfp4Levels {
    static const u32 A = 0x03020100u, B = 0x0c080604u, C = 0xfdfeff00u, D = 0xf4f8fafcu;
};

// Returns the levels of the four nibbles in the low half of n.
template <typename L> inline u32 levels_of(u32 n) {
    u32 select = n & 0x7777u;
    u32 low = __byte_perm(L::A, L::B, select), high = __byte_perm(L::C, L::D, select);
    return __byte_perm(low, high, 0x3210u | (n & 0x8888u) >> 1);
}

// Expands nibbles to the signed levels that they stand for.
template <typename L> inline void levels(const uint4& v, u32* q) {
    const u32 w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        // Bytes of both alternate between elements 0 .. 15 and the others.
        u32 first = levels_of<L>(w[i]), second = levels_of<L>(w[i] >> 16);
        q[i] = __byte_perm(first, second, 0x6420);
        q[4 + i] = __byte_perm(first, second, 0x7531);
    }
}

struct F16Scale {
    inline static float of(u32 bits) { return f16_to_f32((u16)bits); }
};
struct Bf16Scale {
    inline static float of(u32 bits) { return __uint_as_float(bits << 16); }
};

// Types with blocks of 32 whose nibbles stand for signed levels.
template <typename L, typename S> struct PackedLevels {
    static const int COLS = 128, SUBS = 1, BYTES = 576, CENTRE = 0, HIGH = 0;
    static const bool SIGNED = true;
    inline static Sub load(const u8* unit, u32, u32 lane) {
        Sub sub;
        levels<L>(plane16(unit, 0, lane), sub.q);
        sub.scale[0] = sub.scale[1] = S::of(plane2(unit, 512, lane));
        sub.min = 0.0f;
        return sub;
    }
};

typedef PackedLevels<Iq4Levels, F16Scale> PackedIQ4_NL;
typedef PackedLevels<Mxfp4Levels, Bf16Scale> PackedMXFP4;

struct PackedIQ4_XS {
    static const int COLS = 256, SUBS = 2, BYTES = 1104, CENTRE = 0, HIGH = 0;
    static const bool SIGNED = true;
    inline static Sub load(const u8* unit, u32 c, u32 lane) {
        Sub sub;
        levels<Iq4Levels>(plane16(unit, 512 * c, lane), sub.q);
        float d = f16_to_f32((u16)plane2(unit, 1088, lane / TILE_SUBS));
        sub.scale[0] = sub.scale[1] = __fmul_rn(d, (float)(i8)(plane2(unit, 1024, lane) >> (8 * c) & 0xffu));
        sub.min = 0.0f;
        return sub;
    }
};

// Returns element e. Scaling by powers of two is exact, so the result equals the file's quant times its
// scale; for types with a zero point, the quant is centred first, as in its codec.
template <typename Q> inline float sub_value(const Sub& sub, int e) {
    u32 byte = sub.q[e / 4] >> (8 * (e % 4)) & 0xffu;
    float q = Q::SIGNED ? (float)(i8)byte : (float)byte, scale = sub.scale[e / 16];
    if (Q::CENTRE != 0) {
        // The minimum is CENTRE times d, and the scale is d over a power of two.
        float d = sub.min / (float)(Q::CENTRE != 0 ? Q::CENTRE : 1);
        float step = Q::HIGH != 0 ? 0.125f : e < 16 ? 1.0f : 0.0625f;
        return __fmul_rn(d, q * step - (float)Q::CENTRE);
    }
    return __fsub_rn(__fmul_rn(scale, q), sub.min);
}
