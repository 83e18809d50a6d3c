//! AdamW.

use crate::dense::{In, Out, ReferenceError};
use refrain_graph::{AdamParam, AdamW};
use refrain_tensor::Layout;

/// Runs one AdamW step. `inputs` are those that the step does not change: the parameters, the sum of squares,
/// and the gradients unless they are accumulators. `outputs` are the states and hold their previous contents.
pub(crate) fn adamw(adam: &AdamW, inputs: &[In<'_>], outputs: &mut [Out<'_>]) -> Result<(), ReferenceError> {
    let params = inputs[0].to_f32()?;
    let sum_squares = inputs[1].to_f32()?[0];
    let of = |param: AdamParam| params[param as usize];
    let is_applied = sum_squares.is_finite();
    let count = i32::from_le_bytes(std::array::from_fn(|i| outputs[0].bytes[i]));
    let next = count.saturating_add(i32::from(is_applied));
    outputs[0].bytes.copy_from_slice(&next.to_le_bytes());

    let norm = sum_squares.sqrt();
    let clip = match of(AdamParam::MaxNorm) {
        0.0 => 1.0,
        max => (max / (norm + 1e-6)).min(1.0),
    };
    let correction = |ln_beta: AdamParam| -(next as f32 * of(ln_beta)).exp_m1();
    let rate = of(AdamParam::Lr) / correction(AdamParam::LnBeta1);
    let root = correction(AdamParam::LnBeta2).sqrt();
    let (mut input, mut output) = (2, 1);
    for &decays in adam.decays.iter() {
        let grad = match adam.clears {
            true => {
                let accumulated = held(&outputs[output])?;
                outputs[output].bytes.fill(0);
                output += 1;
                accumulated
            }
            false => inputs[input].to_f32()?,
        };
        input += usize::from(!adam.clears);
        let n_states = 3 + usize::from(adam.masters);
        let states = &mut outputs[output..output + n_states];
        output += n_states;
        if !is_applied {
            continue;
        }
        // Without a master weight, the weight itself is updated.
        let master = usize::from(adam.masters);
        let (mut w, mut m, mut v) =
            (held(&states[master])?, held(&states[master + 1])?, held(&states[master + 2])?);
        let decay = if decays { 1.0 - of(AdamParam::Lr) * of(AdamParam::WeightDecay) } else { 1.0 };
        for i in 0..w.len() {
            let g = grad[i] * clip;
            m[i] = of(AdamParam::Beta1) * m[i] + of(AdamParam::OneMinusBeta1) * g;
            v[i] = of(AdamParam::Beta2) * v[i] + of(AdamParam::OneMinusBeta2) * (g * g);
            w[i] = w[i] * decay - rate * (m[i] / (v[i].sqrt() / root + of(AdamParam::Eps)));
        }
        states[0].store(&w)?;
        states[master].store(&w)?;
        states[master + 1].store(&m)?;
        states[master + 2].store(&v)?;
    }
    Ok(())
}

fn held(state: &Out<'_>) -> Result<Vec<f32>, ReferenceError> {
    let layout = Layout::contiguous(state.ty.shape);
    Ok(In { dtype: state.ty.dtype, layout, bytes: state.bytes }.to_f32()?)
}
