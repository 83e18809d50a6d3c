// attend.cu: all that a decoded token does between its q, k, v products and the output product
//
//   y           [n, n_heads, head_dim]                      f32
//   partials    [n, n_heads, n_splits, head_dim] f32, then [n, n_heads, n_splits, head_dim / 4, 2] f32; scratch
//   counters    [n, gridDim.y, team]                        u32; zero before the first launch, zero after every one
//   k_cache, v_cache  [n_blocks, n_kv_heads, kv_block, head_dim]  T
//   q           [n, n_heads, head_dim]                      f32, rows (heads) of consecutive elements
//   k, v        [n, n_kv_heads, head_dim]                   f32, likewise
//   positions, seqs   [n]                                   i32; negative: nothing goes into the caches, y gets zeros
//   tables      [n_seqs, max_blocks]                        i32
//   inv_freq    [n_dims / 2]                                f32
//   q_norm, k_norm    [head_dim]                            f32, or null: no norm
//
// Heads of q and k are normed (RMS) and turned (turn.cuh); the key, and the value as it is, go into the caches at the
// row's position, rounded to T. Then y[i, h] = softmax(scale q . k) v over the positions that the row sees, its own
// included, from what the caches hold after that: the same as append, then attention.
//
// A block has one head of the caches, up to per_block of its query heads, and every so-many-th tile of the positions. Short
// contexts are for one block, longer ones for one team of blocks, the longest for all. One block, which the length says, makes and stores the new key and value and takes them from shared memory, so that no block reads what
// another one of the launch writes. The blocks of a team (a cluster) exchange what they found through each other's
// shared memory, each putting a slice of the heads together. Several teams leave partials and count themselves; the
// last to come merges them, in their order, and sets the count back to zero. Before compute capability 9.0 a team is
// one block.
//
// Launch    grid (n_splits, n_kv_heads ceil(group / per_block), n), block (256), cluster (team, 1, 1), shared 0
// Requires  head_dim a multiple of 8, at most DIMS; kv_block a power of two, at least 16; per_block at most HEADS;
//           n_splits and team powers of two, team at most 4 and n_splits; caches and partials at multiples of 16 bytes;
//           rows are of different sequences. inv_freq and norms are weights: they are read before the wait. A position
//           whose block is out of range counts as not seen, and is not written.
// Scores, sums and partials in f32, in an order that follows from the length and the grid alone: same bits every run.
// Capture: safe; the grid is fixed and all lengths are read on the device.
#include "paged.cuh"
#include "reduce.cuh"
#include "turn.cuh"
#include "view.cuh"

const u32 WARPS = 8;
const u32 THREADS = 32 * WARPS;
const u32 MAX_TEAM = 4;
const u32 MAX_TILE = 16;
// A block works alone while it has at most so many tiles for each warp, and a team alone likewise.
#if !defined(REFRAIN_ON_HOST) && __CUDA_ARCH__ >= 900
#define TEAMS 1
const u32 ALONE_TILES = 1;
const u32 TEAM_TILES = 2;
#else
#define TEAMS 0
const u32 ALONE_TILES = 2;
const u32 TEAM_TILES = 2;
#endif
const float LOG2_E = 1.44269504088896340736f;
// Lower than any score that counts, and finite: differences with it are numbers.
const float NONE = -3.0e38f;

struct Attend {
    u32 n_heads, per_block;
    u32 splits_shift, team_shift;  // n_splits = 1 << splits_shift, blocks of a team likewise
    u32 window;  // 0: all
    float scale;
    float softcap;  // 0: none
    u32 n_dims, interleaved;
    float magnitude, eps;
    u32 kv_shift;  // kv_block = 1 << kv_shift
    u32 alone;     // the next kernel starts only when this one has ended
    Pages pages;
};

#ifndef REFRAIN_ON_HOST
// Counts to n and starts again at zero; whether this was the n-th. What came before it in the block is visible to whoever
// counts after it.
inline bool is_last(u32* counter, u32 n) {
    u32 before;
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(counter), "r"(n - 1)
                 : "memory");
    return before == n - 1;
}

// To two units in the last place; what is below the normal numbers becomes zero.
inline float power_of_2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

inline float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
#endif

