// product.cu: GEMV of one activation row with up to three weights, fused with its norm, residual add, bias
// and gate
//
//   y_i = x . w_i^T (+ bias_i), or with a gate y0 = act(x . w0^T) * (x . w1^T)
//   x = rms_norm(s, norm) or s;  s = a, a + b, or a + rms_norm(b, inner)
//
//   w0 .. w2   [n, k]       BF16 or F16 in file layout, or quantised and packed (packed.cuh); unused ones null
//   p                       sizes; see Params
//   a          [k]          f32
//   b          [k]          f32, or null: s is a
//   inner      [k]          f32, or null: b is added as it is
//   norm       [k]          f32, or null: x is s
//   sum        [k]          f32: receives s when b is set; or null
//   y0 .. y2   [n]          f32; unused ones null. With a gate only y0 is written
//   bias0 .. bias2  [n]     f32, added to the results; or null
//
// A decode launch lasts a few microseconds, so latency dominates. Touching a kernel parameter for the first
// time fetches it from memory: the parameters that the first copies need are declared first, and the
// remaining ones are touched before the wait. An instruction that runs once costs five to eight cycles, so
// the code after the wait is short: there is one kernel per Kind, warp-uniform values are made uniform for
// the compiler, and everything that can be computed before the wait is.
//
// Every block builds x itself, from a row in the L2 cache, and keeps it in shared memory. Plain weights read
// x as f32. Quantised weights read x rounded to blocks of 32 signed bytes with one scale (the largest
// magnitude maps to 127, ties round to even). Bulk copies load chunks of weights into one ring per warp. The
// first chunks are issued before the kernel waits for x. They are paced: the previous launch is about to read
// its own x and would queue after them. After a long launch, half of them are held back until that launch has
// requested nearly all of its weights. A copy costs an SM about 25 cycles whatever its size, and a chunk
// costs a warp about 100 cycles, so chunks are as large as shared memory allows.
//
// Launch       grid (at most one block per SM), block (32 WARPS of the weight type), dynamic shared memory
//              for the rings and x (src/product.rs)
// Requires     k a multiple of 8 (plain), 32 or 256 (packed); all pointers 16-byte aligned; no launch writes
//              the weights
// Aliasing     none: blocks read a and b while the first block writes sum, and write y while other blocks
//              still read
// Accumulation packed: integer dot products, exact within a sub-block of 32; sums over sub-blocks in f32.
//              Plain: f32
// Determinism  same bits every run. A block owns consecutive tiles and each warp an equal, consecutive share
//              of their chunks. Partial sums of tiles shared by several warps are added in an order that
//              depends only on the sizes and the grid
// Capture      safe
#include "overlap.cuh"
#include "packed.cuh"
#include "reduce.cuh"
#include "tuning.cuh"

struct Params {
    u32 k;
    u32 n[3];           // rows of each weight
    u32 tiles;          // tiles per block; the first `extra` blocks have one more
    u32 extra;
    u32 tile_inverse;   // 2^32 / (chunks per tile), rounded up; 0 if a tile is one chunk
    u8 stages;          // chunks in each warp's ring
    u8 second;          // bit i: weight i has the second type
    u8 gate;            // 0: none, 1: SiLU, 2: GELU (tanh)
    u8 pace;            // pacing of the initial prefetch: cycles between two chunks, divided by 4
    float inverse_k;
    float eps;
    u32 early;          // chunks of the initial prefetch that do not wait for `late`
    u32 late;           // cycles after the block's start
};

// Asynchronous copies into one warp's ring, in order. Before compute capability 9.0 each lane copies 16 bytes
// at a time.
#if !defined(REFRAIN_ON_HOST) && __CUDA_ARCH__ >= 900
struct Ring {
    u32 data, barriers;

