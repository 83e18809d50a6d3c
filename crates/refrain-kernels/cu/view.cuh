// view.cuh: strides that launchers pass by value (src/view.rs has the same structures)
#pragma once
#include "dtype.cuh"
#include "overlap.cuh"

// Rows of consecutive elements; row r starts at start(r).
struct Rows {
    u32 n_inner;
    u32 inner_stride;
    u32 outer_stride;

    inline u64 start(u32 row) const {
        return (u64)(row / n_inner) * outer_stride + (u64)(row % n_inner) * inner_stride;
    }
};

// Up to six dimensions of one or two operands, traversed in row-major order.
struct Walk {
    u32 rank;
    u32 dims[6];
    u32 a[6];
    u32 b[6];

    // Constant indices keep the arrays in the parameter bank.
    inline void at(u32 i, u32& a_at, u32& b_at) const {
        a_at = 0;
        b_at = 0;
#pragma unroll
        for (int axis = 5; axis >= 0; axis--) {
            if (axis < (int)rank) {
                u32 index = axis == 0 ? i : i % dims[axis];
                i = axis == 0 ? 0 : i / dims[axis];
                a_at += index * a[axis];
                b_at += index * b[axis];
            }
        }
    }
};
