//! The ledger: every step, how it ran, and why if not as a graph.

use refrain_graph::{Ran, Reason};
use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

/// What a step was for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum StepKind {
    /// A piece of a prompt.
    Prefill,
    /// One token.
    Decode,
}

/// Counts and times of one kind of step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Tally {
    /// Steps that ran as one launch.
    pub replayed: u64,
    /// Steps that ran eagerly.
    pub eager: u64,
    /// Steps that failed.
    pub failed: u64,
    /// Steps that were sent ahead and that nobody needed: the text had ended. They are in none of the other counts.
    pub unused: u64,
    /// Tokens that went through.
    pub tokens: u64,
    /// Wall time of all steps. Where steps are sent ahead, a step's time is from the result before it to its own.
    pub total: Duration,
    /// The fastest step.
    pub fastest: Option<Duration>,
    /// The slowest step.
    pub slowest: Option<Duration>,
    /// How often each reason kept a step from being replayed, by its label, with the last one in full.
    reasons: BTreeMap<&'static str, (u64, Reason)>,
}

impl Tally {
    /// Steps of any outcome that somebody needed.
    pub fn steps(&self) -> u64 {
        self.replayed + self.eager + self.failed
    }

    /// Tokens per second over all steps; `None` when nothing ran.
    pub fn tokens_per_second(&self) -> Option<f64> {
        let seconds = self.total.as_secs_f64();
        (seconds > 0.0 && self.tokens > 0).then(|| self.tokens as f64 / seconds)
    }

    /// Each reason with its count and its last appearance.
    pub fn reasons(&self) -> impl Iterator<Item = (&'static str, u64, &Reason)> {
        self.reasons.iter().map(|(label, (n, last))| (*label, *n, last))
    }
}

impl fmt::Display for Tally {
    /// `412 steps, 380 replayed, 32 eager (batch 72 has no bucket; the largest is 64)`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (steps, s) = (self.steps(), if self.steps() == 1 { "" } else { "s" });
        write!(f, "{steps} step{s}, {} replayed, {} eager", self.replayed, self.eager)?;
        if self.failed > 0 {
            write!(f, ", {} failed", self.failed)?;
        }
        if self.unused > 0 {
            write!(f, ", {} ahead in vain", self.unused)?;
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
        if reasons.is_empty() { Ok(()) } else { write!(f, ")") }
    }
}

/// All steps of an engine. Always on: an entry costs some additions, and a map look-up if the step was not replayed.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Ledger {
    prefill: Tally,
    decode: Tally,
}

impl Ledger {
    /// An empty ledger.
    pub fn new() -> Ledger {
        Ledger::default()
    }

    /// Enters a step that ran.
    pub fn ran(&mut self, kind: StepKind, n_tokens: usize, took: Duration, ran: &Ran) {
        let tally = self.tally_mut(kind);
        tally.tokens += n_tokens as u64;
        tally.total += took;
        tally.fastest = Some(tally.fastest.map_or(took, |f| f.min(took)));
        tally.slowest = Some(tally.slowest.map_or(took, |s| s.max(took)));
        match ran {
            Ran::Replayed => tally.replayed += 1,
            Ran::Eager(reason) => {
                tally.eager += 1;
                note(tally, reason);
            }
        }
    }

    /// Enters a step that failed.
    pub fn failed(&mut self, kind: StepKind, took: Duration, reason: &Reason) {
        let tally = self.tally_mut(kind);
        tally.failed += 1;
        tally.total += took;
        note(tally, reason);
    }

    /// Enters steps that were sent ahead and not needed.
    pub fn unused(&mut self, kind: StepKind, n: u64) {
        self.tally_mut(kind).unused += n;
    }

    /// Counts and times of one kind of step.
    pub fn tally(&self, kind: StepKind) -> &Tally {
        match kind {
            StepKind::Prefill => &self.prefill,
            StepKind::Decode => &self.decode,
        }
    }

    fn tally_mut(&mut self, kind: StepKind) -> &mut Tally {
        match kind {
            StepKind::Prefill => &mut self.prefill,
            StepKind::Decode => &mut self.decode,
        }
    }
}

fn note(tally: &mut Tally, reason: &Reason) {
    match tally.reasons.get_mut(reason.label()) {
        // Most reasons repeat unchanged; comparing is cheaper than cloning one that owns text.
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
    fn a_summary_names_counts_and_the_reason() {
        let mut ledger = Ledger::new();
        for _ in 0..380 {
            ledger.ran(StepKind::Decode, 1, MS, &Ran::Replayed);
        }
        for _ in 0..32 {
            ledger.ran(StepKind::Decode, 1, MS, &Ran::Eager(Reason::NoBucket { batch: 72, largest: 64 }));
        }
        let decode = ledger.tally(StepKind::Decode);
        assert_eq!(
            decode.to_string(),
            "412 steps, 380 replayed, 32 eager (batch 72 has no bucket; the largest is 64)"
        );
        assert_eq!(decode.tokens_per_second().map(f64::round), Some(1000.0));
        assert_eq!(ledger.tally(StepKind::Prefill).to_string(), "0 steps, 0 replayed, 0 eager");
    }

    #[test]
    fn several_reasons_are_listed_from_the_most_frequent() {
        let mut ledger = Ledger::new();
        ledger.ran(StepKind::Decode, 1, MS, &Ran::Eager(Reason::Profiling));
        for _ in 0..3 {
            ledger.ran(StepKind::Decode, 1, MS, &Ran::Eager(Reason::SwitchedOff));
        }
        ledger.failed(StepKind::Decode, MS, &Reason::ReplayFailed { code: 700 });
        assert_eq!(
            ledger.tally(StepKind::Decode).to_string(),
            "5 steps, 0 replayed, 4 eager, 1 failed (3 times: graphs are switched off; \
             once: profiling times each op, which one launch would hide; once: replay failed with error 700)"
        );
    }

    #[test]
    fn the_last_reason_of_a_label_is_kept_in_full() {
        let mut ledger = Ledger::new();
        for batch in [70, 80] {
            ledger.ran(StepKind::Decode, batch, MS, &Ran::Eager(Reason::NoBucket { batch, largest: 64 }));
        }
        let all: Vec<_> = ledger.tally(StepKind::Decode).reasons().collect();
        assert_eq!(all, [("no_bucket", 2, &Reason::NoBucket { batch: 80, largest: 64 })]);
    }
}
