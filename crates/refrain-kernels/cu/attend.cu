// attend.cu: attention of decoded tokens: norm and RoPE of q and k, the append to the KV cache, and
// attention, in one launch
//
//   y[i, h] = softmax(scale q[i, h] . k) v over the positions that row i sees, including its own
//
//   y           [n, n_heads, head_dim]                      f32, or null: only narrow is written
//   partials    [n, n_heads, n_splits, head_dim / 4]        Partial; scratch
//   counters    [n, n_groups, WARPS]                        u32; zero before the first launch and after each
//   k_cache, v_cache  [n_blocks, n_kv_heads, kv_block, head_dim]  T
//   q           [n, n_heads, head_dim]                      f32, rows (heads) of consecutive elements
//   k, v        [n, n_kv_heads, head_dim]                   f32, likewise; or null: the caches already hold them
//   positions, seqs   [n]                                   i32; negative: nothing is appended, y gets zeros
//   tables      [n_seqs, max_blocks]                        i32
//   inv_freq    [n_dims / 2]                                f32
//   q_norm, k_norm, v_norm    [head_dim]                    f32, or null: no norm
//   sinks       [n_heads]                                   f32, a score of each head without a value; or null
//   narrow      [n, n_heads, head_dim]                      y rounded to F16 or BF16 for the next matmul, dense
//                                                           or in planes (planes.cuh); or null
//
// Heads of q, k and v are RMS-normed, and those of q and k rotated (turn.cuh). Key and value are rounded to T
// and written to the caches at the row's position; if k and v are null, the kernel reads them from there. The
// result is the same as append followed by attention.
//
// A block has one KV head, up to per_block of its query heads, and every n-th tile of the positions. The
// context length determines n (1 in short contexts, at most n_splits) and which block computes and stores the
// new key and value. That block reads them from shared memory, so no block reads what another block of the
// launch writes. With several blocks, each writes its partials and increments a counter; the last one merges
// all partials in block order and resets the counter. 16-bit caches use tensor cores (attend_tiles.cuh); f32
// caches and the largest heads use FMA in the lanes (attend_lanes.cuh).
//
// Launch       grid (n_splits n_groups or more, n), with n_groups = n_kv_heads ceil(group / per_block); block
//              (256), shared WARPS * warp_bytes. Surplus blocks exit after their wait (src/attend.rs gives
//              the reason for them)
// Requires     head_dim a multiple of 8, at most DIMS; kv_block a power of two, at least 16; per_block at
//              most HEADS; n_splits a power of two; caches and partials 16-byte aligned; all rows of
//              different sequences. inv_freq and norms are weights: the kernel reads them before its wait. It
//              also reads positions, seqs and tables before the wait, as a guess that it checks after the
//              wait, and loads the first cache tiles by that guess: earlier steps wrote everything before a
//              row's own position. A position whose block is out of range is neither seen nor written
// Aliasing     none
// Accumulation scores, sums and partials in f32. On tensor cores, queries and softmax weights are split into
//              two 16-bit numbers
// Determinism  same bits every run: the order of additions depends only on the context length and the grid
// Capture      safe: the grid is fixed and all lengths are read on the device
#include "attend_lanes.cuh"
#include "attend_tiles.cuh"
#include "last.cuh"
#include "planes.cuh"
#include "reduce.cuh"
#include "turn.cuh"
#include "view.cuh"

const u32 MAX_TILE = 16;
// A head uses more than 2^MERGED_SHIFT blocks only where each then has at least half the work of a block that
// works alone: their partials are merged in batches.
const u32 MERGED_SHIFT = 4;

struct Attend {
    u32 n_heads, per_block;
    u32 splits_shift;  // n_splits = 1 << splits_shift
    u32 window;  // 0: no window
    float scale;
    float softcap;  // 0: none
    u32 n_dims, interleaved;
    float magnitude, eps;
    u32 kv_shift;  // kv_block = 1 << kv_shift
    u32 alone;     // 1: the next kernel starts only when this one has ended
    u32 early;     // 1: prefetch the whole ring before the wait; 0: two thirds of it
    u32 warp_bytes;
    u32 narrow_bf16;  // narrow is BF16, else F16
    u32 narrow_rows;  // rows in a plane of narrow; 0: dense
    Pages pages;
};

// Destination of a row's results, stored four elements at a time.
struct Result {
    float* y;
    u16* narrow;
    u32 row, n_cols, plane_rows;
    bool bf16;

