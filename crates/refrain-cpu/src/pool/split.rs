//! Dividing work: fixed ranges, and chunks that threads draw from a counter.

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Returns thread `part_idx`'s share of `0..n` in a split into `n_parts` nearly equal ranges at multiples of
/// `align`.
///
/// The ranges are disjoint, in order, and cover `0..n`. Some are empty if there are more parts than units.
pub fn static_range(n: usize, align: usize, part_idx: usize, n_parts: usize) -> Range<usize> {
    let (align, n_parts) = (align.max(1), n_parts.max(1));
    let n_units = n.div_ceil(align);
    let cut = |part: usize| {
        // In 128 bits, because `n_units * part` may overflow.
        let unit = (n_units as u128 * part.min(n_parts) as u128 / n_parts as u128) as usize;
        unit.saturating_mul(align).min(n)
    };
    cut(part_idx)..cut(part_idx + 1)
}

/// Returns the range of chunk `chunk_idx` in a split of `0..n` into chunks of `chunk_len`, or `None` past the
/// last.
pub fn chunk_range(n: usize, chunk_len: usize, chunk_idx: usize) -> Option<Range<usize>> {
    let begin = chunk_idx.checked_mul(chunk_len.max(1))?;
    (begin < n).then(|| begin..n.min(begin + chunk_len.max(1)))
}

/// Hands out the chunks of a slice, each exactly once, to any thread.
pub struct Chunks<'a, T> {
    data: *mut T,
    len: usize,
    chunk_len: usize,
    next: AtomicUsize,
    borrow: PhantomData<&'a mut [T]>,
}

// SAFETY: sharing a `Chunks` only lets threads draw distinct chunks (`next` never repeats an index), so it
// moves `&mut [T]`s between threads, which `T: Send` allows.
unsafe impl<T: Send> Sync for Chunks<'_, T> {}

impl<'a, T> Chunks<'a, T> {
    /// Splits `data` into chunks of `chunk_len` (at least 1) elements; the last may be shorter.
    pub fn new(data: &'a mut [T], chunk_len: usize) -> Chunks<'a, T> {
        Chunks {
            data: data.as_mut_ptr(),
            len: data.len(),
            chunk_len: chunk_len.max(1),
            next: AtomicUsize::new(0),
            borrow: PhantomData,
        }
    }

    /// Returns the next free chunk and its index.
    pub fn next(&self) -> Option<(usize, &'a mut [T])> {
        let chunk_idx = self.next.fetch_add(1, Ordering::Relaxed);
        let range = chunk_range(self.len, self.chunk_len, chunk_idx)?;
        // SAFETY: `range` is inside the slice that `new` borrowed for 'a, and the counter returns each index
        // once, so no two of these slices overlap. (To repeat an index the counter would have to wrap around,
        // which takes 2^64 calls past the end.)
        let chunk = unsafe { std::slice::from_raw_parts_mut(self.data.add(range.start), range.len()) };
        Some((chunk_idx, chunk))
    }
}

/// Hands out chunks of several slices together: chunk `i` of each, exactly once.
pub struct Zipped<'a, T, const N: usize> {
    slices: [(*mut T, usize, usize); N], // data, elements, elements of a chunk
    next: AtomicUsize,
    borrow: PhantomData<&'a mut [T]>,
}

// SAFETY: as for `Chunks`.
unsafe impl<T: Send, const N: usize> Sync for Zipped<'_, T, N> {}

impl<'a, T, const N: usize> Zipped<'a, T, N> {
    /// Splits each slice into chunks of its number of elements (at least 1).
    pub fn new(slices: [(&'a mut [T], usize); N]) -> Zipped<'a, T, N> {
        let slices = slices.map(|(data, chunk_len)| (data.as_mut_ptr(), data.len(), chunk_len.max(1)));
        Zipped { slices, next: AtomicUsize::new(0), borrow: PhantomData }
    }

    /// Returns the next free chunks and their index. A slice without such a chunk gives an empty one; `None` if
    /// no slice has one.
    pub fn next(&self) -> Option<(usize, [&'a mut [T]; N])> {
        let chunk_idx = self.next.fetch_add(1, Ordering::Relaxed);
        let mut is_any = false;
        let chunks = self.slices.map(|(data, len, chunk_len)| {
            let range = chunk_range(len, chunk_len, chunk_idx);
            is_any |= range.is_some();
            let range = range.unwrap_or(len..len);
            // SAFETY: `range` is inside a slice that `new` borrowed for 'a, the slices are distinct borrows,
            // and the counter returns each index once, so no two of these overlap.
            unsafe { std::slice::from_raw_parts_mut(data.add(range.start), range.len()) }
        });
        is_any.then_some((chunk_idx, chunks))
    }
}

/// A slice split into one part per thread of a region.
pub(super) struct ThreadParts<'a, T> {
    data: *mut T,
    part_len: usize,
    borrow: PhantomData<&'a mut [T]>,
}

// SAFETY: each thread takes the part of its own index, and parts are disjoint.
unsafe impl<T: Send> Sync for ThreadParts<'_, T> {}

impl<'a, T> ThreadParts<'a, T> {
    pub(super) fn new(data: &'a mut [T], n_parts: usize) -> ThreadParts<'a, T> {
        ThreadParts { data: data.as_mut_ptr(), part_len: data.len() / n_parts.max(1), borrow: PhantomData }
    }

    /// # Safety
    /// `part_idx` is below the number of parts, and no other thread has this part.
    pub(super) unsafe fn part(&self, part_idx: usize) -> &'a mut [T] {
        // SAFETY: inside the slice that `new` borrowed for 'a, and taken once by the contract of this function.
        unsafe { std::slice::from_raw_parts_mut(self.data.add(part_idx * self.part_len), self.part_len) }
    }
}
