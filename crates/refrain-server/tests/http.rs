//! The server over real connections, with a backend that replies what the test says.

mod common;

use common::{Reply, Served, lines_of};
use refrain_server::TlsFiles;
use refrain_worker::{FinishedBy, Refusal, RefusalKind, TokenGrammar, WorkerState};
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

fn hello() -> Value {
    json!([{ "role": "user", "content": "Hello" }])
}

#[test]
fn fields_reach_the_backend_under_their_own_names() {
    let served = Served::start(|_| {});
    let body = json!({
        "prompt": "A", "max_tokens": 9, "min_tokens": 2, "temperature": 0.5, "top_p": 0.75, "top_k": 11, "min_p": 0.125,
        "seed": 42, "repetition_penalty": 1.5, "presence_penalty": 0.25, "frequency_penalty": 0.5,
        "logit_bias": { "5": -3 }, "stop_token_ids": [77], "ignore_eos": true, "n": 2, "priority": 3, "logprobs": 4,
        "stream": false, "user": "me",
    });
    assert_eq!(served.post("/v1/completions", &body).0, 200);
    let requests = served.requests();
    assert_eq!(requests.len(), 2);
    let request = &requests[0];
    let s = &request.sampling;
    assert_eq!((s.temperature, s.top_p, s.top_k, s.min_p), (0.5, 0.75, 11, 0.125));
    assert_eq!((s.repeat_penalty, s.presence_penalty, s.frequency_penalty), (1.5, 0.25, 0.5));
    assert_eq!((&s.logit_bias, s.seed, requests[1].sampling.seed), (&vec![(5, -3.0)], 42, 43));
    assert_eq!((request.max_tokens, request.min_tokens, request.n_top_logprobs), (Some(9), 2, 4));
    assert_eq!((&request.end, request.priority), (&vec![77], -3));
}

#[test]
fn fields_that_are_not_supported_are_refused_by_name() {
    let served = Served::start(|_| {});
    let chat = |field: &str, value: Value| {
        let mut body = json!({ "messages": hello() });
        let (outer, inner) = field.split_once('.').unwrap_or((field, ""));
        body[outer] = if inner.is_empty() { value } else { json!({ inner: value }) };
        ("/v1/chat/completions", field.to_owned(), body)
    };
    let plain = |field: &str, value: Value| {
        let mut body = json!({ "prompt": "A" });
        body[field] = value;
        ("/v1/completions", field.to_owned(), body)
    };
    let cases = [
        chat("response_format.type", json!({})),
        chat("temprature", json!(1)),
        chat("modalities", json!(["audio"])),
        chat("audio", json!({})),
        chat("top_logprobs", json!(2)),
        chat("temperature", json!(-1)),
        chat("temperature", json!("hot")),
        chat("max_tokens", json!(0)),
        chat("n", json!(0)),
        chat("logit_bias", json!({ "x": 1 })),
        plain("suffix", json!("end")),
        plain("best_of", json!(3)),
        plain("prompt", json!([1, -5])),
        plain("prompt", json!([[999_999_999]])),
        plain("stop", json!([""])),
        plain("min_tokens", json!(99)),
    ];
    for (path, field, body) in cases {
        let (status, reply) = served.post(path, &body);
        assert_eq!(status, 400, "{field}: {reply}");
        assert_eq!(reply["error"]["param"], field, "{reply}");
        assert_eq!(reply["error"]["type"], "invalid_request_error");
    }
    let (_, reply) = served.post("/v1/chat/completions", &json!({ "messages": hello(), "temprature": 1 }));
    assert!(
        reply["error"]["message"].as_str().unwrap().ends_with("hint: did you mean temperature?"),
        "{reply}"
    );
    let (status, reply) = served.post("/v1/embeddings", &json!({ "input": "x" }));
    let message = reply["error"]["message"].as_str().unwrap();
    assert!(status == 400 && message.contains("do not say how it embeds texts; hint: serve"), "{reply}");
    let (status, reply) = served.post("/v1/completions", &json!({ "prompt": "A", "model": "gpt-9" }));
    assert_eq!((status, &reply["error"]["code"]), (404, &json!("model_not_found")));
    assert!(served.requests().is_empty(), "nothing was generated");
}

