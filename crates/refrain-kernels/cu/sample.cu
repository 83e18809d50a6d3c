// sample.cu: one token from each row of logits
//
//   logits    [n, vocab]      f32, rows of consecutive elements
//   params    [n, 8]          f32: temperature, top-k, top-p, min-p, repeat, frequency, presence
//   history   [n, n_history]  i32, negative: empty
//   bias_ids  [n, n_bias]     i32, negative: empty
//   bias      [n, n_bias]     f32
//   rng       [n, 4]          u32: seed low, seed high, position
//   token     [n]             i32
//   logprob   [n]             f32: under the adjusted logits, at temperature 1
//   scratch   for each row, C = ceil(vocab / 1024): keys [1024 C] u64, weights [1024 C] f64 (or the best of each 64
//             keys [16 C] u64), weights at the temperature [1024 C] f64, chunks [C] { best u64, sum f64 }, and of
//             each chunk's bins weights [C, 64] f64, weights at the temperature [C, 64] f64, counts [C, 64] u16
//
// Bias and penalties change the logits; NaN counts as -inf. Candidates are ordered by logit, then by the smaller id.
// Top-k, top-p and min-p cut that order; Philox at (seed, position) chooses among the rest at the temperature. A
// temperature of 0 or less takes the best.
//
// A candidate's key is its logit's bits, made to compare as numbers do, over its id's complement, so that keys are
// unique and larger is better. The first kernel deals the tokens to C chunks, four at a time; the second takes a short
// list of all candidates, sorts nothing but that, and chooses. With a top-k up to 64 the list has every key from the
// k-th best of the chunks' heads upward. Otherwise the first kernel sorts each chunk and says how much of it lies
// above each of 64 logits. The sums of that over all chunks tell between which two of them the filters cut. If few
// keys lie down to there, those are the list. If not, the key of each cut and of the choice is searched for
// (sample_cut.cuh).
//
// Launch    sample_chunks: grid (C, n), block (512), shared 0
//           sample_select: grid (n), block (1024), shared 96 KiB
// Requires  vocab at most 2^20
// Adjusted logits are rounded as on the CPU, so the best is the same to the bit. Weights and sums in f64, fixed order:
// same choice every run. Capture: safe; all parameters are read at each run.
#include "sample_cut.cuh"
#include "sample_small.cuh"
#include "view.cuh"

// Ids of tokens, of which each thread has asked for one early.
struct Ids {
    const i32* ids;
    u32 n;
    i32 mine;

    inline Ids(const i32* all, u32 row, u32 n_ids) : ids(all + (u64)row * n_ids), n(n_ids), mine(-1) {
        if (threadIdx.x < n) mine = ids[threadIdx.x];
    }

    // Whether any of those that this thread looks at is a token of the chunk.
    inline bool any_here(Deal deal, u32 vocab) const {
        bool any = deal.has(mine) && (u32)mine < vocab;
        for (u32 j = threadIdx.x + blockDim.x; j < n; j += blockDim.x) {
            any = any || (deal.has(ids[j]) && (u32)ids[j] < vocab);
        }
        return any;
    }
};

// Adds the biases of this chunk, each token's in their order.
inline void add_bias(float* l, Deal deal, u32 vocab, const i32* ids, const float* bias, u32 n_bias) {
    __shared__ float logits[CHUNK];
    __shared__ u32 times[CHUNK];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        logits[2 * threadIdx.x + r] = l[r];
        times[2 * threadIdx.x + r] = 0;
    }
    __syncthreads();
    for (u32 j = threadIdx.x; j < n_bias; j += blockDim.x) {
        if (deal.has(ids[j]) && (u32)ids[j] < vocab) atomicAdd(&times[deal.place(ids[j])], 1u);
    }
    __syncthreads();
    for (u32 j = threadIdx.x; j < n_bias; j += blockDim.x) {
        i32 id = ids[j];
        if (!deal.has(id) || (u32)id >= vocab) continue;
        u32 place = deal.place(id);
        // A token's first entry adds all of them.
        bool first = true;
        if (times[place] > 1) {
            for (u32 i = 0; i < j; i++) first = first && ids[i] != id;
        }
        if (!first) continue;
        float sum = logits[place];
        for (u32 i = j, left = times[place]; left > 0; i++) {
            if (ids[i] != id) continue;
            sum = __fadd_rn(sum, bias[i]);
            left--;
        }
        logits[place] = sum;
    }
    __syncthreads();
