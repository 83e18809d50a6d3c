//! Test bed: runs a case on a device with poisoned outputs and guard zones, compares it with the reference,
//! and requires that recordings equal the eager run bit for bit.

use std::sync::{Arc, Mutex};

use refrain_driver::sim::SimOptions;
use refrain_driver::{
    Buf, Context, Device, DeviceKind, Launch, Memory, MemoryLayout, Method, RecordOptions, Stream,
};
use refrain_graph::{Op, TensorType};
use refrain_kernels::{BufView, KernelError, KernelLoadOptions, Kernels, simulated};
use refrain_reference::{In, Out};
use refrain_tensor::{DType, Layout, Shape};
use refrain_testkit::{Rng, Tol, compare, encode};

const GUARD: u8 = 0x5a;
const POISON: u8 = 0xcd;
/// Alignment of buffers, and minimum gap between them.
const ZONE: usize = 256;

/// A device with loaded kernels.
pub struct Bed {
    pub ctx: Context,
    pub stream: Stream,
    pub kernels: Kernels,
    pub device: Device,
    /// Address and size of every region of the most recently planned device memory.
    pub regions: Regions,
    /// Kernels run on copies of all memory, so the simulated device reports false races between concurrent
    /// launches.
    pub copies_all: bool,
}

pub type Regions = Arc<Mutex<Vec<(u64, u64)>>>;

impl Bed {
    pub fn sim() -> Bed {
        Bed::new(simulated(SimOptions { seed: 3, ..SimOptions::default() }).unwrap())
    }

    pub fn gpu() -> Bed {
        Bed::new(Device::open(DeviceKind::Cuda(0)).unwrap())
    }

    #[expect(clippy::disallowed_methods, reason = "the environment names the compiler library")]
    pub fn new(device: Device) -> Bed {
        let ctx = device.context().unwrap();
        let nvrtc = std::env::var_os("REFRAIN_NVRTC").map(Into::into);
        let cache = Some(std::env::temp_dir().join("refrain-kernel-tests"));
        let options = KernelLoadOptions { cache, nvrtc, arch: None };
        let kernels = Kernels::load(&ctx, &options)
            .unwrap_or_else(|e| panic!("{e}\nhint: {}", e.hint().unwrap_or_default()));
        Bed {
            stream: ctx.stream().unwrap(),
            ctx,
            kernels,
            device,
            regions: Regions::default(),
            copies_all: false,
        }
    }

    pub fn plan(&self, layout: &MemoryLayout) -> Arc<Memory> {
        let memory = Memory::plan(&self.ctx, layout).unwrap();
        let device = memory.regions().filter(|(name, ..)| *name != PINNED).map(|(_, bytes, at)| (at, bytes));
        *self.regions.lock().unwrap() = device.collect();
        memory
    }
}

/// Name of the pinned region.
pub const PINNED: &str = "ring";

/// Contents of a buffer before and after the launches.
pub enum Role {
    /// Input: unchanged afterwards.
    In(Vec<u8>),
    /// Output, fully written: these numbers.
    Out(Vec<f32>, Tol),
    /// Output, fully written: these bytes.
    Exact(Vec<u8>),
    /// Updated in place: `before` becomes `after`, compared as numbers of the dtype.
    InOut { before: Vec<u8>, after: Vec<u8>, dtype: DType, tol: Tol },
    /// Scratch of this size; its contents are ignored.
    Scratch(usize),
    /// Scratch that blocks fill in arbitrary order, so its contents may differ between runs.
    Unordered(usize),
}

impl Role {
    fn before(&self) -> Vec<u8> {
        match self {
            Role::In(bytes) => bytes.clone(),
            Role::Out(values, _) => vec![POISON; 4 * values.len()],
            Role::Exact(bytes) => vec![POISON; bytes.len()],
            Role::InOut { before, .. } => before.clone(),
            Role::Scratch(n) | Role::Unordered(n) => vec![POISON; *n],
        }
    }

    fn check(&self, got: &[u8]) -> Result<(), String> {
        match self {
            Role::In(bytes) if got == bytes => Ok(()),
            Role::In(_) => Err("an input was modified".to_owned()),
            Role::Out(values, tol) => close(DType::F32, got, &encode(DType::F32, values), *tol),
            Role::Exact(bytes) if got == bytes => Ok(()),
            Role::Exact(bytes) => {
                let at = got.iter().zip(bytes).position(|(a, b)| a != b).unwrap_or(0);
                Err(format!("byte {at} is {:#x}, expected {:#x}", got[at], bytes[at]))
            }
            Role::InOut { after, dtype, tol, .. } => close(*dtype, got, after, *tol),
            Role::Scratch(_) | Role::Unordered(_) => Ok(()),
        }
    }
}

fn close(dtype: DType, got: &[u8], want: &[u8], tol: Tol) -> Result<(), String> {
    compare(&decode(dtype, got), &decode(dtype, want), tol).map_err(|m| m.to_string())
}

pub fn decode(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    let mut out = vec![0.0; bytes.len() / dtype.block_bytes() * dtype.block_len()];
    refrain_tensor::quant::dequantize(dtype, bytes, &mut out).unwrap();
    out
}

type Build = Box<dyn Fn(&Kernels, &[Buf], &mut Vec<Launch>) -> Result<(), KernelError>>;

/// One or more launches over a set of buffers.
pub struct Case {
    pub name: String,
    pub roles: Vec<Role>,
    pub build: Build,
}

impl Case {
    pub fn new(
        name: impl Into<String>,
        roles: Vec<Role>,
        build: impl Fn(&Kernels, &[Buf], &mut Vec<Launch>) -> Result<(), KernelError> + 'static,
    ) -> Case {
        Case { name: name.into(), roles, build: Box::new(build) }
    }

