//! Row and element gathers, padding, and rotary embedding, for every float dtype.

use bytemuck::{Pod, Zeroable};
use refrain_driver::sim::{KernelResult, SimKernel};
use refrain_driver::{Baked, Buf, Launch};
use refrain_graph::{Op, Rope, RopeStyle, TrainOp};
use refrain_tensor::DType;

use crate::error::{KernelError, OpCase};
use crate::load::Kernels;
use crate::registry::{KernelEntry, P, W, lowercase};
use crate::source::KernelFamily;
use crate::twin::{count, fault};
use crate::typed::{FLOATS, Typed, dtype_of, is_aligned, named, rows_are_wide, run_typed};
use crate::view::{BufView, RowLayout};
use crate::vouch::Vouch;

/// `y[i] = table[ids[i]]`, converted to another dtype; a negative id gives zeros.
#[derive(Clone, Copy, Debug)]
pub struct TypedGatherArgs<'a> {
    /// `[n_rows, d]`, dense.
    pub table: Buf,
    /// F32, F16 or BF16.
    pub table_dtype: DType,
    /// `[n_ids]` I32, in device memory, read at run time.
    pub ids: Buf,
    /// `[n_ids, d]`
    pub y: Buf,
    /// F32, F16 or BF16.
    pub dtype: DType,
    /// Rows of the table.
    pub n_rows: usize,
    /// Columns of the table.
    pub d: usize,
    /// Number of gathered rows.
    pub n_ids: usize,
    /// Name of the step that the launch belongs to.
    pub step: &'a str,
}

/// `y[i] = x[i, ids[i]]`; a negative id gives 0.
#[derive(Clone, Copy, Debug)]
pub struct PickArgs<'a> {
    /// `[n_rows, n_cols]` floats; rows are contiguous.
    pub x: BufView,
    /// `[n_rows]` I32, in device memory, read at run time.
    pub ids: Buf,
    /// `[n_rows]` of the same dtype.
    pub y: Buf,
    /// Name of the step that the launch belongs to.
    pub step: &'a str,
}

/// `y[i, ids[i]] = x[i]`, and zeros in all other columns.
#[derive(Clone, Copy, Debug)]
pub struct PlaceColumnsArgs<'a> {
    /// `[n_rows]` I32, in device memory, read at run time.
    pub ids: Buf,
    /// `[n_rows]`, dense.
    pub x: Buf,
    /// F32, F16 or BF16.
    pub dtype: DType,
    /// `[n_rows, width]` of the same dtype.
    pub y: Buf,
    /// Number of rows.
    pub n_rows: usize,
    /// Columns of the result.
    pub width: usize,
    /// Name of the step that the launch belongs to.
    pub step: &'a str,
}

/// `y` is `x` padded with zeros along one dimension.
#[derive(Clone, Copy, Debug)]
pub struct PadArgs<'a> {
    /// F32, F16 or BF16. Contiguous from `axis` on; one common stride for all outer dimensions.
    pub x: BufView,
    /// Padded dimension.
    pub axis: usize,
    /// Number of zeros before `x`.
    pub before: usize,
    /// Number of zeros after `x`.
    pub after: usize,
    /// Contiguous, of the same dtype.
    pub y: Buf,
    /// Name of the step that the launch belongs to.
    pub step: &'a str,
}

/// `y` is `x` rotated by each row's position, or rotated back. Rows with a negative position are copied
/// unchanged.
#[derive(Clone, Copy, Debug)]
pub struct TypedRopeArgs<'a> {
    /// Rotated pairs, their number and the magnitude factor.
    pub rope: Rope,
    /// Rotates by the negative angle.
    pub is_inverse: bool,
    /// `[n, n_heads, head_dim]` floats; each head is contiguous.
    pub x: BufView,
    /// `[n]` I32, in device memory, read at run time.
    pub positions: Buf,
    /// `[n_dims / 2]` F32.
    pub inv_freq: Buf,
    /// `[n, n_heads, head_dim]` of the same dtype; may alias `x` if that is contiguous.
    pub y: Buf,
    /// Number of rows.
    pub n: usize,
    /// Heads per row.
    pub n_heads: usize,
    /// Elements per head.
    pub head_dim: usize,
    /// Name of the step that the launch belongs to.
    pub step: &'a str,
}

