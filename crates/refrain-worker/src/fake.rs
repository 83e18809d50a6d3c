//! An engine without a model: its tokens are a function of seed and position.
//!
//! It serves to measure what server and worker cost by themselves, and to test how failures are survived.

use crate::engine::{EngineFailure, Progress, Shelf, Title, TokenEngine, TokenSource, VectorSource};
use crate::protocol::LastWords;
use crate::tokens::{EmbedRequest, FinishedBy, LoadStatus, StepCounts, TokenRequest, TokenUpdate};
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

/// Updates of one request that nobody has collected yet; then its steps wait. A real engine does not wait, but it is not
/// as fast either.
const MAX_UNREAD: usize = 64;

/// Options of a fake engine.
#[derive(Clone, Debug)]
pub struct FakeOptions {
    /// Name under which it is served.
    pub name: String,
    /// Tokens are below this.
    pub n_vocab: u32,
    /// Maximum number of tokens of one request.
    pub context: usize,
    /// Time of a step, which makes one token for each request.
    pub step: Duration,
    /// A request whose prompt starts with this token makes the engine fail. So does a text to embed.
    pub poison: Option<u32>,
    /// A request whose prompt starts with this token stops all steps. A text to embed gets no vector.
    pub brake: Option<u32>,
}

impl Default for FakeOptions {
    fn default() -> FakeOptions {
        FakeOptions {
            name: "fake".into(),
            n_vocab: 256,
            context: 1 << 20,
            step: Duration::ZERO,
            poison: None,
            brake: None,
        }
    }
}

/// A shelf with one fake model.
#[derive(Clone, Debug, Default)]
pub struct FakeShelf {
    options: FakeOptions,
}

impl FakeShelf {
    /// A shelf of one model.
    pub fn new(options: FakeOptions) -> FakeShelf {
        FakeShelf { options }
    }
}

impl Shelf for FakeShelf {
    fn titles(&self) -> Vec<Title> {
        vec![Title { name: self.options.name.clone(), adapters: Vec::new(), at_start: true }]
    }

    fn needs(&mut self, _model_idx: usize) -> Result<u64, EngineFailure> {
        Ok(0)
    }

    fn load(
        &mut self,
        _model_idx: usize,
        progress: &Progress,
    ) -> Result<Arc<dyn TokenEngine>, EngineFailure> {
        progress.advance(1);
        let shared = Arc::new(FakeShared { state: Mutex::default(), arrived: Condvar::new() });
        let (stepped, options) = (shared.clone(), self.options.clone());
        let started = std::thread::Builder::new()
            .name("refrain-fake".into())
            .spawn(move || while stepped.step(&options) {});
        let failed = |error: std::io::Error| {
            let message = format!("the fake engine cannot start a thread: {error}");
            EngineFailure::Unusable(LastWords { lost_device: false, message, hint: None })
        };
        started.map_err(failed)?;
        Ok(Arc::new(FakeEngine { shared, options: self.options.clone() }))
    }
}

