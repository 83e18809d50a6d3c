// batch_plain.cu: GEMM of a few 16-bit activation rows with up to four 16-bit weights; each weight is read once
//
//   y_i = x . w_i^T, or with a gate y0 = narrow = act(x . w0^T) * (x . w1^T)
//
//   y0 .. y3   [m, n]         f32; unused ones null, all null with partials. With a gate: y0 only, with the
//                             values of narrow, or null
//   partials   [S, m, sum n]  f32, for S > 1 splits without clusters (gemm_reduce_f32 adds them); else null
//   narrow     [m, n]         T, with a gate: dense, or in planes of narrow_rows rows; else null
//   x          [m, k]         T, in planes of M rows (planes.cuh); rows past m are read, their results unused
//   w0 .. w3   [n, k]         T in file layout; unused ones null
//   p                         sizes; see Params
//
// The counterpart of batch.cu for weights that need no decoding. All that takes time is to read them: rows of
// weights must be read in long pieces, without a pause between tiles. A block multiplies several tiles of 16 H
// rows, one after another. Four warps copy their weights into one ring, H pieces of 16 rows by 512 columns for
// each step along k, and the planes of x of that step into another. They prefetch into the next tile while the
// others finish this one, and their first copies are issued before the kernel waits for x. Each of the other
// eight warps multiplies 64 of the 512 columns with all rows. At the end of a tile, their sums are added in
// shared memory. More than 16 rows of x: batch_direct.cuh.
//
// Launch       grid (B, S), block (384), shared memory as shared_bytes of src/batch_plan.rs. Blocks b, b + B, ..
//              take tiles of 16 H rows of each weight. If S > 1, B is the number of tiles, with cluster (1, S, 1)
//              if partials is null. With a gate, half of a tile's rows are of each of the two weights. For
//              M = 32 and 64: block (256), a tile of 128 rows per block
// Requires     x and weights 16-byte aligned; k a multiple of 128; no launch writes the weights; with a gate,
//              partials is null and both weights have the same n
// Aliasing     none
// Accumulation f32
// Determinism  same bits every run: the order of additions depends only on the sizes
// Capture      safe
#include "batch.cuh"
#include "batch_direct.cuh"
#include "functions.cuh"

const u32 PARTS = 4;
const u32 STEP = 4;                                    // planes of a step
const u32 PIECE_ROWS = 16;                             // of a slot in the ring of weights
const u32 PIECE_PITCH = STEP * PLANE_BYTES + 16;       // padded, so that rows begin in different banks
const u32 PIECE_BYTES = PIECE_ROWS * PIECE_PITCH;
const u32 PRODUCERS = 4;                               // warps
const u32 THREADS = MULTIPLIERS + 32 * PRODUCERS;

struct Params {
    u32 m;
    u32 k;
    u32 n[PARTS];     // rows of each weight; 0 for unused ones
    u32 per_split;    // planes of each split
    u32 gate;         // 0: none, 1: SiLU, 2: GELU
    u32 narrow_rows;  // 0: narrow is dense
};

// Division of a block for up to M rows of x; src/batch_plan.rs has the same numbers.
template <int M, int H> struct PlainDivision {
    static const u32 ROWS = PIECE_ROWS * H;
    static const u32 X_BYTES = STEP * M * PLANE_BYTES;
    static const u32 X_SLOTS = M == 8 ? 3 : 2;
    static const u32 PITCH = ROWS + 4;  // of sums in shared memory: no bank conflicts between a warp's stores
    static const u32 SUMS = WARPS / 2 * M * PITCH;
    static const u32 W_SLOTS = (BATCH_PLAIN_SHARED_BYTES - HEAD_BYTES - X_SLOTS * X_BYTES - 4 * SUMS) / PIECE_BYTES;
    static_assert(W_SLOTS >= 2 && 16 * (X_SLOTS + W_SLOTS) <= HEAD_BYTES, "slots");
};

// The block's tiles, and its planes of x.
struct Work {
    const u8* w[PARTS];
    const u8* x;
    u32 n[PARTS];
    u32 k, per_tile, n_tiles, begin, n_planes, n_steps;
    bool gated;

