// batch.cu: up to 64 rows in 16 bits times up to four packed weights, each weight read once
//
//   y0 .. y3   [m, n]         f32; null behind the last, and all of them with splits. With a gate y0 alone, the same as
//                             narrow, or null
//   partials   [S, m, sum n]  f32; null when S, the number of splits, is 1 (gemm_reduce_f32 adds them)
//   narrow     [m, n]         BF16, in planes of narrow_rows rows: act(x w0^T) * (x w1^T) with a gate; else null
//   x          [m, k]         BF16, in planes of M rows (planes.cuh); rows behind m are read and used for nothing
//   w0 .. w3   [n, k]         quantised and packed (packed.cuh); null behind the last
//   p          sizes; see Params
//
// The products of a decode step of many sequences. A block has ROWS rows of weights and all rows of x, and walks along k in
// stages of PLANES times 128 columns, which a few bulk copies bring to shared memory. Its warps have 16 rows of weights
// each; where ROWS is small, several warps share these and split the planes of a stage. Weights are asked for before the
// kernel waits for x, and decoded to BF16 in registers, right where tensor cores take them.
//
// Which elements meet in one multiplication is free as long as both sides agree. Here lane 4 g + t has row g and of each
// plane the columns 32 t .. 32 t + 31, four of them at a time: that is how packed weights lie, so nothing is exchanged between
// lanes.
//
// Launch    grid (tiles of ROWS of each weight, S), block (32 WARPS + 32), shared as shared_bytes of src/batch.rs says.
//           With a gate a tile has half as many rows of each of both.
// Requires  x, weights at multiples of 16 bytes; k a multiple of 128, and whole blocks of a quantised type; weights are not
//           written by any launch; with a gate S is 1 and both weights have the same n
// Aliasing  none
// Sums in f32 in an order that follows from the sizes alone: same bits every run. Capture: safe.
#include "functions.cuh"
#include "mma.cuh"
#include "overlap.cuh"
#include "packed.cuh"
#include "planes.cuh"
#include "tuning.cuh"

const u32 PARTS = 4;

struct Params {
    u32 m;
    u32 k;
    u32 n[PARTS];     // rows of each weight; 0 behind the last
    u32 per_split;    // stages
    u32 gate;         // 0: none, 1: SiLU, 2: GELU
    u32 narrow_rows;  // 0: narrow is dense
};

