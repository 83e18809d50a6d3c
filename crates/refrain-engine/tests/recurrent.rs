//! Sequences of a model with recurrent layers. At every step the runner checks that the slot it reads covers
//! exactly the preceding tokens.

mod common;

use common::{recurrent_core, recurrent_engine};
use refrain_engine::{
    DecodeRow, Engine, EngineError, FinishReason, LaunchPolicy, Lookahead, Pace, Request, SamplingParams,
    SamplingRow, SequenceState, TokenEvent, TokenStream,
};
use std::collections::VecDeque;

fn greedy(mut request: Request, max_tokens: usize) -> Request {
    (request.sampling, request.max_tokens) = (SamplingParams::greedy(), max_tokens);
    request
}

fn from(first: u32, n: u32) -> Vec<u32> {
    (first..first + n).collect()
}

fn collect(stream: TokenStream) -> (Vec<u32>, Result<FinishReason, EngineError>) {
    let mut tokens = Vec::new();
    for event in stream {
        match event {
            Ok(TokenEvent::Prompt { .. }) => {}
            Ok(TokenEvent::Token { token, .. }) => tokens.push(token),
            Ok(TokenEvent::End(finish)) => return (tokens, Ok(finish)),
            Err(error) => return (tokens, Err(error)),
        }
    }
    panic!("a stream without an end");
}

fn wait_until_idle(engine: &Engine) {
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(10);
    while engine.load().unwrap().n_running + engine.load().unwrap().n_waiting > 0 {
        assert!(std::time::Instant::now() < deadline, "{:?}", engine.load());
    }
}

#[test]
fn any_load_has_correct_states_and_loses_no_slot() {
    // Fewer states than sequences that could run, and blocks for only some of those.
    for (n_positions, n_slots) in [(64, 7), (256, 4), (40, 16)] {
        let (engine, script) = recurrent_engine(n_positions, 8, n_slots);
        script.allow(4);
        std::thread::scope(|scope| {
            for thread in 0..3u32 {
                let engine = engine.clone();
                scope.spawn(move || {
                    let mut open = VecDeque::new();
                    for i in 0..200u32 {
                        let first = 1 + (7 * thread + i) % 40;
                        let prompt = from(first, 1 + i % 13);
                        let (next, n) = (first + prompt.len() as u32, 1 + i % 12);
                        let mut request = greedy(Request::once(prompt), n as usize);
                        request.priority = (i % 2) as i32;
                        if i % 5 == 0 {
                            request.pace = Pace::OnDemand { lead: i as usize % 3 };
                        }
                        open.push_back((i, from(next, n), engine.submit(request).unwrap()));
                        if open.len() < 6 {
                            continue;
                        }
                        let (i, want, mut stream) = open.pop_front().unwrap();
                        match i % 5 {
                            0 => drop(stream),
                            1 => stream.stop(),
                            2 => engine.cancel(stream.id()),
                            _ => assert_eq!(collect(stream).0, want),
                        }
                    }
                });
            }
        });
        wait_until_idle(&engine);
        let load = engine.load().unwrap();
        assert_eq!((load.blocks.used, load.slots.free), (0, n_slots), "{load:?}");
        assert_eq!(load.blocks.cached, 0, "a prefix was cached without its state");
    }
}

#[test]
fn a_conversation_continues_from_its_state_and_starts_over_if_it_changes() {
    let (engine, script) = recurrent_engine(64, 16, 3);
    script.allow(4);
    let sequence = engine.open(64).unwrap();
    let ask = |prompt: Vec<u32>, n: usize| {
        let n_before = script.seen().len();
        let said = collect(engine.submit(greedy(Request::new(&sequence, prompt), n)).unwrap()).0;
        (said, script.seen()[n_before].start)
    };
    assert_eq!(ask(from(1, 5), 4), (from(6, 4), 0));
    // The last chosen token has not been evaluated.
    assert_eq!(ask(from(1, 12), 3), (from(13, 3), 8));
    // A shorter prompt: the state cannot be truncated.
    assert_eq!(ask(from(1, 9), 2), (from(10, 2), 0));
    // An edited answer: the state after the last prompt was saved.
    assert_eq!(ask([from(1, 9), from(20, 4)].concat(), 3), (from(24, 3), 9));
    assert_eq!(ask([from(1, 9), from(20, 4), from(40, 2)].concat(), 3), (from(42, 3), 13));
    // The state saved before that is gone.
    assert_eq!(ask(from(1, 9), 2), (from(10, 2), 0));
    // The same prompt again: its last token is always evaluated.
    assert_eq!(ask(from(1, 9), 2), (from(10, 2), 0));
    assert_eq!(ask(from(30, 3), 2), (from(33, 2), 0));
}

