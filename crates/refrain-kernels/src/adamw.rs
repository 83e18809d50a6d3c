//! Gradient norm and AdamW update over many tensors per launch.
//!
//! The table of tensors is a launch parameter. It is fixed when the launch is described, needs no device
//! memory, and holds as many tensors as the parameter space allows. Longer lists take several launches.

use bytemuck::{Pod, Zeroable};
use refrain_driver::api::DevicePtr;
use refrain_driver::sim::{KernelResult, SimKernel};
use refrain_driver::{Access, Baked, Buf, Launch};
use refrain_graph::{ADAM_PARAMS, AdamW, Op, TrainOp};
use refrain_reference::Out;
use refrain_tensor::DType;

use crate::error::{KernelError, OpCase};
use crate::load::Kernels;
use crate::registry::{KernelEntry, P, W};
use crate::source::KernelFamily;
use crate::twin::{count, fault};
use crate::typed::{FLOATS, Typed, dtype_of, is_aligned};
use crate::vouch::Vouch;

/// A dense float tensor.
#[derive(Clone, Copy, Debug)]
pub struct Floats {
    /// Its memory.
    pub buf: Buf,
    /// Element type: F32, F16 or BF16.
    pub dtype: DType,
}

/// Arguments for `sum = sum of x^2` over all elements of all tensors.
#[derive(Clone, Copy, Debug)]
pub struct SumSquaresArgs<'a> {
    /// The tensors, each with its number of elements.
    pub tensors: &'a [(Floats, usize)],
    /// `[1]` F32.
    pub sum: Buf,
    /// Scratch of [`sum_squares_scratch_bytes`] bytes.
    pub scratch: Buf,
    /// Name of the step that the launch belongs to.
    pub step: &'a str,
}

/// A tensor of [`AdamWArgs`].
#[derive(Clone, Copy, Debug)]
pub struct AdamTensor {
    /// Number of elements.
    pub n: usize,
    /// The gradient.
    pub grad: Floats,
    /// The weight.
    pub weight: Floats,
    /// Master weight in F32, if there is one.
    pub master: Option<Buf>,
    /// The first moment.
    pub m: Floats,
    /// The second moment.
    pub v: Floats,
    /// Whether weight decay applies.
    pub decays: bool,
}

/// Arguments for one AdamW step; [`refrain_graph::AdamW`] defines the formula.
#[derive(Clone, Copy, Debug)]
pub struct AdamWArgs<'a> {
    /// `[1]` I32: number of applied steps.
    pub count: Buf,
    /// `[ADAM_PARAMS]` F32 in device memory, read at run time.
    pub params: Buf,
    /// `[1]` F32 sum of squared gradients. If it is not finite, the step is skipped.
    pub sum_squares: Buf,
    /// The tensors.
    pub tensors: &'a [AdamTensor],
    /// Whether to zero the gradients afterwards.
    pub clears: bool,
    /// Name of the step that the launch belongs to.
    pub step: &'a str,
}

const BLOCK: u32 = 256;
const FINISH_BLOCK: u32 = 1024;
/// Elements per block.
const CHUNK: usize = 8192;
/// Tensors per launch of the sum of squares.
const MAX_SQUARES: usize = 128;
const MAX_ADAM: usize = 64;
/// Step kernels by kind of tensor: a general one, and two with F32 masters for BF16 and F16 gradients.
const STEPS: [&str; 3] = ["adamw_step", "adamw_step_masters_bf16", "adamw_step_masters_f32"];

#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
struct SquaresEntry {
    x: u64,
    n: u64,
    first_block: u32,
    ty: u32,
}

#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
struct SquaresTable {
    entries: [SquaresEntry; MAX_SQUARES],
}

#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
struct AdamEntry {
    grad: u64,
    weight: u64,
    master: u64,
    m: u64,
    v: u64,
    n: u64,
    first_block: u32,
    flags: u32,
}

#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
struct AdamTable {
    entries: [AdamEntry; MAX_ADAM],
}

/// Scratch size of [`Kernels::sum_squares`], given the number of elements of each tensor.
#[must_use]
pub fn sum_squares_scratch_bytes(tensors: impl Iterator<Item = usize>) -> u64 {
    4 * tensors.map(|n| n.div_ceil(CHUNK) as u64).sum::<u64>()
}

