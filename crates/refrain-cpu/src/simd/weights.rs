//! Weight matrices, in their file layout or repacked into tiles.

use std::ops::Range;

use refrain_tensor::DType;

use super::Level;
use super::acts::{ActKind, act_kind};
use super::buffer::AlignedBuffer;
use super::groups;
use super::tile::{MakeTiles, TILE_ROWS, TileSpec};
use crate::pool::Pool;

/// Why bytes are not a valid weight matrix.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WeightError {
    /// No matrix product supports this dtype.
    #[error("there is no matrix product with {dtype} weights")]
    UnsupportedDType {
        /// Dtype.
        dtype: DType,
    },
    /// A row is not a whole number of blocks, or its size overflows.
    #[error("a {dtype} row of {k} elements is not whole blocks of {}", dtype.block_len())]
    NotWholeBlocks {
        /// Dtype.
        dtype: DType,
        /// Elements per row.
        k: usize,
    },
    /// The rows overlap or exceed the bytes.
    #[error("{n_rows} rows of {need} bytes at a stride of {row_bytes} do not fit in {got} bytes")]
    Size {
        /// Number of rows.
        n_rows: usize,
        /// Bytes per row.
        need: usize,
        /// Stride in bytes.
        row_bytes: usize,
        /// Bytes available.
        got: usize,
    },
}

/// The weights `w[n_rows, k]` of a matrix product, borrowed.
#[derive(Clone, Copy)]
pub struct WeightMatrix<'a> {
    dtype: DType,
    /// Tile layout of the dtype; `None` for floats, which are multiplied row by row.
    spec: Option<TileSpec>,
    kind: ActKind,
    n_rows: usize,
    k: usize,
    source: Source<'a>,
}

#[derive(Clone, Copy)]
enum Source<'a> {
    /// Row `i` starts at byte `i * row_bytes`. Invariant, kept by `WeightMatrix::new`: every row is in bounds.
    File { bytes: &'a [u8], row_bytes: usize },
    /// Tiles of row group 0 by block, then of group 1, and so on. Invariant, kept by `pack`: all are in bounds.
    Tiles { bytes: &'a [u8] },
}

impl<'a> WeightMatrix<'a> {
    /// Returns a matrix of rows of `k` elements of `dtype` in their file layout, with a stride of `row_bytes`.
    pub fn new(
        dtype: DType,
        bytes: &'a [u8],
        n_rows: usize,
        k: usize,
        row_bytes: usize,
    ) -> Result<WeightMatrix<'a>, WeightError> {
        let kind = act_kind(dtype).ok_or(WeightError::UnsupportedDType { dtype })?;
        let spec = TileSpec::new(dtype);
        let need = dtype.bytes_for(k).ok_or(WeightError::NotWholeBlocks { dtype, k })?;
        let end = n_rows.saturating_sub(1).checked_mul(row_bytes).and_then(|last| last.checked_add(need));
        if n_rows > 0 && (row_bytes < need || end.is_none_or(|end| end > bytes.len())) {
            return Err(WeightError::Size { n_rows, need, row_bytes, got: bytes.len() });
        }
        Ok(WeightMatrix { dtype, spec, kind, n_rows, k, source: Source::File { bytes, row_bytes } })
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Number of rows, which are the outputs of the product.
    pub fn n_rows(&self) -> usize {
        self.n_rows
    }

    /// Elements per row.
    pub fn k(&self) -> usize {
        self.k
    }

    /// Activation format of the product.
    pub fn act_kind(&self) -> ActKind {
        self.kind
    }

    /// Bytes read by a pass over the whole matrix.
    pub fn bytes_read(&self) -> usize {
        match self.source {
            Source::File { .. } => self.n_rows * self.dtype.bytes_for(self.k).unwrap_or(0),
            Source::Tiles { bytes } => bytes.len(),
        }
    }

    /// Name of the layout, for printing.
    pub fn layout_name(&self) -> &'static str {
        match self.source {
            Source::File { .. } if self.is_decoded_for_each_use() => "file, decoded for each product",
            Source::File { .. } => "file",
            Source::Tiles { .. } => "tiles of 16 rows",
        }
    }

    /// Whether a product decodes the file's bytes to larger ones each time: slower than reading packed weights.
    pub fn is_decoded_for_each_use(&self) -> bool {
        !self.is_packed() && self.spec.is_some_and(|spec| spec.is_decoded_for_each_use())
    }

    pub(super) fn spec(&self) -> Option<TileSpec> {
        self.spec
    }

    /// Blocks per row.
    pub(super) fn n_blocks(&self) -> usize {
        self.k / self.dtype.block_len()
    }

    /// Bytes of row `row`, if the weights are in the file layout.
    pub(super) fn file_row(&self, row: usize) -> Option<&'a [u8]> {
        match self.source {
            Source::File { bytes, row_bytes } => {
                let used = self.dtype.bytes_for(self.k)?;
                bytes.get(row * row_bytes..)?.get(..used)
            }
            Source::Tiles { .. } => None,
        }
    }

    /// Packed tiles of rows `16 * group_idx ..`, starting at block `block_idx`, if the matrix is packed.
    pub(super) fn tiles(&self, group_idx: usize, block_idx: usize) -> Option<*const u8> {
        match self.source {
            Source::Tiles { bytes } => {
                let tile_idx = group_idx * self.n_blocks() + block_idx;
                Some(bytes[tile_idx * self.spec?.tile_bytes()..].as_ptr())
            }
            Source::File { .. } => None,
        }
    }

    /// Whether the weights are packed into tiles.
    pub fn is_packed(&self) -> bool {
        matches!(self.source, Source::Tiles { .. })
    }

    /// Packs the tiles of `blocks` of the rows starting at `first_row`. Rows past the end repeat the last row.
    ///
    /// # Safety
    /// `dst` has space for the tiles of `blocks`; all of their bytes are written.
    ///
    /// # Panics
    /// If the matrix is packed, or a row or block does not exist.
    pub(super) unsafe fn make_tiles(
        &self,
        level: Level,
        first_row: usize,
        blocks: Range<usize>,
        dst: *mut u8,
    ) {
        let (Source::File { bytes, row_bytes }, Some(spec)) = (self.source, self.spec) else {
            panic!("the weights are already packed, or have no tile layout");
        };
        assert!(blocks.end <= self.n_blocks() && first_row < self.n_rows && !blocks.is_empty());
        let row = |i: usize| &bytes[(first_row + i).min(self.n_rows - 1) * row_bytes..];
        let range = blocks.start * spec.block_bytes..blocks.end * spec.block_bytes;
        let rows: [*const u8; 16] = std::array::from_fn(|i| row(i)[range.clone()].as_ptr());
        let tile_bytes = blocks.len() * spec.tile_bytes();
        if spec.is_decoded_for_each_use() {
            let rows = std::array::from_fn(|i| &row(i)[range.clone()]);
            // SAFETY: `dst` has space for these bytes by the contract of this function. They are cleared before they
            // are borrowed, since scratch may be uninitialised.
            let tiles = unsafe {
                std::ptr::write_bytes(dst, 0, tile_bytes);
                std::slice::from_raw_parts_mut(dst, tile_bytes)
            };
            return groups::make_tiles_of(self.dtype, &rows, tiles);
        }
        // SAFETY: `range` is inside each row, and `dst` holds a tile for each block.
        level.dispatch(unsafe { MakeTiles::new(spec, &rows, blocks.len(), dst) });
    }
}