// cap tanh(x), in powers of two.
inline float capped(float x, float cap) {
    return cap - 2.0f * cap * reciprocal(power_of_2(2.0f * LOG2_E * x) + 1.0f);
}

#if TEAMS
// Everything before it, in every thread of the team, is visible behind team_wait.
inline void team_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
inline void team_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

// Where a place of this block's shared memory is in that of another block of the team.
inline u32 place_in(const void* here, u32 rank) {
    u32 there;
    asm("{ .reg .u64 p; .reg .u32 q; cvta.to.shared.u64 p, %1; cvt.u32.u64 q, p; mapa.shared::cluster.u32 %0, q, %2; }"
        : "=r"(there)
        : "l"(here), "r"(rank));
    return there;
}

inline void store_in(float4* here, u32 rank, float4 x) {
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(place_in(here, rank)), "f"(x.x), "f"(x.y),
                 "f"(x.z), "f"(x.w)
                 : "memory");
}

inline void store_in(float2* here, u32 rank, float2 x) {
    asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(place_in(here, rank)), "f"(x.x), "f"(x.y)
                 : "memory");
}
#else
inline void team_arrive() { __syncthreads(); }
inline void team_wait() {}
template <typename V> inline void store_in(V* here, u32, V x) { *here = x; }
#endif

// A sum of vectors with weights 2^top: the vectors, their total weight, and the largest power among them.
struct Sum {
    float top, total;
    float4 sum;

    inline void clear() {
        top = NONE;
        total = 0.0f;
        sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }

    // `all` is at least both tops.
    inline void add(float other_top, float other_total, float4 other, float all) {
        float factor = power_of_2(other_top - all);
        total = __fmaf_rn(other_total, factor, total);
        sum.x = __fmaf_rn(other.x, factor, sum.x);
        sum.y = __fmaf_rn(other.y, factor, sum.y);
        sum.z = __fmaf_rn(other.z, factor, sum.z);
        sum.w = __fmaf_rn(other.w, factor, sum.w);
    }

    inline void store(float* y) const {
        float inverse = total == 0.0f ? 0.0f : 1.0f / total;
        y[0] = sum.x * inverse;
        y[1] = sum.y * inverse;
        y[2] = sum.z * inverse;
        y[3] = sum.w * inverse;
    }
};

// Eight elements of a row, as they lie there.
template <typename T> struct Eight {
    uint4 words;

    inline void clear() { words = make_uint4(0, 0, 0, 0); }
    inline void load(const T* p) { words = *(const uint4*)p; }

    // Elements 4 i to 4 i + 3.
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

inline constexpr u32 log2_of(u32 n) { return n <= 1 ? 0 : 1 + log2_of(n / 2); }

template <typename T, int HEADS> struct Ahead { static const int N = HEADS > 4 ? 2 : 4; };
template <int HEADS> struct Ahead<float, HEADS> { static const int N = 2; };

// The positions that a row sees, from one lane. LANES lanes share a row of the caches, eight elements each, so that a
// warp takes 32 / LANES rows with a load; a tile is what it takes with all loads that it has under way.
template <typename T, int LANES, int HEADS> struct Part {
    static const int AHEAD = Ahead<T, HEADS>::N;
    static const u32 ROWS = 32 / LANES, TILE = ROWS * AHEAD;

    const i32* table;
    u32 max_blocks, n_blocks, n_kv_heads, head_dim, kv_shift;
    u32 kv_head, at;  // the lane's elements start at `at`
    u32 row;          // of the ROWS that the warp takes at once
    u32 begin, end;   // positions that are in the cache and seen

    inline i32 block_of(u32 position) const {
        u32 column = position >> kv_shift;
        return column < max_blocks ? table[column] : -1;
    }

    inline u64 offset(i32 block, u32 position) const {
        u32 in_block = position & ((1u << kv_shift) - 1);
        u64 first = (u64)((u32)block * n_kv_heads + kv_head) << kv_shift;
        return (first + in_block) * head_dim + at;
    }

    // Bit i: position i of the lane's in the tile is there.
    inline u32 seen(i32 block, u32 tile) const {
        u32 bits = 0;
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            u32 p = tile + i * ROWS + row;
            if (p >= begin && p < end) bits |= 1u << i;
        }
        return (u32)block < n_blocks ? bits : 0;
    }

    inline void load(Eight<T> (&rows)[AHEAD], const T* cache, i32 block, u32 tile, u32 bits) const {
        const T* from = cache + offset(bits != 0 ? block : 0, tile + row);
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            rows[i].clear();
            if ((bits >> i & 1) != 0 && at < head_dim) rows[i].load(from + (u64)(i * ROWS) * head_dim);
        }
    }
};

