//! Operations in plain Rust on four lanes: the definition that the other levels are tested against.

use half::f16;

use super::Simd;

/// Runs on every processor.
#[derive(Clone, Copy)]
pub(crate) struct Portable;

#[inline(always)]
fn map2<A: Copy, B: Copy, R>(a: [A; 4], b: [B; 4], f: impl Fn(A, B) -> R) -> [R; 4] {
    [f(a[0], b[0]), f(a[1], b[1]), f(a[2], b[2]), f(a[3], b[3])]
}

#[inline(always)]
fn map3<A: Copy, B: Copy, R>(acc: [A; 4], a: [B; 4], b: [B; 4], f: impl Fn(A, B, B) -> R) -> [R; 4] {
    [f(acc[0], a[0], b[0]), f(acc[1], a[1], b[1]), f(acc[2], a[2], b[2]), f(acc[3], a[3], b[3])]
}

/// `a * b + c`, rounded once.
#[inline(always)]
fn fma(a: f32, b: f32, c: f32) -> f32 {
    if cfg!(any(target_feature = "fma", target_arch = "aarch64")) {
        return a.mul_add(b, c);
    }
    // Without the instruction, `mul_add` is a call per element. In f64 the product is exact. The sum is rounded
    // to odd (its last bit records that it is inexact), so rounding it to f32 gives the same result as a single
    // rounding.
    let (product, c) = (f64::from(a) * f64::from(b), f64::from(c));
    let sum = product + c;
    let c_part = sum - product;
    let lost = (product - (sum - c_part)) + (c - c_part);
    let bits = sum.to_bits();
    let toward = if (lost > 0.0) == (sum > 0.0) { bits.wrapping_add(1) } else { bits.wrapping_sub(1) };
    // False for NaN, which `lost` is for infinities.
    let is_even_and_inexact = bits & 1 == 0 && lost.abs() > 0.0;
    f64::from_bits(if is_even_and_inexact { toward } else { bits }) as f32
}

impl Simd for Portable {
    const LANES: usize = 4;
    type I = [i32; 4];
    type F = [f32; 4];

    #[inline(always)]
    fn splat(self, x: i32) -> [i32; 4] {
        [x; 4]
    }
    #[inline(always)]
    fn and(self, a: [i32; 4], b: [i32; 4]) -> [i32; 4] {
        map2(a, b, |a, b| a & b)
    }
    #[inline(always)]
    fn or(self, a: [i32; 4], b: [i32; 4]) -> [i32; 4] {
        map2(a, b, |a, b| a | b)
    }
    #[inline(always)]
    fn xor(self, a: [i32; 4], b: [i32; 4]) -> [i32; 4] {
        map2(a, b, |a, b| a ^ b)
    }
    #[inline(always)]
    fn add(self, a: [i32; 4], b: [i32; 4]) -> [i32; 4] {
        map2(a, b, i32::wrapping_add)
    }
    #[inline(always)]
    fn sub(self, a: [i32; 4], b: [i32; 4]) -> [i32; 4] {
        map2(a, b, i32::wrapping_sub)
    }
    #[inline(always)]
    fn mul(self, a: [i32; 4], b: [i32; 4]) -> [i32; 4] {
        map2(a, b, i32::wrapping_mul)
    }
    #[inline(always)]
    fn max(self, a: [i32; 4], b: [i32; 4]) -> [i32; 4] {
        map2(a, b, i32::max)
    }
    #[inline(always)]
    fn shl(self, a: [i32; 4], n: u32) -> [i32; 4] {
        a.map(|a| a << n)
    }
    #[inline(always)]
    fn shl_each(self, a: [i32; 4], n: [i32; 4]) -> [i32; 4] {
        std::array::from_fn(|i| a[i] << n[i])
    }
    #[inline(always)]
    fn shr(self, a: [i32; 4], n: u32) -> [i32; 4] {
        a.map(|a| (a as u32 >> n) as i32)
    }
    #[inline(always)]
    fn sar(self, a: [i32; 4], n: u32) -> [i32; 4] {
        a.map(|a| a >> n)
    }
    #[inline(always)]
    fn dot7(self, acc: [i32; 4], u: [i32; 4], x: [i32; 4]) -> [i32; 4] {
        self.dot8(acc, u, x)
    }
    #[inline(always)]
    fn dot8(self, acc: [i32; 4], u: [i32; 4], x: [i32; 4]) -> [i32; 4] {
        map3(acc, u, x, |acc, u, x| {
            let (u, x) = (u.to_le_bytes(), x.to_le_bytes());
            let product = |i: usize| i32::from(u[i]) * i32::from(x[i] as i8);
            acc.wrapping_add(product(0) + product(1) + product(2) + product(3))
        })
    }
    #[inline(always)]
    fn dot16(self, acc: [i32; 4], a: [i32; 4], b: [i32; 4]) -> [i32; 4] {
        map3(acc, a, b, |acc, a, b| {
            let low = i32::from(a as i16) * i32::from(b as i16);
            acc.wrapping_add(low).wrapping_add((a >> 16) * (b >> 16))
        })
    }
    #[inline(always)]
    fn lookup(self, table: &[u8; 16], idx: [i32; 4]) -> [i32; 4] {
        idx.map(|idx| i32::from_le_bytes(idx.to_le_bytes().map(|i| table[usize::from(i & 15)])))
    }

