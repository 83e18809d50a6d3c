//! One token after the other, with the next ones under way before they are asked for.
//!
//! A decode step feeds itself: what it chooses is the next step's input. So when the caller is known to go on, steps are
//! sent before their tokens are asked for, and nobody waits for the host between two tokens. Those that turn out not to
//! be needed have only written KV behind what the sequence holds, which the next step there writes again.

use crate::core::{Chosen, Core, SequenceState, check_tokens};
use crate::error::EngineError;
use crate::ledger::Ledger;
use crate::runner::RunEnd;
use crate::sampling::SamplingRow;
use crate::step::{StepRequest, Want};
use refrain_graph::StepKind;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// What a caller is known to want, besides the next token: how far steps may be sent ahead of it.
#[derive(Clone, Copy, Debug)]
pub struct Ahead<'a> {
    /// The most tokens that will be asked for, the next one included.
    pub n_tokens: usize,
    /// Tokens after which none will be asked for.
    pub end: &'a [u32],
}

impl Ahead<'_> {
    /// The next token, and then perhaps something else.
    pub const NONE: Ahead<'static> = Ahead { n_tokens: 1, end: &[] };
}

/// Steps of one sequence that feed themselves.
pub(crate) struct Following {
    sequence: u64,
    /// Where its steps are entered, besides the ledger of all steps.
    ledger: Arc<Mutex<Ledger>>,
    row: SamplingRow,
    end: Vec<u32>,
    /// Tokens that the sequence held when it began.
    start: usize,
    /// The input of the oldest step that was not taken.
    next: u32,
    n_sent: usize,
    n_taken: usize,
    /// How many may be under way.
    most: usize,
    ended: bool,
    /// When the last result came, while others were under way.
    last: Option<Instant>,
}

impl Following {
    fn n_under_way(&self) -> usize {
        self.n_sent - self.n_taken
    }

    /// Whether its next step is the one that a caller asks for.
    fn is_for(&self, sequence: &SequenceState, token: u32, row: &SamplingRow, ahead: &Ahead<'_>) -> bool {
        !self.ended
            && self.sequence == sequence.id
            && self.start + self.n_taken == sequence.tokens.len()
            && self.next == token
            && self.end == ahead.end
            && self.row.has_rules_of(row)
    }
}

impl Core {
    /// Evaluates one token and chooses the next.
    pub fn decode(
        &mut self,
        sequence: &mut SequenceState,
        token: u32,
        row: &mut SamplingRow,
    ) -> Result<Chosen, EngineError> {
        self.follow(sequence, token, row, &Ahead::NONE)
    }

    /// Evaluates one token and chooses the next, and sends steps for those that the caller will want after it.
    ///
    /// They serve the next call if it asks for the token chosen here, by the same rules; any other call gets the same
    /// answer as without them. When no more is wanted, [`Core::settle`] waits for those under way.
    pub fn follow(
        &mut self,
        sequence: &mut SequenceState,
        token: u32,
        row: &mut SamplingRow,
        ahead: &Ahead<'_>,
    ) -> Result<Chosen, EngineError> {
        self.follow_timed(sequence, token, row, ahead).map(|(chosen, _)| chosen)
    }

    /// As [`Core::follow`], with the time that the ledger has for the step.
    pub(crate) fn follow_timed(
        &mut self,
        sequence: &mut SequenceState,
        token: u32,
        row: &mut SamplingRow,
        ahead: &Ahead<'_>,
    ) -> Result<(Chosen, Duration), EngineError> {
        self.check_sequence(sequence)?;
        check_tokens(self.model(), &[token])?;
        if sequence.tokens.len() >= sequence.context {
            return Err(EngineError::ContextFull { context: sequence.context });
        }
        let mut began = Instant::now();
        if !self.following.as_ref().is_some_and(|f| f.is_for(sequence, token, row, ahead)) {
            self.settle();
            sequence.table.fit(sequence.tokens.len() + 1)?;
        } else if let Some(last) = self.following.as_ref().and_then(|f| f.last) {
            began = last;
        }
        let chosen = self.begin_and_take(sequence, token, row, ahead);
        let took = began.elapsed();
        match chosen {
            Ok((chosen, ran)) => {
                sequence.tokens.push(token);
                row.advance(sequence.tokens.len(), &sequence.tokens);
                self.enter(&sequence.ledger, |ledger| ledger.ran(StepKind::Decode, 1, took, &ran));
                Ok((chosen, took))
            }
            Err(error) => {
                let reason = error.reason();
                self.enter(&sequence.ledger, |ledger| ledger.failed(StepKind::Decode, took, &reason));
                self.following = None;
                // A second error of the same run says nothing new; what it left under way is not in the ledger.
                if let Ok(n) = self.runner.finish() {
                    self.enter(&sequence.ledger, |ledger| ledger.unused(StepKind::Decode, n as u64));
                }
                Err(error)
            }
        }
    }