// A softmax under way, for HEADS heads, and the lane's eight elements of what it weighs.
template <int LANES, int HEADS> struct Running {
    float max[HEADS], sum[HEADS], acc[8 * HEADS];

    inline void clear() {
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            max[h] = NONE;
            sum[h] = 0.0f;
        }
#pragma unroll
        for (int i = 0; i < 8 * HEADS; i++) acc[i] = 0.0f;
    }

    // Brings the rows of a warp together. Then each lane has 8 HEADS LANES / 32 of the sums, from `first` on.
    inline u32 merge_warp(u32 lane) {
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            float all = max[h];
#pragma unroll
            for (int step = LANES; step < 32; step <<= 1) all = fmaxf(all, __shfl_xor_sync(0xffffffffu, all, step));
            float factor = power_of_2(max[h] - all);
            max[h] = all;
            sum[h] *= factor;
#pragma unroll
            for (int step = LANES; step < 32; step <<= 1) sum[h] += __shfl_xor_sync(0xffffffffu, sum[h], step);
#pragma unroll
            for (int i = 0; i < 8; i++) acc[8 * h + i] *= factor;
        }
        u32 first = 0;
        if (LANES <= 16) first += halve<4 * HEADS, 16>(lane);
        if (LANES <= 8) first += halve<2 * HEADS, 8>(lane);
        return first;
    }

    // Of 2 N sums each lane keeps the first or the last N, and gives the others to the lane that keeps those.
    template <int N, int STEP> inline u32 halve(u32 lane) {
        bool upper = (lane & STEP) != 0;
#pragma unroll
        for (int i = 0; i < N; i++) {
            float kept = upper ? acc[i + N] : acc[i], given = upper ? acc[i] : acc[i + N];
            acc[i] = kept + __shfl_xor_sync(0xffffffffu, given, STEP);
        }
        return upper ? N : 0;
    }
};

// What a warp found.
template <int LANES, int HEADS> struct Found {
    alignas(16) float acc[HEADS][8 * LANES];
    float max[HEADS], sum[HEADS];
};

