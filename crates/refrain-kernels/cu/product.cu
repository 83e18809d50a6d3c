// product.cu: one row of activations times up to three weights, with what comes before and after in the same launch
//
//   y0 .. y2   [n]          f32; null behind the last. With a gate: y0 alone, act(x w0^T) * (x w1^T)
//   sum        [k]          f32: a + b, or null
//   a          [k]          f32
//   b          [k]          f32, or null: x is made of a alone
//   inner      [k]          f32, or null: b is replaced by its RMS norm with these weights
//   norm       [k]          f32, or null: x is the RMS norm of a (+ b) with these weights, else a (+ b) itself
//   w0 .. w2   [n, k]       BF16 or F16 as in the file, or quantised and packed (packed.cuh)
//   bias0 .. bias2  [n]     f32, added to the products; or null
//   p          sizes; see Params
//
// Every block makes x for itself, from a row that is in the L2 cache, and keeps it in shared memory: as f32 for plain
// weights, rounded to blocks of 32 signed bytes with a scale (the largest magnitude becomes 127, ties to even) for
// quantised ones. Weights come in units by bulk copies into a ring of each warp, the first ones before the kernel waits
// for x.
//
// Launch    grid (at most one block for each multiprocessor), block (512), shared for the rings and x (src/product.rs)
// Requires  k a multiple of 8 (plain), 32 or 256 (packed); all pointers at multiples of 16 bytes; weights are not
//           written by any launch
// Aliasing  none: every block reads a and b while the first writes sum, and y is written while others read
// A tile's columns are dealt to `split` warps unit by unit; their sums are added in that order. Integer products are exact
// within a sub-block of 32; sums over sub-blocks in f32. The order depends on k and split alone: same bits every run.
// Capture: safe.
#include "overlap.cuh"
#include "packed.cuh"
#include "reduce.cuh"

const u32 WARPS = 16;
const u32 THREADS = 32 * WARPS;

struct Params {
    u32 k;
    u32 n[3];      // columns of each y
    u32 split;     // warps that share a tile: 1, 2, 4, 8 or 16
    u32 stages;    // units in a warp's ring
    u32 second;    // bit i: weight i is of the second type
    u32 gate;      // 0: none, 1: SiLU, 2: GELU (tanh)
    float eps;
};

// Asynchronous copies into a warp's ring, in order. Before compute capability 9.0 lanes copy 16 bytes each.
#if !defined(REFRAIN_ON_HOST) && __CUDA_ARCH__ >= 900
struct Ring {
    u32 data, barriers;

    inline static u32 address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
    inline void init(u8* ring, u64* bars, u32 stages) {
        data = address(ring);
        barriers = address(bars);
        if (threadIdx.x % 32 == 0) {
            for (u32 i = 0; i < stages; i++) {
                asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barriers + 8 * i) : "memory");
            }
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        }
        __syncwarp();
    }
    // Copies `n` pieces of `bytes`, `stride` apart, to places `pitch` apart. Lane i has piece i.
    inline void issue(u32 slot, u32 offset, const u8* from, u32 n, u32 bytes, u64 stride, u32 pitch) {
        u32 lane = threadIdx.x % 32, bar = barriers + 8 * slot;
        if (lane == 0) {
            asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(n * bytes) : "memory");
        }
        if (n > 1) __syncwarp();
        if (lane < n) {
            asm volatile(
                "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                    data + offset + lane * pitch),
                "l"(from + lane * stride), "r"(bytes), "r"(bar)
                : "memory");
        }
    }
    inline void nothing() {}
    // The unit of a slot, used for the `turn`-th time.
    inline void wait(u32 slot, u32 turn, u32) {
        asm volatile(
            "{ .reg .pred p; \n"
            "again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; \n"
            "@p bra done; \n"
            "bra again; \n"
            "done: }" ::"r"(barriers + 8 * slot),
            "r"(turn & 1)
            : "memory");
    }
};
#elif !defined(REFRAIN_ON_HOST)
struct Ring {
    u32 data;

