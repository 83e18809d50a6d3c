// sample_bins.cuh: what the tokens of a row weigh, by bins of logits. The bins say where to look before any key is looked
// at.
//
// A token's weight is a whole number, relative to the upper edge of its bin: sums do not depend on their order, so all
// blocks add to one table. It has BINS entries, and bins lie in it modulo that. A chunk adds only what is less than
// REACH bins below its best, so entries are not ambiguous as long as no chunk's best is further below the row's. What
// is left out weighs less than e^-32 beside the best, at temperature 1 and at the row's.
#pragma once
#include "sample_keys.cuh"

#ifndef BINS_PER_UNIT
#define BINS_PER_UNIT 32
#endif
const u32 BINS = 64 * BINS_PER_UNIT;
const u32 REACH = BINS / 2;
// Bins are exact for logits up to this.
const float MOST_BINNED = 262144.0f;
// Temperatures that bins are for: below, weights differ too much inside of one, above they reach too far.
const float COLDEST = 1.0f / BINS_PER_UNIT, HOTTEST = 16.0f;
// Nothing further below the best than this many times the temperature is ever chosen: its weight is below e^-40.
const u32 COLD_REACH = 40 + 1;
const double BIN_SCALE = 4294967295.0;

// Zero before the first launch, and zero again after every choice.
struct State {
    u64 weights[2][BINS];  // at temperature 1, and at the temperature
    u32 counts[BINS];      // with a top-k only
    u32 n_chunks;          // how many have been added
    u32 unused[3];
};

// The kinds of weights.
const u32 PLAIN = 0, TEMPERED = 1;

inline i32 bin_of(float logit, float per_unit) {
    return (i32)fminf(fmaxf(floorf(logit * per_unit), -1e9f), 1e9f);
}

// A row's or a chunk's bins, from its best downward. Widths are powers of two: edges are exact.
struct Bins {
    float per_unit;
    double width;
    i32 top;  // the bin of the best

    inline Bins(float temperature, float best) {
        u32 n = temperature <= 1.0f ? 1 : temperature <= 2.0f ? 2 : temperature <= 4.0f ? 4 : temperature <= 8.0f ? 8 : 16;
        per_unit = (float)BINS_PER_UNIT / (float)n;
        width = (double)n / BINS_PER_UNIT;
        top = bin_of(best, per_unit);
    }

    // How many bins a logit lies below the best.
    inline u32 below(float logit) const { return (u32)(top - bin_of(logit, per_unit)); }
    // Where a bin lies in a table.
    inline u32 entry(u32 n_below) const { return (u32)(top - (i32)n_below) % BINS; }
    inline double upper_edge(u32 n_below) const { return (double)(top - (i32)n_below + 1) * width; }

    // The least key that lies in a bin. Of the zeros the negative one comes first.
    inline u64 least_key(u32 n_below) const {
        float edge = (float)((double)(top - (i32)n_below) * width);
        return (u64)ordered(edge == 0.0f ? -0.0f : edge) << ID_BITS;
    }
};

// A weight relative to some logit, in whole numbers of which `scale` is 1.
inline u64 whole_weight(float logit, double best, double coldness, double scale) {
    return (u64)(exp(((double)logit - best) * coldness) * scale);
}

// Adds to a sum in shared memory, which has atomics for half of it.
inline void add_shared(u64* sum, u64 x) {
    u32* halves = (u32*)sum;
    u32 low = (u32)x, before = atomicAdd(&halves[0], low), high = (u32)(x >> 32) + (u32)(before + low < before);
    if (high != 0) atomicAdd(&halves[1], high);
}

// A chunk's own table, by bins below its best.
struct ChunkBins {
    u64 weights[2][REACH];
    u32 counts[REACH];

    inline void clear() {
        for (u32 i = threadIdx.x; i < REACH; i += blockDim.x) {
            weights[PLAIN][i] = 0, weights[TEMPERED][i] = 0;
            counts[i] = 0;
        }
    }

    inline void add(const Bins& bins, float logit, double coldness, bool counted) {
        u32 at = bins.below(logit);
        if (at >= REACH) return;
        double edge = bins.upper_edge(at);
        add_shared(&weights[PLAIN][at], whole_weight(logit, edge, 1.0, BIN_SCALE));
        add_shared(&weights[TEMPERED][at], whole_weight(logit, edge, coldness, BIN_SCALE));
        if (counted) atomicAdd(&counts[at], 1u);
    }

    // After a barrier behind the last `add`.
    inline void add_to(State* state, const Bins& bins, bool counted) const {
        for (u32 i = threadIdx.x; i < REACH; i += blockDim.x) {
            u32 to = bins.entry(i);
#pragma unroll
            for (int kind = 0; kind < 2; kind++) {
                if (weights[kind][i] != 0) atomicAdd(&state->weights[kind][to], weights[kind][i]);
            }
            if (counted && counts[i] != 0) atomicAdd(&state->counts[to], counts[i]);
        }
        if (threadIdx.x == 0) atomicAdd(&state->n_chunks, 1u);
    }
};

inline bool reached(double sum, double target, bool beyond) { return beyond ? sum > target : sum >= target; }
