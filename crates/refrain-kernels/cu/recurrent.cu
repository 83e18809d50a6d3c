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
#include "mma.cuh"
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
// A block has DELTA_BLOCK rows of a head's state in registers; eight lanes share one of them, and lane j has
// elements 32 r + 4 j .. 32 r + 4 j + 3 of it. The block walks through the rows of a sequence, DELTA_ROWS at a
// time: while it walks, the next ones are copied to shared memory. What does not depend on the state (norms of
// q and k, their product, decay and step) is computed for all rows of a group at once, so that a row of the
// walk is two short sums over eight lanes. Both are of the state before the row:
//   S' q = keep (S q) + change (k q), with change = beta (v - keep (S k)).
// A row's arithmetic is the same wherever its group begins.
//
// Launch       grid (ceil(v_dim / DELTA_BLOCK), n_heads, n_seqs), block (128), shared 0
// Requires     k_dim <= 32 * N, n_heads a multiple of n_key_heads
const u32 DELTA_LANES = 8;
const u32 DELTA_BLOCK = 128 / DELTA_LANES;

struct DeltaSizes {
    u32 n_key_heads, n_heads, k_dim, v_dim, is_tiled;
    float scale, eps;
};

struct DeltaInputs {
    const float *q, *k, *v, *a, *b;
};

struct DeltaStrides {
    Rows q, k, v, a, b;
};

// What a row's update takes besides q, k and v.
struct __align__(16) DeltaFactors {
    float keep;     // factor on the state
    float of_k;     // keep / |k|
    float change;   // beta / |k|
    float of_q;     // scale / |q|
    float kq;       // k . q
    float unused[3];
};

// A group of rows in shared memory. q and k are padded with zeros.
template <int N> struct DeltaGroup {
    static const u32 ROWS = N == 8 ? 8 : 16, PITCH = 32 * N;
    float q[ROWS * PITCH], k[ROWS * PITCH], v[ROWS * DELTA_BLOCK], a[ROWS], b[ROWS];
};

// Copies four elements of which n are there, and zeros.
inline void copy_four(float* to, const float* from, u32 n) {
    if (((u64)from & 15) == 0 && n > 0) {
        copy_async_bytes(to, from, 4 * min(n, 4u));
        return;
    }
#pragma unroll
    for (u32 e = 0; e < 4; e++) to[e] = e < n ? from[e] : 0.0f;
}

inline float dot_four(float4 a, float4 b) { return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, a.x * b.x))); }

