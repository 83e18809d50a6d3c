//! `/openapi.json`: what can be asked for, in OpenAPI's form.

use axum::Json;
use serde_json::{Map, Value, json};

/// Name and JSON type of a field; an empty type is any.
type Field = (&'static str, &'static str);

const SAMPLING: &[Field] = &[
    ("temperature", "number"),
    ("top_p", "number"),
    ("top_k", "integer"),
    ("min_p", "number"),
    ("repetition_penalty", "number"),
    ("presence_penalty", "number"),
    ("frequency_penalty", "number"),
    ("seed", "integer"),
    ("logit_bias", "object"),
];
const SHARED: &[Field] = &[
    ("n", "integer"),
    ("stop", ""),
    ("stop_token_ids", "array"),
    ("include_stop_str_in_output", "boolean"),
    ("skip_special_tokens", "boolean"),
    ("min_tokens", "integer"),
    ("max_tokens", "integer"),
    ("ignore_eos", "boolean"),
    ("priority", "integer"),
    ("user", "string"),
    ("stream", "boolean"),
    ("stream_options", "object"),
    ("response_format", "object"),
    ("structured_outputs", "object"),
];
const CHAT: &[Field] = &[
    ("messages", "array"),
    ("max_completion_tokens", "integer"),
    ("logprobs", "boolean"),
    ("top_logprobs", "integer"),
    ("tools", "array"),
    ("tool_choice", ""),
    ("parallel_tool_calls", "boolean"),
    ("chat_template_kwargs", "object"),
    ("add_generation_prompt", "boolean"),
    ("reasoning_effort", "string"),
];
const PLAIN: &[Field] = &[("prompt", ""), ("echo", "boolean"), ("logprobs", "integer")];
const MESSAGES: &[Field] = &[
    ("messages", "array"),
    ("system", ""),
    ("max_tokens", "integer"),
    ("stop_sequences", "array"),
    ("stream", "boolean"),
    ("thinking", "object"),
    ("tools", "array"),
    ("tool_choice", "object"),
    ("metadata", "object"),
];
const RESPONSES: &[Field] = &[
    ("input", ""),
    ("instructions", "string"),
    ("max_output_tokens", "integer"),
    ("stream", "boolean"),
    ("reasoning", "object"),
    ("text", "object"),
    ("tools", "array"),
    ("tool_choice", ""),
    ("parallel_tool_calls", "boolean"),
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
        fields: &[&[("messages", "array"), ("system", ""), ("tools", "array"), ("thinking", "object")]],
        required: &["messages"],
    },
    Endpoint {
        path: "/tokenize",
        summary: "Token ids of a text or a conversation (vLLM)",
        fields: &[&[
            ("prompt", "string"),
            ("messages", "array"),
            ("add_special_tokens", "boolean"),
            ("return_token_strs", "boolean"),
        ]],
        required: &[],
    },
    Endpoint {
        path: "/detokenize",
        summary: "Text of token ids (vLLM)",
        fields: &[&[("tokens", "array")]],
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
        properties.insert("model".into(), json!({ "type": "string" }));
        for (name, kind) in endpoint.fields.iter().copied().flatten() {
            let schema = match *kind {
                "" => json!({}),
                "array" => json!({ "type": "array", "items": {} }),
                kind => json!({ "type": kind }),
            };
            properties.insert((*name).into(), schema);
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
