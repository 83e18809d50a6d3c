// attention.cu: attention of any number of rows, split over the context length
//
//   y[i, h] = softmax(scale q[i, h] . k) v over the positions that row i sees
//
//   y          [n, n_heads, head_dim]                      f32
//   q          [n, n_heads, head_dim]                      f32, rows (heads) of consecutive elements
//   k, v       [n_blocks, n_kv_heads, kv_block, head_dim]  T, or signed bytes
//   k_scales, v_scales  [n_blocks, n_kv_heads, kv_block]   f32, of bytes: an element is its byte times the scale
//   positions  [n]                                         i32; negative: the row gets zeros
//   seqs       [n]                                         i32
//   tables     [n_seqs, max_blocks]                        i32
//   sinks      [n_heads]                                   f32, a score of each head without a value; or null
//   partials   [n, n_heads, n_splits, head_dim] f32, then [n, n_heads, n_splits, 2] f32 (maximum, sum)
//
// Row i sees positions first .. positions[i]; first is 0 or the start of the window. Split s takes the s-th
// part of them, at least MIN_SPLIT positions long; a split without positions writes a neutral partial
// (maximum -inf, sum 0). With one split, the result goes to y and there is no second launch.
//
// Launch       split: grid (n, n_kv_heads ceil(group / 8), n_splits), block (128), shared 0. combine: grid (n
//              n_heads), block (128), shared 0
// Requires     head_dim even, at most 128 DIMS; caches 16-byte aligned. A position whose block is out of
//              range is not seen
// Aliasing     none
// Accumulation scores, sums and partials in f32
// Determinism  same bits every run for the same n_splits: tiles of 32 positions, each reduced as a tree;
//              splits are merged in order
// Capture      safe: the grid is fixed and all lengths are read on the device
#include "reduce.cuh"
#include "view.cuh"

struct Sizes {
    u32 n_heads, n_kv_heads, head_dim, n_blocks, kv_block, n_seqs, max_blocks, n_splits;
    u32 window;  // 0: no window
    float scale;
    float softcap;  // 0: none
};

const u32 HEADS = 8;   // query heads per block
const u32 TILE = 32;   // positions per tile
const u32 WARPS = 4;
const u32 AHEAD = 4;   // keys per warp, and pairs of values per thread, in flight
const u32 MIN_SPLIT = 32;

inline float2 load_pair(const float* p) { return *(const float2*)p; }

template <typename T> inline float2 load_pair(const T* p) {
    u32 w = *(const u32*)p;
    T a, b;
    a.bits = (u16)w;
    b.bits = (u16)(w >> 16);
    return make_float2(to_f32(a), to_f32(b));
}

// A signed byte of a row with a scale.
struct Byte {
    i8 value;
};

inline float to_f32(Byte x) { return (float)x.value; }

inline float2 load_pair(const Byte* p) {
    u32 w = *(const u16*)p;
    return make_float2((float)(i8)(u8)w, (float)(i8)(u8)(w >> 8));
}

template <typename T> struct Scaled {
    static const bool IS = false;
};
template <> struct Scaled<Byte> {
    static const bool IS = true;
};

// Adds a head's sink to the sum of its weights, which are relative to max_score. A sink so far above all scores that its
// weight overflows leaves nothing of the values, as it should.
inline float with_sink(float sum, float max_score, const float* sinks, u32 head) {
    return sinks == nullptr || sum == 0.0f ? sum : sum + expf(sinks[head] - max_score);
}

const u64 NOWHERE = ~(u64)0;

// Returns the index of a position's row in either cache, or NOWHERE if its block is out of range.
inline u64 kv_row(const i32* table, u32 position, u32 kv_head, const Sizes& s) {
    u32 column = position / s.kv_block;
    if (column >= s.max_blocks) return NOWHERE;
    i32 block = table[column];
    if (block < 0 || (u32)block >= s.n_blocks) return NOWHERE;
    return ((u64)block * s.n_kv_heads + kv_head) * s.kv_block + (position - column * s.kv_block);
}

