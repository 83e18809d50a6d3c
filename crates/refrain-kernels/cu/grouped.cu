// grouped.cu: an expert layer for many rows: products of the rows of each expert with its weights on tensor cores
//
//   ids        [n_pairs]          i32: expert of each choice of each row; one outside 0 .. n_experts - 1 is empty
//   tiles      [2 T]              u32: expert and number of rows of each tile of M rows; then n_tiles
//   pairs      [M T]              u32: choice at each row of a tile; undefined past its rows
//   places     [n_pairs]          u32: row among all tiles of each choice; NOWHERE for an empty one
//   x          [n_rows, k]        f32
//   planes     [M T, k]           BF16, in planes of M rows (planes.cuh), columns padded with zeros to whole planes;
//                                 rows past those of a tile are undefined
//   w0, w1     [n_experts, n, k]  packed (packed.cuh), F16 or BF16; stride p.expert_bytes between experts
//   bias0, 1   [n_experts, n]     f32, stride p.bias_stride, or null
//   y          [n_pairs, n]       f32; rows of empty choices are not written
//
// A step has T = n_pairs / M + n_experts tiles at most; each has rows of one expert, in the order of choices.
// grouped_tiles_i32 makes the lists, grouped_planes_bf16 copies each row to its places. grouped_m*: with w1,
// out = activation(x . w0^T, x . w1^T) in planes, at the places of x; without, y = x . w0^T. An expert without
// rows has no tile, and its weights are not read. batch.cuh has the pipeline.
//
// Launch       grouped_tiles_i32: grid (n_experts), block (256), shared 4 n_experts
//              grouped_planes_bf16: grid (ceil(padded k / 1024), n_rows), block (256), shared 0
//              grouped_m*: grid (tiles of ROWS rows of w0, or of ROWS / 2 of each of two weights and padded n; T),
//              block (288), shared memory as shared_bytes of src/batch.rs
// Requires     k and n multiples of 8; for packed weights, k of the block length; x, planes, weights and y 16-byte
//              aligned; M a power of two
// Aliasing     y may be the memory of planes that are no longer read
// Accumulation f32
// Determinism  same bits every run, and for every M: a sum's order depends only on k
// Capture      safe: the grid is that of the most tiles possible, and blocks past n_tiles end at once
#include "batch.cuh"
#include "joined.cuh"
#include "reduce.cuh"

const u32 NOWHERE = 0xffffffffu;

struct GroupedParams {
    u64 expert_bytes;
    u32 k;
    u32 n;            // rows of an expert
    u32 bias_stride;
    Activation activation;
};

struct PlanesParams {
    u32 k;
    u32 padded;       // k rounded up to whole planes
    u32 n_choices;
    u32 m;            // rows of a tile
};

template <typename W, int M>
inline void grouped(float* y, u16* out, const u8* x, const u32* tiles, const u32* pairs, const u8* w0, const u8* w1,
                    const float* bias0, const float* bias1, const GroupedParams& p) {
    typedef Division<W, M> D;
    const u32 ROWS = D::ROWS;
    start();
    // The number of tiles follows the list of the most possible.
    if (blockIdx.y >= tiles[2 * gridDim.y]) return;
    u32 expert = tiles[2 * blockIdx.y], n_of = tiles[2 * blockIdx.y + 1], row = blockIdx.y * M;
    bool gated = w1 != nullptr;
    u64 skipped = expert * p.expert_bytes;
    Tile tile = {w0 + skipped, gated ? w1 + skipped : nullptr, blockIdx.x * (gated ? ROWS / 2 : ROWS), p.n, p.k};
    u32 n_planes = (p.k + PLANE - 1) / PLANE, n_units = (n_planes + D::PLANES - 1) / D::PLANES;
    u32 padded = (p.n + PLANE - 1) / PLANE * PLANE;
    if (tile.first >= p.n) {
        // Only columns that pad the last plane.
        for (u32 i = threadIdx.x; i < n_of * (ROWS / 8); i += MULTIPLIERS + 32) {
            u32 at = tile.first + 4 * (i % (ROWS / 8));
            if (at < padded) narrow_store(out, row + i / (ROWS / 8), at, padded, M, 0, 0);
        }
        return;
    }
    multiply_tile<W, M>(tile, x + (u64)blockIdx.y * n_planes * D::X_BYTES, 0, n_units, [&](float* sums) {
        sync_threads<MULTIPLIERS>();
        const u32 FOURS = gated ? ROWS / 8 : ROWS / 4;
        for (u32 i = threadIdx.x; i < n_of * FOURS; i += MULTIPLIERS) {
            u32 of = i / FOURS, column = 4 * (i % FOURS), at = tile.first + column;
            float4 v = *(const float4*)(sums + of * D::PITCH + column);
            if (!gated) {
                if (at < p.n) *(float4*)(y + (u64)pairs[row + of] * p.n + at) = v;
                continue;
            }
            float4 up = *(const float4*)(sums + of * D::PITCH + ROWS / 2 + column);
            if (at >= padded) continue;
            if (at >= p.n) {
                v = up = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            } else {
                if (bias0 != nullptr) {
                    u64 of_bias = (u64)expert * p.bias_stride + at;
                    const float *b = bias0 + of_bias, *c = bias1 + of_bias;
                    v.x += b[0], v.y += b[1], v.z += b[2], v.w += b[3];
                    up.x += c[0], up.y += c[1], up.z += c[2], up.w += c[3];
                }
                v.x = joined(v.x, up.x, p.activation);
                v.y = joined(v.y, up.y, p.activation);
                v.z = joined(v.z, up.z, p.activation);
                v.w = joined(v.w, up.w, p.activation);
            }
            narrow_store(out, row + of, at, padded, M, pack(v.x, v.y, BF16()), pack(v.z, v.w, BF16()));
        }
    });
}

