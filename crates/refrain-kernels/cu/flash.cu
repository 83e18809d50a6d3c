// flash.cu: attention of many rows on tensor cores (prefill)
//
//   y[i, h] = softmax(scale q[i, h] . k) v over the positions that row i sees
//
//   y          [n, n_heads, head_dim]                      f32, or null
//   narrow     [n, n_heads, head_dim]                      y in 16 bits, F16 or BF16 by narrow_kind; or null
//   q          [n, n_heads, head_dim]                      f32, rows (heads) of consecutive elements
//   k, v       [n_blocks, n_kv_heads, kv_block, head_dim]  T
//   positions  [n]                                         i32; negative: the row gets zeros
//   seqs       [n]                                         i32
//   tables     [n_seqs, max_blocks]                        i32
//   sinks      [n_heads] f32, a score of each head without a value; or null
//
// Row i sees positions first .. positions[i]; first is 0 or the start of the window. A block has 64 rows of
// one head. It walks over the positions that any of them sees, 64 at a time, once per sequence among its
// rows. Where a tile of rows may have many sequences, they take turns: of several blocks for the same rows,
// each walks for its share of the sequences and writes their rows.
//
// Launch       grid (n_heads, ceil(n / 64), D / OUT * n_shares), block (128), shared as shared_bytes below; a
//              warp has 16 rows. A block computes OUT elements of each row, part blockIdx.z % (D / OUT) of
//              them: the sums of 512 do not fit in registers
// Requires     head_dim a multiple of 8, at most D; caches and rows of q 16-byte aligned. A position whose
//              block is out of range is not seen
// Aliasing     none
// Accumulation queries and softmax weights are rounded to T; scores, maxima and sums are f32
// Determinism  same bits every run: tiles of 64 positions in order
// Capture      safe: the grid is fixed and all lengths are read on the device
#include "mma.cuh"
#include "reduce.cuh"
#include "view.cuh"

struct Sizes {
    u32 n_heads, n_kv_heads, head_dim, n_blocks, kv_block, n_seqs, max_blocks;
    u32 n;
    u32 window;  // 0: no window
    float scale;
    float softcap;    // 0: none
    u32 narrow_kind;  // 1: F16, 2: BF16
    u32 n_shares;     // blocks that share the sequences of a tile
};

const u32 ROWS = 64, TILE = 64, THREADS = 128;
const u64 NOWHERE = ~(u64)0;
const float LOG2_E = 1.4426950408889634f;

struct Least {
    inline i32 operator()(i32 a, i32 b) const { return a < b ? a : b; }
};
struct Or {
    inline u32 operator()(u32 a, u32 b) const { return a | b; }
};

inline u32 count(u64 bits) { return (u32)__popc((u32)bits) + (u32)__popc((u32)(bits >> 32)); }
// Index of the lowest bit that is set; there must be one.
inline u32 lowest(u64 bits) {
    u32 low = (u32)bits;
    return low != 0 ? (u32)__ffs(low) - 1 : 31 + (u32)__ffs((u32)(bits >> 32));
}

// Positions that the rows of one sequence see: every row sees highest .. lowest; together they see first ..
// last, except for gaps that windows leave.
struct Seen {
    i32 first, highest, lowest, last;
    bool alone;  // the block has no row of another sequence
};

struct Shared {
    i32 last[ROWS], first[ROWS], seq[ROWS];  // last is negative for a row without a position
    u64 at[2][TILE];                         // cache offsets for this tile and the next; or NOWHERE
    u32 there[2][2];                         // one bit per position of a tile
    i32 lead[ROWS];                          // the first row of this row's sequence; negative without a position
    u32 leads[2];                            // one bit per row: whether it is the first of its sequence
};

// Each warp computes this for itself.
inline Seen seen_by_rows(const Shared& sh, i32 seq) {
    u32 lane = threadIdx.x % 32;
    const i32 most = 0x7fffffff;
    i32 first = most, lowest = most, negative_highest = most, negative_last = most;
    u32 others = 0;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        u32 row = lane + 32 * i;
        if (sh.last[row] >= 0) {
            if (sh.seq[row] == seq) {
                first = Least()(first, sh.first[row]);
                negative_highest = Least()(negative_highest, -sh.first[row]);
                lowest = Least()(lowest, sh.last[row]);
                negative_last = Least()(negative_last, -sh.last[row]);
            } else {
                others = 1;
            }
        }
    }
    Seen seen;
    seen.first = warp_reduce(first, Least());
    seen.highest = -warp_reduce(negative_highest, Least());
    seen.lowest = warp_reduce(lowest, Least());
    seen.last = -warp_reduce(negative_last, Least());
    seen.alone = warp_reduce(others, Or()) == 0;
    return seen;
}