    inline Tile tile(u32 idx, u32& part) const {
        Tile tile = {w[0], gated ? w[1] : nullptr, 0, n[0], k};
        part = 0;
#pragma unroll
        for (u32 i = 0; i + 1 < PARTS; i++) {
            u32 tiles = (n[i] + per_tile - 1) / per_tile;
            if (!gated && part == i && idx >= tiles) {
                idx -= tiles;
                part = i + 1;
                tile.w = w[i + 1];
                tile.n = n[i + 1];
            }
        }
        tile.first = idx * per_tile;
        return tile;
    }
    // Address of row `row` of a tile, at the block's first plane; null past the end.
    inline const u8* row_of(const Tile& tile, u32 row, u32 rows) const {
        bool up = tile.up != nullptr && row >= rows / 2;
        u32 at = tile.first + (up ? row - rows / 2 : row);
        if (at >= tile.n) return nullptr;
        return (up ? tile.up : tile.w) + 2 * ((u64)at * k + begin * PLANE);
    }
};

// Positions of barriers and rings in shared memory.
template <int M, int H> struct Rings {
    typedef PlainDivision<M, H> D;
    u8 *x, *w;
    float* sums;
#ifdef BULK_COPIES
    u32 x_full, x_empty, w_full, w_empty;
#endif

    inline explicit Rings(u8* shared)
        : x(shared + HEAD_BYTES), w(x + D::X_SLOTS * D::X_BYTES), sums((float*)(w + D::W_SLOTS * PIECE_BYTES)) {
#ifdef BULK_COPIES
        x_full = shared_address(shared), x_empty = x_full + 8 * D::X_SLOTS;
        w_full = x_empty + 8 * D::X_SLOTS, w_empty = w_full + 8 * D::W_SLOTS;
        if (threadIdx.x == 0) {
            for (u32 i = 0; i < D::X_SLOTS; i++) {
                barrier_init(x_full + 8 * i, 1);
                barrier_init(x_empty + 8 * i, WARPS);
            }
            for (u32 i = 0; i < D::W_SLOTS; i++) {
                barrier_init(w_full + 8 * i, PRODUCERS);
                barrier_init(w_empty + 8 * i, WARPS);
            }
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        }
        __syncthreads();
#endif
    }
};

#ifdef BULK_COPIES
// One of the last warps. The copies of a warp are issued one lane after another, at about 80 cycles each, so each
// warp copies a share of a piece's rows, one per lane. The first also copies x.
template <int M, int H> struct Producer {
    typedef PlainDivision<M, H> D;
    const Work& work;
    const Rings<M, H>& rings;
    Tile tile;
    u64 policy;
    u32 lane, row, tile_idx, step, piece, left_w, left_x, x_at;
    Turn w_turn, x_turn;

    inline Producer(const Work& work, const Rings<M, H>& rings)
        : work(work), rings(rings), policy(evict_first_policy()), lane(threadIdx.x % 32), tile_idx(blockIdx.x), step(0),
          piece(0), x_at(0) {
        u32 warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0) - WARPS;
        row = warp * (PIECE_ROWS / PRODUCERS) + lane;
        u32 n_mine = blockIdx.x < work.n_tiles ? (work.n_tiles - blockIdx.x + gridDim.x - 1) / gridDim.x : 0;
        left_w = n_mine * work.n_steps * H;
        left_x = warp == 0 ? n_mine * work.n_steps : 0;
    }
    inline u32 planes_of(u32 step) const { return min(STEP, work.n_planes - step * STEP); }
    // Requests the next piece of weights, once its slot is free.
    inline void request_w() {
        if (left_w == 0) return;
        left_w--;
        if (step == 0 && piece == 0) {
            u32 part;
            tile = work.tile(tile_idx, part);
        }
        const u8* from = nullptr;
        if (lane < PIECE_ROWS / PRODUCERS) from = work.row_of(tile, PIECE_ROWS * piece + row, D::ROWS);
        u32 bytes = planes_of(step) * PLANE_BYTES, full = rings.w_full + 8 * w_turn.slot;
        barrier_wait(rings.w_empty + 8 * w_turn.slot, w_turn.turn + 1);
        u32 n_rows = __popc(__ballot_sync(0xffffffffu, from != nullptr));
        if (lane == 0) barrier_expect(full, n_rows * bytes);
        __syncwarp();
        if (from != nullptr) {
            u32 to = shared_address(rings.w) + w_turn.slot * PIECE_BYTES + row * PIECE_PITCH;
            bulk_copy(to, from + step * (STEP * PLANE_BYTES), bytes, full, policy);
        }
        w_turn.next(D::W_SLOTS);
        if (++piece < H) return;
        piece = 0;
        if (++step < work.n_steps) return;
        step = 0;
        tile_idx += gridDim.x;
    }
    // The same for the planes of x.
    inline void request_x() {
        left_x--;
        u32 bytes = planes_of(x_at) * (M * PLANE_BYTES), full = rings.x_full + 8 * x_turn.slot;
        barrier_wait(rings.x_empty + 8 * x_turn.slot, x_turn.turn + 1);
        __syncwarp();
        if (lane == 0) {
            barrier_expect(full, bytes);
            u32 to = shared_address(rings.x) + x_turn.slot * D::X_BYTES;
            bulk_copy(to, work.x + (u64)x_at * D::X_BYTES, bytes, full);
        }
        x_turn.next(D::X_SLOTS);
        x_at = x_at + 1 == work.n_steps ? 0 : x_at + 1;
    }
    inline void run() {
        // One place for each kind of request: several would not be inlined.
        bool has_waited = false;
#pragma unroll 1
        for (u32 i = 0;; i++) {
            if (i >= D::W_SLOTS || left_w == 0) {
                // Slots become free in this order: one of x, then those of its step's weights.
                u32 n_x = left_w == 0 || (i - D::W_SLOTS) % H == 0 ? 1 : 0;
                if (!has_waited) {
                    wait_for_previous();
                    // Bulk copies are about to read what previous kernels wrote with ordinary stores.
                    asm volatile("fence.proxy.async;" ::: "memory");
                    has_waited = true;
                    n_x = D::X_SLOTS + 1;
                }
#pragma unroll 1
                for (; n_x > 0 && left_x > 0; n_x--) request_x();
                if (left_w == 0 && left_x == 0) return;
            }
            request_w();
        }
    }
};
#endif

