// loss.cu: cross-entropy of rows of logits, and its gradient
//
//   logits   [n, vocab]  T, rows of consecutive elements at rows.start(r)
//   targets  [n]         i32; negative: loss and gradient are zero; >= vocab: both are NaN
//   scale    [1]         f32
//   loss     [n]         f32 = scale * (log(sum(exp(logits))) - logits[target])
//   dx       [n, vocab]  T, dense = scale * (softmax(logits) - onehot(target))
//
// A row with at most 64 16-bit logits per thread is read from memory once and never written there as f32.
//
// Launch       grid (n), block (a multiple of 32, at most 512), shared 0
// Requires     wide: rows are 16-byte aligned and have a multiple of 8 elements
// Aliasing     dx may be logits if those are dense: a thread reads eight logits before it writes them, and
//              the target's logit is read before any write
// Accumulation f32. Exponentials of 16-bit logits are accurate to about 1e-6, those of f32 to the last bits
// Determinism  same bits every run: additions are in a fixed order
// Capture      safe: targets and scale are read at each run
#include "eight.cuh"
#include "functions.cuh"
#include "overlap.cuh"
#include "reduce.cuh"
#include "view.cuh"

// exp(x - shift) for a type of logits. An infinite logit minus itself gives NaN, as it should.
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

// Returns the shift that is subtracted before exponentials are summed: none if the maximum is infinite.
inline float shift_for(float max) { return fabsf(max) == inf_f32() ? 0.0f : max; }

// Converts a sum of exponentials to another shift.
inline float shifted(float sum, float from, float to) {
    return from == to || sum == 0.0f ? sum : sum * expf(from - to);
}

// Makes the compiler recompute values derived from x instead of keeping them in registers, which hold logits.
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
    // The sum so far is relative to the maximum so far.
    for (u32 at = 8 * threadIdx.x + KEPT * step; at < vocab; at += step) {
        Eight<T> e = load8(in + at, left(at), WIDE);
        float before = shift_for(max);
        most_of(e, left(at));
        sum = shifted(sum, before, shift_for(max));
        sum_of(e, left(at));
    }
    float most = block_reduce(max, Max(), -inf_f32());
    sum = block_reduce(shifted(sum, shift_for(max), shift_for(most)), Add(), 0.0f);
    // The maximum of numbers and a NaN is a number; the sum is NaN.
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
