//! Inner kernel of all matrix products of values: panels of 16, and a register tile of 16 by 16 sums.
//!
//! A panel holds, for each `k`, the values of 16 adjacent rows (of the left operand) or columns (of the right
//! one), so both are read sequentially. An element of the result is one chain of `fma` over the `k` of a tile,
//! regardless of the register width: the bits are the same at every level.

use half::f16;
use refrain_tensor::DType;

use crate::simd::lanes::{GROUP, Simd, SimdKernel};

/// An operand of a matrix product: `len` rows (or columns) of `k` elements.
#[derive(Clone, Copy)]
pub struct Factor<'a> {
    /// F32, F16 or BF16. The right operand may be quantised if its columns are contiguous and a whole number of
    /// blocks.
    pub dtype: DType,
    /// Memory of `dtype` elements that the operand is a part of.
    pub bytes: &'a [u8],
    /// Index of the first element.
    pub offset: usize,
    /// Rows of the left operand, columns of the right one.
    pub len: usize,
    /// Elements between rows (or columns).
    pub stride: usize,
    /// Number of products per sum.
    pub k: usize,
    /// Elements between consecutive factors of a sum.
    pub k_stride: usize,
}

impl Factor<'_> {
    /// Whether panels can be packed from it: its elements are contiguous in one dimension and inside the bytes.
    pub fn is_valid(&self) -> bool {
        let (len, bytes) = (self.dtype.block_len(), self.dtype.block_bytes());
        let side_by_side = self.k_stride == 1 || self.stride == 1 || self.k <= 1 || self.len <= 1;
        let is_whole = [self.offset, self.len, self.k_stride].iter().all(|n| n.is_multiple_of(len));
        let is_read = self.is_float() || (self.dtype.is_quantized() && self.stride == 1 && is_whole);
        let end = match self.len == 0 || self.k == 0 {
            true => 0,
            false => self.offset + (self.len - 1) * self.stride + (self.k - 1) * self.k_stride + 1,
        };
        side_by_side && is_read && end <= self.bytes.len() / bytes * len
    }

    pub(super) fn is_float(&self) -> bool {
        matches!(self.dtype, DType::F32 | DType::F16 | DType::BF16)
    }

    /// Whether rows are contiguous, so that packing copies instead of transposing.
    fn is_k_major(&self) -> bool {
        self.k_stride != 1 && (self.stride == 1 || self.len <= 1)
    }
}

/// Reads `n` elements starting at `at` as floats.
///
/// # Safety
/// The elements are inside `bytes`, and `n` floats are writable at `dst`.
#[inline(always)]
unsafe fn read<S: Simd>(s: S, dtype: DType, bytes: *const u8, at: usize, n: usize, dst: *mut f32) {
    let whole = n / S::LANES * S::LANES;
    // SAFETY: elements `at .. at + n` are readable and `n` floats writable by the contract of this function.
    unsafe {
        if dtype == DType::F32 {
            std::ptr::copy_nonoverlapping(bytes.add(4 * at), dst.cast(), 4 * n);
        } else if dtype == DType::F16 {
            let src = bytes.add(2 * at);
            for i in (0..whole).step_by(S::LANES) {
                s.fstore(dst.add(i), s.load_f16(src.add(2 * i)));
            }
            for i in whole..n {
                *dst.add(i) = src.cast::<f16>().add(i).read_unaligned().to_f32();
            }
        } else {
            let src = bytes.add(2 * at);
            for i in 0..n {
                *dst.add(i) = f32::from_bits(u32::from(src.cast::<u16>().add(i).read_unaligned()) << 16);
            }
        }
    }
}

/// Elements of 16 rows to widen before transposing them.
const CHUNK: usize = 64;

/// Prefetch distance in rows, when rows are copied.
const AHEAD: usize = 12;

