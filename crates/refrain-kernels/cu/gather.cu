// gather.cu: y[i] = table[ids[i]], decoded to f32
//
//   y      [n_ids, d]    f32
//   table  [n_rows, d]   plain or quantised, dense, in file layout; gather_packed: packed (packed.cuh)
//   ids    [n_ids]       i32; negative: a row of zeros; >= n_rows: a row of NaN
//
// This is the first kernel of a step: the next one starts only after the previous steps have ended
// (overlap.cuh).
//
// Launch       grid (n_ids, parts), block (256), shared 0. Part p of a plain row is elements 2048 p and up. A
//              block issues all loads of its part at once, since the table may be in host memory. Other
//              tables have one part
// Requires     table 16-byte aligned; d a multiple of the block length
// Aliasing     none
// Determinism  exact
// Capture      safe: ids are read at each run
#include "overlap.cuh"
#include "packed.cuh"
#include "quant.cuh"

const u32 PART = 2048;  // elements of a row per block

// Eight elements, loaded at once.
template <typename T> struct Words {
    uint4 words;
    inline void load(const T* p) { words = *(const uint4*)p; }
    inline float at(int i) const {
        u32 word = i < 2 ? words.x : i < 4 ? words.y : i < 6 ? words.z : words.w;
        T t;
        t.bits = (u16)(i % 2 == 0 ? word : word >> 16);
        return to_f32(t);
    }
};
template <> struct Words<float> {
    float4 halves[2];
    inline void load(const float* p) {
        halves[0] = ((const float4*)p)[0];
        halves[1] = ((const float4*)p)[1];
    }
    inline float at(int i) const {
        float4 h = halves[i / 4];
        return i % 4 == 0 ? h.x : i % 4 == 1 ? h.y : i % 4 == 2 ? h.z : h.w;
    }
};

template <typename T> inline void gather_plain(float* y, const T* table, const i32* ids, u32 n_rows, u32 d) {
    wait_for_previous();
    let_next_start();
    i32 id = ids[blockIdx.x];
    float* out = y + (u64)blockIdx.x * d;
    bool there = id >= 0 && (u32)id < n_rows;
    float filler = id < 0 ? 0.0f : nan_f32();
    const T* row = table + (there ? (u64)id * d : 0);
    // All rows are 16-byte aligned: eight elements per thread.
    if (d % 8 == 0) {
        u32 at = 8 * (blockIdx.y * blockDim.x + threadIdx.x);
        if (at >= d) return;
        float v[8];
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] = filler;
        if (there) {
            Words<T> words;
            words.load(row + at);
#pragma unroll
            for (int i = 0; i < 8; i++) v[i] = words.at(i);
        }
        ((float4*)(out + at))[0] = make_float4(v[0], v[1], v[2], v[3]);
        ((float4*)(out + at))[1] = make_float4(v[4], v[5], v[6], v[7]);
        return;
    }
    u32 end = min(d, (blockIdx.y + 1) * PART);
    for (u32 i = blockIdx.y * PART + threadIdx.x; i < end; i += blockDim.x) {
        out[i] = there ? to_f32(row[i]) : filler;
    }
}

template <typename Q> inline void gather_quant(float* y, const u8* table, const i32* ids, u32 n_rows, u32 d) {
    const u32 parts = Q::LEN / 8;
    wait_for_previous();
    let_next_start();
    i32 id = ids[blockIdx.x];
    float* out = y + (u64)blockIdx.x * d;
    bool there = id >= 0 && (u32)id < n_rows;
    const u8* row = table + (there ? (u64)id * (d / Q::LEN) * Q::BYTES : 0);
    for (u32 at = threadIdx.x; at < d / 8; at += blockDim.x) {
        u32 block = at / parts, part = at % parts;
        float v[8];
        if (there) {
            Q::decode(Q::load(row + (u64)block * Q::BYTES, part), part, v);
        } else {
#pragma unroll
            for (int i = 0; i < 8; i++) v[i] = id < 0 ? 0.0f : nan_f32();
        }
        float* first = out + block * Q::LEN + Q::first(part);
        float* second = out + block * Q::LEN + Q::second(part);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            first[i] = v[i];
            second[i] = v[4 + i];
        }
    }
}

template <typename Q> inline void gather_packed(float* y, const u8* table, const i32* ids, u32 n_rows, u32 d) {
    wait_for_previous();
    let_next_start();
    i32 id = ids[blockIdx.x];
    float* out = y + (u64)blockIdx.x * d;
    bool there = id >= 0 && (u32)id < n_rows;
    u32 row = there ? (u32)id : 0, n_units = (d + Q::COLS - 1) / Q::COLS, per_unit = Q::COLS / 32;
    const u8* tile = table + (u64)(row / TILE_ROWS) * n_units * Q::BYTES;
    for (u32 sub = threadIdx.x; sub < d / 32; sub += blockDim.x) {
        u32 within = sub % per_unit, lane = TILE_SUBS * (row % TILE_ROWS) + within % TILE_SUBS;
        Sub v = Q::load(tile + (u64)(sub / per_unit) * Q::BYTES, within / TILE_SUBS, lane);
#pragma unroll
        for (int e = 0; e < 32; e++) {
            float x = sub_value<Q>(v, e);
            out[32 * sub + e] = there ? x : id < 0 ? 0.0f : nan_f32();
        }
    }
}

#define GATHER(name, body, element)                                                                       \
    extern "C" __global__ __launch_bounds__(256) void gather_rows_##name(                                 \
        float* y, const element* table, const i32* ids, u32 n_rows, u32 d) {                              \
        body(y, table, ids, n_rows, d);                                                                   \
    }
#define PLAIN(name, T) GATHER(name, gather_plain<T>, T)
#define QUANT(name, Q) GATHER(name, gather_quant<Q>, u8)
#define PACKED(name, Q) GATHER(packed_##name, gather_packed<Packed##Q>, u8)

// unit f32
PLAIN(f32, float)
// unit f16
PLAIN(f16, F16)
// unit bf16
PLAIN(bf16, BF16)
// unit q2_k
QUANT(q2_k, Q2_K)
// unit iq2_xxs
QUANT(iq2_xxs, IQ2_XXS)
// unit iq2_xs
QUANT(iq2_xs, IQ2_XS)
// unit iq2_s
QUANT(iq2_s, IQ2_S)
// unit iq3_xxs
QUANT(iq3_xxs, IQ3_XXS)
// unit iq3_s
QUANT(iq3_s, IQ3_S)
// unit packed_q4_0
PACKED(q4_0, Q4_0)
// unit packed_q4_1
PACKED(q4_1, Q4_1)
// unit packed_q5_0
PACKED(q5_0, Q5_0)
// unit packed_q5_1
PACKED(q5_1, Q5_1)
// unit packed_q8_0
PACKED(q8_0, Q8_0)
// unit packed_q3_k
PACKED(q3_k, Q3_K)
// unit packed_q4_k
PACKED(q4_k, Q4_K)
// unit packed_q5_k
PACKED(q5_k, Q5_K)
// unit packed_q6_k
PACKED(q6_k, Q6_K)
// unit packed_iq4_nl
PACKED(iq4_nl, IQ4_NL)
// unit packed_iq4_xs
PACKED(iq4_xs, IQ4_XS)
// unit packed_mxfp4
PACKED(mxfp4, MXFP4)
