// sample_cut.cuh: where the filters cut, when that is behind the short list of sample.cu.
#pragma once
#include "sample_list.cuh"

// How much of something the best n keys of a chunk hold.
struct Measure {
    const double* sums;  // running sums in every chunk, or null: keys are counted
    double temperature;

    inline double of(const Desk& desk, u32 chunk, u32 n) const {
        if (sums == nullptr) return (double)n;
        return n == 0 ? 0.0 : desk.factor[chunk] * sums[(u64)chunk * CHUNK + n - 1];
    }

    // Makes the sums of all chunks relative to the row's best.
    inline void prepare(const Row& row, Desk& desk) const {
        for (u32 c = threadIdx.x; c < row.n_chunks && sums != nullptr; c += blockDim.x) {
            float chunk_top = key_logit(desk.heads[c]);
            desk.factor[c] = chunk_top == -inf_f32() ? 0.0 : weight(chunk_top, row.top, temperature);
        }
        __syncthreads();
    }

    template <typename F> inline double all(const Row& row, const Desk& desk, F n_of) const {
        u32 c = threadIdx.x;
        return block_reduce(c < row.n_chunks ? of(desk, c, n_of(c)) : 0.0, Add(), 0.0);
    }
};

// The keys that a round of narrowing asks about, from the largest down.
struct Pivots {
    bool by_logit;
    float top, distance;
    u64 largest, step;

    inline u64 at(u32 i) const {
        if (by_logit) return (u64)ordered(top - distance * (float)(i + 1)) << ID_BITS;
        return largest - step * (i + 1);
    }
};

// How much lies at or above each of 32 keys: a lane asks for one of them, a warp in four chunks at a time.
inline double above(const Row& row, Desk& desk, const Measure& measure, const Pivots& pivots) {
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u64 key = pivots.at(lane);
    double sum = 0.0;
    for (u32 first = 4 * warp; first < row.n_chunks; first += 128) {
        u32 low[4], high[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            bool there = first + i < row.n_chunks;
            low[i] = there ? desk.low[first + i] : 0;
            high[i] = there ? desk.high[first + i] : 0;
        }
        while (low[0] < high[0] || low[1] < high[1] || low[2] < high[2] || low[3] < high[3]) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                if (low[i] >= high[i]) continue;
                u32 middle = (low[i] + high[i]) / 2;
                if (row.keys[(u64)(first + i) * CHUNK + middle] >= key) {
                    low[i] = middle + 1;
                } else {
                    high[i] = middle;
                }
            }
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (first + i < row.n_chunks) sum += measure.of(desk, first + i, low[i]);
        }
    }
    desk.partial[warp][lane] = sum;
    __syncthreads();
    sum = warp_reduce(desk.partial[lane][warp], Add());
    if (lane == 0) desk.above[warp] = sum;
    __syncthreads();
    return desk.above[lane];
}

inline bool reached(double sum, double target, bool beyond) { return beyond ? sum > target : sum >= target; }

// One round: leaves between low and high only what lies between two neighbouring pivots.
inline void narrow(const Row& row, Desk& desk, const Measure& measure, const Pivots& pivots, double target,
                   bool beyond) {
    u32 enough = __ballot_sync(ALL_LANES, reached(above(row, desk, measure, pivots), target, beyond));
    u32 first = enough == 0 ? 32 : __ffs(enough) - 1;
    for (u32 c = threadIdx.x; c < row.n_chunks; c += blockDim.x) {
        const u64* keys = row.keys + (u64)c * CHUNK;
        u32 low = desk.low[c], high = desk.high[c];
        if (first < 32) high = rank(keys, pivots.at(first), low, high);
        if (first > 0) low = rank(keys, pivots.at(first - 1), low, high);
        desk.low[c] = (u16)low;
        desk.high[c] = (u16)high;
    }
    __syncthreads();
}

inline u32 n_between(const Row& row, const Desk& desk) {
    u32 c = threadIdx.x;
    return block_reduce(c < row.n_chunks ? (u32)desk.high[c] - desk.low[c] : 0, Add(), 0u);
}

