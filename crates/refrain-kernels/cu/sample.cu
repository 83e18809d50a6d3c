// sample.cu: sampling: one token from each row of logits
//
//   logits    [n, vocab]      f32, rows of consecutive elements
//   params    [n, 8]          f32: temperature, top-k, top-p, min-p, repeat, frequency, presence
//   history   [n, n_history]  i32, negative: empty
//   bias_ids  [n, n_bias]     i32, negative: empty
//   bias      [n, n_bias]     f32
//   mask      [n, ceil(vocab / 32)]  u32: a token whose bit is 0 is never chosen
//   rng       [n, 4]          u32: seed low, seed high, position
//   token     [n]             i32
//   logprob   [n]             f32: under the adjusted logits, at temperature 1
//   ids       [n, n_top]      i32: the most probable tokens, best first
//   logprobs  [n, n_top]      f32: their log-probabilities
//   states    [n]             State (sample_bins.cuh); zero before the first launch and after every choice
//   scratch   per row, with C = ceil(vocab / 1024): tokens [1024 C] Entry and a list of them [1024 C] Entry, or,
//             for a top-k up to 64, keys [1024 C] u64 and the best of each 64 keys [16 C] u64; chunks [C]
//             { best u64, sum f64 }; Tail
//
// Kernels with a mask first set the logits of forbidden tokens to -inf, except NaN. Bias and penalties then
// change the logits. NaN counts as +inf; a row with either has the logprob NaN. Candidates are ordered by
// logit, then by smaller id. Top-k, top-p and min-p cut that order; Philox at (seed, position) chooses among
// the remaining candidates at the temperature. A temperature of 0 or less takes the best.
//
// A candidate's key is its logit's bits, mapped so that they compare like the numbers, above the complement
// of its id: keys are unique and larger is better. The first kernel deals the tokens to C chunks, four at a
// time. For a top-k up to 64, the second kernel lists every key that is at least the k-th best of the chunks'
// best keys, sorts only that list, and chooses (sample_small.cuh). Otherwise, the first kernel adds up the
// tokens' weights by bins of logits (sample_bins.cuh). From these, every block of the second kernel knows in
// which bins the filters cut and the choice falls, and lists its tokens in those bins; the last block to
// arrive finds the keys of the cuts and of the choice on the list (sample_large.cuh).
//
// The most probable tokens are listed after the choice, in the same scratch: sample_list writes the keys of
// all tokens, independently of the parameters, with the best of each 64. n_top times, sample_top takes the
// best of these and replaces it by the next best of its 64 keys.
//
// Launch       sample_chunks, sample_list, and their masked forms: grid (C, n), block (512), shared 0.
//              sample_top: grid (n), block (512), shared 0. sample_select: grid (ceil(C / 4), n), block
//              (512), shared_bytes, at least 96 KiB
// Requires     vocab at most 2^20; scratch and states 16-byte aligned. Nothing else uses states. A state that an
//              interrupted choice left inconsistent is detected by its chunk count and costs only time
// Aliasing     none
// Accumulation adjusted logits are rounded as on the CPU, so the best token is the same to the bit. The
//              weights in a bin are 32-bit integers and their sums exact; everything derived from them is f64
//              in a fixed order
// Determinism  same choice every run, whatever the order of the list, which is scratch
// Capture      safe: all parameters are read at each run
#include "sample_choose.cuh"
#include "sample_small.cuh"
#include "view.cuh"

// Token ids, of which each thread prefetches one.
struct Ids {
    const i32* ids;
    u32 n;
    i32 mine;

    inline Ids(const i32* all, u32 row, u32 n_ids) : ids(all + (u64)row * n_ids), n(n_ids), mine(-1) {
        if (threadIdx.x < n) mine = ids[threadIdx.x];
    }

    // Whether any id that this thread checks belongs to the chunk.
    inline bool any_here(Deal deal, u32 vocab) const {
        bool any = deal.has(mine) && (u32)mine < vocab;
        for (u32 j = threadIdx.x + blockDim.x; j < n; j += blockDim.x) {
            any = any || (deal.has(ids[j]) && (u32)ids[j] < vocab);
        }
        return any;
    }
};

// Adds the chunk's biases, those of one token in their order.
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
        // A token's first entry adds all of its entries.
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