    inline void init(u8* ring, u64*, u32) { data = (u32)__cvta_generic_to_shared(ring); }
    inline void issue(u32, u32 offset, const u8* from, u32 n, u32 bytes, u64 stride, u32 pitch) {
        for (u32 piece = 0; piece < n; piece++) {
            for (u32 i = 16 * (threadIdx.x % 32); i < bytes; i += 512) {
                asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(data + offset + piece * pitch + i),
                             "l"(from + piece * stride + i)
                             : "memory");
            }
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    }
    inline void nothing() { asm volatile("cp.async.commit_group;" ::: "memory"); }
    // Groups end in order: when `ahead` later ones may still be under way, this one is there.
    inline void wait(u32, u32, u32 stages) {
        switch (stages) {
            case 1: asm volatile("cp.async.wait_group 0;" ::: "memory"); break;
            case 2: asm volatile("cp.async.wait_group 1;" ::: "memory"); break;
            case 3: asm volatile("cp.async.wait_group 2;" ::: "memory"); break;
            default: asm volatile("cp.async.wait_group 3;" ::: "memory"); break;
        }
        __syncwarp();
    }
};
#endif

// Activations in shared memory.
struct X {
    // Plain: elements 0 .. 3 of every eight in one plane, 4 .. 7 in the other, so that a warp's reads share no bank.
    float* plane[2];
    // Quantised: bytes, and of each 32 the scale and the scaled sum.
    u8* q;
    float2* scale;
};

// Sum of the partial sums of all warps.
inline float total(const float* partial) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < WARPS; i++) sum += partial[i];
    return sum;
}

// What a thread handles at a time.
struct Eight {
    float v[8];

    inline Eight() {}
    inline Eight(const float* p, u32 at, u32 k) {
        const float4 zero = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        float4 a = at < k ? *(const float4*)(p + at) : zero, b = at < k ? *(const float4*)(p + at + 4) : zero;
        v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
    }
    inline void store(float* p) const {
        *(float4*)p = make_float4(v[0], v[1], v[2], v[3]);
        *(float4*)(p + 4) = make_float4(v[4], v[5], v[6], v[7]);
    }
    inline float squares() const {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; i++) sum = __fmaf_rn(v[i], v[i], sum);
        return sum;
    }
};

// Four lanes have the 32 elements of a block; all lanes of a warp call this together.
inline void keep_quantised(const X& x, u32 at, u32 padded, const Eight& e) {
    // Magnitudes compare as their bits do, and a NaN is the largest of all.
    u32 most = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) most = max(most, __float_as_uint(e.v[i]) & 0x7fffffffu);
    most = max(most, __shfl_xor_sync(0xffffffffu, most, 1));
    most = max(most, __shfl_xor_sync(0xffffffffu, most, 2));
    float largest = __uint_as_float(most);
    bool none = largest < 1e-35f;
    float inverse = none ? 0.0f : __fdividef(127.0f, largest), d = none ? 0.0f : largest * (1.0f / 127.0f);
    // Added to 1.5 * 2^23 a number is rounded to an integer, ties to even, whose low byte is in the low bits.
    u32 bits[8];
#pragma unroll
    for (int i = 0; i < 8; i++) bits[i] = __float_as_uint(__fmaf_rn(e.v[i], inverse, 12582912.0f));
    u32 low = __byte_perm(__byte_perm(bits[0], bits[1], 0x0040), __byte_perm(bits[2], bits[3], 0x0040), 0x5410);
    u32 high = __byte_perm(__byte_perm(bits[4], bits[5], 0x0040), __byte_perm(bits[6], bits[7], 0x0040), 0x5410);
    i32 sum = __dp4a((i32)low, 0x01010101, __dp4a((i32)high, 0x01010101, 0));
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    if (at >= padded) return;
    *(uint2*)(x.q + at) = make_uint2(low, high);
    if (at % 32 == 0) x.scale[at / 32] = make_float2(d, d * (float)sum);
}

inline void keep_plain(const X& x, u32 at, u32 padded, const Eight& e) {
    if (at >= padded) return;
    *(float4*)(x.plane[0] + at / 2) = make_float4(e.v[0], e.v[1], e.v[2], e.v[3]);
    *(float4*)(x.plane[1] + at / 2) = make_float4(e.v[4], e.v[5], e.v[6], e.v[7]);
}

template <bool QUANTISED> inline void keep(const X& x, u32 at, u32 padded, const Eight& e) {
    if (QUANTISED) {
        keep_quantised(x, at, padded, e);
    } else {
        keep_plain(x, at, padded, e);
    }
}

