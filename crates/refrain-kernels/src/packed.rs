//! Packed layout of quantised weights: tiles of eight rows, in units that one copy loads.
//!
//! `cu/packed.cuh` describes and decodes the layout; a kernel (`pack.cu`) produces it on the device from a
//! file's bytes. This module is the same in plain Rust: the twin of that kernel, and the decoder for the
//! twins of its readers.

use half::{bf16, f16};
use refrain_driver::sim::{KernelResult, SimKernel};
use refrain_driver::{Baked, Buf, Launch};
use refrain_tensor::{DType, quant};

use crate::error::{KernelError, OpCase};
use crate::load::Kernels;
use crate::registry::{KernelEntry, P, W, lowercase};
use crate::source::KernelFamily;
use crate::twin::{count, fault};
use crate::vouch::Vouch;

/// Dtypes with a packed layout.
pub const PACKED_DTYPES: [DType; 12] = [
    DType::Q4_0,
    DType::Q4_1,
    DType::Q5_0,
    DType::Q5_1,
    DType::Q8_0,
    DType::Q3_K,
    DType::Q4_K,
    DType::Q5_K,
    DType::Q6_K,
    DType::IQ4_NL,
    DType::IQ4_XS,
    DType::MXFP4,
];

/// Rows per tile.
pub(crate) const TILE_ROWS: usize = 8;
/// Elements of a sub-block.
const SUB: usize = 32;
/// Adjacent sub-blocks in a plane.
const SUBS: usize = 4;

/// Layout of a dtype's units: the bytes of each lane in each plane.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Unit {
    /// Columns per unit.
    pub(crate) cols: usize,
    /// Bytes per unit.
    pub(crate) bytes: usize,
    /// Offset of the fifth or upper bits.
    high: usize,
    /// Offset of the scales.
    scales: usize,
    /// Offset of the per-row scales.
    rows: usize,
}

impl Unit {
    /// Returns the unit of a dtype; `None` if it is not packed.
    pub(crate) const fn of(dtype: DType) -> Option<Unit> {
        let (cols, bytes, high, scales, rows) = match dtype {
            DType::Q4_0 | DType::IQ4_NL | DType::MXFP4 => (128, 576, 512, 512, 576),
            DType::Q4_1 => (128, 640, 512, 512, 640),
            DType::Q5_0 => (128, 704, 512, 640, 704),
            DType::Q5_1 => (128, 768, 512, 640, 768),
            DType::Q8_0 => (128, 1088, 512, 1024, 1088),
            DType::Q3_K => (256, 912, 512, 768, 896),
            DType::Q4_K => (256, 1184, 1024, 1024, 1152),
            DType::Q5_K => (256, 1440, 1024, 1280, 1408),
            DType::Q6_K => (256, 1680, 1024, 1536, 1664),
            DType::IQ4_XS => (256, 1104, 1024, 1024, 1088),
            DType::F32
            | DType::F16
            | DType::BF16
            | DType::Q2_K
            | DType::IQ2_XXS
            | DType::IQ2_XS
            | DType::IQ2_S
            | DType::IQ3_XXS
            | DType::IQ3_S
            | DType::I32
            | DType::U32
            | DType::I64
            | DType::U8 => return None,
        };
        Some(Unit { cols, bytes, high, scales, rows })
    }
}

/// Bytes of a packed `[n, k]` matrix. `None` if the dtype is not packed, if `k` is not a multiple of the
/// quantisation block, and on overflow.
#[must_use]
pub fn packed_bytes(dtype: DType, n: usize, k: usize) -> Option<usize> {
    let unit = Unit::of(dtype).filter(|_| k.is_multiple_of(dtype.block_len()))?;
    n.div_ceil(TILE_ROWS).checked_mul(k.div_ceil(unit.cols))?.checked_mul(unit.bytes)
}