// Stages in shared memory, filled by copies of whole pieces. A warp of its own asks for them, one lane of it: others are
// free to compute. Before compute capability 9.0 all threads copy 16 bytes each.
#if !defined(REFRAIN_ON_HOST) && __CUDA_ARCH__ >= 900
template <u32 STAGES, u32 WARPS> struct Stages {
    u32 data, full, empty;

    inline void init(u8* shared) {
        __shared__ u64 bars[2 * STAGES];
        data = shared_address(shared);
        full = shared_address(bars);
        empty = full + 8 * STAGES;
        if (threadIdx.x == 0) {
#pragma unroll
            for (u32 i = 0; i < STAGES; i++) {
                asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(full + 8 * i) : "memory");
                asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(empty + 8 * i), "n"(WARPS) : "memory");
            }
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        }
        __syncthreads();
    }
    inline void expect(u32 slot, u32 bytes) const {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(full + 8 * slot), "r"(bytes) : "memory");
    }
    inline void copy(u32 slot, u32 offset, const void* from, u32 bytes, bool once) const {
        u32 bar = full + 8 * slot;
        if (once) {
            // Weights are read once in a step: what else is in the cache should stay there.
            u64 policy;
            asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
            asm volatile(
                "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], "
                "%4;" ::"r"(data + offset),
                "l"(from), "r"(bytes), "r"(bar), "l"(policy)
                : "memory");
        } else {
            asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                             data + offset),
                         "l"(from), "r"(bytes), "r"(bar)
                         : "memory");
        }
    }
    inline static void wait_for(u32 barrier, u32 turn) {
        asm volatile(
            "{ .reg .pred p; \n"
            "again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; \n"
            "@p bra done; \n"
            "bra again; \n"
            "done: }" ::"r"(barrier),
            "r"(turn & 1)
            : "memory");
    }

    // All stages from `begin` to `end`. load_w, load_x: (stage, slot). compute: (slot).
    template <typename LoadW, typename LoadX, typename Compute>
    inline void run(u32 begin, u32 end, LoadW load_w, LoadX load_x, Compute compute) const {
        u32 warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
        if (warp == WARPS) {
            if (lane == 0) {
#pragma unroll 1
                for (u32 s = 0; s < STAGES && begin + s < end; s++) load_w(begin + s, s);
                wait_for_previous();
                // What kernels before have written by plain stores is read by bulk copies.
                asm volatile("fence.proxy.async;" ::: "memory");
#pragma unroll 1
                for (u32 s = 0; s < STAGES && begin + s < end; s++) load_x(begin + s, s);
                u32 slot = 0, turn = 0;
#pragma unroll 1
                for (u32 stage = begin + STAGES; stage < end; stage++) {
                    wait_for(empty + 8 * slot, turn);
                    load_w(stage, slot);
                    load_x(stage, slot);
                    if (++slot == STAGES) {
                        slot = 0;
                        turn++;
                    }
                }
            }
            __syncwarp();
            return;
        }
        wait_for_previous();
        u32 slot = 0, turn = 0;
#pragma unroll 1
        for (u32 stage = begin; stage < end; stage++) {
            wait_for(full + 8 * slot, turn);
            compute(stage, slot);
            __syncwarp();
            if (lane == 0) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(empty + 8 * slot) : "memory");
            if (++slot == STAGES) {
                slot = 0;
                turn++;
            }
        }
    }
};
#else
template <u32 STAGES, u32 WARPS> struct Stages {
    u8* data;

    inline void init(u8* shared) { data = shared; }
    inline static void expect(u32, u32) {}
    inline void copy(u32, u32 offset, const void* from, u32 bytes, bool) const {
        for (u32 i = 16 * threadIdx.x; i < bytes; i += 16 * 32 * (WARPS + 1)) {
            copy_async(data + offset + i, (const u8*)from + i, true);
        }
    }
    template <typename LoadW, typename LoadX, typename Compute>
    inline void run(u32 begin, u32 end, LoadW load_w, LoadX load_x, Compute compute) const {
        wait_for_previous();
#pragma unroll 1
        for (u32 s = 0; s < STAGES; s++) {
            if (begin + s < end) {
                load_w(begin + s, s);
                load_x(begin + s, s);
            }
            copies_end_group();
        }
        u32 slot = 0;
#pragma unroll 1
        for (u32 stage = begin; stage < end; stage++) {
            // Groups end in order: all but the newest STAGES - 1 are there.
            copies_wait<STAGES - 1>();
            __syncthreads();
            if (threadIdx.x / 32 < WARPS) compute(stage, slot);
            // The slot is filled again only after everybody has read it.
            __syncthreads();
            if (stage + STAGES < end) {
                load_w(stage + STAGES, slot);
                load_x(stage + STAGES, slot);
            }
            copies_end_group();
            slot = slot + 1 == STAGES ? 0 : slot + 1;
        }
    }
};
#endif

// Two bytes of a word, from byte `at` on, times scale and with an offset, as numbers of 16 bits. A byte in the mantissa of a
// power of two is the power and the byte; the offset takes the power back. BASE is 128 for bytes below 128, else 2^15: what
// rounding the offset costs is far less than what rounding to 16 bits does.
template <u32 BASE> inline u32 decode_two(u32 word, u32 at, float scale, float offset) {
    const u32 POWER = BASE == 128 ? 0x43000000u : 0x47000000u, FIRST = BASE == 128 ? 0x7044u : 0x7404u;
    const u32 SHIFT = BASE == 128 ? 8 : 4;
    float low = __uint_as_float(__byte_perm(word, POWER, FIRST | at << SHIFT));
    float high = __uint_as_float(__byte_perm(word, POWER, FIRST | (at + 1) << SHIFT));
    return pack(__fmaf_rn(low, scale, offset), __fmaf_rn(high, scale, offset), BF16());
}

