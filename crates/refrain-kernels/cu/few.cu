// few.cu: two to sixteen activation rows times up to three packed weights; each weight is read once
//
//   few_rows quantises the rows for the matmul that follows:
//   rows       [subs, 40 M]  per 32 columns: the bytes of M rows, then M pairs of scale and scaled sum
//   x          [m, k]        f32, dense
//
//   few multiplies, y_i = x . w_i^T:
//   y0 .. y2   [m, n]        f32; unused ones null
//   rows                     as written by few_rows
//   w0 .. w2   [n, k]        quantised and packed (packed.cuh); unused ones null
//   p                        sizes; see Params
//
// M is 8 or 16; rows past m are zeros in `rows` and are not stored. Each block of 32 elements of a row
// becomes signed bytes with one scale: the largest magnitude maps to 127, ties round to even. Eight rows are
// stored together, 32 bytes each; their words w and 4 + w are adjacent, as one lane needs both. subs counts
// the sub-blocks of whole units; those past k are zeros.
//
// A block works on two tiles of eight weight rows at a time; each of its warps takes every eighth unit of
// them. Asynchronous copies load units into one ring per warp, the first ones before the kernel waits for its
// rows. Tensor cores multiply bytes: 16 weight rows by 8 rows of x over half a sub-block.
//
// Launch       few_rows: grid (ceil(subs / 32), M), block (128), shared 0; four threads share a sub-block.
//              few: grid (at most two blocks per SM), block (256), shared for the rings (src/few.rs)
// Requires     k a multiple of the dtype's block length; all pointers 16-byte aligned; no launch writes the
//              weights
// Aliasing     none
// Accumulation integer dot products, exact within half a sub-block; sums over sub-blocks in f32
// Determinism  same bits every run: each warp adds its units in order, then the warps are added in order
// Capture      safe
#include "mma.cuh"
#include "overlap.cuh"
#include "packed.cuh"
#include "tuning.cuh"

const u32 WARPS = FEW_WARPS;
const u32 STAGES = FEW_STAGES;  // pairs of units in a warp's ring
const u32 PAIR_ROWS = 2 * TILE_ROWS;

struct Params {
    u32 m;
    u32 k;
    u32 n[3];  // rows of each weight; 0 for unused ones
};

// Multiplies half a sub-block: bytes of 16 rows of w (a[0] row g, a[1] row g + 8, elements 4 t to 4 t + 3) by
// bytes of 8 rows of x (b: row g, the same elements). Sums are laid out as in mma.cuh: c[0], c[1] row g,
// columns 2 t and 2 t + 1; c[2], c[3] row g + 8.
#ifndef REFRAIN_ON_HOST
template <bool SIGNED> inline void multiply_bytes(i32* c, u32 a0, u32 a1, u32 b) {
    if (SIGNED) {
        asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %7, %7, %7};"
            : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
            : "r"(a0), "r"(a1), "r"(b), "r"(0));
    } else {
        asm("mma.sync.aligned.m16n8k16.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %7, %7, %7};"
            : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
            : "r"(a0), "r"(a1), "r"(b), "r"(0));
    }
}
#else
template <bool SIGNED> inline void multiply_bytes(i32* c, u32 a0, u32 a1, u32 b) {
    u32 lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    LaneExchange& all = lane_exchange();
    all.words[lane][0] = a0, all.words[lane][1] = a1, all.words[lane][2] = b;
    warp_barrier();
    for (u32 i = 0; i < 4; i++) {
        c[i] = 0;
        for (u32 e = 0; e < 4; e++) {
            c[i] = dot_bytes(all.words[4 * g + e][i / 2], all.words[4 * (2 * t + i % 2) + e][2], c[i], SIGNED);
        }
    }
    warp_barrier();
}
#endif

template <int M> inline void few_rows(u8* rows, const float* x, u32 m, u32 k, u32 subs) {
    start();
    u32 sub = blockIdx.x * 32 + threadIdx.x / 4, part = threadIdx.x % 4, row = blockIdx.y;
    float v[8] = {};
    // Sub-blocks past k and rows past m are zeros. Whole warps stay together.
    if (row < m && 32 * sub < k) {
        const float4* from = (const float4*)(x + (u64)row * k + 32 * sub + 8 * part);
        float4 a = from[0], b = from[1];
        v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
    }
    ByteBlock block(v);
    if (sub >= subs) return;
    u8* to = rows + (u64)sub * 40 * M;
    // Words 2 part and 2 part + 1: word w is at 2 w if w < 4, else at 2 (w - 4) + 1.
    u32* words = (u32*)(to + 32 * row) + (part < 2 ? 4 * part : 4 * part - 7);
    words[0] = block.low;
    words[2] = block.high;
    if (part == 0) *(float2*)(to + 32 * M + 8 * row) = block.scale;
}

