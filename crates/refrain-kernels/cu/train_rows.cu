// train_rows.cu: RMS norm, softmax, their gradients, and reductions of rows and columns, for every float type
//
//   x, a, b, dy  [n_rows, n_cols]  T, rows of consecutive elements at rows.start(r)
//   w            [n_cols]          f32 or T
//   y, sum, dx   [n_rows, n_cols]  T, dense; reductions: [n_rows]
//   parts        [gridDim.x, n_cols]  f32: partial sums of the gradient of w, each over some rows
//
// reduce_columns takes x [n_outer, n, n_inner], with element (o, j, i) at o * outer_stride + j * stride + i,
// and splits n into slices: parts [n_outer, n_slices, n_inner] f32 holds the sum or maximum of each.
// finish_columns combines the slices in order into y [n_outer, n_inner].
//
// Launch       rows of at most 1024 elements take a warp each, longer ones a block: grid (ceil(n_rows / 8))
//              or (n_rows), block (256), shared 0. rms_norm_grad: at most PARTS blocks, each with many rows.
//              reduce_columns: grid (n_outer * n_slices * ceil(n_inner / 256)), block (256). finish_columns:
//              grid (ceil(n_outer n_inner / 32)), block (1024)
// Requires     s.wide: rows are 16-byte aligned and have a multiple of 8 elements
// Aliasing     y may be x; sum may be a and y may be b; softmax_grad: y may be dy or x. A thread reads eight
//              elements before it writes them, and no other thread touches them
// Accumulation f32; results are rounded once
// Determinism  same bits every run: additions are in a fixed order
// Capture      safe
#include "eight.cuh"
#include "overlap.cuh"
#include "reduce.cuh"
#include "view.cuh"

// Groups of eight elements of a row that a thread keeps in registers; the rest of the row is read again.
enum : int { KEPT = 4 };
enum : u32 { WARP_COLS = 32 * 8 * KEPT };

struct RowShape {
    Rows a, b;
    u32 n_rows, n_cols, wide, w_is_f32;
    float eps;
};

// The threads that share a row: a warp or a block of 256.
struct OfWarp {
    static inline u32 thread() { return threadIdx.x % 32; }
    static inline u32 n_threads() { return 32; }
    static inline u32 at_once() { return 8; }
    static inline u32 first() { return blockIdx.x * 8 + threadIdx.x / 32; }
    static inline float sum(float x) { return warp_reduce(x, Add()); }
    static inline float max(float x) { return warp_reduce(x, Max()); }
};

struct OfBlock {
    static inline u32 thread() { return threadIdx.x; }
    static inline u32 n_threads() { return 256; }
    static inline u32 at_once() { return 1; }
    static inline u32 first() { return blockIdx.x; }
    static inline float sum(float x) { return block_reduce(x, Add(), 0.0f); }
    static inline float max(float x) { return block_reduce(x, Max(), -inf_f32()); }
};

// Up to eight elements: their index in the row, how many remain, their slot in registers (KEPT: none), and
// whether they are aligned.
struct Piece {
    u32 at, n;
    int k;
    bool wide;
};

// A row, or two of the same length, eight elements at a time: those kept in registers, then the rest.
// Unaligned rows are read one element at a time, and nothing of them is kept.
template <typename T, typename G, int N, int K = KEPT> struct Line {
    const T* p[N];
    u32 n_cols;
    bool wide;
    Eight<T> kept[N][K];

    static inline u32 place(u32 k) { return 8 * (G::thread() + k * G::n_threads()); }
    inline u32 unkept_from() const { return place(wide ? K : 0); }

    // All loads are issued before the first is used.
    inline void load() {
        if (!wide) return;
#pragma unroll
        for (int k = 0; k < K; k++) {
            u32 at = place(k);
            if (at >= n_cols) continue;
#pragma unroll
            for (int i = 0; i < N; i++) kept[i][k] = load8(p[i] + at, 8, true);
        }
    }

    // Calls f(Piece, eight elements of each row) for this thread's elements.
    template <typename F> inline void each(F f) {
        if (wide) {
#pragma unroll
            for (int k = 0; k < K; k++) {
                u32 at = place(k);
                if (at >= n_cols) continue;
                Eight<T> e[N];
#pragma unroll
                for (int i = 0; i < N; i++) e[i] = kept[i][k];
                f(Piece{at, 8, k, true}, e);
            }
        }
        for (u32 at = unkept_from(); at < n_cols; at += 8 * G::n_threads()) {
            Eight<T> e[N];
#pragma unroll
            for (int i = 0; i < N; i++) e[i] = load8(p[i] + at, n_cols - at, wide);
            f(Piece{at, n_cols - at, K, wide}, e);
        }
    }
};

