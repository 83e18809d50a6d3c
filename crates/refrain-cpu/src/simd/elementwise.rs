//! Elementwise operations, norms, rotary embeddings and conversions of rows.
//!
//! Sums use 16 accumulators (element i goes to accumulator i mod 16), which are then added as in
//! [`Simd::sum16`].

use half::{bf16, f16};

use super::Level;
use super::lanes::{GROUP, Simd, SimdKernel};
use super::math;

/// An elementwise function of two registers.
trait Map2: Copy {
    fn apply<S: Simd>(self, s: S, a: S::F, b: S::F) -> S::F;
}

/// `out[i] = f(a[i], b[i])`. Each pointer is valid for `n` floats; `out` may be `a` or `b`.
struct MapRows<F> {
    f: F,
    a: *const f32,
    b: *const f32,
    out: *mut f32,
    n: usize,
}

impl<F: Map2> SimdKernel for MapRows<F> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let MapRows { f, a, b, out, n } = self;
        let whole = n / S::LANES * S::LANES;
        for i in (0..whole).step_by(S::LANES) {
            // SAFETY: `i + LANES <= n`, and the constructors of this struct (`map2` and `map2_inplace`) took
            // the pointers from slices of `n` floats. Each element is read before it is written, so `out` may
            // be an input.
            unsafe { s.fstore(out.add(i), f.apply(s, s.fload(a.add(i)), s.fload(b.add(i)))) };
        }
        let rest = n - whole;
        if rest > 0 {
            let (mut x, mut y) = ([0f32; GROUP], [0f32; GROUP]);
            // SAFETY: `whole + rest == n`, and a register is at most 16 floats, the length of the arrays.
            unsafe {
                std::ptr::copy_nonoverlapping(a.add(whole), x.as_mut_ptr(), rest);
                std::ptr::copy_nonoverlapping(b.add(whole), y.as_mut_ptr(), rest);
                let z = f.apply(s, s.fload(x.as_ptr()), s.fload(y.as_ptr()));
                s.fstore(x.as_mut_ptr(), z);
                std::ptr::copy_nonoverlapping(x.as_ptr(), out.add(whole), rest);
            }
        }
    }
}

#[inline]
fn map2<F: Map2>(level: Level, f: F, a: &[f32], b: &[f32], out: &mut [f32]) {
    let n = out.len();
    assert!(a.len() == n && b.len() == n, "rows of {}, {} and {n} elements", a.len(), b.len());
    level.dispatch(MapRows { f, a: a.as_ptr(), b: b.as_ptr(), out: out.as_mut_ptr(), n });
}

#[inline]
fn map2_inplace<F: Map2>(level: Level, f: F, a: &mut [f32], b: &[f32]) {
    let n = a.len();
    assert!(b.len() == n, "rows of {n} and {} elements", b.len());
    let out = a.as_mut_ptr();
    level.dispatch(MapRows { f, a: out, b: b.as_ptr(), out, n });
}

