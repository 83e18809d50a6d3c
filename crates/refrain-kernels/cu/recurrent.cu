// recurrent.cu: recurrent layers, whose state is in slots: short convolution and gated delta rule
//
//   positions  [n_tokens]    i32; negative: padding, which writes no slot and yields zeros
//   seqs       [n_tokens]    i32
//   slots      [n_seqs, 2]   i32; the two versions of each sequence's slot, negative: none
//   state      [n_slots, ..] f32
//
// The rows of a sequence are contiguous, with consecutive positions. With p the first row's position, the
// kernel reads version p % 2 and writes the other one. A sequence that begins at position 0, or whose slot is
// out of range, starts from zeros; a slot out of range is not written.
//
// Launch       see each kernel
// Requires     no two sequences of a launch share a slot
// Aliasing     none
// Accumulation f32
// Determinism  same bits every run, however a prompt is split into chunks: additions are in a fixed order
// Capture      safe: positions, sequences and slots are read at each run
#include "functions.cuh"
#include "reduce.cuh"
#include "view.cuh"

struct SlotSizes {
    u32 n_tokens, n_seqs, n_slots;
};

// A sequence's rows in this launch, and the slots it reads and writes (-1: none).
struct SeqChunk {
    u32 first, n_rows;
    i32 read, write;
};

inline i32 slot_or_none(i32 slot, u32 n_slots) { return slot >= 0 && (u32)slot < n_slots ? slot : -1; }

// Returns the rows and slots of a sequence. Every lane of a warp calls this.
inline SeqChunk find_chunk(const i32* positions, const i32* seqs, const i32* slots, const SlotSizes& sizes, u32 seq) {
    u32 lane = threadIdx.x % 32, first = sizes.n_tokens, n_rows = 0;
    for (u32 base = 0; base < sizes.n_tokens; base += 32) {
        u32 row = base + lane;
        bool is_own = row < sizes.n_tokens && seqs[row] == (i32)seq && positions[row] >= 0;
        u32 own = __ballot_sync(0xffffffffu, is_own);
        if (first == sizes.n_tokens) {
            if (own == 0) continue;
            first = base + __ffs(own) - 1;
            own >>= first - base;
            n_rows = ~own == 0 ? 32 : __ffs(~own) - 1;
            if (first + n_rows < base + 32) break;
        } else {
            u32 more = ~own == 0 ? 32 : __ffs(~own) - 1;
            n_rows += more;
            if (more < 32) break;
        }
    }
    if (n_rows == 0) return SeqChunk{0, 0, -1, -1};
    i32 position = positions[first];
    u32 version = (u32)position % 2;
    i32 read = position == 0 ? -1 : slot_or_none(slots[2 * seq + version], sizes.n_slots);
    return SeqChunk{first, n_rows, read, slot_or_none(slots[2 * seq + 1 - version], sizes.n_slots)};
}

// Short convolution: y[i, c] = f(sum over j of w[j, c] x[i - width + 1 + j, c])
//
//   state  [n_slots, width - 1, d]  the last inputs, oldest first
//   x      [n_tokens, d]            f32, rows of consecutive elements
//   w      [width, d]               f32
//   y      [n_tokens, d]            f32
//
// Launch       grid (ceil(d / 128), n_seqs, ceil(n_tokens / 32)), block (128), shared 0
// Requires     2 <= width <= 8
const u32 CONV_ROWS = 32;
const int MAX_WIDTH = 8;

