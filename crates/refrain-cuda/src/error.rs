//! What can go wrong, in fields that a caller can match on.

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
        /// The step.
        step: String,
        /// Why not.
        reason: Reason,
    },
    /// The driver failed.
    #[error("{step}: {source}")]
    Driver {
        /// What was being done.
        step: String,
        /// What the driver said.
        #[source]
        source: DriverError,
    },
    /// A model, its cache and what a step needs do not fit on the device.
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
    /// There is no kernel for an op as it stands in a plan.
    #[error("there is no kernel for {op} at {label}: {because}")]
    NoKernel {
        /// Name of the op.
        op: &'static str,
        /// Label of the step.
        label: String,
        /// Dtypes, shapes and layouts.
        because: String,
    },
    /// Things of different models were brought together.
    #[error("{what} do not belong to this backend's model: {because}")]
    Mismatch {
        /// Which argument.
        what: &'static str,
        /// How they differ.
        because: String,
    },
    /// A host step of the plan failed.
    #[error("{label}: {because}")]
    Host {
        /// Label of the step.
        label: String,
        /// Its author's words.
        because: String,
    },
    /// A control block points outside what it indexes.
    #[error("{label}: {what} is {got}, must be below {limit}")]
    OutOfRange {
        /// The step input.
        label: String,
        /// Which number.
        what: &'static str,
        /// Its value.
        got: i64,
        /// Its bound.
        limit: usize,
    },
    /// The kernels could not be loaded.
    #[error("the kernels cannot be loaded: {0}")]
    Kernels(#[source] std::sync::Arc<refrain_kernels::KernelError>),
    /// Fewer states to verify with than the rule asks for, or equal ones.
    #[error("a graph is verified with {need} different control-block states, {got} were given")]
    TooFewCases {
        /// States asked for.
        need: usize,
        /// Different states given.
        got: usize,
    },
}

impl CudaError {
    pub(crate) fn driver(step: impl Into<String>) -> impl FnOnce(DriverError) -> CudaError {
        let step = step.into();
        move |source| CudaError::Driver { step, source }
    }

    /// What to do about it, where there is something to do.
    #[must_use]
    pub fn hint(&self) -> Option<String> {
        match self {
            CudaError::Required { reason: Reason::Profiling, .. } => {
                Some("profile with --graph auto: timings per op need the eager path".into())
            }
            CudaError::Required { .. } => {
                Some("pass --graph auto to go on without a graph, or --graph off".into())
            }
            CudaError::Driver { source, .. } => source.hint().map(str::to_owned),
            CudaError::DoesNotFit(_) => Some(
                "lower the context with -c, use a smaller or more quantised model, or free the card".into(),
            ),
            CudaError::ArenaTooLarge { .. } => Some("use smaller steps, or raise the arena's limit".into()),
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

    /// The driver's code, where there is one.
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

    /// What was sent last before the driver failed: step and kernel.
    pub(crate) fn sent_last(&self) -> Option<String> {
        let CudaError::Driver { source: refrain_driver::DriverError::ContextLost(lost), .. } = self else {
            return None;
        };
        lost.origin.as_ref().map(ToString::to_string)
    }

    /// True when nothing runs on the device in this process any more.
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

/// Bytes as people read them, with the exact number where it is short.
struct Size(u64);

impl std::fmt::Display for Size {
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

/// A model, its cache and what a step needs do not fit on a device.
#[derive(Clone, Debug)]
pub struct MemoryRefusal {
    /// What is needed.
    pub need: Accounting,
    /// Bytes free on the device.
    pub free_bytes: u64,
    /// Bytes of the device.
    pub total_bytes: u64,
    /// The device.
    pub device: String,
    /// What other models of this process hold there.
    pub others: Vec<HeldBytes>,
}

/// What a model holds on a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeldBytes {
    /// The model, as [`crate::CudaOptions::model`] calls it.
    pub model: String,
    /// Its bytes: weights, states, and room for steps.
    pub bytes: u64,
}

impl std::fmt::Display for MemoryRefusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let MemoryRefusal { need, free_bytes, total_bytes, device, others } = self;
        write!(
            f,
            "{} are needed (weights {}, KV cache {}, arena {}, workspace {}), {} of {} are free on {device}",
            Size(need.total()),
            Size(need.weight_bytes),
            Size(need.kv_bytes),
            Size(need.arena_bytes),
            Size(need.workspace_bytes),
            Size(*free_bytes),
            Size(*total_bytes),
        )?;
        let mut others = others.iter();
        if let Some(first) = others.next() {
            write!(f, "; {} holds {}", first.model, Size(first.bytes))?;
        }
        others.try_for_each(|held| write!(f, ", {} holds {}", held.model, Size(held.bytes)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_fit_is_told_in_numbers_with_a_way_out() {
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
        assert!(error.hint().unwrap().contains("-c"));
    }
}