macro_rules! map2_ops {
    ($($(#[$doc:meta])+ $name:ident / $inplace:ident = |$s:ident, $a:ident, $b:ident| $body:expr;)*) => {
        $(
            $(#[$doc])+
            ///
            /// # Panics
            /// If the rows differ in length.
            pub fn $name(level: Level, a: &[f32], b: &[f32], out: &mut [f32]) {
                #[derive(Clone, Copy)]
                struct Apply;
                impl Map2 for Apply {
                    #[inline(always)]
                    fn apply<S: Simd>(self, $s: S, $a: S::F, $b: S::F) -> S::F {
                        $body
                    }
                }
                map2(level, Apply, a, b, out);
            }

            #[doc = concat!("[`", stringify!($name), "`] with the result in `a`.")]
            ///
            /// # Panics
            /// If the rows differ in length.
            pub fn $inplace(level: Level, a: &mut [f32], b: &[f32]) {
                #[derive(Clone, Copy)]
                struct ApplyInplace;
                impl Map2 for ApplyInplace {
                    #[inline(always)]
                    fn apply<S: Simd>(self, $s: S, $a: S::F, $b: S::F) -> S::F {
                        $body
                    }
                }
                map2_inplace(level, ApplyInplace, a, b);
            }
        )*
    };
}

map2_ops! {
    /// `out = a + b`.
    add / add_inplace = |s, a, b| s.fadd(a, b);
    /// `out = a * b`.
    mul / mul_inplace = |s, a, b| s.fmul(a, b);
    /// `out = silu(a) * b`, the gated activation of Llama models.
    silu_mul / silu_mul_inplace = |s, a, b| s.fmul(math::silu(s, a), b);
    /// `out = gelu_tanh(a) * b`, the gated activation of Gemma models.
    gelu_tanh_mul / gelu_tanh_mul_inplace = |s, a, b| s.fmul(math::gelu_tanh(s, a), b);
}

#[derive(Clone, Copy)]
struct ScaleMap(f32);

impl Map2 for ScaleMap {
    #[inline(always)]
    fn apply<S: Simd>(self, s: S, a: S::F, _: S::F) -> S::F {
        s.fmul(a, s.fsplat(self.0))
    }
}

/// `x *= factor`.
pub fn scale_inplace(level: Level, x: &mut [f32], factor: f32) {
    let (out, n) = (x.as_mut_ptr(), x.len());
    level.dispatch(MapRows { f: ScaleMap(factor), a: out, b: out, out, n });
}

#[derive(Clone, Copy)]
struct Axpy(f32);

impl Map2 for Axpy {
    #[inline(always)]
    fn apply<S: Simd>(self, s: S, a: S::F, b: S::F) -> S::F {
        s.fma(s.fsplat(self.0), b, a)
    }
}

/// `y += factor * x`, with one rounding per element.
///
/// # Panics
/// If the rows differ in length.
pub fn axpy(level: Level, y: &mut [f32], factor: f32, x: &[f32]) {
    map2_inplace(level, Axpy(factor), y, x);
}

/// `e^x` in place, with an error of at most 1.5 ulp.
pub fn exp_inplace(level: Level, x: &mut [f32]) {
    #[derive(Clone, Copy)]
    struct Exp;
    impl Map2 for Exp {
        #[inline(always)]
        fn apply<S: Simd>(self, s: S, a: S::F, _: S::F) -> S::F {
            math::exp(s, a)
        }
    }
    let (out, n) = (x.as_mut_ptr(), x.len());
    level.dispatch(MapRows { f: Exp, a: out, b: out, out, n });
}

/// Register `g` of the 16 elements starting at `at`, padded at the end.
#[inline(always)]
pub(super) fn load16<S: Simd, const FILL: u32>(s: S, x: &[f32], at: usize, g: usize) -> S::F {
    let begin = at + g * S::LANES;
    if begin + S::LANES <= x.len() {
        // SAFETY: the LANES floats from `begin` are inside the slice.
        return unsafe { s.fload(x.as_ptr().add(begin)) };
    }
    let mut padded = [f32::from_bits(FILL); GROUP];
    if begin < x.len() {
        padded[..x.len() - begin].copy_from_slice(&x[begin..]);
    }
    // SAFETY: a register is at most 16 floats.
    unsafe { s.fload(padded.as_ptr()) }
}

struct DotF32<'a>(&'a [f32], &'a [f32]);

impl SimdKernel for DotF32<'_> {
    type Out = f32;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> f32 {
        let mut sums = [s.fsplat(0.0); 4];
        for at in (0..self.0.len()).step_by(GROUP) {
            for (g, sum) in sums.iter_mut().enumerate().take(GROUP / S::LANES) {
                *sum = s.fma(load16::<S, 0>(s, self.0, at, g), load16::<S, 0>(s, self.1, at, g), *sum);
            }
        }
        s.sum16(sums)
    }
}

/// `Σ a[i] b[i]`, with `fma` in 16 accumulators.
///
/// # Panics
/// If the rows differ in length.
pub fn dot(level: Level, a: &[f32], b: &[f32]) -> f32 {
    assert!(a.len() == b.len(), "rows of {} and {} elements", a.len(), b.len());
    level.dispatch(DotF32(a, b))
}

struct ReduceRow<'a> {
    x: &'a [f32],
    max: bool,
}

impl SimdKernel for ReduceRow<'_> {
    type Out = f32;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> f32 {
        const MINUS_INF: u32 = 0xff80_0000;
        if self.max {
            let mut max = s.fsplat(f32::NEG_INFINITY);
            for at in (0..self.x.len()).step_by(GROUP) {
                for g in 0..GROUP / S::LANES {
                    // This argument order ignores NaN in the row.
                    max = s.fmax(load16::<S, MINUS_INF>(s, self.x, at, g), max);
                }
            }
            let mut lanes = [f32::NEG_INFINITY; GROUP];
            // SAFETY: a register is at most 16 floats.
            unsafe { s.fstore(lanes.as_mut_ptr(), max) };
            lanes.into_iter().fold(f32::NEG_INFINITY, f32::max)
        } else {
            let mut sums = [s.fsplat(0.0); 4];
            for at in (0..self.x.len()).step_by(GROUP) {
                for (g, sum) in sums.iter_mut().enumerate().take(GROUP / S::LANES) {
                    *sum = s.fadd(load16::<S, 0>(s, self.x, at, g), *sum);
                }
            }
            s.sum16(sums)
        }
    }
}

