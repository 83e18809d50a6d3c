//! A local hub for tests, which serves a repository and can misbehave.
#![allow(dead_code, unreachable_pub, reason = "each test file uses its own part")]

use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use refrain_hub::{Env, Progress, ProgressEvent, Retry, Store};
use sha1::Sha1;
use sha2::{Digest, Sha256};

pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// A received request.
#[derive(Debug, Clone)]
pub struct Request {
    pub method: String,
    pub path: String,
    pub headers: Vec<(String, String)>,
}

impl Request {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(key, _)| key.eq_ignore_ascii_case(name)).map(|(_, value)| value.as_str())
    }

    /// Returns the first byte of the requested range.
    pub fn from(&self) -> Option<usize> {
        self.header("range")?.strip_prefix("bytes=")?.strip_suffix('-')?.parse().ok()
    }

    pub fn is_listing(&self) -> bool {
        self.path.starts_with("/api/models/")
    }
}

/// A response, valid or not.
#[derive(Debug, Clone)]
pub struct Reply {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
    /// `Content-Length` to send; `None` sends none and ends by closing the connection.
    pub length: Option<u64>,
    /// Silence before the end.
    pub silence: Option<Duration>,
}

impl Reply {
    pub fn status(status: u16) -> Self {
        Self { status, headers: Vec::new(), body: Vec::new(), length: Some(0), silence: None }
    }

    pub fn body(status: u16, body: impl Into<Vec<u8>>) -> Self {
        let body = body.into();
        Self { length: Some(body.len() as u64), body, ..Self::status(status) }
    }

    pub fn header(mut self, name: &str, value: impl ToString) -> Self {
        self.headers.push((name.to_owned(), value.to_string()));
        self
    }

    /// Reports the full length but sends only the first `n` bytes.
    pub fn cut_after(mut self, n: usize) -> Self {
        self.body.truncate(n);
        self
    }

    /// Serves a file correctly.
    pub fn file(content: &[u8], request: &Request) -> Self {
        match request.from() {
            Some(from) if from >= content.len() => Self::status(416),
            Some(from) => Self::body(206, &content[from..])
                .header("Content-Range", format!("bytes {from}-{}/{}", content.len() - 1, content.len())),
            None => Self::body(200, content),
        }
    }
}

