// sample_large.cuh: the choice without a small top-k, for blocks of sample.cu that have four chunks each.
//
// Every block finds in the row's bins where the filters can cut and where the choice can lie, and puts those of its keys
// that are there on a list. The last block to do so finds the keys of the cuts and of the choice on it. Where the bins
// are of no use, the list has all keys that may count, and everything is found on it.
#pragma once
#include "last.cuh"
#include "sample_find.cuh"

// How the bins of a row may be used.
enum Use {
    USE_BINS,   // for cuts and the choice
    USE_COLD,   // for cuts; what can be chosen lies in the best's bin or a few below
    USE_REACH,  // for nothing: some chunk is too far below the best, but what is not near that counts for nothing
    USE_NONE,   // for nothing
};

// What a block knows of its row behind the first barriers.
struct Large {
    Table& table;
    const Row& row;
    Bins bins;
    Use use;
    // Bins below the best, BINS for none: where top-k cuts, from where to where top-p can, where min-p does, and where
    // the choice can lie.
    u32 k_at, p_from, p_to, m_at, from, to;
    u64 min_p_key;

    inline double factor(u32 kind, u32 at) const { return table.high[kind][at / 32] * table.low[kind][at % 32]; }
    inline double before(u32 kind, u32 at) const { return at > 0 ? table.sums[kind][at - 1] : 0.0; }
    inline double total(u32 kind) const { return table.sums[kind][BINS - 1]; }
    inline bool top_p_cuts() const { return row.top_p < 1.0f; }

    // The first bin where the target is reached, BINS when none. For whole warps.
    template <typename T> inline u32 bin_where(const T* sums, double target, bool beyond) const {
        const u32 STEP = BINS / 32;
        u32 lane = threadIdx.x % 32;
        u32 steps = __ballot_sync(ALL_LANES, reached((double)sums[STEP * lane + STEP - 1], target, beyond));
        if (steps == 0) return BINS;
        u32 first = STEP * (__ffs(steps) - 1), n = 0;
#pragma unroll
        for (u32 i = 0; i < STEP; i += 32) {
            n += __popc(__ballot_sync(ALL_LANES, !reached((double)sums[first + i + lane], target, beyond)));
        }
        return first + n;
    }

    inline double p_target(double candidates) const { return fmax((double)row.top_p * candidates, 1e-300); }

    // Where everything can lie.
    inline void scout() {
        k_at = p_from = p_to = m_at = BINS;
        from = 0;
        to = use == USE_NONE ? 0xffffffffu : REACH;
        if (use >= USE_REACH) return;
        if (row.top_k > 0) k_at = bin_where(table.counts, (double)row.top_k, false);
        if (top_p_cuts()) {
            bool all = k_at == BINS;
            p_from = min(k_at, bin_where(table.sums[PLAIN], p_target(all ? total(PLAIN) : before(PLAIN, k_at)), false));
            p_to = all ? p_from
                       : min(k_at, bin_where(table.sums[PLAIN], p_target(table.sums[PLAIN][k_at]), false));
        }
        if (row.min_p > 0.0f) m_at = min(bins.below(key_logit(min_p_key)), BINS);
        u32 cut_from = min(min(k_at, p_from), m_at), cut_to = min(min(k_at, p_to), m_at);
        if (use == USE_COLD) {
            to = min(COLD_REACH, cut_to);
            return;
        }
        double least = cut_from < BINS ? before(TEMPERED, cut_from) : total(TEMPERED);
        double most = cut_to < BINS ? table.sums[TEMPERED][cut_to] : total(TEMPERED);
        from = min(cut_to, bin_where(table.sums[TEMPERED], table.uniform * least, true));
        to = min(cut_to, bin_where(table.sums[TEMPERED], table.uniform * most, true));
    }

    inline bool lists(u64 key) const {
        u32 at = bins.below(key_logit(key));
        if (at >= from && at <= to) return true;
        return at < BINS && (at == k_at || at == m_at || (at >= p_from && at <= p_to));
    }

    // The keys of a bin, or all that count when the bins do not say more.
    inline Span span(bool by_bins, u32 at) const {
        if (by_bins) return Span{bins.least_key(at), bins.least_key(at - 1)};
        u64 end = (u64)(ordered(row.top + 0.0f) + 1) << ID_BITS;
        return Span{use == USE_NONE ? 1 : bins.least_key(use == USE_COLD ? COLD_REACH : REACH), end};
    }

    // How they are weighed: relative to the bin's edge, as the bin's sum was, or to the best.
    inline Weigh weigh(u32 kind, bool by_bins, u32 at) const {
        const double ONE = 8796093022208.0;  // 2^43: the sum of a row has 63 bits
        double coldness = kind == PLAIN ? 1.0 : row.coldness;
        return by_bins ? Weigh{bins.upper_edge(at), coldness, BIN_SCALE, factor(kind, at), false}
                       : Weigh{(double)row.top, coldness, ONE, 1.0 / ONE, false};
    }
};

