// experts.cu: mixture of experts: routing, and matmuls of rows with their chosen experts
//
//   ids        [n, n_choices]     i32: experts of each row; one outside 0 .. n_experts - 1 is an empty choice
//   weights    [n, n_choices]     f32
//   positions  [n]                i32, or null; a row with a negative one is padding and gets no expert
//   w          [n_experts, n, k]  packed (packed.cuh) or in file layout; stride p.expert_bytes between experts
//   bias       [n_experts, n]     f32, stride p.bias_stride, or null
//   p          sizes; see Params
//
// expert_route turns logits into ids and weights: one block per row, each thread ranks its experts among all.
// expert_logits computes the logits of one row next to the norm before it: each block norms the row, so that
// no launch of one block comes before the router.
//
// For few rows, expert_gate and expert_sum read the experts of one row per block. A warp has a tile of eight
// rows of w; lane 4 r + s has row r. The kernel learns its experts only after the wait, so it cannot load
// weights earlier; it then prefetches the whole tile before it quantises the activations. With logits,
// expert_gate is the router too: every block ranks the experts of its row, which takes it less time than a
// launch, and one of them writes ids and weights.
//
// For many rows, expert_sort lists the choices of each expert in order; expert_rows multiplies eight of them
// with a tile at a time, so each weight is read once per eight rows; expert_join and expert_combine finish.
//
// Launch       expert_route: grid (n), block (128), shared 8 n_experts. expert_logits: grid (ceil(n_experts / 4)),
//              block (128), shared 4 k. expert_gate: grid (ceil(tiles / 2), n_choices, n), block (128), shared one
//              row of x, with logits also 4 n_experts rounded up to 16. expert_sum: grid (tiles, n), block (256),
//              shared n_choices rows of x. expert_sort: grid (n_experts), block (256), shared 0. expert_rows:
//              grid (ceil(tiles / 8), n_experts, weights), block (256), shared eight rows of x. expert_join,
//              expert_combine: grid (ceil(columns / 256), rows), block (256), shared 0
// Requires     expert_logits: k a multiple of 4; all pointers 16-byte aligned; no launch writes w or norm
//              packed: k a multiple of the dtype's block length, n of 8; w and rows of x 16-byte aligned
//              where k % 8 == 0
// Aliasing     none
// Accumulation packed weights multiply rows rounded to bytes in blocks of 32 (packed.cuh); sums over
//              sub-blocks in f32
// Determinism  same bits every run: each lane adds its sub-blocks in order, then four lanes are added;
//              choices are added in order. A row has the same bits for any n and in both forms
// Capture      safe
#include "joined.cuh"
#include "overlap.cuh"
#include "packed.cuh"
#include "plain.cuh"
#include "reduce.cuh"

struct Params {
    u64 expert_bytes;
    u32 k;            // columns of w
    u32 n;            // rows of an expert
    u32 n_experts;
    u32 n_choices;    // choices per row of x
    u32 n_pairs;      // choices of all rows
    u32 bias_stride;
    u32 x_stride;     // floats between rows of x
    Activation activation;
};

struct RouteParams {
    u32 n_experts;
    u32 n_choices;
    u32 score;        // 0: softmax, 1: sigmoid, 2: softmax over the chosen experts
    u32 n_groups;     // 0: no groups
    u32 n_kept;
    u32 n_best;
    u32 renormalise;
    float scale;
};

const u32 MAX_CHOICES = 64, MAX_GROUPS = 64;

inline bool is_nan(float x) { return !(x == x); }

inline bool is_chosen(i32 id, const Params& p) { return id >= 0 && (u32)id < p.n_experts; }

inline void prefetch(const u8* from, u32 bytes) {
#ifndef REFRAIN_ON_HOST
    for (u32 at = 128 * (threadIdx.x % 32); at < bytes; at += 128 * 32) {
        asm volatile("prefetch.global.L2 [%0];" ::"l"(from + at));
    }
#endif
}