inline bool any_row_sees(const Shared& sh, i32 seq, i32 position) {
    for (u32 r = 0; r < ROWS; r++) {
        if (sh.seq[r] == seq && sh.first[r] <= position && position <= sh.last[r]) return true;
    }
    return false;
}

template <typename T, int D, int OUT>
inline void flash(float* y, u16* narrow, const float* q, const T* k_cache, const T* v_cache, const i32* positions,
                  const i32* seqs, const i32* tables, const Rows& q_rows, const Sizes& s, const float* sinks) {
    // 16 bytes of padding per row, so that eight rows of a chunk lie in different banks.
    const u32 STRIDE = 2 * D + 16, VALUE_STRIDE = 2 * OUT + 16, NT = TILE / 8, DT = OUT / 8;
    DYNAMIC_SHARED(pool);
    u8 *queries = pool, *keys = pool + ROWS * STRIDE, *values = keys + TILE * STRIDE;
    Shared& sh = *(Shared*)(values + TILE * VALUE_STRIDE);
    const u32 PARTS = D / OUT, first_out = OUT < D ? blockIdx.z % PARTS * OUT : 0, share = blockIdx.z / PARTS;

    start();
    // The last rows see the most positions, so their blocks start first.
    u32 head = blockIdx.x, first_row = (gridDim.y - 1 - blockIdx.y) * ROWS;
    u32 kv_head = head / (s.n_heads / s.n_kv_heads);
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;

    if (threadIdx.x < ROWS) {
        u32 row = first_row + threadIdx.x;
        i32 position = row < s.n ? positions[row] : -1, seq = row < s.n ? seqs[row] : -1;
        if (seq < 0 || (u32)seq >= s.n_seqs) position = -1;
        u32 seen = (u32)position + 1;
        sh.last[threadIdx.x] = position;
        sh.seq[threadIdx.x] = seq;
        sh.first[threadIdx.x] = s.window != 0 && position >= 0 && seen > s.window ? (i32)(seen - s.window) : 0;
    }
    __syncthreads();
    if (threadIdx.x < ROWS) {
        u32 lead = threadIdx.x;
        bool has_position = sh.last[threadIdx.x] >= 0;
        for (u32 r = threadIdx.x; r-- > 0;) {
            if (sh.last[r] >= 0 && sh.seq[r] == sh.seq[threadIdx.x]) lead = r;
        }
        u32 leads = __ballot_sync(0xffffffffu, has_position && lead == threadIdx.x);
        if (lane == 0) sh.leads[warp] = leads;
        sh.lead[threadIdx.x] = has_position ? (i32)lead : -1;
    }
    __syncthreads();
    const u64 all_leads = (u64)sh.leads[1] << 32 | sh.leads[0];
    // Rows without a position belong to the first share.
    if (share > 0 && count(all_leads) <= share) return;
    struct alignas(8) Four { u32 a, b; };
#pragma unroll 8
    for (int j = 0; j < ROWS * (D / 4) / THREADS; j++) {
        u32 i = threadIdx.x + THREADS * j, r = i / (D / 4), d = i % (D / 4) * 4, row = first_row + r;
        Four four = {0, 0};
        if (row < s.n && d < s.head_dim) {
            float4 v = *(const float4*)(q + q_rows.start(row * s.n_heads + head) + d);
            four = Four{pack(v.x, v.y, T()), pack(v.z, v.w, T())};
        }
        *(Four*)(queries + r * STRIDE + 2 * d) = four;
    }
    __syncthreads();

    // State of the lane's two rows, g and g + 8 of its warp.
    i32 row_last[2], row_first[2], row_seq[2];
    bool row_mine[2];
    float max_score[2], sum[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        u32 r = 16 * warp + g + 8 * h;
        row_last[h] = sh.last[r];
        row_first[h] = sh.first[r];
        row_seq[h] = sh.seq[r];
        i32 lead = sh.lead[r];
        u32 turn = lead < 0 ? 0 : count(all_leads & (((u64)1 << lead) - 1));
        row_mine[h] = turn % s.n_shares == share;
        max_score[h] = -inf_f32();
        sum[h] = 0.0f;
    }
    float acc[DT][4] = {};

    // Positions that no row sees are not loaded: their content could be NaN or infinity, and zero times it
    // must be zero.
    auto find = [&](const i32* table, i32 seq, const Seen& seen, u32 tile) {
        i32 block = -1;
        if (threadIdx.x < TILE) {
            i32 position = (i32)(tile + threadIdx.x);
            bool is_seen = position >= seen.first && position <= seen.last;
            // Windows may leave gaps between rows.
            if (is_seen && seen.highest > seen.lowest) is_seen = any_row_sees(sh, seq, position);
            u32 column = (u32)position / s.kv_block;
            if (is_seen && column < s.max_blocks) block = table[column];
        }
        return block;
    };
    auto publish = [&](i32 block, u32 tile, u32 buffer) {
        if (threadIdx.x < TILE) {
            u64 row = ((u64)(u32)block * s.n_kv_heads + kv_head) * s.kv_block + (tile + threadIdx.x) % s.kv_block;
            u64 at = block >= 0 && (u32)block < s.n_blocks ? row * s.head_dim : NOWHERE;
            sh.at[buffer][threadIdx.x] = at;
            u32 bits = warp_reduce(at != NOWHERE ? 1u << lane : 0u, Or());
            if (lane == 0) sh.there[buffer][warp] = bits;
        }
    };
    auto load_keys = [&](u32 buffer) {
        const u32 CHUNKS = D / 8;
#pragma unroll
        for (int j = 0; j < TILE * CHUNKS / THREADS; j++) {
            u32 i = threadIdx.x + THREADS * j, r = i / CHUNKS, chunk = i % CHUNKS;
            u64 at = sh.at[buffer][r];
            bool there = at != NOWHERE && 8 * chunk < s.head_dim;
            copy_async(keys + r * STRIDE + 16 * chunk, there ? k_cache + at + 8 * chunk : k_cache, there);
        }
        copies_end_group();
    };
    auto load_values = [&](u32 buffer) {
        const u32 CHUNKS = OUT / 8;
#pragma unroll
        for (int j = 0; j < TILE * CHUNKS / THREADS; j++) {
            u32 i = threadIdx.x + THREADS * j, r = i / CHUNKS, chunk = i % CHUNKS, d = first_out + 8 * chunk;
            u64 at = sh.at[buffer][r];
            bool there = at != NOWHERE && d < s.head_dim;
            copy_async(values + r * VALUE_STRIDE + 16 * chunk, there ? v_cache + at + d : v_cache, there);
        }
        copies_end_group();
    };

#pragma unroll 1
    for (u64 leads = all_leads, turn = 0; leads != 0; leads &= leads - 1, turn++) {
        if (turn % s.n_shares != share) continue;
        i32 seq = sh.seq[lowest(leads)];
        Seen seen = seen_by_rows(sh, seq);
        const i32* table = tables + (u64)seq * s.max_blocks;
        u32 begin = (u32)seen.first / TILE * TILE, end = (u32)seen.last + 1, buffer = 0;
        __syncthreads();
        publish(find(table, seq, seen, begin), begin, 0);
        __syncthreads();
        load_keys(0);
#pragma unroll 1
        for (u32 tile = begin; tile < end; tile += TILE, buffer ^= 1) {
            load_values(buffer);
            // Loads the next tile's block indices here, so they arrive during the matrix products.
            i32 next = find(table, seq, seen, tile + TILE);
            copies_wait<1>();
            __syncthreads();

            float score[NT][4] = {};
#pragma unroll
            for (int d = 0; d < D / 16; d++) {
                u32 a[4];
                load_matrices(a, queries + (16 * warp + lane % 16) * STRIDE + 32 * d + lane / 16 * 16);
#pragma unroll
                for (int j = 0; j < NT / 2; j++) {
                    u32 b[4];
                    u32 r = 16 * j + lane / 16 * 8 + lane % 8;
                    load_matrices(b, keys + r * STRIDE + 32 * d + lane / 8 % 2 * 16);
                    multiply(score[2 * j], a, b, T());
                    multiply(score[2 * j + 1], a, b + 2, T());
                }
            }
            u32 there[2] = {sh.there[buffer][0], sh.there[buffer][1]};
            publish(next, tile + TILE, buffer ^ 1);
            __syncthreads();
            if (tile + TILE < end) load_keys(buffer ^ 1);
            else copies_end_group();

            bool all = (i32)tile >= seen.highest && (i32)(tile + TILE - 1) <= seen.lowest && seen.alone &&
                       (there[0] & there[1]) == ~0u;
            // Scores are scaled by log2 e, so that weights are powers of two.
            float factor_in = s.softcap > 0.0f ? s.scale / s.softcap : s.scale * LOG2_E;
#pragma unroll
            for (int j = 0; j < NT; j++) {
#pragma unroll
                for (int e = 0; e < 4; e++) score[j][e] *= factor_in;
            }
            if (s.softcap > 0.0f) {
#pragma unroll
                for (int j = 0; j < NT; j++) {
#pragma unroll
                    for (int e = 0; e < 4; e++) score[j][e] = s.softcap * LOG2_E * tanhf(score[j][e]);
                }
            }
            if (!all) {
#pragma unroll
                for (int j = 0; j < NT; j++) {
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        u32 column = 8 * j + 2 * t + e % 2;
                        i32 p = (i32)(tile + column);
                        int h = e / 2;
                        bool is = p >= row_first[h] && p <= row_last[h] && row_seq[h] == seq &&
                                  (there[8 * j / 32] >> column % 32 & 1u) != 0;
                        if (!is) score[j][e] = -inf_f32();
                    }
                }
            }
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float most = -inf_f32();
#pragma unroll
                for (int j = 0; j < NT; j++) most = fmaxf(most, fmaxf(score[j][2 * h], score[j][2 * h + 1]));
                most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
                most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
                most = fmaxf(most, max_score[h]);
                // No position seen so far: any finite maximum works.
                float base = most == -inf_f32() ? 0.0f : most;
                float factor = exp2_fast(max_score[h] - base), weights = 0.0f;
                max_score[h] = most;
#pragma unroll
                for (int j = 0; j < NT; j++) {
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        float w = exp2_fast(score[j][2 * h + e] - base);
                        score[j][2 * h + e] = w;
                        weights += w;
                    }
                }
                // Each lane sums its own columns; the lanes are added at the end.
                sum[h] = __fmaf_rn(sum[h], factor, weights);
#pragma unroll
                for (int d = 0; d < DT; d++) {
                    acc[d][2 * h] *= factor;
                    acc[d][2 * h + 1] *= factor;
                }
            }
            copies_wait<1>();
            __syncthreads();
