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
// The matrix products of a decode step of many sequences. A block has ROWS rows of weights and M rows of x,
// and walks along k one unit of weights (one or two planes of 128 columns) at a time. A producer warp loads
// weights and planes of x into two rings in shared memory; the weight loads are issued before the kernel
// waits for x, and prefetch further ahead. Eight consumer warps work in groups of four; a group multiplies 64
// rows of weights. Each warp decodes 16 rows to BF16 in registers, half a plane at a time, while the tensor
// cores multiply the previous half.
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
#include "cluster.cuh"
#include "functions.cuh"
#include "overlap.cuh"
#include "packed.cuh"
#include "planes.cuh"
#include "tuning.cuh"
#include "wgmma.cuh"

const u32 PARTS = 4;
const u32 WARPS = 8;  // consumer warps
const u32 MULTIPLIERS = 32 * WARPS;
const u32 HEAD_BYTES = 256;  // barriers, before the rings

struct Params {
    u32 m;
    u32 k;
    u32 n[PARTS];     // rows of each weight; 0 for unused ones
    u32 per_split;    // units of each split
    u32 gate;         // 0: none, 1: SiLU, 2: GELU
    u32 narrow_rows;  // 0: narrow is dense
};

// Position in a ring: the slot, and how many times the ring has wrapped around.
struct Turn {
    u32 slot = 0, turn = 0;

    inline void next(u32 n_slots) {
        if (++slot == n_slots) {
            slot = 0;
            turn++;
        }
    }
};

// The block's rows of weights: of one weight, or with a gate half of them of each of two.
struct Tile {
    const u8 *w, *up;
    u32 first, n, k;
};

#if !defined(REFRAIN_ON_HOST) && __CUDA_ARCH__ >= 900
#define BULK_COPIES 1

inline void barrier_init(u32 at, u32 n) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(n) : "memory");
}
inline void barrier_arrive(u32 at) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory"); }
inline void barrier_expect(u32 at, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
}
inline void barrier_wait(u32 at, u32 turn) {
    asm volatile(
        "{ .reg .pred p; \n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; \n"
        "@p bra done; \n"
        "bra again; \n"
        "done: }" ::"r"(at),
        "r"(turn & 1)
        : "memory");
}
inline void bulk_copy(u32 to, const void* from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}
// Cache policy for data that is read once per step: it should not displace the rest of the L2 cache.
inline u64 evict_first_policy() {
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
inline void bulk_copy(u32 to, const void* from, u32 bytes, u32 barrier, u64 policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
            to),
        "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
        : "memory");
}
#endif

// Decodes a lane's 32 elements to BF16, two at a time. A byte is inserted into the mantissa of a power of
// two, which gives the float power + byte. In the general case the scale is applied in f32, the offset
// subtracts the power, and the result is rounded. Rounding the offset costs far less than rounding the result
// to 16 bits.
template <typename Q> struct WideDecoder {
    Sub sub;
    float offsets[2];  // of each half of 16 elements

    inline void open(const Sub& from) {
        sub = from;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            if (Q::SIGNED) sub.q[i] ^= 0x80808080u;
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            offsets[half] = __fmaf_rn(sub.scale[half], Q::SIGNED ? -32896.0f : -32768.0f, -sub.min);
        }
    }
    // Returns the elements at bytes `at` and `at` + 1 of word s.
    inline u32 two(u32 s, u32 at) const {
        float low = __uint_as_float(__byte_perm(sub.q[s], 0x47000000u, 0x7404u | at << 4));
        float high = __uint_as_float(__byte_perm(sub.q[s], 0x47000000u, 0x7404u | (at + 1) << 4));
        float scale = sub.scale[s / 4], offset = offsets[s / 4];
        return pack(__fmaf_rn(low, scale, offset), __fmaf_rn(high, scale, offset), BF16());
    }
};

// Four-bit quants are exact in BF16. They are centred at 8 two at a time, and the scale, rounded to BF16, is
// applied together with the remaining minimum. This costs about as much accuracy as rounding the result, and
// half the instructions.
struct FourBits {
    u32 q[8], scale, offset;

    inline void open(const Sub& sub) {
#pragma unroll
        for (int i = 0; i < 8; i++) q[i] = sub.q[i];
        scale = pack(sub.scale[0], sub.scale[0], BF16());
        float left = __fmaf_rn(sub.scale[0], 8.0f, -sub.min);
        offset = pack(left, left, BF16());
    }
    inline u32 two(u32 s, u32 at) const {
        u32 word = s < 4 ? q[s] : q[s] >> 4;
        // 128 + quant; subtracting 136 is exact.
        u32 v = __byte_perm(word, 0x43434343u, at == 0 ? 0x4140 : 0x4342);
        v = multiply_add(v, 0x3f803f80u, 0xc308c308u, BF16());
        return multiply_add(v, scale, offset, BF16());
    }
};