extern "C" __global__ __launch_bounds__(128) void recurrent_short_conv_f32(
    float* y, float* state, const float* x, const float* __restrict__ w, const i32* positions, const i32* seqs,
    const i32* slots, Rows rows, SlotSizes sizes, u32 d, u32 width, u32 silu_after) {
    let_next_start();
    u32 c = blockIdx.x * 128 + threadIdx.x, seq = blockIdx.y;
    float filter[MAX_WIDTH];
#pragma unroll
    for (int j = 0; j < MAX_WIDTH; j++) filter[j] = j < (int)width && c < d ? w[(u64)j * d + c] : 0.0f;
    wait_for_previous();
    SeqChunk chunk = find_chunk(positions, seqs, slots, sizes, seq);
    if (c >= d) return;
    if (blockIdx.z == 0) {
        for (u32 row = seq; row < sizes.n_tokens; row += sizes.n_seqs)
            if (positions[row] < 0) y[(u64)row * d + c] = 0.0f;
    }
    u32 begin = blockIdx.z * CONV_ROWS;
    if (begin >= chunk.n_rows) return;
    u32 end = min(begin + CONV_ROWS, chunk.n_rows), n_before = width - 1;
    u64 slot_len = (u64)n_before * d;
    // seen[j] is the input n_before - j rows before the current one.
    float seen[MAX_WIDTH];
#pragma unroll
    for (int j = 0; j < MAX_WIDTH; j++) {
        seen[j] = 0.0f;
        if (j >= (int)n_before) continue;
        i32 i = (i32)begin - (i32)n_before + j;
        if (i >= 0) {
            seen[j] = x[rows.start(chunk.first + i) + c];
        } else if (chunk.read >= 0) {
            seen[j] = state[chunk.read * slot_len + (u64)(i + (i32)n_before) * d + c];
        }
    }
    for (u32 i = begin; i < end; i++) {
        float now = x[rows.start(chunk.first + i) + c], sum = 0.0f;
#pragma unroll
        for (int j = 0; j < MAX_WIDTH; j++) {
            if (j == (int)n_before) seen[j] = now;
            if (j <= (int)n_before) sum = fmaf(filter[j], seen[j], sum);
        }
        y[(u64)(chunk.first + i) * d + c] = silu_after ? silu(sum) : sum;
#pragma unroll
        for (int j = 0; j + 1 < MAX_WIDTH; j++) seen[j] = seen[j + 1];
    }
    if (end < chunk.n_rows || chunk.write < 0) return;
#pragma unroll
    for (int j = 0; j < MAX_WIDTH; j++)
        if (j < (int)n_before) state[chunk.write * slot_len + (u64)j * d + c] = seen[j];
}

// Gated delta rule, row by row (refrain-graph/src/recurrent.rs has the formula)
//
//   state    [n_slots, n_heads, v_dim, k_dim]
//   q, k     [n_tokens, n_key_heads, k_dim]  f32, heads of consecutive elements
//   v        [n_tokens, n_heads, v_dim]      f32, heads of consecutive elements
//   a, b     [n_tokens, n_heads]             f32, rows of consecutive elements
//   decay    [n_heads], dt_bias [n_heads]    f32
//   y        [n_tokens, n_heads, v_dim]      f32
//
// A warp keeps DELTA_COLUMNS rows of a head's state in registers, each spread over its lanes, and walks
// through the rows of a sequence. All sums of a row are reduced at once, because the output does not need the
// updated state S':
//   S' q = keep (S q) + change (k q), with change = beta (v - keep (S k)).
//
// Launch       grid (ceil(v_dim / DELTA_BLOCK), n_heads, n_seqs), block (128), shared 0
// Requires     k_dim <= 32 * N, n_heads a multiple of n_key_heads
const int DELTA_COLUMNS = 4;
const u32 DELTA_BLOCK = 4 * DELTA_COLUMNS;

struct DeltaSizes {
    u32 n_key_heads, n_heads, k_dim, v_dim, is_tiled;
    float scale, eps;
};

// One row's operands, as held by a lane.
template <int N> struct DeltaRow {
    float q[N], k[N], v[DELTA_COLUMNS], a, b;
};

struct DeltaInputs {
    const float *q, *k, *v, *a, *b;
};

struct DeltaStrides {
    Rows q, k, v, a, b;
};

template <int N>
inline void load_row(DeltaRow<N>& to, const DeltaInputs& in, const DeltaStrides& at, const DeltaSizes& s, u32 row, u32 head,
                     u32 key_head, u32 column) {
    u32 lane = threadIdx.x % 32;
    const float* q = in.q + at.q.start(row * s.n_key_heads + key_head);
    const float* k = in.k + at.k.start(row * s.n_key_heads + key_head);
    const float* v = in.v + at.v.start(row * s.n_heads + head);
#pragma unroll
    for (int r = 0; r < N; r++) {
        u32 i = lane + 32 * r;
        to.q[r] = i < s.k_dim ? q[i] : 0.0f;
        to.k[r] = i < s.k_dim ? k[i] : 0.0f;
    }
#pragma unroll
    for (int c = 0; c < DELTA_COLUMNS; c++) to.v[c] = column + c < s.v_dim ? v[column + c] : 0.0f;
    to.a = in.a[at.a.start(row) + head];
    to.b = in.b[at.b.start(row) + head];
}

