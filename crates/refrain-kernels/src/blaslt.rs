//! Products with many rows by cuBLASLt, opened when it is there: building and running need no CUDA toolkit.
//!
//! An algorithm is chosen by the library's heuristic when a product is planned, never while something records; split
//! sums may only be reduced out of place, in order. So a recorded product and an eager one run the same code over the
//! same workspace.
#![allow(unsafe_code)]

use std::any::Any;
use std::collections::HashMap;
use std::ffi::c_void;
use std::path::{Path, PathBuf};
use std::ptr::null_mut;
use std::sync::{Arc, Mutex, PoisonError};

use refrain_driver::{Access, Buf, Context, DriverError, LibraryCall, Queue};
use refrain_tensor::DType;

use crate::error::{Case, KernelError};
use crate::gemm::GEMM_DTYPES;

type Handle = *mut c_void;

/// Bytes of workspace that algorithms may ask for.
const WORKSPACE: u64 = 32 << 20;

// Of cublasLt.h and library_types.h.
const COMPUTE_32F: u32 = 68;
const R_32F: u32 = 0;
const R_16F: u32 = 2;
const R_16BF: u32 = 14;
const DESC_TRANSA: u32 = 3;
const OP_T: i32 = 1;
const PREF_MAX_WORKSPACE: u32 = 1;
const NOT_SUPPORTED: u32 = 15;
const PREF_REDUCTION_MASK: u32 = 3;
/// Reductions out of place, in the type that sums are formed in.
const REDUCTION_COMPUTE_TYPE: u32 = 2;

#[derive(Clone, Copy)]
#[repr(C)]
struct Algorithm([u64; 8]);

#[derive(Clone, Copy)]
#[repr(C)]
struct Candidate {
    algorithm: Algorithm,
    workspace_bytes: usize,
    status: u32,
    waves: f32,
    reserved: [i32; 4],
}

