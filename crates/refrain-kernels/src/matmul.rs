//! Products of operands in any layout, in batches.

use refrain_driver::sim::{KernelResult, SimKernel};
use refrain_driver::{Baked, Buf, Launch};
use refrain_tensor::{DType, Shape};

use crate::elementwise::{BLOCK, walked};
use crate::error::{Case, KernelError};
use crate::load::Kernels;
use crate::registry::{Entry, P, W};
use crate::source::Family;
use crate::twin::count;
use crate::view::{View, Walk};
use crate::vouch::Vouch;

/// `y = a b`; [`crate::LinearArgs`] is the fast way to multiply with a weight.
#[derive(Clone, Copy, Debug)]
pub struct MatMulArgs<'a> {
    /// `[.., m, k]` F32, any layout.
    pub a: View,
    /// `[.., k, n]` F32, any layout.
    pub b: View,
    /// `[.., m, n]` F32, dense; outer dimensions broadcast.
    pub y: Buf,
    /// The shape of the result.
    pub shape: Shape,
    /// Names the step.
    pub step: &'a str,
}

impl Kernels {
    /// The launch of [`MatMulArgs`].
    pub fn matmul(&self, a: &MatMulArgs<'_>) -> Result<Launch, KernelError> {
        let (left, right) = (a.a.layout, a.b.layout);
        let k = left.shape().dim_back(0);
        let n_out = a.shape.n_elements();
        let sizes = [("n_out", n_out), ("k", k)];
        let case = Case { op: "matmul", dtype: a.b.dtype, shape: &sizes };
        case.sizes()?;
        let rank = a.shape.rank();
        crate::require!(case, a.a.dtype == DType::F32 && a.b.dtype == DType::F32, "a and b must be F32");
        crate::require!(
            case,
            rank >= 2
                && left.shape().rank() >= 2
                && right.shape().rank() >= 2
                && right.shape().dim_back(1) == k
                && left.shape().dim_back(1) == a.shape.dim_back(1)
                && right.shape().dim_back(0) == a.shape.dim_back(0),
            "{} times {} is not {}",
            left.shape(),
            right.shape(),
            a.shape
        );
        let step = |strides: &[usize], back: usize| case.u32("a stride", strides[strides.len() - 1 - back]);
        let (a_step, b_step) = (step(left.strides(), 0)?, step(right.strides(), 1)?);
        // The first element of each sum: a row of `a` is seen by all columns, a column of `b` by all rows.
        let firsts = |v: &View, axis_back: usize| {
            let axis = v.layout.shape().rank() - 1 - axis_back;
            v.layout.slice(axis, 0, 1).map_err(|e| case.refuse(e.to_string()))
        };
        let walk = case.walk(a.shape, &firsts(&a.a, 0)?, Some(&firsts(&a.b, 1)?))?;
        for layout in [left, right] {
            case.u32("the extent", layout.end())?;
        }
        Ok(self
            .launch("matmul_f32", n_out.div_ceil(BLOCK) as u32, BLOCK as u32)?
            .step(a.step)
            .write(case.words("y", a.y, &[n_out])?)
            .read(case.extent("a", &a.a)?)
            .read(case.extent("b", &a.b)?)
            .baked(Baked(walk))
            .baked(Baked(n_out as u32))
            .baked(Baked(k as u32))
            .baked(Baked(a_step))
            .baked(Baked(b_step))
            .vouch(&case))
    }
}

pub(crate) fn entries(all: &mut Vec<Entry>) {
    all.push(Entry::new(Family::Matmul, "matmul_f32", &[P, P, P, size_of::<Walk>(), W, W, W, W], twin));
}

fn twin(k: &mut SimKernel<'_>) -> KernelResult {
    let (walk, n_out, inner) = (k.arg::<Walk>(3)?, count(k, 4)?, count(k, 5)?);
    let (a_step, b_step) = (count(k, 6)?, count(k, 7)?);
    let (i, j) = (|at: usize| at / inner, |at: usize| at % inner);
    let a: Vec<f32> = walked(k, 1, n_out * inner, |at| walk.at(i(at)).0 + j(at) * a_step)?;
    let b: Vec<f32> = walked(k, 2, n_out * inner, |at| walk.at(i(at)).1 + j(at) * b_step)?;
    let dot = |(a, b): (&[f32], &[f32])| {
        a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum::<f64>() as f32
    };
    let y: Vec<f32> = a.chunks_exact(inner).zip(b.chunks_exact(inner)).map(dot).collect();
    k.write(k.ptr(0)?, &y)
}