template <typename Q, bool FOUR_BITS> struct Decoder { typedef WideDecoder<Q> Type; };
template <typename Q> struct Decoder<Q, true> { typedef FourBits Type; };

// Packed weights. A slot holds one unit of each of the block's tiles of eight rows.
template <typename Q> struct Quantised {
    static const u32 PLANES = Q::COLS / PLANE;
    static const u32 ROW_BYTES = Q::BYTES / TILE_ROWS;  // bytes of a slot per row of weights

    inline static const u8* unit_of(const Tile& tile, u32 i, u32 rows, u32 unit) {
        u32 half = rows / TILE_ROWS / 2;
        bool up = tile.up != nullptr && i >= half;
        u32 of_all = tile.first / TILE_ROWS + (up ? i - half : i);
        if (of_all * TILE_ROWS >= tile.n) return nullptr;
        return (up ? tile.up : tile.w) + ((u64)of_all * (tile.k / Q::COLS) + unit) * Q::BYTES;
    }

#ifdef BULK_COPIES
    // Loads consecutive units of all rows of a tile; the lanes of one warp call it together.
    template <u32 ROWS> struct Source {
        const u8* from;
        u64 policy;
        u32 lane, bytes;

        inline Source(const Tile& tile, u32 unit, u32 lane) : policy(evict_first_policy()), lane(lane) {
            const u32 TILES = ROWS / TILE_ROWS;
            static_assert(TILES <= 32, "a lane copies one of them");
            from = lane < TILES ? unit_of(tile, lane, ROWS, unit) : nullptr;
            bytes = __popc(__ballot_sync(0xffffffffu, from != nullptr)) * Q::BYTES;
        }
        inline void load(u32 slot, u32 barrier) {
            if (lane == 0) barrier_expect(barrier, bytes);
            __syncwarp();
            if (from == nullptr) return;
            bulk_copy(slot + lane * Q::BYTES, from, Q::BYTES, barrier, policy);
            from += Q::BYTES;
        }
    };
#else
    template <u32 ROWS> inline static void load(u8* slot, const Tile& tile, u32 unit) {
        for (u32 i = 0; i < ROWS / TILE_ROWS; i++) {
            const u8* from = unit_of(tile, i, ROWS, unit);
            for (u32 at = 16 * threadIdx.x; from != nullptr && at < Q::BYTES; at += 16 * (MULTIPLIERS + 32)) {
                copy_async(slot + i * Q::BYTES + at, from + at, true);
            }
        }
    }
#endif

    typename Decoder<Q, !Q::SIGNED && Q::HIGH == 0>::Type first, second;

    // Loads one plane of 16 rows, starting at `row` of the slot.
    inline void open(const u8* slot, u32 row, u32 plane, u32 lane) {
        const u8* at = slot + row / TILE_ROWS * Q::BYTES;
        first.open(Q::load(at, plane, lane));
        second.open(Q::load(at + Q::BYTES, plane, lane));
    }

    // Returns the A fragment of multiplication s of a plane.
    inline void get(u32* a, u32 s) const {
        a[0] = first.two(s, 0);
        a[1] = second.two(s, 0);
        a[2] = first.two(s, 2);
        a[3] = second.two(s, 2);
    }
};

#if !defined(REFRAIN_ON_HOST) && defined(__CUDA_ARCH_FEAT_SM90_ALL)
// Moves registers from the producer warpgroup to the consumer warpgroups.
template <int M> struct Registers {
    static inline void fewer() {
        if (M == 128) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    }
    static inline void more() {
        if (M == 128) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    }
};
#else
template <int M> struct Registers {
    static inline void fewer() {}
    static inline void more() {}
};
#endif

