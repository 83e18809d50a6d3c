//! Values of quantised weights.

use half::{bf16, f16};
use refrain_tensor::DType;
use refrain_tensor::quant::{BlockQ4_0, BlockQ4_1, BlockQ8_0, F16Le};
use safetensors::Dtype;
use std::thread;

/// Position, in its word, of each of eight neighbours in an AWQ tensor.
pub(super) const AWQ_SHIFT: [usize; 8] = [0, 4, 1, 5, 2, 6, 3, 7];

/// Rows that are rewritten together: neighbours share the words of transposed layouts.
const TILE: usize = 16;

/// Weights below this number of elements are rewritten by one thread.
const SMALL: usize = 1 << 20;

/// Where the codes of a weight `[n_out, n_in]` are.
#[derive(Clone, Copy, Debug)]
pub(super) enum Layout {
    /// Signed bytes, row by row.
    Signed,
    /// Words of neighbours in a row, row by row.
    Rows { bits: usize },
    /// Words of neighbours in a row; the words of all rows for the first columns come first.
    Columns { bits: usize },
    /// Words of eight rows of one column, in [`AWQ_SHIFT`] order.
    AwqColumns,
}

/// Codes, counted from the smallest.
pub(super) struct Codes<'a> {
    pub(super) bytes: &'a [u8],
    pub(super) layout: Layout,
    pub(super) n_out: usize,
    pub(super) n_in: usize,
}

/// What turns codes into values: `(code - zero) * scale`.
pub(super) struct Integers {
    pub(super) bits: usize,
    pub(super) n_groups: usize,
    /// Columns in a group.
    pub(super) group: usize,
    pub(super) scales: Vec<f32>, // [n_out, n_groups]
    /// Half the number of codes if missing.
    pub(super) zeros: Option<Vec<u8>>, // [n_out, n_groups]
    /// The group of each column, unless groups are neighbours.
    pub(super) group_of: Option<Vec<u32>>, // [n_in]
}

/// The block type that holds such integers, if there is one.
pub(super) fn block_type(bits: usize, symmetric: bool, group: usize, n_in: usize) -> Option<DType> {
    if !n_in.is_multiple_of(32) || !(group.is_multiple_of(32) || group >= n_in) {
        return None;
    }
    match (bits, symmetric) {
        (4, true) => Some(DType::Q4_0),
        (4, false) => Some(DType::Q4_1),
        (8, true) => Some(DType::Q8_0),
        _ => None,
    }
}

/// Little-endian floats as F32.
pub(super) fn floats(dtype: Dtype, bytes: &[u8]) -> Vec<f32> {
    match dtype {
        Dtype::F32 => bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
        Dtype::F16 => bytes.as_chunks::<2>().0.iter().map(|b| f16::from_le_bytes(*b).to_f32()).collect(),
        Dtype::BF16 => bytes.as_chunks::<2>().0.iter().map(|b| bf16::from_le_bytes(*b).to_f32()).collect(),
        // An exponent; the largest one is NaN.
        _ => bytes.iter().map(|&b| if b == 255 { f32::NAN } else { (f32::from(b) - 127.0).exp2() }).collect(),
    }
}

/// Little-endian integers.
pub(super) fn integers_of(dtype: Dtype, bytes: &[u8]) -> Vec<i64> {
    match dtype {
        Dtype::I64 => bytes.as_chunks::<8>().0.iter().map(|b| i64::from_le_bytes(*b)).collect(),
        _ => bytes.as_chunks::<4>().0.iter().map(|b| i64::from(i32::from_le_bytes(*b))).collect(),
    }
}

/// The values of the 256 floats of eight bits.
pub(super) fn float8_values(dtype: Dtype) -> [f32; 256] {
    std::array::from_fn(|code| {
        let code = code as u8;
        // An F16 without its last eight bits.
        if dtype == Dtype::F8_E5M2 {
            return f16::from_bits(u16::from(code) << 8).to_f32();
        }
        let sign = if code & 0x80 == 0 { 1.0 } else { -1.0 };
        let (exponent, fraction) = (i32::from(code >> 3 & 15), f32::from(code & 7));
        match (exponent, code & 7) {
            (15, 7) => f32::NAN,
            (0, _) => sign * fraction * 2f32.powi(-9),
            _ => sign * (8.0 + fraction) * 2f32.powi(exponent - 10),
        }
    })
}

