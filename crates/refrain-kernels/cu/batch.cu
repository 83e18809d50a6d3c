// batch.cu: GEMM of many 16-bit activation rows with up to four packed weights; each weight is read once
//
//   y_i = x . w_i^T, or with a gate y0 = narrow = act(x . w0^T) * (x . w1^T)
//
//   y0 .. y3   [m, n]         f32; unused ones null, all null with partials. With a gate: y0 only, with the
//                             values of narrow, or null
//   partials   [S, m, sum n]  f32, for S > 1 splits without clusters (gemm_reduce_f32 adds them); else null
//   narrow     [m, n]         BF16, with a gate: dense, or in planes of narrow_rows rows; else null
//   x          [m, k]         BF16, in planes of M rows (planes.cuh); rows past m are read, their results unused
//   w0 .. w3   [n, k]         quantised and packed (packed.cuh); unused ones null
//   p                         sizes; see Params
//
// The matrix products of a decode step of many sequences; batch.cuh has the pipeline.
//
// On devices with clusters, the splits of k are the blocks of a cluster: each block keeps its partial sums in
// shared memory and reduces a share of the tile across all of them.
//
// Launch       grid (tiles of ROWS rows of each weight, S, tiles of M rows of x), block (288; 384 for M = 128
//              on compute capability 9.0, where registers are reallocated per warpgroup), shared memory as
//              shared_bytes of src/batch.rs, cluster (1, S, 1) if partials is null and S > 1. With a gate, a
//              tile has ROWS / 2 rows of each of the two weights
// Requires     x and weights 16-byte aligned; k a multiple of 128 and of the quantisation block; no launch
//              writes the weights; with a gate, partials is null and both weights have the same n
// Aliasing     none
// Accumulation f32
// Determinism  same bits every run: the order of additions depends only on the sizes
// Capture      safe
#include "batch.cuh"
#include "functions.cuh"

const u32 PARTS = 4;

struct Params {
    u32 m;
    u32 k;
    u32 n[PARTS];     // rows of each weight; 0 for unused ones
    u32 per_split;    // units of each split
    u32 gate;         // 0: none, 1: SiLU, 2: GELU
    u32 narrow_rows;  // 0: narrow is dense
};

