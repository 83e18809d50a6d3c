//! `/openapi.json`: what can be asked for, in OpenAPI's form.

use axum::Json;
use serde_json::{Map, Value, json};

/// Name and type of a field. A type is a JSON type, with the smallest and the largest value for numbers; a name of
/// [`shape`]; or empty for any.
type Field = (&'static str, &'static str);

const SAMPLING: &[Field] = &[
    ("temperature", "number 0"),
    ("top_p", "share"),
    ("top_k", "integer -1 4294967295"),
    ("min_p", "number 0 1"),
    ("repetition_penalty", "positive"),
    ("presence_penalty", "number"),
    ("frequency_penalty", "number"),
    ("seed", "integer -9223372036854775808 9223372036854775807"),
    ("logit_bias", "biases"),
];
const SHARED: &[Field] = &[
    ("n", "integer 1 128"),
    ("stop", "stop"),
    ("stop_token_ids", "tokens"),
    ("include_stop_str_in_output", "boolean"),
    ("skip_special_tokens", "boolean"),
    ("min_tokens", "integer 0 4294967295"),
    ("max_tokens", "integer 1"),
    ("ignore_eos", "boolean"),
    ("priority", "integer -2147483647 2147483647"),
    ("user", "string"),
    ("stream", "boolean"),
    ("stream_options", "object"),
    ("response_format", "object"),
    ("structured_outputs", "object"),
];
const CHAT: &[Field] = &[
    ("messages", "messages"),
    ("max_completion_tokens", "integer 1"),
    ("logprobs", "boolean"),
    ("top_logprobs", "integer 0 20"),
    ("tools", "array"),
    ("tool_choice", ""),
    ("parallel_tool_calls", "boolean"),
    ("chat_template_kwargs", "object"),
    ("add_generation_prompt", "boolean"),
    ("reasoning_effort", "string"),
];
const PLAIN: &[Field] = &[("prompt", "texts"), ("echo", "boolean"), ("logprobs", "integer 0 20")];
const MESSAGES: &[Field] = &[
    ("messages", "messages"),
    ("system", ""),
    ("max_tokens", "integer 1"),
    ("stop_sequences", "strings"),
    ("stream", "boolean"),
    ("thinking", "thinking"),
    ("tools", "array"),
    ("tool_choice", "object"),
    ("metadata", "object"),
];
const RESPONSES: &[Field] = &[
    ("input", ""),
    ("instructions", "string"),
    ("max_output_tokens", "integer 1"),
    ("stream", "boolean"),
    ("reasoning", "object"),
    ("text", "object"),
    ("tools", "array"),
    ("tool_choice", ""),
    ("parallel_tool_calls", "boolean"),
    ("user", "string"),
];
const EMBEDDINGS: &[Field] = &[
    ("input", "texts"),
    ("encoding_format", "encoding"),
    ("dimensions", "integer 1"),
    ("truncate_prompt_tokens", "integer -1"),
    ("user", "string"),
];

/// An endpoint that takes a body: its fields, in groups, and those that are required.
struct Endpoint {
    path: &'static str,
    summary: &'static str,
    fields: &'static [&'static [Field]],
    required: &'static [&'static str],
}

const POSTS: &[Endpoint] = &[
    Endpoint {
        path: "/v1/chat/completions",
        summary: "Answers a conversation (OpenAI)",
        fields: &[SAMPLING, SHARED, CHAT],
        required: &["messages"],
    },
    Endpoint {
        path: "/v1/completions",
        summary: "Continues a text or token ids (OpenAI)",
        fields: &[SAMPLING, SHARED, PLAIN],
        required: &["prompt"],
    },
    Endpoint {
        path: "/v1/responses",
        summary: "Answers a conversation, without stored state (OpenAI)",
        fields: &[SAMPLING, RESPONSES],
        required: &["input"],
    },
    Endpoint {
        path: "/v1/messages",
        summary: "Answers a conversation (Anthropic)",
        fields: &[SAMPLING, MESSAGES],
        required: &["messages", "max_tokens"],
    },
    Endpoint {
        path: "/v1/messages/count_tokens",
        summary: "Counts the tokens of a conversation (Anthropic)",
        fields: &[&[("messages", "messages"), ("system", ""), ("tools", "array"), ("thinking", "thinking")]],
        required: &["messages"],
    },
    Endpoint {
        path: "/v1/embeddings",
        summary: "Turns texts into vectors (OpenAI)",
        fields: &[EMBEDDINGS],
        required: &["input"],
    },
    Endpoint {
        path: "/tokenize",
        summary: "Token ids of a text or a conversation (vLLM)",
        fields: &[&[
            ("prompt", "string"),
            ("messages", "messages"),
            ("add_special_tokens", "boolean"),
            ("return_token_strs", "boolean"),
        ]],
        required: &[],
    },
    Endpoint {
        path: "/detokenize",
        summary: "Text of token ids (vLLM)",
        fields: &[&[("tokens", "tokens")]],
        required: &["tokens"],
    },
];

