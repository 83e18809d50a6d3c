// sample_list.cuh: the short list of best keys, and the choice among them, for a block of 1024 threads of sample.cu.
#pragma once
#include "sample_keys.cuh"

inline u32 philox(u32 position, u32 key0, u32 key1) {
    u32 c0 = position, c1 = 0, c2 = 0, c3 = 0;
#pragma unroll
    for (int round = 0; round < 10; round++) {
        u64 a = (u64)0xd2511f53u * c0, b = (u64)0xcd9e8d57u * c2;
        c0 = (u32)(b >> 32) ^ c1 ^ key0;
        c1 = (u32)b;
        c2 = (u32)(a >> 32) ^ c3 ^ key1;
        c3 = (u32)a;
        key0 += 0x9e3779b9u;
        key1 += 0xbb67ae85u;
    }
    return c0;
}

// What the second kernel knows of its row.
struct Row {
    const u64* keys;         // [n_chunks, 1024], each chunk sorted unless top-k is small
    const double* weights;   // [n_chunks, 1024], running sums
    const double* tempered;  // [n_chunks, 1024], running sums at the temperature
    const u32* rng;
    u32 n_chunks, vocab;
    float top;
    double total, temperature;
    u32 top_k;
    float top_p, min_p;

    inline double uniform() const { return (double)((float)(philox(rng[2], rng[0], rng[1]) >> 8) / 16777216.0f); }
};

// What the threads of the second kernel share.
struct Desk {
    u64 list[LIST];         // in no order
    u64 sorted[LIST];       // the list, best first
    double weights[LIST];   // theirs, relative to the row's best
    double tempered[LIST];  // and at the temperature
    u64 best[LIST];         // the first such list
    double best_tempered[LIST];
    u32 groups[LIST];       // groups of keys that reach into the list
    u64 heads[CHUNK];       // the best of each chunk
    double factor[CHUNK];   // a chunk's sums times this are relative to the row's best
    u16 kept[CHUNK];        // how many of a chunk's keys are candidates
    u16 low[CHUNK];         // the cut is not before this many
    u16 high[CHUNK];        // nor behind this many
    double partial[32][33];
    double above[32];
    u64 key, top_key;
    double total;
    u32 n_list, n_groups, found;
};