template <typename T, int LANES, int HEADS>
inline void attend(float* y, float* partials, u32* counters, T* k_cache, T* v_cache, const float* q, const float* k,
                   const float* v, const i32* positions, const i32* seqs, const i32* tables, const float* inv_freq,
                   const float* q_norm, const float* k_norm, const Rows& q_rows, const Rows& k_rows,
                   const Rows& v_rows, const Attend& s) {
    const u32 DIMS = 8 * LANES, PAIRS = DIMS / 64;        // pairs of a head that a lane turns
    const u32 ITEMS = (HEADS + 2 + WARPS - 1) / WARPS;    // heads that a warp turns: queries, key, value
    const u32 KEY = HEADS, VALUE = HEADS + 1;
    typedef Part<T, LANES, HEADS> P;
    const int AHEAD = P::AHEAD;
    const u32 TILE = P::TILE;

    const u32 FOURS = DIMS / 4, ALL_FOURS = HEADS * FOURS;

    alignas(16) __shared__ float turned[HEADS + 2][DIMS];  // queries, key, value, of which those behind head_dim are zero
    __shared__ Found<LANES, HEADS> found[WARPS];
    // From each block of the team: sums of this block's slice, and for every head top and total.
    __shared__ float4 slices[ALL_FOURS];
    __shared__ float2 scales[MAX_TEAM][HEADS];
    __shared__ bool last;

    if (s.alone == 0) let_next_start();
    team_arrive();
    const Pages& pages = s.pages;
    u32 row = blockIdx.z, split = blockIdx.x, head_dim = pages.head_dim;
    u32 group = s.n_heads / pages.n_kv_heads, chunks = (group + s.per_block - 1) / s.per_block;
    u32 kv_head = blockIdx.y / chunks, chunk = blockIdx.y % chunks;
    u32 first_head = kv_head * group + chunk * s.per_block;
    u32 n_heads = min(s.per_block, (kv_head + 1) * group - first_head);
    // From lane 0, so that the compiler knows it to be the same in all lanes.
    u32 warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32, half = s.n_dims / 2;

    // Which elements the lane has of each head, where the heads are, and the weights.
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
        u32 item = warp + WARPS * t;
        heads[t] = nullptr;
        const float* norm = nullptr;
        if (item < n_heads) {
            heads[t] = q + q_rows.start(row * s.n_heads + first_head + item);
            norm = q_norm;
        } else if (item == KEY) {
            heads[t] = k + k_rows.start(row * pages.n_kv_heads + kv_head);
            norm = k_norm;
        } else if (item == VALUE) {
            heads[t] = v + v_rows.start(row * pages.n_kv_heads + kv_head);
        }
#pragma unroll
        for (int j = 0; j < PAIRS; j++) {
            bool there = norm != nullptr && lane + 32 * j < head_dim / 2;
            weights[t][j][0] = there ? norm[left[j]] : 1.0f;
            weights[t][j][1] = there ? norm[right[j]] : 1.0f;
        }
    }
    // Mostly row i is of sequence i, and the first tile follows from the block alone, but for whether one is enough: then
    // the tile's block is known together with the position.
    u32 team_shift = TEAMS ? s.team_shift : 0, rank = split & ((1u << team_shift) - 1);
    u32 guess_row = min(row, pages.n_seqs - 1);
    u32 guess_alone = (warp * TILE) >> s.kv_shift, guess_team = (((warp << team_shift) + rank) * TILE) >> s.kv_shift;
    const i32* guess_table = tables + (u64)guess_row * pages.max_blocks;

    wait_for_previous();
    i32 position = positions[row], seq = seqs[row];
    i32 guess = guess_table[min(guess_team, pages.max_blocks - 1)];
    i32 other_guess = guess_table[min(guess_alone, pages.max_blocks - 1)];
    float pairs[ITEMS][PAIRS][2];
#pragma unroll
    for (int t = 0; t < ITEMS; t++) {
#pragma unroll
        for (int j = 0; j < PAIRS; j++) {
            bool there = heads[t] != nullptr && lane + 32 * j < head_dim / 2;
            pairs[t][j][0] = there ? heads[t][left[j]] : 0.0f;
            pairs[t][j][1] = there ? heads[t][right[j]] : 0.0f;
        }
    }

    if (position < 0 || seq < 0 || (u32)seq >= pages.n_seqs) {
        float* out = y + ((u64)row * s.n_heads + first_head) * head_dim;
        if (split == 0) {
            for (u32 i = threadIdx.x; i < n_heads * head_dim; i += THREADS) out[i] = 0.0f;
        }
        return;
    }
    u32 first = s.window != 0 && (u32)position >= s.window ? (u32)position + 1 - s.window : 0;
    // Tiles start at multiples of their size.
    u32 start = first / MAX_TILE * MAX_TILE, length = (u32)position + 1 - start;
    u32 blocks_shift = length <= ALONE_TILES * WARPS * TILE                  ? 0
                       : length <= TEAM_TILES * WARPS * TILE << team_shift ? team_shift
                                                                           : s.splits_shift;
    if (split >> blocks_shift != 0) return;
    bool holds_new = split == (1u << blocks_shift) - 1;

    P p;
    p.table = tables + (u64)seq * pages.max_blocks;
    p.max_blocks = pages.max_blocks;
    p.n_blocks = pages.n_blocks;
    p.n_kv_heads = pages.n_kv_heads;
    p.head_dim = head_dim;
    p.kv_shift = s.kv_shift;
    p.kv_head = kv_head;
    p.at = lane % LANES * 8;
    p.row = lane / LANES;
    p.begin = first;
    p.end = (u32)position;

    // The first tile's keys and values, and the block of the next tile.
    u32 step = (WARPS << blocks_shift) * TILE, tile = start + ((warp << blocks_shift) + split) * TILE;
    u32 column = tile >> s.kv_shift;
    i32 block = -1;
    if (tile < p.end) {
        bool is_row = (u32)seq == guess_row;
        block = is_row && column == guess_team ? guess : is_row && column == guess_alone ? other_guess : p.block_of(tile);
    }
    u32 bits = p.seen(block, tile);
    Eight<T> keys[AHEAD], values[AHEAD];
    p.load(keys, k_cache, block, tile, bits);
    p.load(values, v_cache, block, tile, bits);
    u32 next = tile + step;
    i32 next_block = next < p.end ? p.block_of(next) : -1;
    i32 new_block = holds_new ? p.block_of((u32)position) : -1;

    // Scores come out in powers of two, or as what the cap is applied to.
    float q_scale = s.softcap > 0.0f ? s.scale / s.softcap : s.scale * LOG2_E, cap = s.softcap * LOG2_E;
    float sines[PAIRS], cosines[PAIRS];
