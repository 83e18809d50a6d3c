// sample_cut.cuh: where the filters cut, over sorted chunks, for one block of 1024 threads of sample.cu.
//
// A search has three steps. Sums over bins say in which bin a target is reached. While that bin has more keys than a list, a
// round asks how much lies above each of eight of them, most of which are close to where the target should be. The list that is
// left is sorted and summed. What each step costs is the number of its instructions times that of the warps that go through
// them, so that where chunks are looked at one by one only as many threads as there are chunks do it.
#pragma once
#include "sample_list.cuh"

// Threads that look at the same bin.
const u32 BIN_PARTS = 1024 / BINS;

// What a thread sees of the bins: the same place in every 16th chunk, the first eight of which are asked for early.
template <typename T> struct Share {
    T first[8];

    inline void ask(const Row& row, const T* bins, u32 from) {
#pragma unroll
        for (u32 i = 0; i < 8; i++) {
            first[i] = bins[min(from + i * BIN_PARTS, row.n_chunks - 1) * BINS + threadIdx.x % BINS];
        }
    }

    inline Share(const Row& row, const T* bins) { ask(row, bins, threadIdx.x / BINS); }

    // Leaves the sum of what chunks hold, times their factors, among the parts of its kind.
    inline void add(const Row& row, Desk& desk, const T* bins, const double* factor, u32 kind) {
        i32 top = bin_of(row.top, row.per_unit), bin = top - (i32)((u32)(top - (i32)threadIdx.x) % BINS);
        double sum = 0.0;
        for (u32 from = threadIdx.x / BINS; from < row.n_chunks; from += 8 * BIN_PARTS) {
            if (from >= 8 * BIN_PARTS) ask(row, bins, from);
#pragma unroll
            for (u32 i = 0; i < 8; i++) {
                u32 chunk = from + i * BIN_PARTS, c = min(chunk, row.n_chunks - 1);
                double part = factor == nullptr ? (double)first[i] : factor[c] * (double)first[i];
                sum += chunk < row.n_chunks && bin <= desk.bins[c] ? part : 0.0;
            }
        }
        ((double*)desk.window)[kind * 1024 + threadIdx.x] = sum;
    }
};

// Puts the parts of some kinds together. After a barrier behind them, and with one to come.
inline void sum_bins(const Row& row, Desk& desk, u32 first_kind, u32 n_kinds) {
    if (threadIdx.x >= n_kinds * BINS) return;
    u32 kind = first_kind + threadIdx.x / BINS, place = threadIdx.x % BINS;
    const double* parts = (const double*)desk.window + kind * 1024 + place;
    double sum = 0.0;
#pragma unroll
    for (u32 i = 0; i < BIN_PARTS; i++) sum += parts[i * BINS];
    desk.bin_sums[kind][(u32)(bin_of(row.top, row.per_unit) - (i32)place) % BINS] = sum;
}

// The first bin, from the row's best, where the target is reached; BINS when it is behind them.
inline u32 find_bin(const double* sums, double target, bool beyond) {
    u32 lane = threadIdx.x % 32;
    u32 first = __ballot_sync(ALL_LANES, reached(sums[lane], target, beyond));
    u32 second = __ballot_sync(ALL_LANES, reached(sums[32 + lane], target, beyond));
    return first != 0 ? __ffs(first) - 1 : second != 0 ? 31 + __ffs(second) : BINS;
}

// How many keys of a chunk lie in the first bins, from the row's best to this one.
inline u32 count_down_to(const Row& row, const Desk& desk, u32 chunk, u32 bin) {
    i32 number = bin_of(row.top, row.per_unit) - (i32)bin;
    return number <= desk.bins[chunk] ? row.bins.counts[chunk * BINS + (u32)number % BINS] : 0;
}

// A bin, from the row's best, below which min-p lets nothing pass, while the fourth above it passes whole; BINS or more
// when it is behind them.
inline u32 min_p_bin(const Row& row) {
    float below = -logf(row.min_p) * row.per_unit;
    // Places are counted from the upper edge of the best's bin, and one more allows for rounding.
    return below < (float)BINS ? (u32)fmaxf(below, 0.0f) + 2 : BINS;
}

// How much of something the best n keys of a chunk hold, relative to the row's best.
struct Measure {
    const double* sums;    // running sums in every chunk, or null: keys are counted
    const double* factor;  // of the chunks
    const double* bins;    // the sums of all chunks down to each bin

