// rope.cu: each pair (u, v) of a head turned by the angle position * inv_freq[i]
//
//   y, x       [n, n_heads, head_dim]  f32; x in rows (heads) of consecutive elements, y dense
//   positions  [n]                     i32; negative: the row comes out as it went in
//   inv_freq   [n_dims / 2]            f32
//
// Launch    grid (ceil(n n_heads (head_dim - n_dims / 2) / 128)), block (128), shared 0: one thread per pair that
//           turns, and one per element behind them
// Requires  n_dims even, at most head_dim
// Aliasing  y may be x when x is dense: a thread reads its pair before it writes it
// The angle is formed and reduced to one turn in f64, so that it is as good at position 100,000 as at 1; sine and cosine
// in f32. Same bits every run. Capture: safe; positions are read at each run.
#include "view.cuh"

template <bool INTERLEAVED>
inline void rope(float* y, const float* x, const i32* positions, const float* inv_freq, const Rows& rows, u32 n,
                 u32 n_heads, u32 head_dim, u32 n_dims, float magnitude) {
    start();
    u32 half = n_dims / 2, per_head = head_dim - half;
    u32 index = blockIdx.x * 128 + threadIdx.x;
    u32 head = index / per_head, i = index % per_head;
    if (head >= n * n_heads) return;
    const float* in = x + rows.start(head);
    float* out = y + (u64)head * head_dim;
    if (i >= half) {
        u32 at = n_dims + (i - half);
        out[at] = in[at];
        return;
    }
    u32 a = INTERLEAVED ? 2 * i : i, b = INTERLEAVED ? 2 * i + 1 : i + half;
    float u = in[a], v = in[b];
    i32 position = positions[head / n_heads];
    if (position >= 0) {
        double angle = (double)position * (double)inv_freq[i];
        const double turn = 6.283185307179586476925286766559;
        double rest = angle - turn * rint(angle / turn);
        float s, c;
        sincosf((float)rest, &s, &c);
        s *= magnitude;
        c *= magnitude;
        float turned = u * c - v * s;
        v = u * s + v * c;
        u = turned;
    }
    out[a] = u;
    out[b] = v;
}

#define ROPE(name, interleaved)                                                                            \
    extern "C" __global__ __launch_bounds__(128) void rope_##name##_f32(                                   \
        float* y, const float* x, const i32* positions, const float* inv_freq, Rows rows, u32 n, u32 n_heads, \
        u32 head_dim, u32 n_dims, float magnitude) {                                                       \
        rope<interleaved>(y, x, positions, inv_freq, rows, n, n_heads, head_dim, n_dims, magnitude);       \
    }

ROPE(neox, false)
ROPE(interleaved, true)
