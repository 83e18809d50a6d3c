//! The ring's sequence numbers, from the host's side.
//!
//! The `k`-th result (from 1) goes to entry `(k - 1) % n_entries`. The device writes the payload and then stores `k` as
//! the entry's number with release; the host loads it with acquire and then reads the payload. The host sends no step
//! that it has not reserved an entry for, so the device never writes an entry that was not taken.

use super::sync::{AtomicU64, Ordering};

/// Which entries are reserved and which are taken.
#[derive(Debug)]
pub(crate) struct Entries {
    n_entries: u64,
    n_reserved: u64,
    n_taken: u64,
}

/// What was found in the next entry.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// Result number `.0`, which was read.
    Taken(u64),
    /// Nothing yet.
    Pending,
    /// A later result than the expected one: it was sent without room for it.
    Overrun { expected: u64, found: u64 },
}

impl Entries {
    pub(crate) fn new(n_entries: u64) -> Entries {
        Entries { n_entries, n_reserved: 0, n_taken: 0 }
    }

    /// Counts one more result that will come; false when there is no room for it.
    pub(crate) fn reserve(&mut self) -> bool {
        let room = self.n_reserved - self.n_taken < self.n_entries;
        self.n_reserved += u64::from(room);
        room
    }

    pub(crate) fn n_pending(&self) -> u64 {
        self.n_reserved - self.n_taken
    }

    pub(crate) fn n_taken(&self) -> u64 {
        self.n_taken
    }

    /// The entry that the next result comes in.
    pub(crate) fn next_idx(&self) -> u64 {
        self.n_taken % self.n_entries
    }

    /// Takes the next result if it is there: `seq` is the number of the entry at [`Entries::next_idx`], `read` reads
    /// its payload, and `consumed` tells the device how many were taken.
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
