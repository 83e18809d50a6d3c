// sample_large.cuh: the choice without a small top-k, for blocks of sample.cu with four chunks each
//
// From the row's bins, every block derives where the filters can cut and where the choice can fall, and lists
// its tokens there. The last block to do so finds the keys of the cuts and of the choice on that list. Where
// bins cannot be used, the list holds all tokens that may count, and everything is found on it.
//
// Everything here is short and latency-bound: fetching code that runs once costs more than running it. Code
// is therefore shared in loops that are not unrolled where possible.
#pragma once
#include "sample_find.cuh"

// How the bins of a row may be used.
enum Use {
    USE_BINS,   // for cuts and the choice
    USE_COLD,   // for cuts; the choice is in the top bin or a few below it
    USE_REACH,  // not at all: some chunk's best is too far below the row's, but tokens that far down have no weight
    USE_NONE,   // not at all
};

// A block that lists more tokens than this reports the bounds of their keys.
const u32 MANY = 192;
// Tokens per thread.
const u32 TOKENS_EACH = SELECT_CHUNKS * CHUNK / SELECT_THREADS;
static_assert(BINS == 2 * SELECT_THREADS, "a thread has two bins");
// Total integer weights at temperature 1 that guarantee a list of at most LIST tokens: in narrow bins
// (temperature up to 1) a token weighs at least e^(-1/16) of a whole weight, otherwise at least e^-1.
const double SHORT = 240.0, SHORT_HOT = 94.0;

// A block's knowledge of its row after the first barriers.
struct Large {
    Table& table;
    const Row& row;
    Bins bins;
    Use use;
    u64 min_p_key;
    // Bins below the best, BINS for none: where top-k cuts, the range in which top-p can cut, where min-p
    // cuts, and the range in which the choice can fall.
    u32 k_at, p_from, p_to, m_at, from, to;
    // Few tokens are above the lowest possible cut: all of them are listed.
    bool is_short;

    inline double upto(u32 kind, u32 at) const { return table.sums[kind][place_of_bin(at)]; }
    inline double before(u32 kind, u32 at) const { return at > 0 ? upto(kind, at - 1) : 0.0; }
    inline double total(u32 kind) const { return table.every[kind][31]; }
    inline double short_list() const { return row.temperature <= 1.0f ? SHORT : SHORT_HOT; }
    inline bool top_k_cuts() const { return row.top_k > 0 && row.top_k < row.vocab; }
    inline bool top_p_cuts() const { return row.top_p < 1.0f; }
    inline double p_target(double candidates) const { return fmax((double)row.top_p * candidates, 1e-300); }

    // Returns the first bin where the target is reached, or BINS. For whole warps.
    inline u32 bin_where(u32 kind, double target, bool beyond) const {
        u32 lane = threadIdx.x % 32;
        u32 every = __ballot_sync(ALL_LANES, reached(table.every[kind][lane], target, beyond));
        if (every == 0) return BINS;
        u32 first = 32 * (__ffs(every) - 1);
        return first + __ffs(__ballot_sync(ALL_LANES, reached(upto(kind, first + lane), target, beyond))) - 1;
    }