// The first eight warps. Lane t = 0 .. 3 of four multiplies columns 32 t .. 32 t + 31 of a plane (planes.cuh);
// a warp has half of them.
template <typename T, int M, int H> struct Consumer {
    typedef PlainDivision<M, H> D;
    const Work& work;
    const Rings<M, H>& rings;
    float acc[H][M / 8][4];
    u32 warp, lane;
    Turn w_turn, x_turn;

    inline Consumer(const Work& work, const Rings<M, H>& rings)
        : work(work), rings(rings), warp(__shfl_sync(0xffffffffu, threadIdx.x / 32, 0)), lane(threadIdx.x % 32) {}

    inline void multiply_piece(const Columns<M, false, T>& right, float (*sums)[4], const u8* piece) const {
        const u8* at = piece + lane / 4 * PIECE_PITCH + warp / 2 * PLANE_BYTES + 64 * (lane % 4) + 32 * (warp % 2);
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            uint4 low = *(const uint4*)(at + 16 * i), high = *(const uint4*)(at + 8 * PIECE_PITCH + 16 * i);
            u32 first[4] = {low.x, high.x, low.y, high.y}, second[4] = {low.z, high.z, low.w, high.w};
            right.multiply(sums, first, 2 * i);
            right.multiply(sums, second, 2 * i + 1);
        }
    }

    inline void multiply_tile() {
#pragma unroll
        for (u32 i = 0; i < H * M / 8 * 4; i++) (&acc[0][0][0])[i] = 0.0f;
#pragma unroll 1
        for (u32 step = 0; step < work.n_steps; step++) {
            bool has_planes = step * STEP + warp / 2 < work.n_planes;
            Columns<M, false, T> right(rings.x + x_turn.slot * D::X_BYTES + warp / 2 * (M * PLANE_BYTES));
            load_step(step);
            if (has_planes) right.begin(warp % 2);
            release_x();
#pragma unroll
            for (u32 i = 0; i < H; i++) {
                wait_w();
                if (has_planes) multiply_piece(right, acc[i], rings.w + w_turn.slot * PIECE_BYTES);
                release_w();
            }
        }
    }

    // Adds the warps' sums: of warps w and w + 4 here, the remaining four when they are read.
    inline void add_up() const {
        u32 g = lane / 4, t = lane % 4;
        float* mine = rings.sums + warp % (WARPS / 2) * (M * D::PITCH) + 2 * t * D::PITCH + g;
#pragma unroll
        for (u32 round = 0; round < 2; round++) {
            // The first barrier also waits for the readers of the previous tile.
            sync_threads<MULTIPLIERS>();
            if ((warp < WARPS / 2) != (round == 1)) continue;
#pragma unroll
            for (u32 i = 0; i < H; i++) {
#pragma unroll
                for (u32 j = 0; j < M / 8; j++) {
                    float* to = mine + 8 * j * D::PITCH + PIECE_ROWS * i;
                    const float* v = acc[i][j];
                    const u32 at[4] = {0, D::PITCH, 8, D::PITCH + 8};
#pragma unroll
                    for (u32 e = 0; e < 4; e++) to[at[e]] = round == 0 ? v[e] : v[e] + to[at[e]];
                }
            }
        }
    }

