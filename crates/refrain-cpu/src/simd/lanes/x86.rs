//! Operations on x86-64: AVX2 with FMA and F16C, and AVX-512, each with and without VNNI; AVX-512 also with
//! BF16.

use std::arch::x86_64::*;
use std::mem::transmute;

use super::{Simd, SimdKernel};

/// Runs `kernel` with AVX2.
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn call_avx2<K: SimdKernel>(kernel: K) -> K::Out {
    kernel.run(Avx2::<false>(()))
}

/// Runs `kernel` with AVX2 and AVX-VNNI.
#[target_feature(enable = "avx2,fma,f16c,avxvnni")]
pub(crate) fn call_avx2_vnni<K: SimdKernel>(kernel: K) -> K::Out {
    kernel.run(Avx2::<true>(()))
}

/// Runs `kernel` with AVX-512.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")]
pub(crate) fn call_avx512<K: SimdKernel>(kernel: K) -> K::Out {
    kernel.run(Avx512::<false, false>(()))
}

/// Runs `kernel` with AVX-512 and VNNI.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
pub(crate) fn call_avx512_vnni<K: SimdKernel>(kernel: K) -> K::Out {
    kernel.run(Avx512::<true, false>(()))
}

/// Runs `kernel` with AVX-512, VNNI and the BF16 dot products.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16")]
pub(crate) fn call_avx512_bf16<K: SimdKernel>(kernel: K) -> K::Out {
    kernel.run(Avx512::<true, true>(()))
}

/// AVX2, FMA and F16C; with AVX-VNNI if `VNNI`. Constructed only by the functions above, which enable them.
#[derive(Clone, Copy)]
pub(crate) struct Avx2<const VNNI: bool>(());

/// AVX-512 F, BW, VL and DQ; with VNNI if `VNNI`, with BF16 if `BF16`. Constructed only by the functions above,
/// which enable them.
#[derive(Clone, Copy)]
pub(crate) struct Avx512<const VNNI: bool, const BF16: bool>(());

