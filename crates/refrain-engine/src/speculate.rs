//! Speculation: where guessed tokens come from, and how many are worth checking.
//!
//! Everything here is a function of tokens and counts, never of time: the same seed chooses the same number of
//! guesses.

use crate::error::EngineError;
use refrain_models::Model;
use std::fmt;
use std::sync::Arc;

/// Maximum number of guesses per verify step: with the token before them they fill 16 rows.
pub const MAX_DRAFT: usize = 15;

/// Guesses the tokens that follow others.
pub trait Drafter: Send + Sync + fmt::Debug {
    /// Up to `n` tokens that may follow `tokens`, the prompt and the reply so far. Called on the engine's thread before
    /// a step, so it should take microseconds.
    fn draft(&self, tokens: &[u32], n: usize) -> Vec<u32>;
}

/// Where guesses come from.
#[derive(Clone, Debug)]
pub enum DraftSource {
    /// What followed the last tokens where they occurred before, in the prompt or in the reply ([`ngram_draft`]).
    Ngram,
    /// The engine's draft model.
    Model,
    /// Another source.
    Custom(Arc<dyn Drafter>),
}

/// Speculation of a request: guessed tokens are checked with one step, and those that equal what would have been chosen
/// are kept. The chosen tokens are the same as without it, as far as logits do not depend on the number of rows
/// in a step.
#[derive(Clone, Debug)]
pub struct Speculation {
    /// Where guesses come from.
    pub source: DraftSource,
    /// Maximum number of guesses per step, 1 to [`MAX_DRAFT`].
    pub max_draft: usize,
    /// Whether the number of guesses follows from the rate of acceptance, down to none where they cost more than they
    /// save. Otherwise every step checks as many as there are.
    pub is_adaptive: bool,
    /// For measurements of models with random weights: keeps each guess with this probability, whatever the model
    /// says. The text is meaningless.
    pub forced_acceptance: Option<f32>,
}

impl Speculation {
    /// Speculation with guesses from this source.
    pub fn from(source: DraftSource) -> Speculation {
        Speculation { source, max_draft: MAX_DRAFT, is_adaptive: true, forced_acceptance: None }
    }

    /// Refuses values out of range, and models whose state cannot be cut at a rejected guess.
    pub(crate) fn check(&self, model: &Model, has_draft_model: bool) -> Result<(), EngineError> {
        if self.max_draft == 0 || self.max_draft > MAX_DRAFT {
            return Err(EngineError::DraftTokens { got: self.max_draft, max: MAX_DRAFT });
        }
        if let Some(got) = self.forced_acceptance.filter(|p| !(0.0..=1.0).contains(p)) {
            return Err(EngineError::ForcedAcceptance { got });
        }
        if model.has_slots() {
            return Err(EngineError::CannotSpeculate { arch: model.config().arch.name() });
        }
        match self.source {
            DraftSource::Model if !has_draft_model => Err(EngineError::NoDraftModel),
            DraftSource::Ngram | DraftSource::Model | DraftSource::Custom(_) => Ok(()),
        }
    }
}

/// Shortest repetition that guesses are taken from: a single token repeats by chance.
const MIN_MATCH: usize = 2;
/// Longer repetitions are not preferred to others of this length.
const MAX_MATCH: usize = 16;

/// Tokens that a lookup searches, from the end: about 10 us.
const SEARCHED: usize = 1 << 15;

/// Returns up to `n` tokens that followed the longest earlier occurrence of the last tokens; the latest one if several
/// are equally long. A repetition that reaches the end is continued periodically.
pub fn ngram_draft(tokens: &[u32], n: usize) -> Vec<u32> {
    let Some((last, before)) = tokens.split_last() else { return Vec::new() };
    let (mut longest, mut follows) = (MIN_MATCH - 1, None);
    let first = before.len().saturating_sub(SEARCHED);
    for end in (first..before.len()).rev().filter(|&end| before[end] == *last) {
        let preceding = before[..end].iter().rev().zip(before.iter().rev());
        let length = 1 + preceding.take(MAX_MATCH - 1).take_while(|(a, b)| a == b).count();
        if length > longest {
            (longest, follows) = (length, Some(end + 1));
            if length == MAX_MATCH {
                break;
            }
        }
    }
    let Some(start) = follows else { return Vec::new() };
    tokens[start..].iter().copied().cycle().take(n).collect()
}

