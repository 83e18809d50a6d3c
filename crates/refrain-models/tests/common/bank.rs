//! Random adapters for any model.

use refrain_models::{Adapter, BankAdapter, LoraSpec, Model, Targets};
use refrain_tensor::HostTensor;

/// Three adapters of different ranks and targets, with scales that are powers of two.
pub(crate) fn adapters(model: &Model) -> Vec<BankAdapter> {
    let specs = [("all", Targets::All, 4, 1.0), ("attention", Targets::Attention, 2, 0.5)];
    // Maps of every model, of every second layer only, and not all maps of the same rows.
    let some = random(model, Targets::All, 7, 3);
    let is_kept = |module: &str| {
        let layer = module.split("layers.").nth(1).and_then(|rest| rest.chars().next());
        layer.is_some_and(|layer| layer != '0')
            && !module.ends_with("k_proj")
            && !module.ends_with("gate_proj")
    };
    let parts = some.parts.into_iter().filter(|part| is_kept(&part.module)).collect();
    let some = BankAdapter { name: "some".into(), adapter: Adapter { parts, ..some }, scale: 1.0 };
    let mut all: Vec<BankAdapter> = specs
        .into_iter()
        .enumerate()
        .map(|(idx, (name, targets, rank, scale))| {
            let adapter = random(model, targets, rank, idx as u64);
            BankAdapter { name: name.into(), adapter, scale }
        })
        .collect();
    all.push(some);
    all
}

/// The model with these adapters.
pub(crate) fn banked(model: &Model) -> Model {
    model.with_adapter_bank(&adapters(model)).unwrap()
}

fn random(model: &Model, targets: Targets, rank: usize, seed: u64) -> Adapter {
    let alpha = 2.0 * rank as f64;
    let mut adapter =
        model.fresh_adapter(&LoraSpec { rank, alpha, rslora: false, dropout: 0.0, targets }, seed).unwrap();
    let mut state = seed + 77;
    let mut random = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 24) as f32 - 0.5
    };
    for part in &mut adapter.parts {
        let shape = part.b.shape();
        let b: Vec<f32> = (0..shape.n_elements()).map(|_| 0.3 * random()).collect();
        part.b = HostTensor::from_f32(shape, &b).unwrap();
    }
    adapter
}
