//! Parameters of a generation that several endpoints share.

use crate::error::ApiError;
use crate::fields::{Fields, kind};
use crate::served::ServedModel;
use refrain::{MAX_TOP, SamplingError, SamplingParams};
use refrain_worker::{TokenGrammar, TokenSampling};
use serde_json::{Value, json};

/// Maximum number of choices of a request.
pub(crate) const MAX_CHOICES: usize = 128;
/// Maximum number of stop texts.
const MAX_STOPS: usize = 32;
/// Maximum length of a stop text: text of this length is held back.
const MAX_STOP_BYTES: usize = 4096;
/// Maximum number of stop tokens.
const MAX_STOP_IDS: usize = 256;

/// Parameters of a generation.
pub(crate) struct Params {
    pub(crate) sampling: SamplingParams,
    pub(crate) stop: Vec<String>,
    pub(crate) stop_ids: Vec<u32>,
    pub(crate) include_stop: bool,
    pub(crate) with_special: bool,
    pub(crate) min_tokens: usize,
    pub(crate) max_tokens: Option<usize>,
    pub(crate) ignore_eos: bool,
    pub(crate) n: usize,
    /// Log-probabilities, with this many alternatives per token.
    pub(crate) n_top: Option<usize>,
    pub(crate) priority: i32,
    pub(crate) user: Option<String>,
    pub(crate) stream: bool,
    pub(crate) include_usage: bool,
    pub(crate) grammar: Option<TokenGrammar>,
}

impl Params {
    /// The model's defaults.
    pub(crate) fn new(model: &ServedModel) -> Params {
        Params {
            sampling: model.sampling(),
            stop: Vec::new(),
            stop_ids: Vec::new(),
            include_stop: false,
            with_special: false,
            min_tokens: 0,
            max_tokens: None,
            ignore_eos: false,
            n: 1,
            n_top: None,
            priority: 0,
            user: None,
            stream: false,
            include_usage: false,
            grammar: None,
        }
    }

    /// Reads the parameters that chat and plain completions share.
    pub(crate) fn read(fields: &mut Fields, model: &ServedModel) -> Result<Params, ApiError> {
        let mut params = Params::new(model);
        params.read_sampling(fields, model)?;
        params.read_ends(fields)?;
        params.n = fields.int("n", 1, MAX_CHOICES as i64)?.map_or(1, |n| n as usize);
        // vLLM serves lower values first, and this field is theirs.
        let priority = fields.int("priority", i64::from(i32::MIN) + 1, i64::from(i32::MAX))?;
        params.priority = priority.map_or(0, |p| -(p as i32));
        params.user = fields.string("user")?;
        params.stream = fields.bool("stream")?.unwrap_or(false);
        if let Some(mut options) = fields.object("stream_options")? {
            params.include_usage = options.bool("include_usage")?.unwrap_or(false);
            options.without_effect(&["include_obfuscation"]);
            options.only("continuous_usage_stats", &[json!(false)], "the last chunk has the usage")?;
            options.finish()?;
        }
        params.grammar = read_grammar(fields)?;
        Ok(params)
    }

    /// Reads and checks how tokens are chosen.
    pub(crate) fn read_sampling(&mut self, fields: &mut Fields, model: &ServedModel) -> Result<(), ApiError> {
        let sampling = &mut self.sampling;
        let mut set =
            |name, value: &mut f32| fields.number(name).map(|given| *value = given.unwrap_or(*value));
        set("temperature", &mut sampling.temperature)?;
        set("top_p", &mut sampling.top_p)?;
        set("min_p", &mut sampling.min_p)?;
        set("repetition_penalty", &mut sampling.repeat_penalty)?;
        set("presence_penalty", &mut sampling.presence_penalty)?;
        set("frequency_penalty", &mut sampling.frequency_penalty)?;
        // -1 is "all tokens" for vLLM's clients.
        if let Some(k) = fields.int("top_k", -1, i64::from(u32::MAX))? {
            sampling.top_k = usize::try_from(k).unwrap_or(0);
        }
        if let Some(seed) = fields.int("seed", i64::MIN, i64::MAX)? {
            sampling.seed = seed as u64;
        }
        // In this API, penalties look at the whole text.
        let has_penalties = sampling.repeat_penalty != 1.0
            || sampling.presence_penalty != 0.0
            || sampling.frequency_penalty != 0.0;
        if has_penalties {
            sampling.penalty_window = usize::MAX;
        }
        if let Some(bias) = fields.map("logit_bias")? {
            for (token, value) in &bias {
                let id = token.parse::<u32>().ok();
                let value = value.as_f64().filter(|v| v.is_finite());
                let (Some(id), Some(value)) = (id, value) else {
                    let message = "logit_bias must map token ids to numbers";
                    return Err(
                        ApiError::invalid("logit_bias", message).hint("/tokenize returns the ids of a text")
                    );
                };
                sampling.logit_bias.push((id, value as f32));
            }
        }
        sampling.check(model.n_vocab()).map_err(sampling_error)
    }