#pragma unroll
    for (int r = 0; r < 2; r++) l[r] = logits[2 * threadIdx.x + r];
}

inline void penalise(float* l, Deal deal, u32 vocab, const i32* history, u32 n_history, float repeat, float frequency,
                     float presence) {
    __shared__ u32 times[CHUNK];
#pragma unroll
    for (int r = 0; r < 2; r++) times[2 * threadIdx.x + r] = 0;
    __syncthreads();
    for (u32 j = threadIdx.x; j < n_history; j += blockDim.x) {
        if (deal.has(history[j]) && (u32)history[j] < vocab) atomicAdd(&times[deal.place(history[j])], 1u);
    }
    __syncthreads();
#pragma unroll
    for (int r = 0; r < 2; r++) {
        u32 n = times[2 * threadIdx.x + r];
        if (n == 0) continue;
        l[r] = l[r] > 0.0f ? __fdiv_rn(l[r], repeat) : __fmul_rn(l[r], repeat);
        l[r] = __fsub_rn(l[r], __fadd_rn(__fmul_rn((float)n, frequency), presence));
    }
}

// 1024 keys, two to a thread, largest first. A thread's meet in registers, a warp's by shuffles, the rest in memory.
inline void sort_by_steps(u64* k, u64 (*room)[CHUNK]) {
    u32 t = threadIdx.x, turn = 0;
    for (u32 size = 2; size <= CHUNK; size *= 2) {
        bool descending = (2 * t & size) == 0;
        u32 step = size / 2;
        for (; step >= 64; step /= 2) {
            u64* mine = room[turn];
            // Two rooms: the next writes go to where nobody still reads.
            turn ^= 1;
            mine[t] = k[0];
            mine[512 + t] = k[1];
            __syncthreads();
            bool larger = ((t & step / 2) == 0) == descending;
            u64 a = mine[t ^ step / 2], b = mine[512 + (t ^ step / 2)];
            if ((k[0] < a) == larger) k[0] = a;
            if ((k[1] < b) == larger) k[1] = b;
        }
        // Steps as constants: half the instructions.
#pragma unroll
        for (u32 lanes = 16; lanes > 0; lanes /= 2) {
            if (lanes >= size / 2) continue;
            bool larger = ((t & lanes) == 0) == descending;
            u64 a = __shfl_xor_sync(ALL_LANES, k[0], lanes), b = __shfl_xor_sync(ALL_LANES, k[1], lanes);
            if ((k[0] < a) == larger) k[0] = a;
            if ((k[1] < b) == larger) k[1] = b;
        }
        u64 a = k[0], b = k[1];
        bool swap = (a < b) == descending;
        k[0] = swap ? b : a;
        k[1] = swap ? a : b;
    }
}

// The same for keys that are spread out: each is put into one of 1024 places by its logit, and then before the smaller
// ones of its place. False, and nothing done, when too many would share a place. `top` is the best logit, and `number`
// has the logits' ordered bits, 0 without a token.
inline bool sort_by_places(u64* k, const u32* number, float top, u64 (*room)[CHUNK]) {
    const u32 MOST = 24;
    __shared__ u32 n_in[CHUNK], warp_least[16], warp_sums[16];
    u32 t = threadIdx.x, warp = t / 32, lane = t % 32, place[2], index[2];
    // Of the finite ones: -inf goes to the last place.
    u32 least = 0;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        if (number[r] > ordered(-inf_f32())) least = max(least, ~number[r]);
    }
    least = __reduce_max_sync(ALL_LANES, least);
    if (lane == 0) warp_least[warp] = least;
    n_in[t] = 0;
    n_in[512 + t] = 0;
    room[1][t] = 0;
    room[1][512 + t] = 0;
    __syncthreads();
    least = __reduce_max_sync(ALL_LANES, warp_least[lane % 16]);
    float range = top - from_ordered(~least);
    if (!(range > 0.0f && range <= 3e38f)) return false;
    float scale = (float)(CHUNK - 1) / range;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        place[r] = (u32)fminf((top - from_ordered(number[r])) * scale, (float)(CHUNK - 1));
        index[r] = k[r] == 0 ? 0 : atomicAdd(&n_in[place[r]], 1u);
    }
    __syncthreads();
    u32 a = n_in[2 * t], b = n_in[2 * t + 1], sum = a + b;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        u32 before = __shfl_up_sync(ALL_LANES, sum, step);
        if (lane >= step) sum += before;
    }
    if (lane == 31) warp_sums[warp] = sum;
    if (__syncthreads_or(a > MOST || b > MOST)) return false;
    for (u32 i = 0; i < 16; i++) sum += i < warp ? warp_sums[i] : 0;
    // From here on a place's first index above its number of keys.
    n_in[2 * t] = (sum - a - b) << 8 | a;
    n_in[2 * t + 1] = (sum - b) << 8 | b;
    __syncthreads();
    u32 first[2], n[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        u32 both = n_in[place[r]];
        first[r] = both >> 8;
        n[r] = both & 255;
        if (k[r] != 0) room[0][first[r] + index[r]] = k[r];
    }
    __syncthreads();
    u32 at[2] = {first[0], first[1]};
    for (u32 i = 0; i < max(n[0], n[1]); i++) {
#pragma unroll
        for (int r = 0; r < 2; r++) at[r] += (u32)(i < n[r]) & (u32)(room[0][(first[r] + i) % CHUNK] > k[r]);
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        if (k[r] == 0) continue;
        room[1][at[r]] = k[r];
    }
    __syncthreads();
    k[0] = room[1][2 * t];
    k[1] = room[1][2 * t + 1];
    return true;
}

