//! Row and elementwise kernels that only training steps use.
//!
//! Sums use 16 accumulators, as in [`super::elementwise`].

use super::Level;
use super::elementwise::{dot, load16, max, sum};
use super::lanes::{GROUP, Simd, SimdKernel};
use super::math;

/// `a`, `b`, `c` -> two results, element by element. All slices have the same length.
struct Map3<'a, F> {
    f: F,
    ins: [&'a [f32]; 3],
    outs: [&'a mut [f32]; 2],
}

trait Function3: Copy {
    fn apply<S: Simd>(self, s: S, x: [S::F; 3]) -> [S::F; 2];
}

impl<F: Function3> SimdKernel for Map3<'_, F> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let [a, b, c] = self.ins;
        let [y, z] = self.outs;
        for i in (0..a.len()).step_by(S::LANES) {
            let x = [load16::<S, 0>(s, a, i, 0), load16::<S, 0>(s, b, i, 0), load16::<S, 0>(s, c, i, 0)];
            let [first, second] = self.f.apply(s, x);
            store(s, y, i, first);
            store(s, z, i, second);
        }
    }
}

/// Stores a register, or the lanes that fit.
#[inline(always)]
fn store<S: Simd>(s: S, to: &mut [f32], at: usize, x: S::F) {
    if at + S::LANES <= to.len() {
        // SAFETY: the LANES floats from `at` are inside the slice.
        unsafe { s.fstore(to.as_mut_ptr().add(at), x) };
        return;
    }
    let mut lanes = [0f32; GROUP];
    // SAFETY: a register is at most 16 floats.
    unsafe { s.fstore(lanes.as_mut_ptr(), x) };
    if at < to.len() {
        let n = to.len() - at;
        to[at..].copy_from_slice(&lanes[..n]);
    }
}

/// `1 / (1 + e^-x)`
#[inline(always)]
fn sigmoid<S: Simd>(s: S, x: S::F) -> S::F {
    let one = s.fsplat(1.0);
    s.fdiv(one, s.fadd(one, math::exp(s, s.fsub(s.fsplat(0.0), x))))
}

#[derive(Clone, Copy)]
struct SiluGrad;

impl Function3 for SiluGrad {
    #[inline(always)]
    fn apply<S: Simd>(self, s: S, [dy, gate, up]: [S::F; 3]) -> [S::F; 2] {
        let one = s.fsplat(1.0);
        let sig = sigmoid(s, gate);
        let slope = s.fmul(sig, s.fma(gate, s.fsub(one, sig), one));
        [s.fmul(s.fmul(dy, up), slope), s.fmul(dy, s.fmul(gate, sig))]
    }
}

#[derive(Clone, Copy)]
struct GeluGrad;

impl Function3 for GeluGrad {
    #[inline(always)]
    fn apply<S: Simd>(self, s: S, [dy, x, up]: [S::F; 3]) -> [S::F; 2] {
        // gelu(x) = x sigmoid(2 u) with u = √(2/π) (x + 0.044715 x³).
        let one = s.fsplat(1.0);
        let square = s.fmul(x, x);
        let cubic = s.fma(s.fmul(square, s.fsplat(0.044_715)), x, x);
        let sig = sigmoid(s, s.fmul(cubic, s.fsplat(1.595_769)));
        let steep = s.fmul(s.fma(square, s.fsplat(3.0 * 0.044_715), one), s.fsplat(1.595_769));
        let rest = s.fmul(s.fmul(x, s.fsub(one, sig)), steep);
        let slope = s.fmul(sig, s.fadd(one, rest));
        [s.fmul(s.fmul(dy, up), slope), s.fmul(dy, s.fmul(x, sig))]
    }
}