// x is a as it is. Two loads are under way at once: each takes as long as all else.
template <bool QUANTISED> inline void copy_x(const X& x, u32 k, u32 padded, const float* a) {
    u32 lane = threadIdx.x % 32;
    // Whole warps stay together.
    for (u32 start = 8 * (threadIdx.x - lane); start < padded; start += 16 * THREADS) {
        u32 at = start + 8 * lane;
        Eight first(a, at, k), second(a, at + 8 * THREADS, k);
        keep<QUANTISED>(x, at, padded, first);
        if (start + 8 * THREADS < padded) keep<QUANTISED>(x, at + 8 * THREADS, padded, second);
    }
}

// x is a (+ b), with a norm. `partial` gets each warp's sum of squares, to be read after the caller's barrier. `early` is
// what this thread needs first of the norm's weights.
template <bool QUANTISED>
inline void make_x(const X& x, u32 k, u32 padded, const float* a, const float* b, const float* inner, const float* norm,
                   float* sum, float eps, float* partial, const Eight& early) {
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float scale_b = 1.0f;
    if (inner != nullptr) {
        float squares = 0.0f;
        for (u32 at = 8 * threadIdx.x; at < k; at += 8 * THREADS) squares += Eight(b, at, k).squares();
        squares = warp_reduce(squares, Add());
        if (lane == 0) partial[warp] = squares;
        __syncthreads();
        scale_b = rsqrtf(total(partial) / (float)k + eps);
        __syncthreads();
    }
    float squares = 0.0f;
    for (u32 start = 8 * (threadIdx.x - lane); start < padded; start += 8 * THREADS) {
        u32 at = start + 8 * lane;
        Eight v(a, at, k);
        if (b != nullptr) {
            Eight u(b, at, k);
            if (inner != nullptr) {
                Eight w(inner, at, k);
#pragma unroll
                for (int i = 0; i < 8; i++) u.v[i] = u.v[i] * scale_b * w.v[i];
            }
#pragma unroll
            for (int i = 0; i < 8; i++) v.v[i] += u.v[i];
            if (sum != nullptr && blockIdx.x == 0 && at < k) v.store(sum + at);
        }
        squares += v.squares();
        if (norm != nullptr) {
            Eight w = start < 8 * THREADS ? early : Eight(norm, at, k);
#pragma unroll
            for (int i = 0; i < 8; i++) v.v[i] *= w.v[i];
        }
        keep<QUANTISED>(x, at, padded, v);
    }
    squares = warp_reduce(squares, Add());
    if (lane == 0) partial[warp] = squares;
}

inline i32 dot4(u32 q, u32 x, i32 sum, bool is_signed) {
    if (is_signed) {
        asm("dp4a.s32.s32 %0, %1, %2, %0;" : "+r"(sum) : "r"(q), "r"(x));
    } else {
        asm("dp4a.u32.s32 %0, %1, %2, %0;" : "+r"(sum) : "r"(q), "r"(x));
    }
    return sum;
}

// Quantised weights: tiles of eight rows, lane 4 r + s.
template <typename Q> struct Packed {
    static const bool QUANTISED = true;
    static const u32 ROWS = TILE_ROWS, COLS = Q::COLS, BYTES = Q::BYTES, SUMS = 1;

    inline static u32 units(u32 k) { return (k + COLS - 1) / COLS; }
    inline static u64 start(u32 tile, u32 unit, u32 k) { return ((u64)tile * units(k) + unit) * BYTES; }
    inline static u64 step(u32 units) { return units * BYTES; }
    inline static void issue(Ring& ring, u32 slot, u32 offset, const u8* from, u32, u32, u32, u32) {
        ring.issue(slot, offset, from, 1, BYTES, 0, 0);
    }

    inline static void dot(const u8* unit, u32 at, u32, const X& x, float* acc) {
        u32 lane = threadIdx.x % 32;
        const u8* first = x.q + 32 * (at * (COLS / 32) + lane % TILE_SUBS);
        const float2* scales = x.scale + at * (COLS / 32) + lane % TILE_SUBS;
#pragma unroll
        for (int c = 0; c < Q::SUBS; c++) {
            Sub sub = Q::load(unit, c, lane);
            const uint4* q = (const uint4*)(first + 32 * TILE_SUBS * c);
            uint4 a = q[0], b = q[1];
            float2 scale = scales[TILE_SUBS * c];
            i32 low = dot4(sub.q[0], a.x, 0, Q::SIGNED), high = dot4(sub.q[4], b.x, 0, Q::SIGNED);
            low = dot4(sub.q[1], a.y, low, Q::SIGNED), high = dot4(sub.q[5], b.y, high, Q::SIGNED);
            low = dot4(sub.q[2], a.z, low, Q::SIGNED), high = dot4(sub.q[6], b.z, high, Q::SIGNED);
            low = dot4(sub.q[3], a.w, low, Q::SIGNED), high = dot4(sub.q[7], b.w, high, Q::SIGNED);
            float s = __fmaf_rn(sub.scale[0], (float)low, sub.scale[1] * (float)high);
            acc[0] = __fmaf_rn(s, scale.x, acc[0]);
            acc[0] = __fmaf_rn(-sub.min, scale.y, acc[0]);
        }
    }
    // The sum of row r, in lanes 4 r to 4 r + 3.
    inline static float reduce(const float* acc) {
        float sum = acc[0] + __shfl_xor_sync(0xffffffffu, acc[0], 1);
        return sum + __shfl_xor_sync(0xffffffffu, sum, 2);
    }
};

