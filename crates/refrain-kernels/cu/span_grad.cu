// span_grad.cu: gradients of span.cu with respect to q, k and v
//
//   pairs  [n_heads, pitch, 2]        f32: lse times log2 e, and sum(dy y); zeros for padding, whose dy may be NaN
//   dq     [n, n_heads, head_dim]     T, dense
//   dk, dv [n, n_kv_heads, head_dim]  T, dense
//   dy, y  [n, n_heads, head_dim]     T, any strides, like q, k, v
//   lse    [n, n_heads]               f32
//   spans  [n, 2]                     i32
//
// With p the softmax weight of a key for a query and s their score:
//   ds = p (dy . v - sum(dy y)), dq += scale ds k, dk += scale ds q, dv += p dy
// A softcap multiplies ds by its derivative. There are three launches: pairs, then keys (dk and dv) and
// queries (dq). A block owns its rows and loops over the other side, so no two blocks add to the same result:
// a keys block adds the heads of its group one after the other.
//
// Launch       pairs: grid (ceil(n n_heads / 64)), block (128), shared 0. keys: grid (n_kv_heads, ceil(n /
//              ROWS)); queries: grid (n_heads, ceil(n / ROWS)); both block (128), shared as shared_bytes
//              below; ROWS is 128 for D = 64, else 64. exact: grid (ceil(n n_kv_heads / 4)) for keys, (ceil(n
//              n_heads / 4)) for queries, block (128), shared 0
// Requires     as span.cu; pairs 16-byte aligned, pitch even
// Aliasing     none
// Accumulation softmax weights and ds are rounded to T on tensor cores; everything else is f32
// Determinism  same bits every run: additions are in a fixed order
// Capture      safe: the grid is fixed and spans are read on the device
#include "span.cuh"

struct alignas(16) SpanFour { float a, b, c, d; };

// Applies the softcap. Without one, scores remain dot products; `unit` converts either to exponents of two.
template <int MT, int NT> inline void span_cap(float (*score)[NT][4], const SpanSizes& s) {
    float unit = 2.0f * SPAN_LOG2_E * s.scale / s.softcap;
#pragma unroll
    for (int i = 0; i < MT; i++) {
#pragma unroll
        for (int j = 0; j < NT; j++) {
#pragma unroll
            for (int e = 0; e < 4; e++) score[i][j][e] = s.softcap * span_tanh(score[i][j][e], unit);
        }
    }
}

// Returns the softcap's derivative for a capped score given as exponent `power`; minus infinity gives zero.
inline float span_cap_slope(float power, float lse, const SpanSizes& s) {
    float t = fmaxf((power + lse) * (SPAN_LN_2 / s.softcap), -1.0f);
    return 1.0f - t * t;
}

// Sets the exponent to minus infinity, a weight of zero, where a row of the warp does not see a column;
// columns start at `first`.
template <int MT, int NT> inline void span_mask(float (*power)[NT][4], const SpanRange* ranges, i32 first) {
    u32 lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < MT; i++) {
        SpanRange range[2] = {ranges[16 * i + lane / 4], ranges[16 * i + lane / 4 + 8]};
#pragma unroll
        for (int j = 0; j < NT; j++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                i32 p = first + 8 * j + lane % 4 * 2 + e % 2;
                bool there = p >= range[e / 2].first && p < range[e / 2].end;
                power[i][j][e] = there ? power[i][j][e] : -inf_f32();
            }
        }
    }
}

