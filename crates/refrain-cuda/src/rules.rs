//! Rules of the kernel choice.
//!
//! By default, the number of rows of a step decides which kernels run it and how they divide their sums. With
//! [`ChoiceRules::reproducible`], nothing that changes a bit of a row may depend on it:
//!
//! | op | one family for every number of rows |
//! |---|---|
//! | product, 16-bit weights | tensor cores (`gemm`), rows in 16 bits, `k` split as for one row |
//! | product, packed weights | `few` in its 16-row variant, rows in 8 bits |
//! | product, other weights | `linear`, rows in F32; its order of additions depends on `k` only |
//! | product of values | `matmul`, which never splits `k` |
//! | experts | one block per row and choice, never sorted by expert |
//! | attention | `attention` with [`ATTENTION_SPLITS`] splits of the positions that a row sees |
//!
//! Norms, ropes, gates, recurrent layers and sampling run row by row in either case. cuBLASLt chooses its algorithm by
//! shape, so it is not used.

use refrain_driver::api::DeviceInfo;
use refrain_kernels::{GEMM_DTYPES, GemmPlan, attention_splits};
use refrain_tensor::DType;

/// Splits of a row's context. More would fill the GPU better at small batches, but the partial results of a
/// prompt's rows take space.
const ATTENTION_SPLITS: usize = 8;
/// Minimum number of rows on tensor cores, except for 16-bit weights, which need no decoding. Smaller numbers
/// of rows of quantised weights, and F32 weights, have kernels that read the weights once for several rows.
pub(crate) const MIN_ROWS: usize = 16;

/// The reason why chains around attention are not fused.
pub(crate) const ONE_ATTENTION: &str =
    "reproducible results need one attention kernel for every number of rows";
/// The reason why cuBLASLt is not used.
pub(crate) const NO_LIBRARY: &str =
    "reproducible results need one kernel for every number of rows, and cuBLASLt chooses by shape";

/// What decides the choice of kernels besides the plan.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ChoiceRules<'a> {
    pub(crate) card: &'a DeviceInfo,
    /// [`crate::CudaOptions::reproducible`].
    pub(crate) reproducible: bool,
}

impl ChoiceRules<'_> {
    /// Minimum number of rows that run on tensor cores with weights of this dtype; `None` if none do.
    pub(crate) fn min_rows(&self, dtype: DType) -> Option<usize> {
        match (GEMM_DTYPES.contains(&dtype), self.reproducible) {
            (true, true) => Some(1),
            (true, false) => Some(2),
            (false, true) => None,
            (false, false) => Some(MIN_ROWS),
        }
    }

    /// Whether the kernels of a decode step of one row, or of a batch, may be chosen.
    pub(crate) fn by_rows(&self) -> bool {
        !self.reproducible
    }

    pub(crate) fn gemm_plan(&self, m: usize, ns: &[usize], k: usize) -> GemmPlan {
        match self.reproducible {
            true => GemmPlan::for_any_rows(m, ns, k, self.card.n_sms),
            false => GemmPlan::new(m, ns, k, self.card.n_sms),
        }
    }

    /// Number of splits of an attention, fixed when the plan is built and independent of sequence lengths.
    pub(crate) fn attention_splits(&self, n: usize, n_kv_heads: usize, context: usize) -> usize {
        match self.reproducible {
            true => ATTENTION_SPLITS,
            false => attention_splits(n, n_kv_heads, context, self.card.n_sms),
        }
    }
}
