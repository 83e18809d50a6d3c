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
//   scratch   for each row, C = ceil(vocab / 1024): keys [1024 C] u64, weights [1024 C] f64, weights at the temperature
//             [1024 C] f64, chunks [C] { best u64, sum f64 }
//
// Bias and penalties change the logits; NaN counts as -inf. Candidates are ordered by logit, then by the smaller id.
// Top-k, top-p and min-p cut that order; Philox at (seed, position) chooses among the rest at the temperature. A
// temperature of 0 or less takes the best.
//
// A candidate's key is its logit's bits, made to compare as numbers do, over its id's complement, so that keys are
// unique and larger is better. The first kernel sorts the keys of 1024 tokens and sums their weights relative to the
// chunk's best; the second finds each cut as a key, bit by bit: how much lies above a key is one search in each chunk.
//
// Launch    sample_chunks: grid (C, n), block (512), shared 0
//           sample_select: grid (n), block (C rounded up to 32), shared 0
// Requires  vocab at most 2^20
// Adjusted logits are rounded as on the CPU, so the best is the same to the bit. Weights and sums in f64, fixed order:
// same choice every run. Capture: safe; all parameters are read at each run.
#include "reduce.cuh"
#include "view.cuh"

const u32 CHUNK = 1024;
const u32 ID_BITS = 20;
const u32 ID_MASK = (1u << ID_BITS) - 1;

struct Chunk {
    u64 best;
    double sum;
};

struct Larger {
    inline u64 operator()(u64 a, u64 b) const { return a > b ? a : b; }
};

struct Smaller {
    inline u64 operator()(u64 a, u64 b) const { return a < b ? a : b; }
};

// Bits that compare as the numbers do; -0 below +0.
inline u32 ordered(float x) {
    u32 bits = __float_as_uint(x);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

inline float from_ordered(u32 x) { return __uint_as_float(x & 0x80000000u ? x & 0x7fffffffu : ~x); }

inline u64 key_of(float logit, u32 id) { return (u64)ordered(logit) << ID_BITS | (ID_MASK - id); }
inline float key_logit(u64 key) { return from_ordered((u32)(key >> ID_BITS)); }
inline u32 key_id(u64 key) { return ID_MASK - ((u32)key & ID_MASK); }

// Weight relative to `best`, at a temperature. Nothing weighs anything beside a best of -inf.
inline double weight(float logit, float best, double temperature) {
    if (best == -inf_f32()) return 0.0;
    return exp(((double)logit - (double)best) / temperature);
}

inline bool is_greedy(float temperature) { return !(temperature > 0.0f); }

inline u64 row_bytes(u32 n_chunks) { return (u64)n_chunks * (CHUNK * 24 + sizeof(Chunk)); }

// Adds the biases of this chunk, each token's in their order.
inline void add_bias(float* logits, u32 base, u32 count, const i32* ids, const float* bias, u32 n_bias) {
    for (u32 j = threadIdx.x; j < n_bias; j += blockDim.x) {
        i32 id = ids[j];
        if (id < 0 || (u32)id < base || (u32)id >= base + count) continue;
        bool first = true;
        for (u32 i = 0; i < j; i++) first = first && ids[i] != id;
        if (!first) continue;
        float l = logits[id - base];
        for (u32 i = j; i < n_bias; i++) {
            if (ids[i] == id) l = __fadd_rn(l, bias[i]);
        }
        logits[id - base] = l;
    }
}

inline void penalise(float* logits, u32 base, u32 count, const i32* history, u32 n_history, float repeat,
                     float frequency, float presence) {
    for (u32 j = threadIdx.x; j < n_history; j += blockDim.x) {
        i32 id = history[j];
        if (id < 0 || (u32)id < base || (u32)id >= base + count) continue;
        bool first = true;
        for (u32 i = 0; i < j; i++) first = first && history[i] != id;
        if (!first) continue;
        u32 times = 0;
        for (u32 i = j; i < n_history; i++) times += history[i] == id;
        float l = logits[id - base];
        l = l > 0.0f ? __fdiv_rn(l, repeat) : __fmul_rn(l, repeat);
        logits[id - base] = __fsub_rn(l, __fadd_rn(__fmul_rn((float)times, frequency), presence));
    }
}

// 1024 keys, largest first.
inline void sort_keys(u64* keys) {
    for (u32 size = 2; size <= CHUNK; size *= 2) {
        for (u32 step = size / 2; step > 0; step /= 2) {
            __syncthreads();
            u32 i = 2 * threadIdx.x - (threadIdx.x & (step - 1));
            u64 a = keys[i], b = keys[i + step];
            bool descending = (i & size) == 0;
            if ((a < b) == descending) {
                keys[i] = b;
                keys[i + step] = a;
            }
        }
    }
    __syncthreads();
}

// Running sums of 1024 weights, two to a thread, into `out`; returns the whole sum in every thread.
inline double scan(double a, double b, double* out) {
    __shared__ double warps[16];
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    double sum = a + b;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        double before = __shfl_up_sync(0xffffffffu, sum, step);
        if (lane >= step) sum += before;
    }
    __syncthreads();
    if (lane == 31) warps[warp] = sum;
    __syncthreads();
    double offset = 0.0, total = 0.0;
#pragma unroll
    for (int w = 0; w < 16; w++) {
        if (w == warp) offset = total;
        total += warps[w];
    }
    double before = __shfl_up_sync(0xffffffffu, sum, 1);
    double start = offset + (lane == 0 ? 0.0 : before);
    out[2 * threadIdx.x] = start + a;
    out[2 * threadIdx.x + 1] = offset + sum;
    return total;
}

