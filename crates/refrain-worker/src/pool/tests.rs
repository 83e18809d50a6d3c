//! The pool against workers that are threads of the test: scripted, hostile or fake. Their processes only sleep.

use super::*;
use crate::fake::{FakeOptions, FakeShelf, fake_token, fake_vector};
use crate::protocol::{self, FromWorker, MAX_FROM_WORKER_BYTES, ToWorker, WireEvent};
use crate::tokens::{FinishedBy, TokenSampling, TokenUpdate, VectorUpdate};
use crate::worker::{WorkerOptions, run_worker};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;

type Script = Box<dyn Fn(&Path) + Send + Sync>;

/// A worker that runs the fake engine.
fn fake(options: FakeOptions) -> Script {
    let options = FakeOptions { step: Duration::from_millis(1), ..options };
    Box::new(move |socket| {
        let worker = WorkerOptions { heartbeat: Duration::from_millis(10), ..WorkerOptions::new(socket) };
        // It ends when the pool closes the socket, or with its engine.
        let _ = run_worker(FakeShelf::new(options.clone()), &worker);
    })
}

/// A worker that says hello and sends what `play` writes for the first request.
fn scripted(play: impl Fn(&mut UnixStream, u64) + Send + Sync + 'static) -> Script {
    Box::new(move |socket| {
        let mut stream = UnixStream::connect(socket).unwrap();
        stream.write_all(&protocol::hello(protocol::build())).unwrap();
        send(&mut stream, &FromWorker::Ready { backend: "script".into() });
        let mut buffer = protocol::FrameBuffer::new(protocol::MAX_TO_WORKER_BYTES);
        let mut is_greeted = false;
        let id = loop {
            let n = stream.read(buffer.spare()).unwrap();
            buffer.filled(n);
            is_greeted = is_greeted || buffer.next_hello(protocol::build()).unwrap();
            match is_greeted.then(|| buffer.next::<ToWorker<'static>>().unwrap()).flatten() {
                Some(ToWorker::Submit { id, .. } | ToWorker::Embed { id, .. }) => break id,
                _ if n == 0 => return,
                _ => {}
            }
        };
        play(&mut stream, id);
        // Waits for the pool to hang up.
        let _ = stream.read(&mut [0; 64]);
    })
}

fn send(stream: &mut UnixStream, message: &FromWorker) {
    let mut frame = Vec::new();
    protocol::encode(message, MAX_FROM_WORKER_BYTES, &mut frame).unwrap();
    // The pool may have hung up.
    let _ = stream.write_all(&frame);
}

fn token_event(id: u64, token: u32) -> (u64, WireEvent) {
    (id, WireEvent::Update(TokenUpdate::Token { token, logprob: -0.5, top: Vec::new() }))
}

/// A pool whose processes follow the scripts in turn; the last one repeats.
fn pool(n_workers: usize, scripts: Vec<Script>) -> WorkerPool {
    let scripts = Arc::new(scripts);
    let n_started = Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let mut options = PoolOptions::new(vec!["fake".into()], move |_, socket| {
        let idx = n_started.fetch_add(1, std::sync::atomic::Ordering::Relaxed).min(scripts.len() - 1);
        let (scripts, socket) = (scripts.clone(), socket.to_owned());
        std::thread::spawn(move || scripts[idx](&socket));
        let mut sleep = Command::new("sleep");
        sleep.arg("600");
        sleep
    });
    options.n_workers = n_workers;
    options.deadlines = Deadlines {
        hello: Duration::from_secs(5),
        stall: Duration::from_millis(500),
        silence: Duration::from_secs(5),
        exit: Duration::from_millis(20),
        ..Deadlines::default()
    };
    options.backoff =
        Backoff { first: Duration::from_millis(5), longest: Duration::from_millis(40), crash_loop: 6 };
    WorkerPool::start(options).unwrap()
}

pub(crate) fn request(prompt: &[u32], n: usize) -> TokenRequest {
    TokenRequest {
        model: "fake".into(),
        prompt: prompt.to_vec(),
        sampling: TokenSampling {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repeat_penalty: 1.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            penalty_window: 0,
            logit_bias: Vec::new(),
            seed: 7,
        },
        end: Vec::new(),
        min_tokens: 0,
        max_tokens: Some(n),
        n_top_logprobs: 0,
        priority: 0,
        user: 0,
        grammar: None,
        share_prefix: true,
    }
}

/// What the fake engine chooses after a prompt of `n_prompt` tokens.
fn undisturbed(n_prompt: usize, n: usize) -> Vec<u32> {
    (n_prompt..n_prompt + n).map(|position| fake_token(7, position, 256)).collect()
}

