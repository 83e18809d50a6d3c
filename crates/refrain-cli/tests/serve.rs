//! `refrain serve` as clients see it: the real server, with the built-in model on the CPU in a real worker process.

mod common;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use common::{Cli, encoder};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(120);
/// Long enough that a story does not end before its worker is disturbed.
const STORY_TOKENS: u64 = 240;

struct Served {
    _cli: Cli,
    process: Child,
    url: String,
    /// Lines of standard error.
    log: Mutex<Receiver<String>>,
}

impl Served {
    fn start(flags: &[&str]) -> Served {
        Served::start_in(Cli::new(), flags)
    }

    fn start_in(cli: Cli, flags: &[&str]) -> Served {
        let args = [&["serve", "--port", "0", "--threads", "1"], flags].concat();
        let mut process = cli.command(&args).stderr(Stdio::piped()).spawn().expect("the server starts");
        let stderr = BufReader::new(process.stderr.take().expect("a pipe"));
        let (sender, log) = channel();
        thread::spawn(move || stderr.lines().map_while(Result::ok).try_for_each(|line| sender.send(line)));
        let mut served = Served { _cli: cli, process, url: String::new(), log: Mutex::new(log) };
        let line = served.line("http://");
        let url = &line[line.find("http://").expect("an address")..];
        served.url = url.split('"').next().unwrap_or(url).to_owned();
        served
    }

    fn ready(flags: &[&str]) -> Served {
        let served = Served::start(flags);
        served.line("ready on");
        served
    }

    /// The next line of the log that contains a text.
    fn line(&self, text: &str) -> String {
        let (log, mut seen) = (self.log.lock().expect("no thread panicked"), Vec::new());
        loop {
            match log.recv_timeout(PATIENCE) {
                Ok(line) if line.contains(text) => return line,
                Ok(line) => seen.push(line),
                Err(error) => panic!("no {text:?} in the log ({error}): {seen:#?}"),
            }
        }
    }

    fn get(&self, path: &str) -> (u16, Value) {
        let mut response = agent().get(format!("{}{path}", self.url)).call().expect("an answer");
        let body = response.body_mut().read_to_string().expect("a body");
        (response.status().as_u16(), serde_json::from_str(&body).unwrap_or(Value::String(body)))
    }

    fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        let mut response = agent().post(format!("{}{path}", self.url)).send_json(body).expect("an answer");
        let status = response.status().as_u16();
        (status, response.body_mut().read_json().expect("JSON"))
    }

    /// Streams a completion; `arrived` is called with the number of events so far.
    fn stream(&self, body: &Value, mut arrived: impl FnMut(usize)) -> Streamed {
        let mut body = body.clone();
        body["stream"] = json!(true);
        body["stream_options"] = json!({ "include_usage": true });
        let response =
            agent().post(format!("{}/v1/completions", self.url)).send_json(&body).expect("an answer");
        let mut streamed = Streamed::default();
        let mut n_events = 0;
        for line in BufReader::new(response.into_body().into_reader()).lines() {
            let line = line.expect("the stream is whole");
            let Some(data) = line.strip_prefix("data: ") else { continue };
            if data == "[DONE]" {
                streamed.is_done = true;
                break;
            }
            let event: Value = serde_json::from_str(data).expect("JSON");
            assert!(event["error"].is_null(), "{event}");
            if let Some(choice) = event["choices"].get(0) {
                streamed.text += choice["text"].as_str().expect("text");
                if let Some(reason) = choice["finish_reason"].as_str() {
                    streamed.finish = reason.to_owned();
                }
            }
            if let Some(n) = event["usage"]["completion_tokens"].as_u64() {
                streamed.n_tokens = n;
            }
            n_events += 1;
            arrived(n_events);
        }
        streamed
    }

    fn worker_pid(&self) -> Option<u64> {
        self.get("/status").1["backend"]["workers"][0]["pid"].as_u64()
    }

    fn signal(pid: u64, signal: &str) {
        let sent = Command::new("kill").args([signal, &pid.to_string()]).status().expect("kill runs");
        assert!(sent.success(), "kill {signal} {pid}");
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[derive(Debug, Default, PartialEq)]
struct Streamed {
    text: String,
    finish: String,
    n_tokens: u64,
    is_done: bool,
}

fn agent() -> ureq::Agent {
    ureq::Agent::config_builder().http_status_as_error(false).timeout_global(Some(PATIENCE)).build().into()
}

fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < PATIENCE, "{what} did not happen");
        thread::sleep(Duration::from_millis(20));
    }
}