template <typename T, int D, int MT, bool CAPPED>
inline void span_keys(T* dk, T* dv, const T* dy, const T* q, const T* k, const T* v, const i32* spans,
                      const float* pairs, const SpanStrides& at, const SpanSizes& s, SpanRange* ranges) {
    // A warp has 16 MT keys, and takes SUB queries of a tile at a time.
    const u32 ROWS = 64 * MT, TILE = SPAN_TILE, LINE = SpanLine<D>::BYTES, STAGE = 2 * TILE * LINE + 8 * TILE;
    const int SUB = 32, NT = SUB / 8, DT = D / 8;
    DYNAMIC_SHARED(pool);
    const SharedPtr keys = shared_ptr(pool), values = keys + ROWS * LINE, stages = values + ROWS * LINE;
    start();
    u32 kv_head = blockIdx.x, first_row = span_part_of_keys() * ROWS, group = s.n_heads / s.n_kv_heads;
    u32 warp_row = threadIdx.x / 32 * 16 * MT, t = threadIdx.x % 4;
    span_load<ROWS, D>(keys, k + (u64)kv_head * at.k.head, at.k.row, first_row, 0, s.n, s.head_dim);
    span_load<ROWS, D>(values, v + (u64)kv_head * at.v.head, at.v.row, first_row, 0, s.n, s.head_dim);
    if (threadIdx.x < ROWS) ranges[threadIdx.x] = span_seeing(spans, first_row + threadIdx.x, s);
    __syncthreads();
    SpanExtent block = span_extent(ranges, ROWS), mine = span_extent(ranges + warp_row, 16 * MT);
    // Pairs are copied two at a time.
    const i32 begin = block.first & ~1;
    auto load = [&](u32 head, u32 tile, u32 stage) {
        SharedPtr to = stages + stage * STAGE;
        span_load<TILE, D>(to, q + (u64)head * at.q.head, at.q.row, tile, block.first, block.end, s.head_dim);
        span_load<TILE, D>(to + TILE * LINE, dy + (u64)head * at.dy.head, at.dy.row, tile, block.first, block.end,
                           s.head_dim);
        u32 pair = tile + 2 * threadIdx.x;
        if (threadIdx.x < TILE / 2) {
            const float* from = pairs + 2 * (u64)head * s.pitch;
            bool there = pair < s.pitch;
            copy_async(to + 2 * TILE * LINE + 16 * threadIdx.x, there ? from + 2 * pair : pairs, there);
        }
    };
    u32 head = kv_head * group, end_head = head + (block.first < block.end ? group : 0), stage = 0;
    if (head < end_head) load(head, begin, 0);
    copies_end_group();

    float unit = CAPPED ? SPAN_LOG2_E : s.scale * SPAN_LOG2_E;
    float grad_k[MT][DT][4] = {}, grad_v[MT][DT][4] = {};
#pragma unroll 1
    for (i32 first = begin; head < end_head; stage ^= 1) {
        copies_wait<0>();
        __syncthreads();
        i32 tiles = first;
        // All tiles of one head, then those of the next.
        first += TILE;
        if (first >= block.end) {
            first = begin;
            head++;
        }
        // Into the stage that every warp left before the barrier.
        if (head < end_head) load(head, first, stage ^ 1);
        copies_end_group();
        SharedPtr queries = stages + stage * STAGE, grads = queries + TILE * LINE;
        const float* pair = (const float*)(pool + 2 * ROWS * LINE + stage * STAGE + 2 * TILE * LINE);
#pragma unroll 1
        for (u32 sub = 0; sub < TILE; sub += SUB) {
            i32 tile = tiles + (i32)sub;
            if (tile >= mine.end || tile + SUB <= mine.first) continue;
            float score[MT][NT][4] = {}, slope[MT][NT][4];
#pragma unroll
            for (int d = 0; d < D / 16; d++) {
                u32 a[MT][4];
#pragma unroll
                for (int i = 0; i < MT; i++) span_left<D>(a[i], keys, warp_row + 16 * i, d);
#pragma unroll
                for (int j = 0; j < NT / 2; j++) {
                    u32 b[4];
                    span_columns<D>(b, queries, sub + 16 * j, d);
#pragma unroll
                    for (int i = 0; i < MT; i++) {
                        multiply(score[i][2 * j], a[i], b, T());
                        multiply(score[i][2 * j + 1], a[i], b + 2, T());
                    }
                }
            }
            if (CAPPED) span_cap<MT, NT>(score, s);
#pragma unroll
            for (int j = 0; j < NT; j++) {
                SpanFour both = *(const SpanFour*)(pair + 2 * (sub + 8 * j + 2 * t));
#pragma unroll
                for (int i = 0; i < MT; i++) {
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        score[i][j][e] = __fmaf_rn(score[i][j][e], unit, e % 2 == 0 ? -both.a : -both.c);
                        slope[i][j][e] = e % 2 == 0 ? -both.b : -both.d;
                    }
                }
            }
            // Last branch of an iteration: the code below overlaps with the tensor cores.
            if (tile < mine.last_first || tile + SUB > mine.first_end) {
                span_mask<MT, NT>(score, ranges + warp_row, tile);
            }
#pragma unroll
            for (int d = 0; d < D / 16; d++) {
                u32 a[MT][4];
#pragma unroll
                for (int i = 0; i < MT; i++) span_left<D>(a[i], values, warp_row + 16 * i, d);
#pragma unroll
                for (int j = 0; j < NT / 2; j++) {
                    u32 b[4];
                    span_columns<D>(b, grads, sub + 16 * j, d);
#pragma unroll
                    for (int i = 0; i < MT; i++) {
                        multiply(slope[i][2 * j], a[i], b, T());
                        multiply(slope[i][2 * j + 1], a[i], b + 2, T());
                    }
                }
            }
#pragma unroll
            for (int j = 0; j < NT; j++) {
                SpanFour both = SpanFour{0.0f, 0.0f, 0.0f, 0.0f};
                if (CAPPED) both = *(const SpanFour*)(pair + 2 * (sub + 8 * j + 2 * t));
#pragma unroll
                for (int i = 0; i < MT; i++) {
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        if (CAPPED) slope[i][j][e] *= span_cap_slope(score[i][j][e], e % 2 == 0 ? both.a : both.c, s);
                        score[i][j][e] = exp2_fast(score[i][j][e]);
                        slope[i][j][e] *= score[i][j][e];
                    }
                }
            }
#pragma unroll
            for (int j = 0; j < NT / 2; j++) {
                u32 weights[MT][4], slopes[MT][4];
#pragma unroll
                for (int i = 0; i < MT; i++) {
                    span_pack(weights[i], score[i] + 2 * j, T());
                    span_pack(slopes[i], slope[i] + 2 * j, T());
                }
#pragma unroll
                for (int d = 0; d < D / 16; d++) {
                    u32 b[4];
                    span_rows<D>(b, grads, sub + 16 * j, d);
#pragma unroll
                    for (int i = 0; i < MT; i++) {
                        multiply(grad_v[i][2 * d], weights[i], b, T());
                        multiply(grad_v[i][2 * d + 1], weights[i], b + 2, T());
                    }
                    span_rows<D>(b, queries, sub + 16 * j, d);
#pragma unroll
                    for (int i = 0; i < MT; i++) {
                        multiply(grad_k[i][2 * d], slopes[i], b, T());
                        multiply(grad_k[i][2 * d + 1], slopes[i], b + 2, T());
                    }
                }
            }
        }
    }
    copies_wait<0>();
    __syncthreads();
    // A warp's own lines of keys and values are free for the results.
    float scale[2] = {s.scale, s.scale}, one[2] = {1.0f, 1.0f};