template <typename T, int DIMS>
inline void attention_split(float* y, float* partials, const float* q, const T* k_cache, const T* v_cache,
                            const i32* positions, const i32* seqs, const i32* tables, const Rows& q_rows,
                            const Sizes& s, const float* sinks, const float* k_scales, const float* v_scales) {
    alignas(16) __shared__ float queries[HEADS][128 * DIMS];
    __shared__ float weights[HEADS][TILE];
    __shared__ float rescale[HEADS];
    __shared__ const T* values[TILE];
    __shared__ float value_scales[Scaled<T>::IS ? TILE : 1];

    start();
    u32 row = blockIdx.x, split = blockIdx.z;
    u32 group = s.n_heads / s.n_kv_heads, chunks = (group + HEADS - 1) / HEADS;
    u32 kv_head = blockIdx.y / chunks, first_head = kv_head * group + blockIdx.y % chunks * HEADS;
    u32 n_heads = min(HEADS, (kv_head + 1) * group - first_head);
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    // This split's range of positions.
    i32 position = positions[row], seq = seqs[row];
    u32 begin = 0, end = 0;
    if (position >= 0 && seq >= 0 && (u32)seq < s.n_seqs) {
        u32 seen = (u32)position + 1;
        u32 first = s.window != 0 && seen > s.window ? seen - s.window : 0;
        u32 part = max((seen - first + s.n_splits - 1) / s.n_splits, MIN_SPLIT);
        begin = min(first + split * part, seen);
        end = min(begin + part, seen);
    }
    const i32* table = tables + (u64)(end > begin ? seq : 0) * s.max_blocks;

    for (u32 i = threadIdx.x; i < n_heads * s.head_dim; i += blockDim.x) {
        u32 head = i / s.head_dim, d = i % s.head_dim;
        queries[head][d] = q[q_rows.start(row * s.n_heads + first_head + head) + d] * s.scale;
    }
    // Warp w keeps the running maxima and sums of heads w and w + WARPS; every thread keeps its elements of
    // all outputs.
    float max_score[HEADS / WARPS], sum[HEADS / WARPS];
#pragma unroll
    for (int j = 0; j < HEADS / WARPS; j++) {
        max_score[j] = -inf_f32();
        sum[j] = 0.0f;
    }
    float acc[HEADS][DIMS] = {};
    __syncthreads();

#pragma unroll 1
    for (u32 tile = begin; tile < end; tile += TILE) {
        u32 n = min(TILE, end - tile);
#pragma unroll 1
        for (u32 first = warp; first < TILE; first += WARPS * AHEAD) {
            const T* keys[AHEAD];
            float2 pairs[AHEAD][2 * DIMS];
            float key_scales[AHEAD];
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                u32 p = first + WARPS * i;
                u64 at = p < n ? kv_row(table, tile + p, kv_head, s) : NOWHERE;
                keys[i] = at != NOWHERE ? k_cache + at * s.head_dim : nullptr;
                if (lane == 0) values[p] = at != NOWHERE ? v_cache + at * s.head_dim : nullptr;
                if (Scaled<T>::IS) {
                    key_scales[i] = at != NOWHERE ? k_scales[at] : 0.0f;
                    if (lane == 0) value_scales[p] = at != NOWHERE ? v_scales[at] : 0.0f;
                }
#pragma unroll
                for (int j = 0; j < 2 * DIMS; j++) {
                    u32 d = 2 * lane + 64 * j;
                    bool there = keys[i] != nullptr && d < s.head_dim;
                    pairs[i][j] = there ? load_pair(keys[i] + d) : make_float2(0.0f, 0.0f);
                }
            }
#pragma unroll 1
            for (u32 h = 0; h < n_heads; h++) {
                float dots[AHEAD] = {};
#pragma unroll
                for (int j = 0; j < 2 * DIMS; j++) {
                    u32 d = 2 * lane + 64 * j;
                    if (d < s.head_dim) {
                        float2 query = *(const float2*)&queries[h][d];
#pragma unroll
                        for (int i = 0; i < AHEAD; i++) {
                            dots[i] = __fmaf_rn(pairs[i][j].x, query.x, dots[i]);
                            dots[i] = __fmaf_rn(pairs[i][j].y, query.y, dots[i]);
                        }
                    }
                }
#pragma unroll
                for (int i = 0; i < AHEAD; i++) {
                    float score = warp_reduce(dots[i], Add());
                    if (Scaled<T>::IS) score *= key_scales[i];
                    // An unseen position has no weight.
                    if (lane == 0) weights[h][first + WARPS * i] = keys[i] != nullptr ? score : -inf_f32();
                }
            }
        }
        __syncthreads();
#pragma unroll
        for (int j = 0; j < HEADS / WARPS; j++) {
            u32 h = warp + WARPS * j;
            if (h < n_heads) {
                float score = weights[h][lane];
                if (s.softcap > 0.0f && score != -inf_f32()) score = s.softcap * tanhf(score / s.softcap);
                float tile_max = fmaxf(max_score[j], warp_reduce(score, Max()));
                // No position seen so far: any finite maximum works.
                float base = tile_max == -inf_f32() ? 0.0f : tile_max;
                float factor = expf(max_score[j] - base), w = expf(score - base);
                weights[h][lane] = w;
                sum[j] = __fmaf_rn(sum[j], factor, warp_reduce(w, Add()));
                max_score[j] = tile_max;
                if (lane == 0) rescale[h] = factor;
            }
        }
        __syncthreads();
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            if (h < n_heads) {
                float factor = rescale[h];
#pragma unroll
                for (int j = 0; j < DIMS; j++) acc[h][j] *= factor;
            }
        }
