// sample_find.cuh: the key of a list where a running sum reaches a target, for one block of sample.cu.
//
// Keys between two ends are dealt to equal parts of what lies between these; the part where the target is reached has
// the next ends. Keys are unique, so ties end in parts by id. Sums are whole numbers: their order does not matter.
#pragma once
#include "sample_bins.cuh"
#include "sample_list.cuh"

const u32 SELECT_THREADS = 512;
const u32 SELECT_WARPS = SELECT_THREADS / 32;
// Chunks of a block, whose keys fit in shared memory.
const u32 SELECT_CHUNKS = 4;
const u32 PAGE = SELECT_CHUNKS * CHUNK;
const u32 KEYS_EACH = PAGE / SELECT_THREADS;
const u32 PARTS = 1024;

// What the threads share that choose without a small top-k.
struct Table {
    double sums[2][BINS];             // running sums from the best's bin down, relative to the upper edge of that
    u32 counts[BINS];                 // likewise
    alignas(16) u64 list[PAGE];       // keys
    u64 parts[PARTS];                 // what they weigh
    u32 part_counts[PARTS];           // and how many they are
    double high[2][BINS / 32];        // factors of every 32nd bin
    double low[2][32];                // and of those between
    double warp_sums[2][SELECT_WARPS];
    u32 warp_counts[SELECT_WARPS];
    u64 warp_parts[SELECT_WARPS];
    u32 most[SELECT_WARPS], least[SELECT_WARPS];
    u64 few[32];
    u64 key, min_p_key, base;
    double uniform;
    u32 n, n_few, part, at, last;
};

static_assert(sizeof(Table) <= 96 * 1024, "more than the launcher asks for");

// How keys are weighed: as 1 each, or relative to a logit at a temperature. A whole of `scale` is `factor`.
struct Weigh {
    double best, coldness, scale, factor;
    bool count;

    inline u64 of(float logit) const { return count ? 1 : whole_weight(logit, best, coldness, scale); }
    inline double real(u64 sum) const { return (double)sum * factor; }
};

// Keys from `least` up to below `end`.
struct Span {
    u64 least, end;
    inline bool has(u64 key) const { return key >= least && key < end; }

    inline Span within(Span ends, u64 from) const {
        return Span{Larger()(Larger()(least, from), ends.least), end < ends.end ? end : ends.end};
    }
};

// The list: in shared memory, if it fits.
struct List {
    const u64* keys;
    u32 n;

    inline void load(u64* k, u32 first) const {
#pragma unroll
        for (u32 j = 0; j < KEYS_EACH; j++) {
            u32 i = first + j * SELECT_THREADS + threadIdx.x;
            k[j] = i < n ? keys[i] : 0;
        }
    }

    inline void store(Table& table, const u64* k) const {
#pragma unroll
        for (u32 j = 0; j < KEYS_EACH; j++) table.list[j * SELECT_THREADS + threadIdx.x] = k[j];
    }

    // Calls f with every key, in whole warps, which may see zeros. With barriers before and behind.
    template <typename F> inline void each(Table& table, F f) const {
        u64 k[KEYS_EACH];
        if (n > PAGE) load(k, 0);
#pragma unroll 1
        for (u32 first = 0; first < n; first += PAGE) {
            if (n > PAGE) {
                __syncthreads();
                store(table, k);
                __syncthreads();
                // Under way while these are looked at.
                if (first + PAGE < n) load(k, first + PAGE);
            }
            u32 here = min(n - first, PAGE);
#pragma unroll 1
            for (u32 i = 0; i < here; i += SELECT_THREADS) f(i + threadIdx.x < here ? table.list[i + threadIdx.x] : 0);
        }
    }
};

// Weighs keys one after the other, of which many may have the same logit.
struct Weigher {
    const Weigh& how;
    float logit;
    u64 w;

    inline Weigher(const Weigh& by) : how(by), logit(nan_f32()), w(0) {}
    inline u64 of(u64 key) {
        float l = key_logit(key);
        if (l != logit) w = how.of(l), logit = l;
        return w;
    }
};