/// Cost of verify steps relative to a decode step of one sequence.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct VerifyCost {
    /// Added by the host's part in each step.
    pub fixed: f32,
    /// Added by each row.
    pub row: f32,
    /// Added by each guess of a draft model.
    pub guess: f32,
    /// Whether rows are padded to powers of two.
    pub is_padded: bool,
}

impl VerifyCost {
    /// Cost of a verify step with `k` guesses for each of `n_seqs` sequences, relative to a decode step of them.
    fn of(&self, k: usize, n_seqs: usize) -> f32 {
        let n_rows = match self.is_padded {
            true => (n_seqs * (1 + k)).next_power_of_two(),
            false => n_seqs * (1 + k),
        };
        let decode = 1.0 + self.row * (n_seqs - 1) as f32;
        let verify = 1.0 + self.fixed + self.row * (n_rows - 1) as f32 + self.guess * k as f32;
        verify / decode
    }
}

/// Why a sequence does not speculate for a while.
#[derive(Clone, Debug, PartialEq)]
pub enum SpeculationPause {
    /// Too few guesses were accepted.
    DoesNotPay {
        /// Guesses that were checked so far.
        drafted: u64,
        /// Those that were accepted.
        accepted: u64,
        /// Cost of a step with one guess, in decode steps; a guess must be right with the probability above 1.
        cost: f32,
    },
    /// A verify step failed; the same tokens were then decoded without guesses.
    StepFailed {
        /// The error.
        what: String,
    },
    /// The draft model failed.
    DraftFailed {
        /// The error.
        what: String,
    },
}

impl fmt::Display for SpeculationPause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SpeculationPause::DoesNotPay { cost, .. } if *cost >= 2.0 => {
                write!(f, "it cannot pay: a step with one guess costs as much as {cost:.1} decode steps")
            }
            SpeculationPause::DoesNotPay { drafted, accepted, cost } => {
                let needed = 100.0 * (cost - 1.0);
                write!(
                    f,
                    "it does not pay: {accepted} of {drafted} guesses were accepted, {needed:.0} % are needed"
                )
            }
            SpeculationPause::StepFailed { what } => write!(f, "a verify step failed: {what}"),
            SpeculationPause::DraftFailed { what } => write!(f, "the draft model failed: {what}"),
        }
    }
}

/// Tokens decoded before a draft model that could not guess is asked again.
const AFTER_NO_GUESS: usize = 32;
/// Tokens of the first pause, and of the longest.
const PAUSES: [usize; 2] = [16, 512];
/// Tested guesses that the estimate of acceptance remembers.
const MEMORY: f32 = 24.0;

/// Speculation of one running request.
#[derive(Debug)]
pub(crate) struct Speculator {
    pub(crate) rules: Speculation,
    cost: VerifyCost,
    /// Accepted guesses and checked ones, recent ones first.
    hits: f32,
    trials: f32,
    /// Tokens to decode before the next guesses.
    n_plain: usize,
    next_pause: usize,
    drafted: u64,
    accepted: u64,
    /// Guesses for the next step, and the number of tokens that they follow.
    guesses: Vec<u32>,
    guessed_at: usize,
}

impl Speculator {
    pub(crate) fn new(rules: Speculation, cost: VerifyCost) -> Speculator {
        let expected = if matches!(rules.source, DraftSource::Model) { 0.7 } else { 0.5 };
        Speculator {
            rules,
            cost,
            hits: 2.0 * expected,
            trials: 2.0,
            n_plain: 0,
            next_pause: PAUSES[0],
            drafted: 0,
            accepted: 0,
            guesses: Vec::new(),
            guessed_at: 0,
        }
    }