/// One lane's part: a sub-block of 32 elements.
#[derive(Clone, Copy, Debug, Default)]
struct Sub {
    /// Low four bits, two elements per byte (for Q8_0 eight bits, in all 32 bytes; for Q3_K two bits, four per byte).
    low: [u8; 32],
    /// Third bits of Q3_K, fifth bits, or the upper bits of Q6_K.
    high: [u8; 8],
    /// d and m, scale and minimum, or two scales.
    scales: [u8; 4],
    /// d and dmin of the quantisation block.
    row: [u8; 4],
}

/// Packs elements `i` and `16 + i` into one byte.
fn pair_nibbles(q: impl Fn(usize) -> u8) -> [u8; 32] {
    let mut low = [0; 32];
    (0..16).for_each(|i| low[i] = q(i) & 15 | (q(16 + i) & 15) << 4);
    low
}

/// Joins 32 numbers of two bits: bits 2 w of byte i are number 4 w + i, then 16 more.
fn join_crumbs(of: impl Fn(usize) -> u8) -> [u8; 8] {
    let mut bytes = [0; 8];
    (0..32).for_each(|i| bytes[i / 16 * 4 + i % 4] |= of(i) << (2 * (i % 16 / 4)));
    bytes
}

/// Number `i` of joined ones.
fn crumb(bytes: &[u8], i: usize) -> u8 {
    bytes[i / 16 * 4 + i % 4] >> (2 * (i % 16 / 4)) & 3
}

impl Sub {
    /// Reads sub-block `index` of a row in its file layout.
    fn from_file(dtype: DType, row: &[u8], index: usize) -> Sub {
        let size = dtype.block_bytes();
        let per_block = dtype.block_len() / SUB;
        let (block, s) = (&row[index / per_block * size..][..size], index % per_block);
        let mut sub = Sub::default();
        match dtype {
            DType::Q8_0 => {
                sub.scales[..2].copy_from_slice(&block[..2]);
                sub.low.copy_from_slice(&block[2..]);
            }
            DType::MXFP4 => {
                let scale = bf16::from_f32(quant::mxfp4_scale(block[0]));
                sub.scales[..2].copy_from_slice(&scale.to_le_bytes());
                sub.low[..16].copy_from_slice(&block[1..]);
            }
            DType::IQ4_XS => {
                let high = block[2 + s / 4] >> (2 * (s % 4)) & 3;
                let low = block[4 + s / 2] >> (4 * (s % 2)) & 15;
                sub.scales[0] = (low | high << 4).wrapping_sub(32);
                sub.row[..2].copy_from_slice(&block[..2]);
                sub.low[..16].copy_from_slice(&block[8 + 16 * s..][..16]);
            }
            DType::Q4_0 | DType::Q4_1 | DType::Q5_0 | DType::Q5_1 | DType::IQ4_NL => {
                let head = if matches!(dtype, DType::Q4_1 | DType::Q5_1) { 4 } else { 2 };
                sub.scales[..head].copy_from_slice(&block[..head]);
                if matches!(dtype, DType::Q5_0 | DType::Q5_1) {
                    sub.high[..4].copy_from_slice(&block[head..head + 4]);
                }
                sub.low[..16].copy_from_slice(&block[size - 16..]);
            }
            DType::Q3_K => {
                let qs = &block[32 + 32 * (s / 4)..][..32];
                sub.low[..8].copy_from_slice(&join_crumbs(|i| qs[i] >> (2 * (s % 4)) & 3));
                let bits = (0..32).fold(0_u32, |bits, i| bits | u32::from(block[i] >> s & 1) << i);
                sub.high[..4].copy_from_slice(&bits.to_le_bytes());
                for (half, scale) in sub.scales[..2].iter_mut().enumerate() {
                    let i = 2 * s + half;
                    let low = block[96 + i % 8] >> (4 * (i / 8)) & 15;
                    *scale = (low | (block[104 + i % 4] >> (2 * (i / 4)) & 3) << 4).wrapping_sub(32);
                }
                sub.row[..2].copy_from_slice(&block[108..]);
            }
            DType::Q4_K | DType::Q5_K => {
                sub.row.copy_from_slice(&block[..4]);
                let packed = &block[4..16];
                let (scale, min) = match s {
                    0..4 => (packed[s] & 63, packed[s + 4] & 63),
                    _ => (
                        packed[s + 4] & 15 | (packed[s - 4] >> 6) << 4,
                        packed[s + 4] >> 4 | (packed[s] >> 6) << 4,
                    ),
                };
                (sub.scales[0], sub.scales[1]) = (scale, min);
                let qs = &block[size - 128..];
                sub.low = pair_nibbles(|i| qs[32 * (s / 2) + i] >> (4 * (s % 2)));
                if dtype == DType::Q5_K {
                    let bits = (0..32).fold(0_u32, |bits, i| bits | u32::from(block[16 + i] >> s & 1) << i);
                    sub.high[..4].copy_from_slice(&bits.to_le_bytes());
                }
            }
            _ => {
                // Q6_K: halves of 128 elements; in each half, four sub-blocks share bytes.
                let (half, j) = (s / 4, s % 4);
                let (ql, qh) = (&block[64 * half..][..64], &block[128 + 32 * half..][..32]);
                sub.low = pair_nibbles(|i| ql[32 * (j % 2) + i] >> (4 * (j / 2)));
                sub.high = join_crumbs(|i| qh[i] >> (2 * j) & 3);
                sub.scales[..2].copy_from_slice(&block[192 + 2 * s..][..2]);
                sub.row[..2].copy_from_slice(&block[208..]);
            }
        }
        sub
    }

