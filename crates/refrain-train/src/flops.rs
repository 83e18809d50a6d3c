//! Floating-point operations of a training step.

use refrain_graph::WeightId;
use refrain_models::Model;

/// Floating-point operations of a training step over `n_tokens` tokens in rows of `context`, by the usual
/// count: six per token and weight of a matrix product (two forward, four backward), four for a frozen
/// weight, which has no gradient, and causal attention over whole rows. Recomputation to save memory does not
/// count.
pub fn step_flops(model: &Model, n_tokens: u64, context: usize) -> f64 {
    let config = model.config();
    let is_product = |name: &str| name != "token_embd.weight" || config.tied_embeddings;
    let weights: f64 = model
        .weights()
        .iter()
        .enumerate()
        .filter(|(_, weight)| weight.ty.shape.rank() >= 2 && is_product(&weight.name))
        .map(|(idx, weight)| {
            let each = if model.is_trained(WeightId::from_idx(idx)) { 6.0 } else { 4.0 };
            each * weight.ty.shape.n_elements() as f64
        })
        .sum();
    let width = (config.n_heads * config.head_dim) as f64;
    let attention: f64 = (0..config.n_layers)
        .map(|layer| {
            // A multiply and an add each for scores and for values; twice that in the backward pass.
            12.0 * width * mean_seen(context, config.window(layer))
        })
        .sum();
    n_tokens as f64 * (weights + attention)
}

/// Mean number of positions that a token of a row attends to.
fn mean_seen(context: usize, window: Option<usize>) -> f64 {
    let context = context as f64;
    match window.map(|window| window as f64) {
        Some(window) if window < context => window - window * window / (2.0 * context),
        _ => context / 2.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use refrain_models::NamedShape;

    #[test]
    fn the_ten_million_model_computes_half_a_teraflop() {
        let config = NamedShape::find("llama-10m").unwrap().fresh_config(256);
        let model = Model::fresh(config, 0).unwrap();
        let flops = step_flops(&model, 32 * 256, 256);
        // 10.24 M weights, and six layers of five heads of 64 elements.
        assert!((flops / 1e12 - (0.5032 + 0.0242)).abs() < 1e-3, "{flops}");
    }

    #[test]
    fn frozen_weights_have_no_gradients_to_compute() {
        let config = NamedShape::find("llama-1m").unwrap().fresh_config(64);
        let model = Model::fresh(config, 0).unwrap();
        let adapter = model.fresh_adapter(&crate::config::LoraTable::default().spec(), 0).unwrap();
        let adapted = model.with_adapter(&adapter).unwrap();
        let attention = step_flops(&model, 1, 64) - 6.0 * matrices(&model);
        let want = 4.0 * matrices(&model) + 6.0 * adapted.n_trained() as f64 + attention;
        assert_eq!(step_flops(&adapted, 1, 64), want);
    }

    fn matrices(model: &Model) -> f64 {
        let matrices = model.weights().iter().filter(|weight| weight.ty.shape.rank() == 2);
        matrices.map(|weight| weight.ty.shape.n_elements() as f64).sum()
    }

    #[test]
    fn a_window_bounds_the_positions_a_token_attends_to() {
        assert_eq!(mean_seen(100, None), 50.0);
        assert_eq!(mean_seen(100, Some(200)), 50.0);
        assert_eq!(mean_seen(100, Some(10)), 9.5);
    }
}