// Sum over the eight lanes of a state row.
inline float sum_lanes(float x) {
#pragma unroll
    for (u32 step = 1; step < DELTA_LANES; step *= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}

template <int N>
inline void gated_delta(float* y, float* state, const DeltaInputs& in, const float* decay, const float* dt_bias,
                        const i32* positions, const i32* seqs, const i32* slots, const DeltaStrides& at,
                        const SlotSizes& sizes, const DeltaSizes& s) {
    typedef DeltaGroup<N> Group;
    const u32 ROWS = Group::ROWS, PITCH = Group::PITCH, VALUES = ROWS * DELTA_BLOCK / 128, EACH = ROWS / 4;
    __shared__ __align__(16) Group groups[2];
    __shared__ DeltaFactors factors[ROWS];
    let_next_start();
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, head = blockIdx.y, seq = blockIdx.z;
    u32 own = threadIdx.x / DELTA_LANES, part = 4 * (threadIdx.x % DELTA_LANES);
    u32 first_column = blockIdx.x * DELTA_BLOCK, column = first_column + own;
    u32 key_head = s.is_tiled ? head % s.n_key_heads : head / (s.n_heads / s.n_key_heads);
    float rate = decay[head], bias = dt_bias[head];
    wait_for_previous();
    SeqChunk chunk = find_chunk(positions, seqs, slots, sizes, seq);
    bool is_there = column < s.v_dim;
    for (u32 row = seq; row < sizes.n_tokens; row += sizes.n_seqs) {
        if (positions[row] < 0 && part == 0 && is_there) y[((u64)row * s.n_heads + head) * s.v_dim + column] = 0.0f;
    }
    if (chunk.n_rows == 0) return;
    u64 state_row = ((u64)head * s.v_dim + column) * s.k_dim, slot_len = (u64)s.n_heads * s.v_dim * s.k_dim;
    bool in_fours = s.k_dim % 4 == 0 && ((u64)state & 15) == 0;
    float4 held[N];
#pragma unroll
    for (int r = 0; r < N; r++) {
        held[r] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        u32 i = 32 * r + part;
        if (chunk.read < 0 || !is_there || i >= s.k_dim) continue;
        const float* from = state + chunk.read * slot_len + state_row + i;
        if (in_fours) {
            held[r] = *(const float4*)from;
        } else {
            held[r].x = from[0];
            if (i + 1 < s.k_dim) held[r].y = from[1];
            if (i + 2 < s.k_dim) held[r].z = from[2];
            if (i + 3 < s.k_dim) held[r].w = from[3];
        }
    }
    // Values and gates of the next group, on their way to shared memory.
    float values[VALUES], gate_a = 0.0f, gate_b = 0.0f;
    auto load = [&](u32 begin) {
        Group& to = groups[begin / ROWS % 2];
        u32 n = chunk.n_rows - min(begin, chunk.n_rows);
        for (u32 i = threadIdx.x; i < ROWS * PITCH / 4; i += 128) {
            u32 of = i / (PITCH / 4), e = 4 * (i % (PITCH / 4)), row = (chunk.first + begin + of) * s.n_key_heads + key_head;
            if (of >= n) break;
            u32 left = e < s.k_dim ? s.k_dim - e : 0;
            copy_four(to.q + of * PITCH + e, in.q + at.q.start(row) + e, left);
            copy_four(to.k + of * PITCH + e, in.k + at.k.start(row) + e, left);
        }
        copies_end_group();
#pragma unroll
        for (u32 i = 0; i < VALUES; i++) {
            u32 of = (threadIdx.x + 128 * i) / DELTA_BLOCK, c = first_column + threadIdx.x % DELTA_BLOCK;
            values[i] = 0.0f;
            if (of < n && c < s.v_dim) values[i] = in.v[at.v.start((chunk.first + begin + of) * s.n_heads + head) + c];
        }
        if (threadIdx.x < min(n, ROWS)) {
            u32 row = chunk.first + begin + threadIdx.x;
            gate_a = in.a[at.a.start(row) + head];
            gate_b = in.b[at.b.start(row) + head];
        }
    };
    load(0);
#pragma unroll 1
    for (u32 begin = 0; begin < chunk.n_rows; begin += ROWS) {
        Group& group = groups[begin / ROWS % 2];
        u32 n = min(ROWS, chunk.n_rows - begin);
#pragma unroll
        for (u32 i = 0; i < VALUES; i++) group.v[threadIdx.x + 128 * i] = values[i];
        if (threadIdx.x < ROWS) {
            group.a[threadIdx.x] = gate_a;
            group.b[threadIdx.x] = gate_b;
        }
        copies_wait<0>();
        __syncthreads();
        // Every thread is done with the other group now.
        load(begin + ROWS);
        // Each warp adds the products of EACH rows; then a lane has each of them.
        float kk = 0.0f, qq = 0.0f, kq = 0.0f;
#pragma unroll
        for (u32 i = 0; i < EACH; i++) {
            u32 of = warp * EACH + i;
            if (of >= n) break;
            const float *q = group.q + of * PITCH + lane, *k = group.k + of * PITCH + lane;
            float of_kk = 0.0f, of_qq = 0.0f, of_kq = 0.0f;
#pragma unroll
            for (int r = 0; r < N; r++) {
                of_kk = fmaf(k[32 * r], k[32 * r], of_kk);
                of_qq = fmaf(q[32 * r], q[32 * r], of_qq);
                of_kq = fmaf(k[32 * r], q[32 * r], of_kq);
            }
            of_kk = warp_reduce(of_kk, Add());
            of_qq = warp_reduce(of_qq, Add());
            of_kq = warp_reduce(of_kq, Add());
            if (lane == i) kk = of_kk, qq = of_qq, kq = of_kq;
        }
        u32 of_lane = warp * EACH + lane;
        if (lane < EACH && of_lane < n) {
            float dt = group.a[of_lane] + bias, beta = sigmoid(group.b[of_lane]);
            float keep = expf(rate * (fmaxf(dt, 0.0f) + log1pf(expf(-fabsf(dt)))));
            float k_unit = 1.0f / sqrtf(kk + s.eps), q_unit = s.scale / sqrtf(qq + s.eps);
            factors[of_lane] = DeltaFactors{keep, keep * k_unit, k_unit * beta, q_unit, kq, {}};
        }
        __syncthreads();
        float* to = y + ((u64)(chunk.first + begin) * s.n_heads + head) * s.v_dim + column;
#pragma unroll 2
        for (u32 of = 0; of < n; of++) {
            const float *q = group.q + of * PITCH + part, *k = group.k + of * PITCH + part;
            DeltaFactors f = factors[of];
            float4 key[N];
            float sk = 0.0f, sq = 0.0f;
#pragma unroll
            for (int r = 0; r < N; r++) {
                key[r] = *(const float4*)(k + 32 * r);
                sk += dot_four(held[r], key[r]);
                sq += dot_four(held[r], *(const float4*)(q + 32 * r));
            }
            sk = sum_lanes(sk);
            sq = sum_lanes(sq);
            float change = f.change * (group.v[of * DELTA_BLOCK + own] - f.of_k * sk);
            if (part == 0 && is_there) to[(u64)of * s.n_heads * s.v_dim] = f.of_q * fmaf(change, f.kq, f.keep * sq);
#pragma unroll
            for (int r = 0; r < N; r++) {
                held[r].x = fmaf(change, key[r].x, f.keep * held[r].x);
                held[r].y = fmaf(change, key[r].y, f.keep * held[r].y);
                held[r].z = fmaf(change, key[r].z, f.keep * held[r].z);
                held[r].w = fmaf(change, key[r].w, f.keep * held[r].w);
            }
        }
    }
    if (chunk.write < 0 || !is_there) return;
#pragma unroll
    for (int r = 0; r < N; r++) {
        u32 i = 32 * r + part;
        if (i >= s.k_dim) continue;
        float* out = state + chunk.write * slot_len + state_row + i;
        if (in_fours) {
            *(float4*)out = held[r];
        } else {
            out[0] = held[r].x;
            if (i + 1 < s.k_dim) out[1] = held[r].y;
            if (i + 2 < s.k_dim) out[2] = held[r].z;
            if (i + 3 < s.k_dim) out[3] = held[r].w;
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
