//! Scripted faults of the simulated device.
//!
//! ```text
//! on 3rd launch: illegal address          # fails when the work runs; every later call returns 700
//! on 1st begin_capture: fail 900          # returns that code and does nothing
//! on 2nd alloc during capture: fail 900   # counts only calls made while a capture is active
//! on every instantiate: out of memory
//! on every 4th replay: wrong byte         # succeeds, but one byte that it wrote is wrong
//! from 5th replay: fail LAUNCH_OUT_OF_RESOURCES
//! on 1st end_capture: hang                # does not return until the test releases it
//! on 7th wait: hang 250 ms                # returns after that time
//! on 2nd launch: invalidate               # breaks every active capture, then proceeds
//! on 1st end_capture: sticky 901          # loses the context: this and every later call return 901
//! ```
//!
//! Newlines or `;` separate rules, and `#` starts a comment. Each rule counts its own calls. A rule that never
//! fires points to a mistake in the script or in the test's expectation, so the device logs a warning about it when
//! it is dropped. `docs/reference/faults.md` is the full reference.

use std::time::Duration;

use super::calls::{CallSet, DriverCall};
use crate::api::Code;

/// Effect of a fault, instead of or in addition to the call's work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    Fail(Code),
    Sticky(Code),
    WrongByte,
    Invalidate,
    Hang(Option<Duration>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum When {
    Nth(u64),
    EveryNth(u64),
    From(u64),
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct FaultRule {
    text: String,
    when: When,
    calls: CallSet,
    during_capture: bool,
    action: Action,
    n_calls: u64,
    n_fired: u64,
}

/// A parsed fault script; empty by default.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FaultScript {
    rules: Vec<FaultRule>,
}

/// A mistake in a fault script.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FaultScriptError {
    /// A rule has no `:` between its trigger and its action.
    #[error("fault rule {rule} (`{text}`) has no `:` between the trigger and the action")]
    NoAction {
        /// Number of the rule, from 1.
        rule: usize,
        /// Text of the rule.
        text: String,
    },
    /// The part before the colon is not a trigger.
    #[error("fault rule {rule} (`{text}`): `{word}` is not a trigger")]
    BadTrigger {
        /// Number of the rule, from 1.
        rule: usize,
        /// Text of the rule.
        text: String,
        /// The offending word.
        word: String,
    },
    /// There is no driver call of that name.
    #[error("fault rule {rule} (`{text}`): there is no driver call `{word}`")]
    UnknownCall {
        /// Number of the rule, from 1.
        rule: usize,
        /// Text of the rule.
        text: String,
        /// The offending word.
        word: String,
    },
    /// The part after the colon is not an action.
    #[error("fault rule {rule} (`{text}`): `{word}` is not an action")]
    UnknownAction {
        /// Number of the rule, from 1.
        rule: usize,
        /// Text of the rule.
        text: String,
        /// The offending word.
        word: String,
    },
    /// The code is not a driver code.
    #[error("fault rule {rule} (`{text}`): `{word}` is not a driver error code")]
    UnknownCode {
        /// Number of the rule, from 1.
        rule: usize,
        /// Text of the rule.
        text: String,
        /// The offending word.
        word: String,
    },
    /// `wrong byte` is attached to a call that writes no bytes.
    #[error(
        "fault rule {rule} (`{text}`): this call writes no bytes, so `wrong byte` has nothing to corrupt"
    )]
    WritesNothing {
        /// Number of the rule, from 1.
        rule: usize,
        /// Text of the rule.
        text: String,
    },
}

impl FaultScriptError {
    /// Suggests an action.
    #[must_use]
    pub fn hint(&self) -> String {
        match self {
            Self::NoAction { .. } => "write it as `on 3rd launch: illegal address`".into(),
            Self::BadTrigger { .. } => {
                "start with `on 3rd CALL`, `on every CALL`, `on every 2nd CALL` or `from 3rd CALL`, \
                 optionally followed by `during capture`"
                    .into()
            }
            Self::UnknownCall { .. } => format!("use one of {}, or the name of a method of the driver interface", CallSet::SHORT_WORDS),
            Self::UnknownAction { .. } => {
                "use one of `fail CODE`, `out of memory`, `sticky CODE`, `illegal address`, `wrong byte`, `invalidate`, \
                 `hang`, `hang 50 ms`"
                    .into()
            }
            Self::UnknownCode { .. } => "use a number such as 900 or a name such as STREAM_CAPTURE_UNSUPPORTED".into(),
            Self::WritesNothing { .. } => "attach `wrong byte` to launch, replay, copy or fill".into(),
        }
    }
}