    inline static u32 address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
    inline void init(u8* ring, u64* bars, u32 stages) {
        data = address(ring);
        barriers = address(bars);
        if (threadIdx.x % 32 == 0) {
#pragma unroll 1
            for (u32 i = 0; i < stages; i++) {
                asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barriers + 8 * i) : "memory");
            }
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        }
        __syncwarp();
    }
    inline static void copy(u32 to, const u8* from, u32 bytes, u32 bar) {
        // Each weight is read once per step; evict_first keeps it from displacing the rest of the L2 cache.
        u64 policy;
        asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
        asm volatile(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
                "r"(to),
            "l"(from), "r"(bytes), "r"(bar), "l"(policy)
            : "memory");
    }
    inline static void expect(u32 bar, u32 bytes) {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
    }
    inline void issue_one(u32 slot, u32 offset, const u8* from, u32 bytes) {
        if (threadIdx.x % 32 != 0) return;
        expect(barriers + 8 * slot, bytes);
        copy(data + offset, from, bytes, barriers + 8 * slot);
    }
    // Copies one or two rows of `bytes`, `stride` apart in memory, to rows `pitch` apart in the slot.
    inline void issue_rows(u32 slot, u32 offset, const u8* from, u32 n, u32 bytes, u64 stride, u32 pitch) {
        if (threadIdx.x % 32 != 0) return;
        expect(barriers + 8 * slot, n * bytes);
        copy(data + offset, from, bytes, barriers + 8 * slot);
        if (n > 1) copy(data + offset + pitch, from + stride, bytes, barriers + 8 * slot);
    }
    inline void nothing() {}
    // Waits for the chunk of a slot in its `turn`-th use.
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
    inline void issue_one(u32 slot, u32 offset, const u8* from, u32 bytes) {
        issue_rows(slot, offset, from, 1, bytes, 0, 0);
    }
    inline void issue_rows(u32, u32 offset, const u8* from, u32 n, u32 bytes, u64 stride, u32 pitch) {
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
    // Groups complete in order: once at most `stages` - 1 are in flight, this one has arrived.
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
#else
struct Ring {
    u8* data;

    inline void init(u8* ring, u64*, u32) { data = ring; }
    inline void issue_one(u32 slot, u32 offset, const u8* from, u32 bytes) {
        issue_rows(slot, offset, from, 1, bytes, 0, 0);
    }
    inline void issue_rows(u32, u32 offset, const u8* from, u32 n, u32 bytes, u64 stride, u32 pitch) {
        u32 lane = threadIdx.x % 32;
        if (lane < n) memcpy(data + offset + lane * pitch, from + lane * stride, bytes);
    }
    inline void nothing() {}
    inline void wait(u32, u32, u32) { __syncwarp(); }
};
#endif

// Activations in shared memory.
struct X {
    // Plain: of every eight elements, 0 .. 3 are in one plane and 4 .. 7 in the other, so a warp's reads have
    // no bank conflicts.
    float* plane[2];
    // Quantised: the bytes, and for each block of 32 its scale and scaled sum.
    u8* q;
    float2* scale;
};

// Returns the sum of all warps' partial sums.
template <u32 WARPS> inline float total(const float* partial) {
    // Four independent chains, because each addition waits for the previous one of its chain.
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int i = 0; i < WARPS; i += 4) {
        sum.x += partial[i], sum.y += partial[i + 1], sum.z += partial[i + 2], sum.w += partial[i + 3];
    }
    return (sum.x + sum.y) + (sum.z + sum.w);
}

// The eight elements that a thread handles at a time; zero past k.
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