/// Largest element, ignoring NaN; minus infinity for an empty row.
pub fn max(level: Level, x: &[f32]) -> f32 {
    level.dispatch(ReduceRow { x, max: true })
}

/// Sum, in 16 accumulators.
pub fn sum(level: Level, x: &[f32]) -> f32 {
    level.dispatch(ReduceRow { x, max: false })
}

/// Index of the first largest element, ignoring NaN; 0 if there is none.
pub fn argmax(level: Level, x: &[f32]) -> usize {
    let max = max(level, x);
    x.iter().position(|&v| v == max).unwrap_or(0)
}

/// `x = e^(x - max x) / Σ`.
pub fn softmax_inplace(level: Level, x: &mut [f32]) {
    #[derive(Clone, Copy)]
    struct ExpMinus(f32);
    impl Map2 for ExpMinus {
        #[inline(always)]
        fn apply<S: Simd>(self, s: S, a: S::F, _: S::F) -> S::F {
            math::exp(s, s.fsub(a, s.fsplat(self.0)))
        }
    }
    let largest = max(level, x);
    let (out, n) = (x.as_mut_ptr(), x.len());
    level.dispatch(MapRows { f: ExpMinus(largest), a: out, b: out, out, n });
    let total = sum(level, x);
    scale_inplace(level, x, 1.0 / total);
}

fn rms_factor(level: Level, x: &[f32], eps: f32) -> f32 {
    1.0 / (dot(level, x, x) / x.len() as f32 + eps).sqrt()
}

#[derive(Clone, Copy)]
struct Norm(f32);

impl Map2 for Norm {
    #[inline(always)]
    fn apply<S: Simd>(self, s: S, a: S::F, b: S::F) -> S::F {
        s.fmul(s.fmul(a, s.fsplat(self.0)), b)
    }
}

/// `x = gelu(x)`.
pub fn gelu_erf_inplace(level: Level, x: &mut [f32]) {
    #[derive(Clone, Copy)]
    struct GeluErf;
    impl Map2 for GeluErf {
        #[inline(always)]
        fn apply<S: Simd>(self, s: S, a: S::F, _: S::F) -> S::F {
            math::gelu_erf(s, a)
        }
    }
    let (out, n) = (x.as_mut_ptr(), x.len());
    level.dispatch(MapRows { f: GeluErf, a: out, b: out, out, n });
}