fn is_alive(pid: u64) -> bool {
    // A process that nobody has waited for yet has ended as well.
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(')').next().is_some_and(|rest| !rest.trim().is_empty() && !rest.trim().starts_with('Z'))
}

fn story(seed: usize) -> Value {
    let penalties = json!({ "frequency_penalty": 0.2, "presence_penalty": 0.1 });
    let mut body = json!({
        "prompt": "Once upon a time", "max_tokens": STORY_TOKENS, "ignore_eos": true, "temperature": 0.9, "seed": seed,
    });
    if seed % 2 == 1 {
        body.as_object_mut().expect("an object").extend(penalties.as_object().expect("an object").clone());
    }
    body
}

/// Streams several stories at once, disturbs the worker in the middle, and compares with the undisturbed stories.
fn survives(served: &Served, disturb: impl FnOnce(u64) + Send) {
    const N: usize = 6;
    let undisturbed: Vec<Streamed> = (0..N).map(|seed| served.stream(&story(seed), |_| {})).collect();
    assert!(
        undisturbed.iter().all(|s| s.is_done && s.n_tokens == STORY_TOKENS && s.finish == "length"),
        "{undisturbed:?}"
    );
    let pid = served.worker_pid().expect("a worker");
    let (sender, under_way) = channel();
    let streamed: Vec<Streamed> = thread::scope(|scope| {
        let clients: Vec<_> = (0..N)
            .map(|seed| {
                let sender = sender.clone();
                scope.spawn(move || {
                    served.stream(&story(seed), |n| {
                        if n == 2 {
                            sender.send(()).expect("a test")
                        }
                    })
                })
            })
            .collect();
        for _ in 0..N {
            under_way.recv_timeout(PATIENCE).expect("all stories begin");
        }
        disturb(pid);
        clients.into_iter().map(|client| client.join().expect("a story")).collect()
    });
    assert_eq!(streamed, undisturbed);
    let worker = &served.get("/status").1["backend"]["workers"][0];
    assert_eq!(worker["n_restarts"], 1, "{worker}");
    assert_ne!(worker["pid"].as_u64(), Some(pid));
}

#[test]
fn a_killed_worker_is_replaced_and_every_reply_is_the_undisturbed_one() {
    let served = Served::ready(&["stories"]);
    survives(&served, |pid| Served::signal(pid, "-KILL"));
    served.line("killed by signal 9");
    let (status, text) = served.get("/metrics");
    assert_eq!(status, 200);
    assert!(text.as_str().is_some_and(|text| text.contains("refrain_worker_restarts_total{worker=\"0\"} 1")));
}

#[test]
fn a_worker_that_hangs_is_replaced_and_every_reply_is_the_undisturbed_one() {
    let served = Served::ready(&["stories", "--stall", "2"]);
    survives(&served, |pid| Served::signal(pid, "-STOP"));
    served.line("it sent nothing for 2s");
}

#[test]
fn a_worker_dies_with_its_server() {
    let mut served = Served::ready(&["stories"]);
    let pid = served.worker_pid().expect("a worker");
    assert!(is_alive(pid));
    served.process.kill().expect("the server is killed");
    wait_until("the end of the worker", || !is_alive(pid));
}

#[test]
fn a_client_that_goes_away_frees_its_place() {
    // Made-up tokens, so that the request does not end by itself.
    let served = Served::ready(&["stories", "--fake-engine", "2000"]);
    for stream in [true, false] {
        let body =
            json!({ "prompt": "A cat", "max_tokens": 1_000_000, "ignore_eos": true, "stream": stream })
                .to_string();
        let host = served.url.trim_start_matches("http://");
        let mut client = TcpStream::connect(host).expect("a connection");
        let head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n";
        write!(client, "{head}Content-Length: {}\r\n\r\n{body}", body.len()).expect("sent");
        let load = || served.get("/status").1["backend"]["workers"][0]["models"][0].clone();
        wait_until("the start of the request", || load()["n_running"] == 1);
        if stream {
            client.read_exact(&mut [0; 100]).expect("some of the reply");
        }
        drop(client);
        wait_until("the end of the request", || load()["n_running"] == 0);
        wait_until("the end of its bookkeeping", || served.get("/status").1["n_open"] == 0);
    }
}

