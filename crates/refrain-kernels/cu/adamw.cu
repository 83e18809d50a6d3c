// adamw.cu: sum of squares, and one AdamW step, over many tensors per launch
//
// A table in the parameters lists the tensors: addresses, lengths, types, and the first block of each. A
// block works on CHUNK elements of one tensor.
//
//   parts        [n_blocks]  f32: one sum of squares per block; sum_squares_finish adds them into sum [1] f32
//   count        [1]         i32: steps applied so far
//   params       [10]        f32, in the order of AdamParam
//   sum_squares  [1]         f32; if not finite, nothing is applied
//   grad, weight, master, m, v  per tensor; types by their codes (eight.cuh), master f32 or null
//
// With g = grad * min(1, max_norm / (norm + 1e-6)) and t = count + 1:
//   m = beta1 m + (1 - beta1) g, v = beta2 v + (1 - beta2) g^2
//   w = w (1 - lr decay) - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
// w is the master weight if there is one; the weight is then its rounded copy. With `clears`, gradients
// become zero whether the step is applied or not.
//
// adamw_step_masters is adamw_step for BF16 weights with masters, f32 moments and gradients of the type in
// its name, all 16-byte aligned, with a multiple of four elements. Both give the same bits.
//
// Launch       sum_squares, step: grid (blocks of the table), block (256); finish: grid (1), block (1024);
//              count: grid (1), block (32); shared 0
// Requires     count runs after every step kernel of the same update: these read it
// Aliasing     none
// Accumulation computed in f32; each state is rounded once
// Determinism  same bits every run: additions are in a fixed order
// Capture      safe: count, params and sum_squares are read at each run
#include "eight.cuh"
#include "overlap.cuh"
#include "reduce.cuh"

const u32 CHUNK = 8192;

struct SquaresEntry {
    const u8* x;
    u64 n;
    u32 first_block, type;
};

struct SquaresTable {
    SquaresEntry entries[128];
};

struct AdamEntry {
    u8* grad;
    u8* weight;
    float* master;
    u8* m;
    u8* v;
    u64 n;
    // flags: types of gradient, weight and both moments in four bits each, then one bit for weight decay.
    u32 first_block, flags;
};

struct AdamTable {
    AdamEntry entries[64];
};

// Returns the entry that a block belongs to: the last whose first block is not after it.
template <typename Table> inline u32 entry_of(const Table& table, u32 n_entries, u32 block) {
    u32 low = 0, high = n_entries;
    while (high - low > 1) {
        u32 middle = (low + high) / 2;
        if (table.entries[middle].first_block <= block) low = middle;
        else high = middle;
    }
    return low;
}

// Computes this block's elements, `begin` to `end`.
inline void share(u64 n, u32 first_block, u64& begin, u64& end) {
    begin = (u64)(blockIdx.x - first_block) * CHUNK;
    end = begin + CHUNK < n ? begin + CHUNK : n;
}

inline u32 left(u64 end, u64 at) { return end - at < 8 ? (u32)(end - at) : 8; }

inline bool is_wide(const void* p) { return (u64)p % 16 == 0; }

extern "C" __global__ __launch_bounds__(256) void adamw_sum_squares(float* parts, SquaresTable table, u32 n_entries) {
    start();
    u32 entry = entry_of(table, n_entries, blockIdx.x);
    const u8* x = table.entries[entry].x;
    u32 type = table.entries[entry].type;
    bool wide = is_wide(x);
    u64 begin, end;
    share(table.entries[entry].n, table.entries[entry].first_block, begin, end);
    float sum = 0.0f;
#pragma unroll 4
    for (u64 at = begin + 8 * threadIdx.x; at < end; at += 8 * 256) {
        float v[8];
        load_values(x, type, at, left(end, at), wide, v);
#pragma unroll
        for (int i = 0; i < 8; i++) sum = __fmaf_rn(v[i], v[i], sum);
    }
    sum = block_reduce(sum, Add(), 0.0f);
    if (threadIdx.x == 0) parts[blockIdx.x] = sum;
}

extern "C" __global__ __launch_bounds__(1024) void adamw_sum_squares_finish(float* sum, const float* parts, u32 n) {
    start();
    float total = 0.0f;
    for (u32 i = threadIdx.x; i < n; i += 1024) total += parts[i];
    total = block_reduce(total, Add(), 0.0f);
    if (threadIdx.x == 0) sum[0] = total;
}