// The least float that min-p lets pass, as a key. For one warp.
inline u64 find_min_p(const Row& row) {
    // The first does not pass, the second does.
    u32 low = ordered(-inf_f32()), high = ordered(row.top);
    while (high - low > 1) {
        u32 step = (high - low) / 33 + 1, mine = low + step * (threadIdx.x % 32 + 1);
        bool passes = mine >= high || weight(from_ordered(mine), row.top, 1.0) >= (double)row.min_p;
        u32 lanes = __ballot_sync(ALL_LANES, passes), n = lanes == 0 ? 32 : __ffs(lanes) - 1;
        if (n < 32) high = min(high, low + step * (n + 1));
        low += step * n;
    }
    return (u64)high << ID_BITS;
}

const u32 BINS_EACH = BINS / SELECT_THREADS;

// What a thread asks for as soon as it may.
struct Asked {
    Two weights[2][BINS_EACH / 2];
    u32 counts[BINS_EACH];
    Two keys[KEYS_EACH / 2];
    u32 n_chunks;  // that are in the bins

    inline Asked(const Row& row, const State* state) : n_chunks(state->n_chunks) {
        u32 c = threadIdx.x;
#pragma unroll
        for (u32 i = 0; i < BINS_EACH / 2; i++) {
            weights[PLAIN][i] = ((const Two*)state->weights[PLAIN])[i * SELECT_THREADS + c];
            weights[TEMPERED][i] = ((const Two*)state->weights[TEMPERED])[i * SELECT_THREADS + c];
        }
#pragma unroll
        for (u32 i = 0; i < BINS_EACH; i++) counts[i] = row.top_k > 0 ? state->counts[i * SELECT_THREADS + c] : 0;
#pragma unroll
        for (u32 i = 0; i < KEYS_EACH / 2; i++) {
            u32 pair = blockIdx.x * (PAGE / 2) + i * SELECT_THREADS + c;
            keys[i] = pair < row.n_chunks * (CHUNK / 2) ? ((const Two*)row.keys)[pair] : Two{0, 0};
        }
    }

    // Leaves the bins in the table, as they lie there.
    inline void leave(Table& table) const {
        u32 c = threadIdx.x;
#pragma unroll
        for (u32 i = 0; i < BINS_EACH / 2; i++) {
            ((Two*)table.sums[PLAIN])[i * SELECT_THREADS + c] = weights[PLAIN][i];
            ((Two*)table.sums[TEMPERED])[i * SELECT_THREADS + c] = weights[TEMPERED][i];
        }
#pragma unroll
        for (u32 i = 0; i < BINS_EACH; i++) table.counts[i * SELECT_THREADS + c] = counts[i];
    }
};

// Leaves in the table the ends of the chunks' bests, what makes weights of a bin relative to the best's, and the random
// number.
inline void prepare(Table& table, Row& row, const Chunk* chunks) {
    u32 c = threadIdx.x, warp = c / 32, most = 0, least = 0;
    for (u32 i = c; i < row.n_chunks; i += SELECT_THREADS) {
        u32 best = (u32)(chunks[i].best >> ID_BITS);
        most = max(most, best);
        // Chunks that have nothing but -inf add nothing.
        if (best > ordered(-inf_f32())) least = max(least, ~best);
    }
    most = __reduce_max_sync(ALL_LANES, most);
    least = __reduce_max_sync(ALL_LANES, least);
    if (c % 32 == 0) table.most[warp] = most, table.least[warp] = least;
    const u32 N = BINS / 32 + 32;
    double width = Bins(row.temperature, 0.0f).width;
    row.coldness = 1.0 / (double)row.temperature;
    if (c < 2 * N) {
        u32 kind = c / N, i = c % N, n = i < BINS / 32 ? 32 * i : i - BINS / 32;
        double factor = exp(-(double)n * width * (kind == PLAIN ? 1.0 : row.coldness));
        (i < BINS / 32 ? table.high[kind][i] : table.low[kind][i - BINS / 32]) = factor;
    }
    if (c == SELECT_THREADS - 32) table.uniform = row.uniform();
    if (c == 0) table.n = 0;
}

