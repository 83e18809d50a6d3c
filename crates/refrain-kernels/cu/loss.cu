// loss.cu: cross-entropy of rows of logits, and its gradient in their place
//
//   logits   [n, vocab]  T, rows of consecutive elements at rows.start(r)
//   targets  [n]         i32; negative: no loss and a gradient of zero; vocab or more: NaN for both
//   scale    [1]         f32
//   loss     [n]         f32 = scale * (log(sum(exp(logits))) - logits[target])
//   dx       [n, vocab]  T, dense = scale * (softmax(logits) - (1 at the target))
//
// Launch    grid (n), block (a multiple of 32, at most 512), shared 0
// Requires  wide: rows start at multiples of 16 bytes and have a multiple of 8 elements
// Aliasing  dx may be logits when those are dense: a thread reads eight logits before it writes there, the target's are read
//           before any is written
// A row of at most 64 logits of 16 bits a thread is read from memory once, and never becomes f32 there; exponentials of
// these are good to about 1e-6, those of f32 to the last bits. Sums in f32, fixed order:
// same bits every run. Capture: safe; targets and scale are read at each run.
#include "eight.cuh"
#include "functions.cuh"
#include "overlap.cuh"
#include "reduce.cuh"
#include "view.cuh"

// exp(x - shift) of a type of logits. log2(e) times an infinite logit minus itself is no number, as it should be.
template <typename T> struct Exponential {
    float shift;

    inline explicit Exponential(float shift) : shift(-1.4426950408889634f * shift) {}
    inline float operator()(float x) const { return quick_exp2(__fmaf_rn(x, 1.4426950408889634f, shift)); }
};

template <> struct Exponential<float> {
    float shift;

    inline explicit Exponential(float shift) : shift(shift) {}
    inline float operator()(float x) const { return expf(x - shift); }
};

// What is taken off before exponentials are summed: nothing where the largest is infinite.
inline float shift_for(float max) { return fabsf(max) == inf_f32() ? 0.0f : max; }

// A sum of exponentials with another shift.
inline float shifted(float sum, float from, float to) {
    return from == to || sum == 0.0f ? sum : sum * expf(from - to);
}

// What follows is worked out again from x rather than held in registers, which logits need.
inline void forget(u32& x) {
#ifndef REFRAIN_ON_HOST
    asm volatile("" : "+r"(x));
#endif
}

template <typename T, bool WIDE>
inline void cross_entropy(float* loss, T* dx, const T* logits, const i32* targets, const float* scale, const Rows& rows,
                          u32 vocab) {
    // 32 registers of a thread hold logits.
    const int KEPT = 16 / sizeof(T);
    const u32 step = 8 * blockDim.x, row = blockIdx.x;
    auto left = [=](u32 at) { return WIDE ? 8 : vocab - at; };
    i32 target = targets[row];
    const T* in = logits + rows.start(row);
    T* out = dx + (u64)row * vocab;
    if (target < 0 || (u32)target >= vocab) {
        float filler = target < 0 ? 0.0f : nan_f32(), v[8];
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] = filler;
        for (u32 at = 8 * threadIdx.x; at < vocab; at += step) store8(out + at, v, left(at), WIDE);
        if (threadIdx.x == 0) loss[row] = filler;
        return;
    }
    Eight<T> kept[KEPT];
    u32 mine = 8 * threadIdx.x;
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
        u32 at = mine + k * step;
        if (at < vocab) kept[k] = load8(in + at, left(at), WIDE);
    }
    float chosen = to_f32(in[target]), factor = scale[0];
    float max = -inf_f32(), sum = 0.0f;
    auto most_of = [&](const Eight<T>& e, u32 n) {
#pragma unroll
        for (u32 i = 0; i < 8; i++) {
            if (i < n) max = fmaxf(max, e[i]);
        }
    };
    auto sum_of = [&](const Eight<T>& e, u32 n) {
        Exponential<T> exponential(shift_for(max));
        float part = 0.0f;
#pragma unroll
        for (u32 i = 0; i < 8; i++) {
            if (i < n) part += exponential(e[i]);
        }
        sum += part;
    };
    forget(mine);
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
        u32 at = mine + k * step;
        if (at < vocab) most_of(kept[k], left(at));
    }
    forget(mine);
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
        u32 at = mine + k * step;
        if (at < vocab) sum_of(kept[k], left(at));
    }
    // The sum so far is of exponentials relative to the largest so far.
    for (u32 at = 8 * threadIdx.x + KEPT * step; at < vocab; at += step) {
        Eight<T> e = load8(in + at, left(at), WIDE);
        float before = shift_for(max);
        most_of(e, left(at));
        sum = shifted(sum, before, shift_for(max));
        sum_of(e, left(at));
    }
    float most = block_reduce(max, Max(), -inf_f32());
    sum = block_reduce(shifted(sum, shift_for(max), shift_for(most)), Add(), 0.0f);
    // The largest of some numbers and a NaN is a number; the sum is not.
    if (threadIdx.x == 0) loss[row] = factor * (most - chosen + logf(sum));
    float share = factor / sum;
    Exponential<T> exponential(most);
    auto store = [&](const Eight<T>& e, u32 at) {
        float v[8];
#pragma unroll
        for (u32 i = 0; i < 8; i++) v[i] = exponential(e[i]) * share;
        u32 from_target = (u32)target - at;
        if (from_target < 8) {
#pragma unroll
            for (u32 i = 0; i < 8; i++) v[i] -= from_target == i ? factor : 0.0f;
        }
        store8(out + at, v, left(at), WIDE);
    };
    forget(mine);
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
        u32 at = mine + k * step;
        if (at < vocab) store(kept[k], at);
    }
    for (u32 at = 8 * threadIdx.x + KEPT * step; at < vocab; at += step) {
        store(load8(in + at, left(at), WIDE), at);
    }
}

#define LOSS(name, T)                                                                                              \
    extern "C" __global__ __launch_bounds__(512, 2) void loss_cross_entropy_##name(                               \
        float* loss, T* dx, const T* logits, const i32* targets, const float* scale, Rows rows, u32 vocab, u32 wide) { \
        start();                                                                                                   \
        if (wide) cross_entropy<T, true>(loss, dx, logits, targets, scale, rows, vocab);                           \
        else cross_entropy<T, false>(loss, dx, logits, targets, scale, rows, vocab);                               \
    }

// unit f32
LOSS(f32, float)
// unit f16
LOSS(f16, F16)
// unit bf16
LOSS(bf16, BF16)
