//! What sessions hold and what they refuse, with a runner that keeps a log.

mod common;

use common::{KV_BLOCK, VOCAB, core};
use refrain_engine::{EngineError, SamplingParams, SamplingRow, StepKind};
use refrain_graph::{Reason, RunError};

fn row() -> SamplingRow {
    SamplingRow::new(&SamplingParams::greedy())
}

fn broken() -> RunError {
    let source = Box::new(std::io::Error::other("the cable is cut"));
    RunError::Backend { backend: "fake", label: "blk.0.attn_q".into(), source }
}

fn upto(n: u32) -> Vec<u32> {
    (0..n).collect()
}

#[test]
fn a_continued_conversation_is_not_evaluated_again() {
    let (mut core, script) = core(32, 8);
    let mut session = core.open();
    let chosen = core.prompt(&mut session, &upto(5), &mut row(), |_| true).unwrap();
    assert_eq!(chosen.token, 5);
    core.decode(&mut session, 5, &mut row()).unwrap();
    assert_eq!(session.tokens(), upto(6));
    core.prompt(&mut session, &[0, 1, 2, 3, 4, 5, 9], &mut row(), |_| true).unwrap();
    let seen = script.seen();
    assert_eq!((seen[2].start, &seen[2].tokens[..]), (6, &[9][..]));
    // The same prompt again: the next token is chosen from its last one.
    core.prompt(&mut session, &[0, 1, 2, 3, 4, 5, 9], &mut row(), |_| true).unwrap();
    assert_eq!((script.seen()[3].start, &script.seen()[3].tokens[..]), (6, &[9][..]));
}

#[test]
fn a_failed_decode_leaves_the_session_as_it_was() {
    let (mut core, script) = core(32, 8);
    let mut session = core.open();
    // A full block, so that the failing token needs another one.
    core.prompt(&mut session, &upto(KV_BLOCK as u32), &mut row(), |_| true).unwrap();
    script.fail_after(0, broken());
    assert!(matches!(core.decode(&mut session, 7, &mut row()), Err(EngineError::Run(_))));
    assert_eq!(session.tokens(), upto(KV_BLOCK as u32));
    assert_eq!(core.decode(&mut session, 9, &mut row()).unwrap().token, 10);
    let seen = script.seen();
    assert_eq!((seen[1].start, seen[2].start), (KV_BLOCK, KV_BLOCK));
    assert_eq!(seen[1].table, seen[2].table);
}

#[test]
fn a_prompt_that_fails_or_is_cancelled_resumes_where_it_stopped() {
    let (mut core, script) = core(32, 4);
    let mut session = core.open();
    script.fail_after(1, broken());
    assert!(core.prompt(&mut session, &upto(14), &mut row(), |_| true).is_err());
    assert_eq!(session.tokens(), upto(4));
    let mut heard = Vec::new();
    let cancelled = core.prompt(&mut session, &upto(14), &mut row(), |n| {
        heard.push(n);
        n < 12
    });
    assert!(matches!(cancelled, Err(EngineError::Cancelled)));
    assert_eq!((heard, session.tokens().len()), (vec![8, 12], 12));
    assert_eq!(core.prompt(&mut session, &upto(14), &mut row(), |_| true).unwrap().token, 14);
    let starts: Vec<usize> = script.seen().iter().map(|s| s.start).collect();
    assert_eq!(starts, [0, 4, 4, 8, 12]);
}

#[test]
fn a_short_prompt_releases_the_blocks_of_a_long_one() {
    let (mut core, _) = core(32, 32);
    let (mut long, mut other) = (core.open(), core.open());
    core.prompt(&mut long, &upto(32), &mut row(), |_| true).unwrap();
    let full = core.prompt(&mut other, &[1], &mut row(), |_| true).unwrap_err();
    assert_eq!(full.to_string(), "the KV cache is full: 1 blocks of 4 positions are needed, 0 of 8 are free");
    core.prompt(&mut long, &[0, 1], &mut row(), |_| true).unwrap();
    core.prompt(&mut other, &upto(28), &mut row(), |_| true).unwrap();
}

#[test]
fn a_session_that_is_dropped_or_closed_releases_its_blocks() {
    let (mut core, _) = core(32, 32);
    for round in 0..4 {
        let mut session = core.open();
        core.prompt(&mut session, &upto(32), &mut row(), |_| true).unwrap();
        if round % 2 == 0 {
            core.close(session);
        }
    }
}