// Division of a block for up to M rows of x; src/batch.rs has the same numbers.
template <typename W, int M> struct Division {
    static const u32 GROUPS = M == 128 ? 2 : 1;  // of 64 rows of weights per warpgroup
    static const u32 ROWS = 128 * GROUPS;
    static const u32 PLANES = W::PLANES;
    static const u32 X_BYTES = M * PLANE_BYTES, W_BYTES = ROWS * W::ROW_BYTES;
    static const u32 X_SLOTS = M <= 16 ? 4 * PLANES : M == 32 ? 4 : M == 64 && W::ROW_BYTES >= 210 ? 2 : 3;
    static const u32 SHARED = (M == 128 ? 2 : 1) * BATCH_SHARED_BYTES - HEAD_BYTES - X_SLOTS * X_BYTES;
    static const u32 FITTING = SHARED / W_BYTES;
    static const u32 W_SLOTS = FITTING < 2 ? 2 : FITTING > 6 ? 6 : FITTING;
    static const u32 PITCH = ROWS + 4;  // of sums in shared memory: no bank conflicts between a warp's stores
    static_assert(16 * (X_SLOTS + W_SLOTS) <= HEAD_BYTES, "barriers");
    static_assert(X_SLOTS >= PLANES && X_SLOTS >= 2, "a unit's planes, and one while another is multiplied");
    static_assert(M * PITCH * 4 <= X_SLOTS * X_BYTES + W_SLOTS * W_BYTES, "sums take the place of rings");
};

