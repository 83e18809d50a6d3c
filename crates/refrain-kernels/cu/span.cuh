// span.cuh: shared by span.cu and span_grad.cu: which rows see each other, and tiles of heads in shared
// memory
//
// spans [n, 2] i32 holds, for each row, the range of rows of its document. A span that does not contain its
// row, or exceeds 0 .. n, counts as padding: whatever it holds, nothing outside the tensors is read.
//
// A block owns some rows, as queries or as keys, and walks over the rows of the other side that any of its
// own sees (or is seen by), TILE at a time. Rows outside that range are zeros in the tile; a tile that some
// own row does not see whole is masked. Rows of other documents in the same tile are multiplied by zero, so
// they must be finite.
#pragma once
#include "mma.cuh"
#include "overlap.cuh"
#include "reduce.cuh"

struct SpanSizes {
    u32 n, n_heads, n_kv_heads, head_dim;
    u32 window;  // 0: no window
    u32 causal;
    float scale;
    float softcap;  // 0: none
    u32 pitch;      // of the gradient's pairs: n rounded up to even
};

// Strides in elements, between rows, heads and elements.
struct HeadStrides {
    u32 row, head, element;

    inline u64 at(u32 r, u32 h) const { return (u64)r * row + (u64)h * head; }
};
struct SpanStrides {
    HeadStrides q, k, v, dy, y;
};

const u32 SPAN_THREADS = 128, SPAN_TILE = 64;
const float SPAN_LOG2_E = 1.4426950408889634f, SPAN_LN_2 = 0.6931471805599453f;

// Rows first .. end, end excluded.
struct SpanRange {
    i32 first, end;
};

inline SpanRange span_document(const i32* spans, u32 row, const SpanSizes& s) {
    SpanRange r = {0, 0};
    if (row < s.n) {
        i32 first = spans[2 * row], end = spans[2 * row + 1];
        if (first >= 0 && first <= (i32)row && (i32)row < end && end <= (i32)s.n) r = SpanRange{first, end};
    }
    return r;
}

// Returns the keys that a query sees.
inline SpanRange span_seen(const i32* spans, u32 row, const SpanSizes& s) {
    SpanRange r = span_document(spans, row, s);
    if (s.causal != 0 && r.end > r.first) {
        r.end = (i32)row + 1;
        if (s.window != 0 && r.end - r.first > (i32)s.window) r.first = r.end - (i32)s.window;
    }
    return r;
}

// Returns the queries that see a key.
inline SpanRange span_seeing(const i32* spans, u32 row, const SpanSizes& s) {
    SpanRange r = span_document(spans, row, s);
    if (s.causal != 0 && r.end > r.first) {
        r.first = (i32)row;
        if (s.window != 0 && r.end - r.first > (i32)s.window) r.end = r.first + (i32)s.window;
    }
    return r;
}

// Over several rows: some row sees each end of first .. end, every row sees last_first .. first_end. Padding
// rows do not count.
struct SpanExtent {
    i32 first, end, last_first, first_end;
};

struct SpanLeast {
    inline i32 operator()(i32 a, i32 b) const { return a < b ? a : b; }
};

inline i32 span_least(i32 x) {
#ifdef REFRAIN_ON_HOST
    return warp_reduce(x, SpanLeast());
#else
    return __reduce_min_sync(0xffffffffu, x);
#endif
}

// Each warp computes this for itself; n is a multiple of 16.
inline SpanExtent span_extent(const SpanRange* ranges, u32 n) {
    const i32 most = 0x7fffffff;
    i32 first = most, end = 0, last_first = 0, first_end = most;
    for (u32 i = threadIdx.x % 32; i < n; i += 32) {
        SpanRange r = ranges[i];
        if (r.end > r.first) {
            first = SpanLeast()(first, r.first);
            end = SpanLeast()(end, -r.end);
            last_first = SpanLeast()(last_first, -r.first);
            first_end = SpanLeast()(first_end, r.end);
        }
    }
    return SpanExtent{span_least(first), -span_least(end), -span_least(last_first), span_least(first_end)};
}