#pragma unroll
            for (int j = 0; j < NT / 2; j++) {
                u32 a[4] = {pack(score[2 * j][0], score[2 * j][1], T()), pack(score[2 * j][2], score[2 * j][3], T()),
                            pack(score[2 * j + 1][0], score[2 * j + 1][1], T()),
                            pack(score[2 * j + 1][2], score[2 * j + 1][3], T())};
#pragma unroll
                for (int d = 0; d < OUT / 16; d++) {
                    u32 b[4];
                    u32 r = 16 * j + lane / 8 % 2 * 8 + lane % 8;
                    load_matrices_transposed(b, values + r * VALUE_STRIDE + 32 * d + lane / 16 * 16);
                    multiply(acc[2 * d], a, b, T());
                    multiply(acc[2 * d + 1], a, b + 2, T());
                }
            }
            __syncthreads();
        }
        copies_wait<0>();
        if (seen.alone) break;
    }

#pragma unroll
    for (int h = 0; h < 2; h++) {
        sum[h] += __shfl_xor_sync(0xffffffffu, sum[h], 1);
        sum[h] += __shfl_xor_sync(0xffffffffu, sum[h], 2);
        bool empty = row_last[h] < 0 || sum[h] == 0.0f;
        if (sinks != nullptr) sum[h] += exp2_fast(sinks[head] * LOG2_E - max_score[h]);
        float inverse = 1.0f / sum[h];
        u32 row = first_row + 16 * warp + g + 8 * h;
        if (row < s.n && row_mine[h]) {
            u64 at = ((u64)row * s.n_heads + head) * s.head_dim;
#pragma unroll
            for (int d = 0; d < DT; d++) {
                u32 column = first_out + 8 * d + 2 * t;
                if (column < s.head_dim) {
                    float low = empty ? 0.0f : acc[d][2 * h] * inverse;
                    float high = empty ? 0.0f : acc[d][2 * h + 1] * inverse;
                    if (y != nullptr) *(float2*)(y + at + column) = make_float2(low, high);
                    if (narrow != nullptr) {
                        u32 both = s.narrow_kind == 1 ? pack(low, high, F16()) : pack(low, high, BF16());
                        *(u32*)(narrow + at + column) = both;
                    }
                }
            }
        }
    }
}

