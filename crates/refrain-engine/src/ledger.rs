//! The ledger: a record of how every step ran, and why if not as a replay.

use crate::speculate::SpeculationPause;
use refrain_graph::{Ran, Reason, StepKind};
use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

/// Counts and times of one kind of step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Tally {
    /// Steps that ran entirely as graph replays.
    pub replayed: u64,
    /// Graphs launched by those steps; equal to `replayed` if every step is one launch.
    pub launches: u64,
    /// Host steps that ran between those graphs.
    pub host_steps: u64,
    /// Steps that ran eagerly.
    pub eager: u64,
    /// Steps that failed.
    pub failed: u64,
    /// Steps launched ahead whose results nobody needed because the output had ended. Not part of any other
    /// count.
    pub discarded: u64,
    /// Tokens evaluated.
    pub tokens: u64,
    /// Wall time of all steps. For steps launched ahead, a step's time runs from the previous result to its
    /// own.
    pub total: Duration,
    /// The fastest step.
    pub fastest: Option<Duration>,
    /// The slowest step.
    pub slowest: Option<Duration>,
    /// Steps that an earlier launch repeated on the device. Part of `replayed`.
    pub repeated: u64,
    /// Why steps that the device was to repeat were launched one by one, if there were such: the latest reason.
    pub not_repeated: Option<Reason>,
    /// Reasons why steps were not replayed, by label: the count and the most recent occurrence in full.
    reasons: BTreeMap<&'static str, (u64, Reason)>,
}

impl Tally {
    /// Steps that were replayed, ran eagerly or failed.
    pub fn steps(&self) -> u64 {
        self.replayed + self.eager + self.failed
    }

    /// Tokens per second over all steps; `None` if nothing ran.
    pub fn tokens_per_second(&self) -> Option<f64> {
        let seconds = self.total.as_secs_f64();
        (seconds > 0.0 && self.tokens > 0).then(|| self.tokens as f64 / seconds)
    }

    /// Each reason with its count and most recent occurrence.
    pub fn reasons(&self) -> impl Iterator<Item = (&'static str, u64, &Reason)> {
        self.reasons.iter().map(|(label, (n, last))| (*label, *n, last))
    }
}

impl fmt::Display for Tally {
    /// `412 steps, 380 replayed, 32 eager (graphs are switched off)`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (steps, s) = (self.steps(), if self.steps() == 1 { "" } else { "s" });
        write!(f, "{steps} step{s}, {} replayed", self.replayed)?;
        if self.launches != self.replayed {
            write!(f, " in {} launch{}", self.launches, if self.launches == 1 { "" } else { "es" })?;
        }
        if self.host_steps > 0 {
            let s = if self.host_steps == 1 { "" } else { "s" };
            write!(f, " with {} host step{s}", self.host_steps)?;
        }
        write!(f, ", {} eager", self.eager)?;
        if self.failed > 0 {
            write!(f, ", {} failed", self.failed)?;
        }
        if self.discarded > 0 {
            let s = if self.discarded == 1 { "" } else { "s" };
            write!(f, ", {} speculative step{s} discarded", self.discarded)?;
        }
        let mut reasons: Vec<_> = self.reasons().collect();
        reasons.sort_by_key(|(_, n, _)| std::cmp::Reverse(*n));
        for (i, (_, n, reason)) in reasons.iter().enumerate() {
            let open = if i == 0 { " (" } else { "; " };
            match (reasons.len(), n) {
                (1, _) => write!(f, "{open}{reason}")?,
                (_, 1) => write!(f, "{open}once: {reason}")?,
                _ => write!(f, "{open}{n} times: {reason}")?,
            }
        }
        if !reasons.is_empty() {
            write!(f, ")")?;
        }
        match &self.not_repeated {
            Some(reason) => write!(f, "; launched one by one: {reason}"),
            None => Ok(()),
        }
    }
}

/// Ledger of all steps of an engine. Always on: an entry costs a few additions, plus a map lookup if the step
/// was not replayed.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Ledger {
    tallies: [Tally; StepKind::ALL.len()],
    speculation: SpeculationTally,
}

