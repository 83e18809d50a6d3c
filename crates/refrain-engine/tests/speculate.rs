//! Speculation on a model that predicts the next higher token: who guesses when, and what consumers and ledgers see.

mod common;

use common::{KV_BLOCK, VOCAB, engine, shared_engine};
use refrain_engine::{
    DraftSource, Drafter, Engine, EngineError, FinishReason, Pace, Request, SamplingParams, Speculation,
    SpeculationPause, StepKind, TokenEvent, TokenStream,
};
use refrain_graph::RunError;
use std::sync::Arc;

/// Guesses the next `n_right` tokens rightly, and the others wrongly.
#[derive(Debug)]
struct Counting {
    n_right: usize,
}

impl Drafter for Counting {
    fn draft(&self, tokens: &[u32], n: usize) -> Vec<u32> {
        let last = *tokens.last().unwrap();
        let guess = |i: usize| last + 1 + i as u32 + u32::from(i >= self.n_right);
        (0..n).map(|i| guess(i) % VOCAB as u32).collect()
    }
}

fn upto(n: u32) -> Vec<u32> {
    (0..n).collect()
}

fn request(prompt: Vec<u32>, max_tokens: usize) -> Request {
    let mut request = Request::once(prompt);
    request.sampling = SamplingParams::greedy();
    request.max_tokens = max_tokens;
    request
}

/// Always checks `max_draft` guesses, of which `n_right` are right.
fn guessing(mut request: Request, max_draft: usize, n_right: usize) -> Request {
    let source = DraftSource::Custom(Arc::new(Counting { n_right }));
    request.speculation = Some(Speculation { max_draft, is_adaptive: false, ..Speculation::from(source) });
    request
}

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

fn failure() -> RunError {
    let source = Box::new(std::io::Error::other("the cable is cut"));
    RunError::Backend { backend: "fake", label: "blk.0.attn_q".into(), source }
}

/// Verify steps, guesses checked, guesses accepted, tokens chosen.
fn counts(engine: &Engine) -> [u64; 4] {
    let ledger = engine.ledger().unwrap();
    let tally = ledger.speculation();
    [tally.steps, tally.drafted, tally.accepted, tally.emitted]
}

#[test]
fn right_guesses_give_several_tokens_per_step_and_wrong_ones_still_give_one() {
    for (n_right, steps) in [(3, 3), (1, 5), (0, 10)] {
        let (engine, script) = engine(64, 16);
        let (tokens, finish) = collect(engine.submit(guessing(request(upto(5), 11), 3, n_right)).unwrap());
        assert_eq!(tokens, (5..16).collect::<Vec<_>>());
        assert_eq!(finish, FinishReason::MaxTokens);
        // The first token comes from the prompt's step.
        assert_eq!(script.seen().len(), 1 + steps, "{n_right} right");
        let ledger = engine.ledger().unwrap();
        // The last token of a request is decoded without guesses.
        let n_verified = counts(&engine)[3] as usize;
        assert_eq!(n_verified + ledger.tally(StepKind::Decode).tokens as usize, 10, "{n_right} right");
        assert_eq!(ledger.tally(StepKind::Verify).steps(), counts(&engine)[0]);
    }
}

#[test]
fn rejected_positions_are_written_again() {
    let (engine, script) = engine(64, 16);
    collect(engine.submit(guessing(request(upto(5), 7), 3, 1)).unwrap());
    let steps: Vec<_> = script.seen().into_iter().map(|step| (step.start, step.tokens)).collect();
    assert_eq!(steps[1], (5, vec![5, 6, 8, 9]));
    assert_eq!(steps[2], (7, vec![7, 8, 10, 11]), "position 7 held the wrong guess 8");
}

#[test]
fn an_end_token_among_accepted_guesses_ends_the_request_there() {
    let (engine, script) = engine(64, 16);
    let sequence = engine.open(64).unwrap();
    let mut asked = guessing(request(upto(5), 40), 7, 7);
    (asked.sequence, asked.end) = (Some(sequence.clone()), vec![8]);
    let (tokens, finish) = collect(engine.submit(asked).unwrap());
    assert_eq!((tokens, finish), (vec![5, 6, 7, 8], FinishReason::EndToken));
    // As after decode steps: the end token is chosen, not evaluated.
    assert_eq!(sequence.tokens().unwrap(), upto(8));
    assert_eq!(script.seen().len(), 2);
    let ledger = sequence.ledger();
    assert_eq!(ledger.speculation().emitted, 3);
    assert_eq!(ledger.tally(StepKind::Verify).steps(), 1);
}

