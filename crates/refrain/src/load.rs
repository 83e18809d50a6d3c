//! Loads: how a service performs under many requests of random lengths.
//!
//! [`run_load`] sends requests to a [`LoadTarget`] and measures what a user would notice: the time to the first token,
//! the time between tokens, and what failed. Arrivals are open-loop ([`Arrivals::PerSecond`]: requests come no matter
//! how many are open, as from independent users) or closed-loop ([`Arrivals::Clients`]: each client sends its next
//! request when its last one has ended).

mod local; // an engine of this process as a target

pub use local::LocalLoad;

use crate::bench::Samples;
use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

/// When requests arrive.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Arrivals {
    /// Independently of each other, on average this many per second.
    PerSecond(f64),
    /// From this many clients, each of which waits for its reply before the next request.
    Clients(usize),
}

/// Options of a load.
#[derive(Clone, Debug)]
pub struct LoadOptions {
    /// When requests arrive.
    pub arrivals: Arrivals,
    /// Number of requests.
    pub n_requests: usize,
    /// Prompt lengths, all equally probable.
    pub prompt_tokens: RangeInclusive<usize>,
    /// Reply lengths, all equally probable.
    pub reply_tokens: RangeInclusive<usize>,
    /// Token ids of the prompts, all equally probable.
    pub token_ids: RangeInclusive<u32>,
    /// Seed of lengths, tokens and arrivals.
    pub seed: u64,
    /// A request is good if its first token comes within this time ...
    pub ttft_limit: Duration,
    /// ... and its other tokens, on average, within this time of each other.
    pub token_limit: Duration,
}

impl Default for LoadOptions {
    fn default() -> LoadOptions {
        LoadOptions {
            arrivals: Arrivals::Clients(8),
            n_requests: 100,
            prompt_tokens: 16..=256,
            reply_tokens: 16..=128,
            token_ids: 0..=255,
            seed: 0,
            ttft_limit: Duration::from_secs(1),
            token_limit: Duration::from_millis(100),
        }
    }
}

/// A request of a load. Its reply has exactly `n_reply` tokens, even past an end-of-turn token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadRequest {
    /// Tokens of the prompt.
    pub prompt: Vec<u32>,
    /// Tokens to generate.
    pub n_reply: usize,
}

/// Destination of a load.
pub trait LoadTarget: Sync {
    /// Sends a request and reports its progress. Must not wait for the reply.
    fn send(&self, request: LoadRequest, progress: RequestProgress);

    /// The target's own view of its load, if it has one. May block for a step.
    fn state(&self) -> Option<LoadState>;
}

/// The load as the target sees it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LoadState {
    /// Requests that take part in steps.
    pub n_running: usize,
    /// Requests waiting for capacity.
    pub n_waiting: usize,
    /// Share of the KV cache in use, from 0 to 1.
    pub kv_used: f64,
}

/// Reports the progress of one request.
#[derive(Debug)]
pub struct RequestProgress {
    idx: usize,
    events: Sender<LoadRecord>,
}

#[derive(Debug)]
struct LoadRecord {
    idx: usize,
    at: Instant,
    what: Progressed,
}

#[derive(Debug)]
enum Progressed {
    Tokens(usize),
    Ended,
    Failed(String),
}

impl RequestProgress {
    /// Tokens arrived.
    pub fn tokens(&self, n: usize) {
        self.report(Progressed::Tokens(n));
    }

    /// The reply is complete.
    pub fn end(self) {
        self.report(Progressed::Ended);
    }

    /// The request failed.
    pub fn fail(self, why: String) {
        self.report(Progressed::Failed(why));
    }

    fn report(&self, what: Progressed) {
        // The receiver is gone only if the load was abandoned.
        let _ = self.events.send(LoadRecord { idx: self.idx, at: Instant::now(), what });
    }
}

/// One moment of a load.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LoadMoment {
    /// Seconds since the start.
    pub seconds: f64,
    /// Tokens per second since the moment before.
    pub tokens_per_second: f64,
    /// Requests sent and not ended.
    pub n_open: usize,
    /// The target's own view.
    pub state: Option<LoadState>,
}

