// quant.cuh: blocks of quantised types, as files hold them, decoded eight elements at a time.
//
// Each type says how many elements and bytes a block has, loads what part p (of LEN / 8) needs, and decodes it into eight
// values: the first four are elements first(p) .. first(p) + 3 of the block, the others second(p) .. second(p) + 3.
// Loads are apart so that many can be under way at once. Values are formed as the codecs of refrain-tensor form them, so
// they agree to the bit with its tables.
//
// Tensors start at a multiple of 16 bytes; a block starts at a multiple of what its size is a multiple of.
#pragma once
#include "dtype.cuh"

inline float byte_f32(u32 word, int i) { return (float)(word >> (8 * i) & 0xffu); }


// d, qs[32]: x = d q
struct Q8_0 {
    static const int LEN = 32, BYTES = 34;
    inline static int first(int p) { return 8 * p; }
    inline static int second(int p) { return 8 * p + 4; }
    struct Raw { u16 d; u32 q[2]; };
    // Every second block starts two bytes off a word: then two words and a half hold what two words do.
    inline static Raw load(const u8* b, int p) {
        const u8* q = b + 2 + 8 * p;
        Raw raw;
        raw.d = *(const u16*)b;
        if ((u64)q % 4 == 0) {
            raw.q[0] = load_u32(q);
            raw.q[1] = load_u32(q + 4);
        } else {
            u32 first = load_u32(q - 2), second = load_u32(q + 2), third = *(const u16*)(q + 6);
            raw.q[0] = first >> 16 | second << 16;
            raw.q[1] = second >> 16 | third << 16;
        }
        return raw;
    }
    inline static void decode(const Raw& raw, int, float* out) {
        float d = f16_to_f32(raw.d);
#pragma unroll
        for (int h = 0; h < 2; h++) {
#pragma unroll
            for (int i = 0; i < 4; i++) out[4 * h + i] = __fmul_rn(d, (float)(i8)(raw.q[h] >> (8 * i)));
        }
    }
};

// Types whose byte j holds element j below and element 16 + j above.
struct Nibbles32 {
    static const int LEN = 32;
    inline static int first(int p) { return 4 * p; }
    inline static int second(int p) { return 16 + 4 * p; }
};

// d, qs[16]: x = d (q - 8)
struct Q4_0 : Nibbles32 {
    static const int BYTES = 18;
    struct Raw { u16 d; u32 q; };
    inline static Raw load(const u8* b, int p) { return Raw{*(const u16*)b, load_u32_by_2(b + 2 + 4 * p)}; }
    inline static void decode(const Raw& raw, int, float* out) {
        float d = f16_to_f32(raw.d);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            out[i] = __fmul_rn(d, byte_f32(raw.q & 0x0f0f0f0fu, i) - 8.0f);
            out[4 + i] = __fmul_rn(d, byte_f32(raw.q >> 4 & 0x0f0f0f0fu, i) - 8.0f);
        }
    }
};

// d, m, qs[16]: x = d q + m
struct Q4_1 : Nibbles32 {
    static const int BYTES = 20;
    struct Raw { u32 dm, q; };
    inline static Raw load(const u8* b, int p) { return Raw{load_u32(b), load_u32(b + 4 + 4 * p)}; }
    inline static void decode(const Raw& raw, int, float* out) {
        float d = f16_to_f32((u16)raw.dm), m = f16_to_f32((u16)(raw.dm >> 16));
#pragma unroll
        for (int i = 0; i < 4; i++) {
            out[i] = __fadd_rn(__fmul_rn(d, byte_f32(raw.q & 0x0f0f0f0fu, i)), m);
            out[4 + i] = __fadd_rn(__fmul_rn(d, byte_f32(raw.q >> 4 & 0x0f0f0f0fu, i)), m);
        }
    }
};

// Bits i .. i + 3 of qh as bit 4 of four bytes.
inline u32 fifth_bits(u32 qh, int i) {
    u32 b = qh >> i & 0xfu;
    return (b & 1u) << 4 | (b & 2u) << 11 | (b & 4u) << 18 | (b & 8u) << 25;
}

// d, qh, qs[16]: x = d (q - 16)
struct Q5_0 : Nibbles32 {
    static const int BYTES = 22;
    struct Raw { u16 d; u32 qh, q; };
    inline static Raw load(const u8* b, int p) {
        return Raw{*(const u16*)b, load_u32_by_2(b + 2), load_u32_by_2(b + 6 + 4 * p)};
    }
    inline static void decode(const Raw& raw, int p, float* out) {
        float d = f16_to_f32(raw.d);
        u32 low = raw.q & 0x0f0f0f0fu | fifth_bits(raw.qh, 4 * p);
        u32 high = raw.q >> 4 & 0x0f0f0f0fu | fifth_bits(raw.qh, 16 + 4 * p);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            out[i] = __fmul_rn(d, byte_f32(low, i) - 16.0f);
            out[4 + i] = __fmul_rn(d, byte_f32(high, i) - 16.0f);
        }
    }
};

