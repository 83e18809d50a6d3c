// overlap.cuh: kernels that start before what they depend on has ended.
//
// Every kernel calls both, in every thread. The first as early as it can, unless what follows should find all
// multiprocessors alike: attend.cu may leave it to its end, sample.cu calls it behind the wait. The second before it touches
// anything that another kernel of a step writes. A kernel ends only after it waited, so waiting for one means waiting for
// all before it. In between may be read: weights, which nothing writes in a step; guesses that are checked behind the wait;
// what earlier steps left and this one does not write, the caches (both: attend.cu); and what the host sends before a step
// (sample.cu, whose blocks leave before the wait if the parameters leave them nothing to do: its first one waits). A step
// begins with gather.cu, which lets nothing start before its own wait has ended: what is behind it finds the steps before
// complete. Before compute capability 9.0 nothing overlaps and both are nothing.
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