    // Determines the bins in which each cut and the choice can fall.
    inline void scout() {
        k_at = p_from = p_to = m_at = BINS;
        from = 0;
        to = REACH;
        is_short = false;
        if (use >= USE_REACH) return;
        if (row.min_p > 0.0f) m_at = min(bins.below(key_logit(min_p_key)), BINS);
        // Bounds of the kept weight, lower and upper: first of what top-p considers, then of the candidates.
        u32 least_at = BINS, most_at = BINS;
#pragma unroll 1
        for (u32 stage = 1; stage <= 3; stage++) {
            u32 kind = stage == 1 ? COUNTED : stage == 2 ? PLAIN : TEMPERED;
            if (stage == 1 && !top_k_cuts()) continue;
            if (stage == 2 && !top_p_cuts()) continue;
            if (stage == 3) least_at = min(least_at, m_at), most_at = min(most_at, m_at);
            if (stage == 3 && use == USE_COLD) break;
            // Further down, bins do not include all tokens.
            if (stage == 3 && !top_k_cuts() && most_at < REACH && upto(COUNTED, most_at) <= short_list()) {
                is_short = true;
                p_from = 0, p_to = most_at, m_at = BINS, to = 0;
                return;
            }
            u32 found[2];
#pragma unroll 1
            for (u32 i = 0; i < 2; i++) {
                double kept = i == 0 ? (least_at < BINS ? before(kind, least_at) : total(kind))
                                     : (most_at < BINS ? upto(kind, most_at) : total(kind));
                double target = stage == 1   ? (double)row.top_k
                                : stage == 2 ? p_target(kept)
                                             : table.uniform * kept;
                found[1] = min(most_at, bin_where(kind, target, stage == 3));
                if (i == 0) found[0] = found[1];
                if (least_at == BINS && most_at == BINS) break;
            }
            if (stage == 1) k_at = found[0];
            if (stage == 2) p_from = found[0], p_to = found[1];
            if (stage == 3) from = found[0], to = found[1];
            least_at = found[0], most_at = found[1];
        }
        if (use == USE_COLD) to = min(COLD_REACH, most_at);
    }

    // Returns the part of the list that holds the tokens of a bin, or all that count.
    inline u32 part(bool by_bins, u32 at) const {
        bool cuts = at == k_at || at == m_at || (at >= p_from && at <= p_to);
        return use == USE_COLD || (by_bins && cuts) ? 0 : 1;
    }

    // The logits of a range of bins, as in keys: the smallest, and how many.
    struct Range {
        u32 least, n;
        inline bool has(u32 logit) const { return logit - least < n; }
    };
    inline Range range(u32 first, u32 last) const {
        if (first >= BINS) return Range{0, 0};
        u32 least = bins.least(last);
        return Range{least, bins.least(first - 1) - least};
    }

    // Returns the keys of a bin, or all keys that count where bins cannot narrow them.
    inline Span span(bool by_bins, u32 at) const {
        if (by_bins) return Span{(u64)bins.least(at) << ID_BITS, (u64)bins.least(at - 1) << ID_BITS};
        u64 least = use == USE_NONE ? 1 : (u64)bins.least(use == USE_COLD ? COLD_REACH : REACH) << ID_BITS;
        return Span{least, (u64)(ordered(row.top + 0.0f) + 1) << ID_BITS};
    }

    inline Weigh weigh(u32 kind, bool by_bins, u32 at) const {
        double factor = by_bins ? table.factors.of(kind, at) : kind == COUNTED ? 1.0 : 1.0 / 8796093022208.0;
        return Weigh{kind, by_bins, true, (double)row.top, kind == PLAIN ? 1.0 : row.coldness, factor};
    }
};

// Returns the smallest float that passes min-p, as a key. For one warp.
inline u64 find_min_p(const Row& row) {
    // Invariant: `low` does not pass, `high` passes.
    u32 low = ordered(-inf_f32()), high = ordered(row.top);
#pragma unroll 1
    while (high - low > 1) {
        u32 step = (high - low) / 33 + 1, mine = low + step * (threadIdx.x % 32 + 1);
        bool passes = mine >= high || weight(from_ordered(mine), row.top, 1.0) >= (double)row.min_p;
        u32 lanes = __ballot_sync(ALL_LANES, passes), n = lanes == 0 ? 32 : __ffs(lanes) - 1;
        if (n < 32) high = min(high, low + step * (n + 1));
        low += step * n;
    }
    return (u64)high << ID_BITS;
}

// Returns token i of this thread in its block; without a key if there is none.
inline Entry token_of(const Row& row, const Entry* all, u32 i) {
    u32 at = blockIdx.x * (SELECT_CHUNKS * CHUNK) + i * SELECT_THREADS + threadIdx.x;
    return at < row.n_chunks * CHUNK ? all[at] : Entry{};
}

