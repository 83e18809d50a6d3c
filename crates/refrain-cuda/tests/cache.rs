//! Recording, verification, demotion, backoff and eviction, with every fault that can affect them.

mod common;

use std::time::Duration;

use common::{BYTES, Bed, N, built, faults, words};
use refrain_cuda::{
    CacheOptions, CudaError, GraphMode, Site, Verified, VerifyCase, VerifyError, VerifySetup, Work, verify,
};
use refrain_driver::sim::DriverCall;
use refrain_driver::{Baked, DriverError, LaunchBuilder, Method, RecordOptions};
use refrain_graph::{Ran, Reason};

/// Without a second try by the other method, so that each fault shows as itself.
fn plain(method: Method) -> CacheOptions {
    CacheOptions {
        method,
        nodes_when_capture_fails: false,
        first_backoff: 2,
        max_backoff: 8,
        health_limit: Duration::from_millis(500),
        ..CacheOptions::default()
    }
}

fn eager_reason(ran: Result<Ran, CudaError>) -> Reason {
    match ran {
        Ok(Ran::Eager(reason)) => reason,
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_first_step_is_recorded_verified_and_replayed() {
    for method in [Method::Stream, Method::Nodes] {
        let mut bed = Bed::new(plain(method));
        for input in [1, 2, 30, 400] {
            assert_eq!(bed.step(0, input).unwrap(), Ran::REPLAYED);
        }
        let stats = bed.cache.stats();
        assert_eq!((stats.recorded, stats.replayed, stats.eager), (1, 4, 0));
        let graph = bed.cache.graph(&0).unwrap();
        assert_eq!((graph.info().nodes.len(), graph.info().method), (3, method));
        let report = graph.report();
        // b, c and the scratch half of the cache, but not the live half.
        assert_eq!((report.n_cases, report.bytes, report.bit_exact), (3, 3 * BYTES, true));
        assert_eq!(report.unwritten_bytes, 0);
    }
}

#[test]
fn preparing_changes_nothing_visible_to_a_step() {
    let mut bed = Bed::new(plain(Method::Stream));
    let bufs = [bed.a, bed.b, bed.c, bed.kv];
    for (i, buf) in bufs.into_iter().enumerate() {
        bed.write(buf, &words(100 + i as u32).repeat((buf.len() / BYTES) as usize));
    }
    let before: Vec<_> = bufs.map(|b| bed.read(b).unwrap()).into();
    let check = bed.check();
    let mut site = Site { stream: &mut bed.stream, lease: &mut bed.lease };
    assert_eq!(bed.cache.prepare(&0, &mut site, &bed.warm, || check).unwrap(), None);
    assert!(bed.cache.graph(&0).is_some());
    let after: Vec<_> = bufs.map(|b| bed.read(b).unwrap()).into();
    assert_eq!(before, after);
}

#[test]
fn each_failed_recording_is_reported_with_its_reason_and_loses_no_result() {
    type Expected = fn(&Reason) -> bool;
    let cases: [(Method, &str, Expected); 8] = [
        (Method::Stream, "on 1st begin_capture: fail 900", |r| {
            matches!(r, Reason::CaptureFailed { code: 900, .. })
        }),
        (Method::Stream, "on 1st end_capture: fail 901", |r| {
            matches!(r, Reason::CaptureFailed { code: 901, .. })
        }),
        (
            Method::Stream,
            "on 2nd launch during capture: fail 900",
            |r| matches!(r, Reason::CaptureFailed { code: 900, last_launch } if last_launch.contains("triple")),
        ),
        (Method::Stream, "on 2nd launch during capture: invalidate", |r| {
            matches!(r, Reason::CaptureFailed { code: 901, .. })
        }),
        (Method::Stream, "on 1st instantiate: fail 801", |r| {
            matches!(r, Reason::InstantiateFailed { code: 801 })
        }),
        (Method::Nodes, "on 1st instantiate: out of memory", |r| {
            matches!(r, Reason::InstantiateFailed { code: 2 })
        }),
        (Method::Nodes, "on 2nd add_node: fail 1", |r| matches!(r, Reason::CaptureFailed { code: 1, .. })),
        // The first replay belongs to verification.
        (Method::Stream, "on 1st replay: fail 701", |r| matches!(r, Reason::ReplayFailed { code: 701 })),
    ];
    for (method, script, expected) in cases {
        let mut bed = Bed::new(plain(method));
        let live = bed.sim.stats().live;
        bed.sim.inject(faults(script));
        let reason = eager_reason(bed.step(0, 9));
        assert!(expected(&reason), "{script}: {reason:?}");
        assert_eq!(bed.sim.stats().live.execs, live.execs, "{script} leaks a graph");
        // Two steps of backoff that name the cause, then the graph is back in service.
        for left in [1, 0] {
            match eager_reason(bed.step(0, 10)) {
                Reason::BackingOff { steps_left, after } => {
                    assert_eq!((steps_left, *after), (left, reason.clone()))
                }
                other => panic!("{script}: {other:?}"),
            }
        }
        assert_eq!(bed.step(0, 11).unwrap(), Ran::REPLAYED, "{script}");
        assert_eq!((bed.cache.stats().failed, bed.cache.stats().promoted), (1, 1), "{script}");
    }
}

#[test]
fn a_recording_that_takes_too_long_is_aborted_and_named() {
    let limit = Duration::from_millis(30);
    let mut bed = Bed::new(CacheOptions { record_limit: limit, ..plain(Method::Stream) });
    bed.sim.inject(faults("on 2nd launch during capture: hang 120 ms"));
    match eager_reason(bed.step(0, 4)) {
        Reason::CaptureTimedOut { deadline, last_launch } => {
            assert_eq!(deadline, limit);
            assert!(last_launch.contains("triple"), "{last_launch}");
        }
        other => panic!("{other:?}"),
    }
    for _ in 0..2 {
        bed.step(0, 5).unwrap();
    }
    assert_eq!(bed.step(0, 6).unwrap(), Ran::REPLAYED);
}

#[test]
fn a_driver_whose_capture_fails_records_explicit_nodes() {
    let mut bed = Bed::new(CacheOptions { nodes_when_capture_fails: true, ..plain(Method::Stream) });
    bed.sim.inject(faults("on every begin_capture: fail 901"));
    assert_eq!(bed.step(0, 4).unwrap(), Ran::REPLAYED);
    assert_eq!(bed.cache.graph(&0).unwrap().info().method, Method::Nodes);
}

#[test]
fn a_replay_with_one_wrong_byte_is_caught_before_service_with_its_launch() {
    for seed in 0..8 {
        let mut bed = Bed::new(plain(Method::Stream));
        // Verification replays three times; the fault hits any one of them.
        bed.sim.inject(faults(&format!("on {}th replay: wrong byte", 1 + seed % 3)));
        let reason = eager_reason(bed.step(0, 21));
        let Reason::VerifyMismatch { buffer, element, launch } = &reason else { panic!("{reason:?}") };
        let step = match buffer.as_str() {
            "b" => "double",
            "c" => "triple",
            "cache" => "append",
            other => panic!("{other}"),
        };
        assert!(*element < N as usize && launch.contains(step), "{reason:?}");
        assert!(bed.cache.graph(&0).is_none());
    }
}

#[test]
fn a_failed_replay_runs_eagerly_and_each_backoff_is_longer() {
    let mut bed = Bed::new(plain(Method::Stream));
    assert_eq!(bed.step(0, 1).unwrap(), Ran::REPLAYED);
    // Fails in service, then in each verification until the third.
    bed.sim.inject(faults("on 1st replay: fail 701; on 2nd replay: fail 701; on 3rd replay: fail 701"));
    let mut seen = Vec::new();
    for input in 2..30 {
        seen.push(match bed.step(0, input).unwrap() {
            Ran::Replayed { .. } => 'R',
            Ran::Eager(Reason::ReplayFailed { code: 701 }) => 'F',
            Ran::Eager(Reason::BackingOff { .. }) => '.',
            other => panic!("{other:?}"),
        });
    }
    let seen: String = seen.into_iter().collect();
    assert!(seen.starts_with("F..F....F........RRR"), "{seen}");
    assert_eq!((bed.cache.stats().demoted, bed.cache.stats().failed), (1, 2));
}

#[test]
fn a_key_that_recovers_starts_from_the_shortest_backoff() {
    let mut bed = Bed::new(plain(Method::Stream));
    bed.sim.inject(faults("on 1st instantiate: fail 1"));
    let mut seen = String::new();
    for input in 1..=12 {
        if input == 9 {
            bed.sim.inject(faults("on 1st replay: fail 701"));
        }
        seen.push(if bed.step(0, input).unwrap() == Ran::REPLAYED { 'R' } else { '.' });
    }
    assert_eq!(seen, "...RRRRR...R");
}

#[test]
fn a_failed_key_does_not_affect_others() {
    let mut bed = Bed::new(plain(Method::Stream));
    assert_eq!(bed.step(1, 1).unwrap(), Ran::REPLAYED);
    bed.sim.inject(faults("on 1st instantiate: fail 1"));
    assert_eq!(eager_reason(bed.step(2, 2)), Reason::InstantiateFailed { code: 1 });
    assert_eq!(bed.step(1, 3).unwrap(), Ran::REPLAYED);
    assert_eq!(bed.step(3, 3).unwrap(), Ran::REPLAYED);
}

#[test]
fn a_full_cache_evicts_and_frees_the_least_recently_used_graph() {
    let mut bed = Bed::new(CacheOptions { capacity: 2, ..plain(Method::Stream) });
    for key in [1, 2, 1, 3] {
        assert_eq!(bed.step(key, key).unwrap(), Ran::REPLAYED);
    }
    assert!(bed.cache.graph(&1).is_some() && bed.cache.graph(&2).is_none());
    assert_eq!(bed.cache.stats().evicted, 1);
    assert_eq!(bed.sim.stats().live.execs, 2);
    assert_eq!(bed.step(2, 8).unwrap(), Ran::REPLAYED);
    assert_eq!(bed.sim.stats().live.execs, 2);
    bed.cache.clear();
    bed.stream.synchronize().unwrap();
    assert_eq!(bed.sim.stats().live.execs, 0);
}

#[test]
fn require_turns_anything_but_a_replay_into_an_error_with_its_reason() {
    let mut bed = Bed::new(CacheOptions { mode: GraphMode::Require, ..plain(Method::Stream) });
    bed.sim.inject(faults("on 1st begin_capture: fail 900"));
    match bed.step(0, 1) {
        Err(error @ CudaError::Required { .. }) => {
            let CudaError::Required { reason, .. } = &error else { unreachable!() };
            assert!(matches!(reason, Reason::CaptureFailed { code: 900, .. }), "{reason:?}");
            assert!(
                error
                    .to_string()
                    .starts_with("graphs are required, but step cannot be replayed: recording failed")
            );
            assert!(error.hint().unwrap().contains("graph mode auto"));
        }
        other => panic!("{other:?}"),
    }
    assert!(matches!(bed.step(0, 1), Err(CudaError::Required { reason: Reason::BackingOff { .. }, .. })));
    bed.step(0, 1).unwrap_err();
    assert_eq!(bed.step(0, 1).unwrap(), Ran::REPLAYED);
    bed.sim.inject(faults("on 1st replay: fail 701"));
    let failed = bed.step(0, 1);
    assert!(matches!(failed, Err(CudaError::Required { reason: Reason::ReplayFailed { code: 701 }, .. })));
    assert_eq!(bed.cache.stats().eager, 0, "nothing may run eagerly");
}

#[test]
fn off_never_records() {
    let mut bed = Bed::new(CacheOptions { mode: GraphMode::Off, ..plain(Method::Stream) });
    for input in 1..5 {
        assert_eq!(eager_reason(bed.step(0, input)), Reason::SwitchedOff);
    }
    let stats = bed.sim.stats();
    assert_eq!(
        stats.n_calls(DriverCall::StreamBeginCapture) + stats.n_calls(DriverCall::GraphInstantiate),
        0
    );
}

#[test]
fn a_sticky_fault_is_final_and_names_the_step_and_the_kernel() {
    for script in ["on 5th replay: illegal address", "on 4th launch: sticky 700"] {
        let mut bed = Bed::new(plain(Method::Stream));
        bed.sim.inject(faults(script));
        let error = (1..20).find_map(|input| bed.step(0, input).err()).unwrap();
        assert!(error.is_final(), "{error}");
        let text = error.to_string();
        assert!(
            text.contains("700") && text.contains("step") && text.contains("refrain_probe_add"),
            "{text}"
        );
        assert!(error.hint().unwrap().contains("new process"));
        let sent = bed.sim.stats().n_calls_total();
        // Nothing is retried: the error returns at once and nothing is launched.
        let check = bed.check();
        let mut site = Site { stream: &mut bed.stream, lease: &mut bed.lease };
        assert!(bed.cache.step(&0, &mut site, &bed.warm, || check).unwrap_err().is_final());
        assert_eq!(bed.sim.stats().n_calls_total(), sent);
    }
}

#[test]
fn a_failed_eager_step_is_an_error_and_the_next_one_runs() {
    let mut bed = Bed::new(CacheOptions { mode: GraphMode::Off, ..plain(Method::Stream) });
    bed.sim.inject(faults("on 2nd launch: fail 701"));
    match bed.step(0, 3) {
        Err(CudaError::Driver { source: DriverError::Driver { code, .. }, .. }) => assert_eq!(code.0, 701),
        other => panic!("{other:?}"),
    }
    bed.step(0, 4).unwrap();
}

#[test]
fn a_stream_that_cannot_leave_a_capture_is_replaced() {
    let mut bed = Bed::new(plain(Method::Stream));
    bed.sim.inject(faults(
        "on 1st end_capture: fail 999; on 1st stream_is_capturing: fail 999; on 2nd stream_is_capturing: fail 999",
    ));
    eager_reason(bed.step(0, 3));
    for _ in 0..2 {
        bed.step(0, 4).unwrap();
    }
    assert_eq!(bed.step(0, 5).unwrap(), Ran::REPLAYED);
}

#[test]
fn equal_or_too_few_cases_are_refused() {
    let bed = Bed::new(plain(Method::Stream));
    let case = |v: u32| VerifyCase::of(vec![(bed.a, words(v))]);
    let refused = VerifySetup::new(vec![case(1), case(2), case(2)]).unwrap_err();
    assert_eq!(refused.to_string(), "a graph is verified with 3 different control-block states, got 2");
}

fn verified(
    bed: &mut Bed,
    recorded: &refrain_cuda::WarmPlan,
) -> Result<Verified<refrain_driver::Graph>, VerifyError> {
    let memory = bed.space.memory().clone();
    let options = RecordOptions::named("other");
    let graph = bed.stream.record(&memory, Method::Stream, &options, |q| recorded.enqueue(q)).unwrap();
    let check = bed.check().unwrap();
    verify(graph, &mut bed.stream, &mut bed.lease, &bed.warm, &check)
}

#[test]
fn a_value_baked_by_mistake_is_found_by_the_other_cases() {
    let mut bed = Bed::new(plain(Method::Stream));
    let mut frozen = refrain_cuda::WarmPlan::new("frozen", &bed.space);
    // The eager step computes b = a + a; the recording holds the value that b had.
    let fill = LaunchBuilder::new(&bed.fill, 1, 64).step("frozen");
    frozen.push(built(fill.write(bed.b).baked(Baked(6_u32)).baked(Baked(N))));
    bed.warm.work()[1..].iter().for_each(|w| frozen.push(w.clone()));
    match verified(&mut bed, &frozen) {
        Err(VerifyError::Mismatch { buffer, element: 0, case: 1, launch }) => {
            assert_eq!(buffer, "b", "the first case happens to agree: 3 + 3");
            assert!(launch.contains("double"), "{launch}");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_recording_without_one_of_the_writes_is_found_by_the_poison() {
    let mut bed = Bed::new(plain(Method::Stream));
    let mut short = refrain_cuda::WarmPlan::new("short", &bed.space);
    bed.warm.work()[..2].iter().for_each(|w| short.push(w.clone()));
    match verified(&mut bed, &short) {
        Err(VerifyError::Mismatch { buffer, case: 0, .. }) => assert_eq!(buffer, "cache"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_declared_tolerance_accepts_small_differences_only() {
    let value = |bits: u32| f32::from_bits(bits).to_bits();
    for (off, passes) in [(1_u32, true), (1 << 20, false)] {
        let mut bed = Bed::new(plain(Method::Stream));
        let fill = |bed: &Bed, v: u32| {
            let fill = LaunchBuilder::new(&bed.fill, 1, 64).step("loose");
            built(fill.write(bed.b).baked(Baked(v)).baked(Baked(N)))
        };
        let one = 1.0_f32.to_bits();
        let mut eager = refrain_cuda::WarmPlan::new("loose", &bed.space);
        eager.push(Work::Launch { launch: fill(&bed, one), tolerance: Some(1e-6) });
        let mut other = refrain_cuda::WarmPlan::new("loose", &bed.space);
        other.push(fill(&bed, value(one + off)));
        bed.warm = eager;
        match verified(&mut bed, &other) {
            Ok(graph) => assert!(passes && !graph.report().bit_exact),
            Err(error) => assert!(!passes, "{error}"),
        }
    }
}
