//! Texts to continue: from arguments, files and standard input.

use crate::fail::Hinted;
use crate::out::talk;
use anyhow::Context as _;
use std::io::{IsTerminal, Read};
use std::path::Path;
use std::sync::mpsc;
use std::time::Duration;

/// After this long a person who waits for a reply should know that the program waits for them.
const SILENCE: Duration = Duration::from_secs(2);

/// Where a prompt comes from. All that is there is joined, a line end between the parts.
pub(crate) struct Sources<'a> {
    pub(crate) text: Option<&'a str>,
    pub(crate) file: Option<&'a Path>,
    pub(crate) quiet: bool,
}

impl Sources<'_> {
    /// The whole prompt; `None` when nobody gave one and standard input is a terminal.
    pub(crate) fn read(&self) -> anyhow::Result<Option<String>> {
        let mut parts = Vec::new();
        parts.extend(self.text.map(str::to_owned));
        if let Some(file) = self.file {
            parts.push(without_last_line_end(read_file(file)?));
        }
        let has_input = !std::io::stdin().is_terminal();
        if has_input && self.file != Some(Path::new("-")) {
            parts.push(without_last_line_end(read_stdin(self.quiet)?));
        }
        if parts.is_empty() {
            return Ok(None);
        }
        parts.retain(|part| !part.is_empty());
        if parts.is_empty() {
            let hint = "give one: refrain run \"Once upon a time\", or pipe it in";
            return Err(Hinted::new("the prompt is empty", hint).into());
        }
        Ok(Some(parts.join("\n")))
    }
}

/// A text file; `-` is standard input.
pub(crate) fn read_file(path: &Path) -> anyhow::Result<String> {
    if path == Path::new("-") {
        return read_stdin(false);
    }
    let bytes = std::fs::read(path).map_err(|error| Hinted::io("read", path, error))?;
    utf8(bytes, &path.display().to_string(), 0)
}

/// All of standard input. Says so when nothing comes for a while.
pub(crate) fn read_stdin(quiet: bool) -> anyhow::Result<String> {
    let (done, ended) = mpsc::channel::<()>();
    let reminder = std::thread::spawn(move || {
        if !quiet && ended.recv_timeout(SILENCE) == Err(mpsc::RecvTimeoutError::Timeout) {
            talk!("waiting for standard input to end (add `< /dev/null` to go without it)");
        }
    });
    let mut bytes = Vec::new();
    let read = std::io::stdin().lock().read_to_end(&mut bytes);
    drop(done);
    let _ = reminder.join();
    read.context("cannot read standard input")?;
    utf8(bytes, "standard input", 0)
}

/// Bytes as text; names the place of what is none. The bytes begin at `offset` of what is read.
pub(crate) fn utf8(bytes: Vec<u8>, what: &str, offset: usize) -> anyhow::Result<String> {
    String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        let found = error.as_bytes().get(at).copied().unwrap_or_default();
        let message = format!("{what} is not UTF-8: byte {} is 0x{found:02x}", offset + at);
        Hinted::new(message, "convert it first, for example with: iconv -f LATIN1 -t UTF-8").into()
    })
}

/// The line end that editors and `echo` add is not part of a prompt.
fn without_last_line_end(mut text: String) -> String {
    if text.ends_with('\n') {
        text.pop();
        if text.ends_with('\r') {
            text.pop();
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_end_is_taken_off() {
        assert_eq!(without_last_line_end("a\n\n".into()), "a\n");
        assert_eq!(without_last_line_end("a\r\n".into()), "a");
        assert_eq!(without_last_line_end("a".into()), "a");
    }

    #[test]
    fn bytes_that_are_no_text_are_named_by_their_place() {
        let error = utf8(b"ab\xff".to_vec(), "standard input", 40).unwrap_err();
        assert_eq!(error.to_string(), "standard input is not UTF-8: byte 42 is 0xff");
    }
}