// Loads that a thread issues as early as possible.
struct Prefetched {
    Two sums[KINDS];
    Entry tokens[TOKENS_EACH];
    u32 n_chunks;  // chunks included in the bins

    inline Prefetched(const Row& row, const Entry* all, const State* state) : n_chunks(state->n_chunks) {
        u32 c = threadIdx.x;
#pragma unroll
        for (u32 kind = 0; kind < KINDS; kind++) {
            sums[kind] = kind < COUNTED || row.top_k > 0 ? ((const Two*)state->sums[kind])[c] : Two{0, 0};
        }
#pragma unroll
        for (u32 i = 0; i < TOKENS_EACH; i++) tokens[i] = token_of(row, all, i);
    }

    // Stores the sums in the table, in the layout of the bins.
    inline void store_sums(Table& table) const {
#pragma unroll
        for (u32 kind = 0; kind < KINDS; kind++) {
            table.sums[kind][threadIdx.x] = __longlong_as_double(sums[kind].a);
            table.sums[kind][ROW + threadIdx.x] = __longlong_as_double(sums[kind].b);
        }
    }
};

// Work that depends only on the parameters.
inline void prepare(Table& table, Row& row, u32 shared_bytes) {
    static_assert(N_FACTORS <= SELECT_THREADS, "a thread has one");
    row.coldness = 1.0 / (double)row.temperature;
    u32 c = threadIdx.x;
    if (c < N_FACTORS) table.factors.make(c, Bins(row.temperature, 0.0f).width, row.coldness);
    if (c == 0) table.n_both = 0, table.kept = 0, table.page = (shared_bytes - sizeof(Table)) / sizeof(Entry);
}

// Stores the largest and smallest of the chunks' bests in the table.
inline void find_ends(Table& table, const Row& row, const Chunk* chunks) {
    u32 c = threadIdx.x, warp = c / 32, most = 0, least = 0;
#pragma unroll 1
    for (u32 i = c; i < row.n_chunks; i += SELECT_THREADS) {
        u32 best = (u32)(chunks[i].best >> ID_BITS);
        most = max(most, best);
        // Chunks that hold only -inf add nothing.
        if (best > ordered(-inf_f32())) least = max(least, ~best);
    }
    most = __reduce_max_sync(ALL_LANES, most);
    least = __reduce_max_sync(ALL_LANES, least);
    if (c % 32 == 0) table.most[warp] = most, table.least[warp] = least;
}

// Computes running sums of the table's bins, from the best's downward. Call it after a barrier; it ends with
// one.
inline void sum_bins(Large& large) {
    Table& table = large.table;
    const Row& row = large.row;
    u32 c = threadIdx.x, warp = c / 32, lane = c % 32;
    // A thread's two bins are adjacent.
    double pairs[KINDS][2], sums[KINDS], plain[2];
#pragma unroll
    for (u32 kind = 0; kind < KINDS; kind++) {
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            double raw = table.sums[kind][place_of_bin(large.bins.entry(2 * c + i))];
            double sum = (double)(u64)__double_as_longlong(raw);
            pairs[kind][i] = sum * table.factors.of(kind, 2 * c + i);
            // Without a top-k, sums of weights serve as counts.
            if (kind == PLAIN) plain[i] = sum * (1.0 / BIN_SCALE);
            if (kind == COUNTED && row.top_k == 0) pairs[kind][i] = plain[i];
        }
        sums[kind] = pairs[kind][0] + pairs[kind][1];
    }
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
#pragma unroll
        for (u32 kind = 0; kind < KINDS; kind++) {
            double x = __shfl_up_sync(ALL_LANES, sums[kind], step);
            if (lane >= step) sums[kind] += x;
        }
    }
#pragma unroll
    for (u32 kind = 0; kind < KINDS; kind++) {
        if (lane == 31) table.warp_sums[kind][warp] = sums[kind];
    }
    // An otherwise idle warp draws the random number while the others wait; another finds min-p's key.
    if (c == SELECT_THREADS - 32) table.uniform = row.uniform();
    if (row.min_p > 0.0f && warp == 1) {
        u64 key = find_min_p(row);
        if (lane == 0) table.min_p_key = key;
    }
    __syncthreads();