/// Defines methods that are one expression over intrinsics without memory operands.
macro_rules! ops {
    ($($(#[$meta:meta])* fn $name:ident($($arg:ident: $ty:ty),*) -> $ret:ty { $($body:tt)* })*) => {
        $(
            $(#[$meta])*
            #[inline(always)]
            fn $name(self, $($arg: $ty),*) -> $ret {
                // SAFETY: `self` exists only inside the `call_*` function of its level, which enables every
                // instruction set that these intrinsics need; its caller, `Level::dispatch`, has checked for
                // them.
                unsafe { $($body)* }
            }
        )*
    };
}

impl<const VNNI: bool, const BF16: bool> Simd for Avx512<VNNI, BF16> {
    const LANES: usize = 16;
    const BF16: bool = BF16;
    const DOT8: bool = VNNI;
    type I = __m512i;
    type F = __m512;

    ops! {
        fn splat(x: i32) -> __m512i { _mm512_set1_epi32(x) }
        fn and(a: __m512i, b: __m512i) -> __m512i { _mm512_and_si512(a, b) }
        fn or(a: __m512i, b: __m512i) -> __m512i { _mm512_or_si512(a, b) }
        fn xor(a: __m512i, b: __m512i) -> __m512i { _mm512_xor_si512(a, b) }
        fn add(a: __m512i, b: __m512i) -> __m512i { _mm512_add_epi32(a, b) }
        fn sub(a: __m512i, b: __m512i) -> __m512i { _mm512_sub_epi32(a, b) }
        fn mul(a: __m512i, b: __m512i) -> __m512i { _mm512_mullo_epi32(a, b) }
        fn max(a: __m512i, b: __m512i) -> __m512i { _mm512_max_epi32(a, b) }
        fn shl(a: __m512i, n: u32) -> __m512i { _mm512_sll_epi32(a, _mm_cvtsi32_si128(n as i32)) }
        fn shl_each(a: __m512i, n: __m512i) -> __m512i { _mm512_sllv_epi32(a, n) }
        fn shr(a: __m512i, n: u32) -> __m512i { _mm512_srl_epi32(a, _mm_cvtsi32_si128(n as i32)) }
        fn sar(a: __m512i, n: u32) -> __m512i { _mm512_sra_epi32(a, _mm_cvtsi32_si128(n as i32)) }
        fn dot7(acc: __m512i, u: __m512i, x: __m512i) -> __m512i {
            if VNNI {
                _mm512_dpbusd_epi32(acc, u, x)
            } else {
                // 2 * 127 * 127 fits in the 16 bits of the intermediate sums.
                let pairs = _mm512_maddubs_epi16(u, x);
                _mm512_add_epi32(acc, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)))
            }
        }
        fn dot8(acc: __m512i, u: __m512i, x: __m512i) -> __m512i {
            if VNNI {
                _mm512_dpbusd_epi32(acc, u, x)
            } else {
                let u_even = _mm512_and_si512(u, _mm512_set1_epi16(255));
                let x_even = _mm512_srai_epi16::<8>(_mm512_slli_epi16::<8>(x));
                let u_odd = _mm512_srli_epi16::<8>(u);
                let x_odd = _mm512_srai_epi16::<8>(x);
                let sum = _mm512_add_epi32(_mm512_madd_epi16(u_even, x_even), _mm512_madd_epi16(u_odd, x_odd));
                _mm512_add_epi32(acc, sum)
            }
        }
        fn dot16(acc: __m512i, a: __m512i, b: __m512i) -> __m512i {
            if VNNI {
                _mm512_dpwssd_epi32(acc, a, b)
            } else {
                _mm512_add_epi32(acc, _mm512_madd_epi16(a, b))
            }
        }
        fn lookup(table: &[u8; 16], idx: __m512i) -> __m512i {
            _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast())), idx)
        }
        fn to_f(a: __m512i) -> __m512 { _mm512_cvtepi32_ps(a) }
        fn to_i(a: __m512) -> __m512i { _mm512_cvtps_epi32(a) }
        fn as_f(a: __m512i) -> __m512 { _mm512_castsi512_ps(a) }
        fn as_i(a: __m512) -> __m512i { _mm512_castps_si512(a) }
        fn f16_lo(a: __m512i) -> __m512 { _mm512_cvtph_ps(_mm512_cvtepi32_epi16(a)) }
        fn fsplat(x: f32) -> __m512 { _mm512_set1_ps(x) }
        fn fadd(a: __m512, b: __m512) -> __m512 { _mm512_add_ps(a, b) }
        fn fsub(a: __m512, b: __m512) -> __m512 { _mm512_sub_ps(a, b) }
        fn fmul(a: __m512, b: __m512) -> __m512 { _mm512_mul_ps(a, b) }
        fn fdiv(a: __m512, b: __m512) -> __m512 { _mm512_div_ps(a, b) }
        fn fmax(a: __m512, b: __m512) -> __m512 { _mm512_max_ps(a, b) }
        fn fmin(a: __m512, b: __m512) -> __m512 { _mm512_min_ps(a, b) }
        fn fsqrt(a: __m512) -> __m512 { _mm512_sqrt_ps(a) }
        fn pick_less(a: __m512, b: __m512, x: __m512, y: __m512) -> __m512 {
            _mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b), y, x)
        }
        fn lookup32(table: &[f32; 32], idx: __m512i) -> __m512 {
            let (low, high) = (_mm512_loadu_ps(table.as_ptr()), _mm512_loadu_ps(table[16..].as_ptr()));
            _mm512_permutex2var_ps(low, idx, high)
        }
        fn fma(a: __m512, b: __m512, c: __m512) -> __m512 { _mm512_fmadd_ps(a, b, c) }
        fn dot_bf16(acc: __m512, a: __m512i, b: __m512i) -> __m512 {
            if BF16 {
                // A no-op conversion to the element type of the intrinsic.
                let (a, b) = (transmute::<__m512i, __m512bh>(a), transmute::<__m512i, __m512bh>(b));
                _mm512_dpbf16_ps(acc, a, b)
            } else {
                let high = _mm512_set1_epi32(0xffff_0000_u32 as i32);
                let (a_high, b_high) = (_mm512_and_si512(a, high), _mm512_and_si512(b, high));
                let (a_low, b_low) = (_mm512_slli_epi32::<16>(a), _mm512_slli_epi32::<16>(b));
                let acc = _mm512_fmadd_ps(_mm512_castsi512_ps(a_high), _mm512_castsi512_ps(b_high), acc);
                _mm512_fmadd_ps(_mm512_castsi512_ps(a_low), _mm512_castsi512_ps(b_low), acc)
            }
        }
        fn prefetch(p: *const u8) -> () { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
        fn sum16x16(rows: &[[f32; 16]; 16]) -> [f32; 16] {
            // Each step adds the halves of two rows' partial sums, side by side in one register. Starting with
            // rows 0, 4, 8 and 12, then 1, 5, 9 and 13, and so on, leaves the sums in order.
            let mut fours = [_mm512_setzero_ps(); 4];
            for (i, four) in fours.iter_mut().enumerate() {
                let a = _mm512_loadu_ps(rows[i].as_ptr());
                let b = _mm512_loadu_ps(rows[i + 4].as_ptr());
                let c = _mm512_loadu_ps(rows[i + 8].as_ptr());
                let d = _mm512_loadu_ps(rows[i + 12].as_ptr());
                let ab = _mm512_add_ps(_mm512_shuffle_f32x4::<0x44>(a, b), _mm512_shuffle_f32x4::<0xee>(a, b));
                let cd = _mm512_add_ps(_mm512_shuffle_f32x4::<0x44>(c, d), _mm512_shuffle_f32x4::<0xee>(c, d));
                *four = _mm512_add_ps(_mm512_shuffle_f32x4::<0x88>(ab, cd), _mm512_shuffle_f32x4::<0xdd>(ab, cd));
            }
            let [a, b, c, d] = fours;
            let ab = _mm512_add_ps(_mm512_shuffle_ps::<0x44>(a, b), _mm512_shuffle_ps::<0xee>(a, b));
            let cd = _mm512_add_ps(_mm512_shuffle_ps::<0x44>(c, d), _mm512_shuffle_ps::<0xee>(c, d));
            let sums = _mm512_add_ps(_mm512_shuffle_ps::<0x88>(ab, cd), _mm512_shuffle_ps::<0xdd>(ab, cd));
            let mut out = [0f32; 16];
            _mm512_storeu_ps(out.as_mut_ptr(), sums);
            out
        }
    }

    #[inline(always)]
    unsafe fn load(self, p: *const u8) -> __m512i {
        // SAFETY: 64 bytes are readable by the contract of `Simd::load`.
        unsafe { _mm512_loadu_si512(p.cast()) }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut u8, a: __m512i) {
        // SAFETY: 64 bytes are writable by the contract of `Simd::store`.
        unsafe { _mm512_storeu_si512(p.cast(), a) }
    }
    #[inline(always)]
    unsafe fn fload(self, p: *const f32) -> __m512 {
        // SAFETY: 16 floats are readable by the contract of `Simd::fload`.
        unsafe { _mm512_loadu_ps(p) }
    }
    #[inline(always)]
    unsafe fn fstore(self, p: *mut f32, a: __m512) {
        // SAFETY: 16 floats are writable by the contract of `Simd::fstore`.
        unsafe { _mm512_storeu_ps(p, a) }
    }
    #[inline(always)]
    unsafe fn load_f16(self, p: *const u8) -> __m512 {
        // SAFETY: 16 half floats are readable by the contract of `Simd::load_f16`.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())) }
    }
    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u8) -> __m512 {
        // SAFETY: 16 bfloat16s are readable by the contract of `Simd::load_bf16`.
        unsafe {
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
        }
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u8, a: __m512) {
        // SAFETY: 16 half floats are writable by the contract of `Simd::store_f16`.
        unsafe { _mm256_storeu_si256(p.cast(), _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(a)) }
    }
    #[inline(always)]
    unsafe fn store_i8(self, p: *mut u8, a: __m512i) {
        // SAFETY: 16 bytes are writable by the contract of `Simd::store_i8`.
        unsafe { _mm_storeu_si128(p.cast(), _mm512_cvtepi32_epi8(a)) }
    }

    #[inline(always)]
    unsafe fn transpose(self, rows: &[*const u8; 16], n_dwords: usize, dst: *mut u8) {
        let whole = n_dwords / 4 * 4;
        for j in (0..whole).step_by(4) {
            // SAFETY: words `j .. j + 4` of each row and columns `j .. j + 4` of `dst` are in bounds by the
            // contract of this function.
            unsafe { transpose_4_words_512(rows, 4 * j, dst.add(64 * j)) };
        }
        // SAFETY: the remaining columns.
        unsafe { super::transpose_words(rows, whole, n_dwords, dst) };
    }
}

