//! The engine's thread: who is served when, and what consumers receive when it ends.

mod common;

use common::{KV_BLOCK, Script, engine};
use refrain_engine::{
    AdapterId, Engine, EngineError, FinishReason, MAX_BIAS, Pace, Request, SamplingParams, Sequence,
    StepKind, Stopped, TokenEvent, TokenStream,
};
use refrain_graph::RunError;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake};
use std::time::Duration;

const SOON: Duration = Duration::from_millis(20);

fn upto(n: u32) -> Vec<u32> {
    (0..n).collect()
}

/// A greedy request.
fn request(sequence: &Sequence, prompt: Vec<u32>, max_tokens: usize) -> Request {
    let mut request = Request::new(sequence, prompt);
    request.sampling = SamplingParams::greedy();
    request.max_tokens = max_tokens;
    request
}

fn asked(mut request: Request, lead: usize) -> Request {
    request.pace = Pace::OnDemand { lead };
    request
}

/// The tokens of a stream, and why it ended.
fn collect(stream: TokenStream) -> (Vec<u32>, FinishReason) {
    let mut tokens = Vec::new();
    for event in stream {
        match event.unwrap() {
            TokenEvent::Prompt { .. } => {}
            TokenEvent::Token { token, .. } => tokens.push(token),
            TokenEvent::End(finish) => return (tokens, finish),
        }
    }
    panic!("a stream without an end");
}

fn lost() -> RunError {
    let source = Box::new(std::io::Error::other("gone"));
    RunError::ContextLost { backend: "fake", label: "blk.3.ffn_up".into(), code: 719, source }
}

#[test]
fn handles_can_be_used_from_any_thread() {
    fn check<T: Send + Sync>() {}
    check::<Engine>();
    check::<Sequence>();
    fn check_send<T: Send>() {}
    check_send::<TokenStream>();
}

