//! Caching of compiled steps, with a backend that counts.

mod common;

use common::tiny_model;
use refrain_engine::{
    BackendRunner, Chosen, EngineError, RunMember, RunShape, Runner, RunnerOptions, SamplingParams,
    SamplingRow,
};
use refrain_engine::{StepOut, StepRequest, Want};
use refrain_graph::{
    Backend, CompileError, Graph, Io, Plan, PlanOptions, Query, Ran, Reason, RunError, State,
};
use refrain_graph::{Support, Weight};
use refrain_tensor::{DType, HostTensor};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

struct Counting {
    n_compiled: Arc<AtomicUsize>,
    supports: bool,
    row_buckets: Vec<usize>,
}

impl Backend for Counting {
    type Weights = ();
    type States = ();
    type Compiled = Plan;

    fn name(&self) -> &'static str {
        "counting"
    }

    fn row_buckets(&self) -> &[usize] {
        &self.row_buckets
    }

    fn supports(&self, _: &Query<'_>) -> Support {
        if self.supports { Support::Yes } else { Support::No("of a test".into()) }
    }

    fn load(&self, _: &[Weight], _: Vec<HostTensor>) -> Result<(), RunError> {
        Ok(())
    }

    fn allocate(&self, _: &[State]) -> Result<(), RunError> {
        Ok(())
    }

    fn compile(&self, graph: &Graph) -> Result<Plan, CompileError> {
        self.check(graph)?;
        self.n_compiled.fetch_add(1, Ordering::Relaxed);
        Ok(Plan::new(graph, PlanOptions::default())?)
    }

    fn plan<'c>(&self, compiled: &'c Plan) -> &'c Plan {
        compiled
    }

    fn run(&mut self, _: &mut Plan, _: Io<'_, Self>) -> Result<Ran, RunError> {
        Ok(Ran::Eager(Reason::NoGraphsHere { backend: "counting" }))
    }

    /// Fills every element with the index of the output.
    fn read(&mut self, compiled: &Plan, output: usize, into: &mut [u8]) -> Result<(), RunError> {
        let is_float = compiled.outputs()[output].dtype == DType::F32;
        let word = if is_float { (output as f32).to_le_bytes() } else { (output as i32).to_le_bytes() };
        into.chunks_exact_mut(4).for_each(|place| place.copy_from_slice(&word));
        Ok(())
    }
}

fn runner(supports: bool) -> (BackendRunner<Counting>, Arc<AtomicUsize>) {
    let n_compiled = Arc::new(AtomicUsize::new(0));
    let backend = Counting { n_compiled: n_compiled.clone(), supports, row_buckets: Vec::new() };
    let options = RunnerOptions { context: 32, ..RunnerOptions::default() };
    (BackendRunner::new(backend, tiny_model(), options).unwrap(), n_compiled)
}

#[test]
fn the_least_recently_used_size_is_compiled_again() {
    let (mut runner, n_compiled) = runner(true);
    let mut compiled_after = |sizes: &[usize]| {
        sizes.iter().for_each(|&n| drop(runner.plan(n).unwrap().clone()));
        n_compiled.load(Ordering::Relaxed)
    };
    let all: Vec<usize> = (1..=96).collect();
    assert_eq!(compiled_after(&all), 96);
    assert_eq!(compiled_after(&[1, 96, 5, 1]), 96, "all sizes are kept");
    assert_eq!(compiled_after(&[97]), 97);
    assert_eq!(compiled_after(&[1, 3, 4, 5, 95, 96, 97]), 97, "only size 2 was evicted");
    assert_eq!(compiled_after(&[2]), 98);
    assert_eq!(compiled_after(&[7, 3, 1]), 98, "size 2 replaced size 6");
    assert_eq!(compiled_after(&[6]), 99);
}

#[test]
fn another_head_with_the_same_number_of_tokens_is_another_step() {
    let (mut runner, n_compiled) = runner(true);
    let row = SamplingRow::new(&SamplingParams::greedy());
    let mut out = StepOut::default();
    for want in [Want::Nothing, Want::Logits { n_rows: 1 }, Want::Logits { n_rows: 2 }, Want::Sample(&row)] {
        for _ in 0..2 {
            let request =
                StepRequest { tokens: &[1, 2], start: 0, table: &[0], slots: [-1; 2], adapter: None, want };
            runner.step(&[request], &mut out).unwrap();
        }
    }
    assert_eq!(n_compiled.load(Ordering::Relaxed), 4);
    let plan = runner.plan(2).unwrap();
    let [token, logprob] = ["token", "logprob"].map(|name| plan.output(name).unwrap());
    let chosen = out.choices.remove(0).unwrap().unwrap().chosen;
    let want = Chosen { token: token as u32, logprob: logprob as f32 };
    assert_eq!(chosen, want, "each output is read by its name");
}

