// cuda.h: the CUDA features that the kernels use, for a C++ compiler. A thread of a block is a fiber (fibers.cpp).
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#define REFRAIN_ON_HOST
#define __global__
#define __device__
#define __shared__ static  // blocks run one after another
#define __launch_bounds__(...)
#define __noinline__
#define __align__(n) __attribute__((aligned(n)))

struct Index { unsigned x, y, z; };
extern Index threadIdx, blockIdx, blockDim, gridDim;

struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

template <typename To, typename From> To same_bits(From x) {
    To y;
    memcpy(&y, &x, sizeof(y));
    return y;
}
inline float __uint_as_float(unsigned x) { return same_bits<float>(x); }
inline unsigned __float_as_uint(float x) { return same_bits<unsigned>(x); }
inline double __longlong_as_double(long long x) { return same_bits<double>(x); }
inline long long __double_as_longlong(double x) { return same_bits<long long>(x); }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }

inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float x) { return expf(x); }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned select) {
    uint64_t both = (uint64_t)b << 32 | a;
    unsigned y = 0;
    for (int i = 0; i < 4; i++) y |= (unsigned)(both >> (8 * (select >> (4 * i) & 7)) & 0xff) << (8 * i);
    return y;
}
// Dot product of four byte pairs; the bytes of x are signed.
inline int dot_bytes(unsigned q, unsigned x, int sum, bool is_signed) {
    for (int i = 0; i < 4; i++) {
        int left = is_signed ? (int)(int8_t)(q >> (8 * i)) : (int)(q >> (8 * i) & 0xff);
        sum += left * (int)(int8_t)(x >> (8 * i));
    }
    return sum;
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(unsigned x) { return x == 0 ? 32 : __builtin_clz(x); }
inline int __clzll(unsigned long long x) { return x == 0 ? 64 : __builtin_clzll(x); }
inline int __ffs(unsigned x) { return __builtin_ffs((int)x); }
// Fibers only switch at barriers and shuffles, so this is atomic.
template <typename T> T atomicAdd(T* p, T x) {
    T before = *p;
    *p += x;
    return before;
}

template <typename T> T atomicMax(T* p, T x) {
    T before = *p;
    *p = before > x ? before : x;
    return before;
}

inline float f16_to_f32(unsigned short bits) { return (float)same_bits<_Float16>(bits); }
inline unsigned short f32_to_f16(float x) { return same_bits<unsigned short>((_Float16)x); }
inline void store_release_system(unsigned long long* p, unsigned long long x) {
    __atomic_store_n(p, x, __ATOMIC_RELEASE);
}
inline unsigned long long load_system(const unsigned long long* p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
// On the host, the condition of a loop is the address of a word.
inline void cudaGraphSetConditional(unsigned long long condition, unsigned value) { *(unsigned*)condition = value; }
inline float power_of_2(float x) { return exp2f(x); }
inline float quick_exp2(float x) { return exp2f(x); }
inline float reciprocal(float x) { return 1.0f / x; }
inline bool is_last(unsigned* counter, unsigned n) {
    unsigned before = *counter;
    *counter = before >= n - 1 ? 0 : before + 1;
    return before == n - 1;
}
// Returns wrong values for the first reads of a block, as many as fibers.cpp sets: kernels must verify guesses.
extern unsigned n_wrong_peeks;
inline int peek(const int* p) {
    int wrong = n_wrong_peeks > 0;
    n_wrong_peeks -= wrong;
    return *p ^ wrong;
}
inline void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

// Waits for all threads of the block that have not returned. Returns whether any of them passed true.
bool block_wait(bool vote);
// Waits until n threads have arrived at a barrier.
void group_wait(unsigned barrier, unsigned n);
// Waits for all threads of the warp that have not returned. Returns the value that lane `from` passed.
uint64_t warp_wait(uint64_t mine, unsigned from);
// Like `warp_wait`, but returns the mask of lanes that passed true.
unsigned warp_vote(bool vote);

inline void __syncwarp() { warp_vote(false); }
inline void __syncthreads() { block_wait(false); }
inline int __syncthreads_or(int vote) { return block_wait(vote != 0); }

template <typename T> T shuffle(T x, unsigned from) {
    uint64_t word = 0;
    memcpy(&word, &x, sizeof(x));
    word = warp_wait(word, from);
    memcpy(&x, &word, sizeof(x));
    return x;
}
inline unsigned __ballot_sync(unsigned, bool vote) { return warp_vote(vote); }
template <typename T> T __shfl_sync(unsigned, T x, unsigned lane) { return shuffle(x, lane); }
template <typename T> T __shfl_xor_sync(unsigned, T x, unsigned mask) { return shuffle(x, threadIdx.x % 32 ^ mask); }
template <typename T> T __shfl_up_sync(unsigned, T x, unsigned step) {
    unsigned lane = threadIdx.x % 32;
    return shuffle(x, lane >= step ? lane - step : lane);
}

inline unsigned __reduce_max_sync(unsigned mask, unsigned x) {
    for (unsigned step = 16; step > 0; step /= 2) x = max(x, __shfl_xor_sync(mask, x, step));
    return x;
}

// Registry of kernels by name; converts parameters at offsets to a call.
using Bind = std::function<std::function<void()>(const uint8_t*, const size_t*)>;
std::map<std::string, Bind>& kernels();

template <typename T> T take(const uint8_t* p) {
    T x;
    memcpy((void*)&x, p, sizeof(x));
    return x;
}

struct Register {
    template <typename... A> Register(const char* name, void (*kernel)(A...)) {
        kernels()[name] = [=](const uint8_t* params, const size_t* offsets) {
            return bind(kernel, params, offsets, std::index_sequence_for<A...>());
        };
    }
    template <typename... A, size_t... I>
    static std::function<void()> bind(void (*kernel)(A...), const uint8_t* params, const size_t* offsets,
                                      std::index_sequence<I...>) {
        auto args = std::make_tuple(take<A>(params + offsets[I])...);
        return [=] { std::apply(kernel, args); };
    }
};