const GETS: &[(&str, &str)] = &[
    ("/v1/models", "The served models"),
    ("/health", "200 while a worker can serve and open requests make progress"),
    ("/ready", "200 while a new request would be served at once"),
    ("/version", "The version of the server"),
    ("/status", "Workers, models and measurements"),
    ("/metrics", "Measurements in the text format of Prometheus"),
    ("/openapi.json", "This description"),
];

pub(crate) async fn serve() -> Json<Value> {
    Json(description())
}

fn description() -> Value {
    let mut paths = Map::new();
    for (path, summary) in GETS {
        paths.insert(
            (*path).into(),
            json!({ "get": { "summary": summary, "responses": { "200": { "description": "ok" } } } }),
        );
    }
    for endpoint in POSTS {
        let mut properties = Map::new();
        properties.insert("model".into(), shape("string", false));
        for (name, kind) in endpoint.fields.iter().copied().flatten() {
            properties.insert((*name).into(), shape(kind, endpoint.required.contains(name)));
        }
        let schema = json!({
            "type": "object",
            "properties": properties,
            "required": endpoint.required,
            "additionalProperties": false,
        });
        let error = json!({ "description": "an error with a message and a hint" });
        let post = json!({
            "summary": endpoint.summary,
            "requestBody": { "required": true, "content": { "application/json": { "schema": schema } } },
            "responses": { "200": { "description": "ok" }, "4XX": error, "5XX": error },
        });
        paths.insert(endpoint.path.into(), json!({ "post": post }));
    }
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Refrain",
            "version": env!("CARGO_PKG_VERSION"),
            "description": "OpenAI's and Anthropic's APIs. A field that is not listed is refused by name.",
        },
        "components": { "securitySchemes": { "key": { "type": "http", "scheme": "bearer" } } },
        "security": [{ "key": [] }, {}],
        "paths": paths,
    })
}

/// The schema of a field. `null` counts as absent.
fn shape(kind: &str, is_required: bool) -> Value {
    let tokens =
        || json!({ "type": "array", "items": { "type": "integer", "minimum": 0, "maximum": u32::MAX } });
    let strings =
        || json!({ "type": "array", "items": { "type": "string", "minLength": 1 }, "maxItems": 32 });
    let mut words = kind.split(' ');
    let of = match words.next().unwrap_or_default() {
        "" => return json!({}),
        "array" => json!({ "type": "array", "items": {} }),
        "tokens" => tokens(),
        "strings" => strings(),
        "stop" => json!({ "anyOf": [{ "type": "string", "minLength": 1 }, strings()] }),
        "share" => json!({ "type": "number", "exclusiveMinimum": 0, "maximum": 1 }),
        "positive" => json!({ "type": "number", "exclusiveMinimum": 0 }),
        "thinking" => json!({
            "type": "object",
            "required": ["type"],
            "properties": { "type": { "type": "string", "enum": ["enabled", "adaptive", "disabled"] } },
        }),
        "encoding" => json!({ "type": "string", "enum": ["float", "base64"] }),
        "biases" => json!({
            "type": "object",
            "propertyNames": { "pattern": "^[0-9]{1,9}$" },
            "additionalProperties": { "type": "number", "minimum": -100, "maximum": 100 },
        }),
        "texts" => json!({ "anyOf": [
            { "type": "string" },
            { "type": "array", "items": { "type": "string" }, "minItems": 1, "maxItems": 256 },
            { "type": "array", "items": { "type": "integer", "minimum": 0, "maximum": u32::MAX }, "minItems": 1 },
            { "type": "array", "items": tokens(), "minItems": 1, "maxItems": 256 },
        ] }),
        "messages" => json!({ "type": "array", "minItems": 1, "items": {
            "type": "object",
            "required": ["role", "content"],
            "properties": {
                "role": { "type": "string", "enum": ["system", "user", "assistant"] },
                "content": { "anyOf": [
                    { "type": "string" },
                    { "type": "array", "minItems": 1, "items": {
                        "type": "object",
                        "required": ["type", "text"],
                        "properties": {
                            "type": { "type": "string", "enum": ["text"] },
                            "text": { "type": "string" },
                        },
                    } },
                ] },
            },
        } }),
        kind => {
            let mut of = json!({ "type": kind });
            for (word, name) in words.zip(["minimum", "maximum"]) {
                of[name] = serde_json::from_str(word).unwrap_or_default();
            }
            of
        }
    };
    if is_required { of } else { json!({ "anyOf": [of, { "type": "null" }] }) }
}
