//! Every kernel: its name, its parameters and its twin. The compiled code is checked against this list.

use std::sync::Arc;

use refrain_driver::sim::{KernelResult, SimKernel};

use crate::source::Family;

pub(crate) type TwinBody = Arc<dyn Fn(&mut SimKernel<'_>) -> KernelResult + Send + Sync>;

/// The size of a pointer parameter.
pub(crate) const P: usize = 8;
/// The size of a word parameter.
pub(crate) const W: usize = 4;

/// A kernel as launchers know it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelInfo {
    /// `family_variant_dtype`: the symbol in the compiled code.
    pub name: String,
    /// The file it comes from.
    pub family: Family,
    /// Bytes of each parameter.
    pub params: Vec<usize>,
}

pub(crate) struct Entry {
    pub(crate) info: KernelInfo,
    pub(crate) twin: TwinBody,
}

impl Entry {
    pub(crate) fn new(
        family: Family,
        name: impl Into<String>,
        params: &[usize],
        twin: impl Fn(&mut SimKernel<'_>) -> KernelResult + Send + Sync + 'static,
    ) -> Entry {
        Entry {
            info: KernelInfo { name: name.into(), family, params: params.to_vec() },
            twin: Arc::new(twin),
        }
    }
}

/// All kernels there are.
#[must_use]
pub fn kernels() -> Vec<KernelInfo> {
    entries().into_iter().map(|e| e.info).collect()
}

pub(crate) fn entries() -> Vec<Entry> {
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
    crate::packed::entries(&mut all);
    crate::gemm::entries(&mut all);
    crate::dequant::entries(&mut all);
    crate::narrow::entries(&mut all);
    crate::flash::entries(&mut all);
    crate::digest::entries(&mut all);
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kernel_has_a_name_of_its_own_that_starts_with_a_known_family() {
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
}