#[test]
fn guesses_never_exceed_the_token_limit_or_the_context() {
    let (engine, script) = engine(16, 16);
    let sequence = engine.open(12).unwrap();
    let mut asked = guessing(request(upto(5), usize::MAX), 7, 7);
    asked.sequence = Some(sequence);
    let (tokens, finish) = collect(engine.submit(asked).unwrap());
    assert_eq!((tokens, finish), ((5..13).collect(), FinishReason::ContextFull));
    let last = script.seen().into_iter().map(|step| step.start + step.tokens.len()).max();
    assert_eq!(last, Some(12));
    let (tokens, _) = collect(engine.submit(guessing(request(upto(3), 4), 7, 7)).unwrap());
    assert_eq!(tokens, [3, 4, 5, 6]);
    assert_eq!(script.seen().last().unwrap().tokens, [3, 4, 5], "the last choice needs no guess");
}

#[test]
fn end_tokens_are_forbidden_until_the_minimum_at_each_row_of_its_own() {
    let (engine, _) = engine(64, 16);
    for n_right in [0, 2, 7] {
        let mut asked = guessing(request(upto(5), 20), 7, n_right);
        // 8 is forbidden for the first three tokens after 0..5, and 8 would be the fourth.
        (asked.end, asked.min_tokens) = (vec![8], 3);
        let (tokens, finish) = collect(engine.submit(asked).unwrap());
        assert_eq!((tokens, finish), (vec![5, 6, 7, 8], FinishReason::EndToken), "{n_right} right");
        let mut asked = guessing(request(upto(5), 8), 7, n_right);
        (asked.end, asked.min_tokens) = (vec![8], 6);
        let (tokens, finish) = collect(engine.submit(asked).unwrap());
        assert_eq!((tokens, finish), (vec![5, 6, 7, 9, 10, 11, 12, 13], FinishReason::MaxTokens));
    }
}

#[test]
fn logits_that_are_not_finite_fail_a_request_only_where_its_text_arrives_at_them() {
    let (engine, script) = engine(64, 16);
    script.poison(9);
    // 9 is only ever a wrong guess here.
    let mut asked = guessing(request(upto(5), 20), 4, 1);
    asked.end = vec![8];
    let (tokens, _) = collect(engine.submit(asked).unwrap());
    assert_eq!(tokens, [5, 6, 7, 8]);
    let events: Vec<_> = engine.submit(guessing(request(upto(5), 20), 7, 7)).unwrap().collect();
    let Some(Err(EngineError::NonFinite { position: 9, .. })) = events.last() else { panic!("{events:?}") };
    assert_eq!(events.len(), 6, "the tokens before it are delivered: {events:?}");
}

#[test]
fn requests_with_and_without_guesses_share_a_step() {
    let (engine, script) = shared_engine(256, 32, 8);
    script.allow(4);
    let block = script.block();
    let streams = [
        engine.submit(guessing(request(upto(5), 30), 3, 3)).unwrap(),
        engine.submit(request((40..46).collect(), 30)).unwrap(),
        engine.submit(guessing(request((80..83).collect(), 30), 7, 2)).unwrap(),
    ];
    drop(block);
    let tokens = streams.map(|stream| collect(stream).0);
    assert_eq!(tokens, [(5..35).collect::<Vec<_>>(), (46..76).collect(), (83..113).collect()]);
    let ledger = engine.ledger().unwrap();
    let verify = ledger.tally(StepKind::Verify);
    assert!(verify.steps() > 0 && ledger.speculation().steps > verify.steps(), "{}", ledger.speculation());
}

#[test]
fn many_sequences_share_the_rows_of_a_step() {
    let (engine, script) = shared_engine(1024, 16, 32);
    let streams: Vec<_> =
        (0..8).map(|i| engine.submit(guessing(request(vec![i, i + 1], 20), 15, 15)).unwrap()).collect();
    for (i, stream) in (0..).zip(streams) {
        assert_eq!(collect(stream).0, (i + 2..i + 22).collect::<Vec<_>>());
    }
    assert!(script.seen().iter().all(|step| step.tokens.len() <= 16));
}

