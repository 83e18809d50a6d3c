//! The measurement itself, on the built-in model: what is counted, not how fast it is.

use refrain::{BenchOptions, BenchTarget, Device, Model, Session, SessionOptions, bench};

#[test]
fn a_bench_measures_as_often_as_asked_and_counts_the_bytes_that_a_token_reads() {
    let model = Model::builtin().unwrap();
    let device = Device::Cpu { threads: Some(2) };
    let session = SessionOptions { device, ..SessionOptions::default() };
    let options = BenchOptions { session: session.clone(), n_prompt: 16, n_decode: 8, depth: 32, repeats: 2 };
    let report = bench(&BenchTarget::Model(&model), &options, |_| {}).unwrap();
    assert_eq!((report.prefill.0.len(), report.decode.0.len()), (2, 2));
    assert!(report.prefill.median() > 0.0 && report.decode.median() > 0.0);
    let (low, high) = report.decode.range();
    assert!(low <= report.decode.median() && report.decode.median() <= high);
    assert_eq!((report.backend, report.n_parameters), ("cpu", model.n_parameters()));
    let steps = &report.decode_steps;
    assert_eq!(steps.replayed + steps.eager, 24, "three rounds of eight");
    assert!(report.read_bandwidth.is_some_and(|bytes| bytes > 1e8));

    let traffic = Session::new(&model, &session).unwrap().plan(1).unwrap().traffic();
    assert_eq!(report.bytes_per_token, traffic.weight_bytes + traffic.kv_bytes(36));
}
