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
// The counterpart of batch.cu for weights that need no decoding. Reading them is all that takes time, so many
// bytes must be in flight, and bulk copies of a row's few columns are too slow: each costs an SM about 25
// cycles. Instead, each warp copies the weights that it multiplies itself, 16 rows and 128 columns at a time,
// into a ring of its own, asynchronously and 16 bytes per lane. No other warp reads them, so no barrier is
// needed. The first copies are issued before the kernel waits for x.
//
// A block has ROWS = 128 / GROUPS rows of weights. Its eight warps form GROUPS groups, which take turns along
// k: a step is one plane of 128 columns for each group. A ninth warp loads the planes of x that a step needs
// into a ring of the block. The groups' sums are added at the end, together with those of the cluster's other
// blocks.
//
// Launch       grid (tiles of ROWS rows of each weight, S), block (288), shared memory as shared_bytes of
//              src/batch.rs, cluster (1, S, 1) if partials is null and S > 1. With a gate, a tile has ROWS / 2
//              rows of each of the two weights
// Requires     x and weights 16-byte aligned; k a multiple of 128; no launch writes the weights; with a gate,
//              partials is null and both weights have the same n
// Aliasing     none
// Accumulation f32
// Determinism  same bits every run: the order of additions depends only on the sizes
// Capture      safe
#include "batch.cuh"
#include "functions.cuh"

const u32 PARTS = 4;
const u32 LINE = 128;                           // bytes of shared memory that one access reads
const u32 W_ROWS = 16;                          // rows of a warp
const u32 UNIT_BYTES = W_ROWS * PLANE_BYTES;    // of a slot in a warp's ring

struct Params {
    u32 m;
    u32 k;
    u32 n[PARTS];     // rows of each weight; 0 for unused ones
    u32 per_split;    // planes of each split
    u32 gate;         // 0: none, 1: SiLU, 2: GELU
    u32 narrow_rows;  // 0: narrow is dense
};

// Division of a block for up to M rows of x; src/batch.rs has the same numbers.
template <int M, int GROUPS> struct PlainDivision {
    static const u32 ROWS = WARPS * W_ROWS / GROUPS;
    static const u32 X_BYTES = GROUPS * M * PLANE_BYTES;  // of a step
    static const u32 X_SLOTS = X_BYTES <= 2048 ? 6 : X_BYTES <= 4096 || GROUPS * X_BYTES == 16384 ? 3 : 2;
    static const u32 W_BYTES = WARPS * UNIT_BYTES;
    static const u32 W_SLOTS = (BATCH_PLAIN_SHARED_BYTES - HEAD_BYTES - X_SLOTS * X_BYTES) / W_BYTES;
    static const u32 PITCH = ROWS + 4;  // of sums in shared memory: no bank conflicts between a warp's stores
    static_assert(16 * X_SLOTS <= HEAD_BYTES, "barriers");
    static_assert(W_SLOTS >= 2 && X_SLOTS >= 2, "one is filled while another is multiplied");
    static_assert(GROUPS * M * PITCH * 4 <= X_SLOTS * X_BYTES + W_SLOTS * W_BYTES, "sums take the place of rings");
};

// A warp's rows of weights, and its ring. Lane t = 0 .. 3 of four multiplies columns 32 t .. 32 t + 31 of a
// plane, 16 bytes at a time (planes.cuh): bytes 16 s .. 16 s + 15 of those of row r are in line 8 s + r / 2 of
// the slot, at place (4 (r % 2) + t) ^ 2 s. So a quarter of a warp writes and reads 128 bytes in different
// banks.
template <u32 SLOTS> struct WarpWeights {
    const u8* from[2];  // rows 0 .. 7 and 8 .. 15: what this lane copies next
    u32 n_rows[2];      // of these eight, those that exist
    u64 two_rows;       // bytes
    const u8* ring;
    SharedPtr to;
    u32 n_left, next, read_at;

    // The warp's first row is `row` of the block's `rows`, its first plane is `plane`, and it has n_planes of them.
    inline WarpWeights(const Tile& tile, u32 row, u32 rows, u32 plane, u32 n_planes, u8* rings)
        : two_rows(4 * (u64)tile.k), n_left(n_planes), next(0) {
        u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, odd = lane / 16, c = lane % 16;
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            u32 at = row + 8 * i;
            bool up = tile.up != nullptr && at >= rows / 2;
            u32 first = tile.first + (up ? at - rows / 2 : at);
            n_rows[i] = first < tile.n ? min(8u, tile.n - first) : 0;
            from[i] = (up ? tile.up : tile.w);
            if (n_rows[i] > odd) from[i] += 2 * ((u64)(first + odd) * tile.k + plane * PLANE) + 16 * c;
        }
        ring = rings + warp * SLOTS * UNIT_BYTES;
        to = shared_ptr(ring) + c % 4 * 8 * LINE + ((4 * odd + c / 4) ^ (2 * (c % 4))) * 16;
        read_at = lane / 8 * LINE + lane % 8 * 16;
    }

    // Requests the next plane, `stride` bytes after the last one; after the last plane, nothing.
    inline void request(u32 stride) {
        if (n_left != 0) {
            n_left--;
            SharedPtr slot = to + next * UNIT_BYTES;
            u32 odd = threadIdx.x % 32 / 16;
#pragma unroll
            for (u32 i = 0; i < 8; i++) {
                bool there = 2 * (i % 4) + odd < n_rows[i / 4];
                copy_async(slot + i * LINE, from[i / 4] + (there ? i % 4 * two_rows : 0), there);
            }
            from[0] += stride;
            from[1] += stride;
            next = next + 1 == SLOTS ? 0 : next + 1;
        }
        copies_end_group();
    }
    // Waits for the oldest plane that was requested.
    inline void wait() {
        copies_wait<SLOTS - 1>();
        __syncwarp();
    }
    // Loads the A fragments of half a plane.
    inline void load(u32 (*a)[4], u32 slot, u32 half) const {
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            u32 s = 2 * half + i;
            const u8* at = ring + slot * UNIT_BYTES + s * 8 * LINE + (read_at ^ (32 * s));
            uint4 low = *(const uint4*)at, high = *(const uint4*)(at + 4 * LINE);
            a[2 * i][0] = low.x, a[2 * i][1] = high.x, a[2 * i][2] = low.y, a[2 * i][3] = high.y;
            a[2 * i + 1][0] = low.z, a[2 * i + 1][1] = high.z, a[2 * i + 1][2] = low.w, a[2 * i + 1][3] = high.w;
        }
    }
};

