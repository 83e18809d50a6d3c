//! Two to sixteen activation rows times packed weights, each weight read once.

use bytemuck::{Pod, Zeroable};
use refrain_driver::sim::{KernelResult, SimKernel};
use refrain_driver::{Baked, Buf, Launch};
use refrain_tensor::DType;

use crate::card::Card;
use crate::error::{KernelError, OpCase};
use crate::load::Kernels;
use crate::packed::{PACKED_DTYPES, TILE_ROWS, Unit, packed_bytes, unpack_row};
use crate::registry::{KernelEntry, P, W, lowercase};
use crate::source::KernelFamily;
use crate::tuning::FewTuning;
use crate::twin::{count, fault};
use crate::vouch::Vouch;

/// Maximum number of rows of [`FewArgs`].
pub const MAX_FEW_ROWS: usize = 16;
/// Maximum number of weights per launch.
pub const MAX_FEW_PARTS: usize = 3;

const SUB: usize = 32;
/// Rows are padded to the widest unit.
const PAD: usize = 256;
/// Sub-blocks that a thread block rounds.
const BLOCK_SUBS: usize = 32;

/// Number of rows that the kernel multiplies at once; rows past `m` are zeros.
const fn padded(m: usize) -> usize {
    if m <= 8 { 8 } else { MAX_FEW_ROWS }
}

const fn padded_for(m: usize, is_fixed: bool) -> usize {
    if is_fixed { MAX_FEW_ROWS } else { padded(m) }
}

/// Sub-blocks per row.
const fn subs(k: usize) -> usize {
    k.next_multiple_of(PAD) / SUB
}

/// Bytes of `m` rounded rows of `k` columns; `None` on overflow.
#[must_use]
pub fn few_bytes(m: usize, k: usize) -> Option<usize> {
    let k = k.checked_next_multiple_of(PAD)?;
    (k / SUB).checked_mul((SUB + 8) * padded(m))
}

/// Rounds rows to 8 bits in blocks of 32; several [`FewArgs`] can share the result.
#[derive(Clone, Copy, Debug)]
pub struct FewRowsArgs<'a> {
    /// `[m, k]` F32, contiguous.
    pub x: Buf,
    /// Output of [`few_bytes`] bytes.
    pub rows: Buf,
    /// Number of rows, at most [`MAX_FEW_ROWS`].
    pub m: usize,
    /// Number of columns, a multiple of 32.
    pub k: usize,
    /// Uses the kernel of [`MAX_FEW_ROWS`] rows for any `m`, so that one binary computes every row. The output then
    /// has the size for that many rows.
    pub is_fixed: bool,
    /// Name of the step that the launch belongs to.
    pub step: &'a str,
}

/// A weight of [`FewArgs`] with its output.
#[derive(Clone, Copy, Debug)]
pub struct FewPart {
    /// `[n, k]`, packed.
    pub w: Buf,
    /// `[m, n]` F32.
    pub y: Buf,
    /// Rows of `w`.
    pub n: usize,
}

/// `y = x . w^T` for one or more packed `w` of one dtype.
#[derive(Clone, Copy, Debug)]
pub struct FewArgs<'a> {
    /// Output of [`FewRowsArgs`].
    pub rows: Buf,
    /// Dtype of all weights, one of [`PACKED_DTYPES`].
    pub dtype: DType,
    /// At most [`MAX_FEW_PARTS`] weights.
    pub parts: &'a [FewPart],
    /// Rows of x, at most [`MAX_FEW_ROWS`].
    pub m: usize,
    /// Columns of x and of every `w`, in whole quantisation blocks.
    pub k: usize,
    /// As in the [`FewRowsArgs`] of the rows.
    pub is_fixed: bool,
    /// Name of the step that the launch belongs to.
    pub step: &'a str,
}

#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
struct FewParams {
    m: u32,
    k: u32,
    n: [u32; MAX_FEW_PARTS],
}

impl Kernels {
    /// Builds the launch for [`FewRowsArgs`].
    pub fn few_rows(&self, a: &FewRowsArgs<'_>) -> Result<Launch, KernelError> {
        let shape = [("m", a.m), ("k", a.k)];
        let case = OpCase { op: "few_rows", dtype: DType::F32, shape: &shape };
        case.sizes()?;
        crate::require!(case, a.m <= MAX_FEW_ROWS, "the kernel takes at most {MAX_FEW_ROWS} rows");
        crate::require!(case, a.k.is_multiple_of(SUB), "k must be a multiple of {SUB}");
        let x_bytes = a.m.checked_mul(a.k).and_then(|n| n.checked_mul(4));
        let padded = padded_for(a.m, a.is_fixed);
        let grid = [case.u32("k", subs(a.k).div_ceil(BLOCK_SUBS))?, padded as u32];
        Ok(self
            .launch(&rows_name(padded), grid, 4 * BLOCK_SUBS as u32)?
            .step(a.step)
            .write(case.buf("rows", a.rows, few_bytes(padded, a.k), 16)?)
            .read(case.buf("x", a.x, x_bytes, 16)?)
            .baked(Baked(case.u32("m", a.m)?))
            .baked(Baked(case.u32("k", a.k)?))
            .baked(Baked(case.u32("k", subs(a.k))?))
            .vouch(&case))
    }

