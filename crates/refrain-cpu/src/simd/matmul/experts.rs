//! Matrix products of rows with their chosen experts, in parallel.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use half::{bf16, f16};
use refrain_tensor::DType;

use super::{Acts, OutTile, ROW_ALIGN, matmul};
use crate::pool::{Pool, chunk_range};
use crate::simd::Level;
use crate::simd::weights::WeightMatrix;

/// Rows of one expert: a range of the sorted rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpertRows {
    /// Index of the expert.
    pub expert: usize,
    /// Its rows.
    pub rows: Range<usize>,
}

/// Floats `[n_experts, n]` in the file layout, added to the matrix products.
#[derive(Clone, Copy, Debug)]
pub struct ExpertBias<'a> {
    /// F32, F16 or BF16.
    pub dtype: DType,
    /// The bytes.
    pub bytes: &'a [u8],
}

impl ExpertBias<'_> {
    fn at(&self, i: usize) -> f32 {
        // Biases are floats: the op accepts nothing else.
        #[expect(clippy::wildcard_enum_match_arm, reason = "F32 is the only other float type")]
        match self.dtype {
            DType::F16 => f16::from_le_bytes([self.bytes[2 * i], self.bytes[2 * i + 1]]).to_f32(),
            DType::BF16 => bf16::from_le_bytes([self.bytes[2 * i], self.bytes[2 * i + 1]]).to_f32(),
            _ => f32::from_le_bytes(std::array::from_fn(|b| self.bytes[4 * i + b])),
        }
    }
}

/// One matrix product: row `i` of `out` is the product of sorted row `i` with its expert.
pub struct ExpertProduct<'a> {
    /// Matrices of the experts, one after another: `[n_experts * n, k]`.
    pub w: WeightMatrix<'a>,
    /// Rows per expert.
    pub n: usize,
    /// Bias to add to the result.
    pub bias: Option<ExpertBias<'a>>,
    /// `[n_sorted, n]`
    pub out: &'a mut [f32],
}

/// Pointer to an output of which threads write disjoint rectangles.
struct ExpertOutPtr(*mut f32);

// SAFETY: only `experts_parallel` uses it, and there each thread writes the rectangles that it drew.
unsafe impl Sync for ExpertOutPtr {}

impl ExpertOutPtr {
    fn get(&self) -> *mut f32 {
        self.0
    }
}

/// Chunks per thread over all products, and minimum rows per chunk: as for dense matrix products.
const CHUNKS: usize = 8;
const MIN_ROWS: usize = 4 * ROW_ALIGN;
/// Maximum number of matrix products per call.
const AT_ONCE: usize = 2;

/// Computes up to two matrix products of the same rows. `sorted[i]` is the row of `x` for sorted row `i`;
/// `groups` lists the sorted rows of each expert that has any.
///
/// An output depends only on its two rows, as in a dense matrix product.
///
/// # Panics
/// If sizes do not match, or groups share rows.
pub fn experts_parallel(
    pool: &Pool,
    level: Level,
    x: &Acts<'_>,
    sorted: &[u32],
    groups: &[ExpertRows],
    products: &mut [ExpertProduct<'_>],
) {
    assert!(products.len() <= AT_ONCE, "{} products of experts", products.len());
    let mut outs = [const { ExpertOutPtr(std::ptr::null_mut()) }; AT_ONCE];
    for (out, product) in outs.iter_mut().zip(products.iter_mut()) {
        assert_eq!(Some(product.out.len()), sorted.len().checked_mul(product.n), "rows of {}", product.n);
        let n_experts = product.w.n_rows() / product.n.max(1);
        assert!(groups.iter().all(|group| group.expert < n_experts), "an expert past {n_experts}");
        *out = ExpertOutPtr(product.out.as_mut_ptr());
    }
    let in_order = groups.windows(2).all(|pair| pair[0].rows.end <= pair[1].rows.start);
    let inside = groups.iter().all(|g| g.rows.start <= g.rows.end && g.rows.end <= sorted.len());
    assert!(in_order && inside, "groups of {} rows", sorted.len());
    let products = &*products;
    let next = [const { AtomicUsize::new(0) }; AT_ONCE];
    pool.run(|_, n_threads| {
        for ((product, out), next) in products.iter().zip(&outs).zip(&next) {
            let n = product.n;
            let share = n * groups.len() / (n_threads * CHUNKS);
            let chunk = share.next_multiple_of(ROW_ALIGN).max(MIN_ROWS);
            let n_chunks = n.div_ceil(chunk);
            loop {
                let item = next.fetch_add(1, Ordering::Relaxed);
                let Some(group) = groups.get(item / n_chunks.max(1)) else { break };
                let Some(rows) = chunk_range(n, chunk, item % n_chunks) else { break };
                let x = x.select(&sorted[group.rows.clone()]);
                let first = out.get().wrapping_add(group.rows.start * n);
                // SAFETY: `out` is `[n_sorted, n]` and borrowed for the whole region. Groups have disjoint
                // rows, all of them in bounds (both asserted above), and the counter returns each range of
                // columns of a group once.
                let mut tile = unsafe { OutTile::columns(first, x.m(), n, rows.clone()) };
                let start = group.expert * n;
                matmul(level, &product.w, &x, start + rows.start..start + rows.end, &mut tile);
                if let Some(bias) = product.bias {
                    tile.add_row(|column| bias.at(start + rows.start + column));
                }
            }
        }
    });
}
