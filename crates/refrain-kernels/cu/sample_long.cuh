// sample_long.cuh: bins with more tokens than one block should search, as flat logits produce them
//
// All blocks can tell from the bins that such a bin matters. Each block deals its tokens of that bin to
// parts, by logit and by id, and adds the parts to the row's; the last block then reads only the tokens of
// one part. If all logits on the list are equal, the part by id gives its tokens' locations.
#pragma once
#include "sample_large.cuh"

// Ids per part.
const u32 PART_IDS = (1u << ID_BITS) / PARTS;

// Returns the bin of a slot of the tail: where top-p cuts, and both ends of the range in which the choice can
// fall. BINS if that bin is not long, or already has a slot.
inline u32 long_at(const Large& large, u32 slot) {
    if (large.use != USE_BINS) return BINS;
    u32 at = slot == 0 ? large.p_from : slot == 1 ? large.from : large.to;
    if (slot == 0 && large.p_to != at) return BINS;
    if (slot > 0 && (at == large.p_from && large.p_from == large.p_to)) return BINS;
    if ((slot == 2 && at == large.from) || at >= BINS) return BINS;
    // Weights at temperature 1 are not much less than a whole weight, so they serve as a count.
    double whole = LONG * BIN_SCALE * large.table.factors.of(PLAIN, at);
    return large.upto(PLAIN, at) - large.before(PLAIN, at) > whole ? at : BINS;
}

// Adds the block's tokens of long bins to their parts. All threads call this.
inline void add_long_parts(const Large& large, const Entry* tokens, Tail* tail) {
    Table& table = large.table;
    // All kinds by logit, then all kinds by id.
    const u32 N = 2 * KINDS;
    u64* parts = (u64*)table.list();
    static_assert(N * PARTS * sizeof(u64) <= LEAST_PAGE * sizeof(Entry), "no room");
#pragma unroll 1
    for (u32 slot = 0; slot < LONG_SLOTS; slot++) {
        u32 at = long_at(large, slot);
        if (at == BINS) continue;
        Span span = large.span(true, at);
        u32 shift = span.shift();
#pragma unroll
        for (u32 i = 0; i < N; i++) parts[i * PARTS + threadIdx.x] = 0;
        __syncthreads();
#pragma unroll 1
        for (u32 i = 0; i < TOKENS_EACH; i++) {
            Entry token = token_of(large.row, tokens, i);
            bool has = span.has(token.key);
            u32 by_logit = has ? (u32)((span.end - 1 - token.key) >> shift) : PARTS;
            u32 by_id = has ? key_id(token.key) / PART_IDS : PARTS;
#pragma unroll 1
            for (u32 j = 0; j < N; j++) {
                u32 kind = j % KINDS;
                if (kind == COUNTED && !large.top_k_cuts()) continue;
                u32 w = kind == PLAIN ? token.weights[PLAIN] : kind == TEMPERED ? token.weights[TEMPERED] : 1;
                add_part(parts + j * PARTS, j < KINDS ? by_logit : by_id, w);
            }
        }
        __syncthreads();
#pragma unroll
        for (u32 i = 0; i < N; i++) {
            u64 sum = parts[i * PARTS + threadIdx.x];
            if (sum != 0) atomicAdd(&tail->parts[slot][i][threadIdx.x], sum);
        }
        __syncthreads();
    }
}

// Remaining search in a long bin after one of its parts is selected: the tokens, the range of keys, and the
// sums before them.
struct Left {
    List list;
    Span span;
    u64 base, need, kept;
};

inline Left one_part(const Large& large, u32 slot, u32 at, const Lists& lists, const Entry* tokens, const Tail* tail,
                     const Weigh& weigh, u64 need, const Weigh& other) {
    Table& table = large.table;
    const Row& row = large.row;
    u32 c = threadIdx.x;
    Span span = large.span(true, at);
    u32 shift = span.shift(), logit = (u32)(lists.ends.least >> ID_BITS);
    bool by_id = logit == (u32)((lists.ends.end - 1) >> ID_BITS);
    const u64(*parts)[PARTS] = tail->parts[slot] + (by_id ? KINDS : 0);
    table.parts[place_of_part(c)] = parts[weigh.kind][c];
    __syncthreads();
    if (c < 32) choose_part(table, 0, need);
    __syncthreads();
    u32 part = table.part;
    u64 base = table.base;
    need = table.need;
    u64 kept = sum_all(table, c < part ? parts[other.kind][c] : 0);

    // Compacts the part's tokens.
    if (c == 0) table.n_few = 0;
    __syncthreads();
    auto take = [&](const Entry& token) {
        if (!span.has(token.key)) return;
        u32 to = atomicAdd(&table.n_few, 1u);
        if (to < table.page) table.list()[to] = token;
    };
    if (by_id) {
        span = Span{(u64)logit << ID_BITS, (u64)(logit + 1) << ID_BITS};
        for (u32 i = c; i < PART_IDS; i += SELECT_THREADS) {
            u32 id = part * PART_IDS + i;
            if (id >= row.vocab) continue;
            // The location in which the first kernel stores it.
            Deal deal = {id / 4 % row.n_chunks, row.n_chunks};
            u32 place = deal.place((i32)id);
            take(tokens[deal.chunk * CHUNK + place % 2 * (CHUNK / 2) + place / 2]);
        }
    } else {
        u64 end = span.end - ((u64)part << shift), least = end - ((u64)1 << shift);
        span = Span{Larger()(least, span.least), end};
        const List& list = lists.parts[large.part(true, at)];
        const u32 AT_ONCE = 4;
#pragma unroll 1
        for (u32 i = c; i < list.n; i += AT_ONCE * SELECT_THREADS) {
            Entry some[AT_ONCE];
#pragma unroll
            for (u32 j = 0; j < AT_ONCE; j++) some[j] = list.tokens[min(i + j * SELECT_THREADS, list.n - 1)];
#pragma unroll
            for (u32 j = 0; j < AT_ONCE; j++) {
                if (i + j * SELECT_THREADS < list.n) take(some[j]);
            }
        }
    }
    __syncthreads();
    u32 n = table.n_few;
    __syncthreads();
    // More tokens than a page with nearly equal logits are rare; they are searched page by page.
    return Left{n <= table.page ? List{nullptr, n, 0, true} : lists.parts[large.part(true, at)], span, base, need, kept};
}
