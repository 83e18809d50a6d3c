//! Verify steps: guessed tokens of running requests, checked with one step.
//!
//! A verify step evaluates the newest token of each sequence and its guesses, and chooses a token after each row as a
//! decode step at that position would. Guesses are accepted while they equal the choices, so the choices up to the
//! first difference are delivered one after another, like those of as many decode steps. The KV of rejected rows lies
//! behind the end of the sequence, where the next step overwrites it.

use crate::core::Core;
use crate::draft_model::DraftRequest;
use crate::error::{EngineError, Stopped};
use crate::mailbox::Mailbox;
use crate::request::lock;
use crate::runner::TokenChoice;
use crate::sampling::SamplingRow;
use crate::schedule::StepRow;
use crate::serve::Server;
use crate::speculate::{DraftSource, SpeculationPause, is_kept_by_force, ngram_draft};
use crate::step::{StepRequest, Want};
use refrain_graph::StepKind;
use std::time::{Duration, Instant};

/// Maximum number of rows of a verify step with guesses: more rows cost as much as they save.
const MAX_ROWS: usize = 64;

/// Choices of one request that are kept.
type Emitted = Vec<Result<TokenChoice, EngineError>>;

impl Core {
    /// The choices of the last step for each request that verifies guesses.
    fn take_verified(&mut self) -> Vec<Emitted> {
        std::mem::take(&mut self.out.verified)
    }
}

/// The choices that are kept: those after the newest token and after each accepted guess. `keeps` says whether the
/// guess with this index stands in for a choice.
fn accepted(guesses: &[u32], choices: Emitted, keeps: impl Fn(usize) -> Option<bool>) -> Emitted {
    let mut emitted = Emitted::with_capacity(choices.len());
    for (idx, choice) in choices.into_iter().enumerate() {
        let (guess, choice) = match (guesses.get(idx), choice) {
            (Some(&guess), Ok(choice)) => (guess, choice),
            (_, last) => {
                emitted.push(last);
                break;
            }
        };
        let is_kept = keeps(idx).unwrap_or(choice.chosen.token == guess);
        let token = if is_kept { guess } else { choice.chosen.token };
        emitted.push(Ok(TokenChoice { chosen: crate::core::Chosen { token, ..choice.chosen }, ..choice }));
        if !is_kept {
            break;
        }
    }
    emitted
}

impl Server {
    /// Whether the next step of these rows should check guesses, which are made here. It takes no part in steps that
    /// evaluate prompts.
    pub(crate) fn has_guesses(&mut self, rows: &[StepRow]) -> bool {
        let is_decoded = |row: &StepRow| {
            let n_chosen = self.jobs.get(&row.id).map_or(0, |job| job.n_chosen);
            row.n_tokens == 1 && row.chooses && n_chosen > 0
        };
        let speculates = |row: &&StepRow| self.jobs.get(&row.id).is_some_and(|job| job.speculator.is_some());
        let n_speculating = rows.iter().filter(speculates).count();
        let most = self.core.max_tokens().min(MAX_ROWS);
        if n_speculating == 0 || rows.len() >= most || !rows.iter().all(is_decoded) {
            return false;
        }
        let n_spare = (most - rows.len()) / n_speculating;
        let mut wanted = Vec::new();
        let mut has_guesses = false;
        for row in rows {
            match self.n_wanted(row, rows.len(), n_spare) {
                Some(Wanted::Known(n)) => has_guesses |= n > 0,
                Some(Wanted::New(n)) => wanted.push((row.id, n)),
                None => {}
            }
        }
        self.guess(&wanted) || has_guesses
    }

    /// Number of guesses to make for a row.
    fn n_wanted(&mut self, row: &StepRow, n_seqs: usize, n_spare: usize) -> Option<Wanted> {
        let (active, job) = (self.scheduler.find(row.id)?, self.jobs.get_mut(&row.id)?);
        let n_tokens = active.tokens.len();
        let speculator = job.speculator.as_mut().filter(|speculator| speculator.n_plain() == 0)?;
        if let Some(guesses) = speculator.guesses(n_tokens) {
            return Some(Wanted::Known(guesses.len()));
        }
        // A lookup is cheap: guesses after a token whose step is in flight only say that no more are to be launched.
        let is_model = matches!(speculator.rules.source, DraftSource::Model);
        if is_model && self.core.has_in_flight(&active.state, *active.tokens.last()?) {
            return None;
        }
        // The last choice needs no guess, and every guess needs a position.
        let limits = [
            n_spare,
            (job.request.max_tokens - job.n_chosen).saturating_sub(1),
            active.state.context.saturating_sub(n_tokens),
            job.channel.n_free().saturating_sub(1),
        ];
        let most = limits.into_iter().min().unwrap_or(0);
        match speculator.n_guesses(n_seqs) {
            Ok(n) if n.min(most) > 0 => Some(Wanted::New(n.min(most))),
            Ok(_) => {
                speculator.set_guesses(n_tokens, Vec::new());
                None
            }
            Err(pause) => {
                self.core.ledger.paused(&pause);
                lock(&active.state.ledger).paused(&pause);
                None
            }
        }
    }

