// sample_find.cuh: finds the key of a list at which a running sum reaches a target, for one block of
// sample.cu
//
// The range between two keys is divided into equal parts and keys are dealt to them; the part in which the
// target is reached becomes the next range. Keys are unique, so ties are resolved in parts by id. Sums are
// integers, so their order does not matter.
#pragma once
#include "sample_bins.cuh"
#include "sample_list.cuh"

const u32 SELECT_THREADS = 512;
const u32 SELECT_WARPS = SELECT_THREADS / 32;
// Chunks per block.
const u32 SELECT_CHUNKS = 4;
// Tokens that fit in the smallest supported shared memory.
const u32 LEAST_PAGE = 3584;
// Sums of bins are in two rows, so that there are no bank conflicts between threads that own two bins each or
// in a warp that reads 32 bins.
const u32 ROW = BINS / 2 + 8;

// Shared memory of the choice without a small top-k. A page of tokens follows it.
struct alignas(16) Table {
    double sums[KINDS][2 * ROW];  // running sums from the top bin down, relative to its upper edge
    double every[KINDS][32];      // every 32nd of these, the last of its 32
    u64 parts[PARTS];             // weight of the keys in a part
    u32 part_counts[PARTS];       // number of keys in a part
    Factors factors;
    double warp_sums[KINDS][SELECT_WARPS];
    u32 most[SELECT_WARPS], least[SELECT_WARPS];
    Entry few[32];
    u64 key, min_p_key, base, need, kept;
    double uniform, log_total;
    u32 n_both, n_few, part, at[2], last;
    u32 page;  // tokens that fit on the page

    inline Entry* list() { return (Entry*)(this + 1); }
};

static_assert(sizeof(Table) + LEAST_PAGE * sizeof(Entry) <= 96 * 1024, "more than the launcher asks for");

// Returns the index of a bin's sum.
inline u32 place_of_bin(u32 bin) { return bin % 2 * ROW + bin / 2; }
// Returns the index of a part: a lane has 16 consecutive parts.
inline u32 place_of_part(u32 part) { return part % 16 * 32 + part / 16; }

// How tokens are weighed: by the weights of their chunk, or relative to the row's best. An integer weight
// times `factor` is the real weight.
struct Weigh {
    u32 kind;
    bool by_bins, wanted;
    double best, coldness, factor;

    inline u64 of(const Entry& token) const {
        if (kind == COUNTED) return 1;
        if (by_bins) return kind == PLAIN ? token.weights[0] : token.weights[1];
        // 2^43: the sum of a row fits in 63 bits.
        return whole_weight(key_logit(token.key), best, coldness, 8796093022208.0);
    }
    inline double real(u64 sum) const { return (double)sum * factor; }
};

// Keys from `least` up to, but not including, `end`.
struct Span {
    u64 least, end;
    inline bool has(u64 key) const { return key >= least && key < end; }

    // Returns the shift for which parts of 2^shift keys number at most PARTS.
    inline u32 shift() const {
        u32 bits = 64 - __clzll(end - 1 - least);
        return bits > 9 ? bits - 9 : 0;
    }

    inline Span within(Span ends, u64 from) const {
        return Span{Larger()(Larger()(least, from), ends.least), end < ends.end ? end : ends.end};
    }
};

// A list, or one of its two parts: in shared memory from `first` on, if all of it fits.
struct List {
    const Entry* tokens;
    u32 n, first;
    bool fits;

    // Loads the list from `from` on, as far as it fits. The caller synchronises.
    inline void fetch(Table& table, u32 from) const {
        const u32 AT_ONCE = 4;
        u32 end = min(n - from, table.page - first);
#pragma unroll 1
        for (u32 i = threadIdx.x; i < end; i += AT_ONCE * SELECT_THREADS) {
            Entry some[AT_ONCE];
#pragma unroll
            for (u32 j = 0; j < AT_ONCE; j++) some[j] = tokens[min(from + i + j * SELECT_THREADS, n - 1)];
#pragma unroll
            for (u32 j = 0; j < AT_ONCE; j++) {
                if (i + j * SELECT_THREADS < end) table.list()[first + i + j * SELECT_THREADS] = some[j];
            }
        }
    }

    // Calls f with every token, in whole warps; surplus lanes pass tokens without a key.
    template <typename F> inline void each(Table& table, F f) const {
#pragma unroll 1
        for (u32 from = 0; from < n; from += table.page) {
            if (!fits) {
                __syncthreads();
                fetch(table, from);
                __syncthreads();
            }
            u32 here = min(n - from, table.page);
#pragma unroll 1
            for (u32 i = threadIdx.x; i / 32 * 32 < here; i += SELECT_THREADS) {
                Entry token = i < here ? table.list()[first + i] : Entry{};
                f(token);
            }
        }
    }
};

// Returns the sum over all threads, which all call this; `kept` is 0 before and after.
inline u64 sum_all(Table& table, u64 sum) {
    sum = warp_reduce(sum, Add());
    if (threadIdx.x % 32 == 0 && sum != 0) add_shared(&table.kept, sum);
    __syncthreads();
    sum = table.kept;
    __syncthreads();
    if (threadIdx.x == 0) table.kept = 0;
    __syncthreads();
    return sum;
}

// Returns the weight of the tokens in a span. All threads call this.
inline u64 weight_of(Table& table, const List& list, const Weigh& weigh, Span span) {
    u64 sum = 0;
    list.each(table, [&](const Entry& token) {
        if (span.has(token.key)) sum += weigh.of(token);
    });
    return sum_all(table, sum);
}

