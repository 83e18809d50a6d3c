//! What launchers know of the card.

use refrain_driver::api::DeviceInfo;

/// A card, as far as the division of work depends on it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Card {
    /// Multiprocessors.
    pub(crate) n_sms: usize,
    /// Most shared memory of a block, in bytes.
    pub(crate) shared_limit: usize,
    /// Shared memory of a multiprocessor, in bytes.
    pub(crate) shared_sm: usize,
    /// Cycles that a multiprocessor has for each byte if memory delivers as its clock and width allow; 0 where that is
    /// unknown.
    byte_cycles: f64,
}

impl Card {
    pub(crate) fn new(info: &DeviceInfo) -> Card {
        let n_sms = info.n_sms.max(1) as usize;
        let clock = f64::from(info.clock_khz) * 1e3;
        Card {
            n_sms,
            shared_limit: info.shared_block_bytes as usize,
            shared_sm: info.shared_sm_bytes as usize,
            byte_cycles: info.peak_bytes_per_second().map_or(0.0, |peak| n_sms as f64 * clock / peak),
        }
    }

    /// Cycles in which a multiprocessor gets so many bytes while all of them read; `None` where clocks are not known.
    pub(crate) fn cycles_of(&self, bytes: usize) -> Option<usize> {
        // Memory delivers about ten elevenths of what its clock and width allow.
        let cycles = 1.1 * self.byte_cycles * bytes as f64;
        (self.byte_cycles > 0.0).then_some(cycles as usize)
    }
}