    /// Stores the sub-block in a unit; `c` is the plane index within a 256-element block.
    fn put(&self, dtype: DType, at: &Unit, unit: &mut [u8], c: usize, lane: usize) {
        let mut set = |start: usize, bytes: &[u8]| unit[start..start + bytes.len()].copy_from_slice(bytes);
        match dtype {
            DType::Q8_0 => {
                set(16 * lane, &self.low[..16]);
                set(at.high + 16 * lane, &self.low[16..]);
                set(at.scales + 2 * lane, &self.scales[..2]);
            }
            DType::Q3_K => {
                set(256 * c + 8 * lane, &self.low[..8]);
                set(at.high + 8 * lane + 4 * c, &self.high[..4]);
                set(at.scales + 4 * lane + 2 * c, &self.scales[..2]);
                set(at.rows + 2 * (lane / SUBS), &self.row[..2]);
            }
            DType::Q4_K | DType::Q5_K => {
                set(512 * c + 16 * lane, &self.low[..16]);
                if dtype == DType::Q5_K {
                    set(at.high + 8 * lane + 4 * c, &self.high[..4]);
                }
                set(at.scales + 4 * lane + 2 * c, &self.scales[..2]);
                set(at.rows + 4 * (lane / SUBS), &self.row);
            }
            DType::IQ4_XS => {
                set(512 * c + 16 * lane, &self.low[..16]);
                set(at.scales + 2 * lane + c, &self.scales[..1]);
                set(at.rows + 2 * (lane / SUBS), &self.row[..2]);
            }
            DType::Q6_K => {
                set(512 * c + 16 * lane, &self.low[..16]);
                set(at.high + 256 * c + 8 * lane, &self.high);
                set(at.scales + 4 * lane + 2 * c, &self.scales[..2]);
                set(at.rows + 2 * (lane / SUBS), &self.row[..2]);
            }
            _ => {
                let wide = if matches!(dtype, DType::Q4_1 | DType::Q5_1) { 4 } else { 2 };
                set(16 * lane, &self.low[..16]);
                if at.high != at.scales {
                    set(at.high + 4 * lane, &self.high[..4]);
                }
                set(at.scales + wide * lane, &self.scales[..wide]);
            }
        }
    }