impl Kernels {
    /// Pushes the launches for [`SumSquaresArgs`]: two for up to 128 tensors.
    pub fn sum_squares(&self, a: &SumSquaresArgs<'_>, launches: &mut Vec<Launch>) -> Result<(), KernelError> {
        let shape = [("n_tensors", a.tensors.len())];
        let case = OpCase { op: "sum_squares", dtype: DType::F32, shape: &shape };
        case.sizes()?;
        let n_blocks = |tensors: &[(Floats, usize)]| tensors.iter().map(|(_, n)| n.div_ceil(CHUNK)).sum();
        let n_parts: usize = n_blocks(a.tensors);
        case.u32("the number of blocks", n_parts)?;
        let scratch = case.words("scratch", a.scratch, &[n_parts])?;
        let mut n_before = 0_usize;
        for tensors in a.tensors.chunks(MAX_SQUARES) {
            let n_here = n_blocks(tensors);
            if n_here == 0 {
                continue;
            }
            let mut table = SquaresTable::zeroed();
            let (mut bufs, mut first_block) = (Vec::new(), 0);
            for (i, (tensor, n)) in tensors.iter().enumerate() {
                let buf = case.floats("a tensor", tensor, *n)?;
                let ty = case.code("a tensor", tensor.dtype)?;
                table.entries[i] = SquaresEntry { x: 0, n: *n as u64, first_block, ty };
                bufs.push((i * size_of::<SquaresEntry>(), buf, Access::Read));
                first_block += n.div_ceil(CHUNK) as u32;
            }
            let parts = scratch.slice(4 * n_before as u64, 4 * n_here as u64)?;
            n_before += n_here;
            launches.push(
                self.launch("adamw_sum_squares", n_here as u32, BLOCK)?
                    .step(a.step)
                    .write(parts)
                    .table(Baked(&table), bufs)
                    .baked(Baked(tensors.len() as u32))
                    .vouch(&case),
            );
        }
        launches.push(
            self.launch("adamw_sum_squares_finish", 1, FINISH_BLOCK)?
                .step(a.step)
                .write(case.words("sum", a.sum, &[1])?)
                .read(scratch)
                .baked(Baked(n_parts as u32))
                .vouch(&case),
        );
        Ok(())
    }

    /// Pushes the launches for [`AdamWArgs`]: two for up to 64 tensors of one kind. The last launch
    /// increments the step count after all others have read it.
    pub fn adamw(&self, a: &AdamWArgs<'_>, launches: &mut Vec<Launch>) -> Result<(), KernelError> {
        let shape = [("n_tensors", a.tensors.len())];
        let case = OpCase { op: "adamw", dtype: DType::F32, shape: &shape };
        let count = case.words("count", a.count, &[1])?;
        let params = case.words("params", a.params, &[ADAM_PARAMS])?;
        let sum_squares = case.words("sum_squares", a.sum_squares, &[1])?;
        let of = |kernel| a.tensors.iter().filter(|t| t.kernel() == kernel).collect::<Vec<_>>();
        let kinds = STEPS.map(|kernel| (kernel, of(kernel)));
        let chunks =
            kinds.iter().flat_map(|(kernel, all)| all.chunks(MAX_ADAM).map(move |some| (*kernel, some)));
        for (kernel, tensors) in chunks {
            let mut table = AdamTable::zeroed();
            let (mut bufs, mut n_blocks) = (Vec::new(), 0_usize);
            for (i, t) in tensors.iter().enumerate() {
                let mut flags = u32::from(t.decays) << 16;
                let grad = if a.clears { Access::ReadWrite } else { Access::Read };
                // When the step is skipped, the old contents stay: outputs count as read too.
                for (slot, (name, floats, access)) in [
                    ("a gradient", Some(t.grad), grad),
                    ("a weight", Some(t.weight), Access::ReadWrite),
                    ("a master", t.master.map(|buf| Floats { buf, dtype: DType::F32 }), Access::ReadWrite),
                    ("a first moment", Some(t.m), Access::ReadWrite),
                    ("a second moment", Some(t.v), Access::ReadWrite),
                ]
                .into_iter()
                .enumerate()
                {
                    let Some(floats) = floats else { continue };
                    let at = i * size_of::<AdamEntry>() + 8 * slot;
                    bufs.push((at, case.floats(name, &floats, t.n)?, access));
                    let shift = [Some(0), Some(4), None, Some(8), Some(12)][slot];
                    flags |=
                        shift.map_or(Ok(0), |by| case.code(name, floats.dtype).map(|code| code << by))?;
                }
                let first_block = case.u32("the number of blocks", n_blocks)?;
                table.entries[i] = AdamEntry { n: t.n as u64, first_block, flags, ..AdamEntry::zeroed() };
                n_blocks = n_blocks.saturating_add(t.n.div_ceil(CHUNK));
            }
            if n_blocks == 0 {
                continue;
            }
            launches.push(
                self.launch(kernel, case.u32("the number of blocks", n_blocks)?, BLOCK)?
                    .step(a.step)
                    .read(count)
                    .read(params)
                    .read(sum_squares)
                    .table(Baked(&table), bufs)
                    .baked(Baked(tensors.len() as u32))
                    .baked(Baked(u32::from(a.clears)))
                    .vouch(&case),
            );
        }
        launches.push(
            self.launch("adamw_count", 1, 32)?.step(a.step).read_write(count).read(sum_squares).vouch(&case),
        );
        Ok(())
    }
}