    /// Runs the case eagerly, then recorded by both methods.
    pub fn run(&self, bed: &mut Bed) -> Result<(), String> {
        let mut image = vec![GUARD; ZONE];
        let mut places = Vec::new();
        for role in &self.roles {
            let bytes = role.before();
            places.push((image.len(), bytes.len()));
            image.extend(bytes);
            image.resize((image.len() + ZONE).next_multiple_of(ZONE), GUARD);
        }
        let text = |e: refrain_driver::DriverError| e.to_string();
        let mut layout = MemoryLayout::new("case");
        let pool = layout.device("pool", image.len() as u64);
        let memory = bed.plan(&layout);
        let pool = memory.buf(pool);
        let bufs: Vec<Buf> = places.iter().map(|&(at, n)| pool.slice(at as u64, n as u64).unwrap()).collect();
        let mut launches = Vec::new();
        (self.build)(&bed.kernels, &bufs, &mut launches).map_err(|e| e.to_string())?;
        let mut lease = memory.lease().map_err(text)?;

        let mut eager = vec![0; image.len()];
        bed.stream.upload(&mut lease, pool, &image).map_err(text)?;
        bed.stream
            .run(&mut lease, false, |q| launches.iter().try_for_each(|l| q.launch(l)))
            .and_then(|out| out.read(&mut bed.stream, pool, &mut eager))
            .map_err(text)?;
        self.check(&image, &eager, &places)?;

        for method in [Method::Stream, Method::Nodes] {
            let options = RecordOptions::named(&self.name);
            let graph = bed
                .stream
                .record(&memory, method, &options, |q| launches.iter().try_for_each(|l| q.launch(l)))
                .map_err(text)?;
            if graph.info().nodes.len() != launches.len() {
                return Err(format!("{method} recorded {} nodes", graph.info().nodes.len()));
            }
            bed.stream.upload(&mut lease, pool, &image).map_err(text)?;
            let mut replayed = vec![0; image.len()];
            graph
                .replay(&mut lease, &mut bed.stream)
                .and_then(|out| out.read(&mut bed.stream, pool, &mut replayed))
                .map_err(text)?;
            for (role, &(at, n)) in self.roles.iter().zip(&places) {
                if matches!(role, Role::Unordered(_)) {
                    replayed[at..at + n].copy_from_slice(&eager[at..at + n]);
                }
            }
            if let Some(at) = eager.iter().zip(&replayed).position(|(a, b)| a != b) {
                return Err(format!("{method} differs from eager at byte {at}"));
            }
        }
        let mut reports = bed.device.take_reports();
        reports.retain(|report| !(bed.copies_all && report.starts_with("race between")));
        if reports.is_empty() { Ok(()) } else { Err(reports.join("; ")) }
    }

    fn check(&self, image: &[u8], got: &[u8], places: &[(usize, usize)]) -> Result<(), String> {
        let mut end = 0;
        for (i, (role, &(at, n))) in self.roles.iter().zip(places).enumerate() {
            if got[end..at] != image[end..at] {
                return Err(format!("the guard before buffer {i} was overwritten"));
            }
            role.check(&got[at..at + n]).map_err(|e| format!("buffer {i}: {e}"))?;
            end = at + n;
        }
        if got[end..] == image[end..] { Ok(()) } else { Err("the last guard was overwritten".to_owned()) }
    }
}

/// Runs all cases and reports every failure by name.
pub fn run_all(bed: &mut Bed, cases: Vec<Case>) {
    let n = cases.len();
    let failed: Vec<String> =
        cases.iter().filter_map(|case| case.run(bed).err().map(|e| format!("{}: {e}", case.name))).collect();
    assert!(failed.is_empty(), "{} of {n} cases failed:\n  {}", failed.len(), failed.join("\n  "));
}

pub fn shape(dims: &[usize]) -> Shape {
    Shape::new(dims).unwrap()
}

pub fn dense(buf: Buf, dims: &[usize]) -> BufView {
    BufView::dense(buf, DType::F32, shape(dims))
}

pub fn normals(n: usize, seed: u64) -> Vec<f32> {
    let mut rng = Rng::new(seed);
    (0..n).map(|_| rng.normal()).collect()
}

pub fn f32s(values: &[f32]) -> Vec<u8> {
    encode(DType::F32, values)
}

pub fn i32s(values: &[i32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

/// Operand of the reference.
pub struct Operand<'a>(pub DType, pub Layout, pub &'a [u8]);

/// Runs the reference; the outputs are bytes.
pub fn reference(op: &Op, inputs: &[Operand<'_>], outputs: &mut [(TensorType, Vec<u8>)]) {
    let inputs: Vec<In<'_>> = inputs
        .iter()
        .map(|Operand(dtype, layout, bytes)| In { dtype: *dtype, layout: *layout, bytes })
        .collect();
    let mut outs: Vec<Out<'_>> = outputs.iter_mut().map(|(ty, bytes)| Out { ty: *ty, bytes }).collect();
    refrain_reference::run(op, &inputs, &mut outs).unwrap();
}

/// Returns the reference's single F32 output.
pub fn reference_f32(op: &Op, inputs: &[Operand<'_>], dims: &[usize]) -> Vec<f32> {
    let ty = TensorType::new(DType::F32, shape(dims));
    let mut outputs = [(ty, vec![0; 4 * ty.shape.n_elements()])];
    reference(op, inputs, &mut outputs);
    decode(DType::F32, &outputs[0].1)
}

pub fn contiguous(dims: &[usize]) -> Layout {
    Layout::contiguous(shape(dims))
}
