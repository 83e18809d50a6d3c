// scatter.cu: scatter-add: y[r] = sum of the rows of x whose id is r, in order
//
//   ids     [n]          i32; negative or >= n_rows: the row is dropped
//   x       [n, d]       T, rows of consecutive elements at rows.start(i)
//   y       [n_rows, d]  T, dense; rows without an id are zero
//   order   [n]          u32: rows of x sorted by id, stable
//   sorted  [n]          i32: ids in that order
//
// scatter_rank writes each row to its rank, the number of rows that come before it, which it finds by
// comparing all pairs. scatter_sum searches for the rows of each id.
//
// Launch       rank: grid (ceil(n / 32)), block (256); sum: grid (n_rows), block (multiple of 32, at most
//              256), shared 0
// Requires     wide: rows of x and y are 16-byte aligned and have a multiple of 8 elements
// Aliasing     none
// Accumulation f32, rounded once
// Determinism  same bits every run: rows are added in order
// Capture      safe: ids are read at each run
#include "eight.cuh"
#include "overlap.cuh"
#include "view.cuh"

// Returns the first index from `low` on whose id is not below `id`. Each iteration probes 32 indices, one per
// lane of a warp.
inline u32 first_not_below(const i32* sorted, u32 low, u32 n, i32 id) {
    u32 lane = threadIdx.x % 32, end = n;
    while (low < end) {
        u32 step = (end - low + 31) / 32, at = low + lane * step;
        u32 n_below = __popc(__ballot_sync(0xffffffffu, at < end && sorted[at] < id));
        if (n_below == 0) break;
        u32 next = low + n_below * step;
        low += (n_below - 1) * step + 1;
        end = next < end ? next : end;
    }
    return low;
}

template <typename T>
inline void scatter_sum(T* y, const T* x, const u32* order, const i32* sorted, const Rows& rows, u32 n, u32 d, u32 wide) {
    start();
    i32 id = (i32)blockIdx.x;
    u32 low = first_not_below(sorted, 0, n, id);
    // Usually few rows have the id.
    u32 near = n - low < 32 ? n : low + 32, end = first_not_below(sorted, low, near, id + 1);
    if (end == near && near < n) end = first_not_below(sorted, near, n, id + 1);
    const u32 AT_ONCE = 8;
    for (u32 at = 8 * threadIdx.x; at < d; at += 8 * blockDim.x) {
        float sum[8];
#pragma unroll
        for (int i = 0; i < 8; i++) sum[i] = 0.0f;
        for (u32 k = low; k < end; k += AT_ONCE) {
            Eight<T> e[AT_ONCE];
#pragma unroll
            for (u32 j = 0; j < AT_ONCE; j++) {
                if (k + j < end) e[j] = load8(x + rows.start(order[k + j]) + at, d - at, wide);
            }
#pragma unroll
            for (u32 j = 0; j < AT_ONCE; j++) {
                if (k + j >= end) continue;
#pragma unroll
                for (int i = 0; i < 8; i++) sum[i] += e[j][i];
            }
        }
        store8(y + (u64)id * d + at, sum, d - at, wide);
    }
}

#define SUM(name, T)                                                                                                \
    extern "C" __global__ __launch_bounds__(256) void scatter_sum_##name(T* y, const T* x, const u32* order,       \
                                                                         const i32* sorted, Rows rows, u32 n, u32 d, \
                                                                         u32 wide) {                                \
        scatter_sum(y, x, order, sorted, rows, n, d, wide);                                                         \
    }

// unit rank
// A block ranks 32 rows; its eight warps divide the rows that they are compared with.
extern "C" __global__ __launch_bounds__(256) void scatter_rank(u32* order, i32* sorted, const i32* ids, u32 n) {
    start();
    const u32 TURNS = 8, TILE = 256 * TURNS;
    __shared__ uint4 tiles[TILE / 4];
    i32* tile = (i32*)tiles;
    __shared__ u32 counts[8][32];
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, i = 32 * blockIdx.x + lane;
    i32 id = i < n ? ids[i] : 0;
    u32 count = 0;
    // The next tile is prefetched while one is processed.
    i32 next[TURNS];
    auto load = [&](u32 first) {
#pragma unroll
        for (u32 j = 0; j < TURNS; j++) {
            u32 at = first + 256 * j + threadIdx.x;
            next[j] = at < n ? ids[at] : 0;
        }
    };
    load(0);
    for (u32 first = 0; first < n; first += TILE) {
        __syncthreads();
#pragma unroll
        for (u32 j = 0; j < TURNS; j++) tile[256 * j + threadIdx.x] = next[j];
        __syncthreads();
        if (first + TILE < n) load(first + TILE);
        for (u32 turn = 0; turn < TURNS; turn++) {
            u32 begin = 256 * turn + 32 * warp, end = n - first < begin + 32 ? n - first : begin + 32;
            if (begin >= end) break;
            const uint4* fours = tiles + begin / 4;
            // All 32 rows come before row i or all after it, unless they are this block's rows.
            if (first + begin == 32 * blockIdx.x || end != begin + 32) {
                for (u32 j = begin; j < end; j++) count += tile[j] < id || (tile[j] == id && first + j < i);
            } else if (first + begin < 32 * blockIdx.x) {
#pragma unroll
                for (u32 j = 0; j < 8; j++) {
                    uint4 v = fours[j];
                    count += ((i32)v.x <= id) + ((i32)v.y <= id) + ((i32)v.z <= id) + ((i32)v.w <= id);
                }
            } else {
#pragma unroll
                for (u32 j = 0; j < 8; j++) {
                    uint4 v = fours[j];
                    count += ((i32)v.x < id) + ((i32)v.y < id) + ((i32)v.z < id) + ((i32)v.w < id);
                }
            }
        }
    }
    counts[warp][lane] = count;
    __syncthreads();
    if (warp != 0 || i >= n) return;
    count = 0;
#pragma unroll
    for (int w = 0; w < 8; w++) count += counts[w][lane];
    order[count] = i;
    sorted[count] = id;
}
// unit f32
SUM(f32, float)
// unit f16
SUM(f16, F16)
// unit bf16
SUM(bf16, BF16)
