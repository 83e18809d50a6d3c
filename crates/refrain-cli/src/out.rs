//! Standard output for results, standard error for messages.

use anstyle::Style;
use std::fmt;
use std::io::{IsTerminal, Write};

pub(crate) use refrain_report::{counted, thousands};

pub(crate) const DIM: Style = Style::new().dimmed();
pub(crate) const BOLD: Style = Style::new().bold();

/// The reader of standard output is gone. This is not an error: the program ends quietly.
#[derive(Debug)]
pub(crate) struct ClosedPipe;

impl fmt::Display for ClosedPipe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("standard output was closed")
    }
}

impl std::error::Error for ClosedPipe {}

/// Standard output. A pipe gets text byte for byte; a terminal gets no control characters from a model.
pub(crate) struct Stdout {
    stdout: std::io::Stdout,
    is_terminal: bool,
    has_colour: bool,
    is_mid_line: bool,
}

impl Stdout {
    pub(crate) fn new() -> Stdout {
        let stdout = std::io::stdout();
        let has_colour = anstream::AutoStream::choice(&stdout) != anstream::ColorChoice::Never;
        Stdout { is_terminal: stdout.is_terminal(), has_colour, stdout, is_mid_line: false }
    }

    pub(crate) fn is_terminal(&self) -> bool {
        self.is_terminal
    }

    /// Writes text without a line end and flushes it.
    pub(crate) fn text(&mut self, text: &str) -> anyhow::Result<()> {
        self.styled(Style::new(), text)
    }

    /// Writes text in a style if the terminal has colours.
    pub(crate) fn styled(&mut self, style: Style, text: &str) -> anyhow::Result<()> {
        if text.is_empty() {
            return Ok(());
        }
        self.is_mid_line = !text.ends_with('\n');
        if !self.is_terminal {
            return self.write(text);
        }
        let shown = printable(text);
        if self.has_colour && style != Style::new() {
            self.write(&format!("{style}{shown}{style:#}"))
        } else {
            self.write(&shown)
        }
    }

    /// Writes a line.
    pub(crate) fn line(&mut self, line: impl fmt::Display) -> anyhow::Result<()> {
        self.is_mid_line = false;
        self.write(&format!("{line}\n"))
    }

    /// Writes a value as JSON with a line end.
    pub(crate) fn json(&mut self, value: &serde_json::Value) -> anyhow::Result<()> {
        self.line(serde_json::to_string_pretty(value)?)
    }

    /// Ends an unfinished line, so that the next message starts on its own.
    pub(crate) fn end_line(&mut self) -> anyhow::Result<()> {
        if self.is_mid_line { self.line("") } else { Ok(()) }
    }

    fn write(&mut self, text: &str) -> anyhow::Result<()> {
        let written = self.stdout.write_all(text.as_bytes()).and_then(|()| self.stdout.flush());
        written.map_err(|error| match error.kind() {
            std::io::ErrorKind::BrokenPipe => ClosedPipe.into(),
            _ => anyhow::Error::new(error).context("cannot write to standard output"),
        })
    }
}

/// Replaces the control characters that move the cursor or change the terminal's state, and those that reverse text.
pub(crate) fn printable(text: &str) -> String {
    let reverses = |c: char| matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    let harmless = |c: char| matches!(c, '\n' | '\t') || !(c.is_control() || reverses(c));
    text.chars().map(|c| if harmless(c) { c } else { char::REPLACEMENT_CHARACTER }).collect()
}

/// As [`printable`], on one line.
pub(crate) fn one_line(text: &str) -> String {
    printable(text).replace(['\n', '\t'], " ")
}

/// Prints a line on standard error. A closed standard error does not end the program.
pub(crate) fn say_line(line: fmt::Arguments<'_>) {
    let _ = writeln!(anstream::stderr().lock(), "{line}");
}

/// Prints a text on standard error, dimmed and without a line end, if it is a terminal.
pub(crate) fn whisper(text: &str) {
    let mut stderr = anstream::stderr().lock();
    if stderr.is_terminal() {
        let _ = write!(stderr, "{DIM}{}{DIM:#}", printable(text)).and_then(|()| stderr.flush());
    }
}

/// Prints a line on standard error, with styles if the terminal has colours.
macro_rules! talk {
    ($($arg:tt)*) => { $crate::out::say_line(format_args!($($arg)*)) };
}
pub(crate) use talk;

pub(crate) fn stderr_has_colour() -> bool {
    anstream::AutoStream::choice(&std::io::stderr()) != anstream::ColorChoice::Never
}

/// A short count: `134.5 M`.
pub(crate) fn short_count(n: u64) -> String {
    match n {
        1_000_000_000.. => format!("{:.2} B", n as f64 / 1e9),
        1_000_000.. => format!("{:.1} M", n as f64 / 1e6),
        10_000.. => format!("{:.0} k", n as f64 / 1e3),
        _ => n.to_string(),
    }
}

/// A short duration: `11.20 ms`.
pub(crate) fn short_time(seconds: f64) -> String {
    match seconds {
        s if s >= 100.0 => format!("{s:.0} s"),
        s if s >= 1.0 => format!("{s:.2} s"),
        s if s >= 1e-3 => format!("{:.2} ms", s * 1e3),
        s => format!("{:.1} us", s * 1e6),
    }
}

/// A rate, with thousands separators if it is large.
pub(crate) fn short_rate(per_second: f64) -> String {
    if per_second >= 100.0 { thousands(per_second.round() as u64) } else { format!("{per_second:.1}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_read_naturally() {
        assert_eq!(thousands(0_u64), "0");
        assert_eq!(thousands(999_u64), "999");
        assert_eq!(thousands(1512_u64), "1,512");
        assert_eq!(thousands(1_234_567_u64), "1,234,567");
        assert_eq!(short_count(134_515_008), "134.5 M");
        assert_eq!(short_count(1_235_814_400), "1.24 B");
        assert_eq!(short_time(0.0112), "11.20 ms");
        assert_eq!((counted(1, "token"), counted(2, "launch")), ("1 token".into(), "2 launches".into()));
        assert_eq!(short_rate(31.24), "31.2");
        assert_eq!(short_rate(1512.3), "1,512");
    }

    #[test]
    fn a_terminal_gets_no_escape_sequences_from_a_model() {
        assert_eq!(one_line("a\u{202e}b\nc"), "a\u{fffd}b c");
        assert_eq!(printable("a\x1b[31mb\r\u{9b}c\n\td\u{e9}"), "a\u{fffd}[31mb\u{fffd}\u{fffd}c\n\td\u{e9}");
    }
}