/// Gradients of `silu(gate) * up`, or of `gelu(gate) * up`: first of `gate`, then of `up`.
///
/// # Panics
/// If the rows differ in length.
pub fn gate_grad(level: Level, gelu: bool, ins: [&[f32]; 3], outs: [&mut [f32]; 2]) {
    let n = ins[0].len();
    assert!(ins.iter().all(|x| x.len() == n) && outs.iter().all(|y| y.len() == n), "rows of {n} elements");
    match gelu {
        false => level.dispatch(Map3 { f: SiluGrad, ins, outs }),
        true => level.dispatch(Map3 { f: GeluGrad, ins, outs }),
    }
}

struct NormGrad<'a> {
    dy: &'a [f32],
    x: &'a [f32],
    w: &'a [f32],
    eps: f32,
    dx: &'a mut [f32],
    dw: &'a mut [f32],
}

impl SimdKernel for NormGrad<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let NormGrad { dy, x, w, eps, dx, dw } = self;
        let d = x.len();
        let (mut squares, mut dots) = ([s.fsplat(0.0); 4], [s.fsplat(0.0); 4]);
        for at in (0..d).step_by(GROUP) {
            for g in 0..GROUP / S::LANES {
                let xs = load16::<S, 0>(s, x, at, g);
                let weighted = s.fmul(load16::<S, 0>(s, dy, at, g), load16::<S, 0>(s, w, at, g));
                squares[g] = s.fma(xs, xs, squares[g]);
                dots[g] = s.fma(weighted, xs, dots[g]);
            }
        }
        let r = 1.0 / (s.sum16(squares) / d as f32 + eps).sqrt();
        let slope = r * r * r * (s.sum16(dots) / d as f32);
        let (r, slope) = (s.fsplat(r), s.fsplat(-slope));
        for at in (0..d).step_by(S::LANES) {
            let (xs, dys) = (load16::<S, 0>(s, x, at, 0), load16::<S, 0>(s, dy, at, 0));
            let weighted = s.fmul(dys, load16::<S, 0>(s, w, at, 0));
            store(s, dx, at, s.fma(xs, slope, s.fmul(weighted, r)));
            let sum = s.fma(dys, s.fmul(xs, r), load16::<S, 0>(s, dw, at, 0));
            store(s, dw, at, sum);
        }
    }
}

/// One row of the gradient of an RMS norm: writes `dx` and accumulates `dw`.
///
/// # Panics
/// If the rows differ in length.
pub fn rms_norm_grad(level: Level, [dy, x, w]: [&[f32]; 3], eps: f32, dx: &mut [f32], dw: &mut [f32]) {
    let d = x.len();
    assert!([dy.len(), w.len(), dx.len(), dw.len()] == [d; 4], "rows of {d} elements");
    if d < GROUP {
        // With few elements nearly everything cancels, and an exact computation is cheap.
        short_norm_grad([dy, x, w], eps, dx, dw);
        return;
    }
    level.dispatch(NormGrad { dy, x, w, eps, dx, dw });
}

fn short_norm_grad([dy, x, w]: [&[f32]; 3], eps: f32, dx: &mut [f32], dw: &mut [f32]) {
    let d = x.len() as f64;
    let elements = || dy.iter().zip(x).zip(w).map(|((&dy, &x), &w)| [dy, x, w].map(f64::from));
    let squares: f64 = elements().map(|[_, x, _]| x * x).sum();
    let dot: f64 = elements().map(|[dy, x, w]| dy * w * x).sum();
    let r = 1.0 / (squares / d + f64::from(eps)).sqrt();
    for ([dy, x, w], (dx, dw)) in elements().zip(dx.iter_mut().zip(dw)) {
        *dx = (r * (dy * w - x * r * r * dot / d)) as f32;
        *dw += (dy * x * r) as f32;
    }
}

struct ExpSum<'a> {
    x: &'a mut [f32],
    max: f32,
}

impl SimdKernel for ExpSum<'_> {
    type Out = f32;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> f32 {
        const MINUS_INF: u32 = 0xff80_0000;
        let max = s.fsplat(self.max);
        let mut sums = [s.fsplat(0.0); 4];
        for at in (0..self.x.len()).step_by(GROUP) {
            for (g, sum) in sums.iter_mut().enumerate().take(GROUP / S::LANES) {
                let e = math::exp(s, s.fsub(load16::<S, MINUS_INF>(s, self.x, at, g), max));
                *sum = s.fadd(*sum, e);
                store(s, self.x, at + g * S::LANES, e);
            }
        }
        s.sum16(sums)
    }
}

