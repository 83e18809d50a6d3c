//! A line of a batch: the request and its answer.

use crate::stats::finish_word;
use refrain::{Finish, GrammarSource, Message, SamplingParams, Summary};
use serde_json::{Map, Value, json};

/// A line of the input.
#[derive(Debug)]
pub(crate) struct BatchLine {
    number: usize,
    format: LineFormat,
    /// The request, or why it cannot be read.
    pub(crate) ask: Result<BatchAsk, String>,
}

/// Format of an answer.
#[derive(Debug)]
enum LineFormat {
    /// Text, finish and counts, with the id of the request.
    Plain { id: Option<Value> },
    /// OpenAI's batch format.
    OpenAi { custom_id: Value, is_chat: bool },
}

/// The request of a line.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct BatchAsk {
    pub(crate) text: Option<String>,
    pub(crate) tokens: Option<Vec<u32>>,
    messages: Vec<Message>,
    /// The prompt of a plain line is a user message; that of an OpenAI completion is a text to continue.
    pub(crate) is_plain: bool,
    pub(crate) max_tokens: Option<usize>,
    pub(crate) stop: Vec<String>,
    pub(crate) sampling: LineSampling,
    /// Name of the adapter to apply.
    pub(crate) adapter: Option<String>,
    /// The model that a line for a server names, which may be an adapter there.
    pub(crate) model: Option<String>,
    /// What the answer must be.
    pub(crate) source: Option<GrammarSource>,
}

/// Sampling parameters of one line.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct LineSampling {
    temperature: Option<f32>,
    top_p: Option<f32>,
    min_p: Option<f32>,
    top_k: Option<usize>,
    repeat_penalty: Option<f32>,
    frequency_penalty: Option<f32>,
    presence_penalty: Option<f32>,
    logit_bias: Vec<(u32, f32)>,
    seed: Option<u64>,
}

impl LineSampling {
    /// The line's parameters, with `usual` as defaults.
    pub(crate) fn over(&self, usual: SamplingParams) -> SamplingParams {
        SamplingParams {
            temperature: self.temperature.unwrap_or(usual.temperature),
            top_p: self.top_p.unwrap_or(usual.top_p),
            min_p: self.min_p.unwrap_or(usual.min_p),
            top_k: self.top_k.unwrap_or(usual.top_k),
            repeat_penalty: self.repeat_penalty.unwrap_or(usual.repeat_penalty),
            frequency_penalty: self.frequency_penalty.unwrap_or(usual.frequency_penalty),
            presence_penalty: self.presence_penalty.unwrap_or(usual.presence_penalty),
            logit_bias: self.logit_bias.clone(),
            seed: self.seed.unwrap_or(usual.seed),
            ..usual
        }
    }
}

impl BatchAsk {
    /// The conversation; a prompt is a user message.
    pub(crate) fn turns(&self) -> Vec<Message> {
        let said = self.text.iter().map(|text| Message::new("user", text));
        self.messages.iter().cloned().chain(said).collect()
    }
}

/// The result of a line.
pub(crate) struct BatchAnswer {
    pub(crate) text: String,
    pub(crate) summary: Summary,
}

impl BatchLine {
    pub(crate) fn read(number: usize, bytes: &[u8]) -> BatchLine {
        let plain = |ask| BatchLine { number, format: LineFormat::Plain { id: None }, ask: Err(ask) };
        let value: Value = match serde_json::from_slice(bytes) {
            Ok(value) => value,
            Err(error) => return plain(format!("line {number} is not JSON: {error}")),
        };
        let Value::Object(object) = value else {
            return plain(format!("line {number} is not a JSON object"));
        };
        match (object.get("custom_id"), object.get("body")) {
            (None, None) => {
                let format = LineFormat::Plain { id: object.get("id").cloned() };
                BatchLine { number, format, ask: read_ask(&object, true) }
            }
            (custom_id, body) => {
                let url = object.get("url").and_then(Value::as_str).unwrap_or_default();
                let is_chat = url == "/v1/chat/completions";
                let ask = match (body, custom_id) {
                    (_, None) => Err("the line has a body but no custom_id".to_owned()),
                    (Some(Value::Object(body)), _) if is_chat => read_ask(body, false).and_then(|ask| {
                        if ask.messages.is_empty() { Err(missing("messages")) } else { Ok(ask) }
                    }),
                    (Some(Value::Object(body)), _) if url == "/v1/completions" => read_ask(body, false),
                    (Some(Value::Object(_)), _) => Err(format!(
                        "the url is {url:?}, supported are /v1/chat/completions and /v1/completions"
                    )),
                    _ => Err("the body is not a JSON object".to_owned()),
                };
                let custom_id = custom_id.cloned().unwrap_or_default();
                BatchLine { number, format: LineFormat::OpenAi { custom_id, is_chat }, ask }
            }
        }
    }

