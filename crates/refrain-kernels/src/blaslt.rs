//! Matrix products by cuBLASLt. The library is loaded if present; building and running need no CUDA toolkit.
//!
//! The library's heuristic proposes algorithms when a product is planned, never during a recording. Split
//! sums may only be reduced out of place, in order. The first algorithm is used, or the fastest if
//! [`BlasLtProduct::measure`] ran before the first use. A process decides once per GPU and shape, so recorded
//! and eager products, and several backends, run the same code with the same workspace layout.
#![allow(unsafe_code)]

use std::any::Any;
use std::collections::HashMap;
use std::ffi::c_void;
use std::path::{Path, PathBuf};
use std::ptr::null_mut;
use std::sync::{Arc, LazyLock, Mutex, OnceLock, PoisonError};

use refrain_driver::{
    Access, Buf, Context, DriverError, Lease, LibraryCall, Memory, Method, Queue, RecordOptions, Stream,
};
use refrain_tensor::DType;

use crate::error::{KernelError, OpCase};
use crate::matmul::MATMUL_DTYPES;

type Handle = *mut c_void;

/// Workspace limit for algorithms, in bytes.
const WORKSPACE: u64 = 32 << 20;
/// Number of algorithms requested from the heuristic.
const CANDIDATES: usize = 8;
/// Target number of operations in a timed recording, and the maximum number of products in it.
const TIMED_OPERATIONS: f64 = 4e11;
const MAX_TIMED: f64 = 20.0;
/// Replays of a timed recording; the fastest counts.
const REPLAYS: usize = 3;
/// An algorithm must take less than this fraction of the best earlier time to be preferred over the
/// heuristic's order.
const CLEARLY_LESS: f32 = 0.98;

// Values from cublasLt.h and library_types.h.
const COMPUTE_32F: u32 = 68;
const R_32F: u32 = 0;
const R_16F: u32 = 2;
const R_16BF: u32 = 14;
const DESC_TRANSA: u32 = 3;
const DESC_TRANSB: u32 = 4;
const OP_N: i32 = 0;
const OP_T: i32 = 1;
const LAYOUT_BATCH_COUNT: u32 = 5;
const LAYOUT_BATCH_OFFSET: u32 = 6;
const PREF_MAX_WORKSPACE: u32 = 1;
/// Minimum alignment of the first factor. The next three attributes are those of the second factor, the
/// addend and the result.
const PREF_MIN_ALIGNMENT: u32 = 5;
/// The library's default assumption for the alignment of every address.
const ALIGNMENT: usize = 256;
const NOT_SUPPORTED: u32 = 15;
const PREF_REDUCTION_MASK: u32 = 3;
/// Out-of-place reductions, in the type of the accumulator.
const REDUCTION_COMPUTE_TYPE: u32 = 2;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
struct Algorithm([u64; 8]);

#[derive(Clone, Copy)]
#[repr(C)]
struct AlgorithmCandidate {
    algorithm: Algorithm,
    workspace_bytes: usize,
    status: u32,
    waves: f32,
    reserved: [i32; 4],
}

/// The candidate algorithms of a shape and the chosen one.
#[derive(Debug)]
struct AlgorithmChoice {
    candidates: Vec<Algorithm>,
    chosen: OnceLock<usize>,
}

impl AlgorithmChoice {
    fn new(candidates: Vec<Algorithm>) -> AlgorithmChoice {
        AlgorithmChoice { candidates, chosen: OnceLock::new() }
    }

    /// The algorithm that runs; the choice is final after this call. Without a measurement it is the first
    /// one.
    fn algorithm(&self) -> &Algorithm {
        &self.candidates[*self.chosen.get_or_init(|| 0)]
    }
}

/// Index of the fastest time. A later one must be clearly less than the best before it ([`CLEARLY_LESS`]).
fn fastest(ms: &[f32]) -> usize {
    (1..ms.len()).fold(0, |best, i| if ms[i] < CLEARLY_LESS * ms[best] { i } else { best })
}

/// Library file, GPU id and shape.
type ChoiceKey = (String, [u8; 16], BlasLtShape);

