//! The device thread, and ownership of a device.

mod common;

use std::time::{Duration, Instant};

use common::{Bed, faults};
use refrain_driver::sim::{SimDriver, SimOptions};
use refrain_driver::{Device, DriverError, Method, RecordOptions};

const LONG: Duration = Duration::from_secs(10);

fn device() -> (SimDriver, Device) {
    let sim = SimDriver::new(SimOptions::default());
    let device = Device::simulated(&sim).unwrap();
    (sim, device)
}

#[test]
fn one_thread_owns_a_device_at_a_time() {
    let (_sim, device) = device();
    let worker = device.spawn(LONG, Bed::with_context).unwrap();
    assert!(matches!(device.context(), Err(DriverError::DeviceOwned)));
    assert!(matches!(device.spawn(LONG, |_| Ok(())), Err(DriverError::DeviceOwned)));
    drop(worker);
    drop(device.context().unwrap());
    device.spawn(LONG, |_| Ok(())).unwrap();
}

#[test]
fn a_device_is_free_again_only_when_its_last_stream_is_gone() {
    let (_sim, device) = device();
    let ctx = device.context().unwrap();
    let stream = ctx.stream().unwrap();
    drop(ctx);
    assert!(matches!(device.context(), Err(DriverError::DeviceOwned)));
    drop(stream);
    assert!(device.context().is_ok());
}

#[test]
fn claiming_a_device_that_is_being_recorded_on_is_refused_as_such() {
    let mut bed = Bed::sim();
    let (step, device) = (bed.step.clone(), bed.device.clone());
    bed.stream
        .record(&bed.memory, Method::Stream, &RecordOptions::named("claim"), |q| {
            let other = std::thread::scope(|s| s.spawn(|| device.context().map(|_| ())).join().unwrap());
            assert!(matches!(other, Err(DriverError::CaptureIncompatible { .. })), "{other:?}");
            step.enqueue(q)
        })
        .unwrap();
}

#[test]
fn a_panic_on_the_device_thread_is_an_error_and_the_thread_continues() {
    let (_sim, device) = device();
    let worker = device.spawn(LONG, Bed::with_context).unwrap();
    let result: Result<(), _> = worker.call("a mistake", LONG, |_| panic!("of the caller"));
    match result {
        Err(DriverError::Panicked { what, message }) => {
            assert_eq!((what.as_str(), message.as_str()), ("a mistake", "of the caller"));
        }
        other => panic!("{other:?}"),
    }
    worker
        .call("check", LONG, |bed| {
            bed.check_good();
            Ok(())
        })
        .unwrap();
    drop(worker);
    let failed = device.spawn(LONG, |_| -> Result<(), _> { panic!("in the beginning") });
    assert!(matches!(failed, Err(DriverError::Panicked { .. })), "{failed:?}");
    assert!(device.context().is_ok(), "the device is free again");
}

#[test]
fn graphs_and_memory_dropped_on_another_thread_are_freed_by_the_owner() {
    let (sim, device) = device();
    let worker = device.spawn(LONG, Bed::with_context).unwrap();
    let live = sim.stats().live;
    let graph = worker.call("record", LONG, |bed| bed.record(Method::Nodes)).unwrap();
    assert_eq!(sim.stats().live.execs, 1);
    drop(graph);
    assert_eq!((device.n_deferred(), sim.stats().live.execs), (1, 1));
    worker.call("record again", LONG, |bed| bed.record(Method::Nodes).map(drop)).unwrap();
    assert_eq!((device.n_deferred(), sim.stats().live), (0, live));
    drop(worker);
    drop(device);
    assert_eq!(sim.stats().live, Default::default());
}

#[test]
fn dropping_a_worker_that_hangs_does_not_hang() {
    let (sim, device) = device();
    let worker = device.spawn(LONG, Bed::with_context).unwrap();
    sim.inject(faults("on 1st launch: hang"));
    let stuck =
        worker.call("recording", Duration::from_millis(50), |bed| bed.record(Method::Stream).map(drop));
    assert!(matches!(stuck, Err(DriverError::NoAnswer { .. })));
    let start = Instant::now();
    drop(worker);
    assert!(start.elapsed() < Duration::from_secs(2));
    sim.release_hung();
}

#[test]
fn a_hanging_driver_call_is_reported_by_the_limit_per_call() {
    let (sim, device) = device();
    let mut worker = device.spawn(LONG, Bed::with_context).unwrap();
    worker.set_call_limit(Duration::from_millis(50));
    sim.inject(faults("on 1st instantiate: hang"));
    let start = Instant::now();
    let long = Duration::from_secs(600);
    let error = worker.call("preparing", long, |bed| bed.record(Method::Nodes).map(drop)).unwrap_err();
    assert!(start.elapsed() < Duration::from_secs(5));
    assert!(error.to_string().contains("\"preparing, in cuGraphInstantiate\""), "{error}");
    assert!(matches!(worker.call("next", long, |_| Ok(())), Err(DriverError::NoAnswer { .. })));
    sim.release_hung();
}

