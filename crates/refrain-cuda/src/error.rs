//! Errors of this crate, with fields that a caller can match on.

use refrain_driver::DriverError;
use refrain_graph::Reason;

use crate::resident::Accounting;

/// Any failure of this crate.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum CudaError {
    /// Graphs are required and a step could not be replayed.
    #[error("graphs are required, but {step} cannot be replayed: {reason}")]
    Required {
        /// Name of the step.
        step: String,
        /// Why it cannot be replayed.
        reason: Reason,
    },
    /// The driver failed.
    #[error("{step}: {source}")]
    Driver {
        /// The operation that failed.
        step: String,
        /// The driver's error.
        #[source]
        source: DriverError,
    },
    /// A model, its cache and the working memory of a step do not fit on the device.
    #[error("{0}")]
    DoesNotFit(Box<MemoryRefusal>),
    /// A plan needs a larger arena than allowed.
    #[error("the plan needs an arena of {need_bytes} bytes, {limit_bytes} are allowed")]
    ArenaTooLarge {
        /// Bytes needed.
        need_bytes: u64,
        /// Bytes allowed.
        limit_bytes: u64,
    },
    /// No kernel supports an op with its dtypes, shapes and layouts.
    #[error("there is no kernel for {op} at {label}: {because}")]
    NoKernel {
        /// Name of the op.
        op: &'static str,
        /// Label of the step.
        label: String,
        /// Dtypes, shapes and layouts.
        because: String,
    },
    /// Arguments belong to a different model than this backend's.
    #[error("{what} do not belong to this backend's model: {because}")]
    Mismatch {
        /// Name of the argument.
        what: &'static str,
        /// The difference.
        because: String,
    },
    /// A host step of the plan failed.
    #[error("{label}: {because}")]
    Host {
        /// Label of the step.
        label: String,
        /// The error message of the host call.
        because: String,
    },
    /// A control block holds an index that is out of range.
    #[error("{label}: {what} is {got}, must be below {limit}")]
    OutOfRange {
        /// The step input.
        label: String,
        /// Name of the index.
        what: &'static str,
        /// Value of the index.
        got: i64,
        /// Exclusive upper bound.
        limit: usize,
    },
    /// The kernels could not be loaded.
    #[error("the kernels cannot be loaded: {0}")]
    Kernels(#[source] std::sync::Arc<refrain_kernels::KernelError>),
    /// Fewer distinct verification cases than required.
    #[error("a graph is verified with {need} different control-block states, got {got}")]
    TooFewCases {
        /// Number of cases required.
        need: usize,
        /// Number of distinct cases given.
        got: usize,
    },
}

impl CudaError {
    pub(crate) fn driver(step: impl Into<String>) -> impl FnOnce(DriverError) -> CudaError {
        let step = step.into();
        move |source| CudaError::Driver { step, source }
    }

    /// A hint at a remedy, if there is one.
    #[must_use]
    pub fn hint(&self) -> Option<String> {
        match self {
            CudaError::Required { reason: Reason::Profiling, .. } => {
                Some("profile with graph mode auto: timings per op need the eager path".into())
            }
            CudaError::Required { .. } => {
                Some("use graph mode auto to run such steps without a graph, or off".into())
            }
            CudaError::Driver { source, .. } => source.hint().map(str::to_owned),
            CudaError::DoesNotFit(_) => {
                Some("lower the context, use a smaller or more quantised model, or free GPU memory".into())
            }
            CudaError::ArenaTooLarge { .. } => Some("use smaller steps, or raise the arena limit".into()),
            CudaError::Kernels(source) => source.hint(),
            CudaError::NoKernel { .. } => {
                Some("run it on the CPU, or convert the weights to another type".into())
            }
            CudaError::Mismatch { .. }
            | CudaError::Host { .. }
            | CudaError::OutOfRange { .. }
            | CudaError::TooFewCases { .. } => None,
        }
    }

    /// The driver's error code, if any.
    #[must_use]
    pub(crate) fn code(&self) -> Option<u32> {
        match self {
            CudaError::Driver { source, .. } => source.code().map(|c| c.0),
            CudaError::Required { .. }
            | CudaError::DoesNotFit(_)
            | CudaError::ArenaTooLarge { .. }
            | CudaError::NoKernel { .. }
            | CudaError::Kernels(_)
            | CudaError::Mismatch { .. }
            | CudaError::Host { .. }
            | CudaError::OutOfRange { .. }
            | CudaError::TooFewCases { .. } => None,
        }
    }

