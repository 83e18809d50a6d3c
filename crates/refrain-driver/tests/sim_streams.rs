//! Streams, events and captures of the simulated device: work runs late, and only explicit dependencies order it.

mod sim_common;

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use refrain_driver::api::{
    CaptureMode, CaptureStatus, Code, EdgeKind, FunctionAttribute, LaunchConfig, NodeKind, StreamHandle,
    StreamKind,
};
use refrain_driver::sim::{SimOptions, SimSchedule};
use sim_common::{Bench, PLAIN, PROGRAMMATIC, early_params, fill_params, options};

#[test]
fn reading_back_before_waiting_sees_old_data() {
    let b = Bench::lazy();
    let p = b.words(4);
    b.fill(b.s, p, 6, 4).expect("launch");
    // A synchronous copy does not wait for a non-blocking stream.
    assert_eq!(b.read(p, 4), [0; 4]);
    b.sim.stream_synchronize(b.s).expect("wait");
    assert_eq!(b.read(p, 4), [6; 4]);
    assert!(b.reports()[0].starts_with("race between streams"));
}

#[test]
fn a_query_returns_not_ready_and_makes_progress() {
    let b = Bench::lazy();
    let p = b.words(4);
    for i in 0..500 {
        b.fill(b.s, p, i, 4).expect("launch");
    }
    let mut n_not_ready = 0;
    while let Err(code) = b.sim.stream_query(b.s) {
        assert_eq!(code, Code::NOT_READY);
        n_not_ready += 1;
    }
    assert!(n_not_ready > 0);
    assert_eq!(b.read(p, 1), [499]);
    assert_eq!(b.reports(), Vec::<String>::new());
}

#[test]
fn the_legacy_stream_and_blocking_streams_wait_for_each_other() {
    let b = Bench::lazy();
    let (p, q) = (b.words(4), b.words(4));
    let blocking = b.sim.stream_create(StreamKind::Blocking).expect("stream");
    b.fill(blocking, p, 1, 4).expect("launch");
    b.add(StreamHandle::LEGACY, q, p, p, 4).expect("launch");
    b.add(blocking, p, q, q, 4).expect("launch");
    assert_eq!(b.read(p, 4), [4; 4], "a synchronous copy is on the legacy stream");
    assert_eq!(b.reports(), Vec::<String>::new());
}

#[test]
fn an_event_orders_two_streams_and_without_it_the_race_is_reported() {
    for ordered in [true, false] {
        let b = Bench::lazy();
        let (p, q, other, event) = (b.words(4), b.words(4), b.stream(), b.event());
        b.fill(b.s, p, 2, 4).expect("launch");
        if ordered {
            b.sim.event_record(event, b.s).expect("record");
            b.sim.stream_wait_event(other, event).expect("wait");
        }
        b.add(other, q, p, p, 4).expect("launch");
        b.sim.ctx_synchronize().expect("wait");
        let reports = b.reports();
        if ordered {
            assert_eq!(b.read(q, 4), [4; 4]);
            assert!(reports.is_empty(), "{reports:?}");
        } else {
            assert_eq!(reports.len(), 1, "{reports:?}");
            assert!(reports[0].contains("16 bytes") && reports[0].contains("kernel add"), "{reports:?}");
        }
    }
}

#[test]
fn a_host_wait_orders_streams_too() {
    let b = Bench::lazy();
    let (p, q, other) = (b.words(4), b.words(4), b.stream());
    b.fill(b.s, p, 2, 4).expect("launch");
    b.sim.stream_synchronize(b.s).expect("wait");
    b.add(other, q, p, p, 4).expect("launch");
    b.sim.stream_synchronize(other).expect("wait");
    assert_eq!(b.reports(), Vec::<String>::new());
}

#[test]
fn a_race_fails_the_launch_in_strict_mode() {
    let b = Bench::new(SimOptions { strict: true, ..options(SimSchedule::Lazy) });
    let (p, other) = (b.words(4), b.stream());
    b.fill(b.s, p, 1, 4).expect("launch");
    b.fill(other, p, 2, 4).expect("launch");
    assert_eq!(b.sim.ctx_synchronize(), Err(Code::LAUNCH_FAILED));
    assert!(b.reports()[0].contains("nothing orders them"));
}

