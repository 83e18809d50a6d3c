//! Each fault at each point in the life of a step: nothing hangs, nothing leaks, no panic crosses the API, and the
//! next recording without a fault succeeds.

mod common;

use std::time::{Duration, Instant};

use common::{Bed, faults};
use refrain_driver::api::Census;
use refrain_driver::sim::{DriverCall, SimDriver, SimOptions};
use refrain_driver::{Code, Device, DriverError, Health, Method};

/// Runs everything from opening the device to a replay.
fn life(sim: &SimDriver, method: Method) -> Result<Health, DriverError> {
    let device = Device::simulated(sim)?;
    let mut bed = Bed::try_new(device)?;
    bed.set_input(3)?;
    let before = bed.read(bed.step.b)?;
    let graph = match bed.record(method) {
        Ok(graph) => graph,
        Err(error) if error.is_final() => return Err(error),
        Err(error) => {
            assert_eq!(bed.read(bed.step.b)?, before, "a failed recording changed memory");
            return Err(error);
        }
    };
    for input in [1, 2, 3] {
        bed.set_input(input)?;
        let out = graph.replay(&mut bed.lease, &mut bed.stream)?;
        out.values::<u32>(&mut bed.stream, bed.step.c)?;
    }
    bed.stream.health(Duration::from_secs(1))
}

fn is_teardown(call: DriverCall) -> bool {
    matches!(
        call,
        DriverCall::Free
            | DriverCall::FreeHost
            | DriverCall::ModuleUnload
            | DriverCall::ExecDestroy
            | DriverCall::EventDestroy
            | DriverCall::StreamDestroy
            | DriverCall::GraphDestroy
            | DriverCall::PrimaryCtxRelease
            | DriverCall::CtxSetCurrent
    )
}

fn fresh() -> SimDriver {
    SimDriver::new(SimOptions { seed: 3, ..SimOptions::default() })
}

/// Number of calls of each kind in a run without faults.
fn calls_of(method: Method) -> Vec<(DriverCall, u64)> {
    let sim = fresh();
    life(&sim, method).unwrap();
    assert_eq!(sim.stats().live, Census::default(), "a run without faults leaves nothing behind");
    sim.stats().calls
}

/// Polling makes the number of queries depend on the seed; a few are enough.
fn n_points(count: u64) -> u64 {
    count.min(6)
}

#[test]
fn a_call_that_fails_at_any_point_leaks_nothing_and_the_next_run_succeeds() {
    for method in [Method::Stream, Method::Nodes] {
        for (call, count) in calls_of(method) {
            for nth in 1..=n_points(count) {
                for code in [1, 2, 801, 900, 999] {
                    let sim = fresh();
                    sim.inject(faults(&format!("on {nth}th {}: fail {code}", call.name())));
                    let start = Instant::now();
                    let result = life(&sim, method);
                    let what = format!("{method}, {call:?} number {nth} fails with {code}: {result:?}");
                    assert!(start.elapsed() < Duration::from_secs(10), "{what}");
                    // A failed health check loses the context, and nothing is sent to it any more.
                    let lost = matches!(result, Ok(Health::ContextLost(_)));
                    if !is_teardown(call) && !lost {
                        assert_eq!(sim.stats().live, Census::default(), "{what}");
                    }
                    let next = life(&sim, method);
                    assert!(matches!(next, Ok(Health::Healthy)), "{what}; afterwards {next:?}");
                }
            }
        }
    }
}

#[test]
fn a_sticky_fault_at_any_point_is_final_for_the_device_and_nothing_is_sent_any_more() {
    for method in [Method::Stream, Method::Nodes] {
        for call in [
            DriverCall::Launch,
            DriverCall::ExecLaunch,
            DriverCall::MemcpyHtodAsync,
            DriverCall::Alloc,
            DriverCall::GraphInstantiate,
        ] {
            for nth in 1..=4 {
                let sim = fresh();
                let device = Device::simulated(&sim).unwrap();
                let mut bed = Bed::try_new(device.clone()).unwrap();
                sim.inject(faults(&format!("on {nth}th {}: sticky 700", call.name())));
                let mut run = || -> Result<(), DriverError> {
                    for input in 1..20 {
                        let graph = bed.record(method)?;
                        bed.set_input(input)?;
                        let out = graph.replay(&mut bed.lease, &mut bed.stream)?;
                        out.values::<u32>(&mut bed.stream, bed.step.c)?;
                    }
                    Ok(())
                };
                let Err(error) = run() else { continue };
                assert!(error.is_final(), "{call:?} {nth}: {error}");
                assert_eq!(error.code(), Some(Code::ILLEGAL_ADDRESS));
                let sent = sim.stats().n_calls_total();
                for _ in 0..3 {
                    let again = bed.record(method).unwrap_err();
                    assert_eq!(again.to_string(), error.to_string(), "the first report is kept");
                    assert!(bed.stream.synchronize().unwrap_err().is_final());
                    assert!(bed.ctx.stream().unwrap_err().is_final());
                    assert!(matches!(device.health(Duration::from_secs(1)), Ok(Health::ContextLost(_))));
                }
                drop(bed);
                assert_eq!(sim.stats().n_calls_total(), sent, "nothing is sent to a lost context");
                assert!(Device::simulated(&sim).is_err(), "a new context in the process fails too");
            }
        }
    }
}