// Makes running sums of the bins that lie in the table, from the best's downward. Behind a barrier, and with one at its
// end.
inline void sum_bins(Large& large) {
    Table& table = large.table;
    u32 c = threadIdx.x, warp = c / 32, lane = c % 32;
    double sums[2][BINS_EACH];
    u32 counts[BINS_EACH];
#pragma unroll
    for (u32 i = 0; i < BINS_EACH; i++) {
        u32 at = BINS_EACH * c + i, entry = large.bins.entry(at);
#pragma unroll
        for (u32 kind = 0; kind < 2; kind++) {
            double w = (double)((const u64*)table.sums[kind])[entry] * large.factor(kind, at);
            sums[kind][i] = i > 0 ? sums[kind][i - 1] + w : w;
        }
        counts[i] = table.counts[entry] + (i > 0 ? counts[i - 1] : 0);
    }
    double plain = sums[PLAIN][BINS_EACH - 1], tempered = sums[TEMPERED][BINS_EACH - 1];
    u32 n = counts[BINS_EACH - 1];
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        double a = __shfl_up_sync(ALL_LANES, plain, step), b = __shfl_up_sync(ALL_LANES, tempered, step);
        u32 m = __shfl_up_sync(ALL_LANES, n, step);
        if (lane >= step) plain += a, tempered += b, n += m;
    }
    if (lane == 31) {
        table.warp_sums[PLAIN][warp] = plain;
        table.warp_sums[TEMPERED][warp] = tempered;
        table.warp_counts[warp] = n;
    }
    // What the lanes before this one have.
    double a = __shfl_up_sync(ALL_LANES, plain, 1), b = __shfl_up_sync(ALL_LANES, tempered, 1);
    u32 m = __shfl_up_sync(ALL_LANES, n, 1);
    if (lane == 0) a = 0.0, b = 0.0, m = 0;
    // Another warp than that with the least to do.
    if (large.row.min_p > 0.0f && warp == 1) {
        u64 key = find_min_p(large.row);
        if (lane == 0) table.min_p_key = key;
    }
    __syncthreads();
    double before[2] = {0.0, 0.0};
    u32 n_before = 0;
#pragma unroll
    for (u32 i = 0; i < SELECT_WARPS; i++) {
        if (i >= warp) continue;
        before[PLAIN] += table.warp_sums[PLAIN][i];
        before[TEMPERED] += table.warp_sums[TEMPERED][i];
        n_before += table.warp_counts[i];
    }
    before[PLAIN] += a, before[TEMPERED] += b, n_before += m;
#pragma unroll
    for (u32 i = 0; i < BINS_EACH; i++) {
        table.sums[PLAIN][BINS_EACH * c + i] = before[PLAIN] + sums[PLAIN][i];
        table.sums[TEMPERED][BINS_EACH * c + i] = before[TEMPERED] + sums[TEMPERED][i];
        table.counts[BINS_EACH * c + i] = n_before + counts[i];
    }
    if (large.row.min_p > 0.0f) large.min_p_key = table.min_p_key;
    __syncthreads();
}

// Puts those of the block's keys on the list that may matter. All threads call it.
inline void list_keys(const Large& large, const Asked& asked, u64* list, Tail* tail) {
    Table& table = large.table;
    u32 lane = threadIdx.x % 32, listed = 0;
#pragma unroll
    for (u32 i = 0; i < KEYS_EACH; i++) {
        u64 key = i % 2 == 0 ? asked.keys[i / 2].a : asked.keys[i / 2].b;
        if (key != 0 && large.lists(key)) listed |= 1u << i;
    }
    u32 n = __popc(listed), sum = n, at = 0;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        u32 before = __shfl_up_sync(ALL_LANES, sum, step);
        if (lane >= step) sum += before;
    }
    if (lane == 31 && sum > 0) at = atomicAdd(&table.n, sum);
    at = __shfl_sync(ALL_LANES, at, 31) + sum - n;
    __syncthreads();
    if (table.n == 0) return;
    if (threadIdx.x == 0) table.at = atomicAdd(&tail->n_listed, table.n);
    __syncthreads();
    at += table.at;
    u64 largest = 0, least = 0;
#pragma unroll
    for (u32 i = 0; i < KEYS_EACH; i++) {
        u64 key = i % 2 == 0 ? asked.keys[i / 2].a : asked.keys[i / 2].b;
        if ((listed >> i & 1) == 0) continue;
        list[at++] = key;
        largest = Larger()(largest, key);
        least = Larger()(least, ~key);
    }
    // Ties are told apart sooner when the ends of a long list are known.
    if (table.n <= PAGE / 16) return;
    largest = warp_largest(largest);
    least = warp_largest(least);
    if (lane == 0) atomicMax(&tail->largest, largest), atomicMax(&tail->least, least);
    if (threadIdx.x == 0) atomicAdd(&tail->n_bounded, table.n);
}