extern "C" __global__ __launch_bounds__(512) void sample_chunks_f32(u8* scratch, const float* logits,
                                                                    const float* params, const i32* history,
                                                                    const i32* bias_ids, const float* bias, Rows rows,
                                                                    u32 vocab, u32 n_history, u32 n_bias) {
    __shared__ float adjusted[CHUNK];
    __shared__ u64 keys[CHUNK];
    start();
    u32 chunk = blockIdx.x, row = blockIdx.y, n_chunks = gridDim.x;
    u32 base = chunk * CHUNK, count = min(CHUNK, vocab - base);
    const float* in = logits + rows.start(row) + base;
    const float* p = params + row * 8;
    for (u32 i = threadIdx.x; i < count; i += blockDim.x) adjusted[i] = in[i];
    __syncthreads();
    add_bias(adjusted, base, count, bias_ids + (u64)row * n_bias, bias + (u64)row * n_bias, n_bias);
    __syncthreads();
    float repeat = p[4], frequency = p[5], presence = p[6];
    if (repeat != 1.0f || frequency != 0.0f || presence != 0.0f) {
        penalise(adjusted, base, count, history + (u64)row * n_history, n_history, repeat, frequency, presence);
    }
    __syncthreads();

    u64 best = 0;
    for (u32 i = threadIdx.x; i < CHUNK; i += blockDim.x) {
        float l = i < count ? adjusted[i] : 0.0f;
        if (l != l) l = -inf_f32();
        keys[i] = i < count ? key_of(l, base + i) : 0;
        // As numbers -0 and +0 are equal, and the smaller id wins.
        u64 key = i < count ? key_of(l + 0.0f, base + i) : 0;
        best = Larger()(best, key);
    }
    best = block_reduce(best, Larger(), (u64)0);
    float top = key_logit(best);

    u8* out = scratch + row * row_bytes(n_chunks);
    u64 n_keys = (u64)n_chunks * CHUNK;
    Chunk* chunks = (Chunk*)(out + n_keys * 24);
    double sum = 0.0;
    if (is_greedy(p[0])) {
        for (u32 i = threadIdx.x; i < count; i += blockDim.x) sum += weight(key_logit(keys[i]), top, 1.0);
        sum = block_reduce(sum, Add(), 0.0);
    } else {
        sort_keys(keys);
        u64* sorted = (u64*)out + (u64)chunk * CHUNK;
        double* weights = (double*)(out + n_keys * 8) + (u64)chunk * CHUNK;
        double* tempered = (double*)(out + n_keys * 16) + (u64)chunk * CHUNK;
        double w[2], t[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            u64 key = keys[2 * threadIdx.x + i];
            sorted[2 * threadIdx.x + i] = key;
            w[i] = key == 0 ? 0.0 : weight(key_logit(key), top, 1.0);
            t[i] = key == 0 ? 0.0 : weight(key_logit(key), top, (double)p[0]);
        }
        sum = scan(w[0], w[1], weights);
        scan(t[0], t[1], tempered);
    }
    if (threadIdx.x == 0) chunks[chunk] = Chunk{best, sum};
}

inline u32 philox(u32 position, u32 key0, u32 key1) {
    u32 c0 = position, c1 = 0, c2 = 0, c3 = 0;
#pragma unroll
    for (int round = 0; round < 10; round++) {
        u64 a = (u64)0xd2511f53u * c0, b = (u64)0xcd9e8d57u * c2;
        c0 = (u32)(b >> 32) ^ c1 ^ key0;
        c1 = (u32)b;
        c2 = (u32)(a >> 32) ^ c3 ^ key1;
        c3 = (u32)a;
        key0 += 0x9e3779b9u;
        key1 += 0xbb67ae85u;
    }
    return c0;
}

// A thread's view of its chunk: sorted keys, of which the first `kept` are candidates.
struct Part {
    const u64* keys;
    u32 kept;

