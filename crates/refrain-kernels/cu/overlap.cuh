// overlap.cuh: kernels that start before what they depend on has ended.
//
// Every kernel calls both. let_next_start() as early as it can, unless the next kernel should find all multiprocessors
// alike: attend.cu may leave it to its end, sample.cu calls it behind the wait. wait_for_previous() before it writes anything,
// and before it reads anything that another kernel of the step writes. Every block waits but those that have nothing to do
// (sample_select, by parameters that no kernel writes); at least one block of a launch waits on every path, so a launch ends
// only after it waited, and waiting for one means waiting for all before it.
//
// Before the wait a kernel may read weights, which nothing writes in a step; guesses that are checked behind the wait, and
// what earlier steps left in the caches and this one does not write (both: attend.cu); and what the host sends before a step
// (sample.cu). Its twin declares these reads. A step begins with gather.cu, which lets the next kernel start only behind its
// own wait: everything behind it finds the steps before complete. Before compute capability 9.0 nothing overlaps and both are
// nothing.
#pragma once

#if !defined(REFRAIN_ON_HOST) && __CUDA_ARCH__ >= 900
inline void let_next_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
inline void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
inline unsigned cycles_now() { return (unsigned)clock(); }
// Until so many cycles have passed: for what should not be asked for too early.
inline void hold(unsigned since, unsigned cycles) {
    while (cycles_now() - since < cycles) {}
}
#else
inline void let_next_start() {}
inline void wait_for_previous() {}
inline unsigned cycles_now() { return 0; }
inline void hold(unsigned, unsigned) {}
#endif

// Fetches a parameter and what lies around it, which the first use would wait for. The compiler keeps it here only if
// something depends on it; nothing has this address.
template <typename T> inline void touch(T* p) {
#ifndef REFRAIN_ON_HOST
    asm volatile("{ .reg .pred p; setp.eq.u64 p, %0, 1; @p trap; }" ::"l"(p));
#endif
}

// For kernels that have nothing to do before they wait.
inline void start() {
    let_next_start();
    wait_for_previous();
}
