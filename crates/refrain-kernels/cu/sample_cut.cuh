// sample_cut.cuh: where the filters cut, when that is behind the short list of sample.cu.
#pragma once
#include "sample_list.cuh"

// How much of something the best n keys of a chunk hold.
struct Measure {
    const double* sums;  // running sums in every chunk, or null: keys are counted
    const double* bins;  // the same at the end of every bin
    double temperature;

    // Loads come without branches here, so that those of several chunks are under way together.
    inline double of(const Desk& desk, u32 chunk, u32 n) const {
        if (sums == nullptr) return (double)n;
        double sum = sums[(u64)chunk * CHUNK + (n > 0 ? n - 1 : 0)];
        return n > 0 ? desk.factor[chunk] * sum : 0.0;
    }

    // Of the first bins, counted from the row's best, up to this one.
    inline double of_bins(const Row& row, const Desk& desk, u32 chunk, u32 bin) const {
        u32 behind = desk.behind[chunk], i = chunk * BINS + (bin >= behind ? bin - behind : 0);
        double sum = sums == nullptr ? (double)row.bins.counts[i] : desk.factor[chunk] * bins[i];
        return bin >= behind ? sum : 0.0;
    }

    // Makes the sums of all chunks relative to the row's best.
    inline void prepare(const Row& row, Desk& desk) const {
        for (u32 c = threadIdx.x; c < row.n_chunks && sums != nullptr; c += blockDim.x) {
            float chunk_top = key_logit(desk.heads[c]);
            desk.factor[c] = chunk_top == -inf_f32() ? 0.0 : weight(chunk_top, row.top, temperature);
        }
        __syncthreads();
    }

    // Of all candidates. One warp adds up: there are few chunks.
    inline double of_kept(const Row& row, Desk& desk) const {
        if (threadIdx.x < 32) {
            double sum = 0.0;
            for (u32 first = threadIdx.x; first < row.n_chunks; first += 128) {
                double part[4];
#pragma unroll
                for (u32 i = 0; i < 4; i++) {
                    u32 c = min(first + 32 * i, row.n_chunks - 1);
                    part[i] = of(desk, c, desk.kept[c]);
                }
#pragma unroll
                for (u32 i = 0; i < 4; i++) sum += first + 32 * i < row.n_chunks ? part[i] : 0.0;
            }
            sum = warp_reduce(sum, Add());
            if (threadIdx.x == 0) desk.total = sum;
        }
        __syncthreads();
        return desk.total;
    }
};

inline bool reached(double sum, double target, bool beyond) { return beyond ? sum > target : sum >= target; }

// Leaves between low and high only what lies in the bin where the target is reached, or behind all bins. Returns how
// much lies before.
inline double narrow_to_bin(const Row& row, Desk& desk, const Measure& measure, double target, bool beyond) {
    const u32 N_PARTS = 1024 / BINS;
    u32 c = threadIdx.x, bin = c % BINS, lane = c % 32;
    double sum = 0.0;
    for (u32 first = c / BINS; first < row.n_chunks; first += 8 * N_PARTS) {
        double part[8];
#pragma unroll
        for (u32 i = 0; i < 8; i++) {
            part[i] = measure.of_bins(row, desk, min(first + i * N_PARTS, row.n_chunks - 1), bin);
        }
#pragma unroll
        for (u32 i = 0; i < 8; i++) sum += first + i * N_PARTS < row.n_chunks ? part[i] : 0.0;
    }
    double* partial = &desk.partial[0][0];
    partial[c] = sum;
    __syncthreads();
    if (c < BINS) {
        sum = 0.0;
#pragma unroll
        for (u32 i = 0; i < N_PARTS; i++) sum += partial[i * BINS + c];
        desk.above[c] = sum;
    }
    __syncthreads();
    u32 first = __ballot_sync(ALL_LANES, reached(desk.above[lane], target, beyond));
    u32 second = __ballot_sync(ALL_LANES, reached(desk.above[32 + lane], target, beyond));
    bin = first != 0 ? __ffs(first) - 1 : second != 0 ? 31 + __ffs(second) : BINS;
    if (c < row.n_chunks) {
        u32 behind = desk.behind[c], kept = desk.kept[c];
        const u32* counts = row.bins.counts + c * BINS;
        u32 low = bin > behind ? counts[bin - 1 - behind] : 0;
        u32 high = bin == BINS ? kept : bin < behind ? 0 : counts[bin - behind];
        desk.low[c] = (u16)min(low, kept);
        desk.high[c] = (u16)min(high, kept);
    }
    return bin > 0 ? desk.above[bin - 1] : 0.0;
}

