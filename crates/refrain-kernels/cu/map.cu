// map.cu: elementwise functions for every element type, and their gradients
//
//   map_unary       y = f(a)                    map_unary_grad  y = a f'(b)
//   map_binary      y = f(a, b)                 map_gate        y = f(a) b
//   map_gate_grad   y = a c f'(b), z = a f(b): a is the gradient of the result, b the gate, c the other factor
//   map_compare     y = a == b or a < b, i32    map_select      y = a != 0 ? b : c
//   map_cast        y = a in another type       map_dropout     y = a / (1 - p) or 0
//
//   a, b, c  [n]  element i at map.at(i); types in bytes 1 .. 3 of map.types. map_select: a is i32
//   y, z     [n]  dense; type in byte 0 of map.types
//   map_dropout: c is [4] u32, the random state; f is the site, p0 the probability, p1 the factor of kept elements
//
// map_binary_rows, map_gate_rows and map_gate_grad_rows do the same for operands and results of one 16-bit
// type, in rows of consecutive elements: map.rank is 1 or 2, map.wide is set, and the innermost strides are
// 1.
//
// Launch       grid (ceil(n / 2048)), block (256), shared 0; _rows: grid (ceil(n / 4096))
// Requires     map.wide: in each operand, eight elements that start at a multiple of eight are contiguous and
//              16-byte aligned, or all the same element
// Aliasing     y and z may be operands that are dense and of y's shape: a thread reads its elements before it
//              writes them
// Accumulation computed in f32, rounded once
// Determinism  same bits every run
// Capture      safe
#include "eight.cuh"
#include "functions.cuh"
#include "overlap.cuh"

// Up to six dimensions of three operands, traversed in row-major order.
struct Map {
    u32 rank;
    u32 dims[6];
    u32 strides[3][6];
    u32 n, wide, types;

    inline u32 type(u32 operand) const { return types >> (8 * operand) & 0xffu; }

    // Constant indices keep the arrays in the parameter bank.
    template <int N> inline void at(u32 i, u32* to) const {
#pragma unroll
        for (int k = 0; k < N; k++) to[k] = 0;
#pragma unroll
        for (int axis = 5; axis >= 0; axis--) {
            if (axis < (int)rank) {
                u32 index = axis == 0 ? i : i % dims[axis];
                i = axis == 0 ? 0 : i / dims[axis];
#pragma unroll
                for (int k = 0; k < N; k++) to[k] += index * strides[k][axis];
            }
        }
    }

    // Whether the operand repeats one element along the innermost dimension.
    template <int K> inline bool repeats() const {
        u32 inner = 0;
#pragma unroll
        for (int axis = 0; axis < 6; axis++) {
            if (axis + 1 == (int)rank) inner = strides[K][axis];
        }
        return inner == 0;
    }
};

// A thread's elements, i to i + n.
struct Share {
    u32 i, n;
    bool wide;
};

inline Share share_of(const Map& map) {
    u32 i = (blockIdx.x * 256 + threadIdx.x) * 8;
    u32 n = i < map.n ? (map.n - i < 8 ? map.n - i : 8) : 0;
    return Share{i, n, map.wide != 0};
}

// Loads the bits of operand K at the indices `at`: one element per word, or two 16-bit elements per word.
template <int K> inline Eight<u32> operand_at(const Map& map, const Share& s, const u8* p, u32 at) {
    u32 type = map.type(K + 1);
    if (!map.repeats<K>()) return load_any(p, type, at, s.n, true);
    u32 one = load_bits(p, type, at);
    if (is_short(type)) one |= one << 16;
    Eight<u32> e = {{one, one, one, one, one, one, one, one}};
    return e;
}

// Loads the first N operands of a thread's elements, as bits.
template <int N> inline void operands(const Map& map, const Share& s, const u8* a, const u8* b, const u8* c, Eight<u32>* e) {
    u32 at[N];
    if (s.wide) {
        map.at<N>(s.i, at);
        e[0] = operand_at<0>(map, s, a, at[0]);
        if (N > 1) e[N > 1 ? 1 : 0] = operand_at<1>(map, s, b, at[N > 1 ? 1 : 0]);
        if (N > 2) e[N > 2 ? 2 : 0] = operand_at<2>(map, s, c, at[N > 2 ? 2 : 0]);
        return;
    }
#pragma unroll
    for (int k = 0; k < N; k++) {
#pragma unroll
        for (int i = 0; i < 8; i++) e[k].w[i] = 0;
    }
#pragma unroll
    for (u32 i = 0; i < 8; i++) {
        if (i >= s.n) continue;
        map.at<N>(s.i + i, at);
#pragma unroll
        for (int k = 0; k < N; k++) {
            u32 type = map.type(k + 1), bits = load_bits(k == 0 ? a : k == 1 ? b : c, type, at[k]);
            if (is_short(type)) e[k].w[i / 2] |= bits << (16 * (i % 2));
            else e[k].w[i] = bits;
        }
    }
}