#pragma unroll 1
        for (u32 first = 0; first < n; first += 2 * AHEAD) {
            float v[2 * AHEAD][DIMS];
#pragma unroll
            for (int i = 0; i < 2 * AHEAD; i++) {
                const T* value = values[first + i];
#pragma unroll
                for (int j = 0; j < DIMS; j++) {
                    u32 d = threadIdx.x + 128 * j;
                    v[i][j] = value != nullptr && d < s.head_dim ? to_f32(value[d]) : 0.0f;
                    if (Scaled<T>::IS) v[i][j] *= value_scales[first + i];
                }
            }
#pragma unroll
            for (int i = 0; i < 2 * AHEAD; i++) {
#pragma unroll
                for (int h = 0; h < HEADS; h++) {
                    if (h < n_heads) {
#pragma unroll
                        for (int j = 0; j < DIMS; j++) {
                            acc[h][j] = __fmaf_rn(weights[h][first + i], v[i][j], acc[h][j]);
                        }
                    }
                }
            }
        }
        __syncthreads();
    }

    // rescale passes the sums to the threads that write.
#pragma unroll
    for (int j = 0; j < HEADS / WARPS; j++) {
        u32 h = warp + WARPS * j;
        if (lane == 0) rescale[h] = h < n_heads ? with_sink(sum[j], max_score[j], sinks, first_head + h) : 0.0f;
    }
    __syncthreads();
    u64 head_row = (u64)row * s.n_heads + first_head;
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
        if (h < n_heads) {
            float total = rescale[h];
#pragma unroll
            for (int j = 0; j < DIMS; j++) {
                u32 d = threadIdx.x + 128 * j;
                if (d < s.head_dim) {
                    if (partials == nullptr) {
                        y[(head_row + h) * s.head_dim + d] = total == 0.0f ? 0.0f : acc[h][j] / total;
                    } else {
                        partials[((head_row + h) * s.n_splits + split) * s.head_dim + d] = acc[h][j];
                    }
                }
            }
        }
    }
    if (partials != nullptr) {
        u64 n_partials = (u64)gridDim.x * s.n_heads * s.n_splits;
#pragma unroll
        for (int j = 0; j < HEADS / WARPS; j++) {
            u32 h = warp + WARPS * j;
            if (lane == 0 && h < n_heads) {
                float* scales = partials + n_partials * s.head_dim + 2 * ((head_row + h) * s.n_splits + split);
                scales[0] = max_score[j];
                scales[1] = sum[j];
            }
        }
    }
}