#[test]
fn a_stop_text_ends_the_reply_and_cancels_the_rest() {
    let served = Served::start(|_| {});
    served.reply(Reply::endless("One two three four "));
    let body = json!({ "prompt": "A", "max_tokens": 1_000_000, "stop": ["three"] });
    let (_, reply) = served.post("/v1/completions", &body);
    let choice = &reply["choices"][0];
    assert_eq!((&choice["text"], &choice["finish_reason"]), (&json!("One two "), &json!("stop")));
    assert_eq!(choice["stop_reason"], "three");
    served.wait_for_cancel();
}

#[test]
fn echo_and_token_prompts_and_several_prompts_work_together() {
    let served = Served::start(|_| {});
    let (_, tokens) =
        served.post("/tokenize", &json!({ "prompt": "Once upon", "add_special_tokens": false }));
    let (_, text) = served.post("/detokenize", &json!({ "tokens": tokens["tokens"] }));
    assert_eq!(text["prompt"].as_str().map(str::trim), Some("Once upon"));
    for _ in 0..4 {
        served.reply(Reply::text(" yes"));
    }
    let body =
        json!({ "prompt": [tokens["tokens"], tokens["tokens"]], "n": 2, "echo": true, "max_tokens": 5 });
    let (status, reply) = served.post("/v1/completions", &body);
    assert_eq!(status, 200, "{reply}");
    let choices = reply["choices"].as_array().unwrap();
    assert_eq!(choices.len(), 4);
    assert!(choices.iter().all(|c| c["text"].as_str().unwrap().trim() == "Once upon yes"), "{reply}");
}

