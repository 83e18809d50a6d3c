//! A server with OpenAI's completions API as the target of a load.
//!
//! Each open request has a thread, which reads the events of its reply. Prompts are token ids, so that their lengths are
//! exact. The number of tokens comes from the usage at the end: a server may send several tokens in one event.

use crate::fail::Hinted;
use refrain::{LoadRequest, LoadState, LoadTarget, RequestProgress};
use refrain_hub::Token;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader};
use std::sync::Arc;
use std::time::Duration;

/// Time limit for connecting and for the response headers, which may wait until the request is running.
const PATIENCE: Duration = Duration::from_secs(600);
const SHORT_PATIENCE: Duration = Duration::from_secs(10);
/// Stack of a thread that reads a reply.
const STACK_BYTES: usize = 256 << 10;
/// Limit on the length of an event; an event of one token is far shorter.
const MAX_LINE_BYTES: usize = 1 << 20;

pub(super) struct ServerLoad {
    server: Arc<ServerAddress>,
}

struct ServerAddress {
    agent: ureq::Agent,
    /// Address without a trailing slash.
    base: String,
    model: String,
    key: Option<Token>,
}

impl ServerLoad {
    /// Connects to a server and asks for its model.
    pub(super) fn connect(url: &str, key: Option<Token>) -> anyhow::Result<ServerLoad> {
        let base = url.trim_end_matches('/').trim_end_matches("/v1").to_owned();
        let config = ureq::Agent::config_builder()
            .timeout_connect(Some(SHORT_PATIENCE))
            .timeout_recv_response(Some(PATIENCE))
            .http_status_as_error(false)
            .max_idle_connections(1024)
            .max_idle_connections_per_host(1024)
            .build();
        let mut server = ServerAddress { agent: config.into(), base, model: String::new(), key };
        let answer = server.get("/v1/models")?;
        let Some(model) = answer["data"][0]["id"].as_str() else {
            let message = format!("{}/v1/models names no model", server.base);
            return Err(Hinted::new(message, "give the address of a server with OpenAI's API").into());
        };
        server.model = model.to_owned();
        Ok(ServerLoad { server: Arc::new(server) })
    }

    pub(super) fn model(&self) -> &str {
        &self.server.model
    }
}

impl ServerAddress {
    fn get(&self, path: &str) -> anyhow::Result<Value> {
        let url = format!("{}{path}", self.base);
        let mut request = self.agent.get(&url).config().timeout_global(Some(SHORT_PATIENCE)).build();
        if let Some(key) = &self.key {
            request = request.header("authorization", key.bearer());
        }
        let answer = request
            .call()
            .and_then(|mut response| Ok((response.status(), response.body_mut().read_json::<Value>()?)));
        match answer {
            Ok((status, value)) if status.is_success() => Ok(value),
            Ok((status, value)) => {
                let hint = "set REFRAIN_API_KEY if the server asks for a key";
                Err(Hinted::new(format!("{url} answered {status}: {}", message_of(&value)), hint).into())
            }
            Err(error) => {
                let hint = "is a server running there? `refrain serve MODEL` starts one";
                Err(Hinted::new(format!("cannot read {url}: {error}"), hint).into())
            }
        }
    }

    /// Sends a request and reads its reply.
    fn complete(&self, request: &LoadRequest, progress: &RequestProgress) -> Result<(), String> {
        let body = json!({
            "model": self.model,
            "prompt": request.prompt,
            "max_tokens": request.n_reply,
            "min_tokens": request.n_reply,
            "ignore_eos": true,
            "temperature": 0,
            "stream": true,
            "stream_options": { "include_usage": true },
        });
        let mut post = self.agent.post(format!("{}/v1/completions", self.base));
        if let Some(key) = &self.key {
            post = post.header("authorization", key.bearer());
        }
        let mut response = post.send_json(&body).map_err(|error| error.to_string())?;
        if !response.status().is_success() {
            let value = response.body_mut().read_json::<Value>().unwrap_or_default();
            return Err(format!("{}: {}", response.status(), message_of(&value)));
        }
        let mut lines = BufReader::new(response.into_body().into_reader());
        let (mut line, mut n_seen) = (Vec::new(), 0);
        loop {
            line.clear();
            let mut limited = std::io::Read::take(&mut lines, MAX_LINE_BYTES as u64);
            if limited.read_until(b'\n', &mut line).map_err(|error| error.to_string())? == 0 {
                return Err("the reply ended without [DONE]".into());
            }
            let Some(data) = line.strip_prefix(b"data: ").map(<[u8]>::trim_ascii) else { continue };
            if data == b"[DONE]" {
                return Ok(());
            }
            let event: Value = serde_json::from_slice(data).map_err(|error| error.to_string())?;
            if !event["error"].is_null() {
                return Err(message_of(&event));
            }
            if event["choices"][0]["text"].as_str().is_some_and(|text| !text.is_empty()) {
                n_seen += 1;
                if n_seen <= request.n_reply {
                    progress.tokens(1);
                }
            }
            // Tokens without text, and several tokens in one event, are added at the end.
            if let Some(n_tokens) = event["usage"]["completion_tokens"].as_u64() {
                progress.tokens((n_tokens as usize).saturating_sub(n_seen));
            }
        }
    }
}

fn message_of(value: &Value) -> String {
    let message = value["error"]["message"].as_str().or(value["error"].as_str());
    message.map_or_else(|| "no message".into(), crate::out::printable)
}

impl LoadTarget for ServerLoad {
    fn send(&self, request: LoadRequest, progress: RequestProgress) {
        let server = self.server.clone();
        let builder = std::thread::Builder::new().name("refrain-client".into()).stack_size(STACK_BYTES);
        let (sender, receiver) = std::sync::mpsc::sync_channel(1);
        let started = builder.spawn(move || {
            let Ok((request, progress)): Result<(LoadRequest, RequestProgress), _> = receiver.recv() else {
                return;
            };
            match server.complete(&request, &progress) {
                Ok(()) => progress.end(),
                Err(why) => progress.fail(why),
            }
        });
        match started {
            // The thread waits for exactly this message.
            Ok(_) => drop(sender.send((request, progress))),
            Err(error) => progress.fail(format!("no thread could be started: {error}")),
        }
    }

    fn state(&self) -> Option<LoadState> {
        let status = self.server.get("/status").ok()?;
        let mut state = LoadState::default();
        let (mut n_used, mut n_blocks) = (0, 0);
        for worker in status["backend"]["workers"].as_array()? {
            for load in worker["models"].as_array()? {
                let field = |name: &str| load[name].as_u64().unwrap_or_default() as usize;
                state.n_running += field("n_running");
                state.n_waiting += field("n_waiting");
                n_used += field("kv_blocks_used");
                n_blocks += field("kv_blocks");
            }
        }
        state.kv_used = n_used as f64 / n_blocks.max(1) as f64;
        Some(state)
    }
}
