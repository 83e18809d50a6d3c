//! Steps launched ahead: which steps, with which blocks, and what happens when the caller does something
//! else.

mod common;

use common::{KV_BLOCK, core, tiny_model};
use refrain_engine::{
    BackendRunner, Core, DecodeRow, EngineError, HISTORY, LaunchPolicy, Lookahead, RunMember, RunShape,
    Runner, RunnerOptions, SamplingParams, SamplingRow, SequenceState, StepKind, StepOut, StepRequest, Want,
};
use refrain_graph::{
    Backend, CompileError, ControlLayout, Graph, Io, Plan, PlanOptions, Query, Ran, Reason, RunError, State,
    Support, Weight,
};
use refrain_tensor::HostTensor;
use std::sync::{Arc, Mutex};

fn row() -> SamplingRow {
    SamplingRow::new(&SamplingParams::greedy())
}

fn upto(n: u32) -> Vec<u32> {
    (0..n).collect()
}

fn broken() -> RunError {
    let source = Box::new(std::io::Error::other("the cable is cut"));
    RunError::Backend { backend: "fake", label: "blk.0.attn_q".into(), source }
}

#[test]
fn steps_are_launched_in_batches_with_the_blocks_they_need() {
    let (mut core, script) = core(64, 8);
    script.allow(4);
    let mut session = core.open();
    let mut next = core.prompt(&mut session, &upto(5), &mut row(), |_| true).unwrap().token;
    let mut n_seen = Vec::new();
    for n_tokens in (1..=10).rev() {
        let ahead = Lookahead { n_tokens, end: &[] };
        let chosen = core.decode_ahead(&mut session, next, &mut row(), &ahead).unwrap();
        assert_eq!(chosen.token, next + 1);
        next = chosen.token;
        n_seen.push(script.seen().len() - 1);
    }
    // Four at once, two more whenever two are left, and none after the tenth.
    assert_eq!(n_seen, [4, 4, 6, 6, 8, 8, 10, 10, 10, 10]);
    assert_eq!(session.tokens(), upto(15));
    for (i, seen) in script.seen()[1..].iter().enumerate() {
        assert_eq!((seen.start, &seen.tokens[..]), (5 + i, &[5 + i as u32][..]));
        assert!(seen.table.len() * KV_BLOCK > seen.start, "{seen:?}");
    }
    core.drain();
    let tally = core.ledger().tally(StepKind::Decode);
    assert_eq!((tally.steps(), tally.discarded), (10, 0));
}

#[test]
fn steps_in_flight_are_discarded_when_the_caller_does_something_else() {
    let (mut core, script) = core(64, 8);
    script.allow(4);
    let many = Lookahead { n_tokens: 100, end: &[] };
    let mut session = core.open();
    core.prompt(&mut session, &upto(3), &mut row(), |_| true).unwrap();
    assert_eq!(core.decode_ahead(&mut session, 3, &mut row(), &many).unwrap().token, 4);
    // A token other than the chosen one.
    assert_eq!(core.decode_ahead(&mut session, 40, &mut row(), &many).unwrap().token, 41);
    assert_eq!(core.ledger().tally(StepKind::Decode).discarded, 3);
    // Different sampling rules.
    let mut random = SamplingRow::new(&SamplingParams::default());
    assert_eq!(core.decode_ahead(&mut session, 41, &mut random, &many).unwrap().token, 42);
    assert_eq!(core.ledger().tally(StepKind::Decode).discarded, 6);
    // Different end tokens.
    let end = Lookahead { end: &[43], ..many };
    assert_eq!(core.decode_ahead(&mut session, 42, &mut random, &end).unwrap().token, 43);
    assert_eq!(core.ledger().tally(StepKind::Decode).discarded, 9);
    // The run has ended; a caller that continues anyway is served.
    assert_eq!(core.decode_ahead(&mut session, 43, &mut random, &end).unwrap().token, 44);
    // Another session, then a prompt.
    let mut other = core.open();
    assert_eq!(core.decode_ahead(&mut other, 9, &mut row(), &many).unwrap().token, 10);
    assert_eq!((session.tokens(), other.tokens()), (&[0, 1, 2, 3, 40, 41, 42, 43][..], &[9][..]));
    core.prompt(&mut session, &[0, 1, 2, 3, 40, 41, 50], &mut row(), |_| true).unwrap();
    assert_eq!(script.seen().last().unwrap().start, 6);
    let tally = core.ledger().tally(StepKind::Decode);
    assert_eq!((tally.steps(), tally.discarded, tally.failed), (6, 18, 0));
    assert_eq!(
        tally.to_string().split(" (").next(),
        Some("6 steps, 0 replayed, 6 eager, 18 speculative steps discarded")
    );
}

