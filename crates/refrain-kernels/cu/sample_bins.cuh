// sample_bins.cuh: what all chunks hold down to each bin of logits, for one block of sample.cu. It says where to look before
// any key is looked at.
#pragma once
#include "sample_list.cuh"

// Threads that look at the same bin.
const u32 BIN_PARTS = 1024 / BINS;

// What a thread sees of the bins: the same place in every 16th chunk, eight of them at a time. All 1024 threads have
// one.
struct BinShare {
    double sums[8];
    u16 counts[8];
    float per_unit;

    inline BinShare(const Row& row) : per_unit(bins_per_unit(row.temperature)) {}

    inline void ask(const Row& row, const double* bins, u32 from) {
        const double* at = bins + from * BINS + threadIdx.x % BINS;
#pragma unroll
        for (u32 i = 0; i < 8; i++) sums[i] = from + i * BIN_PARTS < row.n_chunks ? at[i * BIN_PARTS * BINS] : 0.0;
    }

    inline void ask_counts(const Row& row, u32 from) {
        const u16* at = row.bins.counts + from * BINS + threadIdx.x % BINS;
#pragma unroll
        for (u32 i = 0; i < 8; i++) counts[i] = from + i * BIN_PARTS < row.n_chunks ? at[i * BIN_PARTS * BINS] : (u16)0;
    }

    // The bin of its place that is one of the row's.
    inline i32 bin(const Row& row) const { return row.top_bin - (i32)((u32)(row.top_bin - (i32)threadIdx.x) % BINS); }

    // Leaves the sums of weights and counts on the desk, as a part.
    inline void add(const Row& row, Desk& desk) {
        i32 mine = bin(row);
        double sum = 0.0;
        u32 n = 0;
#pragma unroll 1
        for (u32 from = threadIdx.x / BINS; from < row.n_chunks; from += 8 * BIN_PARTS) {
            if (from >= 8 * BIN_PARTS) ask(row, row.bins.weights, from), ask_counts(row, from);
#pragma unroll
            for (u32 i = 0; i < 8; i++) {
                u32 chunk = from + i * BIN_PARTS;
                if (chunk >= row.n_chunks || mine > desk.bins[chunk]) continue;
                sum += desk.factor[0][chunk] * sums[i];
                n += counts[i];
            }
        }
        ((double*)desk.window)[threadIdx.x] = sum;
        ((u32*)desk.window)[2048 + threadIdx.x] = n;
    }

    // The same for weights at the temperature.
    inline void add_tempered(const Row& row, Desk& desk) {
        i32 mine = bin(row);
        double sum = 0.0;
#pragma unroll 1
        for (u32 from = threadIdx.x / BINS; from < row.n_chunks; from += 8 * BIN_PARTS) {
            if (from >= 8 * BIN_PARTS) ask(row, row.bins.tempered, from);
#pragma unroll
            for (u32 i = 0; i < 8; i++) {
                u32 chunk = from + i * BIN_PARTS;
                if (chunk < row.n_chunks && mine <= desk.bins[chunk]) sum += desk.factor[1][chunk] * sums[i];
            }
        }
        ((double*)desk.window)[threadIdx.x] = sum;
    }
};

// Puts the parts of weights and counts together. After a barrier behind them, and with one to come.
inline void sum_bins(const Row& row, Desk& desk) {
    u32 place = threadIdx.x % BINS, bin = (u32)(row.top_bin - (i32)place) % BINS;
    if (threadIdx.x < BINS) {
        double sum = 0.0;
#pragma unroll
        for (u32 i = 0; i < BIN_PARTS; i++) sum += ((const double*)desk.window)[i * BINS + place];
        desk.bin_sums[1][bin] = sum;
    } else if (threadIdx.x < 2 * BINS) {
        u32 n = 0;
#pragma unroll
        for (u32 i = 0; i < BIN_PARTS; i++) n += ((const u32*)desk.window)[2048 + i * BINS + place];
        desk.bin_sums[0][bin] = (double)n;
    }
}

inline void sum_tempered_bins(const Row& row, Desk& desk) {
    if (threadIdx.x >= BINS) return;
    double sum = 0.0;
#pragma unroll
    for (u32 i = 0; i < BIN_PARTS; i++) sum += ((const double*)desk.window)[i * BINS + threadIdx.x];
    desk.bin_sums[2][(u32)(row.top_bin - (i32)threadIdx.x) % BINS] = sum;
}

// Puts on the desk what makes the chunks' sums relative to the row's best, and of every 32 chunks the sum. The second
// half of the threads does the tempered ones for the first, where it has no chunks of its own.
inline void weigh_chunks(const Row& row, Desk& desk, const Chunk* chunks, Chunk mine) {
    u32 c = threadIdx.x, warp = c / 32, half = c % 512;
    if (warp * 32 < row.n_chunks) {
        double factor = mine.factor(row.top, 1.0), sum = c < row.n_chunks ? factor * mine.sum : 0.0;
        desk.factor[0][c] = factor;
        desk.bins[c] = bin_of(key_logit(mine.best), bins_per_unit(row.temperature));
        sum = warp_reduce(sum, Add());
        if (c % 32 == 0) desk.sums[warp] = sum;
    }
    if (row.n_chunks <= 512 ? c >= 512 && half < row.n_chunks : c < row.n_chunks) {
        u32 chunk = row.n_chunks <= 512 ? half : c;
        double coldness = 1.0 / (double)row.temperature;
        desk.factor[1][chunk] = chunks[chunk].factor(row.top, coldness);
        if (chunk == 0) desk.coldness = coldness;
    }
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
    i32 number = row.top_bin - (i32)bin;
    return number <= desk.bins[chunk] ? row.bins.counts[chunk * BINS + (u32)number % BINS] : 0;
}

// A bin, from the row's best, below which min-p lets nothing pass, while the fourth above it passes whole; BINS or more
// when it is behind them.
inline u32 min_p_bin(const Row& row) {
    float below = -logf(row.min_p) * bins_per_unit(row.temperature);
    // Places are counted from the upper edge of the best's bin, and one more allows for rounding.
    return below < (float)BINS ? (u32)fmaxf(below, 0.0f) + 2 : BINS;
}
