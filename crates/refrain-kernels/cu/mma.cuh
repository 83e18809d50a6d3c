// mma.cuh: tensor cores of compute capability 8.0, and asynchronous copies to shared memory
//
// A warp multiplies 16 rows by 8 columns over 16 elements. With g = lane / 4 and t = lane % 4, a lane holds
//   a[0] row g, elements 2t 2t+1    a[1] row g + 8, the same    a[2], a[3]  the same rows, elements 2t+8 2t+9
//   b[0] column g, elements 2t 2t+1    b[1] column g, elements 2t+8 2t+9
//   c[0], c[1] row g, columns 2t 2t+1    c[2], c[3] row g + 8, the same columns
// On the host, shuffles and plain copies do the same, so that indexing is tested without a GPU.
#pragma once
#include "dtype.cuh"

#ifndef REFRAIN_ON_HOST

inline u32 shared_address(const void* p) {
    u32 at;
    asm("{ .reg .u64 t; cvta.to.shared.u64 t, %1; cvt.u32.u64 %0, t; }" : "=r"(at) : "l"(p));
    return at;
}

// Copies 16 bytes, or writes zeros; both addresses 16-byte aligned.
inline void copy_async(void* to, const void* from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
                 "r"(there ? 16 : 0)
                 : "memory");
}

// Copies the first n_bytes of 16 and writes zeros after them; both addresses 16-byte aligned. Nothing past
// n_bytes is read.
inline void copy_async_bytes(void* to, const void* from, u32 n_bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(n_bytes)
                 : "memory");
}

// An address in shared memory, for address arithmetic.
typedef u32 SharedPtr;
inline SharedPtr shared_ptr(const void* p) { return shared_address(p); }

// For rows that are read sequentially: prefetches 256 bytes into the L2 cache.
inline void copy_async(SharedPtr to, const void* from, bool there) {
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0)
                 : "memory");
}

inline void copies_end_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits for this thread's copies, except those of the newest N groups.
template <int N> inline void copies_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

// Loads four 8 x 8 matrices; lane 8 i + r supplies the address of row r of matrix i. Each lane gets elements
// 2t, 2t + 1 of row g of each.
inline void load_matrices(u32* r, SharedPtr row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row)
                 : "memory");
}
inline void load_matrices(u32* r, const void* row) { load_matrices(r, shared_ptr(row)); }

// The same transposed: each lane gets elements g of rows 2t and 2t + 1.
inline void load_matrices_transposed(u32* r, SharedPtr row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row)
                 : "memory");
}
inline void load_matrices_transposed(u32* r, const void* row) { load_matrices_transposed(r, shared_ptr(row)); }

#define MULTIPLY(T, name)                                                                                     \
    inline void multiply(float* c, const u32* a, const u32* b, T) {                                           \
        asm("mma.sync.aligned.m16n8k16.row.col.f32." name "." name ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, " \
            "{%8, %9}, {%0, %1, %2, %3};"                                                                     \
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                  \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));                              \
    }
MULTIPLY(F16, "f16")
MULTIPLY(BF16, "bf16")

// Packs two numbers rounded to nearest even, the first in the lower bits.
inline u32 pack(float low, float high, F16) {
    u32 y;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}
inline u32 pack(float low, float high, BF16) {
    u32 y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}

// Returns a b + c of two pairs, rounded once.
inline u32 multiply_add(u32 a, u32 b, u32 c, BF16) {
    u32 y;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(c));
    return y;
}

inline float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
inline float reciprocal_fast(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

#else

inline void copy_async(void* to, const void* from, bool there) {
    if (there) memcpy(to, from, 16);
    else memset(to, 0, 16);
}
inline void copy_async_bytes(void* to, const void* from, u32 n_bytes) {
    memset(to, 0, 16);
    memcpy(to, from, n_bytes);
}
typedef u8* SharedPtr;
inline SharedPtr shared_ptr(const void* p) { return (u8*)p; }
inline void copies_end_group() {}
template <int N> inline void copies_wait() {}

// Data that the lanes of a warp exchange; a shuffle acts as the barrier.
struct LaneExchange {
    const u8* row[32];
    float a[32][8], b[32][4];
    u32 words[32][3];
};
inline LaneExchange& lane_exchange() {
    static LaneExchange all[32];
    return all[threadIdx.x / 32];
}
inline void warp_barrier() { shuffle(0u, threadIdx.x % 32); }

inline void load_matrices(u32* r, const void* row) {
    u32 lane = threadIdx.x % 32;
    lane_exchange().row[lane] = (const u8*)row;
    warp_barrier();
    for (u32 i = 0; i < 4; i++) r[i] = *(const u32*)(lane_exchange().row[8 * i + lane / 4] + 4 * (lane % 4));
    warp_barrier();
}

inline void load_matrices_transposed(u32* r, const void* row) {
    u32 lane = threadIdx.x % 32;
    lane_exchange().row[lane] = (const u8*)row;
    warp_barrier();
    for (u32 i = 0; i < 4; i++) {
        const u8* const* rows = lane_exchange().row + 8 * i + 2 * (lane % 4);
        r[i] = *(const u16*)(rows[0] + 2 * (lane / 4)) | (u32)*(const u16*)(rows[1] + 2 * (lane / 4)) << 16;
    }
    warp_barrier();
}

template <typename T> inline float half_of(u32 word, bool high) {
    T x;
    x.bits = (u16)(high ? word >> 16 : word);
    return to_f32(x);
}

template <typename T> inline void multiply(float* c, const u32* a, const u32* b, T) {
    u32 lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    LaneExchange& all = lane_exchange();
    for (u32 i = 0; i < 8; i++) all.a[lane][i] = half_of<T>(a[i / 2], i % 2);
    for (u32 i = 0; i < 4; i++) all.b[lane][i] = half_of<T>(b[i / 2], i % 2);
    warp_barrier();
    for (u32 i = 0; i < 4; i++) {
        for (u32 column = 0; column < 2; column++) {
            const float* right = all.b[4 * (2 * t + column) + i];
            for (u32 half = 0; half < 2; half++) {
                const float* left = all.a[4 * g + i] + 2 * half;
                float& sum = c[2 * half + column];
                for (u32 e = 0; e < 2; e++) {
                    sum += left[e] * right[e];
                    sum += left[4 + e] * right[2 + e];
                }
            }
        }
    }
    warp_barrier();
}

template <typename T> inline u32 pack(float low, float high, T) {
    return from_f32<T>(low).bits | (u32)from_f32<T>(high).bits << 16;
}

inline u32 multiply_add(u32 a, u32 b, u32 c, BF16) {
    float y[2];
    for (u32 i = 0; i < 2; i++) {
        y[i] = fmaf(half_of<BF16>(a, i), half_of<BF16>(b, i), half_of<BF16>(c, i));
    }
    return pack(y[0], y[1], BF16());
}

inline float exp2_fast(float x) { return exp2f(x); }
inline float reciprocal_fast(float x) { return 1.0f / x; }

#endif