// Packed weights and byte rows.
template <typename Q> struct Packed {
    inline static u32 units(u32 k) { return (k + Q::COLS - 1) / Q::COLS; }
    inline static u32 row_bytes(u32 k) { return units(k) * Q::COLS / 4 * 5; }
    inline static const u8* tile(const u8* w, u32 tile, u32 k) { return w + (u64)tile * units(k) * Q::BYTES; }
    inline static void prefetch_tile(const u8* w, u32 at, const Params& p) { prefetch(tile(w, at, p.k), units(p.k) * Q::BYTES); }

    // Stores a row of x as bytes; all threads of the block call it.
    inline static void keep(u8* row, const float* x, u32 k) {
        u32 padded = units(k) * Q::COLS, lane = threadIdx.x % 32;
#pragma unroll 1
        for (u32 start = 8 * (threadIdx.x - lane); start < padded; start += 8 * blockDim.x) {
            u32 at = start + 8 * lane;
            float v[8] = {};
            if (at < k) {
                float4 a = *(const float4*)(x + at), b = *(const float4*)(x + at + 4);
                v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
            }
            ByteBlock block(v);
            if (at >= padded) continue;
            *(uint2*)(row + at) = make_uint2(block.low, block.high);
            if (at % 32 == 0) *(float2*)(row + padded + at / 4) = block.scale;
        }
    }

    template <int M> inline static void sums(const u8* w, u32 at, const u8* x, const Params& p, float* acc) {
        u32 lane = threadIdx.x % 32, n_units = units(p.k), padded = n_units * Q::COLS, bytes = row_bytes(p.k);
        const u8* unit = tile(w, at, p.k);
#pragma unroll(M == 1 ? 4 : 1)
        for (u32 u = 0; u < n_units; u++) {
#pragma unroll
            for (int c = 0; c < Q::SUBS; c++) {
                Sub sub = Q::load(unit + u * Q::BYTES, c, lane);
                u32 block = u * (Q::COLS / 32) + TILE_SUBS * c + lane % TILE_SUBS;
#pragma unroll
                for (int i = 0; i < M; i++) {
                    const u8* row = x + i * bytes;
                    const uint4* q = (const uint4*)(row + 32 * block);
                    float2 scale = *(const float2*)(row + padded + 8 * block);
                    uint4 a = q[0], b = q[1];
                    i32 low = dot_bytes(sub.q[0], a.x, 0, Q::SIGNED), high = dot_bytes(sub.q[4], b.x, 0, Q::SIGNED);
                    low = dot_bytes(sub.q[1], a.y, low, Q::SIGNED), high = dot_bytes(sub.q[5], b.y, high, Q::SIGNED);
                    low = dot_bytes(sub.q[2], a.z, low, Q::SIGNED), high = dot_bytes(sub.q[6], b.z, high, Q::SIGNED);
                    low = dot_bytes(sub.q[3], a.w, low, Q::SIGNED), high = dot_bytes(sub.q[7], b.w, high, Q::SIGNED);
                    float s = __fmaf_rn(sub.scale[0], (float)low, sub.scale[1] * (float)high);
                    acc[i] = __fmaf_rn(s, scale.x, acc[i]);
                    acc[i] = __fmaf_rn(-sub.min, scale.y, acc[i]);
                }
            }
        }
    }
};