#pragma unroll
    for (int i = 0; i < MT; i++) {
        u32 row = warp_row + 16 * i;
        span_store<D>(dk, pool, row, grad_k[i], scale, first_row, ranges, s.n, s.n_kv_heads, kv_head, s.head_dim);
        span_store<D>(dv, pool + ROWS * LINE, row, grad_v[i], one, first_row, ranges, s.n, s.n_kv_heads, kv_head, s.head_dim);
    }
}

template <typename T, int D, int MT, bool CAPPED>
inline void span_queries(T* dq, const T* dy, const T* q, const T* k, const T* v, const i32* spans, const float* pairs,
                         const SpanStrides& at, const SpanSizes& s, SpanRange* ranges) {
    // A warp has 16 MT queries, and takes SUB keys of a tile at a time.
    const u32 ROWS = 64 * MT, TILE = SPAN_TILE, LINE = SpanLine<D>::BYTES;
    const int SUB = 32, NT = SUB / 8, DT = D / 8;
    DYNAMIC_SHARED(pool);
    const SharedPtr queries = shared_ptr(pool), grads = queries + ROWS * LINE, tiles = grads + ROWS * LINE;
    start();
    u32 head = blockIdx.x, first_row = span_part_of_queries() * ROWS;
    u32 kv_head = head / (s.n_heads / s.n_kv_heads);
    u32 warp_row = threadIdx.x / 32 * 16 * MT, g = threadIdx.x % 32 / 4;
    k += (u64)kv_head * at.k.head;
    v += (u64)kv_head * at.v.head;
    span_load<ROWS, D>(queries, q + (u64)head * at.q.head, at.q.row, first_row, 0, s.n, s.head_dim);
    span_load<ROWS, D>(grads, dy + (u64)head * at.dy.head, at.dy.row, first_row, 0, s.n, s.head_dim);
    if (threadIdx.x < ROWS) ranges[threadIdx.x] = span_seen(spans, first_row + threadIdx.x, s);
    __syncthreads();
    SpanExtent block = span_extent(ranges, ROWS), mine = span_extent(ranges + warp_row, 16 * MT);

    auto load = [&](u32 tile, u32 stage) {
        SharedPtr keys = tiles + stage * 2 * TILE * LINE;
        span_load<TILE, D>(keys, k, at.k.row, tile, block.first, block.end, s.head_dim);
        span_load<TILE, D>(keys + TILE * LINE, v, at.v.row, tile, block.first, block.end, s.head_dim);
    };
    if (block.first < block.end) load(block.first, 0);
    copies_end_group();

    float unit = CAPPED ? SPAN_LOG2_E : s.scale * SPAN_LOG2_E, lse[MT][2], sum[MT][2];
#pragma unroll
    for (int i = 0; i < MT; i++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            u32 row = first_row + warp_row + 16 * i + g + 8 * h;
            const float* pair = pairs + 2 * ((u64)head * s.pitch + (row < s.n ? row : 0));
            lse[i][h] = pair[0];
            sum[i][h] = pair[1];
        }
    }
    copies_wait<0>();
    __syncthreads();
    u32 left[MT][D / 16][4], left_grad[MT][D / 16][4];