#ifdef BULK_COPIES
    inline void load_step(u32) {
        barrier_wait(rings.x_full + 8 * x_turn.slot, x_turn.turn);
        __syncwarp();
    }
    inline void release_x() {
        __syncwarp();
        if (lane == 0) barrier_arrive(rings.x_empty + 8 * x_turn.slot);
        x_turn.next(D::X_SLOTS);
    }
    inline void wait_w() {
        barrier_wait(rings.w_full + 8 * w_turn.slot, w_turn.turn);
        __syncwarp();
    }
    inline void release_w() {
        __syncwarp();
        if (lane == 0) barrier_arrive(rings.w_empty + 8 * w_turn.slot);
        w_turn.next(D::W_SLOTS);
    }
#else
    Tile tile;
    u32 step, piece;

    // All threads of the eight warps copy together.
    inline void load_step(u32 at) {
        step = at, piece = 0;
        u32 bytes = min(STEP, work.n_planes - step * STEP) * (M * PLANE_BYTES);
        sync_threads<MULTIPLIERS>();
        for (u32 i = 16 * threadIdx.x; i < bytes; i += 16 * MULTIPLIERS) {
            *(uint4*)(rings.x + i) = *(const uint4*)(work.x + (u64)step * D::X_BYTES + i);
        }
        sync_threads<MULTIPLIERS>();
    }
    inline void release_x() {}
    inline void wait_w() {
        const u32 CHUNKS = STEP * PLANE_CHUNKS;
        u32 n_chunks = min(STEP, work.n_planes - step * STEP) * PLANE_CHUNKS;
        sync_threads<MULTIPLIERS>();
        for (u32 i = threadIdx.x; i < PIECE_ROWS * CHUNKS; i += MULTIPLIERS) {
            u32 row = i / CHUNKS, chunk = i % CHUNKS;
            const u8* from = work.row_of(tile, PIECE_ROWS * piece + row, D::ROWS);
            if (from == nullptr || chunk >= n_chunks) continue;
            *(uint4*)(rings.w + row * PIECE_PITCH + 16 * chunk) = *(const uint4*)(from + step * (STEP * PLANE_BYTES) + 16 * chunk);
        }
        sync_threads<MULTIPLIERS>();
    }
    inline void release_w() { piece++; }
#endif
};

// Outputs of a launch.
struct Outputs {
    float* y[PARTS];
    float* partials;
    u16* narrow;
};