// Loads the first N operands as floats.
template <int N>
inline void values(const Map& map, const Share& s, const u8* a, const u8* b, const u8* c, float (*v)[8]) {
    Eight<u32> e[N];
    operands<N>(map, s, a, b, c, e);
#pragma unroll
    for (int k = 0; k < N; k++) values_of(e[k], map.type(k + 1), v[k]);
}

inline void store(const Map& map, const Share& s, u8* y, const float* v) {
    store_any(y, map.type(0), s.i, v, s.n, s.wide);
}

template <typename F> inline void each(float* v, const float* x, F f) {
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = f(x[i]);
}

template <typename F> inline void each(float* v, const float* a, const float* b, F f) {
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = f(a[i], b[i]);
}

// Codes are in the order of UNARY in src/map.rs.
inline void unary(u32 f, float p0, float p1, float* v, const float* x) {
    switch (f) {
        case 0: return each(v, x, [](float x) { return -x; });
        case 1: return each(v, x, [](float x) { return expf(x); });
        case 2: return each(v, x, [](float x) { return logf(x); });
        case 3: return each(v, x, [](float x) { return 1.0f / sqrtf(x); });
        case 4: return each(v, x, [](float x) { return tanhf(x); });
        case 5: return each(v, x, [](float x) { return sigmoid(x); });
        case 6: return each(v, x, [](float x) { return silu(x); });
        case 7: return each(v, x, [](float x) { return gelu_tanh(x); });
        case 8: return each(v, x, [](float x) { return gelu_erf(x); });
        case 9: return each(v, x, [=](float x) { return __fmaf_rn(p0, x, p1); });
        default: return each(v, x, [=](float x) { return p0 * tanhf(x / p0); });
    }
}

inline void unary_slope(u32 f, float p0, float* v, const float* x) {
    switch (f) {
        case 0: return each(v, x, [](float) { return -1.0f; });
        case 1: return each(v, x, [](float x) { return expf(x); });
        case 2: return each(v, x, [](float x) { return 1.0f / x; });
        case 3: return each(v, x, [](float x) { return -0.5f / (x * sqrtf(x)); });
        case 4: return each(v, x, [](float x) { return tanh_slope(x); });
        case 5: return each(v, x, [](float x) { return sigmoid_slope(x); });
        case 6: return each(v, x, [](float x) { return silu_slope(x); });
        case 7: return each(v, x, [](float x) { return gelu_tanh_slope(x); });
        case 8: return each(v, x, [](float x) { return gelu_erf_slope(x); });
        case 9: return each(v, x, [=](float) { return p0; });
        default: return each(v, x, [=](float x) { return tanh_slope(x / p0); });
    }
}

// Codes are in the order of BINARY in src/map.rs.
inline void binary(u32 f, float* v, const float* a, const float* b) {
    switch (f) {
        case 0: return each(v, a, b, [](float a, float b) { return a + b; });
        case 1: return each(v, a, b, [](float a, float b) { return a - b; });
        case 2: return each(v, a, b, [](float a, float b) { return a * b; });
        case 3: return each(v, a, b, [](float a, float b) { return a / b; });
        default: return each(v, a, b, [](float a, float b) { return fmaxf(a, b); });
    }
}

// Philox 4x32-10.
inline void philox(u32* c, u32 k0, u32 k1) {
#pragma unroll
    for (int round = 0; round < 10; round++) {
        u64 a = (u64)0xd2511f53u * c[0], b = (u64)0xcd9e8d57u * c[2];
        c[0] = (u32)(b >> 32) ^ c[1] ^ k0;
        c[1] = (u32)b;
        c[2] = (u32)(a >> 32) ^ c[3] ^ k1;
        c[3] = (u32)a;
        k0 += 0x9e3779b9u;
        k1 += 0xbb67ae85u;
    }
}

// Rounds towards zero and saturates; NaN becomes 0.
inline u32 to_i32(float x) {
    if (x != x) return 0;
    if (x >= 2147483648.0f) return 0x7fffffffu;
    if (x < -2147483648.0f) return 0x80000000u;
    return (u32)(i32)x;
}

// Groups of eight elements per thread; all their loads are issued before the first is used.
enum : u32 { AT_ONCE = 2 };