#[test]
fn sigterm_lets_open_replies_end() {
    let mut served = Served::ready(&["stories"]);
    let pid = u64::from(served.process.id());
    let worker = served.worker_pid().expect("a worker");
    let streamed = served.stream(&story(1), |n| {
        if n == 3 {
            Served::signal(pid, "-TERM");
        }
    });
    assert!(streamed.is_done && streamed.n_tokens == STORY_TOKENS, "{streamed:?}");
    let status = served.process.wait().expect("the server ends");
    assert_eq!(status.code(), Some(0));
    assert!(!is_alive(worker));
}

#[test]
fn workers_that_cannot_load_their_model_end_the_server_with_the_reason() {
    let mut served = Served::start(&["stories", "-c", "100000000", "--kv-tokens", "16"]);
    let status = served.process.wait().expect("the server ends");
    assert_ne!(status.code(), Some(0));
    served.line("failed before it was ready");
}

#[test]
fn a_server_without_a_key_serves_this_machine_only() {
    let cli = Cli::new();
    let ended = cli.run(&["serve", "--host", "0.0.0.0", "--port", "0"]);
    assert_ne!(ended.code, Some(0));
    assert!(ended.stderr.contains("no API key is set") && ended.stderr.contains("hint:"), "{}", ended.stderr);
    let served = Served::start(&["stories", "--api-key", "sk-test-1234"]);
    assert_eq!(served.get("/v1/models").0, 401);
    assert_eq!(served.get("/version").0, 200);
    let (status, _) = served.post("/v1/completions", &json!({ "prompt": "A" }));
    assert_eq!(status, 401);
}

#[test]
fn a_chat_is_answered_by_the_built_in_model() {
    let served = Served::ready(&[]);
    assert_eq!(served.get("/ready").0, 200);
    let messages = json!([{ "role": "user", "content": "Hello" }]);
    let body = json!({ "messages": messages, "temperature": 0, "max_tokens": 20, "logprobs": true, "top_logprobs": 2 });
    let (status, reply) = served.post("/v1/chat/completions", &body);
    assert_eq!(status, 200, "{reply}");
    let choice = &reply["choices"][0];
    let text = choice["message"]["content"].as_str().expect("a text");
    let logprobs = choice["logprobs"]["content"].as_array().expect("log-probabilities");
    let joined: String = logprobs.iter().filter_map(|t| t["token"].as_str()).collect();
    assert!(!text.is_empty() && joined.contains(text.trim()), "{text:?} in {joined:?}");
    assert!(
        logprobs.iter().all(|t| t["top_logprobs"][0]["logprob"] == t["logprob"]),
        "greedy takes the best"
    );
    assert_eq!(reply["usage"]["completion_tokens"], logprobs.len());
}

/// The built-in model with a small encoder beside it, and the encoder's folder.
fn with_encoder(flags: &[&str]) -> (Served, PathBuf) {
    let cli = Cli::new();
    let folder = encoder(&cli);
    let model = format!("embed={}", folder.display());
    let served = Served::start_in(cli, &[&["stories", &model], flags].concat());
    served.line("ready on");
    (served, folder)
}

fn floats(value: &Value) -> Vec<f32> {
    serde_json::from_value(value.clone()).expect("a vector")
}