/// The choices made by this process.
static CHOICES: LazyLock<Mutex<HashMap<ChoiceKey, Arc<AlgorithmChoice>>>> = LazyLock::new(Mutex::default);

/// Returns the choice for a key. The first choice made for a key is kept.
fn shared_choice(key: ChoiceKey, candidates: Vec<Algorithm>) -> Arc<AlgorithmChoice> {
    let mut all = CHOICES.lock().unwrap_or_else(PoisonError::into_inner);
    Arc::clone(all.entry(key).or_insert_with(|| Arc::new(AlgorithmChoice::new(candidates))))
}

/// Measured times of the algorithms of a shape.
#[derive(Clone, Debug, PartialEq)]
pub struct BlasLtTimes {
    /// Milliseconds per algorithm, in the heuristic's order.
    pub ms: Vec<f32>,
    /// Index of the chosen algorithm.
    pub chosen: usize,
}

macro_rules! functions {
    ($($field:ident: $symbol:literal fn($($arg:ty),*);)*) => {
        struct BlasLtFunctions {
            version: unsafe extern "C" fn() -> usize,
            $($field: unsafe extern "C" fn($($arg),*) -> u32,)*
        }

        impl BlasLtFunctions {
            fn look_up(library: &libloading::Library, file: &str) -> Result<BlasLtFunctions, KernelError> {
                let missing = |symbol: &'static str| KernelError::BlasLtSymbol { library: file.to_owned(), symbol };
                Ok(BlasLtFunctions {
                    version: {
                        // SAFETY: the type is the function's signature in cublasLt.h; `BlasLt` keeps the library open
                        // as long as the pointer.
                        let found = unsafe {
                            library.get::<unsafe extern "C" fn() -> usize>(b"cublasLtGetVersion\0")
                        };
                        *found.map_err(|_| missing("cublasLtGetVersion"))?
                    },
                    $($field: {
                        // SAFETY: as above. The result is an enumeration in the header; `u32` holds its number.
                        let found = unsafe { library.get::<unsafe extern "C" fn($($arg),*) -> u32>($symbol) };
                        *found.map_err(|_| missing(stringify!($field)))?
                    },)*
                })
            }
        }
    };
}

functions! {
    create: b"cublasLtCreate\0" fn(*mut Handle);
    destroy: b"cublasLtDestroy\0" fn(Handle);
    desc_create: b"cublasLtMatmulDescCreate\0" fn(*mut Handle, u32, u32);
    desc_set: b"cublasLtMatmulDescSetAttribute\0" fn(Handle, u32, *const c_void, usize);
    desc_destroy: b"cublasLtMatmulDescDestroy\0" fn(Handle);
    layout_create: b"cublasLtMatrixLayoutCreate\0" fn(*mut Handle, u32, u64, u64, i64);
    layout_set: b"cublasLtMatrixLayoutSetAttribute\0" fn(Handle, u32, *const c_void, usize);
    layout_destroy: b"cublasLtMatrixLayoutDestroy\0" fn(Handle);
    pref_create: b"cublasLtMatmulPreferenceCreate\0" fn(*mut Handle);
    pref_set: b"cublasLtMatmulPreferenceSetAttribute\0" fn(Handle, u32, *const c_void, usize);
    pref_destroy: b"cublasLtMatmulPreferenceDestroy\0" fn(Handle);
    heuristic: b"cublasLtMatmulAlgoGetHeuristic\0" fn(Handle, Handle, Handle, Handle, Handle, Handle, Handle, i32, *mut AlgorithmCandidate, *mut i32);
    matmul: b"cublasLtMatmul\0" fn(Handle, Handle, *const c_void, *const c_void, Handle, *const c_void, Handle, *const c_void, *const c_void, Handle, *mut c_void, Handle, *const Algorithm, *mut c_void, usize, *mut c_void);
}

/// The loaded library, with a handle for one context.
pub struct BlasLt {
    functions: BlasLtFunctions,
    handle: Handle,
    version: usize,
    file: String,
    card: [u8; 16],
    planned: Mutex<HashMap<BlasLtShape, Arc<Planned>>>,
    _library: libloading::Library,
}

