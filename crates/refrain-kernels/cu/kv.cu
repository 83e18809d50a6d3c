// kv.cu: appends new keys or values to the paged cache
//
//   cache      [n_blocks, n_kv_heads, kv_block, head_dim]  T
//   x          [n, n_kv_heads, head_dim]                   f32, rows (heads) of consecutive elements
//   positions  [n]                                         i32; negative: nothing is written
//   seqs       [n]                                         i32
//   tables     [n_seqs, max_blocks]                        i32
//
// Launch       grid (n, n_kv_heads), block (multiple of 32, at most 256), shared 0
// Requires     no two rows have the same (sequence, position). A sequence, position or block out of range
//              writes nothing
// Aliasing     none
// Determinism  rounds to nearest even
// Capture      safe: positions, sequences and tables are read at each run
#include "paged.cuh"
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

#define KV_APPEND(name, T)                                                                                 \
    extern "C" __global__ __launch_bounds__(256) void kv_append_##name(                                    \
        T* cache, const float* x, const i32* positions, const i32* seqs, const i32* tables, Rows rows, Pages pages) { \
        kv_append<T>(cache, x, positions, seqs, tables, rows, pages);                                      \
    }

KV_APPEND(f16, F16)
KV_APPEND(bf16, BF16)
KV_APPEND(f32, float)
