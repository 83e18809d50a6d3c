//! A line of texts to embed, and its answer.

use refrain::Embedding;
use serde_json::{Map, Value, json};

const URL: &str = "/v1/embeddings";

/// A line of the input.
#[derive(Debug)]
pub(crate) struct EmbedLine {
    number: usize,
    format: EmbedFormat,
    /// The texts, or why they cannot be read.
    pub(crate) ask: Result<EmbedTexts, String>,
}

/// Format of an answer.
#[derive(Debug)]
enum EmbedFormat {
    /// The embedding and the number of tokens, with the id of the line.
    Plain { id: Option<Value> },
    /// OpenAI's batch format.
    OpenAi { custom_id: Value },
}

/// What a line asks to embed.
#[derive(Debug, PartialEq)]
pub(crate) enum EmbedTexts {
    Texts(Vec<String>),
    Tokens(Vec<Vec<u32>>),
}

impl EmbedLine {
    pub(crate) fn read(number: usize, bytes: &[u8]) -> EmbedLine {
        let plain = |error| EmbedLine { number, format: EmbedFormat::Plain { id: None }, ask: Err(error) };
        let object = match serde_json::from_slice(bytes) {
            Ok(Value::Object(object)) => object,
            Ok(_) => return plain(format!("line {number} is not a JSON object")),
            Err(error) => return plain(format!("line {number} is not JSON: {error}")),
        };
        match (object.get("custom_id"), object.get("body")) {
            (None, None) => {
                let format = EmbedFormat::Plain { id: object.get("id").cloned() };
                let ask = match object.get("text") {
                    Some(Value::String(text)) => Ok(EmbedTexts::Texts(vec![text.clone()])),
                    Some(_) => Err("the text is not a string".to_owned()),
                    None => Err("the line has no text".to_owned()),
                };
                EmbedLine { number, format, ask }
            }
            (custom_id, body) => {
                let url = object.get("url").and_then(Value::as_str).unwrap_or_default();
                let ask = match (body, custom_id) {
                    (_, None) => Err("the line has a body but no custom_id".to_owned()),
                    (Some(Value::Object(body)), _) if url == URL => input(body),
                    (Some(Value::Object(_)), _) => Err(format!("the url is {url:?}, supported is {URL}")),
                    _ => Err("the body is not a JSON object".to_owned()),
                };
                let custom_id = custom_id.cloned().unwrap_or_default();
                EmbedLine { number, format: EmbedFormat::OpenAi { custom_id }, ask }
            }
        }
    }

    /// The texts that are not given as tokens.
    pub(crate) fn texts(&self) -> impl Iterator<Item = &str> {
        let texts = match &self.ask {
            Ok(EmbedTexts::Texts(texts)) => texts.as_slice(),
            Ok(EmbedTexts::Tokens(_)) | Err(_) => &[],
        };
        texts.iter().map(String::as_str)
    }

    /// The line of the output.
    pub(crate) fn answer(&self, model: &str, embedded: Result<Vec<Embedding>, String>) -> Value {
        let number = self.number;
        match (&self.format, embedded) {
            (EmbedFormat::Plain { id }, embedded) => {
                let embedded = embedded.map(|texts| texts.into_iter().next());
                let mut line = match embedded {
                    Ok(Some(Embedding { vector, n_tokens, n_cut })) => {
                        json!({ "embedding": vector, "tokens": n_tokens, "cut_tokens": n_cut })
                    }
                    Ok(None) => json!({ "error": "there is no vector" }),
                    Err(error) => json!({ "error": error }),
                };
                if let (Some(id), Some(line)) = (id, line.as_object_mut()) {
                    line.insert("id".into(), id.clone());
                }
                line
            }
            (EmbedFormat::OpenAi { custom_id }, Ok(texts)) => json!({
                "id": format!("batch_req_{number}"),
                "custom_id": custom_id,
                "response": {
                    "status_code": 200,
                    "request_id": format!("req_{number}"),
                    "body": body(model, &texts),
                },
                "error": null,
            }),
            (EmbedFormat::OpenAi { custom_id }, Err(error)) => json!({
                "id": format!("batch_req_{number}"),
                "custom_id": custom_id,
                "response": null,
                "error": { "code": "invalid_request", "message": error },
            }),
        }
    }
}

