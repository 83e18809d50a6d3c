//! Many requests at once, with a runner that keeps a log.

mod common;

use common::{KV_BLOCK, engine, shared_engine};
use refrain_engine::{
    BlockCounts, Engine, EngineError, FinishReason, Pace, Request, SamplingParams, StepKind, TokenEvent,
    TokenStream,
};
use std::collections::VecDeque;

fn once(prompt: Vec<u32>, max_tokens: usize) -> Request {
    let mut request = Request::once(prompt);
    (request.sampling, request.max_tokens) = (SamplingParams::greedy(), max_tokens);
    request
}

/// The tokens of a stream, and how it ended.
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

fn counts(engine: &Engine) -> BlockCounts {
    engine.load().unwrap().blocks
}

#[test]
fn requests_without_a_sequence_share_prefixes_and_leave_no_block_in_use() {
    let (engine, script) = shared_engine(64, 16, 8);
    let prompt: Vec<u32> = (0..11).collect();
    assert_eq!(collect(engine.submit(once(prompt.clone(), 3)).unwrap()).0, [11, 12, 13]);
    let after = counts(&engine);
    assert_eq!((after.used, after.cached), (0, 13 / KV_BLOCK));
    assert_eq!(collect(engine.submit(once(prompt, 3)).unwrap()).0, [11, 12, 13]);
    let (first, second) = (script.seen()[0].clone(), script.seen()[3].clone());
    assert_eq!((first.start, second.start), (0, 8), "two blocks of four were found");
    assert_eq!(first.table[..2], second.table[..2]);
    let after = counts(&engine);
    assert_eq!((after.used, after.free + after.cached), (0, after.total));
}

#[test]
fn a_request_that_shares_no_prefix_neither_finds_blocks_nor_leaves_any() {
    let (engine, script) = shared_engine(64, 16, 8);
    for shares_prefix in [false, true, false, true] {
        let mut request = once((0..11).collect(), 3);
        request.shares_prefix = shares_prefix;
        assert_eq!(collect(engine.submit(request).unwrap()).0, [11, 12, 13]);
    }
    let starts: Vec<usize> = script.seen().iter().step_by(3).map(|step| step.start).collect();
    assert_eq!(starts, [0, 0, 0, 8], "only the last one finds the second one's blocks");
    let prompts = engine.load().unwrap().prompts;
    assert_eq!((prompts.n_tokens, prompts.n_cached), (44, 8));
}

#[test]
fn a_request_that_could_not_finish_alone_is_refused_with_the_numbers() {
    let (engine, script) = shared_engine(64, 16, 8);
    let error = engine.submit(once(vec![1; 60], 6)).err().unwrap();
    let text = "the prompt has 60 tokens and 6 more were requested, the KV cache holds 64 for one request";
    assert_eq!(error.to_string(), text);
    assert!(error.hint().is_some());
    assert!(engine.submit(once(vec![1; 65], usize::MAX)).is_err());
    assert!(script.seen().is_empty());
    // This one just fits: the last token needs no position.
    assert_eq!(collect(engine.submit(once((0..60).collect(), 5)).unwrap()).0.len(), 5);
    // Without a token limit it ends where the cache does.
    let (tokens, end) = collect(engine.submit(once((0..60).collect(), usize::MAX)).unwrap());
    assert_eq!((tokens.len(), end.unwrap()), (5, FinishReason::ContextFull));
    // Positions reserved for a session are not available to others.
    let _session = engine.open(32).unwrap();
    assert!(matches!(
        engine.submit(once(vec![1; 30], 4)),
        Err(EngineError::NeverFits { n_prompt: 30, max_tokens: 4, context: 32 })
    ));
}

#[test]
fn non_finite_logits_fail_one_request_and_no_other() {
    let (engine, script) = shared_engine(128, 16, 8);
    script.poison(43);
    let gate = script.block();
    let streams: Vec<_> =
        [10, 40, 70].map(|first| engine.submit(once(vec![first], 6)).unwrap()).into_iter().collect();
    drop(gate);
    let got: Vec<_> = streams.into_iter().map(collect).collect();
    assert_eq!(got[0].0, (11..17).collect::<Vec<_>>());
    assert_eq!(got[1].0, [41, 42, 43]);
    assert!(matches!(got[1].1, Err(EngineError::NonFinite { position: 3, .. })), "{:?}", got[1].1);
    assert_eq!(got[2].0, (71..77).collect::<Vec<_>>());
    assert_eq!(counts(&engine).used, 0);
}