// Stores x quantised. Four lanes hold the 32 elements of a block; all lanes of a warp call this together.
inline void keep_quantised(const X& x, u32 at, u32 padded, const Eight& e) {
    ByteBlock block(e.v);
    if (at >= padded) return;
    *(uint2*)(x.q + at) = make_uint2(block.low, block.high);
    if (at % 32 == 0) x.scale[at / 32] = block.scale;
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

// Returns the factor of an RMS norm, from the warps' sums of squares.
template <u32 WARPS> inline float norm_factor(const float* partial, const Params& p) {
    return rsqrtf(__fmaf_rn(total<WARPS>(partial), p.inverse_k, p.eps));
}

// Inputs that x is computed from.
struct Source {
    const float *a, *b, *inner, *norm;
    float* sum;
};

// Computes x in shared memory: s times the norm's weights. The factor of the norm is applied to the results.
// `partial` receives each warp's sum of squares; the caller synchronises before it reads them. `early` holds
// the first norm weights that this thread needs.
template <typename W>
inline void make_x(const X& x, u32 padded, const Source& from, float* partial, const Eight& early, const Params& p) {
    const u32 STEP = 8 * 32 * W::WARPS;
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, k = p.k;
    float scale_b = 1.0f;
    if (from.inner != nullptr) {
        float squares = 0.0f;
#pragma unroll 1
        for (u32 at = 8 * threadIdx.x; at < k; at += STEP) squares += Eight(from.b, at, k).squares();
        squares = warp_reduce(squares, Add());
        if (lane == 0) partial[warp] = squares;
        __syncthreads();
        scale_b = norm_factor<W::WARPS>(partial, p);
        __syncthreads();
    }
    float squares = 0.0f;
    // Whole warps stay together. The elements of several rounds are loaded before the first are used: one
    // load takes as long as everything else.
#pragma unroll 1
    for (u32 start = 8 * (threadIdx.x - lane); start < padded; start += W::X_AHEAD * STEP) {
        Eight ahead[W::X_AHEAD];
#pragma unroll
        for (int i = 0; i < W::X_AHEAD; i++) ahead[i] = Eight(from.a, start + 8 * lane + i * STEP, k);
#pragma unroll
        for (int i = 0; i < W::X_AHEAD; i++) {
            u32 at = start + 8 * lane + i * STEP;
            if (i > 0 && start + i * STEP >= padded) break;
            Eight v = ahead[i];
            if (from.b != nullptr) {
                Eight u(from.b, at, k);
                if (from.inner != nullptr) {
                    Eight w(from.inner, at, k);
#pragma unroll
                    for (int j = 0; j < 8; j++) u.v[j] = u.v[j] * scale_b * w.v[j];
                }
#pragma unroll
                for (int j = 0; j < 8; j++) v.v[j] += u.v[j];
                if (from.sum != nullptr && blockIdx.x == 0 && at < k) v.store(from.sum + at);
            }
            if (from.norm != nullptr) {
                squares += v.squares();
                Eight w = early;
                if (start + i * STEP >= STEP) w = Eight(from.norm, at, k);
#pragma unroll
                for (int j = 0; j < 8; j++) v.v[j] *= w.v[j];
            }
            keep<W::QUANTISED>(x, at, padded, v);
        }
    }
    if (from.norm == nullptr) return;
    squares = warp_reduce(squares, Add());
    if (lane == 0) partial[warp] = squares;
}

// Quantised weights in tiles of eight rows, lane 4 r + s. A chunk is UNITS units. Few warps with large chunks
// read faster, many warps compute faster; the best choice depends on the work per byte.
template <typename Q, int UNITS, u32 N_WARPS> struct Packed {
    static const bool QUANTISED = true;
    static const u32 WARPS = N_WARPS, X_AHEAD = 32 / WARPS;
    static const u32 ROWS = TILE_ROWS, COLS = UNITS * Q::COLS, SLOT = UNITS * Q::BYTES, SUMS = 1;

    inline static u32 units(u32 k) { return (k + Q::COLS - 1) / Q::COLS; }
    inline static u32 padded(u32 k) { return units(k) * Q::COLS; }
    inline static u64 start(u32 tile, u32 chunk, u32 k) { return ((u64)tile * units(k) + chunk * UNITS) * Q::BYTES; }
    inline static u32 units_in(u32 chunk, u32 k) { return UNITS == 1 ? 1 : min((u32)UNITS, units(k) - chunk * UNITS); }
    inline static void issue(Ring& ring, u32 slot, u32 offset, const u8* from, u32, u32 chunk, u32, u32 k) {
        ring.issue_one(slot, offset, from, units_in(chunk, k) * Q::BYTES);
    }

    inline static void dot(const u8* data, u32 chunk, u32 k, const X& x, float* acc) {
        u32 n = units_in(chunk, k);
        if (n == UNITS) {
#pragma unroll
            for (int i = 0; i < UNITS; i++) dot_unit(data + i * Q::BYTES, chunk * UNITS + i, x, acc);
            return;
        }
#pragma unroll 1
        for (u32 i = 0; i < n; i++) dot_unit(data + i * Q::BYTES, chunk * UNITS + i, x, acc);
    }

    inline static void dot_unit(const u8* unit, u32 at, const X& x, float* acc) {
        u32 lane = threadIdx.x % 32;
        const u8* first = x.q + 32 * (at * (Q::COLS / 32) + lane % TILE_SUBS);
        const float2* scales = x.scale + at * (Q::COLS / 32) + lane % TILE_SUBS;
#pragma unroll
        for (int c = 0; c < Q::SUBS; c++) {
            Sub sub = Q::load(unit, c, lane);
            const uint4* q = (const uint4*)(first + 32 * TILE_SUBS * c);
            uint4 a = q[0], b = q[1];
            float2 scale = scales[TILE_SUBS * c];
            i32 low = dot_bytes(sub.q[0], a.x, 0, Q::SIGNED), high = dot_bytes(sub.q[4], b.x, 0, Q::SIGNED);
            low = dot_bytes(sub.q[1], a.y, low, Q::SIGNED), high = dot_bytes(sub.q[5], b.y, high, Q::SIGNED);
            low = dot_bytes(sub.q[2], a.z, low, Q::SIGNED), high = dot_bytes(sub.q[6], b.z, high, Q::SIGNED);
            low = dot_bytes(sub.q[3], a.w, low, Q::SIGNED), high = dot_bytes(sub.q[7], b.w, high, Q::SIGNED);
            float s = __fmaf_rn(sub.scale[0], (float)low, sub.scale[1] * (float)high);
            acc[0] = __fmaf_rn(s, scale.x, acc[0]);
            acc[0] = __fmaf_rn(-sub.min, scale.y, acc[0]);
        }
    }
    // Returns the sum of row r, in lanes 4 r to 4 r + 3.
    inline static float reduce(const float* acc) {
        float sum = acc[0] + __shfl_xor_sync(0xffffffffu, acc[0], 1);
        return sum + __shfl_xor_sync(0xffffffffu, sum, 2);
    }
};

// Plain weights in the file's layout, in tiles of two rows, so that one read of x serves both.
template <typename T> struct Plain {
    static const bool QUANTISED = false;
    static const u32 WARPS = PRODUCT_PLAIN_WARPS, X_AHEAD = 4;
    static const u32 ROWS = 2, COLS = 1024, PITCH = 2 * COLS, SLOT = ROWS * PITCH, SUMS = ROWS;

    inline static u32 padded(u32 k) { return k; }
    inline static u64 start(u32 tile, u32 chunk, u32 k) { return 2 * ((u64)tile * ROWS * k + chunk * COLS); }
    // Rows past the end are not loaded; the results computed for them are not stored.
    inline static void issue(Ring& ring, u32 slot, u32 offset, const u8* from, u32 tile, u32 chunk, u32 n, u32 k) {
        ring.issue_rows(slot, offset, from, min(ROWS, n - tile * ROWS), 2 * min(COLS, k - chunk * COLS), 2 * (u64)k, PITCH);
    }

    inline static float2 pair(u32 word, BF16) {
        return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u));
    }
    inline static float2 pair(u32 word, F16) { return make_float2(low_f16(word), high_f16(word)); }

    inline static void dot(const u8* data, u32 chunk, u32 k, const X& x, float* acc) {
        u32 lane = threadIdx.x % 32, first = chunk * (COLS / 8) + lane;
        if ((chunk + 1) * COLS <= k) {
#pragma unroll
            for (int i = 0; i < COLS / 256; i++) dot_eight(data + 512 * i, first + 32 * i, x, acc);
            return;
        }
#pragma unroll 1
        for (u32 i = 0; 8 * (first + 32 * i) < k; i++) dot_eight(data + 512 * i, first + 32 * i, x, acc);
    }

    inline static void dot_eight(const u8* data, u32 piece, const X& x, float* acc) {
        float4 a = ((const float4*)x.plane[0])[piece], b = ((const float4*)x.plane[1])[piece];
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            uint4 w = *(const uint4*)(data + i * PITCH + 16 * (threadIdx.x % 32));
            float2 p = pair(w.x, T()), q = pair(w.y, T()), r = pair(w.z, T()), s = pair(w.w, T());
            float even = __fmaf_rn(p.x, a.x, acc[i]), odd = p.y * a.y;
            even = __fmaf_rn(q.x, a.z, even), odd = __fmaf_rn(q.y, a.w, odd);
            even = __fmaf_rn(r.x, b.x, even), odd = __fmaf_rn(r.y, b.y, odd);
            even = __fmaf_rn(s.x, b.z, even), odd = __fmaf_rn(s.y, b.w, odd);
            acc[i] = even + odd;
        }
    }
    // Returns the sum of row r, in lanes 16 r to 16 r + 15. The half-warps exchange sums, so that each lane
    // keeps one row.
    inline static float reduce(const float* acc) {
        bool upper = threadIdx.x & 16;
        float sum = (upper ? acc[1] : acc[0]) + __shfl_xor_sync(0xffffffffu, upper ? acc[0] : acc[1], 16);
#pragma unroll
        for (int i = 8; i > 0; i >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, i);
        return sum;
    }
};

