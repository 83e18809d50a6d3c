// span.cu: attention of rows within their documents (training), with log-sum-exp
//
//   y[i, h] = softmax(scale q[i, h] . k) v over the rows that row i sees in its document
//
//   y      [n, n_heads, head_dim]     T, dense
//   lse    [n, n_heads]               f32, natural logarithm; minus infinity for padding, whose y is zero
//   q      [n, n_heads, head_dim]     T, any strides
//   k, v   [n, n_kv_heads, head_dim]  T, any strides
//   spans  [n, 2]                     i32, the rows of each row's document
//
// Launch       tensor cores: grid (n_heads, ceil(n / ROWS)), block (128), shared as shared_bytes below; ROWS
//              is 128 for D = 64, else 64. exact: grid (ceil(n n_heads / 4)), block (128), shared 0
// Requires     tensor cores: head_dim a multiple of 8, at most D; consecutive elements in a head, heads
//              16-byte aligned. exact: head_dim at most 256
// Aliasing     none
// Accumulation softmax weights are rounded to T on tensor cores; scores, maxima and sums are f32
// Determinism  same bits every run: tiles of 64 (exact: 32) rows in order
// Capture      safe: the grid is fixed and spans are read on the device
#include "span.cuh"

// PLAIN: scores are dot products times a positive number, which is folded into the exponent. Otherwise each
// score is computed.
template <typename T, int D, int MT, bool PLAIN>
inline void span_forward(T* y, float* lse, const T* q, const T* k, const T* v, const i32* spans, const SpanStrides& at,
                         const SpanSizes& s, SpanRange* ranges) {
    // A warp has 16 MT rows.
    const u32 ROWS = 64 * MT, TILE = SPAN_TILE, NT = TILE / 8, DT = D / 8, LINE = SpanLine<D>::BYTES;
    DYNAMIC_SHARED(pool);
    const SharedPtr queries = shared_ptr(pool), tiles = queries + ROWS * LINE;
    start();
    u32 head = blockIdx.x, first_row = span_part_of_queries() * ROWS;
    u32 kv_head = head / (s.n_heads / s.n_kv_heads);
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warp_row = 16 * MT * warp;
    q += (u64)head * at.q.head;
    k += (u64)kv_head * at.k.head;
    v += (u64)kv_head * at.v.head;
    span_load<ROWS, D>(queries, q, at.q.row, first_row, 0, s.n, s.head_dim);
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
    copies_wait<0>();
    __syncthreads();
    u32 left[MT][D / 16][4];
#pragma unroll
    for (int i = 0; i < MT; i++) {
#pragma unroll
        for (int d = 0; d < D / 16; d++) span_left<D>(left[i][d], queries, warp_row + 16 * i, d);
    }

    float acc[MT][DT][4] = {}, max_score[MT][2], sum[MT][2];
#pragma unroll
    for (int i = 0; i < MT; i++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            max_score[i][h] = -inf_f32();
            sum[i][h] = 0.0f;
        }
    }
    // Softmax weights are computed as powers of two.
    bool capped = s.softcap > 0.0f;
    float cap_unit = capped ? 2.0f * SPAN_LOG2_E * s.scale / s.softcap : 0.0f;
    float unit = PLAIN ? s.scale * SPAN_LOG2_E : SPAN_LOG2_E;

    u32 stage = 0;