// Packed weights. A stage has tiles of eight rows, each with all its units of the stage one behind the other.
template <typename Q> struct Quantised {
    static const u32 UNIT_PLANES = Q::COLS / PLANE;

    template <u32 ROWS, u32 PLANES> inline static constexpr u32 stage_bytes() {
        return ROWS / TILE_ROWS * (PLANES / UNIT_PLANES) * Q::BYTES;
    }

    // Bytes of a stage that the rows from `first` on have, and the copies of them to `offset`.
    template <u32 ROWS, u32 PLANES> inline static u32 bytes(u32 first, u32 n, u32 planes) {
        u32 tiles = min(ROWS / TILE_ROWS, (n - min(first, n) + TILE_ROWS - 1) / TILE_ROWS);
        return tiles * (planes / UNIT_PLANES) * Q::BYTES;
    }
    template <u32 ROWS, u32 PLANES, u32 STAGE_ROWS, typename S>
    inline static void load(const S& stages, u32 slot, u32 offset, const u8* w, u32 first, u32 n, u32 k, u32 plane,
                            u32 planes) {
        const u32 UNITS = PLANES / UNIT_PLANES;
        u32 units = k / Q::COLS, unit = plane / UNIT_PLANES;
#pragma unroll 1
        for (u32 tile = 0; tile < ROWS / TILE_ROWS; tile++) {
            u32 of_all = first / TILE_ROWS + tile;
            if (of_all * TILE_ROWS < n) {
                const u8* from = w + ((u64)of_all * units + unit) * Q::BYTES;
                stages.copy(slot, offset + tile * UNITS * Q::BYTES, from, planes / UNIT_PLANES * Q::BYTES, true);
            }
        }
    }

    Sub first, second;
    float offsets[2][2];  // of both, for each half of 16 elements

    // Quants below 128 in the first half: those of four bits.
    static const u32 BASE = !Q::SIGNED && Q::HIGH == 0 ? 128 : 32768;

    // 16 rows, from tile 2 `group` on, of one plane.
    template <u32 ROWS, u32 PLANES> inline void open(const u8* stage, u32 group, u32 plane, u32 lane) {
        const u32 UNITS = PLANES / UNIT_PLANES;
        u32 unit = plane / UNIT_PLANES, c = plane % Q::SUBS;
        const u8* at = stage + (2 * group * UNITS + unit) * Q::BYTES;
        first = Q::load(at, c, lane);
        second = Q::load(at + UNITS * Q::BYTES, c, lane);
        if (Q::SIGNED) {
#pragma unroll
            for (int i = 0; i < 8; i++) {
                first.q[i] ^= 0x80808080u;
                second.q[i] ^= 0x80808080u;
            }
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float base = Q::SIGNED ? 32896.0f : half == 0 ? (float)BASE : 32768.0f;
            offsets[0][half] = __fmaf_rn(first.scale[half], -base, -first.min);
            offsets[1][half] = __fmaf_rn(second.scale[half], -base, -second.min);
        }
    }

    template <u32 B> inline void decode(u32* a, u32 word) const {
        u32 half = word / 4;
        a[0] = decode_two<B>(first.q[word], 0, first.scale[half], offsets[0][half]);
        a[1] = decode_two<B>(second.q[word], 0, second.scale[half], offsets[1][half]);
        a[2] = decode_two<B>(first.q[word], 2, first.scale[half], offsets[0][half]);
        a[3] = decode_two<B>(second.q[word], 2, second.scale[half], offsets[1][half]);
    }

    // The left sides of the two multiplications of chunk j.
    inline void get(u32 (*a)[4], u32, u32, u32 j) const {
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            if (j < 2) decode<BASE>(a[i], 2 * j + i);
            else decode<32768>(a[i], 2 * j + i);
        }
    }
};

// How a block is divided for up to M rows of x; src/batch.rs has the same numbers.
template <typename W, int M> struct Division {
    static const u32 WARPS = M == 64 ? 16 : 8;  // and one that asks for copies
    static const u32 GROUPS = M == 8 ? 2 : M == 16 ? 4 : 8;  // of 16 rows of weights
    static const u32 SLICES = WARPS / GROUPS;  // of a stage's planes
    static const u32 ROWS = 16 * GROUPS;
    // A warp has one plane of a stage, or a whole unit.
    static const u32 PLANES = SLICES > W::UNIT_PLANES ? SLICES : W::UNIT_PLANES;
    static const u32 X_BYTES = M * PLANES * PLANE_BYTES;
    static const u32 W_BYTES = W::template stage_bytes<ROWS, PLANES>();
    static const u32 STAGE = W_BYTES + X_BYTES;
    static const u32 FITTING = (M == 64 ? 2 : 1) * BATCH_SHARED_BYTES / STAGE;
    static const u32 STAGES = FITTING < 2 ? 2 : FITTING > 6 ? 6 : FITTING;
    static const u32 PITCH = ROWS + 4;  // of sums in shared memory: rows of x that a warp writes at once share no bank
    static_assert(SLICES * M * PITCH * 4 <= STAGES * STAGE, "sums take the place of stages");
};

