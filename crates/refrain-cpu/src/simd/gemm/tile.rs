//! The inner part of every product of values: panels of sixteen, and a tile of 16 by 16 sums in registers.
//!
//! A panel holds, for each `k`, the values of sixteen neighbouring rows (of the left operand) or columns (of the right
//! one), so that both are read forward. An element of the result is one chain of `fma` over the `k` of a tile, whatever
//! the width of a register is: the bits are the same at every level.

use half::f16;
use refrain_tensor::DType;

use crate::simd::lanes::{GROUP, Simd, SimdKernel};

/// One operand of a product, as what is multiplied along `k` for each of its `len` rows (or columns).
#[derive(Clone, Copy)]
pub struct Factor<'a> {
    /// F32, F16 or BF16. The right operand may be quantised if its columns lie side by side, in whole blocks.
    pub dtype: DType,
    /// Elements of `dtype`, of which the operand shows some.
    pub bytes: &'a [u8],
    /// Where the first one lies.
    pub offset: usize,
    /// Rows of the left operand, columns of the right one.
    pub len: usize,
    /// Elements from one of them to the next.
    pub stride: usize,
    /// Products that are summed.
    pub k: usize,
    /// Elements from one of those to the next.
    pub k_stride: usize,
}

impl Factor<'_> {
    /// Whether panels can be made of it: elements lie side by side in one direction or the other, inside the bytes.
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

    /// Whether rows lie side by side, so that a panel is copied and not turned.
    fn is_k_major(&self) -> bool {
        self.k_stride != 1 && (self.stride == 1 || self.len <= 1)
    }
}

/// Reads `n` elements from element `at` on as floats.
///
/// # Safety
/// They lie inside `bytes`, and `n` floats are writable at `dst`.
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

/// Elements of sixteen rows that are widened at once before they are turned.
const CHUNK: usize = 64;

/// How far ahead rows are asked for that are copied.
const AHEAD: usize = 12;

/// Makes the panels of rows `first .. end` and `k0 .. k0 + kl`: `[kl, 16]` each. What lies past the last row may be
/// anything.
///
/// # Safety
/// The factor is valid, `end <= len`, `k0 + kl <= k`, and there is room for the panels at `dst`.
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
            // SAFETY: `row < end`, and each group of sixteen rows has its panel.
            unsafe { pack_panel(s, x, row, k0, kl, dst.add((row - first) * kl)) };
        }
        return;
    }
    let (at, size) = (x.offset + first * x.stride + k0 * x.k_stride, x.dtype.block_bytes());
    for k in 0..kl {
        for row in (0..end - first).step_by(GROUP) {
            let n_rows = GROUP.min(end - first - row);
            // Rows are far apart: the processor does not guess the next ones.
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

/// The panel of sixteen rows whose elements lie side by side along `k`.
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
        // SAFETY: `kl` elements lie side by side in each row, inside the factor.
        unsafe { s.transpose(&rows, kl, dst.cast()) };
        return;
    }
    let mut wide = [[0f32; CHUNK]; GROUP];
    for k in (0..kl).step_by(CHUNK) {
        let n = CHUNK.min(kl - k);
        let mut rows = [std::ptr::null(); GROUP];
        for i in 0..GROUP {
            if i < n_rows {
                // SAFETY: `n` elements lie side by side in row `first + i`, and a row of `wide` is as long.
                unsafe { read(s, x.dtype, bytes, at + k + i * x.stride, n, wide[i].as_mut_ptr()) };
            }
            rows[i] = wide[i].as_ptr().cast();
        }
        // SAFETY: `n` floats in each row of `wide`; the panel has room for `kl` columns of sixteen.
        unsafe { s.transpose(&rows, n, dst.add(GROUP * k).cast()) };
    }
}

/// Where a tile of sums goes.
#[derive(Clone, Copy)]
pub(crate) struct Sums {
    pub to: *mut f32,
    /// Floats from row to row.
    pub stride: usize,
    /// Rows and columns that are wanted, 16 at most.
    pub n_rows: usize,
    pub n_cols: usize,
    /// Whether to add to what is there.
    pub add: bool,
}

/// Sixteen rows by sixteen columns, summed over `kl`.
///
/// # Safety
/// For each `k < kl`, 16 floats are readable at `a + k * a_step` and `b + k * b_step`; the tile that `sums` describes is
/// writable, and readable if it is added to.
#[inline(always)]
pub(crate) unsafe fn tile<S: Simd>(
    s: S,
    kl: usize,
    (a, a_step): (*const f32, usize),
    (b, b_step): (*const f32, usize),
    sums: Sums,
) {
    // SAFETY: parts of the tile; all are inside what the contract of this function allows.
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

/// Runs a block for each index below a constant of at most 16, written out: the sums stay in registers whatever the
/// compiler thinks of unrolling.
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
            // SAFETY: sixteen floats are readable from `a - first` on for each `k`.
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
            // SAFETY: the row and the column are among those that are wanted.
            unsafe {
                let to = sums.to.add((first + i) * sums.stride + j);
                *to = if sums.add { *to + sum } else { sum };
            }
        }
    }
}

/// Rows `rows` of a product by columns `cols`, from a right operand in panels.
pub(super) struct GemmRows<'a> {
    pub a: &'a Factor<'a>,
    /// First row and end.
    pub rows: [usize; 2],
    /// First column and end; the first is a multiple of 16.
    pub cols: [usize; 2],
    /// The panels of all columns, block of `kc` by block.
    pub b: *const f32,
    /// Columns in panels.
    pub n_padded: usize,
    pub kc: usize,
    /// Room for the panels of `rows` over `kc`.
    pub panels: *mut f32,
    /// The element of the first row and column.
    pub out: *mut f32,
    pub out_stride: usize,
}

/// Columns that are brought into panels at once: whole blocks of every quantised type.
pub(super) const PACK_COLUMNS: usize = 256;

/// Columns whose panels stay in the second-level cache while all rows pass by.
const COLUMNS: usize = 256;

impl SimdKernel for GemmRows<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let GemmRows { a, rows: [first, end], cols: [first_col, end_col], .. } = self;
        for k0 in (0..a.k).step_by(self.kc) {
            let kl = self.kc.min(a.k - k0);
            // SAFETY: `end <= a.len`, and `panels` has room for the groups of sixteen rows.
            unsafe { pack_panels(s, a, [first, end], k0, kl, self.panels) };
            for block in (first_col..end_col).step_by(COLUMNS) {
                for row in (first..end).step_by(GROUP) {
                    for col in (block..end_col.min(block + COLUMNS)).step_by(GROUP) {
                        // SAFETY: panels were made for these rows above, and for all columns before; the output has
                        // `end - first` rows of at least `end_col - first_col` columns.
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

/// Panels of the right operand: columns `cols`, one block of `k`.
pub(super) struct Pack<'a> {
    pub b: &'a Factor<'a>,
    pub cols: [usize; 2],
    pub k0: usize,
    pub kl: usize,
    /// The block's first panel.
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
    /// Quantised columns, a row of blocks at a time.
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
                // SAFETY: the block of panels has room for `kl` columns of each group of sixteen, from column 0 on.
                unsafe {
                    let to = to.add((first + group * GROUP) * kl + GROUP * k);
                    std::ptr::copy_nonoverlapping(values.as_ptr(), to, values.len());
                }
            }
        }
    }
}
