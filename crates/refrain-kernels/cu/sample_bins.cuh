// sample_bins.cuh: the weight of a row's tokens in bins of logits, which narrow the search before any key is
// read
//
// A token's weight is an integer, relative to the upper edge of its bin. Integer sums do not depend on their
// order, so all blocks add to one table. The table has BINS entries; a bin's entry is its index modulo BINS.
// A chunk adds only tokens less than REACH bins below its best, so entries are unambiguous as long as no
// chunk's best is further than that below the row's. The omitted tokens together weigh less than e^-32 of the
// best, at temperature 1 and at the row's temperature.
#pragma once
#include "sample_keys.cuh"

// At temperature 1 and below.
const u32 BINS_PER_UNIT = 16;
const u32 BINS = 64 * BINS_PER_UNIT;
const u32 REACH = BINS / 2;
// Bins are exact for logits up to this magnitude.
const float MOST_BINNED = 262144.0f;
// Temperatures that bins support: below, weights differ too much within a bin; above, the bins reach too far.
const float COLDEST = 1.0f / 32.0f, HOTTEST = 16.0f;
// Bins that hold every possible choice below COLDEST: a logit 40 temperatures below the best has the weight
// e^-40.
const u32 COLD_REACH = 40 * BINS_PER_UNIT / 32 + 1;
const double BIN_SCALE = 4294967295.0;

// Kinds of sums: weights at temperature 1, weights at the row's temperature, and, with a top-k, token counts.
const u32 PLAIN = 0, TEMPERED = 1, COUNTED = 2, KINDS = 3;

// Sums of a row's bins. Zero before the first launch and after every choice.
struct State {
    u64 sums[KINDS][BINS];
    u32 n_chunks;  // chunks added so far
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

// The bins of a row or chunk, from its best downward. Widths are powers of two, so edges are exact.
struct Bins {
    float per_unit;
    double width;
    i32 top;  // bin of the best logit

    inline Bins(float temperature, float best) {
        u32 n = temperature <= 1.0f ? 1 : temperature <= 2.0f ? 2 : temperature <= 4.0f ? 4 : temperature <= 8.0f ? 8 : 16;
        per_unit = (float)BINS_PER_UNIT / (float)n;
        width = (double)n / BINS_PER_UNIT;
        top = bin_of(best, per_unit);
    }

    // Returns how many bins a logit is below the best.
    inline u32 below(float logit) const { return (u32)(top - bin_of(logit, per_unit)); }
    // Returns the index of a bin in a table.
    inline u32 entry(u32 n_below) const { return (u32)(top - (i32)n_below) % BINS; }
    inline double upper_edge(u32 n_below) const { return (double)(top - (i32)n_below + 1) * width; }

    // Returns the smallest logit of a bin, as in keys. Among the zeros, -0 comes first.
    inline u32 least(u32 n_below) const {
        float edge = (float)((double)(top - (i32)n_below) * width);
        return ordered(edge == 0.0f ? -0.0f : edge);
    }
};

// Factors that convert weights relative to a bin's edge to weights relative to the top bin's edge: the
// product of a high and a low factor.
struct Factors {
    double high[KINDS][BINS / 32];  // for every 32nd bin
    double low[KINDS][32];          // for the bins in between

    // Computes factor i of N_FACTORS.
    inline void make(u32 i, double width, double coldness) {
        const u32 N = BINS / 32 + 32;
        u32 kind = i / N, at = i % N, n = at < BINS / 32 ? 32 * at : at - BINS / 32;
        double factor = exp(-(double)n * width * (kind == PLAIN ? 1.0 : kind == TEMPERED ? coldness : 0.0));
        (at < BINS / 32 ? high[kind][at] : low[kind][at - BINS / 32]) = factor;
    }

    inline double of(u32 kind, u32 at) const { return high[kind][at / 32] * low[kind][at % 32]; }
};
const u32 N_FACTORS = KINDS * (BINS / 32 + 32);

// Number of equal parts that a key range is divided into, and slots with parts for bins of more than LONG
// tokens.
const u32 PARTS = 512;
const u32 LONG_SLOTS = 3;
const u32 LONG = 3072;

// Data shared by the blocks of the second kernel. The first kernel clears it.
struct alignas(16) Tail {
    u64 parts[LONG_SLOTS][2 * KINDS][PARTS];  // see sample_long.cuh
    // Tokens listed from the list's front and from its end, and blocks that have listed theirs.
    u32 n_listed[2], n_blocks;
    // Over the blocks that listed many tokens: how many tokens those are, the largest key, and the complement
    // of the smallest.
    u32 n_bounded;
    u64 largest, least;
};

// Clears the tail; thread i of n.
inline void clear_tail(Tail& tail, u32 i, u32 n) {
    for (; i < sizeof(Tail) / 8; i += n) ((u64*)&tail)[i] = 0;
}

static_assert(sizeof(Tail) == 3 * 6 * 512 * 8 + 32 && sizeof(State) == 3 * 1024 * 8 + 16, "as src/sample.rs has them");

inline u64 row_bytes(u32 n_chunks) { return (u64)n_chunks * CHUNK_BYTES + sizeof(Tail); }

// Returns a weight relative to a reference logit as an integer; a weight of 1 is `scale`.
__noinline__ u64 whole_weight(float logit, double best, double coldness, double scale) {
    return (u64)(exp(((double)logit - best) * coldness) * scale);
}

// Adds to a 64-bit sum in shared memory by 32-bit atomics; shared memory has none of 64 bits.
inline void add_shared(u64* sum, u64 x) {
    u32* halves = (u32*)sum;
    u32 low = (u32)x, before = atomicAdd(&halves[0], low), high = (u32)(x >> 32) + (u32)(before + low < before);
    if (high != 0) atomicAdd(&halves[1], high);
}

// A chunk's own table, indexed by bins below its best.
struct ChunkBins {
    u64 sums[KINDS][REACH];

    inline void clear() {
        for (u32 i = threadIdx.x; i < KINDS * REACH; i += blockDim.x) (&sums[0][0])[i] = 0;
    }

    // Computes the weights of a thread's two tokens, and adds them.
    inline void add(const Bins& bins, Entry* tokens, double coldness, bool counted) {
        u32 at[2];
        double below[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float logit = key_logit(tokens[r].key);
            // A token of weight zero is in no bin, even as the best of its chunk.
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

    // Adds to the row's table. Requires a barrier after the last add().
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
