// moves.cu: gather, pick, place, pad and RoPE for every element type
//
//   move_gather  y [n_ids, d]          = table [n_rows, d] at ids; negative: zeros; >= n_rows: NaN
//   move_pick    y [n_rows]            = x [n_rows, n_cols] at ids; negative: zero; >= n_cols: NaN
//   move_place   y [n_rows, width]     = x [n_rows] in the column given by ids, zeros elsewhere and for other ids
//   move_pad     y [n_outer, total]    = x [n_outer, length] from `before` on, zeros elsewhere
//   move_rope    y [n, n_heads, head_dim] = x rotated by position * inv_freq, forward or back; negative: unchanged
//
// Codes give the types of y and x (eight.cuh); move_rope has one kernel per type. x is in rows of consecutive
// elements, everything else is dense. gather may be the first kernel of a step: the next one starts only
// after the previous steps have ended (overlap.cuh).
//
// Launch       gather: grid (ceil(n_ids / 8)), block (256). pick: grid (ceil(n_rows / 256)), block (256).
//              place, pad: grid (rows * ceil(columns / 2048)), block (256). rope: grid (ceil(threads / 128)),
//              block (128); a thread handles s.n_each heads, for each of them four pairs where s.wide, else
//              one pair, or an element after the pairs
// Requires     wide: rows of y and x are 16-byte aligned and have a multiple of 8 elements; rope: n_dims as
//              well
// Aliasing     rope: y may be x if that is dense: a thread reads its elements before it writes them. Others:
//              none
// Determinism  exact, except rope, whose angles follow turn.cuh
// Capture      safe: ids and positions are read at each run
#include "eight.cuh"
#include "overlap.cuh"
#include "turn.cuh"
#include "view.cuh"

struct Heads {
    u32 n, n_heads, head_dim, n_dims, wide, n_each;
    float magnitude, direction;
};

// Bits of Heads::wide: rows are aligned; the heads of a row have a constant stride.
enum : u32 { WIDE = 1, TOGETHER = 2 };

// Heads that a thread loads at once; it rotates s.n_each by the same angles.
enum : u32 { AT_ONCE = 4 };

// Loads four elements, starting at a multiple of four, or one.
template <int G, typename T> inline void load_some(const T* p, float* v) {
    if (G == 4) {
        u32 w[4];
        if (sizeof(T) == 2) {
            uint2 e = *(const uint2*)p;
            w[0] = e.x & 0xffffu;
            w[1] = e.x >> 16;
            w[2] = e.y & 0xffffu;
            w[3] = e.y >> 16;
        } else {
            uint4 e = *(const uint4*)p;
            w[0] = e.x;
            w[1] = e.y;
            w[2] = e.z;
            w[3] = e.w;
        }
#pragma unroll
        for (int i = 0; i < G; i++) v[i] = of_bits(T(), w[i]);
    } else {
        v[0] = to_f32(p[0]);
    }
}

template <int G, typename T> inline void store_some(T* p, const float* v) {
    if (G == 4) {
        if (sizeof(T) == 2) *(uint2*)p = make_uint2(word_of<T>(v[0], v[1 % G]), word_of<T>(v[2 % G], v[3 % G]));
        else *(uint4*)p = make_uint4(bits_of(v[0]), bits_of(v[1 % G]), bits_of(v[2 % G]), bits_of(v[3 % G]));
    } else {
        p[0] = from_f32<T>(v[0]);
    }
}

// G pairs of a head, from `pair` on.
template <bool INTERLEAVED, int G, typename T> struct Pairs {
    float u[G], v[G];

    inline void load(const T* head, u32 pair, u32 half) {
        if (INTERLEAVED) {
            float w[2 * G];
            if (G == 4) {
                Eight<T> e = load8(head + 2 * pair, 8, true);
#pragma unroll
                for (int i = 0; i < 2 * G; i++) w[i] = e[i];
            } else {
                w[0] = to_f32(head[2 * pair]);
                w[1] = to_f32(head[2 * pair + 1]);
            }
#pragma unroll
            for (int i = 0; i < G; i++) {
                u[i] = w[2 * i];
                v[i] = w[2 * i + 1];
            }
        } else {
            load_some<G>(head + pair, u);
            load_some<G>(head + half + pair, v);
        }
    }

    inline void store(T* head, u32 pair, u32 half) const {
        if (INTERLEAVED) {
            float w[8];
#pragma unroll
            for (int i = 0; i < 8; i++) w[i] = i % 2 == 0 ? u[i / 2 % G] : v[i / 2 % G];
            if (G == 4) {
                store8(head + 2 * pair, w, 8, true);
            } else {
                head[2 * pair] = from_f32<T>(w[0]);
                head[2 * pair + 1] = from_f32<T>(w[1]);
            }
        } else {
            store_some<G>(head + pair, u);
            store_some<G>(head + half + pair, v);
        }
    }
};