#[test]
fn streams_of_all_apis_have_the_text_of_the_whole_reply() {
    let served = Served::start(|_| {});
    let text = "Grüße, 世界! It works.";
    let chat = json!({ "messages": hello(), "stream": true, "stream_options": { "include_usage": true } });
    served.reply(Reply::text(text));
    let events = served.stream("/v1/chat/completions", &chat);
    let deltas: String =
        events.iter().filter_map(|(_, e)| e["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(deltas, text);
    assert_eq!(events[0].1["choices"][0]["delta"]["role"], "assistant");
    let usage = &events[events.len() - 2].1;
    assert_eq!((&usage["choices"], events.last().unwrap().1.as_str()), (&json!([]), Some("[DONE]")));
    assert!(usage["usage"]["completion_tokens"].as_u64() > Some(5), "{usage}");

    let messages = json!({ "messages": hello(), "max_tokens": 100, "stream": true });
    served.reply(Reply::text(text));
    let events = served.stream("/v1/messages", &messages);
    let deltas: String = events.iter().filter_map(|(_, e)| e["delta"]["text"].as_str()).collect();
    assert_eq!(deltas, text);
    let mut names: Vec<&str> = events.iter().map(|(name, _)| name.as_str()).collect();
    names.dedup();
    let want = [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ];
    assert_eq!(names, want);

    let responses = json!({ "input": "Hello", "stream": true });
    served.reply(Reply::text(text));
    let events = served.stream("/v1/responses", &responses);
    let deltas: String = events
        .iter()
        .filter_map(|(name, e)| e["delta"].as_str().filter(|_| name.ends_with("text.delta")))
        .collect();
    assert_eq!(deltas, text);
    let (name, last) = events.last().unwrap();
    assert_eq!(name, "response.completed");
    assert_eq!(last["response"]["output"][0]["content"][0]["text"], text);
    assert!(events.iter().enumerate().all(|(n, (_, e))| e["sequence_number"] == n));
}

#[test]
fn tokens_without_text_of_their_own_are_counted() {
    let served = Served::start(|_| {});
    let text = "世界 🐈 ends";
    let (_, tokens) = served.post("/tokenize", &json!({ "prompt": text, "add_special_tokens": false }));
    let n = tokens["count"].as_u64().unwrap();
    assert!(n > 8, "several tokens spell a character: {tokens}");
    for stream in [false, true] {
        served.reply(Reply::slow(text));
        let body = json!({ "prompt": "A", "max_tokens": 400, "stream": stream, "stream_options": { "include_usage": true } });
        let usage = match stream {
            false => served.post("/v1/completions", &body).1["usage"].clone(),
            true => served.stream("/v1/completions", &body).iter().rev().nth(1).unwrap().1["usage"].clone(),
        };
        assert_eq!(usage["completion_tokens"], n, "stream: {stream}");
    }
}

#[test]
fn tool_calls_are_found_for_each_api() {
    let template = "{% for t in tools %}<tool_call>{{ t | tojson }}{% endfor %}\
                    {% for m in messages %}{{ m.role }}:{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}\n{% endfor %}";
    let served = Served::start(|setup| setup.template = Some(template.into()));
    let parameters = json!({ "type": "object", "properties": { "city": { "type": "string" } } });
    let call =
        "Let me see.\n<tool_call>{\"name\": \"weather\", \"arguments\": {\"city\": \"Paris\"}}</tool_call>";
    let function = json!({ "name": "weather", "description": "d", "parameters": parameters });

    served.reply(Reply::text(call));
    let body = json!({ "messages": hello(), "tools": [{ "type": "function", "function": function }] });
    let (status, reply) = served.post("/v1/chat/completions", &body);
    assert_eq!(status, 200, "{reply}");
    let choice = &reply["choices"][0];
    assert_eq!(
        (&choice["finish_reason"], &choice["message"]["content"]),
        (&json!("tool_calls"), &json!("Let me see."))
    );
    let called = &choice["message"]["tool_calls"][0]["function"];
    assert_eq!((&called["name"], &called["arguments"]), (&json!("weather"), &json!("{\"city\":\"Paris\"}")));

    served.reply(Reply::text(call));
    let tool = json!({ "name": "weather", "input_schema": parameters });
    let body = json!({ "messages": hello(), "max_tokens": 99, "tools": [tool] });
    let (status, reply) = served.post("/v1/messages", &body);
    assert_eq!((status, &reply["stop_reason"]), (200, &json!("tool_use")), "{reply}");
    assert_eq!(reply["content"][1]["input"], json!({ "city": "Paris" }));

    served.reply(Reply::text("Sunny."));
    let id = reply["content"][1]["id"].clone();
    let history = json!([
        { "role": "user", "content": "Weather?" },
        { "role": "assistant", "content": reply["content"] },
        { "role": "user", "content": [{ "type": "tool_result", "tool_use_id": id, "content": "22 degrees" }] },
    ]);
    let (status, reply) =
        served.post("/v1/messages", &json!({ "messages": history, "max_tokens": 99, "tools": [tool] }));
    assert_eq!((status, &reply["content"][0]["text"]), (200, &json!("Sunny.")), "{reply}");

    served.reply(Reply::text(call));
    let tool = json!({ "type": "function", "name": "weather", "parameters": parameters });
    let events = served.stream("/v1/responses", &json!({ "input": "Hi", "tools": [tool], "stream": true }));
    let output = &events.last().unwrap().1["response"]["output"];
    assert_eq!(
        (&output[1]["type"], &output[1]["arguments"]),
        (&json!("function_call"), &json!("{\"city\":\"Paris\"}"))
    );

    let tools = json!([{ "type": "function", "function": function }]);
    let forced = json!({ "messages": hello(), "tools": tools, "tool_choice": "required" });
    served.reply(Reply::text_then(call, Ok(FinishedBy::Complete)));
    let (status, reply) = served.post("/v1/chat/completions", &forced);
    assert_eq!((status, &reply["choices"][0]["finish_reason"]), (200, &json!("tool_calls")), "{reply}");
    let Some(TokenGrammar::JsonBetween { before, schema, after }) =
        served.requests().last().unwrap().grammar.clone()
    else {
        panic!("no grammar")
    };
    assert_eq!((before.as_str(), after.as_str()), ("<tool_call>\n", "\n</tool_call>"));
    let schema: Value = serde_json::from_str(&schema).unwrap();
    assert_eq!(schema["anyOf"][0]["properties"]["name"], json!({ "const": "weather" }));
    assert_eq!(schema["$defs"]["arguments0"], parameters);
    let other = json!({ "type": "function", "function": { "name": "missing" } });
    let missing = json!({ "messages": hello(), "tools": tools, "tool_choice": other });
    assert_eq!(served.post("/v1/chat/completions", &missing).0, 400);
    let both = json!({ "messages": hello(), "tools": tools, "response_format": { "type": "json_object" } });
    assert_eq!(served.post("/v1/chat/completions", &both).1["error"]["param"], "tools");
}

#[test]
fn formats_of_every_api_become_grammars() {
    let served = Served::start(|_| {});
    let schema = json!({ "type": "object", "properties": { "a": { "type": "integer" } } });
    let nested =
        json!({ "type": "json_schema", "json_schema": { "name": "x", "strict": true, "schema": schema } });
    let flat = json!({ "type": "json_schema", "name": "x", "schema": schema });
    let want = Some(TokenGrammar::JsonSchema(schema.to_string()));
    let cases = [
        ("/v1/chat/completions", json!({ "messages": hello(), "response_format": nested }), want.clone()),
        (
            "/v1/chat/completions",
            json!({ "messages": hello(), "response_format": { "type": "json_object" } }),
            Some(TokenGrammar::JsonObject),
        ),
        ("/v1/chat/completions", json!({ "messages": hello(), "response_format": { "type": "text" } }), None),
        ("/v1/responses", json!({ "input": "Hi", "text": { "format": flat } }), want.clone()),
        ("/v1/completions", json!({ "prompt": "Hi", "guided_json": schema }), want),
        (
            "/v1/completions",
            json!({ "prompt": "Hi", "structured_outputs": { "regex": "[ab]+" } }),
            Some(TokenGrammar::Regex("[ab]+".into())),
        ),
        (
            "/v1/completions",
            json!({ "prompt": "Hi", "guided_choice": ["a.b", "c"] }),
            Some(TokenGrammar::Regex("(a\\.b|c)".into())),
        ),
        (
            "/v1/completions",
            json!({ "prompt": "Hi", "guided_grammar": "start: \"a\"" }),
            Some(TokenGrammar::Lark("start: \"a\"".into())),
        ),
    ];
    for (path, body, grammar) in cases {
        served.reply(Reply::text_then("{}", Ok(FinishedBy::Complete)));
        let (status, reply) = served.post(path, &body);
        assert_eq!(status, 200, "{body}: {reply}");
        assert_eq!(served.requests().last().unwrap().grammar, grammar, "{body}");
    }
    let body = json!({ "prompt": "Hi", "structured_outputs": { "regex": "a" }, "stop": "x" });
    assert_eq!(served.post("/v1/completions", &body).1["error"]["param"], "stop");
    let body = json!({ "prompt": "Hi", "structured_outputs": { "regex": "a" }, "guided_regex": "b" });
    assert_eq!(served.post("/v1/completions", &body).1["error"]["param"], "guided_regex");
    // A model that always thinks has no room for a format.
    let template = "{% for m in messages %}{{ m.content }}{% endfor %}<think>\n";
    let served = Served::start(|setup| setup.template = Some(template.into()));
    let body = json!({ "messages": hello(), "response_format": { "type": "json_object" } });
    assert_eq!(served.post("/v1/chat/completions", &body).1["error"]["param"], "response_format");
}

#[test]
fn thinking_is_separate_in_both_usual_fields() {
    let template = "{% for m in messages %}{{ m.content }}{% endfor %}<think>\n";
    let served = Served::start(|setup| setup.template = Some(template.into()));
    served.reply(Reply::text("Two and two.\n</think>\n\nFour."));
    let (_, reply) = served.post("/v1/chat/completions", &json!({ "messages": hello() }));
    let message = &reply["choices"][0]["message"];
    assert_eq!(message["content"].as_str().map(str::trim), Some("Four."), "{reply}");
    assert_eq!(message["reasoning"].as_str().map(str::trim), Some("Two and two."));
    assert_eq!(message["reasoning"], message["reasoning_content"]);
    served.reply(Reply::text("Two and two.\n</think>\n\nFour."));
    let (_, reply) = served.post("/v1/messages", &json!({ "messages": hello(), "max_tokens": 50 }));
    assert_eq!(reply["content"][0]["type"], "thinking", "{reply}");
}

#[test]
fn errors_have_the_shape_of_their_api_and_a_status_before_the_first_token() {
    let served = Served::start(|setup| setup.key = Some("sk-12345678"));
    let (status, reply) = served.post("/v1/messages", &json!({}));
    assert_eq!(
        (status, &reply["type"], &reply["error"]["type"]),
        (401, &json!("error"), &json!("authentication_error"))
    );
    let (status, reply) = served.post("/v1/chat/completions", &json!({}));
    assert_eq!((status, &reply["error"]["code"]), (401, &json!("missing_api_key")));
    let served = Served::start(|_| {});
    let refusal = |kind| Refusal {
        kind,
        message: "the worker failed 5 times in a row".into(),
        hint: Some("look at the log".into()),
        retry_after: Some(Duration::from_millis(1500)),
    };
    for (kind, want) in
        [(RefusalKind::Unavailable, 503), (RefusalKind::Busy, 429), (RefusalKind::Failed, 500)]
    {
        for stream in [false, true] {
            served.reply(Reply::refused(refusal(kind)));
            let (head, body) =
                served.raw_post("/v1/completions", &json!({ "prompt": "A", "stream": stream }).to_string());
            assert!(head.starts_with(&format!("HTTP/1.1 {want}")), "{head}");
            assert!(head.contains("retry-after: 2"), "{head}");
            let error: Value = serde_json::from_str(&body).unwrap();
            assert!(error["error"]["message"].as_str().unwrap().contains("hint: look at the log"));
        }
    }
    served.reply(Reply::text_then("Some text", Err(refusal(RefusalKind::Failed))));
    let events =
        served.stream("/v1/completions", &json!({ "prompt": "A", "stream": true, "max_tokens": 50 }));
    let error = &events[events.len() - 2].1["error"];
    assert_eq!(error["code"], "generation_failed", "{events:?}");
    let long = json!({ "prompt": vec![1; 600] });
    assert_eq!(served.post("/v1/completions", &long).1["error"]["code"], "context_length_exceeded");
}

#[test]
fn a_key_has_at_most_its_number_of_open_requests() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("keys");
    std::fs::write(&path, "sk-one-12345 concurrent=1\n").unwrap();
    let served = Served::start(|setup| setup.key_file = Some(path.clone()));
    let body = json!({ "prompt": "A", "max_tokens": 1_000_000, "stream": true }).to_string();
    let auth = "Authorization: Bearer sk-one-12345\r\n";
    served.reply(Reply::endless("word "));
    let mut first = served.open("/v1/completions", auth, &body);
    first.read_exact(&mut [0; 300]).unwrap();
    let second = served.exchange("/v1/completions", auth, &body);
    assert!(
        second.starts_with("HTTP/1.1 429") && second.contains("1 open requests, the maximum is 1"),
        "{second}"
    );
    drop(first);
    served.wait_for_cancel();
}

#[test]
fn a_key_has_limits_per_minute_and_is_told_what_is_left() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("keys");
    std::fs::write(&path, "sk-one-12345 requests-per-minute=2\nsk-two-12345 tokens-per-minute=100\n")
        .unwrap();
    let served = Served::start(|setup| setup.key_file = Some(path.clone()));
    let send = |key: &str, body: Value| {
        let auth = format!("Authorization: Bearer {key}\r\n");
        served.exchange("/v1/completions", &auth, &body.to_string()).to_lowercase()
    };
    let short = json!({ "prompt": "A" });
    let first = send("sk-one-12345", short.clone());
    assert!(
        first.starts_with("http/1.1 200") && first.contains("x-ratelimit-remaining-requests: 1"),
        "{first}"
    );
    assert!(send("sk-one-12345", short.clone()).contains("x-ratelimit-remaining-requests: 0"));
    let refused = send("sk-one-12345", short.clone());
    assert!(
        refused.starts_with("http/1.1 429") && refused.contains("used its 2 requests per minute"),
        "{refused}"
    );
    assert!(refused.contains("retry-after: 30") || refused.contains("retry-after: 29"), "{refused}");
    // A reply is never cut: its tokens are missed by the next request.
    served.reply(Reply::text(&"word ".repeat(200)));
    let long = send("sk-two-12345", json!({ "prompt": "A", "max_tokens": 200 }));
    assert!(long.contains("\"completion_tokens\":200"), "{long}");
    let refused = send("sk-two-12345", short);
    assert!(
        refused.starts_with("http/1.1 429") && refused.contains("x-ratelimit-remaining-tokens: 0"),
        "{refused}"
    );
    let large = send("sk-two-12345", json!({ "prompt": vec![1; 101] }));
    assert!(large.starts_with("http/1.1 400") && large.contains("101 tokens"), "{large}");
}