// How many of the keys low .. high are at or above a key, given that the first `low` are.
inline u32 rank(const u64* keys, u64 key, u32 low, u32 high) {
    while (low < high) {
        u32 middle = (low + high) / 2;
        if (keys[middle] >= key) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

// Which of n keys this thread is to place, and how many of them are larger. 1024 threads share the comparisons.
inline u32 place_of(const u64* keys, u32 n, u32& mine) {
    u32 share = 32;
    while (share > 1 && 1024 / share < n) share /= 2;
    mine = threadIdx.x / share;
    u64 key = mine < n ? keys[mine] : 0;
    u32 larger = 0;
    if (mine < n) {
#pragma unroll 8
        for (u32 i = threadIdx.x % share; i < n; i += share) larger += keys[i] > key;
    }
    for (u32 step = 1; step < share; step *= 2) larger += __shfl_xor_sync(ALL_LANES, larger, step);
    return larger;
}

// Appends the keys from `least` upward that a warp's lanes bring, two each; how many they were.
inline u32 append(Desk& desk, Two keys, u64 least) {
    u32 lane = threadIdx.x % 32, before = (1u << lane) - 1, at = 0;
    u32 a = __ballot_sync(ALL_LANES, keys.a >= least), b = __ballot_sync(ALL_LANES, keys.b >= least);
    u32 n = __popc(a) + __popc(b);
    if (n == 0) return 0;
    if (lane == 0) at = atomicAdd(&desk.n_list, n);
    at = __shfl_sync(ALL_LANES, at, 0);
    u32 at_a = at + __popc(a & before), at_b = at + __popc(a) + __popc(b & before);
    if (keys.a >= least && at_a < LIST) desk.list[at_a] = keys.a;
    if (keys.b >= least && at_b < LIST) desk.list[at_b] = keys.b;
    return n;
}

// Lists every key from `least` (not 0) upward of sorted chunks, unless there are more than fit.
inline void list_from(const Row& row, Desk& desk, u64 least) {
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Two* keys = (const Two*)row.keys;
    for (u32 first = 4 * warp; first < row.n_chunks; first += 128) {
        Two k[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            bool there = first + i < row.n_chunks;
            k[i] = there ? keys[(u64)(first + i) * (CHUNK / 2) + lane] : Two{0, 0};
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            bool more = append(desk, k[i], least) == 64;
            // Longer lists are of no use, so nobody has to count them to the end.
            for (u32 at = 32; more && at < LIST; at += 32) {
                more = append(desk, keys[(u64)(first + i) * (CHUNK / 2) + at + lane], least) == 64;
            }
        }
    }
}

// Lists the keys low .. high of every chunk, of which there are no more than fit.
inline void list_between(const Row& row, Desk& desk) {
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (u32 first = 4 * warp; first < row.n_chunks; first += 128) {
        u64 k[4];
        u32 at[4], end[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            bool there = first + i < row.n_chunks;
            at[i] = there ? desk.low[first + i] : 0;
            end[i] = there ? desk.high[first + i] : 0;
            k[i] = at[i] + lane < end[i] ? row.keys[(u64)(first + i) * CHUNK + at[i] + lane] : 0;
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            append(desk, Two{k[i], 0}, 1);
            for (u32 j = at[i] + 32; j < end[i]; j += 32) {
                append(desk, Two{j + lane < end[i] ? row.keys[(u64)(first + i) * CHUNK + j + lane] : 0, 0}, 1);
            }
        }
    }
}

// Sorts the list and weighs it, a thread for each. All threads call it, after a barrier behind the last append.
inline void sort_list(const Row& row, Desk& desk, u32 n) {
    u32 mine, place = place_of(desk.list, n, mine);
    if (mine < n) desk.sorted[place] = desk.list[mine];
    __syncthreads();
    u32 i = threadIdx.x % 512;
    if (i < n) {
        bool hot = threadIdx.x >= 512;
        double w = weight(key_logit(desk.sorted[i]), row.top, hot ? row.temperature : 1.0);
        (hot ? desk.tempered : desk.weights)[i] = w;
    }
    __syncthreads();
}

// The first 32 R of the sorted list as the first warp sees them: R places to a lane, in order.
template <int R> struct Listed {
    inline u32 place(int r) const { return threadIdx.x % 32 * R + r; }

    inline void take(double* v, const double* weights, u32 n) const {
#pragma unroll
        for (int r = 0; r < R; r++) v[r] = place(r) < n ? weights[place(r)] : 0.0;
    }

    // Running sums, from an offset.
    inline void sum_up(double* v, double from) const {
        u32 lane = threadIdx.x % 32;
#pragma unroll
        for (int r = 1; r < R; r++) v[r] += v[r - 1];
        double sum = v[R - 1];
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            double before = __shfl_up_sync(ALL_LANES, sum, step);
            if (lane >= step) sum += before;
        }
        double before = __shfl_up_sync(ALL_LANES, sum, 1);
        from += lane > 0 ? before : 0.0;
#pragma unroll
        for (int r = 0; r < R; r++) v[r] += from;
    }

    // The first of `n` places where the condition holds, else n.
    template <typename F> inline u32 first(u32 n, F holds) const {
        u32 mine = R;
#pragma unroll
        for (int r = R - 1; r >= 0; r--) {
            if (place(r) < n && holds(r)) mine = r;
        }
        u32 lanes = __ballot_sync(ALL_LANES, mine < R);
        u32 lane = lanes == 0 ? 0 : __ffs(lanes) - 1;
        mine = __shfl_sync(ALL_LANES, mine, lane);
        return lanes == 0 ? n : R * lane + mine;
    }

    inline double at(const double* v, u32 i) const {
        double x = v[0];
#pragma unroll
        for (int r = 1; r < R; r++) x = i % R == r ? v[r] : x;
        return __shfl_sync(ALL_LANES, x, i / R);
    }
};

// The choice from the n best of the sorted list, if the filters cut inside them: its place; else n. For the first warp.
template <int R> inline u32 choose_listed(const Row& row, const Desk& desk, u32 n, double uniform) {
    Listed<R> listed;
    double sums[R];
    listed.take(sums, desk.weights, n);
    listed.sum_up(sums, 0.0);

    u32 keep = n;
    bool whole = n == row.vocab;
    double candidates = row.total;
    if (row.top_k > 0) {
        if (row.top_k <= n) {
            keep = row.top_k;
            whole = true;
        }
        if (!whole) return n;
        candidates = listed.at(sums, keep - 1);
    }
    if (!(row.top_p >= 1.0f)) {
        double wanted = (double)row.top_p * candidates;
        u32 reached = listed.first(keep, [&](int r) { return sums[r] >= wanted; });
        if (reached < keep) {
            keep = reached + 1;
            whole = true;
        }
    }
    if (row.min_p > 0.0f) {
        u32 below = listed.first(keep, [&](int r) { return !(desk.weights[listed.place(r)] >= (double)row.min_p); });
        if (below < keep) {
            keep = below > 0 ? below : 1;
            whole = true;
        }
    }
    if (!whole) return n;
    listed.take(sums, desk.tempered, keep);
    listed.sum_up(sums, 0.0);
    double target = uniform * listed.at(sums, keep - 1);
    u32 chosen = listed.first(keep, [&](int r) { return sums[r] > target; });
    // Rounding can leave the target a hair above the last sum: then the last candidate is it.
    return chosen < keep ? chosen : keep - 1;
}

// The n-th best of the keys on the desk, 1 when there are fewer; the best becomes the top key. All threads call it.
inline u64 nth_head(Desk& desk, const u64* heads, u32 n_heads, u32 n) {
    if (threadIdx.x == 0) desk.key = 1;
    __syncthreads();
    u32 mine, place = place_of(heads, n_heads, mine);
    // Only places without a token are equal.
    if (mine < n_heads && place == n - 1 && heads[mine] != 0) desk.key = heads[mine];
    if (mine < n_heads && place == 0) desk.top_key = heads[mine];
    __syncthreads();
    return desk.key;
}

// Sorted chunks: lists every key from the n-th best head upward, for an n that mostly fills the list; how many there
// are, or 0 when they are too many.
inline u32 list_best(const Row& row, Desk& desk) {
    // Of few chunks more than the head, so that there are enough.
    u32 depth = max(128 / row.n_chunks, 1u), n_heads = depth * row.n_chunks;
    u64* heads = depth == 1 ? desk.heads : (u64*)desk.partial;
    if (depth > 1 && threadIdx.x < n_heads) {
        heads[threadIdx.x] = row.keys[(u64)(threadIdx.x / depth) * CHUNK + threadIdx.x % depth];
    }
    // Keys that fall on chunks at random are 180 to 200 then.
    for (u32 n = n_heads < 200 ? 96 : n_heads < 500 ? 130 : 160;; n /= 2) {
        if (threadIdx.x == 0) desk.n_list = 0;
        u64 least = nth_head(desk, heads, n_heads, n);
        list_from(row, desk, least);
        __syncthreads();
        u32 listed = desk.n_list;
        if (listed <= LIST) {
            sort_list(row, desk, listed);
            return listed;
        }
        if (n < SMALL_K) return 0;
        __syncthreads();
    }
}

// The bests of the groups that a thread looks after, fetched before they are needed.
struct Groups {
    u64 heads[2];

    inline Groups(const Row& row) {
        const u64* all = (const u64*)row.weights;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            u32 g = threadIdx.x + i * 1024;
            heads[i] = g < row.n_chunks * GROUPS ? all[g] : 0;
        }
    }

    // Calls f with every group of this thread whose best is at or above a key.
    template <typename F> inline void from(const Row& row, u64 least, F f) const {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if (heads[i] >= least) f(threadIdx.x + i * 1024);
        }
        for (u32 g = threadIdx.x + 2048; g < row.n_chunks * GROUPS; g += 1024) {
            if (((const u64*)row.weights)[g] >= least) f(g);
        }
    }
};