template <typename T> inline void load_weights(const u8* w, const RowShape& s, const Piece& p, float* v) {
    if (s.w_is_f32) {
        Eight<float> e = load8((const float*)w + p.at, p.n, p.wide);
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] = e[i];
    } else {
        Eight<T> e = load8((const T*)w + p.at, p.n, p.wide);
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] = e[i];
    }
}

template <typename T, typename G> inline void rms_norm(T* y, const T* x, const u8* w, const RowShape& s) {
    u32 row = G::first();
    if (row >= s.n_rows) return;
    Line<T, G, 1> line = {{x + s.a.start(row)}, s.n_cols, s.wide != 0};
    line.load();
    float sum = 0.0f;
    line.each([&](const Piece&, const Eight<T>* e) {
#pragma unroll
        for (int i = 0; i < 8; i++) sum = __fmaf_rn(e[0][i], e[0][i], sum);
    });
    float scale = 1.0f / sqrtf(G::sum(sum) / (float)s.n_cols + s.eps);
    T* out = y + (u64)row * s.n_cols;
    line.each([&](const Piece& p, const Eight<T>* e) {
        float v[8];
        load_weights<T>(w, s, p, v);
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] = e[0][i] * scale * v[i];
        store8(out + p.at, v, p.n, p.wide);
    });
}

// The norm uses the sum as rounded to T.
template <typename T, typename G, int K>
inline void rms_norm_add(T* sum_out, T* y, const T* a, const T* b, const u8* w, const RowShape& s) {
    u32 row = G::first();
    if (row >= s.n_rows) return;
    Line<T, G, 2, K> line = {{a + s.a.start(row), b + s.b.start(row)}, s.n_cols, s.wide != 0};
    line.load();
    T* total = sum_out + (u64)row * s.n_cols;
    float sum = 0.0f;
    Eight<T> kept[K];
    line.each([&](const Piece& p, const Eight<T>* e) {
        float v[8];
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] = e[0][i] + e[1][i];
        Eight<T> rounded = eight_of<T>(v);
#pragma unroll
        for (int i = 0; i < 8; i++) sum = __fmaf_rn(rounded[i], rounded[i], sum);
        if (p.k < K) kept[p.k < K ? p.k : 0] = rounded;
        store8(total + p.at, rounded, p.n, p.wide);
    });
    float scale = 1.0f / sqrtf(G::sum(sum) / (float)s.n_cols + s.eps);
    T* out = y + (u64)row * s.n_cols;
    auto finish = [&](const Piece& p, const Eight<T>& e) {
        float v[8];
        load_weights<T>(w, s, p, v);
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] = e[i] * scale * v[i];
        store8(out + p.at, v, p.n, p.wide);
    };
    if (line.wide) {
#pragma unroll
        for (int k = 0; k < K; k++) {
            u32 at = line.place(k);
            if (at < s.n_cols) finish(Piece{at, 8, k, true}, kept[k]);
        }
    }
    // A thread reads only its own writes here.
    for (u32 at = line.unkept_from(); at < s.n_cols; at += 8 * G::n_threads()) {
        Eight<T> e = load8((const T*)total + at, s.n_cols - at, line.wide);
        finish(Piece{at, s.n_cols - at, K, line.wide}, e);
    }
}