/// Rows that a block gathers.
const GATHERED: usize = 8;
const BLOCK: u32 = 256;
const ROPE_BLOCK: u32 = 128;
/// Columns per block where rows are divided.
const CHUNK: usize = 2048;
/// Heads that a thread loads at once.
const HEADS: usize = 4;
/// Threads that keep a large GPU busy.
const MANY_THREADS: usize = 1 << 15;

#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
struct RopeHeads {
    n: u32,
    n_heads: u32,
    head_dim: u32,
    n_dims: u32,
    /// Whether rows are aligned and the heads of a row evenly strided.
    wide: u32,
    n_each: u32,
    magnitude: f32,
    direction: f32,
}

#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
struct Padding {
    length: u32,
    before: u32,
    total: u32,
    stride: u32,
    wide: u32,
    ty: u32,
}

impl Kernels {
    /// Builds the launch for [`TypedGatherArgs`]. An id past the table gives a row of NaN on a GPU; the
    /// simulated device faults.
    pub fn typed_gather(&self, a: &TypedGatherArgs<'_>) -> Result<Launch, KernelError> {
        let shape = [("n_ids", a.n_ids), ("n_rows", a.n_rows), ("d", a.d)];
        let case = OpCase { op: "gather_rows", dtype: a.dtype, shape: &shape };
        case.sizes()?;
        crate::require!(
            case,
            FLOATS.contains(&a.dtype) && FLOATS.contains(&a.table_dtype),
            "no kernel converts {} to {}",
            a.table_dtype,
            a.dtype
        );
        let table = case.elements("table", a.table, a.table_dtype, &[a.n_rows, a.d])?;
        let y = case.elements("y", a.y, a.dtype, &[a.n_ids, a.d])?;
        let wide = is_aligned(table) && is_aligned(y) && a.d.is_multiple_of(8);
        Ok(self
            .launch("move_gather", a.n_ids.div_ceil(GATHERED) as u32, BLOCK)?
            .step(a.step)
            .write(y)
            .read(table)
            .read(case.words("ids", a.ids, &[a.n_ids])?)
            .baked(Baked(a.n_rows as u32))
            .baked(Baked(a.d as u32))
            .baked(Baked(u32::from(wide)))
            .baked(Baked(case.code("y", a.dtype)?))
            .baked(Baked(case.code("table", a.table_dtype)?))
            .baked(Baked(a.n_ids as u32))
            .vouch(&case))
    }

    /// Builds the launch for [`PickArgs`]. An id past the row gives NaN on a GPU; the simulated device
    /// faults.
    pub fn pick(&self, a: &PickArgs<'_>) -> Result<Launch, KernelError> {
        let n_cols = a.x.layout.shape().dim_back(0);
        let n_rows = a.x.layout.shape().n_elements() / n_cols.max(1);
        let shape = [("n_rows", n_rows), ("n_cols", n_cols)];
        let case = OpCase { op: "pick", dtype: a.x.dtype, shape: &shape };
        case.sizes()?;
        let (x, rows) = case.float_rows("x", &a.x, [n_rows, n_cols])?;
        Ok(self
            .launch("move_pick", (n_rows as u32).div_ceil(BLOCK), BLOCK)?
            .step(a.step)
            .write(case.elements("y", a.y, a.x.dtype, &[n_rows])?)
            .read(x)
            .read(case.words("ids", a.ids, &[n_rows])?)
            .baked(Baked(rows))
            .baked(Baked(n_rows as u32))
            .baked(Baked(n_cols as u32))
            .baked(Baked(case.code("x", a.x.dtype)?))
            .vouch(&case))
    }