    fn read_ends(&mut self, fields: &mut Fields) -> Result<(), ApiError> {
        self.stop = read_stop(fields, "stop")?;
        self.stop_ids = fields.token_ids("stop_token_ids")?.unwrap_or_default();
        if self.stop_ids.len() > MAX_STOP_IDS {
            let message =
                format!("{} stop tokens are given, at most {MAX_STOP_IDS} are possible", self.stop_ids.len());
            return Err(ApiError::invalid("stop_token_ids", message));
        }
        self.include_stop = fields.bool("include_stop_str_in_output")?.unwrap_or(false);
        self.with_special = !fields.bool("skip_special_tokens")?.unwrap_or(true);
        self.min_tokens = fields.count("min_tokens", u32::MAX as usize)?.unwrap_or(0);
        self.ignore_eos = fields.bool("ignore_eos")?.unwrap_or(false);
        Ok(())
    }

    /// Refuses parameters that exclude each other.
    pub(crate) fn check(&self) -> Result<(), ApiError> {
        if self.grammar.is_some() && !self.stop.is_empty() {
            let message = "a stop text would end the reply before it has its format";
            return Err(ApiError::invalid("stop", message).hint("remove stop, or the format"));
        }
        match self.max_tokens {
            Some(max) if self.min_tokens > max => {
                let message = format!("min_tokens is {}, max_tokens only {max}", self.min_tokens);
                Err(ApiError::invalid("min_tokens", message))
            }
            _ => Ok(()),
        }
    }

    /// Sampling on the wire, for a choice.
    pub(crate) fn token_sampling(&self, choice: usize) -> TokenSampling {
        let s = &self.sampling;
        TokenSampling {
            temperature: s.temperature,
            top_k: s.top_k,
            top_p: s.top_p,
            min_p: s.min_p,
            repeat_penalty: s.repeat_penalty,
            frequency_penalty: s.frequency_penalty,
            presence_penalty: s.presence_penalty,
            penalty_window: s.penalty_window,
            logit_bias: s.logit_bias.clone(),
            seed: s.seed.wrapping_add(choice as u64),
        }
    }
}

/// Names of a request's fields for what the library names otherwise.
fn sampling_error(error: SamplingError) -> ApiError {
    let param = match error.name {
        "top-p" => "top_p",
        "min-p" => "min_p",
        "repeat penalty" => "repetition_penalty",
        "logit bias" => "logit_bias",
        "frequency or presence penalty" => "frequency_penalty",
        other => other,
    };
    let message = format!("{param} is {}, must be {}", error.got, error.want);
    ApiError::invalid(param, message).hint(error.hint())
}

/// Reads a stop text or a list of them.
pub(crate) fn read_stop(fields: &mut Fields, name: &'static str) -> Result<Vec<String>, ApiError> {
    let texts = match fields.take(name) {
        None => return Ok(Vec::new()),
        Some(Value::String(text)) => vec![text],
        Some(Value::Array(list)) => {
            let texts = list.into_iter().map(|v| match v {
                Value::String(text) => Ok(text),
                other => {
                    Err(ApiError::invalid(name, format!("{name} has {} in it, must be texts", kind(&other))))
                }
            });
            texts.collect::<Result<_, _>>()?
        }
        Some(other) => {
            let message = format!("{name} is {}, must be a string or a list of strings", kind(&other));
            return Err(ApiError::invalid(name, message));
        }
    };
    if texts.len() > MAX_STOPS {
        let message = format!("{name} has {} texts, at most {MAX_STOPS} are possible", texts.len());
        return Err(ApiError::invalid(name, message));
    }
    if texts.iter().any(String::is_empty) {
        return Err(ApiError::invalid(name, format!("{name} has an empty text")).hint("remove it"));
    }
    if texts.iter().any(|text| text.len() > MAX_STOP_BYTES) {
        let message = format!("{name} has a text of more than {MAX_STOP_BYTES} bytes");
        return Err(ApiError::invalid(name, message).hint("a shorter part of it ends the reply as well"));
    }
    Ok(texts)
}

