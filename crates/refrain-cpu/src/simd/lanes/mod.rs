//! Vector operations that kernels are written in once for all instruction sets.
//!
//! A kernel is generic over [`Simd`]; [`Level::dispatch`](super::Level) runs it inside a function that enables
//! the level's instructions. Every operation gives the same bits at every level (NaN payloads aside), and
//! therefore so does a kernel that uses nothing else.

mod portable;
#[cfg(target_arch = "aarch64")]
pub(crate) mod neon;
#[cfg(target_arch = "x86_64")]
pub(crate) mod x86;

pub(crate) use portable::Portable;

/// A computation compiled once per level.
pub(crate) trait SimdKernel {
    type Out;
    /// Must be `#[inline(always)]`, as must every function between it and the operations of `S`: only then is
    /// the code compiled with the level's instructions. Closures (and so `from_fn` and `map` on arrays) are not
    /// reliably inlined, so loops are written out.
    fn run<S: Simd>(self, s: S) -> Self::Out;
}

/// Elements per group: `16 / LANES` registers.
pub(crate) const GROUP: usize = 16;

/// The instructions of one level. A value of the implementing type proves that the processor supports them.
///
/// `I` is a register of `LANES` 32-bit integers, `F` one of `LANES` floats.
pub(crate) trait Simd: Copy {
    /// 16, 8 or 4.
    const LANES: usize;
    /// Whether [`Simd::dot_bf16`] is one instruction.
    const BF16: bool = false;
    /// Whether [`Simd::dot8`] is one instruction.
    const DOT8: bool = false;
    type I: Copy;
    type F: Copy;

    fn splat(self, x: i32) -> Self::I;
    fn and(self, a: Self::I, b: Self::I) -> Self::I;
    fn or(self, a: Self::I, b: Self::I) -> Self::I;
    fn xor(self, a: Self::I, b: Self::I) -> Self::I;
    fn add(self, a: Self::I, b: Self::I) -> Self::I;
    fn sub(self, a: Self::I, b: Self::I) -> Self::I;
    /// Low 32 bits of the product.
    fn mul(self, a: Self::I, b: Self::I) -> Self::I;
    /// Signed maximum.
    fn max(self, a: Self::I, b: Self::I) -> Self::I;
    /// Left shift by `n < 32` bits.
    fn shl(self, a: Self::I, n: u32) -> Self::I;
    /// Left shift of each lane by its own count, below 32.
    fn shl_each(self, a: Self::I, n: Self::I) -> Self::I;
    /// Logical right shift by `n < 32` bits.
    fn shr(self, a: Self::I, n: u32) -> Self::I;
    /// Arithmetic right shift by `n < 32` bits.
    fn sar(self, a: Self::I, n: u32) -> Self::I;
    /// `acc + Σ₄ u·x` per lane, for unsigned bytes `u <= 127` and signed bytes `x >= -127`.
    fn dot7(self, acc: Self::I, u: Self::I, x: Self::I) -> Self::I;
    /// `acc + Σ₄ u·x` per lane, for any unsigned bytes `u` and signed bytes `x`.
    fn dot8(self, acc: Self::I, u: Self::I, x: Self::I) -> Self::I;
    /// `acc + Σ₂ a·b` per lane, for signed 16-bit halves.
    fn dot16(self, acc: Self::I, a: Self::I, b: Self::I) -> Self::I;
    /// `table[byte]` for each byte; all bytes must be below 16.
    fn lookup(self, table: &[u8; 16], idx: Self::I) -> Self::I;

