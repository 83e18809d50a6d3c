//! Input of a chat: texts and commands, from a terminal or a pipe.

use super::settings;
use crate::prompt::utf8;
use anyhow::Context as _;
use rustyline::completion::{Completer, FilenameCompleter, Pair};
use rustyline::error::ReadlineError;
use rustyline::highlight::Highlighter;
use rustyline::hint::Hinter;
use rustyline::history::DefaultHistory;
use rustyline::validate::Validator;
use rustyline::{Context as LineContext, Editor, Helper};
use std::io::{BufRead, IsTerminal};
use std::path::{Path, PathBuf};

/// Starts and ends a text of several lines.
const QUOTES: &str = "\"\"\"";

pub(super) const HELP: &str = "\
/reset             forget the conversation
/system TEXT       start a new conversation with this system prompt; without TEXT, with none
/set NAME VALUE    change a setting, such as temp or max_tokens; /set alone lists them
/save FILE         write the conversation as JSON
/load FILE         continue a saved conversation
/help              list these commands
/exit              leave; Ctrl-D does too
A line that ends in a backslash continues on the next one; three double quotes start and end a text of several lines.";

const COMMANDS: [&str; 7] = ["/reset", "/system", "/set", "/save", "/load", "/help", "/exit"];

#[derive(Debug, PartialEq, Eq)]
pub(super) enum ChatLine {
    Text(String),
    Command(ChatCommand),
    /// An empty line, or one that was discarded with Ctrl-C.
    Nothing,
    End,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum ChatCommand {
    Reset,
    System(String),
    Set(String),
    Save(String),
    Load(String),
    NeedsFile(&'static str),
    Help,
    Exit,
    Unknown { name: String, nearest: Option<&'static str> },
}

type ChatEditor = Editor<ChatHelper, DefaultHistory>;

/// Lines from an editor on a terminal, or from a pipe.
pub(super) enum ChatInput {
    Editor { editor: Box<ChatEditor>, history: PathBuf },
    Pipe { n_bytes: usize },
}

impl ChatInput {
    pub(super) fn open(home: &Path) -> anyhow::Result<ChatInput> {
        if !std::io::stdin().is_terminal() {
            return Ok(ChatInput::Pipe { n_bytes: 0 });
        }
        let mut editor = ChatEditor::new().context("cannot use the terminal")?;
        editor.set_helper(Some(ChatHelper { files: FilenameCompleter::new() }));
        let history = home.join("chat_history");
        // Before the first chat there is none.
        let _ = editor.load_history(&history);
        Ok(ChatInput::Editor { editor: Box::new(editor), history })
    }

    pub(super) fn is_terminal(&self) -> bool {
        matches!(self, ChatInput::Editor { .. })
    }

    /// Asks a question that only a person at a terminal can confirm.
    pub(super) fn confirm(&mut self, question: &str) -> anyhow::Result<bool> {
        match self {
            ChatInput::Pipe { .. } => Ok(false),
            ChatInput::Editor { .. } => match self.read(&format!("{question} [y/N] "))? {
                RawLine::Line(line) => Ok(matches!(line.trim().to_lowercase().as_str(), "y" | "yes")),
                RawLine::Discarded | RawLine::End => Ok(false),
            },
        }
    }

    /// The next text or command, which may span several lines.
    pub(super) fn next(&mut self) -> anyhow::Result<ChatLine> {
        let mut text = String::new();
        let mut is_quoted = false;
        loop {
            let prompt = if text.is_empty() && !is_quoted { "> " } else { ". " };
            let line = match self.read(prompt)? {
                RawLine::Line(line) => line,
                RawLine::Discarded => return Ok(ChatLine::Nothing),
                RawLine::End if text.is_empty() => return Ok(ChatLine::End),
                RawLine::End => break,
            };
            if take_line(&mut text, &line, &mut is_quoted) {
                break;
            }
        }
        if let ChatInput::Editor { editor, history } = self
            && !text.trim().is_empty()
        {
            let _ = editor.add_history_entry(text.trim_end());
            if let Err(error) = save_history(editor, history) {
                tracing::debug!(%error, "the history could not be saved");
            }
        }
        Ok(parse(&text))
    }

    fn read(&mut self, prompt: &str) -> anyhow::Result<RawLine> {
        match self {
            ChatInput::Editor { editor, .. } => match editor.readline(prompt) {
                Ok(line) => Ok(RawLine::Line(line)),
                Err(ReadlineError::Interrupted) => Ok(RawLine::Discarded),
                Err(ReadlineError::Eof) => Ok(RawLine::End),
                Err(error) => Err(anyhow::Error::new(error).context("cannot read from the terminal")),
            },
            ChatInput::Pipe { n_bytes } => {
                let mut bytes = Vec::new();
                let read = std::io::stdin().lock().read_until(b'\n', &mut bytes);
                if read.context("cannot read standard input")? == 0 {
                    return Ok(RawLine::End);
                }
                let offset = *n_bytes;
                *n_bytes += bytes.len();
                let line = utf8(bytes, "standard input", offset)?;
                Ok(RawLine::Line(line.trim_end_matches(['\n', '\r']).to_owned()))
            }
        }
    }
}

enum RawLine {
    Line(String),
    Discarded,
    End,
}

fn save_history(editor: &mut ChatEditor, path: &Path) -> rustyline::Result<()> {
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)?;
    }
    editor.save_history(path)
}

/// Completes commands, settings and file names.
pub(super) struct ChatHelper {
    files: FilenameCompleter,
}

impl Completer for ChatHelper {
    type Candidate = Pair;