    /// Tokens to decode before it guesses again.
    pub(crate) fn n_plain(&self) -> usize {
        self.n_plain
    }

    /// Tokens that may be launched ahead without guesses. A lookup goes on while steps are in flight; a draft model
    /// waits for them.
    pub(crate) fn n_ahead(&self) -> usize {
        match self.rules.source {
            DraftSource::Model => self.n_plain.max(1),
            DraftSource::Ngram | DraftSource::Custom(_) if self.n_plain > 0 => self.n_plain,
            DraftSource::Ngram | DraftSource::Custom(_) => usize::MAX,
        }
    }

    /// Records a token that was chosen without guesses.
    pub(crate) fn decoded(&mut self) {
        self.n_plain = self.n_plain.saturating_sub(1);
    }

    /// Guesses after `n_tokens` tokens, if they were made.
    pub(crate) fn guesses(&self, n_tokens: usize) -> Option<&[u32]> {
        (self.guessed_at == n_tokens && self.n_plain == 0).then_some(&self.guesses)
    }

    pub(crate) fn set_guesses(&mut self, n_tokens: usize, guesses: Vec<u32>) {
        if guesses.is_empty() && matches!(self.rules.source, DraftSource::Model) {
            self.n_plain = AFTER_NO_GUESS;
        }
        (self.guesses, self.guessed_at) = (guesses, n_tokens);
    }

    /// Number of guesses to check next in a step of `n_seqs` sequences, or why there are none for a while.
    pub(crate) fn n_guesses(&mut self, n_seqs: usize) -> Result<usize, SpeculationPause> {
        if !self.rules.is_adaptive {
            return Ok(self.rules.max_draft);
        }
        let rate = self.hits / self.trials;
        let gain = |k: usize| {
            let emitted: f32 = (0..=k).map(|i| rate.powi(i as i32)).sum();
            emitted / self.cost.of(k, n_seqs)
        };
        let best = (1..=self.rules.max_draft).max_by(|a, b| gain(*a).total_cmp(&gain(*b)));
        match best.filter(|k| gain(*k) > 1.0) {
            Some(k) => Ok(k),
            None => Err(self.pause(n_seqs)),
        }
    }

    fn pause(&mut self, n_seqs: usize) -> SpeculationPause {
        self.n_plain = self.next_pause;
        self.next_pause = (2 * self.next_pause).min(PAUSES[1]);
        // Afterwards a single failure pauses again.
        let cost = self.cost.of(1, n_seqs);
        (self.hits, self.trials) = ((cost - 1.0 + 0.15).min(0.95), 1.0);
        SpeculationPause::DoesNotPay { drafted: self.drafted, accepted: self.accepted, cost }
    }

    /// Pauses after an error.
    pub(crate) fn failed(&mut self) {
        self.n_plain = self.next_pause;
        self.next_pause = (2 * self.next_pause).min(PAUSES[1]);
    }

    /// Records the result of a verify step.
    pub(crate) fn observe(&mut self, n_drafted: usize, n_accepted: usize) {
        if n_drafted == 0 {
            return;
        }
        (self.drafted, self.accepted) = (self.drafted + n_drafted as u64, self.accepted + n_accepted as u64);
        // Guesses after the first wrong one were not tested.
        let tested = n_accepted + usize::from(n_accepted < n_drafted);
        let kept = ((MEMORY - tested as f32) / self.trials).clamp(0.0, 1.0);
        self.hits = kept * self.hits + n_accepted as f32;
        self.trials = kept * self.trials + tested as f32;
        if n_accepted == n_drafted {
            self.next_pause = PAUSES[0];
        }
    }
}