    /// Makes guesses; true if there are any.
    fn guess(&mut self, wanted: &[(crate::request::RequestId, usize)]) -> bool {
        let mut for_model = Vec::new();
        let mut has_guesses = false;
        for &(id, n) in wanted {
            let (Some(active), Some(job)) = (self.scheduler.find(id), self.jobs.get_mut(&id)) else {
                continue;
            };
            let Some(speculator) = &mut job.speculator else { continue };
            let mut guesses = match &speculator.rules.source {
                DraftSource::Ngram => ngram_draft(&active.tokens, n),
                DraftSource::Custom(drafter) => drafter.draft(&active.tokens, n),
                DraftSource::Model => {
                    let (tokens, row) = (&active.tokens[..], job.row.clone());
                    for_model.push(DraftRequest { id, tokens, row, n, guesses: Vec::new() });
                    continue;
                }
            };
            let vocab = self.core.model().config().n_vocab;
            if guesses.is_empty() && speculator.rules.forced_acceptance.is_some() {
                // Random weights repeat nothing; a measurement still needs guesses.
                guesses = active.tokens.iter().copied().cycle().take(n).collect();
            }
            guesses.truncate(n);
            let n_known = guesses.iter().take_while(|&&token| (token as usize) < vocab).count();
            guesses.truncate(n_known);
            has_guesses |= !guesses.is_empty();
            speculator.set_guesses(active.tokens.len(), guesses);
        }
        let (Some(model), false) = (&mut self.draft_model, for_model.is_empty()) else { return has_guesses };
        let began = Instant::now();
        let drafted = model.draft(&mut for_model);
        let took = began.elapsed();
        let pause = drafted.err().map(|error| SpeculationPause::DraftFailed { what: error.to_string() });
        let vocab = self.core.model().config().n_vocab;
        let drafts: Vec<_> =
            for_model.into_iter().map(|draft| (draft.id, draft.tokens.len(), draft.guesses)).collect();
        self.core.ledger.drafting(took);
        for (id, n_tokens, mut guesses) in drafts {
            let (Some(active), Some(job)) = (self.scheduler.find(id), self.jobs.get_mut(&id)) else {
                continue;
            };
            let Some(speculator) = &mut job.speculator else { continue };
            lock(&active.state.ledger).drafting(took);
            job.prefill += took;
            if let Some(pause) = &pause {
                guesses.clear();
                speculator.failed();
                self.core.ledger.paused(pause);
                lock(&active.state.ledger).paused(pause);
            }
            let n_known = guesses.iter().take_while(|&&token| (token as usize) < vocab).count();
            guesses.truncate(n_known);
            has_guesses |= !guesses.is_empty();
            speculator.set_guesses(n_tokens, guesses);
        }
        has_guesses
    }

    /// Runs a verify step and delivers what it chose. If it fails, the rows are decoded without guesses.
    pub(crate) fn verify(&mut self, mailbox: &Mailbox, rows: &[StepRow]) -> Result<(), Stopped> {
        self.core.drain();
        let rows = &self.rows_with_masks(mailbox, rows)?[..];
        if rows.is_empty() {
            return Ok(());
        }
        let guesses: Vec<Vec<u32>> = rows.iter().map(|row| self.take_guesses(row)).collect();
        let (verified, took) = match self.try_verify(rows, &guesses) {
            Ok(verified) => verified,
            Err(error) if error.stops().is_some() => return self.step_failed(mailbox, rows, error),
            Err(error) => {
                let pause = SpeculationPause::StepFailed { what: error.reason().to_string() };
                self.pause(rows, &pause);
                return self.step(mailbox, rows);
            }
        };
        for ((row, guesses), choices) in rows.iter().zip(&guesses).zip(verified) {
            let Some(start) = self.scheduler.find(row.id).map(|active| active.tokens.len()) else { continue };
            let Some(job) = self.jobs.get_mut(&row.id) else { continue };
            let forced = job.speculator.as_ref().and_then(|speculator| speculator.rules.forced_acceptance);
            let seed = job.request.sampling.seed;
            let emitted = accepted(guesses, choices, |idx| {
                forced.map(|probability| is_kept_by_force(seed, start + idx, probability))
            });
            let n_accepted = emitted.len().saturating_sub(1);
            self.scheduler.charge(row.id, guesses.len());
            if let Some(speculator) = &mut job.speculator {
                speculator.observe(guesses.len(), n_accepted);
            }
            // Before the tokens are delivered: one of them may end the request, whose ledger is complete then.
            let counts = (guesses.len(), n_accepted);
            self.core.ledger.speculated(counts);
            if let Some(active) = self.scheduler.find(row.id) {
                lock(&active.state.ledger).speculated(counts);
            }
            let took = took / emitted.len().max(1) as u32;
            for choice in emitted {
                let Some(active) = self.scheduler.find(row.id) else { break };
                let n_emitted = usize::from(choice.is_ok());
                lock(&active.state.ledger).emitted(n_emitted);
                self.core.ledger.emitted(n_emitted);
                self.deliver(mailbox, *row, Some(choice), took)?;
            }
        }
        Ok(())
    }