    fn complete(
        &self,
        line: &str,
        pos: usize,
        context: &LineContext<'_>,
    ) -> rustyline::Result<(usize, Vec<Pair>)> {
        let typed = &line[..pos];
        match words_for(typed) {
            Some((start, words)) => {
                let pair = |word: &&str| Pair { display: (*word).into(), replacement: (*word).into() };
                Ok((start, words.iter().map(pair).collect()))
            }
            None if typed.starts_with("/save ") || typed.starts_with("/load ") => {
                self.files.complete(line, pos, context)
            }
            None => Ok((pos, Vec::new())),
        }
    }
}

impl Hinter for ChatHelper {
    type Hint = String;
}
impl Highlighter for ChatHelper {}
impl Validator for ChatHelper {}
impl Helper for ChatHelper {}

/// The words that can complete a line, and where the completed word starts; `None` where no list of words does.
fn words_for(typed: &str) -> Option<(usize, Vec<&'static str>)> {
    let (start, known): (usize, &[&'static str]) = match typed.strip_prefix("/set ") {
        Some(name) if !name.contains(char::is_whitespace) => ("/set ".len(), &settings::NAMES),
        Some(_) => return None,
        None if typed.starts_with('/') && !typed.contains(char::is_whitespace) => (0, &COMMANDS),
        None => return None,
    };
    let begun = &typed[start..];
    Some((start, known.iter().copied().filter(|word| word.starts_with(begun)).collect()))
}

/// Adds a line and returns true when the text is complete.
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
        Some(line) => {
            text.push_str(line);
            text.push('\n');
            false
        }
        None => {
            text.push_str(line);
            true
        }
    }
}

fn parse(text: &str) -> ChatLine {
    let trimmed = text.trim();
    if trimmed.is_empty() {
        return ChatLine::Nothing;
    }
    // A path or a text of several lines may also start with a slash.
    let (name, argument) = trimmed.split_once(char::is_whitespace).unwrap_or((trimmed, ""));
    if !name.starts_with('/') || name[1..].contains('/') || trimmed.contains('\n') {
        return ChatLine::Text(text.trim_end().to_owned());
    }
    let argument = argument.trim().to_owned();
    ChatLine::Command(match name {
        "/reset" => ChatCommand::Reset,
        "/system" => ChatCommand::System(argument),
        "/set" => ChatCommand::Set(argument),
        "/save" if argument.is_empty() => ChatCommand::NeedsFile("/save"),
        "/load" if argument.is_empty() => ChatCommand::NeedsFile("/load"),
        "/save" => ChatCommand::Save(argument),
        "/load" => ChatCommand::Load(argument),
        "/help" | "/?" => ChatCommand::Help,
        "/exit" | "/quit" | "/bye" => ChatCommand::Exit,
        _ => {
            let near = |c: &&str| strsim::normalized_damerau_levenshtein(name, c);
            let nearest =
                COMMANDS.iter().max_by(|a, b| near(a).total_cmp(&near(b))).filter(|c| near(c) >= 0.6);
            ChatCommand::Unknown { name: name.to_owned(), nearest: nearest.copied() }
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
    fn a_backslash_or_three_quotes_continue_a_text() {
        assert_eq!(typed(&["one"]), ("one".into(), true));
        assert_eq!(typed(&["one\\", "two"]), ("one\ntwo".into(), true));
        assert_eq!(typed(&["\"\"\"one", "", "two\"\"\""]), ("one\n\ntwo".into(), true));
        assert_eq!(typed(&["\"\"\"", "one"]), ("one\n".into(), false));
        assert_eq!(typed(&["\"\"\"one\"\"\""]), ("one".into(), true));
    }

    #[test]
    fn commands_are_distinguished_from_texts() {
        assert_eq!(parse("/reset"), ChatLine::Command(ChatCommand::Reset));
        assert_eq!(parse("/system be kind "), ChatLine::Command(ChatCommand::System("be kind".into())));
        assert_eq!(parse("/etc/passwd is a file"), ChatLine::Text("/etc/passwd is a file".into()));
        assert_eq!(parse("  "), ChatLine::Nothing);
        let unknown = ChatCommand::Unknown { name: "/rest".into(), nearest: Some("/reset") };
        assert_eq!(parse("/rest"), ChatLine::Command(unknown));
        assert_eq!(parse("/set temp 0.5"), ChatLine::Command(ChatCommand::Set("temp 0.5".into())));
        assert_eq!(parse("/load"), ChatLine::Command(ChatCommand::NeedsFile("/load")));
    }

    #[test]
    fn tab_completes_commands_and_settings() {
        assert_eq!(words_for("/s"), Some((0, vec!["/system", "/set", "/save"])));
        assert_eq!(words_for("/set top"), Some((5, vec!["top_k", "top_p"])));
        assert_eq!(words_for("/set").map(|(_, words)| words), Some(vec!["/set"]));
        for typed in ["hello", "/set temp 0", "/save ta"] {
            assert_eq!(words_for(typed), None, "{typed}");
        }
    }
}
