// sample_small.cuh: the choice with a top-k up to 64, from unsorted chunks
//
// Only some of the block's threads work here: everything is short, and the cost of an instruction is
// proportional to the number of warps that execute it.
#pragma once
#include "sample_list.cuh"

const u32 SMALL_THREADS = 256;
// Groups whose best keys each thread prefetches.
const int GROUPS_AHEAD = 8;

// The best keys of the groups assigned to a thread.
struct Groups {
    u64 heads[GROUPS_AHEAD];

    inline Groups(const Row& row) {
        const u64* all = row.heads;
#pragma unroll
        for (int i = 0; i < GROUPS_AHEAD; i++) {
            u32 g = threadIdx.x + i * SMALL_THREADS;
            heads[i] = g < row.n_chunks * GROUPS ? all[g] : 0;
        }
    }

    // Lists every group of this thread whose best is at least `least`.
    inline void list(const Row& row, Desk& desk, u64 least) const {
        u32 n = 0, n_all = row.n_chunks * GROUPS;
        const u64* all = row.heads;
#pragma unroll
        for (int i = 0; i < GROUPS_AHEAD; i++) n += heads[i] >= least;
        const u32 first_unfetched = threadIdx.x + GROUPS_AHEAD * SMALL_THREADS;
        for (u32 g = first_unfetched; g < n_all; g += SMALL_THREADS) n += all[g] >= least;
        if (n == 0) return;
        u32 at = atomicAdd(&desk.n_groups, n);
#pragma unroll
        for (int i = 0; i < GROUPS_AHEAD; i++) {
            if (heads[i] < least) continue;
            if (at < LIST) desk.groups[at] = threadIdx.x + i * SMALL_THREADS;
            at++;
        }
        for (u32 g = first_unfetched; g < n_all; g += SMALL_THREADS) {
            if (all[g] < least) continue;
            if (at < LIST) desk.groups[at] = g;
            at++;
        }
    }
};

// Lists every key that is at least `least`, reading only groups whose best is; returns false if there are too
// many. All threads call this, with an empty list and after a barrier that follows its clearing.
inline bool list_groups(const Row& row, Desk& desk, const Groups& groups, u64 least) {
    const u32 WARPS = SMALL_THREADS / 32;
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    groups.list(row, desk, least);
    __syncthreads();
    u32 n_groups = desk.n_groups;
    if (n_groups > LIST) return false;
    for (u32 first = warp; first < n_groups; first += 8 * WARPS) {
        u64 k[16];
#pragma unroll
        for (int j = 0; j < 8; j++) {
            u32 i = first + j * WARPS;
            Two two = i < n_groups ? ((const Two*)row.keys)[(u64)desk.groups[i] * (GROUP / 2) + lane] : Two{0, 0};
            k[2 * j] = two.a, k[2 * j + 1] = two.b;
        }
        append<16>(desk, k, least);
    }
    __syncthreads();
    return desk.n_list <= LIST;
}

// Returns the n-th best of all keys by radix select on eight bits at a time. Slow; for rows with too many
// keys near the cut.
inline u64 nth_key(const Row& row, Desk& desk, u32 n) {
    u32* counts = desk.counts;
    u64 prefix = 0;
    for (int shift = 48; shift >= 0; shift -= 8) {
        counts[threadIdx.x] = 0;
        __syncthreads();
        for (u64 i = threadIdx.x; i < (u64)row.n_chunks * CHUNK; i += SMALL_THREADS) {
            u64 key = row.keys[i];
            if (key >> (shift + 8) == prefix) atomicAdd(&counts[key >> shift & 255], 1u);
        }
        __syncthreads();
        u32 digit = 255;
        for (; digit > 0 && counts[digit] < n; digit--) n -= counts[digit];
        prefix = prefix << 8 | digit;
        __syncthreads();
    }
    return prefix;
}

// Stores the keys from which a short list is made if there are too few chunks: the best of several adjacent
// groups, as many as still leave enough keys. Returns their number.
inline u32 heads_of_groups(const Row& row, Desk& desk) {
    u32 join = GROUPS;
    while (join > 1 && row.n_chunks * (GROUPS / join) < SMALL_K) join /= 2;
    u32 n = row.n_chunks * (GROUPS / join);
    for (u32 i = threadIdx.x; i < n; i += SMALL_THREADS) {
        u64 head = 0;
        for (u32 j = 0; j < join; j++) head = Larger()(head, row.heads[i * join + j]);
        desk.heads[i] = head;
    }
    end_list(desk.heads, n);
    __syncthreads();
    return n;
}

inline void clear_list(Desk& desk) {
    for (u32 i = threadIdx.x; i < LIST + AHEAD; i += SMALL_THREADS) desk.list[i] = 0;
}

// Returns the choice: the list holds all candidates. 0 if no candidate has weight. For the first
// SMALL_THREADS threads with their chunks, after the others have returned; thread 0 has the result.
inline u64 choose_small(Row& row, Desk& desk, const Chunk* chunks, Chunk mine) {
    u32 c = threadIdx.x, n_heads = row.n_chunks;
    Groups groups(row);
    row.coldness = 1.0 / (double)row.temperature;
    if (c == 0) desk.n_list = 0, desk.n_groups = 0, desk.key = 1;
    clear_list(desk);
    end_list(desk.heads, n_heads);
    weigh_all<SMALL_THREADS>(row, desk, chunks, mine);
    // A warp that usually has no chunks draws the random number.
    if (c == SMALL_THREADS - 32) desk.uniform = row.uniform();
    if (n_heads < SMALL_K) {
        __syncthreads();
        n_heads = heads_of_groups(row, desk);
    }
    u64 least = nth_head<SMALL_THREADS>(desk, desk.heads, n_heads, row.top_k);
    row.total = total_of<SMALL_THREADS>(row, desk);
    // All logits are -inf, or the best is infinite.
    if (row.top == -inf_f32() || row.top == inf_f32()) return 0;
    // A chunk's best treats -0 as +0, so its key may be above the token's own key.
    if (key_logit(least) == 0.0f) least = (u64)ordered(-0.0f) << ID_BITS;
    if (!list_groups(row, desk, groups, least)) {
        least = nth_key(row, desk, min(row.top_k, row.vocab));
        if (c == 0) desk.n_list = 0, desk.n_groups = 0;
        clear_list(desk);
        __syncthreads();
        list_groups(row, desk, groups, least);
    }
    // Only the best k count, which fit two to a lane.
    u32 n = desk.n_list;
    sort_list<SMALL_THREADS>(row, desk, n, SMALL_K);
    return c < 32 ? desk.sorted[choose_listed<SMALL_K / 32>(row, desk, min(n, SMALL_K), desk.uniform)] : 0;
}
