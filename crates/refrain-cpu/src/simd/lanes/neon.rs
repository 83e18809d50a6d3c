//! Operations on 64-bit ARM: NEON with half floats, with and without the dot product instructions.

use std::arch::aarch64::*;
use std::arch::asm;

use super::{Simd, SimdKernel};

/// Runs `kernel` with NEON.
#[target_feature(enable = "neon,fp16")]
pub(crate) fn call_neon<K: SimdKernel>(kernel: K) -> K::Out {
    kernel.run(Neon::<false>(()))
}

/// Runs `kernel` with NEON and the dot product instructions.
#[target_feature(enable = "neon,fp16,dotprod")]
pub(crate) fn call_neon_dot<K: SimdKernel>(kernel: K) -> K::Out {
    kernel.run(Neon::<true>(()))
}

/// NEON with half floats, and dot products if `DOT`. Constructed only by the functions above, which enable
/// them.
#[derive(Clone, Copy)]
pub(crate) struct Neon<const DOT: bool>(());

/// Defines methods that are one expression over intrinsics without memory operands.
macro_rules! ops {
    ($(fn $name:ident($($arg:ident: $ty:ty),*) -> $ret:ty { $($body:tt)* })*) => {
        $(
            #[inline(always)]
            fn $name(self, $($arg: $ty),*) -> $ret {
                // SAFETY: `self` exists only inside the `call_*` function of its level, which enables every
                // instruction set that the intrinsics need; its caller, `Level::dispatch`, has checked for
                // them.
                unsafe { $($body)* }
            }
        )*
    };
}