// SAFETY: the handle is a pointer to the library's own state, which cublasLt.h says may be used from several threads;
// nothing else in the structure is bound to a thread.
unsafe impl Send for BlasLt {}
// SAFETY: as for `Send`; `planned` has a lock.
unsafe impl Sync for BlasLt {}

/// Memory layout of a factor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlasLtFactor {
    /// Whether rows are contiguous; otherwise columns are.
    pub has_rows: bool,
    /// Elements from one row (or column) to the next.
    pub pitch: usize,
    /// Elements from one matrix to the next; 0 if all share one.
    pub batch_stride: usize,
}

/// Shape of one or more products `y[m, n] = a[m, k] . b[k, n]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlasLtShape {
    /// Dtype of `a` and `b`: F32, F16 or BF16.
    pub dtype: DType,
    /// Dtype of `y`: the same, or F32.
    pub out: DType,
    /// Rows of `a`.
    pub m: usize,
    /// Columns of `b`.
    pub n: usize,
    /// Columns of `a`, rows of `b`.
    pub k: usize,
    /// Number of products.
    pub n_batch: usize,
    /// Layout of `a`.
    pub a: BlasLtFactor,
    /// Layout of `b`.
    pub b: BlasLtFactor,
    /// Alignment of every matrix in bytes, a power of two up to 256.
    pub align: usize,
}

impl BlasLtShape {
    /// Shape of `y[m, n] = x[m, k] . w[n, k]^T`, dense and aligned, with `y` in F32.
    #[must_use]
    pub fn of_rows(dtype: DType, m: usize, n: usize, k: usize) -> BlasLtShape {
        let a = BlasLtFactor { has_rows: true, pitch: k, batch_stride: 0 };
        let b = BlasLtFactor { has_rows: false, ..a };
        BlasLtShape { dtype, out: DType::F32, m, n, k, n_batch: 1, a, b, align: ALIGNMENT }
    }

    /// Elements that a factor of this many rows and columns spans, first to last.
    fn extent(&self, factor: &BlasLtFactor, rows: usize, cols: usize) -> Option<usize> {
        let (n_runs, run) = if factor.has_rows { (rows, cols) } else { (cols, rows) };
        let last = self.n_batch.checked_sub(1)?.checked_mul(factor.batch_stride)?;
        n_runs.checked_sub(1)?.checked_mul(factor.pitch)?.checked_add(run)?.checked_add(last)
    }
}

/// The parts of a product that are fixed when it is planned.
struct Planned {
    desc: Handle,
    /// Column-major layouts of `b`, `a` and `y`.
    layouts: [Handle; 3],
    choice: Arc<AlgorithmChoice>,
    destroy: [unsafe extern "C" fn(Handle) -> u32; 2],
}

// SAFETY: descriptors are plain library data that is only read once `BlasLt::choose` has created them.
unsafe impl Send for Planned {}
// SAFETY: as for `Send`.
unsafe impl Sync for Planned {}

impl Drop for Planned {
    fn drop(&mut self) {
        // SAFETY: each handle was created by `BlasLt::choose` or is null, and only this function destroys it.
        // The library is still open, because every owner of a `Planned` also holds its `BlasLt`.
        unsafe {
            (self.destroy[0])(self.desc);
            self.layouts.iter().for_each(|layout| {
                (self.destroy[1])(*layout);
            });
        }
    }
}

/// A product over given buffers, which can be enqueued any number of times.
#[derive(Clone)]
pub struct BlasLtProduct {
    library: Arc<BlasLt>,
    planned: Arc<Planned>,
    shape: BlasLtShape,
    a: Buf,
    b: Buf,
    y: Buf,
    /// Addend, if any: the size of `y`, and possibly `y` itself.
    c: Option<Buf>,
    workspace: Buf,
    step: Arc<str>,
}

impl BlasLt {
    /// Workspace bytes that a product needs, 256-byte aligned.
    pub const WORKSPACE_BYTES: u64 = WORKSPACE;