    /// Builds the launch for [`FewArgs`].
    pub fn few(&self, a: &FewArgs<'_>) -> Result<Launch, KernelError> {
        let n = a.parts.iter().fold(0_usize, |n, part| n.saturating_add(part.n));
        let shape = [("m", a.m), ("n", n), ("k", a.k)];
        let case = OpCase { op: "few", dtype: a.dtype, shape: &shape };
        case.sizes()?;
        let Some(unit) = Unit::of(a.dtype) else {
            return Err(case.refuse("no kernel multiplies several rows with this dtype".to_owned()));
        };
        crate::require!(case, a.m <= MAX_FEW_ROWS, "the kernel takes at most {MAX_FEW_ROWS} rows");
        let n_parts = a.parts.len();
        crate::require!(
            case,
            n_parts <= MAX_FEW_PARTS,
            "{n_parts} matrices, at most {MAX_FEW_PARTS} fit in one launch"
        );
        crate::require!(case, a.parts.iter().all(|p| p.n > 0), "one of the matrices is empty");
        let block_len = a.dtype.block_len();
        crate::require!(
            case,
            a.k.is_multiple_of(block_len),
            "k must be a multiple of the quantisation block, {block_len}"
        );
        let padded = padded_for(a.m, a.is_fixed);
        // A thread block processes two tiles at a time.
        let pairs: usize = a.parts.iter().map(|p| p.n.div_ceil(2 * TILE_ROWS)).sum();
        let grid = case.u32("n", pairs.min(2 * self.card().n_sms))?;
        let mut launch = self
            .launch(&name(padded, a.dtype), grid, 32 * self.card().tuning.few.warps as u32)?
            .shared(ring_bytes(self.card(), unit))
            .step(a.step);
        for i in 0..MAX_FEW_PARTS {
            launch = match a.parts.get(i) {
                Some(part) => launch.write(case.words("y", part.y, &[a.m, part.n])?),
                None => launch.null(),
            };
        }
        launch = launch.read(case.buf("rows", a.rows, few_bytes(padded, a.k), 16)?);
        let mut params = FewParams { m: case.u32("m", a.m)?, k: case.u32("k", a.k)?, n: [0; MAX_FEW_PARTS] };
        for i in 0..MAX_FEW_PARTS {
            launch = match a.parts.get(i) {
                Some(part) => {
                    params.n[i] = case.u32("n", part.n)?;
                    launch.read(case.buf("w", part.w, packed_bytes(a.dtype, part.n, a.k), 16)?)
                }
                None => launch.null(),
            };
        }
        Ok(launch.baked(Baked(params)).vouch(&case))
    }
}

/// Shared memory per block: one ring per warp, each slot holding the units of two tiles.
fn ring_bytes(card: &Card, unit: Unit) -> u32 {
    let FewTuning { warps, stages } = card.tuning.few;
    (warps * stages * 2 * unit.bytes) as u32
}

fn rows_name(m: usize) -> String {
    format!("few_rows_m{m}_f32")
}

fn name(m: usize, dtype: DType) -> String {
    format!("few_m{m}_{}", lowercase(dtype))
}

fn variants() -> impl Iterator<Item = (usize, DType)> {
    [8, 16].into_iter().flat_map(|m| PACKED_DTYPES.map(|dtype| (m, dtype)))
}

pub(crate) fn entries(all: &mut Vec<KernelEntry>) {
    for m in [8, 16] {
        let entry =
            KernelEntry::new(KernelFamily::Few, rows_name(m), &[P, P, W, W, W], move |k| rows_twin(k, m));
        all.push(entry.unit("rows"));
    }
    for (m, dtype) in variants() {
        let params = [P, P, P, P, P, P, P, size_of::<FewParams>()];
        let entry = KernelEntry::new(KernelFamily::Few, name(m, dtype), &params, move |k| twin(k, m, dtype));
        let ring = move |card: &Card| Unit::of(dtype).map_or(0, |unit| ring_bytes(card, unit));
        all.push(entry.unit(&lowercase(dtype)).shared(ring));
    }
}

/// Position of word `w` among the eight words of a row's sub-block.
const fn word_index(w: usize) -> usize {
    if w < 4 { 2 * w } else { 2 * (w - 4) + 1 }
}