/// Returns the loss of a row of logits, `scale * -log softmax(x)[target]`, and replaces the logits by its
/// gradient.
///
/// # Panics
/// If the target is outside the row.
pub fn cross_entropy(level: Level, x: &mut [f32], target: usize, scale: f32) -> f32 {
    let largest = max(level, x);
    let of_target = x[target];
    let total = level.dispatch(ExpSum { x, max: largest });
    super::scale_inplace(level, x, scale / total);
    x[target] -= scale;
    scale * (largest - of_target + total.ln())
}

/// Gradient of a softmax with the result `y`: `y (dy - Σ dy y)`.
///
/// # Panics
/// If the rows differ in length.
pub fn softmax_grad(level: Level, dy: &[f32], y: &[f32], out: &mut [f32]) {
    let total = dot(level, dy, y);
    assert!(out.len() == y.len(), "rows of {} and {} elements", y.len(), out.len());
    level.dispatch(SoftmaxGrad { dy, y, out, total });
}

struct SoftmaxGrad<'a> {
    dy: &'a [f32],
    y: &'a [f32],
    out: &'a mut [f32],
    total: f32,
}

impl SimdKernel for SoftmaxGrad<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for at in (0..self.y.len()).step_by(S::LANES) {
            let (dy, y) = (load16::<S, 0>(s, self.dy, at, 0), load16::<S, 0>(s, self.y, at, 0));
            store(s, self.out, at, s.fmul(y, s.fsub(dy, s.fsplat(self.total))));
        }
    }
}

/// Sum of squares of a row, in 16 accumulators.
pub fn sum_squares(level: Level, x: &[f32]) -> f32 {
    dot(level, x, x)
}

/// Sum of a row, in 16 accumulators, or its largest element.
pub fn reduce(level: Level, x: &[f32], is_max: bool) -> f32 {
    if is_max { max(level, x) } else { sum(level, x) }
}

/// Scalars of an AdamW update.
#[derive(Clone, Copy, Debug)]
pub struct AdamStep {
    /// Factor on the gradients.
    pub clip: f32,
    /// Decay of the first moment.
    pub beta1: f32,
    /// `1 - beta1`
    pub one_minus_beta1: f32,
    /// Decay of the second moment.
    pub beta2: f32,
    /// `1 - beta2`
    pub one_minus_beta2: f32,
    /// Learning rate, divided by the bias correction of the first moment.
    pub rate: f32,
    /// Square root of the bias correction of the second moment.
    pub root: f32,
    /// Added to the square root of the second moment.
    pub eps: f32,
    /// Factor on the weight, for weight decay.
    pub decay: f32,
}

struct Adam<'a> {
    step: AdamStep,
    grad: &'a [f32],
    w: &'a mut [f32],
    m: &'a mut [f32],
    v: &'a mut [f32],
}

impl SimdKernel for Adam<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let Adam { step, grad, w, m, v } = self;
        // Plain Rust, which the compiler vectorises for the level.
        for (((g, w), m), v) in grad.iter().zip(w).zip(m).zip(v) {
            let g = g * step.clip;
            *m = step.beta1 * *m + step.one_minus_beta1 * g;
            *v = step.beta2 * *v + step.one_minus_beta2 * (g * g);
            *w = *w * step.decay - step.rate * (*m / (v.sqrt() / step.root + step.eps));
        }
    }
}

/// AdamW update of a chunk of a tensor.
///
/// # Panics
/// If the slices differ in length.
pub fn adam(level: Level, step: AdamStep, grad: &[f32], [w, m, v]: [&mut [f32]; 3]) {
    let n = grad.len();
    assert!([w.len(), m.len(), v.len()] == [n; 3], "chunks of {n} elements");
    level.dispatch(Adam { step, grad, w, m, v });
}
