// cluster.cuh: reduction across the blocks of a cluster (consecutive in y) through distributed shared memory
//
// On the host, blocks run one after another: the last of a cluster adds for all of them.
#pragma once
#include "mma.cuh"

#ifndef REFRAIN_ON_HOST

// Barrier over the first THREADS threads of a block.
template <u32 THREADS> inline void sync_threads() { asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory"); }

// N floats of each block (a multiple of four), written by its first THREADS threads. The other threads have
// returned or will return.
template <u32 N, u32 THREADS> struct Cluster {
    u32 sums, rank, n_blocks;
    bool many;

    // Waits until all blocks have written their floats.
    inline Cluster(float* sums, bool many)
        : sums(shared_address(sums)), rank(many ? blockIdx.y : 0), n_blocks(many ? gridDim.y : 1), many(many) {
        if (many) wait();
        else sync_threads<THREADS>();
    }

    inline static void wait() {
#if __CUDA_ARCH__ >= 900
        asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
    }

    // Returns the sum of four floats over the blocks, added in block order.
    inline float4 sum(u32 at) const {
        float4 sum = {};
#if __CUDA_ARCH__ >= 900
#pragma unroll 4
        for (u32 block = 0; block < n_blocks; block++) {
            u32 from;
            float4 v;
            asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(from) : "r"(sums + 4 * at), "r"(block));
            asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                         : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                         : "r"(from)
                         : "memory");
            sum.x += v.x;
            sum.y += v.y;
            sum.z += v.z;
            sum.w += v.w;
        }
#endif
        return sum;
    }

    // Calls f for each of n items, distributed over the cluster's blocks.
    template <typename F> inline void share(u32 n, F f) const {
        for (u32 i = rank * THREADS + threadIdx.x; i < n; i += n_blocks * THREADS) f(i);
    }

    // Keeps shared memory alive until all blocks have read it.
    inline void finish() const {
        if (many) wait();
    }
};

#else

template <u32 THREADS> inline void sync_threads() { group_wait(1, THREADS); }

template <u32 N, u32 THREADS> struct Cluster {
    bool many, is_last = false;
    // The floats of each block, by its index.
    static std::map<std::tuple<u32, u32, u32>, std::vector<float>>& sums_of_blocks() {
        static std::map<std::tuple<u32, u32, u32>, std::vector<float>> all;
        return all;
    }

    Cluster(float* sums, bool many) : many(many) {
        sync_threads<THREADS>();
        if (!many) return;
        if (threadIdx.x == 0) sums_of_blocks()[{blockIdx.x, blockIdx.y, blockIdx.z}].assign(sums, sums + N);
        sync_threads<THREADS>();
        is_last = true;
        for (u32 y = 0; y < gridDim.y; y++) is_last = is_last && sums_of_blocks().count({blockIdx.x, y, blockIdx.z}) > 0;
    }

    float4 sum(u32 at) const {
        float4 sum = {};
        for (u32 y = 0; y < gridDim.y; y++) {
            const float* v = sums_of_blocks()[{blockIdx.x, y, blockIdx.z}].data() + at;
            sum = {sum.x + v[0], sum.y + v[1], sum.z + v[2], sum.w + v[3]};
        }
        return sum;
    }

    template <typename F> void share(u32 n, F f) const {
        if (many && !is_last) return;
        for (u32 i = threadIdx.x; i < n; i += THREADS) f(i);
    }

    void finish() const {
        if (!many || !is_last) return;
        sync_threads<THREADS>();
        if (threadIdx.x == 0) {
            for (u32 y = 0; y < gridDim.y; y++) sums_of_blocks().erase({blockIdx.x, y, blockIdx.z});
        }
    }
};

#endif