#pragma unroll
    for (int j = 0; j < PAIRS; j++) {
        if (lane + 32 * j < half) turn_of(position, freqs[j], s.magnitude, sines[j], cosines[j]);
    }
#pragma unroll
    for (int t = 0; t < ITEMS; t++) {
        u32 item = warp + WARPS * t;
        if (item < HEADS || (item <= VALUE && holds_new)) {
            float factor = 1.0f;
            if ((item < HEADS && q_norm != nullptr) || (item == KEY && k_norm != nullptr)) {
                float squares = 0.0f;
#pragma unroll
                for (int j = 0; j < PAIRS; j++) {
                    squares = __fmaf_rn(pairs[t][j][0], pairs[t][j][0], squares);
                    squares = __fmaf_rn(pairs[t][j][1], pairs[t][j][1], squares);
                }
                factor = 1.0f / sqrtf(warp_reduce(squares, Add()) / (float)head_dim + s.eps);
            }
            u64 cell = (u32)new_block < pages.n_blocks ? p.offset(new_block, (u32)position) - p.at : 0;
            bool stores = item >= KEY && chunk == 0 && (u32)new_block < pages.n_blocks;
            T* cache = (item == KEY ? k_cache : v_cache) + cell;
#pragma unroll
            for (int j = 0; j < PAIRS; j++) {
                float a = pairs[t][j][0], b = pairs[t][j][1];
                if (item != VALUE) {
                    a = a * factor * weights[t][j][0];
                    b = b * factor * weights[t][j][1];
                    if (lane + 32 * j < half) turn_pair(a, b, sines[j], cosines[j]);
                }
                if (item < HEADS) {
                    a *= q_scale;
                    b *= q_scale;
                } else {
                    T a_bits = from_f32<T>(a), b_bits = from_f32<T>(b);
                    if (stores && lane + 32 * j < head_dim / 2) {
                        cache[left[j]] = a_bits;
                        cache[right[j]] = b_bits;
                    }
                    a = to_f32(a_bits);
                    b = to_f32(b_bits);
                }
                turned[item][left[j]] = a;
                turned[item][right[j]] = b;
            }
        }
    }
    __syncthreads();

    Running<LANES, HEADS> run;
    run.clear();
    // The last warp has the fewest tiles.
    bool takes_new = holds_new && (u32)new_block < pages.n_blocks && warp == WARPS - 1;
    if (takes_new) {
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            float score = 0.0f;
#pragma unroll
            for (int i = 0; i < 8; i++) score = __fmaf_rn(turned[h][p.at + i], turned[KEY][p.at + i], score);
#pragma unroll
            for (int step = LANES / 2; step > 0; step >>= 1) score += __shfl_xor_sync(0xffffffffu, score, step);
            if (s.softcap > 0.0f) score = capped(score, cap);
            if (p.row == 0) {
                run.max[h] = score;
                run.sum[h] = 1.0f;
#pragma unroll
                for (int i = 0; i < 8; i++) run.acc[8 * h + i] = turned[VALUE][p.at + i];
            }
        }
    }
    bool any = takes_new || tile < p.end;