// Weights in file layout and float rows.
template <typename Q> struct File {
    inline static u32 row_bytes(u32 k) { return 4 * ((k + 7) / 8 * 8); }
    inline static u64 w_bytes(u32 k) { return (u64)k * Q::BYTES / Q::LEN; }
    inline static const u8* row(const u8* w, u32 at, const Params& p) {
        // Rows past the end repeat the last one; their results are not stored.
        return w + min(at * TILE_ROWS + threadIdx.x % 32 / 4, p.n - 1) * w_bytes(p.k);
    }
    inline static void prefetch_tile(const u8* w, u32 at, const Params& p) {
        u32 rows = min(TILE_ROWS, p.n - at * TILE_ROWS);
        prefetch(w + at * TILE_ROWS * w_bytes(p.k), rows * (u32)w_bytes(p.k));
    }

    inline static void keep(u8* to, const float* x, u32 k) {
        for (u32 at = threadIdx.x; at < row_bytes(k) / 4; at += blockDim.x) ((float*)to)[at] = at < k ? x[at] : 0.0f;
    }

    template <int M> inline static void sums(const u8* w, u32 at, const u8* x, const Params& p, float* acc) {
        const u32 PARTS = Q::LEN / 8;
        const u8* mine = row(w, at, p);
        u32 lane = threadIdx.x % 4, bytes = row_bytes(p.k);
        if (Ragged<Q>::ALLOWED && p.k % 8 != 0) {
            typedef typename Ragged<Q>::Element T;
            for (u32 first = 8 * lane; first < p.k; first += 32) {
                for (u32 e = first; e < min(first + 8, p.k); e++) {
                    float v = to_f32(((const T*)mine)[e]);
#pragma unroll
                    for (int i = 0; i < M; i++) acc[i] = __fmaf_rn(v, ((const float*)(x + i * bytes))[e], acc[i]);
                }
            }
            return;
        }
        u32 n = p.k / 8;
#pragma unroll(M == 1 ? 4 : 1)
        for (u32 i = lane; i < n; i += 4) {
            u32 block = i / PARTS, part = i % PARTS;
            typename Q::Raw raw = Q::load(mine + (u64)block * Q::BYTES, part);
            float v[8];
            Q::decode(raw, part, v);
#pragma unroll
            for (int m = 0; m < M; m++) {
                const float* start = (const float*)(x + m * bytes) + block * Q::LEN;
                float4 a = *(const float4*)(start + Q::first(part)), b = *(const float4*)(start + Q::second(part));
                float even = __fmaf_rn(v[0], a.x, acc[m]), odd = v[1] * a.y;
                even = __fmaf_rn(v[2], a.z, even), odd = __fmaf_rn(v[3], a.w, odd);
                even = __fmaf_rn(v[4], b.x, even), odd = __fmaf_rn(v[5], b.y, odd);
                even = __fmaf_rn(v[6], b.z, even), odd = __fmaf_rn(v[7], b.w, odd);
                acc[m] = even + odd;
            }
        }
    }
};

// Returns the sum of row r, in lanes 4 r to 4 r + 3.
inline float of_row(float acc) {
    float sum = acc + __shfl_xor_sync(0xffffffffu, acc, 1);
    return sum + __shfl_xor_sync(0xffffffffu, sum, 2);
}

// Chooses the experts of a row by its logits, without bias and groups, as expert_route does. All threads of the
// block call it, after each wrote its logits (n_experts of them, then -inf up to a multiple of four) and said
// whether one is NaN or infinite and whether one is not -inf. Returns false if the row has no valid choice.
inline bool choose(u32* chosen, const float* logits, bool is_bad, bool is_some, const RouteParams& r) {
    bool none = __syncthreads_or(is_bad) || !__syncthreads_or(is_some);
    for (u32 i = threadIdx.x; i < r.n_experts && !none; i += blockDim.x) {
        float own = logits[i];
        u32 rank = 0;
        for (u32 j = 0; j < r.n_experts; j += 4) {
            float4 v = *(const float4*)(logits + j);
            rank += v.x > own || v.x == own && j < i ? 1 : 0;
            rank += v.y > own || v.y == own && j + 1 < i ? 1 : 0;
            rank += v.z > own || v.z == own && j + 2 < i ? 1 : 0;
            rank += v.w > own || v.w == own && j + 3 < i ? 1 : 0;
        }
        if (rank < r.n_choices) chosen[rank] = i;
    }
    __syncthreads();
    return !none;
}

// Writes the ids and weights of a row; the lanes of one warp call it.
inline void write_choices(i32* ids, float* weights, const u32* chosen, const float* logits, const float* scales,
                          bool is_valid, const RouteParams& r) {
    u32 lane = threadIdx.x % 32;
    float most = -inf_f32(), sum = 0.0f, factors[MAX_CHOICES / 32], total = 0.0f;
    for (u32 i = lane; i < r.n_experts; i += 32) most = fmaxf(most, logits[i]);
    most = warp_reduce(most, Max());
    if (r.score == 0) {
        for (u32 i = lane; i < r.n_experts; i += 32) sum += expf(logits[i] - most);
        sum = warp_reduce(sum, Add());
    }
#pragma unroll
    for (u32 part = 0; part < MAX_CHOICES / 32; part++) {
        u32 i = lane + 32 * part;
        float v = is_valid && i < r.n_choices ? logits[chosen[i]] : most;
        // The largest of all logits is the largest of the chosen.
        float factor = r.score == 0 ? expf(v - most) / sum : r.score == 1 ? 1.0f / (1.0f + expf(-v)) : expf(v - most);
        factors[part] = i < r.n_choices ? factor : 0.0f;
        total += factors[part];
    }
    total = warp_reduce(total, Add());
    if (r.score == 2) {
        float over = total;
        total = 0.0f;
#pragma unroll
        for (u32 part = 0; part < MAX_CHOICES / 32; part++) {
            factors[part] = factors[part] / over;
            total += factors[part];
        }
        total = warp_reduce(total, Add());
    }
    float divisor = r.renormalise != 0 ? total + 1e-20f : 1.0f;
#pragma unroll
    for (u32 part = 0; part < MAX_CHOICES / 32; part++) {
        u32 i = lane + 32 * part;
        if (i >= r.n_choices) continue;
        ids[i] = is_valid ? (i32)chosen[i] : (i32)i;
        float scale = scales != nullptr && is_valid ? r.scale * scales[chosen[i]] : r.scale;
        weights[i] = is_valid ? factors[part] / divisor * scale : nan_f32();
    }
}

