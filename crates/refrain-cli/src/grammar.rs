//! Flags for text that follows a grammar.

use crate::fail::Hinted;
use crate::opts::Think;
use crate::out::talk;
use refrain::{Finish, Grammar, GrammarSource, Model};
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

/// A larger file is refused before all of it is read. The library's limit is lower.
const MAX_FILE_BYTES: u64 = 16 << 20;

/// Flags for text that follows a grammar.
#[derive(clap::Args, Debug, Clone, Default)]
#[command(next_help_heading = "Constrained output")]
#[group(multiple = false)]
pub(crate) struct GrammarOpts {
    /// Have the reply be JSON that satisfies this schema: a file, or the schema itself
    #[arg(long, value_name = "FILE|TEXT")]
    json_schema: Option<String>,
    /// Have the reply follow a grammar in Lark syntax
    #[arg(long, value_name = "FILE")]
    grammar: Option<PathBuf>,
    /// Have the whole reply match a regular expression
    #[arg(long, value_name = "TEXT")]
    regex: Option<String>,
    /// Have the reply be a JSON object
    #[arg(long)]
    json_object: bool,
}

impl GrammarOpts {
    /// What the flags demand. Reads files.
    pub(crate) fn source(&self) -> anyhow::Result<Option<GrammarSource>> {
        Ok(match (&self.json_schema, &self.grammar, &self.regex) {
            (Some(given), _, _) => Some(GrammarSource::JsonSchema(match given.trim_start() {
                text if text.starts_with('{') || ["true", "false"].contains(&text.trim_end()) => {
                    given.clone()
                }
                _ => read(Path::new(given))?,
            })),
            (None, Some(file), _) => Some(GrammarSource::Lark(read(file)?)),
            (None, None, Some(text)) => Some(GrammarSource::Regex(text.clone())),
            (None, None, None) => self.json_object.then_some(GrammarSource::JsonObject),
        })
    }

    /// How to treat thinking: text that follows a grammar has no room for it.
    pub(crate) fn think(&self, think: Think) -> anyhow::Result<Think> {
        match (self.source_is_given(), think) {
            (false, think) => Ok(think),
            (true, Think::On) => Err(Hinted::new(
                "a reply that follows a grammar cannot contain thinking",
                "leave out --think on",
            )
            .into()),
            (true, _) => Ok(Think::Off),
        }
    }

    fn source_is_given(&self) -> bool {
        self.json_schema.is_some() || self.grammar.is_some() || self.regex.is_some() || self.json_object
    }
}

/// Compiles what the flags demand.
pub(crate) fn compile(model: &Model, source: Option<&GrammarSource>) -> anyhow::Result<Option<Grammar>> {
    Ok(source.map(|source| model.grammar(source)).transpose()?)
}

/// Says that a reply was cut before its grammar was complete.
pub(crate) fn say_cut(finish: Option<Finish>) {
    if let Some(Finish::MaxTokens | Finish::ContextFull | Finish::StopText) = finish {
        talk!("the reply was cut before it was complete: it does not follow the grammar to its end");
    }
}

fn read(path: &Path) -> anyhow::Result<String> {
    let failed = |error| Hinted::io("read", path, error);
    let mut bytes = Vec::new();
    File::open(path)
        .and_then(|file| file.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes))
        .map_err(failed)?;
    if bytes.len() as u64 > MAX_FILE_BYTES {
        let message = format!("{} has more than {MAX_FILE_BYTES} bytes", path.display());
        return Err(Hinted::new(message, "use a smaller grammar").into());
    }
    let refused = |_| Hinted::new(format!("{} is not UTF-8 text", path.display()), "save it as UTF-8");
    Ok(String::from_utf8(bytes).map_err(refused)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_schema_is_a_text_or_a_file() {
        let opts = |given: &str| GrammarOpts { json_schema: Some(given.into()), ..GrammarOpts::default() };
        let text = |given: &str| opts(given).source().unwrap();
        assert_eq!(text(" {\"type\": 1}"), Some(GrammarSource::JsonSchema(" {\"type\": 1}".into())));
        assert_eq!(text("true"), Some(GrammarSource::JsonSchema("true".into())));
        let missing = opts("missing.json").source().unwrap_err();
        assert_eq!(missing.to_string(), "cannot read missing.json");
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), b"\xff\xfe").unwrap();
        let error = opts(file.path().to_str().unwrap()).source().unwrap_err();
        assert!(error.to_string().ends_with("is not UTF-8 text"), "{error}");
        std::fs::write(file.path(), "{}").unwrap();
        assert_eq!(text(file.path().to_str().unwrap()), Some(GrammarSource::JsonSchema("{}".into())));
    }
}