inline bool is_finite(float x) { return (__float_as_uint(x) & 0x7f800000u) != 0x7f800000u; }

// Factors shared by all elements.
struct Step {
    float clip, beta1, one_minus_beta1, beta2, one_minus_beta2, eps, rate, root, kept;
};

inline Step step_of(i32 count, const float* params, float sum_squares) {
    // Saturates: count stays at the largest i32.
    float t = (float)(count < 0x7fffffff ? count + 1 : count);
    float lr = params[0], max_norm = params[9], clip = 1.0f;
    if (max_norm != 0.0f) clip = fminf(max_norm / (sqrtf(sum_squares) + 1e-6f), 1.0f);
    return Step{clip,      params[1],
                params[2], params[4],
                params[5], params[7],
                lr / -expm1f(t * params[3]), sqrtf(-expm1f(t * params[6])),
                1.0f - lr * params[8]};
}

// Updates one element; `kept` is the factor that weight decay applies.
inline void apply(const Step& s, float kept, float grad, float& m, float& v, float& w) {
    float clipped = grad * s.clip;
    m = s.beta1 * m + s.one_minus_beta1 * clipped;
    v = s.beta2 * v + s.one_minus_beta2 * (clipped * clipped);
    w = w * kept - s.rate * (m / (sqrtf(v) / s.root + s.eps));
}

// Four elements, starting at a multiple of four.
template <typename T> struct Four {
    u32 w[sizeof(T)];

    inline void load(const T* p) {
        if (sizeof(T) == 2) {
            uint2 v = *(const uint2*)p;
            w[0] = v.x;
            w[1] = v.y;
        } else {
            uint4 v = *(const uint4*)p;
            w[0] = v.x;
            w[1] = v.y;
            w[2 % sizeof(T)] = v.z;
            w[3 % sizeof(T)] = v.w;
        }
    }

    inline float operator[](int i) const {
        return of_bits(T(), sizeof(T) == 2 ? w[i / 2] >> (16 * (i % 2)) & 0xffffu : w[i % sizeof(T)]);
    }
};

template <typename T> inline void store4(T* p, const float* v) {
    if (sizeof(T) == 2) *(uint2*)p = make_uint2(word_of<T>(v[0], v[1]), word_of<T>(v[2], v[3]));
    else *(uint4*)p = make_uint4(bits_of(v[0]), bits_of(v[1]), bits_of(v[2]), bits_of(v[3]));
}

// Step for tensors with a master, f32 moments and a multiple of four elements, all 16-byte aligned.
template <typename G, typename W>
inline void step_masters(const i32* count, const float* params, const float* sum_squares, const AdamTable& table,
                         u32 n_entries, u32 clears) {
    const u32 AT_ONCE = 2, STRIDE = 4 * 256;
    start();
    __shared__ Step shared;
    u32 entry = entry_of(table, n_entries, blockIdx.x);
    G* grad = (G*)table.entries[entry].grad;
    W* weight = (W*)table.entries[entry].weight;
    float* master = table.entries[entry].master;
    float* first = (float*)table.entries[entry].m;
    float* second = (float*)table.entries[entry].v;
    u64 begin, end;
    share(table.entries[entry].n, table.entries[entry].first_block, begin, end);
    Four<G> g[AT_ONCE];
    Four<float> m[AT_ONCE], v[AT_ONCE], w[AT_ONCE];
    auto load = [&](u64 from) {
#pragma unroll
        for (u32 j = 0; j < AT_ONCE; j++) {
            u64 at = from + j * STRIDE;
            if (at >= end) continue;
            g[j].load(grad + at);
            m[j].load(first + at);
            v[j].load(second + at);
            w[j].load(master + at);
        }
    };
    // The first elements are in flight while the step's factors are computed.
    u64 from = begin + 4 * threadIdx.x;
    load(from);
    bool applies = is_finite(sum_squares[0]);
    if (threadIdx.x == 0 && applies) shared = step_of(count[0], params, sum_squares[0]);
    __syncthreads();
    const Step s = shared;
    float kept = (table.entries[entry].flags >> 16 & 1u) != 0 ? s.kept : 1.0f;
#pragma unroll 1
    while (from < end) {
#pragma unroll
        for (u32 j = 0; j < AT_ONCE; j++) {
            u64 at = from + j * STRIDE;
            if (at >= end) continue;
            if (applies) {
                float ms[4], vs[4], ws[4];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    ms[i] = m[j][i];
                    vs[i] = v[j][i];
                    ws[i] = w[j][i];
                    apply(s, kept, g[j][i], ms[i], vs[i], ws[i]);
                }
                store4(first + at, ms);
                store4(second + at, vs);
                store4(master + at, ws);
                store4(weight + at, ws);
            }
            float zeros[4] = {0, 0, 0, 0};
            if (clears) store4(grad + at, zeros);
        }
        from += AT_ONCE * STRIDE;
        load(from);
    }
}