#pragma unroll
    for (u32 kind = 0; kind < KINDS; kind++) {
        double last = sums[kind] + warp_reduce(lane < warp ? table.warp_sums[kind][lane] : 0.0, Add());
        table.sums[kind][c] = last - pairs[kind][1];
        table.sums[kind][ROW + c] = last;
        if (c % 16 == 15) table.every[kind][c / 16] = last;
    }
    if (row.min_p > 0.0f) large.min_p_key = table.min_p_key;
    __syncthreads();
}

// Lists the block's tokens that may matter: from the front, those in bins where a filter can cut; from the
// end, those in other bins in which the choice can fall. All threads call this.
inline void list_tokens(const Large& large, const Prefetched& prefetched, Entry* list, Tail* tail) {
    Table& table = large.table;
    u32 lane = threadIdx.x % 32, listed[2] = {0, 0};
    Large::Range choice = large.range(large.from, large.to), k = large.range(large.k_at, large.k_at);
    Large::Range p = large.range(large.p_from, large.p_to), m = large.range(large.m_at, large.m_at);
    if (large.use == USE_NONE) choice = Large::Range{1, 0xffffffffu};
#pragma unroll
    for (u32 i = 0; i < TOKENS_EACH; i++) {
        u32 logit = (u32)(prefetched.tokens[i].key >> ID_BITS);
        bool cut = p.has(logit) || k.has(logit) || m.has(logit) || (large.use == USE_COLD && choice.has(logit));
        if (cut) listed[0] |= 1u << i;
        if (!cut && choice.has(logit)) listed[1] |= 1u << i;
    }
    // Both counts in one number.
    u32 n = __popc(listed[0]) | __popc(listed[1]) << 16, sum = n, at = 0;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        u32 before = __shfl_up_sync(ALL_LANES, sum, step);
        if (lane >= step) sum += before;
    }
    if (lane == 31 && sum > 0) at = atomicAdd(&table.n_both, sum);
    at = __shfl_sync(ALL_LANES, at, 31) + sum - n;
    __syncthreads();
    u32 both = table.n_both, n_all = both % 65536 + both / 65536;
    if (both == 0) return;
    if (threadIdx.x < 2) {
        u32 more = threadIdx.x == 0 ? both % 65536 : both / 65536;
        table.at[threadIdx.x] = more > 0 ? atomicAdd(&tail->n_listed[threadIdx.x], more) : 0;
    }
    __syncthreads();
    u32 begin = table.at[0] + at % 65536, end = large.row.n_chunks * CHUNK - 1 - table.at[1] - at / 65536;
#pragma unroll
    for (u32 i = 0; i < TOKENS_EACH; i++) {
        if ((listed[0] >> i & 1) != 0) list[begin++] = prefetched.tokens[i];
        if ((listed[1] >> i & 1) != 0) list[end--] = prefetched.tokens[i];
    }
    // Knowing the ends of a long list resolves ties sooner.
    if (n_all <= MANY) return;
    u64 largest = 0, least = 0;
#pragma unroll
    for (u32 i = 0; i < TOKENS_EACH; i++) {
        if (((listed[0] | listed[1]) >> i & 1) == 0) continue;
        largest = Larger()(largest, prefetched.tokens[i].key);
        least = Larger()(least, ~prefetched.tokens[i].key);
    }
    largest = warp_largest(largest);
    least = warp_largest(least);
    if (lane == 0) atomicMax(&tail->largest, largest), atomicMax(&tail->least, least);
    if (threadIdx.x == 0) atomicAdd(&tail->n_bounded, n_all);
}

// The two parts of the list.
struct Lists {
    List parts[2];
    Span ends;  // bounds of all keys, as far as known
    bool fit;   // both parts fit in shared memory
};