// The keys that a round of narrowing asks about, from the largest down.
struct Pivots {
    u64 largest, step;

    inline u64 at(u32 i) const { return largest - step * (i + 1); }
};

// Keys at equal distances over what lies between low and high. One warp looks: there are few chunks.
inline Pivots pivots_between(const Row& row, Desk& desk, const u64* keys) {
    if (threadIdx.x < 32) {
        u64 largest = 0, least = ~(u64)0;
        for (u32 c = threadIdx.x; c < row.n_chunks; c += 32) {
            if (desk.low[c] >= desk.high[c]) continue;
            largest = Larger()(largest, keys[desk.at[c] + (i32)desk.low[c]]);
            least = Smaller()(least, keys[desk.at[c] + (i32)desk.high[c] - 1]);
        }
        largest = warp_reduce(largest, Larger());
        least = warp_reduce(least, Smaller());
        if (threadIdx.x == 0) desk.ends = Two{largest, least};
    }
    __syncthreads();
    // The keys are unique and more than 32, so a step is never 0.
    return Pivots{desk.ends.a, (desk.ends.a - desk.ends.b) / 32};
}

// How much lies at or above each of 32 keys: a lane asks for one of them, a warp in four chunks at a time.
inline double above(const Row& row, Desk& desk, const u64* keys, const Measure& measure, const Pivots& pivots) {
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u64 key = pivots.at(lane);
    double sum = 0.0;
    for (u32 first = 4 * warp; first < row.n_chunks; first += 128) {
        u32 low[4], high[4];
        const u64* at[4];
        double part[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 chunk = min(first + i, row.n_chunks - 1);
            at[i] = keys + desk.at[chunk];
            low[i] = desk.low[chunk];
            high[i] = desk.high[chunk];
        }
        while (low[0] < high[0] || low[1] < high[1] || low[2] < high[2] || low[3] < high[3]) {
            u64 k[4];
            // Four loads at once. A search that has ended looks at its end or one behind: there is always something.
#pragma unroll
            for (int i = 0; i < 4; i++) k[i] = at[i][(low[i] + high[i]) / 2];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                u32 middle = (low[i] + high[i]) / 2;
                bool open = low[i] < high[i], larger = k[i] >= key;
                low[i] = open && larger ? middle + 1 : low[i];
                high[i] = open && !larger ? middle : high[i];
            }
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            part[i] = measure.of(desk, min(first + i, row.n_chunks - 1), low[i]);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) sum += first + i < row.n_chunks ? part[i] : 0.0;
    }
    desk.partial[warp][lane] = sum;
    __syncthreads();
    sum = warp_reduce(desk.partial[lane][warp], Add());
    if (lane == 0) desk.above[warp] = sum;
    __syncthreads();
    return desk.above[lane];
}

// One round: leaves between low and high only what lies between two neighbouring pivots. Returns how much lies before,
// which is what did so far when the first pivot has reached the target.
inline double narrow(const Row& row, Desk& desk, const u64* keys, const Measure& measure, const Pivots& pivots,
                     double target, bool beyond, double before) {
    u32 enough = __ballot_sync(ALL_LANES, reached(above(row, desk, keys, measure, pivots), target, beyond));
    u32 first = enough == 0 ? 32 : __ffs(enough) - 1;
    u32 c = threadIdx.x;
    if (c < row.n_chunks) {
        const u64* mine = keys + desk.at[c];
        u32 low = desk.low[c], high = desk.high[c];
        if (first < 32) high = rank(mine, pivots.at(first), low, high);
        if (first > 0) low = rank(mine, pivots.at(first - 1), low, high);
        desk.low[c] = (u16)low;
        desk.high[c] = (u16)high;
    }
    return first > 0 ? desk.above[first - 1] : before;
}