    inline void store(u32 column, float4 x) const {
        if (y != nullptr) {
            float* to = y + (u64)row * n_cols + column;
            to[0] = x.x;
            to[1] = x.y;
            to[2] = x.z;
            to[3] = x.w;
        }
        if (narrow != nullptr) {
            uint2 words = bf16 ? make_uint2(pack(x.x, x.y, BF16()), pack(x.z, x.w, BF16()))
                               : make_uint2(pack(x.x, x.y, F16()), pack(x.z, x.w, F16()));
            narrow_store(narrow, row, column, n_cols, plane_rows, words.x, words.y);
        }
    }
};

#ifndef REFRAIN_ON_HOST
// Returns the maximum over all lanes.
inline u32 warp_most(u32 x) {
    u32 most;
    asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(most) : "r"(x));
    return most;
}
#else
struct Most {
    inline u32 operator()(u32 a, u32 b) const { return max(a, b); }
};
inline u32 warp_most(u32 x) { return warp_reduce(x, Most()); }
#endif

// A block's partial result for four elements of a head.
struct Partial {
    float4 sum, scale;  // scale: top and total
};

// Adds every GROUPS-th of n partials, which are `stride` apart.
template <u32 GROUPS> inline void add_partials(Sum& all, const Partial* partials, u32 first, u32 n, u32 stride) {
    const u32 BATCH = GROUPS == 1 ? 8 : 16 / GROUPS;  // partials loaded at once
#pragma unroll 1
    for (u32 b = first; b < n; b += GROUPS * BATCH) {
        Partial found[BATCH];
#pragma unroll
        for (u32 j = 0; j < BATCH; j++) {
            u32 from = b + j * GROUPS;
            found[j] = partials[min(from, n - 1) * stride];
            if (from >= n) found[j].scale = make_float4(NONE, 0.0f, 0.0f, 0.0f);
        }
        float top = all.top;
#pragma unroll
        for (u32 j = 0; j < BATCH; j++) top = fmaxf(top, found[j].scale.x);
        all.scale_to(top);
#pragma unroll
        for (u32 j = 0; j < BATCH; j++) all.add(make_float2(found[j].scale.x, found[j].scale.y), found[j].sum);
    }
}