    /// The line of the output.
    pub(crate) fn answer(&self, model: &str, answered: Result<BatchAnswer, String>) -> Value {
        let number = self.number;
        match (&self.format, answered) {
            (LineFormat::Plain { id }, answered) => {
                let mut line = match answered {
                    Ok(BatchAnswer { text, summary }) => json!({
                        "text": text,
                        "finish": finish_word(summary.finish.as_ref()),
                        "prompt_tokens": summary.n_prompt,
                        "completion_tokens": summary.n_generated,
                    }),
                    Err(error) => json!({ "error": error }),
                };
                if let (Some(id), Some(line)) = (id, line.as_object_mut()) {
                    line.insert("id".into(), id.clone());
                }
                line
            }
            (LineFormat::OpenAi { custom_id, is_chat }, Ok(BatchAnswer { text, summary })) => json!({
                "id": format!("batch_req_{number}"),
                "custom_id": custom_id,
                "response": {
                    "status_code": 200,
                    "request_id": format!("req_{number}"),
                    "body": body(number, model, *is_chat, &text, &summary),
                },
                "error": null,
            }),
            (LineFormat::OpenAi { custom_id, .. }, Err(error)) => json!({
                "id": format!("batch_req_{number}"),
                "custom_id": custom_id,
                "response": null,
                "error": { "code": "invalid_request", "message": error },
            }),
        }
    }
}

fn body(number: usize, model: &str, is_chat: bool, text: &str, summary: &Summary) -> Value {
    let reason = match summary.finish {
        Some(Finish::MaxTokens | Finish::ContextFull) => "length",
        _ => "stop",
    };
    let choice = match is_chat {
        true => json!({
            "index": 0,
            "message": { "role": "assistant", "content": text },
            "finish_reason": reason,
        }),
        false => json!({ "index": 0, "text": text, "finish_reason": reason }),
    };
    json!({
        "id": format!("cmpl-{number}"),
        "object": if is_chat { "chat.completion" } else { "text_completion" },
        "model": model,
        "choices": [choice],
        "usage": {
            "prompt_tokens": summary.n_prompt,
            "completion_tokens": summary.n_generated,
            "total_tokens": summary.n_prompt + summary.n_generated,
        },
    })
}

/// Whether a line of the output can be the answer to a line of the input: both have the same id.
pub(crate) fn belongs(answer: &[u8], asked: &[u8]) -> bool {
    let Ok(answer) = serde_json::from_slice::<Value>(answer) else { return false };
    match BatchLine::read(0, asked).format {
        LineFormat::Plain { id } => answer.get("id") == id.as_ref(),
        LineFormat::OpenAi { custom_id, .. } => answer.get("custom_id") == Some(&custom_id),
    }
}

fn missing(name: &str) -> String {
    format!("the line has no {name}")
}

/// Refuses fields that would change the answer but are not supported.
fn check_served(object: &Map<String, Value>) -> Result<(), String> {
    let is_more_than = |name: &str, n: u64| object.get(name).and_then(Value::as_u64).is_some_and(|v| v > n);
    let is_on = |name: &str| object.get(name).is_some_and(|v| *v != json!(false) && !v.is_null());
    let refused = [
        ("n", is_more_than("n", 1)),
        ("best_of", is_more_than("best_of", 1)),
        ("logprobs", is_on("logprobs")),
        ("echo", is_on("echo")),
        ("tools", object.get("tools").and_then(Value::as_array).is_some_and(|tools| !tools.is_empty())),
    ];
    match refused.iter().find(|(_, asked)| *asked) {
        Some((name, _)) => Err(format!("{name} is not supported in batches")),
        None => Ok(()),
    }
}

