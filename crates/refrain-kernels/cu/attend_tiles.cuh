// attend_tiles.cuh: attention over 16-bit keys and values on tensor cores, from one ring per warp in shared
// memory
//
// A tile is 16 positions. Its keys fill one slot of the ring, its values the next; while one slot is used,
// the copies into all others are in flight. Slots hold rows as the caches do, with the 16-byte chunks of a
// row swizzled so that the same chunk of eight rows has no bank conflicts.
//
// A query is split into two numbers of the cache's type, high and low part, in rows h and h + 8 of a matrix,
// and so is the weight of a value; the two products are added afterwards. This gives 22 significant bits with
// F16 and 16 with BF16 at no cost: the matrix has 16 rows and there are at most 8 heads.
#pragma once
#include "attend_seen.cuh"
#include "mma.cuh"
#include "tuning.cuh"

// Scores may exceed the running maximum by this much (log2) before the sums are rescaled.
const float SLACK = 8.0f;

template <typename T, int DIMS, int HEADS> struct Ring {
    static const u32 TILE = 16, CHUNKS = DIMS / 8, ROW_BYTES = 2 * DIMS, SLOT = TILE * ROW_BYTES;
    // The launcher picks one of these ring sizes by the GPU's shared memory.
    static const u32 MOST_SLOTS = ATTEND_RING_BYTES / SLOT, LEAST_SLOTS = ATTEND_SMALL_RING_BYTES / SLOT;
    static const u32 ALONE_TILES = 128 / DIMS;  // tiles per warp up to which a block works alone: 64 KiB
    static const u32 PITCH = DIMS + 8;  // of a warp's results: no bank conflicts between heads
    static const int BLOCKS = 2;
    static const bool HOLDS_QUERIES = DIMS <= 64;

    // Both parts of each query, and the factor of its scores.
    struct Queries {
        alignas(16) T parts[16][DIMS];
        float factor[8];
    };

    const T *k_cache, *v_cache;
    SharedPtr ring;
    u32 slots, lane;
    // The next copy: its number (in slots), its slot, and its tile's offset in the cache. Bit i of `missing`:
    // tile i (mod 32) has no block.
    u32 issued, slot_ahead, missing;
    u64 from;
    u32 ahead;

    inline static u32 swizzled(u32 row, u32 chunk) { return row * ROW_BYTES + 16 * (chunk ^ row % 8); }

    // Returns the larger magnitude as bits; magnitudes compare like their bits.
    inline static u32 greatest(float a, float b, u32 most) {
        return max(most, max(__float_as_uint(a) & 0x7fffffffu, __float_as_uint(b) & 0x7fffffffu));
    }

    // Stores elements `left` and `right` of a query whose largest magnitude has the bits `most`. The query is
    // scaled to about 2^7, where both parts are normal numbers.
    inline static void keep(Queries& to, u32 head, u32 left, u32 right, float a, float b, u32 most) {
        u32 exponent = most >> 23;
        exponent = exponent == 255 ? 134 : max(exponent, 8u);
        float up = __uint_as_float(261 - exponent << 23);
        if (left == 0) to.factor[head] = __uint_as_float(exponent - 7 << 23);
        keep_one(to, head, left, a * up);
        keep_one(to, head, right, b * up);
    }
    inline static void keep_one(Queries& to, u32 head, u32 i, float x) {
        u8* bytes = (u8*)to.parts;
        T high = from_f32<T>(x), low = from_f32<T>(x - to_f32(high));
        *(T*)(bytes + swizzled(head, i / 8) + i % 8 * 2) = high;
        *(T*)(bytes + swizzled(head + 8, i / 8) + i % 8 * 2) = low;
    }

    inline void plan(const Seen& seen, Tiles& tiles, const T* keys, const T* values, u8* space, u32 bytes, u32 of_warp) {
        k_cache = keys;
        v_cache = values;
        ring = shared_ptr(space);
        slots = bytes / SLOT;
        lane = of_warp;
        issued = slot_ahead = missing = 0;
        ahead = tiles.first;
        prepare(seen, tiles);
    }

    // Prefetches slots before the wait; loads that the previous launch has yet to issue queue after these.
    inline void prefetch(const Seen& seen, Tiles& tiles, bool all) {
#pragma unroll 1
        for (u32 i = 0; i < (all ? slots : slots * 2 / 3); i++) issue(seen, tiles);
    }

    // Prefetches the remaining slots after the wait.
    inline void prefetch_remaining(const Seen& seen, Tiles& tiles, bool had_all) {
#pragma unroll 1
        for (u32 i = had_all ? slots : slots * 2 / 3; i < slots; i++) issue(seen, tiles);
    }

    // Waits for the oldest slot in flight.
    inline void wait_for_first() const {
        if (slots == MOST_SLOTS) {
            copies_wait<MOST_SLOTS - 1>();
        } else {
            copies_wait<LEAST_SLOTS - 1>();
        }
        __syncwarp();
    }

    // Waits until no copy is in flight.
    inline static void drain() {
        copies_wait<0>();
        __syncwarp();
    }

    // Computes the location of the next tile.
    inline void prepare(const Seen& seen, Tiles& tiles) {
        if (ahead >= seen.end) return;
        u32 tile = issued / 2, bit = 1u << tile % 32;
        i32 block = tiles.next(seen, tile, lane);
        bool there = (u32)block < seen.n_blocks;
        missing = there ? missing & ~bit : missing | bit;
        u32 at = 8 * (lane % CHUNKS);
        from = seen.offset(there ? block : 0, ahead) + lane / CHUNKS * seen.head_dim + (at < seen.head_dim ? at : 0);
    }

    // Issues the next slot's copies: the keys of a tile, then its values.
    inline void issue(const Seen& seen, Tiles& tiles) {
        if (ahead < seen.end) {
            bool is_value = issued % 2 != 0;
            u32 row = lane / CHUNKS, chunk = lane % CHUNKS;
            bool there = (missing >> issued / 2 % 32 & 1) == 0 && 8 * chunk < seen.head_dim;
            const T* source = (is_value ? v_cache : k_cache) + from;
            SharedPtr to = ring + slot_ahead * SLOT;
            const u32 ROWS = 32 / CHUNKS;
#pragma unroll
            for (u32 i = 0; i < TILE; i += ROWS) {
                bool is_seen = there && seen.has(ahead + row + i);
                copy_async(to + swizzled(row + i, chunk), source, is_seen);
                source += ROWS * seen.head_dim;
            }
            issued++;
            if (is_value) {
                ahead += tiles.step;
                prepare(seen, tiles);
            }
        }
        copies_end_group();
        slot_ahead = slot_ahead + 1 == slots ? 0 : slot_ahead + 1;
    }

    float top, total, acc[DIMS / 8][4];

    inline void run(const Seen& seen, Tiles& tiles, const float (*)[DIMS], const Queries& queries, float cap) {
        top = NONE;
        total = 0.0f;
#pragma unroll
        for (u32 j = 0; j < DIMS / 8; j++) acc[j][0] = acc[j][1] = acc[j][2] = acc[j][3] = 0.0f;
        // Lane 8 i + r supplies row r of matrix i. Queries: rows r and r + 8 of one chunk, then of the next.
        // Keys: two chunks of rows r, then of rows r + 8. Values: both rows of one chunk, then of the next.
        u32 r = lane % 8, odd = lane / 8 % 2, upper = lane / 16, g = lane / 4, t = lane % 4;
        SharedPtr query_rows = shared_ptr(queries.parts) + (r + 8 * odd) * ROW_BYTES;
        u32 key_rows = (r + 8 * upper) * ROW_BYTES, value_rows = (r + 8 * odd) * ROW_BYTES;
        float factor = g < HEADS ? queries.factor[g] : 0.0f;
        u32 query[HOLDS_QUERIES ? DIMS / 16 : 1][4];
        if (HOLDS_QUERIES) {
#pragma unroll
            for (u32 j = 0; j < DIMS / 16; j++) {
                load_matrices(query[HOLDS_QUERIES ? j : 0], query_rows + 16 * (2 * j + upper ^ r));
            }
        }
        u32 n = 0;
#pragma unroll 1
        for (u32 tile = tiles.first; tile < seen.end; tile += tiles.step) {
            bool is_missing = (missing >> n++ % 32 & 1) != 0;
            wait_for_first();
            // All slots are in flight: the next to be refilled is the oldest.
            SharedPtr keys = ring + slot_ahead * SLOT + key_rows;
            float s[2][4] = {};
#pragma unroll
            for (u32 j = 0; j < DIMS / 16; j++) {
                u32 k[4];
                load_matrices(k, keys + 16 * (2 * j + odd ^ r));
                if (!HOLDS_QUERIES) load_matrices(query[0], query_rows + 16 * (2 * j + upper ^ r));
                multiply(s[0], query[HOLDS_QUERIES ? j : 0], k, T());
                multiply(s[1], query[HOLDS_QUERIES ? j : 0], k + 2, T());
            }
            __syncwarp();
            issue(seen, tiles);

            float p[2][2];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float score = (s[i / 2][i % 2] + s[i / 2][i % 2 + 2]) * factor;
                if (cap > 0.0f) score = capped(score, cap);
                p[i / 2][i % 2] = score;
            }
            if (is_missing || tile < seen.begin || tile + TILE > seen.end) {
#pragma unroll
                for (u32 i = 0; i < 4; i++) {
                    if (is_missing || !seen.has(tile + 8 * (i / 2) + 2 * t + i % 2)) p[i / 2][i % 2] = -inf_f32();
                }
            }
            float most = fmaxf(fmaxf(p[0][0], p[0][1]), fmaxf(p[1][0], p[1][1]));
            if (__ballot_sync(ALL_LANES, g < HEADS && most > top + SLACK) != 0) raise(most, n == 1);
            u32 weights[4];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float a = power_of_2(p[i][0] - top), b = power_of_2(p[i][1] - top);
                total += a + b;
                u32 high = pack(a, b, T());
                weights[2 * i] = high;
                weights[2 * i + 1] = pack(a - lower(high, T()), b - higher(high, T()), T());
            }

            wait_for_first();
            SharedPtr values = ring + slot_ahead * SLOT + value_rows;
#pragma unroll
            for (u32 j = 0; j < DIMS / 8; j += 2) {
                u32 v[4];
                load_matrices_transposed(v, values + 16 * (j + upper ^ r));
                multiply(acc[j], weights, v, T());
                multiply(acc[j + 1], weights, v + 2, T());
            }
            __syncwarp();
            issue(seen, tiles);
        }
    }

    inline static float lower(u32 word, F16) { return f16_to_f32((u16)word); }
    inline static float higher(u32 word, F16) { return f16_to_f32((u16)(word >> 16)); }
    inline static float lower(u32 word, BF16) { return __uint_as_float(word << 16); }
    inline static float higher(u32 word, BF16) { return __uint_as_float(word & 0xffff0000u); }

    // Rescales the sums to a new maximum score; the first tile has no sums yet.
    inline void raise(float most, bool is_first) {
        most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, 1));
        most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, 2));
        most = fmaxf(most, top);
        float down = power_of_2(top - most);
        top = most;
        if (is_first) return;
        total *= down;
#pragma unroll
        for (u32 j = 0; j < DIMS / 8; j++) {
#pragma unroll
            for (int i = 0; i < 4; i++) acc[j][i] *= down;
        }
    }

    // Stores the results over the ring, which is no longer used.
    inline void finish(float* sums, float2* shares) {
        total += __shfl_xor_sync(ALL_LANES, total, 1);
        total += __shfl_xor_sync(ALL_LANES, total, 2);
        u32 g = lane / 4, t = lane % 4;
        if (g >= HEADS) return;
        if (t == 0) shares[g] = make_float2(top, total);
#pragma unroll
        for (u32 j = 0; j < DIMS / 8; j++) {
            *(float2*)&sums[g * PITCH + 8 * j + 2 * t] = make_float2(acc[j][0] + acc[j][2], acc[j][1] + acc[j][3]);
        }
    }
};
