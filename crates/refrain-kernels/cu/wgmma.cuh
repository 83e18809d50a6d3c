// wgmma.cuh: tensor core products of weights in registers and rows of x in shared memory
//
// A warpgroup multiplies 64 rows by M columns over 16 elements. Each warp has 16 of the rows and holds them
// and its sums in the layout of multiply() in mma.cuh: sums[i] are those of columns 8 i .. 8 i + 7. The B
// operand is two chunks of a plane (planes.cuh) in shared memory.
//
// On compute capability 9.0 and for 32 or more columns, this is one asynchronous warpgroup instruction
// (wgmma). Elsewhere, each warp multiplies by itself and synchronously. Both follow the same protocol:
//   begin()     before a group of multiplications, after the last write to their registers
//   multiply()  up to four times
//   end()       after the last; until then their registers must not be written, nor shared memory refilled
#pragma once
#include "mma.cuh"
#include "planes.cuh"

#if !defined(REFRAIN_ON_HOST) && defined(__CUDA_ARCH_FEAT_SM90_ALL)

#define WARPGROUP_MMA 1

template <int M, typename T> struct Rows64;

#define ROWS_64(T, name)                                                                                                  \
    template <> struct Rows64<32, T> {                                                                                    \
        static inline void multiply(float* c, const u32* a, u64 b) {                                                      \
            asm volatile(                                                                                                 \
                "{ .reg .pred p; setp.ne.b32 p, 1, 0; wgmma.mma_async.sync.aligned.m64n32k16.f32." name "." name " {"     \
                "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"                                    \
                "}, {%16, %17, %18, %19}, %20, p, 1, 1, 0; }"                                                             \
                : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]),         \
                  "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15])    \
                : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                                    \
        }                                                                                                                 \
    };                                                                                                                    \
    template <> struct Rows64<64, T> {                                                                                    \
        static inline void multiply(float* c, const u32* a, u64 b) {                                                      \
            asm volatile(                                                                                                 \
                "{ .reg .pred p; setp.ne.b32 p, 1, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32." name "." name " {"     \
                "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                  \
                "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"                          \
                "}, {%32, %33, %34, %35}, %36, p, 1, 1, 0; }"                                                             \
                : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]),         \
                  "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]),   \
                  "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]), "+f"(c[23]), \
                  "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31])  \
                : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                                    \
        }                                                                                                                 \
    };                                                                                                                    \
    template <> struct Rows64<128, T> {                                                                                   \
        static inline void multiply(float* c, const u32* a, u64 b) {                                                      \
            asm volatile(                                                                                                 \
                "{ .reg .pred p; setp.ne.b32 p, 1, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32." name "." name " {"    \
                "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                  \
                "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                        \
                "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                        \
                "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"                          \
                "}, {%64, %65, %66, %67}, %68, p, 1, 1, 0; }"                                                             \
                : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]),         \
                  "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]),   \
                  "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]), "+f"(c[23]), \
                  "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31]), \
                  "+f"(c[32]), "+f"(c[33]), "+f"(c[34]), "+f"(c[35]), "+f"(c[36]), "+f"(c[37]), "+f"(c[38]), "+f"(c[39]), \
                  "+f"(c[40]), "+f"(c[41]), "+f"(c[42]), "+f"(c[43]), "+f"(c[44]), "+f"(c[45]), "+f"(c[46]), "+f"(c[47]), \
                  "+f"(c[48]), "+f"(c[49]), "+f"(c[50]), "+f"(c[51]), "+f"(c[52]), "+f"(c[53]), "+f"(c[54]), "+f"(c[55]), \
                  "+f"(c[56]), "+f"(c[57]), "+f"(c[58]), "+f"(c[59]), "+f"(c[60]), "+f"(c[61]), "+f"(c[62]), "+f"(c[63])  \
                : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                                    \
        }                                                                                                                 \
    };
ROWS_64(BF16, "bf16")
ROWS_64(F16, "f16")

#endif

// A plane of M rows of x of type T in shared memory, of which half is used at a time.
template <int M, bool WARPGROUP, typename T = BF16> struct Columns {
    SharedPtr plane;
    u32 right[4][M / 8][2];

    inline explicit Columns(const u8* plane) : plane(shared_ptr(plane)) {}
    // Loads the B fragments of a half: 8 x 8 matrices of eight rows of a chunk, four at a time.
    inline void begin(u32 half) {
        u32 matrix = threadIdx.x % 32 / 8, row = threadIdx.x % 8;
        SharedPtr from = plane + 8 * half * M * 16;
        if (M == 8) {
#pragma unroll
            for (u32 s = 0; s < 4; s += 2) {
                u32 r[4];
                load_matrices(r, from + ((2 * s + matrix) * M + row) * 16);
                right[s][0][0] = r[0];
                right[s][0][1] = r[1];
                right[s + 1][0][0] = r[2];
                right[s + 1][0][1] = r[3];
            }
            return;
        }
#pragma unroll
        for (u32 s = 0; s < 4; s++) {
#pragma unroll
            for (u32 i = 0; i + 1 < M / 8; i += 2) {
                u32 r[4];
                load_matrices(r, from + ((2 * s + matrix % 2) * M + 8 * (i + matrix / 2) + row) * 16);
                right[s][i][0] = r[0];
                right[s][i][1] = r[1];
                right[s][i + 1][0] = r[2];
                right[s][i + 1][1] = r[3];
            }
        }
    }
    // Multiplication s of the half.
    inline void multiply(float (*sums)[4], const u32* a, u32 s) const {
#pragma unroll
        for (u32 i = 0; i < M / 8; i++) ::multiply(sums[i], a, right[s][i], T());
    }
    inline void end() const {}
};

#ifdef WARPGROUP_MMA
template <int M, typename T> struct Columns<M, true, T> {
    u64 first, from;

    // Matrix descriptor, in units of 16 bytes: the address (without the bits above it that select a block of
    // the cluster), the stride between chunks, and the stride between groups of eight rows.
    inline explicit Columns(const u8* plane)
        : first((u64)(shared_address(plane) >> 4 & 0x3fffu) | (u64)M << 16 | (u64)8 << 32) {}
    inline void begin(u32 half) {
        from = first + 8 * half * M;
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    }
    inline void multiply(float (*sums)[4], const u32* a, u32 s) const {
        Rows64<M, T>::multiply(sums[0], a, from + 2 * s * M);
    }
    inline void end() const {
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    }
};
#endif

#ifdef WARPGROUP_MMA
template <int M, typename T = BF16> using ColumnsOf = Columns<M, (M >= 32), T>;
#else
template <int M, typename T = BF16> using ColumnsOf = Columns<M, false, T>;
#endif