#[test]
fn a_pool_that_is_too_small_for_all_still_serves_every_request() {
    let (engine, script) = shared_engine(48, 16, 100);
    script.allow(4);
    let streams: Vec<_> = (0..40u32)
        .map(|i| {
            let mut request = once(vec![i, 3 * i % 50, 60], 20);
            (request.user, request.priority) = (u64::from(i % 3), i as i32 % 2);
            engine.submit(request).unwrap()
        })
        .collect();
    for stream in streams {
        let (tokens, end) = collect(stream);
        assert_eq!((tokens, end.unwrap()), ((61..81).collect(), FinishReason::MaxTokens));
    }
    let load = engine.load().unwrap();
    assert!(load.n_preempted > 0);
    assert_eq!((load.n_running, load.n_waiting, load.blocks.used), (0, 0, 0));
}

#[test]
fn many_cancellations_lose_no_block_and_no_event() {
    let (engine, script) = shared_engine(64, 8, 64);
    script.allow(4);
    std::thread::scope(|scope| {
        for thread in 0..4u32 {
            let engine = engine.clone();
            scope.spawn(move || {
                let mut open = VecDeque::new();
                for i in 0..300u32 {
                    let mut request = once(vec![thread, i % 7, 5 + i % 20], 1 + i as usize % 12);
                    if i % 5 == 0 {
                        request.pace = Pace::OnDemand { lead: i as usize % 3 };
                    }
                    open.push_back((i, engine.submit(request).unwrap()));
                    if open.len() < 8 {
                        continue;
                    }
                    let (i, mut stream) = open.pop_front().unwrap();
                    match i % 4 {
                        0 => drop(stream),
                        1 => stream.stop(),
                        2 => {
                            engine.cancel(stream.id());
                            let end = stream.last().unwrap().unwrap();
                            assert!(matches!(end, TokenEvent::End(_)), "{end:?}");
                        }
                        _ => {
                            let first = 6 + i % 20;
                            let n = 1 + i % 12;
                            assert_eq!(collect(stream).0, (first..first + n).collect::<Vec<_>>());
                        }
                    }
                }
            });
        }
    });
    // Requests of dropped streams are cancelled before the next step.
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(10);
    while engine.load().unwrap().n_running + engine.load().unwrap().n_waiting > 0 {
        assert!(std::time::Instant::now() < deadline, "{:?}", engine.load());
    }
    let after = counts(&engine);
    assert_eq!((after.used, after.free + after.cached), (0, after.total));
}

#[test]
fn of_ten_thousand_requests_those_over_the_limit_are_refused_and_the_others_served() {
    let (engine, script) = shared_engine(256, 32, 100);
    let gate = script.block();
    let mut streams = Vec::new();
    let mut n_refused = 0;
    for i in 0..10_000u32 {
        match engine.submit(once(vec![i % 100], 2)) {
            Ok(stream) => streams.push((i % 100, stream)),
            Err(EngineError::QueueFull { max: 100, .. }) => n_refused += 1,
            Err(error) => panic!("{error}"),
        }
    }
    assert_eq!((streams.len(), n_refused), (100, 9_900));
    drop(gate);
    for (first, stream) in streams {
        assert_eq!(collect(stream).0, [first + 1, first + 2]);
    }
}

#[test]
fn each_request_has_its_own_sampling_rules() {
    let (engine, script) = shared_engine(128, 16, 8);
    let gate = script.block();
    let mut forbids = once(vec![10], 3);
    forbids.sampling.logit_bias = vec![(12, f32::NEG_INFINITY)];
    let mut ends = once(vec![20], 9);
    (ends.end, ends.min_tokens) = (vec![21, 23], 1);
    let mut lists = once(vec![30], 2);
    lists.n_top_logprobs = 3;
    let [forbids, ends, lists] = [forbids, ends, lists].map(|request| engine.submit(request).unwrap());
    drop(gate);
    assert_eq!(collect(forbids).0, [11, 13, 14]);
    let (tokens, end) = collect(ends);
    assert_eq!((tokens, end.unwrap()), (vec![22, 23], FinishReason::EndToken));
    let tops: Vec<_> = lists
        .filter_map(|event| match event.unwrap() {
            TokenEvent::Token { top, .. } => Some(top),
            _ => None,
        })
        .collect();
    assert_eq!(tops, [vec![(0, -0.0), (1, -1.0), (2, -2.0)], vec![(0, -0.0), (1, -1.0), (2, -2.0)]]);
}