    /// Opens the library at a path or in the usual locations, and creates a handle for this thread's current
    /// context.
    pub fn open(ctx: &Context, path: Option<&Path>) -> Result<Arc<BlasLt>, KernelError> {
        if ctx.device().backend() != "cuda" {
            return Err(KernelError::BlasLtMissing { tried: "nothing: the device is simulated".to_owned() });
        }
        let candidates = match path {
            Some(path) => vec![path.to_owned()],
            None => candidate_paths(),
        };
        let mut tried = Vec::new();
        for file in candidates {
            // SAFETY: loading a library runs its initialisers; cuBLASLt's set up its tables and nothing else.
            match unsafe { libloading::Library::new(&file) } {
                Ok(library) => return BlasLt::from_library(library, &file, ctx).map(Arc::new),
                Err(_) => tried.push(file.display().to_string()),
            }
        }
        Err(KernelError::BlasLtMissing { tried: tried.join(", ") })
    }

    fn from_library(library: libloading::Library, path: &Path, ctx: &Context) -> Result<BlasLt, KernelError> {
        let file = path.display().to_string();
        let functions = BlasLtFunctions::look_up(&library, &file)?;
        let mut handle = null_mut();
        // SAFETY: the version call takes no argument. `handle` outlives the call that writes it. The thread's
        // context is current because the caller holds a `Context`.
        let version = unsafe {
            ok("cublasLtCreate", (functions.create)(&mut handle))?;
            (functions.version)()
        };
        let card = ctx.device().info().uuid;
        Ok(BlasLt { functions, handle, version, file, card, planned: Mutex::default(), _library: library })
    }

    /// The library's version as (major, minor), for example `(13, 0)`.
    #[must_use]
    pub fn version(&self) -> (usize, usize) {
        // 130001 is 13.0.1.
        (self.version / 10_000, self.version % 10_000 / 100)
    }

    /// The loaded file.
    #[must_use]
    pub fn file(&self) -> &str {
        &self.file
    }

    /// Refuses a shape for which the library has no algorithm. The first call per shape queries the
    /// heuristic.
    pub fn check(&self, shape: BlasLtShape) -> Result<(), KernelError> {
        self.planned(shape, &OpCase { op: "product", dtype: shape.dtype, shape: &dims(&shape) }).map(|_| ())
    }

    fn planned(&self, shape: BlasLtShape, case: &OpCase<'_>) -> Result<Arc<Planned>, KernelError> {
        case.sizes()?;
        crate::require!(case, MATMUL_DTYPES.contains(&shape.dtype), "factors are F32, F16 or BF16");
        crate::require!(
            case,
            shape.out == shape.dtype || shape.out == DType::F32,
            "the result is {}, must be F32 or the dtype of the factors",
            shape.out
        );
        let is_align = shape.align.is_power_of_two() && shape.align <= ALIGNMENT;
        crate::require!(
            case,
            is_align,
            "the alignment is {} bytes, must be a power of two up to {ALIGNMENT}",
            shape.align
        );
        for (factor, rows, cols) in [(shape.a, shape.m, shape.k), (shape.b, shape.k, shape.n)] {
            let (n_runs, run) = if factor.has_rows { (rows, cols) } else { (cols, rows) };
            let fits = factor.pitch >= run && i64::try_from(factor.pitch).is_ok();
            crate::require!(
                case,
                fits && i64::try_from(factor.batch_stride).is_ok(),
                "{n_runs} runs of {run} elements have a pitch of {}",
                factor.pitch
            );
        }
        let mut planned_shapes = self.planned.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(planned) = planned_shapes.get(&shape) {
            return Ok(Arc::clone(planned));
        }
        let planned = Arc::new(self.choose(shape, case)?);
        planned_shapes.insert(shape, Arc::clone(&planned));
        Ok(planned)
    }