#define GROUPED(name, W, M)                                                                                         \
    extern "C" __global__ __launch_bounds__(288, 2) void grouped_m##M##_##name(                                     \
        float* y, u16* out, const u8* x, const u32* tiles, const u32* pairs, const u8* w0, const u8* w1,            \
        const float* bias0, const float* bias1, GroupedParams p) {                                                  \
        grouped<W, M>(y, out, x, tiles, pairs, w0, w1, bias0, bias1, p);                                            \
    }
#define ALL(name, W)    \
    GROUPED(name, W, 8)  \
    GROUPED(name, W, 16) \
    GROUPED(name, W, 32) \
    GROUPED(name, W, 64)

// unit lists
extern "C" __global__ __launch_bounds__(256) void grouped_tiles_i32(u32* tiles, u32* pairs, u32* places, const i32* ids,
                                                                   u32 n_pairs, u32 n_tiles_most, u32 m) {
    DYNAMIC_SHARED(shared);
    __shared__ u32 counts[8];
    u32* n_of = (u32*)shared;
    start();
    u32 n_experts = gridDim.x, expert = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (u32 i = threadIdx.x; i < n_experts; i += 256) n_of[i] = 0;
    __syncthreads();
    for (u32 i = threadIdx.x; i < n_pairs; i += 256) {
        i32 id = ids[i];
        bool is_there = id >= 0 && (u32)id < n_experts;
        if (is_there && (u32)id <= expert) atomicAdd(n_of + id, 1u);
        if (!is_there && expert == 0) places[i] = NOWHERE;
    }
    __syncthreads();
    u32 before = 0;
    for (u32 i = threadIdx.x; i < expert; i += 256) before += (n_of[i] + m - 1) / m;
    before = block_reduce(before, Add(), 0u);
    u32 n_mine = n_of[expert], n_tiles = (n_mine + m - 1) / m;
    for (u32 i = threadIdx.x; i < n_tiles; i += 256) {
        tiles[2 * (before + i)] = expert;
        tiles[2 * (before + i) + 1] = min(m, n_mine - i * m);
    }
    if (threadIdx.x == 0 && expert == n_experts - 1) tiles[2 * n_tiles_most] = before + n_tiles;
    if (n_mine == 0) return;
    u32 next = before * m;
    for (u32 base = 0; base < n_pairs; base += 256) {
        u32 i = base + threadIdx.x;
        bool is_mine = i < n_pairs && ids[i] == (i32)expert;
        u32 own = __ballot_sync(0xffffffffu, is_mine);
        __syncthreads();
        if (lane == 0) counts[warp] = __popc(own);
        __syncthreads();
        u32 at = next + __popc(own & ((1u << lane) - 1));
        for (u32 w = 0; w < 8; w++) {
            if (w < warp) at += counts[w];
            next += counts[w];
        }
        if (is_mine) {
            pairs[at] = i;
            places[i] = at;
        }
    }
}
extern "C" __global__ __launch_bounds__(256) void grouped_planes_bf16(u16* planes, const float* x, const u32* places,
                                                                     PlanesParams p) {
    start();
    u32 column = (blockIdx.x * 256 + threadIdx.x) * 4, row = blockIdx.y;
    if (column >= p.padded) return;
    float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (column < p.k) v = *(const float4*)(x + (u64)row * p.k + column);
    u32 low = pack(v.x, v.y, BF16()), high = pack(v.z, v.w, BF16());
    for (u32 i = 0; i < p.n_choices; i++) {
        u32 place = places[row * p.n_choices + i];
        if (place != NOWHERE) narrow_store(planes, place, column, p.padded, p.m, low, high);
    }
}
// unit f16
ALL(f16, Plain16<F16>)
// unit bf16
ALL(bf16, Plain16<BF16>)
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
