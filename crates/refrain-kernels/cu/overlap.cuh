// overlap.cuh: programmatic dependent launch: kernels that start before the previous one has ended
//
// Every kernel calls both functions.
//
// let_next_start() goes as early as possible, unless the next kernel should find all SMs equally loaded:
// attend.cu may leave it to the end of the kernel, sample.cu calls it after the wait.
//
// wait_for_previous() goes before the first write, and before the first read of anything that another kernel
// of the step writes. Every block waits except those that have nothing to do (sample_select decides that by
// parameters that no kernel writes). On every path at least one block of a launch waits, so a launch ends
// only after its wait; hence waiting for one launch waits for all before it.
//
// Before the wait a kernel may read weights, which no step writes; guesses that it checks after the wait, and
// cache contents that earlier steps wrote and this step does not write (both: attend.cu); and data that the
// host sends before a step (sample.cu). The kernel's twin declares these reads. A step begins with gather.cu,
// which lets the next kernel start only after its own wait: every later kernel finds the previous steps
// complete. Before compute capability 9.0 nothing overlaps and both functions are empty.
#pragma once

#if !defined(REFRAIN_ON_HOST) && __CUDA_ARCH__ >= 900
inline void let_next_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
inline void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
inline unsigned cycles_now() { return (unsigned)clock(); }
// Spins until `cycles` have passed since `since`: delays a prefetch that should not be issued too early.
inline void hold(unsigned since, unsigned cycles) {
    while (cycles_now() - since < cycles) {}
}
#else
inline void let_next_start() {}
inline void wait_for_previous() {}
inline unsigned cycles_now() { return 0; }
inline void hold(unsigned, unsigned) {}
#endif

// Fetches a parameter and its neighbours, for which the first use would otherwise wait. The asm depends on
// the value so that the compiler keeps the access here; no pointer equals 1.
template <typename T> inline void touch(T* p) {
#ifndef REFRAIN_ON_HOST
    asm volatile("{ .reg .pred p; setp.eq.u64 p, %0, 1; @p trap; }" ::"l"(p));
#endif
}

// For kernels that have no work before the wait.
inline void start() {
    let_next_start();
    wait_for_previous();
}