// Adjusts the logits of one chunk and writes the data that the choice needs. LISTS: writes the keys of all
// tokens, for top-n lists. MASKED: applies a mask.
template <bool LISTS, bool MASKED>
inline void adjust_chunk(u8* scratch, State* states, const float* logits, const float* params, const i32* history,
                         const i32* bias_ids, const float* bias, Rows rows, u32 vocab, u32 n_history, u32 n_bias,
                         const u32* mask) {
    __shared__ u32 warp_most[16], best_id;
    __shared__ double warp_sums[16];
    __shared__ ChunkBins chunk_bins;
    let_next_start();
    chunk_bins.clear();
    u32 row = blockIdx.y, n_chunks = gridDim.x;
    Deal deal = {blockIdx.x, n_chunks};
    const float* in = logits + rows.start(row);
    const float* p = params + row * 8;
    u32 first = deal.first_id(threadIdx.x);
    u8* out = scratch + row * row_bytes(n_chunks);
    u64 n_keys = (u64)n_chunks * CHUNK, at = (u64)deal.chunk * CHUNK;
    // No kernel of a step writes the parameters.
    float temperature = p[0], repeat = p[4], frequency = p[5], presence = p[6], l[2];
    u32 top_k = top_k_of(p[1]);
    double coldness = 1.0 / (double)temperature;
    wait_for_previous();

    // All loads are issued before the first result is used.
    Ids biased(bias_ids, row, n_bias), seen(history, row, n_history);
    if (first + 2 <= vocab && (u64)in % 8 == 0) {
        float2 two = *(const float2*)(in + first);
        l[0] = two.x, l[1] = two.y;
    } else {
#pragma unroll
        for (int r = 0; r < 2; r++) l[r] = first + r < vocab ? in[first + r] : 0.0f;
    }
    if (MASKED && first < vocab) {
        // Both tokens are in one word: the first id is even.
        u32 allowed = mask[(u64)row * ((vocab + 31) / 32) + first / 32] >> first % 32;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            // NaN stays, so that it is detected whatever the mask.
            if ((allowed >> r & 1) == 0 && l[r] == l[r]) l[r] = -inf_f32();
        }
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
    // As numbers, -0 and +0 are equal, and the smaller id wins.
    u32 number[2], warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        // Treated as +inf, with which a row has no probabilities either.
        if (l[r] != l[r]) l[r] = inf_f32();
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

    Chunk* chunks = (Chunk*)(out + n_keys * 32);
    bool greedy = !LISTS && is_greedy(temperature), small = LISTS || is_small(top_k);
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
        Bins bins(temperature, top);
        Tail* tail = (Tail*)(chunks + n_chunks);
        Entry tokens[2] = {{k[0]}, {k[1]}};
        chunk_bins.add(bins, tokens, coldness, top_k > 0);
        __syncthreads();
        chunk_bins.add_to(states + row, bins);
        clear_tail(*tail, deal.chunk * 512 + threadIdx.x, n_chunks * 512);
        // In any order: keys contain the ids.
        Entry* all = (Entry*)out + at + threadIdx.x;
        all[0] = tokens[0];
        all[CHUNK / 2] = tokens[1];
    }
    // Both branches above end with a barrier.
    if (threadIdx.x == 0) chunks[deal.chunk] = Chunk{(u64)most << ID_BITS | best_id, sum};
    if (!greedy && small) ((Two*)out)[at / 2 + threadIdx.x] = Two{k[0], k[1]};
}

// unit chunks
extern "C" __global__ __launch_bounds__(512) void sample_chunks_f32(u8* scratch, State* states,
                                                                    const float* logits, const float* params,
                                                                    const i32* history, const i32* bias_ids,
                                                                    const float* bias, Rows rows, u32 vocab,
                                                                    u32 n_history, u32 n_bias) {
    adjust_chunk<false, false>(scratch, states, logits, params, history, bias_ids, bias, rows, vocab, n_history, n_bias,
                               nullptr);
}

// unit select
// The launch bound exceeds the actual thread count to limit registers: blocks then fit on an SM next to
// blocks of the first kernel, so they are resident when those end.
extern "C" __global__ __launch_bounds__(SELECT_THREADS + 128) void sample_select_f32(i32* token, float* logprob, u8* scratch,
                                                                               State* states, const float* params,
                                                                               const u32* rng, u32 vocab, u32 shared_bytes) {
    DYNAMIC_SHARED(shared);
    u32 index = blockIdx.y, n_chunks = (vocab + CHUNK - 1) / CHUNK, c = threadIdx.x;
    u8* in = scratch + index * row_bytes(n_chunks);
    u64 n_keys = (u64)n_chunks * CHUNK;
    const Chunk* chunks = (const Chunk*)(in + n_keys * 32);
    const float* p = params + index * 8;
    // No kernel of a step writes the parameters.
    Row row = {(const u64*)in, (const u64*)(in + n_keys * 8), {}, n_chunks, vocab, p[0], top_k_of(p[1]), p[2], p[3]};
    bool greedy = is_greedy(row.temperature), small = is_small(row.top_k);
    // These blocks touch no memory, so they need not wait: block 0 of each row does, and the launch does not
    // end before it.
    if (blockIdx.x > 0 && (greedy || small)) return;
    if (!greedy && !small) prepare(*(Table*)shared, row, shared_bytes);
    wait_for_previous();
    // Not earlier: blocks of the next kernel would be distributed unevenly next to those of the first.
    let_next_start();
    // Prefetch: the consumer is decided below.
    Chunk mine = c < n_chunks ? chunks[c] : Chunk{0, 0.0};
#pragma unroll
    for (int i = 0; i < 3; i++) row.rng[i] = rng[4 * index + i];
    u64 chosen = 0;
    double log_total = 0.0;
    if (greedy) {
        // One warp, without barriers.
        if (c >= 32) return;
        Chunk all = together(chunks, n_chunks, mine);
        row.top = key_logit(all.best);
        log_total = log(all.sum);
        chosen = all.best;
    } else if (small) {
        if (c >= SMALL_THREADS) return;
        chosen = choose_small(row, *(Desk*)shared, chunks, mine);
        if (c == 0) log_total = log(row.total);
    } else {
        Tail* tail = (Tail*)(chunks + n_chunks);
        const Entry* tokens = (const Entry*)in;
        Entry* list = (Entry*)(in + n_keys * 16);
        if (!choose_large(*(Table*)shared, row, states + index, chunks, tokens, list, tail, chosen, log_total)) return;
    }
    if (c > 0) return;
    if (chosen == 0) {
        // No candidate has weight: take the best.
        for (u32 i = 0; i < n_chunks; i++) chosen = Larger()(chosen, chunks[i].best);
    }
    bool proper = row.top != inf_f32() && row.top != -inf_f32();
    token[index] = (i32)key_id(chosen);
    logprob[index] = proper ? (float)((double)key_logit(chosen) - (double)row.top - log_total) : nan_f32();
}