    /// Inverse of `put`.
    fn get(dtype: DType, at: &Unit, unit: &[u8], c: usize, lane: usize) -> Sub {
        let mut sub = Sub::default();
        let get = |to: &mut [u8], start: usize| to.copy_from_slice(&unit[start..start + to.len()]);
        match dtype {
            DType::Q8_0 => {
                get(&mut sub.low[..16], 16 * lane);
                get(&mut sub.low[16..], at.high + 16 * lane);
                get(&mut sub.scales[..2], at.scales + 2 * lane);
            }
            DType::Q3_K => {
                get(&mut sub.low[..8], 256 * c + 8 * lane);
                get(&mut sub.high[..4], at.high + 8 * lane + 4 * c);
                get(&mut sub.scales[..2], at.scales + 4 * lane + 2 * c);
                get(&mut sub.row[..2], at.rows + 2 * (lane / SUBS));
            }
            DType::Q4_K | DType::Q5_K => {
                get(&mut sub.low[..16], 512 * c + 16 * lane);
                if dtype == DType::Q5_K {
                    get(&mut sub.high[..4], at.high + 8 * lane + 4 * c);
                }
                get(&mut sub.scales[..2], at.scales + 4 * lane + 2 * c);
                get(&mut sub.row, at.rows + 4 * (lane / SUBS));
            }
            DType::IQ4_XS => {
                get(&mut sub.low[..16], 512 * c + 16 * lane);
                get(&mut sub.scales[..1], at.scales + 2 * lane + c);
                get(&mut sub.row[..2], at.rows + 2 * (lane / SUBS));
            }
            DType::Q6_K => {
                get(&mut sub.low[..16], 512 * c + 16 * lane);
                get(&mut sub.high, at.high + 256 * c + 8 * lane);
                get(&mut sub.scales[..2], at.scales + 4 * lane + 2 * c);
                get(&mut sub.row[..2], at.rows + 2 * (lane / SUBS));
            }
            _ => {
                let wide = if matches!(dtype, DType::Q4_1 | DType::Q5_1) { 4 } else { 2 };
                get(&mut sub.low[..16], 16 * lane);
                if at.high != at.scales {
                    get(&mut sub.high[..4], at.high + 4 * lane);
                }
                get(&mut sub.scales[..wide], at.scales + wide * lane);
            }
        }
        sub
    }

    /// Decodes the values with the same arithmetic as the codecs of refrain-tensor.
    fn values(&self, dtype: DType) -> [f32; SUB] {
        let half = |bytes: [u8; 2]| f16::from_le_bytes(bytes).to_f32();
        let [a, b] = [half([self.scales[0], self.scales[1]]), half([self.scales[2], self.scales[3]])];
        let [d, dmin] = [half([self.row[0], self.row[1]]), half([self.row[2], self.row[3]])];
        let index = |i: usize| usize::from(self.low[i % 16] >> (i / 16 * 4) & 15);
        let nibble = |i: usize| f32::from(self.low[i % 16] >> (i / 16 * 4) & 15);
        let bits = u32::from_le_bytes([self.high[0], self.high[1], self.high[2], self.high[3]]);
        let fifth = |i: usize| nibble(i) + f32::from((bits >> i & 1) as u8) * 16.0;
        std::array::from_fn(|i| match dtype {
            DType::Q8_0 => a * f32::from(self.low[i] as i8),
            DType::Q4_0 => a * (nibble(i) - 8.0),
            DType::Q4_1 => a * nibble(i) + b,
            DType::Q5_0 => a * (fifth(i) - 16.0),
            DType::Q5_1 => a * fifth(i) + b,
            DType::IQ4_NL => a * f32::from(quant::IQ4_NL_VALUES[index(i)]),
            DType::IQ4_XS => d * f32::from(self.scales[0] as i8) * f32::from(quant::IQ4_NL_VALUES[index(i)]),
            DType::MXFP4 => {
                let scale = bf16::from_le_bytes([self.scales[0], self.scales[1]]).to_f32();
                scale * f32::from(quant::MXFP4_VALUES[index(i)])
            }
            DType::Q3_K => {
                let q = crumb(&self.low, i) | ((bits >> i & 1) as u8) << 2;
                d * f32::from(self.scales[i / 16] as i8) * (f32::from(q) - 4.0)
            }
            DType::Q4_K => d * f32::from(self.scales[0]) * nibble(i) - dmin * f32::from(self.scales[1]),
            DType::Q5_K => d * f32::from(self.scales[0]) * fifth(i) - dmin * f32::from(self.scales[1]),
            _ => {
                let q = nibble(i) + f32::from(crumb(&self.high, i)) * 16.0;
                d * f32::from(self.scales[i / 16] as i8) * (q - 32.0)
            }
        })
    }
}

