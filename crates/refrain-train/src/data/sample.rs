//! One line of a JSONL file: a conversation, a prompt with its completion, or a text.

use refrain_formats::chat::Message;
use serde_json::{Map, Value};

/// A sample of a JSONL file.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum DataSample {
    /// A text, all of it a target.
    Text(String),
    /// A conversation.
    Chat(ChatSample),
    /// A prompt and its completion, which is the target; `plain` is the prompt when there is no chat
    /// template.
    Pair { prompt: String, plain: String, completion: String },
}

#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct ChatSample {
    pub(super) messages: Vec<Message>,
    /// Template variables, such as `tools`.
    pub(super) extra: Map<String, Value>,
}

/// Why a line is not a sample.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum SampleFault {
    /// Invalid JSON, or a field of the wrong type.
    Bad(String),
    /// No known kind; the keys of the object.
    Unknown(Vec<String>),
    /// No assistant message.
    NoAssistant { n_messages: usize },
}

impl DataSample {
    pub(super) fn parse(line: &str) -> Result<Self, SampleFault> {
        let value: Value = serde_json::from_str(line).map_err(|error| SampleFault::Bad(error.to_string()))?;
        let Value::Object(mut object) = value else {
            return Err(SampleFault::Bad(format!("expected an object, found {}", kind(&value))));
        };
        if let Some(found) = object.remove("messages") {
            let extra = ["tools", "documents"];
            let extra = extra.into_iter().filter_map(|key| Some((key.to_owned(), object.remove(key)?)));
            let extra = extra.collect();
            return conversation(messages("messages", found)?, extra);
        }
        if let (true, Some(completion)) = (object.contains_key("prompt"), object.remove("completion")) {
            return pair(object.remove("prompt").unwrap_or_default(), completion);
        }
        if let (true, Some(output)) = (object.contains_key("instruction"), object.remove("output")) {
            let instruction = text("instruction", object.remove("instruction").unwrap_or_default())?;
            let input = object.remove("input").filter(|input| !input.is_null());
            let input = input.map(|input| text("input", input)).transpose()?.unwrap_or_default();
            return Ok(alpaca(&instruction, &input, text("output", output)?));
        }
        if let Some(found) = object.remove("text") {
            return Ok(Self::Text(text("text", found)?));
        }
        Err(SampleFault::Unknown(object.keys().take(8).cloned().collect()))
    }
}

fn conversation(messages: Vec<Message>, extra: Map<String, Value>) -> Result<DataSample, SampleFault> {
    if !messages.iter().any(is_assistant) {
        return Err(SampleFault::NoAssistant { n_messages: messages.len() });
    }
    Ok(DataSample::Chat(ChatSample { messages, extra }))
}

/// Both are strings, or both are lists of messages.
fn pair(prompt: Value, completion: Value) -> Result<DataSample, SampleFault> {
    if prompt.is_array() {
        let mut all = messages("prompt", prompt)?;
        all.extend(messages("completion", completion)?);
        return conversation(all, Map::new());
    }
    let prompt = text("prompt", prompt)?;
    Ok(DataSample::Pair { plain: prompt.clone(), prompt, completion: text("completion", completion)? })
}

fn alpaca(instruction: &str, input: &str, completion: String) -> DataSample {
    let (prompt, plain) = if input.trim().is_empty() {
        (instruction.to_owned(), format!("### Instruction:\n{instruction}\n\n### Response:\n"))
    } else {
        (
            format!("{instruction}\n\n{input}"),
            format!("### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"),
        )
    };
    DataSample::Pair { prompt, plain, completion }
}

pub(super) fn is_assistant(message: &Message) -> bool {
    message.role == "assistant"
}

fn messages(key: &str, value: Value) -> Result<Vec<Message>, SampleFault> {
    let Value::Array(list) = value else {
        return Err(SampleFault::Bad(format!("`{key}` is {}, expected a list", kind(&value))));
    };
    list.into_iter().enumerate().map(|(i, value)| message(&format!("{key}[{i}]"), value)).collect()
}

