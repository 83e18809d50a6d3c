//! One token after the other, with the next ones under way before they are asked for.
//!
//! A decode step feeds itself: what it chooses is the next step's input. So when the caller is known to go on, steps are
//! sent before their tokens are asked for, and nobody waits for the host between two tokens. Those that turn out not to
//! be needed have only written KV behind what the session holds, which the next step there writes again.

use crate::error::EngineError;
use crate::runner::{RunEnd, StepRequest, Want};
use crate::sampling::SamplingRow;
use crate::session::{Chosen, Engine, Session};
use refrain_graph::StepKind;
use std::time::Instant;

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

/// Steps of one session that feed themselves.
pub(crate) struct Following {
    session: u64,
    row: SamplingRow,
    end: Vec<u32>,
    /// Tokens that the session held when it began.
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
    fn is_for(&self, session: &Session, token: u32, row: &SamplingRow, ahead: &Ahead<'_>) -> bool {
        !self.ended
            && self.session == session.id
            && self.start + self.n_taken == session.tokens.len()
            && self.next == token
            && self.end == ahead.end
            && self.row.has_rules_of(row)
    }
}

impl Engine {
    /// Evaluates one token and chooses the next.
    pub fn decode(
        &mut self,
        session: &mut Session,
        token: u32,
        row: &mut SamplingRow,
    ) -> Result<Chosen, EngineError> {
        self.follow(session, token, row, &Ahead::NONE)
    }

    /// Evaluates one token and chooses the next, and sends steps for those that the caller will want after it.
    ///
    /// They serve the next call if it asks for the token chosen here, by the same rules; any other call gets the same
    /// answer as without them. When no more is wanted, [`Engine::settle`] waits for those under way.
    pub fn follow(
        &mut self,
        session: &mut Session,
        token: u32,
        row: &mut SamplingRow,
        ahead: &Ahead<'_>,
    ) -> Result<Chosen, EngineError> {
        self.check_session(session)?;
        self.check_tokens(&[token])?;
        if session.tokens.len() >= self.context {
            return Err(EngineError::ContextFull { context: self.context });
        }
        let mut began = Instant::now();
        if !self.following.as_ref().is_some_and(|f| f.is_for(session, token, row, ahead)) {
            self.settle();
            session.table.fit(session.tokens.len() + 1)?;
        } else if let Some(last) = self.following.as_ref().and_then(|f| f.last) {
            began = last;
        }
        let chosen = self.begin_and_take(session, token, row, ahead);
        let took = began.elapsed();
        match chosen {
            Ok((chosen, ran)) => {
                session.tokens.push(token);
                row.advance(session.tokens.len(), &session.tokens);
                self.ledger.ran(StepKind::Decode, 1, took, &ran);
                Ok(chosen)
            }
            Err(error) => {
                self.ledger.failed(StepKind::Decode, took, &error.reason());
                self.following = None;
                // A second error of the same run says nothing new; what it left under way is not in the ledger.
                if let Ok(n) = self.runner.finish() {
                    self.ledger.unused(StepKind::Decode, n as u64);
                }
                Err(error)
            }
        }
    }

    /// Waits until no step is under way that was sent ahead, and enters those that nobody needed in the ledger. Every
    /// other call of the engine does so first.
    pub fn settle(&mut self) {
        if self.following.take().is_none() {
            return;
        }
        match self.runner.finish() {
            Ok(n) => self.ledger.unused(StepKind::Decode, n as u64),
            // Whoever goes on hears of it again if it still matters.
            Err(error) => self.ledger.failed(StepKind::Decode, std::time::Duration::ZERO, &error.reason()),
        }
    }

    fn begin_and_take(
        &mut self,
        session: &mut Session,
        token: u32,
        row: &mut SamplingRow,
        ahead: &Ahead<'_>,
    ) -> Result<(Chosen, refrain_graph::Ran), EngineError> {
        if self.following.is_none() {
            self.begin(session, token, row, ahead)?;
        }
        let Some(following) = &mut self.following else { unreachable!("begun above") };
        // Sent in batches: half of what may be under way is left when the device thread is asked for more.
        let (under_way, left) = (following.n_under_way(), self.context - session.tokens.len());
        let most = following.most.min(ahead.n_tokens.max(1)).min(left);
        if under_way == 0 || (most > under_way && under_way <= following.most / 2) {
            let n_positions = following.start + following.n_sent;
            let n = match session.table.fit(n_positions + most - under_way) {
                Ok(()) => most - under_way,
                // Other sessions hold the rest: what is under way will do, or one step at a time.
                Err(_) if under_way > 0 => 0,
                Err(_) => session.table.fit(n_positions + 1).map(|()| 1)?,
            };
            if n > 0 {
                self.runner.send(session.table.blocks(), n)?;
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
        session: &mut Session,
        token: u32,
        row: &mut SamplingRow,
        ahead: &Ahead<'_>,
    ) -> Result<(), EngineError> {
        let start = session.tokens.len();
        session.tokens.push(token);
        row.advance(start + 1, &session.tokens);
        let tokens = &session.tokens[start..];
        let request = StepRequest { tokens, start, table: session.table.blocks(), want: Want::Sample(row) };
        let end = RunEnd { n_positions: self.context, tokens: ahead.end };
        let begun = self.runner.begin(&request, end);
        session.tokens.truncate(start);
        self.following = Some(Following {
            session: session.id,
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
