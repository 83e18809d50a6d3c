//! Products with the adapter of each row's sequence.

use crate::dense::{In, Out, ReferenceError};
use refrain_graph::LoraOp;

pub(crate) fn run(op: LoraOp, inputs: &[In<'_>], out: &mut Out<'_>) -> Result<(), ReferenceError> {
    let factors = op.factors();
    let (x, w) = (inputs[factors - 1].to_f32()?, inputs[factors].to_f32()?);
    let [n_adapters, n_rows, n_cols] = [0, 1, 2].map(|axis| inputs[factors].dim(axis));
    let (n_out, n_in, [next_out, next_in]) = match op {
        LoraOp::Down => (n_rows, n_cols, [n_cols, 1]),
        LoraOp::Up => (n_cols, n_rows, [1, n_cols]),
    };
    let (seqs, adapters) = (inputs[factors + 1].to_i32()?, inputs[factors + 2].to_i32()?);
    let mut y = match op {
        LoraOp::Down => vec![0.0; seqs.len() * n_out],
        LoraOp::Up => inputs[0].to_f32()?,
    };
    for (row, &seq) in seqs.iter().enumerate() {
        let Some(adapter) = adapter_of(seq, &adapters, n_adapters)? else { continue };
        for o in 0..n_out {
            let w = |i: usize| f64::from(w[adapter * n_rows * n_cols + o * next_out + i * next_in]);
            let product: f64 = (0..n_in).map(|i| f64::from(x[row * n_in + i]) * w(i)).sum();
            let y = &mut y[row * n_out + o];
            *y = (f64::from(*y) + product) as f32;
        }
    }
    out.store(&y)
}

/// The adapter of a row's sequence; `None` if the row has no sequence or the sequence no adapter.
fn adapter_of(seq: i32, adapters: &[i32], n_adapters: usize) -> Result<Option<usize>, ReferenceError> {
    let Ok(seq_idx) = usize::try_from(seq) else { return Ok(None) };
    let Some(&adapter) = adapters.get(seq_idx) else {
        return Err(ReferenceError::OutOfRange { index: "sequence", got: seq.into(), limit: adapters.len() });
    };
    match usize::try_from(adapter) {
        Err(_) => Ok(None),
        Ok(idx) if idx < n_adapters => Ok(Some(idx)),
        Ok(_) => Err(ReferenceError::OutOfRange { index: "adapter", got: adapter.into(), limit: n_adapters }),
    }
}
