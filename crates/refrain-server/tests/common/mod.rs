//! A server whose backend replies what the test says, and a plain HTTP client.
#![allow(dead_code)] // Each test file uses its part.

use refrain::{Builtin, ChatTemplate, Model};
use refrain_server::{ApiKeys, ServedModel, Server, ServerOptions, TlsFiles};
use refrain_worker::{
    BackendStatus, EmbedRequest, FinishedBy, LoadStatus, Refusal, ReplySender, TokenBackend, TokenReply,
    TokenRequest, TokenUpdate, VectorReply, WorkerState, WorkerStatus, token_reply,
};
use serde_json::Value;
use std::collections::VecDeque;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

/// What the backend does with a request.
pub(crate) struct Reply {
    text: String,
    end: Option<Result<FinishedBy, Refusal>>,
    repeats: bool,
    pause: Duration,
}

impl Reply {
    pub(crate) fn text(text: &str) -> Reply {
        Reply::text_then(text, Ok(FinishedBy::EndToken))
    }

    pub(crate) fn text_then(text: &str, end: Result<FinishedBy, Refusal>) -> Reply {
        Reply { text: text.into(), end: Some(end), repeats: false, pause: Duration::ZERO }
    }

    /// One token at a time.
    pub(crate) fn slow(text: &str) -> Reply {
        Reply { pause: Duration::from_millis(3), ..Reply::text(text) }
    }

    pub(crate) fn refused(refusal: Refusal) -> Reply {
        Reply::text_then("", Err(refusal))
    }

    /// Repeats a text as fast as possible.
    pub(crate) fn flood(text: &str) -> Reply {
        Reply { pause: Duration::ZERO, ..Reply::endless(text) }
    }

    /// Repeats a text until it is cancelled.
    pub(crate) fn endless(text: &str) -> Reply {
        Reply { text: text.into(), end: None, repeats: true, pause: Duration::from_millis(1) }
    }

    pub(crate) fn silent() -> Reply {
        Reply { text: String::new(), end: None, repeats: false, pause: Duration::ZERO }
    }
}

struct Backend {
    model: Model,
    requests: Mutex<Vec<TokenRequest>>,
    replies: Mutex<VecDeque<Reply>>,
    status: Mutex<Arc<BackendStatus>>,
    n_cancelled: Arc<AtomicUsize>,
}

impl TokenBackend for Backend {
    fn submit(&self, request: TokenRequest) -> Result<TokenReply, Refusal> {
        let reply = self.replies.lock().unwrap().pop_front().unwrap_or_else(|| Reply::text("ok"));
        let max = request.max_tokens.unwrap_or(400);
        self.requests.lock().unwrap().push(request);
        let tokens = self.model.tokenizer().encode(&reply.text, false, true).unwrap();
        let (is_cancelled, n_cancelled) = (Arc::new(AtomicBool::new(false)), self.n_cancelled.clone());
        let cancelled = is_cancelled.clone();
        let (sender, out) = token_reply(move || {
            cancelled.store(true, Ordering::SeqCst);
            n_cancelled.fetch_add(1, Ordering::SeqCst);
        });
        std::thread::spawn(move || play(&reply, &tokens, max, &sender, &is_cancelled));
        Ok(out)
    }

    fn embed(&self, _request: EmbedRequest) -> Result<VectorReply, Refusal> {
        unreachable!("no embedding model is served: the tests of `refrain serve` have one")
    }

    fn status(&self) -> Arc<BackendStatus> {
        self.status.lock().unwrap().clone()
    }
}

fn play(reply: &Reply, tokens: &[u32], max: usize, sender: &ReplySender, is_cancelled: &AtomicBool) {
    let update = |token: u32| Ok(TokenUpdate::Token { token, logprob: -0.25, top: Vec::new() });
    let mut n = 0;
    while !tokens.is_empty() && !is_cancelled.load(Ordering::SeqCst) {
        for token in tokens {
            sender.send([update(*token)]);
            std::thread::sleep(reply.pause);
            n += 1;
            if n == max {
                return sender.send([Ok(TokenUpdate::End(FinishedBy::MaxTokens))]);
            }
        }
        if !reply.repeats {
            break;
        }
    }
    match &reply.end {
        Some(Ok(by)) => sender.send([Ok(TokenUpdate::End(*by))]),
        Some(Err(refusal)) => sender.send([Err(refusal.clone())]),
        None => {}
    }
}

