// batch_direct.cuh: the kernels of batch_plain.cu for 17 to 64 rows of x
//
// There, the sums of all rows no longer fit the registers of warps that share a tile's columns. A block has one
// tile of 128 rows of weights, and each of its eight warps multiplies 16 of them with all rows of x. A warp
// loads its weights straight into registers, two planes ahead, and no shared memory holds them. The planes of x
// go through a ring; the first thread requests them.
#pragma once
#include "batch.cuh"

template <int M> struct DirectDivision {
    static const u32 ROWS = 16 * WARPS;
    static const u32 X_BYTES = M * PLANE_BYTES;
    static const u32 X_SLOTS = M == 32 ? 6 : 5;
    static const u32 PITCH = ROWS + 4;  // of sums in shared memory: no bank conflicts between a warp's stores
    static_assert(M * PITCH * 4 <= X_SLOTS * X_BYTES, "sums take the place of the ring");
};

#ifndef REFRAIN_ON_HOST
// For rows that are read sequentially: prefetches 256 bytes into the L2 cache. Volatile, so that loads stay
// before the wait.
inline uint4 load_weight(const u8* from) {
    uint4 v;
    asm volatile("ld.global.nc.L1::evict_first.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from)
                 : "memory");
    return v;
}
#else
inline uint4 load_weight(const u8* from) { return *(const uint4*)from; }
#endif

// The ring of x. The first thread requests a slot again a step after it was used, when all warps are most
// likely done with it.
template <int M> struct DirectRing {
    typedef DirectDivision<M> D;
    u8* slots;
    const u8* from;
    u32 left;  // bytes not yet requested
    Turn turn, refill;
#ifdef BULK_COPIES
    u32 full, empty;
#endif

    inline DirectRing(u8* shared, const u8* x, u32 n_planes) : slots(shared + HEAD_BYTES), from(x), left(n_planes * D::X_BYTES) {
#ifdef BULK_COPIES
        full = shared_address(shared), empty = full + 8 * D::X_SLOTS;
        if (threadIdx.x == 0) {
            for (u32 i = 0; i < D::X_SLOTS; i++) {
                barrier_init(full + 8 * i, 1);
                barrier_init(empty + 8 * i, WARPS);
            }
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        }
#endif
    }
#ifdef BULK_COPIES
    inline void request(u32 slot) {
        barrier_expect(full + 8 * slot, D::X_BYTES);
        bulk_copy(shared_address(slots) + slot * D::X_BYTES, from, D::X_BYTES, full + 8 * slot);
        from += D::X_BYTES;
        left -= D::X_BYTES;
    }
    // After the kernel's wait.
    inline void start() {
        if (threadIdx.x == 0) {
            // Bulk copies are about to read what previous kernels wrote with ordinary stores.
            asm volatile("fence.proxy.async;" ::: "memory");
            for (u32 i = 0; i < D::X_SLOTS && left > 0; i++) request(i);
        }
        __syncwarp();
    }
    inline void begin() {
        barrier_wait(full + 8 * turn.slot, turn.turn);
        __syncwarp();
    }
    inline void end(bool first) {
        __syncwarp();
        if (threadIdx.x % 32 == 0) barrier_arrive(empty + 8 * turn.slot);
        turn.next(D::X_SLOTS);
        if (threadIdx.x == 0 && !first && left > 0) {
            barrier_wait(empty + 8 * refill.slot, refill.turn);
            request(refill.slot);
            refill.next(D::X_SLOTS);
        }
        __syncwarp();
    }
#else
    inline void start() {}
    inline void begin() {
        __syncthreads();
        for (u32 i = 16 * threadIdx.x; i < D::X_BYTES; i += 16 * MULTIPLIERS) {
            *(uint4*)(slots + turn.slot * D::X_BYTES + i) = *(const uint4*)(from + i);
        }
        from += D::X_BYTES;
        __syncthreads();
    }
    inline void end(bool) { turn.next(D::X_SLOTS); }
#endif
};

// Multiplies planes begin .. end of a tile with M rows of x, and leaves the sums in shared memory: row `of` of
// x, row r of the block at of * PITCH + r.
template <typename T, int M> inline float* multiply_direct(const Tile& tile, const u8* x, u32 begin, u32 end, u8* shared) {
    typedef DirectDivision<M> D;
    u32 warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    u32 n_planes = end - begin, first_row = 16 * warp;
    auto row_of = [&](u32 row) -> const u8* {
        bool up = tile.up != nullptr && row >= D::ROWS / 2;
        u32 at = tile.first + (up ? row - D::ROWS / 2 : row);
        // Rows past the end repeat the first one; their sums are not stored.
        return (up ? tile.up : tile.w) + (at < tile.n ? 2 * (u64)at * tile.k : 0) + begin * PLANE_BYTES + 64 * t;
    };
    const u8 *low = row_of(first_row + g), *high = row_of(first_row + 8 + g);
    const u32 DEPTH = 2;
    uint4 w[DEPTH][8];
    u32 fetched = 0;
    auto fetch = [&](uint4* to) {
        if (fetched >= n_planes) return;
        fetched++;
#pragma unroll
        for (u32 s = 0; s < 4; s++) to[s] = load_weight(low + 16 * s);
#pragma unroll
        for (u32 s = 0; s < 4; s++) to[4 + s] = load_weight(high + 16 * s);
        low += PLANE_BYTES;
        high += PLANE_BYTES;
    };
#pragma unroll
    for (u32 d = 0; d < DEPTH; d++) fetch(w[d]);
    DirectRing<M> ring(shared, x, n_planes);
    __syncthreads();
    wait_for_previous();
    ring.start();
    float acc[M / 8][4] = {};
#pragma unroll 1
    for (u32 first = 0; first < n_planes; first += DEPTH) {
#pragma unroll
        for (u32 d = 0; d < DEPTH; d++) {
            if (first + d >= n_planes) break;
            ring.begin();
            ColumnsOf<M, T> right(ring.slots + ring.turn.slot * D::X_BYTES);
#pragma unroll
            for (u32 half = 0; half < 2; half++) {
                u32 a[4][4];
#pragma unroll
                for (u32 s = 0; s < 4; s++) {
                    uint4 l = w[d][half * 2 + s / 2], r = w[d][4 + half * 2 + s / 2];
                    a[s][0] = s % 2 ? l.z : l.x, a[s][1] = s % 2 ? r.z : r.x;
                    a[s][2] = s % 2 ? l.w : l.y, a[s][3] = s % 2 ? r.w : r.y;
                }
                right.begin(half);
#pragma unroll
                for (u32 s = 0; s < 4; s++) right.multiply(acc, a[s], s);
                right.end();
            }
            fetch(w[d]);
            ring.end(first + d == 0);
        }
    }
    // All copies into the ring have completed.
    float* sums = (float*)ring.slots;
    sync_threads<MULTIPLIERS>();
#pragma unroll
    for (u32 i = 0; i < M / 8; i++) {
        float* to = sums + (8 * i + 2 * t) * D::PITCH + first_row + g;
        to[0] = acc[i][0];
        to[D::PITCH] = acc[i][1];
        to[8] = acc[i][2];
        to[D::PITCH + 8] = acc[i][3];
    }
    return sums;
}