// Plain weights, as in the file: tiles of four rows, so that x is read once for all of them.
template <typename T> struct Plain {
    static const bool QUANTISED = false;
    static const u32 ROWS = 4, COLS = 256, PITCH = 2 * COLS, BYTES = ROWS * PITCH, SUMS = ROWS;

    inline static u32 units(u32 k) { return (k + COLS - 1) / COLS; }
    inline static u64 start(u32 tile, u32 unit, u32 k) { return 2 * ((u64)tile * ROWS * k + unit * COLS); }
    inline static u64 step(u32 units) { return units * PITCH; }
    // Rows past the end are not fetched; what is computed for them is not stored.
    inline static void issue(Ring& ring, u32 slot, u32 offset, const u8* from, u32 tile, u32 unit, u32 n, u32 k) {
        ring.issue(slot, offset, from, min(ROWS, n - tile * ROWS), 2 * min(COLS, k - unit * COLS), 2 * (u64)k, PITCH);
    }

    inline static float2 pair(u32 word, BF16) {
        return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u));
    }
    inline static float2 pair(u32 word, F16) { return make_float2(low_f16(word), high_f16(word)); }

    inline static void dot(const u8* unit, u32 at, u32 k, const X& x, float* acc) {
        u32 lane = threadIdx.x % 32, piece = at * (COLS / 8) + lane;
        if (8 * piece >= k) return;
        float4 a = ((const float4*)x.plane[0])[piece], b = ((const float4*)x.plane[1])[piece];
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            uint4 w = *(const uint4*)(unit + PITCH * i + 16 * lane);
            float2 p = pair(w.x, T()), q = pair(w.y, T()), r = pair(w.z, T()), s = pair(w.w, T());
            float even = __fmaf_rn(p.x, a.x, acc[i]), odd = p.y * a.y;
            even = __fmaf_rn(q.x, a.z, even), odd = __fmaf_rn(q.y, a.w, odd);
            even = __fmaf_rn(r.x, b.x, even), odd = __fmaf_rn(r.y, b.y, odd);
            even = __fmaf_rn(s.x, b.z, even), odd = __fmaf_rn(s.y, b.w, odd);
            acc[i] = even + odd;
        }
    }
    // The sum of row r, in lanes 8 r to 8 r + 7: halves are exchanged until each lane has one row left.
    inline static float reduce(const float* acc) {
        bool upper = threadIdx.x & 16, right = threadIdx.x & 8;
        float a = (upper ? acc[2] : acc[0]) + __shfl_xor_sync(0xffffffffu, upper ? acc[0] : acc[2], 16);
        float b = (upper ? acc[3] : acc[1]) + __shfl_xor_sync(0xffffffffu, upper ? acc[1] : acc[3], 16);
        float sum = (right ? b : a) + __shfl_xor_sync(0xffffffffu, right ? a : b, 8);
#pragma unroll
        for (int i = 4; i > 0; i >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, i);
        return sum;
    }
};

inline float activation(float x, u32 gate) {
    if (gate == 1) return x / (1.0f + expf(-x));
    float inner = 0.7978845608028654f * (x + 0.044715f * x * x * x);
    return 0.5f * x * (1.0f + tanhf(inner));
}

inline void group_barrier(u32 group, u32 threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "r"(threads) : "memory");
}

struct Outputs {
    float* y[3];
    const u8* w[3];
    const float* bias[3];
};

