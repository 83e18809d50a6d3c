//! Many connections, and bodies that no client would send.

mod common;

use common::{Reply, Served};
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// Raises the limit on open files, and returns how many connections fit with both of their ends in this process.
fn connections_that_fit(wanted: usize) -> usize {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    // It may be as high as it gets already.
    let _ = setrlimit(Resource::Nofile, limit);
    let files = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    wanted.min(usize::try_from(files.saturating_sub(500) / 2).unwrap_or(usize::MAX))
}

fn ask(stream: &mut TcpStream) {
    stream.write_all(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
}

fn is_answered(stream: &mut TcpStream) -> bool {
    let mut answer = [0; 512];
    stream.read(&mut answer).is_ok_and(|n| answer[..n].starts_with(b"HTTP/1.1 200"))
}

fn resident_bytes() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
}

#[test]
fn ten_thousand_connections_are_served_and_take_little_memory() {
    let served = Served::start(|setup| setup.header_timeout = Duration::from_secs(300));
    let n = connections_that_fit(10_000);
    assert!(n >= 1000, "only {n} connections fit into the limit on open files: raise it with ulimit -n");
    let before = resident_bytes();
    let mut open: Vec<TcpStream> = (0..n).map(|_| served.connect()).collect();
    for part in open.chunks_mut(500) {
        part.iter_mut().for_each(ask);
        assert!(part.iter_mut().all(is_answered));
    }
    let taken = resident_bytes().saturating_sub(before) / n as u64;
    assert!(taken < 64 << 10, "{taken} bytes for each of {n} connections");
    // All of them are still open, and new ones are served as well.
    let start = Instant::now();
    assert_eq!(served.post("/v1/completions", &json!({ "prompt": "A" })).0, 200);
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    open.iter_mut().step_by(100).for_each(ask);
    assert!(open.iter_mut().step_by(100).all(is_answered));
}

/// A small generator of random numbers, so that a failure repeats.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % n.max(1) as u64) as usize
    }

    /// A value that does not belong where it is put.
    fn value(&mut self) -> Value {
        let deep = (0..60).fold(json!(1), |inner, _| json!([inner]));
        let values = [
            json!(null),
            json!(true),
            json!(-1),
            json!(0),
            json!(1e300),
            json!(u64::MAX),
            json!(i64::MIN),
            json!(""),
            json!("\u{0}\u{fffd}"),
            json!("x".repeat(5000)),
            json!([]),
            json!({}),
            json!([null]),
            json!({ "type": 7 }),
            json!([[1, 2], "a"]),
            deep,
        ];
        values[self.below(values.len())].clone()
    }

    /// Replaces, adds or removes something somewhere.
    fn damage(&mut self, value: &mut Value) {
        let goes_deeper = self.below(3) > 0;
        match value {
            Value::Object(map) if !map.is_empty() && goes_deeper => {
                let key = map.keys().nth(self.below(map.len())).unwrap().clone();
                match self.below(6) {
                    0 => drop(map.remove(&key)),
                    1 => drop(map.insert(format!("{key}x"), self.value())),
                    _ => self.damage(&mut map[&key]),
                }
            }
            Value::Array(list) if !list.is_empty() && goes_deeper => {
                let idx = self.below(list.len());
                self.damage(&mut list[idx]);
            }
            value => *value = self.value(),
        }
    }
}

#[test]
fn damaged_bodies_get_an_answer_and_never_a_fault() {
    let served = Served::start(|_| {});
    let message = json!([{ "role": "user", "content": [{ "type": "text", "text": "Hi" }] }]);
    let tool = json!({ "type": "function", "function": { "name": "f", "parameters": { "type": "object" } } });
    let bodies = [
        (
            "/v1/chat/completions",
            json!({ "messages": message, "max_tokens": 3, "n": 2, "stop": ["a"], "tools": [tool],
            "logprobs": true, "top_logprobs": 2, "stream_options": { "include_usage": true } }),
        ),
        (
            "/v1/completions",
            json!({ "prompt": ["A", "B"], "max_tokens": 3, "echo": true, "logit_bias": { "5": 1 } }),
        ),
        (
            "/v1/messages",
            json!({ "messages": message, "max_tokens": 3, "system": "S", "stop_sequences": ["x"],
            "thinking": { "type": "disabled" } }),
        ),
        ("/v1/messages/count_tokens", json!({ "messages": message })),
        (
            "/v1/responses",
            json!({ "input": message, "max_output_tokens": 3, "instructions": "I",
            "reasoning": { "effort": "low" } }),
        ),
        ("/v1/embeddings", json!({ "input": ["a", "b"], "encoding_format": "float" })),
        ("/tokenize", json!({ "prompt": "A", "add_special_tokens": true })),
        ("/detokenize", json!({ "tokens": [1, 2, 3] })),
    ];
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let mut n_refused = 0;
    for round in 0..60 {
        for (path, body) in &bodies {
            let mut damaged = body.clone();
            (0..1 + random.below(3)).for_each(|_| random.damage(&mut damaged));
            let mut bytes = damaged.to_string().into_bytes();
            match round % 4 {
                0 => bytes.truncate(random.below(bytes.len() + 1)),
                1 => {
                    let idx = random.below(bytes.len());
                    bytes[idx] = random.below(256) as u8;
                }
                _ => {}
            }
            served.reply(Reply::text("ok"));
            let answer = served.exchange_bytes(path, "", &bytes);
            let status = answer.split(' ').nth(1).unwrap_or_default();
            let sent = String::from_utf8_lossy(&bytes);
            assert!(["200", "400", "404"].contains(&status), "{path} {sent:.500}: {answer:.500}");
            n_refused += usize::from(status != "200");
        }
    }
    assert!(n_refused > 200, "{n_refused} refused");
    assert_eq!(served.get("/status").1["n_open"], 0);
}
