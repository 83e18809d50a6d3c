//! Rotary position embedding.

use refrain_driver::sim::{KernelResult, SimKernel};
use refrain_driver::{Baked, Buf, Launch};
use refrain_graph::{Op, Rope, RopeStyle};
use refrain_tensor::DType;

use crate::error::{KernelError, OpCase};
use crate::load::Kernels;
use crate::registry::{KernelEntry, P, W};
use crate::source::KernelFamily;
use crate::twin::{Dense, count, fault, read_rows, run_f32};
use crate::view::{BufView, RowLayout};
use crate::vouch::Vouch;

/// `y` is `x` rotated by each row's position; rows with a negative position are copied unchanged.
#[derive(Clone, Copy, Debug)]
pub struct RopeArgs<'a> {
    /// Rotated pairs, their number and the magnitude factor.
    pub rope: Rope,
    /// `[n, n_heads, head_dim]` F32; each head is contiguous.
    pub x: BufView,
    /// `[n]` I32, in device memory, read at run time.
    pub positions: Buf,
    /// `[n_dims / 2]` F32.
    pub inv_freq: Buf,
    /// `[n, n_heads, head_dim]` F32; may alias `x` if that is contiguous.
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

const BLOCK: u32 = 128;

impl Kernels {
    /// Builds the launch for [`RopeArgs`].
    pub fn rope(&self, a: &RopeArgs<'_>) -> Result<Launch, KernelError> {
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
        let (x, rows) = case.rows("x", &a.x, n_rows, a.head_dim)?;
        // One thread per rotated pair, and one per remaining element, which is only copied.
        let per_head = n_dims / 2 + (a.head_dim - n_dims);
        let n_threads = case.u32("the number of pairs", n_rows.saturating_mul(per_head))?;
        Ok(self
            .launch(name(a.rope.style), n_threads.div_ceil(BLOCK), BLOCK)?
            .step(a.step)
            .write(case.words("y", a.y, &[a.n, a.n_heads, a.head_dim])?)
            .read(x)
            .read(case.words("positions", a.positions, &[a.n])?)
            .read(case.words("inv_freq", a.inv_freq, &[n_dims / 2])?)
            .baked(Baked(rows))
            .baked(Baked(a.n as u32))
            .baked(Baked(a.n_heads as u32))
            .baked(Baked(a.head_dim as u32))
            .baked(Baked(n_dims as u32))
            .baked(Baked(a.rope.magnitude))
            .vouch(&case))
    }
}

fn name(style: RopeStyle) -> &'static str {
    match style {
        RopeStyle::Neox => "rope_neox_f32",
        RopeStyle::Interleaved => "rope_interleaved_f32",
    }
}

pub(crate) fn entries(all: &mut Vec<KernelEntry>) {
    for style in [RopeStyle::Neox, RopeStyle::Interleaved] {
        let params = [P, P, P, P, size_of::<RowLayout>(), W, W, W, W, W];
        all.push(KernelEntry::new(KernelFamily::Rope, name(style), &params, move |k| twin(k, style)));
    }
}

fn twin(k: &mut SimKernel<'_>, style: RopeStyle) -> KernelResult {
    let [n, n_heads, head_dim, n_dims] = [count(k, 5)?, count(k, 6)?, count(k, 7)?, count(k, 8)?];
    let dims = [n, n_heads, head_dim];
    if n_dims > head_dim {
        return Err(fault("n_dims exceeds head_dim"));
    }
    let x = Dense::f32(&read_rows(k, k.ptr(1)?, k.arg(4)?, n * n_heads, head_dim)?, &dims)?;
    let positions = Dense::read(k, k.ptr(2)?, DType::I32, &[n])?;
    let inv_freq = Dense::read(k, k.ptr(3)?, DType::F32, &[n_dims / 2])?;
    let rope = Rope { style, n_dims, magnitude: k.arg(9)? };
    let y = run_f32(&Op::Rope(rope), &[&x, &positions, &inv_freq], &dims)?;
    k.write(k.ptr(0)?, &y)
}