async fn read(mut reply: TokenReply) -> Result<(Vec<u32>, FinishedBy), Refusal> {
    let mut tokens = Vec::new();
    while let Some(update) =
        tokio::time::timeout(Duration::from_secs(20), reply.next()).await.expect("an update")
    {
        match update? {
            TokenUpdate::Token { token, .. } => tokens.push(token),
            TokenUpdate::End(by) => return Ok((tokens, by)),
            TokenUpdate::Prompt { .. } => {}
        }
    }
    panic!("a reply without an end")
}

async fn last_failure(pool: &WorkerPool) -> String {
    loop {
        if let Some(why) = pool.status().workers[0].last_failure.clone() {
            return why;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn a_reply_continues_on_the_next_worker_from_its_delivered_tokens() {
    let dies_after_three = scripted(|stream, id| {
        let tokens = undisturbed(2, 3);
        send(stream, &FromWorker::Events(tokens.into_iter().map(|token| token_event(id, token)).collect()));
        stream.shutdown(std::net::Shutdown::Both).unwrap();
    });
    let pool = pool(1, vec![dies_after_three, fake(FakeOptions::default())]);
    pool.started().await.unwrap();
    let reply = pool.submit(request(&[1, 2], 20)).unwrap();
    assert_eq!(read(reply).await.unwrap(), (undisturbed(2, 20), FinishedBy::MaxTokens));
    assert_eq!(pool.status().workers[0].n_restarts, 1);
}

#[tokio::test]
async fn a_reply_that_lacks_only_its_end_gets_it_without_another_token() {
    let dies_before_the_end = scripted(|stream, id| {
        let tokens = undisturbed(1, 4);
        send(stream, &FromWorker::Events(tokens.into_iter().map(|token| token_event(id, token)).collect()));
        stream.shutdown(std::net::Shutdown::Both).unwrap();
    });
    let pool = pool(1, vec![dies_before_the_end, fake(FakeOptions::default())]);
    let reply = pool.submit(request(&[1], 4)).unwrap();
    assert_eq!(read(reply).await.unwrap(), (undisturbed(1, 4), FinishedBy::MaxTokens));
}

/// Replies of one request that makes workers fail, and of others beside it.
async fn survives(mark: FakeOptions) -> String {
    let pool = pool(1, vec![fake(mark)]);
    pool.started().await.unwrap();
    let innocent: Vec<_> = (0..4).map(|_| pool.submit(request(&[1, 2, 3], 300)).unwrap()).collect();
    let guilty = pool.submit(request(&[9], 300)).unwrap();
    for reply in innocent {
        assert_eq!(read(reply).await.unwrap(), (undisturbed(3, 300), FinishedBy::MaxTokens));
    }
    let refusal = read(guilty).await.unwrap_err();
    assert_eq!(refusal.kind, RefusalKind::Failed);
    refusal.message
}

#[tokio::test]
async fn a_request_that_makes_workers_fail_fails_alone() {
    let message = survives(FakeOptions { poison: Some(9), ..FakeOptions::default() }).await;
    assert!(message.contains("lost its device") && message.contains("poisoned"), "{message}");
}

#[tokio::test]
async fn a_request_that_stops_all_steps_fails_alone() {
    let message = survives(FakeOptions { brake: Some(9), ..FakeOptions::default() }).await;
    assert!(message.contains("no progress"), "{message}");
}

#[tokio::test]
async fn a_crash_loop_is_refused_with_its_reason() {
    let mut options = PoolOptions::new(vec!["fake".into()], |_, _| Command::new("false"));
    options.backoff =
        Backoff { first: Duration::from_millis(1), longest: Duration::from_secs(60), crash_loop: 3 };
    let pool = WorkerPool::start(options).unwrap();
    let first = pool.started().await.unwrap_err();
    assert!(first.message.contains("exited with status 1"), "{first}");
    let refusal = match pool.submit(request(&[1], 1)) {
        Err(refusal) => refusal,
        Ok(reply) => read(reply).await.unwrap_err(),
    };
    assert_eq!(refusal.kind, RefusalKind::Unavailable);
    assert!(refusal.message.contains("in a row") && refusal.message.contains("status 1"), "{refusal}");
    assert!(refusal.hint.is_some());
}

#[tokio::test]
async fn a_hostile_worker_is_replaced_and_the_reply_is_whole() {
    let frame = |stream: &mut UnixStream, bytes: &[u8]| {
        let mut frame = (bytes.len() as u32).to_le_bytes().to_vec();
        frame.extend(bytes);
        let _ = stream.write_all(&frame);
    };
    let cases: Vec<(Script, &str)> = vec![
        (Box::new(|s| drop(UnixStream::connect(s).unwrap().write_all(b"HTTP/1.1 200"))), "instead of"),
        (Box::new(|s| drop(UnixStream::connect(s).unwrap().write_all(b"RFRW\xff\xff\0"))), "version 65535"),
        (Box::new(|s| drop(UnixStream::connect(s).unwrap().write_all(b"RFRW\x04\0\x01x"))), "build x"),
        (scripted(move |s, _| frame(s, &[0xff; 40])), "is not a message"),
        (scripted(move |s, _| frame(s, &[])), "is not a message"),
        // A list of 2^60 events, of which none follows.
        (
            scripted(move |s, _| frame(s, &[1, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x10])),
            "is not a message",
        ),
        (scripted(|s, _| drop(s.write_all(&[0xff; 4]))), "the maximum is"),
        (scripted(|s, id| send(s, &FromWorker::Events(vec![token_event(id + 1, 5)]))), "no progress"),
        (
            scripted(|s, id| {
                let mut events: Vec<_> = undisturbed(1, 6).into_iter().map(|t| token_event(id, t)).collect();
                events.push(token_event(id, 1));
                send(s, &FromWorker::Events(events));
            }),
            "more tokens",
        ),
        (
            scripted(|s, id| {
                let top = vec![(1, 0.0); 1000];
                let update = TokenUpdate::Token { token: 1, logprob: 0.0, top };
                send(s, &FromWorker::Events(vec![(id, WireEvent::Update(update))]));
            }),
            "more alternatives",
        ),
    ];
    for (script, want) in cases {
        let pool = pool(1, vec![script, fake(FakeOptions::default())]);
        let reply = pool.submit(request(&[1], 6)).unwrap();
        assert_eq!(read(reply).await.unwrap(), (undisturbed(1, 6), FinishedBy::MaxTokens), "{want}");
        let why = last_failure(&pool).await;
        assert!(why.contains(want), "{why}, expected {want}");
    }
}

#[tokio::test]
async fn a_dropped_reply_is_cancelled_on_the_worker() {
    let pool = pool(1, vec![fake(FakeOptions::default())]);
    pool.started().await.unwrap();
    let mut reply = pool.submit(request(&[1], 1_000_000)).unwrap();
    reply.next().await.unwrap().unwrap();
    let n_running = || pool.status().workers[0].models.first().map(|load| load.n_running);
    while n_running() != Some(1) {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    drop(reply);
    while n_running() != Some(0) {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(pool.shared.lock().n_open(), 0);
}

#[tokio::test]
async fn requests_go_to_the_least_loaded_worker_and_too_many_are_refused() {
    let mut pool = pool(2, vec![fake(FakeOptions::default())]);
    pool.started().await.unwrap();
    while pool.status().workers.iter().any(|worker| worker.state != WorkerState::Ready) {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let replies: Vec<_> = (0..6).map(|_| pool.submit(request(&[1], 1_000_000)).unwrap()).collect();
    assert_eq!(pool.shared.lock().slots.iter().map(|slot| slot.open.len()).collect::<Vec<_>>(), [3, 3]);
    pool.stop();
    for reply in replies {
        assert_eq!(read(reply).await.unwrap_err().kind, RefusalKind::Unavailable);
    }
    assert_eq!(pool.submit(request(&[1], 1)).err().unwrap().kind, RefusalKind::Unavailable);
}

fn texts(n: usize) -> EmbedRequest {
    EmbedRequest { model: "fake".into(), inputs: (0..n as u32).map(|n| vec![n + 20; 3]).collect(), user: 0 }
}

fn vectors(request: &EmbedRequest) -> Vec<Vec<f32>> {
    request.inputs.iter().map(|text| fake_vector(text)).collect()
}

fn vector_event(id: u64, vector: Vec<f32>, is_last: bool) -> (u64, WireEvent) {
    (id, WireEvent::Vector(VectorUpdate { vector, is_last }))
}

async fn read_vectors(mut reply: VectorReply) -> Result<Vec<Vec<f32>>, Refusal> {
    let mut vectors = Vec::new();
    while let Some(update) =
        tokio::time::timeout(Duration::from_secs(20), reply.next()).await.expect("an update")
    {
        vectors.push(update?.vector);
    }
    Ok(vectors)
}

#[tokio::test]
async fn texts_continue_on_the_next_worker_after_their_delivered_vectors() {
    let dies_after_two = scripted(|stream, id| {
        let events = vectors(&texts(2)).into_iter().map(|vector| vector_event(id, vector, false)).collect();
        send(stream, &FromWorker::Events(events));
        stream.shutdown(std::net::Shutdown::Both).unwrap();
    });
    let dies_after_one_more = scripted(|stream, id| {
        let third = vectors(&texts(3)).remove(2);
        send(stream, &FromWorker::Events(vec![vector_event(id, third, false)]));
        stream.shutdown(std::net::Shutdown::Both).unwrap();
    });
    let pool = pool(1, vec![dies_after_two, dies_after_one_more, fake(FakeOptions::default())]);
    pool.started().await.unwrap();
    let request = texts(6);
    let reply = pool.embed(request.clone()).unwrap();
    assert_eq!(read_vectors(reply).await.unwrap(), vectors(&request));
    assert_eq!(pool.status().workers[0].n_restarts, 2);
}

#[tokio::test]
async fn hostile_vectors_replace_the_worker_and_the_reply_is_whole() {
    let event = |vectors: Vec<(Vec<f32>, bool)>| {
        scripted(move |s, id| {
            let events = vectors.iter().map(|(v, is_last)| vector_event(id, v.clone(), *is_last)).collect();
            send(s, &FromWorker::Events(events));
        })
    };
    let right = vectors(&texts(3));
    let cases = [
        (event(vec![(vec![f32::NAN; 3], false)]), "not finite"),
        (event(vec![(Vec::new(), false)]), "an empty one"),
        (event(vec![(right[0].clone(), false), (vec![1.0], false)]), "different lengths"),
        (event(vec![(right[0].clone(), true)]), "more or fewer vectors"),
        (event(right.iter().map(|v| (v.clone(), false)).collect()), "more or fewer vectors"),
        (scripted(|s, id| send(s, &FromWorker::Events(vec![token_event(id, 1)]))), "tokens to a request"),
    ];
    for (script, want) in cases {
        let pool = pool(1, vec![script, fake(FakeOptions::default())]);
        let reply = pool.embed(texts(3)).unwrap();
        assert_eq!(read_vectors(reply).await.unwrap(), right, "{want}");
        let why = last_failure(&pool).await;
        assert!(why.contains(want), "{why}, expected {want}");
    }
}

#[tokio::test]
async fn a_text_that_makes_workers_fail_or_hang_fails_alone() {
    for (mark, want) in [
        (FakeOptions { poison: Some(9), ..FakeOptions::default() }, "poisoned"),
        (FakeOptions { brake: Some(9), ..FakeOptions::default() }, "no progress"),
    ] {
        let pool = pool(1, vec![fake(mark)]);
        pool.started().await.unwrap();
        let guilty = EmbedRequest { inputs: vec![vec![5], vec![9]], ..texts(1) };
        let guilty = pool.embed(guilty).unwrap();
        let innocent: Vec<_> = (0..4).map(|_| pool.embed(texts(5)).unwrap()).collect();
        for reply in innocent {
            assert_eq!(read_vectors(reply).await.unwrap(), vectors(&texts(5)));
        }
        let refusal = read_vectors(guilty).await.unwrap_err();
        assert!(refusal.kind == RefusalKind::Failed && refusal.message.contains(want), "{refusal}");
    }
}

#[tokio::test]
async fn a_dropped_embedding_is_cancelled_and_wrong_ones_are_refused() {
    let pool = pool(1, vec![fake(FakeOptions { brake: Some(9), ..FakeOptions::default() })]);
    pool.started().await.unwrap();
    let reply = pool.embed(EmbedRequest { inputs: vec![vec![9]], ..texts(1) }).unwrap();
    while pool.shared.lock().slots[0].open.is_empty() {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    drop(reply);
    assert_eq!(pool.shared.lock().n_open(), 0);
    assert_eq!(read_vectors(pool.embed(texts(2)).unwrap()).await.unwrap(), vectors(&texts(2)));
    assert_eq!(pool.status().workers[0].n_restarts, 0, "nothing was left to make progress with");
    let refused = |request| pool.embed(request).err().unwrap().message;
    assert!(refused(texts(0)).contains("0 texts, must have 1 to 2048"));
    assert!(refused(texts(2049)).contains("2049 texts"));
    let long = EmbedRequest { inputs: vec![vec![1; 2_000_000]; 2], ..texts(1) };
    assert!(refused(long).contains("4000000 tokens"));
    assert!(refused(EmbedRequest { model: "other".into(), ..texts(1) }).contains("no worker serves"));
}
