//! Every fault that a script can inject, and the device's behaviour afterwards.

mod sim_common;

use std::time::{Duration, Instant};

use refrain_driver::api::{CaptureMode, CaptureStatus, Code, ExecHandle};
use refrain_driver::sim::{FaultScript, FaultScriptError};
use sim_common::{Bench, PLAIN, fill_params};

/// A graph of one launch that fills `n` words with 5.
fn recorded(b: &Bench, dst: refrain_driver::api::DevicePtr, n: u32) -> ExecHandle {
    let graph = b.sim.graph_create().expect("graph");
    b.sim.graph_add_kernel(graph, &[], b.function("fill"), &PLAIN, &fill_params(dst, 5, n)).expect("node");
    b.sim.graph_instantiate(graph).expect("exec")
}

#[test]
fn allocation_during_capture_fails_with_900_and_breaks_the_capture() {
    let b = Bench::with_faults("on 1st alloc during capture: fail 900");
    let p = b.words(1);
    b.sim.stream_begin_capture(b.s, CaptureMode::Relaxed).expect("begin");
    assert_eq!(b.sim.alloc(4), Err(Code::STREAM_CAPTURE_UNSUPPORTED));
    assert_eq!(b.sim.stream_is_capturing(b.s), Ok(CaptureStatus::Invalidated));
    assert_eq!(b.fill(b.s, p, 1, 1), Err(Code::STREAM_CAPTURE_INVALIDATED));
    assert_eq!(b.sim.stream_end_capture(b.s), Err(Code::STREAM_CAPTURE_INVALIDATED));
    assert_eq!(b.sim.stream_is_capturing(b.s), Ok(CaptureStatus::None));
    b.fill(b.s, p, 1, 1).expect("the context is healthy");
    b.sim.stream_synchronize(b.s).expect("wait");
}

#[test]
fn scripted_capture_errors_break_the_capture_like_real_ones() {
    for code in [Code::STREAM_CAPTURE_IMPLICIT, Code::STREAM_CAPTURE_ISOLATION, Code::STREAM_CAPTURE_MERGE] {
        let b = Bench::with_faults(&format!("on 2nd launch during capture: fail {}", code.0));
        let p = b.words(1);
        b.fill(b.s, p, 1, 1).expect("outside");
        b.sim.stream_begin_capture(b.s, CaptureMode::ThreadLocal).expect("begin");
        b.fill(b.s, p, 1, 1).expect("first");
        assert_eq!(b.fill(b.s, p, 1, 1), Err(code));
        assert_eq!(b.fill(b.s, p, 1, 1), Err(Code::STREAM_CAPTURE_INVALIDATED));
        assert_eq!(b.sim.stream_end_capture(b.s), Err(Code::STREAM_CAPTURE_INVALIDATED));
    }
}

#[test]
fn invalidation_fails_the_call_that_triggers_it() {
    let b = Bench::with_faults("on 2nd launch: invalidate");
    let p = b.words(1);
    b.sim.stream_begin_capture(b.s, CaptureMode::ThreadLocal).expect("begin");
    b.fill(b.s, p, 1, 1).expect("first");
    assert_eq!(b.fill(b.s, p, 1, 1), Err(Code::STREAM_CAPTURE_INVALIDATED));
    assert_eq!(b.sim.stream_end_capture(b.s), Err(Code::STREAM_CAPTURE_INVALIDATED));
}

#[test]
fn begin_end_and_instantiate_can_fail_and_the_next_recording_succeeds() {
    let b = Bench::with_faults(
        "on 1st begin_capture: fail 900; on 1st end_capture: fail UNKNOWN; on 1st instantiate: fail 999; \
         on 2nd instantiate: out of memory",
    );
    let p = b.words(4);
    assert_eq!(
        b.sim.stream_begin_capture(b.s, CaptureMode::ThreadLocal),
        Err(Code::STREAM_CAPTURE_UNSUPPORTED)
    );
    assert_eq!(b.sim.stream_is_capturing(b.s), Ok(CaptureStatus::None));
    b.sim.stream_begin_capture(b.s, CaptureMode::ThreadLocal).expect("begin");
    assert_eq!(b.sim.stream_end_capture(b.s), Err(Code::UNKNOWN));
    assert_eq!(
        b.sim.stream_is_capturing(b.s),
        Ok(CaptureStatus::None),
        "a failed end-capture ends the capture all the same"
    );
    b.sim.stream_begin_capture(b.s, CaptureMode::ThreadLocal).expect("begin");
    b.fill(b.s, p, 8, 4).expect("launch");
    let graph = b.sim.stream_end_capture(b.s).expect("end");
    assert_eq!(b.sim.graph_instantiate(graph), Err(Code::UNKNOWN));
    assert_eq!(b.sim.graph_instantiate(graph), Err(Code::OUT_OF_MEMORY));
    let exec = b.sim.graph_instantiate(graph).expect("instantiate");
    b.sim.exec_launch(exec, b.s).expect("replay");
    b.sim.stream_synchronize(b.s).expect("wait");
    assert_eq!(b.read(p, 4), [8; 4]);
}