template <typename T, int DIMS, int HEADS, typename Core>
inline void attend(float* y, float* partials, u32* counters, T* k_cache, T* v_cache, const float* q, const float* k,
                   const float* v, const i32* positions, const i32* seqs, const i32* tables, const float* inv_freq,
                   const float* q_norm, const float* k_norm, const float* v_norm, u16* narrow, const Rows& q_rows,
                   const Rows& k_rows, const Rows& v_rows, const Attend& s, const float* sinks) {
    const u32 PAIRS = DIMS / 64;                          // rotation pairs per lane of a head
    const u32 ITEMS = (HEADS + 2 + WARPS - 1) / WARPS;    // heads that a warp prepares: queries, key, value
    const u32 KEY = HEADS, VALUE = HEADS + 1, TILE = Core::TILE;
    const u32 FOURS = DIMS / 4, ALL_FOURS = HEADS * FOURS;

    DYNAMIC_SHARED(space);  // warp_bytes per warp: its ring, then its results
    // Queries, key and value after norm and rotation; zero past head_dim.
    alignas(16) __shared__ float turned[HEADS + 2][DIMS];
    __shared__ typename Core::Queries queries;
    __shared__ float2 shares[WARPS][8];  // of each warp's heads: the largest score and the total weight
    __shared__ float new_scores[8];

    if (s.alone == 0) let_next_start();
    const Pages& pages = s.pages;
    u32 row = blockIdx.y, split = blockIdx.x & ((1u << s.splits_shift) - 1), head_dim = pages.head_dim;
    u32 group = s.n_heads / pages.n_kv_heads, chunks = (group + s.per_block - 1) / s.per_block;
    u32 member_of = blockIdx.x >> s.splits_shift, n_groups = pages.n_kv_heads * chunks;
    if (member_of >= n_groups) {
        wait_for_previous();
        return;
    }
    u32 kv_head = member_of / chunks, chunk = member_of % chunks;
    u32 first_head = kv_head * group + chunk * s.per_block;
    u32 n_heads = min(s.per_block, (kv_head + 1) * group - first_head);
    // Broadcast from lane 0, so that the compiler knows the value is warp-uniform.
    u32 warp = __shfl_sync(ALL_LANES, threadIdx.x / 32, 0), lane = threadIdx.x % 32, half = s.n_dims / 2;

    // The last warps have the fewest tiles, so they get the other work first.
    u32 from_last = WARPS - 1 - warp;

    // The elements of each head that this lane holds, the addresses of its warp's heads, and their norm
    // weights.
    u32 left[PAIRS], right[PAIRS];
    float freqs[PAIRS];
#pragma unroll
    for (int j = 0; j < PAIRS; j++) {
        u32 i = lane + 32 * j;
        bool apart = i < half && s.interleaved == 0;
        left[j] = apart ? i : 2 * i;
        right[j] = apart ? i + half : 2 * i + 1;
        freqs[j] = i < half ? inv_freq[i] : 0.0f;
    }
    const float* heads[ITEMS];
    float weights[ITEMS][PAIRS][2];
#pragma unroll
    for (int t = 0; t < ITEMS; t++) {
        u32 item = from_last + WARPS * t;
        heads[t] = nullptr;
        const float* norm = nullptr;
        if (item < n_heads) {
            heads[t] = q + q_rows.start(row * s.n_heads + first_head + item);
            norm = q_norm;
        } else if (item == KEY && k != nullptr) {
            heads[t] = k + k_rows.start(row * pages.n_kv_heads + kv_head);
            norm = k_norm;
        } else if (item == VALUE && k != nullptr) {
            heads[t] = v + v_rows.start(row * pages.n_kv_heads + kv_head);
            norm = v_norm;
        }
#pragma unroll
        for (int j = 0; j < PAIRS; j++) {
            bool there = norm != nullptr && lane + 32 * j < head_dim / 2;
            weights[t][j][0] = there ? norm[left[j]] : 1.0f;
            weights[t][j][1] = there ? norm[right[j]] : 1.0f;
        }
    }
    // Scores are scaled for exp2, or for the softcap's tanh.
    float q_scale = s.softcap > 0.0f ? s.scale / s.softcap : s.scale * LOG2_E, cap = s.softcap * LOG2_E;

    // Position, sequence and table are usually final long before the kernel that this launch waits for ends.
    // Everything derived from them is computed from their current values, and recomputed if they differ after
    // the wait.
    i32 position = __shfl_sync(ALL_LANES, peek(positions + row), 0);
    i32 seq = __shfl_sync(ALL_LANES, peek(seqs + row), 0);
    Seen seen;
    seen.max_blocks = pages.max_blocks;
    seen.n_blocks = pages.n_blocks;
    seen.n_kv_heads = pages.n_kv_heads;
    seen.head_dim = head_dim;
    seen.kv_shift = s.kv_shift;
    seen.kv_head = kv_head;
    u8* own = space + warp * s.warp_bytes;
    Core core;
    Tiles tiles;
    bool is_row, holds_new, has_new;
    u32 blocks_shift;
    i32 new_block;
    float sines[PAIRS], cosines[PAIRS], pairs[ITEMS][PAIRS][2];
#pragma unroll 1
    for (;;) {
        is_row = position >= 0 && seq >= 0 && (u32)seq < pages.n_seqs;
        seen.table = tables + (is_row ? (u64)seq * pages.max_blocks : 0);
        seen.end = is_row ? (u32)position : 0;
        seen.begin = s.window != 0 && seen.end >= s.window ? seen.end + 1 - s.window : 0;
        // Tiles start at multiples of their size.
        u32 start = seen.begin / MAX_TILE * MAX_TILE;
        u32 more = (seen.end - start) / (Core::ALONE_TILES * WARPS * TILE);
        blocks_shift = more == 0 ? 0 : min(s.splits_shift, max(MERGED_SHIFT, 32 - __clz(more)));
        // Idle blocks get no tiles.
        bool works = is_row && split >> blocks_shift == 0;
        tiles.first = works ? start + ((warp << blocks_shift) + split) * TILE : seen.end;
        tiles.step = (WARPS << blocks_shift) * TILE;
        tiles.held = seen.peek_block_of(tiles.position(lane));
        holds_new = works && split == (1u << blocks_shift) - 1;
#pragma unroll
        for (int j = 0; j < PAIRS; j++) {
            if (lane + 32 * j < half) turn_of(position, freqs[j], s.magnitude, sines[j], cosines[j]);
        }
        core.plan(seen, tiles, k_cache, v_cache, own, s.warp_bytes, lane);
        core.prefetch(seen, tiles, s.early != 0);

        wait_for_previous();
#pragma unroll
        for (int t = 0; t < ITEMS; t++) {
#pragma unroll
            for (int j = 0; j < PAIRS; j++) {
                bool there = heads[t] != nullptr && lane + 32 * j < head_dim / 2;
                pairs[t][j][0] = there ? heads[t][left[j]] : 0.0f;
                pairs[t][j][1] = there ? heads[t][right[j]] : 0.0f;
            }
        }
        // Keeps the compiler from issuing other loads first.
        __syncwarp();
        i32 position_now = positions[row], seq_now = seqs[row];
        i32 held_now = seen.block_of(tiles.position(lane));
        tiles.ahead = seen.block_of(tiles.position(32 + lane));
        new_block = holds_new && seen.is_listed(seen.end) ? seen.table[seen.end >> s.kv_shift] : -1;
        core.prefetch_remaining(seen, tiles, s.early != 0);
        bool same = position == position_now && seq == seq_now && tiles.held == held_now;
        if (__ballot_sync(ALL_LANES, !same) == 0) break;
        core.drain();
        position = position_now;
        seq = seq_now;
    }
    Result result = {y, narrow, row, s.n_heads * head_dim, s.narrow_rows, s.narrow_bf16 != 0};
    if (!is_row) {
        if (split == 0) {
            for (u32 i = 4 * threadIdx.x; i < n_heads * head_dim; i += 4 * THREADS) {
                result.store(first_head * head_dim + i, make_float4(0.0f, 0.0f, 0.0f, 0.0f));
            }
        }
        return;
    }
    if (split >> blocks_shift != 0) return;
    // Without a block for it, the new position is neither stored nor seen.
    has_new = (u32)new_block < pages.n_blocks;

#pragma unroll
    for (int t = 0; t < ITEMS; t++) {
        u32 item = from_last + WARPS * t;
        if (item < HEADS || (item <= VALUE && has_new)) {
            float factor = 1.0f;
            const float* norm = item < HEADS ? q_norm : item == KEY ? k_norm : v_norm;
            if (norm != nullptr) {
                float squares = 0.0f;
#pragma unroll
                for (int j = 0; j < PAIRS; j++) {
                    squares = __fmaf_rn(pairs[t][j][0], pairs[t][j][0], squares);
                    squares = __fmaf_rn(pairs[t][j][1], pairs[t][j][1], squares);
                }
                factor = 1.0f / sqrtf(warp_reduce(squares, Add()) / (float)head_dim + s.eps);
            }
            T* cache = (item == KEY ? k_cache : v_cache) + (has_new ? seen.offset(new_block, (u32)position) : 0);
            u32 most = 0;
#pragma unroll
            for (int j = 0; j < PAIRS; j++) {
                float& a = pairs[t][j][0];
                float& b = pairs[t][j][1];
                a = a * factor * weights[t][j][0];
                b = b * factor * weights[t][j][1];
                if (item != VALUE && lane + 32 * j < half) turn_pair(a, b, sines[j], cosines[j]);
                if (item >= HEADS && k == nullptr) {
                    bool there = lane + 32 * j < head_dim / 2;
                    a = there ? to_f32(cache[left[j]]) : 0.0f;
                    b = there ? to_f32(cache[right[j]]) : 0.0f;
                } else if (item < HEADS) {
                    a *= q_scale;
                    b *= q_scale;
                    most = Core::greatest(a, b, most);
                } else {
                    T a_bits = from_f32<T>(a), b_bits = from_f32<T>(b);
                    if (chunk == 0 && lane + 32 * j < head_dim / 2) {
                        cache[left[j]] = a_bits;
                        cache[right[j]] = b_bits;
                    }
                    a = to_f32(a_bits);
                    b = to_f32(b_bits);
                }
                turned[item][left[j]] = a;
                turned[item][right[j]] = b;
            }
            if (item < HEADS) {
                most = warp_most(most);
#pragma unroll
                for (int j = 0; j < PAIRS; j++) {
                    Core::keep(queries, item, left[j], right[j], pairs[t][j][0], pairs[t][j][1], most);
                }
            }
        }
    }
    __syncthreads();

    // The new position's scores, from shared memory and not from the caches: one warp per head.
    if (has_new && from_last < HEADS) {
        float score = 0.0f;
#pragma unroll
        for (u32 i = 0; i < DIMS; i += 32) {
            score = __fmaf_rn(turned[from_last][i + lane], turned[KEY][i + lane], score);
        }
        score = warp_reduce(score, Add());
        if (lane == 0) new_scores[from_last] = cap > 0.0f ? capped(score, cap) : score;
    }
    core.run(seen, tiles, turned, queries, cap);
    core.finish((float*)own, shares[warp]);
    __syncthreads();

    // Each warp merges its part of the heads, four elements per lane: first the results of the block's warps,
    // which GROUPS lanes share, then those of all blocks.
    const u32 PART = ALL_FOURS / WARPS, GROUPS = 32 / PART;
    static_assert(PART * WARPS == ALL_FOURS && PART * GROUPS == 32, "parts are powers of two, at most a warp");
    u32 four = warp * PART + lane % PART, member = lane / PART, h = four / FOURS, d = four % FOURS;
    u64 head_row = (u64)row * s.n_heads + first_head + h;
    bool is_there = h < n_heads && 4 * d < head_dim, stores = is_there && member == 0;
    Sum all;
    all.clear();
    if (has_new && member == 0) {
        all.top = new_scores[h];
        all.total = 1.0f;
        all.sum = *(const float4*)&turned[VALUE][4 * d];
    }
    float top = all.top;
#pragma unroll
    for (u32 i = 0; i < WARPS / GROUPS; i++) top = fmaxf(top, shares[member + i * GROUPS][h].x);
    all.scale_to(top);
#pragma unroll
    for (u32 i = 0; i < WARPS / GROUPS; i++) {
        u32 w = member + i * GROUPS;
        all.add(shares[w][h], *(const float4*)(space + w * s.warp_bytes + 4 * (h * Core::PITCH + 4 * d)));
    }
    all.add_lanes(PART);
    u32 out = (first_head + h) * head_dim + 4 * d;
    // A sink whose weight overflows leaves nothing of the values.
    float sink = sinks != nullptr && stores ? sinks[first_head + h] * LOG2_E : NONE;
    if (blocks_shift == 0) {
        if (sinks != nullptr) all.total += power_of_2(sink - all.top);
        if (stores) result.store(out, all.mean());
        return;
    }

    u32 n_blocks = 1u << blocks_shift, stride = head_dim / 4;
    Partial* head_partials = (Partial*)partials + (head_row << s.splits_shift) * stride + d;
    if (stores) {
        head_partials[split * stride].sum = all.sum;
        head_partials[split * stride].scale = make_float4(all.top, all.total, 0.0f, 0.0f);
    }
    __syncwarp();
    bool last = false;
    if (lane == 0) last = is_last(counters + ((u64)row * n_groups + member_of) * WARPS + warp, n_blocks);
    last = __shfl_sync(ALL_LANES, last, 0);
    __syncwarp();
    if (!last) return;
    all.clear();
    // Heads and elements that do not exist have no partials.
    if (is_there) add_partials<GROUPS>(all, head_partials, member, n_blocks, stride);
    all.add_lanes(PART);
    if (sinks != nullptr) all.total += power_of_2(sink - all.top);
    if (stores) result.store(out, all.mean());
}