// Adds to a part; PARTS means none. For whole warps: if all lanes have the same part, the warp adds once
// instead of contending. Returns how many tokens this thread added for.
inline u32 add_part(u64* parts, u32 part, u64 w) {
    bool same = __ballot_sync(ALL_LANES, part == __shfl_sync(ALL_LANES, part, 0)) == ALL_LANES;
    if (part == PARTS) return 0;
    if (same) {
        w = warp_reduce(w, Add());
        if (threadIdx.x % 32 > 0) return 0;
    }
    add_shared(&parts[part], w);
    return same ? 32 : 1;
}

// Deals the tokens of a span to parts of 2^shift keys.
inline void deal_parts(Table& table, const List& list, const Weigh& weigh, Span span, u32 shift) {
    table.parts[threadIdx.x] = 0, table.part_counts[threadIdx.x] = 0;
    if (threadIdx.x == 0) table.n_few = 0;
    __syncthreads();
    list.each(table, [&](const Entry& token) {
        u32 part = PARTS;
        u64 w = 0;
        if (span.has(token.key)) {
            part = place_of_part((u32)((span.end - 1 - token.key) >> shift));
            w = weigh.of(token);
        }
        u32 n = add_part(table.parts, part, w);
        if (n > 0) atomicAdd(&table.part_counts[part], n);
    });
    __syncthreads();
}

inline u64 scan_warp(u64 sum) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        u64 x = __shfl_up_sync(ALL_LANES, sum, step);
        if (threadIdx.x % 32 >= step) sum += x;
    }
    return sum;
}

// Stores in the table the part in which the sum reaches `need`, starting from `base`, and the sum before that
// part. If the total is less than `need`, `need` becomes the total. For one warp.
inline void choose_part(Table& table, u64 base, u64 need) {
    u32 lane = threadIdx.x;
    u64 mine = 0;
#pragma unroll 4
    for (u32 j = 0; j < 16; j++) mine += table.parts[32 * j + lane];
    u64 sum = base + scan_warp(mine), all = __shfl_sync(ALL_LANES, sum, 31);
    // Targets are computed from rounded sums, so one can exceed the total by a rounding error.
    if (need > all) need = all;
    u32 first = __ffs(__ballot_sync(ALL_LANES, sum >= need)) - 1;
    base = __shfl_sync(ALL_LANES, sum - mine, first);
    u64 part = lane < 16 ? table.parts[32 * lane + first] : 0;
    sum = base + scan_warp(part);
    u32 at = __ffs(__ballot_sync(ALL_LANES, sum >= need)) - 1;
    base = __shfl_sync(ALL_LANES, sum - part, at);
    if (lane == 0) table.part = 16 * first + at, table.base = base, table.need = need;
}

// Returns the one of up to 32 tokens at which the sum reaches `need`. Adds the weight of the tokens kept to
// `kept`. For one warp.
inline u64 choose_few(Table& table, const Weigh& weigh, const Weigh& other) {
    u32 lane = threadIdx.x, n = table.n_few;
    Entry mine = table.few[lane];
    u64 w = lane < n ? weigh.of(mine) : 0, sum = table.base + w;
#pragma unroll 1
    for (u32 i = 0; i < n; i++) {
        u64 more = __shfl_sync(ALL_LANES, w, i);
        if (table.few[i].key > mine.key) sum += more;
    }
    u64 found = warp_largest(lane < n && sum >= table.need ? mine.key : 0);
    if (!other.wanted) return found;
    w = warp_reduce(lane < n && mine.key >= found ? other.of(mine) : 0, Add());
    if (lane == 0) table.kept += w;
    return found;
}

// Returns the last of the best keys of a span that together weigh `need`, or the last with weight if they
// weigh less; 0 if nothing there has weight. `base` is the weight before the span. All threads call this.
// `kept` receives the kept tokens' weight under `other`, if the next stage needs it.
inline u64 find(Table& table, const List& list, const Weigh& weigh, Span span, u64 base, u64 need, const Weigh& other,
                u64& kept) {
    Span all = span;
    for (;;) {
        u32 shift = span.shift();
        deal_parts(table, list, weigh, span, shift);
        if (threadIdx.x < 32) choose_part(table, base, need);
        __syncthreads();
        u32 n = table.part_counts[place_of_part(table.part)];
        base = table.base;
        need = table.need;
        u64 end = span.end - ((u64)table.part << shift), least = end - ((u64)1 << shift);
        span = Span{least > span.least && least < end ? least : span.least, end};
        if (n <= 32) break;
        __syncthreads();
    }
    if (need == 0) return 0;
    u64 sum = 0;
    list.each(table, [&](const Entry& token) {
        if (other.wanted && token.key >= span.end && token.key < all.end) sum += other.of(token);
        if (span.has(token.key)) table.few[atomicAdd(&table.n_few, 1u)] = token;
    });
    if (other.wanted) {
        sum = warp_reduce(sum, Add());
        if (threadIdx.x % 32 == 0 && sum != 0) add_shared(&table.kept, sum);
    }
    __syncthreads();
    if (threadIdx.x < 32) {
        u64 key = choose_few(table, weigh, other);
        if (threadIdx.x == 0) table.key = key;
    }
    __syncthreads();
    kept = table.kept;
    u64 key = table.key;
    if (!other.wanted) return key;
    __syncthreads();
    if (threadIdx.x == 0) table.kept = 0;
    __syncthreads();
    return key;
}