    /// Builds the launch for [`PlaceColumnsArgs`]. An id past the row is ignored on a GPU; the simulated
    /// device faults.
    pub fn place_columns(&self, a: &PlaceColumnsArgs<'_>) -> Result<Launch, KernelError> {
        let shape = [("n_rows", a.n_rows), ("width", a.width)];
        let case = OpCase { op: "place_columns", dtype: a.dtype, shape: &shape };
        case.sizes()?;
        crate::require!(case, FLOATS.contains(&a.dtype), "x must be F32, F16 or BF16");
        let y = case.elements("y", a.y, a.dtype, &[a.n_rows, a.width])?;
        let n_blocks = a.n_rows.saturating_mul(a.width.div_ceil(CHUNK));
        Ok(self
            .launch("move_place", case.u32("the number of blocks", n_blocks)?, BLOCK)?
            .step(a.step)
            .write(y)
            .read(case.words("ids", a.ids, &[a.n_rows])?)
            .read(case.elements("x", a.x, a.dtype, &[a.n_rows])?)
            .baked(Baked(a.width as u32))
            .baked(Baked(u32::from(is_aligned(y) && a.width.is_multiple_of(8))))
            .baked(Baked(case.code("x", a.dtype)?))
            .vouch(&case))
    }

    /// Builds the launch for [`PadArgs`].
    pub fn pad(&self, a: &PadArgs<'_>) -> Result<Launch, KernelError> {
        let dims = a.x.layout.shape();
        let dims = dims.dims();
        let axis = a.axis.min(dims.len().saturating_sub(1));
        let n_outer: usize = dims[..axis].iter().product();
        let inner: usize = dims[axis + 1..].iter().product();
        let [before, after, length] = [a.before, a.after, dims[axis]].map(|n| n.saturating_mul(inner));
        let total = before.saturating_add(length).saturating_add(after);
        let shape = [("n_outer", n_outer), ("length", length), ("total", total)];
        let case = OpCase { op: "pad", dtype: a.x.dtype, shape: &shape };
        case.sizes()?;
        crate::require!(case, FLOATS.contains(&a.x.dtype), "x must be F32, F16 or BF16");
        let [stride, inner_stride] = case.strides_at_axis(&a.x.layout, axis)?;
        crate::require!(
            case,
            dims[axis] == 1 || inner_stride as usize == inner,
            "strides of {:?} from dimension {axis} on; copy it first",
            a.x.layout.strides()
        );
        let x = case.extent("x", &a.x)?;
        let y = case.elements("y", a.y, a.x.dtype, &[n_outer, total])?;
        let is_wide = is_aligned(x)
            && is_aligned(y)
            && [before, length, total, stride as usize].iter().all(|n| n.is_multiple_of(8));
        let padding = Padding {
            length: length as u32,
            before: case.u32("before", before)?,
            total: total as u32,
            stride,
            wide: u32::from(is_wide),
            ty: case.code("x", a.x.dtype)?,
        };
        let n_blocks = n_outer.saturating_mul(total.div_ceil(CHUNK));
        Ok(self
            .launch("move_pad", case.u32("the number of blocks", n_blocks)?, BLOCK)?
            .step(a.step)
            .write(y)
            .read(x)
            .baked(Baked(padding))
            .vouch(&case))
    }