template <typename W, int M>
inline void batch(float* const* ys, float* partials, u16* narrow, const u8* x, const u8* const* ws, const Params& p) {
    typedef Division<W, M> D;
    const u32 ROWS = D::ROWS, PLANES = D::PLANES, STAGES = D::STAGES, THREADS = 32 * D::WARPS + 32;
    const u32 OWN = PLANES / D::SLICES;  // planes of a warp
    DYNAMIC_SHARED(shared);
    let_next_start();
    Stages<STAGES, D::WARPS> stages;
    stages.init(shared);

    // Which rows of which weight.
    u32 per_tile = p.gate != 0 ? ROWS / 2 : ROWS, tile = blockIdx.x, begin_of_part = 0, all = 0;
    const u8* w = ws[0];
    float* y = ys[0];
    u32 n = p.n[0], part = 0;
#pragma unroll
    for (u32 i = 0; i + 1 < PARTS; i++) {
        u32 tiles = (p.n[i] + per_tile - 1) / per_tile;
        if (p.gate == 0 && part == i && tile >= tiles) {
            tile -= tiles;
            part = i + 1;
            begin_of_part += p.n[i];
            w = ws[i + 1];
            y = ys[i + 1];
            n = p.n[i + 1];
        }
    }
#pragma unroll
    for (u32 i = 0; i < PARTS; i++) all += p.n[i];
    u32 first = tile * per_tile, n_planes = p.k / PLANE, n_stages = (n_planes + PLANES - 1) / PLANES;
    u32 begin = blockIdx.y * p.per_split, end = min(begin + p.per_split, n_stages);

    auto load_w = [&](u32 stage, u32 slot) {
        u32 plane = stage * PLANES, planes = min(PLANES, n_planes - plane), offset = slot * D::STAGE;
        u32 x_bytes = M * planes * PLANE_BYTES;
        if (p.gate == 0) {
            stages.expect(slot, x_bytes + W::template bytes<ROWS, PLANES>(first, n, planes));
            W::template load<ROWS, PLANES, ROWS>(stages, slot, offset, w, first, n, p.k, plane, planes);
        } else {
            const u32 HALF = ROWS / 2;
            stages.expect(slot, x_bytes + 2 * W::template bytes<HALF, PLANES>(first, n, planes));
            W::template load<HALF, PLANES, ROWS>(stages, slot, offset, w, first, n, p.k, plane, planes);
            W::template load<HALF, PLANES, ROWS>(stages, slot, offset + D::W_BYTES / 2, ws[1], first, n, p.k, plane, planes);
        }
    };
    auto load_x = [&](u32 stage, u32 slot) {
        u32 plane = stage * PLANES, planes = min(PLANES, n_planes - plane);
        const u8* from = x + (u64)plane * M * PLANE_BYTES;
        stages.copy(slot, slot * D::STAGE + D::W_BYTES, from, M * planes * PLANE_BYTES, false);
    };

    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    u32 group = warp % D::GROUPS, slice = warp / D::GROUPS;
    // Two chains where there are few: a multiplication waits for the one before it.
    const u32 CHAINS = M == 8 ? 2 : 1;
    float acc[CHAINS][M / 8][4] = {};
    auto compute = [&](u32 stage, u32 slot) {
        const u8* weights = shared + slot * D::STAGE;
#pragma unroll
        for (u32 own = 0; own < OWN; own++) {
            u32 plane = slice * OWN + own;
            if (stage * PLANES + plane < n_planes) {
                const u8* rows = weights + D::W_BYTES + plane * M * PLANE_BYTES;
                W left;
                left.template open<ROWS, PLANES>(weights, group, plane, lane);
#pragma unroll
                for (u32 j = 0; j < 4; j++) {
                    u32 a[2][4];
                    left.get(a, g, t, j);
#pragma unroll
                    for (u32 i = 0; i < M / 8; i++) {
                        uint4 b = *(const uint4*)(rows + chunk_at(8 * i + g, t, j));
                        const u32 halves[2][2] = {{b.x, b.y}, {b.z, b.w}};
                        multiply(acc[0][i], a[0], halves[0], BF16());
                        multiply(acc[CHAINS - 1][i], a[1], halves[1], BF16());
                    }
                }
            }
        }
    };
    stages.run(begin, end, load_w, load_x, compute);
    __syncthreads();

    // Sums of the slices side by side in shared memory, then out along the rows of weights. Every stage was waited for.
    float* sums = (float*)shared;
    u32 row = 16 * group + g;
    if (warp < D::WARPS) {
#pragma unroll
        for (u32 i = 0; i < M / 8; i++) {
            float* to = sums + (slice * M + 8 * i + 2 * t) * D::PITCH + row;
            float v[4];
#pragma unroll
            for (int e = 0; e < 4; e++) v[e] = CHAINS == 2 ? acc[0][i][e] + acc[CHAINS - 1][i][e] : acc[0][i][e];
            to[0] = v[0];
            to[D::PITCH] = v[1];
            to[8] = v[2];
            to[D::PITCH + 8] = v[3];
        }
    }
    __syncthreads();
    auto sum_of = [&](u32 of, u32 column) {
        float sum = 0.0f;
#pragma unroll
        for (u32 s = 0; s < D::SLICES; s++) sum += sums[(s * M + of) * D::PITCH + column];
        return sum;
    };
    if (p.gate != 0) {
        for (u32 i = threadIdx.x; i < p.m * (ROWS / 2); i += THREADS) {
            u32 of = i / (ROWS / 2), column = i % (ROWS / 2);
            if (first + column >= n) continue;
            float gate = sum_of(of, column), up = sum_of(of, ROWS / 2 + column);
            float value = (p.gate == 1 ? silu(gate) : gelu_tanh(gate)) * up;
            narrow[narrow_at(of, first + column, n, p.narrow_rows)] = from_f32<BF16>(value).bits;
            if (y != nullptr) y[(u64)of * n + first + column] = value;
        }
        return;
    }
    u64 stride = n;
    if (partials != nullptr) {
        stride = all;
        y = partials + (u64)blockIdx.y * p.m * all + begin_of_part;
    }
    for (u32 i = threadIdx.x; i < p.m * ROWS; i += THREADS) {
        u32 of = i / ROWS, column = i % ROWS;
        if (first + column < n) y[of * stride + first + column] = sum_of(of, column);
    }
}