#pragma unroll
    for (int i = 0; i < MT; i++) {
#pragma unroll
        for (int d = 0; d < D / 16; d++) {
            span_left<D>(left[i][d], queries, warp_row + 16 * i, d);
            span_left<D>(left_grad[i][d], grads, warp_row + 16 * i, d);
        }
    }

    float acc[MT][DT][4] = {};
    u32 stage = 0;
#pragma unroll 1
    for (i32 first = block.first; first < block.end; first += TILE, stage ^= 1) {
        copies_wait<0>();
        __syncthreads();
        if (first + (i32)TILE < block.end) load(first + TILE, stage ^ 1);
        copies_end_group();
        SharedPtr keys = tiles + stage * 2 * TILE * LINE, values = keys + TILE * LINE;
#pragma unroll 1
        for (u32 sub = 0; sub < TILE; sub += SUB) {
            i32 tile = first + (i32)sub;
            if (tile >= mine.end || tile + SUB <= mine.first) continue;
            float score[MT][NT][4] = {}, slope[MT][NT][4];
#pragma unroll
            for (int d = 0; d < D / 16; d++) {
#pragma unroll
                for (int j = 0; j < NT / 2; j++) {
                    u32 b[4];
                    span_columns<D>(b, keys, sub + 16 * j, d);
#pragma unroll
                    for (int i = 0; i < MT; i++) {
                        multiply(score[i][2 * j], left[i][d], b, T());
                        multiply(score[i][2 * j + 1], left[i][d], b + 2, T());
                    }
                }
            }
            if (CAPPED) span_cap<MT, NT>(score, s);
#pragma unroll
            for (int i = 0; i < MT; i++) {
#pragma unroll
                for (int j = 0; j < NT; j++) {
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        score[i][j][e] = __fmaf_rn(score[i][j][e], unit, -lse[i][e / 2]);
                        slope[i][j][e] = -sum[i][e / 2];
                    }
                }
            }
            // Last branch of an iteration: the code below overlaps with the tensor cores.
            if (tile < mine.last_first || tile + SUB > mine.first_end) {
                span_mask<MT, NT>(score, ranges + warp_row, tile);
            }
#pragma unroll
            for (int d = 0; d < D / 16; d++) {
#pragma unroll
                for (int j = 0; j < NT / 2; j++) {
                    u32 b[4];
                    span_columns<D>(b, values, sub + 16 * j, d);
#pragma unroll
                    for (int i = 0; i < MT; i++) {
                        multiply(slope[i][2 * j], left_grad[i][d], b, T());
                        multiply(slope[i][2 * j + 1], left_grad[i][d], b + 2, T());
                    }
                }
            }
#pragma unroll
            for (int i = 0; i < MT; i++) {
#pragma unroll
                for (int j = 0; j < NT; j++) {
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        if (CAPPED) slope[i][j][e] *= span_cap_slope(score[i][j][e], lse[i][e / 2], s);
                        slope[i][j][e] *= exp2_fast(score[i][j][e]);
                    }
                }
            }
