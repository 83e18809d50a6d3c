// last.cuh: the last block of several to come.
#pragma once
#include "dtype.cuh"

#ifndef REFRAIN_ON_HOST  // the tests that run kernels on the host bring it along
// Counts to n and starts again at zero; whether this was the n-th. What came before it in the warp, or before a barrier,
// is visible to whoever counts after it.
inline bool is_last(u32* counter, u32 n) {
    u32 before;
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(counter), "r"(n - 1)
                 : "memory");
    return before == n - 1;
}
#endif