template <bool INTERLEAVED, int G, typename T>
inline void turn_heads(T* y, const T* x, const i32* positions, const float* inv_freq, const Rows& rows, const Heads& s) {
    u32 half = s.n_dims / 2, n_pairs = half / G, n_items = n_pairs + s.head_dim - s.n_dims;
    u32 n_groups = (s.n_heads + s.n_each - 1) / s.n_each;
    u32 index = blockIdx.x * 128 + threadIdx.x, item = index % n_items, group = index / n_items % n_groups;
    u32 row = index / n_items / n_groups;
    if (row >= s.n) return;
    u32 first = row * s.n_heads + group * s.n_each, n_left = s.n_heads - group * s.n_each;
    u32 n = n_left < s.n_each ? n_left : s.n_each;
    u64 from = rows.start(first);
    auto start_of = [&](u32 h) {
        return (s.wide & TOGETHER) != 0 ? from + (u64)h * rows.inner_stride : rows.start(first + h);
    };
    if (item >= n_pairs) {
        u32 at = s.n_dims + item - n_pairs;
#pragma unroll 4
        for (u32 h = 0; h < n; h++) y[(u64)(first + h) * s.head_dim + at] = x[start_of(h) + at];
        return;
    }
    u32 pair = item * G;
    i32 position = positions[row];
    Pairs<INTERLEAVED, G, T> heads[AT_ONCE];
    auto load = [&](u32 begin) {
#pragma unroll
        for (u32 h = 0; h < AT_ONCE; h++) {
            if (begin + h < n) heads[h].load(x + start_of(begin + h), pair, half);
        }
    };
    load(0);
    float sine[G], cosine[G];
#pragma unroll
    for (int i = 0; i < G; i++) {
        turn_of(position, inv_freq[pair + i], s.magnitude, sine[i], cosine[i]);
        sine[i] *= s.direction;
    }
#pragma unroll 1
    for (u32 begin = 0; begin < n; begin += AT_ONCE) {
        if (begin > 0) load(begin);
#pragma unroll
        for (u32 h = 0; h < AT_ONCE; h++) {
            if (begin + h >= n) continue;
            if (position >= 0) {
#pragma unroll
                for (int i = 0; i < G; i++) turn_pair(heads[h].u[i], heads[h].v[i], sine[i], cosine[i]);
            }
            heads[h].store(y + (u64)(first + begin + h) * s.head_dim, pair, half);
        }
    }
}

template <bool INTERLEAVED, typename T>
inline void rope(T* y, const T* x, const i32* positions, const float* inv_freq, const Rows& rows, const Heads& s) {
    start();
    if ((s.wide & WIDE) != 0) turn_heads<INTERLEAVED, 4>(y, x, positions, inv_freq, rows, s);
    else turn_heads<INTERLEAVED, 1>(y, x, positions, inv_freq, rows, s);
}

#define ROPE(name, T)                                                                                                \
    extern "C" __global__ __launch_bounds__(128) void move_rope_neox_##name(                                        \
        T* y, const T* x, const i32* positions, const float* inv_freq, Rows rows, Heads s) {                        \
        rope<false>(y, x, positions, inv_freq, rows, s);                                                             \
    }                                                                                                                \
    extern "C" __global__ __launch_bounds__(128) void move_rope_interleaved_##name(                                 \
        T* y, const T* x, const i32* positions, const float* inv_freq, Rows rows, Heads s) {                        \
        rope<true>(y, x, positions, inv_freq, rows, s);                                                              \
    }

// Columns per block where rows are divided.
enum : u32 { CHUNK = 2048 };

