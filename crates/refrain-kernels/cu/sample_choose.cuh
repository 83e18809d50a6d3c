// sample_choose.cuh: the choice without a small top-k, based on sample_large.cuh and sample_long.cuh
#pragma once
#include "last.cuh"
#include "sample_long.cuh"

// Returns the choice from the list; 0 if there is none. All threads of the last block call this. Without
// bins, `total` receives the weight of all tokens relative to the best, at temperature 1.
inline u64 choose_from(const Large& large, const Lists& lists, const Entry* tokens, const Tail* tail, double& total) {
    Table& table = large.table;
    const Row& row = large.row;
    bool binned = large.use <= USE_COLD;
    u64 cut = 0, cut_kept = 0;  // the smallest key that is kept, and the kept weight in its bin, for the next stage
    u32 cut_at = BINS;
#pragma unroll 1
    for (u32 stage = binned ? 1 : 0;; stage++) {
        // Stages: total, then top-k, top-p and the choice.
        u32 kind = stage == 1 ? COUNTED : stage == 3 ? TEMPERED : PLAIN;
        bool by_bins = kind == TEMPERED ? large.use == USE_BINS : binned;
        if (stage == 1 && (!large.top_k_cuts() || (binned && large.k_at == BINS))) continue;
        if (stage == 2 && !large.top_p_cuts()) continue;
        bool known = by_bins;
        if (stage == 3 && row.min_p > 0.0f && large.min_p_key > cut) cut = large.min_p_key, known = false;
        if (cut > 0) cut_at = min(large.bins.below(key_logit(cut)), BINS);

        // The weight of everything kept, of which the target is a fraction.
        double kept = by_bins ? large.total(kind) : 0.0;
        if (stage != 1 && (!by_bins || cut_at < BINS)) {
            Weigh weigh = large.weigh(kind, by_bins, cut_at);
            u64 sum = cut_kept;
            Span span = large.span(by_bins, cut_at).within(lists.ends, cut);
            if (!known) sum = weight_of(table, lists.parts[large.part(by_bins, cut_at)], weigh, span);
            kept = (by_bins ? large.before(kind, cut_at) : 0.0) + weigh.real(sum);
        }
        if (stage == 0) {
            total = kept;
            continue;
        }
        double target = stage == 1 ? (double)row.top_k : stage == 2 ? large.p_target(kept) : table.uniform * kept;
        u32 at = by_bins ? min(min(cut_at, BINS - 1), large.bin_where(kind, target, stage == 3)) : 0;
        Weigh weigh = large.weigh(kind, by_bins, at);
        double need = (target - (by_bins ? large.before(kind, at) : 0.0)) / weigh.factor;
        need = stage == 3 ? floor(need) + 1.0 : ceil(need);
        // More than the maximum, and NaN, mean everything.
        u64 whole = need <= 1.0 ? 1 : need < 9e18 ? (u64)need : ~(u64)0;
        Weigh other = large.weigh(stage == 1 && large.top_p_cuts() ? PLAIN : TEMPERED, by_bins, at);
        other.wanted = stage < 3;
        u32 slot = 0;
        while (slot < LONG_SLOTS && (lists.fit || !by_bins || long_at(large, slot) != at)) slot++;
        Left left = {lists.parts[large.part(by_bins, at)], large.span(by_bins, at).within(lists.ends, cut), 0, whole, 0};
        if (slot < LONG_SLOTS) left = one_part(large, slot, at, lists, tokens, tail, weigh, whole, other);
        u64 key = find(table, left.list, weigh, left.span, left.base, left.need, other, cut_kept);
        cut_kept += left.kept;
        if (stage == 3) return key;
        cut = key;
    }
}

// Returns the choice from n tokens, at most LIST, one per thread: all tokens that the filters can keep, and
// nothing else. All threads of the last block call this; thread 0 has the result.
inline u64 choose_short(const Large& large, const Entry& mine, u32 n) {
    Table& table = large.table;
    Desk& desk = *(Desk*)table.list();
    u32 c = threadIdx.x;
    if (c < n) desk.list[c] = mine.key;
    if (c < 8) desk.list[n + c] = 0;
    __syncthreads();
    if (c < n) {
        u32 larger = 0;
#pragma unroll 4
        for (u32 i = 0; i < n; i += 2) {
            Two two = ((const Two*)desk.list)[i / 2];
            larger += (u32)(two.a > mine.key) + (u32)(two.b > mine.key);
        }
        u32 at = large.bins.below(key_logit(mine.key));
        // A token that fails min-p is not chosen, but counts for top-p.
        bool passes = !(large.row.min_p > 0.0f) || mine.key >= large.min_p_key;
        desk.sorted[larger] = mine.key;
        desk.weights[larger] = (double)mine.weights[PLAIN] * table.factors.of(PLAIN, at);
        desk.tempered[larger] = passes ? (double)mine.weights[TEMPERED] * table.factors.of(TEMPERED, at) : 0.0;
    }
    __syncthreads();
    if (c >= 32) return 0;
    Row row = large.row;
    row.top_k = 0, row.min_p = 0.0f;
    row.total = large.total(PLAIN);
    return desk.sorted[choose_listed<LIST / 32>(row, desk, n, table.uniform)];
}

