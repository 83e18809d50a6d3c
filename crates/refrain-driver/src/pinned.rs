//! Pinned memory that the host and the device touch at the same time.
//!
//! Every such access of the host, and of the simulated device, goes through here: by whole words of eight bytes, each
//! loaded or stored atomically. So accesses that race see a word as it was before or after, and never race with one of
//! another size, which would be undefined. Regions are allocated in whole words for this ([`whole_words`]).
//!
//! Staging slots are the exception: their events order host and device, so they are copied as plain bytes.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::api::HostPtr;

const WORD: usize = 8;

/// Bytes to allocate for a region of `bytes`.
pub(crate) fn whole_words(bytes: u64) -> u64 {
    // What does not fit the address space is refused by the allocation.
    bytes.checked_next_multiple_of(WORD as u64).unwrap_or(bytes)
}

/// The word at an address.
///
/// # Safety
/// The address is a multiple of eight, and the word lies in pinned memory that stays allocated for `'a` and that the host
/// touches only through this module meanwhile.
pub(crate) unsafe fn word<'a>(at: HostPtr) -> &'a AtomicU64 {
    // SAFETY: aligned, allocated and only touched atomically, as the caller promises.
    unsafe { AtomicU64::from_ptr(at.as_ptr().cast()) }
}

/// Reads bytes that the device may be writing. What it writes meanwhile may be seen in part, but no word half.
///
/// # Safety
/// Every word that the range reaches into is as [`word`] demands.
pub(crate) unsafe fn read(from: HostPtr, to: &mut [u8]) {
    let mut to = to;
    for WordPart { at, first, len } in parts(from, to.len()) {
        // SAFETY: the range reaches into this word.
        let bytes = unsafe { word(at) }.load(Ordering::Relaxed).to_ne_bytes();
        let (now, rest) = to.split_at_mut(len);
        now.copy_from_slice(&bytes[first..first + len]);
        to = rest;
    }
}

/// Writes bytes that another thread may be reading or writing, and leaves what else is in their words.
///
/// # Safety
/// As for [`read`].
pub(crate) unsafe fn write(to: HostPtr, from: &[u8]) {
    let mut from = from;
    for WordPart { at, first, len } in parts(to, from.len()) {
        let (now, rest) = from.split_at(len);
        // SAFETY: the range reaches into this word.
        let word = unsafe { word(at) };
        match <[u8; WORD]>::try_from(now) {
            Ok(bytes) => word.store(u64::from_ne_bytes(bytes), Ordering::Relaxed),
            Err(_) => {
                let mut old = word.load(Ordering::Relaxed);
                loop {
                    let mut bytes = old.to_ne_bytes();
                    bytes[first..first + len].copy_from_slice(now);
                    let new = u64::from_ne_bytes(bytes);
                    match word.compare_exchange_weak(old, new, Ordering::Relaxed, Ordering::Relaxed) {
                        Ok(_) => break,
                        Err(found) => old = found,
                    }
                }
            }
        }
        from = rest;
    }
}

/// A word, and which of its bytes are meant.
struct WordPart {
    at: HostPtr,
    first: usize,
    len: usize,
}

fn parts(start: HostPtr, len: usize) -> impl Iterator<Item = WordPart> {
    let (mut at, mut left) = (start.0, len);
    std::iter::from_fn(move || {
        let first = (at % WORD as u64) as usize;
        let len = left.min(WORD - first);
        let part = WordPart { at: HostPtr(at - first as u64), first, len };
        at += len as u64;
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
    fn any_range_is_written_and_read_and_its_neighbours_stay() {
        let memory = words(4);
        let base = HostPtr::of(memory.as_ptr());
        for start in 0..32 {
            for end in start..32 {
                memory.iter().for_each(|w| w.store(u64::from_ne_bytes([0xee; 8]), Ordering::Relaxed));
                let bytes: Vec<u8> = (start as u8..end as u8).collect();
                let mut all = [0; 32];
                let mut range = vec![0; end - start];
                // SAFETY: ranges of `memory`, which is of atomic words.
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
    fn a_word_that_is_being_written_is_never_seen_half() {
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
                    // SAFETY: a range of `memory`, which is of atomic words.
                    unsafe { write(base, &[byte; WORD * N]) };
                }
            });
            let (mut seen, mut last, mut n_changes, mut half) = ([0; WORD * N], 0, 0, None);
            // Counted in what was seen to change, so that the two threads have really met.
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
