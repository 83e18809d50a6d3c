//! The cost of verifying a training step: states are poisoned, saved and restored on the device, not through the host.

mod runs;

use std::sync::Arc;

use refrain_cuda::{CudaBackend, GraphMode};
use refrain_driver::sim::{FaultScript, SimDriver, SimOptions};
use refrain_graph::Ran;
use refrain_models::{Model, NamedShape, TrainSpec};
use refrain_tensor::DType;
use refrain_train::learner::{AdamSettings, Learner};
use runs::{AHEAD, How, ONE_BY_ONE, OwnRows, assert_same, backend, states};

const SPEC: TrainSpec = TrainSpec {
    n_tokens: 8,
    n_context: 8,
    dtype: DType::BF16,
    masters: true,
    accumulates: false,
    dropout: 0.0,
    recompute: false,
};

const ADAM: AdamSettings =
    AdamSettings { lr: 1e-2, betas: [0.9, 0.95], eps: 1e-8, weight_decay: 0.1, clip: Some(1.0) };

/// Bytes that a verification may upload: a pattern of 256 KiB for each of two dtypes, control block and counters, before
/// each of two runs of three cases. Doing the same from the host would take seven times the size of the states.
const FEW: u64 = 6 << 20;

/// Wide and shallow: many bytes of states, few operations.
fn model() -> Arc<Model> {
    let mut config = NamedShape::find("llama-10m").unwrap().fresh_config(64);
    (config.n_vocab, config.n_layers, config.hidden, config.ffn) = (5120, 1, 64, 64);
    (config.n_heads, config.n_kv_heads, config.head_dim, config.rope.dims) = (2, 2, 32, 32);
    config.attn_scale = 32f32.powf(-0.5);
    config.tied_embeddings = false;
    config.layers.truncate(1);
    Arc::new(Model::fresh(config, 3).unwrap())
}

fn learner(sim: &SimDriver, how: How) -> Learner<CudaBackend> {
    let (_, backend) = backend(sim, how);
    Learner::new(backend, model(), SPEC, 1).unwrap_or_else(|e| panic!("{e}: {e:?}"))
}

fn state_bytes(learner: &Learner<CudaBackend>) -> u64 {
    states(learner).iter().map(|(_, bytes)| bytes.len() as u64).sum()
}

fn device() -> SimDriver {
    SimDriver::new(SimOptions { seed: 4, ..SimOptions::default() })
}

#[test]
fn a_start_uploads_the_weights_once_and_little_else() {
    let [plain, verified] = [ONE_BY_ONE, AHEAD].map(|how| {
        let sim = device();
        let learner = learner(&sim, how);
        let bytes = sim.stats().upload_bytes;
        assert!(state_bytes(&learner) > 8 << 20, "too few to be visible: {}", state_bytes(&learner));
        // States that were never written are zeros, also after verification.
        let table = learner.table();
        let moments = table.params.iter().flat_map(|p| [p.m, p.v]).chain([table.count]);
        let mut held = moments.flat_map(|id| learner.state(id).unwrap());
        assert!(held.all(|b| b == 0));
        bytes
    });
    assert!(verified - plain < FEW, "verification uploaded {} bytes", verified - plain);
}

/// Steps of which the second fails; its graph is recorded and verified again some steps later, while states are live.
fn a_graph_made_again(more_faults: &str) -> (SimDriver, Learner<CudaBackend>, u64) {
    let sim = device();
    let mut learner = learner(&sim, How { mode: GraphMode::Auto, ..AHEAD });
    let rows = OwnRows::new(1, 1, 30);
    let mut step = |n: u32| learner.step(&[rows.rows()], &ADAM, [0, 0, n, 0]).unwrap().ran[0].clone();
    assert_eq!(step(0), Ran::REPLAYED);
    let faults = format!("on 1st replay: fail LAUNCH_OUT_OF_RESOURCES; {more_faults}");
    sim.inject(FaultScript::parse(&faults).unwrap());
    let before = sim.stats().upload_bytes;
    let ran: Vec<Ran> = (1..8).map(step).collect();
    assert!(matches!(ran[0], Ran::Eager(_)) && ran[6] == Ran::REPLAYED, "{ran:?}");
    assert_eq!(sim.unused_faults(), Vec::<String>::new());
    let sent = sim.stats().upload_bytes - before;
    (sim, learner, sent)
}

#[test]
fn live_states_are_kept_on_the_device_while_a_graph_is_verified() {
    let mut want = learner(&device(), ONE_BY_ONE);
    let rows = OwnRows::new(1, 1, 30);
    (0..8).for_each(|n| drop(want.step(&[rows.rows()], &ADAM, [0, 0, n, 0]).unwrap()));
    let want = states(&want);
    let (sim, learner, sent) = a_graph_made_again("");
    assert!(sent < FEW, "{sent} bytes");
    assert_same(&states(&learner), &want, "with space on the device");
    drop((learner, sim));
    // If the device has no space for the copy, the host holds it.
    let (_sim, learner, sent) = a_graph_made_again("on 1st alloc: out of memory");
    assert!(sent > 10 << 20, "{sent} bytes");
    assert_same(&states(&learner), &want, "without space on the device");
}