template <typename X>
inline void expert_gate(float* y, i32* ids, float* weights, const float* x, const float* logits, const u8* gate,
                        const u8* up, const float* gate_bias, const float* up_bias, const float* scales,
                        const i32* positions, const RouteParams& r, const Params& p) {
    DYNAMIC_SHARED(shared);
    __shared__ float ups[2][TILE_ROWS];
    __shared__ u32 chosen[MAX_CHOICES];
    start();
    u32 pair = blockIdx.z * p.n_choices + blockIdx.y;
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, tiles = (p.n + TILE_ROWS - 1) / TILE_ROWS;
    u32 tile = blockIdx.x * 2 + warp / 2, row = tile * TILE_ROWS + lane / 4;
    bool is_up = warp & 1;
    float* to = y + (u64)pair * p.n;
    i32 id;
    if (logits != nullptr && positions != nullptr && positions[blockIdx.z] < 0) {
        id = -1;
        if (blockIdx.x == 0 && threadIdx.x == 0) {
            ids[pair] = -1;
            weights[pair] = 0.0f;
        }
    } else if (logits != nullptr) {
        float* values = (float*)(shared + (X::row_bytes(p.k) + 15) / 16 * 16);
        bool is_bad = false, is_some = false;
        for (u32 i = threadIdx.x; i < (r.n_experts + 3) / 4 * 4; i += blockDim.x) {
            float v = i < r.n_experts ? logits[(u64)blockIdx.z * r.n_experts + i] : -inf_f32();
            values[i] = v;
            is_bad = is_bad || is_nan(v) || v == inf_f32();
            is_some = is_some || v != -inf_f32();
        }
        bool is_valid = choose(chosen, values, is_bad, is_some, r);
        id = is_valid ? (i32)chosen[blockIdx.y] : (i32)blockIdx.y;
        if (blockIdx.x == 0 && blockIdx.y == 0 && warp == 3) {
            u32 first = blockIdx.z * p.n_choices;
            write_choices(ids + first, weights + first, chosen, values, scales, is_valid, r);
        }
    } else {
        id = ids[pair];
    }
    if (!is_chosen(id, p)) {
        u32 at = blockIdx.x * 2 * TILE_ROWS + threadIdx.x;
        if (threadIdx.x < 2 * TILE_ROWS && at < p.n) to[at] = 0.0f;
        return;
    }
    const u8* w = (is_up ? up : gate) + id * p.expert_bytes;
    if (tile < tiles) X::prefetch_tile(w, tile, p);
    X::keep(shared, x + (u64)blockIdx.z * p.x_stride, p.k);
    __syncthreads();
    float acc[1] = {0.0f};
    if (tile < tiles) X::template sums<1>(w, tile, shared, p, acc);
    float sum = of_row(acc[0]);
    if (is_up && lane % 4 == 0) ups[warp / 2][lane / 4] = sum;
    __syncthreads();
    if (is_up || lane % 4 != 0 || row >= p.n) return;
    float other = ups[warp / 2][lane / 4];
    if (gate_bias != nullptr) {
        sum += gate_bias[(u64)id * p.bias_stride + row];
        other += up_bias[(u64)id * p.bias_stride + row];
    }
    to[row] = joined(sum, other, p.activation);
}