    /// Nearest float, ties to even.
    fn to_f(self, a: Self::I) -> Self::F;
    /// Nearest integer, ties to even, for magnitudes below 2^22.
    fn to_i(self, a: Self::F) -> Self::I;
    /// Reinterprets the bits as a float.
    fn as_f(self, a: Self::I) -> Self::F;
    /// Reinterprets the bits as an integer.
    fn as_i(self, a: Self::F) -> Self::I;
    /// The low 16 bits of each lane, as a half float.
    fn f16_lo(self, a: Self::I) -> Self::F;
    fn fsplat(self, x: f32) -> Self::F;
    fn fadd(self, a: Self::F, b: Self::F) -> Self::F;
    fn fsub(self, a: Self::F, b: Self::F) -> Self::F;
    fn fmul(self, a: Self::F, b: Self::F) -> Self::F;
    fn fdiv(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a > b ? a : b`, so `b` if either is NaN.
    fn fmax(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a < b ? a : b`, so `b` if either is NaN.
    fn fmin(self, a: Self::F, b: Self::F) -> Self::F;
    fn fsqrt(self, a: Self::F) -> Self::F;
    /// `x` in the lanes where `a < b`, otherwise `y`.
    fn pick_less(self, a: Self::F, b: Self::F, x: Self::F, y: Self::F) -> Self::F;
    /// `table[idx]`; all indices must be below 32.
    #[inline(always)]
    fn lookup32(self, table: &[f32; 32], idx: Self::I) -> Self::F {
        let mut indices = [0u32; GROUP];
        let mut found = [0f32; GROUP];
        // SAFETY: both arrays have room for LANES elements, which are at most 16.
        unsafe {
            self.store(indices.as_mut_ptr().cast(), idx);
            for i in 0..Self::LANES {
                found[i] = table[indices[i] as usize & 31];
            }
            self.fload(found.as_ptr())
        }
    }
    /// `a * b + c`, rounded once.
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// `acc + Σ₂ a·b` per lane, for pairs of bfloat16: adds the product of the upper halves first, then that of
    /// the lower halves, with one rounding per addition. Subnormal inputs and outputs may be flushed to zero.
    #[inline(always)]
    fn dot_bf16(self, acc: Self::F, a: Self::I, b: Self::I) -> Self::F {
        // A bfloat16 is the upper half of the float with the same value.
        let high = self.splat(0xffff_0000_u32 as i32);
        let acc = self.fma(self.as_f(self.and(a, high)), self.as_f(self.and(b, high)), acc);
        self.fma(self.as_f(self.shl(a, 16)), self.as_f(self.shl(b, 16)), acc)
    }

    /// # Safety
    /// `4 * LANES` bytes are readable at `p`.
    unsafe fn load(self, p: *const u8) -> Self::I;
    /// # Safety
    /// `4 * LANES` bytes are writable at `p`.
    unsafe fn store(self, p: *mut u8, a: Self::I);
    /// # Safety
    /// `LANES` floats are readable at `p`.
    unsafe fn fload(self, p: *const f32) -> Self::F;
    /// # Safety
    /// `LANES` floats are writable at `p`.
    unsafe fn fstore(self, p: *mut f32, a: Self::F);
    /// # Safety
    /// `LANES` half floats are readable at `p`.
    unsafe fn load_f16(self, p: *const u8) -> Self::F;
    /// # Safety
    /// `LANES` bfloat16s are readable at `p`.
    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u8) -> Self::F {
        let mut floats = [0u32; GROUP];
        for (i, float) in floats.iter_mut().enumerate().take(Self::LANES) {
            // SAFETY: readable by the contract of this function.
            *float = u32::from(unsafe { p.add(2 * i).cast::<u16>().read_unaligned() }) << 16;
        }
        // SAFETY: LANES is at most 16, and a float has the size of its bits.
        unsafe { self.fload(floats.as_ptr().cast()) }
    }
    /// Rounds to the nearest half float, ties to even.
    /// # Safety
    /// `LANES` half floats are writable at `p`.
    unsafe fn store_f16(self, p: *mut u8, a: Self::F);
    /// Stores the low byte of each lane; all lanes must be in `-128..128`.
    /// # Safety
    /// `LANES` bytes are writable at `p`.
    unsafe fn store_i8(self, p: *mut u8, a: Self::I);
    /// Sum of 16 lanes, in the first `16 / LANES` registers of `a`: lane i is added to lane i + 8, those sums
    /// to the ones four lanes further on, and so on.
    #[inline(always)]
    fn sum16(self, a: [Self::F; 4]) -> f32 {
        let mut lanes = [0f32; 16];
        for (g, &a) in a.iter().enumerate().take(GROUP / Self::LANES) {
            // SAFETY: `16 / LANES` registers of LANES floats fill the array.
            unsafe { self.fstore(lanes.as_mut_ptr().add(g * Self::LANES), a) };
        }
        for half in [8, 4, 2, 1] {
            for i in 0..half {
                lanes[i] += lanes[i + half];
            }
        }
        lanes[0]
    }
    /// Sum of each of 16 rows, with the additions of [`Simd::sum16`].
    #[inline(always)]
    fn sum16x16(self, rows: &[[f32; 16]; 16]) -> [f32; 16] {
        let mut sums = [0f32; 16];
        for (sum, row) in sums.iter_mut().zip(rows) {
            let mut lanes = *row;
            for half in [8, 4, 2, 1] {
                for i in 0..half {
                    lanes[i] += lanes[i + half];
                }
            }
            *sum = lanes[0];
        }
        sums
    }
    /// Prefetches the cache line at `p`; any address is allowed.
    fn prefetch(self, p: *const u8);

    /// Transposes 16 rows of `n_dwords` 32-bit words: word `j` of row `i` goes to word `16 * j + i` of `dst`.
    /// # Safety
    /// `4 * n_dwords` bytes are readable at each of `rows`, and `64 * n_dwords` are writable at `dst`.
    #[inline(always)]
    unsafe fn transpose(self, rows: &[*const u8; 16], n_dwords: usize, dst: *mut u8) {
        // SAFETY: in bounds by the contract of this function.
        unsafe { transpose_words(rows, 0, n_dwords, dst) };
    }
}

/// [`Simd::transpose`] for words `first .. n_dwords`, one by one.
///
/// # Safety
/// As for [`Simd::transpose`].
#[inline(always)]
unsafe fn transpose_words(rows: &[*const u8; 16], first: usize, n_dwords: usize, dst: *mut u8) {
    for j in first..n_dwords {
        for (i, row) in rows.iter().enumerate() {
            // SAFETY: in bounds by the contract of this function.
            unsafe {
                let word = row.add(4 * j).cast::<u32>().read_unaligned();
                dst.add(64 * j + 4 * i).cast::<u32>().write_unaligned(word);
            }
        }
    }
}

/// Broadcasts the 32-bit word at `p`.
///
/// # Safety
/// 4 bytes are readable at `p`.
#[inline(always)]
pub(crate) unsafe fn splat_at<S: Simd>(s: S, p: *const u8) -> S::I {
    // SAFETY: readable by the contract of this function.
    s.splat(unsafe { p.cast::<i32>().read_unaligned() })
}

/// Broadcasts the float at `p`.
///
/// # Safety
/// 4 bytes are readable at `p`.
#[inline(always)]
pub(crate) unsafe fn fsplat_at<S: Simd>(s: S, p: *const u8) -> S::F {
    // SAFETY: readable by the contract of this function.
    s.fsplat(unsafe { p.cast::<f32>().read_unaligned() })
}