// Order in which blocks take parts of the rows: those with the most work should start first. Queries see more
// rows the later they are in their document; keys are seen by more rows the earlier they are. If nearly all
// blocks start at once, every other part goes first, so that a short document's second block does not start
// on an SM that its first block has just left. If there are many blocks, neighbouring blocks share rows in
// the cache.
const u32 SPAN_FEW_BLOCKS = 1024;

inline u32 span_part_of_keys() {
    u32 i = blockIdx.y, n_even = (gridDim.y + 1) / 2;
    if (gridDim.x * gridDim.y > SPAN_FEW_BLOCKS) return i;
    return i < n_even ? 2 * i : 2 * (i - n_even) + 1;
}

inline u32 span_part_of_queries() {
    u32 i = blockIdx.y, n = gridDim.y, n_odd = n / 2;
    if (gridDim.x * n > SPAN_FEW_BLOCKS) return n - 1 - i;
    return i < n_odd ? 2 * (n_odd - i) - 1 : 2 * (n - 1 - i);
}

// Lines of D elements, padded by 16 bytes, so that eight lines of a chunk lie in different banks.
template <int D> struct SpanLine {
    static const u32 BYTES = 2 * D + 16;
};

// Issues asynchronous copies of rows first .. first + ROWS of one head; zeros outside begin .. end and past
// head_dim.
template <int ROWS, int D, typename T>
inline void span_load(SharedPtr to, const T* from, u32 stride, u32 first, u32 begin, u32 end, u32 head_dim) {
    const u32 CHUNKS = D / 8, AT_ONCE = SPAN_THREADS / CHUNKS;
    if (SPAN_THREADS % CHUNKS == 0) {
        // Each thread copies the same chunk of every AT_ONCE-th row. copy_async does not read addresses of
        // rows out of range.
        u32 r = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS, row = first + r;
        u32 n_rows = 8 * chunk < head_dim ? end - begin : 0;
        const T* at = from + (u64)row * stride + 8 * chunk;
        to += r * SpanLine<D>::BYTES + 16 * chunk;
#pragma unroll
        for (int j = 0; j < ROWS / (int)AT_ONCE; j++) {
            copy_async(to + j * AT_ONCE * SpanLine<D>::BYTES, at, row + j * AT_ONCE - begin < n_rows);
            at += AT_ONCE * stride;
        }
        return;
    }
#pragma unroll
    for (int j = 0; j < ROWS * CHUNKS / SPAN_THREADS; j++) {
        u32 i = threadIdx.x + SPAN_THREADS * j, r = i / CHUNKS, chunk = i % CHUNKS, row = first + r;
        bool there = row >= begin && row < end && 8 * chunk < head_dim;
        copy_async(to + r * SpanLine<D>::BYTES + 16 * chunk, there ? from + (u64)row * stride + 8 * chunk : from, there);
    }
}

// Loads an A fragment: 16 rows, starting at line `row`, by 16 elements.
template <int D> inline void span_left(u32* a, SharedPtr lines, u32 row, int d) {
    u32 lane = threadIdx.x % 32;
    load_matrices(a, lines + (row + lane % 16) * SpanLine<D>::BYTES + 32 * d + lane / 16 * 16);
}

// Loads a B fragment, 16 columns by 16 elements, whose columns are lines.
template <int D> inline void span_columns(u32* b, SharedPtr lines, u32 row, int d) {
    u32 lane = threadIdx.x % 32;
    load_matrices(b, lines + (row + lane / 16 * 8 + lane % 8) * SpanLine<D>::BYTES + 32 * d + lane / 8 % 2 * 16);
}

// Loads a B fragment whose rows are lines.
template <int D> inline void span_rows(u32* b, SharedPtr lines, u32 row, int d) {
    u32 lane = threadIdx.x % 32;
    load_matrices_transposed(b, lines + (row + lane / 8 % 2 * 8 + lane % 8) * SpanLine<D>::BYTES + 32 * d + lane / 16 * 16);
}

// Packs two adjacent tiles of 8 columns as the A fragment of the next product.
template <typename T> inline void span_pack(u32* a, const float (*tiles)[4], T) {
    a[0] = pack(tiles[0][0], tiles[0][1], T());
    a[1] = pack(tiles[0][2], tiles[0][3], T());
    a[2] = pack(tiles[1][0], tiles[1][1], T());
    a[3] = pack(tiles[1][2], tiles[1][3], T());
}

