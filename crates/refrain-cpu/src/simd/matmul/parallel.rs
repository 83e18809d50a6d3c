//! Matrix products across the threads of a pool.

use std::sync::atomic::{AtomicUsize, Ordering};

use super::{Acts, OutTile, ROW_ALIGN, matmul};
use crate::pool::{Pool, chunk_range};
use crate::simd::Level;
use crate::simd::acts::{ActError, ActKind, act_bytes, quantize_row};
use crate::simd::weights::WeightMatrix;

/// One matrix product: `out[m, n_rows] = x · wᵀ`, row-major.
pub struct WeightProduct<'a> {
    /// Weights.
    pub w: WeightMatrix<'a>,
    /// `[m, w.n_rows()]`
    pub out: &'a mut [f32],
}

/// Pointer to an output of which threads write disjoint columns.
struct ProductOutPtr(*mut f32);

// SAFETY: only `matmul_parallel` uses it, and there each thread writes the columns that it drew.
unsafe impl Sync for ProductOutPtr {}

impl ProductOutPtr {
    fn get(&self) -> *mut f32 {
        self.0
    }
}

/// Chunks of a matrix product per thread: small enough that a delayed thread costs little, large enough for the
/// hardware prefetcher.
const CHUNKS: usize = 8;
/// Minimum rows per chunk.
const MIN_ROWS: usize = 4 * ROW_ALIGN;
/// Maximum number of products whose counters fit on the stack; a step rarely shares activations among more.
const AT_ONCE: usize = 4;

/// Computes matrix products that share their activations, up to four in one parallel region.
///
/// Threads draw chunks of rows from a counter; the result does not depend on the assignment.
///
/// # Panics
/// If a product's output is not `[x.m(), w.n_rows()]`, or weights and activations do not match.
pub fn matmul_parallel(pool: &Pool, level: Level, x: &Acts<'_>, products: &mut [WeightProduct<'_>]) {
    for product in &*products {
        let n = product.w.n_rows();
        assert_eq!(Some(product.out.len()), x.m().checked_mul(n), "an output of {} rows of {n}", x.m());
    }
    for products in products.chunks_mut(AT_ONCE) {
        let mut outs = [const { ProductOutPtr(std::ptr::null_mut()) }; AT_ONCE];
        for (out, product) in outs.iter_mut().zip(products.iter_mut()) {
            *out = ProductOutPtr(product.out.as_mut_ptr());
        }
        let next = [const { AtomicUsize::new(0) }; AT_ONCE];
        let products = &*products;
        pool.run(|_, n_threads| {
            for ((product, out), next) in products.iter().zip(&outs).zip(&next) {
                let w = &product.w;
                let chunk = (w.n_rows() / (n_threads * CHUNKS)).next_multiple_of(ROW_ALIGN).max(MIN_ROWS);
                while let Some(rows) = chunk_range(w.n_rows(), chunk, next.fetch_add(1, Ordering::Relaxed)) {
                    // SAFETY: `out` is `[m, n_rows]` (asserted above) and borrowed for the whole region, and
                    // the counter returns each range once.
                    let mut tile = unsafe { OutTile::columns(out.get(), x.m(), w.n_rows(), rows.clone()) };
                    matmul(level, w, x, rows, &mut tile);
                }
            }
        });
    }
}

/// Prepares `m` activation rows of `k` floats for matrix products, in parallel.
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
        // Waking other threads costs more than one row.
        prepare(0, dst);
    } else if m > 1 {
        pool.chunks_mut(dst, row_bytes, prepare);
    }
    Acts::new(kind, m, k, dst)
}