#[test]
fn web_pages_of_other_origins_are_served_only_if_they_are_named() {
    let preflight = |served: &Served, origin: &str| {
        let mut stream = served.connect();
        write!(
            stream,
            "OPTIONS /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nOrigin: {origin}\r\n\
             Access-Control-Request-Method: POST\r\nAccess-Control-Request-Headers: authorization,content-type\r\n\r\n"
        )
        .unwrap();
        lines_of(&mut stream).to_lowercase()
    };
    let closed = Served::start(|setup| setup.key = Some("sk-12345678"));
    assert!(!preflight(&closed, "https://a.example").contains("access-control-"));
    let open = Served::start(|setup| {
        setup.key = Some("sk-12345678");
        setup.cors = vec!["https://a.example".into(), "http://localhost:3000".into()];
    });
    let allowed = preflight(&open, "https://a.example");
    assert!(allowed.starts_with("http/1.1 200"), "{allowed}");
    assert!(allowed.contains("access-control-allow-origin: https://a.example"), "{allowed}");
    assert!(allowed.contains("access-control-allow-headers: authorization,content-type"), "{allowed}");
    assert!(!preflight(&open, "https://b.example").contains("access-control-allow-origin"));
    let auth = "Authorization: Bearer sk-12345678\r\nOrigin: https://a.example\r\n";
    let answer = open.exchange("/v1/completions", auth, &json!({ "prompt": "A" }).to_string()).to_lowercase();
    assert!(answer.contains("access-control-allow-origin: https://a.example"), "{answer}");
    assert!(
        answer.contains("access-control-expose-headers:") && answer.starts_with("http/1.1 200"),
        "{answer}"
    );
}