// unit top
extern "C" __global__ __launch_bounds__(512) void sample_list_f32(u8* scratch, State* states, const float* logits,
                                                                  const float* params, const i32* history,
                                                                  const i32* bias_ids, const float* bias, Rows rows,
                                                                  u32 vocab, u32 n_history, u32 n_bias) {
    adjust_chunk<true, false>(scratch, states, logits, params, history, bias_ids, bias, rows, vocab, n_history, n_bias,
                              nullptr);
}

extern "C" __global__ __launch_bounds__(512) void sample_top_f32(i32* ids, float* logprobs, u8* scratch, u32 vocab,
                                                                 u32 n_top) {
    __shared__ u64 warp_best[16];
    __shared__ u32 group;
    __shared__ double log_total;
    start();
    u32 row = blockIdx.x, n_chunks = (vocab + CHUNK - 1) / CHUNK, n_groups = n_chunks * GROUPS;
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u8* in = scratch + row * row_bytes(n_chunks);
    u64 n_keys = (u64)n_chunks * CHUNK;
    const u64* keys = (const u64*)in;
    u64* heads = (u64*)(in + n_keys * 8);
    const Chunk* chunks = (const Chunk*)(in + n_keys * 32);
    float top = 0.0f;
    if (threadIdx.x == 0) group = 0;
    for (u32 i = 0; i < n_top; i++) {
        u64 mine = 0;
        u32 from = 0;
        for (u32 g = threadIdx.x; g < n_groups; g += blockDim.x) {
            if (heads[g] > mine) mine = heads[g], from = g;
        }
        u64 best = warp_largest(mine);
        if (lane == 0) warp_best[warp] = best;
        __syncthreads();
        best = warp_largest(warp_best[lane % 16]);
        // Keys are unique.
        if (best != 0 && mine == best) group = from;
        if (i == 0) {
            top = key_logit(best);
            double sum = 0.0;
            if (warp == 0) {
                for (u32 c = lane; c < n_chunks; c += 32) sum += chunks[c].relative_to(top);
                sum = warp_reduce(sum, Add());
                if (lane == 0) log_total = log(sum);
            }
        }
        __syncthreads();
        if (warp == 0) {
            const u64* place = keys + (u64)group * GROUP + 2 * lane;
            u64 a = best != 0 && place[0] < best ? place[0] : 0, b = best != 0 && place[1] < best ? place[1] : 0;
            u64 next = warp_largest(Larger()(a, b));
            if (lane == 0) {
                if (best != 0) heads[group] = next;
                bool proper = best != 0 && top != inf_f32() && top != -inf_f32();
                u64 at = (u64)row * n_top + i;
                ids[at] = best != 0 ? (i32)key_id(best) : -1;
                logprobs[at] = proper ? (float)((double)key_logit(best) - (double)top - log_total) : nan_f32();
            }
        }
        __syncthreads();
    }
}

// unit masked
extern "C" __global__ __launch_bounds__(512) void sample_masked_chunks_f32(u8* scratch, State* states,
                                                                           const float* logits, const float* params,
                                                                           const i32* history, const i32* bias_ids,
                                                                           const float* bias, Rows rows, u32 vocab,
                                                                           u32 n_history, u32 n_bias,
                                                                           const u32* mask) {
    adjust_chunk<false, true>(scratch, states, logits, params, history, bias_ids, bias, rows, vocab, n_history, n_bias,
                              mask);
}

extern "C" __global__ __launch_bounds__(512) void sample_masked_list_f32(u8* scratch, State* states,
                                                                         const float* logits, const float* params,
                                                                         const i32* history, const i32* bias_ids,
                                                                         const float* bias, Rows rows, u32 vocab,
                                                                         u32 n_history, u32 n_bias, const u32* mask) {
    adjust_chunk<true, true>(scratch, states, logits, params, history, bias_ids, bias, rows, vocab, n_history, n_bias,
                             mask);
}