fn read_ask(object: &Map<String, Value>, is_plain: bool) -> Result<BatchAsk, String> {
    check_served(object)?;
    let mut ask = BatchAsk { is_plain, ..BatchAsk::default() };
    match object.get("prompt") {
        Some(Value::String(text)) => ask.text = Some(text.clone()),
        Some(Value::Array(items)) => match &items[..] {
            [Value::String(text)] => ask.text = Some(text.clone()),
            _ => {
                let ids = items.iter().map(|id| id.as_u64().and_then(|id| u32::try_from(id).ok()));
                let ids: Option<Vec<u32>> = ids.collect();
                ask.tokens = Some(ids.ok_or("the prompt is neither a string nor a list of token ids")?);
            }
        },
        Some(_) => return Err("the prompt is neither a string nor a list of token ids".into()),
        None => ask.messages = messages(object.get("messages"))?,
    }
    ask.max_tokens = number(object, &["max_tokens", "max_completion_tokens"])?.map(|n| n as usize);
    ask.stop = match object.get("stop") {
        None | Some(Value::Null) => Vec::new(),
        Some(Value::String(stop)) => vec![stop.clone()],
        Some(stop) => serde_json::from_value(stop.clone())
            .map_err(|_| "stop is neither a string nor a list of strings")?,
    };
    ask.adapter = match object.get("adapter") {
        None | Some(Value::Null) => None,
        Some(Value::String(name)) => Some(name.clone()),
        Some(other) => return Err(format!("adapter is {other}, must be the name of an adapter")),
    };
    ask.model = object.get("model").and_then(Value::as_str).map(str::to_owned);
    ask.source = read_format(object.get("response_format"))?;
    ask.sampling = LineSampling {
        temperature: float(object, &["temperature"])?,
        top_p: float(object, &["top_p"])?,
        min_p: float(object, &["min_p"])?,
        top_k: number(object, &["top_k"])?.map(|n| n as usize),
        repeat_penalty: float(object, &["repeat_penalty", "repetition_penalty"])?,
        frequency_penalty: float(object, &["frequency_penalty"])?,
        presence_penalty: float(object, &["presence_penalty"])?,
        logit_bias: biases(object.get("logit_bias"))?,
        seed: number(object, &["seed"])?,
    };
    Ok(ask)
}

/// OpenAI's `response_format`.
fn read_format(format: Option<&Value>) -> Result<Option<GrammarSource>, String> {
    let Some(format) = format.filter(|format| !format.is_null()) else { return Ok(None) };
    match format.get("type").and_then(Value::as_str) {
        Some("text") => Ok(None),
        Some("json_object") => Ok(Some(GrammarSource::JsonObject)),
        Some("json_schema") => match format.get("json_schema").and_then(|inner| inner.get("schema")) {
            Some(schema) => Ok(Some(GrammarSource::JsonSchema(schema.to_string()))),
            None => Err("response_format.json_schema has no schema".into()),
        },
        _ => Err("response_format.type must be text, json_object or json_schema".into()),
    }
}

fn messages(value: Option<&Value>) -> Result<Vec<Message>, String> {
    let Some(value) = value else { return Err("the line has neither a prompt nor messages".into()) };
    let turns =
        value.as_array().filter(|turns| !turns.is_empty()).ok_or("messages is not a list of messages")?;
    turns.iter().map(message).collect()
}

fn message(turn: &Value) -> Result<Message, String> {
    let role = turn.get("role").and_then(Value::as_str).ok_or("a message has no role")?;
    let content = match turn.get("content") {
        Some(Value::String(text)) => text.clone(),
        Some(Value::Array(parts)) => {
            let texts = parts.iter().map(|part| part.get("text").and_then(Value::as_str));
            let texts: Option<Vec<&str>> = texts.collect();
            texts.ok_or("a message has a part that is not text")?.concat()
        }
        _ => return Err("a message has no content".into()),
    };
    Ok(Message::new(role, content))
}

fn biases(value: Option<&Value>) -> Result<Vec<(u32, f32)>, String> {
    let entries = match value {
        None | Some(Value::Null) => return Ok(Vec::new()),
        Some(Value::Object(entries)) => entries,
        Some(_) => return Err("logit_bias is not an object of token ids".into()),
    };
    let entry = |(id, bias): (&String, &Value)| Some((id.parse().ok()?, bias.as_f64()? as f32));
    let entries: Option<Vec<(u32, f32)>> = entries.iter().map(entry).collect();
    entries.ok_or_else(|| "logit_bias has an entry that is not a token id with a number".into())
}

/// The first of these fields that is present.
fn field<'o>(object: &'o Map<String, Value>, names: &[&'static str]) -> Option<(&'static str, &'o Value)> {
    names.iter().find_map(|name| Some((*name, object.get(*name).filter(|value| !value.is_null())?)))
}