#pragma unroll
            for (int j = 0; j < NT / 2; j++) {
                u32 slopes[MT][4];
#pragma unroll
                for (int i = 0; i < MT; i++) span_pack(slopes[i], slope[i] + 2 * j, T());
#pragma unroll
                for (int d = 0; d < D / 16; d++) {
                    u32 b[4];
                    span_rows<D>(b, keys, sub + 16 * j, d);
#pragma unroll
                    for (int i = 0; i < MT; i++) {
                        multiply(acc[i][2 * d], slopes[i], b, T());
                        multiply(acc[i][2 * d + 1], slopes[i], b + 2, T());
                    }
                }
            }
        }
    }
    float scale[2] = {s.scale, s.scale};
#pragma unroll
    for (int i = 0; i < MT; i++) {
        span_store<D>(dq, pool, warp_row + 16 * i, acc[i], scale, first_row, ranges, s.n, s.n_heads, head, s.head_dim);
    }
}

// shared_bytes: keys (128 MT + 256) (2 D + 16) + 1024, queries (128 MT + 256) (2 D + 16); src/span_grad.rs
// has the same numbers.
#define KEYS(size, MT, name, T)                                                                                   \
    extern "C" __global__ __launch_bounds__(128, 2) void span_grad_keys_d##size##_##name(                        \
        T* dk, T* dv, const T* dy, const T* q, const T* k,                \
        const T* v, const i32* spans, const float* pairs, SpanStrides at, \
        SpanSizes s) {                                                                                           \
        __shared__ SpanRange ranges[64 * MT];                                                                    \
        if (s.softcap > 0.0f) span_keys<T, size, MT, true>(dk, dv, dy, q, k, v, spans, pairs, at, s, ranges);    \
        else span_keys<T, size, MT, false>(dk, dv, dy, q, k, v, spans, pairs, at, s, ranges);                    \
    }
#define QUERIES(size, MT, name, T)                                                                                \
    extern "C" __global__ __launch_bounds__(128, 2) void span_grad_queries_d##size##_##name(                     \
        T* dq, const T* dy, const T* q, const T* k,                       \
        const T* v, const i32* spans, const float* pairs, SpanStrides at, \
        SpanSizes s) {                                                                                           \
        __shared__ SpanRange ranges[64 * MT];                                                                    \
        if (s.softcap > 0.0f) span_queries<T, size, MT, true>(dq, dy, q, k, v, spans, pairs, at, s, ranges);     \
        else span_queries<T, size, MT, false>(dq, dy, q, k, v, spans, pairs, at, s, ranges);                     \
    }

// unit exact
template <typename T> struct alignas(16) SpanEight { T at[8]; };