/// What a test may change about the server.
pub(crate) struct Setup {
    pub(crate) template: Option<String>,
    pub(crate) key: Option<&'static str>,
    pub(crate) key_file: Option<PathBuf>,
    pub(crate) max_body_bytes: usize,
    pub(crate) header_timeout: Duration,
    pub(crate) body_timeout: Duration,
    pub(crate) stall: Duration,
    pub(crate) tls: Option<TlsFiles>,
    pub(crate) cors: Vec<String>,
}

pub(crate) struct Served {
    addr: SocketAddr,
    backend: Arc<Backend>,
    _stop: oneshot::Sender<()>,
}

impl Served {
    pub(crate) fn start(change: impl FnOnce(&mut Setup)) -> Served {
        let mut setup = Setup {
            template: None,
            key: None,
            key_file: None,
            max_body_bytes: 16 << 20,
            header_timeout: Duration::from_secs(30),
            body_timeout: Duration::from_secs(30),
            stall: Duration::from_secs(60),
            tls: None,
            cors: Vec::new(),
        };
        change(&mut setup);
        let model = Builtin::Chat.open().unwrap();
        let mut served = ServedModel::new("chat", model.clone()).unwrap();
        if let Some(template) = &setup.template {
            served = served.with_template(ChatTemplate::new(template, Default::default()).unwrap());
        }
        let backend = Arc::new(Backend {
            model,
            requests: Mutex::default(),
            replies: Mutex::default(),
            status: Mutex::new(Arc::new(status(WorkerState::Ready, None))),
            n_cancelled: Arc::default(),
        });
        let mut options = ServerOptions::new("127.0.0.1:0".parse().unwrap());
        let mut keys = ApiKeys::default();
        setup.key.into_iter().for_each(|key| keys.add("test", key));
        setup.key_file.iter().for_each(|path| keys.read(path).unwrap());
        options.keys = keys;
        options.max_body_bytes = setup.max_body_bytes;
        options.header_timeout = setup.header_timeout;
        options.body_timeout = setup.body_timeout;
        options.stall = setup.stall;
        options.tls = setup.tls.take();
        options.cors.clone_from(&setup.cors);
        options.drain = Duration::from_millis(10);
        let (stop, stopped) = oneshot::channel();
        let (sender, receiver) = std::sync::mpsc::channel();
        let used = backend.clone();
        std::thread::spawn(move || {
            let runtime =
                tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
            runtime.block_on(async move {
                let server = Server::bind(vec![served], used, options).await.unwrap();
                sender.send(server.addr()).unwrap();
                let stop = async {
                    // The test is over either way.
                    let _ = stopped.await;
                };
                server.run(stop).await;
            });
        });
        Served { addr: receiver.recv().unwrap(), backend, _stop: stop }
    }

    pub(crate) fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Replies to the next request that has no reply yet.
    pub(crate) fn reply(&self, reply: Reply) {
        self.backend.replies.lock().unwrap().push_back(reply);
    }

    pub(crate) fn requests(&self) -> Vec<TokenRequest> {
        self.backend.requests.lock().unwrap().clone()
    }

    pub(crate) fn set_worker(&self, state: WorkerState, last_failure: Option<&str>) {
        *self.backend.status.lock().unwrap() = Arc::new(status(state, last_failure));
    }

    pub(crate) fn wait_for_cancel(&self) {
        let start = Instant::now();
        while self.backend.n_cancelled.load(Ordering::SeqCst) == 0 {
            assert!(start.elapsed() < Duration::from_secs(10), "the request was not cancelled");
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    pub(crate) fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.addr).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        stream
    }

    /// Sends a request and leaves the connection open.
    pub(crate) fn open(&self, path: &str, headers: &str, body: &str) -> TcpStream {
        self.send(path, headers, body.as_bytes())
    }

