// rope.cu: RoPE: rotates each pair (u, v) of a head by the angle position * inv_freq[i]; alone, or with the
// KV append
//
//   y, x       [n, n_heads, head_dim]  f32; x in rows (heads) of consecutive elements, y dense
//   positions  [n]                     i32; negative: the row is copied unchanged
//   inv_freq   [n_dims / 2]            f32
//
// rope_kv rotates the queries into q_out and the keys into k_out, and appends the rotated keys and the values
// to the cache:
//
//   q_out, q                    [n, n_heads, head_dim]                      f32
//   k_out, k, v                 [n, n_kv_heads, head_dim]                   f32
//   k_cache, v_cache            [n_blocks, n_kv_heads, kv_block, head_dim]  T
//   positions, seqs             [n]                                         i32; negative: nothing is appended
//   tables                      [n_seqs, max_blocks]                        i32
//
// Launch       rope: grid (ceil(n n_heads P / 128)), block (128), shared 0, with P = head_dim - n_dims / 2:
//              one thread per rotated pair and one per element after the pairs. rope_kv: grid (ceil(n
//              ((n_heads + n_kv_heads) P + n_kv_heads head_dim) / 128)), block (128), shared 0
// Requires     n_dims even, at most head_dim. rope_kv: no two rows have the same (sequence, position)
// Aliasing     y may be x, q_out q and k_out k if those are dense: a thread reads its pair before it writes
//              it
// Determinism  same bits every run; angles follow turn.cuh. rope_kv gives the same bits as rope and kv_append
// Capture      safe: positions, sequences and tables are read at each run
#include "paged.cuh"
#include "turn.cuh"
#include "view.cuh"

// Work of a thread on a head: rotates a pair, or copies an element after the pairs.
struct Turn {
    u32 n_dims;
    float magnitude;

    inline void turn(float& u, float& v, i32 position, float inv_freq) const {
        if (position < 0) return;
        float sine, cosine;
        turn_of(position, inv_freq, magnitude, sine, cosine);
        turn_pair(u, v, sine, cosine);
    }

    // Calls store(element, value) for the elements of thread i of a head.
    template <bool INTERLEAVED, typename F>
    inline void each(const float* in, u32 i, i32 position, const float* inv_freq, F store) const {
        u32 half = n_dims / 2;
        if (i >= half) {
            store(i + half, in[i + half]);
            return;
        }
        u32 a = INTERLEAVED ? 2 * i : i, b = INTERLEAVED ? 2 * i + 1 : i + half;
        float u = in[a], v = in[b];
        turn(u, v, position, inv_freq[i]);
        store(a, u);
        store(b, v);
    }
};

template <bool INTERLEAVED>
inline void rope(float* y, const float* x, const i32* positions, const float* inv_freq, const Rows& rows, u32 n,
                 u32 n_heads, u32 head_dim, const Turn& turn) {
    start();
    u32 per_head = head_dim - turn.n_dims / 2;
    u32 index = blockIdx.x * 128 + threadIdx.x;
    u32 head = index / per_head, i = index % per_head;
    if (head >= n * n_heads) return;
    float* out = y + (u64)head * head_dim;
    turn.each<INTERLEAVED>(x + rows.start(head), i, positions[head / n_heads], inv_freq,
                           [&](u32 at, float value) { out[at] = value; });
}

struct RopeKv {
    u32 n, n_heads;
    Turn turn;
    Pages pages;
};

template <typename T, bool INTERLEAVED>
inline void rope_kv(float* q_out, float* k_out, T* k_cache, T* v_cache, const float* q, const float* k, const float* v,
                    const i32* positions, const i32* seqs, const i32* tables, const float* inv_freq, const Rows& q_rows,
                    const Rows& k_rows, const Rows& v_rows, const RopeKv& s) {
    start();
    u32 head_dim = s.pages.head_dim, n_kv_heads = s.pages.n_kv_heads, per_head = head_dim - s.turn.n_dims / 2;
    u32 n_q = s.n * s.n_heads * per_head, n_k = s.n * n_kv_heads * per_head, n_v = s.n * n_kv_heads * head_dim;
    u32 index = blockIdx.x * 128 + threadIdx.x;
    if (index < n_q) {
        u32 head = index / per_head;
        float* out = q_out + (u64)head * head_dim;
        s.turn.each<INTERLEAVED>(q + q_rows.start(head), index % per_head, positions[head / s.n_heads], inv_freq,
                                 [&](u32 at, float value) { out[at] = value; });
    } else if (index < n_q + n_k) {
        u32 head = (index - n_q) / per_head, row = head / n_kv_heads;
        float* out = k_out + (u64)head * head_dim;
        T* cell = kv_cell(k_cache, tables, positions[row], seqs[row], head % n_kv_heads, s.pages);
        s.turn.each<INTERLEAVED>(k + k_rows.start(head), (index - n_q) % per_head, positions[row], inv_freq,
                                 [&](u32 at, float value) {
                                     out[at] = value;
                                     if (cell != nullptr) cell[at] = from_f32<T>(value);
                                 });
    } else if (index < n_q + n_k + n_v) {
        u32 head = (index - n_q - n_k) / head_dim, at = (index - n_q - n_k) % head_dim, row = head / n_kv_heads;
        T* cell = kv_cell(v_cache, tables, positions[row], seqs[row], head % n_kv_heads, s.pages);
        if (cell != nullptr) cell[at] = from_f32<T>(v[v_rows.start(head) + at]);
    }
}

#define ROPE(name, interleaved)                                                                            \
    extern "C" __global__ __launch_bounds__(128) void rope_##name##_f32(                                   \
        float* y, const float* x, const i32* positions, const float* inv_freq, Rows rows, u32 n, u32 n_heads, \
        u32 head_dim, u32 n_dims, float magnitude) {                                                       \
        rope<interleaved>(y, x, positions, inv_freq, rows, n, n_heads, head_dim, Turn{n_dims, magnitude}); \
    }                                                                                                      \
    ROPE_KV(name, interleaved, f16, F16)                                                                   \
    ROPE_KV(name, interleaved, bf16, BF16)                                                                 \
    ROPE_KV(name, interleaved, f32, float)
#define ROPE_KV(name, interleaved, dtype, T)                                                               \
    extern "C" __global__ __launch_bounds__(128) void rope_kv_##name##_##dtype(                            \
        float* q_out, float* k_out, T* k_cache, T* v_cache, const float* q, const float* k, const float* v, \
        const i32* positions, const i32* seqs, const i32* tables, const float* inv_freq, Rows q_rows, Rows k_rows, \
        Rows v_rows, RopeKv s) {                                                                           \
        rope_kv<T, interleaved>(q_out, k_out, k_cache, v_cache, q, k, v, positions, seqs, tables, inv_freq, q_rows, \
                                k_rows, v_rows, s);                                                        \
    }

ROPE(neox, false)
ROPE(interleaved, true)