// The choice from the list, at most those between `ends`; 0 when there is nothing to choose from. All threads of the
// last block call it. `total` gets the weight of all tokens relative to the row's best, at temperature 1.
inline u64 choose_from(const Large& large, const List& list, Span ends, double& total) {
    Table& table = large.table;
    const Row& row = large.row;
    bool binned = large.use <= USE_COLD;
    u64 cut = 0;  // the least key that is kept
    u32 cut_at = BINS;
    // The best alone weighs 1, whatever rounding says.
    if (binned) total = fmax(large.total(PLAIN) / BIN_SCALE * exp(large.bins.upper_edge(0) - (double)row.top), 1.0);
    // One loop, so that its code is there once: it is fetched once and mostly used once.
#pragma unroll 1
    for (u32 stage = binned ? 1 : 0;; stage++) {
        // All, then top-k, top-p and the choice.
        u32 kind = stage == 3 ? TEMPERED : PLAIN;
        bool by_bins = kind == TEMPERED ? large.use == USE_BINS : binned, counts = stage == 1;
        if (counts && (row.top_k == 0 || row.top_k >= row.vocab || (binned && large.k_at == BINS))) continue;
        if (stage == 2 && !large.top_p_cuts()) continue;
        if (stage == 3 && row.min_p > 0.0f) cut = Larger()(cut, large.min_p_key);
        if (cut > 0) cut_at = min(large.bins.below(key_logit(cut)), BINS);

        // Of which a part is wanted: all that is kept.
        double wanted = 0.0;
        if (!counts) {
            wanted = by_bins ? large.total(kind) : 0.0;
            if (!by_bins || cut_at < BINS) {
                Weigh weigh = large.weigh(kind, by_bins, cut_at);
                u64 kept = weight_of(table, list, weigh, large.span(by_bins, cut_at).within(ends, cut));
                wanted = (by_bins ? large.before(kind, cut_at) : 0.0) + weigh.real(kept);
            }
        }
        if (stage == 0) {
            total = wanted;
            continue;
        }
        double target = counts ? (double)row.top_k : stage == 2 ? large.p_target(wanted) : table.uniform * wanted;
        u32 at = cut_at;
        if (by_bins) at = counts ? large.k_at : min(at, large.bin_where(table.sums[kind], target, stage == 3));
        Weigh weigh = large.weigh(kind, by_bins, at);
        double before = !by_bins || at == 0 ? 0.0 : counts ? (double)table.counts[at - 1] : large.before(kind, at);
        if (counts) weigh.count = true, weigh.factor = 1.0;
        u64 key = find(table, list, weigh, large.span(by_bins, at).within(ends, cut), before, target, stage == 3);
        if (stage == 3) return key;
        cut = key;
    }
}

// The choice. All threads call it, and those of the last block, which it is true for, have the answer, which is 0 when
// there is nothing to weigh.
inline bool choose_large(Table& table, Row& row, State* state, const Chunk* chunks, u64* list, Tail* tail, u64& chosen) {
    u32 c = threadIdx.x;
    Asked asked(row, state);
    prepare(table, row, chunks);
    asked.leave(table);
    __syncthreads();
    u32 lane = c % 32;
    row.top = from_ordered(__reduce_max_sync(ALL_LANES, table.most[lane % SELECT_WARPS]));
    float least = from_ordered(~__reduce_max_sync(ALL_LANES, table.least[lane % SELECT_WARPS]));
    // What min-p keeps when nothing passes is the best: what a top-p of nothing keeps.
    if (row.min_p > 1.0f) row.min_p = 0.0f, row.top_p = -1.0f;
    bool proper = row.top != inf_f32() && row.top != -inf_f32();
    Bins bins(row.temperature, row.top);
    Use use = asked.n_chunks != row.n_chunks || row.temperature > HOTTEST || fabsf(row.top) > MOST_BINNED ? USE_NONE
              : bins.below(least) > REACH                                                                ? USE_REACH
              : row.temperature < COLDEST                                                                ? USE_COLD
                                                                                                         : USE_BINS;
    Large large = {table, row, bins, use};
    if (proper) {
        sum_bins(large);
        large.scout();
        list_keys(large, asked, list, tail);
    }
    __syncthreads();
    if (c == 0) table.last = is_last(&tail->n_blocks, gridDim.x);
    __syncthreads();
    if (table.last == 0) return false;

    List listed = {list, tail->n_listed};
    u64 k[KEYS_EACH];
    listed.load(k, 0);
    for (u32 i = c; i < sizeof(State) / 16; i += SELECT_THREADS) ((Two*)state)[i] = Two{0, 0};
    if (!proper) return true;
    if (listed.n <= PAGE) listed.store(table, k);
    bool bounded = listed.n > PAGE && tail->n_bounded == listed.n;
    Span ends = bounded ? Span{~tail->least, tail->largest + 1} : Span{0, ~(u64)0};
    __syncthreads();
    chosen = choose_from(large, listed, ends, row.total);
    return true;
}
