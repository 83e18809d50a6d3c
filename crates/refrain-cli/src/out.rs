//! Standard output for results, standard error for talk.

use anstyle::Style;
use std::fmt;
use std::io::{IsTerminal, Write};

pub(crate) const DIM: Style = Style::new().dimmed();
pub(crate) const BOLD: Style = Style::new().bold();

/// Nobody reads standard output any more. That is no error: the program ends quietly.
#[derive(Debug)]
pub(crate) struct ClosedPipe;

impl fmt::Display for ClosedPipe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("standard output was closed")
    }
}

impl std::error::Error for ClosedPipe {}

/// Standard output. Text reaches a pipe byte for byte; a terminal sees no control characters that a model made up.
pub(crate) struct Out {
    stdout: std::io::Stdout,
    is_terminal: bool,
    has_colour: bool,
    is_mid_line: bool,
}

impl Out {
    pub(crate) fn new() -> Out {
        let stdout = std::io::stdout();
        let has_colour = anstream::AutoStream::choice(&stdout) != anstream::ColorChoice::Never;
        Out { is_terminal: stdout.is_terminal(), has_colour, stdout, is_mid_line: false }
    }

    pub(crate) fn is_terminal(&self) -> bool {
        self.is_terminal
    }

    /// Writes text at once, without a line end.
    pub(crate) fn text(&mut self, text: &str) -> anyhow::Result<()> {
        self.styled(Style::new(), text)
    }

    /// Writes text in a style where the terminal has colours.
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

    /// Writes a value as JSON and a line end.
    pub(crate) fn json(&mut self, value: &serde_json::Value) -> anyhow::Result<()> {
        self.line(serde_json::to_string_pretty(value)?)
    }

    /// Ends a line that was begun, so that what follows on the terminal starts on its own.
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

/// Text without the control characters that would move the cursor or change the terminal's state.
fn printable(text: &str) -> String {
    let harmless = |c: char| !c.is_control() || matches!(c, '\n' | '\t');
    text.chars().map(|c| if harmless(c) { c } else { char::REPLACEMENT_CHARACTER }).collect()
}

/// Says a line on standard error. A closed standard error silences the talk, it does not end the program.
pub(crate) fn say_line(line: fmt::Arguments<'_>) {
    let _ = writeln!(anstream::stderr().lock(), "{line}");
}

/// Says a text on standard error, dimmed and without a line end, if it is a terminal.
pub(crate) fn whisper(text: &str) {
    let mut stderr = anstream::stderr().lock();
    if stderr.is_terminal() {
        let _ = write!(stderr, "{DIM}{}{DIM:#}", printable(text)).and_then(|()| stderr.flush());
    }
}

/// Says a line on standard error, with styles where the terminal has them.
macro_rules! talk {
    ($($arg:tt)*) => { $crate::out::say_line(format_args!($($arg)*)) };
}
pub(crate) use talk;

pub(crate) fn stderr_has_colour() -> bool {
    anstream::AutoStream::choice(&std::io::stderr()) != anstream::ColorChoice::Never
}

/// A whole number with its thousands apart: `1,512`.
pub(crate) fn thousands(n: impl TryInto<u64>) -> String {
    let digits = n.try_into().unwrap_or(u64::MAX).to_string();
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// A number of things: `1 file`, `2 files`.
pub(crate) fn counted(n: usize, thing: &str) -> String {
    format!("{} {thing}{}", thousands(n), if n == 1 { "" } else { "s" })
}

/// A count as people say it: `134.5 M`.
pub(crate) fn short_count(n: u64) -> String {
    match n {
        1_000_000_000.. => format!("{:.2} B", n as f64 / 1e9),
        1_000_000.. => format!("{:.1} M", n as f64 / 1e6),
        10_000.. => format!("{:.0} k", n as f64 / 1e3),
        _ => n.to_string(),
    }
}

/// A duration with three digits or so: `11.2 ms`.
pub(crate) fn short_time(seconds: f64) -> String {
    match seconds {
        s if s >= 100.0 => format!("{s:.0} s"),
        s if s >= 1.0 => format!("{s:.2} s"),
        s if s >= 1e-3 => format!("{:.2} ms", s * 1e3),
        s => format!("{:.1} us", s * 1e6),
    }
}

/// A rate, with thousands apart where it is large.
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
        assert_eq!(short_rate(31.24), "31.2");
        assert_eq!(short_rate(1512.3), "1,512");
    }

    #[test]
    fn a_terminal_sees_no_escape_sequences_of_a_model() {
        assert_eq!(printable("a\x1b[31mb\r\u{9b}c\n\td\u{e9}"), "a\u{fffd}[31mb\u{fffd}\u{fffd}c\n\td\u{e9}");
    }
}