// Makes the choice. All threads call this. Returns true in the last block, which has the result (0 if nothing
// has weight) and the logarithm of the total weight relative to the best.
inline bool choose_large(Table& table, Row& row, State* state, const Chunk* chunks, const Entry* tokens, Entry* list,
                         Tail* tail, u64& chosen, double& log_total) {
    u32 c = threadIdx.x, lane = c % 32;
    Prefetched prefetched(row, tokens, state);
    find_ends(table, row, chunks);
    prefetched.store_sums(table);
    __syncthreads();
    row.top = from_ordered(__reduce_max_sync(ALL_LANES, table.most[lane % SELECT_WARPS]));
    float least = from_ordered(~__reduce_max_sync(ALL_LANES, table.least[lane % SELECT_WARPS]));
    // If nothing passes min-p, the best is kept, as with a top-p of nothing.
    if (row.min_p > 1.0f) row.min_p = 0.0f, row.top_p = -1.0f;
    bool proper = row.top != inf_f32() && row.top != -inf_f32();
    Bins bins(row.temperature, row.top);
    Use use = row.temperature < COLDEST ? USE_COLD : USE_BINS;
    if (bins.below(least) > REACH) use = USE_REACH;
    if (prefetched.n_chunks != row.n_chunks || row.temperature > HOTTEST || fabsf(row.top) > MOST_BINNED) use = USE_NONE;
    Large large = {table, row, bins, use};
    if (proper) {
        sum_bins(large);
        large.scout();
        list_tokens(large, prefetched, list, tail);
        add_long_parts(large, tokens, tail);
    }
    __syncthreads();
    if (c == 0) table.last = is_last(&tail->n_blocks, gridDim.x);
    // Computed while the others wait. The best alone weighs 1, so rounding must not take the logarithm below
    // 0.
    if (c == 32) table.log_total = fmax(log(large.total(PLAIN) / BIN_SCALE) + bins.upper_edge(0) - (double)row.top, 0.0);
    __syncthreads();
    if (table.last == 0) return false;

    u32 n_cuts = tail->n_listed[0], n_others = tail->n_listed[1], n = n_cuts + n_others, end = row.n_chunks * CHUNK;
    const u32 AT_ONCE = 4;
    // Prefetch: whether these entries exist is known later.
    Entry some[AT_ONCE] = {list[c], list[SELECT_THREADS + c], list[end - 1 - c], list[end - 1 - SELECT_THREADS - c]};
#pragma unroll 1
    for (u32 i = c; i < sizeof(State) / 16; i += SELECT_THREADS) ((Two*)state)[i] = Two{0, 0};
    if (!proper) return true;
    // The weights guarantee n <= LIST; if that ever failed, the general path below would be correct too.
    if (large.is_short && n <= LIST) {
        chosen = choose_short(large, some[0], n);
        if (c == 0) log_total = table.log_total;
        return true;
    }
    bool fit = n <= table.page, bounded = !fit && tail->n_bounded == n;
    const Entry* others = list + (end - n_others);
    Lists lists = {{{list, n_cuts, 0, fit}, {others, n_others, fit ? n_cuts : 0, fit}},
                   bounded ? Span{~tail->least, tail->largest + 1} : Span{0, ~(u64)0}, fit};
    if (max(n_cuts, n_others) <= 2 * SELECT_THREADS) {
#pragma unroll
        for (u32 j = 0; j < AT_ONCE; j++) {
            u32 at = j % 2 * SELECT_THREADS + c;
            if (at < (j < 2 ? n_cuts : n_others)) table.list()[j < 2 ? at : n_cuts + at] = some[j];
        }
    } else if (fit) {
#pragma unroll 1
        for (u32 i = c; i < n; i += AT_ONCE * SELECT_THREADS) {
#pragma unroll
            for (u32 j = 0; j < AT_ONCE; j++) {
                u32 from = min(i + j * SELECT_THREADS, n - 1);
                some[j] = from < n_cuts ? list[from] : others[from - n_cuts];
            }
#pragma unroll
            for (u32 j = 0; j < AT_ONCE; j++) {
                if (i + j * SELECT_THREADS < n) table.list()[i + j * SELECT_THREADS] = some[j];
            }
        }
    }
    __syncthreads();
    double total = 0.0;
    chosen = choose_from(large, lists, tokens, tail, total);
    if (c == 0) log_total = use <= USE_COLD ? table.log_total : log(total);
    return true;
}
