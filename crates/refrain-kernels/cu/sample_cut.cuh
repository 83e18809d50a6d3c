// sample_cut.cuh: where the filters cut, over sorted chunks, for one block of sample.cu: 1024 threads at first, half
// of them where chunks are few.
//
// A search has three steps. Sums over bins say in which bin a target is reached. While that bin has more keys than a
// list, a round asks how much lies above each of eight of them, most of which are close to where the target should be.
// The list that is left is sorted and summed. An instruction costs the time of as many warps as go through it: so what
// is done for each chunk is done by as many threads as there are chunks, what is done once by one warp, and nobody
// else stays. It is fetched once and mostly used once, too: so loops are not unrolled but where loads should be under
// way together.
#pragma once
#include "sample_bins.cuh"

// Threads that stay when chunks are not more.
const u32 FEW_THREADS = 512;

// How much of something the best n keys of a chunk hold, relative to the row's best.
struct Measure {
    const double* sums;    // running sums in every chunk, or null: keys are counted
    const double* factor;  // of the chunks
    const double* bins;    // the sums of all chunks down to each bin

    // Loads come without branches, so that several are under way together.
    inline double of(u32 chunk, u32 n) const {
        if (sums == nullptr) return (double)n;
        double sum = sums[chunk * CHUNK + (n > 0 ? n - 1 : 0)];
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

// What is known of a target: that it is reached among the keys between low and high.
struct Bracket {
    double before, after;  // what lies before them, and together with them
    u32 n;                 // how many they are
    float slope;           // by which factor's logarithm there is more at their end than at their beginning
};

// How many keys of a chunk lie between low and high, every 2^shift-th of them.
inline u32 n_between(const Desk& desk, u32 chunk, u32 shift) {
    return ((u32)desk.high[chunk] - desk.low[chunk] + (1u << shift) - 1) >> shift;
}

// How many those of all chunks are, and where a chunk's go when they are put side by side, in whatever order, on the
// list or, with one place more for each chunk, in the window. All threads call it; a chunk's low and high are those
// that its thread has written. `turn` counts the calls.
inline u32 lay_out(const Row& row, Desk& desk, u32 shift, u32& turn) {
    // Keys are at most 2^20 and chunks 2^10: both are counted in one number.
    const u32 ONE_CHUNK = 1u << 21;
    u32 c = threadIdx.x, lane = c % 32, *laid = &desk.laid[turn % 4];
    turn++;
    // The next call's, which nobody uses now.
    if (c == 0) desk.laid[turn % 4] = 0;
    if (c / 32 * 32 < row.n_chunks) {
        u32 mine = c < row.n_chunks ? ONE_CHUNK + n_between(desk, c, shift) : 0, sum = mine, from = 0;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            u32 before = __shfl_up_sync(ALL_LANES, sum, step);
            if (lane >= step) sum += before;
        }
        if (lane == 31) from = atomicAdd(laid, sum);
        from = __shfl_sync(ALL_LANES, from, 31) + sum - mine;
        if (c < row.n_chunks) {
            desk.to[c] = (u16)(from % ONE_CHUNK);
            desk.to_window[c] = (u16)(from % ONE_CHUNK + from / ONE_CHUNK);
        }
    }
    __syncthreads();
    return *laid % ONE_CHUNK;
}

// Calls f with the places that a thread looks after: `n_of` a chunk, shared by a few lanes, four at a time.
template <typename N, typename F> inline void each_of_chunks(const Row& row, N n_of, F f) {
    u32 lanes = 1u << row.lanes;
#pragma unroll 1
    for (u32 chunk = threadIdx.x >> row.lanes; chunk < row.n_chunks; chunk += row.threads >> row.lanes) {
        u32 n = n_of(chunk);
#pragma unroll 1
        for (u32 i = threadIdx.x % lanes; i < n; i += 4 * lanes) f(chunk, i, lanes, n);
    }
}

// Puts the keys between low and high on the list, as laid out, from the window or from where they are.
inline void fetch_list(const Row& row, Desk& desk, u32 n, bool from_window) {
    end_list(desk.list, n);
    each_of_chunks(row, [&](u32 chunk) { return n_between(desk, chunk, 0); }, [&](u32 chunk, u32 i, u32 lanes, u32 n) {
        u32 low = desk.low[chunk];
        const Entry* window = desk.window + (desk.at[chunk] + (i32)low);
        const u64* keys = row.keys + (chunk * CHUNK + low);
        u64 k[4];
#pragma unroll
        for (u32 j = 0; j < 4; j++) {
            u32 mine = min(i + j * lanes, n - 1);
            k[j] = from_window ? window[mine].key : keys[mine];
        }
#pragma unroll
        for (u32 j = 0; j < 4; j++) {
            if (i + j * lanes < n) desk.list[desk.to[chunk] + i + j * lanes] = k[j];
        }
    });
    __syncthreads();
    if (threadIdx.x < row.n_chunks) desk.at[threadIdx.x] = (short)(desk.to[threadIdx.x] - desk.low[threadIdx.x]);
}

// The largest and the least key of some. For whole warps, up to the last that has a chunk; with a barrier to come.
inline void note_ends(Desk& desk, u64 largest, u64 least) {
    largest = warp_largest(largest);
    least = ~warp_largest(~least);
    if (threadIdx.x % 32 == 0) desk.ends[threadIdx.x / 32] = Two{largest, least};
}

// Puts every 2^shift-th of the keys between low and high into the window, as laid out. Before each chunk's first one
// there is one that is never below a pivot, with what the chunk holds before. Sums are only there with all keys.
inline void fetch_window(const Row& row, Desk& desk, const Measure& measure, u32 shift) {
    u32 c = threadIdx.x;
    Two ends = {0, ~(u64)0};
    if (c < row.n_chunks && desk.low[c] < desk.high[c]) {
        const u64* keys = row.keys + c * CHUNK;
        ends = Two{keys[desk.low[c]], keys[desk.high[c] - 1]};
    }
    each_of_chunks(row, [&](u32 chunk) { return n_between(desk, chunk, shift) + 1; },
                   [&](u32 chunk, u32 i, u32 lanes, u32 n) {
        u32 low = desk.low[chunk];
        const u64* keys = row.keys + chunk * CHUNK;
        Entry entries[4];
#pragma unroll
        for (u32 j = 0; j < 4; j++) {
            u32 mine = min(i + j * lanes, n - 1), at = mine > 0 ? low + ((mine - 1) << shift) : 0;
            entries[j].key = keys[at];
            entries[j].sum = shift > 0 ? 0.0 : measure.of(chunk, low + mine);
            if (mine == 0) entries[j].key = ~(u64)0;
        }
#pragma unroll
        for (u32 j = 0; j < 4; j++) {
            if (i + j * lanes < n) desk.window[desk.to_window[chunk] + i + j * lanes] = entries[j];
        }
    });
    if (c / 32 * 32 < row.n_chunks) note_ends(desk, ends.a, ends.b);
    if (c < row.n_chunks) desk.at[c] = (short)(desk.to_window[c] + 1 - desk.low[c]);
    __syncthreads();
}

// Chooses pivots, from the largest down; the last is the least of the keys. Where the target is guessed to be they lie
// so close that what is between two of them makes a short list, away from there further and further apart. They are
// logits, or ids when all logits are equal. Without a guess they are spaced evenly.
inline void choose_pivots(const Row& row, Desk& desk, const Bracket& bracket, double target, bool guesses) {
    if (threadIdx.x < 32) {
        const u32 HALF = N_PIVOTS / 2;
        u32 lane = threadIdx.x, which = lane % N_PIVOTS;
        bool any = lane * 32 < row.n_chunks;
        u64 largest = warp_largest(any ? desk.ends[lane].a : 0), least = ~warp_largest(any ? ~desk.ends[lane].b : 0);
        float guess = __fdividef((float)(target - bracket.before), (float)(bracket.after - bracket.before));
        float x = (float)(which + 1) / N_PIVOTS;
        if (guesses && guess >= 0.0f && guess <= 1.0f) {
            // If how much there is grows or shrinks by a constant factor.
            float slope = bracket.slope;
            if (slope > 0.01f || slope < -0.01f) guess = __fdividef(logf(1.0f + guess * (expf(slope) - 1.0f)), slope);
            // From all of them down to about 32 keys on either side.
            u32 steps = which < HALF ? which : N_PIVOTS - 1 - which;
            float distance = exp2f(-log2f((float)bracket.n / 32.0f) * (float)steps / (float)(HALF - 1));
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
#pragma unroll 1
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
    low = rank(row.keys + chunk * CHUNK, pivot, low, high);
    sum = measure.of(chunk, low);
    return low;
}

// One round: leaves between low and high only what lies between two neighbouring pivots.
inline void narrow(const Row& row, Desk& desk, const Measure& measure, u32 shift, double target, bool beyond,
                   Bracket& bracket) {
    u32 c = threadIdx.x, warp = c / 32, lane = c % 32, which = c % N_PIVOTS;
    u64 pivot = desk.pivots[which];
    double sum = 0.0;
#pragma unroll 1
    for (u32 chunk = c / N_PIVOTS; chunk < row.n_chunks; chunk += row.threads / N_PIVOTS) {
        double part;
        desk.ranks[which][chunk] = (u16)rank_of(row, desk, measure, chunk, pivot, shift, part);
        sum += part;
    }
#pragma unroll
    for (u32 step = N_PIVOTS; step < 32; step *= 2) sum += __shfl_xor_sync(ALL_LANES, sum, step);
    if (lane < N_PIVOTS) desk.partial[warp][lane] = sum;
    __syncthreads();
    if (warp < N_PIVOTS) {
        sum = warp_reduce(lane * 32 < row.threads ? desk.partial[lane][warp] : 0.0, Add());
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
    bracket.slope = 0.0f;
}

// Finds the bin where the target is reached, if any has keys; false when none.
inline bool bracket_by_bins(const Row& row, Desk& desk, const double* bins, double target, bool beyond,
                            Bracket& bracket, u32& turn) {
    u32 c = threadIdx.x, bin = find_bin(bins, target, beyond);
    if (c < row.n_chunks) {
        u32 kept = desk.kept[c];
        u32 low = bin > 0 ? count_down_to(row, desk, c, bin - 1) : 0;
        u32 high = bin < BINS ? count_down_to(row, desk, c, bin) : kept;
        desk.low[c] = (u16)min(low, kept);
        desk.high[c] = (u16)min(high, kept);
    }
    if (bin > 0) bracket.before = bins[bin - 1];
    if (bin < BINS && bins[bin] < bracket.after) bracket.after = bins[bin];
    if (bin > 1 && bin + 1 < BINS && threadIdx.x < 32) {
        // From the middle of the bin before to that of the next are two bins.
        float least = (float)(bins[bin - 1] - bins[bin - 2]), next = (float)(bins[bin + 1] - bins[bin]);
        if (least > 0.0f && next > 0.0f) bracket.slope = 0.5f * logf(__fdividef(next, least));
        if (!(bracket.slope >= -8.0f && bracket.slope <= 8.0f)) bracket.slope = 0.0f;
    }
    bracket.n = lay_out(row, desk, 0, turn);
    return bracket.n > 0;
}

// Weighs the sorted list of n for a measure, and finds the key where the target is reached; the last when rounding
// says that none does.
inline u64 find_in_list(const Row& row, Desk& desk, const Measure& measure, u32 n, double before, double target,
                        bool beyond) {
    u32 c = threadIdx.x;
    if (c < n) {
        double coldness = measure.sums == row.tempered ? row.coldness : 1.0;
        desk.weights[c] = measure.sums == nullptr ? 1.0 : weight(key_logit(desk.sorted[c]), row.top, coldness);
    }
    __syncthreads();
    if (c < 32) {
        u32 last = n <= 128 ? place_of<4>(desk.weights, n, before, target, beyond)
                            : place_of<8>(desk.weights, n, before, target, beyond);
        if (c == 0) desk.key = desk.sorted[last < n ? last : n - 1];
    }
    __syncthreads();
    return desk.key;
}

// The last key of the shortest run of candidates that reaches the target, which all of them together, which hold
// `whole`, do. Afterwards only that run is kept. All threads call it with the same arguments.
inline u64 cut(const Row& row, Desk& desk, const Measure& measure, double whole, double target, bool beyond,
               u32& turn) {
    u32 c = threadIdx.x, shift = 0;
    bool in_window = false;
    Bracket bracket = {0.0, whole, 0, 0.0f};
    if (!row.is_binned() || !bracket_by_bins(row, desk, measure.bins, target, beyond, bracket, turn)) {
        // No bins; or sums that are rounded otherwise than the target's left the bin empty.
        if (c < row.n_chunks) desk.low[c] = 0, desk.high[c] = desk.kept[c];
        bracket = Bracket{0.0, whole, lay_out(row, desk, 0, turn), 0.0f};
    }
#pragma unroll 1
    for (u32 round = 0; bracket.n > LIST; round++) {
        if (!in_window) {
            // As many as fit: each chunk has one more, and one when it has not all.
            shift = 0;
            while ((bracket.n >> shift) + (shift > 0 ? 2 : 1) * row.n_chunks > WINDOW) shift++;
            if (shift > 0) lay_out(row, desk, shift, turn);
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
        // A guess that was far off is not made twice in a row: evenly spaced pivots always leave less.
        choose_pivots(row, desk, bracket, target, round % 2 == 0);
        narrow(row, desk, measure, shift, target, beyond, bracket);
        bracket.n = lay_out(row, desk, 0, turn);
    }
    fetch_list(row, desk, bracket.n, in_window);
    order_list(desk, bracket.n, row.threads);
    __syncthreads();
    u64 key = find_in_list(row, desk, measure, bracket.n, bracket.before, target, beyond);
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
#pragma unroll 1
    while (low < high) {
        u32 middle = (low + high) / 2;
        if (weight(key_logit(row.keys[c * CHUNK + middle]), row.top, 1.0) >= (double)row.min_p) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    if (!__syncthreads_or(low > 0)) {
        u64 head = c < row.n_chunks ? row.keys[c * CHUNK] : 0;
        // Some warps may have returned: only those with chunks take part.
        if (c / 32 * 32 < row.n_chunks) note_ends(desk, head, ~(u64)0);
        __syncthreads();
        u64 best = 0;
#pragma unroll 1
        for (u32 i = 0; i * 32 < row.n_chunks; i++) best = Larger()(best, desk.ends[i].a);
        low = c < row.n_chunks && head == best ? 1 : 0;
    }
    if (c < row.n_chunks) desk.kept[c] = (u16)low;
}

// The last bin that the filters can keep something of, when what lies down to it is a short list; BINS when all tokens
// are one; else more.
inline u32 last_bin_listed(const Row& row, const Desk& desk) {
    if (row.vocab <= LIST) return BINS;
    if (!row.is_binned()) return BINS + 1;
    u32 bin = BINS;
    if (row.top_k > 0) {
        bin = find_bin(desk.bin_sums[0], (double)row.top_k, false);
    } else if (row.top_p < 1.0f) {
        bin = find_bin(desk.bin_sums[1], (double)row.top_p * row.total, false);
    }
    if (row.min_p > 0.0f) bin = min(bin, min_p_bin(row));
    return bin < BINS && desk.bin_sums[0][bin] <= (double)LIST ? bin : BINS + 1;
}

// Lists, sorts and weighs every candidate down to a bin, which are at most LIST; how many.
inline u32 list_candidates(const Row& row, Desk& desk, u32 bin) {
    u32 c = threadIdx.x, turn = 0;
    if (c < row.n_chunks) {
        desk.low[c] = 0;
        desk.high[c] = bin < BINS ? (u16)count_down_to(row, desk, c, bin) : desk.kept[c];
    }
    u32 n = lay_out(row, desk, 0, turn);
    fetch_list(row, desk, n, false);
    order_list(desk, n, row.threads);
    __syncthreads();
    // Some threads for each kind of weight.
#pragma unroll 1
    for (u32 i = c; i < 2 * LIST; i += row.threads) {
        if (i % LIST >= n) continue;
        double w = weight(key_logit(desk.sorted[i % LIST]), row.top, i < LIST ? 1.0 : row.coldness);
        (i < LIST ? desk.weights : desk.tempered)[i % LIST] = w;
    }
    __syncthreads();
    return n;
}

// The choice when the filters do not cut inside a short list. For `threads` threads.
inline u64 choose_among_all(const Row& row, Desk& desk) {
    double whole = row.total;
    u32 turn = 0;
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
            whole = row.top_k > 0 ? measure.of_kept(row, desk) : row.total;
            target = (double)row.top_p * whole;
        } else {
            if (row.min_p > 0.0f) keep_min_p(row, desk);
            whole = measure.of_kept(row, desk);
            target = desk.uniform * whole;
        }
        u64 key = cut(row, desk, measure, whole, target, stage == 2, turn);
        if (stage == 2) return key;
    }
}
