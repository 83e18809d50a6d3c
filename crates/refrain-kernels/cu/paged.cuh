// paged.cuh: location of a sequence's position in the paged KV cache (src/kv.rs has the same structure)
#pragma once
#include "dtype.cuh"

struct Pages {
    u32 n_blocks, n_kv_heads, kv_block, head_dim, n_seqs, max_blocks;
};

// Returns the elements of a head at a position, or null if the position is negative or anything is out of
// range.
template <typename T>
inline T* kv_cell(T* cache, const i32* tables, i32 position, i32 seq, u32 head, const Pages& p) {
    if (position < 0 || seq < 0 || (u32)seq >= p.n_seqs) return nullptr;
    u32 column = (u32)position / p.kv_block;
    if (column >= p.max_blocks) return nullptr;
    i32 block = tables[(u64)seq * p.max_blocks + column];
    if (block < 0 || (u32)block >= p.n_blocks) return nullptr;
    return cache + (((u64)block * p.n_kv_heads + head) * p.kv_block + (u32)position % p.kv_block) * p.head_dim;
}