/// A weight matrix repacked into tiles of 16 rows: the same information in the same number of bytes (with rows
/// rounded up to 16), in the order in which a matrix product reads it.
pub struct PackedMatrix {
    dtype: DType,
    kind: ActKind,
    spec: TileSpec,
    n_rows: usize,
    k: usize,
    buffer: AlignedBuffer,
}

/// Repacks a matrix in the file layout, on the threads of `pool`.
///
/// `None` if repacking does not pay off (floats, whose rows are read directly; the IQ2 and IQ3 types, whose tiles are
/// several times larger than the file; a matrix that is already packed,
/// or has so few rows that the padding matters), or if memory runs out: the file layout then serves.
pub fn pack(pool: &Pool, level: Level, w: &WeightMatrix<'_>) -> Option<PackedMatrix> {
    if w.is_packed() || w.k == 0 || (w.n_rows < TILE_ROWS) {
        return None;
    }
    let spec = w.spec.filter(|spec| !spec.is_decoded_for_each_use())?;
    let group_bytes = w.n_blocks() * spec.tile_bytes();
    let n_bytes = group_bytes.checked_mul(w.n_rows.div_ceil(TILE_ROWS))?;
    let mut buffer = AlignedBuffer::zeroed(n_bytes)?;
    pool.chunks_mut(buffer.bytes_mut(), group_bytes, |group_idx, group| {
        assert_eq!(group.len(), group_bytes);
        // SAFETY: `group_bytes` are the tiles of all blocks of a group of rows.
        unsafe { w.make_tiles(level, group_idx * TILE_ROWS, 0..w.n_blocks(), group.as_mut_ptr()) };
    });
    Some(PackedMatrix { dtype: w.dtype, kind: w.kind, spec, n_rows: w.n_rows, k: w.k, buffer })
}

impl PackedMatrix {
    /// The matrix, as an operand.
    pub fn matrix(&self) -> WeightMatrix<'_> {
        let PackedMatrix { dtype, kind, n_rows, k, .. } = *self;
        let source = Source::Tiles { bytes: self.buffer.bytes() };
        WeightMatrix { dtype, spec: Some(self.spec), kind, n_rows, k, source }
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Bytes of the repacked weights.
    pub fn n_bytes(&self) -> usize {
        self.buffer.bytes().len()
    }

    /// Name of the layout, for printing.
    pub fn layout_name(&self) -> &'static str {
        self.matrix().layout_name()
    }

    /// Restores row `row` in the file layout; `dst` must have `dtype.bytes_for(k)` bytes.
    ///
    /// # Panics
    /// If the row does not exist or `dst` has another length.
    pub fn unpack_row(&self, row: usize, dst: &mut [u8]) {
        let w = self.matrix();
        assert!(row < self.n_rows, "row {row} of {}", self.n_rows);
        assert_eq!(
            Some(dst.len()),
            self.dtype.bytes_for(self.k),
            "a row of {} {} elements",
            self.k,
            self.dtype
        );
        let Source::Tiles { bytes } = w.source else { unreachable!("a packed matrix is in tiles") };
        let tile_bytes = self.spec.tile_bytes();
        let group = &bytes[row / TILE_ROWS * w.n_blocks() * tile_bytes..];
        for (tile, block) in group.chunks_exact(tile_bytes).zip(dst.chunks_exact_mut(self.spec.block_bytes)) {
            self.spec.unpack_block(tile, row % TILE_ROWS, block);
        }
    }
}