// dx = r (dy w - x r^2 mean(dy w x)) (+ more), and partial sums over rows of dw = dy x r, with r = 1 /
// sqrt(mean(x^2) + eps). For rows that fit in registers. The next row is prefetched while one is processed,
// if registers allow it.
template <typename T, int K>
inline void rms_norm_grad_kept(T* dx, float* part, float (*of_warps)[WARP_COLS], const T* dy, const T* x, const u8* w,
                               const RowShape& s, const T* more) {
    const u32 n_ahead = gridDim.x * OfWarp::at_once();
    const bool adds = more != nullptr, AHEAD = K * (10 * sizeof(T) + 8) <= 100;
    float dw[K][8];
#pragma unroll
    for (int k = 0; k < K; k++) {
#pragma unroll
        for (int i = 0; i < 8; i++) dw[k][i] = 0.0f;
    }
    Line<T, OfWarp, 2, K> line;
    line.n_cols = s.n_cols;
    line.wide = true;
    u32 row = OfWarp::first();
    auto load = [&](u32 row) {
        line.p[0] = dy + s.a.start(row);
        line.p[1] = x + s.b.start(row);
        line.load();
    };
    if (AHEAD && row < s.n_rows) load(row);
    for (; row < s.n_rows; row += n_ahead) {
        Eight<T> here[2][K], others[K];
        if (!AHEAD) load(row);
#pragma unroll
        for (int k = 0; k < K; k++) {
            here[0][k] = line.kept[0][k];
            here[1][k] = line.kept[1][k];
            u32 at = line.place(k);
            if (adds && at < s.n_cols) others[k] = load8(more + (u64)row * s.n_cols + at, 8, true);
        }
        if (AHEAD && row + n_ahead < s.n_rows) load(row + n_ahead);
        float squares = 0.0f, dot = 0.0f;
#pragma unroll
        for (int k = 0; k < K; k++) {
            u32 at = line.place(k);
            if (at >= s.n_cols) continue;
            float weights[8];
            load_weights<T>(w, s, Piece{at, 8, k, true}, weights);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                squares = __fmaf_rn(here[1][k][i], here[1][k][i], squares);
                dot = __fmaf_rn(here[0][k][i] * weights[i], here[1][k][i], dot);
            }
        }
        // Both sums in one reduction.
#pragma unroll
        for (int step = 16; step > 0; step >>= 1) {
            squares += __shfl_xor_sync(0xffffffffu, squares, step);
            dot += __shfl_xor_sync(0xffffffffu, dot, step);
        }
        float r = 1.0f / sqrtf(squares / (float)s.n_cols + s.eps);
        float pull = r * r * (dot / (float)s.n_cols);
#pragma unroll
        for (int k = 0; k < K; k++) {
            u32 at = line.place(k);
            if (at >= s.n_cols) continue;
            float v[8];
            load_weights<T>(w, s, Piece{at, 8, k, true}, v);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                float grad = here[0][k][i], value = here[1][k][i];
                v[i] = r * (grad * v[i] - value * pull);
                dw[k][i] += grad * (value * r);
                if (adds) v[i] += others[k][i];
            }
            store8(dx + (u64)row * s.n_cols + at, v, 8, true);
        }
    }
    float* sums = of_warps[threadIdx.x / 32];
#pragma unroll
    for (int k = 0; k < K; k++) {
        u32 at = line.place(k);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            if (at < s.n_cols) sums[at + i] = dw[k][i];
        }
    }
    __syncthreads();
    for (u32 col = threadIdx.x; col < s.n_cols; col += 256) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; i++) sum += of_warps[i][col];
        part[col] = sum;
    }
}

