//! Weight matrices: as they lie in the file, or repacked into tiles.

use std::ops::Range;

use refrain_tensor::DType;

use super::Level;
use super::acts::{ActKind, act_kind};
use super::buffer::AlignedBuffer;
use super::tile::{MakeTiles, TILE_ROWS, TileSpec};
use crate::pool::Pool;

/// Why bytes are not a weight matrix.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WeightError {
    /// Not a type that products take.
    #[error("{dtype} weights have no product")]
    UnsupportedDType {
        /// The type.
        dtype: DType,
    },
    /// A row does not divide into blocks, or its size overflows.
    #[error("a {dtype} row of {k} elements is not whole blocks of {}", dtype.block_len())]
    NotWholeBlocks {
        /// The type.
        dtype: DType,
        /// Elements in a row.
        k: usize,
    },
    /// The rows overlap or run past the end of the bytes.
    #[error("{n_rows} rows of {need} bytes at a stride of {row_bytes} do not fit in {got} bytes")]
    Size {
        /// Rows.
        n_rows: usize,
        /// Bytes that a row takes.
        need: usize,
        /// Bytes from row to row.
        row_bytes: usize,
        /// Bytes there are.
        got: usize,
    },
}

/// The weights `w[n_rows, k]` of a product, borrowed.
#[derive(Clone, Copy)]
pub struct WeightMatrix<'a> {
    dtype: DType,
    /// How it is made into tiles; floats are multiplied row by row instead.
    spec: Option<TileSpec>,
    kind: ActKind,
    n_rows: usize,
    k: usize,
    source: Source<'a>,
}

#[derive(Clone, Copy)]
enum Source<'a> {
    /// Row `i` begins at byte `i * row_bytes`. Invariant, kept by `WeightMatrix::new`: every row is inside.
    File { bytes: &'a [u8], row_bytes: usize },
    /// Tiles of row group 0 by block, then of group 1, and so on. Invariant, kept by `PackedMatrix::new`: all are inside.
    Tiles { bytes: &'a [u8] },
}

impl<'a> WeightMatrix<'a> {
    /// Rows of `k` elements of `dtype` as a file holds them, `row_bytes` apart.
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

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Rows, which are the product's outputs.
    pub fn n_rows(&self) -> usize {
        self.n_rows
    }

    /// Elements in a row.
    pub fn k(&self) -> usize {
        self.k
    }

    /// The form that a product takes its activations in.
    pub fn act_kind(&self) -> ActKind {
        self.kind
    }

    /// Bytes that a pass over the whole matrix reads.
    pub fn bytes_read(&self) -> usize {
        match self.source {
            Source::File { .. } => self.n_rows * self.dtype.bytes_for(self.k).unwrap_or(0),
            Source::Tiles { bytes } => bytes.len(),
        }
    }

    /// The layout, for printing.
    pub fn layout_name(&self) -> &'static str {
        match self.source {
            Source::File { .. } => "file",
            Source::Tiles { .. } => "tiles of 16 rows",
        }
    }

    pub(super) fn spec(&self) -> Option<TileSpec> {
        self.spec
    }

    /// Blocks in a row.
    pub(super) fn n_blocks(&self) -> usize {
        self.k / self.dtype.block_len()
    }

    /// The bytes of row `row` in the file's layout, if that is where the weights are.
    pub(super) fn file_row(&self, row: usize) -> Option<&'a [u8]> {
        match self.source {
            Source::File { bytes, row_bytes } => {
                let used = self.dtype.bytes_for(self.k)?;
                bytes.get(row * row_bytes..)?.get(..used)
            }
            Source::Tiles { .. } => None,
        }
    }

    /// The packed tiles of the blocks from `block_idx` on of rows `16 * group_idx ..`, if it is packed.
    pub(super) fn tiles(&self, group_idx: usize, block_idx: usize) -> Option<*const u8> {
        match self.source {
            Source::Tiles { bytes } => {
                let tile_idx = group_idx * self.n_blocks() + block_idx;
                Some(bytes[tile_idx * self.spec?.tile_bytes()..].as_ptr())
            }
            Source::File { .. } => None,
        }
    }

    /// Whether the weights are in tiles already.
    pub fn is_packed(&self) -> bool {
        matches!(self.source, Source::Tiles { .. })
    }

    /// Makes the tiles of `blocks` of the rows from `first_row` on (the last row again for those past the end).
    ///
    /// # Safety
    /// `dst` takes the tiles of `blocks`; all of their bytes are written.
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
            panic!("the weights are in tiles already, or never are");
        };
        assert!(blocks.end <= self.n_blocks() && first_row < self.n_rows && !blocks.is_empty());
        let row = |i: usize| &bytes[(first_row + i).min(self.n_rows - 1) * row_bytes..];
        let range = blocks.start * spec.block_bytes..blocks.end * spec.block_bytes;
        let rows: [*const u8; 16] = std::array::from_fn(|i| row(i)[range.clone()].as_ptr());
        // SAFETY: `range` is inside each row, and `dst` holds a tile for each block.
        level.dispatch(unsafe { MakeTiles::new(spec, &rows, blocks.len(), dst) });
    }
}

/// A weight matrix repacked into tiles of 16 rows: the same information in the same number of bytes (rows rounded up
/// to 16), in the order in which a product reads it.
pub struct PackedMatrix {
    dtype: DType,
    kind: ActKind,
    spec: TileSpec,
    n_rows: usize,
    k: usize,
    buffer: AlignedBuffer,
}

/// Repacks a matrix in the file's layout, on the threads of `pool`.
///
/// `None` where it would not pay (floats, whose rows are read as they are; a matrix that is packed already, or has so
/// few rows that the padding counts), and where there is no memory for it: the matrix as it is serves then.
pub fn pack(pool: &Pool, level: Level, w: &WeightMatrix<'_>) -> Option<PackedMatrix> {
    if w.is_packed() || w.k == 0 || (w.n_rows < TILE_ROWS) {
        return None;
    }
    let spec = w.spec?;
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
    /// The matrix, to multiply with.
    pub fn matrix(&self) -> WeightMatrix<'_> {
        let PackedMatrix { dtype, kind, n_rows, k, .. } = *self;
        let source = Source::Tiles { bytes: self.buffer.bytes() };
        WeightMatrix { dtype, spec: Some(self.spec), kind, n_rows, k, source }
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Bytes that the repacked weights take.
    pub fn n_bytes(&self) -> usize {
        self.buffer.bytes().len()
    }

    /// The layout, for printing.
    pub fn layout_name(&self) -> &'static str {
        self.matrix().layout_name()
    }

    /// Copies row `row` back into the file's layout: `dst` takes `dtype.bytes_for(k)` bytes.
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