// Transposes four words across four adjacent lanes: word j of lane t becomes word t of lane j.
inline void transpose(u32* q) {
    bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
#pragma unroll
    for (int j = 0; j < 4; j += 2) {
        u32 got = __shfl_xor_sync(0xffffffffu, odd ? q[j] : q[j + 1], 1);
        if (odd) q[j] = got;
        else q[j + 1] = got;
    }
#pragma unroll
    for (int j = 0; j < 2; j++) {
        u32 got = __shfl_xor_sync(0xffffffffu, upper ? q[j] : q[j + 2], 2);
        if (upper) q[j] = got;
        else q[j + 2] = got;
    }
}

// Loads a tile's part of a plane: lane 4 g + t has sub-block t of row g. After the transposition, word j
// holds elements 4 t to 4 t + 3 of sub-block j, and word 4 + j its elements 16 + 4 t to 19 + 4 t.
template <typename Q> inline Sub load_tile(const u8* unit, u32 c, u32 lane) {
    Sub sub = Q::load(unit, c, lane);
    transpose(sub.q);
    transpose(sub.q + 4);
    return sub;
}

// A warp's sums, per eight rows of x as c of multiply_bytes.
template <int M> struct Sums {
    float of[M / 8][4];
};

// Adds one unit of two tiles. `rows` points at x's data for the unit's first sub-block.
template <typename Q, int M> inline void add_unit(Sums<M>& sums, const u8* units, const u8* rows) {
    const int GROUPS = M / 8;
    u32 lane = threadIdx.x % 32, t = lane % 4;
    // Sixteen rows leave no registers for a second plane.
#pragma unroll(M == 8 ? 2 : 1)
    for (int c = 0; c < Q::SUBS; c++) {
        const u8* plane = rows + TILE_SUBS * c * 40 * M;
        uint2 x[TILE_SUBS][GROUPS];
        float4 scales[TILE_SUBS][GROUPS];
#pragma unroll
        for (int j = 0; j < TILE_SUBS; j++) {
#pragma unroll
            for (int i = 0; i < GROUPS; i++) {
                const u8* at = plane + j * 40 * M;
                x[j][i] = *(const uint2*)(at + 256 * i + 8 * lane);
                scales[j][i] = *(const float4*)(at + 32 * M + 64 * i + 16 * t);
            }
        }
        Sub first = load_tile<Q>(units, c, lane), second = load_tile<Q>(units + Q::BYTES, c, lane);
#pragma unroll
        for (int j = 0; j < TILE_SUBS; j++) {
            u32 from = lane / 4 * 4 + j;
            float left[2], right[2], min[2] = {0.0f, 0.0f};
            left[0] = __shfl_sync(0xffffffffu, first.scale[0], from);
            right[0] = __shfl_sync(0xffffffffu, first.scale[1], from);
            left[1] = __shfl_sync(0xffffffffu, second.scale[0], from);
            right[1] = __shfl_sync(0xffffffffu, second.scale[1], from);
            if (!Q::SIGNED) {
                min[0] = __shfl_sync(0xffffffffu, first.min, from);
                min[1] = __shfl_sync(0xffffffffu, second.min, from);
            }
#pragma unroll
            for (int i = 0; i < GROUPS; i++) {
                i32 low[4], high[4];
                multiply_bytes<Q::SIGNED>(low, first.q[j], second.q[j], x[j][i].x);
                multiply_bytes<Q::SIGNED>(high, first.q[4 + j], second.q[4 + j], x[j][i].y);
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    float d = e % 2 == 0 ? scales[j][i].x : scales[j][i].z;
                    float s = __fmaf_rn(left[e / 2], (float)low[e], right[e / 2] * (float)high[e]);
                    sums.of[i][e] = __fmaf_rn(s, d, sums.of[i][e]);
                    if (!Q::SIGNED) {
                        float total = e % 2 == 0 ? scales[j][i].y : scales[j][i].w;
                        sums.of[i][e] = __fmaf_rn(-min[e / 2], total, sums.of[i][e]);
                    }
                }
            }
        }
    }
}

struct Weights {
    const u8* w[3];
    u32 pairs[3];  // pairs of tiles; the last tile may be single

    inline u32 n_pairs() const { return pairs[0] + pairs[1] + pairs[2]; }
};

// Location of a pair, given its index over all weights: the weight, and the pair's index within it.
struct PairLocation {
    u32 which, pair;

    inline PairLocation(const Weights& weights, u32 of_all) {
        which = 0;
        pair = of_all;
        if (pair >= weights.pairs[0]) {
            pair -= weights.pairs[0];
            which = 1;
            if (pair >= weights.pairs[1]) {
                pair -= weights.pairs[1];
                which = 2;
            }
        }
    }
    // Constant indices, so that parameters stay in constant memory.
    template <typename T> inline T of(const T* each) const {
        return which == 0 ? each[0] : which == 1 ? each[1] : each[2];
    }
};

// Copies a unit of a pair of tiles into its slot. A single last tile is copied twice; the second half's
// results are not stored.
template <typename Q> inline void fetch(u8* slot, const Weights& weights, const Params& p, u32 of_all, u32 unit, u32 units) {
    const u32 PIECES = Q::BYTES / 16;
    PairLocation location(weights, of_all);
    const u8* w = location.of(weights.w);
    u32 last = (location.of(p.n) - 1) / TILE_ROWS, tile = 2 * location.pair;
    const u8* first = w + ((u64)tile * units + unit) * Q::BYTES;
    const u8* second = w + ((u64)min(tile + 1, last) * units + unit) * Q::BYTES;
    for (u32 i = threadIdx.x % 32; i < 2 * PIECES; i += 32) {
        copy_async(slot + 16 * i, i < PIECES ? first + 16 * i : second + 16 * (i - PIECES), true);
    }
}