inline float activation(float x, u32 gate) {
    // SiLU is x / (1 + e^-x). GELU is 0.5 x (1 + tanh u) = x / (1 + e^-2u).
    float u = gate == 1 ? x : 1.5957691216057308f * __fmaf_rn(0.044715f * x * x, x, x);
    return __fdividef(x, 1.0f + __expf(-u));
}

template <typename A, typename B> struct Same { static const bool YES = false; };
template <typename A> struct Same<A, A> { static const bool YES = true; };

// Weights, biases and destinations of a launch.
struct Outputs {
    float* y[3];
    const u8* w[3];
    const float* bias[3];
};

// Constant indices, so that parameters stay in constant memory and are not copied to a local array.
template <typename T> inline T pick(T const (&of)[3], u32 i) { return i == 0 ? of[0] : i == 1 ? of[1] : of[2]; }

// What a launch computes, known at compile time: code that runs once should be short.
enum Kind {
    BARE,     // one weight, no bias; x is a
    GATED,    // two weights joined by a gate
    SEVERAL,  // up to three weights
};

// Location of a tile, given its index over all weights: the weight, and the tile's index within it.
struct TileLocation {
    u32 local, which;

    template <Kind KIND> inline void find(u32 tile, u32 pass, const u32 (&tiles)[3]) {
        local = tile;
        which = pass;
        if (KIND != SEVERAL || local < tiles[0]) return;
        local -= tiles[0];
        which = 1;
        if (local < tiles[1]) return;
        local -= tiles[1];
        which = 2;
    }
};

