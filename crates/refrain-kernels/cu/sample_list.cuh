// sample_list.cuh: the short list of best keys, and the choice among them, for one block of sample.cu
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

// A row's data in the second kernel.
struct Row {
    const u64* keys;   // [n_chunks, 1024]
    const u64* heads;  // [n_chunks, GROUPS], with a small top-k
    u32 rng[3];        // seed low, seed high, position
    u32 n_chunks, vocab;
    float temperature;
    u32 top_k;
    float top_p, min_p;
    float top;
    double total;
    double coldness;  // 1 / temperature

    inline double uniform() const { return (double)((float)(philox(rng[2], rng[0], rng[1]) >> 8) / 16777216.0f); }
};

// Zero entries after keys that are compared, so that loops need no bounds check.
const u32 AHEAD = 128;

// Shared memory of the choice with a small top-k.
struct Desk {
    alignas(16) u64 list[LIST + AHEAD];    // unordered
    alignas(16) u64 heads[CHUNK + AHEAD];  // the best of each chunk
    u64 sorted[LIST];                      // the list, best first
    double weights[LIST];                  // of `sorted`, relative to the row's best
    double tempered[LIST];                 // the same at the row's temperature
    u32 groups[LIST];                      // groups of keys whose best is on the list
    u32 counts[256];                       // histogram of eight bits of the keys
    u64 key;
    u32 n_list, n_groups;
    u32 warps[32];
    double sums[32];
    double uniform;
};

// Combines the chunks' summaries: the best, and the sum of all weights relative to it. For one warp, whose
// lanes hold the first 32 chunks.
inline Chunk together(const Chunk* chunks, u32 n_chunks, Chunk mine) {
    u32 lane = threadIdx.x % 32;
    u64 best = mine.best;
    for (u32 c = lane + 32; c < n_chunks; c += 32) best = Larger()(best, chunks[c].best);
    best = warp_largest(best);
    double sum = 0.0;
    for (u32 c = lane; c < n_chunks; c += 32) {
        if (c > lane) mine = chunks[c];
        sum += mine.relative_to(key_logit(best));
    }
    return Chunk{best, warp_reduce(sum, Add())};
}

// The same for N threads with a chunk each: stores the chunks' bests in desk.heads and sets the row's best.
// After a barrier, total_of() returns the sum of weights.
template <u32 N> inline void weigh_all(Row& row, Desk& desk, const Chunk* chunks, Chunk mine) {
    u32 c = threadIdx.x, warp = c / 32, lane = c % 32;
    u32 most = 0;
    for (u32 i = c; i < row.n_chunks; i += N) {
        u64 best = i == c ? mine.best : chunks[i].best;
        desk.heads[i] = best;
        most = max(most, (u32)(best >> ID_BITS));
    }
    most = __reduce_max_sync(ALL_LANES, most);
    if (lane == 0) desk.warps[warp] = most;
    __syncthreads();
    row.top = from_ordered(__reduce_max_sync(ALL_LANES, lane < N / 32 ? desk.warps[lane] : 0));
    double sum = 0.0;
    for (u32 i = c; i < row.n_chunks; i += N) {
        if (i > c) mine = chunks[i];
        sum += mine.relative_to(row.top);
    }
    if (warp * 32 < row.n_chunks) {
        sum = warp_reduce(sum, Add());
        if (lane == 0) desk.sums[warp] = sum;
    }
}

template <u32 N> inline double total_of(const Row& row, const Desk& desk) {
    u32 n = min(N / 32, (row.n_chunks + 31) / 32);
    double total = 0.0;
#pragma unroll 1
    for (u32 first = 0; first < n; first += 4) {
        double sums[4];
#pragma unroll
        for (u32 i = 0; i < 4; i++) sums[i] = first + i < n ? desk.sums[first + i] : 0.0;
#pragma unroll
        for (u32 i = 0; i < 4; i++) total += sums[i];
    }
    return total;
}

// Calls f with each of n keys, the number of larger keys, the index of this lane among those that share the
// key, and their number. The first N threads divide the comparisons. AHEAD zeros follow the keys.
template <typename F> inline void place_all(u32 N, const u64* keys, u32 n, F f) {
    u32 shift = 4;
    while (shift > 0 && N >> shift < n) shift--;
    u32 share = 1u << shift, part = threadIdx.x & (share - 1);
    const Two* pairs = (const Two*)keys;
    for (u32 first = 0; first < n; first += N >> shift) {
        u32 mine = first + (threadIdx.x >> shift), larger = 0;
        u64 key = keys[mine < n ? mine : 0];
        // Eight keys at a time without a branch, so that their loads are in flight together.
        for (u32 i = part; 2 * i < n; i += 4 * share) {
            Two k[4];
#pragma unroll
            for (u32 j = 0; j < 4; j++) k[j] = pairs[i + j * share];
#pragma unroll
            for (u32 j = 0; j < 4; j++) larger += (u32)(k[j].a > key) + (u32)(k[j].b > key);
        }
        for (u32 step = 1; step < share; step *= 2) larger += __shfl_xor_sync(ALL_LANES, larger, step);
        if (mine < n) f(key, larger, part, share);
    }
}