// Calls f(groups of N operands, results as floats), and stores M results. WHOLE: no group is partial.
template <int N, int M, bool WHOLE, typename T, typename F>
inline void of_eights(const Map& map, u32 first, T* y, T* z, const T* a, const T* b, const T* c, F f) {
    Eight<T> e[AT_ONCE][N];
    auto left = [&](u32 i) { return WHOLE ? 8 : map.n - i; };
#pragma unroll
    for (u32 j = 0; j < AT_ONCE; j++) {
        u32 i = first + 2048 * j;
        if (!WHOLE && i >= map.n) continue;
        u32 row = map.rank == 1 ? 0 : i / map.dims[1], col = i - row * map.dims[1];
#pragma unroll
        for (int k = 0; k < N; k++) {
            const T* p = k == 0 ? a : k == 1 ? b : c;
            e[j][k] = load8(p + (row * map.strides[k][0] + col), left(i), true);
        }
    }
#pragma unroll
    for (u32 j = 0; j < AT_ONCE; j++) {
        u32 i = first + 2048 * j;
        if (!WHOLE && i >= map.n) continue;
        float v[M][8];
        f(e[j], v);
        store8(y + i, v[0], left(i), true);
        if (M > 1) store8(z + i, v[M - 1], left(i), true);
    }
}

template <int N, int M, typename T, typename F>
inline void of_rows(const Map& map, T* y, T* z, const T* a, const T* b, const T* c, F f) {
    u32 first = (blockIdx.x * 256 * AT_ONCE + threadIdx.x) * 8;
    if ((u64)(blockIdx.x + 1) * 2048 * AT_ONCE <= map.n) of_eights<N, M, true>(map, first, y, z, a, b, c, f);
    else of_eights<N, M, false>(map, first, y, z, a, b, c, f);
}

template <typename T> inline void binary_rows(const Map& map, T* y, const T* a, const T* b, u32 f) {
    of_rows<2, 1>(map, y, y, a, b, a, [=](const Eight<T>* e, float (*v)[8]) {
        float x[2][8];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            x[0][i] = e[0][i];
            x[1][i] = e[1][i];
        }
        binary(f, v[0], x[0], x[1]);
    });
}

template <typename T, typename G> inline void gate_rows(const Map& map, T* y, const T* a, const T* b, G gated) {
    of_rows<2, 1>(map, y, y, a, b, a, [=](const Eight<T>* e, float (*v)[8]) {
#pragma unroll
        for (int i = 0; i < 8; i++) v[0][i] = gated(e[0][i]).value * e[1][i];
    });
}

template <typename T, typename G>
inline void gate_grad_rows(const Map& map, T* y, T* z, const T* a, const T* b, const T* c, G gated) {
    of_rows<3, 2>(map, y, z, a, b, c, [=](const Eight<T>* e, float (*v)[8]) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            Gated g = gated(e[1][i]);
            v[0][i] = e[0][i] * g.slope * e[2][i];
            v[1][i] = e[0][i] * g.value;
        }
    });
}

#define MAP_ROWS(name, T)                                                                                   \
    extern "C" __global__ __launch_bounds__(256) void map_##name(T* y, T* z, const T* a, const T* b, const T* c, Map map, \
                                                                 u32 f, float p0, float p1)

#define ROWS(name, T)                                                                                       \
    MAP_ROWS(binary_rows_##name, T) {                                                                       \
        start();                                                                                            \
        binary_rows(map, y, a, b, f);                                                                       \
    }                                                                                                       \
    MAP_ROWS(gate_rows_##name, T) {                                                                         \
        start();                                                                                            \
        if (f == 0) gate_rows(map, y, a, b, [](float x) { return quick_silu(x); });                         \
        else gate_rows(map, y, a, b, [](float x) { return quick_gelu_tanh(x); });                           \
    }                                                                                                       \
    MAP_ROWS(gate_grad_rows_##name, T) {                                                                    \
        start();                                                                                            \
        if (f == 0) gate_grad_rows(map, y, z, a, b, c, [](float x) { return quick_silu(x); });              \
        else gate_grad_rows(map, y, z, a, b, c, [](float x) { return quick_gelu_tanh(x); });                \
    }

#define MAP(name)                                                                                           \
    extern "C" __global__ __launch_bounds__(256) void map_##name(u8* y, u8* z, const u8* a, const u8* b,    \
                                                                 const u8* c, Map map, u32 f, float p0, float p1)