#[test]
fn events_complete_when_reached_and_measure_time() {
    let b = Bench::lazy();
    let (start, end, p) = (b.event(), b.event(), b.words(1));
    assert_eq!(b.sim.event_query(start), Ok(()), "an event that was never recorded is done");
    assert_eq!(b.sim.event_elapsed(start, end), Err(Code::INVALID_HANDLE));
    b.sim.event_record(start, b.s).expect("record");
    b.fill(b.s, p, 1, 1).expect("launch");
    b.sim.event_record(end, b.s).expect("record");
    assert_eq!(b.sim.event_elapsed(start, end), Err(Code::NOT_READY));
    b.sim.event_synchronize(end).expect("wait");
    assert_eq!(b.sim.event_query(start), Ok(()));
    assert!(b.sim.event_elapsed(start, end).expect("time") > 0.0);
    assert_eq!(b.read(p, 1), [1]);
}

#[test]
fn a_stream_destroyed_with_pending_work_still_finishes_it() {
    let b = Bench::lazy();
    let (p, other) = (b.words(1), b.stream());
    b.fill(other, p, 3, 1).expect("launch");
    b.sim.stream_destroy(other).expect("destroy");
    assert_eq!(b.sim.stream_synchronize(other), Err(Code::INVALID_HANDLE));
    assert_eq!(b.driver.stats().live.streams, 1);
    b.sim.ctx_synchronize().expect("wait");
    assert_eq!(b.read(p, 1), [3]);
}

extern "C" fn raise(user: *mut c_void) {
    // SAFETY: the tests pass a counter that outlives the device's work.
    unsafe { &*user.cast::<AtomicU32>() }.fetch_add(1, Ordering::SeqCst);
}