fn body(model: &str, texts: &[Embedding]) -> Value {
    let n_tokens: usize = texts.iter().map(|text| text.n_tokens).sum();
    let data = |(index, text): (usize, &Embedding)| json!({ "object": "embedding", "index": index, "embedding": text.vector });
    json!({
        "object": "list",
        "data": texts.iter().enumerate().map(data).collect::<Vec<_>>(),
        "model": model,
        "usage": { "prompt_tokens": n_tokens, "total_tokens": n_tokens },
    })
}

/// The input of a request: a text, a list of texts, the tokens of a text, or a list of those.
fn input(body: &Map<String, Value>) -> Result<EmbedTexts, String> {
    if body.get("encoding_format").is_some_and(|format| !format.is_null() && format != "float") {
        return Err("the only supported encoding_format is float".into());
    }
    if body.get("dimensions").is_some_and(|dimensions| !dimensions.is_null()) {
        return Err("dimensions is not supported: vectors have the size of the model".into());
    }
    let refuse = || "the input is neither a text, a list of texts, nor a list of token ids".to_owned();
    let list = match body.get("input") {
        Some(Value::String(text)) => return Ok(EmbedTexts::Texts(vec![text.clone()])),
        Some(Value::Array(list)) if !list.is_empty() => list,
        Some(Value::Array(_)) => return Err("the input is an empty list".into()),
        Some(_) => return Err(refuse()),
        None => return Err("the body has no input".into()),
    };
    let text = |value: &Value| value.as_str().map(str::to_owned);
    let token = |value: &Value| u32::try_from(value.as_u64()?).ok();
    let tokens = |value: &Value| value.as_array()?.iter().map(token).collect::<Option<Vec<u32>>>();
    let texts = || list.iter().map(text).collect::<Option<Vec<_>>>().map(EmbedTexts::Texts);
    let one = || list.iter().map(token).collect::<Option<Vec<_>>>().map(|one| EmbedTexts::Tokens(vec![one]));
    let several = || list.iter().map(tokens).collect::<Option<Vec<_>>>().map(EmbedTexts::Tokens);
    texts().or_else(one).or_else(several).ok_or_else(refuse)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(line: &str) -> Result<EmbedTexts, String> {
        EmbedLine::read(3, line.as_bytes()).ask
    }

    fn ask_body(body: &str) -> Result<EmbedTexts, String> {
        ask(&format!("{{\"custom_id\": \"a\", \"url\": \"{URL}\", \"body\": {body}}}"))
    }

    #[test]
    fn every_form_of_input_is_read() {
        let texts = |texts: &[&str]| Ok(EmbedTexts::Texts(texts.iter().map(|&t| t.to_owned()).collect()));
        assert_eq!(ask(r#"{"text": "a cat", "id": 7}"#), texts(&["a cat"]));
        assert_eq!(ask_body(r#"{"input": "a cat", "encoding_format": "float"}"#), texts(&["a cat"]));
        assert_eq!(ask_body(r#"{"input": ["a", ""]}"#), texts(&["a", ""]));
        assert_eq!(ask_body(r#"{"input": [1, 2]}"#), Ok(EmbedTexts::Tokens(vec![vec![1, 2]])));
        assert_eq!(
            ask_body(r#"{"input": [[1], [2, 3]]}"#),
            Ok(EmbedTexts::Tokens(vec![vec![1], vec![2, 3]]))
        );
    }

    #[test]
    fn what_cannot_be_read_is_said_with_the_field() {
        let error = |line: &str| ask(line).unwrap_err();
        let of_body = |body: &str| ask_body(body).unwrap_err();
        assert!(error("{").starts_with("line 3 is not JSON"));
        assert_eq!(error("[]"), "line 3 is not a JSON object");
        assert_eq!(error("{}"), "the line has no text");
        assert_eq!(error(r#"{"text": 5}"#), "the text is not a string");
        assert_eq!(error(r#"{"body": {}}"#), "the line has a body but no custom_id");
        let other = r#"{"custom_id": "a", "url": "/v1/completions", "body": {}}"#;
        assert_eq!(error(other), "the url is \"/v1/completions\", supported is /v1/embeddings");
        assert_eq!(of_body("{}"), "the body has no input");
        assert_eq!(of_body(r#"{"input": []}"#), "the input is an empty list");
        let mixed = "the input is neither a text, a list of texts, nor a list of token ids";
        assert_eq!(of_body(r#"{"input": ["a", 1]}"#), mixed);
        assert_eq!(of_body(r#"{"input": [-1]}"#), mixed);
        assert!(of_body(r#"{"input": "a", "encoding_format": "base64"}"#).contains("encoding_format"));
        assert!(of_body(r#"{"input": "a", "dimensions": 8}"#).contains("dimensions"));
    }
}