/// `out = x / √(mean x² + eps) * w`.
///
/// # Panics
/// If the rows differ in length.
pub fn rms_norm(level: Level, x: &[f32], w: &[f32], eps: f32, out: &mut [f32]) {
    map2(level, Norm(rms_factor(level, x, eps)), x, w, out);
}

/// [`rms_norm`] with the result in `x`.
///
/// # Panics
/// If the rows differ in length.
pub fn rms_norm_inplace(level: Level, x: &mut [f32], w: &[f32], eps: f32) {
    let factor = rms_factor(level, x, eps);
    map2_inplace(level, Norm(factor), x, w);
}

/// `residual += delta`, then `out = rms_norm(residual)`.
///
/// # Panics
/// If the rows differ in length.
pub fn add_rms_norm(level: Level, residual: &mut [f32], delta: &[f32], w: &[f32], eps: f32, out: &mut [f32]) {
    add_inplace(level, residual, delta);
    rms_norm(level, residual, w, eps, out);
}

struct RopeHalves<'a> {
    low: &'a mut [f32],
    high: &'a mut [f32],
    cos: &'a [f32],
    sin: &'a [f32],
}

impl SimdKernel for RopeHalves<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let RopeHalves { low, high, cos, sin } = self;
        let whole = low.len() / S::LANES * S::LANES;
        for i in (0..whole).step_by(S::LANES) {
            // SAFETY: `i + LANES` is within all four slices, which `rope_neox` made equally long.
            unsafe {
                let (a, b) = (s.fload(low.as_ptr().add(i)), s.fload(high.as_ptr().add(i)));
                let (c, d) = (s.fload(cos.as_ptr().add(i)), s.fload(sin.as_ptr().add(i)));
                s.fstore(low.as_mut_ptr().add(i), s.fsub(s.fmul(a, c), s.fmul(b, d)));
                s.fstore(high.as_mut_ptr().add(i), s.fadd(s.fmul(a, d), s.fmul(b, c)));
            }
        }
        for i in whole..low.len() {
            (low[i], high[i]) = rotate(low[i], high[i], cos[i], sin[i]);
        }
    }
}

#[inline(always)]
fn rotate(a: f32, b: f32, cos: f32, sin: f32) -> (f32, f32) {
    (a * cos - b * sin, a * sin + b * cos)
}

/// Rotates the pairs `(x[i], x[i + n])` of a head by the angles with these `n` cosines and sines. Elements from
/// `2 n` on are unchanged.
///
/// # Panics
/// If `cos` and `sin` differ in length or are longer than half of `x`.
pub fn rope_neox(level: Level, x: &mut [f32], cos: &[f32], sin: &[f32]) {
    let n = cos.len();
    assert!(
        sin.len() == n && 2 * n <= x.len(),
        "{n} cosines and {} sines for {} elements",
        sin.len(),
        x.len()
    );
    let (low, rest) = x.split_at_mut(n);
    level.dispatch(RopeHalves { low, high: &mut rest[..n], cos, sin });
}

/// Rotates the pairs `(x[2 i], x[2 i + 1])` of a head by the angles with these cosines and sines. Remaining
/// elements are unchanged.
///
/// # Panics
/// If `cos` and `sin` differ in length or are longer than half of `x`.
pub fn rope_interleaved(_: Level, x: &mut [f32], cos: &[f32], sin: &[f32]) {
    let n = cos.len();
    assert!(
        sin.len() == n && 2 * n <= x.len(),
        "{n} cosines and {} sines for {} elements",
        sin.len(),
        x.len()
    );
    for ((pair, &cos), &sin) in x.chunks_exact_mut(2).zip(cos).zip(sin) {
        (pair[0], pair[1]) = rotate(pair[0], pair[1], cos, sin);
    }
}

struct ToF16<'a>(&'a [f32], &'a mut [f16]);