    /// Waits until no step is under way that was sent ahead, and enters those that nobody needed in the ledger. Every
    /// other call of the core does so first.
    pub fn settle(&mut self) {
        let Some(following) = self.following.take() else { return };
        match self.runner.finish() {
            Ok(n) => self.enter(&following.ledger, |ledger| ledger.unused(StepKind::Decode, n as u64)),
            // Whoever goes on hears of it again if it still matters.
            Err(error) => {
                let reason = error.reason();
                self.enter(&following.ledger, |l| l.failed(StepKind::Decode, Duration::ZERO, &reason));
            }
        }
    }

    /// As [`Core::settle`], if the steps under way are those of this sequence.
    pub(crate) fn settle_of(&mut self, sequence: &SequenceState) {
        if self.following.as_ref().is_some_and(|f| f.sequence == sequence.id) {
            self.settle();
        }
    }

    fn begin_and_take(
        &mut self,
        sequence: &mut SequenceState,
        token: u32,
        row: &mut SamplingRow,
        ahead: &Ahead<'_>,
    ) -> Result<(Chosen, refrain_graph::Ran), EngineError> {
        if self.following.is_none() {
            self.begin(sequence, token, row, ahead)?;
        }
        let Some(following) = &mut self.following else { unreachable!("begun above") };
        // Sent in batches: half of what may be under way is left when the device thread is asked for more.
        let (under_way, left) = (following.n_under_way(), sequence.context - sequence.tokens.len());
        let most = following.most.min(ahead.n_tokens.max(1)).min(left);
        if under_way == 0 || (most > under_way && under_way <= following.most / 2) {
            let n_positions = following.start + following.n_sent;
            let n = match sequence.table.cover(n_positions + most - under_way) {
                Ok(()) => most - under_way,
                // Other sequences hold the rest: what is under way will do, or one step at a time.
                Err(_) if under_way > 0 => 0,
                Err(_) => sequence.table.cover(n_positions + 1).map(|()| 1)?,
            };
            if n > 0 {
                self.runner.send(sequence.table.blocks(), n)?;
                following.n_sent += n;
            }
        }
        let committed = self.runner.take()?;
        following.n_taken += 1;
        (following.next, following.ended) = (committed.token, committed.ended());
        following.last = (following.n_under_way() > 0).then(Instant::now);
        Ok((Chosen { token: committed.token, logprob: committed.logprob }, committed.ran))
    }

    fn begin(
        &mut self,
        sequence: &mut SequenceState,
        token: u32,
        row: &mut SamplingRow,
        ahead: &Ahead<'_>,
    ) -> Result<(), EngineError> {
        let start = sequence.tokens.len();
        sequence.tokens.push(token);
        row.advance(start + 1, &sequence.tokens);
        let tokens = &sequence.tokens[start..];
        let request = StepRequest { tokens, start, table: sequence.table.blocks(), want: Want::Sample(row) };
        let end = RunEnd { n_positions: sequence.context, tokens: ahead.end };
        let begun = self.runner.begin(&request, end);
        sequence.tokens.truncate(start);
        self.following = Some(Following {
            sequence: sequence.id,
            ledger: sequence.ledger.clone(),
            row: row.clone(),
            end: ahead.end.to_vec(),
            start,
            next: token,
            n_sent: 0,
            n_taken: 0,
            most: begun?,
            ended: false,
            last: None,
        });
        Ok(())
    }
}