#define BATCH(name, W, M)                                                                                   \
    extern "C" __global__ __launch_bounds__(M == 64 ? 544 : 288, M == 64 ? 1 : 2) void batch_m##M##_##name(  \
        float* y0, float* y1, float* y2, float* y3, float* partials, u16* narrow, const u8* x, const u8* w0, \
        const u8* w1, const u8* w2, const u8* w3, Params p) {                                               \
        float* const y[PARTS] = {y0, y1, y2, y3};                                                           \
        const u8* const w[PARTS] = {w0, w1, w2, w3};                                                        \
        batch<W, M>(y, partials, narrow, x, w, p);                                                          \
    }
#define ALL(name, W)   \
    BATCH(name, W, 8)  \
    BATCH(name, W, 16) \
    BATCH(name, W, 32) \
    BATCH(name, W, 64)

// unit q4_0
ALL(q4_0, Quantised<PackedQ4_0>)
// unit q4_1
ALL(q4_1, Quantised<PackedQ4_1>)
// unit q5_0
ALL(q5_0, Quantised<PackedQ5_0>)
// unit q5_1
ALL(q5_1, Quantised<PackedQ5_1>)
// unit q8_0
ALL(q8_0, Quantised<PackedQ8_0>)
// unit q4_k
ALL(q4_k, Quantised<PackedQ4_K>)
// unit q5_k
ALL(q5_k, Quantised<PackedQ5_K>)
// unit q6_k
ALL(q6_k, Quantised<PackedQ6_K>)
