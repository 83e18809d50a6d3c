// attend_lanes.cuh: attention in f32 in the lanes of a warp, for f32 caches and the largest heads
//
// LANES lanes share a row of the caches, eight elements each, so one load instruction reads 32 / LANES rows.
// A tile is the set of rows that the warp has in flight. Rows of more than 256 elements are CHUNKS of 256.
#pragma once
#include "attend_seen.cuh"

// Eight elements of a row, in the cache's type.
template <typename T> struct Eight {
    uint4 words;

    inline void clear() { words = make_uint4(0, 0, 0, 0); }
    inline void load(const T* p) { words = *(const uint4*)p; }

    // Returns elements 4 i to 4 i + 3.
    inline void four(int i, float (&out)[4]) const {
        u32 a = i == 0 ? words.x : words.z, b = i == 0 ? words.y : words.w;
        T t[4];
        t[0].bits = (u16)a;
        t[1].bits = (u16)(a >> 16);
        t[2].bits = (u16)b;
        t[3].bits = (u16)(b >> 16);
#pragma unroll
        for (int j = 0; j < 4; j++) out[j] = to_f32(t[j]);
    }
};

template <> struct Eight<float> {
    float4 halves[2];

    inline void clear() { halves[0] = halves[1] = make_float4(0.0f, 0.0f, 0.0f, 0.0f); }
    inline void load(const float* p) {
        halves[0] = ((const float4*)p)[0];
        halves[1] = ((const float4*)p)[1];
    }
    inline void four(int i, float (&out)[4]) const {
        out[0] = halves[i].x;
        out[1] = halves[i].y;
        out[2] = halves[i].z;
        out[3] = halves[i].w;
    }
};

template <typename T, int HEADS> struct Ahead { static const int N = HEADS > 4 ? 2 : 4; };
template <int HEADS> struct Ahead<float, HEADS> { static const int N = 2; };

template <typename T, int DIMS, int HEADS> struct Lanes {
    static const int CHUNKS = DIMS > 256 ? DIMS / 256 : 1, LANES = DIMS / (8 * CHUNKS), AHEAD = Ahead<T, HEADS>::N;
    static const u32 ROWS = 32 / LANES, TILE = ROWS * AHEAD;
    static const u32 ALONE_TILES = 2;  // tiles per warp up to which a block works alone
    static const u32 PITCH = DIMS;  // of a warp's results
    // Two blocks per SM, except for eight heads, whose sums need too many registers.
    static const int BLOCKS = HEADS > 4 ? 1 : 2;

    struct Queries {};

    const T *k_cache, *v_cache;
    u32 lane, row, at;  // the lane's row among the ROWS of one load, and its first element in it
    u32 tile, bits;
    Eight<T> keys[AHEAD][CHUNKS], values[AHEAD][CHUNKS];
    float max[HEADS], sum[HEADS], acc[8 * HEADS * CHUNKS];  // [CHUNKS][HEADS][8]

    inline static void keep(Queries&, u32, u32, u32, float, float, u32) {}
    inline static u32 greatest(float, float, u32) { return 0; }

    // Bit i: the lane's i-th position in the tile is seen.
    inline u32 there(const Seen& seen, i32 block) const {
        u32 mask = 0;
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            if (seen.has(tile + i * ROWS + row)) mask |= 1u << i;
        }
        return (u32)block < seen.n_blocks ? mask : 0;
    }

    inline void load(Eight<T> (&rows)[AHEAD][CHUNKS], const T* cache, const Seen& seen, i32 block) const {
        const T* from = cache + seen.offset(bits != 0 ? block : 0, tile + row) + at;
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
#pragma unroll
            for (int c = 0; c < CHUNKS; c++) {
                rows[i][c].clear();
                bool there = (bits >> i & 1) != 0 && at + 256 * c < seen.head_dim;
                if (there) rows[i][c].load(from + (u64)(i * ROWS) * seen.head_dim + 256 * c);
            }
        }
    }

    i32 first_block;

    inline void plan(const Seen& seen, Tiles& tiles, const T* keys_of, const T* values_of, u8*, u32, u32 of_warp) {
        k_cache = keys_of;
        v_cache = values_of;
        lane = of_warp;
        row = lane / LANES;
        at = lane % LANES * 8;
        tile = tiles.first;
        first_block = tiles.next(seen, 0, lane);
        bits = there(seen, first_block);
    }

    // Plain loads go through the L1 cache, which is certain to hold new data only after the wait.
    inline void prefetch(const Seen&, Tiles&, bool) {}

    inline void prefetch_remaining(const Seen& seen, Tiles&, bool) {
        load(keys, k_cache, seen, first_block);
        load(values, v_cache, seen, first_block);
    }

    inline static void drain() {}

    inline void run(const Seen& seen, Tiles& tiles, const float (*turned)[DIMS], const Queries&, float cap) {
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            max[h] = NONE;
            sum[h] = 0.0f;
        }
#pragma unroll
        for (int i = 0; i < 8 * HEADS * CHUNKS; i++) acc[i] = 0.0f;
        u32 n = 1;
        i32 block = tiles.next(seen, n, lane);
