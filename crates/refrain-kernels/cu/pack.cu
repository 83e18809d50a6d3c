// pack.cu: converts a quantised matrix from its file layout to the packed layout
//
//   packed  tiles of eight rows (packed.cuh); rows and columns past the end are zeros
//   file    [n, k], blocks in file layout
//
// Launch       grid (ceil(n / 8)), block (256), shared 0: one tile per block, every eighth unit of it per
//              warp
// Requires     file and packed 16-byte aligned; k a multiple of the block length
// Aliasing     none
// Determinism  exact
// Capture      safe
#include "overlap.cuh"
#include "packed.cuh"

const u32 WARPS = 8;

// Loads bytes at a 2-byte aligned address.
inline u32 half_at(const u8* p) { return *(const u16*)p; }
inline u32 word_at(const u8* p) { return load_u32_by_2(p); }

// Returns four nibbles of a run of nibble pairs; `shift` selects the lower or the upper nibbles.
inline u32 nibbles_at(const u8* p, u32 shift) { return word_at(p) >> shift & 0x0f0f0f0fu; }

// Types with blocks of 32.
template <int BITS, bool HAS_MIN> struct File32 {
    typedef Packed32<BITS, HAS_MIN> Q;
    static const u32 HEAD = HAS_MIN ? 4 : 2, LEN = 32, BYTES = HEAD + (BITS == 5 ? 4 : 0) + 16;
    inline static void put(u8* unit, const u8* row, u32 sub, u32, u32 lane, bool there) {
        const u8* b = row + (u64)sub * BYTES;
        const u8* q = b + BYTES - 16;
        uint4 v = make_uint4(0, 0, 0, 0);
        if (there) v = make_uint4(word_at(q), word_at(q + 4), word_at(q + 8), word_at(q + 12));
        *(uint4*)(unit + 16 * lane) = v;
        if (BITS == 5) *(u32*)(unit + 512 + 4 * lane) = there ? word_at(b + HEAD) : 0;
        if (HAS_MIN) {
            *(u32*)(unit + 512 + Q::HIGH + 4 * lane) = there ? word_at(b) : 0;
        } else {
            *(u16*)(unit + 512 + Q::HIGH + 2 * lane) = there ? (u16)half_at(b) : 0;
        }
    }
};

struct FileQ8_0 {
    typedef PackedQ8_0 Q;
    static const u32 LEN = 32, BYTES = 34;
    inline static void put(u8* unit, const u8* row, u32 sub, u32, u32 lane, bool there) {
        const u8* b = row + (u64)sub * BYTES;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const u8* q = b + 2 + 16 * h;
            uint4 v = make_uint4(0, 0, 0, 0);
            if (there) v = make_uint4(word_at(q), word_at(q + 4), word_at(q + 8), word_at(q + 12));
            *(uint4*)(unit + 512 * h + 16 * lane) = v;
        }
        *(u16*)(unit + 1024 + 2 * lane) = there ? (u16)half_at(b) : 0;
    }
};

// Types with blocks of 256, and 6-bit scales and minima.
template <int BITS> struct FileK {
    typedef PackedK<BITS> Q;
    static const u32 LEN = 256, BYTES = BITS == 5 ? 176 : 144;
    inline static void put(u8* unit, const u8* row, u32 sub, u32 c, u32 lane, bool there) {
        const u8* b = row + (u64)(sub / 8) * BYTES;
        u32 s = sub % 8;
        const u8* q = b + BYTES - 128 + 32 * (s / 2);
        u32 v[4] = {0, 0, 0, 0}, high = 0, scale = 0, min = 0, d = 0;
        if (there) {
            u32 shift = 4 * (s % 2);
#pragma unroll
            for (int i = 0; i < 4; i++) v[i] = nibbles_at(q + 4 * i, shift) | nibbles_at(q + 16 + 4 * i, shift) << 4;
            if (BITS == 5) {
                for (int i = 0; i < 32; i++) high |= (u32)(b[16 + i] >> s & 1) << i;
            }
            const u8* p = b + 4;
            scale = s < 4 ? p[s] & 63u : p[s + 4] & 15u | (u32)(p[s - 4] >> 6) << 4;
            min = s < 4 ? p[s + 4] & 63u : (u32)(p[s + 4] >> 4) | (u32)(p[s] >> 6) << 4;
            d = word_at(b);
        }
        *(uint4*)(unit + 512 * c + 16 * lane) = make_uint4(v[0], v[1], v[2], v[3]);
        if (BITS == 5) *(u32*)(unit + 1024 + 8 * lane + 4 * c) = high;
        *(u16*)(unit + 1024 + Q::HIGH + 4 * lane + 2 * c) = (u16)(scale | min << 8);
        if (c == 0 && lane % TILE_SUBS == 0) *(u32*)(unit + 1024 + Q::HIGH + 128 + lane) = d;
    }
};