// Stores a warp's 16 rows from registers, through its own lines, to y [n, n_heads, head_dim]; zeros for rows
// without a range.
template <int D, typename T>
inline void span_store(T* y, u8* lines, u32 row, const float (*acc)[4], const float* factor, u32 first_row,
                       const SpanRange* ranges, u32 n_rows, u32 n_heads, u32 head, u32 head_dim) {
    const u32 LINE = SpanLine<D>::BYTES;
    u32 lane = threadIdx.x % 32;
    __syncwarp();
#pragma unroll
    for (int d = 0; d < D / 8; d++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            u32 word = pack(acc[d][2 * h] * factor[h], acc[d][2 * h + 1] * factor[h], T());
            *(u32*)(lines + (row + lane / 4 + 8 * h) * LINE + 16 * d + lane % 4 * 4) = word;
        }
    }
    __syncwarp();
    for (u32 i = lane; i < 16 * (head_dim / 8); i += 32) {
        u32 r = row + i / (head_dim / 8), chunk = i % (head_dim / 8);
        if (first_row + r < n_rows) {
            bool empty = ranges[r].end <= ranges[r].first;
            uint4 words = *(const uint4*)(lines + r * LINE + 16 * chunk);
            if (empty) words = make_uint4(0, 0, 0, 0);
            *(uint4*)(y + ((u64)(first_row + r) * n_heads + head) * head_dim + 8 * chunk) = words;
        }
    }
}

// Exact kernels, for heads of any size up to 256 and any strides: a warp has one row, its lanes have rows of
// the other side.
const u32 SPAN_WIDTH = 256, SPAN_PARTS = SPAN_WIDTH / 32;

template <typename T> inline void span_fetch(float* to, const T* from, u64 at, u32 step, u32 head_dim) {
    for (u32 d = threadIdx.x % 32; d < head_dim; d += 32) to[d] = to_f32(from[at + (u64)d * step]);
}

template <typename T> inline float span_dot(const float* mine, const T* from, u64 at, u32 step, u32 head_dim) {
    float sum = 0.0f;
    for (u32 d = 0; d < head_dim; d++) sum = __fmaf_rn(mine[d], to_f32(from[at + (u64)d * step]), sum);
    return sum;
}

// Returns the score of a dot product of query and key, and sets the score's derivative.
inline float span_score(float product, const SpanSizes& s, float* slope) {
    float score = product * s.scale;
    *slope = s.scale;
    if (s.softcap > 0.0f) {
        float t = tanhf(score / s.softcap);
        score = s.softcap * t;
        *slope = s.scale * (1.0f - t * t);
    }
    return score;
}

// tanh(x unit / (2 log2 e)) to about 1e-7, without a branch: 1 - 2 / (1 + 2^(x unit)).
inline float span_tanh(float x, float unit) {
    return __fmaf_rn(-2.0f, reciprocal_fast(1.0f + exp2_fast(x * unit)), 1.0f);
}

// acc += the weight of each of the first n lanes times that lane's row.
template <typename T>
inline void span_add(float* acc, float weight, u32 n, const T* from, u64 at, u32 row_step, u32 step, u32 head_dim) {
    u32 lane = threadIdx.x % 32;
    for (u32 j = 0; j < n; j++) {
        float w = __shfl_sync(0xffffffffu, weight, j);
        u64 row = at + (u64)j * row_step;
#pragma unroll
        for (int e = 0; e < SPAN_PARTS; e++) {
            u32 d = lane + 32 * e;
            if (d < head_dim) acc[e] = __fmaf_rn(w, to_f32(from[row + (u64)d * step]), acc[e]);
        }
    }
}

template <typename T> inline void span_put(T* y, u64 at, const float* acc, float factor, u32 head_dim) {
#pragma unroll
    for (int e = 0; e < SPAN_PARTS; e++) {
        u32 d = threadIdx.x % 32 + 32 * e;
        if (d < head_dim) y[at + d] = from_f32<T>(acc[e] * factor);
    }
}
