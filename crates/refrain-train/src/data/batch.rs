//! Input of a micro-step.

use super::encode::LEARN;
use super::pack::PackedRow;

/// Rows of one micro-step: `n_seqs * context` of them, sequence after sequence.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Batch {
    /// Token of each row; -1 for padding.
    pub tokens: Vec<i32>,
    /// Target of each row; -1 for none.
    pub targets: Vec<i32>,
    /// Position within the document, for RoPE; -1 for padding.
    pub positions: Vec<i32>,
    /// Rows `[first, end)` of the row's document; empty (`[i, i]`) for padding.
    pub spans: Vec<[i32; 2]>,
    /// Number of rows with a target.
    pub n_targets: usize,
}

impl Batch {
    /// Number of rows without padding.
    pub fn n_tokens(&self) -> usize {
        self.tokens.iter().filter(|&&token| token >= 0).count()
    }

    /// `n_seqs` sequences of padding.
    pub(super) fn padding(n_seqs: usize, context: usize) -> Self {
        let n_rows = n_seqs * context;
        let empty = (0..n_rows).map(|i| [i as i32, i as i32]).collect();
        Self {
            tokens: vec![-1; n_rows],
            targets: vec![-1; n_rows],
            positions: vec![-1; n_rows],
            spans: empty,
            n_targets: 0,
        }
    }

    /// Writes the slices of `row` as sequence `seq_idx`; `marked` holds the tokens of the corpus with their
    /// marks.
    pub(super) fn set(&mut self, seq_idx: usize, context: usize, marked: &[u32], row: &PackedRow) {
        let mut first = seq_idx * context;
        for slice in row {
            let len = slice.len as usize;
            let end = first + len;
            for i in 0..len {
                let (at, target) = (first + i, marked[slice.start + i + 1]);
                self.tokens[at] = (marked[slice.start + i] & !LEARN) as i32;
                if target & LEARN != 0 {
                    self.targets[at] = (target & !LEARN) as i32;
                    self.n_targets += 1;
                }
                self.positions[at] = i as i32;
                self.spans[at] = [first as i32, end as i32];
            }
            first = end;
        }
    }
}