    // Loads come without branches, so that several are under way together.
    inline double of(u32 chunk, u32 n) const {
        if (sums == nullptr) return (double)n;
        double sum = sums[(u64)chunk * CHUNK + (n > 0 ? n - 1 : 0)];
        return n > 0 ? factor[chunk] * sum : 0.0;
    }

    // Of all candidates. All threads call it; a chunk's `kept` is what its thread has written.
    inline double of_kept(const Row& row, Desk& desk) const {
        u32 c = threadIdx.x;
        if (c / 32 * 32 < row.n_chunks) {
            double sum = warp_reduce(c < row.n_chunks ? of(c, desk.kept[c]) : 0.0, Add());
            if (c % 32 == 0) desk.sums[c / 32] = sum;
        }
        __syncthreads();
        return total_of<1024>(row, desk);
    }
};

// How many keys of a chunk lie between low and high, every 2^shift-th of them.
inline u32 n_between(const Desk& desk, u32 chunk, u32 shift) {
    return ((u32)desk.high[chunk] - desk.low[chunk] + (1u << shift) - 1) >> shift;
}

// How many those of all chunks are, and where each chunk's go when they are put side by side. All threads call it; a
// chunk's low and high are those that its thread has written.
inline u32 lay_out(const Row& row, Desk& desk, u32 shift) {
    u32 c = threadIdx.x, warp = c / 32, lane = c % 32, sum = 0, n = 0;
    if (warp * 32 < row.n_chunks) {
        n = c < row.n_chunks ? n_between(desk, c, shift) : 0;
        sum = n;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            u32 before = __shfl_up_sync(ALL_LANES, sum, step);
            if (lane >= step) sum += before;
        }
        if (lane == 31) desk.warps[warp] = sum;
    }
    __syncthreads();
    u32 total = 0, from = 0;
    for (u32 i = 0; i * 32 < row.n_chunks; i++) {
        if (i == warp) from = total;
        total += desk.warps[i];
    }
    if (c < row.n_chunks) desk.to[c] = (u16)(from + sum - n);
    __syncthreads();
    return total;
}

// Puts the keys between low and high on the list, as laid out, from the window or from where they are.
inline void fetch_list(const Row& row, Desk& desk, u32 n, bool from_window) {
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    end_list(desk.list, n);
    // Eight lanes to a chunk: most have few keys here.
    for (u32 first = 4 * warp; first < row.n_chunks; first += 128) {
        u32 c = first + lane / 8;
        if (c >= row.n_chunks) continue;
        u32 low = desk.low[c], high = desk.high[c];
        for (u32 i = low + lane % 8; i < high; i += 8) {
            desk.list[desk.to[c] + i - low] =
                from_window ? desk.window[desk.at[c] + (i32)i].key : row.keys[(u64)c * CHUNK + i];
        }
    }
    __syncthreads();
    if (threadIdx.x < row.n_chunks) desk.at[threadIdx.x] = (short)(desk.to[threadIdx.x] - desk.low[threadIdx.x]);
}

// The largest and the least key of some. For whole warps, up to the last that has a chunk; with a barrier to come.
inline void note_ends(Desk& desk, u64 largest, u64 least) {
    largest = warp_largest(largest);
    least = ~warp_largest(~least);
    if (threadIdx.x % 32 == 0) desk.ends[threadIdx.x / 32] = Two{largest, least};
}

