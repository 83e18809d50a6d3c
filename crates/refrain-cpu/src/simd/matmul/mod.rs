//! Matrix products `out[m, n] = Σ_k x[m, k] · w[n, k]` of prepared activations with weights in any layout.
//!
//! The value of an output does not depend on how it is computed. With quantised weights, the products of a
//! block are summed exactly in integers. The blocks of a row are then added in order,
//! `sum = fma(integer, d_w · d_x, sum)`, followed by `sum = fma(minimum, sum of x, sum)` for types with a
//! minimum. With float weights, 32 lanes are accumulated in order and summed at the end (see `float`). So the
//! bits do not depend on the number of threads, the split of rows, `m`, the layout or the level. Subnormal BF16
//! weights and sums are the one exception: the processor's BF16 dot products flush them to zero.

mod block32;
mod experts;
mod float;
mod parallel;
mod superblock;

pub use experts::{ExpertBias, ExpertProduct, ExpertRows, experts_parallel};
pub use parallel::{WeightProduct, matmul_parallel, prepare_parallel};

use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::Range;

use refrain_tensor::DType;

use super::Level;
use super::acts::{ActError, ActKind, act_bytes};
use super::tile::{TILE_ROWS, TileSpec};
use super::weights::WeightMatrix;

/// Row ranges that begin at a multiple of this share no tile of packed weights; other ranges compute some rows
/// twice.
pub const ROW_ALIGN: usize = TILE_ROWS;

/// `m` activation rows of `k` elements, prepared by [`quantize_row`](super::quantize_row).
#[derive(Clone, Copy)]
pub struct Acts<'a> {
    kind: ActKind,
    m: usize,
    k: usize,
    row_bytes: usize,
    /// All rows; `m` of them unless some are selected.
    bytes: &'a [u8],
    /// Indices of the selected rows; `None` for the first `m` in order.
    selected: Option<&'a [u32]>,
}

impl<'a> Acts<'a> {
    /// Rows of [`act_bytes`] bytes each, contiguous.
    pub fn new(kind: ActKind, m: usize, k: usize, bytes: &'a [u8]) -> Result<Acts<'a>, ActError> {
        let row_bytes =
            act_bytes(kind, k).ok_or(ActError::NotWholeBlocks { k, block_len: kind.block_len() })?;
        let need = m.saturating_mul(row_bytes);
        if bytes.len() != need {
            return Err(ActError::BufferSize { need, got: bytes.len() });
        }
        Ok(Acts { kind, m, k, row_bytes, bytes, selected: None })
    }

    /// Number of rows.
    pub fn m(&self) -> usize {
        self.m
    }

    /// Selects some of the rows, in this order.
    pub(crate) fn select<'s>(&self, rows: &'s [u32]) -> Acts<'s>
    where
        'a: 's,
    {
        debug_assert!(self.selected.is_none(), "rows are selected once");
        Acts { m: rows.len(), selected: Some(rows), ..*self }
    }

    fn row(&self, row: usize) -> *const u8 {
        let row = self.selected.map_or(row, |selected| selected[row] as usize);
        self.bytes[row * self.row_bytes..][..self.row_bytes].as_ptr()
    }
}

/// Output of a matrix product: `m` rows of `n_cols` floats with stride `stride`.
pub struct OutTile<'a> {
    first: *mut f32,
    stride: usize,
    m: usize,
    n_cols: usize,
    borrow: PhantomData<&'a mut [f32]>,
}

impl<'a> OutTile<'a> {
    /// All of `out`, as `m` rows of `n_cols`.
    ///
    /// # Panics
    /// If `out` is not `m * n_cols` long.
    pub fn new(out: &'a mut [f32], m: usize, n_cols: usize) -> OutTile<'a> {
        assert_eq!(Some(out.len()), m.checked_mul(n_cols), "an output of {m} rows of {n_cols}");
        OutTile { first: out.as_mut_ptr(), stride: n_cols, m, n_cols, borrow: PhantomData }
    }

    /// # Safety
    /// `out` is row-major `[m, stride]`, writable for 'a, and no other thread accesses columns `cols` of it in
    /// the meantime.
    unsafe fn columns(out: *mut f32, m: usize, stride: usize, cols: Range<usize>) -> OutTile<'a> {
        OutTile { first: out.wrapping_add(cols.start), stride, m, n_cols: cols.len(), borrow: PhantomData }
    }

    /// Adds a row to each of the rows.
    fn add_row(&mut self, value: impl Fn(usize) -> f32) {
        for column in 0..self.n_cols {
            let value = value(column);
            for row in 0..self.m {
                // SAFETY: inside row `row` of the rectangle that `new` or `columns` received exclusively.
                unsafe { *self.first.add(row * self.stride + column) += value };
            }
        }
    }