#[test]
fn slow_work_outside_driver_calls_does_not_count_as_hanging() {
    let (_sim, device) = device();
    let mut worker = device.spawn(LONG, Bed::with_context).unwrap();
    worker.set_call_limit(Duration::from_millis(300));
    let slow = worker.call("thinking", LONG, |bed| {
        std::thread::sleep(Duration::from_millis(700));
        bed.check_good();
        Ok(7)
    });
    assert_eq!(slow.unwrap(), 7);
}

#[test]
fn a_missing_reply_names_the_current_job_and_the_last_launch() {
    let (sim, device) = device();
    let worker = device.spawn(LONG, Bed::with_context).unwrap();
    let run = |bed: &mut Bed| {
        let step = bed.step.clone();
        bed.stream.run(&mut bed.lease, true, |q| step.enqueue(q)).map(|_| ())
    };
    worker.call("warm", LONG, run).unwrap();
    sim.inject(faults("on 2nd launch: hang"));
    let error = worker.call("decode", Duration::from_millis(50), run).unwrap_err().to_string();
    assert!(error.contains("\"decode\"") && error.contains("refrain_probe_fill"), "{error}");
    sim.release_hung();
}

#[test]
fn posted_work_runs_in_order_and_a_panic_in_it_ends_nothing_else() {
    let (_sim, device) = device();
    let worker = device.spawn(LONG, |_| Ok(Vec::new())).unwrap();
    for i in 0..5 {
        worker.post("counting", LONG, move |seen: &mut Vec<i32>| seen.push(i)).unwrap();
    }
    worker.post("a mistake", LONG, |_| panic!("of the poster")).unwrap();
    worker.post("counting", LONG, |seen| seen.push(5)).unwrap();
    assert_eq!(worker.call("asking", LONG, |seen| Ok(seen.clone())).unwrap(), [0, 1, 2, 3, 4, 5]);
}

#[test]
fn posted_work_that_hangs_is_overdue_and_no_more_work_is_accepted() {
    let (sim, device) = device();
    let worker = device.spawn(LONG, Bed::with_context).unwrap();
    sim.inject(faults("on 1st launch: hang"));
    worker.post("recording", LONG, |bed| drop(bed.record(Method::Stream))).unwrap();
    while sim.stats().n_hung == 0 {
        std::thread::yield_now();
    }
    let error = worker.overdue("a step", Duration::from_millis(50)).to_string();
    assert!(error.contains("a step") && error.contains("\"recording, in cuLaunchKernelEx\""), "{error}");
    assert!(matches!(worker.post("more", LONG, |_| ()), Err(DriverError::NoAnswer { .. })));
    sim.release_hung();
}

#[test]
fn handles_share_one_thread_and_each_time_limit_starts_with_its_own_job() {
    let (_sim, device) = device();
    let first = device.spawn(LONG, |_| Ok(Vec::new())).unwrap();
    let second = first.share();
    let short = Duration::from_millis(40);
    first
        .post("loading", LONG, |seen: &mut Vec<i32>| {
            std::thread::sleep(Duration::from_millis(250));
            seen.push(1);
        })
        .unwrap();
    // Queued for far longer than its own limit.
    let seen = second.call("a step", short, |seen| {
        seen.push(2);
        Ok(seen.clone())
    });
    assert_eq!(seen.unwrap(), [1, 2]);
    let weak = first.downgrade();
    drop(first);
    assert_eq!(second.call("another step", short, |seen| Ok(seen.len())).unwrap(), 2);
    assert!(matches!(device.context(), Err(DriverError::DeviceOwned)));
    drop((second, weak.upgrade().unwrap()));
    assert!(weak.upgrade().is_none());
    device.context().unwrap();
}

#[test]
fn a_job_queued_after_an_overdue_one_fails_by_the_limit_of_the_overdue_job() {
    let (sim, device) = device();
    let first = device.spawn(LONG, Bed::with_context).unwrap();
    let second = first.share();
    sim.inject(faults("on 1st launch: hang"));
    first.post("recording", Duration::from_millis(60), |bed| drop(bed.record(Method::Stream))).unwrap();
    let start = Instant::now();
    while !second.is_serving_another() {
        std::thread::yield_now();
    }
    assert!(!first.is_serving_another(), "its own work");
    let error = second.call("a step", LONG, |_| Ok(())).unwrap_err();
    assert!(matches!(error, DriverError::NoAnswer { .. }), "{error}");
    assert!(start.elapsed() < Duration::from_secs(4), "{:?}", start.elapsed());
    assert!(!second.is_serving_another(), "that work is overdue");
    sim.release_hung();
}
