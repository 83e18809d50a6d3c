//! Parsing of the command line, with usage errors that say what to write instead.

use crate::cli::Cli;
use clap::builder::StyledStr;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Command, CommandFactory, FromArgMatches};
use std::error::Error as _;
use std::ffi::OsString;
use std::num::{IntErrorKind, ParseFloatError, ParseIntError};
use std::process::ExitCode;

/// Reads the command line.
pub(crate) fn parse(args: impl IntoIterator<Item = OsString>) -> Result<Cli, clap::Error> {
    let mut command = with_negative_numbers(Cli::command());
    let parsed = command.try_get_matches_from_mut(args).and_then(|found| Cli::from_arg_matches(&found));
    parsed.map_err(|error| explain(error, &command))
}

/// Lets every flag read a negative number, so that an error names the flag and not an unknown argument `-5`.
fn with_negative_numbers(command: Command) -> Command {
    let command = command.mut_args(|arg| match arg.get_action().takes_values() {
        true => arg.allow_negative_numbers(true),
        false => arg,
    });
    command.mut_subcommands(with_negative_numbers)
}

/// Prints clap's output: help to standard output, usage errors to standard error.
pub(crate) fn report(error: &clap::Error) -> ExitCode {
    // Printing fails when the reader is gone, as in `refrain --help | head -1`.
    let _ = error.print();
    ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2))
}

fn explain(mut error: clap::Error, command: &Command) -> clap::Error {
    match error.kind() {
        ErrorKind::ValueValidation => match number_tip(&error) {
            // The parser's message would stay part of an existing error.
            Some(tip) => {
                let mut new = clap::Error::new(ErrorKind::ValueValidation).with_cmd(command);
                for (kind, value) in error.context() {
                    new.insert(kind, value.clone());
                }
                suggest(new, tip)
            }
            None => error,
        },
        ErrorKind::UnknownArgument => match error.get(ContextKind::InvalidArg) {
            Some(ContextValue::String(arg)) if !arg.starts_with('-') => {
                error.remove(ContextKind::Suggested);
                suggest(error, "put a text of several words in quotes")
            }
            _ => error,
        },
        _ => error,
    }
}

fn suggest(mut error: clap::Error, tip: &'static str) -> clap::Error {
    error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![StyledStr::from(tip)]));
    error
}

/// What to write instead of a text that is not the number that a flag needs.
fn number_tip(error: &clap::Error) -> Option<&'static str> {
    let source = error.source()?;
    if source.is::<ParseFloatError>() {
        return Some("write a number");
    }
    let text = match error.get(ContextKind::InvalidValue) {
        Some(ContextValue::String(text)) => text.as_str(),
        _ => "",
    };
    Some(match source.downcast_ref::<ParseIntError>()?.kind() {
        IntErrorKind::Zero => "write a whole number of 1 or more",
        IntErrorKind::PosOverflow => "write a smaller number",
        _ if text.starts_with('-') => "write a number that is not negative",
        _ => "write a whole number",
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(args: &[&str]) -> String {
        let args = ["refrain"].iter().chain(args).map(OsString::from);
        parse(args).expect_err("bad usage").render().to_string()
    }

    #[test]
    fn numbers_that_cannot_be_read_say_what_to_write() {
        let text = message(&["run", "stories", "-c", "abc"]);
        assert!(
            text.contains("'abc' for '--context <N>'") && text.contains("tip: write a whole number"),
            "{text}"
        );
        assert!(!text.contains("digit"), "{text}");
        let text = message(&["bench", "stories", "-c", "-5"]);
        assert!(text.contains("'-5' for '--context <N>'") && text.contains("not negative"), "{text}");
        let text = message(&["bench", "stories", "-r", "0"]);
        assert!(text.contains("whole number of 1 or more"), "{text}");
        let text = message(&["train", "--lr", "fast"]);
        assert!(text.contains("'fast' for '--lr <X>'") && text.contains("tip: write a number"), "{text}");
        let text = message(&["plan", "stories", "--tokens", "99999999999999999999999"]);
        assert!(text.contains("tip: write a smaller number"), "{text}");
        let text = message(&["run", "stories", "--ahead", "0"]);
        assert!(text.contains("write a whole number from 1 to 32"), "{text}");
    }

    #[test]
    fn several_words_without_quotes_get_a_tip() {
        let text = message(&["run", "stories", "once", "upon"]);
        assert!(text.contains("'upon'") && text.contains("in quotes"), "{text}");
        let text = message(&["run", "stories", "--temprature", "1"]);
        assert!(text.contains("--temp") && !text.contains("in quotes"), "{text}");
    }

    #[test]
    fn bench_without_a_model_names_all_that_it_can_measure() {
        let text = message(&["bench"]);
        assert!(text.contains("--shape") && text.contains("--train") && text.contains("--url"), "{text}");
    }

    #[test]
    fn a_prompt_may_begin_like_a_negative_number() {
        assert!(parse(["refrain", "run", "stories", "-5"].map(OsString::from)).is_ok());
    }
}