struct FileQ6_K {
    typedef PackedQ6_K Q;
    static const u32 LEN = 256, BYTES = 210;
    inline static void put(u8* unit, const u8* row, u32 sub, u32 c, u32 lane, bool there) {
        const u8* b = row + (u64)(sub / 8) * BYTES;
        u32 s = sub % 8, half = s / 4, j = s % 4;
        u32 v[4] = {0, 0, 0, 0}, high[2] = {0, 0}, scales = 0, d = 0;
        if (there) {
            const u8* ql = b + 64 * half + 32 * (j % 2);
            const u8* qh = b + 128 + 32 * half;
            u32 shift = 4 * (j / 2);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                v[i] = nibbles_at(ql + 4 * i, shift) | nibbles_at(ql + 16 + 4 * i, shift) << 4;
                high[0] |= (word_at(qh + 4 * i) >> (2 * j) & 0x03030303u) << (2 * i);
                high[1] |= (word_at(qh + 16 + 4 * i) >> (2 * j) & 0x03030303u) << (2 * i);
            }
            scales = half_at(b + 192 + 2 * s);
            d = half_at(b + 208);
        }
        *(uint4*)(unit + 512 * c + 16 * lane) = make_uint4(v[0], v[1], v[2], v[3]);
        *(uint2*)(unit + 1024 + 256 * c + 8 * lane) = make_uint2(high[0], high[1]);
        *(u16*)(unit + 1536 + 4 * lane + 2 * c) = (u16)scales;
        if (c == 0 && lane % TILE_SUBS == 0) *(u16*)(unit + 1664 + lane / 2) = (u16)d;
    }
};

struct FileQ3_K {
    typedef PackedQ3_K Q;
    static const u32 LEN = 256, BYTES = 110;
    // Scale i of 16, plus 32.
    inline static u32 scale_at(const u8* b, u32 i) {
        return (u32)(b[96 + i % 8] >> (4 * (i / 8)) & 15) | (u32)(b[104 + i % 4] >> (2 * (i / 4)) & 3) << 4;
    }
    inline static void put(u8* unit, const u8* row, u32 sub, u32 c, u32 lane, bool there) {
        const u8* b = row + (u64)(sub / 8) * BYTES;
        u32 s = sub % 8, low[2] = {0, 0}, third = 0, scales = 0, d = 0;
        if (there) {
            const u8* q = b + 32 + 32 * (s / 4);
            u32 shift = 2 * (s % 4);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                low[0] |= (word_at(q + 4 * i) >> shift & 0x03030303u) << (2 * i);
                low[1] |= (word_at(q + 16 + 4 * i) >> shift & 0x03030303u) << (2 * i);
            }
            for (int i = 0; i < 32; i++) third |= (u32)(b[i] >> s & 1) << i;
            scales = (scale_at(b, 2 * s) - 32 & 0xffu) | (scale_at(b, 2 * s + 1) - 32 & 0xffu) << 8;
            d = half_at(b + 108);
        }
        *(uint2*)(unit + 256 * c + 8 * lane) = make_uint2(low[0], low[1]);
        *(u32*)(unit + 512 + 8 * lane + 4 * c) = third;
        *(u16*)(unit + 768 + 4 * lane + 2 * c) = (u16)scales;
        if (c == 0 && lane % TILE_SUBS == 0) *(u16*)(unit + 896 + lane / 2) = (u16)d;
    }
};

// Loads four bytes at any address.
inline u32 bytes_at(const u8* p) { return (u32)p[0] | (u32)p[1] << 8 | (u32)p[2] << 16 | (u32)p[3] << 24; }

