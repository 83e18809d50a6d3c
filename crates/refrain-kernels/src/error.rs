//! Errors of launchers, compiler and loader.

use refrain_driver::{Buf, DriverError};
use refrain_tensor::DType;

/// Reason why a launch or a kernel is unavailable.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KernelError {
    /// The op has no kernel for these arguments.
    #[error("{op} x {dtype} x [{shape}]: {because}")]
    Unsupported {
        /// Op.
        op: &'static str,
        /// Dtype.
        dtype: DType,
        /// Named sizes.
        shape: String,
        /// The violated requirement, with the numbers.
        because: String,
    },
    /// A buffer is too small for the shape.
    #[error("{op} x {dtype} x [{shape}]: {name} has {got_bytes} bytes, needs {need_bytes}")]
    Buffer {
        /// Op.
        op: &'static str,
        /// Dtype.
        dtype: DType,
        /// Named sizes.
        shape: String,
        /// Name of the buffer.
        name: &'static str,
        /// Size of the buffer.
        got_bytes: u64,
        /// Size that the shape requires.
        need_bytes: u64,
    },
    /// NVRTC is not installed.
    #[error("the CUDA compiler library NVRTC was not found (tried {tried})")]
    NvrtcMissing {
        /// File names and paths that were tried.
        tried: String,
    },
    /// The binary has no code for the GPU, and there is no compiler.
    #[error(
        "no kernels for {card}: this binary has {contents}, and the CUDA compiler library NVRTC was not found \
         (tried {tried})"
    )]
    NoKernels {
        /// Architecture of the GPU.
        card: String,
        /// Architectures in the binary, as text.
        contents: String,
        /// File names and paths that were tried.
        tried: String,
    },
    /// NVRTC lacks a function.
    #[error("{library} has no function {symbol}")]
    NvrtcSymbol {
        /// File that was loaded.
        library: String,
        /// Missing function.
        symbol: &'static str,
    },
    /// An NVRTC call failed.
    #[error("{call} failed with code {code}")]
    Nvrtc {
        /// Function.
        call: &'static str,
        /// NVRTC result code.
        code: u32,
    },
    /// cuBLASLt is not installed.
    #[error("libcublasLt was not found (tried {tried})")]
    BlasLtMissing {
        /// File names and paths that were tried.
        tried: String,
    },
    /// cuBLASLt lacks a function.
    #[error("{library} has no function {symbol}")]
    BlasLtSymbol {
        /// File that was loaded.
        library: String,
        /// Missing function.
        symbol: &'static str,
    },
    /// A cuBLASLt call failed.
    #[error("{call} failed with code {code}")]
    BlasLt {
        /// Function.
        call: &'static str,
        /// cuBLASLt status code.
        code: u32,
    },
    /// A kernel unit does not compile.
    #[error("{unit} does not compile for {arch}: {log}")]
    Compile {
        /// File and unit.
        unit: String,
        /// Architecture.
        arch: String,
        /// Compiler log.
        log: String,
    },
    /// The GPU is older than the kernels support.
    #[error("compute capability {}.{} is too old, the kernels need 8.0 or newer", .compute.0, .compute.1)]
    TooOld {
        /// Compute capability of the GPU.
        compute: (u32, u32),
    },
    /// Loaded code does not match its launcher.
    #[error("parameter {index} of kernel {kernel} has {got} bytes, its launcher passes {expected}")]
    Parameter {
        /// Kernel name.
        kernel: String,
        /// Parameter index.
        index: usize,
        /// Size that the launcher passes; 0 for none.
        expected: usize,
        /// Size that the code declares; 0 for none.
        got: usize,
    },
    /// Driver error.
    #[error(transparent)]
    Driver(#[from] DriverError),
}