// unit any
// One warp per row.
extern "C" __global__ __launch_bounds__(256) void move_gather(u8* y, const u8* table, const i32* ids, u32 n_rows, u32 d,
                                                             u32 wide, u32 type, u32 table_type, u32 n_ids) {
    wait_for_previous();
    let_next_start();
    u32 row = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= n_ids) return;
    i32 id = ids[row];
    bool there = id >= 0 && (u32)id < n_rows;
    u64 from = there ? (u64)id * d : 0, to = (u64)row * d;
    if (there && wide && type == table_type) {
        const u32 AT_ONCE = 4, size = is_short(type) ? 2 : 4, n = d * size / 16;
        const uint4* x = (const uint4*)(table + from * size);
        uint4* out = (uint4*)(y + to * size);
        for (u32 first = lane; first < n; first += 32 * AT_ONCE) {
            uint4 v[AT_ONCE];
#pragma unroll
            for (u32 j = 0; j < AT_ONCE; j++) {
                if (first + 32 * j < n) v[j] = x[first + 32 * j];
            }
#pragma unroll
            for (u32 j = 0; j < AT_ONCE; j++) {
                if (first + 32 * j < n) out[first + 32 * j] = v[j];
            }
        }
        return;
    }
#pragma unroll 4
    for (u32 at = 8 * lane; at < d; at += 8 * 32) {
        float v[8];
        if (there) {
            load_values(table, table_type, from + at, d - at, wide, v);
        } else {
#pragma unroll
            for (int i = 0; i < 8; i++) v[i] = id < 0 ? 0.0f : nan_f32();
        }
        store_any(y, type, to + at, v, d - at, wide);
    }
}

extern "C" __global__ __launch_bounds__(256) void move_pick(u8* y, const u8* x, const i32* ids, Rows rows, u32 n_rows,
                                                           u32 n_cols, u32 type) {
    start();
    u32 row = blockIdx.x * 256 + threadIdx.x;
    if (row >= n_rows) return;
    i32 id = ids[row];
    float v = id < 0 ? 0.0f : nan_f32();
    if (id >= 0 && (u32)id < n_cols) v = value_of(load_bits(x, type, rows.start(row) + id), type);
    store_any(y, type, row, &v, 1, false);
}

extern "C" __global__ __launch_bounds__(256) void move_place(u8* y, const i32* ids, const u8* x, u32 width, u32 wide,
                                                            u32 type) {
    start();
    u32 n_chunks = (width + CHUNK - 1) / CHUNK, row = blockIdx.x / n_chunks;
    u32 at = blockIdx.x % n_chunks * CHUNK + 8 * threadIdx.x;
    if (at >= width) return;
    i32 id = ids[row];
    float value = value_of(load_bits(x, type, row), type), v[8];
#pragma unroll
    for (u32 i = 0; i < 8; i++) v[i] = id >= 0 && (u32)id == at + i ? value : 0.0f;
    store_any(y, type, (u64)row * width + at, v, width - at, wide);
}

struct Padding {
    u32 length, before, total, stride, wide, type;
};

extern "C" __global__ __launch_bounds__(256) void move_pad(u8* y, const u8* x, Padding s) {
    start();
    u32 n_chunks = (s.total + CHUNK - 1) / CHUNK, row = blockIdx.x / n_chunks;
    u32 at = blockIdx.x % n_chunks * CHUNK + 8 * threadIdx.x;
    if (at >= s.total) return;
    u64 from = (u64)row * s.stride, to = (u64)row * s.total + at;
    Eight<u32> e = {{0, 0, 0, 0, 0, 0, 0, 0}};
    if (s.wide) {
        if (at >= s.before && at < s.before + s.length) e = load_any(x, s.type, from + at - s.before, 8, true);
        store_bits8(y, s.type, to, e, 8, true);
        return;
    }
#pragma unroll
    for (u32 i = 0; i < 8; i++) {
        if (at + i < s.before || at + i >= s.before + s.length) continue;
        u32 bits = load_bits(x, s.type, from + at + i - s.before);
        if (is_short(s.type)) e.w[i / 2] |= bits << (16 * (i % 2));
        else e.w[i] = bits;
    }
    store_bits8(y, s.type, to, e, s.total - at, false);
}
// unit f32
ROPE(f32, float)
// unit f16
ROPE(f16, F16)
// unit bf16
ROPE(bf16, BF16)