// Planes of x in a ring of the block: a step has one for each group.
template <int M, int GROUPS> struct XRing {
    typedef PlainDivision<M, GROUPS> D;
    u8* slots;
    const u8* from;
    u32 n_left;  // bytes not yet requested
#ifdef BULK_COPIES
    u32 at, full, empty;
#endif

    inline XRing(u8* shared, const u8* x, u32 n_planes) : slots(shared + HEAD_BYTES), from(x), n_left(n_planes * M * PLANE_BYTES) {
#ifdef BULK_COPIES
        at = shared_address(slots), full = shared_address(shared), empty = full + 8 * D::X_SLOTS;
        if (threadIdx.x == 0) {
            for (u32 i = 0; i < D::X_SLOTS; i++) {
                barrier_init(full + 8 * i, 1);
                barrier_init(empty + 8 * i, WARPS);
            }
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        }
        __syncthreads();
#endif
    }

#ifdef BULK_COPIES
    inline void request(u32 slot) {
        u32 bytes = min(D::X_BYTES, n_left);
        if (threadIdx.x % 32 == 0) {
            barrier_expect(full + 8 * slot, bytes);
            bulk_copy(at + slot * D::X_BYTES, from, bytes, full + 8 * slot);
        }
        from += bytes;
        n_left -= bytes;
    }
    // The ninth warp fills the slots, in the order in which they become free.
    inline void produce(u32 n_steps) {
        // Bulk copies are about to read what previous kernels wrote with ordinary stores.
        asm volatile("fence.proxy.async;" ::: "memory");
#pragma unroll 1
        for (u32 i = 0; i < D::X_SLOTS && i < n_steps; i++) request(i);
        Turn turn;
#pragma unroll 1
        for (u32 step = D::X_SLOTS; step < n_steps; step++) {
            barrier_wait(empty + 8 * turn.slot, turn.turn);
            __syncwarp();
            request(turn.slot);
            turn.next(D::X_SLOTS);
        }
    }
    inline void begin_step(const Turn& turn) {
        barrier_wait(full + 8 * turn.slot, turn.turn);
        __syncwarp();
    }
    inline void end_step(const Turn& turn) {
        __syncwarp();
        if (threadIdx.x % 32 == 0) barrier_arrive(empty + 8 * turn.slot);
    }
#else
    // All threads copy a step together.
    inline void begin_step(const Turn& turn) {
        u32 bytes = min(D::X_BYTES, n_left);
        for (u32 i = 16 * threadIdx.x; i < bytes; i += 16 * (MULTIPLIERS + 32)) {
            *(uint4*)(slots + turn.slot * D::X_BYTES + i) = *(const uint4*)(from + i);
        }
        from += bytes;
        n_left -= bytes;
        __syncthreads();
    }
    // Two slots: the next step's copies do not wait for this step's readers, but those after it do.
    inline void end_step(const Turn&) {}
    inline void produce(u32 n_steps) {
        Turn turn;
        for (u32 step = 0; step < n_steps; step++) {
            begin_step(turn);
            turn.next(D::X_SLOTS);
        }
    }
#endif
};