// Puts every 2^shift-th of the keys between low and high into the window, as laid out. Before each chunk's first one there
// is one that is never below a pivot, with what the chunk holds before. Sums are only there with all keys.
inline void fetch_window(const Row& row, Desk& desk, const Measure& measure, u32 shift) {
    u32 c = threadIdx.x, warp = c / 32, lane = c % 32;
    Two ends = {0, ~(u64)0};
    if (c < row.n_chunks && desk.low[c] < desk.high[c]) {
        const u64* keys = row.keys + (u64)c * CHUNK;
        ends = Two{keys[desk.low[c]], keys[desk.high[c] - 1]};
    }
    for (u32 first = 4 * warp; first < row.n_chunks; first += 128) {
        Entry entry[4];
        u32 n[4];
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            u32 chunk = min(first + i, row.n_chunks - 1), at = desk.low[chunk];
            n[i] = first + i < row.n_chunks ? n_between(desk, chunk, shift) + 1 : 0;
            u32 mine = min(lane > 0 ? at + ((lane - 1) << shift) : at, CHUNK - 1);
            entry[i].key = row.keys[(u64)chunk * CHUNK + mine];
            entry[i].sum = shift > 0 ? 0.0 : measure.of(chunk, lane > 0 ? mine + 1 : at);
            if (lane == 0) entry[i].key = ~(u64)0;
        }
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            u32 chunk = first + i;
            if (lane < n[i]) desk.window[desk.to[chunk] + chunk + lane] = entry[i];
            for (u32 j = 32 + lane; j < n[i]; j += 32) {
                u32 at = desk.low[chunk] + ((j - 1) << shift);
                double sum = shift > 0 ? 0.0 : measure.of(chunk, at + 1);
                desk.window[desk.to[chunk] + chunk + j] = Entry{row.keys[(u64)chunk * CHUNK + at], sum};
            }
        }
    }
    if (warp * 32 < row.n_chunks) note_ends(desk, ends.a, ends.b);
    if (c < row.n_chunks) desk.at[c] = (short)(desk.to[c] + c + 1 - desk.low[c]);
    __syncthreads();
}

// What is known of a target among the keys between low and high.
struct Bracket {
    double before, after;  // what lies before them, and together with them
    u32 n;                 // how many they are

    // Where the target should lie among them, from 0 to 1, or something else.
    inline float guess(double target) const { return (float)((target - before) / (after - before)); }
};

// Chooses pivots, from the largest down; the last is the least of the keys. Where the first warp would guess the target to
// be, they lie so close that what is between two of them makes a short list; away from there further and further apart. They
// are evenly spaced logits, or ids when all logits are equal. Without a guess they are spaced evenly.
inline void choose_pivots(const Row& row, Desk& desk, u32 n, float guess) {
    if (threadIdx.x < 32) {
        u32 lane = threadIdx.x, which = lane % N_PIVOTS;
        bool any = lane * 32 < row.n_chunks;
        u64 largest = warp_largest(any ? desk.ends[lane].a : 0), least = ~warp_largest(any ? ~desk.ends[lane].b : 0);
        float x = (float)(which + 1) / N_PIVOTS;
        if (guess >= 0.0f && guess <= 1.0f) {
            const u32 HALF = N_PIVOTS / 2;
            u32 steps = which < HALF ? which : N_PIVOTS - 1 - which;
            // From all of them down to about 32 keys on either side.
            float distance = exp2f(-log2f((float)n / 32.0f) * (float)steps / (float)(HALF - 1));
            x = fminf(fmaxf(which < HALF ? guess - distance : guess + distance, 0.0f), 1.0f);
        }
        float top = key_logit(largest), bottom = key_logit(least);
        u64 pivot;
        if (top > bottom && top <= 3e38f && bottom >= -3e38f) {
            pivot = (u64)ordered((float)((double)top - ((double)top - (double)bottom) * (double)x)) << ID_BITS;
        } else {
            pivot = largest - (u64)((double)(largest - least) * (double)x);
        }
        if (which == N_PIVOTS - 1) pivot = least;
        if (lane < N_PIVOTS) desk.pivots[lane] = pivot < least ? least : pivot > largest ? largest : pivot;
    }
    __syncthreads();
}