// The last key of the shortest run of candidates that reaches the target, or 0 when all of them do not. Afterwards
// only that run is kept. All threads call it with the same arguments.
inline u64 cut(const Row& row, Desk& desk, const Measure& measure, double target, bool beyond) {
    u32 c = threadIdx.x;
    if (c == 0) desk.n_list = 0;
    measure.prepare(row, desk);
    if (!reached(measure.all(row, desk, [&](u32 i) { return desk.kept[i]; }), target, beyond)) return 0;
    if (c < row.n_chunks) {
        desk.low[c] = 0;
        desk.high[c] = desk.kept[c];
    }
    __syncthreads();
    Pivots pivots = {true, row.top, (float)(0.5 * measure.temperature), 0, 0};
    for (u32 n = n_between(row, desk); n > LIST; n = n_between(row, desk)) {
        if (!pivots.by_logit) {
            bool any = c < row.n_chunks && desk.low[c] < desk.high[c];
            const u64* keys = row.keys + (u64)c * CHUNK;
            u64 largest = block_reduce(any ? keys[desk.low[c]] : 0, Larger(), (u64)0);
            u64 least = block_reduce(any ? keys[desk.high[c] - 1] : ~(u64)0, Smaller(), ~(u64)0);
            // The keys are unique and more than fit, so a step is never 0.
            pivots.largest = largest;
            pivots.step = (largest - least) / 32;
        }
        narrow(row, desk, measure, pivots, target, beyond);
        pivots.by_logit = false;
    }

    double before = measure.all(row, desk, [&](u32 i) { return desk.low[i]; });
    list_between(row, desk);
    __syncthreads();
    u32 n = desk.n_list;
    sort_list(row, desk, n);
    if (c < 32) {
        Listed<8> listed;
        double sums[8];
        if (measure.sums == nullptr) {
#pragma unroll
            for (int r = 0; r < 8; r++) sums[r] = listed.place(r) < n ? 1.0 : 0.0;
        } else {
            listed.take(sums, measure.sums == row.tempered ? desk.tempered : desk.weights, n);
        }
        listed.sum_up(sums, before);
        u32 last = listed.first(n, [&](int r) { return reached(sums[r], target, beyond); });
        // The sums over chunks said that it is reached; these are rounded otherwise.
        if (c == 0) desk.key = desk.sorted[last < n ? last : n - 1];
    }
    __syncthreads();
    u64 key = desk.key;
    if (c < row.n_chunks) desk.kept[c] = (u16)rank(row.keys + (u64)c * CHUNK, key, desk.low[c], desk.high[c]);
    __syncthreads();
    return key;
}

// The choice when the filters do not cut inside the short list of n.
inline u64 choose_among_all(const Row& row, Desk& desk, u32 n) {
    u32 c = threadIdx.x;
    if (c < row.n_chunks) desk.kept[c] = (u16)Deal{c, row.n_chunks}.n_tokens(row.vocab);
    __syncthreads();
    Measure count = {nullptr, 1.0}, plain = {row.weights, 1.0}, tempered = {row.tempered, row.temperature};
    // Cuts make lists of their own.
    if (c < n) desk.best[c] = desk.sorted[c], desk.best_tempered[c] = desk.tempered[c];
    __syncthreads();

    double candidates = row.total;
    if (row.top_k > 0) {
        if (row.top_k < row.vocab) {
            cut(row, desk, count, (double)row.top_k, false);
        }
        plain.prepare(row, desk);
        candidates = plain.all(row, desk, [&](u32 i) { return desk.kept[i]; });
    }
    if (!(row.top_p >= 1.0f)) cut(row, desk, plain, (double)row.top_p * candidates, false);
    if (row.min_p > 0.0f) {
        u32 low = 0, high = c < row.n_chunks ? desk.kept[c] : 0;
        while (low < high) {
            u32 middle = (low + high) / 2;
            if (weight(key_logit(row.keys[(u64)c * CHUNK + middle]), row.top, 1.0) >= (double)row.min_p) {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        bool any = __syncthreads_or(low > 0);
        // One is always kept.
        u64 head = c < row.n_chunks ? desk.heads[c] : 0;
        u64 best = block_reduce(head, Larger(), (u64)0);
        if (!any) low = head == best ? 1 : 0;
        if (c < row.n_chunks) desk.kept[c] = (u16)low;
        __syncthreads();
    }

    tempered.prepare(row, desk);
    double target = row.uniform() * tempered.all(row, desk, [&](u32 i) { return desk.kept[i]; });
    // Most choices are among the best.
    if (c < 32) {
        Listed<8> listed;
        double sums[8];
        listed.take(sums, desk.best_tempered, n);
        listed.sum_up(sums, 0.0);
        u32 chosen = listed.first(n, [&](int r) { return sums[r] > target; });
        if (c == 0) {
            desk.found = chosen < n;
            desk.key = chosen < n ? desk.best[chosen] : 0;
        }
    }
    __syncthreads();
    if (desk.found) return desk.key;
    __syncthreads();
    // Rounding can leave the target a hair above the last sum: then the last candidate is it.
    u32 kept = c < row.n_chunks ? desk.kept[c] : 0;
    u64 last = block_reduce(kept > 0 ? row.keys[(u64)c * CHUNK + kept - 1] : ~(u64)0, Smaller(), ~(u64)0);
    u64 chosen = cut(row, desk, tempered, target, true);
    return chosen < last ? last : chosen;
}