#[test]
fn an_encoder_beside_a_generating_model_embeds_texts_and_tokens() {
    let (served, folder) = with_encoder(&[]);
    let path = "/v1/embeddings";
    let texts = ["A cat sleeps.", "a kitten naps.", "", "a cat"];
    let (status, reply) = served.post(path, &json!({ "model": "embed", "input": texts }));
    assert_eq!(status, 200, "{reply}");
    let data = reply["data"].as_array().expect("a list");
    assert_eq!(
        (data.len(), &reply["model"], &reply["usage"]["prompt_tokens"]),
        (4, &json!("embed"), &json!(18))
    );
    let ran = Command::new(env!("CARGO_BIN_EXE_refrain"))
        .args(["embed", folder.to_str().expect("UTF-8"), "--threads", "1", "--quiet"])
        .args(texts)
        .output()
        .expect("the binary runs");
    let lines = String::from_utf8(ran.stdout).expect("UTF-8");
    for (idx, (item, line)) in data.iter().zip(lines.lines()).enumerate() {
        let (got, want) = (floats(&item["embedding"]), serde_json::from_str::<Vec<f32>>(line).expect("JSON"));
        assert_eq!((&item["index"], got.len()), (&json!(idx), 48));
        assert!(got.iter().zip(&want).all(|(a, b)| (a - b).abs() < 1e-6), "{idx}: {got:?} {want:?}");
    }
    // The same in base64, from tokens, by the only model that can.
    let (_, packed) = served.post(path, &json!({ "input": [[2, 4, 5, 3]], "encoding_format": "base64" }));
    let bytes = BASE64.decode(packed["data"][0]["embedding"].as_str().expect("base64")).expect("base64");
    let unpacked: Vec<f32> =
        bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().expect("4"))).collect();
    assert_eq!(unpacked, floats(&data[3]["embedding"]));
    let (_, one) = served.post(path, &json!({ "input": "a cat", "dimensions": 48 }));
    assert_eq!(one["data"][0]["embedding"], data[3]["embedding"]);
    let (_, cut) = served.post(path, &json!({ "input": ["cat ".repeat(40)], "truncate_prompt_tokens": -1 }));
    assert_eq!(cut["usage"]["total_tokens"], 16);
    let (_, models) = served.get("/v1/models");
    let told = |idx: usize| {
        (models["data"][idx]["embeddings"].clone(), models["data"][idx]["max_model_len"].clone())
    };
    assert_eq!((told(0).0, told(1)), (json!(false), (json!(true), json!(16))));
    // Both models serve from then on.
    assert_eq!(served.post("/v1/completions", &json!({ "prompt": "A cat", "max_tokens": 3 })).0, 200);
    let counted = "refrain_worker_prompt_tokens_total{worker=\"0\",model=\"embed\"} ";
    wait_until("the count of its tokens", || {
        served.get("/metrics").1.as_str().is_some_and(|text| text.contains(counted))
    });
}

#[test]
fn embeddings_are_refused_by_name_and_with_a_hint() {
    let (served, _) = with_encoder(&[]);
    let cases = [
        (json!({ "input": "a", "dimensions": 12 }), "dimensions", "have 48 elements"),
        (json!({ "input": "a", "encoding_format": "int8" }), "encoding_format", "must be"),
        (json!({ "input": "cat ".repeat(40) }), "input", "42 tokens, embed takes at most 16"),
        (json!({ "input": ["a", "cat ".repeat(15)] }), "input", "input[1] has 17 tokens"),
        (json!({ "input": [] }), "input", "0 texts, must have 1 to 2048"),
        (json!({ "input": vec!["a"; 2049] }), "input", "2049 texts"),
        (json!({ "input": [[]] }), "input", "input[0] has no tokens"),
        (json!({ "input": [1, 100_000] }), "input", "token ids are from 0 to 127"),
        (json!({ "input": [1, "a"] }), "input", "a string in it"),
        (json!({ "input": ["a", 1] }), "input", "input[1] is a number"),
        (json!({ "input": { "text": "a" } }), "input", "must be a text"),
        (json!({ "model": "embed" }), "input", "missing"),
        (json!({ "input": "a", "truncate_prompt_tokens": 0 }), "truncate_prompt_tokens", "is 0"),
        (json!({ "input": "a", "imput": "b" }), "imput", "did you mean input?"),
        (json!({ "input": "a", "model": "stories" }), "model", "hint: use the model embed"),
    ];
    for (body, field, want) in cases {
        let (status, reply) = served.post("/v1/embeddings", &body);
        let message = reply["error"]["message"].as_str().unwrap_or_default();
        assert_eq!((status, &reply["error"]["param"]), (400, &json!(field)), "{reply}");
        assert!(message.contains(want), "{message}, expected {want}");
    }
    for (path, body) in [
        ("/v1/completions", json!({ "prompt": "a", "model": "embed" })),
        (
            "/v1/chat/completions",
            json!({ "messages": [{ "role": "user", "content": "a" }], "model": "embed" }),
        ),
    ] {
        let (status, reply) = served.post(path, &body);
        let message = reply["error"]["message"].as_str().unwrap_or_default();
        assert!(status == 400 && message.contains("hint: use /v1/embeddings"), "{path}: {reply}");
    }
}