// Running sums of the block's values, two to a thread, of two kinds at once; returns the first kind's whole sum.
inline double scan(double* v, double* w) {
    __shared__ double warps[2][16];
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    v[1] += v[0];
    w[1] += w[0];
    double a = v[1], b = w[1];
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        double before_a = __shfl_up_sync(ALL_LANES, a, step), before_b = __shfl_up_sync(ALL_LANES, b, step);
        if (lane >= step) a += before_a, b += before_b;
    }
    if (lane == 31) warps[0][warp] = a, warps[1][warp] = b;
    __syncthreads();
    double from_a = 0.0, from_b = 0.0, total = 0.0;
    for (u32 i = 0; i < 16; i++) {
        if (i < warp) from_a += warps[0][i], from_b += warps[1][i];
        total += warps[0][i];
    }
    double before_a = __shfl_up_sync(ALL_LANES, a, 1), before_b = __shfl_up_sync(ALL_LANES, b, 1);
    if (lane > 0) from_a += before_a, from_b += before_b;
#pragma unroll
    for (int r = 0; r < 2; r++) v[r] += from_a, w[r] += from_b;
    return total;
}

extern "C" __global__ __launch_bounds__(512) void sample_chunks_f32(u8* scratch, const float* logits,
                                                                    const float* params, const i32* history,
                                                                    const i32* bias_ids, const float* bias, Rows rows,
                                                                    u32 vocab, u32 n_history, u32 n_bias) {
    __shared__ u32 next_bin[17], warp_most[16], best_id;
    __shared__ double warp_sums[16];
    let_next_start();
    u32 row = blockIdx.y, n_chunks = gridDim.x;
    Deal deal = {blockIdx.x, n_chunks};
    const float* in = logits + rows.start(row);
    const float* p = params + row * 8;
    u32 first = deal.first_id(threadIdx.x);
    u8* out = scratch + row * row_bytes(n_chunks);
    u64 n_keys = (u64)n_chunks * CHUNK, at = (u64)deal.chunk * CHUNK;
    wait_for_previous();

    // All that is read is asked for before any of it is needed.
    Ids biased(bias_ids, row, n_bias), seen(history, row, n_history);
    float temperature = p[0], repeat = p[4], frequency = p[5], presence = p[6], l[2];
    u32 top_k = top_k_of(p[1]);
    if (first + 2 <= vocab && (u64)in % 8 == 0) {
        float2 two = *(const float2*)(in + first);
        l[0] = two.x, l[1] = two.y;
    } else {
#pragma unroll
        for (int r = 0; r < 2; r++) l[r] = first + r < vocab ? in[first + r] : 0.0f;
    }
    bool penalties = n_history > 0 && (repeat != 1.0f || frequency != 0.0f || presence != 0.0f);
    if (n_bias > 0 || penalties) {
        bool any = biased.any_here(deal, vocab) || (penalties && seen.any_here(deal, vocab));
        if (__syncthreads_or(any)) {
            if (n_bias > 0) add_bias(l, deal, vocab, biased.ids, bias + (u64)row * n_bias, n_bias);
            if (penalties) penalise(l, deal, vocab, seen.ids, n_history, repeat, frequency, presence);
        }
    }

    u64 k[2];
    // As numbers -0 and +0 are equal, and the smaller id wins.
    u32 number[2], warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        if (l[r] != l[r]) l[r] = -inf_f32();
        bool there = first + r < vocab;
        k[r] = there ? key_of(l[r], first + r) : 0;
        number[r] = there ? ordered(l[r] + 0.0f) : 0;
    }
    u32 most = __reduce_max_sync(ALL_LANES, max(number[0], number[1]));
    if (lane == 0) warp_most[warp] = most;
    if (threadIdx.x == 0) best_id = 0;
    __syncthreads();
    most = __reduce_max_sync(ALL_LANES, warp_most[lane % 16]);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        if (first + r < vocab && number[r] == most) atomicMax(&best_id, ID_MASK - (first + r));
    }
    float top = from_ordered(most);

    Chunk* chunks = (Chunk*)(out + n_keys * 24);
    bool greedy = is_greedy(temperature), small = is_small(top_k);
    double sum = 0.0;
    if (greedy || small) {
#pragma unroll
        for (int r = 0; r < 2; r++) sum += k[r] == 0 ? 0.0 : weight(l[r], top, 1.0);
        if (!greedy) {
            u64 head = warp_largest(Larger()(k[0], k[1]));
            u64* heads = (u64*)(out + n_keys * 8) + deal.chunk * GROUPS;
            if (lane == 0) heads[warp] = head;
        }
        sum = warp_reduce(sum, Add());
        if (lane == 0) warp_sums[warp] = sum;
        __syncthreads();
        sum = 0.0;
#pragma unroll
        for (int i = 0; i < 16; i++) sum += warp_sums[i];
    } else {
        __shared__ u64 room[2][CHUNK];
        if (!sort_by_places(k, number, top, room)) sort_by_steps(k, room);
        double w[2], hot[2], coldness = 1.0 / (double)temperature;
        float scale = bins_per_unit(temperature);
        i32 top_bin = bin_of(top, scale);
        u32 bin[3];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            w[r] = k[r] == 0 ? 0.0 : weight(key_logit(k[r]), top, 1.0);
            hot[r] = k[r] == 0 ? 0.0 : weight(key_logit(k[r]), top, coldness);
            bin[r] = k[r] == 0 ? BINS : bins_below(key_logit(k[r]), top, scale);
        }
        if (lane == 0) next_bin[warp] = bin[0];
        if (threadIdx.x == 0) next_bin[16] = BINS;
        sum = scan(w, hot);
        bin[2] = __shfl_sync(ALL_LANES, bin[0], (lane + 1) % 32);
        if (lane == 31) bin[2] = next_bin[warp + 1];
        Bins bins(chunks + n_chunks, n_chunks);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            // The last key of its bin speaks for that bin, and for those up to the next key's: they are empty.
            for (u32 b = bin[r]; b < bin[r + 1]; b++) {
                u32 i = deal.chunk * BINS + (u32)(top_bin - (i32)b) % BINS;
                bins.weights[i] = w[r];
                bins.tempered[i] = hot[r];
                bins.counts[i] = (u16)(2 * threadIdx.x + r + 1);
            }
        }
        ((TwoSums*)(out + n_keys * 8))[at / 2 + threadIdx.x] = TwoSums{w[0], w[1]};
        ((TwoSums*)(out + n_keys * 16))[at / 2 + threadIdx.x] = TwoSums{hot[0], hot[1]};
    }
    // Behind a barrier, whichever way it went.
    if (threadIdx.x == 0) chunks[deal.chunk] = Chunk{(u64)most << ID_BITS | best_id, sum};
    if (!greedy) ((Two*)out)[at / 2 + threadIdx.x] = Two{k[0], k[1]};
}