template <typename X>
inline void expert_sum(float* y, const float* x, const i32* ids, const float* weights, const u8* down, const float* bias,
                       const Params& p) {
    DYNAMIC_SHARED(shared);
    __shared__ float parts[MAX_CHOICES][TILE_ROWS];
    start();
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, tile = blockIdx.x, first = blockIdx.y * p.n_choices;
    u32 bytes = X::row_bytes(p.k);
    for (u32 choice = warp; choice < p.n_choices; choice += 8) {
        i32 id = ids[first + choice];
        if (is_chosen(id, p)) X::prefetch_tile(down + id * p.expert_bytes, tile, p);
    }
    for (u32 choice = 0; choice < p.n_choices; choice++) {
        X::keep(shared + choice * bytes, x + (u64)(first + choice) * p.x_stride, p.k);
    }
    __syncthreads();
    for (u32 choice = warp; choice < p.n_choices; choice += 8) {
        i32 id = ids[first + choice];
        if (!is_chosen(id, p)) continue;
        float acc[1] = {0.0f};
        X::template sums<1>(down + id * p.expert_bytes, tile, shared + choice * bytes, p, acc);
        float sum = of_row(acc[0]);
        if (lane % 4 == 0) parts[choice][lane / 4] = sum;
    }
    __syncthreads();
    u32 row = tile * TILE_ROWS + threadIdx.x;
    if (threadIdx.x >= TILE_ROWS || row >= p.n) return;
    float total = 0.0f;
    for (u32 choice = 0; choice < p.n_choices; choice++) {
        i32 id = ids[first + choice];
        if (!is_chosen(id, p)) continue;
        float part = parts[choice][threadIdx.x];
        if (bias != nullptr) part += bias[(u64)id * p.bias_stride + row];
        total = __fmaf_rn(weights[first + choice], part, total);
    }
    y[(u64)blockIdx.y * p.n + row] = total;
}

// Computes z[weight, choice, row of w], eight choices of an expert at a time.
template <typename X>
inline void expert_rows(float* z, const float* x, const u32* order, const u32* begin, const u8* w0, const u8* w1,
                        const Params& p) {
    const int M = 8;
    DYNAMIC_SHARED(shared);
    start();
    u32 expert = blockIdx.y, first = begin[expert], end = begin[expert + 1];
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, tiles = (p.n + TILE_ROWS - 1) / TILE_ROWS;
    u32 tile = blockIdx.x * 8 + warp, row = tile * TILE_ROWS + lane / 4, bytes = X::row_bytes(p.k);
    const u8* w = (blockIdx.z == 0 ? w0 : w1) + expert * p.expert_bytes;
    float* to = z + (u64)blockIdx.z * p.n_pairs * p.n;
#pragma unroll 1
    for (; first < end; first += M) {
        __syncthreads();
#pragma unroll 1
        for (u32 i = 0; i < M; i++) {
            u32 pair = order[min(first + i, end - 1)];
            X::keep(shared + i * bytes, x + (u64)(pair / p.n_choices) * p.x_stride, p.k);
        }
        __syncthreads();
        if (tile >= tiles) continue;
        float acc[M] = {};
        X::template sums<M>(w, tile, shared, p, acc);
#pragma unroll
        for (int i = 0; i < M; i++) {
            float sum = of_row(acc[i]);
            if (lane % 4 == 0 && row < p.n && first + i < end) to[(u64)order[first + i] * p.n + row] = sum;
        }
    }
}

#define EXPERTS(name, X)                                                                                            \
    extern "C" __global__ __launch_bounds__(128) void expert_gate_##name(                                           \
        float* y, i32* ids, float* weights, const float* x, const float* logits, const u8* gate, const u8* up,      \
        const float* gate_bias, const float* up_bias, const float* scales, const i32* positions, RouteParams r,     \
        Params p) {                                                                                                 \
        expert_gate<X>(y, ids, weights, x, logits, gate, up, gate_bias, up_bias, scales, positions, r, p);          \
    }                                                                                                               \
    extern "C" __global__ __launch_bounds__(256) void expert_sum_##name(                                            \
        float* y, const float* x, const i32* ids, const float* weights, const u8* down, const float* bias, Params p) { \
        expert_sum<X>(y, x, ids, weights, down, bias, p);                                                           \
    }                                                                                                               \
    extern "C" __global__ __launch_bounds__(256) void expert_rows_##name(                                           \
        float* z, const float* x, const u32* order, const u32* begin, const u8* w0, const u8* w1, Params p) {       \
        expert_rows<X>(z, x, order, begin, w0, w1, p);                                                              \
    }

