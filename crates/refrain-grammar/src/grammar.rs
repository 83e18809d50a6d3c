//! Compilation of grammars, with limits.

use crate::error::GrammarError;
use crate::matcher::{Matcher, first_line};
use crate::schema::{self, OPTIONS_KEY};
use crate::source::GrammarSource;
use crate::vocabulary::Vocabulary;
use llguidance::api::TopLevelGrammar;
use llguidance::earley::CGrammar;
use serde_json::{Value, json};
use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;
use std::thread;

/// Stack of the thread that compiles: the parser recurses over a grammar. Pages that are not used cost nothing.
const STACK_BYTES: usize = 256 << 20;
/// Maximum depth of brackets in a Lark grammar or a regular expression.
const MAX_DEPTH: usize = 200;
/// White space between the tokens of a JSON text: a space, or a line break with indentation. Any more would let a model that is
/// lost write spaces up to its limit.
const JSON_SPACE: &str = r" |\r?\n( {0,32}|\t{0,8})";

/// Reason for refusing a grammar without a finite text.
const ENDLESS: &str = "every text that follows it is endless";

/// A compiled grammar for one vocabulary. Clones share it.
#[derive(Clone)]
pub struct Grammar {
    source: Arc<GrammarSource>,
    start: Arc<llguidance::Matcher>,
    n_tokens: usize,
}

impl fmt::Debug for Grammar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Grammar").field("source", &self.source).finish_non_exhaustive()
    }
}

impl Vocabulary {
    /// Compiles a grammar and checks that a text can follow it.
    pub fn compile(&self, source: &GrammarSource) -> Result<Grammar, GrammarError> {
        source.check()?;
        thread::scope(|scope| {
            let compiling = thread::Builder::new()
                .name("grammar".into())
                .stack_size(STACK_BYTES)
                .spawn_scoped(scope, || self.compile_here(source));
            let too_complex = |reason: String| GrammarError::TooComplex { kind: source.kind(), reason };
            let joined = compiling.map_err(|error| too_complex(error.to_string()))?.join();
            joined.unwrap_or_else(|_| Err(too_complex("the parser failed".into())))
        })
    }

    fn compile_here(&self, source: &GrammarSource) -> Result<Grammar, GrammarError> {
        let kind = source.kind();
        let start = match source {
            GrammarSource::JsonSchema(text) => self.compile_schema(schema::parse(text)?)?,
            GrammarSource::JsonBetween { before, schema, after } => {
                self.compile_between(before, schema::parse(schema)?, after)?
            }
            GrammarSource::JsonObject => self.compile_schema(json!({ "type": "object" }))?,
            GrammarSource::Lark(text) => {
                check_depth(kind, text)?;
                self.start(TopLevelGrammar::from_lark(text.clone()))
                    .map_err(|reason| refused(kind, reason))?
            }
            GrammarSource::Regex(text) => {
                check_depth(kind, text)?;
                self.start(TopLevelGrammar::from_regex(text)).map_err(|reason| refused(kind, reason))?
            }
        };
        let grammar =
            Grammar { source: Arc::new(source.clone()), start: Arc::new(start), n_tokens: self.n_tokens };
        grammar.check(self.mask_words())?;
        Ok(grammar)
    }

    fn compile_schema(&self, schema: Value) -> Result<llguidance::Matcher, GrammarError> {
        let start = |mut schema: Value| {
            let Value::Object(keys) = &mut schema else {
                return Err("a schema must be an object".to_owned());
            };
            keys.insert(OPTIONS_KEY.into(), json!({ "whitespace_pattern": JSON_SPACE }));
            self.start(TopLevelGrammar::from_json_schema(schema))
        };
        start(schema.clone()).map_err(|reason| {
            if is_limit(&reason) {
                return refused("JSON schema", reason);
            }
            let (location, reason) =
                schema::Root::new(&schema).locate(reason, |part| start(part).map(|_| ()));
            match reason.split_once("Unsatisfiable schema: ") {
                Some((_, reason)) => GrammarError::Unsatisfiable { location, reason: first_line(reason) },
                None => GrammarError::Schema { location, reason },
            }
        })
    }

    fn compile_between(
        &self,
        before: &str,
        mut schema: Value,
        after: &str,
    ) -> Result<llguidance::Matcher, GrammarError> {
        // Errors of the schema have a location only there.
        self.compile_schema(schema.clone())?;
        if let Value::Object(keys) = &mut schema {
            keys.insert(OPTIONS_KEY.into(), json!({ "whitespace_pattern": JSON_SPACE }));
        }
        let (before, after) = (self.literals(before), self.literals(after));
        let rules = format!("start: {before} json {after}\njson: %json {schema}\n");
        self.start(TopLevelGrammar::from_lark(rules)).map_err(|reason| refused("JSON schema", reason))
    }