/// Decodes floats of eight bits to floats of type `to`. `block` are the rows and columns that share a scale.
pub(super) fn float8(
    codes: &[u8],
    table: &[f32; 256],
    [n, n_out, n_in]: [usize; 3],
    scales: &[f32],
    [rows, columns]: [usize; 2],
    to: DType,
) -> Vec<u8> {
    let (down, across) = (n_out.div_ceil(rows), n_in.div_ceil(columns));
    let mut out = vec![0; n * n_out * n_in * to.block_bytes()];
    by_rows(&mut out, n_in * to.block_bytes(), n * n_out, |first, out| {
        for (row, out) in (first..).zip(out.chunks_exact_mut((n_in * to.block_bytes()).max(1))) {
            let scales = &scales[(row / n_out * down + row % n_out / rows) * across..][..across];
            let codes = &codes[row * n_in..][..n_in];
            let values = codes.chunks(columns).zip(scales);
            let value = |code: &u8, scale: f32| table[usize::from(*code)] * scale;
            let values = values.flat_map(|(codes, &scale)| codes.iter().map(move |code| value(code, scale)));
            write_floats(to, values, out);
        }
    });
    out
}

/// From bytes of two neighbours and their exponents to blocks in GGUF's layout, where byte `j` holds elements `j` and
/// `16 + j`.
pub(super) fn mxfp4(codes: &[u8], exponents: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(exponents.len() * 17);
    for (block, exponent) in codes.as_chunks::<16>().0.iter().zip(exponents) {
        let nibble = |element: usize| block[element / 2] >> (4 * (element % 2)) & 15;
        out.push(*exponent);
        out.extend((0..16).map(|j| nibble(j) | nibble(16 + j) << 4));
    }
    out
}

/// Rewrites integers as blocks, or decodes them to `float` if no block type holds them.
pub(super) fn integers(codes: &Codes<'_>, integers: &Integers, float: DType) -> (DType, Vec<u8>) {
    let dtype = integers.block_type(codes.n_in).unwrap_or(float);
    let row_bytes = codes.n_in / dtype.block_len() * dtype.block_bytes();
    let mut out = vec![0; codes.n_out * row_bytes];
    by_rows(&mut out, row_bytes, codes.n_out, |first, out| {
        let mut tile = vec![0; TILE * codes.n_in];
        for (at, out) in out.chunks_mut((TILE * row_bytes).max(1)).enumerate() {
            let first = first + at * TILE;
            codes.read(first, &mut tile[..out.len() / row_bytes * codes.n_in]);
            let rows = tile.chunks_exact(codes.n_in.max(1)).zip(out.chunks_exact_mut(row_bytes));
            for (row, (codes, out)) in (first..).zip(rows) {
                integers.write(row, dtype, codes, out);
            }
        }
    });
    (dtype, out)
}

impl Codes<'_> {
    /// Reads the rows from `first` on; the length of `out` tells how many.
    fn read(&self, first: usize, out: &mut [u8]) {
        let (n_out, n_in) = (self.n_out, self.n_in);
        let n_rows = out.len() / n_in.max(1);
        let words = self.bytes.as_chunks::<4>().0;
        let word = |at: usize| u32::from_le_bytes(words[at]);
        match self.layout {
            Layout::Signed => {
                for (to, from) in out.iter_mut().zip(&self.bytes[first * n_in..]) {
                    *to = from ^ 0x80;
                }
            }
            Layout::Rows { bits } => {
                let per_word = 32 / bits;
                let from = &words[first * (n_in / per_word)..];
                for (out, word) in out.chunks_exact_mut(per_word).zip(from) {
                    spread(u32::from_le_bytes(*word), bits, out);
                }
            }
            Layout::Columns { bits } => {
                let per_word = 32 / bits;
                for of in 0..n_in / per_word {
                    for row in 0..n_rows {
                        let out = &mut out[row * n_in + of * per_word..][..per_word];
                        spread(word(of * n_out + first + row), bits, out);
                    }
                }
            }
            Layout::AwqColumns => {
                for column in 0..n_in {
                    for eight in 0..n_rows / 8 {
                        let word = word(column * (n_out / 8) + first / 8 + eight);
                        for (row, shift) in AWQ_SHIFT.iter().enumerate() {
                            out[(8 * eight + row) * n_in + column] = (word >> (4 * shift)) as u8 & 15;
                        }
                    }
                }
            }
        }
    }
}

fn spread(word: u32, bits: usize, out: &mut [u8]) {
    let mask = (1_u32 << bits) - 1;
    for (i, out) in out.iter_mut().enumerate() {
        *out = (word >> (bits * i) & mask) as u8;
    }
}

impl Integers {
    fn middle(&self) -> u8 {
        1 << (self.bits - 1)
    }

    /// The block type that holds these values; `None` if groups are not neighbours, or if a scale or the value of
    /// code 0 does not fit in F16.
    fn block_type(&self, n_in: usize) -> Option<DType> {
        let middle = self.middle();
        let symmetric = self.zeros.as_ref().is_none_or(|zeros| zeros.iter().all(|&zero| zero == middle));
        let dtype = block_type(self.bits, symmetric, self.group, n_in)?;
        let row = |row: usize| &self.scales[row * self.n_groups..][..self.n_groups];
        let n_rows = self.scales.len() / self.n_groups.max(1);
        let scales_fit = (0..n_rows).all(|idx| fits_f16(row(idx).iter().copied()));
        let lowest_fit = dtype != DType::Q4_1 || {
            let lowest = (0..self.scales.len()).map(|at| self.lowest(at));
            lowest.clone().all(|value| value.abs() <= f16::MAX.to_f32())
        };
        (self.group_of.is_none() && scales_fit && lowest_fit).then_some(dtype)
    }