// unit route
extern "C" __global__ __launch_bounds__(128) void expert_route_f32(i32* ids, float* weights, const float* logits,
                                                                  const float* bias, const float* scales,
                                                                  const i32* positions, RouteParams p) {
    DYNAMIC_SHARED(shared);
    __shared__ u32 chosen[MAX_CHOICES];
    __shared__ float worths[MAX_GROUPS], factors[MAX_CHOICES];
    float* scores = (float*)shared;
    float* compared = scores + p.n_experts;
    start();
    logits += (u64)blockIdx.x * p.n_experts;
    ids += (u64)blockIdx.x * p.n_choices;
    weights += (u64)blockIdx.x * p.n_choices;
    if (positions != nullptr && positions[blockIdx.x] < 0) {
        for (u32 i = threadIdx.x; i < p.n_choices; i += blockDim.x) {
            ids[i] = -1;
            weights[i] = 0.0f;
        }
        return;
    }
    float most = -inf_f32(), bad = 0.0f;
    for (u32 i = threadIdx.x; i < p.n_experts; i += blockDim.x) {
        float v = logits[i];
        most = fmaxf(most, v);
        if (is_nan(v)) bad = 1.0f;
    }
    most = block_reduce(most, Max(), -inf_f32());
    float sum = 0.0f;
    for (u32 i = threadIdx.x; i < p.n_experts; i += blockDim.x) {
        float v = logits[i];
        scores[i] = p.score == 0 ? expf(v - most) : p.score == 1 ? 1.0f / (1.0f + expf(-v)) : v;
        sum += scores[i];
    }
    if (p.score == 0) sum = block_reduce(sum, Add(), 0.0f);
    bool sums = p.n_groups != 0 && p.n_best > 1;
    for (u32 i = threadIdx.x; i < p.n_experts; i += blockDim.x) {
        if (p.score == 0) scores[i] = scores[i] / sum;
        compared[i] = bias != nullptr ? scores[i] + bias[i] : sums ? scores[i] : logits[i];
        if (is_nan(compared[i])) bad = 1.0f;
    }
    bad = block_reduce(bad, Add(), 0.0f);
    bool is_odd = bad != 0.0f || most == inf_f32() || most == -inf_f32();
    if (is_odd) {
        for (u32 i = threadIdx.x; i < p.n_choices; i += blockDim.x) {
            ids[i] = (i32)i;
            weights[i] = nan_f32();
        }
        return;
    }
    __syncthreads();
    if (p.n_groups != 0) {
        u32 size = p.n_experts / p.n_groups;
        for (u32 g = threadIdx.x; g < p.n_groups; g += blockDim.x) {
            // The n_best largest scores of the group in descending order; ties by index.
            const float* of = compared + g * size;
            float total = 0.0f, last = 0.0f;
            u32 last_at = 0;
            for (u32 i = 0; i < p.n_best; i++) {
                u32 at = size;
                for (u32 j = 0; j < size; j++) {
                    bool is_left = i == 0 || of[j] < last || of[j] == last && j > last_at;
                    if (is_left && (at == size || of[j] > of[at])) at = j;
                }
                last = of[at];
                last_at = at;
                total += last;
            }
            worths[g] = total;
        }
        __syncthreads();
        for (u32 i = threadIdx.x; i < p.n_experts; i += blockDim.x) {
            u32 own = i / size, better = 0;
            for (u32 g = 0; g < p.n_groups; g++) {
                better += worths[g] > worths[own] || worths[g] == worths[own] && g < own ? 1 : 0;
            }
            // NaN compares neither larger nor smaller, so experts of dropped groups are never ranked.
            if (better >= p.n_kept) compared[i] = nan_f32();
        }
        __syncthreads();
    }
    for (u32 i = threadIdx.x; i < p.n_experts; i += blockDim.x) {
        float own = compared[i];
        if (is_nan(own)) continue;
        u32 rank = 0;
        for (u32 j = 0; j < p.n_experts; j++) rank += compared[j] > own || compared[j] == own && j < i ? 1 : 0;
        if (rank < p.n_choices) chosen[rank] = i;
    }
    __syncthreads();
    if (threadIdx.x != 0) return;
    float high = -inf_f32(), total = 0.0f;
    for (u32 i = 0; i < p.n_choices; i++) {
        factors[i] = scores[chosen[i]];
        high = fmaxf(high, factors[i]);
    }
    if (p.score == 2) {
        for (u32 i = 0; i < p.n_choices; i++) {
            factors[i] = expf(factors[i] - high);
            total += factors[i];
        }
        for (u32 i = 0; i < p.n_choices; i++) factors[i] = factors[i] / total;
    }
    total = 1.0f;
    if (p.renormalise != 0) {
        total = 1e-20f;
        for (u32 i = 0; i < p.n_choices; i++) total += factors[i];
    }
    for (u32 i = 0; i < p.n_choices; i++) {
        float scale = scales != nullptr ? p.scale * scales[chosen[i]] : p.scale;
        ids[i] = (i32)chosen[i];
        weights[i] = factors[i] / total * scale;
    }
}
// Logits of one row, and the norm before them: s = a + b or a, x = rms_norm(s, norm), logits = x . w^T
//
//   a, b  [k]             f32; b may be null
//   norm  [k]             f32
//   w     [n_experts, k]  f32
//   sum   [k]             f32: receives s, or null
//   x     [k]             f32
extern "C" __global__ __launch_bounds__(128) void expert_logits_f32(float* logits, float* x, float* sum, const float* a,
                                                                   const float* b, const float* __restrict__ norm,
                                                                   const float* __restrict__ w, u32 n_experts, u32 k,
                                                                   float eps) {
    DYNAMIC_SHARED(shared);
    let_next_start();
    float* row = (float*)shared;
    u32 expert = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (expert < n_experts) prefetch((const u8*)(w + (u64)expert * k), 4 * k);
    wait_for_previous();
    float squares = 0.0f;
    for (u32 i = 4 * threadIdx.x; i < k; i += 512) {
        float4 v = *(const float4*)(a + i);
        if (b != nullptr) {
            float4 u = *(const float4*)(b + i);
            v = make_float4(v.x + u.x, v.y + u.y, v.z + u.z, v.w + u.w);
        }
        if (sum != nullptr && blockIdx.x == 0) *(float4*)(sum + i) = v;
        *(float4*)(row + i) = v;
        squares = fmaf(v.x, v.x, squares);
        squares = fmaf(v.y, v.y, squares);
        squares = fmaf(v.z, v.z, squares);
        squares = fmaf(v.w, v.w, squares);
    }
    float scale = 1.0f / sqrtf(block_reduce(squares, Add(), 0.0f) / (float)k + eps);
    // A thread reads only its own elements until the barrier.
    for (u32 i = 4 * threadIdx.x; i < k; i += 512) {
        float4 v = *(const float4*)(row + i), u = *(const float4*)(norm + i);
        v = make_float4(v.x * scale * u.x, v.y * scale * u.y, v.z * scale * u.z, v.w * scale * u.w);
        *(float4*)(row + i) = v;
        if (blockIdx.x == 0) *(float4*)(x + i) = v;
    }
    __syncthreads();
    if (expert >= n_experts) return;
    const float* own = w + (u64)expert * k;
    float even = 0.0f, odd = 0.0f;
#pragma unroll 4
    for (u32 i = 4 * lane; i < k; i += 128) {
        float4 v = *(const float4*)(row + i), u = *(const float4*)(own + i);
        even = fmaf(v.x, u.x, even), odd = fmaf(v.y, u.y, odd);
        even = fmaf(v.z, u.z, even), odd = fmaf(v.w, u.w, odd);
    }
    float total = warp_reduce(even + odd, Add());
    if (lane == 0) logits[expert] = total;
}
// unit sort
// begin[expert] is the start of its choices in `order`. The choices of an expert are in ascending order.
extern "C" __global__ __launch_bounds__(256) void expert_sort_i32(u32* order, u32* begin, const i32* ids, u32 n_pairs) {
    __shared__ u32 counts[8];
    start();
    i32 expert = (i32)blockIdx.x, last = (i32)gridDim.x - 1;
    u32 before = 0, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (u32 i = threadIdx.x; i < n_pairs; i += 256) before += ids[i] >= 0 && ids[i] < expert ? 1 : 0;
    u32 next = block_reduce(before, Add(), 0u);
    if (threadIdx.x == 0) begin[blockIdx.x] = next;
    for (u32 base = 0; base < n_pairs; base += 256) {
        u32 i = base + threadIdx.x;
        bool is_mine = i < n_pairs && ids[i] == expert;
        u32 mine = is_mine ? 1 : 0, upto = mine;
        for (u32 step = 1; step < 32; step *= 2) {
            u32 other = __shfl_sync(0xffffffffu, upto, lane >= step ? lane - step : lane);
            if (lane >= step) upto += other;
        }
        __syncthreads();
        if (lane == 31) counts[warp] = upto;
        __syncthreads();
        u32 at = next + upto - mine, all = 0;
        for (u32 w = 0; w < 8; w++) {
            if (w < warp) at += counts[w];
            all += counts[w];
        }
        if (is_mine) order[at] = i;
        next += all;
    }
    if (threadIdx.x == 0 && expert == last) begin[gridDim.x] = next;
}
// unit finish
extern "C" __global__ __launch_bounds__(256) void expert_join_f32(float* y, const float* z, const i32* ids,
                                                                 const float* gate_bias, const float* up_bias, Params p) {
    start();
    u32 row = blockIdx.x * 256 + threadIdx.x, pair = blockIdx.y;
    if (row >= p.n) return;
    i32 id = ids[pair];
    u64 at = (u64)pair * p.n + row;
    float sum = 0.0f;
    if (is_chosen(id, p)) {
        float gate = z[at], up = z[(u64)p.n_pairs * p.n + at];
        if (gate_bias != nullptr) {
            gate += gate_bias[(u64)id * p.bias_stride + row];
            up += up_bias[(u64)id * p.bias_stride + row];
        }
        sum = joined(gate, up, p.activation);
    }
    y[at] = sum;
}
extern "C" __global__ __launch_bounds__(256) void expert_combine_f32(float* y, const float* z, const i32* ids,
                                                                    const float* weights, const float* bias, Params p) {
    start();
    u32 row = blockIdx.x * 256 + threadIdx.x, first = blockIdx.y * p.n_choices;
    if (row >= p.n) return;
    float total = 0.0f;
    for (u32 pair = first; pair < first + p.n_choices; pair++) {
        i32 id = ids[pair];
        if (!is_chosen(id, p)) continue;
        float part = z[(u64)pair * p.n + row];
        if (bias != nullptr) part += bias[(u64)id * p.bias_stride + row];
        total = __fmaf_rn(weights[pair], part, total);
    }
    y[(u64)blockIdx.y * p.n + row] = total;
}
// unit f32
EXPERTS(f32, File<Plain<float>>)
// unit f16
EXPERTS(f16, File<Plain<F16>>)
// unit bf16
EXPERTS(bf16, File<Plain<BF16>>)
// unit q2_k
EXPERTS(q2_k, File<Q2_K>)
// unit iq2_xxs
EXPERTS(iq2_xxs, File<IQ2_XXS>)
// unit iq2_xs
EXPERTS(iq2_xs, File<IQ2_XS>)
// unit iq2_s
EXPERTS(iq2_s, File<IQ2_S>)
// unit iq3_xxs
EXPERTS(iq3_xxs, File<IQ3_XXS>)
// unit iq3_s
EXPERTS(iq3_s, File<IQ3_S>)
// unit q4_0
EXPERTS(q4_0, Packed<PackedQ4_0>)
// unit q4_1
EXPERTS(q4_1, Packed<PackedQ4_1>)
// unit q5_0
EXPERTS(q5_0, Packed<PackedQ5_0>)
// unit q5_1
EXPERTS(q5_1, Packed<PackedQ5_1>)
// unit q8_0
EXPERTS(q8_0, Packed<PackedQ8_0>)
// unit q3_k
EXPERTS(q3_k, Packed<PackedQ3_K>)
// unit q4_k
EXPERTS(q4_k, Packed<PackedQ4_K>)
// unit q5_k
EXPERTS(q5_k, Packed<PackedQ5_K>)
// unit q6_k
EXPERTS(q6_k, Packed<PackedQ6_K>)
// unit iq4_nl
EXPERTS(iq4_nl, Packed<PackedIQ4_NL>)
// unit iq4_xs
EXPERTS(iq4_xs, Packed<PackedIQ4_XS>)
// unit mxfp4
EXPERTS(mxfp4, Packed<PackedMXFP4>)
