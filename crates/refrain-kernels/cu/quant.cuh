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

inline float byte_f32(u32 word, int i) { return (float)(word >> (8 * i) & 0xffu); }


// Types whose byte j holds element j in the low nibble and element 16 + j in the high nibble.
struct Nibbles32 {
    static const int LEN = 32;
    inline static int first(int p) { return 4 * p; }
    inline static int second(int p) { return 16 + 4 * p; }
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

// d, scales_h, scales_l[4], qs[128]: x = d (scale - 32) level[q]; sub-blocks of 32 have the layout of IQ4_NL
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