/// Guessed tokens, and what became of them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SpeculationTally {
    /// Verify steps, counted once for each sequence that took part.
    pub steps: u64,
    /// Guesses that were checked.
    pub drafted: u64,
    /// Those that were accepted.
    pub accepted: u64,
    /// Tokens that verify steps chose: the accepted guesses, and the token after them.
    pub emitted: u64,
    /// Time that a draft model took. Not part of the times of other steps.
    pub drafting: Duration,
    /// Times that speculation was paused.
    pub pauses: u64,
    /// Why it was paused last.
    pub last_pause: Option<SpeculationPause>,
}

impl SpeculationTally {
    /// Fraction of checked guesses that were accepted; `None` if none was checked.
    pub fn acceptance(&self) -> Option<f64> {
        (self.drafted > 0).then(|| self.accepted as f64 / self.drafted as f64)
    }

    /// Tokens per verify step and sequence; `None` without a verify step.
    pub fn tokens_per_step(&self) -> Option<f64> {
        (self.steps > 0).then(|| self.emitted as f64 / self.steps as f64)
    }
}

impl fmt::Display for SpeculationTally {
    /// `41 of 60 guesses accepted (68 %), 2.4 tokens per step; paused 2 times: it does not pay: ..`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {} guesses accepted", self.accepted, self.drafted)?;
        if let (Some(acceptance), Some(tokens)) = (self.acceptance(), self.tokens_per_step()) {
            write!(f, " ({:.0} %), {tokens:.2} tokens per step", 100.0 * acceptance)?;
        }
        match &self.last_pause {
            Some(pause) => {
                let s = if self.pauses == 1 { "" } else { "s" };
                write!(f, "; paused {} time{s}: {pause}", self.pauses)
            }
            None => Ok(()),
        }
    }
}

impl Ledger {
    /// An empty ledger.
    pub fn new() -> Ledger {
        Ledger::default()
    }

    /// Records a step that ran.
    pub fn ran(&mut self, kind: StepKind, n_tokens: usize, took: Duration, ran: &Ran) {
        let tally = self.tally_mut(kind);
        tally.tokens += n_tokens as u64;
        tally.total += took;
        tally.fastest = Some(tally.fastest.map_or(took, |f| f.min(took)));
        tally.slowest = Some(tally.slowest.map_or(took, |s| s.max(took)));
        match ran {
            Ran::Replayed { n_launches, n_host_steps } => {
                tally.replayed += 1;
                tally.repeated += u64::from(*n_launches == 0);
                tally.launches += u64::from(*n_launches);
                tally.host_steps += u64::from(*n_host_steps);
            }
            Ran::Eager(reason) => {
                tally.eager += 1;
                note(tally, reason);
            }
        }
    }

    /// Records a step that failed.
    pub fn failed(&mut self, kind: StepKind, took: Duration, reason: &Reason) {
        let tally = self.tally_mut(kind);
        tally.failed += 1;
        tally.total += took;
        note(tally, reason);
    }

    /// Records why the device does not repeat the steps.
    pub fn not_repeated(&mut self, kind: StepKind, reason: Reason) {
        self.tally_mut(kind).not_repeated = Some(reason);
    }

    /// Records steps that were launched ahead and discarded.
    pub fn discarded(&mut self, kind: StepKind, n: u64) {
        self.tally_mut(kind).discarded += n;
    }

    /// Records a verify step of one sequence: guesses checked, and guesses accepted.
    pub(crate) fn speculated(&mut self, (drafted, accepted): (usize, usize)) {
        self.speculation.steps += 1;
        self.speculation.drafted += drafted as u64;
        self.speculation.accepted += accepted as u64;
    }

    /// Records tokens that a verify step chose.
    pub(crate) fn emitted(&mut self, n: usize) {
        self.speculation.emitted += n as u64;
    }

    /// Records the time of a draft model.
    pub(crate) fn drafting(&mut self, took: Duration) {
        self.speculation.drafting += took;
    }

    /// Records that speculation was paused.
    pub(crate) fn paused(&mut self, why: &SpeculationPause) {
        self.speculation.pauses += 1;
        self.speculation.last_pause = Some(why.clone());
    }

    /// Guessed tokens, and what became of them.
    pub fn speculation(&self) -> &SpeculationTally {
        &self.speculation
    }