// Multiplies planes begin .. end of a tile with M rows of x; see multiply_tile of batch.cuh. The sums of group
// i are M * PITCH further on than those of group i - 1.
template <typename T, int M, int GROUPS, typename Epilogue>
inline void multiply_plain(const Tile& tile, const u8* x, u32 begin, u32 end, Epilogue epilogue) {
    typedef PlainDivision<M, GROUPS> D;
    DYNAMIC_SHARED(shared);
    u8* w_rings = shared + HEAD_BYTES + D::X_SLOTS * D::X_BYTES;
    u32 warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    u32 n_planes = end - begin, n_steps = (n_planes + GROUPS - 1) / GROUPS;
    u32 group = warp / (WARPS / GROUPS), first_row = warp % (WARPS / GROUPS) * W_ROWS;
    u32 n_mine = warp < WARPS && n_planes > group ? (n_planes - group + GROUPS - 1) / GROUPS : 0;

    WarpWeights<D::W_SLOTS> w(tile, first_row, D::ROWS, begin + group, n_mine, w_rings);
    if (warp < WARPS) {
#pragma unroll 1
        for (u32 i = 0; i < D::W_SLOTS; i++) w.request(GROUPS * PLANE_BYTES);
    }
    XRing<M, GROUPS> xs(shared, x + (u64)begin * M * PLANE_BYTES, n_planes);
    wait_for_previous();
    if (warp >= WARPS) {
        xs.produce(n_steps);
        return;
    }
    float acc[M / 8][4] = {};
    u32 a[2][4][4], slot = 0;
    Turn turn;
    w.wait();
    w.load(a[0], 0, 0);
#pragma unroll 1
    for (u32 step = 0; step < n_steps; step++) {
        xs.begin_step(turn);
        if (step < n_mine) {
            // Each half of a plane is loaded while the previous one is multiplied.
            ColumnsOf<M, T> right(xs.slots + turn.slot * D::X_BYTES + group * M * PLANE_BYTES);
            right.begin(0);
#pragma unroll
            for (u32 s = 0; s < 4; s++) right.multiply(acc, a[0][s], s);
            w.load(a[1], slot, 1);
            right.end();
            __syncwarp();
            w.request(GROUPS * PLANE_BYTES);
            slot = slot + 1 == D::W_SLOTS ? 0 : slot + 1;
            right.begin(1);
#pragma unroll
            for (u32 s = 0; s < 4; s++) right.multiply(acc, a[1][s], s);
            // After the last plane, the stale contents of a slot are loaded and ignored.
            w.wait();
            w.load(a[0], slot, 0);
            right.end();
        }
        xs.end_step(turn);
        turn.next(D::X_SLOTS);
    }

    float* sums = (float*)(shared + HEAD_BYTES);
    sync_threads<MULTIPLIERS>();
#pragma unroll
    for (u32 i = 0; i < M / 8; i++) {
        float* to = sums + group * M * D::PITCH + (8 * i + 2 * t) * D::PITCH + first_row + g;
        to[0] = acc[i][0];
        to[D::PITCH] = acc[i][1];
        to[8] = acc[i][2];
        to[D::PITCH + 8] = acc[i][3];
    }
    epilogue(sums);
}

template <typename T, int M, int GROUPS>
inline void batch_plain(float* const* ys, float* partials, u16* narrow, const u8* x, const u8* const* ws,
                        const Params& p) {
    typedef PlainDivision<M, GROUPS> D;
    const u32 ROWS = D::ROWS;
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
    u32 begin = blockIdx.y * p.per_split, end = min(begin + p.per_split, p.k / PLANE);

    multiply_plain<T, M, GROUPS>(tile, x, begin, end, [&](float* sums) {
        bool clustered = gridDim.y > 1 && partials == nullptr;
        Cluster<GROUPS * M * D::PITCH, MULTIPLIERS> cluster(sums, clustered);
        // Returns four columns of a row of x.
        auto sum_of = [&](u32 of, u32 column) {
            float4 all = {};
#pragma unroll
            for (u32 i = 0; i < GROUPS; i++) {
                u32 at = (i * M + of) * D::PITCH + column;
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
                narrow_store(narrow, of, at, tile.n, p.narrow_rows, pack(v.x, v.y, T()), pack(v.z, v.w, T()));
                if (y != nullptr) *(float4*)(y + (u64)of * tile.n + at) = v;
            });
        } else {
            u64 stride = tile.n;
            if (partials != nullptr) {
                stride = all;
                y = partials + (u64)blockIdx.y * p.m * all + begin_of_part;
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
    });
}

#define BATCH(name, T, M, GROUPS)                                                                           \
    extern "C" __global__ __launch_bounds__(288, 2) void batch_plain_m##M##_g##GROUPS##_##name(             \
        float* y0, float* y1, float* y2, float* y3, float* partials, u16* narrow, const u8* x, const u8* w0, \
        const u8* w1, const u8* w2, const u8* w3, Params p) {                                               \
        float* const y[PARTS] = {y0, y1, y2, y3};                                                           \
        const u8* const w[PARTS] = {w0, w1, w2, w3};                                                        \
        batch_plain<T, M, GROUPS>(y, partials, narrow, x, w, p);                                            \
    }
#define ALL(name, T)      \
    BATCH(name, T, 8, 1)  \
    BATCH(name, T, 8, 4)  \
    BATCH(name, T, 16, 1) \
    BATCH(name, T, 16, 2) \
    BATCH(name, T, 32, 1) \
    BATCH(name, T, 64, 1)

// unit bf16
ALL(bf16, BF16)
// unit f16
ALL(f16, F16)