/// Measurements of a load.
#[derive(Clone, Debug, PartialEq)]
pub struct LoadReport {
    /// Seconds from the first request to the last token.
    pub seconds: f64,
    /// Requests with a complete reply.
    pub n_completed: usize,
    /// Requests that were good: see [`LoadOptions::ttft_limit`].
    pub n_good: usize,
    /// Failed requests by message.
    pub failed: BTreeMap<String, usize>,
    /// Tokens of all replies.
    pub n_tokens: usize,
    /// Tokens of all prompts sent.
    pub n_prompt_tokens: usize,
    /// Seconds from request to first token.
    pub ttft: Samples,
    /// Seconds between the tokens of a reply; 0 for tokens that arrived together.
    pub gaps: Samples,
    /// Seconds from request to last token.
    pub latency: Samples,
    /// The load over time.
    pub moments: Vec<LoadMoment>,
}

impl LoadReport {
    /// Generated tokens per second.
    pub fn tokens_per_second(&self) -> f64 {
        self.n_tokens as f64 / self.seconds
    }

    /// Completed requests per second.
    pub fn requests_per_second(&self) -> f64 {
        self.n_completed as f64 / self.seconds
    }

    /// Good requests per second.
    pub fn goodput(&self) -> f64 {
        self.n_good as f64 / self.seconds
    }

    /// Number of failed requests.
    pub fn n_failed(&self) -> usize {
        self.failed.values().sum()
    }
}

/// An open request.
struct OpenRequest {
    sent: Instant,
    n_reply: usize,
    n_tokens: usize,
    first: Option<Instant>,
    last: Instant,
}

/// Interval between recorded moments of a load.
const MOMENT: Duration = Duration::from_millis(100);
/// Maximum number of distinct error messages that are kept; further ones count as the last of these.
const MAX_MESSAGES: usize = 8;

/// Sends a load and waits for every reply. `progress` receives the numbers of ended requests; once `cancel` is set, no
/// further request is sent.
pub fn run_load(
    target: &dyn LoadTarget,
    options: &LoadOptions,
    cancel: &AtomicBool,
    mut progress: impl FnMut(usize),
) -> LoadReport {
    let (events, received) = channel();
    let watched = Watched::default();
    let mut run = LoadRun::new(options, &watched);
    let began = Instant::now();
    std::thread::scope(|scope| {
        let watch = scope.spawn(|| watched.watch(target, began));
        run.drive(target, &events, &received, cancel, &mut progress);
        run.report.seconds = began.elapsed().as_secs_f64();
        watched.is_over.store(true, Ordering::Relaxed);
        // The thread only reads the target's state; if that panicked, so does this.
        run.report.moments = watch.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    });
    run.report
}

/// State shared by the thread that records moments and the one that drives the load.
#[derive(Default)]
struct Watched {
    n_tokens: AtomicU64,
    n_open: AtomicU64,
    is_over: AtomicBool,
}

impl Watched {
    fn watch(&self, target: &dyn LoadTarget, began: Instant) -> Vec<LoadMoment> {
        let mut moments = Vec::new();
        let (mut at, mut n_before) = (began, 0);
        loop {
            let is_over = self.is_over.load(Ordering::Relaxed);
            let state = target.state();
            let (now, n_tokens) = (Instant::now(), self.n_tokens.load(Ordering::Relaxed));
            let seconds = (now - at).as_secs_f64();
            if seconds > 0.0 {
                moments.push(LoadMoment {
                    seconds: (now - began).as_secs_f64(),
                    tokens_per_second: (n_tokens - n_before) as f64 / seconds,
                    n_open: self.n_open.load(Ordering::Relaxed) as usize,
                    state,
                });
            }
            if is_over {
                return moments;
            }
            (at, n_before) = (now, n_tokens);
            std::thread::sleep(MOMENT);
        }
    }
}

struct LoadRun<'a> {
    options: &'a LoadOptions,
    watched: &'a Watched,
    rng: fastrand::Rng,
    n_sent: usize,
    n_ended: usize,
    open: BTreeMap<usize, OpenRequest>,
    report: LoadReport,
}

