//! What a person types in a chat.

use crate::prompt::utf8;
use anyhow::Context as _;
use rustyline::DefaultEditor;
use rustyline::error::ReadlineError;
use std::io::{BufRead, IsTerminal};
use std::path::{Path, PathBuf};

/// Begins and ends a text of several lines.
const QUOTES: &str = "\"\"\"";

pub(super) const HELP: &str = "\
/reset          forget the conversation
/system TEXT    begin anew with this system text; without TEXT, with none
/save FILE      write the conversation as JSON
/help           list these
/exit           leave; Ctrl-D does too
A line that ends in a backslash goes on; three double quotes begin and end a text of several lines.";

const COMMANDS: [&str; 5] = ["/reset", "/system", "/save", "/help", "/exit"];

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Line {
    Text(String),
    Command(Command),
    /// An empty line, or one that was given up with Ctrl-C.
    Nothing,
    End,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Command {
    Reset,
    System(String),
    Save(String),
    Help,
    Exit,
    Unknown { name: String, nearest: Option<&'static str> },
}

/// Lines from an editor on a terminal, or from a pipe.
pub(super) enum Input {
    Editor { editor: Box<DefaultEditor>, history: PathBuf },
    Pipe { n_bytes: usize },
}

impl Input {
    pub(super) fn open(home: &Path) -> anyhow::Result<Input> {
        if !std::io::stdin().is_terminal() {
            return Ok(Input::Pipe { n_bytes: 0 });
        }
        let mut editor = DefaultEditor::new().context("cannot use the terminal")?;
        let history = home.join("chat_history");
        // The first chat has none.
        let _ = editor.load_history(&history);
        Ok(Input::Editor { editor: Box::new(editor), history })
    }

    pub(super) fn is_terminal(&self) -> bool {
        matches!(self, Input::Editor { .. })
    }

    /// The next thing said, over as many lines as it takes.
    pub(super) fn next(&mut self) -> anyhow::Result<Line> {
        let mut text = String::new();
        let mut is_quoted = false;
        loop {
            let prompt = if text.is_empty() && !is_quoted { "> " } else { ". " };
            let line = match self.read(prompt)? {
                Read::Line(line) => line,
                Read::GivenUp => return Ok(Line::Nothing),
                Read::End if text.is_empty() => return Ok(Line::End),
                Read::End => break,
            };
            if take_line(&mut text, &line, &mut is_quoted) {
                break;
            }
        }
        if let Input::Editor { editor, history } = self
            && !text.trim().is_empty()
        {
            let _ = editor.add_history_entry(text.trim_end());
            if let Err(error) = save_history(editor, history) {
                tracing::debug!(%error, "the history could not be saved");
            }
        }
        Ok(parse(&text))
    }

    fn read(&mut self, prompt: &str) -> anyhow::Result<Read> {
        match self {
            Input::Editor { editor, .. } => match editor.readline(prompt) {
                Ok(line) => Ok(Read::Line(line)),
                Err(ReadlineError::Interrupted) => Ok(Read::GivenUp),
                Err(ReadlineError::Eof) => Ok(Read::End),
                Err(error) => Err(anyhow::Error::new(error).context("cannot read from the terminal")),
            },
            Input::Pipe { n_bytes } => {
                let mut bytes = Vec::new();
                let read = std::io::stdin().lock().read_until(b'\n', &mut bytes);
                if read.context("cannot read standard input")? == 0 {
                    return Ok(Read::End);
                }
                let offset = *n_bytes;
                *n_bytes += bytes.len();
                let line = utf8(bytes, "standard input", offset)?;
                Ok(Read::Line(line.trim_end_matches(['\n', '\r']).to_owned()))
            }
        }
    }
}

enum Read {
    Line(String),
    GivenUp,
    End,
}

fn save_history(editor: &mut DefaultEditor, path: &Path) -> rustyline::Result<()> {
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)?;
    }
    editor.save_history(path)
}

/// Adds a line; true when the text is complete.
fn take_line(text: &mut String, line: &str, is_quoted: &mut bool) -> bool {
    let mut line = line;
    if !*is_quoted && text.is_empty() && line.trim_start().starts_with(QUOTES) {
        *is_quoted = true;
        line = &line.trim_start()[QUOTES.len()..];
        if line.trim_end().ends_with(QUOTES) {
            text.push_str(line.trim_end().trim_end_matches(QUOTES));
            return true;
        }
        if !line.is_empty() {
            text.push_str(line);
            text.push('\n');
        }
        return false;
    }
    if *is_quoted {
        let ends = line.trim_end().ends_with(QUOTES);
        text.push_str(if ends { line.trim_end().trim_end_matches(QUOTES) } else { line });
        if !ends {
            text.push('\n');
        }
        return ends;
    }
    match line.strip_suffix('\\') {
        Some(begun) => {
            text.push_str(begun);
            text.push('\n');
            false
        }
        None => {
            text.push_str(line);
            true
        }
    }
}

fn parse(text: &str) -> Line {
    let trimmed = text.trim();
    if trimmed.is_empty() {
        return Line::Nothing;
    }
    // A path or a text of several lines may begin with a slash too.
    let (name, rest) = trimmed.split_once(char::is_whitespace).unwrap_or((trimmed, ""));
    if !name.starts_with('/') || name[1..].contains('/') || trimmed.contains('\n') {
        return Line::Text(text.trim_end().to_owned());
    }
    let rest = rest.trim();
    Line::Command(match name {
        "/reset" => Command::Reset,
        "/system" => Command::System(rest.to_owned()),
        "/save" if !rest.is_empty() => Command::Save(rest.to_owned()),
        "/help" | "/?" | "/save" => Command::Help,
        "/exit" | "/quit" | "/bye" => Command::Exit,
        _ => {
            let near = |c: &&str| strsim::normalized_damerau_levenshtein(name, c);
            let nearest =
                COMMANDS.iter().max_by(|a, b| near(a).total_cmp(&near(b))).filter(|c| near(c) >= 0.6);
            Command::Unknown { name: name.to_owned(), nearest: nearest.copied() }
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn typed(lines: &[&str]) -> (String, bool) {
        let (mut text, mut is_quoted) = (String::new(), false);
        let done = lines.iter().map(|line| take_line(&mut text, line, &mut is_quoted)).last();
        (text, done.unwrap_or_default())
    }

    #[test]
    fn a_backslash_or_three_quotes_let_a_text_go_on() {
        assert_eq!(typed(&["one"]), ("one".into(), true));
        assert_eq!(typed(&["one\\", "two"]), ("one\ntwo".into(), true));
        assert_eq!(typed(&["\"\"\"one", "", "two\"\"\""]), ("one\n\ntwo".into(), true));
        assert_eq!(typed(&["\"\"\"", "one"]), ("one\n".into(), false));
        assert_eq!(typed(&["\"\"\"one\"\"\""]), ("one".into(), true));
    }

    #[test]
    fn commands_are_told_from_texts() {
        assert_eq!(parse("/reset"), Line::Command(Command::Reset));
        assert_eq!(parse("/system be kind "), Line::Command(Command::System("be kind".into())));
        assert_eq!(parse("/etc/passwd is a file"), Line::Text("/etc/passwd is a file".into()));
        assert_eq!(parse("  "), Line::Nothing);
        let unknown = Command::Unknown { name: "/rest".into(), nearest: Some("/reset") };
        assert_eq!(parse("/rest"), Line::Command(unknown));
    }
}