// The same for all other rows. Partial sums are accumulated in memory: no other thread of this warp or block
// has these columns.
template <typename T, typename G>
inline void rms_norm_grad(T* dx, float* part, float (*of_warps)[WARP_COLS], const T* dy, const T* x, const u8* w,
                          const RowShape& s, const T* more) {
    const bool by_warp = G::n_threads() == 32;
    float* sums = by_warp ? of_warps[threadIdx.x / 32] : part;
    Line<T, G, 2> line;
    line.n_cols = s.n_cols;
    line.wide = s.wide != 0;
    for (u32 at = line.place(0); at < s.n_cols; at += 8 * G::n_threads()) {
        for (u32 i = at; i < s.n_cols && i < at + 8; i++) sums[i] = 0.0f;
    }
    for (u32 row = G::first(); row < s.n_rows; row += gridDim.x * G::at_once()) {
        line.p[0] = dy + s.a.start(row);
        line.p[1] = x + s.b.start(row);
        line.load();
        float squares = 0.0f, dot = 0.0f;
        line.each([&](const Piece& p, const Eight<T>* e) {
            float weights[8];
            load_weights<T>(w, s, p, weights);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                squares = __fmaf_rn(e[1][i], e[1][i], squares);
                dot = __fmaf_rn(e[0][i] * weights[i], e[1][i], dot);
            }
        });
        float r = 1.0f / sqrtf(G::sum(squares) / (float)s.n_cols + s.eps);
        float pull = r * r * (G::sum(dot) / (float)s.n_cols);
        T* out = dx + (u64)row * s.n_cols;
        line.each([&](const Piece& p, const Eight<T>* e) {
            float v[8];
            load_weights<T>(w, s, p, v);
#pragma unroll
            for (u32 i = 0; i < 8; i++) {
                v[i] = r * (e[0][i] * v[i] - e[1][i] * pull);
                if (i < p.n) sums[p.at + i] += e[0][i] * (e[1][i] * r);
            }
            if (more != nullptr) {
                Eight<T> others = load8(more + (u64)row * s.n_cols + p.at, p.n, p.wide);
#pragma unroll
                for (int i = 0; i < 8; i++) v[i] += others[i];
            }
            store8(out + p.at, v, p.n, p.wide);
        });
    }
    if (!by_warp) return;
    __syncthreads();
    for (u32 col = threadIdx.x; col < s.n_cols; col += 256) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; i++) sum += of_warps[i][col];
        part[col] = sum;
    }
}

template <typename T, typename G> inline void softmax(T* y, const T* x, const RowShape& s) {
    u32 row = G::first();
    if (row >= s.n_rows) return;
    Line<T, G, 1> line = {{x + s.a.start(row)}, s.n_cols, s.wide != 0};
    line.load();
    float max = -inf_f32(), sum = 0.0f;
    line.each([&](const Piece& p, const Eight<T>* e) {
#pragma unroll
        for (u32 i = 0; i < 8; i++) {
            if (i < p.n) max = fmaxf(max, e[0][i]);
        }
    });
    max = G::max(max);
    line.each([&](const Piece& p, const Eight<T>* e) {
#pragma unroll
        for (u32 i = 0; i < 8; i++) {
            if (i < p.n) sum += expf(e[0][i] - max);
        }
    });
    float scale = 1.0f / G::sum(sum);
    T* out = y + (u64)row * s.n_cols;
    line.each([&](const Piece& p, const Eight<T>* e) {
        float v[8];
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] = expf(e[0][i] - max) * scale;
        store8(out + p.at, v, p.n, p.wide);
    });
}

// dx = y (dy - sum(dy y)), where y is the softmax.
template <typename T, typename G> inline void softmax_grad(T* dx, const T* dy, const T* y, const RowShape& s) {
    u32 row = G::first();
    if (row >= s.n_rows) return;
    Line<T, G, 2> line = {{dy + s.a.start(row), y + s.b.start(row)}, s.n_cols, s.wide != 0};
    line.load();
    float dot = 0.0f;
    line.each([&](const Piece&, const Eight<T>* e) {
#pragma unroll
        for (int i = 0; i < 8; i++) dot = __fmaf_rn(e[0][i], e[1][i], dot);
    });
    dot = G::sum(dot);
    T* out = dx + (u64)row * s.n_cols;
    line.each([&](const Piece& p, const Eight<T>* e) {
        float v[8];
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] = e[1][i] * (e[0][i] - dot);
        store8(out + p.at, v, p.n, p.wide);
    });
}

// Codes are in the order of KINDS in src/train_rows.rs.
enum : u32 { SUM = 0, MEAN = 1, MAX = 2 };

inline float merged(u32 kind, float a, float b) { return kind == MAX ? fmaxf(a, b) : a + b; }
inline float neutral(u32 kind) { return kind == MAX ? -inf_f32() : 0.0f; }

template <typename T, typename G> inline void reduce_rows(T* y, const T* x, const RowShape& s, u32 kind) {
    u32 row = G::first();
    if (row >= s.n_rows) return;
    Line<T, G, 1> line = {{x + s.a.start(row)}, s.n_cols, s.wide != 0};
    line.load();
    float result = neutral(kind);
    line.each([&](const Piece& p, const Eight<T>* e) {
#pragma unroll
        for (u32 i = 0; i < 8; i++) {
            if (i < p.n) result = merged(kind, result, e[0][i]);
        }
    });
    result = kind == MAX ? G::max(result) : G::sum(result);
    if (kind == MEAN) result /= (float)s.n_cols;
    if (G::thread() == 0) y[row] = from_f32<T>(result);
}

