// sample_bins.cuh: what the tokens of a row weigh, by bins of logits. The bins say where to look before any key is looked
// at.
//
// A token's weight is a whole number, relative to the upper edge of its bin: sums do not depend on their order, so all
// blocks add to one table. It has BINS entries, and bins lie in it modulo that. A chunk adds only what is less than
// REACH bins below its best, so entries are not ambiguous as long as no chunk's best is further below the row's. What
// is left out weighs less than e^-32 beside the best, at temperature 1 and at the row's.
#pragma once
#include "sample_keys.cuh"

// At temperature 1 and below.
const u32 BINS_PER_UNIT = 16;
const u32 BINS = 64 * BINS_PER_UNIT;
const u32 REACH = BINS / 2;
// Bins are exact for logits up to this.
const float MOST_BINNED = 262144.0f;
// Temperatures that bins are for: below, weights differ too much inside of one, above they reach too far.
const float COLDEST = 1.0f / 32.0f, HOTTEST = 16.0f;
// Bins that hold all that can be chosen at a temperature below that: what is 40 times it below the best weighs e^-40.
const u32 COLD_REACH = 40 * BINS_PER_UNIT / 32 + 1;
const double BIN_SCALE = 4294967295.0;

// What is summed up: weights at temperature 1, weights at the temperature, and, with a top-k, how many they are.
const u32 PLAIN = 0, TEMPERED = 1, COUNTED = 2, KINDS = 3;

// Zero before the first launch, and zero again after every choice.
struct State {
    u64 sums[KINDS][BINS];
    u32 n_chunks;  // how many have been added
    u32 unused[3];
};

// A token: its key, and its weights of the first two kinds.
struct alignas(16) Entry {
    u64 key;
    u32 weights[2];
};

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

    // The least logit that lies in a bin, as its key has it. Of the zeros the negative one comes first.
    inline u32 least(u32 n_below) const {
        float edge = (float)((double)(top - (i32)n_below) * width);
        return ordered(edge == 0.0f ? -0.0f : edge);
    }
};

// What makes weights relative to a bin's edge relative to that of the best's: a product of two of these.
struct Factors {
    double high[KINDS][BINS / 32];  // for every 32nd bin
    double low[KINDS][32];          // for those between

    // One of N_FACTORS.
    inline void make(u32 i, double width, double coldness) {
        const u32 N = BINS / 32 + 32;
        u32 kind = i / N, at = i % N, n = at < BINS / 32 ? 32 * at : at - BINS / 32;
        double factor = exp(-(double)n * width * (kind == PLAIN ? 1.0 : kind == TEMPERED ? coldness : 0.0));
        (at < BINS / 32 ? high[kind][at] : low[kind][at - BINS / 32]) = factor;
    }

    inline double of(u32 kind, u32 at) const { return high[kind][at / 32] * low[kind][at % 32]; }
};
const u32 N_FACTORS = KINDS * (BINS / 32 + 32);

// Equal parts of what lies between two keys, and bins that there are parts for because they have more tokens than LONG.
const u32 PARTS = 512;
const u32 LONG_SLOTS = 3;
const u32 LONG = 3072;

// What the blocks of the second kernel say to each other. The first one makes it 0.
struct alignas(16) Tail {
    u64 parts[LONG_SLOTS][2 * KINDS][PARTS];  // see sample_long.cuh
    // How many tokens are on the list, from its begin and from its end, and how many blocks have listed theirs.
    u32 n_listed[2], n_blocks;
    // Of blocks that have listed many: how many those are, the largest, and the complement of the least.
    u32 n_bounded;
    u64 largest, least;
};

// Makes it 0, by n threads of which this is the i-th.
inline void clear_tail(Tail& tail, u32 i, u32 n) {
    for (; i < sizeof(Tail) / 8; i += n) ((u64*)&tail)[i] = 0;
}

static_assert(sizeof(Tail) == 3 * 6 * 512 * 8 + 32 && sizeof(State) == 3 * 1024 * 8 + 16, "as src/sample.rs has them");

inline u64 row_bytes(u32 n_chunks) { return (u64)n_chunks * CHUNK_BYTES + sizeof(Tail); }

// A weight relative to some logit, in whole numbers of which `scale` is 1.
__noinline__ u64 whole_weight(float logit, double best, double coldness, double scale) {
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
    u64 sums[KINDS][REACH];

    inline void clear() {
        for (u32 i = threadIdx.x; i < KINDS * REACH; i += blockDim.x) (&sums[0][0])[i] = 0;
    }

    // Weighs a thread's two tokens, and adds them.
    inline void add(const Bins& bins, Entry* tokens, double coldness, bool counted) {
        u32 at[2];
        double below[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float logit = key_logit(tokens[r].key);
            // What weighs nothing is in no bin, be it the best of its chunk.
            at[r] = tokens[r].key == 0 || logit == -inf_f32() ? REACH : bins.below(logit);
            below[r] = at[r] < REACH ? (double)logit - bins.upper_edge(at[r]) : -(double)inf_f32();
        }
#pragma unroll
        for (int r = 0; r < 2; r++) {
            tokens[r].weights[PLAIN] = (u32)(exp(below[r]) * BIN_SCALE);
            tokens[r].weights[TEMPERED] = (u32)(exp(below[r] * coldness) * BIN_SCALE);
        }
#pragma unroll
        for (int r = 0; r < 2; r++) {
            if (at[r] >= REACH) continue;
            add_shared(&sums[PLAIN][at[r]], tokens[r].weights[PLAIN]);
            add_shared(&sums[TEMPERED][at[r]], tokens[r].weights[TEMPERED]);
            if (counted) add_shared(&sums[COUNTED][at[r]], 1);
        }
    }

    // After a barrier behind the last `add`.
    inline void add_to(State* state, const Bins& bins) const {
        for (u32 i = threadIdx.x; i < REACH; i += blockDim.x) {
            u32 to = bins.entry(i);
#pragma unroll
            for (u32 kind = 0; kind < KINDS; kind++) {
                if (sums[kind][i] != 0) atomicAdd(&state->sums[kind][to], sums[kind][i]);
            }
        }
        if (threadIdx.x == 0) atomicAdd(&state->n_chunks, 1u);
    }
};

inline bool reached(double sum, double target, bool beyond) { return beyond ? sum > target : sum >= target; }