macro_rules! functions {
    ($($field:ident: $symbol:literal fn($($arg:ty),*);)*) => {
        struct Functions {
            version: unsafe extern "C" fn() -> usize,
            $($field: unsafe extern "C" fn($($arg),*) -> u32,)*
        }

        impl Functions {
            fn look_up(library: &libloading::Library, file: &str) -> Result<Functions, KernelError> {
                let missing = |symbol: &'static str| KernelError::BlasLtSymbol { library: file.to_owned(), symbol };
                Ok(Functions {
                    version: {
                        // SAFETY: the type is the function's signature in cublasLt.h; `BlasLt` keeps the library open
                        // as long as the pointer.
                        let found = unsafe {
                            library.get::<unsafe extern "C" fn() -> usize>(b"cublasLtGetVersion\0")
                        };
                        *found.map_err(|_| missing("cublasLtGetVersion"))?
                    },
                    $($field: {
                        // SAFETY: as above, with the result, an enumeration, as the number it is.
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
    layout_destroy: b"cublasLtMatrixLayoutDestroy\0" fn(Handle);
    pref_create: b"cublasLtMatmulPreferenceCreate\0" fn(*mut Handle);
    pref_set: b"cublasLtMatmulPreferenceSetAttribute\0" fn(Handle, u32, *const c_void, usize);
    pref_destroy: b"cublasLtMatmulPreferenceDestroy\0" fn(Handle);
    heuristic: b"cublasLtMatmulAlgoGetHeuristic\0" fn(Handle, Handle, Handle, Handle, Handle, Handle, Handle, i32, *mut Candidate, *mut i32);
    matmul: b"cublasLtMatmul\0" fn(Handle, Handle, *const c_void, *const c_void, Handle, *const c_void, Handle, *const c_void, *const c_void, Handle, *mut c_void, Handle, *const Algorithm, *mut c_void, usize, *mut c_void);
}

/// The library with a handle of one context.
pub struct BlasLt {
    functions: Functions,
    handle: Handle,
    version: usize,
    file: String,
    planned: Mutex<HashMap<BlasLtShape, Arc<Planned>>>,
    _library: libloading::Library,
}

// SAFETY: the handle is a pointer to the library's own state, which cublasLt.h says may be used from several threads;
// nothing else in the structure is bound to a thread.
unsafe impl Send for BlasLt {}
// SAFETY: as for `Send`; `planned` has a lock.
unsafe impl Sync for BlasLt {}

/// A product `y[m, n] = x[m, k] . w[n, k]^T`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlasLtShape {
    /// Of `x` and `w`, F16 or BF16; `y` is F32.
    pub dtype: DType,
    /// Rows of `x`.
    pub m: usize,
    /// Rows of `w`.
    pub n: usize,
    /// Columns of both.
    pub k: usize,
}

/// What is fixed when a product is planned.
struct Planned {
    desc: Handle,
    /// Of `w`, `x` and `y`, as columns.
    layouts: [Handle; 3],
    algorithm: Algorithm,
    destroy: [unsafe extern "C" fn(Handle) -> u32; 2],
}

// SAFETY: descriptors are plain data of the library's that are only read after `BlasLt::choose` made them.
unsafe impl Send for Planned {}
// SAFETY: as for `Send`.
unsafe impl Sync for Planned {}

impl Drop for Planned {
    fn drop(&mut self) {
        // SAFETY: each was created by `BlasLt::choose` or is null, and this is the one place that destroys them; the
        // library is open, because whatever holds a `Planned` holds its `BlasLt` as well.
        unsafe {
            (self.destroy[0])(self.desc);
            self.layouts.iter().for_each(|layout| {
                (self.destroy[1])(*layout);
            });
        }
    }
}

/// One product over buffers, ready to be enqueued any number of times.
#[derive(Clone)]
pub struct BlasLtProduct {
    library: Arc<BlasLt>,
    planned: Arc<Planned>,
    shape: BlasLtShape,
    x: Buf,
    w: Buf,
    y: Buf,
    workspace: Buf,
    step: Arc<str>,
}

impl BlasLt {
    /// Bytes of workspace that a product needs, at a multiple of 256.
    pub const WORKSPACE_BYTES: u64 = WORKSPACE;

    /// Opens the library at a path, or at the usual places, and makes a handle for the context of this thread.
    pub fn open(ctx: &Context, path: Option<&Path>) -> Result<Arc<BlasLt>, KernelError> {
        if ctx.device().backend() != "cuda" {
            return Err(KernelError::BlasLtMissing { tried: "nothing: the device is simulated".to_owned() });
        }
        let candidates = match path {
            Some(path) => vec![path.to_owned()],
            None => usual_places(),
        };
        let mut tried = Vec::new();
        for file in candidates {
            // SAFETY: loading a library runs its initialisers; cuBLASLt's set up its tables and nothing else.
            match unsafe { libloading::Library::new(&file) } {
                Ok(library) => return BlasLt::from_library(library, &file).map(Arc::new),
                Err(_) => tried.push(file.display().to_string()),
            }
        }
        Err(KernelError::BlasLtMissing { tried: tried.join(", ") })
    }

    fn from_library(library: libloading::Library, path: &Path) -> Result<BlasLt, KernelError> {
        let file = path.display().to_string();
        let functions = Functions::look_up(&library, &file)?;
        let mut handle = null_mut();
        // SAFETY: the version takes nothing; `handle` outlives the call that writes it, and the thread's context is
        // current because the caller has a `Context`.
        let version = unsafe {
            ok("cublasLtCreate", (functions.create)(&mut handle))?;
            (functions.version)()
        };
        Ok(BlasLt { functions, handle, version, file, planned: Mutex::default(), _library: library })
    }

    /// The library's version, `(13, 0)`.
    #[must_use]
    pub fn version(&self) -> (usize, usize) {
        // 130001 is 13.0.1.
        (self.version / 10_000, self.version % 10_000 / 100)
    }

    /// The file that was opened.
    #[must_use]
    pub fn file(&self) -> &str {
        &self.file
    }

    /// Refuses a shape that the library has no algorithm for. The first time it asks the heuristic.
    pub fn check(&self, shape: BlasLtShape) -> Result<(), KernelError> {
        let dims = [("m", shape.m), ("n", shape.n), ("k", shape.k)];
        self.planned(shape, &Case { op: "product", dtype: shape.dtype, shape: &dims }).map(|_| ())
    }

    fn planned(&self, shape: BlasLtShape, case: &Case<'_>) -> Result<Arc<Planned>, KernelError> {
        case.sizes()?;
        crate::require!(case, GEMM_DTYPES.contains(&shape.dtype), "tensor cores multiply F16 and BF16");
        crate::require!(case, shape.k.is_multiple_of(8), "k must be a multiple of 8");
        let mut known = self.planned.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(planned) = known.get(&shape) {
            return Ok(Arc::clone(planned));
        }
        let planned = Arc::new(self.choose(shape, case)?);
        known.insert(shape, Arc::clone(&planned));
        Ok(planned)
    }

    /// A product over buffers, of a shape that [`BlasLt::check`] does not refuse.
    pub fn product(
        self: &Arc<BlasLt>,
        shape: BlasLtShape,
        [x, w, y, workspace]: [Buf; 4],
        step: &str,
    ) -> Result<BlasLtProduct, KernelError> {
        let dims = [("m", shape.m), ("n", shape.n), ("k", shape.k)];
        let case = Case { op: "product", dtype: shape.dtype, shape: &dims };
        let planned = self.planned(shape, &case)?;
        let bytes = |a: usize, b: usize, size: usize| a.checked_mul(b).and_then(|n| n.checked_mul(size));
        Ok(BlasLtProduct {
            library: Arc::clone(self),
            planned,
            shape,
            x: case.buf("x", x, bytes(shape.m, shape.k, 2), 16)?,
            w: case.buf("w", w, bytes(shape.n, shape.k, 2), 16)?,
            y: case.buf("y", y, bytes(shape.m, shape.n, 4), 16)?,
            workspace: case.buf("workspace", workspace, Some(WORKSPACE as usize), 256)?,
            step: Arc::from(step),
        })
    }

    fn choose(&self, shape: BlasLtShape, case: &Case<'_>) -> Result<Planned, KernelError> {
        let f = &self.functions;
        let kind = if shape.dtype == DType::F16 { R_16F } else { R_16BF };
        let [m, n, k] = [shape.m, shape.n, shape.k].map(|n| n as u64);
        let mut planned = Planned {
            desc: null_mut(),
            layouts: [null_mut(); 3],
            algorithm: Algorithm([0; 8]),
            destroy: [f.desc_destroy, f.layout_destroy],
        };
        let mut preference = Preference { destroy: f.pref_destroy, handle: null_mut() };
        let mut found = Candidate {
            algorithm: Algorithm([0; 8]),
            workspace_bytes: 0,
            status: 0,
            waves: 0.0,
            reserved: [0; 4],
        };
        let (mut n_found, transposed) = (0, OP_T);
        // Columns are the library's rows: w is [k, n] there, x is [k, m] and y is [n, m].
        let layouts = [(kind, k, n), (kind, k, m), (R_32F, n, m)];
        // SAFETY: every pointer leads to a local that outlives its call, attributes have the sizes that cublasLt.h gives
        // them, and what is created is destroyed by `planned` and `preference`.
        unsafe {
            ok("cublasLtMatmulDescCreate", (f.desc_create)(&mut planned.desc, COMPUTE_32F, R_32F))?;
            let set =
                (f.desc_set)(planned.desc, DESC_TRANSA, (&raw const transposed).cast(), size_of::<i32>());
            ok("cublasLtMatmulDescSetAttribute", set)?;
            for (layout, (kind, rows, cols)) in planned.layouts.iter_mut().zip(layouts) {
                let made = (f.layout_create)(layout, kind, rows, cols, rows as i64);
                ok("cublasLtMatrixLayoutCreate", made)?;
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
            let [a, b, d] = planned.layouts;
            let asked = (f.heuristic)(
                self.handle,
                planned.desc,
                a,
                b,
                d,
                d,
                preference.handle,
                1,
                &mut found,
                &mut n_found,
            );
            crate::require!(case, asked != NOT_SUPPORTED, "cuBLASLt has no algorithm for it");
            ok("cublasLtMatmulAlgoGetHeuristic", asked)?;
        }
        crate::require!(case, n_found > 0 && found.status == 0, "cuBLASLt has no algorithm for it");
        crate::require!(
            case,
            found.workspace_bytes as u64 <= WORKSPACE,
            "cuBLASLt asks for {} bytes of workspace",
            found.workspace_bytes
        );
        planned.algorithm = found.algorithm;
        Ok(planned)
    }
}

struct Preference {
    destroy: unsafe extern "C" fn(Handle) -> u32,
    handle: Handle,
}

impl Drop for Preference {
    fn drop(&mut self) {
        // SAFETY: created by `BlasLt::choose`, which alone makes this value, or null, which the library takes.
        unsafe { (self.destroy)(self.handle) };
    }
}

impl Drop for BlasLt {
    fn drop(&mut self) {
        if let Ok(planned) = self.planned.get_mut() {
            planned.clear();
        }
        // SAFETY: the handle was created in `from_library` and is destroyed only here; products hold an `Arc` of this
        // value, and recordings hold products.
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

/// A failure inside a call that a queue makes.
#[derive(Debug, thiserror::Error)]
#[error("cublasLtMatmul of {shape:?} failed with code {code}")]
struct Failed {
    shape: BlasLtShape,
    code: u32,
}

impl BlasLtProduct {
    /// What it multiplies.
    #[must_use]
    pub fn shape(&self) -> BlasLtShape {
        self.shape
    }

    /// Names the step.
    #[must_use]
    pub fn step(&self) -> &Arc<str> {
        &self.step
    }

    /// The buffers it touches and how.
    #[must_use]
    pub fn accesses(&self) -> [(Buf, Access); 4] {
        [
            (self.x, Access::Read),
            (self.w, Access::Read),
            (self.y, Access::Write),
            (self.workspace, Access::Write),
        ]
    }

    /// The same product over other buffers, to load the library's code before anything records.
    pub fn over(&self, [x, w, y, workspace]: [Buf; 4]) -> Result<BlasLtProduct, KernelError> {
        self.library.product(self.shape, [x, w, y, workspace], &self.step)
    }

    /// Enqueues it.
    pub fn enqueue(&self, q: &mut dyn Queue) -> Result<(), DriverError> {
        let keep: Arc<dyn Any + Send + Sync> = Arc::new(self.clone());
        q.library(&LibraryCall {
            step: Arc::clone(&self.step),
            name: Arc::from("cublasLtMatmul"),
            reads: vec![self.x, self.w],
            writes: vec![self.y, self.workspace],
            keep: Some(keep),
            run: &|stream| {
                let [x, w, y, workspace] = [
                    stream.address(self.x)?,
                    stream.address(self.w)?,
                    stream.address(self.y)?,
                    stream.address(self.workspace)?,
                ]
                .map(|address| address as *mut c_void);
                let (one, zero) = (1.0_f32, 0.0_f32);
                let [a, b, d] = self.planned.layouts;
                // SAFETY: handle, descriptors and algorithm are this product's and live as long as it, which the queue
                // keeps; `product` checked that every buffer is as large as the layouts say, and their memory outlives
                // the stream's work or the recording. Both factors are read before the call returns.
                let code = unsafe {
                    (self.library.functions.matmul)(
                        self.library.handle,
                        self.planned.desc,
                        (&raw const one).cast(),
                        w,
                        a,
                        x,
                        b,
                        (&raw const zero).cast(),
                        y,
                        d,
                        y,
                        d,
                        &self.planned.algorithm,
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

fn ok(call: &'static str, code: u32) -> Result<(), KernelError> {
    if code == 0 { Ok(()) } else { Err(KernelError::BlasLt { call, code }) }
}

/// The loader's own search, then where toolkits and Python packages put the library.
fn usual_places() -> Vec<PathBuf> {
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
    fn the_simulated_device_has_no_library_and_says_so() {
        let device = crate::simulated(refrain_driver::sim::SimOptions::default()).unwrap();
        let ctx = device.context().unwrap();
        let error = BlasLt::open(&ctx, None).unwrap_err();
        assert!(matches!(error, KernelError::BlasLtMissing { .. }), "{error}");
        assert!(error.hint().unwrap().contains("nvidia-cublas"), "{error}");
    }
}