    fn send(&self, path: &str, headers: &str, body: &[u8]) -> TcpStream {
        let mut stream = self.connect();
        let typed = if headers.contains("Content-Type") { "" } else { "Content-Type: application/json\r\n" };
        let head = format!(
            "POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{typed}{headers}Content-Length: {}\r\n\r\n",
            body.len()
        );
        stream.write_all(head.as_bytes()).unwrap();
        // A server that refuses by the headers does not read all of it.
        let _ = stream.write_all(body);
        stream
    }

    pub(crate) fn exchange(&self, path: &str, headers: &str, body: &str) -> String {
        self.exchange_bytes(path, headers, body.as_bytes())
    }

    pub(crate) fn exchange_bytes(&self, path: &str, headers: &str, body: &[u8]) -> String {
        lines_of(&mut self.send(path, headers, body))
    }

    /// Head and body of an answer.
    pub(crate) fn raw_post(&self, path: &str, body: &str) -> (String, String) {
        split(&self.exchange(path, "", body))
    }

    pub(crate) fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        parse(&self.exchange(path, "", &body.to_string()))
    }

    pub(crate) fn get(&self, path: &str) -> (u16, Value) {
        let mut stream = self.connect();
        write!(stream, "GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").unwrap();
        parse(&lines_of(&mut stream))
    }

    /// Names and data of the events of a stream. Data that is not JSON is a text.
    pub(crate) fn stream(&self, path: &str, body: &Value) -> Vec<(String, Value)> {
        let (head, body) = self.raw_post(path, &body.to_string());
        assert!(head.contains("text/event-stream"), "{head}{body}");
        let mut name = String::new();
        let mut events = Vec::new();
        for line in body.lines() {
            if let Some(event) = line.strip_prefix("event: ") {
                name = event.to_owned();
            }
            if let Some(data) = line.strip_prefix("data: ") {
                let value = serde_json::from_str(data).unwrap_or_else(|_| Value::String(data.to_owned()));
                events.push((std::mem::take(&mut name), value));
            }
        }
        events
    }
}

fn status(state: WorkerState, last_failure: Option<&str>) -> BackendStatus {
    let load = LoadStatus { model: "chat".into(), context: 512, ..LoadStatus::default() };
    let worker = WorkerStatus {
        idx: 0,
        pid: None,
        backend: "test".into(),
        state,
        n_restarts: 0,
        last_failure: last_failure.map(str::to_owned),
        models: vec![load],
    };
    BackendStatus { workers: vec![worker] }
}

fn parse(answer: &str) -> (u16, Value) {
    let (head, body) = split(answer);
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status");
    (status, serde_json::from_str(&body).unwrap_or(Value::String(body)))
}

fn split(answer: &str) -> (String, String) {
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((answer, ""));
    let head = head.to_lowercase().replacen("http", "HTTP", 1);
    match head.contains("transfer-encoding: chunked") {
        true => (head, dechunk(body)),
        false => (head, body.to_owned()),
    }
}

fn dechunk(body: &str) -> String {
    let (mut rest, mut whole) = (body.as_bytes(), Vec::new());
    while let Some(end) = rest.windows(2).position(|pair| pair == b"\r\n") {
        let size = usize::from_str_radix(std::str::from_utf8(&rest[..end]).unwrap(), 16).unwrap();
        whole.extend(&rest[end + 2..end + 2 + size]);
        rest = &rest[end + 2 + size + 2..];
    }
    String::from_utf8(whole).unwrap()
}

/// Everything until the connection ends.
pub(crate) fn lines_of(stream: &mut TcpStream) -> String {
    let (mut bytes, mut piece) = (Vec::new(), [0; 4096]);
    // A server that refuses a request does not read the rest of it: the connection may be reset after its answer.
    while let Ok(n @ 1..) = stream.read(&mut piece) {
        bytes.extend(&piece[..n]);
        let head = bytes.windows(4).position(|w| w == b"\r\n\r\n");
        let text = String::from_utf8_lossy(&bytes).to_lowercase();
        if let Some(head) = head
            && let Some(length) = text.split("content-length: ").nth(1).and_then(|t| t.split("\r\n").next())
            && length.parse::<usize>().is_ok_and(|n| bytes.len() >= head + 4 + n)
        {
            break;
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}