    /// Builds the launch for [`TypedRopeArgs`].
    pub fn typed_rope(&self, a: &TypedRopeArgs<'_>) -> Result<Launch, KernelError> {
        let shape = [("n", a.n), ("n_heads", a.n_heads), ("head_dim", a.head_dim)];
        let case = OpCase { op: "rope", dtype: a.x.dtype, shape: &shape };
        case.sizes()?;
        let n_dims = a.rope.n_dims;
        crate::require!(
            case,
            n_dims.is_multiple_of(2) && n_dims > 0 && n_dims <= a.head_dim,
            "n_dims is {n_dims}, must be even and at most {}",
            a.head_dim
        );
        let n_rows = a.n.saturating_mul(a.n_heads);
        let (x, rows) = case.float_rows("x", &a.x, [n_rows, a.head_dim])?;
        let y = case.elements("y", a.y, a.x.dtype, &[a.n, a.n_heads, a.head_dim])?;
        let wide = rows_are_wide(x, rows, a.head_dim) && is_aligned(y) && n_dims.is_multiple_of(8);
        // One thread per group of rotated pairs and heads, and one per remaining element, which is only
        // copied.
        let n_items = n_dims / 2 / if wide { 4 } else { 1 } + (a.head_dim - n_dims);
        let n_each = heads_each(n_rows.saturating_mul(n_items), a.n_heads);
        let n_threads = a.n.saturating_mul(a.n_heads.div_ceil(n_each)).saturating_mul(n_items);
        let n_threads = case.u32("the number of threads", n_threads)?;
        let heads = RopeHeads {
            n: a.n as u32,
            n_heads: a.n_heads as u32,
            head_dim: a.head_dim as u32,
            n_dims: n_dims as u32,
            wide: u32::from(wide) | u32::from((rows.n_inner as usize).is_multiple_of(a.n_heads)) << 1,
            n_each: n_each as u32,
            magnitude: a.rope.magnitude,
            direction: if a.is_inverse { -1.0 } else { 1.0 },
        };
        Ok(self
            .launch(&rope_name(a.rope.style, a.x.dtype), n_threads.div_ceil(ROPE_BLOCK), ROPE_BLOCK)?
            .step(a.step)
            .write(y)
            .read(x)
            .read(case.words("positions", a.positions, &[a.n])?)
            .read(case.words("inv_freq", a.inv_freq, &[n_dims / 2])?)
            .baked(Baked(rows))
            .baked(Baked(heads))
            .vouch(&case))
    }
}

/// Heads that a thread rotates with the same angles. More heads per thread mean that fewer angles are
/// computed twice.
fn heads_each(n_items: usize, n_heads: usize) -> usize {
    let at_most = n_items / MANY_THREADS / HEADS * HEADS;
    at_most.clamp(HEADS, n_heads.next_multiple_of(HEADS))
}

fn rope_name(style: RopeStyle, dtype: DType) -> String {
    named(
        match style {
            RopeStyle::Neox => "move_rope_neox",
            RopeStyle::Interleaved => "move_rope_interleaved",
        },
        dtype,
    )
}

pub(crate) fn entries(all: &mut Vec<KernelEntry>) {
    const R: usize = size_of::<RowLayout>();
    let mut add = |entry: KernelEntry, unit: &str| all.push(entry.unit(unit));
    let gather = KernelEntry::new(KernelFamily::Moves, "move_gather", &[P, P, P, W, W, W, W, W, W], gather);
    add(gather.releasing_next_after_wait(), "any");
    add(KernelEntry::new(KernelFamily::Moves, "move_pick", &[P, P, P, R, W, W, W], pick), "any");
    add(KernelEntry::new(KernelFamily::Moves, "move_place", &[P, P, P, W, W, W], place), "any");
    add(KernelEntry::new(KernelFamily::Moves, "move_pad", &[P, P, size_of::<Padding>()], pad), "any");
    for dtype in FLOATS {
        for style in [RopeStyle::Neox, RopeStyle::Interleaved] {
            let params = [P, P, P, P, R, size_of::<RopeHeads>()];
            let entry = KernelEntry::new(KernelFamily::Moves, rope_name(style, dtype), &params, move |k| {
                rope(k, style, dtype)
            });
            add(entry, &lowercase(dtype));
        }
    }
}

