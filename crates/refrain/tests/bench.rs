//! The measurement itself, on the built-in model: what is counted, not how fast it is.

use refrain::{BenchOptions, BenchTarget, Device, Error, Model, Samples, Session, SessionOptions, bench};

#[test]
fn a_bench_takes_the_requested_number_of_samples_and_counts_the_bytes_per_token() {
    let model = Model::builtin().unwrap();
    let device = Device::Cpu { threads: Some(2) };
    let session = SessionOptions { device, ..SessionOptions::default() };
    let (depths, seqs) = (vec![32, 5], vec![1, 3]);
    let options = BenchOptions {
        session: session.clone(),
        n_prompt: 16,
        n_decode: 8,
        depths,
        seqs,
        repeats: 2,
        adapters: 0,
    };
    let mut phases = Vec::new();
    let report = bench(&BenchTarget::Model(&model), &options, |phase| phases.push(phase.to_owned())).unwrap();
    assert_eq!(phases[..2], ["measuring the read bandwidth", "loading the model"]);
    assert_eq!((report.prefill.0.len(), report.decode.len()), (2, 2));
    for decode in &report.decode {
        assert_eq!(decode.speed.0.len(), 2);
        assert!(report.prefill.median() > 0.0 && decode.speed.median() > 0.0);
        let (low, high) = decode.speed.range();
        assert!(low <= decode.speed.median() && decode.speed.median() <= high);
        assert!((decode.ms() * decode.speed.median() - 1e3).abs() < 1e-6);
        assert!(report.bandwidth_share(decode).is_some_and(|share| share > 0.0));
    }
    let batches: Vec<_> = report.batches.iter().map(|b| (b.n_seqs, b.speed.0.len())).collect();
    assert_eq!(batches, [(1, 2), (3, 2)]);
    assert!(report.batches.iter().all(|b| b.speed.median() > 0.0));
    if cfg!(target_os = "linux") {
        assert!(report.resident.is_some_and(|r| r.now > 1 << 20 && r.most >= r.now));
    }
    assert_eq!((report.backend, report.n_parameters), ("cpu", model.n_parameters()));
    let steps = &report.decode_steps;
    assert_eq!(steps.replayed + steps.eager, 48, "three rounds of eight at two depths");
    assert!(report.read_bandwidth.is_some_and(|bytes| bytes > 1e8));
    assert!(report.launches.is_none() && report.device.is_none());

    let traffic = Session::new(&model, &session).unwrap().plan(1).unwrap().traffic();
    let read: Vec<_> = report.decode.iter().map(|d| (d.depth, d.bytes_per_token)).collect();
    let at = |middle| traffic.weight_bytes + traffic.kv_bytes(middle);
    assert_eq!(read, [(32, at(36)), (5, at(9))]);
}

#[test]
fn the_median_of_an_even_number_of_samples_is_the_mean_of_the_middle_two() {
    assert_eq!(Samples(vec![4.0, 1.0]).median(), 2.5);
    assert_eq!(Samples(vec![4.0, 1.0, 3.0]).median(), 3.0);
    assert_eq!(Samples(vec![8.0, 1.0, 3.0, 4.0]).median(), 3.5);
    assert!(Samples(Vec::new()).median().is_nan());
}

#[test]
fn a_measurement_that_does_not_fit_the_context_is_refused_with_the_size_it_needs() {
    let model = Model::builtin().unwrap();
    let of = |n_prompt, context| {
        let device = Device::Cpu { threads: Some(1) };
        let session = SessionOptions { device, context, ..SessionOptions::default() };
        let (depths, seqs) = (vec![1], vec![]);
        let options = BenchOptions { session, n_prompt, n_decode: 1, depths, seqs, repeats: 1, adapters: 0 };
        bench(&BenchTarget::Model(&model), &options, |_| {}).unwrap_err()
    };
    let beyond = of(600, None);
    assert!(matches!(beyond, Error::BenchContext { needed: 600, limit: 512, most: 512 }));
    assert!(!beyond.hint().unwrap().contains("context of"), "no context is large enough");
    let short = of(300, Some(64));
    assert!(matches!(short, Error::BenchContext { needed: 300, limit: 64, most: 512 }));
    assert!(short.hint().unwrap().contains("a context of 300 tokens"));
}

#[test]
fn the_bandwidth_is_measured_before_the_model_is_loaded() {
    let model = Model::builtin().unwrap();
    let session = SessionOptions { device: Device::Cpu { threads: Some(1) }, ..SessionOptions::default() };
    let (depths, seqs) = (vec![], vec![]);
    let options = BenchOptions { session, n_prompt: 4, n_decode: 0, depths, seqs, repeats: 1, adapters: 0 };
    let mut phases = Vec::new();
    let report = bench(&BenchTarget::Model(&model), &options, |phase| phases.push(phase.to_owned())).unwrap();
    let at = |wanted: &str| phases.iter().position(|phase| phase.contains(wanted)).unwrap();
    assert!(at("read bandwidth") < at("loading the model"), "{phases:?}");
    assert!(report.read_bandwidth.unwrap() > 0.0);
}

#[test]
fn sequences_that_do_not_fill_whole_blocks_fit_next_to_the_one_that_is_measured_alone() {
    let model = Model::builtin().unwrap();
    let session = SessionOptions { device: Device::Cpu { threads: Some(1) }, ..SessionOptions::default() };
    let (depths, seqs) = (vec![1], vec![1]);
    let options = BenchOptions { session, n_prompt: 0, n_decode: 20, depths, seqs, repeats: 1, adapters: 0 };
    let report = bench(&BenchTarget::Model(&model), &options, |_| {}).unwrap();
    assert_eq!(report.batches[0].speed.0.len(), 1);
}
