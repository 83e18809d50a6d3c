// attend_seen.cuh: shared by attend.cu and its two cores: the positions that a row sees, their KV blocks, and
// sums of weighted vectors
#pragma once
#include "paged.cuh"

const u32 WARPS = 8;
const u32 THREADS = 32 * WARPS;
const u32 ALL_LANES = 0xffffffffu;
const float LOG2_E = 1.44269504088896340736f;
// Lower than any real score, and finite, so that differences with it are numbers.
const float NONE = -3.0e38f;

#ifndef REFRAIN_ON_HOST
// 2^x to two units in the last place; denormal results are flushed to zero.
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

// Reads, past the L1 cache, a value that another kernel may be writing: a guess, to be checked after the
// wait.
inline i32 peek(const i32* p) {
    i32 x;
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
    return x;
}
#endif

// cap tanh(x), with 2^x as the only transcendental function.
inline float capped(float x, float cap) {
    return cap - 2.0f * cap * reciprocal(power_of_2(2.0f * LOG2_E * x) + 1.0f);
}

// The cached positions of one head that a row sees, and their location.
struct Seen {
    const i32* table;
    u32 max_blocks, n_blocks, n_kv_heads, head_dim, kv_shift;
    u32 kv_head;
    u32 begin, end;  // positions

    inline bool has(u32 position) const { return position - begin < end - begin; }

    inline bool is_listed(u32 position) const { return position >> kv_shift < max_blocks; }

    inline i32 block_of(u32 position) const {
        return position < end && is_listed(position) ? table[position >> kv_shift] : -1;
    }

    // Like block_of, while the table may be changing.
    inline i32 peek_block_of(u32 position) const {
        return position < end && is_listed(position) ? peek(table + (position >> kv_shift)) : -1;
    }

    // Returns the offset of a position's first element in its block.
    inline u64 offset(i32 block, u32 position) const {
        u32 in_block = position & ((1u << kv_shift) - 1);
        u64 first = (u64)((u32)block * n_kv_heads + kv_head) << kv_shift;
        return (first + in_block) * head_dim;
    }
};

// The tiles of a warp, `step` positions apart. Lane i holds the block of tile i, so one load finds 32 of
// them.
struct Tiles {
    u32 first, step;
    i32 held, ahead;

    inline u32 position(u32 i) const { return first + i * step; }

    // Returns the block of tile i. All lanes call it for one tile after the other.
    inline i32 next(const Seen& seen, u32 i, u32 lane) {
        if (i % 32 == 0 && i != 0) {
            held = ahead;
            ahead = seen.block_of(position(i + 32 + lane));
        }
        return __shfl_sync(ALL_LANES, held, i % 32);
    }
};

// A sum of vectors with weights relative to 2^top: the vectors, their total weight, and the largest exponent.
struct Sum {
    float top, total;
    float4 sum;

    inline void clear() {
        top = NONE;
        total = 0.0f;
        sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }

    inline void scale_to(float new_top) {
        float factor = power_of_2(top - new_top);
        top = new_top;
        total *= factor;
        sum = make_float4(sum.x * factor, sum.y * factor, sum.z * factor, sum.w * factor);
    }

    // Adds another sum whose top is at most this one's (scale: its top and total).
    inline void add(float2 scale, float4 other) {
        float factor = power_of_2(scale.x - top);
        total = __fmaf_rn(scale.y, factor, total);
        sum.x = __fmaf_rn(other.x, factor, sum.x);
        sum.y = __fmaf_rn(other.y, factor, sum.y);
        sum.z = __fmaf_rn(other.z, factor, sum.z);
        sum.w = __fmaf_rn(other.w, factor, sum.w);
    }

    // Adds across the lanes whose distance is a multiple of `first`.
    inline void add_lanes(u32 first) {
#pragma unroll
        for (u32 step = first; step < 32; step <<= 1) {
            scale_to(fmaxf(top, __shfl_xor_sync(ALL_LANES, top, step)));
            total += __shfl_xor_sync(ALL_LANES, total, step);
            sum.x += __shfl_xor_sync(ALL_LANES, sum.x, step);
            sum.y += __shfl_xor_sync(ALL_LANES, sum.y, step);
            sum.z += __shfl_xor_sync(ALL_LANES, sum.z, step);
            sum.w += __shfl_xor_sync(ALL_LANES, sum.w, step);
        }
    }

    inline float4 mean() const {
        // The best score has weight one, so the total is either zero or at least one.
        float inverse = total == 0.0f ? 0.0f : reciprocal(total);
        return make_float4(sum.x * inverse, sum.y * inverse, sum.z * inverse, sum.w * inverse);
    }
};