    /// A fixed text in Lark syntax. Names of control tokens stand for the tokens.
    fn literals(&self, text: &str) -> String {
        let present: Vec<&(u32, String)> =
            self.controls.iter().filter(|(_, name)| text.contains(name.as_str())).collect();
        let (mut parts, mut rest) = (Vec::new(), text);
        while !rest.is_empty() {
            let found =
                present.iter().filter_map(|(id, name)| Some((rest.find(name.as_str())?, name.len(), *id)));
            // The first one, and the longest of those.
            let next = found.min_by_key(|(at, len, _)| (*at, usize::MAX - len));
            let (plain, after) = match next {
                Some((at, len, _)) => (&rest[..at], &rest[at + len..]),
                None => (rest, ""),
            };
            if !plain.is_empty() {
                parts.push(Value::from(plain).to_string());
            }
            parts.extend(next.map(|(_, _, id)| format!("<[{id}]>")));
            rest = after;
        }
        parts.join(" ")
    }

    fn start(&self, grammar: TopLevelGrammar) -> Result<llguidance::Matcher, String> {
        let parser = self.factory.create_parser(grammar).map_err(|error| first_line(&error.to_string()))?;
        if !has_finite_text(parser.parser.grammar()) {
            return Err(ENDLESS.into());
        }
        let mut matcher = llguidance::Matcher::new(Ok(parser));
        match (matcher.get_error(), matcher.grammar_warnings().first()) {
            (Some(reason), _) => Err(first_line(&reason)),
            (None, Some(warning)) => Err(first_line(warning)),
            (None, None) => Ok(matcher),
        }
    }
}

impl Grammar {
    /// What it was compiled from.
    pub fn source(&self) -> &GrammarSource {
        &self.source
    }

    /// Number of tokens of the vocabulary it was compiled for.
    pub fn n_tokens(&self) -> usize {
        self.n_tokens
    }

    /// A matcher at the beginning of a text.
    pub fn matcher(&self) -> Matcher {
        // The states of the lexer count against a limit, so each text has its own.
        Matcher::new(self.start.deep_clone())
    }

    /// Refuses a grammar without a first token.
    fn check(&self, n_words: usize) -> Result<(), GrammarError> {
        let mut matcher = self.matcher();
        let mut mask = vec![0; n_words];
        let kind = self.source.kind();
        let is_open = match matcher.mask(&[], &mut mask) {
            Ok(()) => matcher.may_end()? || mask.iter().any(|word| *word != 0),
            Err(GrammarError::Matching { reason, .. }) if is_limit(&reason) => {
                return Err(refused(kind, reason));
            }
            Err(_) => false,
        };
        if is_open { Ok(()) } else { Err(GrammarError::MatchesNothing { kind }) }
    }
}

/// Whether a grammar has a text of finite length. A rule that always needs itself has none: a generation that follows it never
/// ends.
fn has_finite_text(grammar: &CGrammar) -> bool {
    let mut order = vec![grammar.start()];
    let mut seen = vec![grammar.start()].into_iter().collect::<HashSet<_>>();
    let mut next = 0;
    while let Some(symbol) = order.get(next).copied() {
        for rule in grammar.rules_of(symbol) {
            let (parts, ..) = grammar.rule_rhs(*rule);
            order.extend(parts.iter().filter(|part| seen.insert(**part)));
        }
        next += 1;
    }
    let mut finite = HashSet::new();
    loop {
        let n_before = finite.len();
        // Parts mostly come after the rules that use them.
        for symbol in order.iter().rev() {
            let data = grammar.sym_data(*symbol);
            let mut rules = data.rules.iter();
            let ends = rules.any(|rule| grammar.rule_rhs(*rule).0.iter().all(|part| finite.contains(part)));
            let is_leaf =
                data.is_terminal || data.is_nullable || data.lexeme.is_some() || data.gen_grammar.is_some();
            if !data.cond_nullable.is_empty() || is_leaf || ends {
                finite.insert(*symbol);
            }
        }
        if finite.len() == n_before {
            return finite.contains(&grammar.start());
        }
    }
}

fn is_limit(reason: &str) -> bool {
    ["panic:", "fuel", "too large", "too big", "limit", "TooComplex", "exceeded", "too many"]
        .iter()
        .any(|word| reason.contains(word))
}

fn refused(kind: &'static str, reason: String) -> GrammarError {
    match () {
        () if reason == ENDLESS => GrammarError::MatchesNothing { kind },
        () if is_limit(&reason) => GrammarError::TooComplex { kind, reason },
        () => GrammarError::Invalid { kind, reason },
    }
}

/// The parsers of grammars and expressions recurse over brackets. Counting those in strings too only refuses texts that
/// nobody writes.
fn check_depth(kind: &'static str, text: &str) -> Result<(), GrammarError> {
    let mut depth = 0usize;
    for byte in text.bytes() {
        match byte {
            b'(' | b'[' | b'{' => depth += 1,
            b')' | b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth > MAX_DEPTH {
            return Err(GrammarError::TooDeep { kind, max: MAX_DEPTH });
        }
    }
    Ok(())
}
