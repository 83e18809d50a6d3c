//! Matrix products of two values, neither of which is a loaded weight: activations, gradients and trained
//! weights.
//!
//! All threads first pack the right operand into panels. Then each thread takes rows of the result, packs the
//! matching rows of the left operand, and sums tiles of 16 by 16. Sums over `k` are split into blocks: each
//! block is one chain of `fma`, and the blocks are added in order. The block length depends on `k` alone, so
//! the bits depend neither on the number of threads nor on the level.

mod tile;

pub use tile::Factor;
pub(crate) use tile::{Sums, tile};

use std::sync::atomic::{AtomicUsize, Ordering};

use half::{bf16, f16};
use refrain_tensor::DType;

use super::lanes::GROUP;
use super::{Level, f32_to_bf16, f32_to_f16};
use crate::pool::Pool;
use tile::{GemmRows, PACK_COLUMNS, Pack};

/// Maximum length of a chain of sums; a panel of that length takes 20 KB and stays in the L1 cache.
const MAX_CHAIN: usize = 320;
/// Maximum number of rows whose panels stay in the L2 cache along with a block of columns.
const MAX_ROWS: usize = 192;
/// Columns per chunk whose sums are rounded when complete.
const ROUNDED_COLUMNS: usize = 512;
/// Below this many multiplications, waking threads costs more than it saves.
const PARALLEL_PRODUCTS: usize = 1 << 16;

/// Result of a matrix product, contiguous.
pub struct Rounded<'a> {
    /// F32, F16 or BF16; sums are rounded to it once.
    pub dtype: DType,
    /// `[m, n]`
    pub bytes: &'a mut [u8],
}

/// Length of the blocks that `k` is split into; only the last may be shorter.
fn chain(k: usize) -> usize {
    let n_blocks = k.div_ceil(MAX_CHAIN).max(1);
    k.div_ceil(n_blocks).next_multiple_of(8)
}

/// Floats of scratch that a matrix product of this size needs with this many threads.
pub fn gemm_scratch(k: usize, n: usize, n_threads: usize) -> usize {
    k * n.next_multiple_of(GROUP) + n_threads * thread_scratch(k)
}

fn thread_scratch(k: usize) -> usize {
    MAX_ROWS * (chain(k) + ROUNDED_COLUMNS)
}

/// A pointer to memory that threads access in disjoint parts.
#[derive(Clone, Copy)]
struct GemmPtr<T>(*mut T);

// SAFETY: only `gemm` uses it, and there each thread writes the parts that it drew, or its own scratch.
unsafe impl<T> Sync for GemmPtr<T> {}

impl<T> GemmPtr<T> {
    fn get(&self) -> *mut T {
        self.0
    }
}