impl FaultScript {
    /// Parses a script. `docs/reference/faults.md` describes the language.
    ///
    /// # Errors
    /// If a rule is malformed; the error names the rule and the word.
    pub fn parse(script: &str) -> Result<FaultScript, FaultScriptError> {
        let texts = script
            .lines()
            .flat_map(|line| line.split('#').next().unwrap_or_default().split(';'))
            .map(str::trim)
            .filter(|text| !text.is_empty());
        let rules = texts.enumerate().map(|(i, text)| parse_rule(i + 1, text)).collect::<Result<_, _>>()?;
        Ok(FaultScript { rules })
    }

    /// True if there are no rules.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.rules.is_empty()
    }

    pub(super) fn extend(&mut self, more: FaultScript) {
        self.rules.extend(more.rules);
    }

    /// The rules that never fired, as written, with the number of matching calls.
    pub(super) fn unused(&self) -> impl Iterator<Item = (&str, u64)> {
        self.rules.iter().filter(|rule| rule.n_fired == 0).map(|rule| (rule.text.as_str(), rule.n_calls))
    }

    /// Counts a call and returns the actions that fire on it.
    pub(super) fn fire(&mut self, call: DriverCall, capturing: bool) -> Vec<Action> {
        let mut actions = Vec::new();
        for rule in &mut self.rules {
            if !rule.calls.contains(call) || (rule.during_capture && !capturing) {
                continue;
            }
            rule.n_calls += 1;
            let fires = match rule.when {
                When::Nth(n) => rule.n_calls == n,
                When::EveryNth(n) => rule.n_calls.is_multiple_of(n),
                When::From(n) => rule.n_calls >= n,
            };
            if fires {
                rule.n_fired += 1;
                actions.push(rule.action);
            }
        }
        actions
    }
}

impl std::fmt::Display for FaultScript {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let rules: Vec<&str> = self.rules.iter().map(|rule| rule.text.as_str()).collect();
        f.write_str(&rules.join("; "))
    }
}

impl std::str::FromStr for FaultScript {
    type Err = FaultScriptError;

    fn from_str(script: &str) -> Result<FaultScript, FaultScriptError> {
        FaultScript::parse(script)
    }
}

fn parse_rule(rule: usize, text: &str) -> Result<FaultRule, FaultScriptError> {
    let owned = || text.to_owned();
    let lower = text.to_lowercase();
    let Some((trigger, action)) = lower.split_once(':') else {
        return Err(FaultScriptError::NoAction { rule, text: owned() });
    };
    let words: Vec<&str> = trigger.split_whitespace().collect();
    let bad = |word: &str| FaultScriptError::BadTrigger { rule, text: owned(), word: word.to_owned() };
    let (when, rest) = match words.as_slice() {
        ["on", "every", n, rest @ ..] if ordinal(n).is_some() => (ordinal(n).map(When::EveryNth), rest),
        ["on", "every", rest @ ..] => (Some(When::EveryNth(1)), rest),
        ["on", n, rest @ ..] => (ordinal(n).map(When::Nth), rest),
        ["from", n, rest @ ..] => (ordinal(n).map(When::From), rest),
        _ => (None, [].as_slice()),
    };
    let when = when.ok_or_else(|| bad(trigger.trim()))?;
    let (name, during_capture) = match rest {
        [name @ .., "during", "capture"] => (name, true),
        name => (name, false),
    };
    if name.is_empty() {
        return Err(bad(trigger.trim()));
    }
    let word = name.join("_").replace('-', "_");
    let calls = CallSet::from_word(&word).ok_or_else(|| FaultScriptError::UnknownCall {
        rule,
        text: owned(),
        word,
    })?;
    let action = parse_action(rule, text, action.trim())?;
    if action == Action::WrongByte && !calls.all(DriverCall::writes) {
        return Err(FaultScriptError::WritesNothing { rule, text: owned() });
    }
    Ok(FaultRule { text: owned(), when, calls, during_capture, action, n_calls: 0, n_fired: 0 })
}

