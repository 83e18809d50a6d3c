//! Products spread over the threads of a pool.

use super::{Acts, OutTile, ROW_ALIGN, matmul};
use crate::pool::{Pool, static_range};
use crate::simd::acts::{ActError, ActKind, act_bytes, quantize_row};
use crate::simd::weights::WeightMatrix;
use crate::simd::Level;

/// One product: `out[m, n_rows] = x · wᵀ`, row-major.
pub struct Product<'a> {
    /// The weights.
    pub w: WeightMatrix<'a>,
    /// `[m, w.n_rows()]`
    pub out: &'a mut [f32],
}

/// The pointer to an output that threads write disjoint columns of.
struct Shared(*mut f32);

// SAFETY: only `matmul_parallel` uses it, and there each thread writes its own columns.
unsafe impl Sync for Shared {}

impl Shared {
    fn get(&self) -> *mut f32 {
        self.0
    }
}

/// Computes products that share their activations in one parallel region.
///
/// # Panics
/// If a product's output is not `[x.m(), w.n_rows()]`, or weights and activations do not fit together.
pub fn matmul_parallel(pool: &Pool, level: Level, x: &Acts<'_>, products: &mut [Product<'_>]) {
    for product in &mut *products {
        let n = product.w.n_rows();
        assert_eq!(Some(product.out.len()), x.m().checked_mul(n), "an output of {} rows of {n}", x.m());
    }
    let share = |thread_idx: usize, n_threads: usize, w: &WeightMatrix<'_>, out: &Shared| {
        let rows = static_range(w.n_rows(), ROW_ALIGN, thread_idx, n_threads);
        // SAFETY: `out` is `[m, n_rows]` (asserted above) and borrowed for the whole region, and the ranges of the
        // threads are disjoint.
        let mut tile = unsafe { OutTile::columns(out.get(), x.m(), w.n_rows(), rows.clone()) };
        matmul(level, w, x, rows, &mut tile);
    };
    /// Products whose pointers fit on the stack; a step never shares activations among more.
    const AT_ONCE: usize = 4;
    for products in products.chunks_mut(AT_ONCE) {
        let mut outs = [const { Shared(std::ptr::null_mut()) }; AT_ONCE];
        for (out, product) in outs.iter_mut().zip(products.iter_mut()) {
            *out = Shared(product.out.as_mut_ptr());
        }
        let products = &*products;
        pool.run(|thread_idx, n_threads| {
            for (product, out) in products.iter().zip(&outs) {
                share(thread_idx, n_threads, &product.w, out);
            }
        });
    }
}

/// Prepares `m` activation rows of `k` floats for products, the rows spread over the threads.
pub fn prepare_parallel<'a>(
    pool: &Pool,
    level: Level,
    kind: ActKind,
    src: &[f32],
    k: usize,
    dst: &'a mut [u8],
) -> Result<Acts<'a>, ActError> {
    let row_bytes = act_bytes(kind, k).ok_or(ActError::NotWholeBlocks { k, block_len: kind.block_len() })?;
    let m = src.len().checked_div(k).unwrap_or(0);
    if m * k != src.len() || dst.len() != m * row_bytes {
        return Err(ActError::BufferSize { need: m * row_bytes, got: dst.len() });
    }
    let prepare = |row: usize, dst: &mut [u8]| {
        // Cannot fail: both lengths were checked above.
        let _ = quantize_row(level, kind, &src[row * k..][..k], dst);
    };
    if m == 1 {
        // Waking the others costs more than a row.
        prepare(0, dst);
    } else if m > 1 {
        pool.chunks_mut(dst, row_bytes, prepare);
    }
    Acts::new(kind, m, k, dst)
}