#pragma unroll 1
    while (tile < p.end) {
        float scores[HEADS][AHEAD];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float part_of[AHEAD][4];
#pragma unroll
            for (int a = 0; a < AHEAD; a++) keys[a].four(i, part_of[a]);
#pragma unroll
            for (int h = 0; h < HEADS; h++) {
                float4 query = *(const float4*)&turned[h][p.at + 4 * i];
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
        u32 next_bits = p.seen(next_block, next);
        p.load(keys, k_cache, next_block, next, next_bits);
        u32 after = next + step;
        i32 after_block = after < p.end ? p.block_of(after) : -1;

#pragma unroll
        for (int step = LANES / 2; step > 0; step >>= 1) {
#pragma unroll
            for (int h = 0; h < HEADS; h++) {
#pragma unroll
                for (int a = 0; a < AHEAD; a++) scores[h][a] += __shfl_xor_sync(0xffffffffu, scores[h][a], step);
            }
        }
        if (s.softcap > 0.0f) {
#pragma unroll
            for (int h = 0; h < HEADS; h++) {
#pragma unroll
                for (int a = 0; a < AHEAD; a++) scores[h][a] = capped(scores[h][a], cap);
            }
        }
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            float top = run.max[h];
#pragma unroll
            for (int a = 0; a < AHEAD; a++) {
                // What is not there weighs nothing.
                if ((bits >> a & 1) == 0) scores[h][a] = -inf_f32();
                top = fmaxf(top, scores[h][a]);
            }
            float factor = power_of_2(run.max[h] - top);
            run.max[h] = top;
            run.sum[h] *= factor;
#pragma unroll
            for (int i = 0; i < 8; i++) run.acc[8 * h + i] *= factor;
#pragma unroll
            for (int a = 0; a < AHEAD; a++) {
                scores[h][a] = power_of_2(scores[h][a] - top);
                run.sum[h] += scores[h][a];
            }
        }
#pragma unroll
        for (int a = 0; a < AHEAD; a++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float part_of[4];
                values[a].four(i, part_of);
#pragma unroll
                for (int h = 0; h < HEADS; h++) {
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        float& to = run.acc[8 * h + 4 * i + e];
                        to = __fmaf_rn(scores[h][a], part_of[e], to);
                    }
                }
            }
        }
        p.load(values, v_cache, next_block, next, next_bits);
        tile = next;
        bits = next_bits;
        next = after;
        next_block = after_block;
    }

    // A warp that saw nothing has sums of zero, and nobody looks at the rest.
    Found<LANES, HEADS>& mine = found[warp];
    if (any) {
        u32 from = run.merge_warp(lane);
        const int n = 8 * HEADS * LANES / 32;
#pragma unroll
        for (int i = 0; i < n; i += 2) {
            u32 at = from + i;
            *(float2*)&mine.acc[at / 8][p.at + at % 8] = make_float2(run.acc[i], run.acc[i + 1]);
        }
    }
    if (lane == 0) {
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            mine.max[h] = run.max[h];
            mine.sum[h] = run.sum[h];
        }
    }
    __syncthreads();

    // Each thread puts four elements of a head together: those of the block's warps, then those of the team's blocks,
    // then those of the teams.
    u64 head_row = (u64)row * s.n_heads + first_head;
    u32 slice_shift = log2_of(ALL_FOURS) - team_shift;
    team_wait();
    for (u32 i = threadIdx.x; i < ALL_FOURS; i += THREADS) {
        u32 h = i / FOURS, d = i % FOURS;
        Sum all;
        all.clear();
#pragma unroll
        for (int w = 0; w < WARPS; w++) all.top = fmaxf(all.top, found[w].max[h]);
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            if (found[w].sum[h] != 0.0f) {
                all.add(found[w].max[h], found[w].sum[h], *(const float4*)&found[w].acc[h][4 * d], all.top);
            }
        }
        if (blocks_shift == 0) {
            if (h < n_heads && 4 * d < head_dim) all.store(y + (head_row + h) * head_dim + 4 * d);
        } else {
            u32 to = i >> slice_shift, at = (rank << slice_shift) + (i & ((1u << slice_shift) - 1));
            store_in(&slices[at], to, all.sum);
            if (d >> team_shift == 0) store_in(&scales[rank][h], d, make_float2(all.top, all.total));
        }
    }
    if (blocks_shift == 0) return;
    team_arrive();
    team_wait();

    u32 n_teams = 1u << (blocks_shift - team_shift), team = split >> team_shift;
    u32 i = (rank << slice_shift) + threadIdx.x, h = i / FOURS, d = i % FOURS;
    bool mine_is_there = threadIdx.x >> slice_shift == 0 && h < n_heads && 4 * d < head_dim;
    // Partials and their scales are of the same head, team by team.
    u64 at = (head_row + h) * n_teams;
    float4* sums = (float4*)partials + at * (head_dim / 4) + d;
    float2* tops = (float2*)(partials + (u64)gridDim.z * s.n_heads * n_teams * head_dim) + at * (head_dim / 4) + d;
    if (mine_is_there) {
        Sum all;
        all.clear();
#pragma unroll
        for (u32 r = 0; r < MAX_TEAM; r++) {
            if (r >> team_shift == 0) all.top = fmaxf(all.top, scales[r][h].x);
        }
#pragma unroll
        for (u32 r = 0; r < MAX_TEAM; r++) {
            if (r >> team_shift == 0 && scales[r][h].y != 0.0f) {
                all.add(scales[r][h].x, scales[r][h].y, slices[(r << slice_shift) + threadIdx.x], all.top);
            }
        }
        if (n_teams == 1) {
            all.store(y + (head_row + h) * head_dim + 4 * d);
        } else {
            sums[(u64)team * (head_dim / 4)] = all.sum;
            tops[(u64)team * (head_dim / 4)] = make_float2(all.top, all.total);
        }
    }
    if (n_teams == 1) return;

    __syncthreads();
    u64 counter = (((u64)row * gridDim.y + blockIdx.y) << team_shift) + rank;
    if (threadIdx.x == 0) last = is_last(counters + counter, n_teams);
    __syncthreads();
    if (!last || !mine_is_there) return;
    Sum all;
    all.clear();
    // So many are loaded at once; those before are brought down as the top rises.
    const int BATCH = 8;
