// kv.cu: appends new keys or values to the paged cache
//
//   cache      [n_blocks, n_kv_heads, kv_block, head_dim]  T
//   x          [n, n_kv_heads, head_dim]                   f32, rows (heads) of consecutive elements
//   positions  [n]                                         i32; negative: nothing is written
//   seqs       [n]                                         i32
//   tables     [n_seqs, max_blocks]                        i32
//   scales     [n_blocks, n_kv_heads, kv_block]            f32, for bytes
//
// kv_append_bytes stores a head's row as signed bytes times one scale: the largest magnitude maps to 127. A row with
// an element that is not finite gets a NaN scale; one below 1e-35 becomes zeros.
//
// Launch       grid (n, n_kv_heads), block (multiple of 32, at most 256), shared 0
// Requires     no two rows have the same (sequence, position). A sequence, position or block out of range
//              writes nothing
// Aliasing     none
// Determinism  rounds to nearest even
// Capture      safe: positions, sequences and tables are read at each run
#include "paged.cuh"
#include "reduce.cuh"
#include "view.cuh"

template <typename T>
inline void kv_append(T* cache, const float* x, const i32* positions, const i32* seqs, const i32* tables,
                      const Rows& rows, const Pages& pages) {
    start();
    u32 row = blockIdx.x, head = blockIdx.y;
    T* out = kv_cell(cache, tables, positions[row], seqs[row], head, pages);
    if (out == nullptr) return;
    const float* in = x + rows.start(row * pages.n_kv_heads + head);
    for (u32 i = threadIdx.x; i < pages.head_dim; i += blockDim.x) out[i] = from_f32<T>(in[i]);
}

struct Largest {
    inline u32 operator()(u32 a, u32 b) const { return max(a, b); }
};

extern "C" __global__ __launch_bounds__(256) void kv_append_bytes_f32(i8* cache, float* scales, const float* x,
                                                                     const i32* positions, const i32* seqs,
                                                                     const i32* tables, Rows rows, Pages pages) {
    start();
    u32 row = blockIdx.x, head = blockIdx.y;
    i8* out = kv_cell(cache, tables, positions[row], seqs[row], head, pages);
    if (out == nullptr) return;
    const float* in = x + rows.start(row * pages.n_kv_heads + head);
    // Magnitudes compare like their bits; NaN is the largest.
    u32 bits = 0;
    for (u32 i = threadIdx.x; i < pages.head_dim; i += blockDim.x) {
        bits = max(bits, __float_as_uint(in[i]) & 0x7fffffffu);
    }
    bits = block_reduce(bits, Largest(), 0u);
    float largest = __uint_as_float(bits);
    bool is_finite = bits < 0x7f800000u, is_none = largest < 1e-35f || !is_finite;
    float factor = is_none ? 0.0f : 127.0f / largest;
    for (u32 i = threadIdx.x; i < pages.head_dim; i += blockDim.x) {
        // Adding 1.5 * 2^23 rounds to an integer, ties to even; its low byte is in the low bits.
        u32 rounded = __float_as_uint(__fadd_rn(__fmul_rn(in[i], factor), 12582912.0f));
        out[i] = is_none ? (i8)0 : (i8)(u8)rounded;
    }
    if (threadIdx.x == 0) {
        float scale = !is_finite ? nan_f32() : is_none ? 0.0f : __fmul_rn(largest, 1.0f / 127.0f);
        scales[(u64)(out - cache) / pages.head_dim] = scale;
    }
}

#define KV_APPEND(name, T)                                                                                 \
    extern "C" __global__ __launch_bounds__(256) void kv_append_##name(                                    \
        T* cache, const float* x, const i32* positions, const i32* seqs, const i32* tables, Rows rows, Pages pages) { \
        kv_append<T>(cache, x, positions, seqs, tables, rows, pages);                                      \
    }

KV_APPEND(f16, F16)
KV_APPEND(bf16, BF16)
KV_APPEND(f32, float)
