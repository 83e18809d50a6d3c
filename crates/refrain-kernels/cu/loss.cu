// loss.cu: cross-entropy of rows of logits, and its gradient in their place
//
//   logits   [n, vocab]  T, rows of consecutive elements at rows.start(r)
//   targets  [n]         i32; negative: no loss and a gradient of zero; vocab or more: NaN for both
//   scale    [1]         f32
//   loss     [n]         f32 = scale * (log(sum(exp(logits))) - logits[target])
//   dx       [n, vocab]  T, dense = scale * (softmax(logits) - (1 at the target))
//
// Launch    grid (n), block (512), shared 0
// Requires  wide: rows start at multiples of 16 bytes and have a multiple of 8 elements
// Aliasing  dx may be logits when those are dense: a thread reads eight logits before it writes there, the target's are read
//           before any is written
// A row of at most 32,768 logits of 16 bits is read from memory once, and never becomes f32 there. Sums in f32, fixed order:
// same bits every run. Capture: safe; targets and scale are read at each run.
#include "eight.cuh"
#include "overlap.cuh"
#include "reduce.cuh"
#include "view.cuh"

enum : u32 { THREADS = 512 };

template <typename T>
inline void cross_entropy(float* loss, T* dx, const T* logits, const i32* targets, const float* scale, const Rows& rows,
                          u32 vocab, u32 wide) {
    // 32 registers of a thread hold logits.
    const int KEPT = 16 / sizeof(T);
    start();
    u32 row = blockIdx.x;
    i32 target = targets[row];
    const T* in = logits + rows.start(row);
    T* out = dx + (u64)row * vocab;
    if (target < 0 || (u32)target >= vocab) {
        float filler = target < 0 ? 0.0f : nan_f32(), v[8];
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] = filler;
        for (u32 at = 8 * threadIdx.x; at < vocab; at += 8 * THREADS) store8(out + at, v, vocab - at, wide);
        if (threadIdx.x == 0) loss[row] = filler;
        return;
    }
    float chosen = to_f32(in[target]), factor = scale[0];
    Eight<T> kept[KEPT];
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
        u32 at = 8 * (threadIdx.x + k * THREADS);
        if (at < vocab) kept[k] = load8(in + at, vocab - at, wide);
    }
    float max = -inf_f32(), sum = 0.0f;
    // The sum so far is of exponentials relative to the largest so far.
    auto add = [&](const Eight<T>& e, u32 n) {
        float most = max;
#pragma unroll
        for (u32 i = 0; i < 8; i++) {
            if (i < n) most = fmaxf(most, e[i]);
        }
        // An infinite logit relative to itself is no difference.
        float part = 0.0f;
#pragma unroll
        for (u32 i = 0; i < 8; i++) {
            if (i < n) part += expf(e[i] == most ? 0.0f : e[i] - most);
        }
        sum = (max == most ? sum : sum * expf(max - most)) + part;
        max = most;
    };
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
        u32 at = 8 * (threadIdx.x + k * THREADS);
        if (at < vocab) add(kept[k], vocab - at);
    }
    for (u32 at = 8 * (threadIdx.x + KEPT * THREADS); at < vocab; at += 8 * THREADS) {
        add(load8(in + at, vocab - at, wide), vocab - at);
    }
    float most = block_reduce(max, Max(), -inf_f32());
    sum = block_reduce(max == most ? sum : sum * expf(max - most), Add(), 0.0f);
    // The largest of some numbers and a NaN is a number; the sum is not.
    if (threadIdx.x == 0) loss[row] = factor * (most - chosen + logf(sum));
    float share = factor / sum;
    auto store = [&](const Eight<T>& e, u32 at) {
        float v[8];
#pragma unroll
        for (u32 i = 0; i < 8; i++) {
            v[i] = expf(e[i] - most) * share;
            if (at + i == (u32)target) v[i] -= factor;
        }
        store8(out + at, v, vocab - at, wide);
    };
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
        u32 at = 8 * (threadIdx.x + k * THREADS);
        if (at < vocab) store(kept[k], at);
    }
    for (u32 at = 8 * (threadIdx.x + KEPT * THREADS); at < vocab; at += 8 * THREADS) {
        store(load8(in + at, vocab - at, wide), at);
    }
}

#define LOSS(name, T)                                                                                              \
    extern "C" __global__ __launch_bounds__(512) void loss_cross_entropy_##name(                                  \
        float* loss, T* dx, const T* logits, const i32* targets, const float* scale, Rows rows, u32 vocab, u32 wide) { \
        cross_entropy(loss, dx, logits, targets, scale, rows, vocab, wide);                                        \
    }

// unit f32
LOSS(f32, float)
// unit f16
LOSS(f16, F16)
// unit bf16
LOSS(bf16, BF16)
