// lora.cu: products with the low-rank adapter of each row's sequence
//
//   lora_down   t[i] = A[adapter(i)] x[i], zeros without an adapter
//   lora_up     y[i] = y0[i] + t[i] B[adapter(i)]; a row without an adapter keeps its bits
//
//   adapter(i) = adapters[seqs[i]]: none if either is negative or out of range
//
//   x         [n, d]             f32, rows of consecutive elements at x_rows.start(i)
//   t         [n, r]             f32, in lora_down dense, in lora_up at t_rows.start(i)
//   a         [n_adapters, r, d] f32, f16 or bf16
//   b         [n_adapters, r, f] likewise
//   y0        [n, f]             f32, rows at y_rows.start(i)
//   y         [n, f]             f32, dense; may be y0
//   seqs      [n]                i32
//   adapters  [n_seqs]           i32
//
// A block computes the results of `tile` consecutive rows, 1 or 4. Rows of a tile that have the same adapter share its
// loads; each row has its own sums, so its bits depend neither on its neighbours nor on the tile.
//
// Launch       lora_down: grid (ceil(n / tile), ceil(r / (tile == 1 ? 4 : 8))), block (256). lora_up: grid
//              (ceil(n / tile), ceil(f / 512)), block (64); eight columns per thread. Shared 0
// Requires     y and the factors 16-byte aligned. Rows that are not 16-byte aligned, or no multiple of 8 long, are
//              read element by element
// Aliasing     y may be y0: a thread reads an element before it writes it, and no other thread touches it
// Sums         in f32. lora_down: thread k adds columns 8 k + 2048 i .. + 8 in order, then lanes are added as in
//              warp_reduce, then warps in order. lora_up: in order of the rank, then added to y0. Same bits every run
// Capture      safe: sequences and adapters are read at each run
#include "eight.cuh"
#include "reduce.cuh"
#include "view.cuh"

const u32 NO_ADAPTER = 0xffffffffu;
const u32 N_WARPS = 8;

struct LoraSizes {
    u32 n;
    u32 n_seqs;
    u32 n_adapters;
    u32 rank;
    u32 width;  // d or f
    u32 tile;
};

// The adapters of a tile of rows.
template <u32 TILE> struct LoraTile {
    u32 first;
    u32 adapter[TILE];

    inline LoraTile(const LoraSizes& s, const i32* seqs, const i32* adapters) {
        first = blockIdx.x * TILE;
#pragma unroll
        for (u32 i = 0; i < TILE; i++) {
            adapter[i] = NO_ADAPTER;
            if (first + i >= s.n) continue;
            i32 seq = seqs[first + i];
            if (seq < 0 || (u32)seq >= s.n_seqs) continue;
            i32 id = adapters[seq];
            if (id >= 0 && (u32)id < s.n_adapters) adapter[i] = (u32)id;
        }
    }

    // The rows that have the adapter of row `from`, one bit each; 0 if it has none, or if an earlier row has it too.
    inline u32 sharing(u32 from) const {
        u32 id = of(from), rows = 0;
        if (id == NO_ADAPTER) return 0;
#pragma unroll
        for (u32 i = 0; i < TILE; i++) {
            if (adapter[i] == id) rows |= 1u << i;
        }
        return rows & ((1u << from) - 1) ? 0 : rows;
    }

    inline u32 of(u32 row) const {
        u32 id = NO_ADAPTER;
#pragma unroll
        for (u32 i = 0; i < TILE; i++) {
            if (i == row) id = adapter[i];
        }
        return id;
    }
};

// Adds the products of this thread's columns.
template <typename T, u32 TILE, u32 RANKS, bool WIDE>
inline void lora_add_columns(float (&sums)[TILE][RANKS], const float* x, const T* a, const Rows& x_rows, u32 first, u32 rows,
                        u32 n_ranks, u32 d) {
    for (u32 at = 8 * threadIdx.x; at < d; at += 8 * 32 * N_WARPS) {
        Eight<T> w[RANKS];
#pragma unroll
        for (u32 j = 0; j < RANKS; j++) w[j] = load8(a + (u64)(j < n_ranks ? j : 0) * d + at, WIDE ? 8 : d - at, WIDE);
#pragma unroll
        for (u32 i = 0; i < TILE; i++) {
            if (!(rows >> i & 1)) continue;
            Eight<float> v = load8(x + x_rows.start(first + i) + at, WIDE ? 8 : d - at, WIDE);
#pragma unroll
            for (u32 j = 0; j < RANKS; j++) {
#pragma unroll
                for (int e = 0; e < 8; e++) sums[i][j] = fmaf(w[j][e], v[e], sums[i][j]);
            }
        }
    }
}