// How many keys lie between low and high, and where each chunk's go when they are put side by side. All threads call
// it; a chunk's low and high are those that its thread has written.
inline u32 lay_out(const Row& row, Desk& desk) {
    u32 c = threadIdx.x, warp = c / 32, lane = c % 32;
    u32 n = c < row.n_chunks ? (u32)desk.high[c] - desk.low[c] : 0, sum = n;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        u32 before = __shfl_up_sync(ALL_LANES, sum, step);
        if (lane >= step) sum += before;
    }
    if (lane == 31) desk.warps[warp] = sum;
    __syncthreads();
    u32 all = desk.warps[lane];
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        u32 before = __shfl_up_sync(ALL_LANES, all, step);
        if (lane >= step) all += before;
    }
    u32 from = __shfl_sync(ALL_LANES, all, (warp + 31) % 32);
    if (warp == 0) from = 0;
    if (c < row.n_chunks) desk.to[c] = (u16)(from + sum - n);
    u32 total = __shfl_sync(ALL_LANES, all, 31);
    __syncthreads();
    return total;
}

// Puts the keys between low and high side by side, as laid out.
inline void gather(const Row& row, Desk& desk, u64* to, const u64* keys) {
    u32 c = threadIdx.x, warp = c / 32, lane = c % 32;
    for (u32 first = 4 * warp; first < row.n_chunks; first += 128) {
        u64 k[4];
        u32 n[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 chunk = first + i;
            n[i] = chunk < row.n_chunks ? (u32)desk.high[chunk] - desk.low[chunk] : 0;
            k[i] = lane < n[i] ? keys[desk.at[chunk] + (i32)(desk.low[chunk] + lane)] : 0;
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 chunk = first + i;
            if (lane < n[i]) to[desk.to[chunk] + lane] = k[i];
            for (u32 j = 32 + lane; j < n[i]; j += 32) {
                to[desk.to[chunk] + j] = keys[desk.at[chunk] + (i32)(desk.low[chunk] + j)];
            }
        }
    }
    __syncthreads();
    if (c < row.n_chunks) desk.at[c] = (i32)desk.to[c] - (i32)desk.low[c];
    __syncthreads();
}

// The last key of the shortest run of candidates that reaches the target, which all of them together do. Afterwards
// only that run is kept. All threads call it with the same arguments.
inline u64 cut(const Row& row, Desk& desk, const Measure& measure, double target, bool beyond) {
    u32 c = threadIdx.x, n = 0;
    const u64* keys = row.keys;
    double before = 0.0;
    if (c < row.n_chunks) desk.at[c] = (i32)(c * CHUNK);
    // Bins are exact for numbers of a usual size.
    if (row.top >= -MOST_BINNED && row.top <= MOST_BINNED) {
        before = narrow_to_bin(row, desk, measure, target, beyond);
        n = lay_out(row, desk);
    }
    if (n == 0) {
        // No bins; or sums that are rounded otherwise than the target's left the bin empty.
        if (c < row.n_chunks) desk.low[c] = 0, desk.high[c] = desk.kept[c];
        before = 0.0;
        n = lay_out(row, desk);
    }
    while (n > LIST) {
        if (n <= WINDOW && keys == row.keys) {
            gather(row, desk, desk.window, keys);
            keys = desk.window;
        }
        Pivots pivots = pivots_between(row, desk, keys);
        before = narrow(row, desk, keys, measure, pivots, target, beyond, before);
        n = lay_out(row, desk);
    }
    gather(row, desk, desk.list, keys);

    sort_list<1024>(row, desk, n, LIST);
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
        if (c == 0) desk.key = desk.sorted[last < n ? last : max(n, 1u) - 1];
    }
    __syncthreads();
    u64 key = desk.key;
    if (c < row.n_chunks) desk.kept[c] = (u16)rank(desk.list + desk.at[c], key, desk.low[c], desk.high[c]);
    __syncthreads();
    return key;
}

