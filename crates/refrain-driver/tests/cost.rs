//! Host overhead of a replay, on top of the driver call.

mod common;

use std::time::{Duration, Instant};

use common::Bed;
use refrain_driver::Method;
use refrain_driver::api::StreamKind;
use refrain_driver::sim::{SimDriver, SimOptions, SimSchedule};

const PER_BATCH: u32 = 100;
const BATCHES: usize = 60;

/// Returns the fastest of many batches, which is the cost without disturbances.
fn cheapest(mut batch: impl FnMut() -> Duration) -> Duration {
    (0..BATCHES).map(|_| batch()).min().unwrap_or_default() / PER_BATCH
}

#[test]
fn a_replay_adds_less_than_two_microseconds_of_host_time() {
    let sim = SimDriver::new(SimOptions { schedule: SimSchedule::Lazy, ..SimOptions::default() });
    let mut bed = Bed::on(&sim);
    let graph = bed.record(Method::Nodes).unwrap();
    let ours = cheapest(|| {
        let start = Instant::now();
        for _ in 0..PER_BATCH {
            graph.replay(&mut bed.lease, &mut bed.stream).unwrap();
        }
        let took = start.elapsed();
        bed.stream.synchronize().unwrap();
        took
    });
    // The driver call alone, for a graph with as many nodes.
    // SAFETY: only handles that it returned are passed to it.
    let api = unsafe { sim.api() };
    let raw = api.graph_create().unwrap();
    for _ in 0..graph.info().nodes.len() {
        api.graph_add_empty(raw, &[]).unwrap();
    }
    let exec = api.graph_instantiate(raw).unwrap();
    let stream = api.stream_create(StreamKind::NonBlocking).unwrap();
    let driver = cheapest(|| {
        let start = Instant::now();
        for _ in 0..PER_BATCH {
            api.exec_launch(exec, stream).unwrap();
        }
        let took = start.elapsed();
        api.stream_synchronize(stream).unwrap();
        took
    });
    let own = ours.saturating_sub(driver);
    println!("replay {ours:?}, the driver call alone {driver:?}, own {own:?}");
    assert!(own < Duration::from_micros(2), "replay {ours:?}, the driver call alone {driver:?}");
}