fn gather(k: &mut SimKernel<'_>) -> KernelResult {
    let (n_rows, d, n_ids) = (count(k, 3)?, count(k, 4)?, count(k, 8)?);
    let (dtype, table_dtype) = (dtype_of(k.arg(6)?)?, dtype_of(k.arg(7)?)?);
    let row_bytes = d * table_dtype.block_bytes();
    let mut rows = vec![0; n_ids * row_bytes];
    for (id, row) in k.read::<i32>(k.ptr(2)?, n_ids)?.into_iter().zip(rows.chunks_exact_mut(row_bytes)) {
        let Ok(id) = usize::try_from(id) else { continue };
        if id >= n_rows {
            return Err(fault(format!("row {id} is past a table of {n_rows} rows")));
        }
        row.copy_from_slice(&k.view::<u8>(k.ptr(1)?.add((id * row_bytes) as u64), row_bytes)?);
    }
    let dims = [n_ids, d];
    let rows = Typed::new(table_dtype, &dims, rows)?;
    let y = run_typed(&Op::Cast(dtype), &[&rows], &[(dtype, &dims)])?;
    k.write(k.ptr(0)?, &y[0])
}

fn pick(k: &mut SimKernel<'_>) -> KernelResult {
    let (dims, dtype) = ([count(k, 4)?, count(k, 5)?], dtype_of(k.arg(6)?)?);
    let x = Typed::rows(k, k.ptr(1)?, dtype, k.arg(3)?, &dims)?;
    let ids = Typed::read(k, k.ptr(2)?, DType::I32, &dims[..1])?;
    let y = run_typed(&Op::Pick, &[&x, &ids], &[(dtype, &[dims[0], 1])])?;
    k.write(k.ptr(0)?, &y[0])
}

fn place(k: &mut SimKernel<'_>) -> KernelResult {
    let (width, dtype) = (count(k, 3)?, dtype_of(k.arg(5)?)?);
    let n_rows = k.config().grid[0] as usize / width.div_ceil(CHUNK).max(1);
    let ids = Typed::read(k, k.ptr(1)?, DType::I32, &[n_rows])?;
    let x = Typed::read(k, k.ptr(2)?, dtype, &[n_rows, 1])?;
    let y = run_typed(&Op::PlaceColumns { width }, &[&ids, &x], &[(dtype, &[n_rows, width])])?;
    k.write(k.ptr(0)?, &y[0])
}

fn pad(k: &mut SimKernel<'_>) -> KernelResult {
    let padding: Padding = k.arg(2)?;
    let dtype = dtype_of(padding.ty)?;
    let [length, before, total, stride] =
        [padding.length, padding.before, padding.total, padding.stride].map(|n| n as usize);
    let n_outer = k.config().grid[0] as usize / total.div_ceil(CHUNK).max(1);
    let rows = RowLayout { n_inner: n_outer as u32, inner_stride: stride as u32, outer_stride: 0 };
    let x = Typed::rows(k, k.ptr(1)?, dtype, rows, &[n_outer, length])?;
    let op = Op::Pad { axis: 1, before, after: total - before - length };
    let y = run_typed(&op, &[&x], &[(dtype, &[n_outer, total])])?;
    k.write(k.ptr(0)?, &y[0])
}

fn rope(k: &mut SimKernel<'_>, style: RopeStyle, dtype: DType) -> KernelResult {
    let (rows, heads): (RowLayout, RopeHeads) = (k.arg(4)?, k.arg(5)?);
    let dims = [heads.n, heads.n_heads, heads.head_dim].map(|n| n as usize);
    let rope = Rope { style, n_dims: heads.n_dims as usize, magnitude: heads.magnitude };
    if rope.n_dims > dims[2] {
        return Err(fault("n_dims exceeds head_dim"));
    }
    let x = Typed::rows(k, k.ptr(1)?, dtype, rows, &dims)?;
    let positions = Typed::read(k, k.ptr(2)?, DType::I32, &dims[..1])?;
    let inv_freq = Typed::read(k, k.ptr(3)?, DType::F32, &[rope.n_dims / 2])?;
    let op = if heads.direction < 0.0 { Op::Train(TrainOp::RopeGrad(rope)) } else { Op::Rope(rope) };
    let y = run_typed(&op, &[&x, &positions, &inv_freq], &[(dtype, &dims)])?;
    k.write(k.ptr(0)?, &y[0])
}
