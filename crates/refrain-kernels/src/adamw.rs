//! The sum of all gradients' squares, and one step of AdamW, over many tensors at once.
//!
//! Tensors are named in a table among the parameters of a launch: it is fixed when the launch is described, needs no memory
//! of its own, and holds as many tensors as parameters have room for. More of them take more launches.

use bytemuck::{Pod, Zeroable};
use refrain_driver::api::DevicePtr;
use refrain_driver::sim::{KernelResult, SimKernel};
use refrain_driver::{Access, Baked, Buf, Launch};
use refrain_graph::{ADAM_PARAMS, AdamW, Op, TrainOp};
use refrain_reference::Out;
use refrain_tensor::DType;

use crate::error::{OpCase, KernelError};
use crate::load::Kernels;
use crate::registry::{KernelEntry, P, W};
use crate::source::KernelFamily;
use crate::twin::{count, fault};
use crate::typed::{FLOATS, Typed, dtype_of, is_aligned};
use crate::vouch::Vouch;

/// A dense tensor of floats.
#[derive(Clone, Copy, Debug)]
pub struct Floats {
    /// Its bytes.
    pub buf: Buf,
    /// Its type.
    pub dtype: DType,
}

/// `sum = sum of x^2` over all elements of all tensors.
#[derive(Clone, Copy, Debug)]
pub struct SumSquaresArgs<'a> {
    /// Each with its number of elements.
    pub tensors: &'a [(Floats, usize)],
    /// `[1]` F32.
    pub sum: Buf,
    /// [`sum_squares_scratch_bytes`]
    pub scratch: Buf,
    /// Names the step.
    pub step: &'a str,
}

/// One tensor of [`AdamWArgs`].
#[derive(Clone, Copy, Debug)]
pub struct AdamTensor {
    /// Elements.
    pub n: usize,
    /// The gradient.
    pub grad: Floats,
    /// The weight.
    pub weight: Floats,
    /// Its master, F32.
    pub master: Option<Buf>,
    /// The first moment.
    pub m: Floats,
    /// The second moment.
    pub v: Floats,
    /// Whether it decays.
    pub decays: bool,
}

/// One step of AdamW ([`refrain_graph::AdamW`] says what it computes).
#[derive(Clone, Copy, Debug)]
pub struct AdamWArgs<'a> {
    /// `[1]` I32: steps that were applied.
    pub count: Buf,
    /// `[ADAM_PARAMS]` F32, in device memory, read at each run.
    pub params: Buf,
    /// `[1]` F32; nothing is applied when it is not finite.
    pub sum_squares: Buf,
    /// The tensors.
    pub tensors: &'a [AdamTensor],
    /// Gradients become zero.
    pub clears: bool,
    /// Names the step.
    pub step: &'a str,
}

const BLOCK: u32 = 256;
const FINISH_BLOCK: u32 = 1024;
/// Elements of a block.
const CHUNK: usize = 8192;
/// Tensors of a launch.
const MAX_SQUARES: usize = 128;
const MAX_ADAM: usize = 64;
/// Kernels of a step, by the kind of tensor: any, and two with masters that differ in the gradient's type.
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

/// Scratch of [`Kernels::sum_squares`], from the number of elements of each tensor.
#[must_use]
pub fn sum_squares_scratch_bytes(tensors: impl Iterator<Item = usize>) -> u64 {
    4 * tensors.map(|n| n.div_ceil(CHUNK) as u64).sum::<u64>()
}

impl Kernels {
    /// The launches of [`SumSquaresArgs`]: two for up to 128 tensors.
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

    /// The launches of [`AdamWArgs`]: two for up to 64 tensors of one kind. The last counts the step, when all others have read the
    /// count.
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
                // Nothing is written where nothing is applied, so what is there counts as read.
                for (slot, (what, floats, access)) in [
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
                    bufs.push((at, case.floats(what, &floats, t.n)?, access));
                    let shift = [Some(0), Some(4), None, Some(8), Some(12)][slot];
                    flags |=
                        shift.map_or(Ok(0), |by| case.code(what, floats.dtype).map(|code| code << by))?;
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
    /// Which of [`STEPS`] is for it.
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
    fn floats(&self, what: &'static str, floats: &Floats, n: usize) -> Result<Buf, KernelError> {
        crate::require!(self, FLOATS.contains(&floats.dtype), "{what} is {}, must be floats", floats.dtype);
        self.elements(what, floats.buf, floats.dtype, &[n])
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

/// The step of each tensor by itself, without counting it.
fn step(k: &mut SimKernel<'_>) -> KernelResult {
    let (table, n_entries, clears): (AdamTable, usize, u32) = (k.arg(3)?, count(k, 4)?, k.arg(5)?);
    let params = Typed::read(k, k.ptr(1)?, DType::F32, &[ADAM_PARAMS])?;
    let sum_squares = Typed::read(k, k.ptr(2)?, DType::F32, &[1])?;
    for entry in &table.entries[..n_entries] {
        let dims = [entry.n as usize];
        let dtype = |by: u32| dtype_of(entry.flags >> by & 15);
        let grad = Typed::read(k, DevicePtr(entry.grad), dtype(0)?, &dims)?;
        let mut places = vec![(k.ptr(0)?, DType::I32, 1)];
        let mut inputs = vec![params.input(), sum_squares.input()];
        match clears {
            0 => inputs.push(grad.input()),
            _ => places.push((DevicePtr(entry.grad), dtype(0)?, dims[0])),
        }
        places.push((DevicePtr(entry.weight), dtype(4)?, dims[0]));
        if entry.master != 0 {
            places.push((DevicePtr(entry.master), DType::F32, dims[0]));
        }
        places.push((DevicePtr(entry.m), dtype(8)?, dims[0]));
        places.push((DevicePtr(entry.v), dtype(12)?, dims[0]));
        let states = places.iter().map(|&(ptr, dtype, n)| Typed::read(k, ptr, dtype, &[n]));
        let mut states = states.collect::<KernelResult<Vec<_>>>()?;
        let mut outputs: Vec<Out<'_>> =
            states.iter_mut().map(|state| Out { ty: state.ty, bytes: &mut state.bytes }).collect();
        let decays = vec![entry.flags >> 16 & 1 == 1].into();
        let adam = AdamW { decays, masters: entry.master != 0, clears: clears != 0 };
        refrain_reference::run(&Op::Train(TrainOp::AdamW(adam)), &inputs, &mut outputs).map_err(fault)?;
        for ((ptr, ..), state) in places.iter().zip(&states).skip(1) {
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
