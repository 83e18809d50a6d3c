//! Concurrent access to pinned memory by host and device.
//!
//! Every such access, by the host or the simulated device, goes through this module in whole 8-byte words, each
//! loaded or stored atomically. Racing accesses therefore see a word either before or after a change, and never mix
//! sizes, which would be undefined behaviour. Regions are allocated in whole words for this reason
//! ([`whole_words`]).
//!
//! Staging slots are the exception: events order host and device, so plain copies are enough.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::api::HostPtr;

const WORD: usize = 8;

/// Rounds `bytes` up to the allocation size of a region.
pub(crate) fn whole_words(bytes: u64) -> u64 {
    // On overflow the allocation fails.
    bytes.checked_next_multiple_of(WORD as u64).unwrap_or(bytes)
}

/// Returns the word at an address.
///
/// # Safety
/// The address is 8-byte aligned, and the word lies in pinned memory that stays allocated for `'a` and that the
/// host accesses only through this module during `'a`.
pub(crate) unsafe fn word<'a>(address: HostPtr) -> &'a AtomicU64 {
    // SAFETY: aligned, allocated and accessed only atomically; the caller guarantees all three.
    unsafe { AtomicU64::from_ptr(address.as_ptr().cast()) }
}

/// Reads bytes that the device may be writing. Concurrent writes may be seen partially, but never half a word.
///
/// # Safety
/// Every word that the range overlaps meets the requirements of [`word`].
pub(crate) unsafe fn read(from: HostPtr, to: &mut [u8]) {
    let mut to = to;
    for WordPart { address, first, len } in word_parts(from, to.len()) {
        // SAFETY: the range overlaps this word.
        let bytes = unsafe { word(address) }.load(Ordering::Relaxed).to_ne_bytes();
        let (head, tail) = to.split_at_mut(len);
        head.copy_from_slice(&bytes[first..first + len]);
        to = tail;
    }
}

/// Writes bytes that another thread may be reading or writing, and preserves the other bytes of their words.
///
/// # Safety
/// As for [`read`].
pub(crate) unsafe fn write(to: HostPtr, from: &[u8]) {
    let mut from = from;
    for WordPart { address, first, len } in word_parts(to, from.len()) {
        let (head, tail) = from.split_at(len);
        // SAFETY: the range overlaps this word.
        let word = unsafe { word(address) };
        match <[u8; WORD]>::try_from(head) {
            Ok(bytes) => word.store(u64::from_ne_bytes(bytes), Ordering::Relaxed),
            Err(_) => {
                let mut old = word.load(Ordering::Relaxed);
                loop {
                    let mut bytes = old.to_ne_bytes();
                    bytes[first..first + len].copy_from_slice(head);
                    let new = u64::from_ne_bytes(bytes);
                    match word.compare_exchange_weak(old, new, Ordering::Relaxed, Ordering::Relaxed) {
                        Ok(_) => break,
                        Err(found) => old = found,
                    }
                }
            }
        }
        from = tail;
    }
}

/// A word and the range of its bytes to access.
struct WordPart {
    address: HostPtr,
    first: usize,
    len: usize,
}

fn word_parts(start: HostPtr, len: usize) -> impl Iterator<Item = WordPart> {
    let (mut next, mut left) = (start.0, len);
    std::iter::from_fn(move || {
        let first = (next % WORD as u64) as usize;
        let len = left.min(WORD - first);
        let part = WordPart { address: HostPtr(next - first as u64), first, len };
        next += len as u64;
        left -= len;
        (len > 0).then_some(part)
    })
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::*;

    fn words(n: usize) -> Vec<AtomicU64> {
        (0..n).map(|_| AtomicU64::new(0)).collect()
    }

    #[test]
    fn any_range_is_read_and_written_without_touching_its_neighbours() {
        let memory = words(4);
        let base = HostPtr::of(memory.as_ptr());
        for start in 0..32 {
            for end in start..32 {
                memory.iter().for_each(|w| w.store(u64::from_ne_bytes([0xee; 8]), Ordering::Relaxed));
                let bytes: Vec<u8> = (start as u8..end as u8).collect();
                let mut all = [0; 32];
                let mut range = vec![0; end - start];
                // SAFETY: the ranges lie in `memory`, which consists of atomic words.
                unsafe {
                    write(HostPtr(base.0 + start as u64), &bytes);
                    read(HostPtr(base.0 + start as u64), &mut range);
                    read(base, &mut all);
                }
                assert_eq!(range, bytes);
                assert_eq!(&all[start..end], bytes.as_slice());
                assert!(
                    all[..start].iter().chain(&all[end..]).all(|&b| b == 0xee),
                    "{start}..{end}: {all:?}"
                );
            }
        }
    }

    #[test]
    fn a_read_never_sees_half_of_a_concurrent_write() {
        const N: usize = 64;
        const CHANGES: usize = 100;
        let memory = words(N);
        let base = HostPtr::of(memory.as_ptr());
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut byte = 0_u8;
                while !done.load(Ordering::Relaxed) {
                    byte = !byte;
                    // SAFETY: the range lies in `memory`, which consists of atomic words.
                    unsafe { write(base, &[byte; WORD * N]) };
                }
            });
            let (mut seen, mut last, mut n_changes, mut half) = ([0; WORD * N], 0, 0, None);
            // Counts observed changes, so that the two threads have really run concurrently.
            while n_changes < CHANGES && half.is_none() {
                // SAFETY: as above.
                unsafe { read(base, &mut seen) };
                n_changes += usize::from(seen[0] != last);
                last = seen[0];
                half = seen
                    .chunks_exact(WORD)
                    .find(|word| word.iter().any(|b| *b != word[0]))
                    .map(<[u8]>::to_vec);
            }
            done.store(true, Ordering::Relaxed);
            assert_eq!(half, None);
        });
    }
}