template <typename Q, int M>
inline void few(float* const* y, const u8* rows, const u8* const* w, const Params& p) {
    const u32 SLOT = 2 * Q::BYTES;
    DYNAMIC_SHARED(shared);
    // Two sets, so that a warp may start the next pair while the last one is summed.
    __shared__ float parts[2][WARPS][M][PAIR_ROWS];
    let_next_start();
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, units = (p.k + Q::COLS - 1) / Q::COLS;
    u8* ring = shared + warp * STAGES * SLOT;
    Weights weights;
#pragma unroll
    for (int i = 0; i < 3; i++) {
        weights.w[i] = w[i];
        weights.pairs[i] = (p.n[i] + PAIR_ROWS - 1) / PAIR_ROWS;
    }
    u32 n_pairs = weights.n_pairs();

    // The next unit to prefetch.
    u32 ahead_pair = warp < units ? blockIdx.x : n_pairs, ahead_unit = warp, ahead_slot = 0;
    auto fetch_next = [&]() {
        if (ahead_pair < n_pairs) {
            fetch<Q>(ring + ahead_slot * SLOT, weights, p, ahead_pair, ahead_unit, units);
            ahead_slot = ahead_slot + 1 == STAGES ? 0 : ahead_slot + 1;
            ahead_unit += WARPS;
            if (ahead_unit >= units) {
                ahead_unit = warp;
                ahead_pair += gridDim.x;
            }
        }
        copies_end_group();
    };
    for (u32 i = 0; i < STAGES; i++) fetch_next();
    wait_for_previous();

    u32 slot = 0, set = 0;
    for (u32 pair = blockIdx.x; pair < n_pairs; pair += gridDim.x) {
        Sums<M> sums = {};
        for (u32 unit = warp; unit < units; unit += WARPS) {
            // Groups complete in order: all but the newest STAGES - 1 have arrived.
            copies_wait<STAGES - 1>();
            __syncwarp();
            add_unit<Q, M>(sums, ring + slot * SLOT, rows + (u64)unit * (Q::COLS / 32) * 40 * M);
            // The slot may be refilled only after every lane has read it.
            __syncwarp();
            fetch_next();
            slot = slot + 1 == STAGES ? 0 : slot + 1;
        }
#pragma unroll
        for (int i = 0; i < M / 8; i++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                u32 row = lane / 4 + e / 2 * TILE_ROWS, column = 8 * i + 2 * (lane % 4) + e % 2;
                parts[set][warp][column][row] = sums.of[i][e];
            }
        }
        __syncthreads();
        u32 column = threadIdx.x / PAIR_ROWS, row = threadIdx.x % PAIR_ROWS;
        PairLocation location(weights, pair);
        u32 n = location.of(p.n), at = location.pair * PAIR_ROWS + row;
        if (column < p.m && column < M && at < n) {
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < WARPS; i++) sum += parts[set][i][column][row];
            location.of(y)[(u64)column * n + at] = sum;
        }
        set ^= 1;
    }
}

#define ROWS(M)                                                                                             \
    extern "C" __global__ __launch_bounds__(128) void few_rows_m##M##_f32(u8* rows, const float* x, u32 m, u32 k, \
                                                                        u32 subs) {                        \
        few_rows<M>(rows, x, m, k, subs);                                                                   \
    }
#define FEW(name, Q, M)                                                                                          \
    extern "C" __global__ __launch_bounds__(256, 2) void few_m##M##_##name(                                      \
        float* y0, float* y1, float* y2, const u8* rows, const u8* w0, const u8* w1, const u8* w2, Params p) {   \
        float* const y[3] = {y0, y1, y2};                                                                        \
        const u8* const w[3] = {w0, w1, w2};                                                                     \
        few<Packed##Q, M>(y, rows, w, p);                                                                        \
    }
#define BOTH(name, Q) FEW(name, Q, 8) FEW(name, Q, 16)

// unit rows
ROWS(8)
ROWS(16)
// unit q4_0
BOTH(q4_0, Q4_0)
// unit q4_1
BOTH(q4_1, Q4_1)
// unit q5_0
BOTH(q5_0, Q5_0)
// unit q5_1
BOTH(q5_1, Q5_1)
// unit q8_0
BOTH(q8_0, Q8_0)
// unit q3_k
BOTH(q3_k, Q3_K)
// unit q4_k
BOTH(q4_k, Q4_K)
// unit q5_k
BOTH(q5_k, Q5_K)
// unit q6_k
BOTH(q6_k, Q6_K)
// unit iq4_nl
BOTH(iq4_nl, IQ4_NL)
// unit iq4_xs
BOTH(iq4_xs, IQ4_XS)
// unit mxfp4
BOTH(mxfp4, MXFP4)