    #[inline(always)]
    fn to_f(self, a: [i32; 4]) -> [f32; 4] {
        a.map(|a| a as f32)
    }
    #[inline(always)]
    fn to_i(self, a: [f32; 4]) -> [i32; 4] {
        // Adding 1.5 * 2^23 leaves the integer, rounded to even, in the low bits of the sum.
        const MAGIC: f32 = 12_582_912.0;
        a.map(|a| ((a + MAGIC).to_bits() as i32).wrapping_sub(MAGIC.to_bits() as i32))
    }
    #[inline(always)]
    fn as_f(self, a: [i32; 4]) -> [f32; 4] {
        a.map(|a| f32::from_bits(a as u32))
    }
    #[inline(always)]
    fn as_i(self, a: [f32; 4]) -> [i32; 4] {
        a.map(|a| a.to_bits() as i32)
    }
    #[inline(always)]
    fn f16_lo(self, a: [i32; 4]) -> [f32; 4] {
        a.map(|a| f16::from_bits(a as u16).to_f32())
    }
    #[inline(always)]
    fn fsplat(self, x: f32) -> [f32; 4] {
        [x; 4]
    }
    #[inline(always)]
    fn fadd(self, a: [f32; 4], b: [f32; 4]) -> [f32; 4] {
        map2(a, b, |a, b| a + b)
    }
    #[inline(always)]
    fn fsub(self, a: [f32; 4], b: [f32; 4]) -> [f32; 4] {
        map2(a, b, |a, b| a - b)
    }
    #[inline(always)]
    fn fmul(self, a: [f32; 4], b: [f32; 4]) -> [f32; 4] {
        map2(a, b, |a, b| a * b)
    }
    #[inline(always)]
    fn fdiv(self, a: [f32; 4], b: [f32; 4]) -> [f32; 4] {
        map2(a, b, |a, b| a / b)
    }
    #[inline(always)]
    fn fmax(self, a: [f32; 4], b: [f32; 4]) -> [f32; 4] {
        map2(a, b, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn fmin(self, a: [f32; 4], b: [f32; 4]) -> [f32; 4] {
        map2(a, b, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    fn fsqrt(self, a: [f32; 4]) -> [f32; 4] {
        [a[0].sqrt(), a[1].sqrt(), a[2].sqrt(), a[3].sqrt()]
    }
    #[inline(always)]
    fn pick_less(self, a: [f32; 4], b: [f32; 4], x: [f32; 4], y: [f32; 4]) -> [f32; 4] {
        let mut picked = y;
        for i in 0..4 {
            picked[i] = if a[i] < b[i] { x[i] } else { y[i] };
        }
        picked
    }
    #[inline(always)]
    fn fma(self, a: [f32; 4], b: [f32; 4], c: [f32; 4]) -> [f32; 4] {
        map3(c, a, b, |c, a, b| fma(a, b, c))
    }

    #[inline(always)]
    unsafe fn load(self, p: *const u8) -> [i32; 4] {
        // SAFETY: 16 bytes are readable by the contract of `Simd::load`.
        unsafe { p.cast::<[i32; 4]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut u8, a: [i32; 4]) {
        // SAFETY: 16 bytes are writable by the contract of `Simd::store`.
        unsafe { p.cast::<[i32; 4]>().write_unaligned(a) }
    }
    #[inline(always)]
    unsafe fn fload(self, p: *const f32) -> [f32; 4] {
        // SAFETY: 4 floats are readable by the contract of `Simd::fload`.
        unsafe { p.cast::<[f32; 4]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn fstore(self, p: *mut f32, a: [f32; 4]) {
        // SAFETY: 4 floats are writable by the contract of `Simd::fstore`.
        unsafe { p.cast::<[f32; 4]>().write_unaligned(a) }
    }
    #[inline(always)]
    unsafe fn load_f16(self, p: *const u8) -> [f32; 4] {
        // SAFETY: 4 half floats are readable by the contract of `Simd::load_f16`.
        unsafe { p.cast::<[u16; 4]>().read_unaligned() }.map(|h| f16::from_bits(h).to_f32())
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u8, a: [f32; 4]) {
        // SAFETY: 4 half floats are writable by the contract of `Simd::store_f16`.
        unsafe { p.cast::<[u16; 4]>().write_unaligned(a.map(|a| f16::from_f32(a).to_bits())) }
    }
    #[inline(always)]
    unsafe fn store_i8(self, p: *mut u8, a: [i32; 4]) {
        // SAFETY: 4 bytes are writable by the contract of `Simd::store_i8`.
        unsafe { p.cast::<[u8; 4]>().write_unaligned(a.map(|a| a as u8)) }
    }
    #[inline(always)]
    fn prefetch(self, _: *const u8) {}
}

#[cfg(test)]
mod tests {
    use super::fma;

    #[test]
    fn fma_without_the_instruction_rounds_once() {
        let mut state = 1u64;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            f32::from_bits((state >> 32) as u32)
        };
        let check = |a: f32, b: f32, c: f32| {
            let (got, want) = (fma(a, b, c), a.mul_add(b, c));
            let same = got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan());
            assert!(same, "{a:e} * {b:e} + {c:e}: got {got:e}, want {want:e}");
        };
        for _ in 0..1_000_000 {
            let (a, b, c) = (next(), next(), next());
            check(a, b, c);
            // Close to cancellation and to ties, where a second rounding would show.
            check(a, b, -(a * b));
            check(a, 1.0 + f32::EPSILON, c * 0.5);
            check(1.0 + f32::EPSILON, 1.0 - f32::EPSILON, a * 1e-20);
        }
        for a in [0.0, -0.0, 1.0, -1.0, f32::MAX, f32::MIN_POSITIVE, 1e-45, f32::INFINITY, f32::NAN] {
            for b in [0.0, -0.0, 1.0, -1.5, f32::MAX, 1e-45, f32::NEG_INFINITY] {
                for c in [0.0, -0.0, 1.0, -1.0, f32::MAX, -f32::MAX, 1e-45, -1e-45, f32::INFINITY] {
                    check(a, b, c);
                }
            }
        }
    }
}
