// quant.cuh: blocks of quantised types in file layout, decoded eight elements at a time
//
// Each type declares the elements (LEN) and bytes of a block, loads the bytes of part p (of LEN / 8), and
// decodes them to eight values: the first four are elements first(p) .. first(p) + 3 of the block, the others
// second(p) .. second(p) + 3. Loading is separate from decoding so that many loads can be in flight. Decoding
// follows the codecs of refrain-tensor, so values agree bit for bit.
//
// Tensors are 16-byte aligned; a block's alignment is the largest power of two that divides its size.
#pragma once
#include "dtype.cuh"
#include "grids.cuh"

inline float byte_f32(u32 word, int i) { return (float)(word >> (8 * i) & 0xffu); }

// Types whose byte 32 h + l holds the two-bit fields of elements 128 h + 32 g + l, for g = 0 .. 3. Part p
// enumerates h, then which half of the four g (elements of g = 2 j and 2 j + 1), then l / 4.
struct Crumbs256 {
    static const int LEN = 256;
    inline static int h(int p) { return p / 16; }
    inline static int l(int p) { return p % 8 * 4; }
    inline static int g(int p) { return p / 8 % 2 * 2; }
    inline static int first(int p) { return 128 * h(p) + 32 * g(p) + l(p); }
    inline static int second(int p) { return first(p) + 32; }
};

// scales[16], qs[64], d, dmin: x = d scale q - dmin min
struct Q2_K : Crumbs256 {
    static const int BYTES = 84;
    struct Raw { u32 dm, q; u8 scales[2]; };
    inline static Raw load(const u8* b, int p) {
        int s = first(p) / 16;
        return Raw{load_u32(b + 80), load_u32(b + 16 + 32 * h(p) + l(p)), {b[s], b[s + 2]}};
    }
    inline static void decode(const Raw& raw, int p, float* out) {
        float d = f16_to_f32((u16)raw.dm), dmin = f16_to_f32((u16)(raw.dm >> 16));
#pragma unroll
        for (int k = 0; k < 2; k++) {
            u32 scale = raw.scales[k];
            float s = __fmul_rn(d, (float)(scale & 0xfu)), m = __fmul_rn(dmin, (float)(scale >> 4));
            u32 bits = raw.q >> (2 * (g(p) + k)) & 0x03030303u;
#pragma unroll
            for (int i = 0; i < 4; i++) out[4 * k + i] = __fsub_rn(__fmul_rn(s, byte_f32(bits, i)), m);
        }
    }
};

// Types of groups of eight elements: part p is group p. Magnitudes are points of a grid, grids.cuh.
struct Groups256 {
    static const int LEN = 256;
    inline static int first(int p) { return 8 * p; }
    inline static int second(int p) { return 8 * p + 4; }
};

// Four signed magnitudes, one per byte of the word, times d.
inline void signed_levels(float d, u32 magnitudes, u32 signs, float* out) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float level = byte_f32(magnitudes, i);
        out[i] = __fmul_rn(d, signs >> i & 1u ? -level : level);
    }
}

// The signs that seven bits stand for: the eighth makes their number even.
inline u32 even_signs(u32 seven) { return seven | ((u32)__popc(seven) & 1u) << 7; }

// Four magnitudes of a point of an IQ2 grid: fields of two bits, levels 8, 25 and 43.
inline u32 iq2_levels(u32 fields) {
    u32 word = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) word |= (0x2b1908u >> (8 * (fields >> (2 * i) & 3u)) & 0xffu) << (8 * i);
    return word;
}

inline void iq2_decode(float d, u32 scale, u32 point, u32 signs, float* out) {
    float step = __fmul_rn(d, 0.5f + (float)scale) * 0.25f;
    signed_levels(step, iq2_levels(point), signs, out);
    signed_levels(step, iq2_levels(point >> 8), signs >> 4, out + 4);
}

// d, then for each 32 elements four points, and a word of four times seven signs and the scale
struct IQ2_XXS : Groups256 {
    static const int BYTES = 66;
    struct Raw { u16 d; u8 point; u32 bits; };
    inline static Raw load(const u8* b, int p) {
        const u8* sub = b + 2 + 8 * (p / 4);
        return Raw{*(const u16*)b, sub[p % 4], load_u32_by_2(sub + 4)};
    }
    inline static void decode(const Raw& raw, int p, float* out) {
        u32 signs = even_signs(raw.bits >> (7 * (p % 4)) & 0x7fu);
        iq2_decode(f16_to_f32(raw.d), raw.bits >> 28, IQ2_XXS_GRID[raw.point], signs, out);
    }
};