#[test]
fn hostile_requests_are_refused_and_others_are_served() {
    let served = Served::start(|setup| setup.max_body_bytes = 1 << 20);
    let json_type = "Content-Type: application/json\r\n";
    let status = |answer: String| answer.split(' ').nth(1).unwrap_or_default().to_owned();
    // A hundred megabytes are refused by their announcement.
    let mut huge = served.connect();
    write!(
        huge,
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{json_type}Content-Length: 104857600\r\n\r\n"
    )
    .unwrap();
    assert_eq!(status(lines_of(&mut huge)), "413");
    // Or, without one, once they are too many.
    let mut chunked = served.connect();
    write!(
        chunked,
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{json_type}Transfer-Encoding: chunked\r\n\r\n"
    )
    .unwrap();
    let chunk = format!("{:x}\r\n{}\r\n", 64 << 10, "x".repeat(64 << 10));
    for _ in 0..32 {
        if chunked.write_all(chunk.as_bytes()).is_err() {
            break;
        }
    }
    assert_eq!(status(lines_of(&mut chunked)), "413");
    let deep = format!("{{\"prompt\": {}", "[".repeat(100_000));
    let invalid = String::from_utf8_lossy(b"{\"prompt\": \"").into_owned();
    for body in [deep.as_bytes(), b"{\"prompt\": \"\xff\xfe\"}", invalid.as_bytes(), b"", b"null", b"[]"] {
        assert_eq!(status(served.exchange_bytes("/v1/completions", "", body)), "400");
    }
    let text = served.exchange("/v1/completions", "Content-Type: text/plain\r\n", "{\"prompt\": \"A\"}");
    assert!(text.starts_with("HTTP/1.1 415"), "{text}");
    let mut evil = served.connect();
    write!(evil, "GET /v1/models HTTP/1.1\r\nHost: evil.example.com\r\n\r\n").unwrap();
    assert_eq!(status(lines_of(&mut evil)), "403");
    let mut headers = served.connect();
    let _ =
        write!(headers, "GET /health HTTP/1.1\r\nHost: localhost\r\nX: {}\r\n\r\n", "y".repeat(200 << 10));
    assert_eq!(status(lines_of(&mut headers)), "431");
    assert_eq!(served.post("/v1/completions", &json!({ "prompt": "A" })).0, 200);
}