    /// Creates a product over buffers. [`BlasLt::check`] must accept its shape.
    pub fn product(
        self: &Arc<BlasLt>,
        shape: BlasLtShape,
        [a, b, y, workspace]: [Buf; 4],
        step: &str,
    ) -> Result<BlasLtProduct, KernelError> {
        let dims = dims(&shape);
        let case = OpCase { op: "product", dtype: shape.dtype, shape: &dims };
        let planned = self.planned(shape, &case)?;
        let bytes = |n: Option<usize>, dtype: DType| n.and_then(|n| n.checked_mul(dtype.block_bytes()));
        let extents = [shape.extent(&shape.a, shape.m, shape.k), shape.extent(&shape.b, shape.k, shape.n)];
        let results = shape.n_batch.checked_mul(shape.m).and_then(|n| n.checked_mul(shape.n));
        // At the library's default alignment only 16 bytes are enforced: its kernels need no more.
        let align = if shape.align < ALIGNMENT { shape.align as u64 } else { 16 };
        Ok(BlasLtProduct {
            library: Arc::clone(self),
            planned,
            shape,
            a: case.buf("a", a, bytes(extents[0], shape.dtype), align)?,
            b: case.buf("b", b, bytes(extents[1], shape.dtype), align)?,
            y: case.buf("y", y, bytes(results, shape.out), align)?,
            c: None,
            workspace: case.buf("workspace", workspace, Some(WORKSPACE as usize), 256)?,
            step: Arc::from(step),
        })
    }

    fn choose(&self, shape: BlasLtShape, case: &OpCase<'_>) -> Result<Planned, KernelError> {
        let f = &self.functions;
        let kind = |dtype: DType| match dtype {
            DType::F16 => R_16F,
            DType::BF16 => R_16BF,
            _ => R_32F,
        };
        let (factors, result) = (kind(shape.dtype), kind(shape.out));
        let [m, n, k] = [shape.m, shape.n, shape.k].map(|n| n as u64);
        let mut planned = Planned {
            desc: null_mut(),
            layouts: [null_mut(); 3],
            choice: Arc::new(AlgorithmChoice::new(Vec::new())),
            destroy: [f.desc_destroy, f.layout_destroy],
        };
        let mut preference = Preference { destroy: f.pref_destroy, handle: null_mut() };
        let nothing = AlgorithmCandidate {
            algorithm: Algorithm([0; 8]),
            workspace_bytes: 0,
            status: 0,
            waves: 0.0,
            reserved: [0; 4],
        };
        let (mut found, mut n_found) = ([nothing; CANDIDATES], 0);
        // The library is column-major: it computes y^T = b^T a^T, [n, m] = [n, k] [k, m]. A factor with
        // contiguous rows needs no transposition there; one with contiguous columns does.
        let transposition = |factor: &BlasLtFactor| if factor.has_rows { OP_N } else { OP_T };
        let sizes = |factor: &BlasLtFactor, rows: u64, cols: u64| match factor.has_rows {
            true => (factors, cols, rows, factor.pitch as i64, factor.batch_stride as i64),
            false => (factors, rows, cols, factor.pitch as i64, factor.batch_stride as i64),
        };
        let layouts =
            [sizes(&shape.b, k, n), sizes(&shape.a, m, k), (result, n, m, n as i64, (n * m) as i64)];
        // SAFETY: every pointer refers to a local that outlives its call, attributes have the sizes that
        // cublasLt.h defines, and `planned` and `preference` destroy what is created.
        unsafe {
            ok("cublasLtMatmulDescCreate", (f.desc_create)(&mut planned.desc, COMPUTE_32F, R_32F))?;
            for (which, factor) in [(DESC_TRANSA, &shape.b), (DESC_TRANSB, &shape.a)] {
                let transposed = transposition(factor);
                let set = (f.desc_set)(planned.desc, which, (&raw const transposed).cast(), size_of::<i32>());
                ok("cublasLtMatmulDescSetAttribute", set)?;
            }
            for (layout, (kind, rows, cols, pitch, offset)) in planned.layouts.iter_mut().zip(layouts) {
                let created = (f.layout_create)(layout, kind, rows, cols, pitch);
                ok("cublasLtMatrixLayoutCreate", created)?;
                if shape.n_batch > 1 {
                    let count = shape.n_batch as i32;
                    let set = (f.layout_set)(
                        *layout,
                        LAYOUT_BATCH_COUNT,
                        (&raw const count).cast(),
                        size_of::<i32>(),
                    );
                    ok("cublasLtMatrixLayoutSetAttribute", set)?;
                    let set = (f.layout_set)(
                        *layout,
                        LAYOUT_BATCH_OFFSET,
                        (&raw const offset).cast(),
                        size_of::<i64>(),
                    );
                    ok("cublasLtMatrixLayoutSetAttribute", set)?;
                }
            }
            ok("cublasLtMatmulPreferenceCreate", (f.pref_create)(&mut preference.handle))?;
            let (bytes, mask) = (WORKSPACE as usize, REDUCTION_COMPUTE_TYPE);
            let set = (f.pref_set)(
                preference.handle,
                PREF_MAX_WORKSPACE,
                (&raw const bytes).cast(),
                size_of::<usize>(),
            );
            ok("cublasLtMatmulPreferenceSetAttribute", set)?;
            let set = (f.pref_set)(
                preference.handle,
                PREF_REDUCTION_MASK,
                (&raw const mask).cast(),
                size_of::<u32>(),
            );
            ok("cublasLtMatmulPreferenceSetAttribute", set)?;
            if shape.align < ALIGNMENT {
                let bytes = shape.align as u32;
                for which in PREF_MIN_ALIGNMENT..PREF_MIN_ALIGNMENT + 4 {
                    let set =
                        (f.pref_set)(preference.handle, which, (&raw const bytes).cast(), size_of::<u32>());
                    ok("cublasLtMatmulPreferenceSetAttribute", set)?;
                }
            }
            let [a, b, d] = planned.layouts;
            let status = (f.heuristic)(
                self.handle,
                planned.desc,
                a,
                b,
                d,
                d,
                preference.handle,
                CANDIDATES as i32,
                found.as_mut_ptr(),
                &mut n_found,
            );
            crate::require!(case, status != NOT_SUPPORTED, "cuBLASLt has no algorithm for this shape");
            ok("cublasLtMatmulAlgoGetHeuristic", status)?;
        }
        let found = &found[..usize::try_from(n_found).unwrap_or(0).min(CANDIDATES)];
        let usable =
            |found: &&AlgorithmCandidate| found.status == 0 && found.workspace_bytes as u64 <= WORKSPACE;
        let candidates: Vec<Algorithm> = found.iter().filter(usable).map(|found| found.algorithm).collect();
        crate::require!(case, !candidates.is_empty(), "cuBLASLt has no algorithm for this shape");
        planned.choice = shared_choice((self.file.clone(), self.card, shape), candidates);
        Ok(planned)
    }
}

