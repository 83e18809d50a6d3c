// digest.cu: a hash of each chunk of memory, to compare two states of it without copying them
//
//   y  [ceil(n_bytes / CHUNK), 2]  u64: a sum of mixed words, and the number of bytes that are 0xff
//   x  [n_bytes]                   any bytes
//
// Launch       grid (ceil(n_bytes / CHUNK)), block (256), shared 0
// Requires     x 8-byte aligned
// Aliasing     none
// Determinism  same bits every run: words are mixed with their offset and added modulo 2^64
// Capture      safe
#include "overlap.cuh"
#include "reduce.cuh"

const u64 CHUNK = 65536;

inline u64 mixed(u64 word, u64 at) {
    u64 h = word + 0x9e3779b97f4a7c15ull * (at + 1);
    h = (h ^ h >> 33) * 0xff51afd7ed558ccdull;
    h = (h ^ h >> 33) * 0xc4ceb9fe1a85ec53ull;
    return h ^ h >> 33;
}

extern "C" __global__ __launch_bounds__(256) void digest_chunks(u64* y, const u8* x, u64 n_bytes) {
    start();
    u64 begin = blockIdx.x * CHUNK, end = begin + CHUNK < n_bytes ? begin + CHUNK : n_bytes;
    u64 sum = 0, n_ones = 0;
    for (u64 at = begin + 8 * threadIdx.x; at < end; at += 8 * 256) {
        u64 word = 0, n = end - at < 8 ? end - at : 8;
        if (n == 8) {
            word = *(const u64*)(x + at);
        } else {
            for (u64 i = 0; i < n; i++) word |= (u64)x[at + i] << (8 * i);
        }
        for (u64 i = 0; i < n; i++) n_ones += (word >> (8 * i) & 0xffull) == 0xffull;
        sum += mixed(word, at);
    }
    sum = block_reduce(sum, Add(), (u64)0);
    n_ones = block_reduce(n_ones, Add(), (u64)0);
    if (threadIdx.x == 0) {
        y[2 * blockIdx.x] = sum;
        y[2 * blockIdx.x + 1] = n_ones;
    }
}