#[test]
fn slow_clients_are_cut_off_and_others_are_served() {
    let served = Served::start(|setup| {
        setup.header_timeout = Duration::from_millis(300);
        setup.body_timeout = Duration::from_millis(300);
    });
    // Hundreds of connections that send a byte now and then.
    let mut slow: Vec<TcpStream> = (0..200).map(|_| served.connect()).collect();
    for stream in &mut slow {
        stream.write_all(b"POST /v1/completions HTTP/1.1\r\nX-A: ").unwrap();
    }
    let mut body = served.connect();
    write!(body, "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 50\r\n\r\n{{").unwrap();
    assert_eq!(served.post("/v1/completions", &json!({ "prompt": "A" })).0, 200);
    assert!(lines_of(&mut body).starts_with("HTTP/1.1 408"));
    let start = Instant::now();
    for stream in &mut slow {
        stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
    }
    assert!(start.elapsed() < Duration::from_secs(5), "the slow ones were not cut off");
}

#[test]
fn a_client_that_reads_nothing_holds_nobody_up() {
    let served = Served::start(|_| {});
    let body = json!({ "prompt": "A", "max_tokens": 200_000, "stream": true }).to_string();
    served.reply(Reply::flood("a longer piece of text than before "));
    let stuck = served.open("/v1/completions", "", &body);
    while served.requests().is_empty() {
        std::thread::sleep(Duration::from_millis(2));
    }
    for _ in 0..3 {
        served.reply(Reply::text("Fine."));
        let (_, reply) = served.post("/v1/completions", &json!({ "prompt": "A" }));
        assert_eq!(reply["choices"][0]["text"], "Fine.");
    }
    drop(stuck);
}