// d, words of nine bits of point and seven signs, scales[8]
struct IQ2_XS : Groups256 {
    static const int BYTES = 74;
    struct Raw { u16 d, bits; u8 scales; };
    inline static Raw load(const u8* b, int p) {
        return Raw{*(const u16*)b, *(const u16*)(b + 2 + 2 * p), b[66 + p / 4]};
    }
    inline static void decode(const Raw& raw, int p, float* out) {
        u32 scale = (u32)raw.scales >> (p % 4 / 2 * 4) & 0xfu;
        iq2_decode(f16_to_f32(raw.d), scale, IQ2_XS_GRID[raw.bits & 511u], even_signs((u32)raw.bits >> 9), out);
    }
};

// d, points[32], signs[32], high bits of the points[8], scales[8]
struct IQ2_S : Groups256 {
    static const int BYTES = 82;
    struct Raw { u16 d; u8 low, signs, high, scales; };
    inline static Raw load(const u8* b, int p) {
        return Raw{*(const u16*)b, b[2 + p], b[34 + p], b[66 + p / 4], b[74 + p / 4]};
    }
    inline static void decode(const Raw& raw, int p, float* out) {
        u32 scale = (u32)raw.scales >> (p % 4 / 2 * 4) & 0xfu;
        u32 point = (u32)raw.low | ((u32)raw.high >> (2 * (p % 4)) & 3u) << 8;
        iq2_decode(f16_to_f32(raw.d), scale, IQ2_S_GRID[point], raw.signs, out);
    }
};

// Four magnitudes of a point of the IQ3_XXS grid: fields of three bits, levels 4, 12, .. 52 and 62.
inline u32 iq3_xxs_levels(u32 fields) {
    u32 word = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        u32 field = fields >> (3 * i) & 7u;
        word |= (field == 7u ? 62u : 8u * field + 4u) << (8 * i);
    }
    return word;
}

// d, points[64], words of four times seven signs and the scale
struct IQ3_XXS : Groups256 {
    static const int BYTES = 98;
    struct Raw { u16 d, points; u32 bits; };
    inline static Raw load(const u8* b, int p) {
        return Raw{*(const u16*)b, *(const u16*)(b + 2 + 2 * p), load_u32_by_2(b + 66 + 4 * (p / 4))};
    }
    inline static void decode(const Raw& raw, int p, float* out) {
        u32 signs = even_signs(raw.bits >> (7 * (p % 4)) & 0x7fu);
        float step = __fmul_rn(f16_to_f32(raw.d), 0.5f + (float)(raw.bits >> 28)) * 0.5f;
        signed_levels(step, iq3_xxs_levels(IQ3_XXS_GRID[raw.points & 0xffu]), signs, out);
        signed_levels(step, iq3_xxs_levels(IQ3_XXS_GRID[raw.points >> 8]), signs >> 4, out + 4);
    }
};

// Four magnitudes of a point of the IQ3_S grid: fields of three bits, levels 1, 3, .. 15.
inline u32 iq3_s_levels(u32 fields) {
    u32 word = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) word |= (2u * (fields >> (3 * i) & 7u) + 1u) << (8 * i);
    return word;
}

// d, points[64], high bits of the points[8], signs[32], scales[4]
struct IQ3_S : Groups256 {
    static const int BYTES = 110;
    struct Raw { u16 d, points; u8 high, signs, scales; };
    inline static Raw load(const u8* b, int p) {
        return Raw{*(const u16*)b, *(const u16*)(b + 2 + 2 * p), b[66 + p / 4], b[74 + p], b[106 + p / 8]};
    }
    inline static void decode(const Raw& raw, int p, float* out) {
        u32 scale = (u32)raw.scales >> (p % 8 / 4 * 4) & 0xfu, high = (u32)raw.high >> (2 * (p % 4));
        float step = __fmul_rn(f16_to_f32(raw.d), (float)(2u * scale + 1u));
        u32 first = IQ3_S_GRID[(raw.points & 0xffu) | (high & 1u) << 8];
        u32 second = IQ3_S_GRID[(raw.points >> 8) | (high >> 1 & 1u) << 8];
        signed_levels(step, iq3_s_levels(first), raw.signs, out);
        signed_levels(step, iq3_s_levels(second), (u32)raw.signs >> 4, out + 4);
    }
};