// shared_bytes: 128 (2 D + 16) + 64 (2 OUT + 16) + sizeof(Shared); src/flash.rs has the same numbers.
#define FLASH(size, out, name, T, BLOCKS)                                                                          \
    extern "C" __global__ __launch_bounds__(128, BLOCKS) void flash_d##size##_##name(                              \
        float* y, u16* narrow, const float* q, const T* k_cache, const T* v_cache, const i32* positions,           \
        const i32* seqs, const i32* tables, Rows q_rows, Sizes s, const float* sinks) {                            \
        flash<T, size, out>(y, narrow, q, k_cache, v_cache, positions, seqs, tables, q_rows, s, sinks);            \
    }

// unit d64_f16
FLASH(64, 64, f16, F16, 3)
// unit d64_bf16
FLASH(64, 64, bf16, BF16, 3)
// unit d96_f16
FLASH(96, 96, f16, F16, 2)
// unit d96_bf16
FLASH(96, 96, bf16, BF16, 2)
// unit d128_f16
FLASH(128, 128, f16, F16, 2)
// unit d128_bf16
FLASH(128, 128, bf16, BF16, 2)
// unit d256_f16
FLASH(256, 256, f16, F16, 1)
// unit d256_bf16
FLASH(256, 256, bf16, BF16, 1)
// unit d512_f16
FLASH(512, 256, f16, F16, 1)
// unit d512_bf16
FLASH(512, 256, bf16, BF16, 1)