#[test]
fn a_step_without_a_kernel_is_refused_with_a_hint() {
    let (mut runner, _) = runner(false);
    let error = runner.plan(1).unwrap_err();
    let EngineError::Compile(cause) = &error else { panic!("{error}") };
    assert!(cause.to_string().starts_with("counting has no kernel for "), "{cause}");
    assert!(error.hint().is_some_and(|hint| hint.contains("another device")));
}

#[test]
fn wider_tables_are_recompiled_and_a_cache_that_cannot_grow_stays_unchanged() {
    let (mut runner, n_compiled) = runner(true);
    let kv = *runner.kv();
    let width = |runner: &mut BackendRunner<Counting>| {
        let layout = runner.plan(1).unwrap().control();
        layout.slot(layout.find("tables").unwrap()).ty.shape.n_elements()
    };
    assert_eq!(width(&mut runner), kv.max_blocks);
    let error = runner.resize(kv.n_blocks + 2, kv.max_blocks, 0).unwrap_err();
    assert_eq!(error.to_string(), "the KV cache of counting has 1 blocks and cannot grow to 3");
    assert_eq!((width(&mut runner), n_compiled.load(Ordering::Relaxed)), (kv.max_blocks, 1));
    runner.resize(kv.n_blocks, kv.max_blocks + 3, 0).unwrap();
    assert_eq!((width(&mut runner), n_compiled.load(Ordering::Relaxed)), (kv.max_blocks + 3, 2));
    assert_eq!(runner.kv().max_blocks, kv.max_blocks + 3);
}

#[test]
fn runners_share_weights_that_one_of_them_has_loaded() {
    let (one, _) = runner(true);
    let backend = Counting { n_compiled: Arc::default(), supports: true, row_buckets: Vec::new() };
    let options = RunnerOptions { context: 32, ..RunnerOptions::default() };
    let two = BackendRunner::with_weights(backend, tiny_model(), one.weights().clone(), options).unwrap();
    assert!(Arc::ptr_eq(one.weights(), two.weights()));
}

#[test]
fn a_larger_compiled_run_serves_until_a_size_was_requested_for_a_while() {
    let n_compiled = Arc::new(AtomicUsize::new(0));
    let row_buckets = vec![1, 2, 4, 6, 8, 16];
    let backend = Counting { n_compiled: n_compiled.clone(), supports: true, row_buckets };
    let options = RunnerOptions { context: 32, ..RunnerOptions::default() };
    let mut runner = BackendRunner::new(backend, tiny_model(), options).unwrap();
    let row = SamplingRow::new(&SamplingParams::greedy());
    // One step of so many sequences; returns its rows and the number of compiled sizes.
    let mut step = |n_seqs: usize| {
        let shape =
            runner.run_shape(RunShape { n_rows: n_seqs, n_history: 0, is_masked: false, has_top: false });
        let request = StepRequest {
            tokens: &[1],
            start: 3,
            table: &[0],
            slots: [-1; 2],
            adapter: None,
            want: Want::Sample(&row),
        };
        let with = RunMember { request, n_positions: 32, n_choices: 9, end: &[] };
        runner.begin(&vec![with; n_seqs], shape).unwrap();
        runner.launch(1).unwrap();
        assert_eq!(runner.collect().unwrap().rows.iter().flatten().count(), n_seqs);
        runner.finish().unwrap();
        (shape.n_rows, n_compiled.load(Ordering::Relaxed))
    };
    // No larger size is compiled.
    assert_eq!([step(5), step(7), step(5)], [(6, 1), (8, 2), (6, 2)]);
    // Up to half of a run may be padding for a while, not more.
    assert_eq!([step(4), step(3)], [(6, 2), (6, 2)]);
    assert_eq!(step(2), (2, 3));
    // A size that comes and goes is not compiled; one that stays is.
    for _ in 0..3 {
        assert!((0..30).all(|_| step(4) == (6, 3)));
        assert_eq!(step(8), (8, 3));
    }
    let sizes: Vec<_> = (0..40).map(|_| step(4).0).collect();
    assert_eq!((sizes[31], sizes[32], sizes[39]), (6, 4, 4), "{sizes:?}");
    assert_eq!(step(3), (4, 4));
}
