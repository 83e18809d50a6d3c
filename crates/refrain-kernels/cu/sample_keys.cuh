// sample_keys.cuh: order and weight of tokens in sample.cu, and how they are dealt to chunks
#pragma once
#include "reduce.cuh"

const u32 CHUNK = 1024;
const u32 ID_BITS = 20;
const u32 ID_MASK = (1u << ID_BITS) - 1;
const u32 ALL_LANES = 0xffffffffu;
// The largest top-k that is chosen from unsorted keys.
const u32 SMALL_K = 64;
// Keys per warp of the first kernel, two per lane, and warps per chunk.
const u32 GROUP = 64;
const u32 GROUPS = CHUNK / GROUP;
// Maximum length of the short list.
const u32 LIST = 256;
// Scratch bytes per chunk: its tokens (with their weights, unless top-k is small), as many list entries, and
// its summary.
const u32 CHUNK_BYTES = CHUNK * 32 + 16;

struct alignas(16) Two {
    u64 a, b;
};

struct Larger {
    inline u64 operator()(u64 a, u64 b) const { return a > b ? a : b; }
};

// Maps a float to bits that compare like the numbers; -0 is below +0.
inline u32 ordered(float x) {
    u32 bits = __float_as_uint(x);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

inline float from_ordered(u32 x) { return __uint_as_float(x & 0x80000000u ? x & 0x7fffffffu : ~x); }

// Returns the key of a token. Never 0, which marks empty entries.
inline u64 key_of(float logit, u32 id) { return (u64)ordered(logit) << ID_BITS | (ID_MASK - id); }
inline float key_logit(u64 key) { return from_ordered((u32)(key >> ID_BITS)); }
inline u32 key_id(u64 key) { return ID_MASK - ((u32)key & ID_MASK); }

// Returns the weight relative to `best`, at the temperature 1 / coldness. If the best is -inf, nothing has
// weight.
inline double weight(float logit, float best, double coldness) {
    if (best == -inf_f32()) return 0.0;
    return exp(((double)logit - (double)best) * coldness);
}

// Returns the largest key of a warp, found by its upper half, then its lower half.
inline u64 warp_largest(u64 key) {
    u32 high = __reduce_max_sync(ALL_LANES, (u32)(key >> 32));
    u32 low = __reduce_max_sync(ALL_LANES, (u32)(key >> 32) == high ? (u32)key : 0);
    return (u64)high << 32 | low;
}

// Summary of a chunk.
struct Chunk {
    u64 best;
    double sum;  // of weights relative to the best

    // Returns the factor that converts sums relative to this chunk's best to sums relative to the row's best.
    inline double factor(float top, double coldness) const {
        float own = key_logit(best);
        return own == -inf_f32() ? 0.0 : weight(own, top, coldness);
    }

    // Returns the sum relative to the row's best.
    inline double relative_to(float top) const { return factor(top, 1.0) * sum; }
};

inline bool is_greedy(float temperature) { return !(temperature > 0.0f); }

// Converts a float like Rust's `as usize`: NaN and values below 1 become 0.
inline u32 top_k_of(float k) { return k >= 1.0f ? (k >= 2147483648.0f ? 0x80000000u : (u32)k) : 0; }

inline bool is_small(u32 top_k) { return top_k >= 1 && top_k <= SMALL_K; }

// Tokens are dealt in fours: neighbours in the vocabulary, which are often likely together, go to different
// chunks.
struct Deal {
    u32 chunk, n_chunks;

    inline bool has(i32 id) const { return id >= 0 && (u32)id / 4 % n_chunks == chunk; }
    inline u32 place(i32 id) const { return (u32)id / 4 / n_chunks * 4 + (u32)id % 4; }
    inline u32 first_id(u32 thread) const { return 4 * (thread / 2 * n_chunks + chunk) + thread % 2 * 2; }
};