/// A server that answers with a closure until it is dropped.
pub struct Server {
    pub address: SocketAddr,
    log: Arc<Mutex<Vec<Request>>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    pub fn start(answer: impl Fn(&Request) -> Reply + Send + Sync + 'static) -> Self {
        const MAX_CONNECTIONS: usize = 500;
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let (log, stop) = (Arc::new(Mutex::new(Vec::new())), Arc::new(AtomicBool::new(false)));
        let answer = Arc::new(answer);
        let (log_of_thread, stop_of_thread) = (log.clone(), stop.clone());
        let thread = std::thread::spawn(move || {
            for stream in listener.incoming().take(MAX_CONNECTIONS).flatten() {
                if stop_of_thread.load(Ordering::SeqCst) {
                    return;
                }
                let (log, answer) = (log_of_thread.clone(), answer.clone());
                std::thread::spawn(move || serve(stream, &log, answer.as_ref()));
            }
        });
        Self { address, log, stop, thread: Some(thread) }
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub fn requests(&self) -> Vec<Request> {
        self.log.lock().unwrap().clone()
    }

    /// Returns the requests for files.
    pub fn downloads(&self) -> Vec<Request> {
        self.requests().into_iter().filter(|r| r.method == "GET" && !r.is_listing()).collect()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        let _ = TcpStream::connect(self.address);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn serve(stream: TcpStream, log: &Mutex<Vec<Request>>, answer: &(dyn Fn(&Request) -> Reply + Send + Sync)) {
    let _ = stream.set_read_timeout(Some(Duration::from_secs(5)));
    let _ = stream.set_write_timeout(Some(Duration::from_secs(5)));
    let Some(request) = read_request(&stream) else { return };
    log.lock().unwrap().push(request.clone());
    let reply = answer(&request);
    let mut head = format!("HTTP/1.1 {} Told\r\nConnection: close\r\n", reply.status);
    for (name, value) in &reply.headers {
        let _ = write!(head, "{name}: {value}\r\n");
    }
    if let Some(length) = reply.length {
        let _ = write!(head, "Content-Length: {length}\r\n");
    }
    head.push_str("\r\n");
    let mut stream = stream;
    let _ = stream.write_all(head.as_bytes());
    if request.method != "HEAD" {
        let _ = stream.write_all(&reply.body);
    }
    let _ = stream.flush();
    if let Some(silence) = reply.silence {
        std::thread::sleep(silence);
    }
}

fn read_request(stream: &TcpStream) -> Option<Request> {
    let mut lines = BufReader::new(stream.take(64 * 1024)).lines();
    let first = lines.next()?.ok()?;
    let mut words = first.split(' ');
    let (method, path) = (words.next()?.to_owned(), words.next()?.to_owned());
    let mut headers = Vec::new();
    for line in lines {
        let line = line.ok()?;
        let Some((name, value)) = line.split_once(':') else { break };
        headers.push((name.to_owned(), value.trim().to_owned()));
    }
    Some(Request { method, path, headers })
}

/// Content of a repository on the test hub.
#[derive(Debug, Clone)]
pub struct Repo {
    pub id: String,
    pub files: Vec<(String, Vec<u8>)>,
}

impl Repo {
    pub fn new(id: &str, files: &[(&str, &[u8])]) -> Self {
        let files = files.iter().map(|(name, content)| ((*name).to_owned(), content.to_vec())).collect();
        Self { id: id.to_owned(), files }
    }

    /// Creates `o/r` with one GGUF file of `n` bytes.
    pub fn with_model(n: usize) -> Self {
        Self::new("o/r", &[("README.md", b"hello"), ("m-Q4_K_M.gguf", &pattern(n))])
    }

    pub fn content(&self, name: &str) -> Vec<u8> {
        self.files.iter().find(|(file, _)| file == name).expect(name).1.clone()
    }

    /// Returns the hub's response. GGUF and safetensors are large files, the others are small.
    pub fn answer(&self, request: &Request) -> Reply {
        if request.is_listing() {
            return Reply::body(200, self.listing());
        }
        let prefix = format!("/{}/resolve/{COMMIT}/", self.id);
        let name = request.path.strip_prefix(&prefix).map(|name| name.replace("%20", " "));
        match self.files.iter().find(|(file, _)| Some(file) == name.as_ref()) {
            Some((_, content)) => Reply::file(content, request),
            None => Reply::status(404).header("X-Error-Code", "EntryNotFound"),
        }
    }

    pub fn listing(&self) -> String {
        let mut siblings = Vec::new();
        for (name, content) in &self.files {
            let size = content.len();
            let (blob, large) = (git_sha1(content), sha256(content));
            let lfs = if is_large(name) {
                format!(r#","lfs":{{"sha256":"{large}","size":{size},"pointerSize":134}}"#)
            } else {
                String::new()
            };
            siblings.push(format!(r#"{{"rfilename":"{name}","size":{size},"blobId":"{blob}"{lfs}}}"#));
        }
        format!(
            r#"{{"id":"{}","sha":"{COMMIT}","gated":false,"cardData":{{"license":"mit"}},"siblings":[{}]}}"#,
            self.id,
            siblings.join(",")
        )
    }
}

pub fn is_large(name: &str) -> bool {
    name.ends_with(".gguf") || name.ends_with(".safetensors")
}

pub fn sha256(content: &[u8]) -> String {
    Sha256::digest(content).iter().map(|byte| format!("{byte:02x}")).collect()
}

pub fn git_sha1(content: &[u8]) -> String {
    let mut sha1 = Sha1::new();
    sha1.update(format!("blob {}\0", content.len()));
    sha1.update(content);
    sha1.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Returns `n` aperiodic bytes that start like a GGUF file.
pub fn pattern(n: usize) -> Vec<u8> {
    let mut state = 0x9E37_79B9_7F4A_7C15_u64;
    let mut bytes: Vec<u8> = b"GGUF".to_vec();
    while bytes.len() < n {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.push((state >> 32) as u8);
    }
    bytes.truncate(n);
    bytes
}

/// A retry policy that gives up quickly.
pub fn hasty() -> Retry {
    Retry {
        attempts: 3,
        first_pause: Duration::from_millis(1),
        longest_pause: Duration::from_millis(5),
        silence: Duration::from_secs(5),
    }
}

pub fn env(folder: &Path, server: &Server) -> Env {
    Env { hf_endpoint: server.url(), ..Env::rooted(folder) }
}

pub fn store(folder: &Path, server: &Server) -> Store {
    Store::open(env(folder, server)).with_retry(hasty())
}

/// Records events as short lines.
#[derive(Debug, Default)]
pub struct Notes {
    pub lines: Vec<String>,
    /// Cancels after this many bytes of a file.
    pub cancel_at: Option<u64>,
    pub at: u64,
}

impl Notes {
    pub fn has(&self, start: &str) -> bool {
        self.lines.iter().any(|line| line.starts_with(start))
    }
}

impl Progress for Notes {
    fn on(&mut self, event: ProgressEvent<'_>) {
        self.lines.push(match event {
            ProgressEvent::Plan { n_files, bytes, licence, .. } => {
                let licence = licence.map_or("no licence".to_owned(), ToString::to_string);
                format!("plan {n_files} files {bytes} bytes {licence}")
            }
            ProgressEvent::Start { file, done, total } => format!("start {file} {done}/{total}"),
            ProgressEvent::At { done } => {
                self.at = done;
                return;
            }
            ProgressEvent::Done { file } => format!("done {file}"),
            ProgressEvent::Waiting { file } => format!("waiting {file}"),
            ProgressEvent::Retry { attempt, because, .. } => format!("retry {attempt} {because}"),
            ProgressEvent::Restart { because, .. } => format!("restart {because}"),
            ProgressEvent::Fallback { to, because, .. } => format!("fallback {to} {because}"),
            other => format!("{other:?}"),
        });
    }

    fn cancelled(&self) -> bool {
        self.cancel_at.is_some_and(|limit| self.at >= limit)
    }
}

/// Counts calls, so that a server can behave differently the first time.
#[derive(Default)]
pub struct Calls(AtomicUsize);

impl Calls {
    /// Returns the number of previous calls.
    pub fn next(&self) -> usize {
        self.0.fetch_add(1, Ordering::SeqCst)
    }
}