    /// Counts and times of one kind of step.
    pub fn tally(&self, kind: StepKind) -> &Tally {
        &self.tallies[kind.idx()]
    }

    fn tally_mut(&mut self, kind: StepKind) -> &mut Tally {
        &mut self.tallies[kind.idx()]
    }
}

fn note(tally: &mut Tally, reason: &Reason) {
    match tally.reasons.get_mut(reason.label()) {
        // Most reasons repeat unchanged; comparing is cheaper than cloning a reason that owns text.
        Some((n, last)) => {
            *n += 1;
            if last != reason {
                *last = reason.clone();
            }
        }
        None => drop(tally.reasons.insert(reason.label(), (1, reason.clone()))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn a_summary_lists_counts_and_the_reason() {
        let mut ledger = Ledger::new();
        for _ in 0..380 {
            ledger.ran(StepKind::Decode, 1, MS, &Ran::REPLAYED);
        }
        for _ in 0..32 {
            ledger.ran(StepKind::Decode, 1, MS, &Ran::Eager(Reason::SwitchedOff));
        }
        let decode = ledger.tally(StepKind::Decode);
        assert_eq!(decode.to_string(), "412 steps, 380 replayed, 32 eager (graphs are switched off)");
        assert_eq!(decode.tokens_per_second().map(f64::round), Some(1000.0));
        assert_eq!(ledger.tally(StepKind::Prompt).to_string(), "0 steps, 0 replayed, 0 eager");
    }

    #[test]
    fn several_reasons_are_listed_most_frequent_first() {
        let mut ledger = Ledger::new();
        ledger.ran(StepKind::Decode, 1, MS, &Ran::Eager(Reason::Profiling));
        for _ in 0..3 {
            ledger.ran(StepKind::Decode, 1, MS, &Ran::Eager(Reason::SwitchedOff));
        }
        ledger.failed(StepKind::Decode, MS, &Reason::ReplayFailed { code: 700 });
        assert_eq!(
            ledger.tally(StepKind::Decode).to_string(),
            "5 steps, 0 replayed, 4 eager, 1 failed (3 times: graphs are switched off; \
             once: profiling times each op, which a graph launch would hide; once: replay failed with error 700)"
        );
    }

    #[test]
    fn the_last_reason_of_a_label_is_kept_in_full() {
        let mut ledger = Ledger::new();
        for code in [700, 719] {
            ledger.ran(StepKind::Decode, 1, MS, &Ran::Eager(Reason::ReplayFailed { code }));
        }
        let all: Vec<_> = ledger.tally(StepKind::Decode).reasons().collect();
        assert_eq!(all, [("replay_failed", 2, &Reason::ReplayFailed { code: 719 })]);
    }

    #[test]
    fn steps_that_the_device_repeats_count_as_replayed_without_a_launch() {
        let mut ledger = Ledger::new();
        ledger.ran(StepKind::Decode, 1, MS, &Ran::REPLAYED);
        for _ in 0..3 {
            ledger.ran(StepKind::Decode, 1, MS, &Ran::Replayed { n_launches: 0, n_host_steps: 0 });
        }
        let decode = ledger.tally(StepKind::Decode);
        assert_eq!((decode.replayed, decode.launches, decode.repeated), (4, 1, 3));
        assert_eq!(decode.to_string(), "4 steps, 4 replayed in 1 launch, 0 eager");
        ledger.not_repeated(StepKind::Decode, Reason::Profiling);
        assert!(ledger.tally(StepKind::Decode).to_string().contains("; launched one by one: profiling"));
    }

    #[test]
    fn steps_with_several_launches_are_counted_apart_from_single_launches() {
        let mut ledger = Ledger::new();
        for _ in 0..2 {
            ledger.ran(StepKind::Decode, 1, MS, &Ran::Replayed { n_launches: 3, n_host_steps: 2 });
        }
        let decode = ledger.tally(StepKind::Decode);
        assert_eq!((decode.replayed, decode.launches, decode.host_steps), (2, 6, 4));
        assert_eq!(decode.to_string(), "2 steps, 2 replayed in 6 launches with 4 host steps, 0 eager");
    }
}