    /// The last step and kernel launched before the driver failed.
    pub(crate) fn sent_last(&self) -> Option<String> {
        let CudaError::Driver { source: refrain_driver::DriverError::ContextLost(lost), .. } = self else {
            return None;
        };
        lost.origin.as_ref().map(ToString::to_string)
    }

    /// Whether the device is unusable for the rest of this process.
    #[must_use]
    pub fn is_final(&self) -> bool {
        match self {
            CudaError::Driver { source, .. } => source.is_final(),
            CudaError::Required { reason, .. } => matches!(reason, Reason::ContextLost { .. }),
            CudaError::DoesNotFit(_)
            | CudaError::ArenaTooLarge { .. }
            | CudaError::NoKernel { .. }
            | CudaError::Kernels(_)
            | CudaError::Mismatch { .. }
            | CudaError::Host { .. }
            | CudaError::OutOfRange { .. }
            | CudaError::TooFewCases { .. } => false,
        }
    }
}

/// Formats a byte count, exactly where it is short and in binary units otherwise.
pub(crate) struct DisplayBytes(pub(crate) u64);

impl std::fmt::Display for DisplayBytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let scaled = |shift: u32| self.0 as f64 / (1_u64 << shift) as f64;
        match self.0 {
            0..10_240 => write!(f, "{} bytes", self.0),
            10_240..10_485_760 => write!(f, "{:.1} KiB", scaled(10)),
            10_485_760..10_737_418_240 => write!(f, "{:.1} MiB", scaled(20)),
            10_737_418_240.. => write!(f, "{:.2} GiB", scaled(30)),
        }
    }
}

/// A model, its cache and the working memory of a step do not fit on a device.
#[derive(Clone, Debug)]
pub struct MemoryRefusal {
    /// Bytes needed.
    pub need: Accounting,
    /// Bytes free on the device.
    pub free_bytes: u64,
    /// Total bytes of the device.
    pub total_bytes: u64,
    /// Name of the device.
    pub device: String,
    /// Memory that other models of this process hold on the device.
    pub others: Vec<HeldBytes>,
}

/// Device memory that a model holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeldBytes {
    /// Name of the model, from [`crate::CudaOptions::model`].
    pub model: String,
    /// Bytes of weights, states and working memory of steps.
    pub bytes: u64,
}

impl std::fmt::Display for MemoryRefusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let MemoryRefusal { need, free_bytes, total_bytes, device, others } = self;
        write!(
            f,
            "{} are needed (weights {}, KV cache {}, arena {}, workspace {}), {} of {} are free on {device}",
            DisplayBytes(need.total()),
            DisplayBytes(need.weight_bytes),
            DisplayBytes(need.kv_bytes),
            DisplayBytes(need.arena_bytes),
            DisplayBytes(need.workspace_bytes),
            DisplayBytes(*free_bytes),
            DisplayBytes(*total_bytes),
        )?;
        let mut others = others.iter();
        if let Some(first) = others.next() {
            write!(f, "; {} holds {}", first.model, DisplayBytes(first.bytes))?;
        }
        others.try_for_each(|held| write!(f, ", {} holds {}", held.model, DisplayBytes(held.bytes)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_memory_refusal_reports_sizes_and_a_hint() {
        let need = Accounting {
            weight_bytes: 16 << 30,
            kv_bytes: 1 << 30,
            arena_bytes: 20 << 20,
            workspace_bytes: 64 << 10,
            ..Accounting::default()
        };
        let mut refusal = MemoryRefusal {
            need,
            free_bytes: 12 << 30,
            total_bytes: 24 << 30,
            device: "cuda:0".into(),
            others: Vec::new(),
        };
        let error = CudaError::DoesNotFit(Box::new(refusal.clone()));
        let text = "17.02 GiB are needed (weights 16.00 GiB, KV cache 1024.0 MiB, arena 20.0 MiB, workspace 64.0 KiB), \
                    12.00 GiB of 24.00 GiB are free on cuda:0";
        assert_eq!(error.to_string(), text);
        let held = |model: &str, bytes| HeldBytes { model: model.into(), bytes };
        refusal.others = vec![held("llama", 11 << 30), held("qwen3", 20 << 20)];
        let error = CudaError::DoesNotFit(Box::new(refusal));
        assert_eq!(error.to_string(), format!("{text}; llama holds 11.00 GiB, qwen3 holds 20.0 MiB"));
        assert!(error.hint().unwrap().contains("lower the context"));
    }
}