#[test]
fn health_and_readiness_follow_the_workers() {
    let served = Served::start(|_| {});
    assert_eq!((served.get("/health").0, served.get("/ready").0), (200, 200));
    served.set_worker(WorkerState::Starting, None);
    assert_eq!((served.get("/health").0, served.get("/ready").0), (200, 503));
    served.set_worker(WorkerState::BackingOff { n_failures: 3 }, Some("it lost its device"));
    let (status, reply) = served.get("/health");
    assert_eq!((status, served.get("/ready").0), (503, 503));
    assert!(reply["reason"].as_str().unwrap().contains("lost its device"));
    served.set_worker(WorkerState::Ready, None);
    // No progress for too long.
    let served = Served::start(|setup| setup.stall = Duration::from_millis(50));
    served.reply(Reply::silent());
    let open = served.open("/v1/completions", "", &json!({ "prompt": "A", "stream": true }).to_string());
    let start = Instant::now();
    while served.get("/health").0 == 200 {
        assert!(start.elapsed() < Duration::from_secs(10));
    }
    drop(open);
    while served.get("/health").0 == 503 {
        assert!(start.elapsed() < Duration::from_secs(10));
    }
}

#[test]
fn models_and_metrics_describe_what_is_served() {
    let served = Served::start(|_| {});
    let (_, models) = served.get("/v1/models");
    assert_eq!(models["data"][0]["id"], "chat");
    assert_eq!(served.get("/v1/models/chat").1["max_model_len"], 512);
    assert_eq!(served.get("/v1/models/other").0, 404);
    assert_eq!(served.get("/nothing").0, 404);
    assert_eq!(served.get("/v1/completions").0, 405);
    served.post("/v1/completions", &json!({ "prompt": "A" }));
    let text = served.get("/metrics").1;
    let text = text.as_str().unwrap();
    for line in [
        "refrain_responses_total{endpoint=\"/v1/completions\",status=\"200\"} 1",
        "vllm:time_to_first_token_seconds_count",
    ] {
        assert!(text.contains(line), "{line} in {text}");
    }
    let (_, count) = served.post("/v1/messages/count_tokens", &json!({ "messages": hello() }));
    assert!(count["input_tokens"].as_u64() > Some(3), "{count}");
}

