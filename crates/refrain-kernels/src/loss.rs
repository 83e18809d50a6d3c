//! Cross-entropy and its gradient, which may overwrite the logits.

use refrain_driver::sim::{KernelResult, SimKernel};
use refrain_driver::{Baked, Buf, Launch};
use refrain_graph::{Op, TrainOp};
use refrain_tensor::DType;

use crate::error::{KernelError, OpCase};
use crate::load::Kernels;
use crate::registry::{KernelEntry, P, W, lowercase};
use crate::source::KernelFamily;
use crate::twin::count;
use crate::typed::{FLOATS, Typed, is_aligned, named, rows_are_wide, run_typed};
use crate::view::{BufView, RowLayout};
use crate::vouch::Vouch;

/// Loss of each row, and the gradient of the sum of all losses.
#[derive(Clone, Copy, Debug)]
pub struct CrossEntropyArgs<'a> {
    /// `[n, vocab]` floats with contiguous rows.
    pub logits: BufView,
    /// `[n]` I32 in device memory, read at run time; a negative target means no loss.
    pub targets: Buf,
    /// `[1]` F32 in device memory, read at run time: scales every loss.
    pub scale: Buf,
    /// `[n]` F32.
    pub loss: Buf,
    /// `[n, vocab]` in the dtype of the logits; may alias the logits if they are contiguous.
    pub dx: Buf,
    /// Name of the step that the launch belongs to.
    pub step: &'a str,
}

/// Threads per block: each holds 64 16-bit logits or 32 F32 logits.
fn block(vocab: usize, dtype: DType) -> u32 {
    let per_thread = 128 / dtype.block_bytes();
    (vocab.div_ceil(per_thread).next_multiple_of(32) as u32).clamp(64, 512)
}

impl Kernels {
    /// Builds the launch for [`CrossEntropyArgs`]. A target past the row gives NaN on a GPU; the simulated
    /// device faults.
    pub fn cross_entropy(&self, a: &CrossEntropyArgs<'_>) -> Result<Launch, KernelError> {
        let vocab = a.logits.layout.shape().dim_back(0);
        let n = a.logits.layout.shape().n_elements() / vocab.max(1);
        let shape = [("n", n), ("vocab", vocab)];
        let case = OpCase { op: "cross_entropy", dtype: a.logits.dtype, shape: &shape };
        case.sizes()?;
        let (logits, rows) = case.float_rows("logits", &a.logits, [n, vocab])?;
        let dx = case.elements("dx", a.dx, a.logits.dtype, &[n, vocab])?;
        let wide = rows_are_wide(logits, rows, vocab) && is_aligned(dx);
        Ok(self
            .launch(&named("loss_cross_entropy", a.logits.dtype), n as u32, block(vocab, a.logits.dtype))?
            .step(a.step)
            .write(case.words("loss", a.loss, &[n])?)
            .write(dx)
            .read(logits)
            .read(case.words("targets", a.targets, &[n])?)
            .read(case.words("scale", a.scale, &[1])?)
            .baked(Baked(rows))
            .baked(Baked(vocab as u32))
            .baked(Baked(u32::from(wide)))
            .vouch(&case))
    }
}

pub(crate) fn entries(all: &mut Vec<KernelEntry>) {
    for dtype in FLOATS {
        let params = [P, P, P, P, P, size_of::<RowLayout>(), W, W];
        let name = named("loss_cross_entropy", dtype);
        let entry = KernelEntry::new(KernelFamily::Loss, name, &params, move |k| cross_entropy(k, dtype));
        all.push(entry.unit(&lowercase(dtype)));
    }
}

fn cross_entropy(k: &mut SimKernel<'_>, dtype: DType) -> KernelResult {
    let (n, vocab) = (k.config().grid[0] as usize, count(k, 6)?);
    let dims = [n, vocab];
    let logits = Typed::rows(k, k.ptr(2)?, dtype, k.arg(5)?, &dims)?;
    let targets = Typed::read(k, k.ptr(3)?, DType::I32, &[n])?;
    let scale = Typed::read(k, k.ptr(4)?, DType::F32, &[1])?;
    let op = Op::Train(TrainOp::CrossEntropy);
    let results = run_typed(&op, &[&logits, &targets, &scale], &[(DType::F32, &[n]), (dtype, &dims)])?;
    k.write(k.ptr(0)?, &results[0])?;
    k.write(k.ptr(1)?, &results[1])
}