#[test]
fn a_small_cache_preempts_and_recomputes_speculating_requests() {
    let (engine, _) = shared_engine(14 * KV_BLOCK, 32, 8);
    let streams: Vec<_> = (0..3)
        .map(|i| engine.submit(guessing(request(vec![i, i + 1, i + 2], 30), 7, 2 + i as usize)).unwrap())
        .collect();
    for (i, stream) in (0..).zip(streams) {
        assert_eq!(collect(stream).0, (i + 3..i + 33).collect::<Vec<_>>());
    }
    let load = engine.load().unwrap();
    assert!(load.n_preempted > 0, "{load:?}");
    assert_eq!(load.blocks.used, 0, "{load:?}");
}

#[test]
fn only_accepted_tokens_enter_the_prefix_cache() {
    let (engine, script) = shared_engine(64, 32, 8);
    // Every step writes wrong guesses behind the accepted ones, into blocks that fill up later.
    collect(engine.submit(guessing(request(upto(6), 20), 7, 2)).unwrap());
    let n_before = script.seen().len();
    let (tokens, _) = collect(engine.submit(request(upto(22), 3)).unwrap());
    assert_eq!(tokens, [22, 23, 24]);
    let first = &script.seen()[n_before];
    assert_eq!(first.start, 20, "five full blocks of accepted tokens are shared");
}

#[test]
fn a_cancelled_request_stops_guessing_and_frees_its_blocks() {
    let (engine, script) = shared_engine(64, 16, 8);
    let mut asked = guessing(request(upto(5), 40), 3, 3);
    asked.pace = Pace::OnDemand { lead: 6 };
    let mut stream = engine.submit(asked).unwrap();
    stream.next().unwrap().unwrap();
    stream.next().unwrap().unwrap();
    stream.stop();
    let n_steps = script.seen().len();
    assert_eq!(engine.load().unwrap().blocks.used, 0);
    assert_eq!(script.seen().len(), n_steps);
}

#[test]
fn guesses_respect_how_far_the_engine_may_run_ahead_of_its_consumer() {
    let (engine, script) = engine(64, 16);
    let mut asked = guessing(request(upto(5), 40), 7, 7);
    asked.pace = Pace::OnDemand { lead: 3 };
    let mut stream = engine.submit(asked).unwrap();
    for expected in 5..20 {
        let Some(Ok(TokenEvent::Token { token, .. })) = stream.next() else { panic!("no token") };
        assert_eq!(token, expected);
        // The engine's thread may be between two steps; evaluated positions bound what it has pushed.
        let evaluated = script.seen().iter().map(|step| step.start + step.tokens.len()).max().unwrap();
        assert!(evaluated as u32 <= expected + 6, "{evaluated} positions for token {expected}");
    }
}

#[test]
fn a_failing_verify_step_is_replaced_by_a_decode_step_and_noted() {
    let (engine, script) = engine(64, 16);
    script.fail_after(1, failure());
    let (tokens, finish) = collect(engine.submit(guessing(request(upto(5), 30), 3, 3)).unwrap());
    assert_eq!((tokens, finish), ((5..35).collect(), FinishReason::MaxTokens));
    let ledger = engine.ledger().unwrap();
    assert_eq!(ledger.tally(StepKind::Verify).failed, 1);
    let speculation = ledger.speculation();
    let Some(SpeculationPause::StepFailed { what }) = &speculation.last_pause else {
        panic!("{speculation}")
    };
    assert!(what.contains("the cable is cut"), "{what}");
    assert!(speculation.accepted > 0, "it resumes after the pause: {speculation}");
}

#[test]
fn guesses_that_are_never_right_pause_with_a_reason_and_steps_are_launched_ahead() {
    let (engine, script) = engine(600, 16);
    script.allow(4);
    let source = DraftSource::Custom(Arc::new(Counting { n_right: 0 }));
    let mut asked = request(vec![0], 250);
    asked.speculation = Some(Speculation::from(source));
    assert_eq!(collect(engine.submit(asked).unwrap()).0.len(), 250);
    let ledger = engine.ledger().unwrap();
    let speculation = ledger.speculation();
    let Some(SpeculationPause::DoesNotPay { accepted: 0, .. }) = speculation.last_pause else {
        panic!("{speculation}")
    };
    assert!(speculation.steps <= 24 && speculation.pauses >= 3, "{speculation}");
    assert_eq!(ledger.tally(StepKind::Decode).discarded, 0, "no step in flight is wasted");
    let text = speculation.to_string();
    assert!(text.contains("it does not pay: 0 of ") && text.contains("0 %"), "{text}");
}