impl<'a> LoadRun<'a> {
    fn new(options: &'a LoadOptions, watched: &'a Watched) -> LoadRun<'a> {
        let none = || Samples(Vec::new());
        let report = LoadReport {
            seconds: 0.0,
            n_completed: 0,
            n_good: 0,
            failed: BTreeMap::new(),
            n_tokens: 0,
            n_prompt_tokens: 0,
            ttft: none(),
            gaps: none(),
            latency: none(),
            moments: Vec::new(),
        };
        let rng = fastrand::Rng::with_seed(options.seed);
        LoadRun { options, watched, rng, n_sent: 0, n_ended: 0, open: BTreeMap::new(), report }
    }

    fn drive(
        &mut self,
        target: &dyn LoadTarget,
        events: &Sender<LoadRecord>,
        received: &Receiver<LoadRecord>,
        cancel: &AtomicBool,
        progress: &mut impl FnMut(usize),
    ) {
        let mut due = Instant::now();
        loop {
            let may_send = self.n_sent < self.options.n_requests && !cancel.load(Ordering::Relaxed);
            let now = Instant::now();
            match self.options.arrivals {
                Arrivals::Clients(n) if may_send && self.open.len() < n.max(1) => {
                    self.send(target, events);
                    continue;
                }
                Arrivals::PerSecond(rate) if may_send && now >= due => {
                    // The times between independent arrivals are exponentially distributed.
                    due += Duration::try_from_secs_f64(-(1.0 - self.rng.f64()).ln() / rate)
                        .unwrap_or(Duration::from_secs(3600));
                    self.send(target, events);
                    continue;
                }
                Arrivals::Clients(_) | Arrivals::PerSecond(_) => {}
            }
            if !may_send && self.open.is_empty() {
                break;
            }
            // Wakes up regularly, to see a cancellation.
            let until = match self.options.arrivals {
                Arrivals::PerSecond(_) if may_send => (due - now).min(MOMENT),
                Arrivals::PerSecond(_) | Arrivals::Clients(_) => MOMENT,
            };
            match received.recv_timeout(until) {
                Ok(record) => {
                    if self.note(record) {
                        self.n_ended += 1;
                        progress(self.n_ended);
                    }
                }
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {}
            }
        }
    }

    fn send(&mut self, target: &dyn LoadTarget, events: &Sender<LoadRecord>) {
        let n_prompt = self.rng.usize(self.options.prompt_tokens.clone());
        let n_reply = self.rng.usize(self.options.reply_tokens.clone());
        let prompt = (0..n_prompt).map(|_| self.rng.u32(self.options.token_ids.clone())).collect();
        let (idx, sent) = (self.n_sent, Instant::now());
        self.n_sent += 1;
        self.report.n_prompt_tokens += n_prompt;
        self.open.insert(idx, OpenRequest { sent, n_reply, n_tokens: 0, first: None, last: sent });
        self.watched.n_open.store(self.open.len() as u64, Ordering::Relaxed);
        target.send(LoadRequest { prompt, n_reply }, RequestProgress { idx, events: events.clone() });
    }

    /// Returns whether the request has ended.
    fn note(&mut self, LoadRecord { idx, at, what }: LoadRecord) -> bool {
        let Some(request) = self.open.get_mut(&idx) else { return false };
        let why = match what {
            Progressed::Tokens(n) => {
                for _ in 0..n {
                    match request.first {
                        None => request.first = Some(at),
                        Some(_) => self.report.gaps.0.push((at - request.last).as_secs_f64()),
                    }
                    request.last = at;
                }
                request.n_tokens += n;
                self.report.n_tokens += n;
                self.watched.n_tokens.fetch_add(n as u64, Ordering::Relaxed);
                return false;
            }
            Progressed::Ended if request.n_tokens == request.n_reply => None,
            Progressed::Ended => Some("the reply has another number of tokens than requested".to_owned()),
            Progressed::Failed(why) => Some(why),
        };
        let ended = self.open.remove(&idx);
        self.watched.n_open.store(self.open.len() as u64, Ordering::Relaxed);
        match (why, ended) {
            (Some(why), _) => {
                let failed = &mut self.report.failed;
                let is_known = failed.contains_key(&why) || failed.len() < MAX_MESSAGES;
                *failed.entry(if is_known { why } else { "other errors".into() }).or_default() += 1;
            }
            (None, Some(request)) => self.complete(&request),
            (None, None) => {}
        }
        true
    }

    fn complete(&mut self, request: &OpenRequest) {
        let report = &mut self.report;
        report.n_completed += 1;
        report.latency.0.push((request.last - request.sent).as_secs_f64());
        let Some(first) = request.first else { return };
        let ttft = first - request.sent;
        report.ttft.0.push(ttft.as_secs_f64());
        let n_gaps = u32::try_from(request.n_tokens.saturating_sub(1)).unwrap_or(u32::MAX);
        let per_token = (request.last - first).checked_div(n_gaps).unwrap_or_default();
        if ttft <= self.options.ttft_limit && per_token <= self.options.token_limit {
            report.n_good += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    /// Replies at once, with one token too few to every fifth request.
    #[derive(Default)]
    struct InstantTarget {
        sent: Mutex<Vec<LoadRequest>>,
        n_open: Mutex<Vec<usize>>,
        held: Mutex<Vec<RequestProgress>>,
        holds: usize,
    }

    impl LoadTarget for InstantTarget {
        fn send(&self, request: LoadRequest, progress: RequestProgress) {
            let mut sent = self.sent.lock().unwrap();
            let n = request.n_reply - usize::from(sent.len() % 5 == 4);
            sent.push(request);
            progress.tokens(n);
            let mut held = self.held.lock().unwrap();
            held.push(progress);
            self.n_open.lock().unwrap().push(held.len());
            if held.len() > self.holds {
                held.drain(..).for_each(RequestProgress::end);
            }
        }

        fn state(&self) -> Option<LoadState> {
            None
        }
    }

    fn options(arrivals: Arrivals) -> LoadOptions {
        LoadOptions {
            arrivals,
            n_requests: 50,
            prompt_tokens: 3..=9,
            reply_tokens: 2..=6,
            token_ids: 10..=20,
            seed: 7,
            ..LoadOptions::default()
        }
    }

    fn run(target: &InstantTarget, options: &LoadOptions) -> LoadReport {
        run_load(target, options, &AtomicBool::new(false), |_| {})
    }

    #[test]
    fn a_load_counts_replies_tokens_and_replies_of_the_wrong_length() {
        let target = InstantTarget::default();
        let report = run(&target, &options(Arrivals::PerSecond(1e6)));
        let sent = target.sent.into_inner().unwrap();
        assert_eq!((report.n_completed, report.n_good, report.n_failed()), (40, 40, 10));
        assert_eq!(report.n_tokens, sent.iter().map(|r| r.n_reply).sum::<usize>() - 10);
        assert_eq!(report.n_prompt_tokens, sent.iter().map(|r| r.prompt.len()).sum::<usize>());
        assert_eq!((report.ttft.0.len(), report.latency.0.len()), (40, 40));
        for request in &sent {
            assert!((3..=9).contains(&request.prompt.len()) && (2..=6).contains(&request.n_reply));
            assert!(request.prompt.iter().all(|id| (10..=20).contains(id)));
        }
        assert!(!report.moments.is_empty());
    }

    #[test]
    fn a_seed_fixes_the_requests_of_a_load() {
        let (a, b) = (InstantTarget::default(), InstantTarget::default());
        run(&a, &options(Arrivals::Clients(3)));
        run(&b, &options(Arrivals::Clients(3)));
        assert_eq!(a.sent.into_inner().unwrap(), b.sent.into_inner().unwrap());
    }

    #[test]
    fn clients_have_one_request_open_each() {
        let target = InstantTarget { holds: 3, ..InstantTarget::default() };
        // The fourth client's request releases all four; the last two of 50 are released by nobody.
        let options = LoadOptions { n_requests: 48, ..options(Arrivals::Clients(4)) };
        let report = run(&target, &options);
        assert_eq!(report.n_completed + report.n_failed(), 48);
        assert_eq!(target.n_open.into_inner().unwrap().into_iter().max(), Some(4));
    }

    #[test]
    fn a_cancelled_load_sends_nothing_more() {
        let target = InstantTarget::default();
        let report = run_load(&target, &options(Arrivals::Clients(2)), &AtomicBool::new(true), |_| {});
        assert_eq!((report.n_completed, report.n_failed()), (0, 0));
        assert!(target.sent.into_inner().unwrap().is_empty());
    }
}