#pragma unroll 1
    for (i32 tile = block.first; tile < block.end; tile += TILE, stage ^= 1) {
        copies_wait<0>();
        __syncthreads();
        // Into the stage that every warp left before the barrier.
        if (tile + (i32)TILE < block.end) load(tile + TILE, stage ^ 1);
        copies_end_group();
        if (tile >= mine.end || tile + (i32)TILE <= mine.first) continue;
        SharedPtr keys = tiles + stage * 2 * TILE * LINE, values = keys + TILE * LINE;

        float score[MT][NT][4] = {};
#pragma unroll
        for (int d = 0; d < D / 16; d++) {
#pragma unroll
            for (int j = 0; j < NT / 2; j++) {
                u32 b[4];
                span_columns<D>(b, keys, 16 * j, d);
#pragma unroll
                for (int i = 0; i < MT; i++) {
                    multiply(score[i][2 * j], left[i][d], b, T());
                    multiply(score[i][2 * j + 1], left[i][d], b + 2, T());
                }
            }
        }
        if (!PLAIN) {
#pragma unroll
            for (int i = 0; i < MT; i++) {
#pragma unroll
                for (int j = 0; j < NT; j++) {
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        float x = score[i][j][e];
                        score[i][j][e] = capped ? s.softcap * span_tanh(x, cap_unit) : s.scale * x;
                    }
                }
            }
        }
        if (tile < mine.last_first || tile + (i32)TILE > mine.first_end) {
#pragma unroll
            for (int i = 0; i < MT; i++) {
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    SpanRange range = ranges[warp_row + 16 * i + g + 8 * h];
#pragma unroll
                    for (int j = 0; j < NT; j++) {
#pragma unroll
                        for (int e = 0; e < 2; e++) {
                            i32 p = tile + 8 * j + 2 * t + e;
                            if (p < range.first || p >= range.end) score[i][j][2 * h + e] = -inf_f32();
                        }
                    }
                }
            }
        }
        float base[MT][2], factor[MT][2];
        bool higher = false;
#pragma unroll
        for (int i = 0; i < MT; i++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float most = -inf_f32();
#pragma unroll
                for (int j = 0; j < NT; j++) {
                    most = fmaxf(most, fmaxf(score[i][j][2 * h], score[i][j][2 * h + 1]));
                }
                most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
                most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
                most = fmaxf(most, max_score[i][h]);
                higher |= most > max_score[i][h];
                // No row seen so far: any finite maximum works.
                base[i][h] = most == -inf_f32() ? 0.0f : most * unit;
                factor[i][h] = exp2_fast(__fmaf_rn(max_score[i][h], unit, -base[i][h]));
                max_score[i][h] = most;
            }
        }
        // After the first tiles the maximum rarely rises; if it rises for no row of the warp, all factors are
        // one.
        if (__ballot_sync(0xffffffffu, higher) != 0) {
#pragma unroll
            for (int i = 0; i < MT; i++) {
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    sum[i][h] *= factor[i][h];
#pragma unroll
                    for (int d = 0; d < DT; d++) {
                        acc[i][d][2 * h] *= factor[i][h];
                        acc[i][d][2 * h + 1] *= factor[i][h];
                    }
                }
            }
        }
#pragma unroll
        for (int i = 0; i < MT; i++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                // Each lane sums its own columns; the lanes are added at the end.
                float weights = 0.0f;
#pragma unroll
                for (int j = 0; j < NT; j++) {
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        float w = exp2_fast(__fmaf_rn(score[i][j][2 * h + e], unit, -base[i][h]));
                        score[i][j][2 * h + e] = w;
                        weights += w;
                    }
                }
                sum[i][h] += weights;
            }
        }
#pragma unroll
        for (int j = 0; j < NT / 2; j++) {
            u32 a[MT][4];
#pragma unroll
            for (int i = 0; i < MT; i++) span_pack(a[i], score[i] + 2 * j, T());
#pragma unroll
            for (int d = 0; d < D / 16; d++) {
                u32 b[4];
                span_rows<D>(b, values, 16 * j, d);
#pragma unroll
                for (int i = 0; i < MT; i++) {
                    multiply(acc[i][2 * d], a[i], b, T());
                    multiply(acc[i][2 * d + 1], a[i], b + 2, T());
                }
            }
        }
    }

#pragma unroll
    for (int i = 0; i < MT; i++) {
        float inverse[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float all = sum[i][h];
            all += __shfl_xor_sync(0xffffffffu, all, 1);
            all += __shfl_xor_sync(0xffffffffu, all, 2);
            inverse[h] = 1.0f / all;
            u32 r = warp_row + 16 * i + g + 8 * h, row = first_row + r;
            if (t == 0 && row < s.n) {
                bool empty = ranges[r].end <= ranges[r].first;
                float log = __fmaf_rn(max_score[i][h], unit * SPAN_LN_2, logf(all));
                lse[(u64)row * s.n_heads + head] = empty ? -inf_f32() : log;
            }
        }
        span_store<D>(y, pool, warp_row + 16 * i, acc[i], inverse, first_row, ranges, s.n, s.n_heads, head,
                      s.head_dim);
    }
}

