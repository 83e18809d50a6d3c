//! A draft model: a smaller model with the same vocabulary that guesses what a target model chooses.
//!
//! It samples with the seed, positions and sampling parameters of the request, so it guesses what it would choose in
//! the target's place. Its cache follows the target's tokens: what it guessed wrongly is cut off, and tokens it
//! has not seen are evaluated before the next guesses.

use crate::core::{Core, SequenceState};
use crate::decode::{DecodeRow, LaunchPolicy, Lookahead};
use crate::error::EngineError;
use crate::ledger::Ledger;
use crate::request::RequestId;
use crate::runner::Runner;
use crate::sampling::SamplingRow;
use crate::step::{Want, step_kind};
use refrain_models::Model;
use std::collections::BTreeMap;

/// A request for guesses, and the guesses.
pub(crate) struct DraftRequest<'a> {
    pub(crate) id: RequestId,
    /// All known tokens.
    pub(crate) tokens: &'a [u32],
    /// How the target chooses.
    pub(crate) row: SamplingRow,
    /// Number of guesses.
    pub(crate) n: usize,
    pub(crate) guesses: Vec<u32>,
}

pub(crate) struct DraftModel {
    core: Core,
    sequences: BTreeMap<RequestId, SequenceState>,
}

impl DraftModel {
    pub(crate) fn new(runner: Box<dyn Runner>) -> DraftModel {
        let kv = *runner.kv();
        DraftModel { core: Core::new(runner, kv.max_blocks * kv.kv_block), sequences: BTreeMap::new() }
    }

    pub(crate) fn model(&self) -> &Model {
        self.core.model()
    }

    /// How its steps ran.
    pub(crate) fn ledger(&self) -> &Ledger {
        self.core.ledger()
    }

    /// Releases the cache of a request that has ended.
    pub(crate) fn forget(&mut self, id: RequestId) {
        if let Some(state) = self.sequences.remove(&id) {
            self.core.leave(&state);
        }
    }

    /// Guesses tokens for several requests with common steps. A request whose tokens the model does not know, or that
    /// has no place in its cache, gets none.
    pub(crate) fn draft(&mut self, requests: &mut [DraftRequest<'_>]) -> Result<(), EngineError> {
        self.core.drain();
        let mut states = Vec::with_capacity(requests.len());
        for request in requests.iter_mut() {
            let state = self.sequences.remove(&request.id).unwrap_or_else(|| self.core.open());
            if !self.can_guess(request, &state) {
                request.n = 0;
            }
            states.push((request.id, state));
        }
        let drafted = self.draft_with(requests, &mut states);
        self.sequences.extend(states);
        drafted
    }

    fn can_guess(&self, request: &mut DraftRequest<'_>, state: &SequenceState) -> bool {
        let vocab = self.core.model().config().n_vocab as u32;
        let room = state.context.saturating_sub(request.tokens.len());
        request.n = request.n.min(room);
        let known = state.n_cached(request.tokens);
        request.row.bias_ids.iter().all(|&id| id < vocab as i32)
            && request.tokens[known..].iter().all(|&token| token < vocab)
    }

    fn draft_with(
        &mut self,
        requests: &mut [DraftRequest<'_>],
        states: &mut [(RequestId, SequenceState)],
    ) -> Result<(), EngineError> {
        for (request, (_, state)) in requests.iter_mut().zip(states.iter_mut()).filter(|(r, _)| r.n > 0) {
            state.begin(request.tokens);
            // Blocks for the guesses too: running out of them halfway would waste the steps before.
            if state.table.fit(request.tokens.len() + request.n).is_err() {
                state.clear();
                request.n = 0;
            }
        }
        while self.catch_up(requests, states)? {}
        loop {
            let mut idxs = Vec::new();
            let mut rows: Vec<DecodeRow<'_>> = Vec::new();
            for (idx, (request, (_, state))) in requests.iter_mut().zip(states.iter_mut()).enumerate() {
                let n_left = request.n.saturating_sub(request.guesses.len());
                let Some(&token) = request.guesses.last().or(request.tokens.last()) else { continue };
                if n_left > 0 {
                    idxs.push(idx);
                    let ahead = Lookahead { n_tokens: n_left, end: &[] };
                    rows.push(DecodeRow { sequence: state, token, row: &mut request.row, ahead });
                }
            }
            if rows.is_empty() {
                return Ok(());
            }
            let step = self.core.decode_rows(&mut rows, LaunchPolicy::LaunchAhead)?;
            for (idx, choice) in idxs.into_iter().zip(step.choices) {
                match choice {
                    Some(Ok(chosen)) => requests[idx].guesses.push(chosen.token),
                    // The guesses before stand.
                    Some(Err(_)) => requests[idx].n = requests[idx].guesses.len(),
                    None => {}
                }
            }
        }
    }

    /// Evaluates tokens before the last of each request, which is the input of its first guess: one of them after a step
    /// whose guesses were all accepted, many after a prompt. Returns false once there are none.
    fn catch_up(
        &mut self,
        requests: &[DraftRequest<'_>],
        states: &mut [(RequestId, SequenceState)],
    ) -> Result<bool, EngineError> {
        let (mut budget, mut parts) = (self.core.max_tokens(), Vec::new());
        for (idx, (request, (_, state))) in requests.iter().zip(&*states).enumerate() {
            let n_before = request.tokens.len().saturating_sub(1);
            let n = n_before.saturating_sub(state.tokens.len()).min(budget);
            if request.n > 0 && n > 0 && parts.len() < self.core.max_seqs() {
                budget -= n;
                parts.push((idx, state.tokens.len()..state.tokens.len() + n));
            }
        }
        if parts.is_empty() {
            return Ok(false);
        }
        let steps: Vec<_> = parts
            .iter()
            .map(|(idx, part)| states[*idx].1.request(&requests[*idx].tokens[part.clone()], Want::Nothing))
            .collect();
        let ledgers: Vec<_> = parts.iter().map(|(idx, _)| &states[*idx].1.ledger).collect();
        self.core.step(step_kind(&steps), &steps, &ledgers)?;
        drop(steps);
        for (idx, part) in parts {
            states[idx].1.tokens.extend_from_slice(&requests[idx].tokens[part]);
        }
        Ok(true)
    }
}
