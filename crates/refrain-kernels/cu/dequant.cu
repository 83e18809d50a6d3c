// dequant.cu: y = w, a quantised matrix in BF16
//
//   w  blocks as in the file, dense
//   y  [8 n_parts]  BF16, dense
//
// Launch    grid (ceil(n_parts / 256)), block (256), shared 0: a thread has one part of eight elements
// Requires  w, y at multiples of 16 bytes
// Aliasing  none
// Values are formed in f32 as quant.cuh says, then rounded to nearest even. Capture: safe.
#include "mma.cuh"
#include "overlap.cuh"
#include "quant.cuh"

// How the blocks of a matrix lie: part i of it as eight values, and where the two halves of them belong.
template <typename Q> struct FileBlocks {
    inline static void decode(const u8* w, u64 i, float* out, u64& first, u64& second) {
        const int parts = Q::LEN / 8;
        u64 block = i / parts;
        int part = (int)(i % parts);
        Q::decode(Q::load(w + block * Q::BYTES, part), part, out);
        first = block * Q::LEN + Q::first(part);
        second = block * Q::LEN + Q::second(part);
    }
};

template <typename Blocks> inline void dequant(BF16* y, const u8* w, u64 n_parts) {
    start();
    u64 i = (u64)blockIdx.x * 256 + threadIdx.x;
    if (i >= n_parts) return;
    float v[8];
    u64 first, second;
    Blocks::decode(w, i, v, first, second);
    struct alignas(8) Four { u32 a, b; };
    *(Four*)(y + first) = Four{pack(v[0], v[1], BF16()), pack(v[2], v[3], BF16())};
    *(Four*)(y + second) = Four{pack(v[4], v[5], BF16()), pack(v[6], v[7], BF16())};
}

#define DEQUANT(name, Q)                                                                                      \
    extern "C" __global__ __launch_bounds__(256) void dequant_##name##_bf16(BF16* y, const u8* __restrict__ w, \
                                                                            u32 n_parts) {                    \
        dequant<FileBlocks<Q>>(y, w, n_parts);                                                                \
    }

DEQUANT(q4_0, Q4_0)
DEQUANT(q4_1, Q4_1)
DEQUANT(q5_0, Q5_0)
DEQUANT(q5_1, Q5_1)
DEQUANT(q8_0, Q8_0)
DEQUANT(q2_k, Q2_K)
DEQUANT(q3_k, Q3_K)
DEQUANT(q4_k, Q4_K)
DEQUANT(q5_k, Q5_K)
DEQUANT(q6_k, Q6_K)
DEQUANT(iq4_nl, IQ4_NL)
DEQUANT(iq4_xs, IQ4_XS)