/// Whether a measurement keeps the guess at a position.
pub(crate) fn is_kept_by_force(seed: u64, position: usize, probability: f32) -> bool {
    let mut x = seed ^ (position as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    ((x >> 40) as f32) < probability * (1u64 << 24) as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEVICE: VerifyCost = VerifyCost { fixed: 0.02, row: 0.01, guess: 0.0, is_padded: true };

    #[test]
    fn guesses_are_what_followed_the_longest_repetition() {
        assert_eq!(ngram_draft(&[1, 2, 3, 4, 5, 9, 2, 3], 3), [4, 5, 9]);
        // Both 2 3 and 1 2 3 occurred before; the longer one counts although it is older.
        assert_eq!(ngram_draft(&[1, 2, 3, 7, 2, 3, 8, 1, 2, 3], 2), [7, 2]);
        // Of two equal ones the latest.
        assert_eq!(ngram_draft(&[2, 3, 7, 2, 3, 8, 2, 3], 2), [8, 2]);
    }

    #[test]
    fn a_repetition_at_the_end_continues_periodically() {
        assert_eq!(ngram_draft(&[5, 6, 7, 5, 6, 7], 7), [5, 6, 7, 5, 6, 7, 5]);
        assert_eq!(ngram_draft(&[4, 4, 4], 3), [4, 4, 4]);
    }

    #[test]
    fn text_without_repetition_gives_no_guesses() {
        for (tokens, n) in [(&[][..], 4), (&[1], 4), (&[1, 2, 1], 4), (&[1, 2, 3, 1, 2], 0)] {
            assert!(ngram_draft(tokens, n).is_empty(), "{tokens:?}");
        }
    }

    #[test]
    fn accepted_guesses_raise_their_number_and_rejected_ones_lower_it() {
        let mut speculator = Speculator::new(Speculation::from(DraftSource::Ngram), DEVICE);
        let first = speculator.n_guesses(1).unwrap();
        assert!((3..MAX_DRAFT).contains(&first), "{first}");
        for _ in 0..10 {
            let n = speculator.n_guesses(1).unwrap();
            speculator.observe(n, n);
        }
        assert_eq!(speculator.n_guesses(1), Ok(MAX_DRAFT));
        for _ in 0..12 {
            speculator.observe(7, 1);
        }
        let lower = speculator.n_guesses(1).unwrap();
        assert!(lower <= 7, "{lower}");
    }

    #[test]
    fn guesses_that_are_never_accepted_cost_less_than_three_percent_of_five_hundred_steps() {
        let cpu = VerifyCost { fixed: 0.0, row: 0.4, guess: 0.0, is_padded: false };
        for (cost, budget) in [(DEVICE, 15.0), (cpu, 15.0)] {
            let mut speculator = Speculator::new(Speculation::from(DraftSource::Ngram), cost);
            let (mut spent, mut n_pauses) = (0.0, 0);
            let mut n_tokens = 0;
            while n_tokens < 500 {
                if speculator.n_plain() > 0 {
                    speculator.decoded();
                } else {
                    match speculator.n_guesses(1) {
                        Ok(k) => {
                            spent += cost.of(k, 1) - 1.0;
                            speculator.observe(k, 0);
                        }
                        Err(SpeculationPause::DoesNotPay { accepted, .. }) => {
                            assert_eq!(accepted, 0);
                            n_pauses += 1;
                            continue;
                        }
                        Err(other) => panic!("{other}"),
                    }
                }
                n_tokens += 1;
            }
            assert!(spent < budget, "{spent} steps of 500");
            assert!(n_pauses >= 4, "{n_pauses}");
        }
    }

    #[test]
    fn forced_acceptance_has_the_given_probability() {
        for probability in [0.0, 0.3, 0.7, 1.0] {
            let kept = (0..10_000).filter(|&p| is_kept_by_force(7, p, probability)).count();
            assert!((kept as f32 / 1e4 - probability).abs() < 0.02, "{kept} of 10000 at {probability}");
        }
    }
}