#[test]
fn a_launch_that_fails_does_nothing() {
    let b = Bench::with_faults("on 2nd launch: fail LAUNCH_OUT_OF_RESOURCES");
    let p = b.words(1);
    b.fill(b.s, p, 1, 1).expect("first");
    assert_eq!(b.fill(b.s, p, 2, 1), Err(Code::LAUNCH_OUT_OF_RESOURCES));
    b.sim.stream_synchronize(b.s).expect("wait");
    assert_eq!(b.read(p, 1), [1]);
}

#[test]
fn a_sticky_fault_on_the_nth_replay_is_final_for_every_call_and_every_new_context() {
    let b = Bench::with_faults("on 3rd replay: sticky 700");
    let p = b.words(4);
    let exec = recorded(&b, p, 4);
    for _ in 0..2 {
        b.sim.exec_launch(exec, b.s).expect("replay");
        b.sim.stream_synchronize(b.s).expect("wait");
    }
    b.sim.exec_launch(exec, b.s).expect("the launch itself succeeds");
    assert_eq!(b.sim.stream_synchronize(b.s), Err(Code::ILLEGAL_ADDRESS));
    assert_eq!(b.sim.exec_launch(exec, b.s), Err(Code::ILLEGAL_ADDRESS));
    assert_eq!(b.sim.free(p), Err(Code::ILLEGAL_ADDRESS));
    assert_eq!(b.sim.ctx_create(0), Err(Code::ILLEGAL_ADDRESS));
    assert_eq!(b.sim.primary_ctx_release(0), Err(Code::ILLEGAL_ADDRESS));
    let reports = b.reports();
    assert!(reports[0].contains("while a graph of 1 nodes runs"), "{reports:?}");
}

#[test]
fn an_illegal_address_in_a_launch_is_reported_by_the_wait() {
    let b = Bench::with_faults("on third launch: illegal address");
    let p = b.words(1);
    for _ in 0..3 {
        b.fill(b.s, p, 1, 1).expect("launch");
    }
    assert_eq!(b.sim.stream_synchronize(b.s), Err(Code::ILLEGAL_ADDRESS));
}

#[test]
fn a_replay_can_succeed_with_exactly_one_wrong_byte() {
    let b = Bench::with_faults("on every 2nd replay: wrong byte");
    let p = b.words(64);
    let exec = recorded(&b, p, 64);
    let mut n_wrong = Vec::new();
    for _ in 0..4 {
        b.sim.exec_launch(exec, b.s).expect("replay");
        b.sim.stream_synchronize(b.s).expect("wait");
        n_wrong.push(b.read(p, 64).into_iter().filter(|&w| w != 5).count());
    }
    assert_eq!(n_wrong, [0, 1, 0, 1]);
}

#[test]
fn copies_and_launches_can_have_a_wrong_byte_too() {
    let b = Bench::with_faults(
        "on 1st launch: wrong byte; on 2nd download: wrong byte; on 2nd upload: wrong byte",
    );
    let p = b.words(8);
    b.fill(b.s, p, 0, 8).expect("launch");
    b.sim.stream_synchronize(b.s).expect("wait");
    assert_eq!(b.read(p, 8).into_iter().filter(|&w| w != 0).count(), 1, "launch");
    b.sim.memcpy_htod(p, &[0; 32]).expect("upload");
    let seen = b.read(p, 8);
    let again = b.read(p, 8);
    assert_eq!(again.iter().filter(|&&w| w != 0).count(), 1, "upload");
    assert_ne!(seen, again, "download");
}

#[test]
fn module_load_and_any_allocation_can_fail() {
    let b = Bench::with_faults("on 2nd module_load: fail INVALID_IMAGE; on every allocation: out of memory");
    assert_eq!(b.sim.module_load(sim_common::IMAGE), Err(Code::INVALID_IMAGE));
    assert_eq!(b.sim.alloc(4), Err(Code::OUT_OF_MEMORY));
    assert_eq!(b.sim.alloc_host(4), Err(Code::OUT_OF_MEMORY));
    assert_eq!(b.sim.alloc_managed(4), Err(Code::OUT_OF_MEMORY));
    assert_eq!(b.sim.alloc_async(4, b.s), Err(Code::OUT_OF_MEMORY));
}