inline bool is_proper(double total) { return total > 0.0 && total <= 1.7976931348623157e308; }

// The choice without a small top-k, over sorted chunks; 0 when there is nothing to weigh. All threads call it with
// their chunk, when the desk has what they keep of it; the first has the answer.
inline u64 choose_large(Row& row, Desk& desk, const Chunk* chunks, Chunk mine) {
    u32 c = threadIdx.x, warp = c / 32, lane = c % 32;
    // Under way while the chunks are weighed.
    BinShare share(row);
    share.ask(row, row.bins.weights, c / BINS);
    share.ask_counts(row, c / BINS);
    u32 most = __reduce_max_sync(ALL_LANES, (u32)(mine.best >> ID_BITS));
    if (lane == 0) desk.warps[warp] = most;
    // A warp that mostly has no chunks to weigh draws.
    if (c == 1024 - 32) desk.uniform = row.uniform();
    if (c == 0) desk.laid[0] = 0;
    __syncthreads();
    row.top = from_ordered(__reduce_max_sync(ALL_LANES, desk.warps[lane]));
    weigh_chunks(row, desk, chunks, mine);
    __syncthreads();
    row.total = total_of<1024>(row, desk);
    row.coldness = desk.coldness;
    row.top_bin = bin_of(row.top, share.per_unit);
    if (!is_proper(row.total)) return 0;
    share.add(row, desk);
    share.ask(row, row.bins.tempered, c / BINS);
    // Another such warp, so that nobody waits for it at the end.
    if (c == 1024 - 64) desk.log_total = log(row.total);
    __syncthreads();
    sum_bins(row, desk);
    __syncthreads();
    u32 last = last_bin_listed(row, desk);
    if (last <= BINS) {
        if (c >= row.threads) return 0;
        u32 n = list_candidates(row, desk, last);
        if (c >= 32) return 0;
        u32 place = n <= 128 ? choose_listed<4>(row, desk, n, desk.uniform)
                             : choose_listed<8>(row, desk, n, desk.uniform);
        return desk.sorted[place];
    }
    share.add_tempered(row, desk);
    __syncthreads();
    if (c >= row.threads) return 0;
    sum_tempered_bins(row, desk);
    __syncthreads();
    return choose_among_all(row, desk);
}