#[test]
fn embeddings_survive_a_killed_worker_and_fit_the_memory_budget() {
    // The encoder has 0.4 MB of weights: the budget has room for one of both models at a time.
    let (served, _) = with_encoder(&["--memory", "20", "--kv-tokens", "512", "-c", "512"]);
    let texts: Vec<String> = (0..2000).map(|n| "cat ".repeat(n % 12 + 1)).collect();
    let body = json!({ "input": texts });
    let (status, undisturbed) = served.post("/v1/embeddings", &body);
    assert_eq!(status, 200);
    let pid = served.worker_pid().expect("a worker");
    let replies: Vec<_> = thread::scope(|scope| {
        let clients: Vec<_> = (0..4).map(|_| scope.spawn(|| served.post("/v1/embeddings", &body))).collect();
        wait_until("the start of the requests", || served.get("/status").1["n_open"] == 4);
        Served::signal(pid, "-KILL");
        clients.into_iter().map(|client| client.join().expect("a reply")).collect()
    });
    let all = |reply: &Value| -> Vec<Vec<f32>> {
        reply["data"].as_array().expect("a list").iter().map(|item| floats(&item["embedding"])).collect()
    };
    let want = all(&undisturbed);
    for (status, reply) in replies {
        assert_eq!(status, 200);
        let got = all(&reply);
        // The place of a text in its step shows in the last bits.
        let is_near =
            |(got, want): (&Vec<f32>, &Vec<f32>)| got.iter().zip(want).all(|(a, b)| (a - b).abs() < 1e-5);
        assert!(got.len() == want.len() && got.iter().zip(&want).all(is_near), "other vectors");
    }
    assert_eq!(served.get("/status").1["backend"]["workers"][0]["n_restarts"], 1);
}

#[test]
fn the_log_in_json_has_a_line_for_each_request_and_no_prompt() {
    let served = Served::start(&["stories", "--log", "json"]);
    let (status, _) = served.post("/v1/completions", &json!({ "prompt": "secret words", "max_tokens": 3 }));
    assert_eq!(status, 200);
    let (log, mut fields) = (served.log.lock().expect("no thread panicked"), Vec::new());
    while fields.len() < 2 {
        let line = log.recv_timeout(PATIENCE).expect("a line");
        assert!(!line.contains("secret"), "{line}");
        let line: Value = serde_json::from_str(&line).unwrap_or_else(|_| panic!("{line} is not JSON"));
        if line["target"] == "refrain_server::requests" {
            fields.push(line);
        }
    }
    let ended = fields.iter().find(|line| line["message"] == "ended").expect("the end of the reply");
    assert_eq!((&ended["reply_tokens"], &ended["model"]), (&json!(3), &json!("stories")));
    let answered = fields.iter().find(|line| line["message"] == "answered").expect("the answer");
    assert_eq!((&answered["endpoint"], &answered["status"]), (&json!("/v1/completions"), &json!(200)));
}

/// Flags of `refrain serve` in a text.
fn flags_in(text: &str) -> Vec<String> {
    let words = text.split(|c: char| c.is_whitespace() || matches!(c, '"' | ',' | '[' | ']' | '='));
    words.filter(|word| word.starts_with("--") && word.len() > 2).map(str::to_owned).collect()
}