/// Transposes four 32-bit words of 16 rows, starting at byte `at` of each row, into four columns.
///
/// # Safety
/// 16 bytes are readable at `at` in each row, 256 are writable at `dst`, and AVX-512 F is enabled.
#[inline(always)]
unsafe fn transpose_4_words_512(rows: &[*const u8; 16], at: usize, dst: *mut u8) {
    // SAFETY: in bounds by the contract of this function, whose caller has also enabled the instructions.
    unsafe {
        let mut quads = [_mm512_setzero_si512(); 4];
        for (i, quad) in quads.iter_mut().enumerate() {
            // Rows i, i + 4, i + 8 and i + 12: transposing within each quarter then leaves all rows in order.
            let low = _mm512_castsi128_si512(_mm_loadu_si128(rows[i].add(at).cast()));
            let low = _mm512_inserti32x4::<1>(low, _mm_loadu_si128(rows[i + 4].add(at).cast()));
            let low = _mm512_inserti32x4::<2>(low, _mm_loadu_si128(rows[i + 8].add(at).cast()));
            *quad = _mm512_inserti32x4::<3>(low, _mm_loadu_si128(rows[i + 12].add(at).cast()));
        }
        let [a, b, c, d] = quads;
        let (ab_low, ab_high) = (_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
        let (cd_low, cd_high) = (_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
        _mm512_storeu_si512(dst.cast(), _mm512_unpacklo_epi64(ab_low, cd_low));
        _mm512_storeu_si512(dst.add(64).cast(), _mm512_unpackhi_epi64(ab_low, cd_low));
        _mm512_storeu_si512(dst.add(128).cast(), _mm512_unpacklo_epi64(ab_high, cd_high));
        _mm512_storeu_si512(dst.add(192).cast(), _mm512_unpackhi_epi64(ab_high, cd_high));
    }
}

/// Like [`transpose_4_words_512`], for rows `8 half .. 8 half + 8` and their half of each column.
///
/// # Safety
/// As for [`transpose_4_words_512`], with AVX2 enabled.
#[inline(always)]
unsafe fn transpose_4_words_256(rows: &[*const u8; 16], half: usize, at: usize, dst: *mut u8) {
    // SAFETY: in bounds by the contract of this function, whose caller has also enabled the instructions.
    unsafe {
        let mut pairs = [_mm256_setzero_si256(); 4];
        for (i, pair) in pairs.iter_mut().enumerate() {
            let low = _mm_loadu_si128(rows[8 * half + i].add(at).cast());
            let high = _mm_loadu_si128(rows[8 * half + i + 4].add(at).cast());
            *pair = _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(low), high);
        }
        let [a, b, c, d] = pairs;
        let (ab_low, ab_high) = (_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
        let (cd_low, cd_high) = (_mm256_unpacklo_epi32(c, d), _mm256_unpackhi_epi32(c, d));
        let dst = dst.add(32 * half);
        _mm256_storeu_si256(dst.cast(), _mm256_unpacklo_epi64(ab_low, cd_low));
        _mm256_storeu_si256(dst.add(64).cast(), _mm256_unpackhi_epi64(ab_low, cd_low));
        _mm256_storeu_si256(dst.add(128).cast(), _mm256_unpacklo_epi64(ab_high, cd_high));
        _mm256_storeu_si256(dst.add(192).cast(), _mm256_unpackhi_epi64(ab_high, cd_high));
    }
}

impl<const VNNI: bool> Simd for Avx2<VNNI> {
    const LANES: usize = 8;
    const DOT8: bool = VNNI;
    type I = __m256i;
    type F = __m256;

    ops! {
        fn splat(x: i32) -> __m256i { _mm256_set1_epi32(x) }
        fn and(a: __m256i, b: __m256i) -> __m256i { _mm256_and_si256(a, b) }
        fn or(a: __m256i, b: __m256i) -> __m256i { _mm256_or_si256(a, b) }
        fn xor(a: __m256i, b: __m256i) -> __m256i { _mm256_xor_si256(a, b) }
        fn add(a: __m256i, b: __m256i) -> __m256i { _mm256_add_epi32(a, b) }
        fn sub(a: __m256i, b: __m256i) -> __m256i { _mm256_sub_epi32(a, b) }
        fn mul(a: __m256i, b: __m256i) -> __m256i { _mm256_mullo_epi32(a, b) }
        fn max(a: __m256i, b: __m256i) -> __m256i { _mm256_max_epi32(a, b) }
        fn shl(a: __m256i, n: u32) -> __m256i { _mm256_sll_epi32(a, _mm_cvtsi32_si128(n as i32)) }
        fn shl_each(a: __m256i, n: __m256i) -> __m256i { _mm256_sllv_epi32(a, n) }
        fn shr(a: __m256i, n: u32) -> __m256i { _mm256_srl_epi32(a, _mm_cvtsi32_si128(n as i32)) }
        fn sar(a: __m256i, n: u32) -> __m256i { _mm256_sra_epi32(a, _mm_cvtsi32_si128(n as i32)) }
        fn dot7(acc: __m256i, u: __m256i, x: __m256i) -> __m256i {
            if VNNI {
                _mm256_dpbusd_avx_epi32(acc, u, x)
            } else {
                // 2 * 127 * 127 fits in the 16 bits of the intermediate sums.
                let pairs = _mm256_maddubs_epi16(u, x);
                _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
            }
        }
        fn dot8(acc: __m256i, u: __m256i, x: __m256i) -> __m256i {
            if VNNI {
                _mm256_dpbusd_avx_epi32(acc, u, x)
            } else {
                let u_even = _mm256_and_si256(u, _mm256_set1_epi16(255));
                let x_even = _mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(x));
                let u_odd = _mm256_srli_epi16::<8>(u);
                let x_odd = _mm256_srai_epi16::<8>(x);
                let sum = _mm256_add_epi32(_mm256_madd_epi16(u_even, x_even), _mm256_madd_epi16(u_odd, x_odd));
                _mm256_add_epi32(acc, sum)
            }
        }
        fn dot16(acc: __m256i, a: __m256i, b: __m256i) -> __m256i {
            if VNNI {
                _mm256_dpwssd_avx_epi32(acc, a, b)
            } else {
                _mm256_add_epi32(acc, _mm256_madd_epi16(a, b))
            }
        }
        fn lookup(table: &[u8; 16], idx: __m256i) -> __m256i {
            _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast())), idx)
        }
        fn to_f(a: __m256i) -> __m256 { _mm256_cvtepi32_ps(a) }
        fn to_i(a: __m256) -> __m256i { _mm256_cvtps_epi32(a) }
        fn as_f(a: __m256i) -> __m256 { _mm256_castsi256_ps(a) }
        fn as_i(a: __m256) -> __m256i { _mm256_castps_si256(a) }
        fn f16_lo(a: __m256i) -> __m256 {
            let low = _mm256_and_si256(a, _mm256_set1_epi32(0xffff));
            let packed = _mm256_permute4x64_epi64::<0b1000>(_mm256_packus_epi32(low, low));
            _mm256_cvtph_ps(_mm256_castsi256_si128(packed))
        }
        fn fsplat(x: f32) -> __m256 { _mm256_set1_ps(x) }
        fn fadd(a: __m256, b: __m256) -> __m256 { _mm256_add_ps(a, b) }
        fn fsub(a: __m256, b: __m256) -> __m256 { _mm256_sub_ps(a, b) }
        fn fmul(a: __m256, b: __m256) -> __m256 { _mm256_mul_ps(a, b) }
        fn fdiv(a: __m256, b: __m256) -> __m256 { _mm256_div_ps(a, b) }
        fn fmax(a: __m256, b: __m256) -> __m256 { _mm256_max_ps(a, b) }
        fn fmin(a: __m256, b: __m256) -> __m256 { _mm256_min_ps(a, b) }
        fn fsqrt(a: __m256) -> __m256 { _mm256_sqrt_ps(a) }
        fn pick_less(a: __m256, b: __m256, x: __m256, y: __m256) -> __m256 {
            _mm256_blendv_ps(y, x, _mm256_cmp_ps::<_CMP_LT_OQ>(a, b))
        }
        fn lookup32(table: &[f32; 32], idx: __m256i) -> __m256 {
            // Indices above 31 would read past the table.
            _mm256_i32gather_ps::<4>(table.as_ptr(), _mm256_and_si256(idx, _mm256_set1_epi32(31)))
        }
        fn fma(a: __m256, b: __m256, c: __m256) -> __m256 { _mm256_fmadd_ps(a, b, c) }
        fn prefetch(p: *const u8) -> () { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
    }

    #[inline(always)]
    unsafe fn load(self, p: *const u8) -> __m256i {
        // SAFETY: 32 bytes are readable by the contract of `Simd::load`.
        unsafe { _mm256_loadu_si256(p.cast()) }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut u8, a: __m256i) {
        // SAFETY: 32 bytes are writable by the contract of `Simd::store`.
        unsafe { _mm256_storeu_si256(p.cast(), a) }
    }
    #[inline(always)]
    unsafe fn fload(self, p: *const f32) -> __m256 {
        // SAFETY: 8 floats are readable by the contract of `Simd::fload`.
        unsafe { _mm256_loadu_ps(p) }
    }
    #[inline(always)]
    unsafe fn fstore(self, p: *mut f32, a: __m256) {
        // SAFETY: 8 floats are writable by the contract of `Simd::fstore`.
        unsafe { _mm256_storeu_ps(p, a) }
    }
    #[inline(always)]
    unsafe fn load_f16(self, p: *const u8) -> __m256 {
        // SAFETY: 8 half floats are readable by the contract of `Simd::load_f16`.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(p.cast())) }
    }
    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u8) -> __m256 {
        // SAFETY: 8 bfloat16s are readable by the contract of `Simd::load_bf16`.
        unsafe {
            let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
        }
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u8, a: __m256) {
        // SAFETY: 8 half floats are writable by the contract of `Simd::store_f16`.
        unsafe { _mm_storeu_si128(p.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(a)) }
    }
    #[inline(always)]
    unsafe fn store_i8(self, p: *mut u8, a: __m256i) {
        // SAFETY: 8 bytes are writable by the contract of `Simd::store_i8`; packing saturates, which is exact
        // for the lane values that the contract allows.
        unsafe {
            let words = _mm_packs_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256::<1>(a));
            _mm_storel_epi64(p.cast(), _mm_packs_epi16(words, words));
        }
    }

    #[inline(always)]
    unsafe fn transpose(self, rows: &[*const u8; 16], n_dwords: usize, dst: *mut u8) {
        let whole = n_dwords / 4 * 4;
        for j in (0..whole).step_by(4) {
            // SAFETY: words `j .. j + 4` of each row and columns `j .. j + 4` of `dst` are in bounds by the
            // contract of this function.
            unsafe {
                transpose_4_words_256(rows, 0, 4 * j, dst.add(64 * j));
                transpose_4_words_256(rows, 1, 4 * j, dst.add(64 * j));
            }
        }
        // SAFETY: the remaining columns.
        unsafe { super::transpose_words(rows, whole, n_dwords, dst) };
    }
}