#define STEP_MASTERS(name, G)                                                                                        \
    extern "C" __global__ __launch_bounds__(256, 3) void adamw_step_masters_##name(                                  \
        const i32* count, const float* params, const float* sum_squares, AdamTable table, u32 n_entries, u32 clears) { \
        step_masters<G, BF16>(count, params, sum_squares, table, n_entries, clears);                                 \
    }

STEP_MASTERS(bf16, BF16)
STEP_MASTERS(f32, float)

extern "C" __global__ __launch_bounds__(256) void adamw_step(const i32* count, const float* params,
                                                            const float* sum_squares, AdamTable table, u32 n_entries,
                                                            u32 clears) {
    start();
    __shared__ Step shared;
    bool applies = is_finite(sum_squares[0]);
    if (threadIdx.x == 0 && applies) shared = step_of(count[0], params, sum_squares[0]);
    __syncthreads();
    u32 entry = entry_of(table, n_entries, blockIdx.x);
    u8* grad = table.entries[entry].grad;
    u8* weight = table.entries[entry].weight;
    float* master = table.entries[entry].master;
    u8* first = table.entries[entry].m;
    u8* second = table.entries[entry].v;
    u32 flags = table.entries[entry].flags;
    u32 grad_type = flags & 15u, weight_type = flags >> 4 & 15u, m_type = flags >> 8 & 15u, v_type = flags >> 12 & 15u;
    bool wide = is_wide(grad) && is_wide(weight) && is_wide(master) && is_wide(first) && is_wide(second);
    u64 begin, end;
    share(table.entries[entry].n, table.entries[entry].first_block, begin, end);
    const Step s = shared;
    float kept = (flags >> 16 & 1u) != 0 ? s.kept : 1.0f;
    for (u64 at = begin + 8 * threadIdx.x; at < end; at += 8 * 256) {
        u32 n = left(end, at);
        if (applies) {
            // All loads are issued before the first is used.
            Eight<u32> g_bits = load_any(grad, grad_type, at, n, wide), m_bits = load_any(first, m_type, at, n, wide);
            Eight<u32> v_bits = load_any(second, v_type, at, n, wide);
            u32 w_type = master != nullptr ? TYPE_F32 : weight_type;
            Eight<u32> w_bits = load_any(master != nullptr ? (const u8*)master : weight, w_type, at, n, wide);
            float g[8], m[8], v[8], w[8];
            values_of(g_bits, grad_type, g);
            values_of(m_bits, m_type, m);
            values_of(v_bits, v_type, v);
            values_of(w_bits, w_type, w);
#pragma unroll
            for (int i = 0; i < 8; i++) apply(s, kept, g[i], m[i], v[i], w[i]);
            store_any(first, m_type, at, m, n, wide);
            store_any(second, v_type, at, v, n, wide);
            if (master != nullptr) store8(master + at, w, n, wide);
            store_any(weight, weight_type, at, w, n, wide);
        }
        if (clears) {
            float zeros[8] = {0, 0, 0, 0, 0, 0, 0, 0};
            store_any(grad, grad_type, at, zeros, n, wide);
        }
    }
}

extern "C" __global__ __launch_bounds__(32) void adamw_count(i32* count, const float* sum_squares) {
    start();
    if (threadIdx.x == 0 && is_finite(sum_squares[0]) && count[0] < 0x7fffffff) count[0]++;
}
