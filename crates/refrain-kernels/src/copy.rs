//! Contiguous copies of any view, and casts between float types.

use half::{bf16, f16};
use refrain_driver::sim::{KernelResult, SimKernel};
use refrain_driver::{Baked, Buf, Launch};
use refrain_tensor::DType;

use crate::elementwise::{BLOCK, walked};
use crate::error::{KernelError, OpCase};
use crate::load::Kernels;
use crate::registry::{KernelEntry, P, W};
use crate::source::KernelFamily;
use crate::twin::count;
use crate::view::{BufView, Walk};
use crate::vouch::Vouch;

/// `y = x`, dense.
#[derive(Clone, Copy, Debug)]
pub struct CopyArgs<'a> {
    /// Elements of 1, 2 or 4 bytes, in any layout.
    pub x: BufView,
    /// Contiguous, of the same dtype and shape; not `x`.
    pub y: Buf,
    /// Name of the step that the launch belongs to.
    pub step: &'a str,
}

/// `y = x` in another float type, rounded to nearest even; contiguous.
#[derive(Clone, Copy, Debug)]
pub struct CastArgs<'a> {
    /// F32, F16 or BF16, in any layout.
    pub x: BufView,
    /// Contiguous, of the same shape; not `x`.
    pub y: Buf,
    /// F32, F16 or BF16.
    pub to: DType,
    /// Name of the step that the launch belongs to.
    pub step: &'a str,
}

impl Kernels {
    /// Builds the launch for [`CopyArgs`].
    pub fn copy(&self, a: &CopyArgs<'_>) -> Result<Launch, KernelError> {
        let n = a.x.layout.shape().n_elements();
        let shape = [("n", n)];
        let case = OpCase { op: "copy", dtype: a.x.dtype, shape: &shape };
        case.sizes()?;
        let size = a.x.dtype.block_bytes();
        crate::require!(
            case,
            !a.x.dtype.is_quantized() && SIZES.contains(&size),
            "elements must be 1, 2 or 4 bytes long"
        );
        let y = case.buf("y", a.y, n.checked_mul(size), size as u64)?;
        self.walk(&case, &format!("copy_b{}", 8 * size), a.x, y, a.step)
    }

    /// Builds the launch for [`CastArgs`].
    pub fn cast(&self, a: &CastArgs<'_>) -> Result<Launch, KernelError> {
        let n = a.x.layout.shape().n_elements();
        let shape = [("n", n)];
        let case = OpCase { op: "cast", dtype: a.x.dtype, shape: &shape };
        case.sizes()?;
        crate::require!(case, a.x.dtype.is_float() && a.to.is_float(), "no kernel casts to {}", a.to);
        let size = a.to.block_bytes();
        let y = case.buf("y", a.y, n.checked_mul(size), size as u64)?;
        self.walk(&case, &cast_name(a.x.dtype, a.to), a.x, y, a.step)
    }

    fn walk(
        &self,
        case: &OpCase<'_>,
        kernel: &str,
        x: BufView,
        y: Buf,
        step: &str,
    ) -> Result<Launch, KernelError> {
        let n = x.layout.shape().n_elements();
        let walk = case.walk(x.layout.shape(), &x.layout, None)?;
        Ok(self
            .launch(kernel, n.div_ceil(BLOCK) as u32, BLOCK as u32)?
            .step(step)
            .write(y)
            .read(case.extent("x", &x)?)
            .baked(Baked(walk))
            .baked(Baked(n as u32))
            .vouch(case))
    }
}

const SIZES: [usize; 3] = [1, 2, 4];
const FLOATS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

fn cast_name(from: DType, to: DType) -> String {
    format!("cast_{}_{}", from.name().to_ascii_lowercase(), to.name().to_ascii_lowercase())
}

pub(crate) fn entries(all: &mut Vec<KernelEntry>) {
    const PARAMS: [usize; 4] = [P, P, size_of::<Walk>(), W];
    all.push(KernelEntry::new(KernelFamily::Copy, "copy_b8", &PARAMS, copy::<u8>));
    all.push(KernelEntry::new(KernelFamily::Copy, "copy_b16", &PARAMS, copy::<u16>));
    all.push(KernelEntry::new(KernelFamily::Copy, "copy_b32", &PARAMS, copy::<u32>));
    for from in FLOATS {
        for to in FLOATS {
            all.push(KernelEntry::new(KernelFamily::Copy, cast_name(from, to), &PARAMS, move |k| {
                cast(k, from, to)
            }));
        }
    }
}

fn copy<T: bytemuck::Pod>(k: &mut SimKernel<'_>) -> KernelResult {
    let (walk, n) = (k.arg::<Walk>(2)?, count(k, 3)?);
    let x: Vec<T> = walked(k, 1, n, |i| walk.at(i).0)?;
    k.write(k.ptr(0)?, &x)
}

fn cast(k: &mut SimKernel<'_>, from: DType, to: DType) -> KernelResult {
    let (walk, n) = (k.arg::<Walk>(2)?, count(k, 3)?);
    let at = |i: usize| walk.at(i).0;
    let x: Vec<f32> = match from {
        DType::F16 => walked::<f16>(k, 1, n, at)?.into_iter().map(f16::to_f32).collect(),
        DType::BF16 => walked::<bf16>(k, 1, n, at)?.into_iter().map(bf16::to_f32).collect(),
        _ => walked(k, 1, n, at)?,
    };
    match to {
        DType::F16 => k.write(k.ptr(0)?, &x.into_iter().map(f16::from_f32).collect::<Vec<_>>()),
        DType::BF16 => k.write(k.ptr(0)?, &x.into_iter().map(bf16::from_f32).collect::<Vec<_>>()),
        _ => k.write(k.ptr(0)?, &x),
    }
}