#[test]
fn a_failure_of_a_step_launched_ahead_is_reported_in_turn() {
    let (mut core, script) = core(64, 8);
    script.allow(4);
    let many = Lookahead { n_tokens: 100, end: &[] };
    let mut session = core.open();
    core.prompt(&mut session, &upto(3), &mut row(), |_| true).unwrap();
    script.fail_after(2, broken());
    assert_eq!(core.decode_ahead(&mut session, 3, &mut row(), &many).unwrap().token, 4);
    assert_eq!(core.decode_ahead(&mut session, 4, &mut row(), &many).unwrap().token, 5);
    assert!(matches!(core.decode_ahead(&mut session, 5, &mut row(), &many), Err(EngineError::Run(_))));
    assert_eq!(session.tokens(), upto(5));
    // The session is unchanged and can continue.
    assert_eq!(core.decode_ahead(&mut session, 5, &mut row(), &many).unwrap().token, 6);
    assert_eq!(core.ledger().tally(StepKind::Decode).failed, 1);
}

#[test]
fn launching_ahead_does_not_wait_for_blocks_of_other_sessions() {
    let (mut core, script) = core(32, 32);
    script.allow(8);
    let many = Lookahead { n_tokens: 100, end: &[] };
    let (mut other, mut session) = (core.open(), core.open());
    core.prompt(&mut other, &upto(24), &mut row(), |_| true).unwrap();
    let mut next = core.prompt(&mut session, &upto(3), &mut row(), |_| true).unwrap().token;
    for _ in 0..5 {
        next = core.decode_ahead(&mut session, next, &mut row(), &many).unwrap().token;
    }
    assert_eq!(session.tokens(), upto(8));
    let full = core.decode_ahead(&mut session, next, &mut row(), &many).unwrap_err();
    assert!(matches!(full, EngineError::OutOfBlocks(_)), "{full}");
    core.close(other);
    assert_eq!(core.decode_ahead(&mut session, next, &mut row(), &many).unwrap().token, 9);
}

#[test]
fn a_reply_that_the_device_repeats_is_requested_whole_or_in_windows_of_what_fits() {
    let (mut core, script) = core(64, 64);
    script.allow(usize::MAX);
    let mut session = core.open();
    let mut next = core.prompt(&mut session, &upto(3), &mut row(), |_| true).unwrap().token;
    let before = script.seen().len();
    for n_tokens in (1..=20).rev() {
        let ahead = Lookahead { n_tokens, end: &[] };
        next = core.decode_ahead(&mut session, next, &mut row(), &ahead).unwrap().token;
        assert_eq!(script.seen().len() - before, 20, "all steps are launched at once");
    }
    core.close(session);
    // Another session holds all but one block of the pool.
    let (mut other, mut session) = (core.open(), core.open());
    core.prompt(&mut other, &upto(64 - 16), &mut row(), |_| true).unwrap();
    let mut next_too = core.prompt(&mut session, &upto(3), &mut row(), |_| true).unwrap().token;
    let before = script.seen().len();
    let n_free = 16 - 3;
    let mut n_launches = 0;
    let mut n_seen = 0;
    for i in 0..n_free {
        let ahead = Lookahead { n_tokens: 60, end: &[] };
        next_too = core.decode_ahead(&mut session, next_too, &mut row(), &ahead).unwrap().token;
        let n = script.seen().len() - before;
        n_launches += usize::from(n > n_seen);
        n_seen = n;
        assert!(n > i && n <= n_free, "{n}");
    }
    assert!(n_launches <= 4, "{n_launches} windows for {n_free} steps");
    let full = core.decode_ahead(&mut session, next_too, &mut row(), &Lookahead { n_tokens: 60, end: &[] });
    assert!(matches!(full, Err(EngineError::OutOfBlocks(_))), "{full:?}");
    assert_eq!(next, 23);
}