// A warp's position in its share: the chunk of a pass over a tile. A tile has two passes when a gate joins
// two weights.
struct Walk {
    u32 tile, pass, chunk;

    // Advances by one chunk; returns whether that was the last of a pass.
    inline bool next(u32 chunks) {
        chunk++;
        return chunk == chunks;
    }
    // Ends a pass; returns whether that was the last of a tile.
    template <u32 PASSES> inline bool next_pass() {
        chunk = 0;
        if (PASSES == 2) {
            pass ^= 1;
            if (pass != 0) return false;
        }
        tile++;
        return true;
    }
};

// Stores one row. `left` is its sum; with a gate, `left` passes through the gate and `right` is the other
// factor.
template <Kind KIND>
inline void finish(const Outputs& out, const Params& p, const TileLocation& location, u32 row, float scale, float left, float right) {
    u32 which = KIND == SEVERAL ? location.which : 0;
    if (row >= pick(p.n, which)) return;
    const float* bias = pick(out.bias, which);
    left *= scale;
    if (bias != nullptr) left += bias[row];
    if (KIND == GATED) {
        right *= scale;
        if (out.bias[1] != nullptr) right += out.bias[1][row];
        left = activation(left, p.gate) * right;
    }
    pick(out.y, which)[row] = left;
}