/// The token at a position.
pub fn fake_token(seed: u64, position: usize, n_vocab: u32) -> u32 {
    // A step of SplitMix64.
    let mut x = seed.wrapping_add((position as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((x ^ (x >> 31)) % u64::from(n_vocab.max(1))) as u32
}

/// The vector of a text.
pub fn fake_vector(tokens: &[u32]) -> Vec<f32> {
    let sum: u64 = tokens.iter().map(|token| u64::from(*token)).sum();
    vec![tokens.len() as f32, sum as f32, tokens.first().map_or(0.0, |token| *token as f32)]
}

struct FakeShared {
    state: Mutex<FakeState>,
    arrived: Condvar,
}

#[derive(Default)]
struct FakeState {
    streams: Vec<Arc<Mutex<FakeStream>>>,
    n_steps: u64,
    n_prompt_tokens: u64,
    is_stopped: bool,
}

struct FakeStream {
    request: TokenRequest,
    n_delivered: usize,
    /// Tokens of prompt and reply.
    position: usize,
    unread: VecDeque<Result<TokenUpdate, EngineFailure>>,
    waker: Option<Waker>,
    is_over: bool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl FakeShared {
    /// Makes a token for each request; false once the engine was dropped.
    fn step(&self, options: &FakeOptions) -> bool {
        let mut state = lock(&self.state);
        state.streams.retain(|stream| !lock(stream).is_over);
        while state.streams.is_empty() && !state.is_stopped {
            state = self.arrived.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        if state.is_stopped {
            return false;
        }
        state.n_steps += 1;
        let streams = state.streams.clone();
        drop(state);
        let starts_with = |mark: Option<u32>| {
            mark.is_some_and(|mark| streams.iter().any(|s| lock(s).request.prompt.first() == Some(&mark)))
        };
        if starts_with(options.brake) {
            std::thread::sleep(Duration::from_secs(3600));
        }
        let failure = starts_with(options.poison).then(poisoned);
        let mut n_made = 0;
        for stream in &streams {
            let mut stream = lock(stream);
            match &failure {
                Some(failure) => stream.put(Err(failure.clone())),
                None if stream.unread.len() < MAX_UNREAD => stream.advance(options),
                None => continue,
            }
            n_made += 1;
            let waker = stream.waker.take();
            drop(stream);
            waker.into_iter().for_each(Waker::wake);
        }
        if options.step > Duration::ZERO || n_made == 0 {
            std::thread::sleep(options.step.max(Duration::from_micros(50)));
        }
        true
    }
}

fn poisoned() -> EngineFailure {
    let message = "the request was poisoned".into();
    EngineFailure::Unusable(LastWords { lost_device: true, message, hint: None })
}

impl FakeStream {
    fn put(&mut self, update: Result<TokenUpdate, EngineFailure>) {
        self.is_over |= matches!(update, Ok(TokenUpdate::End(_)) | Err(_));
        self.unread.push_back(update);
    }

    fn advance(&mut self, options: &FakeOptions) {
        let request = &self.request;
        let token = fake_token(request.sampling.seed, self.position, options.n_vocab);
        let ends = request.end.contains(&token) && self.n_delivered >= request.min_tokens;
        self.position += 1;
        self.n_delivered += 1;
        let is_full = request.max_tokens.is_some_and(|max| self.n_delivered >= max);
        let top = (0..request.n_top_logprobs as u32).map(|n| ((token + n) % options.n_vocab, -0.5)).collect();
        self.put(Ok(TokenUpdate::Token { token, logprob: -0.5, top }));
        let by = match (ends, is_full, self.position >= options.context) {
            (true, _, _) => FinishedBy::EndToken,
            (false, true, _) => FinishedBy::MaxTokens,
            (false, false, true) => FinishedBy::ContextFull,
            (false, false, false) => return,
        };
        self.put(Ok(TokenUpdate::End(by)));
    }
}

struct FakeEngine {
    shared: Arc<FakeShared>,
    options: FakeOptions,
}

impl Drop for FakeEngine {
    fn drop(&mut self) {
        lock(&self.shared.state).is_stopped = true;
        self.shared.arrived.notify_all();
    }
}

impl TokenEngine for FakeEngine {
    fn submit(
        &self,
        request: TokenRequest,
        n_delivered: usize,
    ) -> Result<Box<dyn TokenSource>, EngineFailure> {
        let (position, unread) = (request.prompt.len(), VecDeque::new());
        let stream = FakeStream { request, n_delivered, position, unread, waker: None, is_over: false };
        let mut state = lock(&self.shared.state);
        state.n_prompt_tokens += (position - n_delivered.min(position)) as u64;
        let stream = Arc::new(Mutex::new(stream));
        state.streams.push(stream.clone());
        drop(state);
        self.shared.arrived.notify_all();
        Ok(Box::new(FakeSource { stream }))
    }

    fn embed(&self, request: EmbedRequest) -> Result<Box<dyn VectorSource>, EngineFailure> {
        Ok(Box::new(FakeVectors { texts: request.inputs.into(), options: self.options.clone() }))
    }

    fn backend(&self) -> &str {
        "fake"
    }

    fn load(&self) -> Result<LoadStatus, EngineFailure> {
        let state = lock(&self.shared.state);
        Ok(LoadStatus {
            context: self.options.context,
            n_running: state.streams.len(),
            n_prompt_tokens: state.n_prompt_tokens,
            steps: StepCounts { replayed: state.n_steps, ..StepCounts::default() },
            ..LoadStatus::default()
        })
    }
}

struct FakeSource {
    stream: Arc<Mutex<FakeStream>>,
}

impl TokenSource for FakeSource {
    fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<TokenUpdate, EngineFailure>>> {
        let mut stream = lock(&self.stream);
        match stream.unread.pop_front() {
            Some(update) => Poll::Ready(Some(update)),
            None if stream.is_over => Poll::Ready(None),
            None => {
                stream.waker = Some(context.waker().clone());
                Poll::Pending
            }
        }
    }
}

impl Drop for FakeSource {
    fn drop(&mut self) {
        lock(&self.stream).is_over = true;
    }
}

struct FakeVectors {
    texts: VecDeque<Vec<u32>>,
    options: FakeOptions,
}

impl VectorSource for FakeVectors {
    fn poll_next(&mut self, _: &mut Context<'_>) -> Poll<Option<Result<Vec<f32>, EngineFailure>>> {
        let Some(first) = self.texts.front().map(|text| text.first().copied()) else {
            return Poll::Ready(None);
        };
        if first.is_some() && first == self.options.brake {
            return Poll::Pending;
        }
        if first.is_some() && first == self.options.poison {
            return Poll::Ready(Some(Err(poisoned())));
        }
        Poll::Ready(self.texts.pop_front().map(|text| Ok(fake_vector(&text))))
    }
}
