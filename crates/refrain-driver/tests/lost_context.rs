//! A real fault on the device. In a separate test binary, because on a GPU nothing works in the process afterwards.

mod common;

use std::time::Duration;

use common::Bed;
use refrain_driver::{Baked, Code, Health, LaunchBuilder, Method, RecordOptions};

fn lose(mut bed: Bed) {
    let good = bed.record(Method::Stream).unwrap();
    bed.check_replay(&good, 1).unwrap();
    // An address outside every allocation.
    let poke = LaunchBuilder::new(&bed.function("poke"), 1, 1).step("layer 3").baked(Baked(64_u64));
    // SAFETY: this violates the contract on purpose. Nothing is mapped at that address, so the device faults before
    // it writes anything.
    let poke = unsafe { poke.baked(Baked(1_u32)).build() };
    let options = RecordOptions::named("faulty");
    let bad = bed.stream.record(&bed.memory, Method::Nodes, &options, |q| q.launch(&poke)).unwrap();
    let sent = bad.replay(&mut bed.lease, &mut bed.stream).map(|_| ());
    let error = sent.and_then(|()| bed.stream.synchronize()).unwrap_err();
    assert!(error.is_final(), "{error}");
    assert_eq!(error.code(), Some(Code::ILLEGAL_ADDRESS));
    let text = error.to_string();
    assert!(text.contains("replay 1 of graph \"faulty\"") && text.contains("refrain_probe_poke"), "{text}");
    for _ in 0..2 {
        assert_eq!(bed.record(Method::Stream).unwrap_err().to_string(), text);
        assert_eq!(bed.check_replay(&good, 1).unwrap_err().to_string(), text);
    }
    assert!(matches!(bed.device.health(Duration::from_secs(1)), Ok(Health::ContextLost(_))));
}

#[test]
fn a_fault_in_a_replay_is_final_and_names_the_graph_on_the_simulated_device() {
    lose(Bed::sim());
}

#[test]
#[cfg_attr(not(feature = "gpu-tests"), ignore = "needs a CUDA device: cargo xtask gpu-bundle")]
fn a_fault_in_a_replay_is_final_and_names_the_graph_on_a_gpu() {
    lose(Bed::gpu());
}
