//! Runs the protocols of `src/protocol` through every interleaving and every value that the memory model allows a
//! load to see. loom also reports unordered accesses of an `UnsafeCell`, and threads that wait forever.
//!
//! Next to the models that must pass is one that must fail, to show that the property can be violated.

#![expect(
    clippy::arc_with_non_send_sync,
    reason = "loom checks what `Sync` would guarantee, and its threads do not require it"
)]

#[path = "loom_common/mod.rs"]
mod sync;

#[allow(dead_code, reason = "the entries of a loop are counted by one thread")]
#[path = "../src/protocol/entries.rs"]
mod entries;
#[expect(dead_code, reason = "filling the bin at the end of a device is not concurrent with anything")]
#[path = "../src/protocol/gate.rs"]
mod gate;
#[path = "../src/protocol/busy.rs"]
mod busy;
#[expect(dead_code, reason = "a model has no clock to wait by")]
#[path = "../src/protocol/watch.rs"]
mod watch;

use std::sync::Arc; // not loom's, so that it orders nothing in a model
use std::time::Duration;

use loom::cell::UnsafeCell;
use loom::model;
use loom::thread;

use busy::BusyState;
use entries::{Entries, Next};
use gate::RecordingGate;
use sync::{AtomicBool, AtomicU64, Ordering};
use watch::{Watch, WatchDecision};

/// A ring as both sides see it. `sent` represents the launches, which the device runs after the host has made them.
struct Ring {
    sent: AtomicU64,
    consumed: AtomicU64,
    seqs: Vec<AtomicU64>,
    payloads: Vec<UnsafeCell<u64>>,
}

impl Ring {
    fn new(n_entries: u64) -> Arc<Ring> {
        Arc::new(Ring {
            sent: AtomicU64::new(0),
            consumed: AtomicU64::new(0),
            seqs: (0..n_entries).map(|_| AtomicU64::new(0)).collect(),
            payloads: (0..n_entries).map(|_| UnsafeCell::new(0)).collect(),
        })
    }

    /// Imitates the kernel that writes result `k`.
    fn produce(&self, k: u64, order: Ordering) {
        let idx = ((k - 1) % self.seqs.len() as u64) as usize;
        // SAFETY: loom checks that the host does not access the payload at the same time.
        self.payloads[idx].with_mut(|p| unsafe { *p = 100 + k });
        self.seqs[idx].store(k, order);
    }

    fn take(&self, entries: &mut Entries) -> (Next, u64) {
        let idx = entries.next_idx() as usize;
        let mut payload = 0;
        // SAFETY: as in `produce`, for the device.
        let read = || payload = self.payloads[idx].with(|p| unsafe { *p });
        (entries.take(&self.seqs[idx], &self.consumed, read), payload)
    }
}

/// The host launches `n_results` steps, as far ahead as allowed, on a device that stores its numbers with `order`.
fn ring_with_back_pressure(n_entries: u64, n_results: u64, order: Ordering) {
    let ring = Ring::new(n_entries);
    let shared = Arc::clone(&ring);
    let device = thread::spawn(move || {
        for k in 1..=n_results {
            while shared.sent.load(Ordering::Acquire) < k {
                thread::yield_now();
            }
            shared.produce(k, order);
        }
    });
    let (mut entries, mut n_sent, mut n_got) = (Entries::new(n_entries), 0, 0);
    while n_got < n_results {
        while n_sent < n_results && entries.reserve() {
            n_sent += 1;
            ring.sent.store(n_sent, Ordering::Release);
        }
        assert!(entries.n_pending() <= n_entries);
        match ring.take(&mut entries) {
            (Next::Taken(k), payload) => {
                n_got += 1;
                assert_eq!((k, payload), (n_got, 100 + n_got));
            }
            (Next::Pending, _) => thread::yield_now(),
            (Next::Overrun { expected, found }, _) => panic!("expected {expected}, found {found}"),
        }
    }
    assert_eq!((entries.n_pending(), entries.n_taken()), (0, n_results));
    assert_eq!(ring.consumed.load(Ordering::Relaxed), n_results);
    device.join().unwrap();
}