    #[inline(always)]
    fn store(&mut self, row: usize, first_col: usize, values: &[f32]) {
        assert!(row < self.m && first_col + values.len() <= self.n_cols);
        // SAFETY: inside row `row` of the rectangle that `new` or `columns` received exclusively.
        unsafe {
            let dst = self.first.add(row * self.stride + first_col);
            std::ptr::copy_nonoverlapping(values.as_ptr(), dst, values.len());
        }
    }
}

/// Maximum number of activation rows per pass over a chunk of weights; more rows take another pass.
const MAX_ROWS: usize = 128;
/// Running sums per activation row.
const SUMS: usize = TILE_ROWS;
/// Bytes of tiles per chunk: fits in the L1 cache together with the activations.
const CHUNK_BYTES: usize = 16 * 1024;

/// Arguments of a tile kernel.
#[derive(Clone, Copy)]
struct TileArgs<const M: usize> {
    /// `n_blocks` tiles.
    tiles: *const u8,
    n_blocks: usize,
    /// Prepared activation rows of `k` elements.
    x: [*const u8; M],
    k: usize,
    /// Index of the first tile's block in the rows.
    first_block: usize,
    /// Running sums, `M * SUMS` floats.
    sums: *mut f32,
}

/// Left uninitialised: clearing it would take longer than the product of one row with a small matrix.
#[repr(align(64))]
struct TileScratch {
    tiles: MaybeUninit<[u8; CHUNK_BYTES]>,
    sums: MaybeUninit<[f32; MAX_ROWS * SUMS]>,
}

/// Clears and returns the first `n` sums.
fn clear(sums: &mut MaybeUninit<[f32; MAX_ROWS * SUMS]>, n: usize) -> &mut [f32] {
    assert!(n <= MAX_ROWS * SUMS);
    // SAFETY: `n` floats are inside the array, and all of them are written here before they are borrowed.
    unsafe {
        let first = sums.as_mut_ptr().cast::<f32>();
        std::ptr::write_bytes(first, 0, n);
        std::slice::from_raw_parts_mut(first, n)
    }
}

/// Computes weight rows `rows` for every activation row: `out[i, j] = x[i] · w[rows.start + j]`.
///
/// # Panics
/// If activations, weights, rows and output do not match.
pub fn matmul(level: Level, w: &WeightMatrix<'_>, x: &Acts<'_>, rows: Range<usize>, out: &mut OutTile<'_>) {
    assert!(rows.start <= rows.end && rows.end <= w.n_rows(), "rows {rows:?} of {}", w.n_rows());
    assert!(w.act_kind() == x.kind && w.k() == x.k, "activations of {} for weights of {}", x.k, w.k());
    assert!(out.m == x.m && out.n_cols == rows.len(), "an output for {} rows", rows.len());
    let Some(spec) = w.spec() else { return float::products(level, w, x, rows, out) };
    let mut scratch = TileScratch { tiles: MaybeUninit::uninit(), sums: MaybeUninit::uninit() };
    // Packed rows come in whole tiles; the rows of a tile that were not requested are dropped at the end.
    let begin = if w.is_packed() { rows.start / TILE_ROWS * TILE_ROWS } else { rows.start };
    for first_row in (begin..rows.end).step_by(TILE_ROWS) {
        let wanted = first_row.max(rows.start)..rows.end.min(first_row + TILE_ROWS);
        for first_x in (0..x.m).step_by(MAX_ROWS) {
            let xs = first_x..x.m.min(first_x + MAX_ROWS);
            let sums = row_group(level, w, spec, x, first_row, xs.clone(), &mut scratch);
            for row in xs {
                let values = &sums[(row - first_x) * SUMS..][..SUMS];
                let values = &values[wanted.start - first_row..wanted.end - first_row];
                out.store(row, wanted.start - rows.start, values);
            }
        }
    }
}