#[test]
fn prompts_are_evaluated_in_chunks_next_to_decoding_requests() {
    let (engine, script) = shared_engine(256, 8, 8);
    let gate = script.block();
    let first = engine.submit(once(vec![1], 100)).unwrap();
    let long = engine.submit(once((0..30).collect(), 2)).unwrap();
    drop(gate);
    assert_eq!(collect(long).0, [30, 31]);
    assert_eq!(collect(first).0.len(), 100);
    let chunks: Vec<usize> = script.seen().iter().map(|s| s.tokens.len()).filter(|n| *n > 1).collect();
    assert_eq!(chunks, [7, 7, 7, 7, 2], "the budget minus one decoded token");
    let ledger = engine.ledger().unwrap();
    assert_eq!(ledger.tally(StepKind::Mixed).steps(), 5);
    assert_eq!(ledger.tally(StepKind::Mixed).tokens, 35);
}

#[test]
fn a_fork_continues_from_the_same_blocks() {
    let (engine, script) = engine(32, 16);
    let one = engine.open(32).unwrap();
    let mut request = Request::new(&one, (0..10).collect());
    (request.sampling, request.max_tokens) = (SamplingParams::greedy(), 2);
    assert_eq!(collect(engine.submit(request.clone()).unwrap()).0, [10, 11]);
    let two = engine.fork(&one, 24).unwrap();
    assert_eq!((one.tokens().unwrap().len(), two.tokens().unwrap().len()), (11, 8));
    request.sequence = Some(two.clone());
    request.prompt[9] = 90;
    assert_eq!(collect(engine.submit(request).unwrap()).0, [91, 92]);
    let seen = script.seen();
    let (held, forked) = (&seen[0], &seen[2]);
    assert_eq!((forked.start, &forked.tokens[..]), (8, &[8, 90][..]));
    assert_eq!(held.table[..2], forked.table[..2]);
    assert_ne!(held.table[2], forked.table[2]);
    // The first is dropped; the second keeps what both held.
    drop(one);
    assert_eq!(two.tokens().unwrap().len(), 11);
    let (other, _) = common::engine(32, 16);
    assert!(matches!(other.fork(&two, 8), Err(EngineError::ForeignSequence)));
}

#[test]
fn steps_launched_ahead_keep_their_blocks_whatever_happens_meanwhile() {
    for round in 0..20u32 {
        let (engine, script) = engine(96, 16);
        script.allow(8);
        let [one, two, three] = [(); 3].map(|()| engine.open(96).unwrap());
        let ask = |sequence: &refrain_engine::Sequence, first: u32, n: usize, lead: usize| {
            let mut request = Request::new(sequence, vec![first]);
            (request.sampling, request.max_tokens) = (SamplingParams::greedy(), n);
            request.pace = Pace::OnDemand { lead };
            engine.submit(request).unwrap()
        };
        // Blocks are released in another order while the first continues.
        for sequence in [&two, &three] {
            assert_eq!(collect(ask(sequence, 1, 40, 9)).0.len(), 40);
        }
        let n_before = script.seen().len();
        let mut stream = ask(&one, 1, 80, 3);
        let mut tokens = Vec::new();
        for i in 0..80 {
            match stream.next().unwrap().unwrap() {
                TokenEvent::Token { token, .. } => tokens.push(token),
                other => panic!("{other:?}"),
            }
            match (i + round) % 16 {
                3 => two.clear().unwrap(),
                9 => three.clear().unwrap(),
                5 | 12 => drop(engine.load().unwrap()),
                _ => {}
            }
        }
        drop(stream);
        assert_eq!(tokens, (2..82).collect::<Vec<_>>());
        let seen = &script.seen()[n_before..];
        let tables: Vec<_> = seen.iter().map(|seen| (seen.start, seen.table.clone())).collect();
        for pair in tables.windows(2) {
            let n_written = pair[0].0 / KV_BLOCK + 1;
            assert_eq!(pair[0].1[..n_written], pair[1].1[..n_written], "after position {}", pair[0].0);
        }
    }
}