template <typename W, int M>
inline void batch(float* const* ys, float* partials, u16* narrow, const u8* x, const u8* const* ws, const Params& p) {
    typedef Division<W, M> D;
    const u32 ROWS = D::ROWS, PLANES = D::PLANES, X_SLOTS = D::X_SLOTS, W_SLOTS = D::W_SLOTS;
    DYNAMIC_SHARED(shared);
    let_next_start();
    u8 *x_ring = shared + HEAD_BYTES, *w_ring = x_ring + X_SLOTS * D::X_BYTES;

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

    u32 warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    u32 first_row = warp / 4 * 64 * D::GROUPS + warp % 4 * 16;  // within the block; further groups follow every 64 rows
    float acc[D::GROUPS][M / 8][4] = {};

    auto epilogue = [&] {
        // Epilogue: sums go to shared memory, then out along the rows of weights. All copies into the rings
        // have completed.
        float* sums = (float*)x_ring;
        sync_threads<MULTIPLIERS>();
#pragma unroll
        for (u32 group = 0; group < D::GROUPS; group++) {
#pragma unroll
            for (u32 i = 0; i < M / 8; i++) {
                float* to = sums + (8 * i + 2 * t) * D::PITCH + first_row + 64 * group + g;
                const float* v = acc[group][i];
                to[0] = v[0];
                to[D::PITCH] = v[1];
                to[8] = v[2];
                to[D::PITCH + 8] = v[3];
            }
        }
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
    };

#ifdef BULK_COPIES
    u32 x_at = shared_address(x_ring), w_at = shared_address(w_ring);
    u32 x_full = shared_address(shared), x_empty = x_full + 8 * X_SLOTS;
    u32 w_full = x_empty + 8 * X_SLOTS, w_empty = w_full + 8 * W_SLOTS;
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < X_SLOTS; i++) {
            barrier_init(x_full + 8 * i, 1);
            barrier_init(x_empty + 8 * i, WARPS);
        }
        for (u32 i = 0; i < W_SLOTS; i++) {
            barrier_init(w_full + 8 * i, 1);
            barrier_init(w_empty + 8 * i, WARPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (warp >= WARPS) {
        Registers<M>::fewer();
        if (warp > WARPS) return;
        typename W::template Source<D::ROWS> source(tile, begin, lane);
        auto load_w = [&](u32 slot) { source.load(w_at + slot * D::W_BYTES, w_full + 8 * slot); };
        auto load_x = [&](u32 plane, u32 slot) {
            if (lane != 0) return;
            barrier_expect(x_full + 8 * slot, D::X_BYTES);
            bulk_copy(x_at + slot * D::X_BYTES, x_tile + (u64)plane * D::X_BYTES, D::X_BYTES, x_full + 8 * slot);
        };
        u32 plane = begin * PLANES, last_plane = end * PLANES;
#pragma unroll 1
        for (u32 i = 0; i < W_SLOTS && begin + i < end; i++) load_w(i);
        wait_for_previous();
        // Bulk copies are about to read what previous kernels wrote with ordinary stores.
        asm volatile("fence.proxy.async;" ::: "memory");
#pragma unroll 1
        for (u32 i = 0; i < X_SLOTS && plane + i < last_plane; i++) load_x(plane + i, i);
        // Slots are refilled in the order in which they become free.
        Turn w_turn, x_turn;
#pragma unroll 1
        for (u32 unit = begin; unit < end; unit++) {
            if (unit + W_SLOTS < end) {
                barrier_wait(w_empty + 8 * w_turn.slot, w_turn.turn);
                load_w(w_turn.slot);
            }
            w_turn.next(W_SLOTS);
#pragma unroll 1
            for (u32 i = 0; i < PLANES; i++, plane++) {
                if (plane + X_SLOTS < last_plane) {
                    barrier_wait(x_empty + 8 * x_turn.slot, x_turn.turn);
                    load_x(plane + X_SLOTS, x_turn.slot);
                }
                x_turn.next(X_SLOTS);
            }
        }
        __syncwarp();
    } else {
        Registers<M>::more();
        wait_for_previous();
        Turn w_turn, x_turn;
        // A piece is half a plane of 64 rows of weights. Each is decoded while the previous one is
        // multiplied.
        const u32 PIECES = 2 * D::GROUPS;
        u32 a[2][4][4];
        W left;
        barrier_wait(w_full, 0);
        __syncwarp();
        left.open(w_ring, first_row, 0, lane);
#pragma unroll
        for (u32 s = 0; s < 4; s++) left.get(a[0][s], s);
#pragma unroll 1
        for (u32 unit = begin; unit < end; unit++) {
#pragma unroll
            for (u32 i = 0; i < PLANES; i++) {
                barrier_wait(x_full + 8 * x_turn.slot, x_turn.turn);
                __syncwarp();
                ColumnsOf<M> right(x_ring + x_turn.slot * D::X_BYTES);
#pragma unroll
                for (u32 piece = 0; piece < PIECES; piece++) {
                    u32 next = (piece + 1) % PIECES, next_plane = next == 0 ? (i + 1) % PLANES : i;
                    bool ends_unit = next == 0 && next_plane == 0;
                    if (ends_unit) {
                        __syncwarp();
                        if (lane == 0) barrier_arrive(w_empty + 8 * w_turn.slot);
                        w_turn.next(W_SLOTS);
                        // After the last unit, the stale contents of a slot are decoded and ignored.
                        if (unit + 1 < end) barrier_wait(w_full + 8 * w_turn.slot, w_turn.turn);
                        __syncwarp();
                    }
                    const u8* weights = w_ring + w_turn.slot * D::W_BYTES;
                    right.begin(piece % 2);
#pragma unroll
                    for (u32 s = 0; s < 4; s++) {
                        right.multiply(acc[piece / 2], a[piece % 2][s], s);
                        if (s == 0 && next % 2 == 0) left.open(weights, first_row + 64 * (next / 2), next_plane, lane);
                        left.get(a[next % 2][s], 4 * (next % 2) + s);
                    }
                    right.end();
                }
                if (lane == 0) barrier_arrive(x_empty + 8 * x_turn.slot);
                x_turn.next(X_SLOTS);
            }
        }
        epilogue();
    }
#else
    if (warp > WARPS) return;
    const u32 AHEAD = W_SLOTS < X_SLOTS / PLANES ? W_SLOTS : X_SLOTS / PLANES;
    auto load = [&](u32 unit) {
        if (unit < end) {
            u32 slot = (unit - begin) % AHEAD;
            W::template load<ROWS>(w_ring + slot * D::W_BYTES, tile, unit);
            for (u32 at = 16 * threadIdx.x; at < PLANES * D::X_BYTES; at += 16 * (MULTIPLIERS + 32)) {
                const u8* from = x_tile + (u64)unit * PLANES * D::X_BYTES + at;
                copy_async(x_ring + slot * PLANES * D::X_BYTES + at, from, true);
            }
        }
        copies_end_group();
    };
    wait_for_previous();
    for (u32 i = 0; i < AHEAD; i++) load(begin + i);
#pragma unroll 1
    for (u32 unit = begin; unit < end; unit++) {
        // Groups complete in order: all but the newest AHEAD - 1 have arrived.
        copies_wait<AHEAD - 1>();
        __syncthreads();
        u32 slot = (unit - begin) % AHEAD;
        if (warp < WARPS) {
#pragma unroll 1
            for (u32 i = 0; i < 2 * PLANES * D::GROUPS; i++) {
                u32 plane = i / 2 % PLANES, group = i / 2 / PLANES;
                ColumnsOf<M> right(x_ring + (slot * PLANES + plane) * D::X_BYTES);
                W left;
                left.open(w_ring + slot * D::W_BYTES, first_row + 64 * group, plane, lane);
                right.begin(i % 2);
#pragma unroll
                for (u32 s = 0; s < 4; s++) {
                    u32 a[4];
                    left.get(a, 4 * (i % 2) + s);
                    right.multiply(acc[group], a, s);
                }
                right.end();
            }
        }
        // The slot may be refilled only after every warp has read it.
        __syncthreads();
        load(unit + AHEAD);
    }
    if (warp < WARPS) epilogue();
#endif
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