/// `acc + Σ₄ a·b` of signed bytes. The intrinsic is not stable yet.
///
/// # Safety
/// The processor has the dot product instructions.
#[inline(always)]
unsafe fn sdot(mut acc: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
    // SAFETY: one instruction on registers, which the caller's level has.
    unsafe {
        asm!(
            ".arch_extension dotprod",
            "sdot {acc:v}.4s, {a:v}.16b, {b:v}.16b",
            acc = inout(vreg) acc,
            a = in(vreg) a,
            b = in(vreg) b,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    acc
}

/// Like [`sdot`], without the dot product instructions.
///
/// # Safety
/// The processor has NEON.
#[inline(always)]
unsafe fn sdot_by_parts(acc: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
    // SAFETY: instructions on registers, which the caller's level has.
    unsafe {
        let low = vpaddlq_s16(vmull_s8(vget_low_s8(a), vget_low_s8(b)));
        let high = vpaddlq_s16(vmull_high_s8(a, b));
        vaddq_s32(acc, vpaddq_s32(low, high))
    }
}

/// Converts half floats to floats. The intrinsic is not stable yet.
///
/// # Safety
/// The processor has half floats.
#[inline(always)]
unsafe fn widen(h: uint16x4_t) -> float32x4_t {
    let f: float32x4_t;
    // SAFETY: one instruction on registers, which the caller's level has.
    unsafe {
        asm!("fcvtl {f:v}.4s, {h:v}.4h", f = out(vreg) f, h = in(vreg) h,
            options(pure, nomem, nostack, preserves_flags));
    }
    f
}

/// Converts floats to half floats, ties to even.
///
/// # Safety
/// As [`widen`].
#[inline(always)]
unsafe fn narrow(f: float32x4_t) -> uint16x4_t {
    let h: uint16x4_t;
    // SAFETY: one instruction on registers, which the caller's level has.
    unsafe {
        asm!("fcvtn {h:v}.4h, {f:v}.4s", h = out(vreg) h, f = in(vreg) f,
            options(pure, nomem, nostack, preserves_flags));
    }
    h
}

impl<const DOT: bool> Simd for Neon<DOT> {
    const LANES: usize = 4;
    type I = int32x4_t;
    type F = float32x4_t;

    ops! {
        fn splat(x: i32) -> int32x4_t { vdupq_n_s32(x) }
        fn and(a: int32x4_t, b: int32x4_t) -> int32x4_t { vandq_s32(a, b) }
        fn or(a: int32x4_t, b: int32x4_t) -> int32x4_t { vorrq_s32(a, b) }
        fn xor(a: int32x4_t, b: int32x4_t) -> int32x4_t { veorq_s32(a, b) }
        fn add(a: int32x4_t, b: int32x4_t) -> int32x4_t { vaddq_s32(a, b) }
        fn sub(a: int32x4_t, b: int32x4_t) -> int32x4_t { vsubq_s32(a, b) }
        fn mul(a: int32x4_t, b: int32x4_t) -> int32x4_t { vmulq_s32(a, b) }
        fn max(a: int32x4_t, b: int32x4_t) -> int32x4_t { vmaxq_s32(a, b) }
        fn shl(a: int32x4_t, n: u32) -> int32x4_t { vshlq_s32(a, vdupq_n_s32(n as i32)) }
        fn shl_each(a: int32x4_t, n: int32x4_t) -> int32x4_t { vshlq_s32(a, n) }
        fn shr(a: int32x4_t, n: u32) -> int32x4_t {
            vreinterpretq_s32_u32(vshlq_u32(vreinterpretq_u32_s32(a), vdupq_n_s32(-(n as i32))))
        }
        fn sar(a: int32x4_t, n: u32) -> int32x4_t { vshlq_s32(a, vdupq_n_s32(-(n as i32))) }
        fn dot7(acc: int32x4_t, u: int32x4_t, x: int32x4_t) -> int32x4_t {
            let (u, x) = (vreinterpretq_s8_s32(u), vreinterpretq_s8_s32(x));
            if DOT { sdot(acc, u, x) } else { sdot_by_parts(acc, u, x) }
        }
        fn dot8(acc: int32x4_t, u: int32x4_t, x: int32x4_t) -> int32x4_t {
            // With u = 2 h + l, both parts fit in signed bytes.
            let (u, x) = (vreinterpretq_u8_s32(u), vreinterpretq_s8_s32(x));
            let half = vreinterpretq_s8_u8(vshrq_n_u8::<1>(u));
            let bit = vreinterpretq_s8_u8(vandq_u8(u, vdupq_n_u8(1)));
            if DOT {
                sdot(sdot(sdot(acc, half, x), half, x), bit, x)
            } else {
                let halves = sdot_by_parts(vdupq_n_s32(0), half, x);
                sdot_by_parts(vaddq_s32(acc, vshlq_n_s32::<1>(halves)), bit, x)
            }
        }
        fn dot16(acc: int32x4_t, a: int32x4_t, b: int32x4_t) -> int32x4_t {
            let (a, b) = (vreinterpretq_s16_s32(a), vreinterpretq_s16_s32(b));
            let low = vmull_s16(vget_low_s16(a), vget_low_s16(b));
            let high = vmull_high_s16(a, b);
            vaddq_s32(acc, vpaddq_s32(low, high))
        }
        fn lookup(table: &[u8; 16], idx: int32x4_t) -> int32x4_t {
            vreinterpretq_s32_u8(vqtbl1q_u8(vld1q_u8(table.as_ptr()), vreinterpretq_u8_s32(idx)))
        }
        fn to_f(a: int32x4_t) -> float32x4_t { vcvtq_f32_s32(a) }
        fn to_i(a: float32x4_t) -> int32x4_t { vcvtnq_s32_f32(a) }
        fn as_f(a: int32x4_t) -> float32x4_t { vreinterpretq_f32_s32(a) }
        fn as_i(a: float32x4_t) -> int32x4_t { vreinterpretq_s32_f32(a) }
        fn f16_lo(a: int32x4_t) -> float32x4_t { widen(vmovn_u32(vreinterpretq_u32_s32(a))) }
        fn fsplat(x: f32) -> float32x4_t { vdupq_n_f32(x) }
        fn fadd(a: float32x4_t, b: float32x4_t) -> float32x4_t { vaddq_f32(a, b) }
        fn fsub(a: float32x4_t, b: float32x4_t) -> float32x4_t { vsubq_f32(a, b) }
        fn fmul(a: float32x4_t, b: float32x4_t) -> float32x4_t { vmulq_f32(a, b) }
        fn fdiv(a: float32x4_t, b: float32x4_t) -> float32x4_t { vdivq_f32(a, b) }
        fn fmax(a: float32x4_t, b: float32x4_t) -> float32x4_t { vbslq_f32(vcgtq_f32(a, b), a, b) }
        fn fmin(a: float32x4_t, b: float32x4_t) -> float32x4_t { vbslq_f32(vcltq_f32(a, b), a, b) }
        fn fsqrt(a: float32x4_t) -> float32x4_t { vsqrtq_f32(a) }
        fn pick_less(a: float32x4_t, b: float32x4_t, x: float32x4_t, y: float32x4_t) -> float32x4_t {
            vbslq_f32(vcltq_f32(a, b), x, y)
        }
        fn fma(a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t { vfmaq_f32(c, a, b) }
        fn prefetch(p: *const u8) -> () {
            asm!("prfm pldl1keep, [{p}]", p = in(reg) p, options(nostack, preserves_flags, readonly))
        }
    }

    #[inline(always)]
    unsafe fn load(self, p: *const u8) -> int32x4_t {
        // SAFETY: 16 bytes are readable by the contract of `Simd::load`.
        unsafe { vreinterpretq_s32_u8(vld1q_u8(p)) }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut u8, a: int32x4_t) {
        // SAFETY: 16 bytes are writable by the contract of `Simd::store`.
        unsafe { vst1q_u8(p, vreinterpretq_u8_s32(a)) }
    }
    #[inline(always)]
    unsafe fn fload(self, p: *const f32) -> float32x4_t {
        // SAFETY: 4 floats are readable by the contract of `Simd::fload`.
        unsafe { vreinterpretq_f32_u8(vld1q_u8(p.cast())) }
    }
    #[inline(always)]
    unsafe fn fstore(self, p: *mut f32, a: float32x4_t) {
        // SAFETY: 4 floats are writable by the contract of `Simd::fstore`.
        unsafe { vst1q_u8(p.cast(), vreinterpretq_u8_f32(a)) }
    }
    #[inline(always)]
    unsafe fn load_f16(self, p: *const u8) -> float32x4_t {
        // SAFETY: 4 half floats are readable by the contract of `Simd::load_f16`.
        unsafe { widen(vreinterpret_u16_u8(vld1_u8(p))) }
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u8, a: float32x4_t) {
        // SAFETY: 4 half floats are writable by the contract of `Simd::store_f16`.
        unsafe { vst1_u8(p, vreinterpret_u8_u16(narrow(a))) }
    }
    #[inline(always)]
    unsafe fn store_i8(self, p: *mut u8, a: int32x4_t) {
        // SAFETY: 4 bytes are writable by the contract of `Simd::store_i8`.
        unsafe {
            let words = vmovn_s32(a);
            let bytes = vmovn_s16(vcombine_s16(words, words));
            p.cast::<u32>().write_unaligned(vget_lane_u32::<0>(vreinterpret_u32_s8(bytes)));
        }
    }
}