#[test]
fn a_sequence_that_joins_does_not_wait_for_a_reply_that_the_device_repeats() {
    let (mut core, script) = core(64, 64);
    script.allow(usize::MAX);
    let mut texts = texts(&mut core, 2);
    let [one, two] = &mut texts[..] else { panic!() };
    let ahead = Lookahead { n_tokens: 30, end: &[] };
    (0..3).for_each(|call| step(&mut core, call, &mut [one], ahead));
    // The loop of the first is given up, and both go on together at once.
    step(&mut core, 3, &mut [one, two], ahead);
    assert_eq!((one.got_at.len(), two.got_at.len()), (4, 1));
    assert!(core.ledger().tally(StepKind::Decode).discarded > 0);
}

/// A sequence that counts upwards from its own start.
struct Text {
    session: SequenceState,
    next: u32,
    row: SamplingRow,
    /// The calls of [`step`] that returned a token for it.
    got_at: Vec<usize>,
}

fn texts(core: &mut Core, n: usize) -> Vec<Text> {
    let text = |i: usize| {
        let (mut session, mut row) = (core.open(), row());
        let next = core.prompt(&mut session, &[10 * i as u32], &mut row, |_| true).unwrap().token;
        Text { session, next, row, got_at: Vec::new() }
    };
    (0..n).map(text).collect()
}

fn step(core: &mut Core, call: usize, texts: &mut [&mut Text], ahead: Lookahead<'_>) {
    let mut rows: Vec<DecodeRow<'_>> = Vec::new();
    for text in texts.iter_mut() {
        rows.push(DecodeRow { sequence: &mut text.session, token: text.next, row: &mut text.row, ahead });
    }
    let choices = core.decode_rows(&mut rows, LaunchPolicy::LaunchAhead).unwrap().choices;
    for (text, choice) in texts.iter_mut().zip(choices) {
        if let Some(chosen) = choice {
            let token = chosen.unwrap().token;
            assert_eq!(token, text.next + 1);
            text.next = token;
            text.got_at.push(call);
        }
    }
}

#[test]
fn a_sequence_joins_after_the_steps_in_flight_and_nobody_waits_for_it() {
    const MAX_IN_FLIGHT: usize = 4;
    let many = Lookahead { n_tokens: 100, end: &[] };
    // The third finds the run of two full, so another run begins; the fourth takes a free row of that one.
    let (mut core, script) = core(256, 8);
    script.allow(MAX_IN_FLIGHT);
    let mut all = texts(&mut core, 4);
    let joins_at = [0, 0, 5, 13];
    for call in 0..25 {
        let mut present: Vec<&mut Text> =
            all.iter_mut().zip(joins_at).filter(|(_, at)| *at <= call).map(|(text, _)| text).collect();
        step(&mut core, call, &mut present, many);
    }
    for (text, joined) in all.iter().zip(joins_at) {
        let first = text.got_at[0];
        assert!(first - joined <= MAX_IN_FLIGHT, "joined at {joined}, served from {first}");
        assert_eq!(text.got_at, (first..25).collect::<Vec<_>>(), "joined at {joined}");
    }
    assert!(all[3].got_at[0] > 13, "steps were in flight");
    core.drain();
    let tally = core.ledger().tally(StepKind::Decode);
    assert_eq!((tally.steps(), tally.failed), (25, 0));
    assert!(tally.discarded <= MAX_IN_FLIGHT as u64, "{tally}");
    assert_eq!(tally.tokens as usize, all.iter().map(|text| text.got_at.len()).sum::<usize>());
}

