//! Products of a row with the factors of a low-rank adapter.

use super::Level;
use super::attention::{Bf16Row, CacheRow, FloatRow, HalfRow, row16};
use super::elementwise::load16;
use super::lanes::{GROUP, Simd, SimdKernel};
use super::recurrent::store_some;
use refrain_tensor::DType;
use std::marker::PhantomData;

/// One factor of an adapter, `[n_rows, n_cols]`.
#[derive(Clone, Copy)]
pub struct LoraFactor<'a> {
    /// F32, F16 or BF16.
    pub dtype: DType,
    /// Its elements.
    pub bytes: &'a [u8],
    /// Number of columns.
    pub n_cols: usize,
}

impl LoraFactor<'_> {
    fn n_rows(&self) -> usize {
        self.bytes.len() / (self.dtype.block_bytes() * self.n_cols).max(1)
    }

    fn check(&self) {
        assert!(self.dtype.is_float(), "factors of {}", self.dtype);
        let row_bytes = self.dtype.block_bytes() * self.n_cols;
        assert!(self.n_rows() * row_bytes == self.bytes.len(), "{} bytes of rows", self.bytes.len());
    }
}

struct DownRow<'a, R> {
    a: LoraFactor<'a>,
    x: &'a [f32],
    t: &'a mut [f32],
    first: usize,
    row: PhantomData<R>,
}

impl<R: CacheRow> SimdKernel for DownRow<'_, R> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let DownRow { a, x, t, first, .. } = self;
        let n_cols = a.n_cols;
        for (i, t) in t.iter_mut().enumerate() {
            let row = a.bytes[(first + i) * n_cols * R::BYTES..][..n_cols * R::BYTES].as_ptr();
            let mut sums = [s.fsplat(0.0); 4];
            for at in (0..n_cols).step_by(GROUP) {
                for (g, sum) in sums.iter_mut().enumerate().take(GROUP / S::LANES) {
                    let w = row16::<S, R>(s, row, at, g, n_cols);
                    *sum = s.fma(load16::<S, 0>(s, x, at, g), w, *sum);
                }
            }
            *t = s.sum16(sums);
        }
    }
}

/// `t[i] = Σ a[first + i][j] x[j]`, with `fma` in 16 accumulators.
///
/// # Panics
/// If lengths do not match.
pub fn lora_down_row(level: Level, a: LoraFactor<'_>, x: &[f32], first: usize, t: &mut [f32]) {
    a.check();
    let fits = x.len() == a.n_cols && first + t.len() <= a.n_rows();
    assert!(fits, "{} elements for rows {first}.. of {} columns", x.len(), a.n_cols);
    // `check` refuses all but these three.
    if a.dtype == DType::F16 {
        level.dispatch(DownRow::<HalfRow> { a, x, t, first, row: PhantomData });
    } else if a.dtype == DType::BF16 {
        level.dispatch(DownRow::<Bf16Row> { a, x, t, first, row: PhantomData });
    } else {
        level.dispatch(DownRow::<FloatRow> { a, x, t, first, row: PhantomData });
    }
}

struct UpRow<'a, R> {
    b: LoraFactor<'a>,
    t: &'a [f32],
    y: &'a mut [f32],
    first: usize,
    row: PhantomData<R>,
}

impl<R: CacheRow> SimdKernel for UpRow<'_, R> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let UpRow { b, t, y, first, .. } = self;
        let (n, row_bytes) = (y.len(), b.n_cols * R::BYTES);
        for at in (0..n).step_by(GROUP) {
            let mut sums = [s.fsplat(0.0); 4];
            for (j, &t) in t.iter().enumerate() {
                // The columns of this call as a row of their own.
                let row = b.bytes[j * row_bytes + first * R::BYTES..][..n * R::BYTES].as_ptr();
                let t = s.fsplat(t);
                for (g, sum) in sums.iter_mut().enumerate().take(GROUP / S::LANES) {
                    *sum = s.fma(t, row16::<S, R>(s, row, at, g, n), *sum);
                }
            }
            for (g, sum) in sums.iter().enumerate().take(GROUP / S::LANES) {
                let begin = at + g * S::LANES;
                if begin < n {
                    let old = load16::<S, 0>(s, y, at, g);
                    store_some(s, y, begin, s.fadd(old, *sum));
                }
            }
        }
    }
}

/// `y[i] += Σ t[j] b[j][first + i]`, summed in order of `j` with `fma` before it is added.
///
/// # Panics
/// If lengths do not match.
pub fn lora_up_row(level: Level, b: LoraFactor<'_>, t: &[f32], first: usize, y: &mut [f32]) {
    b.check();
    let fits = t.len() == b.n_rows() && first + y.len() <= b.n_cols;
    assert!(fits, "{} elements for columns {first}.. of {} rows", t.len(), b.n_rows());
    // `check` refuses all but these three.
    if b.dtype == DType::F16 {
        level.dispatch(UpRow::<HalfRow> { b, t, y, first, row: PhantomData });
    } else if b.dtype == DType::BF16 {
        level.dispatch(UpRow::<Bf16Row> { b, t, y, first, row: PhantomData });
    } else {
        level.dispatch(UpRow::<FloatRow> { b, t, y, first, row: PhantomData });
    }
}