#pragma unroll 1
    for (u32 t = 0; t < n_teams; t += BATCH) {
        float2 scale[BATCH];
        float4 sum[BATCH];
        Sum before = all;
        all.clear();
        all.top = before.top;
#pragma unroll
        for (int j = 0; j < BATCH; j++) {
            u32 from = min(t + j, n_teams - 1);
            scale[j] = tops[(u64)from * (head_dim / 4)];
            sum[j] = sums[(u64)from * (head_dim / 4)];
        }
#pragma unroll
        for (int j = 0; j < BATCH; j++) all.top = fmaxf(all.top, scale[j].x);
        all.add(before.top, before.total, before.sum, all.top);
#pragma unroll
        for (int j = 0; j < BATCH; j++) {
            if (t + j < n_teams) all.add(scale[j].x, scale[j].y, sum[j], all.top);
        }
    }
    all.store(y + (head_row + h) * head_dim + 4 * d);
}

// Two blocks to a multiprocessor, but for the many sums of eight heads.
#define ATTEND(dims, lanes, heads, name, T)                                                                \
    extern "C" __global__ __launch_bounds__(THREADS, heads > 4 ? 1 : 2) void attend_d##dims##_h##heads##_##name(          \
        float* y, float* partials, u32* counters, T* k_cache, T* v_cache, const float* q, const float* k, \
        const float* v, const i32* positions, const i32* seqs, const i32* tables, const float* inv_freq,  \
        const float* q_norm, const float* k_norm, Rows q_rows, Rows k_rows, Rows v_rows, Attend s) {      \
        attend<T, lanes, heads>(y, partials, counters, k_cache, v_cache, q, k, v, positions, seqs, tables, inv_freq, \
                                q_norm, k_norm, q_rows, k_rows, v_rows, s);                                \
    }
#define ATTEND_ALL(name, T)      \
    ATTEND(64, 8, 2, name, T)    \
    ATTEND(64, 8, 4, name, T)    \
    ATTEND(64, 8, 8, name, T)    \
    ATTEND(128, 16, 2, name, T)  \
    ATTEND(128, 16, 4, name, T)  \
    ATTEND(128, 16, 8, name, T)  \
    ATTEND(256, 32, 2, name, T)  \
    ATTEND(256, 32, 4, name, T)

ATTEND_ALL(f16, F16)
ATTEND_ALL(bf16, BF16)
ATTEND_ALL(f32, float)