fn number(object: &Map<String, Value>, names: &[&'static str]) -> Result<Option<u64>, String> {
    let Some((name, value)) = field(object, names) else { return Ok(None) };
    value.as_u64().map(Some).ok_or_else(|| format!("{name} is {value}, must be a whole number of 0 or more"))
}

fn float(object: &Map<String, Value>, names: &[&'static str]) -> Result<Option<f32>, String> {
    let Some((name, value)) = field(object, names) else { return Ok(None) };
    value.as_f64().map(|v| Some(v as f32)).ok_or_else(|| format!("{name} is {value}, must be a number"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(line: &str) -> String {
        BatchLine::read(3, line.as_bytes()).ask.unwrap_err()
    }

    #[test]
    fn every_field_of_a_line_is_read() {
        let line = r#"{"prompt": "A cat", "max_tokens": 9, "temperature": 0.5, "seed": 7, "stop": ["x", "y"],
            "logit_bias": {"5": -1.5}, "repetition_penalty": 1.1, "id": 12}"#;
        let line = BatchLine::read(1, line.as_bytes());
        let ask = line.ask.as_ref().unwrap();
        assert_eq!((ask.text.as_deref(), ask.max_tokens, ask.is_plain), (Some("A cat"), Some(9), true));
        assert_eq!(ask.stop, ["x", "y"]);
        let params = ask.sampling.over(SamplingParams::default());
        assert_eq!((params.temperature, params.seed, params.repeat_penalty), (0.5, 7, 1.1));
        assert_eq!((params.logit_bias, params.top_p), (vec![(5, -1.5)], SamplingParams::default().top_p));
        assert_eq!(line.answer("m", Err("no".into())), json!({ "id": 12, "error": "no" }));
        let named = BatchLine::read(1, br#"{"prompt": "a", "adapter": "poems"}"#).ask.unwrap();
        assert_eq!(named.adapter.as_deref(), Some("poems"));
        let tokens = BatchLine::read(1, br#"{"prompt": [1, 2, 3]}"#).ask.unwrap().tokens;
        assert_eq!(tokens, Some(vec![1, 2, 3]));
        let chat = r#"{"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]}"#;
        assert_eq!(BatchLine::read(1, chat.as_bytes()).ask.unwrap().turns(), [Message::new("user", "Hi")]);
    }

    #[test]
    fn invalid_lines_are_refused_with_the_field() {
        assert!(error("{").starts_with("line 3 is not JSON"));
        assert!(error("\u{1}").starts_with("line 3 is not JSON"));
        assert_eq!(error("[1]"), "line 3 is not a JSON object");
        assert_eq!(error("{}"), "the line has neither a prompt nor messages");
        assert_eq!(error(r#"{"prompt": 5}"#), "the prompt is neither a string nor a list of token ids");
        assert_eq!(error(r#"{"prompt": [-1]}"#), "the prompt is neither a string nor a list of token ids");
        assert_eq!(
            error(r#"{"prompt": "a", "max_tokens": -1}"#),
            "max_tokens is -1, must be a whole number of 0 or more"
        );
        assert_eq!(
            error(r#"{"prompt": "a", "temperature": "hot"}"#),
            "temperature is \"hot\", must be a number"
        );
        assert_eq!(error(r#"{"prompt": "a", "adapter": 3}"#), "adapter is 3, must be the name of an adapter");
        assert_eq!(error(r#"{"prompt": "a", "n": 2}"#), "n is not supported in batches");
        let tools = r#"{"prompt": "a", "tools": [{}]}"#;
        assert_eq!(error(tools), "tools is not supported in batches");
        assert_eq!(error(r#"{"messages": [{"role": "user"}]}"#), "a message has no content");
        let format = r#"{"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {}}}"#;
        assert_eq!(error(format), "response_format.json_schema has no schema");
        let wrong = r#"{"custom_id": "a", "url": "/v1/embeddings", "body": {}}"#;
        let text = "the url is \"/v1/embeddings\", supported are /v1/chat/completions and /v1/completions";
        assert_eq!(error(wrong), text);
        let chat = r#"{"custom_id": "a", "url": "/v1/chat/completions", "body": {"prompt": "x"}}"#;
        assert_eq!(error(chat), "the line has no messages");
    }

    #[test]
    fn an_answer_is_matched_to_its_line_by_id() {
        let asked = br#"{"custom_id": "q-7", "url": "/v1/completions", "body": {"prompt": "a"}}"#;
        assert!(belongs(br#"{"custom_id": "q-7", "error": null}"#, asked));
        assert!(!belongs(br#"{"custom_id": "q-8"}"#, asked));
        assert!(belongs(br#"{"text": "x"}"#, br#"{"prompt": "a"}"#));
        assert!(!belongs(br#"{"text": "x"}"#, br#"{"prompt": "a", "id": 1}"#));
        assert!(!belongs(b"{", br#"{"prompt": "a"}"#));
    }
}