#[test]
fn a_sequence_that_leaves_costs_the_others_nothing_and_resumes_where_it_was() {
    let many = Lookahead { n_tokens: 100, end: &[] };
    let (mut core, script) = core(256, 8);
    script.allow(4);
    let mut all = texts(&mut core, 4);
    for call in 0..30 {
        // The second is absent for some calls, repeatedly; it never continues from a token that nobody
        // received.
        let is_away = |i: usize| i == 1 && call % 7 > 3;
        let mut present: Vec<&mut Text> =
            all.iter_mut().enumerate().filter(|(i, _)| !is_away(*i)).map(|(_, text)| text).collect();
        step(&mut core, call, &mut present, many);
    }
    for i in [0, 2, 3] {
        assert_eq!(all[i].got_at, (0..30).collect::<Vec<_>>(), "sequence {i}");
    }
    let mut away: Vec<u32> = all[1].session.tokens().to_vec();
    assert!(all[1].got_at.len() >= 5, "{:?}", all[1].got_at);
    away.push(all[1].next);
    assert_eq!(away, (10..10 + away.len() as u32).collect::<Vec<_>>());
    // Its steps that were in flight when it left are in its own ledger.
    assert!(script.seen().len() > 100);
}

#[test]
fn short_rows_end_by_themselves_and_steps_are_launched_for_the_longest() {
    let (mut core, script) = core(256, 8);
    script.allow(4);
    let mut all = texts(&mut core, 3);
    let n_before = script.seen().len();
    let mut left = [3usize, 9, 5];
    while left.iter().any(|n| *n > 0) {
        let mut rows: Vec<DecodeRow<'_>> = Vec::new();
        for (text, n_tokens) in all.iter_mut().zip(left).filter(|(_, n)| *n > 0) {
            let ahead = Lookahead { n_tokens, end: &[] };
            rows.push(DecodeRow { sequence: &mut text.session, token: text.next, row: &mut text.row, ahead });
        }
        let choices = core.decode_rows(&mut rows, LaunchPolicy::LaunchAhead).unwrap().choices;
        drop(rows);
        let present = all.iter_mut().zip(&mut left).filter(|(_, n)| **n > 0);
        for ((text, left), choice) in present.zip(choices) {
            if let Some(chosen) = choice {
                (text.next, *left) = (chosen.unwrap().token, *left - 1);
            }
        }
    }
    core.drain();
    // Not one step of a row more than requested.
    assert_eq!(script.seen().len() - n_before, 3 + 9 + 5);
    assert_eq!(core.ledger().tally(StepKind::Decode).discarded, 0);
}

/// A control block and its layout.
type Block = (ControlLayout, Vec<u8>);

/// A backend that records every control block and chooses by a fixed rule.
struct Keeping {
    blocks: Arc<Mutex<Vec<Block>>>,
}

impl Backend for Keeping {
    type Weights = ();
    type States = ();
    type Compiled = Plan;

    fn name(&self) -> &'static str {
        "keeping"
    }

    fn buckets(&self) -> &[usize] {
        &[1, 8]
    }

    fn supports(&self, _: &Query<'_>) -> Support {
        Support::Yes
    }

    fn load(&self, _: &[Weight], _: Vec<HostTensor>) -> Result<(), RunError> {
        Ok(())
    }

    fn allocate(&self, _: &[State]) -> Result<(), RunError> {
        Ok(())
    }

    fn compile(&self, graph: &Graph) -> Result<Plan, CompileError> {
        Ok(Plan::new(graph, PlanOptions::default())?)
    }

    fn plan<'c>(&self, compiled: &'c Plan) -> &'c Plan {
        compiled
    }

    fn run(&mut self, plan: &mut Plan, io: Io<'_, Self>) -> Result<Ran, RunError> {
        self.blocks.lock().unwrap().push((plan.control().clone(), io.control.to_vec()));
        Ok(Ran::Eager(Reason::NoGraphsHere { backend: "keeping" }))
    }

    fn read(&mut self, compiled: &Plan, output: usize, into: &mut [u8]) -> Result<(), RunError> {
        let n = self.blocks.lock().unwrap().len() as u32;
        let is_token = Some(output) == compiled.output("token");
        into.copy_from_slice(&if is_token { (n * 37 % 23).to_le_bytes() } else { (-1f32).to_le_bytes() });
        Ok(())
    }
}

