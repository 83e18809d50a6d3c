//! Ways to divide work: fixed ranges, and chunks that threads draw from a counter.

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Thread `part_idx`'s share of `0..n` when it is cut into `n_parts` nearly equal pieces at multiples of `align`.
///
/// The pieces are disjoint, in order, and cover `0..n`; some are empty when there are more parts than units.
pub fn static_range(n: usize, align: usize, part_idx: usize, n_parts: usize) -> Range<usize> {
    let (align, n_parts) = (align.max(1), n_parts.max(1));
    let n_units = n.div_ceil(align);
    let cut = |part: usize| {
        // As wide integers: `n_units * part` may not fit.
        let unit = (n_units as u128 * part.min(n_parts) as u128 / n_parts as u128) as usize;
        unit.saturating_mul(align).min(n)
    };
    cut(part_idx)..cut(part_idx + 1)
}

/// The range of chunk `chunk_idx` when `0..n` is cut into chunks of `chunk_len`, or `None` past the last.
pub fn chunk_range(n: usize, chunk_len: usize, chunk_idx: usize) -> Option<Range<usize>> {
    let begin = chunk_idx.checked_mul(chunk_len.max(1))?;
    (begin < n).then(|| begin..n.min(begin + chunk_len.max(1)))
}

/// Hands out the chunks of a slice, each exactly once, to whichever thread asks.
pub struct Chunks<'a, T> {
    data: *mut T,
    len: usize,
    chunk_len: usize,
    next: AtomicUsize,
    borrow: PhantomData<&'a mut [T]>,
}

// SAFETY: sharing a `Chunks` only lets threads draw distinct chunks (`next` never repeats an index), so it moves
// `&mut [T]`s between threads, which `T: Send` allows.
unsafe impl<T: Send> Sync for Chunks<'_, T> {}

impl<'a, T> Chunks<'a, T> {
    /// Cuts `data` into chunks of `chunk_len` (at least 1) elements; the last may be shorter.
    pub fn new(data: &'a mut [T], chunk_len: usize) -> Chunks<'a, T> {
        Chunks {
            data: data.as_mut_ptr(),
            len: data.len(),
            chunk_len: chunk_len.max(1),
            next: AtomicUsize::new(0),
            borrow: PhantomData,
        }
    }

    /// The next chunk that nobody has, with its index.
    pub fn next(&self) -> Option<(usize, &'a mut [T])> {
        let chunk_idx = self.next.fetch_add(1, Ordering::Relaxed);
        let range = chunk_range(self.len, self.chunk_len, chunk_idx)?;
        // SAFETY: `range` lies in the slice that `new` borrowed for 'a, and the counter gives each index out once,
        // so no two of these slices overlap. (It would have to wrap around to repeat: each draw past the end is
        // one more call, 2^64 of them.)
        let chunk = unsafe { std::slice::from_raw_parts_mut(self.data.add(range.start), range.len()) };
        Some((chunk_idx, chunk))
    }
}