#[test]
fn a_state_that_advanced_too_far_is_evaluated_again() {
    let (mut core, script) = recurrent_core(64, 8, 2);
    script.allow(6);
    let mut sequence = core.open();
    let mut row = SamplingRow::new(&SamplingParams::greedy());
    let mut next = core.prompt(&mut sequence, &from(1, 11), &mut row, |_| true).unwrap().token;
    let ahead = Lookahead { n_tokens: 20, end: &[] };
    for want in 13..16 {
        next = core.decode_ahead(&mut sequence, next, &mut row, &ahead).unwrap().token;
        assert_eq!(next, want);
    }
    // Steps are in flight that nobody collects.
    core.drain();
    let n_before = script.seen().len();
    assert_eq!(core.decode(&mut sequence, next, &mut row).unwrap().token, 16);
    let again: Vec<(usize, usize)> =
        script.seen()[n_before..].iter().map(|s| (s.start, s.tokens.len())).collect();
    assert_eq!(again, [(0, 8), (8, 6), (14, 1)]);
    // Logits continue after it as well.
    core.logits(&mut sequence, &[16, 17], 1).unwrap();
    assert_eq!(sequence.tokens(), from(1, 17));
}

#[test]
fn opened_sequences_have_states_of_their_own_and_forks_start_over() {
    let (engine, script) = recurrent_engine(32, 16, 3);
    let one = engine.open(32).unwrap();
    let said =
        |sequence, prompt, n| collect(engine.submit(greedy(Request::new(sequence, prompt), n)).unwrap()).0;
    assert_eq!(said(&one, from(1, 8), 2), from(9, 2));
    // There is a state for one sequence: further ones make the pool grow.
    let fork = engine.fork(&one, 32).unwrap();
    let n_before = script.seen().len();
    assert_eq!(said(&fork, from(1, 10), 2), from(11, 2));
    assert_eq!(script.seen()[n_before].start, 0);
    assert_eq!(said(&one, from(1, 10), 2), from(11, 2));
    assert_eq!(engine.load().unwrap().slots.total, 6);
    // All states are reserved: none is left for a request without a sequence.
    let refused = engine.submit(greedy(Request::once(from(1, 2)), 1));
    assert!(refused.is_err());
    drop(fork);
    assert_eq!(collect(engine.submit(greedy(Request::once(from(1, 2)), 1)).unwrap()).0, [3]);
}

#[test]
fn a_sequence_that_left_rejoins_only_with_its_state() {
    let (mut core, script) = recurrent_core(128, 8, 4);
    script.allow(4);
    let many = Lookahead { n_tokens: 30, end: &[] };
    let mut texts: Vec<(SequenceState, SamplingRow, u32)> = [1, 40]
        .map(|first| {
            let (mut sequence, mut row) = (core.open(), SamplingRow::new(&SamplingParams::greedy()));
            let next = core.prompt(&mut sequence, &from(first, 3), &mut row, |_| true).unwrap().token;
            (sequence, row, next)
        })
        .into();
    let mut step = |texts: &mut [(SequenceState, SamplingRow, u32)]| {
        let mut rows = Vec::new();
        for (sequence, row, next) in texts.iter_mut() {
            rows.push(DecodeRow { sequence, token: *next, row, ahead: many });
        }
        let choices = core.decode_rows(&mut rows, LaunchPolicy::LaunchAhead).unwrap().choices;
        drop(rows);
        for ((_, _, next), choice) in texts.iter_mut().zip(choices) {
            if let Some(chosen) = choice {
                let token = chosen.unwrap().token;
                assert_eq!(token, *next + 1);
                *next = token;
            }
        }
    };
    for n_others in [1, 2, 3] {
        step(&mut texts);
        step(&mut texts);
        // In-flight steps evaluate tokens of the first sequence that nobody collects.
        for _ in 0..n_others {
            step(&mut texts[1..]);
        }
        let before = texts[0].2;
        for _ in 0..12 {
            step(&mut texts);
        }
        assert!(texts[0].2 > before, "the first one continues");
    }
}