template <typename W, int M>
inline void batch(float* const* ys, float* partials, u16* narrow, const u8* x, const u8* const* ws, const Params& p) {
    typedef Division<W, M> D;
    const u32 ROWS = D::ROWS, PLANES = D::PLANES;
    let_next_start();

    // Find this block's weight and rows.
    u32 per_tile = p.gate != 0 ? ROWS / 2 : ROWS, tile_idx = blockIdx.x, begin_of_part = 0, all = 0, part = 0;
    Tile tile = {ws[0], p.gate != 0 ? ws[1] : nullptr, 0, p.n[0], p.k};
    float* y = ys[0];
#pragma unroll
    for (u32 i = 0; i + 1 < PARTS; i++) {
        u32 tiles = (p.n[i] + per_tile - 1) / per_tile;
        if (p.gate == 0 && part == i && tile_idx >= tiles) {
            tile_idx -= tiles;
            part = i + 1;
            begin_of_part += p.n[i];
            tile.w = ws[i + 1];
            y = ys[i + 1];
            tile.n = p.n[i + 1];
        }
    }
#pragma unroll
    for (u32 i = 0; i < PARTS; i++) all += p.n[i];
    tile.first = tile_idx * per_tile;
    u32 n_planes = p.k / PLANE, n_units = n_planes / PLANES;
    u32 begin = blockIdx.y * p.per_split, end = min(begin + p.per_split, n_units);
    const u8* x_tile = x + (u64)blockIdx.z * n_planes * D::X_BYTES;

    multiply_tile<W, M>(tile, x_tile, begin, end, [&](float* sums) {
        bool clustered = gridDim.y > 1 && partials == nullptr;
        Cluster<M * D::PITCH, MULTIPLIERS> cluster(sums, clustered);

        u32 first_of = blockIdx.z * M, n_of = min((u32)M, p.m - first_of);
        // Returns four columns of a row of x.
        auto sum_of = [&](u32 of, u32 column) {
            u32 at = of * D::PITCH + column;
            return clustered ? cluster.sum(at) : *(const float4*)(sums + at);
        };
        if (p.gate != 0) {
            const u32 FOURS = ROWS / 8;
            cluster.share(n_of * FOURS, [&](u32 i) {
                u32 of = i / FOURS, column = 4 * (i % FOURS), at = tile.first + column;
                if (at >= tile.n) return;
                float4 gate = sum_of(of, column), up = sum_of(of, ROWS / 2 + column), v;
                auto joined = [&](float gate, float up) { return (p.gate == 1 ? silu(gate) : gelu_tanh(gate)) * up; };
                v.x = joined(gate.x, up.x);
                v.y = joined(gate.y, up.y);
                v.z = joined(gate.z, up.z);
                v.w = joined(gate.w, up.w);
                of += first_of;
                narrow_store(narrow, of, at, tile.n, p.narrow_rows, pack(v.x, v.y, BF16()), pack(v.z, v.w, BF16()));
                if (y != nullptr) *(float4*)(y + (u64)of * tile.n + at) = v;
            });
        } else {
            u64 stride = tile.n;
            if (partials != nullptr) {
                stride = all;
                y = partials + (u64)blockIdx.y * p.m * all + begin_of_part;
            }
            const u32 FOURS = ROWS / 4;
            cluster.share(n_of * FOURS, [&](u32 i) {
                u32 of = i / FOURS, column = 4 * (i % FOURS), at = tile.first + column;
                if (at >= tile.n) return;
                float4 v = sum_of(of, column);
                float* to = y + (first_of + of) * stride + at;
                if (((u64)to & 15) == 0 && at + 4 <= tile.n) {
                    *(float4*)to = v;
                    return;
                }
                to[0] = v.x;
                if (at + 1 < tile.n) to[1] = v.y;
                if (at + 2 < tile.n) to[2] = v.z;
                if (at + 3 < tile.n) to[3] = v.w;
            });
        }
        cluster.finish();
    });
}

#define BATCH(name, W, M)                                                                                   \
    extern "C" __global__ __launch_bounds__(M == 128 ? 384 : 288, M == 128 ? 1 : 2) void batch_m##M##_##name(             \
        float* y0, float* y1, float* y2, float* y3, float* partials, u16* narrow, const u8* x, const u8* w0, \
        const u8* w1, const u8* w2, const u8* w3, Params p) {                                               \
        float* const y[PARTS] = {y0, y1, y2, y3};                                                           \
        const u8* const w[PARTS] = {w0, w1, w2, w3};                                                        \
        batch<W, M>(y, partials, narrow, x, w, p);                                                          \
    }
#define ALL(name, W)   \
    BATCH(name, W, 8)  \
    BATCH(name, W, 16) \
    BATCH(name, W, 32) \
    BATCH(name, W, 64) \
    BATCH(name, W, 128)

// unit q4_0
ALL(q4_0, Quantised<PackedQ4_0>)
// unit q4_1
ALL(q4_1, Quantised<PackedQ4_1>)
// unit q5_0
ALL(q5_0, Quantised<PackedQ5_0>)
// unit q5_1
ALL(q5_1, Quantised<PackedQ5_1>)
// unit q8_0
ALL(q8_0, Quantised<PackedQ8_0>)
// unit q3_k
ALL(q3_k, Quantised<PackedQ3_K>)
// unit q4_k
ALL(q4_k, Quantised<PackedQ4_K>)
// unit q5_k
ALL(q5_k, Quantised<PackedQ5_K>)
// unit q6_k
ALL(q6_k, Quantised<PackedQ6_K>)
// unit iq4_nl
ALL(iq4_nl, Quantised<PackedIQ4_NL>)
// unit iq4_xs
ALL(iq4_xs, Quantised<PackedIQ4_XS>)
// unit mxfp4
ALL(mxfp4, Quantised<PackedMXFP4>)
