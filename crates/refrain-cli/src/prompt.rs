//! Prompts: from arguments, files and standard input.

use crate::fail::Hinted;
use crate::out::talk;
use anyhow::Context as _;
use refrain_hub::ByteSize;
use std::io::{IsTerminal, Read};
use std::path::Path;
use std::sync::mpsc;
use std::time::Duration;

/// After this time the program says that it waits for input.
const SILENCE: Duration = Duration::from_secs(2);

/// A prompt longer than this fits no context, and is refused before all of it is read.
const MAX_PROMPT_BYTES: u64 = 32 << 20;

/// The sources of a prompt, which are joined by line breaks.
pub(crate) struct Sources<'a> {
    pub(crate) text: Option<&'a str>,
    pub(crate) file: Option<&'a Path>,
    pub(crate) quiet: bool,
}

impl Sources<'_> {
    /// The whole prompt; `None` if there is none and standard input is a terminal.
    pub(crate) fn read(&self) -> anyhow::Result<Option<String>> {
        let mut parts = Vec::new();
        parts.extend(self.text.map(str::to_owned));
        if let Some(file) = self.file {
            parts.push(without_last_line_end(read_limited(file, Some(MAX_PROMPT_BYTES), self.quiet)?));
        }
        let has_input = !std::io::stdin().is_terminal();
        if has_input && self.file != Some(Path::new("-")) {
            parts.push(without_last_line_end(read_limited(
                Path::new("-"),
                Some(MAX_PROMPT_BYTES),
                self.quiet,
            )?));
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
    read_limited(path, None, false)
}

fn read_limited(path: &Path, limit: Option<u64>, quiet: bool) -> anyhow::Result<String> {
    let (bytes, name) = match path == Path::new("-") {
        true => (read_stdin_bytes(limit, quiet)?, "standard input".to_owned()),
        false => {
            let cannot_read = |error| Hinted::io("read", path, error);
            let file = std::fs::File::open(path).map_err(cannot_read)?;
            let mut bytes = Vec::new();
            let max = limit.map_or(u64::MAX, |limit| limit + 1);
            file.take(max).read_to_end(&mut bytes).map_err(cannot_read)?;
            (bytes, path.display().to_string())
        }
    };
    match limit {
        Some(limit) if bytes.len() as u64 > limit => {
            let message = format!("{name} has more than {}, which is too long for a prompt", ByteSize(limit));
            Err(Hinted::new(message, "shorten the prompt, or split it into several").into())
        }
        _ => utf8(bytes, &name, 0),
    }
}

/// Reads all of standard input, and says that it waits if nothing arrives for a while.
pub(crate) fn read_stdin(quiet: bool) -> anyhow::Result<String> {
    utf8(read_stdin_bytes(None, quiet)?, "standard input", 0)
}

fn read_stdin_bytes(limit: Option<u64>, quiet: bool) -> anyhow::Result<Vec<u8>> {
    let (done, ended) = mpsc::channel::<()>();
    let reminder = std::thread::spawn(move || {
        if !quiet && ended.recv_timeout(SILENCE) == Err(mpsc::RecvTimeoutError::Timeout) {
            talk!("waiting for the end of standard input (add `< /dev/null` to skip it)");
        }
    });
    let mut bytes = Vec::new();
    let max = limit.map_or(u64::MAX, |limit| limit + 1);
    let read = std::io::stdin().lock().take(max).read_to_end(&mut bytes);
    drop(done);
    let _ = reminder.join();
    read.context("cannot read standard input")?;
    Ok(bytes)
}

/// Decodes bytes as text; an error names the position of the first bad byte. The bytes start at `offset` of the input.
pub(crate) fn utf8(bytes: Vec<u8>, input: &str, offset: usize) -> anyhow::Result<String> {
    String::from_utf8(bytes).map_err(|error| {
        let idx = error.utf8_error().valid_up_to();
        let found = error.as_bytes().get(idx).copied().unwrap_or_default();
        let message = format!("{input} is not UTF-8: byte {} is 0x{found:02x}", offset + idx);
        Hinted::new(message, "convert it first, for example with: iconv -f LATIN1 -t UTF-8").into()
    })
}

/// Removes the final line end, which editors and `echo` add.
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
    fn one_line_end_is_removed() {
        assert_eq!(without_last_line_end("a\n\n".into()), "a\n");
        assert_eq!(without_last_line_end("a\r\n".into()), "a");
        assert_eq!(without_last_line_end("a".into()), "a");
    }

    #[test]
    fn bytes_that_are_not_text_are_reported_with_their_position() {
        let error = utf8(b"ab\xff".to_vec(), "standard input", 40).unwrap_err();
        assert_eq!(error.to_string(), "standard input is not UTF-8: byte 42 is 0xff");
    }
}