struct Columns {
    u32 n_outer, n, n_inner, n_slices;
    u32 outer_stride, stride, wide, kind;
};

// A warp covers 256 columns, eight per lane; the block's eight warps alternate over the rows.
template <typename T> inline void reduce_columns(float* parts, const T* x, const Columns& s) {
    start();
    __shared__ float of_turns[8][256];
    u32 n_blocks = (s.n_inner + 255) / 256, block = blockIdx.x % n_blocks, slice = blockIdx.x / n_blocks % s.n_slices;
    u32 outer = blockIdx.x / n_blocks / s.n_slices;
    u32 turn = threadIdx.x / 32, lane = threadIdx.x % 32, at = 256 * block + 8 * lane;
    u32 length = (s.n + s.n_slices - 1) / s.n_slices, first = slice * length;
    u32 end = first + length < s.n ? first + length : s.n;
    float v[8];
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = neutral(s.kind);
    if (at < s.n_inner) {
        const T* column = x + (u64)outer * s.outer_stride + at;
#pragma unroll 4
        for (u32 row = first + turn; row < end; row += 8) {
            Eight<T> e = load8(column + (u64)row * s.stride, s.n_inner - at, s.wide);
#pragma unroll
            for (int i = 0; i < 8; i++) v[i] = merged(s.kind, v[i], e[i]);
        }
    }
#pragma unroll
    for (int i = 0; i < 8; i++) of_turns[turn][8 * lane + i] = v[i];
    __syncthreads();
    u32 col = 256 * block + threadIdx.x;
    if (col >= s.n_inner) return;
    float result = of_turns[0][threadIdx.x];
#pragma unroll
    for (int i = 1; i < 8; i++) result = merged(s.kind, result, of_turns[i][threadIdx.x]);
    parts[((u64)outer * s.n_slices + slice) * s.n_inner + col] = result;
}

// A block has 32 columns; 32 threads alternate over the slices of each.
inline void finish_columns(u8* y, u32 type, const float* parts, const Columns& s) {
    start();
    __shared__ float of_turns[32][33];
    u32 turn = threadIdx.x / 32, lane = threadIdx.x % 32, index = 32 * blockIdx.x + lane, n = s.n_outer * s.n_inner;
    float result = neutral(s.kind);
    if (index < n) {
        const float* column = parts + (u64)(index / s.n_inner) * s.n_slices * s.n_inner + index % s.n_inner;
        // Loads of eight slices are issued before the first is used.
        for (u32 first = turn; first < s.n_slices; first += 256) {
            float v[8];
#pragma unroll
            for (u32 i = 0; i < 8; i++) {
                u32 slice = first + 32 * i;
                v[i] = slice < s.n_slices ? column[(u64)slice * s.n_inner] : neutral(s.kind);
            }
#pragma unroll
            for (int i = 0; i < 8; i++) result = merged(s.kind, result, v[i]);
        }
    }
    of_turns[turn][lane] = result;
    __syncthreads();
    // Each warp reduces one column, whose 32 partial results its lanes hold.
    float of_column = of_turns[lane][turn];
    of_column = s.kind == MAX ? warp_reduce(of_column, Max()) : warp_reduce(of_column, Add());
    index = 32 * blockIdx.x + turn;
    if (lane != 0 || index >= n) return;
    if (s.kind == MEAN) of_column /= (float)s.n;
    store_any(y, type, index, &of_column, 1, false);
}

#define NORM(name, T)                                                                                                  \
    extern "C" __global__ __launch_bounds__(256) void train_rms_norm_##name(T* y, const T* x, const u8* w, RowShape s) { \
        start();                                                                                                       \
        if (s.n_cols <= WARP_COLS) rms_norm<T, OfWarp>(y, x, w, s);                                                    \
        else rms_norm<T, OfBlock>(y, x, w, s);                                                                         \
    }                                                                                                                  \
    extern "C" __global__ __launch_bounds__(256) void train_rms_norm_add_##name(T* sum, T* y, const T* a, const T* b,  \
                                                                                const u8* w, RowShape s) {             \
        start();                                                                                                       \
        if (s.n_cols <= 512) rms_norm_add<T, OfWarp, 2>(sum, y, a, b, w, s);                                           \
        else if (s.n_cols <= 768) rms_norm_add<T, OfWarp, 3>(sum, y, a, b, w, s);                                      \
        else if (s.n_cols <= WARP_COLS) rms_norm_add<T, OfWarp, KEPT>(sum, y, a, b, w, s);                             \
        else rms_norm_add<T, OfBlock, KEPT>(sum, y, a, b, w, s);                                                       \
    }