template <typename T>
inline void span_forward_exact(T* y, float* lse, const T* q, const T* k, const T* v, const i32* spans,
                               const SpanStrides& at, const SpanSizes& s) {
    __shared__ float query[4][SPAN_WIDTH];
    start();
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, i = blockIdx.x * 4 + warp;
    if (i >= s.n * s.n_heads) return;
    u32 row = i / s.n_heads, head = i % s.n_heads, kv_head = head / (s.n_heads / s.n_kv_heads);
    SpanRange range = span_seen(spans, row, s);
    span_fetch(query[warp], q, at.q.at(row, head), at.q.element, s.head_dim);
    __syncwarp();
    float max_score = -inf_f32(), sum = 0.0f, acc[SPAN_PARTS] = {};
    for (i32 tile = range.first; tile < range.end; tile += 32) {
        u32 n = min(32u, (u32)(range.end - tile));
        float score = -inf_f32(), slope;
        if (lane < n) {
            u64 key = at.k.at(tile + lane, kv_head);
            score = span_score(span_dot(query[warp], k, key, at.k.element, s.head_dim), s, &slope);
        }
        float most = fmaxf(max_score, warp_reduce(score, Max()));
        float factor = expf(max_score - most), weight = lane < n ? expf(score - most) : 0.0f;
        max_score = most;
        sum = __fmaf_rn(sum, factor, warp_reduce(weight, Add()));
#pragma unroll
        for (int e = 0; e < SPAN_PARTS; e++) acc[e] *= factor;
        span_add(acc, weight, n, v, at.v.at(tile, kv_head), at.v.row, at.v.element, s.head_dim);
    }
    bool empty = range.end <= range.first;
    if (lane == 0) lse[i] = empty ? -inf_f32() : max_score + logf(sum);
    span_put(y, (u64)i * s.head_dim, acc, empty ? 0.0f : 1.0f / sum, s.head_dim);
}

// shared_bytes: (64 MT + 256) (2 D + 16); src/span.rs has the same number.
#define SPAN(size, MT, name, T)                                                                                   \
    extern "C" __global__ __launch_bounds__(128, 2) void span_d##size##_##name(                                  \
        T* y, float* lse, const T* q, const T* k, const T* v,             \
        const i32* spans, SpanStrides at, SpanSizes s) {                                            \
        __shared__ SpanRange ranges[64 * MT];                                                                    \
        bool plain = s.softcap <= 0.0f && s.scale > 0.0f;                                                        \
        if (plain) span_forward<T, size, MT, true>(y, lse, q, k, v, spans, at, s, ranges);                       \
        else span_forward<T, size, MT, false>(y, lse, q, k, v, spans, at, s, ranges);                            \
    }
#define SPAN_EXACT(name, T)                                                                                       \
    extern "C" __global__ __launch_bounds__(128) void span_exact_##name(                                         \
        T* y, float* lse, const T* q, const T* k, const T* v,             \
        const i32* spans, SpanStrides at, SpanSizes s) {                                            \
        span_forward_exact<T>(y, lse, q, k, v, spans, at, s);                                                    \
    }

// unit exact
SPAN_EXACT(f32, float)
SPAN_EXACT(f16, F16)
SPAN_EXACT(bf16, BF16)
// unit d64_f16
SPAN(64, 2, f16, F16)
// unit d64_bf16
SPAN(64, 2, bf16, BF16)
// unit d96_f16
SPAN(96, 1, f16, F16)
// unit d96_bf16
SPAN(96, 1, bf16, BF16)
// unit d128_f16
SPAN(128, 1, f16, F16)
// unit d128_bf16
SPAN(128, 1, bf16, BF16)
