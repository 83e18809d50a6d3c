//! Cost of an entry in the ledger.

use std::hint::black_box;
use std::time::{Duration, Instant};

use refrain_engine::{Ledger, StepKind};
use refrain_graph::{Ran, Reason};

const PER_BATCH: u32 = 1_000;
const BATCHES: usize = 60;
/// The target on an idle machine is 200 ns; a shared machine gets ten times that.
const LIMIT: Duration = Duration::from_micros(2);

/// The cheapest of many batches: the cost of an entry without disturbances. Steps cycle through `ran`.
fn cheapest_entry(ran: &[Ran]) -> Duration {
    let mut ledger = Ledger::new();
    let batch = |_| {
        let start = Instant::now();
        for (i, ran) in (0..u64::from(PER_BATCH)).zip(ran.iter().cycle()) {
            let took = Duration::from_micros(black_box(140 + i % 8));
            ledger.ran(StepKind::Decode, 1, took, black_box(ran));
        }
        start.elapsed()
    };
    let cheapest = (0..BATCHES).map(batch).min().unwrap_or_default();
    assert_eq!(ledger.tally(StepKind::Decode).steps(), u64::from(PER_BATCH) * BATCHES as u64);
    cheapest / PER_BATCH
}

#[test]
fn an_entry_of_a_replayed_step_costs_next_to_nothing() {
    let cost = cheapest_entry(&[Ran::REPLAYED]);
    println!("an entry of a replayed step: {cost:?}");
    assert!(cost < LIMIT, "{cost:?}");
}

#[test]
fn an_entry_with_a_reason_that_repeats_costs_next_to_nothing() {
    for reason in [
        Reason::ReplayFailed { code: 700 },
        Reason::NotCapturable { label: "sample.logits".to_owned(), because: "reads logits back to the host" },
    ] {
        let label = reason.label();
        let cost = cheapest_entry(&[Ran::Eager(reason)]);
        println!("an entry of an eager step, {label}: {cost:?}");
        assert!(cost < LIMIT, "{label}: {cost:?}");
    }
}

#[test]
fn an_entry_with_a_changing_reason_stays_cheap_although_it_is_cloned_each_time() {
    let after = Reason::CaptureFailed { code: 901, last_launch: "layer 7 attention".to_owned() };
    let waits = |steps_left| Ran::Eager(Reason::BackingOff { steps_left, after: Box::new(after.clone()) });
    let cost = cheapest_entry(&(1..=8).rev().map(waits).collect::<Vec<_>>());
    println!("an entry of an eager step that backs off: {cost:?}");
    assert!(cost < LIMIT, "{cost:?}");
}
