//! Products with the adapter of each row's sequence.

use crate::compile::ArenaRowLayout;
use crate::pool::Pool;
use crate::recurrent::ArenaRows;
use crate::simd::{Level, LoraFactor, lora_down_row, lora_up_row};
use refrain_graph::{LoraOp, RunError, WeightId};
use std::ops::Range;

/// Operands of a product with adapters.
#[derive(Clone, Debug)]
pub(crate) struct LoraCall {
    pub op: LoraOp,
    /// The rows that the factors multiply.
    pub x: ArenaRowLayout,
    /// The rows that the product is added to, which `out` may already hold.
    pub y: Option<Range<usize>>,
    pub out: Range<usize>,
    pub factors: WeightId,
    /// Number of adapters, and rows and columns of a factor.
    pub dims: [usize; 3],
    pub seqs: Range<usize>,     // control: [n]
    pub adapters: Range<usize>, // control: [n_seqs]
}

/// Products of fewer multiplications run on the calling thread: waking the others takes longer.
const PARALLEL_PRODUCTS: usize = 1 << 16;
/// Results per task when there are fewer rows than threads.
const FEW_RANKS: usize = 4;
const FEW_COLUMNS: usize = 256;

impl LoraCall {
    /// Refuses a sequence or an adapter that does not exist.
    fn check(&self, control: &[i32], label: &str) -> Result<(), RunError> {
        let checks =
            [("sequence", &self.seqs, self.adapters.len()), ("adapter", &self.adapters, self.dims[0])];
        for (what, range, limit) in checks {
            let most = control[range.clone()].iter().copied().max().unwrap_or(-1);
            if usize::try_from(most).is_ok_and(|most| most >= limit) {
                return Err(RunError::OutOfRange { label: label.into(), what, got: most.into(), limit });
            }
        }
        Ok(())
    }

    /// Computes the rows of `out`, which for [`LoraOp::Up`] holds the rows to add to. `stack` are the factors of all
    /// adapters.
    pub(crate) fn run(
        &self,
        (pool, level): (&Pool, Level),
        label: &str,
        control: &[i32],
        stack: LoraFactor<'_>,
        x: &ArenaRows<'_>,
        out: &mut [f32],
    ) -> Result<(), RunError> {
        self.check(control, label)?;
        let [n_adapters, n_rows, n_cols] = self.dims;
        let (n_out, few) = match self.op {
            LoraOp::Down => (n_rows, FEW_RANKS),
            LoraOp::Up => (n_cols, FEW_COLUMNS),
        };
        let (seqs, adapters) = (&control[self.seqs.clone()], &control[self.adapters.clone()]);
        let n_bytes = stack.bytes.len() / n_adapters.max(1);
        let task = |at: usize, out: &mut [f32]| {
            let (row, first) = (at / n_out, at % n_out);
            let adapter = usize::try_from(seqs[row]).ok().and_then(|seq| usize::try_from(adapters[seq]).ok());
            let factor = adapter
                .map(|adapter| LoraFactor { bytes: &stack.bytes[adapter * n_bytes..][..n_bytes], ..stack });
            match (self.op, factor) {
                (LoraOp::Down, Some(a)) => lora_down_row(level, a, x.row(row), first, out),
                (LoraOp::Up, Some(b)) => lora_up_row(level, b, x.row(row), first, out),
                (LoraOp::Down, None) => out.fill(0.0),
                (LoraOp::Up, None) => {}
            }
        };
        if seqs.len() * n_rows * n_cols < PARALLEL_PRODUCTS {
            out.chunks_mut(n_out.max(1)).enumerate().for_each(|(row, out)| task(row * n_out, out));
            return Ok(());
        }
        // A task is a row or part of one.
        let splits = seqs.len() < pool.n_threads() && n_out.is_multiple_of(few);
        let len = if splits { few } else { n_out.max(1) };
        pool.chunks_mut(out, len, |i, out| task(i * len, out));
        Ok(())
    }
}