struct Preference {
    destroy: unsafe extern "C" fn(Handle) -> u32,
    handle: Handle,
}

impl Drop for Preference {
    fn drop(&mut self) {
        // SAFETY: created by `BlasLt::choose`, the only constructor of this value, or null, which the library
        // accepts.
        unsafe { (self.destroy)(self.handle) };
    }
}

impl Drop for BlasLt {
    fn drop(&mut self) {
        if let Ok(planned) = self.planned.get_mut() {
            planned.clear();
        }
        // SAFETY: the handle was created in `from_library` and is destroyed only here. Products hold an `Arc`
        // of this value, and recordings hold products.
        unsafe { (self.functions.destroy)(self.handle) };
    }
}

impl std::fmt::Debug for BlasLt {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (major, minor) = self.version();
        write!(f, "cuBLASLt {major}.{minor} from {}", self.file)
    }
}

impl std::fmt::Debug for BlasLtProduct {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "BlasLtProduct {:?} of step {:?}", self.shape, &*self.step)
    }
}

/// Failure of a library call made while enqueueing.
#[derive(Debug, thiserror::Error)]
#[error("cublasLtMatmul of {shape:?} failed with code {code}")]
struct Failed {
    shape: BlasLtShape,
    code: u32,
}

impl BlasLtProduct {
    /// Shape of the product.
    #[must_use]
    pub fn shape(&self) -> BlasLtShape {
        self.shape
    }

    /// Name of the step that the product belongs to.
    #[must_use]
    pub fn step(&self) -> &Arc<str> {
        &self.step
    }

    /// Buffers that the product accesses, and how.
    #[must_use]
    pub fn accesses(&self) -> [(Buf, Access); 4] {
        [
            (self.a, Access::Read),
            (self.b, Access::Read),
            (self.y, Access::Write),
            (self.workspace, Access::Write),
        ]
    }