/// `out[m, n] = a · bᵀ`, where `a` has `m` rows and `b` has `n` columns.
///
/// # Panics
/// If an operand is not valid, sizes do not match, or the scratch is too small.
pub fn gemm(
    pool: &Pool,
    level: Level,
    a: &Factor<'_>,
    b: &Factor<'_>,
    out: Rounded<'_>,
    scratch: &mut [f32],
) {
    let (m, n, k) = (a.len, b.len, a.k);
    let size = out.dtype.block_bytes();
    assert!(a.is_valid() && a.is_float() && b.is_valid(), "operands are contiguous in one dimension");
    assert!(b.k == k, "sums over {k} and {}", b.k);
    assert_eq!(out.bytes.len(), m * n * size, "an output of {m} rows of {n}");
    assert!(out.bytes.as_ptr().addr().is_multiple_of(size), "an output that is not aligned to {size} bytes");
    assert!(matches!(out.dtype, DType::F32 | DType::F16 | DType::BF16), "a product in {}", out.dtype);
    if k == 0 {
        out.bytes.fill(0);
        return;
    }
    if m == 0 || n == 0 {
        return;
    }
    let n_threads = pool.n_threads();
    assert!(scratch.len() >= gemm_scratch(k, n, n_threads), "{} floats of scratch", scratch.len());
    let (kc, n_padded) = (chain(k), n.next_multiple_of(GROUP));
    let (panels, rest) = scratch.split_at_mut(k * n_padded);
    let (panels, own) = (GemmPtr(panels.as_mut_ptr()), GemmPtr(rest.as_mut_ptr()));
    let alone = m.saturating_mul(n).saturating_mul(k) < PARALLEL_PRODUCTS;
    // Calls `f(thread, task)` exactly once per task.
    let spread = |n_tasks: usize, f: &(dyn Fn(usize, usize) + Sync)| {
        if alone {
            return (0..n_tasks).for_each(|task| f(0, task));
        }
        let next = AtomicUsize::new(0);
        pool.run(|thread, _| {
            loop {
                let task = next.fetch_add(1, Ordering::Relaxed);
                if task >= n_tasks {
                    break;
                }
                f(thread, task);
            }
        });
    };

    let col_pieces = n.div_ceil(PACK_COLUMNS);
    spread(k.div_ceil(kc) * col_pieces, &|_, task| {
        let (k0, col) = (task / col_pieces * kc, task % col_pieces * PACK_COLUMNS);
        let to = panels.get().wrapping_add(k0 * n_padded);
        let cols = [col, n.min(col + PACK_COLUMNS)];
        level.dispatch(Pack { b, cols, k0, kl: kc.min(k - k0), to });
    });

    // Enough chunks that threads finish at about the same time; columns are split if there are few rows.
    let rows = (m / (6 * n_threads)).next_multiple_of(GROUP).clamp(2 * GROUP, MAX_ROWS);
    let n_row_chunks = m.div_ceil(rows);
    let wanted = (4 * n_threads).div_ceil(n_row_chunks);
    let cols = (n.div_ceil(wanted)).next_multiple_of(GROUP).max(4 * GROUP);
    let n_col_chunks = n.div_ceil(cols);
    let to = GemmPtr(out.bytes.as_mut_ptr());
    spread(n_row_chunks * n_col_chunks, &|thread, task| {
        let (row, col) = (task / n_col_chunks * rows, task % n_col_chunks * cols);
        let (rows, cols) = ([row, m.min(row + rows)], [col, n.min(col + cols)]);
        let own = own.get().wrapping_add(thread * thread_scratch(k));
        let sums = own.wrapping_add(MAX_ROWS * kc);
        let compute = |cols, out, out_stride| {
            let b = panels.get().cast_const();
            level.dispatch(GemmRows { a, rows, cols, b, n_padded, kc, panels: own, out, out_stride });
        };
        if out.dtype == DType::F32 {
            let first = to.get().cast::<f32>().wrapping_add(rows[0] * n + cols[0]);
            compute(cols, first, n);
            return;
        }
        for col in (cols[0]..cols[1]).step_by(ROUNDED_COLUMNS) {
            let end = cols[1].min(col + ROUNDED_COLUMNS);
            compute([col, end], sums, ROUNDED_COLUMNS);
            for row in rows[0]..rows[1] {
                // SAFETY: `sums` holds a row of `end - col` floats for each of at most MAX_ROWS rows, and these
                // columns of this row of the output belong to this chunk alone.
                unsafe {
                    let from = sums.add((row - rows[0]) * ROUNDED_COLUMNS).cast_const();
                    let from = std::slice::from_raw_parts(from, end - col);
                    let to = to.get().add(2 * (row * n + col));
                    if out.dtype == DType::F16 {
                        let to = std::slice::from_raw_parts_mut(to.cast::<f16>(), end - col);
                        f32_to_f16(level, from, to);
                    } else {
                        let to = std::slice::from_raw_parts_mut(to.cast::<bf16>(), end - col);
                        f32_to_bf16(level, from, to);
                    }
                }
            }
        }
    });
}