impl AdamTensor {
    /// Returns the entry of [`STEPS`] for this tensor.
    fn kernel(&self) -> &'static str {
        let moments = [self.m, self.v];
        let has_master = self.master.is_some_and(is_aligned)
            && self.weight.dtype == DType::BF16
            && moments.iter().all(|moment| moment.dtype == DType::F32)
            && [self.grad, self.weight, self.m, self.v].iter().all(|floats| is_aligned(floats.buf))
            && self.n.is_multiple_of(4);
        match (has_master, self.grad.dtype) {
            (true, DType::BF16) => STEPS[1],
            (true, DType::F32) => STEPS[2],
            _ => STEPS[0],
        }
    }
}

impl OpCase<'_> {
    fn floats(&self, name: &'static str, floats: &Floats, n: usize) -> Result<Buf, KernelError> {
        crate::require!(
            self,
            FLOATS.contains(&floats.dtype),
            "{name} is {}, must be F32, F16 or BF16",
            floats.dtype
        );
        self.elements(name, floats.buf, floats.dtype, &[n])
    }
}

pub(crate) fn entries(all: &mut Vec<KernelEntry>) {
    const S: usize = size_of::<SquaresTable>();
    const A: usize = size_of::<AdamTable>();
    all.push(KernelEntry::new(KernelFamily::AdamW, "adamw_sum_squares", &[P, S, W], squares));
    all.push(KernelEntry::new(KernelFamily::AdamW, "adamw_sum_squares_finish", &[P, P, W], finish));
    for kernel in STEPS {
        all.push(KernelEntry::new(KernelFamily::AdamW, kernel, &[P, P, P, A, W, W], step));
    }
    all.push(KernelEntry::new(KernelFamily::AdamW, "adamw_count", &[P, P], advance));
}

fn squares(k: &mut SimKernel<'_>) -> KernelResult {
    let (table, n_entries): (SquaresTable, usize) = (k.arg(1)?, count(k, 2)?);
    let mut parts = Vec::new();
    for entry in &table.entries[..n_entries] {
        let x = Typed::read(k, DevicePtr(entry.x), dtype_of(entry.ty)?, &[entry.n as usize])?;
        let x = x.input().to_f32().map_err(fault)?;
        let square = |chunk: &[f32]| chunk.iter().map(|&v| f64::from(v) * f64::from(v)).sum::<f64>() as f32;
        parts.extend(x.chunks(CHUNK).map(square));
    }
    k.write(k.ptr(0)?, &parts)
}

fn finish(k: &mut SimKernel<'_>) -> KernelResult {
    let parts = k.read::<f32>(k.ptr(1)?, count(k, 2)?)?;
    k.write_one(k.ptr(0)?, parts.iter().map(|&v| f64::from(v)).sum::<f64>() as f32)
}

/// Updates each tensor; a launch of its own increments the step count.
fn step(k: &mut SimKernel<'_>) -> KernelResult {
    let (table, n_entries, clears): (AdamTable, usize, u32) = (k.arg(3)?, count(k, 4)?, k.arg(5)?);
    let params = Typed::read(k, k.ptr(1)?, DType::F32, &[ADAM_PARAMS])?;
    let sum_squares = Typed::read(k, k.ptr(2)?, DType::F32, &[1])?;
    for entry in &table.entries[..n_entries] {
        let dims = [entry.n as usize];
        let dtype = |by: u32| dtype_of(entry.flags >> by & 15);
        let grad = Typed::read(k, DevicePtr(entry.grad), dtype(0)?, &dims)?;
        let mut operands = vec![(k.ptr(0)?, DType::I32, 1)];
        let mut inputs = vec![params.input(), sum_squares.input()];
        match clears {
            0 => inputs.push(grad.input()),
            _ => operands.push((DevicePtr(entry.grad), dtype(0)?, dims[0])),
        }
        operands.push((DevicePtr(entry.weight), dtype(4)?, dims[0]));
        if entry.master != 0 {
            operands.push((DevicePtr(entry.master), DType::F32, dims[0]));
        }
        operands.push((DevicePtr(entry.m), dtype(8)?, dims[0]));
        operands.push((DevicePtr(entry.v), dtype(12)?, dims[0]));
        let states = operands.iter().map(|&(ptr, dtype, n)| Typed::read(k, ptr, dtype, &[n]));
        let mut states = states.collect::<KernelResult<Vec<_>>>()?;
        let mut outputs: Vec<Out<'_>> =
            states.iter_mut().map(|state| Out { ty: state.ty, bytes: &mut state.bytes }).collect();
        let decays = vec![entry.flags >> 16 & 1 == 1].into();
        let adam = AdamW { decays, masters: entry.master != 0, clears: clears != 0 };
        refrain_reference::run(&Op::Train(TrainOp::AdamW(adam)), &inputs, &mut outputs).map_err(fault)?;
        for ((ptr, ..), state) in operands.iter().zip(&states).skip(1) {
            k.write(*ptr, &state.bytes)?;
        }
    }
    Ok(())
}

fn advance(k: &mut SimKernel<'_>) -> KernelResult {
    let (count, sum) = (k.read_one::<i32>(k.ptr(0)?)?, k.read_one::<f32>(k.ptr(1)?)?);
    match sum.is_finite() {
        true => k.write_one(k.ptr(0)?, count.saturating_add(1)),
        false => Ok(()),
    }
}