// d, m, qh, qs[16]: x = d q + m
struct Q5_1 : Nibbles32 {
    static const int BYTES = 24;
    struct Raw { u32 dm, qh, q; };
    inline static Raw load(const u8* b, int p) {
        return Raw{load_u32(b), load_u32(b + 4), load_u32(b + 8 + 4 * p)};
    }
    inline static void decode(const Raw& raw, int p, float* out) {
        float d = f16_to_f32((u16)raw.dm), m = f16_to_f32((u16)(raw.dm >> 16));
        u32 low = raw.q & 0x0f0f0f0fu | fifth_bits(raw.qh, 4 * p);
        u32 high = raw.q >> 4 & 0x0f0f0f0fu | fifth_bits(raw.qh, 16 + 4 * p);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            out[i] = __fadd_rn(__fmul_rn(d, byte_f32(low, i)), m);
            out[4 + i] = __fadd_rn(__fmul_rn(d, byte_f32(high, i)), m);
        }
    }
};

// The 16 levels of IQ4_NL and IQ4_XS, four to a word.
inline float iq4_value(u32 q) {
    u32 word = q & 8u ? (q & 4u ? 0x71594535u : 0x26190d01u) : (q & 4u ? 0xf6eaddcfu : 0xbfad9881u);
    return (float)(i8)(word >> (8 * (q & 3u)));
}

// d, qs[16]: x = d level[q]
struct IQ4_NL : Nibbles32 {
    static const int BYTES = 18;
    struct Raw { u16 d; u32 q; };
    inline static Raw load(const u8* b, int p) { return Raw{*(const u16*)b, load_u32_by_2(b + 2 + 4 * p)}; }
    inline static void decode(const Raw& raw, int, float* out) {
        float d = f16_to_f32(raw.d);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            out[i] = __fmul_rn(d, iq4_value(raw.q >> (8 * i) & 0xfu));
            out[4 + i] = __fmul_rn(d, iq4_value(raw.q >> (8 * i + 4) & 0xfu));
        }
    }
};

// d, scales_h, scales_l[4], qs[128]: x = d (scale - 32) level[q]; sub-blocks of 32 are laid out as in IQ4_NL
struct IQ4_XS {
    static const int LEN = 256, BYTES = 136;
    inline static int first(int p) { return 32 * (p / 4) + 4 * (p % 4); }
    inline static int second(int p) { return first(p) + 16; }
    struct Raw { u32 head, scales, q; };
    inline static Raw load(const u8* b, int p) {
        return Raw{load_u32(b), load_u32(b + 4), load_u32(b + 8 + 16 * (p / 4) + 4 * (p % 4))};
    }
    inline static void decode(const Raw& raw, int p, float* out) {
        int s = p / 4;
        u32 high = raw.head >> (16 + 2 * s) & 3u, low = raw.scales >> (4 * s) & 0xfu;
        float d = __fmul_rn(f16_to_f32((u16)raw.head), (float)((int)(low | high << 4) - 32));
#pragma unroll
        for (int i = 0; i < 4; i++) {
            out[i] = __fmul_rn(d, iq4_value(raw.q >> (8 * i) & 0xfu));
            out[4 + i] = __fmul_rn(d, iq4_value(raw.q >> (8 * i + 4) & 0xfu));
        }
    }
};

// Types whose byte 32 h + l holds two-bit fields of elements 128 h + 32 g + l. Part p is h, then l / 4, then which half
// of the four g: elements of g = 2 j and g = 2 j + 1.
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

// hmask[32], qs[64], scales[12], d: x = d (scale - 32) (q - 4)
struct Q3_K : Crumbs256 {
    static const int BYTES = 110;
    struct Raw { u16 d; u32 q, mask; u8 low[2], high[2]; };
    inline static Raw load(const u8* b, int p) {
        int s = first(p) / 16, t = s + 2;
        return Raw{*(const u16*)(b + 108),
                   load_u32_by_2(b + 32 + 32 * h(p) + l(p)),
                   load_u32_by_2(b + l(p)),
                   {b[96 + s % 8], b[96 + t % 8]},
                   {b[104 + s % 4], b[104 + t % 4]}};
    }
    inline static void decode(const Raw& raw, int p, float* out) {
        float d = f16_to_f32(raw.d);
#pragma unroll
        for (int k = 0; k < 2; k++) {
            int s = (first(p) + 32 * k) / 16;
            u32 low = (u32)raw.low[k] >> (4 * (s / 8)) & 0xfu, high = (u32)raw.high[k] >> (2 * (s / 4)) & 3u;
            float scale = __fmul_rn(d, (float)((int)(low | high << 4) - 32));
            u32 bits = raw.q >> (2 * (g(p) + k)) & 0x03030303u;
            bits |= (raw.mask >> (4 * h(p) + g(p) + k) & 0x01010101u) << 2;
#pragma unroll
            for (int i = 0; i < 4; i++) out[4 * k + i] = __fmul_rn(scale, byte_f32(bits, i) - 4.0f);
        }
    }
};