/// Packs the panels of rows `first .. end` and `k0 .. k0 + kl`: `[kl, 16]` each. Entries past the last row are
/// undefined.
///
/// # Safety
/// The factor is valid, `end <= len`, `k0 + kl <= k`, and `dst` has space for the panels.
#[inline(always)]
unsafe fn pack_panels<S: Simd>(
    s: S,
    x: &Factor<'_>,
    [first, end]: [usize; 2],
    k0: usize,
    kl: usize,
    dst: *mut f32,
) {
    if !x.is_k_major() {
        for row in (first..end).step_by(GROUP) {
            // SAFETY: `row < end`, and each group of 16 rows has its panel.
            unsafe { pack_panel(s, x, row, k0, kl, dst.add((row - first) * kl)) };
        }
        return;
    }
    let (at, size) = (x.offset + first * x.stride + k0 * x.k_stride, x.dtype.block_bytes());
    for k in 0..kl {
        for row in (0..end - first).step_by(GROUP) {
            let n_rows = GROUP.min(end - first - row);
            // Rows are far apart, so the hardware prefetcher does not predict them.
            s.prefetch(x.bytes.as_ptr().wrapping_add(size * (at + (k + AHEAD) * x.k_stride + row)));
            // SAFETY: rows below `end` and `k0 + k` are inside the factor, which is inside its bytes.
            unsafe {
                let dst = dst.add(row * kl + GROUP * k);
                if n_rows == GROUP {
                    read(s, x.dtype, x.bytes.as_ptr(), at + k * x.k_stride + row, GROUP, dst);
                } else {
                    std::ptr::write_bytes(dst, 0, GROUP);
                    read(s, x.dtype, x.bytes.as_ptr(), at + k * x.k_stride + row, n_rows, dst);
                }
            }
        }
    }
}

/// Packs the panel of 16 rows that are contiguous along `k`.
///
/// # Safety
/// As [`pack_panels`], with `first < len`.
#[inline(always)]
unsafe fn pack_panel<S: Simd>(s: S, x: &Factor<'_>, first: usize, k0: usize, kl: usize, dst: *mut f32) {
    let n_rows = GROUP.min(x.len - first);
    let bytes = x.bytes.as_ptr();
    let at = x.offset + first * x.stride + k0 * x.k_stride;
    if x.dtype == DType::F32 {
        let mut rows = [std::ptr::null(); GROUP];
        for (i, row) in rows.iter_mut().enumerate() {
            *row = bytes.wrapping_add(4 * (at + i.min(n_rows - 1) * x.stride));
        }
        // SAFETY: `kl` contiguous elements in each row, inside the factor.
        unsafe { s.transpose(&rows, kl, dst.cast()) };
        return;
    }
    let mut wide = [[0f32; CHUNK]; GROUP];
    for k in (0..kl).step_by(CHUNK) {
        let n = CHUNK.min(kl - k);
        let mut rows = [std::ptr::null(); GROUP];
        for i in 0..GROUP {
            if i < n_rows {
                // SAFETY: `n` contiguous elements in row `first + i`, and a row of `wide` is at least as long.
                unsafe { read(s, x.dtype, bytes, at + k + i * x.stride, n, wide[i].as_mut_ptr()) };
            }
            rows[i] = wide[i].as_ptr().cast();
        }
        // SAFETY: `n` floats in each row of `wide`; the panel has space for `kl` columns of 16.
        unsafe { s.transpose(&rows, n, dst.add(GROUP * k).cast()) };
    }
}

/// Destination of a tile of sums.
#[derive(Clone, Copy)]
pub(crate) struct Sums {
    pub to: *mut f32,
    /// Floats between rows.
    pub stride: usize,
    /// Number of rows and columns to store, at most 16.
    pub n_rows: usize,
    pub n_cols: usize,
    /// Whether to add to the existing values.
    pub add: bool,
}