    /// The guesses of a row for which its sequence has or gets blocks.
    fn take_guesses(&mut self, row: &StepRow) -> Vec<u32> {
        let Some(active) = self.scheduler.get(row.id) else { return Vec::new() };
        let Some(job) = self.jobs.get_mut(&row.id) else { return Vec::new() };
        let Some(speculator) = &mut job.speculator else { return Vec::new() };
        let n_tokens = active.tokens.len();
        let mut guesses = speculator.guesses(n_tokens).unwrap_or_default().to_vec();
        while !guesses.is_empty() && active.state.table.cover(n_tokens + guesses.len()).is_err() {
            guesses.pop();
        }
        guesses
    }

    fn try_verify(
        &mut self,
        rows: &[StepRow],
        guesses: &[Vec<u32>],
    ) -> Result<(Vec<Emitted>, Duration), EngineError> {
        let mut parts: Vec<(Vec<u32>, Vec<SamplingRow>)> = Vec::with_capacity(rows.len());
        for (row, guesses) in rows.iter().zip(guesses) {
            let (Some(active), Some(job)) = (self.scheduler.get(row.id), self.jobs.get_mut(&row.id)) else {
                unreachable!("{} was scheduled", row.id)
            };
            let (mut tokens, mut sampling) = (Vec::new(), Vec::new());
            let start = active.state.tokens.len();
            tokens.extend_from_slice(&active.tokens[start..start + 1]);
            job.row.advance(start + 1, &active.tokens[..start + 1]);
            sampling.push(job.row.clone());
            active.tokens.truncate(start + 1);
            for (idx, guess) in (start + 2..).zip(guesses) {
                tokens.push(*guess);
                active.tokens.push(*guess);
                let mut row = job.row.clone();
                row.advance(idx, &active.tokens);
                sampling.push(row);
            }
            active.tokens.truncate(start + 1);
            parts.push((tokens, sampling));
        }
        let (mut requests, mut ledgers) = (Vec::with_capacity(rows.len()), Vec::with_capacity(rows.len()));
        for (row, (tokens, sampling)) in rows.iter().zip(&parts) {
            let Some(active) = self.scheduler.find(row.id) else { unreachable!("{} was scheduled", row.id) };
            let request: StepRequest<'_> = active.state.request(tokens, Want::Verify(sampling));
            requests.push(request);
            ledgers.push(&active.state.ledger);
        }
        let took = self.core.step(StepKind::Verify, &requests, &ledgers)?;
        Ok((self.core.take_verified(), took))
    }

    /// Releases the draft model's cache of a request.
    pub(crate) fn forget_drafts(&mut self, id: crate::request::RequestId) {
        if let Some(model) = &mut self.draft_model {
            model.forget(id);
        }
    }

    fn pause(&mut self, rows: &[StepRow], pause: &SpeculationPause) {
        self.core.ledger.paused(pause);
        for row in rows {
            let Some(active) = self.scheduler.find(row.id) else { continue };
            let job = self.jobs.get_mut(&row.id);
            if let Some(speculator) = job.and_then(|job| job.speculator.as_mut()) {
                speculator.failed();
                lock(&active.state.ledger).paused(pause);
            }
        }
    }
}

/// Guesses of a row.
enum Wanted {
    /// As many were made before.
    Known(usize),
    /// As many are to be made.
    New(usize),
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::Chosen;

    fn choices(tokens: &[u32]) -> Emitted {
        let choice =
            |&token: &u32| Ok(TokenChoice { chosen: Chosen { token, logprob: -1.0 }, top: Vec::new() });
        tokens.iter().map(choice).collect()
    }

    fn tokens(emitted: &Emitted) -> Vec<u32> {
        emitted.iter().map(|choice| choice.as_ref().unwrap().chosen.token).collect()
    }

    #[test]
    fn choices_are_kept_up_to_the_first_that_differs_from_its_guess() {
        let kept = |guesses: &[u32], chosen: &[u32]| tokens(&accepted(guesses, choices(chosen), |_| None));
        assert_eq!(kept(&[5, 6, 7], &[5, 6, 7, 8]), [5, 6, 7, 8]);
        assert_eq!(kept(&[5, 6, 7], &[5, 9, 7, 8]), [5, 9]);
        assert_eq!(kept(&[5, 6, 7], &[4, 6, 7, 8]), [4]);
        assert_eq!(kept(&[], &[4]), [4]);
    }

    #[test]
    fn logits_that_are_not_finite_end_a_request_only_where_it_arrives_at_them() {
        let mut chosen = choices(&[5, 6, 7]);
        chosen[1] = Err(EngineError::NoRun);
        let kept = accepted(&[5, 6], chosen, |_| None);
        assert_eq!(kept.len(), 2);
        assert!(kept[1].is_err());
        let mut chosen = choices(&[4, 6, 7]);
        chosen[1] = Err(EngineError::NoRun);
        assert_eq!(tokens(&accepted(&[5, 6], chosen, |_| None)), [4]);
    }
}