#[test]
fn every_result_of_a_ring_is_read_whole_and_in_order() {
    model(|| ring_with_back_pressure(1, 2, Ordering::Release));
    // Without a bound this one takes seconds.
    let mut bounded = loom::model::Builder::new();
    bounded.preemption_bound = Some(3);
    bounded.check(|| ring_with_back_pressure(2, 3, Ordering::Release));
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_device_that_stores_its_number_without_release_is_detected() {
    model(|| ring_with_back_pressure(1, 1, Ordering::Relaxed));
}

#[test]
fn a_device_that_waits_for_the_consumed_count_never_overwrites_a_result() {
    model(|| {
        let ring = Ring::new(1);
        let shared = Arc::clone(&ring);
        let device = thread::spawn(move || {
            for k in 1..=2 {
                while shared.consumed.load(Ordering::Acquire) + 1 < k {
                    thread::yield_now();
                }
                shared.produce(k, Ordering::Release);
            }
        });
        let mut entries = Entries::new(1);
        for k in 1..=2 {
            let payload = loop {
                match ring.take(&mut entries) {
                    (Next::Pending, _) => thread::yield_now(),
                    (next, payload) => {
                        assert_eq!(next, Next::Taken(k));
                        break payload;
                    }
                }
            };
            assert_eq!(payload, 100 + k);
        }
        device.join().unwrap();
    });
}

#[test]
fn a_result_without_a_reservation_is_reported_as_an_overrun() {
    model(|| {
        let ring = Ring::new(1);
        let shared = Arc::clone(&ring);
        // Both before the host checks: nothing is torn, so the report is the only effect.
        let device = thread::spawn(move || (1..=2).for_each(|k| shared.produce(k, Ordering::Release)));
        device.join().unwrap();
        let mut entries = Entries::new(1);
        assert_eq!(ring.take(&mut entries).0, Next::Overrun { expected: 1, found: 2 });
    });
}

#[test]
fn one_of_two_threads_owns_the_device_and_hands_it_on_whole() {
    model(|| {
        let gate = Arc::new(RecordingGate::<u32>::new());
        let device = Arc::new(UnsafeCell::new(0));
        let use_it = |tag: u64| {
            let (gate, device) = (Arc::clone(&gate), Arc::clone(&device));
            move || {
                let mine = gate.claim(tag);
                if mine {
                    // SAFETY: loom checks that there is only one owner.
                    device.with_mut(|d| unsafe { *d += 1 });
                    gate.unclaim();
                }
                mine
            }
        };
        let other = thread::spawn(use_it(1));
        let here = use_it(2)();
        let there = other.join().unwrap();
        assert!(here || there);
        // SAFETY: the other thread has been joined.
        assert_eq!(device.with(|d| unsafe { *d }), u32::from(here) + u32::from(there));
    });
}

#[test]
fn an_object_discarded_on_another_thread_is_freed_once_by_the_owner_and_never_during_a_recording() {
    const OWNER: u64 = 1;
    model(|| {
        let gate = Arc::new(RecordingGate::new());
        assert!(gate.claim(OWNER));
        let thrower = Arc::clone(&gate);
        let other = thread::spawn(move || {
            for garbage in [10, 11] {
                assert_eq!(thrower.discard(garbage, 2), None, "only the owner frees at once");
            }
        });
        let mut freed = gate.empty();
        gate.set_recording(true);
        assert_eq!(gate.discard(20, OWNER), None, "nothing is freed during a recording");
        assert_eq!(gate.empty(), [0; 0]);
        gate.set_recording(false);
        freed.extend(gate.empty());
        freed.extend(gate.discard(21, OWNER));
        other.join().unwrap();
        freed.extend(gate.empty());
        freed.sort_unstable();
        assert_eq!((freed, gate.n_kept()), (vec![10, 11, 20, 21], 0));
    });
}

#[test]
fn an_object_discarded_while_the_owner_leaves_is_left_for_the_next_owner() {
    model(|| {
        let gate = Arc::new(RecordingGate::new());
        assert!(gate.claim(1));
        let thrower = Arc::clone(&gate);
        let other = thread::spawn(move || assert_eq!(thrower.discard(10, 2), None));
        let mut freed = gate.empty();
        gate.unclaim();
        assert!(gate.claim(3));
        other.join().unwrap();
        freed.extend(gate.empty());
        assert_eq!(freed, [10]);
    });
}

#[test]
fn a_thread_that_sees_a_recording_end_sees_all_of_it() {
    model(|| {
        let gate = Arc::new(RecordingGate::<u32>::new());
        let recorded = Arc::new(UnsafeCell::new(0));
        gate.set_recording(true);
        let (asker, result) = (Arc::clone(&gate), Arc::clone(&recorded));
        let other = thread::spawn(move || {
            // Refused while this is true, so the call is not made.
            if !asker.is_recording() {
                // SAFETY: loom checks that the owner is done with it.
                assert_eq!(result.with(|r| unsafe { *r }), 7);
            }
        });
        // SAFETY: the other thread accesses it only after the recording has ended.
        recorded.with_mut(|r| unsafe { *r = 7 });
        gate.set_recording(false);
        other.join().unwrap();
    });
}

/// A recording as the watchdog sees it.
struct Armed {
    capturing: bool,
    barked: Arc<AtomicBool>,
}

/// Makes recordings whose deadline passes at a moment that loom chooses. With `notify`, the owner notifies the
/// watchdog before it ends the capture.
fn watched_recordings(n: usize, notify: bool) {
    let watch = Arc::new(Watch::<Armed>::new());
    let capture = Arc::new(UnsafeCell::new(false));
    let (watching, queried) = (Arc::clone(&watch), Arc::clone(&capture));
    let watchdog = thread::spawn(move || {
        watching.run(
            |armed| {
                if armed.barked.swap(true, Ordering::AcqRel) {
                    WatchDecision::Idle
                } else {
                    WatchDecision::Act(armed.capturing)
                }
            },
            |capturing| {
                if capturing {
                    // SAFETY: loom checks that the owner neither begins nor ends the capture at the same time.
                    assert!(queried.with(|c| unsafe { *c }), "a capture was accessed after its end");
                }
            },
        );
    });
    for _ in 0..n {
        let barked = Arc::new(AtomicBool::new(false));
        watch.arm(Armed { capturing: false, barked });
        // SAFETY: the watchdog accesses the capture only between the two edits.
        capture.with_mut(|c| unsafe { *c = true });
        assert!(watch.edit(Duration::MAX, |armed| armed.capturing = true));
        if notify {
            assert!(watch.edit(Duration::MAX, |armed| armed.capturing = false));
        }
        // SAFETY: as above.
        capture.with_mut(|c| unsafe { *c = false });
        watch.disarm();
    }
    watch.quit();
    watchdog.join().unwrap();
}

#[test]
fn a_watchdog_never_touches_a_capture_that_has_ended() {
    model(|| watched_recordings(1, true));
}

#[test]
fn a_late_alarm_for_one_recording_does_not_reach_the_next() {
    model(|| watched_recordings(2, true));
}

#[test]
#[should_panic(expected = "Causality violation")]
fn an_owner_that_does_not_wait_for_the_watchdog_is_detected() {
    model(|| watched_recordings(1, false));
}

#[test]
fn a_thread_that_replies_late_is_not_stuck_forever() {
    model(|| {
        let busy_state = Arc::new(BusyState::new());
        let working = Arc::clone(&busy_state);
        let device = thread::spawn(move || {
            for what in ["first", "second"] {
                working.begin(what);
                working.finish();
            }
            working.end();
        });
        // A caller whose deadline passes at any moment: before, during, between or after the requests.
        let busy = busy_state.give_up();
        assert!(matches!(busy, None | Some("first" | "second")), "{busy:?}");
        device.join().unwrap();
        assert!(busy_state.has_ended());
        assert!(!busy_state.is_stuck(), "given up during {busy:?}");
        assert_eq!(busy_state.give_up(), None);
        assert!(!busy_state.is_stuck(), "an idle thread is not stuck");
    });
}

#[test]
fn a_thread_is_stuck_exactly_while_the_request_given_up_on_lasts() {
    model(|| {
        let busy_state = Arc::new(BusyState::new());
        busy_state.begin("long");
        let caller = Arc::clone(&busy_state);
        let other = thread::spawn(move || caller.give_up().is_some());
        let stuck_inside = busy_state.is_stuck();
        busy_state.finish();
        let gave_up = other.join().unwrap();
        assert!(gave_up || !stuck_inside);
        assert!(!busy_state.is_stuck());
        busy_state.begin("next");
        assert!(!busy_state.is_stuck(), "a new request starts fresh");
        assert_eq!(busy_state.give_up(), Some("next"));
        assert!(busy_state.is_stuck());
    });
}
