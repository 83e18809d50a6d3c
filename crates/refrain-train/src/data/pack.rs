//! Packs documents into rows, several per row where they fit.

use std::collections::BTreeMap;
use std::fmt;

use super::corpus::Corpus;
use super::encode::LEARN;
use super::order::Permutation;

/// Consecutive tokens of a document: `len` inputs from `start`, each with the following token as its target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct DocumentSlice {
    pub(super) start: usize,
    pub(super) len: u32,
}

/// The slices of a row.
pub(super) type PackedRow = Vec<DocumentSlice>;

/// Splits all documents into slices of at most `context` inputs. The last token of a document is only ever a
/// target.
pub(super) fn slices(corpus: &Corpus, context: usize) -> Vec<DocumentSlice> {
    let tokens = corpus.marked();
    let mut slices = Vec::new();
    for document in corpus.documents() {
        let inputs = document.start..document.end.saturating_sub(1);
        for start in inputs.clone().step_by(context) {
            let len = context.min(inputs.end - start);
            let targets = &tokens[start + 1..start + 1 + len];
            if targets.iter().any(|token| token & LEARN != 0) {
                slices.push(DocumentSlice { start, len: len as u32 });
            }
        }
    }
    slices
}

/// Rows packed together. Large enough to keep padding low; bounded so that packing is cheap in time and
/// memory, and a resumed run need not repeat all of it.
const WINDOW_ROWS: u64 = 256;

/// Slices in the order of an epoch, packed window by window.
#[derive(Clone)]
pub(super) struct Packer {
    slices: Vec<DocumentSlice>,
    context: usize,
    seed: Option<u64>, // `None` for file order
}

/// The rows of a window.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PackedWindow {
    pub(super) rows: Vec<PackedRow>,
    /// Start of the next window.
    pub(super) next: u64,
}

impl fmt::Debug for Packer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Packer").field("n_slices", &self.slices.len()).finish_non_exhaustive()
    }
}

impl Packer {
    pub(super) fn new(corpus: &Corpus, context: usize, seed: Option<u64>) -> Self {
        Self { slices: slices(corpus, context), context, seed }
    }

    pub(super) fn n_slices(&self) -> u64 {
        self.slices.len() as u64
    }

    /// The window of an epoch that starts at its slice `start`.
    pub(super) fn window(&self, epoch: u64, start: u64) -> PackedWindow {
        // Of each seed's streams, even ones order slices and odd ones order rows.
        let order = self.seed.map(|seed| Permutation::new(self.n_slices(), seed, epoch.wrapping_mul(2)));
        let (mut taken, mut n_tokens, mut next) = (Vec::new(), 0, start);
        while next < self.n_slices() && n_tokens < WINDOW_ROWS * self.context as u64 {
            let slice = self.slices[order.map_or(next, |order| order.at(next)) as usize];
            taken.push(slice);
            n_tokens += u64::from(slice.len);
            next += 1;
        }
        let mut rows = pack(&taken, self.context);
        if let Some(seed) = self.seed {
            let order = Permutation::new(
                rows.len() as u64,
                seed ^ start.rotate_left(32),
                epoch.wrapping_mul(2).wrapping_add(1),
            );
            let mut from: Vec<PackedRow> = std::mem::take(&mut rows);
            rows = (0..from.len()).map(|i| std::mem::take(&mut from[order.at(i as u64) as usize])).collect();
        }
        PackedWindow { rows, next }
    }
}

/// Best fit, longest slice first. Rows are ordered by their first slices, and so are the slices within a row.
fn pack(slices: &[DocumentSlice], context: usize) -> Vec<PackedRow> {
    let mut by_length: Vec<usize> = (0..slices.len()).collect();
    by_length.sort_by_key(|&i| std::cmp::Reverse(slices[i].len));
    let mut rows: Vec<Vec<usize>> = Vec::new();
    let mut by_capacity: BTreeMap<(usize, usize), ()> = BTreeMap::new(); // capacity left, and row
    for i in by_length {
        let len = slices[i].len as usize;
        let found = by_capacity.range((len, 0)..).next().map(|(key, ())| *key);
        let (capacity, row) = found.unwrap_or_else(|| {
            rows.push(Vec::new());
            (context, rows.len() - 1)
        });
        by_capacity.remove(&(capacity, row));
        rows[row].push(i);
        if capacity > len {
            by_capacity.insert((capacity - len, row), ());
        }
    }
    rows.iter_mut().for_each(|row| row.sort_unstable());
    rows.sort_unstable_by_key(|row| row.first().copied());
    rows.into_iter().map(|row| row.into_iter().map(|i| slices[i]).collect()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_slice_is_in_one_row_and_no_row_overflows(
            lens in prop::collection::vec(1..=32u32, 1..200),
        ) {
            let slices: Vec<DocumentSlice> =
                lens.iter().enumerate().map(|(i, &len)| DocumentSlice { start: i * 100, len }).collect();
            let rows = pack(&slices, 32);
            let mut seen: Vec<DocumentSlice> = rows.iter().flatten().copied().collect();
            seen.sort_by_key(|slice| slice.start);
            prop_assert_eq!(seen, slices);
            let used: Vec<u32> = rows.iter().map(|row| row.iter().map(|slice| slice.len).sum()).collect();
            prop_assert!(used.iter().all(|&used| used <= 32));
            // Best fit leaves at most one row less than half full.
            prop_assert!(used.iter().filter(|&&used| used <= 16).count() <= 1, "{:?}", used);
        }
    }
}