// Types whose byte 32 h + l of qs holds element 64 h + l below and 64 h + 32 + l above. Part p is h, then l / 4.
struct Nibbles256 {
    static const int LEN = 256;
    inline static int first(int p) { return 64 * (p / 8) + 4 * (p % 8); }
    inline static int second(int p) { return first(p) + 32; }

    // d and dmin in head.x; in the others twelve bytes that hold eight scales and eight minima.
    inline static float d(const uint4& head) { return f16_to_f32((u16)head.x); }
    inline static float dmin(const uint4& head) { return f16_to_f32((u16)(head.x >> 16)); }

    // Scale and minimum of sub-block s.
    inline static void scale_and_min(const uint4& head, int s, float& scale, float& min) {
        int shift = 8 * (s % 4);
        u32 a = head.y >> shift, b = head.z >> shift, c = head.w >> shift;
        scale = (float)(s < 4 ? a & 0x3fu : c & 0xfu | (a & 0xc0u) >> 2);
        min = (float)(s < 4 ? b & 0x3fu : (c & 0xf0u) >> 4 | (b & 0xc0u) >> 2);
    }
};

// d, dmin, scales[12], qs[128]: x = d scale q - dmin min
struct Q4_K : Nibbles256 {
    static const int BYTES = 144;
    struct Raw { uint4 head; u32 q; };
    inline static Raw load(const u8* b, int p) { return Raw{*(const uint4*)b, load_u32(b + 16 + 4 * p)}; }
    inline static void decode(const Raw& raw, int p, float* out) {
#pragma unroll
        for (int k = 0; k < 2; k++) {
            float scale, min;
            scale_and_min(raw.head, 2 * (p / 8) + k, scale, min);
            float s = __fmul_rn(d(raw.head), scale), m = __fmul_rn(dmin(raw.head), min);
            u32 bits = raw.q >> (4 * k) & 0x0f0f0f0fu;
#pragma unroll
            for (int i = 0; i < 4; i++) out[4 * k + i] = __fsub_rn(__fmul_rn(s, byte_f32(bits, i)), m);
        }
    }
};

// d, dmin, scales[12], qh[32], qs[128]: x = d scale q - dmin min
struct Q5_K : Nibbles256 {
    static const int BYTES = 176;
    struct Raw { uint4 head; u32 q, qh; };
    inline static Raw load(const u8* b, int p) {
        return Raw{*(const uint4*)b, load_u32(b + 48 + 4 * p), load_u32(b + 16 + 4 * (p % 8))};
    }
    inline static void decode(const Raw& raw, int p, float* out) {
#pragma unroll
        for (int k = 0; k < 2; k++) {
            int sub = 2 * (p / 8) + k;
            float scale, min;
            scale_and_min(raw.head, sub, scale, min);
            float s = __fmul_rn(d(raw.head), scale), m = __fmul_rn(dmin(raw.head), min);
            u32 bits = raw.q >> (4 * k) & 0x0f0f0f0fu | (raw.qh >> sub & 0x01010101u) << 4;
#pragma unroll
            for (int i = 0; i < 4; i++) out[4 * k + i] = __fsub_rn(__fmul_rn(s, byte_f32(bits, i)), m);
        }
    }
};

// ql[128], qh[64], scales[16], d: x = d scale (q - 32). Byte 64 h + 32 j + l of ql holds elements 128 h + 32 j + l
// below and 128 h + 32 (j + 2) + l above (j < 2). Part p is h, then j, then l / 4.
struct Q6_K {
    static const int LEN = 256, BYTES = 210;
    inline static int h(int p) { return p / 16; }
    inline static int j(int p) { return p / 8 % 2; }
    inline static int l(int p) { return p % 8 * 4; }
    inline static int first(int p) { return 128 * h(p) + 32 * j(p) + l(p); }
    inline static int second(int p) { return first(p) + 64; }
    struct Raw { u16 d; u32 ql, qh; i8 scales[2]; };
    inline static Raw load(const u8* b, int p) {
        const u8* scales = b + 192 + first(p) / 16;
        return Raw{*(const u16*)(b + 208),
                   load_u32_by_2(b + 64 * h(p) + 32 * j(p) + l(p)),
                   load_u32_by_2(b + 128 + 32 * h(p) + l(p)),
                   {(i8)scales[0], (i8)scales[4]}};
    }
    inline static void decode(const Raw& raw, int p, float* out) {
        float d = f16_to_f32(raw.d);
#pragma unroll
        for (int k = 0; k < 2; k++) {
            float scale = __fmul_rn(d, (float)raw.scales[k]);
            u32 bits = raw.ql >> (4 * k) & 0x0f0f0f0fu | (raw.qh >> (2 * (j(p) + 2 * k)) & 0x03030303u) << 4;
#pragma unroll
            for (int i = 0; i < 4; i++) out[4 * k + i] = __fmul_rn(scale, byte_f32(bits, i) - 32.0f);
        }
    }
};