#define ATTEND(dims, heads, name, T, Core)                                                                 \
    extern "C" __global__ __launch_bounds__(THREADS, Core<T, dims, heads>::BLOCKS) void                    \
        attend_d##dims##_h##heads##_##name(                                                                \
            float* y, float* partials, u32* counters, T* k_cache, T* v_cache, const float* q,              \
            const float* k, const float* v, const i32* positions, const i32* seqs, const i32* tables,      \
            const float* inv_freq, const float* q_norm, const float* k_norm, const float* v_norm,          \
            u16* narrow, Rows q_rows, Rows k_rows, Rows v_rows, Attend s, const float* sinks) {            \
        attend<T, dims, heads, Core<T, dims, heads>>(y, partials, counters, k_cache, v_cache, q, k, v,     \
                                                     positions, seqs, tables, inv_freq, q_norm, k_norm,    \
                                                     v_norm, narrow, q_rows, k_rows, v_rows, s, sinks);    \
    }
#define ATTEND_SMALL(dims, name, T, Core) \
    ATTEND(dims, 2, name, T, Core)        \
    ATTEND(dims, 4, name, T, Core)        \
    ATTEND(dims, 8, name, T, Core)
#define ATTEND_LARGE(name, T)      \
    ATTEND(256, 2, name, T, Lanes) \
    ATTEND(256, 4, name, T, Lanes)

// unit d64_f16
ATTEND_SMALL(64, f16, F16, Ring)
// unit d64_bf16
ATTEND_SMALL(64, bf16, BF16, Ring)
// unit d64_f32
ATTEND_SMALL(64, f32, float, Lanes)
// unit d128_f16
ATTEND_SMALL(128, f16, F16, Ring)
// unit d128_bf16
ATTEND_SMALL(128, bf16, BF16, Ring)
// unit d128_f32
ATTEND_SMALL(128, f32, float, Lanes)
// unit d256_f16
ATTEND_LARGE(f16, F16)
// unit d256_bf16
ATTEND_LARGE(bf16, BF16)
// unit d256_f32
ATTEND_LARGE(f32, float)
// unit d512_f16
ATTEND(512, 2, f16, F16, Lanes)
// unit d512_bf16
ATTEND(512, 2, bf16, BF16, Lanes)
// unit d512_f32
ATTEND(512, 2, f32, float, Lanes)
