//! Recurrent layers over state slots.

use crate::dense::{In, Out, ReferenceError};
use refrain_graph::{GatedDelta, Recurrent, ShortConv};
use refrain_tensor::DType;

/// Consecutive rows of one sequence in a step.
struct SequenceRows {
    first: usize,
    n_rows: usize,
    /// Slot that the state is read from; `None` for zeros.
    read: Option<usize>,
    /// Slot that the state is written to, if any.
    write: Option<usize>,
}

fn runs([positions, seqs, slots]: [&In<'_>; 3], n_slots: usize) -> Result<Vec<SequenceRows>, ReferenceError> {
    let (positions, seqs, slots) = (positions.to_i32()?, seqs.to_i32()?, slots.to_i32()?);
    let n_seqs = slots.len() / 2;
    let mut runs: Vec<SequenceRows> = Vec::new();
    for (row, (&position, &seq)) in positions.iter().zip(&seqs).enumerate() {
        let Ok(position) = usize::try_from(position) else { continue };
        if row > 0 && positions[row - 1] >= 0 && seqs[row - 1] == seq {
            if let Some(run) = runs.last_mut() {
                run.n_rows += 1;
            }
            continue;
        }
        let seq_idx = usize::try_from(seq).unwrap_or(usize::MAX);
        if seq_idx >= n_seqs {
            return Err(ReferenceError::OutOfRange { index: "sequence", got: seq.into(), limit: n_seqs });
        }
        let slot = |version: usize| match slots[2 * seq_idx + version] {
            slot if slot < 0 => Ok(None),
            slot if (slot as usize) < n_slots => Ok(Some(slot as usize)),
            slot => Err(ReferenceError::OutOfRange { index: "slot", got: slot.into(), limit: n_slots }),
        };
        let (read, write) = (slot(position % 2)?, slot((position + 1) % 2)?);
        let read = read.filter(|_| position > 0);
        runs.push(SequenceRows { first: row, n_rows: 1, read, write });
    }
    Ok(runs)
}

/// Runs an op of a recurrent layer. `inputs` excludes the state, which is `outputs[1]`.
pub(crate) fn recurrent(
    op: &Recurrent,
    inputs: &[In<'_>],
    outputs: &mut [Out<'_>],
) -> Result<(), ReferenceError> {
    let paging = op.positions() - 1;
    let dims = outputs[1].ty.shape.dims().to_vec();
    let slot_len: usize = dims[1..].iter().product();
    let runs = runs([&inputs[paging], &inputs[paging + 1], &inputs[paging + 2]], dims[0])?;
    let layout = refrain_tensor::Layout::contiguous(outputs[1].ty.shape);
    let mut state = In { dtype: DType::F32, layout, bytes: outputs[1].bytes }.to_f32()?;
    let mut y = vec![0.0; outputs[0].ty.shape.n_elements()];
    for run in runs {
        let mut slot: Vec<f64> = match run.read {
            Some(slot) => state[slot * slot_len..][..slot_len].iter().map(|&v| v.into()).collect(),
            None => vec![0.0; slot_len],
        };
        match op {
            Recurrent::ShortConv(conv) => short_conv(conv, inputs, &run, &mut slot, &mut y)?,
            Recurrent::GatedDelta(delta) => gated_delta(delta, inputs, &run, &mut slot, &mut y)?,
        }
        if let Some(write) = run.write {
            let to = state[write * slot_len..][..slot_len].iter_mut();
            to.zip(&slot).for_each(|(to, &v)| *to = v as f32);
        }
    }
    outputs[0].store(&y)?;
    outputs[1].store(&state)
}

fn short_conv(
    conv: &ShortConv,
    inputs: &[In<'_>],
    run: &SequenceRows,
    slot: &mut [f64], // [width - 1, d]
    y: &mut [f32],    // [n, d]
) -> Result<(), ReferenceError> {
    let (width, d) = (inputs[1].dim(0), inputs[1].dim(1));
    let (x, w) = (inputs[0].to_f32()?, inputs[1].to_f32()?);
    for c in 0..d {
        let mut seen: Vec<f64> = (0..width - 1).map(|j| slot[j * d + c]).collect();
        for row in run.first..run.first + run.n_rows {
            seen.push(x[row * d + c].into());
            let last = &seen[seen.len() - width..];
            let sum: f64 = last.iter().enumerate().map(|(j, x)| x * f64::from(w[j * d + c])).sum();
            y[row * d + c] = if conv.silu { sum / (1.0 + (-sum).exp()) } else { sum } as f32;
        }
        let kept = seen.len() - (width - 1);
        (0..width - 1).for_each(|j| slot[j * d + c] = seen[kept + j]);
    }
    Ok(())
}

fn gated_delta(
    delta: &GatedDelta,
    inputs: &[In<'_>],
    run: &SequenceRows,
    slot: &mut [f64], // [n_heads, v_dim, k_dim]
    y: &mut [f32],    // [n, n_heads, v_dim]
) -> Result<(), ReferenceError> {
    let [n_key_heads, k_dim] = [inputs[0].dim(1), inputs[0].dim(2)];
    let [n_heads, v_dim] = [inputs[2].dim(1), inputs[2].dim(2)];
    let values = |i: usize| -> Result<Vec<f64>, ReferenceError> {
        Ok(inputs[i].to_f32()?.into_iter().map(f64::from).collect())
    };
    let [q, k, v, a, b] = [values(0)?, values(1)?, values(2)?, values(3)?, values(4)?];
    let (decay, dt_bias) = (values(5)?, values(6)?);
    let unit = |x: &[f64]| {
        let r = 1.0 / (x.iter().map(|x| x * x).sum::<f64>() + f64::from(delta.eps)).sqrt();
        x.iter().map(|x| x * r).collect::<Vec<f64>>()
    };
    for row in run.first..run.first + run.n_rows {
        for head in 0..n_heads {
            let key_head = delta.key_heads.of(head, n_heads, n_key_heads);
            let at = (row * n_key_heads + key_head) * k_dim;
            let (q, k) = (unit(&q[at..at + k_dim]), unit(&k[at..at + k_dim]));
            let at = row * n_heads + head;
            let dt = a[at] + dt_bias[head];
            let softplus = dt.max(0.0) + (-dt.abs()).exp().ln_1p();
            let (keep, beta) = ((decay[head] * softplus).exp(), 1.0 / (1.0 + (-b[at]).exp()));
            for j in 0..v_dim {
                let s = &mut slot[(head * v_dim + j) * k_dim..][..k_dim];
                s.iter_mut().for_each(|s| *s *= keep);
                let known: f64 = s.iter().zip(&k).map(|(s, k)| s * k).sum();
                let change = beta * (v[at * v_dim + j] - known);
                s.iter_mut().zip(&k).for_each(|(s, k)| *s += change * k);
                let sum: f64 = s.iter().zip(&q).map(|(s, q)| s * q).sum();
                y[at * v_dim + j] = (f64::from(delta.scale) * sum) as f32;
            }
        }
    }
    Ok(())
}