template <typename T>
inline void span_pairs(float* pairs, const T* dy, const T* y, const float* lse, const SpanStrides& at, const SpanSizes& s) {
    // Eight lanes per head; each handles several heads to keep enough loads in flight.
    const int TIMES = 4;
    start();
    u32 part = threadIdx.x % 8, index[TIMES], row[TIMES], head[TIMES];
    const T *left[TIMES], *right[TIMES];
    bool there[TIMES], vector = s.head_dim % 8 == 0 && at.dy.element == 1 && at.y.element == 1;
    float sum[TIMES] = {}, log[TIMES];
#pragma unroll
    for (int k = 0; k < TIMES; k++) {
        index[k] = blockIdx.x * 16 * TIMES + 16 * k + threadIdx.x / 8;
        there[k] = index[k] < s.n * s.n_heads;
        if (!there[k]) index[k] = 0;
        row[k] = index[k] / s.n_heads;
        head[k] = index[k] % s.n_heads;
        left[k] = dy + at.dy.at(row[k], head[k]);
        right[k] = y + at.y.at(row[k], head[k]);
        vector = vector && ((u64)left[k] | (u64)right[k]) % 16 == 0;
        log[k] = lse[index[k]];
    }
    if (vector) {
        for (u32 d = 8 * part; d < s.head_dim; d += 64) {
            SpanEight<T> a[TIMES], b[TIMES];
#pragma unroll
            for (int k = 0; k < TIMES; k++) {
                a[k] = *(const SpanEight<T>*)(left[k] + d);
                b[k] = *(const SpanEight<T>*)(right[k] + d);
            }
#pragma unroll
            for (int k = 0; k < TIMES; k++) {
#pragma unroll
                for (int e = 0; e < 8; e++) sum[k] = __fmaf_rn(to_f32(a[k].at[e]), to_f32(b[k].at[e]), sum[k]);
            }
        }
    } else {
#pragma unroll 1
        for (u32 d = 8 * part; d < s.head_dim; d += 64) {
#pragma unroll 1
            for (u32 e = d; e < d + 8 && e < s.head_dim; e++) {
#pragma unroll
                for (int k = 0; k < TIMES; k++) {
                    float a = to_f32(left[k][(u64)e * at.dy.element]), b = to_f32(right[k][(u64)e * at.y.element]);
                    sum[k] = __fmaf_rn(a, b, sum[k]);
                }
            }
        }
    }
#pragma unroll
    for (int k = 0; k < TIMES; k++) {
#pragma unroll
        for (int step = 4; step > 0; step >>= 1) sum[k] += __shfl_xor_sync(0xffffffffu, sum[k], step);
        if (there[k] && part == 0) {
            bool empty = log[k] == -inf_f32();
            float2* to = (float2*)pairs + (u64)head[k] * s.pitch + row[k];
            *to = make_float2(empty ? 0.0f : log[k] * SPAN_LOG2_E, empty ? 0.0f : sum[k]);
            // The padding element, which belongs to no row but is copied with its neighbour.
            if (row[k] + 1 == s.n && s.pitch > s.n) to[1] = make_float2(0.0f, 0.0f);
        }
    }
}

template <typename T>
inline void span_keys_exact(T* dk, T* dv, const T* dy, const T* q, const T* k, const T* v, const i32* spans,
                            const float* pairs, const SpanStrides& at, const SpanSizes& s) {
    __shared__ float key[4][SPAN_WIDTH], value[4][SPAN_WIDTH];
    start();
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, i = blockIdx.x * 4 + warp;
    if (i >= s.n * s.n_kv_heads) return;
    u32 row = i / s.n_kv_heads, kv_head = i % s.n_kv_heads, group = s.n_heads / s.n_kv_heads;
    SpanRange range = span_seeing(spans, row, s);
    span_fetch(key[warp], k, at.k.at(row, kv_head), at.k.element, s.head_dim);
    span_fetch(value[warp], v, at.v.at(row, kv_head), at.v.element, s.head_dim);
    __syncwarp();
    float grad_k[SPAN_PARTS] = {}, grad_v[SPAN_PARTS] = {};
    for (u32 head = kv_head * group; head < (kv_head + 1) * group; head++) {
        for (i32 tile = range.first; tile < range.end; tile += 32) {
            u32 n = min(32u, (u32)(range.end - tile));
            float p = 0.0f, ds = 0.0f;
            if (lane < n) {
                u32 other = tile + lane;
                const float* pair = pairs + 2 * ((u64)head * s.pitch + other);
                float slope;
                float score = span_score(span_dot(key[warp], q, at.q.at(other, head), at.q.element, s.head_dim), s, &slope);
                p = exp2f(__fmaf_rn(score, SPAN_LOG2_E, -pair[0]));
                ds = p * (span_dot(value[warp], dy, at.dy.at(other, head), at.dy.element, s.head_dim) - pair[1]) * slope;
            }
            span_add(grad_v, p, n, dy, at.dy.at(tile, head), at.dy.row, at.dy.element, s.head_dim);
            span_add(grad_k, ds, n, q, at.q.at(tile, head), at.q.row, at.q.element, s.head_dim);
        }
    }
    span_put(dk, (u64)i * s.head_dim, grad_k, 1.0f, s.head_dim);
    span_put(dv, (u64)i * s.head_dim, grad_v, 1.0f, s.head_dim);
}