#[test]
fn the_unit_and_the_container_use_flags_that_exist() {
    let cli = Cli::new();
    let help = cli.run(&["serve", "--help"]).ok();
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy");
    let mut n_flags = 0;
    for (name, starts) in
        [("refrain.service", &["ExecStart="][..]), ("Containerfile", &["ENTRYPOINT", "CMD"])]
    {
        let text = std::fs::read_to_string(folder.join(name)).expect(name);
        let line = |start: &&str| text.lines().find_map(|line| line.strip_prefix(*start)).expect("a command");
        let command: String = starts.iter().map(line).collect();
        assert!(command.contains("/usr/local/bin/refrain") && command.contains("serve"), "{name}: {command}");
        for flag in flags_in(&command) {
            n_flags += 1;
            assert!(help.contains(&format!("{flag} ")), "{name} has {flag}, which is not in the help");
        }
    }
    assert!(n_flags >= 3, "{n_flags} flags");
}

#[test]
fn replies_have_the_format_that_was_asked_for() {
    let served = Served::ready(&[]);
    let schema = json!({
        "type": "object",
        "properties": { "name": { "type": "string", "maxLength": 12 }, "age": { "type": "integer", "maximum": 120, "minimum": 0 } },
        "required": ["name", "age"],
        "additionalProperties": false,
    });
    let messages = json!([{ "role": "user", "content": "Who is Tom?" }]);
    let format = json!({ "type": "json_schema", "json_schema": { "name": "person", "strict": true, "schema": schema } });
    let body = json!({ "messages": messages, "temperature": 2, "n": 4, "seed": 7, "max_tokens": 150, "response_format": format });
    let (status, reply) = served.post("/v1/chat/completions", &body);
    assert_eq!(status, 200, "{reply}");
    for choice in reply["choices"].as_array().expect("choices") {
        assert_eq!(choice["finish_reason"], "stop", "{choice}");
        let text = choice["message"]["content"].as_str().expect("a text");
        let value: Value = serde_json::from_str(text).expect("JSON");
        assert!(value["name"].is_string() && value["age"].as_u64().is_some_and(|age| age <= 120), "{text}");
    }
    let mut cut = body.clone();
    cut["max_tokens"] = json!(3);
    let (_, reply) = served.post("/v1/chat/completions", &cut);
    assert_eq!(reply["choices"][0]["finish_reason"], "length", "{reply}");
    // What cannot be used is refused with its place, also in a stream.
    let wrong = json!({ "type": "json_schema", "json_schema": { "name": "x", "schema": { "properties": { "a": { "not": {} } }, "required": ["a"] } } });
    for stream in [false, true] {
        let body = json!({ "messages": messages, "response_format": wrong, "stream": stream });
        let (status, reply) = served.post("/v1/chat/completions", &body);
        let message = reply["error"]["message"].as_str().unwrap_or_default();
        assert!(status == 400 && message.contains("#/properties/a"), "{status} {reply}");
    }
    let (status, reply) =
        served.post("/v1/completions", &json!({ "prompt": "Yes or no?", "guided_choice": ["yes", "no"] }));
    let text = reply["choices"][0]["text"].as_str().unwrap_or_default();
    assert!(status == 200 && ["yes", "no"].contains(&text), "{reply}");
}

#[test]
fn a_constrained_reply_survives_the_death_of_its_worker() {
    let served = Served::ready(&[]);
    let body = json!({
        "prompt": "Once upon a time", "temperature": 3, "seed": 5, "max_tokens": 200,
        "structured_outputs": { "regex": "([a-z]{2,8} ){60,80}" },
    });
    let (_, undisturbed) = served.post("/v1/completions", &body);
    let pid = served.worker_pid().expect("a worker");
    let (status, reply) = thread::scope(|scope| {
        let reply = scope.spawn(|| served.post("/v1/completions", &body));
        thread::sleep(Duration::from_millis(150));
        Served::signal(pid, "-KILL");
        reply.join().expect("no panic")
    });
    assert_eq!(status, 200, "{reply}");
    assert_eq!(reply["choices"][0]["text"], undisturbed["choices"][0]["text"]);
}

