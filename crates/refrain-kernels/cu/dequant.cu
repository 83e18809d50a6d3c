// dequant.cu: y = w, a quantised matrix converted to BF16
//
//   w  [n, k]  dequant_packed: packed (packed.cuh); dequant: blocks in file layout, dense
//   y  [n, k]  BF16, dense
//
// Launch       dequant_packed: grid (ceil(n / 8)), block (256), shared 0: one tile per block, every eighth
//              unit of it per warp. dequant: grid (ceil(n k / 2048)), block (256), shared 0: one part of
//              eight elements per thread
// Requires     w and y 16-byte aligned; k a multiple of the block length
// Aliasing     none
// Determinism  values are computed in f32 as in packed.cuh and quant.cuh, then rounded to nearest even
// Capture      safe
#include "mma.cuh"
#include "overlap.cuh"
#include "packed.cuh"
#include "quant.cuh"

// A unit's rows in shared memory, so that stores cover whole rows; padded by 16 bytes against bank conflicts.
template <typename Q> struct Staged {
    static const u32 ROW = 2 * Q::COLS, PITCH = ROW + 16;
    u8 rows[TILE_ROWS][PITCH];
};

template <typename Q> inline void dequant_packed(BF16* y, const u8* w, u32 n, u32 k) {
    alignas(16) __shared__ Staged<Q> all[8];
    start();
    u32 lane = threadIdx.x % 32, tile = blockIdx.x, n_units = (k + Q::COLS - 1) / Q::COLS;
    Staged<Q>& staged = all[threadIdx.x / 32];
    for (u32 u = threadIdx.x / 32; u < n_units; u += 8) {
        const u8* unit = w + ((u64)tile * n_units + u) * Q::BYTES;
#pragma unroll
        for (int c = 0; c < Q::SUBS; c++) {
            Sub v = Q::load(unit, c, lane);
            uint4* to = (uint4*)(staged.rows[lane / TILE_SUBS] + 64 * (TILE_SUBS * c + lane % TILE_SUBS));
#pragma unroll
            for (int i = 0; i < 4; i++) {
                u32 words[4];
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    int e = 8 * i + 2 * j;
                    words[j] = pack(sub_value<Q>(v, e), sub_value<Q>(v, e + 1), BF16());
                }
                to[i] = make_uint4(words[0], words[1], words[2], words[3]);
            }
        }
        __syncwarp();
        const u32 pieces = Staged<Q>::ROW / 16;
        for (u32 i = lane; i < TILE_ROWS * pieces; i += 32) {
            u32 row = i / pieces, piece = i % pieces, col = u * Q::COLS + 8 * piece;
            if (tile * TILE_ROWS + row < n && col < k) {
                *(uint4*)(y + (u64)(tile * TILE_ROWS + row) * k + col) = *(const uint4*)(staged.rows[row] + 16 * piece);
            }
        }
        __syncwarp();
    }
}

template <typename Q> inline void dequant(BF16* y, const u8* w, u32 n, u32 k) {
    const int parts = Q::LEN / 8;
    start();
    u64 i = (u64)blockIdx.x * 256 + threadIdx.x;
    if (i >= (u64)n * k / 8) return;
    u64 block = i / parts;
    int part = (int)(i % parts);
    float v[8];
    Q::decode(Q::load(w + block * Q::BYTES, part), part, v);
    struct alignas(8) Four { u32 a, b; };
    *(Four*)(y + block * Q::LEN + Q::first(part)) = Four{pack(v[0], v[1], BF16()), pack(v[2], v[3], BF16())};
    *(Four*)(y + block * Q::LEN + Q::second(part)) = Four{pack(v[4], v[5], BF16()), pack(v[6], v[7], BF16())};
}

#define DEQUANT(name, body, Q)                                                                                 \
    extern "C" __global__ __launch_bounds__(256) void dequant_##name##_bf16(BF16* y, const u8* __restrict__ w, \
                                                                            u32 n, u32 k) {                    \
        body<Q>(y, w, n, k);                                                                                   \
    }

// unit q4_0
DEQUANT(q4_0, dequant_packed, PackedQ4_0)
// unit q4_1
DEQUANT(q4_1, dequant_packed, PackedQ4_1)
// unit q5_0
DEQUANT(q5_0, dequant_packed, PackedQ5_0)
// unit q5_1
DEQUANT(q5_1, dequant_packed, PackedQ5_1)
// unit q8_0
DEQUANT(q8_0, dequant_packed, PackedQ8_0)
// unit q3_k
DEQUANT(q3_k, dequant_packed, PackedQ3_K)
// unit q4_k
DEQUANT(q4_k, dequant_packed, PackedQ4_K)
// unit q5_k
DEQUANT(q5_k, dequant_packed, PackedQ5_K)
// unit q6_k
DEQUANT(q6_k, dequant_packed, PackedQ6_K)
// unit iq4_nl
DEQUANT(iq4_nl, dequant_packed, PackedIQ4_NL)
// unit iq4_xs
DEQUANT(iq4_xs, dequant_packed, PackedIQ4_XS)
// unit mxfp4
DEQUANT(mxfp4, dequant_packed, PackedMXFP4)
// unit q2_k
DEQUANT(q2_k, dequant, Q2_K)
// unit iq2_xxs
DEQUANT(iq2_xxs, dequant, IQ2_XXS)
// unit iq2_xs
DEQUANT(iq2_xs, dequant, IQ2_XS)
// unit iq2_s
DEQUANT(iq2_s, dequant, IQ2_S)
// unit iq3_xxs
DEQUANT(iq3_xxs, dequant, IQ3_XXS)
// unit iq3_s
DEQUANT(iq3_s, dequant, IQ3_S)