impl KernelError {
    /// Action that may resolve the error.
    #[must_use]
    pub fn hint(&self) -> Option<String> {
        match self {
            KernelError::NvrtcMissing { .. } | KernelError::NoKernels { .. } => Some(
                "install libnvrtc.so.13 or .12: `pip install nvidia-cuda-nvrtc`, or the CUDA toolkit's runtime \
                 packages; set REFRAIN_NVRTC if it is in an unusual location. Or use a binary built by `cargo xtask \
                 dist`, which embeds compiled kernels"
                    .to_owned(),
            ),
            KernelError::BlasLtMissing { .. } => Some(
                "install libcublasLt.so.13 or .12: `pip install nvidia-cublas`, or the CUDA toolkit's packages"
                    .to_owned(),
            ),
            KernelError::BlasLtSymbol { .. } => Some("install cuBLAS 12 or newer".to_owned()),
            KernelError::NvrtcSymbol { .. } => Some("install NVRTC 12 or newer".to_owned()),
            KernelError::TooOld { .. } => Some("use the CPU".to_owned()),
            KernelError::Parameter { .. } => Some("delete the kernel cache folder".to_owned()),
            KernelError::Driver(DriverError::KernelMissing { .. }) => {
                Some("register the twins before loading: refrain_kernels::register_twins".to_owned())
            }
            KernelError::Driver(e) => e.hint().map(|h| h.to_string()),
            KernelError::Unsupported { .. }
            | KernelError::Buffer { .. }
            | KernelError::Nvrtc { .. }
            | KernelError::BlasLt { .. }
            | KernelError::Compile { .. } => None,
        }
    }
}

/// An op with its dtype and sizes, for checks whose messages name them.
#[derive(Clone, Copy)]
pub(crate) struct OpCase<'a> {
    pub(crate) op: &'static str,
    pub(crate) dtype: DType,
    pub(crate) shape: &'a [(&'static str, usize)],
}

impl OpCase<'_> {
    fn shape(&self) -> String {
        self.shape.iter().map(|(name, n)| format!("{name}={n}")).collect::<Vec<_>>().join(", ")
    }

    pub(crate) fn refuse(&self, because: String) -> KernelError {
        KernelError::Unsupported { op: self.op, dtype: self.dtype, shape: self.shape(), because }
    }

    /// Converts a size to a kernel parameter.
    pub(crate) fn u32(&self, name: &'static str, n: usize) -> Result<u32, KernelError> {
        // Half the range, so that an index plus the overhang of the grid still fits.
        u32::try_from(n)
            .ok()
            .filter(|&n| n <= i32::MAX as u32)
            .ok_or_else(|| self.refuse(format!("{name} is {n}, must be at most {}", i32::MAX)))
    }

    /// Checks that every size is nonzero and fits a kernel parameter.
    pub(crate) fn sizes(&self) -> Result<(), KernelError> {
        self.shape.iter().try_for_each(|&(name, n)| {
            self.u32(name, n)?;
            if n == 0 { Err(self.refuse(format!("{name} is 0, must be at least 1"))) } else { Ok(()) }
        })
    }

    /// Checks the size and alignment of a dense buffer, and cuts it to the bytes that the kernel accesses.
    pub(crate) fn buf(
        &self,
        name: &'static str,
        buf: Buf,
        n_bytes: Option<usize>,
        align: u64,
    ) -> Result<Buf, KernelError> {
        let need = n_bytes.ok_or_else(|| self.refuse(format!("the size of {name} overflows")))? as u64;
        if buf.len() < need {
            return Err(KernelError::Buffer {
                op: self.op,
                dtype: self.dtype,
                shape: self.shape(),
                name,
                got_bytes: buf.len(),
                need_bytes: need,
            });
        }
        crate::require!(
            self,
            buf.offset().is_multiple_of(align),
            "{name} starts at byte {}, must be {align}-byte aligned",
            buf.offset()
        );
        Ok(buf.slice(0, need)?)
    }

    /// Checks a dense buffer of four-byte elements.
    pub(crate) fn words(&self, name: &'static str, buf: Buf, n: &[usize]) -> Result<Buf, KernelError> {
        let n = n.iter().try_fold(4_usize, |a, &b| a.checked_mul(b));
        self.buf(name, buf, n, 4)
    }
}

/// Refuses a launch unless a condition holds; the error names op, dtype and shape.
#[macro_export]
#[doc(hidden)]
macro_rules! require {
    ($case:expr, $holds:expr, $($message:tt)+) => {
        if !$holds {
            return Err($case.refuse(format!($($message)+)));
        }
    };
}