impl SimdKernel for ToF16<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (mut src, mut dst) = (self.0.chunks_exact(S::LANES), self.1.chunks_exact_mut(S::LANES));
        for (src, dst) in (&mut src).zip(&mut dst) {
            // SAFETY: LANES elements on both sides.
            unsafe { s.store_f16(dst.as_mut_ptr().cast(), s.fload(src.as_ptr())) };
        }
        let (src, dst) = (src.remainder(), dst.into_remainder());
        let mut halves = [f16::ZERO; GROUP];
        // SAFETY: a register is at most 16 elements, the length of the array.
        unsafe { s.store_f16(halves.as_mut_ptr().cast(), load16::<S, 0>(s, src, 0, 0)) };
        dst.copy_from_slice(&halves[..dst.len()]);
    }
}

/// Rounds a row to half floats, ties to even.
///
/// # Panics
/// If the rows differ in length.
pub fn f32_to_f16(level: Level, src: &[f32], dst: &mut [f16]) {
    assert!(src.len() == dst.len(), "rows of {} and {} elements", src.len(), dst.len());
    level.dispatch(ToF16(src, dst));
}

struct FromF16<'a>(&'a [f16], &'a mut [f32]);

impl SimdKernel for FromF16<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (mut src, mut dst) = (self.0.chunks_exact(S::LANES), self.1.chunks_exact_mut(S::LANES));
        for (src, dst) in (&mut src).zip(&mut dst) {
            // SAFETY: LANES elements on both sides.
            unsafe { s.fstore(dst.as_mut_ptr(), s.load_f16(src.as_ptr().cast())) };
        }
        let (src, dst) = (src.remainder(), dst.into_remainder());
        let (mut halves, mut floats) = ([f16::ZERO; GROUP], [0f32; GROUP]);
        halves[..src.len()].copy_from_slice(src);
        // SAFETY: a register is at most 16 elements, the length of the arrays.
        unsafe { s.fstore(floats.as_mut_ptr(), s.load_f16(halves.as_ptr().cast())) };
        dst.copy_from_slice(&floats[..dst.len()]);
    }
}

/// Converts a row of half floats to floats.
///
/// # Panics
/// If the rows differ in length.
pub fn f16_to_f32(level: Level, src: &[f16], dst: &mut [f32]) {
    assert!(src.len() == dst.len(), "rows of {} and {} elements", src.len(), dst.len());
    level.dispatch(FromF16(src, dst));
}

struct FromBf16<'a>(&'a [bf16], &'a mut [f32]);

impl SimdKernel for FromBf16<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        // Plain Rust, which the compiler vectorises for the level.
        for (dst, src) in self.1.iter_mut().zip(self.0) {
            *dst = f32::from_bits(u32::from(src.to_bits()) << 16);
        }
    }
}

/// Converts a row of bfloat16 to floats.
///
/// # Panics
/// If the rows differ in length.
pub fn bf16_to_f32(level: Level, src: &[bf16], dst: &mut [f32]) {
    assert!(src.len() == dst.len(), "rows of {} and {} elements", src.len(), dst.len());
    level.dispatch(FromBf16(src, dst));
}

struct ToBf16<'a>(&'a [f32], &'a mut [bf16]);

impl SimdKernel for ToBf16<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        // Plain Rust as above, without branches.
        for (dst, src) in self.1.iter_mut().zip(self.0) {
            let bits = src.to_bits();
            let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
            let quiet = (bits >> 16) | 0x40;
            let is_nan = bits & 0x7fff_ffff > 0x7f80_0000;
            *dst = bf16::from_bits(if is_nan { quiet } else { rounded } as u16);
        }
    }
}

/// Rounds a row to bfloat16, ties to even.
///
/// # Panics
/// If the rows differ in length.
pub fn f32_to_bf16(level: Level, src: &[f32], dst: &mut [bf16]) {
    assert!(src.len() == dst.len(), "rows of {} and {} elements", src.len(), dst.len());
    level.dispatch(ToBf16(src, dst));
}