template <typename T, u32 TILE, u32 RANKS>
inline void lora_down(float* t, const float* x, const T* a, const i32* seqs, const i32* adapters, const Rows& x_rows,
                 const LoraSizes& s) {
    __shared__ float partial[TILE * RANKS][N_WARPS];
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, d = s.width;
    u32 j0 = RANKS * blockIdx.y, n_ranks = min(RANKS, s.rank - j0);
    LoraTile<TILE> tile(s, seqs, adapters);
    bool wide = d % 8 == 0 && (u64)x % 16 == 0 && x_rows.inner_stride % 4 == 0 && x_rows.outer_stride % 4 == 0;
    // The result that this thread stores.
    u32 own_row = threadIdx.x / RANKS, own_rank = threadIdx.x % RANKS;
    bool owns = own_row < TILE && tile.first + own_row < s.n && own_rank < n_ranks;
    float* to = t + (u64)(tile.first + own_row) * s.rank + j0 + own_rank;
    if (owns && tile.of(own_row) == NO_ADAPTER) *to = 0.0f;
    for (u32 from = 0; from < TILE; from++) {
        u32 rows = tile.sharing(from);
        if (rows == 0) continue;
        const T* own = a + ((u64)tile.of(from) * s.rank + j0) * d;
        float sums[TILE][RANKS];
#pragma unroll
        for (u32 i = 0; i < TILE; i++) {
#pragma unroll
            for (u32 j = 0; j < RANKS; j++) sums[i][j] = 0.0f;
        }
        if (wide) lora_add_columns<T, TILE, RANKS, true>(sums, x, own, x_rows, tile.first, rows, n_ranks, d);
        else lora_add_columns<T, TILE, RANKS, false>(sums, x, own, x_rows, tile.first, rows, n_ranks, d);
        __syncthreads();
#pragma unroll
        for (u32 i = 0; i < TILE; i++) {
            if (!(rows >> i & 1)) continue;
#pragma unroll
            for (u32 j = 0; j < RANKS; j++) {
                float sum = warp_reduce(sums[i][j], Add());
                if (lane == 0) partial[i * RANKS + j][warp] = sum;
            }
        }
        __syncthreads();
        if (owns && rows >> own_row & 1) {
            float sum = 0.0f;
#pragma unroll
            for (u32 w = 0; w < N_WARPS; w++) sum += partial[threadIdx.x][w];
            *to = sum;
        }
    }
}

// Adds the products of eight columns of a row of factors per rank.
template <typename T, u32 TILE, bool WIDE>
inline void lora_add_ranks(float (&sums)[TILE][8], const float* t, const T* column, const Rows& t_rows, u32 first, u32 rows,
                      u32 rank, u32 f, u32 n) {
#pragma unroll 8
    for (u32 j = 0; j < rank; j++) {
        Eight<T> w = load8(column + (u64)j * f, WIDE ? 8 : n, WIDE);
#pragma unroll
        for (u32 i = 0; i < TILE; i++) {
            // Rows with another adapter add to sums that nobody reads.
            float v = t[t_rows.start(rows >> i & 1 ? first + i : first) + j];
#pragma unroll
            for (int e = 0; e < 8; e++) sums[i][e] = fmaf(v, w[e], sums[i][e]);
        }
    }
}

template <typename T, u32 TILE>
inline void lora_up(float* y, const float* y0, const float* t, const T* b, const i32* seqs, const i32* adapters,
               const Rows& y_rows, const Rows& t_rows, const LoraSizes& s) {
    u32 f = s.width, at = 8 * (64 * blockIdx.y + threadIdx.x);
    if (at >= f) return;
    LoraTile<TILE> tile(s, seqs, adapters);
    bool wide = f % 8 == 0, y_wide = wide && (u64)y0 % 16 == 0 && y_rows.inner_stride % 4 == 0 && y_rows.outer_stride % 4 == 0;
#pragma unroll
    for (u32 i = 0; i < TILE; i++) {
        u32 row = tile.first + i;
        if (y == y0 || row >= s.n || tile.adapter[i] != NO_ADAPTER) continue;
        Eight<float> old = load8(y0 + y_rows.start(row) + at, f - at, y_wide);
        store8(y + (u64)row * f + at, old, f - at, wide);
    }
    for (u32 from = 0; from < TILE; from++) {
        u32 rows = tile.sharing(from);
        if (rows == 0) continue;
        const T* column = b + (u64)tile.of(from) * s.rank * f + at;
        float sums[TILE][8];
#pragma unroll
        for (u32 i = 0; i < TILE; i++) {
#pragma unroll
            for (int e = 0; e < 8; e++) sums[i][e] = 0.0f;
        }
        if (wide) lora_add_ranks<T, TILE, true>(sums, t, column, t_rows, tile.first, rows, s.rank, f, 8);
        else lora_add_ranks<T, TILE, false>(sums, t, column, t_rows, tile.first, rows, s.rank, f, f - at);
#pragma unroll
        for (u32 i = 0; i < TILE; i++) {
            if (!(rows >> i & 1)) continue;
            u32 row = tile.first + i;
            Eight<float> old = load8(y0 + y_rows.start(row) + at, f - at, y_wide);
            float v[8];
#pragma unroll
            for (int e = 0; e < 8; e++) v[e] = old[e] + sums[i][e];
            store8(y + (u64)row * f + at, v, f - at, wide);
        }
    }
}

#define LORA(name, T)                                                                                               \
    extern "C" __global__ __launch_bounds__(256) void lora_down_##name(                                             \
        float* t, const float* x, const T* a, const i32* seqs, const i32* adapters, Rows x_rows, LoraSizes s) {     \
        start();                                                                                                    \
        if (s.tile == 1) lora_down<T, 1, 4>(t, x, a, seqs, adapters, x_rows, s);                                         \
        else lora_down<T, 4, 8>(t, x, a, seqs, adapters, x_rows, s);                                                     \
    }                                                                                                               \
    extern "C" __global__ __launch_bounds__(64) void lora_up_##name(                                                \
        float* y, const float* y0, const float* t, const T* b, const i32* seqs, const i32* adapters, Rows y_rows,   \
        Rows t_rows, LoraSizes s) {                                                                                 \
        start();                                                                                                    \
        if (s.tile == 1) lora_up<T, 1>(y, y0, t, b, seqs, adapters, y_rows, t_rows, s);                                  \
        else lora_up<T, 4>(y, y0, t, b, seqs, adapters, y_rows, t_rows, s);                                              \
    }

// unit f32
LORA(f32, float)
// unit f16
LORA(f16, F16)
// unit bf16
LORA(bf16, BF16)