template <typename T>
inline void span_queries_exact(T* dq, const T* dy, const T* q, const T* k, const T* v, const i32* spans,
                               const float* pairs, const SpanStrides& at, const SpanSizes& s) {
    __shared__ float query[4][SPAN_WIDTH], grad[4][SPAN_WIDTH];
    start();
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, i = blockIdx.x * 4 + warp;
    if (i >= s.n * s.n_heads) return;
    u32 row = i / s.n_heads, head = i % s.n_heads, kv_head = head / (s.n_heads / s.n_kv_heads);
    SpanRange range = span_seen(spans, row, s);
    span_fetch(query[warp], q, at.q.at(row, head), at.q.element, s.head_dim);
    span_fetch(grad[warp], dy, at.dy.at(row, head), at.dy.element, s.head_dim);
    __syncwarp();
    const float* pair = pairs + 2 * ((u64)head * s.pitch + row);
    float lse = pair[0], sum = pair[1], acc[SPAN_PARTS] = {};
    for (i32 tile = range.first; tile < range.end; tile += 32) {
        u32 n = min(32u, (u32)(range.end - tile));
        float ds = 0.0f;
        if (lane < n) {
            u32 other = tile + lane;
            float slope;
            float score = span_score(span_dot(query[warp], k, at.k.at(other, kv_head), at.k.element, s.head_dim), s, &slope);
            float p = exp2f(__fmaf_rn(score, SPAN_LOG2_E, -lse));
            ds = p * (span_dot(grad[warp], v, at.v.at(other, kv_head), at.v.element, s.head_dim) - sum) * slope;
        }
        span_add(acc, ds, n, k, at.k.at(tile, kv_head), at.k.row, at.k.element, s.head_dim);
    }
    span_put(dq, (u64)i * s.head_dim, acc, 1.0f, s.head_dim);
}

#define SPAN_GRAD_EXACT(name, T)                                                                                  \
    extern "C" __global__ __launch_bounds__(128) void span_grad_pairs_##name(                                    \
        float* pairs, const T* dy, const T* y, const float* lse,          \
        SpanStrides at, SpanSizes s) {                                                                           \
        span_pairs<T>(pairs, dy, y, lse, at, s);                                                                 \
    }                                                                                                            \
    extern "C" __global__ __launch_bounds__(128) void span_grad_keys_exact_##name(                               \
        T* dk, T* dv, const T* dy, const T* q, const T* k,                \
        const T* v, const i32* spans, const float* pairs, SpanStrides at, \
        SpanSizes s) {                                                                                           \
        span_keys_exact<T>(dk, dv, dy, q, k, v, spans, pairs, at, s);                                            \
    }                                                                                                            \
    extern "C" __global__ __launch_bounds__(128) void span_grad_queries_exact_##name(                            \
        T* dq, const T* dy, const T* q, const T* k,                       \
        const T* v, const i32* spans, const float* pairs, SpanStrides at, \
        SpanSizes s) {                                                                                           \
        span_queries_exact<T>(dq, dy, q, k, v, spans, pairs, at, s);                                             \
    }
SPAN_GRAD_EXACT(f32, float)
SPAN_GRAD_EXACT(f16, F16)
SPAN_GRAD_EXACT(bf16, BF16)
// unit keys_d64_f16
KEYS(64, 2, f16, F16)
// unit queries_d64_f16
QUERIES(64, 2, f16, F16)
// unit keys_d64_bf16
KEYS(64, 2, bf16, BF16)
// unit queries_d64_bf16
QUERIES(64, 2, bf16, BF16)
// unit keys_d96_f16
KEYS(96, 1, f16, F16)
// unit queries_d96_f16
QUERIES(96, 1, f16, F16)
// unit keys_d96_bf16
KEYS(96, 1, bf16, BF16)
// unit queries_d96_bf16
QUERIES(96, 1, bf16, BF16)
// unit keys_d128_f16
KEYS(128, 1, f16, F16)
// unit queries_d128_f16
QUERIES(128, 1, f16, F16)
// unit keys_d128_bf16
KEYS(128, 1, bf16, BF16)
// unit queries_d128_bf16
QUERIES(128, 1, bf16, BF16)