fn words((layout, block): &Block, name: &str) -> Vec<i32> {
    let slot = layout.slot(layout.find(name).unwrap());
    let bytes = &block[slot.offset..slot.offset + slot.bytes];
    bytes.chunks_exact(4).map(|w| i32::from_le_bytes(w.try_into().unwrap())).collect()
}

#[test]
fn a_self_fed_step_has_the_same_inputs_as_a_single_step() {
    const START: usize = 3;
    for window in [0, 1, 5, 40, HISTORY, usize::MAX] {
        let params = SamplingParams {
            penalty_window: window,
            repeat_penalty: 1.1,
            seed: 0x1234_5678_9ABC,
            ..SamplingParams::default()
        };
        let blocks = Arc::new(Mutex::new(Vec::new()));
        let options = RunnerOptions { context: 512, ..RunnerOptions::default() };
        let backend = Keeping { blocks: blocks.clone() };
        let mut runner = BackendRunner::new(backend, tiny_model(), options).unwrap();
        let table: Vec<u32> = (0..16).rev().collect();
        let (mut tokens, mut row, mut n_table) = (vec![7, 8, 9, 1], SamplingRow::new(&params), 1);
        row.advance(START + 1, &tokens);
        let want = Want::Sample(&row);
        let request = StepRequest {
            tokens: &tokens[START..],
            start: START,
            table: &table[..1],
            slots: [-1; 2],
            adapter: None,
            want,
        };
        let end = &[u32::MAX];
        let with = RunMember { request, n_positions: START + 300, n_choices: usize::MAX, end };
        let n_history = window.min(START + 300);
        let wanted = RunShape { n_rows: 1, n_history, is_masked: false, has_top: false };
        let shape = runner.run_shape(wanted);
        assert_eq!(shape.n_history, if window > HISTORY { 4 * HISTORY } else { HISTORY });
        assert_eq!(runner.begin(&[with], shape).unwrap(), 1);
        let mut ended = false;
        while !ended {
            n_table = tokens.len().div_ceil(32).max(n_table);
            runner.set_table(0, &table[..n_table]).unwrap();
            runner.launch(1).unwrap();
            let committed = runner.collect().unwrap().rows[0].unwrap();
            tokens.push(committed.token);
            ended = committed.ended();
        }
        assert_eq!(tokens.len(), START + 1 + 300, "it ends when no positions are left");
        assert_eq!(runner.finish().unwrap(), 0);

        let fed = std::mem::take(&mut *blocks.lock().unwrap());
        for (i, fed) in fed.iter().enumerate() {
            let n = START + i;
            row.advance(n + 1, &tokens[..=n]);
            let table = &table[..(n + 1).div_ceil(32)];
            let request = StepRequest {
                tokens: &tokens[n..=n],
                start: n,
                table,
                slots: [-1; 2],
                adapter: None,
                want: Want::Sample(&row),
            };
            runner.step(&[request], &mut StepOut::default()).unwrap();
            let alone = blocks.lock().unwrap().pop().unwrap();
            for name in ["tokens", "positions", "seqs", "tables", "params", "rng", "bias_ids", "bias"] {
                assert_eq!(words(fed, name), words(&alone, name), "{name} of step {i}");
            }
            // The same tokens; neither their order nor the capacity matters.
            let held = |block: &Block| {
                let mut held = words(block, "history");
                held.retain(|token| *token >= 0);
                held.sort_unstable();
                held
            };
            let mut want: Vec<i32> =
                tokens[(n + 1).saturating_sub(window)..=n].iter().map(|t| *t as i32).collect();
            want.sort_unstable();
            assert_eq!(held(fed), want, "history of step {i}, window {window}");
            assert_eq!(held(&alone), want, "history of step {i}, window {window}");
        }
    }
}