// How many keys of a chunk are at or above a pivot, and how much they hold.
inline u32 rank_of(const Row& row, const Desk& desk, const Measure& measure, u32 chunk, u64 pivot, u32 shift,
                   double& sum) {
    u32 from = desk.low[chunk], end = desk.high[chunk];
    const Entry* entries = desk.window + (desk.at[chunk] + (i32)from - 1);
    u32 low = 1, high = n_between(desk, chunk, shift) + 1;
    while (low < high) {
        u32 middle = (low + high) / 2;
        if (entries[middle].key >= pivot) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    if (shift == 0) {
        sum = entries[low - 1].sum;
        return from + low - 1;
    }
    // Behind the last entry that is at or above the pivot, and before the next.
    high = min(from + ((low - 1) << shift), end);
    low = low == 1 ? from : from + ((low - 2) << shift) + 1;
    low = rank(row.keys + (u64)chunk * CHUNK, pivot, low, high);
    sum = measure.of(chunk, low);
    return low;
}

// One round: leaves between low and high only what lies between two neighbouring pivots.
inline void narrow(const Row& row, Desk& desk, const Measure& measure, u32 shift, double target, bool beyond,
                   Bracket& bracket) {
    u32 c = threadIdx.x, warp = c / 32, lane = c % 32, which = c % N_PIVOTS;
    u64 pivot = desk.pivots[which];
    double sum = 0.0;
    for (u32 chunk = c / N_PIVOTS; chunk < row.n_chunks; chunk += 1024 / N_PIVOTS) {
        double part;
        desk.ranks[which][chunk] = (u16)rank_of(row, desk, measure, chunk, pivot, shift, part);
        sum += part;
    }
#pragma unroll
    for (u32 step = N_PIVOTS; step < 32; step *= 2) sum += __shfl_xor_sync(ALL_LANES, sum, step);
    if (lane < N_PIVOTS) desk.partial[warp][lane] = sum;
    __syncthreads();
    if (warp < N_PIVOTS) {
        sum = warp_reduce(desk.partial[lane][warp], Add());
        if (lane == 0) desk.above[warp] = sum;
    }
    __syncthreads();
    // Down to the least key there is all, however sums are rounded.
    bool all = pivot == desk.pivots[N_PIVOTS - 1];
    u32 first = __ffs(__ballot_sync(ALL_LANES, all || reached(desk.above[which], target, beyond))) - 1;
    if (c < row.n_chunks) {
        desk.high[c] = desk.ranks[first][c];
        if (first > 0) desk.low[c] = desk.ranks[first - 1][c];
    }
    bracket.after = desk.above[first];
    if (first > 0) bracket.before = desk.above[first - 1];
}

// The last key of the shortest run of candidates that reaches the target, which all of them together, which hold `whole`, do.
// Afterwards only that run is kept. All threads call it with the same arguments.
inline u64 cut(const Row& row, Desk& desk, const Measure& measure, double whole, double target, bool beyond) {
    u32 c = threadIdx.x, shift = 0;
    bool in_window = false;
    Bracket bracket = {0.0, whole, 0};
    if (row.is_binned()) {
        u32 bin = find_bin(measure.bins, target, beyond);
        if (c < row.n_chunks) {
            u32 kept = desk.kept[c];
            desk.low[c] = (u16)min(bin > 0 ? count_down_to(row, desk, c, bin - 1) : 0, kept);
            desk.high[c] = (u16)(bin < BINS ? min(count_down_to(row, desk, c, bin), kept) : kept);
        }
        if (bin > 0) bracket.before = measure.bins[bin - 1];
        if (bin < BINS && measure.bins[bin] < whole) bracket.after = measure.bins[bin];
        bracket.n = lay_out(row, desk, 0);
    }
    if (bracket.n == 0) {
        // No bins; or sums that are rounded otherwise than the target's left the bin empty.
        if (c < row.n_chunks) desk.low[c] = 0, desk.high[c] = desk.kept[c];
        bracket = Bracket{0.0, whole, lay_out(row, desk, 0)};
    }
    for (u32 round = 0; bracket.n > LIST; round++) {
        if (!in_window) {
            // As many as fit: each chunk has one more, and one when it has not all.
            shift = 0;
            while ((bracket.n >> shift) + (shift > 0 ? 2 : 1) * row.n_chunks > WINDOW) shift++;
            if (shift > 0) lay_out(row, desk, shift);
            fetch_window(row, desk, measure, shift);
            in_window = shift == 0;
        } else {
            bool any = c < row.n_chunks && desk.low[c] < desk.high[c];
            const Entry* entries = desk.window + desk.at[any ? c : 0];
            if (c / 32 * 32 < row.n_chunks) {
                note_ends(desk, any ? entries[desk.low[c]].key : 0, any ? entries[desk.high[c] - 1].key : ~(u64)0);
            }
            __syncthreads();
        }
        // A guess that was far off is not made again: evenly spaced pivots always leave less.
        choose_pivots(row, desk, bracket.n, round % 2 == 0 ? bracket.guess(target) : -1.0f);
        narrow(row, desk, measure, shift, target, beyond, bracket);
        bracket.n = lay_out(row, desk, 0);
    }
    fetch_list(row, desk, bracket.n, in_window);
    sort_list<1024>(row, desk, bracket.n, LIST);
    if (c < 32) {
        u32 n = bracket.n;
        const double* weights = measure.sums == row.tempered ? desk.tempered : measure.sums == nullptr ? nullptr : desk.weights;
        u32 last = n <= 64 ? place_of<2>(weights, n, bracket.before, target, beyond)
                           : place_of<8>(weights, n, bracket.before, target, beyond);
        // The sums over chunks said that it is reached; these are rounded otherwise.
        if (c == 0) desk.key = desk.sorted[last < n ? last : max(n, 1u) - 1];
    }
    __syncthreads();
    u64 key = desk.key;
    if (c < row.n_chunks) desk.kept[c] = (u16)rank(desk.list + desk.at[c], key, desk.low[c], desk.high[c]);
    return key;
}

// Keeps what min-p lets pass, and at least the best.
inline void keep_min_p(const Row& row, Desk& desk) {
    u32 c = threadIdx.x, low = 0, high = c < row.n_chunks ? desk.kept[c] : 0;
    if (c < row.n_chunks && row.is_binned()) {
        // What is not near that logit needs no look.
        u32 bin = min_p_bin(row);
        if (bin < BINS) high = min(high, count_down_to(row, desk, c, bin));
        if (bin > 3) low = min(high, count_down_to(row, desk, c, bin - 4));
    }
    while (low < high) {
        u32 middle = (low + high) / 2;
        if (weight(key_logit(row.keys[(u64)c * CHUNK + middle]), row.top, 1.0) >= (double)row.min_p) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    if (!__syncthreads_or(low > 0)) {
        u64 head = c < row.n_chunks ? row.keys[(u64)c * CHUNK] : 0;
        low = head == block_reduce(head, Larger(), (u64)0) ? 1 : 0;
    }
    if (c < row.n_chunks) desk.kept[c] = (u16)low;
}

// Lists every candidate when the filters cut in one of the first bins and it is known that there are few before that; how many,
// or 0.
inline u32 list_candidates(const Row& row, Desk& desk) {
    u32 c = threadIdx.x, bin = BINS;
    if (row.vocab > LIST) {
        if (!row.is_binned()) return 0;
        if (row.top_k > 0) {
            bin = find_bin(desk.bin_sums[0], (double)row.top_k, false);
        } else if (row.top_p < 1.0f) {
            bin = find_bin(desk.bin_sums[1], (double)row.top_p * row.total, false);
        }
        if (row.min_p > 0.0f) bin = min(bin, min_p_bin(row));
        if (bin >= BINS || desk.bin_sums[0][bin] > (double)LIST) return 0;
    }
    if (c < row.n_chunks) {
        desk.low[c] = 0;
        desk.high[c] = (u16)(bin < BINS ? count_down_to(row, desk, c, bin) : Deal{c, row.n_chunks}.n_tokens(row.vocab));
    }
    u32 n = lay_out(row, desk, 0);
    fetch_list(row, desk, n, false);
    sort_list<1024>(row, desk, n, LIST);
    return n;
}

// The choice when the filters do not cut inside a short list.
inline u64 choose_among_all(const Row& row, Desk& desk) {
    u32 c = threadIdx.x;
    if (c < row.n_chunks) desk.kept[c] = (u16)Deal{c, row.n_chunks}.n_tokens(row.vocab);
    double whole = row.total;
    // Top-k, top-p, and the choice itself are the same search for different things. In a loop: its code is there once.
#pragma unroll 1
    for (u32 stage = 0;; stage++) {
        const double* sums = stage == 0 ? nullptr : stage == 1 ? row.weights : row.tempered;
        Measure measure = {sums, desk.factor[stage == 2], desk.bin_sums[stage]};
        double target = (double)row.top_k;
        if (stage == 0) {
            if (row.top_k == 0 || row.top_k >= row.vocab) continue;
            whole = (double)row.vocab;
        } else if (stage == 1) {
            if (row.top_p >= 1.0f) continue;
            if (row.top_k > 0) whole = measure.of_kept(row, desk);
            target = (double)row.top_p * whole;
        } else {
            if (row.min_p > 0.0f) keep_min_p(row, desk);
            whole = measure.of_kept(row, desk);
            target = desk.uniform * whole;
        }
        u64 key = cut(row, desk, measure, whole, target, stage == 2);
        if (stage == 2) return key;
    }
}