#define NORM_GRAD(name, T)                                                                                             \
    extern "C" __global__ __launch_bounds__(256, 2) void train_rms_norm_grad_##name(                                   \
        T* dx, float* parts, const T* dy, const T* x, const u8* w, RowShape s, const T* more) {                        \
        __shared__ float of_warps[8][WARP_COLS];                                                                       \
        float* part = parts + (u64)blockIdx.x * s.n_cols;                                                              \
        start();                                                                                                       \
        if (s.n_cols > WARP_COLS) rms_norm_grad<T, OfBlock>(dx, part, of_warps, dy, x, w, s, more);                    \
        else if (s.wide && s.n_cols <= 512) rms_norm_grad_kept<T, 2>(dx, part, of_warps, dy, x, w, s, more);           \
        else if (s.wide && s.n_cols <= 768) rms_norm_grad_kept<T, 3>(dx, part, of_warps, dy, x, w, s, more);           \
        else if (s.wide && sizeof(T) == 2) rms_norm_grad_kept<T, KEPT>(dx, part, of_warps, dy, x, w, s, more);         \
        else rms_norm_grad<T, OfWarp>(dx, part, of_warps, dy, x, w, s, more);                                          \
    }

#define SOFTMAX(name, T)                                                                                               \
    extern "C" __global__ __launch_bounds__(256) void train_softmax_##name(T* y, const T* x, RowShape s) {             \
        start();                                                                                                       \
        if (s.n_cols <= WARP_COLS) softmax<T, OfWarp>(y, x, s);                                                        \
        else softmax<T, OfBlock>(y, x, s);                                                                             \
    }                                                                                                                  \
    extern "C" __global__ __launch_bounds__(256) void train_softmax_grad_##name(T* dx, const T* dy, const T* y,        \
                                                                                RowShape s) {                          \
        start();                                                                                                       \
        if (s.n_cols <= WARP_COLS) softmax_grad<T, OfWarp>(dx, dy, y, s);                                              \
        else softmax_grad<T, OfBlock>(dx, dy, y, s);                                                                   \
    }

#define REDUCE(name, T)                                                                                                \
    extern "C" __global__ __launch_bounds__(256) void train_reduce_rows_##name(T* y, const T* x, RowShape s, u32 kind) { \
        start();                                                                                                       \
        if (s.n_cols <= WARP_COLS) reduce_rows<T, OfWarp>(y, x, s, kind);                                              \
        else reduce_rows<T, OfBlock>(y, x, s, kind);                                                                   \
    }                                                                                                                  \
    extern "C" __global__ __launch_bounds__(256) void train_reduce_columns_##name(float* parts, const T* x,            \
                                                                                  Columns s) {                         \
        reduce_columns(parts, x, s);                                                                                   \
    }

// unit norm_f32
NORM(f32, float)
// unit norm_f16
NORM(f16, F16)
// unit norm_bf16
NORM(bf16, BF16)
// unit norm_grad_f32
NORM_GRAD(f32, float)
// unit norm_grad_f16
NORM_GRAD(f16, F16)
// unit norm_grad_bf16
NORM_GRAD(bf16, BF16)
// unit softmax_f32
SOFTMAX(f32, float)
// unit softmax_f16
SOFTMAX(f16, F16)
// unit softmax_bf16
SOFTMAX(bf16, BF16)
// unit reduce_f32
REDUCE(f32, float)
// unit reduce_f16
REDUCE(f16, F16)
// unit reduce_bf16
REDUCE(bf16, BF16)
// unit finish
extern "C" __global__ __launch_bounds__(1024) void train_finish_columns(u8* y, const float* parts, Columns s, u32 type) {
    finish_columns(y, type, parts, s);
}
