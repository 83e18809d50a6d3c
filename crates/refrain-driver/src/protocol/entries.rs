//! Host side of the ring's sequence numbers.
//!
//! The `k`-th result (from 1) goes to entry `(k - 1) % n_entries`. The device writes the payload and then stores
//! `k` as the entry's number with release; the host loads it with acquire and then reads the payload. The host
//! launches a step only after reserving an entry, so the device never overwrites an entry that the host has not
//! read.

use super::sync::{AtomicU64, Ordering};

/// Counts of entries reserved and read.
#[derive(Debug)]
pub(crate) struct Entries {
    n_entries: u64,
    n_reserved: u64,
    n_taken: u64,
}

/// Content of the next entry.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// Result number `.0`, which has been read.
    Taken(u64),
    /// Not yet written.
    Pending,
    /// A later result than expected: a step was launched without a reservation.
    Overrun { expected: u64, found: u64 },
}

impl Entries {
    pub(crate) fn new(n_entries: u64) -> Entries {
        Entries { n_entries, n_reserved: 0, n_taken: 0 }
    }

    /// Reserves an entry for one more result; false if the ring is full.
    pub(crate) fn reserve(&mut self) -> bool {
        let has_space = self.n_reserved - self.n_taken < self.n_entries;
        self.n_reserved += u64::from(has_space);
        has_space
    }

    /// Reserves `n` entries at once; false if there are not as many.
    pub(crate) fn reserve_many(&mut self, n: u64) -> bool {
        let has_space = self.n_reserved - self.n_taken + n <= self.n_entries;
        self.n_reserved += if has_space { n } else { 0 };
        has_space
    }

    /// Gives back the `n` entries reserved last.
    pub(crate) fn release(&mut self, n: u64) {
        self.n_reserved -= n.min(self.n_reserved - self.n_taken);
    }

    /// Counts the results that a loop wrote without a reservation.
    pub(crate) fn reserve_up_to(&mut self, n: u64) {
        self.n_reserved = self.n_reserved.max(n);
    }

    pub(crate) fn n_pending(&self) -> u64 {
        self.n_reserved - self.n_taken
    }

    pub(crate) fn n_reserved(&self) -> u64 {
        self.n_reserved
    }

    pub(crate) fn n_taken(&self) -> u64 {
        self.n_taken
    }

    /// The entry of the next result.
    pub(crate) fn next_idx(&self) -> u64 {
        self.n_taken % self.n_entries
    }

    /// Reads the next result if it has arrived. `seq` is the sequence number of the entry at [`Entries::next_idx`],
    /// `read` reads its payload, and `consumed` tells the device how many results have been read.
    pub(crate) fn take(&mut self, seq: &AtomicU64, consumed: &AtomicU64, read: impl FnOnce()) -> Next {
        let expected = self.n_taken + 1;
        let found = seq.load(Ordering::Acquire);
        if found > expected {
            return Next::Overrun { expected, found };
        }
        if found < expected {
            return Next::Pending;
        }
        read();
        self.n_taken = expected;
        self.n_reserved = self.n_reserved.max(expected);
        consumed.store(expected, Ordering::Release);
        Next::Taken(expected)
    }
}