#[test]
fn repetitions_are_found_in_the_prompt() {
    let (engine, script) = engine(600, 16);
    // Counting goes on from the end of the prompt, and the prompt has counted there before.
    let mut prompt: Vec<u32> = (10..60).collect();
    prompt.extend(10..14);
    let mut asked = request(prompt, 40);
    asked.speculation = Some(Speculation::from(DraftSource::Ngram));
    let n_before = 54 / 16 + 1;
    assert_eq!(collect(engine.submit(asked).unwrap()).0, (14..54).collect::<Vec<_>>());
    let n_steps = script.seen().len() - n_before;
    assert!(n_steps <= 10, "{n_steps} steps for 39 tokens");
    assert!(engine.ledger().unwrap().speculation().last_pause.is_none());
}

#[test]
fn steps_are_launched_ahead_until_a_repetition_begins_and_none_is_wasted() {
    let (engine, script) = engine(600, 16);
    script.allow(4);
    // The text counts from 100 to 127 and on from 0: it repeats itself after 128 tokens.
    let mut asked = request(vec![100, 101, 102], 220);
    asked.speculation = Some(Speculation::from(DraftSource::Ngram));
    let want: Vec<u32> = (103..323).map(|token| token % VOCAB as u32).collect();
    assert_eq!(collect(engine.submit(asked).unwrap()).0, want);
    let ledger = engine.ledger().unwrap();
    let (decode, guesses) = (ledger.tally(StepKind::Decode), ledger.speculation());
    assert_eq!(decode.discarded, 0);
    assert!((125..140).contains(&decode.tokens), "{decode}");
    assert!(guesses.accepted > 70 && guesses.steps < 20 && guesses.pauses == 0, "{guesses}");
}

#[test]
fn tokens_outside_the_vocabulary_are_never_guessed() {
    #[derive(Debug)]
    struct Wild;
    impl Drafter for Wild {
        fn draft(&self, tokens: &[u32], n: usize) -> Vec<u32> {
            let mut guesses = vec![u32::MAX; 3 * n];
            guesses[0] = tokens.last().unwrap() + 1;
            guesses
        }
    }
    let (engine, script) = engine(64, 16);
    let mut asked = request(upto(5), 20);
    asked.speculation = Some(Speculation::from(DraftSource::Custom(Arc::new(Wild))));
    assert_eq!(collect(engine.submit(asked).unwrap()).0, (5..25).collect::<Vec<_>>());
    assert!(script.seen().iter().all(|step| step.tokens.iter().all(|&token| token < VOCAB as u32)));
    assert_eq!(counts(&engine)[1], counts(&engine)[2]);
}

#[test]
fn invalid_speculation_is_refused_before_anything_is_evaluated() {
    let (engine, script) = engine(64, 16);
    let refused = |max_draft: usize| {
        let error = engine.submit(guessing(request(upto(5), 4), max_draft, 1)).map(drop).unwrap_err();
        assert!(error.hint().is_some());
        error.to_string()
    };
    assert_eq!(refused(0), "0 guessed tokens per step were requested, 1 to 15 are possible");
    assert_eq!(refused(100), "100 guessed tokens per step were requested, 1 to 15 are possible");
    let mut asked = request(upto(5), 4);
    asked.speculation = Some(Speculation::from(DraftSource::Model));
    let error = engine.submit(asked.clone()).map(drop).unwrap_err();
    assert!(matches!(error, EngineError::NoDraftModel), "{error}");
    for probability in [-0.1, 1.5, f32::NAN] {
        let forced =
            Speculation { forced_acceptance: Some(probability), ..Speculation::from(DraftSource::Ngram) };
        asked.speculation = Some(forced);
        let error = engine.submit(asked.clone()).map(drop).unwrap_err();
        assert!(matches!(error, EngineError::ForcedAcceptance { .. }), "{error}");
    }
    assert!(script.seen().is_empty());
}