    /// Returns the same product over other buffers, to load the library's code before anything records.
    pub fn over(&self, [a, b, y, workspace]: [Buf; 4]) -> Result<BlasLtProduct, KernelError> {
        self.library.product(self.shape, [a, b, y, workspace], &self.step)
    }

    /// Returns the same product plus the contents of `c`, which has the size of the result and may be the
    /// result itself.
    pub fn adding(mut self, c: Buf) -> Result<BlasLtProduct, KernelError> {
        let dims = dims(&self.shape);
        let case = OpCase { op: "product", dtype: self.shape.dtype, shape: &dims };
        let align = if self.shape.align < ALIGNMENT { self.shape.align as u64 } else { 16 };
        self.c = Some(case.buf("c", c, usize::try_from(self.y.len()).ok(), align)?);
        Ok(self)
    }

    /// Times each algorithm over the product's own buffers and chooses the fastest. The first decision per
    /// shape in a process is final: if an earlier measurement or use made one, this returns `None` and runs
    /// nothing.
    pub fn measure(
        &self,
        stream: &mut Stream,
        memory: &Arc<Memory>,
        lease: &mut Lease,
    ) -> Result<Option<BlasLtTimes>, DriverError> {
        let choice = &self.planned.choice;
        if choice.chosen.get().is_some() {
            return Ok(None);
        }
        let ms = match &choice.candidates[..] {
            [_] => vec![0.0],
            all => all.iter().map(|with| self.time(with, stream, memory, lease)).collect::<Result<_, _>>()?,
        };
        let chosen = *choice.chosen.get_or_init(|| fastest(&ms));
        Ok(Some(BlasLtTimes { ms, chosen }))
    }

    /// Times one algorithm in milliseconds, using a recording of several products: single calls may take
    /// longer on the host than on the device.
    fn time(
        &self,
        with: &Algorithm,
        stream: &mut Stream,
        memory: &Arc<Memory>,
        lease: &mut Lease,
    ) -> Result<f32, DriverError> {
        // The library loads its code on the first call, which must not happen during a recording.
        match stream.run(lease, false, |q| self.enqueue_with(with, q)) {
            // An algorithm that fails to run is dropped. If none runs, the first use reports the error.
            Err(DriverError::Caller(because)) => {
                tracing::debug!("{}: {because}", self.step);
                return Ok(f32::INFINITY);
            }
            ran => ran.map(drop)?,
        }
        stream.synchronize()?;
        let s = &self.shape;
        let operations = 2.0 * [s.n_batch, s.m, s.n, s.k].map(|n| n as f64).iter().product::<f64>();
        let n = (TIMED_OPERATIONS / operations).clamp(2.0, MAX_TIMED) as usize;
        let options = RecordOptions::named("timing of a product");
        let graph = stream.record(memory, Method::Stream, &options, |q| {
            (0..n).try_for_each(|_| self.enqueue_with(with, q))
        })?;
        let (start, end) = (stream.context().event()?, stream.context().event()?);
        let mut fastest_ms = f32::INFINITY;
        for _ in 0..REPLAYS {
            stream.record_event(&start)?;
            graph.replay(lease, stream)?;
            stream.record_event(&end)?;
            stream.synchronize()?;
            fastest_ms = fastest_ms.min(end.ms_since(&start)?);
        }
        Ok(fastest_ms / n as f32)
    }

    /// Enqueues the product.
    pub fn enqueue(&self, q: &mut dyn Queue) -> Result<(), DriverError> {
        self.enqueue_with(self.planned.choice.algorithm(), q)
    }