// Keeps what min-p lets pass, and at least the best.
inline void keep_min_p(const Row& row, Desk& desk) {
    u32 c = threadIdx.x, low = 0, high = c < row.n_chunks ? desk.kept[c] : 0;
    while (low < high) {
        u32 middle = (low + high) / 2;
        if (weight(key_logit(row.keys[(u64)c * CHUNK + middle]), row.top, 1.0) >= (double)row.min_p) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    bool any = __syncthreads_or(low > 0);
    u64 head = c < row.n_chunks ? desk.heads[c] : 0;
    u64 best = block_reduce(head, Larger(), (u64)0);
    if (!any) low = head == best ? 1 : 0;
    if (c < row.n_chunks) desk.kept[c] = (u16)low;
    __syncthreads();
}

// The place of the target among the n best, kept from the first list, or n. For the first warp.
inline u32 place_in_best(const Desk& desk, u32 n, double target) {
    Listed<8> listed;
    double sums[8];
    listed.take(sums, desk.best_tempered, n);
    listed.sum_up(sums, 0.0);
    return listed.first(n, [&](int r) { return sums[r] > target; });
}

// The choice when the filters do not cut inside the short list of n.
inline u64 choose_among_all(const Row& row, Desk& desk, u32 n) {
    u32 c = threadIdx.x;
    if (c < row.n_chunks) {
        desk.kept[c] = (u16)Deal{c, row.n_chunks}.n_tokens(row.vocab);
        desk.behind[c] = (u8)bins_below(key_logit(desk.heads[c]), row.top, bins_per_unit((float)row.temperature));
    }
    // Cuts make lists of their own.
    if (c < n) desk.best[c] = desk.sorted[c], desk.best_tempered[c] = desk.tempered[c];
    __syncthreads();

    double candidates = row.total;
    u64 last = 0;
    // Top-k, top-p, and the choice itself are the same search for different things. In a loop: its code is there once.
#pragma unroll 1
    for (u32 stage = 0; stage < 3; stage++) {
        bool cuts = stage == 0 ? row.top_k > 0 && row.top_k < row.vocab : stage == 1 ? row.top_p < 1.0f : true;
        bool plain = stage == 1;
        Measure measure = {stage == 0 ? nullptr : plain ? row.weights : row.tempered,
                           plain ? row.bins.weights : row.bins.tempered, stage == 2 ? row.temperature : 1.0};
        double target = (double)row.top_k;
        if (!cuts) continue;
        if (stage > 0) measure.prepare(row, desk);
        if (stage == 1) {
            if (row.top_k > 0) candidates = measure.of_kept(row, desk);
            target = (double)row.top_p * candidates;
        }
        if (stage == 2) {
            if (row.min_p > 0.0f) keep_min_p(row, desk);
            target = desk.uniform * measure.of_kept(row, desk);
            // Most choices are among the best.
            if (c < 32) {
                u32 place = place_in_best(desk, n, target);
                if (c == 0) {
                    desk.found = place < n;
                    desk.key = place < n ? desk.best[place] : 0;
                }
            }
            __syncthreads();
            if (desk.found) return desk.key;
            u32 kept = c < row.n_chunks ? desk.kept[c] : 0;
            last = block_reduce(kept > 0 ? row.keys[(u64)c * CHUNK + kept - 1] : ~(u64)0, Smaller(), ~(u64)0);
        }
        u64 key = cut(row, desk, measure, target, stage == 2);
        // Rounding can leave the target a hair above the last sum: then the last candidate is it.
        if (stage == 2) return key < last ? last : key;
    }
    return last;
}