#[test]
fn a_session_of_another_engine_is_refused_and_changes_nothing() {
    let (mut one, script) = core(32, 32);
    let (mut two, _) = core(32, 32);
    let mut session = one.open();
    one.prompt(&mut session, &upto(32), &mut row(), |_| true).unwrap();
    let refused = [
        two.prompt(&mut session, &[1], &mut row(), |_| true).map(|_| ()),
        two.decode(&mut session, 1, &mut row()).map(|_| ()),
        two.logits(&mut session, &[1], 1).map(|_| ()),
    ];
    for error in refused {
        let error = error.unwrap_err();
        assert!(matches!(error, EngineError::ForeignSequence), "{error}");
        assert!(error.hint().is_some());
    }
    assert_eq!(session.tokens(), upto(32));
    two.close(session);
    let mut again = one.open();
    one.prompt(&mut again, &upto(32), &mut row(), |_| true).unwrap();
    assert_eq!(script.seen().len(), 2);
}

#[test]
fn tokens_outside_the_vocabulary_are_refused_everywhere() {
    let (mut core, script) = core(32, 8);
    let mut session = core.open();
    // The last one would be negative, which marks padding.
    for token in [VOCAB as u32, 1 << 31, u32::MAX] {
        let refused = [
            core.prompt(&mut session, &[1, token], &mut row(), |_| true).map(|_| ()),
            core.decode(&mut session, token, &mut row()).map(|_| ()),
            core.logits(&mut session, &[token], 1).map(|_| ()),
        ];
        for error in refused {
            assert!(matches!(error, Err(EngineError::UnknownToken { .. })), "{token}: {error:?}");
        }
    }
    assert!(script.seen().is_empty() && session.tokens().is_empty());
}

#[test]
fn logits_refuse_steps_and_rows_that_do_not_fit() {
    let (mut core, script) = core(10, 4);
    let mut session = core.open();
    let mut text = |tokens: &[u32], n_rows| core.logits(&mut session, tokens, n_rows).map(<[f32]>::len);
    assert!(matches!(text(&[], 1), Err(EngineError::EmptyPrompt)));
    let error = text(&upto(5), 1).unwrap_err();
    assert_eq!(error.to_string(), "the step has 5 tokens, the maximum is 4");
    let error = text(&upto(3), 4).unwrap_err();
    assert_eq!(error.to_string(), "4 rows of logits were requested, the step has 3 tokens");
    assert!(script.seen().is_empty());
    assert_eq!(text(&upto(4), 3).unwrap(), 3 * VOCAB);
    assert_eq!(text(&upto(4), 0).unwrap(), 0);
    assert!(matches!(text(&upto(4), 1), Err(EngineError::PromptTooLong { n_tokens: 12, context: 10 })));
}

#[test]
fn a_full_context_is_refused_before_anything_runs() {
    let (mut core, script) = core(8, 8);
    let mut session = core.open();
    let error = core.prompt(&mut session, &upto(9), &mut row(), |_| true).unwrap_err();
    assert_eq!(error.to_string(), "the prompt has 9 tokens, the context holds 8");
    assert_eq!(
        error.hint().as_deref(),
        Some("shorten the prompt, or raise the context to 10 tokens if the model supports it")
    );
    assert!(matches!(core.prompt(&mut session, &[], &mut row(), |_| true), Err(EngineError::EmptyPrompt)));
    core.prompt(&mut session, &upto(8), &mut row(), |_| true).unwrap();
    let full = core.decode(&mut session, 8, &mut row()).unwrap_err();
    assert_eq!(full.to_string(), "the context of 8 tokens is full");
    assert_eq!(script.seen().len(), 1);
}

#[test]
fn the_ledger_reports_why_a_step_failed_down_to_the_root_cause() {
    let (mut core, script) = core(32, 8);
    let mut session = core.open();
    script.fail_after(0, broken());
    core.decode(&mut session, 1, &mut row()).unwrap_err();
    let tally = core.ledger().tally(StepKind::Decode).to_string();
    let want = "1 step, 0 replayed, 0 eager, 1 failed (the step failed: fake failed at blk.0.attn_q: the cable is cut)";
    assert_eq!(tally, want);
}

#[test]
fn a_lost_context_is_its_own_reason_in_the_ledger() {
    let (mut core, script) = core(32, 8);
    let mut session = core.open();
    let source = Box::new(std::io::Error::other("gone"));
    let lost = RunError::ContextLost { backend: "fake", label: "blk.3.ffn_up".into(), code: 719, source };
    script.fail_after(0, lost);
    let error = core.decode(&mut session, 1, &mut row()).unwrap_err();
    assert!(error.hint().is_some_and(|hint| hint.contains("restart the program")));
    let reasons: Vec<_> = core.ledger().tally(StepKind::Decode).reasons().collect();
    assert_eq!(
        reasons,
        [("context_lost", 1, &Reason::ContextLost { code: 719, step: "blk.3.ffn_up".into() })]
    );
}