/// Packs a matrix `[n, k]` from its file layout. `None` if [`packed_bytes`] returns `None` or `file` is too
/// short.
#[must_use]
pub fn pack(dtype: DType, file: &[u8], n: usize, k: usize) -> Option<Vec<u8>> {
    let (unit, bytes) = (Unit::of(dtype)?, packed_bytes(dtype, n, k)?);
    let row_bytes = dtype.bytes_for(k)?;
    let file = file.get(..n.checked_mul(row_bytes)?)?;
    let mut out = vec![0; bytes];
    let n_units = k.div_ceil(unit.cols);
    for (row, from) in file.chunks_exact(row_bytes.max(1)).enumerate() {
        for index in 0..k / SUB {
            let (u, within) = (index / (unit.cols / SUB), index % (unit.cols / SUB));
            let (c, lane) = (within / SUBS, SUBS * (row % TILE_ROWS) + within % SUBS);
            let start = (row / TILE_ROWS * n_units + u) * unit.bytes;
            let to = &mut out[start..start + unit.bytes];
            Sub::from_file(dtype, from, index).put(dtype, &unit, to, c, lane);
        }
    }
    Some(out)
}

/// Decodes row `row` of a packed matrix. Elements of `out` past the last whole sub-block stay unchanged.
pub(crate) fn unpack_row(dtype: DType, packed: &[u8], row: usize, k: usize, out: &mut [f32]) -> Option<()> {
    let unit = Unit::of(dtype)?;
    let n_units = k.div_ceil(unit.cols);
    for (index, out) in out.chunks_exact_mut(SUB).take(k / SUB).enumerate() {
        let (u, within) = (index / (unit.cols / SUB), index % (unit.cols / SUB));
        let (c, lane) = (within / SUBS, SUBS * (row % TILE_ROWS) + within % SUBS);
        let start = (row / TILE_ROWS * n_units + u) * unit.bytes;
        let bytes = packed.get(start..start + unit.bytes)?;
        out.copy_from_slice(&Sub::get(dtype, &unit, bytes, c, lane).values(dtype));
    }
    Some(())
}

/// Packs rows from their file layout.
#[derive(Clone, Copy, Debug)]
pub struct PackArgs<'a> {
    /// `[n, k]` in the file layout.
    pub file: Buf,
    /// One of [`PACKED_DTYPES`].
    pub dtype: DType,
    /// [`packed_bytes`] of `n` rows, 16-byte aligned.
    pub packed: Buf,
    /// Number of rows. All chunks of a matrix but the last must be whole tiles of eight.
    pub n: usize,
    /// Number of columns.
    pub k: usize,
    /// Name of the step that the launch belongs to.
    pub step: &'a str,
}