// Adds the sums of a tile's warps and stores its rows; called by one warp.
inline void finish(const Outputs& out, const Params& p, u32 tile, u32 which, float scale,
                   const float (*first)[TILE_ROWS], const float (*second)[TILE_ROWS], u32 rows) {
    // Lanes r, r + 8, .. take every fourth warp's sum of row r.
    u32 lane = threadIdx.x % 32;
    float sums[2] = {0.0f, 0.0f};
    for (u32 i = lane / 8; i < p.split; i += 4) {
        sums[0] += first[i][lane % 8];
        if (p.gate != 0) sums[1] += second[i][lane % 8];
    }
    for (u32 step = 8; step < 8 * min(p.split, 4u); step <<= 1) {
        sums[0] += __shfl_xor_sync(0xffffffffu, sums[0], step);
        sums[1] += __shfl_xor_sync(0xffffffffu, sums[1], step);
    }
    u32 row = tile * rows + lane;
    if (p.gate != 0) {
        if (lane >= rows || row >= p.n[0]) return;
        float left = sums[0] * scale, right = sums[1] * scale;
        if (out.bias[0] != nullptr) left += out.bias[0][row];
        if (out.bias[1] != nullptr) right += out.bias[1][row];
        out.y[0][row] = activation(left, p.gate) * right;
        return;
    }
    u32 n = which == 0 ? p.n[0] : which == 1 ? p.n[1] : p.n[2];
    if (lane >= rows || row >= n) return;
    const float* bias = which == 0 ? out.bias[0] : which == 1 ? out.bias[1] : out.bias[2];
    float* y = which == 0 ? out.y[0] : which == 1 ? out.y[1] : out.y[2];
    y[row] = sums[0] * scale + (bias != nullptr ? bias[row] : 0.0f);
}

// What one warp fetches, in order: of each of its tiles the weights one after the other, of each weight every
// `split`-th unit.
template <typename A, typename B> struct Walk {
    u32 tile, pass, unit;  // tile: of all weights together; n_tiles or more at the end
    u32 local, which;      // the tile in its weight
    const u8* from;

    inline void begin(const Outputs& out, const Params& p, const u32* tiles, u32 rank) {
        unit = rank;
        local = tile;
        which = p.gate != 0 ? pass : 0;
        if (p.gate == 0 && local >= tiles[0]) {
            local -= tiles[0];
            which = 1;
            if (local >= tiles[1]) {
                local -= tiles[1];
                which = 2;
            }
        }
        // Constant indices keep the parameters where they are.
        const u8* w = which == 0 ? out.w[0] : which == 1 ? out.w[1] : out.w[2];
        from = w + (p.second >> which & 1 ? B::start(local, unit, p.k) : A::start(local, unit, p.k));
    }
};

