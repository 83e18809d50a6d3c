// batch.cuh: the pipeline of batch.cu and grouped.cu: a tile of weights times a tile of 16-bit rows
//
// A block has ROWS rows of weights and M rows of x, and walks along k one unit of weights (one or two planes
// of 128 columns) at a time. A producer warp loads weights and planes of x into two rings in shared memory;
// the weight loads are issued before the kernel waits for x, and prefetch further ahead. Eight consumer warps
// work in groups of four; a group multiplies 64 rows of weights. Each warp decodes 16 rows to BF16 in
// registers, half a plane at a time, while the tensor cores multiply the previous half.
//
// The launch has 288 threads; 384 for M = 128 on compute capability 9.0, where registers are reallocated per
// warpgroup. Its shared memory is shared_bytes of src/batch.rs. x has whole planes: columns of a last unit
// past k are zeros in x, and finite in the weights or masked.
#pragma once
#include "cluster.cuh"
#include "overlap.cuh"
#include "packed.cuh"
#include "planes.cuh"
#include "tuning.cuh"
#include "wgmma.cuh"

const u32 WARPS = 8;  // consumer warps
const u32 MULTIPLIERS = 32 * WARPS;
const u32 HEAD_BYTES = 256;  // barriers, before the rings

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
        return (up ? tile.up : tile.w) + ((u64)of_all * ((tile.k + Q::COLS - 1) / Q::COLS) + unit) * Q::BYTES;
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

    // Loads one plane of 16 rows, starting at `row` of the slot; n_left columns of it are within k (a packed
    // unit is padded with zeros).
    inline void open(const u8* slot, u32 row, u32 plane, u32 lane, i32) {
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

// Weights of 16 bits in file layout, multiplied as BF16. A slot holds 128 columns of each of the block's rows.
template <typename T> struct Plain16 {
    static const u32 PLANES = 1;
    static const u32 ROW_BYTES = PLANE_BYTES + 16;  // padded, so that rows begin in different banks

    inline static const u8* row_of(const Tile& tile, u32 i, u32 rows, u32 unit) {
        bool up = tile.up != nullptr && i >= rows / 2;
        u32 row = tile.first + (up ? i - rows / 2 : i);
        if (row >= tile.n) return nullptr;
        return (up ? tile.up : tile.w) + 2 * ((u64)row * tile.k + unit * PLANE);
    }

#ifdef BULK_COPIES
    template <u32 ROWS> struct Source {
        static const u32 EACH = ROWS / 32;
        const u8* from[EACH];
        u64 policy;
        u32 lane, n_rows, n_left;

        inline Source(const Tile& tile, u32 unit, u32 lane)
            : policy(evict_first_policy()), lane(lane), n_rows(0), n_left(tile.k - unit * PLANE) {
#pragma unroll
            for (u32 i = 0; i < EACH; i++) {
                from[i] = row_of(tile, lane + 32 * i, ROWS, unit);
                n_rows += __popc(__ballot_sync(0xffffffffu, from[i] != nullptr));
            }
        }
        inline void load(u32 slot, u32 barrier) {
            u32 bytes = 2 * min(PLANE, n_left);
            if (lane == 0) barrier_expect(barrier, n_rows * bytes);
            __syncwarp();
#pragma unroll
            for (u32 i = 0; i < EACH; i++) {
                if (from[i] == nullptr) continue;
                bulk_copy(slot + (lane + 32 * i) * ROW_BYTES, from[i], bytes, barrier, policy);
                from[i] += PLANE_BYTES;
            }
            n_left -= min(PLANE, n_left);
        }
    };
#else
    template <u32 ROWS> inline static void load(u8* slot, const Tile& tile, u32 unit) {
        for (u32 i = threadIdx.x; i < ROWS * PLANE_CHUNKS; i += MULTIPLIERS + 32) {
            u32 row = i / PLANE_CHUNKS, chunk = i % PLANE_CHUNKS;
            const u8* from = row_of(tile, row, ROWS, unit);
            if (from == nullptr || unit * PLANE + 8 * chunk >= tile.k) continue;
            copy_async(slot + row * ROW_BYTES + 16 * chunk, from + 16 * chunk, true);
        }
    }
#endif

    const u8* at;
    i32 n_fours;  // groups of four columns of this lane that are within k

    inline void open(const u8* slot, u32 row, u32, u32 lane, i32 n_left) {
        at = slot + (row + lane / 4) * ROW_BYTES + 64 * (lane % 4);
        n_fours = (n_left - 32 * (i32)(lane % 4)) / 4;
    }

    inline static u32 two(u32 word, BF16) { return word; }
    inline static u32 two(u32 word, F16) {
        return pack(f16_to_f32((u16)word), f16_to_f32((u16)(word >> 16)), BF16());
    }

    inline void get(u32* a, u32 s) const {
        uint2 first = make_uint2(0, 0), second = make_uint2(0, 0);
        if ((i32)s < n_fours) {
            first = *(const uint2*)(at + 8 * s);
            second = *(const uint2*)(at + 8 * ROW_BYTES + 8 * s);
        }
        a[0] = two(first.x, T());
        a[1] = two(second.x, T());
        a[2] = two(first.y, T());
        a[3] = two(second.y, T());
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

// Multiplies units begin .. end of a tile with M rows of x. The consumer threads (the first MULTIPLIERS) then
// call `epilogue` with the sums in shared memory: row `of` of x, row r of the block at of * PITCH + r. They must
// wait for each other before they read them.
template <typename W, int M, typename Epilogue>
inline void multiply_tile(const Tile& tile, const u8* x_tile, u32 begin, u32 end, Epilogue epilogue) {
    typedef Division<W, M> D;
    const u32 ROWS = D::ROWS, PLANES = D::PLANES, X_SLOTS = D::X_SLOTS, W_SLOTS = D::W_SLOTS;
    DYNAMIC_SHARED(shared);
    u8 *x_ring = shared + HEAD_BYTES, *w_ring = x_ring + X_SLOTS * D::X_BYTES;
    u32 warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    u32 first_row = warp / 4 * 64 * D::GROUPS + warp % 4 * 16;  // within the block; further groups follow every 64 rows
    float acc[D::GROUPS][M / 8][4] = {};

    auto finish = [&] {
        // Sums take the place of the rings; all copies into those have completed.
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
        epilogue(sums);
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
        left.open(w_ring, first_row, 0, lane, (i32)tile.k - (i32)(begin * PLANES * PLANE));
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
                    i32 n_left = (i32)tile.k - (i32)(((unit + (ends_unit ? 1 : 0)) * PLANES + next_plane) * PLANE);
                    right.begin(piece % 2);
#pragma unroll
                    for (u32 s = 0; s < 4; s++) {
                        right.multiply(acc[piece / 2], a[piece % 2][s], s);
                        if (s == 0 && next % 2 == 0) {
                            left.open(weights, first_row + 64 * (next / 2), next_plane, lane, n_left);
                        }
                        left.get(a[next % 2][s], 4 * (next % 2) + s);
                    }
                    right.end();
                }
                __syncwarp();
                if (lane == 0) barrier_arrive(x_empty + 8 * x_turn.slot);
                x_turn.next(X_SLOTS);
            }
        }
        finish();
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
                i32 n_left = (i32)tile.k - (i32)((unit * PLANES + plane) * PLANE);
                left.open(w_ring + slot * D::W_BYTES, first_row + 64 * group, plane, lane, n_left);
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
    if (warp < WARPS) finish();
#endif
}