// Appends those of R keys that are at least `least` to the list, as far as they fit; all of them are counted.
// The order does not matter: keys are unique, and the list is sorted later.
template <int R> inline void append(Desk& desk, const u64* keys, u64 least) {
    u32 n = 0;
#pragma unroll
    for (int r = 0; r < R; r++) n += keys[r] >= least;
    if (n == 0) return;
    u32 at = atomicAdd(&desk.n_list, n);
#pragma unroll
    for (int r = 0; r < R; r++) {
        if (keys[r] < least) continue;
        if (at < LIST) desk.list[at] = keys[r];
        at++;
    }
}

// Stores zeros after the keys of a list. The caller synchronises.
inline void end_list(u64* keys, u32 n) {
    if (threadIdx.x < AHEAD) keys[n + threadIdx.x] = 0;
}

// Sorts the list and computes the weights of its first `most` keys. All threads call this, after a barrier
// that follows the last append() and end_list(); N of them do the work.
template <u32 N> inline void sort_list(const Row& row, Desk& desk, u32 n, u32 most) {
    if (threadIdx.x < N) {
        place_all(N, desk.list, n, [&](u64 key, u32 place, u32 part, u32 share) {
            if (place >= most) return;
            if (part == 0) desk.sorted[place] = key;
            // Where two lanes share a key, each computes one weight.
            for (u32 which = part; which < 2; which += share) {
                double w = weight(key_logit(key), row.top, which == 0 ? 1.0 : row.coldness);
                (which == 0 ? desk.weights : desk.tempered)[place] = w;
            }
        });
    }
    __syncthreads();
}

// The first 32 R entries of the sorted list as held by the first warp: R consecutive entries per lane.
template <int R> struct Listed {
    inline u32 place(int r) const { return threadIdx.x % 32 * R + r; }

    inline void take(double* v, const double* weights, u32 n) const {
#pragma unroll
        for (int r = 0; r < R; r++) v[r] = place(r) < n ? weights[place(r)] : 0.0;
    }

    // Computes running sums, starting at an offset.
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

    // Returns the first of n entries for which the condition holds, else n.
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

// Returns the index of the choice among the n best of the sorted list, which include everything that the
// filters can keep. For the first warp.
template <int R> inline u32 choose_listed(const Row& row, const Desk& desk, u32 n, double uniform) {
    Listed<R> listed;
    double sums[R], tempered[R];
    listed.take(sums, desk.weights, n);
    listed.take(tempered, desk.tempered, n);
    listed.sum_up(sums, 0.0);
    // Computed here because two scans together take the time of one.
    listed.sum_up(tempered, 0.0);

    u32 keep = n;
    double candidates = row.total;
    if (row.top_k > 0) {
        keep = min(row.top_k, n);
        candidates = listed.at(sums, keep - 1);
    }
    if (!(row.top_p >= 1.0f)) {
        double wanted = (double)row.top_p * candidates;
        u32 reached = listed.first(keep, [&](int r) { return sums[r] >= wanted; });
        if (reached < keep) keep = reached + 1;
    }
    if (row.min_p > 0.0f) {
        u32 below = listed.first(keep, [&](int r) { return !(desk.weights[listed.place(r)] >= (double)row.min_p); });
        keep = max(below, 1u);
    }
    double target = uniform * listed.at(tempered, keep - 1);
    u32 chosen = listed.first(keep, [&](int r) { return tempered[r] > target; });
    // Rounding can leave the target slightly above the last sum; the last candidate is then the choice.
    return chosen < keep ? chosen : keep - 1;
}

// Returns the n-th best of the heads, or desk.key if there are fewer. All threads call this, after a barrier
// that follows the keys; the first N do the work.
template <u32 N> inline u64 nth_head(Desk& desk, const u64* heads, u32 n_heads, u32 n) {
    if (threadIdx.x < N) {
        place_all(N, heads, n_heads, [&](u64 key, u32 place, u32 part, u32) {
            // Only empty entries are equal.
            if (part == 0 && place == n - 1 && key != 0) desk.key = key;
        });
    }
    __syncthreads();
    return desk.key;
}
