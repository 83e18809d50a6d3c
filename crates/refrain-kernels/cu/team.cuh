// team.cuh: blocks of a cluster that write into each other's shared memory. Before compute capability 9.0, and on the
// host, a team is one block.
#pragma once
#include "dtype.cuh"

#if !defined(REFRAIN_ON_HOST) && __CUDA_ARCH__ >= 900
#define TEAMS 1

// Everything before it, in every thread of the team, is visible behind team_wait. Threads that have returned count as
// arrived; nobody may write to a block that has.
inline void team_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
inline void team_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

// Where a place of this block's shared memory is in that of another block of the team.
inline u32 place_in(const void* here, u32 rank) {
    u32 there;
    asm("{ .reg .u64 p; .reg .u32 q; cvta.to.shared.u64 p, %1; cvt.u32.u64 q, p; mapa.shared::cluster.u32 %0, q, %2; }"
        : "=r"(there)
        : "l"(here), "r"(rank));
    return there;
}

inline void store_in(float4* here, u32 rank, float4 x) {
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(place_in(here, rank)), "f"(x.x), "f"(x.y),
                 "f"(x.z), "f"(x.w)
                 : "memory");
}

inline void store_in(float2* here, u32 rank, float2 x) {
    asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(place_in(here, rank)), "f"(x.x), "f"(x.y)
                 : "memory");
}
#else
#define TEAMS 0

inline void team_arrive() { __syncthreads(); }
inline void team_wait() {}
template <typename V> inline void store_in(V* here, u32, V x) { *here = x; }
#endif
