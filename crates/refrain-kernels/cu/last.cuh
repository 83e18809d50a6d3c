// last.cuh: detects the last of several blocks to arrive
#pragma once
#include "dtype.cuh"

#ifndef REFRAIN_ON_HOST  // the tests that run kernels on the host define it
// Counts to n, then wraps to zero; returns whether this was the n-th call. Writes made before it in the warp,
// or before a barrier, are visible to every later caller.
inline bool is_last(u32* counter, u32 n) {
    u32 before;
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(counter), "r"(n - 1)
                 : "memory");
    return before == n - 1;
}
#endif