/// Sums of 16 weight rows for activation rows `xs`: `SUMS` floats for each.
fn row_group<'a>(
    level: Level,
    w: &WeightMatrix<'_>,
    spec: TileSpec,
    x: &Acts<'_>,
    first_row: usize,
    xs: Range<usize>,
    scratch: &'a mut TileScratch,
) -> &'a [f32] {
    let n_sums = if xs.len() == 1 { 1 } else { xs.len().next_multiple_of(8) };
    let tiles_dst = scratch.tiles.as_mut_ptr();
    let sums = clear(&mut scratch.sums, n_sums * SUMS);
    let tile_bytes = spec.tile_bytes();
    let n_blocks = w.n_blocks();
    // One row passes over the weights once, so nothing needs to stay in the cache.
    let chunk = if w.is_packed() && xs.len() == 1 { n_blocks.max(1) } else { CHUNK_BYTES / tile_bytes };
    for first_block in (0..n_blocks).step_by(chunk) {
        let blocks = first_block..n_blocks.min(first_block + chunk);
        let tiles = match w.tiles(first_row / TILE_ROWS, first_block) {
            Some(tiles) => tiles,
            None => {
                assert!(blocks.len() * tile_bytes <= CHUNK_BYTES);
                // SAFETY: `tiles_dst` is CHUNK_BYTES of scratch that nothing else borrows, and `make_tiles`
                // writes the tiles of all `blocks` before a kernel reads them.
                unsafe { w.make_tiles(level, first_row, blocks.clone(), tiles_dst.cast()) };
                tiles_dst.cast_const().cast()
            }
        };
        let mut row = xs.start;
        while row < xs.end {
            let left = xs.end - row;
            let sums = sums[(row - xs.start) * SUMS..].as_mut_ptr();
            // If fewer rows remain than the kernel handles, it computes the last one again, into spare sums.
            let at = |i: usize| x.row((row + i).min(xs.end - 1));
            let (first_block, n_blocks, k) = (blocks.start, blocks.len(), x.k);
            if left == 1 {
                let x = [at(0)];
                tile_sums(level, w.dtype(), TileArgs { tiles, n_blocks, x, k, first_block, sums });
                row += 1;
            } else if left <= 4 {
                let x = std::array::from_fn::<_, 4, _>(at);
                tile_sums(level, w.dtype(), TileArgs { tiles, n_blocks, x, k, first_block, sums });
                row += 4;
            } else {
                let x = std::array::from_fn::<_, 8, _>(at);
                tile_sums(level, w.dtype(), TileArgs { tiles, n_blocks, x, k, first_block, sums });
                row += 8;
            }
        }
    }
    sums
}

/// Adds a chunk of tiles to the running sums.
fn tile_sums<const M: usize>(level: Level, dtype: DType, args: TileArgs<M>) {
    use block32::{Iq4Nl, Mxfp4, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, TileQ8};
    use superblock::{Groups, Iq4Xs, Q2K, Q3K, Q4K, Q5K, Q6K, TileQ8K};
    match dtype {
        DType::Q4_0 => level.dispatch(TileQ8::<Q4_0, M>::new(args)),
        DType::Q4_1 => level.dispatch(TileQ8::<Q4_1, M>::new(args)),
        DType::Q5_0 => level.dispatch(TileQ8::<Q5_0, M>::new(args)),
        DType::Q5_1 => level.dispatch(TileQ8::<Q5_1, M>::new(args)),
        DType::Q8_0 => level.dispatch(TileQ8::<Q8_0, M>::new(args)),
        DType::IQ4_NL => level.dispatch(TileQ8::<Iq4Nl, M>::new(args)),
        DType::Q2_K => level.dispatch(TileQ8K::<Q2K, M>::new(args)),
        DType::Q3_K => level.dispatch(TileQ8K::<Q3K, M>::new(args)),
        DType::Q4_K => level.dispatch(TileQ8K::<Q4K, M>::new(args)),
        DType::Q5_K => level.dispatch(TileQ8K::<Q5K, M>::new(args)),
        DType::Q6_K => level.dispatch(TileQ8K::<Q6K, M>::new(args)),
        DType::IQ4_XS => level.dispatch(TileQ8K::<Iq4Xs, M>::new(args)),
        DType::MXFP4 => level.dispatch(TileQ8::<Mxfp4, M>::new(args)),
        DType::IQ2_XXS | DType::IQ2_XS | DType::IQ2_S => level.dispatch(TileQ8K::<Groups<8>, M>::new(args)),
        DType::IQ3_XXS => level.dispatch(TileQ8K::<Groups<4>, M>::new(args)),
        DType::IQ3_S => level.dispatch(TileQ8K::<Groups<1>, M>::new(args)),
        DType::F32 | DType::F16 | DType::BF16 => unreachable!("{dtype} has no tiles"),
        DType::I32 | DType::U32 | DType::I64 | DType::U8 => {
            unreachable!("`WeightMatrix::new` refused {dtype}")
        }
    }
}

/// Prefetch distance of kernels that read weights once, in bytes.
const PREFETCH_BYTES: usize = 4096;

/// Prefetches the data that follows the `n_bytes` at `now` at that distance.
#[inline(always)]
fn prefetch<S: super::lanes::Simd>(s: S, now: *const u8, n_bytes: usize) {
    for line in (0..n_bytes).step_by(64) {
        s.prefetch(now.wrapping_add(PREFETCH_BYTES + line));
    }
}