extern "C" fn wait_for_the_flag(user: *mut c_void) {
    // SAFETY: as above.
    let flag = unsafe { &*user.cast::<AtomicU32>() };
    while flag.load(Ordering::SeqCst) == 0 {
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_host_function_runs_in_stream_order_and_does_not_block_the_driver() {
    let b = Bench::lazy();
    let (flag, p) = (Arc::new(AtomicU32::new(0)), b.words(1));
    // SAFETY: the counter outlives the waits below.
    unsafe {
        b.sim
            .launch_host_func(b.s, wait_for_the_flag, Arc::as_ptr(&flag) as *mut c_void)
            .expect("host function");
        b.sim.launch_host_func(b.s, raise, Arc::as_ptr(&flag) as *mut c_void).expect("host function");
    }
    b.fill(b.s, p, 1, 1).expect("launch");
    let (sim, s, ctx) = (b.sim.clone(), b.s, b.ctx);
    let waiting = std::thread::spawn(move || {
        sim.ctx_set_current(Some(ctx))?;
        sim.stream_synchronize(s)
    });
    std::thread::sleep(Duration::from_millis(10));
    assert_eq!(b.sim.stream_query(b.s), Err(Code::NOT_READY), "the driver still responds");
    flag.store(1, Ordering::SeqCst);
    b.sim.ctx_synchronize().expect("wait");
    waiting.join().expect("no panic").expect("wait");
    assert_eq!((flag.load(Ordering::SeqCst), b.read(p, 1)), (2, vec![1]));
}

#[test]
fn a_captured_step_runs_only_when_replayed_and_each_time() {
    let b = Bench::lazy();
    let (p, one) = (b.words(4), b.words(4));
    b.sim.memset_async(one, 1, 16, b.s).expect("fill");
    b.sim.stream_begin_capture(b.s, CaptureMode::ThreadLocal).expect("begin");
    let (status, id) = b.sim.stream_capture_info(b.s).expect("info");
    assert!(status == CaptureStatus::Active && id.is_some());
    b.add(b.s, p, p, one, 4).expect("launch");
    b.sim.memcpy_dtod_async(one, one, 16, b.s).expect("copy");
    let graph = b.sim.stream_end_capture(b.s).expect("end");
    let kinds: Vec<NodeKind> = {
        let mut kinds: Vec<_> =
            b.sim.graph_nodes(graph).expect("nodes").into_iter().map(|(_, k)| k).collect();
        kinds.sort();
        kinds
    };
    assert_eq!(kinds, [NodeKind::Kernel, NodeKind::Memcpy]);
    assert_eq!(b.sim.graph_edges(graph).expect("edges").len(), 1);
    let exec = b.sim.graph_instantiate(graph).expect("exec");
    b.sim.graph_destroy(graph).expect("the exec does not need it");
    b.sim.stream_synchronize(b.s).expect("wait");
    assert_eq!(b.read(p, 4), [0; 4]);
    for n in 1..=3 {
        b.sim.exec_launch(exec, b.s).expect("replay");
        b.sim.stream_synchronize(b.s).expect("wait");
        assert_eq!(b.read(p, 1), [n * 0x0101_0101]);
    }
}

#[test]
fn two_captures_cannot_merge_and_a_forked_capture_ends_only_on_its_origin() {
    let b = Bench::lazy();
    let (other, event) = (b.stream(), b.event());
    b.sim.stream_begin_capture(b.s, CaptureMode::ThreadLocal).expect("begin");
    b.sim.stream_begin_capture(other, CaptureMode::ThreadLocal).expect("begin");
    b.sim.event_record(event, b.s).expect("record");
    assert_eq!(b.sim.stream_wait_event(other, event), Err(Code::STREAM_CAPTURE_MERGE));
    assert_eq!(b.sim.stream_end_capture(b.s), Err(Code::STREAM_CAPTURE_INVALIDATED));
    assert_eq!(b.sim.stream_end_capture(other), Err(Code::STREAM_CAPTURE_INVALIDATED));

    b.sim.stream_begin_capture(b.s, CaptureMode::ThreadLocal).expect("begin");
    b.sim.event_record(event, b.s).expect("record");
    b.sim.stream_wait_event(other, event).expect("fork");
    assert_eq!(b.sim.stream_is_capturing(other), Ok(CaptureStatus::Active));
    assert_eq!(b.sim.stream_end_capture(other), Err(Code::STREAM_CAPTURE_UNMATCHED));
    assert_eq!(b.sim.stream_end_capture(b.s), Err(Code::STREAM_CAPTURE_INVALIDATED));
    assert_eq!(b.sim.stream_is_capturing(other), Ok(CaptureStatus::None));
}

#[test]
fn querying_the_legacy_stream_breaks_nothing_and_it_cannot_be_captured() {
    let b = Bench::lazy();
    let blocking = b.sim.stream_create(StreamKind::Blocking).expect("stream");
    let refused = b.sim.stream_begin_capture(StreamHandle::LEGACY, CaptureMode::Relaxed);
    assert_eq!(refused, Err(Code::STREAM_CAPTURE_UNSUPPORTED));
    b.sim.stream_begin_capture(blocking, CaptureMode::ThreadLocal).expect("begin");
    assert_eq!(b.sim.stream_is_capturing(StreamHandle::LEGACY), Err(Code::STREAM_CAPTURE_IMPLICIT));
    assert_eq!(b.sim.stream_is_capturing(blocking), Ok(CaptureStatus::Active));
    b.sim.stream_end_capture(blocking).expect("end");
}

#[test]
fn a_programmatic_launch_that_reads_too_early_is_reported_on_a_stream() {
    for (config, races) in [(PROGRAMMATIC, 1), (PLAIN, 0)] {
        let b = Bench::lazy();
        let (p, q) = (b.words(4), b.words(4));
        b.fill(b.s, p, 1, 4).expect("launch");
        b.sim.launch(b.function("early"), &config, b.s, &early_params(q, p, 4)).expect("launch");
        b.sim.stream_synchronize(b.s).expect("wait");
        let reports = b.reports();
        assert_eq!(reports.len(), races, "{reports:?}");
        assert!(reports.iter().all(|r| r.contains("before its dependency wait")), "{reports:?}");
    }
}

#[test]
fn an_early_read_races_back_to_the_last_late_starter() {
    for (between, races) in [("fill", 1), ("late", 0)] {
        let b = Bench::lazy();
        let (p, q, r) = (b.words(4), b.words(4), b.words(4));
        b.fill(b.s, p, 1, 4).expect("launch");
        b.sim.launch(b.function(between), &PROGRAMMATIC, b.s, &fill_params(q, 1, 4)).expect("launch");
        b.sim.launch(b.function("early"), &PROGRAMMATIC, b.s, &early_params(r, p, 4)).expect("launch");
        b.sim.stream_synchronize(b.s).expect("wait");
        assert_eq!(b.reports().len(), races, "{between}");
        // That launch's own writes may still be in flight.
        b.sim.launch(b.function(between), &PROGRAMMATIC, b.s, &fill_params(q, 2, 4)).expect("launch");
        b.sim.launch(b.function("early"), &PROGRAMMATIC, b.s, &early_params(r, q, 4)).expect("launch");
        b.sim.stream_synchronize(b.s).expect("wait");
        assert_eq!(b.reports().len(), 1, "{between}");
    }
}

#[test]
fn a_programmatic_launch_is_captured_as_a_programmatic_edge() {
    let b = Bench::lazy();
    let (p, q) = (b.words(4), b.words(4));
    b.sim.stream_begin_capture(b.s, CaptureMode::ThreadLocal).expect("begin");
    b.fill(b.s, p, 1, 4).expect("launch");
    b.sim.launch(b.function("fill"), &PROGRAMMATIC, b.s, &fill_params(q, 1, 4)).expect("launch");
    b.fill(b.s, p, 1, 4).expect("launch");
    let graph = b.sim.stream_end_capture(b.s).expect("end");
    let kinds: Vec<EdgeKind> = b.sim.graph_edges(graph).expect("edges").into_iter().map(|e| e.kind).collect();
    assert_eq!(kinds, [EdgeKind::Programmatic, EdgeKind::Full]);
}

#[test]
fn impossible_launches_are_refused_with_the_driver_s_code() {
    let b = Bench::lazy();
    let f = b.function("fill");
    let params = fill_params(b.words(1), 1, 1);
    let launch = |config: LaunchConfig| b.sim.launch(f, &config, b.s, &params);
    assert_eq!(launch(LaunchConfig::new([0, 1, 1], [1, 1, 1])), Err(Code::INVALID_VALUE));
    assert_eq!(launch(LaunchConfig::new([1, 1, 1], [1025, 1, 1])), Err(Code::INVALID_VALUE));
    let large = LaunchConfig { shared_bytes: 100_000, ..PLAIN };
    assert_eq!(launch(large), Err(Code::INVALID_VALUE));
    b.sim.function_set_attribute(f, FunctionAttribute::MaxDynamicSharedBytes, 100_000).expect("attribute");
    launch(large).expect("allowed now");
    let too_many = b.sim.function_set_attribute(f, FunctionAttribute::MaxDynamicSharedBytes, 300_000);
    assert_eq!(too_many, Err(Code::INVALID_VALUE));
    let crowd = LaunchConfig { cooperative: true, ..LaunchConfig::new([100_000, 1, 1], [1024, 1, 1]) };
    assert_eq!(launch(crowd), Err(Code::COOPERATIVE_LAUNCH_TOO_LARGE));
    let cluster = LaunchConfig { cluster: Some([2, 1, 1]), ..LaunchConfig::new([3, 1, 1], [32, 1, 1]) };
    assert_eq!(launch(cluster), Err(Code(912)));
    assert_eq!(b.sim.launch(f, &PLAIN, b.s, &params[..15]), Err(Code::INVALID_VALUE));
    assert_eq!(b.sim.launch(f, &PLAIN, StreamHandle(0xdead), &params), Err(Code::INVALID_HANDLE));
}

#[test]
fn a_module_has_the_kernels_that_its_image_names_and_a_twin_implements() {
    let b = Bench::lazy();
    let ptx = ".version 8.0\n.target sm_90\n.visible .entry fill(.param .u64 a, .param .u32 b, .param .u32 c) { ret; }\n\
        .visible .entry add(.param .u64 a) { ret; }\n.visible .entry untold() { ret; }\n";
    let module = b.sim.module_load(ptx.as_bytes()).expect("module");
    let fill = b.sim.module_function(module, "fill").expect("function");
    let layout: Vec<_> =
        b.sim.function_params(fill).expect("params").iter().map(|p| (p.offset, p.size)).collect();
    assert_eq!(layout, [(0, 8), (8, 4), (12, 4)]);
    assert_eq!(b.sim.module_function(module, "early"), Err(Code::NOT_FOUND));
    assert_eq!(b.sim.module_function(module, "untold"), Err(Code::NOT_FOUND));
    assert_eq!(b.sim.module_function(module, "add"), Err(Code::INVALID_IMAGE));
    let reports = b.reports();
    assert!(reports[0].contains("untold has no registered twin"), "{reports:?}");
    assert!(reports[1].contains("parameters of [8] bytes, but its twin has [8, 8, 8, 4]"), "{reports:?}");
}

/// Runs additions over a few buffers on a few streams, ordered by one event per dependency. Also returns the result
/// of a plain loop.
fn random_program(
    b: &Bench,
    mut random: impl FnMut(usize) -> usize,
    forget: Option<usize>,
) -> (Vec<u32>, Vec<u32>) {
    const N: usize = 6;
    let streams: Vec<StreamHandle> = (0..4).map(|_| b.stream()).collect();
    let buffers: Vec<_> = (0..N).map(|_| b.words(8)).collect();
    let mut expected: Vec<u32> = (1..=N as u32).collect();
    for (p, &value) in buffers.iter().zip(&expected) {
        b.fill(b.s, *p, value, 8).expect("launch");
    }
    b.sim.stream_synchronize(b.s).expect("wait");
    let mut past: Vec<(usize, [usize; 3], _)> = Vec::new();
    for i in 0..80 {
        let (stream, [dst, x, y]) = (random(4), [random(N), random(N), random(N)]);
        for (on, [w, r, q], event) in &past {
            let depends = [dst, x, y].contains(w) || [*r, *q].contains(&dst);
            if depends && *on != stream && forget != Some(i) {
                b.sim.stream_wait_event(streams[stream], *event).expect("wait");
            }
        }
        b.add(streams[stream], buffers[dst], buffers[x], buffers[y], 8).expect("launch");
        expected[dst] = expected[x].wrapping_add(expected[y]);
        let event = b.event();
        b.sim.event_record(event, streams[stream]).expect("record");
        past.push((stream, [dst, x, y], event));
    }
    b.sim.ctx_synchronize().expect("wait");
    (buffers.iter().map(|p| b.read(*p, 8)[7]).collect(), expected)
}

fn generator(seed: u64) -> impl FnMut(usize) -> usize {
    let mut state = seed.wrapping_mul(2).wrapping_add(0x9E37_79B9_7F4A_7C15);
    move |n| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % n
    }
}

#[test]
fn ordered_programs_match_a_plain_loop_on_every_schedule_without_a_false_alarm() {
    for seed in 0..40 {
        for schedule in [SimSchedule::Seeded, SimSchedule::Lazy, SimSchedule::Eager] {
            let b = Bench::new(SimOptions { seed, strict: true, ..options(schedule) });
            let (got, expected) = random_program(&b, generator(seed), None);
            assert_eq!(got, expected, "seed {seed}, {schedule:?}");
            assert_eq!(b.reports(), Vec::<String>::new(), "seed {seed}, {schedule:?}");
        }
    }
}

#[test]
fn a_program_with_a_missing_wait_is_detected_on_every_schedule() {
    let mut n_found = 0;
    for seed in 0..40 {
        let found = [SimSchedule::Seeded, SimSchedule::Lazy, SimSchedule::Eager].map(|schedule| {
            let b = Bench::new(SimOptions { seed, ..options(schedule) });
            random_program(&b, generator(seed), Some(40));
            !b.reports().is_empty()
        });
        // In some programs the removed wait is redundant, because other waits imply the order.
        assert!(found == [found[0]; 3], "seed {seed}: {found:?}");
        n_found += usize::from(found[0]);
    }
    assert!(n_found > 20, "{n_found} of 40");
}