// What the keys of a span weigh. All threads call it.
inline u64 weight_of(Table& table, const List& list, const Weigh& weigh, Span span) {
    Weigher weigher(weigh);
    u64 sum = 0;
    list.each(table, [&](u64 key) {
        if (span.has(key)) sum += weigher.of(key);
    });
    sum = warp_reduce(sum, Add());
    __syncthreads();
    if (threadIdx.x % 32 == 0) table.warp_parts[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = 0;
    for (u32 i = 0; i < SELECT_WARPS; i++) sum += table.warp_parts[i];
    return sum;
}

// Deals the keys of a span to parts of 2^shift.
inline void deal_parts(Table& table, const List& list, const Weigh& weigh, Span span, u32 shift) {
    for (u32 i = threadIdx.x; i < PARTS; i += SELECT_THREADS) table.parts[i] = 0, table.part_counts[i] = 0;
    if (threadIdx.x == 0) table.part = PARTS, table.n_few = 0;
    __syncthreads();
    Weigher weigher(weigh);
    list.each(table, [&](u64 key) {
        bool has = span.has(key);
        u32 part = has ? (u32)((span.end - 1 - key) >> shift) : PARTS;
        u64 w = has ? weigher.of(key) : 0;
        // Where many have the same logit they would wait for each other.
        bool same = __ballot_sync(ALL_LANES, part == __shfl_sync(ALL_LANES, part, 0)) == ALL_LANES;
        if (part == PARTS) return;
        if (same) {
            w = warp_reduce(w, Add());
            if (threadIdx.x % 32 > 0) return;
        }
        add_shared(&table.parts[part], w);
        atomicAdd(&table.part_counts[part], same ? 32u : 1u);
    });
    __syncthreads();
}

// Chooses the part where the target is reached, else the last that has keys; `base` lies before all of them. Afterwards
// the table has the part, and what lies before it.
inline void choose_part(Table& table, const Weigh& weigh, u64 base, double before, double target, bool beyond) {
    u32 t = threadIdx.x, warp = t / 32, lane = t % 32;
    u64 a = table.parts[2 * t], b = table.parts[2 * t + 1], sum = a + b;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        u64 x = __shfl_up_sync(ALL_LANES, sum, step);
        if (lane >= step) sum += x;
    }
    if (lane == 31) table.warp_parts[warp] = sum;
    __syncthreads();
    for (u32 i = 0; i < SELECT_WARPS; i++) base += i < warp ? table.warp_parts[i] : 0;
    u64 end = base + sum, middle = end - b, start = middle - a;
    bool is_start = reached(before + weigh.real(start), target, beyond);
    bool is_end = reached(before + weigh.real(end), target, beyond);
    if (!is_start && is_end) {
        bool is_first = reached(before + weigh.real(middle), target, beyond);
        table.part = 2 * t + (is_first ? 0 : 1);
        table.base = is_first ? start : middle;
    }
    __syncthreads();
    if (table.part < PARTS) return;
    // All sums are rounded, so the target can lie a hair behind the last.
    __syncthreads();
    if (t == 0) {
        u32 last = PARTS - 1;
        u64 all = base;
        for (u32 i = 0; i < SELECT_WARPS; i++) all += table.warp_parts[i];
        while (last > 0 && table.part_counts[last] == 0) all -= table.parts[last--];
        table.part = last;
        table.base = all - table.parts[last];
    }
    __syncthreads();
}

// The last of the best keys of a span that together reach the target, which is not reached before the span; the least
// when they do not, and 0 when there is none. All threads call it.
inline u64 find(Table& table, const List& list, const Weigh& weigh, Span span, double before, double target, bool beyond) {
    u32 t = threadIdx.x;
    u64 base = 0;
    for (;;) {
        u64 range = span.end - 1 - span.least;
        u32 bits = 64 - __clzll(range), shift = bits > 10 ? bits - 10 : 0;
        deal_parts(table, list, weigh, span, shift);
        choose_part(table, weigh, base, before, target, beyond);
        u32 n = table.part_counts[table.part];
        base = table.base;
        u64 end = span.end - ((u64)table.part << shift), least = end - ((u64)1 << shift);
        span = Span{least > span.least && least < end ? least : span.least, end};
        if (n <= 32 && n > 0 && shift > 0) break;
        __syncthreads();
        if (n == 0 || shift == 0) return n == 0 ? 0 : span.end - 1;
    }
    list.each(table, [&](u64 key) {
        if (span.has(key)) table.few[atomicAdd(&table.n_few, 1u)] = key;
    });
    __syncthreads();
    if (t < 32) {
        u32 n = table.n_few;
        u64 key = t < n ? table.few[t] : 0, w = t < n ? weigh.of(key_logit(key)) : 0, sum = base + w;
        for (u32 i = 0; i < n; i++) {
            u64 other = __shfl_sync(ALL_LANES, key, i), more = __shfl_sync(ALL_LANES, w, i);
            if (other > key) sum += more;
        }
        bool is_reached = t < n && reached(before + weigh.real(sum), target, beyond);
        u64 found = warp_largest(is_reached ? key : 0), last = ~warp_largest(t < n ? ~key : 0);
        if (t == 0) table.key = found != 0 ? found : last;
    }
    __syncthreads();
    u64 key = table.key;
    __syncthreads();
    return key;
}
