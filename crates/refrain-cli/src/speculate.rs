//! Flags of speculation, and what the statistics say about it.

use crate::cli::CliContext;
use crate::fail::Hinted;
use crate::out::short_time;
use crate::resolve;
use clap::{Args, ValueEnum};
use refrain::{
    DraftWeights, GuessSource, Ledger, MAX_DRAFT, SpeculationOptions, SpeculationTally, StepKind, Tally,
};
use serde_json::json;

/// Speculation flags.
#[derive(Args, Debug, Clone)]
#[command(next_help_heading = "Speculation")]
pub(crate) struct SpeculateOpts {
    /// Guess the next tokens and check several with one step. The text stays the same; it comes faster where guesses are
    /// right, and guessing pauses where it does not pay
    #[arg(long, value_name = "HOW", default_value = "off")]
    pub(crate) speculate: SpeculateArg,
    /// Guess with a smaller model that has the same vocabulary
    #[arg(long, value_name = "MODEL")]
    pub(crate) draft: Option<String>,
    /// Maximum number of guesses per step, up to 15 [default: 15; the acceptance seen decides how many are made]
    #[arg(long, value_name = "N", value_parser = parse_draft_tokens)]
    pub(crate) draft_tokens: Option<usize>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum SpeculateArg {
    /// Guess nothing
    Off,
    /// Guess what followed the last tokens before, in the prompt or in the reply
    Ngram,
}

pub(crate) fn parse_draft_tokens(text: &str) -> Result<usize, String> {
    let n = text.parse().ok().filter(|n| (1..=MAX_DRAFT).contains(n));
    n.ok_or_else(|| format!("must be a number of tokens from 1 to {MAX_DRAFT}"))
}

impl SpeculateOpts {
    /// Whether anything is guessed.
    pub(crate) fn is_on(&self) -> bool {
        self.speculate == SpeculateArg::Ngram || self.draft.is_some()
    }

    /// Refuses flags that contradict each other, before any model is opened.
    pub(crate) fn check(&self, compares: bool) -> anyhow::Result<()> {
        let is_on = self.is_on();
        if self.speculate == SpeculateArg::Ngram && self.draft.is_some() {
            let hint = "remove --speculate ngram or --draft";
            return Err(
                Hinted::new("guesses come from n-grams or from a draft model, not from both", hint).into()
            );
        }
        if self.draft_tokens.is_some() && !is_on {
            let hint = "add --speculate ngram or --draft MODEL";
            return Err(
                Hinted::new("--draft-tokens says how much to guess, and nothing guesses", hint).into()
            );
        }
        if is_on && compares {
            let message = "--verify compares decode steps, and speculation replaces them by verify steps";
            let hint = "remove --verify; the graphs of verify steps are compared when they are recorded";
            return Err(Hinted::new(message, hint).into());
        }
        Ok(())
    }

    /// The options, with the draft model opened.
    pub(crate) fn options(&self, context: &CliContext) -> anyhow::Result<SpeculationOptions> {
        let source = match (&self.draft, self.speculate) {
            (Some(name), _) => {
                GuessSource::Model(DraftWeights::of(&resolve::find(Some(name), context)?.open()?))
            }
            (None, SpeculateArg::Ngram) => GuessSource::Ngram,
            (None, SpeculateArg::Off) => GuessSource::None,
        };
        Ok(SpeculationOptions { source, max_draft: self.draft_tokens, ..SpeculationOptions::default() })
    }
}

/// A line about the guesses of a ledger, if it has any.
pub(crate) fn line(ledger: &Ledger) -> Option<String> {
    let speculation = ledger.speculation();
    if speculation.steps == 0 && speculation.pauses == 0 {
        return None;
    }
    let drafting = match speculation.drafting.as_secs_f64() {
        0.0 => String::new(),
        seconds => format!("; drafted in {}", short_time(seconds)),
    };
    Some(format!("guesses  {speculation}{drafting}"))
}

/// Tokens per second of decode and verify steps together, drafting included.
pub(crate) fn decode_rate(ledger: &Ledger) -> Option<f64> {
    let (decode, verify) = (ledger.tally(StepKind::Decode), ledger.tally(StepKind::Verify));
    let speculation = ledger.speculation();
    let seconds = (decode.total + verify.total + speculation.drafting).as_secs_f64();
    let n_tokens = decode.tokens + speculation.emitted;
    (seconds > 0.0 && n_tokens > 0).then(|| n_tokens as f64 / seconds)
}

/// Verify steps, if there are any.
pub(crate) fn verify_steps(ledger: &Ledger) -> Option<&Tally> {
    Some(ledger.tally(StepKind::Verify)).filter(|tally| tally.steps() > 0)
}

pub(crate) fn tally_json(speculation: &SpeculationTally) -> serde_json::Value {
    json!({
        "steps": speculation.steps,
        "drafted": speculation.drafted,
        "accepted": speculation.accepted,
        "acceptance": speculation.acceptance(),
        "tokens": speculation.emitted,
        "tokens_per_step": speculation.tokens_per_step(),
        "drafting_ms": speculation.drafting.as_secs_f64() * 1e3,
        "pauses": speculation.pauses,
        "last_pause": speculation.last_pause.as_ref().map(ToString::to_string),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn opts(speculate: SpeculateArg, draft: Option<&str>, draft_tokens: Option<usize>) -> SpeculateOpts {
        SpeculateOpts { speculate, draft: draft.map(Into::into), draft_tokens }
    }

    #[test]
    fn a_number_of_guesses_is_in_range() {
        assert_eq!(["1", "15"].map(parse_draft_tokens), [Ok(1), Ok(15)]);
        for text in ["0", "16", "100", "-1", "many"] {
            assert_eq!(parse_draft_tokens(text).unwrap_err(), "must be a number of tokens from 1 to 15");
        }
    }

    #[test]
    fn contradictions_are_refused() {
        use SpeculateArg::{Ngram, Off};
        assert!(opts(Ngram, Some("m"), None).check(false).is_err());
        assert!(opts(Off, None, Some(4)).check(false).is_err());
        assert!(opts(Ngram, None, None).check(true).is_err());
        assert!(opts(Off, Some("m"), Some(4)).check(true).is_err());
        assert!(opts(Off, None, None).check(true).is_ok());
        assert!(opts(Off, Some("m"), Some(4)).check(false).is_ok());
    }
}
