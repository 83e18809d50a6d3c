//! GPU properties that launchers depend on.

use refrain_driver::api::DeviceInfo;

use crate::tuning::Tuning;

/// Properties of a GPU that determine how work is divided.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Card {
    /// Number of SMs.
    pub(crate) n_sms: usize,
    /// Maximum shared memory per block, in bytes.
    pub(crate) shared_limit: usize,
    /// Shared memory per SM, in bytes.
    pub(crate) shared_sm: usize,
    /// Whether blocks can form clusters.
    pub(crate) has_clusters: bool,
    /// Compute capability 9.0: its kernels use features that no later GPU has.
    pub(crate) is_hopper: bool,
    /// Cycles per byte and SM at the memory bandwidth that clock and bus width allow; 0 if unknown.
    byte_cycles: f64,
    /// The tuning that its kernels were compiled with.
    pub(crate) tuning: &'static Tuning,
}

impl Card {
    pub(crate) fn new(info: &DeviceInfo, tuning: &'static Tuning) -> Card {
        let n_sms = info.n_sms.max(1) as usize;
        let clock = f64::from(info.clock_khz) * 1e3;
        Card {
            n_sms,
            shared_limit: info.shared_block_bytes as usize,
            shared_sm: info.shared_sm_bytes as usize,
            has_clusters: info.compute.0 >= 9,
            is_hopper: info.compute == (9, 0),
            byte_cycles: info.peak_bytes_per_second().map_or(0.0, |peak| n_sms as f64 * clock / peak),
            tuning,
        }
    }

    /// A GPU of which only the shared memory per block is known.
    #[cfg(test)]
    pub(crate) fn with_shared(shared_limit: usize, tuning: &'static Tuning) -> Card {
        let (has_clusters, is_hopper) = (false, false);
        Card {
            n_sms: 1,
            shared_limit,
            shared_sm: shared_limit,
            has_clusters,
            is_hopper,
            byte_cycles: 0.0,
            tuning,
        }
    }

    /// Cycles for an SM to receive this many bytes while all SMs read; `None` if the clocks are unknown.
    pub(crate) fn cycles_of(&self, bytes: usize) -> Option<usize> {
        let cycles = self.tuning.peak_over_bandwidth * self.byte_cycles * bytes as f64;
        (self.byte_cycles > 0.0).then_some(cycles as usize)
    }
}