    fn enqueue_with(&self, algorithm: &Algorithm, q: &mut dyn Queue) -> Result<(), DriverError> {
        let keep: Arc<dyn Any + Send + Sync> = Arc::new(self.clone());
        q.library(&LibraryCall {
            step: Arc::clone(&self.step),
            name: Arc::from("cublasLtMatmul"),
            reads: [self.a, self.b].into_iter().chain(self.c).collect(),
            writes: vec![self.y, self.workspace],
            keep: Some(keep),
            run: &|stream| {
                let [left, right, y, workspace] = [
                    stream.address(self.a)?,
                    stream.address(self.b)?,
                    stream.address(self.y)?,
                    stream.address(self.workspace)?,
                ]
                .map(|address| address as *mut c_void);
                let (one, beta) = (1.0_f32, if self.c.is_some() { 1.0_f32 } else { 0.0 });
                let added = match self.c {
                    Some(c) => stream.address(c)? as *mut c_void,
                    None => y,
                };
                let [a, b, d] = self.planned.layouts;
                // SAFETY: handle, descriptors and algorithm belong to this product, which the queue keeps
                // alive. `product` checked that every buffer covers its layout. The buffers' memory outlives
                // the stream's work or the recording. The scalars alpha and beta are read before the call
                // returns.
                let code = unsafe {
                    (self.library.functions.matmul)(
                        self.library.handle,
                        self.planned.desc,
                        (&raw const one).cast(),
                        right,
                        a,
                        left,
                        b,
                        (&raw const beta).cast(),
                        added,
                        d,
                        y,
                        d,
                        algorithm,
                        workspace,
                        WORKSPACE as usize,
                        stream.raw() as *mut c_void,
                    )
                };
                match code {
                    0 => Ok(()),
                    code => Err(DriverError::Caller(Arc::new(Failed { shape: self.shape, code }))),
                }
            },
        })
    }
}

fn dims(shape: &BlasLtShape) -> [(&'static str, usize); 4] {
    [("n_batch", shape.n_batch), ("m", shape.m), ("n", shape.n), ("k", shape.k)]
}

fn ok(call: &'static str, code: u32) -> Result<(), KernelError> {
    if code == 0 { Ok(()) } else { Err(KernelError::BlasLt { call, code }) }
}

/// Candidate paths: the loader's own search, then the locations that toolkits and Python packages use.
fn candidate_paths() -> Vec<PathBuf> {
    let names = ["libcublasLt.so.13", "libcublasLt.so.12"];
    let toolkits =
        ["/usr/local/cuda/lib64", "/usr/local/cuda/targets/x86_64-linux/lib", "/usr/lib/x86_64-linux-gnu"];
    let folders = toolkits.iter().map(PathBuf::from).chain(crate::nvrtc::python_folders(&["cu13", "cublas"]));
    let found = folders.flat_map(|f| names.map(|n| f.join(n))).filter(|p| p.exists());
    names.iter().map(PathBuf::from).chain(found).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_decides_once_per_gpu_and_shape() {
        let algorithm = |n: u64| Algorithm([n; 8]);
        let shape = BlasLtShape::of_rows(DType::BF16, 3, 5, 7);
        let key = |card: u8| ("a test's library".to_owned(), [card; 16], shape);
        let first = shared_choice(key(1), vec![algorithm(1), algorithm(2)]);
        first.chosen.set(1).unwrap();
        // Another backend, whose heuristic returned another order.
        let second = shared_choice(key(1), vec![algorithm(2), algorithm(1)]);
        assert_eq!((second.algorithm(), second.chosen.get()), (&algorithm(2), Some(&1)));
        // Another GPU, used before it was measured.
        let other = shared_choice(key(2), vec![algorithm(3), algorithm(4)]);
        assert_eq!(other.algorithm(), &algorithm(3));
        assert_eq!(other.chosen.set(1), Err(1));
    }

    #[test]
    fn an_algorithm_must_be_clearly_faster_than_those_before_it() {
        assert_eq!(fastest(&[1.0]), 0);
        assert_eq!(fastest(&[1.0, 0.99, 0.985]), 0);
        assert_eq!(fastest(&[1.0, 0.9, 0.895, 0.8, 2.0]), 3);
        assert_eq!(fastest(&[1.0, 0.9, 0.895]), 1);
    }

    #[test]
    fn the_simulated_device_reports_that_it_has_no_library() {
        let device = crate::simulated(refrain_driver::sim::SimOptions::default()).unwrap();
        let ctx = device.context().unwrap();
        let error = BlasLt::open(&ctx, None).unwrap_err();
        assert!(matches!(error, KernelError::BlasLtMissing { .. }), "{error}");
        assert!(error.hint().unwrap().contains("nvidia-cublas"), "{error}");
    }
}