extern "C" __global__ __launch_bounds__(1024) void sample_select_f32(i32* token, float* logprob, const u8* scratch,
                                                                     const float* params, const u32* rng, u32 vocab) {
    Desk& desk = the_desk();
    u32 index = blockIdx.x, n_chunks = (vocab + CHUNK - 1) / CHUNK, c = threadIdx.x;
    const u8* in = scratch + index * row_bytes(n_chunks);
    u64 n_keys = (u64)n_chunks * CHUNK;
    const Chunk* chunks = (const Chunk*)(in + n_keys * 24);
    const float* p = params + index * 8;
    u32 threads = n_chunks <= FEW_THREADS ? FEW_THREADS : 1024, lanes = 0;
    while (lanes < 3 && n_chunks << (lanes + 1) <= threads) lanes++;
    // At first all tokens are candidates.
    if (c < n_chunks) desk.kept[c] = (u16)Deal{c, n_chunks}.n_tokens(vocab);
    wait_for_previous();
    // Not before: blocks of the next kernel would come to lie unevenly beside those of the first.
    let_next_start();
    // Asked for before it is known what for.
    Chunk mine = c < n_chunks ? chunks[c] : Chunk{0, 0.0};
    Row row = {(const u64*)in, (const double*)(in + n_keys * 8), (const double*)(in + n_keys * 16),
               Bins(chunks + n_chunks, n_chunks), {rng[4 * index], rng[4 * index + 1], rng[4 * index + 2]}, n_chunks,
               vocab, 0.0f, 0.0, p[0], 0.0, 0, top_k_of(p[1]), p[2], p[3], threads, lanes};
    bool greedy = is_greedy(p[0]), small = !greedy && is_small(row.top_k);
    u64 chosen = 0;
    if (greedy) {
        // One warp, and no barrier.
        if (c >= 32) return;
        Chunk all = together(chunks, n_chunks, mine);
        row.top = key_logit(all.best);
        row.total = all.sum;
        chosen = all.best;
    } else if (small) {
        if (c >= SMALL_THREADS) return;
        chosen = choose_small(row, desk, chunks, mine);
    } else {
        chosen = choose_large(row, desk, chunks, mine);
    }
    if (c > 0) return;
    if (chosen == 0) {
        // Nothing to weigh: the best.
        for (u32 i = 0; i < n_chunks; i++) chosen = Larger()(chosen, chunks[i].best);
    }
    double log_total = greedy || small ? log(row.total) : desk.log_total;
    bool proper = row.top != inf_f32() && row.top != -inf_f32() && is_proper(row.total);
    token[index] = (i32)key_id(chosen);
    logprob[index] = proper ? (float)((double)key_logit(chosen) - (double)row.top - log_total) : nan_f32();
}