#[test]
fn a_call_that_hangs_leaves_other_threads_free_and_returns_when_released() {
    let b = Bench::with_faults("on 1st wait: hang");
    let (sim, s, ctx) = (b.sim.clone(), b.s, b.ctx);
    let waiting = std::thread::spawn(move || {
        sim.ctx_set_current(Some(ctx))?;
        sim.stream_synchronize(s)
    });
    assert!(b.driver.wait_until_hung(Duration::from_secs(10)));
    assert_eq!(b.driver.stats().n_hung, 1);
    let p = b.words(1);
    b.fill(b.s, p, 4, 1).expect("another thread's launch");
    assert!(!waiting.is_finished());
    b.driver.release_hung();
    waiting.join().expect("no panic").expect("the wait succeeds");
    assert_eq!(b.driver.stats().n_hung, 0);
}

#[test]
fn a_hang_can_have_a_duration() {
    let b = Bench::with_faults("on 1st end_capture: hang 30 ms");
    b.sim.stream_begin_capture(b.s, CaptureMode::ThreadLocal).expect("begin");
    let start = Instant::now();
    b.sim.stream_end_capture(b.s).expect("end");
    assert!(start.elapsed() >= Duration::from_millis(30));
}

#[test]
fn rules_added_later_count_calls_from_then_on() {
    let b = Bench::with_faults("");
    b.words(1);
    b.driver.inject(sim_common::script("from 2nd alloc: out of memory"));
    b.words(1);
    for _ in 0..3 {
        assert_eq!(b.sim.alloc(4), Err(Code::OUT_OF_MEMORY));
    }
}

#[test]
fn a_device_assertion_and_a_crashing_twin_are_sticky() {
    for (kernel, code) in [("assert", Code::ASSERT), ("panic", Code::LAUNCH_FAILED)] {
        let b = Bench::lazy();
        b.sim.launch(b.function(kernel), &PLAIN, b.s, &[]).expect("launch");
        assert_eq!(b.sim.stream_synchronize(b.s), Err(code));
        assert_eq!(b.sim.ctx_create(0), Err(code));
    }
}

#[test]
fn a_script_accepts_many_rules_comments_and_spellings() {
    let text = "
        on 1st begin-capture: fail CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED   # a comment
        on every instantiate: out of memory ; on 5 replay: wrong byte;;
        ON 2ND GRAPH LAUNCH: STICKY 719
        from 3rd memcpy_htod_async during capture: hang 2 s
    ";
    assert!(!FaultScript::parse(text).expect("a script").is_empty());
    assert!(FaultScript::parse(" \n # nothing\n;").expect("an empty script").is_empty());
}

#[test]
fn rules_that_never_fired_are_reported() {
    let b =
        Bench::with_faults("on 99th wait: fail 1; on every 3rd launch during capture : hang # twice unused");
    assert_eq!(
        b.driver.unused_faults(),
        ["on 99th wait: fail 1", "on every 3rd launch during capture : hang"]
    );
    b.driver.inject(FaultScript::parse("on 1st wait: fail 1").expect("a script"));
    assert_eq!(b.sim.stream_synchronize(b.s), Err(Code(1)));
    assert_eq!(b.driver.unused_faults().len(), 2, "the new rule fired");
}

#[test]
fn a_malformed_rule_is_named_with_a_hint() {
    let cases = [
        ("launch", "has no `:`", "on 3rd launch: illegal address"),
        ("at 3rd launch: hang", "`at 3rd launch` is not a trigger", "on every 2nd CALL"),
        ("on 0th launch: hang", "is not a trigger", "from 3rd CALL"),
        ("on 1st: hang", "is not a trigger", "on 3rd CALL"),
        ("on 1st lunch: hang", "no driver call `lunch`", "begin_capture"),
        ("on 1st launch: explode", "`explode` is not an action", "wrong byte"),
        ("on 1st launch: hang soon", "`hang soon` is not an action", "hang 50 ms"),
        ("on 1st launch: fail badly", "`badly` is not a driver error code", "STREAM_CAPTURE_UNSUPPORTED"),
        ("on 1st launch: fail 0", "`0` is not a driver error code", "900"),
        ("on 1st alloc: wrong byte", "writes no bytes", "replay"),
    ];
    for (text, message, hint) in cases {
        let error: FaultScriptError = FaultScript::parse(text).expect_err(text);
        assert!(error.to_string().contains(message), "{text}: {error}");
        assert!(error.to_string().contains("fault rule 1"), "{text}: {error}");
        assert!(error.hint().contains(hint), "{text}: {}", error.hint());
    }
    let second = FaultScript::parse("on 1st launch: hang; nonsense").expect_err("a bad second rule");
    assert!(second.to_string().contains("fault rule 2 (`nonsense`)"));
}