/// Sixteen rows by sixteen columns, summed over `kl`.
///
/// # Safety
/// For each `k < kl`, 16 floats are readable at `a + k * a_step` and `b + k * b_step`. The tile that `sums`
/// describes is writable, and readable if it is added to.
#[inline(always)]
pub(crate) unsafe fn tile<S: Simd>(
    s: S,
    kl: usize,
    (a, a_step): (*const f32, usize),
    (b, b_step): (*const f32, usize),
    sums: Sums,
) {
    // SAFETY: parts of the tile; all are within the contract of this function.
    unsafe {
        match S::LANES {
            16 => part::<S, 16, 1>(s, kl, (a, a_step), (b, b_step), sums, 0),
            8 => {
                part::<S, 6, 2>(s, kl, (a, a_step), (b, b_step), sums, 0);
                part::<S, 6, 2>(s, kl, (a, a_step), (b, b_step), sums, 6);
                part::<S, 4, 2>(s, kl, (a, a_step), (b, b_step), sums, 12);
            }
            _ => {
                for first in [0, 4, 8, 12] {
                    part::<S, 4, 4>(s, kl, (a, a_step), (b, b_step), sums, first);
                }
            }
        }
    }
}

/// Runs a block for each index below a constant of at most 16, unrolled by hand: the sums stay in registers
/// whether or not the compiler unrolls loops.
macro_rules! each {
    ($i:ident < $n:ident: $($at:literal)*; $body:block) => {
        $(if $at < $n {
            let $i: usize = $at;
            $body
        })*
    };
    (row $i:ident < $n:ident $body:block) => {
        each!($i < $n: 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15; $body)
    };
    (reg $i:ident < $n:ident $body:block) => {
        each!($i < $n: 0 1 2 3; $body)
    };
}

/// Rows `first .. first + ROWS` of a tile, in `ROWS * REGS` registers.
///
/// # Safety
/// As [`tile`]; `REGS * LANES == 16` and `first + ROWS <= 16`.
#[inline(always)]
unsafe fn part<S: Simd, const ROWS: usize, const REGS: usize>(
    s: S,
    kl: usize,
    (a, a_step): (*const f32, usize),
    (b, b_step): (*const f32, usize),
    sums: Sums,
    first: usize,
) {
    if first >= sums.n_rows {
        return;
    }
    let mut acc = [[s.fsplat(0.0); REGS]; ROWS];
    let mut a = a.wrapping_add(first);
    let mut b = b;
    for _ in 0..kl {
        let mut right = [s.fsplat(0.0); REGS];
        each!(reg r < REGS {
            // SAFETY: sixteen floats are readable at `b` for each `k`.
            right[r] = unsafe { s.fload(b.wrapping_add(r * S::LANES)) };
        });
        each!(row i < ROWS {
            // SAFETY: 16 floats are readable from `a - first` for each `k`.
            let left = s.fsplat(unsafe { *a.wrapping_add(i) });
            each!(reg r < REGS {
                acc[i][r] = s.fma(left, right[r], acc[i][r]);
            });
        });
        a = a.wrapping_add(a_step);
        b = b.wrapping_add(b_step);
    }
    if sums.n_cols == GROUP && first + ROWS <= sums.n_rows {
        each!(row i < ROWS {
            each!(reg r < REGS {
                // SAFETY: the row and its sixteen columns are inside the tile.
                unsafe {
                    let to = sums.to.add((first + i) * sums.stride + r * S::LANES);
                    let sum = if sums.add { s.fadd(s.fload(to), acc[i][r]) } else { acc[i][r] };
                    s.fstore(to, sum);
                }
            });
        });
        return;
    }
    let mut rows = [[0f32; GROUP]; ROWS];
    each!(row i < ROWS {
        each!(reg r < REGS {
            // SAFETY: a row is sixteen floats, `REGS` registers.
            unsafe { s.fstore(rows[i].as_mut_ptr().add(r * S::LANES), acc[i][r]) };
        });
    });
    let n_rows = ROWS.min(sums.n_rows - first);
    for (i, row) in rows.iter().enumerate().take(n_rows) {
        for (j, &sum) in row.iter().enumerate().take(sums.n_cols) {
            // SAFETY: the row and the column are among those to store.
            unsafe {
                let to = sums.to.add((first + i) * sums.stride + j);
                *to = if sums.add { *to + sum } else { sum };
            }
        }
    }
}

