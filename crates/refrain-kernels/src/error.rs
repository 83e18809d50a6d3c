//! What a launcher, the compiler or the loader refuses.

use refrain_driver::{Buf, DriverError};
use refrain_tensor::DType;

/// Why there is no launch, or no kernel.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KernelError {
    /// The op has no kernel for this.
    #[error("{op} x {dtype} x [{shape}]: {because}")]
    Unsupported {
        /// The op.
        op: &'static str,
        /// Its dtype.
        dtype: DType,
        /// Its sizes, named.
        shape: String,
        /// What the kernel needs, with the numbers.
        because: String,
    },
    /// A buffer is too small for the shape.
    #[error("{op} x {dtype} x [{shape}]: {what} has {got_bytes} bytes, needs {need_bytes}")]
    Buffer {
        /// The op.
        op: &'static str,
        /// Its dtype.
        dtype: DType,
        /// Its sizes, named.
        shape: String,
        /// Which buffer.
        what: &'static str,
        /// Bytes it has.
        got_bytes: u64,
        /// Bytes the shape takes.
        need_bytes: u64,
    },
    /// The compiler library is not on this machine.
    #[error("the CUDA compiler library NVRTC was not found (tried {tried})")]
    NvrtcMissing {
        /// Names and paths tried.
        tried: String,
    },
    /// There is neither compiled code for the card nor a compiler.
    #[error(
        "there are no kernels for {card}: this binary holds {held}, and the CUDA compiler library NVRTC was not found \
         (tried {tried})"
    )]
    NoKernels {
        /// The card's architecture.
        card: String,
        /// What the binary holds, in words.
        held: String,
        /// Names and paths tried.
        tried: String,
    },
    /// The compiler library lacks a function.
    #[error("{library} has no function {symbol}")]
    NvrtcSymbol {
        /// File it was loaded from.
        library: String,
        /// The function.
        symbol: &'static str,
    },
    /// A call of the compiler library failed.
    #[error("{call} failed with code {code}")]
    Nvrtc {
        /// The function.
        call: &'static str,
        /// The library's code.
        code: u32,
    },
    /// cuBLASLt is not on this machine.
    #[error("libcublasLt was not found (tried {tried})")]
    BlasLtMissing {
        /// Names and paths tried.
        tried: String,
    },
    /// cuBLASLt lacks a function.
    #[error("{library} has no function {symbol}")]
    BlasLtSymbol {
        /// File it was loaded from.
        library: String,
        /// The function.
        symbol: &'static str,
    },
    /// A call of cuBLASLt failed.
    #[error("{call} failed with code {code}")]
    BlasLt {
        /// The function.
        call: &'static str,
        /// The library's code.
        code: u32,
    },
    /// Kernels do not compile.
    #[error("{unit} does not compile for {arch}: {log}")]
    Compile {
        /// File and unit.
        unit: String,
        /// The architecture.
        arch: String,
        /// The compiler's words.
        log: String,
    },
    /// The card is older than what the kernels are written for.
    #[error("compute capability {}.{} is below 8.0, the oldest the kernels run on", .compute.0, .compute.1)]
    TooOld {
        /// The card's compute capability.
        compute: (u32, u32),
    },
    /// Loaded code is not what the launchers expect.
    #[error("kernel {kernel} has {got} bytes in parameter {index}, its launcher passes {expected}")]
    Parameter {
        /// The kernel.
        kernel: String,
        /// Which parameter.
        index: usize,
        /// What the launcher passes; 0 for none.
        expected: usize,
        /// What the code has; 0 for none.
        got: usize,
    },
    /// The driver refused.
    #[error(transparent)]
    Driver(#[from] DriverError),
}

impl KernelError {
    /// What can be done about it.
    #[must_use]
    pub fn hint(&self) -> Option<String> {
        match self {
            KernelError::NvrtcMissing { .. } | KernelError::NoKernels { .. } => Some(
                "install libnvrtc.so.13 or .12: `pip install nvidia-cuda-nvrtc`, or the CUDA toolkit's runtime \
                 packages (REFRAIN_NVRTC names it where it is elsewhere); or use a binary of `cargo xtask dist`, \
                 which holds compiled kernels"
                    .to_owned(),
            ),
            KernelError::BlasLtMissing { .. } => Some(
                "install libcublasLt.so.13 or .12: `pip install nvidia-cublas`, or the CUDA toolkit's packages"
                    .to_owned(),
            ),
            KernelError::BlasLtSymbol { .. } => Some("install cuBLAS 12 or newer".to_owned()),
            KernelError::NvrtcSymbol { .. } => Some("install NVRTC 12 or newer".to_owned()),
            KernelError::TooOld { .. } => Some("use --device cpu".to_owned()),
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

    /// A size as a kernel takes it.
    pub(crate) fn u32(&self, what: &'static str, n: usize) -> Result<u32, KernelError> {
        // Half the range, so that an index plus a grid's overhang still fits.
        u32::try_from(n)
            .ok()
            .filter(|&n| n <= i32::MAX as u32)
            .ok_or_else(|| self.refuse(format!("{what} is {n}, at most {} goes", i32::MAX)))
    }

    /// Checks that no size is zero and each fits a kernel's parameter.
    pub(crate) fn sizes(&self) -> Result<(), KernelError> {
        self.shape.iter().try_for_each(|&(name, n)| {
            self.u32(name, n)?;
            if n == 0 { Err(self.refuse(format!("{name} is 0, there is nothing to launch"))) } else { Ok(()) }
        })
    }

    /// Checks a dense buffer's size and start, and cuts it to what the kernel touches.
    pub(crate) fn buf(
        &self,
        what: &'static str,
        buf: Buf,
        n_bytes: Option<usize>,
        align: u64,
    ) -> Result<Buf, KernelError> {
        let need = n_bytes.ok_or_else(|| self.refuse(format!("the size of {what} overflows")))? as u64;
        if buf.len() < need {
            return Err(KernelError::Buffer {
                op: self.op,
                dtype: self.dtype,
                shape: self.shape(),
                what,
                got_bytes: buf.len(),
                need_bytes: need,
            });
        }
        crate::require!(
            self,
            buf.offset().is_multiple_of(align),
            "{what} starts at byte {}, which is no multiple of {align}",
            buf.offset()
        );
        Ok(buf.slice(0, need)?)
    }

    /// A dense buffer of `n` elements of four bytes.
    pub(crate) fn words(&self, what: &'static str, buf: Buf, n: &[usize]) -> Result<Buf, KernelError> {
        let n = n.iter().try_fold(4_usize, |a, &b| a.checked_mul(b));
        self.buf(what, buf, n, 4)
    }
}

/// Refuses a launch, naming op x dtype x shape, unless a condition holds.
#[macro_export]
#[doc(hidden)]
macro_rules! require {
    ($case:expr, $holds:expr, $($message:tt)+) => {
        if !$holds {
            return Err($case.refuse(format!($($message)+)));
        }
    };
}