// Unsorted chunks: lists every key from `least` upward, looking only at groups whose best is; false when they are too
// many. All threads call it, after a barrier behind what last read the list.
inline bool list_groups(const Row& row, Desk& desk, const Groups& groups, u64 least) {
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) desk.n_list = 0, desk.n_groups = 0;
    __syncthreads();
    groups.from(row, least, [&](u32 g) {
        u32 at = atomicAdd(&desk.n_groups, 1u);
        if (at < LIST) desk.groups[at] = g;
    });
    __syncthreads();
    u32 n_groups = desk.n_groups;
    if (n_groups > LIST) return false;
    for (u32 i = warp; i < n_groups; i += 64) {
        Two k[2];
#pragma unroll
        for (int j = 0; j < 2; j++) {
            bool there = i + 32 * j < n_groups;
            k[j] = there ? ((const Two*)row.keys)[(u64)desk.groups[i + 32 * j] * (GROUP / 2) + lane] : Two{0, 0};
        }
        append(desk, k[0], least);
        append(desk, k[1], least);
    }
    __syncthreads();
    return desk.n_list <= LIST;
}

// The n-th best of all keys, eight bits of it at a time. Slow: for keys that crowd.
inline u64 nth_key(const Row& row, Desk& desk, u32 n) {
    u32* counts = (u32*)desk.partial;
    u64 prefix = 0;
    for (int shift = 48; shift >= 0; shift -= 8) {
        if (threadIdx.x < 256) counts[threadIdx.x] = 0;
        __syncthreads();
        for (u64 i = threadIdx.x; i < (u64)row.n_chunks * CHUNK; i += blockDim.x) {
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