fn rows_twin(kernel: &mut SimKernel<'_>, padded: usize) -> KernelResult {
    let (m, k, subs) = (count(kernel, 2)?, count(kernel, 3)?, count(kernel, 4)?);
    let x: Vec<f32> = kernel.read(kernel.ptr(1)?, m * k)?;
    let mut out = vec![0_u8; subs * (SUB + 8) * padded];
    for (row, x) in x.chunks_exact(k).enumerate() {
        for (sub, block) in x.chunks_exact(SUB).enumerate() {
            let to = &mut out[sub * (SUB + 8) * padded..][..(SUB + 8) * padded];
            let (q, d) = round(block);
            for (w, word) in q.chunks_exact(4).enumerate() {
                let at = SUB * row + 4 * word_index(w);
                to[at..at + 4].copy_from_slice(bytemuck::cast_slice(word));
            }
            let sum: i32 = q.iter().map(|q| i32::from(*q)).sum();
            let scale = [d, d * sum as f32];
            to[SUB * padded + 8 * row..][..8].copy_from_slice(bytemuck::cast_slice(&scale));
        }
    }
    kernel.write(kernel.ptr(0)?, &out)
}

/// Rounds 32 numbers to signed bytes with a scale.
pub(crate) fn round(block: &[f32]) -> ([i8; SUB], f32) {
    let max_abs = block.iter().map(|v| v.to_bits() & 0x7fff_ffff).max().unwrap_or(0);
    let max_abs = f32::from_bits(max_abs);
    if max_abs < 1e-35 {
        return ([0; SUB], 0.0);
    }
    let mut q = [0; SUB];
    q.iter_mut().zip(block).for_each(|(q, v)| *q = (v * (127.0 / max_abs)).round_ties_even() as i8);
    (q, if max_abs < 8e37 { max_abs * (1.0 / 127.0) } else { f32::NAN })
}

/// Converts row `row` of rounded rows back to floats.
fn unround(rows: &[u8], padded: usize, row: usize, k: usize) -> Vec<f32> {
    let value = |i: usize| {
        let at = &rows[i / SUB * (SUB + 8) * padded..];
        let (word, byte) = (i % SUB / 4, i % 4);
        let q = at[SUB * row + 4 * word_index(word) + byte] as i8;
        let d: f32 = bytemuck::pod_read_unaligned(&at[SUB * padded + 8 * row..][..4]);
        f32::from(q) * d
    };
    (0..k).map(value).collect()
}

fn twin(kernel: &mut SimKernel<'_>, padded: usize, dtype: DType) -> KernelResult {
    let p: FewParams = kernel.arg(7)?;
    let (m, k) = (p.m as usize, p.k as usize);
    let partial = || fault("a row ends inside a quantisation block");
    let mut parts = Vec::with_capacity(MAX_FEW_PARTS);
    for (i, n) in p.n.into_iter().map(|n| n as usize).enumerate().filter(|(_, n)| *n > 0) {
        let bytes = packed_bytes(dtype, n, k).ok_or_else(partial)?;
        parts.push((kernel.ptr(i)?, kernel.ptr(4 + i)?, n, bytes));
    }
    kernel
        .before_wait(|k| parts.iter().try_for_each(|&(_, w, _, bytes)| k.view::<u8>(w, bytes).map(|_| ())))?;
    let rows: Vec<u8> = kernel.read(kernel.ptr(3)?, subs(k) * (SUB + 8) * padded)?;
    let x: Vec<Vec<f32>> = (0..m).map(|row| unround(&rows, padded, row, k)).collect();
    for (y_at, w_at, n, bytes) in parts {
        let mut y = vec![0.0_f32; m * n];
        {
            let w = kernel.view::<u8>(w_at, bytes)?;
            let mut row = vec![0.0; k];
            for j in 0..n {
                unpack_row(dtype, &w, j, k, &mut row).ok_or_else(partial)?;
                for (i, x) in x.iter().enumerate() {
                    let dot: f64 = x.iter().zip(&row).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum();
                    y[i * n + j] = dot as f32;
                }
            }
        }
        kernel.write(y_at, &y)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tuning::Tuning;

    #[test]
    fn words_of_a_sub_block_are_permuted_so_that_those_of_a_lane_are_adjacent() {
        let mut indices: Vec<usize> = (0..8).map(word_index).collect();
        assert!((0..4).all(|w| indices[w].is_multiple_of(2) && indices[w + 4] == indices[w] + 1));
        indices.sort_unstable();
        assert_eq!(indices, [0, 1, 2, 3, 4, 5, 6, 7]);
    }

    #[test]
    fn rings_fit_the_smallest_supported_gpus() {
        // 99 KiB on compute capability 8.6, minus the sums of a tile pair.
        for dtype in PACKED_DTYPES {
            for tuning in Tuning::ALL {
                let card = Card::with_shared(99 << 10, tuning);
                let unit = Unit::of(dtype).unwrap();
                assert!(ring_bytes(&card, unit) <= (99 << 10) - (16 << 10), "{dtype}");
            }
        }
    }
}