// Writes a tile of ROWS rows of weights from sums in shared memory, of which there are SLOTS times M rows.
template <typename T, u32 M, u32 ROWS, u32 SLOTS>
inline void store_tile(const Outputs& out, const Params& p, const Tile& tile, u32 part, float* sums) {
    const u32 PITCH = ROWS + 4;
    bool clustered = gridDim.y > 1 && out.partials == nullptr;
    Cluster<SLOTS * M * PITCH, MULTIPLIERS> cluster(sums, clustered);
    // Returns four columns of a row of x.
    auto sum_of = [&](u32 of, u32 column) {
        float4 all = {};
#pragma unroll
        for (u32 i = 0; i < SLOTS; i++) {
            u32 at = (i * M + of) * PITCH + column;
            float4 v = clustered ? cluster.sum(at) : *(const float4*)(sums + at);
            all.x += v.x, all.y += v.y, all.z += v.z, all.w += v.w;
        }
        return all;
    };
    if (p.gate != 0) {
        const u32 FOURS = ROWS / 8;
        cluster.share(p.m * FOURS, [&](u32 i) {
            u32 of = i / FOURS, column = 4 * (i % FOURS), at = tile.first + column;
            if (at >= tile.n) return;
            float4 gate = sum_of(of, column), up = sum_of(of, ROWS / 2 + column), v;
            auto joined = [&](float gate, float up) { return (p.gate == 1 ? silu(gate) : gelu_tanh(gate)) * up; };
            v.x = joined(gate.x, up.x);
            v.y = joined(gate.y, up.y);
            v.z = joined(gate.z, up.z);
            v.w = joined(gate.w, up.w);
            narrow_store(out.narrow, of, at, tile.n, p.narrow_rows, pack(v.x, v.y, T()), pack(v.z, v.w, T()));
            if (out.y[0] != nullptr) *(float4*)(out.y[0] + (u64)of * tile.n + at) = v;
        });
    } else {
        float* y = out.y[0];
        u32 begin_of_part = 0, all = 0;
#pragma unroll
        for (u32 i = 0; i < PARTS; i++) {
            if (i == part) y = out.y[i];
            if (i < part) begin_of_part += p.n[i];
            all += p.n[i];
        }
        u64 stride = tile.n;
        if (out.partials != nullptr) {
            stride = all;
            y = out.partials + (u64)blockIdx.y * p.m * all + begin_of_part;
        }
        const u32 FOURS = ROWS / 4;
        cluster.share(p.m * FOURS, [&](u32 i) {
            u32 of = i / FOURS, column = 4 * (i % FOURS), at = tile.first + column;
            if (at >= tile.n) return;
            float4 v = sum_of(of, column);
            float* to = y + of * stride + at;
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
}

template <u32 M, u32 ROWS> inline Work work_of(const u8* x, const u8* const* ws, const Params& p) {
    Work work = {{ws[0], ws[1], ws[2], ws[3]}, x, {p.n[0], p.n[1], p.n[2], p.n[3]}, p.k};
    work.gated = p.gate != 0;
    work.per_tile = work.gated ? ROWS / 2 : ROWS;
    work.n_tiles = 0;
#pragma unroll
    for (u32 i = 0; i < PARTS; i++) {
        if (i == 0 || !work.gated) work.n_tiles += (p.n[i] + work.per_tile - 1) / work.per_tile;
    }
    work.begin = blockIdx.y * p.per_split;
    work.n_planes = min(p.per_split, p.k / PLANE - work.begin);
    work.n_steps = (work.n_planes + STEP - 1) / STEP;
    work.x += (u64)work.begin * (M * PLANE_BYTES);
    return work;
}

template <typename T, int M>
inline void batch_direct(const Outputs& out, const u8* x, const u8* const* ws, const Params& p) {
    typedef DirectDivision<M> D;
    DYNAMIC_SHARED(shared);
    let_next_start();
    Work work = work_of<M, D::ROWS>(x, ws, p);
    u32 part;
    Tile tile = work.tile(blockIdx.x, part);
    float* sums = multiply_direct<T, M>(tile, work.x, work.begin, work.begin + work.n_planes, shared);
    store_tile<T, M, D::ROWS, 1>(out, p, tile, part, sums);
}

template <typename T, int M, int H>
inline void batch_plain(const Outputs& out, const u8* x, const u8* const* ws, const Params& p) {
    typedef PlainDivision<M, H> D;
    DYNAMIC_SHARED(shared);
    let_next_start();
    Work work = work_of<M, D::ROWS>(x, ws, p);
    Rings<M, H> rings(shared);
#ifdef BULK_COPIES
    if (threadIdx.x >= MULTIPLIERS) {
        Producer<M, H> producer(work, rings);
        producer.run();
        return;
    }
#endif
    wait_for_previous();
    if (threadIdx.x >= MULTIPLIERS) return;
    Consumer<T, M, H> consumer(work, rings);
#pragma unroll 1
    for (u32 idx = blockIdx.x; idx < work.n_tiles; idx += gridDim.x) {
        u32 part;
        Tile tile = work.tile(idx, part);
#ifndef BULK_COPIES
        consumer.tile = tile;
#endif
        consumer.multiply_tile();
        consumer.add_up();
        store_tile<T, M, D::ROWS, WARPS / 2>(out, p, tile, part, rings.sums);
    }
}

#define BATCH(symbol, threads, multiply)                                                                     \
    extern "C" __global__ __launch_bounds__(threads, 2) void symbol(                                        \
        float* y0, float* y1, float* y2, float* y3, float* partials, u16* narrow, const u8* x, const u8* w0, \
        const u8* w1, const u8* w2, const u8* w3, Params p) {                                               \
        const u8* const w[PARTS] = {w0, w1, w2, w3};                                                        \
        multiply(Outputs{{y0, y1, y2, y3}, partials, narrow}, x, w, p);                                     \
    }
#define PIECES(name, T, M, H) BATCH(batch_plain_m##M##_h##H##_##name, THREADS, (batch_plain<T, M, H>))
#define DIRECT(name, T, M) BATCH(batch_plain_m##M##_##name, MULTIPLIERS, (batch_direct<T, M>))
#define ALL(name, T)       \
    PIECES(name, T, 8, 1)  \
    PIECES(name, T, 16, 2) \
    DIRECT(name, T, 32)    \
    DIRECT(name, T, 64)

// unit bf16
ALL(bf16, BF16)
// unit f16
ALL(f16, F16)