struct FileMXFP4 {
    typedef PackedMXFP4 Q;
    static const u32 LEN = 32, BYTES = 17;
    inline static void put(u8* unit, const u8* row, u32 sub, u32, u32 lane, bool there) {
        const u8* b = row + (u64)sub * BYTES;
        uint4 v = make_uint4(0, 0, 0, 0);
        u32 scale = 0;
        if (there) {
            v = make_uint4(bytes_at(b + 1), bytes_at(b + 5), bytes_at(b + 9), bytes_at(b + 13));
            // 2^(e - 128); the two smallest are subnormal.
            scale = b[0] < 2 ? 0x20u << b[0] : (u32)(b[0] - 1) << 7;
        }
        *(uint4*)(unit + 16 * lane) = v;
        *(u16*)(unit + 512 + 2 * lane) = (u16)scale;
    }
};

struct FileIQ4_XS {
    typedef PackedIQ4_XS Q;
    static const u32 LEN = 256, BYTES = 136;
    inline static void put(u8* unit, const u8* row, u32 sub, u32 c, u32 lane, bool there) {
        const u8* b = row + (u64)(sub / 8) * BYTES;
        u32 s = sub % 8, scale = 0, d = 0;
        uint4 v = make_uint4(0, 0, 0, 0);
        if (there) {
            const u8* q = b + 8 + 16 * s;
            v = make_uint4(word_at(q), word_at(q + 4), word_at(q + 8), word_at(q + 12));
            u32 high = half_at(b + 2) >> (2 * s) & 3u, low = word_at(b + 4) >> (4 * s) & 0xfu;
            scale = (low | high << 4) - 32;
            d = half_at(b);
        }
        *(uint4*)(unit + 512 * c + 16 * lane) = v;
        unit[1024 + 2 * lane + c] = (u8)scale;
        if (c == 0 && lane % TILE_SUBS == 0) *(u16*)(unit + 1088 + lane / 2) = (u16)d;
    }
};

template <typename F> inline void pack(u8* packed, const u8* file, u32 n, u32 k) {
    typedef typename F::Q Q;
    start();
    u32 lane = threadIdx.x % 32, tile = blockIdx.x, row = tile * TILE_ROWS + lane / TILE_SUBS;
    u32 n_units = (k + Q::COLS - 1) / Q::COLS;
    const u8* from = file + (u64)(row < n ? row : 0) * (k / F::LEN) * F::BYTES;
    for (u32 u = threadIdx.x / 32; u < n_units; u += WARPS) {
        u8* unit = packed + ((u64)tile * n_units + u) * Q::BYTES;
#pragma unroll
        for (int c = 0; c < Q::SUBS; c++) {
            u32 sub = u * (Q::COLS / 32) + TILE_SUBS * c + lane % TILE_SUBS;
            F::put(unit, from, sub, c, lane, row < n && sub < k / 32);
        }
    }
}

#define PACK(name, F)                                                                                                  \
    extern "C" __global__ __launch_bounds__(256) void pack_##name(u8* packed, const u8* file, u32 n, u32 k) { \
        pack<F>(packed, file, n, k);                                                                                   \
    }

typedef File32<4, false> FileQ4_0;
typedef File32<4, true> FileQ4_1;
typedef File32<5, false> FileQ5_0;
typedef File32<5, true> FileQ5_1;
typedef File32<4, false> FileIQ4_NL;
typedef FileK<4> FileQ4_K;
typedef FileK<5> FileQ5_K;

// unit q4_0
PACK(q4_0, FileQ4_0)
// unit q4_1
PACK(q4_1, FileQ4_1)
// unit q5_0
PACK(q5_0, FileQ5_0)
// unit q5_1
PACK(q5_1, FileQ5_1)
// unit q8_0
PACK(q8_0, FileQ8_0)
// unit q3_k
PACK(q3_k, FileQ3_K)
// unit q4_k
PACK(q4_k, FileQ4_K)
// unit q5_k
PACK(q5_k, FileQ5_K)
// unit q6_k
PACK(q6_k, FileQ6_K)
// unit iq4_nl
PACK(iq4_nl, FileIQ4_NL)
// unit iq4_xs
PACK(iq4_xs, FileIQ4_XS)
// unit mxfp4
PACK(mxfp4, FileMXFP4)
