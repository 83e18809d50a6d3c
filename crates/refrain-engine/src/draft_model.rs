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
use crate::step::Want;
use refrain_graph::StepKind;
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

    /// Size of its weights.
    pub(crate) fn weight_bytes(&self) -> usize {
        self.core.model().weight_bytes()
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
                continue;
            }
            while request.tokens.len() - state.tokens.len() > CATCH_UP {
                let end = request.tokens.len() - CATCH_UP;
                let end = end.min(state.tokens.len() + self.core.max_tokens());
                let tokens = &request.tokens[state.tokens.len()..end];
                let step = [state.request(tokens, Want::Nothing)];
                self.core.step(StepKind::Prompt, &step, &[&state.ledger])?;
                state.tokens.extend_from_slice(tokens);
            }
        }
        self.catch_up(requests, states)?;
        // The first guess of each is chosen; the others follow with steps that feed themselves.
        loop {
            let mut idxs = Vec::new();
            let mut rows: Vec<DecodeRow<'_>> = Vec::new();
            for (idx, (request, (_, state))) in requests.iter_mut().zip(states.iter_mut()).enumerate() {
                let (n_left, Some(&token)) = (request.n - request.guesses.len(), request.guesses.last())
                else {
                    continue;
                };
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

    /// Evaluates the last tokens of all requests together, and chooses the first guesses.
    fn catch_up(
        &mut self,
        requests: &mut [DraftRequest<'_>],
        states: &mut [(RequestId, SequenceState)],
    ) -> Result<(), EngineError> {
        let mut idxs: Vec<usize> = (0..requests.len()).filter(|&idx| requests[idx].n > 0).collect();
        let most = (self.core.max_tokens() / CATCH_UP).min(self.core.max_seqs()).max(1);
        while !idxs.is_empty() {
            let some: Vec<usize> = idxs.drain(..idxs.len().min(most)).collect();
            for &idx in &some {
                let request = &mut requests[idx];
                request.row.advance(request.tokens.len(), request.tokens);
            }
            let (mut steps, mut ledgers) = (Vec::new(), Vec::new());
            for &idx in &some {
                let (request, (_, state)) = (&requests[idx], &states[idx]);
                let tokens = &request.tokens[state.tokens.len()..];
                steps.push(state.request(tokens, Want::Sample(&request.row)));
                ledgers.push(&state.ledger);
            }
            self.core.step(crate::step::step_kind(&steps), &steps, &ledgers)?;
            drop(steps);
            let choices: Vec<_> = self.core.take_choices().collect();
            for (idx, choice) in some.into_iter().zip(choices) {
                let (request, (_, state)) = (&mut requests[idx], &mut states[idx]);
                state.tokens.clear();
                state.tokens.extend_from_slice(request.tokens);
                match choice {
                    Some(Ok(choice)) => request.guesses.push(choice.chosen.token),
                    Some(Err(_)) | None => request.n = 0,
                }
            }
        }
        Ok(())
    }
}

/// Tokens that several requests evaluate together before their first guesses. After a step whose guesses were all
/// accepted, there are two.
const CATCH_UP: usize = 2;