fn parse_action(rule: usize, text: &str, action: &str) -> Result<Action, FaultScriptError> {
    let unknown = || FaultScriptError::UnknownAction { rule, text: text.to_owned(), word: action.to_owned() };
    let code = |word: &str| {
        let by_number = word.parse::<u32>().ok().filter(|&n| n != 0).map(Code);
        by_number
            .or_else(|| Code::from_name(&word.trim_start_matches("cuda_error_").to_uppercase()))
            .ok_or_else(|| FaultScriptError::UnknownCode {
                rule,
                text: text.to_owned(),
                word: word.to_owned(),
            })
    };
    let words: Vec<&str> = action.split_whitespace().collect();
    match words.as_slice() {
        ["fail", word] => Ok(Action::Fail(code(word)?)),
        ["sticky", word] => Ok(Action::Sticky(code(word)?)),
        ["out", "of", "memory"] => Ok(Action::Fail(Code::OUT_OF_MEMORY)),
        ["illegal", "address"] => Ok(Action::Sticky(Code::ILLEGAL_ADDRESS)),
        ["wrong", "byte"] => Ok(Action::WrongByte),
        ["invalidate"] => Ok(Action::Invalidate),
        ["hang"] => Ok(Action::Hang(None)),
        ["hang", time @ ..] => duration(&time.concat()).map(|t| Action::Hang(Some(t))).ok_or_else(unknown),
        _ => Err(unknown()),
    }
}

/// Parses `3rd`, `3` or `third`.
fn ordinal(word: &str) -> Option<u64> {
    let named = ["first", "second", "third", "fourth", "fifth"];
    if let Some(i) = named.iter().position(|&name| name == word) {
        return Some(i as u64 + 1);
    }
    let digits = word.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    matches!(&word[digits.len()..], "" | "st" | "nd" | "rd" | "th")
        .then(|| digits.parse().ok().filter(|&n| n > 0))
        .flatten()
}

/// Parses `50ms` or `2s`.
fn duration(word: &str) -> Option<Duration> {
    match word.strip_suffix("ms") {
        Some(ms) => ms.parse().ok().map(Duration::from_millis),
        None => word.strip_suffix('s').and_then(|s| s.parse().ok()).map(Duration::from_secs),
    }
}

#[cfg(test)]
mod tests {
    use super::super::calls::FAMILIES;
    use super::*;

    /// The reference page, which these tests keep true.
    const PAGE: &str = include_str!("../../../../docs/reference/faults.md");

    /// Lines of all code blocks of the page with this tag, without comments.
    fn examples(tag: &str) -> Vec<&'static str> {
        let mut inside = false;
        let mut lines = Vec::new();
        for line in PAGE.lines() {
            if let Some(fence) = line.strip_prefix("```") {
                inside = fence == tag;
            } else if inside && !line.split('#').next().unwrap_or_default().trim().is_empty() {
                lines.push(line);
            }
        }
        lines
    }

    /// Words in backticks.
    fn quoted(cell: &str) -> Vec<&str> {
        cell.split('`').skip(1).step_by(2).collect()
    }

    #[test]
    fn every_example_on_the_reference_page_parses() {
        let examples = examples("faults");
        assert!(examples.len() > 20);
        for line in examples {
            let script = FaultScript::parse(line).unwrap_or_else(|e| panic!("{e}"));
            assert!(!script.is_empty(), "{line}");
        }
    }

    #[test]
    fn every_mistake_on_the_reference_page_is_refused_with_the_message_it_shows() {
        let mistakes = examples("rejected");
        assert!(mistakes.len() >= 6);
        for line in mistakes {
            let (rule, message) = line.split_once('#').unwrap();
            let error = FaultScript::parse(rule).expect_err(rule).to_string();
            assert!(error.ends_with(message.trim()), "{error}");
        }
    }

    #[test]
    fn the_table_of_calls_on_the_reference_page_is_complete() {
        let set = |word: &str| CallSet::from_word(word).unwrap_or_else(|| panic!("{word} is not a call"));
        for (words, calls) in FAMILIES {
            let row = PAGE.lines().find(|line| line.starts_with(&format!("| `{}`", words[0])));
            let cells: Vec<_> = row.unwrap_or_else(|| panic!("no row for {}", words[0])).split('|').collect();
            assert_eq!(quoted(cells[1]), *words);
            let named: Vec<_> = calls.iter().map(|c| c.name()).collect();
            assert_eq!(quoted(cells[2]), named);
            assert!(words.iter().all(|word| set(word) == CallSet::of(calls)));
        }
        for call in DriverCall::ALL {
            assert!(PAGE.contains(&format!("`{}`", call.name())), "{} is missing", call.name());
            assert_eq!(set(call.name()), CallSet::of(&[*call]));
        }
    }

    #[test]
    fn every_action_on_the_reference_page_has_a_row_and_an_example() {
        let has = |text: &str| PAGE.lines().any(|line| line.starts_with(&format!("| `{text}`")));
        for action in [
            "fail CODE",
            "out of memory",
            "sticky CODE",
            "illegal address",
            "wrong byte",
            "invalidate",
            "hang",
        ] {
            assert!(has(action), "{action}");
            let first = action.trim_end_matches("CODE");
            assert!(examples("faults").iter().any(|line| line.contains(first)), "no example of {action}");
        }
    }
}