// unit unary
MAP(unary) {
    start();
    Share s = share_of(map);
    if (s.n == 0) return;
    float x[1][8], v[8];
    values<1>(map, s, a, b, c, x);
    unary(f, p0, p1, v, x[0]);
    store(map, s, y, v);
}
// unit unary_grad
MAP(unary_grad) {
    start();
    Share s = share_of(map);
    if (s.n == 0) return;
    float x[2][8], v[8];
    values<2>(map, s, a, b, c, x);
    unary_slope(f, p0, v, x[1]);
    each(v, v, x[0], [](float slope, float dy) { return slope * dy; });
    store(map, s, y, v);
}
// unit binary
MAP(binary) {
    start();
    Share s = share_of(map);
    if (s.n == 0) return;
    float x[2][8], v[8];
    values<2>(map, s, a, b, c, x);
    binary(f, v, x[0], x[1]);
    store(map, s, y, v);
}

MAP(gate) {
    start();
    Share s = share_of(map);
    if (s.n == 0) return;
    float x[2][8], v[8];
    values<2>(map, s, a, b, c, x);
    if (f == 0) each(v, x[0], x[1], [](float g, float u) { return silu(g) * u; });
    else each(v, x[0], x[1], [](float g, float u) { return gelu_tanh(g) * u; });
    store(map, s, y, v);
}
// unit gate_grad
MAP(gate_grad) {
    start();
    Share s = share_of(map);
    if (s.n == 0) return;
    float x[3][8], gate[8], up[8];
    values<3>(map, s, a, b, c, x);
    if (f == 0) {
        each(up, x[0], x[1], [](float dy, float g) { return dy * silu(g); });
        each(gate, x[0], x[1], [](float dy, float g) { return dy * silu_slope(g); });
    } else {
        each(up, x[0], x[1], [](float dy, float g) { return dy * gelu_tanh(g); });
        each(gate, x[0], x[1], [](float dy, float g) { return dy * gelu_tanh_slope(g); });
    }
    each(gate, gate, x[2], [](float d, float u) { return d * u; });
    store(map, s, y, gate);
    store(map, s, z, up);
}
// unit other
MAP(compare) {
    start();
    Share s = share_of(map);
    if (s.n == 0) return;
    Eight<u32> e[2];
    operands<2>(map, s, a, b, c, e);
    u32 holds[8];
    if (map.type(1) == TYPE_I32) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            i32 left = (i32)e[0].w[i], right = (i32)e[1].w[i];
            holds[i] = f == 0 ? left == right : left < right;
        }
    } else {
        float x[2][8];
        values_of(e[0], map.type(1), x[0]);
        values_of(e[1], map.type(2), x[1]);
#pragma unroll
        for (int i = 0; i < 8; i++) holds[i] = f == 0 ? x[0][i] == x[1][i] : x[0][i] < x[1][i];
    }
    store_words(y, s.i, holds, s.n, s.wide);
}

MAP(select) {
    start();
    Share s = share_of(map);
    if (s.n == 0) return;
    Eight<u32> e[3];
    operands<3>(map, s, a, b, c, e);
    float x[2][8], v[8];
    values_of(e[1], map.type(2), x[0]);
    values_of(e[2], map.type(3), x[1]);
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = e[0].w[i] != 0 ? x[0][i] : x[1][i];
    store(map, s, y, v);
}

MAP(cast) {
    start();
    Share s = share_of(map);
    if (s.n == 0) return;
    float x[1][8];
    values<1>(map, s, a, b, c, x);
    if (map.type(0) != TYPE_I32) return store(map, s, y, x[0]);
    u32 v[8];
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = to_i32(x[0][i]);
    store_words(y, s.i, v, s.n, s.wide);
}

// Element i is kept or dropped by word i % 4 of Philox with the counter [i / 4, site, state 2, state 3] and
// the key [state 0, state 1].
MAP(dropout) {
    start();
    Share s = share_of(map);
    if (s.n == 0) return;
    const u32* state = (const u32*)c;
    u32 random[8];
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        u32* words = random + 4 * half;
        words[0] = s.i / 4 + half;
        words[1] = f;
        words[2] = state[2];
        words[3] = state[3];
        philox(words, state[0], state[1]);
    }
    float x[1][8];
    values<1>(map, s, a, b, c, x);
#pragma unroll
    for (int i = 0; i < 8; i++) x[0][i] = (float)(random[i] >> 8) * (1.0f / 16777216.0f) >= p0 ? x[0][i] * p1 : 0.0f;
    store(map, s, y, x[0]);
}
// unit rows_f16
ROWS(f16, F16)
// unit rows_bf16
ROWS(bf16, BF16)
