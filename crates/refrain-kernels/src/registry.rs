//! Registry of every kernel: name, parameters and twin. Compiled code is checked against this list.

use std::sync::Arc;

use refrain_driver::sim::{KernelResult, SimKernel};
use refrain_tensor::DType;

use crate::card::Card;
use crate::source::{KernelFamily, KernelUnit};

pub(crate) type TwinFn = Arc<dyn Fn(&mut SimKernel<'_>) -> KernelResult + Send + Sync>;

/// Size of a pointer parameter.
pub(crate) const P: usize = 8;
/// Size of a word parameter.
pub(crate) const W: usize = 4;

/// Dtype name as it appears in kernel and unit names.
pub(crate) fn lowercase(dtype: DType) -> String {
    dtype.name().to_ascii_lowercase()
}

/// A kernel as its launchers see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelInfo {
    /// `family_variant_dtype`: the symbol in the compiled code.
    pub name: String,
    /// Compilation unit.
    pub unit: KernelUnit,
    /// Size of each parameter in bytes.
    pub params: Vec<usize>,
}

/// Maximum dynamic shared memory of a kernel's launches on a GPU, in bytes.
pub(crate) type SharedBytes = Arc<dyn Fn(&Card) -> u32 + Send + Sync>;

#[derive(Clone)]
pub(crate) struct KernelEntry {
    pub(crate) info: KernelInfo,
    pub(crate) twin: TwinFn,
    /// See [`KernelEntry::releasing_next_after_wait`].
    pub(crate) starts_next_late: bool,
    pub(crate) shared: SharedBytes,
}

impl KernelEntry {
    /// A kernel of a single-unit file, without dynamic shared memory.
    pub(crate) fn new(
        family: KernelFamily,
        name: impl Into<String>,
        params: &[usize],
        twin: impl Fn(&mut SimKernel<'_>) -> KernelResult + Send + Sync + 'static,
    ) -> KernelEntry {
        KernelEntry {
            info: KernelInfo { name: name.into(), unit: KernelUnit::whole(family), params: params.to_vec() },
            twin: Arc::new(twin),
            shared: Arc::new(|_| 0),
            starts_next_late: false,
        }
    }

    /// Marks a kernel that releases the next one only after its own dependency wait (`overlap.cuh`).
    pub(crate) fn releasing_next_after_wait(mut self) -> KernelEntry {
        self.starts_next_late = true;
        self
    }

    /// Sets the unit by its name in the file.
    pub(crate) fn unit(mut self, name: &str) -> KernelEntry {
        self.info.unit = KernelUnit::named(self.info.unit.family(), name);
        self
    }

    /// Sets the dynamic shared memory.
    pub(crate) fn shared(self, bytes: impl Fn(&Card) -> u32 + Send + Sync + 'static) -> KernelEntry {
        KernelEntry { shared: Arc::new(bytes), ..self }
    }
}

/// Lists all kernels.
#[must_use]
pub fn kernels() -> Vec<KernelInfo> {
    entries().into_iter().map(|e| e.info).collect()
}

pub(crate) fn entries() -> Vec<KernelEntry> {
    let mut all = Vec::new();
    crate::linear::entries(&mut all);
    crate::gather::entries(&mut all);
    crate::norm::entries(&mut all);
    crate::elementwise::entries(&mut all);
    crate::copy::entries(&mut all);
    crate::rope::entries(&mut all);
    crate::rope_kv::entries(&mut all);
    crate::kv::entries(&mut all);
    crate::attention::entries(&mut all);
    crate::attend::entries(&mut all);
    crate::rows::entries(&mut all);
    crate::sample::entries(&mut all);
    crate::commit::entries(&mut all);
    crate::product::entries(&mut all);
    crate::few::entries(&mut all);
    crate::batch::entries(&mut all);
    crate::packed::entries(&mut all);
    crate::gemm::entries(&mut all);
    crate::dequant::entries(&mut all);
    crate::narrow::entries(&mut all);
    crate::flash::entries(&mut all);
    crate::digest::entries(&mut all);
    crate::map::entries(&mut all);
    crate::train_rows::entries(&mut all);
    crate::moves::entries(&mut all);
    crate::experts::entries(&mut all);
    crate::grouped::entries(&mut all);
    crate::scatter::entries(&mut all);
    crate::loss::entries(&mut all);
    crate::adamw::entries(&mut all);
    crate::matmul::entries(&mut all);
    crate::span::entries(&mut all);
    crate::span_grad::entries(&mut all);
    crate::recurrent::entries(&mut all);
    crate::lora::entries(&mut all);
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kernel_has_a_unique_name_that_starts_with_a_known_family() {
        let mut names: Vec<String> = kernels().into_iter().map(|k| k.name).collect();
        let n = names.len();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), n);
        assert!(
            names
                .iter()
                .all(|n| n.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_'))
        );
    }

    #[test]
    fn every_unit_has_kernels() {
        let mut named: Vec<KernelUnit> = kernels().into_iter().map(|k| k.unit).collect();
        named.sort();
        named.dedup();
        let mut all = KernelUnit::all().to_vec();
        all.sort();
        assert_eq!(named, all);
    }
}