#pragma unroll 1
        while (tile < seen.end) {
            float scores[HEADS][AHEAD];
#pragma unroll
            for (int i = 0; i < 2 * CHUNKS; i++) {
                float part_of[AHEAD][4];
#pragma unroll
                for (int a = 0; a < AHEAD; a++) keys[a][i / 2].four(i % 2, part_of[a]);
#pragma unroll
                for (int h = 0; h < HEADS; h++) {
                    float4 query = *(const float4*)&turned[h][at + 256 * (i / 2) + 4 * (i % 2)];
#pragma unroll
                    for (int a = 0; a < AHEAD; a++) {
                        float score = i == 0 ? __fmul_rn(query.x, part_of[a][0])
                                             : __fmaf_rn(query.x, part_of[a][0], scores[h][a]);
                        score = __fmaf_rn(query.y, part_of[a][1], score);
                        score = __fmaf_rn(query.z, part_of[a][2], score);
                        scores[h][a] = __fmaf_rn(query.w, part_of[a][3], score);
                    }
                }
            }
            u32 seen_bits = bits;
            tile += tiles.step;
            bits = there(seen, block);
            load(keys, k_cache, seen, block);
            i32 after = tiles.next(seen, ++n, lane);
            weigh(scores, seen_bits, cap);
            load(values, v_cache, seen, block);
            block = after;
        }
    }

    // Adds the values, weighted by their keys' scores.
    inline void weigh(float (&scores)[HEADS][AHEAD], u32 seen_bits, float cap) {
#pragma unroll
        for (int step = LANES / 2; step > 0; step >>= 1) {
#pragma unroll
            for (int h = 0; h < HEADS; h++) {
#pragma unroll
                for (int a = 0; a < AHEAD; a++) scores[h][a] += __shfl_xor_sync(ALL_LANES, scores[h][a], step);
            }
        }
        if (cap > 0.0f) {
#pragma unroll
            for (int h = 0; h < HEADS; h++) {
#pragma unroll
                for (int a = 0; a < AHEAD; a++) scores[h][a] = capped(scores[h][a], cap);
            }
        }
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            float top = max[h];
#pragma unroll
            for (int a = 0; a < AHEAD; a++) {
                // An unseen position has no weight.
                if ((seen_bits >> a & 1) == 0) scores[h][a] = -inf_f32();
                top = fmaxf(top, scores[h][a]);
            }
            float factor = power_of_2(max[h] - top);
            max[h] = top;
            sum[h] *= factor;
#pragma unroll
            for (int i = 0; i < 8 * CHUNKS; i++) acc[i / 8 * 8 * HEADS + 8 * h + i % 8] *= factor;
#pragma unroll
            for (int a = 0; a < AHEAD; a++) {
                scores[h][a] = power_of_2(scores[h][a] - top);
                sum[h] += scores[h][a];
            }
        }
#pragma unroll
        for (int a = 0; a < AHEAD; a++) {
#pragma unroll
            for (int i = 0; i < 2 * CHUNKS; i++) {
                float part_of[4];
                values[a][i / 2].four(i % 2, part_of);
#pragma unroll
                for (int h = 0; h < HEADS; h++) {
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        float& to = acc[i / 2 * 8 * HEADS + 8 * h + 4 * (i % 2) + e];
                        to = __fmaf_rn(scores[h][a], part_of[e], to);
                    }
                }
            }
        }
    }

    // Merges the warp's rows.
    inline void finish(float* sums, float2* shares) {
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            float all = max[h];
#pragma unroll
            for (int step = LANES; step < 32; step <<= 1) all = fmaxf(all, __shfl_xor_sync(ALL_LANES, all, step));
            float factor = power_of_2(max[h] - all);
            sum[h] *= factor;
#pragma unroll
            for (int step = LANES; step < 32; step <<= 1) sum[h] += __shfl_xor_sync(ALL_LANES, sum[h], step);
#pragma unroll
            for (int i = 0; i < 8 * CHUNKS; i++) acc[i / 8 * 8 * HEADS + 8 * h + i % 8] *= factor;
            if (lane == 0) shares[h] = make_float2(all, sum[h]);
        }
        u32 from = 0;
        if (LANES <= 16) from += halve<4 * HEADS, 16>();
        if (LANES <= 8) from += halve<2 * HEADS, 8>();
#pragma unroll
        for (int i = 0; i < 8 * HEADS * CHUNKS * LANES / 32; i += 2) {
            u32 to = from + i, chunk = to / (8 * HEADS), head = to / 8 % HEADS;
            *(float2*)&sums[head * PITCH + 256 * chunk + at + to % 8] = make_float2(acc[i], acc[i + 1]);
        }
    }

    // Butterfly step over 2 N sums: each lane keeps one half and sends the other half to its partner, which adds
    // it to its own. Returns the index of the first sum kept.
    template <int N, int STEP> inline u32 halve() {
        bool upper = (lane & STEP) != 0;
#pragma unroll
        for (int i = 0; i < N; i++) {
            float kept = upper ? acc[i + N] : acc[i], given = upper ? acc[i] : acc[i + N];
            acc[i] = kept + __shfl_xor_sync(ALL_LANES, given, STEP);
        }
        return upper ? N : 0;
    }
};