    fn zero(&self, at: usize) -> u8 {
        self.zeros.as_ref().map_or(self.middle(), |zeros| zeros[at])
    }

    /// The value of code 0.
    fn lowest(&self, at: usize) -> f32 {
        -f32::from(self.zero(at)) * self.scales[at]
    }

    fn write(&self, row: usize, dtype: DType, codes: &[u8], out: &mut [u8]) {
        let first = row * self.n_groups;
        // Checked before: the type was chosen because they fit.
        let half = |value: f32| F16Le(f16::from_f32(value).to_le_bytes());
        let groups = |n_blocks: usize| (0..n_blocks).map(|block| first + block * 32 / self.group);
        let nibbles = |block: &[u8; 32]| std::array::from_fn(|j| block[j] | block[16 + j] << 4);
        let blocks = codes.as_chunks::<32>().0;
        match dtype {
            DType::Q4_0 => {
                let out: &mut [BlockQ4_0] = bytemuck::cast_slice_mut(out);
                for ((at, block), out) in groups(blocks.len()).zip(blocks).zip(out) {
                    *out = BlockQ4_0 { d: half(self.scales[at]), qs: nibbles(block) };
                }
            }
            DType::Q4_1 => {
                let out: &mut [BlockQ4_1] = bytemuck::cast_slice_mut(out);
                for ((at, block), out) in groups(blocks.len()).zip(blocks).zip(out) {
                    let (d, m) = (half(self.scales[at]), half(self.lowest(at)));
                    *out = BlockQ4_1 { d, m, qs: nibbles(block) };
                }
            }
            DType::Q8_0 => {
                let out: &mut [BlockQ8_0] = bytemuck::cast_slice_mut(out);
                for ((at, block), out) in groups(blocks.len()).zip(blocks).zip(out) {
                    *out = BlockQ8_0 { d: half(self.scales[at]), qs: block.map(|c| (c ^ 0x80) as i8) };
                }
            }
            float => {
                let at = |column: usize| match &self.group_of {
                    Some(of) => first + of[column] as usize,
                    None => first + column / self.group,
                };
                let value = |(column, code): (usize, &u8)| {
                    let at = at(column);
                    (f32::from(*code) - f32::from(self.zero(at))) * self.scales[at]
                };
                write_floats(float, codes.iter().enumerate().map(value), out);
            }
        }
    }
}

/// Returns whether rounding the scales of a row to F16 is as exact as F16 is for the largest of them.
fn fits_f16(scales: impl Iterator<Item = f32> + Clone) -> bool {
    let largest = scales.clone().fold(0_f32, |most, scale| most.max(scale.abs()));
    let allowed = largest * 2f32.powi(-11);
    let mut scales = scales.map(|scale| (scale, f16::from_f32(scale)));
    scales.all(|(scale, half)| half.is_finite() && (half.to_f32() - scale).abs() <= allowed)
}

fn write_floats(to: DType, values: impl Iterator<Item = f32>, out: &mut [u8]) {
    match to {
        DType::F16 => {
            let out = out.as_chunks_mut::<2>().0;
            values.zip(out).for_each(|(value, out)| *out = f16::from_f32(value).to_le_bytes());
        }
        DType::BF16 => {
            let out = out.as_chunks_mut::<2>().0;
            values.zip(out).for_each(|(value, out)| *out = bf16::from_f32(value).to_le_bytes());
        }
        _ => {
            let out = out.as_chunks_mut::<4>().0;
            values.zip(out).for_each(|(value, out)| *out = value.to_le_bytes());
        }
    }
}

/// Calls `write` with the index of a first row and the bytes of several rows, on all cores if there are many. Parts start at
/// multiples of [`TILE`] rows.
fn by_rows(out: &mut [u8], row_bytes: usize, n_rows: usize, write: impl Fn(usize, &mut [u8]) + Sync) {
    if out.is_empty() {
        return;
    }
    let cores = if out.len() < SMALL { 1 } else { thread::available_parallelism().map_or(1, usize::from) };
    let each = n_rows.div_ceil(cores).next_multiple_of(TILE);
    thread::scope(|scope| {
        for (part, out) in out.chunks_mut(each * row_bytes).enumerate() {
            let write = &write;
            match cores {
                1 => write(part * each, out),
                _ => {
                    scope.spawn(move || write(part * each, out));
                }
            }
        }
    });
}