#[test]
fn a_lost_context_names_the_graph_and_the_replay_that_were_sent_last() {
    let sim = fresh();
    let mut bed = Bed::on(&sim);
    let graph = bed.record(Method::Stream).unwrap();
    sim.inject(faults("on 3rd replay: illegal address"));
    let mut lost = None;
    for input in 1..=5 {
        if let Err(error) = bed.check_replay(&graph, input) {
            lost = Some(error);
            break;
        }
    }
    let text = lost.unwrap().to_string();
    assert!(text.contains("replay 3 of graph \"step\"") && text.contains("refrain_probe_add"), "{text}");
    assert!(text.contains("ILLEGAL_ADDRESS (700)"), "{text}");
}

#[test]
fn a_stream_stuck_in_capture_mode_is_lost_and_others_work() {
    let sim = fresh();
    let mut bed = Bed::on(&sim);
    // The end-capture fails, and so does the query of the capture status.
    sim.inject(faults("on 1st end_capture: fail 999; on 1st stream_is_capturing: fail 999"));
    sim.inject(faults("on 2nd stream_is_capturing: fail 999"));
    assert_eq!(bed.record(Method::Stream).unwrap_err().code(), Some(Code::UNKNOWN));
    let lost = bed.record(Method::Stream);
    assert!(matches!(lost, Err(DriverError::StreamLost { .. })), "{lost:?}");
    assert!(matches!(bed.stream.health(Duration::from_secs(1)), Ok(Health::StreamLost { .. })));
    bed.stream = bed.ctx.stream().unwrap();
    bed.check_good();
}

#[test]
fn an_invalidated_capture_reports_the_cause_and_not_its_consequences() {
    let sim = fresh();
    let mut bed = Bed::on(&sim);
    sim.inject(faults("on 2nd launch: invalidate"));
    let error = bed.record(Method::Stream).unwrap_err();
    assert_eq!(error.code(), Some(Code::STREAM_CAPTURE_INVALIDATED), "{error}");
    sim.inject(faults("on 2nd launch: fail 701"));
    let error = bed.record(Method::Stream).unwrap_err();
    assert_eq!(error.code(), Some(Code::LAUNCH_OUT_OF_RESOURCES), "{error}");
    bed.check_good();
}

#[test]
fn instantiation_out_of_memory_costs_one_recording() {
    for method in [Method::Stream, Method::Nodes] {
        let sim = fresh();
        let mut bed = Bed::on(&sim);
        let live = sim.stats().live;
        sim.inject(faults("on 1st instantiate: out of memory"));
        assert_eq!(bed.record(method).unwrap_err().code(), Some(Code::OUT_OF_MEMORY));
        assert_eq!(sim.stats().live, live);
        bed.check_good();
    }
}

#[test]
fn a_replay_that_fails_can_be_sent_again() {
    let sim = fresh();
    let mut bed = Bed::on(&sim);
    let graph = bed.record(Method::Nodes).unwrap();
    sim.inject(faults("on 2nd replay: fail LAUNCH_OUT_OF_RESOURCES"));
    bed.check_replay(&graph, 1).unwrap();
    assert_eq!(bed.check_replay(&graph, 2).unwrap_err().code(), Some(Code::LAUNCH_OUT_OF_RESOURCES));
    bed.check_replay(&graph, 3).unwrap();
    assert_eq!(bed.stream.health(Duration::from_secs(1)).unwrap(), Health::Healthy);
}

#[test]
fn memory_that_does_not_fit_says_how_much_is_free_and_leaves_nothing() {
    let sim = SimDriver::new(SimOptions { memory_bytes: 1 << 20, ..SimOptions::default() });
    let bed = Bed::on(&sim);
    let live = sim.stats().live;
    let mut layout = refrain_driver::MemoryLayout::new("large");
    layout.device("fits", 1 << 16);
    layout.device("does not", 1 << 30);
    match refrain_driver::Memory::plan(&bed.ctx, &layout) {
        Err(DriverError::OutOfMemory { need_bytes, free_bytes, total_bytes, what }) => {
            assert_eq!((need_bytes, total_bytes), (1 << 30, 1 << 20));
            assert!(free_bytes < total_bytes && what.contains("does not"), "{free_bytes} {what}");
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(sim.stats().live, live);
}

#[test]
fn a_health_check_of_a_hanging_driver_gives_up_on_the_context_in_time() {
    let sim = fresh();
    let bed = Bed::on(&sim);
    sim.inject(faults("on 1st launch: hang"));
    let start = Instant::now();
    let health = bed.device.health(Duration::from_millis(100)).unwrap();
    assert!(matches!(health, Health::ContextLost(ref lost) if lost.code.is_none()), "{health:?}");
    assert!(start.elapsed() < Duration::from_secs(3));
    assert!(bed.ctx.mem_info().unwrap_err().is_final());
    sim.release_hung();
}

#[test]
fn a_slow_driver_call_anywhere_only_costs_time() {
    for (call, count) in calls_of(Method::Stream) {
        let nth = n_points(count);
        let sim = fresh();
        sim.inject(faults(&format!("on {nth}th {}: hang 5 ms", call.name())));
        life(&sim, Method::Stream).unwrap_or_else(|e| panic!("{call:?}: {e}"));
        assert_eq!(sim.stats().live, Census::default());
    }
}