#[test]
fn a_request_yields_its_progress_its_tokens_and_its_end() {
    let (engine, script) = engine(64, 4);
    script.allow(4);
    let sequence = engine.open(64).unwrap();
    let events: Vec<_> =
        engine.submit(request(&sequence, upto(10), 3)).unwrap().map(|event| event.unwrap()).collect();
    let [first, second, tokens @ .., end] = &events[..] else { panic!("{events:?}") };
    assert_eq!(*first, TokenEvent::Prompt { n_done: 4, n_tokens: 10 });
    assert_eq!(*second, TokenEvent::Prompt { n_done: 8, n_tokens: 10 });
    let tokens: Vec<_> = tokens
        .iter()
        .map(|event| match event {
            TokenEvent::Token { token, logprob, .. } => (*token, *logprob),
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(tokens, [(10, -1.0), (11, -1.0), (12, -1.0)]);
    assert_eq!(*end, TokenEvent::End(FinishReason::MaxTokens));
    // The prompt and all choices but the last are cached, and the next request continues from there.
    assert_eq!(sequence.tokens().unwrap(), upto(12));
    assert_eq!(sequence.n_cached(&upto(20)).unwrap(), 12);
    assert_eq!(collect(engine.submit(request(&sequence, upto(14), 1)).unwrap()).0, [14]);
    assert_eq!(script.seen().last().unwrap().tokens, [12, 13]);
    let ledger = engine.ledger().unwrap();
    assert_eq!(ledger, sequence.ledger());
    let decode = ledger.tally(StepKind::Decode);
    assert_eq!((decode.steps(), decode.discarded, ledger.tally(StepKind::Prompt).steps()), (2, 0, 4));
}

#[test]
fn a_request_ends_at_an_end_token_or_where_the_context_is_full() {
    let (engine, script) = engine(16, 16);
    script.allow(4);
    let sequence = engine.open(16).unwrap();
    let mut ends = request(&sequence, upto(5), 100);
    ends.end = vec![90, 7];
    assert_eq!(collect(engine.submit(ends).unwrap()), (vec![5, 6, 7], FinishReason::EndToken));
    let full = collect(engine.submit(request(&sequence, upto(14), 100)).unwrap());
    // The last token needs no position.
    assert_eq!(full, (vec![14, 15, 16], FinishReason::ContextFull));
    let nothing = collect(engine.submit(request(&sequence, upto(3), 0)).unwrap());
    assert_eq!(nothing, (vec![], FinishReason::MaxTokens));
}

#[test]
fn min_tokens_suppresses_end_tokens_and_steps_are_still_launched_ahead() {
    for (min_tokens, tokens) in
        [(0, &[5][..]), (1, &[6, 7]), (2, &[6, 8, 9]), (3, &[6, 8, 10, 11]), (4, &[6, 8, 10, 12, 13])]
    {
        let (engine, script) = engine(64, 16);
        script.allow(4);
        let sequence = engine.open(64).unwrap();
        let mut least = request(&sequence, upto(5), 6);
        (least.end, least.min_tokens) = ((5..30).filter(|t| t % 2 == 1).collect(), min_tokens);
        least.sampling.logit_bias = vec![(5, 3.0), (99, 1.0)];
        let got = collect(engine.submit(least).unwrap());
        assert_eq!(got, (tokens.to_vec(), FinishReason::EndToken), "at least {min_tokens}");
        // Steps with other sampling rules were not launched ahead: none of them is discarded.
        let seen: Vec<_> = script.seen().iter().skip(1).map(|seen| seen.tokens[0]).collect();
        assert!(seen.starts_with(&tokens[..tokens.len() - 1]), "{seen:?}");
    }
}

#[test]
fn invalid_requests_are_refused_with_their_numbers_before_anything_runs() {
    let (engine, script) = engine(32, 8);
    let sequence = engine.open(32).unwrap();
    let refused = |change: &dyn Fn(&mut Request)| {
        let mut request = request(&sequence, upto(4), 8);
        change(&mut request);
        let error = engine.submit(request).err().unwrap();
        assert!(error.hint().is_some() || matches!(error, EngineError::Sampling(_)), "{error}");
        error.to_string()
    };
    assert_eq!(refused(&|r| r.prompt.clear()), "the prompt is empty");
    assert_eq!(refused(&|r| r.prompt = upto(33)), "the prompt has 33 tokens, the context holds 32");
    assert_eq!(refused(&|r| r.prompt = vec![128]), "token 128 is outside the vocabulary of 128");
    assert_eq!(refused(&|r| r.end = vec![1 << 31]), "token 2147483648 is outside the vocabulary of 128");
    assert_eq!(
        refused(&|r| r.min_tokens = 9),
        "at least 9 tokens must be written and at most 8, which is fewer"
    );
    assert_eq!(
        refused(&|r| r.n_top_logprobs = 21),
        "21 top log-probabilities were requested, the maximum is 20"
    );
    assert_eq!(
        refused(&|r| r.adapter = Some(AdapterId(3))),
        "adapter id 3 was requested, the ids of the model's 0 adapters begin at 0"
    );
    assert_eq!(refused(&|r| r.sampling.top_p = 2.0), "top-p is 2, must be above 0 and at most 1");
    let crowded = refused(&|r| {
        r.sampling.logit_bias = (0..MAX_BIAS as u32).map(|i| (i % 100, 1.0)).collect();
        (r.end, r.min_tokens) = (vec![120], 1);
    });
    assert_eq!(
        crowded,
        format!("logit bias is {} entries, must be at most {MAX_BIAS} entries", MAX_BIAS + 1)
    );
    for context in [0, 1 << 30] {
        assert!(matches!(engine.open(context), Err(EngineError::Context { got, .. }) if got == context));
    }
    assert!(script.seen().is_empty());
    assert_eq!(collect(engine.submit(request(&sequence, upto(4), 2)).unwrap()).0, [4, 5], "it is not busy");
}

#[test]
fn all_requests_take_part_in_every_step_and_the_number_of_open_ones_is_limited() {
    let (engine, script) = engine(32, 8);
    let sequences: Vec<_> = (0..5).map(|_| engine.open(16).unwrap()).collect();
    let gate = script.block();
    let streams: Vec<_> = (0..4)
        .map(|i| engine.submit(request(&sequences[i], vec![10 * (i as u32 + 1)], 3)).unwrap())
        .collect();
    let busy = engine.submit(request(&sequences[0], vec![1], 1)).err().unwrap();
    assert!(matches!(busy, EngineError::QueueFull { .. }), "{busy}");
    let full = engine.submit(request(&sequences[4], vec![50], 3)).err().unwrap();
    assert_eq!(full.to_string(), "4 requests are running or waiting, the maximum is 4");
    drop(gate);
    let got: Vec<_> = streams.into_iter().map(|stream| collect(stream).0).collect();
    assert_eq!(got, [[11, 12, 13], [21, 22, 23], [31, 32, 33], [41, 42, 43]]);
    let starts: Vec<_> = script.seen().iter().map(|seen| seen.tokens[0] / 10).collect();
    // The first has begun when the others arrive; then all continue together.
    assert!(matches!(starts[..4], [1, 1, 2, 3] | [1, 2, 3, 4]), "{starts:?}");
    assert_eq!(starts.len(), 12);
    assert_eq!(collect(engine.submit(request(&sequences[4], vec![50], 1)).unwrap()).0, [51]);
}

#[test]
fn a_sequence_is_busy_until_its_request_has_ended() {
    let (engine, script) = engine(32, 8);
    let sequence = engine.open(16).unwrap();
    let gate = script.block();
    let stream = engine.submit(request(&sequence, vec![1], 3)).unwrap();
    let again = engine.submit(request(&sequence.clone(), vec![1], 3)).err().unwrap();
    assert!(matches!(again, EngineError::SequenceBusy) && again.hint().is_some(), "{again}");
    assert!(matches!(sequence.tokens(), Err(EngineError::SequenceBusy)));
    assert!(matches!(sequence.clear(), Err(EngineError::SequenceBusy)));
    let logits = engine.logits(&sequence, &[1], 1, &mut Vec::new());
    assert!(matches!(logits, Err(EngineError::SequenceBusy)));
    drop(gate);
    // It is free at the end event, not a moment later.
    assert_eq!(collect(stream).0, [2, 3, 4]);
    sequence.clear().unwrap();
    assert_eq!(collect(engine.submit(request(&sequence, vec![7], 1)).unwrap()).0, [8]);
}

#[test]
fn a_sequence_of_another_engine_is_refused() {
    let ((one, _), (two, script)) = (engine(32, 8), engine(32, 8));
    let sequence = one.open(16).unwrap();
    let error = two.submit(request(&sequence, vec![1], 1)).err().unwrap();
    assert!(matches!(error, EngineError::ForeignSequence), "{error}");
    let error = two.logits(&sequence, &[1], 1, &mut Vec::new()).unwrap_err();
    assert!(matches!(error, EngineError::ForeignSequence), "{error}");
    assert!(script.seen().is_empty());
    assert_eq!(collect(one.submit(request(&sequence, vec![1], 1)).unwrap()).0, [2]);
}

#[test]
fn a_running_or_waiting_request_is_cancelled_by_its_id_or_by_dropping_its_stream() {
    let (engine, script) = engine(64, 8);
    let sequences: Vec<_> = (0..3).map(|_| engine.open(20).unwrap()).collect();
    let gate = script.block();
    let running = engine.submit(request(&sequences[0], vec![1], 15)).unwrap();
    let mut waiting = engine.submit(request(&sequences[1], vec![1], 15)).unwrap();
    let dropped = engine.submit(request(&sequences[2], vec![1], 15)).unwrap();
    engine.cancel(waiting.id());
    drop(dropped);
    engine.cancel(running.id());
    drop(gate);
    let (tokens, finish) = collect(running);
    assert!(tokens.len() <= 1 && finish == FinishReason::Cancelled, "{tokens:?} {finish:?}");
    assert_eq!(waiting.next().unwrap().unwrap(), TokenEvent::End(FinishReason::Cancelled));
    assert!(waiting.next().is_none() && waiting.is_over());
    engine.cancel(waiting.id());
    let [one, two, three] = &sequences[..] else { unreachable!() };
    assert!(two.tokens().unwrap().is_empty());
    assert_eq!(collect(engine.submit(request(one, vec![5], 1)).unwrap()).0, [6]);
    // The third was dropped before it began, and the engine has noticed by this point.
    assert!(three.tokens().unwrap().is_empty());
    assert!(script.seen().len() <= 3);
}

#[test]
fn an_on_demand_request_lets_others_run_meanwhile() {
    let (engine, script) = engine(64, 4);
    let (one, two) = (engine.open(32).unwrap(), engine.open(32).unwrap());
    let mut slow = engine.submit(asked(request(&one, upto(10), 12), 2)).unwrap();
    // Nothing runs before the first event is requested.
    assert_eq!(collect(engine.submit(request(&two, vec![1], 2)).unwrap()).0, [2, 3]);
    assert_eq!(script.seen().len(), 2);
    // One prompt chunk at a time.
    assert_eq!(slow.next().unwrap().unwrap(), TokenEvent::Prompt { n_done: 4, n_tokens: 10 });
    assert!(engine.ledger().is_ok());
    assert_eq!(script.seen().len(), 3);
    assert_eq!(slow.next().unwrap().unwrap(), TokenEvent::Prompt { n_done: 8, n_tokens: 10 });
    // The first token, and two more.
    assert!(matches!(slow.next(), Some(Ok(TokenEvent::Token { token: 10, .. }))));
    script.wait_for(7);
    assert!(engine.ledger().is_ok());
    assert_eq!(script.seen().len(), 7);
    let passes = request(&two, vec![50], 3);
    assert_eq!(collect(engine.submit(passes).unwrap()).0, [51, 52, 53]);
    let (remaining, finish) = collect(slow);
    assert_eq!((remaining, finish), ((11..22).collect(), FinishReason::MaxTokens));
    assert_eq!(one.tokens().unwrap(), upto(21));
}

#[test]
fn stopping_a_stream_waits_until_its_sequence_is_free() {
    let (engine, script) = engine(64, 4);
    script.allow(4);
    let sequence = engine.open(64).unwrap();
    for _ in 0..20 {
        let mut stream = engine.submit(asked(request(&sequence, upto(3), 50), 1)).unwrap();
        for token in 3..5 {
            assert!(matches!(stream.next(), Some(Ok(TokenEvent::Token { token: got, .. })) if got == token));
        }
        stream.stop();
        assert!(stream.next().is_none());
        sequence.clear().unwrap();
    }
    let decode = sequence.ledger().tally(StepKind::Decode).clone();
    // One step for the second token, perhaps one for the third; the others were in flight and are accounted
    // for.
    assert!((20..=40).contains(&decode.steps()) && decode.discarded >= 40, "{decode}");
    assert!(decode.steps() + decode.discarded <= 20 * 6, "{decode}");
}

#[test]
fn a_stream_can_be_polled_without_waiting() {
    let (engine, script) = engine(64, 4);
    let sequence = engine.open(64).unwrap();
    let gate = script.block();
    let mut stream = engine.submit(request(&sequence, upto(3), 3)).unwrap();
    assert!(stream.try_next().is_none() && !stream.is_over());
    assert!(stream.next_timeout(SOON).is_none() && !stream.is_over());
    let woken = Arc::new(Counter::default());
    let waker = woken.clone().into();
    let mut context = Context::from_waker(&waker);
    assert!(stream.poll_next(&mut context).is_pending());
    drop(gate);
    let mut tokens = Vec::new();
    loop {
        match stream.poll_next(&mut context) {
            Poll::Ready(Some(event)) => match event.unwrap() {
                TokenEvent::Token { token, .. } => tokens.push(token),
                TokenEvent::End(_) => break,
                TokenEvent::Prompt { .. } => {}
            },
            Poll::Ready(None) => panic!("a stream without an end"),
            Poll::Pending => std::thread::yield_now(),
        }
    }
    assert_eq!(tokens, [3, 4, 5]);
    assert!(woken.0.load(Ordering::Relaxed) > 0);
    assert!(matches!(stream.poll_next(&mut context), Poll::Ready(None)));
    assert!(stream.try_next().is_none() && stream.next_timeout(SOON).is_none());
}

#[derive(Default)]
struct Counter(AtomicUsize);

impl Wake for Counter {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn a_consumer_that_reads_nothing_blocks_nobody() {
    let (engine, _) = engine(64, 4);
    let (one, two) = (engine.open(32).unwrap(), engine.open(32).unwrap());
    let forgotten = engine.submit(request(&one, upto(3), 20)).unwrap();
    assert_eq!(collect(engine.submit(request(&two, vec![1], 3)).unwrap()).0, [2, 3, 4]);
    assert_eq!(collect(forgotten).0, (3..23).collect::<Vec<_>>());
}

#[test]
fn requests_from_many_threads_all_get_their_own_tokens() {
    let (engine, script) = engine(64, 8);
    script.allow(4);
    std::thread::scope(|scope| {
        for i in 0..4u32 {
            let engine = engine.clone();
            scope.spawn(move || {
                let sequence = engine.open(64).unwrap();
                for round in 0..50 {
                    let first = 1 + (i * 20 + round) % 60;
                    let mut request = request(&sequence, vec![i, first], 8);
                    if round % 2 == 0 {
                        request = asked(request, round as usize % 3);
                    }
                    let stream = engine.submit(request).unwrap();
                    assert_eq!(collect(stream).0, (first + 1..first + 9).collect::<Vec<_>>());
                }
            });
        }
    });
    let ledger = engine.ledger().unwrap();
    let tallies = StepKind::ALL.map(|kind| ledger.tally(kind));
    // Every prompt except the first of a sequence has one new token.
    let n_tokens = 4 * (50 * (1 + 7) + 1);
    assert_eq!(tallies.iter().map(|tally| tally.tokens).sum::<u64>(), n_tokens);
    assert!(tallies.iter().map(|tally| tally.steps()).sum::<u64>() <= n_tokens);
}

#[test]
fn the_cache_grows_with_the_open_sequences_and_its_capacity_is_reused() {
    let (engine, script) = engine(16, 16);
    let one = engine.open(16).unwrap();
    let full = |sequence: &Sequence, first: u32| {
        let n = sequence.context() as u32;
        let prompt = (first..first + n).collect();
        assert_eq!(collect(engine.submit(request(sequence, prompt, 1)).unwrap()).0, [first + n]);
        script.seen().last().unwrap().table.clone()
    };
    let first = full(&one, 0);
    // Longer than the first, which keeps its content.
    let two = engine.open(40).unwrap();
    let second = full(&two, 20);
    assert_eq!((first.len(), second.len()), (16 / KV_BLOCK, 40 / KV_BLOCK));
    assert!(first.iter().all(|block| !second.contains(block)));
    assert_eq!(one.tokens().unwrap(), upto(16));
    script.fix_size();
    let error = engine.open(1).unwrap_err();
    assert_eq!(error.to_string(), "the KV cache of fake has 14 blocks and cannot grow to 15");
    assert!(error.hint().is_some());
    drop(two);
    let three = engine.open(40).unwrap();
    full(&three, 0);
    assert!(matches!(engine.open(1), Err(EngineError::CannotGrow { .. })));
}

#[test]
fn the_cache_grows_between_the_steps_of_a_running_request() {
    let (engine, script) = engine(32, 16);
    script.allow(4);
    let one = engine.open(32).unwrap();
    let mut stream = engine.submit(asked(request(&one, upto(3), 20), 2)).unwrap();
    for token in 3..6 {
        assert!(matches!(stream.next(), Some(Ok(TokenEvent::Token { token: got, .. })) if got == token));
    }
    let two = engine.open(64).unwrap();
    assert_eq!(collect(engine.submit(request(&two, vec![70], 2)).unwrap()).0, [71, 72]);
    assert_eq!(collect(stream).0, (6..23).collect::<Vec<_>>());
}

/// A running stream, a waiting one and a call, when the engine stops by itself.
fn everybody_hears(script: &Script, engine: &Engine, why: &Stopped, first_fails_with: &str) {
    let sequences: Vec<_> = (0..3).map(|_| engine.open(16).unwrap()).collect();
    let gate = script.block();
    let mut running = engine.submit(request(&sequences[0], vec![1], 5)).unwrap();
    let mut waiting = engine.submit(request(&sequences[1], vec![1], 5)).unwrap();
    let caller = std::thread::spawn({
        let engine = engine.clone();
        move || engine.plan(1).err().unwrap()
    });
    drop(gate);
    let error = running.find_map(Result::err).unwrap();
    assert!(error.to_string().starts_with(first_fails_with), "{error}");
    assert!(running.next().is_none());
    let error = waiting.find_map(Result::err).unwrap();
    assert!(matches!(&error, EngineError::Stopped(got) if got == why), "{error}");
    assert!(error.hint().is_some());
    // The call was made before the end, or fails with it.
    let error = caller.join().unwrap();
    assert!(matches!(error, EngineError::Stopped(_) | EngineError::EmptyPrompt), "{error}");
    for sequence in &sequences {
        let error = engine.submit(request(sequence, vec![1], 5)).err().unwrap();
        assert!(matches!(&error, EngineError::Stopped(got) if got == why), "{error}");
    }
    assert!(matches!(engine.ledger(), Err(EngineError::Stopped(_))));
    for context in [1, 256] {
        assert!(matches!(engine.open(context), Err(EngineError::Stopped(_))), "{context}");
    }
}

#[test]
fn a_panic_of_the_engine_reaches_everyone_who_waits_or_comes_later() {
    let (engine, script) = engine(64, 8);
    // The fake runner treats this error as an order to panic.
    script.fail_after(2, EngineError::NoFeedback);
    let why = Stopped::Panicked { message: "the runner is broken".into() };
    everybody_hears(
        &script,
        &engine,
        &why,
        "the engine has stopped: its thread panicked: the runner is broken",
    );
}

#[test]
fn a_lost_device_reaches_everyone_who_waits_or_comes_later() {
    let (engine, script) = engine(64, 8);
    script.fail_after(2, lost());
    let why = Stopped::DeviceLost { backend: "fake", label: "blk.3.ffn_up".into(), code: 719 };
    everybody_hears(&script, &engine, &why, "the step failed");
}

#[test]
fn a_step_that_fails_ends_its_request_and_no_other() {
    let (engine, script) = engine(64, 8);
    let (one, two) = (engine.open(16).unwrap(), engine.open(16).unwrap());
    script.break_on(3);
    let gate = script.block();
    let mut fails = engine.submit(request(&one, vec![1], 5)).unwrap();
    let goes_on = engine.submit(request(&two, vec![50], 5)).unwrap();
    drop(gate);
    for token in 2..4 {
        assert!(matches!(fails.next(), Some(Ok(TokenEvent::Token { token: got, .. })) if got == token));
    }
    assert!(matches!(fails.next(), Some(Err(EngineError::Run(_)))));
    assert!(fails.next().is_none());
    assert_eq!(collect(goes_on).0, [51, 52, 53, 54, 55]);
    let failed = |sequence: &Sequence| StepKind::ALL.map(|kind| sequence.ledger().tally(kind).failed);
    assert_eq!((failed(&one).iter().sum::<u64>(), failed(&two).iter().sum::<u64>()), (1, 0));
    // The tokens it held before are still valid.
    assert_eq!(one.tokens().unwrap(), [1, 2]);
    assert_eq!(collect(engine.submit(request(&one, vec![1, 2, 7], 2)).unwrap()).0, [8, 9]);
}

#[test]
fn the_engine_lives_as_long_as_a_handle_exists_and_ends_without_waiting() {
    let (engine, script) = engine(64, 8);
    let weak = engine.downgrade();
    let sequence = engine.open(64).unwrap();
    let stream = engine.submit(request(&sequence, vec![1], 5)).unwrap();
    drop(engine);
    assert!(weak.upgrade().is_some());
    assert_eq!(collect(stream).0.len(), 5);
    assert!(weak.upgrade().is_none());
    // With a request in progress.
    let (engine, _) = common::engine(64, 8);
    let sequence = engine.open(64).unwrap();
    let mut stream = engine.submit(asked(request(&sequence, vec![1], 50), 1)).unwrap();
    stream.next().unwrap().unwrap();
    drop((engine, stream));
    assert!(sequence.tokens().is_ok(), "the state was returned");
    assert!(!script.seen().is_empty());
}