template <int N>
inline void gated_delta(float* y, float* state, const DeltaInputs& in, const float* decay, const float* dt_bias,
                        const i32* positions, const i32* seqs, const i32* slots, const DeltaStrides& at,
                        const SlotSizes& sizes, const DeltaSizes& s) {
    let_next_start();
    u32 lane = threadIdx.x % 32, head = blockIdx.y, seq = blockIdx.z;
    u32 column = blockIdx.x * DELTA_BLOCK + threadIdx.x / 32 * DELTA_COLUMNS;
    u32 key_head = s.is_tiled ? head % s.n_key_heads : head / (s.n_heads / s.n_key_heads);
    float rate = decay[head], bias = dt_bias[head];
    wait_for_previous();
    SeqChunk chunk = find_chunk(positions, seqs, slots, sizes, seq);
    if (column >= s.v_dim) return;
    u32 n_columns = min((u32)DELTA_COLUMNS, s.v_dim - column);
    for (u32 row = seq; row < sizes.n_tokens; row += sizes.n_seqs) {
        if (positions[row] < 0 && lane < n_columns) y[((u64)row * s.n_heads + head) * s.v_dim + column + lane] = 0.0f;
    }
    if (chunk.n_rows == 0) return;
    u64 head_len = (u64)s.v_dim * s.k_dim, slot_len = s.n_heads * head_len;
    float held[DELTA_COLUMNS][N];
#pragma unroll
    for (int c = 0; c < DELTA_COLUMNS; c++) {
#pragma unroll
        for (int r = 0; r < N; r++) {
            u32 i = lane + 32 * r;
            bool is_there = chunk.read >= 0 && i < s.k_dim && column + c < s.v_dim;
            held[c][r] = is_there ? state[chunk.read * slot_len + head * head_len + (u64)(column + c) * s.k_dim + i] : 0.0f;
        }
    }
    DeltaRow<N> now, next;
    load_row<N>(next, in, at, s, chunk.first, head, key_head, column);
    for (u32 row = chunk.first; row < chunk.first + chunk.n_rows; row++) {
        now = next;
        if (row + 1 < chunk.first + chunk.n_rows) load_row<N>(next, in, at, s, row + 1, head, key_head, column);
        float kk = 0.0f, qq = 0.0f, kq = 0.0f, sk[DELTA_COLUMNS], sq[DELTA_COLUMNS];
#pragma unroll
        for (int r = 0; r < N; r++) {
            kk = fmaf(now.k[r], now.k[r], kk);
            qq = fmaf(now.q[r], now.q[r], qq);
            kq = fmaf(now.k[r], now.q[r], kq);
        }
#pragma unroll
        for (int c = 0; c < DELTA_COLUMNS; c++) {
            sk[c] = sq[c] = 0.0f;
#pragma unroll
            for (int r = 0; r < N; r++) {
                sk[c] = fmaf(held[c][r], now.k[r], sk[c]);
                sq[c] = fmaf(held[c][r], now.q[r], sq[c]);
            }
        }
        kk = warp_reduce(kk, Add());
        qq = warp_reduce(qq, Add());
        kq = warp_reduce(kq, Add());
#pragma unroll
        for (int c = 0; c < DELTA_COLUMNS; c++) {
            sk[c] = warp_reduce(sk[c], Add());
            sq[c] = warp_reduce(sq[c], Add());
        }
        float k_unit = 1.0f / sqrtf(kk + s.eps), q_unit = s.scale / sqrtf(qq + s.eps);
        float dt = now.a + bias, softplus = fmaxf(dt, 0.0f) + log1pf(expf(-fabsf(dt)));
        float keep = expf(rate * softplus), beta = sigmoid(now.b), out = 0.0f;
#pragma unroll
        for (int c = 0; c < DELTA_COLUMNS; c++) {
            float change = k_unit * beta * (now.v[c] - keep * k_unit * sk[c]);
            float sum = q_unit * fmaf(change, kq, keep * sq[c]);
            out = lane == (u32)c ? sum : out;
#pragma unroll
            for (int r = 0; r < N; r++) held[c][r] = fmaf(change, now.k[r], keep * held[c][r]);
        }
        if (lane < n_columns) y[((u64)row * s.n_heads + head) * s.v_dim + column + lane] = out;
    }
    if (chunk.write < 0) return;
#pragma unroll
    for (int c = 0; c < DELTA_COLUMNS; c++) {
#pragma unroll
        for (int r = 0; r < N; r++) {
            u32 i = lane + 32 * r;
            if (i < s.k_dim && column + c < s.v_dim)
                state[chunk.write * slot_len + head * head_len + (u64)(column + c) * s.k_dim + i] = held[c][r];
        }
    }
}

#define GATED_DELTA(N)                                                                                             \
    extern "C" __global__ __launch_bounds__(128) void recurrent_gated_delta_##N##_f32(                             \
        float* y, float* state, const float* q, const float* k, const float* v, const float* a, const float* b,    \
        const float* __restrict__ decay, const float* __restrict__ dt_bias, const i32* positions, const i32* seqs, \
        const i32* slots, DeltaStrides at, SlotSizes sizes, DeltaSizes s) {                                        \
        gated_delta<N>(y, state, DeltaInputs{q, k, v, a, b}, decay, dt_bias, positions, seqs, slots, at, sizes, s); \
    }

GATED_DELTA(1)
GATED_DELTA(2)
GATED_DELTA(4)
GATED_DELTA(8)