fn message(place: &str, value: Value) -> Result<Message, SampleFault> {
    let Value::Object(mut object) = value else {
        return Err(SampleFault::Bad(format!("`{place}` is {}, expected an object", kind(&value))));
    };
    let role = match object.remove("role") {
        Some(role) => text(&format!("{place}.role"), role)?,
        None => return Err(SampleFault::Bad(format!("`{place}` has no role"))),
    };
    let place = format!("{place}.content");
    let content = match object.remove("content") {
        // A message that only calls tools has no text.
        None | Some(Value::Null) => String::new(),
        Some(Value::Array(parts)) => {
            let part = |(i, part): (usize, Value)| match part {
                Value::Object(mut part) if part.get("type").is_none_or(|kind| kind == "text") => {
                    text(&format!("{place}[{i}].text"), part.remove("text").unwrap_or_default())
                }
                _ => Err(SampleFault::Bad(format!("`{place}[{i}]` is not a text part"))),
            };
            parts.into_iter().enumerate().map(part).collect::<Result<String, _>>()?
        }
        Some(content) => text(&place, content)?,
    };
    Ok(Message { role, content, extra: object })
}

fn text(place: &str, value: Value) -> Result<String, SampleFault> {
    match value {
        Value::String(text) => Ok(text),
        other => Err(SampleFault::Bad(format!("`{place}` is {}, expected a string", kind(&other)))),
    }
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chat(turns: &[(&str, &str)]) -> DataSample {
        let messages = turns.iter().map(|(role, content)| Message::new(*role, *content)).collect();
        DataSample::Chat(ChatSample { messages, extra: Map::new() })
    }

    #[test]
    fn every_kind_of_sample_is_read() {
        let cases = [
            (r#"{"text":"abc","id":7}"#, DataSample::Text("abc".into())),
            (
                r#"{"messages":[{"role":"user","content":"a"},{"role":"assistant","content":[{"type":"text","text":"b"},{"text":"c"}]}]}"#,
                chat(&[("user", "a"), ("assistant", "bc")]),
            ),
            (
                r#"{"prompt":"a","completion":"b"}"#,
                DataSample::Pair { prompt: "a".into(), plain: "a".into(), completion: "b".into() },
            ),
            (
                r#"{"prompt":[{"role":"user","content":"a"}],"completion":[{"role":"assistant","content":null}]}"#,
                chat(&[("user", "a"), ("assistant", "")]),
            ),
            (
                r#"{"instruction":"do","input":"","output":"x"}"#,
                DataSample::Pair {
                    prompt: "do".into(),
                    plain: "### Instruction:\ndo\n\n### Response:\n".into(),
                    completion: "x".into(),
                },
            ),
            (
                r#"{"instruction":"do","input":"it","output":"x","text":"ignored"}"#,
                DataSample::Pair {
                    prompt: "do\n\nit".into(),
                    plain: "### Instruction:\ndo\n\n### Input:\nit\n\n### Response:\n".into(),
                    completion: "x".into(),
                },
            ),
        ];
        for (line, expected) in cases {
            assert_eq!(DataSample::parse(line).unwrap(), expected, "{line}");
        }
    }

    #[test]
    fn additional_fields_reach_the_template() {
        let line = r#"{"tools":[1],"messages":[{"role":"assistant","content":"x","name":"n"}]}"#;
        let Ok(DataSample::Chat(found)) = DataSample::parse(line) else { panic!() };
        assert_eq!(found.extra["tools"], serde_json::json!([1]));
        assert_eq!(found.messages[0].extra["name"], "n");
    }

    #[test]
    fn an_invalid_sample_is_refused_with_a_reason() {
        let fault = |line: &str| DataSample::parse(line).unwrap_err();
        let bad = |line: &str, part: &str| match fault(line) {
            SampleFault::Bad(reason) => assert!(reason.contains(part), "{reason}"),
            other => panic!("{other:?}"),
        };
        bad(r#"{"text":"#, "EOF");
        bad("[1]", "expected an object, found a list");
        bad(r#"{"text":7}"#, "`text` is a number, expected a string");
        bad(r#"{"messages":7}"#, "`messages` is a number, expected a list");
        bad(r#"{"messages":[{"content":"x"}]}"#, "`messages[0]` has no role");
        bad(r#"{"messages":[{"role":"user","content":7}]}"#, "`messages[0].content` is a number");
        bad(r#"{"messages":[{"role":"user","content":[{"type":"image"}]}]}"#, "`messages[0].content[0]`");
        assert_eq!(fault(r#"{"a":1,"b":2}"#), SampleFault::Unknown(vec!["a".into(), "b".into()]));
        assert_eq!(fault(r#"{"messages":[]}"#), SampleFault::NoAssistant { n_messages: 0 });
        let line = r#"{"messages":[{"role":"user","content":"a"}]}"#;
        assert_eq!(fault(line), SampleFault::NoAssistant { n_messages: 1 });
    }
}