template <typename A, typename B, Kind KIND>
inline void product(const Outputs& out, const Source& from, const Params& p) {
    const u32 WARPS = A::WARPS, ROWS = A::ROWS, LANES = 32 / ROWS, SLOT = A::SLOT > B::SLOT ? A::SLOT : B::SLOT;
    DYNAMIC_SHARED(shared);
    __shared__ float partial[WARPS];
    const u32 PASSES = KIND == GATED ? 2 : 1;
    // A warp's partial sums of tiles that it shares with other warps: [0] of the tile it finishes, [1] of the
    // one it leaves to the next warp.
    __shared__ float parts[WARPS][2][PASSES][ROWS];
    u32 block_start = cycles_now();
    let_next_start();

    // Broadcast from lane 0, so that the compiler knows the value is warp-uniform.
    u32 warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32, stages = p.stages;
    u32 ring_bytes = WARPS * stages * SLOT;
    u64* barriers = (u64*)(shared + ring_bytes);
    u8* space = shared + ring_bytes + (8 * WARPS * stages + 127) / 128 * 128;
    u32 chunks = (p.k + A::COLS - 1) / A::COLS, padded = A::padded(p.k);
    X x = {{(float*)space, (float*)space + padded / 2}, space, (float2*)(space + padded)};

    u32 tiles[3];
#pragma unroll
    for (int i = 0; i < 3; i++) tiles[i] = (p.n[i] + ROWS - 1) / ROWS;
    // The block's chunks, and this warp's share of them.
    u32 of_tile = PASSES * chunks;
    u32 first_tile = blockIdx.x * p.tiles + min(blockIdx.x, p.extra);
    u32 all = (p.tiles + (blockIdx.x < p.extra ? 1 : 0)) * of_tile;
    u32 begin = warp * all / WARPS, end = (warp + 1) * all / WARPS;
    u32 tiles_before = p.tile_inverse == 0 ? begin : (u32)((u64)begin * p.tile_inverse >> 32);
    u32 in_tile = begin - tiles_before * of_tile;
    Walk at = {first_tile + tiles_before, 0, in_tile};
    if (KIND == GATED && in_tile >= chunks) at = {first_tile + tiles_before, 1, in_tile - chunks};

    Ring ring;
    ring.init(shared + warp * stages * SLOT, barriers + warp * stages, stages);
    Walk ahead = at;
    TileLocation location = {0, 0};
    const u8* ahead_from = nullptr;
    u32 ahead_left = end - begin, ahead_slot = 0;
    auto issue = [&]() {
        if (ahead_left == 0) {
            ring.nothing();
            return;
        }
        ahead_left--;
        if (ahead_from == nullptr) {
            location.find<KIND>(ahead.tile, ahead.pass, tiles);
            bool second = !Same<A, B>::YES && (p.second >> location.which & 1);
            ahead_from = pick(out.w, KIND == BARE ? 0 : location.which)
                         + (second ? B::start(location.local, ahead.chunk, p.k) : A::start(location.local, ahead.chunk, p.k));
        }
        u32 n = pick(p.n, KIND == SEVERAL ? location.which : 0);
        if (!Same<A, B>::YES && (p.second >> location.which & 1)) {
            B::issue(ring, ahead_slot, ahead_slot * SLOT, ahead_from, location.local, ahead.chunk, n, p.k);
            ahead_from += B::start(0, 1, p.k);
        } else {
            A::issue(ring, ahead_slot, ahead_slot * SLOT, ahead_from, location.local, ahead.chunk, n, p.k);
            ahead_from += A::start(0, 1, p.k);
        }
        ahead_slot = ahead_slot + 1 == stages ? 0 : ahead_slot + 1;
        if (!ahead.next(chunks)) return;
        ahead_from = nullptr;
        ahead.next_pass<PASSES>();
    };
    Eight early;
    if (from.norm != nullptr) early = Eight(from.norm, 8 * threadIdx.x, p.k);
#pragma unroll 1
    for (u32 i = warp; i < stages * WARPS; i += WARPS) {
        if (ahead_left != 0) hold(block_start, i < p.early ? 4 * p.pace * i : p.late + 4 * p.pace * (i - p.early));
        issue();
    }

    touch(from.a);
    touch(out.y[0]);
    // The first tile that this warp finishes began `in_tile` chunks before its share: find the warp that
    // started it.
    u32 tile_from = warp;
#pragma unroll 1
    for (u32 other_begin = begin; other_begin + in_tile > begin;) other_begin = --tile_from * all / WARPS;
    if (begin == end && lane < ROWS * PASSES) (&parts[warp][1][0][0])[lane] = 0.0f;

    wait_for_previous();
    make_x<A>(x, padded, from, partial, early, p);
    __syncthreads();

    u32 slot = 0, turn = 0, row = lane / LANES;
    bool is_whole = in_tile == 0, ends_shared = false;
    float acc[A::SUMS] = {}, left = 0.0f, right = 0.0f;
    TileLocation ended = {0, 0};
#pragma unroll 1
    for (u32 item = begin; item < end; item++) {
        TileLocation here = {0, 0};
        if (!Same<A, B>::YES) here.find<KIND>(at.tile, at.pass, tiles);
        const u8* data = shared + (warp * stages + slot) * SLOT;
        ring.wait(slot, turn, stages);
        if (!Same<A, B>::YES && (p.second >> here.which & 1)) {
            B::dot(data, at.chunk, p.k, x, acc);
        } else {
            A::dot(data, at.chunk, p.k, x, acc);
        }
        // The slot may be refilled only after every lane has read it.
        __syncwarp();
        issue();
        if (++slot == stages) {
            slot = 0;
            turn++;
        }
        bool pass_ends = at.next(chunks);
        if (!pass_ends && item + 1 < end) continue;

        if (Same<A, B>::YES) here.find<KIND>(at.tile, at.pass, tiles);
        float sum = A::reduce(acc);
#pragma unroll
        for (int i = 0; i < A::SUMS; i++) acc[i] = 0.0f;
        (PASSES == 1 || at.pass == 0 ? left : right) = sum;
        bool tile_ends = pass_ends && at.next_pass<PASSES>();
        if (!tile_ends && item + 1 < end) continue;
        if (tile_ends && is_whole) {
            float scale = from.norm != nullptr ? norm_factor<WARPS>(partial, p) : 1.0f;
            if (lane % LANES == 0) finish<KIND>(out, p, here, here.local * ROWS + row, scale, left, right);
        } else if (lane % LANES == 0) {
            parts[warp][tile_ends ? 0 : 1][0][row] = left;
            if (PASSES == 2) parts[warp][tile_ends ? 0 : 1][PASSES - 1][row] = right;
        }
        if (tile_ends && !is_whole) {
            ends_shared = true;
            ended = here;
        }
        is_whole = true;
        left = right = 0.0f;
    }
    __syncthreads();
    if (!ends_shared) return;

    // The lanes of a row divide the partial sums that the preceding warps left of this tile.
    left = right = 0.0f;
    if (lane % LANES == 0) {
        left = parts[warp][0][0][row];
        if (PASSES == 2) right = parts[warp][0][PASSES - 1][row];
    }
#pragma unroll 1
    for (u32 other = tile_from + lane % LANES; other < warp; other += LANES) {
        left += parts[other][1][0][row];
        if (PASSES == 2) right += parts[other][1][PASSES - 1][row];
    }
#pragma unroll
    for (u32 i = 1; i < LANES && i < WARPS; i *= 2) {
        left += __shfl_xor_sync(0xffffffffu, left, i);
        if (PASSES == 2) right += __shfl_xor_sync(0xffffffffu, right, i);
    }
    float scale = from.norm != nullptr ? norm_factor<WARPS>(partial, p) : 1.0f;
    if (lane % LANES == 0) finish<KIND>(out, p, ended, ended.local * ROWS + row, scale, left, right);
}