#[test]
fn adapters_share_one_loaded_model_and_each_request_gets_its_own() {
    let cli = Cli::new();
    for (name, text, rank) in [
        ("clock", "The clock said five, and the five small mice said nothing at all. ", "4"),
        ("sea", "The sea was green, the ship was blue, and nobody knew the way. ", "2"),
    ] {
        cli.file("text.txt", text.repeat(8));
        let train = ["finetune", "stories", "text.txt", "--out", name, "--rank", rank, "--alpha", "16"];
        let run =
            ["--context", "16", "--batch", "2", "--lr", "2e-2", "--steps", "6", "--schedule", "constant"];
        cli.run(&[&train[..], &run, &["--device", "cpu", "--threads", "1"]].concat()).ok();
    }
    // What each gives alone, by the same flags in a batch, and applied to the whole model.
    let names = ["stories", "clock", "sea"];
    let greedy = ["--temp", "0", "-n", "12", "--device", "cpu", "--threads", "1"];
    let lora = ["--lora", "clock=clock/adapter", "--lora", "sea=sea/adapter"];
    let asked = r#"{"prompt": "The", "id": "stories"}
{"prompt": "The", "adapter": "clock", "id": "clock"}
{"prompt": "The", "adapter": "sea", "id": "sea"}
{"prompt": "The", "adapter": "poems", "id": "poems"}
{"prompt": "The", "model": "sea", "id": "a line for a server"}
{"prompt": "The", "model": "another", "id": "a line for another server"}
"#;
    cli.file("in.jsonl", asked);
    cli.run(&[&["batch", "--raw", "stories", "in.jsonl", "-o", "out.jsonl"], &lora[..], &greedy].concat());
    let answers = std::fs::read_to_string(cli.home.path().join("out.jsonl")).expect("answers");
    let answers: Vec<Value> = answers.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let error = answers[3]["error"].as_str().expect("an error");
    assert!(error.contains("no adapter \"poems\"") && error.contains("clock, sea"), "{error}");
    assert_eq!(answers[4]["text"], answers[2]["text"], "a model that is the name of an adapter");
    assert_eq!(answers[5]["text"], answers[0]["text"]);
    let want: Vec<&str> = answers[..3].iter().map(|answer| answer["text"].as_str().expect("text")).collect();
    assert!(want[0] != want[1] && want[1] != want[2], "the adapters were not trained enough: {want:?}");
    for (name, want) in names.iter().zip(&want).skip(1) {
        let folder = format!("{name}/adapter");
        let run = ["run", "--raw", "stories", "The", "--lora", &folder];
        assert_eq!(cli.run(&[&run[..], &greedy].concat()).ok().trim_end_matches('\n'), *want);
    }
    let two = ["batch", "stories", "in.jsonl", "-o", "x.jsonl", "--lora", "clock/adapter", "--lora", "a=b"];
    assert!(cli.run(&two).refused().contains("--lora NAME=DIR"));

    let served = Served::start_in(cli, &[&["stories"], &lora[..]].concat());
    served.line("ready on");
    let (_, models) = served.get("/v1/models");
    let ids: Vec<&str> =
        models["data"].as_array().expect("models").iter().filter_map(|m| m["id"].as_str()).collect();
    assert_eq!(ids, names);
    thread::scope(|scope| {
        for (name, want) in (0..3).flat_map(|_| names.iter().zip(&want)) {
            let served = &served;
            scope.spawn(move || {
                let body = json!({ "model": name, "prompt": "The", "max_tokens": 12, "temperature": 0 });
                let (status, answer) = served.post("/v1/completions", &body);
                assert_eq!((status, answer["choices"][0]["text"].as_str()), (200, Some(*want)), "{name}");
                assert_eq!(answer["model"], *name);
            });
        }
    });
    // One model in the worker, whatever it is called.
    let loaded = || served.get("/status").1["backend"]["workers"][0]["models"].clone();
    let began = Instant::now();
    while loaded().as_array().is_none_or(Vec::is_empty) && began.elapsed() < PATIENCE {
        thread::sleep(Duration::from_millis(50));
    }
    let names: Vec<Value> =
        loaded().as_array().into_iter().flatten().map(|load| load["model"].clone()).collect();
    assert_eq!(names, ["stories"]);
    let (status, error) = served.post("/v1/completions", &json!({ "model": "poems", "prompt": "The" }));
    assert_eq!(status, 404);
    assert!(error.to_string().contains("stories, clock, sea"), "{error}");
}