struct Later {
    inline u32 operator()(u32 a, u32 b) const { return max(a, b); }
};

#define ATTENTION(size, dims, name, T)                                                                     \
    extern "C" __global__ __launch_bounds__(128) void attention_split_d##size##_##name(                    \
        float* y, float* partials, const float* q, const T* k_cache, const T* v_cache, const i32* positions, \
        const i32* seqs, const i32* tables, Rows q_rows, Sizes s, const float* sinks) {                    \
        attention_split<T, dims>(y, partials, q, k_cache, v_cache, positions, seqs, tables, q_rows, s,     \
                                 sinks, nullptr, nullptr);                                                 \
    }

#define ATTENTION_OF_BYTES(size, dims)                                                                     \
    extern "C" __global__ __launch_bounds__(128) void attention_split_d##size##_u8(                        \
        float* y, float* partials, const float* q, const Byte* k_cache, const Byte* v_cache,               \
        const i32* positions, const i32* seqs, const i32* tables, Rows q_rows, Sizes s, const float* sinks, \
        const float* k_scales, const float* v_scales) {                                                    \
        attention_split<Byte, dims>(y, partials, q, k_cache, v_cache, positions, seqs, tables, q_rows, s,  \
                                    sinks, k_scales, v_scales);                                            \
    }

// unit combine
extern "C" __global__ __launch_bounds__(128) void attention_combine_f32(float* y, const float* partials, u32 head_dim,
                                                                        u32 n_splits, u32 n_heads,
                                                                        const float* sinks) {
    start();
    u64 row = blockIdx.x;
    const float* parts = partials + row * n_splits * head_dim;
    const float* scales = partials + (u64)gridDim.x * n_splits * head_dim + 2 * row * n_splits;
    // Splits are planned for the longest context; after the last one that saw a position there is nothing to
    // merge.
    float max_score = -inf_f32();
    u32 last = 0;
    for (u32 s = threadIdx.x; s < n_splits; s += blockDim.x) {
        max_score = fmaxf(max_score, scales[2 * s]);
        if (scales[2 * s + 1] != 0.0f) last = s + 1;
    }
    max_score = block_reduce(max_score, Max(), -inf_f32());
    n_splits = block_reduce(last, Later(), 0u);
    float total = 0.0f;
    for (u32 s = 0; s < n_splits; s++) {
        if (scales[2 * s + 1] != 0.0f) total += scales[2 * s + 1] * expf(scales[2 * s] - max_score);
    }
    total = with_sink(total, max_score, sinks, (u32)(row % n_heads));
    for (u32 d = threadIdx.x; d < head_dim; d += blockDim.x) {
        float sum = 0.0f;
        for (u32 s = 0; s < n_splits; s++) {
            if (scales[2 * s + 1] != 0.0f) {
                sum = __fmaf_rn(parts[(u64)s * head_dim + d], expf(scales[2 * s] - max_score), sum);
            }
        }
        y[row * head_dim + d] = total == 0.0f ? 0.0f : sum / total;
    }
}

// unit f16
ATTENTION(128, 1, f16, F16)
ATTENTION(256, 2, f16, F16)
ATTENTION(512, 4, f16, F16)
// unit bf16
ATTENTION(128, 1, bf16, BF16)
ATTENTION(256, 2, bf16, BF16)
ATTENTION(512, 4, bf16, BF16)
// unit f32
ATTENTION(128, 1, f32, float)
ATTENTION(256, 2, f32, float)
ATTENTION(512, 4, f32, float)
// unit u8
ATTENTION_OF_BYTES(128, 1)
ATTENTION_OF_BYTES(256, 2)
ATTENTION_OF_BYTES(512, 4)