#[test]
fn every_field_of_the_description_is_read_and_every_endpoint_exists() {
    let served = Served::start(|_| {});
    let (_, description) = served.get("/openapi.json");
    for (path, methods) in description["paths"].as_object().unwrap() {
        if methods["get"].is_object() {
            assert_eq!(served.get(path).0, 200, "{path}");
            continue;
        }
        let schema = &methods["post"]["requestBody"]["content"]["application/json"]["schema"];
        for (field, kind) in schema["properties"].as_object().unwrap() {
            // A value of the wrong type: the answer names the field, unless any type is possible.
            let is_object = |kind: &Value| kind["type"] == "object" || kind["anyOf"][0]["type"] == "object";
            let wrong = if is_object(kind) { json!(7) } else { json!({ "x": 1 }) };
            let mut body =
                json!({ "messages": hello(), "prompt": "A", "input": "A", "tokens": [1], "max_tokens": 5 });
            let of_endpoint = schema["properties"].as_object().unwrap();
            body.as_object_mut().unwrap().retain(|name, _| of_endpoint.contains_key(name));
            if path == "/tokenize" {
                body.as_object_mut().unwrap().remove("messages");
            }
            body[field] = wrong;
            let (status, reply) = served.post(path, &body);
            assert_eq!(status, 400, "{path} {field}: {reply}");
            let is_unknown =
                reply["error"]["code"] == "unknown_parameter" && reply["error"]["param"] == *field;
            assert!(!is_unknown, "{path} {field}: {reply}");
        }
    }
}

#[test]
fn the_page_is_served_under_a_strict_policy_and_is_cached_by_its_tag() {
    let served = Served::start(|setup| setup.key = Some("sk-12345678"));
    let answer = |path: &str, more: &str| {
        let mut stream = served.connect();
        write!(stream, "GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{more}\r\n").unwrap();
        lines_of(&mut stream)
    };
    let page = answer("/", "");
    assert!(page.contains("content-security-policy: default-src 'none'; script-src 'self'"), "{page}");
    assert!(answer("/page/app.js", "").contains("text/javascript"));
    assert!(answer("/page/../Cargo.toml", "").starts_with("HTTP/1.1 404"));
    let tag = page.lines().find_map(|line| line.strip_prefix("etag: ")).unwrap().to_owned();
    assert!(answer("/", &format!("If-None-Match: {tag}\r\n")).starts_with("HTTP/1.1 304"));
}

#[test]
fn https_is_served_with_a_certificate() {
    use tokio_rustls::rustls::pki_types::{CertificateDer, pem::PemObject};
    use tokio_rustls::rustls::{ClientConfig, RootCertStore, crypto::ring};
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/tls");
    let (cert, key) = (folder.join("cert.pem"), folder.join("key.pem"));
    let served = Served::start(|setup| setup.tls = Some(TlsFiles { cert: cert.clone(), key }));
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(cert).unwrap()).unwrap();
    let config = ClientConfig::builder_with_provider(std::sync::Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let text = runtime.block_on(async {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        let stream = tokio::net::TcpStream::connect(served.addr()).await.unwrap();
        let connector = tokio_rustls::TlsConnector::from(std::sync::Arc::new(config));
        let mut stream = connector.connect("localhost".try_into().unwrap(), stream).await.unwrap();
        stream
            .write_all(b"GET /version HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            .await
            .unwrap();
        let mut text = String::new();
        // The server may end the connection without TLS's farewell.
        let _ = stream.read_to_string(&mut text).await;
        text
    });
    assert!(text.starts_with("HTTP/1.1 200"), "{text}");
}