#define PRODUCT(name, A, B, KIND)                                                                                  \
    extern "C" __global__ __launch_bounds__(32 * A::WARPS, 2) void product_##name(                                 \
        const u8* w0, const u8* w1, const u8* w2, Params p, const float* a, const float* b, const float* inner,    \
        const float* norm, float* sum, float* y0, float* y1, float* y2, const float* bias0, const float* bias1,    \
        const float* bias2) {                                                                                      \
        if (KIND == BARE) {                                                                                        \
            Outputs out = {{y0, nullptr, nullptr}, {w0, nullptr, nullptr}, {nullptr, nullptr, nullptr}};           \
            product<A, B, KIND>(out, Source{a, nullptr, nullptr, nullptr, nullptr}, p);                            \
        } else {                                                                                                   \
            Outputs out = {{y0, y1, y2}, {w0, w1, w2}, {bias0, bias1, bias2}};                                     \
            product<A, B, KIND>(out, Source{a, b, inner, norm, sum}, p);                                           \
        }                                                                                                          \
    }
#define ALL(name, W)                         \
    PRODUCT(bare_##name, W, W, BARE)         \
    PRODUCT(gated_##name, W, W, GATED)       \
    PRODUCT(several_##name, W, W, SEVERAL)
#define PAIR(name, A, B) PRODUCT(several_##name, A, B, SEVERAL)

typedef Plain<BF16> B16;
typedef Plain<F16> H16;
typedef Packed<PackedQ4_0, PRODUCT_128_UNITS, PRODUCT_128_WARPS> Q40;
typedef Packed<PackedQ4_1, PRODUCT_128_UNITS, PRODUCT_128_WARPS> Q41;
typedef Packed<PackedQ5_0, PRODUCT_128_UNITS, PRODUCT_128_WARPS> Q50;
typedef Packed<PackedQ5_1, PRODUCT_128_UNITS, PRODUCT_128_WARPS> Q51;
typedef Packed<PackedQ8_0, PRODUCT_Q8_0_UNITS, PRODUCT_Q8_0_WARPS> Q80;
typedef Packed<PackedQ3_K, PRODUCT_256_UNITS, PRODUCT_256_WARPS> Q3K;
typedef Packed<PackedQ4_K, PRODUCT_256_UNITS, PRODUCT_256_WARPS> Q4K;
typedef Packed<PackedQ5_K, PRODUCT_256_UNITS, PRODUCT_256_WARPS> Q5K;
typedef Packed<PackedQ6_K, PRODUCT_256_UNITS, PRODUCT_256_WARPS> Q6K;
typedef Packed<PackedIQ4_NL, PRODUCT_128_UNITS, PRODUCT_128_WARPS> I4N;
typedef Packed<PackedIQ4_XS, PRODUCT_256_UNITS, PRODUCT_256_WARPS> I4X;
typedef Packed<PackedMXFP4, PRODUCT_128_UNITS, PRODUCT_128_WARPS> MX4;

// unit bf16
ALL(bf16, B16)
// unit f16
ALL(f16, H16)
// unit q4_0
ALL(q4_0, Q40)
// unit q4_1
ALL(q4_1, Q41)
// unit q5_0
ALL(q5_0, Q50)
// unit q5_1
ALL(q5_1, Q51)
// unit q8_0
ALL(q8_0, Q80)
// unit q3_k
ALL(q3_k, Q3K)
// unit q4_k
ALL(q4_k, Q4K)
// unit q5_k
ALL(q5_k, Q5K)
// unit q6_k
ALL(q6_k, Q6K)
// unit iq4_nl
ALL(iq4_nl, I4N)
// unit iq4_xs
ALL(iq4_xs, I4X)
// unit mxfp4
ALL(mxfp4, MX4)
// unit q4_k_q6_k
PAIR(q4_k_q6_k, Q4K, Q6K)
// unit q5_k_q6_k
PAIR(q5_k_q6_k, Q5K, Q6K)