/// `response_format` (OpenAI) or `structured_outputs` (vLLM).
fn read_grammar(fields: &mut Fields) -> Result<Option<TokenGrammar>, ApiError> {
    let mut grammar = None;
    if let Some(mut format) = fields.object("response_format")? {
        grammar = read_format(&mut format, true)?;
        format.finish()?;
    }
    let mut structured = fields.object("structured_outputs")?;
    // Names of older versions of vLLM.
    let older = [("guided_json", "json"), ("guided_regex", "regex"), ("guided_grammar", "grammar")];
    for (old, name) in older.into_iter().chain([("guided_choice", "choice")]) {
        let Some(value) = fields.take(old) else { continue };
        if structured.is_some() {
            let message = format!("{old} is given beside another constraint");
            return Err(ApiError::invalid(old, message).hint("give one of them"));
        }
        let outputs = Value::Object([(name.to_owned(), value)].into_iter().collect());
        structured = Some(Fields::of(outputs, old)?);
    }
    if let Some(mut outputs) = structured {
        let more = read_structured(&mut outputs)?;
        outputs.finish()?;
        if grammar.is_some() && more.is_some() {
            let message = "response_format and structured_outputs are both given";
            return Err(ApiError::invalid("structured_outputs", message).hint("give one of them"));
        }
        grammar = grammar.or(more);
    }
    Ok(grammar)
}

/// A format of OpenAI: `text`, `json_object` or `json_schema`, whose fields are in an object of their own if `nested`.
pub(crate) fn read_format(format: &mut Fields, nested: bool) -> Result<Option<TokenGrammar>, ApiError> {
    match format.string("type")?.as_deref() {
        Some("text") => Ok(None),
        Some("json_object") => Ok(Some(TokenGrammar::JsonObject)),
        Some("json_schema") => {
            let mut inner = if nested { format.object("json_schema")? } else { None };
            let fields = match &mut inner {
                Some(inner) => inner,
                None if nested => {
                    let path = format.path("json_schema");
                    return Err(ApiError::invalid(path.clone(), format!("{path} is missing")));
                }
                None => &mut *format,
            };
            fields.without_effect(&["name", "description", "strict"]);
            let schema = fields.map("schema")?.unwrap_or_default();
            if let Some(inner) = inner {
                inner.finish()?;
            }
            Ok(Some(TokenGrammar::JsonSchema(Value::Object(schema).to_string())))
        }
        other => {
            let path = format.path("type");
            let message =
                format!("{path} is {:?}, must be text, json_object or json_schema", other.unwrap_or(""));
            Err(ApiError::invalid(path, message))
        }
    }
}

fn read_structured(outputs: &mut Fields) -> Result<Option<TokenGrammar>, ApiError> {
    let mut found = Vec::new();
    match outputs.take("json") {
        None => {}
        Some(schema @ Value::Object(_)) => found.push(TokenGrammar::JsonSchema(schema.to_string())),
        Some(Value::String(schema)) => found.push(TokenGrammar::JsonSchema(schema)),
        Some(other) => {
            let path = outputs.path("json");
            return Err(ApiError::invalid(
                path.clone(),
                format!("{path} is {}, must be a schema", kind(&other)),
            ));
        }
    }
    found.extend(outputs.string("regex")?.map(TokenGrammar::Regex));
    found.extend(outputs.string("grammar")?.map(TokenGrammar::Lark));
    found.extend(outputs.bool("json_object")?.filter(|yes| *yes).map(|_| TokenGrammar::JsonObject));
    if let Some(choices) = outputs.list("choice")? {
        let path = outputs.path("choice");
        let texts: Option<Vec<&str>> = choices.iter().map(Value::as_str).collect();
        let texts = texts.filter(|texts| !texts.is_empty());
        let texts = texts
            .ok_or_else(|| ApiError::invalid(path.clone(), format!("{path} must be a list of texts")))?;
        let alternatives: Vec<String> = texts.into_iter().map(escape_regex).collect();
        found.push(TokenGrammar::Regex(format!("({})", alternatives.join("|"))));
    }
    match found.len() {
        0 | 1 => Ok(found.pop()),
        _ => Err(ApiError::invalid("structured_outputs", "structured_outputs has several constraints")
            .hint("give one of them")),
    }
}

fn escape_regex(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '\n' => escaped.push_str("\\n"),
            '\r' => escaped.push_str("\\r"),
            c => {
                if c.is_ascii_punctuation() {
                    escaped.push('\\');
                }
                escaped.push(c);
            }
        }
    }
    escaped
}

/// The number of alternatives per token.
pub(crate) fn top_count(fields: &mut Fields, name: &'static str) -> Result<Option<usize>, ApiError> {
    fields.count(name, MAX_TOP)
}

/// A limit on tokens: a whole number of 1 or more.
pub(crate) fn token_limit(fields: &mut Fields, name: &'static str) -> Result<Option<usize>, ApiError> {
    Ok(fields.int(name, 1, i64::MAX)?.and_then(|n| usize::try_from(n).ok()))
}