/// Matrix product of rows `rows` by columns `cols`, with a packed right operand.
pub(super) struct GemmRows<'a> {
    pub a: &'a Factor<'a>,
    /// First row and end.
    pub rows: [usize; 2],
    /// First column and end; the first is a multiple of 16.
    pub cols: [usize; 2],
    /// Panels of all columns, one block of `kc` after another.
    pub b: *const f32,
    /// Number of columns in panels.
    pub n_padded: usize,
    pub kc: usize,
    /// Space for the panels of `rows` over `kc`.
    pub panels: *mut f32,
    /// Output element of the first row and column.
    pub out: *mut f32,
    pub out_stride: usize,
}

/// Columns packed at once: a whole number of blocks of every quantised type.
pub(super) const PACK_COLUMNS: usize = 256;

/// Columns whose panels stay in the L2 cache while all rows are processed.
const COLUMNS: usize = 256;

impl SimdKernel for GemmRows<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let GemmRows { a, rows: [first, end], cols: [first_col, end_col], .. } = self;
        for k0 in (0..a.k).step_by(self.kc) {
            let kl = self.kc.min(a.k - k0);
            // SAFETY: `end <= a.len`, and `panels` has space for the groups of 16 rows.
            unsafe { pack_panels(s, a, [first, end], k0, kl, self.panels) };
            for block in (first_col..end_col).step_by(COLUMNS) {
                for row in (first..end).step_by(GROUP) {
                    for col in (block..end_col.min(block + COLUMNS)).step_by(GROUP) {
                        // SAFETY: the panels of these rows were packed above, and those of all columns earlier;
                        // the output has `end - first` rows of at least `end_col - first_col` columns.
                        unsafe {
                            let panel_a = self.panels.add((row - first) * kl).cast_const();
                            let panel_b = self.b.add(k0 * self.n_padded + col * kl);
                            let sums = Sums {
                                to: self.out.add((row - first) * self.out_stride + col - first_col),
                                stride: self.out_stride,
                                n_rows: GROUP.min(end - row),
                                n_cols: GROUP.min(end_col - col),
                                add: k0 > 0,
                            };
                            tile(s, kl, (panel_a, GROUP), (panel_b, GROUP), sums);
                        }
                    }
                }
            }
        }
    }
}

/// Packs the right operand: columns `cols`, one block of `k`.
pub(super) struct Pack<'a> {
    pub b: &'a Factor<'a>,
    pub cols: [usize; 2],
    pub k0: usize,
    pub kl: usize,
    /// First panel of the block.
    pub to: *mut f32,
}

impl SimdKernel for Pack<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        if !self.b.is_float() {
            self.decode();
            return;
        }
        // SAFETY: the columns are inside the factor, and the block has a panel for each group of sixteen columns.
        unsafe { pack_panels(s, self.b, self.cols, self.k0, self.kl, self.to.add(self.cols[0] * self.kl)) };
    }
}

impl Pack<'_> {
    /// Packs quantised columns, one row of blocks at a time.
    fn decode(&self) {
        let Pack { b, cols: [first, end], k0, kl, to } = *self;
        let (len, size) = (b.dtype.block_len(), b.dtype.block_bytes());
        let mut row = [0f32; PACK_COLUMNS];
        let row = &mut row[..end - first];
        for k in 0..kl {
            let block = (b.offset + first + (k0 + k) * b.k_stride) / len;
            let bytes = &b.bytes[block * size..][..row.len() / len * size];
            if let Err(e) = refrain_tensor::quant::dequantize(b.dtype, bytes, row) {
                panic!("whole blocks of {} are not decoded: {e}", b.dtype);
            }
            for (group, values) in row.chunks(GROUP).enumerate() {
                // SAFETY: the block of panels has space for `kl` columns of each group of 16, starting at
                // column 0.
                unsafe {
                    let to = to.add((first + group * GROUP) * kl + GROUP * k);
                    std::ptr::copy_nonoverlapping(values.as_ptr(), to, values.len());
                }
            }
        }
    }
}