template <typename A, typename B>
inline void product(const Outputs& out, float* sum, const float* a, const float* b, const float* inner, const float* norm,
                    const Params& p) {
    const u32 ROWS = A::ROWS, STAGE = A::BYTES > B::BYTES ? A::BYTES : B::BYTES;
    extern __shared__ __align__(128) u8 shared[];
    __shared__ float partial[WARPS];
    // Sums of a tile's warps; two sets, so that a warp may begin the next tile while the last one is added up.
    __shared__ float parts[2][2][WARPS][TILE_ROWS];
    let_next_start();

    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u32 ring_bytes = WARPS * p.stages * STAGE;
    u64* barriers = (u64*)(shared + ring_bytes);
    u8* space = shared + ring_bytes + (8 * WARPS * p.stages + 127) / 128 * 128;
    u32 units = A::units(p.k), padded = A::QUANTISED ? units * A::COLS : p.k;
    X x = {{(float*)space, (float*)space + padded / 2}, space, (float2*)(space + padded)};

    u32 group = warp / p.split, rank = warp % p.split, groups = WARPS / p.split;
    u32 tiles[3];
#pragma unroll
    for (int i = 0; i < 3; i++) tiles[i] = (p.n[i] + ROWS - 1) / ROWS;
    u32 n_tiles = p.gate != 0 ? tiles[0] : tiles[0] + tiles[1] + tiles[2];
    u32 passes = p.gate != 0 ? 2 : 1, stride = groups * gridDim.x;

    Ring ring;
    ring.init(shared + warp * p.stages * STAGE, barriers + warp * p.stages, p.stages);
    Walk<A, B> ahead;
    ahead.tile = rank < units ? group * gridDim.x + blockIdx.x : n_tiles;
    ahead.pass = 0;
    if (ahead.tile < n_tiles) ahead.begin(out, p, tiles, rank);
    u32 ahead_slot = 0;
    auto issue = [&]() {
        if (ahead.tile >= n_tiles) {
            ring.nothing();
            return;
        }
        bool second = p.second >> ahead.which & 1;
        u32 n = ahead.which == 0 ? p.n[0] : ahead.which == 1 ? p.n[1] : p.n[2];
        if (second) {
            B::issue(ring, ahead_slot, ahead_slot * STAGE, ahead.from, ahead.local, ahead.unit, n, p.k);
        } else {
            A::issue(ring, ahead_slot, ahead_slot * STAGE, ahead.from, ahead.local, ahead.unit, n, p.k);
        }
        ahead_slot = ahead_slot + 1 == p.stages ? 0 : ahead_slot + 1;
        ahead.unit += p.split;
        if (ahead.unit < units) {
            ahead.from += second ? B::step(p.split) : A::step(p.split);
            return;
        }
        ahead.pass++;
        if (ahead.pass == passes) {
            ahead.pass = 0;
            ahead.tile += stride;
        }
        if (ahead.tile < n_tiles) ahead.begin(out, p, tiles, rank);
    };
    for (u32 i = 0; i < p.stages; i++) issue();

    Eight early;
    if (norm != nullptr) early = Eight(norm, 8 * threadIdx.x, p.k);
    wait_for_previous();
    if (norm == nullptr && b == nullptr) {
        copy_x<A::QUANTISED>(x, p.k, padded, a);
    } else {
        make_x<A::QUANTISED>(x, p.k, padded, a, b, inner, norm, sum, p.eps, partial, early);
    }
    __syncthreads();
    float scale = norm != nullptr ? rsqrtf(total(partial) / (float)p.k + p.eps) : 1.0f;

    u32 slot = 0, turn = 0, set = 0;
    Walk<A, B> at;
    for (at.tile = group * gridDim.x + blockIdx.x; at.tile < n_tiles; at.tile += stride) {
        for (at.pass = 0; at.pass < passes; at.pass++) {
            at.begin(out, p, tiles, rank);
            bool second = p.second >> at.which & 1;
            float acc[A::SUMS] = {};
            for (u32 unit = rank; unit < units; unit += p.split) {
                ring.wait(slot, turn, p.stages);
                const u8* data = shared + (warp * p.stages + slot) * STAGE;
                if (second) {
                    B::dot(data, unit, p.k, x, acc);
                } else {
                    A::dot(data, unit, p.k, x, acc);
                }
                // The slot is filled again only after every lane has read it.
                __syncwarp();
                issue();
                if (++slot == p.stages) {
                    slot = 0;
                    turn++;
                }
            }
            float total_of_row = A::reduce(acc);
            if (lane % (32 / ROWS) == 0) parts[set][at.pass][warp][lane / (32 / ROWS)] = total_of_row;
        }
        if (p.split == 1) {
            __syncwarp();
        } else {
            group_barrier(group, 32 * p.split);
        }
        if (rank == 0) finish(out, p, at.local, at.which, scale, &parts[set][0][warp], &parts[set][1][warp], ROWS);
        if (p.split == 1) __syncwarp();
        set ^= 1;
    }
}

#define PRODUCT(name, A, B)                                                                                        \
    extern "C" __global__ __launch_bounds__(THREADS, 2) void product_##name(                                       \
        float* y0, float* y1, float* y2, float* sum, const float* a, const float* b, const float* inner,           \
        const float* norm, const u8* w0, const u8* w1, const u8* w2, const float* bias0, const float* bias1,       \
        const float* bias2, Params p) {                                                                            \
        Outputs out = {{y0, y1, y2}, {w0, w1, w2}, {bias0, bias1, bias2}};                                         \
        product<A, B>(out, sum, a, b, inner, norm, p);                                                             \
    }
#define PACKED(name, Q) PRODUCT(name, Packed<Packed##Q>, Packed<Packed##Q>)

PRODUCT(bf16, Plain<BF16>, Plain<BF16>)
PRODUCT(f16, Plain<F16>, Plain<F16>)
PACKED(q4_0, Q4_0)
PACKED(q4_1, Q4_1)
PACKED(q5_0, Q5_0)
PACKED(q5_1, Q5_1)
PACKED(q8_0, Q8_0)
PACKED(q4_k, Q4_K)
PACKED(q5_k, Q5_K)
PACKED(q6_k, Q6_K)
PRODUCT(q4_k_q6_k, Packed<PackedQ4_K>, Packed<PackedQ6_K>)
PRODUCT(q5_k_q6_k, Packed<PackedQ5_K>, Packed<PackedQ6_K>)