    // How many of the candidates low .. high are at or above a key, given that the first `low` are.
    inline u32 rank(u64 key, u32 low, u32 high) const {
        while (low < high) {
            u32 middle = (low + high) / 2;
            if (keys[middle] >= key) {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        return low;
    }
};

// The largest key at which `enough(how many candidates of each chunk are at or above it)` holds, 0 when there is none.
// All threads call it; `enough` agrees in all of them.
template <typename F> inline u64 find_key(const Part& part, F enough) {
    u64 key = 0;
    u32 low = 0, high = part.kept;
    for (int bit = 32 + ID_BITS - 1; bit >= 0; bit--) {
        u64 next = key | (u64)1 << bit;
        u32 rank = part.rank(next, low, high);
        if (enough(rank)) {
            key = next;
            high = rank;
        } else {
            low = rank;
        }
    }
    return key;
}

extern "C" __global__ __launch_bounds__(1024) void sample_select_f32(i32* token, float* logprob, const u8* scratch,
                                                                     const float* params, const u32* rng, u32 vocab) {
    start();
    u32 row = blockIdx.x, n_chunks = (vocab + CHUNK - 1) / CHUNK, c = threadIdx.x;
    bool there = c < n_chunks;
    const u8* in = scratch + row * row_bytes(n_chunks);
    u64 n_keys = (u64)n_chunks * CHUNK;
    const Chunk* chunks = (const Chunk*)(in + n_keys * 24);
    const float* p = params + row * 8;

    u64 chunk_best = there ? chunks[c].best : 0;
    float chunk_top = there ? key_logit(chunk_best) : -inf_f32();
    u64 best = block_reduce(chunk_best, Larger(), (u64)0);
    float top = key_logit(best);
    double factor = there ? weight(chunk_top, top, 1.0) : 0.0;
    if (chunk_top == -inf_f32()) factor = 0.0;
    double total = block_reduce(there ? factor * chunks[c].sum : 0.0, Add(), 0.0);
    bool proper = total > 0.0 && total <= 1.7976931348623157e308;
    double log_total = proper ? log(total) : 0.0;
    if (is_greedy(p[0]) || !proper) {
        if (c == 0) {
            token[row] = (i32)key_id(best);
            logprob[row] = proper ? (float)((double)top - (double)top - log_total) : nan_f32();
        }
        return;
    }

    u64 first = (u64)(there ? c : 0) * CHUNK;
    Part part = {(const u64*)in + first, there ? min(CHUNK, vocab - c * CHUNK) : 0};
    const double* weights = (const double*)(in + n_keys * 8) + first;
    const double* tempered = (const double*)(in + n_keys * 16) + first;
    // The best in the order of keys, in which -0 is below +0.
    u64 best_key = block_reduce(there ? part.keys[0] : 0, Larger(), (u64)0);
    auto weight_of = [&](u32 n) { return n == 0 ? 0.0 : factor * weights[n - 1]; };
    auto keep_one = [&]() {
        if (!__syncthreads_or(part.kept > 0)) part.kept = there && part.keys[0] == best_key ? 1 : 0;
    };

    // A float as Rust's `as usize` takes it: NaN and what is below 1 are 0.
    u32 top_k = p[1] >= 1.0f ? (p[1] >= 2147483648.0f ? 0x80000000u : (u32)p[1]) : 0;
    double candidates = total;
    if (top_k > 0) {
        if (top_k < vocab) {
            u64 key = find_key(part, [&](u32 n) { return block_reduce(n, Add(), 0u) >= top_k; });
            part.kept = part.rank(key, 0, part.kept);
        }
        candidates = block_reduce(weight_of(part.kept), Add(), 0.0);
    }
    float top_p = p[2];
    if (!(top_p >= 1.0f)) {
        double wanted = (double)top_p * candidates;
        u64 key = find_key(part, [&](u32 n) { return block_reduce(weight_of(n), Add(), 0.0) >= wanted; });
        part.kept = part.rank(key, 0, part.kept);
        keep_one();
    }
    float min_p = p[3];
    if (min_p > 0.0f) {
        u32 low = 0, high = part.kept;
        while (low < high) {
            u32 middle = (low + high) / 2;
            if (weight(key_logit(part.keys[middle]), top, 1.0) >= (double)min_p) {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        part.kept = low;
        keep_one();
    }

    double hot = there && chunk_top != -inf_f32() ? weight(chunk_top, top, (double)p[0]) : 0.0;
    auto tempered_of = [&](u32 n) { return n == 0 ? 0.0 : hot * tempered[n - 1]; };
    double uniform = (double)((float)(philox(rng[row * 4 + 2], rng[row * 4], rng[row * 4 + 1]) >> 8) / 16777216.0f);
    double target = uniform * block_reduce(tempered_of(part.kept), Add(), 0.0);
    u64 chosen = find_key(part, [&](u32 n) { return block_reduce(tempered_of(n), Add(), 0.0) > target; });
    // Rounding can leave the target a hair above the last sum: then the last candidate is it.
    u64 last = block_reduce(part.kept > 0 ? part.keys[part.kept - 1] : ~(u64)0, Smaller(), ~(u64)0);
    if (chosen < last) chosen = last;
    if (c == 0) {
        token[row] = (i32)key_id(chosen);
        logprob[row] = (float)((double)key_logit(chosen) - (double)top - log_total);
    }
}