impl Kernels {
    /// Builds the launch for [`PackArgs`].
    pub fn pack(&self, a: &PackArgs<'_>) -> Result<Launch, KernelError> {
        let shape = [("n", a.n), ("k", a.k)];
        let case = OpCase { op: "pack", dtype: a.dtype, shape: &shape };
        case.sizes()?;
        let block_len = a.dtype.block_len();
        crate::require!(case, PACKED_DTYPES.contains(&a.dtype), "this dtype has no packed layout");
        crate::require!(
            case,
            a.k.is_multiple_of(block_len),
            "k must be a multiple of the quantisation block, {block_len}"
        );
        let file = a.n.checked_mul(a.k).and_then(|n| a.dtype.bytes_for(n));
        let grid = case.u32("n", a.n)?.div_ceil(TILE_ROWS as u32);
        Ok(self
            .launch(&name(a.dtype), grid, 256)?
            .step(a.step)
            .write(case.buf("packed", a.packed, packed_bytes(a.dtype, a.n, a.k), 16)?)
            .read(case.buf("file", a.file, file, 16)?)
            .baked(Baked(a.n as u32))
            .baked(Baked(case.u32("k", a.k)?))
            .vouch(&case))
    }

    /// Requests the kernels of [`Kernels::pack`] for the packed dtypes among these. Lets
    /// [`Kernels::prepared`] compile them before any memory exists to describe launches with.
    pub fn request_pack(&self, dtypes: impl IntoIterator<Item = DType>) -> Result<(), KernelError> {
        let packed = dtypes.into_iter().filter(|dtype| PACKED_DTYPES.contains(dtype));
        packed.into_iter().try_for_each(|dtype| self.get(&name(dtype)).map(drop))
    }
}

fn name(dtype: DType) -> String {
    format!("pack_{}", lowercase(dtype))
}

pub(crate) fn entries(all: &mut Vec<KernelEntry>) {
    for dtype in PACKED_DTYPES {
        let entry = KernelEntry::new(KernelFamily::Pack, name(dtype), &[P, P, W, W], move |k| twin(k, dtype));
        all.push(entry.unit(&lowercase(dtype)));
    }
}

fn twin(kernel: &mut SimKernel<'_>, dtype: DType) -> KernelResult {
    let (n, k) = (count(kernel, 2)?, count(kernel, 3)?);
    let bytes = dtype.bytes_for(n * k).ok_or_else(|| fault("a row ends inside a quantisation block"))?;
    let packed = {
        let file = kernel.view::<u8>(kernel.ptr(1)?, bytes)?;
        pack(dtype, &file, n, k).ok_or_else(|| fault("the dtype has no packed layout"))?
    };
    kernel.write(kernel.ptr(0)?, &packed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use refrain_testkit::{Rng, encode};

    #[test]
    fn packed_rows_decode_to_the_same_bits_as_the_file() {
        let mut rng = Rng::new(5);
        for dtype in PACKED_DTYPES {
            for [n, blocks] in [[1, 1], [8, 1], [9, 3], [23, 5]] {
                let k = blocks * dtype.block_len();
                let values: Vec<f32> = (0..n * k).map(|_| rng.normal()).collect();
                let file = encode(dtype, &values);
                let packed = pack(dtype, &file, n, k).unwrap();
                assert_eq!(packed.len(), packed_bytes(dtype, n, k).unwrap());
                let mut want = vec![0.0; n * k];
                quant::dequantize(dtype, &file, &mut want).unwrap();
                for row in 0..n {
                    let mut got = vec![f32::NAN; k];
                    unpack_row(dtype, &packed, row, k, &mut got).unwrap();
                    assert_eq!(got, want[row * k..][..k], "{dtype} [{n}, {k}], row {row}");
                }
            }
        }
    }

    #[test]
    fn a_short_file_and_partial_quantisation_blocks_are_refused() {
        assert!(pack(DType::Q8_0, &[0; 33], 1, 32).is_none());
        assert!(packed_bytes(DType::Q4_K, 8, 128).is_none());
        assert!(packed_bytes(DType::F32, 8, 128).is_none());
        assert!(packed_bytes(DType::Q8_0, usize::MAX, 1 << 20).is_none());
    }
}
